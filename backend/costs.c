/* The cost of every operator, from the types and sizes of its operands: costs.def says by which rule. Products count
 * 2·m·n·k flops, attention its visible pairs, everything else is what it reads and writes. */
#include "backend/costs.h"

#include "graph/linear.h"
#include "graph/ragged.h"

typedef struct operands {
  const egi_graph *graph;
  egi_node_id id;
  const egi_node *node;
  const egi_tensor *inputs, *outputs;
} operands;
typedef eg_status (*cost_rule)(const operands *o, egi_cost *cost);

static double count(const egi_tensor *tensor) {
  double product = 1.0;
  for (int i = 0; i < tensor->rank; i++) product *= (double)tensor->dims[i];
  return tensor->dtype == EG_DTYPE_UNDEFINED ? 0.0 : product;
}

static double bytes(const egi_tensor *tensor) {
  double product = (double)egi_dtype_bits(tensor->dtype) / 8.0;
  for (int i = 0; i < tensor->rank; i++) {
    if (tensor->strides[i] != 0) product *= (double)tensor->dims[i];
    if (tensor->dims[i] == 0) return 0.0;
  }
  return tensor->dtype == EG_DTYPE_UNDEFINED ? 0.0 : product;
}

static const egi_tensor *input_at(const operands *o, unsigned index) {
  static const egi_tensor absent;
  return index < o->node->n_inputs ? &o->inputs[index] : &absent;
}

static const egi_tensor *output_at(const operands *o, unsigned index) {
  static const egi_tensor absent;
  return index < o->node->n_outputs ? &o->outputs[index] : &absent;
}

/* A dim counted from the end, 1 the last; 1 where there is none. */
static double dim_back(const egi_tensor *tensor, int back) {
  return tensor->rank >= back ? (double)tensor->dims[tensor->rank - back] : 1.0;
}

static void set_product(egi_cost *cost, double flops, const egi_tensor *operand) {
  cost->flops = flops;
  cost->dtype = operand->dtype;
}

/* ---- products ------------------------------------------------------------------------------------------------- */

static eg_status cost_matmul(const operands *o, egi_cost *cost) {
  set_product(cost, 2.0 * count(output_at(o, 0)) * dim_back(input_at(o, 0), 1), input_at(o, 0));
  return EG_OK;
}

static eg_status cost_gemm(const operands *o, egi_cost *cost) {
  int back = egi_node_int(o->node, "transA", 0) != 0 ? 2 : 1;
  set_product(cost, 2.0 * count(output_at(o, 0)) * dim_back(input_at(o, 0), back), input_at(o, 0));
  return EG_OK;
}

static eg_status cost_add_matmul(const operands *o, egi_cost *cost) {
  set_product(cost, 2.0 * count(output_at(o, 0)) * dim_back(input_at(o, 1), 1), input_at(o, 1));
  return EG_OK;
}

/* Linear and its gradient: the rows of input 0 through a matrix, however that is stored. */
static eg_status cost_rows(const operands *o, egi_cost *cost) {
  set_product(cost, 2.0 * count(input_at(o, 0)) * dim_back(output_at(o, 0), 1), input_at(o, 0));
  return EG_OK;
}

/* Elements of a filter's [out, in / group, kernel] are used once for each output element but its channels. */
static eg_status cost_conv(const operands *o, egi_cost *cost) {
  const egi_tensor *filter = input_at(o, 1);
  double channels = filter->rank > 0 ? (double)filter->dims[0] : 1.0;
  if (channels > 0.0) set_product(cost, 2.0 * count(output_at(o, 0)) * count(filter) / channels, filter);
  return EG_OK;
}

/* X, W, dY */
static eg_status cost_conv_grad(const operands *o, egi_cost *cost) {
  const egi_tensor *filter = input_at(o, 1);
  double channels = filter->rank > 0 ? (double)filter->dims[0] : 1.0;
  double products = (output_at(o, 0)->dtype != EG_DTYPE_UNDEFINED) + (output_at(o, 1)->dtype != EG_DTYPE_UNDEFINED);
  if (channels > 0.0) set_product(cost, 2.0 * products * count(input_at(o, 2)) * count(filter) / channels, filter);
  return EG_OK;
}

/* ---- head and loss -------------------------------------------------------------------------------------------- */

/* hidden [.., d], weight: plain [d, V], quantised [V, d] in whatever storage. */
static double head_product(const operands *o) {
  const egi_tensor *hidden = input_at(o, 0), *weight = input_at(o, 1);
  double classes = (double)egi_node_int(o->node, "out_features", 0);
  if (!(classes > 0.0)) classes = dim_back(weight, 1);
  if (egi_linear_storage_of(o->node) == EGI_LINEAR_BLOCKED && egi_node_int(o->node, "transposed", 0) == 0)
    classes = dim_back(weight, 2);
  return 2.0 * count(hidden) * classes;
}

static eg_status cost_head(const operands *o, egi_cost *cost) {
  set_product(cost, head_product(o), input_at(o, 0));
  return EG_OK;
}

/* The logits once more, then d hidden and d weight as far as they are wanted. */
static eg_status cost_head_grad(const operands *o, egi_cost *cost) {
  double products = 1.0;
  for (unsigned i = 0; i < 2; i++) products += output_at(o, i)->dtype != EG_DTYPE_UNDEFINED ? 1.0 : 0.0;
  set_product(cost, products * head_product(o), input_at(o, 0));
  return EG_OK;
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* Pairs of `queries` and `keys`, the first query at key `past`, that see each other; window 0: none. */
static double visible_pairs(double queries, double keys, double past, bool is_causal, double window) {
  double width = window > 0.0 && window < keys ? window : keys;
  if (!is_causal) {
    double reach = width - 1.0; /* to both sides, cut at both ends */
    return window > 0.0 && window < keys ? queries * (2.0 * reach + 1.0) - reach * (reach + 1.0) : queries * keys;
  }
  double growing = width - past; /* queries that see fewer keys than the window holds */
  growing = growing < 0.0 ? 0.0 : growing > queries ? queries : growing;
  return growing * past + growing * (growing + 1.0) / 2.0 + (queries - growing) * width;
}

/* q and y [.., sequence, width of all heads or of one]: their elements of one query are the widths of all products with
 * one key. `q_products` have the width of q and k, `y_products` that of v. */
static void set_attention(egi_cost *cost, double pairs, const egi_tensor *q, const egi_tensor *y, double q_products,
                          double y_products) {
  double queries = dim_back(q, 2);
  if (!(queries > 0.0)) return;
  set_product(cost, 2.0 * pairs * (q_products * count(q) + y_products * count(y)) / queries, q);
}

static double plain_pairs(const operands *o, double past) {
  double queries = dim_back(input_at(o, 0), 2), keys = dim_back(input_at(o, 1), 2) + past;
  return visible_pairs(queries, keys, past, egi_node_int(o->node, "is_causal", 0) != 0, 0.0);
}

static double masked_pairs(const operands *o) {
  double queries = dim_back(input_at(o, 0), 2), keys = dim_back(input_at(o, 1), 2);
  return visible_pairs(queries, keys, 0.0, egi_node_int(o->node, "causal", 0) != 0,
                       (double)egi_node_int(o->node, "window", 0));
}

static eg_status cost_attention(const operands *o, egi_cost *cost) {
  const egi_tensor *past_key = input_at(o, 4);
  double past = past_key->dtype != EG_DTYPE_UNDEFINED ? dim_back(past_key, 2) : 0.0;
  set_attention(cost, plain_pairs(o, past), input_at(o, 0), output_at(o, 0), 1.0, 1.0);
  return EG_OK;
}

static eg_status cost_masked_attention(const operands *o, egi_cost *cost) {
  set_attention(cost, masked_pairs(o), input_at(o, 0), output_at(o, 0), 1.0, 1.0);
  return EG_OK;
}

/* Scores again, dQ and dK; d probabilities and dV (Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2). */
static eg_status cost_attention_grad(const operands *o, egi_cost *cost) {
  set_attention(cost, plain_pairs(o, 0.0), input_at(o, 0), input_at(o, 4), 3.0, 2.0);
  return EG_OK;
}

static eg_status cost_masked_attention_grad(const operands *o, egi_cost *cost) {
  set_attention(cost, masked_pairs(o), input_at(o, 0), input_at(o, 5), 3.0, 2.0);
  return EG_OK;
}

/* Each step updates and reads a state [.., key width, value width]: two products; the backward pass does it again and
 * has two gradients for each. */
static eg_status cost_linear_attention(const operands *o, egi_cost *cost) {
  double steps = input_at(o, 0)->rank > 1 ? (double)input_at(o, 0)->dims[1] : 1.0;
  set_product(cost, 4.0 * steps * count(output_at(o, 1)), input_at(o, 0));
  return EG_OK;
}

static eg_status cost_linear_attention_grad(const operands *o, egi_cost *cost) {
  double steps = input_at(o, 0)->rank > 1 ? (double)input_at(o, 0)->dims[1] : 1.0;
  set_product(cost, 12.0 * steps * count(input_at(o, 3)), input_at(o, 0));
  return EG_OK;
}

/* ---- mixture of experts --------------------------------------------------------------------------------------- */

/* Rows of one expert's matrix [N, K]. */
static double expert_rows(const operands *o, const egi_moe *moe, egi_moe_role role, bool is_transposed) {
  if (moe->counts[role] == 0) return 0.0;
  const egi_tensor *matrix = input_at(o, egi_moe_input(moe, role, 0));
  int first = moe->counts[role] == 1 && moe->n_experts > 1 ? 1 : 0;
  if (moe->is_quantised) return matrix->rank > first ? (double)matrix->dims[first] : 1.0;
  return dim_back(matrix, is_transposed ? 1 : 2);
}

/* Experts that no row can choose are not read. */
static double unread_bytes(const operands *o, const egi_moe *moe, double chosen) {
  double sum = 0.0, share = chosen / (double)moe->n_experts;
  for (uint32_t i = EGI_MOE_FIRST_ROLE; i < moe->n_inputs; i++) sum += bytes(input_at(o, i));
  return share < 1.0 ? (1.0 - share) * sum : 0.0;
}

static eg_status cost_moe(const operands *o, egi_cost *cost) {
  egi_moe moe;
  EG_TRY(egi_moe_read(o->graph, o->id, &moe));
  const egi_tensor *x = input_at(o, EGI_MOE_X);
  double gate = expert_rows(o, &moe, EGI_MOE_GATE, moe.is_transposed[0]);
  double up = expert_rows(o, &moe, EGI_MOE_UP, moe.is_transposed[1]);
  bool has_both = moe.form == EGI_MOE_CONCATENATED || moe.form == EGI_MOE_INTERLEAVED;
  double inner = has_both ? gate / 2.0 : gate, width = dim_back(x, 1);
  if (!(width > 0.0)) return EG_OK;
  double chosen = count(x) / width * (double)moe.top_k;
  set_product(cost, 2.0 * chosen * width * (gate + up + inner), x);
  cost->read_bytes -= unread_bytes(o, &moe, chosen);
  return EG_OK;
}

/* Experts that no row can choose are not read. */
static double unread_stacks(const operands *o, const egi_ragged *ragged, double rows) {
  double sum = 0.0, share = rows / (double)ragged->n_experts;
  for (uint32_t i = EGI_RAGGED_FIRST_ROLE; i < ragged->n_inputs; i++) sum += bytes(input_at(o, i));
  return share < 1.0 ? (1.0 - share) * sum : 0.0;
}

static eg_status cost_ragged(const operands *o, egi_cost *cost) {
  egi_ragged ragged;
  EG_TRY(egi_ragged_read(o->graph, o->id, &ragged));
  const egi_tensor *rows = input_at(o, 0);
  double n = o->node->op == EGI_OP_RaggedLinear ? dim_back(output_at(o, 0), 1) : dim_back(rows, 1);
  set_product(cost, 2.0 * dim_back(rows, 2) * n * (double)ragged.in_features, rows);
  cost->read_bytes -= unread_stacks(o, &ragged, dim_back(rows, 2));
  return EG_OK;
}

static eg_status cost_ragged_reduce(const operands *o, egi_cost *cost) {
  const egi_tensor *left = input_at(o, 0);
  set_product(cost, 2.0 * count(left) * dim_back(input_at(o, 1), 1), left);
  return EG_OK;
}

/* A sum like another in its shape alone. */
static eg_status cost_combine(const operands *o, egi_cost *cost) {
  cost->read_bytes -= bytes(input_at(o, 3));
  return EG_OK;
}

/* ---- bytes ---------------------------------------------------------------------------------------------------- */

static eg_status cost_nothing(const operands *o, egi_cost *cost) {
  (void)o;
  *cost = (egi_cost){0};
  return EG_OK;
}

/* The rows that are taken, not the table. */
static eg_status cost_gather(const operands *o, egi_cost *cost) {
  cost->flops = 0.0;
  cost->read_bytes = bytes(output_at(o, 0)) + bytes(input_at(o, 1));
  return EG_OK;
}

static eg_status cost_first_is_shape(const operands *o, egi_cost *cost) {
  cost->read_bytes -= bytes(input_at(o, 0));
  return EG_OK;
}

static eg_status cost_second_is_shape(const operands *o, egi_cost *cost) {
  cost->read_bytes -= bytes(input_at(o, 1));
  return EG_OK;
}

/* Both moments are written beside the parameters. */
static eg_status cost_optimizer(const operands *o, egi_cost *cost) {
  cost->flops = 12.0 * count(input_at(o, 0));
  cost->written_bytes = bytes(input_at(o, 0)) + bytes(input_at(o, 2)) + bytes(input_at(o, 3));
  return EG_OK;
}

/* The device reads, the link carries. */
static eg_status cost_offload(const operands *o, egi_cost *cost) {
  double size = bytes(output_at(o, 0));
  *cost = (egi_cost){.read_bytes = size, .to_host_bytes = size};
  return EG_OK;
}

static eg_status cost_reload(const operands *o, egi_cost *cost) {
  double size = bytes(output_at(o, 0));
  *cost = (egi_cost){.written_bytes = size, .to_device_bytes = size};
  return EG_OK;
}

static const cost_rule rules[EGI_OP_COUNT] = {
#define COST(symbol, rule) [EGI_OP_##symbol] = cost_##rule,
#include "backend/costs.def"
#undef COST
};

/* ---- public --------------------------------------------------------------------------------------------------- */

eg_status egi_cost_of_node(const egi_graph *graph, egi_node_id id, const egi_tensor *inputs, const egi_tensor *outputs,
                           egi_cost *out_cost) {
  const egi_node *node = &graph->nodes[id];
  const operands o = {.graph = graph, .id = id, .node = node, .inputs = inputs, .outputs = outputs};
  egi_cost cost = {0};
  if (egi_op_get(node->op)->flags & EGI_OP_VIEW) {
    *out_cost = cost;
    return EG_OK;
  }
  for (uint32_t i = 0; i < node->n_inputs; i++) cost.read_bytes += bytes(&inputs[i]);
  for (uint32_t i = 0; i < node->n_outputs; i++) {
    cost.written_bytes += bytes(&outputs[i]);
    cost.flops += count(&outputs[i]);
  }
  if (rules[node->op] != NULL) EG_TRY(rules[node->op](&o, &cost));
  *out_cost = cost;
  return EG_OK;
}

egi_cost egi_cost_of_copy(const egi_tensor *input, const egi_tensor *output) {
  return (egi_cost){.read_bytes = bytes(input), .written_bytes = bytes(output)};
}

static eg_status cost_at(const egi_graph *graph, egi_node_id id, const egi_binding *bindings, size_t n_bindings,
                         egi_cost *out_cost) {
  const egi_node *node = &graph->nodes[id];
  egi_arena arena;
  egi_arena_init(&arena, graph->module->ctx, EGI_PURPOSE_GRAPH);
  egi_tensor *tensors = EGI_NEW(&arena, egi_tensor, (size_t)node->n_inputs + node->n_outputs + 1);
  eg_status status = tensors != NULL ? EG_OK : EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < node->n_inputs + (uint32_t)node->n_outputs && status == EG_OK; i++) {
    egi_value_id value = i < node->n_inputs ? node->inputs[i] : node->outputs[i - node->n_inputs];
    if (value != 0) status = egi_value_tensor(graph, value, bindings, n_bindings, &tensors[i]);
  }
  if (status == EG_OK) status = egi_cost_of_node(graph, id, tensors, tensors + node->n_inputs, out_cost);
  egi_arena_clear(&arena);
  return status;
}

const egi_costs *egi_costs_get(void) {
  static const egi_costs costs = {cost_at};
  return &costs;
}
