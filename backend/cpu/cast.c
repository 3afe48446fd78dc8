/* Cast between all types: a loop for each pair of those up to bfloat16, narrow.c for the others. Floats to f16 and bf16
 * are rounded once, to nearest even; float to integer truncates and saturates (NaN: 0); integers keep their low bits;
 * not zero is true. */
#include "backend/cpu/elementwise.h"
#include "backend/cpu/narrow.h"

/* Saturating conversions; MAX + 1 is a power of two and so exact in double. */
#define SATURATE(P, T, MIN, MAX)                   \
  static T saturate_##P(double x) {                \
    if (x <= (double)(MIN)) return (T)(MIN);       \
    if (x >= (double)(MAX) + 1.0) return (T)(MAX); \
    return x == x ? (T)x : 0;                      \
  }
SATURATE(i8, int8_t, INT8_MIN, INT8_MAX)
SATURATE(i16, int16_t, INT16_MIN, INT16_MAX)
SATURATE(i32, int32_t, INT32_MIN, INT32_MAX)
SATURATE(i64, int64_t, INT64_MIN, INT64_MAX)
SATURATE(u8, uint8_t, 0, UINT8_MAX)
SATURATE(u16, uint16_t, 0, UINT16_MAX)
SATURATE(u32, uint32_t, 0, UINT32_MAX)
SATURATE(u64, uint64_t, 0, UINT64_MAX)

#define LOOP(TO, T, FROM, S, expression)                                                                   \
  static void TO##_from_##FROM(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                                          \
    const int64_t s0 = strides[0], s1 = strides[1];                                                        \
    if (s0 == (int64_t)sizeof(T) && s1 == (int64_t)sizeof(S)) {                                            \
      T *out = (T *)(void *)data[0];                                                                       \
      const S *in = (const S *)(const void *)data[1];                                                      \
      for (int64_t i = 0; i < n; i++) {                                                                    \
        const S x = in[i];                                                                                 \
        out[i] = (T)(expression);                                                                          \
      }                                                                                                    \
      return;                                                                                              \
    }                                                                                                      \
    for (int64_t i = 0; i < n; i++) {                                                                      \
      const S x = *(const S *)(const void *)(data[1] + i * s1);                                            \
      *(T *)(void *)(data[0] + i * s0) = (T)(expression);                                                  \
    }                                                                                                      \
  }

/* To each type from integers, floats, and bool. */
#define TO_NUMBER(TO, T, from_float)             \
  LOOP(TO, T, i8, int8_t, x)                     \
  LOOP(TO, T, i16, int16_t, x)                   \
  LOOP(TO, T, i32, int32_t, x)                   \
  LOOP(TO, T, i64, int64_t, x)                   \
  LOOP(TO, T, u8, uint8_t, x)                    \
  LOOP(TO, T, u16, uint16_t, x)                  \
  LOOP(TO, T, u32, uint32_t, x)                  \
  LOOP(TO, T, u64, uint64_t, x)                  \
  LOOP(TO, T, f32, float, from_float((double)x)) \
  LOOP(TO, T, f64, double, from_float(x))        \
  LOOP(TO, T, boolean, uint8_t, x != 0)          \
  FROM_HALF(TO, f16, EG_DTYPE_F16)               \
  FROM_HALF(TO, bf16, EG_DTYPE_BF16)

/* Halves go through blocks of f32, which hold them exactly. */
#define FROM_HALF(TO, FROM, DTYPE)                                                                         \
  static void TO##_from_##FROM(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    float block[EGI_BLOCK];                                                                                \
    for (int64_t i = 0; i < n; i += EGI_BLOCK) {                                                           \
      int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;                                                   \
      egi_block_load(params, DTYPE, data[1] + i * strides[1], strides[1], m, block);                       \
      char *const blocks[2] = {data[0] + i * strides[0], (char *)block};                                   \
      const int64_t block_strides[2] = {strides[0], sizeof(float)};                                        \
      TO##_from_f32(NULL, blocks, block_strides, m);                                                       \
    }                                                                                                      \
  }

#define ITSELF(x) (x)
TO_NUMBER(i8, int8_t, saturate_i8)
TO_NUMBER(i16, int16_t, saturate_i16)
TO_NUMBER(i32, int32_t, saturate_i32)
TO_NUMBER(i64, int64_t, saturate_i64)
TO_NUMBER(u8, uint8_t, saturate_u8)
TO_NUMBER(u16, uint16_t, saturate_u16)
TO_NUMBER(u32, uint32_t, saturate_u32)
TO_NUMBER(u64, uint64_t, saturate_u64)
TO_NUMBER(f32, float, ITSELF)
TO_NUMBER(f64, double, ITSELF)

#define IS_TRUE(FROM, S) LOOP(boolean, uint8_t, FROM, S, x != 0)
IS_TRUE(i8, int8_t)
IS_TRUE(i16, int16_t)
IS_TRUE(i32, int32_t)
IS_TRUE(i64, int64_t)
IS_TRUE(u8, uint8_t)
IS_TRUE(u16, uint16_t)
IS_TRUE(u32, uint32_t)
IS_TRUE(u64, uint64_t)
IS_TRUE(f32, float)
IS_TRUE(f64, double)
IS_TRUE(boolean, uint8_t)
FROM_HALF(boolean, f16, EG_DTYPE_F16)
FROM_HALF(boolean, bf16, EG_DTYPE_BF16)

/* The nearest float with an odd last bit when x is none itself: rounding that to a half then rounds x correctly
 * (S. Boldo and G. Melquiond, "When double rounding is odd", 2005). */
static float round_to_odd(double x) {
  float near = (float)x;
  if ((double)near == x || x != x) return near;
  uint32_t bits;
  memcpy(&bits, &near, sizeof bits);
  if ((bits & 1u) == 0 && (bits & 0x7fffffffu) != 0) {
    double magnitude = x < 0.0 ? -x : x;
    double near_magnitude = near < 0.0f ? -(double)near : (double)near;
    bits = magnitude > near_magnitude ? bits + 1 : bits - 1;
  }
  memcpy(&near, &bits, sizeof near);
  return near;
}

#define TO_HALF(TO, DTYPE, FROM)                                                                           \
  static void TO##_from_##FROM(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    double doubles[EGI_BLOCK];                                                                             \
    float block[EGI_BLOCK];                                                                                \
    for (int64_t i = 0; i < n; i += EGI_BLOCK) {                                                           \
      int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;                                                   \
      char *const blocks[2] = {(char *)doubles, data[1] + i * strides[1]};                                 \
      const int64_t block_strides[2] = {sizeof(double), strides[1]};                                       \
      f64_from_##FROM(params, blocks, block_strides, m);                                                   \
      for (int64_t k = 0; k < m; k++) block[k] = round_to_odd(doubles[k]);                                 \
      egi_block_store(params, DTYPE, data[0] + i * strides[0], strides[0], m, block);                      \
    }                                                                                                      \
  }

/* From f32 and halves in f32 itself: one rounding. */
#define TO_HALF_BY_BLOCK(TO, TO_DTYPE, FROM, FROM_DTYPE)                                                    \
  static void TO##_from_##FROM(const void *params, char *const *data, const int64_t *strides, int64_t n) {  \
    float block[EGI_BLOCK];                                                                                 \
    for (int64_t i = 0; i < n; i += EGI_BLOCK) {                                                            \
      int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;                                                    \
      const float *in = egi_block_load(params, FROM_DTYPE, data[1] + i * strides[1], strides[1], m, block); \
      egi_block_store(params, TO_DTYPE, data[0] + i * strides[0], strides[0], m, in);                       \
    }                                                                                                       \
  }

#define TO_HALF_ALL(TO, DTYPE)                   \
  TO_HALF(TO, DTYPE, i8)                         \
  TO_HALF(TO, DTYPE, i16)                        \
  TO_HALF(TO, DTYPE, i32)                        \
  TO_HALF(TO, DTYPE, i64)                        \
  TO_HALF(TO, DTYPE, u8)                         \
  TO_HALF(TO, DTYPE, u16)                        \
  TO_HALF(TO, DTYPE, u32)                        \
  TO_HALF(TO, DTYPE, u64)                        \
  TO_HALF(TO, DTYPE, f64)                        \
  TO_HALF(TO, DTYPE, boolean)                    \
  TO_HALF_BY_BLOCK(TO, DTYPE, f32, EG_DTYPE_F32) \
  TO_HALF_BY_BLOCK(TO, DTYPE, f16, EG_DTYPE_F16) \
  TO_HALF_BY_BLOCK(TO, DTYPE, bf16, EG_DTYPE_BF16)

TO_HALF_ALL(f16, EG_DTYPE_F16)
TO_HALF_ALL(bf16, EG_DTYPE_BF16)

/* ---- table ---------------------------------------------------------------------------------------------------- */

#define ROW(TO)                                                                                          \
  {                                                                                                      \
    [EG_DTYPE_I8] = TO##_from_i8, [EG_DTYPE_I16] = TO##_from_i16, [EG_DTYPE_I32] = TO##_from_i32,        \
    [EG_DTYPE_I64] = TO##_from_i64, [EG_DTYPE_U8] = TO##_from_u8, [EG_DTYPE_U16] = TO##_from_u16,        \
    [EG_DTYPE_U32] = TO##_from_u32, [EG_DTYPE_U64] = TO##_from_u64, [EG_DTYPE_F32] = TO##_from_f32,      \
    [EG_DTYPE_F64] = TO##_from_f64, [EG_DTYPE_BOOL] = TO##_from_boolean, [EG_DTYPE_F16] = TO##_from_f16, \
    [EG_DTYPE_BF16] = TO##_from_bf16                                                                     \
  }

static const egi_inner table[EG_DTYPE_BF16 + 1][EG_DTYPE_BF16 + 1] = {
    [EG_DTYPE_I8] = ROW(i8),        [EG_DTYPE_I16] = ROW(i16), [EG_DTYPE_I32] = ROW(i32), [EG_DTYPE_I64] = ROW(i64),
    [EG_DTYPE_U8] = ROW(u8),        [EG_DTYPE_U16] = ROW(u16), [EG_DTYPE_U32] = ROW(u32), [EG_DTYPE_U64] = ROW(u64),
    [EG_DTYPE_F32] = ROW(f32),      [EG_DTYPE_F64] = ROW(f64), [EG_DTYPE_F16] = ROW(f16), [EG_DTYPE_BF16] = ROW(bf16),
    [EG_DTYPE_BOOL] = ROW(boolean),
};

egi_inner egi_cast_inner(eg_dtype to, eg_dtype from) {
  if (to > EG_DTYPE_BF16 || from > EG_DTYPE_BF16) return NULL;
  return table[to][from];
}

/* ---- kernel --------------------------------------------------------------------------------------------------- */

typedef struct cast_params {
  const egi_isa *isa;
  egi_inner inner; /* NULL: one of the types is narrow */
  egi_narrowing narrowing;
} cast_params;

static bool is_addressable(const egi_tensor *tensor) {
  return egi_is_number(tensor->dtype) && (egi_dtype_bits(tensor->dtype) >= 8 || egi_tensor_is_contiguous(tensor));
}

eg_status egi_cpu_prepare_cast(egi_kernel_plan *plan) {
  cast_params *p = EGI_NEW(plan->arena, cast_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  p->isa = egi_cpu_isa();
  p->inner = egi_cast_inner(plan->outputs[0].dtype, plan->inputs[0].dtype);
  plan->params = p;
  if (p->inner != NULL) return EG_OK;
  if (!is_addressable(&plan->outputs[0]) || !is_addressable(&plan->inputs[0])) return egi_fail_types(plan);
  p->narrowing = egi_narrowing_of(egi_plan_node(plan));
  return EG_OK;
}

eg_status egi_cpu_run_cast(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const cast_params *p = call->params;
  egi_strided loop;
  if (p->inner == NULL) {
    egi_cast_narrow(&call->outputs[0], &call->inputs[0], &p->narrowing);
    return EG_OK;
  }
  egi_strided_init(&loop, &call->outputs[0]);
  egi_strided_add(&loop, &call->inputs[0]);
  egi_strided_collapse(&loop);
  egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->inner, p->isa);
  return EG_OK;
}
