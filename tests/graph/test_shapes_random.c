/* Random nodes: whatever operands and attributes a file has, inference ends with a result or an error that names the
 * node, and what it accepts it accepts again. Run under the sanitizers this finds reads out of bounds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support_graph.h"

typedef struct source {
  uint64_t key;
  uint32_t counter;
} source;

static uint32_t draw(source *s, uint32_t below) {
  uint32_t words[4];
  egi_philox(s->key, (const uint32_t[4]){s->counter++, 0, 0, 0}, words);
  return words[0] % below;
}

static eg_dtype draw_dtype(source *s) {
  static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F32, EG_DTYPE_F32, EG_DTYPE_I64,
                                   EG_DTYPE_I64, EG_DTYPE_I32, EG_DTYPE_F16, EG_DTYPE_BOOL};
  return types[draw(s, EGI_COUNT(types))];
}

static egi_value_id draw_input(source *s, graph_fixture *f) {
  static const char *const sizes[] = {"0", "1", "2", "3", "4", "6", "b", "s", "t"};
  static const int64_t numbers[] = {0, 1, 2, 3, 4, 6, -1, -2, INT64_MAX, INT64_MIN, 100};
  egi_emitter emit = {.graph = f->graph};
  egi_dim dims[EGI_MAX_RANK];
  int64_t list[5];
  egi_value_id value;
  uint32_t kind = draw(s, 10), count = draw(s, 5);
  if (kind == 0) return 0;
  for (uint32_t i = 0; i < count; i++) list[i] = numbers[draw(s, EGI_COUNT(numbers))];
  if (kind < 4) return egi_emit_integers(&emit, list, count);
  if (kind == 4) return egi_emit_scalar(&emit, (double)(int)draw(s, 9) - 4.0, draw_dtype(s));
  int rank = (int)draw(s, draw(s, 4) == 0 ? EGI_MAX_RANK + 1 : 5);
  for (int i = 0; i < rank; i++) dims[i] = graph_dim(f, sizes[draw(s, EGI_COUNT(sizes))]);
  assert_int_equal(egi_graph_add_input(f->graph, NULL, draw_dtype(s), rank, dims, &value), EG_OK);
  return draw(s, 4) == 0 && rank > 0 ? egi_emit_unary(&emit, EGI_OP_Shape, value) : value;
}

static egi_attribute draw_attribute(source *s, int64_t *memory) {
  static const char *const names[] = {"axis",       "axes",        "perm",         "to",
                                      "keepdims",   "num_outputs", "q_num_heads",  "num_heads",
                                      "batch_dims", "value_ints",  "kv_num_heads", "start",
                                      "end",        "allowzero",   "stash_type",   "noop_with_empty_axes",
                                      "transA",     "transB",      "value"};
  const char *name = names[draw(s, EGI_COUNT(names))];
  for (int i = 0; i < 4; i++) memory[i] = (int64_t)draw(s, 8) - 3;
  if (draw(s, 3) == 0) return egi_attribute_ints(name, memory, draw(s, 5));
  if (draw(s, 16) == 0) return egi_attribute_float(name, 1.0f);
  return egi_attribute_int(name, draw(s, 20) == 0 ? INT64_MIN : memory[0]);
}

/* Operators whose result may have no known rank before the graph runs. */
static bool may_stay_open(egi_op op) {
  const char *name = egi_op_get(op)->name;
  return op == EGI_OP_If || op == EGI_OP_Loop || op == EGI_OP_Scan || op == EGI_OP_GatherND ||
         strncmp(name, "Reduce", strlen("Reduce")) == 0;
}

static void check_node(source *s, graph_fixture *f, egi_op op) {
  egi_value_id inputs[16];
  int64_t memory[4][4];
  egi_attribute attributes[4];
  const egi_op_info *info = egi_op_get(op);
  egi_node node = {.op = op, .name = "random", .inputs = inputs, .attributes = attributes};
  egi_node_id id;
  uint32_t most = info->in_max == 255 ? 5 : info->in_max;
  assert_true(most <= 16);
  node.n_inputs = (uint16_t)(info->in_min + draw(s, most - info->in_min + 1));
  node.n_outputs = (uint16_t)(info->out_min + draw(s, info->out_max == 255 ? 4 : info->out_max - info->out_min + 1u));
  node.n_attributes = (uint16_t)draw(s, 5);
  for (uint16_t i = 0; i < node.n_inputs; i++) inputs[i] = draw_input(s, f);
  for (uint16_t i = 0; i < node.n_attributes; i++) attributes[i] = draw_attribute(s, memory[i]);
  assert_int_equal(egi_graph_add_node(f->graph, &node, &id), EG_OK);
  eg_status status = egi_infer_node(f->graph, id);
  if (status != EG_OK) {
    assert_true(status == EG_ERROR_SHAPE || status == EG_ERROR_UNSUPPORTED || status == EG_ERROR_FORMAT);
    assert_non_null(strstr(eg_context_error(f->ctx), "node \"random\""));
    return;
  }
  for (uint16_t i = 0; i < node.n_outputs; i++) {
    const egi_value *value = &f->graph->values[f->graph->nodes[id].outputs[i]];
    if (value->rank < 0 && may_stay_open(op)) continue;
    assert_true(value->rank >= 0 && value->rank <= EGI_MAX_RANK && value->dtype != EG_DTYPE_UNDEFINED);
    for (int axis = 0; axis < value->rank; axis++) assert_int_not_equal(value->dims[axis], EGI_DIM_NONE);
  }
  if (egi_infer_node(f->graph, id) != EG_OK) fail_msg("accepted, then not: %s", eg_context_error(f->ctx));
}

static void test_random_nodes(void **state) {
  (void)state;
  for (unsigned op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++) {
    source s = {.key = op};
    void *fixture;
    for (unsigned round = 0; round < 400; round++) {
      if (round % 20 == 0) assert_int_equal(graph_setup(&fixture), 0);
      check_node(&s, fixture, (egi_op)op);
      if (round % 20 == 19) graph_teardown(&fixture);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_nodes)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
