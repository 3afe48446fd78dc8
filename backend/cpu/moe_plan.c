/* Planning engraft.MoE and its gradient: types, sizes and where everything lies in the workspace. */
#include "backend/cpu/moe.h"

#include "backend/cpu/narrow.h"

double egi_moe_number(const egi_tensor *tensor, int64_t offset) {
  return egi_float_get(tensor, offset);
}

/* ---- sizes ---------------------------------------------------------------------------------------------------- */

static bool place(egi_moe_params *p, int64_t count, size_t element_bytes, size_t *out_offset) {
  size_t bytes = 0;
  *out_offset = p->total;
  return egi_size_multiply((size_t)count, element_bytes, &bytes) && egi_size_add(bytes, 63, &bytes) &&
         egi_size_add(p->total, bytes / 64 * 64, &p->total);
}

static bool place_rows(egi_moe_params *p, int64_t columns, size_t *out_offset) {
  size_t count = 0;
  return egi_size_multiply((size_t)p->n_rows, (size_t)columns, &count) &&
         place(p, (int64_t)count, p->element_bytes, out_offset);
}

static eg_status place_all(egi_kernel_plan *plan, egi_moe_params *p, bool is_gradient) {
  size_t workers = egi_pool_size(egi_context_pool(plan->ctx));
  p->scratch_bytes = egi_moe_scratch(p);
  bool is_sound = place(p, p->n_rows, sizeof(int32_t), &p->indices) && place_rows(p, 1, &p->weights) &&
                  place(p, p->n_experts + 1, sizeof(int64_t), &p->offsets) &&
                  place(p, p->n_rows, sizeof(int64_t), &p->order) && place(p, p->n_rows, sizeof(int64_t), &p->place) &&
                  place_rows(p, p->width, &p->wide) && place_rows(p, p->inner, &p->middle) &&
                  place(p, 4 * p->n_experts * (int64_t)workers, sizeof(double), &p->scores) &&
                  place(p, (int64_t)workers, p->scratch_bytes, &p->scratch);
  if (is_sound && !is_gradient) is_sound = place_rows(p, p->hidden, &p->saved);
  if (is_sound && is_gradient)
    is_sound = place_rows(p, p->hidden, &p->change) && place_rows(p, p->inner, &p->extra) &&
               place(p, p->n_rows, sizeof(double), &p->saved);
  if (is_sound && is_gradient && !egi_tensor_is_contiguous(&plan->inputs[p->moe.n_inputs + EGI_MOE_HIDDEN]))
    is_sound = place_rows(p, p->hidden, &p->copy);
  if (!is_sound) return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->workspace_bytes = p->total;
  plan->params = p;
  return EG_OK;
}

static bool is_weight_type(const egi_moe_params *p, const egi_tensor *t) {
  bool is_narrow = t->dtype == EG_DTYPE_F16 || t->dtype == EG_DTYPE_BF16;
  return t->dtype == p->dtype || (is_narrow && p->dtype == EG_DTYPE_F32);
}

static bool takes_types(const egi_kernel_plan *plan, const egi_moe_params *p) {
  const egi_moe *moe = &p->moe;
  if (p->dtype != EG_DTYPE_F32 && p->dtype != EG_DTYPE_F64) return false;
  if (plan->inputs[EGI_MOE_LOGITS].dtype != p->dtype) return false;
  for (unsigned i = EGI_MOE_FIRST_ROLE; i < moe->n_inputs; i++) {
    bool is_matrix = false, is_zeros = false;
    for (unsigned role = 0; role < EGI_MOE_ROLES; role++) {
      if (i < moe->first[role] || i >= moe->first[role] + moe->counts[role]) continue;
      is_matrix = role < EGI_MOE_GATE_SCALES && role % 2 == 0;
      is_zeros = role >= EGI_MOE_GATE_SCALES && role % 2 == 1;
    }
    bool is_packed = is_zeros || (is_matrix && moe->is_quantised);
    if (is_packed ? plan->inputs[i].dtype != EG_DTYPE_U8 : !is_weight_type(p, &plan->inputs[i])) return false;
  }
  return true;
}

static int64_t matrix_rows(const egi_kernel_plan *plan, const egi_moe *moe, egi_moe_role role) {
  const egi_tensor *t = &plan->inputs[moe->first[role]];
  return t->dims[t->rank - (moe->is_transposed[role / 2] ? 1 : 2)];
}

static eg_status prepare(egi_kernel_plan *plan, bool is_gradient) {
  const egi_tensor *x = &plan->inputs[EGI_MOE_X], *logits = &plan->inputs[EGI_MOE_LOGITS];
  egi_moe_params *p = EGI_NEW(plan->arena, egi_moe_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  p->isa = egi_cpu_isa();
  p->dtype = x->dtype;
  p->element_bytes = egi_element_bytes(x->dtype);
  p->width = x->dims[x->rank - 1];
  p->n_experts = logits->dims[logits->rank - 1];
  p->tokens = 1;
  for (int i = 0; i + 1 < x->rank; i++) p->tokens *= x->dims[i];
  EG_TRY(egi_moe_read(plan->graph, plan->node, &p->moe));
  if (!takes_types(plan, p)) return egi_fail_types(plan);
  p->n_rows = p->tokens * p->moe.top_k;
  p->gate = matrix_rows(plan, &p->moe, EGI_MOE_GATE);
  p->hidden = p->moe.form == EGI_MOE_SEPARATE ? 2 * p->gate : p->gate;
  p->inner = p->moe.form == EGI_MOE_UNGATED ? p->gate : p->hidden / 2;
  return place_all(plan, p, is_gradient);
}

eg_status egi_cpu_prepare_moe(egi_kernel_plan *plan) {
  return prepare(plan, false);
}

eg_status egi_cpu_prepare_moe_grad(egi_kernel_plan *plan) {
  return prepare(plan, true);
}

egi_moe_run egi_moe_begin(const egi_kernel_call *call) {
  const egi_moe_params *p = call->params;
  char *base = call->workspace;
  return (egi_moe_run){.p = p,
                       .call = call,
                       .indices = (int32_t *)(void *)(base + p->indices),
                       .weights = base + p->weights,
                       .offsets = (int64_t *)(void *)(base + p->offsets),
                       .order = (int64_t *)(void *)(base + p->order),
                       .place = (int64_t *)(void *)(base + p->place),
                       .wide = base + p->wide,
                       .saved = base + p->saved,
                       .middle = base + p->middle,
                       .change = base + p->change,
                       .extra = base + p->extra};
}
