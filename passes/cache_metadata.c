/* Documents share a row: one PackedMetadata tells every layer where documents begin and end and which position a token
 * has in its own. Attention takes its bounds from there, what follows positions is looked up by them, inputs of masks
 * and positions go. Precondition: recognised. Where a document's tokens could meet another's, the graph stays as it is
 * and the report says why. A graph that has it already stays. Ends: each node is looked at once. */
#include <string.h>

#include "passes/packing.h"

/* Tokens of a row when nothing is said. */
enum { DEFAULT_TOKENS = 2048 };
enum { FIRST_KEY, LAST_QUERY, POSITIONS, BLOCK_BOUNDS, RESULTS };
enum { INPUT_VALID = 3, INPUT_FIRST_KEY = 5, INPUT_BLOCK_BOUNDS = 7, INPUT_POSITIONS, INPUT_COUNT };

typedef struct cacher {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_packing packing;
  egi_emitter emit;
  egi_value_id results[RESULTS];
  egi_value_id *replaced; /* by table */
} cacher;

/* ---- what is asked ---------------------------------------------------------------------------------------------- */

/* One row of any length. */
static const char *check_sizes(cacher *c) {
  egi_dims *dims = c->graph->module->dims;
  const egi_value *tokens = &c->graph->values[c->packing.tokens];
  int64_t size;
  c->packing.batch = egi_dim_resolve(dims, tokens->dims[0]);
  c->packing.sequence = egi_dim_resolve(dims, tokens->dims[1]);
  if (egi_dim_value(dims, c->packing.batch, &size) && size != 1) return "the model prescribes several rows a batch";
  if (egi_dim_value(dims, c->packing.sequence, &size)) return "the model prescribes the length of a row";
  return NULL;
}

/* Positions and padding, by the names that exporters give them; what else an input holds is not known. */
static bool is_known_input(const egi_value *value) {
  egi_input_kind kind = egi_input_kind_of(value->name);
  bool is_known = kind == EGI_INPUT_MASK || kind == EGI_INPUT_POSITIONS || strcmp(value->name, EGI_INPUT_LABELS) == 0;
  return is_known && (value->rank == 1 || value->rank == 2);
}

static const char *check_inputs(cacher *c) {
  for (uint32_t i = 0; i < c->graph->n_inputs; i++) {
    egi_value_id input = c->graph->inputs[i];
    if (input == c->packing.tokens || is_known_input(&c->graph->values[input])) continue;
    return egi_arena_format(&c->arena, "input \"%s\": what it holds is not known", c->graph->values[input].name);
  }
  return NULL;
}

/* Keys that are not there yet cannot be seen. */
static const char *check_ahead(const cacher *c) {
  const egi_graph *graph = c->graph;
  for (egi_node_id id = 1; id < graph->n_nodes && c->run->is_decoding; id++)
    if (graph->nodes[id].op == EGI_OP_MaskedAttention && egi_node_int(&graph->nodes[id], "causal", 0) != 1)
      return "a token sees those behind it";
  return NULL;
}

static eg_status study(cacher *c, int64_t longest) {
  egi_packing *p = &c->packing;
  if (egi_find_token_input(c->graph, &p->tokens) != EG_OK) {
    p->reason = "the input of tokens is not known";
    return EG_OK;
  }
  p->reason = check_sizes(c);
  if (!p->reason) p->reason = check_inputs(c);
  if (!p->reason) p->reason = check_ahead(c);
  if (p->reason) return EG_OK;
  if (!c->graph->module->evaluator) {
    p->reason = "nothing can be computed to prove it";
    return EG_OK;
  }
  EG_TRY(egi_packing_begin(p));
  EG_TRY(egi_packing_walk(p));
  return p->reason ? EG_OK : egi_packing_prove(p, longest);
}

/* ---- rewriting -------------------------------------------------------------------------------------------------- */

static eg_status add_metadata(cacher *c) {
  egi_graph *graph = c->graph;
  egi_dims *dims = graph->module->dims;
  const egi_dim size = egi_dim_symbol(dims, EGI_INPUT_OFFSETS);
  egi_value_id offsets;
  int64_t known;
  if (!egi_dim_value(dims, c->packing.batch, &known))
    EG_TRY(egi_dim_assume(dims, c->packing.batch, egi_dim_constant(dims, 1)));
  if (c->run->is_decoding)
    return egi_graph_add_input(graph, EGI_INPUT_ROW_POSITIONS, EG_DTYPE_I32, 1, &c->packing.sequence,
                               &c->results[POSITIONS]);
  EG_TRY(egi_graph_add_input(graph, EGI_INPUT_OFFSETS, EG_DTYPE_I32, 1, &size, &offsets));
  const egi_value_id inputs[2] = {offsets, c->packing.tokens};
  const egi_attribute block = egi_attribute_int("block", c->run->block);
  bool has_blocks = c->run->block > 0;
  egi_emit_many(&c->emit, EGI_OP_PackedMetadata, inputs, 2, &block, has_blocks, c->results,
                has_blocks ? RESULTS : BLOCK_BOUNDS);
  return c->emit.status;
}

/* Positions in the type and shape of a table of them. */
static egi_value_id emit_positions(cacher *c, const egi_position_table *table) {
  const egi_value *value = &c->graph->values[table->value];
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  eg_dtype dtype = value->dtype;
  for (int i = 0; i < value->rank; i++)
    if (i != table->axis) axes[count++] = i;
  egi_value_id positions = egi_emit_cast(&c->emit, c->results[POSITIONS], dtype);
  if (count == 0) return positions;
  return egi_emit_binary(&c->emit, EGI_OP_Unsqueeze, positions, egi_emit_integers(&c->emit, axes, count));
}

/* A piece of a row is shorter than the table of the whole one, which is computed now. */
static eg_status make_whole_table(cacher *c, const egi_position_table *table, egi_value_id *out_value) {
  egi_tensor tensor;
  EG_TRY(egi_packing_evaluate(&c->packing, table->value, c->run->tokens, &c->graph->module->arena, &tensor));
  if (c->packing.reason != NULL)
    return egi_fail(c->run->ctx, EG_ERROR_UNSUPPORTED, "value \"%s\": %s", c->graph->values[table->value].name,
                    c->packing.reason);
  return egi_add_constant(c->graph, c->graph->values[table->value].name, &tensor, out_value);
}

static eg_status emit_lookup(cacher *c, const egi_position_table *table, egi_value_id *out_value) {
  const egi_attribute axis = egi_attribute_int("axis", table->axis);
  egi_value_id inputs[2] = {table->value, c->results[POSITIONS]};
  if (c->run->is_decoding && c->graph->values[table->value].kind == EGI_VALUE_NODE)
    EG_TRY(make_whole_table(c, table, &inputs[0]));
  *out_value = egi_emit(&c->emit, EGI_OP_Gather, inputs, 2, &axis, 1);
  return c->emit.status;
}

static eg_status make_tables(cacher *c) {
  const egi_packing *p = &c->packing;
  c->replaced = EGI_NEW(&c->arena, egi_value_id, (size_t)p->n_tables + 1);
  if (!c->replaced) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < p->n_tables; i++) {
    const egi_position_table *table = &p->tables[i];
    if (table->axis < 0 || table->is_valid) continue;
    if (table->is_counts)
      c->replaced[i] = emit_positions(c, table);
    else
      EG_TRY(emit_lookup(c, table, &c->replaced[i]));
    EG_TRY(c->emit.status);
  }
  return EG_OK;
}

static eg_status bound_attention(cacher *c, egi_node_id id) {
  egi_node *node = &c->graph->nodes[id];
  egi_value_id *inputs = EGI_NEW(&c->graph->module->arena, egi_value_id, INPUT_COUNT);
  if (!inputs) return EG_ERROR_MEMORY;
  memcpy(inputs, node->inputs, node->n_inputs * sizeof *inputs);
  inputs[INPUT_VALID] = 0;
  inputs[INPUT_FIRST_KEY] = c->results[FIRST_KEY];
  inputs[INPUT_FIRST_KEY + 1] = c->results[LAST_QUERY];
  inputs[INPUT_BLOCK_BOUNDS] = c->results[BLOCK_BOUNDS];
  inputs[INPUT_POSITIONS] = c->run->is_decoding ? c->results[POSITIONS] : 0;
  node->inputs = inputs;
  node->n_inputs = c->run->is_decoding             ? INPUT_COUNT
                   : c->results[BLOCK_BOUNDS] != 0 ? INPUT_POSITIONS
                                                   : INPUT_BLOCK_BOUNDS;
  c->run->report->n_matched++;
  const egi_attribute block = egi_attribute_int("block", c->run->block);
  if (c->results[BLOCK_BOUNDS] != 0) EG_TRY(egi_node_set_attribute(c->graph, id, &block));
  return egi_infer_node(c->graph, id);
}

/* Nodes that tokens decide take the tables' replacements; `n_nodes` of before. */
static eg_status rewire(cacher *c, egi_node_id n_nodes, uint32_t n_values) {
  const egi_packing *p = &c->packing;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    egi_node *node = &c->graph->nodes[id];
    bool is_beside = true; /* no token decides its results */
    for (uint16_t i = 0; i < node->n_outputs; i++)
      if (node->outputs[i] != 0 && p->is_token[node->outputs[i]]) is_beside = false;
    if (node->op == EGI_OP_NONE || is_beside) continue;
    for (uint16_t i = 0; i < node->n_inputs; i++) {
      egi_value_id input = node->inputs[i];
      uint32_t table = input < n_values && !egi_packing_is_shape(node->op, i) ? p->table[input] : 0;
      if (table != 0 && c->replaced[table - 1] != 0) node->inputs[i] = c->replaced[table - 1];
    }
    if (node->op == EGI_OP_MaskedAttention) EG_TRY(bound_attention(c, id));
  }
  return EG_OK;
}

/* ---- inputs ----------------------------------------------------------------------------------------------------- */

/* What a table that is looked up still reads: positions in order, or no padding, as many as there are tokens. */
static eg_status replace_input(cacher *c, egi_value_id input) {
  const egi_value *value = &c->graph->values[input];
  int rank = value->rank;
  eg_dtype dtype = value->dtype;
  bool is_positions = egi_input_kind_of(value->name) == EGI_INPUT_POSITIONS;
  const egi_attribute from = egi_attribute_int("start", 1);
  egi_emitter *emit = &c->emit;
  egi_value_id length = egi_emit(emit, EGI_OP_Shape, &c->packing.tokens, 1, &from, 1), made;
  if (is_positions) {
    const egi_value_id range[3] = {egi_emit_scalar(emit, 0, EG_DTYPE_I64), egi_emit_unary(emit, EGI_OP_Squeeze, length),
                                   egi_emit_scalar(emit, 1, EG_DTYPE_I64)};
    made = egi_emit_cast(emit, egi_emit(emit, EGI_OP_Range, range, 3, NULL, 0), dtype);
  } else {
    made = egi_emit_binary(emit, EGI_OP_Expand, egi_emit_scalar(emit, 1, dtype), length);
  }
  const int64_t first = 0;
  if (rank == 2) made = egi_emit_binary(emit, EGI_OP_Unsqueeze, made, egi_emit_integers(emit, &first, 1));
  EG_TRY(emit->status);
  egi_graph_replace_uses(c->graph, input, made);
  return EG_OK;
}

static bool is_kept(const cacher *c, egi_value_id input) {
  return c->packing.is_token[input];
}

/* Every input but the tokens, their labels and the offsets, which were added last. */
static eg_status remove_inputs(cacher *c) {
  egi_graph *graph = c->graph;
  uint32_t kept = 0, n_inputs = graph->n_inputs - 1;
  egi_uses uses;
  egi_pass_report dead = {0};
  egi_pass_run clean = {.ctx = c->run->ctx, .report = &dead};
  EG_TRY(egi_graph_tidy(graph));
  EG_TRY(egi_pass_eliminate_dead(&clean, graph));
  EG_TRY(egi_graph_tidy(graph));
  EG_TRY(egi_graph_uses(graph, &c->arena, &uses));
  for (uint32_t i = 0; i < n_inputs; i++) {
    egi_value_id input = graph->inputs[i];
    if (!is_kept(c, input) && uses.start[input] != uses.start[input + 1]) EG_TRY(replace_input(c, input));
  }
  for (uint32_t i = 0; i < n_inputs + 1; i++) {
    egi_value_id input = graph->inputs[i];
    if (i < n_inputs && !is_kept(c, input)) {
      egi_graph_delete_value(graph, input);
      continue;
    }
    graph->values[input].index = kept;
    graph->inputs[kept++] = input;
  }
  graph->n_inputs = kept;
  return egi_graph_tidy(graph);
}

static eg_status rewrite(cacher *c) {
  egi_node_id n_nodes = c->graph->n_nodes;
  uint32_t n_values = c->graph->n_values;
  c->emit = (egi_emitter){.graph = c->graph};
  EG_TRY(add_metadata(c));
  EG_TRY(make_tables(c));
  EG_TRY(rewire(c, n_nodes, n_values));
  c->run->has_changed = true;
  return remove_inputs(c);
}

static eg_status cache(cacher *c) {
  egi_pass_run *run = c->run;
  EG_TRY(study(c, run->tokens > 0 ? run->tokens : DEFAULT_TOKENS));
  run->report->n_tried++;
  if (!c->packing.reason) return rewrite(c);
  run->report->nearest_miss =
      egi_arena_copy_text(&c->graph->module->arena, c->packing.reason, strlen(c->packing.reason));
  return run->report->nearest_miss ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_pass_cache_metadata(egi_pass_run *run, egi_graph *graph) {
  cacher c = {.run = run, .graph = graph};
  if (egi_graph_find_value(graph, EGI_INPUT_OFFSETS) != 0 || egi_graph_find_value(graph, EGI_INPUT_ROW_POSITIONS) != 0)
    return EG_OK;
  egi_arena_init(&c.arena, run->ctx, EGI_PURPOSE_GRAPH);
  c.packing.graph = graph;
  c.packing.arena = &c.arena;
  eg_status status = cache(&c);
  egi_arena_clear(&c.arena);
  return status;
}

/* ---- comparison ------------------------------------------------------------------------------------------------- */

/* The same node once more. */
static void emit_again(egi_emitter *emit, egi_node_id id, bool is_read_back, egi_value_id own[RESULTS]) {
  const egi_node *node = &emit->graph->nodes[id];
  const egi_attribute attributes[2] = {egi_attribute_int("block", egi_node_int(node, "block", EGI_BLOCK_ROWS)),
                                       egi_attribute_int("readback", 1)};
  const egi_value_id offsets[2] = {node->inputs[0], node->inputs[1]};
  unsigned n_results = node->n_outputs > BLOCK_BOUNDS ? RESULTS : BLOCK_BOUNDS;
  egi_emit_many(emit, EGI_OP_PackedMetadata, offsets, 2, attributes, is_read_back ? 2 : 1, own, n_results);
}

eg_status egi_rebuild_metadata(egi_graph *graph, bool is_read_back) {
  egi_emitter emit = {.graph = graph};
  egi_node_id n_nodes = graph->n_nodes;
  for (egi_node_id id = 1; id < n_nodes; id++) {
    egi_value_id own[RESULTS] = {0};
    for (uint16_t i = 0; i < graph->nodes[id].n_inputs; i++) {
      egi_value_id input = graph->nodes[id].inputs[i];
      const egi_value *value = &graph->values[input];
      if (input == 0 || value->kind != EGI_VALUE_NODE || value->producer >= n_nodes) continue;
      const egi_node *producer = &graph->nodes[value->producer];
      if (producer->op != EGI_OP_PackedMetadata) continue;
      uint16_t result = 0;
      while (producer->outputs[result] != input) result++;
      emit.scope = graph->nodes[id].scope;
      if (own[0] == 0) emit_again(&emit, value->producer, is_read_back, own);
      EG_TRY(emit.status);
      graph->nodes[id].inputs[i] = own[result];
    }
  }
  EG_TRY(egi_graph_tidy(graph));
  egi_pass_report dead = {0};
  egi_pass_run clean = {.ctx = graph->module->ctx, .report = &dead};
  EG_TRY(egi_pass_eliminate_dead(&clean, graph));
  return egi_graph_tidy(graph);
}
