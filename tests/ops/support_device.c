/* Conformance on a device with memory of its own: operands are mirrored there with their guards, the kernel runs on the
 * mirrors, and everything comes back. Says at the end what the backend lacks. */
#include "support_ops.h"

enum { ALIGNMENT = 256 };
static const size_t memory_bytes = (size_t)512 << 20;

static const char *device_name(void) {
  const char *name = getenv(OPS_DEVICE);
  return name != NULL && name[0] != '\0' ? name : "cpu";
}

eg_status ops_open_device(ops_environment *environment) {
  EG_TRY(egi_backend_find(environment->ctx, device_name(), &environment->backend));
  if (environment->backend->is_host) return EG_OK;
  EG_TRY(environment->backend->open(environment->ctx, &environment->device));
  return environment->backend->allocate(environment->device, EGI_PURPOSE_STEP, memory_bytes,
                                        (void **)&environment->device_memory);
}

int ops_probe_device(void) {
  ops_environment environment = {0};
  if (eg_context_create(NULL, &environment.ctx) != EG_OK) return 1;
  eg_status status = ops_open_device(&environment);
  if (status != EG_OK) printf("skipped: %s\n", eg_context_error(environment.ctx));
  ops_close_device(&environment);
  eg_context_destroy(environment.ctx);
  return status == EG_OK ? 0 : 77;
}

void ops_close_device(ops_environment *environment) {
  if (environment->device == NULL) return;
  environment->backend->release(environment->device, EGI_PURPOSE_STEP, environment->device_memory, memory_bytes);
  environment->backend->close(environment->device);
}

const egi_kernel *ops_find_kernel(ops_environment *environment, egi_op op) {
  const egi_kernel *kernel = environment->backend->find_kernel(op);
  if (kernel == NULL) environment->is_missing[op] = true;
  return kernel;
}

void ops_report_device(const ops_environment *environment) {
  unsigned n_missing = 0, n = 0;
  if (environment->device == NULL) return;
  for (int op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++) n_missing += environment->is_missing[op];
  printf("%u operators have no kernel on %s:", n_missing, environment->backend->name);
  for (int op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++)
    if (environment->is_missing[op]) printf("%s%s", n++ > 0 ? ", " : " ", egi_op_get((egi_op)op)->name);
  printf("\nnot taken, by type of the first input:");
  for (int op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++) {
    if (environment->refused[op] == 0) continue;
    printf(" %s(", egi_op_get((egi_op)op)->name);
    for (unsigned d = 0, k = 0; d < 64; d++)
      if (environment->refused[op] >> d & 1) printf("%s%s", k++ > 0 ? " " : "", egi_dtype_name((eg_dtype)d));
    printf(")");
  }
  printf("\n");
}

/* ---- one run -------------------------------------------------------------------------------------------------- */

typedef struct mirror {
  const ops_environment *environment;
  const ops_block *blocks;
  uint8_t *places[2 * OPS_MAX_OPERANDS]; /* of the blocks on the device */
  unsigned n_blocks;
  size_t used_bytes;
} mirror;

static eg_status take(mirror *m, size_t size_bytes, const void *bytes, uint8_t **out_place) {
  size_t start = (m->used_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (size_bytes > memory_bytes - start) fail_msg("the case needs more memory than the harness has on the device");
  m->used_bytes = start + size_bytes;
  *out_place = m->environment->device_memory + start;
  return m->environment->backend->upload(m->environment->device, *out_place, bytes, size_bytes);
}

static void move_operands(const mirror *m, const egi_tensor *from, unsigned n, egi_tensor *to) {
  for (unsigned i = 0; i < n; i++) {
    to[i] = from[i];
    for (unsigned b = 0; b < m->n_blocks; b++) {
      const uint8_t *data = from[i].data;
      if (data == NULL || data < m->blocks[b].memory || data >= m->blocks[b].memory + m->blocks[b].size_bytes) continue;
      to[i].data = m->places[b] + (data - m->blocks[b].memory);
    }
  }
}

static eg_status run(mirror *m, const egi_kernel *kernel, const egi_kernel_call *call) {
  const ops_environment *environment = m->environment;
  egi_tensor inputs[OPS_MAX_OPERANDS], outputs[OPS_MAX_OPERANDS];
  egi_kernel_call there = *call;
  move_operands(m, call->inputs, call->n_inputs, inputs);
  move_operands(m, call->outputs, call->n_outputs, outputs);
  there.inputs = inputs;
  there.outputs = outputs;
  there.workspace = m->places[m->n_blocks];
  there.stream = environment->backend->stream(environment->device, 0);
  uint64_t before = egi_allocation_count(environment->ctx);
  eg_status status = kernel->run(environment->ctx, &there);
  if (egi_allocation_count(environment->ctx) != before) fail_msg("%s allocated", kernel->name);
  eg_status ended = environment->backend->synchronize(environment->device);
  return status != EG_OK ? status : ended;
}

eg_status ops_run_on_device(const ops_environment *environment, const egi_kernel *kernel, const egi_kernel_call *call,
                            const ops_block *blocks, unsigned n_blocks, const ops_block *workspace) {
  mirror m = {.environment = environment, .blocks = blocks, .n_blocks = n_blocks};
  const egi_backend *backend = environment->backend;
  for (unsigned b = 0; b < n_blocks; b++) EG_TRY(take(&m, blocks[b].size_bytes, blocks[b].memory, &m.places[b]));
  EG_TRY(take(&m, workspace->size_bytes, workspace->memory, &m.places[n_blocks]));
  eg_status status = run(&m, kernel, call);
  for (unsigned b = 0; b < n_blocks; b++)
    EG_TRY(backend->download(environment->device, blocks[b].memory, m.places[b], blocks[b].size_bytes));
  EG_TRY(backend->download(environment->device, workspace->memory, m.places[n_blocks], workspace->size_bytes));
  return status;
}
