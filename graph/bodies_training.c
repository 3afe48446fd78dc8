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
