/* Losses of whole documents: classes, several labels, numbers, and embeddings that are to be alike or not. Called by
 * append_loss. The result is the sum over the rows of a batch that are trained on; what the rows are trained on comes
 * through inputs of the graph. Precondition: inferred, after name_modules. */
#include <string.h>

#include "passes/passes.h"

/* Embeddings shorter than this are not made longer (torch.nn.functional.normalize), and what no row may choose. */
static const double least_square = 1e-24, no_candidate = -1e30;

typedef struct document_loss {
  egi_graph *graph;
  egi_emitter emit;
  const egi_adapt_options *adapt;
  egi_dim batch, sequence;
} document_loss;

static egi_value_id add_input(document_loss *d, const char *name, eg_dtype dtype, int rank, egi_dim last) {
  const egi_dim dims[2] = {d->batch, last};
  egi_value_id value = 0;
  if (d->emit.status == EG_OK && egi_graph_find_value(d->graph, name) != 0)
    d->emit.status = egi_fail(d->graph->module->ctx, EG_ERROR_ARGUMENT, "the graph has a loss already: \"%s\"", name);
  if (d->emit.status == EG_OK) d->emit.status = egi_graph_add_input(d->graph, name, dtype, rank, dims, &value);
  return value;
}

static egi_value_id reduce(document_loss *d, egi_op op, egi_value_id a, const int64_t *axis, bool keeps) {
  const egi_attribute keep = egi_attribute_int("keepdims", keeps);
  const egi_value_id inputs[2] = {a, axis != NULL ? egi_emit_integers(&d->emit, axis, 1) : 0};
  return egi_emit(&d->emit, op, inputs, axis != NULL ? 2 : 1, &keep, 1);
}

static const int64_t last_axis = -1;

static egi_value_id unsqueeze(document_loss *d, egi_value_id a, int64_t axis) {
  return egi_emit_binary(&d->emit, EGI_OP_Unsqueeze, a, egi_emit_integers(&d->emit, &axis, 1));
}

static egi_value_id squeeze(document_loss *d, egi_value_id a, int64_t axis) {
  return egi_emit_binary(&d->emit, EGI_OP_Squeeze, a, egi_emit_integers(&d->emit, &axis, 1));
}

static egi_value_id to_float(document_loss *d, egi_value_id value) {
  if (d->graph->values[value].dtype == EG_DTYPE_F32) return value;
  return egi_emit_cast(&d->emit, value, EG_DTYPE_F32);
}

/* Rows' losses [batch, n] -> the sum over weighted rows of their means. */
static egi_value_id sum_rows(document_loss *d, egi_value_id losses) {
  egi_value_id weights = add_input(d, EGI_INPUT_ROW_WEIGHTS, EG_DTYPE_F32, 1, 0);
  egi_value_id rows = reduce(d, EGI_OP_ReduceMean, losses, &last_axis, false);
  return reduce(d, EGI_OP_ReduceSum, egi_emit_binary(&d->emit, EGI_OP_Mul, rows, weights), NULL, false);
}

static egi_value_id add_numbers(document_loss *d, egi_value_id like) {
  const egi_value *value = &d->graph->values[like];
  return add_input(d, EGI_INPUT_NUMBERS, EG_DTYPE_F32, 2, value->dims[value->rank - 1]);
}

/* ---- numbers of a document -------------------------------------------------------------------------------------- */

/* Mean of squares over the numbers, as torch.nn.MSELoss. */
static egi_value_id squares(document_loss *d, egi_value_id values) {
  egi_value_id difference = egi_emit_binary(&d->emit, EGI_OP_Sub, values, add_numbers(d, values));
  return sum_rows(d, egi_emit_binary(&d->emit, EGI_OP_Mul, difference, difference));
}

/* As torch.nn.BCEWithLogitsLoss: log σ(x) and log σ(-x) are the log-softmax of x/2 and -x/2, at any size of x. */
static egi_value_id binary_entropies(document_loss *d, egi_value_id logits) {
  egi_emitter *emit = &d->emit;
  const egi_attribute last = egi_attribute_int("axis", -1);
  egi_value_id numbers = add_numbers(d, logits);
  egi_value_id half = egi_emit_binary(emit, EGI_OP_Mul, logits, egi_emit_scalar(emit, 0.5, EG_DTYPE_F32));
  egi_value_id sides[2] = {unsqueeze(d, half, 2), unsqueeze(d, egi_emit_unary(emit, EGI_OP_Neg, half), 2)};
  egi_value_id both = egi_emit(emit, EGI_OP_Concat, sides, 2, &last, 1);
  egi_value_id other = egi_emit_binary(emit, EGI_OP_Sub, egi_emit_scalar(emit, 1.0, EG_DTYPE_F32), numbers);
  egi_value_id chances[2] = {unsqueeze(d, numbers, 2), unsqueeze(d, other, 2)};
  egi_value_id wanted = egi_emit(emit, EGI_OP_Concat, chances, 2, &last, 1);
  egi_value_id log_chances = egi_emit(emit, EGI_OP_LogSoftmax, &both, 1, &last, 1);
  egi_value_id gains =
      reduce(d, EGI_OP_ReduceSum, egi_emit_binary(emit, EGI_OP_Mul, log_chances, wanted), &last_axis, false);
  return sum_rows(d, egi_emit_unary(emit, EGI_OP_Neg, gains));
}

static egi_value_id cross_entropy(document_loss *d, egi_value_id logits, egi_value_id labels) {
  const egi_value_id inputs[2] = {logits, labels};
  egi_value_id results[2];
  egi_emit_many(&d->emit, EGI_OP_LogProbability, inputs, 2, NULL, 0, results, 2);
  if (d->emit.status == EG_OK) d->emit.status = egi_graph_rename_value(d->graph, results[0], EGI_OUTPUT_LOGP);
  return egi_emit_unary(&d->emit, EGI_OP_Neg, reduce(d, EGI_OP_ReduceSum, results[0], NULL, false));
}

static eg_status append_logits(document_loss *d, egi_value_id *out_loss) {
  egi_value_id logits = egi_find_document_logits(d->graph);
  if (logits == 0)
    return egi_fail(d->graph->module->ctx, EG_ERROR_DATA,
                    "the model has no output \"logits\" [batch, classes]: documents cannot be told apart by it");
  logits = to_float(d, logits);
  if (d->graph->values[logits].rank == 1) logits = unsqueeze(d, logits, 1);
  switch (d->adapt->loss) {
  case EG_LOSS_MULTI_LABEL:
    *out_loss = binary_entropies(d, logits);
    break;
  case EG_LOSS_REGRESSION:
    *out_loss = squares(d, logits);
    break;
  default:
    *out_loss = cross_entropy(d, logits, add_input(d, EGI_INPUT_CLASSES, EG_DTYPE_I64, 1, 0));
  }
  return d->emit.status;
}

/* ---- embeddings ------------------------------------------------------------------------------------------------- */

/* [batch, size] of length 1. Hidden states of tokens are summed by the weights of an input: which of them count, and
 * how much, is the loader's to say. */
static egi_value_id unit_embeddings(document_loss *d, egi_value_id value) {
  egi_emitter *emit = &d->emit;
  value = to_float(d, value);
  if (emit->status == EG_OK && d->graph->values[value].rank == 3) {
    egi_value_id weights = add_input(d, EGI_INPUT_POOLING, EG_DTYPE_F32, 2, d->sequence);
    value = squeeze(d, egi_emit_binary(emit, EGI_OP_MatMul, unsqueeze(d, weights, 1), value), 1);
  }
  egi_value_id square = reduce(d, EGI_OP_ReduceSum, egi_emit_binary(emit, EGI_OP_Mul, value, value), &last_axis, true);
  const egi_value_id bounded[2] = {square, egi_emit_scalar(emit, least_square, EG_DTYPE_F32)};
  egi_value_id length = egi_emit_unary(emit, EGI_OP_Sqrt, egi_emit(emit, EGI_OP_Max, bounded, 2, NULL, 0));
  return egi_emit_binary(emit, EGI_OP_Div, value, length);
}

/* Each anchor chooses among all documents of the batch that are no anchors: cross-entropy of its own positive over
 * cosine similarities times a scale (Henderson et al., Efficient Natural Language Response Suggestion, 2017; with
 * cosines: sentence-transformers' MultipleNegativesRankingLoss). */
static egi_value_id ranking(document_loss *d, egi_value_id units) {
  egi_emitter *emit = &d->emit;
  double scale = d->adapt->similarity_scale > 0.0 ? d->adapt->similarity_scale : 20.0;
  egi_value_id matches = add_input(d, EGI_INPUT_MATCHES, EG_DTYPE_I64, 1, 0);
  egi_value_id candidates = add_input(d, EGI_INPUT_CANDIDATES, EG_DTYPE_F32, 1, 0);
  egi_value_id scaled = egi_emit_binary(emit, EGI_OP_Mul, units, egi_emit_scalar(emit, scale, EG_DTYPE_F32));
  egi_value_id scores = egi_emit_binary(emit, EGI_OP_MatMul, scaled, egi_emit_unary(emit, EGI_OP_Transpose, units));
  egi_value_id none = egi_emit_scalar(emit, no_candidate, EG_DTYPE_F32);
  egi_value_id out = egi_emit_binary(emit, EGI_OP_Sub, egi_emit_scalar(emit, 1.0, EG_DTYPE_F32), candidates);
  egi_value_id barred = unsqueeze(d, egi_emit_binary(emit, EGI_OP_Mul, out, none), 0);
  return cross_entropy(d, egi_emit_binary(emit, EGI_OP_Add, scores, barred), matches);
}

/* The square of the difference between a pair's cosine and its score (sentence-transformers' CosineSimilarityLoss). */
static egi_value_id cosines(document_loss *d, egi_value_id units) {
  egi_value_id partners = add_input(d, EGI_INPUT_PARTNERS, EG_DTYPE_I64, 1, 0);
  egi_value_id others = egi_emit_binary(&d->emit, EGI_OP_Gather, units, partners);
  egi_value_id products = egi_emit_binary(&d->emit, EGI_OP_Mul, units, others);
  egi_value_id cosine = reduce(d, EGI_OP_ReduceSum, products, &last_axis, true);
  return d->emit.status == EG_OK ? squares(d, cosine) : 0;
}

eg_status egi_append_document_loss(egi_graph *graph, const egi_adapt_options *adapt, egi_value_id *out_loss) {
  document_loss d = {.graph = graph, .emit = {.graph = graph}, .adapt = adapt};
  egi_value_id tokens = 0, embedding = 0;
  EG_TRY(egi_find_token_input(graph, &tokens));
  d.batch = graph->values[tokens].dims[0];
  d.sequence = graph->values[tokens].dims[1];
  if (adapt->loss != EG_LOSS_RANKING && adapt->loss != EG_LOSS_COSINE) return append_logits(&d, out_loss);
  EG_TRY(egi_find_embedding(graph, adapt->pooling, &embedding));
  embedding = unit_embeddings(&d, embedding);
  EG_TRY(d.emit.status);
  *out_loss = adapt->loss == EG_LOSS_RANKING ? ranking(&d, embedding) : cosines(&d, embedding);
  return d.emit.status;
}
