/* Bodies of products that are added up, of sums to another shape, and of the gradients of operators that pick and place
 * elements: dY goes back to where each element came from, and adds up there. */
#include "graph/bodies.h"

#include <string.h>

bool egi_body_add_matmul(egi_body *body) {
  double alpha = (double)egi_node_float(body->node, "alpha", 1.0f);
  egi_text_add(body->text, "product = MatMul (a, b)\n");
  egi_body_number(body, "alpha", alpha, "product");
  egi_text_add(body->text, "scaled = Mul (product, alpha)\ny = Add (c, scaled)\n");
  return true;
}

/* The axes along which `like` has one element are summed; where `from` has one too, nothing happens. */
bool egi_body_sum_to(egi_body *body, egi_body_sum sum) {
  int rank = egi_body_rank(body, sum.from_input), like_rank = egi_body_rank(body, sum.like_input);
  const char *name = sum.name;
  char own[40];
  int64_t ones[EGI_MAX_RANK];
  if (like_rank < 0 || rank < like_rank || strlen(name) > 24) return false;
  for (int i = 0; i < EGI_MAX_RANK; i++) ones[i] = 1;
  egi_text_format(body->text, "%s_like = Shape (%s)\n", name, sum.like);
  size_t length = strlen(name);
  memcpy(own, name, length);
  memcpy(own + length, "_ones", 6);
  egi_body_integers(body, own, ones, (unsigned)(rank - like_rank));
  memcpy(own + length, "_one", 5);
  egi_body_integer(body, own, 1);
  memcpy(own + length, "_row", 5);
  egi_body_integers(body, own, (const int64_t[1]){0}, 1);
  if (rank == like_rank)
    egi_text_format(body->text, "%s_wide = Identity (%s_like)\n", name, name);
  else
    egi_text_format(body->text, "%s_wide = Concat <axis = 0> (%s_ones, %s_like)\n", name, name, name);
  egi_text_format(body->text,
                  "%s_is_one = Equal (%s_wide, %s_one)\n%s_found = NonZero (%s_is_one)\n"
                  "%s_axes = Squeeze (%s_found, %s_row)\n"
                  "%s_sum = ReduceSum <keepdims = 1, noop_with_empty_axes = 1> (%s, %s_axes)\n"
                  "%s = Reshape <allowzero = 1> (%s_sum, %s_like)\n",
                  name, name, name, name, name, name, name, name, name, sum.from, name, name, name, name);
  return true;
}

bool egi_body_sum_to_shape(egi_body *body) {
  return egi_body_sum_to(body, (egi_body_sum){"y", "x", "like", 0, 1});
}

/* zeros = as many as the data has, in the type of dY; whole = its shape. */
static void add_zeros(egi_body *body) {
  egi_body_number(body, "zero", 0.0, "dy");
  egi_text_add(body->text, "whole = Shape (data)\nzeros = Expand (zero, whole)\n");
}

static void add_permutation(egi_body *body, const char *to, const char *from, const int64_t *perm, int rank) {
  egi_text_format(body->text, "%s = Transpose <perm = [", to);
  for (int i = 0; i < rank; i++) egi_text_format(body->text, "%s%lld", i > 0 ? ", " : "", (long long)perm[i]);
  egi_text_format(body->text, "]> (%s)\n", from);
}

/* With the axis in front, each index names a row. */
bool egi_body_gather_grad(egi_body *body) {
  int rank = egi_body_rank(body, 0), index_rank = egi_body_rank(body, 1), count = 0;
  int64_t axis = egi_node_int(body->node, "axis", 0), perm[2 * EGI_MAX_RANK];
  if (rank < 1 || index_rank < 0) return false;
  if (axis < 0) axis += rank;
  if (axis < 0 || axis >= rank) return false;
  add_zeros(body);
  for (int i = 0; i < index_rank; i++) perm[count++] = axis + i;
  for (int i = 0; i < rank - 1; i++) perm[count++] = i < axis ? i : i + index_rank;
  if (count > 0)
    add_permutation(body, "rows", "dy", perm, count);
  else
    egi_text_add(body->text, "rows = Identity (dy)\n");
  perm[0] = axis;
  for (int i = 1; i < rank; i++) perm[i] = i <= axis ? i - 1 : i;
  add_permutation(body, "blank", "zeros", perm, rank);
  egi_body_integers(body, "last", (const int64_t[1]){-1}, 1);
  egi_text_add(body->text, "wide = Cast <to = 7> (indices)\nplaces = Unsqueeze (wide, last)\n"
                           "added = ScatterND <reduction = \"add\"> (blank, places, rows)\n");
  for (int i = 0; i < rank; i++) perm[i] = i < axis ? i + 1 : i == axis ? 0 : i;
  add_permutation(body, "d_data", "added", perm, rank);
  return true;
}

bool egi_body_gather_elements_grad(egi_body *body) {
  add_zeros(body);
  egi_text_format(body->text, "d_data = ScatterElements <axis = %lld, reduction = \"add\"> (zeros, indices, dy)\n",
                  (long long)egi_node_int(body->node, "axis", 0));
  return true;
}

bool egi_body_gather_nd_grad(egi_body *body) {
  if (egi_node_int(body->node, "batch_dims", 0) != 0) return false;
  add_zeros(body);
  egi_text_add(body->text, "d_data = ScatterND <reduction = \"add\"> (zeros, indices, dy)\n");
  return true;
}

/* Elements are numbered, and the numbers sliced as the data was. */
bool egi_body_slice_grad(egi_body *body) {
  egi_body_integer(body, "first", 0);
  egi_body_integer(body, "one", 1);
  egi_body_integers(body, "flat", (const int64_t[1]){-1}, 1);
  egi_body_number(body, "zero", 0.0, "dy");
  egi_text_add(body->text, "whole = Shape (data)\ncount = Size (data)\nnumbers = Range (first, count, one)\n"
                           "numbered = Reshape <allowzero = 1> (numbers, whole)\n"
                           "sliced = Slice (numbered, starts, ends");
  bool has_axes = egi_body_has(body, 4), has_steps = egi_body_has(body, 5);
  egi_text_add(body->text, has_axes ? ", axes" : has_steps ? ", " : "");
  egi_text_add(body->text, has_steps ? ", steps)\n" : ")\n");
  egi_text_add(body->text, "places = Reshape (sliced, flat)\nvalues = Reshape (dy, flat)\n"
                           "row = Reshape (count, flat)\nzeros = Expand (zero, row)\n"
                           "added = ScatterElements <axis = 0> (zeros, places, values)\n"
                           "d_data = Reshape <allowzero = 1> (added, whole)\n");
  return true;
}

/* What was added is cut off; what was cut off gets zeros. */
bool egi_body_pad_grad(egi_body *body) {
  if (strcmp(egi_node_string(body->node, "mode", "constant"), "constant") != 0) return false;
  egi_body_number(body, "zero", 0.0, "dy");
  egi_text_format(body->text, "back = Neg (pads)\nd_data = Pad <mode = \"constant\"> (dy, back, zero%s)\n",
                  egi_body_has(body, 3) ? ", axes" : "");
  return true;
}

/* dY as [repeats of axis 0, axis 0, repeats of axis 1, ..], summed over the repeats. */
bool egi_body_tile_grad(egi_body *body) {
  int rank = egi_body_rank(body, 0);
  int64_t axes[EGI_MAX_RANK];
  if (rank < 1 || 2 * rank > EGI_MAX_RANK) return false;
  egi_text_add(body->text, "whole = Shape (data)\ntiled = Shape (dy)\nrepeats = Div (tiled, whole)\n");
  egi_body_integers(body, "pairs", (const int64_t[2]){1, -1}, 2);
  egi_text_add(body->text, "repeat_row = Reshape (repeats, pairs)\nwhole_row = Reshape (whole, pairs)\n"
                           "both = Concat <axis = 0> (repeat_row, whole_row)\n"
                           "turned = Transpose <perm = [1, 0]> (both)\n");
  egi_body_integers(body, "flat", (const int64_t[1]){-1}, 1);
  for (int i = 0; i < rank; i++) axes[i] = 2 * i;
  egi_body_integers(body, "axes", axes, (unsigned)rank);
  egi_text_add(body->text, "apart_shape = Reshape (turned, flat)\n"
                           "apart = Reshape <allowzero = 1> (dy, apart_shape)\n"
                           "d_data = ReduceSum <keepdims = 0> (apart, axes)\n");
  return true;
}
