/* Rewritten models in files: fused operators leave as functions and come back as operators; a function that only has
 * the name of one stays what it is; and fused operators run and train as their bodies. */
#include "support_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HEADER "<ir_version: 10, opset_import: [\"\": 23, \"engraft\": 1]>\n"
#define GRAPH(nodes) \
  HEADER "g (float[b,4,s,8] q, float[b,2,s,8] k, bool[b,s] m, float[4] sinks) => (float[b,4,s,8] y) { " nodes " }\n"
#define ATTENTION                                                             \
  "x = engraft.Attention <causal = 1, window = 3, scale = 0.3> (q, k, k, m) " \
  "y = engraft.Attention <causal = 1, softcap = 2.0> (x, k, k, , sinks)"

static void write_text(api_fixture *fixture, const char *text, char *path, size_t size, const char *name) {
  egi_module *module;
  api_path(fixture, path, size, name);
  api_must(fixture->ctx, egi_module_parse(fixture->ctx, text, strlen(text), &module));
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
}

static int append(void *userdata, const void *bytes, size_t size_bytes) {
  egi_text_append(userdata, bytes, size_bytes);
  return 0;
}

static void print(api_fixture *fixture, const char *path, egi_text *out) {
  eg_model *model;
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  egi_text_init(out, fixture->ctx);
  api_must(fixture->ctx, eg_model_print(model, append, out));
  eg_model_destroy(model);
}

static void resave(api_fixture *fixture, const char *from, const char *to) {
  eg_model *model;
  api_must(fixture->ctx, eg_model_load(fixture->ctx, from, NULL, &model));
  api_must(fixture->ctx, eg_model_save(model, to));
  eg_model_destroy(model);
}

static void fused_operators_come_back(void **state) {
  api_fixture *fixture = *state;
  char first[192], second[192], third[192];
  egi_text a, b;
  egi_mapping x, y;
  write_text(fixture, GRAPH(ATTENTION), first, sizeof first, "first.onnx");
  resave(fixture, first, api_path(fixture, second, sizeof second, "second.onnx"));
  print(fixture, first, &a);
  print(fixture, second, &b);
  assert_non_null(strstr(egi_text_string(&a), "engraft.Attention"));
  assert_string_equal(egi_text_string(&a), egi_text_string(&b));
  resave(fixture, second, api_path(fixture, third, sizeof third, "third.onnx"));
  api_must(fixture->ctx, egi_mapping_open(fixture->ctx, second, &x));
  api_must(fixture->ctx, egi_mapping_open(fixture->ctx, third, &y));
  assert_true(x.size_bytes == y.size_bytes && memcmp(x.data, y.data, x.size_bytes) == 0);
  egi_mapping_close(&x);
  egi_mapping_close(&y);
  egi_text_free(&a);
  egi_text_free(&b);
}

/* One number of the body is another: the file means something else, and is taken at its word. */
static void other_functions_are_inlined(void **state) {
  api_fixture *fixture = *state;
  char path[192];
  egi_text text;
  write_text(
      fixture,
      GRAPH("y = engraft.Attention:body1 <scale = 0.3> (q, k, k)") "<domain: \"engraft\", overload: \"body1\", "
                                                                   "opset_import: [\"\": 23]>\n"
                                                                   "Attention <scale: float = 0.3> (q, k, v) => (y) "
                                                                   "{ y = Neg (q) }\n",
      path, sizeof path, "other.onnx");
  print(fixture, path, &text);
  assert_null(strstr(egi_text_string(&text), "engraft.Attention"));
  assert_non_null(strstr(egi_text_string(&text), "Neg"));
  egi_text_free(&text);
}

/* A call with attributes that the operator does not have: nobody asks what its body would be. */
static void wrong_attributes_are_no_operator(void **state) {
  api_fixture *fixture = *state;
  char path[192];
  egi_text text;
  write_text(fixture,
             HEADER
             "g (float[b,8] x, uint8[4,1,4] w, float[4,1] s) => (float[b,8] y) { y = engraft.Linear:body1 <storage = "
             "\"nbits\", bits = 0, block_size = 0, in_features = 8, out_features = 4> (x, w, , s) }\n"
             "<domain: \"engraft\", overload: \"body1\", opset_import: [\"\": 23]>\n"
             "Linear (x, w, b, s) => (y) { y = Neg (x) }\n",
             path, sizeof path, "wrong.onnx");
  print(fixture, path, &text);
  assert_null(strstr(egi_text_string(&text), "engraft.Linear"));
  egi_text_free(&text);
}

/* The first number of a file's first gradient, loss and a logit, fused and not: they differ by rounding alone. */
static void bodies_train_as_operators_do(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_dataset *dataset = api_dataset(fixture->ctx, 4, 12);
  double losses[2];
  float *gradients[2];
  size_t count = 0;
  for (int i = 0; i < 2; i++) {
    eg_trainer_options options = api_options();
    eg_trainer *trainer;
    eg_step_report report;
    options.no_fuse = i;
    api_must(fixture->ctx, eg_trainer_create(model, dataset, &options, &trainer));
    if (i == 1)
      for (egi_node_id id = 1; id < trainer->machine.graph->n_nodes; id++)
        assert_false(egi_op_is_fused(trainer->machine.graph->nodes[id].op));
    api_must(fixture->ctx, eg_trainer_step(trainer, &report));
    losses[i] = report.loss;
    gradients[i] = api_read(trainer, true, &count);
    eg_trainer_destroy(trainer);
  }
  assert_true(fabs(losses[0] - losses[1]) <= 1e-5 * losses[0]);
  double largest = 0.0;
  for (size_t i = 0; i < count; i++) largest = fmax(largest, fabs((double)gradients[0][i]));
  assert_true(largest > 0.0);
  for (size_t i = 0; i < count; i++)
    assert_true(fabs((double)gradients[0][i] - (double)gradients[1][i]) <= 1e-5 * largest);
  free(gradients[0]);
  free(gradients[1]);
  eg_dataset_destroy(dataset);
  eg_model_destroy(model);
}

/* Without the names of nodes, which say in a file where they belong. */
static void print_nodes(const eg_model *model, egi_text *out) {
  egi_text whole;
  egi_text_init(&whole, model->ctx);
  egi_text_init(out, model->ctx);
  api_must(model->ctx, eg_model_print(model, append, &whole));
  for (const char *line = egi_text_string(&whole); *line != '\0';) {
    size_t length = strcspn(line, "\n");
    const char *end = strstr(line, "] ");
    bool is_named = strncmp(line, "   [", 4) == 0 && end != NULL && end < line + length;
    const char *from = is_named ? end + 2 : line;
    if (is_named) egi_text_add(out, "   ");
    egi_text_append(out, from, (size_t)(line + length - from));
    egi_text_add(out, "\n");
    line += length + (line[length] == '\n' ? 1 : 0);
  }
  egi_text_free(&whole);
}

static eg_model *training_model(api_fixture *fixture, const char *passes, eg_packing packing) {
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_trainer_options options = api_options();
  options.packing = packing;
  api_must(fixture->ctx, eg_model_rewrite(model, NULL, 0));
  api_must(fixture->ctx, eg_model_rewrite_training(model, passes, &options, 0));
  return model;
}

/* The whole training graph, and what a list of passes makes of a model. */
static void training_graphs_come_back(void **state) {
  static const char *const lists[] = {"training", "append_loss,graft_adapters,differentiate,eliminate_dead"};
  api_fixture *fixture = *state;
  char path[192];
  for (size_t i = 0; i < EGI_COUNT(lists); i++) {
    eg_model *first = training_model(fixture, lists[i], EG_PACKING_AUTO), *second;
    egi_text a, b;
    api_must(fixture->ctx, eg_model_save(first, api_path(fixture, path, sizeof path, "training.onnx")));
    api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &second));
    print_nodes(first, &a);
    print_nodes(second, &b);
    assert_non_null(strstr(egi_text_string(&a), "engraft.RMSNormalizationGrad"));
    assert_non_null(strstr(egi_text_string(&a), "engraft.gradient."));
    assert_true((strstr(egi_text_string(&a), "engraft.PackedMetadata <block: int = 64>") != NULL) == (i == 0));
    assert_string_equal(egi_text_string(&a), egi_text_string(&b));
    egi_text_free(&a);
    egi_text_free(&b);
    eg_model_destroy(first);
    eg_model_destroy(second);
  }
}

/* What a Barrier keeps apart stays apart through a file and the passes that join equal nodes. */
static void barriers_stay(void **state) {
  api_fixture *fixture = *state;
  char first[192], second[192];
  egi_text text;
  write_text(fixture,
             HEADER
             "g (float[b,8] x, float[b,8] d) => (float[b,8] y) { a = Exp (x) z = engraft.Barrier (x, d) c = Exp (z) "
             "s = Mul (a, d) y = Mul (s, c) }\n",
             first, sizeof first, "barrier.onnx");
  resave(fixture, first, api_path(fixture, second, sizeof second, "barrier_again.onnx"));
  eg_model *model;
  api_must(fixture->ctx, eg_model_load(fixture->ctx, second, NULL, &model));
  api_must(fixture->ctx, eg_model_rewrite(model, NULL, 0));
  print_nodes(model, &text);
  const char *once = strstr(egi_text_string(&text), "= Exp");
  assert_non_null(strstr(egi_text_string(&text), "engraft.Barrier"));
  assert_non_null(once);
  assert_non_null(strstr(once + 1, "= Exp"));
  egi_text_free(&text);
  eg_model_destroy(model);
}

static void wrong_lists_are_refused(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = api_model(fixture, fixture->ctx);
  eg_trainer_options options = api_options();
  assert_int_equal(eg_model_rewrite_training(NULL, "training", &options, 0), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_rewrite_training(model, "training,nothing", &options, 0), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "no pass named \"nothing\"");
  options.targets = "nobody";
  assert_int_equal(eg_model_rewrite_training(model, "training", &options, 0), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "nobody");
  options = api_options();
  options.rank = 0;
  assert_int_equal(eg_model_rewrite_training(model, "training", &options, 0), EG_ERROR_ARGUMENT);
  options = api_options();
  api_must(fixture->ctx, eg_model_rewrite_training(model, "training", &options, 0));
  assert_int_equal(eg_model_rewrite_training(model, "training", &options, 0), EG_ERROR_ARGUMENT);
  api_expect_error(fixture->ctx, "has a loss already");
  eg_model_destroy(model);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, api_setup, api_teardown)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(fused_operators_come_back),        TEST(other_functions_are_inlined),
                                     TEST(wrong_attributes_are_no_operator), TEST(bodies_train_as_operators_do),
                                     TEST(training_graphs_come_back),        TEST(barriers_stay),
                                     TEST(wrong_lists_are_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
