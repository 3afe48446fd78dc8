/* Attributes of standard operators against the table of those that ONNX knows. What is misspelt or of another type
 * would be taken for absent, and the model would compute something else without a word. */
#include "graph/import.h"

#include <stdlib.h>

typedef struct known_attribute {
  const char *op_name, *name;
  egi_attribute_kind kind;
} known_attribute;

static const known_attribute known[] = {
#define EGI_ATTRIBUTE_ROW(op_name, name, kind) {op_name, name, EGI_ATTRIBUTE_##kind},
#include "graph/attributes.def"
#undef EGI_ATTRIBUTE_ROW
};

static const char *kind_name(egi_attribute_kind kind) {
  static const char *const names[] = {"?",       "a float", "an integer", "a text", "a tensor",
                                      "a graph", "floats",  "integers",   "texts"};
  return (unsigned)kind < EGI_COUNT(names) ? names[kind] : names[0];
}

static int compare(const void *key, const void *row) {
  const known_attribute *left = key, *right = row;
  int order = strcmp(left->op_name, right->op_name);
  return order != 0 || left->name == NULL ? order : strcmp(left->name, right->name);
}

/* The row of an attribute, or any row of the operator when `name` is NULL. */
static const known_attribute *find(const char *op_name, const char *name) {
  known_attribute key = {.op_name = op_name, .name = name};
  return bsearch(&key, known, EGI_COUNT(known), sizeof(known[0]), compare);
}

eg_status egi_import_check_attributes(egi_import_scope *scope, const Onnx__NodeProto *proto, const egi_node *node) {
  if (node->domain[0] || (node->op == EGI_OP_UNKNOWN && find(node->op_name, NULL) == NULL)) return EG_OK;
  for (uint16_t i = 0; i < node->n_attributes; i++) {
    const egi_attribute *attribute = &node->attributes[i];
    egi_attribute_kind kind = attribute->kind;
    if (egi_has_prefix(attribute->name, "__")) continue; /* private, as in ONNX's checker */
    const known_attribute *row = find(node->op_name, attribute->name);
    if (row == NULL)
      return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "%s has no attribute \"%s\"", node->op_name,
                                  attribute->name);
    if (kind == EGI_ATTRIBUTE_REFERENCE && attribute->count > 0) kind = (egi_attribute_kind)attribute->count;
    if (kind != row->kind && kind != EGI_ATTRIBUTE_REFERENCE)
      return egi_import_fail_node(scope, proto, EG_ERROR_FORMAT, "attribute \"%s\" is %s; %s takes %s", attribute->name,
                                  kind_name(kind), node->op_name, kind_name(row->kind));
  }
  return EG_OK;
}
