/* The optimizers over 20 steps of given gradients: AdamW against PyTorch's (1e-6), in 8 bits against bitsandbytes' CUDA
 * kernel: tests/data/optimizer/adamw.safetensors, lr 1e-3, betas 0.9 and 0.999, eps 1e-8, weight decay 1e-2. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/blockwise.h"
#include "train/train.h"

enum { COUNT = 1024, STEPS = 20, BLOCKS = COUNT / 256 };

typedef struct fixture {
  eg_context *ctx;
  egi_safetensors *golden;
  egi_module *module;
  egi_graph *graph;
  const egi_backend *backend;
  egi_store *store;
  egi_plan *plan;
  egi_session *session;
} fixture;

static void must(const fixture *f, eg_status status) {
  if (status != EG_OK) fail_msg("%s", eg_context_error(f->ctx));
}

static const void *golden(const fixture *f, const char *name) {
  const egi_safetensor *tensor = egi_safetensors_find(f->golden, name);
  if (tensor == NULL) fail_msg("%s is not in the file", name);
  return tensor->data;
}

static int set_up(void **state) {
  fixture *f = calloc(1, sizeof *f);
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  if (f == NULL || eg_context_create(&options, &f->ctx) != EG_OK) return -1;
  *state = f;
  return egi_safetensors_open(f->ctx, EGI_TEST_DATA "/optimizer/adamw.safetensors", &f->golden) == EG_OK ? 0 : -1;
}

static int tear_down(void **state) {
  fixture *f = *state;
  egi_session_destroy(f->session);
  egi_plan_destroy(f->plan);
  egi_store_destroy(f->store);
  egi_module_destroy(f->module);
  egi_safetensors_close(f->golden);
  eg_context_destroy(f->ctx);
  free(f);
  return 0;
}

static egi_value_id add_pool(fixture *f, egi_state_pool pool, uint64_t elements) {
  uint32_t state;
  egi_value_id value;
  f->module->pool_elements[pool] = elements;
  must(f, egi_module_add_pool_state(f->module, pool, &state));
  must(f, egi_graph_add_state(f->graph, state, &value));
  return value;
}

static void emit(fixture *f, bool is_8bit, bool has_floor, const egi_value_id inputs[6]) {
  static const int64_t start = 0, size = COUNT;
  static const float one = 1.0f;
  egi_emitter emitter = {.graph = f->graph};
  const egi_attribute attributes[] = {egi_attribute_ints("starts", &start, 1),
                                      {.name = "decays", .kind = EGI_ATTRIBUTE_FLOATS, .count = 1, .u.floats = &one},
                                      {.name = "rates", .kind = EGI_ATTRIBUTE_FLOATS, .count = 1, .u.floats = &one},
                                      egi_attribute_ints("sizes", &size, 1),
                                      egi_attribute_ints("places", &start, 1),
                                      egi_attribute_int("smallest", 256),
                                      egi_attribute_int("floor", has_floor)};
  (void)egi_emit(&emitter, is_8bit ? EGI_OP_AdamW8bit : EGI_OP_AdamW, inputs, 6, attributes,
                 is_8bit ? EGI_COUNT(attributes) : 3);
  must(f, emitter.status);
  must(f, egi_graph_add_output(f->graph, inputs[5]));
  must(f, egi_graph_tidy(f->graph));
}

static void make(fixture *f, bool is_8bit, bool has_floor) {
  egi_value_id in[6];
  uint64_t n_states = is_8bit ? COUNT / 4 + BLOCKS : COUNT;
  egi_plan_options none = {.n_bindings = 0};
  f->backend = egi_backend_cpu();
  must(f, egi_module_create(f->ctx, &f->module));
  must(f, egi_module_add_graph(f->module, "optimizer", &f->graph));
  in[0] = add_pool(f, EGI_POOL_PARAMETERS, COUNT);
  in[1] = add_pool(f, EGI_POOL_GRADIENTS, COUNT);
  in[2] = add_pool(f, EGI_POOL_MOMENT1, n_states);
  in[3] = add_pool(f, EGI_POOL_MOMENT2, n_states);
  in[4] = add_pool(f, EGI_POOL_STEP, 0);
  egi_emitter emitter = {.graph = f->graph};
  in[5] = egi_emit(&emitter, EGI_OP_GradientNorm, (egi_value_id[2]){in[1], in[4]}, 2, NULL, 0);
  must(f, emitter.status);
  emit(f, is_8bit, has_floor, in);
  must(f, egi_plan_create(f->ctx, f->graph, f->backend, &none, &f->plan));
  must(f, egi_store_create(f->ctx, f->module, f->backend, &f->store));
  must(f, egi_store_make_pools(f->store));
  must(f, egi_session_create(f->store, f->plan, NULL, &f->session));
}

static void *pool(const fixture *f, egi_state_pool which) {
  return egi_store_pool(f->store, which);
}

static void step(fixture *f, int number, const float *gradients) {
  double t = number;
  const egi_step_state state = {.step = number,
                                .learning_rate = 1e-3f,
                                .weight_decay = 1e-2f,
                                .beta1 = 0.9f,
                                .beta2 = 0.999f,
                                .epsilon = 1e-8f,
                                .correction1 = (float)(1.0 - pow(0.9, t)),
                                .correction2 = (float)(1.0 - pow(0.999, t)),
                                .inverse_targets = 1.0f,
                                .loss_scale = 1.0f,
                                .has_gradients = 1,
                                .rest1 = 0.1f,
                                .rest2 = 0.001f};
  memcpy(pool(f, EGI_POOL_STEP), &state, sizeof state);
  memcpy(pool(f, EGI_POOL_GRADIENTS), gradients, COUNT * sizeof *gradients);
  must(f, egi_session_run(f->session));
}

static double distance(const float *a, const float *b) {
  double largest = 0.0;
  for (size_t i = 0; i < COUNT; i++) {
    double d = fabs((double)a[i] - (double)b[i]);
    if (!(d <= largest)) largest = d;
  }
  return largest;
}

static void test_adamw(void **state) {
  fixture *f = *state;
  const float *gradients = golden(f, "grads");
  make(f, false, true);
  memcpy(pool(f, EGI_POOL_PARAMETERS), golden(f, "adamw.p0"), COUNT * sizeof(float));
  for (int i = 0; i < STEPS; i++) step(f, i + 1, gradients + (size_t)i * COUNT);
  assert_true(distance(pool(f, EGI_POOL_PARAMETERS), golden(f, "adamw.p20")) <= 1e-6);
}

/* Codes that differ, and the largest distance of what codes and scales stand for. */
static void compare_states(const fixture *f, const char *when, int which, unsigned *out_differing, double *out_error) {
  char name[64];
  float map[256];
  const uint8_t *codes = pool(f, which == 1 ? EGI_POOL_MOMENT1 : EGI_POOL_MOMENT2);
  const float *scales = (const float *)(const void *)(codes + COUNT);
  snprintf(name, sizeof name, "%s.state%d", when, which);
  const uint8_t *wanted = golden(f, name);
  snprintf(name, sizeof name, "%s.absmax%d", when, which);
  const float *wanted_scales = golden(f, name);
  egi_dynamic_map(which == 1, map);
  *out_differing = 0;
  *out_error = 0.0;
  for (int i = 0; i < COUNT; i++) {
    double own = (double)map[codes[i]] * (double)scales[i / 256];
    double error = fabs(own - (double)map[wanted[i]] * (double)wanted_scales[i / 256]);
    *out_differing += codes[i] != wanted[i];
    if (!(error <= *out_error)) *out_error = error;
  }
}

/* bitsandbytes decays after the step and PyTorch before: a difference of rate² · decay a step and no more. */
static void test_8bit(void **state) {
  fixture *f = *state;
  const float *gradients = golden(f, "grads");
  unsigned n_differing;
  double error;
  make(f, true, false);
  memcpy(pool(f, EGI_POOL_PARAMETERS), golden(f, "adamw8bit.p0"), COUNT * sizeof(float));
  for (int i = 0; i < STEPS; i++) {
    step(f, i + 1, gradients + (size_t)i * COUNT);
    if (i > 0 && i < STEPS - 1) continue;
    for (int which = 1; which <= 2; which++) {
      compare_states(f, i == 0 ? "step1" : "step20", which, &n_differing, &error);
      assert_true(n_differing <= 2);
      assert_true(error <= 1e-6);
    }
  }
  assert_true(distance(pool(f, EGI_POOL_PARAMETERS), golden(f, "adamw8bit.p20")) <= 2e-6);
}

/* A second moment far below its block's largest: as a code it is 0, and the next step is the first moment by epsilon.
 */
static void test_floor(void **state) {
  fixture *f = *state;
  float gradients[COUNT];
  double moved[2];
  for (int has_floor = 0; has_floor < 2; has_floor++) {
    for (int i = 0; i < COUNT; i++) gradients[i] = i % 256 == 0 ? 1.0f : 1e-4f;
    make(f, true, has_floor);
    memset(pool(f, EGI_POOL_PARAMETERS), 0, COUNT * sizeof(float));
    step(f, 1, gradients);
    memset(gradients, 0, sizeof gradients);
    step(f, 2, gradients);
    moved[has_floor] = fabs((double)((const float *)pool(f, EGI_POOL_PARAMETERS))[1]);
    egi_session_destroy(f->session);
    egi_plan_destroy(f->plan);
    egi_store_destroy(f->store);
    egi_module_destroy(f->module);
    f->session = NULL, f->plan = NULL, f->store = NULL, f->module = NULL;
  }
  assert_true(moved[0] >= 1.0); /* the trap */
  assert_true(moved[1] <= 3e-3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_adamw, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_8bit, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_floor, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
