/* Second part of planning: each needed node becomes a layout (views), an order (Barrier) or a step of a kernel, with
 * contiguous copies before kernels that need them. Invariant: steps stand in graph order; that order decides which
 * reads of a state come before its update. */
#include <inttypes.h>

#include "backend/plan.h"

eg_status egi_plan_add_storage(egi_planner *planner, egi_storage_kind kind, uint64_t size_bytes,
                               uint32_t *out_storage) {
  egi_plan *plan = planner->plan;
  EG_TRY(EGI_GROW(&plan->arena, &plan->storages, plan->n_storages, &plan->storages_capacity));
  plan->storages[plan->n_storages] = (egi_storage){.kind = kind, .size_bytes = size_bytes, .root = plan->n_storages};
  *out_storage = plan->n_storages++;
  return EG_OK;
}

eg_status egi_plan_add_step(egi_planner *planner, const egi_step *step, egi_step **out_step) {
  egi_plan *plan = planner->plan;
  EG_TRY(EGI_GROW(&planner->arena, &planner->steps, planner->n_steps, &planner->steps_capacity));
  egi_step *added = &planner->steps[planner->n_steps++];
  *added = *step;
  added->first_operand = plan->n_operands;
  for (uint32_t i = 0; i < step->n_inputs + step->n_outputs; i++) {
    EG_TRY(EGI_GROW(&plan->arena, &plan->operands, plan->n_operands, &plan->operands_capacity));
    plan->operands[plan->n_operands++] = (egi_layout){0};
  }
  *out_step = added;
  return EG_OK;
}

/* Keeps a layout beside the values' own; *out_index is never 0. */
static eg_status add_extra(egi_planner *planner, const egi_layout *layout, uint32_t version, uint32_t *out_index) {
  EG_TRY(EGI_GROW(&planner->arena, &planner->extra, planner->n_extra, &planner->extra_capacity));
  EG_TRY(EGI_GROW(&planner->arena, &planner->extra_versions, planner->n_extra, &planner->extra_versions_capacity));
  planner->extra[planner->n_extra] = *layout;
  planner->extra_versions[planner->n_extra] = version;
  *out_index = planner->n_extra++;
  return EG_OK;
}

static eg_status add_buffer(egi_planner *planner, egi_storage_kind kind, const egi_tensor *tensor, bool is_fixed,
                            egi_layout *out_layout) {
  uint64_t size_bytes = 0;
  egi_layout layout = {.tensor = *tensor};
  egi_tensor_set_contiguous(&layout.tensor);
  (void)egi_dtype_bytes(tensor->dtype, (uint64_t)egi_tensor_count(tensor), &size_bytes);
  EG_TRY(egi_plan_add_storage(planner, kind, size_bytes, &layout.storage));
  planner->plan->storages[layout.storage].is_fixed = is_fixed;
  *out_layout = layout;
  return EG_OK;
}

/* The stream a node runs on: 0 computes, 1 copies towards the host, 2 towards the device. An attribute puts any node
 * elsewhere. */
static unsigned stream_of(const egi_node *node) {
  bool is_out = node->op == EGI_OP_Offload || node->op == EGI_OP_StoreState;
  int64_t usual = is_out ? 1 : node->op == EGI_OP_Reload ? 2 : 0;
  int64_t stream = egi_node_int(node, "engraft_stream", usual);
  return stream > 0 && stream < (int64_t)EGI_N_STREAMS ? (unsigned)stream : 0;
}

/* ---- copies --------------------------------------------------------------------------------------------------- */

static eg_status add_copy(egi_planner *planner, egi_node_id node, const egi_layout *from, bool is_fixed,
                          egi_layout *out_layout) {
  if (planner->copy_kernel == NULL || !(planner->copy_kernel->flags & EGI_KERNEL_STRIDED_INPUTS)) {
    return egi_fail_node(planner->graph, node, EG_ERROR_UNSUPPORTED, "backend %s cannot make its input contiguous",
                         planner->backend->name);
  }
  egi_step *step = NULL;
  egi_layout layout;
  EG_TRY(add_buffer(planner, EGI_STORAGE_TRANSIENT, &from->tensor, is_fixed, &layout));
  EG_TRY(egi_plan_add_step(planner,
                           &(egi_step){.kind = EGI_STEP_RUN,
                                       .is_fixed = is_fixed,
                                       .is_copy = true,
                                       .node = node,
                                       .kernel = planner->copy_kernel,
                                       .n_inputs = 1,
                                       .n_outputs = 1},
                           &step));
  planner->plan->operands[step->first_operand] = *from;
  planner->plan->operands[step->first_operand + 1] = layout;
  *out_layout = layout;
  return EG_OK;
}

/* A contiguous copy of a value, shared by all who need one until the memory it was made from is updated. */
static eg_status contiguous_copy(egi_planner *planner, egi_node_id node, egi_value_id value, egi_layout *layout) {
  uint32_t index = planner->copies[value], version = planner->plan->storages[layout->storage].version;
  if (index != 0 && planner->extra_versions[index] == version) {
    *layout = planner->extra[index];
    return EG_OK;
  }
  egi_layout from = *layout;
  EG_TRY(add_copy(planner, node, &from, planner->is_fixed[value], layout));
  return add_extra(planner, layout, version, &planner->copies[value]);
}

/* ---- views ---------------------------------------------------------------------------------------------------- */

static void set_view(egi_planner *planner, egi_value_id value, const egi_layout *view) {
  egi_layout *layout = &planner->values[value];
  layout->storage = view->storage;
  layout->after = view->after;
  layout->offset_bytes = view->offset_bytes;
  layout->tensor = view->tensor;
}

/* All outputs as views of input 0, or false and nothing changed. */
static bool view_outputs(egi_planner *planner, egi_node_id id, const egi_layout *in, egi_layout *views) {
  const egi_node *node = &planner->graph->nodes[id];
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    views[i] = (egi_layout){0};
    if (node->outputs[i] == 0) continue;
    views[i].tensor = planner->values[node->outputs[i]].tensor;
    if (!egi_view_node(planner, id, i, in, &views[i])) return false;
    if (views[i].tensor.dtype != planner->values[node->outputs[i]].tensor.dtype) return false;
  }
  return true;
}

static eg_status add_view(egi_planner *planner, egi_node_id id, bool *out_is_view) {
  const egi_node *node = &planner->graph->nodes[id];
  egi_value_id from = node->n_inputs > 0 ? node->inputs[0] : 0;
  *out_is_view = false;
  if (from == 0 || !(egi_op_get(node->op)->flags & EGI_OP_VIEW)) return EG_OK;
  egi_layout *views = EGI_NEW(&planner->arena, egi_layout, (size_t)node->n_outputs + 1);
  if (views == NULL) return EG_ERROR_MEMORY;
  EG_TRY(planner->is_known[from] ? EG_OK : egi_plan_leaf(planner, from));
  if (!view_outputs(planner, id, &planner->values[from], views)) return EG_OK;
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] != 0 && !planner->is_known[node->outputs[i]]) set_view(planner, node->outputs[i], &views[i]);
  }
  *out_is_view = true;
  if (planner->narrow[from] == 0) return EG_OK;
  egi_layout narrow = planner->extra[planner->narrow[from]];
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] == 0) continue;
    egi_layout view = {.tensor = planner->values[node->outputs[i]].tensor};
    if (!egi_view_node(planner, id, i, &narrow, &view)) continue;
    EG_TRY(add_extra(planner, &view, 0, &planner->narrow[node->outputs[i]]));
  }
  return EG_OK;
}

/* A concatenation of one tensor with empty ones (a cache that holds nothing yet) is that tensor. */
static eg_status add_single_concat(egi_planner *planner, const egi_node *node, bool *out_is_view) {
  egi_value_id only = 0;
  *out_is_view = false;
  for (uint32_t i = 0; i < node->n_inputs; i++) {
    egi_value_id value = node->inputs[i];
    if (value == 0 || egi_tensor_count(&planner->values[value].tensor) == 0) continue;
    if (only != 0) return EG_OK;
    only = value;
  }
  egi_layout view = {.tensor = planner->values[node->outputs[0]].tensor};
  if (only == 0) return EG_OK;
  EG_TRY(planner->is_known[only] ? EG_OK : egi_plan_leaf(planner, only));
  if (!egi_view_reshape(&planner->values[only], &view) || planner->is_known[node->outputs[0]]) return EG_OK;
  set_view(planner, node->outputs[0], &view);
  *out_is_view = true;
  return EG_OK;
}

/* ---- nodes with a kernel -------------------------------------------------------------------------------------- */

/* Cast from the bytes of a weight: consumers that can may read those instead. */
static eg_status note_narrow_cast(egi_planner *planner, const egi_node *node) {
  if (node->op != EGI_OP_Cast || planner->is_known[node->inputs[0]]) return EG_OK;
  const egi_layout *in = &planner->values[node->inputs[0]];
  bool is_narrow = in->tensor.dtype == EG_DTYPE_F16 || in->tensor.dtype == EG_DTYPE_BF16;
  if (!is_narrow || planner->values[node->outputs[0]].tensor.dtype != EG_DTYPE_F32) return EG_OK;
  if (planner->plan->storages[in->storage].kind != EGI_STORAGE_WEIGHT) return EG_OK;
  return add_extra(planner, in, 0, &planner->narrow[node->outputs[0]]);
}

/* Tries the weight itself in place of its Cast; the kernel may still say no to this operand. */
static eg_status try_narrow(egi_planner *planner, egi_step *step, uint32_t input, egi_value_id value) {
  uint32_t index = value == 0 ? 0 : planner->narrow[value];
  if (index == 0 || !(step->kernel->flags & EGI_KERNEL_NARROW_WEIGHTS)) return EG_OK;
  egi_layout *operand = &planner->plan->operands[step->first_operand + input], wide = *operand;
  if (!(step->kernel->flags & EGI_KERNEL_STRIDED_INPUTS) && !egi_tensor_is_contiguous(&planner->extra[index].tensor)) {
    return EG_OK;
  }
  *operand = planner->extra[index];
  egi_kernel_plan ignored;
  egi_arena scratch;
  egi_arena_init(&scratch, planner->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = egi_plan_prepare_step(planner, step, &scratch, &ignored);
  egi_arena_clear(&scratch);
  if (status == EG_ERROR_UNSUPPORTED) {
    *operand = wide;
    return EG_OK;
  }
  return status;
}

/* The memory that an updating kernel works on: a state's, or a copy of anything else. */
static eg_status add_updated(egi_planner *planner, egi_node_id id, egi_layout *layout) {
  egi_layout from = *layout;
  if (planner->plan->storages[from.storage].kind == EGI_STORAGE_STATE) {
    if (egi_tensor_is_contiguous(&from.tensor)) return EG_OK;
    return egi_fail_node(planner->graph, id, EG_ERROR_UNSUPPORTED, "it would update a strided view of a state");
  }
  return add_copy(planner, id, &from, false, layout);
}

static eg_status resolve_inputs(egi_planner *planner, egi_node_id id, const egi_kernel *kernel, egi_layout *inputs) {
  const egi_node *node = &planner->graph->nodes[id];
  bool is_update = kernel != NULL && (kernel->flags & EGI_KERNEL_UPDATES_0);
  for (uint32_t i = 0; i < node->n_inputs; i++) {
    egi_value_id value = node->inputs[i];
    inputs[i] = (egi_layout){0};
    if (value == 0) continue;
    if (!planner->is_known[value]) EG_TRY(egi_plan_leaf(planner, value));
    inputs[i] = planner->values[value];
    bool is_direct = kernel == NULL || (kernel->flags & EGI_KERNEL_STRIDED_INPUTS) ||
                     egi_tensor_is_contiguous(&inputs[i].tensor) || (is_update && i == 0);
    if (!is_direct) EG_TRY(contiguous_copy(planner, id, value, &inputs[i]));
  }
  if (is_update) EG_TRY(add_updated(planner, id, &inputs[0]));
  return EG_OK;
}

static eg_status add_outputs(egi_planner *planner, const egi_node *node, const egi_step *step) {
  egi_layout *operands = planner->plan->operands + step->first_operand;
  bool is_update = step->kernel != NULL && (step->kernel->flags & EGI_KERNEL_UPDATES_0);
  bool is_host = node->op == EGI_OP_Offload && !step->is_fixed;
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    egi_value_id value = node->outputs[i];
    egi_layout *out = &operands[step->n_inputs + i];
    if (value == 0) continue;
    if (is_update && i == 0) {
      *out = operands[0];
      out->after = 0;
    } else {
      EG_TRY(add_buffer(planner, is_host ? EGI_STORAGE_HOST : EGI_STORAGE_TRANSIENT, &planner->values[value].tensor,
                        step->is_fixed, out));
    }
    if (!planner->is_known[value]) planner->values[value] = *out;
  }
  /* an optimizer updates more of its states than the one that it returns */
  for (uint32_t i = 0; is_update && i < node->n_inputs; i++) planner->plan->storages[operands[i].storage].version++;
  return EG_OK;
}

static bool has_work(const egi_planner *planner, const egi_node *node) {
  if (egi_op_get(node->op)->flags & EGI_OP_EFFECT) return true;
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    egi_value_id value = node->outputs[i];
    if (value != 0 && egi_tensor_count(&planner->values[value].tensor) > 0) return true;
  }
  return false;
}

static eg_status add_kernel_step(egi_planner *planner, egi_node_id id) {
  const egi_node *node = &planner->graph->nodes[id];
  const egi_kernel *kernel = node->op == EGI_OP_UNKNOWN ? NULL : planner->backend->find_kernel(node->op);
  egi_layout *inputs = EGI_NEW(&planner->arena, egi_layout, (size_t)node->n_inputs + 1);
  if (inputs == NULL) return EG_ERROR_MEMORY;
  EG_TRY(resolve_inputs(planner, id, kernel, inputs));
  egi_step *step = NULL;
  bool is_fixed = false;
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] != 0 && planner->is_fixed[node->outputs[i]]) is_fixed = true;
  }
  EG_TRY(egi_plan_add_step(planner,
                           &(egi_step){.kind = EGI_STEP_RUN,
                                       .stream = is_fixed ? 0 : stream_of(node),
                                       .is_fixed = is_fixed,
                                       .is_dead = !has_work(planner, node),
                                       .node = id,
                                       .kernel = kernel,
                                       .n_inputs = node->n_inputs,
                                       .n_outputs = node->n_outputs},
                           &step));
  for (uint32_t i = 0; i < node->n_inputs; i++) planner->plan->operands[step->first_operand + i] = inputs[i];
  EG_TRY(add_outputs(planner, node, step));
  if (kernel == NULL) return EG_OK;
  for (uint32_t i = 0; i < node->n_inputs; i++) EG_TRY(try_narrow(planner, step, i, node->inputs[i]));
  return note_narrow_cast(planner, node);
}

/* Input 0 as it lies, for readers that come after all inputs. */
static eg_status add_order(egi_planner *planner, egi_node_id id, egi_layout *out_view) {
  const egi_node *node = &planner->graph->nodes[id];
  egi_step *step = NULL;
  bool is_fixed = planner->is_fixed[node->outputs[0]];
  EG_TRY(egi_plan_add_step(planner,
                           &(egi_step){.kind = EGI_STEP_ORDER,
                                       .stream = is_fixed ? 0 : stream_of(node),
                                       .is_fixed = is_fixed,
                                       .node = id,
                                       .n_inputs = node->n_inputs},
                           &step));
  for (uint32_t i = 0; i < node->n_inputs; i++) {
    egi_value_id value = node->inputs[i];
    if (value == 0) continue;
    if (!planner->is_known[value]) EG_TRY(egi_plan_leaf(planner, value));
    planner->plan->operands[step->first_operand + i] = planner->values[value];
  }
  *out_view = planner->values[node->inputs[0]];
  out_view->after = planner->n_steps;
  return EG_OK;
}

static eg_status add_barrier(egi_planner *planner, egi_node_id id) {
  egi_layout view;
  EG_TRY(add_order(planner, id, &view));
  set_view(planner, planner->graph->nodes[id].outputs[0], &view);
  return EG_OK;
}

/* Reload reads input 0 alone: the others are an order, so that none of them lives longer for it. */
static eg_status add_reload(egi_planner *planner, egi_node_id id) {
  const egi_node *node = &planner->graph->nodes[id];
  egi_layout from;
  egi_step *step = NULL;
  bool is_fixed = planner->is_fixed[node->outputs[0]];
  EG_TRY(add_order(planner, id, &from));
  EG_TRY(egi_plan_add_step(planner,
                           &(egi_step){.kind = EGI_STEP_RUN,
                                       .stream = is_fixed ? 0 : stream_of(node),
                                       .is_fixed = is_fixed,
                                       .is_dead = !has_work(planner, node),
                                       .node = id,
                                       .kernel = planner->backend->find_kernel(node->op),
                                       .n_inputs = 1,
                                       .n_outputs = 1},
                           &step));
  planner->plan->operands[step->first_operand] = from;
  return add_outputs(planner, node, step);
}

static eg_status add_node(egi_planner *planner, egi_node_id id) {
  const egi_node *node = &planner->graph->nodes[id];
  bool is_view = false;
  if (node->op == EGI_OP_Barrier) return add_barrier(planner, id);
  if (node->op == EGI_OP_Reload) return add_reload(planner, id);
  if (node->op == EGI_OP_Concat) EG_TRY(add_single_concat(planner, node, &is_view));
  if (!is_view) EG_TRY(add_view(planner, id, &is_view));
  return is_view ? EG_OK : add_kernel_step(planner, id);
}

static eg_status place_boundary(egi_planner *planner) {
  const egi_graph *graph = planner->graph;
  egi_plan *plan = planner->plan;
  plan->inputs = EGI_NEW(&plan->arena, egi_layout, (size_t)graph->n_inputs + 1);
  plan->outputs = EGI_NEW(&plan->arena, egi_layout, (size_t)graph->n_outputs + 1);
  if (plan->inputs == NULL || plan->outputs == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    EG_TRY(egi_plan_leaf(planner, graph->inputs[i]));
    plan->inputs[i] = planner->values[graph->inputs[i]];
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_value_id value = graph->outputs[i];
    if (!planner->is_known[value]) EG_TRY(egi_plan_leaf(planner, value));
    plan->outputs[i] = planner->values[value];
    plan->storages[plan->outputs[i].storage].is_output = true;
  }
  return EG_OK;
}

/* Backwards: a step is needed for its effect, for memory that is read, or for an order that is asked for. */
eg_status egi_plan_drop_dead(egi_planner *planner) {
  egi_plan *plan = planner->plan;
  bool *is_read = EGI_NEW(&planner->arena, bool, (size_t)plan->n_storages);
  bool *is_asked = EGI_NEW(&planner->arena, bool, (size_t)planner->n_steps + 1);
  if (is_read == NULL || is_asked == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 1; i < plan->n_storages; i++) {
    is_read[i] = plan->storages[i].is_output;
    plan->storages[i].n_reads = plan->storages[i].n_writes = 0;
  }
  for (uint32_t i = 0; i < planner->graph->n_outputs; i++) {
    if (plan->outputs[i].after != 0) is_asked[plan->outputs[i].after] = true;
  }
  for (uint32_t s = planner->n_steps; s-- > 0;) {
    egi_step *step = &planner->steps[s];
    const egi_layout *inputs = plan->operands + step->first_operand, *outputs = inputs + step->n_inputs;
    bool is_needed = is_asked[s + 1] || (step->kernel != NULL && (step->kernel->flags & EGI_KERNEL_UPDATES_0)) ||
                     (step->kind == EGI_STEP_RUN && !step->is_copy &&
                      (egi_op_get(planner->graph->nodes[step->node].op)->flags & EGI_OP_EFFECT));
    for (uint32_t i = 0; i < step->n_outputs; i++) is_needed = is_needed || is_read[outputs[i].storage];
    if (step->is_dead || !is_needed) {
      step->is_dead = true;
      continue;
    }
    for (uint32_t i = 0; i < step->n_inputs; i++) {
      if (inputs[i].after != 0) is_asked[inputs[i].after] = true;
      if (step->kind != EGI_STEP_RUN || inputs[i].storage == 0) continue;
      is_read[inputs[i].storage] = true;
      plan->storages[inputs[i].storage].n_reads++;
    }
    for (uint32_t i = 0; i < step->n_outputs; i++) {
      plan->storages[outputs[i].storage].n_writes++;
      plan->storages[outputs[i].storage].writer = s;
    }
  }
  return EG_OK;
}

eg_status egi_plan_steps(egi_planner *planner) {
  planner->copy_kernel = planner->backend->find_kernel(EGI_OP_Identity);
  planner->n_extra = 1;
  EG_TRY(EGI_GROW(&planner->arena, &planner->extra, 0, &planner->extra_capacity));
  EG_TRY(EGI_GROW(&planner->arena, &planner->extra_versions, 0, &planner->extra_versions_capacity));
  EG_TRY(egi_plan_place_states(planner));
  for (egi_node_id id = 1; id < planner->graph->n_nodes; id++) {
    if (planner->is_needed[id]) EG_TRY(add_node(planner, id));
  }
  EG_TRY(place_boundary(planner));
  return egi_plan_drop_dead(planner);
}
