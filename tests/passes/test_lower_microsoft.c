/* Operators of com.microsoft: what they become, and forms that are refused by name. Their results are compared with
 * onnxruntime's in tests/api/test_microsoft.c. */
#include "support_passes.h"

static void norms_and_products_become_standard(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[b,s,32] x, float[b,s,32] r, float[32] g, uint8[5,1,16] w, float[5,1] c)\n"
             "=> (float[b,s,5] y, float[b,s,32] z)\n"
             "<float[32] g, uint8[5,1,16] w, float[5,1] c>\n"
             "{ n, mean, deviation, z = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.5> (x, r, g)\n"
             "  y = com.microsoft.MatMulNBits <K = 32, N = 5, bits = 4, block_size = 32> (n, w, c) }");
  pass_run_settled(fixture, "lower_operators");
  pass_run(fixture, "eliminate_identity", NULL);
  pass_expect(fixture,
              "%1 = Add(x, r)\n"
              "%2 = RMSNormalization<epsilon=0.5>(%1, g)\n"
              "%3 = Linear<storage=nbits><bits=4><block_size=32><out_features=5><in_features=32>(%2, w, _, c)\n"
              "-> y=%3\n-> z=%1\n");
}

/* Without a past nothing but the kind of mask is left to say. */
static void attention_without_a_past_is_causal(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float[b,s,16] x, int32[b] l, int32[1] t, float[b,1,0,4] k, float[b,1,0,4] v) => (float[b,s,8] y)\n"
             "{ y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (x, , , k, v, l, t) }");
  pass_run_settled(fixture, "lower_operators");
  assert_int_equal(pass_count(fixture, EGI_OP_Attention), 1);
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    const egi_node *node = &fixture->graph->nodes[id];
    if (node->op != EGI_OP_Attention) continue;
    assert_int_equal(egi_node_int(node, "is_causal", 0), 1);
    assert_int_equal(node->n_inputs, 3);
  }
}

static void forms_are_refused(void **state) {
#define QUERY(attributes, inputs)                                                                                   \
  "(float[1,3,16] x, int32[1] l, int32[1] t, float[1] c) => (float[1,3,8] y)\n"                                     \
  "{ y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1" attributes "> (x, , , , , l, t" inputs \
  ") }"
#define PRODUCT(attributes, weight)                               \
  "(float[2,32] x, " weight ", float[5,1] c) => (float[2,5] y)\n" \
  "{ y = com.microsoft.MatMulNBits <K = 32, N = 5, block_size = 32" attributes "> (x, w, c) }"
  static const struct {
    const char *graph, *part;
    eg_status status;
  } refused[] = {
      {QUERY(", k_quant_type = \"PER_TENSOR\"", ""), "quantised cache", EG_ERROR_UNSUPPORTED},
      {QUERY(", qk_output = 1", ""), "qk_output", EG_ERROR_UNSUPPORTED},
      {QUERY(", do_rotary = 1", ""), "without caches", EG_ERROR_FORMAT},
      {QUERY("", ", c, c"), NULL, EG_OK}, /* caches that nothing asks for */
      {PRODUCT(", bits = 4, weight_prepacked = 1", "uint8[5,1,16] w"), "weight_prepacked", EG_ERROR_UNSUPPORTED},
      {PRODUCT(", bits = 3", "uint8[5,1,12] w"), "codes of 3 bits", EG_ERROR_UNSUPPORTED},
      {PRODUCT(", bits = 4", "uint8[5,1,15] w"), "75 elements, not 80", EG_ERROR_SHAPE},
      {PRODUCT(", bits = 4", "int8[5,1,16] w"), "input 1", EG_ERROR_SHAPE},
      {"(float[2,3] x) => (float[2,3] y) { y = com.microsoft.SimplifiedLayerNormalization (x) }", "number of inputs",
       EG_ERROR_FORMAT},
      {"(float[2,3,4] x) => (float[2,3,4] y) { y = com.microsoft.MultiHeadAttention <num_heads = 2> (x) }",
       "keys are missing", EG_ERROR_FORMAT},
      {"(float[2,3,4] x) => (float[2,3,4] y) { y = com.microsoft.MultiHeadAttention <num_heads = 3> (x, x, x) }",
       "num_heads does not divide", EG_ERROR_SHAPE},
  };
  pass_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(refused); i++) {
    pass_graph(fixture, refused[i].graph);
    eg_status status = pass_try(fixture, "lower_operators", NULL);
    if (status != refused[i].status) fail_msg("%s\n%s", refused[i].graph, eg_context_error(fixture->ctx));
    if (refused[i].part) pass_expect_error(fixture, refused[i].part);
  }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(norms_and_products_become_standard), TEST(attention_without_a_past_is_causal),
                                     TEST(forms_are_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
