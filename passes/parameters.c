/* The model's parameters under their Hugging Face names, for full training, and putting something else in their place.
 * A weight that the exporter shared between modules is split by name; token table and head are joined where their bytes
 * are equal. Linear in the graph, plus one comparison of the head's bytes. */
#include <string.h>

#include "passes/passes.h"

typedef struct collector {
  const egi_graph *graph;
  egi_arena *arena;
  egi_operand *operands;
  size_t n_operands;
  egi_parameter *list;
  uint32_t count, capacity;
  egi_value_id *weights;   /* by parameter, as many as there may be */
  uint32_t *use_parameter; /* by operand: its parameter */
  egi_map names;           /* name -> index */
  size_t table, head;      /* operands that may be tied */
  size_t n_wrapper;        /* length of what an export wrapper puts before the names of parameters */
  egi_uses uses;           /* read where a layer is fused */
} collector;

static const egi_weight *weight_row(const egi_graph *graph, egi_value_id value) {
  return &graph->module->weights[graph->values[value].index];
}

/* ---- names ------------------------------------------------------------------------------------------------------ */

/* SCOPE.leaf at the end of the initializer's own name: the name that the model itself gave the parameter. */
static const char *own_name(const char *name, const char *scope) {
  size_t n_scope = strlen(scope), n_name = strlen(name);
  const char *leaf = strrchr(name, '.');
  if (!egi_is_parameter_name(name) || !leaf) return NULL;
  if (n_scope == 0) return name;
  size_t before_leaf = (size_t)(leaf - name);
  if (before_leaf < n_scope || n_name < n_scope) return NULL;
  const char *start = leaf - n_scope;
  if (strncmp(start, scope, n_scope) != 0 || (start > name && start[-1] != '.')) return NULL;
  return start;
}

/* A free name: what the module calls it, else the initializer's own, else with a number. */
static eg_status free_name(collector *state, const char *name, egi_value_id weight, bool is_again,
                           const char **out_name) {
  uint32_t index = 0;
  const char *stem = name;
  for (unsigned n = 0; egi_map_get(&state->names, name, &index); n++) {
    if (state->list[index].weight == state->graph->values[weight].index) break; /* the module called again */
    if (is_again) break;
    name = n == 0 ? weight_row(state->graph, weight)->name : egi_arena_format(state->arena, "%s_%u", stem, n);
    if (!name) return EG_ERROR_MEMORY;
  }
  *out_name = name;
  return EG_OK;
}

/* SCOPE.leaf, or where that module was called before with the same weight, the name it had then. */
static const char *scoped_name(const collector *state, const char *scope, const char *leaf, egi_value_id weight,
                               bool *out_is_again) {
  uint32_t index = 0;
  const char *before = egi_called_before(scope, state->arena);
  const char *name = before ? egi_arena_format(state->arena, "%s.%s", before, leaf) : NULL;
  *out_is_again =
      name && egi_map_get(&state->names, name, &index) && egi_same_weight(state->graph, state->weights[index], weight);
  if (*out_is_again) return name;
  return egi_arena_format(state->arena, "%s.%s", scope, leaf);
}

/* What stands before the first initializer's name in which the module's path is found. */
static void find_wrapper(collector *state) {
  const egi_graph *graph = state->graph;
  for (size_t i = 0; i < state->n_operands; i++) {
    const char *scope = graph->nodes[state->operands[i].node].scope;
    const char *raw = weight_row(graph, state->operands[i].weight)->name;
    const char *name = scope && scope[0] ? own_name(raw, scope) : NULL;
    if (!name) continue;
    state->n_wrapper = (size_t)(name - raw);
    return;
  }
}

/* A table that no token indexes is not the norm's that takes it. */
static const char *table_name(const collector *state, const egi_operand *operand, const char *raw) {
  bool is_named = operand->role == EGI_ROLE_TABLE && egi_is_parameter_name(raw) &&
                  state->graph->nodes[operand->node].op != EGI_OP_Gather;
  return is_named && strlen(raw) > state->n_wrapper ? raw + state->n_wrapper : NULL;
}

static eg_status name_operand(collector *state, const egi_operand *operand, const char **out_name, bool *out_is_own) {
  const egi_graph *graph = state->graph;
  const char *scope = graph->nodes[operand->node].scope, *raw = weight_row(graph, operand->weight)->name;
  bool is_again = false, is_expert = operand->role == EGI_ROLE_EXPERTS; /* egi_stack_experts() has named it */
  const char *name = is_expert ? raw : own_name(raw, scope ? scope : "");
  if (!name) name = table_name(state, operand, raw);
  *out_is_own = name != NULL;
  if (!name && (!scope || !scope[0])) name = raw;
  const char *leaf = operand->role == EGI_ROLE_BIAS ? "bias" : operand->role == EGI_ROLE_SINKS ? "sinks" : "weight";
  if (!name) name = scoped_name(state, scope, leaf, operand->weight, &is_again);
  if (!name) return EG_ERROR_MEMORY;
  return free_name(state, name, operand->weight, is_again, out_name);
}

/* ---- ties ------------------------------------------------------------------------------------------------------- */

/* True when b, [cols, rows], holds the transpose of a, [rows, cols]. In blocks, for the cache's sake. */
static bool is_transpose(const uint8_t *a, const uint8_t *b, int64_t rows, int64_t cols, size_t element_bytes) {
  enum { BLOCK = 64 };
  for (int64_t r0 = 0; r0 < rows; r0 += BLOCK) {
    for (int64_t c0 = 0; c0 < cols; c0 += BLOCK) {
      for (int64_t r = r0; r < rows && r < r0 + BLOCK; r++) {
        for (int64_t c = c0; c < cols && c < c0 + BLOCK; c++) {
          const uint8_t *x = a + (size_t)(r * cols + c) * element_bytes,
                        *y = b + (size_t)(c * rows + r) * element_bytes;
          if (memcmp(x, y, element_bytes) != 0) return false;
        }
      }
    }
  }
  return true;
}

/* Whether `head` and `table` hold the same matrix; *out_is_transposed: one file's bytes are the transpose of the
 * other's. */
static bool is_tied(const collector *state, bool *out_is_transposed) {
  const egi_graph *graph = state->graph;
  const egi_operand *table = &state->operands[state->table], *head = &state->operands[state->head];
  egi_tensor a, b;
  *out_is_transposed = false;
  if (table->weight == head->weight) return true;
  if (!egi_value_constant(graph, table->weight, &a) || !egi_value_constant(graph, head->weight, &b)) return false;
  if (a.dtype != b.dtype || a.rank != 2 || b.rank != 2) return false;
  /* Effectively [rows, features] and [features, rows]. */
  *out_is_transposed = table->is_transposed == head->is_transposed;
  size_t element_bytes = egi_dtype_bits(a.dtype) / 8;
  if (*out_is_transposed) {
    if (a.dims[0] != b.dims[1] || a.dims[1] != b.dims[0]) return false;
    return is_transpose(a.data, b.data, a.dims[0], a.dims[1], element_bytes);
  }
  if (a.dims[0] != b.dims[0] || a.dims[1] != b.dims[1]) return false;
  return memcmp(a.data, b.data, (size_t)(a.dims[0] * a.dims[1]) * element_bytes) == 0;
}

/* The head, and the first table with as many rows as there are logits that holds the same matrix. */
static bool find_tie(collector *state, bool *out_is_transposed) {
  const egi_graph *graph = state->graph;
  egi_node_id head = egi_find_head(graph);
  state->table = state->head = state->n_operands;
  for (size_t i = 0; i < state->n_operands; i++) {
    if (state->operands[i].node == head && state->operands[i].role == EGI_ROLE_MATRIX) state->head = i;
  }
  if (state->head == state->n_operands || graph->values[state->operands[state->head].weight].rank != 2) return false;
  for (size_t i = 0; i < state->n_operands; i++) {
    if (state->operands[i].role != EGI_ROLE_TABLE || graph->values[state->operands[i].weight].rank != 2) continue;
    state->table = i;
    if (is_tied(state, out_is_transposed)) return true;
  }
  return false;
}

/* ---- collecting ------------------------------------------------------------------------------------------------- */

/* Linear layers keep [out, in] in Hugging Face's files, unless the initializer has the parameter's own name: then its
 * layout is the model's too (GPT-2's Conv1D). */
static bool is_transposed_in_file(const egi_graph *graph, const egi_operand *operand, bool is_own) {
  if (graph->values[operand->weight].rank != 2 || is_own) return false;
  return operand->role == EGI_ROLE_MATRIX ? !operand->is_transposed : operand->is_transposed;
}

/* Rows by module, where a fused layer takes the parameter: weight [out, in] in Hugging Face's layout, or bias. */
static eg_status add_parts(collector *state, const egi_operand *operand, egi_parameter *parameter) {
  const egi_graph *graph = state->graph;
  const char *leaf = strrchr(parameter->name, '.');
  egi_rows_part *parts = NULL;
  egi_node_id split = 0;
  if (graph->nodes[operand->node].op != EGI_OP_Linear || !leaf) return EG_OK;
  EG_TRY(egi_find_parts(graph, state->arena, &state->uses, operand->node, &parts, &split));
  if (split == 0) return EG_OK;
  parameter->parts = parts;
  parameter->n_parts = graph->nodes[split].n_outputs;
  for (uint32_t i = 0; i < parameter->n_parts; i++) {
    parts[i].name = egi_arena_format(state->arena, "%s%s", parts[i].name, leaf);
    if (!parts[i].name) return EG_ERROR_MEMORY;
  }
  return EG_OK;
}

/* Scales, biases and sinks have one dim in Hugging Face's files; norms with a row for each head have two. */
static bool is_vector_in_file(const egi_graph *graph, const egi_operand *operand) {
  const egi_value *weight = &graph->values[operand->weight];
  int n_wide = 0;
  if (operand->role == EGI_ROLE_MATRIX || operand->role == EGI_ROLE_TABLE) return false;
  for (int i = 0; i < weight->rank; i++) {
    int64_t size = 0;
    n_wide += !egi_dim_value(graph->module->dims, weight->dims[i], &size) || size != 1;
  }
  return n_wide <= 1;
}

static eg_status add_operand(collector *state, size_t index) {
  const egi_operand *operand = &state->operands[index];
  const char *name = NULL;
  bool is_own = false;
  uint32_t parameter = 0;
  EG_TRY(name_operand(state, operand, &name, &is_own));
  if (!egi_map_get(&state->names, name, &parameter)) {
    parameter = state->count;
    EG_TRY(EGI_GROW(state->arena, &state->list, state->count, &state->capacity));
    EG_TRY(egi_map_put(&state->names, name, parameter));
    state->weights[parameter] = operand->weight;
    state->list[state->count++] = (egi_parameter){.name = name,
                                                  .weight = state->graph->values[operand->weight].index,
                                                  .is_transposed = is_transposed_in_file(state->graph, operand, is_own),
                                                  .is_vector = is_vector_in_file(state->graph, operand)};
    if (!is_own) EG_TRY(add_parts(state, operand, &state->list[parameter]));
  }
  state->use_parameter[index] = parameter;
  state->list[parameter].n_uses++;
  return EG_OK;
}

/* The token table first: the head then joins it, under the table's name. */
static eg_status add_all(collector *state, bool is_head_tied) {
  for (size_t i = 0; i < state->n_operands; i++) {
    if (is_head_tied && i == state->head) {
      if (state->table > i) continue; /* the table comes later in the order of execution */
      state->use_parameter[i] = state->use_parameter[state->table];
      state->list[state->use_parameter[i]].n_uses++;
      continue;
    }
    EG_TRY(add_operand(state, i));
  }
  if (is_head_tied && state->table > state->head) {
    state->use_parameter[state->head] = state->use_parameter[state->table];
    state->list[state->use_parameter[state->head]].n_uses++;
  }
  return EG_OK;
}

static eg_status fill_uses(collector *state, bool is_head_transposed) {
  egi_parameter_use *uses = EGI_NEW(state->arena, egi_parameter_use, state->n_operands);
  egi_parameter_use **next = EGI_NEW(state->arena, egi_parameter_use *, state->count);
  if (!uses || !next) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < state->count; i++) {
    state->list[i].uses = next[i] = uses;
    uses += state->list[i].n_uses;
  }
  for (size_t i = 0; i < state->n_operands; i++) {
    const egi_operand *operand = &state->operands[i];
    *next[state->use_parameter[i]]++ = (egi_parameter_use){
        .node = operand->node, .input = operand->input, .is_transposed = is_head_transposed && i == state->head};
  }
  return EG_OK;
}

/* Codes are no parameters. */
static void drop_quantised(collector *state) {
  size_t n = 0;
  for (size_t i = 0; i < state->n_operands; i++)
    if (state->operands[i].role != EGI_ROLE_QUANTISED) state->operands[n++] = state->operands[i];
  state->n_operands = n;
}

static eg_status find_all(const egi_graph *graph, bool may_tie, egi_arena *arena, egi_parameter **out_parameters,
                          size_t *out_count) {
  collector state = {.graph = graph, .arena = arena};
  EG_TRY(egi_find_operands(graph, arena, &state.operands, &state.n_operands));
  drop_quantised(&state);
  state.use_parameter = EGI_NEW(arena, uint32_t, state.n_operands);
  state.weights = EGI_NEW(arena, egi_value_id, state.n_operands);
  if (!state.use_parameter || !state.weights) return EG_ERROR_MEMORY;
  egi_map_init(&state.names, arena);
  bool is_transposed_tie = false;
  find_wrapper(&state);
  bool is_head_tied = may_tie && find_tie(&state, &is_transposed_tie);
  EG_TRY(add_all(&state, is_head_tied));
  EG_TRY(fill_uses(&state, is_head_tied && is_transposed_tie));
  *out_parameters = state.list;
  *out_count = state.count;
  return EG_OK;
}

eg_status egi_find_parameters(const egi_graph *graph, egi_arena *arena, egi_parameter **out_parameters,
                              size_t *out_count) {
  return find_all(graph, true, arena, out_parameters, out_count);
}

eg_status egi_find_untied_parameters(const egi_graph *graph, egi_arena *arena, egi_parameter **out_parameters,
                                     size_t *out_count) {
  return find_all(graph, false, arena, out_parameters, out_count);
}

/* ---- replacing -------------------------------------------------------------------------------------------------- */

enum { MAX_CHAIN = 32 };

/* The casts, transposes and reshapes from the weight to the operand are made again on top of `value`. */
static eg_status replace_use(egi_graph *graph, const egi_parameter_use *use, egi_value_id value) {
  egi_node_id chain[MAX_CHAIN];
  unsigned depth = 0;
  egi_value_id at = graph->nodes[use->node].inputs[use->input];
  for (; graph->values[at].kind == EGI_VALUE_NODE; at = graph->nodes[graph->values[at].producer].inputs[0]) {
    if (depth == MAX_CHAIN)
      return egi_fail_node(graph, use->node, EG_ERROR_UNSUPPORTED,
                           "more than %d layout nodes stand between it and its weight", (int)MAX_CHAIN);
    chain[depth++] = graph->values[at].producer;
  }
  egi_emitter emit = {.graph = graph, .scope = graph->nodes[use->node].scope};
  if (use->is_transposed) value = egi_emit_unary(&emit, EGI_OP_Transpose, value);
  while (depth > 0 && emit.status == EG_OK) {
    egi_node node = graph->nodes[chain[--depth]];
    if (node.op == EGI_OP_Identity) continue;
    if (node.op == EGI_OP_Cast && egi_node_int(&node, "to", 0) == (int64_t)graph->values[value].dtype) continue;
    egi_value_id inputs[2] = {value, node.n_inputs > 1 ? node.inputs[1] : 0};
    value = egi_emit(&emit, node.op, inputs, node.n_inputs, node.attributes, node.n_attributes);
  }
  EG_TRY(emit.status);
  graph->nodes[use->node].inputs[use->input] = value;
  return EG_OK;
}

eg_status egi_replace_parameter(egi_graph *graph, const egi_parameter *parameter, egi_value_id value) {
  for (uint32_t i = 0; i < parameter->n_uses; i++) EG_TRY(replace_use(graph, &parameter->uses[i], value));
  return EG_OK;
}
