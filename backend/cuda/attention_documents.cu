/* The fast way of attention operators: causal attention without a mask of keys, over documents that follow each other,
 * goes to the launcher of attention.h, an entry of the batch at a time. Windows are said by first_key and last_query
 * too: one small kernel makes these where they are not the operands. */
#include "backend/cuda/attention_operator.cuh"

namespace egi {
namespace {

enum { THREADS = 256 };

struct visibility {
  const int32_t *first_key, *last_query; /* NULL: one document */
  int64_t first_key_stride, last_query_stride;
  const int32_t *positions;      /* of the queries in a cache, or NULL: then there are as many keys */
  int n_queries, n_keys, window; /* 0: none */
  int32_t *out_first_key, *out_last_query;
};

__global__ void __launch_bounds__(THREADS) attention_visibility(const visibility v) {
  const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
  const int offset = v.positions ? *v.positions : 0;
  if (i < v.n_queries) {
    int first = v.first_key ? v.first_key[i * v.first_key_stride] : 0;
    if (v.window > 0) first = max(first, i + offset - v.window + 1);
    v.out_first_key[i] = first;
  }
  if (i < v.n_keys) {
    int64_t last = v.first_key ? v.last_query[i * v.last_query_stride] : v.n_queries - 1;
    if (v.window > 0) last = min(last, static_cast<int64_t>(i) - offset + v.window - 1);
    v.out_last_query[i] = static_cast<int>(last);
  }
}

bool has_fast_sizes(int width, int value_width) {
  if (width == 192) return value_width == 128;
  return width == value_width && (width == 64 || width == 80 || width == 96 || width == 128 || width == 256);
}

bool has_fast_strides(const general::head_strides &s) {
  return s.column == 1 && s.row % 8 == 0 && s.head % 8 == 0 && s.batch % 8 == 0 && s.row >= 0 && s.head >= 0;
}

/* The operands say by themselves what the launcher reads. */
bool has_own_visibility(const attention_node *node) {
  const general::attention &a = node->shared;
  return node->first_key_input != 0 && a.left < 0 && a.first_key_stride == 1 && a.last_query_stride == 1;
}

} // namespace

bool takes_fast_way(const attention_node *node, const general::head_strides *rows, unsigned n_rows) {
  const general::attention &a = node->shared;
  const bool has_sinks = a.sink_element != ELEMENT_F32 || a.sink_stride > 1; /* of another form than the launcher's */
  if (!has_launchers() || !node->is_masked || node->element == ELEMENT_F32 || !a.is_causal ||
      a.mask_form != general::MASK_NONE || has_sinks)
    return false;
  if (a.n_queries < 1 || a.n_queries > a.n_keys || a.n_batches < 1 || !(a.scale > 0.0f) ||
      !has_fast_sizes(a.width, a.value_width))
    return false;
  if (a.lse_strides[2] != 1 || a.lse_strides[1] != a.n_queries) return false;
  for (unsigned i = 0; i < n_rows; i++)
    if (!has_fast_strides(rows[i])) return false;
  /* The launcher's own limits. */
  return (a.n_queries / 64 + 4) * int64_t{a.q_heads} <= INT32_MAX && a.q_heads <= 65535 &&
         a.n_keys <= (1 << 30) - 256 && (2 * int64_t{a.n_keys} / 64 + 4) * a.kv_heads <= INT32_MAX;
}

void place_fast_way(attention_node *node, bool is_backward, workspace_room *room) {
  const general::attention &a = node->shared;
  egi_cuda_attention *f = &node->fast;
  f->n_queries = a.n_queries;
  f->n_keys = a.n_keys;
  f->n_heads = a.q_heads;
  f->n_kv_heads = a.kv_heads;
  f->head_dim = a.width;
  f->value_dim = a.value_width;
  f->dtype = node->element == ELEMENT_BF16 ? EGI_CUDA_BF16 : EGI_CUDA_F16;
  f->scale = a.scale;
  f->softcap = a.softcap;
  node->first_key_at = room->take(a.n_queries, sizeof(int32_t));
  node->last_query_at = room->take(a.n_keys, sizeof(int32_t));
  f->workspace_bytes = egi_cuda_attention_workspace(f, EGI_ATTENTION_AUTO, is_backward);
  node->fast_at = room->take(static_cast<int64_t>(f->workspace_bytes), 1);
}

void begin_attention(const attention_node *node, const egi_kernel_call *call, general::attention *out) {
  *out = node->shared;
  out->q.data = call->inputs[0].data;
  out->k.data = call->inputs[1].data;
  out->v.data = call->inputs[2].data;
  if (out->mask_form != general::MASK_NONE) out->mask.data = call->inputs[3].data;
  if (node->is_masked && egi_call_has_input(call, 4)) out->sinks = call->inputs[4].data;
  if (node->first_key_input != 0) {
    out->first_key = static_cast<const int32_t *>(call->inputs[node->first_key_input].data);
    out->last_query = static_cast<const int32_t *>(call->inputs[node->first_key_input + 1].data);
  }
  if (node->positions_input != 0)
    out->positions = static_cast<const int32_t *>(call->inputs[node->positions_input].data);
  out->bounds = reinterpret_cast<int2 *>(workspace_start(call) + node->bounds_at);
}

eg_status begin_fast_way(eg_context *ctx, const attention_node *node, const egi_kernel_call *call,
                         const general::attention &shared, egi_cuda_attention *out) {
  char *workspace = workspace_start(call);
  *out = node->fast;
  out->workspace = workspace + node->fast_at;
  out->sinks = static_cast<const float *>(shared.sinks);
  out->first_key = shared.first_key;
  out->last_query = shared.last_query;
  if (has_own_visibility(node)) return EG_OK;
  out->query_offset_device = shared.positions;
  visibility v = {};
  v.first_key = shared.first_key;
  v.last_query = shared.last_query;
  v.first_key_stride = shared.first_key_stride;
  v.last_query_stride = shared.last_query_stride;
  v.positions = shared.positions;
  v.n_queries = shared.n_queries;
  v.n_keys = shared.n_keys;
  v.window = shared.left + 1;
  v.out_first_key = reinterpret_cast<int32_t *>(workspace + node->first_key_at);
  v.out_last_query = reinterpret_cast<int32_t *>(workspace + node->last_query_at);
  out->first_key = v.out_first_key;
  out->last_query = v.out_last_query;
  const int n_rows = v.n_queries > v.n_keys ? v.n_queries : v.n_keys;
  const unsigned n_blocks = (static_cast<unsigned>(n_rows) + THREADS - 1) / THREADS;
  attention_visibility<<<n_blocks, THREADS, 0, egi_cuda_stream_of(call)->stream>>>(v);
  return egi_cuda_launched(ctx, "attention_visibility");
}

bool is_fast_address(const general::head_rows &rows, int batch, element_kind element) {
  return is_aligned_to(rows_of_entry(rows, batch, element).data, 16);
}

egi_cuda_rows rows_of_entry(const general::head_rows &rows, int batch, element_kind element) {
  const int64_t offset = batch * rows.strides.batch * static_cast<int64_t>(bytes_of(element));
  return {static_cast<char *>(rows.data) + offset, rows.strides.row, rows.strides.head};
}

eg_status check_launch(eg_context *ctx, egi_cuda_status status, const char *name) {
  if (status == EGI_CUDA_OK) return EG_OK;
  if (status == EGI_CUDA_FAILED) return egi_cuda_launched(ctx, name);
  return egi_fail(ctx, EG_ERROR_DEVICE, "%s refuses its arguments (%d)", name, static_cast<int>(status));
}

} // namespace egi
