/* ScatterND. Updates are applied in order, one after the other: of equal indices the last wins, sums have a fixed
 * order. */
#include "backend/cpu/elementwise.h"
#include "backend/cpu/index.h"

typedef struct scatter_params {
  const egi_isa *isa;
  egi_inner join; /* operands (out, out, update); NULL: copy */
  const void *join_params;
  egi_inner copy;
} scatter_params;

static eg_status choose_join(egi_kernel_plan *plan, scatter_params *p) {
  const char *reduction = egi_node_string(egi_plan_node(plan), "reduction", "none");
  static const struct {
    const char *name;
    egi_op op;
  } methods[] = {{"add", EGI_OP_Add}, {"mul", EGI_OP_Mul}, {"max", EGI_OP_Max}, {"min", EGI_OP_Min}};
  if (strcmp(reduction, "none") == 0) return EG_OK;
  for (size_t i = 0; i < EGI_COUNT(methods); i++) {
    if (strcmp(reduction, methods[i].name) != 0) continue;
    p->join = egi_binary_inner(methods[i].op, plan->inputs[0].dtype, plan->arena, &p->join_params);
    return p->join != NULL ? EG_OK : egi_fail_types(plan);
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown reduction \"%s\"", reduction);
}

eg_status egi_cpu_prepare_scatter_nd(egi_kernel_plan *plan) {
  scatter_params *p = EGI_NEW(plan->arena, scatter_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  const egi_tensor *data = &plan->inputs[0], *updates = &plan->inputs[2];
  p->isa = egi_cpu_isa();
  p->copy = egi_copy_inner(egi_element_bytes(data->dtype));
  if (p->copy == NULL || updates->dtype != data->dtype || plan->outputs[0].dtype != data->dtype ||
      !egi_is_index_type(plan->inputs[1].dtype)) {
    return egi_fail_types(plan);
  }
  egi_tuples tuples;
  if (!egi_tuples_init(&tuples, data, &plan->inputs[1], 0) ||
      egi_tensor_count(updates) != tuples.per_batch * tuples.slice) {
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "updates do not fit data and indices");
  }
  return choose_join(plan, p);
}

eg_status egi_cpu_run_scatter_nd(eg_context *ctx, const egi_kernel_call *call) {
  const scatter_params *p = call->params;
  const egi_tensor *output = &call->outputs[0], *indices = &call->inputs[1];
  int64_t bytes = (int64_t)egi_element_bytes(output->dtype);
  egi_tuples tuples;
  if (!egi_tuples_init(&tuples, output, indices, 0)) return EG_ERROR_INTERNAL;
  EG_TRY(egi_tuples_check(ctx, "ScatterND", &tuples, indices));
  egi_copy(call->pool, output, &call->inputs[0]);
  const int64_t strides[3] = {bytes, bytes, bytes};
  for (int64_t row = 0; row < tuples.per_batch && tuples.slice > 0; row++) {
    char *target = (char *)output->data + egi_tuples_offset(&tuples, indices, row) * bytes;
    char *update = (char *)call->inputs[2].data + row * tuples.slice * bytes;
    char *const joined[3] = {target, target, update};
    char *const copied[2] = {target, update};
    if (p->join != NULL) {
      p->join(p->join_params, joined, strides, tuples.slice);
    } else {
      p->copy(NULL, copied, strides, tuples.slice);
    }
  }
  return EG_OK;
}
