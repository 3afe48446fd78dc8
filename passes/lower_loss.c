/* SoftmaxCrossEntropyLoss (operator version 13) and NegativeLogLikelihoodLoss (22) as LogSoftmax, GatherElements and
 * reductions: loss = -weight[label] · logp[label], 0 where the label is ignore_index; the mean is over the sum of the
 * weights of the labels that count. */
#include <string.h>

#include "passes/lower.h"

typedef struct loss {
  egi_lowering *lowering;
  egi_value_id labels;     /* i64, 0 where ignored */
  egi_value_id is_ignored; /* bool, or 0: none is */
  egi_value_id weights;    /* of the labels, or 0: all are 1 */
  eg_dtype dtype;
} loss;

static void read_labels(loss *l) {
  egi_emitter *emit = &l->lowering->emit;
  l->labels = egi_emit_cast(emit, egi_lowering_input(l->lowering, 1), EG_DTYPE_I64);
  const egi_attribute *ignore = egi_node_attribute(l->lowering->node, "ignore_index");
  if (ignore == NULL) return;
  egi_value_id index = egi_emit_scalar(emit, (double)egi_node_int(l->lowering->node, "ignore_index", 0), EG_DTYPE_I64);
  l->is_ignored = egi_emit_binary(emit, EGI_OP_Equal, l->labels, index);
  const egi_value_id choice[3] = {l->is_ignored, egi_emit_scalar(emit, 0.0, EG_DTYPE_I64), l->labels};
  l->labels = egi_emit(emit, EGI_OP_Where, choice, 3, NULL, 0);
}

/* 0 where the label is ignored. */
static egi_value_id masked(const loss *l, egi_value_id value) {
  egi_emitter *emit = &l->lowering->emit;
  if (l->is_ignored == 0) return value;
  const egi_value_id choice[3] = {l->is_ignored, egi_emit_scalar(emit, 0.0, l->dtype), value};
  return egi_emit(emit, EGI_OP_Where, choice, 3, NULL, 0);
}

static void read_weights(loss *l) {
  egi_emitter *emit = &l->lowering->emit;
  egi_value_id classes = egi_lowering_input(l->lowering, 2);
  if (classes != 0)
    l->weights = masked(l, egi_emit_binary(emit, EGI_OP_Gather, classes, l->labels));
  else if (l->is_ignored != 0)
    l->weights = masked(l, egi_emit_scalar(emit, 1.0, l->dtype));
}

static egi_value_id reduce(const loss *l, egi_op op, egi_value_id value) {
  return egi_emit_with_int(&l->lowering->emit, op, &value, 1, "keepdims", 0);
}

static eg_status finish(const loss *l, egi_value_id terms, egi_value_id *out_result) {
  const char *reduction = egi_node_string(l->lowering->node, "reduction", "mean");
  *out_result = terms;
  if (strcmp(reduction, "none") == 0) return EG_OK;
  if (strcmp(reduction, "sum") == 0) {
    *out_result = reduce(l, EGI_OP_ReduceSum, terms);
    return EG_OK;
  }
  if (strcmp(reduction, "mean") != 0)
    return egi_lowering_fail(l->lowering, EG_ERROR_FORMAT, "its reduction is not none, sum or mean");
  if (l->weights == 0)
    *out_result = reduce(l, EGI_OP_ReduceMean, terms);
  else
    *out_result = egi_emit_binary(&l->lowering->emit, EGI_OP_Div, reduce(l, EGI_OP_ReduceSum, terms),
                                  reduce(l, EGI_OP_ReduceSum, l->weights));
  return EG_OK;
}

/* `logp` [batch, classes, ..], labels [batch, ..] */
static eg_status lower_from(egi_lowering *lowering, egi_value_id logp) {
  static const int64_t class_axis[1] = {1};
  egi_emitter *emit = &lowering->emit;
  const egi_value *scores = egi_lowering_value(lowering, egi_lowering_input(lowering, 0));
  const egi_value *labels = egi_lowering_value(lowering, egi_lowering_input(lowering, 1));
  if (scores->rank < 2 || labels->rank != scores->rank - 1 || !egi_dtype_is_float(scores->dtype))
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "scores and labels do not fit together");
  loss l = {.lowering = lowering, .dtype = scores->dtype};
  read_labels(&l);
  read_weights(&l);
  const egi_value_id pick[2] = {logp, egi_emit_axes(emit, EGI_OP_Unsqueeze, l.labels, class_axis, 1)};
  egi_value_id picked = egi_emit_with_int(emit, EGI_OP_GatherElements, pick, 2, "axis", 1);
  egi_value_id terms = egi_emit_unary(emit, EGI_OP_Neg, egi_emit_axes(emit, EGI_OP_Squeeze, picked, class_axis, 1));
  if (egi_lowering_input(lowering, 2) != 0) terms = egi_emit_binary(emit, EGI_OP_Mul, terms, l.weights);
  return finish(&l, masked(&l, terms), &lowering->results[0]);
}

eg_status egi_lower_cross_entropy(egi_lowering *lowering) {
  egi_value_id scores = egi_lowering_input(lowering, 0);
  if (egi_lowering_value(lowering, scores)->rank < 2)
    return egi_lowering_fail(lowering, EG_ERROR_SHAPE, "the scores have no axis of classes");
  lowering->results[1] = egi_emit_with_int(&lowering->emit, EGI_OP_LogSoftmax, &scores, 1, "axis", 1);
  return lower_from(lowering, lowering->results[1]);
}

eg_status egi_lower_log_likelihood(egi_lowering *lowering) {
  return lower_from(lowering, egi_lowering_input(lowering, 0));
}
