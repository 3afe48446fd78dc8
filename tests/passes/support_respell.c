/* The respellings. A kind is tried at random nodes until one fits. Each replaces a node by others or puts nodes on the
 * way to one of its inputs; rows move while nodes are added, so that lists are copied first. */
#include "support_respell.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { MAX_LIST = 8, TRIES = 100 };

uint64_t respeller_random(respeller *r, uint64_t bound) {
  uint64_t z = r->random += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (z ^ (z >> 31)) % bound;
}

/* ---- small things ---- */

static const egi_node *node_at(const respeller *r, egi_node_id id) {
  return &r->graph->nodes[id];
}

static const egi_value *value_at(const respeller *r, egi_value_id id) {
  return &r->graph->values[id];
}

static egi_value_id input_of(const respeller *r, egi_node_id id, unsigned index) {
  return index < node_at(r, id)->n_inputs ? node_at(r, id)->inputs[index] : 0;
}

static bool is_float(const respeller *r, egi_value_id id) {
  return id != 0 && value_at(r, id)->dtype == EG_DTYPE_F32;
}

static egi_value_id number(respeller *r, double value) {
  return egi_emit_scalar(&r->emit, value, EG_DTYPE_F32);
}

/* Everything that took the node's first output takes `value`; the node goes. */
static bool replace(respeller *r, egi_node_id id, egi_value_id value) {
  if (r->emit.status != EG_OK) return false;
  egi_graph_replace_uses(r->graph, node_at(r, id)->outputs[0], value);
  egi_graph_remove_node(r->graph, id);
  return true;
}

/* The node takes `value` as one of its inputs. */
static bool feed(respeller *r, egi_node_id id, unsigned index, egi_value_id value) {
  if (r->emit.status != EG_OK) return false;
  r->graph->nodes[id].inputs[index] = value;
  return true;
}

/* An input that is there, or false. */
static bool choose_input(respeller *r, egi_node_id id, unsigned *out_index, egi_value_id *out_value) {
  unsigned count = node_at(r, id)->n_inputs;
  if (count == 0) return false;
  *out_index = (unsigned)respeller_random(r, count);
  *out_value = input_of(r, id, *out_index);
  return *out_value != 0;
}

static egi_value_id binary(respeller *r, egi_op op, egi_value_id a, egi_value_id b) {
  return egi_emit_binary(&r->emit, op, a, b);
}

static egi_value_id unary(respeller *r, egi_op op, egi_value_id a) {
  return egi_emit_unary(&r->emit, op, a);
}

/* ---- on the way to an input ---- */

static bool add_identity(respeller *r, egi_node_id id) {
  unsigned index;
  egi_value_id value;
  return choose_input(r, id, &index, &value) && feed(r, id, index, unary(r, EGI_OP_Identity, value));
}

static bool add_casts(respeller *r, egi_node_id id) {
  unsigned index;
  egi_value_id value;
  if (!choose_input(r, id, &index, &value)) return false;
  eg_dtype dtype = value_at(r, value)->dtype, wider = EG_DTYPE_F64;
  if (dtype == EG_DTYPE_BOOL) wider = EG_DTYPE_I32;
  if (dtype != EG_DTYPE_BOOL && dtype != EG_DTYPE_F32) return false;
  return feed(r, id, index, egi_emit_cast(&r->emit, egi_emit_cast(&r->emit, value, wider), dtype));
}

static bool cast_to_itself(respeller *r, egi_node_id id) {
  unsigned index;
  egi_value_id value;
  return choose_input(r, id, &index, &value) &&
         feed(r, id, index, egi_emit_cast(&r->emit, value, value_at(r, value)->dtype));
}

static bool turn_twice(respeller *r, egi_node_id id) {
  static const int64_t orders[2][4] = {{1, 2, 3, 0}, {3, 0, 1, 2}};
  unsigned index;
  egi_value_id value;
  if (!choose_input(r, id, &index, &value) || value_at(r, value)->rank != 4) return false;
  egi_attribute there = egi_attribute_ints("perm", orders[0], 4), back = egi_attribute_ints("perm", orders[1], 4);
  egi_value_id turned = egi_emit(&r->emit, EGI_OP_Transpose, &value, 1, &there, 1);
  return feed(r, id, index, egi_emit(&r->emit, EGI_OP_Transpose, &turned, 1, &back, 1));
}

static bool add_axis_and_remove(respeller *r, egi_node_id id) {
  const int64_t axis = 0;
  unsigned index;
  egi_value_id value;
  if (!choose_input(r, id, &index, &value)) return false;
  if (value_at(r, value)->rank < 0 || value_at(r, value)->rank >= EGI_MAX_RANK) return false;
  egi_value_id axes = egi_emit_integers(&r->emit, &axis, 1);
  return feed(r, id, index, binary(r, EGI_OP_Squeeze, binary(r, EGI_OP_Unsqueeze, value, axes), axes));
}

static bool reshape_to_own_shape(respeller *r, egi_node_id id) {
  unsigned index;
  egi_value_id value;
  if (!choose_input(r, id, &index, &value) || value_at(r, value)->rank < 1) return false;
  return feed(r, id, index, binary(r, EGI_OP_Reshape, value, unary(r, EGI_OP_Shape, value)));
}

/* The node has a copy of its producer to itself. Products stay one: two layers of one weight are two. */
static bool copy_producer(respeller *r, egi_node_id id) {
  egi_value_id inputs[MAX_LIST], value;
  egi_attribute attributes[MAX_LIST];
  unsigned index;
  if (!choose_input(r, id, &index, &value) || value_at(r, value)->kind != EGI_VALUE_NODE) return false;
  const egi_node *producer = node_at(r, value_at(r, value)->producer);
  if (producer->op == EGI_OP_MatMul || producer->n_outputs != 1 || producer->n_inputs > MAX_LIST ||
      producer->n_attributes > MAX_LIST)
    return false;
  unsigned n_inputs = producer->n_inputs, n_attributes = producer->n_attributes;
  egi_op op = producer->op;
  memcpy(inputs, producer->inputs, n_inputs * sizeof(inputs[0]));
  if (n_attributes) memcpy(attributes, producer->attributes, n_attributes * sizeof(attributes[0]));
  return feed(r, id, index, egi_emit(&r->emit, op, inputs, n_inputs, attributes, n_attributes));
}

/* A number as a tensor of one element. */
static bool widen_number(respeller *r, egi_node_id id) {
  const int64_t one = 1;
  unsigned index;
  egi_value_id value;
  egi_op op = node_at(r, id)->op;
  bool is_binary = op == EGI_OP_Add || op == EGI_OP_Mul || op == EGI_OP_Sub || op == EGI_OP_Div || op == EGI_OP_Pow;
  if (!is_binary || !choose_input(r, id, &index, &value)) return false;
  egi_value_id other = input_of(r, id, 1 - index);
  if (value_at(r, value)->kind != EGI_VALUE_WEIGHT || value_at(r, value)->rank != 0) return false;
  if (value_at(r, other)->rank < 1) return false;
  return feed(r, id, index, binary(r, EGI_OP_Expand, value, egi_emit_integers(&r->emit, &one, 1)));
}

/* ---- a node by others ---- */

static bool swap_operands(respeller *r, egi_node_id id) {
  egi_node *node = &r->graph->nodes[id];
  if (!(egi_op_get(node->op)->flags & EGI_OP_COMMUTATIVE) || node->n_inputs != 2) return false;
  egi_value_id first = node->inputs[0];
  node->inputs[0] = node->inputs[1];
  node->inputs[1] = first;
  return true;
}

/* x · c and x / (1 / c), one for the other. */
static bool exchange_product(respeller *r, egi_node_id id) {
  egi_op op = node_at(r, id)->op;
  egi_value_id x = input_of(r, id, 0), c = input_of(r, id, 1);
  double value = 0.0;
  if ((op != EGI_OP_Mul && op != EGI_OP_Div) || !is_float(r, x)) return false;
  if (!egi_value_scalar(r->graph, c, &value) || !(fabs(value) > 1e-6) || !(fabs(value) < 1e6)) return false;
  return replace(r, id, binary(r, op == EGI_OP_Mul ? EGI_OP_Div : EGI_OP_Mul, x, number(r, 1.0 / value)));
}

static bool exchange_square(respeller *r, egi_node_id id) {
  egi_op op = node_at(r, id)->op;
  egi_value_id x = input_of(r, id, 0), y = input_of(r, id, 1);
  double exponent = 0.0;
  if (op == EGI_OP_Mul && x == y && is_float(r, x)) return replace(r, id, binary(r, EGI_OP_Pow, x, number(r, 2.0)));
  if (op != EGI_OP_Pow || !egi_value_scalar(r->graph, y, &exponent)) return false;
  if (exponent < 2.0 || exponent > 2.0) return false;
  return replace(r, id, binary(r, EGI_OP_Mul, x, x));
}

static bool exchange_reciprocal(respeller *r, egi_node_id id) {
  egi_op op = node_at(r, id)->op;
  egi_value_id a = input_of(r, id, 0), b = input_of(r, id, 1);
  if (!is_float(r, a)) return false;
  if (op == EGI_OP_Reciprocal) return replace(r, id, binary(r, EGI_OP_Div, number(r, 1.0), a));
  if (op != EGI_OP_Div || value_at(r, b)->kind == EGI_VALUE_WEIGHT) return false;
  return replace(r, id, binary(r, EGI_OP_Mul, a, unary(r, EGI_OP_Reciprocal, b)));
}

static bool root_as_power(respeller *r, egi_node_id id) {
  if (node_at(r, id)->op != EGI_OP_Sqrt) return false;
  return replace(r, id, binary(r, EGI_OP_Pow, input_of(r, id, 0), number(r, 0.5)));
}

static bool subtract_by_adding(respeller *r, egi_node_id id) {
  if (node_at(r, id)->op != EGI_OP_Sub) return false;
  egi_value_id a = input_of(r, id, 0), b = input_of(r, id, 1);
  return replace(r, id, binary(r, EGI_OP_Add, a, unary(r, EGI_OP_Neg, b)));
}

static bool negate_by_product(respeller *r, egi_node_id id) {
  egi_value_id x = input_of(r, id, 0);
  if (node_at(r, id)->op != EGI_OP_Neg || !is_float(r, x)) return false;
  return replace(r, id, binary(r, EGI_OP_Mul, x, number(r, -1.0)));
}

static bool flip_where(respeller *r, egi_node_id id) {
  if (node_at(r, id)->op != EGI_OP_Where) return false;
  const egi_value_id inputs[3] = {unary(r, EGI_OP_Not, input_of(r, id, 0)), input_of(r, id, 2), input_of(r, id, 1)};
  return replace(r, id, egi_emit(&r->emit, EGI_OP_Where, inputs, 3, NULL, 0));
}

static bool flip_comparison(respeller *r, egi_node_id id) {
  static const egi_op turned[][3] = {/* a op b, b op a, not (a op b) */
                                     {EGI_OP_LessOrEqual, EGI_OP_GreaterOrEqual, EGI_OP_Greater},
                                     {EGI_OP_GreaterOrEqual, EGI_OP_LessOrEqual, EGI_OP_Less},
                                     {EGI_OP_Less, EGI_OP_Greater, EGI_OP_GreaterOrEqual},
                                     {EGI_OP_Greater, EGI_OP_Less, EGI_OP_LessOrEqual}};
  egi_value_id a = input_of(r, id, 0), b = input_of(r, id, 1);
  for (size_t i = 0; i < EGI_COUNT(turned); i++) {
    if (node_at(r, id)->op != turned[i][0] || is_float(r, a)) continue;
    if (respeller_random(r, 2)) return replace(r, id, binary(r, turned[i][1], b, a));
    return replace(r, id, unary(r, EGI_OP_Not, binary(r, turned[i][2], a, b)));
  }
  return false;
}

static bool and_by_or(respeller *r, egi_node_id id) {
  egi_value_id a = input_of(r, id, 0), b = input_of(r, id, 1);
  if (node_at(r, id)->op != EGI_OP_And) return false;
  return replace(r, id, unary(r, EGI_OP_Not, binary(r, EGI_OP_Or, unary(r, EGI_OP_Not, a), unary(r, EGI_OP_Not, b))));
}

static bool count_axis_from_the_other_end(respeller *r, egi_node_id id) {
  egi_op op = node_at(r, id)->op;
  if (op != EGI_OP_Softmax && op != EGI_OP_Concat && op != EGI_OP_Split) return false;
  int rank = value_at(r, input_of(r, id, 0))->rank;
  int64_t axis = egi_node_int(node_at(r, id), "axis", op == EGI_OP_Softmax ? -1 : 0);
  if (rank < 1) return false;
  egi_attribute other = egi_attribute_int("axis", axis < 0 ? axis + rank : axis - rank);
  return egi_node_set_attribute(r->graph, id, &other) == EG_OK;
}

static bool mean_by_sum(respeller *r, egi_node_id id) {
  egi_value_id x = input_of(r, id, 0), axes = input_of(r, id, 1);
  int64_t axis = 0, size = 0;
  uint32_t count = 0;
  if (node_at(r, id)->op != EGI_OP_ReduceMean || axes == 0) return false;
  if (!egi_value_integers(r->graph, axes, &axis, 1, &count) || count != 1) return false;
  int rank = value_at(r, x)->rank;
  if (rank < 1 || !egi_dim_value(r->graph->module->dims, value_at(r, x)->dims[axis < 0 ? axis + rank : axis], &size))
    return false;
  egi_attribute keep = egi_attribute_int("keepdims", egi_node_int(node_at(r, id), "keepdims", 1));
  const egi_value_id inputs[2] = {x, axes};
  egi_value_id sum = egi_emit(&r->emit, EGI_OP_ReduceSum, inputs, 2, &keep, 1);
  return replace(r, id, binary(r, EGI_OP_Div, sum, number(r, (double)size)));
}

/* (a · n) · c as a · (n · c), n a number. */
static bool reassociate(respeller *r, egi_node_id id) {
  egi_value_id left = input_of(r, id, 0), c = input_of(r, id, 1);
  if (node_at(r, id)->op != EGI_OP_Mul || !is_float(r, left) || value_at(r, left)->kind != EGI_VALUE_NODE) return false;
  egi_node_id inner = value_at(r, left)->producer;
  if (node_at(r, inner)->op != EGI_OP_Mul) return false;
  egi_value_id a = input_of(r, inner, 0), b = input_of(r, inner, 1);
  double unused = 0.0;
  if (!egi_value_scalar(r->graph, b, &unused)) return false;
  return replace(r, id, binary(r, EGI_OP_Mul, a, binary(r, EGI_OP_Mul, b, c)));
}

static const struct {
  const char *name;
  bool (*apply)(respeller *r, egi_node_id id);
} kinds[] = {
    {"add an Identity", add_identity},
    {"add casts to a wider type and back", add_casts},
    {"cast to the same type", cast_to_itself},
    {"transpose twice", turn_twice},
    {"add an axis and remove it", add_axis_and_remove},
    {"reshape to the own shape", reshape_to_own_shape},
    {"copy the producer", copy_producer},
    {"a number of one dimension", widen_number},
    {"swap operands", swap_operands},
    {"product for quotient", exchange_product},
    {"square for product", exchange_square},
    {"quotient for reciprocal", exchange_reciprocal},
    {"root as a power", root_as_power},
    {"subtract by adding", subtract_by_adding},
    {"negate by a product", negate_by_product},
    {"turn a Where", flip_where},
    {"turn a comparison", flip_comparison},
    {"And by Or", and_by_or},
    {"axis from the other end", count_axis_from_the_other_end},
    {"mean by sum", mean_by_sum},
    {"reassociate a product", reassociate},
};

void respeller_begin(respeller *r, egi_graph *graph, uint64_t seed) {
  *r = (respeller){.graph = graph, .emit = {.graph = graph, .status = EG_OK}, .random = seed};
}

size_t respell_count(void) {
  return EGI_COUNT(kinds);
}

const char *respell_name(size_t kind) {
  return kinds[kind].name;
}

bool respell(respeller *r, size_t kind) {
  bool is_done = false;
  for (unsigned i = 0; i < TRIES && !is_done; i++) {
    egi_node_id id = 1 + (egi_node_id)respeller_random(r, r->graph->n_nodes - 1);
    if (node_at(r, id)->op != EGI_OP_NONE) is_done = kinds[kind].apply(r, id);
    if (r->emit.status != EG_OK) return false;
  }
  return is_done && egi_graph_tidy(r->graph) == EG_OK && egi_infer_graph(r->graph) == EG_OK;
}
