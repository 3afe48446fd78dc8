/* Rules and passes of the host: kept with the model, run by eg_model_rewrite() under their names. */
#include <string.h>

#include "api/api.h"
#include "passes/rules.h"

typedef struct host_rule {
  egi_rule rule;
  int (*check)(eg_match *match, void *userdata);
  void *userdata;
} host_rule;

typedef struct host_pass {
  eg_pass_function run;
  void *userdata;
} host_pass;

struct eg_match {
  egi_match *match;
};

struct eg_graph {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_replacement *replacements;
  uint32_t n_replacements, capacity;
};

/* ---- values ---- */

static const char *text_or_empty(const char *text) {
  return text != NULL ? text : "";
}

static const char *operator_name(const egi_node *node) {
  return node->op_name != NULL ? node->op_name : egi_op_get(node->op)->name;
}

static int describe_value(const egi_graph *graph, egi_value_id id, eg_value_info *out_info) {
  if (id == 0) return 0;
  const egi_value *value = &graph->values[id];
  const egi_node *node = value->kind == EGI_VALUE_NODE ? &graph->nodes[value->producer] : NULL;
  *out_info = (eg_value_info){.name = value->name, .dtype = value->dtype, .rank = value->rank, .op = "", .scope = ""};
  for (int i = 0; i < value->rank; i++) {
    egi_dim dim = egi_dim_resolve(graph->module->dims, value->dims[i]);
    if (!egi_dim_value(graph->module->dims, dim, &out_info->dims[i])) out_info->dims[i] = -1;
  }
  if (node != NULL) {
    out_info->op = operator_name(node);
    out_info->scope = text_or_empty(node->scope);
  }
  return 1;
}

static int read_number(const egi_attribute *attribute, double *out_number) {
  if (attribute == NULL) return 0;
  if (attribute->kind == EGI_ATTRIBUTE_INT) *out_number = (double)attribute->u.i;
  if (attribute->kind == EGI_ATTRIBUTE_FLOAT) *out_number = (double)attribute->u.f;
  return attribute->kind == EGI_ATTRIBUTE_INT || attribute->kind == EGI_ATTRIBUTE_FLOAT;
}

/* ---- matches ---- */

int eg_match_value(const eg_match *match, const char *name, eg_value_info *out_info) {
  if (match == NULL || name == NULL || out_info == NULL) return 0;
  return describe_value(egi_match_graph(match->match), egi_match_value(match->match, name), out_info);
}

int eg_match_number(const eg_match *match, const char *name, double *out_number) {
  if (match == NULL || name == NULL || out_number == NULL) return 0;
  if (egi_match_scalar(match->match, name, out_number)) return 1;
  return read_number(egi_match_attribute(match->match, name), out_number);
}

/* The host's texts live as long as the module that is rewritten. */
static const char *keep_text(const eg_match *match, const char *text) {
  return egi_arena_copy_text(&egi_match_graph(match->match)->module->arena, text, strlen(text));
}

static void set_attribute(eg_match *match, const char *name, egi_attribute attribute) {
  egi_emitter *emit = egi_match_emitter(match->match);
  attribute.name = keep_text(match, name);
  if (attribute.name == NULL)
    emit->status = EG_ERROR_MEMORY;
  else if (!egi_match_set(match->match, &attribute))
    emit->status = egi_fail(egi_match_graph(match->match)->module->ctx, EG_ERROR_ARGUMENT,
                            "attribute %s: a match has too many attributes", name);
}

void eg_match_set_float(eg_match *match, const char *name, float number) {
  if (match != NULL && name != NULL) set_attribute(match, name, egi_attribute_float("", number));
}

void eg_match_set_integer(eg_match *match, const char *name, int64_t number) {
  if (match != NULL && name != NULL) set_attribute(match, name, egi_attribute_int("", number));
}

int eg_match_refuse(eg_match *match, const char *reason) {
  const char *kept = match != NULL && reason != NULL ? keep_text(match, reason) : NULL;
  if (kept != NULL) egi_match_refuse(match->match, kept);
  return 0;
}

static bool check_rule(egi_match *match) {
  const host_rule *host = egi_match_userdata(match);
  eg_match handle = {match};
  if (host->check == NULL || host->check(&handle, host->userdata) != 0) return true;
  return egi_match_refuse(match, "the rule's check refused it");
}

static eg_status run_rule(egi_pass_run *run, egi_graph *graph) {
  const host_rule *host = run->userdata;
  return egi_rules_run(run, graph, &host->rule, 1);
}

/* ---- graphs ---- */

static const egi_node *node_at(const eg_graph *graph, size_t node) {
  return graph != NULL && node + 1 < graph->graph->n_nodes ? &graph->graph->nodes[node + 1] : NULL;
}

size_t eg_graph_node_count(const eg_graph *graph) {
  return graph != NULL ? graph->graph->n_nodes - 1 : 0;
}

int eg_graph_node(const eg_graph *graph, size_t node, eg_node_info *out_info) {
  const egi_node *row = node_at(graph, node);
  if (row == NULL || out_info == NULL) return 0;
  *out_info = (eg_node_info){.name = text_or_empty(row->name),
                             .op = operator_name(row),
                             .domain = row->domain != NULL ? row->domain : egi_op_get(row->op)->domain,
                             .scope = text_or_empty(row->scope),
                             .n_inputs = row->n_inputs,
                             .n_outputs = row->n_outputs};
  return 1;
}

int eg_graph_input(const eg_graph *graph, size_t node, uint32_t input, eg_value_info *out_info) {
  const egi_node *row = node_at(graph, node);
  if (row == NULL || out_info == NULL || input >= row->n_inputs) return 0;
  return describe_value(graph->graph, row->inputs[input], out_info);
}

int eg_graph_output(const eg_graph *graph, size_t node, uint32_t output, eg_value_info *out_info) {
  const egi_node *row = node_at(graph, node);
  if (row == NULL || out_info == NULL || output >= row->n_outputs) return 0;
  return describe_value(graph->graph, row->outputs[output], out_info);
}

int eg_graph_input_number(const eg_graph *graph, size_t node, uint32_t input, double *out_number) {
  const egi_node *row = node_at(graph, node);
  if (row == NULL || out_number == NULL || input >= row->n_inputs) return 0;
  return egi_constant_scalar(graph->graph, row->inputs[input], out_number);
}

int eg_graph_attribute(const eg_graph *graph, size_t node, const char *name, double *out_number) {
  const egi_node *row = node_at(graph, node);
  if (row == NULL || name == NULL || out_number == NULL) return 0;
  return read_number(egi_node_attribute(row, name), out_number);
}

eg_status eg_graph_replace(eg_graph *graph, size_t node, const char *replacement) {
  if (graph == NULL) return EG_ERROR_ARGUMENT;
  if (node_at(graph, node) == NULL || replacement == NULL)
    return egi_fail(graph->run->ctx, EG_ERROR_ARGUMENT, "eg_graph_replace: no such node, or NULL text");
  EG_TRY(EGI_GROW(&graph->arena, &graph->replacements, graph->n_replacements, &graph->capacity));
  const char *text = egi_arena_copy_text(&graph->arena, replacement, strlen(replacement));
  if (text == NULL) return EG_ERROR_MEMORY;
  graph->replacements[graph->n_replacements++] = (egi_replacement){.node = (egi_node_id)(node + 1), .text = text};
  return EG_OK;
}

static eg_status run_pass(egi_pass_run *run, egi_graph *graph) {
  const host_pass *host = run->userdata;
  eg_graph handle = {.run = run, .graph = graph};
  EG_TRY(egi_graph_tidy(graph));
  run->report->n_tried = graph->n_nodes - 1;
  egi_arena_init(&handle.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = host->run(&handle, host->userdata);
  if (status == EG_OK && handle.n_replacements > 0)
    status = egi_rules_replace(run, graph, handle.replacements, handle.n_replacements);
  egi_arena_clear(&handle.arena);
  return status;
}

/* ---- registration ---- */

static eg_status check_name(const eg_model *model, const char *name) {
  if (name == NULL || name[0] == '\0' || strchr(name, ',') != NULL)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "a pass needs a name without commas");
  bool is_taken = egi_pass_find(name) != NULL;
  for (uint32_t i = 0; i < model->n_own_passes; i++)
    is_taken = is_taken || strcmp(model->own_passes[i].name, name) == 0;
  return is_taken ? egi_fail(model->ctx, EG_ERROR_ARGUMENT, "there is a pass named \"%s\" already", name) : EG_OK;
}

static eg_status add_pass(eg_model *model, const char *name, egi_pass_function run, void *userdata) {
  egi_pass_info info = {.stage = EGI_STAGE_RECOGNISE, .summary = "of the host", .run = run, .userdata = userdata};
  info.name = egi_arena_copy_text(&model->arena, name, strlen(name));
  if (info.name == NULL) return EG_ERROR_MEMORY;
  EG_TRY(EGI_GROW(&model->arena, &model->own_passes, model->n_own_passes, &model->own_passes_capacity));
  model->own_passes[model->n_own_passes++] = info;
  return EG_OK;
}

static eg_status copy_rule(eg_model *model, const eg_rule *rule, host_rule *host) {
  const char **patterns = EGI_NEW(&model->arena, const char *, rule->n_patterns);
  if (patterns == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < rule->n_patterns; i++) {
    if (rule->patterns[i] == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "rule %s: NULL pattern", rule->name);
    patterns[i] = egi_arena_copy_text(&model->arena, rule->patterns[i], strlen(rule->patterns[i]));
    if (patterns[i] == NULL) return EG_ERROR_MEMORY;
  }
  host->rule = (egi_rule){.patterns = patterns, .n_patterns = rule->n_patterns, .check = check_rule, .userdata = host};
  host->rule.name = egi_arena_copy_text(&model->arena, rule->name, strlen(rule->name));
  host->rule.replacement = egi_arena_copy_text(&model->arena, rule->replacement, strlen(rule->replacement));
  host->check = rule->check;
  host->userdata = rule->userdata;
  return host->rule.name != NULL && host->rule.replacement != NULL ? EG_OK : EG_ERROR_MEMORY;
}

eg_status eg_model_add_rule(eg_model *model, const eg_rule *rule) {
  eg_rule known = EG_RULE_INIT;
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (rule == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_add_rule: NULL argument");
  EG_TRY(egi_read_options(model->ctx, rule, &known, sizeof known));
  EG_TRY(check_name(model, known.name));
  if (known.patterns == NULL || known.n_patterns == 0 || known.replacement == NULL)
    return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "rule %s: pattern or replacement is missing", known.name);
  host_rule *host = EGI_NEW(&model->arena, host_rule, 1);
  if (host == NULL) return EG_ERROR_MEMORY;
  EG_TRY(copy_rule(model, &known, host));
  EG_TRY(egi_rule_check(model->ctx, &host->rule));
  return add_pass(model, known.name, run_rule, host);
}

eg_status eg_model_add_pass(eg_model *model, const char *name, eg_pass_function run, void *userdata) {
  if (model == NULL) return EG_ERROR_ARGUMENT;
  if (run == NULL) return egi_fail(model->ctx, EG_ERROR_ARGUMENT, "eg_model_add_pass: NULL argument");
  EG_TRY(check_name(model, name));
  host_pass *host = EGI_NEW(&model->arena, host_pass, 1);
  if (host == NULL) return EG_ERROR_MEMORY;
  *host = (host_pass){run, userdata};
  return add_pass(model, name, run_pass, host);
}
