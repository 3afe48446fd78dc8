/* The operator table of ops.def. */
#include "graph/graph.h"

enum {
  V = EGI_OP_VIEW,
  R = EGI_OP_ROW_LOCAL,
  E = EGI_OP_ELEMENTWISE,
  C = EGI_OP_COMMUTATIVE,
  P = EGI_OP_PACKING_AWARE,
  S = EGI_OP_EFFECT,
  I = EGI_OP_INTEGER
};

static const egi_op_info infos[EGI_OP_COUNT] = {
    [EGI_OP_NONE] = {"", "", 0, 0, 0, 0, 0, 0},
    [EGI_OP_UNKNOWN] = {"", "", 0, 0, 255, 0, 255, 0},
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) \
  [EGI_OP_##symbol] = {domain, name, version, in_min, in_max, out_min, out_max, flags},
#include "graph/ops.def"
#undef EGI_OP
};

const egi_op_info *egi_op_get(egi_op op) {
  return &infos[(unsigned)op < EGI_OP_COUNT ? op : EGI_OP_UNKNOWN];
}

/* A few dozen rows, nearly all of them told apart by the first letter. */
egi_op egi_op_find(const char *domain, const char *name) {
  const char *wanted = domain == NULL || strcmp(domain, "ai.onnx") == 0 ? "" : domain;
  for (unsigned op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++)
    if (infos[op].name[0] == name[0] && strcmp(infos[op].name, name) == 0 && strcmp(infos[op].domain, wanted) == 0)
      return (egi_op)op;
  return EGI_OP_UNKNOWN;
}

/* Optional operands; those of Loop and of some gradients are the only ones before required ones, and lists have no
 * gaps.
 */
bool egi_op_may_lack(egi_op op, unsigned input) {
  const egi_op_info *info = egi_op_get(op);
  if (op == EGI_OP_Loop && input < 2) return true;
  if (op == EGI_OP_LinearAttentionGrad && input >= 3 && input <= 5) return true;
  if (op == EGI_OP_MoE && input == 2) return true;
  if ((op == EGI_OP_RaggedLinear || op == EGI_OP_RaggedLinearGrad) && (input == 1 || input == 3)) return true;
  if (op == EGI_OP_AttentionGrad && input == 3) return true;
  if (op == EGI_OP_MaskedAttentionGrad && (input == 3 || input == 4)) return true;
  return input >= info->in_min && info->in_max != 255;
}
