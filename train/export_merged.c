/* The model with the adapter added to its weights, as one ONNX file. Where only bytes of weights differ it is the
 * file's own graph, read again; where weights are shared between modules, quantised, or of a 16-bit type that is to
 * become another, it is the recognised one, whose functions any runtime has. */
#include "graph/linear.h"
#include "train/train.h"

#include <string.h>

/* ---- what there is ---- */

static bool is_half(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

static bool is_matrix(const egi_operand *operand) {
  return operand->role == EGI_ROLE_MATRIX || operand->role == EGI_ROLE_TABLE || operand->role == EGI_ROLE_EXPERTS;
}

/* ---- in place ---- */

/* Whether the weight is one of the file's graph, and only nodes of one module (called once or more) take it. */
static bool is_sole_use(const egi_merge *merge, size_t index, const uint32_t *n_operands, const uint32_t *n_linears) {
  const egi_linear *linear = &merge->linears[index];
  uint32_t weight = merge->graph->values[linear->weight].index;
  bool is_own = weight < merge->own->weight_values_capacity && merge->own->weight_values[weight] != 0;
  return is_own && !linear->is_quantised && n_operands[weight] == n_linears[weight];
}

static eg_status check_in_place(egi_merge *merge, bool *out_is_in_place) {
  uint32_t n = merge->module->n_weights;
  uint32_t *n_operands = EGI_NEW(&merge->arena, uint32_t, n), *n_linears = EGI_NEW(&merge->arena, uint32_t, n);
  const char **paths = EGI_NEW(&merge->arena, const char *, n);
  if (n_operands == NULL || n_linears == NULL || paths == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < merge->n_operands; i++) n_operands[merge->graph->values[merge->operands[i].weight].index]++;
  for (size_t i = 0; i < merge->n_linears; i++) {
    uint32_t weight = merge->graph->values[merge->linears[i].weight].index;
    if (merge->first_rows[i] > 0) continue;
    if (paths[weight] == NULL) paths[weight] = merge->linears[i].path;
    n_linears[weight] += strcmp(paths[weight], merge->linears[i].path) == 0;
  }
  const eg_export_options *o = merge->export_->options;
  *out_is_in_place = !merge->is_widened && o->base == EG_QUANT_NONE && o->stored == EG_QUANT_NONE &&
                     merge->export_->adapters.config.parameters == NULL &&
                     merge->export_->adapters.config.modules == NULL;
  for (size_t i = 0; i < merge->n_linears && *out_is_in_place; i++)
    if (merge->adapter_of[i] != UINT32_MAX) *out_is_in_place = is_sole_use(merge, i, n_operands, n_linears);
  return EG_OK;
}

/* ---- replacing ---- */

static eg_status make_weight(egi_merge *merge, const egi_merged *merged, eg_dtype dtype, const char *name,
                             egi_weight *out_weight) {
  egi_weight weight = {.name = name, .dtype = dtype, .rank = 2, .dims = {merged->rows, merged->columns}};
  weight.bytes.kind = EGI_BYTES_MEMORY;
  EG_TRY(egi_convert_floats(&merge->module->arena, merged->values, (uint64_t)(merged->rows * merged->columns), dtype,
                            &weight.bytes.data, &weight.bytes.size_bytes));
  *out_weight = weight;
  return EG_OK;
}

/* The node takes the new matrix: a quantised Linear becomes a plain one. */
static eg_status put_quantised(egi_merge *merge, egi_node_id id, egi_value_id matrix, bool is_out_first) {
  egi_graph *graph = merge->graph;
  egi_emitter emit = {.graph = graph, .scope = graph->nodes[id].scope};
  if (!is_out_first) matrix = egi_emit_unary(&emit, EGI_OP_Transpose, matrix);
  EG_TRY(emit.status);
  egi_node *node = &graph->nodes[id];
  const egi_attribute *parts = egi_node_attribute(node, EGI_PARTS);
  egi_attribute kept[2] = {egi_attribute_string("storage", "plain")};
  if (parts != NULL) kept[1] = *parts;
  node->n_attributes = 0;
  node->n_inputs = node->n_inputs > EGI_LINEAR_BIAS ? EGI_LINEAR_BIAS + 1 : EGI_LINEAR_WEIGHT + 1;
  node->inputs[EGI_LINEAR_WEIGHT] = matrix;
  if (node->inputs[node->n_inputs - 1] == 0) node->n_inputs--;
  for (unsigned i = 0; i < (parts != NULL ? 2u : 1u); i++) EG_TRY(egi_node_set_attribute(graph, id, &kept[i]));
  return EG_OK;
}

/* The value of a module's new weight; `values` has it by the index of the module's first linear. */
static eg_status make_value(egi_merge *merge, size_t index, const egi_merged *merged, egi_value_id *out_value) {
  const egi_linear *linear = &merge->linears[index];
  eg_dtype dtype = merge->is_widened ? EG_DTYPE_F32 : egi_merge_input_dtype(merge, index);
  egi_weight weight;
  uint32_t added;
  const char *name = egi_arena_format(&merge->module->arena, "%s.weight", merge->graph->nodes[linear->node].scope);
  if (name == NULL) return EG_ERROR_MEMORY;
  EG_TRY(make_weight(merge, merged, dtype, name, &weight));
  EG_TRY(egi_module_add_weight(merge->module, &weight, &added));
  return egi_graph_add_weight(merge->graph, added, out_value);
}

static eg_status put_value(egi_merge *merge, size_t index, egi_value_id value, bool is_out_first) {
  const egi_linear *linear = &merge->linears[index];
  uint32_t operand = merge->operand_of[linear->node];
  if (operand == 0) return egi_fail_node(merge->graph, linear->node, EG_ERROR_INTERNAL, "it has no weight");
  if (linear->is_quantised) return put_quantised(merge, linear->node, value, is_out_first);
  const egi_parameter_use use = {.node = linear->node, .input = merge->operands[operand - 1].input};
  const egi_parameter parameter = {.uses = &use, .n_uses = 1};
  return egi_replace_parameter(merge->graph, &parameter, value);
}

static bool has_adapter(const egi_merge *merge, size_t first) {
  for (size_t i = first; i < merge->n_linears && merge->linears[i].node == merge->linears[first].node; i++)
    if (merge->adapter_of[i] != UINT32_MAX) return true;
  return false;
}

/* Of a base that was quantised in training every layer leaves as what its codes stand for. */
static bool is_changed(const egi_merge *merge, size_t first) {
  bool is_dequantised = merge->export_->options->base != EG_QUANT_NONE && merge->linears[first].is_quantised;
  return is_dequantised || has_adapter(merge, first);
}

typedef struct placed {
  egi_value_id value;
  bool is_out_first;
} placed;

/* One node: a module that is called again takes the weight that the first call got. */
static eg_status merge_node(egi_merge *merge, size_t index, bool is_in_place, egi_map *first_calls, placed *places) {
  const egi_linear *linear = &merge->linears[index];
  uint32_t first = (uint32_t)index, weight = merge->graph->values[linear->weight].index;
  bool is_again = egi_map_get(first_calls, linear->path, &first);
  if (is_again && is_in_place) return EG_OK;
  if (is_again) return put_value(merge, index, places[first].value, places[first].is_out_first);
  EG_TRY(egi_map_put(first_calls, linear->path, first));
  egi_arena arena;
  egi_merged merged;
  egi_arena_init(&arena, merge->module->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_merge_weight(merge, index, &arena, &merged);
  if (status == EG_OK && is_in_place) {
    egi_weight *row = &merge->module->weights[weight], changed;
    status = make_weight(merge, &merged, row->dtype, row->name, &changed);
    if (status == EG_OK) row->bytes = changed.bytes;
  } else if (status == EG_OK) {
    places[index].is_out_first = merged.is_out_first;
    status = make_value(merge, index, &merged, &places[index].value);
    if (status == EG_OK) status = put_value(merge, index, places[index].value, merged.is_out_first);
  }
  egi_arena_clear(&arena);
  return status;
}

static eg_status merge_all(egi_merge *merge, bool is_in_place) {
  static const char *const clean[] = {"eliminate_dead"};
  static const egi_pipeline_options options;
  placed *places = EGI_NEW(&merge->arena, placed, merge->n_linears);
  egi_map first_calls;
  egi_map_init(&first_calls, &merge->arena);
  if (places == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < merge->n_linears; i++)
    if (merge->first_rows[i] == 0 && is_changed(merge, i))
      EG_TRY(merge_node(merge, i, is_in_place, &first_calls, places));
  if (is_in_place) return EG_OK;
  if (merge->export_->adapters.config.parameters != NULL) EG_TRY(egi_merge_experts(merge));
  EG_TRY(egi_merge_modules(merge));
  EG_TRY(egi_passes_run(merge->graph, clean, 1, &options, NULL));
  return egi_find_operands(merge->graph, &merge->arena, &merge->operands, &merge->n_operands);
}

/* ---- types ---- */

/* The weight in the wanted type under its old name; 16 bits are widened again where they are used. */
static eg_status store_weight(egi_merge *merge, const egi_export_target *target, uint32_t index, egi_value_id old,
                              egi_value_id *out_value) {
  egi_module *module = target->module;
  egi_weight weight = module->weights[target->graph->values[old].index];
  egi_emitter emit = {.graph = target->graph};
  float *values;
  uint32_t added;
  uint64_t count = 1;
  egi_arena arena;
  for (int i = 0; i < weight.rank; i++) count *= (uint64_t)weight.dims[i];
  egi_arena_init(&arena, module->ctx, EGI_PURPOSE_DATA);
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY};
  eg_status status = egi_merge_read(merge, index, &arena, &values);
  weight.dtype = merge->dtype;
  if (status == EG_OK)
    status =
        egi_convert_floats(&module->arena, values, count, weight.dtype, &weight.bytes.data, &weight.bytes.size_bytes);
  egi_arena_clear(&arena);
  EG_TRY(status);
  const char *spare = egi_arena_format(&module->arena, "%s.before", weight.name);
  if (spare == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_graph_rename_value(target->graph, old, spare));
  EG_TRY(egi_module_add_weight(module, &weight, &added));
  EG_TRY(egi_graph_add_weight(target->graph, added, out_value));
  if (is_half(weight.dtype)) *out_value = egi_emit_cast(&emit, *out_value, EG_DTYPE_F32);
  return emit.status;
}

/* Value of the operand's weight in the graph that is written; 0: it is not there, or has the wanted type. A router's
 * stays: rounded, it would send tokens to other experts. */
static egi_value_id value_to_store(const egi_merge *merge, const egi_export_target *target, const egi_operand *operand,
                                   uint32_t *out_index) {
  const egi_graph *graph = target->graph;
  uint32_t index = merge->graph->values[operand->weight].index;
  eg_dtype dtype = merge->module->weights[index].dtype;
  bool is_wrong = dtype != merge->dtype && (dtype == EG_DTYPE_F32 || is_half(dtype));
  if (merge->dtype != EG_DTYPE_F32 && index < merge->n_weights && merge->is_router[index]) return 0;
  *out_index = index;
  if (target->module != merge->module) index = index < target->n_weights ? target->weights[index] : 0;
  return is_matrix(operand) && is_wrong && index < graph->weight_values_capacity ? graph->weight_values[index] : 0;
}

static eg_status store_weights(egi_merge *merge, const egi_export_target *target) {
  static const char *const clean[] = {"eliminate_identity", "eliminate_dead"};
  static const egi_pipeline_options options;
  egi_graph *graph = target->graph;
  uint32_t n_values = graph->n_values, index;
  egi_value_id *map = EGI_NEW(&merge->arena, egi_value_id, n_values + 2 * (uint32_t)merge->n_operands);
  if (map == NULL) return EG_ERROR_MEMORY;
  egi_store_destroy(merge->store); /* what it holds of weights that were changed in place is old */
  merge->store = NULL;
  EG_TRY(egi_store_create(merge->module->ctx, merge->module, egi_backend_cpu(), &merge->store));
  for (size_t i = 0; i < merge->n_operands; i++) {
    egi_value_id old = value_to_store(merge, target, &merge->operands[i], &index);
    if (old == 0 || old >= n_values || map[old] != 0) continue;
    EG_TRY(store_weight(merge, target, index, old, &map[old]));
  }
  egi_graph_replace_many(graph, map);
  if (graph != merge->graph) return EG_OK;
  return egi_passes_run(graph, clean, EGI_COUNT(clean), &options, NULL);
}

/* Random and filled weights of a model made by `engraft new` become numbers that other programs read. */
static eg_status spell_out(egi_merge *merge, const egi_graph *graph) {
  for (egi_value_id id = 1; id < graph->n_values; id++) {
    if (graph->values[id].kind != EGI_VALUE_WEIGHT) continue;
    egi_weight *weight = &merge->module->weights[graph->values[id].index];
    uint64_t count = 1, size_bytes;
    void *data;
    if (weight->bytes.kind == EGI_BYTES_MEMORY) continue;
    EG_TRY(egi_store_load(merge->store, graph->values[id].index, &data));
    for (int i = 0; i < weight->rank; i++) count *= (uint64_t)weight->dims[i];
    if (!egi_dtype_bytes(weight->dtype, count, &size_bytes)) return EG_ERROR_MEMORY;
    weight->bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = data, .size_bytes = size_bytes};
  }
  return EG_OK;
}

/* The file's own graph with the bytes that were changed in place. */
static bool takes_changes(const egi_merge *merge) {
  if (merge->raw.module == NULL) return false;
  for (size_t i = 0; i < merge->n_linears; i++) {
    uint32_t index = merge->graph->values[merge->linears[i].weight].index;
    if (merge->adapter_of[i] != UINT32_MAX && (index >= merge->raw.n_weights || merge->raw.weights[index] == 0))
      return false;
  }
  return true;
}

static void take_changes(egi_merge *merge) {
  for (size_t i = 0; i < merge->n_linears; i++) {
    uint32_t index = merge->graph->values[merge->linears[i].weight].index;
    if (merge->adapter_of[i] != UINT32_MAX)
      merge->raw.module->weights[merge->raw.weights[index]].bytes = merge->module->weights[index].bytes;
  }
}

/* Of matrices that are stored as they were trained: in the recognised graph. */
static eg_status write_codes(egi_merge *merge, const char *path) {
  uint32_t count;
  EG_TRY(egi_merge_open(merge, true));
  EG_TRY(egi_merge_codes(merge));
  EG_TRY(spell_out(merge, merge->graph));
  EG_TRY(egi_graph_tidy(merge->graph));
  EG_TRY(egi_graph_call_bodies(merge->graph, EGI_BODIES_OWN, &count));
  return egi_module_export(merge->module, merge->graph, path);
}

static eg_status write_merged(egi_merge *merge, const char *path) {
  bool is_in_place;
  uint32_t count;
  EG_TRY(egi_merge_open(merge, true));
  EG_TRY(check_in_place(merge, &is_in_place));
  egi_export_target target = {.module = merge->module, .graph = is_in_place ? merge->own : merge->graph};
  EG_TRY(merge_all(merge, is_in_place));
  if (is_in_place) EG_TRY(egi_export_reopen(merge->export_, merge->module, &merge->arena, &merge->raw));
  if (is_in_place && takes_changes(merge)) {
    take_changes(merge);
    target = merge->raw;
  }
  egi_quantise_options quantise;
  EG_TRY(egi_quantise_options_make(merge->module->ctx, merge->export_->options->stored, 64, 0, &quantise));
  quantise.has_head = merge->export_->options->quant_head != 0;
  if (quantise.is_wanted)
    EG_TRY(egi_export_four_bit(target.graph, &quantise));
  else
    EG_TRY(store_weights(merge, &target));
  if (target.module == merge->module) EG_TRY(spell_out(merge, target.graph));
  EG_TRY(egi_graph_tidy(target.graph)); /* weights that nothing takes any more go */
  if (target.module == merge->module) EG_TRY(egi_graph_call_bodies(target.graph, true, &count)); /* for any runtime */
  return egi_module_export(target.module, target.graph, path);
}

eg_status egi_export_merged(egi_export *export_, const char *path) {
  egi_merge merge = {.export_ = export_, .dtype = export_->options->dtype};
  if (merge.dtype == EG_DTYPE_UNDEFINED) merge.dtype = EG_DTYPE_F32;
  EG_TRY(egi_export_path(export_, path, ".onnx", "model.onnx", &path));
  EG_TRY(egi_export_check(export_, path));
  bool is_coded = export_->adapters.config.qat.weights != NULL;
  eg_status status = is_coded ? write_codes(&merge, path) : write_merged(&merge, path);
  egi_merge_close(&merge);
  return status;
}
