/* Caches of keys and values are bound empty: training and an ordinary run begin without a past. The length of each
 * becomes 0, what was joined to it stands alone, attention loses its past, and the outputs that held the longer cache
 * go. A cache of fixed length that new keys are written into (TensorScatter) is left out the same way. Nothing happens
 * where inputs may be any (is_general). Ends: every input is bound once. */
#include <string.h>

#include "passes/passes.h"

typedef struct binder {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_uses uses;
  bool *is_bound;  /* by value: an input that is a cache */
  bool *is_joined; /* by value: a cache with what was added */
} binder;

static bool names_cache(const char *name) {
  return strstr(name, "past") != NULL || strstr(name, "cache") != NULL;
}

static bool names_present(const char *name) {
  return strstr(name, "present") != NULL || names_cache(name);
}

/* ---- finding the length ----------------------------------------------------------------------------------------- */

static bool is_free(const egi_graph *graph, egi_dim dim) {
  egi_dims *dims = graph->module->dims;
  int64_t number;
  return !egi_dim_value(dims, egi_dim_resolve(dims, dim), &number);
}

/* The axis that a use of the input as a cache shows, or -1: it is joined in front of something, or an Attention's past.
 */
static int axis_of_use(const egi_graph *graph, const egi_node *node, egi_value_id input) {
  const egi_value *value = &graph->values[input];
  int64_t axis = egi_node_int(node, "axis", 0);
  if (node->op == EGI_OP_Attention)
    for (uint16_t i = 4; i <= 5 && i < node->n_inputs; i++)
      if (node->inputs[i] == input) return 2;
  if (node->op != EGI_OP_Concat || node->inputs[0] != input || node->n_inputs < 2) return -1;
  axis = axis < 0 ? axis + value->rank : axis;
  return axis > 0 && axis < value->rank ? (int)axis : -1;
}

/* The first free axis that is neither batch nor sequence, for caches that are taken apart before they are joined. */
static int first_free_axis(const egi_graph *graph, const egi_value *value) {
  egi_dims *dims = graph->module->dims;
  egi_value_id tokens;
  if (egi_find_token_input(graph, &tokens) != EG_OK || graph->values[tokens].rank != 2) return -1;
  for (int axis = 1; axis < value->rank; axis++) {
    egi_dim dim = egi_dim_resolve(dims, value->dims[axis]);
    bool is_other = dim != egi_dim_resolve(dims, graph->values[tokens].dims[0]) &&
                    dim != egi_dim_resolve(dims, graph->values[tokens].dims[1]);
    if (is_other && is_free(graph, dim)) return axis;
  }
  return -1;
}

/* The axis of the cache's length, or -1: the input is none. Without a name it must be joined and given back. */
static int find_axis(const binder *b, egi_value_id input) {
  const egi_graph *graph = b->graph;
  const egi_value *value = &graph->values[input];
  bool is_named = names_cache(value->name);
  if (value->rank < 3 || !egi_dtype_is_float(value->dtype)) return -1;
  for (uint32_t u = b->uses.start[input]; u < b->uses.start[input + 1]; u++) {
    const egi_node *node = &graph->nodes[b->uses.list[u]];
    int axis = axis_of_use(graph, node, input);
    if (axis < 0 || !is_free(graph, value->dims[axis])) continue;
    if (is_named || node->op == EGI_OP_Attention || egi_graph_is_output(graph, node->outputs[0])) return axis;
  }
  return is_named ? first_free_axis(graph, value) : -1;
}

/* All axes are found before the first length is 0: caches share theirs. */
static eg_status bind_inputs(binder *b, uint32_t *out_count) {
  egi_graph *graph = b->graph;
  egi_dims *dims = graph->module->dims;
  int *axes = EGI_NEW(&b->arena, int, (size_t)graph->n_inputs + 1);
  if (!axes) return EG_ERROR_MEMORY;
  *out_count = 0;
  for (uint32_t i = 0; i < graph->n_inputs; i++) axes[i] = find_axis(b, graph->inputs[i]);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    if (axes[i] < 0) continue;
    EG_TRY(egi_dim_fix(dims, graph->values[graph->inputs[i]].dims[axes[i]], 0));
    b->is_bound[graph->inputs[i]] = true;
    b->run->report->n_tried++;
    ++*out_count;
  }
  return EG_OK;
}

/* ---- caches that are written into ------------------------------------------------------------------------------- */

/* ScatterElements(cache, places, update), which TensorScatter is lowered to, of a graph input: the update, or 0. */
static egi_value_id find_update(const egi_graph *graph, egi_value_id value, egi_value_id *out_cache) {
  if (graph->values[value].kind != EGI_VALUE_NODE) return 0;
  const egi_node *node = &graph->nodes[graph->values[value].producer];
  if (node->op != EGI_OP_ScatterElements || graph->values[node->inputs[0]].kind != EGI_VALUE_INPUT) return 0;
  const egi_value *cache = &graph->values[node->inputs[0]];
  if (cache->rank < 3 || !egi_dtype_is_float(cache->dtype)) return 0;
  *out_cache = node->inputs[0];
  return node->inputs[2];
}

static bool is_of_length(const egi_graph *graph, egi_value_id query, egi_value_id update) {
  egi_dims *dims = graph->module->dims;
  const egi_value *q = &graph->values[query], *k = &graph->values[update];
  return q->rank == k->rank && q->rank >= 3 &&
         egi_dim_resolve(dims, q->dims[q->rank - 2]) == egi_dim_resolve(dims, k->dims[k->rank - 2]);
}

/* Attention over such caches as far as nonpad_kv_seqlen says: written at 0, the new keys are all there is. */
static void bind_written(binder *b, uint32_t *count) {
  egi_graph *graph = b->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    egi_node *node = &graph->nodes[id];
    egi_value_id caches[2] = {0, 0};
    if (node->op != EGI_OP_Attention || node->n_inputs < 7 || node->inputs[6] == 0 || node->inputs[3] != 0) continue;
    egi_value_id key = find_update(graph, node->inputs[1], &caches[0]);
    egi_value_id value = find_update(graph, node->inputs[2], &caches[1]);
    if (key == 0 || value == 0 || !is_of_length(graph, node->inputs[0], key)) continue;
    for (unsigned i = 0; i < 2; i++) {
      b->is_joined[node->inputs[1 + i]] = b->is_bound[caches[i]] = true;
      b->run->report->n_tried++;
      ++*count;
    }
    node->inputs[1] = key;
    node->inputs[2] = value;
    node->n_inputs = 3;
  }
}

/* ---- what is empty now ------------------------------------------------------------------------------------------ */

static bool is_empty(const egi_graph *graph, egi_value_id id) {
  egi_dims *dims = graph->module->dims;
  const egi_value *value = &graph->values[id];
  int64_t size;
  for (int i = 0; i < value->rank; i++)
    if (egi_dim_value(dims, egi_dim_resolve(dims, value->dims[i]), &size) && size == 0) return true;
  return false;
}

/* Inputs of a Concat of floats that hold something; true when some hold nothing. */
static bool shorten_concat(egi_graph *graph, egi_node *node) {
  uint16_t kept = 0;
  if (node->op != EGI_OP_Concat || !egi_dtype_is_float(graph->values[node->outputs[0]].dtype)) return false;
  for (uint16_t i = 0; i < node->n_inputs; i++)
    if (!is_empty(graph, node->inputs[i])) kept++;
  if (kept == 0 || kept == node->n_inputs) return false;
  kept = 0;
  for (uint16_t i = 0; i < node->n_inputs; i++)
    if (!is_empty(graph, node->inputs[i])) node->inputs[kept++] = node->inputs[i];
  node->n_inputs = kept;
  return true;
}

static void drop_past(egi_graph *graph, egi_node *node) {
  if (node->op != EGI_OP_Attention || node->n_inputs < 6 || node->inputs[4] == 0 || node->inputs[5] == 0) return;
  if (!is_empty(graph, node->inputs[4]) || !is_empty(graph, node->inputs[5])) return;
  node->inputs[4] = node->inputs[5] = 0;
  while (node->n_inputs > 3 && node->inputs[node->n_inputs - 1] == 0) node->n_inputs--;
}

/* Outputs that hold a cache: named so, joined from one, or an Attention's present. At least one output stays. */
static void drop_outputs(egi_graph *graph, const bool *is_joined) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    const egi_value *value = &graph->values[graph->outputs[i]];
    bool is_present = is_joined[graph->outputs[i]] || (value->rank >= 3 && names_present(value->name));
    if (value->kind == EGI_VALUE_NODE && graph->nodes[value->producer].op == EGI_OP_Attention && value->index > 0)
      is_present = true;
    if (!is_present || (kept == 0 && i + 1 == graph->n_outputs)) graph->outputs[kept++] = graph->outputs[i];
  }
  graph->n_outputs = kept;
}

/* Results of an Attention that nobody takes any more. */
static void drop_results(egi_graph *graph, const egi_uses *uses, egi_node *node) {
  for (uint16_t i = 1; i < node->n_outputs && node->op == EGI_OP_Attention; i++) {
    egi_value_id id = node->outputs[i];
    if (id == 0 || uses->start[id] != uses->start[id + 1] || egi_graph_is_output(graph, id)) continue;
    node->outputs[i] = 0;
    egi_graph_delete_value(graph, id);
  }
}

static eg_status remove_empties(binder *b) {
  egi_graph *graph = b->graph;
  egi_redirect redirect;
  bool *is_joined = b->is_joined, is_done = false;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].op == EGI_OP_NONE) continue;
    drop_past(graph, &graph->nodes[id]);
    if (shorten_concat(graph, &graph->nodes[id])) is_joined[graph->nodes[id].outputs[0]] = true;
  }
  drop_outputs(graph, is_joined);
  EG_TRY(egi_redirect_init(&redirect, graph));
  eg_status status = EG_OK;
  for (egi_node_id id = 1; id < graph->n_nodes && status == EG_OK; id++) {
    egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE) continue;
    egi_redirect_node(&redirect, id);
    drop_results(graph, &b->uses, node);
    if (node->op == EGI_OP_Concat && node->n_inputs == 1 && is_joined[node->outputs[0]])
      status = egi_redirect_put(&redirect, node->outputs[0], node->inputs[0], &is_done);
  }
  if (status == EG_OK) egi_redirect_apply(&redirect);
  egi_redirect_free(&redirect);
  return status;
}

/* ---- shapes of caches ------------------------------------------------------------------------------------------- */

/* An input that stays and has that size: its axis, or -1. */
static int find_size(const binder *b, egi_dim dim, egi_value_id *out_input) {
  const egi_graph *graph = b->graph;
  egi_dims *dims = graph->module->dims;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    for (int axis = 0; axis < value->rank && !b->is_bound[graph->inputs[i]]; axis++) {
      if (egi_dim_resolve(dims, value->dims[axis]) != egi_dim_resolve(dims, dim)) continue;
      *out_input = graph->inputs[i];
      return axis;
    }
  }
  return -1;
}

/* The sizes that a Shape of a cache gives, from numbers and other inputs; 0 when one is the cache's alone. */
static egi_value_id emit_sizes(const binder *b, egi_emitter *emit, const egi_node *node) {
  egi_graph *graph = b->graph;
  egi_value_id input = node->inputs[0], pieces[EGI_MAX_RANK], source = 0;
  int rank = graph->values[input].rank, axis = -1;
  int64_t start = egi_node_int(node, "start", 0), end = egi_node_int(node, "end", rank), size;
  unsigned n = 0;
  start = start < 0 ? start + rank : start;
  end = end < 0 ? end + rank : end > rank ? rank : end;
  for (int64_t i = start < 0 ? 0 : start; i < end; i++) {
    egi_dim dim = egi_dim_resolve(graph->module->dims, graph->values[input].dims[i]);
    bool is_number = egi_dim_value(graph->module->dims, dim, &size);
    if (!is_number && (axis = find_size(b, dim, &source)) < 0) return 0;
    const egi_attribute range[2] = {egi_attribute_int("start", axis), egi_attribute_int("end", axis + 1)};
    pieces[n++] = is_number ? egi_emit_integers(emit, &size, 1) : egi_emit(emit, EGI_OP_Shape, &source, 1, range, 2);
  }
  const egi_attribute first = egi_attribute_int("axis", 0);
  if (n == 0) return 0;
  return n == 1 ? pieces[0] : egi_emit(emit, EGI_OP_Concat, pieces, n, &first, 1);
}

/* Exporters take the batch from any input: Shapes of caches become Shapes of other inputs. */
static eg_status replace_shapes(binder *b) {
  egi_graph *graph = b->graph;
  egi_value_id *to = EGI_NEW(&b->arena, egi_value_id, (size_t)graph->n_values + 1);
  uint32_t n_values = graph->n_values;
  if (!to) return EG_ERROR_MEMORY;
  for (egi_node_id id = 1, n = graph->n_nodes; id < n; id++) {
    egi_node node = graph->nodes[id];
    if (node.op != EGI_OP_Shape || !b->is_bound[node.inputs[0]] || egi_graph_is_output(graph, node.outputs[0]))
      continue;
    egi_emitter emit = {.graph = graph, .scope = node.scope};
    to[node.outputs[0]] = emit_sizes(b, &emit, &node);
    EG_TRY(emit.status);
  }
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    for (uint16_t i = 0; i < graph->nodes[id].n_inputs; i++) {
      egi_value_id old = graph->nodes[id].inputs[i];
      if (old < n_values && to[old] != 0) graph->nodes[id].inputs[i] = to[old];
    }
  return egi_graph_tidy(graph);
}

/* ---- cleaning up ------------------------------------------------------------------------------------------------ */

/* Types anew, with the lengths that are known now; then what follows from them. */
static eg_status settle(binder *b) {
  egi_graph *graph = b->graph;
  egi_dims *dims = graph->module->dims;
  egi_pass_report dead = {0};
  egi_pass_run clean = {.ctx = b->run->ctx, .report = &dead};
  static const egi_pipeline_options options;
  EG_TRY(egi_graph_tidy(graph));
  EG_TRY(egi_pass_eliminate_dead(&clean, graph));
  EG_TRY(egi_graph_tidy(graph));
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    egi_value *value = &graph->values[graph->inputs[i]];
    for (int axis = 0; axis < value->rank; axis++) value->dims[axis] = egi_dim_resolve(dims, value->dims[axis]);
  }
  egi_graph_forget_types(graph);
  EG_TRY(egi_infer_graph(graph));
  return egi_passes_run_stage(graph, EGI_STAGE_CANONICALISE, &options);
}

/* Places and lengths of a cache that nobody reads any more go with it. */
static bool serves_cache(const egi_graph *graph, const egi_uses *before, egi_value_id input) {
  const egi_value *value = &graph->values[input];
  bool is_whole = value->dtype == EG_DTYPE_I64 || value->dtype == EG_DTYPE_I32;
  return is_whole && value->rank <= 1 && before->start[input] != before->start[input + 1];
}

static eg_status remove_inputs(binder *b, const egi_uses *before) {
  egi_graph *graph = b->graph;
  uint32_t kept = 0;
  EG_TRY(egi_graph_uses(graph, &b->arena, &b->uses));
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    egi_value_id input = graph->inputs[i];
    bool is_used = b->uses.start[input] != b->uses.start[input + 1];
    if (!is_used && (b->is_bound[input] || serves_cache(graph, before, input))) {
      egi_graph_delete_value(graph, input);
      b->run->report->n_matched += b->is_bound[input];
      continue;
    }
    if (b->is_bound[input])
      b->run->report->nearest_miss = egi_arena_format(
          &graph->module->arena, "input \"%s\": an empty cache is still used", graph->values[input].name);
    graph->values[input].index = kept;
    graph->inputs[kept++] = input;
  }
  graph->n_inputs = kept;
  return EG_OK;
}

static eg_status bind(binder *b) {
  uint32_t count;
  b->is_bound = EGI_NEW(&b->arena, bool, b->graph->n_values);
  b->is_joined = EGI_NEW(&b->arena, bool, b->graph->n_values);
  if (!b->is_bound || !b->is_joined) return EG_ERROR_MEMORY;
  EG_TRY(egi_graph_uses(b->graph, &b->arena, &b->uses));
  const egi_uses before = b->uses;
  EG_TRY(bind_inputs(b, &count));
  bind_written(b, &count);
  if (count == 0) return EG_OK;
  EG_TRY(replace_shapes(b));
  EG_TRY(egi_graph_uses(b->graph, &b->arena, &b->uses));
  EG_TRY(remove_empties(b));
  EG_TRY(settle(b));
  EG_TRY(remove_inputs(b, &before));
  b->run->has_changed = true;
  return EG_OK;
}

eg_status egi_pass_bind_caches(egi_pass_run *run, egi_graph *graph) {
  binder b = {.run = run, .graph = graph};
  if (run->is_general) return EG_OK;
  egi_arena_init(&b.arena, run->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = bind(&b);
  egi_arena_clear(&b.arena);
  return status;
}
