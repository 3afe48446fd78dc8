/* Bodies of normalisation, rotary embedding and gated activations: the formulas of ONNX LayerNormalization-17,
 * RMSNormalization-23 and RotaryEmbedding-23. */
#include "graph/bodies.h"

#include <string.h>

bool egi_body_axes(egi_body *body) {
  int64_t axis = egi_node_int(body->node, "axis", -1), axes[EGI_MAX_RANK];
  int rank = egi_body_rank(body, 0);
  unsigned count = 0;
  if (axis >= 0 && rank < 0) return false;
  if (axis >= 0) axis -= rank;
  if (axis < -EGI_MAX_RANK || axis >= 0) return false;
  for (int64_t i = axis; i < 0; i++) axes[count++] = i;
  egi_body_integers(body, "axes", axes, count);
  return true;
}

/* d = rows to be divided, root = their divisor: sqrt(mean(d²) + epsilon). */
static void add_root(egi_body *body) {
  egi_body_number(body, "epsilon", (double)egi_node_float(body->node, "epsilon", 1e-5f), "d");
  egi_text_add(body->text, "squares = Mul (d, d)\nvariance = ReduceMean (squares, axes)\n"
                           "shifted = Add (variance, epsilon)\nroot = Sqrt (shifted)\n");
}

bool egi_body_rms_normalization(egi_body *body) {
  if (!egi_body_axes(body)) return false;
  egi_body_widen(body, "d", "x", 0);
  add_root(body);
  egi_text_add(body->text, "ratio = Div (d, root)\nn = CastLike (ratio, scale)\ny = Mul (n, scale)\n");
  return true;
}

bool egi_body_layer_normalization(egi_body *body) {
  bool has_bias = egi_body_has(body, 2);
  long long stash = (long long)egi_node_int(body->node, "stash_type", EG_DTYPE_F32);
  if (!egi_body_axes(body)) return false;
  egi_body_widen(body, "wide", "x", 0);
  egi_text_add(body->text, "average = ReduceMean (wide, axes)\nd = Sub (wide, average)\n");
  add_root(body);
  egi_text_format(body->text, "ratio = Div (d, root)\nn = CastLike (ratio, x)\n%s = Mul (n, scale)\n",
                  has_bias ? "scaled" : "y");
  if (has_bias) egi_text_add(body->text, "y = Add (scaled, bias)\n");
  if (egi_body_wants(body, 1)) egi_text_format(body->text, "mean = Cast <to = %lld> (average)\n", stash);
  if (egi_body_wants(body, 2))
    egi_text_format(body->text, "inverse = Reciprocal (root)\ndeviation = Cast <to = %lld> (inverse)\n", stash);
  return true;
}

/* c and s, [batch, 1, sequence, half], or heads last but one where x has three dims. */
static void add_angles(egi_body *body, bool is_flat) {
  const int64_t axis = is_flat ? 2 : 1;
  egi_body_integers(body, "heads_axis", &axis, 1);
  if (egi_body_has(body, 3))
    egi_text_add(body->text, "cos_rows = Gather (cosines, positions)\nsin_rows = Gather (sines, positions)\n"
                             "c = Unsqueeze (cos_rows, heads_axis)\ns = Unsqueeze (sin_rows, heads_axis)\n");
  else
    egi_text_add(body->text, "c = Unsqueeze (cosines, heads_axis)\ns = Unsqueeze (sines, heads_axis)\n");
}

/* rotated = the part of `turned` turned by the angles. */
static void add_rotation(egi_body *body, bool is_interleaved) {
  if (is_interleaved)
    egi_text_add(body->text, "zero = Constant <value_ints = [0]> ()\none = Constant <value_ints = [1]> ()\n"
                             "two = Constant <value_ints = [2]> ()\nend = Constant <value_ints = [1073741824]> ()\n"
                             "a = Slice (turned, zero, end, last, two)\nb = Slice (turned, one, end, last, two)\n");
  else
    egi_text_add(body->text, "a, b = Split <axis = -1, num_outputs = 2> (turned)\n");
  egi_text_add(body->text, "ac = Mul (a, c)\nbs = Mul (b, s)\nas = Mul (a, s)\nbc = Mul (b, c)\n"
                           "real = Sub (ac, bs)\nimaginary = Add (as, bc)\n");
  if (is_interleaved)
    egi_text_add(body->text, "real1 = Unsqueeze (real, last)\nimaginary1 = Unsqueeze (imaginary, last)\n"
                             "pairs = Concat <axis = -1> (real1, imaginary1)\nturned_shape = Shape (turned)\n"
                             "rotated = Reshape <allowzero = 1> (pairs, turned_shape)\n");
  else
    egi_text_add(body->text, "rotated = Concat <axis = -1> (real, imaginary)\n");
}

bool egi_body_rotary_embedding(egi_body *body) {
  int64_t rotary = egi_node_int(body->node, "rotary_embedding_dim", 0), minus_one = -1;
  int64_t heads = egi_node_int(body->node, "num_heads", 0);
  int rank = egi_body_rank(body, 0);
  if (rank < 0) return false;
  bool is_flat = rank == 3, is_partial = rotary != 0 && rotary != (is_flat ? -1 : egi_body_size(body, 0, 3));
  const int64_t split[4] = {0, 0, heads, -1};
  if (is_flat && heads <= 0) return false;
  egi_body_integers(body, "last", &minus_one, 1);
  if (is_flat) egi_body_integers(body, "split", split, 4);
  egi_text_add(body->text, is_flat ? "rows = Reshape (x, split)\n" : "rows = Identity (x)\n");
  add_angles(body, is_flat);
  if (is_partial) {
    const int64_t zero = 0, end = 1073741824;
    egi_body_integers(body, "from", &zero, 1);
    egi_body_integers(body, "middle", &rotary, 1);
    egi_body_integers(body, "to", &end, 1);
    egi_text_add(body->text, "turned = Slice (rows, from, middle, last)\nkept = Slice (rows, middle, to, last)\n");
  } else {
    egi_text_add(body->text, "turned = Identity (rows)\n");
  }
  add_rotation(body, egi_node_int(body->node, "interleaved", 0) != 0);
  egi_text_add(body->text,
               is_partial ? "whole = Concat <axis = -1> (rotated, kept)\n" : "whole = Identity (rotated)\n");
  egi_text_add(body->text,
               is_flat ? "shape = Shape (x)\ny = Reshape <allowzero = 1> (whole, shape)\n" : "y = Identity (whole)\n");
  return true;
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

/* "TO = act(FROM)" */
static bool add_activation(egi_body *body, const char *activation, const char *from, const char *to) {
  double alpha = (double)egi_node_float(body->node, "alpha", 1.0f);
  egi_text *text = body->text;
  if (strcmp(activation, "silu") == 0) {
    egi_body_number(body, "alpha", alpha, from);
    egi_text_format(text, "z = Mul (%s, alpha)\nshare = Sigmoid (z)\n%s = Mul (%s, share)\n", from, to, from);
  } else if (strcmp(activation, "gelu") == 0) {
    egi_text_format(text, "%s = Gelu (%s)\n", to, from);
  } else if (strcmp(activation, "gelu_tanh") == 0) {
    egi_text_format(text, "%s = Gelu <approximate = \"tanh\"> (%s)\n", to, from);
  } else if (strcmp(activation, "relu") == 0) {
    egi_text_format(text, "%s = Relu (%s)\n", to, from);
  } else if (strcmp(activation, "sigmoid") == 0) {
    egi_text_format(text, "%s = Sigmoid (%s)\n", to, from);
  } else if (strcmp(activation, "identity") == 0) {
    egi_text_format(text, "%s = Identity (%s)\n", to, from);
  } else {
    return false;
  }
  return true;
}

bool egi_body_swish(egi_body *body) {
  return add_activation(body, "silu", "x", "y");
}

/* act(min(gate, limit)) · (clamp(up, ±limit) + offset) */
bool egi_body_glu(egi_body *body) {
  double limit = (double)egi_node_float(body->node, "limit", 0.0f);
  double offset = (double)egi_node_float(body->node, "offset", 0.0f);
  const char *gate = "gate", *up = "up";
  if (limit > 0.0) {
    egi_body_number(body, "high", limit, "gate");
    egi_body_number(body, "low", -limit, "gate");
    egi_text_add(body->text, "gate_cut = Clip (gate, , high)\nup_cut = Clip (up, low, high)\n");
    gate = "gate_cut";
    up = "up_cut";
  }
  if (!add_activation(body, egi_node_string(body->node, "activation", "silu"), gate, "activated")) return false;
  if (offset != 0.0) {
    egi_body_number(body, "offset", offset, "up");
    egi_text_format(body->text, "up_moved = Add (%s, offset)\n", up);
    up = "up_moved";
  }
  egi_text_format(body->text, "y = Mul (activated, %s)\n", up);
  return true;
}
