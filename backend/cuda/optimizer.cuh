/* The optimizer's arithmetic: each operation rounded by itself, in the order of the CPU's loops, so that both give the
 * same bits. */
#ifndef ENGRAFT_BACKEND_CUDA_OPTIMIZER_CUH
#define ENGRAFT_BACKEND_CUDA_OPTIMIZER_CUH

#include "backend/cuda/cuda.h"

namespace egi {

/* What a step does to all elements of a segment. */
struct adamw_step {
  float factor, beta2, rest1, rest2, epsilon, root; /* factor: of gradients; root: sqrt(correction2) */
  float keep, step_size;
};

/* What gradients are multiplied by: 1 / trained tokens, and what clips them to the step's norm
 * (torch.nn.utils.clip_grad_norm_). */
__device__ __forceinline__ float gradient_factor(const egi_step_state &step, float norm) {
  const float coefficient = __fdiv_rn(step.clip, __fadd_rn(norm, 1e-6f));
  const bool is_clipped = step.clip > 0.0f && !(coefficient >= 1.0f);
  return is_clipped ? __fmul_rn(step.inverse_targets, coefficient) : step.inverse_targets;
}

__device__ __forceinline__ adamw_step adamw_step_of(const egi_step_state &step, float factor, float decay, float rate) {
  const float own_rate = __fmul_rn(step.learning_rate, rate);
  const float keep = __fsub_rn(1.0f, __fmul_rn(own_rate, __fmul_rn(step.weight_decay, decay)));
  return {factor,       step.beta2,
          step.rest1,   step.rest2,
          step.epsilon, __fsqrt_rn(step.correction2),
          keep,         __fdiv_rn(own_rate, step.correction1)};
}

/* AdamW (Loshchilov and Hutter, arXiv 1711.05101) in the order of operations of PyTorch: decay, moments, then
 * p -= rate / correction1 · m / (sqrt(v) / sqrt(correction2) + epsilon). */
__device__ __forceinline__ void adamw_element(const adamw_step &s, float gradient, float *p, float *m, float *v) {
  const float g = __fmul_rn(gradient, s.factor);
  const float first = __fadd_rn(*m, __fmul_rn(__fsub_rn(g, *m), s.rest1));
  const float second = __fadd_rn(__fmul_rn(*v, s.beta2), __fmul_rn(s.rest2, __fmul_rn(g, g)));
  const float divisor = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), s.root), s.epsilon);
  *m = first;
  *v = second;
  *p = __fsub_rn(__fmul_rn(*p, s.keep), __fmul_rn(s.step_size, __fdiv_rn(first, divisor)));
}

/* Whether the input is a step state, contiguous and aligned as one. */
eg_status check_step(const egi_kernel_plan *plan, unsigned input);

} // namespace egi

#endif
