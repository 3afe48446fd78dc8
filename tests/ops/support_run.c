/* Runs kernels for the conformance harness over layouts, in place and with different numbers of threads. */
#include "support_ops.h"

#include <math.h>

#define GUARD 64
#define POISON 0xFF /* NaN, -1, or a bool that is none */

typedef enum memory_layout { CONTIGUOUS, TRANSPOSED, SPREAD, REVERSED, LAYOUT_COUNT } memory_layout;

static const char *const layout_names[LAYOUT_COUNT] = {"contiguous", "transposed", "spread", "reversed"};

/* ---- operands in memory --------------------------------------------------------------------------------------- */

typedef struct buffer {
  uint8_t *memory; /* GUARD bytes, elements and gaps, GUARD bytes */
  uint8_t *is_element;
  size_t size_bytes;
  egi_tensor view;
} buffer;

static void free_buffer(buffer *b) {
  free(b->memory);
  free(b->is_element);
  *b = (buffer){0};
}

static void set_strides(egi_tensor *view, memory_layout layout, int64_t *out_elements, int64_t *out_start) {
  int64_t step = layout == SPREAD ? 2 : 1;
  int64_t last = 0;
  *out_start = 0;
  for (int k = 0; k < view->rank; k++) {
    int i = layout == TRANSPOSED ? k : view->rank - 1 - k;
    view->strides[i] = step;
    last += view->dims[i] > 0 ? (view->dims[i] - 1) * step : 0;
    step *= view->dims[i] > 0 ? view->dims[i] : 1;
    if (layout == SPREAD) step += 3;
  }
  *out_elements = last + 1;
  if (layout == REVERSED && view->rank > 0 && view->dims[view->rank - 1] > 0) {
    int i = view->rank - 1;
    *out_start = (view->dims[i] - 1) * view->strides[i];
    view->strides[i] = -view->strides[i];
  }
}

static char *element_at(const egi_tensor *view, size_t element_bytes, int64_t linear) {
  int64_t offset = 0;
  for (int i = view->rank - 1; i >= 0; i--) {
    offset += linear % view->dims[i] * view->strides[i];
    linear /= view->dims[i];
  }
  return (char *)view->data + offset * (int64_t)element_bytes;
}

/* Memory for a tensor in a layout: poisoned, or filled with its values. */
static void make_buffer(buffer *b, const ops_tensor *tensor, memory_layout layout, bool is_filled) {
  *b = (buffer){0};
  if (tensor->dtype == EG_DTYPE_UNDEFINED) return;
  size_t bytes = egi_dtype_bits(tensor->dtype) / 8;
  int64_t n_elements, start;
  b->view = (egi_tensor){.dtype = tensor->dtype, .rank = tensor->rank};
  memcpy(b->view.dims, tensor->dims, sizeof b->view.dims);
  set_strides(&b->view, layout, &n_elements, &start);
  b->size_bytes = 2 * GUARD + (size_t)n_elements * bytes;
  b->memory = malloc(b->size_bytes);
  b->is_element = calloc(b->size_bytes, 1);
  assert_non_null(b->memory);
  assert_non_null(b->is_element);
  memset(b->memory, POISON, b->size_bytes);
  b->view.data = b->memory + GUARD + (size_t)start * bytes;
  for (int64_t i = 0, n = ops_count(tensor); i < n; i++) {
    char *element = element_at(&b->view, bytes, i);
    memset(b->is_element + (element - (char *)b->memory), 1, bytes);
    if (is_filled) ops_store(tensor->dtype, element, tensor->values[i]);
  }
}

static bool has_clean_gaps(const buffer *b) {
  for (size_t i = 0; i < b->size_bytes; i++) {
    if (!b->is_element[i] && b->memory[i] != POISON) return false;
  }
  return true;
}

/* ---- one run -------------------------------------------------------------------------------------------------- */

typedef struct setting {
  memory_layout inputs[OPS_MAX_OPERANDS], outputs[OPS_MAX_OPERANDS];
  int in_place; /* input whose memory output 0 takes, or -1 */
} setting;

typedef struct run_state {
  const ops_case *c;
  const egi_kernel *kernel;
  egi_module *module;
  egi_node_id node;
  buffer inputs[OPS_MAX_OPERANDS], outputs[OPS_MAX_OPERANDS];
  bool is_on_host; /* whatever device is tested */
  bool is_refused; /* the device's kernel does not take these types */
  char *message;
  size_t message_size;
} run_state;

static eg_status build_node(run_state *r) {
  const ops_case *c = r->c;
  egi_graph *graph;
  egi_value_id inputs[OPS_MAX_OPERANDS] = {0}, outputs[OPS_MAX_OPERANDS] = {0};
  egi_attribute attributes[EGI_COUNT(c->attributes)];
  EG_TRY(egi_module_create(c->environment->ctx, &r->module));
  EG_TRY(egi_module_add_graph(r->module, "test", &graph));
  for (unsigned i = 0; i < c->n_inputs; i++) {
    const ops_tensor *tensor = &c->inputs[i];
    if (tensor->dtype == EG_DTYPE_UNDEFINED) continue;
    egi_dim dims[EGI_MAX_RANK] = {0};
    for (int k = 0; k < tensor->rank; k++) dims[k] = egi_dim_constant(r->module->dims, tensor->dims[k]);
    EG_TRY(egi_graph_add_input(graph, NULL, tensor->dtype, tensor->rank, dims, &inputs[i]));
  }
  memcpy(attributes, c->attributes, sizeof attributes);
  for (unsigned i = 0; i < c->n_attributes; i++) {
    if (attributes[i].kind != EGI_ATTRIBUTE_TENSOR) continue;
    const ops_tensor *tensor = (const ops_tensor *)(const void *)attributes[i].u.s;
    egi_weight weight = {.name = attributes[i].name, .dtype = tensor->dtype, .rank = tensor->rank};
    size_t bytes = egi_dtype_bits(tensor->dtype) / 8;
    memcpy(weight.dims, tensor->dims, sizeof weight.dims);
    uint8_t *data = egi_arena_get(&r->module->arena, (size_t)ops_count(tensor) + 1, bytes);
    if (data == NULL) return EG_ERROR_MEMORY;
    for (int64_t k = 0; k < ops_count(tensor); k++)
      ops_store(tensor->dtype, data + (size_t)k * bytes, tensor->values[k]);
    weight.bytes = (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = data};
    weight.bytes.size_bytes = (uint64_t)ops_count(tensor) * bytes;
    EG_TRY(egi_module_add_weight(r->module, &weight, &attributes[i].u.weight));
  }
  egi_node node = {.op = c->op, .name = "tested", .inputs = inputs, .outputs = outputs, .attributes = attributes};
  node.n_inputs = (uint16_t)c->n_inputs;
  node.n_outputs = (uint16_t)c->n_outputs;
  node.n_attributes = (uint16_t)c->n_attributes;
  return egi_graph_add_node(graph, &node, &r->node);
}

static void make_operands(run_state *r, const setting *s) {
  for (unsigned i = 0; i < r->c->n_inputs; i++) make_buffer(&r->inputs[i], &r->c->inputs[i], s->inputs[i], true);
  for (unsigned i = 0; i < r->c->n_outputs; i++) {
    if (i > 0 || s->in_place < 0) make_buffer(&r->outputs[i], &r->c->outputs[i], s->outputs[i], false);
  }
}

static void free_operands(run_state *r) {
  for (unsigned i = 0; i < OPS_MAX_OPERANDS; i++) {
    free_buffer(&r->inputs[i]);
    free_buffer(&r->outputs[i]);
  }
}

static void tell(run_state *r, const setting *s, const char *what) {
  snprintf(r->message, r->message_size, "%s (%s, inputs %s %s, output %s, in place %d): %s", r->kernel->name,
           egi_dtype_name(r->c->inputs[0].dtype), layout_names[s->inputs[0]], layout_names[s->inputs[1]],
           layout_names[s->outputs[0]], s->in_place, what);
}

static bool is_close(const ops_case *c, double got, double expected) {
  if (isnan(expected)) return isnan(got);
  if (isinf(expected)) return got == expected;
  return fabs(got - expected) <= c->absolute + c->relative * fabs(expected);
}

static bool compare_values(run_state *r, const setting *s, const char *name, const ops_tensor *expected,
                           const egi_tensor *view) {
  size_t bytes = egi_dtype_bits(expected->dtype) / 8;
  for (int64_t i = 0, n = ops_count(expected); i < n; i++) {
    double got = ops_load(expected->dtype, element_at(view, bytes, i));
    if (is_close(r->c, got, expected->values[i])) continue;
    char what[160];
    snprintf(what, sizeof what, "%s, element %lld of %lld is %.9g, not %.9g", name, (long long)i,
             (long long)ops_count(expected), got, expected->values[i]);
    tell(r, s, what);
    return false;
  }
  return true;
}

static bool compare_output(run_state *r, const setting *s, unsigned output, const egi_tensor *view) {
  char name[32];
  snprintf(name, sizeof name, "output %u", output);
  return compare_values(r, s, name, &r->c->outputs[output], view);
}

/* Inputs that the kernel writes, such as an optimizer's moments. */
static bool compare_updated(run_state *r, const setting *s) {
  for (unsigned i = 0; i < r->c->n_inputs; i++) {
    ops_tensor expected = r->c->inputs[i];
    if (r->c->updated[i] == NULL) continue;
    expected.values = (double *)(uintptr_t)r->c->updated[i];
    if (!compare_values(r, s, "an updated input", &expected, &r->inputs[i].view)) return false;
  }
  return true;
}

/* Whatever is not an element of an output must be as it was. */
static bool check_memory(run_state *r, const setting *s) {
  for (unsigned i = 0; i < r->c->n_outputs; i++) {
    if (has_clean_gaps(&r->outputs[i])) continue;
    tell(r, s, "wrote outside of an output");
    return false;
  }
  for (unsigned i = 0; i < r->c->n_inputs; i++) {
    buffer fresh;
    if ((int)i == s->in_place || r->c->updated[i] != NULL) continue;
    make_buffer(&fresh, &r->c->inputs[i], s->inputs[i], true);
    bool is_same = fresh.size_bytes == 0 || memcmp(fresh.memory, r->inputs[i].memory, fresh.size_bytes) == 0;
    free_buffer(&fresh);
    if (is_same) continue;
    tell(r, s, "wrote to an input");
    return false;
  }
  return true;
}

static void fill_views(const run_state *r, const setting *s, egi_tensor *inputs, egi_tensor *outputs) {
  for (unsigned i = 0; i < r->c->n_inputs; i++) inputs[i] = r->inputs[i].view;
  for (unsigned i = 0; i < r->c->n_outputs; i++) outputs[i] = r->outputs[i].view;
  if (s->in_place < 0) return;
  outputs[0] = r->inputs[s->in_place].view;
}

static eg_status run_kernel(const run_state *r, const egi_kernel_call *call, size_t workspace_bytes) {
  const ops_environment *environment = r->c->environment;
  ops_block blocks[2 * OPS_MAX_OPERANDS], workspace = {call->workspace, workspace_bytes};
  unsigned n_blocks = 0;
  if (environment->device == NULL || r->is_on_host) return r->kernel->run(environment->ctx, call);
  for (unsigned i = 0; i < OPS_MAX_OPERANDS; i++) {
    if (r->inputs[i].memory != NULL) blocks[n_blocks++] = (ops_block){r->inputs[i].memory, r->inputs[i].size_bytes};
    if (r->outputs[i].memory != NULL) blocks[n_blocks++] = (ops_block){r->outputs[i].memory, r->outputs[i].size_bytes};
  }
  return ops_run_on_device(environment, r->kernel, call, blocks, n_blocks, &workspace);
}

/* A device's kernels look at short lists (axes, starts) where a planner knows them: in prepare, on the host. */
static bool is_list_for_prepare(const run_state *r, const egi_tensor *tensor) {
  bool is_integer = tensor->dtype == EG_DTYPE_I32 || tensor->dtype == EG_DTYPE_I64;
  return r->c->environment->device != NULL && !r->is_on_host && is_integer && tensor->rank <= 1;
}

/* prepare and run in memory of its own, with a guarded and poisoned workspace. */
static eg_status execute(run_state *r, const setting *s, egi_pool *pool, bool *out_is_clean) {
  const ops_case *c = r->c;
  eg_context *ctx = c->environment->ctx;
  egi_arena arena;
  egi_tensor inputs[OPS_MAX_OPERANDS], outputs[OPS_MAX_OPERANDS], planned[OPS_MAX_OPERANDS];
  egi_tensor planned_outputs[OPS_MAX_OPERANDS];
  fill_views(r, s, inputs, outputs);
  memcpy(planned, inputs, sizeof planned);
  memcpy(planned_outputs, outputs, sizeof planned_outputs);
  for (unsigned i = 0; i < OPS_MAX_OPERANDS; i++) {
    if (!is_list_for_prepare(r, &planned[i])) planned[i].data = NULL;
    planned_outputs[i].data = NULL;
  }
  egi_arena_init(&arena, ctx, EGI_PURPOSE_GRAPH);
  egi_kernel_plan plan = {.ctx = ctx,
                          .graph = r->module->graphs[0],
                          .node = r->node,
                          .inputs = planned,
                          .outputs = planned_outputs,
                          .n_inputs = c->n_inputs,
                          .n_outputs = c->n_outputs,
                          .arena = &arena};
  *out_is_clean = true;
  eg_status status = r->kernel->prepare != NULL ? r->kernel->prepare(&plan) : EG_OK;
  if (status == EG_ERROR_UNSUPPORTED && c->expected_status != EG_ERROR_UNSUPPORTED && c->environment->device != NULL) {
    c->environment->refused[c->op] |= UINT64_C(1) << c->inputs[0].dtype;
    r->is_refused = true;
  }
  if (status == EG_OK) {
    uint8_t *workspace = egi_allocate(ctx, EGI_PURPOSE_STEP, plan.workspace_bytes + GUARD);
    assert_non_null(workspace);
    memset(workspace, POISON, plan.workspace_bytes + GUARD);
    egi_kernel_call call = {.inputs = inputs,
                            .outputs = outputs,
                            .n_inputs = c->n_inputs,
                            .n_outputs = c->n_outputs,
                            .params = plan.params,
                            .workspace = workspace,
                            .pool = pool};
    uint64_t before = egi_allocation_count(ctx);
    status = run_kernel(r, &call, plan.workspace_bytes + GUARD);
    if (egi_allocation_count(ctx) != before) *out_is_clean = false;
    for (size_t i = 0; i < GUARD; i++) {
      if (workspace[plan.workspace_bytes + i] != POISON) *out_is_clean = false;
    }
    egi_release(ctx, EGI_PURPOSE_STEP, workspace, plan.workspace_bytes + GUARD);
  }
  egi_arena_clear(&arena);
  return status;
}

/* The bytes of all outputs of a run, gaps included. */
static uint64_t hash_outputs(const run_state *r, const setting *s) {
  uint64_t hash = 0;
  for (unsigned i = 0; i < r->c->n_outputs; i++) {
    const buffer *b = i == 0 && s->in_place >= 0 ? &r->inputs[s->in_place] : &r->outputs[i];
    if (b->memory != NULL) hash = egi_hash(b->memory, b->size_bytes, hash);
  }
  return hash;
}

static bool try_setting(run_state *r, const setting *s) {
  bool is_right = true;
  uint64_t hashes[2] = {0, 0};
  for (int k = 0; is_right && k < 2; k++) {
    bool is_clean;
    make_operands(r, s);
    eg_status status = execute(r, s, r->c->environment->pools[k], &is_clean);
    if (r->is_refused) {
      free_operands(r);
      return true;
    }
    if (status != r->c->expected_status) {
      tell(r, s, status == EG_OK ? "did not fail" : eg_context_error(r->c->environment->ctx));
      is_right = false;
    } else if (!is_clean) {
      tell(r, s, "allocated, or wrote outside of its workspace");
      is_right = false;
    } else {
      is_right = check_memory(r, s);
    }
    for (unsigned i = 0; is_right && status == EG_OK && i < r->c->n_outputs; i++) {
      if (r->c->outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
      const buffer *b = i == 0 && s->in_place >= 0 ? &r->inputs[s->in_place] : &r->outputs[i];
      is_right = compare_output(r, s, i, &b->view);
    }
    is_right = is_right && compare_updated(r, s);
    hashes[k] = hash_outputs(r, s);
    free_operands(r);
  }
  if (is_right && hashes[0] != hashes[1]) {
    tell(r, s, "results depend on the number of threads");
    is_right = false;
  }
  return is_right;
}

static bool can_be_in_place(const ops_case *c, unsigned input) {
  if (input >= c->n_inputs || c->inputs[input].dtype != c->outputs[0].dtype) return false;
  if (c->inputs[input].rank != c->outputs[0].rank) return false;
  return memcmp(c->inputs[input].dims, c->outputs[0].dims, sizeof c->outputs[0].dims) == 0;
}

static bool try_all_settings(run_state *r) {
  uint32_t flags = r->kernel->flags;
  setting s = {.in_place = flags & EGI_KERNEL_UPDATES_0 ? 0 : -1};
  if (!try_setting(r, &s)) return false;
  bool is_strided = (flags & (EGI_KERNEL_STRIDED_INPUTS | EGI_KERNEL_STRIDED_OUTPUTS)) != 0;
  for (unsigned v = 1; is_strided && s.in_place < 0 && v <= LAYOUT_COUNT; v++) {
    for (unsigned i = 0; i < OPS_MAX_OPERANDS; i++) {
      s.inputs[i] = flags & EGI_KERNEL_STRIDED_INPUTS ? (memory_layout)((v + i) % LAYOUT_COUNT) : CONTIGUOUS;
      s.outputs[i] = flags & EGI_KERNEL_STRIDED_OUTPUTS ? (memory_layout)((v + 1 + i) % LAYOUT_COUNT) : CONTIGUOUS;
    }
    if (!try_setting(r, &s)) return false;
  }
  for (unsigned i = 0; i < 2; i++) {
    uint32_t wanted = i == 0 ? EGI_KERNEL_IN_PLACE_0 : EGI_KERNEL_IN_PLACE_1;
    if (!(flags & wanted) || !can_be_in_place(r->c, i)) continue;
    setting in_place = {.in_place = (int)i};
    if (!try_setting(r, &in_place)) return false;
  }
  return true;
}

bool ops_agrees(const ops_case *c, const egi_kernel *kernel, char *message, size_t size) {
  run_state r = {.c = c, .kernel = kernel, .message = message, .message_size = size};
  if (build_node(&r) != EG_OK) fail_msg("%s", eg_context_error(c->environment->ctx));
  bool agrees = try_all_settings(&r);
  egi_module_destroy(r.module);
  return agrees;
}

bool ops_run_on_host(ops_case *c) {
  char message[8];
  const setting s = {.in_place = -1};
  run_state r = {.c = c, .kernel = egi_backend_cpu()->find_kernel(c->op), .message = message, .is_on_host = true};
  bool is_clean;
  if (build_node(&r) != EG_OK) fail_msg("%s", eg_context_error(c->environment->ctx));
  make_operands(&r, &s);
  eg_status status = execute(&r, &s, c->environment->pools[0], &is_clean);
  if (status != EG_OK && status != EG_ERROR_UNSUPPORTED) fail_msg("%s", eg_context_error(c->environment->ctx));
  for (unsigned i = 0; i < c->n_outputs && status == EG_OK; i++) {
    size_t bytes = egi_dtype_bits(c->outputs[i].dtype) / 8;
    for (int64_t k = 0; bytes > 0 && k < ops_count(&c->outputs[i]); k++)
      c->outputs[i].values[k] = ops_load(c->outputs[i].dtype, element_at(&r.outputs[i].view, bytes, k));
  }
  free_operands(&r);
  egi_module_destroy(r.module);
  return status == EG_OK;
}

bool ops_infer_outputs(ops_case *c) {
  char message[8];
  run_state r = {.c = c, .message = message};
  if (build_node(&r) != EG_OK) fail_msg("%s", eg_context_error(c->environment->ctx));
  egi_graph *graph = r.module->graphs[0];
  bool is_inferred = egi_infer_graph(graph) == EG_OK;
  for (unsigned i = 0; i < c->n_outputs && is_inferred; i++) {
    if (c->outputs[i].dtype == EG_DTYPE_UNDEFINED) continue;
    eg_dtype inferred = graph->values[graph->nodes[r.node].outputs[i]].dtype;
    if (inferred == EG_DTYPE_UNDEFINED) inferred = c->inputs[0].dtype; /* sizes that depend on contents: of one type */
    c->outputs[i].dtype = inferred;
    for (int64_t k = 0; k < ops_count(&c->outputs[i]); k++)
      c->outputs[i].values[k] = ops_round(c->outputs[i].dtype, c->outputs[i].values[k]);
  }
  egi_module_destroy(r.module);
  return is_inferred;
}

void ops_check(const ops_case *c) {
  char message[512];
  const egi_kernel *kernel = ops_find_kernel(c->environment, c->op);
  if (kernel == NULL) {
    assert_non_null(c->environment->device); /* the CPU has them all */
    return;
  }
  if (!ops_agrees(c, kernel, message, sizeof message)) fail_msg("%s", message);
  if (c->environment->device == NULL) {
    ops_check_body(c);
  } else if (!ops_agrees_in_halves(c, kernel, message, sizeof message)) {
    fail_msg("%s", message);
  }
}

void ops_check_refused(const ops_case *c, eg_status status) {
  char message[8];
  setting s = {.in_place = -1};
  const egi_kernel *kernel = ops_find_kernel(c->environment, c->op);
  run_state r = {.c = c, .kernel = kernel, .message = message, .message_size = sizeof message};
  bool is_clean;
  if (kernel == NULL) return;
  if (build_node(&r) != EG_OK) fail_msg("%s", eg_context_error(c->environment->ctx));
  make_operands(&r, &s);
  assert_int_equal(execute(&r, &s, c->environment->pools[0], &is_clean), status);
  free_operands(&r);
  egi_module_destroy(r.module);
}
