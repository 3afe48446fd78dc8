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
