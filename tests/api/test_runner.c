/* Runners: given and made inputs, generation, and what is refused. */
#include "support_api.h"

#include <math.h>
#include <string.h>

static eg_runner *make_runner(api_fixture *fixture, eg_model *model) {
  eg_runner *runner;
  api_must(fixture->ctx, eg_runner_create(model, NULL, &runner));
  return runner;
}

static void test_made_inputs(void **state) {
  api_fixture *fixture = *state;
  static const int64_t ids[] = {1, 2, 3, 4, 5, 6}, mask[] = {1, 1, 1, 1, 1, 1}, positions[] = {0, 1, 2, 0, 1, 2};
  static const int32_t narrow[] = {1, 2, 3, 4, 5, 6};
  const eg_tensor all[] = {{"input_ids", EG_DTYPE_I64, 2, {2, 3}, ids},
                           {"attention_mask", EG_DTYPE_I64, 2, {2, 3}, mask},
                           {"position_ids", EG_DTYPE_I64, 2, {2, 3}, positions}};
  const eg_tensor some[] = {{"unknown", EG_DTYPE_F32, 1, {0}, NULL}, {"input_ids", EG_DTYPE_I32, 2, {2, 3}, narrow}};
  const eg_tensor *outputs;
  size_t n;
  float logits[2 * 3 * API_VOCABULARY];
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runner = make_runner(fixture, model);
  api_must(fixture->ctx, eg_runner_run(runner, all, 3, &outputs, &n));
  assert_int_equal(n, 1);
  assert_string_equal(outputs[0].name, "logits");
  assert_int_equal(outputs[0].rank, 3);
  assert_int_equal(outputs[0].dims[2], API_VOCABULARY);
  memcpy(logits, outputs[0].data, sizeof logits);
  for (size_t i = 0; i < EGI_COUNT(logits); i++) assert_true(isfinite(logits[i]));
  api_must(fixture->ctx, eg_runner_run(runner, some, 2, &outputs, &n));
  assert_memory_equal(outputs[0].data, logits, sizeof logits);
  assert_non_null(strstr(fixture->warning, "unknown"));
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

/* Positions that begin again, and no mask: documents that do not see each other. */
static void test_packed_row(void **state) {
  api_fixture *fixture = *state;
  static const int64_t ids[] = {1, 2, 3, 4, 5, 6}, positions[] = {0, 1, 0, 1, 2, 0};
  static const int64_t starts[] = {0, 2, 5, 6};
  const eg_tensor row[] = {{"input_ids", EG_DTYPE_I64, 2, {1, 6}, ids},
                           {"position_ids", EG_DTYPE_I64, 2, {1, 6}, positions}};
  const eg_tensor other[] = {row[0], {"position_ids", EG_DTYPE_I64, 2, {1, 5}, positions}};
  const eg_tensor *outputs;
  size_t n;
  float logits[6 * API_VOCABULARY];
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runner = make_runner(fixture, model);
  fixture->warning[0] = '\0';
  api_must(fixture->ctx, eg_runner_run(runner, row, 2, &outputs, &n));
  assert_string_equal(fixture->warning, "");
  assert_int_equal(outputs[0].dims[1], 6);
  memcpy(logits, outputs[0].data, sizeof logits);
  for (int d = 0; d < 3; d++) {
    const eg_tensor alone = {"input_ids", EG_DTYPE_I64, 2, {1, starts[d + 1] - starts[d]}, ids + starts[d]};
    api_must(fixture->ctx, eg_runner_run(runner, &alone, 1, &outputs, &n));
    const float *expected = outputs[0].data;
    for (int64_t i = 0; i < alone.dims[1] * API_VOCABULARY; i++)
      assert_true(fabs((double)logits[starts[d] * API_VOCABULARY + i] - (double)expected[i]) <= 1e-5);
  }
  assert_int_equal(eg_runner_run(runner, other, 2, &outputs, &n), EG_ERROR_SHAPE);
  api_expect_error(fixture->ctx, "a position for each token");
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

static void test_refused(void **state) {
  api_fixture *fixture = *state;
  static const int64_t ids[] = {1, 2, 3, 4}, far[] = {1, 2, 3, 99}, restart[] = {1, 0, 1, 0};
  static const float real[] = {1, 2, 3, 4};
  const struct {
    eg_tensor inputs[2];
    size_t n;
    eg_status status;
    const char *part;
  } cases[] = {
      {{{"position_ids", EG_DTYPE_I64, 2, {1, 4}, ids}}, 1, EG_ERROR_ARGUMENT, "\"input_ids\" is missing"},
      {{{"input_ids", EG_DTYPE_F32, 2, {1, 4}, real}}, 1, EG_ERROR_ARGUMENT, "\"input_ids\" has type float"},
      {{{"input_ids", EG_DTYPE_I64, 1, {4}, ids}}, 1, EG_ERROR_ARGUMENT, "1 dimensions"},
      {{{"input_ids", EG_DTYPE_I64, 2, {1, -4}, ids}}, 1, EG_ERROR_ARGUMENT, "input_ids"},
      {{{"input_ids", EG_DTYPE_I64, 2, {0, 4}, ids}}, 1, EG_ERROR_ARGUMENT, "no tokens"},
      {{{"input_ids", EG_DTYPE_I64, 2, {1, 4}, NULL}}, 1, EG_ERROR_ARGUMENT, "no data"},
      {{{"input_ids", EG_DTYPE_I64, 2, {1, 4}, far}}, 1, EG_ERROR_DATA, "Gather"},
      {{{"input_ids", EG_DTYPE_I64, 2, {1, 4}, ids}, {"attention_mask", EG_DTYPE_I64, 2, {2, 2}, ids}},
       2,
       EG_ERROR_SHAPE,
       "attention_mask"},
      {{{"input_ids", EG_DTYPE_I64, 2, {1, 4}, ids}, {"position_ids", EG_DTYPE_I64, 2, {1, 4}, restart}},
       2,
       EG_ERROR_UNSUPPORTED,
       "packed"},
  };
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runner = make_runner(fixture, model);
  const eg_tensor *outputs;
  size_t n;
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    assert_int_equal(eg_runner_run(runner, cases[i].inputs, cases[i].n, &outputs, &n), cases[i].status);
    api_expect_error(fixture->ctx, cases[i].part);
  }
  assert_int_equal(eg_runner_run(runner, NULL, 1, &outputs, &n), EG_ERROR_ARGUMENT);
  const eg_tensor good = {"input_ids", EG_DTYPE_I64, 2, {1, 4}, ids};
  api_must(fixture->ctx, eg_runner_run(runner, &good, 1, &outputs, &n)); /* still usable */
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

/* keys = past and new ones; what a mask and positions hold is given out again. */
static const char cached_model[] =
    "<ir_version: 10, opset_import: [\"\": 23]>\n"
    "g (int64[batch,sequence] input_ids, bool[batch,total] attention_mask, int64[batch,sequence] position_ids,\n"
    "   float[batch,past,2] past_keys)\n"
    "=> (float[batch,total,2] keys, int64[batch,total] seen, int64[batch,sequence] at)\n"
    "<float[4,2] table = {0,0,1,1,2,2,3,3}, int64 none = {0}>\n"
    "{ e = Gather (table, input_ids) keys = Concat <axis = 1> (past_keys, e)\n"
    "  seen = Cast <to = 7> (attention_mask) at = Add (position_ids, none) }";

static eg_runner *make_from_text(api_fixture *fixture, const char *text, eg_model **out_model) {
  char path[256];
  egi_module *module;
  api_must(fixture->ctx, egi_module_parse(fixture->ctx, text, strlen(text), &module));
  api_must(fixture->ctx, egi_infer_graph(module->graphs[0]));
  api_path(fixture, path, sizeof path, "cached.onnx");
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, out_model));
  return make_runner(fixture, *out_model);
}

/* Runs three tokens behind `n_past` ones; `expected` are their positions. */
static void check_cached(api_fixture *fixture, eg_runner *runner, int64_t n_past, const int64_t *mask,
                         const int64_t *expected) {
  static const int64_t ids[] = {1, 2, 3};
  static const float past[] = {7, 7, 8, 8};
  const eg_tensor inputs[] = {{"input_ids", EG_DTYPE_I64, 2, {1, 3}, ids},
                              {"past_keys", EG_DTYPE_F32, 3, {1, n_past, 2}, past},
                              {"attention_mask", EG_DTYPE_I64, 2, {1, n_past + 3}, mask}};
  const eg_tensor *outputs;
  size_t n;
  api_must(fixture->ctx, eg_runner_run(runner, inputs, mask ? 3 : 2, &outputs, &n));
  assert_int_equal(outputs[0].dims[1], n_past + 3);
  for (int64_t i = 0; i < n_past + 3; i++) assert_int_equal(((const int64_t *)outputs[1].data)[i], mask ? mask[i] : 1);
  assert_memory_equal(outputs[2].data, expected, 3 * sizeof *expected);
}

/* One layer of attention behind a cache, causal by positions. */
static const char attention_model[] =
    "<ir_version: 10, opset_import: [\"\": 23]>\n"
    "g (int64[batch,sequence] input_ids, int64[batch,sequence] position_ids, float[batch,1,past,2] past_key,\n"
    "   float[batch,1,past,2] past_value)\n"
    "=> (float[batch,1,sequence,2] y, float[batch,1,total,2] present_key, float[batch,1,total,2] present_value)\n"
    "<float[6,2] table = {1,2,-1,3,2,-2,0,1,-3,1,2,2}, int64 zero = {0}, int64 one = {1}, int64 two = {2},\n"
    " int64[1] a0 = {0}, int64[1] a1 = {1}, int64[2] a12 = {1,2}>\n"
    "{ e = Gather (table, input_ids) q = Unsqueeze (e, a1) v = Neg (q)\n"
    "  present_key = Concat <axis = 2> (past_key, q) present_value = Concat <axis = 2> (past_value, v)\n"
    "  s = Shape (present_key) n = Gather (s, two) j = Range (zero, n, one) j2 = Unsqueeze (j, a0)\n"
    "  i = Unsqueeze (position_ids, a12) i2 = Transpose <perm = [0,1,3,2]> (i) seen = LessOrEqual (j2, i2)\n"
    "  y = Attention (q, present_key, present_value, seen) }";

/* The last two tokens behind the cache of the first three give what they give in the whole row; a row whose positions
 * are not those of its tokens keeps its own mask. */
static void test_attention_behind_caches(void **state) {
  api_fixture *fixture = *state;
  static const int64_t ids[] = {1, 4, 2, 5, 3}, positions[] = {0, 1, 2, 3, 4}, all[] = {4, 4, 4, 4, 4};
  static const float none[1];
  float whole[10], keys[6], values[6];
  const eg_tensor *outputs;
  size_t n;
  eg_model *model;
  eg_runner *runner = make_from_text(fixture, attention_model, &model);
  const eg_tensor plain[] = {{"input_ids", EG_DTYPE_I64, 2, {1, 5}, ids}};
  api_must(fixture->ctx, eg_runner_run(runner, plain, 1, &outputs, &n));
  assert_int_equal(n, 1); /* no cache is given: none is given back */
  memcpy(whole, outputs[0].data, sizeof whole);
  const eg_tensor first[] = {{"input_ids", EG_DTYPE_I64, 2, {1, 3}, ids},
                             {"past_key", EG_DTYPE_F32, 4, {1, 1, 0, 2}, none},
                             {"past_value", EG_DTYPE_F32, 4, {1, 1, 0, 2}, none}};
  api_must(fixture->ctx, eg_runner_run(runner, first, 3, &outputs, &n));
  assert_int_equal(n, 3);
  for (int i = 0; i < 6; i++) assert_true(fabs((double)((const float *)outputs[0].data)[i] - (double)whole[i]) < 1e-6);
  memcpy(keys, outputs[1].data, sizeof keys);
  memcpy(values, outputs[2].data, sizeof values);
  const eg_tensor second[] = {{"input_ids", EG_DTYPE_I64, 2, {1, 2}, ids + 3},
                              {"position_ids", EG_DTYPE_I64, 2, {1, 2}, positions + 3},
                              {"past_key", EG_DTYPE_F32, 4, {1, 1, 3, 2}, keys},
                              {"past_value", EG_DTYPE_F32, 4, {1, 1, 3, 2}, values}};
  api_must(fixture->ctx, eg_runner_run(runner, second, 4, &outputs, &n));
  for (int i = 0; i < 4; i++)
    assert_true(fabs((double)((const float *)outputs[0].data)[i] - (double)whole[6 + i]) < 1e-6);
  const eg_tensor open[] = {plain[0], {"position_ids", EG_DTYPE_I64, 2, {1, 5}, all}};
  api_must(fixture->ctx, eg_runner_run(runner, open, 2, &outputs, &n)); /* each query sees every key */
  assert_true(fabs((double)((const float *)outputs[0].data)[0] - (double)whole[0]) > 1e-3);
  api_must(fixture->ctx, eg_runner_run(runner, plain, 1, &outputs, &n));
  assert_memory_equal(outputs[0].data, whole, sizeof whole);
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

static void test_caches(void **state) {
  api_fixture *fixture = *state;
  static const int64_t ids[] = {1, 2, 3}, first[] = {0, 1, 2}, later[] = {2, 3, 4}, wrong[] = {1, 2, 1};
  static const int64_t all[] = {1, 1, 1, 1, 1}, right[] = {0, 0, 0, 1, 1}, positions[] = {0, 0, 1};
  eg_model *model;
  eg_runner *runner = make_from_text(fixture, cached_model, &model);
  const eg_tensor inputs[] = {{"input_ids", EG_DTYPE_I64, 2, {1, 3}, ids},
                              {"attention_mask", EG_DTYPE_I64, 2, {1, 3}, wrong}};
  const eg_tensor *outputs;
  size_t n;
  check_cached(fixture, runner, 0, NULL, first);
  check_cached(fixture, runner, 2, NULL, later);
  check_cached(fixture, runner, 2, all, later);
  check_cached(fixture, runner, 2, right, positions);                     /* a row padded on the left */
  api_must(fixture->ctx, eg_runner_run(runner, inputs, 1, &outputs, &n)); /* no cache given: an empty one is made */
  assert_int_equal(outputs[0].dims[1], 3);
  assert_int_equal(eg_runner_run(runner, inputs, 2, &outputs, &n), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "\"attention_mask\" holds 2, the model takes bool");
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

typedef struct tokens {
  int32_t list[256];
  size_t n, limit;
} tokens;

static int keep(void *userdata, int32_t token) {
  tokens *t = userdata;
  t->list[t->n++] = token;
  return t->limit > 0 && t->n == t->limit;
}

/* The most likely next token by a plain run. */
static int32_t best_next(api_fixture *fixture, eg_runner *runner, const int32_t *ids, int64_t n) {
  const eg_tensor input = {"input_ids", EG_DTYPE_I32, 2, {1, n}, ids};
  const eg_tensor *outputs;
  size_t n_outputs;
  int32_t best = 0;
  api_must(fixture->ctx, eg_runner_run(runner, &input, 1, &outputs, &n_outputs));
  const float *row = (const float *)outputs[0].data + (n - 1) * API_VOCABULARY;
  for (int32_t v = 1; v < API_VOCABULARY; v++)
    if (row[v] > row[best]) best = v;
  return best;
}

static void test_generate(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runner = make_runner(fixture, model);
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  int32_t ids[80] = {3, 1, 4};
  tokens got = {.n = 0};
  options.max_tokens = 70; /* over the first planned length */
  api_must(fixture->ctx, eg_runner_generate(runner, ids, 3, &options, keep, &got));
  assert_int_equal(got.n, 70);
  for (size_t i = 0; i < got.n; i++) {
    if (i < 5 || i > 58) assert_int_equal(best_next(fixture, runner, ids, (int64_t)(3 + i)), got.list[i]);
    ids[3 + i] = got.list[i];
  }
  const int32_t stop = got.list[4];
  size_t first = 0;
  while (got.list[first] != stop) first++;
  tokens stopped = {.n = 0};
  options.stop_ids = &stop;
  options.n_stop_ids = 1;
  api_must(fixture->ctx, eg_runner_generate(runner, ids, 3, &options, keep, &stopped));
  assert_int_equal(stopped.n, first);
  tokens limited = {.limit = 2};
  options.n_stop_ids = 0;
  api_must(fixture->ctx, eg_runner_generate(runner, ids, 3, &options, keep, &limited));
  assert_int_equal(limited.n, 2);
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

/* Caches grow from call to call, and a prompt of several pieces leaves in them what token by token does. */
static void test_generate_in_pieces(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runner = make_runner(fixture, model);
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  int32_t ids[400];
  for (int32_t i = 0; i < 400; i++) ids[i] = (i * i + 3 * i) % API_VOCABULARY;
  static const size_t lengths[] = {1, 16, 17, 65, 300, 2};
  options.max_tokens = 3;
  for (size_t k = 0; k < EGI_COUNT(lengths); k++) {
    size_t n = lengths[k];
    int32_t kept[3] = {ids[n], ids[n + 1], ids[n + 2]};
    tokens got = {.n = 0};
    api_must(fixture->ctx, eg_runner_generate(runner, ids, n, &options, keep, &got));
    assert_int_equal(got.n, 3);
    for (size_t i = 0; i < 3; i++) {
      assert_int_equal(best_next(fixture, runner, ids, (int64_t)(n + i)), got.list[i]);
      ids[n + i] = got.list[i];
    }
    memcpy(&ids[n], kept, sizeof kept);
  }
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

static void test_generate_refused(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_runner *runner = make_runner(fixture, model);
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  static const int32_t good[] = {1}, far[] = {1, API_VOCABULARY}, negative[] = {-1};
  tokens got = {.n = 0};
  assert_int_equal(eg_runner_generate(runner, good, 0, &options, keep, &got), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_runner_generate(runner, NULL, 1, &options, keep, &got), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_runner_generate(runner, good, 1, &options, NULL, &got), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_runner_generate(runner, far, 2, &options, keep, &got), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "position 2");
  assert_int_equal(eg_runner_generate(runner, negative, 1, &options, keep, &got), EG_ERROR_DATA);
  options.temperature = -1.0;
  assert_int_equal(eg_runner_generate(runner, good, 1, &options, keep, &got), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "temperature");
  options.temperature = 1.0;
  options.top_p = 0.0;
  assert_int_equal(eg_runner_generate(runner, good, 1, &options, keep, &got), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "top_p");
  assert_int_equal(got.n, 0);
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_made_inputs, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_packed_row, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_refused, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_caches, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_attention_behind_caches, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_generate, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_generate_in_pieces, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_generate_refused, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
