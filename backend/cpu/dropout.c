/* Dropout (operator version 22) as ONNX's reference draws it: numpy's Mersenne twister, element after element, from the
 * node's seed. And engraft.Dropout, which training draws with: Philox4x32-10, so that an element's number follows from
 * seed, step, site and place alone, whoever asks for it and however often. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

#include <string.h>

/* ---- ONNX's ----------------------------------------------------------------------------------------------------- */

/* MT19937 (Matsumoto and Nishimura, 1998). */
enum { TWISTER_WORDS = 624, TWISTER_SHIFT = 397 };
typedef struct twister {
  uint32_t words[TWISTER_WORDS];
  unsigned next;
} twister;

static void twister_seed(twister *t, uint32_t seed) {
  t->words[0] = seed;
  for (uint32_t i = 1; i < TWISTER_WORDS; i++)
    t->words[i] = 1812433253u * (t->words[i - 1] ^ (t->words[i - 1] >> 30)) + i;
  t->next = TWISTER_WORDS;
}

static void twister_refill(twister *t) {
  for (unsigned i = 0; i < TWISTER_WORDS; i++) {
    uint32_t word = (t->words[i] & 0x80000000u) | (t->words[(i + 1) % TWISTER_WORDS] & 0x7fffffffu);
    t->words[i] = t->words[(i + TWISTER_SHIFT) % TWISTER_WORDS] ^ (word >> 1) ^ ((word & 1) != 0 ? 0x9908b0dfu : 0);
  }
  t->next = 0;
}

static uint32_t twister_draw(twister *t) {
  if (t->next == TWISTER_WORDS) twister_refill(t);
  uint32_t word = t->words[t->next++];
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

/* In [0, 1), of 53 bits. */
static double twister_uniform(twister *t) {
  uint32_t high = twister_draw(t) >> 5, low = twister_draw(t) >> 6;
  return ((double)high * 67108864.0 + (double)low) / 9007199254740992.0;
}

static bool has_truth(const egi_tensor *tensor) {
  return *(const uint8_t *)tensor->data != 0;
}

static double ratio_of(const egi_tensor *inputs, unsigned n_inputs) {
  if (n_inputs < 2 || inputs[1].dtype == EG_DTYPE_UNDEFINED) return 0.5;
  return egi_number_get(inputs[1].data, inputs[1].dtype, 0);
}

eg_status egi_cpu_prepare_dropout(egi_kernel_plan *plan) {
  uint32_t *seed = EGI_NEW(plan->arena, uint32_t, 1);
  if (seed == NULL) return EG_ERROR_MEMORY;
  for (unsigned i = 1; i < plan->n_inputs; i++)
    if (egi_plan_has_input(plan, i) && egi_tensor_count(&plan->inputs[i]) != 1) return egi_fail_types(plan);
  if (egi_element_bytes(plan->inputs[0].dtype) == 0) return egi_fail_types(plan);
  *seed = (uint32_t)egi_node_int(&plan->graph->nodes[plan->node], "seed", plan->node);
  plan->params = seed;
  return EG_OK;
}

typedef struct places {
  egi_rows x, y, mask;
  bool has_mask;
} places;

static void drop_all(const egi_kernel_call *call, double ratio, uint32_t seed) {
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  places p = {.has_mask = call->n_outputs > 1 && call->outputs[1].dtype != EG_DTYPE_UNDEFINED};
  static const egi_narrowing nearest = {true, EGI_ROUND_NEAREST};
  twister random;
  double scale = 1.0 / (1.0 - ratio);
  egi_rows_init(&p.x, in, in->rank);
  egi_rows_init(&p.y, out, out->rank);
  if (p.has_mask) egi_rows_init(&p.mask, &call->outputs[1], call->outputs[1].rank);
  twister_seed(&random, seed);
  for (int64_t i = 0; i < p.x.count; i++) {
    bool is_kept = twister_uniform(&random) >= ratio;
    double value = egi_number_get(egi_rows_at(&p.x, in->data, i), in->dtype, 0);
    egi_number_set(egi_rows_at(&p.y, out->data, i), out->dtype, 0, is_kept ? value * scale : 0.0 * value, &nearest);
    if (p.has_mask) *(uint8_t *)egi_rows_at(&p.mask, call->outputs[1].data, i) = is_kept;
  }
}

eg_status egi_cpu_run_dropout(eg_context *ctx, const egi_kernel_call *call) {
  bool is_training = egi_call_has_input(call, 2) && has_truth(&call->inputs[2]);
  double ratio = ratio_of(call->inputs, call->n_inputs);
  static const uint8_t truth = 1;
  if (!(ratio >= 0.0 && ratio < 1.0) && is_training)
    return egi_fail(ctx, EG_ERROR_DATA, "a dropout with a ratio of %g, which is not in [0, 1)", ratio);
  if (is_training && ratio > 0.0) {
    drop_all(call, ratio, *(const uint32_t *)call->params);
    return EG_OK;
  }
  egi_copy(call->pool, &call->outputs[0], &call->inputs[0]);
  if (call->n_outputs > 1 && call->outputs[1].dtype != EG_DTYPE_UNDEFINED)
    egi_fill(call->pool, &call->outputs[1], &truth);
  return EG_OK;
}

/* ---- engraft's -------------------------------------------------------------------------------------------------- */

enum { ROUNDS = 10, LANES = 4 };

/* Philox4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011). */
static void philox(uint32_t counter[LANES], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < ROUNDS; round++) {
    uint64_t a = (uint64_t)counter[0] * 0xd2511f53u, b = (uint64_t)counter[2] * 0xcd9e8d57u;
    uint32_t next0 = (uint32_t)(b >> 32) ^ counter[1] ^ key0, next2 = (uint32_t)(a >> 32) ^ counter[3] ^ key1;
    counter[1] = (uint32_t)b;
    counter[3] = (uint32_t)a;
    counter[0] = next0;
    counter[2] = next2;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

typedef struct keyed {
  egi_rows x, y;
  uint32_t key[2], site, threshold; /* numbers below the threshold drop */
  double scale;
  int64_t rows_per_task;
  size_t row_bytes;
} keyed;

eg_status egi_cpu_prepare_keyed_dropout(egi_kernel_plan *plan) {
  const egi_node *node = &plan->graph->nodes[plan->node];
  const egi_tensor *x = &plan->inputs[0], *step = &plan->inputs[1];
  double ratio = (double)egi_node_float(node, "ratio", 0.0F);
  uint64_t seed = (uint64_t)egi_node_int(node, "seed", 0);
  keyed *k = EGI_NEW(plan->arena, keyed, 1);
  if (k == NULL) return EG_ERROR_MEMORY;
  if ((x->dtype != EG_DTYPE_F32 && x->dtype != EG_DTYPE_F64) || step->dtype != EG_DTYPE_U8 || step->rank != 1)
    return egi_fail_types(plan);
  if (egi_tensor_count(step) < (int64_t)sizeof(egi_step_state))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "the step state is too short");
  if (!(ratio >= 0.0 && ratio < 1.0))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_DATA, "a ratio of %g is not in [0, 1)", ratio);
  int axis = x->rank > 0 ? x->rank - 1 : 0;
  egi_rows_init(&k->x, x, axis);
  egi_rows_init(&k->y, &plan->outputs[0], axis);
  k->key[0] = (uint32_t)seed;
  k->key[1] = (uint32_t)(seed >> 32);
  k->site = (uint32_t)egi_node_int(node, "site", 0);
  k->threshold = (uint32_t)(ratio * 4294967296.0);
  k->scale = 1.0 / (1.0 - ratio);
  k->rows_per_task = egi_rows_per_task(k->x.length);
  k->row_bytes = ((size_t)k->x.length * k->x.element_bytes + 63) / 64 * 64;
  plan->workspace_bytes = 2 * k->row_bytes * egi_pool_size(egi_context_pool(plan->ctx));
  plan->params = k;
  return EG_OK;
}

static void drop_row(const keyed *k, const egi_step_state *step, int64_t row, const void *in, void *out) {
  uint32_t numbers[LANES];
  bool is_wide = k->x.element_bytes == sizeof(double);
  for (int64_t i = 0; i < k->x.length; i++) {
    uint64_t element = (uint64_t)(row * k->x.length + i);
    if (i == 0 || element % LANES == 0) {
      numbers[0] = (uint32_t)(element / LANES);
      numbers[1] = k->site;
      numbers[2] = (uint32_t)step->step;
      numbers[3] = (uint32_t)step->micro_batch;
      philox(numbers, k->key[0], k->key[1]);
    }
    bool is_kept = numbers[element % LANES] >= k->threshold;
    if (is_wide)
      ((double *)out)[i] = is_kept ? ((const double *)in)[i] * k->scale : 0.0;
    else
      ((float *)out)[i] = is_kept ? ((const float *)in)[i] * (float)k->scale : 0.0F;
  }
}

/* The state may lie in a larger tensor, byte by byte. */
static egi_step_state read_step(const egi_tensor *tensor) {
  uint8_t bytes[sizeof(egi_step_state)];
  egi_step_state step;
  for (size_t i = 0; i < sizeof bytes; i++)
    bytes[i] = *((const uint8_t *)tensor->data + (int64_t)i * tensor->strides[tensor->rank - 1]);
  memcpy(&step, bytes, sizeof step);
  return step;
}

static void drop_rows(void *argument, size_t index, size_t worker) {
  const egi_kernel_call *call = argument;
  const egi_step_state step = read_step(&call->inputs[1]);
  const keyed *k = call->params;
  char *buffer = (char *)call->workspace + 2 * worker * k->row_bytes;
  int64_t row = (int64_t)index * k->rows_per_task, end = row + k->rows_per_task;
  for (; row < end && row < k->x.count; row++) {
    const void *in = egi_rows_load(&k->x, &call->inputs[0], row, buffer);
    void *out = egi_rows_target(&k->y, &call->outputs[0], row, buffer + k->row_bytes);
    drop_row(k, &step, row, in, out);
    egi_rows_store(&k->y, &call->outputs[0], row, out);
  }
}

eg_status egi_cpu_run_keyed_dropout(eg_context *ctx, const egi_kernel_call *call) {
  const keyed *k = call->params;
  egi_kernel_call shared = *call;
  (void)ctx;
  egi_pool_run(call->pool, (size_t)((k->x.count + k->rows_per_task - 1) / k->rows_per_task), drop_rows, &shared);
  return EG_OK;
}
