/* External data: what may be opened, and where a tensor's bytes must lie. */
#define _XOPEN_SOURCE 700

#include "support_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { DATA_BYTES = 64 };

typedef struct external_fixture {
  eg_context *ctx;
  char directory[64]; /* holds model.onnx, weights.bin, sub/more.bin, links */
  char outside[64];   /* holds secret.bin */
} external_fixture;

static void make_path(char *out, size_t capacity, const char *directory, const char *name) {
  snprintf(out, capacity, "%s/%s", directory, name);
}

static void link_to(const external_fixture *fixture, const char *target, const char *name) {
  char path[256];
  make_path(path, sizeof(path), fixture->directory, name);
  assert_int_equal(symlink(target, path), 0);
}

static void hard_link(const external_fixture *fixture, const char *from, const char *name) {
  char path[256], source[256];
  make_path(source, sizeof(source), fixture->directory, from);
  make_path(path, sizeof(path), fixture->directory, name);
  assert_int_equal(link(source, path), 0);
}

static int set_up(void **state) {
  static external_fixture fixture;
  uint8_t bytes[DATA_BYTES];
  char path[256], target[256];
  for (size_t i = 0; i < sizeof(bytes); i++) bytes[i] = (uint8_t)i;
  assert_int_equal(eg_context_create(NULL, &fixture.ctx), EG_OK);
  support_make_directory(fixture.directory, sizeof(fixture.directory));
  support_make_directory(fixture.outside, sizeof(fixture.outside));
  make_path(path, sizeof(path), fixture.directory, "sub");
  assert_int_equal(mkdir(path, 0700), 0);
  support_write_file(fixture.directory, "weights.bin", bytes, sizeof(bytes));
  support_write_file(fixture.directory, "twice.bin", bytes, sizeof(bytes));
  support_write_file(fixture.directory, "empty.bin", bytes, 0);
  support_write_file(path, "more.bin", bytes, sizeof(bytes));
  support_write_file(fixture.outside, "secret.bin", bytes, sizeof(bytes));
  hard_link(&fixture, "twice.bin", "hard.bin");
  link_to(&fixture, "weights.bin", "link.bin");
  link_to(&fixture, "sub", "linked");
  snprintf(target, sizeof(target), "../%s/secret.bin", fixture.outside);
  link_to(&fixture, target, "escape.bin");
  make_path(path, sizeof(path), fixture.directory, "pipe.bin");
  assert_int_equal(mkfifo(path, 0600), 0);
  *state = &fixture;
  return 0;
}

static int tear_down(void **state) {
  external_fixture *fixture = *state;
  eg_context_destroy(fixture->ctx);
  support_remove_directory(fixture->directory);
  support_remove_directory(fixture->outside);
  return 0;
}

typedef struct external_case {
  const char *location, *offset, *length, *extra_key;
  uint64_t n_elements; /* i8 */
  eg_status status;
  const char *words; /* of the message; NULL: it loads */
} external_case;

static void add_entry(wire_bytes *tensor, const char *key, const char *value) {
  wire_bytes entry = {.size = 0};
  if (!value) return;
  wire_text(&entry, 1, key);
  wire_text(&entry, 2, value);
  wire_message(tensor, 13, &entry);
}

static void make_model(wire_bytes *model, const external_case *row) {
  static wire_bytes graph, tensor;
  model->size = graph.size = tensor.size = 0;
  wire_number(&tensor, 1, row->n_elements);
  wire_number(&tensor, 2, 3);
  wire_text(&tensor, 8, "w");
  add_entry(&tensor, "location", row->location);
  add_entry(&tensor, "offset", row->offset);
  add_entry(&tensor, "length", row->length);
  if (row->extra_key) add_entry(&tensor, row->extra_key, "1");
  wire_number(&tensor, 14, 1);
  wire_message(&graph, 5, &tensor);
  wire_message(model, 7, &graph);
}

static void check_case(external_fixture *fixture, const external_case *row, const char *root) {
  static wire_bytes model;
  char path[256];
  egi_onnx *file = NULL;
  egi_onnx_limits limits;
  egi_range range;
  const char *name = NULL;
  uint64_t offset = 0;
  make_model(&model, row);
  support_write_file(fixture->directory, "model.onnx", model.data, model.size);
  make_path(path, sizeof(path), fixture->directory, "model.onnx");
  egi_onnx_limits_default(&limits);
  limits.external_root = root;
  assert_int_equal(egi_onnx_open(fixture->ctx, path, &limits, &file), EG_OK);
  const Onnx__TensorProto *tensor = egi_onnx_model(file)->graph->initializer[0];
  eg_status status = egi_onnx_tensor_range(file, tensor, row->n_elements, &range, &name, &offset);
  if (row->words) {
    if (status != row->status || !strstr(eg_context_error(fixture->ctx), row->words) ||
        !strstr(eg_context_error(fixture->ctx), "tensor \"w\""))
      fail_msg("%s %s %s: status %d, \"%s\" lacks \"%s\"", row->location, row->offset, row->length, status,
               eg_context_error(fixture->ctx), row->words);
  } else {
    if (status != EG_OK) fail_msg("%s: %s", row->location, eg_context_error(fixture->ctx));
    assert_int_equal(range.size_bytes, row->n_elements);
    if (row->n_elements) assert_int_equal(range.data[0], offset);
    assert_string_equal(name, row->location);
    const uint8_t *first = range.data; /* mapped once */
    assert_int_equal(egi_onnx_tensor_range(file, tensor, row->n_elements, &range, &name, &offset), EG_OK);
    assert_ptr_equal(first, range.data);
  }
  egi_onnx_release(file);
}

static void test_strict(void **state) {
  static const external_case cases[] = {
      {"weights.bin", "0", "64", NULL, 64, EG_OK, NULL},
      {"weights.bin", "3", "8", "checksum", 8, EG_OK, NULL},
      {"weights.bin", NULL, NULL, NULL, 64, EG_OK, NULL},
      {"weights.bin", "60", NULL, NULL, 4, EG_OK, NULL},
      {"./sub//more.bin", "1", "2", NULL, 2, EG_OK, NULL},
      {"empty.bin", NULL, "0", NULL, 0, EG_OK, NULL},
      {"empty.bin", NULL, "1", NULL, 1, EG_ERROR_FORMAT, "1 bytes at offset 0 do not lie in a file of 0 bytes"},
      {"weights.bin", "61", NULL, NULL, 4, EG_ERROR_FORMAT, "4 bytes at offset 61"},
      {"weights.bin", "65", "0", NULL, 0, EG_ERROR_FORMAT, "offset 65"},
      {"weights.bin", "18446744073709551615", "4", NULL, 4, EG_ERROR_FORMAT, "do not lie in a file"},
      {"weights.bin", "18446744073709551616", "4", NULL, 4, EG_ERROR_FORMAT, "not a decimal number: offset"},
      {"weights.bin", "-1", "4", NULL, 4, EG_ERROR_FORMAT, "not a decimal number: offset"},
      {"weights.bin", "0x10", "4", NULL, 4, EG_ERROR_FORMAT, "not a decimal number: offset"},
      {"weights.bin", "", "4", NULL, 4, EG_ERROR_FORMAT, "not a decimal number: offset"},
      {"weights.bin", "0", "5", NULL, 4, EG_ERROR_FORMAT, "5 bytes of data, its shape needs 4"},
      {"weights.bin", "0", "4 ", NULL, 4, EG_ERROR_FORMAT, "not a decimal number: length"},
      {"weights.bin", "0", "4", "__class__", 4, EG_ERROR_FORMAT, "unknown key __class__"},
      {NULL, "0", "4", NULL, 4, EG_ERROR_FORMAT, "no location"},
      {"", "0", "4", NULL, 4, EG_ERROR_FORMAT, "the location is empty"},
      {"./.", "0", "4", NULL, 4, EG_ERROR_FORMAT, "the location is empty"},
      {"/etc/passwd", "0", "4", NULL, 4, EG_ERROR_FORMAT, "not a plain relative path"},
      {"C:\\weights.bin", "0", "4", NULL, 4, EG_ERROR_FORMAT, "not a plain relative path"},
      {"../weights.bin", "0", "4", NULL, 4, EG_ERROR_FORMAT, "leaves the model's directory"},
      {"sub/../weights.bin", "0", "4", NULL, 4, EG_ERROR_FORMAT, "leaves the model's directory"},
      {"missing.bin", "0", "4", NULL, 4, EG_ERROR_IO, "No such file"},
      {"sub", "0", "4", NULL, 4, EG_ERROR_IO, "not a regular file"},
      {"pipe.bin", "0", "4", NULL, 4, EG_ERROR_IO, "not a regular file"},
      {"weights.bin/x", "0", "4", NULL, 4, EG_ERROR_IO, "not a directory"},
      {"link.bin", "0", "4", NULL, 4, EG_ERROR_IO, "a link"},
      {"linked/more.bin", "0", "4", NULL, 4, EG_ERROR_IO, "a link"},
      {"escape.bin", "0", "4", NULL, 4, EG_ERROR_IO, "a link"},
      {"hard.bin", "0", "4", NULL, 4, EG_ERROR_IO, "hard links"},
  };
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_case(*state, &cases[i], NULL);
}

static void test_with_root(void **state) {
  external_fixture *fixture = *state;
  static const external_case cases[] = {
      {"weights.bin", "2", "8", NULL, 8, EG_OK, NULL},
      {"link.bin", "2", "8", NULL, 8, EG_OK, NULL},
      {"linked/more.bin", "2", "8", NULL, 8, EG_OK, NULL},
      {"hard.bin", "2", "8", NULL, 8, EG_OK, NULL},
      {"escape.bin", "0", "4", NULL, 4, EG_ERROR_IO, "outside the external root"},
      {"../weights.bin", "0", "4", NULL, 4, EG_ERROR_FORMAT, "leaves the model's directory"},
      {"missing.bin", "0", "4", NULL, 4, EG_ERROR_IO, "No such file"},
  };
  static const external_case outside = {"escape.bin", "2", "8", NULL, 8, EG_OK, NULL};
  static const external_case no_root = {"weights.bin", "2", "8", NULL, 8, EG_ERROR_IO, "no such external root"};
  for (size_t i = 0; i < EGI_COUNT(cases); i++) check_case(fixture, &cases[i], fixture->directory);
  check_case(fixture, &outside, ".");
  check_case(fixture, &no_root, "no-such-directory");
}

/* A root whose name begins like another directory's is not that directory. */
static void test_root_prefix(void **state) {
  external_fixture *fixture = *state;
  char root[64];
  static const external_case row = {"weights.bin", "2", "8", NULL, 8, EG_ERROR_IO, "outside the external root"};
  memcpy(root, fixture->directory, sizeof(root));
  root[strlen(root) - 1] = '\0';
  assert_int_equal(mkdir(root, 0700), 0);
  check_case(fixture, &row, root);
  rmdir(root);
}

static void test_memory_has_no_directory(void **state) {
  external_fixture *fixture = *state;
  static wire_bytes model;
  static const external_case row = {"weights.bin", "0", "4", NULL, 4, EG_OK, NULL};
  egi_onnx *file = NULL;
  egi_range range;
  const char *name = NULL;
  uint64_t offset = 0;
  make_model(&model, &row);
  assert_int_equal(egi_onnx_open_memory(fixture->ctx, model.data, model.size, NULL, NULL, &file), EG_OK);
  const Onnx__TensorProto *tensor = egi_onnx_model(file)->graph->initializer[0];
  assert_int_equal(egi_onnx_tensor_range(file, tensor, 4, &range, &name, &offset), EG_ERROR_IO);
  egi_onnx_release(file);
  assert_int_equal(egi_onnx_open_memory(fixture->ctx, model.data, model.size, fixture->directory, NULL, &file), EG_OK);
  tensor = egi_onnx_model(file)->graph->initializer[0];
  assert_int_equal(egi_onnx_tensor_range(file, tensor, 4, &range, &name, &offset), EG_OK);
  assert_int_equal(range.data[3], 3);
  egi_onnx_release(file);
}

static void test_tensor_file(void **state) {
  external_fixture *fixture = *state;
  wire_bytes tensor = {.size = 0};
  Onnx__TensorProto *read = NULL;
  egi_mapping mapping;
  egi_range range;
  char path[256];
  wire_number(&tensor, 1, 3);
  wire_number(&tensor, 2, 3);
  wire_data(&tensor, 9, "abc", 3);
  support_write_file(fixture->directory, "input_0.pb", tensor.data, tensor.size);
  make_path(path, sizeof(path), fixture->directory, "input_0.pb");
  assert_int_equal(egi_onnx_read_tensor(fixture->ctx, path, &read, &mapping), EG_OK);
  assert_int_equal(read->n_dims, 1);
  memcpy(&range, read->raw_data.data, sizeof(range));
  assert_int_equal(range.size_bytes, 3);
  assert_memory_equal(range.data, "abc", 3);
  egi_onnx_tensor_free(read, &mapping);
  support_write_file(fixture->directory, "input_0.pb", tensor.data, tensor.size - 1);
  assert_int_equal(egi_onnx_read_tensor(fixture->ctx, path, &read, &mapping), EG_ERROR_FORMAT);
  make_path(path, sizeof(path), fixture->directory, "input_1.pb");
  assert_int_equal(egi_onnx_read_tensor(fixture->ctx, path, &read, &mapping), EG_ERROR_IO);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_strict),      cmocka_unit_test(test_with_root),
      cmocka_unit_test(test_root_prefix), cmocka_unit_test(test_memory_has_no_directory),
      cmocka_unit_test(test_tensor_file),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
