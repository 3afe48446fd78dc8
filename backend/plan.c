/* Makes a plan: runs the parts of planning in order and adds up the bytes. The parts are in plan.h. */
#include <inttypes.h>

#include "backend/plan.h"

static eg_status planner_init(egi_planner *planner) {
  size_t n_values = planner->graph->n_values, n_nodes = planner->graph->n_nodes;
  egi_arena *arena = &planner->arena;
  planner->values = EGI_NEW(arena, egi_layout, n_values + 1);
  planner->is_live = EGI_NEW(arena, bool, n_values + 1);
  planner->is_known = EGI_NEW(arena, bool, n_values + 1);
  planner->is_fixed = EGI_NEW(arena, bool, n_values + 1);
  planner->narrow = EGI_NEW(arena, uint32_t, n_values + 1);
  planner->copies = EGI_NEW(arena, uint32_t, n_values + 1);
  planner->is_needed = EGI_NEW(arena, bool, n_nodes + 1);
  if (planner->values == NULL || planner->is_live == NULL || planner->is_known == NULL || planner->is_fixed == NULL ||
      planner->narrow == NULL || planner->copies == NULL || planner->is_needed == NULL) {
    return EG_ERROR_MEMORY;
  }
  egi_plan *plan = planner->plan;
  EG_TRY(EGI_GROW(&plan->arena, &plan->storages, 0, &plan->storages_capacity));
  plan->n_storages = 1; /* row 0 means "none" */
  return EG_OK;
}

/* ---- bytes ---------------------------------------------------------------------------------------------------- */

static int compare_numbers(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? -1 : x > y;
}

/* An operator whose weights are stored as codes, whatever the storage. */
static bool takes_quantised(const egi_planner *planner, const egi_step *step) {
  const egi_node *node = &planner->graph->nodes[step->node];
  return !step->is_copy && strcmp(egi_node_string(node, "storage", "plain"), "plain") != 0;
}

/* Marks the storages that a step or an output refers to, and those that operators with quantised weights read. */
static eg_status find_referenced(egi_planner *planner, bool **out_is_referenced, bool **out_is_quantised) {
  egi_plan *plan = planner->plan;
  bool *is_referenced = EGI_NEW(&planner->arena, bool, (size_t)plan->n_storages + 1);
  bool *is_quantised = EGI_NEW(&planner->arena, bool, (size_t)plan->n_storages + 1);
  if (is_referenced == NULL || is_quantised == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < planner->n_steps; i++) {
    const egi_step *step = &planner->steps[i];
    if (step->is_dead || step->kind != EGI_STEP_RUN) continue;
    for (uint32_t k = 0; k < step->n_inputs + step->n_outputs; k++) {
      uint32_t storage = plan->operands[step->first_operand + k].storage;
      is_referenced[storage] = true;
      if (takes_quantised(planner, step)) is_quantised[storage] = true;
    }
  }
  for (uint32_t i = 0; i < planner->graph->n_outputs; i++) is_referenced[plan->outputs[i].storage] = true;
  for (uint32_t i = 0; i < planner->graph->n_inputs; i++) is_referenced[plan->inputs[i].storage] = true;
  *out_is_referenced = is_referenced;
  *out_is_quantised = is_quantised;
  return EG_OK;
}

static void add_weight_bytes(egi_planner *planner, uint32_t id, bool is_quantised) {
  const egi_storage *storage = &planner->plan->storages[id];
  egi_plan_bytes *bytes = &planner->plan->bytes;
  bytes->weights += storage->size_bytes;
  if (is_quantised) bytes->quantised += storage->size_bytes;
  if (!egi_weight_is_in_place(planner->backend, &planner->graph->module->weights[storage->index]))
    bytes->copied += storage->size_bytes;
}

/* Offsets of what is not in the transient buffer, one after the other. */
static eg_status place_others(egi_planner *planner) {
  egi_plan *plan = planner->plan;
  bool *is_referenced = NULL, *is_quantised = NULL, has_pool[EGI_POOL_COUNT] = {false};
  EG_TRY(find_referenced(planner, &is_referenced, &is_quantised));
  plan->weights = EGI_NEW(&plan->arena, uint32_t, (size_t)plan->n_storages + 1);
  if (plan->weights == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 1; i < plan->n_storages; i++) {
    egi_storage *storage = &plan->storages[i];
    if (!is_referenced[i]) continue;
    uint64_t *total = storage->kind == EGI_STORAGE_KNOWN   ? &plan->bytes.known
                      : storage->kind == EGI_STORAGE_INPUT ? &plan->bytes.inputs
                      : storage->kind == EGI_STORAGE_FIXED ? &plan->bytes.fixed
                                                           : NULL;
    if (total != NULL) {
      storage->offset_bytes = *total;
      storage->is_placed = true;
      *total += egi_align(storage->size_bytes);
    } else if (storage->kind == EGI_STORAGE_WEIGHT) {
      plan->weights[plan->n_weights++] = storage->index;
      add_weight_bytes(planner, i, is_quantised[i]);
    } else if (storage->kind == EGI_STORAGE_STATE) {
      has_pool[storage->index] = true;
    }
  }
  for (uint32_t pool = 0; pool < EGI_POOL_COUNT; pool++) {
    if (has_pool[pool] && !planner->graph->module->is_pool_on_host[pool])
      plan->bytes.states += egi_module_pool_bytes(planner->graph->module, (egi_state_pool)pool);
  }
  plan->bytes.tables = ((uint64_t)plan->n_operands + 1) * sizeof(egi_tensor);
  qsort(plan->weights, plan->n_weights, sizeof(*plan->weights), compare_numbers);
  return EG_OK;
}

static bool is_transient_of_run(const egi_storage *storage) {
  return storage->kind == EGI_STORAGE_TRANSIENT && !storage->is_fixed;
}

/* Sequence number at which the loss (the first output that is one float) is there; 0: the plan trains nothing. */
static uint32_t loss_sequence(const egi_planner *planner, const egi_order *order) {
  const egi_plan *plan = planner->plan;
  bool has_update = false;
  uint32_t first = 0;
  for (uint32_t i = 0; i < order->n_steps && !has_update; i++) {
    const egi_step *step = &planner->steps[order->steps[i]];
    has_update = step->kernel != NULL && (step->kernel->flags & EGI_KERNEL_UPDATES_0);
  }
  for (uint32_t i = 0; has_update && first == 0 && i < planner->graph->n_outputs; i++) {
    const egi_layout *output = &plan->outputs[i];
    if (output->tensor.rank != 0 || !egi_dtype_is_float(output->tensor.dtype)) continue;
    const egi_storage *storage = &plan->storages[output->storage];
    if (is_transient_of_run(storage)) first = storage->first[0];
  }
  return first;
}

static uint64_t saved_bytes(const egi_planner *planner, const egi_order *order) {
  uint32_t loss = loss_sequence(planner, order);
  uint64_t sum = 0;
  for (uint32_t i = 1; loss != 0 && i < planner->plan->n_storages; i++) {
    const egi_storage *storage = &planner->plan->storages[i];
    bool is_across = is_transient_of_run(storage) && storage->root == i && storage->first[0] != 0 &&
                     storage->first[0] < loss && storage->last[0] > loss && storage->last[0] != UINT32_MAX;
    if (is_across) sum += egi_align(storage->size_bytes);
  }
  return sum;
}

/* The node that writes the largest piece of a kind. */
static const char *find_largest(const egi_planner *planner, egi_storage_kind kind, uint64_t *out_bytes) {
  const egi_plan *plan = planner->plan;
  const char *name = "";
  *out_bytes = 0;
  for (uint32_t i = 0; i < planner->n_steps; i++) {
    const egi_step *step = &planner->steps[i];
    const egi_node *node = &planner->graph->nodes[step->node];
    for (uint32_t k = 0; k < step->n_outputs && !step->is_dead && step->kind == EGI_STEP_RUN; k++) {
      const egi_storage *storage = &plan->storages[plan->operands[step->first_operand + step->n_inputs + k].storage];
      if (storage->kind != kind || storage->size_bytes <= *out_bytes) continue;
      *out_bytes = storage->size_bytes;
      name = node->name != NULL && node->name[0] != '\0' ? node->name : egi_op_get(node->op)->name;
    }
  }
  return name;
}

static eg_status check_budget(const egi_planner *planner) {
  const egi_plan_bytes *bytes = &planner->plan->bytes;
  uint64_t budget = planner->options->memory_budget, host_budget = planner->options->host_budget, largest;
  const char *graph = planner->graph->name != NULL ? planner->graph->name : "";
  if (host_budget != 0 && bytes->pinned > host_budget) {
    const char *name = find_largest(planner, EGI_STORAGE_HOST, &largest);
    return egi_fail(planner->ctx, EG_ERROR_BUDGET,
                    "graph \"%s\" needs %" PRIu64 " bytes of host memory for what is offloaded, the budget is %" PRIu64
                    " (largest: node \"%s\", %" PRIu64 ")",
                    graph, bytes->pinned, host_budget, name, largest);
  }
  if (budget == 0 || bytes->transient <= budget) return EG_OK;
  const char *name = find_largest(planner, EGI_STORAGE_TRANSIENT, &largest);
  return egi_fail(planner->ctx, EG_ERROR_BUDGET,
                  "graph \"%s\" needs %" PRIu64 " bytes for activations and workspace, the budget is %" PRIu64
                  " (kept for the backward pass: %" PRIu64 ", largest workspace: %" PRIu64
                  ", largest result: node \"%s\", %" PRIu64 ")",
                  graph, bytes->transient, budget, bytes->saved, bytes->workspace, name, largest);
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

static eg_status make(egi_planner *planner) {
  egi_plan *plan = planner->plan;
  egi_order setup, main;
  uint64_t setup_bytes = 0, main_bytes = 0;
  EG_TRY(planner_init(planner));
  EG_TRY(egi_plan_shapes(planner));
  EG_TRY(egi_plan_steps(planner));
  EG_TRY(egi_plan_concats(planner));
  EG_TRY(egi_plan_prepare(planner));
  EG_TRY(egi_plan_order(planner, true, &setup));
  EG_TRY(egi_plan_order(planner, false, &main));
  egi_plan_lifetimes(planner, &setup);
  egi_plan_lifetimes(planner, &main);
  egi_plan_in_place(planner, &setup);
  egi_plan_in_place(planner, &main);
  EG_TRY(egi_plan_offsets(planner, &setup, EGI_STORAGE_TRANSIENT, &setup_bytes));
  EG_TRY(egi_plan_offsets(planner, &main, EGI_STORAGE_TRANSIENT, &main_bytes));
  EG_TRY(egi_plan_offsets(planner, &main, EGI_STORAGE_HOST, &plan->bytes.pinned));
  EG_TRY(egi_plan_count_transfers(planner, &main));
  plan->bytes.transient = setup_bytes > main_bytes ? setup_bytes : main_bytes;
  plan->bytes.saved = saved_bytes(planner, &main);
  EG_TRY(place_others(planner));
  EG_TRY(check_budget(planner));
  EG_TRY(egi_plan_emit(planner, &setup, &plan->setup));
  return egi_plan_emit(planner, &main, &plan->main);
}

eg_status egi_plan_create(eg_context *ctx, const egi_graph *graph, const egi_backend *backend,
                          const egi_plan_options *options, egi_plan **out_plan) {
  static const egi_plan_options no_options;
  egi_plan *plan = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof(*plan));
  if (plan == NULL) return EG_ERROR_MEMORY;
  memset(plan, 0, sizeof(*plan));
  plan->ctx = ctx;
  plan->graph = graph;
  plan->backend = backend;
  egi_arena_init(&plan->arena, ctx, EGI_PURPOSE_GRAPH);
  egi_context_retain(ctx);
  egi_planner planner = {
      .ctx = ctx, .graph = graph, .backend = backend, .options = options != NULL ? options : &no_options, .plan = plan};
  egi_arena_init(&planner.arena, ctx, EGI_PURPOSE_GRAPH);
  eg_status status = make(&planner);
  egi_arena_clear(&planner.arena);
  if (status != EG_OK) {
    egi_plan_destroy(plan);
    return status;
  }
  *out_plan = plan;
  return EG_OK;
}

void egi_plan_destroy(egi_plan *plan) {
  if (plan == NULL) return;
  eg_context *ctx = plan->ctx;
  egi_arena_clear(&plan->arena);
  egi_release(ctx, EGI_PURPOSE_GRAPH, plan, sizeof(*plan));
  egi_context_release(ctx);
}

void egi_plan_get_bytes(const egi_plan *plan, egi_plan_bytes *out_bytes) {
  *out_bytes = plan->bytes;
}
