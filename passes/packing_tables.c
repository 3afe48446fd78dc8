/* Values beside the tokens are computed at several lengths of the row, with positions in order and nothing padded: what
 * they say of a position may not depend on the length, so that the first rows of a long one are those of each document.
 * Called by cache_metadata. */
#include <math.h>
#include <string.h>

#include "passes/masks.h"
#include "passes/packing.h"

/* Relative to the largest element: the same sums in another order. */
#define TOLERANCE 1e-6

typedef struct trial {
  egi_packing *packing;
  egi_arena *arena; /* of this trial */
  int64_t length;
  egi_tensor result;
  const char *reason;
} trial;

static eg_status fill_input(trial *t, const egi_mask_extract *x, const egi_value *value, egi_tensor *tensor) {
  bool is_positions = x->positions != 0 && strcmp(x->source->values[x->positions].name, value->name) == 0;
  uint64_t size_bytes = 0;
  *tensor = (egi_tensor){.dtype = value->dtype, .rank = value->rank};
  for (int i = 0; i < value->rank; i++) (void)egi_dim_value(x->module->dims, value->dims[i], &tensor->dims[i]);
  egi_tensor_set_contiguous(tensor);
  int64_t count = egi_tensor_count(tensor);
  if (!egi_dtype_bytes(tensor->dtype, (uint64_t)count, &size_bytes) || count != t->length) {
    t->reason = "it reads an input of other sizes than the tokens";
    return EG_OK;
  }
  tensor->data = egi_arena_get(t->arena, (size_t)size_bytes + 1, 16);
  if (!tensor->data) return EG_ERROR_MEMORY;
  for (int64_t i = 0; i < count; i++) {
    int64_t number = is_positions ? i : 1;
    if (tensor->dtype == EG_DTYPE_I64)
      ((int64_t *)tensor->data)[i] = number;
    else if (tensor->dtype == EG_DTYPE_I32)
      ((int32_t *)tensor->data)[i] = (int32_t)number;
    else if (tensor->dtype == EG_DTYPE_F32)
      ((float *)tensor->data)[i] = (float)number;
    else if (tensor->dtype == EG_DTYPE_BOOL)
      ((uint8_t *)tensor->data)[i] = number != 0;
    else
      t->reason = "it reads an input of another type than positions or padding";
  }
  return EG_OK;
}

static eg_status evaluate(trial *t, const egi_mask_extract *x) {
  const egi_graph *graph = x->graph;
  egi_tensor *inputs = EGI_NEW(t->arena, egi_tensor, (size_t)graph->n_inputs + 1);
  if (!inputs) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < graph->n_inputs && !t->reason; i++)
    EG_TRY(fill_input(t, x, &graph->values[graph->inputs[i]], &inputs[i]));
  if (t->reason) return EG_OK;
  eg_status status = x->module->evaluator->graph(x->module->ctx, graph, inputs, t->arena, &t->result);
  if (status != EG_OK && status != EG_ERROR_MEMORY) {
    t->reason = egi_arena_format(t->packing->arena, "it cannot be computed for %lld tokens: %s", (long long)t->length,
                                 eg_context_error(x->module->ctx));
    return t->reason ? EG_OK : EG_ERROR_MEMORY;
  }
  return status;
}

static eg_status run(trial *t, egi_value_id value) {
  const egi_packing *p = t->packing;
  const egi_mask mask = {
      .parts = {{value, EGI_MASK_IS_ADDED}}, .n_parts = 1, .batch = p->batch, .sequence = p->sequence};
  egi_mask_extract x = {.source = p->graph, .mask = &mask, .n_batches = 1, .n_positions = t->length};
  x.arena = p->arena;
  eg_status status = egi_mask_extract_make(&x);
  t->reason = x.reason;
  if (status == EG_OK && !t->reason) status = evaluate(t, &x);
  egi_mask_extract_free(&x);
  return status;
}

eg_status egi_packing_evaluate(egi_packing *packing, egi_value_id table, int64_t length, egi_arena *arena,
                               egi_tensor *out_tensor) {
  trial t = {.packing = packing, .arena = arena, .length = length};
  EG_TRY(run(&t, table));
  packing->reason = t.reason;
  *out_tensor = t.result;
  return EG_OK;
}

/* ---- comparing -------------------------------------------------------------------------------------------------- */

static bool fits(const egi_tensor *tensor, int axis, int64_t length, const egi_tensor *whole) {
  if (tensor->rank != whole->rank || !egi_tensor_is_contiguous(tensor)) return false;
  for (int i = 0; i < tensor->rank; i++)
    if (tensor->dims[i] != (i == axis ? length : whole->dims[i])) return false;
  return true;
}

/* A short row against the beginning of the whole one, element by element. */
static bool is_beginning(const trial *t, int axis, const egi_tensor *whole) {
  const egi_tensor *own = &t->result;
  if (!fits(own, axis, t->length, whole) || !egi_tensor_is_contiguous(whole)) return false;
  int64_t block = 1, count = egi_tensor_count(own), block_whole = 1;
  for (int i = axis; i >= 0 && i < own->rank; i++) {
    block *= own->dims[i];
    block_whole *= whole->dims[i];
  }
  double largest = 1e-30;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(egi_tensor_number(own, i)));
  for (int64_t i = 0; i < count; i++) {
    int64_t other = axis < 0 ? i : i / block * block_whole + i % block;
    if (!(fabs(egi_tensor_number(own, i) - egi_tensor_number(whole, other)) <= TOLERANCE * largest)) return false;
  }
  return true;
}

/* Whole numbers from 0, one a position. */
static bool counts(const egi_tensor *whole, int axis) {
  bool is_whole = whole->dtype == EG_DTYPE_I64 || whole->dtype == EG_DTYPE_I32;
  int64_t count = egi_tensor_count(whole);
  if (!is_whole || axis < 0 || count != whole->dims[axis]) return false;
  for (int64_t i = 0; i < count; i++)
    if (!(fabs(egi_tensor_number(whole, i) - (double)i) < 0.5)) return false;
  return true;
}

static bool is_all_true(const egi_tensor *tensor) {
  for (int64_t i = 0; i < egi_tensor_count(tensor); i++)
    if (!(fabs(egi_tensor_number(tensor, i)) > 0)) return false;
  return true;
}

static eg_status refuse(egi_packing *p, egi_value_id value, const char *reason) {
  p->reason = egi_arena_format(p->arena, "value \"%s\": %s", p->graph->values[value].name, reason);
  return p->reason ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status prove_table(egi_packing *p, egi_position_table *table, int64_t longest) {
  const int64_t lengths[] = {longest, 1, 2, 7, longest / 2, longest - 1};
  egi_token_axis own = egi_packing_axis(p, table->value);
  egi_tensor whole = {.rank = 0};
  egi_arena arena;
  eg_status status = EG_OK;
  if (own.reason) return refuse(p, table->value, own.reason);
  if (own.axis >= 0 && own.factor != 1) return refuse(p, table->value, "it has several rows for each token");
  table->axis = own.axis;
  egi_arena_init(&arena, p->graph->module->ctx, EGI_PURPOSE_GRAPH);
  for (size_t i = 0; i < EGI_COUNT(lengths) && status == EG_OK && !p->reason; i++) {
    trial t = {.packing = p, .arena = &arena, .length = lengths[i]};
    if (lengths[i] < 1 || (i > 0 && lengths[i] >= longest)) continue;
    status = run(&t, table->value);
    if (status == EG_OK && t.reason) {
      status = refuse(p, table->value, t.reason);
      continue;
    }
    if (i == 0) whole = t.result;
    if (status == EG_OK && !is_beginning(&t, table->axis, &whole))
      status = refuse(p, table->value, "what it says of a position depends on the length of the document");
  }
  if (status == EG_OK && !p->reason && table->is_valid && !is_all_true(&whole))
    status = refuse(p, table->value, "it hides keys where nothing is padded");
  if (status == EG_OK && !p->reason) table->is_counts = counts(&whole, table->axis);
  egi_arena_clear(&arena);
  return status;
}

eg_status egi_packing_prove(egi_packing *p, int64_t longest) {
  for (uint32_t i = 0; i < p->n_tables && !p->reason; i++) EG_TRY(prove_table(p, &p->tables[i], longest));
  return EG_OK;
}
