/* Gradients of LayerNormalization and RMSNormalization. With h = (x - mean)·r and g = scale·dy:
 * dx = r·(g - mean(g) - h·mean(g·h)), without mean(g) for RMS (Ba, Kiros, Hinton, arXiv 1607.06450; Zhang and Sennrich,
 * arXiv 1910.07467, differentiated). d scale = Σ dy·h and d bias = Σ dy over rows: each chunk of rows sums for itself,
 * in the order of its rows, then the chunks are added in a fixed tree. Chunks follow from the number of rows alone. */
#include "backend/cuda/norm.cuh"

namespace egi {
namespace {

enum { MOST_CHUNKS = 512, COMBINE_COLUMNS = 32, COMBINE_LANES = 16 };

/* The sums of one thread's packets: in registers, or in the chunk's memory where rows are too long to be held. */
template <class A, int N, int HELD> struct column_sums {
  A held[HELD > 0 ? HELD *N : 1];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < (HELD > 0 ? HELD * N : 1); i++) held[i] = 0;
  }
  __device__ __forceinline__ void add(A *memory, bool is_first, int v, int64_t p, int i, int64_t length, A x) {
    if constexpr (HELD > 0) {
      held[v * N + i] += x;
    } else if (p * N + i < length) {
      memory[p * N + i] = is_first ? x : memory[p * N + i] + x;
    }
  }
};

/* What the rows of a block's groups have summed becomes the chunk's: group after group. */
template <int N, int HELD, class A>
__device__ __forceinline__ void store_sums(const norm_job &job, const A (&held)[HELD * N], A *memory) {
  extern __shared__ double room[];
  A *shared = reinterpret_cast<A *>(room);
  const int group = job.group, lane = static_cast<int>(threadIdx.x) % group,
            n_groups = static_cast<int>(blockDim.x) / group;
  const int64_t n_packets = (job.r.length + N - 1) / N;
  for (int turn = 0; turn < n_groups; turn++) {
    if (static_cast<int>(threadIdx.x) / group == turn)
      each_packet<HELD>(lane, group, n_packets, [&](int v, int64_t p) {
        for (int i = 0; i < N && p * N + i < job.r.length; i++) {
          const A before = turn > 0 ? shared[p * N + i] : static_cast<A>(0);
          if (turn + 1 < n_groups)
            shared[p * N + i] = before + held[v * N + i];
          else
            memory[p * N + i] = before + held[v * N + i];
        }
      });
    __syncthreads();
  }
}

/* A row, or a part of one, as a thread has it. */
template <class T, int HELD> struct row_part {
  int64_t n_packets, at[ROW_OPERANDS];
  packet<T> x[HELD > 0 ? HELD : 1], dy[HELD > 0 ? HELD : 1];

  /* f(p, x, dy, scale) for each of the thread's packets. */
  template <class F> __device__ __forceinline__ void each(const norm_job &job, F f) const {
    constexpr int n = packet_size<T>;
    const row_operand *o = job.r.operands;
    const int lane = static_cast<int>(threadIdx.x) % job.group;
    each_packet<HELD>(lane, job.group, n_packets, [&](int v, int64_t p) {
      number_of<T> own_x[n], own_dy[n], scale[n];
      unpack(HELD > 0 ? x[v] : load_packet<T>(job.r, o[NORM_X], at[NORM_X], p * n), own_x);
      unpack(HELD > 0 ? dy[v] : load_packet<T>(job.r, o[NORM_DY], at[NORM_DY], p * n), own_dy);
      load_numbers<n>(job.r, o[NORM_SCALE], 0, p * n, scale);
      f(v, p, own_x, own_dy, scale);
    });
  }
};

template <class A> struct row_numbers { A mean, factor, mean_g, mean_gh; };

/* Σ x² or Σ g, and Σ g·(x - mean), over the row; x, and so g, is 0 after the row's end. */
template <class T, int HELD>
__device__ __forceinline__ row_numbers<number_of<T>> measure_row(const norm_job &job, const row_part<T, HELD> &part,
                                                                 number_of<T> *shared) {
  using A = number_of<T>;
  const row_operand &mean = job.r.operands[NORM_MEAN], &deviation = job.r.operands[NORM_DEVIATION];
  const A length = static_cast<A>(job.r.length);
  row_numbers<A> own = {0, 1, 0, 0};
  A sum[2] = {0, 0};
  if (!job.is_rms) {
    own.mean = read_number<A>(mean.data, part.at[NORM_MEAN], mean.kind);
    own.factor = read_number<A>(deviation.data, part.at[NORM_DEVIATION], deviation.kind);
  }
  part.each(job, [&](int, int64_t, const auto &x, const auto &dy, const auto &scale) {
#pragma unroll
    for (int i = 0; i < packet_size<T>; i++) {
      const A g = scale[i] * dy[i];
      sum[0] += job.is_rms ? x[i] * x[i] : g;
      sum[1] += g * (x[i] - own.mean);
    }
  });
  group_sum(sum, job.group, shared);
  if (job.is_rms)
    own.factor = static_cast<A>(1) / sqrt(sum[0] / length + static_cast<A>(job.epsilon));
  else
    own.mean_g = sum[0] / length;
  own.mean_gh = sum[1] * own.factor / length;
  return own;
}

template <class T, int HELD, bool HAS_SUMS>
__global__ void __launch_bounds__(MOST_THREADS) norm_backward(const __grid_constant__ norm_job job) {
  using A = number_of<T>;
  constexpr int n = packet_size<T>;
  __shared__ A shared[64];
  const int64_t rows_a_block = blockDim.x / static_cast<unsigned>(job.group);
  const row_operand *o = job.r.operands;
  column_sums<A, n, HELD> sums[2];
  A *memory[2] = {NULL, NULL};
  for (int k = 0; k < 2 && HAS_SUMS; k++) {
    sums[k].clear();
    if (job.sums[k] != NULL) memory[k] = static_cast<A *>(job.sums[k]) + blockIdx.x * job.r.length;
  }
  const int64_t first = HAS_SUMS ? blockIdx.x * job.rows_per_chunk : blockIdx.x * rows_a_block;
  const int64_t step = HAS_SUMS ? rows_a_block : gridDim.x * rows_a_block;
  const int64_t end = HAS_SUMS && first + job.rows_per_chunk < job.r.count ? first + job.rows_per_chunk : job.r.count;
  for (int64_t base = first; base < end; base += step) {
    const int64_t row = base + static_cast<int>(threadIdx.x) / job.group;
    row_part<T, HELD> part;
    part.n_packets = row < end ? (job.r.length + n - 1) / n : 0;
    row_offsets(job.r, row < end ? row : base, part.at);
    if constexpr (HELD > 0)
      each_packet<HELD>(static_cast<int>(threadIdx.x) % job.group, job.group, part.n_packets, [&](int v, int64_t p) {
        part.x[v] = load_packet<T>(job.r, o[NORM_X], part.at[NORM_X], p * n);
        part.dy[v] = load_packet<T>(job.r, o[NORM_DY], part.at[NORM_DY], p * n);
      });
    const row_numbers<A> own = measure_row(job, part, shared);
    part.each(job, [&](int v, int64_t p, const auto &x, const auto &dy, const auto &scale) {
      A dx[n];
#pragma unroll
      for (int i = 0; i < n; i++) {
        const A h = (x[i] - own.mean) * own.factor;
        if constexpr (HAS_SUMS) {
          if (memory[0] != NULL) sums[0].add(memory[0], base == first, v, p, i, job.r.length, dy[i] * h);
          if (memory[1] != NULL) sums[1].add(memory[1], base == first, v, p, i, job.r.length, dy[i]);
        }
        dx[i] = own.factor * (scale[i] * dy[i] - own.mean_g - h * own.mean_gh);
      }
      if (job.has_out) store_packet(job.r, o[NORM_OUT], part.at[NORM_OUT], p * n, pack<T>(dx));
    });
  }
  for (int k = 0; k < 2 && HAS_SUMS; k++) {
    if (memory[k] == NULL) continue;
    if constexpr (HELD > 0)
      store_sums<n, HELD>(job, sums[k].held, memory[k]);
    else
      for (int64_t i = threadIdx.x; i < job.r.length && first >= end; i += blockDim.x) memory[k][i] = 0;
  }
}

/* One block for 32 columns: lanes take chunks in turn, then their sums are added in order. The total goes to where the
 * column's element of scale or bias is, or, where columns share one, to the first chunk's place. */
template <class A> struct combine_job {
  rows out;
  A *sums;
  int n_chunks;
  bool is_shared_element;
};

template <class A> __global__ void combine_chunks(const __grid_constant__ combine_job<A> job) {
  __shared__ A totals[COMBINE_LANES][COMBINE_COLUMNS];
  const int64_t length = job.out.length, column = blockIdx.x * static_cast<int64_t>(COMBINE_COLUMNS) + threadIdx.x;
  A total = 0;
  if (column < length)
    for (int chunk = static_cast<int>(threadIdx.y); chunk < job.n_chunks; chunk += COMBINE_LANES)
      total += job.sums[chunk * length + column];
  totals[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= length) return;
  for (int i = 1; i < COMBINE_LANES; i++) total += totals[i][threadIdx.x];
  const row_operand &o = job.out.operands[0];
  if (job.is_shared_element)
    job.sums[column] = total;
  else
    write_number(o.data, column_offset(job.out, o, column), o.kind, total);
}

/* Columns that share an element, one after the other: rare and small. Sums are kept in the second chunk's place. */
template <class A> __global__ void combine_columns(const __grid_constant__ combine_job<A> job) {
  const row_operand &o = job.out.operands[0];
  const int64_t length = job.out.length;
  for (int64_t c = threadIdx.x; c < length; c += blockDim.x) {
    const int64_t at = column_offset(job.out, o, c);
    bool is_first = true;
    for (int64_t i = 0; i < c && is_first; i++) is_first = column_offset(job.out, o, i) != at;
    if (!is_first) continue;
    A total = 0;
    for (int64_t i = c; i < length; i++)
      if (column_offset(job.out, o, i) == at) total += job.sums[i];
    write_number(o.data, at, o.kind, total);
  }
}

template <class T>
void combine(const norm_node &node, const norm_job &job, const egi_kernel_call *call, cudaStream_t s) {
  using A = number_of<T>;
  for (unsigned k = 0; k < 2; k++) {
    if (!node.has_sums[k]) continue;
    const egi_tensor *out = &call->outputs[k + 1];
    combine_job<A> last = {node.sums[k], static_cast<A *>(job.sums[k]), node.n_chunks, false};
    rows_set_data(&last.out, 0, out);
    last.is_shared_element = egi_tensor_count(out) != node.r.length;
    const unsigned blocks = static_cast<unsigned>((node.r.length + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS);
    combine_chunks<A><<<blocks, dim3(COMBINE_COLUMNS, COMBINE_LANES), 0, s>>>(last);
    if (last.is_shared_element) combine_columns<A><<<1, MOST_THREADS, 0, s>>>(last);
  }
}

template <class T, int HELD> void launch(const norm_node &node, const norm_job &job, cudaStream_t stream) {
  const unsigned n = static_cast<unsigned>(node.threads.n_threads);
  const size_t room = HELD > 0 ? static_cast<size_t>(node.r.length) * sizeof(number_of<T>) : 0;
  if (node.has_sums[0] || node.has_sums[1])
    norm_backward<T, HELD, true>
        <<<static_cast<unsigned>(node.n_chunks), n, node.threads.group <= 32 ? room : 0, stream>>>(job);
  else if (node.r.count > 0)
    norm_backward<T, HELD, false><<<row_blocks(&node.r, node.threads), n, 0, stream>>>(job);
}

template <class T>
void run(const norm_node &node, const norm_job &job, const egi_kernel_call *call, cudaStream_t stream) {
  if (node.threads.is_held)
    launch<T, HELD_PACKETS>(node, job, stream);
  else
    launch<T, 0>(node, job, stream);
  combine<T>(node, job, call, stream);
}

/* Where the gradient of scale or bias goes: its elements beside the columns. */
bool place_sums(const egi_kernel_plan *plan, norm_node *node, unsigned k, const egi_tensor *x, int axis) {
  const egi_tensor *out = &plan->outputs[k + 1];
  rows_builder b = rows_begin(&node->sums[k], x, axis);
  const bool fits =
      rows_add(&b, out) && node->sums[k].operands[0].kind != ELEMENT_NONE && rows_is_shared(&node->sums[k], 0);
  rows_finish(&b, 1);
  return fits;
}

eg_status prepare(egi_kernel_plan *plan, bool is_rms) {
  norm_node *node = EGI_NEW(plan->arena, norm_node, 1);
  if (node == NULL) return EG_ERROR_MEMORY;
  node->is_rms = is_rms;
  plan->params = node;
  EG_TRY(norm_check(plan, node, is_rms ? 2 : 4));
  const int64_t rows_a_block = node->threads.n_threads / node->threads.group;
  const int64_t least = (node->r.count + MOST_CHUNKS - 1) / MOST_CHUNKS;
  node->rows_per_chunk = (least > 0 ? (least + rows_a_block - 1) / rows_a_block : 1) * rows_a_block;
  node->n_chunks = static_cast<int>((node->r.count + node->rows_per_chunk - 1) / node->rows_per_chunk);
  if (node->n_chunks == 0) node->n_chunks = 1;
  workspace_room room = {0, true};
  int axis = 0;
  egi_normalise_axis(egi_node_int(egi_plan_node(plan), "axis", -1), plan->inputs[0].rank, &axis);
  for (unsigned k = 0; k < 2; k++) {
    node->has_sums[k] = has_output(plan->outputs, plan->n_outputs, k + 1) && node->r.length > 0;
    if (!node->has_sums[k]) continue;
    if (!place_sums(plan, node, k, &plan->inputs[0], axis))
      return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "a gradient does not fit the normalised dims");
    int64_t n_sums = 0;
    if (__builtin_mul_overflow(node->r.length, static_cast<int64_t>(node->n_chunks), &n_sums)) room.is_sound = false;
    node->sums_at[k] = room.take(n_sums, node->dtype == EG_DTYPE_F64 ? 8 : 4);
  }
  return ask_for_room(plan, room);
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_layer_norm_grad(egi_kernel_plan *plan) {
  return egi::prepare(plan, false);
}

extern "C" eg_status egi_cuda_prepare_rms_norm_grad(egi_kernel_plan *plan) {
  return egi::prepare(plan, true);
}

extern "C" eg_status egi_cuda_run_norm_grad(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const norm_node *node = static_cast<const norm_node *>(call->params);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  norm_job job = {};
  job.r = node->r;
  job.group = node->threads.group;
  job.is_rms = node->is_rms;
  job.has_out = node->has_out;
  job.epsilon = node->epsilon;
  job.rows_per_chunk = node->rows_per_chunk;
  rows_set_data(&job.r, NORM_X, &call->inputs[0]);
  rows_set_data(&job.r, NORM_SCALE, &call->inputs[1]);
  rows_set_data(&job.r, NORM_DY, &call->inputs[node->is_rms ? 2 : 4]);
  if (node->has_out) rows_set_data(&job.r, NORM_OUT, &call->outputs[0]);
  if (!node->is_rms) {
    rows_set_data(&job.r, NORM_MEAN, &call->inputs[2]);
    rows_set_data(&job.r, NORM_DEVIATION, &call->inputs[3]);
  }
  for (int k = 0; k < 2; k++)
    if (node->has_sums[k]) job.sums[k] = workspace_start(call) + node->sums_at[k];
  switch (node->dtype) {
  case EG_DTYPE_BF16:
    run<__nv_bfloat16>(*node, job, call, stream);
    break;
  case EG_DTYPE_F16:
    run<__half>(*node, job, call, stream);
    break;
  case EG_DTYPE_F64:
    run<double>(*node, job, call, stream);
    break;
  default:
    run<float>(*node, job, call, stream);
    break;
  }
  return egi_cuda_launched(ctx, "norm_backward");
}
