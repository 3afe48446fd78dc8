/* Conformance cases of Accumulate, GradientNorm and AdamW, in double, in the order of operations that PyTorch states.
 */
#include "support_ops.h"

#include <math.h>

static const int64_t sizes[] = {0, 1, 63, 65535, 65536, 65537};

/* The step state's bytes as a U8 tensor. */
static void add_step(ops_case *c, const egi_step_state *step) {
  uint8_t bytes[sizeof *step];
  memcpy(bytes, step, sizeof bytes);
  ops_tensor *tensor = ops_add_input(c, EG_DTYPE_U8, 1, (const int64_t[]){(int64_t)sizeof bytes});
  for (size_t i = 0; i < sizeof bytes; i++) tensor->values[i] = bytes[i];
}

static void check_accumulate(void **state, int64_t size, int has_gradients) {
  ops_case c;
  ops_begin(&c, state, EGI_OP_Accumulate, EG_DTYPE_F32);
  const int64_t dims[2] = {size, size > 100 ? 1 : 3};
  ops_tensor *sum = ops_add_input(&c, EG_DTYPE_F32, 2, dims), *gradient = ops_add_input(&c, EG_DTYPE_F32, 2, dims);
  add_step(&c, &(const egi_step_state){.has_gradients = has_gradients});
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_F32, 2, dims);
  ops_fill_uniform(sum, -1, 1, 1);
  ops_fill_uniform(gradient, -1, 1, 2);
  for (int64_t i = 0; i < ops_count(sum); i++) {
    if (!has_gradients) sum->values[i] = (double)NAN; /* what was there must not matter */
    out->values[i] = gradient->values[i] + (has_gradients ? sum->values[i] : 0);
  }
  c.absolute = 1e-7;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_store_state(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(sizes); i++) {
    ops_case c;
    ops_begin(&c, state, op, EG_DTYPE_F32);
    ops_tensor *before = ops_add_input(&c, EG_DTYPE_F32, 1, &sizes[i]);
    ops_tensor *x = ops_add_input(&c, EG_DTYPE_F32, 1, &sizes[i]);
    ops_tensor *after = ops_add_output(&c, EG_DTYPE_F32, 1, &sizes[i]);
    ops_fill_uniform(x, -1, 1, 2);
    for (int64_t k = 0; k < ops_count(x); k++) {
      before->values[k] = (double)NAN; /* what was there must not matter */
      after->values[k] = x->values[k];
    }
    c.absolute = c.relative = 0.0;
    ops_check(&c);
    ops_end(&c);
  }
}

void ops_case_accumulate(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(sizes); i++)
    for (int has = 0; has < 2; has++) check_accumulate(state, sizes[i], has);
}

void ops_case_gradient_norm(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < EGI_COUNT(sizes); i++) {
    ops_case c;
    double sum = 0;
    ops_begin(&c, state, EGI_OP_GradientNorm, EG_DTYPE_F32);
    ops_tensor *gradients = ops_add_input(&c, EG_DTYPE_F32, 1, &sizes[i]);
    add_step(&c, &(const egi_step_state){.inverse_targets = 0.125f});
    ops_tensor *out = ops_add_output(&c, EG_DTYPE_F32, 0, NULL);
    ops_fill_uniform(gradients, -1, 1, i);
    for (int64_t k = 0; k < sizes[i]; k++) sum += gradients->values[k] * gradients->values[k];
    out->values[0] = sqrt(sum) * 0.125;
    ops_check(&c);
    if (sizes[i] > 0) {
      gradients->values[sizes[i] - 1] = out->values[0] = (double)NAN;
      ops_check(&c);
    }
    ops_end(&c);
  }
}

/* One element of torch.optim.AdamW after clip_grad_norm_; the moments are written to out[1] and out[2]. */
static void adamw(const egi_step_state *s, const double in[4], double factor, const double segment[2], double out[3]) {
  double g = in[1] * factor, rate = (double)s->learning_rate * segment[1];
  double p = in[0] * (1 - rate * (double)s->weight_decay * segment[0]);
  double m = (1 - (double)s->rest1) * in[2] + (double)s->rest1 * g;
  double v = (double)s->beta2 * in[3] + (double)s->rest2 * g * g;
  out[0] = p - rate / (double)s->correction1 * m / (sqrt(v) / sqrt((double)s->correction2) + (double)s->epsilon);
  out[1] = m;
  out[2] = v;
}

/* In 8 bits parameters this small have floats for moments; codes are held to bitsandbytes' in train/test_optimizer. */
static void check_adamw(void **state, egi_op op, int64_t size, float clip, float norm, bool has_segments) {
  ops_case c;
  ops_begin(&c, state, op, EG_DTYPE_F32);
  const egi_step_state step = {.step = 2,
                               .learning_rate = 0.01f,
                               .weight_decay = 0.1f,
                               .beta1 = 0.9f,
                               .beta2 = 0.999f,
                               .epsilon = 1e-8f,
                               .correction1 = 0.19f,
                               .correction2 = 0.001999f,
                               .clip = clip,
                               .inverse_targets = 0.5f,
                               .has_gradients = 1,
                               .rest1 = 0.1f,
                               .rest2 = 0.001f};
  ops_tensor *in[4];
  for (int i = 0; i < 4; i++) {
    in[i] = ops_add_input(&c, EG_DTYPE_F32, 1, &size);
    ops_fill_uniform(in[i], i == 3 ? 0 : -1, 1, (uint64_t)i + 3);
  }
  add_step(&c, &step);
  ops_tensor *norm_tensor = ops_add_input(&c, EG_DTYPE_F32, 0, NULL);
  norm_tensor->values[0] = (double)norm;
  ops_tensor *out = ops_add_output(&c, EG_DTYPE_F32, 1, &size);
  const int64_t starts[3] = {0, size / 3, size - size / 4};
  static const float decays[3] = {1, 0, 0.5f}, rates[3] = {1, 2, 1};
  if (has_segments) {
    ops_add_attribute(&c, egi_attribute_ints("starts", starts, 3));
    egi_attribute floats = {.name = "decays", .kind = EGI_ATTRIBUTE_FLOATS, .count = 3};
    floats.u.floats = decays;
    ops_add_attribute(&c, floats);
    floats.name = "rates";
    floats.u.floats = rates;
    ops_add_attribute(&c, floats);
  }
  const int64_t sizes_of[3] = {starts[1], starts[2] - starts[1], size - starts[2]};
  if (op == EGI_OP_AdamW8bit) {
    ops_add_attribute(&c, egi_attribute_ints("sizes", sizes_of, 3));
    ops_add_attribute(&c, egi_attribute_ints("places", starts, 3));
    ops_add_attribute(&c, egi_attribute_int("smallest", size + 1));
  }
  double factor = 0.5, *moments = EGI_NEW(&c.arena, double, (size_t)size * 2 + 1);
  assert_non_null(moments);
  if (clip > 0 && clip / (norm + 1e-6f) < 1) factor *= (double)clip / ((double)norm + 1e-6);
  for (int64_t i = 0; i < size; i++) {
    int part = !has_segments ? 0 : i >= starts[2] ? 2 : i >= starts[1] ? 1 : 0;
    const double values[4] = {in[0]->values[i], in[1]->values[i], in[2]->values[i], in[3]->values[i]};
    double after[3];
    adamw(&step, values, factor, (const double[2]){(double)decays[part], (double)rates[part]}, after);
    out->values[i] = after[0];
    moments[i] = after[1];
    moments[size + i] = after[2];
  }
  c.updated[2] = moments;
  c.updated[3] = moments + size;
  c.absolute = 2e-6;
  ops_check(&c);
  ops_end(&c);
}

void ops_case_adamw(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(sizes); i++) {
    if (op == EGI_OP_AdamW) check_adamw(state, op, sizes[i], 0, 7, false);
    check_adamw(state, op, sizes[i], 1, 7, true);
    check_adamw(state, op, sizes[i], 1, 0.5f, true);
  }
}
