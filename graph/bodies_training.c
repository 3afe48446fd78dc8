/* Bodies of the loss, its gradients, and the operators that order and collect a training step. */
#include "graph/bodies.h"
#include "graph/linear.h"

#include <stddef.h>
#include <stdio.h>

/* ---- loss ------------------------------------------------------------------------------------------------------- */

/* is_target and safe_labels of `labels`. */
static void add_labels(egi_body *body) {
  egi_body_integer(body, "no_label", -100);
  egi_body_integer(body, "any_label", 0);
  egi_text_add(body->text, "is_other = Equal (labels, no_label)\nis_target = Not (is_other)\n"
                           "safe_labels = Where (is_target, labels, any_label)\n");
  egi_body_integers(body, "label_axis", (const int64_t[1]){-1}, 1);
}

/* logp and lse of `wide_logits`. */
static void add_log_probability(egi_body *body) {
  add_labels(body);
  egi_body_number(body, "nothing", 0.0, "wide_logits");
  egi_text_add(body->text,
               "log_sum = ReduceLogSumExp <keepdims = 0> (wide_logits, label_axis)\n"
               "label_column = Unsqueeze (safe_labels, label_axis)\n"
               "picked = GatherElements <axis = -1> (wide_logits, label_column)\nscore = Squeeze (picked, label_axis)\n"
               "difference = Sub (score, log_sum)\ntarget_logp = Where (is_target, difference, nothing)\n"
               "logp = Cast <to = 1> (target_logp)\n");
  if (egi_body_wants(body, 1))
    egi_text_add(body->text, "target_lse = Where (is_target, log_sum, nothing)\nlse = Cast <to = 1> (target_lse)\n");
}

/* d_wide = d logp · (one at the label - probabilities), rows without a label 0. */
static void add_log_probability_grad(egi_body *body) {
  add_labels(body);
  egi_body_integer(body, "first_class", 0);
  egi_body_integer(body, "one_class", 1);
  egi_body_number(body, "nothing", 0.0, "wide_logits");
  egi_body_integers(body, "scalar", NULL, 0);
  egi_text_add(
      body->text,
      "class_row = Shape <start = -1> (wide_logits)\nn_classes = Reshape (class_row, scalar)\n"
      "classes = Range (first_class, n_classes, one_class)\nlabel_column = Unsqueeze (safe_labels, label_axis)\n"
      "is_label = Equal (label_column, classes)\nhot = CastLike (is_label, wide_logits)\n"
      "lse_like = CastLike (lse, wide_logits)\nlse_column = Unsqueeze (lse_like, label_axis)\n"
      "logs = Sub (wide_logits, lse_column)\nprobabilities = Exp (logs)\n"
      "difference = Sub (hot, probabilities)\ndy_like = CastLike (d_logp, wide_logits)\n"
      "dy_column = Unsqueeze (dy_like, label_axis)\nchange = Mul (difference, dy_column)\n"
      "target_column = Unsqueeze (is_target, label_axis)\nd_wide = Where (target_column, change, nothing)\n");
}

bool egi_body_log_probability(egi_body *body) {
  egi_body_widen(body, "wide_logits", "logits", 0);
  add_log_probability(body);
  return true;
}

bool egi_body_log_probability_grad(egi_body *body) {
  egi_body_widen(body, "wide_logits", "logits", 0);
  add_log_probability_grad(body);
  egi_text_add(body->text, "d_logits = CastLike (d_wide, logits)\n");
  return true;
}

/* matrix = the head's weight [d, V] in the type of the hidden rows; `first` = the input with the scales. */
static bool add_matrix(egi_body *body, unsigned first) {
  if (egi_linear_storage_of(body->node) == EGI_LINEAR_PLAIN) {
    egi_text_add(body->text, "matrix = Identity (weight)\n");
    return true;
  }
  if (!egi_body_stored_weight(body, first)) return false;
  egi_text_add(body->text, "stored = CastLike (w, hidden)\n");
  egi_text_add(body->text, egi_body_is_turned(body) ? "matrix = Identity (stored)\n"
                                                    : "matrix = Transpose <perm = [1, 0]> (stored)\n");
  return true;
}

static bool add_logits(egi_body *body, unsigned bias) {
  bool has_bias = egi_body_has(body, bias);
  if (!add_matrix(body, bias + 1)) return false;
  egi_text_format(body->text, "%s = MatMul (hidden, matrix)\n", has_bias ? "products" : "logits");
  if (has_bias) egi_text_add(body->text, "logits = Add (products, bias)\n");
  egi_body_widen(body, "wide_logits", "logits", 0);
  return true;
}

bool egi_body_linear_log_probability(egi_body *body) {
  if (!add_logits(body, 3)) return false;
  add_log_probability(body);
  return true;
}

bool egi_body_linear_log_probability_grad(egi_body *body) {
  if (!add_logits(body, 5)) return false;
  add_log_probability_grad(body);
  egi_text_add(body->text, "d_logits = CastLike (d_wide, hidden)\nturned = Transpose <perm = [1, 0]> (matrix)\n"
                           "d_hidden = MatMul (d_logits, turned)\n");
  if (!egi_body_wants(body, 1)) return true;
  egi_body_integers(body, "any_rows", (const int64_t[1]){-1}, 1);
  egi_text_add(body->text, "width = Shape <start = -1> (hidden)\nflat_shape = Concat <axis = 0> (any_rows, width)\n"
                           "flat_hidden = Reshape (hidden, flat_shape)\n"
                           "flat_logits_shape = Concat <axis = 0> (any_rows, class_row)\n"
                           "flat_logits = Reshape (d_logits, flat_logits_shape)\n"
                           "turned_hidden = Transpose <perm = [1, 0]> (flat_hidden)\n"
                           "d_weight = MatMul (turned_hidden, flat_logits)\n");
  if (!egi_body_wants(body, 2)) return true;
  egi_body_integers(body, "rows_axis", (const int64_t[1]){0}, 1);
  egi_text_add(body->text, "d_bias = ReduceSum <keepdims = 0> (flat_logits, rows_axis)\n");
  return true;
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

/* The sum so far counts unless the step state says that this is the step's first micro-batch. */
bool egi_body_accumulate(egi_body *body) {
  const int64_t start = (int64_t)offsetof(egi_step_state, has_gradients);
  const int64_t end = start + (int64_t)sizeof(((egi_step_state *)0)->has_gradients);
  egi_body_integers(body, "start", &start, 1);
  egi_body_integers(body, "end", &end, 1);
  egi_body_integers(body, "axis", (const int64_t[1]){0}, 1);
  egi_body_integer(body, "nothing", 0);
  egi_text_add(body->text,
               "flag = Slice (step, start, end, axis)\nflag_numbers = Cast <to = 7> (flag)\n"
               "flag_sum = ReduceSum <keepdims = 0> (flag_numbers, axis)\nhas_sum = Greater (flag_sum, nothing)\n"
               "sum = Add (before, gradient)\nafter = Where (has_sum, sum, gradient)\n");
  return true;
}

/* NAME = the integer at a place of the step state, i64 [1]: bytes, the lowest first. */
static void add_state_number(egi_body *body, const char *name, size_t offset, size_t size_bytes) {
  char line[640], start[48], end[48];
  const int64_t first = (int64_t)offset, last = (int64_t)(offset + size_bytes);
  snprintf(start, sizeof start, "%s_start", name);
  snprintf(end, sizeof end, "%s_end", name);
  egi_body_integers(body, start, &first, 1);
  egi_body_integers(body, end, &last, 1);
  snprintf(line, sizeof line,
           "%s_bytes = Slice (step, %s, %s, axis)\n%s_digits = Cast <to = 7> (%s_bytes)\n"
           "%s_terms = Mul (%s_digits, places)\n%s = ReduceSum <keepdims = 1> (%s_terms, axis)\n",
           name, start, end, name, name, name, name, name, name);
  egi_text_add(body->text, line);
}

static void add_unsigned(egi_body *body, const char *name, uint32_t number) {
  const int64_t value = number;
  egi_body_integers(body, name, &value, 1);
}

/* HIGH and LOW, 32 bits each, of the value FROM, below 2^32, times a factor: by halves of the factor, so that nothing
 * leaves an int64. */
static void add_wide_product(egi_body *body, const char *high, const char *low, const char *from, const char *factor) {
  char line[640];
  snprintf(line, sizeof line,
           "%s_l = Mul (%s, %s_low)\n%s_h = Mul (%s, %s_high)\n%s_carry = Div (%s_l, half)\n"
           "%s_middle = Add (%s_h, %s_carry)\n%s = Div (%s_middle, half)\n%s_rest = Mod (%s_middle, half)\n"
           "%s_raised = Mul (%s_rest, half)\n%s_end = Mod (%s_l, half)\n%s = Add (%s_raised, %s_end)\n",
           high, from, factor, high, from, factor, high, high, high, high, high, high, high, high, high, high, high,
           high, high, low, high, high);
  egi_text_add(body->text, line);
}

/* c0 … c3 of round `round` become those of the next. */
static void add_round(egi_body *body, int round, uint32_t key0, uint32_t key1) {
  char line[400], name[16], high[16], low[16];
  int next = round + 1;
  snprintf(name, sizeof name, "k0_%d", round);
  add_unsigned(body, name, key0);
  snprintf(name, sizeof name, "k1_%d", round);
  add_unsigned(body, name, key1);
  snprintf(name, sizeof name, "c0_%d", round);
  snprintf(high, sizeof high, "ah_%d", round);
  snprintf(low, sizeof low, "c3_%d", next);
  add_wide_product(body, high, low, name, "factor0");
  snprintf(name, sizeof name, "c2_%d", round);
  snprintf(high, sizeof high, "bh_%d", round);
  snprintf(low, sizeof low, "c1_%d", next);
  add_wide_product(body, high, low, name, "factor1");
  snprintf(line, sizeof line,
           "x0_%d = BitwiseXor (bh_%d, c1_%d)\nc0_%d = BitwiseXor (x0_%d, k0_%d)\n"
           "x2_%d = BitwiseXor (ah_%d, c3_%d)\nc2_%d = BitwiseXor (x2_%d, k1_%d)\n",
           round, round, round, next, round, round, round, round, round, next, round, round);
  egi_text_add(body->text, line);
}

/* Philox4x32-10 in int64 numbers, all four lanes for each element. */
bool egi_body_keyed_dropout(egi_body *body) {
  uint64_t seed = (uint64_t)egi_node_int(body->node, "seed", 0);
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  double ratio = (double)egi_node_float(body->node, "ratio", 0.0F);
  static const int64_t places[4] = {1, 1 << 8, 1 << 16, 1 << 24};
  egi_body_integers(body, "axis", (const int64_t[1]){0}, 1);
  egi_body_integers(body, "places", places, 4);
  egi_body_integer(body, "first", 0);
  egi_body_integer(body, "one", 1);
  egi_body_integer(body, "lanes", 4);
  egi_body_integer(body, "lane1", 1);
  egi_body_integer(body, "lane2", 2);
  add_state_number(body, "number_of_step", offsetof(egi_step_state, step), 4);
  add_state_number(body, "micro_batch", offsetof(egi_step_state, micro_batch), 4);
  add_unsigned(body, "half", 1u << 16);
  add_unsigned(body, "factor0_low", 0x1f53u);
  add_unsigned(body, "factor0_high", 0xd251u);
  add_unsigned(body, "factor1_low", 0x8d57u);
  add_unsigned(body, "factor1_high", 0xcd9eu);
  add_unsigned(body, "site", (uint32_t)egi_node_int(body->node, "site", 0));
  add_unsigned(body, "threshold", (uint32_t)(ratio * 4294967296.0));
  egi_text_add(body->text,
               "count = Size (x)\nelements = Range (first, count, one)\nblocks = Div (elements, lanes)\n"
               "lane = Mod (elements, lanes)\nc0_0 = Identity (blocks)\nzeros = Sub (c0_0, c0_0)\n"
               "c1_0 = Add (zeros, site)\nc2_0 = Add (zeros, number_of_step)\nc3_0 = Add (zeros, micro_batch)\n");
  for (int round = 0; round < 10; round++, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) add_round(body, round, key0, key1);
  egi_body_number(body, "nothing", 0.0, "x");
  egi_body_number(body, "scale", 1.0 / (1.0 - ratio), "x");
  egi_text_add(body->text,
               "is_0 = Equal (lane, first)\nis_1 = Equal (lane, lane1)\nis_2 = Equal (lane, lane2)\n"
               "of_23 = Where (is_2, c2_10, c3_10)\nof_123 = Where (is_1, c1_10, of_23)\n"
               "drawn = Where (is_0, c0_10, of_123)\nflat_kept = GreaterOrEqual (drawn, threshold)\n"
               "shape = Shape (x)\nis_kept = Reshape <allowzero = 1> (flat_kept, shape)\nscaled = Mul (x, scale)\n"
               "y = Where (is_kept, scaled, nothing)\n");
  return true;
}

/* x, chosen by what only the values after which it comes can tell: so no runtime knows it for x and takes it from where
 * it stood before. */
bool egi_body_barrier(egi_body *body) {
  egi_body_integers(body, "flat", (const int64_t[1]){-1}, 1);
  egi_body_integers(body, "from", (const int64_t[1]){0}, 1);
  egi_body_integers(body, "to", (const int64_t[1]){1}, 1);
  const char *condition = NULL;
  for (unsigned i = 1; i < body->node->n_inputs; i++) {
    if (!egi_body_has(body, i)) continue;
    char formal[16] = "after", expression[48];
    if (i > 1) snprintf(formal, sizeof formal, "in%u", i);
    egi_text_format(body->text,
                    "row%u = Reshape (%s, flat)\nfirst%u = Slice (row%u, from, to, from)\n"
                    "wide%u = Cast <to = 1> (first%u)\ntotal%u = ReduceSum <keepdims = 0> (wide%u, from)\n",
                    i, formal, i, i, i, i, i, i);
    const char *made = egi_arena_format(&body->graph->module->arena, "is_made%u", i);
    snprintf(expression, sizeof expression, "Equal (total%u, total%u)", i, i);
    if (made == NULL) return false;
    condition = egi_body_add_condition(body, condition, made, expression);
  }
  if (condition == NULL) return false;
  egi_text_format(body->text, "y = Where (%s, x, x)\n", condition);
  return true;
}

/* Elsewhere there is one memory. */
bool egi_body_offload(egi_body *body) {
  egi_text_add(body->text, "y = Identity (x)\n");
  return true;
}

bool egi_body_reload(egi_body *body) {
  return egi_body_barrier(body) || egi_body_offload(body);
}
