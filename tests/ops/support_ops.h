/* The conformance harness: runs one kernel over every layout it claims to take and compares with expected values.
 *
 * A case holds contiguous inputs and expected outputs as doubles. ops_check() runs the kernel of the case's operator on
 * contiguous, transposed, spread-out and reversed operands (as its flags allow), in place, and with different numbers
 * of threads (results must be bitwise equal), in poisoned and guarded memory. */
#ifndef ENGRAFT_TESTS_OPS_SUPPORT_OPS_H
#define ENGRAFT_TESTS_OPS_SUPPORT_OPS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "backend/backend.h"

#define OPS_MAX_OPERANDS 32

/* The name of the device whose kernels are tested, "cpu" or "cuda"; not set: "cpu". */
#define OPS_DEVICE "ENGRAFT_TEST_DEVICE"

/* Made once for a program: ops_set_up and ops_tear_down are the group fixtures of cmocka; *state is the environment. */
typedef struct ops_environment {
  eg_context *ctx;
  egi_pool *pools[2]; /* of 1 and 3 threads */
  const egi_backend *backend;
  egi_device *device; /* NULL: the kernels of the CPU are tested */
  uint8_t *device_memory;
  bool is_missing[EGI_OP_COUNT];  /* of operators that were asked for: the backend has no kernel */
  uint64_t refused[EGI_OP_COUNT]; /* by operator: bit d for cases with operands of dtype d that prepare did not take */
} ops_environment;
int ops_set_up(void **state);
int ops_tear_down(void **state);

typedef struct ops_tensor {
  eg_dtype dtype; /* UNDEFINED: an optional operand left out */
  int rank;
  int64_t dims[EGI_MAX_RANK];
  double *values; /* row-major */
} ops_tensor;

typedef struct ops_case {
  egi_arena arena; /* of all values */
  ops_environment *environment;
  egi_op op;
  egi_attribute attributes[24];
  unsigned n_attributes;
  ops_tensor inputs[OPS_MAX_OPERANDS], outputs[OPS_MAX_OPERANDS];
  unsigned n_inputs, n_outputs;
  const double *updated[OPS_MAX_OPERANDS]; /* of an input that the kernel writes: its values after the run */
  double absolute, relative;               /* allowed error: absolute + relative * |expected| */
  eg_status expected_status;               /* of run; outputs are compared when EG_OK */
} ops_case;

/* Tolerances are those of outputs of `dtype` that are rounded once. */
void ops_begin(ops_case *c, void **state, egi_op op, eg_dtype dtype);
void ops_end(ops_case *c);
void ops_add_attribute(ops_case *c, egi_attribute attribute);
/* An attribute of type TENSOR with the values of `tensor`. */
void ops_add_tensor_attribute(ops_case *c, const char *name, const ops_tensor *tensor);

/* Values are 0 until filled. */
ops_tensor *ops_add_input(ops_case *c, eg_dtype dtype, int rank, const int64_t *dims);
ops_tensor *ops_add_output(ops_case *c, eg_dtype dtype, int rank, const int64_t *dims);
/* An i64 [count] input. */
ops_tensor *ops_add_integers(ops_case *c, const int64_t *values, int64_t count);
void ops_add_absent(ops_case *c);
void ops_add_absent_output(ops_case *c);
int64_t ops_count(const ops_tensor *tensor);
/* Uniform in [low, high], rounded to the type (integers: to whole numbers). */
void ops_fill_uniform(ops_tensor *tensor, double low, double high, uint64_t seed);
/* Overwrites the first values of a float tensor with infinities, NaN, -0, 0, a subnormal number, the largest. */
void ops_fill_special(ops_tensor *tensor);
/* One element in memory. Doubles hold all the values that tests use exactly. */
void ops_store(eg_dtype dtype, void *target, double value);
double ops_load(eg_dtype dtype, const void *source);
/* A value as the type holds it. */
double ops_round(eg_dtype dtype, double value);

/* false: it differs, `message` says how. */
bool ops_agrees(const ops_case *c, const egi_kernel *kernel, char *message, size_t size);
/* The kernel of the case's operator on the tested device must agree, and the operator's body where it has one. */
void ops_check(const ops_case *c);
/* MaskedAttention over a cache (support_cache.c). */
void ops_check_cached_attention(void **state);
/* support_device.c. 77 where the device cannot be had, which is said; else 0. */
int ops_probe_device(void);
eg_status ops_open_device(ops_environment *environment);
void ops_close_device(ops_environment *environment);
void ops_report_device(const ops_environment *environment);
/* Host memory that a call's operands lie in. */
typedef struct ops_block {
  uint8_t *memory;
  size_t size_bytes;
} ops_block;
/* Runs the kernel on copies of the blocks and of the workspace on the device, and brings all of them back. */
eg_status ops_run_on_device(const ops_environment *environment, const egi_kernel *kernel, const egi_kernel_call *call,
                            const ops_block *blocks, unsigned n_blocks, const ops_block *workspace);
/* The kernel of the tested backend; NULL, noted for the report, where there is none. */
const egi_kernel *ops_find_kernel(ops_environment *environment, egi_op op);
/* Sets the expected outputs to what the CPU's kernel makes of the inputs; false when it does not take them. */
bool ops_run_on_host(ops_case *c);
/* Sets the types of outputs to those that follow from the inputs' types; false when they contradict each other. */
bool ops_infer_outputs(ops_case *c);
/* support_halves.c: the same with activations in bf16 and f16, for operators that take them. */
bool ops_agrees_in_halves(const ops_case *c, const egi_kernel *kernel, char *message, size_t size);
/* What ops_check() asks of a body (support_bodies.c). */
void ops_check_body(const ops_case *c);
/* prepare must refuse the case with `status`. */
void ops_check_refused(const ops_case *c, eg_status status);

/* Central differences of an objective with respect to each value of a tensor, to check a reference gradient with: fails
 * the test where they differ by more than 1e-6 (absolute and relative). */
void ops_check_gradient(ops_tensor *variable, const double *gradient, double (*objective)(const void *context),
                        const void *context);

/* Row-major index of `linear` over dims, broadcast from a tensor's own dims as numpy does. */
int64_t ops_broadcast_index(const ops_tensor *tensor, int rank, const int64_t *dims, int64_t linear);

#define CASE(symbol, function) void function(void **state, egi_op op);
#include "cases.def"
#undef CASE

#endif
