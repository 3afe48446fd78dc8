/* Training beside a base of 4-bit codes: its curve is that of adapters on the decoded matrices, for every exporter's
 * file of the models in tests/data; what is left alone; what is refused. */
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/plan.h"
#include "base/blockwise.h"

enum { N_STEPS = 4, VOCABULARY = 56 };

static const char *const models[] = {
    "llama/model.dynamo-op23-sdpa.onnx",        "llama/model.torchscript-op17-eager.onnx",
    "gpt2/model.dynamo-op20-eager.onnx",        "gpt2/model.torchscript-op17-eager.onnx",
    "qwen2/model.dynamo-op23-sdpa.onnx",        "qwen3/model.genai-float32.onnx",
    "gpt_oss/model.dynamo-op23-eager-all.onnx", "qwen3_moe/model.torchscript-op17-eager-all.onnx"};

static eg_model *load(eg_context *ctx, const char *name) {
  char path[512];
  eg_model *model;
  (void)snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, name);
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  return model;
}

static eg_trainer_options quantised(eg_quant quant, uint32_t block, int is_nested) {
  eg_trainer_options options = api_options();
  options.quant = quant;
  options.quant_block = block;
  options.double_quant = is_nested;
  return options;
}

/* What the codes say in place of the matrix, in the module's own layout. */
static void decode(eg_context *ctx, egi_module *module, uint32_t weight, const egi_quantisation *q) {
  size_t n = (size_t)(q->n_matrices * q->rows * q->columns), n_blocks = (n + (size_t)q->block - 1) / (size_t)q->block;
  uint8_t *codes = egi_arena_get(&module->arena, (n + 1) / 2, 1), *scales = egi_arena_get(&module->arena, n_blocks, 4);
  float *nested = EGI_NEW(&module->arena, float, (size_t)egi_nested_count(n_blocks));
  float *values = EGI_NEW(&module->arena, float, n), *turned = EGI_NEW(&module->arena, float, n);
  assert_true(codes && scales && nested && values && turned);
  const egi_quantised_memory memory = {{codes, scales, q->is_nested ? nested : NULL}};
  api_must(ctx, egi_quantise(ctx, q, &memory));
  for (size_t i = 0; i < n_blocks; i++) {
    size_t first = i * (size_t)q->block, count = n - first < (size_t)q->block ? n - first : (size_t)q->block;
    float scale = 0;
    if (q->is_nested)
      scale = egi_nested_decode(nested, scales[i], i);
    else
      memcpy(&scale, scales + 4 * i, sizeof scale);
    egi_four_bit_decode((egi_four_bit)q->type, codes, first, count, scale, values + first);
  }
  size_t rows = (size_t)q->rows, columns = (size_t)q->columns;
  for (size_t i = 0; i < n; i++) {
    size_t matrix = i / (rows * columns), at = i % (rows * columns);
    turned[matrix * rows * columns + at % columns * rows + at / columns] = values[i];
  }
  module->weights[weight].bytes.data = (const uint8_t *)(q->is_transposed ? turned : values);
}

/* Every matrix that the trainer quantised, decoded in another model of the same file. Returns how many. */
static size_t decode_all(eg_context *ctx, const eg_trainer *trainer, eg_model *model) {
  const egi_module *module = trainer->machine.module;
  size_t count = 0;
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_bytes *bytes = &module->weights[i].bytes;
    if (bytes->kind != EGI_BYTES_QUANTISED || bytes->quantised_tensor != EGI_QUANTISED_CODES) continue;
    for (uint32_t k = 1; k < model->module->n_weights; k++) {
      if (strcmp(model->module->weights[k].name, bytes->quantisation->matrix.name) != 0) continue;
      decode(ctx, model->module, k, bytes->quantisation);
      count++;
    }
  }
  return count;
}

static bool is_of(const eg_trainer *trainer, size_t index, const char *suffix) {
  eg_parameter_info info;
  assert_int_equal(eg_trainer_parameter_info(trainer, index, &info), EG_OK);
  return egi_has_suffix(info.name, suffix);
}

/* Whether every parameter of that kind differs from what it was. */
static bool have_moved(eg_trainer *trainer, const float *before, const float *now, const char *suffix) {
  size_t at = 0, n_found = 0;
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t count = 1;
    bool has_moved = false;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    for (uint32_t d = 0; d < info.rank; d++) count *= (size_t)info.dims[d];
    for (size_t k = 0; k < count; k++)
      has_moved = has_moved || before[at + k] < now[at + k] || before[at + k] > now[at + k];
    at += count;
    if (!is_of(trainer, i, suffix)) continue;
    n_found++;
    if (!has_moved) return false;
  }
  return n_found > 0;
}

static void expect_close(const float *a, const float *b, size_t n, double tolerance, const char *what) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < n; i++) {
    difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    size += (double)b[i] * (double)b[i];
  }
  if (!(sqrt(difference) <= tolerance * sqrt(size) + 1e-12))
    fail_msg("%s: off by %.3g of %.3g", what, sqrt(difference), sqrt(size));
}

static void compare(eg_trainer *codes, eg_trainer *plain, const char *name) {
  size_t n = 0;
  float *first = api_read(codes, false, &n), *before = api_read(codes, false, &n);
  for (int step = 0; step < N_STEPS; step++) {
    eg_step_report a, b;
    assert_int_equal(eg_trainer_step(codes, &a), EG_OK);
    assert_int_equal(eg_trainer_step(plain, &b), EG_OK);
    if (!(fabs(a.loss - b.loss) <= 1e-5 * fabs(b.loss)))
      fail_msg("%s: loss %.9g of codes, %.9g of what they stand for", name, a.loss, b.loss);
    float *now = api_read(codes, false, &n), *x = api_read(codes, true, &n), *y = api_read(plain, true, &n);
    expect_close(x, y, n, 1e-4, name);
    if (step == 0) assert_true(have_moved(codes, first, now, ".lora_B.weight"));
    if (step == 1) assert_true(have_moved(codes, before, now, ".lora_A.weight"));
    free(before);
    free(x);
    free(y);
    before = now;
  }
  free(first);
  free(before);
}

static void check_curve(eg_context *ctx, const char *name, const eg_trainer_options *options) {
  eg_model *base = load(ctx, name), *other = load(ctx, name);
  eg_dataset *dataset = api_dataset(ctx, 6, 12);
  eg_trainer *codes, *plain, *original;
  eg_trainer_options plain_options = *options;
  plain_options.quant = EG_QUANT_NONE;
  api_must(ctx, eg_trainer_create(base, dataset, options, &codes));
  api_must(ctx, eg_trainer_create(base, dataset, &plain_options, &original));
  size_t count = decode_all(ctx, codes, other);
  assert_true(count >= 4); /* layers of a fused one count once */
  api_must(ctx, eg_trainer_create(other, dataset, &plain_options, &plain));
  compare(codes, plain, name);
  double of_codes = 0, of_original = 0; /* and it is not the original that was trained on */
  api_must(ctx, eg_trainer_evaluate(codes, dataset, &of_codes));
  api_must(ctx, eg_trainer_evaluate(original, dataset, &of_original));
  assert_true(fabs(of_codes - of_original) > 1e-4);
  eg_trainer_destroy(codes);
  eg_trainer_destroy(plain);
  eg_trainer_destroy(original);
  eg_dataset_destroy(dataset);
  eg_model_destroy(base);
  eg_model_destroy(other);
}

static void test_curves(void **state) {
  api_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(models); i++) {
    eg_trainer_options options = quantised(i % 3 == 2 ? EG_QUANT_FP4 : EG_QUANT_NF4, i % 2 == 0 ? 64 : 32, i % 4 != 1);
    options.no_fuse = i % 5 == 4;
    check_curve(fixture->ctx, models[i], &options);
  }
}

/* Tables, norms and routers keep their types, and the head unless it is asked for; scales of scales and codes have
 * theirs. */
static void check_left_alone(eg_context *ctx, eg_model *model, bool has_head) {
  eg_dataset *dataset = api_dataset(ctx, 4, 12);
  eg_trainer_options options = quantised(EG_QUANT_NF4, 64, 1);
  options.quant_head = has_head;
  eg_trainer *trainer;
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  const egi_module *module = trainer->machine.module;
  size_t n_codes = 0, n_nested = 0, n_heads = 0;
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_weight *weight = &module->weights[i];
    if (weight->bytes.kind != EGI_BYTES_QUANTISED) continue;
    n_heads += weight->bytes.quantised_tensor == EGI_QUANTISED_CODES && weight->bytes.quantisation->rows == VOCABULARY;
    assert_null(strstr(weight->name, "embed"));
    assert_null(strstr(weight->name, "norm"));
    assert_null(strstr(weight->name, "mlp.gate."));
    n_codes += weight->bytes.quantised_tensor == EGI_QUANTISED_CODES;
    n_nested += weight->bytes.quantised_tensor == EGI_QUANTISED_NESTED;
  }
  assert_int_equal(n_heads, has_head);
  assert_int_equal(n_codes,
                   8 + 2 * 4 * 2 + n_heads); /* q, k, v, o of two layers, two matrices of each of four experts */
  assert_int_equal(n_nested, n_codes);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
}

static void test_left_alone(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture->ctx, "qwen3_moe/model.dynamo-op23-sdpa-all.onnx");
  check_left_alone(fixture->ctx, model, false);
  check_left_alone(fixture->ctx, model, true);
  eg_model_destroy(model);
}

/* A head of codes is worth what they stand for, with and without adapters of its own. */
static void test_head(void **state) {
  api_fixture *fixture = *state;
  for (int has_adapter = 0; has_adapter < 2; has_adapter++) {
    eg_trainer_options options = quantised(EG_QUANT_NF4, 64, 1);
    options.quant_head = 1;
    if (has_adapter) options.targets = "lm_head,q_proj";
    check_curve(fixture->ctx, "qwen3_moe/model.dynamo-op23-sdpa-all.onnx", &options);
  }
}

/* The memory of the base is what the codes need, and the number of threads decides nothing. */
static void test_memory(void **state) {
  api_fixture *fixture = *state;
  float *values[2] = {NULL, NULL};
  size_t n = 0;
  for (int k = 0; k < 2; k++) {
    eg_context *ctx = api_context(fixture, 1 + 3 * k);
    eg_model *model = load(ctx, models[1]);
    eg_dataset *dataset = api_dataset(ctx, 4, 12);
    eg_trainer_options options = quantised(EG_QUANT_NF4, 64, 1);
    eg_trainer *trainer;
    api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
    const egi_module *module = trainer->machine.module;
    uint64_t wanted = 0, others = 0;
    for (uint32_t i = 1; i < module->n_weights; i++) {
      const egi_bytes *bytes = &module->weights[i].bytes;
      if (bytes->kind == EGI_BYTES_MEMORY) others += bytes->size_bytes + 64; /* copied where they lie unaligned */
      if (bytes->kind != EGI_BYTES_QUANTISED) continue;
      if (bytes->quantised_tensor == EGI_QUANTISED_CODES) others -= bytes->quantisation->matrix.bytes.size_bytes;
      wanted += egi_quantised_bytes(bytes->quantisation, (egi_quantised_tensor)bytes->quantised_tensor);
    }
    assert_true(wanted > 0);
    assert_true(egi_bytes_in_use(ctx, EGI_PURPOSE_WEIGHTS) >= wanted);
    assert_true(egi_bytes_in_use(ctx, EGI_PURPOSE_WEIGHTS) <= wanted + others);
    for (int step = 0; step < 2; step++) api_must(ctx, eg_trainer_step(trainer, NULL));
    values[k] = api_read(trainer, false, &n);
    eg_trainer_destroy(trainer);
    eg_dataset_destroy(dataset);
    eg_model_destroy(model);
    eg_context_destroy(ctx);
  }
  assert_memory_equal(values[0], values[1], n * sizeof(float));
  free(values[0]);
  free(values[1]);
}

/* One number of a matrix that the trainer quantised is none; returns the matrix's name in the model. */
static const char *spoil(const eg_trainer *trainer, eg_model *model) {
  const egi_module *module = trainer->machine.module;
  const char *name = NULL;
  for (uint32_t i = 1; i < module->n_weights && name == NULL; i++)
    if (module->weights[i].bytes.kind == EGI_BYTES_QUANTISED) name = module->weights[i].bytes.quantisation->matrix.name;
  assert_non_null(name);
  for (uint32_t i = 1; i < model->module->n_weights; i++) {
    egi_weight *weight = &model->module->weights[i];
    if (strcmp(weight->name, name) != 0) continue;
    float *copy = egi_arena_get(&model->module->arena, (size_t)weight->bytes.size_bytes, 1);
    assert_non_null(copy);
    memcpy(copy, weight->bytes.data, (size_t)weight->bytes.size_bytes);
    copy[5] = NAN;
    weight->bytes.data = (const uint8_t *)copy;
    return weight->name;
  }
  return "no such weight";
}

static void test_refused(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture->ctx, models[0]);
  eg_dataset *dataset = api_dataset(fixture->ctx, 4, 12);
  eg_trainer *trainer;
  eg_trainer_options options = quantised(EG_QUANT_NF4, 48, 1);
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "48");
  options = quantised(EG_QUANT_NF4, 64, 1);
  options.full = 1;
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "full");
  options = quantised((eg_quant)7, 64, 1);
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "quant");
  options = quantised(EG_QUANT_NF4, 64, 1);
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  const char *name = spoil(trainer, model);
  eg_trainer_destroy(trainer);
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, name);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Logits of a runner are those of its bodies of plain operators. */
static void test_runner(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture->ctx, models[4]);
  float sums[3] = {0, 0, 0};
  const int64_t ids[6] = {3, 1, 4, 1, 5, 9};
  for (int k = 0; k < 3; k++) {
    eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
    eg_runner *runner;
    options.quant = k < 2 ? EG_QUANT_NF4 : EG_QUANT_NONE;
    options.no_fuse = k == 1;
    const eg_tensor input = {.name = "input_ids", .dtype = EG_DTYPE_I64, .rank = 2, .dims = {1, 6}, .data = ids};
    api_must(fixture->ctx, eg_runner_create(model, &options, &runner));
    const eg_tensor *outputs = NULL;
    size_t n_outputs = 0;
    api_must(fixture->ctx, eg_runner_run(runner, &input, 1, &outputs, &n_outputs));
    assert_true(n_outputs > 0);
    for (int64_t i = 0; i < outputs[0].dims[2]; i++) sums[k] += ((const float *)outputs[0].data)[i] * (float)(i % 7);
    eg_runner_destroy(runner);
  }
  assert_true(fabsf(sums[0] - sums[1]) <= 1e-4F * fabsf(sums[0]) + 1e-4F);
  assert_true(fabsf(sums[0] - sums[2]) > 1e-3F);
  eg_model_destroy(model);
}

/* ---- folders that bitsandbytes would have written ---- */

/* The tensors of one matrix as bitsandbytes names them, appended to the list. */
static size_t encode(eg_context *ctx, egi_arena *arena, const egi_safetensor *from, bool is_nested,
                     egi_safetensor *out) {
  egi_quantisation q = {
      .matrix = {.name = from->name, .dtype = from->dtype, .rank = 2, .dims = {from->dims[0], from->dims[1]}},
      .n_matrices = 1,
      .rows = from->dims[0],
      .columns = from->dims[1],
      .type = EGI_FOUR_BIT_NF4,
      .block = 64,
      .is_nested = is_nested};
  egi_quantised_memory memory = {{NULL}};
  q.matrix.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = from->data, .size_bytes = from->size_bytes};
  uint64_t bytes[EGI_QUANTISED_PARTS];
  for (unsigned i = 0; i < EGI_QUANTISED_PARTS; i++) {
    bytes[i] = egi_quantised_bytes(&q, (egi_quantised_tensor)i);
    if (bytes[i] > 0) memory.parts[i] = egi_arena_get(arena, (size_t)bytes[i], 1);
  }
  api_must(ctx, egi_quantise(ctx, &q, &memory));
  const uint8_t *nested = memory.parts[EGI_QUANTISED_NESTED],
                *map = (const uint8_t *)egi_four_bit_levels(EGI_FOUR_BIT_NF4);
  egi_bnb_state state = {EGI_FOUR_BIT_NF4, 64, q.rows, q.columns, "float32", is_nested, 0.0};
  egi_safetensor tensors[EGI_BNB_TENSORS] = {
      [EGI_BNB_CODES] = {NULL, EG_DTYPE_U8, 2, {(int64_t)bytes[0], 1}, memory.parts[EGI_QUANTISED_CODES], bytes[0]},
      [EGI_BNB_ABSMAX] = {NULL,
                          is_nested ? EG_DTYPE_U8 : EG_DTYPE_F32,
                          1,
                          {(int64_t)(is_nested ? bytes[1] : bytes[1] / 4)},
                          memory.parts[EGI_QUANTISED_SCALES],
                          bytes[1]},
      [EGI_BNB_MAP] = {NULL, EG_DTYPE_F32, 1, {16}, map, 64}};
  if (is_nested) {
    float offset;
    uint64_t rest = bytes[2] - EGI_NESTED_HEADER * sizeof(float);
    memcpy(&offset, nested, sizeof offset);
    state.offset = (double)offset;
    tensors[EGI_BNB_NESTED_MAP] = (egi_safetensor){NULL, EG_DTYPE_F32, 1, {256}, nested + 4, 1024};
    tensors[EGI_BNB_NESTED] = (egi_safetensor){NULL, EG_DTYPE_F32, 1, {(int64_t)(rest / 4)}, nested + 1028, rest};
  }
  size_t count = 0;
  api_must(ctx, egi_bnb_write(arena, from->name, &state, tensors, &count));
  memcpy(out, tensors, count * sizeof *out);
  return count;
}

static void write_folder(api_fixture *fixture, egi_arena *arena, bool is_nested) {
  eg_context *ctx = fixture->ctx;
  char path[256];
  egi_safetensors *file;
  api_must(ctx, egi_safetensors_open(ctx, EGI_TEST_DATA "/qwen3/hf/model.safetensors", &file));
  size_t count = 0, total = egi_safetensors_count(file);
  egi_safetensor *tensors = EGI_NEW(arena, egi_safetensor, total * EGI_BNB_TENSORS);
  assert_non_null(tensors);
  for (size_t i = 0; i < total; i++) {
    const egi_safetensor *tensor = egi_safetensors_at(file, i);
    if (egi_has_suffix(tensor->name, "_proj.weight"))
      count += encode(ctx, arena, tensor, is_nested, tensors + count);
    else
      tensors[count++] = *tensor;
  }
  api_path(fixture, path, sizeof path, "model.safetensors");
  api_must(ctx, egi_safetensors_write(ctx, path, tensors, count));
  egi_safetensors_close(file);
}

static eg_model *load_new(api_fixture *fixture, const char *folder, const char *config) {
  eg_context *ctx = fixture->ctx;
  char path[256];
  egi_weight_files *weights;
  egi_module *module;
  eg_model *model;
  uint32_t n_calls = 0;
  api_must(ctx, egi_weight_files_open(ctx, folder, &weights));
  const egi_new_options options = {EG_DTYPE_UNDEFINED, 0, weights};
  api_must(ctx, egi_huggingface_new(ctx, config, &options, &module));
  api_must(ctx, egi_graph_call_bodies(module->graphs[0], EGI_BODIES_OWN, &n_calls));
  (void)snprintf(path, sizeof path, "%s/new.onnx", folder);
  api_must(ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  egi_weight_files_close(weights);
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  (void)remove(path);
  return model;
}

/* A model made of codes is the model whose matrices become the same codes at load. */
static void test_folders(void **state) {
  api_fixture *fixture = *state;
  for (int is_nested = 0; is_nested < 2; is_nested++) {
    egi_arena arena;
    double of_file, of_load;
    char path[256];
    egi_arena_init(&arena, fixture->ctx, EGI_PURPOSE_DATA);
    write_folder(fixture, &arena, is_nested != 0);
    eg_model *codes = load_new(fixture, fixture->directory, EGI_TEST_DATA "/qwen3/hf/config.json");
    eg_model *floats = load(fixture->ctx, "qwen3/model.dynamo-op23-sdpa.onnx");
    eg_dataset *dataset = api_dataset(fixture->ctx, 4, 12);
    egi_evaluate_options options = {.tokens = 64};
    api_must(fixture->ctx, egi_evaluate_model(codes, &options, dataset->documents, &of_file));
    api_must(fixture->ctx, egi_quantise_options_make(fixture->ctx, EG_QUANT_NF4, 64, is_nested, &options.quantise));
    api_must(fixture->ctx, egi_evaluate_model(floats, &options, dataset->documents, &of_load));
    assert_true(fabs(of_file - of_load) <= 1e-6 * of_load);
    eg_dataset_destroy(dataset);
    eg_model_destroy(codes);
    eg_model_destroy(floats);
    (void)remove(api_path(fixture, path, sizeof path, "model.safetensors"));
    egi_arena_clear(&arena);
  }
}

/* ---- gpt-oss's own files ---- */

#define GPT_OSS                                                                                                    \
  "{\"model_type\":\"gpt_oss\",\"hidden_size\":32,\"intermediate_size\":32,\"num_hidden_layers\":1,"               \
  "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":16,\"vocab_size\":48,\"num_local_experts\":2," \
  "\"num_experts_per_tok\":1,\"max_position_embeddings\":64,\"sliding_window\":8,"                                 \
  "\"layer_types\":[\"full_attention\"],\"rope_scaling\":{\"rope_type\":\"default\"}}"

/* A stack [E, in, out] of codes that count up, and what they stand for. */
static size_t encode_stack(egi_arena *arena, const egi_safetensor *from, bool is_coded, egi_safetensor *out) {
  static const float levels[8] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  int64_t experts = from->dims[0], in = from->dims[1], rows = from->dims[2];
  size_t n = (size_t)(experts * in * rows);
  uint8_t *codes = egi_arena_get(arena, n / 2, 1), *scales = egi_arena_get(arena, n / 32, 1);
  float *values = EGI_NEW(arena, float, n);
  assert_true(codes && scales && values);
  for (size_t i = 0; i < n; i++) {
    unsigned code = (unsigned)(i * 7 + i / 13) & 15U, scale = 121 + (unsigned)(i / 32) % 3;
    size_t e = i / (size_t)(rows * in), row = i / (size_t)in % (size_t)rows, column = i % (size_t)in;
    codes[i / 2] = (uint8_t)(codes[i / 2] | code << (i % 2 * 4));
    scales[i / 32] = (uint8_t)scale;
    float value = ldexpf(levels[code & 7U], (int)scale - 127);
    values[(e * (size_t)in + column) * (size_t)rows + row] = code & 8U ? -value : value;
  }
  if (!is_coded) {
    *out = *from;
    out->data = (const uint8_t *)values;
    return 1;
  }
  out[0] = (egi_safetensor){
      egi_arena_format(arena, "%s_blocks", from->name), EG_DTYPE_U8, 4, {experts, rows, in / 32, 16}, codes, n / 2};
  out[1] = (egi_safetensor){
      egi_arena_format(arena, "%s_scales", from->name), EG_DTYPE_U8, 3, {experts, rows, in / 32}, scales, n / 32};
  return 2;
}

/* All parameters of the model, with experts as codes or as what these stand for. */
static void write_experts(api_fixture *fixture, egi_arena *arena, const char *config, bool is_coded) {
  eg_context *ctx = fixture->ctx;
  const egi_new_options options = {EG_DTYPE_F32, 3, NULL};
  egi_module *module;
  char path[256];
  size_t count = 0;
  api_must(ctx, egi_huggingface_new(ctx, config, &options, &module));
  egi_safetensor *tensors = EGI_NEW(arena, egi_safetensor, 2 * (size_t)module->n_weights);
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_weight *weight = &module->weights[i];
    uint64_t bytes = 0;
    if (!egi_has_suffix(weight->name, ".weight") && !egi_has_suffix(weight->name, ".bias") &&
        !egi_has_suffix(weight->name, ".sinks") && strstr(weight->name, ".experts.") == NULL)
      continue;
    api_must(ctx, egi_weight_bytes(ctx, weight, &bytes));
    uint8_t *data = egi_arena_get(arena, (size_t)bytes, 1);
    api_must(ctx, egi_weight_write(ctx, weight, data));
    egi_safetensor tensor = {
        egi_arena_format(arena, "%s", weight->name), weight->dtype, weight->rank, {0}, data, bytes};
    memcpy(tensor.dims, weight->dims, sizeof tensor.dims);
    if (egi_has_suffix(weight->name, "_proj") && weight->rank == 3)
      count += encode_stack(arena, &tensor, is_coded, tensors + count);
    else
      tensors[count++] = tensor;
  }
  egi_module_destroy(module);
  api_path(fixture, path, sizeof path, "model.safetensors");
  api_must(ctx, egi_safetensors_write(ctx, path, tensors, count));
}

static double loss_of_experts(api_fixture *fixture, bool is_coded, eg_quant quant) {
  egi_arena arena;
  char config[256], path[256];
  double loss = 0;
  egi_arena_init(&arena, fixture->ctx, EGI_PURPOSE_DATA);
  api_write(fixture, "config.json", GPT_OSS);
  api_path(fixture, config, sizeof config, "config.json");
  write_experts(fixture, &arena, config, is_coded);
  eg_model *model = load_new(fixture, fixture->directory, config);
  eg_dataset *dataset = api_dataset(fixture->ctx, 4, 12);
  egi_evaluate_options options = {.tokens = 64};
  api_must(fixture->ctx, egi_quantise_options_make(fixture->ctx, quant, 64, 1, &options.quantise));
  api_must(fixture->ctx, egi_evaluate_model(model, &options, dataset->documents, &loss));
  eg_trainer_options training = quantised(quant, 64, 1);
  eg_trainer *trainer;
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &training, &trainer)); /* the router is no target */
  assert_int_equal(eg_trainer_parameter_count(trainer), 8);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
  (void)remove(config);
  (void)remove(api_path(fixture, path, sizeof path, "model.safetensors"));
  egi_arena_clear(&arena);
  return loss;
}

static void test_mxfp4(void **state) {
  api_fixture *fixture = *state;
  double of_codes = loss_of_experts(fixture, true, EG_QUANT_NONE);
  double of_values = loss_of_experts(fixture, false, EG_QUANT_NONE);
  assert_true(fabs(of_codes - of_values) <= 1e-6 * of_values);
  double again = loss_of_experts(fixture, true, EG_QUANT_NF4), wanted = loss_of_experts(fixture, false, EG_QUANT_NF4);
  assert_true(fabs(again - wanted) <= 1e-6 * wanted);
  assert_true(fabs(again - of_codes) > 1e-6);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_curves, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_left_alone, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_head, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_memory, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_refused, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_runner, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_folders, api_setup, api_teardown),
                                     cmocka_unit_test_setup_teardown(test_mxfp4, api_setup, api_teardown)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
