/* Shared by the files of engraft.MoE: what is planned, the routing in memory, products with the experts' matrices.
 *
 * Rows are the T·k pairs of a token and one of its experts, ordered by expert, then token: stable, so that everything
 * follows from the routing alone. Numbers of x's type, f32 or f64. Nothing depends on the number of threads: tasks are
 * pieces of fixed size, sums run in fixed order. */
#ifndef ENGRAFT_BACKEND_CPU_MOE_H
#define ENGRAFT_BACKEND_CPU_MOE_H

#include "backend/cpu/cpu.h"
#include "graph/moe.h"

#define EGI_MOE_TILE 96      /* outputs of one task of a product */
#define EGI_MOE_TASK_ROWS 64 /* rows of one task of everything else */
#define EGI_MOE_PRODUCT_ROWS 512

typedef struct egi_moe_params {
  egi_moe moe;
  const egi_isa *isa;
  eg_dtype dtype;
  size_t element_bytes;
  int64_t tokens, width, n_experts, n_rows; /* T, H, E, T·k */
  int64_t inner;                            /* columns of down's operand */
  int64_t gate, hidden;                     /* rows of gate; of gate and up, which `hidden` rows hold */
  /* offsets into the workspace */
  size_t indices, weights, offsets, order, place, wide, saved, middle, change, extra, scores, scratch, copy;
  size_t scratch_bytes; /* of a worker */
  size_t total;
} egi_moe_params;

typedef struct egi_moe_run {
  const egi_moe_params *p;
  const egi_kernel_call *call;
  int32_t *indices; /* [T, k] */
  void *weights;    /* [T, k] */
  int64_t *offsets; /* [E + 1]: first row of each expert */
  int64_t *order;   /* [T·k]: pair t·k + j of each row */
  int64_t *place;   /* [T·k]: row of each pair */
  char *wide;       /* [T·k, H] */
  char *saved;      /* [T·k, hidden] */
  char *middle;     /* [T·k, inner] */
  char *change;     /* [T·k, hidden]: gradient of saved */
  char *extra;      /* [T·k, inner]: gradient of middle */
} egi_moe_run;

/* moe_plan.c */
egi_moe_run egi_moe_begin(const egi_kernel_call *call);
static inline void *egi_moe_at(const egi_moe_params *p, char *base, int64_t element) {
  return base + (size_t)element * p->element_bytes;
}
/* Element of a float operand of any type. */
double egi_moe_number(const egi_tensor *tensor, int64_t offset);

/* moe_route.c: chooses experts and weights of each token; sorts pairs; the gradient of the logits from that of the
 * weights [T, k] (in pair order). */
void egi_moe_route(const egi_moe_run *run);
void egi_moe_sort(const egi_moe_run *run);
void egi_moe_route_gradient(const egi_moe_run *run, const double *weight_gradients, const egi_tensor *out);

/* moe_weights.c */
typedef enum egi_moe_product_kind {
  EGI_MOE_FORWARD,  /* out [rows, N] = in [rows, K] · Wᵀ + b */
  EGI_MOE_BACKWARD, /* out [rows, K] = in [rows, N] · W (+ out) */
  EGI_MOE_REDUCE    /* gradient [N, K] = left [rows, N]ᵀ · in [rows, K], written to an output of the call */
} egi_moe_product_kind;
typedef struct egi_moe_product {
  egi_moe_product_kind kind;
  egi_moe_role role;
  int64_t n, k;    /* of the matrix [N, K] */
  char *in, *left; /* rows */
  int64_t in_stride, left_stride;
  char *out;
  int64_t out_stride;
  bool is_added;
} egi_moe_product;
void egi_moe_multiply(const egi_moe_run *run, const egi_moe_product *product);
/* Bytes of scratch that a worker needs. */
size_t egi_moe_scratch(const egi_moe_params *p);
/* bias gradient [N] of each expert = sum of its rows */
void egi_moe_reduce_bias(const egi_moe_run *run, egi_moe_role role, const char *rows, int64_t n, int64_t stride,
                         int64_t first);

/* moe.c: rows of a [.., H] tensor to `wide` by expert; a token's rows of `wide`, times its weights or as they are,
 * summed to a row of `out`. */
void egi_moe_gather(const egi_moe_run *run, const egi_tensor *tensor);
void egi_moe_combine(const egi_moe_run *run, const egi_tensor *out, bool is_weighted);

/* moe_glu.c: middle from saved, and change from extra (the gradient of middle, times the routing weight). */
void egi_moe_activate(const egi_moe_run *run);
void egi_moe_activate_gradient(const egi_moe_run *run);

#endif
