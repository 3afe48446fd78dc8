/* Blockwise codes against those that bitsandbytes made on a GPU (data/bitsandbytes): weights a and b in NF4 and FP4,
 * with plain and with nested scales, the state dict of a Linear4bit, and both dynamic maps. Another file of that form,
 * with weights of other sizes, may be named in ENGRAFT_BITSANDBYTES. */
#include "support_io.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/blockwise.h"

typedef struct golden {
  egi_safetensors *file;
  const char *weight, *type;
} golden;

static const egi_safetensor *find(const golden *g, const char *suffix) {
  char name[128];
  (void)snprintf(name, sizeof name, "%s%s%s%s", g->weight, g->type[0] ? "." : "", g->type, suffix);
  return egi_safetensors_find(g->file, name);
}

static float *floats_of(const egi_safetensor *tensor, size_t *out_count) {
  assert_non_null(tensor);
  assert_int_equal(tensor->dtype, EG_DTYPE_F32);
  float *values = malloc(tensor->size_bytes + 1);
  assert_non_null(values);
  memcpy(values, tensor->data, tensor->size_bytes);
  *out_count = tensor->size_bytes / sizeof *values;
  return values;
}

static size_t count_codes(const uint8_t *codes, const uint8_t *wanted, size_t n) {
  size_t n_different = 0;
  for (size_t i = 0; i < n; i++) {
    unsigned shift = i % 2 == 0 ? 4 : 0;
    n_different += (codes[i / 2] >> shift & 15) != (wanted[i / 2] >> shift & 15);
  }
  return n_different;
}

static bool is_within(const float *values, const float *wanted, size_t n, double tolerance) {
  for (size_t i = 0; i < n; i++)
    if (!(fabs((double)values[i] - (double)wanted[i]) <= tolerance * fabs((double)wanted[i]))) return false;
  return true;
}

/* Sizes of everything that a weight of n values has. */
typedef struct codec {
  egi_four_bit type;
  size_t n, block, n_blocks, n_nested;
  uint8_t *codes, *scale_codes;
  float *scales, *nested, *values;
} codec;

static codec encode(egi_four_bit type, const float *weight, size_t n, size_t block) {
  codec c = {.type = type, .n = n, .block = block, .n_blocks = (n + block - 1) / block};
  c.n_nested = (size_t)egi_nested_count(c.n_blocks);
  c.codes = calloc((n + 1) / 2, 1);
  c.scale_codes = calloc(c.n_blocks, 1);
  c.scales = calloc(c.n_blocks, sizeof *c.scales);
  c.nested = calloc(c.n_nested, sizeof *c.nested);
  c.values = calloc(n, sizeof *c.values);
  assert_true(c.codes && c.scale_codes && c.scales && c.nested && c.values);
  for (size_t i = 0; i < c.n_blocks; i++) {
    size_t first = i * block, count = n - first < block ? n - first : block;
    c.scales[i] = egi_four_bit_encode(type, weight + first, count, c.codes + first / 2);
  }
  egi_nested_encode(c.scales, c.n_blocks, c.scale_codes, c.nested);
  return c;
}

static void codec_free(codec *c) {
  free(c->codes);
  free(c->scale_codes);
  free(c->scales);
  free(c->nested);
  free(c->values);
}

static void decode(codec *c, const uint8_t *codes, const float *scales, const uint8_t *scale_codes,
                   const float *nested) {
  for (size_t i = 0; i < c->n_blocks; i++) {
    size_t first = i * c->block, count = c->n - first < c->block ? c->n - first : c->block;
    float scale = scale_codes != NULL ? egi_nested_decode(nested, scale_codes[i], i) : scales[i];
    egi_four_bit_decode(c->type, codes, first, count, scale, c->values + first);
  }
}

/* The scales of scales, their offset and their codes. The order of sums for the mean is the GPU's own. */
static void check_nested(const golden *g, codec *c) {
  size_t n = 0;
  const egi_safetensor *codes = find(g, ".nested.absmax");
  float *scales = floats_of(find(g, ".nested.absmax2"), &n), *map = floats_of(find(g, ".nested.code"), &n);
  float *offset = floats_of(find(g, ".nested.offset"), &n);
  assert_true(is_within(c->nested, offset, 1, 1.2e-7));
  assert_memory_equal(c->nested + 1, map, 256 * sizeof *map);
  assert_true(is_within(c->nested + EGI_NESTED_HEADER, scales, c->n_nested - EGI_NESTED_HEADER, 3e-7));
  assert_non_null(codes);
  assert_memory_equal(c->scale_codes, codes->data, c->n_blocks);
  if (find(g, ".nested.dequant") != NULL) { /* from its own parts: to the bit */
    float *nested = malloc(c->n_nested * sizeof *nested), *values = floats_of(find(g, ".nested.dequant"), &n);
    assert_non_null(nested);
    nested[0] = offset[0];
    memcpy(nested + 1, map, 256 * sizeof *map);
    memcpy(nested + EGI_NESTED_HEADER, scales, (c->n_nested - EGI_NESTED_HEADER) * sizeof *nested);
    decode(c, find(g, ".packed")->data, NULL, codes->data, nested);
    assert_true(is_within(c->values, values, c->n, 0.0));
    free(nested);
    free(values);
  }
  free(scales);
  free(map);
  free(offset);
}

static size_t check_weight(egi_safetensors *file, const char *weight, const char *type, size_t block) {
  const golden g = {file, weight, type};
  const golden source = {file, weight, ""};
  size_t n = 0, n_blocks = 0, ignored = 0;
  if (find(&source, ".w") == NULL) return 0;
  float *w = floats_of(find(&source, ".w"), &n), *scales = floats_of(find(&g, ".absmax"), &n_blocks);
  float *values = floats_of(find(&g, ".dequant"), &ignored);
  const egi_safetensor *packed = find(&g, ".packed");
  assert_non_null(packed);
  codec c = encode(strcmp(type, "nf4") == 0 ? EGI_FOUR_BIT_NF4 : EGI_FOUR_BIT_FP4, w, n, block);
  assert_int_equal(c.n_blocks, n_blocks);
  assert_int_equal(packed->size_bytes, (n + 1) / 2);
  assert_memory_equal(c.scales, scales, n_blocks * sizeof *scales);
  size_t n_different = count_codes(c.codes, packed->data, n + n % 2);
  print_message("%s %s: %zu of %zu codes differ (%.1e)\n", weight, type, n_different, n,
                (double)n_different / (double)n);
  assert_true((double)n_different < 1e-4 * (double)n);
  decode(&c, packed->data, scales, NULL, NULL);
  assert_true(is_within(c.values, values, n, 0.0));
  check_nested(&g, &c);
  codec_free(&c);
  free(w);
  free(scales);
  free(values);
  return 1;
}

static void check_file(eg_context *ctx, const char *path) {
  static const struct {
    const char *weight;
    size_t block;
  } weights[] = {{"a", 64}, {"b", 64}, {"c", 128}, {"d", 32}};
  egi_safetensors *file = NULL;
  size_t n_checked = 0;
  assert_int_equal(egi_safetensors_open(ctx, path, &file), EG_OK);
  for (size_t i = 0; i < EGI_COUNT(weights); i++) {
    n_checked += check_weight(file, weights[i].weight, "nf4", weights[i].block);
    n_checked += check_weight(file, weights[i].weight, "fp4", weights[i].block);
  }
  assert_true(n_checked >= 4);
  egi_safetensors_close(file);
}

#define GOLDEN EGI_TEST_DATA "/bitsandbytes/golden.safetensors"

static void test_weights(void **state) {
  io_fixture *fixture = *state;
  check_file(fixture->ctx, GOLDEN);
  const char *more = getenv("ENGRAFT_BITSANDBYTES");
  if (more != NULL && more[0] != '\0') check_file(fixture->ctx, more);
}

/* Scales of many blocks, by themselves. */
static void test_scales(void **state) {
  io_fixture *fixture = *state;
  egi_safetensors *file = NULL;
  assert_int_equal(egi_safetensors_open(fixture->ctx, GOLDEN, &file), EG_OK);
  for (int i = 0; i < 2; i++) {
    const golden g = {file, i == 0 ? "c" : "d", "nf4"};
    codec c = {.n_blocks = 0};
    c.scales = floats_of(find(&g, ".absmax"), &c.n_blocks);
    c.n_nested = (size_t)egi_nested_count(c.n_blocks);
    assert_true(c.n_nested > EGI_NESTED_HEADER + 1);
    c.scale_codes = calloc(c.n_blocks, 1);
    c.nested = calloc(c.n_nested, sizeof *c.nested);
    assert_true(c.scale_codes && c.nested);
    egi_nested_encode(c.scales, c.n_blocks, c.scale_codes, c.nested);
    check_nested(&g, &c);
    codec_free(&c);
  }
  egi_safetensors_close(file);
}

static void test_maps(void **state) {
  io_fixture *fixture = *state;
  egi_safetensors *file = NULL;
  float map[256];
  size_t n = 0;
  assert_int_equal(egi_safetensors_open(fixture->ctx, GOLDEN, &file), EG_OK);
  float *wanted = floats_of(egi_safetensors_find(file, "map.unsigned"), &n);
  egi_dynamic_map(false, map);
  assert_int_equal(n, 256);
  assert_memory_equal(map, wanted, sizeof map);
  free(wanted);
  wanted = floats_of(egi_safetensors_find(file, "layer.weight.quant_map"), &n);
  assert_memory_equal(egi_four_bit_levels(EGI_FOUR_BIT_NF4), wanted, 16 * sizeof *wanted);
  free(wanted);
  egi_safetensors_close(file);
}

static bool is_equal(float a, float b) {
  return !(a < b) && !(a > b) && !isnan(a) && !isnan(b);
}

static void test_edges(void **state) {
  (void)state;
  const float zeros[64] = {0.0F, -0.0F}, odd[3] = {-2.0F, 0.0F, 2.0F};
  float values[64], bad[2] = {1.0F, NAN};
  uint8_t codes[32];
  for (int type = 0; type < 2; type++) {
    memset(codes, 255, sizeof codes);
    assert_true(is_equal(egi_four_bit_encode((egi_four_bit)type, zeros, 64, codes), 0.0F));
    for (int i = 0; i < 32; i++) assert_int_equal(codes[i], 0);
    egi_four_bit_decode((egi_four_bit)type, codes, 0, 64, 0.0F, values);
    for (int i = 0; i < 64; i++) assert_true(is_equal(values[i], 0.0F));
    assert_true(is_equal(egi_four_bit_encode((egi_four_bit)type, odd, 3, codes), 2.0F));
    egi_four_bit_decode((egi_four_bit)type, codes, 1, 2, 2.0F, values);
    assert_true(is_equal(values[0], 0.0F) && is_equal(values[1], 2.0F));
    assert_true(!(egi_four_bit_encode((egi_four_bit)type, bad, 2, codes) <= FLT_MAX));
    bad[1] = -INFINITY;
    assert_true(!(egi_four_bit_encode((egi_four_bit)type, bad, 2, codes) <= FLT_MAX));
    bad[1] = NAN;
  }
  /* a value on a threshold keeps the lower code */
  const float tie[2] = {1.0F, 0.03979014977812767F};
  (void)egi_four_bit_encode(EGI_FOUR_BIT_NF4, tie, 2, codes);
  assert_int_equal(codes[0], 15 << 4 | 7);
}

typedef struct mean_error {
  double absolute, relative;
} mean_error;

/* The relative one with the small constant below the line that bitsandbytes' tests have. */
static mean_error compare(const float *values, const float *wanted, size_t n) {
  mean_error sum = {0.0, 0.0};
  for (size_t i = 0; i < n; i++) {
    double error = fabs((double)values[i] - (double)wanted[i]);
    sum.absolute += error / (double)n;
    sum.relative += error / (fabs((double)wanted[i]) + 1e-8) / (double)n;
  }
  return sum;
}

/* Codes of 8 bits by the dynamic map, blocks of 256. */
static void check_dynamic(const float *weight, size_t n) {
  float map[256], *values = malloc(n * sizeof *values);
  uint8_t codes[256];
  assert_non_null(values);
  egi_dynamic_map(true, map);
  for (size_t first = 0; first < n; first += 256) {
    float scale = egi_dynamic_encode(map, weight + first, 256, codes);
    for (size_t i = 0; i < 256; i++) values[first + i] = map[codes[i]] * scale;
  }
  mean_error error = compare(values, weight, n);
  print_message("8 bits: mean error %.5f, relative %.5f\n", error.absolute, error.relative);
  assert_true(error.absolute < .011);
  assert_true(error.relative < .018);
  free(values);
}

/* Mean error of normal numbers, as bitsandbytes' own tests bound it. */
static void test_error(void **state) {
  (void)state;
  static const struct {
    egi_four_bit type;
    size_t block;
    double wanted, relative; /* 0: not stated */
  } cases[] = {
      {EGI_FOUR_BIT_NF4, 32, .0677, 0},     {EGI_FOUR_BIT_NF4, 64, .0728, .2033}, {EGI_FOUR_BIT_NF4, 128, .0768, 0},
      {EGI_FOUR_BIT_NF4, 256, .0803, 0},    {EGI_FOUR_BIT_NF4, 512, .0835, 0},    {EGI_FOUR_BIT_NF4, 1024, .0866, 0},
      {EGI_FOUR_BIT_NF4, 2048, .0896, 0},   {EGI_FOUR_BIT_NF4, 4096, .0925, 0},   {EGI_FOUR_BIT_FP4, 32, .0889, 0},
      {EGI_FOUR_BIT_FP4, 64, .0965, .2601}, {EGI_FOUR_BIT_FP4, 128, .1030, 0}};
  size_t n = (size_t)1 << 20;
  float *weight = malloc(n * sizeof *weight);
  assert_non_null(weight);
  for (size_t i = 0; i < n; i++) weight[i] = (float)egi_random_normal(7, 0, i);
  for (size_t k = 0; k < EGI_COUNT(cases); k++) {
    codec c = encode(cases[k].type, weight, n, cases[k].block);
    decode(&c, c.codes, c.scales, NULL, NULL);
    mean_error error = compare(c.values, weight, n);
    print_message("block %zu: mean error %.5f, %.4f wanted; relative %.4f\n", c.block, error.absolute, cases[k].wanted,
                  error.relative);
    assert_true(error.absolute < cases[k].wanted + 7e-4);
    assert_true(cases[k].relative <= 0 || error.relative < cases[k].relative + 7e-4);
    decode(&c, c.codes, NULL, c.scale_codes, c.nested);
    error = compare(c.values, weight, n);
    assert_true(error.absolute < .11);
    assert_true(cases[k].block > 64 || error.relative < .28);
    codec_free(&c);
  }
  check_dynamic(weight, n);
  free(weight);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_weights, io_setup, io_teardown),
                                     cmocka_unit_test_setup_teardown(test_scales, io_setup, io_teardown),
                                     cmocka_unit_test_setup_teardown(test_maps, io_setup, io_teardown),
                                     cmocka_unit_test(test_edges), cmocka_unit_test(test_error)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
