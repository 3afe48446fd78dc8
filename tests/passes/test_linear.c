/* fuse_linear: what exporters write for a linear layer becomes one Linear; its parts, adapters and head. */
#include "support_passes.h"

#include <stdio.h>
#include <string.h>

/* x is hidden: a float input of three dims. */
static void products_with_parameters_become_linear(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[b,s,4] x) => (float[b,s,3] y, float[b,s,3] z)\n"
                      "<float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] c = {1,2,3}>\n"
                      "{ p = MatMul (x, w)  y = Add (c, p)  t = Transpose (w)  u = Transpose (t)  z = MatMul (x, u) }");
  pass_run_settled(fixture, "fuse_linear");
  pass_expect(fixture, "%1 = Transpose(w)\n"
                       "%2 = Transpose<perm=1,0>(w)\n"
                       "%3 = Linear(x, %2, c)\n"
                       "%4 = Linear(x, %1)\n"
                       "-> y=%3\n-> z=%4\n");
}

static void a_gemm_loses_its_reshapes(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[b,s,4] x) => (float[b,s,3] y)\n"
                      "<float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] c = {1,2,3}, int64[2] rows = {-1, 4},\n"
                      " int64 zero = {0}, int64[1] n = {3}>\n"
                      "{ s = Shape <start = 0, end = 2> (x)  whole = Concat <axis = 0> (s, n)  f = Reshape (x, rows)\n"
                      "  g = Gemm <transB = 1> (f, w, c)  y = Reshape (g, whole) }");
  pass_run_settled(fixture, "fuse_linear");
  pass_expect(fixture, "%1 = Linear(x, w, c)\n-> y=%1\n");
}

static void a_bias_behind_the_reshape_is_taken(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[2,5,4] x) => (float[2,5,3] y)\n"
                      "<float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] c = {1,2,3}, int64[2] rows = {10, 4},\n"
                      " int64[3] whole = {2,5,3}>\n"
                      "{ f = Reshape (x, rows)  p = MatMul (f, w)  r = Reshape (p, whole)  y = Add (r, c) }");
  pass_run_settled(fixture, "fuse_linear");
  assert_int_equal(pass_count(fixture, EGI_OP_Linear), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Reshape) + pass_count(fixture, EGI_OP_Add), 0);
}

static void quantised_matrices_stay_so(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[b,s,4] x) => (float[b,s,2] y, float[b,s,2] z)\n"
                      "<int4[4,2] v = {1,2,3,4,5,6,7,-8}, float[2,2] s = {1,2,3,4}, uint8[2,4] w = {1,2,3,4,5,6,7,8},\n"
                      " float[2] t = {0.5,0.25}, uint8[2] o = {1,2}>\n"
                      "{ a = DequantizeLinear <axis = 0, block_size = 2> (v, s)  y = MatMul (x, a)\n"
                      "  d = DequantizeLinear <axis = -2> (w, t, o)  e = Transpose (d)  z = MatMul (x, e) }");
  pass_run(fixture, "fold_constants", NULL);
  pass_run_settled(fixture, "fuse_linear");
  pass_expect(fixture,
              "%1 = Linear<storage=blocked><axis=0><block_size=2><transposed=1>(x, v, _, s)\n"
              "%2 = Linear<storage=blocked><axis=0><block_size=0><transposed=0>(x, {1,2,3,4,5,6,7,8}, _, t, {1,2})\n"
              "-> y=%1\n-> z=%2\n");
}

/* An operator of the file's own that became a Linear when the model was loaded. */
static void a_bias_joins_a_quantised_layer(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(float[b,s,4] x) => (float[b,s,2] y)\n"
                      "<uint8[2,1,8] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[2,1] s = {1,2}, float[2] c = {1,2}>\n"
                      "{ p = com.microsoft.MatMulNBits <K = 4, N = 2, bits = 4, block_size = 16> (x, w, s)\n"
                      "  y = Add (p, c) }");
  pass_run(fixture, "lower_operators,eliminate_identity", NULL);
  pass_run_settled(fixture, "fuse_linear");
  pass_expect(fixture, "%1 = Linear<storage=nbits><bits=4><block_size=16><out_features=2><in_features=4>(x, w, c, s)\n"
                       "-> y=%1\n");
}

/* Products of what is computed, factors, shared results and scalar or wide addends stay. */
static void other_products_stay(void **state) {
  static const char *const graphs[] = {
      "(float[b,s,4] x, float[4,3] w) => (float[b,s,3] y) { y = MatMul (x, w) }",
      "(float[b,s,4] x) => (float[b,s,s] y) { t = Transpose <perm = [0,2,1]> (x)  y = MatMul (x, t) }",
      "(float[3,4] p, float[b,s,4] x) => (float[3,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}> { y = MatMul (p, w) }",
      ("(float[b,2,4] x) => (float[2,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, int64 i = {0}>\n"
       "{ r = Gather (x, i)  y = Gemm <alpha = 0.5> (r, w) }"),
  };
  pass_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(graphs); i++) {
    pass_graph(fixture, graphs[i]);
    pass_run_settled(fixture, "fuse_linear");
    if (pass_count(fixture, EGI_OP_Linear) != 0) fail_msg("%s", graphs[i]);
  }
  pass_graph(fixture, "(float[b,s,4] x) => (float[b,s,3] y, float[b,s,3] z)\n"
                      "<float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] c = {1,2,3}>\n"
                      "{ p = MatMul (x, w)  y = Add (p, c)  z = Neg (p) }");
  pass_run_settled(fixture, "fuse_linear");
  assert_int_equal(pass_count(fixture, EGI_OP_Add), 1); /* its result without the bias is used too */
}

/* ---- fused projections ------------------------------------------------------------------------------------------ */

static const char *linears(pass_fixture *fixture) {
  egi_linear *list = NULL;
  size_t count = 0;
  egi_text_free(&fixture->text);
  assert_int_equal(egi_find_linears(fixture->graph, &fixture->arena, &list, &count), EG_OK);
  for (size_t i = 0; i < count; i++)
    egi_text_format(&fixture->text, "%s %d>%d\n", list[i].path, (int)list[i].in_features, (int)list[i].out_features);
  return egi_text_string(&fixture->text);
}

static const char *const genai =
    "(int64[batch,sequence] input_ids) => (float[batch,sequence,5] logits)\n"
    "<float[5,2] \"model.embed_tokens.weight\" = {1,2,3,4,5,6,7,8,9,10}, float[2,8] w = "
    "{1,2,3,4,5,6,7,8,8,7,6,5,4,3,2,1},\n"
    " int64[3] sizes = {4,2,2}, float[2,5] h = {1,2,3,4,5,6,7,8,9,10}>\n"
    "{ [\"/model/embed_tokens/Gather\"] e = Gather (\"model.embed_tokens.weight\", input_ids)\n"
    "  [\"/model/layers.0/attn/qkv_proj/MatMul\"] p = MatMul (e, w)\n"
    "  q, k, v = Split <axis = 2> (p, sizes)  q1, q2 = Split <axis = -1, num_outputs = 2> (q)  a = Add (k, v)\n"
    "  b = Add (a, q1)  c = Add (b, q2)  [\"/lm_head/MatMul\"] logits = MatMul (c, h) }";

static void genais_projection_has_three_parts(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, genai);
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(linears(fixture), "model.layers.0.self_attn.q_proj 2>4\nmodel.layers.0.self_attn.k_proj 2>2\n"
                                        "model.layers.0.self_attn.v_proj 2>2\nlm_head 2>5\n");
  const egi_adapter_target target = {.path = "model.layers.0.self_attn.k_proj", .rank = 1, .scale = 2.0};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .is_frozen = true};
  pass_run(fixture, "graft_adapters", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_AddMatMul), 1);
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    const egi_node *node = &fixture->graph->nodes[id];
    if (node->op != EGI_OP_AddMatMul) continue;
    const egi_value *base = &fixture->graph->values[node->inputs[0]];
    assert_int_equal(fixture->graph->nodes[base->producer].op, EGI_OP_Split); /* the rows of k alone */
    assert_int_equal(base->index, 1);
  }
}

/* The same file with the module's Hugging Face name: the model's own fused layer. */
static void a_models_own_fused_layer_stays_one(void **state) {
  pass_fixture *fixture = *state;
  char text[2048];
  const char *at = strstr(genai, "/attn/");
  snprintf(text, sizeof text, "%.*s/self_attn/%s", (int)(at - genai), genai, at + strlen("/attn/"));
  pass_graph(fixture, text);
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  assert_string_equal(linears(fixture), "model.layers.0.self_attn.qkv_proj 2>8\nlm_head 2>5\n");
}

/* As tools leave a file whose nodes they made anew: little has a path. */
#define NAMELESS(table, attention, gate)                                                                   \
  "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"                                \
  "<float[3,2] \"" table "\" = {1,2,3,4,5,6}, int8[2,2] a = {1,2,3,4}, int8[2,2] b = {4,3,2,1},"           \
  " int8[2,2] c = {1,2,2,4}, int8[2,2] d = {1,3,3,4}, int8[2,2] e = {9,2,3,4}, int8[2,2] f = {7,2,3,4},\n" \
  " int8[2,2] g = {7,7,3,4}, int8[2,3] h = {1,2,3,4,5,6}, float s = {0.5}, int64[4] heads = {0,0,1,2}, "   \
  "int64[3] flat = {0,0,2}>\n"                                                                             \
  "{ x = Gather (\"" table "\", input_ids)\n"                                                              \
  "  da = DequantizeLinear (a, s)  db = DequantizeLinear (b, s)  dc = DequantizeLinear (c, s)\n"           \
  "  dd = DequantizeLinear (d, s)  de = DequantizeLinear (e, s)  df = DequantizeLinear (f, s)\n"           \
  "  dg = DequantizeLinear (g, s)  dh = DequantizeLinear (h, s)\n"                                         \
  "  q = MatMul (x, da)  k = MatMul (x, db)  v = MatMul (x, dc)  q4 = Reshape (q, heads)\n"                \
  "  k4 = Reshape (k, heads)  v4 = Reshape (v, heads)  qt = Transpose <perm = [0,2,1,3]> (q4)\n"           \
  "  kt = Transpose <perm = [0,2,1,3]> (k4)  vt = Transpose <perm = [0,2,1,3]> (v4)\n"                     \
  "  [\"" attention "\"] y, l = engraft.Attention <causal = 1> (qt, kt, vt)\n"                             \
  "  yt = Transpose <perm = [0,2,1,3]> (y)  yf = Reshape (yt, flat)  o = MatMul (yf, dd)\n"                \
  "  i = MatMul (o, de)  j = MatMul (o, df)\n"                                                             \
  "  [\"" gate "\"] n = engraft.GLU (i, j)  p = MatMul (n, dg)\n"                                          \
  "  logits = MatMul (p, dh) }"

static void layers_are_named_by_what_they_feed(void **state) {
  static const char *const graphs[] = {
      NAMELESS("m.model.embed_tokens.weight", "/m/model/layers.0/self_attn/Attention",
               "/m/model/layers.0/mlp/act_fn/Mul"),
      NAMELESS("m.model.embed_tokens.weight", "/m/model/layers.0/self_attn/Softmax/AttentionFusion/",
               "/m/model/layers.0/mlp/Mul"),
      NAMELESS("table", "node_1", "node_2"), /* layers are counted */
  };
  pass_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(graphs); i++) {
    pass_graph(fixture, graphs[i]);
    pass_run(fixture, "fuse_linear,name_modules", NULL);
    pass_run_settled(fixture, "name_modules");
    assert_string_equal(linears(fixture), "model.layers.0.self_attn.q_proj 2>2\nmodel.layers.0.self_attn.k_proj 2>2\n"
                                          "model.layers.0.self_attn.v_proj 2>2\nmodel.layers.0.self_attn.o_proj 2>2\n"
                                          "model.layers.0.mlp.gate_proj 2>2\nmodel.layers.0.mlp.up_proj 2>2\n"
                                          "model.layers.0.mlp.down_proj 2>2\nlm_head 2>3\n");
  }
}

static void a_head_joins_the_loss(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.has_gradient = true};
  pass_graph(fixture, genai);
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  pass_run(fixture, "append_loss", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_LinearLogProbability), 1);
  pass_graph(fixture, NAMELESS("table", "node_1", "node_2")); /* quantised */
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  pass_run(fixture, "append_loss", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_LinearLogProbability), 1);
}

static void quantised_weights_are_not_trained(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.is_full = true, .has_gradient = true};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] logits)\n"
                      "<float[5,2] \"wte.weight\" = {1,2,3,4,5,6,7,8,9,10}, int8[2,2] w = {1,2,3,4}, float s = {0.5}>\n"
                      "{ e = Gather (\"wte.weight\", input_ids)  d = DequantizeLinear (w, s)\n"
                      "  [\"/lm_head/MatMul\"] logits = MatMul (e, d) }");
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  assert_int_equal(pass_try(fixture, "graft_adapters", &adapt), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "stored quantised");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(products_with_parameters_become_linear),
      TEST(a_gemm_loses_its_reshapes),
      TEST(a_bias_joins_a_quantised_layer),
      TEST(a_bias_behind_the_reshape_is_taken),
      TEST(a_bias_joins_a_quantised_layer),
      TEST(quantised_matrices_stay_so),
      TEST(other_products_stay),
      TEST(genais_projection_has_three_parts),
      TEST(a_models_own_fused_layer_stays_one),
      TEST(layers_are_named_by_what_they_feed),
      TEST(a_head_joins_the_loss),
      TEST(quantised_weights_are_not_trained),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
