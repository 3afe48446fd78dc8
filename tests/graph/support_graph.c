/* Small graphs for tests, written as text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support_graph.h"

int graph_setup(void **state) {
  graph_fixture *f = calloc(1, sizeof *f);
  *state = f;
  if (f == NULL || eg_context_create(NULL, &f->ctx) != EG_OK) return 1;
  if (egi_module_create(f->ctx, &f->module) != EG_OK) return 1;
  return egi_module_add_graph(f->module, "main", &f->graph) == EG_OK ? 0 : 1;
}

int graph_teardown(void **state) {
  graph_fixture *f = *state;
  egi_module_destroy(f->module);
  eg_context_destroy(f->ctx);
  free(f);
  return 0;
}

/* Cuts the next piece off at one of `separators`, outside of brackets; NULL at the end. */
static const char *next_piece(const char **text, char separator, char *piece, size_t size) {
  size_t length = 0;
  int depth = 0;
  while (**text == ' ' || (**text == separator && separator == ' ')) (*text)++;
  if (**text == '\0') return NULL;
  for (; **text != '\0' && (**text != separator || depth > 0); (*text)++) {
    depth += **text == '[' ? 1 : **text == ']' ? -1 : 0;
    assert_true(length + 1 < size);
    piece[length++] = **text;
  }
  if (**text == separator) (*text)++;
  piece[length] = '\0';
  return piece;
}

egi_dim graph_dim(graph_fixture *f, const char *text) {
  char *end;
  long long number = strtoll(text, &end, 10);
  if (*end == '\0' && end != text) return egi_dim_constant(f->module->dims, number);
  return egi_dim_symbol(f->module->dims, text);
}

/* "[1,-1]" */
static uint32_t read_list(const char *text, int64_t *out) {
  uint32_t count = 0;
  char *end;
  for (text++; *text != ']' && *text != '\0'; count++) {
    out[count] = strtoll(text, &end, 10);
    assert_true(end != text);
    text = *end == ',' ? end + 1 : end;
  }
  return count;
}

static egi_value_id constant(graph_fixture *f, const char *text) {
  egi_emitter emit = {.graph = f->graph};
  int64_t numbers[80];
  egi_value_id value;
  if (text[0] == '[')
    value = egi_emit_integers(&emit, numbers, read_list(text, numbers));
  else
    value = egi_emit_scalar(&emit, strtod(text, NULL), text[strlen(text) - 1] == 'f' ? EG_DTYPE_F32 : EG_DTYPE_I64);
  assert_int_equal(emit.status, EG_OK);
  return value;
}

egi_value_id graph_value(graph_fixture *f, const char *text) {
  char name[32], piece[64];
  egi_dim dims[16];
  int rank = 0;
  egi_value_id value;
  if (text[0] == '-') return 0;
  if (text[0] == '=') return constant(f, text + 1);
  const char *bracket = strchr(text, '[');
  assert_non_null(bracket);
  snprintf(name, sizeof name, "%.*s", (int)(bracket - text), text);
  char inside[128];
  snprintf(inside, sizeof inside, "%.*s", (int)(strchr(bracket, ']') - bracket - 1), bracket + 1);
  const char *rest = inside;
  while (next_piece(&rest, ',', piece, sizeof piece) != NULL) dims[rank++] = graph_dim(f, piece);
  eg_dtype dtype = egi_dtype_from_name(name);
  assert_int_not_equal(dtype, EG_DTYPE_UNDEFINED);
  assert_int_equal(egi_graph_add_input(f->graph, NULL, dtype, rank, dims, &value), EG_OK);
  return value;
}

/* "axis=1", "perm=[0,1]", "alpha=0.5f", "mode=text"; names and lists are kept in `memory`. */
static egi_attribute read_attribute(char *text, int64_t *memory) {
  char *equals = strchr(text, '='), *end;
  assert_non_null(equals);
  *equals = '\0';
  if (equals[1] == '[') return egi_attribute_ints(text, memory, read_list(equals + 1, memory));
  double number = strtod(equals + 1, &end);
  if (end == equals + 1) return egi_attribute_string(text, equals + 1);
  if (*end == 'f') return egi_attribute_float(text, (float)number);
  return egi_attribute_int(text, (int64_t)number);
}

/* Behind "engraft.", which tells an operator of ours from the standard one of its name. */
static const char *bare_name(const char *op) {
  return strncmp(op, "engraft.", 8) == 0 ? op + 8 : op;
}

eg_status graph_node(graph_fixture *f, const char *op, const char *inputs, const char *attributes, unsigned n_outputs,
                     egi_node_id *out_node) {
  egi_value_id values[20], outputs[8];
  egi_attribute list[6];
  int64_t memory[6][12];
  char texts[6][64], piece[96];
  const char *bare = bare_name(op);
  egi_node node = {.op = egi_op_find(bare == op ? "" : "engraft", bare), .inputs = values, .outputs = outputs};
  node.attributes = list;
  node.name = bare;
  if (node.op == EGI_OP_UNKNOWN) node.op = egi_op_find("engraft", bare);
  assert_int_not_equal(node.op, EGI_OP_UNKNOWN);
  while (next_piece(&inputs, ';', piece, sizeof piece) != NULL) values[node.n_inputs++] = graph_value(f, piece);
  while (attributes != NULL && next_piece(&attributes, ' ', texts[node.n_attributes], sizeof texts[0]) != NULL) {
    list[node.n_attributes] = read_attribute(texts[node.n_attributes], memory[node.n_attributes]);
    node.n_attributes++;
  }
  for (unsigned i = 0; i < n_outputs; i++) {
    snprintf(piece, sizeof piece, "y%u", i);
    assert_int_equal(egi_graph_add_value(f->graph, piece, &outputs[i]), EG_OK);
  }
  node.n_outputs = (uint16_t)n_outputs;
  assert_int_equal(egi_graph_add_node(f->graph, &node, out_node), EG_OK);
  return egi_infer_node(f->graph, *out_node);
}

const char *graph_type(graph_fixture *f, egi_value_id id) {
  egi_text text;
  egi_value *value = &f->graph->values[id];
  for (int i = 0; i < value->rank; i++) value->dims[i] = egi_dim_resolve(f->module->dims, value->dims[i]);
  egi_text_init(&text, f->ctx);
  egi_value_print_type(f->graph, id, &text);
  size_t length = 0;
  for (size_t i = 0; i < text.length; i++) /* expressions stand in quotes */
    if (text.data[i] != '"') text.data[length++] = text.data[i];
  text.length = length;
  if (value->elements != NULL) {
    egi_text_add(&text, "{");
    for (uint32_t i = 0; i < value->n_elements; i++) {
      if (i > 0) egi_text_add(&text, ",");
      egi_dim_print(f->module->dims, value->elements[i], &text);
    }
    egi_text_add(&text, "}");
  }
  const char *copy = egi_arena_copy_text(&f->module->arena, egi_text_string(&text), text.length);
  egi_text_free(&text);
  assert_non_null(copy);
  return copy;
}

static void check_outputs(graph_fixture *f, const shape_case *row, egi_node_id node) {
  const char *rest = row->expected;
  char piece[160];
  for (unsigned i = 0; next_piece(&rest, ';', piece, sizeof piece) != NULL; i++) {
    egi_value_id value = f->graph->nodes[node].outputs[i];
    const char *type = graph_type(f, value);
    if (strcmp(type, piece) != 0) fail_msg("%s(%s): output %u is %s, not %s", row->op, row->inputs, i, type, piece);
  }
}

/* As many as types are expected; for errors what the operator needs, two pieces of a Split. */
static unsigned count_outputs(const shape_case *row) {
  unsigned count = 1;
  egi_op op = egi_op_find("engraft", row->op);
  if (row->expected[0] == '!' && strcmp(row->op, "Split") == 0) return 2;
  if (row->expected[0] == '!') return op != EGI_OP_UNKNOWN ? egi_op_get(op)->out_min : 1;
  for (const char *c = row->expected; *c != '\0'; c++) count += *c == ';';
  return count;
}

static void check_case(const shape_case *row) {
  void *state;
  egi_node_id node;
  assert_int_equal(graph_setup(&state), 0);
  graph_fixture *f = state;
  unsigned n_outputs = count_outputs(row);
  eg_status status = graph_node(f, row->op, row->inputs, row->attributes, n_outputs, &node);
  const char *message = eg_context_error(f->ctx);
  if (row->expected[0] != '!') {
    if (status != EG_OK) fail_msg("%s(%s): %s", row->op, row->inputs, message);
    check_outputs(f, row, node);
    /* What was inferred agrees with itself. */
    assert_int_equal(egi_infer_node(f->graph, node), EG_OK);
    check_outputs(f, row, node);
  } else if (status == EG_OK) {
    fail_msg("%s(%s): accepted; should fail with %s", row->op, row->inputs, row->expected + 1);
  } else if (strstr(message, row->expected + 1) == NULL || strstr(message, bare_name(row->op)) == NULL) {
    fail_msg("%s(%s): fails with %s; should be %s", row->op, row->inputs, message, row->expected + 1);
  }
  graph_teardown(&state);
}

void check_shape_cases(const shape_case *cases, size_t count) {
  for (size_t i = 0; i < count; i++) check_case(&cases[i]);
}
