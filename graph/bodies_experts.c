/* Pieces of bodies that hold matrices of experts: stacks, and packed numbers written out. The names `front`, `zero` and
 * `last` of the lists [0], [0] and [-1] are there. */
#include <stdio.h>

#include "graph/bodies.h"
#include "graph/ragged.h"

typedef struct writer {
  egi_body *body;
  const egi_ragged *ragged;
  const char *like; /* a value of the type of the numbers */
} writer;

static void line(const writer *w, const char *text) {
  egi_text_add(w->body->text, text);
}

static void list(const writer *w, const char *name, int64_t a) {
  egi_body_integers(w->body, name, &a, 1);
}

/* `name`: the role's operand as a stack. */
static void add_stack(const writer *w, const char *name, egi_ragged_role role) {
  uint32_t count = w->ragged->counts[role], first = w->ragged->first[role];
  if (count == 1) {
    egi_text_format(w->body->text, "%s = Identity (in%u)\n", name, first);
    return;
  }
  for (uint32_t i = first; i < first + count; i++)
    egi_text_format(w->body->text, "one%u = Unsqueeze (in%u, front)\n", i, i);
  egi_text_format(w->body->text, "%s = Concat <axis = 0> (", name);
  for (uint32_t i = first; i < first + count; i++) egi_text_format(w->body->text, "%sone%u", i > first ? ", " : "", i);
  line(w, ")\n");
}

/* `name`: numbers [E, n, columns], one after the other, from packed bytes [E, n, ..] called `from`. */
static void add_unpacked(const writer *w, const char *name, const char *from, int64_t columns) {
  egi_text *text = w->body->text;
  int64_t bits = w->ragged->bits;
  if (bits == 8) {
    egi_text_format(text, "%s = CastLike (%s, %s)\n", name, from, w->like);
    return;
  }
  const int64_t spread[4] = {0, 0, -1, 1}, flat[3] = {0, 0, -1};
  char own[48];
  snprintf(own, sizeof own, "%s_spread", name);
  egi_body_integers(w->body, own, spread, 4);
  snprintf(own, sizeof own, "%s_flat", name);
  egi_body_integers(w->body, own, flat, 3);
  snprintf(own, sizeof own, "%s_end", name);
  list(w, own, columns);
  egi_text_format(text, "%s_mask_ = Constant <value_int = %lld> ()\n%s_mask = Cast <to = 2> (%s_mask_)\n", name,
                  (1ll << bits) - 1, name, name);
  for (int64_t shift = 0; shift < 8; shift += bits)
    egi_text_format(text,
                    "%s_by%lld_ = Constant <value_int = %lld> ()\n%s_by%lld = Cast <to = 2> (%s_by%lld_)\n"
                    "%s_at%lld = BitShift <direction = \"RIGHT\"> (%s, %s_by%lld)\n"
                    "%s_low%lld = BitwiseAnd (%s_at%lld, %s_mask)\n%s_part%lld = Reshape (%s_low%lld, %s_spread)\n",
                    name, (long long)shift, (long long)shift, name, (long long)shift, name, (long long)shift, name,
                    (long long)shift, from, name, (long long)shift, name, (long long)shift, name, (long long)shift,
                    name, name, (long long)shift, name, (long long)shift, name);
  egi_text_format(text, "%s_parts = Concat <axis = 3> (", name);
  for (int64_t shift = 0; shift < 8; shift += bits)
    egi_text_format(text, "%s%s_part%lld", shift > 0 ? ", " : "", name, (long long)shift);
  egi_text_format(text,
                  ")\n%s_all = Reshape (%s_parts, %s_flat)\n%s_cut = Slice (%s_all, zero, %s_end, last)\n"
                  "%s = CastLike (%s_cut, %s)\n",
                  name, name, name, name, name, name, name, name, w->like);
}

/* `name` [E, n, columns] from a value [E, n, blocks] for each block. */
static void add_repeated(const writer *w, const char *name, const char *from, int64_t block, int64_t columns) {
  const int64_t flat[3] = {0, 0, -1}, repeats[4] = {1, 1, 1, block};
  char own[48];
  snprintf(own, sizeof own, "%s_flat", name);
  egi_body_integers(w->body, own, flat, 3);
  snprintf(own, sizeof own, "%s_repeats", name);
  egi_body_integers(w->body, own, repeats, 4);
  snprintf(own, sizeof own, "%s_end", name);
  list(w, own, columns);
  egi_text_format(w->body->text,
                  "%s_one = Unsqueeze (%s, last)\n%s_tiled = Tile (%s_one, %s_repeats)\n"
                  "%s_all = Reshape (%s_tiled, %s_flat)\n%s = Slice (%s_all, zero, %s_end, last)\n",
                  name, from, name, name, name, name, name, name, name, name, name);
}

/* `name`: (codes - zeros) · scales, [E, n, columns]. */
static void add_decoded(const writer *w, const char *name) {
  egi_text *text = w->body->text;
  const egi_ragged *ragged = w->ragged;
  int64_t columns = ragged->in_features, block = ragged->block_size > 0 ? ragged->block_size : columns;
  int64_t blocks = (columns + block - 1) / block;
  char a[40], b[40];
  snprintf(a, sizeof a, "%s_bytes", name);
  add_stack(w, a, EGI_RAGGED_WEIGHT);
  snprintf(b, sizeof b, "%s_codes", name);
  add_unpacked(w, b, a, columns);
  snprintf(a, sizeof a, "%s_scale", name);
  add_stack(w, a, EGI_RAGGED_SCALES);
  snprintf(b, sizeof b, "%s_scales", name);
  add_repeated(w, b, a, block, columns);
  if (ragged->counts[EGI_RAGGED_ZEROS] > 0) {
    snprintf(a, sizeof a, "%s_zbytes", name);
    add_stack(w, a, EGI_RAGGED_ZEROS);
    snprintf(b, sizeof b, "%s_zero", name);
    add_unpacked(w, b, a, blocks);
    snprintf(a, sizeof a, "%s_zeros", name);
    add_repeated(w, a, b, block, columns);
  } else {
    snprintf(a, sizeof a, "%s_zeros", name);
    egi_body_number(w->body, a, (double)(1 << (ragged->bits - 1)), w->like);
  }
  egi_text_format(text, "%s_centred = Sub (%s_codes, %s_zeros)\n%s = Mul (%s_centred, %s_scales)\n", name, name, name,
                  name, name, name);
}

void egi_body_add_experts(egi_body *body, const egi_ragged *ragged, const char *name, const char *like) {
  const writer w = {body, ragged, like};
  char stack[32];
  snprintf(stack, sizeof stack, "%s_w", name);
  if (ragged->is_quantised)
    add_decoded(&w, stack);
  else
    add_stack(&w, stack, EGI_RAGGED_WEIGHT);
  egi_text_format(body->text,
                  ragged->is_transposed ? "%s = Transpose <perm = [0, 2, 1]> (%s)\n" : "%s = Identity (%s)\n", name,
                  stack);
}

void egi_body_add_expert_biases(egi_body *body, const egi_ragged *ragged, const char *name) {
  const writer w = {body, ragged, "x"};
  add_stack(&w, name, EGI_RAGGED_BIAS);
}
