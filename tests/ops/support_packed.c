/* Conformance cases of PackedMetadata: documents of length 1, one that fills the row, a tail, room that is left in
 * cu_seqlens, and offsets that are refused. */
#include "support_ops.h"

typedef struct packed_case {
  int64_t n_rows, n_offsets;
  int64_t offsets[8];
} packed_case;

static const packed_case good[] = {
    {1, 2, {0, 1}},
    {5, 2, {0, 5}},
    {5, 6, {0, 1, 2, 3, 4, 5}},
    {9, 4, {0, 4, 5, 9}},
    {9, 7, {0, 3, 9, 9, 9, 9, 9}},
    {70, 5, {0, 1, 66, 69, 70}},
    {0, 1, {0}},
};
static const packed_case bad[] = {
    {5, 2, {1, 5}},       {5, 3, {0, 2, 4}},    {5, 3, {0, 6, 5}},
    {5, 4, {0, 2, 2, 5}}, {5, 4, {0, 3, 1, 5}}, {5, 3, {0, -1, 5}},
};

static const int64_t blocks[] = {64, 1, 4, 7};

/* `block` 0: the bounds of blocks are not asked for. */
static void begin(ops_case *c, void **state, const packed_case *a, int64_t block, ops_tensor *out[4]) {
  ops_begin(c, state, EGI_OP_PackedMetadata, EG_DTYPE_I32);
  ops_tensor *offsets = ops_add_input(c, EG_DTYPE_I32, 1, &a->n_offsets);
  for (int64_t i = 0; i < a->n_offsets; i++) offsets->values[i] = (double)a->offsets[i];
  (void)ops_add_input(c, EG_DTYPE_I64, 2, (const int64_t[2]){1, a->n_rows});
  for (int i = 0; i < 3; i++) out[i] = ops_add_output(c, EG_DTYPE_I32, 1, &a->n_rows);
  if (block > 0) out[3] = ops_add_output(c, EG_DTYPE_I32, 2, (const int64_t[2]){(a->n_rows + block - 1) / block, 2});
  if (block > 0 && block != EGI_BLOCK_ROWS) ops_add_attribute(c, egi_attribute_int("block", block));
  c->absolute = c->relative = 0;
}

static void check(void **state, const packed_case *a, int64_t block, bool is_read_back) {
  ops_case c;
  ops_tensor *out[4] = {NULL};
  begin(&c, state, a, block, out);
  if (is_read_back) ops_add_attribute(&c, egi_attribute_int("readback", 1));
  for (int64_t i = 0, document = 0; i < a->n_rows; i++) {
    while (a->offsets[document + 1] <= i) document++;
    out[0]->values[i] = (double)a->offsets[document];
    out[1]->values[i] = (double)(a->offsets[document + 1] - 1);
    out[2]->values[i] = (double)(i - a->offsets[document]);
    if (block == 0) continue;
    if (i % block == 0) out[3]->values[i / block * 2] = out[0]->values[i];
    out[3]->values[i / block * 2 + 1] = out[1]->values[i];
  }
  ops_check(&c);
  ops_end(&c);
}

void ops_case_packed_metadata(void **state, egi_op op) {
  (void)op;
  for (size_t i = 0; i < 2 * EGI_COUNT(good); i++) {
    check(state, &good[i / 2], 0, i % 2 == 1);
    for (size_t b = 0; b < EGI_COUNT(blocks); b++) check(state, &good[i / 2], blocks[b], i % 2 == 1);
  }
  for (size_t i = 0; i < EGI_COUNT(bad); i++) {
    ops_case c;
    ops_tensor *out[4];
    begin(&c, state, &bad[i], 0, out);
    c.expected_status = EG_ERROR_DATA;
    ops_check(&c);
    ops_end(&c);
  }
}
