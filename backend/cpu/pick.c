/* OneHot, EyeLike, BitCast, ReverseSequence and ScatterElements. Scattered updates are applied in the order of the
 * indices' elements by one thread: of equal indices the last wins, sums have a fixed order. */
#include "backend/cpu/elementwise.h"
#include "backend/cpu/index.h"

typedef struct pick_params {
  const egi_isa *isa;
  int axis;
  int64_t diagonal;
  egi_inner load; /* OneHot: indices to i64 */
  egi_inner copy;
  egi_inner join; /* ScatterElements: operands (out, out, update); NULL: copy */
  const void *join_params;
  char one[8]; /* EyeLike: the number in the output's type */
} pick_params;

static pick_params *new_params(egi_kernel_plan *plan) {
  pick_params *p = EGI_NEW(plan->arena, pick_params, 1);
  if (p == NULL) return NULL;
  plan->params = p;
  p->isa = egi_cpu_isa();
  p->copy = egi_copy_inner(egi_element_bytes(plan->outputs[0].dtype));
  return p;
}

static eg_status read_axis(egi_kernel_plan *plan, pick_params *p, int64_t axis, int rank) {
  if (egi_normalise_axis(axis, rank, &p->axis)) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "axis %lld of a tensor of rank %d", (long long)axis,
                       rank);
}

/* ---- OneHot ----------------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_one_hot(egi_kernel_plan *plan) {
  pick_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *out = &plan->outputs[0];
  p->load = egi_cast_inner(EG_DTYPE_I64, plan->inputs[0].dtype);
  if (p->load == NULL || p->copy == NULL || plan->inputs[2].dtype != out->dtype) return egi_fail_types(plan);
  return read_axis(plan, p, egi_node_int(egi_plan_node(plan), "axis", -1), out->rank);
}

/* values: [off, on]. An index outside [-depth, depth) sets nothing. */
eg_status egi_cpu_run_one_hot(eg_context *ctx, const egi_kernel_call *call) {
  const pick_params *p = call->params;
  const egi_tensor *indices = &call->inputs[0], *values = &call->inputs[2], *out = &call->outputs[0];
  int64_t bytes = (int64_t)egi_element_bytes(out->dtype), depth = out->dims[p->axis];
  int64_t index_bytes = (int64_t)egi_element_bytes(indices->dtype),
          inner = egi_dims_product(out, p->axis + 1, out->rank);
  if (egi_tensor_count(values) != 2) return egi_fail(ctx, EG_ERROR_DATA, "OneHot: values are not two numbers");
  egi_fill(call->pool, out, values->data);
  for (int64_t i = 0; i < egi_tensor_count(indices); i++) {
    int64_t index;
    char *const operands[2] = {(char *)&index, (char *)indices->data + i * index_bytes};
    const int64_t strides[2] = {sizeof index, index_bytes};
    p->load(p->isa, operands, strides, 1);
    if (index < 0) index += depth;
    if (index < 0 || index >= depth) continue;
    int64_t at = (i / inner * depth + index) * inner + i % inner;
    memcpy((char *)out->data + at * bytes, (const char *)values->data + bytes, (size_t)bytes);
  }
  return EG_OK;
}

/* ---- EyeLike ---------------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_eye_like(egi_kernel_plan *plan) {
  pick_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  egi_inner store = egi_cast_inner(plan->outputs[0].dtype, EG_DTYPE_I64);
  if (store == NULL || p->copy == NULL || plan->outputs[0].rank != 2) return egi_fail_types(plan);
  int64_t one = 1;
  char *const operands[2] = {p->one, (char *)&one};
  const int64_t strides[2] = {(int64_t)egi_element_bytes(plan->outputs[0].dtype), sizeof one};
  store(p->isa, operands, strides, 1);
  p->diagonal = egi_node_int(egi_plan_node(plan), "k", 0);
  return EG_OK;
}

eg_status egi_cpu_run_eye_like(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  const pick_params *p = call->params;
  const egi_tensor *out = &call->outputs[0];
  int64_t bytes = (int64_t)egi_element_bytes(out->dtype);
  static const char zero[16];
  egi_fill(call->pool, out, zero);
  for (int64_t row = 0; row < out->dims[0]; row++) {
    if (p->diagonal < -row || p->diagonal >= out->dims[1] - row) continue;
    memcpy((char *)out->data + (row * out->dims[1] + row + p->diagonal) * bytes, p->one, (size_t)bytes);
  }
  return EG_OK;
}

/* ---- BitCast ---------------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_bit_cast(egi_kernel_plan *plan) {
  unsigned bits = egi_dtype_bits(plan->inputs[0].dtype);
  return bits >= 8 && bits == egi_dtype_bits(plan->outputs[0].dtype) ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_run_bit_cast(eg_context *ctx, const egi_kernel_call *call) {
  (void)ctx;
  egi_tensor same = call->inputs[0];
  same.dtype = call->outputs[0].dtype;
  egi_copy(call->pool, &call->outputs[0], &same);
  return EG_OK;
}

/* ---- ReverseSequence -------------------------------------------------------------------------------------------- */

eg_status egi_cpu_prepare_reverse_sequence(egi_kernel_plan *plan) {
  pick_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  bool is_known = p->copy != NULL && plan->outputs[0].dtype == plan->inputs[0].dtype;
  if (!is_known || plan->inputs[1].dtype != EG_DTYPE_I64) return egi_fail_types(plan);
  return read_axis(plan, p, egi_node_int(egi_plan_node(plan), "time_axis", 0), plan->inputs[0].rank);
}

/* Time and batch are the first two dims, in either order. The first `length` steps of a batch entry turn round. */
eg_status egi_cpu_run_reverse_sequence(eg_context *ctx, const egi_kernel_call *call) {
  const pick_params *p = call->params;
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0], *lengths = &call->inputs[1];
  int time = p->axis, batch = 1 - time;
  int64_t bytes = (int64_t)egi_element_bytes(in->dtype);
  for (int64_t b = 0; b < in->dims[batch]; b++) {
    int64_t length = egi_index_at(lengths, b);
    if (length < 0 || length > in->dims[time])
      return egi_fail(ctx, EG_ERROR_DATA, "ReverseSequence: length %lld of %lld steps", (long long)length,
                      (long long)in->dims[time]);
    for (int64_t t = 0; t < in->dims[time]; t++) {
      int64_t from = t < length ? length - 1 - t : t;
      egi_tensor source = *in, target = *out;
      source.dims[0] = source.dims[1] = target.dims[0] = target.dims[1] = 1;
      source.data = (char *)in->data + (b * in->strides[batch] + from * in->strides[time]) * bytes;
      target.data = (char *)out->data + (b * out->strides[batch] + t * out->strides[time]) * bytes;
      egi_copy(NULL, &target, &source);
    }
  }
  return EG_OK;
}

/* ---- ScatterElements -------------------------------------------------------------------------------------------- */

static eg_status choose_join(egi_kernel_plan *plan, pick_params *p) {
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

eg_status egi_cpu_prepare_scatter_elements(egi_kernel_plan *plan) {
  pick_params *p = new_params(plan);
  if (p == NULL) return EG_ERROR_MEMORY;
  const egi_tensor *data = &plan->inputs[0], *indices = &plan->inputs[1], *updates = &plan->inputs[2];
  if (p->copy == NULL || updates->dtype != data->dtype || plan->outputs[0].dtype != data->dtype ||
      !egi_is_index_type(indices->dtype))
    return egi_fail_types(plan);
  EG_TRY(read_axis(plan, p, egi_node_int(egi_plan_node(plan), "axis", 0), data->rank));
  bool fits = indices->rank == data->rank && updates->rank == data->rank;
  for (int i = 0; fits && i < data->rank; i++)
    fits = updates->dims[i] == indices->dims[i] && (i == p->axis || indices->dims[i] <= data->dims[i]);
  if (!fits) return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "updates do not fit data and indices");
  return choose_join(plan, p);
}

/* Data, updates and output are contiguous; data may be the output. */
eg_status egi_cpu_run_scatter_elements(eg_context *ctx, const egi_kernel_call *call) {
  const pick_params *p = call->params;
  const egi_tensor *out = &call->outputs[0], *indices = &call->inputs[1];
  int64_t bytes = (int64_t)egi_element_bytes(out->dtype), size = out->dims[p->axis];
  const int64_t strides[3] = {bytes, bytes, bytes};
  EG_TRY(egi_check_indices(ctx, "ScatterElements", indices, size));
  egi_copy(call->pool, out, &call->inputs[0]);
  for (int64_t i = 0; i < egi_tensor_count(indices); i++) {
    int64_t index = egi_index_at(indices, i), rest = i, offset = 0;
    for (int d = indices->rank - 1; d >= 0; d--) {
      int64_t position = rest % indices->dims[d];
      if (d == p->axis) position = index < 0 ? index + size : index;
      offset += position * out->strides[d];
      rest /= indices->dims[d];
    }
    char *target = (char *)out->data + offset * bytes, *update = (char *)call->inputs[2].data + i * bytes;
    char *const joined[3] = {target, target, update};
    char *const copied[2] = {target, update};
    if (p->join != NULL) {
      p->join(p->join_params, joined, strides, 1);
    } else {
      p->copy(NULL, copied, strides, 1);
    }
  }
  return EG_OK;
}
