/* Plans as artefacts: what they say holds while steps run, nothing is allocated for them, a trainer that is given one
 * follows it bit by bit on any number of threads, and one for something else is refused with the reason. */
#include "support_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

static int append(void *userdata, const void *bytes, size_t size_bytes) {
  egi_text_append(userdata, bytes, size_bytes);
  return 0;
}

/* The plan as JSON; released with json_decref(). With a path it is a file as well. */
static json_t *plan_of(eg_context *ctx, eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                       const char *path) {
  egi_text text;
  json_t *root;
  egi_text_init(&text, ctx);
  api_must(ctx, eg_trainer_plan(model, dataset, options, append, &text));
  api_must(ctx, egi_json_parse(ctx, "plan", egi_text_string(&text), text.length, &root));
  if (path != NULL) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text.data, 1, text.length, file), text.length);
    assert_int_equal(fclose(file), 0);
  }
  egi_text_free(&text);
  return root;
}

static double number_at(const json_t *root, const char *object, const char *key) {
  const json_t *from = object != NULL ? json_object_get(root, object) : root;
  const json_t *value = json_object_get(from, key);
  if (!json_is_number(value)) fail_msg("\"%s\" is missing", key);
  return json_number_value(value);
}

static eg_model *bundled(eg_context *ctx) {
  eg_model *model;
  api_must(ctx, eg_model_load(ctx, EGI_TEST_DATA "/../../models/bundled.onnx", NULL, &model));
  return model;
}

/* ---- what is said ---- */

static void check_peak(eg_context *ctx, eg_model *model, uint32_t tokens, const char *directory) {
  eg_dataset *dataset = api_dataset(ctx, 6, 61);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  options.tokens = tokens;
  options.memory_budget = UINT64_MAX;
  json_t *plan = plan_of(ctx, model, dataset, &options, NULL);
  double planned = number_at(plan, NULL, "anonymous_bytes");
  json_decref(plan);
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(ctx, eg_trainer_step(trainer, NULL));
  api_must(ctx, eg_trainer_step(trainer, NULL));
  api_must(ctx, eg_trainer_save_adapter(trainer, directory));
  double peak = (double)egi_bytes_peak(ctx);
  if (!(peak >= 0.99 * planned && peak <= 1.01 * planned)) fail_msg("planned %.0f, in use %.0f", planned, peak);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void the_peak_is_the_planned_one(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = api_context(fixture, 2);
  check_peak(ctx, bundled(ctx), 256, fixture->directory);
  eg_context_destroy(ctx);
  ctx = api_context(fixture, 1);
  check_peak(ctx, bundled(ctx), 64, fixture->directory);
  eg_context_destroy(ctx);
}

static void terms_add_up(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_trainer_options options = api_options();
  static const char *const terms[] = {"weights",           "quantised_weights", "adapters",  "gradients", "optimizer",
                                      "saved_activations", "workspace",         "constants", "staging"};
  json_t *plan = plan_of(fixture->ctx, model, NULL, &options, NULL);
  double sum = 0.0, largest = 0.0;
  for (size_t i = 0; i < EGI_COUNT(terms); i++) {
    double bytes = number_at(plan, "bytes", terms[i]);
    sum += bytes;
    if (bytes > largest) largest = bytes;
  }
  assert_true(number_at(plan, NULL, "total_bytes") >= sum && number_at(plan, NULL, "total_bytes") <= sum);
  const char *name = json_string_value(json_object_get(plan, "largest_term"));
  double named = number_at(plan, "bytes", name);
  assert_true(named >= largest && named <= largest);
  assert_true(number_at(plan, "micro_batch", "flops") > 0.0 && number_at(plan, "micro_batch", "seconds") > 0.0);
  json_decref(plan);
  eg_model_destroy(model);
}

static void a_plan_allocates_nothing_of_it(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = api_context(fixture, 1);
  eg_model *model = api_model(fixture, ctx);
  eg_trainer_options options = api_options();
  options.tokens = 1u << 19;
  options.memory_budget = UINT64_MAX;
  json_t *plan = plan_of(ctx, model, NULL, &options, NULL);
  double total = number_at(plan, NULL, "total_bytes");
  json_decref(plan);
  if (!((double)egi_bytes_peak(ctx) <= 0.25 * total))
    fail_msg("%zu bytes for a plan of %.0f", egi_bytes_peak(ctx), total);
  options.memory_budget = 1u << 20;
  egi_text text;
  egi_text_init(&text, ctx);
  fixture->n_rungs = 0;
  assert_int_equal(eg_trainer_plan(model, NULL, &options, append, &text), EG_ERROR_BUDGET);
  assert_in_range(fixture->n_rungs, 1,
                  4 + 2 * 4); /* 4 stages, then 2 with 2 to 16 tiles: nothing for a host without room */
  api_expect_error(ctx, "at least");
  egi_text_free(&text);
  eg_model_destroy(model);
  eg_context_destroy(ctx);
}

static void a_faster_device_takes_less_time(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx);
  eg_trainer_options options = api_options();
  char path[192];
  egi_text text;
  json_t *plan = plan_of(ctx, model, NULL, &options, NULL);
  double usual = number_at(plan, "micro_batch", "seconds");
  json_decref(plan);
  api_write(fixture, "fast.json",
            "{\"name\": \"fast\", \"flops_per_s\": {\"f32\": 1e15}, \"memory_bytes_per_s\": 1e13, \"launch_s\": 1e-9}");
  options.device_description = api_path(fixture, path, sizeof path, "fast.json");
  plan = plan_of(ctx, model, NULL, &options, NULL);
  assert_true(number_at(plan, "micro_batch", "seconds") < 0.5 * usual);
  assert_string_equal(json_string_value(json_object_get(json_object_get(plan, "device"), "name")), "fast");
  json_decref(plan);
  api_write(fixture, "fast.json", "{\"memory_bytes_per_s\": 0}");
  egi_text_init(&text, ctx);
  assert_int_equal(eg_trainer_plan(model, NULL, &options, append, &text), EG_ERROR_FORMAT);
  api_expect_error(ctx, "\"memory_bytes_per_s\" is not above 0");
  api_write(fixture, "fast.json", "{\"memory\": 5}");
  assert_int_equal(eg_trainer_plan(model, NULL, &options, append, &text), EG_ERROR_FORMAT);
  api_expect_error(ctx, "\"memory\" is not known");
  egi_text_free(&text);
  eg_model_destroy(model);
}

/* ---- what is followed ---- */

/* A plan that recomputes: half of what keeping everything takes for activations. */
static json_t *tight_plan(eg_context *ctx, eg_model *model, eg_dataset *dataset, eg_trainer_options options,
                          const char *path) {
  options.memory_budget = UINT64_MAX;
  json_t *plan = plan_of(ctx, model, dataset, &options, NULL);
  double total = number_at(plan, NULL, "total_bytes"), saved = number_at(plan, "bytes", "saved_activations");
  json_decref(plan);
  options.memory_budget = (uint64_t)(total - 0.25 * saved);
  return plan_of(ctx, model, dataset, &options, path);
}

static float *train(api_fixture *fixture, int n_threads, const eg_trainer_options *options, uint32_t *out_rung,
                    size_t *out_count) {
  eg_context *ctx = api_context(fixture, n_threads);
  eg_model *model = api_model(fixture, ctx);
  eg_dataset *dataset = api_dataset(ctx, 6, 61);
  eg_trainer *trainer;
  api_must(ctx, eg_trainer_create(model, dataset, options, &trainer));
  for (int i = 0; i < 3; i++) api_must(ctx, eg_trainer_step(trainer, NULL));
  float *values = api_read(trainer, false, out_count);
  *out_rung = trainer->rung;
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  eg_context_destroy(ctx);
  return values;
}

static void a_plan_is_followed(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx);
  eg_dataset *dataset = api_dataset(ctx, 6, 61);
  eg_trainer_options options = api_options();
  char path[192];
  uint32_t rung = 0;
  size_t count = 0, again_count = 0;
  options.tokens = 256;
  api_path(fixture, path, sizeof path, "plan.json");
  json_t *plan = tight_plan(ctx, model, dataset, options, path);
  double planned = number_at(plan, "decisions", "rung");
  assert_true(planned > 0.0);
  options.memory_budget = UINT64_MAX;
  float *kept = train(fixture, 1, &options, &rung, &count);
  assert_int_equal(rung, 0);
  options.plan = path;
  for (int n_threads = 1; n_threads <= 3; n_threads++) {
    float *values = train(fixture, n_threads, &options, &rung, &again_count);
    assert_int_equal(rung, (uint32_t)planned);
    assert_int_equal(again_count, count);
    assert_memory_equal(values, kept, count * sizeof *kept);
    free(values);
  }
  free(kept);
  json_t *again = plan_of(ctx, model, dataset, &options, NULL);
  assert_true(json_equal(json_object_get(again, "hash"), json_object_get(plan, "hash")));
  json_decref(again);
  json_decref(plan);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void a_saved_state_names_its_plan(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx);
  eg_dataset *dataset = api_dataset(ctx, 6, 61);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  egi_safetensors *file;
  char path[192];
  json_t *plan = plan_of(ctx, model, dataset, &options, NULL);
  const char *hash = json_string_value(json_object_get(plan, "hash"));
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(ctx, eg_trainer_save_state(trainer, api_path(fixture, path, sizeof path, "state.safetensors")));
  api_must(ctx, egi_safetensors_open(ctx, path, &file));
  const egi_safetensor *saved = egi_safetensors_find(file, "trainer.plan");
  assert_non_null(saved);
  assert_int_equal(saved->size_bytes, strlen(hash));
  assert_memory_equal(saved->data, hash, strlen(hash));
  egi_safetensors_close(file);
  json_decref(plan);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void a_plan_without_data_serves_any(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx);
  eg_trainer_options options = api_options();
  char path[192];
  uint32_t rung = 0;
  size_t count = 0;
  options.tokens = 256;
  json_t *plan = plan_of(ctx, model, NULL, &options, api_path(fixture, path, sizeof path, "plan.json"));
  assert_int_equal(json_array_size(json_object_get(plan, "shapes")), 1);
  json_decref(plan);
  options.plan = path;
  free(train(fixture, 1, &options, &rung, &count));
  eg_model_destroy(model);
}

/* ---- what is refused ---- */

static void refuse(eg_context *ctx, eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                   const char *reason) {
  eg_trainer *trainer;
  assert_int_equal(eg_trainer_create(model, dataset, options, &trainer), EG_ERROR_DATA);
  api_expect_error(ctx, reason);
}

static void plans_for_something_else_are_refused(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx), *other = bundled(ctx);
  eg_dataset *dataset = api_dataset(ctx, 6, 61), *longer = api_dataset(ctx, 16, 61);
  eg_trainer_options options = api_options();
  char path[192];
  options.tokens = 64;
  json_decref(plan_of(ctx, model, dataset, &options, api_path(fixture, path, sizeof path, "plan.json")));
  options.plan = path;
  eg_trainer_options wrong = options;
  wrong.rank++;
  refuse(ctx, model, dataset, &wrong, "the plan is for rank");
  wrong = options;
  wrong.tokens = 128;
  refuse(ctx, model, dataset, &wrong, "the plan is for tokens 64, not 128");
  wrong = options;
  wrong.packing = EG_PACKING_OFF;
  refuse(ctx, model, dataset, &wrong, "the plan is for packed true, not false");
  wrong = options;
  wrong.no_fuse = 1;
  refuse(ctx, model, dataset, &wrong, "the plan is for no_fuse");
  refuse(ctx, other, dataset, &options, "plan.json: the plan is for");
  eg_trainer_options padded = options;
  padded.packing = EG_PACKING_OFF;
  padded.plan = NULL;
  eg_dataset *short_ones = api_dataset(ctx, 2, 9);
  json_decref(plan_of(ctx, model, short_ones, &padded, path));
  padded.plan = path;
  refuse(ctx, model, longer, &padded, "the plan has no shape for");
  eg_dataset_destroy(short_ones);
  eg_dataset_destroy(longer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(other);
  eg_model_destroy(model);
}

static void damaged_plans_are_refused(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx);
  eg_dataset *dataset = api_dataset(ctx, 6, 61);
  eg_trainer_options options = api_options();
  char path[192];
  api_path(fixture, path, sizeof path, "plan.json");
  static const char *const keys[] = {"engraft_plan", "options", "model", "graph", "shapes", "decisions", "hash"};
  for (size_t i = 0; i < EGI_COUNT(keys); i++) {
    eg_trainer *trainer;
    options.plan = NULL;
    json_t *plan = plan_of(ctx, model, dataset, &options, NULL);
    json_object_del(plan, keys[i]);
    assert_int_equal(json_dump_file(plan, path, 0), 0);
    json_decref(plan);
    options.plan = path;
    assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_DATA);
    api_expect_error(ctx, "plan.json: ");
  }
  options.plan = NULL;
  json_t *plan = plan_of(ctx, model, dataset, &options, NULL);
  json_object_set_new(json_object_get(plan, "decisions"), "tiles", json_integer(3));
  assert_int_equal(json_dump_file(plan, path, 0), 0);
  json_decref(plan);
  options.plan = path;
  refuse(ctx, model, dataset, &options, "plan.json: shapes or decisions are not those that the hash was made of");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, api_setup, api_teardown)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(the_peak_is_the_planned_one),
                                     TEST(terms_add_up),
                                     TEST(a_plan_allocates_nothing_of_it),
                                     TEST(a_faster_device_takes_less_time),
                                     TEST(a_plan_is_followed),
                                     TEST(a_saved_state_names_its_plan),
                                     TEST(a_plan_without_data_serves_any),
                                     TEST(plans_for_something_else_are_refused),
                                     TEST(damaged_plans_are_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
