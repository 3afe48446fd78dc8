/* Layers that were trained for codes, as other programs store them: com.microsoft's MatMulNBits or MatMulBnb4 in the
 * place of each Linear whose weight a FakeQuantize rounds. The matrix that is rounded is computed by the nodes that
 * training computed it with, so that the codes are those that it was trained against; what goes into the layer keeps
 * its own FakeQuantize, which files hold as a function. */
#include <inttypes.h>
#include <string.h>

#include "base/blockwise.h"
#include "base/integer_codes.h"
#include "graph/linear.h"
#include "train/train.h"

/* Blocks of a row that has one scale: MatMulNBits needs a power of two. */
enum { ROW_BLOCK = 32 };

typedef struct exporter {
  egi_graph *graph;
  egi_store *store;
  egi_arena arena; /* of one layer */
} exporter;

typedef struct coded {
  egi_fake_quantize form;
  int64_t rows, columns, block, blocks_per_row;
  const float *values;
  uint8_t *codes, *zeros; /* zeros: NULL where they are half of the codes */
  float *scales;
} coded;

/* ---- the matrix ------------------------------------------------------------------------------------------------- */

/* The value in a graph of its own, with all that it is computed of: weights and states. */
static eg_status copy_value(const egi_graph *from, egi_value_id id, egi_graph *to, egi_value_id *out_value) {
  const egi_value *value = &from->values[id];
  if (value->kind == EGI_VALUE_WEIGHT) return egi_graph_add_weight(to, value->index, out_value);
  if (value->kind == EGI_VALUE_STATE) return egi_graph_add_state(to, value->index, out_value);
  if (value->kind != EGI_VALUE_NODE)
    return egi_fail(from->module->ctx, EG_ERROR_UNSUPPORTED, "a matrix that depends on input \"%s\" cannot be stored",
                    value->name);
  egi_node node = from->nodes[value->producer];
  egi_value_id *inputs = EGI_NEW(&to->module->arena, egi_value_id, node.n_inputs + 1u);
  egi_node_id added;
  if (inputs == NULL) return EG_ERROR_MEMORY;
  for (unsigned i = 0; i < node.n_inputs; i++)
    if (node.inputs[i] != 0) EG_TRY(copy_value(from, node.inputs[i], to, &inputs[i]));
  node.inputs = inputs;
  node.outputs = NULL;
  node.origin = NULL;
  EG_TRY(egi_graph_add_node(to, &node, &added));
  EG_TRY(egi_infer_node(to, added));
  *out_value = to->nodes[added].outputs[value->index];
  return EG_OK;
}

static eg_status run_alone(const exporter *state, const egi_graph *alone, float *values, size_t size_bytes) {
  eg_context *ctx = state->graph->module->ctx;
  const egi_plan_options none = {.n_bindings = 0};
  egi_plan *plan;
  egi_session *session = NULL;
  EG_TRY(egi_plan_create(ctx, alone, egi_backend_cpu(), &none, &plan));
  eg_status status = egi_session_create(state->store, plan, NULL, &session);
  if (status == EG_OK) status = egi_session_run(session);
  if (status == EG_OK) status = egi_session_read_output(session, 0, values, size_bytes);
  egi_session_destroy(session);
  egi_plan_destroy(plan);
  return status;
}

static eg_status compute(exporter *state, egi_value_id matrix, coded *c) {
  size_t count = (size_t)(c->rows * c->columns);
  float *values = EGI_NEW(&state->arena, float, count);
  egi_value_id copy;
  egi_graph *alone;
  if (values == NULL) return EG_ERROR_MEMORY;
  EG_TRY(egi_graph_create(state->graph->module, "matrix", &alone));
  EG_TRY(copy_value(state->graph, matrix, alone, &copy));
  EG_TRY(egi_graph_add_output(alone, copy));
  c->values = values;
  return run_alone(state, alone, values, count * sizeof *values);
}

/* ---- codes ------------------------------------------------------------------------------------------------------ */

/* One block of a row, in MatMulNBits' layout: 8 / bits codes a byte, the first in the low bits. */
static void encode_block(coded *c, const egi_integer_block *block, int64_t row, int64_t index) {
  unsigned bits = c->form.bits, per_byte = 8 / bits;
  int64_t first = index * c->block, end = first + c->block < c->columns ? first + c->block : c->columns;
  int64_t place = row * c->blocks_per_row + index;
  uint8_t *codes = c->codes + place * c->block / per_byte;
  for (int64_t i = first; i < end; i++) {
    unsigned code = (unsigned)egi_integer_code(block, c->values[row * c->columns + i]);
    codes[(i - first) / per_byte] |= (uint8_t)(code << (unsigned)((i - first) % per_byte) * bits);
  }
  c->scales[place] = block->scale;
  if (c->zeros == NULL) return;
  int64_t bytes_per_row = (c->blocks_per_row + per_byte - 1) / per_byte;
  unsigned shift = (unsigned)(index % per_byte) * bits;
  c->zeros[row * bytes_per_row + index / per_byte] |= (uint8_t)((unsigned)block->zero << shift);
}

static void encode_row(void *argument, size_t row, size_t worker) {
  coded *c = argument;
  const float *values = c->values + (int64_t)row * c->columns;
  egi_integer_block block = {.scale = 0.0F};
  (void)worker;
  for (int64_t i = 0; i < c->blocks_per_row; i++) {
    int64_t left = c->columns - i * c->block;
    size_t n = (size_t)(left < c->block ? left : c->block);
    if (c->form.block > 0)
      block = egi_integer_block_make(values + i * c->block, n, c->form.bits, c->form.is_symmetric);
    else if (i == 0)
      block = egi_integer_block_make(values, (size_t)c->columns, c->form.bits, c->form.is_symmetric);
    encode_block(c, &block, (int64_t)row, i);
  }
}

static void encode_flat(void *argument, size_t index, size_t worker) {
  coded *c = argument;
  int64_t first = (int64_t)index * c->block, left = c->rows * c->columns - first;
  (void)worker;
  c->scales[index] = egi_four_bit_encode(EGI_FOUR_BIT_NF4, c->values + first,
                                         (size_t)(left < c->block ? left : c->block), c->codes + first / 2);
}

static eg_status encode(exporter *state, coded *c) {
  egi_arena *arena = &state->graph->module->arena;
  egi_pool *pool = egi_context_pool(arena->ctx);
  if (c->form.is_nf4) {
    size_t count = (size_t)(c->rows * c->columns), n_blocks = (count + (size_t)c->block - 1) / (size_t)c->block;
    c->codes = EGI_NEW(arena, uint8_t, (count + 1) / 2);
    c->scales = EGI_NEW(arena, float, n_blocks);
    if (c->codes == NULL || c->scales == NULL) return EG_ERROR_MEMORY;
    egi_pool_run(pool, n_blocks, encode_flat, c);
    return EG_OK;
  }
  unsigned per_byte = 8 / c->form.bits;
  c->codes = EGI_NEW(arena, uint8_t, (size_t)(c->rows * c->blocks_per_row * c->block / per_byte));
  c->scales = EGI_NEW(arena, float, (size_t)(c->rows * c->blocks_per_row));
  if (c->codes == NULL || c->scales == NULL) return EG_ERROR_MEMORY;
  if (!c->form.is_symmetric) {
    c->zeros = EGI_NEW(arena, uint8_t, (size_t)(c->rows * ((c->blocks_per_row + per_byte - 1) / per_byte)));
    if (c->zeros == NULL) return EG_ERROR_MEMORY;
  }
  egi_pool_run(pool, (size_t)c->rows, encode_row, c);
  return EG_OK;
}

/* ---- the layer -------------------------------------------------------------------------------------------------- */

typedef struct tensor {
  const char *suffix;
  eg_dtype dtype;
  int rank;
  int64_t dims[3];
  const void *data;
} tensor;

static eg_status add_tensor(exporter *state, const char *path, const tensor *t, egi_value_id *out_value) {
  egi_module *module = state->graph->module;
  egi_weight weight = {.dtype = t->dtype, .rank = t->rank, .bytes = {.kind = EGI_BYTES_MEMORY, .data = t->data}};
  uint64_t count = 1;
  uint32_t index;
  for (int i = 0; i < t->rank; i++) count *= (uint64_t)(weight.dims[i] = t->dims[i]);
  weight.name = egi_arena_format(&module->arena, "%s.weight.%s", path, t->suffix);
  if (weight.name == NULL || !egi_dtype_bytes(t->dtype, count, &weight.bytes.size_bytes)) return EG_ERROR_MEMORY;
  EG_TRY(egi_module_add_weight(module, &weight, &index));
  return egi_graph_add_weight(state->graph, index, out_value);
}

static eg_status add_integers(exporter *state, const char *path, const coded *c, egi_value_id inputs[4]) {
  int64_t per_byte = 8 / (int64_t)c->form.bits;
  const tensor codes = {"codes", EG_DTYPE_U8, 3, {c->rows, c->blocks_per_row, c->block / per_byte}, c->codes};
  const tensor scales = {"scales", EG_DTYPE_F32, 1, {c->rows * c->blocks_per_row}, c->scales};
  const tensor zeros = {
      "zero_points", EG_DTYPE_U8, 1, {c->rows * ((c->blocks_per_row + per_byte - 1) / per_byte)}, c->zeros};
  EG_TRY(add_tensor(state, path, &codes, &inputs[1]));
  EG_TRY(add_tensor(state, path, &scales, &inputs[2]));
  return c->zeros != NULL ? add_tensor(state, path, &zeros, &inputs[3]) : EG_OK;
}

static eg_status add_flat(exporter *state, const char *path, const coded *c, egi_value_id inputs[4]) {
  int64_t count = c->rows * c->columns;
  const tensor codes = {"codes", EG_DTYPE_U8, 1, {(count + 1) / 2}, c->codes};
  const tensor scales = {"absmax", EG_DTYPE_F32, 1, {(count + c->block - 1) / c->block}, c->scales};
  EG_TRY(add_tensor(state, path, &codes, &inputs[1]));
  return add_tensor(state, path, &scales, &inputs[2]);
}

static eg_status replace(exporter *state, egi_node_id id, const coded *c) {
  const egi_node *old = &state->graph->nodes[id];
  egi_value_id inputs[4] = {old->inputs[EGI_LINEAR_X]};
  const char *path = old->scope != NULL ? old->scope : "linear";
  egi_attribute attributes[4] = {
      egi_attribute_int("K", c->columns), egi_attribute_int("N", c->rows), egi_attribute_int("block_size", c->block),
      c->form.is_nf4 ? egi_attribute_int("quant_type", 1) : egi_attribute_int("bits", c->form.bits)};
  const egi_node product = {.op_name = c->form.is_nf4 ? "MatMulBnb4" : "MatMulNBits",
                            .inputs = inputs,
                            .n_inputs = c->zeros != NULL ? 4 : 3,
                            .attributes = attributes,
                            .n_attributes = 4};
  EG_TRY(c->form.is_nf4 ? add_flat(state, path, c, inputs) : add_integers(state, path, c, inputs));
  return egi_export_product(state->graph, id, &product);
}

static eg_status export_one(exporter *state, egi_node_id id, egi_node_id fake) {
  egi_graph *graph = state->graph;
  coded c = {.rows = 0};
  egi_value_id matrix = graph->nodes[fake].inputs[0];
  const egi_value *value = &graph->values[matrix];
  bool is_known = value->rank == 2 && egi_dim_value(graph->module->dims, value->dims[0], &c.rows) &&
                  egi_dim_value(graph->module->dims, value->dims[1], &c.columns) && c.rows > 0 && c.columns > 0;
  if (!is_known || !egi_fake_quantize_read(&graph->nodes[fake], &c.form))
    return egi_fail_node(graph, fake, EG_ERROR_UNSUPPORTED, "its codes cannot be stored");
  c.block = c.form.block > 0 ? c.form.block : ROW_BLOCK;
  c.blocks_per_row = (c.columns + c.block - 1) / c.block;
  EG_TRY(compute(state, matrix, &c));
  EG_TRY(encode(state, &c));
  return replace(state, id, &c);
}

eg_status egi_export_codes(egi_graph *graph, egi_store *store) {
  static const char *const clean[] = {"eliminate_dead"};
  static const egi_pipeline_options options = {.is_general = true};
  exporter state = {.graph = graph, .store = store};
  egi_node_id n = graph->n_nodes;
  for (egi_node_id id = 1; id < n; id++) {
    egi_node_id fake = egi_fake_quantize_below(graph, id);
    if (fake == 0) continue;
    egi_arena_init(&state.arena, graph->module->ctx, EGI_PURPOSE_DATA);
    eg_status status = export_one(&state, id, fake);
    egi_arena_clear(&state.arena);
    EG_TRY(status);
  }
  return egi_passes_run(graph, clean, 1, &options, NULL);
}

/* ---- adapters --------------------------------------------------------------------------------------------------- */

/* Modules that were trained whole become weights. */
static eg_status settle_states(const egi_machine *machine) {
  egi_graph *graph = machine->graph;
  egi_module *module = machine->module;
  uint32_t n_values = graph->n_values;
  egi_value_id *map = EGI_NEW(&module->arena, egi_value_id, n_values + module->n_states);
  if (map == NULL) return EG_ERROR_MEMORY;
  for (egi_value_id id = 1; id < n_values; id++) {
    if (graph->values[id].kind != EGI_VALUE_STATE) continue;
    egi_state state = module->states[graph->values[id].index];
    egi_weight weight = {.name = state.name, .dtype = EG_DTYPE_F32, .rank = state.rank};
    uint64_t count = egi_state_count(&state);
    uint32_t added;
    float *values = EGI_NEW(&module->arena, float, (size_t)count);
    if (values == NULL) return EG_ERROR_MEMORY;
    state.is_transposed = false; /* as the graph has it */
    EG_TRY(egi_state_read(machine, &state, EGI_POOL_PARAMETERS, values));
    memcpy(weight.dims, state.dims, sizeof weight.dims);
    weight.bytes =
        (egi_bytes){.kind = EGI_BYTES_MEMORY, .data = (const uint8_t *)values, .size_bytes = count * sizeof *values};
    EG_TRY(egi_module_add_weight(module, &weight, &added));
    EG_TRY(egi_graph_add_weight(graph, added, &map[id]));
  }
  egi_graph_replace_many(graph, map);
  return EG_OK;
}

static eg_status merge_codes(egi_merge *merge, egi_machine *machine) {
  static const char *const names[] = {"fake_quantize", "graft_adapters", "eliminate_dead"};
  const egi_adapters *adapters = &merge->export_->adapters;
  egi_adapt_options adapt = {.adapters = adapters->targets,
                             .n_adapters = adapters->count,
                             .modules = adapters->config.modules,
                             .is_frozen = true};
  EG_TRY(egi_fake_options_make(machine->ctx, &adapters->config.qat, &adapt.fake));
  EG_TRY(egi_run_passes(machine->graph, names, EGI_COUNT(names), &adapt));
  EG_TRY(egi_machine_allocate(machine));
  EG_TRY(egi_adapters_load(machine, merge->export_->peft));
  EG_TRY(egi_export_codes(machine->graph, machine->store));
  return settle_states(machine);
}

eg_status egi_merge_codes(egi_merge *merge) {
  egi_machine machine = {.ctx = merge->module->ctx,
                         .module = merge->module,
                         .graph = merge->graph,
                         .backend = egi_backend_cpu(),
                         .dtype = EG_DTYPE_F32};
  eg_status status = merge_codes(merge, &machine);
  egi_scratch_destroy(machine.scratch);
  egi_store_destroy(machine.store);
  return status;
}
