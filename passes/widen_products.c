/* Matrix products, norms, rotations, softmax and attention over float16 and bfloat16 are computed in float32 and
 * rounded once, for runs that keep the types of the file: Casts stand before and after each such node. Precondition:
 * inferred. Idempotent: afterwards no such node takes a narrow type. */
#include <string.h>

#include "passes/passes.h"

static bool is_narrow(eg_dtype dtype) {
  return dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

static bool is_narrow_product(const egi_graph *graph, const egi_node *node) {
  switch (node->op) {
  case EGI_OP_MatMul:
  case EGI_OP_Gemm:
  case EGI_OP_LayerNormalization:
  case EGI_OP_RMSNormalization:
  case EGI_OP_RotaryEmbedding:
  case EGI_OP_Linear:
  case EGI_OP_Softmax:
  case EGI_OP_LogSoftmax:
  case EGI_OP_Attention:
  case EGI_OP_MoE:
  case EGI_OP_MaskedAttention:
    break;
  default:
    return false;
  }
  for (uint16_t i = 0; i < node->n_inputs; i++)
    if (node->inputs[i] != 0 && is_narrow(graph->values[node->inputs[i]].dtype)) return true;
  return false;
}

/* The result under its old name and in its old type. */
static eg_status narrow_result(egi_graph *graph, const egi_node *node, egi_value_id wide, egi_value_id result,
                               eg_dtype dtype) {
  egi_attribute to = egi_attribute_int("to", dtype);
  egi_node cast = {.op = EGI_OP_Cast, .name = node->name != NULL ? node->name : "", .scope = node->scope};
  egi_node_id id;
  cast.inputs = &wide;
  cast.outputs = &result;
  cast.attributes = &to;
  cast.n_inputs = cast.n_outputs = cast.n_attributes = 1;
  EG_TRY(egi_graph_add_node(graph, &cast, &id));
  return egi_infer_node(graph, id);
}

static eg_status widen(egi_graph *graph, egi_node_id id, egi_arena *arena) {
  egi_node node = graph->nodes[id]; /* its lists stay when it is gone */
  egi_emitter emit = {.graph = graph, .scope = node.scope};
  eg_dtype *dtypes = EGI_NEW(arena, eg_dtype, (size_t)node.n_outputs + 1);
  egi_value_id *inputs = EGI_NEW(arena, egi_value_id, (size_t)node.n_inputs + 1), *results = node.outputs;
  egi_value_id *wide = EGI_NEW(arena, egi_value_id, (size_t)node.n_outputs + 1);
  if (dtypes == NULL || inputs == NULL || wide == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node.n_outputs; i++) {
    dtypes[i] = graph->values[results[i]].dtype;
    wide[i] = results[i] == 0 ? EGI_VALUE_UNWANTED : 0;
  }
  for (uint16_t i = 0; i < node.n_inputs; i++) {
    inputs[i] = node.inputs[i];
    bool is_cast = inputs[i] != 0 && is_narrow(graph->values[inputs[i]].dtype);
    if (is_cast) inputs[i] = egi_emit_cast(&emit, inputs[i], EG_DTYPE_F32);
  }
  EG_TRY(emit.status);
  egi_graph_remove_node(graph, id);
  node.inputs = inputs;
  node.outputs = wide;
  EG_TRY(egi_graph_add_node(graph, &node, &id));
  EG_TRY(egi_infer_node(graph, id));
  for (uint16_t i = 0; i < node.n_outputs; i++)
    if (results[i] != 0) EG_TRY(narrow_result(graph, &node, graph->nodes[id].outputs[i], results[i], dtypes[i]));
  return EG_OK;
}

eg_status egi_pass_widen_products(egi_pass_run *run, egi_graph *graph) {
  egi_arena arena;
  eg_status status = EG_OK;
  egi_arena_init(&arena, run->ctx, EGI_PURPOSE_GRAPH);
  for (egi_node_id id = 1, n = graph->n_nodes; id < n && status == EG_OK; id++) {
    if (graph->nodes[id].op == EGI_OP_NONE || !is_narrow_product(graph, &graph->nodes[id])) continue;
    status = widen(graph, id, &arena);
    run->report->n_matched++;
    run->has_changed = true;
  }
  egi_arena_clear(&arena);
  return status;
}
