/* Elementwise kernels with one and two inputs, and Max and Min with any number. f32, f16 and bf16 are computed in f32
 * by the loops of isa/ (results rounded once), other types by elementwise_typed.c. No reductions: deterministic. */
#include "backend/cpu/elementwise.h"

typedef struct elementwise_params {
  const egi_isa *isa;
  egi_inner inner;
  const void *inner_params; /* NULL: these params */
  eg_dtype dtype_a, dtype_b, dtype_out;
  void (*unary)(float *out, const float *in, int64_t n);
  void (*const *binary)(float *out, const float *a, const float *b, int64_t n); /* [EGI_BROADCAST_COUNT] */
  egi_inner compare;
} elementwise_params;

/* ---- blocks --------------------------------------------------------------------------------------------------- */

const float *egi_block_load(const egi_isa *isa, eg_dtype dtype, const char *data, int64_t stride, int64_t n,
                            float *block) {
  if (dtype == EG_DTYPE_F32) {
    if (stride == (int64_t)sizeof(float)) return (const float *)(const void *)data;
    for (int64_t i = 0; i < n; i++) memcpy(&block[i], data + i * stride, sizeof(float));
    return block;
  }
  uint16_t halves[EGI_BLOCK];
  const uint16_t *source = (const uint16_t *)(const void *)data;
  if (stride != (int64_t)sizeof(uint16_t)) {
    for (int64_t i = 0; i < n; i++) memcpy(&halves[i], data + i * stride, sizeof(uint16_t));
    source = halves;
  }
  if (dtype == EG_DTYPE_F16) {
    isa->elementwise->f16_to_f32(block, source, n);
  } else {
    isa->elementwise->bf16_to_f32(block, source, n);
  }
  return block;
}

float *egi_block_target(eg_dtype dtype, char *data, int64_t stride, float *block) {
  bool is_direct = dtype == EG_DTYPE_F32 && stride == (int64_t)sizeof(float);
  return is_direct ? (float *)(void *)data : block;
}

void egi_block_store(const egi_isa *isa, eg_dtype dtype, char *data, int64_t stride, int64_t n, const float *block) {
  if (block == (const float *)(const void *)data) return;
  if (dtype == EG_DTYPE_F32) {
    for (int64_t i = 0; i < n; i++) memcpy(data + i * stride, &block[i], sizeof(float));
    return;
  }
  uint16_t halves[EGI_BLOCK];
  bool is_direct = stride == (int64_t)sizeof(uint16_t);
  uint16_t *target = is_direct ? (uint16_t *)(void *)data : halves;
  if (dtype == EG_DTYPE_F16) {
    isa->elementwise->f32_to_f16(target, block, n);
  } else {
    isa->elementwise->f32_to_bf16(target, block, n);
  }
  for (int64_t i = 0; i < n && !is_direct; i++) memcpy(data + i * stride, &halves[i], sizeof(uint16_t));
}

static bool is_block_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
}

/* ---- inner loops ---------------------------------------------------------------------------------------------- */

static void inner_unary(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const elementwise_params *p = params;
  if (p->dtype_a == EG_DTYPE_F32 && strides[0] == (int64_t)sizeof(float) && strides[1] == (int64_t)sizeof(float)) {
    p->unary((float *)(void *)data[0], (const float *)(const void *)data[1], n);
    return;
  }
  float block[EGI_BLOCK], result[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *target = data[0] + i * strides[0];
    const float *a = egi_block_load(p->isa, p->dtype_a, data[1] + i * strides[1], strides[1], m, block);
    float *out = egi_block_target(p->dtype_out, target, strides[0], result);
    p->unary(out, a, m);
    egi_block_store(p->isa, p->dtype_out, target, strides[0], m, out);
  }
}

static bool is_vector(int64_t stride) {
  return stride == (int64_t)sizeof(float);
}

/* The direct forms for f32; false when the operands need blocks. */
static bool run_direct(const elementwise_params *p, char *const *data, const int64_t *strides, int64_t n) {
  if (p->dtype_a != EG_DTYPE_F32 || p->dtype_b != EG_DTYPE_F32 || !is_vector(strides[0])) return false;
  egi_broadcast form;
  if (is_vector(strides[1]) && is_vector(strides[2])) {
    form = EGI_BROADCAST_NONE;
  } else if (strides[1] == 0 && is_vector(strides[2])) {
    form = EGI_BROADCAST_A;
  } else if (is_vector(strides[1]) && strides[2] == 0) {
    form = EGI_BROADCAST_B;
  } else {
    return false;
  }
  p->binary[form]((float *)(void *)data[0], (const float *)(const void *)data[1], (const float *)(const void *)data[2],
                  n);
  return true;
}

static void inner_binary(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const elementwise_params *p = params;
  if (run_direct(p, data, strides, n)) return;
  float block_a[EGI_BLOCK], block_b[EGI_BLOCK], result[EGI_BLOCK];
  egi_broadcast form = strides[2] == 0 ? EGI_BROADCAST_B : EGI_BROADCAST_NONE;
  const float *b = egi_block_load(p->isa, p->dtype_b, data[2], strides[2], 1, block_b);
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *target = data[0] + i * strides[0];
    const float *a = egi_block_load(p->isa, p->dtype_a, data[1] + i * strides[1], strides[1], m, block_a);
    if (form == EGI_BROADCAST_NONE) {
      b = egi_block_load(p->isa, p->dtype_b, data[2] + i * strides[2], strides[2], m, block_b);
    }
    float *out = egi_block_target(p->dtype_out, target, strides[0], result);
    p->binary[form](out, a, b, m);
    egi_block_store(p->isa, p->dtype_out, target, strides[0], m, out);
  }
}

/* Comparisons of half floats, and of nothing else. */
static void inner_compare(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const elementwise_params *p = params;
  float block_a[EGI_BLOCK], block_b[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    egi_block_load(p->isa, p->dtype_a, data[1] + i * strides[1], strides[1], m, block_a);
    egi_block_load(p->isa, p->dtype_b, data[2] + i * strides[2], strides[2], m, block_b);
    char *const blocks[3] = {data[0] + i * strides[0], (char *)block_a, (char *)block_b};
    const int64_t block_strides[3] = {strides[0], sizeof(float), sizeof(float)};
    p->compare(NULL, blocks, block_strides, m);
  }
}

static void inner_is_nan(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const elementwise_params *p = params;
  float block[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    const float *a = egi_block_load(p->isa, p->dtype_a, data[1] + i * strides[1], strides[1], m, block);
    for (int64_t k = 0; k < m; k++) *(uint8_t *)(data[0] + (i + k) * strides[0]) = a[k] != a[k];
  }
}

/* ---- prepare -------------------------------------------------------------------------------------------------- */

/* Loops of isa/ by operator; EGI_UNARY_COUNT where there is none. */
static egi_unary unary_of(egi_op op, bool is_tanh) {
  switch (op) {
  case EGI_OP_Abs:
    return EGI_UNARY_ABS;
  case EGI_OP_Acos:
    return EGI_UNARY_ACOS;
  case EGI_OP_Acosh:
    return EGI_UNARY_ACOSH;
  case EGI_OP_Asin:
    return EGI_UNARY_ASIN;
  case EGI_OP_Asinh:
    return EGI_UNARY_ASINH;
  case EGI_OP_Atan:
    return EGI_UNARY_ATAN;
  case EGI_OP_Atanh:
    return EGI_UNARY_ATANH;
  case EGI_OP_Cosh:
    return EGI_UNARY_COSH;
  case EGI_OP_Sinh:
    return EGI_UNARY_SINH;
  case EGI_OP_Tan:
    return EGI_UNARY_TAN;
  case EGI_OP_Ceil:
    return EGI_UNARY_CEIL;
  case EGI_OP_Cos:
    return EGI_UNARY_COS;
  case EGI_OP_Erf:
    return EGI_UNARY_ERF;
  case EGI_OP_Exp:
    return EGI_UNARY_EXP;
  case EGI_OP_Floor:
    return EGI_UNARY_FLOOR;
  case EGI_OP_Gelu:
    return is_tanh ? EGI_UNARY_GELU_TANH : EGI_UNARY_GELU;
  case EGI_OP_Log:
    return EGI_UNARY_LOG;
  case EGI_OP_Neg:
    return EGI_UNARY_NEG;
  case EGI_OP_Reciprocal:
    return EGI_UNARY_RECIPROCAL;
  case EGI_OP_Relu:
    return EGI_UNARY_RELU;
  case EGI_OP_Round:
    return EGI_UNARY_ROUND;
  case EGI_OP_Sign:
    return EGI_UNARY_SIGN;
  case EGI_OP_Sigmoid:
    return EGI_UNARY_SIGMOID;
  case EGI_OP_Sin:
    return EGI_UNARY_SIN;
  case EGI_OP_Sqrt:
    return EGI_UNARY_SQRT;
  case EGI_OP_Tanh:
    return EGI_UNARY_TANH;
  default:
    return EGI_UNARY_COUNT;
  }
}

static egi_binary binary_of(egi_op op, bool is_tanh) {
  switch (op) {
  case EGI_OP_Add:
    return EGI_BINARY_ADD;
  case EGI_OP_Sub:
    return EGI_BINARY_SUB;
  case EGI_OP_Mul:
    return EGI_BINARY_MUL;
  case EGI_OP_Div:
    return EGI_BINARY_DIV;
  case EGI_OP_Max:
    return EGI_BINARY_MAX;
  case EGI_OP_Min:
    return EGI_BINARY_MIN;
  case EGI_OP_Pow:
    return EGI_BINARY_POW;
  case EGI_OP_Mod:
    return EGI_BINARY_FMOD;
  case EGI_OP_GeluGrad:
    return is_tanh ? EGI_BINARY_GELU_TANH_GRAD : EGI_BINARY_GELU_GRAD;
  default:
    return EGI_BINARY_COUNT;
  }
}

/* Gelu's attribute; EG_ERROR_UNSUPPORTED for anything but the two that ONNX knows. */
static eg_status read_approximation(const egi_kernel_plan *plan, bool *out_is_tanh) {
  const char *approximation = egi_node_string(egi_plan_node(plan), "approximate", "none");
  *out_is_tanh = strcmp(approximation, "tanh") == 0;
  if (*out_is_tanh || strcmp(approximation, "none") == 0) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown approximation \"%s\"", approximation);
}

static elementwise_params *new_params(egi_kernel_plan *plan) {
  elementwise_params *p = EGI_NEW(plan->arena, elementwise_params, 1);
  if (p == NULL) return NULL;
  p->isa = egi_cpu_isa();
  p->dtype_a = plan->inputs[0].dtype;
  p->dtype_b = plan->n_inputs > 1 ? plan->inputs[1].dtype : EG_DTYPE_UNDEFINED;
  p->dtype_out = plan->outputs[0].dtype;
  plan->params = p;
  return p;
}

eg_status egi_cpu_prepare_unary(egi_kernel_plan *plan) {
  egi_op op = egi_plan_node(plan)->op;
  bool is_tanh = false;
  if (op == EGI_OP_Gelu) EG_TRY(read_approximation(plan, &is_tanh));
  elementwise_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  bool is_boolean = op == EGI_OP_Not || op == EGI_OP_IsNaN;
  if (p->dtype_out != (is_boolean ? EG_DTYPE_BOOL : p->dtype_a)) return egi_fail_types(plan);
  egi_unary index = unary_of(op, is_tanh);
  if (!is_block_type(p->dtype_a)) {
    p->inner = egi_typed_unary(op, p->dtype_a, is_tanh);
  } else if (op == EGI_OP_IsNaN) {
    p->inner = inner_is_nan;
  } else if (index != EGI_UNARY_COUNT) {
    p->inner = inner_unary;
    p->unary = p->isa->elementwise->unary[index];
  }
  return p->inner == NULL ? egi_fail_types(plan) : EG_OK;
}

static bool is_comparison(egi_op op) {
  return op == EGI_OP_Equal || op == EGI_OP_Less || op == EGI_OP_LessOrEqual || op == EGI_OP_Greater ||
         op == EGI_OP_GreaterOrEqual;
}

/* Chooses the loop for a binary operator over inputs of equal types. */
static void choose_binary(elementwise_params *p, egi_op op, bool is_fmod, bool is_tanh) {
  egi_binary index = binary_of(op, is_tanh);
  if (is_comparison(op) && is_block_type(p->dtype_a)) {
    p->compare = egi_f32_compare(op);
    p->inner = p->dtype_a == EG_DTYPE_F32 ? p->compare : inner_compare;
  } else if (!is_block_type(p->dtype_a)) {
    p->inner = egi_typed_binary(op, p->dtype_a, is_fmod, is_tanh);
  } else if (index != EGI_BINARY_COUNT && (op != EGI_OP_Mod || is_fmod)) {
    p->inner = inner_binary;
    p->binary = p->isa->elementwise->binary[index];
  }
}

egi_inner egi_binary_inner(egi_op op, eg_dtype dtype, egi_arena *arena, const void **out_params) {
  elementwise_params *p = EGI_NEW(arena, elementwise_params, 1);
  if (p == NULL) return NULL;
  p->isa = egi_cpu_isa();
  p->dtype_a = p->dtype_b = p->dtype_out = dtype;
  choose_binary(p, op, false, false);
  *out_params = p;
  return p->inner;
}

eg_status egi_cpu_prepare_binary(egi_kernel_plan *plan) {
  const egi_node *node = egi_plan_node(plan);
  bool is_tanh = false;
  if (node->op == EGI_OP_GeluGrad) EG_TRY(read_approximation(plan, &is_tanh));
  elementwise_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  if (node->op == EGI_OP_Pow && (p->dtype_a != p->dtype_b || !egi_dtype_is_float(p->dtype_a))) {
    p->inner = egi_power_inner(p->dtype_a, p->dtype_b, plan->arena, &p->inner_params);
  } else if (p->dtype_a == p->dtype_b) {
    choose_binary(p, node->op, egi_node_int(node, "fmod", 0) != 0, is_tanh);
  }
  bool is_boolean = (egi_op_get(node->op)->flags & EGI_OP_INTEGER) != 0;
  bool is_right = p->dtype_out == (is_boolean ? EG_DTYPE_BOOL : p->dtype_a);
  return p->inner == NULL || !is_right ? egi_fail_types(plan) : EG_OK;
}

eg_status egi_cpu_prepare_extremum(egi_kernel_plan *plan) {
  elementwise_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  for (unsigned i = 1; i < plan->n_inputs; i++) {
    if (plan->inputs[i].dtype != p->dtype_a) return egi_fail_types(plan);
  }
  p->dtype_b = p->dtype_a;
  choose_binary(p, egi_plan_node(plan)->op, false, false);
  return p->inner == NULL || p->dtype_out != p->dtype_a ? egi_fail_types(plan) : EG_OK;
}

/* ---- run ------------------------------------------------------------------------------------------------------ */

static void run_loop(const egi_kernel_call *call, const egi_tensor *a, const egi_tensor *b) {
  const elementwise_params *p = call->params;
  egi_strided loop;
  egi_strided_init(&loop, &call->outputs[0]);
  egi_strided_add(&loop, a);
  if (b != NULL) egi_strided_add(&loop, b);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->inner, p->inner_params != NULL ? p->inner_params : p);
}

eg_status egi_cpu_run_unary(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  run_loop(call, &call->inputs[0], NULL);
  return EG_OK;
}

eg_status egi_cpu_run_binary(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  run_loop(call, &call->inputs[0], &call->inputs[1]);
  return EG_OK;
}

/* From left to right. With the output in the memory of input 1, the first loop reads it before it writes. */
eg_status egi_cpu_run_extremum(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  if (call->n_inputs == 1) {
    egi_copy(call->pool, &call->outputs[0], &call->inputs[0]);
    return EG_OK;
  }
  run_loop(call, &call->inputs[0], &call->inputs[1]);
  for (unsigned i = 2; i < call->n_inputs; i++) run_loop(call, &call->outputs[0], &call->inputs[i]);
  return EG_OK;
}
