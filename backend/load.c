/* Weights on their way to a device with memory of its own: bytes go as they lie in the file, numbers that are made are
 * made there where the device can, and matrices are quantised there, piece by piece. */
#include <math.h>

#include "backend/plan.h"
#include "base/blockwise.h"

typedef struct loading {
  eg_context *ctx;
  const egi_backend *backend;
  egi_device *device;
} loading;

/* ---- made on the host first ------------------------------------------------------------------------------------ */

static eg_status load_made(const loading *l, const egi_weight *weight, uint64_t size_bytes, void *dst) {
  void *staging = egi_allocate(l->ctx, EGI_PURPOSE_DATA, (size_t)size_bytes);
  if (staging == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_weight_write(l->ctx, weight, staging);
  if (status == EG_OK) status = l->backend->upload(l->device, dst, staging, (size_t)size_bytes);
  egi_release(l->ctx, EGI_PURPOSE_DATA, staging, (size_t)size_bytes);
  return status;
}

static eg_status quantise_on_host(const loading *l, const egi_quantisation *q, const egi_quantised_memory *memory) {
  egi_quantised_memory staging = {{NULL}};
  eg_status status = EG_OK;
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS && status == EG_OK; part++) {
    size_t size_bytes = (size_t)egi_quantised_bytes(q, (egi_quantised_tensor)part);
    if (memory->parts[part] == NULL) continue;
    staging.parts[part] = egi_allocate(l->ctx, EGI_PURPOSE_DATA, size_bytes);
    if (staging.parts[part] == NULL) status = EG_ERROR_MEMORY;
  }
  if (status == EG_OK) status = egi_quantise(l->ctx, q, &staging);
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    size_t size_bytes = (size_t)egi_quantised_bytes(q, (egi_quantised_tensor)part);
    if (staging.parts[part] == NULL) continue;
    if (status == EG_OK) status = l->backend->upload(l->device, memory->parts[part], staging.parts[part], size_bytes);
    egi_release(l->ctx, EGI_PURPOSE_DATA, staging.parts[part], size_bytes);
  }
  return status;
}

/* ---- as they are ----------------------------------------------------------------------------------------------- */

static bool has_plain_parts(const egi_weight *weight, uint64_t size_bytes) {
  uint64_t sum = 0, element = egi_whole_bytes(weight->dtype);
  if (weight->bytes.kind != EGI_BYTES_PARTS) return false;
  for (uint32_t p = 0; p < weight->bytes.n_parts; p++) {
    const egi_bytes_part *part = &weight->bytes.parts[p];
    if (part->is_transposed) return false;
    sum += (uint64_t)part->rows * (uint64_t)part->columns * element;
  }
  return sum == size_bytes;
}

static eg_status load_parts(const loading *l, const egi_weight *weight, uint8_t *dst) {
  for (uint32_t p = 0; p < weight->bytes.n_parts; p++) {
    const egi_bytes_part *part = &weight->bytes.parts[p];
    size_t bytes = (size_t)part->rows * (size_t)part->columns * egi_whole_bytes(weight->dtype);
    EG_TRY(l->backend->upload(l->device, dst, part->data, bytes));
    dst += bytes;
  }
  return EG_OK;
}

static bool is_made(const egi_weight *weight) {
  return weight->bytes.kind == EGI_BYTES_NORMAL || weight->bytes.kind == EGI_BYTES_FILL;
}

/* Elements [first, first + count) of a weight whose numbers are made. */
static eg_status generate(const loading *l, const egi_weight *weight, uint64_t first, uint64_t count, void *dst) {
  const egi_generated numbers = {.dtype = weight->dtype,
                                 .is_normal = weight->bytes.kind == EGI_BYTES_NORMAL,
                                 .value = weight->bytes.value,
                                 .seed = weight->bytes.seed,
                                 .stream = egi_hash(weight->name, strlen(weight->name), 0),
                                 .first = first,
                                 .count = count};
  return l->backend->generate != NULL ? l->backend->generate(l->device, &numbers, dst) : EG_ERROR_UNSUPPORTED;
}

eg_status egi_load_weight(eg_context *ctx, const egi_backend *backend, egi_device *device, const egi_weight *weight,
                          void *dst) {
  const loading l = {ctx, backend, device};
  uint64_t size_bytes = 0;
  EG_TRY(egi_weight_bytes(ctx, weight, &size_bytes));
  if (weight->bytes.kind == EGI_BYTES_MEMORY)
    return backend->upload(device, dst, weight->bytes.data, (size_t)size_bytes);
  if (has_plain_parts(weight, size_bytes)) return load_parts(&l, weight, dst);
  eg_status status = EG_ERROR_UNSUPPORTED;
  uint32_t element = egi_whole_bytes(weight->dtype);
  if (is_made(weight) && element > 0) status = generate(&l, weight, 0, size_bytes / element, dst);
  return status == EG_ERROR_UNSUPPORTED ? load_made(&l, weight, size_bytes, dst) : status;
}

/* ---- quantised on the device ------------------------------------------------------------------------------------ */

enum { PIECE_BYTES = 64 << 20, LARGEST_BLOCK = 4096 };

typedef struct quantising {
  loading l;
  const egi_quantisation *q;
  uint8_t *codes;
  float *scales; /* of the device */
  void *piece;   /* the matrix passes through */
  uint64_t count, n_blocks, piece_count;
} quantising;

typedef struct device_memory {
  void *memory;
  size_t size_bytes;
} device_memory;

static eg_status take(const loading *l, uint64_t size_bytes, device_memory *out) {
  out->size_bytes = (size_t)size_bytes;
  return l->backend->allocate(l->device, EGI_PURPOSE_WEIGHTS, out->size_bytes, &out->memory);
}

static void give_back(const loading *l, device_memory *owned) {
  if (owned->memory != NULL) l->backend->release(l->device, EGI_PURPOSE_WEIGHTS, owned->memory, owned->size_bytes);
}

static eg_status encode_pieces(const quantising *run) {
  const egi_weight *matrix = &run->q->matrix;
  uint64_t element = egi_whole_bytes(matrix->dtype);
  for (uint64_t first = 0; first < run->count; first += run->piece_count) {
    uint64_t n = run->count - first < run->piece_count ? run->count - first : run->piece_count;
    const loading *l = &run->l;
    EG_TRY(matrix->bytes.kind == EGI_BYTES_MEMORY
               ? l->backend->upload(l->device, run->piece, matrix->bytes.data + first * element, (size_t)(n * element))
               : generate(l, matrix, first, n, run->piece));
    const egi_four_bit_run piece = {.dtype = matrix->dtype,
                                    .type = run->q->type,
                                    .block = run->q->block,
                                    .count = (int64_t)n,
                                    .values = run->piece,
                                    .codes = run->codes + first / 2,
                                    .scales = run->scales + first / (uint64_t)run->q->block};
    EG_TRY(l->backend->encode(l->device, &piece));
  }
  return EG_OK;
}

/* Scales come to the host, to be looked at and, where they are codes themselves, encoded: one for each block. */
static eg_status finish_scales(const quantising *run, const egi_quantised_memory *memory, float *scales, uint8_t *codes,
                               float *nested) {
  const loading *l = &run->l;
  EG_TRY(l->backend->download(l->device, scales, run->scales, (size_t)(run->n_blocks * sizeof *scales)));
  for (uint64_t i = 0; i < run->n_blocks; i++)
    if (!isfinite(scales[i]))
      return egi_fail(l->ctx, EG_ERROR_DATA, "weight \"%s\" has numbers that are not finite: it cannot be quantised",
                      run->q->matrix.name);
  if (!run->q->is_nested) return EG_OK;
  egi_nested_encode(scales, run->n_blocks, codes, nested);
  if (memory->parts[EGI_QUANTISED_SCALES] != NULL)
    EG_TRY(l->backend->upload(l->device, memory->parts[EGI_QUANTISED_SCALES], codes, (size_t)run->n_blocks));
  if (memory->parts[EGI_QUANTISED_NESTED] == NULL) return EG_OK;
  return l->backend->upload(l->device, memory->parts[EGI_QUANTISED_NESTED], nested,
                            (size_t)egi_nested_count(run->n_blocks) * sizeof *nested);
}

static eg_status quantise_on_device(quantising *run, const egi_quantised_memory *memory, device_memory made[2]) {
  const loading *l = &run->l;
  size_t scale_bytes = (size_t)(run->n_blocks * sizeof(float)),
         staging_bytes = scale_bytes + (size_t)egi_nested_count(run->n_blocks) * sizeof(float) + (size_t)run->n_blocks;
  EG_TRY(take(l, run->piece_count * egi_whole_bytes(run->q->matrix.dtype), &made[0]));
  run->piece = made[0].memory;
  run->codes = memory->parts[EGI_QUANTISED_CODES];
  run->scales = run->q->is_nested ? NULL : memory->parts[EGI_QUANTISED_SCALES];
  if (run->scales == NULL) {
    EG_TRY(take(l, scale_bytes, &made[1]));
    run->scales = made[1].memory;
  }
  EG_TRY(encode_pieces(run));
  float *staging = egi_allocate(l->ctx, EGI_PURPOSE_DATA, staging_bytes);
  if (staging == NULL) return EG_ERROR_MEMORY;
  float *nested = staging + run->n_blocks;
  uint8_t *codes = (uint8_t *)(nested + egi_nested_count(run->n_blocks));
  eg_status status = finish_scales(run, memory, staging, codes, nested);
  egi_release(l->ctx, EGI_PURPOSE_DATA, staging, staging_bytes);
  return status;
}

/* What the device cannot do, or what does not lie row by row, is quantised on the host. */
eg_status egi_load_quantised(eg_context *ctx, const egi_backend *backend, egi_device *device, const egi_quantisation *q,
                             const egi_quantised_memory *memory) {
  quantising run = {.l = {ctx, backend, device}, .q = q};
  device_memory made[2] = {{NULL, 0}};
  const egi_weight *matrix = &q->matrix;
  uint64_t element = egi_whole_bytes(matrix->dtype), size_bytes = 0;
  run.count = (uint64_t)q->n_matrices * (uint64_t)q->rows * (uint64_t)q->columns;
  EG_TRY(egi_weight_bytes(ctx, matrix, &size_bytes));
  bool is_plain = matrix->bytes.kind == EGI_BYTES_MEMORY || is_made(matrix);
  bool is_even = element > 0 && q->block >= 32 && q->block <= LARGEST_BLOCK && (q->block & (q->block - 1)) == 0;
  if (backend->encode == NULL || !is_plain || !is_even || q->is_transposed || size_bytes != run.count * element ||
      run.count == 0 || memory->parts[EGI_QUANTISED_CODES] == NULL)
    return quantise_on_host(&run.l, q, memory);
  run.n_blocks = (run.count + (uint64_t)q->block - 1) / (uint64_t)q->block;
  run.piece_count = run.count < PIECE_BYTES / element ? run.count : PIECE_BYTES / element;
  eg_status status = quantise_on_device(&run, memory, made);
  for (size_t i = 0; i < EGI_COUNT(made); i++) give_back(&run.l, &made[i]);
  return status == EG_ERROR_UNSUPPORTED ? quantise_on_host(&run.l, q, memory) : status;
}
