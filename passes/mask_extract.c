/* The nodes that a mask is computed by, copied to a module of their own with sizes put in for symbols. Shapes of the
 * model's tensors become constants there, so that no hidden state is computed. Called by mask_prove.c. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "graph/dims.h"
#include "passes/masks.h"

/* Nodes that a mask may need; a mask that is computed from hidden states needs more. */
enum { MAX_NODES = 2000 };

typedef struct copier {
  egi_mask_extract *x;
  egi_arena arena;
  egi_binding *bindings;
  size_t n_bindings;
  egi_value_id *copies; /* source value -> copy */
  egi_node_id *nodes;
  uint32_t n_nodes, nodes_capacity;
  egi_value_id *stack;
  uint32_t n_stack, stack_capacity;
  bool *is_visited; /* by value */
} copier;

static eg_status refuse(copier *c, const char *format, const char *name) {
  c->x->reason = egi_arena_format(c->x->arena, format, name);
  return c->x->reason ? EG_OK : EG_ERROR_MEMORY;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

/* Symbols that inputs of [batch, sequence] have for themselves: exporters do not always see that they are equal. */
static int64_t input_size(const copier *c, egi_dim symbol, int64_t otherwise) {
  const egi_graph *graph = c->x->source;
  egi_dims *dims = graph->module->dims;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    if (value->rank != 2) continue;
    if (egi_dim_resolve(dims, value->dims[0]) == symbol) return c->x->n_batches;
    if (egi_dim_resolve(dims, value->dims[1]) == symbol) return c->x->n_positions;
  }
  return otherwise;
}

/* The cache is empty; any other size is that of the sequence. */
static eg_status bind_symbols(copier *c) {
  const egi_mask_extract *x = c->x;
  egi_dims *dims = x->source->module->dims;
  egi_dim batch = egi_dim_resolve(dims, x->mask->batch), sequence = egi_dim_resolve(dims, x->mask->sequence);
  size_t count = egi_dims_symbol_count(dims);
  c->bindings = EGI_NEW(&c->arena, egi_binding, count + 2);
  if (!c->bindings) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    const char *name;
    egi_dim symbol = egi_dims_symbol_at(dims, i, &name), resolved = egi_dim_resolve(dims, symbol);
    int64_t value = input_size(c, resolved, strstr(name, "batch") ? x->n_batches : x->n_positions);
    if (strstr(name, "past") && !strstr(name, "total")) value = 0;
    if (resolved == sequence) value = x->n_positions;
    if (resolved == batch) value = x->n_batches;
    (void)egi_dim_value(dims, resolved, &value);
    c->bindings[i] = (egi_binding){symbol, value};
  }
  c->n_bindings = count;
  return EG_OK;
}

static bool size_of(const copier *c, egi_dim dim, int64_t *out_size) {
  return egi_dim_evaluate(c->x->source->module->dims, dim, c->bindings, c->n_bindings, out_size) && *out_size >= 0;
}

/* A sum of products of symbols: a number inside a minimum, maximum or quotient may be one that the mask depends on. */
static bool is_plain(const egi_dims *dims, egi_dim dim) {
  const egi_polynomial *p = &dims->polynomials[dim];
  for (uint32_t t = 0; t < p->n_terms; t++)
    for (uint32_t a = 0; a < p->terms[t].degree; a++)
      if (dims->atoms[p->terms[t].atoms[a]].kind != EGI_ATOM_SYMBOL) return false;
  return dim != EGI_DIM_NONE;
}

/* A Shape or Size that the sizes answer. */
static bool is_known_shape(const copier *c, const egi_node *node) {
  egi_dims *dims = c->x->source->module->dims;
  const egi_value *value = &c->x->source->values[node->inputs[0]];
  if ((node->op != EGI_OP_Shape && node->op != EGI_OP_Size) || value->rank < 0) return false;
  for (int i = 0; i < value->rank; i++) {
    int64_t size;
    egi_dim dim = egi_dim_resolve(dims, value->dims[i]);
    if (!is_plain(dims, dim) || !size_of(c, dim, &size)) return false;
  }
  return true;
}

/* ---- what the mask needs ---------------------------------------------------------------------------------------- */

static eg_status push(copier *c, egi_value_id value) {
  if (value == 0 || c->is_visited[value]) return EG_OK;
  c->is_visited[value] = true;
  EG_TRY(EGI_GROW(&c->arena, &c->stack, c->n_stack, &c->stack_capacity));
  c->stack[c->n_stack++] = value;
  return EG_OK;
}

static eg_status read_input(copier *c, egi_value_id id) {
  const egi_graph *graph = c->x->source;
  const egi_value *value = &graph->values[id];
  egi_value_id tokens = 0;
  bool is_position = strstr(value->name, "position") != NULL && value->rank >= 1 && value->rank <= 2;
  if (egi_find_token_input(graph, &tokens) != EG_OK) tokens = 0;
  if (id == tokens || value->rank < 1 || value->rank > 2 || (value->rank == 1 && !is_position))
    return refuse(c, "the mask depends on the input \"%s\"", value->name);
  egi_value_id *slot = is_position ? &c->x->positions : &c->x->padding;
  if (*slot != 0 && *slot != id) return refuse(c, "the mask depends on the input \"%s\" too", value->name);
  *slot = id;
  return EG_OK;
}

static eg_status visit_node(copier *c, egi_node_id id) {
  const egi_node *node = &c->x->source->nodes[id];
  for (uint16_t i = 0; i < node->n_attributes; i++)
    if (node->attributes[i].kind == EGI_ATTRIBUTE_GRAPH)
      return refuse(c, "the mask is computed by control flow (node \"%s\")", node->name);
  if (node->op == EGI_OP_EyeLike && egi_node_int(node, "k", 0) != 0)
    return refuse(c, "a diagonal is set by an attribute (node \"%s\")", node->name);
  if (node->op <= EGI_OP_UNKNOWN || c->n_nodes == MAX_NODES)
    return refuse(c, "the mask is computed from hidden states (node \"%s\")", node->name);
  EG_TRY(EGI_GROW(&c->arena, &c->nodes, c->n_nodes, &c->nodes_capacity));
  c->nodes[c->n_nodes++] = id;
  for (uint16_t i = 0; i < node->n_outputs; i++)
    if (node->outputs[i] != 0) c->is_visited[node->outputs[i]] = true;
  if (is_known_shape(c, node)) return EG_OK;
  for (uint16_t i = 0; i < node->n_inputs; i++) EG_TRY(push(c, node->inputs[i]));
  return EG_OK;
}

static int by_number(const void *a, const void *b) {
  const egi_node_id *left = a, *right = b;
  return (*left > *right) - (*left < *right);
}

static eg_status collect(copier *c) {
  const egi_graph *graph = c->x->source;
  for (unsigned i = 0; i < c->x->mask->n_parts; i++) EG_TRY(push(c, c->x->mask->parts[i].value));
  while (c->n_stack > 0 && !c->x->reason) {
    egi_value_id id = c->stack[--c->n_stack];
    const egi_value *value = &graph->values[id];
    if (value->kind == EGI_VALUE_INPUT) EG_TRY(read_input(c, id));
    if (value->kind == EGI_VALUE_STATE) EG_TRY(refuse(c, "the mask depends on the state \"%s\"", value->name));
    if (value->kind == EGI_VALUE_NODE) EG_TRY(visit_node(c, value->producer));
  }
  if (c->n_nodes > 0) qsort(c->nodes, c->n_nodes, sizeof *c->nodes, by_number);
  return EG_OK;
}

/* ---- copying ---------------------------------------------------------------------------------------------------- */

/* Short lists of integers: widths of windows, bounds of slices. */
enum { SHORT_LIST = 8 };

static void add_number(egi_mask_numbers *numbers, int64_t number) {
  int64_t magnitude = number < 0 ? -(number + 1) + 1 : number;
  if (number == INT64_MIN || magnitude > INT32_MAX) return; /* "to the end" */
  for (unsigned i = 0; i < numbers->count; i++)
    if (numbers->values[i] == magnitude) return;
  numbers->is_full = numbers->is_full || numbers->count == EGI_MAX_MASK_NUMBERS;
  if (!numbers->is_full) numbers->values[numbers->count++] = magnitude;
}

static int64_t replaced_number(const egi_mask_extract *x, int64_t number) {
  for (unsigned i = 0; i < x->n_replaced; i++)
    if (number == x->from[i] || number == -x->from[i]) return number < 0 ? -x->to[i] : x->to[i];
  return number;
}

static bool counts_up(const egi_weight *weight, uint64_t count) {
  size_t bytes = weight->dtype == EG_DTYPE_I64 ? 8 : 4;
  if ((weight->dtype != EG_DTYPE_I64 && weight->dtype != EG_DTYPE_I32) || weight->bytes.kind != EGI_BYTES_MEMORY)
    return false;
  for (uint64_t i = 0; i < count; i++) {
    int64_t wide = 0;
    int32_t narrow = 0;
    memcpy(bytes == 8 ? (void *)&wide : (void *)&narrow, weight->bytes.data + i * bytes, bytes);
    if ((bytes == 8 ? wide : narrow) != (int64_t)i) return false;
  }
  return true;
}

/* Longer tensors hold the mask itself or parts of it, for sequences up to their size; positions in order say nothing.
 */
static void add_table(egi_mask_numbers *numbers, const egi_weight *weight, uint64_t count) {
  int64_t size = 0, last = weight->rank > 0 ? weight->dims[weight->rank - 1] : 0;
  if (count <= SHORT_LIST || counts_up(weight, count)) return;
  size = last;
  if (weight->rank > 1 && weight->dims[weight->rank - 2] > 1 && weight->dims[weight->rank - 2] < size)
    size = weight->dims[weight->rank - 2];
  if (size > numbers->longest_table) numbers->longest_table = size;
}

/* Numbers of a weight, noted; those of the wanted magnitude are replaced. */
static eg_status read_numbers(copier *c, egi_weight *weight) {
  egi_mask_extract *x = c->x;
  int64_t numbers[SHORT_LIST];
  uint32_t count = 0;
  uint64_t total = 1;
  bool is_changed = false;
  for (int i = 0; i < weight->rank; i++) total *= (uint64_t)weight->dims[i];
  add_table(&x->numbers, weight, total);
  if ((weight->dtype != EG_DTYPE_I64 && weight->dtype != EG_DTYPE_I32) ||
      !egi_weight_integers(weight, numbers, SHORT_LIST, &count))
    return EG_OK;
  uint8_t *bytes = EGI_NEW(&x->module->arena, uint8_t, 8 * (size_t)SHORT_LIST);
  if (!bytes) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < count; i++) {
    add_number(&x->numbers, numbers[i]);
    int64_t replaced = replaced_number(x, numbers[i]);
    bool is_wanted = replaced != numbers[i];
    numbers[i] = replaced;
    is_changed = is_changed || is_wanted;
    int32_t narrow = (int32_t)numbers[i];
    if (weight->dtype == EG_DTYPE_I64)
      memcpy(bytes + 8 * (size_t)i, &numbers[i], 8);
    else
      memcpy(bytes + 4 * (size_t)i, &narrow, 4);
  }
  if (is_changed) weight->bytes = (egi_bytes){.data = bytes, .size_bytes = weight->bytes.size_bytes};
  return EG_OK;
}

static eg_status copy_weight(copier *c, uint32_t index, bool is_operand, uint32_t *out_index) {
  egi_weight weight = c->x->source->module->weights[index];
  if (is_operand) EG_TRY(read_numbers(c, &weight));
  return egi_module_add_weight(c->x->module, &weight, out_index);
}

static eg_status copy_input(copier *c, egi_value_id id) {
  const egi_value *value = &c->x->source->values[id];
  egi_dims *dims = c->x->module->dims;
  egi_dim own[EGI_MAX_RANK];
  for (int i = 0; i < value->rank; i++) {
    int64_t size;
    if (!size_of(c, value->dims[i], &size)) return refuse(c, "sizes of the input \"%s\" are not known", value->name);
    own[i] = egi_dim_constant(dims, size);
  }
  return egi_graph_add_input(c->x->graph, value->name, value->dtype, value->rank, own, &c->copies[id]);
}

/* Whether a float beside other floats may decide where something ends: positions are compared with it, moved or divided
 * by it. What hidden keys get (of a Where, a factor, the low end of a Clip) decides nothing. */
static bool may_be_place(egi_op op, double number) {
  switch (op) {
  case EGI_OP_Less:
  case EGI_OP_LessOrEqual:
  case EGI_OP_Greater:
  case EGI_OP_GreaterOrEqual:
  case EGI_OP_Equal:
  case EGI_OP_Add:
  case EGI_OP_Sub:
  case EGI_OP_Div:
  case EGI_OP_Mod:
    return true;
  case EGI_OP_Min:
  case EGI_OP_Max:
  case EGI_OP_Clip:
    return number > 0;
  default:
    return false;
  }
}

static eg_status read_float(copier *c, const egi_node *node, egi_value_id id) {
  egi_mask_extract *x = c->x;
  const egi_value *value = &x->source->values[id];
  double number = 0;
  if (value->kind != EGI_VALUE_WEIGHT || !egi_dtype_is_float(value->dtype)) return EG_OK;
  if (!egi_value_scalar(x->source, id, &number) || !(fabs(number) < 1 << 24)) return EG_OK;
  if (node->op == EGI_OP_Mul && number != 0 && fabs(number) < 0.08)
    return refuse(c, "positions are divided (node \"%s\")", node->name);
  if (!may_be_place(node->op, number)) return EG_OK;
  add_number(&x->numbers, (int64_t)fabs(number));
  int64_t whole = (int64_t)number;
  if (c->copies[id] != 0 || replaced_number(x, whole) == whole) return EG_OK;
  if (value->dtype != EG_DTYPE_F32) return refuse(c, "a number of node \"%s\" may be a window", node->name);
  egi_weight weight = x->source->module->weights[value->index];
  float *replaced = EGI_NEW(&x->module->arena, float, 1);
  uint32_t index;
  if (!replaced) return EG_ERROR_MEMORY;
  *replaced = (float)replaced_number(x, whole);
  weight.bytes = (egi_bytes){.data = (const uint8_t *)(const void *)replaced, .size_bytes = sizeof *replaced};
  EG_TRY(egi_module_add_weight(x->module, &weight, &index));
  return egi_graph_add_weight(x->graph, index, &c->copies[id]);
}

/* A weight or input that is needed for the first time. */
static eg_status copy_source(copier *c, egi_value_id id) {
  const egi_value *value = id != 0 ? &c->x->source->values[id] : NULL;
  uint32_t index;
  if (!value || c->copies[id] != 0) return EG_OK;
  if (value->kind == EGI_VALUE_INPUT) return copy_input(c, id);
  if (value->kind != EGI_VALUE_WEIGHT) return EG_OK;
  EG_TRY(copy_weight(c, value->index, true, &index));
  return egi_graph_add_weight(c->x->graph, index, &c->copies[id]);
}

static eg_status copy_shape(copier *c, const egi_node *node) {
  const egi_value *value = &c->x->source->values[node->inputs[0]];
  egi_emitter emit = {.graph = c->x->graph};
  int64_t sizes[EGI_MAX_RANK], product = 1, rank = value->rank;
  int64_t start = egi_node_int(node, "start", 0), end = egi_node_int(node, "end", rank);
  for (int i = 0; i < value->rank; i++) {
    if (!size_of(c, value->dims[i], &sizes[i])) return EG_ERROR_INTERNAL;
    product *= sizes[i];
  }
  start = start < 0 ? start + rank : start;
  end = end < 0 ? end + rank : end;
  start = start < 0 ? 0 : start > rank ? rank : start;
  end = end > rank ? rank : end < start ? start : end;
  if (node->op == EGI_OP_Size)
    c->copies[node->outputs[0]] = egi_emit_scalar(&emit, (double)product, EG_DTYPE_I64);
  else
    c->copies[node->outputs[0]] = egi_emit_integers(&emit, sizes + start, (uint32_t)(end - start));
  return emit.status;
}

static eg_status copy_attributes(copier *c, egi_node *node) {
  egi_attribute *own = EGI_NEW(&c->arena, egi_attribute, (size_t)node->n_attributes + 1);
  if (!own) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node->n_attributes; i++) {
    own[i] = node->attributes[i];
    if (own[i].kind == EGI_ATTRIBUTE_TENSOR) EG_TRY(copy_weight(c, own[i].u.weight, false, &own[i].u.weight));
  }
  node->attributes = own;
  return EG_OK;
}

static eg_status copy_node(copier *c, egi_node_id id) {
  const egi_node *source = &c->x->source->nodes[id];
  egi_node node = *source;
  egi_node_id copy;
  if (is_known_shape(c, source)) return copy_shape(c, source);
  node.inputs = EGI_NEW(&c->arena, egi_value_id, (size_t)node.n_inputs + 1);
  node.outputs = EGI_NEW(&c->arena, egi_value_id, (size_t)node.n_outputs + 1);
  if (!node.inputs || !node.outputs) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node.n_inputs; i++) {
    if (source->inputs[i] != 0) EG_TRY(read_float(c, source, source->inputs[i]));
    if (c->x->reason) return EG_OK;
    EG_TRY(copy_source(c, source->inputs[i]));
    if (c->x->reason) return EG_OK;
    node.inputs[i] = source->inputs[i] != 0 ? c->copies[source->inputs[i]] : 0;
  }
  for (uint16_t i = 0; i < node.n_outputs; i++) node.outputs[i] = source->outputs[i] != 0 ? 0 : EGI_VALUE_UNWANTED;
  EG_TRY(copy_attributes(c, &node));
  EG_TRY(egi_graph_add_node(c->x->graph, &node, &copy));
  for (uint16_t i = 0; i < node.n_outputs; i++)
    if (source->outputs[i] != 0) c->copies[source->outputs[i]] = c->x->graph->nodes[copy].outputs[i];
  return egi_infer_node(c->x->graph, copy);
}

/* Each part through an Identity: outputs are results of nodes. */
static eg_status add_outputs(copier *c) {
  egi_emitter emit = {.graph = c->x->graph};
  for (unsigned i = 0; i < c->x->mask->n_parts; i++) {
    egi_value_id id = c->x->mask->parts[i].value;
    EG_TRY(copy_source(c, id));
    if (c->x->reason) return EG_OK;
    egi_value_id output = egi_emit_unary(&emit, EGI_OP_Identity, c->copies[id]);
    EG_TRY(emit.status);
    EG_TRY(egi_graph_add_output(c->x->graph, output));
  }
  return egi_graph_tidy(c->x->graph);
}

static eg_status make(copier *c) {
  egi_mask_extract *x = c->x;
  size_t n_values = x->source->n_values;
  c->copies = EGI_NEW(&c->arena, egi_value_id, n_values);
  c->is_visited = EGI_NEW(&c->arena, bool, n_values);
  if (!c->copies || !c->is_visited) return EG_ERROR_MEMORY;
  EG_TRY(bind_symbols(c));
  EG_TRY(collect(c));
  if (x->reason) return EG_OK;
  EG_TRY(egi_module_create(x->source->module->ctx, &x->module));
  x->module->evaluator = x->source->module->evaluator;
  EG_TRY(egi_module_add_graph(x->module, "mask", &x->graph));
  for (uint32_t i = 0; i < c->n_nodes && !x->reason; i++) EG_TRY(copy_node(c, c->nodes[i]));
  return x->reason ? EG_OK : add_outputs(c);
}

eg_status egi_mask_extract_make(egi_mask_extract *extract) {
  copier c = {.x = extract};
  egi_arena_init(&c.arena, extract->source->module->ctx, EGI_PURPOSE_GRAPH);
  eg_status status = make(&c);
  if (status != EG_OK && status != EG_ERROR_MEMORY) /* shapes that contradict at these sizes */
    status = refuse(&c, "the mask cannot be evaluated: %s", eg_context_error(extract->source->module->ctx));
  egi_arena_clear(&c.arena);
  return status;
}

void egi_mask_extract_free(egi_mask_extract *extract) {
  egi_module_destroy(extract->module);
  extract->module = NULL;
}
