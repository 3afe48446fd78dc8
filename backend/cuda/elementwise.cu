/* Packets of the elementwise engine, and the kernels of operators with one input: floats in f32 (halves are rounded
 * once), f64 in f64, integers in 64 bits, of which the type keeps the low ones. */
#include "backend/cuda/elementwise.cuh"

namespace egi::plain {

/* Elements of operand k stand side by side at places that packets are aligned to. */
static bool is_packed_operand(const strided *loop, int k) {
  const int last = loop->rank - 1;
  const int64_t bytes = static_cast<int64_t>(egi_element_bytes(static_cast<eg_dtype>(loop->dtypes[k])));
  const int64_t alignment = bytes * PACKET < 16 ? bytes * PACKET : 16;
  if (loop->strides[k][last] != bytes || reinterpret_cast<intptr_t>(loop->data[k]) % alignment != 0) return false;
  for (int i = 0; i < last; i++) {
    if (loop->strides[k][i] % alignment != 0) return false;
  }
  return true;
}

bool is_packet_type(int dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

bool make_packets(strided *loop, unsigned *out_repeated, strided *out_rest) {
  const int last = loop->rank - 1;
  const int64_t n = loop->dims[last];
  if (n < PACKET || (n % PACKET != 0 && loop->rank > 1)) return false;
  *out_repeated = 0;
  for (int k = 0; k < loop->n_operands; k++) {
    if (k > 0 && loop->strides[k][last] == 0)
      *out_repeated |= 1u << (k - 1);
    else if (!is_packed_operand(loop, k))
      return false;
  }
  *out_rest = *loop;
  out_rest->count = out_rest->dims[last] = n % PACKET;
  for (int k = 0; k < loop->n_operands; k++) {
    out_rest->data[k] += n / PACKET * PACKET * loop->strides[k][last];
    loop->strides[k][last] *= PACKET;
  }
  loop->count = loop->count / n * (n / PACKET);
  loop->dims[last] = n / PACKET;
  return true;
}

/* ---- formulas, those of backend/cpu ------------------------------------------------------------------------------ */

/* Hendrycks and Gimpel, arXiv:1606.08415, section 2. */
template <class C> __device__ __forceinline__ C gelu(C x) {
  return static_cast<C>(0.5) * x * erfc(-x * static_cast<C>(0.70710678118654752440));
}
/* (1 + tanh u) / 2 is the logistic function of 2u, which does not cancel for negative u. */
template <class C> __device__ __forceinline__ C logistic(C x) {
  const C e = exp(-fabs(x)), high = static_cast<C>(1) / (static_cast<C>(1) + e);
  return x >= static_cast<C>(0) ? high : e * high;
}
template <class C> __device__ __forceinline__ C gelu_tanh(C x) {
  const C u = static_cast<C>(2.0 * 0.79788456080286535588) * (x + static_cast<C>(0.044715) * x * x * x);
  return x * logistic(u);
}

template <class C> __device__ __forceinline__ C real_unary(int op, C x) {
  switch (op) {
  case EGI_OP_Abs:
    return fabs(x);
  case EGI_OP_Acos:
    return acos(x);
  case EGI_OP_Acosh:
    return acosh(x);
  case EGI_OP_Asin:
    return asin(x);
  case EGI_OP_Asinh:
    return asinh(x);
  case EGI_OP_Atan:
    return atan(x);
  case EGI_OP_Atanh:
    return atanh(x);
  case EGI_OP_Cosh:
    return cosh(x);
  case EGI_OP_Sinh:
    return sinh(x);
  case EGI_OP_Tan:
    return tan(x);
  case EGI_OP_Ceil:
    return ceil(x);
  case EGI_OP_Cos:
    return cos(x);
  case EGI_OP_Erf:
    return erf(x);
  case EGI_OP_Exp:
    return exp(x);
  case EGI_OP_Floor:
    return floor(x);
  case EGI_OP_Log:
    return log(x);
  case EGI_OP_Neg:
    return -x;
  case EGI_OP_Reciprocal:
    return static_cast<C>(1) / x;
  case EGI_OP_Relu:
    return x < static_cast<C>(0) ? static_cast<C>(0) : x;
  case EGI_OP_Round:
    return rint(x);
  case EGI_OP_Sign:
    return x > static_cast<C>(0) ? static_cast<C>(1) : x < static_cast<C>(0) ? static_cast<C>(-1) : x;
  case EGI_OP_Sigmoid:
    return logistic(x);
  case EGI_OP_Sin:
    return sin(x);
  case EGI_OP_Sqrt:
    return sqrt(x);
  case EGI_OP_Tanh:
    return tanh(x);
  default: /* IsNaN */
    return x != x ? static_cast<C>(1) : static_cast<C>(0);
  }
}

/* ---- operators --------------------------------------------------------------------------------------------------- */

struct unary_params {
  inside_type inside;
  int op;
  bool is_tanh;                        /* Gelu */
  bool finds_positive, finds_negative; /* IsInf */
};

template <class C> struct any_unary {
  unary_params p;
  __device__ __forceinline__ C operator()(const C (&x)[1]) const {
    if (p.op == EGI_OP_Gelu) return p.is_tanh ? gelu_tanh(x[0]) : gelu(x[0]);
    if (p.op == EGI_OP_IsInf)
      return isinf(x[0]) && (x[0] > static_cast<C>(0) ? p.finds_positive : p.finds_negative) ? static_cast<C>(1)
                                                                                             : static_cast<C>(0);
    return real_unary(p.op, x[0]);
  }
};

/* Integers; not: of bool where the type is bool, else of the bits. */
template <class C> __device__ __forceinline__ C whole_unary(int op, C x) {
  const bool is_negative = x < static_cast<C>(1) && x != static_cast<C>(0);
  switch (op) {
  case EGI_OP_Abs:
    return is_negative ? static_cast<C>(0 - static_cast<uint64_t>(x)) : x;
  case EGI_OP_Neg:
    return static_cast<C>(0 - static_cast<uint64_t>(x));
  case EGI_OP_Relu:
    return is_negative ? static_cast<C>(0) : x;
  case EGI_OP_Sign:
    return is_negative ? static_cast<C>(-1) : x != static_cast<C>(0) ? static_cast<C>(1) : static_cast<C>(0);
  case EGI_OP_Not:
    return x == static_cast<C>(0) ? static_cast<C>(1) : static_cast<C>(0);
  default: /* BitwiseNot */
    return ~x;
  }
}
template <> struct any_unary<int64_t> {
  unary_params p;
  __device__ __forceinline__ int64_t operator()(const int64_t (&x)[1]) const { return whole_unary(p.op, x[0]); }
};
template <> struct any_unary<uint64_t> {
  unary_params p;
  __device__ __forceinline__ uint64_t operator()(const uint64_t (&x)[1]) const { return whole_unary(p.op, x[0]); }
};

/* An operator known when this is compiled. */
template <int OP> struct one_unary {
  __device__ __forceinline__ float operator()(const float (&x)[1]) const { return real_unary(OP, x[0]); }
};

template <bool IS_TANH> struct one_gelu {
  __device__ __forceinline__ float operator()(const float (&x)[1]) const {
    return IS_TANH ? gelu_tanh(x[0]) : gelu(x[0]);
  }
};

/* Operators that graphs apply to whole activations. */
#define COMMON_UNARY(OP)                                    \
  case EGI_OP_##OP:                                         \
    launch_fast<1>(loop, one_unary<EGI_OP_##OP>(), stream); \
    return true;
static bool launch_common_unary(const unary_params &p, const strided &loop, cudaStream_t stream) {
  switch (p.op) {
    COMMON_UNARY(Abs)
    COMMON_UNARY(Cos)
    COMMON_UNARY(Erf)
    COMMON_UNARY(Exp)
    COMMON_UNARY(Log)
    COMMON_UNARY(Neg)
    COMMON_UNARY(Reciprocal)
    COMMON_UNARY(Relu)
    COMMON_UNARY(Sigmoid)
    COMMON_UNARY(Sin)
    COMMON_UNARY(Sqrt)
    COMMON_UNARY(Tanh)
  case EGI_OP_Gelu:
    if (p.is_tanh)
      launch_fast<1>(loop, one_gelu<true>(), stream);
    else
      launch_fast<1>(loop, one_gelu<false>(), stream);
    return true;
  default:
    return false;
  }
}
#undef COMMON_UNARY

static eg_status run_unary(eg_context *ctx, const egi_kernel_call *call) {
  const unary_params p = *static_cast<const unary_params *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const egi_tensor *const inputs[1] = {&call->inputs[0]};
  const strided loop = loop_of(&call->outputs[0], inputs, 1);
  if (loop.count == 0) return EG_OK;
  if (p.inside == INSIDE_F32 && launch_common_unary(p, loop, stream)) return egi_cuda_launched(ctx, "unary");
  with_inside(p.inside, [&](auto zero) {
    using C = decltype(zero);
    launch_elements<C, 1>(loop, any_unary<C>{p}, stream);
  });
  return egi_cuda_launched(ctx, "unary");
}

static eg_status new_params(egi_kernel_plan *plan, unary_params **out_params) {
  unary_params *p = EGI_NEW(plan->arena, unary_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  p->op = egi_plan_node(plan)->op;
  p->inside = inside_of(plan->inputs[0].dtype);
  return EG_OK;
}

static bool is_taken(const unary_params *p, eg_dtype dtype) {
  const bool is_whole = p->op == EGI_OP_Abs || p->op == EGI_OP_Sign;
  switch (p->inside) {
  case INSIDE_F32:
  case INSIDE_F64:
    return p->op != EGI_OP_Not;
  case INSIDE_I64:
    return is_whole || p->op == EGI_OP_Neg || p->op == EGI_OP_Relu;
  case INSIDE_U64:
    return dtype == EG_DTYPE_BOOL ? p->op == EGI_OP_Not : is_whole;
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

extern "C" eg_status egi_cuda_prepare_unary(egi_kernel_plan *plan) {
  unary_params *p;
  EG_TRY(new_params(plan, &p));
  if (p->op == EGI_OP_Gelu) EG_TRY(read_approximation(plan, &p->is_tanh));
  const eg_dtype dtype = plan->inputs[0].dtype;
  const bool is_boolean = p->op == EGI_OP_Not || p->op == EGI_OP_IsNaN;
  const bool is_right = plan->outputs[0].dtype == (is_boolean ? EG_DTYPE_BOOL : dtype);
  return is_right && is_taken(p, dtype) ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_unary(eg_context *ctx, const egi_kernel_call *call) {
  return run_unary(ctx, call);
}

extern "C" eg_status egi_cuda_prepare_is_inf(egi_kernel_plan *plan) {
  unary_params *p;
  EG_TRY(new_params(plan, &p));
  p->finds_positive = egi_node_int(egi_plan_node(plan), "detect_positive", 1) != 0;
  p->finds_negative = egi_node_int(egi_plan_node(plan), "detect_negative", 1) != 0;
  const bool is_real = p->inside == INSIDE_F32 || p->inside == INSIDE_F64;
  return is_real && plan->outputs[0].dtype == EG_DTYPE_BOOL ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_is_inf(eg_context *ctx, const egi_kernel_call *call) {
  return run_unary(ctx, call);
}

extern "C" eg_status egi_cuda_prepare_bitwise_not(egi_kernel_plan *plan) {
  unary_params *p;
  EG_TRY(new_params(plan, &p));
  const eg_dtype dtype = plan->inputs[0].dtype;
  const bool is_whole = (p->inside == INSIDE_I64 || p->inside == INSIDE_U64) && dtype != EG_DTYPE_BOOL;
  return is_whole && plan->outputs[0].dtype == dtype ? EG_OK : egi_fail_types(plan);
}

extern "C" eg_status egi_cuda_run_bitwise_not(eg_context *ctx, const egi_kernel_call *call) {
  return run_unary(ctx, call);
}
