/* BitwiseNot, BitwiseAnd, BitwiseOr, BitwiseXor and BitShift over integers: a loop for each width, since the sign does
 * not matter (shifts take unsigned numbers alone). A shift by the width or more gives 0. IsInf of every float type by
 * way of f64. Deterministic: one element at a time. */
#include <math.h>

#include "backend/cpu/elementwise.h"

#define BINARY(name, T, expression)                                                            \
  static void name(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                              \
    for (int64_t i = 0; i < n; i++) {                                                          \
      const T x = *(const T *)(const void *)(data[1] + i * strides[1]);                        \
      const T y = *(const T *)(const void *)(data[2] + i * strides[2]);                        \
      *(T *)(void *)(data[0] + i * strides[0]) = (T)(expression);                              \
    }                                                                                          \
  }

#define UNARY(name, T, expression)                                                             \
  static void name(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                              \
    for (int64_t i = 0; i < n; i++) {                                                          \
      const T x = *(const T *)(const void *)(data[1] + i * strides[1]);                        \
      *(T *)(void *)(data[0] + i * strides[0]) = (T)(expression);                              \
    }                                                                                          \
  }

/* W: at least 32 bits wide. */
#define LOOPS(P, T, W)                                    \
  UNARY(P##_not, T, ~(W)x)                                \
  BINARY(P##_and, T, (W)x &(W)y)                          \
  BINARY(P##_or, T, (W)x | (W)y)                          \
  BINARY(P##_xor, T, (W)x ^ (W)y)                         \
  BINARY(P##_left, T, y < 8 * sizeof(T) ? (W)x << y : 0)  \
  BINARY(P##_right, T, y < 8 * sizeof(T) ? (W)x >> y : 0) \
  static egi_inner P##_inner(egi_op op, bool is_left) {   \
    switch (op) {                                         \
    case EGI_OP_BitwiseNot:                               \
      return P##_not;                                     \
    case EGI_OP_BitwiseAnd:                               \
      return P##_and;                                     \
    case EGI_OP_BitwiseOr:                                \
      return P##_or;                                      \
    case EGI_OP_BitwiseXor:                               \
      return P##_xor;                                     \
    default:                                              \
      return is_left ? P##_left : P##_right;              \
    }                                                     \
  }

LOOPS(u8, uint8_t, uint32_t)
LOOPS(u16, uint16_t, uint32_t)
LOOPS(u32, uint32_t, uint32_t)
LOOPS(u64, uint64_t, uint64_t)

typedef struct bits_params {
  egi_inner inner;
} bits_params;

static egi_inner inner_of(egi_op op, size_t element_bytes, bool is_left) {
  switch (element_bytes) {
  case 1:
    return u8_inner(op, is_left);
  case 2:
    return u16_inner(op, is_left);
  case 4:
    return u32_inner(op, is_left);
  case 8:
    return u64_inner(op, is_left);
  default:
    return NULL;
  }
}

eg_status egi_cpu_prepare_bitwise(egi_kernel_plan *plan) {
  bits_params *p = EGI_NEW(plan->arena, bits_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_node *node = egi_plan_node(plan);
  const char *direction = egi_node_string(node, "direction", "");
  eg_dtype dtype = plan->inputs[0].dtype;
  egi_dtype_class kind = egi_dtype_kind(dtype);
  bool is_left = strcmp(direction, "LEFT") == 0;
  if (node->op == EGI_OP_BitShift && !is_left && strcmp(direction, "RIGHT") != 0) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown direction \"%s\"", direction);
  }
  bool is_whole = kind == EGI_CLASS_UNSIGNED || (kind == EGI_CLASS_INTEGER && node->op != EGI_OP_BitShift);
  bool agrees = plan->outputs[0].dtype == dtype && (plan->n_inputs < 2 || plan->inputs[1].dtype == dtype);
  p->inner = is_whole && agrees ? inner_of(node->op, egi_element_bytes(dtype), is_left) : NULL;
  return p->inner != NULL ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_run_bitwise(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const bits_params *p = call->params;
  egi_strided loop;
  egi_strided_init(&loop, &call->outputs[0]);
  for (unsigned i = 0; i < call->n_inputs; i++) egi_strided_add(&loop, &call->inputs[i]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->inner, NULL);
  return EG_OK;
}

/* ---- IsInf ------------------------------------------------------------------------------------------------------ */

typedef struct is_inf_params {
  const egi_isa *isa;
  egi_inner load; /* to f64 */
  bool finds_positive, finds_negative;
} is_inf_params;

static void inner_is_inf(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const is_inf_params *p = params;
  double block[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *const operands[2] = {(char *)block, data[1] + i * strides[1]};
    const int64_t block_strides[2] = {sizeof(double), strides[1]};
    p->load(p->isa, operands, block_strides, m);
    for (int64_t k = 0; k < m; k++) {
      bool is_found = block[k] > 0.0 ? p->finds_positive : p->finds_negative;
      *(uint8_t *)(data[0] + (i + k) * strides[0]) = isinf(block[k]) && is_found;
    }
  }
}

eg_status egi_cpu_prepare_is_inf(egi_kernel_plan *plan) {
  is_inf_params *p = EGI_NEW(plan->arena, is_inf_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_node *node = egi_plan_node(plan);
  p->isa = egi_cpu_isa();
  p->load = egi_cast_inner(EG_DTYPE_F64, plan->inputs[0].dtype);
  p->finds_positive = egi_node_int(node, "detect_positive", 1) != 0;
  p->finds_negative = egi_node_int(node, "detect_negative", 1) != 0;
  bool is_float = egi_dtype_is_float(plan->inputs[0].dtype) && plan->outputs[0].dtype == EG_DTYPE_BOOL;
  return is_float && p->load != NULL ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_run_is_inf(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  egi_strided loop;
  egi_strided_init(&loop, &call->outputs[0]);
  egi_strided_add(&loop, &call->inputs[0]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, inner_is_inf, call->params);
  return EG_OK;
}
