/* Which loss a model is trained with, by what the data holds and the graph gives; and whether all of the data fits. */
#include "train/train.h"

#include <string.h>

/* Tokens of the row that a model is asked with whether it looks ahead. */
enum { PROBE_LENGTH = 6 };

static const char *const loss_names[] = {"",
                                         "of the next token",
                                         "of each token",
                                         "classes of documents",
                                         "several labels of documents",
                                         "numbers of documents",
                                         "matches among documents",
                                         "cosines of documents"};

static int64_t last_size(const egi_graph *graph, egi_value_id value) {
  egi_dims *dims = graph->module->dims;
  const egi_value *v = &graph->values[value];
  int64_t size = 0;
  if (v->rank < 1) return 0;
  return egi_dim_value(dims, egi_dim_resolve(dims, v->dims[v->rank - 1]), &size) ? size : 0;
}

/* ---- does a token see those behind it? -------------------------------------------------------------------------- */

typedef enum sight { SIGHT_UNKNOWN, SIGHT_BACK, SIGHT_BOTH } sight;

/* As far as recognised attention says. */
static sight recognised_sight(const egi_graph *graph) {
  sight found = SIGHT_UNKNOWN;
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op != EGI_OP_MaskedAttention) continue;
    if (egi_node_int(node, "causal", 0) != 0) return SIGHT_BACK;
    found = SIGHT_BOTH;
  }
  return found;
}

/* Runs the model on two rows that differ in their last token alone, and looks at the logits of the first. */
static eg_status probe(const egi_graph *graph, uint32_t ids, uint32_t output, egi_arena *arena, sight *out_sight) {
  const egi_sample_sizes sizes = {.batch = 1, .sequence = PROBE_LENGTH, .seed = 1};
  const egi_evaluator *evaluator = graph->module->evaluator;
  egi_tensor *inputs = egi_sample_inputs(graph, &sizes, arena);
  egi_tensor *first = EGI_NEW(arena, egi_tensor, graph->n_outputs),
             *second = EGI_NEW(arena, egi_tensor, graph->n_outputs);
  if (evaluator == NULL || inputs == NULL || first == NULL || second == NULL) return EG_OK;
  if (egi_tensor_count(&inputs[ids]) != PROBE_LENGTH) return EG_OK;
  EG_TRY(evaluator->graph(graph->module->ctx, graph, inputs, arena, first));
  double token = egi_tensor_number(&inputs[ids], PROBE_LENGTH - 1);
  if (!egi_tensor_set(&inputs[ids], PROBE_LENGTH - 1, token > 0 ? token - 1 : 1)) return EG_OK;
  EG_TRY(evaluator->graph(graph->module->ctx, graph, inputs, arena, second));
  int64_t count = egi_tensor_count(&first[output]) / PROBE_LENGTH;
  *out_sight = SIGHT_BACK;
  for (int64_t i = 0; i < count; i++) {
    double a = egi_tensor_number(&first[output], i), b = egi_tensor_number(&second[output], i);
    if (a < b || a > b) *out_sight = SIGHT_BOTH;
  }
  return EG_OK;
}

/* Attention with a bias of its own and the like is not recognised: the model is asked. One that cannot be run is taken
 * for a decoder. */
static sight find_sight(const egi_graph *graph, const egi_inputs *inputs, egi_value_id logits) {
  sight found = recognised_sight(graph);
  uint32_t output = 0;
  egi_arena arena;
  while (output < graph->n_outputs && graph->outputs[output] != logits) output++;
  if (found != SIGHT_UNKNOWN || output == graph->n_outputs) return found;
  egi_arena_init(&arena, graph->module->ctx, EGI_PURPOSE_DATA);
  if (probe(graph, inputs->ids, output, &arena, &found) != EG_OK) found = SIGHT_UNKNOWN;
  egi_arena_clear(&arena);
  return found;
}

/* ---- the choice ------------------------------------------------------------------------------------------------- */

/* With labels of tokens alone. */
static eg_status choose_of_tokens(const egi_graph *graph, const egi_inputs *inputs, egi_objective *objective) {
  egi_value_id logits = 0, rows = egi_find_document_logits(graph);
  int64_t n_embeddings = egi_embedding_count(graph, inputs);
  if (rows != 0 && last_size(graph, rows) != n_embeddings && graph->values[rows].rank == 2)
    return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                    "output \"%s\" gives %lld numbers for each document: each line of the data needs a \"label\", or "
                    "\"anchor\" and \"positive\"",
                    graph->values[rows].name, (long long)last_size(graph, rows));
  objective->loss = EG_LOSS_NEXT_TOKEN;
  EG_TRY(egi_find_logits(graph, &logits));
  if (strcmp(graph->values[logits].name, "last_hidden_state") == 0)
    return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                    "the model gives embeddings alone: each line of the data needs \"anchor\" and \"positive\", or "
                    "\"sentence1\", \"sentence2\" and \"score\"");
  if (find_sight(graph, inputs, logits) == SIGHT_BOTH) objective->loss = EG_LOSS_TOKEN;
  return EG_OK;
}

static bool are_chances(const egi_documents *documents) {
  for (size_t i = 0; i < documents->n_documents * documents->n_numbers; i++)
    if (!(documents->numbers[i] >= 0.0F && documents->numbers[i] <= 1.0F)) return false;
  return true;
}

/* As transformers decides on a problem's type, by labels and number of classes. */
static eg_loss choose_of_numbers(const egi_graph *graph, const egi_documents *documents) {
  egi_value_id logits = egi_find_document_logits(graph);
  int64_t n = logits == 0 ? 0 : graph->values[logits].rank == 1 ? 1 : last_size(graph, logits);
  if (n == 1) return EG_LOSS_REGRESSION;
  if (documents->kind == EGI_DOCUMENTS_CLASS) return EG_LOSS_CLASSIFICATION;
  return documents->n_numbers > 1 && are_chances(documents) ? EG_LOSS_MULTI_LABEL : EG_LOSS_REGRESSION;
}

eg_status egi_objective_choose(const egi_graph *graph, const egi_inputs *inputs, const egi_documents *documents,
                               egi_objective *objective) {
  if (objective->loss == EG_LOSS_AUTO) {
    switch (documents->kind) {
    case EGI_DOCUMENTS_TOKENS:
      EG_TRY(choose_of_tokens(graph, inputs, objective));
      break;
    case EGI_DOCUMENTS_CLASS:
    case EGI_DOCUMENTS_NUMBERS:
      objective->loss = choose_of_numbers(graph, documents);
      break;
    case EGI_DOCUMENTS_MATCHES:
      objective->loss = EG_LOSS_RANKING;
      break;
    case EGI_DOCUMENTS_SCORES:
      objective->loss = EG_LOSS_COSINE;
      break;
    }
  }
  if (documents->is_first != NULL && inputs->fixed_batch > 0)
    return egi_fail(graph->module->ctx, EG_ERROR_UNSUPPORTED,
                    "the model prescribes batches of %u rows: examples of several documents need a free batch",
                    inputs->fixed_batch);
  egi_log(graph->module->ctx, EG_LOG_INFO, "loss: %s", loss_names[objective->loss]);
  return EG_OK;
}

/* ---- limits ----------------------------------------------------------------------------------------------------- */

eg_status egi_vocabulary_find(const egi_graph *graph, const egi_inputs *inputs, eg_loss loss,
                              egi_vocabulary *out_vocabulary) {
  egi_value_id logits = 0;
  *out_vocabulary = (egi_vocabulary){
      .loss = loss, .n_embeddings = egi_embedding_count(graph, inputs), .n_types = egi_types_count(graph, inputs)};
  if (loss == EG_LOSS_RANKING || loss == EG_LOSS_COSINE) return EG_OK;
  if (egi_loss_is_of_documents(loss)) {
    logits = egi_find_document_logits(graph);
    if (logits == 0)
      return egi_fail(graph->module->ctx, EG_ERROR_DATA,
                      "the model has no output \"logits\" [batch, classes], which a \"label\" of each document needs");
    out_vocabulary->n_logits = graph->values[logits].rank == 1 ? 1 : last_size(graph, logits);
    return EG_OK;
  }
  EG_TRY(egi_find_logits(graph, &logits));
  out_vocabulary->n_logits = last_size(graph, logits);
  return EG_OK;
}

static eg_status check_types(eg_context *ctx, const egi_vocabulary *v, const egi_documents *documents) {
  if (documents->token_types == NULL || v->n_types == 0) return EG_OK;
  for (size_t d = 0; d < documents->n_documents; d++)
    for (uint64_t first = documents->offsets[d], i = first; i < documents->offsets[d + 1]; i++)
      if (documents->token_types[i] >= v->n_types)
        return egi_fail(ctx, EG_ERROR_DATA, "%s: document %zu, position %llu: token type %d is outside the %lld types",
                        documents->path, d + 1, (unsigned long long)(i - first + 1), documents->token_types[i],
                        (long long)v->n_types);
  return EG_OK;
}

/* Tokens, and labels of tokens where these count. */
static eg_status check_tokens(eg_context *ctx, const egi_vocabulary *v, const egi_documents *documents) {
  bool is_next = !egi_loss_is_of_documents(v->loss) && v->loss != EG_LOSS_TOKEN, is_own = v->loss == EG_LOSS_TOKEN;
  int64_t n_tokens = v->n_embeddings > 0 ? v->n_embeddings : INT64_MAX;
  int64_t n_labels = v->n_logits > 0 ? v->n_logits : INT64_MAX;
  for (size_t d = 0; d < documents->n_documents; d++)
    for (uint64_t first = documents->offsets[d], i = first; i < documents->offsets[d + 1]; i++) {
      bool is_token = documents->tokens[i] >= n_tokens, has_label = is_own || (is_next && i > first);
      if (!is_token && (!has_label || documents->labels[i] < n_labels)) continue;
      return egi_fail(ctx, EG_ERROR_DATA, "%s: document %zu, position %llu: %s %d is outside the %s of %lld",
                      documents->path, d + 1, (unsigned long long)(i - first + 1), is_token ? "token" : "label",
                      is_token ? documents->tokens[i] : documents->labels[i],
                      is_token || is_next || n_labels == v->n_embeddings ? "vocabulary" : "classes",
                      (long long)(is_token ? n_tokens : n_labels));
    }
  if (is_own && documents->n_labelled < documents->n_documents)
    return egi_fail(ctx, EG_ERROR_DATA,
                    "%s: a token of this model sees those behind it: each line needs \"labels\", -100 where nothing is "
                    "to be learned",
                    documents->path);
  return EG_OK;
}

static eg_status check_numbers(eg_context *ctx, const egi_vocabulary *v, const egi_documents *documents) {
  bool is_class = v->loss == EG_LOSS_CLASSIFICATION, is_chance = v->loss == EG_LOSS_MULTI_LABEL;
  if (documents->n_numbers == 0 || documents->is_first != NULL)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: the lines have no \"label\"", documents->path);
  if (is_class && documents->kind != EGI_DOCUMENTS_CLASS)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: a class is one whole number, the lines have others as \"label\"",
                    documents->path);
  if (v->loss == EG_LOSS_REGRESSION && documents->n_numbers == 1 && v->n_logits > 1)
    return egi_fail(ctx, EG_ERROR_DATA,
                    "%s: the model gives %lld numbers: \"label\" has to be as many, or the whole number of a class "
                    "(1, not 1.0) in every line",
                    documents->path, (long long)v->n_logits);
  if (!is_class && v->n_logits > 0 && documents->n_numbers != v->n_logits)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: \"label\" has %u numbers, the model gives %lld", documents->path,
                    documents->n_numbers, (long long)v->n_logits);
  for (size_t i = 0; i < documents->n_documents * documents->n_numbers && (is_class || is_chance); i++) {
    double number = (double)documents->numbers[i], limit = is_chance ? 1.0 : (double)v->n_logits - 1.0;
    if (number >= 0.0 && (number <= limit || (is_class && v->n_logits == 0))) continue;
    size_t document = i / documents->n_numbers + 1;
    if (is_chance)
      return egi_fail(ctx, EG_ERROR_DATA, "%s: document %zu: label %g is not in 0 … 1", documents->path, document,
                      number);
    return egi_fail(ctx, EG_ERROR_DATA, "%s: document %zu: label %g is outside the %lld classes", documents->path,
                    document, number, (long long)v->n_logits);
  }
  return EG_OK;
}

eg_status egi_vocabulary_check(eg_context *ctx, const egi_vocabulary *vocabulary, const egi_documents *documents) {
  bool is_of_several = vocabulary->loss == EG_LOSS_RANKING || vocabulary->loss == EG_LOSS_COSINE;
  if (vocabulary->loss == EG_LOSS_RANKING && documents->kind != EGI_DOCUMENTS_MATCHES)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: the lines have no \"anchor\" and \"positive\"", documents->path);
  if (vocabulary->loss == EG_LOSS_COSINE && documents->kind != EGI_DOCUMENTS_SCORES)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: the lines have no \"sentence1\", \"sentence2\" and \"score\"",
                    documents->path);
  if (documents->is_first != NULL && !is_of_several)
    return egi_fail(ctx, EG_ERROR_DATA, "%s: examples of several documents have no labels", documents->path);
  EG_TRY(check_tokens(ctx, vocabulary, documents));
  EG_TRY(check_types(ctx, vocabulary, documents));
  bool has_numbers = egi_loss_is_of_documents(vocabulary->loss) && !is_of_several;
  return has_numbers ? check_numbers(ctx, vocabulary, documents) : EG_OK;
}
