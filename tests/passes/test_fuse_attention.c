/* fuse_attention on the spellings of exporters and of eager model code, and on graphs that look like attention with a
 * known mask and are not. Each row is run before and after on several patterns of padding; rows of the result that are
 * padding themselves are left aside. */
#include "support_passes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SIZE_BATCH = 3, SIZE_SEQUENCE = 7, MAX_INPUTS = 6 };

typedef struct attention_row {
  const char *title;
  const char *text;
  int64_t causal, window; /* expected; -1: nothing may be fused */
  bool has_padding, has_sinks;
  double softcap;
  int64_t key_heads;
  const char *miss; /* part of the report's nearest miss, or NULL */
} attention_row;

/* ---- pieces of graphs ---- */

#define INPUTS "(float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, int64[B,S] m) => (float[B,4,S,8] y) "
#define NUMBERS                                                                                                    \
  "int64 zero = {0}, int64 one = {1}, int64 four = {4}, int64 three = {3}, int64[1] a0 = {0}, int64[1] a1 = {1}, " \
  "int64[1] a2 = {2}, int64[1] last = {-1}, int64[2] a12 = {1,2}, float nil = {0}, float unit = {1}, "             \
  "float low = {-3.4028234e38}, float s = {0.35355338}, float root = {0.59460354}, float width = {2.828427}, "     \
  "int64[5] repeats = {1,1,2,1,1}, int64[4] heads = {0,4,-1,8}"
#define RANGES \
  "sh = Shape (m) n = Gather (sh, one) r = Range (zero, n, one) i = Unsqueeze (r, a1) j = Unsqueeze (r, a0) "
#define CAUSAL RANGES "c = LessOrEqual (j, i) "
#define PADDING "mb = Cast <to = 9> (m) p = Unsqueeze (mb, a12) "
#define BOTH CAUSAL PADDING "seen = And (c, p) "
#define MASK BOTH "mask = Where (seen, nil, low) "
#define REPEAT(x) x "u = Unsqueeze (" x ", a2) " x "e = Expand (" x "u, repeats) " x "r = Reshape (" x "e, heads) "
#define KEYS REPEAT("k") REPEAT("v") "kt = Transpose <perm = [0,1,3,2]> (kr) "
#define SCORES KEYS "d = MatMul (q, kt) e = Mul (d, s) "
#define REST "g = Softmax <axis = -1> (f) y = MatMul (g, vr) "
#define GRAPH(nodes) INPUTS "<" NUMBERS "> { " nodes "}"
#define GRAPH_WITH(numbers, nodes) INPUTS "<" NUMBERS ", " numbers "> { " nodes "}"

static const attention_row spellings[] = {
    {"eager: one scale, added mask", GRAPH(MASK SCORES "f = Add (e, mask) " REST), 1, 0, true, false, 0, 2, NULL},
    {"mask first, Div by the root of the width",
     GRAPH(MASK KEYS "d = MatMul (q, kt) e = Div (d, width) f = Add (mask, e) " REST), 1, 0, true, false, 0, 2, NULL},
    {"root of the scale on both sides",
     GRAPH(MASK KEYS "qs = Mul (q, root) ks = Mul (root, kt) e = MatMul (qs, ks) f = Add (e, mask) " REST), 1, 0, true,
     false, 0, 2, NULL},
    {"the scale on the queries, NaN guarded",
     GRAPH(MASK KEYS "qs = Div (q, width) e = MatMul (qs, kt) f = Add (e, mask) h = Softmax (f) t = IsNaN (h) "
                     "g = Where (t, nil, h) y = MatMul (g, vr) "),
     1, 0, true, false, 0, 2, NULL},
    {"Where with a boolean mask", GRAPH(BOTH SCORES "f = Where (seen, e, low) " REST), 1, 0, true, false, 0, 2, NULL},
    {"Where with what is hidden", GRAPH(BOTH SCORES "hidden = Not (seen) f = Where (hidden, low, e) " REST), 1, 0, true,
     false, 0, 2, NULL},
    {"two masks, one after the other",
     GRAPH(CAUSAL PADDING SCORES "h = Where (c, e, low) mask = Where (p, nil, low) f = Add (h, mask) " REST), 1, 0,
     true, false, 0, 2, NULL},
    {"keys transposed between reshapes, as PyTorch's decomposition",
     GRAPH_WITH(
         "int64[1] flat = {-1}, int64[1] eight = {8}, int64[1] fours = {4}",
         MASK REPEAT("k") REPEAT(
             "v") "ks = Shape (kr) bs = Shape <start = 0, end = 1> (m) "
                  "ss = Shape <start = 1, end = 2> (m) js = Concat <axis = 0> (flat, ss, eight) jk = Reshape (kr, js) "
                  "tk = Transpose <perm = [0,2,1]> (jk) os = Concat <axis = 0> (bs, fours, eight, ss) "
                  "kt = Reshape (tk, os) qs = Mul (q, root) ks2 = Mul (kt, root) e = MatMul (qs, ks2) "
                  "f = Add (e, mask) " REST),
     1, 0, true, false, 0, 2, NULL},
    {"causal by Trilu, -10000 for hidden keys, no padding",
     GRAPH(SCORES "ss = Shape <start = 1, end = 2> (m) sq = Concat <axis = 0> (ss, ss) "
                  "full = ConstantOfShape <value = float[1] {-10000}> (sq) mask = Trilu <upper = 1> (full, one) "
                  "f = Add (e, mask) " REST),
     1, 0, false, false, 0, 2, NULL},
    {"1 - mask times the lowest number",
     GRAPH(CAUSAL SCORES "mf = Cast <to = 1> (m) w = Sub (unit, mf) pad = Mul (w, low) pads = Unsqueeze (pad, a12) "
                         "cm = Where (c, nil, low) mask = Add (pads, cm) f = Add (e, mask) " REST),
     1, 0, true, false, 0, 2, NULL},
    {"padding alone: an encoder", GRAPH(PADDING SCORES "mask = Where (p, nil, low) f = Add (e, mask) " REST), 0, 0,
     true, false, 0, 2, NULL},
    {"no mask at all", GRAPH(SCORES "f = Identity (e) " REST), 0, 0, false, false, 0, 2, NULL},
    {"a window, j > i - 3",
     GRAPH(BOTH SCORES "b = Sub (i, three) w = Greater (j, b) t = And (seen, w) mask = Where (t, nil, low) "
                       "f = Add (e, mask) " REST),
     1, 3, true, false, 0, 2, NULL},
    {"a window, i - j <= 4",
     GRAPH(BOTH SCORES "b = Sub (i, j) w = LessOrEqual (b, four) t = And (seen, w) f = Where (t, e, low) " REST), 1, 5,
     true, false, 0, 2, NULL},
    {"a window of 4096 is found by putting small numbers in its place",
     GRAPH_WITH("int64 wide = {4096}", BOTH SCORES "b = Sub (i, j) w = Less (b, wide) t = And (seen, w) "
                                                   "f = Where (t, e, low) " REST),
     1, 4096, true, false, 0, 2, NULL},
    {"a window to both sides",
     GRAPH(RANGES PADDING SCORES "b = Sub (i, j) ab = Abs (b) w = Less (ab, three) t = And (w, p) "
                                 "f = Where (t, e, low) " REST),
     0, 3, true, false, 0, 2, NULL},
    {"a soft cap",
     GRAPH_WITH("float cap = {3.0}", MASK SCORES "h = Div (e, cap) t = Tanh (h) w = Mul (t, cap) "
                                                 "f = Add (w, mask) " REST),
     1, 0, true, false, 3.0, 2, NULL},
    {"sinks joined to the scores",
     GRAPH_WITH("float[4] sinks = {0.5, -1.0, 2.0, 0.0}, int64[4] spread = {1,-1,1,1}, int64[1] minus = {-1}",
                MASK SCORES "f = Add (e, mask) z = Reshape (sinks, spread) es = Shape <start = 0, end = 3> (e) "
                            "os = Concat <axis = 0> (es, a1) x = Expand (z, os) cc = Concat <axis = -1> (f, x) "
                            "mx = ReduceMax <keepdims = 1> (cc, last) sb = Sub (cc, mx) g = Softmax <axis = -1> (sb) "
                            "dr = Slice (g, a0, minus, last, a1) y = MatMul (dr, vr) "),
     1, 0, true, true, 0, 2, NULL},
    {"heads repeated by Tile",
     GRAPH(MASK "ku = Unsqueeze (k, a2) ke = Tile (ku, repeats) kr = Reshape (ke, heads) vu = Unsqueeze (v, a2) "
                "ve = Tile (vu, repeats) vr = Reshape (ve, heads) kt = Transpose <perm = [0,1,3,2]> (kr) "
                "d = MatMul (q, kt) e = Mul (d, s) f = Add (e, mask) " REST),
     1, 0, true, false, 0, 2, NULL},
    {"heads repeated by Gather",
     GRAPH_WITH("int64[4] shared = {0,0,1,1}", MASK
                "kr = Gather <axis = 1> (k, shared) vr = Gather <axis = 1> (v, shared) "
                "kt = Transpose <perm = [0,1,3,2]> (kr) d = MatMul (q, kt) e = Mul (d, s) f = Add (e, mask) " REST),
     1, 0, true, false, 0, 2, NULL},
    {"heads repeated by Concat",
     GRAPH(MASK "ku = Unsqueeze (k, a2) ke = Concat <axis = 2> (ku, ku) kr = Reshape (ke, heads) "
                "vu = Unsqueeze (v, a2) ve = Concat <axis = 2> (vu, vu) vr = Reshape (ve, heads) "
                "kt = Transpose <perm = [0,1,3,2]> (kr) d = MatMul (q, kt) e = Mul (d, s) f = Add (e, mask) " REST),
     1, 0, true, false, 0, 2, NULL},
    {"casts to double around the Softmax, dropout that does nothing",
     GRAPH_WITH("float ratio = {0.1}, bool training = {0}",
                MASK SCORES "f = Add (e, mask) f2 = Cast <to = 11> (f) h = Softmax <axis = 3> (f2) "
                            "h2 = Cast <to = 1> (h) g = Dropout (h2, ratio, training) y = MatMul (g, vr) "),
     1, 0, true, false, 0, 2, NULL},
    {"standard Attention, boolean mask, repeated heads",
     GRAPH(BOTH KEYS "y = Attention <scale = 0.3> (q, kr, vr, seen) "), 1, 0, true, false, 0, 2, NULL},
    {"standard Attention, added mask", GRAPH(MASK "y = Attention (q, k, v, mask) "), 1, 0, true, false, 0, 2, NULL},
    {"standard Attention, causal by attribute, padding by mask",
     GRAPH(PADDING "y = Attention <is_causal = 1, softcap = 5.0> (q, k, v, p) "), 1, 0, true, false, 5.0, 2, NULL},
    {"standard Attention, a window by attributes",
     GRAPH("y = Attention <is_causal = 1, left_window_size = 2> (q, k, v) "), 1, 3, false, false, 0, 2, NULL},
    {"standard Attention, a window by attributes to both sides",
     GRAPH("y = Attention <left_window_size = 2, right_window_size = 2> (q, k, v) "), 0, 3, false, false, 0, 2, NULL},
    {"standard Attention of 3 dimensions",
     "(float[B,S,32] q, float[B,S,16] k, float[B,S,16] v, int64[B,S] m) => (float[B,S,32] y) <" NUMBERS "> { " BOTH
     "y = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v, seen) }",
     1, 0, true, false, 0, 2, NULL},
    {"values of another width",
     "(float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,5] v, int64[B,S] m) => (float[B,2,S,5] y) <" NUMBERS "> { " MASK
     "kt = Transpose <perm = [0,1,3,2]> (k) d = MatMul (q, kt) e = Mul (d, s) f = Add (e, mask) "
     "g = Softmax <axis = -1> (f) y = MatMul (g, v) }",
     1, 0, true, false, 0, 2, NULL},
    {"one key head for all",
     "(float[B,4,S,8] q, float[B,1,S,8] k, float[B,1,S,8] v, int64[B,S] m) => (float[B,4,S,8] y) <" NUMBERS "> { " MASK
     "kt = Transpose <perm = [0,1,3,2]> (k) d = MatMul (q, kt) e = Mul (d, s) f = Add (e, mask) "
     "g = Softmax <axis = -1> (f) y = MatMul (g, v) }",
     1, 0, true, false, 0, 1, NULL},
    {"a window of floats",
     GRAPH_WITH("float wide = {300.5}", CAUSAL SCORES "b = Sub (i, j) bf = Cast <to = 1> (b) w = Less (bf, wide) "
                                                      "t = And (c, w) f = Where (t, e, low) " REST),
     1, 301, false, false, 0, 2, NULL},
    {"a table of 20 x 20, as old models keep",
     GRAPH_WITH("int64 top = {20}, int64[1] twenty = {20}", SCORES
                "z = Range (zero, top, one) zi = Unsqueeze (z, a1) zj = Unsqueeze (z, a0) "
                "table = LessOrEqual (zj, zi) n1 = Shape <start = 1, end = 2> (m) n2 = Concat <axis = 0> (n1, n1) "
                "z2 = Concat <axis = 0> (a0, a0) axes = Concat <axis = 0> (a0, a1) "
                "c = Slice (table, z2, n2, axes) f = Where (c, e, low) " REST),
     1, 0, false, false, 0, 2, NULL},
    {"a mask that is expanded to all heads, and a floor under the scores",
     GRAPH(MASK SCORES "es = Shape (e) me = Expand (mask, es) f0 = Add (e, me) f = Max (f0, low) " REST), 1, 0, true,
     false, 0, 2, NULL},
    {"batch and heads joined for the products",
     GRAPH_WITH(
         "int64[1] flat = {-1}, int64[1] eight = {8}, int64[1] fours = {4}",
         MASK REPEAT("k") REPEAT(
             "v") "bs = Shape <start = 0, end = 1> (m) ss = Shape <start = 1, end = 2> (m) "
                  "js = Concat <axis = 0> (flat, ss, eight) sq = Concat <axis = 0> (flat, ss, ss) "
                  "s4 = Concat <axis = 0> (bs, fours, ss, ss) o4 = Concat <axis = 0> (bs, fours, ss, eight) "
                  "q3 = Reshape (q, js) k3 = Reshape (kr, js) v3 = Reshape (vr, js) kt = Transpose <perm = [0,2,1]> "
                  "(k3) "
                  "qs = Mul (q3, s) d = MatMul (qs, kt) e = Reshape (d, s4) f = Add (e, mask) f3 = Reshape (f, sq) "
                  "g = Softmax <axis = -1> (f3) y3 = MatMul (g, v3) y = Reshape (y3, o4) "),
     1, 0, true, false, 0, 2, NULL},
    {"rows without keys are opened again",
     GRAPH(BOTH SCORES "t = Cast <to = 6> (seen) mx = ReduceMax <keepdims = 1> (t, last) any = Cast <to = 9> (mx) "
                       "none = Not (any) u = Or (seen, none) mask = Where (u, nil, low) f = Add (e, mask) " REST),
     1, 0, true, false, 0, 2, NULL},
};

static const attention_row misses[] = {
    {"the mask is open at one place of one row",
     GRAPH(BOTH SCORES "t2 = Equal (i, three) t4 = Equal (j, four) hole = And (t2, t4) open = Or (seen, hole) "
                       "mask = Where (open, nil, low) f = Add (e, mask) " REST),
     -1, 0, false, false, 0, 0, "query 3 sees key 4"},
    {"a query does not see itself",
     GRAPH(RANGES SCORES "c = Less (j, i) mask = Where (c, nil, low) f = Add (e, mask) " REST), -1, 0, false, false, 0,
     0, "does not see"},
    {"a window that is off by one in one row",
     GRAPH(CAUSAL SCORES "d2 = Sub (i, j) lim = Equal (i, four) li = Cast <to = 7> (lim) wd = Add (three, li) "
                         "w = Less (d2, wd) t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "in a window"},
    {"the mask sees the future alone",
     GRAPH(RANGES SCORES "c = GreaterOrEqual (j, i) mask = Where (c, nil, low) f = Add (e, mask) " REST), -1, 0, false,
     false, 0, 0, "the mask is not"},
    {"hidden keys weigh something",
     GRAPH_WITH("float small = {-5.0}", BOTH SCORES "mask = Where (seen, nil, small) f = Add (e, mask) " REST), -1, 0,
     false, false, 0, 0, "holds -5"},
    {"a bias beside the mask: ALiBi",
     GRAPH(MASK SCORES "dist = Sub (j, i) df = Cast <to = 1> (dist) bias = Mul (df, s) f1 = Add (e, mask) "
                       "f = Add (f1, bias) " REST),
     -1, 0, false, false, 0, 0, "neither shows nor hides"},
    {"Softmax over the queries", GRAPH(MASK SCORES "f = Add (e, mask) g = Softmax <axis = 2> (f) y = MatMul (g, vr) "),
     -1, 0, false, false, 0, 0, "not over the keys"},
    {"a scale for each head",
     GRAPH_WITH("float[4,1,1] own = {1, 2, 3, 4}",
                MASK KEYS "d = MatMul (q, kt) e = Mul (d, own) f = Add (e, mask) " REST),
     -1, 0, false, false, 0, 0, "no single number"},
    {"the padding of one row of the batch for all",
     GRAPH(CAUSAL "mb = Cast <to = 9> (m) m0 = Gather (mb, zero) p = Unsqueeze (m0, a0) seen = And (c, p) "
                  "mask = Where (seen, nil, low) " SCORES "f = Add (e, mask) " REST),
     -1, 0, false, false, 0, 0, "the mask"},
    {"a window of 4096 that is cut off at 2048",
     GRAPH_WITH("int64 wide = {4096}, int64 less = {2048}",
                CAUSAL SCORES "w0 = Min (wide, less) b = Sub (i, j) w = Less (b, w0) t = And (c, w) "
                              "f = Where (t, e, low) " REST),
     1, 2048, false, false, 0, 2, NULL},
    {"the sink's column is kept by the values",
     GRAPH_WITH("float[4] sinks = {0.5, -1.0, 2.0, 0.0}, int64[4] spread = {1,-1,1,1}, int64[1] minus = {-1}",
                MASK SCORES "f = Add (e, mask) z = Reshape (sinks, spread) es = Shape <start = 0, end = 3> (e) "
                            "os = Concat <axis = 0> (es, a1) x = Expand (z, os) cc = Concat <axis = -1> (f, x) "
                            "g = Softmax <axis = -1> (cc) vs = Shape (vr) one_row = Slice (vr, a0, a1, a2) "
                            "vv = Concat <axis = 2> (vr, one_row) y = MatMul (g, vv) "),
     -1, 0, false, false, 0, 0, "column is kept"},
    {"a sink for each query",
     GRAPH_WITH("int64[1] minus = {-1}",
                MASK SCORES "f = Add (e, mask) z = ReduceMax <keepdims = 1> (d, last) cc = Concat <axis = -1> (f, z) "
                            "g = Softmax <axis = -1> (cc) dr = Slice (g, a0, minus, last, a1) y = MatMul (dr, vr) "),
     -1, 0, false, false, 0, 0, "differs between queries"},
    {"key heads in another order: keys are tiled, not repeated",
     GRAPH_WITH("int64[4] tiled = {0,1,0,1}", MASK
                "kr = Gather <axis = 1> (k, tiled) vr = Gather <axis = 1> (v, tiled) "
                "kt = Transpose <perm = [0,1,3,2]> (kr) d = MatMul (q, kt) e = Mul (d, s) f = Add (e, mask) " REST),
     1, 0, true, false, 0, 4, NULL},
    {"a mask that depends on the queries", GRAPH(SCORES "t = Greater (e, nil) f = Where (t, e, low) " REST), -1, 0,
     false, false, 0, 0, "depends on the input"},
    {"chunks of 64 positions, divided as floats",
     GRAPH_WITH("float chunk = {64}",
                CAUSAL SCORES "fi = Cast <to = 1> (i) fj = Cast <to = 1> (j) di = Div (fi, chunk) "
                              "dj = Div (fj, chunk) wi = Floor (di) wj = Floor (dj) "
                              "w = Equal (wi, wj) t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask is not causal"},
    {"a mask that differs between heads",
     GRAPH_WITH("int64[4,1,1] widths = {2, 3, 3, 3}",
                CAUSAL SCORES "b = Sub (i, j) w = Less (b, widths) t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "differs between heads"},
    {"33 first keys beside a window of 30: seen beyond 63 positions alone",
     GRAPH_WITH("int64 wide = {30}, int64 first = {33}",
                CAUSAL SCORES "b = Sub (i, j) w0 = Less (b, wide) w1 = Less (j, first) w = Or (w0, w1) t = And (c, w) "
                              "f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask"},
    {"padding that is hidden beyond 20 positions alone",
     GRAPH_WITH("int64 wide = {20}", CAUSAL PADDING SCORES "b = Sub (i, j) w0 = Less (b, wide) w = Or (w0, p) "
                                                           "t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask"},
    {"chunks of 4096 beside a window of 64",
     GRAPH_WITH("int64 chunk = {4096}, int64 wide = {64}",
                CAUSAL SCORES "wi = Div (i, chunk) wj = Div (j, chunk) w0 = Equal (wi, wj) b = Sub (i, j) "
                              "w1 = Less (b, wide) w = Or (w0, w1) t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask"},
    {"two windows too long to be run, one wider than the other",
     GRAPH_WITH("int64 wide = {4096}, int64 wider = {9000}",
                CAUSAL SCORES "b = Sub (i, j) w0 = Less (b, wide) w1 = Less (b, wider) w = Or (w0, w1) t = And (c, w) "
                              "f = Where (t, e, low) " REST),
     1, 9000, false, false, 0, 2, NULL},
    {"chunks of 8192 positions",
     GRAPH_WITH("int64 chunk = {8192}", CAUSAL SCORES "wi = Div (i, chunk) wj = Div (j, chunk) w = Equal (wi, wj) "
                                                      "t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask"},
    {"a window with the first keys always open",
     GRAPH_WITH("int64 wide = {4096}", CAUSAL SCORES "b = Sub (i, j) w0 = Less (b, wide) w1 = Less (j, four) "
                                                     "w = Or (w0, w1) t = And (c, w) f = Where (t, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask"},
    {"a mask before the soft cap", GRAPH(MASK SCORES "h = Add (e, mask) t = Tanh (h) f = Mul (t, width) " REST), -1, 0,
     false, false, 0, 0, "before the soft cap"},
    {"the mask of every second query",
     GRAPH_WITH("int64 two = {2}", BOTH SCORES "md = Mod (i, two) ev = Equal (md, zero) t = Or (c, ev) u = And (t, p) "
                                               "f = Where (u, e, low) " REST),
     -1, 0, false, false, 0, 0, "the mask is not"},
};

/* ---- running ---- */

static bool is_valid(unsigned pattern, int64_t batch, int64_t key) {
  switch (pattern) {
  case 1:
    return key < SIZE_SEQUENCE - batch;
  case 2:
    return key >= batch;
  case 3:
    return (key + batch) % 3 != 1;
  default:
    return true;
  }
}

static void make_inputs(pass_fixture *fixture, unsigned pattern, egi_tensor *inputs) {
  const egi_graph *graph = fixture->graph;
  egi_dims *dims = fixture->module->dims;
  const egi_binding bindings[2] = {{egi_dim_symbol(dims, "B"), SIZE_BATCH}, {egi_dim_symbol(dims, "S"), SIZE_SEQUENCE}};
  assert_true(graph->n_inputs <= MAX_INPUTS);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    inputs[i] = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
    for (int d = 0; d < value->rank; d++)
      assert_true(egi_dim_evaluate(dims, value->dims[d], bindings, 2, &inputs[i].dims[d]));
    egi_tensor_set_contiguous(&inputs[i]);
    int64_t count = egi_tensor_count(&inputs[i]);
    inputs[i].data = EGI_NEW(&fixture->arena, double, (size_t)count);
    assert_non_null(inputs[i].data);
    for (int64_t k = 0; k < count; k++) {
      if (value->dtype == EG_DTYPE_F32)
        ((float *)inputs[i].data)[k] = (float)egi_random_normal(3, i, (uint64_t)k);
      else
        ((int64_t *)inputs[i].data)[k] = is_valid(pattern, k / SIZE_SEQUENCE, k % SIZE_SEQUENCE);
    }
  }
}

static egi_tensor evaluate(pass_fixture *fixture, const attention_row *row, const egi_tensor *inputs) {
  egi_tensor output;
  const egi_evaluator *evaluator = egi_evaluator_cpu();
  if (evaluator->graph(fixture->ctx, fixture->graph, inputs, &fixture->arena, &output) != EG_OK)
    fail_msg("%s: %s", row->title, eg_context_error(fixture->ctx));
  return output;
}

/* The query that an element of [batch, heads, sequence, width] or [batch, sequence, width] belongs to. */
static int64_t query_of(const egi_tensor *tensor, int64_t i) {
  int64_t width = tensor->dims[tensor->rank - 1];
  return i / width % SIZE_SEQUENCE;
}

static void compare(const attention_row *row, unsigned pattern, const egi_tensor *before, const egi_tensor *after) {
  int64_t count = egi_tensor_count(before);
  assert_int_equal(count, egi_tensor_count(after));
  for (int64_t i = 0; i < count; i++) {
    int64_t batch = i / (count / SIZE_BATCH);
    double a = (double)((const float *)before->data)[i], b = (double)((const float *)after->data)[i];
    if (row->has_padding && !is_valid(pattern, batch, query_of(before, i))) continue;
    if (!(fabs(a - b) <= 2e-6 * (1 + fabs(a))))
      fail_msg("%s, padding %u: element %d is %.9g, was %.9g", row->title, pattern, (int)i, b, a);
  }
}

static const egi_node *find_node(const egi_graph *graph, egi_op op) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op == op) return &graph->nodes[id];
  return NULL;
}

static void check_node(pass_fixture *fixture, const attention_row *row) {
  const egi_node *node = find_node(fixture->graph, EGI_OP_MaskedAttention);
  int64_t heads = 0;
  assert_non_null(node);
  if (egi_node_int(node, "causal", 0) != row->causal || egi_node_int(node, "window", 0) != row->window)
    fail_msg("%s: causal %d, window %d", row->title, (int)egi_node_int(node, "causal", 0),
             (int)egi_node_int(node, "window", 0));
  assert_int_equal(node->n_inputs > 3 && node->inputs[3] != 0, row->has_padding);
  assert_int_equal(node->n_inputs > 4 && node->inputs[4] != 0, row->has_sinks);
  assert_true(fabs((double)egi_node_float(node, "softcap", 0) - row->softcap) < 1e-6);
  assert_true(egi_dim_value(fixture->module->dims, fixture->graph->values[node->inputs[1]].dims[1], &heads));
  if (heads != row->key_heads) fail_msg("%s: %d key heads", row->title, (int)heads);
  assert_int_equal(pass_count(fixture, EGI_OP_Softmax) + pass_count(fixture, EGI_OP_Attention), 0);
}

static void check_row(pass_fixture *fixture, const attention_row *row) {
  egi_tensor inputs[4][MAX_INPUTS], before[4];
  egi_pass_report report = {0};
  egi_pass_run run = {.ctx = fixture->ctx, .report = &report};
  pass_graph(fixture, row->text);
  pass_run(fixture, "fold_constants,fold_shapes,eliminate_identity", NULL);
  for (unsigned pattern = 0; pattern < 4; pattern++) {
    make_inputs(fixture, pattern, inputs[pattern]);
    before[pattern] = evaluate(fixture, row, inputs[pattern]);
  }
  if (egi_pass_fuse_attention(&run, fixture->graph) != EG_OK || egi_graph_tidy(fixture->graph) != EG_OK ||
      egi_graph_verify(fixture->graph) != EG_OK)
    fail_msg("%s: %s", row->title, eg_context_error(fixture->ctx));
  if (report.n_matched != (row->causal >= 0))
    fail_msg("%s: %u of %u matched; %s", row->title, report.n_matched, report.n_tried,
             report.nearest_miss ? report.nearest_miss : "no miss");
  if (row->causal >= 0) check_node(fixture, row);
  for (unsigned pattern = 0; pattern < 4; pattern++) {
    egi_tensor after = evaluate(fixture, row, inputs[pattern]);
    compare(row, pattern, &before[pattern], &after);
  }
  if (row->miss && (!report.nearest_miss || !strstr(report.nearest_miss, row->miss)))
    fail_msg("%s: the nearest miss is \"%s\", without \"%s\"", row->title,
             report.nearest_miss ? report.nearest_miss : "", row->miss);
  run.has_changed = false;
  if (egi_pass_fuse_attention(&run, fixture->graph) != EG_OK || run.has_changed)
    fail_msg("%s: a second run changes the graph", row->title);
}

static void spellings_become_one_attention(void **state) {
  for (size_t i = 0; i < EGI_COUNT(spellings); i++) check_row(*state, &spellings[i]);
}

static void near_misses_stay_or_keep_what_differs(void **state) {
  for (size_t i = 0; i < EGI_COUNT(misses); i++) check_row(*state, &misses[i]);
}

/* A mask that is none of the known ones stays with the operator, the repeated heads do not. */
static void an_unknown_mask_stays_with_the_operator(void **state) {
  static const attention_row row = {"",
                                    GRAPH(MASK SCORES "dist = Sub (j, i) df = Cast <to = 1> (dist) b = Mul (df, s) "
                                                      "w = Add (mask, b) y = Attention (q, kr, vr, w) "),
                                    -1,
                                    0,
                                    false,
                                    false,
                                    0,
                                    0,
                                    "neither shows nor hides"};
  pass_fixture *fixture = *state;
  egi_tensor inputs[MAX_INPUTS];
  pass_graph(fixture, row.text);
  make_inputs(fixture, 1, inputs);
  egi_tensor before = evaluate(fixture, &row, inputs);
  pass_run(fixture, "fuse_attention", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_Attention), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Expand), 0);
  egi_tensor after = evaluate(fixture, &row, inputs);
  compare(&row, 1, &before, &after);
}

/* A mask by positions is that of rows that begin at 0: a run on any positions keeps it. */
static void masks_that_follow_positions_are_general_no_more(void **state) {
  static const char text[] =
      "(float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, int64[B,S] position_ids) => (float[B,2,S,8] y) <" NUMBERS
      "> { i = Unsqueeze (position_ids, a2) j = Unsqueeze (position_ids, a1) c = LessOrEqual (j, i) "
      "seen = Unsqueeze (c, a1) y = Attention (q, k, v, seen) }";
  pass_fixture *fixture = *state;
  for (int general = 0; general < 2; general++) {
    egi_pass_report report = {0};
    egi_pass_run run = {.ctx = fixture->ctx, .report = &report, .is_general = general};
    pass_graph(fixture, text);
    assert_int_equal(egi_pass_fuse_attention(&run, fixture->graph), EG_OK);
    assert_int_equal(report.n_matched, !general);
    assert_int_equal(fixture->module->assumes_positions, !general);
  }
}

/* Layers with and without a window, the same masks for many: proved once, in linear time. */
static void many_layers_share_their_proofs(void **state) {
  enum { LAYERS = 64 };
  pass_fixture *fixture = *state;
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  egi_text_add(&text, "(float[B,2,S,8] x0, int64[B,S] m) => (float[B,2,S,8] x64) <" NUMBERS "> { " BOTH
                      "b = Sub (i, three) w = Greater (j, b) t = And (seen, w) ");
  for (int layer = 0; layer < LAYERS; layer++)
    egi_text_format(&text, "x%d = Attention (x%d, x%d, x%d, %s) ", layer + 1, layer, layer, layer,
                    layer % 2 ? "seen" : "t");
  egi_text_add(&text, "}");
  pass_graph(fixture, egi_text_string(&text));
  egi_text_free(&text);
  pass_run(fixture, "fuse_attention", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_MaskedAttention), LAYERS);
  unsigned n_windows = 0;
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++)
    n_windows += egi_node_int(&fixture->graph->nodes[id], "window", 0) == 3;
  assert_int_equal(n_windows, LAYERS / 2);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(spellings_become_one_attention),          TEST(near_misses_stay_or_keep_what_differs),
      TEST(an_unknown_mask_stays_with_the_operator), TEST(masks_that_follow_positions_are_general_no_more),
      TEST(many_layers_share_their_proofs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
