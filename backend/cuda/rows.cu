/* The host's part of rows.cuh: dims and strides of rows, and how many threads share one. */
#include "backend/cuda/rows.cuh"

namespace egi {

divisor divisor_of(int64_t value) {
  divisor d = {0, 0};
  while (d.shift < 31 && (INT64_C(1) << d.shift) < value) d.shift++;
  const uint64_t power = UINT64_C(1) << 32;
  d.magic = static_cast<uint32_t>(
      power * ((UINT64_C(1) << d.shift) - static_cast<uint64_t>(value)) / static_cast<uint64_t>(value) + 1);
  return d;
}

namespace {

/* Joins dims [0, rank) where the strides of all operands allow it, and leaves out those of 1. */
int join(rows *r, int64_t *dims, int rank, bool is_inner) {
  int n = 0;
  for (int d = 0; d < rank; d++) {
    if (dims[d] == 1) continue;
    bool is_joined = n > 0;
    for (int k = 0; k < r->n_operands && is_joined; k++) {
      const int64_t *strides = is_inner ? r->operands[k].inner : r->operands[k].outer;
      is_joined = strides[n - 1] == strides[d] * dims[d];
    }
    const int at = is_joined ? n - 1 : n++;
    dims[at] = is_joined ? dims[at] * dims[d] : dims[d];
    for (int k = 0; k < r->n_operands; k++) {
      int64_t *strides = is_inner ? r->operands[k].inner : r->operands[k].outer;
      strides[at] = strides[d];
    }
  }
  if (n > 0) return n;
  dims[0] = 1;
  for (int k = 0; k < r->n_operands; k++) (is_inner ? r->operands[k].inner : r->operands[k].outer)[0] = 0;
  return 1;
}

/* The last of the outer dims becomes the row. */
void split_last(rows *r) {
  const int last = --r->outer_rank;
  const bool is_only = last == 0;
  r->length = r->inner[0] = r->outer[last];
  if (is_only) r->outer[0] = r->outer_rank = 1;
  r->count = 1;
  for (int d = 0; d < r->outer_rank; d++) r->count *= r->outer[d];
  for (int k = 0; k < r->n_operands; k++) {
    row_operand *o = &r->operands[k];
    o->inner[0] = o->outer[last];
    if (is_only) o->outer[0] = 0;
  }
}

bool can_be_vector(const rows *r, const row_operand *o, int packet) {
  if (r->inner_rank != 1 || o->inner[0] != 1 || r->length % packet != 0) return false;
  for (int d = 0; d < r->outer_rank; d++)
    if (o->outer[d] % packet != 0) return false;
  return true;
}

bool has_room(rows_builder *b, const egi_tensor *tensor) {
  row_operand *o = &b->r->operands[b->r->n_operands++];
  *o = {};
  o->kind = element_kind_of(tensor->dtype);
  return tensor->dtype != EG_DTYPE_UNDEFINED;
}

int64_t *stride_at(rows *r, row_operand *o, int d) {
  return d < r->outer_rank ? &o->outer[d] : &o->inner[d - r->outer_rank];
}

} // namespace

element_kind element_kind_of(eg_dtype dtype) {
  return dtype == EG_DTYPE_F64 ? ELEMENT_F64 : element_of(dtype);
}

rows_builder rows_begin(rows *r, const egi_tensor *shape, int axis) {
  rows_builder b = {r, shape->rank, {}, false};
  *r = {};
  r->outer_rank = axis;
  r->inner_rank = shape->rank - axis;
  r->count = r->length = 1;
  for (int d = 0; d < shape->rank; d++) {
    b.source[d] = d;
    (d < axis ? r->outer[d] : r->inner[d - axis]) = shape->dims[d];
    (d < axis ? r->count : r->length) *= shape->dims[d];
  }
  return b;
}

rows_builder rows_begin_along(rows *r, const egi_tensor *shape, int axis) {
  egi_tensor moved = *shape;
  for (int d = axis; d + 1 < shape->rank; d++) moved.dims[d] = shape->dims[d + 1];
  if (shape->rank > 0) moved.dims[shape->rank - 1] = shape->dims[axis];
  rows_builder b = rows_begin(r, &moved, shape->rank > 0 ? shape->rank - 1 : 0);
  for (int d = axis; d + 1 < shape->rank; d++) b.source[d] = d + 1;
  if (shape->rank > 0) b.source[shape->rank - 1] = axis;
  return b;
}

rows_builder rows_begin_elements(rows *r, const egi_tensor *shape) {
  rows_builder b = rows_begin(r, shape, shape->rank);
  b.is_elements = true;
  return b;
}

bool rows_add(rows_builder *b, const egi_tensor *tensor) {
  if (!has_room(b, tensor)) return true;
  rows *r = b->r;
  row_operand *o = &r->operands[r->n_operands - 1];
  for (int d = 0; d < b->rank; d++) {
    const int own = b->source[d] - (b->rank - tensor->rank);
    const int64_t size = d < r->outer_rank ? r->outer[d] : r->inner[d - r->outer_rank];
    if (own < 0 || (tensor->dims[own] == 1 && size != 1)) continue;
    if (tensor->dims[own] != size) return false;
    *stride_at(r, o, d) = tensor->strides[own];
  }
  for (int i = 0; i < tensor->rank - b->rank; i++)
    if (tensor->dims[i] != 1) return false;
  return true;
}

bool rows_add_numbers(rows_builder *b, const egi_tensor *tensor) {
  if (!has_room(b, tensor)) return true;
  row_operand *o = &b->r->operands[b->r->n_operands - 1];
  if (tensor->rank != b->r->outer_rank) return false;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->dims[d] != b->r->outer[d]) return false;
    o->outer[d] = tensor->strides[d];
  }
  return true;
}

bool rows_is_shared(const rows *r, int k) {
  for (int d = 0; d < r->outer_rank; d++)
    if (r->operands[k].outer[d] != 0 && r->outer[d] != 1) return false;
  return true;
}

void rows_finish(rows_builder *b, int packet) {
  rows *r = b->r;
  r->outer_rank = join(r, r->outer, r->outer_rank, false);
  r->inner_rank = join(r, r->inner, r->inner_rank, true);
  if (b->is_elements) split_last(r);
  r->is_small = r->count <= INT32_MAX && r->length <= INT32_MAX && r->count * r->length <= INT32_MAX;
  r->row_packets = (r->length + packet - 1) / packet;
  if (r->is_small) r->row_packets_by = divisor_of(r->row_packets > 0 ? r->row_packets : 1);
  for (int d = 0; d < r->outer_rank && r->is_small; d++) r->outer_by[d] = divisor_of(r->outer[d] > 0 ? r->outer[d] : 1);
  for (int d = 0; d < r->inner_rank && r->is_small; d++) r->inner_by[d] = divisor_of(r->inner[d] > 0 ? r->inner[d] : 1);
  for (int k = 0; k < r->n_operands; k++) r->operands[k].can_be_vector = can_be_vector(r, &r->operands[k], packet);
}

void rows_set_data(rows *r, int k, const egi_tensor *tensor) {
  row_operand *o = &r->operands[k];
  o->data = static_cast<char *>(tensor->data);
  o->is_vector = o->can_be_vector && is_aligned_to(tensor->data, 16);
}

row_threads row_threads_for(int64_t length, int packet) {
  const int64_t n_packets = (length + packet - 1) / packet;
  const int64_t wanted = (n_packets + HELD_PACKETS - 1) / HELD_PACKETS;
  if (wanted > MOST_THREADS) return {MOST_THREADS, MOST_THREADS, false};
  if (wanted > 32) {
    const int group = static_cast<int>((wanted + 31) / 32 * 32);
    return {group, group, true};
  }
  int group = 1;
  while (group < wanted) group *= 2;
  return {group, ROW_THREADS, true};
}

int packet_of(eg_dtype dtype) {
  return dtype == EG_DTYPE_F64 ? 2 : dtype == EG_DTYPE_F32 ? 4 : 8;
}

unsigned packet_blocks(const rows *r) {
  const int64_t n = (r->count * r->row_packets + ROW_THREADS - 1) / ROW_THREADS;
  return static_cast<unsigned>(n < INT32_MAX ? n : INT32_MAX);
}

unsigned row_blocks(const rows *r, const row_threads &threads) {
  const int64_t rows_a_block = threads.n_threads / threads.group;
  const int64_t n = (r->count + rows_a_block - 1) / rows_a_block;
  return static_cast<unsigned>(n < INT32_MAX ? n : INT32_MAX);
}

} // namespace egi
