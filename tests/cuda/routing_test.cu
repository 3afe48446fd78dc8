/* Tests of the routing kernels: the sort against a stable sort on the host, exactly; gather and combine against
 * float64. Numbers of pairs around every round and block edge, experts that take all or none, experts out of range,
 * outputs poisoned, two runs compared. */
#include <numeric>

#include "backend/cuda/routing.h"
#include "tests/cuda/ragged_support.h"

namespace {

enum choice_form { CHOICES_UNIFORM, CHOICES_SKEWED, CHOICES_ONE, CHOICES_SOME_INVALID };

struct routing_case {
  const char *name;
  int n_tokens, k, n_experts;
  choice_form choices;
};

std::vector<int32_t> draw_choices(const routing_case &c, std::mt19937 &random) {
  std::vector<int32_t> chosen(static_cast<size_t>(c.n_tokens) * static_cast<size_t>(c.k));
  const unsigned n = static_cast<unsigned>(c.n_experts);
  for (int32_t &e : chosen) {
    e = static_cast<int32_t>(random() % n);
    if (c.choices == CHOICES_SKEWED && random() % 8 != 0) e = e % 3 == 0 ? c.n_experts - 1 : 0;
    if (c.choices == CHOICES_ONE) e = c.n_experts / 2;
    if (c.choices == CHOICES_SOME_INVALID && random() % 5 == 0) e = random() % 2 ? -1 : c.n_experts + 3;
  }
  return chosen;
}

struct sorted_pairs {
  std::vector<int32_t> offsets, expert, source_row, inverse;
  std::vector<float> weight;
};

sorted_pairs sort_on_host(const routing_case &c, const std::vector<int32_t> &chosen, const std::vector<float> &weight) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < chosen.size(); i++)
    if (chosen[i] >= 0 && chosen[i] < c.n_experts) order.push_back(static_cast<int32_t>(i));
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return chosen[static_cast<size_t>(a)] < chosen[static_cast<size_t>(b)];
  });
  sorted_pairs s;
  s.offsets.assign(static_cast<size_t>(c.n_experts) + 1, 0);
  s.inverse.assign(chosen.size(), -1);
  for (size_t at = 0; at < order.size(); at++) {
    const size_t i = static_cast<size_t>(order[at]);
    s.offsets[static_cast<size_t>(chosen[i]) + 1]++;
    s.expert.push_back(chosen[i]);
    s.source_row.push_back(order[at] / c.k);
    s.weight.push_back(weight[i]);
    s.inverse[i] = static_cast<int32_t>(at);
  }
  std::partial_sum(s.offsets.begin(), s.offsets.end(), s.offsets.begin());
  return s;
}

/* The first want.size() elements are as wanted and the rest is still poison. */
template <class T> bool is_prefix(const std::vector<T> &got, const std::vector<T> &want) {
  std::vector<T> whole(got.size());
  std::memset(whole.data(), 0xff, sizeof(T) * whole.size());
  std::copy(want.begin(), want.end(), whole.begin());
  return std::memcmp(whole.data(), got.data(), sizeof(T) * whole.size()) == 0;
}

struct device_routing {
  device_vector<int32_t> chosen, offsets, expert, source_row, inverse;
  device_vector<float> weight, sorted_weight;
  device_vector<char> workspace;
  egi_routing call = {};
  device_routing(const routing_case &c, const std::vector<int32_t> &choices, const std::vector<float> &weights)
      : chosen(choices), offsets(static_cast<size_t>(c.n_experts) + 1), expert(choices.size()),
        source_row(choices.size()), inverse(choices.size()), weight(weights), sorted_weight(choices.size()),
        workspace(egi_cuda_routing_workspace(c.n_tokens, c.k, c.n_experts)) {
    call = {c.n_tokens,      c.k,          c.n_experts,        chosen.data,    weight.data,   offsets.data, expert.data,
            source_row.data, inverse.data, sorted_weight.data, workspace.data, workspace.size};
  }
  bool run() {
    for (device_vector<int32_t> *v : {&offsets, &expert, &source_row, &inverse}) v->poison();
    sorted_weight.poison();
    workspace.poison();
    const bool is_launched = egi_cuda_routing_sort(&call, nullptr) == EGI_CUDA_OK;
    CHECK_CUDA(cudaDeviceSynchronize());
    return is_launched;
  }
};

int run_sort_case(const routing_case &c, std::mt19937 &random) {
  const std::vector<int32_t> chosen = draw_choices(c, random);
  const std::vector<float> weight = draw_values(chosen.size(), 1.0, EGI_CUDA_BF16, random);
  const sorted_pairs want = sort_on_host(c, chosen, weight);
  device_routing d(c, chosen, weight);
  verdict v;
  for (int turn = 0; turn < 2; turn++) {
    v.require(d.run(), "launch");
    v.require(d.offsets.download() == want.offsets, "offsets");
    v.require(is_prefix(d.expert.download(), want.expert), "expert");
    v.require(is_prefix(d.source_row.download(), want.source_row), "source_row");
    v.require(is_prefix(d.inverse.download(), want.inverse), "inverse");
    v.require(is_prefix(d.sorted_weight.download(), want.weight), "sorted_weight");
  }
  return v.report(std::string("sort ") + c.name);
}

egi_routing_rows make_rows(const routing_case &c, const device_routing &d, int n_columns, egi_cuda_float dtype) {
  egi_routing_rows rows = {};
  rows.n_tokens = c.n_tokens;
  rows.k = c.k;
  rows.n_columns = n_columns;
  rows.dtype = dtype;
  rows.inverse = d.inverse.data;
  rows.src_stride = rows.dst_stride = n_columns;
  return rows;
}

/* Largest error over one rounding of the format plus a little, of the rows of `want` that are not NaN. */
double largest_error(const std::vector<uint16_t> &got, const std::vector<double> &want, egi_cuda_float dtype) {
  const double unit = dtype == EGI_CUDA_BF16 ? 1.0 / 250.0 : 1.0 / 2000.0;
  double largest = 0.0;
  for (size_t i = 0; i < want.size(); i++) {
    if (std::isnan(want[i])) {
      if (got[i] != 0xffff) return INFINITY;
      continue;
    }
    const double error =
        std::fabs(static_cast<double>(from_bits(got[i], dtype)) - want[i]) / (unit * std::fabs(want[i]) + 1e-6);
    largest = larger(largest, error);
  }
  return largest;
}

int run_rows_case(const routing_case &c, int n_columns, egi_cuda_float dtype, bool has_weight, std::mt19937 &random) {
  const std::vector<int32_t> chosen = draw_choices(c, random);
  const std::vector<float> weight = draw_values(chosen.size(), 1.0, EGI_CUDA_BF16, random);
  const sorted_pairs s = sort_on_host(c, chosen, weight);
  device_routing d(c, chosen, weight);
  verdict v;
  v.require(d.run(), "sort");
  const size_t n = static_cast<size_t>(n_columns), n_pairs = chosen.size(), n_tokens = static_cast<size_t>(c.n_tokens);
  const std::vector<float> x = draw_values(n_tokens * n, 1.0, dtype, random);
  const device_vector<uint16_t> src(pack_values(x, dtype));
  device_vector<uint16_t> sorted(n_pairs * n), back(n_tokens * n);
  egi_routing_rows rows = make_rows(c, d, n_columns, dtype);
  rows.src = src.data;
  rows.dst = sorted.data;
  rows.weight = has_weight ? d.sorted_weight.data : nullptr;
  v.require(egi_cuda_routing_gather(&rows, nullptr) == EGI_CUDA_OK, "gather");
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<uint16_t> gathered = sorted.download();
  std::vector<double> want(n_pairs * n, NAN);
  for (size_t r = 0; r < s.source_row.size(); r++)
    for (size_t i = 0; i < n; i++)
      want[r * n + i] = static_cast<double>(x[static_cast<size_t>(s.source_row[r]) * n + i]) *
                        (has_weight ? static_cast<double>(s.weight[r]) : 1.0);
  v.require(largest_error(gathered, want, dtype) <= 1.0, "gathered rows");
  rows.src = sorted.data;
  rows.dst = back.data;
  rows.weight = has_weight ? d.weight.data : nullptr;
  v.require(egi_cuda_routing_combine(&rows, nullptr) == EGI_CUDA_OK, "combine");
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<double> sums(n_tokens * n, 0.0);
  for (size_t i = 0; i < n_pairs; i++)
    for (size_t j = 0; j < n && s.inverse[i] >= 0; j++)
      sums[i / static_cast<size_t>(c.k) * n + j] +=
          static_cast<double>(from_bits(gathered[static_cast<size_t>(s.inverse[i]) * n + j], dtype)) *
          (has_weight ? static_cast<double>(weight[i]) : 1.0);
  const double error = largest_error(back.download(), sums, dtype);
  v.require(error <= 1.5, "combined rows");
  return v.report(std::string("rows ") + c.name + (has_weight ? " weighted" : "") +
                  (dtype == EGI_CUDA_BF16 ? " bf16" : " f16"));
}

} // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!has_device()) return 77; /* skipped */
  std::mt19937 random(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 7u);
  const routing_case cases[] = {
      {"one pair", 1, 1, 4, CHOICES_UNIFORM},
      {"31 tokens", 31, 2, 8, CHOICES_UNIFORM},
      {"a round less one", 1023, 1, 128, CHOICES_UNIFORM},
      {"a round", 256, 4, 128, CHOICES_UNIFORM},
      {"a round and one", 1025, 1, 128, CHOICES_SKEWED},
      {"one expert", 4000, 2, 1, CHOICES_UNIFORM},
      {"one takes all", 3000, 4, 32, CHOICES_ONE},
      {"skewed", 5000, 8, 256, CHOICES_SKEWED},
      {"invalid experts", 5000, 6, 60, CHOICES_SOME_INVALID},
      {"many experts", 3001, 8, 1000, CHOICES_UNIFORM},
      {"several rounds a block", 180001, 8, 128, CHOICES_SKEWED},
      {"rounds with many experts", 150001, 4, 700, CHOICES_SOME_INVALID},
      {"a block more", 33793, 8, 64, CHOICES_UNIFORM},
  };
  int n_failed = 0;
  for (const routing_case &c : cases) n_failed += run_sort_case(c, random);
  const routing_case with_gaps = {"with gaps", 301, 6, 60, CHOICES_SOME_INVALID},
                     plain = {"plain", 257, 8, 16, CHOICES_UNIFORM};
  for (egi_cuda_float dtype : {EGI_CUDA_BF16, EGI_CUDA_F16})
    for (bool has_weight : {false, true}) {
      n_failed += run_rows_case(with_gaps, 200, dtype, has_weight, random);
      n_failed += run_rows_case(plain, 2880, dtype, has_weight, random);
      n_failed += run_rows_case(plain, 8, dtype, has_weight, random);
      n_failed += run_rows_case({"four choices", 100, 4, 16, CHOICES_SOME_INVALID}, 136, dtype, has_weight, random);
      n_failed += run_rows_case({"one choice", 100, 1, 16, CHOICES_UNIFORM}, 136, dtype, has_weight, random);
    }
  std::printf("%d failed\n", n_failed);
  return n_failed != 0;
}
