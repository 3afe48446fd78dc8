/* RMSNormalization and LayerNormalization out of the plain operators that exporters write for them, over the last axis.
 * Precondition: inferred. The scale must be a vector along that axis, epsilon a constant number; a norm
 * without a scale gets one of ones. Scales that Gemma writes as 1 + w stay that expression. Formulas: RMSNorm
 * (arXiv:1910.07467), LayerNorm (arXiv:1607.06450), as in ONNX RMSNormalization-23 and LayerNormalization-17. */
#include <math.h>
#include <string.h>

#include "passes/rules.h"

#define TWO "two = Constant <value_float = 2.0> () "
#define ROOT "half = Constant <value_float = -0.5> () "
/* r = 1 / root of (mean square of `x` + eps) */
#define MEAN(x) \
  TWO ROOT "q = Pow (" x ", two) m = ReduceMean <keepdims = 1> (q, axes) a = Add (m, eps) r = Pow (a, half) "
/* The same with the axis dropped and put back. */
#define FLAT_MEAN(x)                                                                                                \
  TWO ROOT "q = Pow (" x ", two) f = ReduceMean <keepdims = 0> (q, axes) m = Unsqueeze (f, back) a = Add (m, eps) " \
           "r = Pow (a, half) "
/* An epsilon that float32 does not show is folded away by exporters. */
#define BARE_MEAN(x) TWO ROOT "q = Pow (" x ", two) m = ReduceMean <keepdims = 1> (q, axes) r = Pow (m, half) "
/* d = x - mean */
#define CENTRED "mean = ReduceMean <keepdims = 1> (x, center) d = Sub (x, mean) "

/* A mean written as a sum and its count: the patterns below then see one form. */
static const char *const mean[] = {
    "(x, axes, count) => (y) { s = ReduceSum <keepdims = 1> (x, axes) y = Div (s, count) }",
    "(x, axes, part) => (y) { s = ReduceSum <keepdims = 1> (x, axes) y = Mul (s, part) }",
};

static const char *const rms_scaled[] = {
    "(x, axes, eps, w) => (y) { " MEAN("x") "n = Mul (x, r) y = Mul (n, w) }",
    "(x, axes, eps, w) => (y) { " MEAN("x") "n = Mul (r, w) y = Mul (x, n) }",
    "(x, axes, eps, w) => (y) { " MEAN("x") "n = Mul (x, w) y = Mul (n, r) }",
    "(x, axes, w) => (y) { " BARE_MEAN("x") "n = Mul (x, r) y = Mul (n, w) }",
    "(x, axes, w) => (y) { " BARE_MEAN("x") "n = Mul (r, w) y = Mul (x, n) }",
    "(x, axes, eps, w, back) => (y) { " FLAT_MEAN("x") "n = Mul (x, r) y = Mul (n, w) }",
};

static const char *const rms_plain[] = {
    "(x, axes, eps) => (y) { " MEAN("x") "y = Mul (x, r) }",
    "(x, axes) => (y) { " BARE_MEAN("x") "y = Mul (x, r) }",
    "(x, axes, eps, back) => (y) { " FLAT_MEAN("x") "y = Mul (x, r) }",
};

static const char *const layer_biased[] = {
    "(x, center, axes, eps, w, b) => (y) { " CENTRED MEAN("d") "n = Mul (d, r) p = Mul (n, w) y = Add (p, b) }",
    "(x, center, axes, eps, w, b) => (y) { " CENTRED MEAN("d") "n = Mul (r, w) p = Mul (d, n) y = Add (p, b) }",
    "(x, center, axes, eps, w, b) => (y) { " CENTRED MEAN("d") "n = Mul (d, w) p = Mul (n, r) y = Add (p, b) }",
    "(x, center, axes, w, b) => (y) { " CENTRED BARE_MEAN("d") "n = Mul (d, r) p = Mul (n, w) y = Add (p, b) }",
    /* x · s + (b - mean · s), as TensorFlow's converter writes it */
    "(x, center, axes, eps, w, b) => (y) { " CENTRED MEAN(
        "d") "n = Mul (r, w) p = Mul (x, n) o = Mul (mean, n) c = Sub (b, o) y = Add (p, c) }",
};

static const char *const layer_scaled[] = {
    "(x, center, axes, eps, w) => (y) { " CENTRED MEAN("d") "n = Mul (d, r) y = Mul (n, w) }",
    "(x, center, axes, eps, w) => (y) { " CENTRED MEAN("d") "n = Mul (r, w) y = Mul (d, n) }",
    "(x, center, axes, eps, w) => (y) { " CENTRED MEAN("d") "n = Mul (d, w) y = Mul (n, r) }",
};

static const char *const layer_plain[] = {
    "(x, center, axes, eps) => (y) { " CENTRED MEAN("d") "y = Mul (d, r) }",
};

/* What stands behind a norm that is one operator already. */
#define NORM(op) "n = " op " <axis = -1, epsilon: float = @epsilon, stash_type = 1> "
static const char *const layer_bias_after[] = {
    "(x, w, b) => (y) { " NORM("LayerNormalization") "(x, w) y = Add (n, b) }",
};

static const char *const layer_scale_after[] = {
    "(x, one, w) => (y) { " NORM("LayerNormalization") "(x, one) y = Mul (n, w) }",
};

/* An RMSNorm of what is centred, which an optimiser has recognised already. */
static const char *const layer_centred[] = {
    "(x, center, scale) => (y) { " CENTRED
    "y = RMSNormalization <axis = -1, epsilon: float = @epsilon, stash_type = 1> (d, scale) }",
};

static const char *const rms_scale_after[] = {
    "(x, one, w) => (y) { " NORM("RMSNormalization") "(x, one) y = Mul (n, w) }",
};

/* ---- checks ---------------------------------------------------------------------------------------------------- */

/* The axis, its length and epsilon. */
static bool check_core(egi_match *match, const char *squared) {
  const egi_graph *graph = egi_match_graph(match);
  double epsilon = 0.0;
  int64_t length = 0;
  if (!egi_dtype_is_float(graph->values[egi_match_value(match, "x")].dtype))
    return egi_match_refuse(match, "what is normalised is not of a floating type");
  if (!egi_match_is_last_axis(match, "axes", squared))
    return egi_match_refuse(match, "the mean is not over the last axis alone");
  if (egi_match_value(match, "back") != 0 && !egi_match_is_last_axis(match, "back", "m"))
    return egi_match_refuse(match, "the axis of the mean is put back elsewhere");
  if (!egi_match_size(match, "x", 1, &length) || length < 1)
    return egi_match_refuse(match, "the size of the last axis is not a number");
  if (egi_match_value(match, "eps") != 0 && !egi_match_scalar(match, "eps", &epsilon))
    return egi_match_refuse(match, "epsilon is not a constant number");
  return (epsilon >= 0.0 && epsilon <= 1.0) || egi_match_refuse(match, "epsilon is not between 0 and 1");
}

static bool check_mean(egi_match *match) {
  bool is_part = egi_match_value(match, "part") != 0;
  int64_t length = 0;
  double count = 0.0;
  if (!egi_dtype_is_float(egi_match_graph(match)->values[egi_match_value(match, "x")].dtype))
    return egi_match_refuse(match, "what is summed is not of a floating type");
  if (!egi_match_is_last_axis(match, "axes", "x") || !egi_match_size(match, "x", 1, &length) || length < 1)
    return egi_match_refuse(match, "the sum is not over a last axis of known size");
  if (!egi_match_scalar(match, is_part ? "part" : "count", &count))
    return egi_match_refuse(match, "the count is not a constant number");
  double wanted = is_part ? 1.0 / (double)length : (double)length;
  return fabs(count - wanted) <= 1e-6 * wanted || egi_match_refuse(match, "the sum is not divided by its count");
}

static bool check_center(egi_match *match) {
  return egi_match_is_last_axis(match, "center", "x") ||
         egi_match_refuse(match, "the mean that is taken off is not over the last axis alone");
}

/* [length], or that behind dims of 1, no deeper than x. */
static bool is_vector(const egi_match *match, const char *name) {
  const egi_graph *graph = egi_match_graph(match);
  const egi_value *vector = &graph->values[egi_match_value(match, name)];
  int rank = graph->values[egi_match_value(match, "x")].rank;
  int64_t length = 0, size = 0;
  if (vector->rank < 1 || vector->rank > rank || !egi_match_size(match, "x", 1, &length)) return false;
  for (int i = 1; i <= vector->rank; i++)
    if (!egi_match_size(match, name, i, &size) || size != (i == 1 ? length : 1)) return false;
  return true;
}

/* ---- what the operators take ----------------------------------------------------------------------------------- */

/* The vector as [length]. */
static bool bind_vector(egi_match *match, const char *name, const char *bound) {
  const int64_t all[1] = {-1};
  egi_value_id vector = egi_match_source(match, name);
  egi_emitter *emit = egi_match_emitter(match);
  if (egi_match_graph(match)->values[vector].rank != 1)
    vector = egi_emit_binary(emit, EGI_OP_Reshape, vector, egi_emit_integers(emit, all, 1));
  return egi_match_bind(match, bound, vector);
}

/* A vector of ones. */
static bool bind_ones(egi_match *match) {
  egi_graph *graph = egi_match_graph(match);
  egi_emitter *emit = egi_match_emitter(match);
  int64_t length = 0;
  egi_value_id ones = 0;
  egi_match_size(match, "x", 1, &length);
  float *data = EGI_NEW(&graph->module->arena, float, (size_t)length);
  for (int64_t i = 0; data != NULL && i < length; i++) data[i] = 1.0f;
  const egi_tensor tensor = {.data = data, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {length}, .strides = {1}};
  emit->status = data != NULL ? egi_add_constant(graph, EGI_WEIGHT_ONES, &tensor, &ones) : EG_ERROR_MEMORY;
  if (emit->status == EG_OK) ones = egi_emit_cast(emit, ones, graph->values[egi_match_value(match, "x")].dtype);
  return egi_match_bind(match, "scale", ones);
}

static void set_epsilon(egi_match *match) {
  double epsilon = 0.0;
  egi_match_scalar(match, "eps", &epsilon);
  const egi_attribute attribute = egi_attribute_float("epsilon", (float)epsilon);
  egi_match_set(match, &attribute);
}

static bool finish(egi_match *match, const char *squared, bool is_centred, bool has_scale, bool has_bias) {
  if (!check_core(match, squared) || (is_centred && !check_center(match))) return false;
  if (has_scale && !is_vector(match, "w")) return egi_match_refuse(match, "the scale is no vector along the last axis");
  if (has_bias && !is_vector(match, "b")) return egi_match_refuse(match, "the bias is no vector along the last axis");
  set_epsilon(match);
  if (has_bias) bind_vector(match, "b", "bias");
  return has_scale ? bind_vector(match, "w", "scale") : bind_ones(match);
}

static bool check_rms_scaled(egi_match *match) {
  return finish(match, "x", false, true, false);
}

static bool check_rms_plain(egi_match *match) {
  return finish(match, "x", false, false, false);
}

static bool check_layer_biased(egi_match *match) {
  return finish(match, "d", true, true, true);
}

static bool check_layer_scaled(egi_match *match) {
  return finish(match, "d", true, true, false);
}

static bool check_layer_plain(egi_match *match) {
  return finish(match, "d", true, false, false);
}

static bool check_bias_after(egi_match *match) {
  if (!is_vector(match, "b")) return egi_match_refuse(match, "the bias is no vector along the last axis");
  return bind_vector(match, "b", "bias");
}

/* A constant vector of ones. */
static bool is_ones(const egi_match *match, const char *name) {
  const egi_graph *graph = egi_match_graph(match);
  egi_tensor tensor;
  if (!egi_value_constant(graph, egi_match_source(match, name), &tensor)) return false;
  for (int64_t i = 0; i < egi_tensor_count(&tensor); i++) {
    const char *at = (const char *)tensor.data + (size_t)i * (egi_dtype_bits(tensor.dtype) / 8);
    float single = 0.0f;
    uint16_t half = 0;
    if (tensor.dtype == EG_DTYPE_F32)
      memcpy(&single, at, sizeof single);
    else
      memcpy(&half, at, egi_dtype_bits(tensor.dtype) == 16 ? sizeof half : 0);
    if (tensor.dtype == EG_DTYPE_F16) single = egi_f16_to_f32(half);
    if (tensor.dtype == EG_DTYPE_BF16) single = egi_bf16_to_f32(half);
    if (single != 1.0f) return false;
  }
  return true;
}

static bool check_scale_after(egi_match *match) {
  if (!is_vector(match, "w")) return egi_match_refuse(match, "the scale is no vector along the last axis");
  if (!is_ones(match, "one")) return egi_match_refuse(match, "the norm has a scale already");
  return bind_vector(match, "w", "scale");
}

#define RMS "(x, scale) => (y) { y = RMSNormalization <axis = -1, epsilon: float = @epsilon> (x, scale) }"
#define LAYER "(x, scale) => (y) { y = LayerNormalization <axis = -1, epsilon: float = @epsilon> (x, scale) }"
#define LAYER_BIASED \
  "(x, scale, bias) => (y) { y = LayerNormalization <axis = -1, epsilon: float = @epsilon> (x, scale, bias) }"

#define MEAN_NODE "(x, axes) => (y) { y = ReduceMean <keepdims = 1> (x, axes) }"

/* Parts come after the whole: a LayerNorm holds an RMSNorm of what is centred. Two modules may normalise the same
 * values with scales of their own: sharing is allowed. */
static const egi_rule rules[] = {
    {"mean", mean, EGI_COUNT(mean), MEAN_NODE, check_mean, false, NULL},
    {"layer_norm_with_bias", layer_biased, EGI_COUNT(layer_biased), LAYER_BIASED, check_layer_biased, true, NULL},
    {"layer_norm", layer_scaled, EGI_COUNT(layer_scaled), LAYER, check_layer_scaled, true, NULL},
    {"layer_norm_without_scale", layer_plain, EGI_COUNT(layer_plain), LAYER, check_layer_plain, true, NULL},
    {"rms_norm", rms_scaled, EGI_COUNT(rms_scaled), RMS, check_rms_scaled, true, NULL},
    {"rms_norm_without_scale", rms_plain, EGI_COUNT(rms_plain), RMS, check_rms_plain, true, NULL},
    {"layer_norm_of_centred", layer_centred, EGI_COUNT(layer_centred), LAYER, check_center, true, NULL},
    {"layer_norm_scale_after", layer_scale_after, EGI_COUNT(layer_scale_after), LAYER, check_scale_after, false, NULL},
    {"layer_norm_bias_after", layer_bias_after, EGI_COUNT(layer_bias_after),
     "(x, w, bias) => (y) { y = LayerNormalization <axis = -1, epsilon: float = @epsilon> (x, w, bias) }",
     check_bias_after, false, NULL},
    {"rms_norm_scale_after", rms_scale_after, EGI_COUNT(rms_scale_after), RMS, check_scale_after, false, NULL},
};

eg_status egi_pass_fuse_norm(egi_pass_run *run, egi_graph *graph) {
  return egi_rules_run(run, graph, rules, EGI_COUNT(rules));
}
