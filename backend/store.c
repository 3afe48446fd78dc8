/* Weights and state pools of a module on one device, shared by all sessions over it. Weight bytes are made resident
 * when the first plan asks for them. */
#include <inttypes.h>
#include <math.h>

#include "backend/plan.h"
#include "backend/shared_weights.h"

typedef struct resident {
  void *data;
  uint64_t owned_bytes; /* allocated for it; 0: the bytes lie where the module has them */
  bool is_owned;
  uint32_t place; /* among the shared ones, or 0 */
} resident;

struct egi_store {
  eg_context *ctx;
  const egi_module *module;
  const egi_backend *backend;
  egi_device *device;
  egi_arena arena;
  egi_shared_weights *shared; /* NULL: none */
  resident *weights;          /* by index in the module */
  uint32_t n_weights, weights_capacity;
  uint64_t quantised_bytes, all_quantised_bytes; /* of matrices, as they lie in the file: done so far, and in all */
  double quantised_seconds;
  void *pools[EGI_POOL_COUNT];
  uint64_t pool_bytes[EGI_POOL_COUNT];
};

/* ---- numbers that are made ------------------------------------------------------------------------------------ */

enum { GENERATE_CHUNK = 4096 };

typedef struct generation {
  const egi_weight *weight;
  void *dst;
  uint64_t count, stream;
} generation;

/* false for types that no number can be made in. */
static bool write_number(eg_dtype dtype, double value, void *dst, uint64_t i) {
  switch (dtype) {
  case EG_DTYPE_F32:
    ((float *)dst)[i] = (float)value;
    return true;
  case EG_DTYPE_F64:
    ((double *)dst)[i] = value;
    return true;
  case EG_DTYPE_F16:
    ((uint16_t *)dst)[i] = egi_f32_to_f16((float)value);
    return true;
  case EG_DTYPE_BF16:
    ((uint16_t *)dst)[i] = egi_f32_to_bf16((float)value);
    return true;
  case EG_DTYPE_I64:
    ((int64_t *)dst)[i] = (int64_t)value;
    return true;
  case EG_DTYPE_I32:
    ((int32_t *)dst)[i] = (int32_t)value;
    return true;
  case EG_DTYPE_BOOL:
    ((uint8_t *)dst)[i] = value != 0.0;
    return true;
  case EG_DTYPE_U8:
    ((uint8_t *)dst)[i] = (uint8_t)value;
    return true;
  case EG_DTYPE_I8:
    ((int8_t *)dst)[i] = (int8_t)value;
    return true;
  default:
    return false;
  }
}

/* Each number is a function of seed, name and position: independent of threads and of what was made before. */
static void generate_chunk(void *argument, size_t index, size_t worker) {
  const generation *run = argument;
  const egi_bytes *bytes = &run->weight->bytes;
  uint64_t first = (uint64_t)index * GENERATE_CHUNK, end = first + GENERATE_CHUNK;
  (void)worker;
  if (end > run->count) end = run->count;
  for (uint64_t i = first; i < end; i++) {
    double value = bytes->value;
    if (bytes->kind == EGI_BYTES_NORMAL) value *= egi_random_normal(bytes->seed, run->stream, i);
    (void)write_number(run->weight->dtype, value, run->dst, i);
  }
}

/* Parts one after the other, transposed where they are to be. */
static eg_status write_parts(eg_context *ctx, const egi_weight *weight, uint64_t size_bytes, uint8_t *dst) {
  size_t element = egi_whole_bytes(weight->dtype), done = 0;
  for (uint32_t p = 0; p < weight->bytes.n_parts; p++) {
    const egi_bytes_part *part = &weight->bytes.parts[p];
    size_t rows = (size_t)part->rows, columns = (size_t)part->columns, bytes = rows * columns * element;
    if (bytes > size_bytes - done) break;
    if (!part->is_transposed) memcpy(dst + done, part->data, bytes);
    for (size_t r = 0; part->is_transposed && r < rows; r++)
      for (size_t c = 0; c < columns; c++)
        memcpy(dst + done + (c * rows + r) * element, part->data + (r * columns + c) * element, element);
    done += bytes;
  }
  if (done == size_bytes) return EG_OK;
  return egi_fail(ctx, EG_ERROR_INTERNAL, "weight \"%s\" has other parts than its shape says", weight->name);
}

/* ---- numbers that are decoded ---------------------------------------------------------------------------------- */

enum { MX_BLOCK = 32, DECODE_CHUNK = 1 << 10 };

typedef struct decoding {
  const egi_weight *weight;
  void *dst;
  uint64_t n_blocks;
} decoding;

/* Products of a code by a power of two are exact in every float type that a weight may have. Scale 255 is NaN. */
static void decode_chunk(void *argument, size_t index, size_t worker) {
  static const double levels[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  const decoding *run = argument;
  const egi_bytes_part *parts = run->weight->bytes.parts;
  uint64_t end = ((uint64_t)index + 1) * DECODE_CHUNK;
  (void)worker;
  for (uint64_t b = (uint64_t)index * DECODE_CHUNK; b < end && b < run->n_blocks; b++) {
    double scale = parts[1].data[b] == 255 ? (double)NAN : ldexp(1.0, (int)parts[1].data[b] - 127);
    for (unsigned i = 0; i < MX_BLOCK; i++) {
      unsigned code = (unsigned)parts[0].data[(b * MX_BLOCK + i) / 2] >> (i % 2 * 4) & 15U;
      double value = levels[code & 7U] * scale;
      (void)write_number(run->weight->dtype, code & 8U ? -value : value, run->dst, b * MX_BLOCK + i);
    }
  }
}

static void write_decoded(eg_context *ctx, const egi_weight *weight, uint64_t size_bytes, void *dst) {
  decoding run = {weight, dst, size_bytes / egi_whole_bytes(weight->dtype) / MX_BLOCK};
  egi_pool_run(egi_context_pool(ctx), (size_t)((run.n_blocks + DECODE_CHUNK - 1) / DECODE_CHUNK), decode_chunk, &run);
}

eg_status egi_weight_write(eg_context *ctx, const egi_weight *weight, void *dst) {
  uint64_t size_bytes = 0, probe[2] = {0};
  EG_TRY(egi_weight_bytes(ctx, weight, &size_bytes));
  if (weight->bytes.kind == EGI_BYTES_PARTS) return write_parts(ctx, weight, size_bytes, dst);
  if (weight->bytes.kind == EGI_BYTES_MXFP4) {
    write_decoded(ctx, weight, size_bytes, dst);
    return EG_OK;
  }
  if (weight->bytes.kind == EGI_BYTES_QUANTISED) {
    egi_quantised_memory memory = {{NULL}};
    memory.parts[weight->bytes.quantised_tensor] = dst;
    return egi_quantise(ctx, weight->bytes.quantisation, &memory);
  }
  if (weight->bytes.kind == EGI_BYTES_MEMORY) {
    if (size_bytes > 0) memcpy(dst, weight->bytes.data, (size_t)size_bytes);
    return EG_OK;
  }
  if (!write_number(weight->dtype, 0.0, probe, 0)) {
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "weight \"%s\": numbers of type %s cannot be generated", weight->name,
                    egi_dtype_name(weight->dtype));
  }
  generation run = {.weight = weight,
                    .dst = dst,
                    .count = size_bytes / egi_whole_bytes(weight->dtype),
                    .stream = egi_hash(weight->name, strlen(weight->name), 0)};
  egi_pool_run(egi_context_pool(ctx), (size_t)((run.count + GENERATE_CHUNK - 1) / GENERATE_CHUNK), generate_chunk,
               &run);
  return EG_OK;
}

/* ---- the store ------------------------------------------------------------------------------------------------ */

eg_status egi_store_create(eg_context *ctx, const egi_module *module, const egi_backend *backend,
                           egi_store **out_store) {
  egi_store *store = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof(*store));
  if (store == NULL) return EG_ERROR_MEMORY;
  memset(store, 0, sizeof(*store));
  store->ctx = ctx;
  store->module = module;
  store->backend = backend;
  egi_arena_init(&store->arena, ctx, EGI_PURPOSE_GRAPH);
  eg_status status = backend->open(ctx, &store->device);
  if (status != EG_OK) {
    egi_release(ctx, EGI_PURPOSE_GRAPH, store, sizeof(*store));
    return status;
  }
  egi_context_retain(ctx);
  *out_store = store;
  return EG_OK;
}

static egi_purpose pool_purpose(const egi_store *store, unsigned pool) {
  return store->module->is_pool_on_host[pool] ? EGI_PURPOSE_PINNED : EGI_PURPOSE_TRAINABLE;
}

void egi_store_destroy(egi_store *store) {
  if (store == NULL) return;
  eg_context *ctx = store->ctx;
  const egi_backend *backend = store->backend;
  for (uint32_t i = 0; i < store->n_weights; i++) {
    const resident *weight = &store->weights[i];
    uint64_t size_bytes = weight->owned_bytes;
    bool is_owned =
        weight->place != 0 ? egi_shared_weights_drop(store->shared, weight->place, &size_bytes) : weight->is_owned;
    if (is_owned) backend->release(store->device, EGI_PURPOSE_WEIGHTS, weight->data, (size_t)size_bytes);
  }
  for (unsigned pool = 0; pool < EGI_POOL_COUNT; pool++) {
    if (store->pools[pool] == NULL) continue;
    backend->release(store->device, pool_purpose(store, pool), store->pools[pool], (size_t)store->pool_bytes[pool]);
  }
  backend->close(store->device);
  egi_arena_clear(&store->arena);
  egi_release(ctx, EGI_PURPOSE_GRAPH, store, sizeof(*store));
  egi_context_release(ctx);
}

void egi_store_share(egi_store *store, egi_shared_weights *shared) {
  store->shared = shared;
}

bool egi_weight_is_in_place(const egi_backend *backend, const egi_weight *weight) {
  uint32_t element_bytes = egi_whole_bytes(weight->dtype);
  return backend->is_host && weight->bytes.kind == EGI_BYTES_MEMORY && weight->bytes.data != NULL &&
         (element_bytes == 0 || (uintptr_t)weight->bytes.data % element_bytes == 0);
}

static eg_status load(egi_store *store, const egi_weight *weight, resident *out) {
  uint64_t size_bytes = 0;
  EG_TRY(egi_weight_bytes(store->ctx, weight, &size_bytes));
  if (egi_weight_is_in_place(store->backend, weight)) {
    out->data = (void *)(uintptr_t)weight->bytes.data; /* kernels never write to weights */
    return EG_OK;
  }
  void *memory = NULL;
  EG_TRY(store->backend->allocate(store->device, EGI_PURPOSE_WEIGHTS, (size_t)size_bytes, &memory));
  eg_status status = EG_OK;
  if (size_bytes > 0) {
    status = store->backend->is_host ? egi_weight_write(store->ctx, weight, memory)
                                     : egi_load_weight(store->ctx, store->backend, store->device, weight, memory);
  }
  if (status != EG_OK) {
    store->backend->release(store->device, EGI_PURPOSE_WEIGHTS, memory, (size_t)size_bytes);
    return status;
  }
  *out = (resident){.data = memory, .owned_bytes = size_bytes, .is_owned = true};
  return EG_OK;
}

/* ---- quantised matrices ---- */

static uint64_t matrix_bytes(const egi_quantisation *q) {
  return (uint64_t)q->n_matrices * (uint64_t)q->rows * (uint64_t)q->columns * egi_whole_bytes(q->matrix.dtype);
}

static void count_quantised(egi_store *store) {
  for (uint32_t i = 1; i < store->module->n_weights; i++) {
    const egi_bytes *bytes = &store->module->weights[i].bytes;
    bool is_first = bytes->kind == EGI_BYTES_QUANTISED && bytes->quantised_tensor == EGI_QUANTISED_CODES;
    if (is_first) store->all_quantised_bytes += matrix_bytes(bytes->quantisation);
  }
}

/* A line at each tenth of the way. */
static void report_quantised(egi_store *store, uint64_t size_bytes, double seconds) {
  uint64_t before = store->quantised_bytes;
  if (store->all_quantised_bytes == 0) count_quantised(store);
  uint64_t total = store->all_quantised_bytes;
  store->quantised_bytes += size_bytes;
  store->quantised_seconds += seconds;
  if (total == 0 || before * 10 / total == store->quantised_bytes * 10 / total) return;
  egi_log(store->ctx, EG_LOG_INFO, "quantised %.2f of %.2f GB, %.2f GB/s", (double)store->quantised_bytes / 1e9,
          (double)total / 1e9, (double)store->quantised_bytes / 1e9 / (store->quantised_seconds + 1e-9));
}

/* Room for each tensor. */
static eg_status make_quantised_room(egi_store *store, const egi_quantisation *q, resident rooms[EGI_QUANTISED_PARTS],
                                     egi_quantised_memory *memory) {
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    size_t size_bytes = (size_t)egi_quantised_bytes(q, (egi_quantised_tensor)part);
    if (q->weights[part] == 0) continue;
    EG_TRY(store->backend->allocate(store->device, EGI_PURPOSE_WEIGHTS, size_bytes, &rooms[part].data));
    rooms[part].owned_bytes = size_bytes;
    rooms[part].is_owned = true;
    memory->parts[part] = rooms[part].data;
  }
  return EG_OK;
}

static eg_status fill_quantised(egi_store *store, const egi_quantisation *q, const egi_quantised_memory *memory) {
  double start = egi_clock();
  EG_TRY(store->backend->is_host ? egi_quantise(store->ctx, q, memory)
                                 : egi_load_quantised(store->ctx, store->backend, store->device, q, memory));
  report_quantised(store, matrix_bytes(q), egi_clock() - start);
  return EG_OK;
}

/* All tensors of a matrix at once. */
static eg_status load_quantised(egi_store *store, const egi_quantisation *q) {
  resident rooms[EGI_QUANTISED_PARTS] = {{NULL, 0, false, 0}};
  egi_quantised_memory memory = {{NULL}};
  eg_status status = make_quantised_room(store, q, rooms, &memory);
  if (status == EG_OK) status = fill_quantised(store, q, &memory);
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    if (rooms[part].data == NULL) continue;
    if (status == EG_OK)
      store->weights[q->weights[part]] = rooms[part];
    else
      store->backend->release(store->device, EGI_PURPOSE_WEIGHTS, rooms[part].data, (size_t)rooms[part].owned_bytes);
  }
  return status;
}

/* Rows up to the weight's. */
static eg_status grow_weights(egi_store *store, uint32_t weight) {
  while (store->n_weights <= weight) { /* passes may have added some since */
    EG_TRY(EGI_GROW(&store->arena, &store->weights, store->n_weights, &store->weights_capacity));
    store->weights[store->n_weights++] = (resident){0};
  }
  return EG_OK;
}

/* ---- shared weights ---- */

/* What another store has made already. */
static eg_status take_shared(egi_store *store, uint32_t weight, uint32_t *out_place) {
  const egi_weight *row = &store->module->weights[weight];
  *out_place = 0;
  if (store->shared == NULL || egi_weight_is_in_place(store->backend, row)) return EG_OK;
  EG_TRY(egi_shared_weights_find(store->shared, store->backend, row, out_place));
  if (*out_place == 0) return EG_OK;
  void *data = egi_shared_weights_take(store->shared, *out_place);
  if (data != NULL) store->weights[weight] = (resident){.data = data, .place = *out_place};
  return EG_OK;
}

/* From now on others may read it, on streams of their own. */
static eg_status give_shared(egi_store *store, uint32_t weight, uint32_t place) {
  resident *entry = &store->weights[weight];
  if (place == 0 || entry->place != 0 || !entry->is_owned) return EG_OK;
  if (!store->backend->is_host) EG_TRY(store->backend->synchronize(store->device));
  egi_shared_weights_put(store->shared, place, entry->data, entry->owned_bytes);
  entry->place = place;
  entry->is_owned = false;
  return EG_OK;
}

/* The tensors of a matrix are taken or made together. */
static eg_status load_matrix(egi_store *store, const egi_quantisation *q) {
  uint32_t places[EGI_QUANTISED_PARTS] = {0};
  bool is_taken = true;
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    uint32_t weight = q->weights[part];
    if (weight == 0) continue;
    EG_TRY(take_shared(store, weight, &places[part]));
    is_taken = is_taken && store->weights[weight].data != NULL;
  }
  if (is_taken) return EG_OK;
  EG_TRY(load_quantised(store, q));
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++)
    if (q->weights[part] != 0) EG_TRY(give_shared(store, q->weights[part], places[part]));
  return EG_OK;
}

static eg_status load_alone(egi_store *store, uint32_t weight) {
  uint32_t place = 0;
  EG_TRY(take_shared(store, weight, &place));
  if (store->weights[weight].data != NULL) return EG_OK;
  EG_TRY(load(store, &store->module->weights[weight], &store->weights[weight]));
  return give_shared(store, weight, place);
}

eg_status egi_store_load(egi_store *store, uint32_t weight, void **out_data) {
  if (weight == 0 || weight >= store->module->n_weights) {
    return egi_fail(store->ctx, EG_ERROR_INTERNAL, "weight %" PRIu32 " is not in the module", weight);
  }
  const egi_weight *row = &store->module->weights[weight];
  bool is_quantised = row->bytes.kind == EGI_BYTES_QUANTISED;
  EG_TRY(grow_weights(store, store->module->n_weights - 1));
  resident *entry = &store->weights[weight];
  if (entry->data == NULL)
    EG_TRY(is_quantised ? load_matrix(store, row->bytes.quantisation) : load_alone(store, weight));
  *out_data = entry->data;
  return EG_OK;
}

/* ---- pools ---------------------------------------------------------------------------------------------------- */

static eg_status clear(egi_store *store, void *memory, uint64_t size_bytes, bool is_on_host) {
  if (store->backend->is_host || is_on_host) {
    memset(memory, 0, (size_t)size_bytes);
    return EG_OK;
  }
  if (store->backend->fill != NULL) return store->backend->fill(store->device, memory, 0, (size_t)size_bytes);
  size_t chunk = size_bytes < (1u << 20) ? (size_t)size_bytes : 1u << 20;
  void *zeros = egi_allocate(store->ctx, EGI_PURPOSE_DATA, chunk);
  if (zeros == NULL) return EG_ERROR_MEMORY;
  memset(zeros, 0, chunk);
  eg_status status = EG_OK;
  for (uint64_t done = 0; status == EG_OK && done < size_bytes; done += chunk) {
    uint64_t rest = size_bytes - done;
    status =
        store->backend->upload(store->device, (uint8_t *)memory + done, zeros, rest < chunk ? (size_t)rest : chunk);
  }
  egi_release(store->ctx, EGI_PURPOSE_DATA, zeros, chunk);
  return status;
}

static float number_at(eg_dtype dtype, const uint8_t *bytes, uint64_t i) {
  switch (dtype) {
  case EG_DTYPE_F16:
    return egi_f16_to_f32(((const uint16_t *)(const void *)bytes)[i]);
  case EG_DTYPE_BF16:
    return egi_bf16_to_f32(((const uint16_t *)(const void *)bytes)[i]);
  case EG_DTYPE_F64:
    return (float)((const double *)(const void *)bytes)[i];
  default:
    return ((const float *)(const void *)bytes)[i];
  }
}

static bool is_convertible(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16 || dtype == EG_DTYPE_F64;
}

/* The weight's numbers as f32, through host memory. */
static eg_status fill_state(egi_store *store, const egi_state *state) {
  const egi_weight *weight = &store->module->weights[state->weight];
  uint64_t weight_bytes = 0, count = 1;
  EG_TRY(egi_weight_bytes(store->ctx, weight, &weight_bytes));
  for (int i = 0; i < state->rank; i++) count *= (uint64_t)state->dims[i];
  if (!is_convertible(weight->dtype) || weight_bytes / egi_whole_bytes(weight->dtype) != count ||
      (state->offset + count) * sizeof(float) > store->pool_bytes[state->pool]) {
    return egi_fail(store->ctx, EG_ERROR_SHAPE, "parameter \"%s\" cannot start from weight \"%s\" of type %s",
                    state->name, weight->name, egi_dtype_name(weight->dtype));
  }
  size_t value_bytes = (size_t)count * sizeof(float),
         staging_bytes = (size_t)egi_align(value_bytes) + (size_t)weight_bytes;
  uint8_t *staging = egi_allocate(store->ctx, EGI_PURPOSE_DATA, staging_bytes);
  if (staging == NULL) return EG_ERROR_MEMORY;
  float *values = (float *)(void *)staging;
  uint8_t *bytes = staging + egi_align(value_bytes);
  eg_status status = egi_weight_write(store->ctx, weight, bytes);
  if (status == EG_OK) {
    for (uint64_t i = 0; i < count; i++) values[i] = number_at(weight->dtype, bytes, i);
    status =
        store->backend->upload(store->device, (float *)store->pools[state->pool] + state->offset, values, value_bytes);
  }
  egi_release(store->ctx, EGI_PURPOSE_DATA, staging, staging_bytes);
  return status;
}

eg_status egi_store_make_pools(egi_store *store) {
  const egi_module *module = store->module;
  bool is_filled = store->pools[EGI_POOL_PARAMETERS] != NULL;
  for (unsigned pool = 0; pool < EGI_POOL_COUNT; pool++) {
    uint64_t size_bytes = egi_module_pool_bytes(module, (egi_state_pool)pool);
    if (store->pools[pool] != NULL && store->pool_bytes[pool] != size_bytes) {
      return egi_fail(store->ctx, EG_ERROR_INTERNAL, "states were added after their pool was made");
    }
    if (store->pools[pool] != NULL || size_bytes == 0) continue;
    EG_TRY(store->backend->allocate(store->device, pool_purpose(store, pool), (size_t)size_bytes, &store->pools[pool]));
    store->pool_bytes[pool] = size_bytes;
    EG_TRY(clear(store, store->pools[pool], size_bytes, module->is_pool_on_host[pool]));
  }
  for (uint32_t i = 1; i < module->n_states && !is_filled; i++) {
    const egi_state *state = &module->states[i];
    if (state->weight != 0 && state->pool == EGI_POOL_PARAMETERS) EG_TRY(fill_state(store, state));
  }
  return EG_OK;
}

eg_status egi_store_read_pool(const egi_store *store, egi_state_pool pool, const void *place, void *bytes,
                              size_t size_bytes) {
  if (!store->module->is_pool_on_host[pool]) return store->backend->download(store->device, bytes, place, size_bytes);
  EG_TRY(store->backend->synchronize(store->device));
  memcpy(bytes, place, size_bytes);
  return EG_OK;
}

eg_status egi_store_write_pool(const egi_store *store, egi_state_pool pool, void *place, const void *bytes,
                               size_t size_bytes) {
  if (!store->module->is_pool_on_host[pool]) return store->backend->upload(store->device, place, bytes, size_bytes);
  EG_TRY(store->backend->synchronize(store->device));
  memcpy(place, bytes, size_bytes);
  return EG_OK;
}

void *egi_store_pool(const egi_store *store, egi_state_pool pool) {
  return store->pools[pool];
}
egi_device *egi_store_device(const egi_store *store) {
  return store->device;
}
eg_context *egi_store_context(const egi_store *store) {
  return store->ctx;
}
const egi_module *egi_store_module(const egi_store *store) {
  return store->module;
}
const egi_backend *egi_store_backend(const egi_store *store) {
  return store->backend;
}
