/* A trainer's state in one safetensors file, from which another trainer goes on bit by bit as this one would have:
 * parameters and moments, counters, and the settings that must be equal for that. */
#include "train/train.h"

#include <inttypes.h>
#include <string.h>

#define COUNTERS "trainer.counters" /* i64 [COUNTER_COUNT] */
#define SETTINGS "trainer.settings" /* u8: lines "name=value" */

enum { STATE_VERSION = 1, COUNTER_COUNT = 4 };

typedef struct pool_row {
  egi_state_pool pool;
  const char *prefix; /* of the name that the parameter has in files; PyTorch's words for Adam's moments */
} pool_row;

static const pool_row pools[] = {
    {EGI_POOL_PARAMETERS, "parameter."}, {EGI_POOL_MOMENT1, "exp_avg."}, {EGI_POOL_MOMENT2, "exp_avg_sq."}};

/* ---- what must be equal ---- */

/* Pieces of a weight, evenly spread: telling models apart must not read all of them. */
static uint64_t sample_bytes(const egi_bytes *bytes, uint64_t hash) {
  enum { PIECES = 64, PIECE_BYTES = 64 };
  if (bytes->data == NULL) return hash;
  if (bytes->size_bytes <= (uint64_t)PIECES * PIECE_BYTES)
    return egi_hash(bytes->data, (size_t)bytes->size_bytes, hash);
  uint64_t stride = (bytes->size_bytes - PIECE_BYTES) / (PIECES - 1);
  for (uint64_t i = 0; i < PIECES; i++) hash = egi_hash(bytes->data + i * stride, PIECE_BYTES, hash);
  return hash;
}

static uint64_t hash_model(const egi_module *module) {
  uint64_t hash = 0;
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_weight *weight = &module->weights[i];
    int32_t dtype = (int32_t)weight->dtype;
    hash = egi_hash(weight->name, strlen(weight->name), hash);
    hash = egi_hash(&dtype, sizeof dtype, hash);
    hash = egi_hash(weight->dims, (size_t)weight->rank * sizeof *weight->dims, hash);
    hash = egi_hash(&weight->bytes.seed, sizeof weight->bytes.seed, hash);
    hash = egi_hash(&weight->bytes.value, sizeof weight->bytes.value, hash);
    hash = sample_bytes(&weight->bytes, hash);
  }
  return hash;
}

static uint64_t hash_data(const egi_documents *documents) {
  uint64_t hash = egi_hash(documents->offsets, (documents->n_documents + 1) * sizeof *documents->offsets, 0);
  hash = egi_hash(documents->tokens, (size_t)documents->n_tokens * sizeof *documents->tokens, hash);
  hash = egi_hash(documents->labels, (size_t)documents->n_tokens * sizeof *documents->labels, hash);
  size_t n_numbers = documents->n_documents * documents->n_numbers;
  if (n_numbers > 0) hash = egi_hash(documents->numbers, n_numbers * sizeof *documents->numbers, hash);
  if (documents->token_types != NULL)
    hash = egi_hash(documents->token_types, (size_t)documents->n_tokens * sizeof *documents->token_types, hash);
  if (documents->is_first != NULL)
    hash = egi_hash(documents->is_first, documents->n_documents * sizeof *documents->is_first, hash);
  return hash;
}

static uint64_t hash_adapters(const egi_adapters *adapters) {
  uint64_t hash = 0;
  for (size_t i = 0; i < adapters->count; i++) {
    const egi_adapter_target *target = &adapters->targets[i];
    hash = egi_hash(target->path, strlen(target->path), hash);
    hash = egi_hash(&target->rank, sizeof target->rank, hash);
    hash = egi_hash(&target->scale, sizeof target->scale, hash);
  }
  return hash;
}

/* Every setting that a later step depends on has a line, but for the number of steps: a run may be made longer. */
static void add_settings(const eg_trainer *trainer, egi_text *text) {
  const eg_trainer_options *o = &trainer->options;
  egi_text_format(text, "model=%016" PRIx64 "\ndata=%016" PRIx64 "\nadapters=%016" PRIx64 "\n",
                  hash_model(trainer->model->module), hash_data(trainer->dataset->documents),
                  hash_adapters(&trainer->adapters));
  egi_text_format(text, "full=%d\ndtype=%s\nseed=%" PRIu64 "\n", o->full != 0, egi_dtype_name(o->dtype), o->seed);
  egi_text_format(text, "tokens=%" PRIu32 "\naccumulate=%" PRIu32 "\npacked=%d\nin_order=%d\n", o->tokens,
                  o->accumulate, trainer->lanes.inputs.is_packed, o->packing == EG_PACKING_SEQUENTIAL);
  egi_text_format(text, "learning_rate=%.17g\nschedule=%d\nwarmup=%.17g\n", o->learning_rate, (int)o->schedule,
                  o->warmup);
  egi_text_format(text, "weight_decay=%.17g\nbeta1=%.17g\nbeta2=%.17g\nepsilon=%.17g\nclip=%.17g\n", o->weight_decay,
                  o->beta1, o->beta2, o->epsilon, o->clip);
  egi_text_format(text, "loss=%d\npooling=%d\nsimilarity_scale=%.17g\nlora_plus=%.17g\n", (int)trainer->objective.loss,
                  (int)o->pooling, o->similarity_scale, o->lora_plus);
}

/* ---- saving ---- */

static eg_status read_pools(const eg_trainer *trainer, egi_arena *arena, egi_safetensor *tensors) {
  for (size_t i = 0; i < trainer->n_parameters; i++) {
    const egi_state *state = &trainer->machine.module->states[trainer->parameters[i]];
    uint64_t count = egi_state_count(state);
    for (size_t p = 0; p < EGI_COUNT(pools); p++, tensors++) {
      float *values = EGI_NEW(arena, float, (size_t)count);
      tensors->name = egi_arena_format(arena, "%s%s", pools[p].prefix, state->name);
      if (values == NULL || tensors->name == NULL) return EG_ERROR_MEMORY;
      EG_TRY(egi_state_read(&trainer->machine, state, pools[p].pool, values));
      tensors->dtype = EG_DTYPE_F32;
      tensors->rank = egi_state_file_dims(state, tensors->dims);
      tensors->data = (const uint8_t *)values;
      tensors->size_bytes = count * sizeof *values;
    }
  }
  return EG_OK;
}

static eg_status save(const eg_trainer *trainer, const char *path, const egi_text *settings, egi_arena *arena) {
  size_t count = trainer->n_parameters * EGI_COUNT(pools);
  int64_t counters[COUNTER_COUNT] = {STATE_VERSION, (int64_t)trainer->step, (int64_t)trainer->n_updates,
                                     (int64_t)trainer->next_batch};
  egi_safetensor *tensors = EGI_NEW(arena, egi_safetensor, count + 2);
  if (tensors == NULL) return EG_ERROR_MEMORY;
  EG_TRY(read_pools(trainer, arena, tensors));
  tensors[count] = (egi_safetensor){.name = COUNTERS,
                                    .dtype = EG_DTYPE_I64,
                                    .rank = 1,
                                    .dims = {COUNTER_COUNT},
                                    .data = (const uint8_t *)counters,
                                    .size_bytes = sizeof counters};
  tensors[count + 1] = (egi_safetensor){.name = SETTINGS,
                                        .dtype = EG_DTYPE_U8,
                                        .rank = 1,
                                        .dims = {(int64_t)settings->length},
                                        .data = (const uint8_t *)egi_text_string(settings),
                                        .size_bytes = settings->length};
  return egi_safetensors_write(trainer->ctx, path, tensors, count + 2);
}

eg_status egi_trainer_save_state(const eg_trainer *trainer, const char *path) {
  egi_arena arena;
  egi_text settings;
  egi_arena_init(&arena, trainer->ctx, EGI_PURPOSE_DATA);
  egi_text_init(&settings, trainer->ctx);
  add_settings(trainer, &settings);
  eg_status status = egi_text_status(&settings);
  if (status == EG_OK) status = save(trainer, path, &settings, &arena);
  egi_text_free(&settings);
  egi_arena_clear(&arena);
  return status;
}

/* ---- loading ---- */

typedef struct loader {
  eg_trainer *trainer;
  const char *path;
  const egi_safetensors *file;
  egi_arena arena;
} loader;

/* The first line that differs: its name and both values. */
static eg_status fail_setting(const loader *l, const char *saved, size_t n_saved, const char *own) {
  size_t at = 0, start = 0;
  for (; at < n_saved && own[at] != '\0' && saved[at] == own[at]; at++)
    if (own[at] == '\n') start = at + 1;
  size_t n_line = 0, n_name = strcspn(own + start, "=\n"), n_own = strcspn(own + start, "\n");
  while (start + n_line < n_saved && saved[start + n_line] != '\n' && saved[start + n_line] != '\0') n_line++;
  if (n_name > n_line || n_name == n_own)
    return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: its settings are those of another version", l->path);
  static const char *const hashed[] = {"model", "data", "adapters"};
  for (size_t i = 0; i < EGI_COUNT(hashed); i++)
    if (strlen(hashed[i]) == n_name && memcmp(hashed[i], own + start, n_name) == 0)
      return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: it was saved with other %s than this run's", l->path,
                      i == 0 ? "weights" : hashed[i]);
  return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: it was saved with %.*s, this run has %.*s", l->path, (int)n_line,
                  saved + start, (int)n_own, own + start);
}

static eg_status check_settings(const loader *l) {
  const egi_safetensor *saved = egi_safetensors_find(l->file, SETTINGS);
  egi_text own;
  if (saved == NULL || saved->dtype != EG_DTYPE_U8)
    return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: it holds no state of a trainer", l->path);
  egi_text_init(&own, l->trainer->ctx);
  add_settings(l->trainer, &own);
  eg_status status = egi_text_status(&own);
  if (status == EG_OK &&
      (saved->size_bytes != own.length || memcmp(saved->data, egi_text_string(&own), own.length) != 0))
    status = fail_setting(l, (const char *)saved->data, (size_t)saved->size_bytes, egi_text_string(&own));
  egi_text_free(&own);
  return status;
}

static eg_status read_counters(const loader *l, int64_t counters[COUNTER_COUNT]) {
  const egi_safetensor *saved = egi_safetensors_find(l->file, COUNTERS);
  bool is_right =
      saved != NULL && saved->dtype == EG_DTYPE_I64 && saved->size_bytes == COUNTER_COUNT * sizeof *counters;
  if (is_right) memcpy(counters, saved->data, COUNTER_COUNT * sizeof *counters);
  if (is_right && counters[0] != STATE_VERSION)
    return egi_fail(l->trainer->ctx, EG_ERROR_UNSUPPORTED, "%s: version %" PRId64 " of the state, not %d", l->path,
                    counters[0], (int)STATE_VERSION);
  is_right = is_right && counters[1] >= 0 && counters[2] >= 0 && counters[2] <= counters[1] && counters[3] >= 0 &&
             (uint64_t)counters[3] < l->trainer->n_batches;
  if (!is_right) return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: %s is damaged", l->path, COUNTERS);
  return EG_OK;
}

static eg_status find_tensor(loader *l, const egi_state *state, const char *prefix, const egi_safetensor **out_tensor) {
  const char *name = egi_arena_format(&l->arena, "%s%s", prefix, state->name);
  int64_t dims[EGI_MAX_RANK];
  int rank = egi_state_file_dims(state, dims);
  if (name == NULL) return EG_ERROR_MEMORY;
  const egi_safetensor *tensor = egi_safetensors_find(l->file, name);
  if (tensor == NULL) return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: %s is missing", l->path, name);
  bool is_same = tensor->dtype == EG_DTYPE_F32 && tensor->rank == rank;
  for (int i = 0; is_same && i < rank; i++) is_same = tensor->dims[i] == dims[i];
  if (!is_same) return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: %s has another type or shape", l->path, name);
  *out_tensor = tensor;
  return EG_OK;
}

/* All tensors are there before the first is written: a file that does not fit changes nothing. */
static eg_status load(loader *l) {
  eg_trainer *trainer = l->trainer;
  int64_t counters[COUNTER_COUNT];
  size_t count = trainer->n_parameters * EGI_COUNT(pools);
  const egi_safetensor **tensors = EGI_NEW(&l->arena, const egi_safetensor *, count);
  uint64_t largest = 1;
  EG_TRY(check_settings(l));
  EG_TRY(read_counters(l, counters));
  if (tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    const egi_state *state = &trainer->machine.module->states[trainer->parameters[i / EGI_COUNT(pools)]];
    EG_TRY(find_tensor(l, state, pools[i % EGI_COUNT(pools)].prefix, &tensors[i]));
    if (tensors[i]->size_bytes > largest) largest = tensors[i]->size_bytes;
  }
  float *values = egi_arena_get(&l->arena, 1, (size_t)largest); /* tensors of a file may be unaligned */
  if (values == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < count; i++) {
    const egi_state *state = &trainer->machine.module->states[trainer->parameters[i / EGI_COUNT(pools)]];
    memcpy(values, tensors[i]->data, (size_t)tensors[i]->size_bytes);
    EG_TRY(egi_state_write(&trainer->machine, state, pools[i % EGI_COUNT(pools)].pool, values));
  }
  trainer->step = (uint64_t)counters[1];
  trainer->n_updates = (uint64_t)counters[2];
  trainer->next_batch = (size_t)counters[3];
  trainer->has_gradients = false;
  return EG_OK;
}

uint64_t egi_trainer_steps_done(const eg_trainer *trainer) {
  return trainer->step;
}

eg_status egi_trainer_load_state(eg_trainer *trainer, const char *path) {
  egi_safetensors *file;
  EG_TRY(egi_safetensors_open(trainer->ctx, path, &file));
  loader l = {.trainer = trainer, .path = path, .file = file};
  egi_arena_init(&l.arena, trainer->ctx, EGI_PURPOSE_DATA);
  eg_status status = load(&l);
  egi_arena_clear(&l.arena);
  egi_safetensors_close(file);
  return status;
}
