/* Executes plans: binds steps to memory when a session is made, computes what is fixed once, then runs the list without
 * allocating. Invariant: addresses are bound anew when the shared buffer has moved. */
#include <inttypes.h>

#include "backend/plan.h"

/* Memory of one purpose. */
typedef struct block {
  void *memory;
  uint64_t size_bytes;
} block;

struct egi_scratch {
  egi_store *store;
  block transient, pinned;
};

struct egi_session {
  eg_context *ctx;
  egi_store *store;
  const egi_plan *plan;
  const egi_backend *backend;
  egi_device *device;
  egi_scratch *scratch, *own_scratch;
  egi_arena arena;
  egi_tensor *tensors; /* by operand of the plan */
  const void *bound_transient, *bound_pinned;
  bool is_bound;
  block inputs, fixed, known;
  void *captured; /* the main list as the device keeps it, for the addresses that are bound */
  bool has_run, is_eager;
};

/* ---- memory --------------------------------------------------------------------------------------------------- */

static eg_status block_allocate(egi_session *session, uint64_t size_bytes, egi_purpose purpose, block *out) {
  if (size_bytes == 0) return EG_OK;
  EG_TRY(session->backend->allocate(session->device, purpose, (size_t)size_bytes, &out->memory));
  out->size_bytes = size_bytes;
  return EG_OK;
}

static void block_release(egi_session *session, egi_purpose purpose, block *owned) {
  if (owned->memory == NULL) return;
  session->backend->release(session->device, purpose, owned->memory, (size_t)owned->size_bytes);
  *owned = (block){0};
}

eg_status egi_scratch_create(eg_context *ctx, egi_store *store, egi_scratch **out_scratch) {
  egi_scratch *scratch = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof(*scratch));
  if (scratch == NULL) return EG_ERROR_MEMORY;
  *scratch = (egi_scratch){.store = store};
  *out_scratch = scratch;
  return EG_OK;
}

static void scratch_free(egi_scratch *scratch, egi_purpose purpose, block *owned) {
  if (owned->memory == NULL) return;
  const egi_backend *backend = egi_store_backend(scratch->store);
  backend->release(egi_store_device(scratch->store), purpose, owned->memory, (size_t)owned->size_bytes);
  *owned = (block){0};
}

void egi_scratch_destroy(egi_scratch *scratch) {
  if (scratch == NULL) return;
  eg_context *ctx = egi_store_context(scratch->store);
  scratch_free(scratch, EGI_PURPOSE_STEP, &scratch->transient);
  scratch_free(scratch, EGI_PURPOSE_PINNED, &scratch->pinned);
  egi_release(ctx, EGI_PURPOSE_GRAPH, scratch, sizeof(*scratch));
}

static eg_status scratch_grow(egi_scratch *scratch, egi_purpose purpose, uint64_t size_bytes, block *owned) {
  if (size_bytes <= owned->size_bytes) return EG_OK;
  const egi_backend *backend = egi_store_backend(scratch->store);
  egi_device *device = egi_store_device(scratch->store);
  EG_TRY(backend->synchronize(device));
  scratch_free(scratch, purpose, owned);
  EG_TRY(backend->allocate(device, purpose, (size_t)size_bytes, &owned->memory));
  owned->size_bytes = size_bytes;
  return EG_OK;
}

/* ---- binding -------------------------------------------------------------------------------------------------- */

static eg_status storage_address(const egi_session *session, uint32_t id, uint8_t **out_address) {
  const egi_storage *storage = &session->plan->storages[id];
  uint8_t *base = NULL;
  void *weight = NULL;
  switch (storage->kind) {
  case EGI_STORAGE_WEIGHT:
    EG_TRY(egi_store_load(session->store, storage->index, &weight));
    *out_address = weight;
    return EG_OK;
  case EGI_STORAGE_KNOWN:
    if (session->backend->is_host) {
      *out_address = (uint8_t *)(uintptr_t)storage->bytes; /* kernels never write to inputs */
      return EG_OK;
    }
    base = session->known.memory;
    break;
  case EGI_STORAGE_STATE:
    base = egi_store_pool(session->store, (egi_state_pool)storage->index);
    break;
  case EGI_STORAGE_INPUT:
    base = session->inputs.memory;
    break;
  case EGI_STORAGE_FIXED:
    base = session->fixed.memory;
    break;
  case EGI_STORAGE_TRANSIENT:
    base = session->scratch->transient.memory;
    break;
  case EGI_STORAGE_HOST:
    base = session->scratch->pinned.memory;
    break;
  default:
    break;
  }
  *out_address = base == NULL ? NULL : base + storage->offset_bytes;
  return EG_OK;
}

static eg_status bind_layout(const egi_session *session, const egi_layout *layout, egi_tensor *out_tensor) {
  uint8_t *address = NULL;
  *out_tensor = layout->tensor;
  if (layout->storage == 0) return EG_OK;
  EG_TRY(storage_address(session, layout->storage, &address));
  out_tensor->data = address == NULL ? NULL : address + layout->offset_bytes;
  return EG_OK;
}

static eg_status bind_steps(egi_session *session, const egi_step_list *list) {
  for (uint32_t i = 0; i < list->n_steps; i++) {
    const egi_step *step = &list->steps[i];
    for (uint32_t k = 0; k < step->n_inputs + step->n_outputs; k++) {
      uint32_t operand = step->first_operand + k;
      EG_TRY(bind_layout(session, &session->plan->operands[operand], &session->tensors[operand]));
    }
  }
  return EG_OK;
}

static void discard(egi_session *session) {
  if (session->captured == NULL) return;
  (void)session->backend->synchronize(session->device);
  session->backend->discard(session->device, session->captured);
  session->captured = NULL;
}

eg_status egi_session_bind(egi_session *session) {
  const egi_scratch *scratch = session->scratch;
  bool is_moved =
      session->bound_transient != scratch->transient.memory || session->bound_pinned != scratch->pinned.memory;
  if (session->is_bound && !is_moved) return EG_OK;
  discard(session);
  EG_TRY(bind_steps(session, &session->plan->setup));
  EG_TRY(bind_steps(session, &session->plan->main));
  session->bound_transient = scratch->transient.memory;
  session->bound_pinned = scratch->pinned.memory;
  session->is_bound = true;
  return EG_OK;
}

/* ---- running -------------------------------------------------------------------------------------------------- */

/* Puts the node before what its kernel said. */
static eg_status fail_step(const egi_session *session, const egi_step *step, eg_status status) {
  char message[1024];
  (void)snprintf(message, sizeof(message), "%s", eg_context_error(session->ctx));
  return egi_fail_node(session->plan->graph, step->node, status, "%s", message);
}

eg_status egi_session_run_step(egi_session *session, const egi_step *step) {
  uint8_t *workspace = NULL;
  if (step->workspace != 0) EG_TRY(storage_address(session, step->workspace, &workspace));
  const egi_kernel_call call = {
      .inputs = session->tensors + step->first_operand,
      .outputs = session->tensors + step->first_operand + step->n_inputs,
      .n_inputs = step->n_inputs,
      .n_outputs = step->n_outputs,
      .params = step->params,
      .workspace = workspace,
      .pool = egi_context_pool(session->ctx),
      .stream = session->backend->stream != NULL ? session->backend->stream(session->device, step->stream) : NULL};
  eg_status status = step->kernel->run(session->ctx, &call);
  return status == EG_OK ? EG_OK : fail_step(session, step, status);
}

static eg_status run_step(egi_session *session, const egi_step *step, egi_range *range) {
  switch (step->kind) {
  case EGI_STEP_RECORD:
    return session->backend->record(session->device, step->stream, step->event);
  case EGI_STEP_WAIT:
    return session->backend->wait(session->device, step->stream, step->event);
  case EGI_STEP_RUN:
    egi_range_step(range, step);
    return egi_session_run_step(session, step);
  default:
    return EG_OK;
  }
}

static eg_status run_list(egi_session *session, const egi_step_list *list) {
  egi_range range;
  eg_status status = EG_OK;
  egi_range_begin(&range, session->plan);
  for (uint32_t i = 0; i < list->n_steps && status == EG_OK; i++) status = run_step(session, &list->steps[i], &range);
  egi_range_end(&range);
  return status;
}

/* A course that cannot be kept is walked each time. */
static eg_status capture(egi_session *session) {
  EG_TRY(session->backend->begin_capture(session->device));
  eg_status status = run_list(session, &session->plan->main);
  eg_status ended = session->backend->end_capture(session->device, &session->captured);
  if (status == EG_OK) status = ended;
  if (status == EG_OK) return EG_OK;
  discard(session);
  session->is_eager = true;
  egi_log(session->ctx, EG_LOG_WARNING, "graph \"%s\" is run node by node: %s", session->plan->graph->name,
          eg_context_error(session->ctx));
  return EG_OK;
}

/* The first run loads kernels, which a capture must not; a list of segments is one captured piece as long as all
 * kernels of a backend that captures may be. */
eg_status egi_session_run(egi_session *session) {
  EG_TRY(egi_session_bind(session));
  bool can_capture = session->backend->begin_capture != NULL && session->has_run && !session->is_eager;
  if (can_capture && session->captured == NULL) EG_TRY(capture(session));
  session->has_run = true;
  if (session->captured != NULL) return session->backend->launch(session->device, session->captured);
  return run_list(session, &session->plan->main);
}

/* ---- making --------------------------------------------------------------------------------------------------- */

static eg_status upload_known(egi_session *session) {
  for (uint32_t i = 1; i < session->plan->n_storages; i++) {
    const egi_storage *storage = &session->plan->storages[i];
    if (storage->kind != EGI_STORAGE_KNOWN || storage->size_bytes == 0 || !storage->is_placed) continue;
    uint8_t *dst = (uint8_t *)session->known.memory + storage->offset_bytes;
    EG_TRY(session->backend->upload(session->device, dst, storage->bytes, (size_t)storage->size_bytes));
  }
  return EG_OK;
}

static eg_status check_pools(const egi_session *session) {
  for (uint32_t i = 1; i < session->plan->n_storages; i++) {
    const egi_storage *storage = &session->plan->storages[i];
    if (storage->kind != EGI_STORAGE_STATE || storage->size_bytes == 0) continue;
    if (egi_store_pool(session->store, (egi_state_pool)storage->index) != NULL) continue;
    return egi_fail(session->ctx, EG_ERROR_INTERNAL, "the store has no pool %" PRIu32, storage->index);
  }
  return EG_OK;
}

static eg_status make(egi_session *session) {
  const egi_plan *plan = session->plan;
  void *ignored = NULL;
  EG_TRY(check_pools(session));
  session->tensors = EGI_NEW(&session->arena, egi_tensor, (size_t)plan->n_operands + 1);
  if (session->tensors == NULL) return EG_ERROR_MEMORY;
  if (session->scratch == NULL) {
    EG_TRY(egi_scratch_create(session->ctx, session->store, &session->own_scratch));
    session->scratch = session->own_scratch;
  }
  for (uint32_t i = 0; i < plan->n_weights; i++) EG_TRY(egi_store_load(session->store, plan->weights[i], &ignored));
  EG_TRY(block_allocate(session, plan->bytes.inputs, EGI_PURPOSE_DATA, &session->inputs));
  EG_TRY(block_allocate(session, plan->bytes.fixed, EGI_PURPOSE_STEP, &session->fixed));
  if (!session->backend->is_host) {
    EG_TRY(block_allocate(session, plan->bytes.known, EGI_PURPOSE_STEP, &session->known));
    EG_TRY(upload_known(session));
  }
  egi_scratch *scratch = session->scratch;
  EG_TRY(scratch_grow(scratch, EGI_PURPOSE_STEP, plan->bytes.transient, &scratch->transient));
  EG_TRY(scratch_grow(scratch, EGI_PURPOSE_PINNED, plan->bytes.pinned, &scratch->pinned));
  EG_TRY(egi_session_bind(session));
  EG_TRY(run_list(session, &plan->setup));
  return session->backend->synchronize(session->device);
}

eg_status egi_session_create(egi_store *store, const egi_plan *plan, egi_scratch *scratch, egi_session **out_session) {
  eg_context *ctx = egi_store_context(store);
  if (plan->graph->module != egi_store_module(store) || plan->backend != egi_store_backend(store) ||
      (scratch != NULL && scratch->store != store)) {
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "plan, store and scratch do not belong together");
  }
  egi_session *session = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof(*session));
  if (session == NULL) return EG_ERROR_MEMORY;
  *session = (egi_session){.ctx = ctx,
                           .store = store,
                           .plan = plan,
                           .backend = plan->backend,
                           .device = egi_store_device(store),
                           .scratch = scratch};
  egi_arena_init(&session->arena, ctx, EGI_PURPOSE_STEP);
  eg_status status = make(session);
  if (status != EG_OK) {
    egi_session_destroy(session);
    return status;
  }
  *out_session = session;
  return EG_OK;
}

void egi_session_destroy(egi_session *session) {
  if (session == NULL) return;
  eg_context *ctx = session->ctx;
  (void)session->backend->synchronize(session->device);
  discard(session);
  block_release(session, EGI_PURPOSE_DATA, &session->inputs);
  block_release(session, EGI_PURPOSE_STEP, &session->fixed);
  block_release(session, EGI_PURPOSE_STEP, &session->known);
  egi_scratch_destroy(session->own_scratch);
  egi_arena_clear(&session->arena);
  egi_release(ctx, EGI_PURPOSE_GRAPH, session, sizeof(*session));
}

const egi_plan *egi_session_plan(const egi_session *session) {
  return session->plan;
}

egi_device *egi_session_device(const egi_session *session) {
  return session->device;
}

/* ---- inputs and outputs --------------------------------------------------------------------------------------- */

static eg_status check_size(const egi_session *session, egi_value_id value, const egi_tensor *tensor,
                            size_t size_bytes) {
  uint64_t wanted = 0;
  (void)egi_dtype_bytes(tensor->dtype, (uint64_t)egi_tensor_count(tensor), &wanted);
  if (size_bytes == wanted) return EG_OK;
  return egi_fail(session->ctx, EG_ERROR_ARGUMENT, "\"%s\" takes %" PRIu64 " bytes, not %zu",
                  session->plan->graph->values[value].name, wanted, size_bytes);
}

eg_status egi_session_set_input(egi_session *session, uint32_t input, const void *bytes, size_t size_bytes) {
  const egi_plan *plan = session->plan;
  egi_tensor tensor;
  if (input >= plan->graph->n_inputs) {
    return egi_fail(session->ctx, EG_ERROR_ARGUMENT, "there is no input %" PRIu32, input);
  }
  EG_TRY(check_size(session, plan->graph->inputs[input], &plan->inputs[input].tensor, size_bytes));
  EG_TRY(bind_layout(session, &plan->inputs[input], &tensor));
  return size_bytes == 0 ? EG_OK : session->backend->upload(session->device, tensor.data, bytes, size_bytes);
}

eg_status egi_session_output(const egi_session *session, uint32_t output, egi_tensor *out_tensor) {
  const egi_plan *plan = session->plan;
  if (output >= plan->graph->n_outputs) {
    return egi_fail(session->ctx, EG_ERROR_ARGUMENT, "there is no output %" PRIu32, output);
  }
  return bind_layout(session, &plan->outputs[output], out_tensor);
}

/* Elements before and after the first one that a strided tensor covers. */
static void find_extent(const egi_tensor *tensor, int64_t *out_before, int64_t *out_after) {
  *out_before = *out_after = 0;
  for (int i = 0; i < tensor->rank; i++) {
    int64_t reach = (tensor->dims[i] - 1) * tensor->strides[i];
    if (reach < 0)
      *out_before -= reach;
    else
      *out_after += reach;
  }
}

/* Host memory to host memory, row-major. */
static void pack(const egi_tensor *tensor, size_t element_bytes, uint8_t *dst) {
  int64_t index[EGI_MAX_RANK] = {0}, count = egi_tensor_count(tensor), offset = 0;
  const uint8_t *src = tensor->data;
  for (int64_t i = 0; i < count; i++) {
    memcpy(dst + (size_t)i * element_bytes, src + offset * (int64_t)element_bytes, element_bytes);
    for (int d = tensor->rank; d-- > 0;) {
      offset += tensor->strides[d];
      if (++index[d] < tensor->dims[d]) break;
      offset -= index[d] * tensor->strides[d];
      index[d] = 0;
    }
  }
}

/* A strided output of a device of its own: the whole range it lies in is fetched. */
static eg_status download_strided(egi_session *session, const egi_tensor *tensor, void *bytes) {
  size_t element_bytes = egi_whole_bytes(tensor->dtype);
  int64_t before = 0, after = 0;
  find_extent(tensor, &before, &after);
  size_t range_bytes = (size_t)(before + after + 1) * element_bytes;
  uint8_t *staging = egi_allocate(session->ctx, EGI_PURPOSE_DATA, range_bytes);
  if (staging == NULL) return EG_ERROR_MEMORY;
  const uint8_t *first = (const uint8_t *)tensor->data - (size_t)before * element_bytes;
  eg_status status = session->backend->download(session->device, staging, first, range_bytes);
  if (status == EG_OK) {
    egi_tensor host = *tensor;
    host.data = staging + (size_t)before * element_bytes;
    pack(&host, element_bytes, bytes);
  }
  egi_release(session->ctx, EGI_PURPOSE_DATA, staging, range_bytes);
  return status;
}

eg_status egi_session_read_output(egi_session *session, uint32_t output, void *bytes, size_t size_bytes) {
  egi_tensor tensor;
  EG_TRY(egi_session_output(session, output, &tensor));
  EG_TRY(check_size(session, session->plan->graph->outputs[output], &tensor, size_bytes));
  if (session->backend->is_host) EG_TRY(session->backend->synchronize(session->device));
  if (size_bytes == 0) return EG_OK;
  if (egi_tensor_is_contiguous(&tensor)) {
    return session->backend->download(session->device, bytes, tensor.data, size_bytes);
  }
  if (!session->backend->is_host) return download_strided(session, &tensor, bytes);
  pack(&tensor, egi_whole_bytes(tensor.dtype), bytes);
  return EG_OK;
}

eg_status egi_session_fetch_output(egi_session *session, uint32_t output, void *bytes, size_t size_bytes,
                                   uint64_t *out_ticket) {
  egi_tensor tensor;
  *out_ticket = 0;
  if (session->backend->fetch == NULL) return egi_session_read_output(session, output, bytes, size_bytes);
  EG_TRY(egi_session_output(session, output, &tensor));
  EG_TRY(check_size(session, session->plan->graph->outputs[output], &tensor, size_bytes));
  if (!egi_tensor_is_contiguous(&tensor)) return egi_session_read_output(session, output, bytes, size_bytes);
  return session->backend->fetch(session->device, bytes, tensor.data, size_bytes, out_ticket);
}

eg_status egi_session_collect(egi_session *session, uint64_t ticket) {
  return ticket == 0 ? EG_OK : session->backend->collect(session->device, ticket);
}
