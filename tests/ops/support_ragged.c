/* Conformance cases of what dispatch_moe makes: routing, moves of rows and ragged products, their sums written out in
 * doubles. Experts without rows, one that has all, no rows at all. Gradients by the rules are held against differences
 * in tests/passes/test_gradients.c. */
#include "base/blockwise.h"
#include "support_ops.h"

#include <math.h>

#include "graph/ragged.h"

static const eg_dtype types[] = {EG_DTYPE_F64, EG_DTYPE_F32, EG_DTYPE_BF16, EG_DTYPE_F16};

/* How many of the types products are tried in: those of 16 bits are for devices. */
static size_t count_types(void *const *state) {
  return ((const ops_environment *)*state)->device != NULL ? 4 : 2;
}

/* Allowed errors: `wide` in f32, `narrow` in bf16. */
static void add_tolerance(ops_case *c, eg_dtype dtype, double widest, double wide, double narrow) {
  double factor = dtype == EG_DTYPE_F16 ? 0.125 : 1.0;
  bool is_narrow = dtype == EG_DTYPE_F16 || dtype == EG_DTYPE_BF16;
  c->absolute += is_narrow ? narrow * factor : dtype == EG_DTYPE_F32 ? wide : widest;
  if (is_narrow) c->relative += 0.01 * factor;
}

/* ---- routing -------------------------------------------------------------------------------------------------- */

typedef struct route_setting {
  int64_t tokens, n_experts, top_k;
  bool is_sigmoid, is_after, is_normalised, has_correction, is_flooded;
  double scale;
} route_setting;

static const route_setting routes[] = {
    {5, 4, 2, .is_normalised = true},
    {7, 8, 3, .is_sigmoid = true, .is_normalised = true, .has_correction = true, .scale = 2.5},
    {6, 4, 2, .is_after = true},
    {6, 5, 2, .is_after = true, .is_sigmoid = true},
    {67, 8, 1, .is_flooded = true},
    {130, 8, 2, .is_flooded = true},
    {1, 1, 1, .is_after = false},
    {0, 4, 2, .is_after = false},
};

/* Scores of all experts, the choice, and its weights with what they are divided by. */
static void choose(const route_setting *s, const double *logits, const double *correction, double *scores,
                   int64_t *chosen, double *weights) {
  double sum = 0.0;
  bool is_taken[8] = {false};
  for (int64_t e = 0; e < s->n_experts; e++) sum += exp(logits[e]);
  for (int64_t e = 0; e < s->n_experts; e++) {
    scores[e] = s->is_sigmoid ? 1.0 / (1.0 + exp(-logits[e])) : exp(logits[e]) / sum;
    if (s->is_after) scores[e] = logits[e];
  }
  for (int64_t j = 0; j < s->top_k; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < s->n_experts; e++) {
      double own = scores[e] + (correction ? correction[e] : 0.0);
      if (!is_taken[e] && (best < 0 || own > scores[best] + (correction ? correction[best] : 0.0))) best = e;
    }
    is_taken[best] = true;
    chosen[j] = best;
    weights[j] = scores[best];
  }
  sum = 0.0;
  for (int64_t j = 0; j < s->top_k && s->is_after; j++) {
    weights[j] = s->is_sigmoid ? 1.0 / (1.0 + exp(-weights[j])) : exp(weights[j]);
    sum += weights[j];
  }
  for (int64_t j = 0; j < s->top_k && s->is_after && !s->is_sigmoid; j++) weights[j] /= sum;
}

static void weigh(const route_setting *s, double *weights) {
  double sum = 0.0, scale = s->scale > 0.0 ? s->scale : 1.0;
  for (int64_t j = 0; j < s->top_k; j++) sum += weights[j];
  for (int64_t j = 0; j < s->top_k; j++) weights[j] *= scale / (s->is_normalised ? sum : 1.0);
}

static void begin_route(ops_case *c, void **state, egi_op op, const route_setting *s, eg_dtype dtype) {
  ops_begin(c, state, op, dtype);
  ops_add_attribute(c, egi_attribute_int("experts", s->n_experts));
  ops_add_attribute(c, egi_attribute_int("top_k", s->top_k));
  ops_add_attribute(c, egi_attribute_string("scoring", s->is_sigmoid ? "sigmoid" : "softmax"));
  ops_add_attribute(c, egi_attribute_string("order", s->is_after ? "after" : "before"));
  ops_add_attribute(c, egi_attribute_int("normalise", s->is_normalised));
  if (s->scale > 0.0) ops_add_attribute(c, egi_attribute_float("routed_scale", (float)s->scale));
  ops_tensor *logits = ops_add_input(c, dtype, 2, (int64_t[]){s->tokens, s->n_experts});
  ops_fill_uniform(logits, -3.0, 3.0, 5);
  for (int64_t i = 0; i < ops_count(logits) && s->is_flooded; i++)
    logits->values[i] = i % s->n_experts == 3 ? 2.0 : -1.0 - 0.0625 * (double)(i % s->n_experts);
  for (int64_t i = 0; i < ops_count(logits) && s->is_flooded; i += 3) logits->values[i] -= 0.125;
  c->absolute += dtype == EG_DTYPE_F64 ? 1e-7 : 1e-5;
}

typedef struct pairs {
  int64_t chosen[512];
  double weights[512];
  int64_t rows[512]; /* of each pair */
} pairs;

static void route_all(const route_setting *s, const double *logits, const double *correction, pairs *out) {
  double scores[8];
  int64_t next = 0;
  for (int64_t t = 0; t < s->tokens; t++) {
    double *weights = out->weights + t * s->top_k;
    choose(s, logits + t * s->n_experts, correction, scores, out->chosen + t * s->top_k, weights);
    weigh(s, weights);
  }
  for (int64_t e = 0; e < s->n_experts; e++)
    for (int64_t i = 0; i < s->tokens * s->top_k; i++)
      if (out->chosen[i] == e) out->rows[i] = next++;
}

void ops_case_route(void **state, egi_op op) {
  static pairs all;
  for (size_t n = 0; n < EGI_COUNT(routes) * 2; n++) {
    const route_setting *s = &routes[n / 2];
    ops_case c;
    int64_t n_rows = s->tokens * s->top_k, n_ends = s->n_experts + 1;
    begin_route(&c, state, op, s, types[n % 2]);
    ops_tensor *correction = s->has_correction ? ops_add_input(&c, types[n % 2], 1, &s->n_experts) : NULL, *out[5];
    if (correction != NULL) ops_fill_uniform(correction, 0.0, 0.5, 3);
    for (int i = 0; i < 3; i++) out[i] = ops_add_output(&c, EG_DTYPE_I32, 1, &n_rows);
    out[3] = ops_add_output(&c, EG_DTYPE_I32, 1, &n_ends);
    out[4] = ops_add_output(&c, types[n % 2], 1, &n_rows);
    route_all(s, c.inputs[0].values, correction ? correction->values : NULL, &all);
    for (int64_t i = 0; i < n_rows; i++) {
      out[0]->values[all.rows[i]] = (double)all.chosen[i];
      out[1]->values[all.rows[i]] = (double)(i / s->top_k);
      out[2]->values[i] = (double)all.rows[i];
      out[4]->values[all.rows[i]] = all.weights[i];
      for (int64_t e = all.chosen[i] + 1; e < n_ends; e++) out[3]->values[e] += 1.0;
    }
    ops_check(&c);
    ops_end(&c);
  }
}

/* Central differences of Σ dw · w, the choice as it is. */
void ops_case_route_grad(void **state, egi_op op) {
  static pairs all, moved;
  for (size_t n = 0; n < EGI_COUNT(routes) * 2; n++) {
    const route_setting *s = &routes[n / 2];
    ops_case c;
    int64_t n_rows = s->tokens * s->top_k;
    if (s->has_correction) continue; /* it is no operand here */
    begin_route(&c, state, op, s, types[n % 2]);
    ops_tensor *expert = ops_add_input(&c, EG_DTYPE_I32, 1, &n_rows);
    ops_tensor *inverse = ops_add_input(&c, EG_DTYPE_I32, 1, &n_rows);
    ops_tensor *dw = ops_add_input(&c, types[n % 2], 1, &n_rows), *logits = &c.inputs[0];
    ops_fill_uniform(dw, -1.0, 1.0, 9);
    ops_tensor *out = ops_add_output(&c, types[n % 2], 2, logits->dims);
    route_all(s, logits->values, NULL, &all);
    for (int64_t i = 0; i < n_rows; i++) {
      expert->values[all.rows[i]] = (double)all.chosen[i];
      inverse->values[i] = (double)all.rows[i];
    }
    for (int64_t k = 0; k < ops_count(logits); k++) {
      double x = logits->values[k], sums[2] = {0.0, 0.0};
      for (int side = 0; side < 2; side++) {
        logits->values[k] = x + (side == 0 ? 1e-5 : -1e-5);
        route_all(s, logits->values, NULL, &moved);
        for (int64_t i = 0; i < n_rows; i++) sums[side] += dw->values[all.rows[i]] * moved.weights[i];
      }
      logits->values[k] = x;
      out->values[k] = (sums[0] - sums[1]) / 2e-5;
    }
    ops_check(&c);
    ops_end(&c);
  }
}

/* ---- rows ----------------------------------------------------------------------------------------------------- */

static const int64_t moves[][3] = {{5, 2, 3}, {67, 1, 17}, {33, 4, 1},
                                   {0, 2, 3}, {1, 3, 200}, {9, 3, 64}}; /* T, k, H */

/* A permutation of the pairs, the same each time. */
static int64_t row_of(int64_t pair, int64_t n_rows) {
  int64_t step = 7;
  while (n_rows % step == 0) step += 2;
  return n_rows > 2 ? (pair * step + 1) % n_rows : pair;
}

static void check_move(void **state, egi_op op, const int64_t sizes[3], eg_dtype dtype) {
  ops_case c;
  int64_t tokens = sizes[0], k = sizes[1], width = sizes[2], n_rows = tokens * k;
  const int64_t wide[2] = {n_rows, width}, flat[3] = {1, tokens, width};
  bool is_combine = op == EGI_OP_Combine;
  ops_begin(&c, state, op, dtype);
  ops_tensor *in = ops_add_input(&c, dtype, is_combine ? 2 : 3, is_combine ? wide : flat);
  ops_fill_uniform(in, -2.0, 2.0, 4);
  ops_tensor *source = ops_add_input(&c, EG_DTYPE_I32, 1, &n_rows);
  ops_tensor *inverse = ops_add_input(&c, EG_DTYPE_I32, 1, &n_rows);
  if (is_combine) (void)ops_add_input(&c, dtype, 3, flat);
  ops_tensor *out = ops_add_output(&c, dtype, is_combine ? 3 : 2, is_combine ? flat : wide);
  for (int64_t i = 0; i < n_rows; i++) {
    int64_t row = row_of(i, n_rows);
    source->values[row] = (double)(i / k);
    inverse->values[i] = (double)row;
    for (int64_t h = 0; h < width; h++) {
      if (is_combine)
        out->values[i / k * width + h] += in->values[row * width + h];
      else
        out->values[row * width + h] = in->values[i / k * width + h];
    }
  }
  if (is_combine) add_tolerance(&c, dtype, 1e-12, 1e-5, 0.01);
  ops_check(&c);
  if (n_rows > 0) {
    (is_combine ? inverse : source)->values[0] = (double)n_rows;
    c.expected_status = EG_ERROR_DATA;
    ops_check(&c);
  }
  ops_end(&c);
}

void ops_case_dispatch(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(moves) * 2; i++) check_move(state, op, moves[i / 2], types[i % 2]);
}

void ops_case_combine(void **state, egi_op op) {
  for (size_t i = 0; i < EGI_COUNT(moves) * 2; i++) check_move(state, op, moves[i / 2], types[i % 2]);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

typedef struct ragged_setting {
  int64_t n, k;
  int64_t offsets[5]; /* of 4 experts */
  bool is_stacked, is_transposed, has_bias, has_weight, has_addend, is_loop;
  double alpha;
  int64_t bits, block;
  bool has_zeros;
  bool has_levels; /* storage bnb4: blocks of the flattened operand; has_zeros: scales are codes */
} ragged_setting;

static const ragged_setting products[] = {
    {5, 7, {0, 3, 3, 8, 9}, .is_stacked = true},
    {97, 40, {0, 0, 70, 70, 70}, .is_stacked = true, .has_bias = true, .is_loop = true},
    {8, 3, {0, 1, 2, 3, 4}, .has_bias = true, .has_weight = true, .has_addend = true, .alpha = 0.5},
    {6, 4, {0, 9, 9, 9, 9}, .is_stacked = true, .is_transposed = true, .has_addend = true, .alpha = 2.0},
    {6, 4, {0, 2, 5, 5, 9}, .is_stacked = true, .has_weight = true, .has_bias = true},
    {3, 200, {0, 513, 514, 514, 520}, .is_stacked = true, .has_addend = true, .has_bias = true},
    {4, 3, {0, 0, 0, 0, 0}, .is_stacked = true, .has_weight = true},
    {4, 8, {0, 3, 3, 5, 6}, .is_stacked = true, .bits = 4, .block = 2, .has_bias = true, .has_weight = true},
    {4, 8, {0, 3, 3, 5, 6}, .bits = 8, .has_zeros = true},
    {5, 6, {0, 3, 3, 5, 6}, .is_stacked = true, .bits = 4, .block = 32, .has_levels = true, .has_bias = true},
    {97, 40, {0, 3, 3, 5, 6}, .is_stacked = true, .bits = 4, .block = 32, .has_levels = true, .has_zeros = true},
    {7, 30, {0, 3, 3, 5, 6}, .bits = 4, .block = 32, .has_levels = true, .has_zeros = true, .has_weight = true},
    {70, 130, {0, 3, 3, 5, 6}, .bits = 4, .block = 64, .has_levels = true},
    {64, 128, {0, 70, 70, 200, 201}, .is_stacked = true},
    {128, 64, {0, 1, 66, 66, 130}, .is_stacked = true, .has_bias = true, .has_weight = true},
    {64, 72, {0, 0, 65, 65, 70}, .is_stacked = true, .is_transposed = true, .has_addend = true, .alpha = 2.0},
    {72, 16, {0, 33, 33, 70, 71}, .is_stacked = true, .has_addend = true, .alpha = 0.5},
    {24, 64, {0, 3, 40, 40, 41}, .has_bias = true, .has_weight = true},
    {64, 64, {0, 66, 66, 70, 90}, .is_stacked = true, .bits = 4, .block = 64, .has_levels = true, .has_bias = true},
    {40, 64, {0, 3, 3, 80, 81}, .is_stacked = true, .bits = 4, .block = 64, .has_levels = true, .has_zeros = true},
    {64, 72, {0, 3, 3, 80, 81}, .is_stacked = true, .bits = 4, .block = 64, .has_levels = true, .has_weight = true},
    {16, 32, {0, 3, 3, 80, 81}, .is_stacked = true, .bits = 4, .block = 8, .has_zeros = true, .has_bias = true},
    {100, 12, {0, 3, 3, 5, 6}, .is_stacked = true, .bits = 2, .block = 4, .has_zeros = true, .has_addend = true},
};

static int64_t blocks_of(const ragged_setting *s) {
  return s->block > 0 ? (s->k + s->block - 1) / s->block : 1;
}

/* One input an expert, or a stack; returns the first. */
static unsigned add_operand(ops_case *c, const ragged_setting *s, eg_dtype dtype, int rank, const int64_t *sizes) {
  unsigned first = c->n_inputs;
  int64_t dims[3] = {4, sizes[0], rank > 1 ? sizes[1] : 0};
  for (int i = 0; i < (s->is_stacked ? 1 : 4); i++) {
    ops_tensor *in = ops_add_input(c, dtype, s->is_stacked ? rank + 1 : rank, s->is_stacked ? dims : sizes);
    ops_fill_uniform(in, dtype == EG_DTYPE_U8 ? 0.0 : -1.0, dtype == EG_DTYPE_U8 ? 255.0 : 1.0, c->n_inputs);
  }
  return first;
}

static double operand_at(const ops_case *c, const ragged_setting *s, unsigned first, int64_t expert, int64_t index,
                         int64_t size) {
  return s->is_stacked ? c->inputs[first].values[expert * size + index]
                       : c->inputs[first + (unsigned)expert].values[index];
}

static double code_at(const ops_case *c, const ragged_setting *s, unsigned first, const int64_t at[3],
                      const int64_t size[2]) {
  int64_t bytes = (size[1] * s->bits + 7) / 8, bit = at[2] * s->bits;
  unsigned byte = (unsigned)operand_at(c, s, first, at[0], at[1] * bytes + bit / 8, size[0] * bytes);
  return (double)(byte >> (unsigned)(bit % 8) & ((1u << (unsigned)s->bits) - 1u));
}

typedef struct operands {
  unsigned weight, bias, scales, zeros;
} operands;

/* Operands of a list, one for each input of codes. */
static unsigned add_list(ops_case *c, const ragged_setting *s, eg_dtype dtype, int64_t count) {
  unsigned first = c->n_inputs;
  for (int i = 0; i < (s->is_stacked ? 1 : 4); i++) {
    ops_tensor *in = ops_add_input(c, dtype, 1, &count);
    ops_fill_uniform(in, dtype == EG_DTYPE_U8 ? 0.0 : 0.01, dtype == EG_DTYPE_U8 ? 255.0 : 0.3, c->n_inputs);
  }
  return first;
}

static int64_t flat_blocks(const ragged_setting *s) {
  return (s->n * s->k * (s->is_stacked ? 4 : 1) + s->block - 1) / s->block;
}

static double level_at(const ops_case *c, const ragged_setting *s, const operands *o, const int64_t at[3]) {
  unsigned input = s->is_stacked ? 0 : (unsigned)at[0];
  int64_t index = ((s->is_stacked ? at[0] * s->n : 0) + at[1]) * s->k + at[2], block = index / s->block;
  unsigned byte = (unsigned)c->inputs[o->weight + input].values[index / 2];
  double level = (double)egi_four_bit_levels(EGI_FOUR_BIT_NF4)[index % 2 == 0 ? byte >> 4 : byte & 15];
  double scale = c->inputs[o->scales + input].values[block];
  if (!s->has_zeros) return level * scale;
  const double *nested = c->inputs[o->zeros + input].values;
  return level * (nested[1 + (int)scale] * nested[EGI_NESTED_HEADER + block / EGI_NESTED_BLOCK] + nested[0]);
}

static double matrix_at(const ops_case *c, const ragged_setting *s, const operands *o, const int64_t at[3]) {
  int64_t blocks = blocks_of(s), b = s->block > 0 ? at[2] / s->block : 0;
  if (s->has_levels) return level_at(c, s, o, at);
  if (s->bits == 0)
    return operand_at(c, s, o->weight, at[0], s->is_transposed ? at[2] * s->n + at[1] : at[1] * s->k + at[2],
                      s->n * s->k);
  double zero = s->has_zeros ? code_at(c, s, o->zeros, (int64_t[]){at[0], at[1], b}, (int64_t[]){s->n, blocks})
                             : (double)(1 << (s->bits - 1));
  return (code_at(c, s, o->weight, at, (int64_t[]){s->n, s->k}) - zero) *
         operand_at(c, s, o->scales, at[0], at[1] * blocks + b, s->n * blocks);
}

static int64_t add_offsets(ops_case *c, const ragged_setting *s) {
  static const int64_t count = 5;
  ops_tensor *offsets = ops_add_input(c, EG_DTYPE_I32, 1, &count);
  for (int i = 0; i < 5; i++) offsets->values[i] = (double)s->offsets[i];
  return s->offsets[4];
}

static operands add_experts(ops_case *c, const ragged_setting *s, eg_dtype dtype) {
  const int64_t plain[2] = {s->is_transposed ? s->k : s->n, s->is_transposed ? s->n : s->k};
  const int64_t packed[2] = {s->n, (s->k * s->bits + 7) / 8}, blocks[2] = {s->n, blocks_of(s)};
  const int64_t zeros[2] = {s->n, (blocks_of(s) * s->bits + 7) / 8}, one = s->is_stacked ? 1 : 4;
  static int64_t roles[EGI_RAGGED_ROLES];
  operands o = {.weight = add_operand(c, s, s->bits > 0 ? EG_DTYPE_U8 : dtype, 2, s->bits > 0 ? packed : plain)};
  if (s->has_bias) o.bias = add_operand(c, s, dtype, 1, &s->n);
  if (s->has_levels) {
    o.scales = add_list(c, s, s->has_zeros ? EG_DTYPE_U8 : EG_DTYPE_F32, flat_blocks(s));
    if (s->has_zeros) o.zeros = add_list(c, s, EG_DTYPE_F32, (int64_t)egi_nested_count((uint64_t)flat_blocks(s)));
  } else {
    if (s->bits > 0) o.scales = add_operand(c, s, dtype, 2, blocks);
    if (s->has_zeros) o.zeros = add_operand(c, s, EG_DTYPE_U8, 2, zeros);
  }
  roles[0] = one;
  roles[1] = s->has_bias ? one : 0;
  roles[2] = s->bits > 0 ? one : 0;
  roles[3] = s->has_zeros ? one : 0;
  ops_add_attribute(c, egi_attribute_int("experts", 4));
  ops_add_attribute(c, egi_attribute_int("in_features", s->k));
  ops_add_attribute(c, egi_attribute_ints("roles", roles, EGI_RAGGED_ROLES));
  if (s->is_transposed) ops_add_attribute(c, egi_attribute_int("transposed", 1));
  if (s->is_loop) ops_add_attribute(c, egi_attribute_int("loop", 1));
  if (s->alpha > 0.0) ops_add_attribute(c, egi_attribute_float("alpha", (float)s->alpha));
  if (s->bits > 0) ops_add_attribute(c, egi_attribute_string("storage", s->has_levels ? "bnb4" : "nbits"));
  if (s->bits > 0) ops_add_attribute(c, egi_attribute_int("bits", s->bits));
  if (s->block > 0) ops_add_attribute(c, egi_attribute_int("block_size", s->block));
  return o;
}

static ops_tensor *add_optional(ops_case *c, bool is_there, eg_dtype dtype, int rank, const int64_t *dims) {
  if (!is_there) {
    ops_add_absent(c);
    return NULL;
  }
  ops_tensor *in = ops_add_input(c, dtype, rank, dims);
  ops_fill_uniform(in, -1.0, 1.0, c->n_inputs);
  return in;
}

static int64_t expert_of(const ragged_setting *s, int64_t row) {
  int64_t e = 0;
  while (s->offsets[e + 1] <= row) e++;
  return e;
}

void ops_case_ragged_linear(void **state, egi_op op) {
  size_t n_types = count_types(state);
  for (size_t i = 0; i < EGI_COUNT(products) * n_types; i++) {
    const ragged_setting *s = &products[i / n_types];
    eg_dtype dtype = types[i % n_types];
    ops_case c;
    int64_t rows = s->offsets[4];
    double alpha = s->alpha > 0.0 ? s->alpha : 1.0;
    ops_begin(&c, state, op, dtype);
    ops_tensor *x = ops_add_input(&c, dtype, 2, (int64_t[]){rows, s->k});
    ops_fill_uniform(x, -1.0, 1.0, 1);
    ops_tensor *addend = add_optional(&c, s->has_addend, dtype, 2, (int64_t[]){rows, s->n});
    (void)add_offsets(&c, s);
    eg_dtype weight_type = dtype == EG_DTYPE_BF16 ? EG_DTYPE_F32 : dtype;
    ops_tensor *weight = add_optional(&c, s->has_weight, weight_type, 1, &rows);
    operands o = add_experts(&c, s, dtype);
    ops_tensor *y = ops_add_output(&c, dtype, 2, (int64_t[]){rows, s->n});
    for (int64_t r = 0; r < rows; r++)
      for (int64_t n = 0; n < s->n; n++) {
        int64_t e = expert_of(s, r);
        double sum = s->has_bias ? operand_at(&c, s, o.bias, e, n, s->n) : 0.0;
        for (int64_t k = 0; k < s->k; k++) sum += matrix_at(&c, s, &o, (int64_t[]){e, n, k}) * x->values[r * s->k + k];
        y->values[r * s->n + n] =
            (addend ? addend->values[r * s->n + n] : 0.0) + alpha * (weight ? weight->values[r] : 1.0) * sum;
      }
    add_tolerance(&c, dtype, s->has_levels ? 1e-5 : 1e-9, s->bits == 8 ? 1e-2 : 2e-4, /* levels are decoded in f32 */
                  s->bits == 8  ? 8.0
                  : s->bits > 0 ? 0.5
                                : 0.1);
    ops_check(&c);
    ops_end(&c);
  }
}

void ops_case_ragged_linear_grad(void **state, egi_op op) {
  size_t n_types = count_types(state);
  for (size_t i = 0; i < EGI_COUNT(products) * n_types; i++) {
    const ragged_setting *s = &products[i / n_types];
    eg_dtype dtype = types[i % n_types];
    ops_case c;
    int64_t rows = s->offsets[4];
    double alpha = s->alpha > 0.0 ? s->alpha : 1.0;
    ops_begin(&c, state, op, dtype);
    ops_tensor *dy = ops_add_input(&c, dtype, 2, (int64_t[]){rows, s->n});
    ops_fill_uniform(dy, -1.0, 1.0, 1);
    ops_tensor *x = add_optional(&c, s->has_weight, dtype, 2, (int64_t[]){rows, s->k});
    (void)add_offsets(&c, s);
    eg_dtype weight_type = dtype == EG_DTYPE_BF16 ? EG_DTYPE_F32 : dtype;
    ops_tensor *weight = add_optional(&c, s->has_weight, weight_type, 1, &rows);
    operands o = add_experts(&c, s, dtype);
    ops_tensor *dx = ops_add_output(&c, dtype, 2, (int64_t[]){rows, s->k});
    ops_tensor *dw = s->has_weight ? ops_add_output(&c, dtype, 1, &rows) : NULL;
    for (int64_t r = 0; r < rows; r++) {
      int64_t e = expert_of(s, r);
      for (int64_t n = 0; n < s->n && dw != NULL && s->has_bias; n++)
        dw->values[r] += alpha * operand_at(&c, s, o.bias, e, n, s->n) * dy->values[r * s->n + n];
      for (int64_t k = 0; k < s->k; k++) {
        double sum = 0.0;
        for (int64_t n = 0; n < s->n; n++) sum += matrix_at(&c, s, &o, (int64_t[]){e, n, k}) * dy->values[r * s->n + n];
        dx->values[r * s->k + k] = alpha * (weight ? weight->values[r] : 1.0) * sum;
        if (dw != NULL) dw->values[r] += alpha * sum * x->values[r * s->k + k];
      }
    }
    add_tolerance(&c, dtype, s->has_levels ? 1e-5 : 1e-9, s->bits == 8 ? 1e-2 : 2e-4, s->bits == 8 ? 8.0 : 0.5);
    ops_check(&c);
    ops_end(&c);
  }
}

void ops_case_ragged_reduce(void **state, egi_op op) {
  size_t n_types = count_types(state);
  for (size_t i = 0; i < EGI_COUNT(products) * n_types; i++) {
    const ragged_setting *s = &products[i / n_types];
    eg_dtype dtype = types[i % n_types];
    ops_case c;
    int64_t rows = s->offsets[4];
    double alpha = s->alpha > 0.0 ? s->alpha : 1.0;
    ops_begin(&c, state, op, dtype);
    if (s->alpha > 0.0) ops_add_attribute(&c, egi_attribute_float("alpha", (float)s->alpha));
    if (s->is_loop) ops_add_attribute(&c, egi_attribute_int("loop", 1));
    ops_tensor *left = ops_add_input(&c, dtype, 2, (int64_t[]){rows, s->n});
    ops_tensor *right = ops_add_input(&c, dtype, 2, (int64_t[]){rows, s->k});
    (void)add_offsets(&c, s);
    ops_fill_uniform(left, -1.0, 1.0, 1);
    ops_fill_uniform(right, -1.0, 1.0, 2);
    ops_tensor *out = ops_add_output(&c, dtype, 3, (int64_t[]){4, s->n, s->k});
    for (int64_t r = 0; r < rows; r++)
      for (int64_t n = 0; n < s->n; n++)
        for (int64_t k = 0; k < s->k; k++)
          out->values[(expert_of(s, r) * s->n + n) * s->k + k] +=
              alpha * left->values[r * s->n + n] * right->values[r * s->k + k];
    add_tolerance(&c, dtype, 1e-9, 3e-4, 0.1);
    ops_check(&c);
    c.inputs[2].values[4] += 1.0;
    c.expected_status = EG_ERROR_DATA;
    ops_check(&c);
    ops_end(&c);
  }
}
