/* Conversions of the narrow types, a number at a time. Formats: float8 and float8e8m0 as in onnx/docs float8 page
 * (arXiv:2209.05433, arXiv:2206.02915), float4 and e8m0 as in the OCP Microscaling Formats 1.0. Deterministic. */
#include "backend/cpu/narrow.h"

#include <math.h>

#include "backend/cpu/strided.h"

/* An 8- or 4-bit float: sign, exponent and mantissa bits, and which codes are no numbers. */
typedef struct format {
  int exponent_bits, mantissa_bits, bias;
  double largest;
  bool has_infinity;     /* all exponent bits set: infinity and NaN, as IEEE 754 says */
  bool is_zero_unsigned; /* the code of -0 is the only NaN (the FNUZ types) */
  bool has_nan;
} format;

static const format *format_of(eg_dtype dtype) {
  static const format e4m3fn = {4, 3, 7, 448.0, false, false, true};
  static const format e4m3fnuz = {4, 3, 8, 240.0, false, true, true};
  static const format e5m2 = {5, 2, 15, 57344.0, true, false, true};
  static const format e5m2fnuz = {5, 2, 16, 57344.0, false, true, true};
  static const format e2m1 = {2, 1, 1, 6.0, false, false, false};
  switch (dtype) {
  case EG_DTYPE_F8E4M3FN:
    return &e4m3fn;
  case EG_DTYPE_F8E4M3FNUZ:
    return &e4m3fnuz;
  case EG_DTYPE_F8E5M2:
    return &e5m2;
  case EG_DTYPE_F8E5M2FNUZ:
    return &e5m2fnuz;
  case EG_DTYPE_F4E2M1:
    return &e2m1;
  default:
    return NULL;
  }
}

bool egi_is_narrow(eg_dtype dtype) {
  return egi_is_number(dtype) && dtype > EG_DTYPE_BF16;
}

bool egi_is_number(eg_dtype dtype) {
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

/* ---- floats --------------------------------------------------------------------------------------------------- */

static double decode_float(const format *f, unsigned code) {
  unsigned sign = code >> (f->exponent_bits + f->mantissa_bits) & 1u;
  unsigned exponent = code >> f->mantissa_bits & ((1u << f->exponent_bits) - 1u);
  unsigned mantissa = code & ((1u << f->mantissa_bits) - 1u);
  unsigned last_exponent = (1u << f->exponent_bits) - 1u, last_mantissa = (1u << f->mantissa_bits) - 1u;
  if (f->is_zero_unsigned && sign == 1 && exponent == 0 && mantissa == 0) return (double)NAN;
  if (f->has_infinity && exponent == last_exponent) return mantissa != 0 ? (double)NAN : sign ? -HUGE_VAL : HUGE_VAL;
  bool is_last = exponent == last_exponent && mantissa == last_mantissa;
  if (f->has_nan && !f->has_infinity && !f->is_zero_unsigned && is_last) return (double)NAN;
  double value = exponent == 0
                     ? ldexp((double)mantissa, 1 - f->bias - f->mantissa_bits)
                     : ldexp((double)(mantissa + last_mantissa + 1u), (int)exponent - f->bias - f->mantissa_bits);
  return sign ? -value : value;
}

static unsigned code_of_nan(const format *f, unsigned sign) {
  unsigned sign_bit = 1u << (f->exponent_bits + f->mantissa_bits);
  if (f->is_zero_unsigned) return sign_bit;
  if (!f->has_nan) return sign_bit; /* float4 has none: -0 */
  return sign * sign_bit + (f->has_infinity ? sign_bit - 2u : sign_bit - 1u);
}

/* Code of a finite magnitude that is at most f->largest after rounding. */
static unsigned code_of_magnitude(const format *f, double magnitude) {
  int exponent = 0;
  if (magnitude == 0.0) return 0;
  (void)frexp(magnitude, &exponent);
  exponent -= 1; /* magnitude = 1.x * 2^exponent */
  int lowest = 1 - f->bias;
  if (exponent < lowest) exponent = lowest;
  double steps = nearbyint(ldexp(magnitude, f->mantissa_bits - exponent)); /* to nearest even, the default mode */
  return (unsigned)((exponent - lowest) << f->mantissa_bits) + (unsigned)steps;
}

static double round_to_format(const format *f, double magnitude) {
  int exponent = 0;
  (void)frexp(magnitude, &exponent);
  exponent -= 1;
  if (exponent < 1 - f->bias) exponent = 1 - f->bias;
  return ldexp(nearbyint(ldexp(magnitude, f->mantissa_bits - exponent)), exponent - f->mantissa_bits);
}

static unsigned encode_float(const format *f, double value, const egi_narrowing *narrowing) {
  unsigned sign = signbit(value) ? 1u : 0u, sign_bit = 1u << (f->exponent_bits + f->mantissa_bits);
  double magnitude = fabs(value);
  if (isnan(value)) return code_of_nan(f, sign);
  bool is_over = isinf(magnitude) || round_to_format(f, magnitude) > f->largest;
  if (is_over && !narrowing->is_saturating && f->has_nan)
    return f->has_infinity ? sign * sign_bit + (sign_bit - (1u << f->mantissa_bits)) : code_of_nan(f, sign);
  unsigned code = code_of_magnitude(f, is_over ? f->largest : magnitude);
  return f->is_zero_unsigned && code == 0 ? 0u : sign * sign_bit + code;
}

/* float8e8m0: 2^(code - 127), 255 is NaN; there is no sign and no zero. */
static unsigned encode_scale(double value, const egi_narrowing *narrowing) {
  float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  uint32_t exponent = bits >> 23 & 0xffu, fraction = bits & 0x7fffffu;
  if (exponent == 0xffu) return isinf(narrow) && narrowing->is_saturating ? 0xfeu : 0xffu;
  uint32_t own = exponent == 0 ? 0x400000u : 0; /* 2^-127 is a subnormal float */
  bool is_up = narrowing->scale_rounding == EGI_ROUND_UP && fraction > own;
  if (narrowing->scale_rounding == EGI_ROUND_NEAREST)
    is_up = exponent == 0 ? fraction > 0x600000u : fraction >= 0x400000u;
  if (is_up && (exponent < 0xfeu || !narrowing->is_saturating)) exponent++;
  return exponent;
}

/* ---- numbers -------------------------------------------------------------------------------------------------- */

static unsigned get_bits(const void *data, unsigned bits, int64_t index) {
  int64_t per_byte = 8 / (int64_t)bits;
  unsigned byte = ((const uint8_t *)data)[index / per_byte];
  return byte >> ((unsigned)(index % per_byte) * bits) & ((1u << bits) - 1u);
}

static void set_bits(void *data, unsigned bits, int64_t index, unsigned code) {
  int64_t per_byte = 8 / (int64_t)bits;
  unsigned shift = (unsigned)(index % per_byte) * bits, mask = (1u << bits) - 1u;
  uint8_t *byte = (uint8_t *)data + index / per_byte;
  *byte = (uint8_t)((*byte & ~(mask << shift)) | (code & mask) << shift);
}

static double get_narrow(const void *data, eg_dtype dtype, int64_t index) {
  unsigned bits = egi_dtype_bits(dtype), code = get_bits(data, bits, index);
  if (dtype == EG_DTYPE_F8E8M0) return code == 0xffu ? (double)NAN : ldexp(1.0, (int)code - 127);
  const format *f = format_of(dtype);
  if (f != NULL) return decode_float(f, code);
  bool is_negative = egi_dtype_kind(dtype) == EGI_CLASS_INTEGER && (code >> (bits - 1u)) != 0;
  return is_negative ? (double)code - ldexp(1.0, (int)bits) : (double)code;
}

double egi_number_get(const void *data, eg_dtype dtype, int64_t index) {
  switch (dtype) {
  case EG_DTYPE_F32:
    return (double)((const float *)data)[index];
  case EG_DTYPE_F64:
    return ((const double *)data)[index];
  case EG_DTYPE_F16:
    return (double)egi_f16_to_f32(((const uint16_t *)data)[index]);
  case EG_DTYPE_BF16:
    return (double)egi_bf16_to_f32(((const uint16_t *)data)[index]);
  case EG_DTYPE_I8:
    return ((const int8_t *)data)[index];
  case EG_DTYPE_I16:
    return ((const int16_t *)data)[index];
  case EG_DTYPE_I32:
    return ((const int32_t *)data)[index];
  case EG_DTYPE_I64:
    return (double)((const int64_t *)data)[index];
  case EG_DTYPE_BOOL:
  case EG_DTYPE_U8:
    return ((const uint8_t *)data)[index];
  case EG_DTYPE_U16:
    return ((const uint16_t *)data)[index];
  case EG_DTYPE_U32:
    return ((const uint32_t *)data)[index];
  case EG_DTYPE_U64:
    return (double)((const uint64_t *)data)[index];
  default:
    return get_narrow(data, dtype, index);
  }
}

void egi_integer_limits(eg_dtype dtype, double *out_low, double *out_high) {
  int bits = (int)egi_dtype_bits(dtype);
  bool is_signed = egi_dtype_kind(dtype) == EGI_CLASS_INTEGER;
  *out_low = is_signed ? -ldexp(1.0, bits - 1) : 0.0;
  *out_high = ldexp(1.0, is_signed ? bits - 1 : bits) - 1.0;
}

static void set_narrow(void *data, eg_dtype dtype, int64_t index, double value, const egi_narrowing *narrowing) {
  unsigned bits = egi_dtype_bits(dtype);
  const format *f = format_of(dtype);
  double low, high;
  if (f != NULL) {
    set_bits(data, bits, index, encode_float(f, value, narrowing));
    return;
  }
  if (dtype == EG_DTYPE_F8E8M0) {
    set_bits(data, bits, index, encode_scale(value, narrowing));
    return;
  }
  egi_integer_limits(dtype, &low, &high);
  double cut = isnan(value) ? 0.0 : value < low ? low : value > high ? high : trunc(value);
  set_bits(data, bits, index, (unsigned)(int)cut);
}

void egi_number_set(void *data, eg_dtype dtype, int64_t index, double value, const egi_narrowing *narrowing) {
  if (egi_is_narrow(dtype)) {
    set_narrow(data, dtype, index, value, narrowing);
    return;
  }
  char *out = (char *)data + (size_t)index * egi_element_bytes(dtype);
  char *const operands[2] = {out, (char *)&value};
  const int64_t strides[2] = {(int64_t)egi_element_bytes(dtype), (int64_t)sizeof value};
  egi_inner inner = egi_cast_inner(dtype, EG_DTYPE_F64);
  if (inner != NULL) inner(egi_cpu_isa(), operands, strides, 1);
}

/* ---- Cast ----------------------------------------------------------------------------------------------------- */

egi_narrowing egi_narrowing_of(const egi_node *node) {
  const char *mode = egi_node_string(node, "round_mode", "up");
  return (egi_narrowing){.is_saturating = egi_node_int(node, "saturate", 1) != 0,
                         .scale_rounding = strcmp(mode, "down") == 0      ? EGI_ROUND_DOWN
                                           : strcmp(mode, "nearest") == 0 ? EGI_ROUND_NEAREST
                                                                          : EGI_ROUND_UP};
}

static bool is_integer(eg_dtype dtype) {
  egi_dtype_class kind = egi_dtype_kind(dtype);
  return kind == EGI_CLASS_INTEGER || kind == EGI_CLASS_UNSIGNED || kind == EGI_CLASS_BOOLEAN;
}

void egi_cast_narrow(const egi_tensor *output, const egi_tensor *input, const egi_narrowing *narrowing) {
  unsigned bits = egi_dtype_bits(output->dtype);
  bool keeps_low_bits = bits < 8 && is_integer(output->dtype);
  for (int64_t i = 0, n = egi_tensor_count(output); i < n; i++) {
    int64_t to = egi_row_offset(output, output->rank, i), from = egi_row_offset(input, input->rank, i);
    double value = egi_number_get(input->data, input->dtype, from);
    if (keeps_low_bits)
      set_bits(output->data, bits, to, isfinite(value) ? (unsigned)(int)fmod(trunc(value), 256.0) : 0u);
    else
      egi_number_set(output->data, output->dtype, to, value, narrowing);
  }
}
