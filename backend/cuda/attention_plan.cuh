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

/* Head sizes of the Hopper kernels. Those between 64 and 128 run as 128: the copy engine fills the missing columns with
 * zeros and drops them when it stores. */
inline bool has_hopper_kernels(const egi_cuda_attention &a) {
  return a.head_dim >= 64 && a.head_dim <= 128 && a.value_dim == a.head_dim;
}

/* Found by measuring (docs/kernels.md). */
constexpr tile_size forward_tile(int dim) {
  return {dim > 64 ? 2 : 3, 128};
}
constexpr tile_size dq_tile(int dim) {
  return {2, dim > 64 ? 64 : 96};
}
constexpr tile_size dkv_tile(int dim) {
  return {2, dim > 64 ? 64 : 96};
}

/* Forward packs query heads that share a key head: the 64 rows of a warpgroup are 64 / P tokens of P heads, head by
 * head. All warpgroups then need nearly the same keys, and less of a tile lies outside short documents. */
inline int count_packed_heads(const egi_cuda_attention &a) {
  const int group = a.n_heads / a.n_kv_heads;
  return group % 4 == 0 ? 4 : group % 2 == 0 ? 2 : 1;
}

/* Steps are counted from the anchor: keys downwards from it (query tiles), queries upwards (key tiles). Warpgroup g
 * needs steps begin[g] .. end[g] - 1 of 0 .. n_steps - 1. `edge` is the largest first key of its rows (query tiles) or
 * the smallest last query (key tiles): steps on the near side of it need no mask there. `least` is the smallest first
 * key (query tiles alone): nothing before it counts. */
struct tile_plan {
  int first_row, n_steps, anchor, end_row; /* rows first_row .. end_row - 1 */
  int begin[MAX_GROUPS], end[MAX_GROUPS], edge[MAX_GROUPS], least[MAX_GROUPS];
};

/* One list of tiles: how many there are, and the counter that hands them out, zero between launches. */
struct list_state {
  int n_tiles, next_item;
};

enum { LIST_FORWARD, LIST_DQ, LIST_DKV, N_LISTS };

struct plan_lists {
  list_state *states; /* [N_LISTS] */
  tile_plan *tiles[N_LISTS];
  int most_tiles[N_LISTS];
  int2 *key_rows; /* while key tiles are found: their rows */
  size_t size_bytes;
};

/* Key tiles end where documents do (plan_keys), but not before they have more than this many rows: a bound on their
 * number. Their ends are multiples of it, since a warp writes that many rows at once. */
enum { LEAST_ROWS = 16, CHUNK_ROWS = 1024 };

inline plan_lists carve_plan(const egi_cuda_attention &a, void *memory) {
  plan_lists lists = {};
  if (!has_hopper_kernels(a)) return lists;
  const int tokens = 64 / count_packed_heads(a);
  const int forward_rows = tokens * forward_tile(a.head_dim).groups, dq_rows = tokens * dq_tile(a.head_dim).groups;
  const int64_t n_chunks = (a.n_keys + CHUNK_ROWS - 1) / CHUNK_ROWS;
  lists.most_tiles[LIST_FORWARD] = static_cast<int>((a.n_queries + forward_rows - 1) / forward_rows);
  lists.most_tiles[LIST_DQ] = static_cast<int>((a.n_queries + dq_rows - 1) / dq_rows);
  lists.most_tiles[LIST_DKV] = static_cast<int>((a.n_keys + LEAST_ROWS - 1) / LEAST_ROWS + n_chunks);
  lists.states = static_cast<list_state *>(memory);
  lists.key_rows = reinterpret_cast<int2 *>(static_cast<char *>(memory) + 64);
  lists.size_bytes = 64 + static_cast<size_t>(lists.most_tiles[LIST_DKV]) * sizeof(int2);
  for (int i = 0; i < N_LISTS; i++) {
    lists.tiles[i] = reinterpret_cast<tile_plan *>(static_cast<char *>(memory) + lists.size_bytes);
    lists.size_bytes += static_cast<size_t>(lists.most_tiles[i]) * sizeof(tile_plan);
  }
  return lists;
}

/* Fills the lists whose bits, 1 << LIST_..., are in `parts`. */
egi_cuda_status fill_plan(const egi_cuda_attention &a, const plan_lists &lists, int parts, cudaStream_t stream);

} // namespace egi

#endif
