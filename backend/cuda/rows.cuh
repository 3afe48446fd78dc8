/* Tensors of any strides seen as rows, on the device: what norms, softmax, losses and gated activations share. A row is
 * cut into packets of as many elements as 16 bytes hold. Which thread has which packet follows from the row's length
 * and the type alone, not from strides or alignment, and so do sums. */
#ifndef ENGRAFT_BACKEND_CUDA_ROWS_CUH
#define ENGRAFT_BACKEND_CUDA_ROWS_CUH

#include "backend/cuda/operator.cuh"
#include "backend/cuda/packet.cuh"

namespace egi {

enum { ROW_OPERANDS = 6 };

/* Quotients by multiplication (Granlund and Montgomery, Division by invariant integers, 1994), for n below 2^31. */
struct divisor {
  uint32_t magic, shift;

  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(magic, n) + n) >> shift; }
};

struct row_operand {
  char *data;
  element_kind kind;
  bool is_vector; /* a packet's elements lie side by side, and aligned */
  bool can_be_vector;
  int64_t outer[EGI_MAX_RANK], inner[EGI_MAX_RANK]; /* strides in elements of the dims below; 0: broadcast */
};

/* Dims that all operands have, joined where all of them allow it. */
struct rows {
  int n_operands, outer_rank, inner_rank;
  bool is_small; /* fewer than 2^31 elements */
  int64_t count, length;
  int64_t row_packets; /* a row's, the last one perhaps partial */
  divisor row_packets_by;
  int64_t outer[EGI_MAX_RANK], inner[EGI_MAX_RANK];
  divisor outer_by[EGI_MAX_RANK], inner_by[EGI_MAX_RANK];
  row_operand operands[ROW_OPERANDS];
};

/* ---- on the host ------------------------------------------------------------------------------------------------ */

/* Operands are added with the tensor's own dims, then joined by rows_finish(). `source` names for each dim of the rows
 * the dim of tensors. */
struct rows_builder {
  rows *r;
  int rank, source[EGI_MAX_RANK];
  bool is_elements;
};

/* Rows are the dims from `axis` on; along an axis, that dim alone. */
rows_builder rows_begin(rows *r, const egi_tensor *shape, int axis);
rows_builder rows_begin_along(rows *r, const egi_tensor *shape, int axis);
/* Elements alone, no rows: what can be joined from the last dim on is a row, row-major as the tensor. */
rows_builder rows_begin_elements(rows *r, const egi_tensor *shape);
/* A tensor that is broadcast to the dims as in ONNX; an absent one has no place and no strides. false: it cannot be. */
bool rows_add(rows_builder *b, const egi_tensor *tensor);
/* A tensor with the outer dims alone: one number a row. */
bool rows_add_numbers(rows_builder *b, const egi_tensor *tensor);
/* Whether what operand `k` holds is the same in all rows. */
bool rows_is_shared(const rows *r, int k);
/* `packet` elements are a packet. */
void rows_finish(rows_builder *b, int packet);
void rows_set_data(rows *r, int k, const egi_tensor *tensor);
element_kind element_kind_of(eg_dtype dtype);
divisor divisor_of(int64_t value);

/* How threads share rows of one length: `group` threads a row, several rows a block where that is at most a warp. A
 * thread holds at most `HELD_PACKETS` of a row in registers, or reads them again. */
enum { HELD_PACKETS = 2, ROW_THREADS = 256, MOST_THREADS = 1024 };
struct row_threads {
  int group, n_threads;
  bool is_held;
};
row_threads row_threads_for(int64_t length, int packet);
/* Blocks for all rows, no more than a grid may have. */
unsigned row_blocks(const rows *r, const row_threads &threads);
/* Blocks of ROW_THREADS for all packets, a thread each. */
unsigned packet_blocks(const rows *r);
/* Elements of a packet of a type that element_kind_of() knows. */
int packet_of(eg_dtype dtype);

/* ---- on the device ---------------------------------------------------------------------------------------------- */

/* Where the first K operands have row `row`, in elements. */
template <int K> __device__ __forceinline__ void row_offsets(const rows &r, int64_t row, int64_t (&offsets)[K]) {
#pragma unroll
  for (int k = 0; k < K; k++) offsets[k] = 0;
  for (int d = r.outer_rank - 1; d > 0; d--) {
    const int64_t next =
        r.is_small ? static_cast<int64_t>(r.outer_by[d].quotient(static_cast<uint32_t>(row))) : row / r.outer[d];
    const int64_t place = row - next * r.outer[d];
#pragma unroll
    for (int k = 0; k < K; k++) offsets[k] += place * r.operands[k].outer[d];
    row = next;
  }
#pragma unroll
  for (int k = 0; k < K; k++) offsets[k] += row * r.operands[k].outer[0];
}

__device__ __forceinline__ int64_t column_offset(const rows &r, const row_operand &o, int64_t column) {
  int64_t offset = 0;
  for (int d = r.inner_rank - 1; d > 0; d--) {
    const int64_t next =
        r.is_small ? static_cast<int64_t>(r.inner_by[d].quotient(static_cast<uint32_t>(column))) : column / r.inner[d];
    offset += (column - next * r.inner[d]) * o.inner[d];
    column = next;
  }
  return offset + column * o.inner[0];
}

/* Element by element, where operands do not lie for packets: kept out of line, so that kernels stay small. */
template <class T>
__device__ __noinline__ packet<T> gather_packet(const rows &r, const row_operand &o, int64_t offset, int64_t first) {
  const T *row = reinterpret_cast<const T *>(o.data) + offset;
  alignas(16) T elements[packet_size<T>];
#pragma unroll
  for (int i = 0; i < packet_size<T>; i++)
    elements[i] = first + i < r.length ? row[column_offset(r, o, first + i)] : narrow<T>(0);
  packet<T> p;
  p.bits = *reinterpret_cast<const uint4 *>(elements);
  return p;
}

template <class T>
__device__ __noinline__ void scatter_packet(const rows &r, const row_operand &o, int64_t offset, int64_t first,
                                            packet<T> p) {
  T *row = reinterpret_cast<T *>(o.data) + offset;
  alignas(16) T elements[packet_size<T>];
  *reinterpret_cast<uint4 *>(elements) = p.bits;
#pragma unroll
  for (int i = 0; i < packet_size<T>; i++)
    if (first + i < r.length) row[column_offset(r, o, first + i)] = elements[i];
}

template <int N, class A> struct numbers { A values[N]; };
template <int N, class A>
__device__ __noinline__ numbers<N, A> gather_numbers(const rows &r, const row_operand &o, int64_t offset,
                                                     int64_t first) {
  numbers<N, A> out;
#pragma unroll
  for (int i = 0; i < N; i++) {
    out.values[i] = 0;
    if (first + i < r.length) out.values[i] = read_number<A>(o.data, offset + column_offset(r, o, first + i), o.kind);
  }
  return out;
}

/* Elements [first, first + size) of a row at `offset`; what is after the row's end is 0. */
template <class T>
__device__ __forceinline__ packet<T> load_packet(const rows &r, const row_operand &o, int64_t offset, int64_t first) {
  if (!o.is_vector) return gather_packet<T>(r, o, offset, first);
  packet<T> p;
  p.bits = *reinterpret_cast<const uint4 *>(reinterpret_cast<const T *>(o.data) + offset + first);
  return p;
}

template <class T>
__device__ __forceinline__ void store_packet(const rows &r, const row_operand &o, int64_t offset, int64_t first,
                                             const packet<T> &p) {
  if (o.is_vector)
    *reinterpret_cast<uint4 *>(reinterpret_cast<T *>(o.data) + offset + first) = p.bits;
  else
    scatter_packet(r, o, offset, first, p);
}

/* The same of an operand of any type. */
template <int N, class A>
__device__ __forceinline__ void load_numbers(const rows &r, const row_operand &o, int64_t offset, int64_t first,
                                             A (&out)[N]) {
  if (o.is_vector) return read_numbers(o.data, o.kind, offset + first, out);
  const numbers<N, A> found = gather_numbers<N, A>(r, o, offset, first);
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = found.values[i];
}

/* The row of a packet that is counted over all rows; `place` is what it is in its row. */
__device__ __forceinline__ int64_t row_of_packet(const rows &r, int64_t p, int64_t *place) {
  if (r.count == 1) {
    *place = p;
    return 0;
  }
  const int64_t row =
      r.is_small ? static_cast<int64_t>(r.row_packets_by.quotient(static_cast<uint32_t>(p))) : p / r.row_packets;
  *place = p - row * r.row_packets;
  return row;
}

/* Calls f(v, p) for each packet p that the thread `lane` of a group has: the v-th of HELD, or 0 where none are held. */
template <int HELD, class F> __device__ __forceinline__ void each_packet(int lane, int group, int64_t n_packets, F f) {
  if constexpr (HELD > 0) {
#pragma unroll
    for (int v = 0; v < HELD; v++)
      if (v * group + lane < n_packets) f(v, static_cast<int64_t>(v * group + lane));
  } else {
    for (int64_t p = lane; p < n_packets; p += group) f(0, p);
  }
}

/* One number of all threads of each group, given to each of them: a tree of f, always the same, with `none` for what is
 * not there. `shared` holds 32 * K numbers of the block; a call ends so that it may be used again. */
template <int K, class A, class F>
__device__ __forceinline__ void group_join(A (&x)[K], int group, A *shared, A none, F f) {
  const int width = group < 32 ? group : 32;
  for (int step = width / 2; step > 0; step /= 2)
#pragma unroll
    for (int k = 0; k < K; k++) x[k] = f(x[k], __shfl_xor_sync(0xffffffffu, x[k], step));
  if (group <= 32) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0)
#pragma unroll
    for (int k = 0; k < K; k++) shared[warp * K + k] = x[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; k++) x[k] = lane < group / 32 ? shared[lane * K + k] : none;
  for (int step = 16; step > 0; step /= 2)
#pragma unroll
    for (int k = 0; k < K; k++) x[k] = f(x[k], __shfl_xor_sync(0xffffffffu, x[k], step));
  __syncthreads();
}

template <int K, class A> __device__ __forceinline__ void group_sum(A (&x)[K], int group, A *shared) {
  group_join(x, group, shared, static_cast<A>(0), [](A a, A b) { return a + b; });
}

/* NaN is passed over. */
template <class A> __device__ __forceinline__ void group_largest(A (&x)[1], int group, A *shared) {
  group_join(x, group, shared, static_cast<A>(-INFINITY), [](A a, A b) { return b > a ? b : a; });
}

} // namespace egi

#endif
