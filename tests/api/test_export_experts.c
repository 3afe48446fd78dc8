/* Adapters on experts in the forms that other programs hold: a merged model has the adapter's loss, whatever pieces or
 * codes the file has its experts in; taken apart, each expert's product is that of the stack. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GATE_UP "mlp.experts.gate_up_proj"
#define DOWN "mlp.experts.down_proj"
#define PREFIX "base_model.model.model.layers.0.mlp.experts"

typedef struct trained {
  eg_model *model;
  eg_dataset *dataset;
  char adapter[256];
  double loss, base_loss;
} trained;

static double loss_of(api_fixture *fixture, const eg_model *model, const eg_dataset *dataset,
                      egi_evaluate_options options) {
  double loss = 0.0;
  options.tokens = 64;
  api_must(fixture->ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  return loss;
}

static void near(double got, double wanted) {
  if (!(fabs(got - wanted) <= 1e-5 * wanted)) fail_msg("loss %.9g, not %.9g", got, wanted);
}

static trained train(api_fixture *fixture, eg_model *model, const char *targets, const char *parameters) {
  trained t = {.model = model, .dataset = api_dataset(fixture->ctx, 3, 20)};
  eg_trainer_options options = api_options();
  eg_trainer *trainer;
  options.targets = targets;
  options.target_parameters = parameters;
  options.learning_rate = 0.02;
  options.rank = 3;
  options.alpha = 7.0;
  options.rank_pattern = strcmp(targets, "none") == 0 ? NULL : "q_proj=2";
  api_path(fixture, t.adapter, sizeof t.adapter, "adapter");
  api_must(fixture->ctx, eg_trainer_create(model, t.dataset, &options, &trainer));
  for (int i = 0; i < 4; i++) api_must(fixture->ctx, eg_trainer_step(trainer, NULL));
  api_must(fixture->ctx, eg_trainer_save_adapter(trainer, t.adapter));
  eg_trainer_destroy(trainer);
  t.loss = loss_of(fixture, model, t.dataset, (egi_evaluate_options){.adapter = t.adapter});
  t.base_loss = loss_of(fixture, model, t.dataset, (egi_evaluate_options){.adapter = NULL});
  assert_true(fabs(t.loss - t.base_loss) >= 1e-3 * t.loss);
  return t;
}

static void drop(trained *t) {
  eg_dataset_destroy(t->dataset);
  eg_model_destroy(t->model);
}

static eg_model *load(api_fixture *fixture, const char *name) {
  char path[512];
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* The file that the options make, as a model. */
static eg_model *export(api_fixture *fixture, const trained *t, const eg_export_options *options, const char *name,
                        const char *model) {
  char path[256];
  eg_model *made;
  api_must(fixture->ctx,
           eg_model_export_adapter(t->model, t->adapter, options, api_path(fixture, path, sizeof path, name)));
  api_must(fixture->ctx, eg_model_load(fixture->ctx, api_path(fixture, path, sizeof path, model), NULL, &made));
  return made;
}

/* ---- merged ---- */

static const char *const files[] = {"qwen3_moe/model.dynamo-op23-sdpa-batched_mm.onnx",
                                    "qwen3_moe/model.torchscript-op17-eager-all.onnx",
                                    "gpt_oss/model.dynamo-op23-eager-all.onnx", "gpt_oss/model.genai-float32.onnx"};

static void check_merged(api_fixture *fixture, const trained *t, eg_quant base, double wanted) {
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_MERGED;
  options.base = base;
  options.quant_block = 32;
  options.double_quant = 1;
  eg_model *merged = export(fixture, t, &options, "merged.onnx", "merged.onnx");
  near(loss_of(fixture, merged, t->dataset, (egi_evaluate_options){.adapter = NULL}), wanted);
  eg_model_destroy(merged);
}

/* Every form of file, both layouts of Hugging Face's stacks; beside the file's numbers and beside codes of them. */
static void test_merged(void **state) {
  static const char *const parameters[] = {GATE_UP "," DOWN, DOWN};
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    trained t = train(fixture, load(fixture, files[i]), "q_proj", parameters[i % 2]);
    egi_evaluate_options evaluate = {.adapter = t.adapter};
    api_must(fixture->ctx, egi_quantise_options_make(fixture->ctx, EG_QUANT_NF4, 32, 1, &evaluate.quantise));
    double wanted = loss_of(fixture, t.model, t.dataset, evaluate);
    assert_true(fabs(wanted - t.loss) >= 1e-4 * t.loss); /* quantising shows */
    check_merged(fixture, &t, EG_QUANT_NONE, t.loss);
    check_merged(fixture, &t, EG_QUANT_NF4, wanted);
    drop(&t);
  }
}

enum { WIDTH = 8, INNER = 4, EXPERTS = 3, BLOCK = 4 };

static void add_numbers(egi_text *text, const char *name, int64_t rows, int64_t columns, bool is_scale) {
  egi_text_format(text, "%s[%d,%lld,%lld] %s = {", is_scale ? "float" : "uint8", EXPERTS, (long long)rows,
                  (long long)columns, name);
  for (int64_t i = 0; i < EXPERTS * rows * columns; i++) {
    double number = egi_random_uniform(5, (uint64_t)name[0] + (uint64_t)name[1], (uint64_t)i);
    egi_text_format(text, is_scale ? "%s%.4f" : "%s%.0f", i > 0 ? "," : "",
                    is_scale ? 0.05 + 0.1 * number : floor(255.0 * number));
  }
  egi_text_add(text, "}, ");
}

/* A table, one mixture of packed experts and a head. */
static eg_model *packed_model(api_fixture *fixture, bool is_separate) {
  char path[256];
  egi_text text;
  egi_module *module;
  eg_model *model;
  int64_t rows = is_separate ? INNER : 2 * INNER;
  egi_text_init(&text, fixture->ctx);
  egi_text_add(&text, "<ir_version: 10, opset_import: [\"\": 23, \"engraft\": 1]>\ng (int64[b,s] input_ids) => "
                      "(float[b,s,48] logits) <");
  const struct {
    const char *name;
    int rows, columns;
  } tables[] = {{"table", API_VOCABULARY, WIDTH}, {"router", WIDTH, EXPERTS}, {"head", WIDTH, API_VOCABULARY}};
  for (size_t i = 0; i < EGI_COUNT(tables); i++)
    egi_text_format(&text,
                    "float[%d,%d] %s = [\"location\": \"\", \"engraft.init\": \"normal\", \"std\": \"0.7\", \"seed\": "
                    "\"3\"], ",
                    tables[i].rows, tables[i].columns, tables[i].name);
  add_numbers(&text, "gw", rows, WIDTH / 2, false);
  add_numbers(&text, "gs", rows, WIDTH / BLOCK, true);
  add_numbers(&text, "gz", rows, WIDTH / BLOCK / 2, false);
  add_numbers(&text, "uw", INNER, WIDTH / 2, false);
  add_numbers(&text, "us", INNER, WIDTH / BLOCK, true);
  add_numbers(&text, "dw", WIDTH, INNER / 2, false);
  add_numbers(&text, "ds", WIDTH, INNER / BLOCK, true);
  egi_text_format(
      &text,
      "float one = {1}> {\nx = Gather (table, input_ids)\n[\"model.layers.0.mlp.gate/MatMul\"] r = MatMul (x, router)\n"
      "[\"model.layers.0.mlp.experts/MoE\"] m = engraft.MoE <experts = 3, top_k = 2, scoring = \"softmax\", order = "
      "\"before\", normalise = 1, activation = \"silu\", gate_up = \"%s\", roles = %s, storage = \"nbits\", bits = 4, "
      "block_size = 4> (x, r, , %s)\ny = Add (x, m)\n[\"lm_head/MatMul\"] logits = MatMul (y, head) }\n",
      is_separate ? "separate" : "interleaved",
      is_separate ? "[1,0,1,0,1,0,1,0,1,0,1,0,0,0,0,0,0,0]" : "[1,0,0,0,1,0,1,1,0,0,1,0,0,0,0,0,0,0]",
      is_separate ? "gw, uw, dw, gs, us, ds" : "gw, dw, gs, gz, ds");
  api_must(fixture->ctx, egi_text_status(&text));
  api_must(fixture->ctx, egi_module_parse(fixture->ctx, egi_text_string(&text), text.length, &module));
  api_must(fixture->ctx,
           egi_module_export(module, module->graphs[0], api_path(fixture, path, sizeof path, "packed.onnx")));
  egi_module_destroy(module);
  egi_text_free(&text);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* Codes with zero points and without: the merged mixture has the numbers that they stand for. */
static void test_packed(void **state) {
  static const char *const parameters[] = {"gate_up_proj,down_proj", "gate_up_proj", "down_proj"};
  api_fixture *fixture = *state;
  for (size_t i = 0; i < 2 * EGI_COUNT(parameters); i++) {
    trained t = train(fixture, packed_model(fixture, i % 2 == 1), "none", parameters[i / 2]);
    check_merged(fixture, &t, EG_QUANT_NONE, t.loss);
    drop(&t);
  }
}

/* ---- PEFT, taken apart ---- */

static const float *tensor(const egi_peft *peft, const char *name, const int64_t rows, const int64_t columns) {
  const egi_safetensor *found = egi_safetensors_find(peft->tensors, name);
  if (found == NULL) fail_msg("%s is missing", name);
  assert_int_equal(found->dims[0], rows);
  assert_int_equal(found->dims[1], columns);
  float *copy = malloc((size_t)found->size_bytes);
  assert_non_null(copy);
  memcpy(copy, found->data, (size_t)found->size_bytes);
  return copy;
}

/* What one expert's part adds at [row, column], from both folders. */
typedef struct pair {
  const float *a, *b, *stack_a, *stack_b;
} pair;

static void check_part(const egi_peft *apart, const egi_peft *stacked, int64_t e, const char *part,
                       const int64_t size[2]) {
  enum { RANK = 3, N = 4 };
  char name[160];
  bool is_down = strcmp(part, "down_proj") == 0, is_up = strcmp(part, "up_proj") == 0;
  const char *module = is_down ? PREFIX : PREFIX ".base_layer";
  int64_t rows = is_down ? size[0] : 2 * size[0], first = is_up ? size[0] : 0;
  pair p;
  snprintf(name, sizeof name, "%s.%lld.%s.lora_A.weight", PREFIX, (long long)e, part);
  p.a = tensor(apart, name, RANK, size[1]);
  snprintf(name, sizeof name, "%s.%lld.%s.lora_B.weight", PREFIX, (long long)e, part);
  p.b = tensor(apart, name, size[0], RANK);
  snprintf(name, sizeof name, "%s.lora_A.weight", module);
  p.stack_a = tensor(stacked, name, (int64_t)N * RANK, size[1]);
  snprintf(name, sizeof name, "%s.lora_B.weight", module);
  p.stack_b = tensor(stacked, name, rows, (int64_t)N * RANK);
  for (int64_t i = 0; i < size[0]; i++)
    for (int64_t j = 0; j < size[1]; j++) {
      double got = 0.0, wanted = 0.0;
      for (int64_t k = 0; k < RANK; k++) {
        got += (double)p.b[i * RANK + k] * (double)p.a[k * size[1] + j];
        wanted += 7.0 / RANK * (double)p.stack_b[(first + i) * RANK * N + k * N + e] *
                  (double)p.stack_a[(e * RANK + k) * size[1] + j];
      }
      if (!(fabs(got - wanted) <= 1e-6)) fail_msg("%s of expert %d: %g, not %g", part, (int)e, got, wanted);
    }
  free((void *)(uintptr_t)p.a);
  free((void *)(uintptr_t)p.b);
  free((void *)(uintptr_t)p.stack_a);
  free((void *)(uintptr_t)p.stack_b);
}

static void export_portable(api_fixture *fixture, const trained *t, const char *type, egi_peft **out_peft) {
  char path[256];
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.is_portable = 1;
  options.architecture = type;
  api_must(fixture->ctx,
           eg_model_export_adapter(t->model, t->adapter, &options, api_path(fixture, path, sizeof path, "portable")));
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, path, out_peft));
}

static void test_apart(void **state) {
  const int64_t inner[2] = {16, 24}, outer[2] = {24, 16};
  api_fixture *fixture = *state;
  egi_peft *apart, *stacked;
  trained t = train(fixture, load(fixture, files[0]), "q_proj", GATE_UP "," DOWN);
  export_portable(fixture, &t, NULL, &apart);
  api_must(fixture->ctx, egi_peft_open(fixture->ctx, t.adapter, &stacked));
  assert_string_equal(apart->config.targets, "q_proj,gate_proj,up_proj,down_proj");
  assert_null(apart->config.parameters);
  assert_int_equal(egi_safetensors_count(apart->tensors), 2 * (2 + 2 * 4 * 3));
  for (int64_t e = 0; e < 4; e++) {
    check_part(apart, stacked, e, "gate_proj", inner);
    check_part(apart, stacked, e, "up_proj", inner);
    check_part(apart, stacked, e, "down_proj", outer);
  }
  egi_peft_close(apart);
  export_portable(fixture, &t, "mixtral", &apart);
  assert_string_equal(apart->config.targets, "q_proj,w1,w3,w2");
  free((void *)(uintptr_t)tensor(apart, "base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_B.weight",
                                 24, 3));
  egi_peft_close(apart);
  egi_peft_close(stacked);
  drop(&t);
}

/* What has no adapter gets one that adds nothing: readers want all of an expert. */
static void test_apart_alone(void **state) {
  api_fixture *fixture = *state;
  egi_peft *apart;
  trained t = train(fixture, load(fixture, files[1]), "none", DOWN);
  export_portable(fixture, &t, NULL, &apart);
  const float *b = tensor(apart, PREFIX ".2.up_proj.lora_B.weight", 16, 3);
  for (int i = 0; i < 16 * 3; i++) assert_true(b[i] >= 0.0f && b[i] <= 0.0f);
  free((void *)(uintptr_t)b);
  assert_string_equal(apart->config.targets, "gate_proj,up_proj,down_proj");
  eg_export_options again = EG_EXPORT_OPTIONS_INIT; /* read back, it is refused with the reason */
  char path[256], other[256];
  assert_int_equal(eg_model_export_adapter(t.model, api_path(fixture, path, sizeof path, "portable"), &again,
                                           api_path(fixture, other, sizeof other, "other")),
                   EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "is of one expert alone");
  egi_peft_close(apart);
  drop(&t);
}

/* Rows of gate and up in turns: nobody has these experts apart. */
static void test_stays_stacked(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  egi_peft *portable;
  trained t = train(fixture, load(fixture, files[2]), "q_proj", GATE_UP "," DOWN);
  export_portable(fixture, &t, NULL, &portable);
  assert_string_equal(portable->config.parameters, GATE_UP "," DOWN);
  assert_int_equal(portable->config.rank, 3);
  assert_int_equal(portable->config.n_ranks, 0);
  egi_peft_close(portable);
  near(loss_of(fixture, t.model, t.dataset,
               (egi_evaluate_options){.adapter = api_path(fixture, path, sizeof path, "portable")}),
       t.loss);
  drop(&t);
}

/* ---- onnxruntime and llama.cpp ---- */

/* Without the adapter the base computes what the model does; a stack's default has a rank of one. */
static void test_onnx_adapter(void **state) {
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(files); i++) {
    trained t = train(fixture, load(fixture, files[i]), "q_proj", GATE_UP "," DOWN);
    eg_export_options options = EG_EXPORT_OPTIONS_INIT;
    options.format = EG_EXPORT_ONNX_ADAPTER;
    eg_model *base = export(fixture, &t, &options, "lora", "lora/model.onnx");
    near(loss_of(fixture, base, t.dataset, (egi_evaluate_options){.adapter = NULL}), t.base_loss);
    size_t n_stacks = 0;
    for (uint32_t k = 1; k < base->module->n_weights; k++) {
      const egi_weight *weight = &base->module->weights[k];
      if (strstr(weight->name, ".experts.") == NULL || strstr(weight->name, ".lora_") == NULL) continue;
      n_stacks += weight->rank == 2;
      assert_int_equal(weight->dims[strstr(weight->name, "lora_A") != NULL ? 0 : 1], 4);
    }
    assert_int_equal(n_stacks, 2 * 4);
    eg_model_destroy(base);
    drop(&t);
  }
}

static bool holds(const egi_mapping *mapping, const void *bytes, size_t length) {
  for (size_t i = 0; i + length <= mapping->size_bytes; i++)
    if (memcmp(mapping->data + i, bytes, length) == 0) return true;
  return false;
}

/* A mixture in 16 bits: the stacks are cast, and the body, which asks for their sizes, knows them all the same. */
static void test_onnx_adapter_narrow(void **state) {
  api_fixture *fixture = *state;
  char path[256];
  egi_new_options made = {.dtype = EG_DTYPE_F16, .seed = 3};
  egi_module *module;
  eg_model *model;
  api_write(fixture, "config.json",
            "{\"model_type\":\"qwen3_moe\",\"hidden_size\":16,\"intermediate_size\":24,\"moe_intermediate_size\":8,"
            "\"num_experts\":4,\"num_experts_per_tok\":2,\"num_hidden_layers\":1,\"num_attention_heads\":4,"
            "\"num_key_value_heads\":2,\"head_dim\":4,\"vocab_size\":48,\"rms_norm_eps\":1e-5,"
            "\"norm_topk_prob\":true,\"initializer_range\":0.2,\"hidden_act\":\"silu\"}");
  api_must(fixture->ctx,
           egi_huggingface_new(fixture->ctx, api_path(fixture, path, sizeof path, "config.json"), &made, &module));
  api_must(fixture->ctx,
           egi_module_export(module, module->graphs[0], api_path(fixture, path, sizeof path, "narrow.onnx")));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  trained t = train(fixture, model, "q_proj", GATE_UP "," DOWN);
  eg_export_options options = EG_EXPORT_OPTIONS_INIT;
  options.format = EG_EXPORT_ONNX_ADAPTER;
  eg_model *base = export(fixture, &t, &options, "lora", "lora/model.onnx");
  near(loss_of(fixture, base, t.dataset, (egi_evaluate_options){.adapter = NULL}), t.base_loss);
  eg_model_destroy(base);
  drop(&t);
}

static void test_gguf(void **state) {
  static const char *const names[] = {"blk.0.ffn_gate_exps.weight.lora_a", "blk.1.ffn_up_exps.weight.lora_b",
                                      "blk.1.ffn_down_exps.weight.lora_b"};
  api_fixture *fixture = *state;
  char path[256];
  for (size_t i = 0; i < EGI_COUNT(files); i += 2) {
    trained t = train(fixture, load(fixture, files[i]), "q_proj", GATE_UP "," DOWN);
    eg_export_options options = EG_EXPORT_OPTIONS_INIT;
    egi_mapping mapping;
    egi_peft *peft;
    float row[3];
    options.format = EG_EXPORT_GGUF;
    api_must(fixture->ctx, eg_model_export_adapter(t.model, t.adapter, &options,
                                                   api_path(fixture, path, sizeof path, "adapter.gguf")));
    api_must(fixture->ctx, egi_mapping_open(fixture->ctx, path, &mapping));
    for (size_t k = 0; k < EGI_COUNT(names); k++) assert_true(holds(&mapping, names[k], strlen(names[k])));
    api_must(fixture->ctx, egi_peft_open(fixture->ctx, t.adapter, &peft));
    const egi_safetensor *b = egi_safetensors_find(peft->tensors, PREFIX ".lora_B.weight"); /* row 0 of expert 2 */
    for (int k = 0; k < 3; k++) memcpy(&row[k], b->data + (size_t)(k * 4 + 2) * sizeof *row, sizeof *row);
    assert_true(holds(&mapping, row, sizeof row));
    egi_peft_close(peft);
    egi_mapping_close(&mapping);
    drop(&t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_merged, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_packed, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_apart, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_apart_alone, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_stays_stacked, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_onnx_adapter, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_onnx_adapter_narrow, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_gguf, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
