/* The C interface of the ragged products: checks arguments, chooses a family of kernels, decodes NF4 weights into the
 * scratch in as many turns as its size asks for, launches. */
#include <limits.h>

#include "backend/cuda/ragged_nf4.cuh"

namespace egi {
namespace ragged {
namespace {

bool is_aligned(const void *pointer) {
  return pointer && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

/* Rows of n columns that the copy engine and 16-byte accesses can reach. */
bool is_matrix(const egi_cuda_matrix &m, int64_t n) {
  return is_aligned(m.data) && m.row_stride >= n && m.row_stride % 8 == 0 && m.row_stride < (int64_t{1} << 38);
}

bool is_size(int64_t n) {
  return n > 0 && n % 8 == 0 && n <= INT_MAX - 1024;
}

bool is_nf4(const egi_ragged_product &p) {
  return p.nf4.codes != nullptr;
}

bool is_scaled(const egi_ragged_nf4 &nf4) {
  return nf4.absmax || (nf4.absmax_codes && nf4.nested_absmax && nf4.nested_map && nf4.nested_offset);
}

int64_t group_elements(const egi_ragged_product &p) {
  return static_cast<int64_t>(p.n_in) * p.n_out;
}

bool is_common_good(const int32_t *offsets, int n_groups, int64_t n_rows) {
  return offsets && n_groups > 0 && n_groups <= 1 << 20 && n_rows > 0 && n_rows <= INT_MAX - 1024;
}

/* Tiles are numbered by an int. */
bool is_countable(int64_t n_rows, int64_t n_groups, int64_t columns, int64_t more_columns) {
  return (n_rows / 64 + n_groups) * (columns / 64 + 1) <= INT_MAX / (more_columns / 64 + 1);
}

egi_cuda_status check_weights(const egi_ragged_product &p) {
  if (is_nf4(p)) {
    if (!is_aligned(p.nf4.codes) || !is_scaled(p.nf4)) return EGI_CUDA_INVALID;
    return group_elements(p) % NF4_BLOCK == 0 ? EGI_CUDA_OK : EGI_CUDA_UNSUPPORTED;
  }
  return is_aligned(p.weight) ? EGI_CUDA_OK : EGI_CUDA_INVALID;
}

/* Combinations that have a meaning: gates are forward and paired; pairs are whole and of multiples of 8. */
egi_cuda_status check_form(const egi_ragged_product &p) {
  const bool is_gated = p.activation != EGI_RAGGED_PLAIN, is_backward = p.direction == EGI_RAGGED_BACKWARD;
  if (p.direction != EGI_RAGGED_FORWARD && !is_backward) return EGI_CUDA_INVALID;
  if (p.activation < EGI_RAGGED_PLAIN || p.activation > EGI_RAGGED_CLAMPED) return EGI_CUDA_INVALID;
  if (p.pairing < EGI_RAGGED_UNPAIRED || p.pairing > EGI_RAGGED_INTERLEAVED) return EGI_CUDA_INVALID;
  if (is_gated && (is_backward || p.pairing == EGI_RAGGED_UNPAIRED)) return EGI_CUDA_INVALID;
  if (p.gate_up.data && !is_gated) return EGI_CUDA_INVALID;
  if (p.bias && p.pairing != EGI_RAGGED_UNPAIRED && is_backward) return EGI_CUDA_INVALID;
  if (p.activation == EGI_RAGGED_CLAMPED && !(p.limit > 0.0f)) return EGI_CUDA_INVALID;
  if (is_gated && p.n_out % 16 != 0) return EGI_CUDA_UNSUPPORTED;
  if (is_backward && p.pairing == EGI_RAGGED_INTERLEAVED && p.n_in % 16 != 0) return EGI_CUDA_UNSUPPORTED;
  return EGI_CUDA_OK;
}

egi_cuda_status check_product(const egi_ragged_product &p) {
  if (!is_common_good(p.offsets, p.n_groups, p.n_rows)) return EGI_CUDA_INVALID;
  if (p.dtype != EGI_CUDA_BF16 && p.dtype != EGI_CUDA_F16) return EGI_CUDA_UNSUPPORTED;
  if (!is_size(p.n_in) || !is_size(p.n_out)) return EGI_CUDA_UNSUPPORTED;
  if (!is_countable(p.n_rows, p.n_groups, p.n_out, 0)) return EGI_CUDA_UNSUPPORTED;
  const egi_cuda_status form = check_form(p);
  if (form != EGI_CUDA_OK) return form;
  const int64_t results = p.activation == EGI_RAGGED_PLAIN ? p.n_out : p.n_out / 2;
  if (!is_matrix(p.x, p.n_in) || !is_matrix(p.y, results)) return EGI_CUDA_INVALID;
  if (p.gate_up.data && !is_matrix(p.gate_up, p.n_out)) return EGI_CUDA_INVALID;
  if (p.bias && !is_aligned(p.bias)) return EGI_CUDA_INVALID;
  if (p.rank != 0) {
    if (!is_size(p.rank)) return EGI_CUDA_UNSUPPORTED;
    if (!is_matrix(p.adapter_x, p.rank) || !is_aligned(p.adapter_weight)) return EGI_CUDA_INVALID;
  }
  return check_weights(p);
}

/* Whether the Hopper kernels are to run; false with a status other than OK where neither family can. */
egi_cuda_status choose_family(egi_ragged_kernels kernels, bool &out_is_sm90) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
    return EGI_CUDA_FAILED;
  out_is_sm90 = kernels == EGI_RAGGED_SM90 || (kernels == EGI_RAGGED_AUTO && major == 9);
  if (out_is_sm90) return major == 9 ? EGI_CUDA_OK : EGI_CUDA_UNSUPPORTED;
  return major >= 8 ? EGI_CUDA_OK : EGI_CUDA_UNSUPPORTED;
}

/* The kernel decodes by itself where each row of W is whole blocks; it numbers a group's blocks by an int. */
bool can_decode_inside(const egi_ragged_product &p, bool is_sm90) {
  return is_sm90 && group_elements(p) / NF4_BLOCK <= INT_MAX - (1 << 20) &&
         (p.direction == EGI_RAGGED_BACKWARD ? p.n_out : p.n_in) % NF4_BLOCK == 0;
}

const char *skip_groups(const void *data, int64_t n_groups, int64_t elements) {
  return data ? static_cast<const char *>(data) + n_groups * elements * 2 : nullptr;
}

/* Decodes as many groups as the scratch holds and multiplies them, until all are done. Groups before and behind the
 * turn's are hidden by moving the start of everything that is counted by group. */
egi_cuda_status run_with_scratch(const egi_ragged_product &p, bool is_sm90, cudaStream_t stream) {
  const int64_t elements = group_elements(p), in_scratch = static_cast<int64_t>(p.scratch_bytes / 2) / elements;
  if (!is_aligned(p.scratch) || in_scratch < 1) return EGI_CUDA_INVALID;
  const int32_t at_once = in_scratch < p.n_groups ? static_cast<int32_t>(in_scratch) : p.n_groups;
  for (int32_t first = 0; first < p.n_groups; first += at_once) {
    egi_ragged_product part = p;
    part.n_groups = p.n_groups - first < at_once ? p.n_groups - first : at_once;
    part.offsets = p.offsets + first;
    part.weight = p.scratch;
    part.nf4.codes = nullptr;
    part.bias = skip_groups(p.bias, first, p.n_out);
    part.adapter_weight = skip_groups(p.adapter_weight, first, static_cast<int64_t>(p.n_out) * p.rank);
    egi_cuda_status status = decode_nf4({p.nf4, first, part.n_groups, elements}, p.dtype, p.scratch, stream);
    if (status == EGI_CUDA_OK) status = is_sm90 ? product_sm90(part, stream) : product_mma(part, stream);
    if (status != EGI_CUDA_OK) return status;
  }
  return EGI_CUDA_OK;
}

egi_cuda_status check_reduction(const egi_ragged_reduction &r) {
  if (!is_common_good(r.offsets, r.n_groups, r.n_rows)) return EGI_CUDA_INVALID;
  if (r.dtype != EGI_CUDA_BF16 && r.dtype != EGI_CUDA_F16) return EGI_CUDA_UNSUPPORTED;
  if (!is_size(r.n_left) || !is_size(r.n_right)) return EGI_CUDA_UNSUPPORTED;
  if (!is_countable(0, r.n_groups, r.n_left, r.n_right)) return EGI_CUDA_UNSUPPORTED;
  if (!r.out || !is_matrix(r.left, r.n_left) || !is_matrix(r.right, r.n_right)) return EGI_CUDA_INVALID;
  return EGI_CUDA_OK;
}

/* Tiles are longer on the left. */
egi_ragged_reduction turn_long_side_left(const egi_ragged_reduction &r) {
  if (r.n_left >= r.n_right) return r;
  egi_ragged_reduction turned = r;
  turned.n_left = r.n_right;
  turned.n_right = r.n_left;
  turned.left = r.right;
  turned.right = r.left;
  turned.left_stride = r.right_stride;
  turned.right_stride = r.left_stride;
  return turned;
}

} // namespace
} // namespace ragged
} // namespace egi

extern "C" size_t egi_cuda_ragged_scratch(const egi_ragged_product *product, egi_ragged_kernels kernels) {
  bool is_sm90 = false;
  if (!product || !product->nf4.codes || egi::ragged::choose_family(kernels, is_sm90) != EGI_CUDA_OK) return 0;
  if (egi::ragged::can_decode_inside(*product, is_sm90)) return 0;
  return static_cast<size_t>(egi::ragged::group_elements(*product)) * static_cast<size_t>(product->n_groups) * 2;
}

extern "C" egi_cuda_status egi_cuda_ragged_product(const egi_ragged_product *product, egi_ragged_kernels kernels,
                                                   void *stream) {
  if (!product) return EGI_CUDA_INVALID;
  egi_cuda_status status = egi::ragged::check_product(*product);
  if (status != EGI_CUDA_OK) return status;
  bool is_sm90 = false;
  status = egi::ragged::choose_family(kernels, is_sm90);
  if (status != EGI_CUDA_OK) return status;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (!egi::ragged::is_nf4(*product))
    return is_sm90 ? egi::ragged::product_sm90(*product, cuda_stream) : egi::ragged::product_mma(*product, cuda_stream);
  if (!product->scratch && egi::ragged::can_decode_inside(*product, is_sm90))
    return egi::ragged::product_nf4_sm90(*product, cuda_stream);
  return egi::ragged::run_with_scratch(*product, is_sm90, cuda_stream);
}

extern "C" egi_cuda_status egi_cuda_ragged_reduction(const egi_ragged_reduction *reduction, egi_ragged_kernels kernels,
                                                     void *stream) {
  if (!reduction) return EGI_CUDA_INVALID;
  egi_cuda_status status = egi::ragged::check_reduction(*reduction);
  if (status != EGI_CUDA_OK) return status;
  bool is_sm90 = false;
  status = egi::ragged::choose_family(kernels, is_sm90);
  if (status != EGI_CUDA_OK) return status;
  const egi_ragged_reduction turned = egi::ragged::turn_long_side_left(*reduction);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  return is_sm90 ? egi::ragged::reduction_sm90(turned, cuda_stream) : egi::ragged::reduction_mma(turned, cuda_stream);
}

extern "C" egi_cuda_status egi_cuda_ragged_decode(const egi_ragged_decoding *decoding, void *stream) {
  if (!decoding) return EGI_CUDA_INVALID;
  const egi_ragged_decoding &d = *decoding;
  if (!egi::ragged::is_aligned(d.nf4.codes) || !egi::ragged::is_scaled(d.nf4) || !egi::ragged::is_aligned(d.dst) ||
      d.group < 0 || d.n_groups < 1 || d.group_elements < 1)
    return EGI_CUDA_INVALID;
  if ((d.dtype != EGI_CUDA_BF16 && d.dtype != EGI_CUDA_F16) || d.group_elements % egi::ragged::NF4_BLOCK != 0)
    return EGI_CUDA_UNSUPPORTED;
  return egi::ragged::decode_nf4({d.nf4, d.group, d.n_groups, d.group_elements}, d.dtype, d.dst,
                                 static_cast<cudaStream_t>(stream));
}
