/* dispatch_moe gives what the operator gave, in every form of experts, and leaves no MoE; count_experts adds one output
 * for all mixtures. Gradients are in test_gradients.c. */
#include "support_passes.h"

#include <stdio.h>
#include <string.h>

static const char *const graphs[] = {
    "(float[2,3,4] x, float[6,4] l, float[4,6,4] g, float[4,4,3] d) => (float[2,3,4] y)\n"
    "{ y = engraft.MoE <experts = 4, top_k = 2, normalise = 1, roles = [1, 0, 0, 0, 1, 0]> (x, l, , g, d) }",
    "(float[6,4] x, float[6,4] l, float[4,4,6] g, float[4,6] gb, float[4,3,4] d, float[4,4] db) => (float[6,4] y)\n"
    "{ y = engraft.MoE <experts = 4, top_k = 2, order = \"after\", gate_up = \"interleaved\", alpha = 1.702, limit = "
    "0.9, "
    "offset = 1.0, roles = [1, 1, 0, 0, 1, 1], transposed = [1, 0, 1]> (x, l, , g, gb, d, db) }",
    "(float[5,4] x, float[5,2] l, float[3,4] g0, float[3,4] g1, float[3,4] u0, float[3,4] u1, float[4,3] d0, "
    "float[4,3] "
    "d1) => (float[5,4] y) { y = engraft.MoE <experts = 2, top_k = 1, scoring = \"sigmoid\", order = \"after\", "
    "gate_up = "
    "\"separate\", activation = \"gelu\", roles = [2, 0, 2, 0, 2, 0]> (x, l, , g0, g1, u0, u1, d0, d1) }",
    "(float[5,4] x, float[5,6] l, float[6] c, float[6,3,4] g, float[6,4,3] d) => (float[5,4] y)\n"
    "{ y = engraft.MoE <experts = 6, top_k = 2, scoring = \"sigmoid\", normalise = 1, routed_scale = 2.5, groups = 3, "
    "top_groups = 2, gate_up = \"none\", activation = \"silu\", alpha = 1.5, limit = 0.5, roles = [1, 0, 0, 0, 1, 0]> "
    "(x, l, c, g, d) }",
    "(float[5,4] x, float[5,3] l, float[3,6,4] g, float[3,4,3] d, float[6,4] ga, float[6,6] gb, float[3,3] da, "
    "float[4,3] "
    "db) => (float[5,4] y) { y = engraft.MoE <experts = 3, top_k = 2, adapter_scales = [0.5, 0.0, 2.0], roles = [1, 0, "
    "0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1]> (x, l, , g, d, ga, gb, da, db) }",
    "(float[5,4] x, float[5,3] l, float[3,3,4] g, float[3,3,4] u, float[3,4,3] d, float[6,4] ga, float[3,6] gb, "
    "float[6,4] ua, float[3,6] ub) => (float[5,4] y) { y = engraft.MoE <experts = 3, top_k = 2, gate_up = "
    "\"separate\", limit = 0.5, adapter_scales = [0.5, 0.25, 0.0], roles = [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, "
    "1, 1, 0, 0]> (x, l, , g, u, d, ga, gb, ua, ub) }",
};

static void results_stay(void **state) {
  pass_fixture *fixture = *state;
  for (size_t i = 0; i < 2 * EGI_COUNT(graphs); i++) {
    const egi_adapt_options adapt = {.is_loop = i % 2 == 1};
    egi_rewrite_check *check = NULL;
    pass_graph(fixture, graphs[i / 2]);
    if (egi_rewrite_check_begin(fixture->graph, &check) != EG_OK || check == NULL) fail_msg("%s", graphs[i / 2]);
    pass_run(fixture, "dispatch_moe", &adapt);
    if (egi_rewrite_check_end(check, fixture->graph, "dispatch_moe") != EG_OK)
      fail_msg("%s\n%s", graphs[i / 2], eg_context_error(fixture->ctx));
    egi_rewrite_check_free(check);
    assert_int_equal(pass_count(fixture, EGI_OP_MoE), 0);
    assert_int_equal(pass_count(fixture, EGI_OP_Route), 1);
    assert_int_equal(pass_count(fixture, EGI_OP_Combine), 1);
    assert_true(egi_graph_find_value(fixture->graph, "y") != 0);
    pass_run_settled(fixture, "dispatch_moe");
  }
}

#define MIXTURE(x, l, y, experts) \
  y " = engraft.MoE <experts = " experts ", top_k = 1, roles = [1, 0, 0, 0, 1, 0]> (" x ", " l ", , g, d)\n"
#define TOKENS \
  "(int64[B,S] input_ids, float[9,4] t, float[4,3] r, float[3,6,4] g, float[3,4,3] d) => (float[B,S,4] y)\n"

static void uses_are_counted(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, TOKENS "{ x = Gather (t, input_ids) l = MatMul (x, r)\n" MIXTURE(
                          "x", "l", "z", "3") "m = MatMul (z, r)\n" MIXTURE("z", "m", "y", "3") "}");
  pass_run(fixture, "dispatch_moe,count_experts", NULL);
  pass_run_settled(fixture, "count_experts");
  egi_value_id load = egi_graph_find_value(fixture->graph, EGI_OUTPUT_LOAD);
  assert_true(load != 0 && egi_graph_is_output(fixture->graph, load));
  static const int64_t wanted[3] = {2, 2, 3};
  assert_int_equal(fixture->graph->values[load].rank, 3);
  for (int i = 0; i < 3; i++) {
    int64_t size = 0;
    assert_true(egi_dim_value(fixture->module->dims, fixture->graph->values[load].dims[i], &size));
    assert_int_equal(size, wanted[i]);
  }
}

/* The body, for --no-fuse. */
static void bodies_stay(void **state) {
  pass_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(graphs); i++) {
    egi_rewrite_check *check = NULL;
    pass_graph(fixture, graphs[i]);
    if (egi_rewrite_check_begin(fixture->graph, &check) != EG_OK || check == NULL) fail_msg("%s", graphs[i]);
    pass_run(fixture, "expand_fused", NULL);
    if (egi_rewrite_check_end(check, fixture->graph, "expand_fused") != EG_OK)
      fail_msg("%s\n%s", graphs[i], eg_context_error(fixture->ctx));
    egi_rewrite_check_free(check);
    assert_int_equal(pass_count(fixture, EGI_OP_MoE), 0);
  }
}

/* Without tokens, or where rows are no tokens, nothing is counted. */
static void other_rows_are_left(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, graphs[0]);
  pass_run(fixture, "dispatch_moe,count_experts", NULL);
  assert_int_equal(egi_graph_find_value(fixture->graph, EGI_OUTPUT_LOAD), 0);
}

/* Numbers that no file means: one line, no arithmetic beyond what integers hold. */
static void damage_is_refused(void **state) {
  static const char *const texts[] = {
      "(float[3,4] l) => (float[6] w) { e, s, i, o, w = engraft.Route <experts = 4, top_k = 9223372036854775807> (l) }",
      "(float[3,4] l) => (float[6] w) { e, s, i, o, w = engraft.Route <experts = 0, top_k = 2> (l) }",
      "(float[6,4] x, int32[4] o, float[3,5,4] w) => (float[6,5] y) { y = engraft.RaggedLinear <experts = "
      "9223372036854775807, in_features = 4, roles = [1]> (x, , o, , w) }",
      "(float[6,4] x, int32[4] o, float[3,5,4] w) => (float[6,5] y) { y = engraft.RaggedLinear <experts = 3, "
      "in_features "
      "= 9223372036854775807, roles = [1]> (x, , o, , w) }",
      "(float[6,4] x, int32[4] o, float[3,5,4] w) => (float[6,5] y) { y = engraft.RaggedLinear <experts = 3, "
      "in_features "
      "= 4, roles = [1, 3]> (x, , o, , w) }",
      "(float[6,4] x, int32[5] o, float[3,5,4] w) => (float[6,5] y) { y = engraft.RaggedLinear <experts = 3, "
      "in_features "
      "= 4, roles = [1]> (x, , o, , w) }",
      "(float[6,4] x, float[6,3] l, float[3,6,4] g, float[3,4,3] d, float[7,4] a, float[6,7] b) => (float[6,4] y) { y "
      "= "
      "engraft.MoE <experts = 3, top_k = 1, adapter_scales = [1.0, 1.0, 1.0], roles = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, "
      "0, "
      "0, 1, 1]> (x, l, , g, d, a, b) }"};
  pass_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(texts); i++) {
    char whole[1024];
    egi_module *module = NULL;
    snprintf(whole, sizeof whole, "<ir_version: 10, opset_import: [\"\": 23, \"engraft\": 1]>\ng %s", texts[i]);
    if (egi_module_parse(fixture->ctx, whole, strlen(whole), &module) != EG_OK)
      fail_msg("%s", eg_context_error(fixture->ctx));
    if (egi_infer_graph(module->graphs[0]) == EG_OK) fail_msg("taken: %s", texts[i]);
    assert_null(strchr(eg_context_error(fixture->ctx), '\n'));
    egi_module_destroy(module);
  }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(results_stay), TEST(bodies_stay), TEST(uses_are_counted),
                                     TEST(other_rows_are_left), TEST(damage_is_refused)};
  return cmocka_run_group_tests_name("dispatch_moe", tests, NULL, NULL);
}
