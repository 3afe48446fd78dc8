/* Runners: the graph of a model with or without an adapter, run once on the caller's tensors. Missing masks, positions
 * and caches are made. */
#include "train/train.h"

#include <string.h>

static eg_status adapt(eg_runner *runner, const egi_peft *peft) {
  static const char *const names[] = {"graft_adapters", "eliminate_common", "eliminate_dead"};
  egi_machine *machine = &runner->machine;
  egi_adapters adapters = {.count = 0};
  if (peft != NULL) EG_TRY(egi_adapters_from_peft(machine->graph, peft, &runner->arena, &adapters));
  egi_adapt_options options = {.adapters = adapters.targets, .n_adapters = adapters.count, .is_frozen = true};
  if (peft != NULL) EG_TRY(egi_run_passes(machine->graph, names, EGI_COUNT(names), &options));
  EG_TRY(egi_machine_allocate(machine));
  return peft != NULL ? egi_adapters_load(machine, peft) : EG_OK;
}

static eg_status fill(eg_runner *runner, const eg_runner_options *options) {
  egi_peft *peft = NULL;
  if (options->adapter != NULL) EG_TRY(egi_peft_open(runner->ctx, options->adapter, &peft));
  eg_status status = egi_machine_prepare(&runner->machine, runner->model, options->device, options->dtype);
  if (status == EG_OK) status = adapt(runner, peft);
  egi_peft_close(peft);
  return status;
}

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
  eg_status status = fill(runner, options);
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
  egi_arena_clear(&runner->arena);
  egi_model_release(runner->model);
  egi_release(ctx, EGI_PURPOSE_DATA, runner, sizeof *runner);
  egi_context_release(ctx);
}

eg_context *egi_runner_context(const eg_runner *runner) {
  return runner->ctx;
}

int64_t egi_runner_vocabulary(const eg_runner *runner) {
  const egi_graph *graph = runner->machine.graph;
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
  const eg_tensor *inputs;
  size_t n_inputs;
  egi_inputs roles; /* roles NULL: not a language model, nothing can be made */
  egi_bucket bucket;
} call;

static const egi_value *graph_input(const call *c, uint32_t index) {
  const egi_graph *graph = c->runner->machine.graph;
  return &graph->values[graph->inputs[index]];
}

static const eg_tensor *find_tensor(const call *c, uint32_t index) {
  for (size_t i = 0; i < c->n_inputs; i++)
    if (strcmp(c->inputs[i].name, graph_input(c, index)->name) == 0) return &c->inputs[i];
  return NULL;
}

static bool is_convertible(eg_dtype from, eg_dtype to) {
  bool is_whole = (from == EG_DTYPE_I64 || from == EG_DTYPE_I32) && (to == EG_DTYPE_I64 || to == EG_DTYPE_I32);
  return from == to || is_whole;
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
  const egi_graph *graph = c->runner->machine.graph;
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(c, i);
    egi_feed role = c->roles.roles != NULL ? c->roles.roles[i] : EGI_FEED_OTHER;
    bool is_made = role == EGI_FEED_ATTENTION_MASK || role == EGI_FEED_POSITION_IDS || role == EGI_FEED_CACHE;
    if (tensor != NULL) EG_TRY(check_tensor(c, i, tensor));
    if (tensor == NULL && !is_made)
      return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input \"%s\" is missing", graph_input(c, i)->name);
  }
  for (size_t i = 0; i < c->n_inputs; i++) {
    bool is_known = false;
    for (uint32_t k = 0; k < graph->n_inputs; k++)
      is_known = is_known || strcmp(graph_input(c, k)->name, c->inputs[i].name) == 0;
    if (!is_known)
      egi_log(c->runner->ctx, EG_LOG_WARNING, "the model has no input \"%s\": it is ignored", c->inputs[i].name);
  }
  return EG_OK;
}

/* Sizes of the given inputs, then of those that are made. */
static eg_status bind_sizes(const call *c, egi_binder *binder) {
  const egi_graph *graph = c->runner->machine.graph;
  EG_TRY(egi_binder_begin(binder, graph, &c->runner->run_arena));
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(c, i);
    for (int axis = 0; tensor != NULL && axis < (int)tensor->rank; axis++)
      EG_TRY(egi_binder_assign(binder, i, axis, tensor->dims[axis]));
  }
  return egi_binder_finish(binder, &c->roles, &c->bucket);
}

static eg_status make_session(const call *c) {
  eg_runner *runner = c->runner;
  egi_binder binder;
  EG_TRY(bind_sizes(c, &binder));
  egi_plan_options options = {.bindings = binder.bindings, .n_bindings = binder.n};
  EG_TRY(egi_plan_create(runner->ctx, runner->machine.graph, runner->machine.backend, &options, &runner->plan));
  return egi_session_create(runner->machine.store, runner->plan, runner->machine.scratch, &runner->session);
}

/* ---- filling ---- */

static uint64_t count_tensor(const eg_tensor *tensor) {
  uint64_t count = 1;
  for (uint32_t i = 0; i < tensor->rank; i++) count *= (uint64_t)tensor->dims[i];
  return count;
}

static eg_status set_given(const call *c, uint32_t index, const eg_tensor *tensor) {
  eg_dtype dtype = graph_input(c, index)->dtype;
  uint64_t count = count_tensor(tensor), size_bytes;
  if (!egi_dtype_bytes(dtype, count, &size_bytes))
    return egi_fail(c->runner->ctx, EG_ERROR_ARGUMENT, "input too large");
  if (dtype == tensor->dtype) return egi_session_set_input(c->runner->session, index, tensor->data, (size_t)size_bytes);
  void *copy = egi_arena_get(&c->runner->run_arena, (size_t)count, size_bytes > 0 ? (size_t)(size_bytes / count) : 1);
  if (copy == NULL) return EG_ERROR_MEMORY;
  for (uint64_t i = 0; i < count; i++) {
    if (dtype == EG_DTYPE_I32) ((int32_t *)copy)[i] = (int32_t)((const int64_t *)tensor->data)[i];
    if (dtype == EG_DTYPE_I64) ((int64_t *)copy)[i] = ((const int32_t *)tensor->data)[i];
  }
  return egi_session_set_input(c->runner->session, index, copy, (size_t)size_bytes);
}

/* Positions that do not rise by one are several documents in a row, which a made mask would mix. */
static eg_status check_positions(const call *c) {
  for (uint32_t i = 0; i < c->runner->machine.graph->n_inputs && c->roles.roles != NULL; i++) {
    const eg_tensor *tensor = find_tensor(c, i);
    if (c->roles.roles[i] != EGI_FEED_POSITION_IDS || tensor == NULL || tensor->rank != 2) continue;
    for (int64_t k = 0; k < tensor->dims[0] * tensor->dims[1]; k++) {
      bool is_start = k % tensor->dims[1] == 0;
      int64_t at =
          tensor->dtype == EG_DTYPE_I64 ? ((const int64_t *)tensor->data)[k] : ((const int32_t *)tensor->data)[k];
      int64_t before = is_start                        ? at
                       : tensor->dtype == EG_DTYPE_I64 ? ((const int64_t *)tensor->data)[k - 1]
                                                       : ((const int32_t *)tensor->data)[k - 1];
      if (at < before)
        return egi_fail(c->runner->ctx, EG_ERROR_UNSUPPORTED,
                        "\"%s\" restarts within a row: packed rows are not supported", tensor->name);
    }
  }
  return EG_OK;
}

static eg_status set_made(const call *c, uint32_t index) {
  egi_feed role = c->roles.roles[index];
  egi_lanes lanes = {.inputs = c->roles};
  egi_lane lane = {.bucket = c->bucket, .plan = c->runner->plan, .session = c->runner->session};
  if (role == EGI_FEED_CACHE) return EG_OK;
  if (role == EGI_FEED_ATTENTION_MASK) EG_TRY(check_positions(c));
  size_t count = (size_t)c->bucket.batch * c->bucket.sequence;
  lanes.numbers = EGI_NEW(&c->runner->run_arena, int64_t, count > 0 ? count : 1);
  lanes.bytes = EGI_NEW(&c->runner->run_arena, int64_t, count > 0 ? count : 1);
  if (lanes.numbers == NULL || lanes.bytes == NULL) return EG_ERROR_MEMORY;
  return egi_lane_fill_input(&lanes, &lane, index, NULL, NULL);
}

/* ---- outputs ---- */

static eg_status read_outputs(const call *c, const eg_tensor **out_outputs, size_t *out_count) {
  const egi_graph *graph = c->runner->machine.graph;
  egi_arena *arena = &c->runner->run_arena;
  eg_tensor *outputs = EGI_NEW(arena, eg_tensor, graph->n_outputs > 0 ? graph->n_outputs : 1);
  if (outputs == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_outputs; i++) {
    egi_tensor tensor;
    uint64_t size_bytes;
    EG_TRY(egi_session_output(c->runner->session, i, &tensor));
    if (!egi_dtype_bytes(tensor.dtype, (uint64_t)egi_tensor_count(&tensor), &size_bytes)) return EG_ERROR_MEMORY;
    void *data = egi_arena_get(arena, 1, size_bytes > 0 ? (size_t)size_bytes : 1);
    if (data == NULL) return EG_ERROR_MEMORY;
    EG_TRY(egi_session_read_output(c->runner->session, i, data, (size_t)size_bytes));
    outputs[i] = (eg_tensor){.name = graph->values[graph->outputs[i]].name,
                             .dtype = tensor.dtype,
                             .rank = (uint32_t)tensor.rank,
                             .data = data};
    memcpy(outputs[i].dims, tensor.dims, sizeof tensor.dims);
  }
  *out_outputs = outputs;
  *out_count = graph->n_outputs;
  return EG_OK;
}

/* Batch and sequence of input_ids, when the graph has such an input and it is given. */
static eg_status find_roles(call *c) {
  const egi_graph *graph = c->runner->machine.graph;
  egi_inputs roles;
  if (egi_inputs_find(graph, &c->runner->run_arena, &roles) != EG_OK) {
    c->roles.graph = graph;
    return EG_OK;
  }
  c->roles = roles;
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
  EG_TRY(find_roles(&c));
  EG_TRY(check_inputs(&c));
  EG_TRY(make_session(&c));
  for (uint32_t i = 0; i < runner->machine.graph->n_inputs; i++) {
    const eg_tensor *tensor = find_tensor(&c, i);
    EG_TRY(tensor != NULL ? set_given(&c, i, tensor) : set_made(&c, i));
  }
  EG_TRY(egi_session_run(runner->session));
  return read_outputs(&c, out_outputs, out_count);
}
