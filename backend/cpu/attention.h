/* What Attention, MaskedAttention and their gradients share: sizes and strides of the heads, which keys a query sees,
 * tiles of the mask.
 */
#ifndef ENGRAFT_BACKEND_CPU_ATTENTION_H
#define ENGRAFT_BACKEND_CPU_ATTENTION_H

#include "backend/cpu/cpu.h"

#define EGI_TILE_QUERIES ((int64_t)64)
#define EGI_TILE_KEYS ((int64_t)384)

/* Strides, in elements, of an operand seen as [batch, heads, rows, columns]. */
typedef struct egi_heads {
  int64_t batch, head, row, column;
} egi_heads;

/* Inputs of MaskedAttention. */
enum { EGI_MASKED_FIRST_KEY = 5, EGI_MASKED_POSITIONS = 8 };

typedef struct egi_attention {
  const egi_isa *isa;
  const egi_row_functions *functions;
  eg_dtype dtype;
  size_t bytes; /* of an element */
  int64_t n_batches, q_heads, kv_heads, n_queries, n_keys, n_past, width, value_width;
  double scale, softcap;
  bool is_causal, has_lengths, has_mask, has_sinks;
  unsigned first_key_input;   /* last_query follows; 0: no documents */
  unsigned bounds_input;      /* of blocks of EGI_TILE_QUERIES queries; 0: none */
  unsigned positions_input;   /* of the queries, in a cache; 0: none */
  int64_t left, right;        /* window; -1: none */
  egi_heads q, k, v, y, mask; /* k and v: of the present ones when there is a past */
  int64_t mask_columns;       /* keys beyond it are hidden */
  size_t bias_bytes;          /* of one mask tile */
  size_t scratch_bytes;       /* of products */
} egi_attention;

/* One head's view of the tensors of a call. */
typedef struct egi_attention_head {
  egi_matrix q, k, v;
  int64_t batch, q_head;
  int64_t length;                        /* keys of this batch entry: nonpad_kv_seqlen, or all */
  int64_t offset;                        /* position of query 0 among the keys */
  const int32_t *first_key, *last_query; /* of each query, these strides apart; NULL: no documents */
  int64_t first_key_stride, last_query_stride;
  const int32_t *bounds; /* of each block, first and last key; NULL: none */
  int64_t bounds_strides[2];
} egi_attention_head;

typedef struct egi_key_range {
  int64_t first, last; /* [first, last) */
} egi_key_range;

typedef enum egi_mask_state {
  EGI_MASK_HIDDEN, /* no query of the tile sees a key of it */
  EGI_MASK_NONE,   /* the mask changes nothing */
  EGI_MASK_BIAS    /* the bias was written */
} egi_mask_state;

/* Sizes, attributes, types of Q, K, V and mask (inputs 0 to 3); fails as prepare does. */
eg_status egi_attention_read(egi_kernel_plan *plan, egi_attention *out_attention);
/* The same for MaskedAttention: key_valid (input 3) is a mask that all heads and queries share; sinks are input 4;
 * first_key, when there, input `first_key`. */
eg_status egi_masked_attention_read(egi_kernel_plan *plan, unsigned first_key, egi_attention *out_attention);
/* The sink of a query head, -inf where there is none. */
double egi_attention_sink(const egi_attention *a, const egi_kernel_call *call, int64_t q_head);
/* [batch, heads, rows, columns], or [batch, rows, heads · columns] taken apart. */
egi_heads egi_attention_heads(const egi_tensor *tensor, int64_t n_heads);
/* Rows and columns of one head. */
egi_matrix egi_attention_matrix(const egi_attention *a, void *data, const egi_heads *heads, int64_t batch,
                                int64_t head);
/* Keys that a query sees, mask aside; both ends grow with the query. */
egi_key_range egi_attention_range(const egi_attention *a, const egi_attention_head *head, int64_t query);
/* Keys that some query of [query, query + n) sees. */
egi_key_range egi_attention_tile_range(const egi_attention *a, const egi_attention_head *head, int64_t query,
                                       int64_t n);
/* The mask over the tile at[query, key] of size[queries, keys] as numbers to add, row-major in `bias`. The tile gets
 * smaller where keys at its ends are hidden from all of its queries. */
egi_mask_state egi_attention_mask(const egi_attention *a, const egi_attention_head *head, const egi_tensor *mask,
                                  int64_t at[2], int64_t size[2], void *bias);
/* Scores scale · Q · K' of a tile, row-major, size[1] columns apart. */
void egi_attention_scores(const egi_attention *a, const egi_attention_head *head, const int64_t at[2],
                          const int64_t size[2], void *scores, void *scratch);
/* The row of a tile that query at[0] + row has, with the keys it sees. */
egi_score_row egi_attention_row(const egi_attention *a, const egi_attention_head *head, const int64_t at[2],
                                const int64_t size[2], int64_t row, void *scores, const void *bias);

/* The output qk_matmul_output, in attention_scores.c: whole rows of scores, on request only. */
size_t egi_attention_output_bytes(const egi_attention *a); /* workspace of one worker */
void egi_attention_output(const egi_attention *a, const egi_kernel_call *call, int64_t mode, char *workspace,
                          const egi_tensor *key);
/* The head `index` of [batch, q_heads] in a call of the forward operator. */
egi_attention_head egi_attention_head_at(const egi_attention *a, const egi_kernel_call *call, int64_t index, void *key,
                                         void *value);

#endif
