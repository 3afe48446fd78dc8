/* Module paths, linear layers and parameters: names as in the Hugging Face model, whoever exported it. */
#include "support_passes.h"

#include <stdio.h>
#include <string.h>

/* "path in>out" of each linear layer, " head" after the head; a line each. */
static const char *linears(pass_fixture *fixture) {
  egi_linear *list = NULL;
  size_t count = 0;
  egi_text_free(&fixture->text);
  assert_int_equal(egi_find_linears(fixture->graph, &fixture->arena, &list, &count), EG_OK);
  for (size_t i = 0; i < count; i++)
    egi_text_format(&fixture->text, "%s %d>%d%s%s\n", list[i].path, (int)list[i].in_features, (int)list[i].out_features,
                    list[i].is_transposed ? " transposed" : "", list[i].is_head ? " head" : "");
  return egi_text_string(&fixture->text);
}

/* "name uses" of each parameter, " transposed" where the file holds the transpose. */
static const char *parameters(pass_fixture *fixture) {
  egi_parameter *list = NULL;
  size_t count = 0;
  egi_text_free(&fixture->text);
  assert_int_equal(egi_find_parameters(fixture->graph, &fixture->arena, &list, &count), EG_OK);
  for (size_t i = 0; i < count; i++)
    egi_text_format(&fixture->text, "%s %u%s\n", list[i].name, list[i].n_uses,
                    list[i].is_transposed ? " transposed" : "");
  return egi_text_string(&fixture->text);
}

static const char *scope_of(const pass_fixture *fixture, egi_op op) {
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    if (fixture->graph->nodes[id].op == op) return fixture->graph->nodes[id].scope;
  }
  return NULL;
}

/* A wrapper "m" round everything; weights renamed and transposed, as PyTorch's exporters leave them. */
static const char *const wrapped =
    "(int64[batch,sequence] input_ids) => (float[batch,sequence,6] logits)\n"
    "<float[6,2] \"m.model.embed_tokens.weight\" = {1,2,3,4,5,6,7,8,9,10,11,12}, float[2] \"m.model.norm.weight\" = "
    "{1,2},\n"
    " float[2,2] val_1 = {1,2,3,4}, float[2] val_2 = {1,2}, float[2,6] \"onnx::MatMul_3\" = "
    "{0,0,0,0,0,0,0,0,0,0,0,0}>\n"
    "{ [\"/m/model/embed_tokens/Gather\"] e = Gather (\"m.model.embed_tokens.weight\", input_ids)\n"
    "  [\"/m/model/layers.0/self_attn/q_proj/MatMul\"] q = MatMul (e, val_1)\n"
    "  [\"/m/model/layers.0/self_attn/q_proj/Add\"] b = Add (val_2, q)\n"
    "  [\"node_without_a_path\"] a = Abs (b)\n"
    "  [\"/m/model/norm/RMSNormalization\"] n = RMSNormalization (a, \"m.model.norm.weight\")\n"
    "  [\"/m/lm_head/MatMul\"] logits = MatMul (n, \"onnx::MatMul_3\") }";

static void a_wrapper_goes(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, wrapped);
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(linears(fixture), "model.layers.0.self_attn.q_proj 2>2\nlm_head 2>6 head\n");
  assert_string_equal(parameters(fixture),
                      "model.embed_tokens.weight 1\nmodel.layers.0.self_attn.q_proj.weight 1 transposed\n"
                      "model.layers.0.self_attn.q_proj.bias 1\nmodel.norm.weight 1\nlm_head.weight 1 transposed\n");
  assert_string_equal(scope_of(fixture, EGI_OP_Abs), "model.layers.0.self_attn.q_proj");
}

/* The head outside the outermost module: then that module is the model's own. */
static void the_models_own_module_stays(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
                      "<float[3,2] table = {1,2,3,4,5,6}, float[2,2] w = {1,2,3,4}, float[2,3] h = {0,0,0,0,0,0}>\n"
                      "{ [\"/transformer/wte/Gather\"] e = Gather (table, input_ids)\n"
                      "  [\"/transformer/h.0/attn/c_attn/MatMul\"] a = MatMul (e, w)\n"
                      "  [\"/lm_head/MatMul\"] logits = MatMul (a, h) }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(linears(fixture), "transformer.h.0.attn.c_attn 2>2\nlm_head 2>3 head\n");
}

/* Hidden states are outputs too, under any name; soft-capped logits; a head tied to the token table. */
static void the_head_is_found_among_outputs(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] h0, float[batch,sequence,3] y,\n"
                      "   float[batch,sequence,2] h1)\n"
                      "<float[3,2] \"m.wte.weight\" = {1,2,3,4,5,6}, float[2,2] w = {1,2,3,4}, float[2,3] t = "
                      "{1,3,5,2,4,6}, float cap = {3}>\n"
                      "{ [\"/m/wte/Gather\"] h0 = Gather (\"m.wte.weight\", input_ids)\n"
                      "  [\"/m/fc/MatMul\"] a = MatMul (h0, w)  h1 = Add (a, h0)\n"
                      "  [\"/m/lm_head/MatMul\"] l = MatMul (h1, t)  d = Div (l, cap)  c = Tanh (d)  e = Mul (c, cap)\n"
                      "  y = LogSoftmax (e) }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(linears(fixture), "fc 2>2\nlm_head 2>3 head\n");
  assert_string_equal(parameters(fixture), "wte.weight 2\nfc.weight 1 transposed\n");
  pass_run(fixture, "append_loss", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_LogProbability), 1);
  assert_string_equal(linears(fixture), "fc 2>2\nlm_head 2>3 head\n");
  assert_string_equal(parameters(fixture), "wte.weight 2\nfc.weight 1 transposed\n");
}

/* A norm may have a row for each head; a table that the exporter folded is none, nor are cosines. */
static void a_scale_of_heads_is_a_parameter(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
             "<float[3,4] \"wte.weight\" = {1,2,3,4,5,6,7,8,9,10,11,12}, float[2,2] \"q_norm.weight\" = {1,2,3,4},\n"
             " float[2,2] val_1 = {1,2,3,4}, float[2,2] \"rotary.cos_cached\" = {1,2,3,4},\n"
             " float[4,3] \"lm_head.weight\" = {0,0,0,0,0,0,0,0,0,0,0,0}, int64[4] heads = {0,0,2,2}, "
             "int64[3] flat = {0,0,4}>\n"
             "{ e = Gather (\"wte.weight\", input_ids)  h = Reshape (e, heads)  q = Mul (h, \"q_norm.weight\")\n"
             "  r = Mul (q, val_1)  c = Mul (\"rotary.cos_cached\", r)  f = Reshape (c, flat)\n"
             "  logits = MatMul (f, \"lm_head.weight\") }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(parameters(fixture), "wte.weight 1\nq_norm.weight 1\nlm_head.weight 1\n");
}

static void weights_name_what_nodes_do_not(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
      "<float[3,2] \"w.model.embed.weight\" = {1,2,3,4,5,6}, float[2,2] \"w.model.layers.0.mlp.up_proj.weight\" = "
      "{1,2,3,4},\n"
      " float[2,2] \"w.model.layers.0.mlp.c_fc.weight\" = {1,2,3,4}, float[2] \"w.model.layers.0.mlp.c_fc.bias\" = "
      "{0,0},\n"
      " float[3,2] \"w.lm_head.weight\" = {0,0,0,0,0,0}, int64[2] rows = {-1,2}>\n"
      "{ e = Gather (\"w.model.embed.weight\", input_ids)  t = Transpose (\"w.model.layers.0.mlp.up_proj.weight\")\n"
      "  u = MatMul (e, t)  s = Shape (u)  r = Reshape (u, rows)\n"
      "  c = Gemm (r, \"w.model.layers.0.mlp.c_fc.weight\", \"w.model.layers.0.mlp.c_fc.bias\")  d = Reshape (c, s)\n"
      "  h = Transpose (\"w.lm_head.weight\")  logits = MatMul (d, h) }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(
      linears(fixture),
      "model.layers.0.mlp.up_proj 2>2 transposed\nmodel.layers.0.mlp.c_fc 2>2\nlm_head 2>3 transposed head\n");
  /* c_fc keeps the file's layout: the initializer has its own name. */
  assert_string_equal(parameters(fixture),
                      "model.embed.weight 1\nmodel.layers.0.mlp.up_proj.weight 1\nmodel.layers.0.mlp.c_fc.weight 1\n"
                      "model.layers.0.mlp.c_fc.bias 1\nlm_head.weight 1\n");
}

static void genai_names_are_translated(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
             "<float[3,2] t = {1,2,3,4,5,6}, float[2,2] \"model.layers.0.attn.o_proj.MatMul.weight\" = {1,2,3,4},\n"
             " float[2] \"model.layers.0.attn.q_norm.layernorm.weight\" = {1,2}, float[2,2] r = {1,2,3,4},\n"
             " float[2] \"model.layers.1.final_norm_layernorm.weight\" = {1,2}, float[2,3] h = {0,0,0,0,0,0}>\n"
             "{ [\"/model/embed_tokens/Gather\"] e = Gather (t, input_ids)\n"
             "  [\"/model/layers.0/attn/q_norm/layernorm/RMSNormalization\"] n = RMSNormalization "
             "(e, \"model.layers.0.attn.q_norm.layernorm.weight\")\n"
             "  o = MatMul (n, \"model.layers.0.attn.o_proj.MatMul.weight\")\n"
             "  [\"/model/layers.0/moe/router/MatMul\"] m = MatMul (o, r)\n"
             "  [\"/model/layers.1/final_norm_layernorm/RMSNormalization\"] f = RMSNormalization "
             "(m, \"model.layers.1.final_norm_layernorm.weight\")\n"
             "  [\"/lm_head/MatMul\"] logits = MatMul (f, h) }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(
      parameters(fixture),
      "model.embed_tokens.weight 1\nmodel.layers.0.self_attn.q_norm.weight 1\n"
      "model.layers.0.self_attn.o_proj.weight 1 transposed\nmodel.layers.0.mlp.router.weight 1 transposed\n"
      "model.norm.weight 1\nlm_head.weight 1 transposed\n");
}

/* Equal bytes, the head's transposed; and one initializer under the norms of two layers. */
static void ties_join_and_shared_initializers_split(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(int64[batch,sequence] input_ids, int64[batch,sequence] position_ids) => (float[batch,sequence,3] logits)\n"
      "<float[3,2] wte = {1,2,3,4,5,6}, float[3,2] wpe = {6,5,4,3,2,1}, float[2] ones = {1,1},\n"
      " float[2,3] head = {1,3,5,2,4,6}>\n"
      "{ [\"/model/wpe/Gather\"] p = Gather (wpe, position_ids)  [\"/model/wte/Gather\"] e = Gather (wte, input_ids)\n"
      "  x = Add (p, e)  [\"/model/layers.0/norm/Norm\"] a = RMSNormalization (x, ones)\n"
      "  [\"/model/layers.1/norm/Norm\"] b = RMSNormalization (a, ones)  [\"/lm_head/MatMul\"] logits = MatMul (b, "
      "head) }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(
      parameters(fixture),
      "model.wpe.weight 1\nmodel.wte.weight 2\nmodel.layers.0.norm.weight 1\nmodel.layers.1.norm.weight 1\n");
}

/* The decomposed norm's scale, 1 + w, tables of sines, inverse frequencies, single numbers. */
static void only_parameters_are_parameters(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(
      fixture,
      "(int64[batch,sequence] input_ids, int64[batch,sequence] position_ids) => (float[batch,sequence,3] logits)\n"
      "<float[3,2] t = {1,2,3,4,5,6}, float[9,2] cos_cache = {0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}, float[2] inv = "
      "{1,2},\n"
      " float[2] w = {1,2}, float[2] plus = {0,0}, float one = {1}, float[1] eps = {1}, float[2,3] h = {0,0,0,0,0,0},\n"
      " int64[1] last = {-1}>\n"
      "{ [\"/model/embed/Gather\"] e = Gather (t, input_ids)  c = Gather (cos_cache, position_ids)\n"
      "  f = Cast <to = 1> (position_ids)  g = Unsqueeze (f, last)  angle = Mul (g, inv)  s = Sin (angle)\n"
      "  k = Mul (c, s)  x = Mul (e, k)  y = Add (x, eps)  [\"/model/norm/Mul\"] n = Mul (w, y)\n"
      "  [\"/model/norm2/Add\"] p = Add (plus, one)  [\"/model/norm2/Mul\"] m = Mul (n, p)\n"
      "  [\"/lm_head/MatMul\"] logits = MatMul (m, h) }");
  pass_run_settled(fixture, "name_modules");
  assert_string_equal(parameters(fixture),
                      "model.embed.weight 1\nmodel.norm.weight 1\nmodel.norm2.weight 1\nlm_head.weight 1 transposed\n");
  assert_string_equal(linears(fixture), "lm_head 2>3 head\n");
}

static void targets_match_as_in_peft(void **state) {
  (void)state;
  const egi_linear layer = {.path = "model.layers.0.self_attn.q_proj"}, head = {.path = "lm_head", .is_head = true};
  assert_true(egi_target_matches(&layer, "q_proj"));
  assert_true(egi_target_matches(&layer, "k_proj, q_proj"));
  assert_true(egi_target_matches(&layer, "self_attn.q_proj"));
  assert_true(egi_target_matches(&layer, "model.layers.0.self_attn.q_proj"));
  assert_true(egi_target_matches(&layer, "all-linear"));
  assert_false(egi_target_matches(&layer, "proj"));
  assert_false(egi_target_matches(&layer, "q_proj.x"));
  assert_false(egi_target_matches(&layer, ""));
  assert_false(egi_target_matches(&layer, "k_proj,,v_proj"));
  assert_false(egi_target_matches(&head, "all-linear"));
  assert_true(egi_target_matches(&head, "lm_head"));
}

static void ambiguous_ends_are_refused(void **state) {
  pass_fixture *fixture = *state;
  egi_value_id value = 0;
  pass_graph(fixture,
             "(int64[b,s] a, int64[b,s] c) => (float[b,s,2] x, float[b,s,2] y) <float[3,2] t = {1,2,3,4,5,6}>\n"
             "{ x = Gather (t, a)  y = Gather (t, c) }");
  assert_int_equal(egi_find_logits(fixture->graph, &value), EG_ERROR_DATA);
  pass_expect_error(fixture, "which are the logits?");
  assert_int_equal(egi_find_token_input(fixture->graph, &value), EG_ERROR_DATA);
  pass_expect_error(fixture, "which are the tokens?");
}

/* What replaces a parameter goes through the same casts, transposes and reshapes. */
static void a_parameter_is_replaced_in_all_its_uses(void **state) {
  pass_fixture *fixture = *state;
  egi_parameter *list = NULL;
  size_t count = 0;
  static float numbers[6] = {0};
  egi_tensor tensor = {.data = numbers, .dtype = EG_DTYPE_F32, .rank = 2, .dims = {3, 2}, .strides = {2, 1}};
  egi_value_id value = 0;
  pass_graph(fixture,
             "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
             "<float[3,2] wte = {1,2,3,4,5,6}, float[2,3] head = {1,3,5,2,4,6}>\n"
             "{ [\"/wte/Gather\"] e = Gather (wte, input_ids)  [\"/lm_head/MatMul\"] logits = MatMul (e, head) }");
  pass_run(fixture, "name_modules", NULL);
  assert_int_equal(egi_find_parameters(fixture->graph, &fixture->arena, &list, &count), EG_OK);
  assert_int_equal(count, 1);
  assert_int_equal(egi_add_constant(fixture->graph, "new", &tensor, &value), EG_OK);
  assert_int_equal(egi_replace_parameter(fixture->graph, &list[0], value), EG_OK);
  assert_int_equal(egi_graph_tidy(fixture->graph), EG_OK);
  pass_expect(fixture, "%1 = Gather(new, input_ids)\n%2 = Transpose(new)\n%3 = MatMul(%1, %2)\n-> logits=%3\n");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(a_wrapper_goes),
      TEST(the_models_own_module_stays),
      TEST(the_head_is_found_among_outputs),
      TEST(a_scale_of_heads_is_a_parameter),
      TEST(weights_name_what_nodes_do_not),
      TEST(genai_names_are_translated),
      TEST(ties_join_and_shared_initializers_split),
      TEST(only_parameters_are_parameters),
      TEST(targets_match_as_in_peft),
      TEST(ambiguous_ends_are_refused),
      TEST(a_parameter_is_replaced_in_all_its_uses),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
