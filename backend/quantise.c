/* Matrices as 4-bit codes, made when they are loaded: read where they lie, in chunks on the pool. Chunks are whole
 * blocks and depend on sizes alone, so codes do not depend on the number of threads. */
#include <math.h>

#include "backend/plan.h"
#include "base/blockwise.h"

enum { CHUNK = 1 << 16, LARGEST_BLOCK = 4096 };

typedef struct quantiser {
  const egi_quantisation *q;
  const uint8_t *matrix;
  uint64_t count;
  uint8_t *codes;
  float *scales;
} quantiser;

static uint64_t count_of(const egi_quantisation *q) {
  return (uint64_t)q->n_matrices * (uint64_t)q->rows * (uint64_t)q->columns;
}

static uint64_t blocks_of(const egi_quantisation *q) {
  return (count_of(q) + (uint64_t)q->block - 1) / (uint64_t)q->block;
}

uint64_t egi_quantised_bytes(const egi_quantisation *q, egi_quantised_tensor part) {
  if (part == EGI_QUANTISED_CODES) return (count_of(q) + 1) / 2;
  if (part == EGI_QUANTISED_NESTED) return q->is_nested ? egi_nested_count(blocks_of(q)) * sizeof(float) : 0;
  return blocks_of(q) * (q->is_nested ? 1 : sizeof(float));
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static float half_at(eg_dtype dtype, const uint8_t *bytes) {
  uint16_t bits = 0;
  memcpy(&bits, bytes, sizeof bits);
  return dtype == EG_DTYPE_F16 ? egi_f16_to_f32(bits) : egi_bf16_to_f32(bits);
}

/* Contiguous bfloat16: the upper half of a float32. */
static void widen_bf16(const uint8_t *bytes, size_t n, float *out) {
  enum { RUN = 32 };
  size_t done = 0;
  for (; done + RUN <= n; done += RUN) {
    uint16_t narrow[RUN];
    uint32_t wide[RUN];
    memcpy(narrow, bytes + 2 * done, sizeof narrow);
    for (int i = 0; i < RUN; i++) wide[i] = (uint32_t)narrow[i] << 16;
    memcpy(out + done, wide, sizeof wide);
  }
  for (; done < n; done++) out[done] = half_at(EG_DTYPE_BF16, bytes + 2 * done);
}

/* n elements `stride` apart, from any alignment. */
static void read_run(eg_dtype dtype, const uint8_t *bytes, uint64_t stride, size_t n, float *out) {
  size_t element = egi_whole_bytes(dtype);
  if (stride == 1 && dtype == EG_DTYPE_BF16) {
    widen_bf16(bytes, n, out);
    return;
  }
  if (stride == 1 && dtype == EG_DTYPE_F32) {
    memcpy(out, bytes, n * sizeof *out);
    return;
  }
  for (size_t i = 0; i < n; i++, bytes += stride * element) {
    if (dtype == EG_DTYPE_F32)
      memcpy(&out[i], bytes, sizeof *out);
    else
      out[i] = half_at(dtype, bytes);
  }
}

/* Elements [first, first + n) of the flattened matrices. */
static void read_block(const quantiser *run, uint64_t first, size_t n, float *out) {
  const egi_quantisation *q = run->q;
  size_t bytes = egi_whole_bytes(q->matrix.dtype);
  uint64_t rows = (uint64_t)q->rows, columns = (uint64_t)q->columns;
  if (!q->is_transposed) {
    read_run(q->matrix.dtype, run->matrix + first * bytes, 1, n, out);
    return;
  }
  for (size_t done = 0, part = 0; done < n; done += part) {
    uint64_t at = first + done, matrix = at / (rows * columns), row = at / columns % rows, column = at % columns;
    part = columns - column < n - done ? (size_t)(columns - column) : n - done;
    read_run(q->matrix.dtype, run->matrix + ((matrix * columns + column) * rows + row) * bytes, rows, part, out + done);
  }
}

static void quantise_chunk(void *argument, size_t index, size_t worker) {
  const quantiser *run = argument;
  uint64_t block = (uint64_t)run->q->block, first = (uint64_t)index * CHUNK, end = first + CHUNK;
  float values[LARGEST_BLOCK];
  (void)worker;
  if (end > run->count) end = run->count;
  for (uint64_t at = first; at < end; at += block) {
    size_t n = (size_t)(end - at < block ? end - at : block);
    read_block(run, at, n, values);
    run->scales[at / block] = egi_four_bit_encode((egi_four_bit)run->q->type, values, n, run->codes + at / 2);
  }
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

typedef struct temporary {
  void *memory;
  size_t size_bytes;
} temporary;

static eg_status allocate(eg_context *ctx, uint64_t size_bytes, temporary *out) {
  out->size_bytes = (size_t)size_bytes;
  out->memory = egi_allocate(ctx, EGI_PURPOSE_DATA, out->size_bytes);
  return out->memory != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static void release(eg_context *ctx, temporary *owned) {
  if (owned->memory != NULL) egi_release(ctx, EGI_PURPOSE_DATA, owned->memory, owned->size_bytes);
}

static eg_status check(eg_context *ctx, const egi_quantisation *q) {
  const egi_weight *matrix = &q->matrix;
  uint64_t size_bytes = 0;
  bool is_float = matrix->dtype == EG_DTYPE_F32 || matrix->dtype == EG_DTYPE_F16 || matrix->dtype == EG_DTYPE_BF16;
  EG_TRY(egi_weight_bytes(ctx, matrix, &size_bytes));
  if (!is_float || q->block < 32 || q->block > LARGEST_BLOCK || (q->block & (q->block - 1)) != 0 || q->n_matrices < 0 ||
      q->rows < 0 || q->columns < 0 || size_bytes / egi_whole_bytes(matrix->dtype) != count_of(q))
    return egi_fail(ctx, EG_ERROR_INTERNAL, "weight \"%s\" of type %s cannot be quantised", matrix->name,
                    egi_dtype_name(matrix->dtype));
  return EG_OK;
}

/* Matrices without bytes of their own are made first. */
static eg_status find_matrix(eg_context *ctx, const egi_quantisation *q, temporary *made, const uint8_t **out_matrix) {
  uint64_t size_bytes = 0;
  *out_matrix = q->matrix.bytes.data;
  if (q->matrix.bytes.kind == EGI_BYTES_MEMORY) return EG_OK;
  EG_TRY(egi_weight_bytes(ctx, &q->matrix, &size_bytes));
  EG_TRY(allocate(ctx, size_bytes, made));
  *out_matrix = made->memory;
  return egi_weight_write(ctx, &q->matrix, made->memory);
}

static eg_status check_scales(eg_context *ctx, const egi_quantisation *q, const float *scales, uint64_t n) {
  for (uint64_t i = 0; i < n; i++)
    if (!isfinite(scales[i]))
      return egi_fail(ctx, EG_ERROR_DATA, "weight \"%s\" has numbers that are not finite: it cannot be quantised",
                      q->matrix.name);
  return EG_OK;
}

enum { MADE_MATRIX, MADE_CODES, MADE_SCALES, MADE_SCALE_CODES, MADE_NESTED, MADE_COUNT };

/* What the caller has no room for; f32 scales always exist. */
static eg_status make_room(eg_context *ctx, const egi_quantisation *q, egi_quantised_memory *memory, temporary *made,
                           float **out_scales) {
  void **parts = memory->parts;
  uint64_t n_blocks = blocks_of(q);
  if (parts[EGI_QUANTISED_CODES] == NULL) {
    EG_TRY(allocate(ctx, egi_quantised_bytes(q, EGI_QUANTISED_CODES), &made[MADE_CODES]));
    parts[EGI_QUANTISED_CODES] = made[MADE_CODES].memory;
  }
  *out_scales = q->is_nested ? NULL : parts[EGI_QUANTISED_SCALES];
  if (*out_scales == NULL) {
    EG_TRY(allocate(ctx, n_blocks * sizeof(float), &made[MADE_SCALES]));
    *out_scales = made[MADE_SCALES].memory;
  }
  if (!q->is_nested) return EG_OK;
  if (parts[EGI_QUANTISED_SCALES] == NULL) {
    EG_TRY(allocate(ctx, n_blocks, &made[MADE_SCALE_CODES]));
    parts[EGI_QUANTISED_SCALES] = made[MADE_SCALE_CODES].memory;
  }
  if (parts[EGI_QUANTISED_NESTED] == NULL) {
    EG_TRY(allocate(ctx, egi_quantised_bytes(q, EGI_QUANTISED_NESTED), &made[MADE_NESTED]));
    parts[EGI_QUANTISED_NESTED] = made[MADE_NESTED].memory;
  }
  return EG_OK;
}

static eg_status quantise(eg_context *ctx, const egi_quantisation *q, egi_quantised_memory *memory, temporary *made) {
  quantiser run = {.q = q, .count = count_of(q)};
  EG_TRY(find_matrix(ctx, q, &made[MADE_MATRIX], &run.matrix));
  EG_TRY(make_room(ctx, q, memory, made, &run.scales));
  run.codes = memory->parts[EGI_QUANTISED_CODES];
  egi_pool_run(egi_context_pool(ctx), (size_t)((run.count + CHUNK - 1) / CHUNK), quantise_chunk, &run);
  EG_TRY(check_scales(ctx, q, run.scales, blocks_of(q)));
  if (q->is_nested)
    egi_nested_encode(run.scales, blocks_of(q), memory->parts[EGI_QUANTISED_SCALES],
                      memory->parts[EGI_QUANTISED_NESTED]);
  return EG_OK;
}

eg_status egi_quantise(eg_context *ctx, const egi_quantisation *quantisation, const egi_quantised_memory *memory) {
  egi_quantised_memory own = *memory;
  temporary made[MADE_COUNT] = {{NULL, 0}};
  EG_TRY(check(ctx, quantisation));
  eg_status status = quantise(ctx, quantisation, &own, made);
  for (int i = 0; i < MADE_COUNT; i++) release(ctx, &made[i]);
  return status;
}

static eg_status make_tensors(egi_module *module, const egi_quantisation *q) {
  egi_quantised_memory memory = {{NULL}};
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++) {
    if (q->weights[part] == 0) continue;
    memory.parts[part] = egi_arena_get(&module->arena, (size_t)egi_quantised_bytes(q, (egi_quantised_tensor)part), 1);
    if (memory.parts[part] == NULL) return EG_ERROR_MEMORY;
  }
  EG_TRY(egi_quantise(module->ctx, q, &memory));
  for (unsigned part = 0; part < EGI_QUANTISED_PARTS; part++)
    if (q->weights[part] != 0)
      module->weights[q->weights[part]].bytes =
          (egi_bytes){.kind = EGI_BYTES_MEMORY,
                      .data = memory.parts[part],
                      .size_bytes = egi_quantised_bytes(q, (egi_quantised_tensor)part)};
  return EG_OK;
}

static eg_status make_decoded(egi_module *module, uint32_t index) {
  egi_weight *weight = &module->weights[index];
  uint64_t size_bytes = 0;
  EG_TRY(egi_weight_bytes(module->ctx, weight, &size_bytes));
  uint8_t *data = egi_arena_get(&module->arena, (size_t)size_bytes, 1);
  if (data == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_weight_write(module->ctx, weight, data));
  weight->bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = data, .size_bytes = size_bytes};
  return EG_OK;
}

eg_status egi_quantise_module(egi_module *module) {
  for (uint32_t i = 1; i < module->n_weights; i++) {
    const egi_bytes *bytes = &module->weights[i].bytes;
    if (bytes->kind == EGI_BYTES_QUANTISED) EG_TRY(make_tensors(module, bytes->quantisation));
    if (bytes->kind == EGI_BYTES_MXFP4) EG_TRY(make_decoded(module, i));
  }
  return EG_OK;
}
