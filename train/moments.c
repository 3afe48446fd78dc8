/* Where the optimizer's states of each parameter lie in their pools, and the node that updates them. AdamW's moments
 * are floats where the parameter is; in 8 bits those of parameters of 4096 elements and more are codes and scales, as
 * bitsandbytes holds them (optim/optimizer.py, min_8bit_size). */
#include "train/train.h"

enum { SMALLEST_8BIT = 4096, BLOCK = 256, PLACE_FLOATS = 16 };
/* Of moments in host memory: at least so many parts, of at most so many floats each. */
enum { FEWEST_PARTS = 8, LARGEST_PART = 1 << 22 };

static const egi_state *parameter_at(const eg_trainer *trainer, size_t index) {
  return &trainer->machine.module->states[trainer->parameters[index]];
}

bool egi_moments_are_codes(const eg_trainer *trainer, size_t index) {
  return trainer->options.optimizer == EG_OPTIMIZER_ADAMW_8BIT &&
         egi_state_count(parameter_at(trainer, index)) >= SMALLEST_8BIT;
}

uint64_t egi_moments_blocks(const eg_trainer *trainer, size_t index) {
  return (egi_state_count(parameter_at(trainer, index)) + BLOCK - 1) / BLOCK;
}

/* In floats: codes, then scales. */
static uint64_t floats_of(const eg_trainer *trainer, size_t index) {
  uint64_t count = egi_state_count(parameter_at(trainer, index));
  return egi_moments_are_codes(trainer, index) ? (count + 3) / 4 + egi_moments_blocks(trainer, index) : count;
}

eg_status egi_moments_place(eg_trainer *trainer) {
  egi_module *module = trainer->machine.module;
  uint64_t end = 0;
  trainer->moments = EGI_NEW(&trainer->arena, uint64_t, trainer->n_parameters);
  if (trainer->moments == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < trainer->n_parameters; i++) {
    trainer->moments[i] = parameter_at(trainer, i)->offset;
    if (trainer->options.optimizer != EG_OPTIMIZER_ADAMW_8BIT) continue;
    trainer->moments[i] = end;
    end = (end + floats_of(trainer, i) + PLACE_FLOATS - 1) / PLACE_FLOATS * PLACE_FLOATS;
  }
  if (trainer->options.optimizer != EG_OPTIMIZER_ADAMW_8BIT) end = module->pool_elements[EGI_POOL_PARAMETERS];
  module->pool_elements[EGI_POOL_MOMENT1] = module->pool_elements[EGI_POOL_MOMENT2] = end;
  module->is_pool_on_host[EGI_POOL_MOMENT1] = module->is_pool_on_host[EGI_POOL_MOMENT2] =
      trainer->options.offload_optimizer != 0;
  return EG_OK;
}

/* ---- the node ---- */

typedef struct segments {
  int64_t *starts, *sizes, *places;
  float *decays, *rates;
  uint32_t n;
} segments;

static bool is_equal(float a, float b) {
  return !(a < b) && !(a > b);
}

/* One for each parameter in 8 bits, else one for neighbours of equal decay and rate: with LoRA+ (Hayou et al., 2024) B
 * learns faster. */
static eg_status make_segments(const eg_trainer *trainer, segments *s) {
  egi_arena *arena = &trainer->machine.module->arena;
  size_t n = trainer->n_parameters;
  *s = (segments){EGI_NEW(arena, int64_t, n), EGI_NEW(arena, int64_t, n), EGI_NEW(arena, int64_t, n),
                  EGI_NEW(arena, float, n),   EGI_NEW(arena, float, n),   0};
  if (s->starts == NULL || s->sizes == NULL || s->places == NULL || s->decays == NULL || s->rates == NULL)
    return EG_ERROR_MEMORY;
  bool is_8bit = trainer->options.optimizer == EG_OPTIMIZER_ADAMW_8BIT;
  for (size_t i = 0; i < n; i++) {
    const egi_state *state = parameter_at(trainer, i);
    float decay = state->has_decay ? 1.0f : 0.0f;
    float rate = egi_has_suffix(state->name, ".lora_B.weight") ? (float)trainer->options.lora_plus : 1.0f;
    uint32_t last = s->n - 1;
    if (!is_8bit && s->n > 0 && is_equal(s->decays[last], decay) && is_equal(s->rates[last], rate)) continue;
    s->starts[s->n] = s->n > 0 || is_8bit ? (int64_t)state->offset : 0;
    s->sizes[s->n] = (int64_t)egi_state_count(state);
    s->places[s->n] = (int64_t)trainer->moments[i];
    s->decays[s->n] = decay;
    s->rates[s->n++] = rate;
  }
  return EG_OK;
}

static eg_status emit_node(const eg_trainer *trainer, egi_emitter *emitter, const segments *s,
                           const egi_value_id inputs[6], egi_value_id *out_parameters) {
  const egi_attribute attributes[] = {
      egi_attribute_ints("starts", s->starts, s->n),
      {.name = "decays", .kind = EGI_ATTRIBUTE_FLOATS, .count = s->n, .u.floats = s->decays},
      {.name = "rates", .kind = EGI_ATTRIBUTE_FLOATS, .count = s->n, .u.floats = s->rates},
      egi_attribute_ints("sizes", s->sizes, s->n),
      egi_attribute_ints("places", s->places, s->n),
      egi_attribute_int("smallest", SMALLEST_8BIT),
      egi_attribute_int("floor", trainer->options.no_moment_floor == 0)};
  bool is_8bit = trainer->options.optimizer == EG_OPTIMIZER_ADAMW_8BIT;
  *out_parameters = egi_emit(emitter, is_8bit ? EGI_OP_AdamW8bit : EGI_OP_AdamW, inputs, 6, attributes,
                             is_8bit ? EGI_COUNT(attributes) : 3);
  return emitter->status;
}

eg_status egi_moments_emit(const eg_trainer *trainer, egi_emitter *emitter, const egi_value_id inputs[6]) {
  segments s;
  egi_value_id ignored;
  EG_TRY(make_segments(trainer, &s));
  return emit_node(trainer, emitter, &s, inputs, &ignored);
}

/* ---- in host memory --------------------------------------------------------------------------------------------- */

/* Floats of parameters and gradients, and of moments, that are worked on at a time. */
typedef struct part {
  uint64_t first, n, moments, n_moments;
  segments s; /* counted from `first` and `moments` */
} part;

static segments part_segments(const segments *all, uint32_t first, uint32_t n) {
  return (segments){all->starts + first, all->sizes + first, all->places + first,
                    all->decays + first, all->rates + first, n};
}

/* Floats from `at` on, at most `size` of them: any number of AdamW's, whole parameters of codes. The lists of `all` are
 * used up: what lies in the part is counted from its start. */
static part cut_floats(const segments *all, uint32_t *next, uint64_t at, uint64_t end) {
  part p = {.first = at, .n = end - at, .moments = at, .n_moments = end - at};
  uint32_t last = *next;
  while (last + 1 < all->n && (uint64_t)all->starts[last + 1] < end) last++;
  p.s = part_segments(all, *next, last - *next + 1);
  *next = last;
  return p;
}

static part cut_parameters(const eg_trainer *trainer, const segments *all, uint32_t *next, uint64_t size) {
  const egi_module *module = trainer->machine.module;
  uint32_t first = *next, last = first;
  uint64_t begin = (uint64_t)all->places[first], end = begin;
  for (; last < all->n; last++) {
    end = last + 1 < all->n ? (uint64_t)all->places[last + 1] : module->pool_elements[EGI_POOL_MOMENT1];
    if (end - begin >= size) break;
  }
  if (last == all->n) last--;
  part p = {.first = (uint64_t)all->starts[first], .moments = begin, .n_moments = end - begin};
  p.n = (uint64_t)(all->starts[last] + all->sizes[last]) - p.first;
  p.s = part_segments(all, first, last - first + 1);
  *next = last + 1;
  return p;
}

/* Copies of the lists, since parts of AdamW's may share a segment. */
static eg_status count_from(egi_arena *arena, part *p) {
  int64_t *starts = EGI_NEW(arena, int64_t, p->s.n), *places = EGI_NEW(arena, int64_t, p->s.n);
  if (starts == NULL || places == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < p->s.n; i++) {
    starts[i] = p->s.starts[i] > (int64_t)p->first ? p->s.starts[i] - (int64_t)p->first : 0;
    places[i] = p->s.places[i] - (int64_t)p->moments;
  }
  p->s.starts = starts;
  p->s.places = places;
  return EG_OK;
}

static eg_status add_state(egi_graph *graph, egi_state_pool pool, uint64_t first, uint64_t n, egi_value_id *out_value) {
  uint32_t state;
  EG_TRY(egi_module_add_pool_piece(graph->module, pool, first, n, &state));
  return egi_graph_add_state(graph, state, out_value);
}

/* Both moments come as soon as those of the part before the last have gone, are updated, and go. */
static eg_status emit_part(const eg_trainer *trainer, egi_emitter *emitter, const part *p,
                           egi_value_id step_and_norm[2], egi_value_id gone[2]) {
  egi_graph *graph = emitter->graph;
  egi_value_id in[6] = {0}, states[2], updated;
  EG_TRY(add_state(graph, EGI_POOL_PARAMETERS, p->first, p->n, &in[0]));
  EG_TRY(add_state(graph, EGI_POOL_GRADIENTS, p->first, p->n, &in[1]));
  EG_TRY(add_state(graph, EGI_POOL_MOMENT1, p->moments, p->n_moments, &states[0]));
  EG_TRY(add_state(graph, EGI_POOL_MOMENT2, p->moments, p->n_moments, &states[1]));
  for (int k = 0; k < 2; k++) {
    const egi_value_id after[3] = {states[k], gone[0], gone[1]};
    in[2 + k] = egi_emit(emitter, EGI_OP_Reload, after, gone[0] != 0 ? 3 : 1, NULL, 0);
  }
  in[4] = step_and_norm[0];
  in[5] = step_and_norm[1];
  EG_TRY(emit_node(trainer, emitter, &p->s, in, &updated));
  for (int k = 0; k < 2; k++)
    gone[k] = egi_emit(emitter, EGI_OP_StoreState, (const egi_value_id[3]){states[k], in[2 + k], updated}, 3, NULL, 0);
  return emitter->status;
}

eg_status egi_moments_emit_parts(const eg_trainer *trainer, egi_emitter *emitter, egi_value_id step_and_norm[2]) {
  const egi_module *module = trainer->machine.module;
  egi_arena *arena = &trainer->machine.module->arena;
  bool is_8bit = trainer->options.optimizer == EG_OPTIMIZER_ADAMW_8BIT;
  uint64_t total = module->pool_elements[EGI_POOL_PARAMETERS], all_moments = module->pool_elements[EGI_POOL_MOMENT1];
  uint64_t size = (all_moments / FEWEST_PARTS + BLOCK) / BLOCK * BLOCK, at = 0;
  egi_value_id gone[2][2] = {{0}};
  uint32_t next = 0;
  segments all;
  if (size > LARGEST_PART) size = LARGEST_PART;
  EG_TRY(make_segments(trainer, &all));
  for (unsigned i = 0; is_8bit ? next < all.n : at < total; i++) {
    uint64_t end = at + size < total ? at + size : total;
    part p = is_8bit ? cut_parameters(trainer, &all, &next, size) : cut_floats(&all, &next, at, end);
    at = end;
    EG_TRY(count_from(arena, &p));
    EG_TRY(emit_part(trainer, emitter, &p, step_and_norm, gone[i % 2]));
  }
  return EG_OK;
}
