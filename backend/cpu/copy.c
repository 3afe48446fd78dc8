/* Strided copies and fills: contiguous runs by memcpy, transpositions in tiles, the rest element by element. */
#include "backend/cpu/strided.h"

/* A tile of a transposition is one cache line of the output wide and four of the input: it passes through a buffer, so
 * that every line of both sides is touched once, whatever their distance. */
#define LINE_BYTES 64
#define LINES_ACROSS 4

/* ---- by element size ------------------------------------------------------------------------------------------ */

#define COPY(bytes)                                                                                    \
  static void copy_##bytes(const void *params, char *const *data, const int64_t *strides, int64_t n) { \
    (void)params;                                                                                      \
    const int64_t s0 = strides[0], s1 = strides[1];                                                    \
    char *out = data[0];                                                                               \
    const char *in = data[1];                                                                          \
    if (s0 == bytes && s1 == bytes) {                                                                  \
      memcpy(out, in, (size_t)n *bytes);                                                               \
      return;                                                                                          \
    }                                                                                                  \
    for (int64_t i = 0; i < n; i++) memcpy(out + i * s0, in + i * s1, bytes);                          \
  }
COPY(1)
COPY(2)
COPY(4)
COPY(8)
COPY(16)

egi_inner egi_copy_inner(size_t element_bytes) {
  switch (element_bytes) {
  case 1:
    return copy_1;
  case 2:
    return copy_2;
  case 4:
    return copy_4;
  case 8:
    return copy_8;
  case 16:
    return copy_16;
  default:
    return NULL;
  }
}

/* ---- transpositions ------------------------------------------------------------------------------------------- */

/* out[i * out_stride + k] = in[k * in_stride + i] for i < n_across, k < n_along; strides in bytes. */
typedef void (*tile_function)(char *out, const char *in, const int64_t *strides, int64_t n_along, int64_t n_across);

/* Whole tiles have sizes that the compiler knows. */
#define TRANSPOSE(bytes)                                                                                   \
  enum { ALONG_##bytes = LINE_BYTES / bytes, ACROSS_##bytes = LINES_ACROSS * LINE_BYTES / bytes };         \
  static inline void tile_##bytes(char *out, const char *in, const int64_t *strides, int64_t n_along,      \
                                  int64_t n_across) {                                                      \
    char block[ALONG_##bytes][ACROSS_##bytes][bytes];                                                      \
    char line[ALONG_##bytes][bytes];                                                                       \
    for (int64_t k = 0; k < n_along; k++) memcpy(block[k], in + k * strides[1], (size_t)n_across * bytes); \
    for (int64_t i = 0; i < n_across; i++) {                                                               \
      for (int64_t k = 0; k < n_along; k++) memcpy(line[k], block[k][i], bytes);                           \
      memcpy(out + i * strides[0], line, (size_t)n_along * bytes);                                         \
    }                                                                                                      \
  }                                                                                                        \
  static void transpose_##bytes(char *out, const char *in, const int64_t *strides, int64_t n_along,        \
                                int64_t n_across) {                                                        \
    if (n_along == ALONG_##bytes && n_across == ACROSS_##bytes) {                                          \
      tile_##bytes(out, in, strides, ALONG_##bytes, ACROSS_##bytes);                                       \
    } else {                                                                                               \
      tile_##bytes(out, in, strides, n_along, n_across);                                                   \
    }                                                                                                      \
  }
TRANSPOSE(1)
TRANSPOSE(2)
TRANSPOSE(4)
TRANSPOSE(8)
TRANSPOSE(16)

static tile_function transpose_of(int64_t element_bytes) {
  switch (element_bytes) {
  case 1:
    return transpose_1;
  case 2:
    return transpose_2;
  case 4:
    return transpose_4;
  case 8:
    return transpose_8;
  default:
    return transpose_16;
  }
}

/* The last dim of the loop is contiguous in the output, dim `across` in the input; both are cut into tiles. */
typedef struct transposition {
  egi_strided loop; /* dims without the two */
  tile_function transpose;
  int64_t along, across;           /* sizes of the two dims */
  int64_t tile_along, tile_across; /* and of a tile */
  int64_t strides[2];              /* bytes: of `across` in the output, of `along` in the input; the others are 1 */
  int64_t element_bytes;
  int64_t tiles_along, tiles_across, tiles_per_task, n_tiles;
} transposition;

static int64_t minimum(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static void copy_tile(const transposition *t, int64_t tile) {
  int64_t along = tile % t->tiles_along * t->tile_along;
  int64_t across = tile / t->tiles_along % t->tiles_across * t->tile_across;
  int64_t outer = tile / t->tiles_along / t->tiles_across;
  char *out = t->loop.data[0] + along * t->element_bytes + across * t->strides[0];
  char *in = t->loop.data[1] + along * t->strides[1] + across * t->element_bytes;
  for (int i = t->loop.rank - 1; i >= 0; i--) {
    int64_t index = outer % t->loop.dims[i];
    outer /= t->loop.dims[i];
    out += index * t->loop.strides[0][i];
    in += index * t->loop.strides[1][i];
  }
  t->transpose(out, in, t->strides, minimum(t->tile_along, t->along - along),
               minimum(t->tile_across, t->across - across));
}

static void run_tiles(void *argument, size_t index, size_t worker) {
  (void)worker;
  const transposition *t = argument;
  int64_t start = (int64_t)index * t->tiles_per_task;
  int64_t end = minimum(start + t->tiles_per_task, t->n_tiles);
  for (int64_t tile = start; tile < end; tile++) copy_tile(t, tile);
}

/* The dim that is contiguous in the input while the last one is not; -1 when tiles would not help. */
static int find_across(const egi_strided *loop, int64_t element_bytes) {
  int last = loop->rank - 1;
  int64_t in = loop->strides[1][last];
  if (loop->strides[0][last] != element_bytes || in == element_bytes || in == 0 || loop->dims[last] < 8) return -1;
  for (int i = 0; i < last; i++) {
    if (loop->strides[1][i] == element_bytes && loop->dims[i] >= 8) return i;
  }
  return -1;
}

static void run_transposition(egi_pool *pool, const egi_strided *loop, int across, int64_t element_bytes) {
  int last = loop->rank - 1;
  transposition t = {.loop = *loop,
                     .transpose = transpose_of(element_bytes),
                     .along = loop->dims[last],
                     .across = loop->dims[across],
                     .tile_along = LINE_BYTES / element_bytes,
                     .tile_across = LINES_ACROSS * LINE_BYTES / element_bytes,
                     .strides = {loop->strides[0][across], loop->strides[1][last]},
                     .element_bytes = element_bytes};
  t.loop.rank = 0;
  for (int i = 0; i < last; i++) {
    if (i == across) continue;
    int to = t.loop.rank++;
    t.loop.dims[to] = loop->dims[i];
    for (unsigned k = 0; k < 2; k++) t.loop.strides[k][to] = loop->strides[k][i];
  }
  t.tiles_along = (t.along + t.tile_along - 1) / t.tile_along;
  t.tiles_across = (t.across + t.tile_across - 1) / t.tile_across;
  t.n_tiles = t.tiles_along * t.tiles_across * (loop->count / (t.along * t.across));
  t.tiles_per_task = egi_rows_per_task(t.tile_along * t.tile_across);
  size_t n_tasks = (size_t)((t.n_tiles + t.tiles_per_task - 1) / t.tiles_per_task);
  if (pool == NULL || n_tasks == 1) {
    for (size_t i = 0; i < n_tasks; i++) run_tiles(&t, i, 0);
  } else {
    egi_pool_run(pool, n_tasks, run_tiles, &t);
  }
}

/* ---- public --------------------------------------------------------------------------------------------------- */

static bool is_same_view(const egi_strided *loop) {
  if (loop->data[0] != loop->data[1]) return false;
  for (int i = 0; i < loop->rank; i++) {
    if (loop->strides[0][i] != loop->strides[1][i]) return false;
  }
  return true;
}

void egi_copy(egi_pool *pool, const egi_tensor *output, const egi_tensor *input) {
  size_t element_bytes = egi_element_bytes(output->dtype);
  if (element_bytes == 0) { /* packed types are contiguous */
    uint64_t bytes = 0;
    bool fits = egi_dtype_bytes(output->dtype, (uint64_t)egi_tensor_count(output), &bytes);
    if (fits && bytes > 0 && output->data != input->data) memcpy(output->data, input->data, (size_t)bytes);
    return;
  }
  egi_strided loop;
  egi_strided_init(&loop, output);
  egi_strided_add(&loop, input);
  egi_strided_collapse(&loop);
  if (loop.count == 0 || is_same_view(&loop)) return;
  int across = find_across(&loop, (int64_t)element_bytes);
  if (across >= 0) {
    run_transposition(pool, &loop, across, (int64_t)element_bytes);
  } else {
    egi_strided_run(pool, &loop, EGI_TASK_ELEMENTS, egi_copy_inner(element_bytes), NULL);
  }
}

void egi_fill(egi_pool *pool, const egi_tensor *output, const void *value) {
  char element[16];
  memcpy(element, value, egi_element_bytes(output->dtype));
  egi_tensor scalar = {.data = element, .dtype = output->dtype, .rank = 0};
  egi_copy(pool, output, &scalar);
}

int64_t egi_row_offset(const egi_tensor *tensor, int n_dims, int64_t row) {
  int64_t offset = 0;
  for (int i = n_dims - 1; i >= 0; i--) {
    offset += row % tensor->dims[i] * tensor->strides[i];
    row /= tensor->dims[i];
  }
  return offset;
}

int64_t egi_dims_product(const egi_tensor *tensor, int first, int last) {
  int64_t product = 1;
  for (int i = first; i < last; i++) product *= tensor->dims[i];
  return product;
}

int64_t egi_rows_per_task(int64_t row_elements) {
  return row_elements >= EGI_TASK_ELEMENTS || row_elements <= 0 ? 1 : EGI_TASK_ELEMENTS / row_elements;
}
