/* Where and Clip. */
#include <math.h>

#include "backend/cpu/elementwise.h"

/* ---- Where ---------------------------------------------------------------------------------------------------- */

/* By the size of an element: the values are only moved. */
#define WHERE(bits)                                                                                    \
  static void where_##bits(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                                      \
    for (int64_t i = 0; i < n; i++) {                                                                  \
      bool is_first = *(const uint8_t *)(data[1] + i * strides[1]) != 0;                               \
      const char *source = is_first ? data[2] + i * strides[2] : data[3] + i * strides[3];             \
      memmove(data[0] + i * strides[0], source, bits / 8);                                             \
    }                                                                                                  \
  }
WHERE(8)
WHERE(16)
WHERE(32)
WHERE(64)

static bool is_vector(int64_t stride) {
  return stride == (int64_t)sizeof(float);
}

static void where_f32(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const egi_isa *isa = params;
  egi_broadcast form = EGI_BROADCAST_COUNT;
  if (is_vector(strides[2]) && is_vector(strides[3])) form = EGI_BROADCAST_NONE;
  if (strides[2] == 0 && is_vector(strides[3])) form = EGI_BROADCAST_A;
  if (is_vector(strides[2]) && strides[3] == 0) form = EGI_BROADCAST_B;
  if (form == EGI_BROADCAST_COUNT || !is_vector(strides[0]) || strides[1] != 1) {
    where_32(params, data, strides, n);
    return;
  }
  isa->elementwise->where[form]((float *)(void *)data[0], (const uint8_t *)data[1],
                                (const float *)(const void *)data[2], (const float *)(const void *)data[3], n);
}

typedef struct where_params {
  const egi_isa *isa;
  egi_inner inner;
} where_params;

eg_status egi_cpu_prepare_where(egi_kernel_plan *plan) {
  where_params *p = EGI_NEW(plan->arena, where_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  eg_dtype dtype = plan->outputs[0].dtype;
  plan->params = p;
  p->isa = egi_cpu_isa();
  if (plan->inputs[0].dtype != EG_DTYPE_BOOL || plan->inputs[1].dtype != dtype || plan->inputs[2].dtype != dtype) {
    return egi_fail_types(plan);
  }
  switch (egi_element_bytes(dtype)) {
  case 1:
    p->inner = where_8;
    break;
  case 2:
    p->inner = where_16;
    break;
  case 4:
    p->inner = dtype == EG_DTYPE_F32 ? where_f32 : where_32;
    break;
  case 8:
    p->inner = where_64;
    break;
  default:
    return egi_fail_types(plan);
  }
  return EG_OK;
}

eg_status egi_cpu_run_where(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const where_params *p = call->params;
  egi_strided loop;
  egi_strided_init(&loop, &call->outputs[0]);
  for (unsigned i = 0; i < 3; i++) egi_strided_add(&loop, &call->inputs[i]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->inner, p->isa);
  return EG_OK;
}

/* ---- Clip ----------------------------------------------------------------------------------------------------- */

/* Bounds as the loops need them; read from the inputs at run time. */
typedef struct clip_bounds {
  const egi_isa *isa;
  eg_dtype dtype;
  double low, high; /* floats */
  int64_t low_signed, high_signed;
  uint64_t low_unsigned, high_unsigned;
} clip_bounds;

static void clip_block(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const clip_bounds *b = params;
  float block[EGI_BLOCK], result[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *target = data[0] + i * strides[0];
    const float *in = egi_block_load(b->isa, b->dtype, data[1] + i * strides[1], strides[1], m, block);
    float *out = egi_block_target(b->dtype, target, strides[0], result);
    b->isa->elementwise->clip(out, in, (float)b->low, (float)b->high, m);
    egi_block_store(b->isa, b->dtype, target, strides[0], m, out);
  }
}

#define CLIP(P, T, LOW, HIGH)                                                                      \
  static void clip_##P(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    const clip_bounds *b = params;                                                                 \
    for (int64_t i = 0; i < n; i++) {                                                              \
      T x = *(const T *)(const void *)(data[1] + i * strides[1]);                                  \
      x = x < (T)b->LOW ? (T)b->LOW : x;                                                           \
      *(T *)(void *)(data[0] + i * strides[0]) = x > (T)b->HIGH ? (T)b->HIGH : x;                  \
    }                                                                                              \
  }
CLIP(f64, double, low, high)
CLIP(i8, int8_t, low_signed, high_signed)
CLIP(i16, int16_t, low_signed, high_signed)
CLIP(i32, int32_t, low_signed, high_signed)
CLIP(i64, int64_t, low_signed, high_signed)
CLIP(u8, uint8_t, low_unsigned, high_unsigned)
CLIP(u16, uint16_t, low_unsigned, high_unsigned)
CLIP(u32, uint32_t, low_unsigned, high_unsigned)
CLIP(u64, uint64_t, low_unsigned, high_unsigned)

typedef struct clip_params {
  const egi_isa *isa;
  egi_inner inner;
} clip_params;

static egi_inner clip_inner(eg_dtype dtype) {
  switch (dtype) {
  case EG_DTYPE_F32:
  case EG_DTYPE_F16:
  case EG_DTYPE_BF16:
    return clip_block;
  case EG_DTYPE_F64:
    return clip_f64;
  case EG_DTYPE_I8:
    return clip_i8;
  case EG_DTYPE_I16:
    return clip_i16;
  case EG_DTYPE_I32:
    return clip_i32;
  case EG_DTYPE_I64:
    return clip_i64;
  case EG_DTYPE_U8:
    return clip_u8;
  case EG_DTYPE_U16:
    return clip_u16;
  case EG_DTYPE_U32:
    return clip_u32;
  case EG_DTYPE_U64:
    return clip_u64;
  default:
    return NULL;
  }
}

eg_status egi_cpu_prepare_clip(egi_kernel_plan *plan) {
  clip_params *p = EGI_NEW(plan->arena, clip_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  eg_dtype dtype = plan->inputs[0].dtype;
  plan->params = p;
  p->isa = egi_cpu_isa();
  p->inner = clip_inner(dtype);
  for (unsigned i = 1; i < 3; i++) {
    if (!egi_plan_has_input(plan, i)) continue;
    if (plan->inputs[i].dtype != dtype) return egi_fail_types(plan);
    if (egi_tensor_count(&plan->inputs[i]) != 1) {
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "bound %u is not a scalar", i);
    }
  }
  return p->inner == NULL || plan->outputs[0].dtype != dtype ? egi_fail_types(plan) : EG_OK;
}

/* One bound in the three forms. */
static void read_bound(const egi_kernel_call *call, const egi_isa *isa, unsigned input, double *out_float,
                       int64_t *out_signed, uint64_t *out_unsigned) {
  if (!egi_call_has_input(call, input)) return;
  const eg_dtype wanted[3] = {EG_DTYPE_F64, EG_DTYPE_I64, EG_DTYPE_U64};
  void *const targets[3] = {out_float, out_signed, out_unsigned};
  for (unsigned i = 0; i < 3; i++) {
    char *const data[2] = {targets[i], call->inputs[input].data};
    const int64_t strides[2] = {8, 8};
    egi_cast_inner(wanted[i], call->inputs[input].dtype)(isa, data, strides, 1);
  }
}

/* The widest bounds of each integer type are those of T: values never pass them. */
eg_status egi_cpu_run_clip(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const clip_params *p = call->params;
  eg_dtype dtype = call->inputs[0].dtype;
  unsigned bits = egi_dtype_bits(dtype);
  clip_bounds bounds = {.isa = p->isa, .dtype = dtype, .low = -HUGE_VAL, .high = HUGE_VAL};
  bounds.high_signed = (int64_t)(UINT64_MAX >> (65 - bits));
  bounds.low_signed = -bounds.high_signed - 1;
  bounds.high_unsigned = UINT64_MAX >> (64 - bits);
  read_bound(call, p->isa, 1, &bounds.low, &bounds.low_signed, &bounds.low_unsigned);
  read_bound(call, p->isa, 2, &bounds.high, &bounds.high_signed, &bounds.high_unsigned);
  egi_strided loop;
  egi_strided_init(&loop, &call->outputs[0]);
  egi_strided_add(&loop, &call->inputs[0]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->inner, &bounds);
  return EG_OK;
}
