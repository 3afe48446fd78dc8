/* The cases of f32 again with activations in bf16 and f16, for devices: inputs are rounded first, and the CPU's kernel,
 * which the same case has been held to, says in f32 what must come out of them. */
#include "support_ops.h"

#include <math.h>

typedef enum accuracy { ACCURACY_NONE, ACCURACY_ROUNDED, ACCURACY_SUMMED } accuracy;

typedef struct halves {
  uint32_t kept, loose;
  accuracy accuracy;
} halves;

static const halves table[EGI_OP_COUNT] = {
#define HALVES(symbol, kept, loose, accuracy) [EGI_OP_##symbol] = {kept, loose, ACCURACY_##accuracy},
#include "halves.def"
#undef HALVES
};

/* Quantised experts have operands that are read as they are, at places that depend on the storage. */
static bool is_plain(const ops_case *c) {
  for (unsigned i = 0; i < c->n_attributes; i++)
    if (strcmp(c->attributes[i].name, "storage") == 0 &&
        (c->op == EGI_OP_RaggedLinear || c->op == EGI_OP_RaggedLinearGrad))
      return false;
  for (unsigned i = 0; i < c->n_inputs; i++)
    if (c->updated[i] != NULL) return false;
  return c->expected_status == EG_OK;
}

static double *copy_values(ops_case *c, const ops_tensor *tensor) {
  double *values = EGI_NEW(&c->arena, double, (size_t)ops_count(tensor) + 1);
  assert_non_null(values);
  for (int64_t i = 0; i < ops_count(tensor); i++) values[i] = tensor->values[i];
  return values;
}

/* Rounds what becomes narrow; false when nothing does. */
static bool round_inputs(ops_case *c, eg_dtype dtype, uint32_t kept, bool *is_narrow) {
  bool is_changed = false;
  for (unsigned i = 0; i < c->n_inputs; i++) {
    ops_tensor *input = &c->inputs[i];
    is_narrow[i] = input->dtype == EG_DTYPE_F32 && (i >= 32 || (kept >> i & 1) == 0);
    if (!is_narrow[i]) continue;
    is_changed = true;
    input->values = copy_values(c, input);
    for (int64_t k = 0; k < ops_count(input); k++) input->values[k] = ops_round(dtype, input->values[k]);
  }
  return is_changed;
}

static void set_tolerances(ops_case *c, eg_dtype dtype) {
  double step = dtype == EG_DTYPE_BF16 ? 0x1p-7 : 0x1p-10, largest = 0.0;
  for (unsigned i = 0; i < c->n_outputs; i++)
    for (int64_t k = 0; c->outputs[i].dtype != EG_DTYPE_UNDEFINED && k < ops_count(&c->outputs[i]); k++)
      if (isfinite(c->outputs[i].values[k])) largest = fmax(largest, fabs(c->outputs[i].values[k]));
  c->relative = fmax(c->relative, 2.0 * step);
  c->absolute = fmax(c->absolute, dtype == EG_DTYPE_F16 ? 0x1p-23 : 0x1p-126);
  if (table[c->op].accuracy == ACCURACY_SUMMED) c->absolute = fmax(c->absolute, 2.0 * step * largest);
}

static bool agrees_with(const ops_case *original, const egi_kernel *kernel, eg_dtype dtype, uint32_t kept,
                        char *message, size_t size) {
  ops_case c = *original;
  bool is_narrow[OPS_MAX_OPERANDS];
  egi_arena_init(&c.arena, c.environment->ctx, EGI_PURPOSE_DATA);
  bool agrees = true;
  if (round_inputs(&c, dtype, kept, is_narrow)) {
    for (unsigned i = 0; i < c.n_outputs; i++)
      if (c.outputs[i].dtype != EG_DTYPE_UNDEFINED) c.outputs[i].values = copy_values(&c, &c.outputs[i]);
    bool is_known = ops_run_on_host(&c);
    for (unsigned i = 0; i < c.n_inputs; i++)
      if (is_narrow[i]) c.inputs[i].dtype = dtype;
    if (is_known && ops_infer_outputs(&c)) {
      set_tolerances(&c, dtype);
      agrees = ops_agrees(&c, kernel, message, size);
    }
  }
  egi_arena_clear(&c.arena);
  return agrees;
}

bool ops_agrees_in_halves(const ops_case *c, const egi_kernel *kernel, char *message, size_t size) {
  static const eg_dtype dtypes[] = {EG_DTYPE_BF16, EG_DTYPE_F16};
  const halves *row = &table[c->op];
  if (row->accuracy == ACCURACY_NONE || !is_plain(c)) return true;
  for (size_t i = 0; i < EGI_COUNT(dtypes); i++) {
    if (!agrees_with(c, kernel, dtypes[i], row->kept, message, size)) return false;
    if (row->loose != 0 && !agrees_with(c, kernel, dtypes[i], row->kept | row->loose, message, size)) return false;
  }
  return true;
}
