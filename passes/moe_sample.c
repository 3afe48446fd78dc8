/* Runs a region on a sample: what comes from the logits, from shapes and from the hidden states by moving, and the
 * activations, are run as they are by the evaluator, in float32 whatever the file's type; parameters and products with
 * them are made up (moe_matrix.c). Each node is run in a scratch graph of known sizes, so that results whose size
 * depends on data are nothing special. */
#include <string.h>

#include "passes/moe_match.h"

enum { MAX_CHAIN = 16, MAX_FOLLOWED = 64, MAX_TOKENS = 16384 };

egi_moe_value *egi_moe_touch(egi_moe_region *region, egi_value_id value) {
  if (EGI_GROW(region->arena, &region->touched, region->n_touched, &region->touched_capacity) != EG_OK) return NULL;
  region->touched[region->n_touched++] = value;
  return &region->values[value];
}

/* ---- the scratch graph ---------------------------------------------------------------------------------------- */

static eg_status add_known(egi_graph *graph, const egi_tensor *tensor, egi_value_id *out_value) {
  egi_weight weight = {.name = "known", .dtype = tensor->dtype, .rank = tensor->rank};
  uint64_t size_bytes = 0;
  uint32_t index = 0;
  memcpy(weight.dims, tensor->dims, sizeof weight.dims);
  (void)egi_dtype_bytes(tensor->dtype, (uint64_t)egi_tensor_count(tensor), &size_bytes);
  weight.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = tensor->data, .size_bytes = size_bytes};
  EG_TRY(egi_module_add_weight(graph->module, &weight, &index));
  return egi_graph_add_weight(graph, index, out_value);
}

/* Small integers as constants, so that shapes follow from them. */
static eg_status scratch_value(egi_graph *graph, egi_moe_value *value) {
  const egi_tensor *t = &value->tensor;
  egi_dim dims[EGI_MAX_RANK];
  if (value->scratch != 0) return EG_OK;
  if (!egi_dtype_is_float(t->dtype) && egi_tensor_count(t) <= MAX_FOLLOWED) return add_known(graph, t, &value->scratch);
  for (int i = 0; i < t->rank; i++) dims[i] = egi_dim_constant(graph->module->dims, t->dims[i]);
  return egi_graph_add_input(graph, NULL, t->dtype, t->rank, dims, &value->scratch);
}

/* Tensors among the attributes belong to the module that they come from. */
static eg_status copy_attributes(egi_moe_region *region, const egi_node *node, egi_attribute **out_attributes) {
  egi_module *module = region->scratch;
  egi_attribute *attributes = EGI_NEW(region->arena, egi_attribute, (size_t)node->n_attributes + 1);
  if (attributes == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node->n_attributes; i++) {
    attributes[i] = node->attributes[i];
    if (attributes[i].kind != EGI_ATTRIBUTE_TENSOR) continue;
    egi_weight weight = region->graph->module->weights[attributes[i].u.weight];
    EG_TRY(egi_module_add_weight(module, &weight, &attributes[i].u.weight));
  }
  *out_attributes = attributes;
  return EG_OK;
}

eg_status egi_moe_evaluate(egi_moe_region *region, const egi_node *node, egi_moe_value *const *inputs,
                           egi_tensor *outputs) {
  egi_graph *graph = region->scratch->graphs[0];
  egi_node copy = {.op = node->op, .name = "", .n_inputs = node->n_inputs, .n_outputs = node->n_outputs};
  egi_tensor *tensors = EGI_NEW(region->arena, egi_tensor, (size_t)node->n_inputs + 1);
  egi_node_id id = 0;
  copy.inputs = EGI_NEW(region->arena, egi_value_id, (size_t)node->n_inputs + 1);
  copy.outputs = EGI_NEW(region->arena, egi_value_id, (size_t)node->n_outputs + 1);
  if (tensors == NULL || copy.inputs == NULL || copy.outputs == NULL) return EG_ERROR_MEMORY;
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    if (inputs[i] == NULL) continue;
    EG_TRY(scratch_value(graph, inputs[i]));
    copy.inputs[i] = inputs[i]->scratch;
    tensors[i] = inputs[i]->tensor;
  }
  for (uint16_t i = 0; i < node->n_outputs; i++) copy.outputs[i] = node->outputs[i] == 0 ? EGI_VALUE_UNWANTED : 0;
  EG_TRY(copy_attributes(region, node, &copy.attributes));
  copy.n_attributes = node->n_attributes;
  EG_TRY(egi_graph_add_node(graph, &copy, &id));
  EG_TRY(egi_infer_node(graph, id));
  return region->scratch->evaluator->node(region->run->ctx, graph, id, tensors, region->arena, outputs);
}

/* ---- given values --------------------------------------------------------------------------------------------- */

typedef enum use_kind { USE_CONSTANT, USE_MATRIX, USE_BIAS } use_kind;

/* What the parameter ends up in, through views. */
static use_kind kind_of(const egi_moe_region *region, egi_value_id value) {
  const egi_graph *graph = region->graph;
  for (unsigned depth = 0; depth < MAX_CHAIN; depth++) {
    if (region->uses->start[value] == region->uses->start[value + 1]) return USE_CONSTANT;
    const egi_node *node = &graph->nodes[region->uses->list[region->uses->start[value]]];
    bool is_first = node->inputs[0] == value;
    switch (node->op) {
    case EGI_OP_MatMul:
    case EGI_OP_Gemm:
    case EGI_OP_Linear:
      return node->n_inputs > 2 && node->inputs[2] == value ? USE_BIAS : USE_MATRIX;
    case EGI_OP_Add:
      return USE_BIAS;
    case EGI_OP_Gather:
    case EGI_OP_GatherND:
    case EGI_OP_Slice:
    case EGI_OP_Split:
    case EGI_OP_Squeeze:
    case EGI_OP_Unsqueeze:
    case EGI_OP_Reshape:
    case EGI_OP_Transpose:
    case EGI_OP_Cast:
    case EGI_OP_Identity:
    case EGI_OP_Expand:
    case EGI_OP_Tile:
      if (!is_first || node->outputs[0] == 0) return USE_CONSTANT;
      value = node->outputs[0];
      continue;
    default:
      return USE_CONSTANT;
    }
  }
  return USE_CONSTANT;
}

/* A bias (or the correction of the choice) gets made-up numbers, since its own may be zeros. */
static bool is_made_up(const egi_moe_region *region, const egi_weight *weight, int64_t count) {
  if (count < 2 || weight->rank < 1 || weight->rank > 3) return false;
  return weight->rank == 1 || weight->dims[0] == region->n_experts || weight->dims[0] == 1;
}

/* Numbers lie where the file has them. */
static bool align(egi_moe_region *region, egi_tensor *t) {
  uint64_t size_bytes = 0;
  if (!egi_dtype_bytes(t->dtype, (uint64_t)egi_tensor_count(t), &size_bytes)) return false;
  void *copy = egi_arena_get(region->arena, (size_t)size_bytes + 1, 1);
  if (copy != NULL) memcpy(copy, t->data, (size_t)size_bytes);
  t->data = copy;
  return copy != NULL;
}

static bool set_weight(egi_moe_region *region, egi_value_id id) {
  const egi_graph *graph = region->graph;
  const egi_weight *weight = &graph->module->weights[graph->values[id].index];
  egi_tensor t = {.dtype = weight->dtype, .rank = weight->rank};
  if (region->values[id].is_computed) return true;
  bool may_be_matrix = egi_dtype_is_float(weight->dtype) || weight->dtype == EG_DTYPE_U8;
  use_kind kind = may_be_matrix ? kind_of(region, id) : USE_CONSTANT;
  if (kind == USE_MATRIX && weight->rank >= 2) return egi_moe_begin_matrix(region, id);
  memcpy(t.dims, weight->dims, sizeof t.dims);
  egi_tensor_set_contiguous(&t);
  int64_t count = egi_tensor_count(&t);
  bool is_float = egi_dtype_is_float(weight->dtype), is_new = kind == USE_BIAS && is_made_up(region, weight, count);
  egi_moe_value *value = egi_moe_touch(region, id);
  if (value == NULL) return egi_moe_reject(region, 0, "out of memory");
  if (!is_new && !egi_value_constant(graph, id, &t)) return egi_moe_reject(region, 0, "a constant that is not at hand");
  if (is_float && count == 1) {
    if (EGI_GROW(region->arena, &region->numbers, region->n_numbers, &region->numbers_capacity) != EG_OK) return false;
    region->numbers[region->n_numbers++] = (double)(float)egi_tensor_number(&t, 0);
  }
  if (is_float) {
    float *data = EGI_NEW(region->arena, float, (size_t)count + 1);
    if (data == NULL) return egi_moe_reject(region, 0, "out of memory");
    bool is_vector = weight->rank == 1 && count == region->n_experts;
    for (int64_t i = 0; i < count; i++)
      data[i] = is_new ? egi_moe_number_of(region, id, is_vector ? -1 - i : i) : (float)egi_tensor_number(&t, i);
    t.data = data;
    t.dtype = EG_DTYPE_F32;
  }
  if (!is_float && !align(region, &t)) return egi_moe_reject(region, 0, "out of memory");
  value->tensor = t;
  value->parameter = is_new ? id : 0;
  value->is_computed = true;
  return true;
}

/* Hidden states and logits: each expert is the choice of some token, as far as there are enough of them. */
static bool set_random(egi_moe_region *region, egi_value_id id, double scale, bool is_logits) {
  const egi_value *value = &region->graph->values[id];
  egi_tensor t = {.dtype = EG_DTYPE_F32, .rank = value->rank};
  for (int i = 0; i < t.rank; i++)
    if (!egi_dim_evaluate(region->graph->module->dims, value->dims[i], region->bindings, region->n_bindings,
                          &t.dims[i]))
      return egi_moe_reject(region, 0, "the number of tokens is not known");
  egi_tensor_set_contiguous(&t);
  int64_t count = egi_tensor_count(&t), n = region->n_experts;
  if (count > MAX_TOKENS * (is_logits ? n : region->width)) return egi_moe_reject(region, 0, "too large a sample");
  float *data = EGI_NEW(region->arena, float, (size_t)count + 1);
  egi_moe_value *sample = egi_moe_touch(region, id);
  if (data == NULL || sample == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (int64_t i = 0; i < count; i++) {
    data[i] = (float)(scale * egi_moe_random(region->seed, id, (uint64_t)i));
    int64_t distance = is_logits ? ((i % n - i / n) % n + n) % n : 1;
    if (is_logits && distance == 0) data[i] += 2.0f;
  }
  t.data = data;
  sample->tensor = t;
  sample->is_computed = true;
  if (!is_logits) region->tokens = count / region->width;
  return true;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static void merge_sources(egi_moe_value *out, const egi_moe_value *in) {
  for (unsigned i = 0; i < 2; i++) {
    uint32_t source = in->sources[i];
    if (source == 0 || out->sources[0] == source || out->sources[1] == source) continue;
    out->sources[out->sources[0] == 0 ? 0 : 1] = source;
  }
}

static bool keeps_elements(egi_op op) {
  return op == EGI_OP_Reshape || op == EGI_OP_Squeeze || op == EGI_OP_Unsqueeze || op == EGI_OP_Identity ||
         op == EGI_OP_Cast || op == EGI_OP_Flatten;
}

static bool selects(egi_op op) {
  return keeps_elements(op) || op == EGI_OP_Gather || op == EGI_OP_GatherND || op == EGI_OP_Slice ||
         op == EGI_OP_Split || op == EGI_OP_Transpose || op == EGI_OP_Expand || op == EGI_OP_Tile;
}

/* A parameter that is added to a product is its bias; to something without products, the correction of the choice. */
static void note_addition(egi_moe_region *region, egi_moe_value *const *in, egi_moe_value *out) {
  for (unsigned i = 0; i < 2; i++) {
    egi_moe_value *sum = in[i], *other = in[1 - i];
    if (other->parameter == 0 || sum->parameter != 0 || other->n_stages != 0) continue;
    if (sum->product != 0 && region->events[sum->product - 1].bias == 0) {
      egi_moe_event *event = &region->events[sum->product - 1];
      event->bias = other->parameter;
      for (uint32_t k = 0; k < event->n_members; k++) region->events[event->members[k]].bias = other->parameter;
      event->out = out->tensor;
      out->product = sum->product;
    } else if (sum->n_stages == 0 && egi_tensor_count(&other->tensor) == region->n_experts) {
      region->correction = other->parameter;
    }
  }
}

/* A product times numbers that come from the router alone. */
static void note_shares(egi_moe_region *region, egi_moe_value *const *in) {
  for (unsigned i = 0; i < 2; i++) {
    const egi_moe_value *rows = in[i], *shares = in[1 - i];
    if (rows->product == 0 || rows->n_stages != 2 || shares->n_stages != 0 || shares->tensor.dtype != EG_DTYPE_F32)
      continue;
    region->events[rows->product - 1].shares = shares->tensor;
  }
}

/* Rows of several products, one after the other, count as one. */
static bool note_rows(egi_moe_region *region, egi_node_id id, egi_moe_value *const *in, egi_moe_value *out) {
  const egi_node *node = &region->graph->nodes[id];
  if (node->op != EGI_OP_Concat || node->n_inputs < 2 || egi_node_int(node, "axis", 0) != 0) return true;
  uint32_t *members = EGI_NEW(region->arena, uint32_t, node->n_inputs);
  if (members == NULL) return egi_moe_reject(region, 0, "out of memory");
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    if (in[i] == NULL || in[i]->product == 0 || region->events[in[i]->product - 1].n_members > 0) return true;
    members[i] = in[i]->product - 1;
  }
  if (EGI_GROW(region->arena, &region->events, region->n_events, &region->events_capacity) != EG_OK)
    return egi_moe_reject(region, 0, "out of memory");
  region->events[region->n_events++] = (egi_moe_event){.node = id,
                                                       .out = out->tensor,
                                                       .n_stages = (uint8_t)(out->n_stages - 1),
                                                       .members = members,
                                                       .n_members = node->n_inputs};
  out->product = out->sources[0] = region->n_events;
  out->sources[1] = 0;
  return true;
}

static bool is_float_cast(const egi_node *node, const egi_moe_value *in) {
  eg_dtype to = (eg_dtype)egi_node_int(node, "to", 0);
  return node->op == EGI_OP_Cast && in->tensor.dtype == EG_DTYPE_F32 && egi_dtype_is_float(to);
}

static bool is_product(const egi_node *node) {
  return node->op == EGI_OP_MatMul || node->op == EGI_OP_Gemm || node->op == EGI_OP_Linear;
}

static bool run_plain(egi_moe_region *region, egi_node_id id, egi_moe_value *const *in) {
  const egi_node *node = &region->graph->nodes[id];
  egi_tensor *outputs = EGI_NEW(region->arena, egi_tensor, (size_t)node->n_outputs + 1);
  if (outputs == NULL) return egi_moe_reject(region, 0, "out of memory");
  if (is_float_cast(node, in[0]))
    outputs[0] = in[0]->tensor;
  else if (egi_moe_evaluate(region, node, in, outputs) != EG_OK)
    return egi_moe_reject(region, id, "it cannot be run on a sample");
  for (uint16_t i = 0; i < node->n_outputs; i++) {
    if (node->outputs[i] == 0) continue;
    egi_moe_value *out = egi_moe_touch(region, node->outputs[i]);
    if (out == NULL) return egi_moe_reject(region, 0, "out of memory");
    out->tensor = outputs[i];
    out->is_computed = true;
    for (uint16_t k = 0; k < node->n_inputs; k++) {
      if (in[k] == NULL) continue;
      if (in[k]->n_stages > out->n_stages) out->n_stages = in[k]->n_stages;
      merge_sources(out, in[k]);
    }
    if (selects(node->op)) out->parameter = in[0]->parameter;
    if (keeps_elements(node->op)) out->product = in[0]->product;
    if (node->op == EGI_OP_Add) note_addition(region, in, out);
    if (node->op == EGI_OP_Mul) note_shares(region, in);
    if (!note_rows(region, id, in, out)) return false;
  }
  return true;
}

static bool run_node(egi_moe_region *region, egi_node_id id) {
  const egi_node *node = &region->graph->nodes[id];
  egi_moe_value **in = EGI_NEW(region->arena, egi_moe_value *, (size_t)node->n_inputs + 1);
  bool has_matrix = false;
  if (in == NULL) return egi_moe_reject(region, 0, "out of memory");
  if (node->op == EGI_OP_If || node->op == EGI_OP_Loop || node->op == EGI_OP_Scan || node->op == EGI_OP_UNKNOWN)
    return egi_moe_reject(region, id, "its course depends on data");
  for (uint16_t i = 0; i < node->n_inputs; i++) {
    if (node->inputs[i] == 0) continue;
    if (region->graph->values[node->inputs[i]].kind == EGI_VALUE_WEIGHT && !set_weight(region, node->inputs[i]))
      return false;
    in[i] = &region->values[node->inputs[i]];
    has_matrix = has_matrix || in[i]->matrix != NULL;
    if (!in[i]->is_computed) return egi_moe_reject(region, id, "an operand is not known");
  }
  if (!has_matrix) return run_plain(region, id, in);
  return is_product(node) ? egi_moe_product(region, id) : egi_moe_view(region, id);
}

static void forget(egi_moe_region *region) {
  for (uint32_t i = 0; i < region->n_touched; i++) region->values[region->touched[i]] = (egi_moe_value){0};
  region->n_touched = region->n_events = region->n_numbers = 0;
  region->correction = 0;
}

bool egi_moe_sample(egi_moe_region *region) {
  egi_graph *graph = NULL;
  forget(region);
  egi_module_destroy(region->scratch);
  region->scratch = NULL;
  if (egi_module_create(region->run->ctx, &region->scratch) != EG_OK ||
      egi_module_add_graph(region->scratch, "sample", &graph) != EG_OK)
    return egi_moe_reject(region, 0, "out of memory");
  region->scratch->evaluator = region->graph->module->evaluator;
  if (!egi_moe_collect(region) || !set_random(region, region->x, 8.0, false) ||
      !set_random(region, region->logits, 1.5, true))
    return false;
  for (uint32_t i = 0; i < region->n_nodes; i++) {
    const egi_node *node = &region->graph->nodes[region->nodes[i]];
    bool is_done = node->outputs[0] != 0 && region->values[node->outputs[0]].is_computed;
    if (!is_done && !run_node(region, region->nodes[i])) return false;
  }
  return true;
}
