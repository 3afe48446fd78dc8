/* Training for codes: the loss falls; gradients are those of the rounded matrix, taken as if it had not been rounded;
 * what is exported holds the codes that were trained against; what is refused. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/blockwise.h"
#include "base/integer_codes.h"
#include "train/train.h"

static const char *const models[] = {"llama/model.dynamo-op23-sdpa.onnx", "gpt2/model.torchscript-op17-eager.onnx",
                                     "qwen3/model.genai-float32.onnx", "llama/model.dynamo-op23-sdpa-float16.onnx"};

typedef struct form {
  eg_qat qat;
  uint32_t block;
  int is_asymmetric;
} form;
static const form forms[] = {{EG_QAT_INT4, 0, 0},  {EG_QAT_INT4, 16, 1}, {EG_QAT_INT8, 0, 0},
                             {EG_QAT_INT8, 32, 1}, {EG_QAT_NF4, 0, 0},   {EG_QAT_NF4, 32, 0}};

static eg_model *load(eg_context *ctx, const char *path) {
  eg_model *model;
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  return model;
}

static eg_model *load_data(eg_context *ctx, const char *name) {
  char path[512];
  (void)snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  return load(ctx, path);
}

static eg_trainer_options options_of(const form *f, bool is_full) {
  eg_trainer_options options = api_options();
  options.qat = f->qat;
  options.qat_block = f->block;
  options.qat_asymmetric = f->is_asymmetric;
  options.full = is_full;
  options.learning_rate = is_full ? 3e-3 : 1e-2;
  return options;
}

static size_t count_nodes(const egi_graph *graph, egi_op op, const char *name) {
  size_t n = 0;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    n += node->op == op && (name == NULL || (node->op_name != NULL && strcmp(node->op_name, name) == 0));
  }
  return n;
}

/* ---- exports ---- */

static double loss_of(eg_context *ctx, const eg_model *model, const char *adapter, const eg_dataset *dataset) {
  egi_evaluate_options options = {.adapter = adapter, .tokens = 64};
  double loss = 0.0;
  api_must(ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  return loss;
}

static void expect_near(double a, double b, double tolerance, const char *what) {
  if (!(fabs(a - b) <= tolerance * fabs(b))) fail_msg("%s: %.9g, %.9g wanted", what, a, b);
}

/* The product that a file of that form has, and no more of what it came from than rounded activations. */
static void check_stored(const eg_model *model, const form *f) {
  const egi_graph *graph = model->module->graphs[0];
  size_t n = count_nodes(graph, EGI_OP_Linear, NULL), n_rounded = count_nodes(graph, EGI_OP_FakeQuantize, NULL);
  assert_true(n >= 4);
  if (f->qat != EG_QAT_INT8) assert_int_equal(n_rounded, 0);
}

static void check_adapter(api_fixture *fixture, eg_trainer *trainer, const eg_model *model, eg_dataset *dataset,
                          const form *f) {
  char adapter[256], path[256];
  double trained = 0.0;
  eg_context *ctx = fixture->ctx;
  api_path(fixture, adapter, sizeof adapter, "adapter");
  api_path(fixture, path, sizeof path, "merged.onnx");
  api_must(ctx, eg_trainer_evaluate(trainer, dataset, &trained));
  api_must(ctx, eg_trainer_save_adapter(trainer, adapter));
  expect_near(loss_of(ctx, model, adapter, dataset), trained, 1e-6, "the adapter read back");
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_MERGED;
  api_must(ctx, eg_model_export_adapter(model, adapter, &options, path));
  eg_model *merged = load(ctx, path);
  check_stored(merged, f);
  expect_near(loss_of(ctx, merged, NULL, dataset), trained, 1e-6, "the merged model");
  eg_model_destroy(merged);
  options.stored = EG_QUANT_NF4; /* other codes than those that it was trained for */
  assert_int_equal(eg_model_export_adapter(model, adapter, &options, path), EG_ERROR_ARGUMENT);
  (void)remove(path);
}

static void check_model(api_fixture *fixture, eg_trainer *trainer, eg_dataset *dataset, const form *f) {
  char path[256];
  double trained = 0.0;
  api_path(fixture, path, sizeof path, "trained.onnx");
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &trained));
  api_must(fixture->ctx, eg_trainer_save_model(trainer, path));
  eg_model *model = load(fixture->ctx, path);
  check_stored(model, f);
  expect_near(loss_of(fixture->ctx, model, NULL, dataset), trained, 1e-6, "the saved model");
  eg_model_destroy(model);
  (void)remove(path);
}

/* Ten steps of training lower the loss, and what is written is what was trained. */
static void check_run(api_fixture *fixture, const char *name, const form *f, bool is_full) {
  eg_model *model = load_data(fixture->ctx, name);
  eg_dataset *dataset = api_dataset(fixture->ctx, 6, 12);
  eg_trainer_options options = options_of(f, is_full);
  eg_trainer *trainer;
  double before = 0.0, after = 0.0;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  assert_true(count_nodes(trainer->machine.graph, EGI_OP_FakeQuantize, NULL) >= 4);
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &before));
  for (int step = 0; step < 10; step++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_evaluate(trainer, dataset, &after));
  if (!(after < before - 0.05)) fail_msg("%s: loss %g after %g", name, after, before);
  if (is_full)
    check_model(fixture, trainer, dataset, f);
  else
    check_adapter(fixture, trainer, model, dataset, f);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_runs(void **state) {
  for (size_t i = 0; i < EGI_COUNT(models); i++)
    for (size_t k = 0; k < EGI_COUNT(forms); k++)
      for (int is_full = 0; is_full < 2; is_full++) check_run(*state, models[i], &forms[k], is_full != 0);
}

/* ---- gradients ---- */

typedef struct matrix {
  const char *path;
  int64_t rows, columns, rank;
  float *a, *b; /* of the adapter */
  double scale;
} matrix;

/* The values of a parameter, or its gradient, by its name's end. */
static float *read_named(eg_trainer *trainer, const char *name, bool is_gradient) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t count = 1;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    if (!egi_has_suffix(info.name, name)) continue;
    for (uint32_t d = 0; d < info.rank; d++) count *= (size_t)info.dims[d];
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    assert_int_equal((is_gradient ? eg_trainer_read_gradient : eg_trainer_read_parameter)(trainer, i, values, count),
                     EG_OK);
    return values;
  }
  fail_msg("no parameter is named %s", name);
  return NULL;
}

static void randomise(eg_trainer *trainer) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t count = 1;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    for (uint32_t d = 0; d < info.rank; d++) count *= (size_t)info.dims[d];
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    for (size_t k = 0; k < count; k++) values[k] = 0.1F * (float)egi_random_normal(5, i, k);
    assert_int_equal(eg_trainer_write_parameter(trainer, i, values, count), EG_OK);
    free(values);
  }
}

/* W + scale · B · A in blocks of a row, rounded; the layout is the weight's own, [out, in]. */
static void round_matrix(const matrix *m, const egi_fake_quantize *fake, const float *w, float *out) {
  for (int64_t row = 0; row < m->rows; row++)
    for (int64_t column = 0; column < m->columns; column++) {
      double sum = 0.0;
      for (int64_t r = 0; r < m->rank; r++)
        sum += (double)m->b[row * m->rank + r] * (double)m->a[r * m->columns + column];
      out[row * m->columns + column] = (float)((double)w[row * m->columns + column] + m->scale * sum);
    }
  int64_t width = fake->is_nf4 ? m->rows * m->columns : m->columns;
  for (int64_t first = 0; first < m->rows * m->columns; first += width)
    for (int64_t at = first; at < first + width; at += fake->block) {
      size_t n = (size_t)(first + width - at < fake->block ? first + width - at : fake->block);
      uint8_t codes[128];
      if (fake->is_nf4) {
        float scale = egi_four_bit_encode(EGI_FOUR_BIT_NF4, out + at, n, codes);
        egi_four_bit_decode(EGI_FOUR_BIT_NF4, codes, 0, n, scale, out + at);
        continue;
      }
      const egi_integer_block block = egi_integer_block_make(out + at, n, fake->bits, fake->is_symmetric);
      for (size_t i = 0; i < n; i++)
        out[at + (int64_t)i] = (egi_integer_code(&block, out[at + (int64_t)i]) - block.zero) * block.scale;
    }
}

/* Puts the rounded matrix into the other model; [out, in] files only. */
static void put_matrix(eg_model *other, const eg_trainer *trainer, egi_node_id fake, const matrix *m) {
  const egi_graph *graph = trainer->evaluation;
  egi_fake_quantize rounding;
  bool is_transposed = false;
  egi_value_id base = graph->nodes[graph->values[graph->nodes[fake].inputs[0]].producer].inputs[0];
  egi_value_id weight = egi_weight_below(graph, base, &is_transposed);
  assert_true(weight != 0 && egi_fake_quantize_read(&graph->nodes[fake], &rounding));
  const char *name = graph->module->weights[graph->values[weight].index].name;
  for (uint32_t i = 1; i < other->module->n_weights; i++) {
    egi_weight *to = &other->module->weights[i];
    if (strcmp(to->name, name) != 0) continue;
    size_t n = (size_t)(m->rows * m->columns);
    float *w = EGI_NEW(&other->module->arena, float, n), *rounded = EGI_NEW(&other->module->arena, float, n);
    assert_true(w && rounded && to->dtype == EG_DTYPE_F32);
    for (size_t k = 0; k < n; k++) { /* the file's bytes need not be aligned */
      size_t from = is_transposed ? k % (size_t)m->columns * (size_t)m->rows + k / (size_t)m->columns : k;
      memcpy(&w[k], to->bytes.data + from * sizeof *w, sizeof *w);
    }
    round_matrix(m, &rounding, w, rounded);
    memcpy(w, rounded, n * sizeof *w);
    for (size_t k = 0; is_transposed && k < n; k++)
      w[k % (size_t)m->columns * (size_t)m->rows + k / (size_t)m->columns] = rounded[k];
    to->bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)w, .size_bytes = n * sizeof *w};
    return;
  }
  fail_msg("no weight is named %s", name);
}

static matrix find_matrix(const eg_trainer *trainer, egi_node_id fake) {
  const egi_graph *graph = trainer->evaluation;
  const egi_node *sum = &graph->nodes[graph->values[graph->nodes[fake].inputs[0]].producer];
  assert_int_equal(sum->op, EGI_OP_AddMatMul);
  matrix m = {.path = sum->scope, .scale = (double)egi_node_float(sum, "alpha", 1.0F)};
  const egi_value *b = &graph->values[sum->inputs[1]], *a = &graph->values[sum->inputs[2]];
  assert_true(egi_dim_value(graph->module->dims, b->dims[0], &m.rows));
  assert_true(egi_dim_value(graph->module->dims, b->dims[1], &m.rank));
  assert_true(egi_dim_value(graph->module->dims, a->dims[1], &m.columns));
  return m;
}

static void expect_close(const float *values, const double *wanted, size_t n, const char *what) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < n; i++) {
    difference += ((double)values[i] - wanted[i]) * ((double)values[i] - wanted[i]);
    size += wanted[i] * wanted[i];
  }
  assert_true(size > 0.0);
  if (!(sqrt(difference) <= 1e-4 * sqrt(size))) fail_msg("%s: off by %g of %g", what, sqrt(difference), sqrt(size));
}

/* dB = scale · dW · Aᵀ and dA = scale · Bᵀ · dW, where dW is the gradient of the rounded matrix. */
static void check_gradient(eg_trainer *trainer, eg_trainer *full, const matrix *m) {
  char name[256];
  (void)snprintf(name, sizeof name, "%s.weight", m->path);
  float *dw = read_named(full, name, true);
  (void)snprintf(name, sizeof name, "%s.lora_A.weight", m->path);
  float *da = read_named(trainer, name, true);
  (void)snprintf(name, sizeof name, "%s.lora_B.weight", m->path);
  float *db = read_named(trainer, name, true);
  double *wanted_a = calloc((size_t)(m->rank * m->columns), sizeof *wanted_a);
  double *wanted_b = calloc((size_t)(m->rows * m->rank), sizeof *wanted_b);
  assert_true(wanted_a && wanted_b);
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t r = 0; r < m->rank; r++)
      for (int64_t k = 0; k < m->columns; k++) {
        double g = m->scale * (double)dw[i * m->columns + k];
        wanted_b[i * m->rank + r] += g * (double)m->a[r * m->columns + k];
        wanted_a[r * m->columns + k] += g * (double)m->b[i * m->rank + r];
      }
  expect_close(da, wanted_a, (size_t)(m->rank * m->columns), name);
  expect_close(db, wanted_b, (size_t)(m->rows * m->rank), name);
  free(dw);
  free(da);
  free(db);
  free(wanted_a);
  free(wanted_b);
}

static void check_gradients(eg_context *ctx, const form *f) {
  enum { MOST = 64 };
  eg_model *model = load_data(ctx, models[0]), *other = load_data(ctx, models[0]);
  eg_dataset *dataset = api_dataset(ctx, 6, 12);
  eg_trainer_options options = options_of(f, false);
  eg_trainer *trainer, *full;
  eg_step_report a, b;
  matrix list[MOST];
  size_t n = 0;
  options.clip = 0.0;
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  randomise(trainer);
  for (egi_node_id id = 1; id < trainer->evaluation->n_nodes; id++) {
    char name[256];
    if (trainer->evaluation->nodes[id].op != EGI_OP_FakeQuantize) continue;
    assert_true(n < MOST);
    list[n] = find_matrix(trainer, id);
    (void)snprintf(name, sizeof name, "%s.lora_A.weight", list[n].path);
    list[n].a = read_named(trainer, name, false);
    (void)snprintf(name, sizeof name, "%s.lora_B.weight", list[n].path);
    list[n].b = read_named(trainer, name, false);
    put_matrix(other, trainer, id, &list[n++]);
  }
  assert_true(n >= 4);
  options.qat = EG_QAT_NONE;
  options.full = 1;
  api_must(ctx, eg_trainer_create(other, dataset, &options, &full));
  api_must(ctx, eg_trainer_step(trainer, &a));
  api_must(ctx, eg_trainer_step(full, &b));
  expect_near(a.loss, b.loss, 1e-5, "loss with rounded matrices");
  for (size_t i = 0; i < n; i++) {
    check_gradient(trainer, full, &list[i]);
    free(list[i].a);
    free(list[i].b);
  }
  eg_trainer_destroy(trainer);
  eg_trainer_destroy(full);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  eg_model_destroy(other);
}

static void test_gradients(void **state) {
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(forms); i++)
    if (forms[i].qat != EG_QAT_INT8) check_gradients(fixture->ctx, &forms[i]);
}

/* ---- options ---- */

static void expect_refused(eg_context *ctx, const eg_model *model, eg_dataset *dataset,
                           const eg_trainer_options *options, const char *part) {
  eg_trainer *trainer;
  eg_status status = eg_trainer_create((eg_model *)(uintptr_t)model, dataset, options, &trainer);
  if (status == EG_OK) fail_msg("taken, though %s", part);
  api_expect_error(ctx, part);
}

static void test_refused(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load_data(fixture->ctx, models[0]);
  eg_dataset *dataset = api_dataset(fixture->ctx, 4, 12);
  eg_trainer_options options = options_of(&(form){EG_QAT_INT4, 48, 0}, false);
  expect_refused(fixture->ctx, model, dataset, &options, "48");
  options = options_of(&(form){EG_QAT_NF4, 64, 1}, false);
  expect_refused(fixture->ctx, model, dataset, &options, "nf4");
  options = options_of(&(form){(eg_qat)9, 0, 0}, false);
  expect_refused(fixture->ctx, model, dataset, &options, "qat");
  options = options_of(&forms[0], false);
  options.dropout = 0.1;
  expect_refused(fixture->ctx, model, dataset, &options, "dropout");
  options = options_of(&forms[0], false);
  options.init = EG_LORA_INIT_PISSA;
  expect_refused(fixture->ctx, model, dataset, &options, "pissa");
  options = options_of(&forms[0], false);
  options.quant = EG_QUANT_NF4;
  expect_refused(fixture->ctx, model, dataset, &options, "quant");
  eg_model_destroy(model);
  model = load_data(fixture->ctx, "qwen3_moe/model.dynamo-op23-sdpa-all.onnx");
  options = options_of(&forms[0], false);
  options.target_parameters = "mlp.experts.gate_up_proj";
  expect_refused(fixture->ctx, model, dataset, &options, "experts");
  eg_model_destroy(model);
  model = load_data(fixture->ctx, "llama/model.genai-int4.onnx"); /* codes already */
  options = options_of(&forms[0], false);
  expect_refused(fixture->ctx, model, dataset, &options, "stored quantised");
  eg_model_destroy(model);
  eg_dataset_destroy(dataset);
}

/* An adapter that is continued keeps its codes; other ones are a contradiction. */
static void test_continued(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  char adapter[256];
  eg_model *model = load_data(ctx, models[1]);
  eg_dataset *dataset = api_dataset(ctx, 6, 12);
  eg_trainer_options options = options_of(&forms[1], false);
  eg_trainer *trainer;
  double saved = 0.0, again = 0.0;
  api_path(fixture, adapter, sizeof adapter, "adapter");
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (int step = 0; step < 3; step++) api_must(ctx, eg_trainer_step(trainer, NULL));
  api_must(ctx, eg_trainer_evaluate(trainer, dataset, &saved));
  api_must(ctx, eg_trainer_save_adapter(trainer, adapter));
  eg_trainer_destroy(trainer);
  options = api_options();
  options.init_adapter = adapter;
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(ctx, eg_trainer_evaluate(trainer, dataset, &again));
  expect_near(again, saved, 1e-9, "the continued adapter");
  eg_trainer_destroy(trainer);
  options.qat = EG_QAT_INT8;
  expect_refused(ctx, model, dataset, &options, "int4");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_runs, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_gradients, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_refused, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_continued, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
