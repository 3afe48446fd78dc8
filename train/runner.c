/* Runners: the graph of a model with or without an adapter, run once on the caller's tensors. Missing masks, positions
 * and caches are made. */
#include "train/train.h"

#include <string.h>

eg_status egi_runner_create(eg_model *model, const eg_runner_options *options, eg_runner **out_runner) {
  eg_runner *runner = egi_allocate(model->ctx, EGI_PURPOSE_DATA, sizeof *runner);
  if (runner == NULL) return EG_ERROR_MEMORY;
  memset(runner, 0, sizeof *runner);
  runner->ctx = model->ctx;
  runner->model = model;
  egi_context_retain(model->ctx);
  egi_model_retain(model);
  egi_arena_init(&runner->arena, model->ctx, EGI_PURPOSE_DATA);
  egi_arena_init(&runner->run_arena, model->ctx, EGI_PURPOSE_DATA);
  eg_status status = egi_runner_prepare(runner, options);
  if (status != EG_OK) {
    egi_runner_destroy(runner);
    return status;
  }
  *out_runner = runner;
  return EG_OK;
}

static void close_run(eg_runner *runner) {
  egi_session_destroy(runner->session);
  egi_plan_destroy(runner->plan);
  runner->session = NULL;
  runner->plan = NULL;
  egi_arena_clear(&runner->run_arena);
}

void egi_runner_destroy(eg_runner *runner) {
  if (runner == NULL) return;
  eg_context *ctx = runner->ctx;
  close_run(runner);
  egi_machine_close(&runner->machine);
  egi_machine_close(&runner->packed);
  egi_machine_close(&runner->decoder);
  egi_machine_close(&runner->general);
  egi_arena_clear(&runner->arena);
  egi_model_release(runner->model);
  egi_release(ctx, EGI_PURPOSE_DATA, runner, sizeof *runner);
  egi_context_release(ctx);
}

eg_context *egi_runner_context(const eg_runner *runner) {
  return runner->ctx;
}

int64_t egi_logits_count(const egi_graph *graph) {
  egi_value_id logits;
  int64_t size;
  if (egi_find_logits(graph, &logits) != EG_OK) return 0;
  const egi_value *value = &graph->values[logits];
  egi_dims *dims = graph->module->dims;
  if (value->rank < 1 || !egi_dim_value(dims, egi_dim_resolve(dims, value->dims[value->rank - 1]), &size)) return 0;
  return size;
}

/* ---- one run ---- */

typedef struct call {
  eg_runner *runner;
  egi_machine *machine;
  const eg_tensor *inputs;
  size_t n_inputs;
  egi_inputs roles; /* roles NULL: not a language model, nothing can be made */
  egi_bucket bucket;
  int64_t past;                /* tokens in the caches that are given */
  const eg_tensor *packed_row; /* positions of the documents of a packed row, or NULL */
} call;

static const egi_value *graph_input(const call *c, uint32_t index) {
  const egi_graph *graph = c->machine->graph;
  return &graph->values[graph->inputs[index]];
}

static const eg_tensor *find_tensor(const call *c, uint32_t index) {
  for (size_t i = 0; i < c->n_inputs; i++)
    if (strcmp(c->inputs[i].name, graph_input(c, index)->name) == 0) return &c->inputs[i];
  return NULL;
}

static bool is_convertible(eg_dtype from, eg_dtype to) {
  return from == to || (egi_is_whole_type(from) && egi_is_whole_type(to));
}

static eg_status check_tensor(const call *c, uint32_t index, const eg_tensor *tensor) {
  const egi_value *value = graph_input(c, index);
  if (!is_convertible(tensor->dtype, value->dtype))
    return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input \"%s\" has type %s, the model takes %s", value->name,
                    egi_dtype_name(tensor->dtype), egi_dtype_name(value->dtype));
  if (tensor->rank > EGI_MAX_RANK || (int)tensor->rank != value->rank)
    return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input \"%s\" has %u dimensions, the model takes %d",
                    value->name, tensor->rank, value->rank);
  for (uint32_t axis = 0; axis < tensor->rank; axis++)
    if (tensor->dims[axis] < 0 || (tensor->dims[axis] > 0 && tensor->data == NULL))
      return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input \"%s\" has no data or a negative dimension",
                      value->name);
  return EG_OK;
}

/* Every input is given or can be made; others that are given are named in a warning. */
static eg_status check_inputs(const call *c) {
  const egi_graph *graph = c->machine->graph;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(c, i);
    egi_feed role = c->roles.roles != NULL ? c->roles.roles[i] : EGI_FEED_OTHER;
    bool is_made = role == EGI_FEED_ATTENTION_MASK || role == EGI_FEED_POSITION_IDS || role == EGI_FEED_CACHE ||
                   role == EGI_FEED_OFFSETS;
    if (tensor != NULL) EG_TRY(check_tensor(c, i, tensor));
    if (tensor == NULL && !is_made)
      return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input \"%s\" is missing", graph_input(c, i)->name);
  }
  for (size_t i = 0; i < c->n_inputs; i++) {
    bool is_known = &c->inputs[i] == c->packed_row;
    for (uint32_t k = 0; k < graph->n_inputs; k++)
      is_known = is_known || strcmp(graph_input(c, k)->name, c->inputs[i].name) == 0;
    if (!is_known)
      egi_log(c->runner->ctx, EG_LOG_WARNING, "the model has no input \"%s\": it is ignored", c->inputs[i].name);
  }
  return EG_OK;
}

/* Sizes of the given inputs, then of those that are made. */
static eg_status bind_sizes(const call *c, egi_binder *binder) {
  const egi_graph *graph = c->machine->graph;
  EG_TRY(egi_binder_begin(binder, graph, &c->runner->run_arena));
  binder->past = c->past;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(c, i);
    for (int axis = 0; tensor != NULL && axis < (int)tensor->rank; axis++)
      EG_TRY(egi_binder_assign(binder, i, axis, tensor->dims[axis]));
  }
  return egi_binder_finish(binder, &c->roles, &c->bucket);
}

static eg_status make_session(const call *c, bool *out_is_eager) {
  eg_runner *runner = c->runner;
  egi_binder binder;
  EG_TRY(bind_sizes(c, &binder));
  bool is_dynamic = false;
  egi_plan_options options = {.bindings = binder.bindings, .n_bindings = binder.n, .out_is_dynamic = &is_dynamic};
  eg_status status = egi_plan_create(runner->ctx, c->machine->graph, c->machine->backend, &options, &runner->plan);
  if (status != EG_OK && is_dynamic && c->machine->backend->is_host) {
    *out_is_eager = true;
    return EG_OK;
  }
  EG_TRY(status);
  return egi_session_create(c->machine->store, runner->plan, c->machine->scratch, &runner->session);
}

/* ---- filling ---- */

static uint64_t count_tensor(const eg_tensor *tensor) {
  uint64_t count = 1;
  for (uint32_t i = 0; i < tensor->rank; i++) count *= (uint64_t)tensor->dims[i];
  return count;
}

/* The caller's bytes, or a copy in the type that the graph takes. */
static eg_status convert_given(const call *c, uint32_t index, const eg_tensor *tensor, const void **out_data,
                               uint64_t *out_size_bytes) {
  eg_dtype dtype = graph_input(c, index)->dtype;
  uint64_t count = count_tensor(tensor), size_bytes;
  if (!egi_dtype_bytes(dtype, count, &size_bytes))
    return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input too large");
  *out_size_bytes = size_bytes;
  *out_data = tensor->data;
  if (dtype == tensor->dtype) return EG_OK;
  void *copy = egi_arena_get(&c->runner->run_arena, (size_t)count, size_bytes > 0 ? (size_t)(size_bytes / count) : 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  *out_data = copy;
  return egi_convert_whole(c->runner->ctx, tensor, count, dtype, copy);
}

static eg_status set_given(const call *c, uint32_t index, const eg_tensor *tensor) {
  const void *data;
  uint64_t size_bytes;
  EG_TRY(convert_given(c, index, tensor, &data, &size_bytes));
  return egi_session_set_input(c->runner->session, index, data, (size_t)size_bytes);
}

/* The first input of that role that is given. */
static const eg_tensor *find_given(const call *c, egi_feed role) {
  for (uint32_t i = 0; i < c->machine->graph->n_inputs; i++)
    if (c->roles.roles[i] == role && find_tensor(c, i) != NULL) return find_tensor(c, i);
  return NULL;
}

/* A mask of ones, or positions. */
static eg_status make_numbers(const call *c, uint32_t index, int64_t **out_numbers, size_t *out_count) {
  const eg_tensor *positions = find_given(c, EGI_FEED_POSITION_IDS);
  bool is_mask = c->roles.roles[index] == EGI_FEED_ATTENTION_MASK;
  egi_making making = {c->bucket.batch, c->bucket.sequence, (uint64_t)c->past, find_given(c, EGI_FEED_ATTENTION_MASK)};
  uint64_t n_rows = egi_input_rows(c->machine->graph, graph_input(c, index), c->bucket.batch);
  uint64_t count = n_rows * (making.sequence + (is_mask ? making.past : 0));
  int64_t *numbers = EGI_NEW(&c->runner->run_arena, int64_t, count > 0 ? (size_t)count : 1);
  if (numbers == NULL) return EG_ERROR_MEMORY;
  if (is_mask && positions != NULL && positions->rank == 2) EG_TRY(egi_check_positions(c->runner->ctx, positions));
  bool is_type = c->roles.roles[index] == EGI_FEED_TOKEN_TYPES;
  if (!is_mask && !is_type) egi_make_positions(&making, n_rows, numbers);
  for (uint64_t i = 0; is_mask && i < count; i++) numbers[i] = 1;
  *out_numbers = numbers;
  *out_count = (size_t)count;
  return EG_OK;
}

/* Where the documents of a packed row begin. */
static eg_status make_offsets(const call *c, int64_t **out_numbers, size_t *out_count) {
  *out_count = (size_t)c->packed_row->dims[1] + 1;
  *out_numbers = EGI_NEW(&c->runner->run_arena, int64_t, *out_count);
  if (*out_numbers == NULL) return EG_ERROR_MEMORY;
  egi_packed_offsets(c->packed_row, *out_numbers);
  return EG_OK;
}

static eg_status set_made(const call *c, uint32_t index) {
  int64_t *numbers;
  size_t count;
  if (c->roles.roles[index] == EGI_FEED_CACHE) return EG_OK;
  if (c->roles.roles[index] == EGI_FEED_OFFSETS)
    EG_TRY(make_offsets(c, &numbers, &count));
  else
    EG_TRY(make_numbers(c, index, &numbers, &count));
  void *bytes = EGI_NEW(&c->runner->run_arena, int64_t, count > 0 ? count : 1);
  if (bytes == NULL) return EG_ERROR_MEMORY;
  size_t size_bytes = egi_numbers_convert(numbers, count, graph_input(c, index)->dtype, bytes);
  return egi_session_set_input(c->runner->session, index, bytes, size_bytes);
}

/* ---- outputs ---- */

static eg_status make_outputs(const call *c, eg_tensor **out_outputs) {
  uint32_t n_outputs = c->machine->graph->n_outputs;
  *out_outputs = EGI_NEW(&c->runner->run_arena, eg_tensor, n_outputs > 0 ? n_outputs : 1);
  return *out_outputs != NULL ? EG_OK : EG_ERROR_MEMORY;
}

static void set_output(const call *c, uint32_t index, const egi_tensor *tensor, const void *data, eg_tensor *out) {
  const egi_graph *graph = c->machine->graph;
  *out = (eg_tensor){.name = graph->values[graph->outputs[index]].name,
                     .dtype = tensor->dtype,
                     .rank = (uint32_t)tensor->rank,
                     .data = data};
  memcpy(out->dims, tensor->dims, sizeof tensor->dims);
}

static eg_status read_outputs(const call *c, const eg_tensor **out_outputs, size_t *out_count) {
  const egi_graph *graph = c->machine->graph;
  egi_arena *arena = &c->runner->run_arena;
  eg_tensor *outputs;
  EG_TRY(make_outputs(c, &outputs));
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_tensor tensor;
    uint64_t size_bytes;
    EG_TRY(egi_session_output(c->runner->session, i, &tensor));
    if (!egi_dtype_bytes(tensor.dtype, (uint64_t)egi_tensor_count(&tensor), &size_bytes)) return EG_ERROR_MEMORY;
    void *data = egi_arena_get(arena, 1, size_bytes > 0 ? (size_t)size_bytes : 1);
    if (data == NULL) return EG_ERROR_MEMORY;
    EG_TRY(egi_session_read_output(c->runner->session, i, data, (size_t)size_bytes));
    set_output(c, i, &tensor, data, &outputs[i]);
  }
  *out_outputs = outputs;
  *out_count = graph->n_outputs;
  return EG_OK;
}

/* Without a plan: every input is given, nothing is made. */
static eg_status run_eagerly(const call *c, const eg_tensor **out_outputs, size_t *out_count) {
  const egi_graph *graph = c->machine->graph;
  egi_arena *arena = &c->runner->run_arena;
  egi_tensor *inputs = EGI_NEW(arena, egi_tensor, (size_t)graph->n_inputs + 1);
  egi_tensor *results = EGI_NEW(arena, egi_tensor, (size_t)graph->n_outputs + 1);
  eg_tensor *outputs;
  if (inputs == NULL || results == NULL) return EG_ERROR_MEMORY;
  EG_TRY(make_outputs(c, &outputs));
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(c, i);
    const void *data;
    uint64_t size_bytes;
    if (tensor == NULL)
      return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT,
                      "input \"%s\" is missing, and cannot be made: shapes of this model depend on data",
                      graph_input(c, i)->name);
    EG_TRY(convert_given(c, i, tensor, &data, &size_bytes));
    inputs[i] = (egi_tensor){.data = (void *)(uintptr_t)data, /* only read */
                             .dtype = graph_input(c, i)->dtype,
                             .rank = (int)tensor->rank};
    memcpy(inputs[i].dims, tensor->dims, sizeof inputs[i].dims);
    egi_tensor_set_contiguous(&inputs[i]);
  }
  EG_TRY(egi_eager_run(c->machine->store, graph, inputs, arena, results));
  for (uint32_t i = 0; i < graph->n_outputs; i++) set_output(c, i, &results[i], results[i].data, &outputs[i]);
  *out_outputs = outputs;
  *out_count = graph->n_outputs;
  return EG_OK;
}

/* Batch and sequence of input_ids, when the graph has such an input and it is given; length of the caches. */
static eg_status find_roles(call *c) {
  const egi_graph *graph = c->machine->graph;
  egi_inputs roles;
  if (egi_inputs_find(graph, &c->runner->run_arena, &roles) != EG_OK) {
    c->roles.graph = graph;
    return EG_OK;
  }
  c->roles = roles;
  for (uint32_t i = 0; i < graph->n_inputs && c->past == 0; i++)
    if (roles.roles[i] == EGI_FEED_CACHE && find_tensor(c, i) != NULL)
      c->past = egi_cache_length(graph, i, find_tensor(c, i));
  if (c->past > UINT32_MAX)
    return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "a cache of %lld tokens", (long long)c->past);
  const eg_tensor *ids = find_tensor(c, roles.ids);
  if (ids == NULL || ids->rank != 2) return EG_OK;
  if (ids->dims[0] < 1 || ids->dims[1] < 1 || ids->dims[0] > UINT32_MAX || ids->dims[1] > UINT32_MAX)
    return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input \"%s\" holds no tokens", ids->name);
  c->bucket = (egi_bucket){(uint32_t)ids->dims[0], (uint32_t)ids->dims[1]};
  return EG_OK;
}

eg_status egi_runner_run(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs, const eg_tensor **out_outputs,
                         size_t *out_count) {
  call c = {.runner = runner, .inputs = inputs, .n_inputs = n_inputs};
  close_run(runner);
  EG_TRY(egi_runner_choose(runner, inputs, n_inputs, &c.machine));
  if (c.machine == &runner->packed) c.packed_row = egi_runner_packed_row(runner, inputs, n_inputs);
  EG_TRY(find_roles(&c));
  EG_TRY(check_inputs(&c));
  if (c.packed_row != NULL && (c.bucket.batch != 1 || c.bucket.sequence != c.packed_row->dims[1]))
    return egi_fail(runner->ctx, EG_ERROR_SHAPE, "input \"%s\" does not have a position for each token",
                    c.packed_row->name);
  bool is_eager = false;
  EG_TRY(make_session(&c, &is_eager));
  if (is_eager) return run_eagerly(&c, out_outputs, out_count);
  for (uint32_t i = 0; i < c.machine->graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(&c, i);
    EG_TRY(tensor != NULL ? set_given(&c, i, tensor) : set_made(&c, i));
  }
  EG_TRY(egi_session_run(runner->session));
  return read_outputs(&c, out_outputs, out_count);
}
