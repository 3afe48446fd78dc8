/* PEFT folders: what is read, what is refused by key, and what is written. */
#include "support_io.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void write_tensors(io_fixture *fixture) {
  static const float a[2] = {1, 2};
  egi_safetensor tensor = {.name = "base_model.model.m.lora_A.weight",
                           .dtype = EG_DTYPE_F32,
                           .rank = 2,
                           .dims = {1, 2},
                           .data = (const uint8_t *)a,
                           .size_bytes = sizeof a};
  char path[256];
  snprintf(path, sizeof path, "%s/adapter_model.safetensors", fixture->directory);
  assert_int_equal(egi_safetensors_write(fixture->ctx, path, &tensor, 1), EG_OK);
}

static eg_status open_config(io_fixture *fixture, const char *config, egi_peft **out_peft) {
  io_write(fixture, "adapter_config.json", config, strlen(config));
  return egi_peft_open(fixture->ctx, fixture->directory, out_peft);
}

static bool is_near(double a, double b) {
  return fabs(a - b) <= 1e-12;
}

static void test_read(void **state) {
  io_fixture *fixture = *state;
  egi_peft *peft;
  write_tensors(fixture);
  assert_int_equal(
      open_config(fixture,
                  "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,\"lora_dropout\":0.05,\"bias\":\"none\","
                  "\"target_modules\":[\"q_proj\",\"v_proj\"],\"modules_to_save\":null,\"use_dora\":false,"
                  "\"rank_pattern\":{\"a.q_proj\":16},\"alpha_pattern\":{\"q_proj\":32},\"from_2031\":1}",
                  &peft),
      EG_OK);
  assert_int_equal(peft->config.rank, 4);
  assert_true(is_near(peft->config.alpha, 8.0));
  assert_true(is_near(peft->config.dropout, 0.05));
  assert_string_equal(peft->config.targets, "q_proj,v_proj");
  assert_int_equal(egi_peft_rank(&peft->config, "m.a.q_proj"), 16);
  assert_int_equal(egi_peft_rank(&peft->config, "m.ba.q_proj"), 4);
  assert_true(is_near(egi_peft_scale(&peft->config, "m.a.q_proj"), 2.0));
  assert_true(is_near(egi_peft_scale(&peft->config, "m.b.q_proj"), 8.0));
  assert_true(is_near(egi_peft_scale(&peft->config, "m.b.v_proj"), 2.0));
  assert_non_null(strstr(fixture->warning, "from_2031"));
  assert_int_equal(egi_safetensors_count(peft->tensors), 1);
  egi_peft_close(peft);

  assert_int_equal(open_config(fixture,
                               "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,\"use_rslora\":true,"
                               "\"target_modules\":\"all-linear\"}",
                               &peft),
                   EG_OK);
  assert_string_equal(peft->config.targets, "all-linear");
  assert_true(is_near(egi_peft_scale(&peft->config, "x"), 4.0));
  egi_peft_close(peft);

  assert_int_equal(open_config(fixture, "{\"peft_type\":\"LORA\",\"target_modules\":\".*q_proj\"}", &peft), EG_OK);
  assert_null(peft->config.targets);
  egi_peft_close(peft);
  assert_int_equal(
      open_config(fixture, "{\"peft_type\":\"LORA\",\"target_modules\":[\"q\"],\"layers_to_transform\":[0]}", &peft),
      EG_OK);
  assert_null(peft->config.targets);
  egi_peft_close(peft);
}

typedef struct bad_config {
  const char *text, *part;
} bad_config;

static const bad_config bad_configs[] = {
    {"{}", "peft_type"},
    {"[]", "not a JSON object"},
    {"{\"peft_type\":\"LORA\"", "line"},
    {"{\"peft_type\":\"IA3\"}", "IA3"},
    {"{\"peft_type\":\"LORA\",\"peft_type\":\"LORA\"}", "uplicate"},
    {"{\"peft_type\":\"LORA\",\"use_dora\":true}", "use_dora"},
    {"{\"peft_type\":\"LORA\",\"bias\":\"all\"}", "bias"},
    {"{\"peft_type\":\"LORA\",\"lora_bias\":true}", "lora_bias"},
    {"{\"peft_type\":\"LORA\",\"modules_to_save\":\"lm_head\"}", "modules_to_save"},
    {"{\"peft_type\":\"LORA\",\"modules_to_save\":[\"lm_head\"],\"ensure_weight_tying\":true}", "ensure_weight_tying"},
    {"{\"peft_type\":\"LORA\",\"trainable_token_indices\":[1]}", "trainable_token_indices"},
    {"{\"peft_type\":\"LORA\",\"target_parameters\":\"mlp.experts.down_proj\"}", "target_parameters"},
    {"{\"peft_type\":\"LORA\",\"target_parameters\":[2]}", "target_parameters"},
    {"{\"peft_type\":\"LORA\",\"target_parameters\":[\"x\"],\"lora_dropout\":0.5}", "lora_dropout"},
    {"{\"peft_type\":\"LORA\",\"layer_replication\":[[0,2]]}", "layer_replication"},
    {"{\"peft_type\":\"LORA\",\"init_lora_weights\":\"pissa\"}", "pissa"},
    {"{\"peft_type\":\"LORA\",\"rank_pattern\":{\"(q.*\":2}}", "rank_pattern"},
    {"{\"peft_type\":\"LORA\",\"alpha_pattern\":{\"q\":\"x\"}}", "alpha_pattern"},
    {"{\"peft_type\":\"LORA\",\"rank_pattern\":[1]}", "rank_pattern"},
    {"{\"peft_type\":\"LORA\",\"r\":0}", "\"r\""},
    {"{\"peft_type\":\"LORA\",\"r\":\"4\"}", "\"r\""},
    {"{\"peft_type\":\"LORA\",\"lora_alpha\":\"x\"}", "lora_alpha"},
    {"{\"peft_type\":\"LORA\",\"use_rslora\":1}", "use_rslora"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":[]}", "target_modules"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":[1]}", "target_modules"},
};

static void test_refused(void **state) {
  io_fixture *fixture = *state;
  write_tensors(fixture);
  for (size_t i = 0; i < EGI_COUNT(bad_configs); i++) {
    egi_peft *peft = NULL;
    eg_status status = open_config(fixture, bad_configs[i].text, &peft);
    assert_true(status == EG_ERROR_FORMAT || status == EG_ERROR_UNSUPPORTED);
    assert_null(peft);
    io_expect_error(fixture, bad_configs[i].part);
    io_expect_error(fixture, "adapter_config.json");
  }
}

static void test_missing_files(void **state) {
  io_fixture *fixture = *state;
  egi_peft *peft = NULL;
  assert_int_equal(egi_peft_open(fixture->ctx, fixture->directory, &peft), EG_ERROR_IO);
  io_expect_error(fixture, "adapter_config.json");
  assert_int_equal(open_config(fixture, "{\"peft_type\":\"LORA\"}", &peft), EG_ERROR_IO);
  io_expect_error(fixture, "adapter_model.safetensors");
  io_write(fixture, "adapter_model.bin", "x", 1);
  assert_int_equal(egi_peft_open(fixture->ctx, fixture->directory, &peft), EG_ERROR_UNSUPPORTED);
  io_expect_error(fixture, "adapter_model.bin");
}

static void test_write(void **state) {
  io_fixture *fixture = *state;
  static const float a[2] = {1, 2};
  static const egi_peft_pattern ranks[] = {{"x.q_proj", 3, NULL}};
  egi_safetensor tensor = {.name = "base_model.model.m.lora_A.weight",
                           .dtype = EG_DTYPE_F32,
                           .rank = 2,
                           .dims = {1, 2},
                           .data = (const uint8_t *)a,
                           .size_bytes = sizeof a};
  egi_peft_config config = {.rank = 2,
                            .alpha = 2.5,
                            .use_rslora = true,
                            .targets = "q_proj,o\"x",
                            .parameters = "mlp.experts.gate_up_proj,experts.down_proj",
                            .base_model = "b",
                            .ranks = ranks,
                            .n_ranks = 1};
  egi_peft *peft;
  assert_int_equal(egi_peft_write(fixture->ctx, fixture->directory, &config, &tensor, 1), EG_OK);
  assert_int_equal(egi_peft_open(fixture->ctx, fixture->directory, &peft), EG_OK);
  assert_string_equal(fixture->warning, "");
  assert_int_equal(peft->config.rank, 2);
  assert_true(is_near(peft->config.alpha, 2.5));
  assert_true(peft->config.use_rslora);
  assert_string_equal(peft->config.targets, "q_proj,o\"x");
  assert_string_equal(peft->config.parameters, "mlp.experts.gate_up_proj,experts.down_proj");
  assert_string_equal(peft->config.base_model, "b");
  assert_int_equal(egi_peft_rank(&peft->config, "x.q_proj"), 3);
  assert_memory_equal(egi_safetensors_at(peft->tensors, 0)->data, a, sizeof a);
  egi_peft_close(peft);

  config.targets = ""; /* experts alone */
  assert_int_equal(egi_peft_write(fixture->ctx, fixture->directory, &config, &tensor, 1), EG_OK);
  assert_int_equal(egi_peft_open(fixture->ctx, fixture->directory, &peft), EG_OK);
  assert_null(peft->config.targets);
  assert_non_null(peft->config.parameters);
  egi_peft_close(peft);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_read, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_refused, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_missing_files, io_setup, io_teardown),
      cmocka_unit_test_setup_teardown(test_write, io_setup, io_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
