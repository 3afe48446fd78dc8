/* Building blocks of decoder graphs: parameters from files or made at load, linear layers, norms, shapes of nodes. */
#include "io/huggingface.h"

#include <string.h>

void egi_decoder_enter(egi_decoder_builder *b, const char *module, const char *child) {
  const char *parts[] = {b->path, module, child};
  const char *scope = "";
  for (size_t i = 0; i < EGI_COUNT(parts) && scope != NULL; i++)
    if (parts[i] != NULL && parts[i][0] != '\0')
      scope = egi_arena_format(&b->graph->module->arena, "%s%s%s", scope, scope[0] != '\0' ? "." : "", parts[i]);
  if (scope == NULL && b->emit.status == EG_OK) b->emit.status = EG_ERROR_MEMORY;
  b->emit.scope = scope;
}

/* ---- parameters ---- */

bool egi_decoder_has_tensor(egi_decoder_builder *b, const char *part) {
  egi_weight_location found = {NULL, NULL, 0};
  if (b->emit.status != EG_OK || b->options->weights == NULL) return false;
  const char *name = egi_arena_format(&b->graph->module->arena, "%s.%s", b->emit.scope, part);
  b->emit.status = name != NULL ? egi_weight_files_find(b->options->weights, name, &found) : EG_ERROR_MEMORY;
  return found.tensor != NULL;
}

eg_status egi_decoder_refer(egi_decoder_builder *b, const egi_weight_location *found, egi_bytes *out_bytes) {
  *out_bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY,
                           .data = found->tensor->data,
                           .size_bytes = found->tensor->size_bytes,
                           .file = egi_arena_copy_text(&b->graph->module->arena, found->path, strlen(found->path)),
                           .offset = found->offset};
  return out_bytes->file != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status take_from_files(egi_decoder_builder *b, egi_weight *weight) {
  eg_context *ctx = b->graph->module->ctx;
  egi_weight_location found;
  EG_TRY(egi_weight_files_find(b->options->weights, weight->name, &found));
  if (found.tensor == NULL)
    return egi_fail(ctx, EG_ERROR_FORMAT, "%s: no tensor \"%s\", which config.json needs",
                    egi_weight_files_directory(b->options->weights), weight->name);
  bool has_shape = found.tensor->rank == weight->rank;
  for (int i = 0; has_shape && i < weight->rank; i++) has_shape = found.tensor->dims[i] == weight->dims[i];
  if (!has_shape) {
    egi_text text;
    egi_text_init(&text, ctx);
    for (int i = 0; i < found.tensor->rank; i++)
      egi_text_format(&text, "%s%lld", i > 0 ? "," : "", (long long)found.tensor->dims[i]);
    egi_text_add(&text, "], config.json needs [");
    for (int i = 0; i < weight->rank; i++)
      egi_text_format(&text, "%s%lld", i > 0 ? "," : "", (long long)weight->dims[i]);
    eg_status status =
        egi_fail(ctx, EG_ERROR_FORMAT, "%s: tensor \"%s\" is [%s]", found.path, weight->name, egi_text_string(&text));
    egi_text_free(&text);
    return status;
  }
  if (!egi_dtype_is_float(found.tensor->dtype) || egi_dtype_bits(found.tensor->dtype) < 16)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "%s: tensor \"%s\" is of type %s; quantised weights are not supported",
                    found.path, weight->name, egi_dtype_name(found.tensor->dtype));
  weight->dtype = found.tensor->dtype;
  return egi_decoder_refer(b, &found, &weight->bytes);
}

static egi_value_id add_parameter(egi_decoder_builder *b, const char *part, egi_weight *weight) {
  uint32_t index;
  egi_value_id value = 0;
  if (b->emit.status != EG_OK) return 0;
  weight->dtype = b->dtype;
  weight->name = egi_arena_format(&b->graph->module->arena, "%s.%s", b->emit.scope, part);
  if (weight->name == NULL) b->emit.status = EG_ERROR_MEMORY;
  if (b->emit.status == EG_OK && b->options->weights != NULL) b->emit.status = take_from_files(b, weight);
  if (b->emit.status == EG_OK) b->emit.status = egi_module_add_weight(b->graph->module, weight, &index);
  if (b->emit.status == EG_OK) b->emit.status = egi_graph_add_weight(b->graph, index, &value);
  return egi_emit_cast(&b->emit, value, b->dtype);
}

egi_value_id egi_decoder_matrix(egi_decoder_builder *b, const char *part, int rank, const int64_t *dims) {
  egi_weight weight = {.rank = rank};
  for (int i = 0; i < rank; i++) weight.dims[i] = dims[i];
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_NORMAL, .value = b->config->initializer_range, .seed = b->options->seed};
  return add_parameter(b, part, &weight);
}

egi_value_id egi_decoder_vector(egi_decoder_builder *b, const char *part, int64_t length, double fill) {
  egi_weight weight = {.rank = 1, .dims = {length}, .bytes = {.kind = EGI_BYTES_FILL, .value = fill}};
  return add_parameter(b, part, &weight);
}

/* ---- modules ---- */

egi_value_id egi_decoder_linear(egi_decoder_builder *b, const char *module, const char *name, egi_value_id x,
                                egi_linear_shape shape) {
  bool is_in_out = (b->config->family->flags & EGI_FAMILY_IN_OUT) != 0;
  const int64_t dims[2] = {is_in_out ? shape.in : shape.out, is_in_out ? shape.out : shape.in};
  egi_decoder_enter(b, module, name);
  egi_value_id coded = egi_decoder_coded_linear(b, x, shape);
  if (coded != 0 || b->emit.status != EG_OK) return coded;
  egi_value_id weight = egi_decoder_matrix(b, "weight", 2, dims);
  if (!is_in_out) weight = egi_emit_unary(&b->emit, EGI_OP_Transpose, weight);
  egi_value_id y = egi_emit_binary(&b->emit, EGI_OP_MatMul, x, weight);
  if (!shape.has_bias) return y;
  return egi_emit_binary(&b->emit, EGI_OP_Add, y, egi_decoder_vector(b, "bias", shape.out, 0.0));
}

/* Scale 1 + weight: in float32, like the norm itself. */
static egi_value_id offset_norm(egi_decoder_builder *b, egi_value_id x, int64_t length,
                                const egi_attribute attributes[2]) {
  egi_value_id weight = egi_emit_cast(&b->emit, egi_decoder_vector(b, "weight", length, 0.0), EG_DTYPE_F32);
  egi_value_id scale = egi_emit_binary(&b->emit, EGI_OP_Add, weight, egi_emit_scalar(&b->emit, 1.0, EG_DTYPE_F32));
  const egi_value_id inputs[] = {egi_emit_cast(&b->emit, x, EG_DTYPE_F32), scale};
  egi_value_id y = egi_emit(&b->emit, EGI_OP_RMSNormalization, inputs, 2, attributes, 2);
  return egi_emit_cast(&b->emit, y, b->dtype);
}

egi_value_id egi_decoder_norm(egi_decoder_builder *b, const char *module, const char *name, egi_value_id x,
                              int64_t length) {
  const egi_attribute attributes[] = {egi_attribute_int("axis", -1),
                                      egi_attribute_float("epsilon", (float)b->config->epsilon)};
  egi_norm_kind kind = b->config->family->norm;
  egi_decoder_enter(b, module, name);
  if (kind == EGI_NORM_OFFSET) return offset_norm(b, x, length, attributes);
  egi_value_id inputs[3] = {x, egi_decoder_vector(b, "weight", length, 1.0), 0};
  if (kind == EGI_NORM_RMS) return egi_emit(&b->emit, EGI_OP_RMSNormalization, inputs, 2, attributes, 2);
  inputs[2] = egi_decoder_vector(b, "bias", length, 0.0);
  return egi_emit(&b->emit, EGI_OP_LayerNormalization, inputs, 3, attributes, 2);
}

egi_value_id egi_decoder_activate(egi_decoder_builder *b, egi_activation activation, egi_value_id x) {
  const egi_attribute tanh_form = egi_attribute_string("approximate", "tanh");
  switch (activation) {
  case EGI_ACT_RELU:
    return egi_emit_unary(&b->emit, EGI_OP_Relu, x);
  case EGI_ACT_GELU:
    return egi_emit_unary(&b->emit, EGI_OP_Gelu, x);
  case EGI_ACT_GELU_TANH:
    return egi_emit(&b->emit, EGI_OP_Gelu, &x, 1, &tanh_form, 1);
  case EGI_ACT_SILU:
    break;
  }
  return egi_emit_binary(&b->emit, EGI_OP_Mul, x, egi_emit_unary(&b->emit, EGI_OP_Sigmoid, x));
}

/* ---- shapes of nodes ---- */

egi_value_id egi_decoder_unsqueeze(egi_decoder_builder *b, egi_value_id x, int64_t axis) {
  return egi_emit_binary(&b->emit, EGI_OP_Unsqueeze, x, egi_emit_integers(&b->emit, &axis, 1));
}

egi_value_id egi_decoder_transpose(egi_decoder_builder *b, egi_value_id x, const int64_t *order, uint32_t rank) {
  const egi_attribute attribute = egi_attribute_ints("perm", order, rank);
  return egi_emit(&b->emit, EGI_OP_Transpose, &x, 1, &attribute, 1);
}

egi_value_id egi_decoder_reshape(egi_decoder_builder *b, egi_value_id x, const int64_t *shape, uint32_t rank) {
  return egi_emit_binary(&b->emit, EGI_OP_Reshape, x, egi_emit_integers(&b->emit, shape, rank));
}

egi_value_id egi_decoder_slice(egi_decoder_builder *b, egi_value_id x, const int64_t bounds[3]) {
  static const int64_t last = -1;
  const egi_value_id inputs[] = {x, egi_emit_integers(&b->emit, &bounds[0], 1),
                                 egi_emit_integers(&b->emit, &bounds[1], 1), egi_emit_integers(&b->emit, &last, 1),
                                 egi_emit_integers(&b->emit, &bounds[2], 1)};
  return egi_emit(&b->emit, EGI_OP_Slice, inputs, 5, NULL, 0);
}

void egi_decoder_split(egi_decoder_builder *b, egi_value_id x, const int64_t *sizes, unsigned count,
                       egi_value_id *out_pieces) {
  const egi_attribute axis = egi_attribute_int("axis", -1);
  const egi_value_id inputs[] = {x, egi_emit_integers(&b->emit, sizes, count)};
  egi_emit_many(&b->emit, EGI_OP_Split, inputs, 2, &axis, 1, out_pieces, count);
}
