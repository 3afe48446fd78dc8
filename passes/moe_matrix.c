/* Parameters of experts on a sample: followed through views without their bytes, and multiplied by made-up matrices
 * with two numbers in each stored row, which distinguish every row, column, slice and parameter. Linear in sizes of
 * vectors, not of matrices. */
#include <string.h>

#include "graph/linear.h"
#include "passes/moe_match.h"

static uint64_t mix(uint64_t x) { /* splitmix64 (Steele, Lea and Flood, OOPSLA 2014) */
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double egi_moe_random(uint64_t seed, uint64_t a, uint64_t b) {
  return (double)(mix(mix(seed ^ mix(a)) ^ b) >> 11) * 0x1p-52 - 1.0;
}

float egi_moe_number_of(const egi_moe_region *region, egi_value_id weight, int64_t index) {
  double number = egi_moe_random(region->seed, weight, (uint64_t)index);
  return (float)(index < 0 ? 0.15 + 0.15 * number : number);
}

/* ---- views ---------------------------------------------------------------------------------------------------- */

static egi_moe_matrix *copy_matrix(egi_moe_region *region, const egi_moe_matrix *from) {
  egi_moe_matrix *matrix = EGI_NEW(region->arena, egi_moe_matrix, 1);
  if (matrix != NULL && from != NULL) *matrix = *from;
  return matrix;
}

static bool put(egi_moe_region *region, egi_value_id value, const egi_moe_matrix *matrix) {
  egi_moe_value *out = matrix != NULL ? egi_moe_touch(region, value) : NULL;
  if (out == NULL) return egi_moe_reject(region, 0, "out of memory");
  out->matrix = matrix;
  out->parameter = matrix->weight;
  out->is_computed = true;
  return true;
}

/* Packed codes of a Linear have their sizes in its attributes. */
static bool begin_codes(egi_moe_region *region, egi_value_id weight) {
  const egi_node *node = &region->graph->nodes[region->uses->list[region->uses->start[weight]]];
  egi_moe_matrix *matrix = copy_matrix(region, NULL);
  int64_t *slice = EGI_NEW(region->arena, int64_t, 1);
  if (matrix == NULL || slice == NULL) return egi_moe_reject(region, 0, "out of memory");
  *matrix = (egi_moe_matrix){.weight = weight,
                             .rows = egi_node_int(node, "out_features", 0),
                             .columns = egi_node_int(node, "in_features", 0),
                             .count = 1,
                             .slices = slice};
  if (matrix->rows < 1 || matrix->columns < 1) return egi_moe_reject(region, 0, "packed codes of unknown size");
  return put(region, weight, matrix);
}

bool egi_moe_begin_matrix(egi_moe_region *region, egi_value_id weight) {
  const egi_weight *row = &region->graph->module->weights[region->graph->values[weight].index];
  if (row->dtype == EG_DTYPE_U8) return begin_codes(region, weight);
  egi_moe_matrix *matrix = copy_matrix(region, NULL);
  if (matrix == NULL || (row->rank != 2 && row->rank != 3)) return egi_moe_reject(region, 0, "a parameter of odd rank");
  matrix->weight = weight;
  matrix->rows = row->dims[row->rank - 2];
  matrix->columns = row->dims[row->rank - 1];
  matrix->is_stack = row->rank == 3;
  matrix->rank = row->rank - 2;
  matrix->count = matrix->is_stack ? row->dims[0] : 1;
  matrix->dims[0] = matrix->count;
  int64_t *slices = EGI_NEW(region->arena, int64_t, (size_t)matrix->count);
  if (slices == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (int64_t i = 0; i < matrix->count; i++) slices[i] = i;
  matrix->slices = slices;
  return put(region, weight, matrix);
}

static bool integers_of(const egi_moe_region *region, egi_value_id value, int64_t *out, uint32_t capacity,
                        uint32_t *out_count) {
  const egi_tensor *t = &region->values[value].tensor;
  int64_t count = value != 0 && region->values[value].is_computed && t->data != NULL ? egi_tensor_count(t) : -1;
  if (count < 0 || count > (int64_t)capacity) return false;
  for (int64_t i = 0; i < count; i++) {
    if (t->dtype == EG_DTYPE_I64)
      out[i] = ((const int64_t *)t->data)[i];
    else if (t->dtype == EG_DTYPE_I32)
      out[i] = ((const int32_t *)t->data)[i];
    else
      return false;
  }
  *out_count = (uint32_t)count;
  return true;
}

/* Slices at `indices`, in their shape. */
static const egi_moe_matrix *gather(egi_moe_region *region, const egi_moe_matrix *from, const egi_tensor *indices,
                                    int rank) {
  egi_moe_matrix *matrix = copy_matrix(region, from);
  int64_t count = egi_tensor_count(indices);
  int64_t *slices = EGI_NEW(region->arena, int64_t, (size_t)count + 1);
  if (matrix == NULL || slices == NULL || from->rank != 1) return NULL;
  for (int64_t i = 0; i < count; i++) {
    int64_t at =
        indices->dtype == EG_DTYPE_I32 ? ((const int32_t *)indices->data)[i] : ((const int64_t *)indices->data)[i];
    if (at < 0) at += from->count;
    if (at < 0 || at >= from->count) return NULL;
    slices[i] = from->slices[at];
  }
  matrix->rank = rank;
  memcpy(matrix->dims, indices->dims, sizeof matrix->dims);
  matrix->count = count;
  matrix->slices = slices;
  return matrix;
}

/* A range of the axis of experts. */
static const egi_moe_matrix *range(egi_moe_region *region, const egi_moe_matrix *from, int64_t start, int64_t end) {
  egi_moe_matrix *matrix = copy_matrix(region, from);
  if (matrix == NULL || from->rank != 1) return NULL;
  if (start < 0) start += from->count;
  if (end < 0) end += from->count;
  start = start < 0 ? 0 : start > from->count ? from->count : start;
  end = end > from->count ? from->count : end < start ? start : end;
  matrix->count = matrix->dims[0] = end - start;
  matrix->slices = from->slices + start;
  return matrix;
}

static const egi_moe_matrix *slice(egi_moe_region *region, const egi_node *node, const egi_moe_matrix *from) {
  int64_t lists[4][EGI_MAX_RANK] = {{0}};
  uint32_t counts[4] = {0};
  for (unsigned i = 1; i < 5 && i < node->n_inputs; i++)
    if (node->inputs[i] != 0 && !integers_of(region, node->inputs[i], lists[i - 1], EGI_MAX_RANK, &counts[i - 1]))
      return NULL;
  bool is_single = counts[0] == 1 && counts[1] == 1 && lists[2][0] == 0 && (counts[3] == 0 || lists[3][0] == 1);
  return is_single ? range(region, from, lists[0][0], lists[1][0]) : NULL;
}

/* Only leading dims may change. */
static const egi_moe_matrix *reshape(egi_moe_region *region, const egi_moe_matrix *from, const int64_t *dims,
                                     int rank) {
  egi_moe_matrix *matrix = copy_matrix(region, from);
  int64_t last[2] = {from->is_transposed ? from->columns : from->rows,
                     from->is_transposed ? from->rows : from->columns};
  int64_t count = 1;
  if (matrix == NULL || rank < 2 || dims[rank - 2] != last[0] || dims[rank - 1] != last[1]) return NULL;
  for (int i = 0; i + 2 < rank; i++) {
    matrix->dims[i] = dims[i] == -1 ? from->count : dims[i];
    count *= matrix->dims[i];
  }
  matrix->rank = rank - 2;
  return count == from->count ? matrix : NULL;
}

static const egi_moe_matrix *squeeze(egi_moe_region *region, const egi_node *node, const egi_moe_matrix *from) {
  int64_t axes[EGI_MAX_RANK], dims[EGI_MAX_RANK + 2];
  uint32_t n_axes = 0;
  int rank = from->rank + 2, n = 0;
  bool adds = node->op == EGI_OP_Unsqueeze;
  if (node->n_inputs < 2 || !integers_of(region, node->inputs[1], axes, EGI_MAX_RANK, &n_axes)) return NULL;
  int out_rank = adds ? rank + (int)n_axes : rank - (int)n_axes;
  int64_t whole[EGI_MAX_RANK + 2];
  for (int i = 0; i < from->rank; i++) whole[i] = from->dims[i];
  whole[from->rank] = from->is_transposed ? from->columns : from->rows;
  whole[from->rank + 1] = from->is_transposed ? from->rows : from->columns;
  if (out_rank > EGI_MAX_RANK || out_rank < 2) return NULL;
  for (int i = 0, at = 0; i < (adds ? out_rank : rank); i++) {
    bool is_named = false;
    for (uint32_t k = 0; k < n_axes; k++)
      is_named = is_named || (axes[k] < 0 ? axes[k] + (adds ? out_rank : rank) : axes[k]) == i;
    if (adds) dims[n++] = is_named ? 1 : whole[at++];
    if (!adds && !is_named) dims[n++] = whole[i];
  }
  return reshape(region, from, dims, out_rank);
}

static const egi_moe_matrix *transpose(egi_moe_region *region, const egi_node *node, const egi_moe_matrix *from) {
  uint32_t count = 0;
  const int64_t *order = egi_node_ints(node, "perm", &count);
  int rank = from->rank + 2;
  egi_moe_matrix *matrix = copy_matrix(region, from);
  if (matrix == NULL) return NULL;
  if (order == NULL && rank != 2) return NULL;
  for (int i = 0; i < from->rank && order != NULL; i++)
    if (order[i] != i) return NULL;
  if (order != NULL && (int)count == rank && order[rank - 1] == rank - 1) return matrix;
  matrix->is_transposed = !from->is_transposed;
  return matrix;
}

static bool view_split(egi_moe_region *region, egi_node_id id, const egi_moe_matrix *from) {
  const egi_node *node = &region->graph->nodes[id];
  int64_t *sizes = EGI_NEW(region->arena, int64_t, node->n_outputs), start = 0;
  uint32_t count = 0;
  if (egi_node_int(node, "axis", 0) != 0 || sizes == NULL) return false;
  for (unsigned i = 0; i < node->n_outputs; i++) sizes[i] = from->count / node->n_outputs;
  if (node->n_inputs > 1 && !integers_of(region, node->inputs[1], sizes, node->n_outputs, &count)) return false;
  for (unsigned i = 0; i < node->n_outputs; start += sizes[i++]) {
    const egi_moe_matrix *part = range(region, from, start, start + sizes[i]);
    if (node->outputs[i] != 0 && (part == NULL || !put(region, node->outputs[i], part))) return false;
  }
  return true;
}

static const egi_moe_matrix *view(egi_moe_region *region, const egi_node *node, const egi_moe_matrix *from) {
  int64_t dims[EGI_MAX_RANK];
  uint32_t count = 0;
  const egi_moe_value *second = node->n_inputs > 1 && node->inputs[1] != 0 ? &region->values[node->inputs[1]] : NULL;
  bool has_indices = second != NULL && second->is_computed && second->tensor.data != NULL;
  switch (node->op) {
  case EGI_OP_Cast:
  case EGI_OP_Identity:
    return from;
  case EGI_OP_Gather:
    if (!has_indices || egi_node_int(node, "axis", 0) != 0) return NULL;
    return gather(region, from, &second->tensor, second->tensor.rank);
  case EGI_OP_GatherND:
    if (!has_indices || second->tensor.rank < 1 || second->tensor.dims[second->tensor.rank - 1] != 1) return NULL;
    return gather(region, from, &second->tensor, second->tensor.rank - 1);
  case EGI_OP_Slice:
    return slice(region, node, from);
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
    return squeeze(region, node, from);
  case EGI_OP_Reshape:
    return integers_of(region, node->inputs[1], dims, EGI_MAX_RANK, &count) ? reshape(region, from, dims, (int)count)
                                                                            : NULL;
  case EGI_OP_Transpose:
    return transpose(region, node, from);
  default:
    return NULL;
  }
}

bool egi_moe_view(egi_moe_region *region, egi_node_id id) {
  const egi_node *node = &region->graph->nodes[id];
  const egi_moe_matrix *from = region->values[node->inputs[0]].matrix;
  if (node->op == EGI_OP_Split) return view_split(region, id, from) || egi_moe_reject(region, id, "it splits a matrix");
  const egi_moe_matrix *matrix = view(region, node, from);
  if (matrix == NULL) return egi_moe_reject(region, id, "parameters are looked at in a way that is not followed");
  return put(region, node->outputs[0], matrix);
}

/* ---- products ------------------------------------------------------------------------------------------------- */

/* The two numbers of stored row r. */
static void row_of(const egi_moe_region *region, const egi_moe_matrix *matrix, int64_t slice, int64_t r,
                   int64_t columns[2], float numbers[2]) {
  uint64_t key = mix(region->seed ^ mix((uint64_t)matrix->weight << 20 ^ (uint64_t)slice) ^ (uint64_t)r);
  for (int i = 0; i < 2; i++) {
    key = mix(key + 1);
    columns[i] = (int64_t)((key >> 8) % (uint64_t)matrix->columns);
    numbers[i] = (float)((double)(key >> 40) * 0x1p-23 - 1.0);
  }
}

void egi_moe_multiply_row(const egi_moe_region *region, const egi_moe_matrix *matrix, int64_t slice_index,
                          bool is_transposed, const float *in, float *out) {
  for (int64_t r = 0; r < matrix->rows; r++) {
    int64_t c[2];
    float v[2];
    row_of(region, matrix, slice_index, r, c, v);
    for (int i = 0; i < 2; i++) {
      if (is_transposed)
        out[c[i]] += v[i] * in[r];
      else
        out[r] += v[i] * in[c[i]];
    }
  }
}

/* Rows of the operand against slices, the leading dims broadcast. is_column: W · [.., K, 1]. */
typedef struct shape {
  int rank;
  int64_t dims[EGI_MAX_RANK], count;
  int64_t rows; /* of the operand for each slice */
} shape;

static bool broadcast(const egi_moe_matrix *matrix, const egi_tensor *t, bool is_column, shape *out) {
  int n_last = t->rank > 1 ? 2 : 1, lead = t->rank - n_last;
  out->rank = lead > matrix->rank ? lead : matrix->rank;
  out->count = 1;
  out->rows = n_last == 1 ? 1 : is_column ? t->dims[t->rank - 1] : t->dims[t->rank - 2];
  if (out->rank + 2 > EGI_MAX_RANK) return false;
  for (int i = 0; i < out->rank; i++) {
    int a = i - (out->rank - lead), b = i - (out->rank - matrix->rank);
    int64_t x = a >= 0 ? t->dims[a] : 1, y = b >= 0 ? matrix->dims[b] : 1;
    if (x != y && x != 1 && y != 1) return false;
    out->dims[i] = x == 1 ? y : x;
    out->count *= out->dims[i];
  }
  return true;
}

/* Position in an operand with these leading dims of position `index` of the broadcast shape. */
static int64_t position(const shape *s, int rank, const int64_t *dims, int64_t index) {
  int64_t at = 0, step = 1;
  for (int i = s->rank - 1; i >= 0; i--) {
    int own = i - (s->rank - rank);
    int64_t here = index % s->dims[i];
    index /= s->dims[i];
    if (own < 0) continue;
    if (dims[own] != 1) at += here * step;
    step *= dims[own];
  }
  return at;
}

static bool multiply(egi_moe_region *region, egi_node_id id, const egi_moe_matrix *matrix, const egi_tensor *t,
                     bool is_column, egi_moe_event *event) {
  bool is_transposed = event->is_transposed;
  int64_t k = is_transposed ? matrix->rows : matrix->columns, n = is_transposed ? matrix->columns : matrix->rows;
  shape s;
  if (t->dtype != EG_DTYPE_F32 || t->rank < 1 || !broadcast(matrix, t, is_column, &s))
    return egi_moe_reject(region, id, "a product with parameters in a form that is not followed");
  int64_t own = is_column && t->rank > 1 ? t->dims[t->rank - 2] : t->dims[t->rank - 1];
  if (own != k || (is_column && s.rows != 1)) return egi_moe_reject(region, id, "a product that does not fit");
  float *out = EGI_NEW(region->arena, float, (size_t)(s.count * s.rows * n) + 1);
  if (out == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (int64_t b = 0; b < s.count; b++) {
    int64_t from = position(&s, t->rank - (t->rank > 1 ? 2 : 1), t->dims, b);
    int64_t slice_index = matrix->slices[position(&s, matrix->rank, matrix->dims, b)];
    for (int64_t r = 0; r < s.rows; r++)
      egi_moe_multiply_row(region, matrix, slice_index, is_transposed, (const float *)t->data + (from * s.rows + r) * k,
                           out + (b * s.rows + r) * n);
  }
  event->out = (egi_tensor){.data = out, .dtype = EG_DTYPE_F32, .rank = s.rank};
  memcpy(event->out.dims, s.dims, sizeof s.dims);
  if (t->rank > 1) event->out.dims[event->out.rank++] = is_column ? n : s.rows;
  event->out.dims[event->out.rank++] = t->rank > 1 && is_column ? 1 : n;
  egi_tensor_set_contiguous(&event->out);
  return true;
}

static void add_bias(egi_moe_region *region, const egi_tensor *bias, egi_tensor *out) {
  int64_t n = out->dims[out->rank - 1], count = egi_tensor_count(out), own = egi_tensor_count(bias);
  (void)region;
  for (int64_t i = 0; i < count; i++) ((float *)out->data)[i] += ((const float *)bias->data)[own == 1 ? 0 : i % n];
}

/* A Linear over packed codes in whole blocks, as QMoE has them too. */
static bool read_packing(const egi_moe_region *region, const egi_node *node, egi_moe_event *event) {
  const egi_graph *graph = region->graph;
  if (node->op != EGI_OP_Linear || node->n_inputs <= EGI_LINEAR_SCALES) return true;
  egi_value_id zeros = node->n_inputs > EGI_LINEAR_ZERO_POINTS ? node->inputs[EGI_LINEAR_ZERO_POINTS] : 0;
  bool has_groups = node->n_inputs > EGI_LINEAR_GROUP_INDEX && node->inputs[EGI_LINEAR_GROUP_INDEX] != 0;
  event->bits = egi_node_int(node, "bits", 4);
  event->block_size = egi_node_int(node, "block_size", 0);
  event->scales = node->inputs[EGI_LINEAR_SCALES];
  event->zeros = zeros;
  if (egi_linear_storage_of(node) != EGI_LINEAR_NBITS || has_groups || event->block_size < 1) return false;
  if (zeros != 0 && graph->values[zeros].dtype != EG_DTYPE_U8) return false;
  return event->matrix.columns % event->block_size == 0 && graph->values[event->scales].kind == EGI_VALUE_WEIGHT &&
         (event->bits == 2 || event->bits == 4 || event->bits == 8);
}

/* MatMul (either side), Gemm and Linear, plain or packed. */
bool egi_moe_product(egi_moe_region *region, egi_node_id id) {
  const egi_graph *graph = region->graph;
  const egi_node *node = &graph->nodes[id];
  bool is_left = region->values[node->inputs[0]].matrix != NULL;
  const egi_moe_matrix *matrix = region->values[node->inputs[is_left ? 0 : 1]].matrix;
  const egi_moe_value *rows = &region->values[node->inputs[is_left ? 1 : 0]];
  bool is_n_first = node->op == EGI_OP_Linear || (node->op == EGI_OP_Gemm && egi_node_int(node, "transB", 0) != 0);
  bool is_plain = node->op == EGI_OP_MatMul || node->op == EGI_OP_Linear ||
                  (node->op == EGI_OP_Gemm && egi_node_int(node, "transA", 0) == 0);
  if (!is_plain || (is_left && node->op != EGI_OP_MatMul) || rows->tensor.data == NULL || matrix == NULL)
    return egi_moe_reject(region, id, "parameters in an operator that is not followed");
  egi_moe_event event = {.node = id, .matrix = *matrix, .in = rows->tensor, .n_stages = rows->n_stages};
  if (!read_packing(region, node, &event))
    return egi_moe_reject(region, id, "parameters in a storage that is not followed");
  bool seen_n_first = is_left || is_n_first; /* the matrix is seen as [N, K] */
  event.is_transposed = matrix->is_transposed == seen_n_first;
  memcpy(event.sources, rows->sources, sizeof event.sources);
  if (!multiply(region, id, matrix, &rows->tensor, is_left, &event)) return false;
  if (node->n_inputs > 2 && node->inputs[2] != 0) {
    const egi_moe_value *bias = &region->values[node->inputs[2]];
    if (bias->tensor.data == NULL || bias->parameter == 0) return egi_moe_reject(region, id, "a bias that is computed");
    event.bias = bias->parameter;
    add_bias(region, &bias->tensor, &event.out);
  }
  if (EGI_GROW(region->arena, &region->events, region->n_events, &region->events_capacity) != EG_OK)
    return egi_moe_reject(region, 0, "out of memory");
  region->events[region->n_events++] = event;
  egi_moe_value *out = egi_moe_touch(region, node->outputs[0]);
  if (out == NULL) return egi_moe_reject(region, 0, "out of memory");
  out->tensor = event.out;
  out->product = out->sources[0] = region->n_events;
  out->n_stages = (uint8_t)(rows->n_stages + 1);
  out->is_computed = true;
  return true;
}
