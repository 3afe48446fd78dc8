/* Vectors of float and double for the matrix product, by instruction set; where there are no intrinsics (EGI_VECTOR not
 * defined) the product's inner block is a plain loop. Included by gemm.c only. */
#ifndef ENGRAFT_BACKEND_CPU_ISA_GEMM_VECTOR_H
#define ENGRAFT_BACKEND_CPU_ISA_GEMM_VECTOR_H

#if defined(__AVX512F__)
#include <immintrin.h>
#define EGI_VECTOR 1
#define EGI_VECTOR_BYTES 64
typedef __m512 vector_f32;
typedef __m512d vector_f64;
#define LOAD_f32(p) _mm512_loadu_ps(p)
#define STORE_f32(p, x) _mm512_storeu_ps(p, x)
#define FILL_f32(x) _mm512_set1_ps(x)
#define MULTIPLY_f32(a, b) _mm512_mul_ps(a, b)
#define MULTIPLY_ADD_f32(a, b, c) _mm512_fmadd_ps(a, b, c)
#define LOAD_f64(p) _mm512_loadu_pd(p)
#define STORE_f64(p, x) _mm512_storeu_pd(p, x)
#define FILL_f64(x) _mm512_set1_pd(x)
#define MULTIPLY_f64(a, b) _mm512_mul_pd(a, b)
#define MULTIPLY_ADD_f64(a, b, c) _mm512_fmadd_pd(a, b, c)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define EGI_VECTOR 1
#define EGI_VECTOR_BYTES 32
typedef __m256 vector_f32;
typedef __m256d vector_f64;
#define LOAD_f32(p) _mm256_loadu_ps(p)
#define STORE_f32(p, x) _mm256_storeu_ps(p, x)
#define FILL_f32(x) _mm256_set1_ps(x)
#define MULTIPLY_f32(a, b) _mm256_mul_ps(a, b)
#define MULTIPLY_ADD_f32(a, b, c) _mm256_fmadd_ps(a, b, c)
#define LOAD_f64(p) _mm256_loadu_pd(p)
#define STORE_f64(p, x) _mm256_storeu_pd(p, x)
#define FILL_f64(x) _mm256_set1_pd(x)
#define MULTIPLY_f64(a, b) _mm256_mul_pd(a, b)
#define MULTIPLY_ADD_f64(a, b, c) _mm256_fmadd_pd(a, b, c)
#elif defined(__SSE2__)
#include <emmintrin.h>
#define EGI_VECTOR 1
#define EGI_VECTOR_BYTES 16
typedef __m128 vector_f32;
typedef __m128d vector_f64;
#define LOAD_f32(p) _mm_loadu_ps(p)
#define STORE_f32(p, x) _mm_storeu_ps(p, x)
#define FILL_f32(x) _mm_set1_ps(x)
#define MULTIPLY_f32(a, b) _mm_mul_ps(a, b)
#define MULTIPLY_ADD_f32(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
#define LOAD_f64(p) _mm_loadu_pd(p)
#define STORE_f64(p, x) _mm_storeu_pd(p, x)
#define FILL_f64(x) _mm_set1_pd(x)
#define MULTIPLY_f64(a, b) _mm_mul_pd(a, b)
#define MULTIPLY_ADD_f64(a, b, c) _mm_add_pd(_mm_mul_pd(a, b), c)
#else
#define EGI_VECTOR_BYTES 16
#endif

/* Asks early for lines that far behind p; the address need not be one of the matrix. */
#if defined(__SSE2__)
static inline void fetch(const void *p, size_t offset_bytes, int n_lines) {
  uintptr_t at = (uintptr_t)p + offset_bytes;
  for (int i = 0; i < n_lines; i++, at += 64) _mm_prefetch((const char *)at, _MM_HINT_T0);
}
#endif

/* The square transposition below for any type. */
#define PLAIN_TRANSPOSE(name, real)                                                   \
  static inline void name(real *out, int64_t width, const real *in, int64_t stride) { \
    for (int i = 0; i < 4; i++)                                                       \
      for (int j = 0; j < 4; j++) out[j * width + i] = in[i * stride + j];            \
  }

/* 4 rows of 4 floats (2 of 2 doubles), read along rows `stride` apart and written along columns `width` apart. */
#if defined(__SSE2__)
#include <emmintrin.h>
static inline void transpose_f32(float *out, int64_t width, const float *in, int64_t stride) {
  __m128 a = _mm_loadu_ps(in), b = _mm_loadu_ps(in + stride);
  __m128 c = _mm_loadu_ps(in + 2 * stride), d = _mm_loadu_ps(in + 3 * stride);
  __m128 ab_low = _mm_unpacklo_ps(a, b), cd_low = _mm_unpacklo_ps(c, d);
  __m128 ab_high = _mm_unpackhi_ps(a, b), cd_high = _mm_unpackhi_ps(c, d);
  _mm_storeu_ps(out, _mm_movelh_ps(ab_low, cd_low));
  _mm_storeu_ps(out + width, _mm_movehl_ps(cd_low, ab_low));
  _mm_storeu_ps(out + 2 * width, _mm_movelh_ps(ab_high, cd_high));
  _mm_storeu_ps(out + 3 * width, _mm_movehl_ps(cd_high, ab_high));
}
static inline void transpose_f64(double *out, int64_t width, const double *in, int64_t stride) {
  __m128d a = _mm_loadu_pd(in), b = _mm_loadu_pd(in + stride);
  _mm_storeu_pd(out, _mm_unpacklo_pd(a, b));
  _mm_storeu_pd(out + width, _mm_unpackhi_pd(a, b));
}
#define SQUARE_f32 4
#define SQUARE_f64 2
#else
#define SQUARE_f32 4
#define SQUARE_f64 4
PLAIN_TRANSPOSE(transpose_f32, float)
PLAIN_TRANSPOSE(transpose_f64, double)
#endif
#endif
