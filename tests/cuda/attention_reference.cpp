/* See attention_reference.h. One thread per key head; nothing is shared between them. */
#include "tests/cuda/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

void find_last_queries(attention_problem &p) {
  p.last_query.assign(static_cast<size_t>(p.n_keys), -1);
  for (int i = 0; i < p.n_queries; i++)
    for (int j = std::max(p.first_key[static_cast<size_t>(i)], 0); j <= std::min(i + p.offset, p.n_keys - 1); j++)
      p.last_query[static_cast<size_t>(j)] = i;
}

namespace {

struct row_of_scores {
  std::vector<double> weight, slope, d_weight;
  int first, last;
  double sink_weight;
};

size_t at(int row, int head, int n_heads, int size) {
  return (static_cast<size_t>(row) * static_cast<size_t>(n_heads) + static_cast<size_t>(head)) *
         static_cast<size_t>(size);
}

double dot(const float *x, const float *y, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; i++) sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return sum;
}

void weigh_row(const attention_problem &p, attention_result &r, int i, int head, row_of_scores &row) {
  const int kv_head = head / (p.n_heads / p.n_kv_heads);
  const float *q = &p.q[at(i, head, p.n_heads, p.head_dim)];
  row.first = std::max(p.first_key[static_cast<size_t>(i)], 0);
  row.last = std::min(i + p.offset, p.n_keys - 1);
  const double sink =
      p.has_sinks ? static_cast<double>(p.sinks[static_cast<size_t>(head)]) : -std::numeric_limits<double>::infinity();
  double top = sink;
  for (int j = row.first; j <= row.last; j++) {
    const size_t n = static_cast<size_t>(j);
    const double raw = p.scale * dot(q, &p.k[at(j, kv_head, p.n_kv_heads, p.head_dim)], p.head_dim);
    const double t = p.softcap > 0.0 ? std::tanh(raw / p.softcap) : 0.0;
    row.weight[n] = p.softcap > 0.0 ? p.softcap * t : raw;
    row.slope[n] = 1.0 - t * t;
    top = std::max(top, row.weight[n]);
  }
  double sum = std::isinf(sink) ? 0.0 : std::exp(sink - top);
  for (int j = row.first; j <= row.last; j++) sum += std::exp(row.weight[static_cast<size_t>(j)] - top);
  const double lse = std::isinf(top) ? top : top + std::log(sum);
  r.lse[static_cast<size_t>(head) * static_cast<size_t>(p.n_queries) + static_cast<size_t>(i)] = lse;
  row.sink_weight = std::isinf(sink) ? 0.0 : std::exp(sink - lse);
  double *out = &r.out[at(i, head, p.n_heads, p.value_dim)];
  for (int j = row.first; j <= row.last; j++) {
    double &weight = row.weight[static_cast<size_t>(j)];
    weight = std::exp(weight - lse);
    const float *v = &p.v[at(j, kv_head, p.n_kv_heads, p.value_dim)];
    for (int c = 0; c < p.value_dim; c++) out[c] += weight * static_cast<double>(v[c]);
  }
}

/* dS = P (dP - delta), delta = sum of dO O (FlashAttention-2, section 3.1), with the cap's slope in front. */
void differentiate_row(const attention_problem &p, attention_result &r, int i, int head, const row_of_scores &row) {
  const int kv_head = head / (p.n_heads / p.n_kv_heads);
  const float *q = &p.q[at(i, head, p.n_heads, p.head_dim)], *d_out = &p.d_out[at(i, head, p.n_heads, p.value_dim)];
  const double *out = &r.out[at(i, head, p.n_heads, p.value_dim)];
  double delta = 0.0, delta_spread = 0.0;
  for (int c = 0; c < p.value_dim; c++) {
    const double term = out[c] * static_cast<double>(d_out[c]);
    delta += term;
    delta_spread += term * term;
  }
  delta_spread = std::sqrt(delta_spread);
  r.d_sinks[static_cast<size_t>(head)] -= row.sink_weight * delta;
  r.d_sinks_spread[static_cast<size_t>(head)] += std::pow(row.sink_weight * (delta_spread + std::fabs(delta)), 2);
  const size_t q_at = at(i, head, p.n_heads, p.head_dim);
  for (int j = row.first; j <= row.last; j++) {
    const size_t k_at = at(j, kv_head, p.n_kv_heads, p.head_dim), v_at = at(j, kv_head, p.n_kv_heads, p.value_dim);
    const double dp = dot(d_out, &p.v[v_at], p.value_dim), weight = row.weight[static_cast<size_t>(j)];
    const double factor = weight * row.slope[static_cast<size_t>(j)] * p.scale, ds = factor * (dp - delta);
    const double gross = factor * (std::fabs(dp) + std::fabs(delta) + delta_spread);
    for (int c = 0; c < p.value_dim; c++)
      r.d_v[v_at + static_cast<size_t>(c)] += weight * static_cast<double>(d_out[c]);
    for (int c = 0; c < p.head_dim; c++) {
      const size_t n = static_cast<size_t>(c);
      const double k = static_cast<double>(p.k[k_at + n]), query = static_cast<double>(q[c]);
      r.d_q[q_at + n] += ds * k;
      r.d_k[k_at + n] += ds * query;
      r.d_q_spread[q_at + n] += gross * gross * k * k;
      r.d_k_spread[k_at + n] += gross * gross * query * query;
    }
  }
}

void compute_group(const attention_problem &p, attention_result &r, int kv_head) {
  const int step = p.n_heads / p.n_kv_heads;
  row_of_scores row;
  row.weight.resize(static_cast<size_t>(p.n_keys));
  row.slope.resize(static_cast<size_t>(p.n_keys));
  for (int head = kv_head * step; head < (kv_head + 1) * step; head++)
    for (int i = 0; i < p.n_queries; i++) {
      weigh_row(p, r, i, head, row);
      differentiate_row(p, r, i, head, row);
    }
}

} // namespace

attention_result compute_reference(const attention_problem &p) {
  attention_result r;
  const size_t heads = static_cast<size_t>(p.n_heads);
  r.out.assign(p.d_out.size(), 0.0);
  r.lse.assign(heads * static_cast<size_t>(p.n_queries), 0.0);
  r.d_q.assign(p.q.size(), 0.0);
  r.d_k.assign(p.k.size(), 0.0);
  r.d_v.assign(p.v.size(), 0.0);
  r.d_sinks.assign(heads, 0.0);
  r.d_q_spread.assign(p.q.size(), 0.0);
  r.d_k_spread.assign(p.k.size(), 0.0);
  r.d_sinks_spread.assign(heads, 0.0);
  std::vector<std::thread> threads;
  for (int kv_head = 0; kv_head < p.n_kv_heads; kv_head++)
    threads.emplace_back(compute_group, std::cref(p), std::ref(r), kv_head);
  for (std::thread &thread : threads) thread.join();
  return r;
}
