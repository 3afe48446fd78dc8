/* Losses of documents, of tokens that see those behind them, and of embeddings, against PyTorch: five LoRA steps, first
 * gradients, final adapters and full-training gradients of tests/data/encoders (make_encoders.py); and data that does
 * not fit. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/io.h"

static const double loss_tolerance = 2e-5, gradient_tolerance = 1e-4, final_tolerance = 5e-5;
enum { N_STEPS = 5 };

typedef struct golden {
  api_fixture *fixture;
  egi_arena arena;
  egi_safetensors *reference;
  eg_model *model;
  eg_dataset *dataset;
  const char *task;
} golden;

static const char *in_task(const golden *g, const char *file) {
  static char path[512];
  snprintf(path, sizeof path, "%s/encoders/%s/%s", EGI_TEST_DATA, g->task, file);
  return path;
}

static void must(const golden *g, eg_status status) {
  if (status != EG_OK) fail_msg("%s: %s", g->task, eg_context_error(g->fixture->ctx));
}

static void open_task(golden *g, api_fixture *fixture, const char *task) {
  *g = (golden){.fixture = fixture, .task = task};
  egi_arena_init(&g->arena, fixture->ctx, EGI_PURPOSE_DATA);
  must(g, egi_safetensors_open(fixture->ctx, in_task(g, "ref.safetensors"), &g->reference));
  must(g, eg_model_load(fixture->ctx, in_task(g, "model.onnx"), NULL, &g->model));
  must(g, eg_dataset_load(fixture->ctx, in_task(g, "data.jsonl"), NULL, &g->dataset));
}

static void close_task(golden *g) {
  eg_dataset_destroy(g->dataset);
  eg_model_destroy(g->model);
  egi_safetensors_close(g->reference);
  egi_arena_clear(&g->arena);
}

static const float *find(golden *g, const char *prefix, const char *name, size_t *out_count) {
  const char *key = egi_arena_format(&g->arena, "%s%s", prefix, name);
  const egi_safetensor *tensor = egi_safetensors_find(g->reference, key);
  if (tensor == NULL) fail_msg("%s: the reference has no %s", g->task, key);
  float *copy = egi_arena_get(&g->arena, (size_t)tensor->size_bytes, 1);
  assert_non_null(copy);
  memcpy(copy, tensor->data, (size_t)tensor->size_bytes);
  *out_count = (size_t)tensor->size_bytes / sizeof *copy;
  return copy;
}

static double length_of(const float *values, const float *other, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++) {
    double value = (double)values[i] - (other != NULL ? (double)other[i] : 0.0);
    sum += value * value;
  }
  return sqrt(sum);
}

static double largest_of(golden *g, const char *prefix) {
  double largest = 0;
  for (size_t i = 0; i < egi_safetensors_count(g->reference); i++) {
    const egi_safetensor *tensor = egi_safetensors_at(g->reference, i);
    size_t count;
    if (!egi_has_prefix(tensor->name, prefix)) continue;
    const float *values = find(g, "", tensor->name, &count);
    largest = fmax(largest, length_of(values, NULL, count));
  }
  return largest;
}

/* What an exporter ties has another name, and zeros that it adds have none: the rest must agree. */
static void compare(golden *g, const eg_trainer *trainer, const char *prefix, bool is_gradient, double limit) {
  size_t n_parameters = eg_trainer_parameter_count(trainer), n_compared = 0;
  double floor = 1e-3 * largest_of(g, prefix);
  assert_true(floor > 0);
  for (size_t i = 0; i < n_parameters; i++) {
    eg_parameter_info info;
    size_t count, n = 1;
    must(g, eg_trainer_parameter_info(trainer, i, &info));
    for (uint32_t k = 0; k < info.rank; k++) n *= (size_t)info.dims[k];
    if (egi_safetensors_find(g->reference, egi_arena_format(&g->arena, "%s%s", prefix, info.name)) == NULL) continue;
    const float *wanted = find(g, prefix, info.name, &count);
    float *got = EGI_NEW(&g->arena, float, n);
    assert_int_equal(n, count);
    must(g, is_gradient ? eg_trainer_read_gradient(trainer, i, got, n) : eg_trainer_read_parameter(trainer, i, got, n));
    double error = length_of(got, wanted, n) / fmax(length_of(wanted, NULL, n), floor);
    if (!(error <= limit)) fail_msg("%s: %s%s is off by %.3g", g->task, prefix, info.name, error);
    n_compared++;
  }
  assert_true(n_compared > 0 && 3 * n_compared >= 2 * n_parameters);
}

static void start(golden *g, eg_trainer *trainer) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t count;
    must(g, eg_trainer_parameter_info(trainer, i, &info));
    const float *values = find(g, "lora.init.", info.name, &count);
    must(g, eg_trainer_write_parameter(trainer, i, values, count));
  }
}

static eg_trainer_options task_options(void) {
  eg_trainer_options options = EG_TRAINER_OPTIONS_INIT;
  options.rank = 2;
  options.alpha = 4;
  options.learning_rate = 5e-3;
  options.clip = 0.3;
  options.tokens = 512;
  options.n_steps = N_STEPS;
  return options;
}

static void agrees_with_pytorch(api_fixture *fixture, const char *task, int no_fuse) {
  golden g;
  eg_trainer *trainer;
  eg_step_report report;
  size_t count;
  double loss;
  open_task(&g, fixture, task);
  eg_trainer_options options = task_options();
  options.no_fuse = no_fuse;
  must(&g, eg_trainer_create(g.model, g.dataset, &options, &trainer));
  start(&g, trainer);
  const float *curve = find(&g, "lora.", "curve", &count);
  assert_int_equal(count, N_STEPS);
  must(&g, eg_trainer_evaluate(trainer, g.dataset, &loss));
  if (!(fabs(loss - (double)curve[0]) <= loss_tolerance * (double)curve[0]))
    fail_msg("%s: evaluation gives %g", task, loss);
  for (size_t step = 0; step < N_STEPS; step++) {
    must(&g, eg_trainer_step(trainer, &report));
    if (!(fabs(report.loss - (double)curve[step]) <= loss_tolerance * (double)curve[step]))
      fail_msg("%s: step %zu has a loss of %.8g, PyTorch %.8g", task, step + 1, report.loss, (double)curve[step]);
    if (step == 0) compare(&g, trainer, "lora.grad.", true, gradient_tolerance);
  }
  compare(&g, trainer, "lora.final.", false, final_tolerance);
  eg_trainer_destroy(trainer);
  options.full = 1;
  must(&g, eg_trainer_create(g.model, g.dataset, &options, &trainer));
  must(&g, eg_trainer_step(trainer, &report));
  double wanted = (double)find(&g, "", "loss", &count)[0];
  if (!(fabs(report.loss - wanted) <= loss_tolerance * wanted)) fail_msg("%s: the loss is %g", task, report.loss);
  compare(&g, trainer, "grad.", true, gradient_tolerance);
  eg_trainer_destroy(trainer);
  close_task(&g);
}

static const char *const tasks[] = {"classification", "multi-label", "regression", "decoder", "token",
                                    "masked",         "ranking",     "cosine",     "relative"};

static void test_golden(void **state) {
  for (size_t i = 0; i < EGI_COUNT(tasks); i++) agrees_with_pytorch(*state, tasks[i], 0);
}

static void test_golden_plain(void **state) {
  for (size_t i = 0; i < EGI_COUNT(tasks); i++) agrees_with_pytorch(*state, tasks[i], 1);
}

/* Micro-batches of one or two rows make the same step as one batch of all: a mean is over the step. */
static void test_accumulation(void **state) {
  static const char *const alone[] = {"classification", "multi-label", "regression", "decoder", "token", "cosine"};
  for (size_t i = 0; i < EGI_COUNT(alone); i++) {
    golden g;
    eg_trainer *trainer;
    eg_step_report report;
    size_t count;
    open_task(&g, *state, alone[i]);
    eg_trainer_options options = task_options();
    options.tokens = 26;
    options.n_steps = 0; /* one pass over the data */
    must(&g, eg_trainer_create(g.model, g.dataset, &options, &trainer));
    options.accumulate = (uint32_t)eg_trainer_step_count(trainer);
    eg_trainer_destroy(trainer);
    assert_true(options.accumulate > 1);
    must(&g, eg_trainer_create(g.model, g.dataset, &options, &trainer));
    start(&g, trainer);
    must(&g, eg_trainer_step(trainer, &report));
    double wanted = (double)find(&g, "lora.", "curve", &count)[0];
    if (!(fabs(report.loss - wanted) <= loss_tolerance * wanted)) fail_msg("%s: the loss is %g", g.task, report.loss);
    compare(&g, trainer, "lora.grad.", true, gradient_tolerance);
    eg_trainer_destroy(trainer);
    close_task(&g);
  }
}

/* The same documents through the interface instead of a file. */
static void test_examples(void **state) {
  api_fixture *fixture = *state;
  static const int32_t ids[3][4] = {{3, 4, 5, 6}, {7, 8, 9, 10}, {11, 12, 13, 14}};
  const eg_document documents[3] = {{ids[0], NULL, 4}, {ids[1], NULL, 3}, {ids[2], NULL, 4}};
  static const float numbers[2] = {2, 0.5F};
  eg_example examples[2] = {{documents, 1, NULL, numbers, 1, 1}, {documents + 1, 1, NULL, numbers, 1, 1}};
  golden g;
  eg_trainer *trainer;
  eg_dataset *dataset;
  eg_step_report report;
  open_task(&g, fixture, "classification");
  eg_trainer_options options = task_options();
  must(&g, eg_dataset_create_examples(fixture->ctx, examples, 2, &dataset));
  must(&g, eg_trainer_create(g.model, dataset, &options, &trainer));
  must(&g, eg_trainer_step(trainer, &report));
  assert_int_equal(report.n_targets, 2);
  assert_int_equal(report.n_tokens, 7);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  examples[1].n_documents = 2; /* one document here, two there */
  assert_int_equal(eg_dataset_create_examples(fixture->ctx, examples, 2, &dataset), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "example 2");
  examples[1] = (eg_example){documents + 1, 1, NULL, numbers + 1, 1, 1}; /* no whole number */
  assert_int_equal(eg_dataset_create_examples(fixture->ctx, examples, 2, &dataset), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "example 2: a class is a whole number");
  close_task(&g);
}

typedef struct misfit {
  const char *task, *data;
  eg_loss loss;
  const char *part;
} misfit;

static const misfit misfits[] = {
    {"classification", "{\"input_ids\":[3],\"label\":0}\n{\"input_ids\":[3],\"label\":3}", EG_LOSS_AUTO,
     "document 2: label 3 is outside the 3 classes"},
    {"classification", "{\"input_ids\":[3],\"label\":-1}", EG_LOSS_AUTO, "label -1 is outside the 3 classes"},
    {"classification", "{\"input_ids\":[3],\"label\":1.5}", EG_LOSS_CLASSIFICATION, "a class is one whole number"},
    {"classification", "{\"input_ids\":[3,4]}", EG_LOSS_AUTO, "gives 3 numbers for each document"},
    {"classification", "{\"input_ids\":[3,4]}", EG_LOSS_CLASSIFICATION, "the lines have no \"label\""},
    {"classification", "{\"input_ids\":[40],\"label\":1}", EG_LOSS_AUTO, "token 40 is outside the vocabulary of 40"},
    {"multi-label", "{\"input_ids\":[3],\"label\":[1,0,0]}", EG_LOSS_AUTO,
     "\"label\" has 3 numbers, the model gives 4"},
    {"classification", "{\"input_ids\":[4],\"label\":1}\n{\"input_ids\":[4],\"label\":1.5}", EG_LOSS_AUTO,
     "the model gives 3 numbers: \"label\" has to be as many, or the whole number of a class"},
    {"token", "{\"input_ids\":[4,5],\"labels\":[1,1],\"token_type_ids\":[1,2]}", EG_LOSS_AUTO,
     "document 1, position 2: token type 2 is outside the 2 types"},
    {"multi-label", "{\"input_ids\":[3],\"label\":[1,0,0,2]}", EG_LOSS_MULTI_LABEL, "label 2 is not in 0 … 1"},
    {"token", "{\"input_ids\":[3,4],\"labels\":[0,5]}", EG_LOSS_AUTO, "label 5 is outside the classes of 5"},
    {"masked", "{\"input_ids\":[3,4]}", EG_LOSS_AUTO, "each line needs \"labels\""},
    {"token", "{\"input_ids\":[3,4],\"label\":1}", EG_LOSS_AUTO, "no output \"logits\" [batch, classes]"},
    {"ranking", "{\"input_ids\":[3,4]}", EG_LOSS_AUTO, "needs \"anchor\" and \"positive\""},
    {"ranking", "{\"anchor\":[3],\"positive\":[4]}", EG_LOSS_COSINE, "\"sentence1\", \"sentence2\" and \"score\""},
    {"cosine", "{\"sentence1\":[3],\"sentence2\":[4],\"score\":1}", EG_LOSS_RANKING, "\"anchor\" and \"positive\""},
    {"classification", "{\"anchor\":[3],\"positive\":[4]}", EG_LOSS_CLASSIFICATION, "no labels"},
    {"token", "{\"anchor\":[3],\"positive\":[4]}", EG_LOSS_TOKEN, "no labels"},
};

static void test_misfits(void **state) {
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(misfits); i++) {
    char path[256];
    golden g;
    eg_dataset *dataset;
    eg_trainer *trainer;
    open_task(&g, fixture, misfits[i].task);
    eg_trainer_options options = task_options();
    options.loss = misfits[i].loss;
    api_write(fixture, "data.jsonl", misfits[i].data);
    must(&g, eg_dataset_load(fixture->ctx, api_path(fixture, path, sizeof path, "data.jsonl"), NULL, &dataset));
    eg_status status = eg_trainer_create(g.model, dataset, &options, &trainer);
    if (status != EG_ERROR_DATA)
      fail_msg("misfit %zu (%s) is taken, or %s", i, misfits[i].part, eg_status_text(status));
    api_expect_error(fixture->ctx, misfits[i].part);
    eg_dataset_destroy(dataset);
    close_task(&g);
  }
}

/* Rows of a batch are documents: none can be shared. */
static void test_packing_is_refused(void **state) {
  api_fixture *fixture = *state;
  golden g;
  eg_trainer *trainer;
  open_task(&g, fixture, "classification");
  eg_trainer_options options = task_options();
  options.packing = EG_PACKING_BFD;
  assert_int_equal(eg_trainer_create(g.model, g.dataset, &options, &trainer), EG_ERROR_UNSUPPORTED);
  api_expect_error(fixture->ctx, "cannot be packed");
  close_task(&g);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_golden, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_golden_plain, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_accumulation, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_examples, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_misfits, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_packing_is_refused, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
