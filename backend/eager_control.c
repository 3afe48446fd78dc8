/* If, Loop and Scan (operator versions 25), run eagerly. The node's last inputs, as many as its attribute `captures`
 * says, are values of the graph around it and the last inputs of its bodies. */
#include <inttypes.h>

#include "backend/eager.h"

static const egi_node *node_of(const egi_control *c) {
  return &c->graph->nodes[c->node];
}

static egi_graph *body_of(const egi_control *c, const char *name) {
  const egi_attribute *attribute = egi_node_attribute(node_of(c), name);
  return attribute != NULL && attribute->kind == EGI_ATTRIBUTE_GRAPH ? attribute->u.graph : NULL;
}

static uint32_t count_captures(const egi_control *c) {
  int64_t count = egi_node_int(node_of(c), EGI_CAPTURES, 0);
  return count < 0 || count > node_of(c)->n_inputs ? 0 : (uint32_t)count;
}

static eg_status fail(const egi_control *c, const char *reason) {
  return egi_fail_node(c->graph, c->node, EG_ERROR_SHAPE, "%s", reason);
}

static eg_status read_number(const egi_control *c, unsigned input, int64_t *out) {
  const egi_tensor *tensor = &c->inputs[input];
  if (egi_tensor_count(tensor) != 1) return fail(c, "its count or condition is not one number");
  if (tensor->dtype == EG_DTYPE_BOOL) {
    *out = *(const uint8_t *)tensor->data != 0;
  } else if (tensor->dtype == EG_DTYPE_I64) {
    memcpy(out, tensor->data, sizeof *out);
  } else {
    return fail(c, "its count or condition has the wrong type");
  }
  return EG_OK;
}

/* ---- If ------------------------------------------------------------------------------------------------------- */

static eg_status run_if(const egi_control *c) {
  int64_t condition = 0;
  EG_TRY(read_number(c, 0, &condition));
  egi_graph *body = body_of(c, condition != 0 ? "then_branch" : "else_branch");
  uint32_t n_captures = count_captures(c), n_outputs = node_of(c)->n_outputs;
  if (body == NULL || body->n_inputs != n_captures || body->n_outputs < n_outputs)
    return fail(c, "its branch does not fit");
  egi_tensor *results = EGI_NEW(c->arena, egi_tensor, (size_t)body->n_outputs + 1);
  if (results == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_eager_graph(c->eager, body, c->inputs + (node_of(c)->n_inputs - n_captures), c->arena, results));
  memcpy(c->outputs, results, n_outputs * sizeof *results);
  return EG_OK;
}

/* ---- what loops share ----------------------------------------------------------------------------------------- */

/* A loop in the making. Body inputs: [first.., carried.., scanned.., captured..]; outputs: [condition?, carried..,
 * collected..]. */
typedef struct loop {
  const egi_control *c;
  egi_graph *body;
  uint32_t n_first, n_carried, n_scanned, n_captured, n_collected;
  egi_arena arenas[2]; /* of the carried tensors, in turn */
  egi_arena arena;     /* of the loop: lists, collected pieces */
  egi_tensor *inputs, *results;
  egi_tensor *pieces; /* [n_collected][capacity] */
  uint32_t n_pieces, pieces_capacity;
  unsigned turn;
} loop;

static eg_status loop_open(loop *l) {
  eg_context *ctx = l->c->eager->ctx;
  for (unsigned i = 0; i < 2; i++) egi_arena_init(&l->arenas[i], ctx, EGI_PURPOSE_STEP);
  egi_arena_init(&l->arena, ctx, EGI_PURPOSE_STEP);
  l->inputs = EGI_NEW(&l->arena, egi_tensor, (size_t)l->body->n_inputs + 1);
  l->results = EGI_NEW(&l->arena, egi_tensor, (size_t)l->body->n_outputs + 1);
  if (l->inputs == NULL || l->results == NULL) return EG_ERROR_MEMORY;
  uint32_t at = l->n_first + l->n_carried + l->n_scanned;
  const egi_tensor *captured = l->c->inputs + (node_of(l->c)->n_inputs - l->n_captured);
  if (l->n_captured > 0) memcpy(l->inputs + at, captured, l->n_captured * sizeof *captured);
  return EG_OK;
}

static void loop_close(loop *l) {
  for (unsigned i = 0; i < 2; i++) egi_arena_clear(&l->arenas[i]);
  egi_arena_clear(&l->arena);
}

/* Runs the body once; `first_result` results stand before the carried ones. */
static eg_status loop_step(loop *l, uint32_t first_result) {
  egi_eager *eager = l->c->eager;
  if (++eager->n_iterations > EGI_EAGER_ITERATIONS)
    return egi_fail_node(l->c->graph, l->c->node, EG_ERROR_BUDGET, "more than %u iterations", EGI_EAGER_ITERATIONS);
  egi_arena *next = &l->arenas[l->turn ^= 1u];
  egi_arena_clear(next);
  EG_TRY(egi_eager_graph(eager, l->body, l->inputs, next, l->results));
  for (uint32_t i = 0; i < l->n_carried; i++) l->inputs[l->n_first + i] = l->results[first_result + i];
  for (uint32_t i = 0; i < l->n_collected; i++) {
    EG_TRY(EGI_GROW(&l->arena, &l->pieces, l->n_pieces, &l->pieces_capacity));
    EG_TRY(egi_eager_copy(eager, &l->results[first_result + l->n_carried + i], &l->arena, &l->pieces[l->n_pieces++]));
  }
  return EG_OK;
}

/* Where the pieces of result i go in the stacked tensor: a new axis. */
typedef struct stacking {
  int axis;
  bool is_reversed;
} stacking;

static eg_status copy_pieces(const loop *l, uint32_t index, const stacking *how, egi_tensor *out) {
  const egi_tensor *first = &l->pieces[index];
  uint32_t element_bytes = egi_whole_bytes(first->dtype), n = l->n_pieces / l->n_collected;
  size_t outer = 1, inner = element_bytes;
  if (element_bytes == 0) return fail(l->c, "results below 8 bits cannot be collected");
  for (int i = 0; i < how->axis; i++) outer *= (size_t)first->dims[i];
  for (int i = how->axis; i < first->rank; i++) inner *= (size_t)first->dims[i];
  for (uint32_t k = 0; k < n; k++) {
    const egi_tensor *piece = &l->pieces[k * l->n_collected + index];
    bool is_same = piece->dtype == first->dtype && piece->rank == first->rank;
    for (int i = 0; is_same && i < first->rank; i++) is_same = piece->dims[i] == first->dims[i];
    if (!is_same) return fail(l->c, "the results of its iterations differ in shape");
    size_t slot = how->is_reversed ? n - 1 - k : k;
    for (size_t o = 0; o < outer && inner > 0; o++)
      memcpy((uint8_t *)out->data + (o * n + slot) * inner, (const uint8_t *)piece->data + o * inner, inner);
  }
  return EG_OK;
}

/* The shape that a body declares for a result that no iteration made; unknown sizes are 0. */
static eg_status declared_piece(const loop *l, uint32_t result, egi_tensor *out) {
  const egi_value *value = &l->body->values[l->body->outputs[result]];
  if (value->dtype == EG_DTYPE_UNDEFINED || value->rank < 0) return fail(l->c, "no iteration, and no declared result");
  *out = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
  for (int i = 0; i < value->rank; i++)
    if (!egi_dim_value(l->body->module->dims, value->dims[i], &out->dims[i])) out->dims[i] = 0;
  return EG_OK;
}

static eg_status stack(const loop *l, uint32_t index, uint32_t result, stacking how, egi_tensor *out) {
  egi_tensor piece;
  uint64_t size_bytes = 0;
  if (l->n_pieces > 0)
    piece = l->pieces[index];
  else
    EG_TRY(declared_piece(l, result, &piece));
  if (how.axis < 0) how.axis += piece.rank + 1;
  if (piece.rank >= EGI_MAX_RANK || how.axis < 0 || how.axis > piece.rank)
    return fail(l->c, "its results cannot be stacked along that axis");
  *out = (egi_tensor){.dtype = piece.dtype, .rank = piece.rank + 1};
  for (int i = 0; i < out->rank; i++) out->dims[i] = piece.dims[i < how.axis ? i : i - 1 < 0 ? 0 : i - 1];
  out->dims[how.axis] = l->n_collected > 0 ? l->n_pieces / l->n_collected : 0;
  egi_tensor_set_contiguous(out);
  if (!egi_dtype_bytes(out->dtype, (uint64_t)egi_tensor_count(out), &size_bytes)) return fail(l->c, "too large");
  out->data = egi_arena_get(l->c->arena, (size_t)size_bytes + 1, 1);
  if (out->data == NULL) return EG_ERROR_MEMORY;
  return l->n_pieces > 0 ? copy_pieces(l, index, &how, out) : EG_OK;
}

static eg_status finish_carried(const loop *l) {
  for (uint32_t i = 0; i < l->n_carried && i < node_of(l->c)->n_outputs; i++)
    EG_TRY(egi_eager_copy(l->c->eager, &l->inputs[l->n_first + i], l->c->arena, &l->c->outputs[i]));
  return EG_OK;
}

/* ---- Loop ----------------------------------------------------------------------------------------------------- */

static eg_status iterate(loop *l) {
  const egi_control *c = l->c;
  int64_t limit = INT64_MAX, condition = 1, number = 0;
  uint8_t truth = 1;
  if (c->inputs[0].dtype != EG_DTYPE_UNDEFINED) EG_TRY(read_number(c, 0, &limit));
  if (c->inputs[1].dtype != EG_DTYPE_UNDEFINED) EG_TRY(read_number(c, 1, &condition));
  if (l->n_carried > 0) memcpy(l->inputs + 2, c->inputs + 2, l->n_carried * sizeof *l->inputs);
  l->inputs[0] = (egi_tensor){.data = &number, .dtype = EG_DTYPE_I64};
  l->inputs[1] = (egi_tensor){.data = &truth, .dtype = EG_DTYPE_BOOL};
  for (; number < limit && condition != 0; number++) {
    truth = condition != 0;
    EG_TRY(loop_step(l, 1));
    if (l->results[0].dtype != EG_DTYPE_BOOL || egi_tensor_count(&l->results[0]) != 1)
      return fail(c, "its body gives no condition");
    condition = *(const uint8_t *)l->results[0].data;
  }
  EG_TRY(finish_carried(l));
  for (uint32_t i = 0; i < l->n_collected && l->n_carried + i < node_of(c)->n_outputs; i++)
    EG_TRY(stack(l, i, 1 + l->n_carried + i, (stacking){0}, &c->outputs[l->n_carried + i]));
  return EG_OK;
}

static eg_status run_loop(const egi_control *c) {
  loop l = {.c = c, .body = body_of(c, "body"), .n_first = 2, .n_captured = count_captures(c)};
  uint32_t n_inputs = node_of(c)->n_inputs;
  if (l.body == NULL || n_inputs < 2 + l.n_captured || l.body->n_inputs != n_inputs)
    return fail(c, "its body does not fit");
  l.n_carried = n_inputs - 2 - l.n_captured;
  if (l.body->n_outputs < 1 + l.n_carried) return fail(c, "its body has too few results");
  l.n_collected = l.body->n_outputs - 1 - l.n_carried;
  eg_status status = loop_open(&l);
  if (status == EG_OK) status = iterate(&l);
  loop_close(&l);
  return status;
}

/* ---- Scan ----------------------------------------------------------------------------------------------------- */

static int64_t listed(const egi_control *c, const char *name, uint32_t index) {
  uint32_t count = 0;
  const int64_t *list = egi_node_ints(node_of(c), name, &count);
  return list != NULL && index < count ? list[index] : 0;
}

/* Element `number` along the axis, copied to the arena. */
static eg_status slice_input(const loop *l, uint32_t index, int64_t number, egi_arena *arena, egi_tensor *out) {
  const egi_tensor *whole = &l->c->inputs[l->n_carried + index];
  int64_t axis = listed(l->c, "scan_input_axes", index), n;
  if (axis < 0) axis += whole->rank;
  n = whole->dims[axis];
  if (listed(l->c, "scan_input_directions", index) != 0) number = n - 1 - number;
  *out = (egi_tensor){.dtype = whole->dtype, .rank = whole->rank - 1};
  size_t outer = 1, inner = egi_whole_bytes(whole->dtype);
  for (int i = 0; i < whole->rank; i++) {
    if (i < axis) outer *= (size_t)whole->dims[i];
    if (i > axis) inner *= (size_t)whole->dims[i];
    if (i != axis) out->dims[i < axis ? i : i - 1] = whole->dims[i];
  }
  egi_tensor_set_contiguous(out);
  out->data = egi_arena_get(arena, outer * inner + 1, 1);
  if (out->data == NULL) return EG_ERROR_MEMORY;
  for (size_t o = 0; o < outer && inner > 0; o++)
    memcpy((uint8_t *)out->data + o * inner, (const uint8_t *)whole->data + (o * (size_t)n + (size_t)number) * inner,
           inner);
  return EG_OK;
}

/* Iterations: the size of the scanned axes, which agree. */
static eg_status count_steps(const loop *l, int64_t *out_count) {
  for (uint32_t i = 0; i < l->n_scanned; i++) {
    const egi_tensor *whole = &l->c->inputs[l->n_carried + i];
    int64_t axis = listed(l->c, "scan_input_axes", i);
    if (axis < 0) axis += whole->rank;
    if (axis < 0 || axis >= whole->rank || egi_whole_bytes(whole->dtype) == 0)
      return fail(l->c, "an input cannot be scanned along that axis");
    if (i > 0 && whole->dims[axis] != *out_count) return fail(l->c, "its scanned inputs differ in length");
    *out_count = whole->dims[axis];
  }
  return EG_OK;
}

static eg_status scan(loop *l) {
  const egi_control *c = l->c;
  int64_t count = 0;
  EG_TRY(count_steps(l, &count));
  if (l->n_carried > 0) memcpy(l->inputs, c->inputs, l->n_carried * sizeof *l->inputs);
  for (int64_t number = 0; number < count; number++) {
    egi_arena slices;
    egi_arena_init(&slices, c->eager->ctx, EGI_PURPOSE_STEP);
    eg_status status = EG_OK;
    for (uint32_t i = 0; i < l->n_scanned && status == EG_OK; i++)
      status = slice_input(l, i, number, &slices, &l->inputs[l->n_carried + i]);
    if (status == EG_OK) status = loop_step(l, 0);
    egi_arena_clear(&slices);
    EG_TRY(status);
  }
  EG_TRY(finish_carried(l));
  for (uint32_t i = 0; i < l->n_collected && l->n_carried + i < node_of(c)->n_outputs; i++) {
    stacking how = {(int)listed(c, "scan_output_axes", i), listed(c, "scan_output_directions", i) != 0};
    EG_TRY(stack(l, i, l->n_carried + i, how, &c->outputs[l->n_carried + i]));
  }
  return EG_OK;
}

static eg_status run_scan(const egi_control *c) {
  loop l = {.c = c, .body = body_of(c, "body"), .n_captured = count_captures(c)};
  int64_t n_scanned = egi_node_int(node_of(c), "num_scan_inputs", 0);
  uint32_t n_inputs = node_of(c)->n_inputs - l.n_captured;
  if (l.body == NULL || n_scanned < 1 || n_scanned > n_inputs || l.body->n_inputs != node_of(c)->n_inputs)
    return fail(c, "its body does not fit");
  l.n_scanned = (uint32_t)n_scanned;
  l.n_carried = n_inputs - l.n_scanned;
  if (l.body->n_outputs < l.n_carried) return fail(c, "its body has too few results");
  l.n_collected = l.body->n_outputs - l.n_carried;
  eg_status status = loop_open(&l);
  if (status == EG_OK) status = scan(&l);
  loop_close(&l);
  return status;
}

eg_status egi_eager_control(const egi_control *control) {
  const egi_node *node = node_of(control);
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    bool may_be_absent = node->op == EGI_OP_Loop && i < 2;
    if (node->inputs[i] == 0 && !may_be_absent) return fail(control, "an input is missing");
  }
  switch (node->op) {
  case EGI_OP_If:
    return run_if(control);
  case EGI_OP_Loop:
    return run_loop(control);
  default:
    return run_scan(control);
  }
}
