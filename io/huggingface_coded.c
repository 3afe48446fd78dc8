/* Weights that lie in the files as 4-bit codes, over the files' own bytes. Linear layers of bitsandbytes: a Linear of
 * storage bnb4, computed in float32, as its kernels do. Experts in MXFP4, as gpt-oss has them: float4e2m1 in blocks of
 * 32 with scales float8e8m0 (Open Compute Project, Microscaling Formats 1.0), which a DequantizeLinear multiplies. */
#include "graph/linear.h"
#include "io/huggingface.h"

#include <string.h>

static eg_status find_tensor(void *userdata, const char *name, const egi_safetensor **out_tensor) {
  egi_weight_location found;
  EG_TRY(egi_weight_files_find(userdata, name, &found));
  *out_tensor = found.tensor;
  return EG_OK;
}

/* One of the tensors as it lies in its file. */
static eg_status add_tensor(egi_decoder_builder *b, const egi_safetensor *tensor, eg_dtype dtype, egi_value_id *out) {
  egi_weight_location found;
  egi_weight weight = {.name = tensor->name, .dtype = dtype, .rank = 1};
  uint32_t index;
  EG_TRY(egi_weight_files_find(b->options->weights, tensor->name, &found));
  EG_TRY(egi_decoder_refer(b, &found, &weight.bytes));
  weight.dims[0] = (int64_t)(tensor->size_bytes / (dtype == EG_DTYPE_F32 ? sizeof(float) : 1));
  EG_TRY(egi_module_add_weight(b->graph->module, &weight, &index));
  return egi_graph_add_weight(b->graph, index, out);
}

static eg_status add_nested(egi_decoder_builder *b, const egi_bnb_state *state, const egi_safetensor *tensors,
                            egi_value_id *out) {
  egi_arena *arena = &b->graph->module->arena;
  egi_weight weight = {.dtype = EG_DTYPE_F32, .rank = 1};
  float *nested = NULL;
  uint32_t index;
  EG_TRY(egi_bnb_nested(arena, state, tensors, &nested));
  weight.name = egi_arena_format(arena, "%s.nested", tensors[EGI_BNB_CODES].name);
  if (!weight.name) return EG_ERROR_MEMORY;
  weight.dims[0] =
      (int64_t)(1 + (tensors[EGI_BNB_NESTED_MAP].size_bytes + tensors[EGI_BNB_NESTED].size_bytes) / sizeof(float));
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY,
                             .data = (const uint8_t *)nested,
                             .size_bytes = (uint64_t)weight.dims[0] * sizeof(float)};
  EG_TRY(egi_module_add_weight(b->graph->module, &weight, &index));
  return egi_graph_add_weight(b->graph, index, out);
}

static eg_status emit(egi_decoder_builder *b, egi_value_id x, egi_linear_shape shape, const char *name,
                      egi_value_id *out) {
  egi_weight_files *files = b->options->weights;
  const egi_bnb_source source = {find_tensor, files, egi_weight_files_directory(files)};
  egi_bnb_state state;
  egi_safetensor tensors[EGI_BNB_TENSORS];
  bool is_there = false;
  EG_TRY(egi_bnb_read(&b->graph->module->arena, &source, name, &state, tensors, &is_there));
  if (!is_there) return EG_OK;
  if (state.out_features != shape.out || state.in_features != shape.in)
    return egi_fail(b->graph->module->ctx, EG_ERROR_FORMAT,
                    "%s: tensor \"%s\" is [%lld,%lld], config.json needs [%lld,%lld]", source.what, name,
                    (long long)state.out_features, (long long)state.in_features, (long long)shape.out,
                    (long long)shape.in);
  egi_value_id inputs[EGI_LINEAR_INPUTS] = {egi_emit_cast(&b->emit, x, EG_DTYPE_F32)};
  EG_TRY(add_tensor(b, &tensors[EGI_BNB_CODES], EG_DTYPE_U8, &inputs[EGI_LINEAR_WEIGHT]));
  EG_TRY(add_tensor(b, &tensors[EGI_BNB_ABSMAX], state.is_nested ? EG_DTYPE_U8 : EG_DTYPE_F32,
                    &inputs[EGI_LINEAR_SCALES]));
  if (state.is_nested) EG_TRY(add_nested(b, &state, tensors, &inputs[EGI_LINEAR_NESTED]));
  if (shape.has_bias)
    inputs[EGI_LINEAR_BIAS] = egi_emit_cast(&b->emit, egi_decoder_vector(b, "bias", shape.out, 0.0), EG_DTYPE_F32);
  const egi_attribute attributes[] = {
      egi_attribute_string("storage", "bnb4"), egi_attribute_int("quant_type", state.type),
      egi_attribute_int("block_size", state.block), egi_attribute_int("out_features", shape.out),
      egi_attribute_int("in_features", shape.in)};
  egi_value_id y =
      egi_emit(&b->emit, EGI_OP_Linear, inputs, state.is_nested ? EGI_LINEAR_INPUTS : EGI_LINEAR_SCALES + 1, attributes,
               EGI_COUNT(attributes));
  *out = egi_emit_cast(&b->emit, y, b->dtype);
  return b->emit.status;
}

egi_value_id egi_decoder_coded_linear(egi_decoder_builder *b, egi_value_id x, egi_linear_shape shape) {
  egi_value_id y = 0;
  if (b->emit.status != EG_OK || b->options->weights == NULL) return 0;
  const char *name = egi_arena_format(&b->graph->module->arena, "%s.weight", b->emit.scope);
  eg_status status = name != NULL ? emit(b, x, shape, name, &y) : EG_ERROR_MEMORY;
  if (b->emit.status == EG_OK) b->emit.status = status;
  return b->emit.status == EG_OK ? y : 0;
}

/* ---- MXFP4 ------------------------------------------------------------------------------------------------------ */

enum { MX_BLOCK = 32 };

/* "<part>_blocks" u8 [.., K / 32, 16] and "<part>_scales" u8 [.., K / 32] under the type and shape that they stand for.
 */
static eg_status add_typed(egi_decoder_builder *b, const char *name, eg_dtype dtype, const int64_t dims[3],
                           egi_value_id *out) {
  eg_context *ctx = b->graph->module->ctx;
  egi_weight weight = {.name = name, .dtype = dtype, .rank = 3};
  egi_weight_location found;
  uint64_t bytes = 0;
  uint32_t index;
  memcpy(weight.dims, dims, 3 * sizeof *dims);
  EG_TRY(egi_weight_files_find(b->options->weights, name, &found));
  if (found.tensor == NULL)
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: no tensor \"%s\"", egi_weight_files_directory(b->options->weights),
                    name);
  if (!egi_dtype_bytes(dtype, (uint64_t)(dims[0] * dims[1] * dims[2]), &bytes) || found.tensor->dtype != EG_DTYPE_U8 ||
      found.tensor->size_bytes != bytes)
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: tensor \"%s\" does not hold [%lld,%lld,%lld] of %s", found.path, name,
                    (long long)dims[0], (long long)dims[1], (long long)dims[2], egi_dtype_name(dtype));
  EG_TRY(egi_decoder_refer(b, &found, &weight.bytes));
  EG_TRY(egi_module_add_weight(b->graph->module, &weight, &index));
  return egi_graph_add_weight(b->graph, index, out);
}

static eg_status emit_mx(egi_decoder_builder *b, const char *part, const int64_t dims[3], egi_value_id *out) {
  static const int64_t turned[] = {0, 2, 1};
  egi_arena *arena = &b->graph->module->arena;
  const int64_t scales[3] = {dims[0], dims[1], dims[2] / MX_BLOCK};
  const char *names[2] = {egi_arena_format(arena, "%s.%s_blocks", b->emit.scope, part),
                          egi_arena_format(arena, "%s.%s_scales", b->emit.scope, part)};
  egi_value_id inputs[2] = {0, 0};
  if (!names[0] || !names[1]) return EG_ERROR_MEMORY;
  if (dims[2] % MX_BLOCK != 0)
    return egi_fail(b->graph->module->ctx, EG_ERROR_FORMAT, "tensor \"%s\": rows of %lld numbers are no whole blocks",
                    names[0], (long long)dims[2]);
  EG_TRY(add_typed(b, names[0], EG_DTYPE_F4E2M1, dims, &inputs[0]));
  EG_TRY(add_typed(b, names[1], EG_DTYPE_F8E8M0, scales, &inputs[1]));
  const egi_attribute attributes[] = {
      egi_attribute_int("axis", 2), egi_attribute_int("block_size", MX_BLOCK),
      egi_attribute_int("output_dtype", b->dtype == EG_DTYPE_BF16 ? EG_DTYPE_BF16 : EG_DTYPE_F32)};
  egi_value_id numbers = egi_emit(&b->emit, EGI_OP_DequantizeLinear, inputs, 2, attributes, 3);
  *out = egi_decoder_transpose(b, egi_emit_cast(&b->emit, numbers, b->dtype), turned, 3);
  return b->emit.status;
}

egi_value_id egi_decoder_coded_stack(egi_decoder_builder *b, const char *part, const int64_t dims[3]) {
  egi_value_id stack = 0;
  const char *blocks = egi_arena_format(&b->graph->module->arena, "%s_blocks", part);
  if (b->emit.status != EG_OK || blocks == NULL || !egi_decoder_has_tensor(b, blocks)) return 0;
  eg_status status = emit_mx(b, part, dims, &stack);
  if (b->emit.status == EG_OK) b->emit.status = status;
  return b->emit.status == EG_OK ? stack : 0;
}
