/* An adapter as .onnx_adapter and the base graph that takes it: every adapted layer gets y + (x · A) · B with A [in, r]
 * and B [out, r]ᵀ = [r, out] as inputs of the graph, of any rank, whose defaults change nothing. onnxruntime puts a
 * file's parameters in their place by name. */
#include "graph/moe.h"
#include "train/train.h"

#include <string.h>

/* Where an adapter goes in the graph that is written. */
typedef struct place {
  egi_value_id x, y;
  int64_t first_row, n_rows; /* of y that the module has; n_rows all of them */
} place;

/* ---- places in the file's own graph ---- */

static const char *op_name(const egi_node *node) {
  return node->op_name != NULL ? node->op_name : egi_op_get(node->op)->name;
}

static bool is_named(const egi_node *node, const char *const *names) {
  for (; *names != NULL; names++)
    if (strcmp(op_name(node), *names) == 0) return true;
  return false;
}

/* From a weight through what lays it out to the product that takes it, as long as it has one user; 0: there is none. */
static egi_node_id find_product(const egi_graph *graph, const egi_uses *uses, egi_value_id value) {
  static const char *const layouts[] = {"Transpose", "Cast", "Identity", "Reshape", "DequantizeLinear", NULL};
  static const char *const products[] = {"MatMul", "Gemm", "MatMulNBits", "MatMulBnb4", NULL};
  for (uint32_t hop = 0; hop < graph->n_nodes; hop++) {
    if (value == 0 || uses->start[value + 1] - uses->start[value] != 1) return 0;
    egi_node_id id = uses->list[uses->start[value]];
    const egi_node *node = &graph->nodes[id];
    bool is_weight = node->n_inputs > 1 && node->inputs[1] == value && egi_node_int(node, "transA", 0) == 0;
    if (is_named(node, products)) return is_weight ? id : 0;
    if (!is_named(node, layouts) || node->inputs[0] != value) return 0;
    value = node->outputs[0];
  }
  return 0;
}

/* ---- grafting ---- */

typedef struct grafter {
  egi_merge merge;
  egi_export_target target;
  egi_expert_parameter *experts; /* of the graph; empty where none has an adapter */
  size_t n_experts;
  egi_value_id *sums; /* by value before grafting: what takes its place so far; 0: nothing */
  egi_safetensor *tensors;
  size_t n_tensors;
} grafter;

/* A new node without inference: the types of a graph as it was read are not known. */
static eg_status add_node(grafter *g, egi_op op, const char *path, egi_value_id a, egi_value_id b,
                          const egi_attribute *attribute, egi_value_id *out_value) {
  egi_value_id inputs[2] = {a, b};
  const char *name = egi_arena_format(&g->merge.arena, "%s.lora_%u", path, g->target.graph->n_nodes);
  egi_node node = {.op = op, .name = name, .inputs = inputs, .n_inputs = b != 0 ? 2 : 1, .n_outputs = 1};
  egi_node_id added;
  if (name == NULL) return EG_ERROR_MEMORY;
  if (attribute != NULL) {
    node.attributes = (egi_attribute *)(uintptr_t)attribute;
    node.n_attributes = 1;
  }
  EG_TRY(egi_graph_add_node(g->target.graph, &node, &added));
  *out_value = g->target.graph->nodes[added].outputs[0];
  return EG_OK;
}

static eg_status cast(grafter *g, const char *path, egi_value_id *value, eg_dtype from, eg_dtype to) {
  const egi_attribute attribute = egi_attribute_int("to", (int64_t)to);
  if (from == to) return EG_OK;
  return add_node(g, EGI_OP_Cast, path, *value, 0, &attribute, value);
}

/* An input of the graph of a rank that only the caller knows, along `axis`; its default is a rank of one, all zero.
 * Experts have theirs one after the other: the axis is a multiple of their number. */
static eg_status add_input(grafter *g, const char *path, int axis, int64_t n_experts, const egi_safetensor *tensor,
                           egi_value_id *out_value) {
  egi_module *module = g->target.module;
  egi_weight weight = {.name = tensor->name, .dtype = tensor->dtype, .rank = 2, .is_input = true};
  uint32_t index;
  weight.dims[1 - axis] = tensor->dims[1 - axis];
  weight.dims[axis] = n_experts;
  weight.bytes.kind = EGI_BYTES_MEMORY;
  if (!egi_dtype_bytes(weight.dtype, (uint64_t)(weight.dims[0] * weight.dims[1]), &weight.bytes.size_bytes))
    return EG_ERROR_MEMORY;
  weight.bytes.data = egi_arena_get(&module->arena, 1, (size_t)weight.bytes.size_bytes);
  const char *symbol = egi_arena_format(&module->arena, "%s.rank", path);
  if (weight.bytes.data == NULL || symbol == NULL) return EG_ERROR_MEMORY;
  *out_value = egi_graph_find_value(g->target.graph, tensor->name); /* of a module that is called again */
  if (*out_value != 0) return EG_OK;
  EG_TRY(egi_module_add_weight(module, &weight, &index));
  EG_TRY(egi_graph_add_weight(g->target.graph, index, out_value));
  egi_dim rank =
      egi_dim_multiply(module->dims, egi_dim_symbol(module->dims, symbol), egi_dim_constant(module->dims, n_experts));
  g->target.graph->values[*out_value].dims[axis] = rank;
  return EG_OK;
}

/* B [r, rows] among the columns of the whole fused layer. */
static eg_status spread(grafter *g, const char *path, const place *where, int64_t rows, egi_value_id *b) {
  const int64_t sizes[4] = {0, where->first_row, 0, where->n_rows - where->first_row - rows};
  if (rows == where->n_rows) return EG_OK;
  egi_weight weight = {.dtype = EG_DTYPE_I64, .rank = 1, .dims = {4}, .bytes = {.kind = EGI_BYTES_MEMORY}};
  int64_t *pads = EGI_NEW(&g->target.module->arena, int64_t, 4);
  weight.name = egi_arena_format(&g->target.module->arena, "%s.lora_pads", path);
  egi_value_id value;
  uint32_t index;
  if (pads == NULL || weight.name == NULL) return EG_ERROR_MEMORY;
  memcpy(pads, sizes, sizeof sizes);
  weight.bytes.data = (const uint8_t *)pads;
  weight.bytes.size_bytes = sizeof sizes;
  EG_TRY(egi_module_add_weight(g->target.module, &weight, &index));
  EG_TRY(egi_graph_add_weight(g->target.graph, index, &value));
  return add_node(g, EGI_OP_Pad, path, *b, value, NULL, b);
}

/* One module: y + (x · A) · B in the place of y, or of what has its place by now. */
static eg_status graft(grafter *g, size_t index, const place *where, const egi_safetensor tensors[2]) {
  const egi_linear *linear = &g->merge.linears[index];
  eg_dtype own = egi_merge_input_dtype(&g->merge, index), dtype = tensors[0].dtype;
  egi_value_id a, b, x = where->x, y = g->sums[where->y] != 0 ? g->sums[where->y] : where->y;
  EG_TRY(add_input(g, linear->path, 1, 1, &tensors[0], &a));
  EG_TRY(add_input(g, linear->path, 0, 1, &tensors[1], &b));
  EG_TRY(spread(g, linear->path, where, linear->out_features, &b));
  EG_TRY(cast(g, linear->path, &x, own, dtype));
  EG_TRY(add_node(g, EGI_OP_MatMul, linear->path, x, a, NULL, &x));
  EG_TRY(add_node(g, EGI_OP_MatMul, linear->path, x, b, NULL, &x));
  EG_TRY(cast(g, linear->path, &x, dtype, own));
  return add_node(g, EGI_OP_Add, linear->path, y, x, NULL, &g->sums[where->y]);
}

/* A mixture takes the stacks of its adapter as inputs, laid out as PEFT's. */
static eg_status graft_experts(grafter *g, const egi_expert_parameter *expert, const egi_safetensor tensors[2]) {
  eg_dtype own = g->target.graph->values[g->target.graph->nodes[expert->node].inputs[EGI_MOE_X]].dtype;
  egi_emitter emit = {.graph = g->target.graph, .scope = expert->module}; /* the body asks for the stacks' sizes */
  egi_value_id stacks[2];
  for (int i = 0; i < 2; i++) {
    EG_TRY(add_input(g, expert->name, i, expert->n_experts, &tensors[i], &stacks[i]));
    if (tensors[i].dtype != own) stacks[i] = egi_emit_cast(&emit, stacks[i], own);
    EG_TRY(emit.status);
  }
  return egi_graft_experts(g->target.graph, expert, stacks[0], stacks[1], 1.0);
}

/* Every user of a layer's result takes the sum; the first operand of a new sum is the result itself. */
static eg_status apply_sums(grafter *g, egi_node_id n_old_nodes, egi_value_id n_old_values) {
  egi_graph *graph = g->target.graph;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    egi_node *node = &graph->nodes[id];
    unsigned first = id >= n_old_nodes && node->op == EGI_OP_Add ? 1 : 0;
    for (unsigned i = first; i < node->n_inputs; i++)
      if (node->inputs[i] < n_old_values && g->sums[node->inputs[i]] != 0) node->inputs[i] = g->sums[node->inputs[i]];
  }
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_value_id old = graph->outputs[i], sum = old < n_old_values ? g->sums[old] : 0;
    if (sum == 0) continue;
    const char *name = egi_arena_format(&g->target.module->arena, "%s", graph->values[old].name);
    const char *base = egi_arena_format(&g->target.module->arena, "%s.base", graph->values[old].name);
    if (name == NULL || base == NULL) return EG_ERROR_MEMORY;
    graph->values[sum].dtype = graph->values[old].dtype;
    graph->values[sum].rank = graph->values[old].rank;
    memcpy(graph->values[sum].dims, graph->values[old].dims, sizeof graph->values[old].dims);
    EG_TRY(egi_graph_rename_value(graph, old, base));
    EG_TRY(egi_graph_rename_value(graph, sum, name));
    graph->outputs[i] = sum;
  }
  return egi_graph_tidy(graph);
}

/* ---- which graph ---- */

static bool is_adapted(const grafter *g, size_t index) {
  return g->merge.adapter_of[index] != UINT32_MAX;
}

static int64_t whole_rows(const egi_merge *merge, size_t index) {
  int64_t rows = 0;
  size_t first = index;
  while (first > 0 && merge->linears[first - 1].node == merge->linears[index].node) first--;
  for (; first < merge->n_linears && merge->linears[first].node == merge->linears[index].node; first++)
    rows += merge->linears[first].out_features;
  return rows;
}

/* Places in the file's own graph; false when one of them is not plain to see there. */
static eg_status find_places(grafter *g, egi_arena *arena, place *places, bool *out_are_found) {
  const egi_merge *merge = &g->merge;
  const egi_graph *graph = g->target.graph;
  egi_uses uses = {NULL, NULL};
  *out_are_found = false;
  if (g->target.module == NULL) return EG_OK;
  EG_TRY(egi_graph_uses(graph, arena, &uses));
  for (size_t i = 0; i < merge->n_linears; i++) {
    if (!is_adapted(g, i)) continue;
    uint32_t weight = merge->graph->values[merge->linears[i].weight].index;
    weight = weight < g->target.n_weights ? g->target.weights[weight] : 0;
    if (weight == 0 || weight >= graph->weight_values_capacity) return EG_OK;
    egi_node_id id = find_product(graph, &uses, graph->weight_values[weight]);
    if (id == 0) return EG_OK;
    places[i] =
        (place){graph->nodes[id].inputs[0], graph->nodes[id].outputs[0], merge->first_rows[i], whole_rows(merge, i)};
  }
  *out_are_found = true;
  return EG_OK;
}

/* The recognised graph has a result of its own for each module. */
static void take_recognised(grafter *g, place *places) {
  egi_merge *merge = &g->merge;
  g->target.module = merge->module;
  g->target.graph = merge->graph;
  for (size_t i = 0; i < merge->n_linears; i++) {
    const egi_linear *linear = &merge->linears[i];
    places[i] = (place){merge->graph->nodes[linear->node].inputs[0], linear->result, 0, linear->out_features};
  }
}

static eg_status choose_graph(grafter *g, place **out_places) {
  egi_merge *merge = &g->merge;
  place *places = EGI_NEW(&merge->arena, place, merge->n_linears + 1);
  bool are_found;
  if (places == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_export_reopen(merge->export_, merge->module, &merge->arena, &merge->raw));
  g->target = merge->raw;
  if (merge->export_->adapters.config.parameters != NULL) { /* mixtures are only there where they are recognised */
    EG_TRY(egi_find_experts(merge->graph, &merge->arena, &g->experts, &g->n_experts));
    g->target.module = NULL;
  }
  EG_TRY(find_places(g, &merge->arena, places, &are_found));
  if (!are_found) take_recognised(g, places);
  *out_places = places;
  return EG_OK;
}

/* ---- files ---- */

/* A [in, r] and B [r, out], the scale in B, named as PEFT names them without its prefix. */
static eg_status make_tensors(grafter *g, size_t index, egi_safetensor tensors[2]) {
  egi_export *export_ = g->merge.export_;
  eg_dtype dtype = export_->options->dtype != EG_DTYPE_UNDEFINED ? export_->options->dtype : EG_DTYPE_F32;
  egi_lora lora;
  EG_TRY(egi_lora_read_scaled(export_, g->merge.adapter_of[index], &g->merge.arena, &lora));
  const int64_t rows[2] = {lora.rank, lora.out_features}, columns[2] = {lora.in_features, lora.rank};
  for (int i = 0; i < 2; i++) {
    const float *values = i == 0 ? lora.a : lora.b;
    float *turned = EGI_NEW(&g->merge.arena, float, (size_t)(rows[i] * columns[i]));
    tensors[i] = (egi_safetensor){.dtype = dtype, .rank = 2, .dims = {columns[i], rows[i]}};
    tensors[i].name = egi_arena_format(&export_->arena, "%s.lora_%c.weight", lora.path, i == 0 ? 'A' : 'B');
    if (turned == NULL || tensors[i].name == NULL) return EG_ERROR_MEMORY;
    for (int64_t r = 0; r < rows[i]; r++)
      for (int64_t c = 0; c < columns[i]; c++) turned[c * rows[i] + r] = values[r * columns[i] + c];
    EG_TRY(egi_convert_floats(&g->merge.arena, turned, (uint64_t)(rows[i] * columns[i]), dtype, &tensors[i].data,
                              &tensors[i].size_bytes));
  }
  return EG_OK;
}

/* A and B as in PEFT's file, the scale in B. */
static eg_status make_stacks(grafter *g, size_t index, egi_safetensor tensors[2]) {
  egi_export *export_ = g->merge.export_;
  const egi_expert_parameter *expert = export_->expert_of[index];
  const egi_adapter_target *target = &export_->adapters.targets[index];
  eg_dtype dtype = export_->options->dtype != EG_DTYPE_UNDEFINED ? export_->options->dtype : EG_DTYPE_F32;
  int64_t ranks = expert->n_experts * (int64_t)target->rank;
  const int64_t dims[2][2] = {{ranks, expert->in_features}, {expert->out_features, ranks}};
  const char *path = egi_export_expert_name(export_, index, &export_->arena);
  if (path == NULL) return EG_ERROR_MEMORY;
  for (int i = 0; i < 2; i++) {
    uint64_t count = (uint64_t)(dims[i][0] * dims[i][1]);
    float *values;
    EG_TRY(egi_export_expert_stack(export_, index, i == 0 ? 'A' : 'B', &g->merge.arena, &values));
    for (uint64_t k = 0; i == 1 && k < count; k++) values[k] = (float)((double)values[k] * target->scale);
    tensors[i] = (egi_safetensor){.dtype = dtype, .rank = 2, .dims = {dims[i][0], dims[i][1]}};
    tensors[i].name = egi_arena_format(&export_->arena, "%s.lora_%c.weight", path, i == 0 ? 'A' : 'B');
    if (tensors[i].name == NULL) return EG_ERROR_MEMORY;
    EG_TRY(egi_convert_floats(&g->merge.arena, values, count, dtype, &tensors[i].data, &tensors[i].size_bytes));
  }
  return EG_OK;
}

/* Mixtures keep their results: nothing takes their place. */
static eg_status graft_all_experts(grafter *g) {
  const egi_export *export_ = g->merge.export_;
  egi_map names;
  uint32_t index;
  egi_map_init(&names, &g->merge.arena);
  for (size_t i = 0; i < export_->adapters.count; i++)
    if (export_->expert_of[i] != NULL) EG_TRY(egi_map_put(&names, export_->expert_of[i]->name, (uint32_t)i));
  for (size_t i = 0; i < g->n_experts; i++) {
    if (!egi_map_get(&names, g->experts[i].name, &index)) continue;
    EG_TRY(make_stacks(g, index, &g->tensors[g->n_tensors]));
    EG_TRY(graft_experts(g, &g->experts[i], &g->tensors[g->n_tensors]));
    g->n_tensors += 2;
  }
  return EG_OK;
}

static eg_status graft_all(grafter *g) {
  egi_merge *merge = &g->merge;
  place *places;
  egi_map seen; /* a module that is called again has its tensors already */
  EG_TRY(egi_merge_open(merge, false));
  egi_map_init(&seen, &merge->arena);
  EG_TRY(choose_graph(g, &places));
  egi_node_id n_old_nodes = g->target.graph->n_nodes;
  egi_value_id n_old_values = g->target.graph->n_values;
  g->sums = EGI_NEW(&merge->arena, egi_value_id, n_old_values);
  g->tensors = EGI_NEW(&merge->arena, egi_safetensor, 2 * (merge->n_linears + g->n_experts) + 1);
  if (g->sums == NULL || g->tensors == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < merge->n_linears; i++) {
    uint32_t first = (uint32_t)g->n_tensors;
    if (!is_adapted(g, i)) continue;
    if (!egi_map_get(&seen, merge->linears[i].path, &first)) {
      EG_TRY(make_tensors(g, i, &g->tensors[first]));
      EG_TRY(egi_map_put(&seen, merge->linears[i].path, first));
      g->n_tensors += 2;
    }
    EG_TRY(graft(g, i, &places[i], &g->tensors[first]));
  }
  EG_TRY(graft_all_experts(g));
  return apply_sums(g, n_old_nodes, n_old_values);
}

static eg_status write_files(grafter *g, const char *path) {
  egi_export *export_ = g->merge.export_;
  const char *adapter, *base;
  uint32_t count;
  EG_TRY(egi_export_path(export_, path, ".onnx_adapter", "adapter.onnx_adapter", &adapter));
  if (egi_has_suffix(path, ".onnx_adapter"))
    base = egi_arena_format(&export_->arena, "%.*s.onnx", (int)(strlen(path) - strlen(".onnx_adapter")), path);
  else
    base = egi_path_join(&export_->arena, path, "model.onnx");
  if (base == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_export_check(export_, base));
  if (g->target.module == g->merge.module) EG_TRY(egi_graph_call_bodies(g->target.graph, true, &count));
  EG_TRY(egi_module_export(g->target.module, g->target.graph, base));
  return egi_onnx_adapter_write(export_->ctx, adapter, g->tensors, g->n_tensors);
}

eg_status egi_export_onnx_adapter(egi_export *export_, const char *path) {
  grafter g = {.merge = {.export_ = export_}};
  eg_status status = graft_all(&g);
  if (status == EG_OK) status = write_files(&g, path);
  egi_merge_close(&g.merge);
  return status;
}
