/* Conformance cases of LinearAttention and its gradient: the recurrence written out in doubles, the gradient by central
 * differences of it. */
#include "support_ops.h"

#include <math.h>

enum { BATCH = 2, STEPS = 3, Q_HEADS = 4, HEADS = 2, DK = 3, DV = 2 };

/* What the recurrence reads: query, key, value, past, decay for each head, beta for each head. */
typedef struct recurrence {
  const double *in[6];
  const double *weights; /* of the result's elements, for the gradient */
} recurrence;

static void run(const recurrence *r, double *y, double *last) {
  for (int b = 0; b < BATCH; b++)
    for (int h = 0; h < HEADS; h++) {
      double s[DK][DV];
      memcpy(s, r->in[3] + (b * HEADS + h) * DK * DV, sizeof s);
      for (int t = 0; t < STEPS; t++) {
        const double *k = r->in[1] + ((b * STEPS + t) * HEADS + h) * DK;
        const double *v = r->in[2] + ((b * STEPS + t) * HEADS + h) * DV;
        double a = exp(r->in[4][(b * STEPS + t) * HEADS + h]), beta = r->in[5][(b * STEPS + t) * HEADS + h];
        for (int j = 0; j < DV; j++) {
          double u = v[j];
          for (int i = 0; i < DK; i++) u -= a * s[i][j] * k[i];
          for (int i = 0; i < DK; i++) s[i][j] = a * s[i][j] + beta * k[i] * u;
        }
        for (int q = 2 * h; q < 2 * h + 2; q++)
          for (int j = 0; j < DV; j++) {
            double *out = &y[((b * STEPS + t) * Q_HEADS + q) * DV + j];
            *out = 0.0;
            for (int i = 0; i < DK; i++) *out += r->in[0][((b * STEPS + t) * Q_HEADS + q) * DK + i] * s[i][j] * 0.5;
          }
      }
      memcpy(last + (b * HEADS + h) * DK * DV, s, sizeof s);
    }
}

static double objective(const void *context) {
  const recurrence *r = context;
  double y[BATCH * STEPS * Q_HEADS * DV], last[BATCH * HEADS * DK * DV], sum = 0.0;
  run(r, y, last);
  for (size_t i = 0; i < EGI_COUNT(y); i++) sum += r->weights[i] * y[i];
  return sum;
}

static void add_inputs(ops_case *c, eg_dtype dtype, recurrence *r) {
  static const int64_t dims[6][4] = {{BATCH, STEPS, Q_HEADS * DK}, {BATCH, STEPS, HEADS * DK},
                                     {BATCH, STEPS, HEADS * DV},   {BATCH, HEADS, DK, DV},
                                     {BATCH, STEPS, HEADS},        {BATCH, STEPS, HEADS}};
  for (unsigned i = 0; i < 6; i++) {
    ops_tensor *in = ops_add_input(c, dtype, i == 3 ? 4 : 3, dims[i]);
    ops_fill_uniform(in, -1.0, 1.0, i + 1);
    r->in[i] = in->values;
  }
  ops_add_attribute(c, egi_attribute_int("q_num_heads", Q_HEADS));
  ops_add_attribute(c, egi_attribute_int("kv_num_heads", HEADS));
  ops_add_attribute(c, egi_attribute_float("scale", 0.5f));
  c->absolute += dtype == EG_DTYPE_F64 ? 1e-6 : dtype == EG_DTYPE_F32 ? 1e-5 : 2e-3;
}

void ops_case_linear_attention(void **state, egi_op op) {
  static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    ops_case c;
    recurrence r = {.weights = NULL};
    ops_begin(&c, state, op, types[t]);
    add_inputs(&c, types[t], &r);
    ops_tensor *y = ops_add_output(&c, types[t], 3, (int64_t[]){BATCH, STEPS, Q_HEADS * DV});
    ops_tensor *last = ops_add_output(&c, types[t], 4, (int64_t[]){BATCH, HEADS, DK, DV});
    run(&r, y->values, last->values);
    ops_check(&c);
    ops_end(&c);
  }
}

void ops_case_linear_attention_grad(void **state, egi_op op) {
  static const eg_dtype types[] = {EG_DTYPE_F64, EG_DTYPE_F32};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    ops_case c;
    recurrence r = {.weights = NULL};
    ops_begin(&c, state, op, types[t]);
    add_inputs(&c, types[t], &r);
    ops_tensor *dy = ops_add_input(&c, types[t], 3, (int64_t[]){BATCH, STEPS, Q_HEADS * DV});
    ops_fill_uniform(dy, -1.0, 1.0, 9);
    r.weights = dy->values;
    for (unsigned i = 0; i < 6; i++) {
      ops_tensor *in = &c.inputs[i], *gradient = ops_add_output(&c, types[t], in->rank, in->dims);
      for (int64_t k = 0; k < ops_count(in); k++) {
        double x = in->values[k], h = 1e-5;
        in->values[k] = x + h;
        double above = objective(&r);
        in->values[k] = x - h;
        double below = objective(&r);
        in->values[k] = x;
        gradient->values[k] = (above - below) / (2.0 * h);
      }
    }
    ops_check(&c);
    ops_end(&c);
  }
}
