/* Attention in float64 on the CPU, by the definition: the oracle of the CUDA attention tests. Tensors are dense
 * [rows, heads, size]. Beside each gradient stands the root of the sum of squares of its terms ("spread"): where terms
 * cancel, that is the scale of the rounding error that any kernel in 16-bit operands has. */
#ifndef ENGRAFT_TESTS_CUDA_ATTENTION_REFERENCE_H
#define ENGRAFT_TESTS_CUDA_ATTENTION_REFERENCE_H

#include <cstdint>
#include <vector>

struct attention_problem {
  int n_queries, n_keys, n_heads, n_kv_heads, head_dim, value_dim, offset;
  double scale, softcap;
  bool has_sinks;
  std::vector<int32_t> first_key, last_query;
  std::vector<float> q, k, v, d_out, sinks;
};

struct attention_result {
  std::vector<double> out, lse, d_q, d_k, d_v, d_sinks;
  std::vector<double> d_q_spread, d_k_spread, d_sinks_spread;
};

void find_last_queries(attention_problem &problem);
attention_result compute_reference(const attention_problem &problem);

#endif
