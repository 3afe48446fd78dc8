/* Graphs whose sizes or course depend on data, run once and node by node on the host: before each node its shape rule
 * runs again with the sizes and small integer contents that its inputs have now (in a clone of the module, whose rows
 * are overwritten), then its kernel is prepared and run by the evaluator. Operators whose result's size only the kernel
 * knows have `measure`. Bodies of If, Loop and Scan (eager_control.c) run the same way; what they see of the graph
 * around them are their last inputs. A result lives until its last use. Callers: the runner, for graphs that a plan
 * refuses as dynamic. */
#include "backend/eager.h"

#include <inttypes.h>

/* ---- values --------------------------------------------------------------------------------------------------- */

static bool is_small_integers(const egi_tensor *tensor) {
  egi_dtype_class kind = egi_dtype_kind(tensor->dtype);
  return tensor->rank <= 1 && egi_tensor_count(tensor) <= EGI_EAGER_ELEMENTS && egi_dtype_bits(tensor->dtype) >= 8 &&
         (kind == EGI_CLASS_INTEGER || kind == EGI_CLASS_UNSIGNED || kind == EGI_CLASS_BOOLEAN);
}

static int64_t integer_at(const egi_tensor *tensor, int64_t i) {
  const uint8_t *at = (const uint8_t *)tensor->data + (uint64_t)i * (egi_dtype_bits(tensor->dtype) / 8);
  int64_t value = 0;
  bool is_signed = egi_dtype_kind(tensor->dtype) == EGI_CLASS_INTEGER;
  unsigned bits = egi_dtype_bits(tensor->dtype);
  uint64_t raw = 0;
  for (unsigned byte = 0; byte < bits / 8; byte++) raw |= (uint64_t)at[byte] << (8 * byte); /* little-endian hosts */
  if (is_signed && bits < 64 && (raw >> (bits - 1) & 1u) != 0) raw |= UINT64_MAX << bits;
  memcpy(&value, &raw, sizeof value);
  return value;
}

/* The row says what the tensor is: sizes as numbers, contents of small integer tensors. */
static eg_status describe(egi_graph *graph, egi_value_id id, const egi_tensor *tensor) {
  egi_value *value = &graph->values[id];
  egi_dims *dims = graph->module->dims;
  value->dtype = tensor->dtype;
  value->rank = tensor->rank;
  for (int i = 0; i < tensor->rank; i++) value->dims[i] = egi_dim_constant(dims, tensor->dims[i]);
  value->elements = NULL;
  value->n_elements = 0;
  if (value->kind == EGI_VALUE_WEIGHT || !is_small_integers(tensor)) return EG_OK;
  uint32_t count = (uint32_t)egi_tensor_count(tensor);
  egi_dim *elements = EGI_NEW(&graph->module->arena, egi_dim, (size_t)count + 1);
  if (elements == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < count; i++) elements[i] = egi_dim_constant(dims, integer_at(tensor, i));
  value->elements = elements;
  value->n_elements = count;
  return EG_OK;
}

static void forget(egi_graph *graph, egi_value_id id) {
  egi_value *value = &graph->values[id];
  if (id == 0) return;
  value->dtype = EG_DTYPE_UNDEFINED;
  value->rank = -1;
  value->elements = NULL;
  value->n_elements = 0;
}

static eg_status load_weight(egi_eager *eager, uint32_t index, egi_tensor *out) {
  const egi_weight *weight = &eager->module->weights[index];
  void *data = NULL;
  *out = (egi_tensor){.dtype = weight->dtype, .rank = weight->rank};
  memcpy(out->dims, weight->dims, sizeof out->dims);
  egi_tensor_set_contiguous(out);
  EG_TRY(egi_store_load(eager->store, index, &data));
  out->data = data;
  return EG_OK;
}

static eg_status load_state(egi_eager *eager, uint32_t index, egi_tensor *out) {
  const egi_state *state = &eager->module->states[index];
  uint8_t *pool = egi_store_pool(eager->store, state->pool);
  if (pool == NULL) return egi_fail(eager->ctx, EG_ERROR_INTERNAL, "state \"%s\" has no memory", state->name);
  *out = (egi_tensor){.dtype = state->dtype, .rank = state->rank};
  memcpy(out->dims, state->dims, sizeof out->dims);
  egi_tensor_set_contiguous(out);
  out->data = pool + state->offset * egi_whole_bytes(state->dtype);
  return EG_OK;
}

eg_status egi_eager_copy(egi_eager *eager, const egi_tensor *tensor, egi_arena *arena, egi_tensor *out) {
  uint64_t size_bytes = 0;
  *out = *tensor;
  if (!egi_dtype_bytes(tensor->dtype, (uint64_t)egi_tensor_count(tensor), &size_bytes))
    return egi_fail(eager->ctx, EG_ERROR_SHAPE, "a tensor is too large");
  out->data = egi_arena_get(arena, (size_t)size_bytes + 1, 1);
  if (out->data == NULL) return EG_ERROR_MEMORY;
  if (size_bytes > 0) memcpy(out->data, tensor->data, (size_t)size_bytes);
  return EG_OK;
}

/* ---- one graph ------------------------------------------------------------------------------------------------ */

typedef struct frame {
  egi_eager *eager;
  egi_graph *graph;
  egi_arena arena;
  egi_tensor *tensors; /* by value; dtype UNDEFINED: not there */
  egi_arena *owned;    /* by node: its results */
  uint32_t *pending;   /* by node: uses of its results that are to come */
} frame;

static egi_node_id producer_of(const egi_graph *graph, egi_value_id id) {
  return id != 0 && graph->values[id].kind == EGI_VALUE_NODE ? graph->values[id].producer : 0;
}

static eg_status frame_open(frame *f) {
  const egi_graph *graph = f->graph;
  egi_arena_init(&f->arena, f->eager->ctx, EGI_PURPOSE_STEP);
  f->tensors = EGI_NEW(&f->arena, egi_tensor, graph->n_values);
  f->owned = EGI_NEW(&f->arena, egi_arena, graph->n_nodes);
  f->pending = EGI_NEW(&f->arena, uint32_t, graph->n_nodes);
  if (f->tensors == NULL || f->owned == NULL || f->pending == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id n = 1; n < graph->n_nodes; n++) {
    egi_arena_init(&f->owned[n], f->eager->ctx, EGI_PURPOSE_STEP);
    for (uint16_t i = 0; i < graph->nodes[n].n_inputs; i++) f->pending[producer_of(graph, graph->nodes[n].inputs[i])]++;
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) f->pending[producer_of(graph, graph->outputs[i])]++;
  return EG_OK;
}

static void frame_close(frame *f) {
  for (egi_node_id n = 1; f->owned != NULL && n < f->graph->n_nodes; n++) egi_arena_clear(&f->owned[n]);
  egi_arena_clear(&f->arena);
}

static eg_status fetch(frame *f, egi_value_id id, egi_tensor *out) {
  const egi_value *value = &f->graph->values[id];
  egi_tensor *tensor = &f->tensors[id];
  *out = (egi_tensor){0};
  if (id == 0) return EG_OK;
  if (tensor->dtype == EG_DTYPE_UNDEFINED && value->kind == EGI_VALUE_WEIGHT) {
    EG_TRY(load_weight(f->eager, value->index, tensor));
    EG_TRY(describe(f->graph, id, tensor));
  } else if (tensor->dtype == EG_DTYPE_UNDEFINED && value->kind == EGI_VALUE_STATE) {
    EG_TRY(load_state(f->eager, value->index, tensor));
    EG_TRY(describe(f->graph, id, tensor));
  }
  *out = *tensor;
  return EG_OK;
}

static void release_inputs(frame *f, egi_node_id id) {
  const egi_node *node = &f->graph->nodes[id];
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    egi_node_id producer = producer_of(f->graph, node->inputs[i]);
    if (producer != 0 && --f->pending[producer] == 0) egi_arena_clear(&f->owned[producer]);
  }
}

static bool is_control(egi_op op) {
  return op == EGI_OP_If || op == EGI_OP_Loop || op == EGI_OP_Scan;
}

static eg_status run_node(frame *f, egi_node_id id) {
  egi_eager *eager = f->eager;
  const egi_node *node = &f->graph->nodes[id];
  egi_arena *arena = &f->owned[id];
  egi_tensor *inputs = EGI_NEW(arena, egi_tensor, (size_t)node->n_inputs + 1);
  egi_tensor *outputs = EGI_NEW(arena, egi_tensor, (size_t)node->n_outputs + 1);
  if (inputs == NULL || outputs == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node->n_inputs; i++) EG_TRY(fetch(f, node->inputs[i], &inputs[i]));
  if (is_control(node->op)) {
    const egi_control control = {eager, f->graph, id, inputs, outputs, arena};
    EG_TRY(egi_eager_control(&control));
  } else {
    for (uint16_t i = 0; i < node->n_outputs; i++) forget(f->graph, node->outputs[i]);
    EG_TRY(egi_infer_node(f->graph, id));
    EG_TRY(egi_evaluator_cpu()->node(eager->ctx, f->graph, id, inputs, arena, outputs));
  }
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] == 0) continue;
    f->tensors[node->outputs[i]] = outputs[i];
    EG_TRY(describe(f->graph, node->outputs[i], &outputs[i]));
  }
  return EG_OK;
}

static bool is_needed(const frame *f, egi_node_id id) {
  const egi_node *node = &f->graph->nodes[id];
  if (node->op == EGI_OP_NONE) return false;
  return f->pending[id] > 0;
}

static eg_status run_nodes(frame *f, const egi_tensor *inputs, egi_arena *arena, egi_tensor *outputs) {
  egi_graph *graph = f->graph;
  EG_TRY(frame_open(f));
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    f->tensors[graph->inputs[i]] = inputs[i];
    if (inputs[i].dtype != EG_DTYPE_UNDEFINED) EG_TRY(describe(graph, graph->inputs[i], &inputs[i]));
  }
  for (egi_node_id n = 1; n < graph->n_nodes; n++) {
    if (is_needed(f, n)) EG_TRY(run_node(f, n));
    release_inputs(f, n);
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_tensor tensor;
    EG_TRY(fetch(f, graph->outputs[i], &tensor));
    EG_TRY(egi_eager_copy(f->eager, &tensor, arena, &outputs[i]));
  }
  return EG_OK;
}

eg_status egi_eager_graph(egi_eager *eager, egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                          egi_tensor *outputs) {
  frame f = {.eager = eager, .graph = graph};
  eg_status status = run_nodes(&f, inputs, arena, outputs);
  frame_close(&f);
  return status;
}

/* ---- entry ---------------------------------------------------------------------------------------------------- */

static eg_status check_inputs(const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena) {
  egi_binding *bindings = NULL;
  size_t count = 0;
  return egi_bindings_solve(graph, inputs, arena, &bindings, &count);
}

eg_status egi_eager_run(egi_store *store, const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                        egi_tensor *outputs) {
  const egi_module *module = graph->module;
  egi_eager eager = {.ctx = module->ctx, .store = store};
  uint32_t index = 0;
  while (index < module->n_graphs && module->graphs[index] != graph) index++;
  if (index == module->n_graphs) return egi_fail(module->ctx, EG_ERROR_INTERNAL, "the graph is no entry point");
  EG_TRY(check_inputs(graph, inputs, arena));
  EG_TRY(egi_module_clone(module, &eager.module));
  eg_status status = egi_eager_graph(&eager, eager.module->graphs[index], inputs, arena, outputs);
  egi_module_destroy(eager.module);
  return status;
}
