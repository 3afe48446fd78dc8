/* Compares one pattern with the graph: a list of goals, worked off in order with the choices undone that lead nowhere.
 * The number of steps is bounded, so a candidate costs no more than a constant. */
#include "passes/rules.h"

typedef struct mark {
  unsigned n_bound, n_bound_nodes, n_inside, n_goals, n_attributes;
} mark;

static mark take_mark(const egi_match *m) {
  return (mark){m->n_bound, m->n_bound_nodes, m->n_inside, m->n_goals, m->n_attributes};
}

static void undo(egi_match *m, mark to) {
  while (m->n_bound > to.n_bound) m->values[m->bound[--m->n_bound]] = 0;
  while (m->n_bound_nodes > to.n_bound_nodes) m->nodes[m->bound_nodes[--m->n_bound_nodes]] = 0;
  m->n_inside = to.n_inside;
  m->n_goals = to.n_goals;
  m->n_attributes = to.n_attributes;
}

void egi_match_miss(egi_match *m, egi_node_id node, const char *reason, egi_op wanted) {
  unsigned depth = m->n_bound_nodes + (m->is_whole ? EGI_MATCH_NODES : 0u);
  if (m->miss.reason != NULL && depth <= m->miss.depth) return;
  m->miss = (egi_miss){.node = node, .depth = depth, .reason = reason, .wanted = wanted};
}

bool egi_match_fail(egi_match *m, egi_node_id node, const char *reason) {
  egi_match_miss(m, node, reason, EGI_OP_NONE);
  return false;
}

/* ---- goals ----------------------------------------------------------------------------------------------------- */

static bool solve(egi_match *m, unsigned at);

static bool push(egi_match *m, egi_value_id wanted, egi_value_id found) {
  if (m->n_goals == EGI_MATCH_GOALS) return false;
  m->goals[m->n_goals++] = (egi_goal){.wanted = wanted, .found = found, .exponent = 1.0};
  return true;
}

static bool enter(egi_match *m, egi_node_id node) {
  for (unsigned i = 0; i < m->n_inside; i++)
    if (m->inside[i] == node) return true;
  if (m->n_inside == EGI_MATCH_INSIDE) return false;
  m->inside[m->n_inside++] = node;
  return true;
}

static void bind(egi_match *m, egi_value_id wanted, egi_value_id found) {
  if (m->values[wanted] != 0) return;
  m->values[wanted] = found;
  m->bound[m->n_bound++] = wanted;
}

/* The pattern's node is the graph's; its attributes agree. */
static bool settle(egi_match *m, egi_node_id wanted, egi_node_id found) {
  if (m->nodes[wanted] != 0)
    return m->nodes[wanted] == found || egi_match_fail(m, found, "two results belong to different nodes");
  if (!enter(m, found)) return false;
  m->nodes[wanted] = found;
  m->bound_nodes[m->n_bound_nodes++] = wanted;
  return egi_match_attributes(m, &m->pattern->nodes[wanted], found);
}

/* The exponent of a pattern's Pow with a constant, Sqrt or Reciprocal; also of a node of the graph (x · x, 1 / x). */
static bool power_of(const egi_graph *graph, egi_node_id id, double *exponent, egi_value_id *base) {
  const egi_node *node = &graph->nodes[id];
  double number = 0.0;
  const egi_value_id *in = node->inputs;
  *base = node->n_inputs > 0 ? in[0] : 0;
  switch (node->op) {
  case EGI_OP_Sqrt:
    *exponent = 0.5;
    return true;
  case EGI_OP_Reciprocal:
    *exponent = -1.0;
    return true;
  case EGI_OP_Pow:
    return egi_constant_scalar(graph, in[1], exponent);
  case EGI_OP_Div:
    *exponent = -1.0;
    *base = in[1];
    return egi_constant_scalar(graph, in[0], &number) && number == 1.0;
  case EGI_OP_Mul:
    *exponent = 2.0;
    if (egi_values_are_same(graph, in[0], in[1])) return true;
    for (unsigned i = 0; i < 2; i++) { /* x · x · x */
      egi_node_id square = egi_maker(graph, in[i]);
      *exponent = 3.0;
      *base = in[1 - i];
      if (square != 0 && graph->nodes[square].op == EGI_OP_Mul &&
          egi_values_are_same(graph, graph->nodes[square].inputs[0], graph->nodes[square].inputs[1]) &&
          egi_values_are_same(graph, graph->nodes[square].inputs[0], *base))
        return true;
    }
    return false;
  default:
    return false;
  }
}

static bool is_power(const egi_match *m, egi_value_id wanted, double *exponent, egi_value_id *base) {
  egi_node_id id = egi_maker(m->pattern, wanted);
  return id != 0 && m->pattern->nodes[id].op != EGI_OP_Mul && power_of(m->pattern, id, exponent, base);
}

static bool is_constant(const egi_match *m, egi_value_id wanted) {
  egi_node_id id = egi_maker(m->pattern, wanted);
  return id != 0 && m->pattern->nodes[id].op == EGI_OP_Constant;
}

/* The next value upwards through a cast, which is then inside. */
static bool look_through(egi_match *m, egi_value_id *value) {
  egi_node_id id = egi_maker(m->graph, *value);
  if (id == 0 || !egi_match_is_transparent(m, &m->graph->nodes[id], *value) || !enter(m, id)) return false;
  *value = m->graph->nodes[id].inputs[0];
  return true;
}

/* base^wanted = found^exponent: up the chain of roots, inverses and one power. */
static bool solve_power(egi_match *m, const egi_goal *goal, unsigned at) {
  double wanted = 0.0, exponent = goal->exponent, step = 0.0;
  egi_value_id base = 0, value = goal->found, next = 0;
  bool has_power = false;
  egi_node_id own = egi_maker(m->pattern, goal->wanted);
  is_power(m, goal->wanted, &wanted, &base);
  for (unsigned depth = 0; depth < 8; depth++) {
    mark before = take_mark(m);
    if (exponent == wanted && (depth > 0 || goal->exponent != 1.0)) {
      if (goal->exponent == 1.0) bind(m, goal->wanted, goal->found);
      if (m->nodes[own] == 0) m->bound_nodes[m->n_bound_nodes++] = own;
      m->nodes[own] = egi_maker(m->graph, goal->found);
      if (push(m, base, value) && solve(m, at + 1)) return true;
      undo(m, before);
    }
    egi_node_id id = egi_maker(m->graph, value);
    bool is_step = id != 0 && power_of(m->graph, id, &step, &next);
    if (is_step && step != -1.0) {
      if (has_power) is_step = false;
      has_power = true;
    }
    if (is_step && enter(m, id)) {
      exponent *= step;
      value = next;
    } else if (!look_through(m, &value)) {
      egi_match_miss(m, id, id != 0 ? "wanted" : "an input stands where the pattern has", m->pattern->nodes[own].op);
      return false;
    }
  }
  return false;
}

/* ---- nodes ----------------------------------------------------------------------------------------------------- */

static bool push_inputs(egi_match *m, const egi_node *wanted, const egi_node *found, bool is_swapped) {
  unsigned n = found->n_inputs;
  while (n > wanted->n_inputs && found->inputs[n - 1] == 0) n--;
  if (n != wanted->n_inputs) return false;
  for (unsigned i = 0; i < n; i++) {
    egi_value_id value = found->inputs[is_swapped && i < 2 ? 1 - i : i];
    if ((wanted->inputs[i] == 0) != (value == 0)) return false;
    if (value != 0 && !push(m, wanted->inputs[i], value)) return false;
  }
  return true;
}

/* The node has the pattern's operator. */
static bool solve_same(egi_match *m, const egi_goal *goal, unsigned at, egi_node_id id, egi_value_id value) {
  egi_node_id own = egi_maker(m->pattern, goal->wanted);
  const egi_node *wanted = &m->pattern->nodes[own], *found = &m->graph->nodes[id];
  if (m->graph->values[value].index != m->pattern->values[goal->wanted].index)
    return egi_match_fail(m, id, "another result of the node is used");
  bool can_swap = found->n_inputs >= 2 && (egi_op_get(found->op)->flags & EGI_OP_COMMUTATIVE) != 0;
  bool is_known = m->nodes[own] != 0; /* another of its results was met: the inputs are goals already */
  for (unsigned order = 0; order < (can_swap && !is_known ? 2u : 1u); order++) {
    mark before = take_mark(m);
    if (settle(m, own, id)) {
      bind(m, goal->wanted, value);
      bool is_pushed = is_known || push_inputs(m, wanted, found, order == 1);
      if (!is_pushed) egi_match_fail(m, id, "the number of its inputs is another one");
      if (is_pushed && solve(m, at + 1)) return true;
    }
    undo(m, before);
  }
  return false;
}

/* Two operands as goals, the second with an exponent or a sign. */
static bool solve_pair(egi_match *m, const egi_goal *goal, unsigned at, egi_node_id id, const egi_goal pair[2]) {
  mark before = take_mark(m);
  if (m->n_goals + 2 <= EGI_MATCH_GOALS && settle(m, egi_maker(m->pattern, goal->wanted), id)) {
    bind(m, goal->wanted, m->graph->nodes[id].outputs[0]);
    m->goals[m->n_goals++] = pair[0];
    m->goals[m->n_goals++] = pair[1];
    if (solve(m, at + 1)) return true;
  }
  undo(m, before);
  return false;
}

/* a · b as a / (1/b), a / b as a · (1/b), for a constant or a power b; a + c as a - (-c). */
static bool solve_inverse(egi_match *m, const egi_goal *goal, unsigned at, egi_node_id id) {
  const egi_node *wanted = &m->pattern->nodes[egi_maker(m->pattern, goal->wanted)], *found = &m->graph->nodes[id];
  bool is_sum = wanted->op == EGI_OP_Add || wanted->op == EGI_OP_Sub;
  for (unsigned i = 0; i < 4; i++) {
    unsigned own = i / 2, other = i % 2; /* operand of the pattern and of the node that is inverted */
    double exponent = 0.0;
    egi_value_id base = 0, b = wanted->inputs[own];
    bool is_inverted = is_constant(m, b) || (!is_sum && is_power(m, b, &exponent, &base));
    bool pattern_fits = wanted->op == EGI_OP_Mul || wanted->op == EGI_OP_Add || own == 1;
    bool node_fits = found->op == EGI_OP_Mul || found->op == EGI_OP_Add || other == 1;
    if (!is_inverted || !pattern_fits || !node_fits) continue;
    const egi_goal pair[2] = {
        {.wanted = wanted->inputs[1 - own], .found = found->inputs[1 - other], .exponent = 1.0},
        {.wanted = b, .found = found->inputs[other], .exponent = is_sum ? 1.0 : -1.0, .is_negated = is_sum}};
    if (solve_pair(m, goal, at, id, pair)) return true;
  }
  return false;
}

/* -x as x · -1. */
static bool solve_negation(egi_match *m, const egi_goal *goal, unsigned at, egi_node_id id) {
  const egi_node *found = &m->graph->nodes[id];
  egi_node_id own = egi_maker(m->pattern, goal->wanted);
  double number = 0.0;
  for (unsigned i = 0; i < 2; i++) {
    mark before = take_mark(m);
    if (!egi_constant_scalar(m->graph, found->inputs[i], &number) || number != -1.0) continue;
    if (settle(m, own, id)) {
      bind(m, goal->wanted, found->outputs[0]);
      if (push(m, m->pattern->nodes[own].inputs[0], found->inputs[1 - i]) && solve(m, at + 1)) return true;
    }
    undo(m, before);
  }
  return false;
}

static bool is_inverse_pair(egi_op a, egi_op b) {
  return (a == EGI_OP_Mul && b == EGI_OP_Div) || (a == EGI_OP_Div && b == EGI_OP_Mul) ||
         (a == EGI_OP_Add && b == EGI_OP_Sub) || (a == EGI_OP_Sub && b == EGI_OP_Add);
}

static bool solve_node(egi_match *m, const egi_goal *goal, unsigned at) {
  egi_op wanted = m->pattern->nodes[egi_maker(m->pattern, goal->wanted)].op;
  egi_value_id value = goal->found;
  for (;;) {
    egi_node_id id = egi_maker(m->graph, value);
    egi_op op = id != 0 ? m->graph->nodes[id].op : EGI_OP_NONE;
    if (op == wanted && solve_same(m, goal, at, id, value)) return true;
    if (is_inverse_pair(wanted, op) && solve_inverse(m, goal, at, id)) return true;
    if (wanted == EGI_OP_Neg && op == EGI_OP_Mul && solve_negation(m, goal, at, id)) return true;
    if (look_through(m, &value)) continue;
    if (op != wanted) egi_match_miss(m, id, id != 0 ? "wanted" : "an input stands where the pattern has", wanted);
    return false;
  }
}

static bool solve(egi_match *m, unsigned at) {
  if (at == m->n_goals) return true;
  if (++m->n_steps > EGI_MATCH_STEPS) return egi_match_fail(m, m->root, "too many ways to read it");
  const egi_goal goal = m->goals[at];
  double exponent = 0.0;
  egi_value_id known = m->values[goal.wanted], base = 0;
  bool is_plain = goal.exponent == 1.0 && !goal.is_negated;
  if (is_constant(m, goal.wanted)) {
    const egi_node *constant = &m->pattern->nodes[egi_maker(m->pattern, goal.wanted)];
    if (!egi_match_constant(m, &goal, constant)) return false;
    if (is_plain) bind(m, goal.wanted, goal.found);
    return solve(m, at + 1);
  }
  if (known != 0 && is_plain) {
    if (!egi_values_are_same(m->graph, known, goal.found))
      return egi_match_fail(m, egi_maker(m->graph, goal.found), "an operand is not the same value as before");
    return solve(m, at + 1);
  }
  if (m->pattern->values[goal.wanted].kind == EGI_VALUE_INPUT) {
    if (!is_plain) return false;
    bind(m, goal.wanted, goal.found);
    return solve(m, at + 1);
  }
  if (is_power(m, goal.wanted, &exponent, &base)) return solve_power(m, &goal, at);
  return is_plain && solve_node(m, &goal, at);
}

bool egi_match_can_start(const egi_graph *pattern, egi_op op) {
  egi_node_id id = egi_maker(pattern, pattern->outputs[0]);
  egi_op wanted = id != 0 ? pattern->nodes[id].op : EGI_OP_NONE;
  double exponent = 0.0;
  egi_value_id base = 0;
  if (op == wanted) return op != EGI_OP_NONE;
  if (is_inverse_pair(wanted, op) || (wanted == EGI_OP_Neg && op == EGI_OP_Mul)) return true;
  if (id == 0 || wanted == EGI_OP_Mul || !power_of(pattern, id, &exponent, &base)) return false;
  return op == EGI_OP_Pow || op == EGI_OP_Sqrt || op == EGI_OP_Reciprocal || op == EGI_OP_Div || op == EGI_OP_Mul;
}

bool egi_match_run(egi_match *m, const egi_graph *pattern, egi_node_id root) {
  egi_value_id wanted = pattern->outputs[0];
  const egi_node *node = &m->graph->nodes[root];
  uint32_t index = pattern->values[wanted].index;
  m->pattern = pattern;
  m->root = root;
  undo(m, (mark){0});
  m->is_whole = false;
  m->n_extras = 0;
  m->n_steps = 0;
  if (index >= node->n_outputs || node->outputs[index] == 0) return false;
  m->dtype = m->graph->values[node->outputs[index]].dtype;
  if (!push(m, wanted, node->outputs[index]) || !solve(m, 0)) return false;
  /* solve() keeps what it bound when it succeeds */
  for (uint32_t i = 1; i < pattern->n_outputs; i++)
    if (m->values[pattern->outputs[i]] == 0)
      return egi_match_fail(m, root, "a result of the pattern has no value of its own");
  m->is_whole = true;
  return true;
}
