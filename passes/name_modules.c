/* Each node's scope becomes the path its module has in the Hugging Face model. Sources, best first: the path that the
 * importer found; the name of a weight that the node takes; for a linear layer what it feeds; the path of a neighbour.
 * A path prefix that all modules with weights share, head included, is an export wrapper and goes. onnxruntime-genai's
 * names are translated. Idempotent: the whole common prefix goes at once, and translated names translate to themselves.
 */
#include <string.h>

#include "passes/name_modules.h"

/* ---- paths ------------------------------------------------------------------------------------------------------ */

/* Length of the first segment. */
static size_t segment_length(const char *path) {
  return strcspn(path, ".");
}

static bool is_segment(const char *path, const char *segment) {
  size_t length = segment_length(path);
  return strlen(segment) == length && strncmp(path, segment, length) == 0;
}

static const char *next_segment(const char *path) {
  path += segment_length(path);
  return *path == '.' ? path + 1 : path;
}

static bool is_number(const char *path) {
  size_t length = segment_length(path);
  for (size_t i = 0; i < length; i++) {
    if (path[i] < '0' || path[i] > '9') return false;
  }
  return length > 0;
}

static void append_segment(egi_text *text, const char *segment, size_t length) {
  if (text->length > 0) egi_text_add(text, ".");
  egi_text_append(text, segment, length);
}

/* What onnxruntime-genai has inside attn, or its end; other models' attn holds layers of other names. */
static bool is_inside_attention(const char *path) {
  static const char *const names[] = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "sinks"};
  if (*path == '\0') return true;
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (is_segment(path, names[i])) return true;
  return false;
}

/* One segment of an onnxruntime-genai path, with what stands before it written already. `at` is layers.L.<here>. */
static void append_translated(egi_text *text, const char *at, bool is_in_layer, const char *last) {
  if (is_in_layer && is_segment(at, "attn") && is_inside_attention(next_segment(at))) {
    append_segment(text, "self_attn", strlen("self_attn"));
  } else if (is_in_layer && is_segment(at, "moe")) {
    append_segment(text, "mlp", strlen("mlp"));
  } else if (is_segment(at, "layernorm") && last && (is_segment(last, "q_norm") || is_segment(last, "k_norm"))) {
    return;
  } else {
    append_segment(text, at, segment_length(at));
  }
}

/* attn -> self_attn and moe -> mlp below layers.L, q_norm.layernorm -> q_norm, layers.L.final_norm_layernorm -> norm.
 */
static void translate_path(const char *path, egi_text *text) {
  const char *last = NULL;
  text->length = 0;
  for (const char *at = path; *at; at = next_segment(at)) {
    const char *number = next_segment(at), *below = next_segment(number);
    if (is_segment(at, "layers") && is_number(number) && is_segment(below, "final_norm_layernorm")) {
      append_segment(text, "norm", strlen("norm"));
      last = at = below;
      continue;
    }
    bool is_in_layer = last && is_number(last) && last - 7 >= path && strncmp(last - 7, "layers.", 7) == 0;
    append_translated(text, at, is_in_layer, last);
    last = at;
  }
}

/* ---- scopes ----------------------------------------------------------------------------------------------------- */

typedef struct namer {
  egi_pass_run *run;
  egi_graph *graph;
  egi_arena arena;
  egi_operand *operands;
  size_t n_operands;
  size_t prefix_length; /* with the dot */
  const char *prefix;
  egi_map paths; /* raw scope -> index into `translated` */
  const char **translated;
  uint32_t n_translated, translated_capacity;
  egi_text text;
} namer;

static bool has_scope(const egi_node *node) {
  return node->scope && node->scope[0] && !egi_has_prefix(node->scope, "_empty_nn_module_stack");
}

/* "model.layers.0.mlp.c_fc" out of "model.layers.0.mlp.c_fc.weight" or "….c_fc.MatMul.weight". */
static eg_status scope_from_weight(namer *state, egi_node *node, const egi_operand *operand) {
  const egi_graph *graph = state->graph;
  const char *name = graph->module->weights[graph->values[operand->weight].index].name;
  if (!egi_is_parameter_name(name)) return EG_OK;
  size_t length = (size_t)(strrchr(name, '.') - name);
  static const char *const operators[] = {".MatMul", ".Add", ".MatMulNBits"};
  for (size_t i = 0; i < EGI_COUNT(operators); i++) {
    size_t n = strlen(operators[i]);
    if (length <= n || strncmp(name + length - n, operators[i], n) != 0) continue;
    length -= n;
    break;
  }
  node->scope = egi_arena_copy_text(&state->graph->module->arena, name, length);
  state->run->has_changed = true;
  return node->scope ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status scopes_from_weights(namer *state) {
  for (size_t i = 0; i < state->n_operands; i++) {
    egi_node *node = &state->graph->nodes[state->operands[i].node];
    if (!has_scope(node)) EG_TRY(scope_from_weight(state, node, &state->operands[i]));
    if (node->scope && !has_scope(node)) node->scope = NULL;
  }
  return EG_OK;
}

/* Length of the segments, dots included, that both paths begin with, less than either whole path. */
static size_t common_length(const char *a, const char *b, size_t limit) {
  size_t common = 0;
  for (size_t i = 0; i < limit && a[i] && a[i] == b[i]; i++) {
    if (a[i] == '.') common = i + 1;
  }
  return common;
}

/* The segments that the paths of all operands share with `path`, at most `length` of its bytes. */
static size_t shared_length(const namer *state, const char *path, size_t length) {
  for (size_t i = 0; i < state->n_operands && length > 0; i++) {
    const egi_node *node = &state->graph->nodes[state->operands[i].node];
    length = has_scope(node) ? common_length(path, node->scope, length) : 0;
  }
  return length;
}

static bool has_logits(const egi_graph *graph) {
  for (uint32_t i = 0; i < graph->n_outputs; i++)
    if (strcmp(graph->values[graph->outputs[i]].name, "logits") == 0) return true;
  return false;
}

/* Models without a head have several outermost modules, or one of these. */
static size_t without_outermost(const char *path, size_t length) {
  static const char *const outermost[] = {"encoder.", "decoder.", "text_model."};
  for (size_t i = 0; i < EGI_COUNT(outermost); i++) {
    size_t n = strlen(outermost[i]);
    bool is_end = length >= n && strncmp(path + length - n, outermost[i], n) == 0;
    if (is_end && (length == n || path[length - n - 1] == '.')) return length - n;
  }
  return length;
}

/* What wraps the whole model, its head included. */
static void find_prefix(namer *state) {
  const egi_graph *graph = state->graph;
  egi_node_id head = egi_find_head(graph);
  if (head == 0 && (has_logits(graph) || state->n_operands == 0)) return;
  egi_node_id node = head != 0 ? head : state->operands[0].node;
  if (!has_scope(&graph->nodes[node])) return;
  const char *path = graph->nodes[node].scope, *last = strrchr(path, '.');
  size_t length = shared_length(state, path, last ? (size_t)(last - path) + 1 : 0);
  state->prefix = path;
  state->prefix_length = head != 0 ? length : without_outermost(path, length);
}

/* The final form of a raw scope; the same text for the same scope. */
static eg_status final_scope(namer *state, const char *scope, const char **out_scope) {
  uint32_t index = 0;
  if (egi_map_get(&state->paths, scope, &index)) {
    *out_scope = state->translated[index];
    return EG_OK;
  }
  const char *path = scope;
  if (state->prefix_length > 0 && strncmp(scope, state->prefix, state->prefix_length) == 0) {
    path = scope + state->prefix_length;
  } else if (state->prefix_length > 0 && strlen(scope) == state->prefix_length - 1 &&
             strncmp(scope, state->prefix, state->prefix_length - 1) == 0) {
    path = ""; /* the wrapper itself */
  }
  translate_path(path, &state->text);
  EG_TRY(egi_text_status(&state->text));
  const char *copy =
      egi_arena_copy_text(&state->graph->module->arena, egi_text_string(&state->text), state->text.length);
  if (!copy) return EG_ERROR_MEMORY;
  EG_TRY(EGI_GROW(&state->arena, &state->translated, state->n_translated, &state->translated_capacity));
  state->translated[state->n_translated] = copy;
  EG_TRY(egi_map_put(&state->paths, scope, state->n_translated));
  state->n_translated++;
  *out_scope = copy;
  return EG_OK;
}

/* What onnxruntime-genai fuses is three modules in the Hugging Face model: rows of q, then k, then v. Its name for the
 * module around it, attn, tells its files from those of models that are fused themselves. */
static bool is_fused_projection(const char *scope) {
  static const char fused[] = "attn.qkv_proj";
  size_t length = strlen(scope), n_fused = sizeof(fused) - 1;
  if (length <= n_fused || strcmp(scope + length - n_fused, fused) != 0 || scope[length - n_fused - 1] != '.')
    return false;
  size_t end = length - n_fused - 1, start = end; /* the number before it, and "layers." before that */
  while (start > 0 && scope[start - 1] >= '0' && scope[start - 1] <= '9') start--;
  return start < end && start >= 7 && strncmp(scope + start - 7, "layers.", 7) == 0;
}

static eg_status name_parts(namer *state, egi_node_id id) {
  const egi_node *node = &state->graph->nodes[id];
  const egi_attribute parts = egi_attribute_string(EGI_PARTS, "q_proj k_proj v_proj");
  if (node->op != EGI_OP_Linear || !is_fused_projection(node->scope)) return EG_OK;
  return egi_node_set_attribute(state->graph, id, &parts);
}

static eg_status rename_scopes(namer *state) {
  egi_graph *graph = state->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE || !has_scope(node)) continue;
    const char *scope = NULL;
    state->run->report->n_tried++;
    EG_TRY(name_parts(state, id));
    node = &graph->nodes[id];
    EG_TRY(final_scope(state, node->scope, &scope));
    if (strcmp(scope, node->scope) == 0) continue;
    node->scope = scope;
    state->run->report->n_matched++;
    state->run->has_changed = true;
  }
  return EG_OK;
}

/* ---- neighbours ------------------------------------------------------------------------------------------------- */

/* The producer of the first input that has a scope gives it on. */
static void inherit_forward(namer *state) {
  egi_graph *graph = state->graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    egi_node *node = &graph->nodes[id];
    for (unsigned i = 0; node->op != EGI_OP_NONE && !has_scope(node) && i < node->n_inputs; i++) {
      const egi_value *input = &graph->values[node->inputs[i]];
      if (node->inputs[i] == 0 || input->kind != EGI_VALUE_NODE) continue;
      if (!has_scope(&graph->nodes[input->producer])) continue;
      node->scope = graph->nodes[input->producer].scope;
      state->run->has_changed = true;
    }
  }
}

/* What nothing stands before takes the scope of a consumer. */
static void inherit_backward(namer *state) {
  egi_graph *graph = state->graph;
  for (egi_node_id id = graph->n_nodes; id-- > 1;) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE || !has_scope(node)) continue;
    for (unsigned i = 0; i < node->n_inputs; i++) {
      const egi_value *input = &graph->values[node->inputs[i]];
      if (node->inputs[i] == 0 || input->kind != EGI_VALUE_NODE) continue;
      egi_node *producer = &graph->nodes[input->producer];
      if (has_scope(producer)) continue;
      producer->scope = node->scope;
      state->run->has_changed = true;
    }
  }
}

static void clear_placeholders(egi_graph *graph) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    if (graph->nodes[id].scope && !has_scope(&graph->nodes[id])) graph->nodes[id].scope = NULL;
  }
}

static eg_status name_all(namer *state) {
  egi_map_init(&state->paths, &state->arena);
  EG_TRY(egi_find_operands(state->graph, &state->arena, &state->operands, &state->n_operands));
  EG_TRY(scopes_from_weights(state));
  clear_placeholders(state->graph);
  EG_TRY(egi_name_by_structure(state->graph, &state->arena));
  find_prefix(state);
  EG_TRY(rename_scopes(state));
  inherit_forward(state);
  inherit_backward(state);
  return EG_OK;
}

eg_status egi_pass_name_modules(egi_pass_run *run, egi_graph *graph) {
  namer state = {.run = run, .graph = graph};
  egi_arena_init(&state.arena, run->ctx, EGI_PURPOSE_GRAPH);
  egi_text_init(&state.text, run->ctx);
  eg_status status = name_all(&state);
  egi_text_free(&state.text);
  egi_arena_clear(&state.arena);
  return status;
}
