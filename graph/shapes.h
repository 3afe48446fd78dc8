/* Inside of shape inference: what a shape rule sees and the helpers it writes its results with. */
#ifndef ENGRAFT_GRAPH_SHAPES_H
#define ENGRAFT_GRAPH_SHAPES_H

#include "graph/dims.h"
#include "graph/graph.h"

/* Longest tensor whose content is followed. */
#define EGI_MAX_ELEMENTS 64

typedef struct egi_inference {
  egi_graph *graph;
  egi_dims *dims;
  egi_node_id id;
  const egi_node *node;
} egi_inference;

/* A rule is called with inputs of known type and shape (optional ones may be absent) and sets every output. */
typedef eg_status (*egi_shape_rule)(egi_inference *in);
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  eg_status egi_shape_##shape(egi_inference *in);
#include "graph/ops.def"
#undef EGI_OP

/* EG_ERROR_SHAPE with node, reason and the types of all inputs. */
eg_status egi_shape_fail(const egi_inference *in, const char *format, ...) EGI_PRINTF(2, 3);

/* NULL when the optional input is absent. */
const egi_value *egi_shape_input(const egi_inference *in, unsigned index);
/* Known content of an input of rank 0 or 1, else NULL; single elements may be EGI_DIM_NONE. */
const egi_dim *egi_shape_elements(const egi_inference *in, unsigned index, uint32_t *out_count);
/* Known integers of an input; false when something of it is unknown. */
bool egi_shape_integers(const egi_inference *in, unsigned index, int64_t *out, uint32_t capacity, uint32_t *out_count);
/* Number of elements of a rank-1 input when that is known. */
bool egi_shape_length(const egi_inference *in, unsigned index, int64_t *out_length);

/* Sets (or confirms, when declared) an output; does nothing for one that is not wanted. */
eg_status egi_shape_set(egi_inference *in, unsigned output, eg_dtype dtype, int rank, const egi_dim *dims);
eg_status egi_shape_set_like(egi_inference *in, unsigned output, const egi_value *value);
eg_status egi_shape_set_unknown(egi_inference *in, unsigned output, eg_dtype dtype, int rank);

/* EG_ERROR_UNSUPPORTED above EGI_MAX_RANK. */
eg_status egi_shape_check_rank(const egi_inference *in, int64_t rank);
/* EG_ERROR_SHAPE unless input `index`, when present, is of that type. */
eg_status egi_shape_check_type(const egi_inference *in, unsigned index, eg_dtype dtype);
/* ... is int32 or int64 */
eg_status egi_shape_check_index_type(const egi_inference *in, unsigned index);
/* ... has that rank */
eg_status egi_shape_check_input_rank(const egi_inference *in, unsigned index, int rank);
/* Axis counted from the end when negative. */
eg_status egi_shape_axis(const egi_inference *in, int64_t axis, int rank, int *out_axis);
/* A bit for each axis in a list; repeated ones are an error. */
eg_status egi_shape_axes(const egi_inference *in, const int64_t *axes, uint32_t count, int rank, uint32_t *out_mask);

/* Both must be equal: numbers are compared, anything else is assumed. `out_dim` (may be NULL) is the simpler of both.
 */
eg_status egi_shape_equal(const egi_inference *in, const char *what, egi_dim a, egi_dim b, egi_dim *out_dim);
/* Two dims that are broadcast against each other. */
eg_status egi_shape_broadcast_dim(const egi_inference *in, egi_dim a, egi_dim b, egi_dim *out_dim);
/* Broadcasts into a shape that holds the result so far; *rank is at least 0. */
eg_status egi_shape_broadcast_into(const egi_inference *in, int other_rank, const egi_dim *other, int *rank,
                                   egi_dim *dims);
/* `other` may be broadcast to the given shape without changing that. */
eg_status egi_shape_broadcasts_to(const egi_inference *in, const char *what, const egi_value *other, int rank,
                                  const egi_dim *dims);
bool egi_shape_is_number(const egi_inference *in, egi_dim dim, int64_t number);
egi_dim egi_shape_product(const egi_inference *in, const egi_dim *dims, int first, int end);

/* Out and in features of a weight that is stored as the node's attributes say (graph/linear.h); `at` says which inputs
 * the operands of Linear are. */
eg_status egi_shape_linear_sizes(const egi_inference *in, const unsigned *at, egi_dim sizes[2]);

/* Types that the operator allows (shapes_types.c), before the rule runs. */
eg_status egi_shape_check_types(const egi_inference *in);
/* Follows the content of small integer tensors through the node, after the rule has set the outputs. */
eg_status egi_shape_contents(egi_inference *in);
/* ceil((limit - start) / delta), at least 0; NONE when delta is not a known number. */
egi_dim egi_shape_range_length(const egi_inference *in, egi_dim start, egi_dim limit, egi_dim delta);

/* Codes of storage bnb4 for experts (graph/moe.h): `count` operands each of codes, scales and, where is_nested, of what
 * decodes those, of `elements` numbers. */
typedef struct egi_levels {
  uint32_t weight, scales, nested, count; /* inputs; how many */
  bool is_nested;
  int64_t block, elements;
} egi_levels;
eg_status egi_shape_check_levels(const egi_inference *in, egi_levels levels);

#endif
