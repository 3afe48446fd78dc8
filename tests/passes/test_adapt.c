/* From the model to its training graph: wider floats, the loss, adapters or states, and the backward graph's form. Its
 * numbers are test_gradients.c's matter. */
#include "support_passes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- widen_floats ----------------------------------------------------------------------------------------------- */

static void narrow_arithmetic_becomes_wide(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(float16[n,2] x) => (float16[n,2] y) <float16[2,2] w = {15360,0,0,15360}, float16 two = {16384}>\n"
             "{ a = MatMul (x, w)  b = Cast <to = 1> (a)  c = Mul (b, b)  d = Cast <to = 10> (c)  e = Pow (d, two)\n"
             "  y = Mul (e, w) }");
  pass_run_settled(fixture, "widen_floats");
  pass_expect(fixture,
              "%1 = Cast<to=1>(x)\n%2 = Cast<to=1>(w)\n%3 = MatMul(%1, %2)\n%4 = Mul(%3, %3)\n%5 = Pow(%4, 2)\n"
              "%6 = Mul(%5, %2)\n-> y=%6\n");
  assert_int_equal(fixture->graph->values[fixture->graph->outputs[0]].dtype, EG_DTYPE_F32);
}

/* ---- quantize_base ---------------------------------------------------------------------------------------------- */

#define NF4 "Linear<storage=bnb4><quant_type=1><block_size=32><out_features=2><in_features=2>"

/* Two layers of one matrix, one of its transpose, the head; a second run finds nothing left. */
static void frozen_matrices_become_codes(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.quantise = {.is_wanted = true, .type = 1, .block = 32, .is_nested = true}};
  pass_graph(fixture,
             "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
             "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] w = {1,2,3,4}, float[3,2] v = {1,2,3,4,5,6},\n"
             " float[2] c = {1,2}>\n"
             "{ [\"/embed/Gather\"] x = Gather (t, input_ids)  [\"/a/Linear\"] a = engraft.Linear (x, w, c)\n"
             "  [\"/b/Linear\"] b = engraft.Linear (a, w)  [\"/turn\"] u = Transpose <perm = [1, 0]> (w)\n"
             "  [\"/c/Linear\"] d = engraft.Linear (b, u)  [\"/head/Linear\"] logits = engraft.Linear (d, v) }");
  for (int run = 0; run < 2; run++) {
    pass_run(fixture, "quantize_base,eliminate_dead", &adapt);
    pass_expect(fixture, "%1 = Gather(t, input_ids)\n%2 = " NF4 "(%1, w.codes, c, w.absmax, _, _, w.nested)\n"
                         "%3 = " NF4 "(%2, w.codes, _, w.absmax, _, _, w.nested)\n"
                         "%4 = " NF4 "(%3, w.codes_1, _, w.absmax_2, _, _, w.nested_3)\n"
                         "%5 = Linear(%4, v)\n-> logits=%5\n");
  }
}

/* The head on request, and with it the loss: codes with a bias, [vocabulary, features]. */
static void a_head_becomes_codes_when_asked_for(void **state) {
  pass_fixture *fixture = *state;
  egi_adapt_options adapt = {.has_gradient = true,
                             .quantise = {.is_wanted = true, .type = 1, .block = 32, .has_head = true}};
  for (int has_loss = 0; has_loss < 2; has_loss++) {
    pass_graph(
        fixture,
        "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
        "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[3,2] v = {1,2,3,4,5,6}, float[3] c = {1,2,3}>\n"
        "{ [\"/embed/Gather\"] x = Gather (t, input_ids)  [\"/head/Linear\"] logits = engraft.Linear (x, v, c) }");
    pass_run(fixture, has_loss ? "quantize_base,append_loss" : "quantize_base", &adapt);
    if (has_loss)
      pass_expect(fixture, "%1 = Gather(t, input_ids)\n"
                           "%2, %3 = LinearLogProbability<storage=bnb4><quant_type=1><block_size=32>"
                           "<out_features=3><in_features=2>(%1, v.codes, engraft.labels, c, v.absmax)\n"
                           "%4 = ReduceSum<keepdims=0>(%2)\n%5 = Neg(%4)\n-> engraft.logp=%2\n-> engraft.loss=%5\n");
    else
      pass_expect(fixture, "%1 = Gather(t, input_ids)\n%2 = Linear<storage=bnb4><quant_type=1><block_size=32>"
                           "<out_features=3><in_features=2>(%1, v.codes, c, v.absmax)\n-> logits=%2\n");
  }
}

static void nothing_is_quantised_unasked(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.has_gradient = true};
  pass_graph(fixture, "(float[n,2] x) => (float[n,2] y) <float[2,2] w = {1,2,3,4}> { y = engraft.Linear (x, w) }");
  pass_run(fixture, "quantize_base", &adapt);
  pass_expect(fixture, "%1 = Linear(x, w)\n-> y=%1\n");
}

/* ---- fake_quantize ---------------------------------------------------------------------------------------------- */

#define INT4 "FakeQuantize<storage=nbits><block_size=16><bits=4><symmetric=1>"
#define INT8 "FakeQuantize<storage=nbits><block_size=0><bits=8><symmetric=1>"

/* A layer of two modules and one of one: adapters go inside the rounding, rows of a module without one stay; what goes
 * in is rounded where that is wanted, and the head is left alone. */
static void adapters_are_rounded_with_their_matrix(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target adapters[2] = {{.path = "a.k_proj", .rank = 1, .scale = 2.0},
                                          {.path = "b", .rank = 2, .scale = 0.5}};
  const egi_adapt_options adapt = {.adapters = adapters,
                                   .n_adapters = 2,
                                   .fake = {.is_wanted = true,
                                            .has_activations = true,
                                            .weights = {.is_symmetric = true, .bits = 4, .block = 16},
                                            .activations = {.is_symmetric = true, .bits = 8}}};
  pass_graph(fixture,
             "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
             "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[5,2] w = {1,2,3,4,5,6,7,8,9,0}, float[2,2] v = {1,2,3,4},\n"
             " float[3,2] h = {1,2,3,4,5,6}, int64[2] sizes = {3,2}>\n"
             "{ [\"/embed/Gather\"] x = Gather (t, input_ids)\n"
             "  [\"/a/qkv/Linear\"] both = engraft.Linear <parts = \"q_proj k_proj\"> (x, w)\n"
             "  q, k = Split <axis = -1> (both, sizes)  [\"/b/Linear\"] b = engraft.Linear (k, v)\n"
             "  [\"/head/Linear\"] logits = engraft.Linear (b, h) }");
  pass_run(fixture, "fake_quantize,fake_quantize,graft_adapters,eliminate_dead", &adapt);
  pass_expect(fixture,
              "%1 = Gather(t, input_ids)\n%2 = " INT8 "(%1)\n%3 = Slice(w, {0}, {3}, {0})\n"
              "%4 = Slice(w, {3}, {5}, {0})\n"
              "%5 = AddMatMul<alpha=2>(%4, base_model.model.a.k_proj.lora_B.weight, "
              "base_model.model.a.k_proj.lora_A.weight)\n%6 = Concat<axis=0>(%3, %5)\n%7 = " INT4 "(%6)\n"
              "%8 = Linear<parts=q_proj k_proj>(%2, %7)\n%9, %10 = Split<axis=-1>(%8, {3,2})\n%11 = " INT8 "(%10)\n"
              "%12 = AddMatMul<alpha=0.5>(v, base_model.model.b.lora_B.weight, base_model.model.b.lora_A.weight)\n"
              "%13 = " INT4 "(%12)\n%14 = Linear(%11, %13)\n%15 = Linear(%14, h)\n-> logits=%15\n");
}

static void only_plain_layers_are_rounded(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {
      .is_full = true, .fake = {.is_wanted = true, .weights = {.is_symmetric = true, .bits = 4, .block = 16}}};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
                      "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] v = {1,2,3,4}, float[3,2] h = {1,2,3,4,5,6}>\n"
                      "{ [\"/embed/Gather\"] x = Gather (t, input_ids)  [\"/b/Linear\"] b = engraft.Linear (x, v)\n"
                      "  [\"/head/Linear\"] logits = engraft.Linear (b, h) }");
  pass_run(fixture, "fake_quantize,graft_adapters,eliminate_dead", &adapt);
  pass_expect(fixture, "%1 = Gather(embed.weight, input_ids)\n%2 = " INT4 "(b.weight)\n%3 = Linear(%1, %2)\n"
                       "%4 = Linear(%3, head.weight)\n-> logits=%4\n");
}

/* ---- relative positions ------------------------------------------------------------------------------------------ */

/* Scores picked out of queries times `positions`, beside queries times keys. */
#define RELATIVE(positions)                                                                                           \
  "(int64[batch,sequence] input_ids, int64[batch,sequence,sequence] steps) => (float[batch,sequence,4] y)\n"          \
  "<float[5,4] t = {1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9,0},\n"                                                      \
  " float[4,4] a = {1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6}, float[4,4] b = {1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,7},\n"            \
  " float[1,4,3] \"" positions "\" = {1,2,3,4,5,6,7,8,9,0,1,2}>\n"                                                    \
  "{ x = Gather (t, input_ids)  [\"/m/query/MatMul\"] q = MatMul (x, a)  [\"/m/key/MatMul\"] k = MatMul (x, b)\n"     \
  "  u = Transpose <perm = [0, 2, 1]> (k)  s = MatMul (q, u)  [\"/m/by/MatMul\"] r = MatMul (q, \"" positions "\")\n" \
  "  p = GatherElements <axis = -1> (r, steps)  z = Add (s, p)  w = Softmax (z)  y = MatMul (w, x) }"

static eg_status check_positions(pass_fixture *fixture, const char *path) {
  egi_map paths;
  egi_map_init(&paths, &fixture->arena);
  assert_int_equal(egi_map_put(&paths, path, 1), EG_OK);
  return egi_check_folded_positions(fixture->graph, &paths, &fixture->arena);
}

/* What the exporter multiplied with the key layer's weights does not follow an adapter on that layer. */
static void positions_that_were_computed_are_refused(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, RELATIVE("val_7"));
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  assert_int_equal(check_positions(fixture, "m.query"), EG_OK);
  assert_int_equal(check_positions(fixture, "m.key"), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture,
                    "\"/m/by/MatMul\" (MatMul): its relative positions are a constant that the exporter computed "
                    "with \"m.key\"");
  assert_int_equal(egi_check_folded_positions(fixture->graph, NULL, &fixture->arena), EG_ERROR_UNSUPPORTED);
  pass_graph(fixture, RELATIVE("m.distances.weight")); /* a parameter of the model */
  pass_run(fixture, "fuse_linear,name_modules", NULL);
  assert_int_equal(check_positions(fixture, "m.key"), EG_OK);
}

/* ---- append_loss ------------------------------------------------------------------------------------------------ */

#define MODEL(body)                                                                                                   \
  "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits, float[batch,sequence,2] \"present.0\")\n"    \
  "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,3] w = {1,2,3,4,5,6}, float[3,2] v = {1,2,3,4,5,6}, float[3] bias " \
  "= "                                                                                                                \
  "{1,2,3},\n float cap = {30}, int64[2] rows = {-1,2}, int64[3] back = {0,0,3}>\n"                                   \
  "{ [\"/embed/Gather\"] \"present.0\" = Gather (t, input_ids)\n" body " }"

#define LOSS_TAIL(logp) \
  "%4 = ReduceSum<keepdims=0>(" logp ")\n%5 = Neg(%4)\n-> engraft.logp=" logp "\n-> engraft.loss=%5\n"

static void a_linear_head_joins_the_loss(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, MODEL("[\"/head/MatMul\"] m = MatMul (\"present.0\", w)  logits = Add (m, bias)"));
  pass_run(fixture, "name_modules,append_loss", NULL);
  pass_expect(
      fixture,
      "%1 = Gather(t, input_ids)\n%2, %3 = LinearLogProbability(%1, w, engraft.labels, bias)\n" LOSS_TAIL("%2"));
  const egi_value *labels = &fixture->graph->values[egi_graph_find_value(fixture->graph, EGI_INPUT_LABELS)];
  assert_int_equal(labels->kind, EGI_VALUE_INPUT);
  assert_int_equal(labels->dtype, EG_DTYPE_I64);
  assert_true(egi_same_shape(fixture->graph, fixture->graph->inputs[0], fixture->graph->inputs[1]));
}

/* Rows taken together for a Gemm; its weight is [out, in]. */
static void a_gemm_over_rows_joins_the_loss(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, MODEL("h = Reshape (\"present.0\", rows) s = Shape (input_ids) d = Shape <start = 1> (v) "
                            "g = Gemm <transB = 1> (h, v, bias)  k = Constant <value_ints = [3]> ()  "
                            "z = Concat <axis = 0> (s, k)  logits = Reshape (g, z)"));
  pass_run(fixture, "append_loss", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_LinearLogProbability), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Gemm), 0);
  egi_value_id logp = egi_graph_find_value(fixture->graph, EGI_OUTPUT_LOGP);
  assert_true(egi_same_shape(fixture->graph, logp, fixture->graph->inputs[0]));
}

static void capped_logits_stay(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, MODEL("m = MatMul (\"present.0\", w)  d = Div (m, cap)  h = Tanh (d)  logits = Mul (h, cap)"));
  pass_run(fixture, "append_loss", NULL);
  assert_int_equal(pass_count(fixture, EGI_OP_LinearLogProbability), 0);
  assert_int_equal(pass_count(fixture, EGI_OP_LogProbability), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Tanh), 1);
}

static void an_adapter_keeps_the_head(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target target = {.path = "head", .rank = 2, .scale = 1};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .has_gradient = true};
  pass_graph(fixture, MODEL("[\"/head/MatMul\"] logits = MatMul (\"present.0\", w)"));
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_LogProbability), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Accumulate), 2);
}

static void unfit_logits_are_refused(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture,
             "(int64[b,s] input_ids) => (float[b,s] logits) <float[3] t = {1,2,3}> { logits = Gather (t, input_ids) }");
  assert_int_equal(pass_try(fixture, "append_loss", NULL), EG_ERROR_DATA);
  pass_expect_error(fixture, "\"logits\" is not float [batch, sequence, vocabulary]");
  pass_graph(fixture,
             "(int64[b,s] input_ids) => (float[b,1,2] logits) <float[3,2] t = {1,2,3,4,5,6}, int64[1] f = {-1},\n"
             " int64[1] u = {9223372036854775807}, int64[1] a = {1}> { e = Gather (t, input_ids)  logits = Slice (e, "
             "f, u, a) }");
  assert_int_equal(pass_try(fixture, "append_loss", NULL), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "the head keeps the last position alone");
  pass_graph(fixture, "(int64[b,s] input_ids) => (float[b,2] logits) <float[3,2] t = {1,2,3,4,5,6}, int64 f = {-1}>\n"
                      "{ e = Gather (t, input_ids)  logits = Gather <axis = 1> (e, f) }");
  assert_int_equal(pass_try(fixture, "append_loss", NULL), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "the head keeps the last position alone");
  pass_graph(
      fixture,
      "(int64[b,s] input_ids) => (float[b,3,2] logits) <float[3,2] t = {1,2,3,4,5,6}, int64[1] f = {-3},\n"
      " int64[1] u = {9223372036854775807}, int64[1] a = {1}, int64[3] n = {0,3,2}> { e = Gather (t, input_ids)  "
      "l = Slice (e, f, u, a) logits = Reshape (l, n) }");
  assert_int_equal(pass_try(fixture, "append_loss", NULL), EG_ERROR_DATA);
  pass_expect_error(fixture, "does not hold logits for each token");
  pass_graph(fixture, MODEL("logits = MatMul (\"present.0\", w)"));
  pass_run(fixture, "append_loss", NULL);
  assert_int_equal(pass_try(fixture, "append_loss", NULL), EG_ERROR_ARGUMENT);
}

/* ---- graft_adapters --------------------------------------------------------------------------------------------- */

#define TWO_LAYERS                                                                                                \
  "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"                                       \
  "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,4] s = {1,2,3,4,5,6,7,8}, float[4,2] s2 = {1,2,3,4,5,6,7,8},\n" \
  " float[2,3] w = {1,2,3,4,5,6}>\n"                                                                              \
  "{ [\"/embed/Gather\"] e = Gather (t, input_ids)  [\"/layers.0/up/MatMul\"] a = MatMul (e, s)  r = Relu (a)\n"  \
  "  [\"/layers.1/up/MatMul\"] b = MatMul (r, s2)  [\"/head/MatMul\"] logits = MatMul (b, w) }"

static void adapters_stand_beside_their_layers(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target target = {.path = "layers.1.up", .rank = 3, .scale = 0.5};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1};
  pass_graph(fixture, TWO_LAYERS);
  pass_run(fixture, "name_modules,graft_adapters", &adapt);
  pass_expect(fixture,
              "%1 = Gather(t, input_ids)\n%2 = MatMul(%1, s)\n%3 = Relu(%2)\n%4 = MatMul(%3, s2)\n"
              "%5 = Transpose(base_model.model.layers.1.up.lora_A.weight)\n%6 = MatMul(%3, %5)\n"
              "%7 = Transpose(base_model.model.layers.1.up.lora_B.weight)\n%8 = AddMatMul<alpha=0.5>(%4, %6, %7)\n"
              "%9 = MatMul(%8, w)\n-> logits=%9\n");
  const egi_module *module = fixture->module;
  assert_int_equal(module->n_states, 5);
  assert_string_equal(module->states[1].name, "base_model.model.layers.1.up.lora_A.weight");
  assert_int_equal(module->states[1].dims[0], 3);
  assert_int_equal(module->states[1].dims[1], 4);
  assert_int_equal(module->states[2].pool, EGI_POOL_GRADIENTS);
  assert_int_equal(module->states[3].dims[0], 2);
  assert_int_equal(module->states[3].dims[1], 3);
  assert_int_equal(module->states[3].offset, module->states[4].offset);
  assert_true(module->states[3].has_decay);
}

/* Two layers of one input and one of another: the first two multiply with their A at once. */
static void adapters_of_one_input_share_a_product(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target targets[] = {{.path = "q", .rank = 1, .scale = 0.5},
                                        {.path = "k", .rank = 2, .scale = 1},
                                        {.path = "o", .rank = 1, .scale = 1}};
  const egi_adapt_options adapt = {.adapters = targets, .n_adapters = 3};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] y)\n"
                      "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] a = {1,2,3,4}, float[2,2] b = {4,3,2,1}>\n"
                      "{ [\"/embed/Gather\"] x = Gather (t, input_ids)  [\"/q/MatMul\"] q = MatMul (x, a)\n"
                      "  [\"/k/MatMul\"] k = MatMul (x, b)  m = Mul (q, k)  [\"/o/MatMul\"] y = MatMul (m, a) }");
  pass_run(fixture, "name_modules,graft_adapters,join_adapters,eliminate_dead", &adapt);
  pass_run_settled(fixture, "join_adapters");
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), 3 + 2); /* the layers, two products with A */
  assert_int_equal(pass_count(fixture, EGI_OP_AddMatMul), 3);
  assert_int_equal(pass_count(fixture, EGI_OP_Concat), 1);
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    const egi_node *node = &fixture->graph->nodes[id];
    if (node->op != EGI_OP_Split) continue;
    assert_int_equal(node->n_outputs, 2);
    for (int i = 0; i < 2; i++) { /* ranks 1 and 2 */
      int64_t rank = 0;
      const egi_value *piece = &fixture->graph->values[node->outputs[i]];
      assert_true(egi_dim_value(fixture->graph->module->dims, piece->dims[2], &rank));
      assert_int_equal(rank, i + 1);
    }
  }
}

/* The layer adds its adapter, unless its own result is used elsewhere or it has a bias. */
static void a_layer_adds_its_adapter(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target targets[] = {{.path = "q", .rank = 1, .scale = 0.5},
                                        {.path = "k", .rank = 1, .scale = 1},
                                        {.path = "v", .rank = 1, .scale = 1}};
  const egi_adapt_options adapt = {.adapters = targets, .n_adapters = 3};
  pass_graph(fixture, "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] y)\n"
                      "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] a = {1,2,3,4}, float[2,2] b = {4,3,2,1},\n"
                      " float[2] c = {1,2}>\n"
                      "{ [\"/embed/Gather\"] x = Gather (t, input_ids)  [\"/q/Linear\"] q = engraft.Linear (x, a)\n"
                      "  [\"/k/Linear\"] k = engraft.Linear (q, b)  [\"/v/Linear\"] y = engraft.Linear (k, b, c) }");
  pass_run(fixture, "name_modules,graft_adapters,add_base_last,eliminate_dead", &adapt);
  pass_run_settled(fixture, "add_base_last");
  assert_int_equal(pass_count(fixture, EGI_OP_Linear), 3);
  assert_int_equal(pass_count(fixture, EGI_OP_AddMatMul), 1); /* beside the bias */
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), 3 + 2);
  assert_int_equal(pass_count(fixture, EGI_OP_Mul), 1); /* the scale that is not 1 */
}

static void frozen_adapters_have_no_gradients(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target target = {.path = "head", .rank = 1, .scale = 1};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .is_frozen = true};
  pass_graph(fixture, TWO_LAYERS);
  pass_run(fixture, "name_modules,graft_adapters", &adapt);
  assert_int_equal(fixture->module->n_states, 3);
  assert_int_equal(fixture->module->pool_elements[EGI_POOL_GRADIENTS], 0);
  assert_string_equal(fixture->graph->values[fixture->graph->outputs[0]].name, "logits");
  assert_int_equal(fixture->graph->nodes[fixture->graph->values[fixture->graph->outputs[0]].producer].op,
                   EGI_OP_AddMatMul);
}

static void targets_without_a_layer_are_named(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target targets[3] = {{.path = "layers.7.up", .rank = 1, .scale = 1},
                                         {.path = "head", .rank = 1, .scale = 1},
                                         {.path = "layers.0.down", .rank = 1, .scale = 1}};
  const egi_adapt_options adapt = {.adapters = targets, .n_adapters = 3};
  pass_graph(fixture, TWO_LAYERS);
  assert_int_equal(pass_try(fixture, "name_modules,graft_adapters", &adapt), EG_ERROR_DATA);
  pass_expect_error(fixture, "layers.7.up, layers.0.down");
}

/* A second graph of the module takes the states that are there. */
static void graphs_share_states(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.is_full = true};
  pass_graph(fixture, TWO_LAYERS);
  pass_run(fixture, "name_modules,graft_adapters", &adapt);
  uint32_t n_states = fixture->module->n_states;
  assert_int_equal(n_states, 1 + 2 * 4);
  egi_graph *second = NULL;
  assert_int_equal(egi_module_add_graph(fixture->module, "second", &second), EG_OK);
  egi_value_id ids = 0, table = 0;
  egi_dim dims[2] = {EGI_DIM_NONE, EGI_DIM_NONE};
  egi_emitter emit = {.graph = second, .scope = "embed"};
  assert_int_equal(egi_graph_add_input(second, "input_ids", EG_DTYPE_I64, 2, dims, &ids), EG_OK);
  assert_int_equal(egi_graph_add_weight(second, fixture->module->states[1].weight, &table), EG_OK);
  assert_int_equal(egi_graph_add_output(second, egi_emit_binary(&emit, EGI_OP_Gather, table, ids)), EG_OK);
  egi_pass_report report = {0};
  egi_pass_run run = {.ctx = fixture->ctx, .adapt = &adapt, .report = &report};
  assert_int_equal(egi_pass_graft_adapters(&run, second), EG_OK);
  assert_int_equal(fixture->module->n_states, n_states);
  assert_int_equal(second->values[second->nodes[1].inputs[0]].kind, EGI_VALUE_STATE);
}

static void full_training_joins_tied_weights(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.is_full = true, .has_gradient = true};
  pass_graph(fixture,
             "(int64[batch,sequence] input_ids) => (float[batch,sequence,3] logits)\n"
             "<float[3,2] wte = {1,2,3,4,5,6}, float[2,3] head = {1,3,5,2,4,6}, float[2] n = {1,1}>\n"
             "{ [\"/m/wte/Gather\"] e = Gather (wte, input_ids)  [\"/m/norm/Norm\"] x = RMSNormalization (e, n)\n"
             "  [\"/m/lm_head/MatMul\"] logits = MatMul (x, head) }");
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_common,eliminate_dead", &adapt);
  const egi_module *module = fixture->module;
  assert_int_equal(pass_count(fixture, EGI_OP_Accumulate), 2);
  assert_string_equal(module->states[1].name, "wte.weight");
  assert_true(module->states[1].has_decay);
  assert_string_equal(module->states[3].name, "norm.weight");
  assert_false(module->states[3].has_decay);
  assert_int_equal(pass_count(fixture, EGI_OP_GatherGrad), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Add), 1); /* the table's gradient and the head's */
}

/* ---- differentiate ---------------------------------------------------------------------------------------------- */

/* Nothing is computed below the first adapter, and no gradient of a frozen weight. */
static void only_wanted_gradients_are_computed(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target target = {.path = "layers.1.up", .rank = 1, .scale = 2};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .has_gradient = true};
  pass_graph(fixture, TWO_LAYERS);
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_common,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_Accumulate), 2);
  assert_int_equal(pass_count(fixture, EGI_OP_LinearLogProbabilityGrad), 1);
  assert_int_equal(pass_count(fixture, EGI_OP_Where), 0);  /* the Relu below is not differentiated */
  assert_int_equal(pass_count(fixture, EGI_OP_MatMul), 6); /* two layers, x·Aᵀ, dy·B, dB and dA */
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) {
    const egi_node *node = &fixture->graph->nodes[id];
    if (node->op == EGI_OP_LinearLogProbabilityGrad) assert_int_equal(node->n_outputs, 1);
  }
}

/* Three products flow into one value: the second and third are added in place. */
static void products_are_added_in_place(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target target = {.path = "layers.0.in", .rank = 1, .scale = 1};
  const egi_adapt_options adapt = {.adapters = &target, .n_adapters = 1, .has_gradient = true};
  pass_graph(
      fixture,
      "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] logits)\n"
      "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] i = {1,2,3,4}, float[2,2] q = {1,2,3,4}, float[2,2] k = "
      "{4,3,2,1},\n"
      " float[2,2] v = {2,1,4,3}>\n"
      "{ [\"/embed/Gather\"] e = Gather (t, input_ids)  [\"/layers.0/in/MatMul\"] x = MatMul (e, i)\n"
      "  a = MatMul (x, q)  b = MatMul (x, k)  c = MatMul (x, v)  d = Mul (a, b)  f = Mul (d, c)  logits = Tanh (f) }");
  pass_run(fixture, "name_modules,append_loss,graft_adapters,differentiate,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_AddMatMul), 1 + 2); /* the adapter's own, and two sums */
  assert_int_equal(pass_count(fixture, EGI_OP_Add), 0);
}

/* The products with quantised matrices add what is there themselves. */
static void quantised_products_add_themselves(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapter_target target = {.path = "layers.0.in", .rank = 1, .scale = 1};
  const egi_adapt_options adapt = {.adapters = &target,
                                   .n_adapters = 1,
                                   .has_gradient = true,
                                   .quantise = {.is_wanted = true, .type = 1, .block = 32}};
  pass_graph(
      fixture,
      "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] logits)\n"
      "<float[5,2] t = {1,2,3,4,5,6,7,8,9,0}, float[2,2] i = {1,2,3,4}, float[2,2] q = {1,2,3,4}, float[2,2] k = "
      "{4,3,2,1}>\n"
      "{ [\"/embed/Gather\"] e = Gather (t, input_ids)  [\"/layers.0/in/MatMul\"] x = engraft.Linear (e, i)\n"
      "  [\"/a/L\"] a = engraft.Linear (x, q)  [\"/b/L\"] b = engraft.Linear (x, k)  d = Mul (a, b)  logits = Tanh (d) "
      "}");
  pass_run(fixture, "name_modules,quantize_base,append_loss,graft_adapters,differentiate,eliminate_dead", &adapt);
  assert_int_equal(pass_count(fixture, EGI_OP_LinearGrad), 2);
  assert_int_equal(pass_count(fixture, EGI_OP_Add), 0);
}

static void an_operator_without_a_gradient_is_named(void **state) {
  pass_fixture *fixture = *state;
  const egi_adapt_options adapt = {.is_full = true, .has_gradient = true};
  pass_graph(
      fixture,
      "(int64[batch,sequence] input_ids) => (float[batch,sequence,2] logits) <float[5,2] t = {1,2,3,4,5,6,7,8,9,0}>\n"
      "{ [\"/embed/Gather\"] e = Gather (t, input_ids)  [\"rounding\"] logits = Floor (e) }");
  assert_int_equal(pass_try(fixture, "append_loss,graft_adapters,differentiate", &adapt), EG_ERROR_UNSUPPORTED);
  pass_expect_error(fixture, "\"rounding\" (Floor)");
}

static void nothing_to_train_is_an_error(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, TWO_LAYERS);
  assert_int_equal(pass_try(fixture, "differentiate", NULL), EG_ERROR_ARGUMENT);
  pass_expect_error(fixture, "append_loss comes first");
  assert_int_equal(pass_try(fixture, "append_loss,differentiate", NULL), EG_ERROR_DATA);
  pass_expect_error(fixture, "does not depend on anything that can be trained");
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

typedef struct failing_allocator {
  uint64_t n_calls, fail_at; /* fail_at 0: never */
} failing_allocator;

static void *allocate(void *userdata, size_t size_bytes, size_t alignment) {
  failing_allocator *state = userdata;
  (void)alignment;
  if (++state->n_calls == state->fail_at) return NULL;
  void *memory = NULL;
  return posix_memalign(&memory, 64, size_bytes > 0 ? size_bytes : 64) == 0 ? memory : NULL;
}

static void release(void *userdata, void *memory, size_t size_bytes) {
  (void)userdata, (void)size_bytes;
  free(memory);
}

static eg_status whole_way(eg_context *ctx) {
  static const char header[] = "<ir_version: 10, opset_import: [\"\": 23]>\ng " TWO_LAYERS;
  const egi_adapter_target targets[2] = {{.path = "layers.0.up", .rank = 2, .scale = 1},
                                         {.path = "layers.1.up", .rank = 2, .scale = 1}};
  const egi_adapt_options adapt = {.adapters = targets, .n_adapters = 2, .has_gradient = true};
  const egi_pipeline_options options = {.adapt = &adapt};
  const char *const names[] = {"name_modules",  "widen_floats",     "append_loss",   "graft_adapters",
                               "differentiate", "eliminate_common", "eliminate_dead"};
  egi_module *module = NULL;
  EG_TRY(egi_module_parse(ctx, header, sizeof(header) - 1, &module));
  eg_status status = egi_infer_graph(module->graphs[0]);
  if (status == EG_OK) status = egi_passes_run_stage(module->graphs[0], EGI_STAGE_CANONICALISE, &options);
  if (status == EG_OK) status = egi_passes_run(module->graphs[0], names, EGI_COUNT(names), &options, NULL);
  egi_module_destroy(module);
  return status;
}

/* Wherever memory runs out, the passes say so and nothing is lost or touched that is not there. */
static void memory_may_run_out_anywhere(void **state) {
  failing_allocator memory = {0};
  (void)state;
  for (uint64_t fail_at = 0; fail_at < 2000; fail_at++) {
    const eg_allocator allocator = {.allocate = allocate, .release = release, .userdata = &memory};
    eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
    eg_context *ctx = NULL;
    options.allocator = &allocator;
    options.n_threads = 1;
    memory = (failing_allocator){.fail_at = 0};
    assert_int_equal(eg_context_create(&options, &ctx), EG_OK);
    memory = (failing_allocator){.fail_at = fail_at};
    eg_status status = whole_way(ctx);
    assert_int_equal(status, fail_at == 0 || memory.n_calls < fail_at ? EG_OK : EG_ERROR_MEMORY);
    eg_context_destroy(ctx);
    if (fail_at > 0 && memory.n_calls < fail_at) return;
  }
  fail_msg("the scenario never ran to its end");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(quantised_products_add_themselves),
      TEST(narrow_arithmetic_becomes_wide),
      TEST(a_linear_head_joins_the_loss),
      TEST(frozen_matrices_become_codes),
      TEST(a_head_becomes_codes_when_asked_for),
      TEST(nothing_is_quantised_unasked),
      TEST(adapters_are_rounded_with_their_matrix),
      TEST(only_plain_layers_are_rounded),
      TEST(positions_that_were_computed_are_refused),
      TEST(a_gemm_over_rows_joins_the_loss),
      TEST(capped_logits_stay),
      TEST(an_adapter_keeps_the_head),
      TEST(unfit_logits_are_refused),
      TEST(adapters_stand_beside_their_layers),
      TEST(adapters_of_one_input_share_a_product),
      TEST(a_layer_adds_its_adapter),
      TEST(frozen_adapters_have_no_gradients),
      TEST(targets_without_a_layer_are_named),
      TEST(graphs_share_states),
      TEST(full_training_joins_tied_weights),
      TEST(only_wanted_gradients_are_computed),
      TEST(products_are_added_in_place),
      TEST(an_operator_without_a_gradient_is_named),
      TEST(nothing_to_train_is_an_error),
      cmocka_unit_test(memory_may_run_out_anywhere),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
