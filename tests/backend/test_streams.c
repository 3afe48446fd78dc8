/* Streams, events and states: record/wait where an edge crosses streams and nowhere else, buffers not shared with what
 * may still be read, updates of states after the reads before them. Run in many interleavings on the fake backend. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

enum { N_SEEDS = 24 };
#define HEAD "<ir_version: 10, opset_import: [\"\": 23]>\n"

static char *plan_and_run(eg_context *ctx, egi_module *module) {
  egi_plan *plan = NULL;
  if (egi_plan_create(ctx, module->graphs[0], fake_backend(true), NULL, &plan) != EG_OK) {
    fail_msg("%s", eg_context_error(ctx));
  }
  char *printed = plan_text(ctx, plan);
  egi_plan_destroy(plan);
  check_graph(ctx, module, N_SEEDS);
  egi_module_destroy(module);
  return printed;
}

static char *run_text(eg_context *ctx, const char *text) {
  return plan_and_run(ctx, parse_graph(ctx, text));
}

static void one_stream_needs_no_events(void **state) {
  char *plan = run_text(*state, HEAD "g (float[8] x) => (float[8] y)\n{ a = Neg (x) y = Add (a, x) }\n");
  assert_int_equal(count_text(plan, "record"), 0);
  assert_int_equal(count_text(plan, "wait"), 0);
  free(plan);
}

static void edges_between_streams_are_events(void **state) {
  char *plan =
      run_text(*state, HEAD "g (float[8] x) => (float[8] y)\n"
                            "{ a = Neg (x) b = Neg <engraft_stream = 1> (a) c = Add (b, x) y = Sub (c, b) }\n");
  /* fork, a -> b, b -> c, join; y knows already that b is done */
  assert_int_equal(count_text(plan, "record"), 4);
  assert_int_equal(count_text(plan, "wait"), 4);
  free(plan);
}

static void what_is_known_through_another_stream_is_not_waited_for(void **state) {
  char *plan =
      run_text(*state, HEAD "g (float[8] x) => (float[8] y)\n"
                            "{ a = Neg (x) b = Neg <engraft_stream = 1> (a) c = Add <engraft_stream = 2> (b, b)\n"
                            "  d = Add <engraft_stream = 2> (a, c) y = Neg (d) }\n");
  /* fork to two, a -> b, b -> c, d -> y, two joins: d needs a, which c's wait for b has covered */
  assert_int_equal(count_text(plan, "wait"), 2 + 3 + 2);
  free(plan);
}

static void a_buffer_that_another_stream_reads_is_kept(void **state) {
  /* o is written late on stream 1 from a, b, c; meanwhile stream 0 goes on and must not take their memory */
  char *plan = run_text(*state, HEAD
                        "g (float[64] x) => (float[64] y, float[64] o)\n"
                        "{ a = Neg (x) b = Add (a, x) c = Add (b, a)\n"
                        "  p = Add <engraft_stream = 1> (a, b) o = Add <engraft_stream = 1> (p, c)\n"
                        "  d = Neg (x) e = Add (d, x) f = Add (e, e) g1 = Sub (f, d) h = Add (g1, e) y = Neg (h) }\n");
  free(plan);
}

static void memory_is_used_again_once_a_wait_has_been_seen(void **state) {
  const char *kept =
      HEAD "g (float[64] x) => (float[64] y)\n"
           "{ a = Neg (x) b = Sub <engraft_stream = 1> (a, x) c = Mul (x, x) d = Mul (x, c) y = Add (d, b) }\n";
  const char *reused =
      HEAD "g (float[64] x) => (float[64] y)\n"
           "{ a = Neg (x) b = Sub <engraft_stream = 1> (a, x) c = Mul (b, x) d = Mul (x, c) y = Add (d, b) }\n";
  char *plan = run_text(*state, kept);
  assert_non_null(strstr(plan, "transient 1024"));
  free(plan);
  plan = run_text(*state, reused);
  assert_non_null(strstr(plan, "transient 768"));
  free(plan);
}

static void pieces_from_several_streams_meet(void **state) {
  char *plan = run_text(
      *state, HEAD "g (float[4,4] x) => (float[4,12] y, float[4,12] z)\n"
                   "{ a = Neg (x) b = Neg <engraft_stream = 1> (x) c = Add <engraft_stream = 2> (x, x)\n"
                   "  k = Concat <axis = 1> (a, b, c) y = Neg (k)\n"
                   "  d = Neg (x) e = Neg <engraft_stream = 2> (x) l = Concat <axis = 1> (d, e, x) z = Neg (l) }\n");
  assert_int_equal(count_text(plan, "Concat"), 0);
  free(plan);
}

static void a_barrier_orders_and_copies_nothing(void **state) {
  char *plan = run_text(*state, HEAD "g (float[8] x, float[8] g) => (float[8] y, float[8] h)\n"
                                     "{ a = Neg (x) h = Neg <engraft_stream = 2> (g)\n"
                                     "  r = engraft.Barrier (a, h) y = Neg (r) }\n");
  const char *waits = strstr(plan, "wait 1"); /* event 0 forks, event 1 follows h */
  assert_non_null(waits);
  assert_non_null(strstr(waits, "  0 Neg"));
  assert_int_equal(count_text(plan, "Neg"), 3);
  assert_int_equal(count_text(plan, "Identity"), 0);
  free(plan);
}

static void pieces_behind_a_barrier_wait_for_it(void **state) {
  char *plan = run_text(*state, HEAD "g (float[8] x, float[8] g) => (float[16] y, float[8] h)\n"
                                     "{ a = Neg (x) b = Neg (x) h = Neg <engraft_stream = 2> (g)\n"
                                     "  r = engraft.Barrier (a, h) c = Concat <axis = 0> (r, b) y = Neg (c) }\n");
  const char *waits = strstr(plan, "wait 1");
  assert_non_null(waits);
  assert_non_null(strstr(waits, "Identity"));
  free(plan);
}

/* ---- offload -------------------------------------------------------------------------------------------------- */

/* Four values that "backward" reads again in the other order: kept, and moved to the host meanwhile. */
#define KEPT                                                                                     \
  HEAD "g (float[64] x) => (float[64] y)\n"                                                      \
       "{ a1 = Sub (x, x) a2 = Sub (a1, x) a3 = Sub (a2, x) a4 = Sub (a3, x) g4 = Sub (a4, x)\n" \
       "  g3 = Sub (g4, a3) g2 = Sub (g3, a2) y = Sub (g2, a1) }\n"
#define MOVED                                                                                              \
  HEAD "g (float[64] x) => (float[64] y)\n"                                                                \
       "{ a1 = Sub (x, x) h1 = engraft.Offload (a1) a2 = Sub (a1, x) h2 = engraft.Offload (a2)\n"          \
       "  b2 = engraft.Barrier (a2, h1) a3 = Sub (b2, x) h3 = engraft.Offload (a3)\n"                      \
       "  b3 = engraft.Barrier (a3, h2) a4 = Sub (b3, x) b4 = engraft.Barrier (a4, h3) g4 = Sub (b4, x)\n" \
       "  r3 = engraft.Reload (h3, a4) g3 = Sub (g4, r3) r2 = engraft.Reload (h2, g4)\n"                   \
       "  g2 = Sub (g3, r2) r1 = engraft.Reload (h1, g3) y = Sub (g2, r1) }\n"

static void offloading_frees_memory_of_the_device(void **state) {
  char *kept = run_text(*state, KEPT), *moved = run_text(*state, MOVED);
  assert_non_null(strstr(kept, "transient 1280 "));
  assert_non_null(strstr(kept, "pinned 0\n"));
  assert_non_null(strstr(moved, "transient 1024 "));
  assert_non_null(strstr(moved, "pinned 768\n"));
  assert_int_equal(count_text(moved, "  1 Offload"), 3);
  assert_int_equal(count_text(moved, "  2 Reload"), 3);
  assert_int_equal(count_text(moved, " host+"), 6);
  free(kept);
  free(moved);
}

static void transfers_and_slots_are_counted(void **state) {
  egi_module *module = parse_graph(*state, MOVED);
  egi_plan *plan = NULL;
  egi_plan_transfers transfers;
  assert_int_equal(egi_plan_create(*state, module->graphs[0], fake_backend(true), NULL, &plan), EG_OK);
  egi_plan_get_transfers(plan, &transfers);
  assert_int_equal(transfers.n_offloads, 3);
  assert_int_equal(transfers.n_reloads, 3);
  assert_int_equal(transfers.offloaded_bytes, 768);
  assert_int_equal(transfers.reloaded_bytes, 768);
  assert_int_equal(transfers.n_slots, 2); /* one is read while the next one comes */
  egi_plan_destroy(plan);
  egi_module_destroy(module);
}

static void budgets_are_held_or_refused(void **state) {
  egi_module *module = parse_graph(*state, MOVED);
  egi_plan *plan = NULL;
  egi_plan_options options = {.memory_budget = 1024, .host_budget = 768};
  assert_int_equal(egi_plan_create(*state, module->graphs[0], fake_backend(true), &options, &plan), EG_OK);
  egi_plan_destroy(plan);
  options.host_budget = 767;
  assert_int_equal(egi_plan_create(*state, module->graphs[0], fake_backend(true), &options, &plan), EG_ERROR_BUDGET);
  assert_non_null(strstr(eg_context_error(*state), "768 bytes of host memory"));
  options = (egi_plan_options){.memory_budget = 1023};
  assert_int_equal(egi_plan_create(*state, module->graphs[0], fake_backend(true), &options, &plan), EG_ERROR_BUDGET);
  assert_non_null(strstr(eg_context_error(*state), "needs 1024 bytes"));
  assert_non_null(strstr(eg_context_error(*state), "largest result: node \"Sub\", 256"));
  egi_module_destroy(module);
}

/* ---- states --------------------------------------------------------------------------------------------------- */

typedef struct trained {
  egi_module *module;
  egi_graph *graph;
  egi_emitter emitter;
  egi_value_id x, first, second, whole, step;
} trained;

/* Two states of 20 floats and the whole pool that holds them. */
static trained make_trained(eg_context *ctx) {
  trained made = {0};
  uint32_t index = 0;
  assert_int_equal(egi_module_create(ctx, &made.module), EG_OK);
  assert_int_equal(egi_module_add_graph(made.module, "train", &made.graph), EG_OK);
  made.emitter = (egi_emitter){.graph = made.graph};
  egi_dim twenty = egi_dim_constant(made.module->dims, 20);
  assert_int_equal(egi_graph_add_input(made.graph, "x", EG_DTYPE_F32, 1, &twenty, &made.x), EG_OK);
  egi_state piece = {.name = "a", .pool = EGI_POOL_GRADIENTS, .dtype = EG_DTYPE_F32, .rank = 1, .dims = {20}};
  assert_int_equal(egi_module_add_state(made.module, &piece, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(made.graph, index, &made.first), EG_OK);
  piece.name = "b";
  assert_int_equal(egi_module_add_state(made.module, &piece, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(made.graph, index, &made.second), EG_OK);
  assert_int_equal(egi_module_add_pool_state(made.module, EGI_POOL_STEP, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(made.graph, index, &made.step), EG_OK);
  return made;
}

static egi_value_id emit(trained *made, egi_op op, egi_value_id a, egi_value_id b, int64_t stream) {
  egi_value_id inputs[3] = {a, b, made->step};
  egi_attribute attribute = egi_attribute_int("engraft_stream", stream);
  unsigned n = op == EGI_OP_Accumulate ? 3 : b != 0 ? 2 : 1;
  egi_value_id out = egi_emit(&made->emitter, op, inputs, n, &attribute, 1);
  if (made->emitter.status != EG_OK) fail_msg("%s", eg_context_error(made->module->ctx));
  return out;
}

static void finish(trained *made, egi_value_id output) {
  assert_int_equal(egi_graph_add_output(made->graph, output), EG_OK);
}

static void updates_come_after_the_reads_before_them(void **state) {
  trained made = make_trained(*state);
  egi_value_id read = emit(&made, EGI_OP_Neg, made.first, 0, 1);
  egi_value_id slow = emit(&made, EGI_OP_Add, read, made.first, 1);
  egi_value_id updated = emit(&made, EGI_OP_Accumulate, made.first, made.x, 0);
  egi_value_id later = emit(&made, EGI_OP_Neg, updated, 0, 2);
  egi_value_id again = emit(&made, EGI_OP_Accumulate, updated, made.x, 0);
  finish(&made, slow);
  finish(&made, later);
  finish(&made, emit(&made, EGI_OP_Neg, again, 0, 0));
  char *plan = plan_and_run(*state, made.module);
  assert_int_equal(count_text(plan, "-> float[20] state pool 1+0"), 2); /* in the state's own memory */
  free(plan);
}

static void copies_of_a_state_are_made_again_after_its_update(void **state) {
  trained made = make_trained(*state);
  egi_value_id sizes = egi_emit_integers(&made.emitter, (const int64_t[]){4, 5}, 2);
  egi_value_id back = egi_emit_integers(&made.emitter, (const int64_t[]){20}, 1);
  egi_value_id matrix = egi_emit_binary(&made.emitter, EGI_OP_Reshape, made.first, sizes);
  egi_value_id turned = egi_emit_unary(&made.emitter, EGI_OP_Transpose, matrix);
  egi_value_id before = emit(&made, EGI_OP_Sub, turned, turned, 0); /* needs a contiguous copy */
  egi_value_id updated = emit(&made, EGI_OP_Accumulate, made.first, made.x, 0);
  egi_value_id after = emit(&made, EGI_OP_Sub, turned, before, 0); /* graph order: the new content */
  finish(&made, egi_emit_binary(&made.emitter, EGI_OP_Reshape, after, back));
  finish(&made, emit(&made, EGI_OP_Neg, updated, 0, 0));
  egi_plan *plan = NULL;
  assert_int_equal(egi_plan_create(*state, made.graph, fake_backend(true), NULL, &plan), EG_OK);
  char *text = plan_text(*state, plan);
  assert_int_equal(count_text(text, "Identity"), 2);
  free(text);
  egi_plan_destroy(plan);
  egi_module_destroy(made.module);
}

static void states_that_overlap_are_ordered(void **state) {
  trained made = make_trained(*state);
  uint32_t index = 0;
  egi_value_id whole = 0;
  assert_int_equal(egi_module_add_pool_state(made.module, EGI_POOL_GRADIENTS, &index), EG_OK);
  assert_int_equal(egi_graph_add_state(made.graph, index, &whole), EG_OK);
  emit(&made, EGI_OP_Accumulate, made.first, made.x, 1);
  emit(&made, EGI_OP_Accumulate, made.second, made.x, 2);
  egi_value_id all = emit(&made, EGI_OP_Neg, whole, 0, 0);
  finish(&made, all);
  egi_plan *plan = NULL;
  assert_int_equal(egi_plan_create(*state, made.graph, fake_backend(true), NULL, &plan), EG_OK);
  char *text = plan_text(*state, plan);
  const char *read = strstr(text, "  0 Neg");
  assert_non_null(read);
  *(char *)(uintptr_t)read = '\0';
  assert_int_equal(count_text(text, "Accumulate \""), 2);
  assert_int_equal(count_text(text, "  2 wait"), 2); /* for the fork, and for the first update */
  assert_int_equal(count_text(text, "  0 wait"), 1); /* the second update covers the first */
  free(text);
  egi_plan_destroy(plan);
  egi_module_destroy(made.module);
}

static void what_is_not_a_state_is_copied_before_an_update(void **state) {
  trained made = make_trained(*state);
  egi_value_id a = emit(&made, EGI_OP_Neg, made.x, 0, 0);
  egi_value_id updated = emit(&made, EGI_OP_Accumulate, a, made.x, 0);
  egi_plan *plan = NULL;
  finish(&made, emit(&made, EGI_OP_Add, updated, a, 0));
  assert_int_equal(egi_plan_create(*state, made.graph, fake_backend(true), NULL, &plan), EG_OK);
  char *text = plan_text(*state, plan);
  assert_int_equal(count_text(text, "Identity"), 1);
  free(text);
  egi_plan_destroy(plan);
  egi_module_destroy(made.module);
}

static void what_backward_needs_is_counted_as_saved(void **state) {
  trained made = make_trained(*state);
  egi_value_id saved = emit(&made, EGI_OP_Neg, made.x, 0, 0);
  egi_value_id product = emit(&made, EGI_OP_Sub, saved, made.x, 0);
  egi_value_id slice[5] = {product};
  slice[1] = egi_emit_integers(&made.emitter, (const int64_t[]){0}, 1);
  slice[2] = egi_emit_integers(&made.emitter, (const int64_t[]){1}, 1);
  egi_value_id first = egi_emit(&made.emitter, EGI_OP_Slice, slice, 3, NULL, 0);
  egi_value_id loss = egi_emit_unary(&made.emitter, EGI_OP_Squeeze, emit(&made, EGI_OP_Neg, first, 0, 0));
  egi_value_id gradient = emit(&made, EGI_OP_Sub, saved, made.x, 0);
  finish(&made, loss);
  finish(&made, emit(&made, EGI_OP_Accumulate, made.first, gradient, 0));
  egi_plan *plan = NULL;
  egi_plan_bytes bytes;
  assert_int_equal(egi_plan_create(*state, made.graph, fake_backend(true), NULL, &plan), EG_OK);
  egi_plan_get_bytes(plan, &bytes);
  assert_int_equal(bytes.saved, 128);
  egi_plan_destroy(plan);
  egi_module_destroy(made.module);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_context, free_context)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(one_stream_needs_no_events),
                                     TEST(edges_between_streams_are_events),
                                     TEST(what_is_known_through_another_stream_is_not_waited_for),
                                     TEST(a_buffer_that_another_stream_reads_is_kept),
                                     TEST(memory_is_used_again_once_a_wait_has_been_seen),
                                     TEST(pieces_from_several_streams_meet),
                                     TEST(a_barrier_orders_and_copies_nothing),
                                     TEST(pieces_behind_a_barrier_wait_for_it),
                                     TEST(offloading_frees_memory_of_the_device),
                                     TEST(transfers_and_slots_are_counted),
                                     TEST(budgets_are_held_or_refused),
                                     TEST(updates_come_after_the_reads_before_them),
                                     TEST(copies_of_a_state_are_made_again_after_its_update),
                                     TEST(states_that_overlap_are_ordered),
                                     TEST(what_backward_needs_is_counted_as_saved),
                                     TEST(what_is_not_a_state_is_copied_before_an_update)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
