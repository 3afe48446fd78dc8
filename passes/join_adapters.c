/* Adapters beside layers of one input share the product with their A: x·A1ᵀ, x·A2ᵀ, .. become x·[A1; A2; ..]ᵀ and its
 * pieces, so that x is read once, and its gradient and those of the A are one product each. What counts as an adapter's
 * product is a MatMul with the transpose of a parameter that AddMatMul multiplies on, as graft_adapters makes it;
 * dropout gives each adapter an input of its own, and nothing to share. Before differentiate. Terminates: one sweep,
 * linear in the graph; joined products have no second of their input, so that a second run changes nothing. */
#include "passes/passes.h"

enum { MOST_JOINED = 64 }; /* pieces of one product */

typedef struct joiner {
  egi_graph *graph;
  egi_emitter emit;
  egi_arena arena;
  bool *is_multiplied; /* by value: AddMatMul's A */
  egi_node_id *first;  /* by value: first product of that input; 0: none */
  egi_node_id *next;   /* by node: the next of the same input */
  egi_value_id *map;   /* by value: what takes its place */
  uint32_t n_values, n_nodes;
} joiner;

static const egi_node *producer(const egi_graph *graph, egi_value_id value) {
  const egi_value *row = &graph->values[value];
  return row->kind == EGI_VALUE_NODE ? &graph->nodes[row->producer] : NULL;
}

/* The parameter [r, K], in whatever type, of which the node multiplies with the transpose; 0: it does not. */
static egi_value_id adapter_of(const joiner *j, const egi_node *node) {
  const egi_graph *graph = j->graph;
  if (node->op != EGI_OP_MatMul || node->outputs[0] == 0 || !j->is_multiplied[node->outputs[0]]) return 0;
  const egi_node *turn = producer(graph, node->inputs[1]);
  if (turn == NULL || turn->op != EGI_OP_Transpose || graph->values[turn->inputs[0]].rank != 2) return 0;
  egi_value_id parameter = turn->inputs[0], below = parameter;
  const egi_node *cast = producer(graph, below);
  if (cast != NULL && cast->op == EGI_OP_Cast) below = cast->inputs[0];
  return graph->values[below].kind == EGI_VALUE_STATE ? parameter : 0;
}

static eg_status find_products(joiner *j) {
  const egi_graph *graph = j->graph;
  j->is_multiplied = EGI_NEW(&j->arena, bool, j->n_values);
  j->first = EGI_NEW(&j->arena, egi_node_id, j->n_values);
  j->map = EGI_NEW(&j->arena, egi_value_id, j->n_values);
  j->next = EGI_NEW(&j->arena, egi_node_id, j->n_nodes);
  if (j->is_multiplied == NULL || j->first == NULL || j->map == NULL || j->next == NULL) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1; id < j->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_AddMatMul) j->is_multiplied[graph->nodes[id].inputs[1]] = true;
  for (egi_node_id id = j->n_nodes - 1; id > 0; id--) { /* backwards: lists are in order */
    if (adapter_of(j, &graph->nodes[id]) == 0) continue;
    j->next[id] = j->first[graph->nodes[id].inputs[0]];
    j->first[graph->nodes[id].inputs[0]] = id;
  }
  return EG_OK;
}

/* The products of one input from `id` on, of its type and with known ranks. */
static unsigned collect(const joiner *j, egi_node_id id, egi_node_id *products, int64_t *ranks) {
  const egi_graph *graph = j->graph;
  unsigned n = 0;
  for (; id != 0 && n < MOST_JOINED; id = j->next[id]) {
    const egi_value *a = &graph->values[adapter_of(j, &graph->nodes[id])];
    if (a->dtype != graph->values[graph->nodes[id].inputs[0]].dtype) continue;
    if (!egi_dim_value(graph->module->dims, a->dims[0], &ranks[n]) || ranks[n] < 1) continue;
    products[n++] = id;
  }
  return n;
}

static eg_status join(joiner *j, const egi_node_id *products, const int64_t *ranks, unsigned n) {
  egi_graph *graph = j->graph;
  egi_emitter *emit = &j->emit;
  egi_value_id factors[MOST_JOINED], results[MOST_JOINED], pieces[MOST_JOINED];
  const egi_attribute rows = egi_attribute_int("axis", 0), columns = egi_attribute_int("axis", -1);
  egi_value_id x = graph->nodes[products[0]].inputs[0];
  emit->scope = graph->nodes[products[0]].scope;
  for (unsigned i = 0; i < n; i++) {
    factors[i] = adapter_of(j, &graph->nodes[products[i]]);
    results[i] = graph->nodes[products[i]].outputs[0];
  }
  egi_value_id stack = egi_emit_unary(emit, EGI_OP_Transpose, egi_emit(emit, EGI_OP_Concat, factors, n, &rows, 1));
  const egi_value_id cut[2] = {egi_emit_binary(emit, EGI_OP_MatMul, x, stack), egi_emit_integers(emit, ranks, n)};
  egi_emit_many(emit, EGI_OP_Split, cut, 2, &columns, 1, pieces, n);
  for (unsigned i = 0; i < n && emit->status == EG_OK; i++) j->map[results[i]] = pieces[i];
  return emit->status;
}

static eg_status join_all(joiner *j, egi_pass_run *run) {
  EG_TRY(find_products(j));
  bool has_joined = false;
  for (egi_value_id x = 1; x < j->n_values; x++) {
    egi_node_id products[MOST_JOINED];
    int64_t ranks[MOST_JOINED];
    unsigned n = j->first[x] != 0 ? collect(j, j->first[x], products, ranks) : 0;
    if (n > 0) run->report->n_tried++;
    if (n < 2) continue;
    EG_TRY(join(j, products, ranks, n));
    run->report->n_matched++;
    has_joined = true;
  }
  if (!has_joined) return EG_OK;
  egi_value_id *map = EGI_NEW(&j->arena, egi_value_id, j->graph->n_values);
  if (map == NULL) return EG_ERROR_MEMORY;
  memcpy(map, j->map, j->n_values * sizeof *map);
  egi_graph_replace_many(j->graph, map);
  run->has_changed = true;
  return EG_OK;
}

eg_status egi_pass_join_adapters(egi_pass_run *run, egi_graph *graph) {
  joiner j = {.graph = graph, .emit = {.graph = graph}, .n_values = graph->n_values, .n_nodes = graph->n_nodes};
  egi_arena_init(&j.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = join_all(&j, run);
  egi_arena_clear(&j.arena);
  return status;
}
