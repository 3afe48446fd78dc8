/* The evaluator on the CPU kernels: single nodes, whole graphs with sizes taken from the inputs, and random graphs run
 * as planned (views, pieces, in place) against node by node on contiguous tensors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

#define HEAD "<ir_version: 10, opset_import: [\"\": 23]>\n"

static egi_tensor tensor_of(float *data, int rank, const int64_t *dims) {
  egi_tensor tensor = {.data = data, .dtype = EG_DTYPE_F32, .rank = rank};
  memcpy(tensor.dims, dims, sizeof(int64_t) * (size_t)rank);
  egi_tensor_set_contiguous(&tensor);
  return tensor;
}

static void one_node(void **state) {
  egi_module *module = parse_graph(*state, HEAD "g (float[n] x, float[2,n] w) => (float[2,n] y)\n{ y = Add (x, w) }\n");
  float x[3] = {1, 2, 3}, w[6] = {10, 20, 30, 40, 50, 60};
  egi_tensor inputs[2] = {tensor_of(x, 1, (int64_t[]){3}), tensor_of(w, 2, (int64_t[]){2, 3})}, output;
  egi_arena arena;
  egi_arena_init(&arena, *state, EGI_PURPOSE_STEP);
  const egi_evaluator *evaluator = egi_evaluator_cpu();
  if (evaluator->node(*state, module->graphs[0], 1, inputs, &arena, &output) != EG_OK) {
    fail_msg("%s", eg_context_error(*state));
  }
  assert_int_equal(output.rank, 2);
  assert_true(((float *)output.data)[0] == 11.0f && ((float *)output.data)[5] == 63.0f);
  assert_true(x[0] == 1.0f && w[0] == 10.0f);
  inputs[1].dims[1] = 2;
  assert_int_equal(evaluator->node(*state, module->graphs[0], 1, inputs, &arena, &output), EG_ERROR_SHAPE);
  egi_arena_clear(&arena);
  egi_module_destroy(module);
}

static void a_graph_with_sizes_from_its_inputs(void **state) {
  egi_module *module = parse_graph(*state, HEAD "g (float[b,s] x) => (float[s,b] y, int64[2] d)\n<float[1] w = {0.5}>\n"
                                                "{ t = Transpose (x) y = Mul (t, w) d = Shape (y) }\n");
  float x[6] = {1, 2, 3, 4, 5, 6};
  egi_tensor input = tensor_of(x, 2, (int64_t[]){2, 3}), outputs[2];
  egi_arena arena;
  egi_arena_init(&arena, *state, EGI_PURPOSE_STEP);
  assert_int_equal(egi_evaluator_cpu()->graph(*state, module->graphs[0], &input, &arena, outputs), EG_OK);
  const float *y = outputs[0].data;
  assert_true(outputs[0].dims[0] == 3 && outputs[0].dims[1] == 2 && y[0] == 0.5f && y[1] == 2.0f && y[5] == 3.0f);
  assert_int_equal(((int64_t *)outputs[1].data)[0], 3);
  input.dtype = EG_DTYPE_I32;
  assert_int_equal(egi_evaluator_cpu()->graph(*state, module->graphs[0], &input, &arena, outputs), EG_ERROR_SHAPE);
  assert_non_null(strstr(eg_context_error(*state), "\"x\""));
  egi_arena_clear(&arena);
  egi_module_destroy(module);
}

/* Rewrites of loops over experts are checked by running graphs that no plan covers. */
static void a_graph_whose_sizes_the_data_decides(void **state) {
  egi_module *module = parse_graph(*state, HEAD "g (float[n] x) => (float[n] y)\n<float zero = {0}>\n"
                                                "{ p = Greater (x, zero) i = NonZero (p) t = Transpose (i) "
                                                "v = GatherND (x, t) w = Add (v, v) y = ScatterND (x, t, w) }\n");
  float x[4] = {1, -2, 3, -4};
  egi_tensor input = tensor_of(x, 1, (int64_t[]){4}), output;
  egi_arena arena;
  egi_arena_init(&arena, *state, EGI_PURPOSE_STEP);
  if (egi_evaluator_cpu()->graph(*state, module->graphs[0], &input, &arena, &output) != EG_OK)
    fail_msg("%s", eg_context_error(*state));
  const float *y = output.data;
  assert_true(output.dims[0] == 4 && y[0] == 2.0f && y[1] == -2.0f && y[2] == 6.0f && y[3] == -4.0f);
  egi_arena_clear(&arena);
  egi_module_destroy(module);
}

static void sizes_that_contradict_are_refused(void **state) {
  egi_module *module = parse_graph(*state, HEAD "g (float[b,s] x, float[b,4] m) => (float[b,s] y)\n{ y = Neg (x) }\n");
  float data[12] = {0};
  egi_tensor inputs[2] = {tensor_of(data, 2, (int64_t[]){2, 3}), tensor_of(data, 2, (int64_t[]){3, 4})};
  egi_binding *bindings = NULL;
  size_t n = 0;
  egi_arena arena;
  egi_arena_init(&arena, *state, EGI_PURPOSE_GRAPH);
  assert_int_equal(egi_bindings_solve(module->graphs[0], inputs, &arena, &bindings, &n), EG_ERROR_SHAPE);
  inputs[1] = tensor_of(data, 2, (int64_t[]){2, 5});
  assert_int_equal(egi_bindings_solve(module->graphs[0], inputs, &arena, &bindings, &n), EG_ERROR_SHAPE);
  inputs[1] = tensor_of(data, 2, (int64_t[]){2, 4});
  assert_int_equal(egi_bindings_solve(module->graphs[0], inputs, &arena, &bindings, &n), EG_OK);
  assert_int_equal(n, 2);
  assert_int_equal(bindings[0].value, 2);
  assert_int_equal(bindings[1].value, 3);
  egi_arena_clear(&arena);
  egi_module_destroy(module);
}

/* ---- random graphs -------------------------------------------------------------------------------------------- */

static bool has_update(const egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].op == EGI_OP_Accumulate) return true;
  }
  return false;
}

static void run_each_node(const egi_graph *graph, egi_arena *arena, egi_tensor *values) {
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    if (graph->values[id].kind == EGI_VALUE_WEIGHT) assert_true(egi_value_constant(graph, id, &values[id]));
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    egi_tensor inputs[8], outputs[8];
    if (node->op == EGI_OP_NONE) continue;
    for (unsigned i = 0; i < node->n_inputs; i++) inputs[i] = values[node->inputs[i]];
    if (egi_evaluator_cpu()->node(graph->module->ctx, graph, id, inputs, arena, outputs) != EG_OK) {
      fail_msg("%s", eg_context_error(graph->module->ctx));
    }
    for (unsigned i = 0; i < node->n_outputs; i++) values[node->outputs[i]] = outputs[i];
  }
}

/* Sums over strided operands may be taken in another order than over contiguous ones. */
static void compare(const egi_graph *graph, const egi_tensor *found, const egi_tensor *wanted) {
  const float *a = found->data, *b = wanted->data;
  float largest = 0.0f;
  for (int64_t i = 0; i < egi_tensor_count(wanted); i++) {
    if (isfinite(b[i]) && fabsf(b[i]) > largest) largest = fabsf(b[i]);
  }
  for (int64_t i = 0; i < egi_tensor_count(wanted); i++) {
    if (isnan(b[i]) ? isnan(a[i]) : a[i] == b[i] || fabsf(a[i] - b[i]) <= 1e-4f * largest) continue;
    fail_msg("graph \"%s\": %g where %g is right", graph->name, (double)a[i], (double)b[i]);
  }
}

static void check_random_graph(eg_context *ctx, uint64_t seed) {
  egi_module *module = make_random_graph(ctx, seed, false);
  const egi_graph *graph = module->graphs[0];
  egi_tensor *values = calloc(graph->n_values, sizeof(*values)), inputs[3], outputs[8];
  egi_arena arena;
  assert_non_null(values);
  egi_arena_init(&arena, ctx, EGI_PURPOSE_STEP);
  for (uint32_t i = 0; i < graph->n_inputs && !has_update(graph); i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    egi_tensor *tensor = &inputs[i];
    *tensor = (egi_tensor){.dtype = EG_DTYPE_F32, .rank = value->rank};
    for (int d = 0; d < value->rank; d++) assert_true(egi_dim_value(module->dims, value->dims[d], &tensor->dims[d]));
    egi_tensor_set_contiguous(tensor);
    float *data = EGI_NEW(&arena, float, (size_t)egi_tensor_count(tensor));
    assert_non_null(data);
    for (int64_t k = 0; k < egi_tensor_count(tensor); k++) {
      data[k] = (float)egi_random_normal(seed, i, (uint64_t)k);
    }
    tensor->data = data;
    values[graph->inputs[i]] = *tensor;
  }
  if (!has_update(graph)) {
    run_each_node(graph, &arena, values);
    if (egi_evaluator_cpu()->graph(ctx, graph, inputs, &arena, outputs) != EG_OK) fail_msg("%s", eg_context_error(ctx));
    for (uint32_t i = 0; i < graph->n_outputs; i++) compare(graph, &outputs[i], &values[graph->outputs[i]]);
  }
  egi_arena_clear(&arena);
  egi_module_destroy(module);
  free(values);
}

static void planned_graphs_compute_what_single_nodes_do(void **state) {
  for (uint64_t seed = 0; seed < 300; seed++) check_random_graph(*state, seed);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_context, free_context)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(one_node), TEST(a_graph_with_sizes_from_its_inputs), TEST(sizes_that_contradict_are_refused),
      TEST(a_graph_whose_sizes_the_data_decides), TEST(planned_graphs_compute_what_single_nodes_do)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
