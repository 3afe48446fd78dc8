/* The generator: ONNX text, parsed and exported. Sizes of tensors are small; what is measured is the graph. */
#include "bench/graphs.h"

#include "graph/graph.h"

/* A decoder layer as the TorchScript exporter writes one. %L: the layer's number; %I and %O: the names of the residual
 * stream before and after it. */
static const char layer[] =
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
    NORM("input_layernorm", "at", "%I") HEADS("q") HEADS("k") HEADS("v") ROPE("q") ROPE("k") NODE(
        "self_attn", "Transpose_4",
        "kt%L = Transpose <perm = [0, 1, 3, 2]> (k_e%L)") NODE("self_attn", "MatMul", "qk%L = MatMul (q_e%L, kt%L)")
        NODE("self_attn", "Mul_4", "sc%L = Mul (qk%L, scale)") NODE("self_attn", "Add_4", "ma%L = Add (sc%L, mask)")
            NODE("self_attn", "Softmax", "so%L = Softmax <axis = -1> (ma%L)") NODE("self_attn", "MatMul_1",
                                                                                   "av%L = MatMul (so%L, v_t%L)")
                NODE("self_attn", "Transpose_5", "ot%L = Transpose <perm = [0, 2, 1, 3]> (av%L)") SIZE("o", 0)
                    SIZE("o", 1) NODE("self_attn", "Concat_9", "oc%L = Concat <axis = 0> (o_u0%L, o_u1%L, minus)")
                        NODE("self_attn", "Reshape_9", "or%L = Reshape (ot%L, oc%L)")
                            NODE("self_attn/o_proj", "MatMul", "ol%L = MatMul (or%L, o_w%L)")
                                NODE("", "Add", "ra%L = Add (%I, ol%L)") NORM("post_attention_layernorm", "po", "ra%L")
                                    NODE("mlp/gate_proj", "MatMul", "ga%L = MatMul (po_y%L, ga_w%L)")
                                        NODE("mlp/act_fn", "Sigmoid", "si%L = Sigmoid (ga%L)")
                                            NODE("mlp/act_fn", "Mul", "ac%L = Mul (ga%L, si%L)")
                                                NODE("mlp/up_proj", "MatMul", "up%L = MatMul (po_y%L, up_w%L)")
                                                    NODE("mlp", "Mul", "gu%L = Mul (ac%L, up%L)")
                                                        NODE("mlp/down_proj", "MatMul", "do%L = MatMul (gu%L, do_w%L)")
                                                            NODE("", "Add_1", "%O = Add (ra%L, do%L)");
#undef NODE

static const char transformer_weights[] =
    "float two = {2}, float one = {1}, float epsilon = {0.00001}, float scale = {0.25}, int64 index0 = {0}, "
    "int64 index1 = {1}, int64[1] heads = {2}, int64[1] head = {8}, int64[1] minus = {-1}, int64[1] zero = {0}, "
    "int64[1] half = {4}, int64[1] axis = {3}";

/* Four nodes. */
static const char link[] = "[\"/layers.%L/MatMul\"] p%L = MatMul (%I, w%L)\n[\"/layers.%L/Add\"] a%L = Add (p%L, b%L)\n"
                           "[\"/layers.%L/Relu\"] r%L = Relu (a%L)\n[\"/layers.%L/Add_1\"] %O = Add (%I, r%L)\n";

static void add_step(egi_text *out, const char *step, uint32_t number) {
  for (const char *c = step; *c != '\0'; c++) {
    if (*c != '%')
      egi_text_append(out, c, 1);
    else if (*++c == 'L')
      egi_text_format(out, "%u", number);
    else
      egi_text_format(out, "x%u", number + (*c == 'O'));
  }
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
  for (uint32_t i = 0; i < n_layers; i++) add_step(out, layer, i);
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

eg_status bench_write_graph(eg_context *ctx, bench_graph_kind kind, uint32_t n_nodes, const char *path,
                            uint32_t *out_nodes) {
  bool is_plain = kind == BENCH_GRAPH_PLAIN;
  uint32_t step = count_nodes(is_plain ? link : layer), n_steps = n_nodes / step + (n_nodes % step > 0);
  egi_module *module = NULL;
  egi_text text;
  egi_text_init(&text, ctx);
  if (is_plain)
    add_plain(&text, n_steps);
  else
    add_transformer(&text, n_steps);
  egi_text_add(&text, "}\n");
  eg_status status = egi_text_status(&text);
  if (status == EG_OK) status = egi_module_parse(ctx, egi_text_string(&text), text.length, &module);
  if (status == EG_OK) status = egi_module_export(module, module->graphs[0], path);
  egi_module_destroy(module);
  egi_text_free(&text);
  *out_nodes = n_steps * step;
  return status;
}
