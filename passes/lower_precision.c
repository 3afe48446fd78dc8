/* float32 arithmetic becomes bfloat16 or float16 where that is what training in that type means (precision.def):
 * products, attention, norms and activations. The rest, and everything that sums over many numbers or feeds the loss,
 * stays float32; one Cast stands between each value and its users of the other kind. Parameters keep their float32
 * masters, results of the graph stay float32. Precondition: inferred, float32 (widen_floats), before differentiate,
 * whose backward graph then has the types of the forward one. Idempotent: what is narrow stays so. */
#include <string.h>

#include "graph/linear.h"
#include "graph/ragged.h"
#include "passes/passes.h"

typedef enum rule { RULE_NEVER, RULE_ALWAYS, RULE_ANY, RULE_MATRIX, RULE_ALL } rule;

typedef struct precision {
  uint8_t rule;
  uint8_t kept_inputs, kept_outputs; /* a bit each */
} precision;

static const precision precisions[EGI_OP_COUNT] = {
#define PRECISION(symbol, rule, kept_inputs, kept_outputs) [EGI_OP_##symbol] = {RULE_##rule, kept_inputs, kept_outputs},
#include "passes/precision.def"
#undef PRECISION
};

typedef struct lowering {
  egi_graph *graph;
  egi_arena arena;
  eg_dtype dtype;
  uint32_t n_values;        /* before the pass */
  bool *is_low;             /* by value: its type becomes `dtype` */
  bool *is_parameter;       /* by value: of weights and states alone */
  egi_value_id *low, *wide; /* by value: its Cast to the other type; 0: none yet */
} lowering;

static bool is_float(const lowering *l, egi_value_id value) {
  return value != 0 && value < l->n_values && l->graph->values[value].dtype == EG_DTYPE_F32;
}

/* Whether the pass has made it narrow, or it was. */
static bool is_low(const lowering *l, egi_value_id value) {
  return value != 0 && value < l->n_values && (l->is_low[value] || l->graph->values[value].dtype == l->dtype);
}

/* What only parameters lead to is one: its type follows its users'. */
static void mark_parameters(lowering *l) {
  const egi_graph *graph = l->graph;
  for (egi_value_id v = 1; v < l->n_values; v++)
    l->is_parameter[v] = graph->values[v].kind == EGI_VALUE_WEIGHT || graph->values[v].kind == EGI_VALUE_STATE;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    bool is_parameter = node->op != EGI_OP_NONE;
    for (uint16_t i = 0; i < node->n_inputs && is_parameter; i++)
      is_parameter = node->inputs[i] == 0 || l->is_parameter[node->inputs[i]];
    for (uint16_t i = 0; i < node->n_outputs; i++)
      if (node->outputs[i] != 0) l->is_parameter[node->outputs[i]] = is_parameter;
  }
}

/* Scales and zero points of quantised experts, and the rows' weights, are read as they are. */
static eg_status is_kept_ragged(const lowering *l, egi_node_id id, unsigned input, bool *out_is_kept) {
  egi_ragged ragged;
  *out_is_kept = input == EGI_RAGGED_ROW_WEIGHT;
  if (input < EGI_RAGGED_FIRST_ROLE) return EG_OK;
  EG_TRY(egi_ragged_read(l->graph, id, &ragged));
  *out_is_kept = input >= ragged.first[EGI_RAGGED_BIAS] + ragged.counts[EGI_RAGGED_BIAS];
  return EG_OK;
}

static eg_status is_kept(const lowering *l, egi_node_id id, unsigned input, bool *out_is_kept) {
  const egi_node *node = &l->graph->nodes[id];
  if (node->op == EGI_OP_RaggedLinear) return is_kept_ragged(l, id, input, out_is_kept);
  *out_is_kept = input < 8 && (precisions[node->op].kept_inputs >> input & 1) != 0;
  return EG_OK;
}

/* A weight of a layer, not the frequencies that positions are multiplied by. */
static bool is_matrix(const lowering *l, egi_value_id id) {
  const egi_value *value = &l->graph->values[id];
  int64_t rows = 0, columns = 0;
  if (!l->is_parameter[id] || value->rank != 2) return false;
  return egi_dim_value(l->graph->module->dims, value->dims[0], &rows) && rows > 1 &&
         egi_dim_value(l->graph->module->dims, value->dims[1], &columns) && columns > 1;
}

static eg_status decide(const lowering *l, egi_node_id id, bool *out_is_low) {
  const egi_node *node = &l->graph->nodes[id];
  rule by = (rule)precisions[node->op].rule;
  bool has_float = false, has_low = false, has_wide = false, kept = false;
  *out_is_low = false;
  if (by == RULE_NEVER) return EG_OK;
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    egi_value_id value = node->inputs[i];
    EG_TRY(is_kept(l, id, i, &kept));
    if (kept || (!is_float(l, value) && !is_low(l, value))) continue;
    has_float = true;
    has_low = has_low || is_low(l, value) || (by == RULE_MATRIX && is_matrix(l, value));
    has_wide = has_wide || (!is_low(l, value) && !l->is_parameter[value]);
  }
  *out_is_low = has_float && (by == RULE_ALWAYS || (has_low && (by != RULE_ALL || !has_wide)));
  return EG_OK;
}

/* A Cast though the value is still float32 while the pass looks at it. */
static eg_status cast_value(lowering *l, egi_value_id value, eg_dtype dtype, egi_value_id *made) {
  const egi_attribute to = egi_attribute_int("to", dtype);
  egi_emitter emit = {.graph = l->graph};
  if (*made == 0) *made = egi_emit(&emit, EGI_OP_Cast, &value, 1, &to, 1);
  return emit.status;
}

/* The value in the type that the node takes. */
static eg_status convert(lowering *l, egi_node_id id, unsigned input, bool to_low) {
  egi_value_id value = l->graph->nodes[id].inputs[input];
  egi_value_id *made = to_low ? &l->low[value] : &l->wide[value];
  EG_TRY(cast_value(l, value, to_low ? l->dtype : EG_DTYPE_F32, made));
  l->graph->nodes[id].inputs[input] = *made;
  return EG_OK;
}

static eg_status lower_node(lowering *l, egi_node_id id, bool *out_is_changed) {
  bool to_low = false, kept = false;
  EG_TRY(decide(l, id, &to_low));
  for (uint16_t i = 0; i < l->graph->nodes[id].n_inputs; i++) {
    const egi_node *node = &l->graph->nodes[id];
    egi_value_id value = node->inputs[i];
    EG_TRY(is_kept(l, id, i, &kept));
    bool is_wanted_low = to_low && !kept;
    if (is_wanted_low ? is_low(l, value) || !is_float(l, value) : value == 0 || !l->is_low[value]) continue;
    if (!is_wanted_low && node->op == EGI_OP_Cast) continue; /* takes any type */
    EG_TRY(convert(l, id, i, is_wanted_low));
    *out_is_changed = true;
  }
  const egi_node *node = &l->graph->nodes[id];
  for (uint16_t i = 0; i < node->n_outputs && to_low; i++) {
    bool stays = i < 8 && (precisions[node->op].kept_outputs >> i & 1) != 0;
    if (!stays && is_float(l, node->outputs[i])) l->is_low[node->outputs[i]] = *out_is_changed = true;
  }
  return EG_OK;
}

/* What the graph gives is float32 under its old name. */
static eg_status widen_outputs(lowering *l) {
  egi_graph *graph = l->graph;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_value_id value = graph->outputs[i];
    if (value >= l->n_values || !l->is_low[value]) continue;
    EG_TRY(cast_value(l, value, EG_DTYPE_F32, &l->wide[value]));
    const char *name = graph->values[value].name;
    const char *inner = egi_arena_format(&l->arena, "%s.%s", name, egi_dtype_name(l->dtype));
    if (inner == NULL) return EG_ERROR_MEMORY;
    graph->outputs[i] = l->wide[value];
    EG_TRY(egi_graph_rename_value(graph, value, inner));
    EG_TRY(egi_graph_rename_value(graph, l->wide[value], name));
  }
  return EG_OK;
}

static eg_status lower(lowering *l, bool *out_is_changed) {
  egi_graph *graph = l->graph;
  uint32_t n_nodes = graph->n_nodes;
  l->n_values = graph->n_values;
  l->is_low = EGI_NEW(&l->arena, bool, l->n_values);
  l->is_parameter = EGI_NEW(&l->arena, bool, l->n_values);
  l->low = EGI_NEW(&l->arena, egi_value_id, l->n_values);
  l->wide = EGI_NEW(&l->arena, egi_value_id, l->n_values);
  if (!l->is_low || !l->is_parameter || !l->low || !l->wide) return EG_ERROR_MEMORY;
  mark_parameters(l);
  for (egi_node_id id = 1; id < n_nodes; id++)
    if (graph->nodes[id].op != EGI_OP_NONE) EG_TRY(lower_node(l, id, out_is_changed));
  if (!*out_is_changed) return EG_OK;
  EG_TRY(widen_outputs(l));
  EG_TRY(egi_graph_tidy(graph));
  egi_graph_forget_types(graph);
  return egi_infer_graph(graph);
}

eg_status egi_pass_lower_precision(egi_pass_run *run, egi_graph *graph) {
  eg_dtype dtype = run->adapt != NULL ? run->adapt->dtype : EG_DTYPE_UNDEFINED;
  lowering l = {.graph = graph, .dtype = dtype};
  if (dtype != EG_DTYPE_BF16 && dtype != EG_DTYPE_F16) return EG_OK;
  egi_arena_init(&l.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = lower(&l, &run->has_changed);
  egi_arena_clear(&l.arena);
  run->report->n_tried++;
  run->report->n_matched += run->has_changed ? 1 : 0;
  return status;
}
