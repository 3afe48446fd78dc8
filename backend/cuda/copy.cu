/* Strided copies and fills. What is contiguous goes by the copy engine or in 16-byte words, transpositions in tiles
 * through shared memory, the rest element by element. Nothing is computed: deterministic. */
#include "backend/cuda/strided.cuh"

namespace egi::plain {

/* ---- words ------------------------------------------------------------------------------------------------------- */

template <class Word> __global__ void copy_words(strided loop) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < loop.count; i += step) {
    int64_t offsets[2];
    offsets_at(loop, i, offsets);
    *reinterpret_cast<Word *>(loop.data[0] + offsets[0]) = *reinterpret_cast<const Word *>(loop.data[1] + offsets[1]);
  }
}

size_t widen(strided *loop, size_t element_bytes, uint64_t places) {
  const int last = loop->rank - 1;
  const int64_t bytes = static_cast<int64_t>(element_bytes);
  if (loop->strides[0][last] != bytes || loop->strides[1][last] != bytes) return element_bytes;
  /* What all of them are multiples of is what their bits, taken together, are a multiple of. */
  uint64_t all = places | static_cast<uint64_t>(loop->dims[last] * bytes);
  for (int k = 0; k < 2; k++) {
    all |= reinterpret_cast<uintptr_t>(loop->data[k]);
    for (int i = 0; i < last; i++) all |= static_cast<uint64_t>(loop->strides[k][i]);
  }
  size_t word = 16;
  while (word > element_bytes && all % word != 0) word /= 2;
  const int64_t ratio = static_cast<int64_t>(word / element_bytes);
  loop->dims[last] /= ratio;
  loop->count /= ratio;
  loop->strides[0][last] = loop->strides[1][last] = static_cast<int64_t>(word);
  return word;
}

static void launch_words(const strided &loop, size_t word, cudaStream_t stream) {
  const unsigned blocks = blocks_for(loop.count);
  switch (word) {
  case 1:
    copy_words<uint8_t><<<blocks, BLOCK_THREADS, 0, stream>>>(loop);
    break;
  case 2:
    copy_words<uint16_t><<<blocks, BLOCK_THREADS, 0, stream>>>(loop);
    break;
  case 4:
    copy_words<uint32_t><<<blocks, BLOCK_THREADS, 0, stream>>>(loop);
    break;
  case 8:
    copy_words<uint64_t><<<blocks, BLOCK_THREADS, 0, stream>>>(loop);
    break;
  default:
    copy_words<word16><<<blocks, BLOCK_THREADS, 0, stream>>>(loop);
    break;
  }
}

/* ---- transpositions ---------------------------------------------------------------------------------------------- */

/* out[a * out_stride + k] = in[k * in_stride + a] for a < across, k < along, in elements, for each of the outer dims.
 */
struct transposition {
  strided outer; /* dims without the two */
  int64_t along, across, out_stride, in_stride;
  int64_t tiles_along, tiles_across, n_tiles;
};

/* A square tile in shared memory, of which a thread has a few elements of every eighth row under way at a time. */
template <class Element> __global__ void __launch_bounds__(BLOCK_THREADS) transpose_tiles(transposition t) {
  constexpr int SIDE = sizeof(Element) <= 4 ? 64 : 32, ROWS = BLOCK_THREADS / 32;
  __shared__ Element tile[SIDE][SIDE + 1];
  for (int64_t index = blockIdx.x; index < t.n_tiles; index += gridDim.x) {
    const int64_t k0 = index % t.tiles_along * SIDE, rest = index / t.tiles_along;
    const int64_t a0 = rest % t.tiles_across * SIDE;
    int64_t offsets[2];
    offsets_at(t.outer, rest / t.tiles_across, offsets);
    const Element *in = reinterpret_cast<const Element *>(t.outer.data[1] + offsets[1]);
    Element *out = reinterpret_cast<Element *>(t.outer.data[0] + offsets[0]);
#pragma unroll
    for (int row = 0; row < SIDE / ROWS; row++) {
      const int k = row * ROWS + threadIdx.y;
#pragma unroll
      for (int part = 0; part < SIDE / 32; part++) {
        const int a = part * 32 + threadIdx.x;
        if (k0 + k < t.along && a0 + a < t.across) tile[k][a] = in[(k0 + k) * t.in_stride + a0 + a];
      }
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < SIDE / ROWS; row++) {
      const int a = row * ROWS + threadIdx.y;
#pragma unroll
      for (int part = 0; part < SIDE / 32; part++) {
        const int k = part * 32 + threadIdx.x;
        if (k0 + k < t.along && a0 + a < t.across) out[(a0 + a) * t.out_stride + k0 + k] = tile[k][a];
      }
    }
    __syncthreads();
  }
}

/* Halves in whole tiles of 64 x 64: pairs on both sides, the two rows of a pair are taken apart on the way out. Even
 * rows stand before odd ones, 33 words long, so that neither side meets a bank twice. */
__global__ void __launch_bounds__(BLOCK_THREADS) transpose_pairs(transposition t) {
  constexpr int ROWS = BLOCK_THREADS / 32;
  __shared__ uint32_t tile[64][33];
  for (int64_t index = blockIdx.x; index < t.n_tiles; index += gridDim.x) {
    const int64_t k0 = index % t.tiles_along * 64, rest = index / t.tiles_along;
    const int64_t a0 = rest % t.tiles_across * 64;
    int64_t offsets[2];
    offsets_at(t.outer, rest / t.tiles_across, offsets);
    const uint16_t *in = reinterpret_cast<const uint16_t *>(t.outer.data[1] + offsets[1]);
    uint16_t *out = reinterpret_cast<uint16_t *>(t.outer.data[0] + offsets[0]);
#pragma unroll
    for (int row = 0; row < 64 / ROWS; row++) {
      const int k = row * ROWS + threadIdx.y;
      tile[(k & 1) * 32 + k / 2][threadIdx.x] =
          *reinterpret_cast<const uint32_t *>(in + (k0 + k) * t.in_stride + a0 + 2 * threadIdx.x);
    }
    __syncthreads();
    /* Lane k holds rows 2k and 2k + 1 of the input, of two columns: two words of the output. */
#pragma unroll
    for (int group = 0; group < 32 / ROWS; group++) {
      const int pair = group * ROWS + threadIdx.y;
      const uint32_t first = tile[threadIdx.x][pair], second = tile[32 + threadIdx.x][pair];
      uint16_t *target = out + (a0 + 2 * pair) * t.out_stride + k0 + 2 * threadIdx.x;
      *reinterpret_cast<uint32_t *>(target) = __byte_perm(first, second, 0x5410);
      *reinterpret_cast<uint32_t *>(target + t.out_stride) = __byte_perm(first, second, 0x7632);
    }
    __syncthreads();
  }
}

/* The dim in which the input is contiguous while the output is so in the last one; -1: none, or too small to gain. */
static int find_across(const strided *loop, int64_t element_bytes) {
  const int last = loop->rank - 1;
  if (loop->strides[0][last] != element_bytes || loop->strides[1][last] == element_bytes || loop->dims[last] < 8)
    return -1;
  if (loop->strides[1][last] % element_bytes != 0) return -1;
  for (int i = 0; i < last; i++) {
    if (loop->strides[1][i] == element_bytes && loop->dims[i] >= 8) return i;
  }
  return -1;
}

static transposition plan_transposition(const strided &loop, int across, int64_t element_bytes, int side) {
  transposition t = {};
  const int last = loop.rank - 1;
  t.outer = loop;
  t.outer.rank = 0;
  t.outer.count = 1;
  for (int i = 0; i < last; i++) {
    if (i == across) continue;
    const int to = t.outer.rank++;
    t.outer.dims[to] = loop.dims[i];
    for (int k = 0; k < 2; k++) t.outer.strides[k][to] = loop.strides[k][i];
    t.outer.count *= loop.dims[i];
  }
  if (t.outer.rank == 0) {
    t.outer.rank = 1;
    t.outer.dims[0] = 1;
    t.outer.strides[0][0] = t.outer.strides[1][0] = 0;
  }
  t.along = loop.dims[last];
  t.across = loop.dims[across];
  t.out_stride = loop.strides[0][across] / element_bytes;
  t.in_stride = loop.strides[1][last] / element_bytes;
  t.tiles_along = (t.along + side - 1) / side;
  t.tiles_across = (t.across + side - 1) / side;
  t.n_tiles = t.outer.count * t.tiles_along * t.tiles_across;
  return t;
}

/* Whole tiles, and words at even places everywhere. */
static bool has_pairs(const transposition &t) {
  bool is_even = t.along % 64 == 0 && t.across % 64 == 0 && t.out_stride % 2 == 0 && t.in_stride % 2 == 0;
  for (int k = 0; k < 2; k++) {
    is_even = is_even && reinterpret_cast<uintptr_t>(t.outer.data[k]) % 4 == 0;
    for (int i = 0; i < t.outer.rank; i++) is_even = is_even && t.outer.strides[k][i] % 4 == 0;
  }
  return is_even;
}

static void launch_transposition(const strided &loop, int across, size_t element_bytes, cudaStream_t stream) {
  const int side = element_bytes <= 4 ? 64 : 32;
  const transposition t = plan_transposition(loop, across, static_cast<int64_t>(element_bytes), side);
  const int64_t limit = 1 << 22;
  const unsigned blocks = static_cast<unsigned>(t.n_tiles < limit ? t.n_tiles : limit);
  const dim3 threads(32, BLOCK_THREADS / 32);
  switch (element_bytes) {
  case 1:
    transpose_tiles<uint8_t><<<blocks, threads, 0, stream>>>(t);
    break;
  case 2:
    if (has_pairs(t))
      transpose_pairs<<<blocks, threads, 0, stream>>>(t);
    else
      transpose_tiles<uint16_t><<<blocks, threads, 0, stream>>>(t);
    break;
  case 4:
    transpose_tiles<uint32_t><<<blocks, threads, 0, stream>>>(t);
    break;
  default:
    transpose_tiles<uint64_t><<<blocks, threads, 0, stream>>>(t);
    break;
  }
}

/* ---- fills ------------------------------------------------------------------------------------------------------- */

struct fill_value {
  uint8_t bytes[16];
};

template <class Word> __global__ void fill_words(strided loop, fill_value value) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  Word word;
  memcpy(&word, value.bytes, sizeof word);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < loop.count; i += step) {
    int64_t offsets[1];
    offsets_at(loop, i, offsets);
    *reinterpret_cast<Word *>(loop.data[0] + offsets[0]) = word;
  }
}

struct inline_bytes {
  uint8_t bytes[INLINE_BYTES];
};

__global__ void write_bytes(uint8_t *target, inline_bytes content, int count) {
  for (int i = threadIdx.x; i < count; i += BLOCK_THREADS) target[i] = content.bytes[i];
}

/* ---- entry points ------------------------------------------------------------------------------------------------ */

static bool is_same_view(const strided *loop) {
  bool is_same = loop->data[0] == loop->data[1];
  for (int i = 0; i < loop->rank; i++) is_same = is_same && loop->strides[0][i] == loop->strides[1][i];
  return is_same;
}

static eg_status copy_packed(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output,
                             const egi_tensor *input) {
  uint64_t bytes = 0;
  if (!egi_dtype_bytes(output->dtype, static_cast<uint64_t>(egi_tensor_count(output)), &bytes))
    return EG_ERROR_INTERNAL;
  if (bytes == 0 || output->data == input->data) return EG_OK;
  EGI_CUDA_TRY(ctx, cudaMemcpyAsync(output->data, input->data, bytes, cudaMemcpyDefault, stream->stream));
  return EG_OK;
}

eg_status copy_tensor(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output,
                      const egi_tensor *input) {
  const size_t element_bytes = egi_element_bytes(output->dtype);
  if (element_bytes == 0) return copy_packed(ctx, stream, output, input);
  strided loop;
  strided_init(&loop, output);
  strided_add(&loop, input);
  strided_collapse(&loop);
  if (loop.count == 0 || is_same_view(&loop)) return EG_OK;
  const int64_t bytes = static_cast<int64_t>(element_bytes);
  const bool is_single = loop.count == 1;
  if (is_single || (loop.rank == 1 && loop.strides[0][0] == bytes && loop.strides[1][0] == bytes)) {
    const size_t size_bytes = static_cast<size_t>(loop.count) * element_bytes;
    EGI_CUDA_TRY(ctx, cudaMemcpyAsync(loop.data[0], loop.data[1], size_bytes, cudaMemcpyDefault, stream->stream));
    return EG_OK;
  }
  const int across = element_bytes <= 8 ? find_across(&loop, bytes) : -1;
  if (across >= 0) {
    launch_transposition(loop, across, element_bytes, stream->stream);
  } else {
    const size_t word = widen(&loop, element_bytes, 0);
    launch_words(loop, word, stream->stream);
  }
  return egi_cuda_launched(ctx, "copy");
}

eg_status fill_tensor(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output, const void *value) {
  egi_tensor scalar = {};
  scalar.data = const_cast<void *>(value); /* read only: the operand of a copy */
  scalar.dtype = output->dtype;
  return copy_tensor(ctx, stream, output, &scalar);
}

/* The innermost run in 16-byte words where it can be. */
static size_t widen_fill(strided *loop, size_t element_bytes, fill_value *value) {
  for (size_t i = element_bytes; i < sizeof value->bytes; i++) value->bytes[i] = value->bytes[i - element_bytes];
  const int last = loop->rank - 1;
  bool fits = loop->strides[0][last] == static_cast<int64_t>(element_bytes) &&
              loop->dims[last] * loop->strides[0][last] % 16 == 0 &&
              reinterpret_cast<uintptr_t>(loop->data[0]) % 16 == 0;
  for (int i = 0; i < last; i++) fits = fits && loop->strides[0][i] % 16 == 0;
  if (!fits) return element_bytes;
  const int64_t ratio = static_cast<int64_t>(16 / element_bytes);
  loop->dims[last] /= ratio;
  loop->count /= ratio;
  loop->strides[0][last] = 16;
  return 16;
}

eg_status fill_from_host(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output, const void *value) {
  const size_t element_bytes = egi_element_bytes(output->dtype);
  fill_value content = {};
  strided loop;
  strided_init(&loop, output);
  strided_collapse(&loop);
  if (loop.count == 0) return EG_OK;
  memcpy(content.bytes, value, element_bytes);
  const size_t word = widen_fill(&loop, element_bytes, &content);
  const unsigned blocks = blocks_for(loop.count);
  switch (word) {
  case 1:
    fill_words<uint8_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(loop, content);
    break;
  case 2:
    fill_words<uint16_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(loop, content);
    break;
  case 4:
    fill_words<uint32_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(loop, content);
    break;
  case 8:
    fill_words<uint64_t><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(loop, content);
    break;
  default:
    fill_words<word16><<<blocks, BLOCK_THREADS, 0, stream->stream>>>(loop, content);
    break;
  }
  return egi_cuda_launched(ctx, "fill");
}

eg_status clear_tensor(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output) {
  static const uint8_t zero[16] = {};
  return fill_from_host(ctx, stream, output, zero);
}

eg_status copy_from_host(eg_context *ctx, const egi_cuda_stream *stream, void *target, const void *bytes,
                         size_t size_bytes) {
  if (size_bytes == 0) return EG_OK;
  if (size_bytes > INLINE_BYTES) {
    EGI_CUDA_TRY(ctx, cudaMemcpyAsync(target, bytes, size_bytes, cudaMemcpyHostToDevice, stream->stream));
    return EG_OK;
  }
  inline_bytes content;
  memset(&content, 0, sizeof content);
  memcpy(content.bytes, bytes, size_bytes);
  write_bytes<<<1, BLOCK_THREADS, 0, stream->stream>>>(static_cast<uint8_t *>(target), content,
                                                       static_cast<int>(size_bytes));
  return egi_cuda_launched(ctx, "write_bytes");
}

} // namespace egi::plain
