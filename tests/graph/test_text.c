/* The ONNX text syntax: what is printed parses to the same text again, bad text is refused at its place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "graph/graph.h"

static int make_context(void **state) {
  eg_context *ctx;
  if (eg_context_create(NULL, &ctx) != EG_OK) return 1;
  *state = ctx;
  return 0;
}

static int free_context(void **state) {
  eg_context_destroy(*state);
  return 0;
}

static egi_module *parse(eg_context *ctx, const char *text) {
  egi_module *module = NULL;
  if (egi_module_parse(ctx, text, strlen(text), &module) != EG_OK) fail_msg("%s", eg_context_error(ctx));
  return module;
}

static void print(const egi_module *module, egi_text *out) {
  egi_text_init(out, module->ctx);
  assert_int_equal(egi_module_print(module, module->graphs[0], 0, out), EG_OK);
}

static const char *const model =
    "<ir_version: 10, opset_import: [\"\": 23, \"L\": 1], producer_name: \"hand\">\n"
    "# a comment\n"
    "g (float[batch,\"a*2\",?] x, float s, float[] z, int64[3] \"q/r.0\") => (float[] o, bool[2] \"o.2\")\n"
    "<float[2] w = {1, -2.5e-3}, float c = {inf}, double[1] d = {-0.1}, bool[2] b = {1, 0}, float16[1] h = {15360},\n"
    " int4[3] i4 = {-8, 7, -1}, uint64[1] u = {18446744073709551615}, int64[0] none = {},\n"
    " float[4,2] r = [\"location\": \"\", \"engraft.init\": \"normal\", \"std\": \"0.02\", \"seed\": \"7\"], float[2] "
    "hint>\n"
    "{\n"
    "  [\"/model/layers.0/mlp/MatMul\"] \"q.out\" = Softmax <axis = -1> (x)\n"
    "  o, \"\" = L.f <alpha = 1.5, l: ints = [], f: float = 2, fs = [1.0, 2.0], ss = [\"a\", \"b\"], s = \"a\\\"b\","
    " t = float[2] nm {1, nan}> (x, , \"q.out\")\n"
    "  \"o.2\" = Not (b)\n"
    "  all = Foo.Keep (w, c, d, h, i4, u, none, r)\n"
    "}\n"
    "<domain: \"L\", opset_import: [\"\": 23], overload: \"k\">\n"
    "f <alpha, beta: float = 1.0> (a, b, c) => (e) { d = LeakyRelu <alpha: float = @alpha> (a) e = Neg (d) }\n";

static void what_is_printed_parses_to_the_same(void **state) {
  egi_text first, second;
  egi_module *module = parse(*state, model);
  print(module, &first);
  egi_module *again = parse(*state, egi_text_string(&first));
  print(again, &second);
  assert_string_equal(egi_text_string(&first), egi_text_string(&second));
  assert_non_null(strstr(egi_text_string(&first), "int4[3] i4 = {-8,7,-1}"));
  assert_non_null(strstr(egi_text_string(&first), "uint64[1] u = {18446744073709551615}"));
  assert_non_null(strstr(egi_text_string(&first), "s: string = \"a\\\"b\""));
  assert_non_null(strstr(egi_text_string(&first), "= L.f <alpha"));
  egi_text_free(&first);
  egi_text_free(&second);
  egi_module_destroy(module);
  egi_module_destroy(again);
}

static void the_module_is_what_the_text_says(void **state) {
  egi_module *module = parse(*state, model);
  const egi_graph *graph = module->graphs[0];
  assert_int_equal(graph->n_inputs, 4);
  assert_int_equal(graph->n_outputs, 2);
  const egi_value *x = &graph->values[egi_graph_find_value(graph, "x")];
  assert_int_equal(x->rank, 3);
  assert_true(x->dims[0] == egi_dim_symbol(module->dims, "batch"));
  assert_int_equal(graph->values[egi_graph_find_value(graph, "s")].rank, 0);
  assert_int_equal(graph->values[egi_graph_find_value(graph, "z")].rank, -1);
  const egi_node *call = NULL;
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    if (graph->nodes[id].op == EGI_OP_UNKNOWN && graph->nodes[id].n_inputs == 3) call = &graph->nodes[id];
  assert_non_null(call);
  assert_string_equal(call->domain, "L");
  assert_int_equal(call->n_inputs, 3);
  assert_int_equal(call->inputs[1], 0);
  assert_int_equal(egi_node_attribute(call, "f")->kind, EGI_ATTRIBUTE_FLOAT);
  assert_int_equal(egi_node_attribute(call, "l")->count, 0);
  const egi_node *softmax = &graph->nodes[graph->values[egi_graph_find_value(graph, "q.out")].producer];
  assert_string_equal(softmax->scope, "model.layers.0.mlp");
  assert_int_equal(module->n_functions, 1);
  assert_int_equal(module->functions[0].n_defaults, 1);
  assert_string_equal(module->functions[0].overload, "k");
  egi_module_destroy(module);
}

static void bad_text_is_refused(void **state) {
  static const char *const bad[][2] = {
      {"", "a graph"},
      {"g", "'('"},
      {"g (float x => (float y) {}", "')'"},
      {"g (floot x) => (float y) { y = Neg(x) }", "element type"},
      {"g (float x) -> (float y) { y = Neg(x) }", "'=>'"},
      {"g (float x) => (float y) { y = Neg(x }", "')'"},
      {"g (float x) => (float y) { y = Neg(x)", "a name"},
      {"g (float x) => (float y) { y Neg(x) }", "'='"},
      {"g (float x) => (float y) { y = Neg(nobody) }", "nobody"},
      {"g (float x) => (float y) { z = Neg(x) }", "\"y\""},
      {"g (float x) => (float y) { y = Neg(x) y = Neg(x) }", "made twice"},
      {"g (float x, float x) => (float y) { y = Neg(x) }", "made twice"},
      {"g (float x) => (float y) { x = Neg(x) y = Neg(x) }", "made twice"},
      {"g (float[1,1,1,1,1,1,1,1,1] x) => (float y) { y = Neg(x) }", "8 dimensions"},
      {"g (float[-1] x) => (float y) { y = Neg(x) }", "0 or more"},
      {"g (float[99999999999999999999] x) => (float y) { y = Neg(x) }", "64 bits"},
      {"g (float x) => (float y) <float[3] w = {1, 2}> { y = Neg(x) }", "','"},
      {"g (float x) => (float y) <float[1] w = {1, 2}> { y = Neg(x) }", "'}'"},
      {"g (float x) => (float y) <float[9999999999] w = {1}> { y = Neg(x) }", "as many elements"},
      {"g (float x) => (float y) <float[N] w = {1}> { y = Neg(x) }", "dims are numbers"},
      {"g (float x) => (float y) <float[2] w = [\"location\": \"f.bin\"]> { y = Neg(x) }", "external data"},
      {"g (float x) => (float y) <string[1] w = {\"a\"}> { y = Neg(x) }", "tensor of numbers"},
      {"g (float x) => (float y) { y = Neg <axis> (x) }", "'='"},
      {"g (float x) => (float y) { y = Neg <axis: colour = 1> (x) }", "attribute type"},
      {"g (float x) => (float y) { y = Neg <s = \"open> (x) }", "closing quote"},
      {"g (float x) => (float y) { a = Neg(b) b = Neg(a) y = Add(a, x) }", "cycle"},
      {"g (float x) => (float y) { y = Neg(x) } rest", "the end"},
      {"<ir_version: 10, opset_import: [\"\": 23", "']'"},
  };
  for (size_t i = 0; i < EGI_COUNT(bad); i++) {
    egi_module *module = NULL;
    eg_status status = egi_module_parse(*state, bad[i][0], strlen(bad[i][0]), &module);
    if (status == EG_OK) fail_msg("accepted: %s", bad[i][0]);
    assert_null(module);
    if (strstr(eg_context_error(*state), bad[i][1]) == NULL)
      fail_msg("%s: \"%s\" does not say \"%s\"", bad[i][0], eg_context_error(*state), bad[i][1]);
  }
}

static void every_cut_is_refused_or_parsed(void **state) {
  size_t length = strlen(model);
  for (size_t cut = 0; cut < length; cut++) {
    egi_module *module = NULL;
    char *copy = malloc(cut + 1); /* exact size: reading past the end is seen by the sanitizer */
    assert_non_null(copy);
    memcpy(copy, model, cut);
    if (egi_module_parse(*state, copy, cut, &module) == EG_OK) egi_module_destroy(module);
    free(copy);
  }
}

/* Memory grows with the text, not with its square. */
static void quoted_names_take_their_own_room(void **state) {
  egi_text text;
  egi_text_init(&text, *state);
  egi_text_add(&text, "<ir_version: 10, opset_import: [\"\": 23]>\ng (float[2] \"x0\") => (float[2] \"x4000\") {\n");
  for (unsigned i = 0; i < 4000; i++) egi_text_format(&text, "\"x%u\" = Neg (\"x%u\")\n", i + 1, i);
  egi_text_add(&text, "}\n");
  size_t before = egi_bytes_in_use(*state, EGI_PURPOSE_GRAPH);
  egi_module *module = parse(*state, egi_text_string(&text));
  size_t taken = egi_bytes_in_use(*state, EGI_PURPOSE_GRAPH) - before;
  assert_true(taken < 60 * text.length);
  egi_module_destroy(module);
  egi_text_free(&text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_is_printed_parses_to_the_same, make_context, free_context),
      cmocka_unit_test_setup_teardown(the_module_is_what_the_text_says, make_context, free_context),
      cmocka_unit_test_setup_teardown(quoted_names_take_their_own_room, make_context, free_context),
      cmocka_unit_test_setup_teardown(bad_text_is_refused, make_context, free_context),
      cmocka_unit_test_setup_teardown(every_cut_is_refused_or_parsed, make_context, free_context),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
