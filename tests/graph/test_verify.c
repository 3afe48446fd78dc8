/* The verifier finds each kind of damage, and building a graph survives running out of memory at any point. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support_graph.h"

typedef struct damaged {
  graph_fixture *f;
  egi_value_id x, y, z;
} damaged;

/* z = Add(Relu(x), x), sound. */
static damaged build(void **state) {
  damaged d = {.f = *state};
  egi_emitter emit = {.graph = d.f->graph};
  d.x = graph_value(d.f, "float[b,4]");
  d.y = egi_emit_unary(&emit, EGI_OP_Relu, d.x);
  d.z = egi_emit_binary(&emit, EGI_OP_Add, d.y, d.x);
  assert_int_equal(egi_graph_add_output(d.f->graph, d.z), EG_OK);
  assert_int_equal(egi_graph_verify(d.f->graph), EG_OK);
  return d;
}

static void expect(const damaged *d, const char *message) {
  assert_int_not_equal(egi_graph_verify(d->f->graph), EG_OK);
  if (strstr(eg_context_error(d->f->ctx), message) == NULL)
    fail_msg("\"%s\" lacks \"%s\"", eg_context_error(d->f->ctx), message);
}

static egi_node *producer(const damaged *d, egi_value_id v) {
  return &d->f->graph->nodes[d->f->graph->values[v].producer];
}

static void test_order(void **state) {
  damaged d = build(state);
  egi_node_id y = d.f->graph->values[d.y].producer, z = d.f->graph->values[d.z].producer;
  egi_node swapped = d.f->graph->nodes[y];
  d.f->graph->nodes[y] = d.f->graph->nodes[z];
  d.f->graph->nodes[z] = swapped;
  d.f->graph->values[d.y].producer = z;
  d.f->graph->values[d.z].producer = y;
  expect(&d, "which is produced after it");
}

static void test_deleted(void **state) {
  damaged d = build(state);
  egi_graph_remove_node(d.f->graph, d.f->graph->values[d.y].producer);
  expect(&d, "is used and was deleted");
}

static void test_missing(void **state) {
  damaged d = build(state);
  producer(&d, d.z)->inputs[1] = 1000;
  expect(&d, "does not exist");
}

static void test_never_produced(void **state) {
  damaged d = build(state);
  egi_value_id v;
  assert_int_equal(egi_graph_add_value(d.f->graph, "ghost", &v), EG_OK);
  producer(&d, d.z)->inputs[1] = v;
  expect(&d, "\"ghost\"");
}

static void test_shared_output(void **state) {
  damaged d = build(state);
  producer(&d, d.z)->outputs[0] = d.y;
  expect(&d, "producer disagree");
}

static void test_signature(void **state) {
  damaged d = build(state);
  producer(&d, d.z)->n_inputs = 1;
  expect(&d, "1 inputs; the operator takes 2 to 2");
}

static void test_rank(void **state) {
  damaged d = build(state);
  d.f->graph->values[d.y].rank = 9;
  expect(&d, "rank is out of range");
}

static void test_dtype(void **state) {
  damaged d = build(state);
  d.f->graph->values[d.y].dtype = (eg_dtype)99;
  expect(&d, "type is out of range");
}

static void test_name(void **state) {
  damaged d = build(state);
  d.f->graph->values[d.y].name = "other";
  expect(&d, "leads to another tensor");
}

static void test_output(void **state) {
  damaged d = build(state);
  d.f->graph->outputs[0] = 0;
  expect(&d, "output of the graph");
}

/* ---- out of memory -------------------------------------------------------------------------------------------- */

typedef struct failing {
  uint64_t calls, fail_at;
  int64_t balance;
} failing;

static void *allocate(void *userdata, size_t size_bytes, size_t alignment) {
  failing *state = userdata;
  if (state->calls++ == state->fail_at) return NULL;
  void *memory = aligned_alloc(alignment, (size_bytes + alignment - 1) / alignment * alignment);
  state->balance += memory != NULL;
  return memory;
}

static void release(void *userdata, void *memory, size_t size_bytes) {
  (void)size_bytes;
  ((failing *)userdata)->balance -= memory != NULL;
  free(memory);
}

/* y = Reshape(x·w, [batch, sequence, 4, 16]), many times; tidied, checked, cloned. */
static eg_status build_model(eg_context *ctx, int n_layers, egi_module **out_module) {
  egi_graph *graph;
  egi_value_id x;
  egi_module *copy;
  EG_TRY(egi_module_create(ctx, out_module));
  egi_module *module = *out_module;
  EG_TRY(egi_module_add_graph(module, "main", &graph));
  const egi_dim dims[3] = {egi_dim_symbol(module->dims, "batch"), egi_dim_symbol(module->dims, "sequence"),
                           egi_dim_constant(module->dims, 64)};
  EG_TRY(egi_graph_add_input(graph, "x", EG_DTYPE_F32, 3, dims, &x));
  for (int i = 0; i < n_layers; i++) {
    egi_emitter emit = {.graph = graph, .scope = "layer"};
    const int64_t shape[4] = {0, 0, -1, 16};
    egi_value_id y = egi_emit_binary(&emit, EGI_OP_Mul, x, egi_emit_scalar(&emit, i, EG_DTYPE_F32));
    y = egi_emit_binary(&emit, EGI_OP_Reshape, y, egi_emit_integers(&emit, shape, 4));
    egi_value_id flat = egi_emit_binary(&emit, EGI_OP_Reshape, y, egi_emit_unary(&emit, EGI_OP_Shape, x));
    EG_TRY(emit.status);
    x = flat;
  }
  EG_TRY(egi_graph_add_output(graph, x));
  EG_TRY(egi_graph_tidy(graph));
  EG_TRY(egi_infer_graph(graph));
  EG_TRY(egi_graph_verify(graph));
  if (graph->values[x].rank != 3 || graph->values[x].dims[0] != dims[0]) return EG_ERROR_INTERNAL;
  EG_TRY(egi_module_clone(module, &copy));
  eg_status status = egi_graph_verify(copy->graphs[0]);
  egi_module_destroy(copy);
  return status;
}

/* Fails the allocation with that number; false when there were fewer. */
static bool run_failing(int n_layers, uint64_t fail_at) {
  failing memory = {.fail_at = fail_at};
  const eg_allocator allocator = {allocate, release, &memory};
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  eg_context *ctx = NULL;
  egi_module *module = NULL;
  options.allocator = &allocator;
  options.n_threads = 1;
  eg_status status = eg_context_create(&options, &ctx);
  if (status == EG_OK) status = build_model(ctx, n_layers, &module);
  egi_module_destroy(module);
  eg_context_destroy(ctx);
  assert_int_equal(memory.balance, 0);
  assert_int_equal(status, memory.calls > fail_at ? EG_ERROR_MEMORY : EG_OK);
  return memory.calls > fail_at;
}

/* Arenas take memory in blocks: with the size of the graph the points of failure wander through all functions. */
static void test_out_of_memory(void **state) {
  unsigned n_failures = 0;
  (void)state;
  for (int n_layers = 1; n_layers <= 60; n_layers++)
    for (uint64_t fail_at = 0; run_failing(n_layers, fail_at); fail_at++) n_failures++;
  assert_true(n_failures > 300);
}

int main(void) {
#define TEST(function) cmocka_unit_test_setup_teardown(function, graph_setup, graph_teardown)
  const struct CMUnitTest tests[] = {
      TEST(test_order),
      TEST(test_deleted),
      TEST(test_missing),
      TEST(test_never_produced),
      TEST(test_shared_output),
      TEST(test_signature),
      TEST(test_rank),
      TEST(test_dtype),
      TEST(test_name),
      TEST(test_output),
      cmocka_unit_test(test_out_of_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
