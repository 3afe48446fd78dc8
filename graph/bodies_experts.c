/* Pieces of bodies that hold matrices of experts: stacks, and packed numbers written out. The names `front`, `zero` and
 * `last` of the lists [0], [0] and [-1] are there. */
#include <stdio.h>

#include "base/blockwise.h"
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

/* The text with @ for a prefix, $ for a name and # for an input. */
static void add_line(const writer *w, const char *text, const char *prefix, const char *name, uint32_t input) {
  for (; *text != '\0'; text++) {
    if (*text == '@')
      egi_text_add(w->body->text, prefix);
    else if (*text == '$')
      egi_text_add(w->body->text, name);
    else if (*text == '#')
      egi_text_format(w->body->text, "in%u", input);
    else
      egi_text_append(w->body->text, text, 1);
  }
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

/* `name`_part<i>: the matrix or stack of one operand of codes, flat; own names end in its number. */
static void add_flat_levels(const writer *w, const char *name, uint32_t i, int64_t n_blocks) {
  const egi_ragged *ragged = w->ragged;
  const int64_t pairs[2] = {-1, 1}, parts[3] = {1, 256, (n_blocks + EGI_NESTED_BLOCK - 1) / EGI_NESTED_BLOCK};
  char p[48], own[64];
  snprintf(p, sizeof p, "%s_%u", name, i); /* prefix of the operand's own values */
  snprintf(own, sizeof own, "%s_pairs", p);
  egi_body_integers(w->body, own, pairs, 2);
  add_line(w,
           "@_column = Reshape (#, @_pairs)\n@_high = BitShift <direction = \"RIGHT\"> (@_column, $_four)\n"
           "@_low = BitwiseAnd (@_column, $_fifteen)\n@_both = Concat <axis = 1> (@_high, @_low)\n"
           "@_row = Reshape (@_both, last)\n@_place = Cast <to = 7> (@_row)\n@_level = Gather ($_levels, @_place)\n",
           p, name, ragged->first[EGI_RAGGED_WEIGHT] + i);
  if (ragged->counts[EGI_RAGGED_ZEROS] > 0) {
    snprintf(own, sizeof own, "%s_split", p);
    egi_body_integers(w->body, own, parts, 3);
    snprintf(own, sizeof own, "%s_blocks", p);
    egi_body_integer(w->body, own, n_blocks);
    add_line(w, "@_offset, @_map, @_factors = Split <axis = 0> (#, @_split)\n", p, name,
             ragged->first[EGI_RAGGED_ZEROS] + i);
    add_line(w,
             "@_code = Cast <to = 7> (#)\n@_centred = Gather (@_map, @_code)\n"
             "@_count = Range ($_zero, @_blocks, $_one)\n@_group = Div (@_count, $_nested)\n"
             "@_factor = Gather (@_factors, @_group)\n@_wide = Mul (@_centred, @_factor)\n"
             "@_scale = Add (@_wide, @_offset)\n",
             p, name, ragged->first[EGI_RAGGED_SCALES] + i);
  } else {
    add_line(w, "@_scale = Identity (#)\n", p, name, ragged->first[EGI_RAGGED_SCALES] + i);
  }
  add_line(w,
           "@_size = Size (@_level)\n@_index = Range ($_zero, @_size, $_one)\n@_block = Div (@_index, $_length)\n"
           "@_each = Gather (@_scale, @_block)\n@_part = Mul (@_level, @_each)\n",
           p, name, 0);
}

/* `name`: levels[codes] · scales, [E, N, K]. */
static void add_levels(const writer *w, const char *name) {
  const egi_ragged *ragged = w->ragged;
  egi_text *text = w->body->text;
  uint32_t count = ragged->counts[EGI_RAGGED_WEIGHT];
  const float *levels = egi_four_bit_levels((egi_four_bit)ragged->quant_type);
  int64_t n = egi_body_size(w->body, ragged->first[EGI_RAGGED_WEIGHT], -2) * ragged->in_features;
  int64_t n_elements = count == 1 ? ragged->n_experts * n : n;
  const int64_t shape[3] = {ragged->n_experts, -1, ragged->in_features};
  char own[48];
  egi_text_format(text, "%s_levels = Constant <value_floats = [", name);
  for (int i = 0; i < 16; i++) egi_text_format(text, "%s%.9e", i > 0 ? ", " : "", (double)levels[i]);
  add_line(w,
           "]> ()\n$_four = Constant <value = uint8[1] {4}> ()\n$_fifteen = Constant <value = uint8[1] {15}> ()\n"
           "$_zero = Constant <value_int = 0> ()\n$_one = Constant <value_int = 1> ()\n",
           "", name, 0);
  snprintf(own, sizeof own, "%s_length", name);
  egi_body_integer(w->body, own, ragged->block_size);
  snprintf(own, sizeof own, "%s_nested", name);
  egi_body_integer(w->body, own, EGI_NESTED_BLOCK);
  for (uint32_t i = 0; i < count; i++)
    add_flat_levels(w, name, i, (n_elements + ragged->block_size - 1) / ragged->block_size);
  egi_text_format(text, "%s_all = Concat <axis = 0> (", name);
  for (uint32_t i = 0; i < count; i++) egi_text_format(text, "%s%s_%u_part", i > 0 ? ", " : "", name, i);
  line(w, ")\n");
  snprintf(own, sizeof own, "%s_shape", name);
  egi_body_integers(w->body, own, shape, 3);
  egi_text_format(text, "%s_stack = Reshape (%s_all, %s_shape)\n%s = CastLike (%s_stack, %s)\n", name, name, name, name,
                  name, w->like);
}

void egi_body_add_experts(egi_body *body, const egi_ragged *ragged, const char *name, const char *like) {
  const writer w = {body, ragged, like};
  char stack[32];
  snprintf(stack, sizeof stack, "%s_w", name);
  if (ragged->has_levels)
    add_levels(&w, stack);
  else if (ragged->is_quantised)
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
