/* The body of attention: ONNX Attention-25 written out, with whole rows of scores. A row without a key that it may look
 * at gives zeros, and no gradient is ever made of an infinity. */
#include "graph/bodies.h"

#include <math.h>

#define LOWEST (-3.4028234663852886e38)

/* q4, k4, v4: [batch, heads, rows, width]. */
void egi_body_add_heads(egi_body *body, bool is_flat) {
  static const char *const names[] = {"q", "k", "v"};
  const int64_t counts[] = {egi_node_int(body->node, "q_num_heads", 0), egi_node_int(body->node, "kv_num_heads", 0)};
  for (int i = 0; i < 3; i++) {
    const int64_t split[4] = {0, 0, counts[i > 0], -1};
    char name[16] = {names[i][0], '_', 's', 'p', 'l', 'i', 't'};
    if (!is_flat) {
      egi_text_format(body->text, "%s4 = Identity (%s)\n", names[i], names[i]);
      continue;
    }
    egi_body_integers(body, name, split, 4);
    egi_text_format(body->text, "%s_rows = Reshape (%s, %s)\n%s4 = Transpose <perm = [0, 2, 1, 3]> (%s_rows)\n",
                    names[i], names[i], name, names[i], names[i]);
  }
}

/* Keys and values with those of the past in front: k_all and v_all. */
static void add_past(egi_body *body) {
  static const char names[] = "kv";
  for (int i = 0; i < 2; i++) {
    const char *formal = i == 0 ? "present_key" : "present_value", *past = i == 0 ? "past_key" : "past_value";
    if (egi_body_has(body, 4))
      egi_text_format(body->text, "%c_all = Concat <axis = 2> (%s, %c4)\n", names[i], past, names[i]);
    else
      egi_text_format(body->text, "%c_all = Identity (%c4)\n", names[i], names[i]);
    if (egi_body_wants(body, 1 + (unsigned)i))
      egi_text_format(body->text, "%s = Identity (%c_all)\n", formal, names[i]);
  }
}

void egi_body_add_scores(egi_body *body) {
  egi_text_add(body->text, "batch = Shape <start = 0, end = 1> (q4)\nq_heads = Shape <start = 1, end = 2> (q4)\n"
                           "kv_heads = Shape <start = 1, end = 2> (k_all)\nshare = Div (q_heads, kv_heads)\n"
                           "queries = Shape <start = 2, end = 3> (q4)\nkeys = Shape <start = 2, end = 3> (k_all)\n"
                           "width = Shape <start = 3, end = 4> (q4)\nvalue_width = Shape <start = 3, end = 4> (v_all)\n"
                           "q_grouped = Concat <axis = 0> (batch, kv_heads, share, queries, width)\n"
                           "q5 = Reshape <allowzero = 1> (q4, q_grouped)\ngroup_axis = Constant <value_ints = [2]> ()\n"
                           "k5 = Unsqueeze (k_all, group_axis)\nv5 = Unsqueeze (v_all, group_axis)\n"
                           "k5t = Transpose <perm = [0, 1, 2, 4, 3]> (k5)\nproducts5 = MatMul (q5, k5t)\n"
                           "scores_shape = Concat <axis = 0> (batch, q_heads, queries, keys)\n"
                           "products = Reshape <allowzero = 1> (products5, scores_shape)\n");
  const egi_attribute *scale = egi_node_attribute(body->node, "scale");
  if (scale != NULL)
    egi_body_number(body, "scale", (double)scale->u.f, "q");
  else
    egi_text_add(body->text, "one_axis = Constant <value_ints = [0]> ()\nsize = Squeeze (width, one_axis)\n"
                             "real_size = CastLike (size, q)\nroot = Sqrt (real_size)\nscale = Reciprocal (root)\n");
  double softcap = (double)egi_node_float(body->node, "softcap", 0.0f);
  egi_text_format(body->text, "%s = Mul (products, scale)\n", softcap > 0.0 ? "uncapped" : "narrow_scores");
  if (softcap > 0.0) {
    egi_body_number(body, "cap", softcap, "q");
    egi_text_add(body->text,
                 "capped = Div (uncapped, cap)\nturned = Tanh (capped)\nnarrow_scores = Mul (turned, cap)\n");
  }
  egi_body_widen(body, "scores", "narrow_scores", 0);
}

void egi_body_add_positions(egi_body *body) {
  egi_text_add(body->text,
               "zero = Constant <value_int = 0> ()\none = Constant <value_int = 1> ()\n"
               "first_axis = Constant <value_ints = [0]> ()\nlast_axis = Constant <value_ints = [1]> ()\n"
               "n_queries = Squeeze (queries, first_axis)\nn_keys = Squeeze (keys, first_axis)\n"
               "row_numbers = Range (zero, n_queries, one)\ncolumn_numbers = Range (zero, n_keys, one)\n"
               "rows_ = Unsqueeze (row_numbers, last_axis)\ncolumns = Unsqueeze (column_numbers, first_axis)\n");
}

const char *egi_body_add_condition(egi_body *body, const char *valid, const char *name, const char *expression) {
  egi_text_format(body->text, "%s = %s\n", name, expression);
  if (valid == NULL) return name;
  egi_text_format(body->text, "%s_and = And (%s, %s)\n", name, valid, name);
  return egi_arena_format(&body->graph->module->arena, "%s_and", name);
}

/* Which keys a query may look at by position: the last condition's name, NULL: all of them. */
static const char *add_window(egi_body *body, bool has_past) {
  bool is_causal = egi_node_int(body->node, "is_causal", 0) != 0;
  int64_t left = egi_node_int(body->node, "left_window_size", -1);
  int64_t right = egi_node_int(body->node, "right_window_size", -1);
  const char *valid = NULL;
  if (!is_causal && left < 0 && right < 0) return NULL;
  egi_body_add_positions(body);
  if (has_past)
    egi_text_add(body->text, "past = Shape <start = 2, end = 3> (past_key)\nrows = Add (rows_, past)\n");
  else
    egi_text_add(body->text, "rows = Identity (rows_)\n");
  if (is_causal) valid = egi_body_add_condition(body, valid, "is_before", "LessOrEqual (columns, rows)");
  if (right >= 0) {
    egi_body_integer(body, "right", right);
    egi_text_add(body->text, "right_end = Add (rows, right)\n");
    valid = egi_body_add_condition(body, valid, "is_left_of_end", "LessOrEqual (columns, right_end)");
  }
  if (left >= 0) {
    egi_body_integer(body, "left", left);
    egi_text_add(body->text, "left_end = Sub (rows, left)\n");
    valid = egi_body_add_condition(body, valid, "is_in_window", "GreaterOrEqual (columns, left_end)");
  }
  return valid;
}

/* probabilities: softmax over the valid keys; without a condition over all. */
void egi_body_add_probabilities(egi_body *body, const char *valid, const char *scores) {
  if (valid == NULL) {
    egi_text_format(body->text, "probabilities = Softmax <axis = -1> (%s)\n", scores);
    return;
  }
  egi_body_number(body, "lowest", LOWEST, "scores");
  egi_body_number(body, "nothing", 0.0, "scores");
  egi_text_format(body->text,
                  "seen = Where (%s, %s, lowest)\nunmasked = Softmax <axis = -1> (seen)\n"
                  "probabilities = Where (%s, unmasked, nothing)\n",
                  valid, scores, valid);
}

/* y4 = probabilities · V, in the type of q. */
void egi_body_add_mixture(egi_body *body) {
  egi_text_add(body->text, "narrow = CastLike (probabilities, q)\n"
                           "p_grouped = Concat <axis = 0> (batch, kv_heads, share, queries, keys)\n"
                           "p5 = Reshape <allowzero = 1> (narrow, p_grouped)\ny5 = MatMul (p5, v5)\n"
                           "y_shape = Concat <axis = 0> (batch, q_heads, queries, value_width)\n"
                           "y4 = Reshape <allowzero = 1> (y5, y_shape)\n");
}

/* A mask of one column is one of the first key alone. */
bool egi_body_has_whole_mask(const egi_body *body, bool has_past) {
  if (!egi_body_has(body, 3)) return true;
  int64_t columns = egi_body_size(body, 3, -1), keys = egi_body_size(body, 1, -2);
  if (has_past || columns < 0) return columns < 0;
  return columns == keys;
}

const char *egi_body_add_mask(egi_body *body, bool has_past, const char **scores) {
  const char *valid = add_window(body, has_past);
  if (egi_body_dtype(body, 3) == EG_DTYPE_BOOL) {
    valid = egi_body_add_condition(body, valid, "is_unmasked", "Identity (mask)");
  } else if (egi_body_has(body, 3)) {
    egi_text_add(body->text, "is_hidden = IsInf <detect_positive = 0> (mask)\nbias = CastLike (mask, scores)\n"
                             "biased = Add (scores, bias)\n");
    valid = egi_body_add_condition(body, valid, "is_unmasked", "Not (is_hidden)");
    *scores = "biased";
  }
  return valid;
}

bool egi_body_attention(egi_body *body) {
  int rank = egi_body_rank(body, 0);
  bool has_past = egi_body_has(body, 4);
  const char *scores = "scores";
  if (rank < 0 || egi_body_has(body, 6) || egi_body_wants(body, 3)) return false;
  if (!egi_body_has_whole_mask(body, has_past)) return false;
  egi_body_add_heads(body, rank == 3);
  add_past(body);
  egi_body_add_scores(body);
  const char *valid = egi_body_add_mask(body, has_past, &scores);
  egi_body_add_probabilities(body, valid, scores);
  egi_body_add_mixture(body);
  if (rank == 4)
    egi_text_add(body->text, "y = Identity (y4)\n");
  else
    egi_text_add(
        body->text,
        "y_rows = Transpose <perm = [0, 2, 1, 3]> (y4)\nheads_width = Mul (q_heads, value_width)\n"
        "flat = Concat <axis = 0> (batch, queries, heads_width)\ny = Reshape <allowzero = 1> (y_rows, flat)\n");
  return true;
}

/* ---- engraft.Attention ---------------------------------------------------------------------------------------- */

/* Which keys a query may look at, as add_window(); the window counts the query's own key. */
const char *egi_body_add_kind(egi_body *body, unsigned key_valid, unsigned first_key) {
  bool is_causal = egi_node_int(body->node, "causal", 0) != 0;
  int64_t window = egi_node_int(body->node, "window", 0);
  const char *valid = NULL;
  bool has_documents = egi_body_has(body, first_key);
  if (is_causal || window > 0 || has_documents) egi_body_add_positions(body);
  if (is_causal) valid = egi_body_add_condition(body, valid, "is_before", "LessOrEqual (columns, rows_)");
  if (window > 0) {
    egi_body_integer(body, "window", window);
    egi_text_add(body->text, "distance = Sub (rows_, columns)\n");
    valid = egi_body_add_condition(body, valid, "is_recent", "Less (distance, window)");
  }
  if (window > 0 && !is_causal) {
    egi_text_add(body->text, "distance_back = Neg (distance)\n");
    valid = egi_body_add_condition(body, valid, "is_soon", "Less (distance_back, window)");
  }
  if (has_documents) {
    egi_text_add(body->text, "narrow_columns = Cast <to = 6> (columns)\nfirst_keys = Unsqueeze (first_key, last_axis)\n"
                             "last_queries = Unsqueeze (last_query, last_axis)\n");
    valid = egi_body_add_condition(body, valid, "is_begun", "GreaterOrEqual (narrow_columns, first_keys)");
    valid = egi_body_add_condition(body, valid, "is_not_over", "LessOrEqual (narrow_columns, last_queries)");
  }
  if (!egi_body_has(body, key_valid)) return valid;
  const int64_t axes[2] = {1, 2};
  egi_body_integers(body, "valid_axes", axes, 2);
  return egi_body_add_condition(body, valid, "is_key", "Unsqueeze (key_valid, valid_axes)");
}

/* probabilities as egi_body_add_probabilities(), with one more score a row, the sink's, that has no value. */
static void add_sink_probabilities(egi_body *body, const char *valid) {
  const int64_t zero = 0, last = -1, spread[4] = {1, -1, 1, 1};
  egi_body_integers(body, "sink_spread", spread, 4);
  egi_body_integers(body, "sink_start", &zero, 1);
  egi_body_integers(body, "sink_axis", &last, 1);
  egi_body_number(body, "nothing", 0.0, "scores");
  egi_body_number(body, "lowest", LOWEST, "scores");
  egi_text_format(body->text, valid != NULL ? "seen = Where (%s, scores, lowest)\n" : "seen = Identity (scores)\n",
                  valid);
  egi_text_add(body->text,
               "sink_column = Reshape (sinks, sink_spread)\nsink_score = CastLike (sink_column, scores)\n"
               "one_column = Constant <value_ints = [1]> ()\n"
               "sink_shape = Concat <axis = 0> (batch, q_heads, queries, one_column)\n"
               "sink_scores = Expand (sink_score, sink_shape)\njoined = Concat <axis = -1> (seen, sink_scores)\n"
               "shares = Softmax <axis = -1> (joined)\nunmasked = Slice (shares, sink_start, keys, sink_axis)\n");
  egi_text_format(body->text,
                  valid != NULL ? "probabilities = Where (%s, unmasked, nothing)\n"
                                : "probabilities = Identity (unmasked)\n",
                  valid);
}

/* The log-sum-exp of each row; infinity where a row has neither a key nor a sink. */
static void add_log_sum(egi_body *body, const char *valid) {
  bool has_sinks = egi_body_has(body, 4);
  const int64_t last = -1;
  egi_body_integers(body, "sum_axis", &last, 1);
  egi_text_format(body->text, "log_sum = ReduceLogSumExp <keepdims = 0> (%s, sum_axis)\n",
                  has_sinks       ? "joined"
                  : valid != NULL ? "seen"
                                  : "scores");
  if (valid == NULL || has_sinks) {
    egi_text_add(body->text, "lse = Cast <to = 1> (log_sum)\n");
    return;
  }
  egi_text_format(body->text,
                  "infinity = Reciprocal (nothing)\nseen_total = ReduceSum <keepdims = 0> (probabilities, sum_axis)\n"
                  "is_seen = Greater (seen_total, nothing)\nlog_sum_or_none = Where (is_seen, log_sum, infinity)\n"
                  "lse = Cast <to = 1> (log_sum_or_none)\n");
}

/* The document of each row is counted: a one stands where one begins. */
bool egi_body_packed_metadata(egi_body *body) {
  egi_text_add(body->text,
               "zero = Constant <value_int = 0> ()\none = Constant <value_int = 1> ()\n"
               "one_row = Constant <value_ints = [1]> ()\nno_row = Constant <value_ints = [0]> ()\n"
               "length = Shape <start = -1> (rows)\nn_rows = Squeeze (length, no_row)\n"
               "length_and_one = Add (length, one_row)\n"
               "blank = ConstantOfShape <value = int32[1] {0}> (length_and_one)\n"
               "begins = Equal (cu_seqlens, cu_seqlens)\nmarks = Cast <to = 6> (begins)\n"
               "marked = ScatterElements <axis = 0> (blank, cu_seqlens, marks)\n"
               "starts = Slice (marked, no_row, length, no_row)\ncounted = CumSum (starts, zero)\n"
               "next = Cast <to = 7> (counted)\nown = Sub (next, one)\n"
               "first_key = Gather <axis = 0> (cu_seqlens, own)\nend = Gather <axis = 0> (cu_seqlens, next)\n"
               "narrow_one = Cast <to = 6> (one)\nlast_query = Sub (end, narrow_one)\n"
               "row_numbers = Range (zero, n_rows, one)\nnarrow_numbers = Cast <to = 6> (row_numbers)\n"
               "positions = Sub (narrow_numbers, first_key)\n");
  if (!egi_body_wants(body, 3)) return true;
  egi_body_integer(body, "block", egi_node_int(body->node, "block", EGI_BLOCK_ROWS));
  egi_body_integer(body, "rest_of_block", egi_node_int(body->node, "block", EGI_BLOCK_ROWS) - 1);
  egi_text_add(body->text,
               "block_starts = Range (zero, n_rows, block)\nblock_ends_ = Add (block_starts, rest_of_block)\n"
               "last_row = Sub (n_rows, one)\nblock_ends = Min (block_ends_, last_row)\n"
               "block_first = Gather <axis = 0> (first_key, block_starts)\n"
               "block_last = Gather <axis = 0> (last_query, block_ends)\n"
               "first_column = Unsqueeze (block_first, one_row)\nlast_column = Unsqueeze (block_last, one_row)\n"
               "block_bounds = Concat <axis = 1> (first_column, last_column)\n");
  return true;
}

bool egi_body_masked_attention(egi_body *body) {
  if (egi_body_has(body, 8)) return false; /* a cache */
  egi_text_add(body->text, "q4 = Identity (q)\nk_all = Identity (k)\nv_all = Identity (v)\n");
  egi_body_add_scores(body);
  const char *valid = egi_body_add_kind(body, 3, 5);
  if (egi_body_has(body, 4))
    add_sink_probabilities(body, valid);
  else
    egi_body_add_probabilities(body, valid, "scores");
  if (egi_body_wants(body, 1)) add_log_sum(body, valid);
  egi_body_add_mixture(body);
  egi_text_add(body->text, "y = Identity (y4)\n");
  return true;
}
