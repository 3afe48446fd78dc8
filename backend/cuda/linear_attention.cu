/* LinearAttention (operator version 27) and its gradient, as the recurrence of its definition says: state S [dk, dv] in
 * f64, P = diag(exp g) · S; S = P + beta · k · (v - Pᵀk)ᵀ for the delta rules, P + k · vᵀ for the others; o = scale ·
 * Sᵀq. Forward: a thread for each column of each state. Gradient: a block for each batch element and key head, the
 * states of all steps kept; sums over rows and columns by one thread each, in order: deterministic. */
#include "backend/cuda/strided.cuh"

namespace egi::plain {

/* Inputs of both operators; the gradient has dY and d present_state behind them. */
enum { QUERY, KEY, VALUE, PAST, DECAY, BETA, RESULT, PRESENT, N_OPERANDS };

/* The states of as many heads at once as fit are kept by the gradient. */
enum { STATE_MEGABYTES = 512 };

struct linear_params {
  int64_t batch, steps, q_heads, heads, dk, dv;
  int64_t n_decay, n_beta; /* decays of a head: 0, 1 or dk; betas of a step: 0, 1 or heads */
  bool is_delta;
  double scale;
  int64_t n_rooms, room; /* of the gradient: heads at a time, doubles of each */
};

struct operand {
  char *data; /* NULL: absent */
  int dtype, element_bytes;
};

struct linear_run {
  linear_params p;
  operand in[N_OPERANDS], out[BETA + 1];
  double *workspace;
};

/* A step of a key head. */
struct place {
  int64_t b, t, h;
};

__device__ __forceinline__ double read(const operand &o, int64_t i) {
  return load_number<double>(o.data + i * o.element_bytes, o.dtype);
}
__device__ __forceinline__ void write(const operand &o, int64_t i, double x) {
  if (o.data != NULL) store_number<double>(o.data + i * o.element_bytes, o.dtype, x);
}

__device__ __forceinline__ int64_t row_of(const linear_params &p, const place &at, int64_t width) {
  return (at.b * p.steps + at.t) * width;
}
__device__ __forceinline__ int64_t key_row(const linear_params &p, const place &at) {
  return row_of(p, at, p.heads * p.dk) + at.h * p.dk;
}
__device__ __forceinline__ int64_t value_row(const linear_params &p, const place &at) {
  return row_of(p, at, p.heads * p.dv) + at.h * p.dv;
}
__device__ __forceinline__ int64_t decay_index(const linear_params &p, const place &at, int64_t i) {
  return row_of(p, at, p.heads * p.n_decay) + at.h * p.n_decay + (p.n_decay > 1 ? i : 0);
}
__device__ __forceinline__ double decay_of(const linear_run &r, const place &at, int64_t i) {
  return r.p.n_decay == 0 ? 1.0 : exp(read(r.in[DECAY], decay_index(r.p, at, i)));
}
__device__ __forceinline__ double beta_of(const linear_run &r, const place &at) {
  if (r.p.n_beta == 0) return 1.0;
  return read(r.in[BETA], row_of(r.p, at, r.p.n_beta) + (r.p.n_beta > 1 ? at.h : 0));
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Column j of a state: dk numbers, dv apart. */
__device__ void step_column(const linear_run &r, const place &at, int64_t j, double *column) {
  const linear_params &p = r.p;
  const int64_t keys = key_row(p, at);
  double u = read(r.in[VALUE], value_row(p, at) + j);
  for (int64_t i = 0; i < p.dk; i++) {
    const double decayed = decay_of(r, at, i) * column[i * p.dv];
    column[i * p.dv] = decayed;
    if (p.is_delta) u -= decayed * read(r.in[KEY], keys + i);
  }
  const double beta = beta_of(r, at);
  for (int64_t i = 0; i < p.dk; i++) column[i * p.dv] += beta * read(r.in[KEY], keys + i) * u;
}

__device__ void write_column(const linear_run &r, const place &at, int64_t j, const double *column) {
  const linear_params &p = r.p;
  const int64_t group = p.q_heads / p.heads;
  for (int64_t q = at.h * group; q < (at.h + 1) * group; q++) {
    const int64_t queries = row_of(p, at, p.q_heads * p.dk) + q * p.dk;
    double sum = 0.0;
    for (int64_t i = 0; i < p.dk; i++) sum += read(r.in[QUERY], queries + i) * column[i * p.dv];
    write(r.out[0], row_of(p, at, p.q_heads * p.dv) + q * p.dv + j, p.scale * sum);
  }
}

__global__ void __launch_bounds__(BLOCK_THREADS) run_columns(linear_run r) {
  const linear_params &p = r.p;
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, size = p.dk * p.dv;
  const int64_t count = p.batch * p.heads * p.dv;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; n < count; n += step) {
    const int64_t j = n % p.dv, head = n / p.dv, first = head * size + j;
    double *column = r.workspace + first;
    for (int64_t i = 0; i < p.dk; i++)
      column[i * p.dv] = r.in[PAST].data != NULL ? read(r.in[PAST], first + i * p.dv) : 0.0;
    for (int64_t t = 0; t < p.steps; t++) {
      const place at = {head / p.heads, t, head % p.heads};
      step_column(r, at, j, column);
      write_column(r, at, j, column);
    }
    for (int64_t i = 0; i < p.dk; i++) write(r.out[1], first + i * p.dv, column[i * p.dv]);
  }
}

/* ---- gradient ---------------------------------------------------------------------------------------------------- */

/* What a head has in the workspace. */
struct head_room {
  double *states, *g;                               /* [steps + 1][dk, dv], [dk, dv] */
  double *u, *du;                                   /* [dv] */
  double *keys, *decays, *beta_parts, *decay_parts; /* [dk] */
};

__device__ head_room room_of(const linear_run &r) {
  const linear_params &p = r.p;
  const int64_t size = p.dk * p.dv;
  head_room room;
  room.states = r.workspace + blockIdx.x * p.room;
  room.g = room.states + (p.steps + 1) * size;
  room.u = room.g + size;
  room.du = room.u + p.dv;
  room.keys = room.du + p.dv;
  room.decays = room.keys + p.dk;
  room.beta_parts = room.decays + p.dk;
  room.decay_parts = room.beta_parts + p.dk;
  return room;
}

__device__ void run_states(const linear_run &r, const head_room &room, int64_t b, int64_t h) {
  const linear_params &p = r.p;
  const int64_t size = p.dk * p.dv, first = (b * p.heads + h) * size;
  for (int64_t j = threadIdx.x; j < p.dv; j += BLOCK_THREADS) {
    for (int64_t i = 0; i < p.dk; i++) {
      const int64_t at = i * p.dv + j;
      room.states[at] = r.in[PAST].data != NULL ? read(r.in[PAST], first + at) : 0.0;
      room.g[at] = r.in[PRESENT].data != NULL ? read(r.in[PRESENT], first + at) : 0.0;
    }
    for (int64_t t = 0; t < p.steps; t++) {
      double *column = room.states + (t + 1) * size + j;
      for (int64_t i = 0; i < p.dk; i++) column[i * p.dv] = room.states[t * size + i * p.dv + j];
      step_column(r, place{b, t, h}, j, column);
    }
  }
}

/* Rows: from dO, dQ and what it adds to G = dS. */
__device__ void output_gradient(const linear_run &r, const head_room &room, const place &at) {
  const linear_params &p = r.p;
  const int64_t size = p.dk * p.dv, group = p.q_heads / p.heads;
  const double *state = room.states + (at.t + 1) * size;
  for (int64_t i = threadIdx.x; i < p.dk; i += BLOCK_THREADS) {
    room.keys[i] = read(r.in[KEY], key_row(p, at) + i);
    room.decays[i] = decay_of(r, at, i);
    for (int64_t q = at.h * group; q < (at.h + 1) * group; q++) {
      const int64_t query = row_of(p, at, p.q_heads * p.dk) + q * p.dk + i;
      const int64_t result = row_of(p, at, p.q_heads * p.dv) + q * p.dv;
      const double factor = p.scale * read(r.in[QUERY], query);
      double sum = 0.0;
      for (int64_t j = 0; j < p.dv; j++) {
        const double dy = read(r.in[RESULT], result + j);
        sum += state[i * p.dv + j] * dy;
        room.g[i * p.dv + j] += factor * dy;
      }
      write(r.out[QUERY], query, p.scale * sum);
    }
  }
}

/* Columns: u = v - Pᵀk, or v, and du = beta · Gᵀk = dV. */
__device__ void value_gradient(const linear_run &r, const head_room &room, const place &at) {
  const linear_params &p = r.p;
  const double *state = room.states + at.t * p.dk * p.dv, beta = beta_of(r, at);
  for (int64_t j = threadIdx.x; j < p.dv; j += BLOCK_THREADS) {
    double u = read(r.in[VALUE], value_row(p, at) + j), du = 0.0;
    for (int64_t i = 0; i < p.dk; i++) {
      if (p.is_delta) u -= room.decays[i] * state[i * p.dv + j] * room.keys[i];
      du += beta * room.keys[i] * room.g[i * p.dv + j];
    }
    room.u[j] = u;
    room.du[j] = du;
    write(r.out[VALUE], value_row(p, at) + j, du);
  }
}

/* Rows: dK, parts of d beta and d decay, and through u = v - Pᵀk and P = diag(a) · S the G of the step before. */
__device__ void key_gradient(const linear_run &r, const head_room &room, const place &at) {
  const linear_params &p = r.p;
  const double *state = room.states + at.t * p.dk * p.dv, beta = beta_of(r, at);
  for (int64_t i = threadIdx.x; i < p.dk; i += BLOCK_THREADS) {
    const double k = room.keys[i], a = room.decays[i];
    double gu = 0.0, d_key = 0.0, d_decay = 0.0;
    for (int64_t j = 0; j < p.dv; j++) {
      double *cell = &room.g[i * p.dv + j];
      const double decayed = a * state[i * p.dv + j];
      gu += *cell * room.u[j];
      if (p.is_delta) {
        d_key -= decayed * room.du[j];
        *cell -= k * room.du[j];
      }
      d_decay += *cell * decayed; /* d/dg of exp(g) · s is exp(g) · s itself */
      *cell *= a;
    }
    write(r.out[KEY], key_row(p, at) + i, d_key + beta * gu);
    room.beta_parts[i] = k * gu;
    room.decay_parts[i] = d_decay;
    if (p.n_decay > 1) write(r.out[DECAY], decay_index(p, at, i), d_decay);
  }
}

/* d beta of each head [batch, steps, heads] stands behind the rooms. */
__device__ void sum_parts(const linear_run &r, const head_room &room, const place &at) {
  const linear_params &p = r.p;
  double d_beta = 0.0, d_decay = 0.0;
  if (threadIdx.x != 0) return;
  for (int64_t i = 0; i < p.dk; i++) {
    d_beta += room.beta_parts[i];
    d_decay += room.decay_parts[i];
  }
  r.workspace[p.n_rooms * p.room + row_of(p, at, p.heads) + at.h] = d_beta;
  if (p.n_decay == 1) write(r.out[DECAY], decay_index(p, at, 0), d_decay);
}

__global__ void __launch_bounds__(BLOCK_THREADS) run_gradient(linear_run r) {
  const linear_params &p = r.p;
  const head_room room = room_of(r);
  for (int64_t head = blockIdx.x; head < p.batch * p.heads; head += gridDim.x) {
    const int64_t size = p.dk * p.dv;
    run_states(r, room, head / p.heads, head % p.heads);
    for (int64_t t = p.steps; t-- > 0;) {
      const place at = {head / p.heads, t, head % p.heads};
      __syncthreads();
      output_gradient(r, room, at);
      __syncthreads();
      value_gradient(r, room, at);
      __syncthreads();
      key_gradient(r, room, at);
      __syncthreads();
      sum_parts(r, room, at);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < size; i += BLOCK_THREADS) write(r.out[PAST], head * size + i, room.g[i]);
    __syncthreads();
  }
}

/* d beta [batch, steps, n_beta] from that of each head, in the order of heads. */
__global__ void sum_betas(linear_run r) {
  const linear_params &p = r.p;
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS, count = p.batch * p.steps * p.n_beta;
  const double *parts = r.workspace + p.n_rooms * p.room;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; i < count; i += step) {
    double sum = 0.0;
    for (int64_t h = 0; h < p.heads / p.n_beta; h++) sum += parts[i * (p.heads / p.n_beta) + h];
    write(r.out[BETA], i, sum);
  }
}

/* ---- prepare and run --------------------------------------------------------------------------------------------- */

static eg_status fail(const egi_kernel_plan *plan, const char *reason) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "%s", reason);
}

static eg_status read_rule(const egi_kernel_plan *plan, linear_params *p) {
  const egi_tensor *in = plan->inputs;
  const char *rule = egi_node_string(egi_plan_node(plan), "update_rule", "gated_delta");
  const bool is_gated = strcmp(rule, "gated") == 0 || strcmp(rule, "gated_delta") == 0;
  p->is_delta = strcmp(rule, "delta") == 0 || strcmp(rule, "gated_delta") == 0;
  if (!is_gated && !p->is_delta && strcmp(rule, "linear") != 0) return fail(plan, "its update_rule is not known");
  if ((is_gated && !egi_plan_has_input(plan, DECAY)) || (p->is_delta && !egi_plan_has_input(plan, BETA)))
    return fail(plan, "its update_rule needs an input that is missing");
  if (is_gated) p->n_decay = in[DECAY].dims[2] / p->heads;
  if (is_gated && (in[DECAY].dims[2] % p->heads != 0 || (p->n_decay != 1 && p->n_decay != p->dk)))
    return fail(plan, "decay is neither for each head nor for each key dimension");
  if (p->is_delta) p->n_beta = in[BETA].dims[2];
  if (p->is_delta && p->n_beta != 1 && p->n_beta != p->heads) return fail(plan, "beta does not fit the heads");
  return EG_OK;
}

static eg_status prepare(egi_kernel_plan *plan, linear_params **out_params) {
  const egi_tensor *in = plan->inputs;
  const egi_node *node = egi_plan_node(plan);
  linear_params *p = EGI_NEW(plan->arena, linear_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = *out_params = p;
  for (unsigned i = 0; i < plan->n_inputs; i++) {
    const eg_dtype dtype = in[i].dtype;
    if (egi_plan_has_input(plan, i) && (!egi_dtype_is_float(dtype) || inside_of(dtype) == INSIDE_NONE))
      return egi_fail_types(plan);
  }
  p->batch = in[QUERY].dims[0];
  p->steps = in[QUERY].dims[1];
  p->q_heads = egi_node_int(node, "q_num_heads", 0); /* the shape rule saw that heads and sizes fit */
  p->heads = egi_node_int(node, "kv_num_heads", 0);
  p->dk = in[KEY].dims[2] / p->heads;
  p->dv = in[VALUE].dims[2] / p->heads;
  p->scale = static_cast<double>(egi_node_float(node, "scale", 0.0f));
  if (!(p->scale > 0.0) && !(p->scale < 0.0)) p->scale = 1.0 / sqrt(static_cast<double>(p->dk));
  return read_rule(plan, p);
}

static eg_status set_workspace(egi_kernel_plan *plan, int64_t n_rooms, int64_t room, int64_t n_more) {
  size_t bytes = sizeof(double);
  const bool is_sound = egi_size_multiply(bytes, static_cast<size_t>(room), &bytes) &&
                        egi_size_multiply(bytes, static_cast<size_t>(n_rooms), &bytes) &&
                        egi_size_add(bytes, static_cast<size_t>(n_more) * sizeof(double), &bytes);
  plan->workspace_bytes = bytes;
  return is_sound ? EG_OK : fail(plan, "its states are too large");
}

static linear_run begin(const egi_kernel_call *call) {
  linear_run r = {};
  r.p = *static_cast<const linear_params *>(call->params);
  r.workspace = static_cast<double *>(call->workspace);
  for (unsigned i = 0; i < N_OPERANDS; i++) {
    if (!egi_call_has_input(call, i)) continue;
    const egi_tensor *in = &call->inputs[i];
    r.in[i] = {static_cast<char *>(in->data), in->dtype, static_cast<int>(egi_element_bytes(in->dtype))};
  }
  for (unsigned i = 0; i <= BETA; i++) {
    if (!has_output(call, i)) continue;
    const egi_tensor *out = &call->outputs[i];
    r.out[i] = {static_cast<char *>(out->data), out->dtype, static_cast<int>(egi_element_bytes(out->dtype))};
  }
  return r;
}

} // namespace egi::plain

using namespace egi::plain;

extern "C" eg_status egi_cuda_prepare_linear_attention(egi_kernel_plan *plan) {
  linear_params *p;
  EG_TRY(prepare(plan, &p));
  return set_workspace(plan, p->batch * p->heads, p->dk * p->dv, 0);
}

extern "C" eg_status egi_cuda_run_linear_attention(eg_context *ctx, const egi_kernel_call *call) {
  const linear_run r = begin(call);
  const int64_t count = r.p.batch * r.p.heads * r.p.dv;
  if (count == 0) return EG_OK;
  run_columns<<<blocks_for(count), BLOCK_THREADS, 0, egi_cuda_stream_of(call)->stream>>>(r);
  return egi_cuda_launched(ctx, "run_columns");
}

extern "C" eg_status egi_cuda_prepare_linear_attention_grad(egi_kernel_plan *plan) {
  linear_params *p;
  EG_TRY(prepare(plan, &p));
  p->room = (p->steps + 2) * p->dk * p->dv + 2 * p->dv + 4 * p->dk;
  p->n_rooms = STATE_MEGABYTES * (INT64_C(1) << 20) / static_cast<int64_t>(sizeof(double)) / (p->room + 1);
  if (p->n_rooms < 1) p->n_rooms = 1;
  if (p->n_rooms > p->batch * p->heads) p->n_rooms = p->batch * p->heads;
  return set_workspace(plan, p->n_rooms, p->room, p->batch * p->steps * p->heads);
}

extern "C" eg_status egi_cuda_run_linear_attention_grad(eg_context *ctx, const egi_kernel_call *call) {
  const linear_run r = begin(call);
  const cudaStream_t stream = egi_cuda_stream_of(call)->stream;
  const int64_t n_betas = r.p.batch * r.p.steps * r.p.n_beta;
  for (unsigned i = DECAY; i <= BETA; i++) { /* what the rule does not use has no gradient */
    const bool is_unused = i == DECAY ? r.p.n_decay == 0 : r.p.n_beta == 0;
    if (is_unused && has_output(call, i)) EG_TRY(clear_tensor(ctx, egi_cuda_stream_of(call), &call->outputs[i]));
  }
  if (r.p.n_rooms == 0) return EG_OK;
  run_gradient<<<static_cast<unsigned>(r.p.n_rooms), BLOCK_THREADS, 0, stream>>>(r);
  if (n_betas > 0) sum_betas<<<blocks_for(n_betas), BLOCK_THREADS, 0, stream>>>(r);
  return egi_cuda_launched(ctx, "run_gradient");
}
