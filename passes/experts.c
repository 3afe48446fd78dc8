/* Parameters of experts, to be found by name and given adapters: the stacks gate_up_proj and down_proj of each mixture,
 * whatever pieces a file has them in. */
#include "passes/experts.h"

#include <string.h>

eg_status egi_experts_path(const egi_graph *graph, egi_node_id node, egi_arena *arena, const char **out_path) {
  const char *scope = graph->nodes[node].scope;
  if (scope == NULL) scope = "";
  const char *experts = strstr(scope, ".experts");
  while (experts != NULL && experts[strlen(".experts")] != '\0' && experts[strlen(".experts")] != '.')
    experts = strstr(experts + 1, ".experts");
  if (experts != NULL)
    *out_path = egi_arena_copy_text(arena, scope, (size_t)(experts - scope) + strlen(".experts"));
  else
    *out_path = egi_arena_format(arena, "%s%sexperts", scope, scope[0] != '\0' ? "." : "");
  return *out_path != NULL ? EG_OK : EG_ERROR_MEMORY;
}

const char *egi_experts_leaf(const egi_moe *moe, egi_moe_role role) {
  bool is_gated = moe->form != EGI_MOE_UNGATED;
  if (role == EGI_MOE_DOWN || role == EGI_MOE_DOWN_BIAS) return role == EGI_MOE_DOWN ? "down_proj" : "down_proj_bias";
  if (role == EGI_MOE_GATE) return is_gated ? "gate_up_proj" : "up_proj";
  return is_gated ? "gate_up_proj_bias" : "up_proj_bias";
}

/* ---- listing -------------------------------------------------------------------------------------------------- */

/* Rows of gate's matrices, with up's where they stand alone; *out_inner: columns of down's operand. */
static bool find_sizes(const egi_graph *graph, egi_node_id id, const egi_moe *moe, int64_t *out_rows,
                       int64_t *out_inner) {
  const egi_value *gate = &graph->values[graph->nodes[id].inputs[moe->first[EGI_MOE_GATE]]];
  if (gate->rank < 2) return false;
  egi_dim dim = gate->dims[gate->rank - (moe->is_transposed[0] ? 1 : 2)];
  if (!egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, dim), out_rows)) return false;
  bool is_joint = moe->form == EGI_MOE_CONCATENATED || moe->form == EGI_MOE_INTERLEAVED;
  *out_inner = is_joint ? *out_rows / 2 : *out_rows;
  if (moe->form == EGI_MOE_SEPARATE) *out_rows *= 2;
  return true;
}

static eg_status add_node(const egi_graph *graph, egi_node_id id, egi_arena *arena, egi_expert_parameter *out,
                          size_t *out_count) {
  static const egi_moe_role roles[] = {EGI_MOE_GATE, EGI_MOE_DOWN};
  const egi_value *x = &graph->values[graph->nodes[id].inputs[EGI_MOE_X]];
  int64_t rows = 0, inner = 0, width = 0;
  const char *path = NULL;
  egi_moe moe;
  EG_TRY(egi_moe_read(graph, id, &moe));
  EG_TRY(egi_experts_path(graph, id, arena, &path));
  bool is_known =
      x->rank > 0 && find_sizes(graph, id, &moe, &rows, &inner) &&
      egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, x->dims[x->rank - 1]), &width);
  for (size_t i = 0; is_known && i < EGI_COUNT(roles); i++) {
    bool is_down = roles[i] == EGI_MOE_DOWN;
    egi_expert_parameter parameter = {.module = path,
                                      .node = id,
                                      .is_down = is_down,
                                      .is_gated = moe.form != EGI_MOE_UNGATED,
                                      .is_interleaved = moe.form == EGI_MOE_INTERLEAVED,
                                      .n_experts = moe.n_experts,
                                      .in_features = is_down ? inner : width,
                                      .out_features = is_down ? width : rows};
    parameter.name = egi_arena_format(arena, "%s.%s", path, egi_experts_leaf(&moe, roles[i]));
    if (parameter.name == NULL) return EG_ERROR_MEMORY;
    out[(*out_count)++] = parameter;
  }
  return EG_OK;
}

eg_status egi_find_experts(const egi_graph *graph, egi_arena *arena, egi_expert_parameter **out_parameters,
                           size_t *out_count) {
  size_t n_nodes = 0;
  *out_count = 0;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) n_nodes += graph->nodes[id].op == EGI_OP_MoE;
  *out_parameters = EGI_NEW(arena, egi_expert_parameter, 2 * n_nodes + 1);
  if (*out_parameters == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_MoE) EG_TRY(add_node(graph, id, arena, *out_parameters, out_count));
  return EG_OK;
}

const char *egi_expert_tensors(egi_arena *arena, const egi_expert_parameter *parameter, bool has_down_adapter) {
  bool is_wrapped = !parameter->is_down && has_down_adapter;
  return egi_arena_format(arena, "%s%s", parameter->module, is_wrapped ? ".base_layer" : "");
}

/* ---- adapters ------------------------------------------------------------------------------------------------- */

/* Puts A and B behind the operands that stand before them. */
static eg_status put_adapter(egi_graph *graph, egi_node_id id, egi_moe_role role, egi_value_id a, egi_value_id b,
                             double scale) {
  egi_arena *arena = &graph->module->arena;
  egi_moe moe;
  EG_TRY(egi_moe_read(graph, id, &moe));
  egi_moe_role at = egi_moe_adapter(role);
  if (moe.counts[at] > 0) return egi_fail_node(graph, id, EG_ERROR_INTERNAL, "it has that adapter already");
  egi_value_id *inputs = EGI_NEW(arena, egi_value_id, (size_t)moe.n_inputs + 2);
  int64_t roles[EGI_MOE_ROLES];
  float scales[3];
  if (inputs == NULL) return EG_ERROR_MEMORY;
  const egi_value_id *old = graph->nodes[id].inputs;
  uint32_t first = moe.first[at];
  memcpy(inputs, old, first * sizeof *inputs);
  inputs[first] = a;
  inputs[first + 1] = b;
  memcpy(inputs + first + 2, old + first, (moe.n_inputs - first) * sizeof *inputs);
  for (unsigned i = 0; i < EGI_MOE_ROLES; i++) roles[i] = moe.counts[i];
  roles[at] = roles[at + 1] = 1;
  for (unsigned i = 0; i < 3; i++) scales[i] = (float)(i == role / 2 ? scale : moe.adapter_scales[i]);
  graph->nodes[id].inputs = inputs;
  graph->nodes[id].n_inputs = (uint16_t)(moe.n_inputs + 2);
  const egi_attribute counts = egi_attribute_ints("roles", roles, EGI_MOE_ROLES);
  const egi_attribute factors = {
      .name = "adapter_scales", .kind = EGI_ATTRIBUTE_FLOATS, .count = 3, .u.floats = scales};
  EG_TRY(egi_node_set_attribute(graph, id, &counts));
  return egi_node_set_attribute(graph, id, &factors);
}

eg_status egi_graft_experts(egi_graph *graph, const egi_expert_parameter *parameter, egi_value_id a, egi_value_id b,
                            double scale) {
  egi_moe moe;
  EG_TRY(egi_moe_read(graph, parameter->node, &moe));
  if (parameter->is_down) return put_adapter(graph, parameter->node, EGI_MOE_DOWN, a, b, scale);
  if (moe.form != EGI_MOE_SEPARATE) return put_adapter(graph, parameter->node, EGI_MOE_GATE, a, b, scale);
  egi_emitter emit = {.graph = graph, .scope = parameter->module};
  const egi_attribute halves[2] = {egi_attribute_int("axis", 0), egi_attribute_int("num_outputs", 2)};
  egi_value_id parts[2] = {0, 0};
  egi_emit_many(&emit, EGI_OP_Split, &b, 1, halves, 2, parts, 2);
  EG_TRY(emit.status);
  EG_TRY(put_adapter(graph, parameter->node, EGI_MOE_GATE, a, parts[0], scale));
  return put_adapter(graph, parameter->node, EGI_MOE_UP, a, parts[1], scale);
}
