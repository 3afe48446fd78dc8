/* The table of product cases: each row is run with bf16 and fp16 and with every family of kernels. */
#ifndef ENGRAFT_TESTS_CUDA_RAGGED_CASES_H
#define ENGRAFT_TESTS_CUDA_RAGGED_CASES_H

#include "backend/cuda/ragged.h"
#include "tests/cuda/ragged_support.h"

enum weight_form { DENSE, NF4_INSIDE, NF4_SCRATCH, NF4_SMALL_SCRATCH, NF4_NESTED };

struct product_case {
  const char *name;
  group_form groups;
  int n_in, n_out, rank;
  egi_ragged_direction direction;
  egi_ragged_pairing pairing;
  egi_ragged_activation activation;
  weight_form weight;
  bool has_bias, has_row_weight, has_gate_up;
};

inline std::vector<product_case> make_product_cases() {
  const egi_ragged_direction F = EGI_RAGGED_FORWARD, B = EGI_RAGGED_BACKWARD;
  const egi_ragged_pairing U = EGI_RAGGED_UNPAIRED, C = EGI_RAGGED_CONCATENATED, I = EGI_RAGGED_INTERLEAVED;
  const egi_ragged_activation P = EGI_RAGGED_PLAIN;
  return {
      {"forward edges", GROUPS_EDGES, 200, 392, 0, F, U, P, DENSE, false, false, false},
      {"forward one takes all", GROUPS_ONE_TAKES_ALL, 64, 256, 0, F, U, P, DENSE, false, false, false},
      {"forward most empty", GROUPS_MOST_EMPTY, 136, 264, 0, F, U, P, DENSE, true, false, false},
      {"forward all empty", GROUPS_NONE, 64, 256, 0, F, U, P, DENSE, false, false, false},
      {"forward many groups", GROUPS_MANY, 72, 144, 8, F, U, P, DENSE, true, true, false},
      {"forward deep", GROUPS_RANDOM, 1032, 256, 16, F, U, P, DENSE, false, true, false},
      {"forward narrow", GROUPS_EDGES, 200, 16, 0, F, U, P, DENSE, false, false, false},
      {"forward narrow 2 tiles", GROUPS_RANDOM, 8, 120, 8, F, U, P, DENSE, true, true, false},
      {"backward edges", GROUPS_EDGES, 200, 392, 0, B, U, P, DENSE, false, false, false},
      {"backward adapter", GROUPS_MANY, 136, 200, 24, B, U, P, DENSE, false, true, false},
      {"backward narrow", GROUPS_RANDOM, 264, 16, 0, B, U, P, DENSE, false, false, false},
      {"backward interleaved", GROUPS_EDGES, 208, 264, 16, B, I, P, DENSE, false, false, false},
      {"backward rank as n_in", GROUPS_RANDOM, 64, 136, 64, B, I, P, DENSE, false, false, false},
      {"backward concatenated", GROUPS_RANDOM, 208, 136, 0, B, C, P, DENSE, false, false, false},
      {"swiglu concatenated", GROUPS_EDGES, 200, 400, 16, F, C, EGI_RAGGED_SWIGLU, DENSE, false, false, true},
      {"swiglu no gate_up", GROUPS_RANDOM, 64, 64, 0, F, C, EGI_RAGGED_SWIGLU, DENSE, false, true, false},
      {"geglu interleaved", GROUPS_RANDOM, 136, 272, 0, F, I, EGI_RAGGED_GEGLU, DENSE, false, false, true},
      {"geglu tanh", GROUPS_MANY, 72, 160, 8, F, C, EGI_RAGGED_GEGLU_TANH, DENSE, true, false, true},
      {"clamped with bias", GROUPS_EDGES, 128, 336, 16, F, I, EGI_RAGGED_CLAMPED, DENSE, true, true, true},
      {"nf4 forward", GROUPS_EDGES, 192, 392, 0, F, U, P, NF4_INSIDE, false, false, false},
      {"nf4 forward deep", GROUPS_RANDOM, 1024, 256, 16, F, U, P, NF4_INSIDE, true, true, false},
      {"nf4 nested", GROUPS_MANY, 128, 512, 0, F, U, P, NF4_NESTED, false, false, false},
      {"nf4 one takes all", GROUPS_ONE_TAKES_ALL, 256, 136, 0, F, U, P, NF4_NESTED, false, false, false},
      {"nf4 swiglu", GROUPS_EDGES, 192, 400, 16, F, C, EGI_RAGGED_SWIGLU, NF4_INSIDE, false, false, true},
      {"nf4 clamped", GROUPS_RANDOM, 320, 336, 0, F, I, EGI_RAGGED_CLAMPED, NF4_NESTED, true, false, true},
      {"nf4 backward", GROUPS_EDGES, 200, 448, 0, B, U, P, NF4_INSIDE, false, false, false},
      {"nf4 backward deep", GROUPS_RANDOM, 1024, 256, 16, B, U, P, NF4_NESTED, false, false, false},
      {"nf4 backward interleaved", GROUPS_RANDOM, 208, 320, 16, B, I, P, NF4_NESTED, false, true, false},
      {"nf4 scratch", GROUPS_RANDOM, 72, 256, 8, F, U, P, NF4_SCRATCH, true, false, false},
      {"nf4 small scratch", GROUPS_EDGES, 192, 264, 8, F, U, P, NF4_SMALL_SCRATCH, true, true, false},
      {"nf4 small scratch nested", GROUPS_MOST_EMPTY, 128, 336, 8, F, I, EGI_RAGGED_CLAMPED, NF4_SMALL_SCRATCH, true,
       true, true},
  };
}

struct reduction_case {
  const char *name;
  group_form groups;
  int n_left, n_right;
  bool is_turned, is_added; /* is_turned: out is stored [right, left] */
};

inline std::vector<reduction_case> make_reduction_cases() {
  return {
      {"reduction edges", GROUPS_EDGES, 200, 16, false, false},
      {"reduction turned", GROUPS_EDGES, 136, 8, true, false},
      {"reduction added", GROUPS_RANDOM, 264, 24, false, true},
      {"reduction short left", GROUPS_RANDOM, 16, 328, false, false},
      {"reduction short left turned added", GROUPS_MANY, 8, 128, true, true},
      {"reduction wide", GROUPS_RANDOM, 136, 200, false, false},
      {"reduction one takes all", GROUPS_ONE_TAKES_ALL, 128, 64, false, false},
      {"reduction most empty", GROUPS_MOST_EMPTY, 72, 72, false, false},
      {"reduction all empty", GROUPS_NONE, 64, 16, false, false},
  };
}

#endif
