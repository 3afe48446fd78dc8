/* The ragged product on Hopper, dense weights: tensor maps of a call, and the choice of the kernel. */
#include "backend/cuda/ragged_product_sm90.cuh"

namespace egi {
namespace ragged {

bool make_weight_map(CUtensorMap *map, const egi_ragged_product &p, const weight_shape &shape) {
  const bool is_backward = p.direction == EGI_RAGGED_BACKWARD;
  const uint64_t halves = shape.has_halves ? 2 : 1;
  const uint64_t inner = static_cast<uint64_t>(is_backward ? p.n_out : shape.depth);
  const uint64_t rows = static_cast<uint64_t>(is_backward ? shape.depth : p.n_out);
  const bool is_interleaved = shape.has_halves && p.pairing == EGI_RAGGED_INTERLEAVED;
  /* Bytes of n elements: two each, or half a byte. */
  const auto bytes = [&shape](uint64_t n) { return shape.is_nf4 ? n / 2 : n * 2; };
  map_shape m = {};
  m.rank = 4;
  m.element_bytes = shape.is_nf4 ? 1 : 2;
  m.dims[0] = shape.is_nf4 ? inner / 2 : inner;
  m.dims[1] = rows / halves;
  m.dims[2] = halves;
  m.dims[3] = static_cast<uint64_t>(p.n_groups);
  m.strides_bytes[0] = bytes(inner * (is_interleaved ? 2 : 1));
  m.strides_bytes[1] = bytes(is_interleaved ? inner : inner * (rows / halves));
  m.strides_bytes[2] = bytes(inner * rows);
  const uint32_t columns = static_cast<uint32_t>(shape.columns);
  m.box[0] = is_backward && shape.is_nf4 ? columns / 2 : shape.is_nf4 ? 32 : 64;
  m.box[1] = is_backward ? static_cast<uint32_t>(TILE_DEPTH) : shape.has_halves ? columns / 2 : columns;
  m.box[2] = m.box[3] = 1;
  return make_map(map, shape.data, p.dtype, m);
}

/* Rows of x as [row, half, column]. */
static bool make_rows_map(CUtensorMap *map, const egi_cuda_matrix &x, int columns, bool has_halves,
                          const egi_ragged_product &p) {
  const int halves = has_halves ? 2 : 1;
  map_shape m = {};
  m.rank = 3;
  m.element_bytes = 2;
  m.dims[0] = static_cast<uint64_t>(columns / halves);
  m.dims[1] = static_cast<uint64_t>(halves);
  m.dims[2] = static_cast<uint64_t>(p.n_rows);
  m.strides_bytes[0] = m.dims[0] * 2;
  m.strides_bytes[1] = static_cast<uint64_t>(x.row_stride) * 2;
  m.box[0] = 64;
  m.box[1] = 1;
  m.box[2] = BOX_ROWS;
  return make_map(map, x.data, p.dtype, m);
}

bool prepare_call(product_call &call, const egi_ragged_product &p, int columns, bool is_nf4) {
  call.a = make_arguments(p);
  call.nf4 = p.nf4;
  const bool is_gated = p.activation != EGI_RAGGED_PLAIN, has_halves = call.a.has_halves != 0;
  call.main_runs = has_halves ? 2 : 1;
  call.steps_in_half = (p.n_in / call.main_runs + TILE_DEPTH - 1) / TILE_DEPTH;
  call.adapter_steps = (p.rank + TILE_DEPTH - 1) / TILE_DEPTH;
  call.n_runs = call.main_runs + (p.rank > 0 ? 1 : 0);
  call.steps = call.main_runs * call.steps_in_half + call.adapter_steps;
  call.column_tiles = (p.n_out + columns - 1) / columns;
  const void *weight = is_nf4 ? static_cast<const void *>(p.nf4.codes) : p.weight;
  const bool is_good = make_rows_map(&call.x, p.x, p.n_in, has_halves, p) &&
                       make_weight_map(&call.weight, p, {weight, p.n_in, columns, is_gated || has_halves, is_nf4});
  if (!is_good || p.rank == 0) return is_good;
  return make_rows_map(&call.adapter_x, p.adapter_x, p.rank, false, p) &&
         make_weight_map(&call.adapter_weight, p, {p.adapter_weight, p.rank, columns, is_gated, false});
}

template <class Element, int COLUMNS, bool IS_BACKWARD, bool IS_GATED>
static egi_cuda_status run(const egi_ragged_product &p, cudaStream_t stream) {
  product_call call = {};
  if (!prepare_call(call, p, COLUMNS, false)) return EGI_CUDA_FAILED;
  return launch_product<config<Element, COLUMNS, IS_BACKWARD, IS_GATED, false>>(call, stream);
}

template <class Element> static egi_cuda_status choose(const egi_ragged_product &p, cudaStream_t stream) {
  const bool is_narrow = p.n_out <= 128;
  if (p.direction == EGI_RAGGED_BACKWARD)
    return is_narrow ? run<Element, 64, true, false>(p, stream) : run<Element, 128, true, false>(p, stream);
  if (p.activation != EGI_RAGGED_PLAIN) return run<Element, 128, false, true>(p, stream);
  return is_narrow ? run<Element, 64, false, false>(p, stream) : run<Element, 128, false, false>(p, stream);
}

egi_cuda_status product_sm90(const egi_ragged_product &p, cudaStream_t stream) {
  return p.dtype == EGI_CUDA_BF16 ? choose<__nv_bfloat16>(p, stream) : choose<__half>(p, stream);
}

} // namespace ragged
} // namespace egi
