/* Which operator sets a file must import: the oldest version in which every node has the form it has here. */
#include "graph/export.h"

/* Operators whose row in ops.def is newer than their form: later versions only widened types. */
static const struct {
  egi_op op;
  int version;
} forms[] = {
    {EGI_OP_Cast, 13},        {EGI_OP_CastLike, 15},       {EGI_OP_Constant, 13}, {EGI_OP_ConstantOfShape, 9},
    {EGI_OP_Equal, 13},       {EGI_OP_Flatten, 13},        {EGI_OP_Identity, 13}, {EGI_OP_IsNaN, 13},
    {EGI_OP_LessOrEqual, 12}, {EGI_OP_GreaterOrEqual, 12}, {EGI_OP_Where, 9},     {EGI_OP_ReduceMax, 18},
    {EGI_OP_Reshape, 14},     {EGI_OP_Shape, 15},          {EGI_OP_Size, 13},     {EGI_OP_Squeeze, 13},
    {EGI_OP_Transpose, 13},   {EGI_OP_Unsqueeze, 13},      {EGI_OP_Pad, 19},
};

/* Inputs and attributes that came later than the operator. */
static int attention_version(const egi_node *node) {
  if (egi_node_attribute(node, "left_window_size") || egi_node_attribute(node, "right_window_size")) return 25;
  return node->n_inputs > 6 ? 24 : 23;
}

static int version_of(const egi_node *node) {
  if (node->op == EGI_OP_Attention) return attention_version(node);
  for (size_t i = 0; i < EGI_COUNT(forms); i++)
    if (forms[i].op == node->op) return forms[i].version;
  return egi_op_get(node->op)->version;
}

static eg_status add_domain(egi_exporter *exporter, const char *domain) {
  if (!*domain || egi_map_get(&exporter->domains, domain, NULL)) return EG_OK;
  EG_TRY(EGI_GROW(&exporter->arena, &exporter->domain_rows, exporter->n_domains, &exporter->domains_capacity));
  exporter->domain_rows[exporter->n_domains] = domain;
  return egi_map_put(&exporter->domains, domain, exporter->n_domains++);
}

static eg_status survey_call(egi_exporter *exporter, const egi_node *node) {
  const egi_module *module = exporter->module;
  const char *name = node->op_name ? node->op_name : egi_op_get(node->op)->name;
  const char *domain = node->op_name ? node->domain : egi_op_get(node->op)->domain;
  for (uint32_t i = 0; i < module->n_functions; i++) {
    const egi_function *function = &module->functions[i];
    bool is_same = !strcmp(function->name, name) && !strcmp(function->domain, domain) &&
                   !strcmp(function->overload ? function->overload : "", node->overload ? node->overload : "");
    if (!is_same || exporter->is_function_called[i]) continue;
    exporter->is_function_called[i] = true;
    EG_TRY(egi_export_survey(exporter, function->graph));
  }
  return EG_OK;
}

/* Recursion over bodies and called functions, both bounded by the importer. */
eg_status egi_export_survey(egi_exporter *exporter, const egi_graph *graph) {
  for (egi_node_id n = 1; n < graph->n_nodes; n++) {
    const egi_node *node = &graph->nodes[n];
    if (node->op == EGI_OP_NONE) continue;
    for (uint16_t i = 0; i < node->n_attributes; i++)
      if (node->attributes[i].kind == EGI_ATTRIBUTE_GRAPH)
        EG_TRY(egi_export_survey(exporter, node->attributes[i].u.graph));
    if (node->op == EGI_OP_UNKNOWN) {
      EG_TRY(add_domain(exporter, node->domain));
      EG_TRY(survey_call(exporter, node));
    } else if (egi_op_get(node->op)->domain[0]) {
      EG_TRY(add_domain(exporter, egi_op_get(node->op)->domain));
      if (node->overload) EG_TRY(survey_call(exporter, node));
    } else if (version_of(node) > exporter->version) {
      exporter->version = version_of(node);
    }
  }
  return EG_OK;
}
