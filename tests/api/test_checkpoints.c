/* Less memory for more time changes no bit: gradients of every rung that budgets lead to equal those of a trainer that
 * keeps everything, for dense models, experts, plain graphs, full training, padded and packed rows. Budgets are held,
 * and one that cannot be is refused with the least that would do. */
#include "support_api.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_BUDGETS = 20, LONGEST = 61 };

/* A run to compare: the first step's gradients, and the bytes planned. */
typedef struct outcome {
  float *gradients;
  size_t count;
  uint64_t total;
  double loss;
  egi_plan_transfers transfers;
} outcome;

static void spoil(eg_trainer *trainer) {
  for (size_t i = 0; i < eg_trainer_parameter_count(trainer); i++) {
    eg_parameter_info info;
    size_t count = 1;
    assert_int_equal(eg_trainer_parameter_info(trainer, i, &info), EG_OK);
    for (uint32_t axis = 0; axis < info.rank; axis++) count *= (size_t)info.dims[axis];
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    assert_int_equal(eg_trainer_read_parameter(trainer, i, values, count), EG_OK);
    for (size_t k = 0; k < count; k++) values[k] += 0.02F * (float)((int)((7 * k + 3 * i) % 13) - 6);
    assert_int_equal(egi_trainer_write(trainer, i, values, count), EG_OK);
    free(values);
  }
}

static outcome run(eg_context *ctx, eg_model *model, eg_dataset *dataset, const eg_trainer_options *options) {
  outcome result = {.gradients = NULL};
  eg_trainer *trainer;
  eg_step_report report;
  egi_trainer_memory memory;
  api_must(ctx, eg_trainer_create(model, dataset, options, &trainer));
  spoil(trainer); /* new adapters are half zeros, and so would be half of the gradients */
  api_must(ctx, eg_trainer_step(trainer, &report));
  egi_trainer_bytes(trainer, &trainer->lanes, &memory);
  result.gradients = api_read(trainer, true, &result.count);
  result.total = memory.total;
  egi_plan_get_transfers(trainer->lanes.lanes[0].plan, &result.transfers);
  result.loss = report.loss;
  eg_trainer_destroy(trainer);
  return result;
}

static void expect_same(const outcome *a, const outcome *b) {
  assert_int_equal(a->count, b->count);
  assert_memory_equal(&a->loss, &b->loss, sizeof a->loss);
  assert_memory_equal(a->gradients, b->gradients, a->count * sizeof *a->gradients);
  float sum = 0.0F;
  for (size_t i = 0; i < a->count; i++) sum += a->gradients[i] * a->gradients[i];
  assert_true(sum > 1e-6F);
}

/* What an impossible budget is answered. */
static uint64_t least_of(eg_context *ctx, eg_model *model, eg_dataset *dataset, const eg_trainer_options *options) {
  eg_trainer_options own = *options;
  eg_trainer *trainer;
  uint64_t least = 0;
  own.memory_budget = 1;
  assert_int_equal(eg_trainer_create(model, dataset, &own, &trainer), EG_ERROR_BUDGET);
  const char *text = strstr(eg_context_error(ctx), "at least ");
  assert_non_null(text);
  assert_int_equal(sscanf(text, "at least %" SCNu64, &least), 1);
  return least;
}

static eg_model *make_model(api_fixture *fixture, int layers, int intermediate) {
  char config[512];
  snprintf(config, sizeof config,
           "{\"model_type\":\"llama\",\"hidden_size\":32,\"intermediate_size\":%d,\"num_hidden_layers\":%d,"
           "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":8,\"vocab_size\":48,"
           "\"initializer_range\":0.2,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\"}",
           intermediate, layers);
  char path[256];
  egi_module *module;
  eg_model *model;
  egi_new_options options = {.dtype = EG_DTYPE_F32, .seed = 3};
  api_write(fixture, "deep.json", config);
  api_path(fixture, path, sizeof path, "deep.json");
  api_must(fixture->ctx, egi_huggingface_new(fixture->ctx, path, &options, &module));
  api_path(fixture, path, sizeof path, "deep.onnx");
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* Double- and single-buffered; what is moved comes back, the last block's input never leaves. */
static void check_offload(eg_context *ctx, eg_model *model, eg_dataset *dataset, eg_trainer_options options,
                          const outcome *keep) {
  options.checkpoint = EG_CHECKPOINT_OFFLOAD;
  for (int is_single = 0; is_single < 2; is_single++) {
    options.single_buffer = is_single;
    outcome moved = run(ctx, model, dataset, &options);
    expect_same(keep, &moved);
    assert_int_equal(moved.transfers.n_offloads, moved.transfers.n_reloads);
    assert_true(moved.transfers.n_slots <= (is_single ? 1 : 2));
    free(moved.gradients);
  }
}

static void sweep(api_fixture *fixture, const char *file, eg_trainer_options options, unsigned n_budgets) {
  char path[256];
  eg_context *ctx = fixture->ctx;
  eg_model *model;
  snprintf(path, sizeof path, "%s/%s", EGI_TEST_DATA, file);
  api_must(ctx, eg_model_load(ctx, path, NULL, &model));
  eg_dataset *dataset = api_dataset(ctx, 5, LONGEST);
  options.checkpoint = EG_CHECKPOINT_OFF;
  outcome keep = run(ctx, model, dataset, &options);
  options.checkpoint = EG_CHECKPOINT_RECOMPUTE;
  outcome again = run(ctx, model, dataset, &options);
  expect_same(&keep, &again);
  check_offload(ctx, model, dataset, options, &keep);
  options.checkpoint = EG_CHECKPOINT_AUTO;
  uint64_t least = least_of(ctx, model, dataset, &options);
  assert_true(least <= again.total && again.total <= keep.total && least < keep.total);
  for (unsigned i = 0; i <= n_budgets; i++) {
    options.host_budget = i % 3 == 1 ? keep.total : 0;
    options.memory_budget = keep.total - (keep.total - least) / n_budgets * i;
    if (i == n_budgets) options.memory_budget = least;
    outcome budgeted = run(ctx, model, dataset, &options);
    assert_true(budgeted.total <= options.memory_budget);
    if (i == 0) assert_int_equal(budgeted.total, keep.total); /* no time is given where memory is enough */
    expect_same(&keep, &budgeted);
    free(budgeted.gradients);
  }
  free(keep.gradients);
  free(again.gradients);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static eg_trainer_options options_of(uint32_t tokens, uint32_t accumulate) {
  eg_trainer_options options = api_options();
  options.tokens = tokens;
  options.accumulate = accumulate;
  return options;
}

static void budgets_are_held_by_a_dense_model(void **state) {
  sweep(*state, "llama/model.dynamo-op23-sdpa.onnx", options_of(128, 2), N_BUDGETS);
}

static void budgets_are_held_by_a_model_of_experts(void **state) {
  sweep(*state, "gpt_oss/model.dynamo-op23-eager-batched_mm.onnx", options_of(128, 2), N_BUDGETS);
}

/* The routing is kept, the ragged products are made again. */
static void adapters_of_experts_are_made_again(void **state) {
  eg_trainer_options options = options_of(128, 2);
  options.target_parameters = "mlp.experts.gate_up_proj,mlp.experts.down_proj";
  sweep(*state, "gpt_oss/model.dynamo-op23-eager-batched_mm.onnx", options, 4);
  sweep(*state, "qwen3_moe/model.torchscript-op17-eager-all.onnx", options, 4);
  options.no_fuse = 1;
  sweep(*state, "qwen3_moe/model.torchscript-op17-eager-all.onnx", options, 2);
}

/* Rounded matrices are made again, merged with their adapters or not, and round to the same codes. */
static void rounded_matrices_are_made_again(void **state) {
  static const eg_qat kinds[] = {EG_QAT_INT4, EG_QAT_INT8, EG_QAT_NF4};
  for (size_t i = 0; i < EGI_COUNT(kinds); i++) {
    eg_trainer_options options = options_of(128, 2);
    options.qat = kinds[i];
    options.full = i == 1;
    sweep(*state, "llama/model.dynamo-op23-sdpa.onnx", options, 4);
  }
}

/* Codes are turned to numbers again with the products that read them. */
static void quantised_layers_are_made_again(void **state) {
  eg_trainer_options options = options_of(128, 1);
  options.quant = EG_QUANT_NF4;
  sweep(*state, "llama/model.dynamo-op23-sdpa.onnx", options, 4);
}

/* The same elements are dropped again. */
static void dropout_is_made_again(void **state) {
  eg_trainer_options options = options_of(128, 2);
  options.dropout = 0.25;
  sweep(*state, "llama/model.dynamo-op23-sdpa.onnx", options, 6);
}

static void plain_operators_are_made_again(void **state) {
  eg_trainer_options options = options_of(128, 1);
  options.no_fuse = 1;
  sweep(*state, "qwen3/model.torchscript-op17-eager.onnx", options, 4);
  sweep(*state, "qwen3_moe/model.dynamo-op23-sdpa-batched_mm.onnx", options, 4);
}

static void full_training_is_made_again(void **state) {
  eg_trainer_options options = options_of(128, 2);
  options.full = 1;
  sweep(*state, "gpt2/model.dynamo-op20-eager.onnx", options, 4);
}

static void padded_batches_are_made_again(void **state) {
  eg_trainer_options options = options_of(128, 2);
  options.packing = EG_PACKING_OFF;
  sweep(*state, "qwen2/model.dynamo-op23-sdpa.onnx", options, 4);
}

static void rebuilt_metadata_is_made_again(void **state) {
  eg_trainer_options options = options_of(128, 1);
  options.packing_cache = EG_PACKING_CACHE_REBUILD;
  sweep(*state, "llama/model.genai-int4.onnx", options, 4);
}

/* Of six layers all but the last leave, or as many as the host has room for. */
static void a_host_budget_is_held(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = make_model(fixture, 6, 48);
  eg_dataset *dataset = api_dataset(ctx, 5, LONGEST);
  eg_trainer_options options = options_of(64, 1);
  eg_trainer *trainer;
  egi_trainer_memory all, some;
  outcome keep = run(ctx, model, dataset, &options);
  options.checkpoint = EG_CHECKPOINT_OFFLOAD;
  outcome moved = run(ctx, model, dataset, &options);
  expect_same(&keep, &moved);
  assert_int_equal(moved.transfers.n_offloads, 5);
  assert_int_equal(moved.transfers.n_slots, 2);
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  egi_trainer_bytes(trainer, &trainer->lanes, &all);
  eg_trainer_destroy(trainer);
  options.host_budget = all.pinned - 1;
  assert_int_equal(eg_trainer_create(model, dataset, &options, &trainer), EG_ERROR_BUDGET);
  api_expect_error(ctx, "host budget");
  options.checkpoint = EG_CHECKPOINT_AUTO;
  options.host_budget = all.pinned / 2;
  options.memory_budget = all.total + all.pinned; /* with two or three of the five on the host */
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  egi_trainer_bytes(trainer, &trainer->lanes, &some);
  assert_true(some.pinned <= options.host_budget && some.total <= options.memory_budget);
  assert_int_equal(trainer->tiles, 1);
  eg_trainer_destroy(trainer);
  free(keep.gradients);
  free(moved.gradients);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Where there is host memory, and the link is quicker than the products, nothing dear is made again. */
static void what_is_dear_moves(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = make_model(fixture, 6, 96);
  eg_dataset *dataset = api_dataset(ctx, 5, LONGEST);
  eg_trainer_options options = options_of(64, 1);
  eg_trainer *trainer;
  outcome keep = run(ctx, model, dataset, &options);
  options.checkpoint = EG_CHECKPOINT_RECOMPUTE;
  outcome again = run(ctx, model, dataset, &options);
  options.checkpoint = EG_CHECKPOINT_AUTO;
  options.host_budget = UINT64_MAX;
  options.memory_budget = again.total;
  outcome moved = run(ctx, model, dataset, &options);
  expect_same(&keep, &moved);
  expect_same(&keep, &again);
  assert_true(moved.transfers.n_offloads > 6 && moved.transfers.n_offloads == moved.transfers.n_reloads);
  assert_true(moved.total <= options.memory_budget);
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  for (egi_node_id id = 1; id < trainer->machine.graph->n_nodes; id++) {
    const egi_node *node = &trainer->machine.graph->nodes[id];
    bool is_dear = node->op == EGI_OP_Linear || node->op == EGI_OP_MaskedAttention;
    if (is_dear) assert_null(strstr(node->name, "/again"));
  }
  eg_trainer_destroy(trainer);
  free(keep.gradients);
  free(again.gradients);
  free(moved.gradients);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Where no rung is enough wide layers run in tiles: numbers differ in rounding alone, and are the same every time. */
static void wide_layers_run_in_tiles(void **state) {
  api_fixture *fixture = *state;
  eg_context *ctx = fixture->ctx;
  eg_model *model = make_model(fixture, 2, 8192);
  eg_dataset *dataset = api_dataset(ctx, 5, LONGEST);
  eg_trainer_options options = options_of(64, 1);
  eg_trainer *trainer;
  outcome keep = run(ctx, model, dataset, &options);
  options.memory_budget = least_of(ctx, model, dataset, &options);
  api_must(ctx, eg_trainer_create(model, dataset, &options, &trainer));
  assert_true(trainer->tiles > 1);
  eg_trainer_destroy(trainer);
  outcome tiled = run(ctx, model, dataset, &options), second = run(ctx, model, dataset, &options);
  assert_true(tiled.total <= options.memory_budget);
  expect_same(&tiled, &second);
  double sum = 0, size = 0;
  for (size_t i = 0; i < keep.count; i++) {
    sum += pow((double)tiled.gradients[i] - (double)keep.gradients[i], 2);
    size += pow((double)keep.gradients[i], 2);
  }
  assert_true(sqrt(sum / size) <= 1e-6);
  assert_true(fabs(tiled.loss - keep.loss) <= 1e-6 * keep.loss);
  free(keep.gradients);
  free(tiled.gradients);
  free(second.gradients);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Adapters of the upper layer alone: nothing below them has a backward pass. */
static void blocks_below_the_first_adapter_stay(void **state) {
  eg_trainer_options options = options_of(128, 1);
  options.targets = "layers.1.self_attn.q_proj,layers.1.mlp.up_proj";
  sweep(*state, "llama/model.torchscript-op17-eager.onnx", options, 4);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, api_setup, api_teardown)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(budgets_are_held_by_a_dense_model),
                                     TEST(budgets_are_held_by_a_model_of_experts),
                                     TEST(adapters_of_experts_are_made_again),
                                     TEST(rounded_matrices_are_made_again),
                                     TEST(quantised_layers_are_made_again),
                                     TEST(dropout_is_made_again),
                                     TEST(plain_operators_are_made_again),
                                     TEST(full_training_is_made_again),
                                     TEST(padded_batches_are_made_again),
                                     TEST(rebuilt_metadata_is_made_again),
                                     TEST(a_host_budget_is_held),
                                     TEST(what_is_dear_moves),
                                     TEST(wide_layers_run_in_tiles),
                                     TEST(blocks_below_the_first_adapter_stay)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
