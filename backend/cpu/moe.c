/* engraft.MoE in one kernel, for graphs that are run as they were recognised: what dispatch_moe makes of it, one after
 * the other on the same functions. */
#include "backend/cpu/moe.h"

/* ---- planning ------------------------------------------------------------------------------------------------- */

static bool place(size_t *total, int64_t count, size_t element_bytes, size_t *out_offset) {
  size_t bytes = 0;
  *out_offset = *total;
  return egi_size_multiply((size_t)count, element_bytes, &bytes) && egi_size_add(bytes, 63, &bytes) &&
         egi_size_add(*total, bytes / 64 * 64, total);
}

static bool place_rows(size_t *total, const egi_moe_params *p, int64_t columns, size_t *out_offset) {
  size_t count = 0;
  return egi_size_multiply((size_t)p->n_rows, (size_t)columns, &count) &&
         place(total, (int64_t)count, p->element_bytes, out_offset);
}

static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static eg_status place_all(egi_kernel_plan *plan, egi_moe_params *p) {
  size_t workers = egi_pool_size(egi_context_pool(plan->ctx)), total = 0, route = 0;
  int64_t lists = 3 * p->n_rows + p->router.moe.n_experts + 1;
  p->scratch_bytes = egi_ragged_scratch(&p->gate, larger(larger(p->width, p->gate_rows), p->inner), p->element_bytes);
  bool is_sound = egi_route_workspace(&p->router, workers, &route) &&
                  place(&total, lists, sizeof(int32_t), &p->lists) && place(&total, (int64_t)route, 1, &p->route) &&
                  place_rows(&total, p, 1, &p->weight) && place_rows(&total, p, p->width, &p->wide) &&
                  place_rows(&total, p, p->hidden, &p->saved) && place_rows(&total, p, p->inner, &p->middle) &&
                  place_rows(&total, p, p->longest_rank, &p->low) &&
                  place(&total, (int64_t)workers, p->scratch_bytes, &p->scratch);
  if (!is_sound) return egi_fail_node(plan->graph, plan->node, EG_ERROR_MEMORY, "workspace is too large");
  plan->workspace_bytes = total;
  plan->params = p;
  return EG_OK;
}

static int64_t matrix_rows(const egi_kernel_plan *plan, const egi_ragged *ragged) {
  const egi_tensor *t = &plan->inputs[ragged->first[EGI_RAGGED_WEIGHT]];
  return t->dims[t->rank - (ragged->is_transposed ? 1 : 2)];
}

static bool takes_adapters(const egi_kernel_plan *plan, const egi_moe *moe, eg_dtype dtype) {
  for (unsigned role = EGI_MOE_GATE_A; role < EGI_MOE_ROLES; role++)
    if (moe->counts[role] > 0 && plan->inputs[moe->first[role]].dtype != dtype) return false;
  return true;
}

eg_status egi_cpu_prepare_moe(egi_kernel_plan *plan) {
  const egi_tensor *x = &plan->inputs[EGI_MOE_X];
  egi_moe_params *p = EGI_NEW(plan->arena, egi_moe_params, 1);
  egi_moe moe;
  if (p == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_router_prepare(plan, EGI_MOE_LOGITS, &p->router));
  EG_TRY(egi_moe_read(plan->graph, plan->node, &moe));
  p->router.moe = moe;
  p->isa = egi_cpu_isa();
  p->dtype = x->dtype;
  p->element_bytes = egi_element_bytes(x->dtype);
  p->width = x->dims[x->rank - 1];
  p->n_rows = p->router.n_rows;
  p->gate = egi_moe_projection(&moe, EGI_MOE_GATE, p->width);
  p->up = egi_moe_projection(&moe, EGI_MOE_UP, p->width);
  p->gate_rows = matrix_rows(plan, &p->gate);
  p->hidden = moe.form == EGI_MOE_SEPARATE ? 2 * p->gate_rows : p->gate_rows;
  p->inner = moe.form == EGI_MOE_UNGATED ? p->gate_rows : p->hidden / 2;
  p->down = egi_moe_projection(&moe, EGI_MOE_DOWN, p->inner);
  for (unsigned role = EGI_MOE_GATE_A; role < EGI_MOE_ROLES; role += 2)
    if (moe.counts[role] > 0)
      p->longest_rank = larger(p->longest_rank, plan->inputs[moe.first[role]].dims[0] / moe.n_experts);
  bool fits = p->router.dtype == p->dtype && takes_adapters(plan, &moe, p->dtype) &&
              egi_ragged_takes(&p->gate, plan->inputs, p->dtype) && egi_ragged_takes(&p->up, plan->inputs, p->dtype) &&
              egi_ragged_takes(&p->down, plan->inputs, p->dtype);
  return fits ? place_all(plan, p) : egi_fail_types(plan);
}

/* ---- running -------------------------------------------------------------------------------------------------- */

typedef struct moe_run {
  const egi_moe_params *p;
  const egi_kernel_call *call;
  egi_routing routing;
  char *wide, *saved, *middle;
  egi_rows rows; /* of x, then of y */
} moe_run;

static void gather_task(void *argument, size_t task, size_t worker) {
  const moe_run *r = argument;
  const egi_moe_params *p = r->p;
  size_t bytes = (size_t)p->width * p->element_bytes;
  int64_t first = (int64_t)task * EGI_RAGGED_TILE_ROWS;
  (void)worker;
  for (int64_t row = first; row < first + EGI_RAGGED_TILE_ROWS && row < p->n_rows; row++) {
    char *target = r->wide + (size_t)row * bytes;
    const void *source = egi_rows_load(&r->rows, &r->call->inputs[EGI_MOE_X], r->routing.source_row[row], target);
    if (source != target) memcpy(target, source, bytes);
  }
}

/* The sum of a token's rows, in place over its first one: the rows of a token belong to it alone. */
static void combine_task(void *argument, size_t task, size_t worker) {
  const moe_run *r = argument;
  const egi_moe_params *p = r->p;
  const egi_row_functions *functions = egi_row_functions_of(p->dtype);
  const egi_tensor *y = &r->call->outputs[0];
  size_t bytes = (size_t)p->width * p->element_bytes;
  int64_t k = p->router.moe.top_k, first = (int64_t)task * EGI_RAGGED_TILE_ROWS;
  (void)worker;
  for (int64_t t = first; t < first + EGI_RAGGED_TILE_ROWS && t < p->router.tokens; t++) {
    char *sum = r->wide + (size_t)r->routing.inverse[t * k] * bytes;
    for (int64_t j = 1; j < k; j++)
      functions->add(sum, r->wide + (size_t)r->routing.inverse[t * k + j] * bytes, p->width);
    void *target = egi_rows_target(&r->rows, y, t, sum);
    if (target != sum) memcpy(target, sum, bytes);
    egi_rows_store(&r->rows, y, t, sum);
  }
}

static size_t tasks_of(int64_t rows) {
  return (size_t)((rows + EGI_RAGGED_TILE_ROWS - 1) / EGI_RAGGED_TILE_ROWS);
}

static egi_ragged_product product_of(const moe_run *r, const egi_ragged *ragged, const egi_kernel_call *call) {
  const egi_moe_params *p = r->p;
  return (egi_ragged_product){.ragged = ragged,
                              .call = call,
                              .isa = p->isa,
                              .offsets = r->routing.offsets,
                              .alpha = 1.0,
                              .scratch = (char *)r->call->workspace + p->scratch,
                              .scratch_bytes = p->scratch_bytes};
}

/* out += row_weight · scale · (in · Aᵀ)·Bᵀ with the adapter of the role, where it has one: A [E·r, K] as [E, r, K] and
 * B [N, r·E] as [E, N, r]. */
static void add_adapter(const moe_run *r, egi_moe_role role, int64_t k, egi_matrix in, const egi_tensor *out,
                        const egi_tensor *row_weight) {
  const egi_moe_params *p = r->p;
  const egi_moe *moe = &p->router.moe;
  uint32_t first = moe->first[egi_moe_adapter(role)];
  if (moe->counts[egi_moe_adapter(role)] == 0) return;
  const egi_tensor *a = &r->call->inputs[first], *b = &r->call->inputs[first + 1];
  int64_t n_experts = moe->n_experts, rank = a->dims[0] / n_experts, n = b->dims[0];
  egi_tensor matrices[2] = {
      {a->data, a->dtype, 3, {n_experts, rank, k}, {rank * a->strides[0], a->strides[0], a->strides[1]}},
      {b->data, b->dtype, 3, {n_experts, n, rank}, {b->strides[1], b->strides[0], n_experts * b->strides[1]}}};
  egi_kernel_call calls[2] = {*r->call, *r->call};
  egi_ragged ragged[2] = {{.n_experts = n_experts, .in_features = k, .counts = {1}},
                          {.n_experts = n_experts, .in_features = rank, .counts = {1}}};
  egi_matrix low = {(char *)r->call->workspace + p->low, p->dtype, rank, 1};
  for (int i = 0; i < 2; i++) calls[i].inputs = &matrices[i];
  egi_ragged_product product = product_of(r, &ragged[0], &calls[0]);
  product.n = rank;
  product.in = in;
  product.out = low;
  product.row_weight = row_weight;
  egi_ragged_multiply(&product);
  product = product_of(r, &ragged[1], &calls[1]);
  product.n = n;
  product.alpha = moe->adapter_scales[role / 2];
  product.in = low;
  product.out = egi_ragged_matrix(out, false);
  product.addend = out;
  egi_ragged_multiply(&product);
}

/* in times the role's matrices, with what its adapter adds. */
static void multiply(const moe_run *r, egi_moe_role role, egi_matrix in, const egi_tensor *out,
                     const egi_tensor *row_weight) {
  const egi_moe_params *p = r->p;
  const egi_ragged *ragged = role == EGI_MOE_GATE ? &p->gate : role == EGI_MOE_UP ? &p->up : &p->down;
  egi_ragged_product product = product_of(r, ragged, r->call);
  product.n = out->dims[1];
  product.in = in;
  product.out = egi_ragged_matrix(out, false);
  product.row_weight = row_weight;
  egi_ragged_multiply(&product);
  add_adapter(r, role, ragged->in_features, in, out, row_weight);
}

static moe_run begin(const egi_kernel_call *call) {
  const egi_moe_params *p = call->params;
  char *base = call->workspace;
  int32_t *lists = (int32_t *)(void *)(base + p->lists);
  return (moe_run){
      .p = p,
      .call = call,
      .routing = {lists, lists + p->n_rows, lists + 2 * p->n_rows, lists + 3 * p->n_rows, base + p->weight},
      .wide = base + p->wide,
      .saved = base + p->saved,
      .middle = base + p->middle};
}

eg_status egi_cpu_run_moe(eg_context *ctx, const egi_kernel_call *call) {
  moe_run r = begin(call);
  const egi_moe_params *p = r.p;
  const egi_tensor *correction =
      egi_call_has_input(call, EGI_MOE_CORRECTION) ? &call->inputs[EGI_MOE_CORRECTION] : NULL;
  const egi_tensor weight = {r.routing.weight, p->dtype, 1, {p->n_rows}, {1}};
  const egi_tensor gate = {r.saved, p->dtype, 2, {p->n_rows, p->gate_rows}, {p->hidden, 1}};
  const egi_tensor wide = {r.wide, p->dtype, 2, {p->n_rows, p->width}, {p->width, 1}};
  egi_tensor up = gate;
  up.data = r.saved + (size_t)p->gate_rows * p->element_bytes;
  (void)ctx;
  egi_route(&p->router, call, &call->inputs[EGI_MOE_LOGITS], correction, (char *)call->workspace + p->route,
            &r.routing);
  egi_rows_init(&r.rows, &call->inputs[EGI_MOE_X], call->inputs[EGI_MOE_X].rank - 1);
  egi_pool_run(call->pool, tasks_of(p->n_rows), gather_task, &r);
  multiply(&r, EGI_MOE_GATE, egi_ragged_matrix(&wide, false), &gate, NULL);
  if (p->router.moe.form == EGI_MOE_SEPARATE) multiply(&r, EGI_MOE_UP, egi_ragged_matrix(&wide, false), &up, NULL);
  egi_moe_activate(p, call, r.saved, r.middle);
  multiply(&r, EGI_MOE_DOWN, (egi_matrix){r.middle, p->dtype, p->inner, 1}, &wide, &weight);
  egi_rows_init(&r.rows, &call->outputs[0], call->outputs[0].rank - 1);
  egi_pool_run(call->pool, tasks_of(p->router.tokens), combine_task, &r);
  return EG_OK;
}
