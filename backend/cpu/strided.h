/* Loops over several tensors of any strides: dims are put in the order of the output's memory and merged where all
 * operands allow it, then inner loops run over the last dim. Tasks are fixed numbers of elements, so that results do
 * not depend on the number of threads. */
#ifndef ENGRAFT_BACKEND_CPU_STRIDED_H
#define ENGRAFT_BACKEND_CPU_STRIDED_H

#include "backend/cpu/cpu.h"

#define EGI_STRIDED_OPERANDS 5

/* Elements of one task of a memory-bound loop: 64 KiB of f32. */
#define EGI_TASK_ELEMENTS 16384

typedef struct egi_strided {
  unsigned n_operands; /* operand 0 is the output */
  int rank;            /* after merging; at least 1 */
  int64_t count;       /* elements of the output */
  int64_t dims[EGI_MAX_RANK];
  int64_t strides[EGI_STRIDED_OPERANDS][EGI_MAX_RANK]; /* bytes; 0: broadcast */
  char *data[EGI_STRIDED_OPERANDS];
} egi_strided;

/* One run of the last dim: data[k] + i * strides[k] for i in [0, n). */
typedef void (*egi_inner)(const void *params, char *const *data, const int64_t *strides, int64_t n);

/* Starts with the output alone; its dims are those of the loop. */
void egi_strided_init(egi_strided *loop, const egi_tensor *output);
/* Adds an operand that is broadcast to the output's dims as ONNX (numpy) says. */
void egi_strided_add(egi_strided *loop, const egi_tensor *input);
/* Orders and merges dims. Call once, after the last operand. */
void egi_strided_collapse(egi_strided *loop);
/* Elements [start, end) of the loop, in the order of the collapsed dims. */
void egi_strided_range(const egi_strided *loop, int64_t start, int64_t end, egi_inner inner, const void *params);
/* All elements, `task_elements` in a task. */
void egi_strided_run(egi_pool *pool, const egi_strided *loop, int64_t task_elements, egi_inner inner,
                     const void *params);

/* ---- copies (copy.c) ------------------------------------------------------------------------------------------ */

/* Copies input, broadcast to the output's dims, to output; same type. Data may be at negative strides. A pool of NULL
 * runs in the caller's thread. Input and output either are the same view or do not overlap. */
void egi_copy(egi_pool *pool, const egi_tensor *output, const egi_tensor *input);
/* Every element becomes the one at `value`. */
void egi_fill(egi_pool *pool, const egi_tensor *output, const void *value);
/* Loop over operands (out, in) that moves elements of 1, 2, 4, 8 or 16 bytes; `params` unused. NULL for other sizes. */
egi_inner egi_copy_inner(size_t element_bytes);
/* Elements from the start of the tensor to its row `row`, counted over the first `n_dims` dims. */
int64_t egi_row_offset(const egi_tensor *tensor, int n_dims, int64_t row);
/* Product of dims [first, last). */
int64_t egi_dims_product(const egi_tensor *tensor, int first, int last);
/* Rows of `row_elements` elements that make a task. */
int64_t egi_rows_per_task(int64_t row_elements);
/* The part of `base` that Slice's inputs starts, ends, axes?, steps? (the first four of `lists`) select.
 * EG_ERROR_DATA when it has not the dims of `wanted`. */
eg_status egi_slice_view(eg_context *ctx, const egi_tensor *base, const egi_tensor *lists, unsigned n_lists,
                         const egi_tensor *wanted, egi_tensor *out_view);

/* ---- conversions (cast.c) ------------------------------------------------------------------------------------- */

/* Loop over operands (out, in) that converts; NULL when one of the types is below 8 bits, complex or text. `params` of
 * the loop: egi_cpu_isa(). Float to integer truncates and saturates, NaN gives 0; integers keep their low bits. */
egi_inner egi_cast_inner(eg_dtype to, eg_dtype from);

#endif
