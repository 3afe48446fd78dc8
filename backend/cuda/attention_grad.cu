/* The operators AttentionGrad and MaskedAttentionGrad. Gradients that nobody wants are left out by the general kernels;
 * the launcher of attention.h writes them to the workspace. */
#include "backend/cuda/attention_operator.cuh"

namespace egi {
namespace {

enum { INPUT_Y = 4, INPUT_MASKED_Y = 5, INPUT_FIRST_KEY = 8 }; /* lse and dY follow Y */
enum { OUTPUT_DQ, OUTPUT_DK, OUTPUT_DV, OUTPUT_DSINKS };
enum { SUM_THREADS = 128 };

struct grad_node {
  attention_node node;
  unsigned y_input;
  size_t delta_at;
  size_t missing_at[OUTPUT_DV + 1]; /* of the fast way: results that nobody wants */
  size_t sinks_at;                  /* ... d sinks of each entry of the batch */
};

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

bool same_dims(const egi_tensor *a, const egi_tensor *b) {
  if (a->rank != b->rank) return false;
  for (int i = 0; i < a->rank; i++)
    if (a->dims[i] != b->dims[i]) return false;
  return true;
}

eg_status check_operands(egi_kernel_plan *plan, const grad_node *g) {
  const general::attention &a = g->node.shared;
  const egi_tensor *y = &plan->inputs[g->y_input], *lse = y + 1, *dy = y + 2, *q = &plan->inputs[0];
  if (y->dtype != q->dtype || dy->dtype != q->dtype || lse->dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  bool fits = same_dims(y, dy) && lse->rank == 3 && lse->dims[0] == a.n_batches && lse->dims[1] == a.q_heads &&
              lse->dims[2] == a.n_queries && y->rank == q->rank && y->dims[0] == a.n_batches;
  if (fits && y->rank == 4)
    fits = y->dims[1] == a.q_heads && y->dims[2] == a.n_queries && y->dims[3] == a.value_width;
  else if (fits)
    fits = y->dims[1] == a.n_queries && y->dims[2] == int64_t{a.q_heads} * a.value_width;
  for (unsigned i = 0; i < plan->n_outputs && fits; i++) {
    const egi_tensor *variable = &plan->inputs[i == OUTPUT_DSINKS ? 4 : i];
    if (plan->outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
    if (plan->outputs[i].dtype != variable->dtype) return egi_fail_types(plan);
    fits = same_dims(&plan->outputs[i], variable);
  }
  if (fits) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "Y, lse, dY or the results do not fit Q, K and V");
}

void read_rows(const egi_kernel_plan *plan, grad_node *g) {
  general::attention *a = &g->node.shared;
  const egi_tensor *y = &plan->inputs[g->y_input];
  general::head_rows *gradients[OUTPUT_DV + 1] = {&a->dq, &a->dk, &a->dv};
  a->y.strides = strides_of_heads(y, a->q_heads);
  a->dy.strides = strides_of_heads(y + 2, a->q_heads);
  for (int i = 0; i < 3; i++) a->lse_strides[i] = y[1].strides[i];
  for (unsigned i = 0; i <= OUTPUT_DV; i++)
    if (has_output(plan->outputs, plan->n_outputs, i))
      gradients[i]->strides = strides_of_heads(&plan->outputs[i], i == OUTPUT_DQ ? a->q_heads : a->kv_heads);
  if (has_output(plan->outputs, plan->n_outputs, OUTPUT_DSINKS))
    a->d_sink_stride = plan->outputs[OUTPUT_DSINKS].strides[0];
}

/* Decides about the fast way. Results that nobody wants get rows of their own: all heads of a row together. */
void choose_way(const egi_kernel_plan *plan, grad_node *g, workspace_room *room) {
  const general::attention &a = g->node.shared;
  const general::head_strides rows[8] = {a.q.strides,  a.k.strides,  a.v.strides,  a.y.strides,
                                         a.dy.strides, a.dq.strides, a.dk.strides, a.dv.strides};
  bool is_fast = takes_fast_way(&g->node, rows, 5);
  for (unsigned i = 0; i <= OUTPUT_DV; i++)
    if (has_output(plan->outputs, plan->n_outputs, i)) is_fast = is_fast && takes_fast_way(&g->node, rows + 5 + i, 1);
  is_fast = is_fast && (a.sink_element == ELEMENT_F32 || !egi_plan_has_input(plan, 4));
  g->node.is_fast = is_fast;
  if (!is_fast) return;
  place_fast_way(&g->node, true, room);
  g->sinks_at = room->take(int64_t{a.n_batches} * a.q_heads, sizeof(float));
  for (unsigned i = 0; i <= OUTPUT_DV; i++) {
    const int64_t columns = i == OUTPUT_DQ   ? int64_t{a.q_heads} * a.width
                            : i == OUTPUT_DK ? int64_t{a.kv_heads} * a.width
                                             : int64_t{a.kv_heads} * a.value_width;
    if (!has_output(plan->outputs, plan->n_outputs, i)) g->missing_at[i] = room->take(a.n_queries * columns, 2);
  }
}

eg_status prepare(egi_kernel_plan *plan, grad_node *g, unsigned y_input) {
  workspace_room room = {0, true};
  const general::attention &a = g->node.shared;
  g->y_input = y_input;
  EG_TRY(check_operands(plan, g));
  read_rows(plan, g);
  choose_way(plan, g, &room);
  g->node.bounds_at = room.take(general::count_tiles(a.n_queries) * a.n_batches, sizeof(int2));
  g->delta_at = room.take(int64_t{a.n_batches} * a.q_heads * a.n_queries, sizeof(float));
  plan->params = g;
  return ask_for_room(plan, room);
}

/* ---- run -------------------------------------------------------------------------------------------------------- */

/* parts [entries, heads] in order of the entries. */
__global__ void __launch_bounds__(SUM_THREADS)
    attention_add_sinks(const float *parts, int n_entries, int n_heads, float *out, int64_t stride) {
  const int head = static_cast<int>(blockIdx.x * SUM_THREADS + threadIdx.x);
  if (head >= n_heads) return;
  float sum = 0.0f;
  for (int i = 0; i < n_entries; i++) sum += parts[static_cast<int64_t>(i) * n_heads + head];
  out[head * stride] = sum;
}

/* Where entry `batch` of a gradient goes. */
egi_cuda_rows gradient_rows(const grad_node *g, const egi_kernel_call *call, const general::attention &a, unsigned i,
                            int batch) {
  const general::head_rows rows[3] = {a.dq, a.dk, a.dv};
  if (rows[i].data) return rows_of_entry(rows[i], batch, g->node.element);
  const int64_t heads = i == OUTPUT_DQ ? a.q_heads : a.kv_heads, width = i == OUTPUT_DV ? a.value_width : a.width;
  return {workspace_start(call) + g->missing_at[i], heads * width, width};
}

eg_status run_fast_way(eg_context *ctx, const grad_node *g, const egi_kernel_call *call, const general::attention &a) {
  egi_cuda_attention fast;
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  float *sinks = reinterpret_cast<float *>(workspace_start(call) + g->sinks_at);
  EG_TRY(begin_fast_way(ctx, &g->node, call, a, &fast));
  for (int batch = 0; batch < a.n_batches; batch++) {
    fast.q = rows_of_entry(a.q, batch, g->node.element);
    fast.k = rows_of_entry(a.k, batch, g->node.element);
    fast.v = rows_of_entry(a.v, batch, g->node.element);
    fast.out = rows_of_entry(a.y, batch, g->node.element);
    fast.d_out = rows_of_entry(a.dy, batch, g->node.element);
    fast.lse = a.lse + batch * a.lse_strides[0];
    fast.d_q = gradient_rows(g, call, a, OUTPUT_DQ, batch);
    fast.d_k = gradient_rows(g, call, a, OUTPUT_DK, batch);
    fast.d_v = gradient_rows(g, call, a, OUTPUT_DV, batch);
    fast.d_sinks = a.d_sinks ? sinks + static_cast<int64_t>(batch) * a.q_heads : nullptr;
    EG_TRY(check_launch(ctx, egi_cuda_attention_backward(&fast, EGI_ATTENTION_AUTO, stream), "attention backward"));
  }
  if (!a.d_sinks) return EG_OK;
  const unsigned n_blocks = (static_cast<unsigned>(a.q_heads) + SUM_THREADS - 1) / SUM_THREADS;
  attention_add_sinks<<<n_blocks, SUM_THREADS, 0, stream>>>(sinks, a.n_batches, a.q_heads,
                                                            static_cast<float *>(a.d_sinks), a.d_sink_stride);
  return egi_cuda_launched(ctx, "attention_add_sinks");
}

bool has_fast_addresses(const grad_node *g, const general::attention &a) {
  const general::head_rows rows[8] = {a.q, a.k, a.v, a.y, a.dy, a.dq, a.dk, a.dv};
  for (const general::head_rows &r : rows)
    if (r.data && !is_fast_address(r, 0, g->node.element)) return false;
  return true;
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_attention_grad(egi_kernel_plan *plan) {
  egi::grad_node *g = EGI_NEW(plan->arena, egi::grad_node, 1);
  if (!g) return EG_ERROR_MEMORY;
  EG_TRY(egi::read_attention(plan, &g->node));
  return egi::prepare(plan, g, egi::INPUT_Y);
}

extern "C" eg_status egi_cuda_prepare_masked_attention_grad(egi_kernel_plan *plan) {
  egi::grad_node *g = EGI_NEW(plan->arena, egi::grad_node, 1);
  if (!g) return EG_ERROR_MEMORY;
  EG_TRY(egi::read_masked_attention(plan, egi::INPUT_FIRST_KEY, &g->node));
  return egi::prepare(plan, g, egi::INPUT_MASKED_Y);
}

extern "C" eg_status egi_cuda_run_attention_grad(eg_context *ctx, const egi_kernel_call *call) {
  const egi::grad_node *g = static_cast<const egi::grad_node *>(call->params);
  cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  egi::general::attention a;
  egi::begin_attention(&g->node, call, &a);
  a.y.data = call->inputs[g->y_input].data;
  a.lse = static_cast<float *>(call->inputs[g->y_input + 1].data);
  a.dy.data = call->inputs[g->y_input + 2].data;
  a.delta = reinterpret_cast<float *>(egi::workspace_start(call) + g->delta_at);
  egi::general::head_rows *gradients[3] = {&a.dq, &a.dk, &a.dv};
  for (unsigned i = 0; i <= egi::OUTPUT_DV; i++)
    if (egi::has_output(call->outputs, call->n_outputs, i)) gradients[i]->data = call->outputs[i].data;
  if (egi::has_output(call->outputs, call->n_outputs, egi::OUTPUT_DSINKS))
    a.d_sinks = call->outputs[egi::OUTPUT_DSINKS].data;
  if (g->node.is_fast && egi::has_fast_addresses(g, a)) return egi::run_fast_way(ctx, g, call, a);
  EGI_CUDA_TRY(ctx, egi::find_attention_bounds(a, stream));
  EGI_CUDA_TRY(ctx, egi::attention_backward_general(a, g->node.element, stream));
  return EG_OK;
}
