/* The exported models of tests/data: every exporter's file of a model gives the names of the PyTorch reference, the
 * canonicalise stage has a fixed point, and the training graph is made without a complaint of the verifier. */
#include "support_passes.h"

#include "proto/proto.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

typedef struct model_file {
  char path[512], folder[512];
  egi_onnx *file;
  egi_module *module;
  egi_mapping reference; /* ref.safetensors: its header names the gradients */
} model_file;

static void load(pass_fixture *fixture, model_file *model) {
  egi_onnx_limits limits;
  char path[640];
  egi_onnx_limits_default(&limits);
  if (egi_onnx_open(fixture->ctx, model->path, &limits, &model->file) != EG_OK ||
      egi_module_import(fixture->ctx, model->file, &model->module) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  snprintf(path, sizeof(path), "%s/ref.safetensors", model->folder);
  assert_int_equal(egi_mapping_open(fixture->ctx, path, &model->reference), EG_OK);
  model->module->evaluator = egi_evaluator_cpu();
  if (fixture->module) egi_module_destroy(fixture->module);
  fixture->module = model->module;
  fixture->graph = model->module->graphs[0];
}

/* Occurrences of "\"TEXT" in the reference's header. */
static unsigned count_names(const model_file *model, const char *text) {
  char quoted[256];
  unsigned count = 0;
  size_t length = (size_t)snprintf(quoted, sizeof(quoted), "\"%s", text);
  uint64_t header_bytes = 0;
  memcpy(&header_bytes, model->reference.data, sizeof(header_bytes));
  const char *header = (const char *)model->reference.data + sizeof(header_bytes);
  for (uint64_t i = 0; i + length <= header_bytes; i++) count += memcmp(header + i, quoted, length) == 0;
  return count;
}

static void check_name(const model_file *model, const char *prefix, const char *path, const char *end, bool is_there) {
  char name[256];
  snprintf(name, sizeof(name), "%s%s%s", prefix, path, end);
  if (count_names(model, name) != (is_there ? 1 : 0)) fail_msg("%s: %s is not the reference's", model->path, path);
}

/* A fused parameter has a name for each of its parts. */
static unsigned check_parameter(const model_file *model, const egi_parameter *parameter) {
  for (uint32_t i = 0; i < parameter->n_parts; i++) check_name(model, "grad.", parameter->parts[i].name, "\"", true);
  if (parameter->n_parts > 0) return parameter->n_parts;
  check_name(model, "grad.", parameter->name, "\"", true);
  return 1;
}

static void check_names(pass_fixture *fixture, const model_file *model) {
  egi_parameter *parameters = NULL;
  egi_linear *linears = NULL;
  size_t n_parameters = 0, n_linears = 0;
  unsigned n_names = 0, n_heads = 0, n_targets = 0;
  assert_int_equal(egi_stack_experts(fixture->graph), EG_OK);
  assert_int_equal(egi_find_parameters(fixture->graph, &fixture->arena, &parameters, &n_parameters), EG_OK);
  assert_int_equal(egi_find_linears(fixture->graph, &fixture->arena, &linears, &n_linears), EG_OK);
  for (size_t i = 0; i < n_parameters; i++) n_names += check_parameter(model, &parameters[i]);
  assert_int_equal(count_names(model, "grad."), n_names);
  for (size_t i = 0; i < n_linears; i++) {
    bool is_target = egi_target_matches(&linears[i], "all-linear");
    n_heads += linears[i].is_head;
    n_targets += is_target;
    check_name(model, "lora.grad.base_model.model.", linears[i].path, ".lora_A", is_target);
  }
  assert_int_equal(n_heads, 1);
  assert_int_equal(count_names(model, "lora.grad."), 2 * n_targets);
}

static void must(pass_fixture *fixture, const model_file *model, eg_status status) {
  if (status != EG_OK) fail_msg("%s: %s", model->path, eg_context_error(fixture->ctx));
}

/* Canonicalise, recognise, then all of it again: nothing may be left to do. Each pass is checked on random input. */
static void check_canonical(pass_fixture *fixture, const model_file *model) {
  const egi_pipeline_options verified = {.verify = true};
  egi_graph *graph = fixture->graph;
  pass_run(fixture, "inline_functions,lower_operators", NULL);
  must(fixture, model, egi_graph_check_operators(graph));
  must(fixture, model, egi_infer_graph(graph));
  egi_pass_report *reports = EGI_NEW(&fixture->arena, egi_pass_report, egi_pass_count());
  assert_non_null(reports);
  must(fixture, model, egi_passes_recognise(graph, &verified, reports));
  for (size_t i = 0; i < egi_pass_count(); i++) {
    const egi_pass_info *pass = egi_pass_at(i);
    egi_pass_report report = {0};
    egi_pass_run run = {.ctx = fixture->ctx, .report = &report};
    if (pass->stage != EGI_STAGE_CANONICALISE && pass->stage != EGI_STAGE_RECOGNISE) continue;
    must(fixture, model, pass->run(&run, graph));
    if (run.has_changed) fail_msg("%s: %s has not settled", model->path, pass->name);
  }
}

static void check_training(pass_fixture *fixture, const model_file *model) {
  const egi_adapt_options adapt = {.is_full = true, .has_gradient = true};
  egi_parameter *parameters = NULL;
  size_t n_parameters = 0;
  must(fixture, model, egi_find_parameters(fixture->graph, &fixture->arena, &parameters, &n_parameters));
  pass_run(fixture,
           "widen_floats,append_loss,graft_adapters,dispatch_moe,differentiate,eliminate_common,eliminate_dead",
           &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_Accumulate), n_parameters);
}

static void check_folder(pass_fixture *fixture, const char *name, unsigned *n_files) {
  model_file model = {{0}, {0}, NULL, NULL, {0}};
  snprintf(model.folder, sizeof(model.folder), "%s/%s", EGI_TEST_DATA, name);
  DIR *folder = opendir(model.folder);
  if (!folder) return;
  for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
    /* Files of narrow weights have a reference of their own, with the same names. */
    if (!egi_has_prefix(entry->d_name, "model.") || !egi_has_suffix(entry->d_name, ".onnx")) continue;
    snprintf(model.path, sizeof(model.path), "%.400s/%.100s", model.folder, entry->d_name);
    load(fixture, &model);
    check_canonical(fixture, &model);
    if (strstr(entry->d_name, "int4") == NULL) { /* quantised weights are no parameters */
      check_names(fixture, &model);
      check_training(fixture, &model);
    }
    egi_mapping_close(&model.reference);
    ++*n_files;
  }
  closedir(folder);
}

static void every_exporters_file_becomes_the_same_model(void **state) {
  unsigned n_files = 0;
  DIR *data = opendir(EGI_TEST_DATA);
  assert_non_null(data);
  for (struct dirent *entry = readdir(data); entry; entry = readdir(data)) {
    if (entry->d_name[0] != '.' && !strchr(entry->d_name, '.')) check_folder(*state, entry->d_name, &n_files);
  }
  closedir(data);
  assert_true(n_files >= 12);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(every_exporters_file_becomes_the_same_model)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
