/* The cost table: products, attention by visible pairs, bytes of everything else, views for nothing; seconds of a
 * device; every operator of the table has a cost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "backend/costs.h"
#include "tests/backend/support_fake.h"

#define HEAD "<ir_version: 10, opset_import: [\"\": 23, \"engraft\": 1]>\n"

/* Cost of the last node of a graph with n = 10. */
static egi_cost cost_of(eg_context *ctx, const char *text) {
  egi_module *module = parse_graph(ctx, text);
  egi_graph *graph = module->graphs[0];
  egi_binding binding = {egi_dim_symbol(module->dims, "n"), 10};
  egi_cost cost;
  if (egi_costs_get()->node(graph, graph->n_nodes - 1, &binding, 1, &cost) != EG_OK)
    fail_msg("%s", eg_context_error(ctx));
  egi_module_destroy(module);
  return cost;
}

static void check(double found, double wanted) {
  if (!(found >= wanted && found <= wanted)) fail_msg("%.17g, not %.17g", found, wanted);
}

static void products_count_their_multiplications(void **state) {
  egi_cost cost = cost_of(*state, HEAD "g (float[n,4] x, float[4,6] w) => (float[n,6] y) { y = MatMul (x, w) }\n");
  check(cost.flops, 2.0 * 10 * 4 * 6);
  check(cost.read_bytes, 4.0 * (10 * 4 + 4 * 6));
  check(cost.written_bytes, 4.0 * 10 * 6);
  assert_int_equal(cost.dtype, EG_DTYPE_F32);
  cost = cost_of(*state, HEAD "g (float[4,n] x, float[4,6] w) => (float[n,6] y) { y = Gemm <transA = 1> (x, w) }\n");
  check(cost.flops, 2.0 * 10 * 4 * 6);
  cost = cost_of(*state, HEAD "g (float[2,n,4] x, float[6,4] w) => (float[2,n,6] y) { y = engraft.Linear (x, w) }\n");
  check(cost.flops, 2.0 * 2 * 10 * 4 * 6);
  cost =
      cost_of(*state, HEAD "g (float[2,n,6] d, float[6,4] w) => (float[2,n,4] y) { y = engraft.LinearGrad (d, w) }\n");
  check(cost.flops, 2.0 * 2 * 10 * 4 * 6);
  cost = cost_of(*state, HEAD "g (float[n,4] h, float[4,30] w, int64[n] l) => (float[n] p, float[n] s)\n"
                              "{ p, s = engraft.LinearLogProbability (h, w, l) }\n");
  check(cost.flops, 2.0 * 10 * 4 * 30);
}

#define ATTENTION(attributes)                                                             \
  HEAD "g (float[2,4,n,8] q, float[2,2,n,8] k, float[2,2,n,6] v) => (float[2,4,n,6] y)\n" \
       "{ y = engraft.Attention <" attributes "> (q, k, v) }\n"

static double attention_flops(double pairs) {
  return 2.0 * 2 * 4 * pairs * (8 + 6);
}

static void attention_counts_visible_pairs(void **state) {
  check(cost_of(*state, ATTENTION("causal = 0")).flops, attention_flops(100));
  check(cost_of(*state, ATTENTION("causal = 1")).flops, attention_flops(55));
  check(cost_of(*state, ATTENTION("causal = 1, window = 3")).flops, attention_flops(1 + 2 + 3 * 8));
  check(cost_of(*state, ATTENTION("causal = 1, window = 99")).flops, attention_flops(55));
  check(cost_of(*state, ATTENTION("window = 3")).flops, attention_flops(3 + 4 + 6 * 5 + 4 + 3));
}

static void the_rest_is_bytes(void **state) {
  egi_cost cost = cost_of(*state, HEAD "g (float[n,6] x, float[6] b) => (float[n,6] y) { y = Add (x, b) }\n");
  check(cost.read_bytes, 4.0 * (60 + 6));
  check(cost.written_bytes, 4.0 * 60);
  cost = cost_of(*state, HEAD "g (float[1000,6] t, int64[n] i) => (float[n,6] y) { y = Gather (t, i) }\n");
  check(cost.read_bytes, 4.0 * 60 + 8.0 * 10);
  cost = cost_of(*state, HEAD "g (float[n,6] x) => (float[6,n] y) { y = Transpose (x) }\n");
  check(cost.read_bytes + cost.written_bytes + cost.flops, 0.0);
}

static void an_open_size_is_an_error(void **state) {
  egi_module *module = parse_graph(*state, HEAD "g (float[m] x) => (float[m] y) { y = Neg (x) }\n");
  egi_cost cost;
  assert_int_equal(egi_costs_get()->node(module->graphs[0], 1, NULL, 0, &cost), EG_ERROR_SHAPE);
  egi_module_destroy(module);
}

static void seconds_are_those_of_the_slowest_part(void **state) {
  (void)state;
  egi_device_description device = {.flops_f32 = 100,
                                   .flops_bf16 = 200,
                                   .flops_f16 = 200,
                                   .memory_bytes_per_s = 10,
                                   .to_host_bytes_per_s = 4,
                                   .to_device_bytes_per_s = 5,
                                   .launch_s = 1};
  check(egi_cost_seconds(&device, &(egi_cost){.flops = 400, .read_bytes = 10, .dtype = EG_DTYPE_F32}), 5.0);
  check(egi_cost_seconds(&device, &(egi_cost){.flops = 400, .read_bytes = 10, .dtype = EG_DTYPE_BF16}), 3.0);
  check(egi_cost_seconds(&device, &(egi_cost){.flops = 1, .read_bytes = 10, .written_bytes = 20}), 4.0);
  check(egi_cost_seconds(&device, &(egi_cost){.read_bytes = 20, .written_bytes = 20, .to_host_bytes = 20}), 6.0);
  check(egi_cost_seconds(&device, &(egi_cost){0}), 0.0);
}

static void a_description_has_all_speeds(void **state) {
  (void)state;
  egi_device_description device;
  egi_device_describe_cpu(&device);
  assert_true(device.flops_f32 > 0.0 && device.flops_bf16 > 0.0 && device.flops_f16 > 0.0);
  assert_true(device.memory_bytes_per_s > 0.0 && device.to_host_bytes_per_s > 0.0 &&
              device.to_device_bytes_per_s > 0.0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(products_count_their_multiplications),
                                     cmocka_unit_test(attention_counts_visible_pairs),
                                     cmocka_unit_test(the_rest_is_bytes),
                                     cmocka_unit_test(an_open_size_is_an_error),
                                     cmocka_unit_test(seconds_are_those_of_the_slowest_part),
                                     cmocka_unit_test(a_description_has_all_speeds)};
  return cmocka_run_group_tests(tests, make_context, free_context);
}
