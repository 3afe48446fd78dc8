/* The attributes of engraft.FakeQuantize: what codes the numbers are rounded to. */
#ifndef ENGRAFT_GRAPH_FAKE_QUANTIZE_H
#define ENGRAFT_GRAPH_FAKE_QUANTIZE_H

#include "graph/graph.h"

/* Storages as in graph/linear.h:
 *   nbits  integers of `bits` (4 or 8) in blocks of `block_size` along the last axis (0: all of it), symmetric (1) or
 * not, as base/integer_codes.h makes them bnb4   NF4 in blocks of `block_size` of the flattened matrix, as
 * base/blockwise.h makes them */
typedef struct egi_fake_quantize {
  bool is_nf4, is_symmetric;
  unsigned bits;
  int64_t block; /* 0: the last axis */
} egi_fake_quantize;

/* False where the attributes say something else. */
bool egi_fake_quantize_read(const egi_node *node, egi_fake_quantize *out_form);
/* Writes the attributes that say it; returns how many of the four are used. */
unsigned egi_fake_quantize_write(const egi_fake_quantize *form, egi_attribute attributes[4]);

#endif
