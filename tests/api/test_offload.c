/* The optimizer's moments in host memory: every step is the same to the bit, the plan counts them as pinned and not
 * among the device's states, no more than two parts of them are on the device at a time, and a run is saved and goes
 * on. */
#include "support_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/train.h"

enum { N_STEPS = 4 };

typedef struct setting {
  const char *model;
  eg_trainer_options options;
} setting;

static setting make_setting(int kind) {
  setting s = {"llama/model.dynamo-op23-sdpa.onnx", api_options()};
  s.options.weight_decay = 0.1;
  s.options.accumulate = 2;
  s.options.full = kind == 1;
  if (kind == 2) s.options.lora_plus = 4.0; /* a segment for each matrix */
  if (kind >= 3) s.options.optimizer = EG_OPTIMIZER_ADAMW_8BIT;
  if (kind == 3) s.options.rank = 256; /* moments of codes beside such of floats */
  if (kind == 4) s.options.full = 1;
  return s;
}

static eg_trainer *make_trainer(eg_context *ctx, const setting *s, bool is_offloaded, eg_dataset *dataset) {
  char path[512];
  eg_model *model;
  eg_trainer *trainer;
  eg_trainer_options options = s->options;
  options.offload_optimizer = is_offloaded;
  (void)snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, s->model);
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  eg_model_destroy(model);
  return trainer;
}

static void expect_same_state(api_fixture *fixture, eg_trainer *one, eg_trainer *other) {
  const egi_module *module = one->machine.module;
  size_t n, other_n;
  float *a = api_read(one, false, &n), *b = api_read(other, false, &other_n);
  (void)fixture;
  assert_int_equal(n, other_n);
  assert_memory_equal(a, b, n * sizeof *a);
  for (int k = EGI_POOL_MOMENT1; k <= EGI_POOL_MOMENT2; k++) {
    egi_state_pool pool = (egi_state_pool)k;
    assert_memory_equal(egi_store_pool(one->machine.store, pool), egi_store_pool(other->machine.store, pool),
                        (size_t)egi_module_pool_bytes(module, pool));
  }
  free(a);
  free(b);
}

/* Where the moments are, and how much of them passes the device at a time. */
static void check_memory(eg_context *ctx, const eg_trainer *kept, const eg_trainer *moved) {
  const egi_module *module = moved->machine.module;
  uint64_t moments = egi_module_pool_bytes(module, EGI_POOL_MOMENT1) + egi_module_pool_bytes(module, EGI_POOL_MOMENT2);
  egi_trainer_memory before, after;
  egi_plan_bytes plan;
  egi_plan_transfers transfers;
  egi_trainer_bytes(kept, &kept->lanes, &before);
  egi_trainer_bytes(moved, &moved->lanes, &after);
  assert_int_equal(before.pinned_states, 0);
  assert_int_equal(after.pinned_states, moments);
  assert_int_equal(after.states + moments, before.states);
  assert_true(egi_bytes_in_use(ctx, EGI_PURPOSE_PINNED) >= moments);
  egi_plan_get_bytes(moved->optimizer_plan, &plan);
  egi_plan_get_transfers(moved->optimizer_plan, &transfers);
  assert_int_equal(transfers.reloaded_bytes, moments);
  assert_true(transfers.n_reloads >= 4 && transfers.n_reloads % 2 == 0);
  assert_true(transfers.n_slots <= 4); /* two parts of two moments */
  assert_true(plan.transient < moments);
}

static void test_steps(void **state) {
  api_fixture *fixture = *state;
  for (int kind = 0; kind < 5; kind++) {
    const setting s = make_setting(kind);
    eg_dataset *dataset = api_dataset(fixture->ctx, 7, 20);
    eg_trainer *kept = make_trainer(fixture->ctx, &s, false, dataset);
    eg_trainer *moved = make_trainer(fixture->ctx, &s, true, dataset);
    check_memory(fixture->ctx, kept, moved);
    for (int step = 0; step < N_STEPS; step++) {
      eg_step_report a, b;
      api_must(fixture->ctx, eg_trainer_step(kept, &a));
      api_must(fixture->ctx, eg_trainer_step(moved, &b));
      assert_memory_equal(&a.loss, &b.loss, sizeof a.loss);
      assert_memory_equal(&a.gradient_norm, &b.gradient_norm, sizeof a.gradient_norm);
    }
    expect_same_state(fixture, kept, moved);
    eg_trainer_destroy(kept);
    eg_trainer_destroy(moved);
    eg_dataset_destroy(dataset);
  }
}

/* A state that was saved with moments on the device is one for moments on the host, and the other way round. */
static void test_resume(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  for (int kind = 0; kind < 4; kind += 3)
    for (int is_offloaded = 0; is_offloaded < 2; is_offloaded++) {
      char path[256];
      const setting s = make_setting(kind);
      eg_dataset *dataset = api_dataset(ctx, 7, 20);
      eg_trainer *first = make_trainer(ctx, &s, is_offloaded != 0, dataset);
      eg_trainer *second = make_trainer(ctx, &s, is_offloaded == 0, dataset);
      api_path(fixture, path, sizeof path, "state.safetensors");
      for (int step = 0; step < 2; step++) api_must(ctx, eg_trainer_step(first, NULL));
      api_must(ctx, eg_trainer_save_state(first, path));
      api_must(ctx, eg_trainer_load_state(second, path));
      for (int step = 0; step < 2; step++) {
        api_must(ctx, eg_trainer_step(first, NULL));
        api_must(ctx, eg_trainer_step(second, NULL));
      }
      expect_same_state(fixture, first, second);
      eg_trainer_destroy(first);
      eg_trainer_destroy(second);
      eg_dataset_destroy(dataset);
    }
}

/* A host budget that they do not fit in is refused. */
static void test_budget(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  setting s = make_setting(0);
  eg_dataset *dataset = api_dataset(ctx, 7, 20);
  eg_trainer *trainer;
  eg_model *model = NULL;
  api_must(ctx, eg_model_load(ctx, EGI_TEST_DATA "/llama/model.dynamo-op23-sdpa.onnx", NULL, &model));
  s.options.offload_optimizer = 1;
  s.options.host_budget = 1000;
  assert_int_equal(eg_trainer_create(model, dataset, &s.options, &trainer), EG_ERROR_BUDGET);
  api_expect_error(ctx, "host budget");
  eg_model_destroy(model);
  eg_dataset_destroy(dataset);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_steps, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_resume, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_budget, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
