/* Standard operators that functions.def defines by others: the functions that a graph needs are added to its module, so
 * that inline_functions expands them like a model's own. Called by that pass before it looks for calls. */
#include <stdlib.h>

#include "graph/graph.h"
#include "graph/text_parse.h"

typedef struct definition {
  const char *name, *overload, *attribute, *default_value, *wanted, *text;
} definition;

static const definition definitions[] = {
#define FUNCTION(name, overload, attribute, default_value, wanted, text) \
  {name, overload, attribute, default_value, wanted, text},
#include "graph/functions.def"
#undef FUNCTION
};

/* Whether the form of the definition is the node's. An attribute of a function's caller decides nothing yet. */
static bool is_form_of(const definition *form, const egi_node *node) {
  if (form->attribute[0] == '\0') return true;
  const egi_attribute *attribute = egi_node_attribute(node, form->attribute);
  if (attribute == NULL) return strcmp(form->default_value, form->wanted) == 0;
  if (attribute->kind == EGI_ATTRIBUTE_STRING) return strcmp(attribute->u.s, form->wanted) == 0;
  return attribute->kind == EGI_ATTRIBUTE_INT && attribute->u.i == strtoll(form->wanted, NULL, 10);
}

static const definition *find_definition(const egi_node *node) {
  if (node->op != EGI_OP_UNKNOWN || node->op_name == NULL) return NULL;
  if (node->domain != NULL && node->domain[0] != '\0' && strcmp(node->domain, "ai.onnx") != 0) return NULL;
  if (node->overload != NULL && node->overload[0] != '\0') return NULL;
  for (size_t i = 0; i < EGI_COUNT(definitions); i++)
    if (strcmp(definitions[i].name, node->op_name) == 0 && is_form_of(&definitions[i], node)) return &definitions[i];
  return NULL;
}

static bool has_function(const egi_module *module, const char *name, const char *overload) {
  for (uint32_t i = 0; i < module->n_functions; i++) {
    const egi_function *function = &module->functions[i];
    const char *own = function->overload != NULL ? function->overload : "";
    if (strcmp(function->name, name) == 0 && function->domain[0] == '\0' && strcmp(own, overload) == 0) return true;
  }
  return false;
}

/* A model's own function of the name hides the operator. */
static eg_status add_for_node(egi_module *module, egi_node *node) {
  const definition *form = find_definition(node);
  if (form == NULL) return EG_OK;
  if (form->overload[0] != '\0') node->overload = form->overload;
  if (has_function(module, form->name, form->overload)) return EG_OK;
  char *text = egi_arena_format(&module->arena, "<domain: \"\", overload: \"%s\">\n%s %s", form->overload, form->name,
                                form->text);
  if (text == NULL) return EG_ERROR_MEMORY;
  return egi_module_parse_function(module, text, strlen(text));
}

static eg_status add_for_graph(egi_module *module, egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) EG_TRY(add_for_node(module, &graph->nodes[id]));
  return EG_OK;
}

/* Functions call functions: those added last are looked at too. Ends because each definition is added once. */
eg_status egi_module_add_standard_functions(egi_module *module, egi_graph *graph) {
  EG_TRY(add_for_graph(module, graph));
  for (uint32_t i = 0; i < module->n_functions; i++) EG_TRY(add_for_graph(module, module->functions[i].graph));
  return EG_OK;
}
