/* Gated activations and their gradients over contiguous f32; called by the kernels of gated.c. Elementwise: the results
 * of exp, tanh and erf may differ by an ulp between instruction sets. Formulas: GLU variants (arXiv:2002.05202), Swish
 * (arXiv:1710.05941), GELU (arXiv:1606.08415). */
#include "backend/cpu/isa/isa.h"

#include "backend/cpu/isa/math.h"

#define SQRT_HALF 0.707106781f
#define SQRT_2_OVER_PI 0.797884561f
#define INVERSE_SQRT_2PI 0.398942280f
#define GELU_CUBIC 0.044715f

/* An activation and its slope. */
typedef struct point {
  float value, slope;
} point;

static inline point silu(float x, float alpha) {
  const float z = alpha * x;
  const float e = egi_exp_f32(-fabsf(z));
  const float high = 1.0f / (1.0f + e); /* the logistic function of |z| and of -|z| */
  const float low = e / (1.0f + e);
  const float s = z < 0.0f ? low : high;
  return (point){x * s, s + z * high * low};
}

static inline point gelu(float x, float alpha) {
  (void)alpha;
  const float share = 0.5f * (1.0f + egi_erf_f32(x * SQRT_HALF));
  const float density = INVERSE_SQRT_2PI * egi_exp_f32(-0.5f * x * x);
  return (point){x * share, share + (fabsf(x) > 16.0f ? 0.0f : x * density)};
}

static inline point gelu_tanh(float x, float alpha) {
  (void)alpha;
  const float u = 2.0f * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x);
  const float inner = 2.0f * SQRT_2_OVER_PI * (1.0f + 3.0f * GELU_CUBIC * x * x);
  const float e = egi_exp_f32(-fabsf(u));
  const float high = 1.0f / (1.0f + e);
  const float low = e / (1.0f + e);
  const float s = u < 0.0f ? low : high;
  return (point){x * s, s + (fabsf(x) > 16.0f ? 0.0f : x * high * low * inner)};
}

static inline point relu(float x, float alpha) {
  (void)alpha;
  return (point){x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
}

static inline point sigmoid(float x, float alpha) {
  (void)alpha;
  const float e = egi_exp_f32(-fabsf(x));
  const float high = 1.0f / (1.0f + e);
  const float low = e / (1.0f + e);
  return (point){x < 0.0f ? low : high, high * low};
}

static inline point identity(float x, float alpha) {
  (void)alpha;
  return (point){x, 1.0f};
}

/* Without a limit it is infinite and the comparisons fail. */
#define GATED(name)                                                                                                 \
  static void name##_forward(float *out, const float *gate, const float *up, const egi_gate *p, int64_t n) {        \
    const egi_gate q = *p;                                                                                          \
    EGI_SIMD                                                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                                               \
      const float g = gate[i] > q.limit ? q.limit : gate[i];                                                        \
      const float raised = up[i] < -q.limit ? -q.limit : up[i];                                                     \
      const float u = raised > q.limit ? q.limit : raised;                                                          \
      out[i] = name(g, q.alpha).value * (u + q.offset);                                                             \
    }                                                                                                               \
  }                                                                                                                 \
  static void name##_backward(float *d_gate, float *d_up, const float *const in[3], const egi_gate *p, int64_t n) { \
    const egi_gate q = *p;                                                                                          \
    const float *gate = in[0], *up = in[1], *dy = in[2];                                                            \
    EGI_SIMD                                                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                                               \
      const float g = gate[i] > q.limit ? q.limit : gate[i];                                                        \
      const float raised = up[i] < -q.limit ? -q.limit : up[i];                                                     \
      const float u = raised > q.limit ? q.limit : raised;                                                          \
      const point a = name(g, q.alpha);                                                                             \
      const float for_gate = dy[i] * (u + q.offset) * a.slope, for_up = dy[i] * a.value;                            \
      d_gate[i] = gate[i] > q.limit ? 0.0f : for_gate;                                                              \
      d_up[i] = up[i] < -q.limit || up[i] > q.limit ? 0.0f : for_up;                                                \
    }                                                                                                               \
  }

GATED(silu)
GATED(gelu)
GATED(gelu_tanh)
GATED(relu)
GATED(sigmoid)
GATED(identity)

const egi_isa_gated EGI_ISA_NAME(egi_isa_gated) = {
    .forward = {[EGI_GATE_SILU] = silu_forward,
                [EGI_GATE_GELU] = gelu_forward,
                [EGI_GATE_GELU_TANH] = gelu_tanh_forward,
                [EGI_GATE_RELU] = relu_forward,
                [EGI_GATE_SIGMOID] = sigmoid_forward,
                [EGI_GATE_IDENTITY] = identity_forward},
    .backward = {[EGI_GATE_SILU] = silu_backward,
                 [EGI_GATE_GELU] = gelu_backward,
                 [EGI_GATE_GELU_TANH] = gelu_tanh_backward,
                 [EGI_GATE_RELU] = relu_backward,
                 [EGI_GATE_SIGMOID] = sigmoid_backward,
                 [EGI_GATE_IDENTITY] = identity_backward},
};
