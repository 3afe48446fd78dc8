/* Numbers of the narrow types: every code there and back, what is between them, beyond them, and packed elements.
 * Expected values are those of the tables in onnx/docs (float8) and the OCP Microscaling Formats. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "backend/cpu/narrow.h"

static const egi_narrowing saturating = {true, EGI_ROUND_UP}, open_ended = {false, EGI_ROUND_UP};

static unsigned encode(eg_dtype dtype, double value, const egi_narrowing *narrowing) {
  uint8_t byte = 0;
  egi_number_set(&byte, dtype, 0, value, narrowing);
  return byte;
}

static double decode(eg_dtype dtype, unsigned code) {
  uint8_t byte = (uint8_t)code;
  return egi_number_get(&byte, dtype, 0);
}

static void every_code_goes_there_and_back(void **state) {
  static const eg_dtype types[] = {EG_DTYPE_F8E4M3FN, EG_DTYPE_F8E4M3FNUZ, EG_DTYPE_F8E5M2, EG_DTYPE_F8E5M2FNUZ,
                                   EG_DTYPE_F8E8M0,   EG_DTYPE_F4E2M1,     EG_DTYPE_U4,     EG_DTYPE_I4,
                                   EG_DTYPE_U2,       EG_DTYPE_I2};
  (void)state;
  for (size_t t = 0; t < EGI_COUNT(types); t++)
    for (unsigned code = 0; code < 1u << egi_dtype_bits(types[t]); code++) {
      double value = decode(types[t], code);
      if (isnan(value))
        assert_true(isnan(decode(types[t], encode(types[t], value, &saturating))));
      else
        assert_int_equal(encode(types[t], value, &open_ended), code);
    }
}

static void known_values(void **state) {
  (void)state;
  assert_true(decode(EG_DTYPE_F8E4M3FN, 0x7e) == 448.0 && isnan(decode(EG_DTYPE_F8E4M3FN, 0x7f)));
  assert_true(decode(EG_DTYPE_F8E4M3FN, 0x01) == 0x1p-9 && decode(EG_DTYPE_F8E4M3FN, 0x38) == 1.0);
  assert_true(decode(EG_DTYPE_F8E4M3FNUZ, 0x7f) == 240.0 && isnan(decode(EG_DTYPE_F8E4M3FNUZ, 0x80)));
  assert_true(decode(EG_DTYPE_F8E5M2, 0x7b) == 57344.0 && isinf(decode(EG_DTYPE_F8E5M2, 0x7c)));
  assert_true(decode(EG_DTYPE_F8E5M2FNUZ, 0x7f) == 57344.0 && isnan(decode(EG_DTYPE_F8E5M2FNUZ, 0x80)));
  assert_true(decode(EG_DTYPE_F8E8M0, 127) == 1.0 && decode(EG_DTYPE_F8E8M0, 0) == 0x1p-127);
  assert_true(decode(EG_DTYPE_F4E2M1, 7) == 6.0 && decode(EG_DTYPE_F4E2M1, 9) == -0.5);
  assert_true(decode(EG_DTYPE_I4, 0xf) == -1.0 && decode(EG_DTYPE_U4, 0xf) == 15.0 && decode(EG_DTYPE_I2, 2) == -2.0);
}

static void values_between_go_to_the_even_one(void **state) {
  (void)state;
  assert_int_equal(encode(EG_DTYPE_F8E4M3FN, 1.0625, &saturating), 0x38); /* between 1 and 1.125 */
  assert_int_equal(encode(EG_DTYPE_F8E4M3FN, 1.1875, &saturating), 0x3a); /* between 1.125 and 1.25 */
  assert_int_equal(encode(EG_DTYPE_F8E4M3FN, 0x1p-10, &saturating), 0);
  assert_int_equal(encode(EG_DTYPE_F8E4M3FN, 464.0, &open_ended), 0x7e); /* rounds to the largest */
  assert_int_equal(encode(EG_DTYPE_F4E2M1, 2.5, &saturating), 4);
  assert_int_equal(encode(EG_DTYPE_F8E8M0, 3.0, &saturating), 129); /* up */
}

static void values_beyond(void **state) {
  (void)state;
  assert_int_equal(encode(EG_DTYPE_F8E4M3FN, 1e6, &saturating), 0x7e);
  assert_int_equal(encode(EG_DTYPE_F8E4M3FN, 1e6, &open_ended), 0x7f);
  assert_int_equal(encode(EG_DTYPE_F8E5M2, -HUGE_VAL, &saturating), 0xfb);
  assert_int_equal(encode(EG_DTYPE_F8E5M2, -HUGE_VAL, &open_ended), 0xfc);
  assert_int_equal(encode(EG_DTYPE_F8E5M2FNUZ, 1e9, &open_ended), 0x80);
  assert_int_equal(encode(EG_DTYPE_F4E2M1, 100.0, &open_ended), 7);
  assert_int_equal(encode(EG_DTYPE_I4, 100.0, &saturating), 7);
  assert_int_equal(encode(EG_DTYPE_U2, -3.0, &saturating), 0);
}

static void packed_elements_leave_their_neighbours(void **state) {
  uint8_t bytes[2] = {0, 0};
  static const double values[8] = {1, 0, 3, 2, 2, 3, 0, 1};
  (void)state;
  for (int64_t i = 7; i >= 0; i--) egi_number_set(bytes, EG_DTYPE_U2, i, values[i], &saturating);
  for (int64_t i = 0; i < 8; i++) assert_true(egi_number_get(bytes, EG_DTYPE_U2, i) == values[i]);
  assert_int_equal(bytes[0], 1 | 3 << 4 | 2 << 6); /* the first in the lowest bits */
}

/* Cast between a wide and a packed type keeps the low bits. */
static void casts(void **state) {
  float in[3] = {-9.0f, 7.9f, NAN};
  uint8_t out[2] = {0xff, 0xff};
  const egi_tensor from = {.data = in, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {3}, .strides = {1}};
  const egi_tensor to = {.data = out, .dtype = EG_DTYPE_I4, .rank = 1, .dims = {3}, .strides = {1}};
  (void)state;
  egi_cast_narrow(&to, &from, &saturating);
  assert_int_equal(out[0], 0x77);
  assert_int_equal(out[1] & 0xf, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_code_goes_there_and_back),         cmocka_unit_test(known_values),
      cmocka_unit_test(values_between_go_to_the_even_one),      cmocka_unit_test(values_beyond),
      cmocka_unit_test(packed_elements_leave_their_neighbours), cmocka_unit_test(casts)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
