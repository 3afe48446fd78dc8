/* Damaging good ONNX files, deterministically by seed. */
#ifndef ENGRAFT_TESTS_DAMAGE_H
#define ENGRAFT_TESTS_DAMAGE_H

#include "base/base.h"
#include "onnx.pb-c.h"

/* Beside a damaged file the driver puts a file of this name and size, and a link to it, for external data. */
#define DAMAGE_EXTERNAL "weights.bin"
#define DAMAGE_EXTERNAL_LINK "link.bin"
#define DAMAGE_EXTERNAL_BYTES 4096

typedef struct damage {
  egi_arena *arena;
  uint64_t random;
  Onnx__ModelProto *model;
  Onnx__GraphProto *graph; /* of the model; has nodes */
} damage;

/* A number below `bound`, which is not 0. */
uint64_t damage_random(damage *d, uint64_t bound);
#define DAMAGE_CHOOSE(d, array) ((array)[damage_random((d), sizeof(array) / sizeof((array)[0]))])

/* The message-level kinds, in the order of their names.
 */
typedef struct damage_kind {
  const char *name;
  void (*apply)(damage *d);
} damage_kind;
/* damage_graph.c: names, order, functions, nesting; damage_values.c: types, sizes, attributes, weights. */
extern const damage_kind damage_graph_kinds[], damage_value_kinds[];
extern const unsigned damage_n_graph_kinds, damage_n_value_kinds;

/* Number of kinds, byte-level ones included, and the name of each. */
unsigned damage_kind_count(void);
const char *damage_kind_name(unsigned kind);
/* The file with one fault of `kind`, in the arena. NULL: nothing to damage in this way, no model, or out of memory. */
uint8_t *damage_file(egi_arena *arena, const uint8_t *bytes, size_t size, unsigned kind, uint64_t seed,
                     size_t *out_size);

/* For the kinds. Texts and rows are made in the arena. */
char *damage_text(damage *d, const char *text);
/* The list, one longer, with `row` at its end. */
void *damage_append(damage *d, void *list, size_t *count, void *row);
Onnx__NodeProto *damage_add_node(damage *d, Onnx__GraphProto *graph, const char *op, const char *input,
                                 const char *output);
Onnx__AttributeProto *damage_add_attribute(damage *d, Onnx__NodeProto *node, const char *name, int type);
Onnx__TensorProto *damage_add_weight(damage *d, const char *name, int dtype, size_t rank, const int64_t *dims,
                                     size_t size);
/* The first output becomes this value, of any type. */
void damage_give_out(damage *d, const char *name);
Onnx__NodeProto *damage_any_node(damage *d);
/* NULL where the model has none. */
Onnx__TensorProto *damage_any_weight(damage *d);
/* One of the names that nodes, weights or inputs give. */
char *damage_any_name(damage *d);

#endif
