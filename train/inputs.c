/* What the inputs of a graph are for, by name, and which sizes their symbols have. */
#include "train/train.h"

#include <string.h>

typedef struct role_row {
  const char *name;
  egi_feed role;
} role_row;

/* Names that the adapt stage gives; those of exporters stand in passes/inputs.def. */
static const role_row role_rows[] = {{EGI_INPUT_LABELS, EGI_FEED_LABELS},
                                     {EGI_INPUT_OFFSETS, EGI_FEED_OFFSETS},
                                     {EGI_INPUT_REAL, EGI_FEED_REAL},
                                     {EGI_INPUT_CLASSES, EGI_FEED_CLASSES},
                                     {EGI_INPUT_TOKEN_LABELS, EGI_FEED_TOKEN_LABELS},
                                     {EGI_INPUT_NUMBERS, EGI_FEED_NUMBERS},
                                     {EGI_INPUT_ROW_WEIGHTS, EGI_FEED_ROW_WEIGHTS},
                                     {EGI_INPUT_POOLING, EGI_FEED_POOLING},
                                     {EGI_INPUT_MATCHES, EGI_FEED_MATCHES},
                                     {EGI_INPUT_PARTNERS, EGI_FEED_PARTNERS},
                                     {EGI_INPUT_CANDIDATES, EGI_FEED_CANDIDATES}};
static const egi_feed kind_roles[] = {[EGI_INPUT_OTHER] = EGI_FEED_OTHER,
                                      [EGI_INPUT_TOKENS] = EGI_FEED_INPUT_IDS,
                                      [EGI_INPUT_MASK] = EGI_FEED_ATTENTION_MASK,
                                      [EGI_INPUT_POSITIONS] = EGI_FEED_POSITION_IDS,
                                      [EGI_INPUT_TOKEN_TYPES] = EGI_FEED_TOKEN_TYPES};

static const egi_value *input_value(const egi_graph *graph, uint32_t input) {
  return &graph->values[graph->inputs[input]];
}

static bool is_whole(eg_dtype dtype) {
  return dtype == EG_DTYPE_I64 || dtype == EG_DTYPE_I32;
}

static bool is_cache(const egi_value *value) {
  return value->rank >= 3 && egi_dtype_is_float(value->dtype) && strstr(value->name, "past") != NULL;
}

/* A name alone is not enough: type and rank must be what the role is filled with. */
static bool fits(egi_feed role, const egi_value *value) {
  switch (role) {
  case EGI_FEED_INPUT_IDS:
  case EGI_FEED_LABELS:
  case EGI_FEED_TOKEN_LABELS:
  case EGI_FEED_TOKEN_TYPES:
    return is_whole(value->dtype) && value->rank == 2;
  case EGI_FEED_CLASSES:
  case EGI_FEED_MATCHES:
  case EGI_FEED_PARTNERS:
    return value->dtype == EG_DTYPE_I64 && value->rank == 1;
  case EGI_FEED_ROW_WEIGHTS:
  case EGI_FEED_CANDIDATES:
    return value->dtype == EG_DTYPE_F32 && value->rank == 1;
  case EGI_FEED_NUMBERS:
  case EGI_FEED_POOLING:
  case EGI_FEED_REAL:
    return value->dtype == EG_DTYPE_F32 && value->rank == 2;
  case EGI_FEED_ATTENTION_MASK:
    return (is_whole(value->dtype) || value->dtype == EG_DTYPE_BOOL || value->dtype == EG_DTYPE_F32) &&
           value->rank == 2;
  case EGI_FEED_POSITION_IDS:
    return is_whole(value->dtype) && (value->rank == 2 || value->rank == 1);
  case EGI_FEED_OFFSETS:
    return value->dtype == EG_DTYPE_I32 && value->rank == 1;
  case EGI_FEED_CACHE:
  case EGI_FEED_OTHER:
    break;
  }
  return false;
}

static egi_feed role_of(const egi_value *value) {
  if (is_cache(value)) return EGI_FEED_CACHE;
  for (size_t i = 0; i < EGI_COUNT(role_rows); i++)
    if (strcmp(role_rows[i].name, value->name) == 0 && fits(role_rows[i].role, value)) return role_rows[i].role;
  egi_feed role = kind_roles[egi_input_kind_of(value->name)];
  return fits(role, value) ? role : EGI_FEED_OTHER;
}

/* An input under another name is the tokens when it is the only integer matrix without a role, or the only one that
 * indexes a table. */
static bool find_ids(const egi_graph *graph, egi_feed *roles, uint32_t *out_ids) {
  uint32_t n_candidates = 0, candidate = 0;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    if (roles[i] == EGI_FEED_INPUT_IDS) {
      *out_ids = i;
      return true;
    }
    if (roles[i] != EGI_FEED_OTHER || !fits(EGI_FEED_INPUT_IDS, input_value(graph, i))) continue;
    n_candidates++;
    candidate = i;
  }
  egi_value_id tokens;
  if (n_candidates == 0) return false;
  if (n_candidates > 1) {
    if (egi_find_token_input(graph, &tokens) != EG_OK) return false;
    candidate = graph->values[tokens].index;
  }
  roles[candidate] = EGI_FEED_INPUT_IDS;
  *out_ids = candidate;
  return true;
}

/* 0 for a symbol. */
static eg_status fixed_size(const egi_graph *graph, uint32_t input, int axis, uint32_t *out_size) {
  const egi_value *value = input_value(graph, input);
  egi_dims *dims = graph->module->dims;
  int64_t size;
  *out_size = 0;
  if (!egi_dim_value(dims, egi_dim_resolve(dims, value->dims[axis]), &size)) return EG_OK;
  if (size < 1 || size > UINT32_MAX)
    return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "input \"%s\": dimension %d is %lld", value->name, axis,
                    (long long)size);
  *out_size = (uint32_t)size;
  return EG_OK;
}

/* Models that look for the end of each document in its tokens compare them with the one that they are padded with. */
static int32_t find_padding(const egi_graph *graph, egi_value_id ids) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    double number = 0;
    if (node->op != EGI_OP_Equal || (node->inputs[0] != ids && node->inputs[1] != ids)) continue;
    egi_value_id other = node->inputs[node->inputs[0] == ids ? 1 : 0];
    if (egi_value_scalar(graph, other, &number) && number >= 0 && number <= INT32_MAX) return (int32_t)number;
  }
  return -1;
}

eg_status egi_inputs_find(const egi_graph *graph, egi_arena *arena, egi_inputs *out_inputs) {
  egi_feed *roles = EGI_NEW(arena, egi_feed, graph->n_inputs > 0 ? graph->n_inputs : 1);
  if (roles == NULL) return EG_ERROR_MEMORY;
  egi_inputs inputs = {.graph = graph, .roles = roles, .padding = -1};
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    roles[i] = role_of(input_value(graph, i));
    inputs.is_packed = inputs.is_packed || roles[i] == EGI_FEED_OFFSETS;
    if (roles[i] == EGI_FEED_TOKEN_LABELS) inputs.unit = EGI_UNIT_TOKEN;
    if (egi_feed_is_of_documents(roles[i])) inputs.unit = EGI_UNIT_EXAMPLE;
  }
  if (!find_ids(graph, roles, &inputs.ids))
    return egi_fail(graph->module->ctx, EG_ERROR_UNSUPPORTED,
                    "the model has no input \"input_ids\" of type int64 or int32 [batch, sequence]");
  EG_TRY(fixed_size(graph, inputs.ids, 0, &inputs.fixed_batch));
  EG_TRY(fixed_size(graph, inputs.ids, 1, &inputs.fixed_sequence));
  if (inputs.unit == EGI_UNIT_EXAMPLE) inputs.padding = find_padding(graph, graph->inputs[inputs.ids]);
  *out_inputs = inputs;
  return EG_OK;
}

eg_status egi_inputs_check(const egi_inputs *inputs) {
  const egi_graph *graph = inputs->graph;
  eg_context *ctx = graph->module->ctx;
  egi_text text;
  unsigned n = 0;
  egi_text_init(&text, ctx);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    if (inputs->roles[i] != EGI_FEED_OTHER) continue;
    egi_text_format(&text, "%s\"%s\" ", n++ > 0 ? ", " : "", input_value(graph, i)->name);
    egi_value_print_type(graph, graph->inputs[i], &text);
  }
  eg_status status = egi_text_status(&text);
  if (status == EG_OK && n > 0)
    status =
        egi_fail(ctx, EG_ERROR_UNSUPPORTED, "no values are known for the model's input %s", egi_text_string(&text));
  egi_text_free(&text);
  return status;
}

/* ---- sizes ---- */

eg_status egi_binder_begin(egi_binder *binder, const egi_graph *graph, egi_arena *arena) {
  const egi_dims *dims = graph->module->dims;
  size_t n = egi_dims_symbol_count(dims);
  binder->graph = graph;
  binder->past = 0;
  binder->n = n;
  binder->bindings = EGI_NEW(arena, egi_binding, n + 1);
  binder->is_bound = EGI_NEW(arena, bool, n + 1);
  if (binder->bindings == NULL || binder->is_bound == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n; i++) {
    const char *name;
    binder->bindings[i].symbol = egi_dims_symbol_at(dims, i, &name);
  }
  return EG_OK;
}

static eg_status fail_size(const egi_binder *binder, uint32_t input, int axis, int64_t size, const char *reason) {
  egi_text text;
  egi_text_init(&text, binder->graph->module->ctx);
  egi_value_print_type(binder->graph, binder->graph->inputs[input], &text);
  eg_status status =
      egi_fail(binder->graph->module->ctx, EG_ERROR_SHAPE, "input \"%s\" %s: dimension %d cannot be %lld: %s",
               input_value(binder->graph, input)->name, egi_text_string(&text), axis, (long long)size, reason);
  egi_text_free(&text);
  return status;
}

static bool bind_symbol(egi_binder *binder, egi_dim symbol, int64_t size, bool *out_is_symbol) {
  for (size_t i = 0; i < binder->n; i++) {
    if (binder->bindings[i].symbol != symbol) continue;
    *out_is_symbol = true;
    if (binder->is_bound[i] && binder->bindings[i].value != size) return false;
    binder->bindings[i].value = size;
    binder->is_bound[i] = true;
  }
  return true;
}

eg_status egi_binder_assign(egi_binder *binder, uint32_t input, int axis, int64_t size) {
  egi_dims *dims = binder->graph->module->dims;
  egi_dim dim = input_value(binder->graph, input)->dims[axis];
  egi_dim resolved = egi_dim_resolve(dims, dim);
  int64_t known;
  bool is_symbol = false;
  if (egi_dim_value(dims, resolved, &known)) {
    if (known != size) return fail_size(binder, input, axis, size, "the model prescribes another size");
    size = known;
  }
  if (!bind_symbol(binder, dim, size, &is_symbol) || !bind_symbol(binder, resolved, size, &is_symbol))
    return fail_size(binder, input, axis, size, "another input says otherwise");
  return EG_OK;
}

static bool is_bound(const egi_binder *binder, uint32_t input, int axis) {
  egi_dim dim = input_value(binder->graph, input)->dims[axis];
  for (size_t i = 0; i < binder->n; i++)
    if (binder->bindings[i].symbol == dim) return binder->is_bound[i];
  return true;
}

/* The first free dimension behind the batch is the length of the cache: the caller's, or that of the caches given. */
static eg_status bind_cache(egi_binder *binder, uint32_t input, uint32_t batch) {
  const egi_value *value = input_value(binder->graph, input);
  bool is_empty = false;
  if (!is_bound(binder, input, 0)) EG_TRY(egi_binder_assign(binder, input, 0, batch));
  for (int axis = 1; axis < value->rank; axis++) {
    int64_t size;
    bool is_known = egi_dim_evaluate(binder->graph->module->dims, value->dims[axis], binder->bindings, 0, &size);
    if (is_known || is_empty) continue;
    if (!is_bound(binder, input, axis)) EG_TRY(egi_binder_assign(binder, input, axis, binder->past));
    is_empty = true;
  }
  return EG_OK;
}

static eg_status bind_role(egi_binder *binder, const egi_inputs *inputs, uint32_t input, const egi_bucket *bucket) {
  const egi_value *value = input_value(binder->graph, input);
  int64_t size;
  switch (inputs->roles[input]) {
  case EGI_FEED_INPUT_IDS:
  case EGI_FEED_LABELS:
  case EGI_FEED_TOKEN_LABELS:
  case EGI_FEED_TOKEN_TYPES:
  case EGI_FEED_POOLING:
  case EGI_FEED_REAL:
  case EGI_FEED_ATTENTION_MASK:
    EG_TRY(egi_binder_assign(binder, input, 0, bucket->batch));
    size = inputs->roles[input] == EGI_FEED_ATTENTION_MASK ? binder->past : 0;
    return egi_binder_assign(binder, input, 1, bucket->sequence + size);
  case EGI_FEED_POSITION_IDS:
    if (value->rank == 2 && !(egi_dim_value(binder->graph->module->dims, value->dims[0], &size) && size == 1))
      EG_TRY(egi_binder_assign(binder, input, 0, bucket->batch));
    return egi_binder_assign(binder, input, value->rank - 1, bucket->sequence);
  case EGI_FEED_CACHE:
    return bind_cache(binder, input, bucket->batch);
  case EGI_FEED_CLASSES:
  case EGI_FEED_NUMBERS:
  case EGI_FEED_ROW_WEIGHTS:
  case EGI_FEED_MATCHES:
  case EGI_FEED_CANDIDATES:
  case EGI_FEED_PARTNERS:
    return egi_binder_assign(binder, input, 0, bucket->batch);
  case EGI_FEED_OFFSETS: /* room for documents of one token, where nobody gave them */
    if (is_bound(binder, input, 0)) return EG_OK;
    return egi_binder_assign(binder, input, 0, (int64_t)bucket->sequence + 1);
  case EGI_FEED_OTHER:
    break;
  }
  return EG_OK;
}

eg_status egi_binder_finish(egi_binder *binder, const egi_inputs *inputs, const egi_bucket *bucket) {
  const egi_graph *graph = binder->graph;
  for (uint32_t i = 0; i < graph->n_inputs && inputs->roles != NULL; i++) EG_TRY(bind_role(binder, inputs, i, bucket));
  for (uint32_t i = 0; i < graph->n_inputs; i++)
    for (int axis = 0; axis < input_value(graph, i)->rank; axis++) {
      int64_t size;
      if (is_bound(binder, i, axis)) continue;
      if (egi_dim_evaluate(graph->module->dims, input_value(graph, i)->dims[axis], binder->bindings, 0, &size))
        continue;
      return egi_fail(graph->module->ctx, EG_ERROR_SHAPE, "input \"%s\": the size of dimension %d is not known",
                      input_value(graph, i)->name, axis);
    }
  size_t n = 0;
  for (size_t i = 0; i < binder->n; i++)
    if (binder->is_bound[i]) binder->bindings[n++] = binder->bindings[i];
  binder->n = n;
  return EG_OK;
}
