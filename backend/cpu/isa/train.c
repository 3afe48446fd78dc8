/* Optimizer loops over f32 arrays. */
#include "backend/cpu/isa/isa.h"

#include <math.h>

/* AdamW (Loshchilov and Hutter, arXiv 1711.05101) in the order of operations of PyTorch: decay, moments, then
 * p -= rate / correction1 · m / (sqrt(v) / sqrt(correction2) + epsilon). */
static void adamw(const egi_adamw *chunk) {
  float *p = chunk->parameters, *m = chunk->moment1, *v = chunk->moment2;
  const float *gradients = chunk->gradients;
  float factor = chunk->gradient_factor, keep = chunk->keep;
  float beta2 = chunk->beta2, rest1 = chunk->rest1, rest2 = chunk->rest2, epsilon = chunk->epsilon;
  float step_size = chunk->rate / chunk->correction1;
  float root = sqrtf(chunk->correction2);
  EGI_SIMD
  for (int64_t i = 0; i < chunk->n; i++) {
    float g = gradients[i] * factor;
    float first = m[i] + (g - m[i]) * rest1;
    float second = v[i] * beta2 + rest2 * (g * g);
    m[i] = first;
    v[i] = second;
    p[i] = p[i] * keep - step_size * (first / (sqrtf(second) / root + epsilon));
  }
}

static double sum_of_squares(const float *in, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += (double)in[i] * (double)in[i];
  return sum;
}

const egi_isa_train EGI_ISA_NAME(egi_isa_train) = {adamw, sum_of_squares};
