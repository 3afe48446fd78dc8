/* What attention's backward kernel for mma.sync is made of besides its walk: shapes, and the sums of d_q over blocks.
 * Each tile of queries has a sum in fp32, in the order of the warps' registers, and a count of the key tiles that have
 * added their part, in their order. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_BACKWARD_MMA_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_BACKWARD_MMA_CUH

#include "backend/cuda/attention_mma.cuh"

namespace egi {

/* How many times to cut the rows of a step's d_q, so that n_warps parts of it are nearly square and their columns whole
 * runs of 16; parts may overlap where they are not. */
constexpr int cut_rows(int n_rows, int n_columns, int n_warps) {
  int best = 0, least = 1 << 30;
  for (int r = 4; r > 0; r /= 2) {
    const int parts = n_warps / r, columns = (n_columns / parts + 15) / 16 * 16;
    const bool is_even = parts == 1 || (n_columns - columns) % (8 * (parts - 1)) == 0;
    if (n_rows % (16 * r) != 0 || n_warps % r != 0 || !is_even || n_rows / r + columns >= least) continue;
    best = r;
    least = n_rows / r + columns;
  }
  return best;
}

/* KEY_WARPS warps, or as many pairs of them (PARTS 2), own 16 MT key rows each. A step takes QUERIES rows: alone, a
 * warp takes them in slices whose scores fit into registers; of a pair, each takes one half of them, and for the sums
 * one half of the columns. */
template <int HEAD_DIM, int VALUE_DIM, int MT, int PARTS, int QUERIES, int KEY_WARPS = 4, int STAGES = 2>
struct backward_shape {
  static constexpr int head_dim = HEAD_DIM, value_dim = VALUE_DIM, m_tiles = MT, queries = QUERIES, parts = PARTS;
  static constexpr int n_warps = KEY_WARPS * PARTS, keys = 16 * MT * KEY_WARPS, threads = 32 * n_warps,
                       n_stages = STAGES;
  static constexpr int slice = PARTS == 2 ? QUERIES / 2 : 32;
  static constexpr int k_columns = HEAD_DIM / PARTS, v_columns = VALUE_DIM / PARTS;
  static constexpr int q_stride = padded_columns<HEAD_DIM>, v_stride = padded_columns<VALUE_DIM>;
  static constexpr int s_stride = padded_columns<QUERIES>;
  /* a stage: queries, their gradients, their row pairs */
  static constexpr int pairs_at = queries * (q_stride + v_stride), stage_elements = pairs_at + 4 * queries;
  /* keys, values, score gradients, of pairs also probabilities, stages */
  static constexpr int scores_at = keys * (q_stride + v_stride), stages_at = scores_at + PARTS * keys * s_stride;
  static constexpr int shared_bytes = 2 * (stages_at + n_stages * stage_elements);
  static constexpr int blocks = n_warps > 4 ? 1 : 2; /* a multiprocessor */
  static constexpr int row_parts = cut_rows(QUERIES, HEAD_DIM, n_warps), column_parts = n_warps / row_parts;
  static constexpr int dq_tiles = QUERIES / 16 / row_parts;
  static constexpr int dq_columns = (HEAD_DIM / column_parts + 15) / 16 * 16;
  static constexpr int dq_floats = n_warps * dq_tiles * 16 * dq_columns; /* of a tile of queries */
  static_assert(QUERIES % slice == 0 && slice % 16 == 0, "slices are whole products");
};

struct backward_arguments {
  egi_cuda_attention a;
  const float2 *row_pairs;
  int64_t padded_rows;
  float *dq_sums; /* [n_heads, n_query_tiles] tiles in the order of the warps' registers */
  int *dq_counts; /* [n_heads, n_query_tiles] key tiles that have been added */
  int *next_item; /* counts the blocks that have started */
  int n_tiles, n_query_tiles;
};

/* A warp's part of d_q of a step: rows and columns of ds^T k over the block's keys. */
template <class Element, class Shape>
__device__ __forceinline__ void multiply_dq(float (&dq)[Shape::dq_tiles][Shape::dq_columns / 2], const Element *ds,
                                            const Element *k, int lane) {
  const unsigned left_base =
      shared_address(ds + ((lane & 7) + 8 * (lane >> 4)) * Shape::s_stride + 8 * ((lane >> 3) & 1));
  const unsigned right_base =
      shared_address(k + ((lane & 7) + 8 * ((lane >> 3) & 1)) * Shape::q_stride + 8 * (lane >> 4));
#pragma unroll
  for (int m = 0; m < Shape::dq_tiles; m++)
#pragma unroll
    for (int i = 0; i < Shape::dq_columns / 2; i++) dq[m][i] = 0.0f;
  constexpr int n_runs = Shape::dq_columns / 16, n_products = Shape::keys / 16 * n_runs;
  unsigned left[2][Shape::dq_tiles][4], right[2][4];
  auto load_left = [&](int kk) {
#pragma unroll
    for (int m = 0; m < Shape::dq_tiles; m++)
      load_matrices_transposed(left[kk & 1][m], left_base + 2 * (16 * kk * Shape::s_stride + 16 * m));
  };
  auto load_right = [&](int i) {
    load_matrices_transposed(right[i & 1], right_base + 2 * (16 * (i / n_runs) * Shape::q_stride + 16 * (i % n_runs)));
  };
  load_left(0);
  load_right(0);
#pragma unroll
  for (int i = 0; i < n_products; i++) {
    const int kk = i / n_runs, n = i % n_runs;
    if (i + 1 < n_products) load_right(i + 1);
    if (n == 0 && kk + 1 < Shape::keys / 16) load_left(kk + 1);
#pragma unroll
    for (int m = 0; m < Shape::dq_tiles; m++) {
      mma<Element>::run(&dq[m][8 * n], left[kk & 1][m], right[i & 1][0], right[i & 1][1]);
      mma<Element>::run(&dq[m][8 * n + 4], left[kk & 1][m], right[i & 1][2], right[i & 1][3]);
    }
  }
}

__device__ __forceinline__ int load_count(const int *count) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int *count, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}
/* sum += x in the cache that all blocks share; the caller orders the additions. */
__device__ __forceinline__ void add_to_sum(float4 *sum, float4 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#else
  const float4 before = __ldcg(sum);
  __stcg(sum, make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w));
#endif
}

/* The key tiles whose parts make up the d_q of a query tile: from that of its first row's first key to that of its last
 * row's last. A tile that sees nothing is left to the last of them. */
template <class Shape>
__device__ __forceinline__ int2 find_key_tiles(const egi_cuda_attention &a, int query_tile, int first_key, int offset) {
  const int end_row = min((query_tile + 1) * Shape::queries, static_cast<int>(a.n_queries));
  const int last = (end_row - 1 + offset) / Shape::keys;
  return make_int2(min(max(first_key, 0) / Shape::keys, last), last);
}

/* The first column of a warp's part of d_q. */
template <class Shape> __device__ __forceinline__ int first_dq_column(int warp) {
  if (Shape::column_parts == 1) return 0;
  return warp % Shape::column_parts * ((Shape::head_dim - Shape::dq_columns) / (Shape::column_parts - 1));
}

/* A sum of d_q as seen by a key tile: whether it adds a part, how many come before, and how many there were when last
 * looked at (lane 0 alone). */
struct dq_turn {
  int64_t place;
  int head, query_tile, n_before, n_parts;
  bool is_part, is_last;
};
template <class Shape>
__device__ __forceinline__ dq_turn find_turn(const backward_arguments &g, int own_tile, int head, int query_tile,
                                             int tile_first_key) {
  const int2 key_tiles = find_key_tiles<Shape>(g.a, query_tile, tile_first_key, query_offset(g.a));
  dq_turn turn = {static_cast<int64_t>(head) * g.n_query_tiles + query_tile, head, query_tile, own_tile - key_tiles.x};
  turn.is_part = own_tile >= key_tiles.x && own_tile <= key_tiles.y;
  turn.is_last = own_tile == key_tiles.y;
  return turn;
}

/* A part that has been added, but not yet told to the block after. */
struct dq_notice {
  int *count; /* NULL: none */
  int n_parts;
};

/* Adds a warp's part of d_q to those of the key tiles before, or ends the sum. */
template <class Element, class Shape>
__device__ __forceinline__ void add_dq(const backward_arguments &g, float (&dq)[Shape::dq_tiles][Shape::dq_columns / 2],
                                       const dq_turn &turn) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float4 *sums = reinterpret_cast<float4 *>(g.dq_sums + turn.place * Shape::dq_floats) +
                 warp * (Shape::dq_floats / Shape::n_warps / 4) + lane;
  const bool is_first = turn.n_before == 0, is_last = turn.is_last;
  if (!is_first) {
    /* additions are not carried out ahead of this test; what is read must also be seen */
    int n_parts = turn.n_parts;
    if (lane == 0)
      while (n_parts != turn.n_before) n_parts = load_count(g.dq_counts + turn.place);
    __syncwarp();
    if (is_last) __threadfence();
  }
#pragma unroll
  for (int m = 0; m < Shape::dq_tiles; m++)
#pragma unroll
    for (int i = 0; i < Shape::dq_columns / 8; i++) {
      float *x = &dq[m][4 * i];
      float4 *sum = sums + 32 * (m * (Shape::dq_columns / 8) + i);
      if (!is_last) {
        if (is_first)
          __stcg(sum, make_float4(x[0], x[1], x[2], x[3]));
        else
          add_to_sum(sum, make_float4(x[0], x[1], x[2], x[3]));
      } else if (!is_first) {
        const float4 before = __ldcg(sum);
        x[0] += before.x;
        x[1] += before.y;
        x[2] += before.z;
        x[3] += before.w;
      }
    }
  if (!is_last) return;
  const int n_queries = static_cast<int>(g.a.n_queries);
  const int row_part = warp / Shape::column_parts, column = first_dq_column<Shape>(warp);
  Element *out = static_cast<Element *>(g.a.d_q.data) + turn.head * g.a.d_q.head_stride + column + 2 * (lane & 3);
#pragma unroll
  for (int m = 0; m < Shape::dq_tiles; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = turn.query_tile * Shape::queries + 16 * (row_part * Shape::dq_tiles + m) + 8 * r + (lane >> 2);
      if (row >= n_queries) continue;
#pragma unroll
      for (int i = 0; i < Shape::dq_columns / 8; i++)
        *reinterpret_cast<unsigned *>(out + row * g.a.d_q.row_stride + 8 * i) =
            number_format<Element>::pack(dq[m][4 * i + 2 * r] * g.a.scale, dq[m][4 * i + 2 * r + 1] * g.a.scale);
    }
}

/* The query tiles that a key tile has to do with: first .. last. */
template <class Shape>
__device__ __forceinline__ int2 find_query_tiles(const egi_cuda_attention &a, int tile, int offset, int lane) {
  const int first_key = tile * Shape::keys, n_tiles = (static_cast<int>(a.n_queries) - 1) / Shape::queries;
  const int last_query = last_query_range(a, first_key, Shape::keys, lane).y;
  const int first = max(first_key - offset, 0) / Shape::queries;
  int last = last_query < 0 ? -1 : last_query / Shape::queries;
  if (first_key >= offset) last = max(last, first); /* rows that see nothing need a zero: see find_key_tiles */
  const int end = first_key + Shape::keys - offset; /* of rows whose own key is in this tile or before */
  last = end >= static_cast<int>(a.n_queries) ? n_tiles : max(last, end / Shape::queries - 1);
  return make_int2(first, min(last, n_tiles));
}

} // namespace egi

#endif
