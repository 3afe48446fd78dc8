/* Environment, cases and numbers of the conformance harness; see support_ops.h. Running them: support_run.c. */
#include "support_ops.h"

#include <math.h>

/* ---- environment ---------------------------------------------------------------------------------------------- */

int ops_set_up(void **state) {
  ops_environment *environment = calloc(1, sizeof *environment);
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  options.n_threads = 3; /* workspaces are sized for as many workers as the larger pool has */
  if (environment == NULL || eg_context_create(&options, &environment->ctx) != EG_OK) return 1;
  *state = environment;
  return egi_pool_create(environment->ctx, 1, &environment->pools[0]) != EG_OK ||
         egi_pool_create(environment->ctx, 3, &environment->pools[1]) != EG_OK || ops_open_device(environment) != EG_OK;
}

int ops_tear_down(void **state) {
  ops_environment *environment = *state;
  ops_report_device(environment);
  ops_close_device(environment);
  for (int i = 0; i < 2; i++) egi_pool_destroy(environment->ctx, environment->pools[i]);
  eg_context_destroy(environment->ctx);
  free(environment);
  return 0;
}

/* ---- cases ---------------------------------------------------------------------------------------------------- */

static double tolerance_of(eg_dtype dtype) {
  switch (dtype) {
  case EG_DTYPE_F64:
    return 1e-13;
  case EG_DTYPE_F32:
    return 5e-7;
  case EG_DTYPE_F16:
    return 0x1p-10;
  case EG_DTYPE_BF16:
    return 0x1p-7;
  default:
    return 0.0;
  }
}

void ops_begin(ops_case *c, void **state, egi_op op, eg_dtype dtype) {
  *c = (ops_case){.environment = *state, .op = op, .relative = tolerance_of(dtype)};
  egi_arena_init(&c->arena, c->environment->ctx, EGI_PURPOSE_DATA);
}

void ops_end(ops_case *c) {
  egi_arena_clear(&c->arena);
}

void ops_add_attribute(ops_case *c, egi_attribute attribute) {
  assert_true(c->n_attributes < EGI_COUNT(c->attributes));
  c->attributes[c->n_attributes++] = attribute;
}

void ops_add_tensor_attribute(ops_case *c, const char *name, const ops_tensor *tensor) {
  /* The tensor travels in the pointer until the weight is made. */
  egi_attribute attribute = {.name = name, .kind = EGI_ATTRIBUTE_TENSOR};
  attribute.u.s = (const char *)(const void *)tensor;
  ops_add_attribute(c, attribute);
}

int64_t ops_count(const ops_tensor *tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor->rank; i++) count *= tensor->dims[i];
  return count;
}

static ops_tensor *add_operand(ops_case *c, ops_tensor *list, unsigned *count, const ops_tensor *shape) {
  assert_true(*count < OPS_MAX_OPERANDS);
  ops_tensor *tensor = &list[(*count)++];
  *tensor = *shape;
  tensor->values = EGI_NEW(&c->arena, double, (size_t)ops_count(tensor) + 1);
  assert_non_null(tensor->values);
  return tensor;
}

ops_tensor *ops_add_input(ops_case *c, eg_dtype dtype, int rank, const int64_t *dims) {
  ops_tensor shape = {.dtype = dtype, .rank = rank};
  for (int i = 0; i < rank; i++) shape.dims[i] = dims[i];
  return add_operand(c, c->inputs, &c->n_inputs, &shape);
}

ops_tensor *ops_add_output(ops_case *c, eg_dtype dtype, int rank, const int64_t *dims) {
  ops_tensor shape = {.dtype = dtype, .rank = rank};
  for (int i = 0; i < rank; i++) shape.dims[i] = dims[i];
  return add_operand(c, c->outputs, &c->n_outputs, &shape);
}

ops_tensor *ops_add_integers(ops_case *c, const int64_t *values, int64_t count) {
  ops_tensor *tensor = ops_add_input(c, EG_DTYPE_I64, 1, &count);
  for (int64_t i = 0; i < count; i++) tensor->values[i] = (double)values[i];
  return tensor;
}

void ops_add_absent(ops_case *c) {
  c->inputs[c->n_inputs++] = (ops_tensor){.dtype = EG_DTYPE_UNDEFINED};
}

void ops_add_absent_output(ops_case *c) {
  c->outputs[c->n_outputs++] = (ops_tensor){.dtype = EG_DTYPE_UNDEFINED};
}

/* ---- numbers -------------------------------------------------------------------------------------------------- */

void ops_store(eg_dtype dtype, void *target, double value) {
  union {
    float f32;
    double f64;
    uint16_t half;
    int64_t integer;
    uint64_t natural;
  } u;
  u.natural = 0;
  switch (dtype) {
  case EG_DTYPE_F32:
    u.f32 = (float)value;
    break;
  case EG_DTYPE_F64:
    u.f64 = value;
    break;
  case EG_DTYPE_F16:
    u.half = egi_f32_to_f16((float)value);
    break;
  case EG_DTYPE_BF16:
    u.half = egi_f32_to_bf16((float)value);
    break;
  case EG_DTYPE_U64:
    u.natural = (uint64_t)value;
    break;
  default:
    u.integer = (int64_t)value;
    break;
  }
  memcpy(target, &u, egi_dtype_bits(dtype) / 8); /* little-endian, as everywhere in engraft */
}

#define LOAD(dtype, T)                    \
  case dtype: {                           \
    T value;                              \
    memcpy(&value, source, sizeof value); \
    return (double)value;                 \
  }

double ops_load(eg_dtype dtype, const void *source) {
  uint16_t half;
  memcpy(&half, source, egi_dtype_bits(dtype) >= 16 ? 2 : 0);
  switch (dtype) {
    LOAD(EG_DTYPE_F32, float)
    LOAD(EG_DTYPE_F64, double)
    LOAD(EG_DTYPE_U8, uint8_t)
    LOAD(EG_DTYPE_BOOL, uint8_t)
    LOAD(EG_DTYPE_I8, int8_t)
    LOAD(EG_DTYPE_U16, uint16_t)
    LOAD(EG_DTYPE_I16, int16_t)
    LOAD(EG_DTYPE_U32, uint32_t)
    LOAD(EG_DTYPE_I32, int32_t)
    LOAD(EG_DTYPE_U64, uint64_t)
    LOAD(EG_DTYPE_I64, int64_t)
  case EG_DTYPE_F16:
    return (double)egi_f16_to_f32(half);
  case EG_DTYPE_BF16:
    return (double)egi_bf16_to_f32(half);
  default:
    fail_msg("type %d is not one of the harness", (int)dtype);
    return 0.0;
  }
}

double ops_round(eg_dtype dtype, double value) {
  char element[8];
  ops_store(dtype, element, value);
  return ops_load(dtype, element);
}

void ops_fill_uniform(ops_tensor *tensor, double low, double high, uint64_t seed) {
  for (int64_t i = 0; i < ops_count(tensor); i++) {
    double value = low + (high - low) * egi_random_uniform(seed, (uint64_t)tensor->dtype, (uint64_t)i);
    if (!egi_dtype_is_float(tensor->dtype)) value = floor(value + 0.5);
    tensor->values[i] = ops_round(tensor->dtype, value);
  }
}

void ops_fill_special(ops_tensor *tensor) {
  static const double f32[] = {HUGE_VAL, -HUGE_VAL, (double)NAN,           -0.0,  0.0,
                               1e-40,    -1e-40,    3.4028234663852886e38, 1e-30, -1e30};
  for (size_t i = 0; egi_dtype_is_float(tensor->dtype) && i < EGI_COUNT(f32) && (int64_t)i < ops_count(tensor); i++) {
    tensor->values[i] = ops_round(tensor->dtype, f32[i]);
  }
}

int64_t ops_broadcast_index(const ops_tensor *tensor, int rank, const int64_t *dims, int64_t linear) {
  int64_t index = 0, step = 1;
  for (int i = rank - 1; i >= rank - tensor->rank; i--) {
    int64_t own = tensor->dims[i - (rank - tensor->rank)];
    if (own != 1) index += linear % dims[i] * step;
    step *= own;
    linear /= dims[i];
  }
  return index;
}
