/* Conformance cases of Pad and Tile and of their gradients, which add what the forward case reads. */
#include "support_ops.h"

static const eg_dtype types[] = {EG_DTYPE_F32, EG_DTYPE_F64, EG_DTYPE_F16, EG_DTYPE_I64, EG_DTYPE_U8, EG_DTYPE_BOOL};

static void fill(ops_tensor *tensor) {
  bool is_boolean = tensor->dtype == EG_DTYPE_BOOL;
  ops_fill_uniform(tensor, 0.0, is_boolean ? 1.0 : 100.0, 3);
}

static bool is_tested(bool is_gradient, eg_dtype dtype) {
  return !is_gradient || dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64;
}

/* The small tensor and the large one that it is spread to: input and output, or result and dY of the gradient. */
typedef struct pair {
  ops_tensor *small, *large;
} pair;

static pair add_pair(ops_case *c, eg_dtype dtype, int rank, const int64_t *const dims[2], bool is_gradient) {
  pair p;
  p.small = ops_add_input(c, dtype, rank, dims[0]);
  p.large = is_gradient ? ops_add_input(c, dtype, rank, dims[1]) : ops_add_output(c, dtype, rank, dims[1]);
  fill(is_gradient ? p.large : p.small);
  if (is_gradient) p.small = ops_add_output(c, dtype, rank, dims[0]);
  return p;
}

static void carry(const pair *p, bool is_gradient, int64_t small, int64_t large) {
  if (is_gradient) p->small->values[small] += p->large->values[large];
  if (!is_gradient) p->large->values[large] = p->small->values[small];
}

static void finish(ops_case *c, bool is_gradient, eg_dtype dtype) {
  if (is_gradient) c->absolute = dtype == EG_DTYPE_F64 ? 1e-10 : 1e-3;
  if (!is_gradient) c->relative = 0.0;
  ops_check(c);
}

/* ---- Pad -------------------------------------------------------------------------------------------------------- */

static const struct {
  int rank, n_axes;
  int64_t dims[3], axes[3], pads[6];
} paddings[] = {{1, 1, {5}, {0}, {3, 4}},
                {1, 1, {1}, {0}, {0, 2}},
                {2, 2, {13, 65}, {0, 1}, {2, 0, 1, 70}},
                {3, 2, {3, 4, 5}, {-1, 0}, {1, 2, 3, 1}},
                {2, 2, {7, 9}, {0, 1}, {-2, 3, 1, -4}},
                {3, 3, {2, 0, 3}, {0, 1, 2}, {1, 0, 1, 1, 0, 0}},
                {3, 3, {2, 3, 130}, {0, 1, 2}, {1, 2, 2, 1, 0, 1}}};

/* Walks to the position element by element, as the reader of the specification would. */
static int64_t source_of(const char *mode, int64_t at, int64_t size) {
  int64_t step = 1;
  if (mode[0] == 'c') return at < 0 || at >= size ? -1 : at;
  if (mode[0] == 'e') return at < 0 ? 0 : at >= size ? size - 1 : at;
  if (mode[0] == 'w') {
    while (at < 0) at += size;
    return at % size;
  }
  int64_t position = 0, target = at < 0 ? -at : at; /* reflection is even around 0 */
  for (int64_t i = 0; i < target && size > 1; i++) {
    if (position + step < 0 || position + step >= size) step = -step;
    position += step;
  }
  return position;
}

static void check_pad(void **state, egi_op op, eg_dtype dtype, size_t p, const char *mode) {
  bool is_gradient = op == EGI_OP_PadGrad;
  int rank = paddings[p].rank, n_axes = paddings[p].n_axes;
  int64_t before[3] = {0}, large[3];
  for (int i = 0; i < rank; i++) large[i] = paddings[p].dims[i];
  for (int i = 0; i < n_axes; i++) {
    int64_t axis = paddings[p].axes[i] < 0 ? paddings[p].axes[i] + rank : paddings[p].axes[i];
    before[axis] = paddings[p].pads[i];
    large[axis] += paddings[p].pads[i] + paddings[p].pads[n_axes + i];
  }
  const int64_t *const dims[2] = {paddings[p].dims, large};
  ops_case c;
  ops_begin(&c, state, op, dtype);
  pair t = add_pair(&c, dtype, rank, dims, is_gradient);
  ops_add_integers(&c, paddings[p].pads, 2 * n_axes);
  if (!is_gradient && n_axes != rank) ops_add_absent(&c);
  if (n_axes != rank) ops_add_integers(&c, paddings[p].axes, n_axes);
  bool has_constant = !is_gradient && n_axes == rank && p % 2 == 0;
  if (has_constant) ops_add_input(&c, dtype, 0, NULL)->values[0] = 1.0;
  ops_add_attribute(&c, egi_attribute_string("mode", mode));
  for (int64_t i = 0; i < ops_count(t.large); i++) {
    int64_t rest = i, small = 0, step = 1;
    bool is_constant = false;
    for (int d = rank - 1; d >= 0; d--) {
      int64_t source = source_of(mode, rest % large[d] - before[d], paddings[p].dims[d]);
      is_constant = is_constant || source < 0;
      small += source * step;
      step *= paddings[p].dims[d];
      rest /= large[d];
    }
    if (!is_constant) carry(&t, is_gradient, small, i);
    if (is_constant && !is_gradient) t.large->values[i] = has_constant ? 1.0 : 0.0;
  }
  finish(&c, is_gradient, dtype);
  ops_end(&c);
}

void ops_case_pad(void **state, egi_op op) {
  static const char *const modes[] = {"constant", "edge", "reflect", "wrap"};
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t p = 0; is_tested(op == EGI_OP_PadGrad, types[t]) && p < EGI_COUNT(paddings); p++) {
      for (size_t m = 0; m < EGI_COUNT(modes); m++) {
        bool is_empty = paddings[p].dims[1] == 0 && paddings[p].rank == 3;
        if (!is_empty || m == 0) check_pad(state, op, types[t], p, modes[m]);
      }
    }
  }
}

/* ---- Tile ------------------------------------------------------------------------------------------------------- */

static const struct {
  int rank;
  int64_t dims[3], repeats[3];
} tilings[] = {{1, {5}, {3}},       {0, {0}, {0}},      {2, {13, 65}, {2, 3}}, {3, {2, 1, 33}, {3, 4, 1}},
               {2, {0, 3}, {2, 2}}, {2, {3, 4}, {0, 2}}};

void ops_case_tile(void **state, egi_op op) {
  bool is_gradient = op == EGI_OP_TileGrad;
  for (size_t t = 0; t < EGI_COUNT(types); t++) {
    for (size_t p = 0; is_tested(is_gradient, types[t]) && p < EGI_COUNT(tilings); p++) {
      int rank = tilings[p].rank;
      int64_t large[3] = {0};
      for (int i = 0; i < rank; i++) large[i] = tilings[p].dims[i] * tilings[p].repeats[i];
      const int64_t *const dims[2] = {tilings[p].dims, large};
      ops_case c;
      ops_begin(&c, state, op, types[t]);
      pair tensors = add_pair(&c, types[t], rank, dims, is_gradient);
      if (!is_gradient) ops_add_integers(&c, tilings[p].repeats, rank);
      for (int64_t i = 0; i < ops_count(tensors.large); i++) {
        int64_t rest = i, small = 0, step = 1;
        for (int d = rank - 1; d >= 0; d--) {
          small += rest % large[d] % tilings[p].dims[d] * step;
          step *= tilings[p].dims[d];
          rest /= large[d];
        }
        carry(&tensors, is_gradient, small, i);
      }
      finish(&c, is_gradient, types[t]);
      ops_end(&c);
    }
  }
}
