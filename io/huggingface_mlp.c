/* The feed-forward part of a decoder layer: gated from two matrices or one, or plain. */
#include "io/huggingface.h"

static egi_value_id activate(egi_decoder_builder *b, egi_value_id x) {
  egi_decoder_enter(b, b->config->family->names->mlp, b->config->family->names->activation);
  return egi_decoder_activate(b, b->config->activation, x);
}

static egi_value_id gated(egi_decoder_builder *b, egi_value_id x, egi_linear_shape shape) {
  const egi_module_names *names = b->config->family->names;
  egi_value_id gate = activate(b, egi_decoder_linear(b, names->mlp, names->gate, x, shape));
  egi_value_id up = egi_decoder_linear(b, names->mlp, names->up, x, shape);
  egi_decoder_enter(b, names->mlp, NULL);
  return egi_emit_binary(&b->emit, EGI_OP_Mul, gate, up);
}

static egi_value_id gated_from_one(egi_decoder_builder *b, egi_value_id x, egi_linear_shape shape) {
  const egi_module_names *names = b->config->family->names;
  const egi_linear_shape both = {shape.in, 2 * shape.out, shape.has_bias};
  const int64_t sizes[2] = {shape.out, shape.out};
  egi_value_id pieces[2], fused = egi_decoder_linear(b, names->mlp, names->gate_up, x, both);
  egi_decoder_enter(b, names->mlp, NULL);
  egi_decoder_split(b, fused, sizes, 2, pieces);
  egi_value_id gate = activate(b, pieces[0]);
  egi_decoder_enter(b, names->mlp, NULL);
  return egi_emit_binary(&b->emit, EGI_OP_Mul, pieces[1], gate);
}

egi_value_id egi_decoder_mlp(egi_decoder_builder *b, egi_value_id x) {
  const egi_decoder_config *c = b->config;
  const egi_module_names *names = c->family->names;
  const egi_linear_shape in = {c->hidden, c->intermediate, c->has_mlp_bias};
  const egi_linear_shape out = {c->intermediate, c->hidden, c->has_mlp_bias};
  egi_value_id y = 0;
  switch (c->family->mlp) {
  case EGI_MLP_GATED:
    y = gated(b, x, in);
    break;
  case EGI_MLP_ROWS:
    y = gated_from_one(b, x, in);
    break;
  case EGI_MLP_PLAIN:
    y = activate(b, egi_decoder_linear(b, names->mlp, names->up, x, in));
    break;
  }
  return egi_decoder_linear(b, names->mlp, names->down, y, out);
}
