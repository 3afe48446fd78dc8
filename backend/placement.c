/* Last part of planning: lifetimes by happens-before, outputs in the memory of inputs that die, offsets. Invariant: two
 * storages share bytes only if all uses of one have happened before the first use of the other. */
#include "backend/plan.h"

static void touch(egi_storage *storage, unsigned stream, uint32_t sequence) {
  if (storage->first[stream] == 0) storage->first[stream] = sequence;
  if (sequence > storage->last[stream]) storage->last[stream] = sequence;
}

static bool is_placed(const egi_storage *storage) {
  return storage->kind == EGI_STORAGE_TRANSIENT || storage->kind == EGI_STORAGE_HOST;
}

void egi_plan_lifetimes(egi_planner *planner, const egi_order *order) {
  egi_plan *plan = planner->plan;
  for (uint32_t i = 0; i < order->n_steps; i++) {
    const egi_step *step = &planner->steps[order->steps[i]];
    if (step->kind != EGI_STEP_RUN) continue;
    for (uint32_t k = 0; k < step->n_inputs + step->n_outputs; k++) {
      egi_storage *storage = &plan->storages[plan->operands[step->first_operand + k].storage];
      if (!is_placed(storage)) continue;
      if (storage->is_fixed && !order->is_fixed) {
        storage->kind = EGI_STORAGE_FIXED; /* made by the set-up, read by the run */
      } else {
        touch(storage, step->stream, order->sequences[i]);
      }
    }
    if (step->workspace != 0) touch(&plan->storages[step->workspace], step->stream, order->sequences[i]);
  }
  for (uint32_t i = 0; i < planner->graph->n_outputs; i++) {
    egi_storage *storage = &plan->storages[plan->outputs[i].storage];
    if (!is_placed(storage)) continue;
    if (storage->is_fixed)
      storage->kind = EGI_STORAGE_FIXED;
    else
      storage->last[0] = UINT32_MAX; /* after everything */
  }
}

/* ---- in place ------------------------------------------------------------------------------------------------- */

static uint64_t offset_in_root(const egi_plan *plan, const egi_layout *layout) {
  return plan->storages[layout->storage].root_offset + layout->offset_bytes;
}

static bool has_same_shape(const egi_tensor *a, const egi_tensor *b) {
  return a->dtype == b->dtype && a->rank == b->rank && memcmp(a->dims, b->dims, sizeof(int64_t) * (size_t)a->rank) == 0;
}

/* No other operand of the step may lie in the memory that is overwritten, unless each of its elements is read where the
 * result is written (elementwise operators). */
static bool is_alone(const egi_planner *planner, const egi_step *step, uint32_t input) {
  const egi_plan *plan = planner->plan;
  const egi_layout *operands = plan->operands + step->first_operand, *taken = &operands[input];
  uint32_t root = plan->storages[taken->storage].root;
  bool is_elementwise =
      !step->is_copy && (egi_op_get(planner->graph->nodes[step->node].op)->flags & EGI_OP_ELEMENTWISE);
  for (uint32_t i = 0; i < step->n_inputs; i++) {
    if (i == input || operands[i].storage == 0 || plan->storages[operands[i].storage].root != root) continue;
    bool is_equal = has_same_shape(&operands[i].tensor, &taken->tensor) &&
                    egi_tensor_is_contiguous(&operands[i].tensor) &&
                    offset_in_root(plan, &operands[i]) == offset_in_root(plan, taken);
    if (!is_elementwise || !is_equal) return false;
  }
  return true;
}

static bool dies_here(const egi_storage *storage, const egi_order *order, uint32_t position, unsigned stream) {
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (p == stream ? storage->last[p] != order->sequences[position]
                    : storage->last[p] > order->clocks[position].at[p]) {
      return false;
    }
  }
  return true;
}

static bool take_input(egi_planner *planner, const egi_order *order, uint32_t position, uint32_t input) {
  egi_plan *plan = planner->plan;
  const egi_step *step = &planner->steps[order->steps[position]];
  if (input >= step->n_inputs || step->n_outputs == 0) return false;
  const egi_layout *in = &plan->operands[step->first_operand + input];
  const egi_layout *out = &plan->operands[step->first_operand + step->n_inputs];
  if (in->storage == 0 || out->storage == 0) return false;
  uint32_t root_id = plan->storages[in->storage].root;
  egi_storage *root = &plan->storages[root_id], *taker = &plan->storages[out->storage];
  uint64_t size_bytes = 0;
  if (root->kind != EGI_STORAGE_TRANSIENT || taker->kind != EGI_STORAGE_TRANSIENT) return false;
  if (taker->root != out->storage || taker->n_writes != 1 || out->offset_bytes != 0) return false;
  if (!has_same_shape(&in->tensor, &out->tensor) || !egi_tensor_is_contiguous(&in->tensor) ||
      !egi_tensor_is_contiguous(&out->tensor)) {
    return false;
  }
  (void)egi_dtype_bytes(out->tensor.dtype, (uint64_t)egi_tensor_count(&out->tensor), &size_bytes);
  if (size_bytes == 0 || size_bytes != taker->size_bytes) return false;
  if (!dies_here(root, order, position, step->stream) || !is_alone(planner, step, input)) return false;
  taker->root = root_id;
  taker->root_offset = offset_in_root(plan, in);
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (taker->last[p] > root->last[p]) root->last[p] = taker->last[p];
  }
  return true;
}

void egi_plan_in_place(egi_planner *planner, const egi_order *order) {
  for (uint32_t i = 0; i < order->n_steps; i++) {
    const egi_step *step = &planner->steps[order->steps[i]];
    if (step->kernel == NULL || (step->kernel->flags & EGI_KERNEL_UPDATES_0)) continue;
    bool is_done = (step->kernel->flags & EGI_KERNEL_IN_PLACE_0) && take_input(planner, order, i, 0);
    if (!is_done && (step->kernel->flags & EGI_KERNEL_IN_PLACE_1)) take_input(planner, order, i, 1);
  }
}

/* ---- offsets -------------------------------------------------------------------------------------------------- */

/* What has happened before every first use of the storage. */
static void set_start(const egi_order *order, const egi_storage *storage, egi_item *item) {
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) item->start[p] = UINT32_MAX;
  for (unsigned q = 0; q < EGI_N_STREAMS; q++) {
    uint32_t first = storage->first[q];
    if (first == 0) continue;
    const egi_vector_clock *clock = &order->clocks[order->at[q][first]];
    for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
      uint32_t known = p == q ? first - 1 : clock->at[p];
      if (known < item->start[p]) item->start[p] = known;
    }
  }
}

static bool is_used(const egi_storage *storage) {
  for (unsigned p = 0; p < EGI_N_STREAMS; p++) {
    if (storage->first[p] != 0) return true;
  }
  return false;
}

eg_status egi_plan_offsets(egi_planner *planner, const egi_order *order, egi_storage_kind kind, uint64_t *out_size) {
  egi_plan *plan = planner->plan;
  egi_item *items = EGI_NEW(&planner->arena, egi_item, (size_t)plan->n_storages);
  uint32_t n = 0;
  if (items == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 1; i < plan->n_storages; i++) {
    const egi_storage *storage = &plan->storages[i];
    bool is_item = storage->kind == kind && storage->is_fixed == order->is_fixed && storage->root == i &&
                   storage->size_bytes > 0 && is_used(storage);
    if (!is_item) continue;
    items[n] = (egi_item){.storage = i, .size_bytes = egi_align(storage->size_bytes)};
    memcpy(items[n].last, storage->last, sizeof(items[n].last));
    set_start(order, storage, &items[n++]);
  }
  EG_TRY(egi_pack(&planner->arena, items, n, out_size));
  for (uint32_t i = 0; i < n; i++) plan->storages[items[i].storage].offset_bytes = items[i].offset_bytes;
  for (uint32_t i = 1; i < plan->n_storages; i++) {
    egi_storage *storage = &plan->storages[i];
    if (storage->root == i || storage->is_fixed != order->is_fixed || storage->kind != kind) continue;
    storage->offset_bytes = plan->storages[storage->root].offset_bytes + storage->root_offset;
  }
  return EG_OK;
}
