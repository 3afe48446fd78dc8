/* Pow where base and exponent differ in type, or both are integers: blocks of both are converted to f32 (f32, f16, bf16
 * bases), to i64 (integers with integer exponents, modulo 2^64) or to f64 (everything else). */
#include <math.h>

#include "backend/cpu/elementwise.h"

typedef struct power_params {
  const egi_isa *isa;
  egi_inner load_base, load_exponent, store;
  eg_dtype base;
} power_params;

static void convert(egi_inner cast, const egi_isa *isa, char *out, int64_t out_stride, char *in, int64_t in_stride,
                    int64_t n) {
  char *const data[2] = {out, in};
  const int64_t strides[2] = {out_stride, in_stride};
  cast(isa, data, strides, n);
}

/* base^exponent modulo 2^64; a negative exponent gives the truncated quotient, 0 for base 0. */
static uint64_t integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 1) return 1;
    if (base == -1) return exponent % 2 == 0 ? 1 : UINT64_MAX;
    return 0;
  }
  uint64_t result = 1, factor = (uint64_t)base;
  for (uint64_t bits = (uint64_t)exponent; bits != 0; bits >>= 1) {
    if (bits & 1) result *= factor;
    factor *= factor;
  }
  return result;
}

static void inner_f32(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const power_params *p = params;
  float bases[EGI_BLOCK], exponents[EGI_BLOCK], results[EGI_BLOCK];
  egi_broadcast form = strides[2] == 0 ? EGI_BROADCAST_B : EGI_BROADCAST_NONE;
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    char *target = data[0] + i * strides[0];
    const float *base = egi_block_load(p->isa, p->base, data[1] + i * strides[1], strides[1], m, bases);
    convert(p->load_exponent, p->isa, (char *)exponents, sizeof(float), data[2] + i * strides[2], strides[2], m);
    float *out = egi_block_target(p->base, target, strides[0], results);
    p->isa->elementwise->binary[EGI_BINARY_POW][form](out, base, exponents, m);
    egi_block_store(p->isa, p->base, target, strides[0], m, out);
  }
}

static void inner_i64(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const power_params *p = params;
  int64_t bases[EGI_BLOCK], exponents[EGI_BLOCK];
  uint64_t results[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    convert(p->load_base, p->isa, (char *)bases, sizeof(int64_t), data[1] + i * strides[1], strides[1], m);
    convert(p->load_exponent, p->isa, (char *)exponents, sizeof(int64_t), data[2] + i * strides[2], strides[2], m);
    for (int64_t k = 0; k < m; k++) results[k] = integer_power(bases[k], exponents[k]);
    convert(p->store, p->isa, data[0] + i * strides[0], strides[0], (char *)results, sizeof(uint64_t), m);
  }
}

static void inner_f64(const void *params, char *const *data, const int64_t *strides, int64_t n) {
  const power_params *p = params;
  double bases[EGI_BLOCK], exponents[EGI_BLOCK];
  for (int64_t i = 0; i < n; i += EGI_BLOCK) {
    int64_t m = n - i < EGI_BLOCK ? n - i : EGI_BLOCK;
    convert(p->load_base, p->isa, (char *)bases, sizeof(double), data[1] + i * strides[1], strides[1], m);
    convert(p->load_exponent, p->isa, (char *)exponents, sizeof(double), data[2] + i * strides[2], strides[2], m);
    for (int64_t k = 0; k < m; k++) bases[k] = pow(bases[k], exponents[k]);
    convert(p->store, p->isa, data[0] + i * strides[0], strides[0], (char *)bases, sizeof(double), m);
  }
}

static bool is_integer(eg_dtype dtype) {
  egi_dtype_class kind = egi_dtype_kind(dtype);
  return kind == EGI_CLASS_INTEGER || kind == EGI_CLASS_UNSIGNED;
}

egi_inner egi_power_inner(eg_dtype base, eg_dtype exponent, egi_arena *arena, const void **out_params) {
  bool is_real =
      (is_integer(base) || egi_dtype_is_float(base)) && (is_integer(exponent) || egi_dtype_is_float(exponent));
  power_params *p = EGI_NEW(arena, power_params, 1);
  if (p == NULL || !is_real) return NULL;
  eg_dtype inside = EG_DTYPE_F64, stored = EG_DTYPE_F64;
  egi_inner inner = inner_f64;
  if (is_integer(base) && is_integer(exponent)) {
    inside = EG_DTYPE_I64;
    stored = EG_DTYPE_U64;
    inner = inner_i64;
  } else if (base == EG_DTYPE_F32 || base == EG_DTYPE_F16 || base == EG_DTYPE_BF16) {
    inside = EG_DTYPE_F32;
    inner = inner_f32;
  }
  *p = (power_params){.isa = egi_cpu_isa(),
                      .load_base = egi_cast_inner(inside, base),
                      .load_exponent = egi_cast_inner(inside, exponent),
                      .store = egi_cast_inner(base, stored),
                      .base = base};
  if (p->load_base == NULL || p->load_exponent == NULL || p->store == NULL) return NULL;
  *out_params = p;
  return inner;
}
