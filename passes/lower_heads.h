/* Attention as the operators of com.microsoft state it, before it becomes the standard one. */
#ifndef ENGRAFT_PASSES_LOWER_HEADS_H
#define ENGRAFT_PASSES_LOWER_HEADS_H

#include "passes/lower.h"

typedef struct egi_lowered_attention {
  egi_value_id q, k, v; /* [batch, heads, sequence, size]; k and v with the past */
  egi_value_id mask;    /* boolean, broadcast to [batch, heads, queries, keys], true: seen; 0: none */
  egi_value_id bias;    /* float, broadcast likewise, added to the scores; 0: none */
  egi_value_id sinks;   /* [heads]: the score of one more key without a value; 0: none */
  bool is_causal;       /* queries and keys are the same positions */
  int64_t heads, kv_heads;
  double scale, softcap; /* 0: 1 / sqrt(size); none */
} egi_lowered_attention;

/* [batch, sequence, heads · size] */
egi_value_id egi_lower_attend(egi_lowering *lowering, const egi_lowered_attention *attention);
/* [batch, sequence, heads · size] -> [batch, sequence, heads, size] */
egi_value_id egi_emit_heads(egi_emitter *emit, egi_value_id x, int64_t heads, int64_t size);
/* ... -> [batch, heads, sequence, size], and back: axes 1 and 2 exchanged. */
egi_value_id egi_emit_exchanged(egi_emitter *emit, egi_value_id x);
/* Past and new positions of [batch, heads, sequence, size]; `past` may be 0. */
egi_value_id egi_emit_with_past(egi_emitter *emit, egi_value_id past, egi_value_id x);
/* i64 [size of the axis]: 0, 1, .. */
egi_value_id egi_emit_positions(egi_emitter *emit, egi_value_id x, int axis);
/* i64 []: size of an axis. */
egi_value_id egi_emit_size(egi_emitter *emit, egi_value_id x, int axis);
/* Parts of the last axis, of the given sizes. */
void egi_emit_split(egi_emitter *emit, egi_value_id x, const int64_t *sizes, unsigned count, egi_value_id *out_parts);

/* Rotary position embedding of x, [batch, heads, sequence, size], whose caches hold half the rotated width. */
typedef struct egi_lowered_rotation {
  egi_value_id cos, sin, positions; /* positions i64 [batch, sequence] */
  bool is_interleaved;
  int64_t size; /* of a head */
} egi_lowered_rotation;
/* Fails when the width of the caches is not known. */
eg_status egi_lower_rotate(egi_lowering *lowering, const egi_lowered_rotation *rotation, egi_value_id *x);

#endif
