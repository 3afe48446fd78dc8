/* The text parser's types, tensors and attributes. */
#include "graph/text_parse.h"

#include <errno.h>
#include <math.h>
#include <string.h>

bool egi_parser_is_at_type(const egi_parser *parser) {
  return parser->lexer.token.kind == EGI_TOKEN_NAME &&
         egi_dtype_from_name(parser->lexer.token.text) != EG_DTYPE_UNDEFINED;
}

static eg_status parse_dim(egi_parser *parser, egi_dim *out_dim) {
  egi_lexer *lexer = &parser->lexer;
  bool is_unknown;
  EG_TRY(egi_lexer_accept(lexer, '?', &is_unknown));
  if (is_unknown) {
    *out_dim = egi_dim_fresh(parser->module->dims, "unknown");
    return *out_dim != EGI_DIM_NONE ? EG_OK : EG_ERROR_MEMORY;
  }
  if (lexer->token.kind == EGI_TOKEN_INT) {
    int64_t value;
    EG_TRY(egi_lexer_take_int(lexer, &value));
    if (value < 0) return egi_lexer_fail(lexer, "a dimension of 0 or more");
    *out_dim = egi_dim_constant(parser->module->dims, value);
  } else {
    const char *name;
    EG_TRY(egi_lexer_take_name(lexer, &name));
    *out_dim = egi_dim_symbol(parser->module->dims, name);
  }
  return *out_dim != EGI_DIM_NONE ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_parse_type(egi_parser *parser, egi_parsed_type *out_type) {
  egi_lexer *lexer = &parser->lexer;
  bool is_taken;
  memset(out_type, 0, sizeof *out_type);
  if (!egi_parser_is_at_type(parser)) return egi_lexer_fail(lexer, "an element type");
  out_type->dtype = egi_dtype_from_name(lexer->token.text);
  EG_TRY(egi_lexer_advance(lexer));
  EG_TRY(egi_lexer_accept(lexer, '[', &is_taken));
  if (!is_taken) return EG_OK;
  EG_TRY(egi_lexer_accept(lexer, ']', &is_taken));
  if (is_taken) {
    out_type->rank = -1;
    return EG_OK;
  }
  do {
    if (out_type->rank == EGI_MAX_RANK) return egi_lexer_fail(lexer, "at most 8 dimensions");
    EG_TRY(parse_dim(parser, &out_type->dims[out_type->rank++]));
    EG_TRY(egi_lexer_accept(lexer, ',', &is_taken));
  } while (is_taken);
  return egi_lexer_expect(lexer, ']');
}

/* ---- tensors ---- */

static void store_bits(uint8_t *data, uint64_t bits, unsigned size_bytes) {
  for (unsigned i = 0; i < size_bytes; i++) data[i] = (uint8_t)(bits >> (8 * i));
}

static eg_status take_double(egi_lexer *lexer, double *out_value) {
  bool is_number = lexer->token.kind == EGI_TOKEN_INT || lexer->token.kind == EGI_TOKEN_FLOAT ||
                   egi_lexer_is_name(lexer, "inf") || egi_lexer_is_name(lexer, "nan");
  if (!is_number) return egi_lexer_fail(lexer, "a number");
  *out_value = strtod(lexer->token.text, NULL);
  return egi_lexer_advance(lexer);
}

static eg_status parse_element(egi_parser *parser, eg_dtype dtype, uint8_t *data, uint64_t index) {
  unsigned bits = egi_dtype_bits(dtype);
  if (dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64) {
    double value;
    EG_TRY(take_double(&parser->lexer, &value));
    float narrow = (float)value;
    if (dtype == EG_DTYPE_F32)
      memcpy(data + index * 4, &narrow, 4);
    else
      memcpy(data + index * 8, &value, 8);
    return EG_OK;
  }
  int64_t value;
  EG_TRY(egi_lexer_take_int(&parser->lexer, &value));
  if (bits >= 8)
    store_bits(data + index * (bits / 8), (uint64_t)value, bits / 8);
  else
    data[index * bits / 8] |= (uint8_t)(((uint64_t)value & ((1u << bits) - 1u)) << (index * bits % 8));
  return EG_OK;
}

static eg_status parse_elements(egi_parser *parser, egi_weight *weight, uint64_t count) {
  uint64_t size_bytes;
  egi_dtype_class kind = egi_dtype_kind(weight->dtype);
  if (kind == EGI_CLASS_STRING || kind == EGI_CLASS_COMPLEX || !egi_dtype_bytes(weight->dtype, count, &size_bytes))
    return egi_lexer_fail(&parser->lexer, "a tensor of numbers");
  /* every element is at least one character of text: the count is bounded before it sizes anything */
  if (count > (uint64_t)(parser->lexer.end - parser->lexer.start))
    return egi_lexer_fail(&parser->lexer, "as many elements as the type says");
  uint8_t *data = egi_arena_get(&parser->module->arena, (size_t)size_bytes, 1);
  if (data == NULL) return EG_ERROR_MEMORY;
  for (uint64_t i = 0; i < count; i++) {
    if (i > 0) EG_TRY(egi_lexer_expect(&parser->lexer, ','));
    EG_TRY(parse_element(parser, weight->dtype, data, i));
  }
  weight->bytes.kind = EGI_BYTES_MEMORY;
  weight->bytes.data = data;
  weight->bytes.size_bytes = size_bytes;
  return egi_lexer_expect(&parser->lexer, '}');
}

/* ["location": "", "engraft.init": "normal", "std": "0.02", "seed": "7"], behind '[' */
static eg_status parse_init(egi_parser *parser, egi_weight *weight) {
  egi_lexer *lexer = &parser->lexer;
  bool has_more = true, has_kind = false;
  while (has_more) {
    const char *key, *value;
    EG_TRY(egi_lexer_take_name(lexer, &key));
    EG_TRY(egi_lexer_expect(lexer, ':'));
    EG_TRY(egi_lexer_take_name(lexer, &value));
    if (strcmp(key, "engraft.init") == 0) {
      has_kind = strcmp(value, "normal") == 0 || strcmp(value, "fill") == 0;
      weight->bytes.kind = strcmp(value, "normal") == 0 ? EGI_BYTES_NORMAL : EGI_BYTES_FILL;
    } else if (strcmp(key, "std") == 0 || strcmp(key, "value") == 0) {
      weight->bytes.value = strtod(value, NULL);
    } else if (strcmp(key, "seed") == 0) {
      weight->bytes.seed = strtoull(value, NULL, 10);
    } else if (strcmp(key, "location") != 0 || value[0] != '\0') {
      return egi_lexer_fail(lexer, "numbers in the text itself (external data has no place here)");
    }
    EG_TRY(egi_lexer_accept(lexer, ',', &has_more));
  }
  if (!has_kind) return egi_lexer_fail(lexer, "engraft.init: normal or fill");
  return egi_lexer_expect(lexer, ']');
}

eg_status egi_parse_tensor_content(egi_parser *parser, const egi_parsed_type *type, egi_weight *weight) {
  uint64_t count = 1;
  bool is_taken;
  weight->dtype = type->dtype;
  weight->rank = type->rank;
  for (int i = 0; i < type->rank; i++) {
    if (!egi_dim_value(parser->module->dims, type->dims[i], &weight->dims[i]))
      return egi_lexer_fail(&parser->lexer, "a tensor whose dims are numbers");
    uint64_t dim = (uint64_t)weight->dims[i];
    if (dim != 0 && count > UINT64_MAX / dim) return egi_lexer_fail(&parser->lexer, "a smaller tensor");
    count *= dim;
  }
  EG_TRY(egi_lexer_accept(&parser->lexer, '[', &is_taken));
  if (is_taken) return parse_init(parser, weight);
  EG_TRY(egi_lexer_expect(&parser->lexer, '{'));
  return parse_elements(parser, weight, count);
}

/* ---- attributes ---- */

/* Literal list items, of whatever kind they are. */
typedef struct items {
  uint32_t count, capacity;
  int64_t *ints;
  double *floats;
  const char **strings;
  bool has_float, has_string;
} items;

static eg_status grow_items(egi_parser *parser, items *list) {
  uint32_t capacity = list->capacity;
  uint32_t same = capacity, also = capacity;
  egi_arena *arena = &parser->module->arena;
  EG_TRY(EGI_GROW(arena, &list->ints, list->count, &capacity));
  EG_TRY(EGI_GROW(arena, &list->floats, list->count, &same));
  EG_TRY(egi_arena_grow(arena, (void **)&list->strings, sizeof(const char *), list->count, &also));
  list->capacity = capacity;
  return EG_OK;
}

static eg_status parse_item(egi_parser *parser, items *list) {
  egi_lexer *lexer = &parser->lexer;
  EG_TRY(grow_items(parser, list));
  uint32_t i = list->count++;
  if (lexer->token.kind == EGI_TOKEN_STRING) {
    list->has_string = true;
    return egi_lexer_take_name(lexer, &list->strings[i]);
  }
  if (lexer->token.kind == EGI_TOKEN_INT) {
    EG_TRY(egi_lexer_take_int(lexer, &list->ints[i]));
    list->floats[i] = (double)list->ints[i];
    return EG_OK;
  }
  list->has_float = true;
  return take_double(lexer, &list->floats[i]);
}

static eg_status set_list(egi_parser *parser, const items *list, egi_attribute *attribute) {
  attribute->count = list->count;
  if (attribute->kind == 0)
    attribute->kind = list->has_string  ? EGI_ATTRIBUTE_STRINGS
                      : list->has_float ? EGI_ATTRIBUTE_FLOATS
                                        : EGI_ATTRIBUTE_INTS;
  if (attribute->kind == EGI_ATTRIBUTE_INTS) {
    attribute->u.ints = list->ints;
  } else if (attribute->kind == EGI_ATTRIBUTE_STRINGS) {
    attribute->u.strings = (const char *const *)list->strings;
  } else {
    float *floats = EGI_NEW(&parser->module->arena, float, list->count + 1);
    if (floats == NULL) return EG_ERROR_MEMORY;
    for (uint32_t i = 0; i < list->count; i++) floats[i] = (float)list->floats[i];
    attribute->u.floats = floats;
  }
  return EG_OK;
}

static eg_status parse_tensor_attribute(egi_parser *parser, egi_attribute *attribute) {
  egi_parsed_type type;
  egi_weight weight = {0};
  weight.name = "";
  EG_TRY(egi_parse_type(parser, &type));
  if (parser->lexer.token.kind == EGI_TOKEN_NAME || parser->lexer.token.kind == EGI_TOKEN_STRING)
    EG_TRY(egi_lexer_take_name(&parser->lexer, &weight.name));
  bool is_taken;
  EG_TRY(egi_lexer_accept(&parser->lexer, '=', &is_taken));
  EG_TRY(egi_parse_tensor_content(parser, &type, &weight));
  attribute->kind = EGI_ATTRIBUTE_TENSOR;
  return egi_module_add_weight(parser->module, &weight, &attribute->u.weight);
}

static eg_status parse_graph_attribute(egi_parser *parser, egi_attribute *attribute) {
  egi_graph *graph;
  if (parser->depth >= 32) return egi_lexer_fail(&parser->lexer, "less deeply nested graphs");
  EG_TRY(egi_graph_create(parser->module, parser->lexer.token.text, &graph));
  parser->depth++;
  EG_TRY(egi_parse_graph(parser, graph));
  parser->depth--;
  attribute->kind = EGI_ATTRIBUTE_GRAPH;
  attribute->u.graph = graph;
  return EG_OK;
}

static eg_status parse_single(egi_parser *parser, egi_attribute *attribute) {
  items list = {0};
  EG_TRY(parse_item(parser, &list));
  if (list.has_string) {
    attribute->kind = EGI_ATTRIBUTE_STRING;
    attribute->u.s = list.strings[0];
    attribute->count = (uint32_t)strlen(list.strings[0]);
  } else if (list.has_float || attribute->kind == EGI_ATTRIBUTE_FLOAT) {
    attribute->kind = EGI_ATTRIBUTE_FLOAT;
    attribute->u.f = (float)list.floats[0];
  } else {
    attribute->kind = EGI_ATTRIBUTE_INT;
    attribute->u.i = list.ints[0];
  }
  return EG_OK;
}

static egi_attribute_kind kind_from_name(const char *name) {
  static const struct {
    const char *name;
    egi_attribute_kind kind;
  } kinds[] = {{"float", EGI_ATTRIBUTE_FLOAT},   {"int", EGI_ATTRIBUTE_INT},        {"string", EGI_ATTRIBUTE_STRING},
               {"tensor", EGI_ATTRIBUTE_TENSOR}, {"graph", EGI_ATTRIBUTE_GRAPH},    {"floats", EGI_ATTRIBUTE_FLOATS},
               {"ints", EGI_ATTRIBUTE_INTS},     {"strings", EGI_ATTRIBUTE_STRINGS}};
  for (size_t i = 0; i < EGI_COUNT(kinds); i++)
    if (strcmp(kinds[i].name, name) == 0) return kinds[i].kind;
  return (egi_attribute_kind)0;
}

static eg_status parse_list(egi_parser *parser, egi_attribute *attribute) {
  items list = {0};
  bool is_taken;
  EG_TRY(egi_lexer_accept(&parser->lexer, ']', &is_taken));
  if (is_taken) return set_list(parser, &list, attribute);
  do {
    EG_TRY(parse_item(parser, &list));
    EG_TRY(egi_lexer_accept(&parser->lexer, ',', &is_taken));
  } while (is_taken);
  EG_TRY(egi_lexer_expect(&parser->lexer, ']'));
  return set_list(parser, &list, attribute);
}

eg_status egi_parse_attribute_value(egi_parser *parser, egi_attribute *attribute) {
  egi_lexer *lexer = &parser->lexer;
  bool is_taken;
  EG_TRY(egi_lexer_accept(lexer, ':', &is_taken));
  if (is_taken) {
    const char *type;
    EG_TRY(egi_lexer_take_name(lexer, &type));
    attribute->kind = kind_from_name(type);
    if (attribute->kind == 0) return egi_lexer_fail(lexer, "an attribute type");
  }
  EG_TRY(egi_lexer_expect(lexer, '='));
  EG_TRY(egi_lexer_accept(lexer, '@', &is_taken));
  if (is_taken) {
    attribute->kind = EGI_ATTRIBUTE_REFERENCE;
    return egi_lexer_take_name(lexer, &attribute->u.s);
  }
  EG_TRY(egi_lexer_accept(lexer, '[', &is_taken));
  if (is_taken) return parse_list(parser, attribute);
  if (egi_parser_is_at_type(parser)) return parse_tensor_attribute(parser, attribute);
  bool is_number = egi_lexer_is_name(lexer, "inf") || egi_lexer_is_name(lexer, "nan");
  if (lexer->token.kind == EGI_TOKEN_NAME && !is_number) return parse_graph_attribute(parser, attribute);
  return parse_single(parser, attribute);
}

eg_status egi_parse_attributes(egi_parser *parser, egi_attribute **out_attributes, uint16_t *out_count) {
  egi_attribute *attributes = NULL;
  uint32_t count = 0, capacity = 0;
  bool has_more = true;
  EG_TRY(egi_lexer_expect(&parser->lexer, '<'));
  while (has_more) {
    EG_TRY(EGI_GROW(&parser->module->arena, &attributes, count, &capacity));
    if (count == UINT16_MAX) return egi_lexer_fail(&parser->lexer, "fewer attributes");
    EG_TRY(egi_lexer_take_name(&parser->lexer, &attributes[count].name));
    EG_TRY(egi_parse_attribute_value(parser, &attributes[count++]));
    EG_TRY(egi_lexer_accept(&parser->lexer, ',', &has_more));
  }
  *out_attributes = attributes;
  *out_count = (uint16_t)count;
  return egi_lexer_expect(&parser->lexer, '>');
}
