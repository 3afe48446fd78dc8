/* What a plan was made for: the settings that shapes and decisions follow from, hashes of the graphs, and the hash of
 * it all. One text serves for writing, comparing and hashing, so that none of them can forget a setting. */
#include "train/train.h"

#include <inttypes.h>
#include <string.h>

static void add_flag(egi_text *out, const char *name, bool value) {
  egi_text_format(out, ", \"%s\": %s", name, value ? "true" : "false");
}

static void add_text(egi_text *out, const char *name, const char *value) {
  egi_text_format(out, ", \"%s\": ", name);
  egi_text_json(out, value != NULL ? value : "");
}

void egi_trainer_plan_options(const eg_trainer *trainer, egi_text *out) {
  static const char *const quants[] = {"none", "nf4", "fp4"};
  static const char *const caches[] = {"on", "rebuild", "readback"};
  static const char *const checkpoints[] = {"auto", "off", "recompute", "offload"};
  static const char *const losses[] = {"auto",        "sft",        "token",   "classification",
                                       "multi-label", "regression", "ranking", "cosine"};
  const eg_trainer_options *o = &trainer->options;
  size_t checkpoint = (size_t)o->checkpoint < EGI_COUNT(checkpoints) ? (size_t)o->checkpoint : 0;
  egi_text_format(out, "{\"packed\": %s", trainer->lanes.inputs.is_packed ? "true" : "false");
  add_text(out, "device", o->device);
  egi_text_format(out, ", \"dtype\": \"%s\", \"tokens\": %" PRIu32 ", \"loss\": \"%s\"", egi_dtype_name(o->dtype),
                  o->tokens, losses[trainer->objective.loss]);
  add_flag(out, "full", o->full != 0);
  add_flag(out, "no_fuse", o->no_fuse != 0);
  egi_text_format(out, ", \"quant\": \"%s\"", quants[o->quant]);
  if (o->quant != EG_QUANT_NONE) {
    egi_text_format(out, ", \"quant_block\": %" PRIu32, o->quant_block);
    add_flag(out, "double_quant", o->double_quant != 0);
    add_flag(out, "quant_head", o->quant_head != 0);
  }
  const egi_qat_record *qat = &trainer->adapters.config.qat;
  if (qat->weights != NULL) {
    egi_text_format(out, ", \"qat\": \"%s\", \"qat_block\": %" PRId64, qat->weights, qat->block);
    add_flag(out, "qat_symmetric", qat->is_symmetric);
  }
  egi_text_format(out, ", \"optimizer\": \"%s\"", o->optimizer == EG_OPTIMIZER_ADAMW_8BIT ? "adamw8bit" : "adamw");
  add_flag(out, "offload_optimizer", o->offload_optimizer != 0);
  egi_text_format(out, ", \"moe_dispatch\": \"%s\"", o->moe_dispatch == EG_MOE_LOOP ? "loop" : "fused");
  add_flag(out, "single_buffer", o->single_buffer != 0);
  egi_text_format(out, ", \"packing_cache\": \"%s\", \"checkpoint\": \"%s\"", caches[o->packing_cache],
                  checkpoints[checkpoint]);
  if (!o->full && o->init_adapter == NULL) {
    egi_text_format(out, ", \"rank\": %" PRIu32 ", \"alpha\": %.17g", o->rank, o->alpha);
    add_flag(out, "rslora", o->rslora != 0);
    add_text(out, "targets", o->targets);
    add_text(out, "target_parameters", o->target_parameters);
    add_text(out, "modules_to_save", o->modules_to_save);
    add_flag(out, "has_first_factors", o->init >= EG_LORA_INIT_PISSA);
    add_text(out, "exclude", o->exclude);
    add_text(out, "rank_pattern", o->rank_pattern);
    add_text(out, "alpha_pattern", o->alpha_pattern);
  }
  if (trainer->adapters.config.dropout > 0.0) /* whose places in the graph are keyed by the seed */
    egi_text_format(out, ", \"dropout\": %.17g, \"seed\": %" PRIu64, trainer->adapters.config.dropout, o->seed);
  egi_text_format(out, ", \"parameters\": %" PRIu64 "}", trainer->machine.module->pool_elements[EGI_POOL_PARAMETERS]);
}

static eg_status hash_graph(const egi_module *module, const egi_graph *graph, uint64_t *out_hash) {
  egi_text text;
  egi_text_init(&text, module->ctx);
  eg_status status = egi_module_print(module, graph, 1, &text);
  if (status == EG_OK) *out_hash = egi_hash(text.data, text.length, 0);
  egi_text_free(&text);
  return status;
}

eg_status egi_trainer_hash_graphs(eg_trainer *trainer) {
  const egi_module *module = trainer->model->module;
  EG_TRY(hash_graph(module, module->graphs[0], &trainer->model_hash));
  return hash_graph(trainer->machine.module, trainer->machine.graph, &trainer->graph_hash);
}

eg_status egi_trainer_plan_hash(const eg_trainer *trainer, const egi_batches *shapes, uint64_t *out_hash) {
  egi_text text;
  egi_text_init(&text, trainer->ctx);
  egi_text_format(&text, "%016" PRIx64 " %016" PRIx64 " %" PRIu32 " %" PRIu32 " ", trainer->model_hash,
                  trainer->graph_hash, trainer->tiles, trainer->rung);
  size_t n_shapes = shapes != NULL ? shapes->n_buckets : trainer->lanes.count;
  for (size_t i = 0; i < n_shapes; i++) {
    const egi_bucket *bucket = shapes != NULL ? &shapes->buckets[i] : &trainer->lanes.lanes[i].bucket;
    egi_text_format(&text, "%" PRIu32 "x%" PRIu32 " ", bucket->batch, bucket->sequence);
  }
  egi_trainer_plan_options(trainer, &text);
  eg_status status = egi_text_status(&text);
  if (status == EG_OK) *out_hash = egi_hash(text.data, text.length, 0);
  egi_text_free(&text);
  return status;
}
