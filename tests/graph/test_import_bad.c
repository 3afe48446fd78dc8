/* Importing bad files: each fault gives one line that names the node or tensor, and leaves nothing behind. Longer
 * than other files because each fault is a function. */
#include "support_onnx.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static const int64_t two[1] = {2};

static int set_up(void **state) {
  eg_context *ctx = NULL;
  assert_int_equal(eg_context_create(NULL, &ctx), EG_OK);
  *state = ctx;
  return 0;
}

static int tear_down(void **state) {
  eg_context_destroy(*state);
  return 0;
}

/* x [2] -> Neg "n" -> y */
static void begin_good(model_builder *b, eg_context *ctx) {
  build_begin(b, ctx, 23);
  build_input(b, "x", EG_DTYPE_F32, 1, two);
  build_node(b, "Neg", "x", "y")->name = (char *)(uintptr_t) "n";
  build_output(b, "y");
}

/* ---- weights -------------------------------------------------------------------------------------------------- */

static Onnx__TensorProto *add_weight(model_builder *b, int dtype, int64_t dim, size_t size) {
  return build_initializer(b, "w", dtype, 1, &dim, "12345678abcdefgh", size);
}

static void short_raw_data(model_builder *b) {
  add_weight(b, EG_DTYPE_F32, 2, 7);
}
static void long_raw_data(model_builder *b) {
  add_weight(b, EG_DTYPE_F32, 2, 12);
}
static void odd_nibbles(model_builder *b) {
  add_weight(b, EG_DTYPE_I4, 3, 3);
}
static void unknown_dtype(model_builder *b) {
  add_weight(b, 99, 2, 8);
}
static void undefined_dtype(model_builder *b) {
  add_weight(b, 0, 2, 8);
}
static void negative_dtype(model_builder *b) {
  add_weight(b, -1, 2, 8);
}
static void negative_dim(model_builder *b) {
  add_weight(b, EG_DTYPE_F32, -2, 8);
}
static void bad_boolean(model_builder *b) {
  add_weight(b, EG_DTYPE_BOOL, 2, 2);
}

static void no_data(model_builder *b) {
  build_initializer(b, "w", EG_DTYPE_F32, 1, two, NULL, 0);
}

static void overflowing_dims(model_builder *b) {
  static const int64_t dims[3] = {INT64_C(1) << 31, INT64_C(1) << 31, 16};
  build_initializer(b, "w", EG_DTYPE_F32, 3, dims, "1234", 4);
}

static void overflowing_bytes(model_builder *b) {
  static const int64_t dims[2] = {INT64_C(1) << 31, INT64_C(1) << 30};
  build_initializer(b, "w", EG_DTYPE_F64, 2, dims, "1234", 4);
}

static void too_many_dims(model_builder *b) {
  static const int64_t dims[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  build_initializer(b, "w", EG_DTYPE_I8, 9, dims, "1", 1);
}

static void short_typed_field(model_builder *b) {
  Onnx__TensorProto *tensor = build_initializer(b, "w", EG_DTYPE_I64, 1, two, NULL, 0);
  tensor->n_int64_data = 1;
  tensor->int64_data = EGI_NEW(&b->arena, int64_t, 1);
}

static void wrong_typed_field(model_builder *b) {
  Onnx__TensorProto *tensor = build_initializer(b, "w", EG_DTYPE_F16, 1, two, NULL, 0);
  tensor->n_float_data = 2;
  tensor->float_data = EGI_NEW(&b->arena, float, 2);
}

static void weight_without_name(model_builder *b) {
  build_initializer(b, "", EG_DTYPE_F32, 1, two, "12345678", 8);
}

static void segment(model_builder *b) {
  Onnx__TensorProto *tensor = add_weight(b, EG_DTYPE_F32, 2, 8);
  tensor->segment = EGI_NEW(&b->arena, Onnx__TensorProto__Segment, 1);
  onnx__tensor_proto__segment__init(tensor->segment);
}

static void used_text(model_builder *b) {
  build_initializer(b, "w", EG_DTYPE_STRING, 1, two, NULL, 0);
  build_node(b, "Unknown", "w", "z");
}

static void used_sparse(model_builder *b) {
  Onnx__SparseTensorProto *sparse = EGI_NEW(&b->arena, Onnx__SparseTensorProto, 1);
  onnx__sparse_tensor_proto__init(sparse);
  sparse->values = build_tensor(b, "w", EG_DTYPE_F32, 1, two, "12345678", 8);
  b->graph->sparse_initializer = EGI_NEW(&b->arena, Onnx__SparseTensorProto *, 1);
  b->graph->sparse_initializer[b->graph->n_sparse_initializer++] = sparse;
  build_node(b, "Unknown", "w", "z");
}

static Onnx__TensorProto *add_made(model_builder *b, const char *kind) {
  Onnx__TensorProto *tensor = build_initializer(b, "w", EG_DTYPE_F32, 1, two, NULL, 0);
  build_external(b, tensor, "location", "");
  build_external(b, tensor, "engraft.init", kind);
  return tensor;
}

static void bad_init(model_builder *b) {
  build_external(b, add_made(b, "magic"), "value", "1");
}

static void bad_std(model_builder *b) {
  Onnx__TensorProto *tensor = add_made(b, "normal");
  build_external(b, tensor, "std", "0.02x");
  build_external(b, tensor, "seed", "7");
}

static void external_in_memory(model_builder *b) {
  Onnx__TensorProto *tensor = build_initializer(b, "w", EG_DTYPE_F32, 1, two, NULL, 0);
  build_external(b, tensor, "location", "w.bin");
}

/* ---- names ---------------------------------------------------------------------------------------------------- */

static void weight_twice(model_builder *b) {
  add_weight(b, EG_DTYPE_F32, 2, 8);
  add_weight(b, EG_DTYPE_F32, 2, 8);
}

static void output_twice(model_builder *b) {
  build_node(b, "Abs", "x", "y");
}
static void output_is_input(model_builder *b) {
  build_node(b, "Abs", "y", "x");
}
static void same_output_twice(model_builder *b) {
  build_node(b, "Split", "x", "z,z");
}
static void input_twice(model_builder *b) {
  build_input(b, "x", EG_DTYPE_F32, 1, two);
}
static void missing_input(model_builder *b) {
  build_node(b, "Abs", "nowhere", "z");
}
static void missing_output(model_builder *b) {
  build_output(b, "nowhere");
}
static void output_without_name(model_builder *b) {
  build_output(b, "");
}
static void input_without_name(model_builder *b) {
  build_input(b, "", EG_DTYPE_F32, 1, two);
}

static void cycle(model_builder *b) {
  build_node(b, "Add", "x,q", "p");
  build_node(b, "Abs", "p", "q");
}

static void self_cycle(model_builder *b) {
  build_node(b, "Add", "x,p", "p");
}

static void constant_twice(model_builder *b) {
  build_int(b, build_node(b, "Constant", "", "y"), "value_int", 1);
}

/* ---- types ---------------------------------------------------------------------------------------------------- */

static void input_dtype(model_builder *b) {
  build_input(b, "z", 99, 1, two);
}
static void input_no_dtype(model_builder *b) {
  build_input(b, "z", 0, 1, two);
}
static void input_dim(model_builder *b) {
  build_input(b, "z", EG_DTYPE_F32, 1, (const int64_t[1]){-5});
}

static void input_sequence(model_builder *b) {
  build_input(b, "z", EG_DTYPE_F32, 1, two);
  b->graph->input[1]->type->value_case = ONNX__TYPE_PROTO__VALUE__NOT_SET;
}

static void input_rank(model_builder *b) {
  static const int64_t dims[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  build_input(b, "z", EG_DTYPE_F32, 9, dims);
}

static void hint_dtype(model_builder *b) {
  b->graph->value_info = EGI_NEW(&b->arena, Onnx__ValueInfoProto *, 1);
  b->graph->value_info[b->graph->n_value_info++] = build_info(b, "y", 77, 1, two, NULL);
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static void no_operator(model_builder *b) {
  build_node(b, "", "x", "z");
}
static void too_few_inputs(model_builder *b) {
  build_node(b, "Add", "x", "z");
}
static void left_out_input(model_builder *b) {
  build_node(b, "Add", ",x", "z");
}
static void too_many_inputs(model_builder *b) {
  build_node(b, "Neg", "x,x", "z");
}
static void too_many_outputs(model_builder *b) {
  build_node(b, "Neg", "x", "z,u");
}
static void no_outputs(model_builder *b) {
  build_node(b, "Neg", "x", "");
}

static void unknown_domain(model_builder *b) {
  build_node(b, "Fancy", "x", "z")->domain = (char *)(uintptr_t) "com.example";
}

static void attribute_twice(model_builder *b) {
  Onnx__NodeProto *node = build_node(b, "Softmax", "x", "z");
  build_int(b, node, "axis", 0);
  build_int(b, node, "axis", 0);
}

static void misspelt_attribute(model_builder *b) {
  build_int(b, build_node(b, "Softmax", "x", "z"), "axes", 0);
}
static void attribute_of_another_type(model_builder *b) {
  build_float(b, build_node(b, "Softmax", "x", "z"), "axis", 0);
}
static void attribute_where_none_is(model_builder *b) {
  build_int(b, build_node(b, "MatMul", "x,x", "z"), "transB", 1);
}

static void attribute_without_name(model_builder *b) {
  build_int(b, build_node(b, "Softmax", "x", "z"), "", 0);
}

static void tensor_attribute_without_tensor(model_builder *b) {
  build_attribute(b, build_node(b, "Unknown", "x", "z"), "value", EGI_ATTRIBUTE_TENSOR);
}

static void graph_attribute_without_graph(model_builder *b) {
  build_attribute(b, build_node(b, "If", "x", "z"), "then_branch", EGI_ATTRIBUTE_GRAPH);
}

static void old_axes_type(model_builder *b) {
  b->model->opset_import[0]->version = 11;
  build_int(b, build_node(b, "Squeeze", "x", "z"), "axes", 0);
}

/* ---- bodies and functions ------------------------------------------------------------------------------------- */

static Onnx__GraphProto *add_body(model_builder *b) {
  Onnx__GraphProto *body = build_body(b, "body");
  build_attribute(b, build_node(b, "If", "x", "z"), "then_branch", EGI_ATTRIBUTE_GRAPH)->g = body;
  return body;
}

static void body_hides(model_builder *b) {
  build_node_in(b, add_body(b), "Abs", "x", "y");
}
static void body_input_missing(model_builder *b) {
  build_node_in(b, add_body(b), "Abs", "nowhere", "r");
}

static void recursive_function(model_builder *b) {
  Onnx__FunctionProto *function = build_function(b, "F", "a", "b");
  Onnx__NodeProto *call = build_loose_node(b, "G", "a", "b");
  call->domain = (char *)(uintptr_t) "local";
  build_function_node(b, function, call);
  function = build_function(b, "G", "a", "b");
  call = build_loose_node(b, "F", "a", "b");
  call->domain = (char *)(uintptr_t) "local";
  build_function_node(b, function, call);
}

static void function_through_body(model_builder *b) {
  Onnx__FunctionProto *function = build_function(b, "F", "a", "b");
  Onnx__NodeProto *branch = build_loose_node(b, "If", "a", "b");
  Onnx__GraphProto *body = build_body(b, "body");
  build_node_in(b, body, "F", "a", "r")->domain = (char *)(uintptr_t) "local";
  build_attribute(b, branch, "then_branch", EGI_ATTRIBUTE_GRAPH)->g = body;
  build_function_node(b, function, branch);
}

static void deep_functions(model_builder *b) {
  char name[16], next[16];
  for (unsigned i = 0; i < 150; i++) {
    snprintf(name, sizeof(name), "F%u", i);
    snprintf(next, sizeof(next), "F%u", i + 1);
    Onnx__NodeProto *call = build_loose_node(b, next, "a", "b");
    call->domain = egi_arena_format(&b->arena, "local");
    build_function_node(b, build_function(b, name, "a", "b"), call);
  }
}

static void function_twice(model_builder *b) {
  build_function(b, "F", "a", "a");
  build_function(b, "F", "a", "a");
}

static void function_input_missing(model_builder *b) {
  build_function_node(b, build_function(b, "F", "a", "b"), build_loose_node(b, "Abs", "x", "b"));
}

static void function_output_missing(model_builder *b) {
  build_function(b, "F", "a", "b");
}

/* ---- the model ------------------------------------------------------------------------------------------------ */

static void old_ir(model_builder *b) {
  b->model->ir_version = 2;
}
static void old_opset(model_builder *b) {
  b->model->opset_import[0]->version = 6;
}
static void no_opset(model_builder *b) {
  b->model->n_opset_import = 0;
}
static void negative_opset(model_builder *b) {
  b->model->opset_import[0]->version = -1;
}
static void opset_twice(model_builder *b) {
  build_opset(b, "ai.onnx", 17);
}

typedef struct bad_case {
  void (*spoil)(model_builder *b);
  eg_status status;
  const char *words;
} bad_case;

static const bad_case cases[] = {
    {short_raw_data, EG_ERROR_FORMAT, "tensor \"w\": 7 bytes of data, its shape needs 8"},
    {long_raw_data, EG_ERROR_FORMAT, "tensor \"w\": 12 bytes of data, its shape needs 8"},
    {odd_nibbles, EG_ERROR_FORMAT, "tensor \"w\": 3 bytes of data, its shape needs 2"},
    {unknown_dtype, EG_ERROR_FORMAT, "tensor \"w\": unknown element type 99"},
    {undefined_dtype, EG_ERROR_FORMAT, "tensor \"w\": unknown element type 0"},
    {negative_dtype, EG_ERROR_FORMAT, "tensor \"w\": unknown element type -1"},
    {negative_dim, EG_ERROR_FORMAT, "tensor \"w\": a dimension of -2"},
    {bad_boolean, EG_ERROR_FORMAT, "tensor \"w\": a boolean of 49"},
    {no_data, EG_ERROR_FORMAT, "tensor \"w\": float_data has 0 entries, its shape needs 2"},
    {overflowing_dims, EG_ERROR_FORMAT, "tensor \"w\": the product of its dimensions overflows"},
    {overflowing_bytes, EG_ERROR_FORMAT, "tensor \"w\": the product of its dimensions overflows"},
    {too_many_dims, EG_ERROR_UNSUPPORTED, "tensor \"w\": 9 dimensions"},
    {short_typed_field, EG_ERROR_FORMAT, "tensor \"w\": int64_data has 1 entries, its shape needs 2"},
    {wrong_typed_field, EG_ERROR_FORMAT, "tensor \"w\": int32_data has 0 entries, its shape needs 2"},
    {weight_without_name, EG_ERROR_FORMAT, "initializer 0 has no name"},
    {segment, EG_ERROR_UNSUPPORTED, "tensor \"w\": a segment"},
    {used_text, EG_ERROR_FORMAT, "node \"z\" (Unknown): its input \"w\" is a tensor of texts"},
    {used_sparse, EG_ERROR_FORMAT, "node \"z\" (Unknown): its input \"w\" is a sparse tensor"},
    {bad_init, EG_ERROR_FORMAT, "tensor \"w\": bad engraft.init \"magic\""},
    {bad_std, EG_ERROR_FORMAT, "tensor \"w\": bad engraft.init \"normal\""},
    {external_in_memory, EG_ERROR_IO, "tensor \"w\": external data \"w.bin\""},
    {weight_twice, EG_ERROR_FORMAT, "tensor \"w\": it is made twice"},
    {output_twice, EG_ERROR_FORMAT, "node \"y\" (Abs): tensor \"y\" is made twice"},
    {output_is_input, EG_ERROR_FORMAT, "node \"x\" (Abs): tensor \"x\" is made twice"},
    {same_output_twice, EG_ERROR_FORMAT, "(Split): tensor \"z\" is made twice"},
    {input_twice, EG_ERROR_FORMAT, "tensor \"x\": it is made twice"},
    {missing_input, EG_ERROR_FORMAT, "(Abs): its input \"nowhere\" is made by no node"},
    {missing_output, EG_ERROR_FORMAT, "tensor \"nowhere\": a graph output that is made by no node"},
    {output_without_name, EG_ERROR_FORMAT, "graph output 1 has no name"},
    {input_without_name, EG_ERROR_FORMAT, "a graph input has no name"},
    {cycle, EG_ERROR_FORMAT, "cycle"},
    {self_cycle, EG_ERROR_FORMAT, "node \"p\" (Add): its result depends on itself"},
    {constant_twice, EG_ERROR_FORMAT, "tensor \"y\" is made twice"},
    {input_dtype, EG_ERROR_FORMAT, "tensor \"z\": unknown element type 99"},
    {input_no_dtype, EG_ERROR_FORMAT, "tensor \"z\": a graph input without an element type"},
    {input_dim, EG_ERROR_FORMAT, "tensor \"z\": a dimension of -5"},
    {input_sequence, EG_ERROR_UNSUPPORTED, "tensor \"z\": a graph input that is not a tensor"},
    {input_rank, EG_ERROR_UNSUPPORTED, "tensor \"z\": 9 dimensions"},
    {hint_dtype, EG_ERROR_FORMAT, "tensor \"y\": unknown element type 77"},
    {no_operator, EG_ERROR_FORMAT, "node \"z\" (): a node without an operator"},
    {too_few_inputs, EG_ERROR_FORMAT, "node \"z\" (Add): its input 1 is missing"},
    {left_out_input, EG_ERROR_FORMAT, "node \"z\" (Add): its input 0 is missing"},
    {too_many_inputs, EG_ERROR_FORMAT, "node \"z\" (Neg): 2 inputs, it takes 1"},
    {too_many_outputs, EG_ERROR_FORMAT, "node \"z\" (Neg): 2 outputs, it has 1"},
    {no_outputs, EG_ERROR_FORMAT, "(Neg): 0 outputs"},
    {unknown_domain, EG_ERROR_FORMAT, "node \"z\" (Fancy): the file imports no operator set \"com.example\""},
    {misspelt_attribute, EG_ERROR_FORMAT, "node \"z\" (Softmax): Softmax has no attribute \"axes\""},
    {attribute_of_another_type, EG_ERROR_FORMAT, "attribute \"axis\" is a float; Softmax takes an integer"},
    {attribute_where_none_is, EG_ERROR_FORMAT, "node \"z\" (MatMul): MatMul has no attribute \"transB\""},
    {attribute_twice, EG_ERROR_FORMAT, "node \"z\" (Softmax): attribute \"axis\" stands there twice"},
    {attribute_without_name, EG_ERROR_FORMAT, "node \"z\" (Softmax): an attribute without a name"},
    {tensor_attribute_without_tensor, EG_ERROR_FORMAT, "a tensor attribute without a tensor"},
    {graph_attribute_without_graph, EG_ERROR_FORMAT, "a graph attribute without a graph"},
    {old_axes_type, EG_ERROR_FORMAT, "node \"z\" (Squeeze): attribute \"axes\" has the wrong type"},
    {body_hides, EG_ERROR_FORMAT, "node \"y\" (Abs): tensor \"y\" hides a tensor of the graph around it"},
    {body_input_missing, EG_ERROR_FORMAT, "node \"r\" (Abs): its input \"nowhere\" is made by no node"},
    {recursive_function, EG_ERROR_FORMAT, "function \"F\" calls itself"},
    {function_through_body, EG_ERROR_FORMAT, "function \"F\" calls itself"},
    {deep_functions, EG_ERROR_BUDGET, "calls nested deeper than 100"},
    {function_twice, EG_ERROR_FORMAT, "function \"F\" of domain \"local\" stands there twice"},
    {function_input_missing, EG_ERROR_FORMAT, "function F: node \"b\" (Abs): its input \"x\" is made by no node"},
    {function_output_missing, EG_ERROR_FORMAT, "tensor \"b\": a graph output that is made by no node"},
    {old_ir, EG_ERROR_UNSUPPORTED, "IR version 2"},
    {old_opset, EG_ERROR_UNSUPPORTED, "node \"n\" (Neg): operator set 6"},
    {no_opset, EG_ERROR_FORMAT, "node \"n\" (Neg): the file imports no operator set \"\""},
    {negative_opset, EG_ERROR_FORMAT, "operator set \"\" of version -1"},
    {opset_twice, EG_ERROR_FORMAT, "operator set \"\" is imported twice"},
};

static void test_bad_models(void **state) {
  eg_context *ctx = *state;
  for (size_t i = 0; i < EGI_COUNT(cases); i++) {
    model_builder builder;
    egi_module *module = NULL;
    size_t before = egi_bytes_in_use(ctx, EGI_PURPOSE_GRAPH);
    begin_good(&builder, ctx);
    cases[i].spoil(&builder);
    eg_status status = build_load(&builder, NULL, &module);
    const char *error = eg_context_error(ctx);
    if (status != cases[i].status || !strstr(error, cases[i].words) || strchr(error, '\n'))
      fail_msg("case %zu: status %d, \"%s\" lacks \"%s\"", i, (int)status, error, cases[i].words);
    assert_null(module);
    assert_int_equal(egi_bytes_in_use(ctx, EGI_PURPOSE_GRAPH), before);
    build_end(&builder);
  }
}

/* The model that the cases spoil is good, and tensors that cannot be represented do not matter while nobody uses them.
 */
static void test_good_model(void **state) {
  model_builder builder;
  egi_module *module = NULL;
  begin_good(&builder, *state);
  build_initializer(&builder, "texts", EG_DTYPE_STRING, 1, two, NULL, 0);
  if (build_load(&builder, NULL, &module) != EG_OK) fail_msg("%s", eg_context_error(*state));
  egi_module_destroy(module);
  build_end(&builder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_good_model),
      cmocka_unit_test(test_bad_models),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
