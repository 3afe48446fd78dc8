/* Executes graphs of the fake operators in the simplest way: each value in memory of its own, each view as a copy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

typedef struct naive {
  const egi_graph *graph;
  egi_tensor *values;
  float **states; /* by state */
} naive;

static const egi_tensor *input(const naive *run, const egi_node *node, unsigned i) {
  return &run->values[node->inputs[i]];
}

static void split_index(const egi_tensor *shape, int64_t i, int64_t *index) {
  for (int d = shape->rank; d-- > 0;) {
    index[d] = i % shape->dims[d];
    i /= shape->dims[d];
  }
}

/* The last `tensor->rank` entries of index, dims of 1 repeated. */
static float at(const egi_tensor *tensor, const int64_t *index, int rank) {
  int64_t offset = 0, missing = rank - tensor->rank;
  for (int d = 0; d < tensor->rank; d++)
    offset = offset * tensor->dims[d] + (tensor->dims[d] == 1 ? 0 : index[missing + d]);
  return ((const float *)tensor->data)[offset];
}

static void integers(const naive *run, const egi_node *node, unsigned i, int64_t *out) {
  uint32_t n = 0;
  assert_true(egi_value_integers(run->graph, node->inputs[i], out, 64, &n));
}

static float sliced(const naive *run, const egi_node *node, const int64_t *index) {
  int64_t starts[64], axes[64], steps[64], from[EGI_MAX_RANK];
  const egi_tensor *in = input(run, node, 0);
  integers(run, node, 1, starts);
  for (int i = 0; i < EGI_MAX_RANK; i++) {
    axes[i] = i;
    steps[i] = 1;
  }
  if (node->n_inputs > 3) integers(run, node, 3, axes);
  if (node->n_inputs > 4) integers(run, node, 4, steps);
  memcpy(from, index, sizeof(from));
  int64_t n = egi_tensor_count(input(run, node, 1));
  for (int64_t i = 0; i < n; i++) {
    int64_t axis = axes[i] < 0 ? axes[i] + in->rank : axes[i];
    int64_t start = starts[i] < 0 ? starts[i] + in->dims[axis] : starts[i];
    from[axis] = start + index[axis] * steps[i];
  }
  return at(in, from, in->rank);
}

static float concatenated(const naive *run, const egi_node *node, const int64_t *index) {
  int64_t from[EGI_MAX_RANK], axis = egi_node_int(node, "axis", 0);
  memcpy(from, index, sizeof(from));
  if (axis < 0) axis += input(run, node, 0)->rank;
  for (unsigned k = 0; k < node->n_inputs; k++) {
    const egi_tensor *in = input(run, node, k);
    if (from[axis] < in->dims[axis]) return at(in, from, in->rank);
    from[axis] -= in->dims[axis];
  }
  fail_msg("concatenation is too short");
  return 0.0f;
}

static float transposed(const naive *run, const egi_node *node, const int64_t *index) {
  uint32_t n = 0;
  const int64_t *perm = egi_node_ints(node, "perm", &n);
  int64_t from[EGI_MAX_RANK];
  int rank = input(run, node, 0)->rank;
  for (int d = 0; d < rank; d++) from[perm != NULL ? perm[d] : rank - 1 - d] = index[d];
  return at(input(run, node, 0), from, rank);
}

static float row_sum(const egi_tensor *in, const int64_t *index) {
  int64_t from[EGI_MAX_RANK];
  float sum = 0.0f;
  memcpy(from, index, sizeof(from));
  for (int64_t i = 0; i < in->dims[in->rank - 1]; i++) {
    from[in->rank - 1] = i;
    sum = fmodf(sum + at(in, from, in->rank), 8191.0f);
  }
  return sum;
}

static float matrix_product(const egi_tensor *a, const egi_tensor *b, const int64_t *index) {
  float sum = 0.0f;
  for (int64_t k = 0; k < a->dims[1]; k++) {
    sum += ((const float *)a->data)[index[0] * a->dims[1] + k] * ((const float *)b->data)[k * b->dims[1] + index[1]];
  }
  return sum;
}

static float compute(const naive *run, const egi_node *node, unsigned output, const int64_t *index, int64_t flat) {
  const egi_tensor *a = input(run, node, 0), *out = &run->values[node->outputs[output]];
  int64_t shifted[EGI_MAX_RANK];
  switch (node->op) {
  case EGI_OP_Add:
  case EGI_OP_Sub:
  case EGI_OP_Mul:
    return fake_scalar(node->op, at(a, index, out->rank), at(input(run, node, 1), index, out->rank));
  case EGI_OP_Neg:
    return -at(a, index, out->rank);
  case EGI_OP_Expand:
    return at(a, index, out->rank);
  case EGI_OP_Softmax:
    return row_sum(a, index);
  case EGI_OP_MatMul:
    return matrix_product(a, input(run, node, 1), index);
  case EGI_OP_Cast:
    return egi_f16_to_f32(((const uint16_t *)a->data)[flat]);
  case EGI_OP_Concat:
    return concatenated(run, node, index);
  case EGI_OP_Slice:
    return sliced(run, node, index);
  case EGI_OP_Transpose:
    return transposed(run, node, index);
  case EGI_OP_Split: {
    int64_t axis = egi_node_int(node, "axis", 0);
    memcpy(shifted, index, sizeof(shifted));
    for (unsigned k = 0; k < output; k++) shifted[axis] += run->values[node->outputs[k]].dims[axis];
    return at(a, shifted, a->rank);
  }
  default:
    return ((const float *)a->data)[flat]; /* Identity, Reshape, Barrier … */
  }
}

static void run_update(const naive *run, const egi_node *node) {
  const egi_tensor *state = input(run, node, 0), *gradient = input(run, node, 1);
  float *data = state->data;
  for (int64_t i = 0; i < egi_tensor_count(state); i++) {
    data[i] = fake_scalar(EGI_OP_Add, data[i], ((const float *)gradient->data)[i]);
  }
  run->values[node->outputs[0]].data = data;
}

static void run_node(const naive *run, const egi_node *node) {
  if (node->op == EGI_OP_Accumulate) {
    run_update(run, node);
    return;
  }
  for (unsigned k = 0; k < node->n_outputs; k++) {
    egi_tensor *out = &run->values[node->outputs[k]];
    if (node->outputs[k] == 0 || out->dtype != EG_DTYPE_F32) continue;
    for (int64_t i = 0; i < egi_tensor_count(out); i++) {
      int64_t index[EGI_MAX_RANK] = {0};
      split_index(out, i, index);
      ((float *)out->data)[i] = compute(run, node, k, index, i);
    }
  }
}

static void set_shape(const naive *run, egi_value_id id) {
  const egi_value *value = &run->graph->values[id];
  egi_tensor *tensor = &run->values[id];
  tensor->dtype = value->dtype;
  tensor->rank = value->rank;
  for (int d = 0; d < value->rank; d++) {
    assert_true(egi_dim_value(run->graph->module->dims, value->dims[d], &tensor->dims[d]));
  }
  egi_tensor_set_contiguous(tensor);
}

static void set_data(const naive *run, egi_value_id id, const egi_tensor *inputs) {
  const egi_value *value = &run->graph->values[id];
  const egi_module *module = run->graph->module;
  egi_tensor *tensor = &run->values[id];
  size_t room = (size_t)egi_tensor_count(tensor) * 8 + 8;
  switch (value->kind) {
  case EGI_VALUE_INPUT:
    *tensor = inputs[value->index];
    break;
  case EGI_VALUE_WEIGHT:
    tensor->data = calloc(1, room);
    assert_non_null(tensor->data);
    memcpy(tensor->data, module->weights[value->index].bytes.data, module->weights[value->index].bytes.size_bytes);
    break;
  case EGI_VALUE_STATE:
    if (run->states[value->index] == NULL) run->states[value->index] = calloc(1, room);
    tensor->data = run->states[value->index];
    break;
  default:
    tensor->data = calloc(1, room);
    break;
  }
}

static void compare_output(const naive *run, egi_session *session, uint32_t output) {
  const egi_tensor *wanted = &run->values[run->graph->outputs[output]];
  size_t size_bytes = (size_t)egi_tensor_count(wanted) * (wanted->dtype == EG_DTYPE_I64 ? 8 : 4);
  void *found = malloc(size_bytes + 1);
  assert_non_null(found);
  assert_int_equal(egi_session_read_output(session, output, found, size_bytes), EG_OK);
  if (memcmp(found, wanted->data, size_bytes) != 0) {
    fail_msg("graph \"%s\": output %u \"%s\" differs", run->graph->name, output,
             run->graph->values[run->graph->outputs[output]].name);
  }
  free(found);
}

void check_against_naive(const egi_graph *graph, egi_session *session, const egi_tensor *inputs) {
  naive run = {.graph = graph,
               .values = calloc(graph->n_values, sizeof(egi_tensor)),
               .states = calloc((size_t)graph->module->n_states + 1, sizeof(float *))};
  assert_true(run.values != NULL && run.states != NULL);
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    if (graph->values[id].kind == EGI_VALUE_NONE) continue;
    set_shape(&run, id);
    set_data(&run, id, inputs);
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE) continue;
    if (node->op == EGI_OP_Accumulate) free(run.values[node->outputs[0]].data);
    run_node(&run, node);
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) compare_output(&run, session, i);
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    const egi_value *value = &graph->values[id];
    bool is_update = value->kind == EGI_VALUE_NODE && graph->nodes[value->producer].op == EGI_OP_Accumulate;
    if ((value->kind == EGI_VALUE_NODE && !is_update) || value->kind == EGI_VALUE_WEIGHT) free(run.values[id].data);
  }
  for (uint32_t i = 0; i <= graph->module->n_states; i++) free(run.states[i]);
  free(run.states);
  free(run.values);
}

/* ---- both, and compared --------------------------------------------------------------------------------------- */

static void make_inputs(const egi_graph *graph, uint64_t seed, egi_tensor *inputs) {
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    naive run = {.graph = graph, .values = calloc(graph->n_values, sizeof(egi_tensor))};
    assert_non_null(run.values);
    set_shape(&run, graph->inputs[i]);
    inputs[i] = run.values[graph->inputs[i]];
    free(run.values);
    int64_t n = egi_tensor_count(&inputs[i]);
    float *data = malloc((size_t)n * sizeof(float) + 1);
    assert_non_null(data);
    for (int64_t k = 0; k < n; k++) data[k] = (float)(int)(egi_random_uniform(seed, i, (uint64_t)k) * 200.0) - 100.0f;
    inputs[i].data = data;
  }
}

static void run_seed(egi_store *store, const egi_graph *graph, egi_session *session, uint64_t seed) {
  egi_tensor *inputs = calloc((size_t)graph->n_inputs + 1, sizeof(*inputs));
  assert_non_null(inputs);
  make_inputs(graph, seed, inputs);
  fake_device_seed(egi_store_device(store), seed);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    size_t size_bytes = (size_t)egi_tensor_count(&inputs[i]) * sizeof(float);
    assert_int_equal(egi_session_set_input(session, i, inputs[i].data, size_bytes), EG_OK);
  }
  uint64_t n_allocations = egi_allocation_count(graph->module->ctx);
  assert_int_equal(egi_session_run(session), EG_OK);
  assert_int_equal(egi_allocation_count(graph->module->ctx), n_allocations);
  check_against_naive(graph, session, inputs);
  for (uint32_t i = 0; i < graph->n_inputs; i++) free(inputs[i].data);
  free(inputs);
}

void check_graph(eg_context *ctx, egi_module *module, uint64_t n_seeds) {
  for (int is_host = 0; is_host < 2; is_host++) {
    egi_plan *plan = NULL;
    egi_store *store = NULL;
    egi_session *session = NULL;
    const egi_graph *graph = module->graphs[0];
    if (egi_plan_create(ctx, graph, fake_backend(is_host), NULL, &plan) != EG_OK) fail_msg("%s", eg_context_error(ctx));
    assert_int_equal(egi_store_create(ctx, module, fake_backend(is_host), &store), EG_OK);
    assert_int_equal(egi_store_make_pools(store), EG_OK);
    if (egi_session_create(store, plan, NULL, &session) != EG_OK) fail_msg("%s", eg_context_error(ctx));
    for (uint64_t seed = 0; seed < n_seeds; seed++) {
      for (unsigned pool = 0; pool < EGI_POOL_COUNT; pool++) {
        void *memory = egi_store_pool(store, (egi_state_pool)pool); /* the naive run starts from zero each time */
        if (memory != NULL) memset(memory, 0, module->pool_elements[pool] * (pool == EGI_POOL_STEP ? 1 : 4));
      }
      run_seed(store, graph, session, seed);
    }
    egi_session_destroy(session);
    egi_store_destroy(store);
    egi_plan_destroy(plan);
    assert_int_equal(fake_bytes_in_use(), 0);
  }
}

int make_context(void **state) {
  eg_context *ctx = NULL;
  if (eg_context_create(NULL, &ctx) != EG_OK) return 1;
  *state = ctx;
  return 0;
}

int free_context(void **state) {
  eg_context_destroy(*state);
  return 0;
}

/* ---- graphs and texts ----------------------------------------------------------------------------------------- */

egi_module *parse_graph(eg_context *ctx, const char *text) {
  egi_module *module = NULL;
  if (egi_module_parse(ctx, text, strlen(text), &module) != EG_OK) fail_msg("%s", eg_context_error(ctx));
  if (egi_graph_tidy(module->graphs[0]) != EG_OK || egi_infer_graph(module->graphs[0]) != EG_OK) {
    fail_msg("%s", eg_context_error(ctx));
  }
  return module;
}

char *plan_text(eg_context *ctx, const egi_plan *plan) {
  egi_text text;
  egi_text_init(&text, ctx);
  egi_plan_print(plan, &text);
  char *copy = malloc(text.length + 1);
  assert_non_null(copy);
  memcpy(copy, egi_text_string(&text), text.length + 1);
  egi_text_free(&text);
  return copy;
}

uint32_t count_text(const char *text, const char *part) {
  uint32_t n = 0;
  for (const char *at_part = strstr(text, part); at_part != NULL; at_part = strstr(at_part + 1, part)) n++;
  return n;
}
