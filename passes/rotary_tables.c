/* Tables of cosines and sines: the proof that a table of full width holds each number twice, and the table of half the
 * width in the shape that RotaryEmbedding takes. The proof follows data flow upwards: a table is repeated when what it
 * is computed from, element by element along the last axis, is repeated or constant along it. A node is looked at once
 * a table and depth is bounded. */
#include <string.h>

#include "passes/rotary.h"

enum { MAX_DEPTH = 40 };

eg_status egi_rotary_tables_init(egi_rotary_tables *tables, egi_graph *graph, egi_arena *arena) {
  *tables = (egi_rotary_tables){.graph = graph, .n_values = graph->n_values};
  for (unsigned i = 0; i < EGI_COUNT(tables->made); i++) {
    tables->made[i] = EGI_NEW(arena, egi_value_id, graph->n_values);
    if (tables->made[i] == NULL) return EG_ERROR_MEMORY;
  }
  for (unsigned i = 0; i < EGI_COUNT(tables->is_repeated); i++) {
    tables->is_repeated[i] = EGI_NEW(arena, uint8_t, graph->n_values);
    if (tables->is_repeated[i] == NULL) return EG_ERROR_MEMORY;
  }
  return EG_OK;
}

/* ---- shapes ---------------------------------------------------------------------------------------------------- */

/* Size of an axis counted from the end, 1 the last; 1 where the value has fewer. */
static egi_dim dim_from_end(const egi_graph *graph, egi_value_id value, int from_end) {
  const egi_value *row = &graph->values[value];
  if (row->rank < from_end) return egi_dim_constant(graph->module->dims, 1);
  return egi_dim_resolve(graph->module->dims, row->dims[row->rank - from_end]);
}

static bool is_size(const egi_graph *graph, egi_dim dim, int64_t size) {
  int64_t number = 0;
  return egi_dim_value(graph->module->dims, dim, &number) && number == size;
}

static bool is_one_or(const egi_graph *graph, egi_dim dim, egi_dim other) {
  return dim != EGI_DIM_NONE && (dim == other || is_size(graph, dim, 1));
}

bool egi_rotary_table_fits(const egi_rotary_tables *tables, egi_value_id table, egi_value_id x,
                           egi_rotary_layout layout, int64_t width) {
  const egi_graph *graph = tables->graph;
  int heads = layout == EGI_ROTARY_HEADS_FIRST ? 3 : 2, sequence = 5 - heads, rank = graph->values[table].rank;
  if (graph->values[x].rank != 4 || rank < sequence || rank > 4) return false;
  return is_size(graph, dim_from_end(graph, table, 1), width) && is_size(graph, dim_from_end(graph, table, heads), 1) &&
         is_one_or(graph, dim_from_end(graph, table, sequence), dim_from_end(graph, x, sequence)) &&
         is_one_or(graph, dim_from_end(graph, table, 4), dim_from_end(graph, x, 4));
}

/* ---- repetition ------------------------------------------------------------------------------------------------ */

typedef struct proof {
  const egi_graph *graph;
  egi_rotary_width width;
  unsigned depth;
} proof;

static bool is_repeated(proof *p, egi_value_id value, int axis);

static const egi_node *node_of(const egi_graph *graph, egi_value_id value) {
  return graph->values[value].kind == EGI_VALUE_NODE ? &graph->nodes[graph->values[value].producer] : NULL;
}

static int normalised(int64_t axis, int rank) {
  return (int)(axis < 0 ? axis + rank : axis);
}

/* One number all along the axis (counted from the end, 1 the last). */
static bool is_constant_along(const egi_graph *graph, egi_value_id value, int axis) {
  const egi_node *node = node_of(graph, value);
  if (is_size(graph, dim_from_end(graph, value, axis), 1)) return true;
  if (node == NULL) return false;
  if (node->op == EGI_OP_Expand) return is_size(graph, dim_from_end(graph, node->inputs[0], axis), 1);
  if (node->op == EGI_OP_Tile) return is_size(graph, dim_from_end(graph, node->inputs[0], axis), 1);
  if (node->op != EGI_OP_Concat) return false;
  int rank = graph->values[value].rank;
  if (normalised(egi_node_int(node, "axis", 0), rank) != rank - axis) return false;
  for (unsigned i = 0; i < node->n_inputs; i++)
    if (node->inputs[i] != node->inputs[0] || !is_size(graph, dim_from_end(graph, node->inputs[i], axis), 1))
      return false;
  return true;
}

/* Bytes of a constant: element k of the axis and its twin, for everything before and behind the axis. */
static bool weight_is_repeated(const proof *p, egi_value_id value, int axis) {
  egi_tensor tensor;
  if (!egi_value_constant(p->graph, value, &tensor) || tensor.rank < axis) return false;
  int64_t inner = 1, n = tensor.dims[tensor.rank - axis], count = egi_tensor_count(&tensor);
  for (int i = tensor.rank - axis + 1; i < tensor.rank; i++) inner *= tensor.dims[i];
  if (n < 2 || n % 2 != 0 || count == 0) return false;
  size_t block = (size_t)inner * (egi_dtype_bits(tensor.dtype) / 8);
  const char *data = tensor.data;
  for (int64_t row = 0; row < count / inner; row += n) {
    for (int64_t k = 0; k < n / 2; k++) {
      int64_t a = p->width == EGI_ROTARY_HALVES ? k : 2 * k, b = p->width == EGI_ROTARY_HALVES ? k + n / 2 : 2 * k + 1;
      if (memcmp(data + (size_t)(row + a) * block, data + (size_t)(row + b) * block, block) != 0) return false;
    }
  }
  return true;
}

static bool operand_is_repeated(proof *p, egi_value_id value, int axis) {
  return is_constant_along(p->graph, value, axis) || is_repeated(p, value, axis);
}

static bool concat_is_repeated(proof *p, const egi_node *node, egi_value_id value, int axis) {
  int rank = p->graph->values[value].rank;
  if (normalised(egi_node_int(node, "axis", 0), rank) == rank - axis) {
    bool has_twins = node->n_inputs == 2 && node->inputs[0] == node->inputs[1];
    return p->width == EGI_ROTARY_HALVES && has_twins;
  }
  for (unsigned i = 0; i < node->n_inputs; i++)
    if (!operand_is_repeated(p, node->inputs[i], axis)) return false;
  return true;
}

/* A reshape that keeps the axis and the sizes behind it; or for pairs [.., n, 2] -> [.., 2 n]. */
static bool reshape_is_repeated(proof *p, egi_value_id from, egi_value_id to, int axis) {
  const egi_graph *graph = p->graph;
  bool keeps_axis = graph->values[from].rank >= axis;
  for (int i = 1; i <= axis && keeps_axis; i++)
    keeps_axis =
        dim_from_end(graph, from, i) != EGI_DIM_NONE && dim_from_end(graph, from, i) == dim_from_end(graph, to, i);
  if (keeps_axis) return is_repeated(p, from, axis);
  return axis == 1 && p->width == EGI_ROTARY_PAIRS && is_size(graph, dim_from_end(graph, from, 1), 2) &&
         is_constant_along(graph, from, 1);
}

static bool transpose_is_repeated(proof *p, const egi_node *node, int axis) {
  int rank = p->graph->values[node->inputs[0]].rank;
  uint32_t count = 0;
  const int64_t *perm = egi_node_ints(node, "perm", &count);
  int64_t from = perm == NULL ? axis - 1 : count == (uint32_t)rank ? perm[rank - axis] : -1;
  return from >= 0 && is_repeated(p, node->inputs[0], rank - (int)from);
}

/* The axis of the result among those of the data, when the indices' axes lie before it. */
static bool gather_is_repeated(proof *p, const egi_node *node, egi_value_id value, int axis) {
  const egi_graph *graph = p->graph;
  int rank = graph->values[node->inputs[0]].rank, out_rank = graph->values[value].rank;
  int at = normalised(egi_node_int(node, "axis", 0), rank), behind = rank - 1 - at;
  int64_t indices[256];
  uint32_t count = 0;
  if (axis <= behind) return is_repeated(p, node->inputs[0], axis);
  if (out_rank != rank || axis != behind + 1) return false;
  if (!egi_value_integers(graph, node->inputs[1], indices, EGI_COUNT(indices), &count) || count % 2 != 0) return false;
  for (uint32_t k = 0; k < count / 2; k++) {
    bool is_half = p->width == EGI_ROTARY_HALVES;
    if (indices[is_half ? k : 2 * k] != indices[is_half ? k + count / 2 : 2 * k + 1]) return false;
  }
  return true;
}

static bool slice_keeps_axis(const egi_graph *graph, const egi_node *node, int axis) {
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  int rank = graph->values[node->inputs[0]].rank;
  if (node->n_inputs < 4 || !egi_value_integers(graph, node->inputs[3], axes, EGI_MAX_RANK, &count)) return false;
  for (uint32_t i = 0; i < count; i++)
    if (normalised(axes[i], rank) == rank - axis) return false;
  return true;
}

/* Unsqueeze and Squeeze of axes before this one. */
static bool axes_lie_before(const egi_graph *graph, const egi_node *node, egi_value_id value, int axis) {
  int64_t axes[EGI_MAX_RANK];
  uint32_t count = 0;
  int rank = node->op == EGI_OP_Unsqueeze ? graph->values[value].rank : graph->values[node->inputs[0]].rank;
  if (node->n_inputs < 2 || !egi_value_integers(graph, node->inputs[1], axes, EGI_MAX_RANK, &count)) return false;
  for (uint32_t i = 0; i < count; i++)
    if (normalised(axes[i], rank) > rank - axis) return false;
  return true;
}

/* The last axis of a product is the second factor's, the one before it the first's. */
static bool product_is_repeated(proof *p, const egi_node *node, int axis) {
  if (p->graph->values[node->inputs[0]].rank < 2 || p->graph->values[node->inputs[1]].rank < 2 || axis > 2)
    return false;
  return is_repeated(p, node->inputs[axis == 1 ? 1 : 0], axis);
}

static bool tile_is_repeated(const proof *p, const egi_node *node, int axis) {
  int64_t repeats[EGI_MAX_RANK];
  uint32_t count = 0;
  return p->width == EGI_ROTARY_HALVES &&
         egi_value_integers(p->graph, node->inputs[1], repeats, EGI_MAX_RANK, &count) && count >= (uint32_t)axis &&
         repeats[count - (uint32_t)axis] == 2;
}

static bool node_is_repeated(proof *p, const egi_node *node, egi_value_id value, int axis) {
  const egi_graph *graph = p->graph;
  switch (node->op) {
  case EGI_OP_Concat:
    return concat_is_repeated(p, node, value, axis);
  case EGI_OP_Reshape:
    return reshape_is_repeated(p, node->inputs[0], value, axis);
  case EGI_OP_Transpose:
    return transpose_is_repeated(p, node, axis);
  case EGI_OP_Gather:
    return gather_is_repeated(p, node, value, axis);
  case EGI_OP_Slice:
    return slice_keeps_axis(graph, node, axis) && is_repeated(p, node->inputs[0], axis);
  case EGI_OP_Squeeze:
  case EGI_OP_Unsqueeze:
    return axes_lie_before(graph, node, value, axis) && is_repeated(p, node->inputs[0], axis);
  case EGI_OP_Expand:
    return graph->values[node->inputs[0]].rank >= axis && is_repeated(p, node->inputs[0], axis);
  case EGI_OP_MatMul:
    return product_is_repeated(p, node, axis);
  case EGI_OP_Tile:
    return tile_is_repeated(p, node, axis);
  default:
    break;
  }
  if ((egi_op_get(node->op)->flags & EGI_OP_ELEMENTWISE) == 0 || node->n_inputs == 0) return false;
  for (unsigned i = 0; i < node->n_inputs; i++)
    if (node->inputs[i] != 0 && !operand_is_repeated(p, node->inputs[i], axis)) return false;
  return true;
}

static bool is_repeated(proof *p, egi_value_id value, int axis) {
  const egi_node *node = node_of(p->graph, value);
  bool is_proven = false;
  if (p->graph->values[value].rank < axis || p->depth == MAX_DEPTH) return false;
  p->depth++;
  is_proven = node != NULL ? node_is_repeated(p, node, value, axis) : weight_is_repeated(p, value, axis);
  p->depth--;
  return is_proven;
}

bool egi_rotary_table_is_repeated(egi_rotary_tables *tables, egi_value_id table, egi_rotary_width width) {
  proof p = {.graph = tables->graph, .width = width};
  if (width == EGI_ROTARY_SINGLE) return true;
  uint8_t *known = table < tables->n_values ? &tables->is_repeated[width - EGI_ROTARY_HALVES][table] : NULL;
  if (known != NULL && *known != 0) return *known == 2;
  bool is_proven = is_repeated(&p, table, 1);
  if (known != NULL) *known = is_proven ? 2 : 1;
  return is_proven;
}

/* ---- the table ------------------------------------------------------------------------------------------------- */

static egi_value_id with_axis(egi_emitter *emit, egi_op op, egi_value_id value, int64_t axis) {
  return egi_emit_binary(emit, op, value, egi_emit_integers(emit, &axis, 1));
}

/* [batch, sequence, width]: the axis of the heads goes, or what put it there is left out. */
static egi_value_id without_heads(egi_emitter *emit, egi_value_id table, egi_rotary_layout layout) {
  const egi_graph *graph = emit->graph;
  int rank = graph->values[table].rank, axis = layout == EGI_ROTARY_HEADS_FIRST ? rank - 3 : rank - 2;
  const egi_node *node = node_of(graph, table);
  int64_t axes[1];
  uint32_t count = 0;
  if (layout == EGI_ROTARY_HEADS_FIRST && rank == 3) return table;
  if (axis >= 0) {
    bool is_undone = node != NULL && node->op == EGI_OP_Unsqueeze &&
                     egi_value_integers(graph, node->inputs[1], axes, 1, &count) && normalised(axes[0], rank) == axis;
    table = is_undone ? node->inputs[0] : with_axis(emit, EGI_OP_Squeeze, table, axis);
    rank--;
  }
  return rank < 3 ? with_axis(emit, EGI_OP_Unsqueeze, table, 0) : table;
}

/* [batch or 1, sequence or 1, pairs], made once for all layers. */
static egi_value_id narrow_table(egi_rotary_tables *tables, egi_emitter *emit, egi_value_id table,
                                 egi_rotary_layout layout, egi_rotary_width width) {
  const int64_t last = -1, start = 0, step = width == EGI_ROTARY_PAIRS ? 2 : 1;
  egi_value_id *known = table < tables->n_values ? &tables->made[2 * (int)width + (int)layout][table] : NULL;
  int64_t size = 0;
  if (known != NULL && *known != 0) return *known;
  egi_value_id made = without_heads(emit, table, layout);
  if (width != EGI_ROTARY_SINGLE) {
    egi_dim_value(tables->graph->module->dims, dim_from_end(tables->graph, table, 1), &size);
    const int64_t end = width == EGI_ROTARY_HALVES ? size / 2 : size;
    const egi_value_id inputs[5] = {made, egi_emit_integers(emit, &start, 1), egi_emit_integers(emit, &end, 1),
                                    egi_emit_integers(emit, &last, 1), egi_emit_integers(emit, &step, 1)};
    made = egi_emit(emit, EGI_OP_Slice, inputs, 5, NULL, 0);
  }
  if (known != NULL) *known = made;
  return made;
}

/* i64 [1]: the size, of a graph input that has it, so that no table hangs on a layer; else of `x` itself. */
static egi_value_id emit_size(egi_emitter *emit, egi_value_id x, int axis) {
  const egi_graph *graph = emit->graph;
  egi_dims *dims = graph->module->dims;
  egi_dim wanted = egi_dim_resolve(dims, graph->values[x].dims[axis]);
  egi_value_id source = x;
  int64_t number = 0;
  if (egi_dim_value(dims, wanted, &number)) return egi_emit_integers(emit, &number, 1);
  for (uint32_t i = 0; i < graph->n_inputs && source == x; i++) {
    const egi_value *input = &graph->values[graph->inputs[i]];
    for (int k = 0; k < input->rank && source == x; k++) {
      if (egi_dim_resolve(dims, input->dims[k]) != wanted) continue;
      source = graph->inputs[i];
      axis = k;
    }
  }
  const egi_attribute range[2] = {egi_attribute_int("start", axis), egi_attribute_int("end", axis + 1)};
  return egi_emit(emit, EGI_OP_Shape, &source, 1, range, 2);
}

egi_value_id egi_rotary_table(egi_rotary_tables *tables, egi_emitter *emit, egi_value_id table, egi_value_id x,
                              egi_rotary_layout layout, egi_rotary_width width) {
  const egi_graph *graph = tables->graph;
  const int axes[2] = {0, layout == EGI_ROTARY_HEADS_FIRST ? 2 : 1};
  const egi_attribute first = egi_attribute_int("axis", 0);
  const int64_t one = 1;
  egi_value_id made = narrow_table(tables, emit, table, layout, width), sizes[3];
  bool is_narrow = false;
  for (int i = 0; i < 2 && emit->status == EG_OK; i++) {
    bool is_one = is_size(graph, egi_dim_resolve(graph->module->dims, graph->values[made].dims[i]), 1) &&
                  !is_size(graph, egi_dim_resolve(graph->module->dims, graph->values[x].dims[axes[i]]), 1);
    sizes[i] = is_one ? emit_size(emit, x, axes[i]) : egi_emit_integers(emit, &one, 1);
    is_narrow = is_narrow || is_one;
  }
  if (!is_narrow || emit->status != EG_OK) return made;
  sizes[2] = egi_emit_integers(emit, &one, 1);
  return egi_emit_binary(emit, EGI_OP_Expand, made, egi_emit(emit, EGI_OP_Concat, sizes, 3, &first, 1));
}
