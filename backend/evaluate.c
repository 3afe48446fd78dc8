/* The evaluator for passes: one node, or a whole graph, run once on the CPU on given tensors. Sizes of symbols follow
 * from the tensors (bindings.c). */
#include <inttypes.h>

#include "backend/plan.h"

/* ---- one node ------------------------------------------------------------------------------------------------- */

/* Type and sizes as far as inference knows them; with `is_measured` a size may be open: -1. */
static eg_status shape_output(const egi_graph *graph, egi_value_id id, const egi_binding_list *list, bool is_measured,
                              egi_tensor *out) {
  const egi_value *value = &graph->values[id];
  if (value->rank < 0) return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "\"%s\" has no known shape", value->name);
  *out = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
  for (int i = 0; i < value->rank; i++) {
    bool is_known = egi_dim_evaluate(graph->module->dims, value->dims[i], list->bindings, list->n, &out->dims[i]);
    if (is_known && out->dims[i] >= 0) continue;
    out->dims[i] = -1;
    if (!is_measured)
      return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "\"%s\": dimension %d has no known size", value->name, i);
  }
  return EG_OK;
}

static eg_status make_output(const egi_graph *graph, egi_value_id id, egi_arena *arena, egi_tensor *out) {
  const egi_value *value = &graph->values[id];
  uint64_t size_bytes = 0;
  egi_tensor_set_contiguous(out);
  if (!egi_dtype_bytes(out->dtype, (uint64_t)egi_tensor_count(out), &size_bytes)) {
    return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "\"%s\" is too large", value->name);
  }
  out->data = egi_arena_get(arena, (size_t)size_bytes + 1, 1);
  return out->data != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status run_prepared(const egi_kernel *kernel, const egi_kernel_plan *plan) {
  eg_context *ctx = plan->ctx;
  void *workspace = NULL;
  if (plan->workspace_bytes > 0) {
    workspace = egi_allocate(ctx, EGI_PURPOSE_STEP, plan->workspace_bytes);
    if (workspace == NULL) return EG_ERROR_MEMORY;
  }
  const egi_kernel_call call = {.inputs = plan->inputs,
                                .outputs = plan->outputs,
                                .n_inputs = plan->n_inputs,
                                .n_outputs = plan->n_outputs,
                                .params = plan->params,
                                .workspace = workspace,
                                .pool = egi_context_pool(ctx)};
  eg_status status = kernel->run(ctx, &call);
  egi_release(ctx, EGI_PURPOSE_STEP, workspace, plan->workspace_bytes);
  return status;
}

/* Kernels that update their first input get a copy of it that is the output. */
static void share_updated(const egi_kernel *kernel, egi_tensor *inputs, const egi_tensor *outputs) {
  uint64_t size_bytes = 0;
  if (!(kernel->flags & EGI_KERNEL_UPDATES_0)) return;
  (void)egi_dtype_bytes(inputs[0].dtype, (uint64_t)egi_tensor_count(&inputs[0]), &size_bytes);
  if (size_bytes > 0) memcpy(outputs[0].data, inputs[0].data, (size_t)size_bytes);
  inputs[0].data = outputs[0].data;
}

/* Constants lie where their file has them; kernels need them aligned for their type. */
static eg_status align_input(egi_tensor *input, egi_arena *arena) {
  size_t element_bytes = egi_dtype_bits(input->dtype) / 8;
  uint64_t size_bytes = 0;
  bool is_aligned = element_bytes <= 1 || (uintptr_t)input->data % element_bytes == 0;
  if (is_aligned || !egi_dtype_bytes(input->dtype, (uint64_t)egi_tensor_count(input), &size_bytes)) return EG_OK;
  void *copy = egi_arena_get(arena, (size_t)size_bytes + 1, 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  memcpy(copy, input->data, (size_t)size_bytes);
  input->data = copy;
  return EG_OK;
}

static eg_status evaluate_node(eg_context *ctx, const egi_graph *graph, egi_node_id id, const egi_tensor *inputs,
                               egi_arena *arena, egi_tensor *outputs) {
  const egi_node *node = &graph->nodes[id];
  const egi_kernel *kernel = egi_backend_cpu()->find_kernel(node->op);
  egi_binding_list list = {0};
  if (kernel == NULL) return egi_fail_node(graph, id, EG_ERROR_UNSUPPORTED, "no kernel");
  egi_tensor *copies = EGI_NEW(arena, egi_tensor, (size_t)node->n_inputs + 1);
  if (copies == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < node->n_inputs; i++) {
    if (node->inputs[i] == 0) continue;
    copies[i] = inputs[i];
    EG_TRY(align_input(&copies[i], arena));
    EG_TRY(egi_bind_value(graph, node->inputs[i], &inputs[i], arena, &list));
  }
  bool is_measured = kernel->measure != NULL;
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    outputs[i] = (egi_tensor){0};
    if (node->outputs[i] != 0) EG_TRY(shape_output(graph, node->outputs[i], &list, is_measured, &outputs[i]));
  }
  egi_kernel_plan plan = {.ctx = ctx,
                          .graph = graph,
                          .node = id,
                          .inputs = copies,
                          .outputs = outputs,
                          .n_inputs = node->n_inputs,
                          .n_outputs = node->n_outputs,
                          .arena = arena};
  if (is_measured) EG_TRY(kernel->measure(&plan, outputs));
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] != 0) EG_TRY(make_output(graph, node->outputs[i], arena, &outputs[i]));
  }
  share_updated(kernel, copies, outputs);
  if (kernel->prepare != NULL) EG_TRY(kernel->prepare(&plan));
  return run_prepared(kernel, &plan);
}

/* ---- a graph -------------------------------------------------------------------------------------------------- */

static eg_status read_outputs(const egi_graph *graph, egi_session *session, egi_arena *arena, egi_tensor *outputs) {
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    uint64_t size_bytes = 0;
    EG_TRY(egi_session_output(session, i, &outputs[i]));
    egi_tensor_set_contiguous(&outputs[i]);
    (void)egi_dtype_bytes(outputs[i].dtype, (uint64_t)egi_tensor_count(&outputs[i]), &size_bytes);
    outputs[i].data = egi_arena_get(arena, (size_t)size_bytes + 1, 1);
    if (outputs[i].data == NULL) return EG_ERROR_MEMORY;
    EG_TRY(egi_session_read_output(session, i, outputs[i].data, (size_t)size_bytes));
  }
  return EG_OK;
}

static eg_status run_session(const egi_graph *graph, egi_session *session, const egi_tensor *inputs) {
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    uint64_t size_bytes = 0;
    if (!egi_dtype_bytes(inputs[i].dtype, (uint64_t)egi_tensor_count(&inputs[i]), &size_bytes)) {
      return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "input %" PRIu32 " is too large", i);
    }
    EG_TRY(egi_session_set_input(session, i, inputs[i].data, (size_t)size_bytes));
  }
  return egi_session_run(session);
}

/* What only the data decides cannot be planned: such a graph runs node by node. */
static eg_status evaluate_eagerly(eg_context *ctx, const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                                  egi_tensor *outputs) {
  egi_store *store = NULL;
  EG_TRY(egi_store_create(ctx, graph->module, egi_backend_cpu(), &store));
  eg_status status = egi_eager_run(store, graph, inputs, arena, outputs);
  egi_store_destroy(store);
  return status;
}

static eg_status evaluate_graph(eg_context *ctx, const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                                egi_tensor *outputs) {
  egi_plan_options options = {0};
  egi_binding *bindings = NULL;
  egi_plan *plan = NULL;
  egi_store *store = NULL;
  egi_session *session = NULL;
  EG_TRY(egi_bindings_solve(graph, inputs, arena, &bindings, &options.n_bindings));
  options.bindings = bindings;
  bool is_dynamic = false;
  options.out_is_dynamic = &is_dynamic;
  eg_status status = egi_plan_create(ctx, graph, egi_backend_cpu(), &options, &plan);
  if (status != EG_OK && is_dynamic) return evaluate_eagerly(ctx, graph, inputs, arena, outputs);
  EG_TRY(status);
  status = egi_store_create(ctx, graph->module, egi_backend_cpu(), &store);
  if (status == EG_OK && plan->uses_states) status = egi_store_make_pools(store);
  if (status == EG_OK) status = egi_session_create(store, plan, NULL, &session);
  if (status == EG_OK) status = run_session(graph, session, inputs);
  if (status == EG_OK) status = read_outputs(graph, session, arena, outputs);
  egi_session_destroy(session);
  egi_store_destroy(store);
  egi_plan_destroy(plan);
  return status;
}

const egi_evaluator *egi_evaluator_cpu(void) {
  static const egi_evaluator evaluator = {evaluate_node, evaluate_graph};
  return &evaluator;
}
