/* The fake backend: kernels put themselves into the queue of their stream; synchronize() drains the queues in an order
 * drawn from a seed, respecting record and wait. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend/support_fake.h"

enum { N_STREAMS = 3, MAX_EVENTS = 4096, MAX_BLOCKS = 256 };

typedef void (*work)(const egi_kernel_call *call);

typedef enum item_kind { ITEM_RUN, ITEM_RECORD, ITEM_WAIT } item_kind;
typedef struct item {
  item_kind kind;
  work run;
  egi_kernel_call call;
  unsigned event, count; /* WAIT: how often the event must have been recorded */
} item;

typedef struct queue {
  struct egi_device *device;
  item *items;
  size_t first, n, capacity;
} queue;

struct egi_device {
  eg_context *ctx;
  bool is_host;
  struct captured *course; /* being captured; NULL: none */
  queue queues[N_STREAMS];
  unsigned asked[MAX_EVENTS], done[MAX_EVENTS];
  struct {
    uint8_t *memory;
    size_t size_bytes;
  } blocks[MAX_BLOCKS];
  uint64_t seed, draws;
};

static size_t bytes_in_use;
size_t fake_bytes_in_use(void) {
  return bytes_in_use;
}
void fake_device_seed(egi_device *device, uint64_t seed) {
  device->seed = seed;
}

/* ---- streams -------------------------------------------------------------------------------------------------- */

/* While a course is captured it is put together there, in the order of the calls. */
typedef struct captured_item {
  unsigned stream;
  item item;
} captured_item;
typedef struct captured {
  captured_item *items;
  size_t n, capacity;
} captured;

static void push(queue *to, const item *added) {
  captured *course = to->device->course;
  if (course != NULL) {
    if (course->n == course->capacity) {
      course->capacity = course->capacity == 0 ? 64 : 2 * course->capacity;
      course->items = realloc(course->items, course->capacity * sizeof(captured_item));
      assert_non_null(course->items);
    }
    course->items[course->n++] = (captured_item){(unsigned)(to - to->device->queues), *added};
    return;
  }
  if (to->first + to->n == to->capacity) {
    to->capacity = to->capacity == 0 ? 64 : 2 * to->capacity;
    to->items = realloc(to->items, to->capacity * sizeof(item));
    assert_non_null(to->items);
  }
  to->items[to->first + to->n++] = *added;
}

static bool can_go_on(const egi_device *device, const queue *from) {
  if (from->n == 0) return false;
  const item *head = &from->items[from->first];
  return head->kind != ITEM_WAIT || device->done[head->event] >= head->count;
}

static void go_on(egi_device *device, queue *from) {
  item *head = &from->items[from->first++];
  from->n--;
  if (head->kind == ITEM_RUN) head->run(&head->call);
  if (head->kind == ITEM_RECORD) device->done[head->event]++;
  if (from->n == 0) from->first = 0;
}

/* Seeds of the form 6k + 1 .. 6k + 5 drain one stream as far as it goes before the next; others draw each time. */
static unsigned choose(egi_device *device) {
  static const unsigned orders[6][N_STREAMS] = {{0, 1, 2}, {1, 2, 0}, {2, 1, 0}, {1, 0, 2}, {0, 2, 1}, {2, 0, 1}};
  bool is_drawn = device->seed % 12 >= 6;
  unsigned start = is_drawn ? (unsigned)(egi_random_uniform(device->seed, 7, device->draws++) * N_STREAMS) : 0;
  for (unsigned i = 0; i < N_STREAMS; i++) {
    unsigned stream = orders[device->seed % 6][(start + i) % N_STREAMS];
    if (can_go_on(device, &device->queues[stream])) return stream;
  }
  return N_STREAMS;
}

static eg_status fake_synchronize(egi_device *device) {
  for (;;) {
    unsigned stream = choose(device);
    if (stream < N_STREAMS) {
      go_on(device, &device->queues[stream]);
      continue;
    }
    for (unsigned i = 0; i < N_STREAMS; i++) assert_int_equal(device->queues[i].n, 0); /* else: streams wait for ever */
    return EG_OK;
  }
}

static eg_status fake_record(egi_device *device, unsigned stream, unsigned event) {
  assert_true(event < MAX_EVENTS && stream < N_STREAMS);
  device->asked[event]++;
  push(&device->queues[stream], &(item){.kind = ITEM_RECORD, .event = event});
  return EG_OK;
}

static eg_status fake_wait(egi_device *device, unsigned stream, unsigned event) {
  assert_true(event < MAX_EVENTS && stream < N_STREAMS);
  assert_true(device->asked[event] > 0); /* a wait before the first record waits for nothing */
  push(&device->queues[stream], &(item){.kind = ITEM_WAIT, .event = event, .count = device->asked[event]});
  return EG_OK;
}

/* ---- capture -------------------------------------------------------------------------------------------------- */

static unsigned n_launches, n_captured;
unsigned fake_launches(void) {
  return n_launches;
}

static eg_status fake_begin_capture(egi_device *device) {
  assert_null(device->course);
  device->course = calloc(1, sizeof(captured));
  assert_non_null(device->course);
  n_captured++;
  return EG_OK;
}

static eg_status fake_end_capture(egi_device *device, void **out_captured) {
  *out_captured = device->course;
  device->course = NULL;
  memset(device->asked, 0, sizeof(device->asked)); /* events of a capture are nothing outside of it */
  memset(device->done, 0, sizeof(device->done));
  return EG_OK;
}

static eg_status fake_launch(egi_device *device, void *kept) {
  const captured *course = kept;
  n_launches++;
  for (size_t i = 0; i < course->n; i++) {
    const captured_item *step = &course->items[i];
    if (step->item.kind == ITEM_RECORD) EG_TRY(fake_record(device, step->stream, step->item.event));
    if (step->item.kind == ITEM_WAIT) EG_TRY(fake_wait(device, step->stream, step->item.event));
    if (step->item.kind == ITEM_RUN) push(&device->queues[step->stream], &step->item);
  }
  return EG_OK;
}

static void fake_discard(egi_device *device, void *kept) {
  captured *course = kept;
  (void)device;
  n_captured--;
  free(course->items);
  free(course);
}
unsigned fake_captured(void) {
  return n_captured;
}

static void *fake_stream(egi_device *device, unsigned stream) {
  return &device->queues[stream];
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

static eg_status open_device(eg_context *ctx, bool is_host, egi_device **out_device) {
  egi_device *device = calloc(1, sizeof(*device));
  assert_non_null(device);
  device->ctx = ctx;
  device->is_host = is_host;
  for (unsigned i = 0; i < N_STREAMS; i++) device->queues[i].device = device;
  *out_device = device;
  return EG_OK;
}

static eg_status open_host(eg_context *ctx, egi_device **out_device) {
  return open_device(ctx, true, out_device);
}
static eg_status open_apart(eg_context *ctx, egi_device **out_device) {
  return open_device(ctx, false, out_device);
}

static void fake_close(egi_device *device) {
  for (unsigned i = 0; i < N_STREAMS; i++) free(device->queues[i].items);
  for (unsigned i = 0; i < MAX_BLOCKS; i++) assert_null(device->blocks[i].memory);
  free(device);
}

/* Poisoned: every float is a NaN until it is written. */
static eg_status fake_allocate(egi_device *device, egi_purpose purpose, size_t size_bytes, void **out_memory) {
  uint8_t *memory = egi_allocate(device->ctx, purpose, size_bytes);
  if (memory == NULL) return EG_ERROR_MEMORY;
  memset(memory, 0xFF, size_bytes);
  bytes_in_use += size_bytes;
  for (unsigned i = 0; i < MAX_BLOCKS; i++) {
    if (device->blocks[i].memory != NULL) continue;
    device->blocks[i].memory = memory;
    device->blocks[i].size_bytes = size_bytes;
    *out_memory = memory;
    return EG_OK;
  }
  fail_msg("too many blocks");
  return EG_ERROR_INTERNAL;
}

static void fake_release(egi_device *device, egi_purpose purpose, void *memory, size_t size_bytes) {
  for (unsigned i = 0; i < MAX_BLOCKS; i++) {
    if (device->blocks[i].memory != memory) continue;
    assert_int_equal(device->blocks[i].size_bytes, size_bytes);
    device->blocks[i].memory = NULL;
    bytes_in_use -= size_bytes;
    egi_release(device->ctx, purpose, memory, size_bytes);
    return;
  }
  fail_msg("memory that was not allocated is released");
}

static eg_status fake_copy(egi_device *device, void *dst, const void *src, size_t size_bytes) {
  EG_TRY(fake_synchronize(device));
  memcpy(dst, src, size_bytes);
  return EG_OK;
}

/* ---- kernels -------------------------------------------------------------------------------------------------- */

static void check_place(const egi_device *device, const egi_tensor *tensor) {
  const uint8_t *data = tensor->data;
  if (device->is_host || egi_tensor_count(tensor) == 0) return;
  for (unsigned i = 0; i < MAX_BLOCKS; i++) {
    const uint8_t *start = device->blocks[i].memory;
    if (start != NULL && data >= start && data < start + device->blocks[i].size_bytes) return;
  }
  fail_msg("a kernel is given memory that is not the device's");
}

static eg_status enqueue(const egi_kernel_call *call, work run) {
  queue *to = call->stream;
  for (unsigned i = 0; i < call->n_inputs; i++) check_place(to->device, &call->inputs[i]);
  for (unsigned i = 0; i < call->n_outputs; i++) check_place(to->device, &call->outputs[i]);
  assert_int_equal((uintptr_t)call->workspace % 64, 0);
  push(to, &(item){.kind = ITEM_RUN, .run = run, .call = *call});
  return EG_OK;
}

/* Element `i` of the tensor in row-major order, of a tensor that is broadcast to `shape`. */
static float *element(const egi_tensor *tensor, const egi_tensor *shape, int64_t i) {
  int64_t offset = 0;
  for (int d = shape->rank; d-- > 0;) {
    int64_t index = i % shape->dims[d];
    int own = d - (shape->rank - tensor->rank);
    i /= shape->dims[d];
    if (own >= 0 && tensor->dims[own] != 1) offset += index * tensor->strides[own];
  }
  return (float *)tensor->data + offset;
}

float fake_scalar(egi_op op, float a, float b) {
  switch (op) {
  case EGI_OP_Add:
    return fmodf(a + b, 8191.0f);
  case EGI_OP_Sub:
    return fmodf(a - b, 8191.0f);
  case EGI_OP_Mul:
    return fmodf(a * b + 1.0f, 2039.0f);
  case EGI_OP_Neg:
    return -a;
  default:
    return a;
  }
}

static void run_binary(const egi_kernel_call *call, egi_op op) {
  const egi_tensor *out = &call->outputs[0];
  for (int64_t i = 0, n = egi_tensor_count(out); i < n; i++) {
    float a = *element(&call->inputs[0], out, i), b = *element(&call->inputs[1], out, i);
    *element(out, out, i) = fake_scalar(op, a, b);
  }
}
static void work_Add(const egi_kernel_call *call) {
  run_binary(call, EGI_OP_Add);
}
static void work_Sub(const egi_kernel_call *call) {
  run_binary(call, EGI_OP_Sub);
}
static void work_Mul(const egi_kernel_call *call) {
  run_binary(call, EGI_OP_Mul);
}

static void work_Neg(const egi_kernel_call *call) {
  const egi_tensor *out = &call->outputs[0];
  for (int64_t i = 0, n = egi_tensor_count(out); i < n; i++)
    *element(out, out, i) = -*element(&call->inputs[0], out, i);
}

/* Identity, Reshape and their like: the same elements in the same order. */
static void work_Identity(const egi_kernel_call *call) {
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  for (int64_t i = 0, n = egi_tensor_count(out); i < n; i++) *element(out, out, i) = *element(in, in, i);
}

static void work_Concat(const egi_kernel_call *call) {
  const egi_tensor *out = &call->outputs[0];
  int axis = *(const int *)call->params;
  int64_t start = 0;
  for (unsigned k = 0; k < call->n_inputs; k++) {
    const egi_tensor *in = &call->inputs[k];
    egi_tensor piece = *in;
    piece.data = (float *)out->data + start * out->strides[axis];
    memcpy(piece.strides, out->strides, sizeof(piece.strides));
    for (int64_t i = 0, n = egi_tensor_count(in); i < n; i++) *element(&piece, &piece, i) = *element(in, in, i);
    start += in->dims[axis];
  }
}

/* Through a workspace that is filled with something else first: sums along the last axis, repeated. */
static void work_Softmax(const egi_kernel_call *call) {
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  int64_t n = egi_tensor_count(out), last = out->dims[out->rank - 1];
  float *workspace = call->workspace;
  for (int64_t i = 0; i < n; i++) workspace[i] = 1e30f;
  for (int64_t i = 0; i < n; i++) workspace[i] = *element(in, in, i);
  for (int64_t row = 0; row < n / last; row++) {
    float sum = 0.0f;
    for (int64_t i = 0; i < last; i++) sum = fmodf(sum + workspace[row * last + i], 8191.0f);
    for (int64_t i = 0; i < last; i++) *element(out, out, row * last + i) = sum;
  }
}

static float narrow_element(const egi_tensor *tensor, int64_t row, int64_t column) {
  int64_t offset = row * tensor->strides[0] + column * tensor->strides[1];
  if (tensor->dtype == EG_DTYPE_F32) return ((const float *)tensor->data)[offset];
  return egi_f16_to_f32(((const uint16_t *)tensor->data)[offset]);
}

static void work_MatMul(const egi_kernel_call *call) {
  const egi_tensor *a = &call->inputs[0], *b = &call->inputs[1], *out = &call->outputs[0];
  for (int64_t m = 0; m < out->dims[0]; m++) {
    for (int64_t n = 0; n < out->dims[1]; n++) {
      float sum = 0.0f;
      for (int64_t k = 0; k < a->dims[1]; k++) sum += narrow_element(a, m, k) * narrow_element(b, k, n);
      ((float *)out->data)[m * out->strides[0] + n * out->strides[1]] = sum;
    }
  }
}

static void work_Cast(const egi_kernel_call *call) {
  const egi_tensor *in = &call->inputs[0], *out = &call->outputs[0];
  for (int64_t i = 0; i < egi_tensor_count(out); i++) {
    ((float *)out->data)[i] = egi_f16_to_f32(((const uint16_t *)in->data)[i]);
  }
}

static void work_Accumulate(const egi_kernel_call *call) {
  const egi_tensor *state = &call->inputs[0], *out = &call->outputs[0];
  assert_ptr_equal(state->data, out->data);
  for (int64_t i = 0; i < egi_tensor_count(out); i++) {
    float *place = element(out, out, i);
    *place = fake_scalar(EGI_OP_Add, *place, *element(&call->inputs[1], out, i));
  }
}

#define RUN(name)                                                             \
  static eg_status run_##name(eg_context *ctx, const egi_kernel_call *call) { \
    (void)ctx;                                                                \
    return enqueue(call, work_##name);                                        \
  }
RUN(Add)
RUN(Sub)
RUN(Mul)
RUN(Neg)
RUN(Identity)
RUN(Concat)
RUN(Softmax)
RUN(MatMul)
RUN(Cast)
RUN(Accumulate)

static eg_status prepare_concat(egi_kernel_plan *plan) {
  int *axis = EGI_NEW(plan->arena, int, 1);
  if (axis == NULL) return EG_ERROR_MEMORY;
  *axis = (int)egi_node_int(&plan->graph->nodes[plan->node], "axis", 0);
  if (*axis < 0) *axis += plan->outputs[0].rank;
  plan->params = axis;
  return EG_OK;
}

static eg_status prepare_softmax(egi_kernel_plan *plan) {
  plan->workspace_bytes = (size_t)egi_tensor_count(&plan->outputs[0]) * sizeof(float);
  return EG_OK;
}

/* Takes a narrow weight on the right only. */
static eg_status prepare_matmul(egi_kernel_plan *plan) {
  if (plan->inputs[0].dtype == EG_DTYPE_F32) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "left operand is not float");
}

static eg_status prepare_erf(egi_kernel_plan *plan) {
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "rank %d is too much", plan->inputs[0].rank);
}

/* Sees what was known when the plan was made, or there is no kernel for it. */
static eg_status prepare_cumsum(egi_kernel_plan *plan) {
  if (plan->inputs[1].data != NULL && *(const int64_t *)plan->inputs[1].data == 5) return EG_OK;
  return egi_fail_node(plan->graph, plan->node, EG_ERROR_UNSUPPORTED, "axis is not known");
}

static eg_status run_bad(eg_context *ctx, const egi_kernel_call *call) {
  (void)call;
  return egi_fail(ctx, EG_ERROR_DATA, "index 9 is outside [0, 4)");
}

enum {
  SI = EGI_KERNEL_STRIDED_INPUTS,
  SO = EGI_KERNEL_STRIDED_OUTPUTS,
  P0 = EGI_KERNEL_IN_PLACE_0,
  P1 = EGI_KERNEL_IN_PLACE_1
};

static const egi_kernel kernels[] = {
    {"Add", SI | SO | P0 | P1, NULL, run_Add, NULL},
    {"Sub", 0, NULL, run_Sub, NULL},
    {"Mul", SI | P0, NULL, run_Mul, NULL},
    {"Neg", SI | SO | P0, NULL, run_Neg, NULL},
    {"Identity", SI | SO, NULL, run_Identity, NULL},
    {"Offload", SI, NULL, run_Identity, NULL},
    {"Reload", SI | SO, NULL, run_Identity, NULL},
    {"Reshape", SI, NULL, run_Identity, NULL},
    {"Concat", SI | SO, prepare_concat, run_Concat, NULL},
    {"Softmax", SO, prepare_softmax, run_Softmax, NULL},
    {"MatMul", SI | EGI_KERNEL_NARROW_WEIGHTS, prepare_matmul, run_MatMul, NULL},
    {"Cast", 0, NULL, run_Cast, NULL},
    {"Accumulate", EGI_KERNEL_UPDATES_0, NULL, run_Accumulate, NULL},
    {"Erf", 0, prepare_erf, run_Neg, NULL},
    {"CumSum", 0, prepare_cumsum, run_Identity, NULL},
    {"GatherElements", 0, NULL, run_bad, NULL},
};

static const egi_kernel *find_kernel(egi_op op) {
  const char *name = egi_op_get(op)->name;
  bool is_reshape = op == EGI_OP_Flatten || op == EGI_OP_Squeeze || op == EGI_OP_Unsqueeze;
  for (size_t i = 0; i < EGI_COUNT(kernels); i++) {
    if (strcmp(kernels[i].name, is_reshape ? "Reshape" : name) == 0) return &kernels[i];
  }
  return NULL;
}

const egi_backend *fake_backend(bool is_host) {
  static const egi_backend host = {.name = "fake",
                                   .is_host = true,
                                   .open = open_host,
                                   .close = fake_close,
                                   .find_kernel = find_kernel,
                                   .allocate = fake_allocate,
                                   .release = fake_release,
                                   .upload = fake_copy,
                                   .download = fake_copy,
                                   .record = fake_record,
                                   .wait = fake_wait,
                                   .synchronize = fake_synchronize,
                                   .stream = fake_stream};
  static const egi_backend apart = {.name = "apart",
                                    .is_host = false,
                                    .open = open_apart,
                                    .close = fake_close,
                                    .find_kernel = find_kernel,
                                    .allocate = fake_allocate,
                                    .release = fake_release,
                                    .upload = fake_copy,
                                    .download = fake_copy,
                                    .record = fake_record,
                                    .wait = fake_wait,
                                    .synchronize = fake_synchronize,
                                    .stream = fake_stream,
                                    .begin_capture = fake_begin_capture,
                                    .end_capture = fake_end_capture,
                                    .launch = fake_launch,
                                    .discard = fake_discard};
  return is_host ? &host : &apart;
}
