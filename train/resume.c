/* A trainer's state in one safetensors file, from which another trainer goes on bit by bit as this one would have:
 * parameters and moments, counters, and the settings that must be equal for that. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/blockwise.h"
#include "train/train.h"

#define COUNTERS "trainer.counters" /* i64 [COUNTER_COUNT] */
#define SETTINGS "trainer.settings" /* u8: lines "name=value" */
#define PLAN "trainer.plan"         /* u8: the hash of the plan that was followed; not compared */

enum { STATE_VERSION = 1, COUNTER_COUNT = 5 };

/* A run of a pool's bytes as a tensor of the file. */
typedef struct piece {
  const char
      *name; /* PyTorch's words for Adam's moments, bitsandbytes' for codes and scales, and the parameter's name */
  egi_state_pool pool;
  uint64_t offset; /* bytes */
  eg_dtype dtype;
  int rank;
  int64_t dims[EGI_MAX_RANK];
  uint64_t size_bytes;
} piece;

enum { MAX_PIECES = 5 }; /* of one parameter */

typedef struct piece_list {
  const eg_trainer *trainer;
  egi_arena *arena;
  piece *pieces;
  size_t count;
} piece_list;

static eg_status add_piece(piece_list *list, const char *prefix, const egi_state *state, piece row) {
  uint64_t count = 1;
  row.name = egi_arena_format(list->arena, "%s.%s", prefix, state->name);
  if (row.name == NULL) return EG_ERROR_MEMORY;
  for (int i = 0; i < row.rank; i++) count *= (uint64_t)row.dims[i];
  row.size_bytes = count * (row.dtype == EG_DTYPE_U8 ? 1 : sizeof(float));
  list->pieces[list->count++] = row;
  return EG_OK;
}

/* Dims are the graph's: nothing is turned. */
static piece like_state(const egi_state *state, egi_state_pool pool, uint64_t place) {
  piece row = {.pool = pool, .offset = place * sizeof(float), .dtype = EG_DTYPE_F32, .rank = state->rank};
  memcpy(row.dims, state->dims, sizeof row.dims);
  return row;
}

static eg_status add_moments(piece_list *list, size_t index) {
  const eg_trainer *trainer = list->trainer;
  const egi_state *state = &trainer->machine.module->states[trainer->parameters[index]];
  static const char *const names[2][3] = {{"exp_avg", "state1", "absmax1"}, {"exp_avg_sq", "state2", "absmax2"}};
  for (int i = 0; i < 2; i++) {
    egi_state_pool pool = i == 0 ? EGI_POOL_MOMENT1 : EGI_POOL_MOMENT2;
    piece row = like_state(state, pool, trainer->moments[index]);
    bool are_codes = egi_moments_are_codes(trainer, index);
    if (are_codes) row.dtype = EG_DTYPE_U8;
    EG_TRY(add_piece(list, names[i][are_codes ? 1 : 0], state, row));
    if (!are_codes) continue;
    uint64_t n_codes = (egi_state_count(state) + 3) / 4;
    row = (piece){.pool = pool, .dtype = EG_DTYPE_F32, .rank = 1};
    row.offset = (trainer->moments[index] + n_codes) * sizeof(float);
    row.dims[0] = (int64_t)egi_moments_blocks(trainer, index);
    EG_TRY(add_piece(list, names[i][2], state, row));
  }
  return EG_OK;
}

static eg_status list_pieces(const eg_trainer *trainer, egi_arena *arena, piece_list *out_list) {
  piece_list list = {trainer, arena, EGI_NEW(arena, piece, trainer->n_parameters * MAX_PIECES), 0};
  if (list.pieces == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < trainer->n_parameters; i++) {
    const egi_state *state = &trainer->machine.module->states[trainer->parameters[i]];
    EG_TRY(add_piece(&list, "parameter", state, like_state(state, EGI_POOL_PARAMETERS, state->offset)));
    EG_TRY(add_moments(&list, i));
  }
  *out_list = list;
  return EG_OK;
}

static void *memory_of(const eg_trainer *trainer, const piece *row) {
  return (uint8_t *)egi_store_pool(trainer->machine.store, row->pool) + row->offset;
}

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
  const char *modules = adapters->config.modules;
  if (modules != NULL) hash = egi_hash(modules, strlen(modules), hash);
  return hash;
}

/* Every setting that a later step depends on has a line, but for the number of steps: a run may be made longer. */
static void add_settings(const eg_trainer *trainer, egi_text *text) {
  const eg_trainer_options *o = &trainer->options;
  egi_text_format(text, "model=%016" PRIx64 "\ndata=%016" PRIx64 "\nadapters=%016" PRIx64 "\n",
                  hash_model(trainer->model->module), hash_data(trainer->dataset->documents),
                  hash_adapters(&trainer->adapters));
  if (o->init >= EG_LORA_INIT_PISSA) egi_text_format(text, "init=%d\n", (int)o->init); /* it is in every step */
  egi_text_format(text, "full=%d\ndtype=%s\nseed=%" PRIu64 "\n", o->full != 0, egi_dtype_name(o->dtype), o->seed);
  egi_text_format(text, "tokens=%" PRIu32 "\naccumulate=%" PRIu32 "\npacked=%d\nin_order=%d\n", o->tokens,
                  o->accumulate, trainer->lanes.inputs.is_packed, o->packing == EG_PACKING_SEQUENTIAL);
  egi_text_format(text, "tiles=%" PRIu32 "\n", trainer->tiles); /* sums over rows are rounded by tile */
  egi_text_format(text, "learning_rate=%.17g\nschedule=%d\nwarmup=%.17g\n", o->learning_rate, (int)o->schedule,
                  o->warmup);
  egi_text_format(text, "no_fuse=%d\n", o->no_fuse != 0); /* bodies are rounded otherwise */
  egi_text_format(text, "optimizer=%d\nmoment_floor=%d\n", (int)o->optimizer, o->no_moment_floor == 0);
  egi_text_format(text, "quant=%d\nquant_block=%" PRIu32 "\ndouble_quant=%d\nquant_head=%d\n", (int)o->quant,
                  o->quant_block, o->double_quant != 0, o->quant_head != 0);
  const egi_qat_record *qat = &trainer->adapters.config.qat;
  if (qat->weights != NULL)
    egi_text_format(text, "qat=%s\nqat_block=%" PRId64 "\nqat_symmetric=%d\n", qat->weights, qat->block,
                    qat->is_symmetric);
  egi_text_format(text, "weight_decay=%.17g\nbeta1=%.17g\nbeta2=%.17g\nepsilon=%.17g\nclip=%.17g\n", o->weight_decay,
                  o->beta1, o->beta2, o->epsilon, o->clip);
  egi_text_format(text, "loss=%d\npooling=%d\nsimilarity_scale=%.17g\nlora_plus=%.17g\n", (int)trainer->objective.loss,
                  (int)o->pooling, o->similarity_scale, o->lora_plus);
  egi_text_format(text, "dropout=%.17g\n", trainer->adapters.config.dropout);
}

/* ---- saving ---- */

static eg_status read_pieces(const eg_trainer *trainer, const piece_list *list, egi_safetensor *tensors) {
  const egi_machine *machine = &trainer->machine;
  for (size_t i = 0; i < list->count; i++) {
    const piece *row = &list->pieces[i];
    void *bytes = egi_arena_get(list->arena, 1, (size_t)row->size_bytes);
    if (bytes == NULL) return EG_ERROR_MEMORY;
    EG_TRY(egi_store_read_pool(machine->store, row->pool, memory_of(trainer, row), bytes, (size_t)row->size_bytes));
    tensors[i] = (egi_safetensor){.name = row->name, .dtype = row->dtype, .rank = row->rank, .data = bytes};
    memcpy(tensors[i].dims, row->dims, sizeof row->dims);
    tensors[i].size_bytes = row->size_bytes;
  }
  return EG_OK;
}

static egi_safetensor vector_tensor(const char *name, eg_dtype dtype, const void *data, size_t count,
                                    size_t size_bytes) {
  return (egi_safetensor){
      .name = name, .dtype = dtype, .rank = 1, .dims = {(int64_t)count}, .data = data, .size_bytes = size_bytes};
}

static eg_status save(const eg_trainer *trainer, const char *path, const egi_text *settings, egi_arena *arena) {
  int64_t counters[COUNTER_COUNT] = {STATE_VERSION, (int64_t)trainer->step, (int64_t)trainer->n_updates,
                                     (int64_t)trainer->next_batch, (int64_t)trainer->n_steps};
  float maps[2][256]; /* what codes of 8 bits stand for */
  piece_list list;
  EG_TRY(list_pieces(trainer, arena, &list));
  egi_safetensor *tensors = EGI_NEW(arena, egi_safetensor, list.count + 5);
  uint64_t hash = 0;
  EG_TRY(egi_trainer_plan_hash(trainer, NULL, &hash));
  char *plan = egi_arena_format(arena, "%016" PRIx64, hash);
  if (tensors == NULL || plan == NULL) return EG_ERROR_MEMORY;
  EG_TRY(read_pieces(trainer, &list, tensors));
  size_t n = list.count;
  tensors[n++] = vector_tensor(COUNTERS, EG_DTYPE_I64, counters, COUNTER_COUNT, sizeof counters);
  tensors[n++] = vector_tensor(SETTINGS, EG_DTYPE_U8, egi_text_string(settings), settings->length, settings->length);
  tensors[n++] = vector_tensor(PLAN, EG_DTYPE_U8, plan, strlen(plan), strlen(plan));
  for (int i = 0; i < 2 && trainer->options.optimizer == EG_OPTIMIZER_ADAMW_8BIT; i++) {
    egi_dynamic_map(i == 0, maps[i]);
    tensors[n++] = vector_tensor(i == 0 ? "qmap1" : "qmap2", EG_DTYPE_F32, maps[i], 256, sizeof maps[i]);
  }
  return egi_safetensors_write(trainer->ctx, path, tensors, n);
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

static eg_status find_tensor(const loader *l, const piece *row, const egi_safetensor **out_tensor) {
  const egi_safetensor *tensor = egi_safetensors_find(l->file, row->name);
  if (tensor == NULL) return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: %s is missing", l->path, row->name);
  bool is_same = tensor->dtype == row->dtype && tensor->rank == row->rank;
  for (int i = 0; is_same && i < row->rank; i++) is_same = tensor->dims[i] == row->dims[i];
  if (!is_same) return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: %s has another type or shape", l->path, row->name);
  *out_tensor = tensor;
  return EG_OK;
}

static eg_status check_finite(const loader *l, const egi_safetensor *tensor) {
  float number;
  for (uint64_t i = 0; tensor->dtype == EG_DTYPE_F32 && i < tensor->size_bytes / sizeof number; i++) {
    memcpy(&number, tensor->data + i * sizeof number, sizeof number);
    if (!isfinite(number))
      return egi_fail(l->trainer->ctx, EG_ERROR_DATA, "%s: %s holds a number that is not finite", l->path,
                      tensor->name);
  }
  return EG_OK;
}

/* All tensors are there before the first is written: a file that does not fit changes nothing. */
static eg_status load(loader *l) {
  eg_trainer *trainer = l->trainer;
  const egi_machine *machine = &trainer->machine;
  int64_t counters[COUNTER_COUNT];
  piece_list list;
  EG_TRY(check_settings(l));
  EG_TRY(read_counters(l, counters));
  EG_TRY(list_pieces(trainer, &l->arena, &list));
  const egi_safetensor **tensors = EGI_NEW(&l->arena, const egi_safetensor *, list.count);
  if (tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < list.count; i++) {
    EG_TRY(find_tensor(l, &list.pieces[i], &tensors[i]));
    EG_TRY(check_finite(l, tensors[i]));
  }
  for (size_t i = 0; i < list.count; i++)
    EG_TRY(egi_store_write_pool(machine->store, list.pieces[i].pool, memory_of(trainer, &list.pieces[i]),
                                tensors[i]->data, (size_t)tensors[i]->size_bytes));
  if ((uint64_t)counters[4] != trainer->n_steps && trainer->options.schedule != EG_SCHEDULE_CONSTANT)
    egi_log(trainer->ctx, EG_LOG_WARNING,
            "%s: that run was to have %" PRId64 " steps, this one has %" PRIu64 ": the learning rates differ", l->path,
            counters[4], trainer->n_steps);
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
