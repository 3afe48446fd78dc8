/* Einsum (operator version 12) as Transpose, MatMul, Mul, ReduceSum: operands are taken in from the left, two at a
 * time. Labels of a pair are batch (in both, needed later), left or right (in one, needed later) or contracted (in
 * both, needed by nobody); those in one operand that nobody needs are summed first. Where a group holds several labels
 * they are one axis of the MatMul for its duration. Dims of an ellipsis are labels of their own, counted from the last.
 */
#include <string.h>

#include "passes/lower.h"

enum { ELLIPSIS = 128, MAX_LABELS = 16, MAX_OPERANDS = 16 };

typedef struct term {
  unsigned char labels[MAX_LABELS];
  int count;
} term;

typedef struct einsum {
  egi_lowering *lowering;
  egi_emitter *emit;
  term inputs[MAX_OPERANDS], output;
  unsigned n_inputs;
} einsum;

/* A value whose axes carry labels. */
typedef struct operand {
  egi_value_id value;
  term axes;
} operand;

static bool has_label(const term *t, unsigned char label) {
  return memchr(t->labels, label, (size_t)t->count) != NULL;
}

static void add_label(term *t, unsigned char label) {
  if (t->count < MAX_LABELS) t->labels[t->count++] = label;
}

/* ---- equation ------------------------------------------------------------------------------------------------- */

static bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* One term up to a comma, an arrow or the end; `n_dots` dims stand for an ellipsis. false: no term. */
static bool read_term(const char **text, int rank, term *out) {
  const char *at = *text;
  int n_letters = 0;
  bool has_dots = false;
  for (const char *c = at; *c != '\0' && *c != ',' && *c != '-'; c++) n_letters += is_letter(*c) ? 1 : 0;
  int n_dots = rank - n_letters;
  for (; *at != '\0' && *at != ',' && *at != '-'; at++) {
    if (*at == ' ') continue;
    if (is_letter(*at)) {
      if (out->count >= MAX_LABELS) return false;
      add_label(out, (unsigned char)*at);
      continue;
    }
    if (has_dots || n_dots < 0 || strncmp(at, "...", 3) != 0 || out->count + n_dots > MAX_LABELS) return false;
    for (int i = n_dots; i-- > 0;) add_label(out, (unsigned char)(ELLIPSIS + i));
    has_dots = true;
    at += 2;
  }
  *text = at;
  return has_dots || n_dots == 0;
}

static int count_label(const einsum *e, unsigned char label) {
  int count = 0;
  for (unsigned i = 0; i < e->n_inputs; i++)
    for (int k = 0; k < e->inputs[i].count; k++) count += e->inputs[i].labels[k] == label;
  return count;
}

static int count_dots(const einsum *e) {
  int n = 0;
  while (n < EGI_MAX_RANK && count_label(e, (unsigned char)(ELLIPSIS + n)) > 0) n++;
  return n;
}

/* Without an arrow: the ellipsis, then labels that stand there once, in ASCII order. */
static void make_output(einsum *e) {
  for (int i = count_dots(e); i-- > 0;) add_label(&e->output, (unsigned char)(ELLIPSIS + i));
  for (unsigned char c = 'A'; c <= 'z'; c++)
    if (is_letter((char)c) && count_label(e, c) == 1) add_label(&e->output, c);
}

static bool read_output(einsum *e, const char *text) {
  int n_letters = 0, n_dots = strstr(text, "...") != NULL ? count_dots(e) : 0;
  for (const char *c = text; *c != '\0'; c++) n_letters += is_letter(*c) ? 1 : 0;
  if (!read_term(&text, n_letters + n_dots, &e->output) || *text != '\0') return false;
  for (int i = 0; i < e->output.count; i++) {
    unsigned char label = e->output.labels[i];
    bool is_known = count_label(e, label) > 0;
    if (!is_known || memchr(e->output.labels, label, (size_t)i) != NULL) return false;
  }
  return true;
}

static bool read_equation(einsum *e) {
  const char *text = egi_node_string(e->lowering->node, "equation", "");
  for (unsigned i = 0; i < e->n_inputs; i++) {
    int rank = egi_lowering_value(e->lowering, egi_lowering_input(e->lowering, i))->rank;
    if (!read_term(&text, rank, &e->inputs[i]) || e->inputs[i].count != rank) return false;
    if (i + 1 < e->n_inputs && *text++ != ',') return false;
  }
  if (strncmp(text, "->", 2) == 0) return read_output(e, text + 2);
  make_output(e);
  return *text == '\0';
}

/* ---- operands ------------------------------------------------------------------------------------------------- */

static void permute(einsum *e, operand *a, const term *order) {
  int64_t perm[MAX_LABELS];
  bool is_same = true;
  for (int i = 0; i < order->count; i++) {
    const unsigned char *at = memchr(a->axes.labels, order->labels[i], (size_t)a->axes.count);
    perm[i] = at != NULL ? at - a->axes.labels : 0;
    is_same = is_same && perm[i] == i;
  }
  a->axes = *order;
  if (is_same) return;
  const egi_attribute attribute = egi_attribute_ints("perm", perm, (uint32_t)order->count);
  a->value = egi_emit(e->emit, EGI_OP_Transpose, &a->value, 1, &attribute, 1);
}

/* The first label that stands on two axes is left on one: [.., n, n] -> [.., n·n] -> every (n + 1)th element. */
static eg_status take_diagonal(einsum *e, operand *a, int first, int second) {
  term order = {.count = 0}, rest = {.count = 0};
  int64_t n = 0, perm[MAX_LABELS], shape[MAX_LABELS] = {0};
  if (!egi_lowering_size(e->lowering, a->value, first, &n) || n > INT32_MAX)
    return egi_lowering_fail(e->lowering, EG_ERROR_UNSUPPORTED, "a repeated label on an axis whose size is not known");
  for (int i = 0; i < a->axes.count; i++)
    if (i != first && i != second) {
      perm[order.count] = i;
      add_label(&order, a->axes.labels[i]);
      add_label(&rest, a->axes.labels[i]);
    }
  int at = rest.count;
  perm[at] = first;
  perm[at + 1] = second;
  const egi_attribute attribute = egi_attribute_ints("perm", perm, (uint32_t)a->axes.count);
  egi_value_id moved = egi_emit(e->emit, EGI_OP_Transpose, &a->value, 1, &attribute, 1);
  shape[at] = n * n;
  egi_value_id flat = egi_emit_axes(e->emit, EGI_OP_Reshape, moved, shape, (uint32_t)at + 1);
  const int64_t start = 0, end = n * n, axis = at, step = n + 1;
  const egi_value_id slice[5] = {flat, egi_emit_integers(e->emit, &start, 1), egi_emit_integers(e->emit, &end, 1),
                                 egi_emit_integers(e->emit, &axis, 1), egi_emit_integers(e->emit, &step, 1)};
  a->value = egi_emit(e->emit, EGI_OP_Slice, slice, 5, NULL, 0);
  add_label(&rest, a->axes.labels[first]);
  a->axes = rest;
  return e->emit->status;
}

static eg_status take_diagonals(einsum *e, operand *a) {
  for (int i = 0; i < a->axes.count; i++)
    for (int k = i + 1; k < a->axes.count; k++)
      if (a->axes.labels[i] == a->axes.labels[k]) {
        EG_TRY(take_diagonal(e, a, i, k));
        return take_diagonals(e, a); /* one axis less */
      }
  return EG_OK;
}

/* Sums over the labels that are in neither `other` nor the output nor an operand from `next` on. */
static bool is_needed(const einsum *e, unsigned char label, unsigned next) {
  bool is_found = has_label(&e->output, label);
  for (unsigned i = next; i < e->n_inputs && !is_found; i++) is_found = has_label(&e->inputs[i], label);
  return is_found;
}

static void sum_unneeded(einsum *e, operand *a, const term *other, unsigned next) {
  int64_t axes[MAX_LABELS];
  uint32_t count = 0;
  term kept = {.count = 0};
  for (int i = 0; i < a->axes.count; i++) {
    unsigned char label = a->axes.labels[i];
    if ((other != NULL && has_label(other, label)) || is_needed(e, label, next))
      add_label(&kept, label);
    else
      axes[count++] = i;
  }
  if (count == 0) return;
  a->axes = kept;
  const egi_value_id inputs[2] = {a->value, egi_emit_integers(e->emit, axes, count)};
  a->value = egi_emit_with_int(e->emit, EGI_OP_ReduceSum, inputs, 2, "keepdims", 0);
}

/* ---- pairs ---------------------------------------------------------------------------------------------------- */

typedef struct groups {
  term batch, left, right, contracted;
} groups;

static void append(term *t, const term *more) {
  for (int i = 0; i < more->count; i++) add_label(t, more->labels[i]);
}

static void find_groups(const einsum *e, const operand *a, const operand *b, unsigned next, groups *g) {
  for (int i = 0; i < a->axes.count; i++) {
    unsigned char label = a->axes.labels[i];
    term *group = !has_label(&b->axes, label) ? &g->left : is_needed(e, label, next) ? &g->batch : &g->contracted;
    add_label(group, label);
  }
  for (int i = 0; i < b->axes.count; i++)
    if (!has_label(&a->axes, b->axes.labels[i])) add_label(&g->right, b->axes.labels[i]);
}

/* Product of the sizes of axes [start, end), i64 [1]. */
static egi_value_id size_of_group(einsum *e, egi_value_id a, int start, int end) {
  const int64_t one = 1;
  egi_value_id product =
      start < end ? egi_emit_sizes(e->emit, a, start, start + 1) : egi_emit_integers(e->emit, &one, 1);
  for (int i = start + 1; i < end; i++)
    product = egi_emit_binary(e->emit, EGI_OP_Mul, product, egi_emit_sizes(e->emit, a, i, i + 1));
  return product;
}

/* [batch.., m.., k..] -> [batch.., M, K] */
static egi_value_id as_matrices(einsum *e, egi_value_id a, int n_batch, int m, int k) {
  if (m == 1 && k == 1) return a;
  const egi_value_id parts[3] = {egi_emit_sizes(e->emit, a, 0, n_batch), size_of_group(e, a, n_batch, n_batch + m),
                                 size_of_group(e, a, n_batch + m, n_batch + m + k)};
  egi_value_id shape =
      egi_emit_with_int(e->emit, EGI_OP_Concat, n_batch > 0 ? parts : parts + 1, n_batch > 0 ? 3 : 2, "axis", 0);
  return egi_emit_binary(e->emit, EGI_OP_Reshape, a, shape);
}

static void multiply_matrices(einsum *e, operand *a, operand *b, const groups *g) {
  term left = g->batch, right = g->batch;
  int n = g->batch.count;
  append(&left, &g->left);
  append(&left, &g->contracted);
  append(&right, &g->contracted);
  append(&right, &g->right);
  permute(e, a, &left);
  permute(e, b, &right);
  egi_value_id x = as_matrices(e, a->value, n, g->left.count, g->contracted.count);
  egi_value_id y = as_matrices(e, b->value, n, g->contracted.count, g->right.count);
  egi_value_id product = egi_emit_binary(e->emit, EGI_OP_MatMul, x, y);
  if (g->left.count != 1 || g->right.count != 1) {
    egi_value_id parts[3];
    unsigned count = 0;
    if (n > 0) parts[count++] = egi_emit_sizes(e->emit, product, 0, n);
    if (g->left.count > 0) parts[count++] = egi_emit_sizes(e->emit, a->value, n, n + g->left.count);
    if (g->right.count > 0) parts[count++] = egi_emit_sizes(e->emit, b->value, n + g->contracted.count, b->axes.count);
    const int64_t none = 0;
    egi_value_id shape = count > 0 ? egi_emit_with_int(e->emit, EGI_OP_Concat, parts, count, "axis", 0)
                                   : egi_emit_integers(e->emit, &none, 0);
    product = egi_emit_binary(e->emit, EGI_OP_Reshape, product, shape);
  }
  a->value = product;
  a->axes = g->batch;
  append(&a->axes, &g->left);
  append(&a->axes, &g->right);
}

/* No sum: a product with axes of 1 where an operand lacks the label. */
static void multiply_elements(einsum *e, operand *a, operand *b, const groups *g) {
  term left = g->batch, right = g->batch;
  int64_t axes[MAX_LABELS];
  append(&left, &g->left);
  append(&right, &g->right);
  permute(e, a, &left);
  permute(e, b, &right);
  for (int i = 0; i < g->right.count; i++) axes[i] = left.count + i;
  if (g->right.count > 0) a->value = egi_emit_axes(e->emit, EGI_OP_Unsqueeze, a->value, axes, (uint32_t)g->right.count);
  for (int i = 0; i < g->left.count; i++) axes[i] = g->batch.count + i;
  if (g->left.count > 0) b->value = egi_emit_axes(e->emit, EGI_OP_Unsqueeze, b->value, axes, (uint32_t)g->left.count);
  a->value = egi_emit_binary(e->emit, EGI_OP_Mul, a->value, b->value);
  a->axes = left;
  append(&a->axes, &g->right);
}

static eg_status combine(einsum *e, operand *a, operand *b, unsigned next) {
  groups g = {.batch = {.count = 0}};
  sum_unneeded(e, a, &b->axes, next);
  sum_unneeded(e, b, &a->axes, next);
  find_groups(e, a, b, next, &g);
  if (g.batch.count + g.left.count + g.right.count + g.contracted.count > EGI_MAX_RANK)
    return egi_lowering_fail(e->lowering, EG_ERROR_UNSUPPORTED, "more than 8 labels at a time");
  if (g.contracted.count > 0)
    multiply_matrices(e, a, b, &g);
  else
    multiply_elements(e, a, b, &g);
  return e->emit->status;
}

eg_status egi_lower_einsum(egi_lowering *lowering) {
  einsum e = {.lowering = lowering, .emit = &lowering->emit, .n_inputs = lowering->node->n_inputs};
  operand all;
  if (e.n_inputs > MAX_OPERANDS) return egi_lowering_fail(lowering, EG_ERROR_UNSUPPORTED, "more than 16 operands");
  if (!read_equation(&e)) return egi_lowering_fail(lowering, EG_ERROR_FORMAT, "its equation does not fit its operands");
  for (unsigned i = 0; i < e.n_inputs; i++) {
    operand next = {egi_lowering_input(lowering, i), e.inputs[i]};
    EG_TRY(take_diagonals(&e, &next));
    if (i == 0)
      all = next;
    else
      EG_TRY(combine(&e, &all, &next, i + 1));
  }
  sum_unneeded(&e, &all, NULL, e.n_inputs);
  permute(&e, &all, &e.output);
  lowering->results[0] = all.value;
  return EG_OK;
}
