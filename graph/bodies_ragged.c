/* Bodies of what dispatch_moe makes: all experts for all rows, of which each row keeps its own expert's. */
#include "graph/ragged.h"

#include "graph/bodies.h"

static void line(egi_body *body, const char *text) {
  egi_text_add(body->text, text);
}

static void list(egi_body *body, const char *name, int64_t a) {
  egi_body_integers(body, name, &a, 1);
}

static bool read(egi_body *body, egi_ragged *ragged) {
  return egi_ragged_read(body->graph, (egi_node_id)(body->node - body->graph->nodes), ragged) == EG_OK;
}

/* ---- rows ----------------------------------------------------------------------------------------------------- */

bool egi_body_dispatch(egi_body *body) {
  list(body, "any", -1);
  line(body, "width = Shape <start = -1> (x)\nflat_shape = Concat <axis = 0> (any, width)\n"
             "flat = Reshape (x, flat_shape)\nrows = Gather (flat, source_row)\n");
  return true;
}

bool egi_body_combine(egi_body *body) {
  list(body, "one", 1);
  line(body, "width = Shape <start = -1> (like)\nlike_size = Size (like)\nlike_sizes = Reshape (like_size, one)\n"
             "some_width = Max (width, one)\ntokens = Div (like_sizes, some_width)\nsome_tokens = Max (tokens, one)\n"
             "n_rows = Shape <end = 1> (rows)\nk = Div (n_rows, some_tokens)\n"
             "grouped_shape = Concat <axis = 0> (tokens, k, width)\npicked = Gather (rows, inverse)\n"
             "grouped = Reshape <allowzero = 1> (picked, grouped_shape)\n"
             "sum = ReduceSum <keepdims = 0> (grouped, one)\nshape = Shape (like)\n"
             "y = Reshape <allowzero = 1> (sum, shape)\n");
  return true;
}

/* ---- products ------------------------------------------------------------------------------------------------- */

/* is_own [E, R, 1]: whether a row of `rows` is one of the expert's. */
static void add_own(egi_body *body, const char *rows) {
  list(body, "front", 0);
  list(body, "zero", 0);
  list(body, "one", 1);
  list(body, "last", -1);
  list(body, "far", 1073741824);
  egi_body_integer(body, "first", 0);
  egi_body_integer(body, "step", 1);
  egi_body_number(body, "nothing", 0.0, rows);
  egi_text_format(body->text, "count = Shape <end = 1> (%s)\nn_rows = Squeeze (count, front)\n", rows);
  line(body, "numbers = Range (first, n_rows, step)\nwide_offsets = Cast <to = 7> (offsets)\n"
             "starts = Slice (wide_offsets, zero, last)\nends = Slice (wide_offsets, one, far)\n"
             "start_column = Unsqueeze (starts, one)\nend_column = Unsqueeze (ends, one)\n"
             "is_behind = GreaterOrEqual (numbers, start_column)\nis_before = Less (numbers, end_column)\n"
             "is_own_flat = And (is_behind, is_before)\nis_own = Unsqueeze (is_own_flat, last)\n");
}

/* `out`: of each row of `all` [E, R, n] its own expert's. */
static void add_kept(egi_body *body, const char *out, const char *all) {
  egi_text_format(body->text, "%s_kept = Where (is_own, %s, nothing)\n%s = ReduceSum <keepdims = 0> (%s_kept, front)\n",
                  out, all, out, out);
}

bool egi_body_ragged_linear(egi_body *body) {
  egi_ragged ragged;
  if (!read(body, &ragged)) return false;
  const char *sum = "product";
  add_own(body, "x");
  egi_body_add_experts(body, &ragged, "matrices", "x");
  line(body, "turned = Transpose <perm = [0, 2, 1]> (matrices)\nall_x = Unsqueeze (x, front)\n"
             "plain = MatMul (all_x, turned)\n");
  if (ragged.counts[EGI_RAGGED_BIAS] > 0) {
    egi_body_add_expert_biases(body, &ragged, "biases");
    line(body, "bias_rows = Unsqueeze (biases, one)\nall_ = Add (plain, bias_rows)\n");
  } else {
    line(body, "all_ = Identity (plain)\n");
  }
  add_kept(body, "product", "all_");
  if (ragged.alpha < 1.0 || ragged.alpha > 1.0) {
    egi_body_number(body, "alpha", ragged.alpha, "x");
    line(body, "scaled = Mul (product, alpha)\n");
    sum = "scaled";
  }
  if (egi_body_has(body, EGI_RAGGED_ROW_WEIGHT)) {
    egi_text_format(body->text, "weight_column = Unsqueeze (row_weight, one)\nweighted = Mul (%s, weight_column)\n",
                    sum);
    sum = "weighted";
  }
  egi_text_format(body->text, egi_body_has(body, EGI_RAGGED_ADDEND) ? "y = Add (addend, %s)\n" : "y = Identity (%s)\n",
                  sum);
  return true;
}

/* d row_weight = alpha · (d of the unweighted x · x + bias · dy) */
static void add_weight_gradient(egi_body *body, const egi_ragged *ragged) {
  line(body, "dx_x = Mul (dx_plain, x)\ndot_x = ReduceSum <keepdims = 0> (dx_x, last)\n");
  if (ragged->counts[EGI_RAGGED_BIAS] > 0) {
    egi_body_add_expert_biases(body, ragged, "biases");
    line(body, "bias_rows = Unsqueeze (biases, one)\nall_biased = Mul (all_dy, bias_rows)\n");
    add_kept(body, "biased", "all_biased");
    line(body, "dot_bias = ReduceSum <keepdims = 0> (biased, last)\ndot = Add (dot_x, dot_bias)\n");
  } else {
    line(body, "dot = Identity (dot_x)\n");
  }
  line(body, "d_row_weight = Mul (dot, alpha)\n");
}

bool egi_body_ragged_linear_grad(egi_body *body) {
  egi_ragged ragged;
  if (!read(body, &ragged)) return false;
  add_own(body, "dy");
  egi_body_number(body, "alpha", ragged.alpha, "dy");
  egi_body_add_experts(body, &ragged, "matrices", "dy");
  line(body, "all_dy = Unsqueeze (dy, front)\nall_dx = MatMul (all_dy, matrices)\n");
  add_kept(body, "dx_plain", "all_dx");
  if (egi_body_wants(body, 1)) add_weight_gradient(body, &ragged);
  if (egi_body_has(body, EGI_RAGGED_ROW_WEIGHT))
    line(body, "weight_column = Unsqueeze (row_weight, one)\nfactor = Mul (weight_column, alpha)\n"
               "dx = Mul (dx_plain, factor)\n");
  else
    line(body, "dx = Mul (dx_plain, alpha)\n");
  return true;
}

bool egi_body_ragged_reduce(egi_body *body) {
  add_own(body, "left");
  egi_body_number(body, "alpha", (double)egi_node_float(body->node, "alpha", 1.0f), "left");
  line(body, "all_left = Unsqueeze (left, front)\nown_left = Where (is_own, all_left, nothing)\n"
             "turned = Transpose <perm = [0, 2, 1]> (own_left)\nplain = MatMul (turned, right)\n"
             "sums = Mul (plain, alpha)\n");
  return true;
}
