/* The body of engraft.MoE: all experts for all rows, and the sum of their results with weights that are zero for the
 * experts that a row did not choose. Names of inputs by role are those of the node's formal inputs. */
#include <stdio.h>

#include "graph/bodies.h"
#include "graph/ragged.h"

typedef struct writer {
  egi_body *body;
  egi_moe moe;
} writer;

static void line(writer *w, const char *text) {
  egi_text_add(w->body->text, text);
}

static void list(writer *w, const char *name, int64_t a) {
  egi_body_integers(w->body, name, &a, 1);
}

/* `out` = `base` + scale · (rows · Aᵀ)·Bᵀ for each expert. */
static void add_adapter(writer *w, const char *out, const char *base, const char *rows, egi_moe_role role) {
  unsigned a = w->moe.first[egi_moe_adapter(role)];
  const int64_t down[3] = {w->moe.n_experts, -1, egi_body_size(w->body, a, 1)}, up[3] = {0, -1, w->moe.n_experts};
  char name[40];
  snprintf(name, sizeof name, "%s_down_shape", out);
  egi_body_integers(w->body, name, down, 3);
  snprintf(name, sizeof name, "%s_up_shape", out);
  egi_body_integers(w->body, name, up, 3);
  snprintf(name, sizeof name, "%s_scale", out);
  egi_body_number(w->body, name, w->moe.adapter_scales[role / 2], "x");
  egi_text_format(w->body->text,
                  "%s_a = Reshape (in%u, %s_down_shape)\n%s_at = Transpose <perm = [0, 2, 1]> (%s_a)\n"
                  "%s_b_ = Reshape (in%u, %s_up_shape)\n%s_bt = Transpose <perm = [2, 1, 0]> (%s_b_)\n"
                  "%s_thin = MatMul (%s, %s_at)\n%s_wide = MatMul (%s_thin, %s_bt)\n"
                  "%s_scaled = Mul (%s_wide, %s_scale)\n%s = Add (%s, %s_scaled)\n",
                  out, a, out, out, out, out, a + 1, out, out, out, out, rows, out, out, out, out, out, out, out, out,
                  base, out);
}

/* `out` = rows · Wᵀ + b for each expert, [E, rows, n]. */
static void add_product(writer *w, const char *result, const char *rows, egi_moe_role role, int64_t columns) {
  egi_text *text = w->body->text;
  bool has_adapter = w->moe.counts[egi_moe_adapter(role)] > 0;
  char out[24];
  snprintf(out, sizeof out, "%s%s", result, has_adapter ? "_base" : "");
  const egi_ragged ragged = egi_moe_projection(&w->moe, role, columns);
  char name[32];
  bool has_bias = ragged.counts[EGI_RAGGED_BIAS] > 0;
  snprintf(name, sizeof name, "%s_m", out);
  egi_body_add_experts(w->body, &ragged, name, "x");
  egi_text_format(text, "%s_t = Transpose <perm = [0, 2, 1]> (%s_m)\n%s%s = MatMul (%s, %s_t)\n", out, out, out,
                  has_bias ? "_p" : "", rows, out);
  if (has_bias) {
    snprintf(name, sizeof name, "%s_b", out);
    egi_body_add_expert_biases(w->body, &ragged, name);
    egi_text_format(text, "%s_b1 = Unsqueeze (%s_b, middle_axis)\n%s = Add (%s_p, %s_b1)\n", out, out, out, out, out);
  }
  if (has_adapter) add_adapter(w, result, out, rows, role);
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
  int64_t rows = egi_body_size(w->body, w->moe.first[EGI_MOE_GATE], w->moe.is_transposed[0] ? -1 : -2);
  bool is_joint = w->moe.form == EGI_MOE_CONCATENATED || w->moe.form == EGI_MOE_INTERLEAVED;
  return is_joint && rows > 0 ? rows / 2 : rows;
}

bool egi_body_moe(egi_body *body) {
  writer w = {.body = body};
  int64_t width = egi_body_size(body, EGI_MOE_X, -1);
  egi_node_id id = (egi_node_id)(body->node - body->graph->nodes);
  if (egi_moe_read(body->graph, id, &w.moe) != EG_OK) return false;
  int64_t inner = inner_columns(&w);
  if (w.moe.is_quantised && (width < 1 || inner < 1)) return false;
  list(&w, "zero", 0);
  list(&w, "front", 0);
  list(&w, "middle_axis", 1);
  list(&w, "any", -1);
  egi_body_add_router(body, &w.moe, egi_body_has(body, EGI_MOE_CORRECTION), "x");
  line(&w, "logit_shape = Shape (flat_logits)\nno_weights = Expand (nothing, logit_shape)\n"
           "dense = ScatterElements <axis = 1> (no_weights, chosen, weights_)\n");
  line(&w, "x_width = Shape <start = -1> (x)\nx_rows = Concat <axis = 0> (any, x_width)\n"
           "flat_x = Reshape (x, x_rows)\nall_x = Unsqueeze (flat_x, front)\n");
  add_product(&w, "first", "all_x", EGI_MOE_GATE, width);
  if (w.moe.form == EGI_MOE_SEPARATE) add_product(&w, "up", "all_x", EGI_MOE_UP, width);
  add_halves(&w);
  add_activation(&w);
  add_product(&w, "results", "inner", EGI_MOE_DOWN, inner);
  line(&w, "by_expert = Transpose <perm = [1, 0]> (dense)\ncolumn = Unsqueeze (by_expert, last)\n"
           "weighted = Mul (results, column)\nsum = ReduceSum <keepdims = 0> (weighted, front)\n"
           "x_shape = Shape (x)\ny = Reshape (sum, x_shape)\n");
  return true;
}
