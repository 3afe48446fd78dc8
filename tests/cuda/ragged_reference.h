/* Ragged products and reductions in float64 on the CPU, by the definition: the oracle of the CUDA ragged tests.
 * Matrices are dense and row-major; values are what the kernels read, already rounded to 16 bits. */
#ifndef ENGRAFT_TESTS_CUDA_RAGGED_REFERENCE_H
#define ENGRAFT_TESTS_CUDA_RAGGED_REFERENCE_H

#include <cstdint>
#include <vector>

#include "backend/cuda/ragged.h"

struct ragged_problem {
  int n_groups, n_rows, n_in, n_out, rank;
  egi_ragged_direction direction;
  egi_ragged_pairing pairing;
  egi_ragged_activation activation;
  double alpha, limit;
  std::vector<int32_t> offsets;
  std::vector<float> x, weight, adapter_x, adapter_weight, bias, row_weight; /* the last four may be empty */
  bool is_gated() const { return activation != EGI_RAGGED_PLAIN; }
  int n_results() const { return is_gated() ? n_out / 2 : n_out; }
};

struct ragged_result {
  std::vector<double> y, gate_up; /* gate_up only where gated; rows in no group hold nothing of meaning */
};

ragged_result multiply_reference(const ragged_problem &problem);

struct reduction_problem {
  int n_groups, n_rows, n_left, n_right;
  std::vector<int32_t> offsets;
  std::vector<float> left, right;
};

/* [group, left, right]; `spread` is the root of the sum of squares of the terms, the scale of rounding errors. */
struct reduction_result {
  std::vector<double> out, spread;
};

reduction_result reduce_reference(const reduction_problem &problem);

#endif
