/* Attention's output qk_matmul_output: the scores of whole rows, as products (mode 0), soft-capped (1), masked (2) or
 * as probabilities (3). Asked for in tests and debugging only: a block a row, each score by one thread. */
#include "backend/cuda/attention_general.cuh"

namespace egi {
namespace general {
namespace {

struct score_job {
  attention a;
  head_rows out;
  element_kind element;
  int mode;
};

__device__ float product_of(const score_job &job, const head_place &at, int query, int key) {
  const attention &a = job.a;
  const int64_t q = at.batch * a.q.strides.batch + at.q_head * a.q.strides.head + query * a.q.strides.row;
  const int64_t k = at.batch * a.k.strides.batch + at.kv_head * a.k.strides.head + key * a.k.strides.row;
  float sum = 0.0f;
  for (int i = 0; i < a.width; i++)
    sum = fmaf(read_element(a.q.data, q + i * a.q.strides.column, job.element),
               read_element(a.k.data, k + i * a.k.strides.column, job.element), sum);
  return sum;
}

__device__ float score_of(const score_job &job, const head_place &at, int query, int key) {
  const attention &a = job.a;
  const int2 keys = keys_of(a, at.batch, query);
  if (job.mode >= 2 && (key < keys.x || key >= keys.y)) return -CUDART_INF_F;
  float score = product_of(job, at, query, key) * a.scale;
  if (job.mode >= 1 && a.softcap > 0.0f) score = a.softcap * tanhf(score / a.softcap);
  return job.mode >= 2 ? score + bias_of(a, at, query, key) : score;
}

/* The largest, or the sum, of a number of each thread. */
__device__ float join(float x, bool is_sum, float (&parts)[THREADS]) {
  __syncthreads();
  parts[threadIdx.x] = x;
  __syncthreads();
  for (int step = THREADS / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) {
      const float other = parts[threadIdx.x + step];
      parts[threadIdx.x] = is_sum ? parts[threadIdx.x] + other : fmaxf(parts[threadIdx.x], other);
    }
    __syncthreads();
  }
  return parts[0];
}

__global__ void __launch_bounds__(THREADS) attention_scores(const score_job job) {
  __shared__ float parts[THREADS];
  const attention &a = job.a;
  const int query = static_cast<int>(blockIdx.x % a.n_queries), index = static_cast<int>(blockIdx.x / a.n_queries);
  const int q_head = index % a.q_heads;
  const head_place at = {index / a.q_heads, q_head, q_head / (a.q_heads / a.kv_heads)};
  const int64_t row = at.batch * job.out.strides.batch + q_head * job.out.strides.head + query * job.out.strides.row;
  float largest = -CUDART_INF_F, sum = 0.0f;
  if (job.mode == 3) {
    for (int key = static_cast<int>(threadIdx.x); key < a.n_keys; key += THREADS)
      largest = fmaxf(largest, score_of(job, at, query, key));
    largest = join(largest, false, parts);
    for (int key = static_cast<int>(threadIdx.x); key < a.n_keys && largest > -CUDART_INF_F; key += THREADS)
      sum += expf(score_of(job, at, query, key) - largest);
    sum = join(sum, true, parts);
  }
  for (int key = static_cast<int>(threadIdx.x); key < a.n_keys; key += THREADS) {
    float score = score_of(job, at, query, key);
    if (job.mode == 3) score = largest > -CUDART_INF_F ? expf(score - largest) / sum : 0.0f;
    write_element(job.out.data, row + key * job.out.strides.column, job.element, score);
  }
}

} // namespace
} // namespace general

cudaError_t attention_scores_general(const general::attention &a, element_kind element, int mode,
                                     const general::head_rows &out, cudaStream_t stream) {
  const int64_t n_rows = static_cast<int64_t>(a.n_batches) * a.q_heads * a.n_queries;
  const general::score_job job = {a, out, element, mode};
  if (n_rows > 0 && a.n_keys > 0)
    general::attention_scores<<<static_cast<unsigned>(n_rows), general::THREADS, 0, stream>>>(job);
  return cudaPeekAtLastError();
}

} // namespace egi
