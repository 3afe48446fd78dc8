/* Loops over several tensors of any strides, as backend/cpu/strided.h has them: dims in the order of the output's
 * memory and merged where all operands allow it. Made on the host at each run, handed to kernels by value. */
#ifndef ENGRAFT_BACKEND_CUDA_STRIDED_CUH
#define ENGRAFT_BACKEND_CUDA_STRIDED_CUH

#include "backend/cuda/number.cuh"

namespace egi::plain {

enum { OPERANDS = 4, BLOCK_THREADS = 256 };

struct strided {
  int n_operands; /* operand 0 is the output */
  int rank;       /* after merging at least 1 */
  int64_t count;  /* elements of the output */
  int64_t dims[EGI_MAX_RANK];
  int64_t strides[OPERANDS][EGI_MAX_RANK]; /* bytes; 0: broadcast */
  char *data[OPERANDS];
  int dtypes[OPERANDS];
};

/* Starts with the output alone; its dims are those of the loop. */
void strided_init(strided *loop, const egi_tensor *output);
/* Adds an operand that is broadcast to the output's dims as ONNX (numpy) says. */
void strided_add(strided *loop, const egi_tensor *input);
/* Orders and merges dims. Call once, after the last operand. */
void strided_collapse(strided *loop);

/* Blocks for `n` threads; kernels go on in steps of the grid. */
inline unsigned blocks_for(int64_t n) {
  const int64_t blocks = (n + BLOCK_THREADS - 1) / BLOCK_THREADS, limit = 1 << 22;
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

/* Elements from the start to position `linear` of the dims, row-major. */
__device__ __forceinline__ int64_t offset_at(int rank, const int64_t *dims, const int64_t *strides, int64_t linear) {
  int64_t offset = 0;
  for (int i = rank - 1; i > 0; i--) {
    const int64_t rest = linear / dims[i];
    offset += (linear - rest * dims[i]) * strides[i];
    linear = rest;
  }
  return rank > 0 ? offset + linear * strides[0] : 0;
}

/* Byte offsets of N operands at position `linear` of the loop; in 32 bits where they suffice, which is much cheaper. */
template <int N> __device__ __forceinline__ void offsets_at(const strided &loop, int64_t linear, int64_t (&out)[N]) {
#pragma unroll
  for (int k = 0; k < N; k++) out[k] = 0;
  if (loop.count <= UINT32_MAX) {
    uint32_t rest = static_cast<uint32_t>(linear);
    for (int i = loop.rank - 1; i > 0; i--) {
      const uint32_t dim = static_cast<uint32_t>(loop.dims[i]), quotient = rest / dim, at = rest - quotient * dim;
#pragma unroll
      for (int k = 0; k < N; k++) out[k] += at * loop.strides[k][i];
      rest = quotient;
    }
    linear = rest;
  } else {
    for (int i = loop.rank - 1; i > 0; i--) {
      const int64_t quotient = linear / loop.dims[i], at = linear - quotient * loop.dims[i];
#pragma unroll
      for (int k = 0; k < N; k++) out[k] += at * loop.strides[k][i];
      linear = quotient;
    }
  }
#pragma unroll
  for (int k = 0; k < N; k++) out[k] += linear * loop.strides[k][0];
}

/* ---- copies (copy.cu) -------------------------------------------------------------------------------------------- */

/* Copies input, broadcast to the output's dims, to output; same size of elements. Input and output either are the same
 * view or do not overlap. */
eg_status copy_tensor(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output,
                      const egi_tensor *input);
/* All bytes of a contiguous tensor, or of a view of it, become 0. */
eg_status clear_tensor(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output);
/* Every element becomes the one in device memory at `value`, of the output's type. */
eg_status fill_tensor(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output, const void *value);

struct alignas(16) word16 {
  uint64_t low, high;
};

/* Makes the innermost run of a loop over two operands, contiguous in both, one of words of the most bytes, up to 16,
 * that its length, strides and addresses and `places` (other strides, or-ed) are multiples of; the bytes of a word. */
size_t widen(strided *loop, size_t element_bytes, uint64_t places);

/* Calls `function` with a value of the type of words of so many bytes. */
template <class Function> void with_word(size_t bytes, const Function &function) {
  if (bytes == 1) function(uint8_t{});
  if (bytes == 2) function(uint16_t{});
  if (bytes == 4) function(uint32_t{});
  if (bytes == 8) function(uint64_t{});
  if (bytes == 16) function(word16{});
}

/* At most so many bytes travel as an argument of a kernel. */
enum { INLINE_BYTES = 1024 };
/* Bytes in host memory that outlive the run -> contiguous device memory. */
eg_status copy_from_host(eg_context *ctx, const egi_cuda_stream *stream, void *target, const void *bytes,
                         size_t size_bytes);
/* Every element of the tensor becomes the at most 16 bytes of `value`, in host memory. */
eg_status fill_from_host(eg_context *ctx, const egi_cuda_stream *stream, const egi_tensor *output, const void *value);

/* ---- helpers of prepare and run (support.cu) --------------------------------------------------------------------- */

/* Product of dims [first, last). */
int64_t dims_product(const egi_tensor *tensor, int first, int last);
/* Integers of input `input`, which the plan must know: EG_ERROR_UNSUPPORTED where they are computed on the device,
 * EG_ERROR_DATA where they are no list of at most `capacity` integers. */
eg_status known_integers(const egi_kernel_plan *plan, unsigned input, int64_t *out, uint32_t capacity,
                         uint32_t *out_count);
inline bool is_index_type(eg_dtype dtype) {
  return dtype == EG_DTYPE_I64 || dtype == EG_DTYPE_I32;
}
inline bool has_output(const egi_kernel_call *call, unsigned output) {
  return output < call->n_outputs && call->outputs[output].dtype != EG_DTYPE_UNDEFINED;
}

} // namespace egi::plain

#endif
