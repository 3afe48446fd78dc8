/* Parsing, running and printing for the tests of passes. */
#include "support_passes.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int pass_set_up(void **state) {
  pass_fixture *fixture = calloc(1, sizeof(*fixture));
  if (!fixture) return 1;
  if (eg_context_create(NULL, &fixture->ctx) != EG_OK) return 1;
  egi_text_init(&fixture->text, fixture->ctx);
  egi_arena_init(&fixture->arena, fixture->ctx, EGI_PURPOSE_GRAPH);
  *state = fixture;
  return 0;
}

int pass_tear_down(void **state) {
  pass_fixture *fixture = *state;
  egi_text_free(&fixture->text);
  egi_arena_clear(&fixture->arena);
  if (fixture->module) egi_module_destroy(fixture->module);
  eg_context_destroy(fixture->ctx);
  free(fixture);
  return 0;
}

void pass_parse(pass_fixture *fixture, const char *text) {
  if (fixture->module) egi_module_destroy(fixture->module);
  fixture->module = NULL;
  if (egi_module_parse(fixture->ctx, text, strlen(text), &fixture->module) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
  fixture->module->evaluator = egi_evaluator_cpu();
  fixture->graph = fixture->module->graphs[0];
}

void pass_graph(pass_fixture *fixture, const char *graph_text) {
  egi_text whole;
  egi_text_init(&whole, fixture->ctx);
  egi_text_add(&whole, "<ir_version: 10, opset_import: [\"\": 23, \"engraft\": 1]>\ng ");
  egi_text_add(&whole, graph_text);
  pass_parse(fixture, egi_text_string(&whole));
  egi_text_free(&whole);
  if (egi_graph_tidy(fixture->graph) != EG_OK || egi_infer_graph(fixture->graph) != EG_OK)
    fail_msg("%s", eg_context_error(fixture->ctx));
}

eg_status pass_try(pass_fixture *fixture, const char *names, const egi_adapt_options *adapt) {
  const char *list[16];
  char copy[256];
  size_t count = 0;
  snprintf(copy, sizeof(copy), "%s", names);
  for (char *at = copy; *at && count < 16;) {
    size_t length = strcspn(at, ",");
    list[count++] = at;
    if (!at[length]) break;
    at[length] = '\0';
    at += length + 1;
  }
  const egi_pipeline_options options = {.adapt = adapt};
  eg_status status = egi_passes_run(fixture->graph, list, count, &options, NULL);
  return status == EG_OK ? egi_graph_verify(fixture->graph) : status;
}

void pass_run(pass_fixture *fixture, const char *names, const egi_adapt_options *adapt) {
  if (pass_try(fixture, names, adapt) != EG_OK) fail_msg("%s: %s", names, eg_context_error(fixture->ctx));
}

void pass_run_settled(pass_fixture *fixture, const char *name) {
  egi_pass_report report = {0};
  egi_pass_run run = {.ctx = fixture->ctx, .report = &report};
  pass_run(fixture, name, NULL);
  if (egi_pass_find(name)->run(&run, fixture->graph) != EG_OK) fail_msg("%s", eg_context_error(fixture->ctx));
  if (run.has_changed) fail_msg("a second run of %s changed the graph", name);
}

/* ---- short form ------------------------------------------------------------------------------------------------- */

static void print_value(egi_text *out, const egi_graph *graph, egi_value_id id, const unsigned *numbers) {
  const egi_value *value = &graph->values[id];
  int64_t integers[8];
  uint32_t count = 0;
  double scalar = 0.0;
  if (id == 0) {
    egi_text_add(out, "_");
  } else if (value->kind == EGI_VALUE_NODE) {
    egi_text_format(out, "%%%u", numbers[id]);
  } else if (value->kind == EGI_VALUE_WEIGHT && !egi_dtype_is_float(value->dtype) &&
             egi_value_integers(graph, id, integers, 8, &count)) {
    egi_text_add(out, value->rank == 0 ? "" : "{");
    for (uint32_t i = 0; i < count; i++) egi_text_format(out, "%s%" PRId64, i > 0 ? "," : "", integers[i]);
    egi_text_add(out, value->rank == 0 ? "" : "}");
  } else if (value->kind == EGI_VALUE_WEIGHT && egi_value_scalar(graph, id, &scalar)) {
    egi_text_format(out, "%.6g", scalar);
  } else {
    egi_text_add(out, value->name);
  }
}

static void print_attribute(egi_text *out, const egi_attribute *attribute) {
  egi_text_format(out, "<%s=", attribute->name);
  switch (attribute->kind) {
  case EGI_ATTRIBUTE_INT:
    egi_text_format(out, "%" PRId64, attribute->u.i);
    break;
  case EGI_ATTRIBUTE_FLOAT:
    egi_text_format(out, "%.6g", (double)attribute->u.f);
    break;
  case EGI_ATTRIBUTE_STRING:
    egi_text_add(out, attribute->u.s);
    break;
  case EGI_ATTRIBUTE_INTS:
    for (uint32_t i = 0; i < attribute->count; i++)
      egi_text_format(out, "%s%" PRId64, i > 0 ? "," : "", attribute->u.ints[i]);
    break;
  default:
    egi_text_add(out, "?");
    break;
  }
  egi_text_add(out, ">");
}

static void print_node(egi_text *out, const egi_graph *graph, const egi_node *node, unsigned *numbers, unsigned *last) {
  for (unsigned i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] != 0) numbers[node->outputs[i]] = ++*last;
    egi_text_add(out, i > 0 ? ", " : "");
    print_value(out, graph, node->outputs[i], numbers);
  }
  egi_text_format(out, " = %s", node->op_name ? node->op_name : egi_op_get(node->op)->name);
  for (unsigned i = 0; i < node->n_attributes; i++) print_attribute(out, &node->attributes[i]);
  egi_text_add(out, "(");
  for (unsigned i = 0; i < node->n_inputs; i++) {
    egi_text_add(out, i > 0 ? ", " : "");
    print_value(out, graph, node->inputs[i], numbers);
  }
  egi_text_add(out, ")\n");
}

const char *pass_nodes(pass_fixture *fixture) {
  const egi_graph *graph = fixture->graph;
  unsigned *numbers = calloc(graph->n_values, sizeof(*numbers)), last = 0;
  assert_non_null(numbers);
  egi_text_free(&fixture->text);
  for (egi_node_id id = 1; id < graph->n_nodes; id++)
    print_node(&fixture->text, graph, &graph->nodes[id], numbers, &last);
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_text_format(&fixture->text, "-> %s=", graph->values[graph->outputs[i]].name);
    print_value(&fixture->text, graph, graph->outputs[i], numbers);
    egi_text_add(&fixture->text, "\n");
  }
  free(numbers);
  return egi_text_string(&fixture->text);
}

void pass_expect(pass_fixture *fixture, const char *expected) {
  assert_string_equal(pass_nodes(fixture), expected);
}

unsigned pass_count(const pass_fixture *fixture, egi_op op) {
  unsigned count = 0;
  for (egi_node_id id = 1; id < fixture->graph->n_nodes; id++) count += fixture->graph->nodes[id].op == op;
  return count;
}

void pass_expect_error(pass_fixture *fixture, const char *part) {
  const char *error = eg_context_error(fixture->ctx);
  if (!strstr(error, part)) fail_msg("the error is \"%s\", without \"%s\"", error, part);
}
