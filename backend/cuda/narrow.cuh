/* Single numbers of every numeric type on the device, the 8-bit floats and the types below 8 bits included, as
 * backend/cpu/narrow.c converts them. Elements below 8 bits are packed, the first in the lowest bits. */
#ifndef ENGRAFT_BACKEND_CUDA_NARROW_CUH
#define ENGRAFT_BACKEND_CUDA_NARROW_CUH

#include "backend/cuda/number.cuh"

namespace egi::plain {

/* What happens to a float that a narrow float type does not hold (Cast and QuantizeLinear: saturate; round_mode). */
enum scale_rounding { ROUND_UP, ROUND_DOWN, ROUND_NEAREST };
struct narrowing {
  bool is_saturating;
  scale_rounding rounding; /* to float8e8m0 alone */
};

inline narrowing narrowing_of(const egi_node *node) {
  const char *mode = egi_node_string(node, "round_mode", "up");
  const scale_rounding rounding = strcmp(mode, "down") == 0      ? ROUND_DOWN
                                  : strcmp(mode, "nearest") == 0 ? ROUND_NEAREST
                                                                 : ROUND_UP;
  return {egi_node_int(node, "saturate", 1) != 0, rounding};
}

inline bool is_number_type(eg_dtype dtype) {
  switch (egi_dtype_kind(dtype)) {
  case EGI_CLASS_FLOAT:
  case EGI_CLASS_INTEGER:
  case EGI_CLASS_UNSIGNED:
  case EGI_CLASS_BOOLEAN:
    return true;
  default:
    return false;
  }
}

/* float8*, float4, and integers below 8 bits. */
inline bool is_narrow_type(eg_dtype dtype) {
  return is_number_type(dtype) && dtype > EG_DTYPE_BF16;
}

/* An 8- or 4-bit float: exponent and mantissa bits, and which codes are no numbers. */
struct float_format {
  int exponent_bits, mantissa_bits, bias;
  double largest;
  bool has_infinity, is_zero_unsigned, has_nan;
};

__device__ __forceinline__ bool format_of(int dtype, float_format *out) {
  switch (dtype) {
  case EG_DTYPE_F8E4M3FN:
    *out = {4, 3, 7, 448.0, false, false, true};
    return true;
  case EG_DTYPE_F8E4M3FNUZ:
    *out = {4, 3, 8, 240.0, false, true, true};
    return true;
  case EG_DTYPE_F8E5M2:
    *out = {5, 2, 15, 57344.0, true, false, true};
    return true;
  case EG_DTYPE_F8E5M2FNUZ:
    *out = {5, 2, 16, 57344.0, false, true, true};
    return true;
  case EG_DTYPE_F4E2M1:
    *out = {2, 1, 1, 6.0, false, false, false};
    return true;
  default:
    return false;
  }
}

/* Bits of an element below 8 bits, or 8. */
__host__ __device__ __forceinline__ int narrow_bits(int dtype) {
  switch (dtype) {
  case EG_DTYPE_U4:
  case EG_DTYPE_I4:
  case EG_DTYPE_F4E2M1:
    return 4;
  case EG_DTYPE_U2:
  case EG_DTYPE_I2:
    return 2;
  default:
    return 8;
  }
}

__device__ inline double decode_float(const float_format &f, unsigned code) {
  const unsigned sign = code >> (f.exponent_bits + f.mantissa_bits) & 1u;
  const unsigned exponent = code >> f.mantissa_bits & ((1u << f.exponent_bits) - 1u);
  const unsigned mantissa = code & ((1u << f.mantissa_bits) - 1u);
  const unsigned last_exponent = (1u << f.exponent_bits) - 1u, last_mantissa = (1u << f.mantissa_bits) - 1u;
  const double nan = static_cast<double>(NAN), infinity = static_cast<double>(INFINITY);
  if (f.is_zero_unsigned && sign == 1 && exponent == 0 && mantissa == 0) return nan;
  if (f.has_infinity && exponent == last_exponent) return mantissa != 0 ? nan : sign != 0 ? -infinity : infinity;
  const bool is_last = exponent == last_exponent && mantissa == last_mantissa;
  if (f.has_nan && !f.has_infinity && !f.is_zero_unsigned && is_last) return nan;
  const int scale = -f.bias - f.mantissa_bits;
  const double value =
      exponent == 0 ? ldexp(static_cast<double>(mantissa), 1 + scale)
                    : ldexp(static_cast<double>(mantissa + last_mantissa + 1u), static_cast<int>(exponent) + scale);
  return sign != 0 ? -value : value;
}

__device__ inline unsigned code_of_nan(const float_format &f, unsigned sign) {
  const unsigned sign_bit = 1u << (f.exponent_bits + f.mantissa_bits);
  if (f.is_zero_unsigned || !f.has_nan) return sign_bit; /* float4 has none: -0 */
  return sign * sign_bit + (f.has_infinity ? sign_bit - 2u : sign_bit - 1u);
}

/* Exponent of a magnitude's last binade that the format has, and how many of its steps the magnitude is. */
__device__ inline double count_steps(const float_format &f, double magnitude, int *out_exponent) {
  int exponent = 0;
  (void)frexp(magnitude, &exponent);
  exponent -= 1; /* magnitude = 1.x * 2^exponent */
  if (exponent < 1 - f.bias) exponent = 1 - f.bias;
  *out_exponent = exponent;
  return rint(ldexp(magnitude, f.mantissa_bits - exponent)); /* to nearest even */
}

__device__ inline unsigned encode_float(const float_format &f, double value, const narrowing &how) {
  const unsigned sign = signbit(value) ? 1u : 0u, sign_bit = 1u << (f.exponent_bits + f.mantissa_bits);
  double magnitude = fabs(value);
  int exponent = 0;
  if (isnan(value)) return code_of_nan(f, sign);
  bool is_over = isinf(magnitude);
  if (!is_over) {
    const double steps = count_steps(f, magnitude, &exponent);
    is_over = ldexp(steps, exponent - f.mantissa_bits) > f.largest;
  }
  if (is_over && !how.is_saturating && f.has_nan)
    return f.has_infinity ? sign * sign_bit + (sign_bit - (1u << f.mantissa_bits)) : code_of_nan(f, sign);
  if (is_over) magnitude = f.largest;
  unsigned code = 0;
  if (magnitude != 0.0) {
    const double steps = count_steps(f, magnitude, &exponent);
    code = (static_cast<unsigned>(exponent - (1 - f.bias)) << f.mantissa_bits) + static_cast<unsigned>(steps);
  }
  return f.is_zero_unsigned && code == 0 ? 0u : sign * sign_bit + code;
}

/* float8e8m0: 2^(code - 127), 255 is NaN; there is no sign and no zero. */
__device__ inline unsigned encode_scale(double value, const narrowing &how) {
  const float narrow = static_cast<float>(value);
  const uint32_t bits = __float_as_uint(narrow), fraction = bits & 0x7fffffu;
  uint32_t exponent = bits >> 23 & 0xffu;
  if (exponent == 0xffu) return isinf(narrow) && how.is_saturating ? 0xfeu : 0xffu;
  const uint32_t own = exponent == 0 ? 0x400000u : 0; /* 2^-127 is a subnormal float */
  bool is_up = how.rounding == ROUND_UP && fraction > own;
  if (how.rounding == ROUND_NEAREST) is_up = exponent == 0 ? fraction > 0x600000u : fraction >= 0x400000u;
  if (is_up && (exponent < 0xfeu || !how.is_saturating)) exponent++;
  return exponent;
}

__device__ inline double decode_number(int dtype, unsigned code) {
  float_format f;
  if (dtype == EG_DTYPE_F8E8M0)
    return code == 0xffu ? static_cast<double>(NAN) : ldexp(1.0, static_cast<int>(code) - 127);
  if (format_of(dtype, &f)) return decode_float(f, code);
  const int bits = narrow_bits(dtype);
  const bool is_negative = (dtype == EG_DTYPE_I4 || dtype == EG_DTYPE_I2) && (code >> (bits - 1)) != 0;
  return static_cast<double>(static_cast<int>(code) - (is_negative ? 1 << bits : 0));
}

/* Codes of the types that are narrow. Floats are rounded to nearest even; to integers the value is cut and limited to
 * what they hold, NaN gives 0. */
__device__ inline unsigned encode_number(int dtype, double value, const narrowing &how) {
  float_format f;
  if (dtype == EG_DTYPE_F8E8M0) return encode_scale(value, how);
  if (format_of(dtype, &f)) return encode_float(f, value, how);
  const bool is_signed = dtype == EG_DTYPE_I4 || dtype == EG_DTYPE_I2;
  const int bits = narrow_bits(dtype);
  const double low = is_signed ? -ldexp(1.0, bits - 1) : 0.0, high = ldexp(1.0, is_signed ? bits - 1 : bits) - 1.0;
  const double cut = isnan(value) ? 0.0 : value < low ? low : value > high ? high : trunc(value);
  return static_cast<unsigned>(static_cast<int>(cut)) & ((1u << bits) - 1u);
}

/* Element `index` of contiguous data, exact but for 64-bit integers above 2^53. */
__device__ __forceinline__ double get_number(const char *data, int dtype, int element_bytes, int64_t index) {
  if (dtype <= EG_DTYPE_BF16) return load_number<double>(data + index * element_bytes, dtype);
  const int bits = narrow_bits(dtype), per_byte = 8 / bits;
  const unsigned byte = reinterpret_cast<const uint8_t *>(data)[index / per_byte];
  return decode_number(dtype, byte >> (static_cast<int>(index % per_byte) * bits) & ((1u << bits) - 1u));
}

/* Writes element `index` of a type of at least 8 bits. */
__device__ __forceinline__ void set_number(char *data, int dtype, int element_bytes, int64_t index, double value,
                                           const narrowing &how) {
  if (dtype <= EG_DTYPE_BF16)
    store_number<double>(data + index * element_bytes, dtype, value);
  else
    reinterpret_cast<uint8_t *>(data)[index] = static_cast<uint8_t>(encode_number(dtype, value, how));
}

} // namespace egi::plain

#endif
