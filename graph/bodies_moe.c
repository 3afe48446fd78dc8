/* The body of engraft.MoE: all experts for all rows, and the sum of their results with weights that are zero for the
 * experts that a row did not choose. Names of inputs by role are those of the node's formal inputs. */
#include <stdio.h>

#include "graph/bodies.h"
#include "graph/moe.h"

typedef struct writer {
  egi_body *body;
  egi_moe moe;
  int64_t n_experts, width;
} writer;

static void line(writer *w, const char *text) {
  egi_text_add(w->body->text, text);
}

static void list(writer *w, const char *name, int64_t a) {
  egi_body_integers(w->body, name, &a, 1);
}

/* ---- the router ----------------------------------------------------------------------------------------------- */

static void add_groups(writer *w) {
  const egi_moe *moe = &w->moe;
  const int64_t grouped[3] = {-1, moe->groups, w->n_experts / moe->groups}, flat[2] = {-1, w->n_experts};
  egi_body_integers(w->body, "grouped", grouped, 3);
  egi_body_integers(w->body, "flat", flat, 2);
  list(w, "kept", moe->top_groups);
  list(w, "two", moe->is_group_best || w->n_experts / moe->groups < 2 ? 1 : 2);
  line(w, "by_group = Reshape (corrected, grouped)\nbest, best_at = TopK (by_group, two)\n"
          "totals = ReduceSum <keepdims = 0> (best, last)\ntotal, total_at = TopK (totals, kept)\n"
          "group_shape = Shape (totals)\nno_groups = Expand (nothing, group_shape)\n"
          "some_shape = Shape (total)\nsome_groups = Expand (unit, some_shape)\n"
          "group_mask = ScatterElements <axis = 1> (no_groups, total_at, some_groups)\n"
          "is_kept_flat = Greater (group_mask, nothing)\nis_kept = Unsqueeze (is_kept_flat, last)\n"
          "kept_scores = Where (is_kept, by_group, nothing)\nchoice = Reshape (kept_scores, flat)\n");
}

static void add_router(writer *w) {
  const egi_moe *moe = &w->moe;
  const char *scoring = moe->is_sigmoid ? "Sigmoid" : "Softmax <axis = -1>";
  const int64_t rows[2] = {-1, w->n_experts};
  egi_body_integers(w->body, "logit_rows", rows, 2);
  egi_body_number(w->body, "nothing", 0.0, "x");
  egi_body_number(w->body, "unit", 1.0, "x");
  list(w, "last", -1);
  list(w, "k", moe->top_k);
  line(w, "flat_logits = Reshape (logits, logit_rows)\n");
  egi_text_format(w->body->text, "scores = %s (flat_logits)\n", moe->is_scored_before ? scoring : "Identity");
  line(w, egi_body_has(w->body, EGI_MOE_CORRECTION) ? "corrected = Add (scores, correction)\n"
                                                    : "corrected = Identity (scores)\n");
  if (moe->groups > 1)
    add_groups(w);
  else
    line(w, "choice = Identity (corrected)\n");
  line(w, "best_choice, chosen = TopK (choice, k)\npicked = GatherElements <axis = 1> (scores, chosen)\n");
  egi_text_format(w->body->text, "shares = %s (picked)\n", moe->is_scored_before ? "Identity" : scoring);
  line(w, moe->is_normalised ? "share_sum = ReduceSum (shares, last)\nnormal = Div (shares, share_sum)\n"
                             : "normal = Identity (shares)\n");
  egi_body_number(w->body, "routed_scale", moe->routed_scale, "x");
  line(w, "weights_ = Mul (normal, routed_scale)\nlogit_shape = Shape (flat_logits)\n"
          "no_weights = Expand (nothing, logit_shape)\n"
          "dense = ScatterElements <axis = 1> (no_weights, chosen, weights_)\n");
}

/* ---- the experts ---------------------------------------------------------------------------------------------- */

/* `name`: the role's operand as a stack. */
static void add_stack(writer *w, const char *name, egi_moe_role role) {
  uint32_t count = w->moe.counts[role], first = w->moe.first[role];
  if (count == 1) {
    egi_text_format(w->body->text, "%s = Identity (in%u)\n", name, first);
    return;
  }
  for (uint32_t i = first; i < first + count; i++)
    egi_text_format(w->body->text, "one%u = Unsqueeze (in%u, front)\n", i, i);
  egi_text_format(w->body->text, "%s = Concat <axis = 0> (", name);
  for (uint32_t i = first; i < first + count; i++) egi_text_format(w->body->text, "%sone%u", i > first ? ", " : "", i);
  line(w, ")\n");
}

/* `name`: numbers [E, n, columns], one after the other, from packed bytes [E, n, ..] called `from`. */
static void add_unpacked(writer *w, const char *name, const char *from, int64_t columns) {
  egi_text *text = w->body->text;
  int64_t bits = w->moe.bits;
  if (bits == 8) {
    egi_text_format(text, "%s = CastLike (%s, x)\n", name, from);
    return;
  }
  const int64_t spread[4] = {0, 0, -1, 1}, flat[3] = {0, 0, -1};
  char own[48];
  snprintf(own, sizeof own, "%s_spread", name);
  egi_body_integers(w->body, own, spread, 4);
  snprintf(own, sizeof own, "%s_flat", name);
  egi_body_integers(w->body, own, flat, 3);
  snprintf(own, sizeof own, "%s_end", name);
  list(w, own, columns);
  egi_text_format(text, "%s_mask_ = Constant <value_int = %lld> ()\n%s_mask = Cast <to = 2> (%s_mask_)\n", name,
                  (1ll << bits) - 1, name, name);
  for (int64_t shift = 0; shift < 8; shift += bits)
    egi_text_format(text,
                    "%s_by%lld_ = Constant <value_int = %lld> ()\n%s_by%lld = Cast <to = 2> (%s_by%lld_)\n"
                    "%s_at%lld = BitShift <direction = \"RIGHT\"> (%s, %s_by%lld)\n"
                    "%s_low%lld = BitwiseAnd (%s_at%lld, %s_mask)\n%s_part%lld = Reshape (%s_low%lld, %s_spread)\n",
                    name, (long long)shift, (long long)shift, name, (long long)shift, name, (long long)shift, name,
                    (long long)shift, from, name, (long long)shift, name, (long long)shift, name, (long long)shift,
                    name, name, (long long)shift, name, (long long)shift, name);
  egi_text_format(text, "%s_parts = Concat <axis = 3> (", name);
  for (int64_t shift = 0; shift < 8; shift += bits)
    egi_text_format(text, "%s%s_part%lld", shift > 0 ? ", " : "", name, (long long)shift);
  egi_text_format(text,
                  ")\n%s_all = Reshape (%s_parts, %s_flat)\n%s_cut = Slice (%s_all, zero, %s_end, last)\n"
                  "%s = CastLike (%s_cut, x)\n",
                  name, name, name, name, name, name, name, name);
}

/* `name` [E, n, columns] from a value [E, n, blocks] for each block. */
static void add_repeated(writer *w, const char *name, const char *from, int64_t block, int64_t columns) {
  const int64_t flat[3] = {0, 0, -1}, repeats[4] = {1, 1, 1, block};
  char own[48];
  snprintf(own, sizeof own, "%s_flat", name);
  egi_body_integers(w->body, own, flat, 3);
  snprintf(own, sizeof own, "%s_repeats", name);
  egi_body_integers(w->body, own, repeats, 4);
  snprintf(own, sizeof own, "%s_end", name);
  list(w, own, columns);
  egi_text_format(w->body->text,
                  "%s_one = Unsqueeze (%s, last)\n%s_tiled = Tile (%s_one, %s_repeats)\n"
                  "%s_all = Reshape (%s_tiled, %s_flat)\n%s = Slice (%s_all, zero, %s_end, last)\n",
                  name, from, name, name, name, name, name, name, name, name, name);
}

/* `name`: (codes - zeros) · scales, [E, n, columns]. */
static void add_decoded(writer *w, const char *name, egi_moe_role role, int64_t columns) {
  egi_text *text = w->body->text;
  int64_t block = w->moe.block_size > 0 ? w->moe.block_size : columns, blocks = (columns + block - 1) / block;
  egi_moe_role zeros = (egi_moe_role)(EGI_MOE_GATE_ZEROS + role);
  char a[40], b[40];
  snprintf(a, sizeof a, "%s_bytes", name);
  add_stack(w, a, role);
  snprintf(b, sizeof b, "%s_codes", name);
  add_unpacked(w, b, a, columns);
  snprintf(a, sizeof a, "%s_scale", name);
  add_stack(w, a, (egi_moe_role)(EGI_MOE_GATE_SCALES + role));
  snprintf(b, sizeof b, "%s_scales", name);
  add_repeated(w, b, a, block, columns);
  if (w->moe.counts[zeros] > 0) {
    snprintf(a, sizeof a, "%s_zbytes", name);
    add_stack(w, a, zeros);
    snprintf(b, sizeof b, "%s_zero", name);
    add_unpacked(w, b, a, blocks);
    snprintf(a, sizeof a, "%s_zeros", name);
    add_repeated(w, a, b, block, columns);
  } else {
    snprintf(a, sizeof a, "%s_zeros", name);
    egi_body_number(w->body, a, (double)(1 << (w->moe.bits - 1)), "x");
  }
  egi_text_format(text, "%s_centred = Sub (%s_codes, %s_zeros)\n%s = Mul (%s_centred, %s_scales)\n", name, name, name,
                  name, name, name);
}

/* `out` = rows · Wᵀ + b for each expert, [E, rows, n]. */
static void add_product(writer *w, const char *out, const char *rows, egi_moe_role role, int64_t columns) {
  egi_text *text = w->body->text;
  char name[32];
  bool has_bias = w->moe.counts[role + 1] > 0;
  snprintf(name, sizeof name, "%s_w", out);
  if (w->moe.is_quantised)
    add_decoded(w, name, role, columns);
  else
    add_stack(w, name, role);
  egi_text_format(
      text, w->moe.is_transposed[role / 2] ? "%s_t = Identity (%s)\n" : "%s_t = Transpose <perm = [0, 2, 1]> (%s)\n",
      out, name);
  egi_text_format(text, "%s%s = MatMul (%s, %s_t)\n", out, has_bias ? "_p" : "", rows, out);
  if (!has_bias) return;
  snprintf(name, sizeof name, "%s_b", out);
  add_stack(w, name, (egi_moe_role)(role + 1));
  egi_text_format(text, "%s_b1 = Unsqueeze (%s_b, middle_axis)\n%s = Add (%s_p, %s_b1)\n", out, out, out, out, out);
}

/* gate and up from the products. */
static void add_halves(writer *w) {
  if (w->moe.form == EGI_MOE_CONCATENATED) line(w, "gate, up = Split <axis = 2, num_outputs = 2> (first)\n");
  if (w->moe.form == EGI_MOE_UNGATED || w->moe.form == EGI_MOE_SEPARATE) line(w, "gate = Identity (first)\n");
  if (w->moe.form != EGI_MOE_INTERLEAVED) return;
  list(w, "step", 2);
  list(w, "odd", 1);
  list(w, "far", 1073741824);
  line(w, "gate = Slice (first, zero, far, last, step)\nup = Slice (first, odd, far, last, step)\n");
}

static void add_activation(writer *w) {
  const egi_moe *moe = &w->moe;
  bool is_limited = moe->limit > 0.0, is_gated = moe->form != EGI_MOE_UNGATED;
  const char *gate = is_limited ? "gate_low" : "gate", *acted = is_gated ? "acted" : "inner";
  egi_text *text = w->body->text;
  if (is_limited) {
    egi_body_number(w->body, "limit", moe->limit, "x");
    line(w, "lower = Neg (limit)\ngate_low = Min (gate, limit)\n");
  }
  switch (moe->activation) {
  case EGI_MOE_SILU:
    egi_body_number(w->body, "alpha", moe->alpha, "x");
    egi_text_format(text, "turned = Mul (%s, alpha)\nopen = Sigmoid (turned)\n%s = Mul (%s, open)\n", gate, acted,
                    gate);
    break;
  case EGI_MOE_GELU:
    egi_text_format(text, "%s = Gelu (%s)\n", acted, gate);
    break;
  case EGI_MOE_GELU_TANH:
    egi_text_format(text, "%s = Gelu <approximate = \"tanh\"> (%s)\n", acted, gate);
    break;
  case EGI_MOE_RELU:
    egi_text_format(text, "%s = Relu (%s)\n", acted, gate);
    break;
  case EGI_MOE_SIGMOID:
    egi_text_format(text, "%s = Sigmoid (%s)\n", acted, gate);
    break;
  case EGI_MOE_IDENTITY:
  case EGI_MOE_ACTIVATIONS:
    egi_text_format(text, "%s = Identity (%s)\n", acted, gate);
    break;
  }
  if (!is_gated) return;
  line(w, is_limited ? "up_high = Max (up, lower)\nup_low = Min (up_high, limit)\n" : "up_low = Identity (up)\n");
  egi_body_number(w->body, "offset", moe->offset, "x");
  line(w, "up_moved = Add (up_low, offset)\ninner = Mul (acted, up_moved)\n");
}

/* Columns of down's matrices, which packed ones do not tell; -1: not known. */
static int64_t inner_columns(const writer *w) {
  int64_t rows = egi_body_size(w->body, w->moe.first[EGI_MOE_GATE], -2);
  bool is_joint = w->moe.form == EGI_MOE_CONCATENATED || w->moe.form == EGI_MOE_INTERLEAVED;
  return is_joint && rows > 0 ? rows / 2 : rows;
}

bool egi_body_moe(egi_body *body) {
  writer w = {.body = body, .width = egi_body_size(body, EGI_MOE_X, -1)};
  egi_node_id id = (egi_node_id)(body->node - body->graph->nodes);
  if (egi_moe_read(body->graph, id, &w.moe) != EG_OK) return false;
  if (egi_body_wants(body, 1) || egi_body_wants(body, 2) || egi_body_wants(body, 3)) return false;
  int64_t inner = inner_columns(&w);
  if (w.moe.is_quantised && (w.width < 1 || inner < 1)) return false;
  w.n_experts = w.moe.n_experts;
  list(&w, "zero", 0);
  list(&w, "front", 0);
  list(&w, "middle_axis", 1);
  list(&w, "any", -1);
  add_router(&w);
  line(&w, "x_width = Shape <start = -1> (x)\nx_rows = Concat <axis = 0> (any, x_width)\n"
           "flat_x = Reshape (x, x_rows)\nall_x = Unsqueeze (flat_x, front)\n");
  add_product(&w, "first", "all_x", EGI_MOE_GATE, w.width);
  if (w.moe.form == EGI_MOE_SEPARATE) add_product(&w, "up", "all_x", EGI_MOE_UP, w.width);
  add_halves(&w);
  add_activation(&w);
  add_product(&w, "results", "inner", EGI_MOE_DOWN, inner);
  line(&w, "by_expert = Transpose <perm = [1, 0]> (dense)\ncolumn = Unsqueeze (by_expert, last)\n"
           "weighted = Mul (results, column)\nsum = ReduceSum <keepdims = 0> (weighted, front)\n"
           "x_shape = Shape (x)\ny = Reshape (sum, x_shape)\n");
  return true;
}
