/* The generator: ONNX text, parsed and exported. Sizes of tensors are small; what is measured is the graph. */
#include "bench/graphs.h"

#include <stdio.h>

#include "graph/graph.h"

/* A decoder layer as the TorchScript exporter writes one. %L: the layer's number; %I and %O: the names of the residual
 * stream before and after it. */
#define NODE(path, operator, line) "[\"/model/layers.%L/" path "/" operator"\"] " line "\n"
#define NORM(path, prefix, x)                                                                 \
  NODE(path, "Pow", prefix "_p%L = Pow (" x ", two)")                                         \
  NODE(path, "ReduceMean", prefix "_m%L = ReduceMean <keepdims = 1> (" prefix "_p%L, minus)") \
  NODE(path, "Add", prefix "_a%L = Add (" prefix "_m%L, epsilon)")                            \
  NODE(path, "Sqrt", prefix "_s%L = Sqrt (" prefix "_a%L)")                                   \
  NODE(path, "Div", prefix "_r%L = Div (one, " prefix "_s%L)")                                \
  NODE(path, "Mul", prefix "_x%L = Mul (" x ", " prefix "_r%L)")                              \
  NODE(path, "Mul_1", prefix "_y%L = Mul (" prefix "_w%L, " prefix "_x%L)")
#define SIZE(prefix, axis)                                                                   \
  NODE("self_attn", "Shape_" #axis, prefix "_h" #axis "%L = Shape (at_y%L)")                 \
  NODE("self_attn", "Gather_" #axis,                                                         \
       prefix "_g" #axis "%L = Gather <axis = 0> (" prefix "_h" #axis "%L, index" #axis ")") \
  NODE("self_attn", "Unsqueeze_" #axis, prefix "_u" #axis "%L = Unsqueeze (" prefix "_g" #axis "%L, zero)")
#define HEADS(prefix)                                                                            \
  NODE("self_attn/" prefix "_proj", "MatMul", prefix "_l%L = MatMul (at_y%L, " prefix "_w%L)")   \
  SIZE(prefix, 0)                                                                                \
  SIZE(prefix, 1)                                                                                \
  NODE("self_attn", "Concat_" prefix,                                                            \
       prefix "_c%L = Concat <axis = 0> (" prefix "_u0%L, " prefix "_u1%L, heads, head)")        \
  NODE("self_attn", "Reshape_" prefix, prefix "_v%L = Reshape (" prefix "_l%L, " prefix "_c%L)") \
  NODE("self_attn", "Transpose_" prefix, prefix "_t%L = Transpose <perm = [0, 2, 1, 3]> (" prefix "_v%L)")
#define ROPE(prefix)                                                                                           \
  NODE("self_attn", "Mul_" prefix, prefix "_rc%L = Mul (" prefix "_t%L, cosine)")                              \
  NODE("self_attn", "Slice_" prefix, prefix "_r1%L = Slice (" prefix "_t%L, zero, half, axis)")                \
  NODE("self_attn", "Slice_1" prefix, prefix "_r2%L = Slice (" prefix "_t%L, half, head, axis)")               \
  NODE("self_attn", "Neg_" prefix, prefix "_rn%L = Neg (" prefix "_r2%L)")                                     \
  NODE("self_attn", "Concat_1" prefix, prefix "_rr%L = Concat <axis = -1> (" prefix "_rn%L, " prefix "_r1%L)") \
  NODE("self_attn", "Mul_1" prefix, prefix "_rs%L = Mul (" prefix "_rr%L, sine)")                              \
  NODE("self_attn", "Add_" prefix, prefix "_e%L = Add (" prefix "_rc%L, " prefix "_rs%L)")
static const char attention[] = NORM("input_layernorm", "at", "%I") HEADS("q") HEADS("k") HEADS("v") ROPE("q") ROPE("k")
    NODE("self_attn", "Transpose_4", "kt%L = Transpose <perm = [0, 1, 3, 2]> (k_e%L)")
        NODE("self_attn", "MatMul", "qk%L = MatMul (q_e%L, kt%L)")
            NODE("self_attn", "Mul_4", "sc%L = Mul (qk%L, scale)") NODE("self_attn", "Add_4", "ma%L = Add (sc%L, mask)")
                NODE("self_attn", "Softmax", "so%L = Softmax <axis = -1> (ma%L)")
                    NODE("self_attn", "MatMul_1", "av%L = MatMul (so%L, v_t%L)")
                        NODE("self_attn", "Transpose_5", "ot%L = Transpose <perm = [0, 2, 1, 3]> (av%L)") SIZE("o", 0)
                            SIZE("o", 1)
                                NODE("self_attn", "Concat_9", "oc%L = Concat <axis = 0> (o_u0%L, o_u1%L, minus)")
                                    NODE("self_attn", "Reshape_9", "or%L = Reshape (ot%L, oc%L)")
                                        NODE("self_attn/o_proj", "MatMul", "ol%L = MatMul (or%L, o_w%L)")
                                            NODE("", "Add", "ra%L = Add (%I, ol%L)")
                                                NORM("post_attention_layernorm", "po", "ra%L");

static const char mlp[] = NODE("mlp/gate_proj", "MatMul", "ga%L = MatMul (po_y%L, ga_w%L)")
    NODE("mlp/act_fn", "Sigmoid", "si%L = Sigmoid (ga%L)") NODE("mlp/act_fn", "Mul", "ac%L = Mul (ga%L, si%L)")
        NODE("mlp/up_proj", "MatMul", "up%L = MatMul (po_y%L, up_w%L)") NODE("mlp", "Mul", "gu%L = Mul (ac%L, up%L)")
            NODE("mlp/down_proj", "MatMul", "do%L = MatMul (gu%L, do_w%L)") NODE("", "Add_1", "%O = Add (ra%L, do%L)");

/* A mixture of experts as a trace writes one: %E is the expert, %N the next. */
static const char router[] =
    NODE("mlp", "Reshape", "f%L = Reshape (po_y%L, rows)") NODE("mlp/gate", "MatMul", "lo%L = MatMul (f%L, gt_w%L)")
        NODE("mlp/gate", "Softmax", "pr%L = Softmax (lo%L)") NODE("mlp/gate", "TopK", "v%L, i%L = TopK (pr%L, chosen)")
            NODE("mlp/gate", "ReduceSum", "t%L = ReduceSum (v%L, minus)")
                NODE("mlp/gate", "Div", "w%L = Div (v%L, t%L)") NODE("mlp/experts", "Shape", "fs%L = Shape (f%L)")
                    NODE("mlp/experts", "ConstantOfShape", "y%L_0 = ConstantOfShape <value = float[1] {0}> (fs%L)")
                        NODE("mlp/experts", "OneHot", "oh%L = OneHot (i%L, experts, bits)")
                            NODE("mlp/experts", "Transpose", "mk%L = Transpose <perm = [2, 1, 0]> (oh%L)")
                                NODE("mlp/experts", "Unsqueeze", "wu%L = Unsqueeze (w%L, axis2)")
                                    NODE("mlp/experts", "Flatten", "wf%L = Flatten <axis = 2> (wu%L)");
#define EXPERT(operator, line) NODE("mlp/experts", operator"_%E", line)
static const char expert[] = EXPERT("Gather", "a%L_%E = Gather <axis = 0> (mk%L, expert%E)") EXPERT(
    "Cast", "b%L_%E = Cast <to = 9> (a%L_%E)") EXPERT("NonZero", "c%L_%E = NonZero (b%L_%E)")
    EXPERT("Transpose_1", "d%L_%E = Transpose <perm = [1, 0]> (c%L_%E)") EXPERT(
        "Split", "e%L_%E, g%L_%E = Split <axis = 1> (d%L_%E, ones)") EXPERT("Squeeze",
                                                                            "h%L_%E = Squeeze (e%L_%E, axis1)")
        EXPERT("Squeeze_1", "j%L_%E = Squeeze (g%L_%E, axis1)") EXPERT(
            "Gather_1", "k%L_%E = Gather <axis = 0> (f%L, j%L_%E)") EXPERT("MatMul",
                                                                           "l%L_%E = MatMul (k%L_%E, ug%L_%E)")
            EXPERT("Slice", "m%L_%E = Slice (l%L_%E, zero, half, axis1)") EXPERT(
                "Slice_1", "n%L_%E = Slice (l%L_%E, half, head, axis1)") EXPERT("Sigmoid", "o%L_%E = Sigmoid (m%L_%E)")
                EXPERT("Mul", "p%L_%E = Mul (m%L_%E, o%L_%E)") EXPERT("Mul_2", "q%L_%E = Mul (p%L_%E, n%L_%E)") EXPERT(
                    "MatMul_1", "r%L_%E = MatMul (q%L_%E, ud%L_%E)") EXPERT("Mul_3", "s%L_%E = Mul (j%L_%E, eight)")
                    EXPERT("Add_1", "u%L_%E = Add (h%L_%E, s%L_%E)") EXPERT("Gather_5",
                                                                            "x%L_%E = Gather <axis = 0> (wf%L, u%L_%E)")
                        EXPERT("Mul_4", "z%L_%E = Mul (r%L_%E, x%L_%E)") EXPERT("Unsqueeze_1",
                                                                                "aa%L_%E = Unsqueeze (j%L_%E, axis1)")
                            EXPERT("Shape_5", "ab%L_%E = Shape (z%L_%E)")
                                EXPERT("Expand_1", "ac%L_%E = Expand (aa%L_%E, ab%L_%E)")
                                    EXPERT("Shape_6", "ad%L_%E = Shape (y%L_0)")
                                        EXPERT("ConstantOfShape_1",
                                               "ae%L_%E = ConstantOfShape <value = float[1] {0}> (ad%L_%E)")
                                            EXPERT("ScatterElements",
                                                   "af%L_%E = ScatterElements <axis = 0> (ae%L_%E, ac%L_%E, z%L_%E)")
                                                EXPERT("Add_2", "y%L_%N = Add (y%L_%E, af%L_%E)");
static const char behind[] = NODE("mlp", "Shape", "ps%L = Shape (po_y%L)")
    NODE("mlp", "Reshape_1", "do%L = Reshape (y%L_128, ps%L)") NODE("", "Add_1", "%O = Add (ra%L, do%L)");
#undef NODE

static const char transformer_weights[] =
    "float two = {2}, float one = {1}, float epsilon = {0.00001}, float scale = {0.25}, int64 index0 = {0}, "
    "int64 index1 = {1}, int64[1] heads = {2}, int64[1] head = {8}, int64[1] minus = {-1}, int64[1] zero = {0}, "
    "int64[1] half = {4}, int64[1] axis = {3}";

enum { N_EXPERTS = 128 };
static const char expert_weights[] = ", int64[2] rows = {-1, 16}, int64[1] chosen = {8}, int64 experts = {128}, "
                                     "int64[2] bits = {0, 1}, int64[1] axis1 = "
                                     "{1}, int64[1] axis2 = {2}, int64[2] ones = {1, 1}, int64 eight = {8}";

/* Four nodes. */
static const char link[] = "[\"/layers.%L/MatMul\"] p%L = MatMul (%I, w%L)\n[\"/layers.%L/Add\"] a%L = Add (p%L, b%L)\n"
                           "[\"/layers.%L/Relu\"] r%L = Relu (a%L)\n[\"/layers.%L/Add_1\"] %O = Add (%I, r%L)\n";

static void add_part(egi_text *out, const char *part, uint32_t number, uint32_t n_expert) {
  for (const char *c = part; *c != '\0'; c++) {
    if (*c != '%')
      egi_text_append(out, c, 1);
    else if (*++c == 'L')
      egi_text_format(out, "%u", number);
    else if (*c == 'E' || *c == 'N')
      egi_text_format(out, "%u", n_expert + (*c == 'N'));
    else
      egi_text_format(out, "x%u", number + (*c == 'O'));
  }
}

static void add_step(egi_text *out, const char *step, uint32_t number) {
  add_part(out, step, number, 0);
}

static void add_weight(egi_text *out, const char *name, uint32_t number, bool is_matrix) {
  egi_text_format(out, ",\n float[16%s] %s%u = {", is_matrix ? ",16" : "", name, number);
  for (unsigned i = 0; i < (is_matrix ? 256u : 16u); i++)
    egi_text_format(out, "%s0.%u", i ? "," : "", 1 + (i + number) % 9);
  egi_text_add(out, "}");
}

static void add_transformer(egi_text *out, uint32_t n_layers) {
  static const char *const matrices[] = {"q_w", "k_w", "v_w", "o_w", "ga_w", "up_w", "do_w"};
  egi_text_add(out,
               "<ir_version: 10, opset_import: [\"\": 23]>\ng (float[batch,sequence,16] x0, float[batch,1,sequence,8] "
               "cosine, float[batch,1,sequence,8] sine, float[batch,1,sequence,sequence] mask) => ");
  egi_text_format(out, "(float[batch,sequence,16] x%u)\n<%s", n_layers, transformer_weights);
  for (uint32_t i = 0; i < n_layers; i++) {
    for (size_t j = 0; j < EGI_COUNT(matrices); j++) add_weight(out, matrices[j], i, true);
    add_weight(out, "at_w", i, false);
    add_weight(out, "po_w", i, false);
  }
  egi_text_add(out, ">\n{\n");
  for (uint32_t i = 0; i < n_layers; i++) {
    add_step(out, attention, i);
    add_step(out, mlp, i);
  }
}

/* A matrix of an expert, or of the router, with numbers of its own. */
static void add_matrix(egi_text *out, const char *name, unsigned rows, unsigned columns, uint32_t seed) {
  egi_text_format(out, ",\n float[%u,%u] %s = {", rows, columns, name);
  for (unsigned i = 0; i < rows * columns; i++)
    egi_text_format(out, "%s0.%u", i ? "," : "", 1 + (seed * 31 + i * 7) % 97);
  egi_text_add(out, "}");
}

static void add_experts(egi_text *out, uint32_t n_layers) {
  static const char *const matrices[] = {"q_w", "k_w", "v_w", "o_w"};
  char name[32];
  egi_text_add(out,
               "<ir_version: 10, opset_import: [\"\": 23]>\ng (float[batch,sequence,16] x0, float[batch,1,sequence,8] "
               "cosine, float[batch,1,sequence,8] sine, float[batch,1,sequence,sequence] mask) => ");
  egi_text_format(out, "(float[batch,sequence,16] x%u)\n<%s%s", n_layers, transformer_weights, expert_weights);
  for (uint32_t e = 0; e < N_EXPERTS; e++) egi_text_format(out, ", int64 expert%u = {%u}", e, e);
  for (uint32_t i = 0; i < n_layers; i++) {
    for (size_t j = 0; j < EGI_COUNT(matrices); j++) add_weight(out, matrices[j], i, true);
    add_weight(out, "at_w", i, false);
    add_weight(out, "po_w", i, false);
    (void)snprintf(name, sizeof name, "gt_w%u", i);
    add_matrix(out, name, 16, N_EXPERTS, i);
    for (uint32_t e = 0; e < N_EXPERTS; e++) {
      (void)snprintf(name, sizeof name, "ug%u_%u", i, e);
      add_matrix(out, name, 16, 8, i + e);
      (void)snprintf(name, sizeof name, "ud%u_%u", i, e);
      add_matrix(out, name, 4, 16, i + e + 1);
    }
  }
  egi_text_add(out, ">\n{\n");
  for (uint32_t i = 0; i < n_layers; i++) {
    add_step(out, attention, i);
    add_step(out, router, i);
    for (uint32_t e = 0; e < N_EXPERTS; e++) add_part(out, expert, i, e);
    add_step(out, behind, i);
  }
}

static void add_plain(egi_text *out, uint32_t n_links) {
  egi_text_format(out,
                  "<ir_version: 10, opset_import: [\"\": 23]>\ng (float[batch,16] x0) => (float[batch,16] x%u)\n<"
                  "float unused = {0}",
                  n_links);
  for (uint32_t i = 0; i < n_links; i++) {
    add_weight(out, "w", i, true);
    add_weight(out, "b", i, false);
  }
  egi_text_add(out, ">\n{\n");
  for (uint32_t i = 0; i < n_links; i++) add_step(out, link, i);
}

static uint32_t count_nodes(const char *step) {
  uint32_t count = 0;
  for (; *step != '\0'; step++) count += *step == '\n';
  return count;
}

static uint32_t step_nodes(bench_graph_kind kind) {
  if (kind == BENCH_GRAPH_PLAIN) return count_nodes(link);
  if (kind == BENCH_GRAPH_TRANSFORMER) return count_nodes(attention) + count_nodes(mlp);
  return count_nodes(attention) + count_nodes(router) + N_EXPERTS * count_nodes(expert) + count_nodes(behind);
}

eg_status bench_write_graph(eg_context *ctx, bench_graph_kind kind, uint32_t n_nodes, const char *path,
                            uint32_t *out_nodes) {
  uint32_t step = step_nodes(kind), n_steps = n_nodes / step + (n_nodes % step > 0);
  egi_module *module = NULL;
  egi_text text;
  egi_text_init(&text, ctx);
  if (kind == BENCH_GRAPH_PLAIN)
    add_plain(&text, n_steps);
  else if (kind == BENCH_GRAPH_TRANSFORMER)
    add_transformer(&text, n_steps);
  else
    add_experts(&text, n_steps);
  egi_text_add(&text, "}\n");
  eg_status status = egi_text_status(&text);
  if (status == EG_OK) status = egi_module_parse(ctx, egi_text_string(&text), text.length, &module);
  if (status == EG_OK) status = egi_module_export(module, module->graphs[0], path);
  egi_module_destroy(module);
  egi_text_free(&text);
  *out_nodes = n_steps * step;
  return status;
}

uint32_t bench_layer_nodes(bench_graph_kind kind) {
  return step_nodes(kind);
}
