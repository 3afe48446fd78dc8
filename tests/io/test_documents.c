/* Datasets: JSON lines, text, token files and the caller's arrays; labels, cutting, and bad lines by number. */
#include "support_io.h"

#include <stdio.h>
#include <string.h>

static egi_documents *read_lines(io_fixture *fixture, const char *text, uint32_t sequence) {
  egi_documents *documents;
  const char *path = io_write(fixture, "data.jsonl", text, strlen(text));
  eg_status status = egi_documents_read_jsonl(fixture->ctx, path, sequence, &documents);
  if (status != EG_OK) fail_msg("%s", eg_context_error(fixture->ctx));
  return documents;
}

static void test_lines(void **state) {
  egi_documents *d = read_lines(*state,
                                "{\"input_ids\":[1,2,3]}\n"
                                "\n"
                                " { \"x\" : [1.5e3,{\"a\":\"\\u00e9]\"},null] , \"labels\":[-100,5, -100,7],"
                                "\"input_ids\" : [ 4,5,6,7 ] } \r\n"
                                "{\"input_ids\":[8,9,10,2147483647],\"prompt_length\":2}",
                                0);
  static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2147483647};
  static const int32_t labels[] = {-100, 2, 3, -100, 5, -100, 7, -100, -100, 10, 2147483647};
  assert_int_equal(d->n_documents, 3);
  assert_int_equal(d->n_tokens, 11);
  assert_int_equal(d->n_targets, 6);
  assert_int_equal(d->offsets[1], 3);
  assert_int_equal(d->offsets[2], 7);
  assert_int_equal(d->offsets[3], 11);
  assert_memory_equal(d->tokens, tokens, sizeof tokens);
  assert_memory_equal(d->labels, labels, sizeof labels);
  egi_documents_free(d);
}

static void test_numbers(void **state) {
  egi_documents *d = read_lines(*state, "{\"input_ids\":[1,2],\"label\":2}\n{\"label\":0,\"input_ids\":[3]}\n", 0);
  assert_int_equal(d->kind, EGI_DOCUMENTS_CLASS);
  assert_int_equal(d->n_numbers, 1);
  assert_true(d->numbers[0] >= 2 && d->numbers[0] <= 2 && d->numbers[1] >= 0 && d->numbers[1] <= 0);
  egi_documents_free(d);
  d = read_lines(*state,
                 "{\"input_ids\":[1,2],\"label\":[1e-1,-2.50,3],\"token_type_ids\":[0,1]}\n"
                 "{\"input_ids\":[3], \"label\" : [ 4E2 , 0.0625, 1234567890123456789012 ] }\n",
                 0);
  static const float numbers[] = {0.1F, -2.5F, 3.0F, 400.0F, 0.0625F, 1.234567890123456789e21F};
  static const int32_t types[] = {0, 1, 0};
  assert_int_equal(d->kind, EGI_DOCUMENTS_NUMBERS);
  assert_memory_equal(d->numbers, numbers, sizeof numbers);
  assert_memory_equal(d->token_types, types, sizeof types);
  egi_documents_free(d);
  d = read_lines(*state, "{\"input_ids\":[1,2],\"label\":1}\n{\"input_ids\":[3],\"label\":0.5}\n", 0);
  assert_int_equal(d->kind, EGI_DOCUMENTS_NUMBERS); /* not all are whole */
  egi_documents_free(d);
  d = read_lines(*state, "{\"input_ids\":[1,2],\"label\":\"spam\",\"score\":null}\n", 0);
  assert_int_equal(d->kind, EGI_DOCUMENTS_TOKENS); /* fields of that name for somebody else */
  egi_documents_free(d);
}

static void test_examples(void **state) {
  egi_documents *d =
      read_lines(*state,
                 "{\"positive\":[3],\"negative\":[[4,5],[6]],\"anchor\":[1,2]}\n"
                 "{\"anchor\":[7],\"positive\":[8,9],\"negative\":[10]}\n{\"anchor\":[1],\"positive\":[2]}",
                 0);
  static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2};
  static const bool is_first[] = {true, false, false, false, true, false, false, true, false};
  assert_int_equal(d->kind, EGI_DOCUMENTS_MATCHES);
  assert_int_equal(d->n_documents, EGI_COUNT(is_first));
  assert_memory_equal(d->tokens, tokens, sizeof tokens);
  assert_memory_equal(d->is_first, is_first, sizeof is_first);
  assert_int_equal(d->n_targets, 0);
  egi_documents_free(d);
  d = read_lines(*state, "{\"sentence1\":[1,2],\"sentence2\":[3],\"score\":0.5}\n", 1);
  assert_int_equal(d->kind, EGI_DOCUMENTS_SCORES);
  assert_int_equal(d->n_tokens, 2);
  assert_true(d->numbers[0] >= 0.5F && d->numbers[0] <= 0.5F);
  egi_documents_free(d);
}

static void test_cut(void **state) {
  egi_documents *d = read_lines(*state, "{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4]}\n{\"input_ids\":[5,6]}\n", 2);
  static const int32_t tokens[] = {1, 2, 4, 5, 6};
  assert_int_equal(d->n_cut, 1);
  assert_int_equal(d->n_tokens, 5);
  assert_int_equal(d->n_targets, 2);
  assert_memory_equal(d->tokens, tokens, sizeof tokens);
  egi_documents_free(d);
}

typedef struct bad_line {
  const char *text, *part;
} bad_line;

static const bad_line bad_lines[] = {
    {"", "no documents"},
    {"\n\n", "no documents"},
    {"{\"input_ids\":[1]}\n[1]\n", "line 2: not a JSON object"},
    {"{\"input_ids\":[1]} x", "line 1: something after"},
    {"{\"text\":\"hello\"}", "line 1: no \"input_ids\""},
    {"{\"input_ids\":[]}", "line 1: \"input_ids\" is empty"},
    {"{\"input_ids\":3}", "not an array"},
    {"{\"input_ids\":[3],\"label\":[]}", "\"label\" holds something that is not a number"},
    {"{\"input_ids\":[3],\"label\":[1,]}", "\"label\" holds something that is not a number"},
    {"{\"input_ids\":[3],\"label\":[1,2}", "\"label\" has no closing bracket"},
    {"{\"input_ids\":[3],\"label\":-}", "\"label\" holds something that is not a number"},
    {"{\"input_ids\":[3],\"label\":1e999}", "\"label\" holds something that is not a number"},
    {"{\"input_ids\":[3],\"label\":1.}", "\"label\" holds something that is not a number"},
    {"{\"input_ids\":[3],\"label\":1,\"label\":2}", "\"label\" stands twice"},
    {"{\"input_ids\":[3],\"label\":1,\"labels\":[2]}", "both a \"label\" and labels of tokens"},
    {"{\"input_ids\":[3],\"label\":1}\n{\"input_ids\":[3]}",
     "line 2: no numbers as \"label\", which the lines before have"},
    {"{\"input_ids\":[3],\"label\":1}\n{\"input_ids\":[3],\"label\":[1,2]}", "line 2: \"label\" has 2 numbers"},
    {"{\"input_ids\":[3,4],\"token_type_ids\":[1]}", "1 token_type_ids for 2 input_ids"},
    {"{\"input_ids\":[3],\"score\":1}", "\"score\" without \"sentence1\""},
    {"{\"anchor\":[1]}", "\"anchor\" without \"positive\""},
    {"{\"positive\":[1]}", "\"positive\" without \"anchor\""},
    {"{\"negative\":[1]}", "without \"anchor\""},
    {"{\"anchor\":[1],\"positive\":[]}", "\"positive\" is empty"},
    {"{\"anchor\":[1],\"positive\":[2],\"negative\":[]}", "\"negative\" is empty"},
    {"{\"anchor\":[1],\"positive\":[2],\"negative\":[[3],[]]}", "\"negative\" is empty"},
    {"{\"anchor\":[1],\"positive\":[2],\"negative\":[[3],[4]}", "\"negative\" has no closing bracket"},
    {"{\"anchor\":[1],\"positive\":[2],\"sentence1\":[3]}", "beside \"sentence1\""},
    {"{\"anchor\":[1],\"positive\":[2],\"input_ids\":[3]}", "\"input_ids\" beside an example"},
    {"{\"sentence1\":[1],\"sentence2\":[2]}", "no \"score\""},
    {"{\"sentence1\":[1],\"score\":2}", "\"sentence1\" without \"sentence2\""},
    {"{\"input_ids\":[1,\"a\"]}", "not an integer"},
    {"{\"input_ids\":[1.0]}", "not an integer"},
    {"{\"input_ids\":[1e3]}", "not an integer"},
    {"{\"input_ids\":[01]}", "not an integer"},
    {"{\"input_ids\":[2147483648]}", "32-bit"},
    {"{\"input_ids\":[99999999999999999999]}", "32-bit"},
    {"{\"input_ids\":[-1]}", "-1"},
    {"{\"input_ids\":[1,2", "closing bracket"},
    {"{\"input_ids\":[1,]}", "not an integer"},
    {"{\"input_ids\":[1],\"input_ids\":[1]}", "twice"},
    {"{\"input_ids\":[1,2],\"labels\":[1]}", "1 labels for 2 input_ids"},
    {"{\"input_ids\":[1,2],\"labels\":[1,-5]}", "-5"},
    {"{\"input_ids\":[1,2],\"labels\":[1,2],\"prompt_length\":1}", "both"},
    {"{\"input_ids\":[1,2],\"prompt_length\":3}", "prompt_length"},
    {"{\"input_ids\":[1,2],\"prompt_length\":-1}", "prompt_length"},
    {"{\"chosen\":[1],\"rejected\":[2]}", "--loss dpo"},
    {"{\"input_ids\":[1],\"x\":\"\\q\"}", "escape"},
    {"{\"input_ids\":[1],\"x\":\"abc}", "without an end"},
    {"{\"input_ids\":[1],\"x\":tru}", "not valid JSON"},
    {"{\"input_ids\":[1],\"x\":{\"a\" 1}}", "not valid JSON"},
    {"{\"input_ids\" [1]}", "not a JSON object"},
    {"{\"input_ids\":[1]", "not a JSON object"},
};

static void test_bad_lines(void **state) {
  io_fixture *fixture = *state;
  for (size_t i = 0; i < EGI_COUNT(bad_lines); i++) {
    egi_documents *documents = NULL;
    const char *path = io_write(fixture, "data.jsonl", bad_lines[i].text, strlen(bad_lines[i].text));
    assert_int_equal(egi_documents_read_jsonl(fixture->ctx, path, 0, &documents), EG_ERROR_DATA);
    assert_null(documents);
    io_expect_error(fixture, bad_lines[i].part);
    io_expect_error(fixture, "data.jsonl");
  }
}

static void test_deep_nesting(void **state) {
  io_fixture *fixture = *state;
  static char text[100100];
  egi_documents *documents = NULL;
  size_t length = (size_t)snprintf(text, sizeof text, "{\"input_ids\":[1],\"x\":");
  memset(text + length, '[', 100000);
  const char *path = io_write(fixture, "data.jsonl", text, length + 100000);
  assert_int_equal(egi_documents_read_jsonl(fixture->ctx, path, 0, &documents), EG_ERROR_DATA);
  io_expect_error(fixture, "too deeply");
}

static void test_text(void **state) {
  io_fixture *fixture = *state;
  egi_documents *d;
  const char *path = io_write(fixture, "text.txt", "abc\xff\n", 5);
  assert_int_equal(egi_documents_read_text(fixture->ctx, path, 2, &d), EG_OK);
  static const int32_t tokens[] = {'a', 'b', 'c', 255, '\n'};
  assert_int_equal(d->n_documents, 3);
  assert_memory_equal(d->tokens, tokens, sizeof tokens);
  assert_int_equal(d->labels[2], -100);
  assert_int_equal(d->labels[3], 255);
  assert_int_equal(d->n_targets, 2);
  egi_documents_free(d);
  io_write(fixture, "text.txt", "", 0);
  assert_int_equal(egi_documents_read_text(fixture->ctx, path, 2, &d), EG_ERROR_DATA);
  io_expect_error(fixture, "empty");
}

static const char *write_tokens(io_fixture *fixture, const int64_t *offsets, int64_t n_offsets, int64_t mask_length) {
  static const int32_t tokens[5] = {3, 1, 4, 1, 5};
  static const uint8_t mask[6] = {1, 1, 0, 1, 1, 1};
  egi_safetensor tensors[] = {{.name = "tokens",
                               .dtype = EG_DTYPE_I32,
                               .rank = 1,
                               .dims = {5},
                               .data = (const uint8_t *)tokens,
                               .size_bytes = sizeof tokens},
                              {.name = "document_offsets",
                               .dtype = EG_DTYPE_I64,
                               .rank = 1,
                               .dims = {n_offsets},
                               .data = (const uint8_t *)offsets,
                               .size_bytes = (uint64_t)n_offsets * 8},
                              {.name = "loss_mask",
                               .dtype = EG_DTYPE_U8,
                               .rank = 1,
                               .dims = {mask_length},
                               .data = mask,
                               .size_bytes = (uint64_t)mask_length}};
  snprintf(fixture->path, sizeof fixture->path, "%s/a.safetensors", fixture->directory);
  assert_int_equal(egi_safetensors_write(fixture->ctx, fixture->path, tensors, mask_length >= 0 ? 3 : 2), EG_OK);
  return fixture->path;
}

static void test_token_file(void **state) {
  io_fixture *fixture = *state;
  static const int64_t offsets[] = {0, 2, 5};
  egi_documents *d;
  const char *path = write_tokens(fixture, offsets, 3, 5);
  assert_int_equal(egi_documents_read_safetensors(fixture->ctx, path, 0, &d), EG_OK);
  static const int32_t labels[] = {-100, 1, -100, 1, 5};
  assert_int_equal(d->n_documents, 2);
  assert_memory_equal(d->labels, labels, sizeof labels);
  egi_documents_free(d);

  static const int64_t bad[][3] = {{1, 2, 5}, {0, 2, 4}, {0, 6, 5}, {0, 0, 5}, {0, -2, 5}};
  for (size_t i = 0; i < EGI_COUNT(bad); i++) {
    path = write_tokens(fixture, bad[i], 3, 5);
    assert_int_equal(egi_documents_read_safetensors(fixture->ctx, path, 0, &d), EG_ERROR_DATA);
    io_expect_error(fixture, "document_offsets");
  }
  path = write_tokens(fixture, offsets, 3, 6);
  assert_int_equal(egi_documents_read_safetensors(fixture->ctx, path, 0, &d), EG_ERROR_DATA);
  io_expect_error(fixture, "loss_mask");
}

static void test_copy(void **state) {
  io_fixture *fixture = *state;
  int32_t ids[] = {1, 2, 3}, labels[] = {1, -100, 3}, bad[] = {1, -2, 3};
  eg_document documents[] = {{ids, NULL, 3}, {ids, labels, 3}};
  egi_documents *d;
  assert_int_equal(egi_documents_copy(fixture->ctx, documents, 2, &d), EG_OK);
  static const int32_t wanted[] = {-100, 2, 3, 1, -100, 3};
  assert_memory_equal(d->labels, wanted, sizeof wanted);
  egi_documents_free(d);
  documents[1].labels = bad;
  assert_int_equal(egi_documents_copy(fixture->ctx, documents, 2, &d), EG_ERROR_DATA);
  io_expect_error(fixture, "document 2, position 2");
  assert_int_equal(egi_documents_copy(fixture->ctx, documents, 0, &d), EG_ERROR_DATA);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_lines, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_numbers, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_examples, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_cut, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_bad_lines, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_deep_nesting, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_text, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_token_file, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_copy, io_setup, io_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
