/* Single numbers of every numeric type, the 8-bit floats and the types below 8 bits included: for kernels in which
 * conversion is not what takes the time. Elements below 8 bits are packed, the first in the lowest bits. */
#ifndef ENGRAFT_BACKEND_CPU_NARROW_H
#define ENGRAFT_BACKEND_CPU_NARROW_H

#include "backend/cpu/cpu.h"

/* What happens to a float that a narrow float type does not hold (Cast and QuantizeLinear: saturate; round_mode). */
typedef struct egi_narrowing {
  bool is_saturating;
  enum { EGI_ROUND_UP, EGI_ROUND_DOWN, EGI_ROUND_NEAREST } scale_rounding; /* to float8e8m0 alone */
} egi_narrowing;

/* float8*, float4, and integers below 8 bits. */
bool egi_is_narrow(eg_dtype dtype);
/* Integers and floats of any width, or bool. */
bool egi_is_number(eg_dtype dtype);
/* Element `index` of a contiguous tensor, exact but for 64-bit integers above 2^53. */
double egi_number_get(const void *data, eg_dtype dtype, int64_t index);
/* Floats are rounded to nearest even; to integers the value is cut and limited to what they hold, NaN gives 0. Elements
 * below 8 bits share bytes: one thread at a time for a byte. */
void egi_number_set(void *data, eg_dtype dtype, int64_t index, double value, const egi_narrowing *narrowing);
/* The same of a contiguous float tensor's element, quick for f32. */
static inline double egi_float_get(const egi_tensor *tensor, int64_t i) {
  if (tensor->dtype == EG_DTYPE_F32) return (double)((const float *)tensor->data)[i];
  return egi_number_get(tensor->data, tensor->dtype, i);
}
static inline void egi_float_set(const egi_tensor *tensor, int64_t i, double value) {
  static const egi_narrowing limited = {true, EGI_ROUND_NEAREST};
  if (tensor->dtype == EG_DTYPE_F32)
    ((float *)tensor->data)[i] = (float)value;
  else
    egi_number_set(tensor->data, tensor->dtype, i, value, &limited);
}
/* Smallest and largest number of an integer type. */
void egi_integer_limits(eg_dtype dtype, double *out_low, double *out_high);

/* Cast where one of the types is narrow ; those below 8 bits are contiguous. */
void egi_cast_narrow(const egi_tensor *output, const egi_tensor *input, const egi_narrowing *narrowing);
/* saturate and round_mode of a node. */
egi_narrowing egi_narrowing_of(const egi_node *node);

#endif
