/* RotaryEmbedding out of the plain operators that rotate queries and keys by position (arXiv:2104.09864), as in ONNX
 * RotaryEmbedding-23: halves or interleaved pairs, the whole head or its first part, heads before or behind the
 * sequence. Precondition: inferred. Tables may be scaled, of full width (proven to hold each number twice) or of half
 * the width, computed or gathered by position. */
#include <string.h>

#include "passes/rotary.h"

/* Two parts of x: the halves, or even and odd elements; by Slice with and without steps. */
#define SLICES "a = Slice (x, s0, e0, a0, t0) b = Slice (x, s1, e1, a1, t1) "
#define SHORT_SLICES "a = Slice (x, s0, e0, a0) b = Slice (x, s1, e1, a1) "
#define SPLIT "a, b = Split <axis = -1> (x, parts) "
#define EVEN_SPLIT "a, b = Split <axis = -1> (x) "
/* Pairs as rows of two. */
#define GATHERS "r = Reshape (x, rows) a = Gather <axis = -1> (r, first) b = Gather <axis = -1> (r, second) "
#define ROW_SLICES                                                                                         \
  "r = Reshape (x, rows) c = Slice (r, s0, e0, a0, t0) d = Slice (r, s1, e1, a1, t1) a = Squeeze (c, z0) " \
  "b = Squeeze (d, z1) "
#define ROW_SPLIT "r = Reshape (x, rows) c, d = Split <axis = -1> (r, parts) a = Squeeze (c, z0) b = Squeeze (d, z1) "
#define EVEN_ROW_SPLIT "r = Reshape (x, rows) c, d = Split <axis = -1> (r) a = Squeeze (c, z0) b = Squeeze (d, z1) "

#define SLICE_NAMES "s0, e0, a0, t0, s1, e1, a1, t1"
#define SHORT_NAMES "s0, e0, a0, s1, e1, a1"
#define ROW_NAMES "rows, z0, z1"

/* x · cos + (-b, a) · sin */
#define TURNED "n = Neg (b) t = Concat <axis = -1> (n, a) "
#define STACKED \
  "n = Neg (b) v = Unsqueeze (n, u0) w = Unsqueeze (a, u1) k = Concat <axis = -1> (v, w) t = Reshape (k, shape) "
#define SUM "p = Mul (x, cos) q = Mul (t, sin) y = Add (p, q) }"
/* (a · cos - b · sin, b · cos + a · sin) */
#define ROTATED \
  "ac = Mul (a, cos) bs = Mul (b, sin) f = Sub (ac, bs) bc = Mul (b, cos) as = Mul (a, sin) g = Add (bc, as) "
#define JOINED "y = Concat <axis = -1> (f, g) }"
#define STACK "v = Unsqueeze (f, u0) w = Unsqueeze (g, u1) k = Concat <axis = -1> (v, w) y = Reshape (k, shape) }"

#define FORM(names, parts, rest) "(x, cos, sin, " names ") => (y) { " parts rest

static const char *const halves[] = {
    FORM(SLICE_NAMES, SLICES, TURNED SUM),
    FORM(SHORT_NAMES, SHORT_SLICES, TURNED SUM),
    FORM("parts", SPLIT, TURNED SUM),
    "(x, cos, sin) => (y) { " EVEN_SPLIT TURNED SUM,
};

static const char *const half_tables[] = {
    FORM(SLICE_NAMES, SLICES, ROTATED JOINED),
    FORM(SHORT_NAMES, SHORT_SLICES, ROTATED JOINED),
    FORM("parts", SPLIT, ROTATED JOINED),
    "(x, cos, sin) => (y) { " EVEN_SPLIT ROTATED JOINED,
};

static const char *const pairs[] = {
    FORM(SLICE_NAMES ", u0, u1, shape", SLICES, STACKED SUM),
    FORM("rows, first, second, u0, u1, shape", GATHERS, STACKED SUM),
    FORM(ROW_NAMES ", " SLICE_NAMES ", u0, u1, shape", ROW_SLICES, STACKED SUM),
    FORM(ROW_NAMES ", parts, u0, u1, shape", ROW_SPLIT, STACKED SUM),
    FORM(ROW_NAMES ", u0, u1, shape", EVEN_ROW_SPLIT, STACKED SUM),
};

static const char *const pair_tables[] = {
    FORM(SLICE_NAMES ", u0, u1, shape", SLICES, ROTATED STACK),
    FORM("rows, first, second, u0, u1, shape", GATHERS, ROTATED STACK),
    FORM(ROW_NAMES ", " SLICE_NAMES ", u0, u1, shape", ROW_SLICES, ROTATED STACK),
    FORM(ROW_NAMES ", parts, u0, u1, shape", ROW_SPLIT, ROTATED STACK),
    FORM(ROW_NAMES ", u0, u1, shape", EVEN_ROW_SPLIT, ROTATED STACK),
};

/* Two values that are no halves of one: DeepSeek's even and odd elements, which stay apart. */
static const char *const apart[] = {
    "(a, b, cos, sin) => (y) { " ROTATED JOINED,
};
/* The same, joined at once with what is not rotated. */
static const char *const apart_behind[] = {
    "(a, b, rest, cos, sin) => (y) { " ROTATED "y = Concat <axis = -1> (rest, f, g) }",
};
static const char *const apart_before[] = {
    "(a, b, rest, cos, sin) => (y) { " ROTATED "y = Concat <axis = -1> (f, g, rest) }",
};

/* The first part of each head is rotated, the rest goes on as it is. */
#define TURN "y0 = RotaryEmbedding <interleaved: int = @interleaved, rotary_embedding_dim = 0> (a, cos, sin) "
#define TURN_ASIDE                                                                                   \
  "a2 = Transpose <perm = [0, 2, 1, 3]> (a) "                                                        \
  "y2 = RotaryEmbedding <interleaved: int = @interleaved, rotary_embedding_dim = 0> (a2, cos, sin) " \
  "y0 = Transpose <perm = [0, 2, 1, 3]> (y2) "
#define BEHIND "y = Concat <axis = -1> (y0, b) }"

static const char *const parts[] = {
    FORM(SLICE_NAMES, SLICES, TURN BEHIND),
    FORM(SHORT_NAMES, SHORT_SLICES, TURN BEHIND),
    FORM("parts", SPLIT, TURN BEHIND),
};

static const char *const parts_aside[] = {
    FORM(SLICE_NAMES, SLICES, TURN_ASIDE BEHIND),
    FORM(SHORT_NAMES, SHORT_SLICES, TURN_ASIDE BEHIND),
    FORM("parts", SPLIT, TURN_ASIDE BEHIND),
};

/* ---- the two parts --------------------------------------------------------------------------------------------- */

static bool read_integer(const egi_match *match, const char *letter, unsigned index, int64_t *out) {
  const char name[3] = {letter[0], (char)('0' + index), '\0'};
  uint32_t count = 0;
  egi_value_id value = egi_match_source(match, name);
  if (value == 0) return false;
  return egi_value_integers(egi_match_graph(match), value, out, 1, &count) && count == 1;
}

/* Slice number `index` of `data` takes [start, end) of the last axis of `size`, every step-th element. */
static bool slice_takes(const egi_match *match, unsigned index, const char *data, const int64_t wanted[3]) {
  int64_t size = 0, start = 0, end = 0, axis = 0, step = 1;
  if (!egi_match_size(match, data, 1, &size) || !read_integer(match, "s", index, &start) ||
      !read_integer(match, "e", index, &end) || !read_integer(match, "a", index, &axis))
    return false;
  int rank = egi_match_graph(match)->values[egi_match_value(match, data)].rank;
  if (egi_match_value(match, index == 0 ? "t0" : "t1") != 0 && !read_integer(match, "t", index, &step)) return false;
  if (start < 0) start += size;
  if (end < 0) end += size;
  if (end > size) end = size;
  return (axis == -1 || axis == rank - 1) && start == wanted[0] && end == wanted[1] && step == wanted[2];
}

/* a and b are the first `first` elements of the last axis and the rest. */
static bool cuts_at(const egi_match *match, int64_t first) {
  int64_t size = 0, a = 0, b = 0;
  if (!egi_match_size(match, "x", 1, &size) || !egi_match_size(match, "a", 1, &a) || !egi_match_size(match, "b", 1, &b))
    return false;
  if (a != first || a + b != size) return false;
  if (egi_match_value(match, "s0") == 0) return true; /* Split keeps the order */
  const int64_t low[3] = {0, first, 1}, high[3] = {first, size, 1};
  return slice_takes(match, 0, "x", low) && slice_takes(match, 1, "x", high);
}

static bool is_index(const egi_match *match, const char *name, double wanted) {
  double number = 0.0;
  return egi_match_scalar(match, name, &number) && (number == wanted || (wanted == 1.0 && number == -1.0));
}

/* x as rows of two: [.., size / 2, 2]. */
static bool has_rows_of_two(const egi_match *match) {
  const egi_graph *graph = egi_match_graph(match);
  const egi_value *x = &graph->values[egi_match_value(match, "x")], *r = &graph->values[egi_match_value(match, "r")];
  int64_t size = 0, half = 0, two = 0;
  return egi_match_size(match, "x", 1, &size) && egi_match_size(match, "r", 2, &half) &&
         egi_match_size(match, "r", 1, &two) && r->rank == x->rank + 1 && two == 2 && 2 * half == size;
}

/* a and b are the even and the odd elements. */
static bool takes_turns(const egi_match *match) {
  int64_t size = 0, c = 0, d = 0;
  if (!egi_match_size(match, "x", 1, &size) || size % 2 != 0) return false;
  if (egi_match_value(match, "r") == 0) {
    const int64_t even[3] = {0, size, 2}, odd[3] = {1, size, 2};
    return slice_takes(match, 0, "x", even) && slice_takes(match, 1, "x", odd);
  }
  if (!has_rows_of_two(match)) return false;
  if (egi_match_value(match, "first") != 0) return is_index(match, "first", 0.0) && is_index(match, "second", 1.0);
  if (!egi_match_is_last_axis(match, "z0", "c") || !egi_match_is_last_axis(match, "z1", "d")) return false;
  if (egi_match_value(match, "s0") == 0)
    return egi_match_size(match, "c", 1, &c) && egi_match_size(match, "d", 1, &d) && c == 1 && d == 1;
  const int64_t left[3] = {0, 1, 1}, right[3] = {1, 2, 1};
  return slice_takes(match, 0, "r", left) && slice_takes(match, 1, "r", right);
}

/* The pairs are put side by side behind the last axis, and then in a row. */
static bool is_stacked(const egi_match *match) {
  const egi_graph *graph = egi_match_graph(match);
  const char *whole = egi_match_value(match, "t") != 0 ? "t" : "y";
  return egi_match_is_last_axis(match, "u0", "v") && egi_match_is_last_axis(match, "u1", "w") &&
         egi_same_shape(graph, egi_match_value(match, "x"), egi_match_value(match, whole));
}

/* ---- checks ---------------------------------------------------------------------------------------------------- */

/* `of` names a value with the batch and the sequence of what is rotated; a table has `size` elements a position. */
static bool finish(egi_match *match, const char *of, int64_t size, egi_rotary_layout layout, egi_rotary_width width) {
  egi_rotary_tables *tables = egi_match_userdata(match);
  egi_value_id x = egi_match_value(match, of);
  static const char *const names[2] = {"cos", "sin"}, *const bound[2] = {"cosines", "sines"};
  for (unsigned i = 0; i < 2; i++) {
    egi_value_id table = egi_match_value(match, names[i]);
    if (!egi_rotary_table_fits(tables, table, x, layout, size))
      return egi_match_refuse(match, "a table does not vary by position and element alone");
    if (!egi_rotary_table_is_repeated(tables, table, width))
      return egi_match_refuse(match, "a table is not proven to hold each angle twice");
  }
  for (unsigned i = 0; i < 2; i++) {
    egi_value_id table = egi_match_value(match, names[i]);
    egi_match_bind(match, bound[i], egi_rotary_table(tables, egi_match_emitter(match), table, x, layout, width));
  }
  return true;
}

/* Heads of floats with at least one pair. */
static bool can_rotate(egi_match *match, const char *name, int64_t smallest) {
  const egi_value *value = &egi_match_graph(match)->values[egi_match_value(match, name)];
  int64_t size = 0;
  if (!egi_dtype_is_float(value->dtype) || value->rank != 4)
    return egi_match_refuse(match, "what is rotated are no heads of floats");
  return (egi_match_size(match, name, 1, &size) && size >= smallest) ||
         egi_match_refuse(match, "the size of a head is not a known number");
}

static bool check_halves(egi_match *match, egi_rotary_layout layout, egi_rotary_width width) {
  int64_t size = 0;
  if (!can_rotate(match, "x", 2)) return false;
  if (!egi_match_size(match, "x", 1, &size) || size % 2 != 0 || !cuts_at(match, size / 2))
    return egi_match_refuse(match, "the parts are not the two halves");
  const egi_attribute interleaved = egi_attribute_int("interleaved", 0);
  return egi_match_set(match, &interleaved) &&
         finish(match, "x", width == EGI_ROTARY_SINGLE ? size / 2 : size, layout, width);
}

static bool check_apart(egi_match *match, egi_rotary_layout layout, egi_rotary_width width) {
  const egi_graph *graph = egi_match_graph(match);
  int64_t size = 0;
  if (!can_rotate(match, "a", 1)) return false;
  if (!egi_match_size(match, "a", 1, &size) ||
      !egi_same_shape(graph, egi_match_value(match, "a"), egi_match_value(match, "b")))
    return egi_match_refuse(match, "the parts are not of one shape");
  return finish(match, "a", size, layout, width);
}

static bool check_pairs(egi_match *match, egi_rotary_layout layout, egi_rotary_width width) {
  int64_t size = 0;
  if (!can_rotate(match, "x", 2)) return false;
  if (!takes_turns(match)) return egi_match_refuse(match, "the parts are not the even and the odd elements");
  if (!is_stacked(match)) return egi_match_refuse(match, "the parts are not put back in turns");
  const egi_attribute interleaved = egi_attribute_int("interleaved", 1);
  egi_match_size(match, "x", 1, &size);
  return egi_match_set(match, &interleaved) &&
         finish(match, "x", width == EGI_ROTARY_SINGLE ? size / 2 : size, layout, width);
}

static bool check_part(egi_match *match) {
  int64_t rotated = 0;
  if (!egi_match_size(match, "a", 1, &rotated) || !cuts_at(match, rotated))
    return egi_match_refuse(match, "the rotated part is not the first of the head");
  const egi_attribute size = egi_attribute_int("rotated", rotated);
  return egi_match_set(match, &size);
}

#define CHECK(name, check, layout, width)                         \
  static bool name(egi_match *match) {                            \
    return check(match, EGI_ROTARY_##layout, EGI_ROTARY_##width); \
  }
CHECK(check_heads_halves, check_halves, HEADS_FIRST, HALVES)
CHECK(check_heads_half_tables, check_halves, HEADS_FIRST, SINGLE)
CHECK(check_heads_apart, check_apart, HEADS_FIRST, SINGLE)
CHECK(check_heads_pairs, check_pairs, HEADS_FIRST, PAIRS)
CHECK(check_heads_pair_tables, check_pairs, HEADS_FIRST, SINGLE)
CHECK(check_sequence_halves, check_halves, SEQUENCE_FIRST, HALVES)
CHECK(check_sequence_half_tables, check_halves, SEQUENCE_FIRST, SINGLE)
CHECK(check_sequence_apart, check_apart, SEQUENCE_FIRST, SINGLE)
CHECK(check_sequence_pairs, check_pairs, SEQUENCE_FIRST, PAIRS)
CHECK(check_sequence_pair_tables, check_pairs, SEQUENCE_FIRST, SINGLE)

#define ROTARY "RotaryEmbedding <interleaved: int = @interleaved> "
#define PARTIAL "RotaryEmbedding <interleaved: int = @interleaved, rotary_embedding_dim: int = @rotated> "
#define DIRECT(op, cosines, sines) "(x, " cosines ", " sines ") => (y) { y = " op "(x, " cosines ", " sines ") }"
#define ASIDE(op, cosines, sines)                                                                                     \
  "(x, " cosines ", " sines ") => (y) { x1 = Transpose <perm = [0, 2, 1, 3]> (x) y1 = " op "(x1, " cosines ", " sines \
  ") y = Transpose <perm = [0, 2, 1, 3]> (y1) }"
#define APART(names, join)                                                  \
  "(a, b, cosines, sines" names ") => (y) { x = Concat <axis = -1> (a, b) " \
  "r = RotaryEmbedding <interleaved = 0> (x, cosines, sines) " join " }"
#define APART_ASIDE(names, join)                                                                                     \
  "(a, b, cosines, sines" names ") => (y) { x = Concat <axis = -1> (a, b) x1 = Transpose <perm = [0, 2, 1, 3]> (x) " \
  "r1 = RotaryEmbedding <interleaved = 0> (x1, cosines, sines) r = Transpose <perm = [0, 2, 1, 3]> (r1) " join " }"
#define JOIN_NOTHING "y = Identity (r)"
#define JOIN_BEHIND "y = Concat <axis = -1> (rest, r)"
#define JOIN_BEFORE "y = Concat <axis = -1> (r, rest)"
#define RULE(name, patterns, replacement, check) \
  { name, patterns, EGI_COUNT(patterns), replacement, check, false, NULL }

static const egi_rule rules[] = {
    RULE("rope_halves", halves, DIRECT(ROTARY, "cosines", "sines"), check_heads_halves),
    RULE("rope_half_tables", half_tables, DIRECT(ROTARY, "cosines", "sines"), check_heads_half_tables),
    RULE("rope_pairs", pairs, DIRECT(ROTARY, "cosines", "sines"), check_heads_pairs),
    RULE("rope_pair_tables", pair_tables, DIRECT(ROTARY, "cosines", "sines"), check_heads_pair_tables),
    RULE("rope_halves_sequence_first", halves, ASIDE(ROTARY, "cosines", "sines"), check_sequence_halves),
    RULE("rope_half_tables_sequence_first", half_tables, ASIDE(ROTARY, "cosines", "sines"), check_sequence_half_tables),
    RULE("rope_pairs_sequence_first", pairs, ASIDE(ROTARY, "cosines", "sines"), check_sequence_pairs),
    RULE("rope_pair_tables_sequence_first", pair_tables, ASIDE(ROTARY, "cosines", "sines"), check_sequence_pair_tables),
    RULE("rope_apart", apart, APART("", JOIN_NOTHING), check_heads_apart),
    RULE("rope_apart_sequence_first", apart, APART_ASIDE("", JOIN_NOTHING), check_sequence_apart),
    RULE("rope_behind", apart_behind, APART(", rest", JOIN_BEHIND), check_heads_apart),
    RULE("rope_behind_sequence_first", apart_behind, APART_ASIDE(", rest", JOIN_BEHIND), check_sequence_apart),
    RULE("rope_before", apart_before, APART(", rest", JOIN_BEFORE), check_heads_apart),
    RULE("rope_before_sequence_first", apart_before, APART_ASIDE(", rest", JOIN_BEFORE), check_sequence_apart),
    RULE("rope_part", parts, DIRECT(PARTIAL, "cos", "sin"), check_part),
    RULE("rope_part_sequence_first", parts_aside, ASIDE(PARTIAL, "cos", "sin"), check_part),
};

static eg_status run_rules(egi_pass_run *run, egi_graph *graph, egi_arena *arena) {
  egi_rotary_tables tables;
  egi_rule with_tables[EGI_COUNT(rules)];
  EG_TRY(egi_rotary_tables_init(&tables, graph, arena));
  memcpy(with_tables, rules, sizeof rules);
  for (size_t i = 0; i < EGI_COUNT(rules); i++) with_tables[i].userdata = &tables;
  return egi_rules_run(run, graph, with_tables, EGI_COUNT(rules));
}

eg_status egi_pass_fuse_rope(egi_pass_run *run, egi_graph *graph) {
  egi_arena arena;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = run_rules(run, graph, &arena);
  egi_arena_clear(&arena);
  return status;
}
