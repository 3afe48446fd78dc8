/* The operators Attention and MaskedAttention. Keys and values with a past are copied one after the other, into the
 * outputs for them or the workspace, before a kernel reads them. */
#include "backend/cuda/attention_operator.cuh"

namespace egi {
namespace {

enum { OUTPUT_Y, OUTPUT_KEY, OUTPUT_VALUE, OUTPUT_SCORES, OUTPUT_LSE };
enum { OUTPUT_MASKED_LSE = 1 };
enum { INPUT_PAST_KEY = 4, INPUT_PAST_VALUE, INPUT_LENGTHS };
enum { COPY_THREADS = 256, COPY_BLOCKS = 4096 };

struct forward_node {
  attention_node node;
  unsigned lse_output;
  bool copies_present;
  bool has_present[2];   /* keys, values: an output keeps them */
  size_t present_at[2];  /* else their place in the workspace */
  egi_tensor present[2]; /* [batch, kv heads, keys, width] */
  general::head_strides added[2];
  int output_mode; /* of qk_matmul_output; -1: not wanted */
};

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

bool has_dims(const egi_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return t->rank == 4 && t->dims[0] == a && t->dims[1] == b && t->dims[2] == c && t->dims[3] == d;
}

eg_status read_past(egi_kernel_plan *plan, attention_node *node) {
  const bool has_key = egi_plan_has_input(plan, INPUT_PAST_KEY), has_value = egi_plan_has_input(plan, INPUT_PAST_VALUE);
  if (has_key != has_value || (has_key && egi_plan_has_input(plan, INPUT_LENGTHS)))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE,
                         "past_key and past_value come together, and without nonpad_kv_seqlen");
  if (has_key && plan->inputs[INPUT_PAST_KEY].rank != 4)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "past_key must have 4 dims");
  if (has_key) node->n_past = plan->inputs[INPUT_PAST_KEY].dims[2];
  return EG_OK;
}

eg_status check_past(egi_kernel_plan *plan, attention_node *node) {
  general::attention *a = &node->shared;
  const eg_dtype dtype = plan->inputs[0].dtype;
  bool fits = true;
  if (egi_plan_has_input(plan, INPUT_PAST_KEY)) {
    const egi_tensor *key = &plan->inputs[INPUT_PAST_KEY], *value = &plan->inputs[INPUT_PAST_VALUE];
    fits = has_dims(key, a->n_batches, a->kv_heads, node->n_past, a->width) &&
           has_dims(value, a->n_batches, a->kv_heads, node->n_past, a->value_width) && key->dtype == dtype &&
           value->dtype == dtype;
  }
  if (egi_plan_has_input(plan, INPUT_LENGTHS)) {
    const egi_tensor *lengths = &plan->inputs[INPUT_LENGTHS];
    fits = fits && lengths->dtype == EG_DTYPE_I64 && lengths->rank == 1 && lengths->dims[0] == a->n_batches;
    a->lengths_stride = lengths->strides[0];
  }
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "past or nonpad_kv_seqlen do not fit Q, K and V");
}

eg_status check_outputs(egi_kernel_plan *plan, forward_node *f) {
  for (unsigned i = 0; i < plan->n_outputs; i++) {
    const eg_dtype dtype = plan->outputs[i].dtype;
    const eg_dtype wanted = i == f->lse_output ? EG_DTYPE_F32 : plan->inputs[0].dtype;
    if (dtype != EG_DTYPE_UNDEFINED && dtype != wanted) return egi_fail_types(plan);
  }
  if (!has_output(plan->outputs, plan->n_outputs, OUTPUT_Y)) return egi_fail_types(plan);
  f->node.shared.y.strides = strides_of_heads(&plan->outputs[OUTPUT_Y], f->node.shared.q_heads);
  if (has_output(plan->outputs, plan->n_outputs, f->lse_output))
    for (int i = 0; i < 3; i++) f->node.shared.lse_strides[i] = plan->outputs[f->lse_output].strides[i];
  return EG_OK;
}

/* Where keys and values with the past lie. */
void place_present(const egi_kernel_plan *plan, forward_node *f, workspace_room *room) {
  general::attention *a = &f->node.shared;
  for (unsigned i = 0; i < 2; i++) {
    f->has_present[i] = has_output(plan->outputs, plan->n_outputs, OUTPUT_KEY + i);
    f->copies_present = f->copies_present || f->has_present[i];
  }
  f->copies_present = f->copies_present || f->node.n_past > 0;
  for (unsigned i = 0; i < 2 && f->copies_present; i++) {
    egi_tensor *present = &f->present[i];
    const int width = i == 0 ? a->width : a->value_width;
    f->added[i] = i == 0 ? a->k.strides : a->v.strides;
    if (f->has_present[i]) {
      *present = plan->outputs[OUTPUT_KEY + i];
    } else {
      *present = egi_tensor{nullptr, plan->inputs[0].dtype, 4, {a->n_batches, a->kv_heads, a->n_keys, width}, {0}};
      egi_tensor_set_contiguous(present);
      f->present_at[i] = room->take(egi_tensor_count(present), bytes_of(f->node.element));
    }
    (i == 0 ? a->k : a->v).strides = strides_of_heads(present, a->kv_heads);
  }
}

void place_bounds(attention_node *node, workspace_room *room) {
  const general::attention &a = node->shared;
  node->bounds_at = room->take(general::count_tiles(a.n_queries) * a.n_batches, sizeof(int2));
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

/* Rows of [batch, heads, rows, columns], of elements of 2 or 4 bytes. */
struct copy_job {
  general::head_rows src, dst;
  int64_t dims[4];
  int is_wide;
};

__global__ void __launch_bounds__(COPY_THREADS) attention_copy(const copy_job job) {
  const int64_t count = job.dims[0] * job.dims[1] * job.dims[2] * job.dims[3];
  const general::head_strides &from = job.src.strides, &to = job.dst.strides;
  for (int64_t i = blockIdx.x * int64_t{COPY_THREADS} + threadIdx.x; i < count; i += gridDim.x * COPY_THREADS) {
    int64_t rest = i;
    const int64_t column = rest % job.dims[3];
    rest /= job.dims[3];
    const int64_t row = rest % job.dims[2];
    rest /= job.dims[2];
    const int64_t head = rest % job.dims[1], batch = rest / job.dims[1];
    const int64_t source = batch * from.batch + head * from.head + row * from.row + column * from.column;
    const int64_t target = batch * to.batch + head * to.head + row * to.row + column * to.column;
    if (job.is_wide)
      static_cast<uint32_t *>(job.dst.data)[target] = static_cast<const uint32_t *>(job.src.data)[source];
    else
      static_cast<uint16_t *>(job.dst.data)[target] = static_cast<const uint16_t *>(job.src.data)[source];
  }
}

eg_status copy_rows(eg_context *ctx, const egi_kernel_call *call, const copy_job &job) {
  const int64_t count = job.dims[0] * job.dims[1] * job.dims[2] * job.dims[3];
  const int64_t n_blocks = (count + COPY_THREADS - 1) / COPY_THREADS;
  if (count == 0) return EG_OK;
  attention_copy<<<static_cast<unsigned>(n_blocks < COPY_BLOCKS ? n_blocks : COPY_BLOCKS), COPY_THREADS, 0,
                   egi_cuda_stream_of(call)->stream>>>(job);
  return egi_cuda_launched(ctx, "attention_copy");
}

/* Past and new keys or values, one after the other. */
eg_status copy_present(eg_context *ctx, const forward_node *f, const egi_kernel_call *call, unsigned which,
                       void *present) {
  const general::attention &a = f->node.shared;
  const general::head_strides to = which == 0 ? a.k.strides : a.v.strides;
  copy_job job = {{nullptr, {}}, {present, to}, {}, f->node.element == ELEMENT_F32};
  job.dims[0] = a.n_batches;
  job.dims[1] = a.kv_heads;
  job.dims[2] = f->node.n_past;
  job.dims[3] = which == 0 ? a.width : a.value_width;
  if (f->node.n_past > 0) {
    const egi_tensor *past = &call->inputs[INPUT_PAST_KEY + which];
    job.src = {past->data, strides_of_heads(past, a.kv_heads)};
    EG_TRY(copy_rows(ctx, call, job));
  }
  const int64_t offset = f->node.n_past * to.row * static_cast<int64_t>(bytes_of(f->node.element));
  job.src = {call->inputs[1 + which].data, f->added[which]};
  job.dst.data = static_cast<char *>(present) + offset;
  job.dims[2] = a.n_keys - f->node.n_past;
  return copy_rows(ctx, call, job);
}

eg_status run_fast_way(eg_context *ctx, const forward_node *f, const egi_kernel_call *call,
                       const general::attention &shared) {
  egi_cuda_attention fast;
  EG_TRY(begin_fast_way(ctx, &f->node, call, shared, &fast));
  for (int batch = 0; batch < shared.n_batches; batch++) {
    fast.q = rows_of_entry(shared.q, batch, f->node.element);
    fast.k = rows_of_entry(shared.k, batch, f->node.element);
    fast.v = rows_of_entry(shared.v, batch, f->node.element);
    fast.out = rows_of_entry(shared.y, batch, f->node.element);
    fast.lse = shared.lse + batch * shared.lse_strides[0];
    EG_TRY(check_launch(ctx, egi_cuda_attention_forward(&fast, EGI_ATTENTION_AUTO, egi_cuda_stream_of(call)->stream),
                        "attention forward"));
  }
  return EG_OK;
}

bool has_fast_addresses(const forward_node *f, const general::attention &a) {
  const general::head_rows rows[4] = {a.q, a.k, a.v, a.y};
  for (const general::head_rows &r : rows)
    if (!is_fast_address(r, 0, f->node.element)) return false;
  return true;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_attention(egi_kernel_plan *plan) {
  egi::forward_node *f = EGI_NEW(plan->arena, egi::forward_node, 1);
  egi::workspace_room room = {0, true};
  if (!f) return EG_ERROR_MEMORY;
  f->lse_output = egi::OUTPUT_LSE;
  f->output_mode = -1;
  EG_TRY(egi::read_past(plan, &f->node));
  EG_TRY(egi::read_attention(plan, &f->node));
  EG_TRY(egi::check_past(plan, &f->node));
  EG_TRY(egi::check_outputs(plan, f));
  if (egi::has_output(plan->outputs, plan->n_outputs, egi::OUTPUT_SCORES))
    f->output_mode = static_cast<int>(egi_node_int(egi_plan_node(plan), "qk_matmul_output_mode", 0));
  egi::place_present(plan, f, &room);
  egi::place_bounds(&f->node, &room);
  plan->params = f;
  return egi::ask_for_room(plan, room);
}

extern "C" eg_status egi_cuda_prepare_masked_attention(egi_kernel_plan *plan) {
  egi::forward_node *f = EGI_NEW(plan->arena, egi::forward_node, 1);
  egi::workspace_room room = {0, true};
  if (!f) return EG_ERROR_MEMORY;
  f->lse_output = egi::OUTPUT_MASKED_LSE;
  f->output_mode = -1;
  EG_TRY(egi::read_masked_attention(plan, egi::MASKED_FIRST_KEY, &f->node));
  EG_TRY(egi::check_outputs(plan, f));
  const egi::general::attention &a = f->node.shared;
  const egi::general::head_strides rows[4] = {a.q.strides, a.k.strides, a.v.strides, a.y.strides};
  f->node.is_fast =
      egi::has_output(plan->outputs, plan->n_outputs, f->lse_output) && egi::takes_fast_way(&f->node, rows, 4);
  if (f->node.is_fast) egi::place_fast_way(&f->node, false, &room);
  egi::place_bounds(&f->node, &room);
  plan->params = f;
  return egi::ask_for_room(plan, room);
}

extern "C" eg_status egi_cuda_run_attention(eg_context *ctx, const egi_kernel_call *call) {
  const egi::forward_node *f = static_cast<const egi::forward_node *>(call->params);
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  egi::general::attention a;
  egi::begin_attention(&f->node, call, &a);
  a.y.data = call->outputs[egi::OUTPUT_Y].data;
  if (egi::has_output(call->outputs, call->n_outputs, f->lse_output))
    a.lse = static_cast<float *>(call->outputs[f->lse_output].data);
  if (!f->node.is_masked && egi_call_has_input(call, egi::INPUT_LENGTHS))
    a.lengths = static_cast<const int64_t *>(call->inputs[egi::INPUT_LENGTHS].data);
  for (unsigned i = 0; i < 2 && f->copies_present; i++) {
    void *present =
        f->has_present[i] ? call->outputs[egi::OUTPUT_KEY + i].data : egi::workspace_start(call) + f->present_at[i];
    EG_TRY(egi::copy_present(ctx, f, call, i, present));
    (i == 0 ? a.k : a.v).data = present;
  }
  if (f->node.is_fast && egi::has_fast_addresses(f, a)) return egi::run_fast_way(ctx, f, call, a);
  EGI_CUDA_TRY(ctx, egi::find_attention_bounds(a, stream));
  EGI_CUDA_TRY(ctx, egi::attention_forward_general(a, f->node.element, stream));
  if (f->output_mode < 0) return EG_OK;
  const egi_tensor *scores = &call->outputs[egi::OUTPUT_SCORES];
  const egi::general::head_rows out = {
      scores->data, {scores->strides[0], scores->strides[1], scores->strides[2], scores->strides[3]}};
  EGI_CUDA_TRY(ctx, egi::attention_scores_general(a, f->node.element, f->output_mode, out, stream));
  return EG_OK;
}
