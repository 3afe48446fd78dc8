/* Every conformance case of an operator with a body is a case of the body too: its plain operators, run as a graph,
 * must give what the kernel must give. */
#include "support_ops.h"

#include <math.h>

#include "passes/passes.h"

static bool has_body(const ops_case *c) {
  if (!egi_op_has_body(c->op) || c->expected_status != EG_OK) return false;
  for (unsigned i = 0; i < c->n_inputs && i < 3; i++) /* what infinities do is the kernel's own business */
    for (int64_t k = 0; c->inputs[i].dtype != EG_DTYPE_UNDEFINED && k < ops_count(&c->inputs[i]); k++)
      if (!isfinite(c->inputs[i].values[k])) return false;
  return true;
}

static egi_tensor make_tensor(const ops_tensor *from, egi_arena *arena) {
  egi_tensor tensor = {.dtype = from->dtype, .rank = from->rank};
  size_t bytes = egi_dtype_bits(from->dtype) / 8;
  memcpy(tensor.dims, from->dims, sizeof tensor.dims);
  egi_tensor_set_contiguous(&tensor);
  char *data = egi_arena_get(arena, (size_t)ops_count(from) + 1, bytes);
  assert_non_null(data);
  for (int64_t i = 0; i < ops_count(from); i++) ops_store(from->dtype, data + (size_t)i * bytes, from->values[i]);
  tensor.data = data;
  return tensor;
}

/* A graph of the one node; numbers the inputs that it has. */
static eg_status build(const ops_case *c, egi_module *module, egi_arena *arena, egi_tensor *inputs) {
  egi_value_id operands[OPS_MAX_OPERANDS] = {0}, results[OPS_MAX_OPERANDS] = {0};
  egi_graph *graph;
  egi_node_id id;
  EG_TRY(egi_module_add_graph(module, "body", &graph));
  for (unsigned i = 0; i < c->n_inputs; i++) {
    const ops_tensor *tensor = &c->inputs[i];
    egi_dim dims[EGI_MAX_RANK] = {0};
    if (tensor->dtype == EG_DTYPE_UNDEFINED) continue;
    for (int k = 0; k < tensor->rank; k++) dims[k] = egi_dim_constant(module->dims, tensor->dims[k]);
    inputs[graph->n_inputs] = make_tensor(tensor, arena);
    EG_TRY(egi_graph_add_input(graph, NULL, tensor->dtype, tensor->rank, dims, &operands[i]));
  }
  egi_node node = {.op = c->op, .name = "tested", .inputs = operands, .outputs = results};
  node.attributes = (egi_attribute *)(uintptr_t)c->attributes; /* only read */
  node.n_inputs = (uint16_t)c->n_inputs;
  node.n_outputs = (uint16_t)c->n_outputs;
  node.n_attributes = (uint16_t)c->n_attributes;
  for (unsigned i = 0; i < c->n_outputs; i++)
    if (c->outputs[i].dtype == EG_DTYPE_UNDEFINED) results[i] = EGI_VALUE_UNWANTED;
  EG_TRY(egi_graph_add_node(graph, &node, &id));
  for (unsigned i = 0; i < c->n_outputs; i++)
    if (graph->nodes[id].outputs[i] != 0) EG_TRY(egi_graph_add_output(graph, graph->nodes[id].outputs[i]));
  return egi_infer_graph(graph);
}

static void compare(const ops_case *c, const ops_tensor *expected, const egi_tensor *got, unsigned output) {
  size_t bytes = egi_dtype_bits(got->dtype) / 8;
  double largest = 0.0, relative = c->relative;
  /* kernels keep statistics of float64 rows in float64, the operators say float32 */
  if (got->dtype != expected->dtype) relative = 1e-6;
  assert_int_equal(egi_tensor_count(got), ops_count(expected));
  for (int64_t i = 0; i < ops_count(expected); i++)
    if (isfinite(expected->values[i])) largest = fmax(largest, fabs(expected->values[i]));
  double limit = 4.0 * c->absolute + 64.0 * relative * largest + 1e-12;
  for (int64_t i = 0; i < ops_count(expected); i++) {
    double value = ops_load(got->dtype, (const char *)got->data + (size_t)i * bytes);
    if (value == expected->values[i] || (isnan(value) && isnan(expected->values[i]))) continue;
    if (!(fabs(value - expected->values[i]) <= limit))
      fail_msg("body of %s (%s), output %u, element %lld is %.9g, not %.9g", egi_op_get(c->op)->name,
               egi_dtype_name(c->inputs[0].dtype), output, (long long)i, value, expected->values[i]);
  }
}

static void run(const ops_case *c, egi_module *module, egi_arena *arena, const egi_tensor *inputs) {
  static const char *const names[] = {"inline_functions"};
  egi_graph *graph = module->graphs[0];
  egi_tensor outputs[OPS_MAX_OPERANDS];
  unsigned index = 0;
  uint32_t count;
  eg_status status = egi_graph_call_bodies(graph, EGI_BODIES_ALL, &count);
  if (status == EG_OK) status = egi_passes_run(graph, names, EGI_COUNT(names), NULL, NULL);
  if (status == EG_OK) status = egi_evaluator_cpu()->graph(module->ctx, graph, inputs, arena, outputs);
  if (status != EG_OK) fail_msg("body of %s: %s", egi_op_get(c->op)->name, eg_context_error(module->ctx));
  for (unsigned i = 0; i < c->n_outputs; i++)
    if (c->outputs[i].dtype != EG_DTYPE_UNDEFINED) compare(c, &c->outputs[i], &outputs[index++], i);
}

void ops_check_body(const ops_case *c) {
  egi_module *module;
  egi_arena arena;
  egi_tensor inputs[OPS_MAX_OPERANDS];
  if (!has_body(c)) return;
  egi_arena_init(&arena, c->environment->ctx, EGI_PURPOSE_DATA);
  assert_int_equal(egi_module_create(c->environment->ctx, &module), EG_OK);
  eg_status status = build(c, module, &arena, inputs);
  if (status == EG_OK) run(c, module, &arena, inputs);
  if (status != EG_OK) assert_int_equal(status, EG_ERROR_SHAPE); /* the kernel takes more than the operator */
  egi_module_destroy(module);
  egi_arena_clear(&arena);
}
