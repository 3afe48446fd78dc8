/* Operators with two inputs, broadcast as numpy does: floats in f32 (halves are rounded once), f64 in f64, integers in
 * 64 bits, of which the type keeps the low ones. A quotient by zero is 0; Div truncates toward zero; Mod has the
 * divisor's sign, or with fmod the dividend's. Max and Min of many inputs go from left to right. */
#include "backend/cuda/elementwise.cuh"

namespace egi::plain {

struct binary_params {
  inside_type inside;
  int op;
  int bits; /* of the type */
  bool is_fmod, is_tanh, is_left;
};

/* ---- formulas, those of backend/cpu ------------------------------------------------------------------------------ */

/* d gelu / dx = Phi(x) + x phi(x); the cut keeps infinity times zero out. */
template <class C> __device__ __forceinline__ C gelu_slope(C x) {
  const C density = static_cast<C>(0.39894228040143267794) * exp(static_cast<C>(-0.5) * x * x);
  const C product = fabs(x) > static_cast<C>(16) ? static_cast<C>(0) : x * density;
  return static_cast<C>(0.5) * erfc(-x * static_cast<C>(0.70710678118654752440)) + product;
}
template <class C> __device__ __forceinline__ C gelu_tanh_slope(C x) {
  const C scale = static_cast<C>(2.0 * 0.79788456080286535588), cubic = static_cast<C>(0.044715);
  const C u = scale * (x + cubic * x * x * x), inner = scale * (static_cast<C>(1) + static_cast<C>(3) * cubic * x * x);
  const C e = exp(-fabs(u)), high = static_cast<C>(1) / (static_cast<C>(1) + e), low = e * high;
  const C product = fabs(x) > static_cast<C>(16) ? static_cast<C>(0) : x * high * low * inner;
  return (u < static_cast<C>(0) ? low : high) + product;
}

/* Squares and cubes are what exported norms and activations contain. */
template <class C> __device__ __forceinline__ C power(C x, C y) {
  if (y == static_cast<C>(2)) return x * x;
  if (y == static_cast<C>(3)) return x * x * x;
  return y == static_cast<C>(1) ? x : pow(x, y);
}

/* base^exponent modulo 2^64; a negative exponent gives the truncated quotient, 0 for base 0. */
__device__ __forceinline__ int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 == 0 ? 1 : -1) : 0;
  uint64_t result = 1, factor = static_cast<uint64_t>(base);
  for (uint64_t bits = static_cast<uint64_t>(exponent); bits != 0; bits >>= 1) {
    if (bits & 1) result *= factor;
    factor *= factor;
  }
  return static_cast<int64_t>(result);
}

__device__ __forceinline__ int64_t quotient(int64_t x, int64_t y) {
  if (y == 0) return 0;
  return y == -1 ? static_cast<int64_t>(0 - static_cast<uint64_t>(x)) : x / y;
}
__device__ __forceinline__ uint64_t quotient(uint64_t x, uint64_t y) {
  return y == 0 ? 0 : x / y;
}
__device__ __forceinline__ int64_t remainder(int64_t x, int64_t y, bool is_fmod) {
  const int64_t r = y == 0 || y == -1 ? 0 : x % y;
  return !is_fmod && r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
__device__ __forceinline__ uint64_t remainder(uint64_t x, uint64_t y, bool) {
  return y == 0 ? 0 : x % y;
}

template <class C> __device__ __forceinline__ C claim(bool is_true) {
  return is_true ? static_cast<C>(1) : static_cast<C>(0);
}

/* What all types have. */
template <class C> __device__ __forceinline__ C common_binary(int op, C x, C y) {
  switch (op) {
  case EGI_OP_Max:
    return x > y || x != x ? x : y;
  case EGI_OP_Min:
    return x < y || x != x ? x : y;
  case EGI_OP_Equal:
    return claim<C>(x == y);
  case EGI_OP_Less:
    return claim<C>(x < y);
  case EGI_OP_LessOrEqual:
    return claim<C>(x <= y);
  case EGI_OP_Greater:
    return claim<C>(x > y);
  default: /* GreaterOrEqual */
    return claim<C>(x >= y);
  }
}

template <class C> __device__ __forceinline__ C real_binary(int op, C x, C y) {
  switch (op) {
  case EGI_OP_Add:
    return x + y;
  case EGI_OP_Sub:
    return x - y;
  case EGI_OP_Mul:
    return x * y;
  case EGI_OP_Div:
    return x / y;
  case EGI_OP_Pow:
    return power(x, y);
  case EGI_OP_Mod:
    return fmod(x, y);
  default:
    return common_binary(op, x, y);
  }
}

template <class C> struct any_binary {
  binary_params p;
  __device__ __forceinline__ C operator()(const C (&x)[2]) const {
    if (p.op == EGI_OP_GeluGrad) return (p.is_tanh ? gelu_tanh_slope(x[0]) : gelu_slope(x[0])) * x[1];
    return real_binary(p.op, x[0], x[1]);
  }
};

__device__ __forceinline__ int64_t whole_power(int64_t x, int64_t y) {
  return power(x, y);
}
__device__ __forceinline__ uint64_t whole_power(uint64_t x, uint64_t y) {
  return static_cast<uint64_t>(power(static_cast<int64_t>(x), static_cast<int64_t>(y)));
}

/* Sums, products and bits are those of unsigned numbers. */
template <class C> __device__ __forceinline__ C whole_binary(const binary_params &p, C x, C y) {
  const uint64_t a = static_cast<uint64_t>(x), b = static_cast<uint64_t>(y);
  switch (p.op) {
  case EGI_OP_Add:
    return static_cast<C>(a + b);
  case EGI_OP_Sub:
    return static_cast<C>(a - b);
  case EGI_OP_Mul:
    return static_cast<C>(a * b);
  case EGI_OP_Div:
    return quotient(x, y);
  case EGI_OP_Mod:
    return remainder(x, y, p.is_fmod);
  case EGI_OP_Pow:
    return whole_power(x, y);
  case EGI_OP_And:
  case EGI_OP_BitwiseAnd:
    return static_cast<C>(a & b);
  case EGI_OP_Or:
  case EGI_OP_BitwiseOr:
    return static_cast<C>(a | b);
  case EGI_OP_Xor:
  case EGI_OP_BitwiseXor:
    return static_cast<C>(a ^ b);
  case EGI_OP_BitShift:
    return b >= static_cast<uint64_t>(p.bits) ? C{0} : static_cast<C>(p.is_left ? a << b : a >> b);
  default:
    return common_binary(p.op, x, y);
  }
}
template <> struct any_binary<int64_t> {
  binary_params p;
  __device__ __forceinline__ int64_t operator()(const int64_t (&x)[2]) const { return whole_binary(p, x[0], x[1]); }
};
template <> struct any_binary<uint64_t> {
  binary_params p;
  __device__ __forceinline__ uint64_t operator()(const uint64_t (&x)[2]) const { return whole_binary(p, x[0], x[1]); }
};

template <int OP> struct one_binary {
  __device__ __forceinline__ float operator()(const float (&x)[2]) const { return real_binary(OP, x[0], x[1]); }
};
template <bool IS_TANH> struct one_gelu_gradient {
  __device__ __forceinline__ float operator()(const float (&x)[2]) const {
    return (IS_TANH ? gelu_tanh_slope(x[0]) : gelu_slope(x[0])) * x[1];
  }
};

/* Operators that graphs apply to whole activations. */
#define COMMON_BINARY(OP)                                    \
  case EGI_OP_##OP:                                          \
    launch_fast<2>(loop, one_binary<EGI_OP_##OP>(), stream); \
    return true;
static bool launch_common_binary(const binary_params &p, const strided &loop, cudaStream_t stream) {
  switch (p.op) {
    COMMON_BINARY(Add)
    COMMON_BINARY(Sub)
    COMMON_BINARY(Mul)
    COMMON_BINARY(Div)
    COMMON_BINARY(Pow)
    COMMON_BINARY(Max)
    COMMON_BINARY(Min)
  case EGI_OP_GeluGrad:
    if (p.is_tanh)
      launch_fast<2>(loop, one_gelu_gradient<true>(), stream);
    else
      launch_fast<2>(loop, one_gelu_gradient<false>(), stream);
    return true;
  default:
    return false;
  }
}
#undef COMMON_BINARY

static eg_status run_pair(eg_context *ctx, const egi_kernel_call *call, const egi_tensor *a, const egi_tensor *b) {
  const binary_params p = *static_cast<const binary_params *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const egi_tensor *const inputs[2] = {a, b};
  const strided loop = loop_of(&call->outputs[0], inputs, 2);
  if (loop.count == 0) return EG_OK;
  if (p.inside == INSIDE_F32 && launch_common_binary(p, loop, stream)) return egi_cuda_launched(ctx, "binary");
  with_inside(p.inside, [&](auto zero) {
    using C = decltype(zero);
    launch_elements<C, 2>(loop, any_binary<C>{p}, stream);
  });
  return egi_cuda_launched(ctx, "binary");
}

/* ---- prepare ----------------------------------------------------------------------------------------------------- */

static eg_status new_params(egi_kernel_plan *plan, binary_params **out_params) {
  binary_params *p = EGI_NEW(plan->arena, binary_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  p->op = egi_plan_node(plan)->op;
  p->inside = inside_of(plan->inputs[0].dtype);
  p->bits = static_cast<int>(egi_dtype_bits(plan->inputs[0].dtype));
  return EG_OK;
}

static bool is_whole(inside_type inside) {
  return inside == INSIDE_I64 || inside == INSIDE_U64;
}

/* Bases and exponents of any types: what they are computed in. */
static inside_type power_inside(eg_dtype base, eg_dtype exponent) {
  const inside_type a = inside_of(base), b = inside_of(exponent);
  if (base == EG_DTYPE_BOOL || exponent == EG_DTYPE_BOOL || a == INSIDE_NONE || b == INSIDE_NONE) return INSIDE_NONE;
  if (is_whole(a) && is_whole(b)) return INSIDE_I64;
  return a == INSIDE_F32 ? INSIDE_F32 : INSIDE_F64;
}

static bool is_comparison(int op) {
  return op == EGI_OP_Equal || op == EGI_OP_Less || op == EGI_OP_LessOrEqual || op == EGI_OP_Greater ||
         op == EGI_OP_GreaterOrEqual;
}

static bool is_taken(const binary_params *p, eg_dtype dtype) {
  const bool is_logical = p->op == EGI_OP_And || p->op == EGI_OP_Or || p->op == EGI_OP_Xor;
  if (dtype == EG_DTYPE_BOOL) return is_logical || p->op == EGI_OP_Equal;
  switch (p->inside) {
  case INSIDE_F32:
  case INSIDE_F64:
    return !is_logical && (p->op != EGI_OP_Mod || p->is_fmod);
  case INSIDE_I64:
  case INSIDE_U64:
    return !is_logical && p->op != EGI_OP_GeluGrad;
  default:
    return false;
  }
}

static eg_status read_approximation(const egi_kernel_plan *plan, bool *out_is_tanh) {
  const char *approximation = egi_node_string(egi_plan_node(plan), "approximate", "none");
  *out_is_tanh = strcmp(approximation, "tanh") == 0;
  if (*out_is_tanh || strcmp(approximation, "none") == 0) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown approximation \"%s\"", approximation);
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_binary(egi_kernel_plan *plan) {
  binary_params *p;
  EG_TRY(new_params(plan, &p));
  const eg_dtype dtype = plan->inputs[0].dtype;
  if (p->op == EGI_OP_GeluGrad) EG_TRY(read_approximation(plan, &p->is_tanh));
  p->is_fmod = egi_node_int(egi_plan_node(plan), "fmod", 0) != 0;
  bool is_right = plan->outputs[0].dtype == (is_comparison(p->op) ? EG_DTYPE_BOOL : dtype);
  if (p->op == EGI_OP_Pow) {
    p->inside = power_inside(dtype, plan->inputs[1].dtype);
    is_right = is_right && p->inside != INSIDE_NONE;
  } else {
    is_right = is_right && plan->inputs[1].dtype == dtype && is_taken(p, dtype);
  }
  return is_right ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_binary(eg_context *ctx, const egi_kernel_call *call) {
  return run_pair(ctx, call, &call->inputs[0], &call->inputs[1]);
}

extern "C" eg_status egi_cuda_prepare_bitwise(egi_kernel_plan *plan) {
  binary_params *p;
  EG_TRY(new_params(plan, &p));
  const char *direction = egi_node_string(egi_plan_node(plan), "direction", "");
  const eg_dtype dtype = plan->inputs[0].dtype;
  p->is_left = strcmp(direction, "LEFT") == 0;
  if (p->op == EGI_OP_BitShift && !p->is_left && strcmp(direction, "RIGHT") != 0)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown direction \"%s\"", direction);
  const bool is_fit = (p->inside == INSIDE_U64 || (p->inside == INSIDE_I64 && p->op != EGI_OP_BitShift)) &&
                      dtype != EG_DTYPE_BOOL && plan->outputs[0].dtype == dtype && plan->inputs[1].dtype == dtype;
  return is_fit ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_bitwise(eg_context *ctx, const egi_kernel_call *call) {
  return run_pair(ctx, call, &call->inputs[0], &call->inputs[1]);
}

extern "C" eg_status egi_cuda_prepare_extremum(egi_kernel_plan *plan) {
  binary_params *p;
  EG_TRY(new_params(plan, &p));
  const eg_dtype dtype = plan->inputs[0].dtype;
  bool is_right = p->inside != INSIDE_NONE && dtype != EG_DTYPE_BOOL && plan->outputs[0].dtype == dtype;
  for (unsigned i = 1; i < plan->n_inputs; i++) is_right = is_right && plan->inputs[i].dtype == dtype;
  return is_right ? EG_OK : egi_fail_types(plan);
}

/* With the output in the memory of input 1, the first loop reads it before it writes. */
extern "C" eg_status egi_cuda_run_extremum(eg_context *ctx, const egi_kernel_call *call) {
  if (call->n_inputs == 1) return copy_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[0], &call->inputs[0]);
  EG_TRY(run_pair(ctx, call, &call->inputs[0], &call->inputs[1]));
  for (unsigned i = 2; i < call->n_inputs; i++) EG_TRY(run_pair(ctx, call, &call->outputs[0], &call->inputs[i]));
  return EG_OK;
}
