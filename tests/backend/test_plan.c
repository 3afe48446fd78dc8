/* The planner on small graphs with the fake backend: views, copies, known contents, fixed nodes, pieces of
 * concatenations, memory in place, errors. Each graph is also run and compared with naive execution. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

/* Plans and runs the graph, gives the plan as text. */
static char *plan_and_run(eg_context *ctx, const char *text) {
  egi_module *module = parse_graph(ctx, text);
  egi_plan *plan = NULL;
  if (egi_plan_create(ctx, module->graphs[0], fake_backend(true), NULL, &plan) != EG_OK) {
    fail_msg("%s", eg_context_error(ctx));
  }
  char *printed = plan_text(ctx, plan);
  egi_plan_destroy(plan);
  check_graph(ctx, module, 2);
  egi_module_destroy(module);
  return printed;
}

static egi_plan_bytes plan_bytes(eg_context *ctx, const char *text) {
  egi_module *module = parse_graph(ctx, text);
  egi_plan *plan = NULL;
  egi_plan_bytes bytes;
  assert_int_equal(egi_plan_create(ctx, module->graphs[0], fake_backend(true), NULL, &plan), EG_OK);
  egi_plan_get_bytes(plan, &bytes);
  egi_plan_destroy(plan);
  egi_module_destroy(module);
  return bytes;
}

#define HEAD "<ir_version: 10, opset_import: [\"\": 23]>\n"

static void views_are_no_steps(void **state) {
  char *plan = plan_and_run(*state, HEAD
                            "g (float[2,3,4] x) => (float[3,8] y, float[1,2,2,3] z, float[4,2,3] e, float[1,3,4] s)\n"
                            "<int64[2] a = {3, 8}, int64[1] st = {-1}, int64[1] en = {-9}, int64[1] ax = {2},\n"
                            " int64[1] sp = {-2}, int64[1] zero = {0}, int64[3] ex = {4, 2, 3}, int64[1] one = {1},\n"
                            " int64[1] two = {2}, int64[2] sizes = {1, 1}>\n"
                            "{ y = Reshape (x, a)\n"
                            "  t = Transpose <perm = [0, 2, 1]> (x)\n"
                            "  c = Slice (t, st, en, one, sp)\n"
                            "  z = Unsqueeze (c, zero)\n"
                            "  r = Slice (x, zero, one, ax, one)\n"
                            "  q = Squeeze (r, two)\n"
                            "  e = Expand (q, ex)\n"
                            "  s, s2 = Split <axis = 0> (x, sizes)\n"
                            "}\n");
  assert_int_equal(count_text(plan, "run eager"), 0);
  assert_non_null(strstr(plan, "output z: float[1,2,2,3]{24,12,-2,4} input x+12"));
  assert_non_null(strstr(plan, "output e: float[4,2,3]{0,12,4} input x"));
  free(plan);
}

static void what_strides_cannot_say_is_copied(void **state) {
  char *plan = plan_and_run(*state, HEAD "g (float[3,4] x) => (float[12] y)\n<int64[1] a = {12}>\n"
                                         "{ t = Transpose (x) y = Reshape (t, a) }\n");
  assert_int_equal(count_text(plan, "Reshape"), 1);
  free(plan);
}

static void a_contiguous_copy_is_shared(void **state) {
  char *plan =
      plan_and_run(*state, HEAD "g (float[3,4] x, float[4,3] w) => (float[4,3] y, float[4,3] z, float[4,3] u)\n"
                                "{ t = Transpose (x) y = Sub (t, w) z = Sub (w, t) u = Add (t, w) }\n");
  assert_int_equal(count_text(plan, "Identity"), 1); /* for both Sub; Add takes any strides */
  assert_int_equal(count_text(plan, "float[4,3]{1,4} input x"), 2);
  free(plan);
}

static void known_contents_are_not_computed(void **state) {
  char *plan = plan_and_run(*state, HEAD "g (float[2,6] x) => (float[4,3] y)\n"
                                         "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}>\n"
                                         "{ s = Shape (x) a = Gather (s, zero) b = Gather (s, one) c = Mul (a, two)\n"
                                         "  d = Div (b, two) r = Concat <axis = 0> (c, d) y = Reshape (x, r) }\n");
  assert_int_equal(count_text(plan, "eager"), 0);
  free(plan);
  egi_module *module = parse_graph(*state, HEAD "g (float[n] x) => (int64[1] s)\n{ s = Shape (x) }\n");
  egi_binding binding = {egi_dim_symbol(module->dims, "n"), 7};
  egi_plan_options options = {.bindings = &binding, .n_bindings = 1};
  egi_plan *made = NULL;
  egi_store *store = NULL;
  egi_session *session = NULL;
  int64_t found = 0;
  assert_int_equal(egi_plan_create(*state, module->graphs[0], fake_backend(false), &options, &made), EG_OK);
  assert_int_equal(egi_store_create(*state, module, fake_backend(false), &store), EG_OK);
  assert_int_equal(egi_session_create(store, made, NULL, &session), EG_OK);
  assert_int_equal(egi_session_run(session), EG_OK);
  assert_int_equal(egi_session_read_output(session, 0, &found, sizeof(found)), EG_OK);
  assert_int_equal(found, 7);
  egi_session_destroy(session);
  egi_store_destroy(store);
  egi_plan_destroy(made);
  egi_module_destroy(module);
}

static void kernels_see_what_is_known(void **state) {
  /* the kernel refuses to be prepared unless it sees 5 there */
  free(plan_and_run(*state, HEAD "g (float[5] x) => (float[5] y)\n{ a = Size (x) y = CumSum (x, a) }\n"));
  free(plan_and_run(*state, HEAD "g (float[5] x) => (float[5] y)\n<int64 a = {5}> { y = CumSum (x, a) }\n"));
}

static void fixed_nodes_run_once(void **state) {
  char *plan = plan_and_run(*state, HEAD "g (float[4] x) => (float[4] y, float[4] k)\n<float[4] w = {1, 2, 3, 4}>\n"
                                         "{ a = Neg (w) b = Neg (a) k = Neg (b) y = Add (x, b) }\n");
  const char *run = strstr(plan, "run eager");
  assert_non_null(run);
  assert_int_equal(count_text(run, "Neg"), 0);
  assert_int_equal(count_text(plan, "Neg"), 3);
  assert_non_null(strstr(run, "Add \"\": float[4] input x, float[4] fixed+"));
  free(plan);
}

static void nobody_computes_what_nobody_reads(void **state) {
  char *plan = plan_and_run(*state, HEAD "g (float[4] x) => (float[4] y)\n{ a = Exp (x) b = Neg (a) y = Neg (x) }\n");
  assert_int_equal(count_text(plan, "Neg"), 1);
  free(plan);
}

static void elementwise_chains_work_in_place(void **state) {
  const char *text =
      HEAD "g (float[64] x) => (float[64] y)\n{ a = Neg (x) b = Neg (a) c = Add (b, b) d = Mul (c, x) y = Neg (d) }\n";
  free(plan_and_run(*state, text));
  assert_int_equal(plan_bytes(*state, text).transient, 256);
}

static void memory_that_lives_on_is_not_overwritten(void **state) {
  /* a is read again, v shows b's memory, k is an output */
  const char *text =
      HEAD "g (float[8,8] x) => (float[8,8] y, float[8,8] k)\n"
           "{ a = Neg (x) b = Neg (a) v = Transpose (b) c = Neg (b) d = Add (c, v) k = Add (a, d) y = Neg (k) }\n";
  char *plan = plan_and_run(*state, text);
  assert_true(plan_bytes(*state, text).transient >= 3 * 256);
  free(plan);
}

static void an_operand_seen_twice_is_not_overwritten(void **state) {
  free(plan_and_run(
      *state,
      HEAD "g (float[5,5] x) => (float[5,5] y, float[5,5] z)\n"
           "<int64[1] s = {4}, int64[1] e = {5}>\n"
           "{ a = Neg (x) t = Transpose (a) y = Add (a, t) b = Neg (x) o = Slice (b, s, e) z = Mul (b, o) }\n"));
}

static void pieces_are_produced_in_place(void **state) {
  char *plan =
      plan_and_run(*state, HEAD "g (float[2,3] x, float[2,2] w) => (float[2,8] y)\n"
                                "{ a = Neg (x) b = Neg (w) c = Add (x, x) y = Concat <axis = 1> (a, b, c) }\n");
  assert_int_equal(count_text(plan, "Concat"), 0);
  assert_int_equal(count_text(plan, "{8,1} transient"), 3);
  free(plan);
}

static void the_rest_of_a_concatenation_is_copied(void **state) {
  /* x is an input, b has two consumers, m's kernel writes contiguous outputs only */
  char *plan = plan_and_run(
      *state, HEAD "g (float[2,3] x) => (float[2,12] y, float[2,3] z)\n"
                   "{ a = Neg (x) b = Neg (x) z = Neg (b) m = Mul (x, x) y = Concat <axis = -1> (x, a, b, m) }\n");
  assert_int_equal(count_text(plan, "Concat"), 0);
  assert_int_equal(count_text(plan, "Identity"), 3);
  free(plan);
}

static void concatenations_nest_and_show_through_views(void **state) {
  char *plan =
      plan_and_run(*state, HEAD "g (float[2,3] x) => (float[4,3,2] y)\n<int64[3] s = {2, 3, 1}>\n"
                                "{ a = Neg (x) ra = Reshape (a, s) b = Add (x, x) rb = Reshape (b, s)\n"
                                "  i = Concat <axis = 2> (ra, rb)\n"
                                "  c = Add (x, a2) a2 = Neg (x) rc = Reshape (c, s) d = Neg (c2) c2 = Add (x, x)\n"
                                "  rd = Reshape (d, s) j = Concat <axis = 2> (rc, rd)\n"
                                "  y = Concat <axis = 0> (i, j) }\n");
  assert_int_equal(count_text(plan, "Concat"), 0);
  assert_int_equal(count_text(plan, "Identity"), 0);
  free(plan);
}

static void copies_are_written_by_their_producer(void **state) {
  /* the Reshape of a transposed value, and what Sub needs contiguous: Neg and Add write straight into them */
  char *plan =
      plan_and_run(*state, HEAD "g (float[3,4] x, float[4,3] w) => (float[12] y, float[4,3] z)\n<int64[1] s = {12}>\n"
                                "{ a = Neg (x) t = Transpose (a) y = Reshape (t, s)\n"
                                "  b = Add (x, x) u = Transpose (b) z = Sub (u, w) }\n");
  assert_int_equal(count_text(plan, "Reshape"), 0);
  assert_int_equal(count_text(plan, "Identity"), 0);
  assert_int_equal(count_text(plan, "-> float[3,4]{1,3} transient"), 2);
  free(plan);
}

static void a_view_that_repeats_elements_is_not_produced_in_place(void **state) {
  /* e has as many elements as a, but shows one row of it twice */
  char *plan = plan_and_run(*state, HEAD "g (float[2,2] x) => (float[3,2] y)\n"
                                         "<int64[1] zero = {0}, int64[1] one = {1}, int64[2] shape = {2, 2}>\n"
                                         "{ a = Neg (x) s = Slice (a, zero, one) e = Expand (s, shape) b = Neg (s2)\n"
                                         "  s2 = Slice (x, zero, one) y = Concat <axis = 0> (e, b) }\n");
  assert_int_equal(count_text(plan, "Identity"), 1);
  free(plan);
}

static void a_cache_that_is_empty_costs_nothing(void **state) {
  char *plan = plan_and_run(*state, HEAD "g (float[2,0,3] past, float[2,5,3] x) => (float[2,5,3] y)\n"
                                         "{ k = Concat <axis = 1> (past, x) y = Neg (k) }\n");
  assert_int_equal(count_text(plan, "Concat"), 0);
  assert_int_equal(count_text(plan, "Identity"), 0);
  free(plan);
}

static void narrow_weights_are_read_as_they_are(void **state) {
  char *plan =
      plan_and_run(*state, HEAD "g (float[2,2] x) => (float[2,3] y, float[2,3] z)\n"
                                "<float16[3,2] w = {15360, 16384, 16896, 17408, 17664, 17920}>\n"
                                "{ c = Cast <to = 1> (w) t = Transpose (c) y = MatMul (x, t) z = MatMul (x, t) }\n");
  assert_int_equal(count_text(plan, "Cast"), 0);
  assert_int_equal(count_text(plan, "float16[2,3]{1,2} weight w"), 2);
  free(plan);
}

static void narrow_weights_are_cast_where_they_must_be(void **state) {
  /* the kernel refuses them on the left; Sub cannot have them at all */
  char *plan = plan_and_run(*state, HEAD "g (float[2,2] x) => (float[2,2] y, float[2,2] z)\n"
                                         "<float16[2,2] w = {15360, 16384, 16896, 17408}>\n"
                                         "{ c = Cast <to = 1> (w) y = MatMul (c, x) z = Sub (x, c) }\n");
  assert_int_equal(count_text(plan, "Cast"), 1);
  assert_int_equal(count_text(strstr(plan, "run eager"), "Cast"), 0);
  free(plan);
}

static void workspace_has_memory_of_its_own(void **state) {
  const char *text =
      HEAD "g (float[4,16] x) => (float[4,16] y)\n{ a = Neg (x) b = Softmax (a) c = Softmax (b) y = Add (a, c) }\n";
  char *plan = plan_and_run(*state, text);
  egi_plan_bytes bytes = plan_bytes(*state, text);
  assert_int_equal(bytes.workspace, 256);
  assert_int_equal(count_text(plan, "workspace 256+"), 2);
  free(plan);
}

static void tensors_without_elements_are_fine(void **state) {
  free(plan_and_run(*state, HEAD "g (float[0,3] x, float[2,3] w) => (float[0,3] y, float[2,3] z)\n"
                                 "{ a = Neg (x) y = Add (a, x) z = Concat <axis = 0> (a, w) }\n"));
}

/* ---- errors --------------------------------------------------------------------------------------------------- */

static void check_error(eg_context *ctx, const char *text, const egi_plan_options *options, eg_status status,
                        const char *part) {
  egi_module *module = parse_graph(ctx, text);
  egi_plan *plan = NULL;
  assert_int_equal(egi_plan_create(ctx, module->graphs[0], fake_backend(true), options, &plan), status);
  assert_null(plan);
  if (strstr(eg_context_error(ctx), part) == NULL) fail_msg("\"%s\" is not in: %s", part, eg_context_error(ctx));
  egi_module_destroy(module);
}

static void all_nodes_that_cannot_run_are_named(void **state) {
  const char *text = HEAD
      "g (float[2] x) => (float[2] y)\n{ [\"first\"] a = Exp (x) [\"second\"] b = Erf (a) [\"third\"] y = Log (b) }\n";
  check_error(*state, text, NULL, EG_ERROR_UNSUPPORTED, "3 nodes cannot run");
  check_error(*state, text, NULL, EG_ERROR_UNSUPPORTED, "first");
  check_error(*state, text, NULL, EG_ERROR_UNSUPPORTED, "second");
  check_error(*state, text, NULL, EG_ERROR_UNSUPPORTED, "rank 1 is too much");
  check_error(*state, text, NULL, EG_ERROR_UNSUPPORTED, "third");
}

static void long_lists_of_faults_end_with_a_count(void **state) {
  char text[4096] = HEAD "g (float[2] x0) => (float[2] x30)\n{";
  for (int i = 0; i < 30; i++) {
    char line[64];
    (void)snprintf(line, sizeof(line), "[\"n%d\"] x%d = Exp (x%d)\n", i, i + 1, i);
    strncat(text, line, sizeof(text) - strlen(text) - 1);
  }
  strncat(text, "}\n", sizeof(text) - strlen(text) - 1);
  check_error(*state, text, NULL, EG_ERROR_UNSUPPORTED, "and 10 more");
  assert_null(strstr(eg_context_error(*state), "n25"));
}

static void a_symbol_without_a_size_is_named(void **state) {
  check_error(*state, HEAD "g (float[batch,sequence] x) => (float[batch,sequence] y)\n{ y = Neg (x) }\n", NULL,
              EG_ERROR_ARGUMENT, "\"batch\"");
}

static void sizes_that_violate_an_assumption_are_refused(void **state) {
  eg_context *ctx = *state;
  egi_module *module = parse_graph(ctx, HEAD "g (float[n] x, float[m] w) => (float[n] y)\n{ y = Add (x, w) }\n");
  egi_binding bindings[2] = {{egi_dim_symbol(module->dims, "n"), 3}, {egi_dim_symbol(module->dims, "m"), 4}};
  egi_plan_options options = {.bindings = bindings, .n_bindings = 2};
  egi_plan *plan = NULL;
  assert_int_equal(egi_plan_create(ctx, module->graphs[0], fake_backend(true), &options, &plan), EG_ERROR_SHAPE);
  bindings[1].value = 3;
  assert_int_equal(egi_plan_create(ctx, module->graphs[0], fake_backend(true), &options, &plan), EG_OK);
  egi_plan_destroy(plan);
  /* another graph of the module has nothing to do with these symbols */
  egi_graph *other = NULL;
  egi_value_id x = 0, y = 0;
  egi_dim four = egi_dim_constant(module->dims, 4);
  assert_int_equal(egi_module_add_graph(module, "other", &other), EG_OK);
  assert_int_equal(egi_graph_add_input(other, "x", EG_DTYPE_F32, 1, &four, &x), EG_OK);
  egi_emitter emitter = {.graph = other};
  y = egi_emit_unary(&emitter, EGI_OP_Neg, x);
  assert_int_equal(emitter.status, EG_OK);
  assert_int_equal(egi_graph_add_output(other, y), EG_OK);
  assert_int_equal(egi_plan_create(ctx, other, fake_backend(true), NULL, &plan), EG_OK);
  egi_plan_destroy(plan);
  egi_module_destroy(module);
}

static void a_budget_too_small_says_what_is_needed(void **state) {
  egi_plan_options options = {.memory_budget = 100};
  check_error(*state, HEAD "g (float[64] x) => (float[64] y)\n{ y = Neg (x) }\n", &options, EG_ERROR_BUDGET, "256");
}

static void plans_are_equal_each_time(void **state) {
  const char *text =
      HEAD "g (float[2,3] x) => (float[2,12] y, float[2,3] z)\n"
           "{ a = Neg (x) b = Neg (x) z = Neg (b) m = Mul (x, x) y = Concat <axis = -1> (x, a, b, m) }\n";
  char *first = plan_and_run(*state, text), *second = plan_and_run(*state, text);
  assert_string_equal(first, second);
  free(first);
  free(second);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_context, free_context)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(views_are_no_steps),
                                     TEST(what_strides_cannot_say_is_copied),
                                     TEST(a_contiguous_copy_is_shared),
                                     TEST(known_contents_are_not_computed),
                                     TEST(kernels_see_what_is_known),
                                     TEST(fixed_nodes_run_once),
                                     TEST(nobody_computes_what_nobody_reads),
                                     TEST(elementwise_chains_work_in_place),
                                     TEST(memory_that_lives_on_is_not_overwritten),
                                     TEST(an_operand_seen_twice_is_not_overwritten),
                                     TEST(pieces_are_produced_in_place),
                                     TEST(the_rest_of_a_concatenation_is_copied),
                                     TEST(concatenations_nest_and_show_through_views),
                                     TEST(copies_are_written_by_their_producer),
                                     TEST(a_view_that_repeats_elements_is_not_produced_in_place),
                                     TEST(a_cache_that_is_empty_costs_nothing),
                                     TEST(narrow_weights_are_read_as_they_are),
                                     TEST(narrow_weights_are_cast_where_they_must_be),
                                     TEST(workspace_has_memory_of_its_own),
                                     TEST(tensors_without_elements_are_fine),
                                     TEST(all_nodes_that_cannot_run_are_named),
                                     TEST(long_lists_of_faults_end_with_a_count),
                                     TEST(a_symbol_without_a_size_is_named),
                                     TEST(sizes_that_violate_an_assumption_are_refused),
                                     TEST(a_budget_too_small_says_what_is_needed),
                                     TEST(plans_are_equal_each_time)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
