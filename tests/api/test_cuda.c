/* Trainers and runners on a CUDA device beside those on the CPU: the same numbers, nothing allocated in a step, nothing
 * left behind. 77 where there is no device. */
#include "support_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_STEPS = 4 };

typedef struct course {
  double losses[N_STEPS];
  float *parameters, *gradients;
  size_t n;
} course;

static double relative_error(const float *a, const float *b, size_t n) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < n; i++) {
    difference += pow((double)a[i] - (double)b[i], 2);
    size += pow((double)b[i], 2);
  }
  return size > 0.0 ? sqrt(difference / size) : sqrt(difference);
}

/* N_STEPS steps; gradients are those of the first. */
static course walk(api_fixture *fixture, eg_model *model, const eg_trainer_options *options) {
  eg_dataset *dataset = api_dataset(fixture->ctx, 7, 20);
  eg_trainer *trainer;
  course c = {.n = 0};
  api_must(fixture->ctx, eg_trainer_create(model, dataset, options, &trainer));
  for (int i = 0; i < N_STEPS; i++) {
    eg_step_report report;
    api_must(fixture->ctx, eg_trainer_step(trainer, &report));
    c.losses[i] = report.loss;
    if (i == 0) c.gradients = api_read(trainer, true, &c.n);
  }
  c.parameters = api_read(trainer, false, &c.n);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  return c;
}

static void drop(course *c) {
  free(c->parameters);
  free(c->gradients);
}

static void expect_equal(const course *a, const course *b) {
  assert_memory_equal(a->losses, b->losses, sizeof a->losses);
  assert_int_equal(a->n, b->n);
  assert_memory_equal(a->gradients, b->gradients, a->n * sizeof(float));
  assert_memory_equal(a->parameters, b->parameters, a->n * sizeof(float));
}

static void expect_close(const char *name, const course *here, const course *there, double tolerance) {
  assert_int_equal(here->n, there->n);
  double gradient = relative_error(there->gradients, here->gradients, here->n);
  double parameter = relative_error(there->parameters, here->parameters, here->n);
  for (int i = 0; i < N_STEPS; i++)
    if (!(fabs(here->losses[i] - there->losses[i]) <= tolerance * fabs(here->losses[i])))
      fail_msg("%s: loss %d is %.9g, not %.9g", name, i, there->losses[i], here->losses[i]);
  if (!(gradient <= tolerance)) fail_msg("%s: gradients differ by %.3g", name, gradient);
  if (!(parameter <= 10.0 * tolerance)) fail_msg("%s: parameters differ by %.3g", name, parameter);
}

typedef enum variant_kind { PLAIN, NF4, FULL, PADDED, ACCUMULATED, EIGHT_BIT, DROPOUT, UNFUSED, VARIANT_COUNT } variant;
static const char *const variant_names[VARIANT_COUNT] = {"adapters",    "nf4",   "full",    "padded",
                                                         "accumulated", "8 bit", "dropout", "no fuse"};

static eg_trainer_options options_of(variant v, const char *device) {
  eg_trainer_options options = api_options();
  options.device = device;
  if (v == NF4) options.quant = EG_QUANT_NF4;
  if (v == FULL) options.full = 1;
  if (v == PADDED) options.packing = EG_PACKING_OFF;
  if (v == ACCUMULATED) options.accumulate = 3;
  if (v == EIGHT_BIT) options.optimizer = EG_OPTIMIZER_ADAMW_8BIT;
  if (v == DROPOUT) options.dropout = 0.2;
  if (v == UNFUSED) options.no_fuse = 1;
  return options;
}

static void compare_variant(void **state, variant v) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_trainer_options cpu = options_of(v, "cpu"), cuda = options_of(v, "cuda");
  course here = walk(fixture, model, &cpu), there = walk(fixture, model, &cuda), again = walk(fixture, model, &cuda);
  expect_equal(&there, &again);
  expect_close(variant_names[v], &here, &there, 1e-4);
  drop(&here);
  drop(&there);
  drop(&again);
  eg_model_destroy(model);
}

static void test_adapters(void **state) {
  compare_variant(state, PLAIN);
}
static void test_nf4(void **state) {
  compare_variant(state, NF4);
}
static void test_full(void **state) {
  compare_variant(state, FULL);
}
static void test_padded(void **state) {
  compare_variant(state, PADDED);
}
static void test_accumulated(void **state) {
  compare_variant(state, ACCUMULATED);
}
static void test_eight_bit(void **state) {
  compare_variant(state, EIGHT_BIT);
}
static void test_dropout(void **state) {
  compare_variant(state, DROPOUT);
}
static void test_no_fuse(void **state) {
  compare_variant(state, UNFUSED);
}

/* Keeping, recomputing and moving to the host give the same bits. */
static void test_checkpoints(void **state) {
  static const eg_checkpoint kinds[] = {EG_CHECKPOINT_OFF, EG_CHECKPOINT_RECOMPUTE, EG_CHECKPOINT_OFFLOAD};
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  course courses[EGI_COUNT(kinds)];
  for (size_t i = 0; i < EGI_COUNT(kinds); i++) {
    eg_trainer_options options = options_of(PLAIN, "cuda");
    options.checkpoint = kinds[i];
    courses[i] = walk(fixture, model, &options);
    if (i > 0) expect_equal(&courses[0], &courses[i]);
  }
  for (size_t i = 0; i < EGI_COUNT(kinds); i++) drop(&courses[i]);
  eg_model_destroy(model);
}

/* In narrow types the loss goes down. */
static void test_narrow(void **state) {
  static const eg_dtype dtypes[] = {EG_DTYPE_BF16, EG_DTYPE_F16};
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_trainer_options cpu = options_of(FULL, "cpu");
  course here = walk(fixture, model, &cpu);
  for (size_t i = 0; i < EGI_COUNT(dtypes); i++) {
    eg_trainer_options options = options_of(FULL, "cuda");
    options.dtype = dtypes[i];
    course there = walk(fixture, model, &options);
    assert_true(there.losses[N_STEPS - 1] < there.losses[0]);
    assert_true(fabs(there.losses[0] - here.losses[0]) <= 0.02 * here.losses[0]);
    drop(&there);
  }
  drop(&here);
  eg_model_destroy(model);
}

static uint64_t free_bytes(eg_context *ctx) {
  const egi_backend *backend = NULL;
  egi_device_facts facts;
  api_must(ctx, egi_backend_cuda(ctx, &backend));
  api_must(ctx, backend->describe(ctx, 0, &facts));
  return facts.free_bytes;
}

/* Steps that are not waited for end where reported ones do, and take no memory of host or device after the first two.
 */
static void test_steps_without_a_report(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 7, 20);
  eg_trainer_options options = options_of(ACCUMULATED, "cuda");
  float *parameters[2];
  size_t n = 0;
  for (int is_late = 0; is_late < 2; is_late++) {
    uint64_t allocations = 0, device_bytes = 0;
    eg_trainer *trainer;
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
    for (int i = 0; i < 40; i++) {
      eg_step_report report;
      api_must(fixture->ctx, eg_trainer_step(trainer, is_late ? NULL : &report));
      if (i == 2) allocations = egi_allocation_count(fixture->ctx), device_bytes = free_bytes(fixture->ctx);
    }
    assert_int_equal(egi_allocation_count(fixture->ctx), allocations);
    assert_int_equal(free_bytes(fixture->ctx), device_bytes);
    parameters[is_late] = api_read(trainer, false, &n);
    eg_trainer_destroy(trainer);
  }
  assert_memory_equal(parameters[0], parameters[1], n * sizeof(float));
  free(parameters[0]);
  free(parameters[1]);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* A second trainer beside the first, and one that does not fit between them. */
static void test_trainers_side_by_side(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 7, 20);
  eg_trainer_options options = options_of(PLAIN, "cuda"), small = options;
  eg_trainer *first, *second, *none = NULL;
  eg_step_report a, b;
  small.memory_budget = 1000;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &first));
  assert_int_equal(eg_trainer_create(model, dataset, &small, &none), EG_ERROR_BUDGET);
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &second));
  for (int i = 0; i < N_STEPS; i++) {
    api_must(fixture->ctx, eg_trainer_step(first, &a));
    api_must(fixture->ctx, eg_trainer_step(second, &b));
    assert_true(a.loss == b.loss && a.gradient_norm == b.gradient_norm);
  }
  eg_trainer_destroy(first);
  eg_trainer_destroy(second);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Others hold nearly all of the device: that is said, with what was planned, and afterwards all is well. */
static void test_memory_that_others_hold(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = api_model(fixture, ctx);
  eg_dataset *dataset = api_dataset(ctx, 3, 20);
  eg_trainer_options options = options_of(PLAIN, "cuda");
  const egi_backend *backend = NULL;
  egi_device *device = NULL;
  eg_trainer *trainer = NULL;
  void *memory = NULL;
  options.memory_budget = UINT64_MAX;
  api_must(ctx, egi_backend_cuda(ctx, &backend));
  api_must(ctx, backend->open(ctx, &device));
  size_t size_bytes = (size_t)free_bytes(ctx) - (16u << 20); /* a trainer's staging alone is more */
  api_must(ctx, backend->allocate(device, EGI_PURPOSE_STEP, size_bytes, &memory));
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_MEMORY);
  api_expect_error(ctx, "cudaMalloc");
  api_expect_error(ctx, "planned are");
  backend->release(device, EGI_PURPOSE_STEP, memory, size_bytes);
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(ctx, eg_trainer_step(trainer, NULL));
  eg_trainer_destroy(trainer);
  backend->close(device);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_trainers_leave_nothing_behind(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = options_of(PLAIN, "cuda");
  uint64_t after_first = 0;
  for (int i = 0; i < 200; i++) {
    eg_trainer *trainer;
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
    for (int k = 0; k < (i == 0 ? 3 : i % 3); k++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
    eg_trainer_destroy(trainer);
    if (i == 2) after_first = free_bytes(fixture->ctx);
  }
  assert_true(free_bytes(fixture->ctx) + (4u << 20) >= after_first);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_forward(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  int64_t ids[20];
  float *here = NULL;
  for (int i = 0; i < 20; i++) ids[i] = (7 * i + 3) % API_VOCABULARY;
  const eg_tensor input = {.name = "input_ids", .dtype = EG_DTYPE_I64, .rank = 2, .dims = {1, 20}, .data = ids};
  for (int is_cuda = 0; is_cuda < 2; is_cuda++) {
    eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
    eg_runner *runner;
    const eg_tensor *outputs;
    size_t n = 0;
    options.device = is_cuda ? "cuda" : "cpu";
    api_must(fixture->ctx, eg_runner_create(model, &options, &runner));
    for (int i = 0; i < 3; i++) api_must(fixture->ctx, eg_runner_run(runner, &input, 1, &outputs, &n));
    size_t count = (size_t)(outputs[0].dims[0] * outputs[0].dims[1] * outputs[0].dims[2]);
    if (!is_cuda) {
      here = malloc(count * sizeof *here);
      assert_non_null(here);
      memcpy(here, outputs[0].data, count * sizeof *here);
    } else {
      double error = relative_error(outputs[0].data, here, count);
      if (!(error <= 1e-5)) fail_msg("logits differ by %.3g", error);
    }
    eg_runner_destroy(runner);
  }
  free(here);
  eg_model_destroy(model);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(test_##name, api_setup, api_teardown)
      TEST(forward),
      TEST(adapters),
      TEST(full),
      TEST(nf4),
      TEST(padded),
      TEST(accumulated),
      TEST(eight_bit),
      TEST(dropout),
      TEST(no_fuse),
      TEST(checkpoints),
      TEST(narrow),
      TEST(steps_without_a_report),
      TEST(trainers_side_by_side),
      TEST(memory_that_others_hold),
      TEST(trainers_leave_nothing_behind)};
#undef TEST
  eg_context *ctx = NULL;
  const egi_backend *backend = NULL;
  egi_device_facts facts;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  if (eg_context_create(NULL, &ctx) != EG_OK) return 1;
  eg_status status = egi_backend_cuda(ctx, &backend);
  if (status == EG_OK) status = backend->describe(ctx, 0, &facts);
  if (status != EG_OK) printf("skipped: %s\n", eg_context_error(ctx));
  eg_context_destroy(ctx);
  return status == EG_OK ? cmocka_run_group_tests_name("cuda", tests, NULL, NULL) : 77;
}
