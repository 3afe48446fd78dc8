/* RotaryEmbedding (ONNX 23): the first `rotary` elements of each head's row are turned by the angles of its position.
 * A task takes a fixed number of (batch, position) pairs with all their heads; elementwise, so deterministic. */
#include "backend/cpu/strided.h"

typedef struct rotary_params {
  const egi_row_functions *functions;
  eg_dtype dtype;
  bool is_interleaved, has_positions;
  int64_t batch, heads, sequence, head_size, half; /* half of the rotated part */
  int64_t x_strides[4], out_strides[4];            /* batch, head, position, element */
  int64_t cos_strides[3], sin_strides[3];          /* batch or cache row, position, element */
  int64_t position_strides[2], n_cached;
  int64_t pairs_per_task;
  size_t buffer_bytes; /* of a worker: x, out, cos, sin */
} rotary_params;

static void head_strides(const egi_tensor *tensor, int64_t head_size, int64_t strides[4]) {
  bool has_heads = tensor->rank == 4;
  int last = tensor->rank - 1;
  strides[0] = tensor->strides[0];
  strides[1] = has_heads ? tensor->strides[1] : head_size * tensor->strides[last];
  strides[2] = has_heads ? tensor->strides[2] : tensor->strides[1];
  strides[3] = tensor->strides[last];
}

/* cos and sin: [cached, half] with position ids, [batch, sequence, half] without. */
static bool cache_strides(rotary_params *p, const egi_tensor *cache, int64_t strides[3]) {
  if (cache->rank != (p->has_positions ? 2 : 3)) return false;
  int last = cache->rank - 1;
  if (cache->dims[last] != p->half) return false;
  strides[2] = cache->strides[last];
  if (p->has_positions) {
    strides[0] = cache->strides[0];
    if (p->n_cached > cache->dims[0]) p->n_cached = cache->dims[0];
    return true;
  }
  if (cache->dims[0] != 1 && cache->dims[0] != p->batch) return false;
  if (cache->dims[1] != 1 && cache->dims[1] != p->sequence) return false;
  strides[0] = cache->dims[0] == 1 ? 0 : cache->strides[0];
  strides[1] = cache->dims[1] == 1 ? 0 : cache->strides[1];
  return true;
}

static eg_status set_sizes(egi_kernel_plan *plan, rotary_params *p) {
  const egi_tensor *x = &plan->inputs[0];
  const egi_node *node = egi_plan_node(plan);
  int64_t heads = egi_node_int(node, "num_heads", 0), rotary = egi_node_int(node, "rotary_embedding_dim", 0);
  bool is_valid = x->rank == 4 || (x->rank == 3 && heads > 0 && x->dims[2] % heads == 0);
  if (!is_valid)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE,
                         "X must have 4 dims, or 3 and num_heads that divides the last");
  p->batch = x->dims[0];
  p->heads = x->rank == 4 ? x->dims[1] : heads;
  p->sequence = x->dims[x->rank - 2];
  p->head_size = x->rank == 4 ? x->dims[3] : x->dims[2] / heads;
  if (rotary == 0) rotary = p->head_size;
  if (rotary < 0 || rotary > p->head_size || rotary % 2 != 0)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%lld elements of a head of %lld cannot be rotated",
                         (long long)rotary, (long long)p->head_size);
  p->half = rotary / 2;
  return EG_OK;
}

eg_status egi_cpu_prepare_rotary(egi_kernel_plan *plan) {
  rotary_params *p = EGI_NEW(plan->arena, rotary_params, 1);
  if (!p) return EG_ERROR_MEMORY;
  const egi_tensor *x = &plan->inputs[0], *cosine = &plan->inputs[1], *sine = &plan->inputs[2];
  p->dtype = x->dtype;
  p->functions = egi_row_functions_of(x->dtype);
  p->is_interleaved = egi_node_int(egi_plan_node(plan), "interleaved", 0) != 0;
  p->has_positions = egi_plan_has_input(plan, 3);
  if (!p->functions || cosine->dtype != x->dtype || sine->dtype != x->dtype || plan->outputs[0].dtype != x->dtype)
    return egi_fail_types(plan);
  EG_TRY(set_sizes(plan, p));
  head_strides(x, p->head_size, p->x_strides);
  head_strides(&plan->outputs[0], p->head_size, p->out_strides);
  p->n_cached = INT64_MAX;
  bool fits = cache_strides(p, cosine, p->cos_strides) && cache_strides(p, sine, p->sin_strides);
  if (p->has_positions) {
    const egi_tensor *positions = &plan->inputs[3];
    if (positions->dtype != EG_DTYPE_I64) return egi_fail_types(plan);
    fits = fits && positions->rank == 2 && (positions->dims[0] == p->batch || positions->dims[0] == 1) &&
           positions->dims[1] == p->sequence;
    p->position_strides[0] = positions->dims[0] == 1 ? 0 : positions->strides[0];
    p->position_strides[1] = positions->strides[1];
  }
  if (!fits)
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "shapes of X, cos, sin and positions do not agree");
  p->pairs_per_task = egi_rows_per_task(p->heads * p->head_size);
  p->buffer_bytes = ((size_t)(p->head_size * 4) * egi_element_bytes(p->dtype) + 63) / 64 * 64;
  plan->workspace_bytes = p->buffer_bytes * egi_pool_size(egi_context_pool(plan->ctx));
  plan->params = p;
  return EG_OK;
}

static void copy_strided(eg_dtype dtype, void *out, int64_t out_stride, const void *in, int64_t in_stride, int64_t n) {
  if (dtype == EG_DTYPE_F64)
    for (int64_t i = 0; i < n; i++) ((double *)out)[i * out_stride] = ((const double *)in)[i * in_stride];
  else
    for (int64_t i = 0; i < n; i++) ((float *)out)[i * out_stride] = ((const float *)in)[i * in_stride];
}

/* n elements `stride` apart: where they are, or packed to `buffer`. */
static const void *load_line(eg_dtype dtype, const void *in, int64_t stride, int64_t n, void *buffer) {
  if (stride == 1 || n == 1) return in;
  copy_strided(dtype, buffer, 1, in, stride, n);
  return buffer;
}

static int64_t position_of(const egi_kernel_call *call, const rotary_params *p, int64_t batch, int64_t index) {
  const int64_t *positions = call->inputs[3].data;
  return positions[batch * p->position_strides[0] + index * p->position_strides[1]];
}

static void rotate_heads(const egi_kernel_call *call, int64_t batch, int64_t position, char *buffers) {
  const rotary_params *p = call->params;
  int64_t bytes = (int64_t)egi_element_bytes(p->dtype), n = p->head_size;
  char *buffer[4] = {buffers, buffers + n * bytes, buffers + 2 * n * bytes, buffers + 3 * n * bytes};
  int64_t first = p->has_positions ? position_of(call, p, batch, position) : batch;
  int64_t second = p->has_positions ? 0 : position;
  const char *cosine = (char *)call->inputs[1].data + (first * p->cos_strides[0] + second * p->cos_strides[1]) * bytes;
  const char *sine = (char *)call->inputs[2].data + (first * p->sin_strides[0] + second * p->sin_strides[1]) * bytes;
  const void *c = load_line(p->dtype, cosine, p->cos_strides[2], p->half, buffer[2]);
  const void *s = load_line(p->dtype, sine, p->sin_strides[2], p->half, buffer[3]);
  for (int64_t head = 0; head < p->heads; head++) {
    int64_t x_at = batch * p->x_strides[0] + head * p->x_strides[1] + position * p->x_strides[2];
    int64_t out_at = batch * p->out_strides[0] + head * p->out_strides[1] + position * p->out_strides[2];
    const char *x = load_line(p->dtype, (char *)call->inputs[0].data + x_at * bytes, p->x_strides[3], n, buffer[0]);
    char *target = (char *)call->outputs[0].data + out_at * bytes;
    bool is_direct = p->out_strides[3] == 1 || n == 1;
    char *out = is_direct ? target : buffer[1];
    (p->is_interleaved ? p->functions->rotate_pairs : p->functions->rotate_halves)(out, x, c, s, p->half);
    int64_t done = 2 * p->half;
    if (out != x) copy_strided(p->dtype, out + done * bytes, 1, x + done * bytes, 1, n - done);
    if (!is_direct) copy_strided(p->dtype, target, p->out_strides[3], out, 1, n);
  }
}

static void run_pairs(void *argument, size_t index, size_t worker) {
  const egi_kernel_call *call = argument;
  const rotary_params *p = call->params;
  int64_t pair = (int64_t)index * p->pairs_per_task, end = pair + p->pairs_per_task;
  char *buffers = (char *)call->workspace + worker * p->buffer_bytes;
  for (; pair < end && pair < p->batch * p->sequence; pair++)
    rotate_heads(call, pair / p->sequence, pair % p->sequence, buffers);
}

eg_status egi_cpu_run_rotary(eg_context *ctx, const egi_kernel_call *call) {
  const rotary_params *p = call->params;
  int64_t n_pairs = p->batch * p->sequence;
  for (int64_t pair = 0; pair < n_pairs && p->has_positions; pair++) {
    int64_t position = position_of(call, p, pair / p->sequence, pair % p->sequence);
    if (position < 0 || position >= p->n_cached)
      return egi_fail(ctx, EG_ERROR_DATA, "RotaryEmbedding: position %lld is outside the cache of %lld",
                      (long long)position, (long long)p->n_cached);
  }
  egi_kernel_call shared = *call;
  egi_pool_run(call->pool, (size_t)((n_pairs + p->pairs_per_task - 1) / p->pairs_per_task), run_pairs, &shared);
  return EG_OK;
}
