/* Layouts of what a graph starts from: inputs, weights, states and known values. Called by plan_steps.c. */
#include <inttypes.h>

#include "backend/plan.h"

typedef struct state_range {
  uint32_t state, pool;
  uint64_t first, end; /* bytes of the pool */
} state_range;

static int compare_ranges(const void *a, const void *b) {
  const state_range *x = a, *y = b;
  if (x->pool != y->pool) return x->pool < y->pool ? -1 : 1;
  if (x->first != y->first) return x->first < y->first ? -1 : 1;
  return x->state < y->state ? -1 : x->state > y->state;
}

static eg_status collect_ranges(egi_planner *planner, state_range *ranges, uint32_t *out_count) {
  const egi_graph *graph = planner->graph;
  uint32_t n = 0;
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    const egi_value *value = &graph->values[id];
    if (value->kind != EGI_VALUE_STATE || !planner->is_live[id]) continue;
    const egi_state *state = &graph->module->states[value->index];
    uint64_t count = 1, size_bytes = 0;
    for (int i = 0; i < state->rank; i++) count *= (uint64_t)state->dims[i];
    uint32_t element_bytes = egi_whole_bytes(state->dtype);
    if (!egi_dtype_bytes(state->dtype, count, &size_bytes) || state->pool >= EGI_POOL_COUNT ||
        state->offset * element_bytes + size_bytes > egi_module_pool_bytes(graph->module, state->pool)) {
      return egi_fail(planner->ctx, EG_ERROR_INTERNAL, "state \"%s\" does not lie in its pool", state->name);
    }
    uint64_t first = state->offset * element_bytes;
    ranges[n++] = (state_range){value->index, (uint32_t)state->pool, first, first + size_bytes};
  }
  *out_count = n;
  return EG_OK;
}

/* States that overlap (a parameter and the whole pool) are one storage, so that updates and reads of them are ordered.
 */
eg_status egi_plan_place_states(egi_planner *planner) {
  const egi_module *module = planner->graph->module;
  planner->state_storages = EGI_NEW(&planner->arena, uint32_t, (size_t)module->n_states + 1);
  state_range *ranges = EGI_NEW(&planner->arena, state_range, (size_t)planner->graph->n_values);
  if (planner->state_storages == NULL || ranges == NULL) return EG_ERROR_MEMORY;
  uint32_t n = 0, storage = 0;
  EG_TRY(collect_ranges(planner, ranges, &n));
  qsort(ranges, n, sizeof(*ranges), compare_ranges);
  uint64_t end = 0;
  for (uint32_t i = 0; i < n; i++) {
    bool is_overlapping = i > 0 && ranges[i].pool == ranges[i - 1].pool && ranges[i].first < end;
    if (!is_overlapping) {
      EG_TRY(egi_plan_add_storage(planner, EGI_STORAGE_STATE, 0, &storage));
      planner->plan->storages[storage].index = ranges[i].pool;
      planner->plan->storages[storage].offset_bytes = ranges[i].first;
      end = ranges[i].first;
    }
    if (ranges[i].end > end) end = ranges[i].end;
    planner->plan->storages[storage].size_bytes = end - planner->plan->storages[storage].offset_bytes;
    planner->state_storages[ranges[i].state] = storage;
  }
  planner->plan->uses_states = n > 0;
  return EG_OK;
}

eg_status egi_weight_bytes(eg_context *ctx, const egi_weight *weight, uint64_t *out_bytes) {
  uint64_t count = 1;
  bool is_sound = weight->rank >= 0 && weight->rank <= EGI_MAX_RANK;
  for (int i = 0; is_sound && i < weight->rank; i++) {
    uint64_t dim = (uint64_t)weight->dims[i];
    is_sound = weight->dims[i] >= 0 && (dim == 0 || count <= (uint64_t)INT64_MAX / dim);
    if (is_sound) count *= dim;
  }
  is_sound = is_sound && weight->dtype != EG_DTYPE_STRING && egi_dtype_bytes(weight->dtype, count, out_bytes) &&
             (weight->bytes.kind != EGI_BYTES_MEMORY || weight->bytes.size_bytes == *out_bytes);
  if (is_sound) return EG_OK;
  return egi_fail(ctx, EG_ERROR_FORMAT, "weight \"%s\": its bytes do not fit its type %s and shape", weight->name,
                  egi_dtype_name(weight->dtype));
}

static eg_status place_weight(egi_planner *planner, const egi_value *value, egi_layout *layout) {
  uint64_t size_bytes = 0;
  EG_TRY(egi_weight_bytes(planner->ctx, &planner->graph->module->weights[value->index], &size_bytes));
  EG_TRY(egi_plan_add_storage(planner, EGI_STORAGE_WEIGHT, size_bytes, &layout->storage));
  planner->plan->storages[layout->storage].index = value->index;
  return EG_OK;
}

static eg_status place_state(egi_planner *planner, const egi_value *value, egi_layout *layout) {
  const egi_state *state = &planner->graph->module->states[value->index];
  layout->storage = planner->state_storages[value->index];
  layout->offset_bytes =
      state->offset * egi_whole_bytes(state->dtype) - planner->plan->storages[layout->storage].offset_bytes;
  if (state->dtype == layout->tensor.dtype && state->rank == layout->tensor.rank) return EG_OK;
  return egi_fail(planner->ctx, EG_ERROR_INTERNAL, "state \"%s\" has another type than its value", state->name);
}

eg_status egi_plan_leaf(egi_planner *planner, egi_value_id id) {
  const egi_value *value = &planner->graph->values[id];
  egi_layout *layout = &planner->values[id];
  if (layout->storage != 0) return EG_OK;
  uint64_t size_bytes = 0;
  switch (value->kind) {
  case EGI_VALUE_WEIGHT:
    return place_weight(planner, value, layout);
  case EGI_VALUE_STATE:
    return place_state(planner, value, layout);
  case EGI_VALUE_INPUT:
    (void)egi_dtype_bytes(value->dtype, (uint64_t)egi_tensor_count(&layout->tensor), &size_bytes);
    EG_TRY(egi_plan_add_storage(planner, EGI_STORAGE_INPUT, size_bytes, &layout->storage));
    planner->plan->storages[layout->storage].index = value->index;
    return EG_OK;
  default:
    return egi_fail(planner->ctx, EG_ERROR_INTERNAL, "value \"%s\" is used before it is computed", value->name);
  }
}
