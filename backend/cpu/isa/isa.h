/* Hot loops, compiled once for each instruction set (backend/CMakeLists.txt defines EGI_ISA) and reached through const
 * tables of functions: one table a source file, all of them in egi_isa. To add a file: declare its table type here, a
 * member of egi_isa, a row in EGI_ISA_TABLES, and define `const <type> EGI_ISA_NAME(<type>)` in the file.
 * Files in isa/ hold static functions and that one table, nothing else with external linkage. */
#ifndef ENGRAFT_BACKEND_CPU_ISA_ISA_H
#define ENGRAFT_BACKEND_CPU_ISA_ISA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EGI_ISA_JOIN_EXPANDED(name, isa) name##_##isa
#define EGI_ISA_JOIN(name, isa) EGI_ISA_JOIN_EXPANDED(name, isa)
#define EGI_ISA_NAME(name) EGI_ISA_JOIN(name, EGI_ISA)

/* Before a loop whose iterations are independent: out may be the same memory as an input, element for element. */
#define EGI_SIMD _Pragma("omp simd")

/* ---- elementwise.c -------------------------------------------------------------------------------------------- */

typedef enum egi_unary {
  EGI_UNARY_ABS,
  EGI_UNARY_ACOS,
  EGI_UNARY_ACOSH,
  EGI_UNARY_ASIN,
  EGI_UNARY_ASINH,
  EGI_UNARY_ATAN,
  EGI_UNARY_ATANH,
  EGI_UNARY_COSH,
  EGI_UNARY_SINH,
  EGI_UNARY_TAN,
  EGI_UNARY_CEIL,
  EGI_UNARY_COS,
  EGI_UNARY_ERF,
  EGI_UNARY_EXP,
  EGI_UNARY_FLOOR,
  EGI_UNARY_GELU,
  EGI_UNARY_GELU_TANH,
  EGI_UNARY_LOG,
  EGI_UNARY_NEG,
  EGI_UNARY_RECIPROCAL,
  EGI_UNARY_RELU,
  EGI_UNARY_ROUND,
  EGI_UNARY_SIGMOID,
  EGI_UNARY_SIGN,
  EGI_UNARY_SIN,
  EGI_UNARY_SQRT,
  EGI_UNARY_TANH,
  EGI_UNARY_COUNT
} egi_unary;

typedef enum egi_binary {
  EGI_BINARY_ADD,
  EGI_BINARY_SUB,
  EGI_BINARY_MUL,
  EGI_BINARY_DIV,
  EGI_BINARY_MAX,
  EGI_BINARY_MIN,
  EGI_BINARY_POW,
  EGI_BINARY_FMOD,
  EGI_BINARY_GELU_GRAD,
  EGI_BINARY_GELU_TANH_GRAD,
  EGI_BINARY_COUNT
} egi_binary;

/* Which operands of a binary loop are one number for all elements. */
typedef enum egi_broadcast { EGI_BROADCAST_NONE, EGI_BROADCAST_A, EGI_BROADCAST_B, EGI_BROADCAST_COUNT } egi_broadcast;

typedef struct egi_isa_elementwise {
  void (*unary[EGI_UNARY_COUNT])(float *out, const float *in, int64_t n);
  void (*binary[EGI_BINARY_COUNT][EGI_BROADCAST_COUNT])(float *out, const float *a, const float *b, int64_t n);
  /* out = condition ? a : b; a or b may be one number. */
  void (*where[EGI_BROADCAST_COUNT])(float *out, const uint8_t *condition, const float *a, const float *b, int64_t n);
  /* min(max(in, low), high), NaN stays. */
  void (*clip)(float *out, const float *in, float low, float high, int64_t n);
  void (*f16_to_f32)(float *out, const uint16_t *in, int64_t n);
  void (*f32_to_f16)(uint16_t *out, const float *in, int64_t n);
  void (*bf16_to_f32)(float *out, const uint16_t *in, int64_t n);
  void (*f32_to_bf16)(uint16_t *out, const float *in, int64_t n);
  /* Sum in f64, sixteen partial sums, the same order in every instruction set. */
  double (*sum)(const float *in, int64_t n);
  /* Largest, NaN when there is one, -inf for n = 0. */
  float (*max)(const float *in, int64_t n);
  /* sums[i] += in[i] */
  void (*add_to)(double *sums, const float *in, int64_t n);
} egi_isa_elementwise;

/* ---- gated.c -------------------------------------------------------------------------------------------------- */

typedef enum egi_activation {
  EGI_GATE_SILU,
  EGI_GATE_GELU,
  EGI_GATE_GELU_TANH,
  EGI_GATE_RELU,
  EGI_GATE_SIGMOID,
  EGI_GATE_IDENTITY,
  EGI_GATE_COUNT
} egi_activation;

/* act(min(gate, limit)) · (clamp(up, ±limit) + offset); alpha is silu's factor, no limit: infinity. */
typedef struct egi_gate {
  float alpha, limit, offset;
} egi_gate;

typedef struct egi_isa_gated {
  void (*forward[EGI_GATE_COUNT])(float *out, const float *gate, const float *up, const egi_gate *p, int64_t n);
  /* in: gate, up, dy */
  void (*backward[EGI_GATE_COUNT])(float *d_gate, float *d_up, const float *const in[3], const egi_gate *p, int64_t n);
} egi_isa_gated;

/* ---- gemm.c --------------------------------------------------------------------------------------------------- */

/* C[m, n] = alpha · A[m, k] · B[k, n] + beta · C. Strides in elements, any; C is not read when beta is 0. */
typedef struct egi_gemm {
  int64_t m, n, k;
  const void *a, *b;
  void *c;
  int64_t a_row, a_column, b_row, b_column, c_row, c_column;
  double alpha, beta;
} egi_gemm;

#define EGI_GEMM_PACK_A_BYTES 16384
#define EGI_GEMM_PACK_B_BYTES 393216
#define EGI_GEMM_SCRATCH_BYTES (EGI_GEMM_PACK_A_BYTES + EGI_GEMM_PACK_B_BYTES)

/* `scratch` is 64-byte aligned and holds EGI_GEMM_SCRATCH_BYTES. Integers: alpha and beta are 0 or 1. */
typedef void (*egi_gemm_function)(const egi_gemm *gemm, void *scratch);
typedef struct egi_isa_gemm {
  egi_gemm_function f32, f64, u32, u64;
} egi_isa_gemm;

/* ---- rows.c: functions of one row of n elements without gaps ---------------------------------------------------- */

/* Part of a row of attention scores; a query sees keys [first, last) of the n in the tile. */
typedef struct egi_score_row {
  void *scores; /* q·k · scale */
  int64_t n, first, last;
  double softcap;   /* 0: none */
  const void *bias; /* [n], added after the cap, -inf hides a key; NULL: none */
} egi_score_row;

/* Pointers are to float or double. Sums are in f64 unless said otherwise; their order depends on n and on the
 * instruction set. */
typedef struct egi_row_functions {
  void (*softmax)(void *out, const void *in, int64_t n);
  void (*log_softmax)(void *out, const void *in, int64_t n);
  /* From the result y: y · (dy - sum(dy · y)), and dy - exp(y) · sum(dy). */
  void (*softmax_grad)(void *out, const void *y, const void *dy, int64_t n);
  void (*log_softmax_grad)(void *out, const void *y, const void *dy, int64_t n);
  /* statistics[1] holds epsilon; the mean and 1 / deviation are written to it. bias may be NULL. */
  void (*layer_norm)(void *out, const void *in, const void *scale, const void *bias, int64_t n, double *statistics);
  /* in: x, scale, dy; statistics as written above. dx may be NULL; sums: of d scale and d bias over rows, added to in
   * the row's type, or NULL. */
  void (*layer_norm_grad)(void *dx, const void *const in[3], int64_t n, const double *statistics, void *const sums[2]);
  void (*rms_norm)(void *out, const void *in, const void *scale, int64_t n, double epsilon);
  void (*rms_norm_grad)(void *dx, const void *const in[3], int64_t n, double epsilon, void *d_scale);
  /* Pairs (i, i + n) or (2i, 2i + 1) turned by the angle with cos[i], sin[i]; 2n elements. */
  void (*rotate_halves)(void *out, const void *in, const void *cosine, const void *sine, int64_t n);
  void (*rotate_pairs)(void *out, const void *in, const void *cosine, const void *sine, int64_t n);
  /* Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over one more tile: scores become exp(score - max), max
   * and sum are brought up to date; returns the factor by which what was summed under the old max shrinks. */
  double (*attention)(const egi_score_row *row, double *max, double *sum);
  /* scores become the probabilities, d_scores (there: dP) the gradient p · (dP - delta) of the raw scores. */
  void (*attention_grad)(const egi_score_row *row, double lse, double delta, void *d_scores);
  double (*dot)(const void *a, const void *b, int64_t n);
  void (*scale)(void *out, double factor, int64_t n);
  /* logits += bias (NULL: none); then their largest, and the sum of exp(logit - largest). */
  void (*largest_and_sum)(void *logits, const void *bias, int64_t n, double out_largest_and_sum[2]);
  /* logits become factor · exp(logit - lse). */
  void (*scaled_exp)(void *logits, int64_t n, double lse, double factor);
  void (*add)(void *out, const void *in, int64_t n);
} egi_row_functions;

typedef struct egi_isa_rows {
  const egi_row_functions *f32, *f64;
} egi_isa_rows;

/* ---- train.c -------------------------------------------------------------------------------------------------- */

typedef struct egi_adamw {
  float *parameters, *moment1, *moment2;
  const float *gradients;
  int64_t n;
  float gradient_factor;                                              /* clip coefficient and 1/targets */
  float keep;                                                         /* 1 - rate · decay */
  float rate, beta2, rest1, rest2, epsilon, correction1, correction2; /* rest: 1 - beta */
} egi_adamw;

typedef struct egi_isa_train {
  void (*adamw)(const egi_adamw *chunk);
  double (*sum_of_squares)(const float *in, int64_t n);
} egi_isa_train;

/* ---- all of them ---------------------------------------------------------------------------------------------- */

/* TABLE(member, type) */
#define EGI_ISA_TABLES(TABLE)             \
  TABLE(elementwise, egi_isa_elementwise) \
  TABLE(gated, egi_isa_gated)             \
  TABLE(gemm, egi_isa_gemm)               \
  TABLE(rows, egi_isa_rows)               \
  TABLE(train, egi_isa_train)

typedef struct egi_isa {
  const char *name;
#define EGI_ISA_MEMBER(member, type) const type *member;
  EGI_ISA_TABLES(EGI_ISA_MEMBER)
#undef EGI_ISA_MEMBER
} egi_isa;

/* The best that this processor has; a pure function, cheap enough for prepare. */
const egi_isa *egi_cpu_isa(void);
/* Those that this processor has, the best first; NULL behind the last. */
const egi_isa *egi_cpu_isa_at(size_t index);

#endif
