/* Bodies of the gradients of attention (the formulas of FlashAttention-2, arXiv:2307.08691, with whole rows): P from
 * the scores and their log-sum-exp, dS = P · (dY·Vᵀ - sum(dY · Y)), and what scale and soft cap make of it. */
#include "graph/bodies.h"

/* p: probabilities of `scores` where `valid` (NULL: everywhere), by lse [batch, heads, queries]. */
static void add_probabilities(egi_body *body, const char *valid, const char *scores) {
  egi_body_integers(body, "row_end", (const int64_t[1]){-1}, 1);
  egi_body_number(body, "none", 0.0, "scores");
  egi_text_format(body->text,
                  "lse_like = CastLike (lse, scores)\nlse_column = Unsqueeze (lse_like, row_end)\n"
                  "logs = Sub (%s, lse_column)\n",
                  scores);
  if (valid == NULL)
    egi_text_add(body->text, "p = Exp (logs)\n");
  else /* the exponential of a score that nobody sees may be infinite */
    egi_text_format(body->text,
                    "seen_logs = Where (%s, logs, none)\nall_p = Exp (seen_logs)\np = Where (%s, all_p, none)\n", valid,
                    valid);
}

/* ds [batch, heads, queries, keys]: the gradient of the products of q and k; p and dy as [batch, kv heads, share, ..].
 */
static void add_score_gradient(egi_body *body) {
  egi_text_add(body->text, "p_shape = Concat <axis = 0> (batch, kv_heads, share, queries, keys)\n"
                           "p5 = Reshape <allowzero = 1> (p, p_shape)\n"
                           "dy_shape = Concat <axis = 0> (batch, kv_heads, share, queries, value_width)\n"
                           "dy5_narrow = Reshape <allowzero = 1> (dy4, dy_shape)\ndy5 = CastLike (dy5_narrow, p)\n"
                           "v5_like = CastLike (v5, p)\nv5t = Transpose <perm = [0, 1, 2, 4, 3]> (v5_like)\n"
                           "dp5 = MatMul (dy5, v5t)\ny_like = CastLike (y4, p)\ndy_like = CastLike (dy4, p)\n"
                           "dy_y = Mul (dy_like, y_like)\nrow_sum = ReduceSum <keepdims = 1> (dy_y, row_end)\n"
                           "row_shape = Concat <axis = 0> (batch, kv_heads, share, queries, one_element)\n"
                           "row_sum5 = Reshape <allowzero = 1> (row_sum, row_shape)\nrest5 = Sub (dp5, row_sum5)\n"
                           "dscore5 = Mul (p5, rest5)\n");
  if (egi_node_float(body->node, "softcap", 0.0f) > 0.0f) {
    egi_body_number(body, "whole", 1.0, "p");
    egi_text_add(body->text, "turned_like = CastLike (turned, p)\nturned_square = Mul (turned_like, turned_like)\n"
                             "steep = Sub (whole, turned_square)\nsteep5 = Reshape <allowzero = 1> (steep, p_shape)\n"
                             "dcapped5 = Mul (dscore5, steep5)\n");
  } else {
    egi_text_add(body->text, "dcapped5 = Identity (dscore5)\n");
  }
  egi_text_add(body->text, "scale_like = CastLike (scale, p)\nds5 = Mul (dcapped5, scale_like)\n");
}

/* dq4, dk4, dv4: those of a kv head are summed over the queries' heads that share it. */
static void add_operand_gradients(egi_body *body) {
  egi_text_add(body->text, "k5_like = CastLike (k5, p)\ndq5 = MatMul (ds5, k5_like)\nq_shape = Shape (q4)\n"
                           "dq_wide = Reshape <allowzero = 1> (dq5, q_shape)\ndq4 = CastLike (dq_wide, q)\n");
  if (!egi_body_wants(body, 1)) return;
  egi_body_integers(body, "share_axis", (const int64_t[1]){2}, 1);
  egi_text_add(body->text, "q5_like = CastLike (q5, p)\nds5t = Transpose <perm = [0, 1, 2, 4, 3]> (ds5)\n"
                           "dk5 = MatMul (ds5t, q5_like)\ndk_wide = ReduceSum <keepdims = 0> (dk5, share_axis)\n"
                           "dk4 = CastLike (dk_wide, k)\n");
  if (!egi_body_wants(body, 2)) return;
  egi_text_add(body->text, "p5t = Transpose <perm = [0, 1, 2, 4, 3]> (p5)\ndv5 = MatMul (p5t, dy5)\n"
                           "dv_wide = ReduceSum <keepdims = 0> (dv5, share_axis)\ndv4 = CastLike (dv_wide, v)\n");
}

static void add_one(egi_body *body) {
  egi_body_integers(body, "one_element", (const int64_t[1]){1}, 1);
}

/* A sink's probability has no value: d sink = - P · sum(dY · Y), over all rows of its head. */
static void add_sink_gradient(egi_body *body) {
  egi_body_integers(body, "sink_spread", (const int64_t[4]){1, -1, 1, 1}, 4);
  egi_body_integers(body, "other_axes", (const int64_t[3]){0, 2, 3}, 3);
  egi_text_add(body->text,
               "sink_column = Reshape (sinks, sink_spread)\nsink_score = CastLike (sink_column, p)\n"
               "sink_logs = Sub (sink_score, lse_column)\nsink_p = Exp (sink_logs)\n"
               "sink_rows = Mul (sink_p, row_sum)\nsink_sum = ReduceSum <keepdims = 0> (sink_rows, other_axes)\n"
               "sink_change = Neg (sink_sum)\nd_sinks = CastLike (sink_change, sinks)\n");
}

bool egi_body_masked_attention_grad(egi_body *body) {
  static const char *const names[] = {"dq", "dk", "dv"};
  egi_text_add(body->text, "q4 = Identity (q)\nk_all = Identity (k)\nv_all = Identity (v)\ny4 = Identity (y)\n"
                           "dy4 = Identity (dy)\n");
  egi_body_add_scores(body);
  const char *valid = egi_body_add_kind(body, 3, 8);
  add_one(body);
  add_probabilities(body, valid, "scores");
  add_score_gradient(body);
  add_operand_gradients(body);
  for (unsigned i = 0; i < 3; i++)
    if (egi_body_wants(body, i)) egi_text_format(body->text, "%s = Identity (%s4)\n", names[i], names[i]);
  if (egi_body_wants(body, 3)) add_sink_gradient(body);
  return true;
}

/* NAME4 [batch, heads, rows, width] of a 3-D value with `heads` heads. */
static void add_split(egi_body *body, const char *name, const char *split) {
  egi_text_format(body->text, "%s_heads = Reshape (%s, %s)\n%s4 = Transpose <perm = [0, 2, 1, 3]> (%s_heads)\n", name,
                  name, split, name, name);
}

/* NAME in the shape of the 3-D value LIKE. */
static void add_joined(egi_body *body, const char *name, const char *like) {
  egi_text_format(body->text,
                  "%s_rows = Transpose <perm = [0, 2, 1, 3]> (%s4)\n%s_shape3 = Shape (%s)\n"
                  "%s = Reshape <allowzero = 1> (%s_rows, %s_shape3)\n",
                  name, name, name, like, name, name, name);
}

bool egi_body_attention_grad(egi_body *body) {
  static const char *const names[] = {"dq", "dk", "dv"}, *const likes[] = {"q", "k", "v"};
  int rank = egi_body_rank(body, 0);
  bool is_flat = rank == 3;
  const char *scores = "scores";
  if (rank < 0 || !egi_body_has_whole_mask(body, false)) return false;
  egi_body_add_heads(body, is_flat);
  egi_text_add(body->text, "k_all = Identity (k4)\nv_all = Identity (v4)\n");
  if (is_flat) {
    add_split(body, "y", "q_split");
    add_split(body, "dy", "q_split");
  } else {
    egi_text_add(body->text, "y4 = Identity (y)\ndy4 = Identity (dy)\n");
  }
  egi_body_add_scores(body);
  const char *valid = egi_body_add_mask(body, false, &scores);
  add_one(body);
  add_probabilities(body, valid, scores);
  add_score_gradient(body);
  add_operand_gradients(body);
  for (unsigned i = 0; i < 3; i++) {
    if (!egi_body_wants(body, i)) continue;
    if (is_flat)
      add_joined(body, names[i], likes[i]);
    else
      egi_text_format(body->text, "%s = Identity (%s4)\n", names[i], names[i]);
  }
  return true;
}
