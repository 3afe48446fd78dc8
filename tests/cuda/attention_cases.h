/* The problems that the attention tests run: sizes around tile edges, documents of every kind, all features. */
#ifndef ENGRAFT_TESTS_CUDA_ATTENTION_CASES_H
#define ENGRAFT_TESTS_CUDA_ATTENTION_CASES_H

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "tests/cuda/attention_reference.h"

enum document_kind {
  DOCUMENTS_ONE,    /* one over all rows */
  DOCUMENTS_SINGLE, /* every token its own */
  DOCUMENTS_RANDOM, /* 1 to 200 tokens */
  DOCUMENTS_EDGES,  /* lengths around multiples of 64 */
  DOCUMENTS_PADDED  /* random, then rows that see nothing */
};

struct attention_case {
  const char *name;
  int n_queries, offset, n_heads, n_kv_heads, head_dim, value_dim;
  document_kind documents;
  int window; /* keys a query sees at most; 0: all */
  float softcap;
  bool has_sinks, has_gaps;
};

inline bool has_sm90() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major == 9;
}

inline int next_length(document_kind kind, std::mt19937 &random, int total) {
  static const int edges[] = {63, 64, 65, 127, 128, 129, 1, 191, 192, 193, 2, 256};
  switch (kind) {
  case DOCUMENTS_ONE:
    return total;
  case DOCUMENTS_SINGLE:
    return 1;
  case DOCUMENTS_EDGES:
    return edges[random() % (sizeof edges / sizeof edges[0])];
  default:
    return 1 + static_cast<int>(random() % 200);
  }
}

inline void set_documents(attention_problem &p, const attention_case &c, std::mt19937 &random) {
  p.first_key.assign(static_cast<size_t>(p.n_queries), 0);
  int start = 0, end = 0;
  for (int position = 0; position < p.n_keys; position++) {
    if (position == end) {
      start = position;
      end += next_length(c.documents, random, p.n_keys);
    }
    if (position < p.offset) continue;
    int first = start;
    if (c.window > 0) first = std::max(first, position - c.window + 1);
    if (c.documents == DOCUMENTS_PADDED && position >= p.n_keys - 70) first = p.n_keys;
    p.first_key[static_cast<size_t>(position - p.offset)] = first;
  }
  find_last_queries(p);
}

inline attention_problem make_problem(const attention_case &c, std::mt19937 &random,
                                      const std::function<float(float)> &rounded) {
  attention_problem p = {};
  p.n_queries = c.n_queries;
  p.n_keys = c.n_queries + c.offset;
  p.n_heads = c.n_heads;
  p.n_kv_heads = c.n_kv_heads;
  p.head_dim = c.head_dim;
  p.value_dim = c.value_dim;
  p.offset = c.offset;
  p.scale = static_cast<double>(static_cast<float>(1.0 / std::sqrt(c.head_dim)));
  p.softcap = static_cast<double>(c.softcap);
  p.has_sinks = c.has_sinks;
  std::normal_distribution<float> normal;
  auto fill = [&](std::vector<float> &x, int rows, int heads, int size, float factor) {
    x.resize(static_cast<size_t>(rows) * static_cast<size_t>(heads) * static_cast<size_t>(size));
    for (float &value : x) value = rounded(factor * normal(random));
  };
  fill(p.q, p.n_queries, p.n_heads, p.head_dim, 1.5f);
  fill(p.k, p.n_keys, p.n_kv_heads, p.head_dim, 1.5f);
  fill(p.v, p.n_keys, p.n_kv_heads, p.value_dim, 1.0f);
  fill(p.d_out, p.n_queries, p.n_heads, p.value_dim, 1.0f);
  p.sinks.resize(static_cast<size_t>(p.n_heads));
  for (float &value : p.sinks) value = 2.0f * normal(random);
  set_documents(p, c, random);
  return p;
}

inline std::vector<attention_case> make_cases(bool is_quick) {
  std::vector<attention_case> cases = {
      {"d128 gqa gaps documents sinks cap", 300, 0, 4, 2, 128, 128, DOCUMENTS_RANDOM, 0, 5.0f, true, true},
      {"d64 window offset", 200, 77, 4, 1, 64, 64, DOCUMENTS_RANDOM, 50, 0.0f, false, true},
      {"d64 one-token documents sinks", 257, 0, 2, 2, 64, 64, DOCUMENTS_SINGLE, 0, 0.0f, true, false},
      {"d128 padded rows", 261, 0, 2, 1, 128, 128, DOCUMENTS_PADDED, 0, 0.0f, false, true},
      {"d80 documents", 190, 0, 2, 1, 80, 80, DOCUMENTS_RANDOM, 0, 0.0f, true, true},
      {"d96 cap", 190, 0, 2, 1, 96, 96, DOCUMENTS_RANDOM, 0, 5.0f, false, true},
      {"d192/128", 190, 3, 2, 1, 192, 128, DOCUMENTS_RANDOM, 0, 0.0f, true, true},
      {"d256 window", 190, 0, 2, 1, 256, 256, DOCUMENTS_RANDOM, 33, 0.0f, false, true},
  };
  if (is_quick) return cases;
  static const int sizes[] = {1, 2, 8, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 385, 700};
  for (int size : sizes) {
    cases.push_back({"d128 one document", size, 0, 2, 1, 128, 128, DOCUMENTS_ONE, 0, 0.0f, false, false});
    cases.push_back({"d64 one document", size, 0, 3, 3, 64, 64, DOCUMENTS_ONE, 0, 0.0f, false, true});
  }
  for (int dim : {64, 80, 96, 128, 192, 256}) {
    const int value_dim = dim == 192 ? 128 : dim;
    cases.push_back({"edges", 900, 0, 4, 2, dim, value_dim, DOCUMENTS_EDGES, 0, 0.0f, false, true});
    cases.push_back(
        {"edges sinks cap window 64", 600, 0, 4, 1, dim, value_dim, DOCUMENTS_EDGES, 64, 8.0f, true, false});
    cases.push_back({"window 1", 300, 0, 2, 2, dim, value_dim, DOCUMENTS_ONE, 1, 0.0f, true, true});
    cases.push_back({"window 129 offset 300", 333, 300, 4, 2, dim, value_dim, DOCUMENTS_ONE, 129, 0.0f, false, true});
    cases.push_back({"decode one query", 1, 511, 8, 2, dim, value_dim, DOCUMENTS_ONE, 0, 0.0f, true, false});
    cases.push_back({"decode five documents", 5, 640, 8, 4, dim, value_dim, DOCUMENTS_RANDOM, 0, 0.0f, false, true});
    cases.push_back({"padded sinks", 400, 0, 2, 1, dim, value_dim, DOCUMENTS_PADDED, 0, 0.0f, true, true});
  }
  cases.push_back({"16384 one-token documents", 16384, 0, 2, 1, 128, 128, DOCUMENTS_SINGLE, 0, 0.0f, true, false});
  cases.push_back({"16384 one-token documents", 16384, 0, 2, 2, 64, 64, DOCUMENTS_SINGLE, 0, 0.0f, false, false});
  cases.push_back({"5000 documents edges", 5000, 0, 2, 1, 128, 128, DOCUMENTS_EDGES, 0, 0.0f, false, false});
  cases.push_back({"items in a row", 2000, 0, 16, 4, 128, 128, DOCUMENTS_RANDOM, 0, 0.0f, true, true});
  cases.push_back({"items in a row window", 2000, 0, 24, 8, 128, 128, DOCUMENTS_EDGES, 150, 0.0f, false, false});
  cases.push_back({"items in a row cap", 1700, 0, 12, 12, 64, 64, DOCUMENTS_EDGES, 0, 8.0f, false, true});
  cases.push_back({"items in a row offset", 2000, 131, 16, 4, 64, 64, DOCUMENTS_PADDED, 0, 0.0f, true, false});
  cases.push_back({"many heads", 130, 0, 48, 16, 128, 128, DOCUMENTS_RANDOM, 0, 0.0f, false, false});
  cases.push_back({"one document", 1500, 0, 4, 4, 64, 64, DOCUMENTS_ONE, 0, 0.0f, false, false});
  return cases;
}

#endif
