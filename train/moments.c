/* Where the optimizer's states of each parameter lie in their pools, and the node that updates them. AdamW's moments
 * are floats where the parameter is; in 8 bits those of parameters of 4096 elements and more are codes and scales, as
 * bitsandbytes holds them (optim/optimizer.py, min_8bit_size). */
#include "train/train.h"

enum { SMALLEST_8BIT = 4096, BLOCK = 256, PLACE_FLOATS = 16 };

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

eg_status egi_moments_emit(const eg_trainer *trainer, egi_emitter *emitter, const egi_value_id inputs[6]) {
  segments s;
  EG_TRY(make_segments(trainer, &s));
  const egi_attribute attributes[] = {
      egi_attribute_ints("starts", s.starts, s.n),
      {.name = "decays", .kind = EGI_ATTRIBUTE_FLOATS, .count = s.n, .u.floats = s.decays},
      {.name = "rates", .kind = EGI_ATTRIBUTE_FLOATS, .count = s.n, .u.floats = s.rates},
      egi_attribute_ints("sizes", s.sizes, s.n),
      egi_attribute_ints("places", s.places, s.n),
      egi_attribute_int("smallest", SMALLEST_8BIT),
      egi_attribute_int("floor", trainer->options.no_moment_floor == 0)};
  bool is_8bit = trainer->options.optimizer == EG_OPTIMIZER_ADAMW_8BIT;
  (void)egi_emit(emitter, is_8bit ? EGI_OP_AdamW8bit : EGI_OP_AdamW, inputs, 6, attributes,
                 is_8bit ? EGI_COUNT(attributes) : 3);
  return emitter->status;
}
