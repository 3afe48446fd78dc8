/* The graph that an export changes and writes: the file's as it was read, operators of other domains, functions and
 * all, where every weight that matters is one of the file's. */
#include "train/train.h"

#include <string.h>

/* ---- what is recognised ---- */

static bool is_half(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

/* Adapters by linear, and where a part's rows begin in its fused weight. */
static eg_status match_linears(egi_merge *merge) {
  merge->n_weights = merge->module->n_weights;
  merge->is_router = EGI_NEW(&merge->arena, bool, merge->n_weights);
  if (merge->is_router == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < merge->n_linears; i++)
    if (merge->linears[i].is_router) merge->is_router[merge->graph->values[merge->linears[i].weight].index] = true;
  const egi_adapters *adapters = &merge->export_->adapters;
  egi_map targets;
  egi_map_init(&targets, &merge->arena);
  merge->first_rows = EGI_NEW(&merge->arena, int64_t, merge->n_linears + 1);
  merge->adapter_of = EGI_NEW(&merge->arena, uint32_t, merge->n_linears + 1);
  if (merge->first_rows == NULL || merge->adapter_of == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < adapters->count; i++) EG_TRY(egi_map_put(&targets, adapters->targets[i].path, (uint32_t)i));
  for (size_t i = 0; i < merge->n_linears; i++) {
    const egi_linear *linear = &merge->linears[i];
    if (!egi_map_get(&targets, linear->path, &merge->adapter_of[i])) merge->adapter_of[i] = UINT32_MAX;
    bool is_next = i > 0 && merge->linears[i - 1].node == linear->node;
    merge->first_rows[i] = is_next ? merge->first_rows[i - 1] + merge->linears[i - 1].out_features : 0;
  }
  return EG_OK;
}

static eg_status find_all(egi_merge *merge) {
  EG_TRY(egi_find_linears(merge->graph, &merge->arena, &merge->linears, &merge->n_linears));
  EG_TRY(egi_find_operands(merge->graph, &merge->arena, &merge->operands, &merge->n_operands));
  merge->operand_of = EGI_NEW(&merge->arena, uint32_t, merge->graph->n_nodes);
  if (merge->operand_of == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < merge->n_operands; i++) {
    egi_operand_role role = merge->operands[i].role;
    bool is_taken = role == EGI_ROLE_MATRIX || role == EGI_ROLE_QUANTISED;
    if (is_taken) merge->operand_of[merge->operands[i].node] = (uint32_t)i + 1;
  }
  return match_linears(merge);
}

eg_dtype egi_merge_input_dtype(const egi_merge *merge, size_t index) {
  return merge->graph->values[merge->graph->nodes[merge->linears[index].node].inputs[0]].dtype;
}

/* True when numbers of another type than the wanted one are computed with: then the graph is widened. */
static bool needs_widening(const egi_merge *merge) {
  for (size_t i = 0; i < merge->n_operands; i++) {
    eg_dtype dtype = merge->module->weights[merge->graph->values[merge->operands[i].weight].index].dtype;
    if (is_half(dtype) && dtype != merge->dtype) return true;
  }
  for (size_t i = 0; i < merge->n_linears; i++) {
    eg_dtype dtype = egi_merge_input_dtype(merge, i);
    if (is_half(dtype) && dtype != merge->dtype) return true;
  }
  return false;
}

eg_status egi_merge_open(egi_merge *merge, bool may_widen) {
  static const char *const widen[] = {"widen_floats", "eliminate_common", "eliminate_dead"};
  static const char *const quantise[] = {"quantize_base", "eliminate_dead"};
  static const egi_pipeline_options options = {.is_general = true};
  egi_arena_init(&merge->arena, merge->export_->ctx, EGI_PURPOSE_DATA);
  EG_TRY(egi_module_clone(merge->export_->model->module, &merge->module));
  merge->own = merge->module->graphs[0];
  EG_TRY(egi_module_copy_graph(merge->module, merge->own, "merged", &merge->graph));
  EG_TRY(egi_passes_run_stage(merge->graph, EGI_STAGE_CANONICALISE, &options));
  EG_TRY(egi_passes_run_stage(merge->graph, EGI_STAGE_RECOGNISE, &options));
  EG_TRY(find_all(merge));
  merge->is_widened = may_widen && needs_widening(merge);
  if (merge->is_widened) {
    EG_TRY(egi_passes_run(merge->graph, widen, EGI_COUNT(widen), &options, NULL));
    EG_TRY(find_all(merge));
  }
  const eg_export_options *o = merge->export_->options;
  if (may_widen && o->base != EG_QUANT_NONE) {
    egi_adapt_options adapt = {.n_adapters = 0};
    EG_TRY(egi_quantise_options_make(merge->module->ctx, o->base, o->quant_block, o->double_quant, &adapt.quantise));
    adapt.quantise.has_head = o->quant_head != 0;
    EG_TRY(egi_run_passes(merge->graph, quantise, EGI_COUNT(quantise), &adapt));
    EG_TRY(find_all(merge));
  }
  return egi_store_create(merge->module->ctx, merge->module, egi_backend_cpu(), &merge->store);
}

void egi_merge_close(egi_merge *merge) {
  egi_store_destroy(merge->store);
  egi_module_destroy(merge->raw.module);
  egi_module_destroy(merge->module);
  egi_arena_clear(&merge->arena);
}

/* ---- the file ---- */

static bool is_same_tensor(const egi_weight *a, const egi_weight *b) {
  bool is_same = a->dtype == b->dtype && a->rank == b->rank;
  for (int i = 0; is_same && i < a->rank; i++) is_same = a->dims[i] == b->dims[i];
  return is_same;
}

/* By name, which is unique in a file; a name that stands twice (in bodies) is nobody's. */
static eg_status map_weights(const egi_module *from, const egi_module *to, egi_arena *arena, uint32_t *weights) {
  egi_map names;
  uint32_t index;
  egi_map_init(&names, arena);
  for (uint32_t i = 1; i < to->n_weights; i++) {
    bool is_taken = egi_map_get(&names, to->weights[i].name, NULL);
    EG_TRY(egi_map_put(&names, to->weights[i].name, is_taken ? 0 : i));
  }
  for (uint32_t i = 1; i < from->n_weights; i++) {
    if (!egi_map_get(&names, from->weights[i].name, &index) || index == 0) continue;
    if (is_same_tensor(&from->weights[i], &to->weights[index])) weights[i] = index;
  }
  return EG_OK;
}

eg_status egi_export_reopen(const egi_export *export_, const egi_module *module, egi_arena *arena,
                            egi_export_target *out_target) {
  egi_export_target target = {.n_weights = module->n_weights};
  *out_target = target;
  target.weights = EGI_NEW(arena, uint32_t, module->n_weights);
  if (target.weights == NULL) return EG_ERROR_MEMORY;
  if (export_->model->report != NULL || module->file == NULL) return EG_OK; /* rewritten, or made in memory */
  EG_TRY(egi_module_import_again(module, &target.module));
  target.graph = target.module->graphs[0];
  *out_target = target;
  return map_weights(module, target.module, arena, target.weights);
}
