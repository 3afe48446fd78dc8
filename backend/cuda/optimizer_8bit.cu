/* AdamW with states of 8 bits (Dettmers et al. 2022, arXiv:2110.02861), a block of threads for each 256 elements of a
 * parameter: codes and scale become float32, the step is AdamW's, and what it leaves becomes codes again, the CPU's bit
 * for bit. Blocks are independent. */
#include "backend/cuda/operator.cuh"
#include "backend/cuda/optimizer.cuh"

extern "C" {
#include "base/blockwise.h"
}

namespace egi {
namespace {

enum { BLOCK = 256, PARAMETERS = 96 }; /* of a launch: its table is an argument */

struct parameter {
  int64_t start, size, place, first_block; /* first_block: of the launch */
  float decay, rate;
};

struct adamw_8bit_node {
  parameter *parameters;
  uint32_t n_parameters;
  int64_t smallest;
  bool has_floor;
  float map1[256], map2[256];
};

struct adamw_8bit_job {
  float *parameters, *state1, *state2;
  const float *gradients, *norm;
  const egi_step_state *step;
  int64_t smallest, n_blocks;
  uint32_t n_parameters;
  bool has_floor;
  parameter table[PARAMETERS];
  float map1[256], map2[256];
};

/* Bisection from the middle in seven steps, then the nearer of the last place and its neighbour on the value's side; on
 * a tie the last place. */
__device__ __forceinline__ int nearest(const float *map, float value) {
  int place = 127, low = 0, high = 255;
#pragma unroll
  for (int step = 64; step > 0; step /= 2) {
    const bool is_above = value > map[place];
    low = is_above ? place : low;
    high = is_above ? high : place;
    place += is_above ? step : -step;
  }
  if (value > map[place]) return value > __fmul_rn(__fadd_rn(map[high], map[place]), 0.5f) ? high : place;
  return value < __fmul_rn(__fadd_rn(map[low], map[place]), 0.5f) ? low : place;
}

/* The largest magnitudes of a block's numbers, by bits: what is not finite is above all that is. */
__device__ __forceinline__ void largest_magnitudes(const float (&x)[2], float (&out)[2], int (*shared)[2]) {
  int most[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    most[k] = __float_as_int(x[k]) & 0x7fffffff;
    for (int step = 16; step > 0; step /= 2) most[k] = max(most[k], __shfl_xor_sync(0xffffffffu, most[k], step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][k] = most[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; k++) {
    for (int warp = 0; warp < BLOCK / 32; warp++) most[k] = max(most[k], shared[warp][k]);
    out[k] = __int_as_float(most[k]);
  }
  __syncthreads();
}

__device__ __forceinline__ const parameter &parameter_of(const adamw_8bit_job &job, int64_t block) {
  uint32_t low = 0, high = job.n_parameters;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (job.table[middle].first_block <= block)
      low = middle;
    else
      high = middle;
  }
  return job.table[low];
}

/* Codes of bitsandbytes' kernel: a first moment keeps its sign, if need be by the code next to the nearest. */
__device__ __forceinline__ void encode(const adamw_8bit_job &job, const float (*maps)[256], const float (&moments)[2],
                                       const float (&scales)[2], uint8_t (&codes)[2]) {
#pragma unroll
  for (int k = 0; k < 2; k++)
    codes[k] = static_cast<uint8_t>(nearest(maps[k], __fmul_rn(moments[k], __fdiv_rn(1.0f, scales[k]))));
  if (signbit(maps[0][codes[0]]) != signbit(moments[0]))
    codes[0] = static_cast<uint8_t>(moments[0] > 0.0f ? codes[0] + 1 : codes[0] - 1);
  if (job.has_floor && codes[1] == 0 && moments[1] > 0.0f) codes[1] = 1;
}

__global__ void __launch_bounds__(BLOCK) adamw_8bit(const __grid_constant__ adamw_8bit_job job) {
  __shared__ float maps[2][256];
  __shared__ int shared[BLOCK / 32][2];
  const float norm = *job.norm;
  if (!isfinite(norm)) return; /* the caller sees the norm and reports it; nothing has moved */
  const int i = static_cast<int>(threadIdx.x);
  maps[0][i] = job.map1[i];
  maps[1][i] = job.map2[i];
  __syncthreads();
  const egi_step_state state = *job.step;
  const float factor = gradient_factor(state, norm);
  for (int64_t block = blockIdx.x; block < job.n_blocks; block += gridDim.x) {
    const parameter &own = parameter_of(job, block);
    const int64_t first = (block - own.first_block) * BLOCK, at = own.start + first + i;
    const bool is_element = first + i < own.size, is_coded = own.size >= job.smallest;
    const adamw_step step = adamw_step_of(state, factor, own.decay, own.rate);
    float *const states[2] = {job.state1 + own.place, job.state2 + own.place};
    float *const scale_at[2] = {states[0] + (own.size + 3) / 4 + first / BLOCK,
                                states[1] + (own.size + 3) / 4 + first / BLOCK};
    float moments[2] = {0.0f, 0.0f}, scales[2];
    uint8_t codes[2];
    if (is_element) {
      for (int k = 0; k < 2; k++)
        moments[k] = is_coded
                         ? __fmul_rn(maps[k][reinterpret_cast<const uint8_t *>(states[k])[first + i]], *scale_at[k])
                         : states[k][first + i];
      float value = job.parameters[at];
      adamw_element(step, job.gradients[at], &value, &moments[0], &moments[1]);
      job.parameters[at] = value;
    }
    largest_magnitudes(moments, scales, shared);
    if (!is_coded) {
      for (int k = 0; k < 2 && is_element; k++) states[k][first + i] = moments[k];
      continue;
    }
    if (i == 0)
      for (int k = 0; k < 2; k++) *scale_at[k] = scales[k];
    if (!is_element) continue;
    encode(job, maps, moments, scales, codes);
    for (int k = 0; k < 2; k++) reinterpret_cast<uint8_t *>(states[k])[first + i] = codes[k];
  }
}

const float *read_floats(const egi_node *node, const char *name, uint32_t count) {
  const egi_attribute *attribute = egi_node_attribute(node, name);
  const bool fits = attribute != NULL && attribute->kind == EGI_ATTRIBUTE_FLOATS && attribute->count == count;
  return fits ? attribute->u.floats : NULL;
}

int64_t state_floats(const adamw_8bit_node *n, int64_t size) {
  return size < n->smallest ? size : (size + 3) / 4 + (size + BLOCK - 1) / BLOCK;
}

/* false where attributes are missing or a parameter, or its states, lie outside of the pools. */
bool read_parameters(const egi_kernel_plan *plan, adamw_8bit_node *n) {
  const egi_node *node = egi_plan_node(plan);
  uint32_t n_sizes = 0, n_places = 0;
  const int64_t *starts = egi_node_ints(node, "starts", &n->n_parameters);
  const int64_t *sizes = egi_node_ints(node, "sizes", &n_sizes), *places = egi_node_ints(node, "places", &n_places);
  const float *decays = read_floats(node, "decays", n->n_parameters),
              *rates = read_floats(node, "rates", n->n_parameters);
  const int64_t total = egi_tensor_count(&plan->inputs[0]), n_states = egi_tensor_count(&plan->inputs[2]);
  if (!starts || !sizes || !places || !decays || !rates || n_sizes != n->n_parameters || n_places != n->n_parameters)
    return false;
  if (egi_tensor_count(&plan->inputs[1]) != total || egi_tensor_count(&plan->inputs[3]) != n_states) return false;
  for (uint32_t i = 0; i < n->n_parameters; i++) {
    if (starts[i] < 0 || sizes[i] < 0 || places[i] < 0 || sizes[i] > total || starts[i] > total - sizes[i])
      return false;
    if (state_floats(n, sizes[i]) > n_states || places[i] > n_states - state_floats(n, sizes[i])) return false;
    n->parameters[i] = {starts[i], sizes[i], places[i], 0, decays[i], rates[i]};
  }
  return true;
}

/* Parameters [first, first + n) of the node, with the blocks they have in a launch. */
void fill_table(const adamw_8bit_node *node, uint32_t first, adamw_8bit_job *job) {
  job->n_parameters = node->n_parameters - first < PARAMETERS ? node->n_parameters - first : PARAMETERS;
  job->n_blocks = 0;
  for (uint32_t i = 0; i < job->n_parameters; i++) {
    job->table[i] = node->parameters[first + i];
    job->table[i].first_block = job->n_blocks;
    job->n_blocks += (job->table[i].size + BLOCK - 1) / BLOCK;
  }
}

} // namespace
} // namespace egi

extern "C" eg_status egi_cuda_prepare_adamw_8bit(egi_kernel_plan *plan) {
  using namespace egi;
  adamw_8bit_node *n = EGI_NEW(plan->arena, adamw_8bit_node, 1);
  if (n == NULL) return EG_ERROR_MEMORY;
  const egi_node *node = egi_plan_node(plan);
  plan->params = n;
  for (unsigned i = 0; i < 6; i++)
    if (i != 4 && plan->inputs[i].dtype != EG_DTYPE_F32) return egi_fail_types(plan);
  uint32_t count = 0;
  egi_node_ints(node, "starts", &count);
  n->parameters = EGI_NEW(plan->arena, parameter, count);
  if (n->parameters == NULL) return EG_ERROR_MEMORY;
  n->smallest = egi_node_int(node, "smallest", 4096);
  n->has_floor = egi_node_int(node, "floor", 1) != 0;
  if (!read_parameters(plan, n))
    return egi_fail_node(plan->graph, plan->node, EG_ERROR_SHAPE, "states and parameters do not fit each other");
  egi_dynamic_map(true, n->map1);
  egi_dynamic_map(false, n->map2);
  return check_step(plan, 4);
}

extern "C" eg_status egi_cuda_run_adamw_8bit(eg_context *ctx, const egi_kernel_call *call) {
  using namespace egi;
  const adamw_8bit_node *n = static_cast<const adamw_8bit_node *>(call->params);
  adamw_8bit_job job = {};
  job.parameters = static_cast<float *>(call->inputs[0].data);
  job.gradients = static_cast<const float *>(call->inputs[1].data);
  job.state1 = static_cast<float *>(call->inputs[2].data);
  job.state2 = static_cast<float *>(call->inputs[3].data);
  job.step = static_cast<const egi_step_state *>(call->inputs[4].data);
  job.norm = static_cast<const float *>(call->inputs[5].data);
  job.smallest = n->smallest;
  job.has_floor = n->has_floor;
  memcpy(job.map1, n->map1, sizeof job.map1);
  memcpy(job.map2, n->map2, sizeof job.map2);
  for (uint32_t first = 0; first < n->n_parameters; first += PARAMETERS) {
    fill_table(n, first, &job);
    if (job.n_blocks == 0) continue;
    adamw_8bit<<<static_cast<unsigned>(job.n_blocks < INT32_MAX ? job.n_blocks : INT32_MAX), BLOCK, 0,
                 egi_cuda_stream_of(call)->stream>>>(job);
    EG_TRY(egi_cuda_launched(ctx, "adamw_8bit"));
  }
  return EG_OK;
}
