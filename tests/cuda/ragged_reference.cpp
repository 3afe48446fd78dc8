/* The float64 oracle of the ragged tests. Threads share out rows (or groups); each result has one writer. */
#include "tests/cuda/ragged_reference.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

namespace {

void for_each(int n, const std::function<void(int)> &body) {
  const int n_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (int k = 0; k < n_threads; k++)
    threads.emplace_back([=, &body] {
      for (int i = k; i < n; i += n_threads) body(i);
    });
  for (std::thread &thread : threads) thread.join();
}

/* Row of W, of the bias or of the adapter for side `half` (0 gate, 1 up), column j. */
int paired_row(const ragged_problem &p, int size, int half, int j) {
  return p.pairing == EGI_RAGGED_INTERLEAVED ? 2 * j + half : half * (size / 2) + j;
}

/* sums[n] += sum over k of a[k] w[n, k] (forward) or w[k, n] (backward). */
void add_products(std::vector<double> &sums, const std::vector<double> &a, const float *w, bool is_backward) {
  const size_t n_out = sums.size(), n_in = a.size();
  for (size_t i = 0; i < (is_backward ? n_in : n_out); i++) {
    const float *row = w + i * (is_backward ? n_out : n_in);
    if (is_backward) {
      for (size_t n = 0; n < n_out; n++) sums[n] += a[i] * static_cast<double>(row[n]);
    } else {
      double sum = 0.0;
      for (size_t k = 0; k < n_in; k++) sum += a[k] * static_cast<double>(row[k]);
      sums[i] += sum;
    }
  }
}

double activate(const ragged_problem &p, double g, double u) {
  const double root = 0.79788456080286535588; /* sqrt(2 / pi) */
  switch (p.activation) {
  case EGI_RAGGED_GEGLU:
    return 0.5 * g * (1.0 + std::erf(g / std::sqrt(2.0))) * u;
  case EGI_RAGGED_GEGLU_TANH:
    return 0.5 * g * (1.0 + std::tanh(root * (g + 0.044715 * g * g * g))) * u;
  case EGI_RAGGED_CLAMPED:
    g = std::min(g, p.limit);
    u = std::min(std::max(u, -p.limit), p.limit);
    return g / (1.0 + std::exp(-p.alpha * g)) * (u + 1.0);
  default:
    return g / (1.0 + std::exp(-g)) * u;
  }
}

std::vector<double> sum_row(const ragged_problem &p, int group, int r) {
  const bool is_backward = p.direction == EGI_RAGGED_BACKWARD;
  std::vector<double> sums(static_cast<size_t>(p.n_out), 0.0), a(static_cast<size_t>(p.n_in));
  const float *x = p.x.data() + static_cast<size_t>(r) * a.size();
  const bool has_halves = is_backward && p.pairing == EGI_RAGGED_INTERLEAVED;
  for (int c = 0; c < p.n_in; c++) {
    const int row = has_halves ? paired_row(p, p.n_in, c >= p.n_in / 2, c % (p.n_in / 2)) : c;
    a[static_cast<size_t>(row)] = static_cast<double>(x[c]);
  }
  const size_t group_index = static_cast<size_t>(group);
  add_products(sums, a, p.weight.data() + group_index * a.size() * sums.size(), is_backward);
  if (p.rank > 0) {
    const size_t rank = static_cast<size_t>(p.rank);
    const float *z = p.adapter_x.data() + static_cast<size_t>(r) * rank;
    const std::vector<double> inner(z, z + rank);
    add_products(sums, inner, p.adapter_weight.data() + group_index * rank * sums.size(), is_backward);
  }
  for (size_t n = 0; n < sums.size() && !p.bias.empty(); n++)
    sums[n] += static_cast<double>(p.bias[group_index * sums.size() + n]);
  return sums;
}

} // namespace

ragged_result multiply_reference(const ragged_problem &p) {
  const size_t n_results = static_cast<size_t>(p.n_results()), n_rows = static_cast<size_t>(p.n_rows);
  ragged_result result;
  result.y.assign(n_rows * n_results, 0.0);
  if (p.is_gated()) result.gate_up.assign(n_rows * static_cast<size_t>(p.n_out), 0.0);
  std::vector<int> group_of(n_rows, -1);
  for (int e = 0; e < p.n_groups; e++)
    for (int r = p.offsets[static_cast<size_t>(e)]; r < p.offsets[static_cast<size_t>(e) + 1]; r++)
      group_of[static_cast<size_t>(r)] = e;
  for_each(p.n_rows, [&](int r) {
    const size_t row = static_cast<size_t>(r);
    if (group_of[row] < 0) return;
    const std::vector<double> sums = sum_row(p, group_of[row], r);
    const double factor = p.row_weight.empty() ? 1.0 : static_cast<double>(p.row_weight[row]);
    for (size_t j = 0; j < n_results; j++) {
      double value = sums[j];
      if (p.is_gated()) {
        const double g = sums[static_cast<size_t>(paired_row(p, p.n_out, 0, static_cast<int>(j)))];
        const double u = sums[static_cast<size_t>(paired_row(p, p.n_out, 1, static_cast<int>(j)))];
        result.gate_up[row * 2 * n_results + j] = g;
        result.gate_up[row * 2 * n_results + n_results + j] = u;
        value = activate(p, g, u);
      }
      result.y[row * n_results + j] = factor * value;
    }
  });
  return result;
}

reduction_result reduce_reference(const reduction_problem &p) {
  const size_t n_left = static_cast<size_t>(p.n_left), n_right = static_cast<size_t>(p.n_right);
  reduction_result result;
  result.out.assign(static_cast<size_t>(p.n_groups) * n_left * n_right, 0.0);
  result.spread = result.out;
  for_each(p.n_groups * p.n_left, [&](int number) {
    const size_t group = static_cast<size_t>(number) / n_left, i = static_cast<size_t>(number) % n_left;
    double *out = result.out.data() + static_cast<size_t>(number) * n_right;
    double *spread = result.spread.data() + static_cast<size_t>(number) * n_right;
    for (int r = p.offsets[group]; r < p.offsets[group + 1]; r++) {
      const double a = static_cast<double>(p.left[static_cast<size_t>(r) * n_left + i]);
      const float *b = p.right.data() + static_cast<size_t>(r) * n_right;
      for (size_t j = 0; j < n_right; j++) {
        const double term = a * static_cast<double>(b[j]);
        out[j] += term;
        spread[j] += term * term;
      }
    }
    for (size_t j = 0; j < n_right; j++) spread[j] = std::sqrt(spread[j]);
  });
  return result;
}
