/* Gradient rule of engraft.MoE: one operator for all inputs; those that nobody trains have no output there. */
#include "graph/moe.h"
#include "passes/passes.h"

static eg_status add_gradient(egi_gradient *gradient, const egi_value_id *inputs, uint16_t n_inputs,
                              egi_value_id *outputs, uint16_t n_outputs) {
  const egi_node forward = gradient->graph->nodes[gradient->node];
  egi_node node = {.op = EGI_OP_MoEGrad, .name = "", .scope = gradient->emit->scope};
  egi_node_id id;
  node.inputs = (egi_value_id *)(uintptr_t)inputs;
  node.outputs = outputs;
  node.attributes = forward.attributes;
  node.n_inputs = n_inputs;
  node.n_outputs = n_outputs;
  node.n_attributes = forward.n_attributes;
  EG_TRY(egi_graph_add_node(gradient->graph, &node, &id));
  for (unsigned i = 0; i < n_outputs; i++) outputs[i] = gradient->graph->nodes[id].outputs[i];
  return egi_infer_node(gradient->graph, id);
}

eg_status egi_gradient_moe(egi_gradient *gradient) {
  egi_arena *arena = &gradient->graph->module->arena;
  uint16_t n_inputs = gradient->graph->nodes[gradient->node].n_inputs, n_outputs = 0;
  bool has_only_result = gradient->out_gradients[0] != 0;
  for (unsigned i = 1; i < gradient->graph->nodes[gradient->node].n_outputs; i++)
    has_only_result = has_only_result && gradient->out_gradients[i] == 0;
  EG_TRY(egi_gradient_require(gradient, has_only_result, "the routing has no gradient"));
  EG_TRY(egi_gradient_require(gradient, !egi_gradient_wants(gradient, EGI_MOE_CORRECTION),
                              "the correction of the choice has no gradient"));
  EG_TRY(egi_gradient_require(gradient, n_inputs <= UINT16_MAX - EGI_MOE_SAVED, "it has too many inputs"));
  egi_value_id *inputs = EGI_NEW(arena, egi_value_id, (size_t)n_inputs + EGI_MOE_SAVED);
  egi_value_id *outputs = EGI_NEW(arena, egi_value_id, n_inputs);
  if (inputs == NULL || outputs == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < n_inputs; i++) {
    inputs[i] = egi_gradient_input(gradient, i);
    outputs[i] = egi_gradient_wants(gradient, i) ? 0 : EGI_VALUE_UNWANTED;
    if (outputs[i] == 0) n_outputs = (uint16_t)(i + 1);
  }
  if (n_outputs == 0) return EG_OK;
  for (unsigned i = 0; i < 3; i++) inputs[n_inputs + i] = egi_gradient_demand(gradient, i + 1);
  inputs[n_inputs + EGI_MOE_DY] = gradient->out_gradients[0];
  EG_TRY(gradient->emit->status);
  EG_TRY(add_gradient(gradient, inputs, (uint16_t)(n_inputs + EGI_MOE_SAVED), outputs, n_outputs));
  for (uint16_t i = 0; i < n_outputs; i++)
    if (outputs[i] != 0 && outputs[i] != EGI_VALUE_UNWANTED) egi_gradient_set(gradient, i, outputs[i]);
  return EG_OK;
}
