/* Tile sizes of the Hopper kernels and the plan they read: for each tile of query or key rows which tiles of the other
 * side each warpgroup needs, longest first. A plan depends on first_key, last_query and the offset alone, so one serves
 * every layer and every pass over the same rows. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_PLAN_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_PLAN_CUH

#include "backend/cuda/attention_common.cuh"

namespace egi {

enum { MAX_GROUPS = 3 };

/* Warpgroups of a block, which own 64 rows each, and rows a step takes of the other side. */
struct tile_size {
  int groups, step;
};

/* Found by measuring (docs/kernels.md). */
constexpr tile_size forward_tile(int dim) {
  return {dim == 128 ? 2 : 3, 128};
}
constexpr tile_size dq_tile(int dim) {
  return {2, dim == 128 ? 64 : 96};
}
constexpr tile_size dkv_tile(int dim) {
  return {2, dim == 128 ? 64 : 96};
}

/* Forward packs query heads that share a key head: the 64 rows of a warpgroup are 64 / P tokens of P heads, head by
 * head. All warpgroups then need nearly the same keys, and less of a tile lies outside short documents. */
inline int count_packed_heads(const egi_cuda_attention &a) {
  const int group = a.n_heads / a.n_kv_heads;
  return group % 4 == 0 ? 4 : group % 2 == 0 ? 2 : 1;
}

/* Steps are counted from the anchor: keys downwards from it (query tiles), queries upwards (key tiles). Warpgroup g
 * needs steps begin[g] .. end[g] - 1 of 0 .. n_steps - 1. `edge` is the largest first key of its rows (query tiles) or
 * the smallest last query (key tiles): steps on the near side of it need no mask there. */
struct tile_plan {
  int first_row, n_steps, anchor;
  int begin[MAX_GROUPS], end[MAX_GROUPS], edge[MAX_GROUPS];
};

struct plan_lists {
  tile_plan *forward, *dq, *dkv;
  int n_forward, n_dq, n_dkv;
  size_t size_bytes;
};

inline plan_lists carve_plan(const egi_cuda_attention &a, void *memory) {
  plan_lists lists = {};
  if (a.head_dim != 64 && a.head_dim != 128) return lists;
  const int tokens = 64 / count_packed_heads(a);
  const int forward_rows = tokens * forward_tile(a.head_dim).groups;
  const int dq_rows = 64 * dq_tile(a.head_dim).groups, dkv_rows = 64 * dkv_tile(a.head_dim).groups;
  lists.n_forward = static_cast<int>((a.n_queries + forward_rows - 1) / forward_rows);
  lists.n_dq = static_cast<int>((a.n_queries + dq_rows - 1) / dq_rows);
  lists.n_dkv = static_cast<int>((a.n_keys + dkv_rows - 1) / dkv_rows);
  lists.forward = static_cast<tile_plan *>(memory);
  lists.dq = lists.forward + lists.n_forward;
  lists.dkv = lists.dq + lists.n_dq;
  lists.size_bytes = static_cast<size_t>(lists.n_forward + lists.n_dq + lists.n_dkv) * sizeof(tile_plan);
  return lists;
}

enum plan_parts { PLAN_FORWARD = 1, PLAN_DQ = 2, PLAN_DKV = 4 };

/* Fills the named lists. */
egi_cuda_status fill_plan(const egi_cuda_attention &a, const plan_lists &lists, int parts, cudaStream_t stream);

} // namespace egi

#endif
