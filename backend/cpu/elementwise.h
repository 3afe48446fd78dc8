/* What the elementwise kernels share: typed loops over f64, integers and booleans (elementwise_typed.c), and block
 * loads that bring any strides and the half types to the contiguous f32 loops of isa/. */
#ifndef ENGRAFT_BACKEND_CPU_ELEMENTWISE_H
#define ENGRAFT_BACKEND_CPU_ELEMENTWISE_H

#include "backend/cpu/strided.h"

/* Elements brought into a block on the stack at a time. */
#define EGI_BLOCK 256

/* Loops (out, a) or (out, a, b) for f64, integers and bool, `params` unused; NULL where the operator has no loop for
 * the type. `is_fmod`: Mod's attribute; `is_tanh`: Gelu's. */
egi_inner egi_typed_unary(egi_op op, eg_dtype dtype, bool is_tanh);
egi_inner egi_typed_binary(egi_op op, eg_dtype dtype, bool is_fmod, bool is_tanh);
/* The loop over operands (out, a, b) of one type for Add, Sub, Mul, Div, Max, Min and comparisons, with its params.
 * NULL where the operator does not take the type, or memory is out. */
egi_inner egi_binary_inner(egi_op op, eg_dtype dtype, egi_arena *arena, const void **out_params);
/* Pow for base and exponent of different types or integers (power.c); NULL for types it does not take. */
egi_inner egi_power_inner(eg_dtype base, eg_dtype exponent, egi_arena *arena, const void **out_params);
/* Comparisons of f32, for any strides. */
egi_inner egi_f32_compare(egi_op op);

/* One operand as n <= EGI_BLOCK contiguous floats: in place, or copied or converted to `block`. */
const float *egi_block_load(const egi_isa *isa, eg_dtype dtype, const char *data, int64_t stride, int64_t n,
                            float *block);
/* Where a loop may write n floats: in place when `dtype` is f32 and contiguous, else `block`, to be stored after. */
float *egi_block_target(eg_dtype dtype, char *data, int64_t stride, float *block);
void egi_block_store(const egi_isa *isa, eg_dtype dtype, char *data, int64_t stride, int64_t n, const float *block);

#endif
