/* AdamW with states of 8 bits (Dettmers et al. 2022, arXiv:2110.02861), block by block of 256 elements of a parameter:
 * codes and scale become float32, the step is AdamW's, and what it leaves becomes codes again. Moments meet the
 * parameter before they are rounded. Blocks are independent: results do not depend on the number of threads. */
#include <math.h>

#include "backend/cpu/isa/isa.h"
#include "backend/cpu/optimizer.h"
#include "base/blockwise.h"

enum { BLOCK = 256, CHUNK = 64 * BLOCK };

/* A run of blocks of one parameter. */
typedef struct piece {
  uint32_t parameter;
  int64_t first, n; /* elements of it */
} piece;

typedef struct adamw_8bit_params {
  const int64_t *starts, *sizes, *places;
  const float *decays, *rates;
  int64_t smallest;
  bool has_floor;
  uint32_t n_parameters;
  piece *pieces;
  size_t n_pieces;
  float map1[256], map2[256];
} adamw_8bit_params;

typedef struct adamw_8bit_run {
  const adamw_8bit_params *params;
  const egi_kernel_call *call;
  float gradient_factor;
} adamw_8bit_run;

/* ---- prepare ---- */

static const float *read_floats(const egi_node *node, const char *name, uint32_t count) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  bool fits = attribute && attribute->kind == EGI_ATTRIBUTE_FLOATS && attribute->count == count;
  return fits ? attribute->u.floats : NULL;
}

static int64_t state_floats(const adamw_8bit_params *p, int64_t size) {
  return size < p->smallest ? size : (size + 3) / 4 + (size + BLOCK - 1) / BLOCK;
}

static bool read_attributes(const egi_node *node, adamw_8bit_params *p) {
  uint32_t n_sizes = 0, n_places = 0;
  p->starts = egi_node_ints(node, "starts", &p->n_parameters);
  p->sizes = egi_node_ints(node, "sizes", &n_sizes);
  p->places = egi_node_ints(node, "places", &n_places);
  p->decays = read_floats(node, "decays", p->n_parameters);
  p->rates = read_floats(node, "rates", p->n_parameters);
  p->smallest = egi_node_int(node, "smallest", 4096);
  p->has_floor = egi_node_int(node, "floor", 1) != 0;
  return p->starts && p->sizes && p->places && p->decays && p->rates && n_sizes == p->n_parameters &&
         n_places == p->n_parameters;
}

/* Every parameter and its states lie inside the pools. */
static bool fits(const egi_kernel_plan *plan, const adamw_8bit_params *p) {
  int64_t n = egi_tensor_count(&plan->inputs[0]), n_states = egi_tensor_count(&plan->inputs[2]);
  if (egi_tensor_count(&plan->inputs[1]) != n || egi_tensor_count(&plan->inputs[3]) != n_states) return false;
  for (uint32_t i = 0; i < p->n_parameters; i++) {
    if (p->starts[i] < 0 || p->sizes[i] < 0 || p->places[i] < 0) return false;
    if (p->sizes[i] > n || p->starts[i] > n - p->sizes[i]) return false;
    if (state_floats(p, p->sizes[i]) > n_states || p->places[i] > n_states - state_floats(p, p->sizes[i])) return false;
  }
  return true;
}

static eg_status cut_pieces(egi_kernel_plan *plan, adamw_8bit_params *p) {
  size_t count = 0;
  for (uint32_t i = 0; i < p->n_parameters; i++) count += (size_t)((p->sizes[i] + CHUNK - 1) / CHUNK);
  p->pieces = EGI_NEW(plan->arena, piece, count);
  if (!p->pieces) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < p->n_parameters; i++)
    for (int64_t first = 0; first < p->sizes[i]; first += CHUNK) {
      int64_t rest = p->sizes[i] - first;
      p->pieces[p->n_pieces++] = (piece){i, first, rest < CHUNK ? rest : CHUNK};
    }
  return EG_OK;
}

eg_status egi_cpu_prepare_adamw_8bit(egi_kernel_plan *plan) {
  adamw_8bit_params *p = EGI_NEW(plan->arena, adamw_8bit_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < 4; i++)
    if (plan->inputs[i].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  if (plan->inputs[5].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  if (!read_attributes(egi_plan_node(plan), p) || !fits(plan, p))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "states and parameters do not fit each other");
  egi_dynamic_map(true, p->map1);
  egi_dynamic_map(false, p->map2);
  plan->params = p;
  EG_TRY(cut_pieces(plan, p));
  return egi_check_step(plan, 4);
}

/* ---- run ---- */

/* Codes of bitsandbytes' kernel: a first moment keeps its sign, if need be by the code next to the nearest. */
static void encode(const adamw_8bit_params *p, float *const moments[2], size_t n, uint8_t *const codes[2],
                   float *const scales[2]) {
  *scales[0] = egi_dynamic_encode(p->map1, moments[0], n, codes[0]);
  *scales[1] = egi_dynamic_encode(p->map2, moments[1], n, codes[1]);
  for (size_t i = 0; i < n; i++) {
    if (signbit(p->map1[codes[0][i]]) != signbit(moments[0][i]))
      codes[0][i] = (uint8_t)(moments[0][i] > 0 ? codes[0][i] + 1 : codes[0][i] - 1);
    if (p->has_floor && codes[1][i] == 0 && moments[1][i] > 0) codes[1][i] = 1;
  }
}

static void update(const adamw_8bit_run *run, uint32_t parameter, int64_t first, int64_t n, float *const moments[2]) {
  const adamw_8bit_params *p = run->params;
  const egi_adamw_piece chunk = {.start = p->starts[parameter] + first,
                                 .n = n,
                                 .moments = {moments[0], moments[1]},
                                 .rate = p->rates[parameter],
                                 .decay = p->decays[parameter],
                                 .gradient_factor = run->gradient_factor};
  egi_adamw_update(run->call, &chunk);
}

static void run_blocks(const adamw_8bit_run *run, const piece *part) {
  const adamw_8bit_params *p = run->params;
  int64_t size = p->sizes[part->parameter], place = p->places[part->parameter];
  for (int64_t first = part->first; first < part->first + part->n; first += BLOCK) {
    size_t n = (size_t)(size - first < BLOCK ? size - first : BLOCK);
    float values[2][BLOCK], *const moments[2] = {values[0], values[1]}, *scales[2];
    uint8_t *codes[2];
    for (int k = 0; k < 2; k++) {
      float *state = (float *)run->call->inputs[2 + k].data + place;
      const float *map = k == 0 ? p->map1 : p->map2;
      codes[k] = (uint8_t *)state + first;
      scales[k] = state + (size + 3) / 4 + first / BLOCK;
      for (size_t i = 0; i < n; i++) values[k][i] = map[codes[k][i]] * *scales[k];
    }
    update(run, part->parameter, first, (int64_t)n, moments);
    encode(p, moments, n, codes, scales);
  }
}

static void run_piece(void *argument, size_t index, size_t worker) {
  const adamw_8bit_run *run = argument;
  const adamw_8bit_params *p = run->params;
  const piece *part = &p->pieces[index];
  (void)worker;
  if (p->sizes[part->parameter] >= p->smallest) {
    run_blocks(run, part);
    return;
  }
  int64_t place = p->places[part->parameter] + part->first;
  float *const moments[2] = {(float *)run->call->inputs[2].data + place, (float *)run->call->inputs[3].data + place};
  update(run, part->parameter, part->first, part->n, moments);
}

eg_status egi_cpu_run_adamw_8bit(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const adamw_8bit_params *p = call->params;
  const float *norm = call->inputs[5].data;
  if (!isfinite(*norm)) return EG_OK; /* the caller sees the norm and reports it; nothing has moved */
  adamw_8bit_run run = {p, call, egi_gradient_factor(call->inputs[4].data, *norm)};
  egi_pool_run(call->pool, p->n_pieces, run_piece, &run);
  return EG_OK;
}
