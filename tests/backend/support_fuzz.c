/* Random graphs of views, elementwise operators, concatenations, barriers and state updates, the same for a seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

enum { MAX_VALUES = 64 };

typedef struct fuzz {
  egi_module *module;
  egi_graph *graph;
  egi_emitter emitter;
  uint64_t seed, draws;
  bool has_streams;
  egi_value_id values[MAX_VALUES];
  uint32_t n;
} fuzz;

static uint32_t draw(fuzz *run, uint32_t below) {
  return (uint32_t)(egi_random_uniform(run->seed, 1, run->draws++) * below);
}

static int64_t dim(const fuzz *run, egi_value_id value, int axis) {
  int64_t number = 0;
  assert_true(egi_dim_value(run->module->dims, run->graph->values[value].dims[axis], &number));
  return number;
}

static int rank(const fuzz *run, egi_value_id value) {
  return run->graph->values[value].rank;
}

static int64_t count(const fuzz *run, egi_value_id value) {
  int64_t n = 1;
  for (int i = 0; i < rank(run, value); i++) n *= dim(run, value, i);
  return n;
}

static egi_value_id pick(fuzz *run) {
  return run->values[draw(run, run->n)];
}

/* Prefers what was made last, so that chains arise. */
static egi_value_id pick_late(fuzz *run) {
  uint32_t back = draw(run, run->n < 6 ? run->n : 6);
  return run->values[run->n - 1 - back];
}

static void keep(fuzz *run, egi_value_id value) {
  if (run->emitter.status != EG_OK) fail_msg("%s", eg_context_error(run->module->ctx));
  if (run->n < MAX_VALUES && count(run, value) <= 4096) run->values[run->n++] = value;
}

static egi_value_id emit(fuzz *run, egi_op op, const egi_value_id *inputs, unsigned n, const egi_attribute *extra) {
  egi_attribute attributes[2] = {
      egi_attribute_int("engraft_stream", run->has_streams && draw(run, 3) == 0 ? 1 + draw(run, 2) : 0)};
  if (extra != NULL) attributes[1] = *extra;
  return egi_emit(&run->emitter, op, inputs, n, attributes, extra != NULL ? 2 : 1);
}

static egi_value_id integers(fuzz *run, const int64_t *values, uint32_t n) {
  return egi_emit_integers(&run->emitter, values, n);
}

/* ---- operators ------------------------------------------------------------------------------------------------ */

static void add_unary(fuzz *run) {
  static const egi_op ops[] = {EGI_OP_Neg, EGI_OP_Neg, EGI_OP_Identity, EGI_OP_Softmax};
  egi_value_id a = pick_late(run);
  egi_op op = ops[draw(run, 4)];
  if (op == EGI_OP_Softmax && (rank(run, a) == 0 || count(run, a) == 0)) op = EGI_OP_Neg;
  keep(run, emit(run, op, &a, 1, NULL));
}

static bool can_broadcast(const fuzz *run, egi_value_id a, egi_value_id b) {
  for (int i = 1; i <= rank(run, a) && i <= rank(run, b); i++) {
    int64_t x = dim(run, a, rank(run, a) - i), y = dim(run, b, rank(run, b) - i);
    if (x != y && x != 1 && y != 1) return false;
  }
  return true;
}

static void add_binary(fuzz *run) {
  static const egi_op ops[] = {EGI_OP_Add, EGI_OP_Add, EGI_OP_Sub, EGI_OP_Mul};
  egi_value_id inputs[2] = {pick_late(run), 0};
  for (int tries = 0; tries < 8; tries++) {
    inputs[1] = tries < 6 ? pick(run) : inputs[0];
    if (can_broadcast(run, inputs[0], inputs[1])) break;
    inputs[1] = inputs[0];
  }
  if (draw(run, 2)) {
    egi_value_id first = inputs[0];
    inputs[0] = inputs[1];
    inputs[1] = first;
  }
  keep(run, emit(run, ops[draw(run, 4)], inputs, 2, NULL));
}

static void add_transpose(fuzz *run) {
  egi_value_id a = pick_late(run);
  int64_t order[EGI_MAX_RANK];
  int n = rank(run, a);
  for (int i = 0; i < n; i++) {
    int j = (int)draw(run, (uint32_t)i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  egi_attribute perm = egi_attribute_ints("perm", order, (uint32_t)n);
  keep(run, emit(run, EGI_OP_Transpose, &a, 1, &perm));
}

static void add_slice(fuzz *run) {
  egi_value_id a = pick_late(run);
  if (rank(run, a) == 0) return;
  int64_t axis = draw(run, (uint32_t)rank(run, a)), size = dim(run, a, (int)axis);
  if (size == 0) return;
  int64_t from = draw(run, (uint32_t)size), to = draw(run, (uint32_t)size + 1), step = 1 + draw(run, 2);
  if (from > to && draw(run, 2)) step = -step;
  if (step > 0 && to <= from) to = size;
  if (step < 0 && draw(run, 2)) to = -size - 1;
  egi_value_id inputs[5] = {a, integers(run, &from, 1), integers(run, &to, 1), integers(run, &axis, 1),
                            integers(run, &step, 1)};
  keep(run, emit(run, EGI_OP_Slice, inputs, 5, NULL));
}

static void add_reshape(fuzz *run) {
  egi_value_id a = pick_late(run);
  int64_t left = count(run, a), dims[5];
  uint32_t n = 0, wanted = 1 + draw(run, 4);
  if (left == 0) return;
  while (n + 1 < wanted) {
    int64_t divisor = 1 + draw(run, 6);
    if (left % divisor != 0) divisor = 1;
    dims[n++] = divisor;
    left /= divisor;
  }
  dims[n++] = left;
  egi_value_id inputs[2] = {a, integers(run, dims, n)};
  keep(run, emit(run, EGI_OP_Reshape, inputs, 2, NULL));
}

static void add_expand(fuzz *run) {
  egi_value_id a = pick_late(run);
  int64_t dims[EGI_MAX_RANK];
  int n = rank(run, a), more = n < 4 ? (int)draw(run, 2) : 0;
  for (int i = 0; i < n + more; i++) {
    dims[i] = i < more ? 1 + draw(run, 3) : dim(run, a, i - more);
    if (dims[i] == 1) dims[i] = 1 + draw(run, 3);
  }
  egi_value_id inputs[2] = {a, integers(run, dims, (uint32_t)(n + more))};
  keep(run, emit(run, EGI_OP_Expand, inputs, 2, NULL));
}

static void add_split(fuzz *run) {
  egi_value_id a = pick_late(run), outputs[2] = {0, 0};
  if (rank(run, a) == 0) return;
  int64_t axis = draw(run, (uint32_t)rank(run, a)), size = dim(run, a, (int)axis);
  int64_t first = draw(run, (uint32_t)size + 1), sizes[2] = {first, size - first};
  egi_value_id inputs[2] = {a, integers(run, sizes, 2)};
  egi_attribute attribute = egi_attribute_int("axis", axis);
  egi_emit_many(&run->emitter, EGI_OP_Split, inputs, 2, &attribute, 1, outputs, 2);
  keep(run, outputs[0]);
  keep(run, outputs[1]);
}

/* Pieces that fit: any values of equal dims but for the axis, fresh results among them. */
static void add_concat(fuzz *run) {
  egi_value_id inputs[4] = {pick_late(run)};
  uint32_t n = 1;
  if (rank(run, inputs[0]) == 0) return;
  int axis = (int)draw(run, (uint32_t)rank(run, inputs[0]));
  for (int tries = 0; tries < 24 && n < 4; tries++) {
    egi_value_id other = pick(run);
    bool fits = rank(run, other) == rank(run, inputs[0]);
    for (int i = 0; fits && i < rank(run, other); i++) fits = i == axis || dim(run, other, i) == dim(run, inputs[0], i);
    if (!fits) continue;
    inputs[n] = draw(run, 2) ? emit(run, EGI_OP_Neg, &other, 1, NULL) : other;
    n++;
  }
  if (draw(run, 2)) inputs[0] = emit(run, EGI_OP_Neg, inputs, 1, NULL);
  egi_attribute attribute = egi_attribute_int("axis", draw(run, 2) ? axis : axis - rank(run, inputs[0]));
  keep(run, emit(run, EGI_OP_Concat, inputs, n, &attribute));
}

/* Two matrices that fit, or one with its transpose. */
static void add_product(fuzz *run) {
  egi_value_id inputs[2] = {pick_late(run), 0};
  if (rank(run, inputs[0]) != 2) return;
  for (int tries = 0; tries < 12 && inputs[1] == 0; tries++) {
    egi_value_id other = pick(run);
    if (rank(run, other) == 2 && dim(run, other, 0) == dim(run, inputs[0], 1)) inputs[1] = other;
  }
  if (inputs[1] == 0) inputs[1] = emit(run, EGI_OP_Transpose, inputs, 1, NULL);
  keep(run, emit(run, EGI_OP_MatMul, inputs, 2, NULL));
}

static void add_barrier(fuzz *run) {
  egi_value_id inputs[2] = {pick_late(run), pick(run)};
  keep(run, emit(run, EGI_OP_Barrier, inputs, 2, NULL));
}

/* Moved to the host and back, its memory given away meanwhile. */
static void add_transfer(fuzz *run) {
  egi_value_id a = pick_late(run), host = egi_emit(&run->emitter, EGI_OP_Offload, &a, 1, NULL, 0);
  for (uint32_t i = draw(run, 3); i > 0; i--) {
    egi_value_id inputs[2] = {pick(run), host};
    keep(run, emit(run, EGI_OP_Barrier, inputs, 2, NULL));
  }
  egi_value_id inputs[2] = {host, pick(run)};
  keep(run, egi_emit(&run->emitter, EGI_OP_Reload, inputs, 1 + draw(run, 2), NULL, 0));
}

/* ---- graphs --------------------------------------------------------------------------------------------------- */

static void add_sources(fuzz *run) {
  for (uint32_t i = 0; i < 3; i++) {
    egi_dim dims[3];
    egi_value_id value = 0;
    int n = 1 + (int)draw(run, 3);
    for (int k = 0; k < n; k++) dims[k] = egi_dim_constant(run->module->dims, 1 + draw(run, 4));
    assert_int_equal(egi_graph_add_input(run->graph, NULL, EG_DTYPE_F32, n, dims, &value), EG_OK);
    keep(run, value);
  }
  static const float numbers[12] = {1, -2, 3, 4, 5, -6, 7, 8, 9, -10, 11, 12};
  egi_weight weight = {.name = "w", .dtype = EG_DTYPE_F32, .rank = 2, .dims = {3, 4}};
  uint32_t index = 0;
  egi_value_id value = 0;
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)numbers, .size_bytes = sizeof(numbers)};
  assert_int_equal(egi_module_add_weight(run->module, &weight, &index), EG_OK);
  assert_int_equal(egi_graph_add_weight(run->graph, index, &value), EG_OK);
  keep(run, value);
}

/* A state that is read, updated, and read again. */
static void add_update(fuzz *run) {
  egi_value_id like = pick_late(run), state_value = 0, step = 0;
  egi_state state = {.pool = EGI_POOL_GRADIENTS, .dtype = EG_DTYPE_F32, .rank = rank(run, like)};
  char name[32];
  uint32_t index = 0;
  (void)snprintf(name, sizeof(name), "state%u", run->module->n_states);
  state.name = name;
  for (int i = 0; i < state.rank; i++) state.dims[i] = dim(run, like, i);
  assert_int_equal(egi_module_add_state(run->module, &state, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(run->graph, index, &state_value), EG_OK);
  assert_int_equal(egi_module_add_pool_state(run->module, EGI_POOL_STEP, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(run->graph, index, &step), EG_OK);
  egi_value_id before[2] = {state_value, like};
  keep(run, emit(run, EGI_OP_Add, before, 2, NULL));
  egi_value_id inputs[3] = {state_value, like, step};
  egi_value_id updated = emit(run, EGI_OP_Accumulate, inputs, 3, NULL);
  keep(run, emit(run, EGI_OP_Neg, &updated, 1, NULL));
}

egi_module *make_random_graph(eg_context *ctx, uint64_t seed, bool has_streams) {
  typedef void (*adder)(fuzz *);
  static const adder adders[] = {add_unary,  add_unary,   add_binary,  add_binary,  add_binary, add_transpose,
                                 add_slice,  add_slice,   add_reshape, add_expand,  add_split,  add_concat,
                                 add_concat, add_product, add_barrier, add_transfer};
  fuzz made = {.seed = seed, .has_streams = has_streams}, *run = &made;
  assert_int_equal(egi_module_create(ctx, &run->module), EG_OK);
  char name[32];
  (void)snprintf(name, sizeof(name), "seed %u", (unsigned)seed); /* what a failure names */
  assert_int_equal(egi_module_add_graph(run->module, name, &run->graph), EG_OK);
  run->emitter = (egi_emitter){.graph = run->graph};
  add_sources(run);
  uint32_t n_nodes = 4 + draw(run, 30);
  for (uint32_t i = 0; i < n_nodes; i++) {
    if (draw(run, 20) == 0)
      add_update(run);
    else
      adders[draw(run, (uint32_t)EGI_COUNT(adders))](run);
  }
  assert_int_equal(egi_graph_add_output(run->graph, run->values[run->n - 1]), EG_OK);
  for (uint32_t i = 0; i < 3; i++) {
    egi_value_id value = pick_late(run);
    if (!egi_graph_is_output(run->graph, value)) assert_int_equal(egi_graph_add_output(run->graph, value), EG_OK);
  }
  return run->module;
}
