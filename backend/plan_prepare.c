/* Fourth part of planning: every kernel sees the final types, shapes and strides of its operands, and the contents that
 * are known. What cannot run is collected and named in one error. */
#include <inttypes.h>

#include "backend/plan.h"

enum { SMALL_BYTES = 4096, MAX_NAMED = 20 };

/* Bytes of a weight that a kernel may look at now, aligned; NULL when there are none. */
static eg_status weight_data(egi_planner *planner, uint32_t index, egi_arena *arena, const uint8_t **out_data) {
  const egi_weight *weight = &planner->graph->module->weights[index];
  uint32_t element_bytes = egi_whole_bytes(weight->dtype);
  uint64_t size_bytes = 0;
  *out_data = NULL;
  if (weight->bytes.kind == EGI_BYTES_MEMORY && element_bytes != 0 &&
      (uintptr_t)weight->bytes.data % element_bytes == 0) {
    *out_data = weight->bytes.data;
    return EG_OK;
  }
  EG_TRY(egi_weight_bytes(planner->ctx, weight, &size_bytes));
  bool is_made = weight->bytes.kind == EGI_BYTES_QUANTISED || weight->bytes.kind == EGI_BYTES_NORMAL;
  if (size_bytes > SMALL_BYTES || is_made) return EG_OK; /* made at load, not here */
  void *copy = egi_arena_get(arena, (size_t)size_bytes + 1, 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_weight_write(planner->ctx, weight, copy));
  *out_data = copy;
  return EG_OK;
}

static eg_status set_known_data(egi_planner *planner, const egi_layout *layout, egi_arena *arena, egi_tensor *tensor) {
  const egi_storage *storage = &planner->plan->storages[layout->storage];
  const uint8_t *data = NULL;
  if (storage->kind == EGI_STORAGE_KNOWN) data = storage->bytes;
  if (storage->kind == EGI_STORAGE_WEIGHT) EG_TRY(weight_data(planner, storage->index, arena, &data));
  /* kernels read inputs only: the const is put back by `const egi_tensor *inputs` in spirit */
  if (data != NULL) tensor->data = (void *)(uintptr_t)(data + layout->offset_bytes);
  return EG_OK;
}

eg_status egi_plan_prepare_step(egi_planner *planner, const egi_step *step, egi_arena *arena, egi_kernel_plan *out) {
  uint32_t n = step->n_inputs + step->n_outputs;
  egi_tensor *tensors = EGI_NEW(arena, egi_tensor, (size_t)n + 1);
  if (tensors == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < n; i++) {
    const egi_layout *layout = &planner->plan->operands[step->first_operand + i];
    tensors[i] = layout->tensor;
    if (i < step->n_inputs) EG_TRY(set_known_data(planner, layout, arena, &tensors[i]));
  }
  *out = (egi_kernel_plan){.ctx = planner->ctx,
                           .graph = planner->graph,
                           .node = step->is_copy ? 0 : step->node, /* a copy has no node of its own */
                           .inputs = tensors,
                           .outputs = tensors + step->n_inputs,
                           .n_inputs = step->n_inputs,
                           .n_outputs = step->n_outputs,
                           .arena = arena};
  return step->kernel->prepare != NULL ? step->kernel->prepare(out) : EG_OK;
}

static eg_status add_workspace(egi_planner *planner, egi_step *step, uint64_t size_bytes) {
  if (size_bytes == 0) return EG_OK;
  EG_TRY(egi_plan_add_storage(planner, EGI_STORAGE_TRANSIENT, size_bytes, &step->workspace));
  planner->plan->storages[step->workspace].is_fixed = step->is_fixed;
  if (size_bytes > planner->plan->bytes.workspace) planner->plan->bytes.workspace = size_bytes;
  return EG_OK;
}

/* A small list of integers after the first input that is computed by the graph: kernels ask for its content. */
static void note_dynamic(const egi_planner *planner, const egi_step *step, const egi_kernel_plan *plan) {
  for (uint32_t i = 1; i < step->n_inputs && planner->options->out_is_dynamic != NULL; i++) {
    const egi_tensor *input = &plan->inputs[i];
    bool is_list = (input->dtype == EG_DTYPE_I64 || input->dtype == EG_DTYPE_I32) && input->rank <= 1;
    if (is_list && input->data == NULL) *planner->options->out_is_dynamic = true;
  }
}

static eg_status prepare(egi_planner *planner, egi_step *step) {
  if (step->kernel == NULL) {
    return egi_fail_node(planner->graph, step->node, EG_ERROR_UNSUPPORTED, "no kernel");
  }
  egi_kernel_plan kernel_plan = {0};
  eg_status status = egi_plan_prepare_step(planner, step, &planner->plan->arena, &kernel_plan);
  if (status == EG_ERROR_UNSUPPORTED) note_dynamic(planner, step, &kernel_plan);
  if (status == EG_ERROR_UNSUPPORTED && step->is_copy) {
    const egi_tensor *tensor = &planner->plan->operands[step->first_operand].tensor;
    return egi_fail_node(planner->graph, step->node, status, "its input of type %s cannot be copied",
                         egi_dtype_name(tensor->dtype));
  }
  EG_TRY(status);
  step->params = kernel_plan.params;
  step->chunk_rows = kernel_plan.chunk_rows;
  return add_workspace(planner, step, kernel_plan.workspace_bytes);
}

static eg_status prepare_all(egi_planner *planner, egi_text *faults, uint32_t *out_count) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < planner->n_steps; i++) {
    egi_step *step = &planner->steps[i];
    if (step->is_dead || step->kind != EGI_STEP_RUN) continue;
    eg_status status = prepare(planner, step);
    if (status == EG_OK) continue;
    if (status != EG_ERROR_UNSUPPORTED) return status;
    if (n < MAX_NAMED) egi_text_format(faults, "%s%s", n > 0 ? "; " : "", eg_context_error(planner->ctx));
    n++;
  }
  *out_count = n;
  return EG_OK;
}

eg_status egi_plan_prepare(egi_planner *planner) {
  egi_text faults;
  uint32_t n = 0;
  egi_text_init(&faults, planner->ctx);
  eg_status status = prepare_all(planner, &faults, &n);
  if (status == EG_OK && n == 1) {
    status = egi_fail(planner->ctx, EG_ERROR_UNSUPPORTED, "%s (backend %s)", egi_text_string(&faults),
                      planner->backend->name);
  } else if (status == EG_OK && n > 1) {
    if (n > MAX_NAMED) egi_text_format(&faults, "; and %" PRIu32 " more", n - MAX_NAMED);
    status = egi_fail(planner->ctx, EG_ERROR_UNSUPPORTED, "%" PRIu32 " nodes cannot run on the backend %s: %s", n,
                      planner->backend->name, egi_text_string(&faults));
  }
  egi_text_free(&faults);
  return status;
}
