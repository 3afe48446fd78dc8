/* Where the time of a training step goes, and what the device can do: for `engraft bench`. */
#include "train/train.h"

#include <string.h>

eg_status egi_trainer_profile(eg_trainer *trainer, egi_arena *arena, egi_step_profile *out_profile) {
  egi_lane *lane;
  egi_step_profile profile = {.seconds = 0.0};
  const egi_documents *documents = trainer->dataset->documents;
  EG_TRY(
      egi_lanes_fill(&trainer->lanes, documents, &trainer->batches[trainer->next_batch % trainer->n_batches], &lane));
  egi_session *const sessions[EGI_PROFILED] = {lane->session, trainer->optimizer_session};
  const egi_plan *const plans[EGI_PROFILED] = {lane->plan, trainer->optimizer_plan};
  for (size_t i = 0; i < EGI_PROFILED; i++) {
    EG_TRY(egi_session_profile(sessions[i], &profile.measured[i]));
    EG_TRY(egi_plan_get_costs(plans[i], &trainer->device, arena, &profile.costs[i]));
    for (size_t op = 0; op <= EGI_OP_COUNT; op++) profile.seconds += profile.measured[i].seconds[op];
  }
  *out_profile = profile;
  return EG_OK;
}

/* ---- ceilings --------------------------------------------------------------------------------------------------- */

enum { PRODUCT_SIZE = 8192, N_RUNS = 10, BLOCK = 1 << 20 };
static const int64_t copied_floats = (int64_t)1 << 28;

typedef struct ceiling {
  eg_context *ctx;
  const egi_backend *backend;
  egi_module *module;
  egi_plan *plan;
  egi_store *store;
  egi_session *session;
} ceiling;

static void close_ceiling(ceiling *c) {
  egi_session_destroy(c->session);
  egi_store_destroy(c->store);
  egi_plan_destroy(c->plan);
  egi_module_destroy(c->module);
}

static eg_status open_ceiling(ceiling *c, const char *text) {
  egi_plan_options options = {.n_bindings = 0};
  EG_TRY(egi_module_parse(c->ctx, text, strlen(text), &c->module));
  EG_TRY(egi_infer_graph(c->module->graphs[0]));
  EG_TRY(egi_plan_create(c->ctx, c->module->graphs[0], c->backend, &options, &c->plan));
  EG_TRY(egi_store_create(c->ctx, c->module, c->backend, &c->store));
  return egi_session_create(c->store, c->plan, NULL, &c->session);
}

/* Normal numbers, a block of them again and again: the power that a product draws, and so its speed, depends on what
 * is multiplied. */
static eg_status fill_inputs(const ceiling *c, size_t n_bytes, egi_arena *arena) {
  uint16_t *numbers = EGI_NEW(arena, uint16_t, n_bytes / sizeof(uint16_t));
  size_t count = n_bytes / sizeof *numbers, block = count < BLOCK ? count : BLOCK;
  if (numbers == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < block; i++) numbers[i] = egi_f32_to_bf16((float)egi_random_normal(1, 2, i));
  for (size_t i = block; i < count; i++) numbers[i] = numbers[i - block];
  for (uint32_t i = 0; i < c->module->graphs[0]->n_inputs; i++)
    EG_TRY(egi_session_set_input(c->session, i, numbers, n_bytes));
  return EG_OK;
}

/* The fastest of some runs of the only node. */
static eg_status time_runs(const ceiling *c, egi_op op, double *out_seconds) {
  for (int i = 0; i < N_RUNS; i++) {
    egi_profile profile;
    EG_TRY(egi_session_profile(c->session, &profile));
    if (i == 0 || profile.seconds[op] < *out_seconds) *out_seconds = profile.seconds[op];
  }
  return EG_OK;
}

static eg_status measure(ceiling *c, const char *text, egi_op op, size_t n_bytes, double *out_seconds) {
  egi_arena arena;
  egi_arena_init(&arena, c->ctx, EGI_PURPOSE_DATA);
  eg_status status = open_ceiling(c, text);
  if (status == EG_OK) status = fill_inputs(c, n_bytes, &arena);
  if (status == EG_OK) status = time_runs(c, op, out_seconds);
  egi_arena_clear(&arena);
  close_ceiling(c);
  return status;
}

eg_status egi_measure_ceilings(eg_context *ctx, const egi_backend *backend, egi_ceilings *out_ceilings) {
  ceiling product = {.ctx = ctx, .backend = backend}, copy = product;
  double product_s = 0.0, copy_s = 0.0, size = PRODUCT_SIZE;
  EG_TRY(
      measure(&product,
              "<ir_version: 10, opset_import: [\"\" : 23]>\nproduct (bfloat16[8192,8192] a, bfloat16[8192,8192] b) => "
              "(bfloat16[8192,8192] c) { c = MatMul (a, b) }",
              EGI_OP_MatMul, (size_t)PRODUCT_SIZE * PRODUCT_SIZE * sizeof(uint16_t), &product_s));
  EG_TRY(measure(&copy,
                 "<ir_version: 10, opset_import: [\"\" : 23]>\ncopy (float[268435456] a) => (float[268435456] b) "
                 "{ b = Neg (a) }",
                 EGI_OP_Neg, (size_t)copied_floats * sizeof(float), &copy_s));
  out_ceilings->flops_per_s = 2.0 * size * size * size / product_s;
  out_ceilings->bytes_per_s = 2.0 * (double)copied_floats * sizeof(float) / copy_s;
  return EG_OK;
}
