/* Between fuse_rope and rotary_tables.c: tables of cosines and sines as RotaryEmbedding takes them. */
#ifndef ENGRAFT_PASSES_ROTARY_H
#define ENGRAFT_PASSES_ROTARY_H

#include "passes/rules.h"

/* How a table is repeated along its last axis. */
typedef enum egi_rotary_width {
  EGI_ROTARY_SINGLE, /* a number for each pair: nothing is repeated */
  EGI_ROTARY_HALVES, /* f0 f1 .. f0 f1 .. */
  EGI_ROTARY_PAIRS   /* f0 f0 f1 f1 .. */
} egi_rotary_width;

/* What stands behind what in the value that is rotated. */
typedef enum egi_rotary_layout {
  EGI_ROTARY_HEADS_FIRST,   /* [batch, heads, sequence, size] */
  EGI_ROTARY_SEQUENCE_FIRST /* [batch, sequence, heads, size] */
} egi_rotary_layout;

/* Tables made so far, shared by the layers; by value, width and layout. */
typedef struct egi_rotary_tables {
  egi_graph *graph;
  egi_value_id *made[6];
  uint8_t *is_repeated[2]; /* 0: not looked at, 1: no, 2: yes */
  uint32_t n_values;
} egi_rotary_tables;

eg_status egi_rotary_tables_init(egi_rotary_tables *tables, egi_graph *graph, egi_arena *arena);
/* The value broadcasts to `x` as a table of that layout does, [batch or 1, sequence or 1, width]. */
bool egi_rotary_table_fits(const egi_rotary_tables *tables, egi_value_id table, egi_value_id x,
                           egi_rotary_layout layout, int64_t width);
/* Proven by data flow, or by looking at the bytes of a constant. */
bool egi_rotary_table_is_repeated(egi_rotary_tables *tables, egi_value_id table, egi_rotary_width width);
/* [batch, sequence, pairs], as the operator takes it, for rotating `x`. */
egi_value_id egi_rotary_table(egi_rotary_tables *tables, egi_emitter *emit, egi_value_id table, egi_value_id x,
                              egi_rotary_layout layout, egi_rotary_width width);

#endif
