/* Mixtures of experts, written plainly: every expert sees every token, and a token's experts are weighted, all others
 * by 0. Weights are stacks (experts first) or, as most files have them, matrices of each expert. */
#include "io/huggingface.h"

/* ---- routing ---- */

/* The weight of each expert for each token, [batch, sequence, experts]: 0 for those that are not chosen. */
static egi_value_id spread(egi_decoder_builder *b, egi_value_id weights, egi_value_id chosen) {
  egi_arena *arena = &b->graph->module->arena;
  const egi_attribute flat = egi_attribute_int("keepdims", 0);
  int64_t n = b->config->n_experts;
  int64_t *numbers = EGI_NEW(arena, int64_t, (size_t)n);
  static const int64_t rank_axis = 2;
  if (numbers == NULL) {
    b->emit.status = EG_ERROR_MEMORY;
    return 0;
  }
  for (int64_t i = 0; i < n; i++) numbers[i] = i;
  egi_value_id is_chosen = egi_emit_binary(&b->emit, EGI_OP_Equal, egi_decoder_unsqueeze(b, chosen, 3),
                                           egi_emit_integers(&b->emit, numbers, (uint32_t)n));
  const egi_value_id choice[] = {is_chosen, egi_decoder_unsqueeze(b, weights, 3),
                                 egi_emit_scalar(&b->emit, 0.0, b->dtype)};
  const egi_value_id inputs[] = {egi_emit(&b->emit, EGI_OP_Where, choice, 3, NULL, 0),
                                 egi_emit_integers(&b->emit, &rank_axis, 1)};
  return egi_emit(&b->emit, EGI_OP_ReduceSum, inputs, 2, &flat, 1);
}

static egi_value_id softmax(egi_decoder_builder *b, egi_value_id x) {
  const egi_attribute last = egi_attribute_int("axis", -1);
  return egi_emit(&b->emit, EGI_OP_Softmax, &x, 1, &last, 1);
}

/* Qwen and Mixtral take shares of all experts, in float32; gpt-oss shares of those that are chosen. */
static egi_value_id route(egi_decoder_builder *b, egi_value_id logits) {
  static const int64_t last = -1;
  const egi_attribute axis = egi_attribute_int("axis", -1);
  bool is_after = b->config->family->experts == EGI_EXPERTS_CLAMPED;
  egi_value_id best[2];
  if (!is_after) logits = softmax(b, egi_emit_cast(&b->emit, logits, EG_DTYPE_F32));
  const egi_value_id inputs[] = {logits, egi_emit_integers(&b->emit, &b->config->n_active, 1)};
  egi_emit_many(&b->emit, EGI_OP_TopK, inputs, 2, &axis, 1, best, 2);
  if (is_after) best[0] = softmax(b, best[0]);
  if (!is_after && b->config->normalizes_routing) {
    const egi_value_id sum[] = {best[0], egi_emit_integers(&b->emit, &last, 1)};
    best[0] = egi_emit_binary(&b->emit, EGI_OP_Div, best[0], egi_emit(&b->emit, EGI_OP_ReduceSum, sum, 2, NULL, 0));
  }
  return spread(b, egi_emit_cast(&b->emit, best[0], b->dtype), best[1]);
}

/* ---- a stack of experts: [batch, experts, sequence, …] ---- */

static egi_value_id add_bias(egi_decoder_builder *b, const char *part, egi_value_id x, int64_t length) {
  const int64_t dims[2] = {b->config->n_experts, length};
  egi_value_id bias = egi_decoder_matrix(b, part, 2, dims);
  return egi_emit_binary(&b->emit, EGI_OP_Add, x, egi_decoder_unsqueeze(b, bias, 1));
}

/* Gate and up stand in turn: glu(min(gate, limit)) · (clip(up) + 1), glu(x) = x · sigmoid(alpha · x). */
static egi_value_id clamp_and_gate(egi_decoder_builder *b, egi_value_id both) {
  static const int64_t even[3] = {0, INT64_MAX, 2}, odd[3] = {1, INT64_MAX, 2};
  const egi_decoder_config *c = b->config;
  egi_emitter *emit = &b->emit;
  egi_value_id low = egi_emit_scalar(emit, -c->expert_limit, b->dtype);
  egi_value_id high = egi_emit_scalar(emit, c->expert_limit, b->dtype);
  const egi_value_id gate_bounds[] = {egi_decoder_slice(b, both, even), 0, high};
  const egi_value_id up_bounds[] = {egi_decoder_slice(b, both, odd), low, high};
  egi_value_id gate = egi_emit(emit, EGI_OP_Clip, gate_bounds, 3, NULL, 0);
  egi_value_id up = egi_emit(emit, EGI_OP_Clip, up_bounds, 3, NULL, 0);
  egi_value_id scaled = egi_emit_binary(emit, EGI_OP_Mul, gate, egi_emit_scalar(emit, c->expert_alpha, b->dtype));
  egi_value_id glu = egi_emit_binary(emit, EGI_OP_Mul, gate, egi_emit_unary(emit, EGI_OP_Sigmoid, scaled));
  return egi_emit_binary(emit, EGI_OP_Mul, egi_emit_binary(emit, EGI_OP_Add, up, egi_emit_scalar(emit, 1.0, b->dtype)),
                         glu);
}

static egi_value_id gate_halves(egi_decoder_builder *b, egi_value_id both) {
  const int64_t sizes[2] = {b->config->expert_intermediate, b->config->expert_intermediate};
  egi_value_id pieces[2];
  egi_decoder_split(b, both, sizes, 2, pieces);
  return egi_emit_binary(&b->emit, EGI_OP_Mul, egi_decoder_activate(b, b->config->activation, pieces[0]), pieces[1]);
}

/* Stacks are [experts, out, in], gpt-oss's [experts, in, out]. */
static egi_value_id multiply_stack(egi_decoder_builder *b, const char *part, egi_value_id x, int64_t in, int64_t out) {
  static const int64_t turned[] = {0, 2, 1};
  bool is_in_out = b->config->family->experts == EGI_EXPERTS_CLAMPED;
  const int64_t dims[3] = {b->config->n_experts, is_in_out ? in : out, is_in_out ? out : in};
  const int64_t coded[3] = {b->config->n_experts, out, in};
  egi_value_id weight = is_in_out ? egi_decoder_coded_stack(b, part, coded) : 0;
  if (weight == 0) weight = egi_decoder_matrix(b, part, 3, dims);
  if (!is_in_out) weight = egi_decoder_transpose(b, weight, turned, 3);
  return egi_emit_binary(&b->emit, EGI_OP_MatMul, x, weight);
}

static egi_value_id apply_stack(egi_decoder_builder *b, egi_value_id x, egi_value_id routing) {
  static const int64_t experts_second[] = {0, 2, 1}, expert_axis = 1;
  const egi_decoder_config *c = b->config;
  const egi_attribute flat = egi_attribute_int("keepdims", 0);
  bool is_clamped = c->family->experts == EGI_EXPERTS_CLAMPED;
  egi_value_id y = egi_decoder_unsqueeze(b, x, 1);
  y = multiply_stack(b, "gate_up_proj", y, c->hidden, 2 * c->expert_intermediate);
  if (is_clamped) y = add_bias(b, "gate_up_proj_bias", y, 2 * c->expert_intermediate);
  y = is_clamped ? clamp_and_gate(b, y) : gate_halves(b, y);
  y = multiply_stack(b, "down_proj", y, c->expert_intermediate, c->hidden);
  if (is_clamped) y = add_bias(b, "down_proj_bias", y, c->hidden);
  routing = egi_decoder_unsqueeze(b, egi_decoder_transpose(b, routing, experts_second, 3), 3);
  const egi_value_id inputs[] = {egi_emit_binary(&b->emit, EGI_OP_Mul, y, routing),
                                 egi_emit_integers(&b->emit, &expert_axis, 1)};
  return egi_emit(&b->emit, EGI_OP_ReduceSum, inputs, 2, &flat, 1);
}

/* ---- matrices of each expert ---- */

static egi_value_id apply_one(egi_decoder_builder *b, const char *module, egi_value_id x) {
  const egi_linear_shape in = {b->config->hidden, b->config->expert_intermediate, false};
  const egi_linear_shape out = {b->config->expert_intermediate, b->config->hidden, false};
  egi_value_id gate = egi_decoder_linear(b, module, "gate_proj", x, in);
  egi_decoder_enter(b, module, "act_fn");
  gate = egi_decoder_activate(b, b->config->activation, gate);
  egi_value_id up = egi_decoder_linear(b, module, "up_proj", x, in);
  egi_decoder_enter(b, module, NULL);
  egi_value_id product = egi_emit_binary(&b->emit, EGI_OP_Mul, gate, up);
  return egi_decoder_linear(b, module, "down_proj", product, out);
}

static egi_value_id apply_each(egi_decoder_builder *b, egi_value_id x, egi_value_id routing) {
  egi_arena *arena = &b->graph->module->arena;
  egi_value_id sum = 0;
  for (int64_t i = 0; i < b->config->n_experts && b->emit.status == EG_OK; i++) {
    const int64_t bounds[3] = {i, i + 1, 1};
    const char *expert = egi_arena_format(arena, "mlp.experts.%lld", (long long)i);
    if (expert == NULL) b->emit.status = EG_ERROR_MEMORY;
    egi_value_id y = apply_one(b, expert, x);
    egi_decoder_enter(b, "mlp", "experts");
    y = egi_emit_binary(&b->emit, EGI_OP_Mul, y, egi_decoder_slice(b, routing, bounds));
    sum = i == 0 ? y : egi_emit_binary(&b->emit, EGI_OP_Add, sum, y);
  }
  return sum;
}

egi_value_id egi_decoder_experts(egi_decoder_builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  bool is_clamped = c->family->experts == EGI_EXPERTS_CLAMPED;
  const char *router = is_clamped ? "router" : "gate";
  const egi_linear_shape shape = {c->hidden, c->n_experts, is_clamped};
  egi_value_id logits = egi_decoder_linear(b, "mlp", router, x, shape);
  egi_decoder_enter(b, "mlp", router);
  egi_value_id routing = route(b, logits);
  egi_decoder_enter(b, "mlp", "experts");
  if (b->options->weights == NULL || is_clamped || egi_decoder_has_tensor(b, "gate_up_proj"))
    return apply_stack(b, x, routing);
  return apply_each(b, x, routing);
}
