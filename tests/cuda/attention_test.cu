/* Tests of the packed attention kernels against float64: documents of every awkward length, windows, offsets, caps,
 * sinks, grouped heads, strides; outputs poisoned, gaps between rows guarded, two runs compared bit by bit, one
 * captured graph replayed over other documents. `attention_test [quick]`; quick keeps to small sizes, for the
 * sanitizer. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/attention.h"
#include "tests/cuda/attention_cases.h"
#include "tests/cuda/attention_reference.h"

namespace {

#define CHECK_CUDA(call)                                          \
  do {                                                            \
    const cudaError_t error_ = (call);                            \
    if (error_ != cudaSuccess) {                                  \
      std::printf("%s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(2);                                               \
    }                                                             \
  } while (0)

constexpr unsigned char poison = 0xff; /* NaN in both formats */

uint16_t to_bits(float x, egi_cuda_float dtype) {
  uint16_t bits;
  if (dtype == EGI_CUDA_BF16) {
    const __nv_bfloat16 y = __float2bfloat16(x);
    std::memcpy(&bits, &y, 2);
  } else {
    const __half y = __float2half(x);
    std::memcpy(&bits, &y, 2);
  }
  return bits;
}

float from_bits(uint16_t bits, egi_cuda_float dtype) {
  if (dtype == EGI_CUDA_BF16) {
    __nv_bfloat16 y;
    std::memcpy(&y, &bits, 2);
    return __bfloat162float(y);
  }
  __half y;
  std::memcpy(&y, &bits, 2);
  return __half2float(y);
}

/* A [rows, heads, size] tensor on the device with gaps after heads and rows, and guard rows behind. */
struct device_rows {
  int rows, heads, size;
  int64_t row_stride, head_stride;
  uint16_t *data = nullptr;
  size_t n_elements() const { return static_cast<size_t>(rows + 2) * static_cast<size_t>(row_stride); }
  size_t at(int row, int head) const {
    return static_cast<size_t>(row) * static_cast<size_t>(row_stride) +
           static_cast<size_t>(head) * static_cast<size_t>(head_stride);
  }
  device_rows(int rows_, int heads_, int size_, bool has_gaps)
      : rows(rows_), heads(heads_), size(size_),
        row_stride(heads_ * (size_ + (has_gaps ? 8 : 0)) + (has_gaps ? 24 : 0)),
        head_stride(size_ + (has_gaps ? 8 : 0)) {
    CHECK_CUDA(cudaMalloc(&data, 2 * n_elements()));
    CHECK_CUDA(cudaMemset(data, poison, 2 * n_elements()));
  }
  ~device_rows() { cudaFree(data); }
  device_rows(const device_rows &) = delete;
  device_rows &operator=(const device_rows &) = delete;
  egi_cuda_rows view() const { return {data, row_stride, head_stride}; }
  void upload(const std::vector<float> &dense, egi_cuda_float dtype) {
    std::vector<uint16_t> host(n_elements(), 0xffff);
    for (int r = 0; r < rows; r++)
      for (int h = 0; h < heads; h++)
        for (int c = 0; c < size; c++)
          host[at(r, h) + static_cast<size_t>(c)] =
              to_bits(dense[(static_cast<size_t>(r) * heads + h) * size + c], dtype);
    CHECK_CUDA(cudaMemcpy(data, host.data(), 2 * host.size(), cudaMemcpyHostToDevice));
  }
  std::vector<uint16_t> download() const {
    std::vector<uint16_t> host(n_elements());
    CHECK_CUDA(cudaMemcpy(host.data(), data, 2 * host.size(), cudaMemcpyDeviceToHost));
    return host;
  }
  /* Dense values; false in `gaps_intact` where a byte outside the tensor changed. */
  std::vector<float> read(egi_cuda_float dtype, bool &gaps_intact) const {
    std::vector<uint16_t> host = download();
    std::vector<float> dense(static_cast<size_t>(rows) * heads * size);
    for (int r = 0; r < rows; r++)
      for (int h = 0; h < heads; h++)
        for (int c = 0; c < size; c++) {
          uint16_t &bits = host[at(r, h) + static_cast<size_t>(c)];
          dense[(static_cast<size_t>(r) * heads + h) * size + c] = from_bits(bits, dtype);
          bits = 0xffff;
        }
    for (uint16_t bits : host) gaps_intact = gaps_intact && bits == 0xffff;
    return dense;
  }
};

template <class T> T *to_device(const std::vector<T> &host) {
  T *data = nullptr;
  CHECK_CUDA(cudaMalloc(&data, sizeof(T) * std::max<size_t>(host.size(), 1)));
  CHECK_CUDA(cudaMemcpy(data, host.data(), sizeof(T) * host.size(), cudaMemcpyHostToDevice));
  return data;
}

template <class T> std::vector<T> to_host(const T *data, size_t n) {
  std::vector<T> host(n);
  CHECK_CUDA(cudaMemcpy(host.data(), data, sizeof(T) * n, cudaMemcpyDeviceToHost));
  return host;
}

/* Everything of one problem on the device. */
struct device_problem {
  const attention_problem &p;
  egi_cuda_float dtype;
  device_rows q, k, v, out, d_out, d_q, d_k, d_v;
  int32_t *first_key, *last_query, *half_offset;
  float *sinks, *lse, *d_sinks;
  void *workspace = nullptr, *plan = nullptr;
  egi_cuda_attention a = {};

  device_problem(const attention_problem &problem, egi_cuda_float type, bool has_gaps)
      : p(problem), dtype(type), q(p.n_queries, p.n_heads, p.head_dim, has_gaps),
        k(p.n_keys, p.n_kv_heads, p.head_dim, has_gaps), v(p.n_keys, p.n_kv_heads, p.value_dim, has_gaps),
        out(p.n_queries, p.n_heads, p.value_dim, has_gaps), d_out(p.n_queries, p.n_heads, p.value_dim, has_gaps),
        d_q(p.n_queries, p.n_heads, p.head_dim, has_gaps), d_k(p.n_keys, p.n_kv_heads, p.head_dim, has_gaps),
        d_v(p.n_keys, p.n_kv_heads, p.value_dim, has_gaps) {
    q.upload(p.q, dtype);
    k.upload(p.k, dtype);
    v.upload(p.v, dtype);
    d_out.upload(p.d_out, dtype);
    first_key = to_device(p.first_key);
    last_query = to_device(p.last_query);
    half_offset = to_device(std::vector<int32_t>(1, p.offset / 2));
    sinks = to_device(p.sinks);
    lse = to_device(std::vector<float>(static_cast<size_t>(p.n_heads) * p.n_queries, NAN));
    d_sinks = to_device(std::vector<float>(static_cast<size_t>(p.n_heads), NAN));
    a.n_queries = p.n_queries;
    a.n_keys = p.n_keys;
    a.n_heads = p.n_heads;
    a.n_kv_heads = p.n_kv_heads;
    a.head_dim = p.head_dim;
    a.value_dim = p.value_dim;
    a.dtype = dtype;
    a.scale = static_cast<float>(p.scale);
    a.softcap = static_cast<float>(p.softcap);
    a.query_offset = p.offset - p.offset / 2;
    a.query_offset_device = half_offset;
    a.first_key = first_key;
    a.last_query = last_query;
    a.sinks = p.has_sinks ? sinks : nullptr;
    a.q = q.view();
    a.k = k.view();
    a.v = v.view();
    a.out = out.view();
    a.lse = lse;
    a.d_out = d_out.view();
    a.d_q = d_q.view();
    a.d_k = d_k.view();
    a.d_v = d_v.view();
    a.d_sinks = p.has_sinks ? d_sinks : nullptr;
    a.workspace_bytes = egi_cuda_attention_workspace(&a, EGI_ATTENTION_MMA, 1);
    CHECK_CUDA(cudaMalloc(&workspace, a.workspace_bytes));
    a.workspace = workspace;
    CHECK_CUDA(cudaMalloc(&plan, egi_cuda_attention_plan_bytes(&a)));
  }
  ~device_problem() {
    cudaFree(plan);
    cudaFree(first_key);
    cudaFree(last_query);
    cudaFree(half_offset);
    cudaFree(sinks);
    cudaFree(lse);
    cudaFree(d_sinks);
    cudaFree(workspace);
  }
  void poison_outputs() {
    for (device_rows *t : {&out, &d_q, &d_k, &d_v}) CHECK_CUDA(cudaMemset(t->data, poison, 2 * t->n_elements()));
    CHECK_CUDA(cudaMemset(lse, poison, sizeof(float) * p.n_heads * p.n_queries));
    CHECK_CUDA(cudaMemset(d_sinks, poison, sizeof(float) * p.n_heads));
    CHECK_CUDA(cudaMemset(workspace, poison, a.workspace_bytes));
  }
  bool run(egi_attention_kernels kernels, cudaStream_t stream) {
    return egi_cuda_attention_forward(&a, kernels, stream) == EGI_CUDA_OK &&
           egi_cuda_attention_backward(&a, kernels, stream) == EGI_CUDA_OK;
  }
  bool run_with_plan(egi_attention_kernels kernels) {
    CHECK_CUDA(cudaMemset(plan, poison, egi_cuda_attention_plan_bytes(&a)));
    const bool is_planned = egi_cuda_attention_plan(&a, plan, nullptr) == EGI_CUDA_OK;
    a.plan = plan;
    const bool is_launched = run(kernels, nullptr) && run(kernels, nullptr); /* a plan serves many calls */
    a.plan = nullptr;
    return is_planned && is_launched;
  }
  std::vector<unsigned char> all_bytes() const {
    std::vector<unsigned char> bytes;
    for (const device_rows *t : {&out, &d_q, &d_k, &d_v}) {
      const std::vector<uint16_t> part = t->download();
      const unsigned char *first = reinterpret_cast<const unsigned char *>(part.data());
      bytes.insert(bytes.end(), first, first + 2 * part.size());
    }
    const std::vector<float> rows = to_host(lse, static_cast<size_t>(p.n_heads) * p.n_queries);
    const std::vector<float> heads = to_host(d_sinks, static_cast<size_t>(p.n_heads));
    for (const std::vector<float> *part : {&rows, &heads}) {
      const unsigned char *first = reinterpret_cast<const unsigned char *>(part->data());
      bytes.insert(bytes.end(), first, first + sizeof(float) * part->size());
    }
    return bytes;
  }
};

/* Worst row: error over (its own norm and spread + the norm of a typical row); and the whole tensor's. */
struct tensor_error {
  double whole, worst_row;
};

tensor_error compare(const std::vector<float> &got, const std::vector<double> &want, const std::vector<double> &spread,
                     int size) {
  const size_t n_rows = want.size() / static_cast<size_t>(size);
  double error = 0.0, norm = 0.0, worst = 0.0;
  std::vector<double> row_error(n_rows), row_norm(n_rows);
  for (size_t i = 0; i < want.size(); i++) {
    const double e = static_cast<double>(got[i]) - want[i];
    row_error[i / size] += e * e;
    row_norm[i / size] += want[i] * want[i] + (spread.empty() ? 0.0 : spread[i]);
  }
  for (size_t r = 0; r < n_rows; r++) {
    error += row_error[r];
    norm += row_norm[r];
  }
  const double typical = std::sqrt(norm / static_cast<double>(n_rows));
  for (size_t r = 0; r < n_rows; r++) {
    const double e = std::sqrt(row_error[r]) / (std::sqrt(row_norm[r]) + 0.3 * typical + 1e-30);
    if (e != e || e > worst) worst = e; // a NaN stays
  }
  return {std::sqrt(error) / (std::sqrt(norm) + 1e-30), worst};
}

struct verdict {
  bool is_good = true;
  std::string text;
  void add(const char *name, tensor_error e, double tolerance) {
    const bool is_in = e.whole <= tolerance && e.worst_row <= 5.0 * tolerance;
    is_good = is_good && is_in;
    char line[96];
    std::snprintf(line, sizeof line, " %s %.1e/%.1e%s", name, e.whole, e.worst_row, is_in ? "" : "!");
    text += line;
  }
  void require(bool condition, const char *what) {
    if (condition) return;
    is_good = false;
    text += std::string(" ") + what + "!";
  }
};

double largest_lse_error(const std::vector<float> &got, const std::vector<double> &want) {
  double worst = 0.0;
  for (size_t i = 0; i < want.size(); i++) {
    if (std::isinf(want[i])) {
      if (!(std::isinf(got[i]) && got[i] < 0.0f)) return INFINITY;
      continue;
    }
    const double e = std::fabs(static_cast<double>(got[i]) - want[i]) / (1.0 + std::fabs(want[i]));
    if (e != e || e > worst) worst = e; // a NaN stays
  }
  return worst;
}

verdict judge(const device_problem &d, const attention_result &want) {
  verdict v;
  const double unit = d.dtype == EGI_CUDA_BF16 ? 1.0 : 1.0 / 8.0;
  bool gaps_intact = true;
  v.add("out", compare(d.out.read(d.dtype, gaps_intact), want.out, {}, d.p.value_dim), 3e-3 * unit);
  v.add("dq", compare(d.d_q.read(d.dtype, gaps_intact), want.d_q, want.d_q_spread, d.p.head_dim), 3e-3 * unit);
  v.add("dk", compare(d.d_k.read(d.dtype, gaps_intact), want.d_k, want.d_k_spread, d.p.head_dim), 3e-3 * unit);
  v.add("dv", compare(d.d_v.read(d.dtype, gaps_intact), want.d_v, {}, d.p.value_dim), 4e-3 * unit);
  v.require(gaps_intact, "wrote outside");
  const double lse = largest_lse_error(to_host(d.lse, want.lse.size()), want.lse);
  v.require(lse <= 2e-5, "lse");
  if (d.p.has_sinks)
    v.add("ds", compare(to_host(d.d_sinks, want.d_sinks.size()), want.d_sinks, want.d_sinks_spread, 1), 6e-3 * unit);
  return v;
}

int run_case(const attention_case &c, egi_cuda_float dtype, std::mt19937 &random) {
  attention_problem p = make_problem(c, random, [dtype](float x) { return from_bits(to_bits(x, dtype), dtype); });
  const attention_result want = compute_reference(p);
  device_problem d(p, dtype, c.has_gaps);
  int n_failed = 0;
  for (egi_attention_kernels kernels : {EGI_ATTENTION_MMA, EGI_ATTENTION_SM90}) {
    if (kernels == EGI_ATTENTION_SM90 && (!has_sm90() || p.head_dim < 64 || p.head_dim > 128)) continue;
    d.poison_outputs();
    const bool is_launched = d.run(kernels, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<unsigned char> first = d.all_bytes();
    verdict v = judge(d, want);
    v.require(is_launched, "launch");
    d.poison_outputs();
    v.require(d.run_with_plan(kernels), "second launch");
    CHECK_CUDA(cudaDeviceSynchronize());
    v.require(first == d.all_bytes(), "second run differs");
    n_failed += !v.is_good;
    std::printf("%s %-4s %-4s %-34s%s\n", v.is_good ? "ok  " : "FAIL", kernels == EGI_ATTENTION_SM90 ? "sm90" : "mma",
                dtype == EGI_CUDA_BF16 ? "bf16" : "f16", c.name, v.text.c_str());
  }
  return n_failed;
}

/* A graph captured over one set of documents must serve another: nothing of the launch may depend on them. */
int run_graph_case(std::mt19937 &random) {
  attention_case c = {"captured graph", 500, 0, 4, 2, 64, 64, DOCUMENTS_ONE, 0, 0.0f, true, false};
  auto rounded = [](float x) { return from_bits(to_bits(x, EGI_CUDA_BF16), EGI_CUDA_BF16); };
  attention_problem p = make_problem(c, random, rounded);
  device_problem d(p, EGI_CUDA_BF16, false);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const bool is_launched = d.run(EGI_ATTENTION_AUTO, stream);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  c.documents = DOCUMENTS_RANDOM;
  set_documents(p, c, random);
  const size_t bytes = sizeof(int32_t) * p.first_key.size();
  CHECK_CUDA(cudaMemcpy(d.first_key, p.first_key.data(), bytes, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(d.last_query, p.last_query.data(), bytes, cudaMemcpyHostToDevice));
  d.poison_outputs();
  CHECK_CUDA(cudaGraphLaunch(replay, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  verdict v = judge(d, compute_reference(p));
  v.require(is_launched, "capture");
  std::printf("%s %s%s\n", v.is_good ? "ok  " : "FAIL", c.name, v.text.c_str());
  CHECK_CUDA(cudaGraphExecDestroy(replay));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return !v.is_good;
}

/* The judge must see one wrong row, a key missed at document starts and an unwritten element. */
int test_the_judge(std::mt19937 &random) {
  const attention_case c = {"judge", 200, 0, 2, 1, 64, 64, DOCUMENTS_RANDOM, 3, 0.0f, false, false};
  auto rounded = [](float x) { return from_bits(to_bits(x, EGI_CUDA_BF16), EGI_CUDA_BF16); };
  attention_problem p = make_problem(c, random, rounded);
  device_problem d(p, EGI_CUDA_BF16, false);
  d.poison_outputs();
  d.run(EGI_ATTENTION_MMA, nullptr);
  CHECK_CUDA(cudaDeviceSynchronize());
  const attention_result good = compute_reference(p);
  attention_result wrong = good;
  std::swap_ranges(wrong.d_k.begin(), wrong.d_k.begin() + 64, wrong.d_k.begin() + 64);
  attention_problem shifted = p;
  for (int i = 0; i < p.n_queries; i++) shifted.first_key[static_cast<size_t>(i)] = std::min(p.first_key[i] + 1, i);
  const bool sees_good = judge(d, good).is_good, sees_swap = !judge(d, wrong).is_good;
  const bool sees_missing = !judge(d, compute_reference(shifted)).is_good;
  CHECK_CUDA(cudaMemset(d.d_v.data, poison, 2));
  const bool sees_unwritten = !judge(d, good).is_good,
             is_good = sees_good && sees_swap && sees_missing && sees_unwritten;
  std::printf("%s the judge notices faults (%d %d %d %d)\n", is_good ? "ok  " : "FAIL", sees_good, sees_swap,
              sees_missing, sees_unwritten);
  return !is_good;
}

} // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::printf("no CUDA device: skipped\n");
    return 77;
  }
  const bool is_quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 7u);
  int n_failed = 0;
  for (const attention_case &c : make_cases(is_quick)) {
    n_failed += run_case(c, EGI_CUDA_BF16, random);
    if (!is_quick || c.head_dim == 128) n_failed += run_case(c, EGI_CUDA_F16, random);
  }
  n_failed += run_graph_case(random);
  n_failed += test_the_judge(random);
  std::printf("%d failed\n", n_failed);
  return n_failed != 0;
}
