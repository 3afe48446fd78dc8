/* LogProbability and its gradient: the log-probability of each row's label, from logits. Rows without a label
 * (EGI_LABEL_NONE) give 0 and get no gradient. Accumulation as in the row functions (f64 over blocks); a row belongs to
 * one task, so results do not depend on the number of threads. */
#include "backend/cpu/loss.h"
#include "backend/cpu/strided.h"

#include <math.h>

void egi_row_numbers_init(egi_row_numbers *numbers, const egi_tensor *tensor) {
  egi_rows_init(&numbers->rows, tensor, tensor->rank);
  numbers->dtype = tensor->dtype;
}

double egi_row_numbers_get(const egi_row_numbers *numbers, const egi_tensor *tensor, int64_t row) {
  return egi_real_get(egi_rows_at(&numbers->rows, tensor->data, row), numbers->dtype);
}

void egi_row_numbers_set(const egi_row_numbers *numbers, const egi_tensor *tensor, int64_t row, double value) {
  egi_real_set(egi_rows_at(&numbers->rows, tensor->data, row), numbers->dtype, value);
}

int64_t egi_label_get(const egi_row_numbers *numbers, const egi_tensor *tensor, int64_t row) {
  return *(const int64_t *)egi_rows_at(&numbers->rows, tensor->data, row);
}

eg_status egi_labels_check(eg_context *ctx, const egi_row_numbers *labels, const egi_tensor *tensor,
                           int64_t n_classes) {
  for (int64_t row = 0; row < labels->rows.count; row++) {
    int64_t label = egi_label_get(labels, tensor, row);
    if (label != EGI_LABEL_NONE && (label < 0 || label >= n_classes))
      return egi_fail(ctx, EG_ERROR_DATA, "label %lld of row %lld is outside the vocabulary of %lld", (long long)label,
                      (long long)row, (long long)n_classes);
  }
  return EG_OK;
}

/* Inputs 1 to 3 of the gradient are labels, lse and d logp; outputs 0 and 1 of the forward logp and lse. */
typedef struct loss_params {
  const egi_row_functions *functions;
  bool is_gradient;
  egi_rows logits, out;
  egi_row_numbers labels, first, second;
  int64_t rows_per_task;
  size_t row_bytes;
} loss_params;

static bool is_real(eg_dtype dtype) {
  return dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64;
}

static eg_status prepare(egi_kernel_plan *plan, bool is_gradient) {
  loss_params *p = EGI_NEW(plan->arena, loss_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  const egi_tensor *logits = &plan->inputs[0], *labels = &plan->inputs[1];
  const egi_tensor *first = is_gradient ? &plan->inputs[2] : &plan->outputs[0];
  const egi_tensor *second = is_gradient ? &plan->inputs[3] : &plan->outputs[1];
  p->functions = egi_row_functions_of(logits->dtype);
  p->is_gradient = is_gradient;
  bool has_types = p->functions && labels->dtype == EG_DTYPE_I64 && is_real(first->dtype) && is_real(second->dtype);
  if (!has_types || (is_gradient && plan->outputs[0].dtype != logits->dtype)) return egi_fail_types(plan);
  if (logits->rank < 1)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "logits have no dim for the classes");
  egi_rows_init(&p->logits, logits, logits->rank - 1);
  if (is_gradient) egi_rows_init(&p->out, &plan->outputs[0], logits->rank - 1);
  egi_row_numbers_init(&p->labels, labels);
  egi_row_numbers_init(&p->first, first);
  egi_row_numbers_init(&p->second, second);
  int64_t n = p->logits.count;
  if (p->labels.rows.count != n || p->first.rows.count != n || p->second.rows.count != n)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "labels do not fit the rows of the logits");
  p->rows_per_task = egi_rows_per_task(p->logits.length);
  p->row_bytes = ((size_t)p->logits.length * p->logits.element_bytes + 63) / 64 * 64;
  plan->workspace_bytes = p->row_bytes * egi_pool_size(egi_context_pool(plan->ctx));
  plan->params = p;
  return EG_OK;
}

eg_status egi_cpu_prepare_log_probability(egi_kernel_plan *plan) {
  return prepare(plan, false);
}
eg_status egi_cpu_prepare_log_probability_grad(egi_kernel_plan *plan) {
  return prepare(plan, true);
}

/* Copies the row to contiguous elements that may be changed. */
static void copy_row(const loss_params *p, const egi_tensor *logits, int64_t row, void *buffer) {
  const void *in = egi_rows_load(&p->logits, logits, row, buffer);
  if (in != buffer) memcpy(buffer, in, (size_t)p->logits.length * p->logits.element_bytes);
}

static void forward_row(const egi_kernel_call *call, int64_t row, int64_t label, void *buffer) {
  const loss_params *p = call->params;
  double log_probability = 0, lse = 0;
  if (label != EGI_LABEL_NONE) {
    double largest_and_sum[2];
    copy_row(p, &call->inputs[0], row, buffer);
    p->functions->largest_and_sum(buffer, NULL, p->logits.length, largest_and_sum);
    lse = largest_and_sum[0] + log(largest_and_sum[1]);
    const char *at = (const char *)buffer + (size_t)label * p->logits.element_bytes;
    log_probability = egi_real_get(at, call->inputs[0].dtype) - lse;
  }
  egi_row_numbers_set(&p->first, &call->outputs[0], row, log_probability);
  egi_row_numbers_set(&p->second, &call->outputs[1], row, lse);
}

/* d logits = d logp · (one-hot - softmax). */
static void backward_row(const egi_kernel_call *call, int64_t row, int64_t label, void *buffer) {
  const loss_params *p = call->params;
  void *out = egi_rows_target(&p->out, &call->outputs[0], row, buffer);
  if (label == EGI_LABEL_NONE) {
    memset(out, 0, (size_t)p->logits.length * p->logits.element_bytes);
  } else {
    double lse = egi_row_numbers_get(&p->first, &call->inputs[2], row);
    double gradient = egi_row_numbers_get(&p->second, &call->inputs[3], row);
    const void *in = egi_rows_load(&p->logits, &call->inputs[0], row, out);
    if (in != out) memmove(out, in, (size_t)p->logits.length * p->logits.element_bytes);
    p->functions->scaled_exp(out, p->logits.length, lse, -gradient);
    char *at = (char *)out + (size_t)label * p->logits.element_bytes;
    eg_dtype dtype = call->outputs[0].dtype;
    egi_real_set(at, dtype, egi_real_get(at, dtype) + gradient);
  }
  egi_rows_store(&p->out, &call->outputs[0], row, out);
}

static void run_rows(void *argument, size_t index, size_t worker) {
  const egi_kernel_call *call = argument;
  const loss_params *p = call->params;
  char *buffer = (char *)call->workspace + worker * p->row_bytes;
  int64_t row = (int64_t)index * p->rows_per_task, end = row + p->rows_per_task;
  for (; row < end && row < p->logits.count; row++) {
    int64_t label = egi_label_get(&p->labels, &call->inputs[1], row);
    if (p->is_gradient)
      backward_row(call, row, label, buffer);
    else
      forward_row(call, row, label, buffer);
  }
}

eg_status egi_cpu_run_log_probability(eg_context *ctx, const egi_kernel_call *call) {
  const loss_params *p = call->params;
  EG_TRY(egi_labels_check(ctx, &p->labels, &call->inputs[1], p->logits.length));
  egi_kernel_call shared = *call;
  egi_pool_run(call->pool, (size_t)((p->logits.count + p->rows_per_task - 1) / p->rows_per_task), run_rows, &shared);
  return EG_OK;
}
