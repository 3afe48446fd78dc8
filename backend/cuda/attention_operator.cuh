/* What the operators Attention, MaskedAttention and their gradients share: what a plan keeps of a node. */
#ifndef ENGRAFT_BACKEND_CUDA_ATTENTION_OPERATOR_CUH
#define ENGRAFT_BACKEND_CUDA_ATTENTION_OPERATOR_CUH

#include "backend/cuda/attention.h"
#include "backend/cuda/attention_general.cuh"
#include "backend/cuda/operator.cuh"

namespace egi {

/* Inputs of MaskedAttention. */
enum { MASKED_FIRST_KEY = 5, MASKED_POSITIONS = 8 };

/* Pointers in `shared` and `fast` stay NULL until a call. */
struct attention_node {
  general::attention shared;
  element_kind element;
  int64_t n_past;
  bool is_masked;           /* MaskedAttention or its gradient */
  unsigned first_key_input; /* last_query follows; 0: no documents */
  unsigned positions_input; /* of the queries, in a cache; 0: none */
  int64_t window;           /* of MaskedAttention; 0: none */
  bool is_fast;             /* the tensor-core kernels for documents take these shapes, where addresses are aligned */
  egi_cuda_attention fast;
  size_t first_key_at, last_query_at, fast_at; /* workspace of the fast way: visibility, what the launcher needs */
  size_t bounds_at;                            /* ... of the general one */
};

/* Sizes, attributes, types and strides of Q, K, V and the mask (inputs 0 to 3). */
eg_status read_attention(egi_kernel_plan *plan, attention_node *out_node);
/* The same of MaskedAttention: key_valid is input 3, sinks input 4, first_key input `first_key`. */
eg_status read_masked_attention(egi_kernel_plan *plan, unsigned first_key, attention_node *out_node);
/* [batch, heads, rows, columns], or [batch, rows, heads * columns] taken apart. */
general::head_strides strides_of_heads(const egi_tensor *tensor, int64_t n_heads);

/* Whether the launcher of attention.h takes the node; sets `fast`, but for the addresses, if so. `rows`: all of the
 * operands that it has rows of. */
bool takes_fast_way(const attention_node *node, const general::head_strides *rows, unsigned n_rows);
/* Workspace of the fast way; `is_backward` decides. */
void place_fast_way(attention_node *node, bool is_backward, workspace_room *room);
/* Fills what both ways read of a call: q, k, v, masks, sinks, documents, bounds. */
void begin_attention(const attention_node *node, const egi_kernel_call *call, general::attention *out);
/* One entry of the batch for the launcher, its visibility made where it is not the operands' own. */
eg_status begin_fast_way(eg_context *ctx, const attention_node *node, const egi_kernel_call *call,
                         const general::attention &shared, egi_cuda_attention *out);
/* Whether 16 bytes can be read at a time from an entry of these rows. */
bool is_fast_address(const general::head_rows &rows, int batch, element_kind element);
/* Entry `batch` of the operand as rows for the launcher. */
egi_cuda_rows rows_of_entry(const general::head_rows &rows, int batch, element_kind element);
eg_status check_launch(eg_context *ctx, egi_cuda_status status, const char *name);

} // namespace egi

#endif
