/* What a step moves: after the first every B (A's gradient goes through B, which is zero), after the second every A; of
 * routed experts those that had tokens. And how many adapters of each class there are. */
#include "support_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BOTH "mlp.experts.gate_up_proj,mlp.experts.down_proj"

typedef struct run {
  const char *file;
  eg_trainer *trainer;
  float *before, *after;
  size_t count;
} run;

static void start(api_fixture *fixture, const char *file, const char *parameters, run *r) {
  char path[512];
  eg_model *model;
  eg_dataset *dataset = api_dataset(fixture->ctx, 3, 20);
  eg_trainer_options options = api_options();
  options.target_parameters = parameters;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, file);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  *r = (run){.file = file};
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &r->trainer));
  r->before = api_read(r->trainer, false, &r->count);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static void step(api_fixture *fixture, run *r) {
  free(r->before);
  r->before = api_read(r->trainer, false, &r->count);
  api_must(fixture->ctx, eg_trainer_step(r->trainer, NULL));
  free(r->after);
  r->after = api_read(r->trainer, false, &r->count);
}

static void finish(run *r) {
  free(r->before);
  free(r->after);
  eg_trainer_destroy(r->trainer);
}

static bool has_moved(const run *r, size_t first, size_t count) {
  return memcmp(r->before + first, r->after + first, count * sizeof *r->before) != 0;
}

/* Columns of B [out, r·E] for which some row has moved, or rows of A [r·E, in]. */
static size_t count_moved(const run *r, size_t first, const int64_t dims[2], bool is_a) {
  size_t n_moved = 0, rows = (size_t)dims[0], columns = (size_t)dims[1];
  for (size_t row = 0; is_a && row < rows; row++) n_moved += has_moved(r, first + row * columns, columns);
  for (size_t column = 0; !is_a && column < columns; column++) {
    bool is_moved = false;
    for (size_t row = 0; row < rows; row++) is_moved = is_moved || has_moved(r, first + row * columns + column, 1);
    n_moved += is_moved;
  }
  return n_moved;
}

static size_t count_busy(api_fixture *fixture, const run *r, size_t layer, size_t n_experts) {
  uint64_t tokens[64];
  size_t n_busy = 0;
  assert_true(n_experts <= 64);
  api_must(fixture->ctx, eg_trainer_read_expert_tokens(r->trainer, layer, tokens, n_experts));
  for (size_t i = 0; i < n_experts; i++) n_busy += tokens[i] > 0;
  return n_busy;
}

/* Every adapter of that kind has moved, as far as it had something to learn from; the other kind where `others` do. */
static void expect_moves(api_fixture *fixture, const run *r, bool is_a) {
  size_t n_layers = 0, n_experts = eg_trainer_expert_count(r->trainer, &n_layers), first = 0;
  for (size_t i = 0; i < eg_trainer_parameter_count(r->trainer); i++) {
    eg_parameter_info info;
    unsigned layer = 0;
    api_must(fixture->ctx, eg_trainer_parameter_info(r->trainer, i, &info));
    size_t count = (size_t)(info.dims[0] * info.dims[1]);
    bool is_this = strstr(info.name, is_a ? ".lora_A." : ".lora_B.") != NULL;
    if (is_this && strstr(info.name, ".experts.") != NULL) {
      assert_int_equal(sscanf(strstr(info.name, "layers."), "layers.%u.", &layer), 1);
      size_t rank = (size_t)info.dims[is_a ? 0 : 1] / n_experts;
      assert_int_equal(count_moved(r, first, info.dims, is_a), rank * count_busy(fixture, r, layer, n_experts));
    } else if (is_this && !has_moved(r, first, count)) {
      fail_msg("%s: %s has not moved", r->file, info.name);
    }
    first += count;
  }
}

static void test_moves(void **state) {
  static const char *const files[] = {"llama/model.dynamo-op23-sdpa.onnx", "gpt2/model.torchscript-op17-eager.onnx",
                                      "qwen3/model.genai-float32.onnx", "llama/model.genai-int4.onnx",
                                      "qwen3_moe/model.torchscript-op17-eager-all.onnx"};
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    run r;
    start(*state, files[i], strstr(files[i], "moe") != NULL ? BOTH : NULL, &r);
    step(*state, &r);
    expect_moves(*state, &r, false);
    step(*state, &r);
    expect_moves(*state, &r, true);
    expect_moves(*state, &r, false);
    finish(&r);
  }
}

typedef struct class_count {
  const char *name;
  unsigned n;
} class_count;

static void expect_counts(api_fixture *fixture, const char *file, const char *parameters, const class_count *classes) {
  run r;
  size_t n = 0;
  start(fixture, file, parameters, &r);
  for (size_t c = 0; classes[c].name != NULL; c++) {
    unsigned found = 0;
    for (size_t i = 0; i < eg_trainer_parameter_count(r.trainer); i++) {
      eg_parameter_info info;
      api_must(fixture->ctx, eg_trainer_parameter_info(r.trainer, i, &info));
      found += strstr(info.name, classes[c].name) != NULL;
    }
    if (found != classes[c].n) fail_msg("%s: %u of %s, not %u", file, found, classes[c].name, classes[c].n);
    n += found;
  }
  assert_int_equal(n, eg_trainer_parameter_count(r.trainer) / 2);
  finish(&r);
}

/* Two layers each. */
static void test_counts(void **state) {
  static const class_count llama[] = {
      {".q_proj.lora_A", 2},    {".k_proj.lora_A", 2},  {".v_proj.lora_A", 2},    {".o_proj.lora_A", 2},
      {".gate_proj.lora_A", 2}, {".up_proj.lora_A", 2}, {".down_proj.lora_A", 2}, {NULL, 0}};
  static const class_count gpt2[] = {
      {".c_attn.lora_A", 2}, {".attn.c_proj.lora_A", 2}, {".c_fc.lora_A", 2}, {".mlp.c_proj.lora_A", 2}, {NULL, 0}};
  static const class_count moe[] = {{".q_proj.lora_A", 2},
                                    {".k_proj.lora_A", 2},
                                    {".v_proj.lora_A", 2},
                                    {".o_proj.lora_A", 2},
                                    {".experts.lora_A", 2},
                                    {".experts.base_layer.lora_A", 2},
                                    {NULL, 0}};
  expect_counts(*state, "llama/model.dynamo-op23-sdpa.onnx", NULL, llama);
  expect_counts(*state, "llama/model.genai-int4.onnx", NULL, llama);
  expect_counts(*state, "gpt2/model.torchscript-op17-eager.onnx", NULL, gpt2);
  expect_counts(*state, "qwen3_moe/model.torchscript-op17-eager-all.onnx", BOTH, moe);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_moves, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_counts, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
