/* Memory for time: which rung of buffer_checkpoints' ladder a trainer takes. Each candidate is the graph as it would
 * be, in a clone of the module, planned for all shapes: the bytes are those that will be allocated. Stages of the
 * ladder are tried at their ends first, then the first rung that fits is looked for inside the stage, so that what is
 * said to be the least would do. Where no rung fits, wide layers are cut in tiles of rows: that alone changes the
 * rounding of sums over rows. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "graph/costs.h"
#include "train/train.h"

enum { MAX_TILES = 16, MIN_TILE_ROWS = 16 };

static uint64_t maximum(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

void egi_trainer_bytes(const eg_trainer *trainer, const egi_lanes *lanes, egi_trainer_memory *out_memory) {
  egi_trainer_memory all = {0};
  egi_plan_bytes one;
  for (size_t i = 0; i <= lanes->count; i++) {
    egi_plan_get_bytes(i < lanes->count ? lanes->lanes[i].plan : trainer->optimizer_plan, &one);
    all.weights = maximum(all.weights, one.weights);
    all.quantised = maximum(all.quantised, one.quantised);
    all.copied = maximum(all.copied, one.copied);
    all.transient = maximum(all.transient, one.transient);
    all.saved = maximum(all.saved, one.saved);
    all.pinned = maximum(all.pinned, one.pinned);
    all.fixed += one.fixed + (trainer->machine.backend->is_host ? 0 : one.known);
    all.inputs += one.inputs;
    all.tables += one.tables;
  }
  for (int pool = 0; pool < EGI_POOL_COUNT; pool++)
    *(trainer->machine.module->is_pool_on_host[pool] ? &all.pinned_states : &all.states) +=
        egi_module_pool_bytes(trainer->machine.module, (egi_state_pool)pool);
  all.pinned += all.pinned_states;
  all.total = all.weights + all.states + all.transient + all.fixed + all.inputs;
  *out_memory = all;
}

/* ---- candidates ------------------------------------------------------------------------------------------------- */

/* What the search has at hand. */
typedef struct search {
  eg_trainer *trainer;
  const egi_batches *batches;
  uint64_t budget, host_budget;
  egi_binder sizes;       /* of the largest shape */
  const egi_module *base; /* graphs[0] is differentiated, in `tiles` tiles */
  uint32_t tiles;
  uint64_t least; /* of what the host has room for: */
  uint32_t least_tiles, least_rung;
} search;

typedef enum verdict { FITS, TOO_LARGE, TOO_LARGE_FOR_HOST } verdict;

static eg_status apply(const search *s, egi_graph *graph, uint32_t rung) {
  static const char *const names[] = {"buffer_checkpoints"};
  const egi_checkpoint_options checkpoints = {.rung = rung,
                                              .bindings = s->sizes.bindings,
                                              .n_bindings = s->sizes.n,
                                              .is_single_buffered = s->trainer->options.single_buffer != 0};
  const egi_pipeline_options options = {.checkpoints = &checkpoints};
  eg_packing_cache cache = s->trainer->options.packing_cache;
  EG_TRY(egi_passes_run(graph, names, 1, &options, NULL));
  /* For comparison: what is made once is made for every layer and pass. */
  if (cache == EG_PACKING_CACHE_ON) return EG_OK;
  return egi_rebuild_metadata(graph, cache == EG_PACKING_CACHE_READBACK);
}

static eg_status plan_candidate(const search *s, const egi_module *module, uint32_t rung, egi_arena *arena,
                                egi_trainer_memory *out_memory) {
  egi_lanes lanes = {.count = 0};
  EG_TRY(apply(s, module->graphs[0], rung));
  eg_status status = egi_lanes_plan(&lanes, module->graphs[0], s->trainer->machine.backend, s->batches->buckets,
                                    s->batches->n_buckets, arena);
  if (status == EG_OK) egi_trainer_bytes(s->trainer, &lanes, out_memory);
  egi_lanes_close(&lanes);
  return status;
}

static eg_status try_rung(search *s, uint32_t rung, verdict *out_verdict) {
  egi_module *module = NULL;
  egi_arena arena;
  egi_trainer_memory memory = {0};
  egi_arena_init(&arena, s->trainer->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = egi_module_clone(s->base, &module);
  if (status == EG_OK) status = plan_candidate(s, module, rung, &arena, &memory);
  egi_module_destroy(module);
  egi_arena_clear(&arena);
  EG_TRY(status);
  egi_log(s->trainer->ctx, EG_LOG_DEBUG,
          "checkpoints: rung %" PRIu32 ", tiles %" PRIu32 ": %" PRIu64 " bytes, and %" PRIu64 " of the host", rung,
          s->tiles, memory.total, memory.pinned);
  *out_verdict = memory.pinned - memory.pinned_states > s->host_budget ? TOO_LARGE_FOR_HOST
                 : memory.total > s->budget                            ? TOO_LARGE
                                                                       : FITS;
  if (*out_verdict == TOO_LARGE_FOR_HOST || memory.total >= s->least) return EG_OK;
  s->least = memory.total;
  s->least_rung = rung;
  s->least_tiles = s->tiles;
  return EG_OK;
}

/* ---- the search ------------------------------------------------------------------------------------------------- */

/* The first rung of (below, fits] that fits, where more rungs need less. */
static eg_status bisect(search *s, uint32_t below, uint32_t fits, uint32_t *out_rung) {
  while (fits - below > 1) {
    uint32_t middle = below + (fits - below) / 2;
    verdict found;
    EG_TRY(try_rung(s, middle, &found));
    if (found == TOO_LARGE)
      below = middle;
    else
      fits = middle;
  }
  *out_rung = fits;
  return EG_OK;
}

/* The last rung of [below, end) that the host has room for: the higher ones offload more. */
static eg_status bound_by_host(search *s, uint32_t below, uint32_t *end, verdict *out_verdict) {
  uint32_t above = *end;
  verdict found;
  *out_verdict = TOO_LARGE;
  while (above - below > 1) {
    uint32_t middle = below + (above - below) / 2;
    EG_TRY(try_rung(s, middle, &found));
    if (found == TOO_LARGE_FOR_HOST) {
      above = middle;
    } else {
      below = middle;
      *out_verdict = found;
    }
  }
  *end = below;
  return EG_OK;
}

/* The first rung that fits of a stage that begins above `below`, which does not. */
static eg_status search_stage(search *s, uint32_t below, uint32_t end, bool is_first, uint32_t *out_rung,
                              bool *out_is_done) {
  verdict found;
  EG_TRY(try_rung(s, end, &found));
  if (found == TOO_LARGE_FOR_HOST && !is_first) EG_TRY(bound_by_host(s, below, &end, &found));
  *out_is_done = found == FITS;
  *out_rung = end;
  return found == FITS && !is_first ? bisect(s, below, end, out_rung) : EG_OK;
}

/* The stages that an option leaves to choose from. */
static void bound_stages(eg_checkpoint mode, uint32_t *first, uint32_t *last) {
  *first = mode == EG_CHECKPOINT_RECOMPUTE ? EGI_CHECKPOINT_WHOLE
           : mode == EG_CHECKPOINT_OFFLOAD ? EGI_CHECKPOINT_OFFLOAD
                                           : EGI_CHECKPOINT_NOTHING;
  *last = mode == EG_CHECKPOINT_OFF         ? EGI_CHECKPOINT_NOTHING
          : mode == EG_CHECKPOINT_RECOMPUTE ? EGI_CHECKPOINT_JOINED
                                            : EGI_CHECKPOINT_OFFLOAD;
}

/* ---- time ------------------------------------------------------------------------------------------------------- */

/* What a step would take: the longest of computing and the copies each way, which run beside it. */
static eg_status predict(const search *s, const egi_graph *graph, double *out_seconds) {
  const egi_costs *costs = graph->module->costs;
  const egi_device_description *device = &s->trainer->device;
  double compute = 0, to_host = 0, to_device = 0;
  for (egi_node_id id = 1; id < graph->n_nodes && costs != NULL; id++) {
    egi_cost cost;
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    EG_TRY(costs->node(graph, id, s->sizes.bindings, s->sizes.n, &cost));
    double *stream = cost.to_host_bytes > 0 ? &to_host : cost.to_device_bytes > 0 ? &to_device : &compute;
    *stream += egi_cost_seconds(device, &cost);
  }
  *out_seconds = fmax(compute, fmax(to_host, to_device));
  return EG_OK;
}

static eg_status predict_rung(const search *s, uint32_t rung, double *out_seconds) {
  egi_module *module = NULL;
  EG_TRY(egi_module_clone(s->base, &module));
  eg_status status = apply(s, module->graphs[0], rung);
  if (status == EG_OK) status = predict(s, module->graphs[0], out_seconds);
  egi_module_destroy(module);
  return status;
}

/* Moving what is dear takes less time than making it again, and the host has room for some of it. */
static eg_status is_moving_better(const search *s, const egi_checkpoint_stages *stages, bool *out_is_better) {
  double moved = 0, again = 0;
  *out_is_better = false;
  if (s->host_budget == 0) return EG_OK;
  EG_TRY(predict_rung(s, stages->end[EGI_CHECKPOINT_MOVED], &moved));
  EG_TRY(predict_rung(s, stages->end[EGI_CHECKPOINT_WHOLE], &again));
  *out_is_better = moved < again;
  return EG_OK;
}

static eg_status choose_rung(search *s, uint32_t *out_rung, bool *out_is_done) {
  egi_checkpoint_stages stages;
  uint32_t first, last;
  bound_stages(s->trainer->options.checkpoint, &first, &last);
  if (s->tiles > 1 && first < EGI_CHECKPOINT_WHOLE) first = EGI_CHECKPOINT_WHOLE;
  EG_TRY(egi_checkpoint_stages_find(s->base->graphs[0], &stages));
  if (s->least == UINT64_MAX) s->least_rung = stages.end[first];
  *out_rung = stages.end[first];
  *out_is_done = s->budget == UINT64_MAX && s->host_budget == UINT64_MAX;
  for (uint32_t stage = first; stage <= last && !*out_is_done; stage++) {
    bool is_first = stage == first;
    uint32_t below = is_first ? 0 : stages.end[stage - 1];
    bool is_taken = is_first || stages.end[stage] > below;
    if (stage == EGI_CHECKPOINT_MOVED && is_taken) EG_TRY(is_moving_better(s, &stages, &is_taken));
    if (stage == EGI_CHECKPOINT_OFFLOAD && !is_first) is_taken = is_taken && s->host_budget > 0; /* nowhere to go */
    if (!is_taken) continue;
    EG_TRY(search_stage(s, below, stages.end[stage], is_first, out_rung, out_is_done));
  }
  return EG_OK;
}

/* ---- tiles ------------------------------------------------------------------------------------------------------ */

/* graphs[0] becomes the training graph with wide layers in tiles, made of the graph for evaluation, which is not
 * differentiated. */
static eg_status tile_graph(egi_module *module, uint32_t tiles) {
  egi_graph *graph = NULL;
  EG_TRY(egi_module_copy_graph(module, egi_module_find_graph(module, EGI_GRAPH_EVALUATE), "train", &graph));
  EG_TRY(egi_differentiate(graph, tiles));
  module->graphs[module->n_graphs - 1] = module->graphs[0];
  module->graphs[0] = graph;
  return EG_OK;
}

static eg_status try_tiles(search *s, uint32_t *out_rung, bool *out_is_done) {
  egi_module *module = NULL;
  EG_TRY(egi_module_clone(s->trainer->machine.module, &module));
  eg_status status = tile_graph(module, s->tiles);
  s->base = module;
  if (status == EG_OK) status = choose_rung(s, out_rung, out_is_done);
  s->base = s->trainer->machine.module;
  egi_module_destroy(module);
  return status;
}

/* As many as leave each a number of rows that products are efficient with. */
static uint32_t most_tiles(const search *s) {
  uint32_t most = MAX_TILES;
  for (size_t i = 0; i < s->batches->n_buckets; i++) {
    uint32_t tiles = s->batches->buckets[i].sequence / MIN_TILE_ROWS;
    if (tiles < most) most = tiles;
  }
  return s->trainer->options.checkpoint == EG_CHECKPOINT_OFF ? 1 : most;
}

static eg_status choose(search *s, uint32_t *out_tiles, uint32_t *out_rung) {
  bool is_done = false;
  for (uint32_t most = most_tiles(s); s->tiles <= most || s->tiles == 1; s->tiles *= 2) {
    EG_TRY(s->tiles == 1 ? choose_rung(s, out_rung, &is_done) : try_tiles(s, out_rung, &is_done));
    *out_tiles = s->tiles;
    if (is_done) return EG_OK;
  }
  *out_tiles = s->least_tiles; /* the check of the budget says how much that is */
  *out_rung = s->least_rung;
  return EG_OK;
}

/* A device whose memory is the host's gains nothing by moving tensors there, unless it is asked to. */
static uint64_t host_budget(const eg_trainer *trainer, uint64_t available) {
  const eg_trainer_options *o = &trainer->options;
  if (o->host_budget != 0 && o->host_budget != UINT64_MAX) { /* what moments leave of it */
    egi_trainer_memory all;
    const egi_lanes none = {.count = 0};
    egi_trainer_bytes(trainer, &none, &all);
    return all.pinned_states < o->host_budget ? o->host_budget - all.pinned_states : 0;
  }
  if (o->host_budget != 0) return o->host_budget;
  bool is_apart = o->checkpoint == EG_CHECKPOINT_OFFLOAD || egi_device_is_apart(trainer->ctx, trainer->machine.backend);
  return is_apart ? available : 0;
}

static eg_status find_sizes(search *s, egi_arena *arena) {
  const egi_graph *graph = s->base->graphs[0];
  const egi_bucket *largest = &s->batches->buckets[0];
  egi_inputs inputs;
  for (size_t i = 1; i < s->batches->n_buckets; i++) {
    const egi_bucket *bucket = &s->batches->buckets[i];
    if ((uint64_t)bucket->batch * bucket->sequence > (uint64_t)largest->batch * largest->sequence) largest = bucket;
  }
  EG_TRY(egi_inputs_find(graph, arena, &inputs));
  EG_TRY(egi_binder_begin(&s->sizes, graph, arena));
  return egi_binder_finish(&s->sizes, &inputs, largest);
}

eg_status egi_trainer_checkpoint(eg_trainer *trainer, const egi_batches *batches) {
  egi_machine *machine = &trainer->machine;
  search s = {.trainer = trainer, .batches = batches, .base = machine->module, .tiles = 1, .least = UINT64_MAX};
  uint64_t available = egi_memory_available();
  s.least_tiles = 1;
  s.budget = trainer->options.memory_budget != 0
                 ? trainer->options.memory_budget
                 : egi_device_available(trainer->ctx, machine->backend, &trainer->device);
  s.host_budget = host_budget(trainer, available);
  EG_TRY(find_sizes(&s, &trainer->arena));
  if (!trainer->is_decided) EG_TRY(choose(&s, &trainer->tiles, &trainer->rung));
  if (trainer->tiles > 1) EG_TRY(tile_graph(machine->module, trainer->tiles));
  machine->graph = machine->module->graphs[0];
  return apply(&s, machine->graph, trainer->rung);
}
