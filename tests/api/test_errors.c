/* Mistakes of callers, data and adapters: each is found before the first step and named in one line. */
#include "support_api.h"

#include <stdio.h>
#include <string.h>

typedef struct bad_option {
  const char *part;
  void (*spoil)(eg_trainer_options *options);
  eg_status status;
} bad_option;

#define SPOIL(name, statement)                            \
  static void spoil_##name(eg_trainer_options *options) { \
    statement;                                            \
  }
SPOIL(rank, options->rank = 0)
SPOIL(alpha, options->alpha = -1)
SPOIL(targets, options->targets = NULL)
SPOIL(unknown_target, options->targets = "q_proj,nonsense")
SPOIL(empty_target, options->targets = "q_proj,")
SPOIL(rate, options->learning_rate = -1)
SPOIL(warmup, options->warmup = -0.1)
SPOIL(decay, options->weight_decay = -1)
SPOIL(beta1, options->beta1 = 1.0)
SPOIL(beta2, options->beta2 = -0.1)
SPOIL(epsilon, options->epsilon = 2.0)
SPOIL(clip, options->clip = -1.0)
SPOIL(tokens, options->tokens = 1)
SPOIL(accumulate, options->accumulate = 0)
SPOIL(epochs, options->n_steps = 0; options->n_epochs = 0.0)
SPOIL(device, options->device = "tpu")
SPOIL(dtype, options->dtype = EG_DTYPE_BF16)
SPOIL(budget, options->memory_budget = 1000)
SPOIL(adapter, options->init_adapter = "/nonexistent/adapter")
SPOIL(full, options->full = 1; options->init_adapter = "/nonexistent/adapter")

static const bad_option bad_options[] = {
    {"rank", spoil_rank, EG_ERROR_ARGUMENT},
    {"alpha", spoil_alpha, EG_ERROR_ARGUMENT},
    {"targets", spoil_targets, EG_ERROR_ARGUMENT},
    {"nonsense", spoil_unknown_target, EG_ERROR_ARGUMENT},
    {"\"\"", spoil_empty_target, EG_ERROR_ARGUMENT},
    {"learning_rate", spoil_rate, EG_ERROR_ARGUMENT},
    {"warmup", spoil_warmup, EG_ERROR_ARGUMENT},
    {"weight_decay", spoil_decay, EG_ERROR_ARGUMENT},
    {"beta1", spoil_beta1, EG_ERROR_ARGUMENT},
    {"beta2", spoil_beta2, EG_ERROR_ARGUMENT},
    {"epsilon", spoil_epsilon, EG_ERROR_ARGUMENT},
    {"clip", spoil_clip, EG_ERROR_ARGUMENT},
    {"tokens", spoil_tokens, EG_ERROR_ARGUMENT},
    {"accumulate", spoil_accumulate, EG_ERROR_ARGUMENT},
    {"n_epochs", spoil_epochs, EG_ERROR_ARGUMENT},
    {"tpu", spoil_device, EG_ERROR_UNSUPPORTED},
    {"bf16", spoil_dtype, EG_ERROR_UNSUPPORTED},
    {"budget", spoil_budget, EG_ERROR_BUDGET},
    {"/nonexistent/adapter", spoil_adapter, EG_ERROR_IO},
    {"init_adapter", spoil_full, EG_ERROR_ARGUMENT},
};

static void test_options(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 2, 10);
  for (size_t i = 0; i < EGI_COUNT(bad_options); i++) {
    eg_trainer_options options = api_options();
    eg_trainer *trainer = NULL;
    bad_options[i].spoil(&options);
    assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), bad_options[i].status);
    assert_null(trainer);
    api_expect_error(fixture->ctx, bad_options[i].part);
  }
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_vocabulary(void **state) {
  api_fixture *fixture = *state;
  static const int32_t good[] = {1, 2, 3}, far[] = {1, API_VOCABULARY, 3}, label[] = {1, 2, API_VOCABULARY};
  eg_document documents[] = {{good, NULL, 3}, {far, good, 3}};
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset;
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  api_must(fixture->ctx, eg_dataset_create(fixture->ctx, documents, 2, &dataset));
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "document 2, position 2: token 48");
  eg_dataset_destroy(dataset);
  documents[1] = (eg_document){good, label, 3};
  api_must(fixture->ctx, eg_dataset_create(fixture->ctx, documents, 2, &dataset));
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "document 2, position 3: label 48");
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* ---- adapters ---- */

enum { MAX_TENSORS = 8 };
typedef struct adapter {
  egi_safetensor tensors[MAX_TENSORS];
  size_t n;
  const char *config;
} adapter;

static const float zeros[4 * 64];

static void add(adapter *a, const char *name, int64_t rows, int64_t columns, eg_dtype dtype) {
  uint64_t size = dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_I32 ? 4 : 2;
  a->tensors[a->n++] = (egi_safetensor){.name = name,
                                        .dtype = dtype,
                                        .rank = 2,
                                        .dims = {rows, columns},
                                        .data = (const uint8_t *)zeros,
                                        .size_bytes = (uint64_t)(rows * columns) * size};
}

#define Q0 "base_model.model.model.layers.0.self_attn.q_proj"
#define Q1 "base_model.model.model.layers.1.self_attn.q_proj"
#define CONFIG(rest) "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4,\"target_modules\":[\"q_proj\"]" rest "}"

/* A right adapter but for one thing. */
static void make_adapter(adapter *a, int mistake) {
  *a = (adapter){.config = CONFIG("")};
  add(a, Q0 ".lora_A.weight", mistake == 1 ? 3 : 2, mistake == 2 ? 12 : 16, mistake == 3 ? EG_DTYPE_I32 : EG_DTYPE_F32);
  add(a, Q0 ".lora_B.weight", mistake == 4 ? 8 : 16, 2, EG_DTYPE_BF16);
  add(a, Q1 ".lora_A.weight", 2, 16, EG_DTYPE_F16);
  if (mistake != 5) add(a, Q1 ".lora_B.weight", 16, 2, EG_DTYPE_F32);
  if (mistake == 6) add(a, "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", 2, 16, EG_DTYPE_F32);
  if (mistake == 7) add(a, "base_model.model.lm_head.weight", 2, 16, EG_DTYPE_F32);
  if (mistake == 8) a->config = CONFIG(",\"use_dora\":true");
  if (mistake == 9) a->config = CONFIG(",\"lora_bias\":true");
  if (mistake == 10) a->config = "{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":[\"other\"]}";
  if (mistake == 11) a->config = CONFIG(",\"rank_pattern\":{\"layers.1.self_attn.q_proj\":3}");
  if (mistake == 12) a->n = 0; /* all are missing: more than one message spells out */
}

static const struct {
  eg_status status;
  const char *part;
} adapter_errors[] = {
    {EG_OK, ""},
    {EG_ERROR_DATA, Q0 ".lora_A.weight is [3,16], not [2,16]"},
    {EG_ERROR_DATA, Q0 ".lora_A.weight is [2,12], not [2,16]"},
    {EG_ERROR_DATA, Q0 ".lora_A.weight has type int32"},
    {EG_ERROR_DATA, Q0 ".lora_B.weight is [8,2], not [16,2]"},
    {EG_ERROR_DATA, Q1 ".lora_B.weight is missing"},
    {EG_ERROR_DATA, "layers.7.self_attn.q_proj.lora_A.weight fits no linear layer"},
    {EG_ERROR_DATA, "lm_head.weight fits no linear layer"},
    {EG_ERROR_UNSUPPORTED, "use_dora"},
    {EG_ERROR_UNSUPPORTED, "lora_bias"},
    {EG_ERROR_DATA, Q0 ".lora_A.weight fits no linear layer"},
    {EG_ERROR_DATA, Q1 ".lora_A.weight is [2,16], not [3,16]"},
    {EG_ERROR_DATA, Q0 ".lora_A.weight is missing"},
};

static void test_adapters(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 2, 10);
  for (int i = 0; i < (int)EGI_COUNT(adapter_errors); i++) {
    adapter a;
    eg_trainer_options options = api_options();
    eg_trainer *trainer = NULL;
    make_adapter(&a, i);
    api_write(fixture, "adapter_config.json", a.config);
    api_path(fixture, path, sizeof path, "adapter_model.safetensors");
    api_must(fixture->ctx, egi_safetensors_write(fixture->ctx, path, a.tensors, a.n));
    options.init_adapter = fixture->directory;
    eg_status status = eg_trainer_create(model, dataset, &options, &trainer);
    if (status != adapter_errors[i].status)
      fail_msg("adapter %d: status %d, %s", i, (int)status, eg_context_error(fixture->ctx));
    if (status != EG_OK) api_expect_error(fixture->ctx, adapter_errors[i].part);
    eg_trainer_destroy(trainer);
  }
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void test_null(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 2, 10);
  eg_trainer *trainer;
  eg_runner *runner;
  double loss;
  float value;
  eg_parameter_info info;
  assert_int_equal(eg_model_load(NULL, "x", NULL, &model), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_load(fixture->ctx, NULL, NULL, &model), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_load_memory(fixture->ctx, NULL, 0, NULL, NULL, &model), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_dataset_load(fixture->ctx, NULL, NULL, &dataset), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_dataset_create(fixture->ctx, NULL, 1, &dataset), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_create(model, NULL, NULL, &trainer), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_create(NULL, dataset, NULL, &trainer), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_step(NULL, NULL), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_runner_create(model, NULL, NULL), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_runner_create(NULL, NULL, &runner), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_report(model, NULL, NULL), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_parameter_count(NULL), 0);
  eg_trainer_destroy(NULL);
  eg_runner_destroy(NULL);
  eg_dataset_destroy(NULL);
  eg_model_destroy(NULL);
  eg_trainer_request_stop(NULL);
  api_must(fixture->ctx, eg_trainer_create(model, dataset, NULL, &trainer));
  assert_int_equal(eg_trainer_evaluate(trainer, NULL, &loss), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_parameter_info(trainer, 10000, &info), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_read_parameter(trainer, 0, &value, 1), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_trainer_read_gradient(trainer, 0, NULL, 1), EG_ERROR_ARGUMENT);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_options, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_vocabulary, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_adapters, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_null, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
