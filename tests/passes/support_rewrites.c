/* Rewriting a graph and comparing what it computes before and after. */
#include "support_rewrites.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TENSORS = 8 };

/* Sizes that the symbols of the texts stand for. */
static int64_t size_of(pass_fixture *fixture, egi_dim dim) {
  egi_dims *dims = fixture->module->dims;
  const egi_binding bindings[3] = {
      {egi_dim_symbol(dims, "B"), 2}, {egi_dim_symbol(dims, "S"), 5}, {egi_dim_symbol(dims, "H"), 3}};
  int64_t size = 0;
  assert_true(egi_dim_evaluate(dims, dim, bindings, EGI_COUNT(bindings), &size));
  return size;
}

static void put_number(const egi_tensor *tensor, int64_t i, double number) {
  switch (tensor->dtype) {
  case EG_DTYPE_F32:
    ((float *)tensor->data)[i] = (float)number;
    break;
  case EG_DTYPE_F64:
    ((double *)tensor->data)[i] = number;
    break;
  case EG_DTYPE_F16:
    ((uint16_t *)tensor->data)[i] = egi_f32_to_f16((float)number);
    break;
  case EG_DTYPE_BF16:
    ((uint16_t *)tensor->data)[i] = egi_f32_to_bf16((float)number);
    break;
  case EG_DTYPE_I64:
    ((int64_t *)tensor->data)[i] = i % 5;
    break;
  default:
    fail_msg("no input of type %s", egi_dtype_name(tensor->dtype));
  }
}

static double get_number(const egi_tensor *tensor, int64_t i) {
  switch (tensor->dtype) {
  case EG_DTYPE_F32:
    return (double)((const float *)tensor->data)[i];
  case EG_DTYPE_F64:
    return ((const double *)tensor->data)[i];
  case EG_DTYPE_F16:
    return (double)egi_f16_to_f32(((const uint16_t *)tensor->data)[i]);
  case EG_DTYPE_BF16:
    return (double)egi_bf16_to_f32(((const uint16_t *)tensor->data)[i]);
  case EG_DTYPE_I64:
    return (double)((const int64_t *)tensor->data)[i];
  default:
    fail_msg("no result of type %s", egi_dtype_name(tensor->dtype));
    return nan("");
  }
}

static void make_inputs(pass_fixture *fixture, egi_tensor *inputs) {
  const egi_graph *graph = fixture->graph;
  assert_true(graph->n_inputs <= MAX_TENSORS);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const egi_value *value = &graph->values[graph->inputs[i]];
    inputs[i] = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
    for (int d = 0; d < value->rank; d++) inputs[i].dims[d] = size_of(fixture, value->dims[d]);
    egi_tensor_set_contiguous(&inputs[i]);
    int64_t count = egi_tensor_count(&inputs[i]);
    inputs[i].data = EGI_NEW(&fixture->arena, double, (size_t)count);
    assert_non_null(inputs[i].data);
    for (int64_t k = 0; k < count; k++) put_number(&inputs[i], k, 1.5 * egi_random_normal(7, i, (uint64_t)k) + 0.25);
  }
}

/* A copy of the graph is run, narrow types as a run of the file has them. */
static void evaluate(pass_fixture *fixture, const egi_tensor *inputs, egi_tensor *outputs) {
  const char *const names[] = {"widen_products"};
  egi_module *copy;
  assert_true(fixture->graph->n_outputs <= MAX_TENSORS);
  assert_int_equal(egi_module_clone(fixture->module, &copy), EG_OK);
  copy->evaluator = egi_evaluator_cpu();
  if (egi_passes_run(copy->graphs[0], names, 1, NULL, NULL) != EG_OK ||
      copy->evaluator->graph(fixture->ctx, copy->graphs[0], inputs, &fixture->arena, outputs) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  egi_module_destroy(copy);
}

/* Several units in the last place of the type, for the roundings inside. */
static double tolerance(eg_dtype dtype) {
  return dtype == EG_DTYPE_BF16 ? 0.03 : dtype == EG_DTYPE_F16 ? 0.004 : 3e-5;
}

static void compare(const spelling *row, const egi_tensor *before, const egi_tensor *after) {
  assert_int_equal(before->dtype, after->dtype);
  int64_t count = egi_tensor_count(before);
  assert_int_equal(count, egi_tensor_count(after));
  for (int64_t i = 0; i < count; i++) {
    double a = get_number(before, i), b = get_number(after, i);
    if (!(fabs(a - b) <= tolerance(before->dtype) * (1.0 + fabs(a))))
      fail_msg("%s: element %lld is %.9g, was %.9g", row->title, (long long)i, b, a);
  }
}

/* Passes one after the other, with the deepest miss of the last one. */
static bool run_passes(pass_fixture *fixture, const spelling *row, const char **out_miss) {
  char names[256];
  bool has_changed = false;
  snprintf(names, sizeof(names), "%s", row->passes);
  for (char *name = names, *next; name != NULL; name = next) {
    next = strchr(name, ',');
    if (next != NULL) *next++ = '\0';
    egi_pass_report report = {.pass = name};
    egi_pass_run run = {.ctx = fixture->ctx, .report = &report};
    assert_non_null(egi_pass_find(name));
    if (egi_pass_find(name)->run(&run, fixture->graph) != EG_OK || egi_graph_tidy(fixture->graph) != EG_OK ||
        egi_graph_verify(fixture->graph) != EG_OK)
      fail_msg("%s: %s", row->title, eg_context_error(fixture->ctx));
    has_changed = has_changed || run.has_changed;
    *out_miss = report.nearest_miss;
  }
  return has_changed;
}

void check_spelling(pass_fixture *fixture, const spelling *row) {
  egi_tensor inputs[MAX_TENSORS], before[MAX_TENSORS], after[MAX_TENSORS];
  const char *miss = NULL, *unused = NULL;
  pass_graph(fixture, row->text);
  make_inputs(fixture, inputs);
  evaluate(fixture, inputs, before);
  bool has_changed = run_passes(fixture, row, &miss);
  if (has_changed != (row->op != EGI_OP_NONE))
    fail_msg("%s: %s; %s", row->title, has_changed ? "was rewritten" : "was not rewritten", miss ? miss : "no miss");
  evaluate(fixture, inputs, after);
  for (uint32_t i = 0; i < fixture->graph->n_outputs; i++) compare(row, &before[i], &after[i]);
  if (row->op != EGI_OP_NONE && pass_count(fixture, row->op) != row->count)
    fail_msg("%s: %u nodes of the operator, not %u:\n%s", row->title, pass_count(fixture, row->op), row->count,
             pass_nodes(fixture));
  if (row->miss != NULL && (miss == NULL || strstr(miss, row->miss) == NULL))
    fail_msg("%s: the nearest miss is \"%s\", without \"%s\"", row->title, miss ? miss : "", row->miss);
  if (run_passes(fixture, row, &unused)) fail_msg("%s: a second run changes the graph", row->title);
}
