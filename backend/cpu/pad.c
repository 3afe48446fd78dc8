/* Pad and its gradient, Tile and its gradient. Pad keeps for every output position along each axis the input position
 * that it reads, or -1 for the constant. Gradients are summed in the order of the output's elements by one thread, in
 * the type itself (f32 or f64). */
#include "backend/cpu/elementwise.h"

typedef enum pad_mode { MODE_CONSTANT, MODE_EDGE, MODE_REFLECT, MODE_WRAP } pad_mode;

typedef struct pad_params {
  pad_mode mode;
  egi_inner copy, add; /* add: gradients, operands (out, out, in) */
  const void *add_params;
  bool is_gradient;
  size_t maps_at[EGI_MAX_RANK]; /* of each axis in the workspace */
} pad_params;

/* ---- prepare ---------------------------------------------------------------------------------------------------- */

static eg_status prepare_add(egi_kernel_plan *plan, egi_inner *out_add, const void **out_params) {
  eg_dtype dtype = plan->outputs[0].dtype;
  bool is_real = dtype == EG_DTYPE_F32 || dtype == EG_DTYPE_F64;
  if (is_real) *out_add = egi_binary_inner(EGI_OP_Add, dtype, plan->arena, out_params);
  return is_real && *out_add != NULL ? EG_OK : egi_fail_types(plan);
}

static eg_status read_mode(const egi_kernel_plan *plan, pad_params *p) {
  static const char *const names[] = {"constant", "edge", "reflect", "wrap"};
  const char *mode = egi_node_string(egi_plan_node(plan), "mode", "constant");
  for (int i = 0; i < 4; i++) {
    if (strcmp(mode, names[i]) != 0) continue;
    p->mode = (pad_mode)i;
    return EG_OK;
  }
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "unknown mode \"%s\"", mode);
}

/* `padded` is the larger tensor: Pad's output, the gradient's input 1. */
static eg_status prepare(egi_kernel_plan *plan, const egi_tensor *padded, bool is_gradient) {
  pad_params *p = EGI_NEW(plan->arena, pad_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  p->is_gradient = is_gradient;
  p->copy = egi_copy_inner(egi_element_bytes(padded->dtype));
  if (p->copy == NULL || padded->dtype != plan->inputs[0].dtype || plan->outputs[0].dtype != padded->dtype)
    return egi_fail_types(plan);
  EG_TRY(read_mode(plan, p));
  if (is_gradient) EG_TRY(prepare_add(plan, &p->add, &p->add_params));
  for (int i = 0; i < padded->rank; i++) {
    p->maps_at[i] = plan->workspace_bytes;
    plan->workspace_bytes += ((size_t)padded->dims[i] * sizeof(int64_t) + 63) / 64 * 64;
  }
  return EG_OK;
}

eg_status egi_cpu_prepare_pad(egi_kernel_plan *plan) {
  if (egi_plan_has_input(plan, 2) && plan->inputs[2].dtype != plan->inputs[0].dtype) return egi_fail_types(plan);
  return prepare(plan, &plan->outputs[0], false);
}

eg_status egi_cpu_prepare_pad_grad(egi_kernel_plan *plan) {
  return prepare(plan, &plan->inputs[1], true);
}

/* ---- maps ------------------------------------------------------------------------------------------------------- */

static int64_t modulo(int64_t a, int64_t n) {
  return (a % n + n) % n;
}

/* Where position `at` of an axis of `size` elements, which may lie outside, is read; -1: nowhere. */
static int64_t source_of(const pad_params *p, int64_t at, int64_t size) {
  if (at >= 0 && at < size) return at;
  if (p->mode == MODE_CONSTANT || size == 0) return -1;
  if (p->mode == MODE_EDGE) return at < 0 ? 0 : size - 1;
  if (p->mode == MODE_WRAP) return modulo(at, size);
  int64_t period = size > 1 ? 2 * (size - 1) : 1, folded = modulo(at, period);
  return folded < size ? folded : period - folded;
}

/* Paddings in front of each axis, checked against the planned dims. `lists`: pads, and axes or NULL. */
static eg_status read_pads(eg_context *ctx, const egi_tensor *const lists[2], const int64_t *small,
                           const egi_tensor *padded, int64_t *out_before) {
  int64_t pads[2 * EGI_MAX_RANK], axes[EGI_MAX_RANK], after[EGI_MAX_RANK] = {0};
  uint32_t n_pads = 0, n_axes = (uint32_t)padded->rank;
  for (int i = 0; i < EGI_MAX_RANK; i++) axes[i] = i;
  bool is_read = egi_tensor_integers(lists[0], pads, EGI_COUNT(pads), &n_pads);
  if (is_read && lists[1] != NULL) is_read = egi_tensor_integers(lists[1], axes, EGI_MAX_RANK, &n_axes);
  if (!is_read || n_pads != 2 * n_axes)
    return egi_fail(ctx, EG_ERROR_DATA, "Pad: %u paddings for %u axes", n_pads, n_axes);
  for (int i = 0; i < padded->rank; i++) out_before[i] = 0;
  for (uint32_t i = 0; i < n_axes; i++) {
    int axis;
    if (!egi_normalise_axis(axes[i], padded->rank, &axis))
      return egi_fail(ctx, EG_ERROR_DATA, "Pad: axis %lld of a tensor of rank %d", (long long)axes[i], padded->rank);
    out_before[axis] = pads[i];
    after[axis] = pads[n_axes + i];
  }
  for (int i = 0; i < padded->rank; i++) {
    int64_t limit = INT64_MAX / 4;
    bool is_small = out_before[i] > -limit && out_before[i] < limit && after[i] > -limit && after[i] < limit;
    if (!is_small || small[i] + out_before[i] + after[i] != padded->dims[i])
      return egi_fail(ctx, EG_ERROR_DATA, "Pad: axis %d does not become %lld elements", i, (long long)padded->dims[i]);
  }
  return EG_OK;
}

static int64_t *map_of(const egi_kernel_call *call, int axis) {
  const pad_params *p = call->params;
  return (int64_t *)(void *)((char *)call->workspace + p->maps_at[axis]);
}

/* ---- Pad -------------------------------------------------------------------------------------------------------- */

typedef struct pad_run {
  const pad_params *params;
  const egi_kernel_call *call;
  const egi_tensor *small, *padded;
  const char *constant;
} pad_run;

/* Offset in the small tensor of element 0 of row `row` of the padded one, in elements; false: the row is constant. */
static bool row_source(const pad_run *run, int64_t row, int64_t *out_offset) {
  *out_offset = 0;
  for (int i = run->padded->rank - 2; i >= 0; i--) {
    int64_t source = map_of(run->call, i)[row % run->padded->dims[i]];
    if (source < 0) return false;
    *out_offset += source * run->small->strides[i];
    row /= run->padded->dims[i];
  }
  return true;
}

/* A row in pieces: neighbours that are read side by side, or the constant, go in one copy. */
static void pad_row(const pad_run *run, int64_t row) {
  const egi_tensor *out = run->padded, *in = run->small;
  int last = out->rank - 1;
  int64_t bytes = (int64_t)egi_element_bytes(out->dtype), offset, n = out->dims[last];
  int64_t out_step = out->strides[last] * bytes, in_step = in->strides[last] * bytes;
  const int64_t *map = map_of(run->call, last);
  char *target = (char *)out->data + egi_row_offset(out, last, row) * bytes;
  bool is_constant = !row_source(run, row, &offset);
  for (int64_t start = 0, end; start < n; start = end) {
    int64_t source = is_constant ? -1 : map[start];
    for (end = start + 1; end < n; end++) {
      int64_t next = is_constant ? -1 : map[end];
      if (source < 0 ? next >= 0 : next != source + (end - start)) break;
    }
    char *const blank[2] = {target + start * out_step, (char *)(uintptr_t)run->constant};
    char *const moved[2] = {target + start * out_step, (char *)in->data + offset * bytes + source * in_step};
    const int64_t strides[2] = {out_step, source < 0 ? 0 : in_step};
    run->params->copy(NULL, source < 0 ? blank : moved, strides, end - start);
  }
}

static void pad_rows(void *argument, size_t index, size_t worker) {
  (void)worker;
  const pad_run *run = argument;
  int last = run->padded->rank - 1;
  int64_t n_rows = egi_dims_product(run->padded, 0, last), n = egi_rows_per_task(run->padded->dims[last]);
  for (int64_t row = (int64_t)index * n; row < n_rows && row < ((int64_t)index + 1) * n; row++) pad_row(run, row);
}

static void make_maps(const egi_kernel_call *call, const egi_tensor *small, const egi_tensor *padded,
                      const int64_t *before) {
  for (int axis = 0; axis < padded->rank; axis++) {
    int64_t *map = map_of(call, axis);
    for (int64_t i = 0; i < padded->dims[axis]; i++)
      map[i] = source_of(call->params, i - before[axis], small->dims[axis]);
  }
}

eg_status egi_cpu_run_pad(eg_context *ctx, const egi_kernel_call *call) {
  static const char zero[16];
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  const egi_tensor *const lists[2] = {&call->inputs[1], egi_call_has_input(call, 3) ? &call->inputs[3] : NULL};
  int64_t before[EGI_MAX_RANK];
  EG_TRY(read_pads(ctx, lists, in->dims, out, before));
  pad_run run = {.params = call->params, .call = call, .small = in, .padded = out, .constant = zero};
  if (egi_call_has_input(call, 2)) run.constant = call->inputs[2].data;
  if (egi_tensor_count(out) == 0) return EG_OK;
  if (out->rank == 0) {
    egi_copy(call->pool, out, in);
    return EG_OK;
  }
  make_maps(call, in, out, before);
  int last = out->rank - 1;
  int64_t n_rows = egi_dims_product(out, 0, last), n = egi_rows_per_task(out->dims[last]);
  egi_pool_run(call->pool, (size_t)((n_rows + n - 1) / n), pad_rows, &run);
  return EG_OK;
}

/* Both contiguous. */
eg_status egi_cpu_run_pad_grad(eg_context *ctx, const egi_kernel_call *call) {
  const pad_params *p = call->params;
  const egi_tensor *dy = &call->inputs[1], *dx = &call->outputs[0];
  const egi_tensor *const lists[2] = {&call->inputs[2], egi_call_has_input(call, 3) ? &call->inputs[3] : NULL};
  int64_t before[EGI_MAX_RANK], bytes = (int64_t)egi_element_bytes(dy->dtype), offset;
  double zero = 0.0;
  EG_TRY(read_pads(ctx, lists, dx->dims, dy, before));
  egi_fill(call->pool, dx, &zero);
  if (egi_tensor_count(dy) == 0) return EG_OK;
  if (dy->rank == 0) {
    egi_copy(call->pool, dx, dy);
    return EG_OK;
  }
  make_maps(call, dx, dy, before);
  pad_run run = {.params = p, .call = call, .small = dx, .padded = dy};
  int last = dy->rank - 1;
  int64_t n_rows = egi_dims_product(dy, 0, last), n = dy->dims[last];
  const int64_t *map = map_of(call, last), strides[3] = {bytes, bytes, bytes};
  for (int64_t row = 0; row < n_rows; row++) {
    if (!row_source(&run, row, &offset)) continue;
    for (int64_t i = 0; i < n; i++) {
      char *at = (char *)dx->data + (offset + map[i]) * bytes;
      char *const operands[3] = {at, at, (char *)dy->data + (row * n + i) * bytes};
      if (map[i] >= 0) p->add(p->add_params, operands, strides, 1);
    }
  }
  return EG_OK;
}

/* ---- Tile ------------------------------------------------------------------------------------------------------- */

typedef struct tile_params {
  egi_inner add; /* gradients */
  const void *add_params;
} tile_params;

eg_status egi_cpu_prepare_tile(egi_kernel_plan *plan) {
  bool is_copied = egi_element_bytes(plan->inputs[0].dtype) > 0 && plan->outputs[0].dtype == plan->inputs[0].dtype;
  return is_copied ? EG_OK : egi_fail_types(plan);
}

eg_status egi_cpu_prepare_tile_grad(egi_kernel_plan *plan) {
  tile_params *p = EGI_NEW(plan->arena, tile_params, 1);
  if (p == NULL) return EG_ERROR_MEMORY;
  plan->params = p;
  if (plan->inputs[1].dtype != plan->outputs[0].dtype) return egi_fail_types(plan);
  return prepare_add(plan, &p->add, &p->add_params);
}

/* Repetitions of each axis from the dims; false when they are no multiples. */
static bool count_tiles(const egi_tensor *small, const egi_tensor *tiled, int64_t *out_repeats, int64_t *out_count) {
  *out_count = 1;
  for (int i = 0; i < small->rank; i++) {
    int64_t size = small->dims[i];
    if (size == 0 ? tiled->dims[i] != 0 : tiled->dims[i] % size != 0) return false;
    out_repeats[i] = size == 0 ? 0 : tiled->dims[i] / size;
    *out_count *= out_repeats[i];
  }
  return small->rank == tiled->rank;
}

/* Tile number `tile` of the large tensor. */
static egi_tensor tile_view(const egi_tensor *small, const egi_tensor *tiled, const int64_t *repeats, int64_t tile) {
  egi_tensor view = *tiled;
  int64_t offset = 0;
  for (int i = small->rank - 1; i >= 0; i--) {
    view.dims[i] = small->dims[i];
    offset += tile % repeats[i] * small->dims[i] * tiled->strides[i];
    tile /= repeats[i];
  }
  view.data = (char *)tiled->data + offset * (int64_t)egi_element_bytes(tiled->dtype);
  return view;
}

static eg_status fail_tiles(eg_context *ctx) {
  return egi_fail(ctx, EG_ERROR_DATA, "Tile: the repetitions do not give the planned shape");
}

eg_status egi_cpu_run_tile(eg_context *ctx, const egi_kernel_call *call) {
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  int64_t repeats[EGI_MAX_RANK], wanted[EGI_MAX_RANK], n_tiles;
  uint32_t count = 0;
  bool fits = egi_tensor_integers(&call->inputs[1], wanted, EGI_MAX_RANK, &count) && count == (uint32_t)in->rank;
  for (int i = 0; fits && i < in->rank; i++)
    fits = wanted[i] >= 0 && (in->dims[i] == 0 || wanted[i] == out->dims[i] / in->dims[i]);
  if (!fits || !count_tiles(in, out, repeats, &n_tiles)) return fail_tiles(ctx);
  for (int64_t tile = 0; tile < n_tiles; tile++) {
    egi_tensor view = tile_view(in, out, repeats, tile);
    egi_copy(call->pool, &view, in);
  }
  return EG_OK;
}

/* Tiles are added one after the other. */
eg_status egi_cpu_run_tile_grad(eg_context *ctx, const egi_kernel_call *call) {
  const tile_params *p = call->params;
  const egi_tensor *dy = &call->inputs[1], *dx = &call->outputs[0];
  int64_t repeats[EGI_MAX_RANK], n_tiles;
  double zero = 0.0;
  if (!count_tiles(dx, dy, repeats, &n_tiles)) return fail_tiles(ctx);
  egi_fill(call->pool, dx, &zero);
  for (int64_t tile = 0; tile < n_tiles; tile++) {
    egi_tensor view = tile_view(dx, dy, repeats, tile);
    egi_strided loop;
    egi_strided_init(&loop, dx);
    egi_strided_add(&loop, dx);
    egi_strided_add(&loop, &view);
    egi_strided_collapse(&loop);
    egi_strided_run(call->pool, &loop, EGI_TASK_ELEMENTS, p->add, p->add_params);
  }
  return EG_OK;
}
