/* PackedMetadata: first key, last query and position of each row of documents that lie one after the other, in one walk
 * over the documents, and the bounds of each block of rows. Whole numbers: exact, in one thread. */
#include "backend/cpu/cpu.h"

enum { OUTPUT_FIRST, OUTPUT_LAST, OUTPUT_POSITION, OUTPUT_BOUNDS, OUTPUT_COUNT };

typedef struct packed_params {
  int64_t n_documents, n_rows, block, n_blocks;
  bool is_read_back;
} packed_params;

static bool is_numbers(const egi_tensor *tensor) {
  return tensor->dtype == EG_DTYPE_I32 && tensor->rank == 1;
}

static bool has_bounds(unsigned n_outputs, const egi_tensor *outputs) {
  return n_outputs > OUTPUT_BOUNDS && outputs[OUTPUT_BOUNDS].dtype != EG_DTYPE_UNDEFINED;
}

eg_status egi_cpu_prepare_packed_metadata(egi_kernel_plan *plan) {
  packed_params *p = EGI_NEW(plan->arena, packed_params, 1);
  const egi_tensor *offsets = &plan->inputs[0], *rows = &plan->inputs[1];
  if (p == NULL) return EG_ERROR_MEMORY;
  if (!is_numbers(offsets) || plan->n_outputs > OUTPUT_COUNT) return egi_fail_types(plan);
  p->n_documents = offsets->dims[0] - 1;
  p->n_rows = rows->rank > 0 ? rows->dims[rows->rank - 1] : -1;
  p->is_read_back = egi_node_int(egi_plan_node(plan), "readback", 0) != 0;
  p->block = egi_node_int(egi_plan_node(plan), "block", EGI_BLOCK_ROWS);
  bool fits = p->n_documents >= 0 && p->n_rows >= 0 && p->n_rows <= INT32_MAX && p->block > 0;
  if (fits) p->n_blocks = (p->n_rows + p->block - 1) / p->block;
  if (has_bounds(plan->n_outputs, plan->outputs)) {
    const egi_tensor *bounds = &plan->outputs[OUTPUT_BOUNDS];
    if (bounds->dtype != EG_DTYPE_I32) return egi_fail_types(plan);
    fits = fits && bounds->rank == 2 && bounds->dims[0] == p->n_blocks && bounds->dims[1] == 2;
  }
  for (unsigned i = 0; i < plan->n_outputs && i < OUTPUT_BOUNDS && fits; i++) {
    if (plan->outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
    if (!is_numbers(&plan->outputs[i])) return egi_fail_types(plan);
    fits = plan->outputs[i].dims[0] == p->n_rows;
  }
  if (!fits)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "cu_seqlens or the results do not fit the rows");
  plan->workspace_bytes = p->is_read_back ? OUTPUT_BOUNDS * (size_t)p->n_rows * sizeof(int32_t) : 0;
  plan->params = p;
  return EG_OK;
}

static int32_t *number_at(const egi_tensor *tensor, int64_t index) {
  return (int32_t *)tensor->data + index * tensor->strides[0];
}

/* Rows [first, end) are one document: blocks that begin in it have their first row there, those that end in it their
 * last. */
static void write_bounds(const packed_params *p, const egi_tensor *out, int64_t first, int64_t end) {
  int32_t *data = out->data;
  for (int64_t i = first / p->block; i < p->n_blocks && i * p->block < end; i++) {
    int64_t last_row = (i + 1) * p->block < p->n_rows ? (i + 1) * p->block - 1 : p->n_rows - 1;
    if (i * p->block >= first) data[i * out->strides[0]] = (int32_t)first;
    if (last_row >= first && last_row < end) data[i * out->strides[0] + out->strides[1]] = (int32_t)(end - 1);
  }
}

static void write_document(const egi_kernel_call *call, int64_t first, int64_t end) {
  if (has_bounds(call->n_outputs, call->outputs)) write_bounds(call->params, &call->outputs[OUTPUT_BOUNDS], first, end);
  for (unsigned i = 0; i < call->n_outputs && i < OUTPUT_BOUNDS; i++) {
    const egi_tensor *out = &call->outputs[i];
    if (out->dtype == EG_DTYPE_UNDEFINED) continue;
    for (int64_t row = first; row < end; row++)
      *number_at(out, row) = (int32_t)(i == OUTPUT_FIRST ? first : i == OUTPUT_LAST ? end - 1 : row - first);
  }
}

/* What a host would have for itself: the results once more, in memory of the call. */
static void read_back(const packed_params *p, const egi_kernel_call *call) {
  int32_t *copy = call->workspace;
  for (unsigned i = 0; i < call->n_outputs && i < OUTPUT_BOUNDS; i++)
    for (int64_t row = 0; row < p->n_rows && call->outputs[i].dtype != EG_DTYPE_UNDEFINED; row++)
      copy[i * p->n_rows + row] = *number_at(&call->outputs[i], row);
}

eg_status egi_cpu_run_packed_metadata(eg_context *ctx, const egi_kernel_call *call) {
  const packed_params *p = call->params;
  const egi_tensor *offsets = &call->inputs[0];
  int64_t end = 0;
  bool is_right = *number_at(offsets, 0) == 0;
  for (int64_t i = 0; i < p->n_documents && is_right; i++) {
    int64_t first = end;
    end = *number_at(offsets, i + 1);
    is_right = end <= p->n_rows && (end > first || end == p->n_rows);
    if (is_right) write_document(call, first, end);
  }
  if (!is_right || end != p->n_rows)
    return egi_fail(ctx, EG_ERROR_DATA, "cu_seqlens does not begin with 0 and grow to the %lld rows",
                    (long long)p->n_rows);
  if (p->is_read_back) read_back(p, call);
  return EG_OK;
}
