/* Recognises attention that ends in the product of probabilities and values: Softmax over scores that are scaled,
 * capped, masked and joined with sinks in any of the orders that exporters and eager model code write, or a standard
 * Attention. Nothing is changed here. Called by fuse_attention. */
#include "passes/attention_match.h"

#include <math.h>
#include <string.h>

/* What a Where writes into hidden scores. */
#define HIDDEN (-9900.0)

enum { MAX_STEPS = 32 };

typedef struct matcher {
  const egi_graph *graph;
  egi_attention_match *m;
  egi_arena *arena;
  double factor;     /* of the scores above the node that is looked at */
  bool drops_column; /* of the probabilities: that of the sink */
  bool is_joined;    /* batch and heads are one axis of the products */
  bool has_cap;
  egi_dim heads;
} matcher;

static bool miss(matcher *x, egi_node_id at, const char *reason) {
  x->m->reason = reason;
  x->m->at = at;
  return false;
}

static bool miss_node(matcher *x, egi_node_id at, const char *what) {
  const egi_node *node = &x->graph->nodes[at];
  const char *name = at == 0 ? "an input" : node->op_name ? node->op_name : egi_op_get(node->op)->name;
  char *reason = egi_arena_format(x->arena, "%s %s", name, what);
  return miss(x, at, reason ? reason : "memory ran out");
}

static bool is_last_axis(int64_t axis, int rank) {
  return axis == -1 || axis == rank - 1;
}

/* ---- probabilities ---------------------------------------------------------------------------------------------- */

static bool is_inference_dropout(const egi_graph *graph, const egi_node *node) {
  double number;
  if (node->op != EGI_OP_Dropout) return false;
  if (node->n_inputs < 3 || node->inputs[2] == 0) return true;
  return egi_value_scalar(graph, node->inputs[2], &number) && number == 0;
}

/* Where(IsNaN(p), 0, p): rows without keys become 0, as they are anyway. */
static bool is_nan_guard(const egi_graph *graph, const egi_node *node) {
  double number;
  if (node->op != EGI_OP_Where) return false;
  egi_node_id test = egi_producer(graph, node->inputs[0]);
  return test != 0 && graph->nodes[test].op == EGI_OP_IsNaN && graph->nodes[test].inputs[0] == node->inputs[2] &&
         egi_value_scalar(graph, node->inputs[1], &number) && number == 0;
}

static bool drops_last_column(const egi_graph *graph, const egi_node *node) {
  int64_t start, axis, step = 1;
  uint32_t count;
  egi_dims *dims = graph->module->dims;
  if (node->op != EGI_OP_Slice || node->n_inputs < 4 || node->inputs[3] == 0) return false;
  const egi_value *before = &graph->values[node->inputs[0]], *after = &graph->values[node->outputs[0]];
  if (!egi_value_integers(graph, node->inputs[1], &start, 1, &count) || count != 1 || start != 0) return false;
  if (!egi_value_integers(graph, node->inputs[3], &axis, 1, &count) || count != 1) return false;
  bool has_step = node->n_inputs > 4 && node->inputs[4] != 0;
  if (has_step && (!egi_value_integers(graph, node->inputs[4], &step, 1, &count) || count != 1)) return false;
  if (!is_last_axis(axis, before->rank) || step != 1) return false;
  egi_dim shorter = egi_dim_subtract(dims, before->dims[before->rank - 1], egi_dim_constant(dims, 1));
  return egi_dims_agree(graph, shorter, after->dims[after->rank - 1]);
}

/* From the left operand of the second product down to the Softmax; 0: there is none. */
static egi_node_id find_softmax(matcher *x, egi_value_id value) {
  const egi_graph *graph = x->graph;
  for (unsigned i = 0; i < MAX_STEPS; i++) {
    egi_node_id id = egi_producer(graph, value);
    const egi_node *node = &graph->nodes[id];
    if (id == 0 || node->op == EGI_OP_Softmax) return id;
    bool is_joining = x->is_joined && egi_before_joining(graph, id) != 0;
    if (node->op == EGI_OP_Cast || node->op == EGI_OP_Identity || is_joining || is_inference_dropout(graph, node)) {
      value = node->inputs[0];
    } else if (is_nan_guard(graph, node)) {
      value = node->inputs[2];
    } else if (!x->drops_column && drops_last_column(graph, node)) {
      x->drops_column = true;
      value = node->inputs[0];
    } else {
      return 0;
    }
  }
  return 0;
}

/* ---- scores ----------------------------------------------------------------------------------------------------- */

/* Whether `value` is the scores rather than a mask: a product of two tensors of 4 dims lies below it, or of 3 dims
 * behind a Reshape. */
static bool leads_to_scores(const egi_graph *graph, egi_value_id value, unsigned depth) {
  for (unsigned i = 0; i < MAX_STEPS; i++) {
    egi_node_id id = egi_producer(graph, value);
    const egi_node *node = &graph->nodes[id];
    if (id == 0 || graph->values[value].rank < 3 || graph->values[value].rank > 4) return false;
    switch (node->op) {
    case EGI_OP_MatMul:
      return true;
    case EGI_OP_Reshape:
      if (egi_before_joining(graph, id) == 0) return false;
      value = node->inputs[0];
      break;
    case EGI_OP_Cast:
    case EGI_OP_Identity:
    case EGI_OP_Tanh:
    case EGI_OP_Mul:
    case EGI_OP_Div:
    case EGI_OP_Sub:
    case EGI_OP_Max:
      value = node->inputs[0];
      if (node->op == EGI_OP_Mul && graph->values[value].rank < 3) value = node->inputs[1];
      break;
    case EGI_OP_Where:
      if (depth > 0 && leads_to_scores(graph, node->inputs[1], depth - 1)) return true;
      value = node->inputs[2];
      break;
    case EGI_OP_Add:
      if (depth > 0 && leads_to_scores(graph, node->inputs[0], depth - 1)) return true;
      value = node->inputs[1];
      break;
    default:
      return false;
    }
  }
  return false;
}

static bool add_mask(matcher *x, egi_node_id at, egi_value_id value, egi_mask_sense sense) {
  egi_mask *mask = &x->m->mask;
  if (x->has_cap) return miss(x, at, "the mask stands before the soft cap");
  if (mask->n_parts == EGI_MAX_MASKS) return miss(x, at, "there are too many masks");
  if (x->graph->values[value].rank < 0 || x->graph->values[value].rank > 4)
    return miss(x, at, "the mask does not have at most 4 dimensions");
  mask->parts[mask->n_parts++] = (egi_mask_part){value, sense};
  return true;
}

static bool match_add(matcher *x, egi_node_id id, egi_value_id *value) {
  const egi_node *node = &x->graph->nodes[id];
  unsigned side = leads_to_scores(x->graph, node->inputs[0], 3) ? 0 : 1;
  if (x->factor != 1 && !x->has_cap) return miss(x, id, "the mask is scaled with the scores");
  *value = node->inputs[side];
  return add_mask(x, id, node->inputs[1 - side], EGI_MASK_IS_ADDED);
}

/* Where(seen, scores, lowest) or Where(hidden, lowest, scores). */
static bool match_where(matcher *x, egi_node_id id, egi_value_id *value) {
  const egi_graph *graph = x->graph;
  const egi_node *node = &graph->nodes[id];
  bool is_seen = leads_to_scores(graph, node->inputs[1], 3);
  double number;
  if (!egi_value_scalar(graph, node->inputs[is_seen ? 2 : 1], &number) || !(number * x->factor <= HIDDEN))
    return miss(x, id, "Where does not hide scores by a large negative number");
  *value = node->inputs[is_seen ? 1 : 2];
  return add_mask(x, id, node->inputs[0], is_seen ? EGI_MASK_IS_SEEN : EGI_MASK_IS_HIDDEN);
}

/* x - max(x) over the row: Softmax does not see it. */
static bool match_shift(matcher *x, egi_node_id id, egi_value_id *value) {
  const egi_graph *graph = x->graph;
  const egi_node *node = &graph->nodes[id];
  egi_node_id largest = egi_producer(graph, node->inputs[1]);
  const egi_node *reduce = &graph->nodes[largest];
  int64_t axis;
  uint32_t count;
  bool fits = largest != 0 && reduce->op == EGI_OP_ReduceMax && reduce->inputs[0] == node->inputs[0] &&
              egi_node_int(reduce, "keepdims", 1) == 1 && reduce->n_inputs > 1 &&
              egi_value_integers(graph, reduce->inputs[1], &axis, 1, &count) && count == 1 && is_last_axis(axis, 4);
  if (!fits || x->factor != 1) return miss(x, id, "Sub takes something else than the largest score from the scores");
  *value = node->inputs[0];
  return true;
}

/* max(scores, lowest): what is hidden stays so. */
static bool match_floor(matcher *x, egi_node_id id, egi_value_id *value) {
  const egi_node *node = &x->graph->nodes[id];
  double number;
  for (unsigned i = 0; i < 2 && node->n_inputs == 2; i++) {
    if (!egi_value_scalar(x->graph, node->inputs[i], &number) || !(number * x->factor <= HIDDEN)) continue;
    *value = node->inputs[1 - i];
    return true;
  }
  return miss(x, id, "Max has no large negative number");
}

/* A logit for each head: [.., heads, 1, 1], expanded. */
static bool match_sinks(matcher *x, egi_node_id id, egi_value_id value) {
  const egi_graph *graph = x->graph;
  egi_dims *dims = graph->module->dims;
  for (unsigned i = 0; i < MAX_STEPS; i++) {
    egi_node_id producer = egi_producer(graph, value);
    egi_op op = graph->nodes[producer].op;
    if (producer == 0 || (op != EGI_OP_Expand && op != EGI_OP_Cast && op != EGI_OP_Identity)) break;
    value = graph->nodes[producer].inputs[0];
  }
  const egi_value *v = &graph->values[value];
  int64_t size;
  if (v->rank < 3 || v->rank > 4) return miss(x, id, "what is joined to the scores is no logit for each head");
  for (int i = 0; i < v->rank; i++) {
    bool is_heads = i == v->rank - 3;
    if (is_heads && !egi_dims_agree(graph, v->dims[i], x->heads))
      return miss(x, id, "what is joined to the scores is no logit for each head");
    if (!is_heads && (!egi_dim_value(dims, egi_dim_resolve(dims, v->dims[i]), &size) || size != 1))
      return miss(x, id, "what is joined to the scores differs between queries");
  }
  x->m->sinks = value;
  return true;
}

static bool match_concat(matcher *x, egi_node_id id, egi_value_id *value) {
  const egi_node *node = &x->graph->nodes[id];
  const egi_value *out = &x->graph->values[node->outputs[0]];
  bool fits = node->n_inputs == 2 && is_last_axis(egi_node_int(node, "axis", 0), out->rank) && x->m->sinks == 0 &&
              x->m->mask.n_parts == 0 && x->factor == 1 && !x->has_cap;
  if (!fits) return miss(x, id, "Concat joins the scores with something else than a sink");
  *value = node->inputs[0];
  return match_sinks(x, id, node->inputs[1]);
}

/* softcap · tanh(factor · scores / softcap): the factor goes on through what is below. */
static bool match_cap(matcher *x, egi_node_id id, egi_value_id *value) {
  if (x->has_cap || !(x->factor > 0)) return miss(x, id, "Tanh is no soft cap");
  x->has_cap = true;
  x->m->softcap = x->factor;
  *value = x->graph->nodes[id].inputs[0];
  return true;
}

static bool match_score_node(matcher *x, egi_node_id id, egi_value_id *value) {
  double number;
  switch (x->graph->nodes[id].op) {
  case EGI_OP_Cast:
  case EGI_OP_Identity:
    *value = x->graph->nodes[id].inputs[0];
    return egi_dtype_is_float(x->graph->values[*value].dtype) || miss_node(x, id, "makes scores of integers");
  case EGI_OP_Reshape:
    *value = egi_before_joining(x->graph, id);
    return (x->is_joined && *value != 0) || miss_node(x, id, "stands between the scores and their Softmax");
  case EGI_OP_Add:
    return match_add(x, id, value);
  case EGI_OP_Where:
    return match_where(x, id, value);
  case EGI_OP_Max:
    return match_floor(x, id, value);
  case EGI_OP_Sub:
    return match_shift(x, id, value);
  case EGI_OP_Concat:
    return match_concat(x, id, value);
  case EGI_OP_Tanh:
    return match_cap(x, id, value);
  case EGI_OP_Mul:
  case EGI_OP_Div:
    if (!egi_match_factor(x->graph, id, value, &number))
      return miss_node(x, id, "multiplies the scores by something that is no single number");
    x->factor *= number;
    return true;
  default:
    return miss_node(x, id, "stands between the scores and their Softmax");
  }
}

/* From the Softmax down to the first product. */
static bool match_scores(matcher *x, egi_value_id value, egi_node_id *out_product) {
  for (unsigned i = 0; i < MAX_STEPS; i++) {
    egi_node_id id = egi_producer(x->graph, value);
    x->m->depth++;
    if (id != 0 && x->graph->nodes[id].op == EGI_OP_MatMul) {
      *out_product = id;
      return true;
    }
    if (id == 0) return miss(x, x->m->softmax, "the scores are not computed by a MatMul");
    if (!match_score_node(x, id, &value)) return false;
  }
  return miss(x, x->m->softmax, "the scores are too far from their Softmax");
}

/* ---- shapes ----------------------------------------------------------------------------------------------------- */

static egi_dim operand_dim(const egi_graph *graph, const egi_attention_operand *operand, int axis) {
  return graph->values[operand->value].dims[operand->axes[axis]];
}

/* [batch, heads, sequence, width] of all three, with heads that share. */
static bool check_shapes(matcher *x) {
  const egi_graph *graph = x->graph;
  egi_attention_match *m = x->m;
  egi_dims *dims = graph->module->dims;
  int64_t q_heads, kv_heads;
  const egi_attention_operand *operands[3] = {&m->q, &m->k, &m->v};
  for (unsigned i = 0; i < 3; i++) {
    if (graph->values[operands[i]->value].rank != 4) return miss(x, m->root, "queries, keys and values need 4 dims");
    if (!egi_dims_agree(graph, operand_dim(graph, operands[i], 0), operand_dim(graph, &m->q, 0)))
      return miss(x, m->root, "queries, keys and values have different batches");
    if (!egi_dims_agree(graph, operand_dim(graph, operands[i], 2), operand_dim(graph, &m->q, 2)))
      return miss(x, m->root, "there are more keys than queries");
  }
  if (graph->values[m->q.value].dtype != graph->values[m->k.value].dtype)
    return miss(x, m->root, "queries and keys have different types");
  if (!egi_dims_agree(graph, operand_dim(graph, &m->q, 3), operand_dim(graph, &m->k, 3)))
    return miss(x, m->root, "queries and keys have different widths");
  if (!egi_dims_agree(graph, operand_dim(graph, &m->k, 1), operand_dim(graph, &m->v, 1)))
    return miss(x, m->root, "keys and values have different heads");
  if (!egi_dim_value(dims, egi_dim_resolve(dims, operand_dim(graph, &m->q, 1)), &q_heads) ||
      !egi_dim_value(dims, egi_dim_resolve(dims, operand_dim(graph, &m->k, 1)), &kv_heads) || kv_heads <= 0 ||
      q_heads % kv_heads != 0)
    return miss(x, m->root, "the number of heads is not known");
  m->mask.batch = operand_dim(graph, &m->q, 0);
  m->mask.sequence = operand_dim(graph, &m->q, 2);
  return true;
}

/* Key heads are shared when both keys and values are repeated alike; else the repeated ones stay. */
static void match_keys(matcher *x, double *factor) {
  egi_attention_match *m = x->m;
  egi_attention_operand k = m->k, v = m->v;
  double shared = *factor;
  egi_match_operand(x->graph, &k, &shared, true);
  egi_match_operand(x->graph, &v, NULL, true);
  if (egi_dims_agree(x->graph, operand_dim(x->graph, &k, 1), operand_dim(x->graph, &v, 1))) {
    m->k = k;
    m->v = v;
    *factor = shared;
  } else {
    egi_match_operand(x->graph, &m->k, factor, false);
  }
}

/* ---- the two forms ---------------------------------------------------------------------------------------------- */

/* Queries, keys and values of the two products, in 4 dims. */
static bool match_operands(matcher *x, egi_node_id product, egi_value_id values) {
  const egi_graph *graph = x->graph;
  egi_attention_match *m = x->m;
  m->scale = x->factor;
  m->q = (egi_attention_operand){graph->nodes[product].inputs[0], {0, 1, 2, 3}};
  m->k = (egi_attention_operand){graph->nodes[product].inputs[1], {0, 1, 3, 2}};
  m->v = (egi_attention_operand){values, {0, 1, 2, 3}};
  if (x->is_joined && !(egi_match_joined(graph, &m->q, &m->scale) && egi_match_joined(graph, &m->k, &m->scale) &&
                        egi_match_joined(graph, &m->v, NULL)))
    return miss(x, product, "batch and heads of queries, keys or values are not joined by a Reshape");
  if (graph->values[m->q.value].rank != 4 || graph->values[m->k.value].rank != 4 || graph->values[m->v.value].rank != 4)
    return miss(x, product, "queries, keys and values need 4 dims");
  egi_match_operand(graph, &m->q, &m->scale, false);
  match_keys(x, &m->scale);
  if (!check_shapes(x)) return false;
  const egi_value *result = &graph->values[m->result];
  bool fits = egi_dims_agree(graph, result->dims[0], m->mask.batch) &&
              egi_dims_agree(graph, result->dims[1], operand_dim(graph, &m->q, 1));
  return fits || miss(x, m->root, "its result has other sizes than the queries");
}

/* `id` is the second product; with batch and heads joined, the root is the Reshape behind it. */
static bool match_products(matcher *x, egi_node_id id) {
  const egi_graph *graph = x->graph;
  const egi_node *node = &graph->nodes[id];
  egi_attention_match *m = x->m;
  egi_node_id product;
  m->result = graph->nodes[m->root].outputs[0];
  if (graph->values[m->result].rank != 4) return miss(x, id, "its result does not have 4 dimensions");
  x->heads = graph->values[m->result].dims[1];
  const egi_node *softmax = &graph->nodes[m->softmax];
  if (!is_last_axis(egi_node_int(softmax, "axis", -1), graph->values[softmax->outputs[0]].rank))
    return miss(x, m->softmax, "Softmax is not over the keys");
  if (!match_scores(x, softmax->inputs[0], &product)) return false;
  if (x->drops_column != (m->sinks != 0))
    return miss(x, m->softmax, m->sinks ? "the sink's column is kept" : "a column of the probabilities is left out");
  return match_operands(x, product, node->inputs[1]);
}

/* Scores or log-sum-exp; keys and values given back are those that were taken. */
static bool has_outputs(const egi_node *node) {
  for (uint16_t i = 3; i < node->n_outputs; i++)
    if (node->outputs[i] != 0) return true;
  return false;
}

static bool match_flat(matcher *x, const egi_node *node) {
  const egi_graph *graph = x->graph;
  egi_attention_match *m = x->m;
  m->flat_heads[0] = egi_node_int(node, "q_num_heads", 0);
  m->flat_heads[1] = egi_node_int(node, "kv_num_heads", 0);
  const egi_value *q = &graph->values[m->q.value];
  for (unsigned i = 0; i < 3; i++) {
    const egi_value *value = &graph->values[node->inputs[i]];
    if (value->rank != 3 || !egi_dims_agree(graph, value->dims[0], q->dims[0]) ||
        !egi_dims_agree(graph, value->dims[1], q->dims[1]))
      return miss(x, m->root, "there are more keys than queries");
  }
  int64_t size;
  egi_dims *dims = graph->module->dims;
  if (m->scale == 0 && (!egi_dim_value(dims, egi_dim_resolve(dims, q->dims[2]), &size) || m->flat_heads[0] <= 0))
    return miss(x, m->root, "the width of the heads is not known");
  if (m->scale == 0) m->scale = 1 / sqrt((double)size / (double)m->flat_heads[0]);
  m->mask.batch = q->dims[0];
  m->mask.sequence = q->dims[1];
  return true;
}

static bool match_standard(matcher *x, egi_node_id id) {
  const egi_graph *graph = x->graph;
  const egi_node *node = &graph->nodes[id];
  egi_attention_match *m = x->m;
  const egi_attribute *scale = egi_node_attribute(node, "scale");
  m->result = node->outputs[0];
  for (uint16_t i = 4; i < node->n_inputs; i++)
    if (node->inputs[i] != 0) return miss(x, id, "there is a cache");
  if (has_outputs(node)) return miss(x, id, "its scores are used");
  m->q = (egi_attention_operand){node->inputs[0], {0, 1, 2, 3}};
  m->k = (egi_attention_operand){node->inputs[1], {0, 1, 2, 3}};
  m->v = (egi_attention_operand){node->inputs[2], {0, 1, 2, 3}};
  m->scale = scale ? (double)scale->u.f : 0;
  m->softcap = (double)egi_node_float(node, "softcap", 0);
  m->mask.is_causal = egi_node_int(node, "is_causal", 0) != 0;
  m->mask.left = egi_node_int(node, "left_window_size", -1);
  m->mask.right = egi_node_int(node, "right_window_size", -1);
  if (node->n_inputs > 3 && node->inputs[3] != 0) {
    bool is_boolean = graph->values[node->inputs[3]].dtype == EG_DTYPE_BOOL;
    if (!add_mask(x, id, node->inputs[3], is_boolean ? EGI_MASK_IS_SEEN : EGI_MASK_IS_ADDED)) return false;
  }
  if (graph->values[m->q.value].rank == 3) return match_flat(x, node);
  if (graph->values[m->q.value].rank != 4) return miss(x, id, "queries, keys and values need 4 dims");
  int64_t width = 1;
  egi_dims *dims = graph->module->dims;
  if (!scale && !egi_dim_value(dims, egi_dim_resolve(dims, graph->values[m->q.value].dims[3]), &width))
    return miss(x, id, "the width of the heads is not known");
  if (!scale) m->scale = 1 / sqrt((double)width);
  egi_match_operand(graph, &m->q, &m->scale, false);
  match_keys(x, &m->scale);
  return check_shapes(x);
}

bool egi_match_attention(const egi_graph *graph, egi_node_id id, egi_arena *arena, egi_attention_match *out_match) {
  const egi_node *node = &graph->nodes[id];
  matcher x = {.graph = graph, .m = out_match, .arena = arena, .factor = 1};
  *out_match = (egi_attention_match){.root = id, .softmax = id, .mask = {.left = -1, .right = -1}};
  if (node->op == EGI_OP_Attention) {
    (void)match_standard(&x, id);
    return true;
  }
  egi_node_id product = id;
  if (egi_before_joining(graph, id) != 0 && graph->values[node->inputs[0]].rank == 3) {
    product = egi_producer(graph, node->inputs[0]);
    x.is_joined = true;
  }
  if (product == 0 || graph->nodes[product].op != EGI_OP_MatMul) return false;
  if (graph->values[graph->nodes[product].outputs[0]].rank == 3 && !x.is_joined) return false;
  out_match->softmax = find_softmax(&x, graph->nodes[product].inputs[0]);
  if (out_match->softmax == 0) return false;
  (void)match_products(&x, product);
  return true;
}
