/* Folders in bitsandbytes' form: their tensors are those of matrices quantised one by one, they are read back byte for
 * byte, and what is computed with them is what training beside such codes computes. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/blockwise.h"
#include "train/train.h"

typedef struct source {
  const char *model, *config;
  bool is_split; /* a fused layer, which becomes several modules */
} source;
static const source sources[] = {{"qwen3/model.dynamo-op23-sdpa.onnx", "qwen3/hf/config.json", false},
                                 {"qwen3/model.genai-float32.onnx", "qwen3/hf/config.json", true},
                                 {"gpt2/model.torchscript-op17-eager.onnx", "gpt2/hf/config.json", true}};

static const char *data_path(char *buffer, size_t size, const char *name) {
  (void)snprintf(buffer, size, "%s/%s", EGI_TEST_DATA, name);
  return buffer;
}

static eg_model *load(eg_context *ctx, const char *path) {
  eg_model *model;
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  return model;
}

static void export_to(eg_context *ctx, const eg_model *model, const char *adapter, const eg_export_options *options,
                      const char *directory) {
  api_must(ctx, eg_model_export_adapter(model, adapter, options, directory));
}

static egi_safetensors *open_tensors(eg_context *ctx, const char *directory) {
  char path[512];
  egi_safetensors *file = NULL;
  (void)snprintf(path, sizeof path, "%s/model.safetensors", directory);
  api_must(ctx, egi_safetensors_open(ctx, path, &file));
  return file;
}

static void expect_equal(eg_context *ctx, const char *one, const char *other) {
  egi_safetensors *a = open_tensors(ctx, one), *b = open_tensors(ctx, other);
  assert_int_equal(egi_safetensors_count(a), egi_safetensors_count(b));
  for (size_t i = 0; i < egi_safetensors_count(a); i++) {
    const egi_safetensor *x = egi_safetensors_at(a, i), *y = egi_safetensors_find(b, x->name);
    if (y == NULL) fail_msg("%s is missing", x->name);
    assert_true(x->dtype == y->dtype && x->rank == y->rank && x->size_bytes == y->size_bytes);
    for (int d = 0; d < x->rank; d++) assert_int_equal(x->dims[d], y->dims[d]);
    if (memcmp(x->data, y->data, (size_t)x->size_bytes) != 0) fail_msg("%s differs", x->name);
  }
  egi_safetensors_close(a);
  egi_safetensors_close(b);
}

/* What `engraft new` makes of the folder, in the folder. */
static eg_model *make_new(eg_context *ctx, const char *directory, const char *config, bool is_kept) {
  char path[512];
  egi_weight_files *weights;
  egi_module *module;
  uint32_t count = 0;
  api_must(ctx, egi_weight_files_open(ctx, directory, &weights));
  const egi_new_options options = {EG_DTYPE_UNDEFINED, 0, weights};
  api_must(ctx, egi_huggingface_new(ctx, config, &options, &module));
  api_must(ctx, egi_graph_call_bodies(module->graphs[0], EGI_BODIES_OWN, &count));
  (void)snprintf(path, sizeof path, "%s/new.onnx", directory);
  api_must(ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  egi_weight_files_close(weights);
  eg_model *model = load(ctx, path);
  if (!is_kept) (void)remove(path);
  return model;
}

static double loss_of(eg_context *ctx, const eg_model *model, const egi_quantise_options *quantise,
                      const eg_dataset *dataset) {
  egi_evaluate_options options = {.tokens = 64};
  double loss = 0.0;
  if (quantise != NULL) options.quantise = *quantise;
  api_must(ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  return loss;
}

static void check_config(eg_context *ctx, const char *path, const eg_export_options *options) {
  json_t *root;
  api_must(ctx, egi_json_read(ctx, path, &root));
  const json_t *written = json_object_get(root, "quantization_config");
  assert_string_equal(json_string_value(json_object_get(written, "quant_method")), "bitsandbytes");
  assert_true(json_is_true(json_object_get(written, "load_in_4bit")));
  assert_int_equal(json_is_true(json_object_get(written, "bnb_4bit_use_double_quant")), options->double_quant);
  assert_string_equal(json_string_value(json_object_get(written, "bnb_4bit_quant_type")),
                      options->stored == EG_QUANT_FP4 ? "fp4" : "nf4");
  assert_non_null(json_object_get(root, "model_type"));
  json_decref(root);
}

/* No matrix but those of linear layers, none of them as it was. */
static void check_tensors(eg_context *ctx, const char *directory, bool has_head) {
  egi_safetensors *file = open_tensors(ctx, directory);
  size_t n_coded = 0;
  for (size_t i = 0; i < egi_safetensors_count(file); i++) {
    const egi_safetensor *tensor = egi_safetensors_at(file, i);
    bool is_state = strstr(tensor->name, ".quant_state.bitsandbytes__") != NULL;
    n_coded += is_state;
    if (is_state && !has_head) assert_null(strstr(tensor->name, "lm_head"));
    if (egi_has_suffix(tensor->name, "_proj.weight")) assert_int_equal(tensor->dtype, EG_DTYPE_U8);
    if (strstr(tensor->name, "norm") || strstr(tensor->name, "embed")) assert_int_not_equal(tensor->dtype, EG_DTYPE_U8);
  }
  assert_true(n_coded >= 4);
  egi_safetensors_close(file);
}

static void check_source(api_fixture *fixture, const source *from, eg_export_options options) {
  eg_context *ctx = fixture->ctx;
  char path[512], config[512], one[256], two[256], written[512];
  egi_quantise_options quantise;
  eg_model *model = load(ctx, data_path(path, sizeof path, from->model));
  eg_dataset *dataset = api_dataset(ctx, 4, 12);
  options.config = data_path(config, sizeof config, from->config);
  api_path(fixture, one, sizeof one, "one");
  api_path(fixture, two, sizeof two, "two");
  export_to(ctx, model, NULL, &options, one);
  check_tensors(ctx, one, false); /* both models' heads are their token tables */
  (void)snprintf(written, sizeof written, "%s/config.json", one);
  check_config(ctx, written, &options);
  eg_model *again = make_new(ctx, one, written, true);
  export_to(ctx, again, NULL, &options, two); /* codes as they are */
  expect_equal(ctx, one, two);
  api_must(ctx, egi_quantise_options_make(ctx, options.stored, options.quant_block, options.double_quant, &quantise));
  double of_codes = loss_of(ctx, again, NULL, dataset), of_load = loss_of(ctx, model, &quantise, dataset);
  /* nested scales have one offset for a matrix: a fused one has another than its parts */
  double tolerance = from->is_split && options.double_quant ? 1e-2 : 1e-5;
  if (!(fabs(of_codes - of_load) <= tolerance * of_load))
    fail_msg("%s: loss %.9g of the folder, %.9g of the same codes", from->model, of_codes, of_load);
  eg_model_destroy(again);
  eg_model_destroy(model);
  eg_dataset_destroy(dataset);
}

static void test_folders(void **state) {
  for (size_t i = 0; i < EGI_COUNT(sources); i++)
    for (int k = 0; k < 4; k++) {
      eg_export_options options = EG_EXPORT_OPTIONS_INIT;
      options.format = EG_EXPORT_BNB;
      options.stored = k == 2 ? EG_QUANT_FP4 : EG_QUANT_NF4;
      options.double_quant = k % 2;
      options.quant_block = k == 0 ? 32 : 64;
      options.quant_head = k == 3;
      check_source(*state, &sources[i], options);
    }
}

/* A head of its own becomes codes when that is asked for; experts stay stacks of floats. */
static void test_head(void **state) {
  api_fixture *fixture = *state;
  char path[512], one[256];
  eg_model *model = load(fixture->ctx, data_path(path, sizeof path, "qwen3_moe/model.dynamo-op23-sdpa-all.onnx"));
  api_path(fixture, one, sizeof one, "one");
  for (int has_head = 0; has_head < 2; has_head++) {
    eg_export_options options = EG_EXPORT_OPTIONS_INIT;
    options.format = EG_EXPORT_BNB;
    options.quant_head = has_head;
    export_to(fixture->ctx, model, NULL, &options, one);
    egi_safetensors *file = open_tensors(fixture->ctx, one);
    const egi_safetensor *head = egi_safetensors_find(file, "lm_head.weight");
    const egi_safetensor *experts = egi_safetensors_find(file, "model.layers.0.mlp.experts.gate_up_proj");
    assert_true(head != NULL && experts != NULL);
    assert_int_equal(head->dtype, has_head ? EG_DTYPE_U8 : EG_DTYPE_F32);
    assert_int_equal(experts->dtype, EG_DTYPE_F32);
    assert_int_equal(experts->rank, 3);
    egi_safetensors_close(file);
  }
  eg_model_destroy(model);
}

/* With an adapter the codes are those of the merged matrices. */
static void test_adapter(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  char path[512], adapter[256], merged[256], one[256], two[256];
  eg_model *model = load(ctx, data_path(path, sizeof path, sources[0].model));
  eg_dataset *dataset = api_dataset(ctx, 4, 12);
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  api_path(fixture, adapter, sizeof adapter, "adapter");
  api_path(fixture, merged, sizeof merged, "merged.onnx");
  api_path(fixture, one, sizeof one, "one");
  api_path(fixture, two, sizeof two, "two");
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (int step = 0; step < 3; step++) api_must(ctx, eg_trainer_step(trainer, NULL));
  api_must(ctx, eg_trainer_save_adapter(trainer, adapter));
  eg_trainer_destroy(trainer);
  eg_export_options form = EG_EXPORT_OPTIONS_INIT;
  form.format = EG_EXPORT_MERGED;
  export_to(ctx, model, adapter, &form, merged);
  form.format = EG_EXPORT_BNB;
  export_to(ctx, model, adapter, &form, one);
  eg_model *whole = load(ctx, merged);
  export_to(ctx, whole, NULL, &form, two);
  expect_equal(ctx, one, two);
  form.base = EG_QUANT_NF4;
  assert_int_equal(eg_model_export_adapter(model, adapter, &form, one), EG_ERROR_ARGUMENT);
  form = (eg_export_options)EG_EXPORT_OPTIONS_INIT;
  assert_int_equal(eg_model_export_adapter(model, NULL, &form, one), EG_ERROR_ARGUMENT);
  api_expect_error(ctx, "without an adapter");
  (void)remove(merged);
  eg_model_destroy(whole);
  eg_model_destroy(model);
  eg_dataset_destroy(dataset);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_folders, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_head, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_adapter, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
