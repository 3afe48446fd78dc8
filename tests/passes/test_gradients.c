/* Every gradient rule against central differences. A case is a graph in float64; each float input x becomes
 * Cast(state) + x with a state of zeros, the loss is a weighted sum of all outputs, the graph is differentiated,
 * planned and run on the CPU: the state's gradient must be (L(x + h) - L(x - h)) / 2h, element by element. A last test
 * checks that no operator with a gradient rule is without a case. */
#include "support_passes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gradient_case {
  const char *graph;
  double low, high;       /* inputs are uniform in between */
  double step, tolerance; /* 0: 1e-5 and 5e-7, relative to the largest gradient and the loss */
  const char *fixed;      /* inputs, separated by commas, that get no gradient */
} gradient_case;

static const gradient_case cases[] = {
#define UNARY(op) "(double[2,3] x) => (double[2,3] y) { y = " op " (x) }"
    {UNARY("Abs"), -2, 2, 0, 0, NULL},
    {UNARY("Acos"), -0.8, 0.8, 0, 0, NULL},
    {UNARY("Acosh"), 1.5, 3, 0, 0, NULL},
    {UNARY("Asin"), -0.8, 0.8, 0, 0, NULL},
    {UNARY("Asinh"), -2, 2, 0, 0, NULL},
    {UNARY("Atan"), -2, 2, 0, 0, NULL},
    {UNARY("Atanh"), -0.8, 0.8, 0, 0, NULL},
    {UNARY("Cos"), -2, 2, 0, 0, NULL},
    {UNARY("Cosh"), -2, 2, 0, 0, NULL},
    {UNARY("Erf"), -2, 2, 0, 0, NULL},
    {UNARY("Exp"), -2, 2, 0, 0, NULL},
    {UNARY("Gelu"), -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y) { y = Gelu <approximate = \"tanh\"> (x) }", -2, 2, 0, 0, NULL},
    {UNARY("Log"), 0.5, 2, 0, 0, NULL},
    {UNARY("Neg"), -2, 2, 0, 0, NULL},
    {UNARY("engraft.Swish <alpha = 1.5>"), -2, 2, 0, 0, NULL},
    {"(double[2,3] x, double[2,3] u) => (double[2,3] y) { y = engraft.GLU <alpha = 1.5, offset = 1.0> (x, u) }", -2, 2,
     0, 0, NULL},
    {"(double[2,3] x, double[2,3] u) => (double[2,3] y) { y = engraft.GLU <activation = \"gelu_tanh\", limit = 1.5> "
     "(x, u) }",
     -2, 2, 0, 0, NULL},
    {UNARY("Reciprocal"), 0.5, 2, 0, 0, NULL},
    {UNARY("Relu"), -2, 2, 0, 0, NULL},
    {UNARY("Sigmoid"), -2, 2, 0, 0, NULL},
    {UNARY("Sin"), -2, 2, 0, 0, NULL},
    {UNARY("Sinh"), -2, 2, 0, 0, NULL},
    {UNARY("Sqrt"), 0.5, 2, 0, 0, NULL},
    {UNARY("Tan"), -1, 1, 0, 0, NULL},
    {UNARY("Tanh"), -2, 2, 0, 0, NULL},
    {UNARY("Identity"), -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (float[2,3] y) { y = Cast <to = 1> (x) }", -2, 2, 1e-2, 1e-4, NULL},
    {"(double[2,3] x) => (float[2,3] y) <float t = {0}> { y = CastLike (x, t) }", -2, 2, 1e-2, 1e-4, NULL},
#define BINARY(op) "(double[2,1,3] a, double[4,1] b) => (double[2,4,3] y) { y = " op " (a, b) }"
    {BINARY("Add"), -2, 2, 0, 0, NULL},
    {BINARY("Sub"), -2, 2, 0, 0, NULL},
    {BINARY("Mul"), -2, 2, 0, 0, NULL},
    {BINARY("Div"), 0.5, 2, 0, 0, NULL},
    {BINARY("Pow"), 0.5, 2, 0, 0, NULL},
    {BINARY("Max"), -2, 2, 0, 0, NULL},
    {BINARY("Min"), -2, 2, 0, 0, NULL},
    {"(double[3] x) => (double[3] y) { a = Mul (x, x)  b = Sub (a, x)  y = Add (b, x) }", -2, 2, 0, 0, NULL},
    {"(double[3] x) => (double[3] y) <double two = {2}> { y = Pow (x, two) }", -2, 2, 0, 0, NULL},
    {"(double[3] x) => (double[3] y) <double three = {3}> { y = Pow (x, three) }", -2, 2, 0, 0, NULL},
    {"(double[3] x) => (double[3] y) <double half = {-1.5}> { y = Pow (x, half) }", 0.5, 2, 0, 0, NULL},
    {"(double[3] x) => (double[3] y) <int64[3] p = {1,2,4}> { y = Pow (x, p) }", 0.5, 2, 0, 0, NULL},
    {"(double[2] a, double[2] b, double[1] c) => (double[2] y) { y = Max (a, b, c) }", -2, 2, 0, 0, NULL},
    {"(double[9] x) => (double[9] y) <double low = {-0.5}, double high = {0.7}> { y = Clip (x, low, high) }", -2, 2, 0,
     0, NULL},
    {"(double[9] x) => (double[9] y) <double high = {0.7}> { y = Clip (x, , high) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] a, double[3] b) => (double[2,3] y) <bool[2,1] c = {1,0}> { y = Where (c, a, b) }", -2, 2, 0, 0,
     NULL},
    /* reductions */
    {"(double[2,3,4] x) => (double[2,4] y) <int64[1] a = {1}> { y = ReduceSum <keepdims = 0> (x, a) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3,4] x) => (double[1,3,1] y) <int64[2] a = {0,-1}> { y = ReduceMean (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double y) { y = ReduceMean <keepdims = 0> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y) { y = ReduceSum <noop_with_empty_axes = 1> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x) => (double[2,3] y) <int64[1] a = {-1}> { y = ReduceMax <keepdims = 0> (x, a) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3] x) => (double y) { y = ReduceMax <keepdims = 0> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x) => (double[2,3] y) <int64[1] a = {-1}> { y = ReduceMin <keepdims = 0> (x, a) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3,4] x) => (double[2,4] y) <int64[1] a = {1}> { y = ReduceLogSumExp <keepdims = 0> (x, a) }", -2, 2, 0,
     0, NULL},
    {"(double[2,3,4] x) => (double[2,4] y) <int64[1] a = {1}> { y = ReduceProd <keepdims = 0> (x, a) }", 0.5, 2, 0, 0,
     NULL},
    {"(double[2,3] x) => (double[1,1] y) { y = ReduceProd (x) }", 0.5, 2, 0, 0, NULL},
    {"(double[2,3] x, double[3] like) => (double[3] y) { y = engraft.SumTo (x, like) }", -2, 2, 0, 0, "like"},
    /* layout */
    {"(double[2,3] x, double[2,1] w) => (double[2,4] y) { y = Concat <axis = -1> (x, w) }", -2, 2, 0, 0, NULL},
    {"(double[3,1] x) => (double[2,3,4] y) <int64[3] s = {2,3,4}> { y = Expand (x, s) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x) => (double[6,4] y) { y = Flatten <axis = 2> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,6] x) => (double[3,4] y) <int64[2] s = {3,-1}> { y = Reshape (x, s) }", -2, 2, 0, 0, NULL},
    {"(double[4,6] x) => (double[2,2] y) <int64[2] f = {1,-1}, int64[2] t = {4,0}, int64[2] a = {0,1}, int64[2] s = "
     "{2,-3}>"
     " { y = Slice (x, f, t, a, s) }",
     -2, 2, 0, 0, NULL},
    {"(double[4,6] x) => (double[2,6] y) <int64[1] f = {1}, int64[1] t = {3}> { y = Slice (x, f, t) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,6] x) => (double[2,1] a, double[2,3] c) <int64[3] s = {1,2,3}> { a, b, c = Split <axis = 1> (x, s) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,1,3] x) => (double[2,3] y) <int64[1] a = {1}> { y = Squeeze (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x) => (double[4,2,3] y) { y = Transpose <perm = [2,0,1]> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[3,2] y) { y = Transpose (x) }", -2, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[3,4] y) <int64 k = {1}> { y = Trilu <upper = 0> (x, k) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,1,3,1] y) <int64[2] a = {1,3}> { y = Unsqueeze (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x, double[1] after) => (double[2,3] y) { y = engraft.Barrier (x, after) }", -2, 2, 0, 0, "after"},
    {"(double[2,3] x, double[1] after) => (double[2,3] y) { h = engraft.Offload (x) y = engraft.Reload (h, after) }",
     -2, 2, 0, 0, "after"},
    /* indexing */
    {"(double[3,4] x) => (double[3,4] y) <int64 a = {1}> { y = CumSum <exclusive = 1> (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[3,4] y) <int64 a = {0}> { y = CumSum <reverse = 1> (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[5,2] x) => (double[2,3,2] y) <int64[2,3] i = {0,4,0,1,-1,0}> { y = Gather (x, i) }", -2, 2, 0, 0, NULL},
    {"(double[2,4,3] x) => (double[2,2,3] y) <int64[2] i = {3,1}> { y = Gather <axis = 1> (x, i) }", -2, 2, 0, 0, NULL},
    {"(double[3,3] x) => (double[2,3] y) <int64[2,3] i = {0,2,0,0,1,-1}> { y = GatherElements (x, i) }", -2, 2, 0, 0,
     NULL},
    {"(double[3,2,2] x) => (double[3,2] y) <int64[3,2] i = {0,1,2,0,0,1}> { y = GatherND (x, i) }", -2, 2, 0, 0, NULL},
    {"(double[4,2] x, double[2,2] u) => (double[4,2] y) <int64[2,1] i = {3,1}> { y = ScatterND (x, i, u) }", -2, 2, 0,
     0, NULL},
    {"(double[4,2] x, double[3,2] u) => (double[4,2] y) <int64[3,1] i = {3,1,3}>\n"
     " { y = ScatterND <reduction = \"add\"> (x, i, u) }",
     -2, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[3,4] y) <int64 a = {1}> { y = CumProd <exclusive = 1> (x, a) }", 0.5, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[3,4] y) <int64 a = {0}> { y = CumProd <reverse = 1> (x, a) }", 0.5, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[4,7] y) <int64[4] p = {0,2,1,1}> { y = Pad (x, p) }", -2, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[3,3] y) <int64[2] p = {-2,1}, int64[1] a = {-1}> { y = Pad (x, p, , a) }", -2, 2, 0, 0,
     NULL},
    {"(double[3,4] x) => (double[6,8] y) <int64[4] p = {2,3,1,1}> { y = Pad <mode = \"reflect\"> (x, p) }", -2, 2, 0, 0,
     NULL},
    {"(double[3,4] x) => (double[6,8] y) <int64[4] p = {2,3,1,1}> { y = Pad <mode = \"edge\"> (x, p) }", -2, 2, 0, 0,
     NULL},
    {"(double[3,4] x) => (double[6,8] y) <int64[4] p = {2,3,1,1}> { y = Pad <mode = \"wrap\"> (x, p) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3] x) => (double[6,6] y) <int64[2] r = {3,2}> { y = Tile (x, r) }", -2, 2, 0, 0, NULL},
    {"(double[4,3,2] x) => (double[4,3,2] y) <int64[3] l = {1,4,3}> { y = ReverseSequence (x, l) }", -2, 2, 0, 0, NULL},
    {"(double[3,3] x, double[2,3] u) => (double[3,3] y) <int64[2,3] i = {0,2,0,1,1,-1}>\n"
     "{ y = ScatterElements (x, i, u) }",
     -2, 2, 0, 0, NULL},
    {"(double[3,3] x, double[2,3] u) => (double[3,3] y) <int64[2,3] i = {0,2,0,1,1,-2}>\n"
     "{ y = ScatterElements <axis = 1, reduction = \"add\"> (x, i, u) }",
     -2, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[3,2] y) <int64[1] k = {2}> { y, i = TopK (x, k) }", -2, 2, 0, 0, NULL},
    {"(double[3,4] x) => (double[2,4] y) <int64[1] k = {2}> { y = TopK <axis = 0, largest = 0> (x, k) }", -2, 2, 0, 0,
     NULL},
    /* matrix products */
    {"(double[3,4] a, double[4,2] b) => (double[3,2] y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] a, double[4,2] b) => (double[2,3,2] y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[2,1,3,4] a, double[5,4,2] b) => (double[2,5,3,2] y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[3,4] a, double[2,4,2] b) => (double[2,3,2] y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[4] a, double[2,4,3] b) => (double[2,3] y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] a, double[4] b) => (double[2,3] y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[4] a, double[4] b) => (double y) { y = MatMul (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] a, double[2,4] b) => (double[2,3,2] y) { t = Transpose (b)  y = MatMul (a, t) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3] x, double[3,4] a, double[3,4] b) => (double[2,4] y)\n"
     "{ p = MatMul (x, a)  q = MatMul (x, b)  y = Mul (p, q) }",
     -2, 2, 0, 0, NULL},
#define GEMM(a, b, attributes) \
  "(double" a " a, double" b " b, double[2] c) => (double[3,2] y) { y = Gemm " attributes " (a, b, c) }"
    {GEMM("[3,4]", "[4,2]", "<alpha = 0.5, beta = 2.0>"), -2, 2, 0, 0, NULL},
    {GEMM("[4,3]", "[4,2]", "<transA = 1>"), -2, 2, 0, 0, NULL},
    {GEMM("[3,4]", "[2,4]", "<transB = 1>"), -2, 2, 0, 0, NULL},
    {GEMM("[4,3]", "[2,4]", "<transA = 1, transB = 1, alpha = 3.0>"), -2, 2, 0, 0, NULL},
    {"(double[3,2] c, double[2,3,4] a, double[4,2] b) => (double[2,3,2] y) { y = engraft.AddMatMul <alpha = 0.25> (c, "
     "a, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,2] c, double[2,3,4] a, double[2,4] b) => (double[2,3,2] y)\n"
     "{ t = Transpose (b)  y = engraft.AddMatMul <alpha = 2.0> (c, a, t) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x, double[5,4] w, double[5] b) => (double[2,3,5] y) { y = engraft.Linear (x, w, b) }", -2, 2, 0, 0,
     NULL},
    {"(double[4] x, double[4,5] w) => (double[5] y) { t = Transpose (w)  y = engraft.Linear (x, t) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3,8] x, double[2,3,8] k, double[8] g, double[8] b) => (double[2,3,8] y, double[2,3,8] z)\n"
     "{ y, , , z = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.01> (x, k, g, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3] x, double[3] b) => (double[2,3] y, double[2,3] z)\n"
     "{ y = com.microsoft.FastGelu (x, b)  z = com.microsoft.QuickGelu (x) }",
     -2, 2, 0, 0, NULL},
    {"(double[4,3] a, double[2,4] b) => (double[3,2] y)\n"
     "{ y = com.microsoft.FusedMatMul <transA = 1, transB = 1, alpha = 0.5> (a, b) }",
     -2, 2, 0, 0, NULL},
#define ROTATION "double[4,2] c = {1,1,0.5,0.9,-0.4,0.7,-1,0.4}, double[4,2] s = {0,0,0.8,0.3,0.9,0.7,0.1,0.9}"
    {"(double[2,3,16] q) => (double[2,3,8] y)\n<int32[2] l = {2,1}, int32[1] t = {3}, " ROTATION ">\n"
     "{ y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, do_rotary = 1, local_window_size = 2> "
     "(q, , , , , l, t, c, s) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,2,8] q, double[2,2,4] k, double[2,2,4] v, double[2,1,2,4] p, double[2,1,2,4] o, double[2] n)\n"
     "=> (double[2,2,8] y)\n<int32[2] l = {3,2}, int32[1] t = {4}, " ROTATION ">\n"
     "{ y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, do_rotary = 1, rotary_interleaved = 1, "
     "softcap = 2.0> (q, k, v, p, o, l, t, c, s, , , n) }",
     -1, 1, 0, 0, NULL},
    {"(double[2,3,4] q, double[2,3,4] k, double[2,3,4] v, double[12] b) => (double[2,3,4] y)\n"
     "<int32[2,3] m = {1,1,1,1,1,0}>\n"
     "{ y = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1> (q, k, v, b, m) }",
     -1, 1, 0, 0, NULL},
#define QUANTISED(weights, attributes, inputs)                            \
  "(double[3,3] x) => (float[3,2] y) <" weights ", float[2] c = {1, 2}> " \
  "{ a = Cast <to = 1> (x)  y = engraft.Linear <" attributes "> (a, w, c, " inputs ") }"
#define SIZES "out_features = 2, in_features = 3"
    {QUANTISED("uint8[2,2,1] w = {35,78,91,196}, float[2,2] s = {0.5,-0.25,1,0.75}, uint8[2,1] z = {53,9}",
               "storage = \"nbits\", bits = 4, block_size = 2, " SIZES, "s, z"),
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("uint8[2,2,1] w = {228,27,200,77}, float[4] s = {0.5,-0.25,1,0.75}, float[2,2] z = {1,1.5,0,3}, "
               "int32[3] g = {1,0,1}",
               "storage = \"nbits\", bits = 4, block_size = 2, " SIZES, "s, z, g"),
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("uint8[2,1,1] w = {228,27}, float[2,1] s = {0.5,-0.25}",
               "storage = \"nbits\", bits = 2, block_size = 4, " SIZES, "s"),
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("uint8[2,1,4] w = {228,27,200,77,0,255,128,127}, float16[2,1] s = {14336,46080}",
               "storage = \"nbits\", bits = 8, block_size = 4, " SIZES, "s"),
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("uint8[3] w = {228,27,200}, float[2] s = {0.5,0.25}", "storage = \"bnb4\", block_size = 4, " SIZES, "s"),
     -2, 2, 1e-2, 1e-4, NULL},
    {"(double[3,3] x) => (float[3,2] y) <uint8[3] w = {228,27,200}, uint8[3] v = {18,52,248}, float[2] s = "
     "{0.5,0.25}>\n"
     "{ a = Cast <to = 1> (x)  b = engraft.Linear <storage = \"bnb4\", block_size = 4, " SIZES "> (a, w, , s)\n"
     "  c = engraft.Linear <storage = \"bnb4\", block_size = 4, " SIZES "> (a, v, , s)  y = Mul (b, c) }",
     -2, 2, 1e-2, 1e-4, NULL},
    {"(double[3,3] x, double[3,2] z) => (float[3,2] y) <uint8[3] w = {228,27,200}, float[2] s = {0.5,0.25}>\n"
     "{ a = Cast <to = 1> (x)  b = Cast <to = 1> (z)\n"
     "  y = engraft.Linear <storage = \"bnb4\", block_size = 4, " SIZES "> (a, w, b, s) }",
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("uint8[3] w = {18,52,248}, float[2] s = {0.5,0.25}",
               "storage = \"bnb4\", quant_type = 0, block_size = 4, " SIZES, "s"),
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("int4[2,3] w = {1,-2,3,-4,5,-8}, float[2,2] s = {0.5,0.25,1,2}, int4[2,2] z = {1,-1,0,2}",
               "storage = \"blocked\", axis = 1, block_size = 2", "s, z"),
     -2, 2, 1e-2, 1e-4, NULL},
    {QUANTISED("uint4[3,2] w = {1,2,3,4,15,8}, float[2,2] s = {0.5,0.25,1,2}",
               "storage = \"blocked\", axis = 0, block_size = 2, transposed = 1", "s"),
     -2, 2, 1e-2, 1e-4, NULL},
    /* language models */
    {"(double[2,5] x) => (double[2,5] y) { y = Softmax (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,5,2] x) => (double[2,5,2] y) { y = Softmax <axis = 1> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,5] x) => (double[2,5] y) { y = LogSoftmax (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,6] x, double[6] s, double[6] b) => (double[2,3,6] y)\n"
     "{ y = LayerNormalization <epsilon = 0.01, stash_type = 11> (x, s, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,6] x, double[6] s) => (double[2,3,6] y) { y = RMSNormalization <epsilon = 0.01, stash_type = 11> (x, "
     "s) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,4,8] x, double[2,4,4] c, double[2,4,4] s) => (double[2,3,4,8] y) { y = RotaryEmbedding (x, c, s) }",
     -2, 2, 0, 0, "c,s"},
    {"(double[2,4,24] x, double[2,4,2] c, double[2,4,2] s) => (double[2,4,24] y)\n"
     "{ y = RotaryEmbedding <interleaved = 1, num_heads = 3, rotary_embedding_dim = 4> (x, c, s) }",
     -2, 2, 0, 0, "c,s"},
    {"(double[2,4,5,8] q, double[2,2,5,8] k, double[2,2,5,6] v) => (double[2,4,5,6] y)\n"
     "{ y = Attention <is_causal = 1> (q, k, v) }",
     -1, 1, 1e-4, 1e-6, NULL},
    {"(double[2,3,16] q, double[2,5,8] k, double[2,5,8] v, double[2,1,3,5] m) => (double[2,3,16] y)\n"
     "{ y = Attention <q_num_heads = 4, kv_num_heads = 2, scale = 0.3, softcap = 2.0> (q, k, v, m) }",
     -1, 1, 1e-4, 1e-6, "m"},
    {"(double[2,4,5,8] q, double[2,2,5,8] k, double[2,2,5,6] v) => (double[2,4,5,6] y)\n"
     "<bool[2,5] m = {0,0,1,1,1,1,1,1,1,0}>\n"
     "{ y, lse = engraft.Attention <causal = 1, window = 3, softcap = 2.0> (q, k, v, m) }",
     -1, 1, 1e-4, 1e-6, NULL},
    {"(double[2,4,5,8] q, double[2,2,5,8] k, double[2,2,5,6] v, double[4] s) => (double[2,4,5,6] y)\n"
     "{ f = Cast <to = 1> (s)  y, lse = engraft.Attention <causal = 1> (q, k, v, , f) }",
     -1, 1, 1e-2, 1e-4, NULL},
    {"(double[1,4,6,8] q, double[1,2,6,8] k, double[1,2,6,6] v) => (double[1,4,6,6] y)\n"
     "<int32[6] first = {0,0,2,3,3,3}, int32[6] last = {1,1,2,5,5,5}>\n"
     "{ y, lse = engraft.Attention <causal = 1, window = 2> (q, k, v, , , first, last) }",
     -1, 1, 1e-4, 1e-6, NULL},
    {"(double[2,3,5] x) => (float[2,3] y) <int64[2,3] t = {0,4,-100,2,2,1}> { y, lse = engraft.LogProbability (x, t) }",
     -2, 2, 1e-2, 1e-4, NULL},
    {"(double[2,3,4] x, double[4,5] w, double[5] b) => (float[2,3] y) <int64[2,3] t = {0,4,-100,2,2,1}>\n"
     "{ y, lse = engraft.LinearLogProbability (x, w, t, b) }",
     -1, 1, 1e-2, 1e-4, NULL},
    {"(double[2,3,4] x, double[5,4] w) => (float[2,3] y) <int64[2,3] t = {0,4,-100,2,2,1}>\n"
     "{ u = Transpose (w)  y, lse = engraft.LinearLogProbability (x, u, t) }",
     -1, 1, 1e-2, 1e-4, NULL},
    {"(double[2,3] x) => (float[2] y) <int64[2] t = {1,0}, uint8[2,1,8] w = "
     "{1,35,69,103,137,171,205,239,2,4,6,8,1,3,5,7},"
     " float[2,1] s = {0.5,-0.25}>\n"
     "{ a = Cast <to = 1> (x)  y, lse = engraft.LinearLogProbability <storage = \"nbits\", bits = 4, block_size = 16, "
     "out_features = 2, in_features = 3> (a, w, t, , s) }",
     -2, 2, 1e-2, 1e-4, NULL},
    /* mixtures of experts: concatenated, softmax before; gpt-oss's; one input an expert; groups; packed */
    {"(double[2,3,4] x, double[6,4] l, double[4,6,4] g, double[4,4,3] d) => (double[2,3,4] y)\n"
     "{ y = engraft.MoE <experts = 4, top_k = 2, normalise = 1, roles = [1, 0, 0, 0, 1, 0]> (x, l, , g, d) }",
     -1, 1, 0, 0, NULL},
    {"(double[6,4] x, double[6,4] l, double[4,4,6] g, double[4,6] gb, double[4,3,4] d, double[4,4] db) => (double[6,4] "
     "y)\n"
     "{ y = engraft.MoE <experts = 4, top_k = 2, order = \"after\", gate_up = \"interleaved\", alpha = 1.702, limit = "
     "0.9, "
     "offset = 1.0, roles = [1, 1, 0, 0, 1, 1], transposed = [1, 0, 1]> (x, l, , g, gb, d, db) }",
     -1, 1, 0, 0, NULL},
    {"(double[5,4] x, double[5,2] l, double[3,4] g0, double[3,4] g1, double[3,4] u0, double[3,4] u1, double[4,3] d0,\n"
     "double[4,3] d1) => (double[5,4] y) { y = engraft.MoE <experts = 2, top_k = 1, scoring = \"sigmoid\", order = "
     "\"after\", gate_up = \"separate\", activation = \"gelu\", roles = [2, 0, 2, 0, 2, 0]> (x, l, , g0, g1, u0, u1, "
     "d0, "
     "d1) }",
     -1, 1, 0, 0, "g0,g1,u0,u1,d0,d1"},
    {"(double[5,4] x, double[5,6] l, double[6,3,4] g, double[6,4,3] d) => (double[5,4] y) <double[6] c = "
     "{0.1,0.4,0.2,0.3,0.1,0.2}>\n"
     "{ y = engraft.MoE <experts = 6, top_k = 2, scoring = \"sigmoid\", normalise = 1, routed_scale = 2.5, groups = 3, "
     "top_groups = 2, gate_up = \"none\", activation = \"gelu_tanh\", roles = [1, 0, 0, 0, 1, 0]> (x, l, c, g, d) }",
     -1, 1, 0, 0, NULL},
    {"(double[5,4] x, double[5,3] l, double[3,6,4] g, double[3,4,3] d, double[6,4] ga, double[6,6] gb, double[3,3] "
     "da,\n"
     "double[4,3] db) => (double[5,4] y) { y = engraft.MoE <experts = 3, top_k = 2, normalise = 1, adapter_scales = "
     "[0.5, 0.0, 2.0], roles = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1]> (x, l, , g, d, ga, gb, da, db) "
     "}",
     -1, 1, 0, 0, NULL},
    {"(double[3,4] x, double[3,2] l) => (double[3,4] y) <uint8[2,2,2] g = {18,52,86,120,154,188,222,240}, uint8[2,4,1] "
     "d = "
     "{1,2,3,4,5,6,7,8}, double[2,2,2] gs = {0.1,0.2,0.3,0.1,0.2,0.3,0.1,0.2}, double[2,4,1] ds = "
     "{0.1,0.2,0.3,0.1,0.2,0.3,0.1,0.2}, uint8[2,2,1] z = {135,118,152,103}>\n"
     "{ y = engraft.MoE <experts = 2, top_k = 2, storage = \"nbits\", bits = 4, block_size = 2, gate_up = "
     "\"interleaved\", activation = \"relu\", roles = [1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0]> (x, l, , g, d, gs, z, ds) "
     "}",
     -1, 1, 0, 0, NULL},
    /* what mixtures of experts become */
    {"(double[5,4] l) => (double[10] w) { e, s, i, o, w = engraft.Route <experts = 4, top_k = 2> (l) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3,4] l) => (double[12] w) { e, s, i, o, w = engraft.Route <experts = 4, top_k = 2, normalise = 1, "
     "scoring = \"sigmoid\", routed_scale = 1.5> (l) }",
     -2, 2, 0, 0, NULL},
    {"(double[5,4] l) => (double[10] w) { e, s, i, o, w = engraft.Route <experts = 4, top_k = 2, order = \"after\"> "
     "(l) }",
     -2, 2, 0, 0, NULL},
#define ROWS "int32[6] s = {0,2,0,1,1,2}, int32[6] i = {0,2,3,4,1,5}"
    {"(double[1,3,4] x) => (double[6,4] y) <" ROWS "> { y = engraft.Dispatch (x, s, i) }", -2, 2, 0, 0, NULL},
    {"(double[6,4] x, double[3,1,4] z) => (double[3,1,4] y) <" ROWS "> { y = engraft.Combine (x, s, i, z) }", -2, 2, 0,
     0, "z"},
#define RAGGED(attributes, inputs) \
  "{ y = engraft.RaggedLinear <experts = 3, in_features = 4, " attributes "> (" inputs ") }"
    {"(double[6,4] x, double[3,5,4] w, double[3,5] b) => (double[6,5] y) <int32[4] o = {0,4,4,6}>\n" RAGGED(
         "roles = [1, 1]", "x, , o, , w, b"),
     -2, 2, 0, 0, NULL},
    {"(double[6,4] x, double[6,5] c, double[6] r, double[3,4,5] w, double[3,5] b) => (double[6,5] y)\n"
     "<int32[4] o = {0,0,5,6}>\n" RAGGED("roles = [1, 1], transposed = 1, alpha = 0.5", "x, c, o, r, w, b"),
     -2, 2, 0, 0, NULL},
    {"(double[6,4] x, double[6] r, double[2,4] w0, double[2,4] w1, double[2,4] w2) => (double[6,2] y)\n"
     "<int32[4] o = {0,1,6,6}>\n" RAGGED("roles = [3], loop = 1", "x, , o, r, w0, w1, w2"),
     -2, 2, 0, 0, "w0,w1,w2"},
    {"(double[2,4,9] x, double[6,2,3] w, double[6] b) => (double[2,6,5] y)\n"
     "{ y = Conv <group = 2, pads = [1,1], strides = [2]> (x, w, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[1,2,5,4] x, double[3,2,2,2] w) => (double[1,3,5,4] y)\n"
     "{ y = Conv <auto_pad = \"SAME_UPPER\", dilations = [2,1]> (x, w) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,8] q, double[2,3,4] k, double[2,3,6] v, double[2,2,2,3] p, double[2,3,4] g, double[2,3,2] b)\n"
     " => (double[2,3,12] y, double[2,2,2,3] s)\n"
     "{ y, s = LinearAttention <q_num_heads = 4, kv_num_heads = 2> (q, k, v, p, g, b) }",
     -1, 1, 0, 0, NULL},
    {"(double[2,3,4] q, double[2,3,4] k, double[2,3,6] v, double[2,3,2] g) => (double[2,3,6] y)\n"
     "{ y = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = \"gated\", scale = 0.7> (q, k, v, , g) }",
     -1, 1, 0, 0, NULL},
    {"(double[2,3,4] q, double[2,3,4] k, double[2,3,6] v, double[2,3,1] b) => (double[2,3,6] y)\n"
     "{ y = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = \"delta\"> (q, k, v, , , b) }",
     -1, 1, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y, bool[2,3] m) <double r = {0.5}, bool t = {0}> { y, m = Dropout (x, r, t) }",
     -2, 2, 0, 0, NULL},
#define ZEROS "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0"
    {"(double[3,5] x) => (double[3,5] y) <uint8[96] s = {" ZEROS "," ZEROS "," ZEROS "," ZEROS "," ZEROS "," ZEROS
     "}>\n"
     "{ y = engraft.Dropout <ratio = 0.25, seed = 5, site = 1> (x, s) }",
     -2, 2, 0, 0, NULL},
    /* operators that others replace when a model is loaded */
    {"(double[2,3,4] a, double[4,5] b) => (double[5,2,3] y) { y = Einsum <equation = \"bij,jk->kbi\"> (a, b) }", -2, 2,
     0, 0, NULL},
    {"(double[2,3,2,4] a, double[2,5,2,4] b) => (double[2,2,3,5] y)\n"
     "{ y = Einsum <equation = \"bqhd,bkhd->bhqk\"> (a, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,4] a, double[3,4,5,2] b, double[2] c) => (double[5] y)\n"
     "{ y = Einsum <equation = \"aij, ijkl, l -> k\"> (a, b, c) }",
     -2, 2, 0, 0, NULL},
    {"(double[3,3] a, double[2,3] b) => (double[3,2] y) { y = Einsum <equation = \"ii,ji->ij\"> (a, b) }", -2, 2, 0, 0,
     NULL},
    {"(double[2,3,4] a, double[1,4,3] b) => (double[2,3,3] y) { y = Einsum <equation = \"...ij,...jk\"> (a, b) }", -2,
     2, 0, 0, NULL},
    {"(double[4,3] x, double[3] w) => (double y, double[4,3] l) <int64[4] t = {0,2,7,1}>\n"
     "{ y, l = SoftmaxCrossEntropyLoss <ignore_index = 7> (x, t, w) }",
     0.1, 2, 0, 0, NULL},
    {"(double[2,3,2] x) => (double[2,2] y) <int32[2,2] t = {0,2,1,1}>\n"
     "{ y = SoftmaxCrossEntropyLoss <reduction = \"none\"> (x, t) }",
     -2, 2, 0, 0, NULL},
    {"(double[4,3] x) => (double y) <int64[4] t = {0,2,-1,1}>\n"
     "{ y = NegativeLogLikelihoodLoss <ignore_index = -1> (x, t) }",
     -2, 2, 0, 0, NULL},
    {"(double[4,3] x, double[3] w) => (double y) <int64[4] t = {0,2,1,1}>\n"
     "{ y = NegativeLogLikelihoodLoss <reduction = \"sum\"> (x, t, w) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,5] x, double[3,1,3] w, double[3] b, double[2,3,2] p) => (double[2,3,5] y, double[2,3,2] q)\n"
     "{ y, q = CausalConvWithState <activation = \"silu\"> (x, w, b, p) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,2,4,3] c, double[2,2,2,3] u) => (double[2,2,4,3] y) <int64[2] i = {1,3}>\n"
     "{ y = TensorScatter <mode = \"circular\"> (c, u, i) }",
     -2, 2, 0, 0, NULL},
    /* functions */
    {UNARY("Celu"), -2, 2, 0, 0, NULL},
    {UNARY("Elu"), -2, 2, 0, 0, NULL},
    {UNARY("Selu"), -2, 2, 0, 0, NULL},
    {UNARY("LeakyRelu"), -2, 2, 0, 0, NULL},
    {UNARY("Softplus"), -2, 2, 0, 0, NULL},
    {UNARY("Mish"), -2, 2, 0, 0, NULL},
    {UNARY("Softsign"), -2, 2, 0, 0, NULL},
    {UNARY("Swish"), -2, 2, 0, 0, NULL},
    {UNARY("HardSwish"), -2, 2, 0, 0, NULL},
    {UNARY("HardSigmoid"), -2, 2, 0, 0, NULL},
    {"(double[2,3] x, double[3] s) => (double[2,3] y) { y = PRelu (x, s) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y) { y = ThresholdedRelu <alpha = 0.5> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y) { y = Shrink <bias = 0.25> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] a, double[2,3] b) => (double[2,3] y) { y = SwiGLU <alpha = 0.5> (a, b) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2] y) <int64[1] a = {1}> { y = ReduceL1 <keepdims = 0> (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,1] y) <int64[1] a = {1}> { y = ReduceL2 (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[1,1] y) { y = ReduceLogSum (x) }", 0.5, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[1,3] y) <int64[1] a = {0}> { y = ReduceSumSquare (x, a) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x) => (double[2,3,4] y) { y = MeanVarianceNormalization <axes = [0,2]> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y) { y = LpNormalization (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3] x) => (double[2,3] y) { y = LpNormalization <p = 1, axis = 0> (x) }", -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x, double[3] s, double[3] b) => (double[2,3,4] y)\n"
     "{ y = InstanceNormalization (x, s, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,4,3] x, double[4] s, double[4] b) => (double[2,4,3] y)\n"
     "{ y = GroupNormalization <num_groups = 2> (x, s, b) }",
     -2, 2, 0, 0, NULL},
    {"(double[2,3,4] x, double[3] s, double[3] b, double[3] m, double[3] v) => (double[2,3,4] y)\n"
     "{ y = BatchNormalization (x, s, b, m, v) }",
     0.5, 2, 0, 0, NULL},
    {"(double[2,3,4] x, double[3] s, double[3] b, double[3] m, double[3] v) => (double[2,3,4] y, double[3] r)\n"
     "{ y, r, w = BatchNormalization <training_mode = 1> (x, s, b, m, v) }",
     0.5, 2, 0, 0, NULL},
    {"(double[1,4,2,3] x) => (double[1,1,4,6] y) { y = DepthToSpace <blocksize = 2> (x) }", -2, 2, 0, 0, NULL},
    {"(double[1,4,2,3] x) => (double[1,1,4,6] y) { y = DepthToSpace <blocksize = 2, mode = \"CRD\"> (x) }", -2, 2, 0, 0,
     NULL},
    {"(double[1,1,4,6] x) => (double[1,4,2,3] y) { y = SpaceToDepth <blocksize = 2> (x) }", -2, 2, 0, 0, NULL},
    {"(double[1,2,3,2] x) => (double[1,2,1,1] y) { y = GlobalAveragePool (x) }", -2, 2, 0, 0, NULL},
    {"(double[1,2,3,2] x) => (double[1,2,1,1] y) { y = GlobalMaxPool (x) }", -2, 2, 0, 0, NULL},
};

typedef struct runner {
  pass_fixture *fixture;
  egi_store *store;
  egi_plan *plan;
  egi_scratch *scratch;
  egi_session *session;
  double *inputs[8];
  int64_t counts[8];
  uint32_t n_inputs;
  const float *gradients; /* of the run before, by state */
} runner;

static bool is_fixed(const char *fixed, const char *name) {
  size_t length = strlen(name);
  for (const char *at = fixed; at && *at; at += strcspn(at, ",") + (at[strcspn(at, ",")] != '\0')) {
    if (strcspn(at, ",") == length && strncmp(at, name, length) == 0) return true;
  }
  return false;
}

static void number_dims(const egi_graph *graph, egi_value_id id, egi_state *state) {
  state->rank = graph->values[id].rank;
  for (int i = 0; i < state->rank; i++)
    assert_true(egi_dim_value(graph->module->dims, graph->values[id].dims[i], &state->dims[i]));
}

/* Every user of a float input takes Cast(state) + input instead; states stand in the order of the inputs. */
static void make_trainable(pass_fixture *fixture, const gradient_case *c) {
  egi_graph *graph = fixture->graph;
  egi_emitter emit = {.graph = graph};
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    egi_value_id input = graph->inputs[i], value = 0;
    egi_state state = {.name = graph->values[input].name, .pool = EGI_POOL_PARAMETERS, .dtype = EG_DTYPE_F32};
    uint32_t index = 0, ignored = 0;
    if (is_fixed(c->fixed, state.name)) continue;
    number_dims(graph, input, &state);
    assert_int_equal(egi_module_add_state(graph->module, &state, &index), EG_OK);
    state.pool = EGI_POOL_GRADIENTS;
    assert_int_equal(egi_module_add_state(graph->module, &state, &ignored), EG_OK);
    assert_int_equal(egi_graph_add_state(graph, index, &value), EG_OK);
    egi_node_id n_nodes = graph->n_nodes;
    egi_value_id sum = egi_emit_binary(&emit, EGI_OP_Add, egi_emit_cast(&emit, value, EG_DTYPE_F64), input);
    assert_int_equal(emit.status, EG_OK);
    for (egi_node_id id = 1; id < n_nodes; id++) {
      egi_node *node = &graph->nodes[id];
      for (unsigned k = 0; k < node->n_inputs; k++) node->inputs[k] = node->inputs[k] == input ? sum : node->inputs[k];
    }
  }
  assert_int_equal(egi_graph_tidy(graph), EG_OK);
}

/* Loss: each output element times a number of its own, summed up. */
static void add_loss(pass_fixture *fixture) {
  egi_graph *graph = fixture->graph;
  egi_emitter emit = {.graph = graph};
  egi_value_id loss = 0;
  const egi_attribute keep_no_dims = egi_attribute_int("keepdims", 0);
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_state shape = {0};
    egi_value_id factors = 0, output = graph->outputs[i];
    number_dims(graph, output, &shape);
    egi_tensor tensor = {.dtype = EG_DTYPE_F64, .rank = shape.rank};
    memcpy(tensor.dims, shape.dims, sizeof(tensor.dims));
    int64_t count = egi_tensor_count(&tensor);
    double *numbers = EGI_NEW(&graph->module->arena, double, (size_t)count);
    assert_non_null(numbers);
    for (int64_t k = 0; k < count; k++) numbers[k] = egi_random_uniform(7, i, (uint64_t)k) + 0.25;
    tensor.data = numbers;
    assert_int_equal(egi_add_constant(graph, "factors", &tensor, &factors), EG_OK);
    output = egi_emit_cast(&emit, output, EG_DTYPE_F64);
    egi_value_id product = egi_emit_binary(&emit, EGI_OP_Mul, output, factors);
    egi_value_id sum = egi_emit(&emit, EGI_OP_ReduceSum, &product, 1, &keep_no_dims, 1);
    loss = loss == 0 ? sum : egi_emit_binary(&emit, EGI_OP_Add, loss, sum);
  }
  assert_int_equal(emit.status, EG_OK);
  assert_int_equal(egi_graph_rename_value(graph, loss, EGI_OUTPUT_LOSS), EG_OK);
  graph->n_outputs = 0;
  assert_int_equal(egi_graph_add_output(graph, loss), EG_OK);
}

#define CHECK(expression)                                                                   \
  do {                                                                                      \
    if ((expression) != EG_OK) fail_msg("%s\n%s", name, eg_context_error(r->fixture->ctx)); \
  } while (0)

static void open_runner(runner *r, const gradient_case *c, const char *name) {
  egi_graph *graph = r->fixture->graph;
  const egi_plan_options options = {0};
  CHECK(egi_store_create(r->fixture->ctx, graph->module, egi_backend_cpu(), &r->store));
  CHECK(egi_store_make_pools(r->store));
  CHECK(egi_plan_create(r->fixture->ctx, graph, egi_backend_cpu(), &options, &r->plan));
  CHECK(egi_scratch_create(r->fixture->ctx, r->store, &r->scratch));
  CHECK(egi_session_create(r->store, r->plan, r->scratch, &r->session));
  r->n_inputs = graph->n_inputs;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    egi_state shape = {0};
    number_dims(graph, graph->inputs[i], &shape);
    egi_tensor tensor = {.rank = shape.rank};
    memcpy(tensor.dims, shape.dims, sizeof(tensor.dims));
    r->counts[i] = egi_tensor_count(&tensor);
    r->inputs[i] = calloc((size_t)r->counts[i], sizeof(double));
    assert_non_null(r->inputs[i]);
    for (int64_t k = 0; k < r->counts[i]; k++)
      r->inputs[i][k] = c->low + (c->high - c->low) * egi_random_uniform(3, i, (uint64_t)k);
  }
}

static void close_runner(runner *r) {
  egi_session_destroy(r->session);
  egi_scratch_destroy(r->scratch);
  egi_plan_destroy(r->plan);
  egi_store_destroy(r->store);
  for (uint32_t i = 0; i < r->n_inputs; i++) free(r->inputs[i]);
}

static double run_loss(runner *r, const char *name) {
  double loss = 0.0;
  for (uint32_t i = 0; i < r->n_inputs; i++)
    CHECK(egi_session_set_input(r->session, i, r->inputs[i], (size_t)r->counts[i] * sizeof(double)));
  CHECK(egi_session_run(r->session));
  CHECK(egi_session_read_output(r->session, 0, &loss, sizeof(loss)));
  return loss;
}

/* Elements of all gradients, in the order of the states. */
static void compare(runner *r, const gradient_case *c) {
  const egi_module *module = r->fixture->module;
  double h = c->step > 0 ? c->step : 1e-5, limit = c->tolerance > 0 ? c->tolerance : 5e-7;
  double loss = run_loss(r, c->graph);
  assert_true(isfinite(loss));
  uint64_t n_pool = module->pool_elements[EGI_POOL_GRADIENTS];
  float *gradients = calloc((size_t)n_pool, sizeof(float));
  assert_non_null(gradients);
  memcpy(gradients, egi_store_pool(r->store, EGI_POOL_GRADIENTS), (size_t)n_pool * sizeof(float));
  double largest = 1e-3 * (1.0 + fabs(loss));
  for (uint64_t i = 0; i < n_pool; i++) largest = fmax(largest, fabs((double)gradients[i]));
  for (uint32_t s = 1; s < module->n_states; s++) {
    const egi_state *state = &module->states[s];
    if (state->pool != EGI_POOL_GRADIENTS) continue;
    const egi_value *input = &r->fixture->graph->values[egi_graph_find_value(r->fixture->graph, state->name)];
    assert_int_equal(input->kind, EGI_VALUE_INPUT);
    double *values = r->inputs[input->index];
    for (int64_t k = 0; k < r->counts[input->index]; k++) {
      double x = values[k];
      values[k] = x + h;
      double above = run_loss(r, c->graph);
      values[k] = x - h;
      double below = run_loss(r, c->graph);
      values[k] = x;
      double expected = (above - below) / (2.0 * h), got = (double)gradients[state->offset + (uint64_t)k];
      if (!(fabs(got - expected) <= limit * largest))
        fail_msg("%s\ninput %s, element %d: the rule says %.9g, differences say %.9g", c->graph, state->name, (int)k,
                 got, expected);
    }
  }
  free(gradients);
}

/* Outputs of the case's graph with its fused operators and with their bodies. */
static void compare_bodies(pass_fixture *fixture, const gradient_case *c) {
  const egi_graph *graph = fixture->graph;
  egi_rewrite_check *check = NULL;
  if (egi_rewrite_check_begin(graph, &check) != EG_OK || !check) fail_msg("%s: cannot be run", c->graph);
  pass_run(fixture, "expand_fused", NULL);
  if (egi_rewrite_check_end(check, fixture->graph, "expand_fused") != EG_OK)
    fail_msg("%s\n%s", c->graph, eg_context_error(fixture->ctx));
  egi_rewrite_check_free(check);
}

/* With `is_expanded` the bodies of fused operators instead of the operators; returns whether the graph has any. */
static bool check_case(pass_fixture *fixture, const gradient_case *c, bool is_expanded) {
  runner state = {.fixture = fixture}, *r = &state;
  bool has_bodies = false;
  pass_graph(fixture, c->graph);
  bool has_calls = pass_count(fixture, EGI_OP_UNKNOWN) > 0;
  if (pass_try(fixture, "inline_functions,lower_operators", NULL) != EG_OK)
    fail_msg("%s\n%s", c->graph, eg_context_error(fixture->ctx));
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++)
    has_bodies = has_bodies || egi_op_is_fused(fixture->graph->nodes[id].op);
  if (is_expanded) compare_bodies(fixture, c);
  /* The numbers in a function's body become constants, as they are when a model is trained. */
  if (has_calls) pass_run(fixture, "fold_constants,eliminate_identity,fold_constants", NULL);
  make_trainable(fixture, c);
  add_loss(fixture);
  if (pass_try(fixture, "dispatch_moe,differentiate,eliminate_common,eliminate_dead", NULL) != EG_OK)
    fail_msg("%s\n%s", c->graph, eg_context_error(fixture->ctx));
  open_runner(r, c, c->graph);
  compare(r, c);
  close_runner(r);
  return has_bodies;
}

static void rules_agree_with_differences(void **state) {
  for (size_t i = 0; i < EGI_COUNT(cases); i++)
    if (check_case(*state, &cases[i], false)) (void)check_case(*state, &cases[i], true);
}

static void every_rule_has_a_case(void **state) {
  pass_fixture *fixture = *state;
  bool is_covered[EGI_OP_COUNT] = {[EGI_OP_FakeQuantize] =
                                       true}; /* its gradient is not that of its steps, by intent: api/test_qat.c */
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    pass_graph(fixture, cases[i].graph);
    for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) is_covered[fixture->graph->nodes[id].op] = true;
  }
  for (int op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++) {
    if (egi_gradient_rule_of((egi_op)op) && !is_covered[op]) fail_msg("no case for %s", egi_op_get((egi_op)op)->name);
  }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(every_rule_has_a_case), TEST(rules_agree_with_differences)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
