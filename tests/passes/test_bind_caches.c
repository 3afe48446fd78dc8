/* bind_caches on the spellings of exporters: which inputs and outputs stay, and that what stays is computed as before.
 */
#include "support_passes.h"

#include <string.h>

typedef struct cache_row {
  const char *title;
  const char *text;
  const char *inputs, *outputs; /* those that stay, each followed by a space */
  unsigned n_attentions;        /* fused afterwards, of one layer each */
} cache_row;

#define NUMBERS                                                                                                      \
  "<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, "   \
  "int64[2] a12 = {1,2}, float nil = {0}, float low = {-3.4028234e38}, float[6,8] table = {1,2,3,4,5,6,7,8,8,7,6,5," \
  "4,3,2,1,1,3,5,7,2,4,6,8,8,6,4,2,7,5,3,1,1,1,2,2,3,3,4,4,5,6,5,6,7,8,7,8}, int64[4] split = {0,0,2,4}, "           \
  "float scale = {0.1}> "
#define TOKENS                                                                                                      \
  "e = Gather (table, input_ids) r = Reshape (e, split) ss = Mul (r, scale) q = Transpose <perm = [0,2,1,3]> (ss) " \
  "kn = Neg (q) vn = Abs (q) "
/* Keys up to the query's place behind the past, that are no padding. */
#define MASK(past)                                                                                         \
  "ps = Shape (" past ") p = Gather (ps, two) is = Shape (input_ids) n = Gather (is, one) t = Add (p, n) " \
  "qi0 = Range (p, t, one) qi = Unsqueeze (qi0, a1) kj0 = Range (zero, t, one) kj = Unsqueeze (kj0, a0) "  \
  "c = LessOrEqual (kj, qi) mb = Cast <to = 9> (attention_mask) mp = Unsqueeze (mb, a12) seen = And (c, mp) "
#define JOIN(past) \
  "present_k = Concat <axis = 2> (\"" past ".key\", kn) present_v = Concat <axis = -2> (\"" past ".value\", vn) "
#define MODEL(caches, presents) \
  "(int64[B,S] input_ids, int64[B,T] attention_mask" caches ") => (float[B,2,S,4] y" presents ") " NUMBERS

static const cache_row rows[] = {
    {"optimum: Concat on keys and values",
     MODEL(", float[B,2,past,4] \"past_key_values.0.key\", float[B,2,past,4] \"past_key_values.0.value\"",
           ", float[B,2,T,4] present_k, float[B,2,T,4] present_v") "{ " TOKENS JOIN("past_key_values.0")
         MASK("\"past_key_values.0.key\"") "y = Attention (q, present_k, present_v, seen) }",
     "input_ids attention_mask ", "y ", 1},
    {"transformers: other names, a length for each",
     MODEL(", float[B,2,past,4] \"past_key_values.layers.0.keys\", float[B,2,past2,4] "
           "\"past_key_values.layers.0.values\"",
           ", float[B,2,T,4] \"out.keys\", float[B,2,T,4] \"out.values\"") "{ " TOKENS
                                                                           "\"out.keys\" = Concat <axis = 2> "
                                                                           "(\"past_key_values.layers.0.keys\", kn) "
                                                                           "\"out.values\" = Concat <axis = 2> "
                                                                           "(\"past_key_values.layers.0.values\", "
                                                                           "vn) " MASK("\"past_key_values.layers.0."
                                                                                       "keys\"") "y = Attention (q, "
                                                                                                 "\"out.keys\", "
                                                                                                 "\"out.values\", "
                                                                                                 "seen) }",
     "input_ids attention_mask ", "y ", 1},
    {"no name tells: joined and given back",
     MODEL(", float[B,2,past,4] a, float[B,2,past,4] b",
           ", float[B,2,T,4] ak, float[B,2,T,4] bv") "{ " TOKENS
                                                     "ak = Concat <axis = 2> (a, kn) bv = Concat <axis = 2> (b, "
                                                     "vn) " MASK("a") "y = Attention (q, ak, bv, seen) }",
     "input_ids attention_mask ", "y ", 1},
    {"Attention's own past and present",
     MODEL(", float[B,2,past,4] past_key_0, float[B,2,past,4] past_value_0",
           ", float[B,2,T,4] pk, float[B,2,T,4] pv") "{ " TOKENS "y, pk, pv = Attention <is_causal = 1> (q, kn, vn, , "
                                                     "past_key_0, past_value_0) }",
     "input_ids attention_mask ", "y ", 1},
    {"GPT-2: keys and values in one tensor, taken apart",
     MODEL(
         ", float[2,B,2,past,4] past_0",
         ", float[2,B,2,T,4] present_0") "{ " TOKENS "pk = Gather <axis = 0> (past_0, zero) pv = Gather <axis = 0> "
                                         "(past_0, one) k = Concat <axis = 2> (pk, kn) "
                                         "v = Concat <axis = 2> (pv, vn) uk = Unsqueeze (k, a0) uv = Unsqueeze (v, a0) "
                                         "present_0 = Concat <axis = 0> (uk, uv) " MASK(
                                             "pk") "y = Attention (q, k, v, seen) }",
     "input_ids attention_mask ", "y ", 1},
    {"the batch is taken from the cache",
     MODEL(", float[B,2,past,4] \"past.key\", float[B,2,past,4] \"past.value\"", "") "{ " TOKENS JOIN("past") MASK(
         "\"past.key\"") "sb = Shape <start = 0, end = 1> (\"past.value\") o1 = Concat <axis = 0> (sb, a1, a1, a1) "
                         "ex = Expand (seen, o1) y = Attention (q, present_k, present_v, ex) }",
     "input_ids attention_mask ", "y ", 1},
    {"mobius: Attention of 3 dimensions with past and present",
     "(int64[B,S] input_ids, float[B,2,past,4] past_key_0, float[B,2,past,4] past_value_0) => (float[B,S,8] y, "
     "float[B,2,total,4] present_0_key, float[B,2,total,4] present_0_value) " NUMBERS
     "{ e = Gather (table, input_ids) k = Neg (e) y, present_0_key, present_0_value = "
     "Attention <is_causal = 1, q_num_heads = 2, kv_num_heads = 2> (e, k, e, , past_key_0, past_value_0) }",
     "input_ids ", "y ", 1},
    {"TensorScatter: written into a cache of fixed length",
     MODEL(", float[B,2,12,4] key_cache_0, float[B,2,12,4] value_cache_0, int64[B] write_indices, "
           "int64[B] nonpad_kv_seqlen",
           ", float[B,2,12,4] new_key_0, float[B,2,12,4] new_value_0") "{ " TOKENS "new_key_0 = TensorScatter "
                                                                       "(key_cache_0, kn, write_indices) "
                                                                       "new_value_0 = TensorScatter (value_cache_0, "
                                                                       "vn, write_indices) "
                                                                       "y = Attention <is_causal = 1> (q, new_key_0, "
                                                                       "new_value_0, , , , nonpad_kv_seqlen) }",
     "input_ids attention_mask ", "y ", 1},
    {"no past, but keys and values are given back: they stay what they are",
     "(int64[B,S] input_ids) => (float[B,2,S,4] y, float[B,2,S,4] present_key, float[B,2,S,4] present_value) " NUMBERS
     "{ " TOKENS "y, present_key, present_value = Attention <is_causal = 1> (q, kn, vn) }",
     "input_ids ", "y present_key present_value ", 1},
    {"the same in 3 dimensions",
     "(int64[B,S] input_ids) => (float[B,S,8] y, float[B,2,S,4] present_key, float[B,2,S,4] present_value) " NUMBERS
     "{ e = Gather (table, input_ids) k = Neg (e) y, present_key, present_value = "
     "Attention <is_causal = 1, q_num_heads = 2, kv_num_heads = 2> (e, k, e) }",
     "input_ids ", "y present_key present_value ", 1},
    {"a cache of fixed length stays",
     "(int64[B,S] input_ids, float[B,2,3,4] \"past.key\", float[B,2,3,4] \"past.value\") => (float[B,2,S,4] y) " NUMBERS
     "{ " TOKENS JOIN("past") "y = Attention (q, present_k, present_v) }",
     "input_ids past.key past.value ", "y ", 0},
    {"no cache: something that is joined in front",
     "(int64[B,S] input_ids, float[B,2,past,4] prefix) => (float[B,2,R,4] y) " NUMBERS "{ " TOKENS
     "z = Concat <axis = 2> (prefix, q) y = Neg (z) }",
     "input_ids prefix ", "y ", 0},
};

static void expect_names(const cache_row *row, const egi_graph *graph, const egi_value_id *values, uint32_t n,
                         const char *expected) {
  char names[256] = "";
  for (uint32_t i = 0; i < n; i++) {
    assert_true(strlen(names) + strlen(graph->values[values[i]].name) + 2 < sizeof names);
    memcpy(names + strlen(names), graph->values[values[i]].name, strlen(graph->values[values[i]].name) + 1);
    memcpy(names + strlen(names), " ", 2);
  }
  if (strcmp(names, expected) != 0) fail_msg("%s: \"%s\" stay, not \"%s\"", row->title, names, expected);
}

/* The pipeline runs the graph on several samples, with empty caches, before and after. */
static void check_row(pass_fixture *fixture, const cache_row *row) {
  static const char *const names[] = {"lower_operators",    "fold_constants", "fold_shapes",
                                      "eliminate_identity", "bind_caches",    "fuse_attention"};
  const egi_pipeline_options options = {.verify = true};
  pass_graph(fixture, row->text);
  if (egi_passes_run(fixture->graph, names, EGI_COUNT(names), &options, NULL) != EG_OK ||
      egi_graph_verify(fixture->graph) != EG_OK)
    fail_msg("%s: %s", row->title, eg_context_error(fixture->ctx));
  const egi_graph *graph = fixture->graph;
  expect_names(row, graph, graph->inputs, graph->n_inputs, row->inputs);
  expect_names(row, graph, graph->outputs, graph->n_outputs, row->outputs);
  for (uint32_t i = 0; i < graph->n_inputs; i++) assert_int_equal(graph->values[graph->inputs[i]].index, i);
  if (pass_count(fixture, EGI_OP_MaskedAttention) != row->n_attentions)
    fail_msg("%s: %u attentions\n%s", row->title, pass_count(fixture, EGI_OP_MaskedAttention), pass_nodes(fixture));
}

static void caches_are_bound(void **state) {
  for (size_t i = 0; i < EGI_COUNT(rows); i++) check_row(*state, &rows[i]);
}

static void a_second_run_changes_nothing(void **state) {
  pass_fixture *fixture = *state;
  pass_graph(fixture, rows[0].text);
  pass_run_settled(fixture, "bind_caches");
}

static void inputs_of_any_kind_keep_their_caches(void **state) {
  pass_fixture *fixture = *state;
  egi_pass_report report = {0};
  egi_pass_run run = {.ctx = fixture->ctx, .report = &report, .is_general = true};
  pass_graph(fixture, rows[0].text);
  assert_int_equal(egi_pass_bind_caches(&run, fixture->graph), EG_OK);
  assert_false(run.has_changed);
  assert_int_equal(fixture->graph->n_inputs, 4);
  assert_int_equal(fixture->graph->n_outputs, 3);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pass_set_up, pass_tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(caches_are_bound),
      TEST(a_second_run_changes_nothing),
      TEST(inputs_of_any_kind_keep_their_caches),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
