/* Memory for time: which rung of buffer_checkpoints' ladder a trainer takes. Each candidate is the graph as it would
 * be, in a clone of the module, planned for all shapes: the bytes are those that will be allocated. Stages of the
 * ladder are tried at their ends first, then the first rung that fits is looked for inside the stage, so that what is
 * said to be the least would do. */
#include <inttypes.h>
#include <string.h>

#include "train/train.h"

static uint64_t maximum(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

void egi_trainer_bytes(const eg_trainer *trainer, const egi_lanes *lanes, egi_trainer_memory *out_memory) {
  egi_trainer_memory all = {0};
  egi_plan_bytes one;
  for (size_t i = 0; i <= lanes->count; i++) {
    egi_plan_get_bytes(i < lanes->count ? lanes->lanes[i].plan : trainer->optimizer_plan, &one);
    all.weights = maximum(all.weights, one.weights);
    all.transient = maximum(all.transient, one.transient);
    all.saved = maximum(all.saved, one.saved);
    all.fixed += one.fixed;
  }
  for (int pool = 0; pool < EGI_POOL_COUNT; pool++) {
    uint64_t element_bytes = pool == EGI_POOL_STEP ? 1 : sizeof(float);
    all.states += trainer->machine.module->pool_elements[pool] * element_bytes;
  }
  all.total = all.weights + all.states + all.transient + all.fixed;
  *out_memory = all;
}

/* ---- candidates ------------------------------------------------------------------------------------------------- */

/* What the search has at hand. */
typedef struct search {
  eg_trainer *trainer;
  const egi_batches *batches;
  uint64_t budget, least;
  uint32_t least_rung; /* needs `least` */
} search;

static eg_status apply(const eg_trainer *trainer, egi_graph *graph, uint32_t rung) {
  static const char *const names[] = {"buffer_checkpoints"};
  const egi_checkpoint_options checkpoints = {.rung = rung};
  const egi_pipeline_options options = {.checkpoints = &checkpoints};
  eg_packing_cache cache = trainer->options.packing_cache;
  EG_TRY(egi_passes_run(graph, names, 1, &options, NULL));
  /* For comparison: what is made once is made for every layer and pass. */
  if (cache == EG_PACKING_CACHE_ON) return EG_OK;
  return egi_rebuild_metadata(graph, cache == EG_PACKING_CACHE_READBACK);
}

static eg_status plan_candidate(const search *s, const egi_module *module, uint32_t rung, egi_arena *arena,
                                uint64_t *out_total) {
  egi_lanes lanes = {.count = 0};
  egi_trainer_memory memory;
  EG_TRY(apply(s->trainer, module->graphs[0], rung));
  eg_status status = egi_lanes_plan(&lanes, module->graphs[0], s->trainer->machine.backend, s->batches->buckets,
                                    s->batches->n_buckets, arena);
  if (status == EG_OK) egi_trainer_bytes(s->trainer, &lanes, &memory);
  if (status == EG_OK) *out_total = memory.total;
  egi_lanes_close(&lanes);
  return status;
}

static eg_status try_rung(search *s, uint32_t rung, bool *out_fits) {
  egi_module *module = NULL;
  egi_arena arena;
  uint64_t total = 0;
  egi_arena_init(&arena, s->trainer->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = egi_module_clone(s->trainer->machine.module, &module);
  if (status == EG_OK) status = plan_candidate(s, module, rung, &arena, &total);
  egi_module_destroy(module);
  egi_arena_clear(&arena);
  EG_TRY(status);
  egi_log(s->trainer->ctx, EG_LOG_DEBUG, "checkpoints: rung %" PRIu32 " needs %" PRIu64 " bytes", rung, total);
  *out_fits = total <= s->budget;
  if (total >= s->least) return EG_OK;
  s->least = total;
  s->least_rung = rung;
  return EG_OK;
}

/* ---- the search ------------------------------------------------------------------------------------------------- */

/* The first rung of (below, fits] that fits, where more rungs need less. */
static eg_status bisect(search *s, uint32_t below, uint32_t fits, uint32_t *out_rung) {
  while (fits - below > 1) {
    uint32_t middle = below + (fits - below) / 2;
    bool is_enough = false;
    EG_TRY(try_rung(s, middle, &is_enough));
    if (is_enough)
      fits = middle;
    else
      below = middle;
  }
  *out_rung = fits;
  return EG_OK;
}

static eg_status choose(search *s, const egi_checkpoint_stages *stages, uint32_t *out_rung) {
  eg_checkpoint mode = s->trainer->options.checkpoint;
  uint32_t first = mode == EG_CHECKPOINT_RECOMPUTE ? EGI_CHECKPOINT_WHOLE : EGI_CHECKPOINT_NOTHING;
  uint32_t last = mode == EG_CHECKPOINT_OFF ? EGI_CHECKPOINT_NOTHING : EGI_CHECKPOINT_STAGES - 1;
  *out_rung = stages->end[first];
  if (s->budget == UINT64_MAX || first == last) return EG_OK;
  for (uint32_t stage = first; stage <= last; stage++) {
    bool is_enough = false;
    if (stage > first && stages->end[stage] == stages->end[stage - 1]) continue;
    EG_TRY(try_rung(s, stages->end[stage], &is_enough));
    if (!is_enough) continue;
    return stage == first ? EG_OK : bisect(s, stages->end[stage - 1], stages->end[stage], out_rung);
  }
  *out_rung = s->least_rung;
  return EG_OK;
}

eg_status egi_trainer_checkpoint(eg_trainer *trainer, const egi_batches *batches) {
  uint64_t budget = trainer->options.memory_budget;
  search s = {.trainer = trainer, .batches = batches, .least = UINT64_MAX};
  egi_checkpoint_stages stages;
  s.budget = budget != 0 ? budget : egi_memory_available();
  EG_TRY(egi_checkpoint_stages_find(trainer->machine.graph, &stages));
  EG_TRY(choose(&s, &stages, &trainer->rung));
  return apply(trainer, trainer->machine.graph, trainer->rung);
}
