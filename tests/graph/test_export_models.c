/* Import → export → import of real exporters' files gives the same graph and the same weights. Without arguments: the
 * models in tests/data; else the files given, of which those that are no tensors' graphs or that the importer refuses
 * count as refused. */
#include "support_onnx.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <dirent.h>

static int n_files;
static char **files;

static void expect_same_weights(const egi_graph *a, const egi_graph *b) {
  for (egi_value_id v = 1; v < a->n_values; v++) {
    if (a->values[v].kind != EGI_VALUE_WEIGHT) continue;
    egi_value_id other = egi_graph_find_value(b, a->values[v].name);
    assert_int_not_equal(other, 0);
    const egi_weight *left = &a->module->weights[a->values[v].index];
    const egi_weight *right = &b->module->weights[b->values[other].index];
    assert_int_equal(left->bytes.size_bytes, right->bytes.size_bytes);
    if (left->bytes.size_bytes)
      assert_memory_equal(left->bytes.data, right->bytes.data, (size_t)left->bytes.size_bytes);
  }
}

static void print(const egi_module *module, egi_text *out) {
  egi_text_init(out, module->ctx);
  assert_int_equal(egi_module_print(module, module->graphs[0], 64, out), EG_OK);
}

static void expect_same_scopes(const egi_graph *a, const egi_graph *b) {
  assert_int_equal(a->n_nodes, b->n_nodes);
  for (egi_node_id n = 1; n < a->n_nodes; n++) {
    const char *left = a->nodes[n].scope ? a->nodes[n].scope : "", *right = b->nodes[n].scope ? b->nodes[n].scope : "";
    assert_string_equal(left, right);
  }
}

/* False when the file is refused. */
static bool check_file(eg_context *ctx, const char *path) {
  static const char out[] = "round-trip.onnx";
  egi_module *first = NULL, *second = NULL;
  egi_text before, after;
  if (support_load(ctx, path, &first) != EG_OK) {
    print_message("%s\n", eg_context_error(ctx));
    return false;
  }
  if (egi_module_export(first, first->graphs[0], out) != EG_OK || support_load(ctx, out, &second) != EG_OK)
    fail_msg("%s: %s", path, eg_context_error(ctx));
  print(first, &before);
  print(second, &after);
  if (strcmp(egi_text_string(&before), egi_text_string(&after)) != 0) fail_msg("%s: the graphs differ", path);
  expect_same_weights(first->graphs[0], second->graphs[0]);
  expect_same_scopes(first->graphs[0], second->graphs[0]);
  egi_text_free(&before);
  egi_text_free(&after);
  egi_module_destroy(first);
  egi_module_destroy(second);
  remove(out);
  return true;
}

static int check_folder(eg_context *ctx, const char *folder) {
  int n_checked = 0;
  char path[1024];
  DIR *directory = opendir(folder);
  if (!directory) return 0;
  for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
    snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
    if (entry->d_name[0] == '.') continue;
    if (!egi_has_suffix(path, ".onnx"))
      n_checked += check_folder(ctx, path);
    else if (check_file(ctx, path))
      n_checked++;
    else
      fail_msg("%s is refused", path);
  }
  closedir(directory);
  return n_checked;
}

static void test_models(void **state) {
  eg_context *ctx = NULL;
  int n_checked = 0;
  (void)state;
  assert_int_equal(eg_context_create(NULL, &ctx), EG_OK);
  for (int i = 0; i < n_files; i++) n_checked += check_file(ctx, files[i]);
  if (n_files == 0) n_checked = check_folder(ctx, EGI_TEST_DATA);
  eg_context_destroy(ctx);
  print_message("%d models\n", n_checked);
  assert_true(n_checked > n_files / 2);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_models)};
  n_files = argc - 1;
  files = argv + 1;
  return cmocka_run_group_tests(tests, NULL, NULL);
}
