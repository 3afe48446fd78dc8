/* Dropout (operator version 22) where nothing is dropped: without training_mode, or with a ratio of 0. Anything else
 * would draw numbers that no seed of ours fixes, and is refused. */
#include "backend/cpu/narrow.h"
#include "backend/cpu/strided.h"

static bool has_truth(const egi_tensor *tensor) {
  return *(const uint8_t *)tensor->data != 0;
}

static double ratio_of(const egi_tensor *inputs, unsigned n_inputs) {
  if (n_inputs < 2 || inputs[1].dtype == EG_DTYPE_UNDEFINED) return 0.5;
  return egi_number_get(inputs[1].data, inputs[1].dtype, 0);
}

eg_status egi_cpu_prepare_dropout(egi_kernel_plan *plan) {
  for (unsigned i = 1; i < plan->n_inputs; i++)
    if (egi_plan_has_input(plan, i) && egi_tensor_count(&plan->inputs[i]) != 1) return egi_fail_types(plan);
  if (egi_element_bytes(plan->inputs[0].dtype) == 0) return egi_fail_types(plan);
  bool is_training = egi_plan_has_input(plan, 2) && plan->inputs[2].data != NULL && has_truth(&plan->inputs[2]);
  bool is_known = is_training && (!egi_plan_has_input(plan, 1) || plan->inputs[1].data != NULL);
  if (is_known && !(ratio_of(plan->inputs, plan->n_inputs) <= 0.0))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "dropout in training mode is not supported");
  return EG_OK;
}

eg_status egi_cpu_run_dropout(eg_context *ctx, const egi_kernel_call *call) {
  bool is_training = egi_call_has_input(call, 2) && has_truth(&call->inputs[2]);
  double ratio = ratio_of(call->inputs, call->n_inputs);
  static const uint8_t truth = 1;
  if (is_training && !(ratio <= 0.0))
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "dropout with a ratio of %g in training mode is not supported", ratio);
  egi_copy(call->pool, &call->outputs[0], &call->inputs[0]);
  if (call->n_outputs > 1 && call->outputs[1].dtype != EG_DTYPE_UNDEFINED)
    egi_fill(call->pool, &call->outputs[1], &truth);
  return EG_OK;
}
