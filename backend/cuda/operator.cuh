/* Small helpers of the operators of attention and of experts: operands that are there, their types, room in the
 * workspace. */
#ifndef ENGRAFT_BACKEND_CUDA_OPERATOR_CUH
#define ENGRAFT_BACKEND_CUDA_OPERATOR_CUH

#include "backend/cuda/cuda.h"
#include "backend/cuda/element.cuh"

namespace egi {

enum { PIECE_ALIGNMENT = 256 };

inline bool has_output(const egi_tensor *outputs, unsigned n_outputs, unsigned i) {
  return i < n_outputs && outputs[i].dtype != EG_DTYPE_UNDEFINED;
}

inline element_kind element_of(eg_dtype dtype) {
  switch (dtype) {
  case EG_DTYPE_F32:
    return ELEMENT_F32;
  case EG_DTYPE_BF16:
    return ELEMENT_BF16;
  case EG_DTYPE_F16:
    return ELEMENT_F16;
  default:
    return ELEMENT_NONE;
  }
}

inline size_t bytes_of(element_kind element) {
  return element == ELEMENT_F32 ? 4 : 2;
}

/* The launchers of attention.h and ragged.h need tensor cores for both types of 16 bits. */
inline bool has_launchers() {
  return egi_cuda_get_limits().compute_capability >= 80;
}

inline bool is_aligned_to(const void *pointer, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

/* Pieces of a workspace, one after the other; `is_sound` is false from an overflow on. */
struct workspace_room {
  size_t total;
  bool is_sound;

  size_t take(int64_t count, size_t element_bytes) {
    size_t bytes = 0, at = total;
    is_sound = is_sound && count >= 0 && egi_size_multiply(static_cast<size_t>(count), element_bytes, &bytes) &&
               egi_size_add(bytes, PIECE_ALIGNMENT - 1, &bytes) &&
               egi_size_add(total, bytes / PIECE_ALIGNMENT * PIECE_ALIGNMENT, &total);
    return at;
  }
};

/* The planner aligns a workspace less than pieces are: ask for this much, and start at `workspace_start`. */
inline eg_status ask_for_room(egi_kernel_plan *plan, const workspace_room &room) {
  if (room.is_sound && egi_size_add(room.total, room.total > 0 ? PIECE_ALIGNMENT : 0, &plan->workspace_bytes))
    return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
}

inline char *workspace_start(const egi_kernel_call *call) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(call->workspace);
  return reinterpret_cast<char *>((address + PIECE_ALIGNMENT - 1) / PIECE_ALIGNMENT * PIECE_ALIGNMENT);
}

} // namespace egi

#endif
