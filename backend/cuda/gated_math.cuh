/* Activations and their slopes: GLU variants (arXiv:2002.05202), Swish (arXiv:1710.05941), GELU (arXiv:1606.08415), the
 * logistic function written so that no large number meets another. Where results are rounded to 16 bits, quotients are
 * approximate (2 units in the last place of f32). */
#ifndef ENGRAFT_BACKEND_CUDA_GATED_MATH_CUH
#define ENGRAFT_BACKEND_CUDA_GATED_MATH_CUH

namespace egi {

/* As the attribute names them. */
enum gate_kind { GATE_SILU, GATE_GELU, GATE_GELU_TANH, GATE_RELU, GATE_SIGMOID, GATE_IDENTITY, GATE_COUNT };

template <class A> struct gate_point { A value, slope; };

template <bool IS_FAST> __device__ __forceinline__ float gate_quotient(float a, float b) {
  return IS_FAST ? __fdividef(a, b) : a / b;
}
template <bool IS_FAST> __device__ __forceinline__ double gate_quotient(double a, double b) {
  return a / b;
}
__device__ __forceinline__ float gate_exp(float x) {
  return expf(x);
}
__device__ __forceinline__ double gate_exp(double x) {
  return exp(x);
}
__device__ __forceinline__ float gate_erf(float x) {
  return erff(x);
}
__device__ __forceinline__ double gate_erf(double x) {
  return erf(x);
}

/* The logistic function of z and of -z. */
template <bool IS_FAST, class A> __device__ __forceinline__ void logistic(A z, A *own, A *other) {
  const A e = gate_exp(z < static_cast<A>(0) ? z : -z);
  const A high = gate_quotient<IS_FAST>(static_cast<A>(1), static_cast<A>(1) + e), low = e * high;
  *own = z < static_cast<A>(0) ? low : high;
  *other = z < static_cast<A>(0) ? high : low;
}

/* The slope is wanted by gradients alone: without a use it costs nothing. */
template <bool IS_FAST, class A> __device__ __forceinline__ gate_point<A> gate_at(gate_kind kind, A x, A alpha) {
  constexpr A root = static_cast<A>(0.79788456080286535588), cubic = static_cast<A>(0.044715);
  constexpr A root_half = static_cast<A>(0.70710678118654752440), density = static_cast<A>(0.39894228040143267794);
  const A one = static_cast<A>(1), half = static_cast<A>(0.5);
  A own, other;
  switch (kind) {
  case GATE_SILU:
    logistic<IS_FAST>(alpha * x, &own, &other);
    return {x * own, own + alpha * x * own * other};
  case GATE_GELU: {
    const A share = half * (one + gate_erf(x * root_half));
    return {x * share,
            share + (x * x > static_cast<A>(1600) ? static_cast<A>(0) : x * density * gate_exp(-half * x * x))};
  }
  case GATE_GELU_TANH: {
    const A inner = static_cast<A>(2) * root * (one + static_cast<A>(3) * cubic * x * x);
    logistic<IS_FAST>(static_cast<A>(2) * root * (x + cubic * x * x * x), &own, &other);
    return {x * own, own + (x * x > static_cast<A>(1600) ? static_cast<A>(0) : x * own * other * inner)};
  }
  case GATE_RELU:
    return {x < static_cast<A>(0) ? static_cast<A>(0) : x, x > static_cast<A>(0) ? one : static_cast<A>(0)};
  case GATE_SIGMOID:
    logistic<IS_FAST>(x, &own, &other);
    return {own, own * other};
  default:
    return {x, one};
  }
}

} // namespace egi

#endif
