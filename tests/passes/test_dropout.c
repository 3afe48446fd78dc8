/* Dropout that an exporter left in training mode. */
#include "support_passes.h"

#define GRAPH(text)                                                                                               \
  "(int64[batch,sequence] input_ids, bool training) => (float[batch,sequence,2] logits)\n"                        \
  "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] w = {1,2,3,4}, float r = {0.25}, bool yes = {1}, bool no = " \
  "{0}>\n"                                                                                                        \
  "{ [\"/embed/Gather\"] e = Gather (t, input_ids) " text " [\"/lm_head/MatMul\"] logits = MatMul (d, w) }"

static const egi_adapter_target target = {.path = "lm_head", .rank = 1, .scale = 1};

static const egi_node *find(const pass_fixture *fixture, egi_op op) {
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++)
    if (fixture->graph->nodes[id].op == op) return &fixture->graph->nodes[id];
  return NULL;
}

static void training_dropout_is_keyed(void **state) {
  pass_fixture *fixture = *state;
  static const char *const modes[] = {"training", "yes"};
  for (int i = 0; i < 2; i++) {
    const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .has_gradient = true, .seed = 9};
    pass_graph(fixture, i == 0 ? GRAPH("d = Dropout (e, r, training)") : GRAPH("d = Dropout (e, r, yes)"));
    pass_run(fixture, "name_modules,append_loss,key_dropout,graft_adapters,differentiate,eliminate_dead", &adapt);
    const egi_node *node = find(fixture, EGI_OP_KeyedDropout);
    if (node == NULL) fail_msg("mode %s: nothing is keyed", modes[i]);
    assert_int_equal(egi_node_int(node, "seed", 0), 9);
    assert_true(egi_node_float(node, "ratio", 0) >= 0.25F && egi_node_float(node, "ratio", 0) <= 0.25F);
    assert_int_equal(pass_count(fixture, EGI_OP_Dropout), 0);
    assert_int_equal(fixture->graph->n_inputs, 2); /* tokens and labels */
    assert_int_equal(fixture->graph->values[fixture->graph->inputs[1]].index, 1);
  }
}

static void nothing_is_dropped_outside_training(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.has_gradient = false};
  const egi_adapt_options training = {.adapters = &target, .n_adapters = 1, .has_gradient = true};
  pass_graph(fixture, GRAPH("d = Dropout (e, r, yes)"));
  pass_run(fixture, "name_modules,append_loss,key_dropout,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_KeyedDropout) + pass_count(fixture, EGI_OP_Dropout), 0);
  pass_graph(fixture, GRAPH("d = Dropout (e, r, no)"));
  pass_run(fixture, "name_modules,append_loss,key_dropout,graft_adapters,eliminate_dead", &training);
  assert_int_equal(pass_count(fixture, EGI_OP_KeyedDropout) + pass_count(fixture, EGI_OP_Dropout), 0);
}

/* Each adapter drops for itself, with a site of its own; the frozen layer sees everything. */
static void adapters_drop_their_input(void **state) {
  pass_fixture *fixture = *state;
  egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .has_gradient = true, .dropout = 0.5};
  pass_graph(fixture, GRAPH("d = Tanh (e)"));
  pass_run(fixture, "name_modules,append_loss,graft_adapters,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_KeyedDropout), 1);
  adapt.is_frozen = true;
  pass_graph(fixture, GRAPH("d = Tanh (e)"));
  pass_run(fixture, "name_modules,append_loss,graft_adapters,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_KeyedDropout), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(training_dropout_is_keyed, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(nothing_is_dropped_outside_training, pass_set_up, pass_tear_down),
      cmocka_unit_test_setup_teardown(adapters_drop_their_input, pass_set_up, pass_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
