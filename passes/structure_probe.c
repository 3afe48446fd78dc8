/* Questions about a graph's weights that bytes do not answer, since exporters copy, transpose, quantise and tabulate
 * them: asked by running pieces of the graph on a few rows. */
#include <math.h>
#include <string.h>

#include "passes/structure.h"

enum { N_ROWS = 8, N_POSITIONS = 16, MAX_TABLES = 64 };

/* A copy of the module with one graph that is cut down to what is asked of it. */
typedef struct piece {
  egi_module *module;
  egi_graph *graph;
} piece;

static eg_status open_piece(const egi_flow *flow, piece *out_piece) {
  const egi_module *module = flow->graph->module;
  EG_TRY(egi_module_clone(module, &out_piece->module));
  out_piece->graph = out_piece->module->graphs[0];
  for (uint32_t i = 0; i < module->n_graphs; i++)
    if (module->graphs[i] == flow->graph) out_piece->graph = out_piece->module->graphs[i];
  out_piece->graph->n_outputs = 0;
  return EG_OK;
}

/* Bytes for the input of a position; `data` NULL: none are given. */
typedef struct given_input {
  uint32_t index;
  const void *data;
  size_t size_bytes;
} given_input;

/* Runs what is left on made-up inputs, one of which is given. NULL when it cannot be run. */
static egi_tensor *run_piece(const piece *p, int64_t sequence, const given_input *given, egi_arena *arena) {
  static const char *const names[] = {"eliminate_dead"};
  const egi_sample_sizes sizes = {.batch = 1, .sequence = sequence, .seed = 1};
  egi_graph *graph = p->graph;
  const egi_evaluator *evaluator = p->module->evaluator;
  if (evaluator == NULL || egi_passes_run(graph, names, EGI_COUNT(names), NULL, NULL) != EG_OK) return NULL;
  egi_tensor *inputs = egi_sample_inputs(graph, &sizes, arena);
  egi_tensor *outputs = EGI_NEW(arena, egi_tensor, graph->n_outputs);
  if (inputs == NULL || outputs == NULL) return NULL;
  if (given->data != NULL) {
    const egi_tensor *input = &inputs[given->index];
    uint64_t size_bytes = 0;
    if (!egi_dtype_bytes(input->dtype, (uint64_t)egi_tensor_count(input), &size_bytes)) return NULL;
    if (size_bytes != given->size_bytes) return NULL;
    memcpy(input->data, given->data, given->size_bytes);
  }
  return evaluator->graph(p->module->ctx, graph, inputs, arena, outputs) == EG_OK ? outputs : NULL;
}

/* ---- tied heads ----------------------------------------------------------------------------------------------- */

typedef struct tie_probe {
  const egi_flow *flow;
  egi_arena arena;
  int64_t ids[N_ROWS], width;
  const float *rows; /* [N_ROWS, width]: embedded tokens */
} tie_probe;

static int64_t number_of(const egi_graph *graph, egi_value_id value, int axis) {
  int64_t size = 0;
  const egi_value *row = &graph->values[value];
  if (axis < 0) axis += row->rank;
  if (axis < 0 || axis >= row->rank) return 0;
  return egi_dim_value(graph->module->dims, egi_dim_resolve(graph->module->dims, row->dims[axis]), &size) ? size : 0;
}

/* Embeds N_ROWS tokens. */
static bool embed_rows(tie_probe *probe) {
  const egi_graph *graph = probe->flow->graph;
  const egi_value *tokens = &graph->values[probe->flow->tokens];
  int64_t vocab = number_of(graph, probe->flow->logits, -1);
  egi_value_id embedded = graph->nodes[probe->flow->embedding].outputs[0];
  int32_t narrow[N_ROWS];
  piece p;
  probe->width = number_of(graph, embedded, -1);
  if (vocab <= 0 || probe->width <= 0 || graph->values[embedded].dtype != EG_DTYPE_F32) return false;
  for (int64_t i = 0; i < N_ROWS; i++) narrow[i] = (int32_t)(probe->ids[i] = (2 * i + 1) * vocab / (2 * N_ROWS));
  if (open_piece(probe->flow, &p) != EG_OK) return false;
  given_input ids = {tokens->index, probe->ids, sizeof probe->ids};
  if (tokens->dtype == EG_DTYPE_I32) ids = (given_input){tokens->index, narrow, sizeof narrow};
  egi_tensor *outputs = NULL;
  if (egi_graph_add_output(p.graph, embedded) == EG_OK) outputs = run_piece(&p, N_ROWS, &ids, &probe->arena);
  if (outputs != NULL && outputs[0].dtype == EG_DTYPE_F32 && egi_tensor_count(&outputs[0]) == N_ROWS * probe->width)
    probe->rows = outputs[0].data;
  egi_module_destroy(p.module);
  return probe->rows != NULL;
}

/* The head's input becomes an input of the graph, [1, N_ROWS, width]; the head's result its output. */
static eg_status cut_head(const tie_probe *probe, piece *p, uint32_t *out_index) {
  egi_graph *graph = p->graph;
  egi_node *head = &graph->nodes[probe->flow->head];
  egi_value_id old = egi_flow_only_input(probe->flow, head), input = 0;
  egi_dims *dims = p->module->dims;
  egi_dim shape[3] = {egi_dim_constant(dims, 1), egi_dim_constant(dims, N_ROWS), egi_dim_constant(dims, probe->width)};
  bool is_flat = graph->values[old].rank == 2;
  EG_TRY(egi_graph_add_input(graph, "probe", EG_DTYPE_F32, is_flat ? 2 : 3, is_flat ? shape + 1 : shape, &input));
  head = &graph->nodes[probe->flow->head];
  for (unsigned i = 0; i < head->n_inputs; i++)
    if (head->inputs[i] == old) head->inputs[i] = input;
  EG_TRY(egi_graph_add_output(graph, head->outputs[0]));
  *out_index = graph->values[input].index;
  egi_graph_forget_types(graph);
  return egi_infer_graph(graph);
}

/* Logits [N_ROWS, vocab] of the embedded tokens themselves. */
static const float *head_rows(tie_probe *probe, int64_t *out_vocab) {
  piece p;
  uint32_t index = 0;
  egi_tensor *outputs = NULL;
  if (open_piece(probe->flow, &p) != EG_OK) return NULL;
  if (cut_head(probe, &p, &index) == EG_OK) {
    const given_input rows = {index, probe->rows, (size_t)(N_ROWS * probe->width) * sizeof(float)};
    outputs = run_piece(&p, N_ROWS, &rows, &probe->arena);
  }
  egi_module_destroy(p.module);
  if (outputs == NULL || outputs[0].dtype != EG_DTYPE_F32 || outputs[0].rank < 2) return NULL;
  *out_vocab = outputs[0].dims[outputs[0].rank - 1];
  return egi_tensor_count(&outputs[0]) == N_ROWS * *out_vocab ? outputs[0].data : NULL;
}

/* The head's row of a token times the token's embedding is the square of the latter, up to quantisation, in a tied head
 * and in no other. */
static bool rows_agree(tie_probe *probe) {
  int64_t vocab = 0;
  const float *logits = head_rows(probe, &vocab);
  bool has_row = false;
  for (int64_t i = 0; i < N_ROWS; i++) {
    double square = 0.0;
    for (int64_t k = 0; k < probe->width; k++)
      square += (double)probe->rows[i * probe->width + k] * (double)probe->rows[i * probe->width + k];
    if (logits == NULL || probe->ids[i] >= vocab) return false;
    if (!(fabs((double)logits[i * vocab + probe->ids[i]] - square) <= 0.25 * square)) return false;
    has_row = has_row || square > 0.0;
  }
  return has_row;
}

bool egi_probe_is_tied(const egi_flow *flow) {
  tie_probe probe = {.flow = flow};
  if (flow->tokens == 0 || flow->embedding == 0 || flow->head == 0) return false;
  if (egi_flow_only_input(flow, &flow->graph->nodes[flow->head]) == 0) return false;
  egi_arena_init(&probe.arena, flow->graph->module->ctx, EGI_PURPOSE_GRAPH);
  bool is_tied = embed_rows(&probe) && rows_agree(&probe);
  egi_arena_clear(&probe.arena);
  return is_tied;
}

/* ---- tables of angles ----------------------------------------------------------------------------------------- */

/* Different operands cos (and positions) of rotary embeddings, at most MAX_TABLES. */
static uint32_t list_tables(const egi_flow *flow, egi_value_id tables[MAX_TABLES][2]) {
  uint32_t count = 0;
  for (egi_node_id id = 1; id < flow->graph->n_nodes; id++) {
    const egi_node *node = &flow->graph->nodes[id];
    if (flow->parts[id] != EGI_PART_ROPE) continue;
    egi_value_id cosines = node->inputs[1], positions = node->n_inputs > 3 ? node->inputs[3] : 0;
    uint32_t i = 0;
    while (i < count && (tables[i][0] != cosines || tables[i][1] != positions)) i++;
    if (i < count || count == MAX_TABLES) continue;
    tables[count][0] = cosines;
    tables[count++][1] = positions;
  }
  return count;
}

static bool is_same_table(const egi_tensor *a, const egi_tensor *b) {
  int64_t count = egi_tensor_count(a);
  if (count != egi_tensor_count(b) || a->dtype != EG_DTYPE_F32 || b->dtype != EG_DTYPE_F32) return false;
  for (int64_t i = 0; i < count; i++)
    if (!(fabs((double)((const float *)a->data)[i] - (double)((const float *)b->data)[i]) <= 0.02)) return false;
  return true;
}

static eg_status add_tables(piece *p, egi_value_id tables[MAX_TABLES][2], uint32_t count) {
  egi_emitter emit = {.graph = p->graph};
  for (uint32_t i = 0; i < count; i++) {
    egi_value_id value = tables[i][0];
    if (tables[i][1] != 0) value = egi_emit_binary(&emit, EGI_OP_Gather, value, tables[i][1]);
    EG_TRY(emit.status);
    value = egi_emit_unary(&emit, EGI_OP_Identity, value); /* a table may be a weight */
    EG_TRY(emit.status);
    EG_TRY(egi_graph_add_output(p->graph, value));
  }
  return egi_graph_tidy(p->graph);
}

/* Different contents for the first positions; where they cannot be computed, different operands. */
uint32_t egi_probe_rope_tables(const egi_flow *flow) {
  static const given_input none;
  egi_value_id tables[MAX_TABLES][2];
  uint32_t count = list_tables(flow, tables), n_different = 0;
  egi_tensor *outputs = NULL;
  egi_arena arena;
  piece p;
  if (count < 2 || open_piece(flow, &p) != EG_OK) return count;
  egi_arena_init(&arena, flow->graph->module->ctx, EGI_PURPOSE_GRAPH);
  if (add_tables(&p, tables, count) == EG_OK) outputs = run_piece(&p, N_POSITIONS, &none, &arena);
  for (uint32_t i = 0; outputs != NULL && i < count; i++) {
    bool is_new = true;
    for (uint32_t k = 0; k < i && is_new; k++) is_new = !is_same_table(&outputs[k], &outputs[i]);
    n_different += is_new;
  }
  egi_module_destroy(p.module);
  egi_arena_clear(&arena);
  return outputs != NULL ? n_different : count;
}
