/* Functions of one row: softmax, normalisation, rotary embedding, attention scores, losses; in float with the
 * polynomials of math.h, in double with the C library's functions. */
#include "backend/cpu/isa/isa.h"
#include "backend/cpu/isa/math.h"

static inline double exp_negative_f64(double x) {
  return x < -708.0 ? 0.0 : exp(x);
}

#define REAL float
#define NAME(function) function##_f32
#define EXP_NEGATIVE egi_exp_negative_f32
#define TANH egi_tanh_f32
#define EXP_LOOP EGI_SIMD
#define EXP_SUM_LOOP _Pragma("omp simd reduction(+ : sum)")
#include "backend/cpu/isa/rows_kernel.inc"
#undef REAL
#undef NAME
#undef EXP_NEGATIVE
#undef TANH
#undef EXP_LOOP
#undef EXP_SUM_LOOP
#undef BLOCK
#undef LANES

#define REAL double
#define NAME(function) function##_f64
#define EXP_NEGATIVE exp_negative_f64
#define TANH tanh
#define EXP_LOOP
#define EXP_SUM_LOOP
#include "backend/cpu/isa/rows_kernel.inc"
#undef REAL
#undef NAME
#undef EXP_NEGATIVE
#undef TANH

const egi_isa_rows EGI_ISA_NAME(egi_isa_rows) = {&functions_f32, &functions_f64};
