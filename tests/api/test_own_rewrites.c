/* Rules and passes that a host registers: found by name, asked about matches, reported, refused where they are wrong.
 */
#include "support_api.h"

#include <string.h>

#define TEXT                                                                       \
  "<ir_version: 10, opset_import: [\"\": 23]>\n"                                   \
  "g (float[b,4] x) => (float[b,4] y) <float c = {3}, float[4] v = {1, 2, 3, 4}> " \
  "{ p = Mul (x, c) q = Add (p, v) y = Relu (q) }\n"

static const char *const scaled_sum[] = {"(a, b, v) => (y) { p = Mul (a, b) y = Add (p, v) }"};

typedef struct seen {
  unsigned n_calls;
  double number;
  eg_value_info value;
  int answer;
} seen;

static eg_model *load(api_fixture *fixture) {
  char path[192];
  egi_module *module;
  eg_model *model;
  api_path(fixture, path, sizeof path, "own.onnx");
  api_must(fixture->ctx, egi_module_parse(fixture->ctx, TEXT, strlen(TEXT), &module));
  api_must(fixture->ctx, egi_module_export(module, module->graphs[0], path));
  egi_module_destroy(module);
  api_must(fixture->ctx, eg_model_load(fixture->ctx, path, NULL, &model));
  return model;
}

static int append(void *userdata, const void *bytes, size_t size_bytes) {
  egi_text_append(userdata, bytes, size_bytes);
  return 0;
}

/* The graph, or the report, holds `part`. */
static bool holds(api_fixture *fixture, const eg_model *model, bool is_report, const char *part) {
  egi_text text;
  egi_text_init(&text, fixture->ctx);
  api_must(fixture->ctx, is_report ? eg_model_report(model, append, &text) : eg_model_print(model, append, &text));
  bool is_held = strstr(egi_text_string(&text), part) != NULL;
  egi_text_free(&text);
  return is_held;
}

static int look(eg_match *match, void *userdata) {
  seen *s = userdata;
  double unknown = 0;
  s->n_calls++;
  assert_int_equal(eg_match_number(match, "b", &s->number), 1);
  assert_int_equal(eg_match_number(match, "v", &unknown), 0);
  assert_int_equal(eg_match_value(match, "p", &s->value), 1);
  assert_int_equal(eg_match_value(match, "nobody", &s->value), 0);
  if (!s->answer) return eg_match_refuse(match, "of a reason");
  eg_match_set_float(match, "alpha", (float)s->number + 1);
  return 1;
}

static eg_rule make_rule(seen *s) {
  eg_rule rule = EG_RULE_INIT;
  rule.name = "scale";
  rule.patterns = scaled_sum;
  rule.n_patterns = 1;
  rule.replacement = "(a, v) => (y) { e = Elu <alpha: float = @alpha> (a) y = Add (e, v) }";
  rule.check = look;
  rule.userdata = s;
  return rule;
}

static void a_rule_rewrites(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture);
  seen s = {.answer = 1};
  eg_rule rule = make_rule(&s);
  rule.replacement = "(a, v) => (y) { e = Gelu (a) y = Sub (e, v) }";
  api_must(fixture->ctx, eg_model_add_rule(model, &rule));
  api_must(fixture->ctx, eg_model_rewrite(model, "fold_constants,scale", 0));
  assert_int_equal(s.n_calls, 1);
  assert_true(s.number == 3.0);
  assert_string_equal(s.value.op, "Mul");
  assert_int_equal(s.value.rank, 2);
  assert_true(s.value.dims[0] == -1 && s.value.dims[1] == 4);
  assert_true(holds(fixture, model, false, "Gelu") && !holds(fixture, model, false, "Mul"));
  assert_true(holds(fixture, model, true, "\"rule\":\"scale\",\"tried\":1,\"matched\":1"));
  assert_int_equal(eg_model_rewrite(model, "scale", 1), EG_OK); /* nothing is left to do */
  assert_int_equal(s.n_calls, 1);
  eg_model_destroy(model);
}

/* --verify tells a rule that changes results. */
static void a_wrong_rule_is_found_out(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture);
  seen s = {.answer = 1};
  eg_rule rule = make_rule(&s);
  rule.replacement = "(a, v) => (y) { y = Add (a, v) }";
  api_must(fixture->ctx, eg_model_add_rule(model, &rule));
  assert_int_equal(eg_model_rewrite(model, "scale", 1), EG_ERROR_INTERNAL);
  api_expect_error(fixture->ctx, "scale");
  assert_true(holds(fixture, model, false, "Mul"));
  eg_model_destroy(model);
}

static void a_check_refuses(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture);
  seen s = {.answer = 0};
  eg_rule rule = make_rule(&s);
  rule.replacement = "(a, v) => (y) { y = Add (a, v) }";
  api_must(fixture->ctx, eg_model_add_rule(model, &rule));
  api_must(fixture->ctx, eg_model_rewrite(model, "scale", 0));
  assert_int_equal(s.n_calls, 1);
  assert_true(holds(fixture, model, true, "of a reason") && holds(fixture, model, false, "Mul"));
  eg_model_destroy(model);
}

static void expect_refused(api_fixture *fixture, eg_model *model, const eg_rule *rule, const char *part) {
  assert_int_not_equal(eg_model_add_rule(model, rule), EG_OK);
  api_expect_error(fixture->ctx, part);
}

static void wrong_rules_are_refused(void **state) {
  static const char *const unknown[] = {"(x) => (y) { y = Nonsense (x) }"};
  static const char *const broken[] = {"(x) => (y) { y = Relu (x }"};
  static const char *const empty[] = {"(x) => (x) { y = Relu (x) }"};
  api_fixture *fixture = *state;
  eg_model *model = load(fixture);
  seen s = {0};
  eg_rule rule = make_rule(&s);
  rule.name = "fuse_norm";
  expect_refused(fixture, model, &rule, "already");
  rule.name = "a,b";
  expect_refused(fixture, model, &rule, "without commas");
  rule.name = "own";
  rule.patterns = unknown;
  expect_refused(fixture, model, &rule, "Nonsense");
  rule.patterns = broken;
  expect_refused(fixture, model, &rule, "rule own");
  rule.patterns = empty;
  expect_refused(fixture, model, &rule, "is an input of it");
  rule.patterns = scaled_sum;
  rule.replacement = "(a) => (y, z) { y = Relu (a) z = Relu (y) }";
  expect_refused(fixture, model, &rule, "1 and 2 results");
  rule.replacement = NULL;
  expect_refused(fixture, model, &rule, "missing");
  rule = make_rule(&s);
  rule.replacement = "(a, v) => (y) { y = Add (a, v) }";
  api_must(fixture->ctx, eg_model_add_rule(model, &rule));
  expect_refused(fixture, model, &rule, "already");
  assert_int_equal(eg_model_rewrite(model, "own", 0), EG_ERROR_ARGUMENT);
  eg_model_destroy(model);
}

/* ---- passes ---------------------------------------------------------------------------------------------------- */

typedef struct plan {
  const char *text;
  eg_status status;
  unsigned n_nodes;
} plan;

static eg_status replace_relu(eg_graph *graph, void *userdata) {
  plan *p = userdata;
  for (size_t i = 0; i < eg_graph_node_count(graph); i++) {
    eg_node_info node;
    eg_value_info value;
    double number = 0;
    assert_int_equal(eg_graph_node(graph, i, &node), 1);
    assert_int_equal(eg_graph_output(graph, i, 0, &value), 1);
    assert_int_equal(eg_graph_input(graph, i, node.n_inputs, &value), 0);
    if (strcmp(node.op, "Mul") == 0) assert_true(eg_graph_input_number(graph, i, 1, &number) && number == 3.0);
    assert_int_equal(eg_graph_attribute(graph, i, "axis", &number), 0);
    p->n_nodes++;
    if (strcmp(node.op, "Relu") == 0 && p->text != NULL) {
      eg_status status = eg_graph_replace(graph, i, p->text);
      if (status != EG_OK) return status;
    }
  }
  assert_int_equal(eg_graph_replace(graph, eg_graph_node_count(graph), "() => (y) { }"), EG_ERROR_ARGUMENT);
  return p->status;
}

static void a_pass_rewrites(void **state) {
  api_fixture *fixture = *state;
  eg_model *model = load(fixture);
  plan p = {.text = "(x) => (y) { z = Constant <value_float = 0.0> () y = Max (x, z) }"};
  api_must(fixture->ctx, eg_model_add_pass(model, "no_relu", replace_relu, &p));
  api_must(fixture->ctx, eg_model_rewrite(model, "no_relu", 1));
  assert_int_equal(p.n_nodes, 3);
  assert_true(holds(fixture, model, false, "Max") && !holds(fixture, model, false, "Relu"));
  assert_true(holds(fixture, model, true, "\"pass\":\"no_relu\",\"tried\":3,\"matched\":1"));
  assert_true(holds(fixture, model, false, "float[b,4] y"));
  eg_model_destroy(model);
}

static void wrong_passes_fail(void **state) {
  static const char *const texts[] = {"(x, z) => (y) { y = Max (x, z) }", "(x) => (y) { y = Max (x",
                                      "(x) => (y) { y = ReduceSum <keepdims = 0> (x) }", "(x) => (y) { y = Odd (x) }"};
  api_fixture *fixture = *state;
  eg_model *model = load(fixture);
  plan p = {0};
  assert_int_equal(eg_model_add_pass(model, NULL, replace_relu, &p), EG_ERROR_ARGUMENT);
  assert_int_equal(eg_model_add_pass(model, "p", NULL, &p), EG_ERROR_ARGUMENT);
  api_must(fixture->ctx, eg_model_add_pass(model, "p", replace_relu, &p));
  assert_int_equal(eg_model_add_pass(model, "p", replace_relu, &p), EG_ERROR_ARGUMENT);
  for (size_t i = 0; i < EGI_COUNT(texts); i++) {
    p.text = texts[i];
    assert_int_not_equal(eg_model_rewrite(model, "p", 0), EG_OK);
    assert_true(strlen(eg_context_error(fixture->ctx)) > 0 && holds(fixture, model, false, "Relu"));
  }
  p = (plan){.status = EG_ERROR_STOPPED};
  assert_int_equal(eg_model_rewrite(model, "p", 0), EG_ERROR_STOPPED);
  eg_model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_rule_rewrites, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(a_wrong_rule_is_found_out, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(a_check_refuses, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(wrong_rules_are_refused, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(a_pass_rewrites, api_setup, api_teardown),
      cmocka_unit_test_setup_teardown(wrong_passes_fail, api_setup, api_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
