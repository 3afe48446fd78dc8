/* The matrix product of one thread. Register blocks are sized for the instruction set: 8 rows of 3 vectors with 32
 * registers, 6 or 4 of 2 with 16. */
#include "backend/cpu/isa/isa.h"

#include "backend/cpu/isa/gemm_vector.h"

#define BLOCK_K 256

#if defined(__AVX512F__)
#define MR 8
#define WIDTHS 3
#elif defined(__AVX2__)
#define MR 6
#define WIDTHS 2
#else
#define MR 4
#define WIDTHS 2
#endif

#if defined(EGI_VECTOR)
#define VECTOR vector_f32
#define LOAD LOAD_f32
#define STORE STORE_f32
#define FILL FILL_f32
#define MULTIPLY MULTIPLY_f32
#define MULTIPLY_ADD MULTIPLY_ADD_f32
#endif
#define REAL float
#define TYPE f32
#define TRANSPOSE transpose_f32
#define SQUARE SQUARE_f32
#include "backend/cpu/isa/gemm_kernel.inc"

#if defined(EGI_VECTOR)
#undef VECTOR
#undef LOAD
#undef STORE
#undef FILL
#undef MULTIPLY
#undef MULTIPLY_ADD
#define VECTOR vector_f64
#define LOAD LOAD_f64
#define STORE STORE_f64
#define FILL FILL_f64
#define MULTIPLY MULTIPLY_f64
#define MULTIPLY_ADD MULTIPLY_ADD_f64
#endif
#define REAL double
#define TYPE f64
#define TRANSPOSE transpose_f64
#define SQUARE SQUARE_f64
#include "backend/cpu/isa/gemm_kernel.inc"

/* Integers wrap, so signed ones are summed as unsigned; plain loops. */
#undef VECTOR
#define REAL uint32_t
#define TYPE u32
#define TRANSPOSE transpose_u32
#define SQUARE 4
PLAIN_TRANSPOSE(transpose_u32, uint32_t)
#include "backend/cpu/isa/gemm_kernel.inc"

#define REAL uint64_t
#define TYPE u64
#define TRANSPOSE transpose_u64
#define SQUARE 4
PLAIN_TRANSPOSE(transpose_u64, uint64_t)
#include "backend/cpu/isa/gemm_kernel.inc"

const egi_isa_gemm EGI_ISA_NAME(egi_isa_gemm) = {gemm_f32, gemm_f64, gemm_u32, gemm_u64};
