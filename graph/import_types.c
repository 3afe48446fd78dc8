/* Types of values in ONNX files: dtype, rank, dims. A dim_param is a symbol, or an expression over symbols as exporters
 * and engraft itself write it: "batch*4", "past + sequence", "floor(s0 / 2)", "Max(1, s0)", "s0//2". */
#include "graph/import.h"

/* Deeper parentheses are taken as one opaque name. */
#define MAX_EXPRESSION_DEPTH 32

typedef struct dim_parser {
  egi_importer *importer;
  const char *at;
  unsigned depth;
  bool is_bad;
} dim_parser;

static egi_dim parse_sum(dim_parser *parser);

static bool is_name_byte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
}

static void skip_blanks(dim_parser *parser) {
  parser->at += strspn(parser->at, " ");
}

static bool accept(dim_parser *parser, const char *sign) {
  skip_blanks(parser);
  if (!egi_has_prefix(parser->at, sign)) return false;
  parser->at += strlen(sign);
  return true;
}

static egi_dim fail_parse(dim_parser *parser) {
  parser->is_bad = true;
  return EGI_DIM_NONE;
}

static egi_dim parse_number(dim_parser *parser) {
  int64_t value = 0;
  for (; *parser->at >= '0' && *parser->at <= '9'; parser->at++) {
    if (value > (INT64_MAX - 9) / 10) return fail_parse(parser);
    value = value * 10 + (*parser->at - '0');
  }
  if (is_name_byte(*parser->at)) return fail_parse(parser);
  return egi_dim_constant(parser->importer->module->dims, value);
}

/* "floor(a)", "min(a, b)", "max(a, b)", behind the parenthesis. floor of a whole number is the number itself. */
static egi_dim parse_call(dim_parser *parser, const char *name) {
  egi_dims *dims = parser->importer->module->dims;
  egi_dim a = parse_sum(parser);
  if (!strcmp(name, "floor")) return accept(parser, ")") ? a : fail_parse(parser);
  bool is_minimum = !strcmp(name, "min") || !strcmp(name, "Min");
  if ((!is_minimum && strcmp(name, "max") != 0 && strcmp(name, "Max") != 0) || !accept(parser, ","))
    return fail_parse(parser);
  egi_dim b = parse_sum(parser);
  if (!accept(parser, ")")) return fail_parse(parser);
  return is_minimum ? egi_dim_minimum(dims, a, b) : egi_dim_maximum(dims, a, b);
}

static egi_dim parse_name(dim_parser *parser) {
  egi_importer *importer = parser->importer;
  size_t length = 0;
  while (is_name_byte(parser->at[length])) length++;
  if (length == 0) return fail_parse(parser);
  const char *name = egi_arena_copy_text(&importer->scratch, parser->at, length);
  if (!name) return fail_parse(parser);
  parser->at += length;
  if (accept(parser, "(")) return parse_call(parser, name);
  if (!egi_map_get(&importer->symbols, name, NULL)) return fail_parse(parser);
  return egi_dim_symbol(importer->module->dims, name);
}

static egi_dim parse_factor(dim_parser *parser) {
  skip_blanks(parser);
  if (++parser->depth > MAX_EXPRESSION_DEPTH) return fail_parse(parser);
  egi_dim dim;
  if (accept(parser, "(")) {
    dim = parse_sum(parser);
    if (!accept(parser, ")")) dim = fail_parse(parser);
  } else if (accept(parser, "-")) {
    egi_dims *dims = parser->importer->module->dims;
    dim = egi_dim_subtract(dims, egi_dim_constant(dims, 0), parse_factor(parser));
  } else if (*parser->at >= '0' && *parser->at <= '9') {
    dim = parse_number(parser);
  } else {
    dim = parse_name(parser);
  }
  parser->depth--;
  return dim;
}

static egi_dim parse_product(dim_parser *parser) {
  egi_dims *dims = parser->importer->module->dims;
  egi_dim dim = parse_factor(parser);
  while (!parser->is_bad) {
    if (accept(parser, "//") || accept(parser, "/"))
      dim = egi_dim_divide(dims, dim, parse_factor(parser));
    else if (accept(parser, "*"))
      dim = egi_dim_multiply(dims, dim, parse_factor(parser));
    else
      break;
  }
  return dim;
}

static egi_dim parse_sum(dim_parser *parser) {
  egi_dims *dims = parser->importer->module->dims;
  egi_dim dim = parse_product(parser);
  while (!parser->is_bad) {
    if (accept(parser, "+"))
      dim = egi_dim_add(dims, dim, parse_product(parser));
    else if (accept(parser, "-"))
      dim = egi_dim_subtract(dims, dim, parse_product(parser));
    else
      break;
  }
  return dim;
}

/* The expression over symbols that graph inputs have as whole dims; EGI_DIM_NONE when it is not one. */
static egi_dim parse_expression(egi_importer *importer, const char *text) {
  dim_parser parser = {.importer = importer, .at = text};
  if (egi_map_get(&importer->symbols, text, NULL)) return egi_dim_symbol(importer->module->dims, text);
  egi_dim dim = parse_sum(&parser);
  skip_blanks(&parser);
  return parser.is_bad || *parser.at ? EGI_DIM_NONE : dim;
}

/* A name, not an expression: nothing that parse_expression() could split. */
static bool is_bare(const char *text) {
  if (*text >= '0' && *text <= '9') return false;
  while (is_name_byte(*text) || *text == '-') text++;
  return *text == '\0';
}

static const Onnx__TypeProto__Tensor *tensor_type(const Onnx__ValueInfoProto *info) {
  if (!info->type || info->type->value_case != ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE) return NULL;
  return info->type->tensor_type;
}

eg_status egi_import_symbols(egi_importer *importer, const Onnx__GraphProto *graph) {
  for (size_t i = 0; i < graph->n_input; i++) {
    const Onnx__TypeProto__Tensor *type = tensor_type(graph->input[i]);
    for (size_t d = 0; type && type->shape && d < type->shape->n_dim; d++) {
      const Onnx__TensorShapeProto__Dimension *dim = type->shape->dim[d];
      if (dim->value_case != ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM || !dim->dim_param[0]) continue;
      if (is_bare(dim->dim_param)) EG_TRY(egi_map_put(&importer->symbols, dim->dim_param, 1));
    }
  }
  return EG_OK;
}

/* `is_input`: an expression that cannot be read is a symbol of its own; elsewhere it says nothing. */
static eg_status import_dim(egi_importer *importer, const char *name, const Onnx__TensorShapeProto__Dimension *dim,
                            bool is_input, egi_dim *out_dim) {
  *out_dim = EGI_DIM_NONE;
  if (dim->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE) {
    if (dim->dim_value < 0)
      return egi_import_fail_tensor(importer, name, EG_ERROR_FORMAT, "a dimension of %lld", (long long)dim->dim_value);
    *out_dim = egi_dim_constant(importer->module->dims, dim->dim_value);
    return *out_dim == EGI_DIM_NONE ? EG_ERROR_MEMORY : EG_OK;
  }
  if (dim->value_case != ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM || !dim->dim_param[0]) return EG_OK;
  *out_dim = parse_expression(importer, dim->dim_param);
  if (*out_dim == EGI_DIM_NONE && is_input) *out_dim = egi_dim_symbol(importer->module->dims, dim->dim_param);
  return EG_OK;
}

static eg_status import_shape(egi_importer *importer, const Onnx__ValueInfoProto *info, bool is_input, egi_value *out) {
  const char *name = egi_import_text(info->name);
  const Onnx__TypeProto__Tensor *type = tensor_type(info);
  *out = (egi_value){.rank = -1};
  if (!type) return EG_OK;
  if (type->elem_type != 0 && !egi_dtype_is_known(type->elem_type))
    return egi_import_fail_tensor(importer, name, EG_ERROR_FORMAT, "unknown element type %d", type->elem_type);
  out->dtype = (eg_dtype)type->elem_type;
  if (!type->shape) return EG_OK;
  if (type->shape->n_dim > EGI_MAX_RANK)
    return egi_import_fail_tensor(importer, name, EG_ERROR_UNSUPPORTED, "%zu dimensions; at most %d are supported",
                                  type->shape->n_dim, EGI_MAX_RANK);
  out->rank = (int)type->shape->n_dim;
  for (int i = 0; i < out->rank; i++) EG_TRY(import_dim(importer, name, type->shape->dim[i], is_input, &out->dims[i]));
  return EG_OK;
}

eg_status egi_import_input(egi_import_scope *scope, const Onnx__ValueInfoProto *info, bool is_main) {
  egi_importer *importer = scope->importer;
  const char *name = egi_import_text(info->name);
  egi_value type;
  egi_value_id id = 0;
  if (!*name) return egi_fail(importer->ctx, EG_ERROR_FORMAT, "%s: a graph input has no name", importer->path);
  EG_TRY(egi_import_claim(scope, NULL, name));
  if (is_main && !tensor_type(info))
    return egi_import_fail_tensor(importer, name, EG_ERROR_UNSUPPORTED, "a graph input that is not a tensor");
  EG_TRY(import_shape(importer, info, true, &type));
  if (is_main && type.dtype == EG_DTYPE_UNDEFINED)
    return egi_import_fail_tensor(importer, name, EG_ERROR_FORMAT, "a graph input without an element type");
  return egi_graph_add_input(scope->graph, name, type.dtype, type.rank, type.dims, &id);
}

eg_status egi_import_hint(egi_import_scope *scope, const Onnx__ValueInfoProto *info) {
  egi_value type;
  egi_value_id id = info->name ? egi_graph_find_value(scope->graph, info->name) : 0;
  if (!id || scope->graph->values[id].kind != EGI_VALUE_NODE) return EG_OK;
  EG_TRY(import_shape(scope->importer, info, false, &type));
  egi_value *value = &scope->graph->values[id];
  if (type.dtype != EG_DTYPE_UNDEFINED) value->dtype = type.dtype;
  if (type.rank < 0) return EG_OK;
  value->rank = type.rank;
  memcpy(value->dims, type.dims, sizeof(value->dims));
  return EG_OK;
}
