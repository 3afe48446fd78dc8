/* Importing spoiled bytes and with too little memory: every byte of a model changed, cut off behind every byte, every
 * allocation failed once. It ends with a module or a message, and nothing is left behind. */
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

/* Something of everything that the importer reads. */
static void make_rich(model_builder *b, eg_context *ctx) {
  static const int64_t axes[1] = {0};
  build_begin(b, ctx, 11);
  build_input(b, "x", EG_DTYPE_F32, 1, two);
  build_initializer(b, "w", EG_DTYPE_F32, 1, two, "12345678", 8);
  build_ints(b, build_node(b, "Unsqueeze", "x", "u"), "axes", 1, axes);
  build_float(b, build_node(b, "Clip", "u", "c"), "max", 1.0F);
  build_int(b, build_node(b, "Softmax", "c", "s"), "axis", 0);
  build_int(b, build_node(b, "Constant", "", "k"), "value_int", 1);
  build_node(b, "Dropout", "s", "d,m");
  Onnx__GraphProto *body = build_body(b, "body");
  build_attribute(b, build_node(b, "If", "x", "z"), "then_branch", EGI_ATTRIBUTE_GRAPH)->g = body;
  build_node_in(b, body, "Add", "w,k", "r");
  build_node(b, "Add", "d,w", "y");
  build_output(b, "y");
  build_function_node(b, build_function(b, "F", "a", "b"), build_loose_node(b, "Abs", "a", "b"));
}

/* Whatever a byte is changed to, loading ends with a module or a message. */
static void test_changed_bytes(void **state) {
  static const uint8_t masks[] = {0x01, 0x02, 0x08, 0x10, 0x40, 0x80, 0xff};
  eg_context *ctx = *state;
  model_builder builder;
  make_rich(&builder, ctx);
  build_bytes(&builder);
  size_t n_good = 0, before = egi_bytes_in_use(ctx, EGI_PURPOSE_GRAPH);
  for (size_t i = 0; i < builder.size; i++)
    for (size_t j = 0; j < sizeof(masks); j++) {
      egi_onnx *file = NULL;
      egi_module *module = NULL;
      builder.bytes[i] ^= masks[j];
      if (egi_onnx_open_memory(ctx, builder.bytes, builder.size, NULL, NULL, &file) == EG_OK &&
          egi_module_import(ctx, file, &module) == EG_OK) {
        n_good++;
        egi_module_destroy(module);
      }
      builder.bytes[i] ^= masks[j];
      assert_int_equal(egi_bytes_in_use(ctx, EGI_PURPOSE_GRAPH), before);
    }
  assert_true(n_good > 0);
  build_end(&builder);
}

static void test_truncation(void **state) {
  eg_context *ctx = *state;
  model_builder builder;
  make_rich(&builder, ctx);
  build_bytes(&builder);
  for (size_t size = 0; size < builder.size; size++) {
    egi_onnx *file = NULL;
    egi_module *module = NULL;
    if (egi_onnx_open_memory(ctx, builder.bytes, size, NULL, NULL, &file) == EG_OK &&
        egi_module_import(ctx, file, &module) == EG_OK)
      egi_module_destroy(module);
  }
  build_end(&builder);
}

typedef struct failing_allocator {
  size_t n_left;
} failing_allocator;

static void *allocate_some(void *userdata, size_t size_bytes, size_t alignment) {
  failing_allocator *allocator = userdata;
  if (allocator->n_left == 0) return NULL;
  allocator->n_left--;
  return aligned_alloc(alignment, (size_bytes + alignment - 1) / alignment * alignment);
}

static void release_some(void *userdata, void *memory, size_t size_bytes) {
  (void)userdata;
  (void)size_bytes;
  free(memory);
}

/* Every allocation of an import fails once. */
static void test_out_of_memory(void **state) {
  model_builder builder;
  make_rich(&builder, *state);
  build_bytes(&builder);
  eg_status status = EG_ERROR_MEMORY;
  for (size_t n = 0; n < 2000 && status != EG_OK; n++) {
    failing_allocator failing = {SIZE_MAX};
    eg_allocator allocator = {allocate_some, release_some, &failing};
    eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
    eg_context *ctx = NULL;
    egi_onnx *file = NULL;
    egi_module *module = NULL;
    options.allocator = &allocator;
    options.n_threads = 1;
    assert_int_equal(eg_context_create(&options, &ctx), EG_OK);
    failing.n_left = n;
    status = egi_onnx_open_memory(ctx, builder.bytes, builder.size, NULL, NULL, &file);
    if (status == EG_OK) status = egi_module_import(ctx, file, &module);
    failing.n_left = SIZE_MAX;
    if (status == EG_OK)
      egi_module_destroy(module);
    else
      assert_int_equal(status, EG_ERROR_MEMORY);
    eg_context_destroy(ctx);
  }
  assert_int_equal(status, EG_OK);
  build_end(&builder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_changed_bytes),
      cmocka_unit_test(test_truncation),
      cmocka_unit_test(test_out_of_memory),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
