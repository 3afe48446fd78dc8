/* Third part of planning: what a Concat joins is produced in its place where that is possible, so that the Concat
 * copies only the rest, or is no step at all; a copy (a Reshape that no strides express, a view made contiguous) is a
 * Concat of one piece. Outer ones are looked at before inner ones, so that pieces nest. */
#include "backend/plan.h"

typedef struct placement {
  egi_planner *planner;
  bool *is_placed; /* by operand */
  uint32_t *moved; /* 1 + new index of each step; 0: gone */
} placement;

static bool is_concat(const egi_planner *planner, const egi_step *step) {
  return step->kind == EGI_STEP_RUN && !step->is_copy && !step->is_dead &&
         planner->graph->nodes[step->node].op == EGI_OP_Concat;
}

/* A step that moves all elements in row-major order. */
static bool is_plain_copy(const egi_planner *planner, const egi_step *step) {
  if (step->kind != EGI_STEP_RUN || step->is_dead || step->kernel == NULL) return false;
  if (step->is_copy) return true;
  switch (planner->graph->nodes[step->node].op) {
  case EGI_OP_Identity:
  case EGI_OP_Reshape:
  case EGI_OP_Flatten:
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
    return true;
  default:
    return false;
  }
}

static int concat_axis(const egi_planner *planner, const egi_step *step, int rank) {
  int64_t axis = egi_node_int(&planner->graph->nodes[step->node], "axis", 0);
  if (axis < 0) axis += rank;
  return axis >= 0 && axis < rank ? (int)axis : -1;
}

/* Order of dims in which `tensor` lies back to back in memory; false when there is none. */
static bool memory_order(const egi_tensor *tensor, int *order) {
  for (int i = 0; i < tensor->rank; i++) {
    int j = i;
    for (; j > 0; j--) {
      int before = order[j - 1];
      bool is_later = tensor->dims[before] == 1 ? tensor->dims[i] != 1 && tensor->strides[before] < tensor->strides[i]
                                                : tensor->strides[before] < tensor->strides[i];
      if (!is_later) break;
      order[j] = before;
    }
    order[j] = i;
  }
  int64_t expected = 1;
  for (int i = tensor->rank; i-- > 0;) {
    int64_t dim = tensor->dims[order[i]];
    if (dim == 1) continue;
    if (tensor->strides[order[i]] != expected) return false;
    expected *= dim;
  }
  return true;
}

/* The output operand through which `read`'s whole storage is written by one step that can write anywhere. */
static egi_layout *find_writer(const egi_planner *planner, const egi_step *concat, const egi_layout *read) {
  egi_plan *plan = planner->plan;
  const egi_storage *storage = &plan->storages[read->storage];
  uint64_t size_bytes = 0;
  if (storage->kind != EGI_STORAGE_TRANSIENT || storage->n_reads != 1 || storage->n_writes != 1) return NULL;
  if (storage->is_output || read->after != 0 || read->offset_bytes != 0) return NULL;
  if (!egi_dtype_bytes(read->tensor.dtype, (uint64_t)egi_tensor_count(&read->tensor), &size_bytes)) return NULL;
  if (size_bytes != storage->size_bytes) return NULL;
  const egi_step *writer = &planner->steps[storage->writer];
  if (writer->kernel == NULL || writer->is_fixed != concat->is_fixed) return NULL;
  if (!(writer->kernel->flags & EGI_KERNEL_STRIDED_OUTPUTS) || (writer->kernel->flags & EGI_KERNEL_UPDATES_0)) {
    return NULL;
  }
  egi_layout *outputs = plan->operands + writer->first_operand + writer->n_inputs;
  for (uint32_t i = 0; i < writer->n_outputs; i++) {
    if (outputs[i].storage == read->storage) return &outputs[i];
  }
  return NULL;
}

/* `piece` of the Concat's output, seen as the tensor that `written` was, when `read` shows it in any order of dims. */
static bool place_in_piece(const egi_layout *read, const egi_layout *piece, egi_layout *written) {
  int order[EGI_MAX_RANK];
  egi_layout ordered = {0}, out = {.tensor = written->tensor};
  if (!memory_order(&read->tensor, order)) return false;
  if (!egi_view_permute(piece, order, &ordered) || !egi_view_reshape(&ordered, &out)) return false;
  *written = out;
  return true;
}

static void place_inputs(placement *run, const egi_step *step) {
  egi_planner *planner = run->planner;
  const egi_layout *operands = planner->plan->operands + step->first_operand, *out = operands + step->n_inputs;
  int axis = concat_axis(planner, step, out->tensor.rank);
  int64_t start = 0;
  if (axis < 0 || egi_whole_bytes(out->tensor.dtype) == 0) return;
  for (uint32_t i = 0; i < step->n_inputs; i++) {
    const egi_layout *read = &operands[i];
    if (read->storage == 0 || egi_tensor_count(&read->tensor) == 0) continue;
    egi_layout piece = {.tensor = read->tensor}, *written = find_writer(planner, step, read);
    if (written != NULL && egi_view_piece(out, axis, start, &piece) && place_in_piece(read, &piece, written)) {
      run->is_placed[step->first_operand + i] = true;
    }
    start += read->tensor.dims[axis];
  }
}

/* The output of a copy, seen with the dims of what it copies. */
static void place_copied(placement *run, const egi_step *step) {
  egi_planner *planner = run->planner;
  const egi_layout *read = planner->plan->operands + step->first_operand, *out = read + step->n_inputs;
  if (egi_whole_bytes(out->tensor.dtype) == 0) return;
  egi_layout piece = {.tensor = read->tensor}, *written = find_writer(planner, step, read);
  if (written == NULL || !egi_view_reshape(out, &piece) || !place_in_piece(read, &piece, written)) return;
  run->is_placed[step->first_operand] = true;
}

static bool has_placed_input(const placement *run, const egi_step *step) {
  for (uint32_t i = 0; i < step->n_inputs; i++) {
    if (run->is_placed[step->first_operand + i]) return true;
  }
  return false;
}

/* Copies of those inputs that are not produced in their place. */
static eg_status copy_others(placement *run, const egi_step *concat) {
  egi_planner *planner = run->planner;
  egi_layout out = planner->plan->operands[concat->first_operand + concat->n_inputs];
  int axis = concat_axis(planner, concat, out.tensor.rank);
  int64_t start = 0;
  for (uint32_t i = 0; i < concat->n_inputs; i++) {
    egi_layout read = planner->plan->operands[concat->first_operand + i];
    if (read.storage == 0 || egi_tensor_count(&read.tensor) == 0) continue;
    egi_layout piece = {.tensor = read.tensor};
    int64_t size = read.tensor.dims[axis];
    if (!run->is_placed[concat->first_operand + i]) {
      egi_step *copy = NULL;
      if (!egi_view_piece(&out, axis, start, &piece)) return EG_ERROR_INTERNAL;
      EG_TRY(egi_plan_add_step(planner,
                               &(egi_step){.kind = EGI_STEP_RUN,
                                           .stream = concat->stream,
                                           .is_fixed = concat->is_fixed,
                                           .is_copy = true,
                                           .node = concat->node,
                                           .kernel = planner->copy_kernel,
                                           .n_inputs = 1,
                                           .n_outputs = 1},
                               &copy));
      planner->plan->operands[copy->first_operand] = read;
      planner->plan->operands[copy->first_operand + 1] = piece;
    }
    start += size;
  }
  return EG_OK;
}

/* The steps that are left, in the same order. */
static eg_status rebuild(placement *run) {
  egi_planner *planner = run->planner;
  egi_step *old = planner->steps;
  uint32_t n_old = planner->n_steps;
  planner->steps = NULL;
  planner->n_steps = planner->steps_capacity = 0;
  for (uint32_t i = 0; i < n_old; i++) {
    if (old[i].is_dead) continue;
    if (has_placed_input(run, &old[i])) {
      if (is_concat(planner, &old[i])) EG_TRY(copy_others(run, &old[i]));
      continue;
    }
    EG_TRY(EGI_GROW(&planner->arena, &planner->steps, planner->n_steps, &planner->steps_capacity));
    planner->steps[planner->n_steps++] = old[i];
    run->moved[i + 1] = planner->n_steps;
  }
  for (uint32_t i = 0; i < planner->plan->n_operands; i++) {
    egi_layout *operand = &planner->plan->operands[i];
    if (operand->after != 0) operand->after = run->moved[operand->after];
  }
  for (uint32_t i = 0; i < planner->graph->n_outputs; i++) {
    egi_layout *output = &planner->plan->outputs[i];
    if (output->after != 0) output->after = run->moved[output->after];
  }
  return EG_OK;
}

eg_status egi_plan_concats(egi_planner *planner) {
  const egi_kernel *copy = planner->copy_kernel;
  placement run = {.planner = planner};
  run.is_placed = EGI_NEW(&planner->arena, bool, (size_t)planner->plan->n_operands + 1);
  run.moved = EGI_NEW(&planner->arena, uint32_t, (size_t)planner->n_steps + 1);
  if (run.is_placed == NULL || run.moved == NULL) return EG_ERROR_MEMORY;
  uint32_t needed = EGI_KERNEL_STRIDED_INPUTS | EGI_KERNEL_STRIDED_OUTPUTS;
  bool can_copy = copy != NULL && (copy->flags & needed) == needed;
  for (uint32_t i = planner->n_steps; can_copy && i-- > 0;) {
    const egi_step *step = &planner->steps[i];
    if (is_concat(planner, step))
      place_inputs(&run, step);
    else if (is_plain_copy(planner, step))
      place_copied(&run, step);
  }
  EG_TRY(rebuild(&run));
  return egi_plan_drop_dead(planner);
}
