/* Models whose inputs differ from the usual: fixed sizes, 32-bit inputs under other names, and
 * one that nobody knows how to fill. All train to the same loss as the plain model. */
#include "support_api.h"

#include <math.h>
#include <string.h>

typedef eg_status (*change)(egi_graph *graph);

static void set_dims(egi_graph *graph, const char *name, int64_t rows, int64_t columns) {
  egi_value *value = &graph->values[egi_graph_find_value(graph, name)];
  if (rows > 0) value->dims[0] = egi_dim_constant(graph->module->dims, rows);
  if (columns > 0) value->dims[1] = egi_dim_constant(graph->module->dims, columns);
}

static eg_status fix_sizes(egi_graph *graph) {
  set_dims(graph, "input_ids", 2, 24);
  set_dims(graph, "attention_mask", 2, 24);
  set_dims(graph, "position_ids", 2, 24);
  return EG_OK;
}

static eg_status fix_batch(egi_graph *graph) {
  set_dims(graph, "input_ids", 2, 0);
  set_dims(graph, "attention_mask", 2, 0);
  set_dims(graph, "position_ids", 2, 0);
  return EG_OK;
}

static eg_status narrow(egi_graph *graph) {
  static const char *const names[] = {"input_ids", "attention_mask", "position_ids"};
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    graph->values[egi_graph_find_value(graph, names[i])].dtype = EG_DTYPE_I32;
  EG_TRY(egi_graph_rename_value(graph, egi_graph_find_value(graph, "attention_mask"), "mask"));
  EG_TRY(egi_graph_rename_value(graph, egi_graph_find_value(graph, "position_ids"), "positions"));
  return egi_graph_rename_value(graph, egi_graph_find_value(graph, "input_ids"), "tokens");
}

static eg_status add_unknown(egi_graph *graph) {
  const egi_value_id ids = egi_graph_find_value(graph, "input_ids");
  egi_value_id extra;
  EG_TRY(egi_graph_add_input(graph, "feature_ids", EG_DTYPE_I64, 2, graph->values[ids].dims, &extra));
  return egi_graph_rename_value(graph, ids, "tokens"); /* known by the table that it indexes */
}

static eg_model *changed_model(api_fixture *fixture, change apply) {
  char path[256];
  egi_module *module;
  eg_model *model;
  egi_new_options options = {.dtype = EG_DTYPE_F32, .seed = 3};
  api_path(fixture, path, sizeof path, "config.json");
  api_must(fixture->ctx, egi_huggingface_new(fixture->ctx, path, &options, &module));
  api_must(fixture->ctx, apply(module->graphs[0]));
  egi_graph_forget_types(module->graphs[0]);
  api_must(fixture->ctx, egi_infer_graph(module->graphs[0]));
  api_path(fixture, path, sizeof path, "changed.onnx");
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

/* One step over all documents, however many batches they make. */
static eg_status first_loss(api_fixture *fixture, eg_model *model, uint32_t tokens, uint32_t accumulate,
                            eg_step_report *out_report) {
  eg_dataset *dataset = api_dataset(fixture->ctx, 5, 20);
  eg_trainer_options options = api_options();
  eg_trainer *trainer = NULL;
  options.tokens = tokens;
  options.accumulate = accumulate;
  eg_status status = eg_trainer_create(model, dataset, &options, &trainer);
  if (status == EG_OK) status = eg_trainer_step(trainer, out_report);
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  return status;
}

static void check_same(api_fixture *fixture, change apply) {
  eg_step_report plain, changed;
  eg_model *model = api_model(fixture, fixture->ctx), *other = changed_model(fixture, apply);
  api_must(fixture->ctx, first_loss(fixture, model, 100, 1, &plain));
  api_must(fixture->ctx, first_loss(fixture, other, 48, 3, &changed));
  assert_int_equal(plain.n_targets, changed.n_targets);
  assert_true(fabs(plain.loss - changed.loss) <= 1e-6 * plain.loss);
  assert_true(fabs(plain.gradient_norm - changed.gradient_norm) <= 1e-5 * plain.gradient_norm);
  eg_model_destroy(model);
  eg_model_destroy(other);
}

static void test_fixed_sizes(void **state) {
  check_same(*state, fix_sizes);
}

static void test_fixed_batch(void **state) {
  check_same(*state, fix_batch);
}

static void test_narrow_tokens(void **state) {
  check_same(*state, narrow);
}

static void test_too_few_tokens(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = changed_model(fixture, fix_sizes);
  eg_step_report report;
  assert_int_equal(first_loss(fixture, model, 47, 1, &report), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "48 tokens");
  eg_model_destroy(model);
}

/* A table of 16 positions, all zeros, whose rows are added to the logits. */
static eg_status add_positions(egi_graph *graph) {
  static const float zeros[16] = {0};
  egi_emitter emit = {.graph = graph};
  egi_tensor table = {
      .data = (void *)(uintptr_t)zeros, .dtype = EG_DTYPE_F32, .rank = 2, .dims = {16, 1}, .strides = {1, 1}};
  egi_value_id weight;
  EG_TRY(egi_add_constant(graph, "positions", &table, &weight));
  const egi_value_id logits = graph->outputs[0];
  egi_value_id row = egi_emit_binary(&emit, EGI_OP_Gather, weight, egi_graph_find_value(graph, "position_ids"));
  graph->outputs[0] = egi_emit_binary(&emit, EGI_OP_Add, logits, row);
  EG_TRY(emit.status);
  EG_TRY(egi_graph_rename_value(graph, logits, "plain"));
  return egi_graph_rename_value(graph, graph->outputs[0], "logits");
}

/* Logits that are no numbers where a row holds a token 0. */
static eg_status dread_zero(egi_graph *graph) {
  static const int64_t one[1] = {1}, two[1] = {2};
  egi_emitter emit = {.graph = graph};
  const egi_value_id logits = graph->outputs[0], ids = egi_graph_find_value(graph, "input_ids");
  egi_value_id inverse = egi_emit_unary(&emit, EGI_OP_Reciprocal, egi_emit_cast(&emit, ids, EG_DTYPE_F32));
  egi_value_id largest = egi_emit_binary(&emit, EGI_OP_ReduceMax, inverse, egi_emit_integers(&emit, one, 1));
  egi_value_id nothing = egi_emit_binary(&emit, EGI_OP_Sub, largest, largest);
  nothing = egi_emit_binary(&emit, EGI_OP_Unsqueeze, nothing, egi_emit_integers(&emit, two, 1));
  graph->outputs[0] = egi_emit_binary(&emit, EGI_OP_Add, logits, nothing);
  EG_TRY(emit.status);
  EG_TRY(egi_graph_rename_value(graph, logits, "plain"));
  return egi_graph_rename_value(graph, graph->outputs[0], "logits");
}

/* Rows are filled up with their own tokens. */
static void test_padding(void **state) {
  api_fixture *fixture = *state;
  static const int32_t tokens[] = {1, 2, 3, 4, 5, 6};
  const eg_document documents[] = {{tokens, NULL, 6}, {tokens + 2, NULL, 3}};
  eg_trainer_options options = api_options();
  eg_model *model = changed_model(fixture, dread_zero);
  eg_dataset *dataset;
  eg_trainer *trainer;
  eg_step_report report;
  options.tokens = 12;
  api_must(fixture->ctx, eg_dataset_create(fixture->ctx, documents, 2, &dataset));
  api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
  api_must(fixture->ctx, eg_trainer_step(trainer, &report));
  assert_int_equal(report.n_targets, 7);
  assert_true(isfinite(report.loss));
  eg_trainer_destroy(trainer);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

static int count_token(void *userdata, int32_t token) {
  (void)token;
  ++*(size_t *)userdata;
  return 0;
}

/* Found before the first step; generation goes to the end of the table. */
static void test_too_few_positions(void **state) {
  api_fixture *fixture = *state;
  static const int32_t prompt[] = {1, 2, 3};
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  eg_model *model = changed_model(fixture, add_positions);
  eg_runner *runner;
  eg_step_report report;
  size_t n_tokens = 0;
  assert_int_equal(first_loss(fixture, model, 100, 1, &report), EG_ERROR_DATA);
  api_expect_error(fixture->ctx, "a table of 16 positions");
  options.max_tokens = 30;
  api_must(fixture->ctx, eg_runner_create(model, NULL, &runner));
  assert_int_equal(eg_runner_generate(runner, prompt, 3, &options, count_token, &n_tokens), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "at most 16 tokens");
  assert_int_equal(n_tokens, 14);
  eg_runner_destroy(runner);
  eg_model_destroy(model);
}

static void test_unknown_input(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = changed_model(fixture, add_unknown);
  eg_step_report report;
  assert_int_equal(first_loss(fixture, model, 100, 1, &report), EG_ERROR_UNSUPPORTED);
  api_expect_error(fixture->ctx, "\"feature_ids\" int64[batch,sequence]");
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_fixed_sizes, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_fixed_batch, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_narrow_tokens, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_too_few_tokens, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_too_few_positions, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_padding, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(test_unknown_input, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
