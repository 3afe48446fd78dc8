/* A Linear4bit that bitsandbytes wrote (data/bitsandbytes, or the file that ENGRAFT_BITSANDBYTES names): the product
 * over its codes, and the gradient of what goes in, are those of its dequantised matrix (1e-6 in float32), for few rows
 * and for many. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/blockwise.h"
#include "graph/linear.h"
#include "train/train.h"

typedef struct layer {
  eg_context *ctx;
  egi_arena arena;
  egi_safetensors *file;
  egi_bnb_state state;
  egi_safetensor tensors[EGI_BNB_TENSORS];
  float *matrix, *nested; /* dequantised [out, in]; as Linear takes it */
  size_t out, in;
} layer;

static void must(const layer *l, eg_status status) {
  if (status != EG_OK) fail_msg("%s", eg_context_error(l->ctx));
}

static eg_status find(void *userdata, const char *name, const egi_safetensor **out_tensor) {
  *out_tensor = egi_safetensors_find(userdata, name);
  return EG_OK;
}

/* levels[code] · (map[code of the scale] · scale of scales + offset), from the tensors themselves. */
static void dequantise(layer *l) {
  const uint8_t *codes = l->tensors[EGI_BNB_CODES].data, *scales = l->tensors[EGI_BNB_ABSMAX].data;
  const float *levels = (const float *)(const void *)l->tensors[EGI_BNB_MAP].data;
  const float *map = (const float *)(const void *)l->tensors[EGI_BNB_NESTED_MAP].data;
  const float *above = (const float *)(const void *)l->tensors[EGI_BNB_NESTED].data;
  l->matrix = EGI_NEW(&l->arena, float, l->out * l->in);
  assert_non_null(l->matrix);
  for (size_t i = 0; i < l->out * l->in; i++) {
    size_t block = i / (size_t)l->state.block;
    float product = map[scales[block]] * above[block / 256], scale = product + (float)l->state.offset;
    l->matrix[i] = levels[i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15] * scale;
  }
}

static void open_layer(layer *l, const char *path) {
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  bool is_there = false;
  memset(l, 0, sizeof *l);
  assert_int_equal(eg_context_create(&options, &l->ctx), EG_OK);
  egi_arena_init(&l->arena, l->ctx, EGI_PURPOSE_DATA);
  must(l, egi_safetensors_open(l->ctx, path, &l->file));
  const egi_bnb_source source = {find, l->file, path};
  must(l, egi_bnb_read(&l->arena, &source, "layer.weight", &l->state, l->tensors, &is_there));
  assert_true(is_there && l->state.is_nested);
  l->out = (size_t)l->state.out_features;
  l->in = (size_t)l->state.in_features;
  must(l, egi_bnb_nested(&l->arena, &l->state, l->tensors, &l->nested));
  dequantise(l);
}

static egi_value_id add_weight(const layer *l, egi_graph *graph, const char *name, eg_dtype dtype, size_t rows,
                               size_t columns, const void *data) {
  uint32_t index;
  egi_value_id value;
  egi_weight weight = {.name = name, .dtype = dtype, .rank = columns > 0 ? 2 : 1};
  weight.dims[0] = (int64_t)rows;
  weight.dims[1] = (int64_t)columns;
  weight.bytes.kind = EGI_BYTES_MEMORY;
  weight.bytes.data = data;
  must(l,
       egi_dtype_bytes(dtype, rows * (columns > 0 ? columns : 1), &weight.bytes.size_bytes) ? EG_OK : EG_ERROR_MEMORY);
  must(l, egi_module_add_weight(graph->module, &weight, &index));
  must(l, egi_graph_add_weight(graph, index, &value));
  return value;
}

/* The product, or the gradient, of rows of numbers; `op` Linear or LinearGrad. */
static float *run(layer *l, egi_op op, bool is_coded, size_t rows) {
  size_t width = op == EGI_OP_Linear ? l->in : l->out, n_blocks = (size_t)l->tensors[EGI_BNB_ABSMAX].size_bytes;
  egi_module *module;
  egi_graph *graph;
  egi_value_id in[EGI_LINEAR_INPUTS] = {0};
  must(l, egi_module_create(l->ctx, &module));
  must(l, egi_module_add_graph(module, "layer", &graph));
  const egi_dim dims[2] = {egi_dim_constant(module->dims, (int64_t)rows),
                           egi_dim_constant(module->dims, (int64_t)width)};
  must(l, egi_graph_add_input(graph, "x", EG_DTYPE_F32, 2, dims, &in[EGI_LINEAR_X]));
  const egi_attribute attributes[] = {
      egi_attribute_string("storage", is_coded ? "bnb4" : "plain"), egi_attribute_int("quant_type", l->state.type),
      egi_attribute_int("block_size", l->state.block), egi_attribute_int("out_features", (int64_t)l->out),
      egi_attribute_int("in_features", (int64_t)l->in)};
  if (is_coded) {
    const egi_safetensor *codes = &l->tensors[EGI_BNB_CODES], *scales = &l->tensors[EGI_BNB_ABSMAX];
    in[EGI_LINEAR_WEIGHT] = add_weight(l, graph, "codes", EG_DTYPE_U8, (size_t)codes->size_bytes, 0, codes->data);
    in[EGI_LINEAR_SCALES] = add_weight(l, graph, "scales", EG_DTYPE_U8, n_blocks, 0, scales->data);
    in[EGI_LINEAR_NESTED] =
        add_weight(l, graph, "nested", EG_DTYPE_F32, (size_t)egi_nested_count(n_blocks), 0, l->nested);
  } else {
    in[EGI_LINEAR_WEIGHT] = add_weight(l, graph, "matrix", EG_DTYPE_F32, l->out, l->in, l->matrix);
  }
  egi_emitter emitter = {.graph = graph};
  egi_op plain = op == EGI_OP_Linear ? op : EGI_OP_MatMul; /* dX = dY · W, W [out, in] */
  egi_value_id y = is_coded ? egi_emit(&emitter, op, in, EGI_LINEAR_INPUTS, attributes, 5)
                            : egi_emit(&emitter, plain, in, 2, attributes, plain == op);
  must(l, emitter.status);
  must(l, egi_graph_add_output(graph, y));
  float *values = EGI_NEW(&l->arena, float, rows *width);
  assert_non_null(values);
  for (size_t i = 0; i < rows * width; i++) values[i] = (float)egi_random_normal(11, (uint64_t)op, i);
  egi_tensor input = {.data = values, .dtype = EG_DTYPE_F32, .rank = 2, .dims = {(int64_t)rows, (int64_t)width}};
  egi_tensor output = {0};
  egi_tensor_set_contiguous(&input);
  must(l, egi_evaluator_cpu()->graph(l->ctx, graph, &input, &l->arena, &output));
  assert_int_equal(egi_tensor_count(&output), rows * (op == EGI_OP_Linear ? l->out : l->in));
  egi_module_destroy(module);
  return output.data;
}

/* The largest difference, in units of the root mean square. */
static double distance(const float *a, const float *b, size_t n) {
  double largest = 0.0, squares = 0.0;
  for (size_t i = 0; i < n; i++) {
    double difference = fabs((double)a[i] - (double)b[i]);
    if (!(difference <= largest)) largest = difference;
    squares += (double)b[i] * (double)b[i];
  }
  return largest / sqrt(squares / (double)n);
}

static void check_file(const char *path) {
  static const size_t rows[] = {1, 7, 200};
  static const egi_op ops[] = {EGI_OP_Linear, EGI_OP_LinearGrad};
  layer l;
  open_layer(&l, path);
  for (size_t i = 0; i < EGI_COUNT(rows); i++)
    for (size_t k = 0; k < EGI_COUNT(ops); k++) {
      size_t width = k == 0 ? l.out : l.in;
      const float *coded = run(&l, ops[k], true, rows[i]), *plain = run(&l, ops[k], false, rows[i]);
      double error = distance(coded, plain, rows[i] * width);
      print_message("%s of %zu rows: off by %.1e\n", k == 0 ? "product" : "gradient", rows[i], error);
      assert_true(error <= 1e-6);
    }
  egi_safetensors_close(l.file);
  egi_arena_clear(&l.arena);
  eg_context_destroy(l.ctx);
}

static void test_golden(void **state) {
  (void)state;
  check_file(EGI_TEST_DATA "/bitsandbytes/golden.safetensors");
  const char *more = getenv("ENGRAFT_BITSANDBYTES");
  if (more != NULL && more[0] != '\0') check_file(more);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
