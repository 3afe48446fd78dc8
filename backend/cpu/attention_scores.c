/* Attention's output qk_matmul_output: the scores of whole rows, as products (mode 0), soft-capped (1), masked (2) or
 * as probabilities (3). Asked for in tests and debugging only: row by row in the caller's thread, after the blocked
 * kernel. */
#include "backend/cpu/attention.h"

#include <math.h>

typedef struct score_buffers {
  int64_t mode;
  char *scores, *bias, *scratch;
} score_buffers;

static size_t row_bytes(const egi_attention *a) {
  return ((size_t)a->n_keys * a->bytes + 63) / 64 * 64;
}

size_t egi_attention_output_bytes(const egi_attention *a) {
  return 2 * row_bytes(a) + egi_product_scratch(1, a->n_keys);
}

/* -inf where the query does not look, the bias where there is a mask. */
static void hide(const egi_attention *a, egi_key_range range, char *scores, const char *bias) {
  for (int64_t key = 0; key < a->n_keys; key++) {
    char *at = scores + (size_t)key * a->bytes;
    bool is_seen = key >= range.first && key < range.last;
    double added = is_seen && bias ? egi_real_get(bias + (size_t)key * a->bytes, a->dtype) : 0;
    bool is_hidden = !is_seen || added == -HUGE_VAL;
    egi_real_set(at, a->dtype, is_hidden ? -HUGE_VAL : egi_real_get(at, a->dtype) + added);
  }
}

static void to_probabilities(const egi_attention *a, char *scores) {
  bool is_empty = true;
  for (int64_t key = 0; key < a->n_keys && is_empty; key++)
    is_empty = egi_real_get(scores + (size_t)key * a->bytes, a->dtype) == -HUGE_VAL;
  if (is_empty)
    memset(scores, 0, (size_t)a->n_keys * a->bytes);
  else
    a->functions->softmax(scores, scores, a->n_keys);
}

static void output_row(const egi_attention *a, const egi_kernel_call *call, const egi_attention_head *head,
                       int64_t query, const score_buffers *buffers) {
  char *scores = buffers->scores;
  const int64_t at[2] = {query, 0}, size[2] = {1, a->n_keys};
  egi_attention_scores(a, head, at, size, scores, buffers->scratch);
  for (int64_t key = 0; key < a->n_keys && buffers->mode >= 1 && a->softcap != 0; key++) {
    char *score = scores + (size_t)key * a->bytes;
    egi_real_set(score, a->dtype, a->softcap * tanh(egi_real_get(score, a->dtype) / a->softcap));
  }
  if (buffers->mode >= 2) {
    int64_t start[2] = {query, 0}, columns[2] = {1, a->mask_columns};
    egi_mask_state state =
        egi_attention_mask(a, head, &call->inputs[a->has_mask ? 3 : 0], start, columns, buffers->bias);
    egi_key_range range = egi_attention_range(a, head, query);
    if (state == EGI_MASK_HIDDEN) range.last = range.first;
    if (state == EGI_MASK_BIAS) { /* of a tile that may have become smaller */
      if (range.first < start[1]) range.first = start[1];
      if (range.last > start[1] + columns[1]) range.last = start[1] + columns[1];
    }
    hide(a, range, scores, state == EGI_MASK_BIAS ? buffers->bias - (size_t)start[1] * a->bytes : NULL);
  }
  if (buffers->mode == 3) to_probabilities(a, scores);
  const egi_tensor *out = &call->outputs[3];
  int64_t offset = head->batch * out->strides[0] + head->q_head * out->strides[1] + query * out->strides[2];
  for (int64_t key = 0; key < a->n_keys; key++)
    memcpy((char *)out->data + (offset + key * out->strides[3]) * (int64_t)a->bytes, scores + (size_t)key * a->bytes,
           a->bytes);
}

void egi_attention_output(const egi_attention *a, const egi_kernel_call *call, int64_t mode, char *workspace,
                          const egi_tensor *key) {
  score_buffers buffers = {mode, workspace, workspace + row_bytes(a), workspace + 2 * row_bytes(a)};
  for (int64_t index = 0; index < a->n_batches * a->q_heads; index++) {
    egi_attention_head head = egi_attention_head_at(a, call, index, key->data, key->data);
    for (int64_t query = 0; query < a->n_queries; query++) output_row(a, call, &head, query, &buffers);
  }
}
