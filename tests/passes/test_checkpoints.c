/* Blocks and what becomes of them: where the boundaries of a training graph are found, what is made again for the
 * backward pass and behind which Barrier, and that no other pass undoes it. That numbers stay the same is
 * api/test_checkpoints.c's matter. */
#include "support_passes.h"

#include "passes/checkpoint.h"

#include <stdio.h>
#include <string.h>

/* Two blocks x + down(tanh(norm(x) · up)) between an embedding and a head. */
#define BLOCK(x, y, i)                                                                                         \
  "[\"/layers." i "/norm/RMSNormalization\"] n" i " = RMSNormalization (" x ", s) "                            \
  "[\"/layers." i "/up/MatMul\"] u" i " = MatMul (n" i ", w) [\"/layers." i "/Tanh\"] t" i " = Tanh (u" i ") " \
  "[\"/layers." i "/down/MatMul\"] d" i " = MatMul (t" i ", v) [\"/layers." i "/Add\"] " y " = Add (" x ", d" i ")\n"
#define WEIGHTS                                                                                              \
  "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2] s = {1,2}, float[2,3] w = {1,2,3,4,5,6}, float[3,2] v = " \
  "{6,5,4,3,2,1}, float[2,5] h = {0,9,8,7,6,5,4,3,2,1}, int64 one = {1}>"
static const char *const model =
    "(int64[batch,sequence] input_ids) => (float[batch,sequence,5] logits)\n"
    "" WEIGHTS "\n"
    "{ x0 = Gather (t, input_ids)\n" BLOCK("x0", "x1", "0") BLOCK("x1", "x2", "1") "logits = MatMul (x2, h) }";

/* Differentiated, with adapters on every `up`. */
static void make_graph(pass_fixture *fixture) {
  static const egi_adapter_target targets[2] = {{.path = "layers.0.up", .rank = 1, .scale = 1},
                                                {.path = "layers.1.up", .rank = 1, .scale = 1}};
  const egi_adapt_options adapt = {.adapters = targets, .n_adapters = 2, .has_gradient = true};
  pass_graph(fixture, model);
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_common,eliminate_dead", &adapt);
}

/* Three blocks. */
static void make_deep_graph(pass_fixture *fixture) {
  static const egi_adapter_target targets[3] = {{.path = "layers.0.up", .rank = 1, .scale = 1},
                                                {.path = "layers.1.up", .rank = 1, .scale = 1},
                                                {.path = "layers.2.up", .rank = 1, .scale = 1}};
  const egi_adapt_options adapt = {.adapters = targets, .n_adapters = 3, .has_gradient = true};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,5] logits)\n" WEIGHTS "\n"
                      "{ x0 = Gather (t, input_ids)\n" BLOCK("x0", "x1", "0") BLOCK("x1", "x2", "1")
                          BLOCK("x2", "x3", "2") "logits = MatMul (x3, h) }");
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_common,eliminate_dead", &adapt);
}

static void run_options(pass_fixture *fixture, const egi_checkpoint_options *checkpoints) {
  static const char *const names[] = {"buffer_checkpoints"};
  const egi_pipeline_options options = {.checkpoints = checkpoints};
  assert_int_equal(egi_passes_run(fixture->graph, names, 1, &options, NULL), EG_OK);
}

static uint32_t end_of(const pass_fixture *fixture, egi_checkpoint_stage stage) {
  egi_checkpoint_stages stages;
  assert_int_equal(egi_checkpoint_stages_find(fixture->graph, &stages), EG_OK);
  return stages.end[stage];
}

static void run_rung(pass_fixture *fixture, uint32_t rung) {
  const egi_checkpoint_options checkpoints = {.rung = rung};
  run_options(fixture, &checkpoints);
}

/* The input and the gradient of each block, by what makes them. */
static void blocks_lie_between_values_that_all_comes_through(void **state) {
  pass_fixture *fixture = *state;
  egi_blocks blocks;
  make_graph(fixture);
  assert_int_equal(egi_blocks_find(fixture->graph, &fixture->arena, &blocks), EG_OK);
  const egi_graph *graph = fixture->graph;
  assert_int_equal(blocks.count, 4); /* the head, and the sum of what it gives */
  assert_string_equal(graph->values[blocks.blocks[0].input].name, "x0");
  assert_string_equal(graph->values[blocks.blocks[1].input].name, "x1");
  assert_string_equal(graph->values[blocks.blocks[2].input].name, "x2");
  assert_string_equal(blocks.blocks[1].scope, "layers.1.norm");
  egi_value_id first = blocks.blocks[0].gradient, second = blocks.blocks[1].gradient;
  assert_true(first != 0 && second != 0);
  assert_int_equal(graph->nodes[graph->values[second].producer].op, EGI_OP_MatMul); /* Tanh's, behind down */
  assert_int_equal(graph->nodes[graph->values[first].producer].op, EGI_OP_MatMul);
  assert_string_equal(graph->nodes[graph->values[first].producer].scope, "layers.0.down");
  assert_int_equal(blocks.blocks[2].gradient, 0);
}

/* Nodes of an operator that are made again. */
static unsigned count_again(const pass_fixture *fixture, egi_op op) {
  const egi_graph *graph = fixture->graph;
  unsigned count = 0;
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    count += graph->nodes[id].op == op && strstr(graph->nodes[id].name, "/again") != NULL;
  return count;
}

static void norms_and_activations_are_made_again_first(void **state) {
  pass_fixture *fixture = *state;
  make_graph(fixture);
  run_rung(fixture, 1); /* nothing flows below the first block: its input is not there, and its norm stays */
  assert_int_equal(pass_count(fixture, EGI_OP_Barrier), 0);
  make_graph(fixture);
  run_rung(fixture, 2);
  assert_int_equal(count_again(fixture, EGI_OP_RMSNormalization), 1); /* the adapter's gradient reads it */
  assert_int_equal(pass_count(fixture, EGI_OP_Barrier), 1);
  assert_int_equal(count_again(fixture, EGI_OP_Linear) + count_again(fixture, EGI_OP_MatMul), 0);
}

/* What is reported beside the loss waits for no backward pass: it reads what the forward pass made. */
static void what_is_only_reported_is_no_backward_pass(void **state) {
  pass_fixture *fixture = *state;
  make_graph(fixture);
  egi_graph *graph = fixture->graph;
  egi_value_id read = egi_graph_find_value(graph, "t0");
  assert_true(read != 0);
  const egi_node node = {.op = EGI_OP_ReduceSum, .inputs = &read, .n_inputs = 1, .n_outputs = 1};
  egi_node_id added = 0;
  assert_int_equal(egi_graph_add_node(graph, &node, &added), EG_OK);
  egi_value_id report = graph->nodes[added].outputs[0];
  assert_int_equal(egi_infer_node(graph, added), EG_OK);
  assert_int_equal(egi_graph_add_output(graph, report), EG_OK);
  assert_int_equal(egi_graph_tidy(graph), EG_OK);
  run_rung(fixture, end_of(fixture, EGI_CHECKPOINT_WHOLE));
  assert_int_equal(count_again(fixture, EGI_OP_Tanh), 2);
  assert_int_equal(graph->nodes[graph->values[report].producer].inputs[0], read);
}

static void whole_blocks_are_made_again_from_their_inputs(void **state) {
  pass_fixture *fixture = *state;
  make_graph(fixture);
  unsigned n_products = pass_count(fixture, EGI_OP_MatMul), n_tanh = pass_count(fixture, EGI_OP_Tanh);
  run_rung(fixture, end_of(fixture, EGI_CHECKPOINT_WHOLE));
  assert_int_equal(count_again(fixture, EGI_OP_Tanh), 2);
  assert_int_equal(pass_count(fixture, EGI_OP_Tanh), n_tanh + 2);
  assert_int_equal(pass_count(fixture, EGI_OP_Barrier), 2);
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), n_products + 4); /* up and the adapter's first; not down */
  make_graph(fixture);
  run_rung(fixture, end_of(fixture, EGI_CHECKPOINT_JOINED)); /* both from x0: down of the first, too */
  assert_int_equal(pass_count(fixture, EGI_OP_Barrier), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), n_products + 5);
}

static const egi_node *find_node(const pass_fixture *fixture, egi_op op) {
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++)
    if (fixture->graph->nodes[id].op == op) return &fixture->graph->nodes[id];
  return NULL;
}

/* The Barrier that waits for `value`. */
static const egi_node *find_barrier(const pass_fixture *fixture, egi_value_id value) {
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    const egi_node *node = &fixture->graph->nodes[id];
    if (node->op == EGI_OP_Barrier && node->inputs[1] == value) return node;
  }
  return NULL;
}

static egi_value_id gradient_of_block(pass_fixture *fixture, uint32_t block) {
  egi_blocks blocks;
  assert_int_equal(egi_blocks_find(fixture->graph, &fixture->arena, &blocks), EG_OK);
  return blocks.blocks[block].gradient;
}

/* Three blocks, of which the second and third are joined: the first input leaves, the last stays. */
static void inputs_wait_on_the_host(void **state) {
  pass_fixture *fixture = *state;
  for (int is_single = 0; is_single < 2; is_single++) {
    const egi_checkpoint_options checkpoints = {.rung = UINT32_MAX, .is_single_buffered = is_single};
    make_deep_graph(fixture);
    egi_value_id gradients[3];
    for (uint32_t b = 0; b < 3; b++) gradients[b] = gradient_of_block(fixture, b);
    run_options(fixture, &checkpoints);
    assert_int_equal(pass_count(fixture, EGI_OP_Offload), 1);
    assert_int_equal(pass_count(fixture, EGI_OP_Reload), 1);
    const egi_graph *graph = fixture->graph;
    const egi_node *offload = find_node(fixture, EGI_OP_Offload), *reload = find_node(fixture, EGI_OP_Reload);
    assert_string_equal(graph->values[offload->inputs[0]].name, "x0");
    assert_int_equal(reload->inputs[0], offload->outputs[0]);
    assert_int_equal(reload->inputs[1], is_single ? gradients[1] : gradients[2]); /* blocks 0 and 1 are one */
    /* what follows the first group, or the second, goes on behind the copy */
    const egi_node *barrier = find_barrier(fixture, offload->outputs[0]);
    assert_non_null(barrier);
    assert_string_equal(graph->values[barrier->inputs[0]].name, is_single ? "x2" : "x3");
    for (egi_node_id id = 1; id < graph->n_nodes; id++) { /* the backward pass reads what came back */
      const egi_node *node = &graph->nodes[id];
      bool is_first =
          node == offload || node->op == EGI_OP_Add || strcmp(node->name, "/layers.0/norm/RMSNormalization") == 0;
      for (uint16_t i = 0; i < node->n_inputs && !is_first; i++) assert_true(node->inputs[i] != offload->inputs[0]);
    }
  }
}

/* A block of products and norms on two pieces of its rows; one with attention, or without wide rows, stays. */
static void wide_blocks_become_tiles(void **state) {
  pass_fixture *fixture = *state;
  static const char *const names[] = {"tile_rows"};
  const egi_checkpoint_options checkpoints = {.tiles = 2};
  const egi_pipeline_options options = {.checkpoints = &checkpoints};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,5] logits)\n" WEIGHTS "\n"
                      "{ x0 = Gather (t, input_ids)\n" BLOCK("x0", "x1", "0") "logits = MatMul (x1, h) }");
  pass_run(fixture, "append_loss", NULL);
  assert_int_equal(egi_passes_run(fixture->graph, names, 1, &options, NULL), EG_OK);
  pass_run(fixture, "eliminate_dead", NULL);
  pass_expect(fixture,
              "%1 = Gather(t, input_ids)\n%2, %3 = Split<axis=1><num_outputs=2>(%1)\n"
              "%4 = RMSNormalization(%2, s)\n%5 = MatMul(%4, w)\n%6 = Tanh(%5)\n%7 = MatMul(%6, v)\n%8 = Add(%2, %7)\n"
              "%9 = RMSNormalization(%3, s)\n%10 = MatMul(%9, w)\n%11 = Tanh(%10)\n%12 = MatMul(%11, v)\n"
              "%13 = Add(%3, %12)\n%14 = Concat<axis=1>(%8, %13)\n"
              "%15, %16 = LinearLogProbability<rows=512>(%14, h, engraft.labels)\n%17 = ReduceSum<keepdims=0>(%15)\n"
              "%18 = Neg(%17)\n-> engraft.logp=%15\n-> engraft.loss=%18\n");
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,5] logits)\n" WEIGHTS "\n"
                      "{ x0 = Gather (t, input_ids) u = MatMul (x0, w) c = CumSum (u, one) d = MatMul (c, v)\n"
                      "  x1 = Add (x0, d) logits = MatMul (x1, h) }");
  pass_run(fixture, "append_loss", NULL);
  egi_pass_report report;
  assert_int_equal(egi_passes_run(fixture->graph, names, 1, &options, &report), EG_OK);
  assert_int_equal(report.n_matched, 0);
}

/* All that the first blocks leave, but for what is cheap; the last block's stays. */
static void what_is_dear_waits_on_the_host(void **state) {
  pass_fixture *fixture = *state;
  make_deep_graph(fixture);
  uint32_t end = end_of(fixture, EGI_CHECKPOINT_MOVED);
  assert_int_equal(end, 3 + 2);
  run_rung(fixture, end);
  const egi_graph *graph = fixture->graph;
  unsigned n_offloads = pass_count(fixture, EGI_OP_Offload);
  assert_true(n_offloads > 2); /* Tanh's result, and in the second block what flows in */
  assert_int_equal(pass_count(fixture, EGI_OP_Reload), n_offloads);
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_Offload) assert_null(strstr(graph->values[node->inputs[0]].name, "layers.2"));
    if (node->op == EGI_OP_Offload) assert_string_not_equal(graph->values[node->inputs[0]].name, "x2");
  }
  assert_int_equal(count_again(fixture, EGI_OP_MatMul), 0);
  pass_run(fixture, "eliminate_common,fold_constants,eliminate_identity,eliminate_dead", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_Offload), n_offloads);
}

/* Once made, neither the passes that clean up nor a second run change it. */
static void nothing_undoes_it(void **state) {
  pass_fixture *fixture = *state;
  static const char *const clean = "eliminate_common,eliminate_identity,fold_constants,eliminate_dead";
  make_graph(fixture);
  pass_run(fixture, clean, NULL);
  run_rung(fixture, end_of(fixture, EGI_CHECKPOINT_WHOLE));
  unsigned n_nodes = fixture->graph->n_nodes;
  pass_run(fixture, clean, NULL);
  pass_run_settled(fixture, "buffer_checkpoints");
  assert_int_equal(fixture->graph->n_nodes, n_nodes);
  assert_int_equal(pass_count(fixture, EGI_OP_Barrier), 2);
  make_graph(fixture);
  run_rung(fixture, 0);
  assert_int_equal(pass_count(fixture, EGI_OP_Barrier), 0);
  make_deep_graph(fixture);
  pass_run(fixture, clean, NULL);
  run_rung(fixture, UINT32_MAX);
  n_nodes = fixture->graph->n_nodes;
  pass_run(fixture, clean, NULL);
  run_rung(fixture, UINT32_MAX);
  assert_int_equal(fixture->graph->n_nodes, n_nodes);
}

static void a_graph_without_a_loss_is_refused(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, model);
  assert_int_equal(pass_try(fixture, "buffer_checkpoints", NULL), EG_ERROR_ARGUMENT);
  pass_expect_error(fixture, "append_loss comes first");
}

/* A value that leads past both blocks leaves no boundary between them. */
static void a_way_past_joins_blocks(void **state) {
  pass_fixture *fixture = *state;
  egi_blocks blocks;
  static const egi_adapter_target target = {.path = "layers.0.up", .rank = 1, .scale = 1};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .has_gradient = true};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,5] logits)\n"
                      "" WEIGHTS "\n"
                      "{ x0 = Gather (t, input_ids)\n" BLOCK("x0", "x1", "0")
                          BLOCK("x1", "x2", "1") "x3 = Mul (x2, x0) logits = MatMul (x3, h) }");
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_common,eliminate_dead", &adapt);
  assert_int_equal(egi_blocks_find(fixture->graph, &fixture->arena, &blocks), EG_OK);
  assert_int_equal(blocks.count, 3);
  assert_string_equal(fixture->graph->values[blocks.blocks[0].input].name, "x0");
  assert_string_equal(fixture->graph->values[blocks.blocks[1].input].name, "x3");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(blocks_lie_between_values_that_all_comes_through),
                                     TEST(norms_and_activations_are_made_again_first),
                                     TEST(whole_blocks_are_made_again_from_their_inputs),
                                     TEST(what_is_only_reported_is_no_backward_pass),
                                     TEST(inputs_wait_on_the_host),
                                     TEST(what_is_dear_waits_on_the_host),
                                     TEST(wide_blocks_become_tiles),
                                     TEST(nothing_undoes_it),
                                     TEST(a_graph_without_a_loss_is_refused),
                                     TEST(a_way_past_joins_blocks)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
