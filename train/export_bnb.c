/* The model as a folder that transformers reads with bitsandbytes: model.safetensors with the parameters under Hugging
 * Face's names, each matrix of a linear layer as the tensors of a Linear4bit, everything else in its own type; and
 * config.json, where there is one, with what was quantised. A layer that holds such codes already keeps them byte for
 * byte. Adapters are added before a matrix is quantised. */
#include <string.h>

#include <jansson.h>

#include "backend/quantise.h"
#include "base/blockwise.h"
#include "graph/linear.h"
#include "train/train.h"

typedef struct writer {
  egi_merge *merge;
  egi_arena *arena; /* of everything that is written */
  egi_quantise_options quantise;
  egi_safetensor *tensors;
  uint32_t count, capacity;
  egi_map done; /* names of weights that stand in the list */
  bool has_head;
} writer;

static eg_status add_tensor(writer *w, const egi_safetensor *tensor) {
  EG_TRY(EGI_GROW(w->arena, &w->tensors, w->count, &w->capacity));
  w->tensors[w->count++] = *tensor;
  return EG_OK;
}

/* ---- Linear4bit ------------------------------------------------------------------------------------------------- */

/* One module's matrix and what it is made of. */
typedef struct layer {
  const char *name;  /* "<path>.weight" */
  const char *dtype; /* "bfloat16" */
  int64_t rows, columns;
  unsigned type;
  int64_t block;
  const uint8_t *codes, *scales; /* scales: f32, or u8 where they are nested */
  const float *nested;           /* as egi_nested_decode() takes it; NULL: none */
} layer;

static const char *torch_name(eg_dtype dtype) {
  if (dtype == EG_DTYPE_BF16) return "bfloat16";
  return dtype == EG_DTYPE_F16 ? "float16" : "float32";
}

static eg_status add_layer(writer *w, const layer *l) {
  uint64_t count = (uint64_t)(l->rows * l->columns), n_blocks = (count + (uint64_t)l->block - 1) / (uint64_t)l->block;
  uint64_t n_above = (n_blocks + EGI_NESTED_BLOCK - 1) / EGI_NESTED_BLOCK;
  const uint8_t *nested = (const uint8_t *)l->nested;
  egi_bnb_state state = {.type = l->type,
                         .block = l->block,
                         .out_features = l->rows,
                         .in_features = l->columns,
                         .dtype = l->dtype,
                         .is_nested = nested != NULL};
  egi_safetensor tensors[EGI_BNB_TENSORS] = {{.name = NULL}};
  size_t n_tensors = 0;
  tensors[EGI_BNB_CODES] =
      (egi_safetensor){NULL, EG_DTYPE_U8, 2, {(int64_t)((count + 1) / 2), 1}, l->codes, (count + 1) / 2};
  tensors[EGI_BNB_ABSMAX] =
      (egi_safetensor){NULL,      nested != NULL ? EG_DTYPE_U8 : EG_DTYPE_F32,    1, {(int64_t)n_blocks},
                       l->scales, n_blocks * (nested != NULL ? 1 : sizeof(float))};
  tensors[EGI_BNB_MAP] = (egi_safetensor){
      NULL, EG_DTYPE_F32, 1, {16}, (const uint8_t *)egi_four_bit_levels((egi_four_bit)l->type), 16 * sizeof(float)};
  if (nested != NULL) {
    state.offset = (double)l->nested[0];
    tensors[EGI_BNB_NESTED_MAP] =
        (egi_safetensor){NULL, EG_DTYPE_F32, 1, {256}, nested + sizeof(float), 256 * sizeof(float)};
    tensors[EGI_BNB_NESTED] = (egi_safetensor){
        NULL, EG_DTYPE_F32, 1, {(int64_t)n_above}, nested + EGI_NESTED_HEADER * sizeof(float), n_above * sizeof(float)};
  }
  EG_TRY(egi_bnb_write(w->arena, l->name, &state, tensors, &n_tensors));
  for (size_t i = 0; i < n_tensors; i++) EG_TRY(add_tensor(w, &tensors[i]));
  return egi_map_put(&w->done, l->name, 1);
}

/* Rows of a float matrix [out, in] in codes. */
static eg_status quantise_rows(writer *w, layer *l, const float *values) {
  egi_quantisation q = {.matrix = {.name = l->name, .dtype = EG_DTYPE_F32, .rank = 2, .dims = {l->rows, l->columns}},
                        .n_matrices = 1,
                        .rows = l->rows,
                        .columns = l->columns,
                        .type = w->quantise.type,
                        .block = w->quantise.block,
                        .is_nested = w->quantise.is_nested};
  egi_quantised_memory memory = {{NULL}};
  q.matrix.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY,
                               .data = (const uint8_t *)values,
                               .size_bytes = (uint64_t)(l->rows * l->columns) * sizeof *values};
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    uint64_t size_bytes = egi_quantised_bytes(&q, (egi_quantised_tensor)part);
    if (size_bytes == 0) continue;
    memory.parts[part] = egi_arena_get(w->arena, (size_t)size_bytes, 1);
    if (memory.parts[part] == NULL) return EG_ERROR_MEMORY;
  }
  EG_TRY(egi_quantise(w->arena->ctx, &q, &memory));
  l->type = q.type;
  l->block = q.block;
  l->codes = memory.parts[EGI_QUANTISED_CODES];
  l->scales = memory.parts[EGI_QUANTISED_SCALES];
  l->nested = memory.parts[EGI_QUANTISED_NESTED];
  return add_layer(w, l);
}

static eg_status load_input(const writer *w, const egi_node *node, unsigned input, const void **out_data,
                            eg_dtype *out_dtype) {
  void *data = NULL;
  const egi_value *value = input < node->n_inputs ? &w->merge->graph->values[node->inputs[input]] : NULL;
  *out_data = NULL;
  if (value == NULL || value->kind != EGI_VALUE_WEIGHT) return EG_OK;
  EG_TRY(egi_store_load(w->merge->store, value->index, &data));
  *out_data = data;
  *out_dtype = value->dtype;
  return EG_OK;
}

/* Codes of a Linear of storage bnb4 as they are; *out_is_done false where they are of another form. */
static eg_status keep_codes(writer *w, size_t index, bool *out_is_done) {
  const egi_linear *linear = &w->merge->linears[index];
  const egi_node *node = &w->merge->graph->nodes[linear->node];
  const void *codes, *scales, *nested;
  eg_dtype codes_dtype = EG_DTYPE_U8, dtype = EG_DTYPE_F32, nested_dtype = EG_DTYPE_F32;
  *out_is_done = false;
  if (egi_linear_storage_of(node) != EGI_LINEAR_BNB4) return EG_OK;
  EG_TRY(load_input(w, node, EGI_LINEAR_WEIGHT, &codes, &codes_dtype));
  EG_TRY(load_input(w, node, EGI_LINEAR_SCALES, &scales, &dtype));
  EG_TRY(load_input(w, node, EGI_LINEAR_NESTED, &nested, &nested_dtype));
  bool is_whole = egi_node_int(node, "out_features", 0) == linear->out_features;
  bool is_known = codes != NULL && scales != NULL && dtype == (nested != NULL ? EG_DTYPE_U8 : EG_DTYPE_F32);
  if (!is_whole || !is_known) return EG_OK;
  const layer l = {.name = egi_arena_format(w->arena, "%s.weight", linear->path),
                   .dtype = torch_name(egi_merge_input_dtype(w->merge, index)),
                   .rows = linear->out_features,
                   .columns = linear->in_features,
                   .type = (unsigned)egi_node_int(node, "quant_type", 1),
                   .block = egi_node_int(node, "block_size", 64),
                   .codes = codes,
                   .scales = scales,
                   .nested = nested};
  *out_is_done = true;
  return l.name != NULL ? add_layer(w, &l) : EG_ERROR_MEMORY;
}

static bool is_float_weight(const writer *w, const egi_linear *linear, eg_dtype *out_dtype) {
  const egi_value *value = &w->merge->graph->values[linear->weight];
  *out_dtype = value->dtype;
  return value->kind == EGI_VALUE_WEIGHT && value->rank == 2 &&
         (value->dtype == EG_DTYPE_F32 || value->dtype == EG_DTYPE_F16 || value->dtype == EG_DTYPE_BF16);
}

/* Rows of [out, in] or columns of [in, out], as [out, in]. */
static float *rows_of(egi_arena *arena, const egi_merged *merged, int64_t first, int64_t rows) {
  int64_t columns = merged->is_out_first ? merged->columns : merged->rows, n_out = merged->columns;
  if (merged->is_out_first) return merged->values + first * columns;
  float *turned = EGI_NEW(arena, float, (size_t)(rows * columns));
  for (int64_t r = 0; turned != NULL && r < rows; r++)
    for (int64_t c = 0; c < columns; c++) turned[r * columns + c] = merged->values[c * n_out + first + r];
  return turned;
}

/* The modules of one node. */
static eg_status add_modules(writer *w, size_t first, eg_dtype dtype, egi_arena *scratch) {
  const egi_merge *merge = w->merge;
  egi_merged merged;
  EG_TRY(egi_merge_weight(merge, first, scratch, &merged));
  for (size_t i = first; i < merge->n_linears && merge->linears[i].node == merge->linears[first].node; i++) {
    const egi_linear *linear = &merge->linears[i];
    layer l = {.name = egi_arena_format(w->arena, "%s.weight", linear->path),
               .dtype = torch_name(dtype),
               .rows = linear->out_features,
               .columns = linear->in_features};
    const float *values = rows_of(scratch, &merged, merge->first_rows[i], linear->out_features);
    if (l.name == NULL || values == NULL) return EG_ERROR_MEMORY;
    EG_TRY(quantise_rows(w, &l, values));
  }
  return EG_OK;
}

static bool has_adapter(const egi_merge *merge, size_t first) {
  for (size_t i = first; i < merge->n_linears && merge->linears[i].node == merge->linears[first].node; i++)
    if (merge->adapter_of[i] != UINT32_MAX) return true;
  return false;
}

static eg_status add_linear(writer *w, size_t first) {
  const egi_merge *merge = w->merge;
  const egi_linear *linear = &merge->linears[first];
  const char *name = egi_arena_format(w->arena, "%s.weight", linear->path);
  eg_dtype dtype = EG_DTYPE_F32;
  bool is_done = false;
  if (name == NULL) return EG_ERROR_MEMORY;
  if (linear->is_router || (linear->is_head && !w->has_head && !linear->is_quantised)) return EG_OK;
  if (egi_map_get(&w->done, name, NULL)) return EG_OK; /* the module called again */
  if (linear->is_quantised && !has_adapter(merge, first)) EG_TRY(keep_codes(w, first, &is_done));
  if (is_done || (!linear->is_quantised && !is_float_weight(w, linear, &dtype))) return EG_OK;
  if (linear->is_quantised) dtype = egi_merge_input_dtype(merge, first);
  egi_arena scratch;
  egi_arena_init(&scratch, w->arena->ctx, EGI_PURPOSE_DATA);
  eg_status status = add_modules(w, first, dtype, &scratch);
  egi_arena_clear(&scratch);
  return status;
}

/* ---- everything else -------------------------------------------------------------------------------------------- */

static eg_status add_plain(writer *w, const egi_parameter *parameter, const char *name, int64_t first, int64_t rows) {
  const egi_merge *merge = w->merge;
  const egi_weight *weight = &merge->module->weights[parameter->weight];
  egi_state state = {
      .rank = weight->rank, .is_transposed = parameter->is_transposed, .is_vector = parameter->is_vector};
  egi_safetensor tensor = {.name = name, .dtype = weight->dtype};
  egi_arena scratch;
  float *values;
  uint64_t row_size = 1;
  if (egi_map_get(&w->done, name, NULL)) return EG_OK;
  memcpy(state.dims, weight->dims, sizeof state.dims);
  tensor.rank = egi_state_file_dims(&state, tensor.dims);
  if (rows > 0) tensor.dims[0] = rows;
  for (int i = 1; i < tensor.rank; i++) row_size *= (uint64_t)tensor.dims[i];
  egi_arena_init(&scratch, w->arena->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_merge_read(merge, parameter->weight, &scratch, &values);
  if (status == EG_OK && parameter->is_transposed) {
    const egi_merged turned = {values, weight->dims[0], weight->dims[1], false};
    values = rows_of(&scratch, &turned, 0, weight->dims[1]);
    if (values == NULL) status = EG_ERROR_MEMORY;
  }
  if (status == EG_OK)
    status = egi_convert_floats(w->arena, values + (uint64_t)first * row_size, (uint64_t)tensor.dims[0] * row_size,
                                tensor.dtype, &tensor.data, &tensor.size_bytes);
  egi_arena_clear(&scratch);
  return status == EG_OK ? add_tensor(w, &tensor) : status;
}

static eg_status add_parameters(writer *w) {
  egi_parameter *parameters;
  size_t n;
  EG_TRY(egi_stack_experts(w->merge->graph));
  EG_TRY(egi_find_parameters(w->merge->graph, w->arena, &parameters, &n));
  for (size_t i = 0; i < n; i++) {
    int64_t row = 0;
    if (parameters[i].n_parts == 0) EG_TRY(add_plain(w, &parameters[i], parameters[i].name, 0, 0));
    for (uint32_t part = 0; part < parameters[i].n_parts; part++) {
      const egi_rows_part *rows = &parameters[i].parts[part];
      EG_TRY(add_plain(w, &parameters[i], rows->name, row, rows->rows));
      row += rows->rows;
    }
  }
  return EG_OK;
}

/* ---- config.json ------------------------------------------------------------------------------------------------ */

/* As transformers' BitsAndBytesConfig writes itself. */
static json_t *describe(const writer *w, const char *dtype) {
  return json_pack("{s:b, s:b, s:s, s:s, s:s, s:b, s:b, s:b, s:n, s:f, s:b, s:b, s:s}", "_load_in_4bit", 1,
                   "_load_in_8bit", 0, "bnb_4bit_compute_dtype", dtype, "bnb_4bit_quant_storage", "uint8",
                   "bnb_4bit_quant_type", w->quantise.type == EGI_FOUR_BIT_NF4 ? "nf4" : "fp4",
                   "bnb_4bit_use_double_quant", w->quantise.is_nested, "llm_int8_enable_fp32_cpu_offload", 0,
                   "llm_int8_has_fp16_weight", 0, "llm_int8_skip_modules", "llm_int8_threshold", 6.0, "load_in_4bit", 1,
                   "load_in_8bit", 0, "quant_method", "bitsandbytes");
}

static eg_status write_json(eg_context *ctx, const char *path, const json_t *json) {
  egi_file *file;
  char *text = json_dumps(json, JSON_INDENT(2) | JSON_SORT_KEYS);
  if (text == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_file_create(ctx, path, &file);
  if (status == EG_OK) {
    status = egi_file_write(file, text, strlen(text));
    if (status == EG_OK) status = egi_file_write(file, "\n", 1);
    if (status == EG_OK)
      status = egi_file_commit(file);
    else
      egi_file_abandon(file);
  }
  free(text);
  return status;
}

static eg_status write_config(const writer *w, const char *config, const char *directory) {
  eg_context *ctx = w->arena->ctx;
  const char *path = egi_path_join(w->arena, directory, "config.json");
  json_t *root;
  if (path == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_json_read(ctx, config, &root));
  const char *dtype = json_string_value(json_object_get(root, "dtype"));
  if (dtype == NULL) dtype = json_string_value(json_object_get(root, "torch_dtype"));
  json_t *description = describe(w, dtype != NULL ? dtype : "float32");
  bool is_added = description != NULL && json_object_set_new(root, "quantization_config", description) == 0;
  eg_status status = is_added ? write_json(ctx, path, root) : EG_ERROR_MEMORY;
  json_decref(root);
  return status;
}

/* ---- the folder ------------------------------------------------------------------------------------------------- */

/* transformers computes the logits with the token table itself where the two are tied. */
static eg_status choose_head(writer *w, bool is_asked) {
  egi_structure structure;
  if (!is_asked) return EG_OK;
  EG_TRY(egi_structure_find(w->merge->graph, w->arena, &structure));
  w->has_head = !structure.is_tied;
  if (structure.is_tied)
    egi_log(w->arena->ctx, EG_LOG_WARNING, "the head is the token table, which stays as it is: it is not quantised");
  return EG_OK;
}

static eg_status write_folder(writer *w, const char *directory) {
  const egi_export *export_ = w->merge->export_;
  const eg_export_options *o = export_->options;
  eg_context *ctx = export_->ctx;
  EG_TRY(egi_quantise_options_make(ctx, o->stored != EG_QUANT_NONE ? o->stored : EG_QUANT_NF4, o->quant_block,
                                   o->double_quant, &w->quantise));
  EG_TRY(egi_merge_open(w->merge, false));
  EG_TRY(choose_head(w, o->quant_head != 0));
  for (size_t i = 0; i < w->merge->n_linears; i++)
    if (w->merge->first_rows[i] == 0) EG_TRY(add_linear(w, i));
  if (w->count == 0)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "the model has no linear layers that bitsandbytes would quantise");
  EG_TRY(add_parameters(w));
  const char *path = egi_path_join(w->arena, directory, "model.safetensors");
  if (path == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_make_directory(ctx, directory));
  EG_TRY(egi_safetensors_write(ctx, path, w->tensors, w->count));
  return o->config != NULL ? write_config(w, o->config, directory) : EG_OK;
}

eg_status egi_export_bnb(egi_export *export_, const char *directory) {
  egi_merge merge = {.export_ = export_, .dtype = EG_DTYPE_F32};
  egi_arena arena;
  egi_arena_init(&arena, export_->ctx, EGI_PURPOSE_DATA);
  writer w = {.merge = &merge, .arena = &arena};
  egi_map_init(&w.done, &arena);
  eg_status status = export_->adapters.config.parameters == NULL && export_->adapters.config.modules == NULL
                         ? write_folder(&w, directory)
                         : egi_fail(export_->ctx, EG_ERROR_UNSUPPORTED,
                                    "adapters on experts and modules that were trained whole are not written in "
                                    "bitsandbytes' form: merge them into an ONNX file first");
  egi_merge_close(&merge);
  egi_arena_clear(&arena);
  return status;
}
