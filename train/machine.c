/* Machines: a clone of the model's module brought to the state in which the adapt stage begins, and its memory. */
#include "train/train.h"

#include "base/blockwise.h"

#include <string.h>

static const char *dtype_option(eg_dtype dtype) {
  return dtype == EG_DTYPE_BF16 ? "bf16" : dtype == EG_DTYPE_F16 ? "f16" : "of this kind";
}

static eg_status find_device(eg_context *ctx, const char *device, eg_dtype dtype, const egi_backend **out_backend) {
  EG_TRY(egi_backend_find(ctx, device, out_backend));
  if ((*out_backend)->is_host && dtype != EG_DTYPE_F32 && dtype != EG_DTYPE_UNDEFINED)
    return egi_fail(ctx, EG_ERROR_UNSUPPORTED, "activations %s are not supported on the CPU, only f32",
                    dtype_option(dtype));
  return EG_OK;
}

eg_status egi_quantise_options_make(eg_context *ctx, eg_quant quant, uint32_t block, int is_nested,
                                    egi_quantise_options *out_options) {
  *out_options = (egi_quantise_options){.is_wanted = quant != EG_QUANT_NONE};
  if (quant < EG_QUANT_NONE || quant > EG_QUANT_FP4) return egi_fail(ctx, EG_ERROR_ARGUMENT, "quant is out of range");
  if (!out_options->is_wanted) return EG_OK;
  if (block < 32 || block > 4096 || (block & (block - 1)) != 0)
    return egi_fail(ctx, EG_ERROR_ARGUMENT, "blocks of %u numbers: a power of two from 32 to 4096 is possible", block);
  out_options->type = quant == EG_QUANT_NF4 ? EGI_FOUR_BIT_NF4 : EGI_FOUR_BIT_FP4;
  out_options->block = block;
  out_options->is_nested = is_nested != 0;
  return EG_OK;
}

eg_status egi_run_passes(egi_graph *graph, const char *const *names, size_t n_names, const egi_adapt_options *adapt) {
  egi_pipeline_options options = {.adapt = adapt};
  return egi_passes_run(graph, names, n_names, &options, NULL);
}

static eg_status prepare_graph(egi_machine *machine, const eg_model *model, eg_dtype dtype, bool is_general) {
  static const char *const widen[] = {"widen_floats", "eliminate_common", "eliminate_dead"};
  static const char *const keep[] = {"widen_products"};
  const egi_pipeline_options options = {.is_general = is_general};
  EG_TRY(egi_module_clone(model->module, &machine->module));
  machine->graph = machine->module->graphs[0];
  EG_TRY(egi_passes_run_stage(machine->graph, EGI_STAGE_CANONICALISE, &options));
  EG_TRY(egi_passes_run_stage(machine->graph, EGI_STAGE_RECOGNISE, &options));
  if (dtype == EG_DTYPE_UNDEFINED) return egi_run_passes(machine->graph, keep, EGI_COUNT(keep), NULL);
  return egi_run_passes(machine->graph, widen, EGI_COUNT(widen), NULL);
}

static eg_status prepare(egi_machine *machine, const eg_model *model, const char *device, eg_dtype dtype,
                         bool is_general) {
  memset(machine, 0, sizeof *machine);
  machine->ctx = model->ctx;
  machine->dtype = dtype;
  machine->shared = model->shared;
  EG_TRY(find_device(model->ctx, device, dtype, &machine->backend));
  return prepare_graph(machine, model, dtype, is_general);
}

eg_status egi_machine_prepare(egi_machine *machine, const eg_model *model, const char *device, eg_dtype dtype) {
  return prepare(machine, model, device, dtype, false);
}

eg_status egi_machine_prepare_general(egi_machine *machine, const eg_model *model, const char *device, eg_dtype dtype) {
  return prepare(machine, model, device, dtype, true);
}

/* --no-fuse: fused operators become their bodies. */
static eg_status expand_machine(egi_machine *machine) {
  static const char *const names[] = {"expand_fused",       "fold_constants",   "fold_shapes",
                                      "eliminate_identity", "fold_constants",   "fold_shapes",
                                      "eliminate_identity", "eliminate_common", "eliminate_dead"};
  return egi_run_passes(machine->graph, names, EGI_COUNT(names), NULL);
}

static eg_status lower_machine(egi_machine *machine) {
  static const char *const names[] = {"lower_precision", "eliminate_identity", "eliminate_common", "eliminate_dead"};
  const egi_adapt_options adapt = {.dtype = machine->dtype};
  if (machine->dtype != EG_DTYPE_BF16 && machine->dtype != EG_DTYPE_F16) return EG_OK;
  return egi_run_passes(machine->graph, names, EGI_COUNT(names), &adapt);
}

eg_status egi_machine_specialise(egi_machine *machine, const egi_adapt_options *adapt, bool is_expanded) {
  static const char *const names[] = {"dispatch_moe", "eliminate_common"};
  if (is_expanded)
    EG_TRY(expand_machine(machine));
  else
    EG_TRY(egi_run_passes(machine->graph, names, EGI_COUNT(names), adapt));
  return lower_machine(machine);
}

int64_t egi_machine_block(const egi_machine *machine) {
  const egi_kernel *attention = machine->backend->find_kernel(EGI_OP_MaskedAttention);
  return attention != NULL ? attention->flags >> EGI_KERNEL_TILE_SHIFT : 0;
}

eg_status egi_machine_pack(egi_machine *machine, eg_packing packing, eg_loss loss, uint32_t tokens) {
  static const char *const names[] = {"cache_metadata"};
  const egi_pipeline_options options = {.tokens = tokens, .block = egi_machine_block(machine)};
  egi_pass_report report = {0};
  if (packing == EG_PACKING_OFF) return EG_OK;
  if (egi_loss_is_of_documents(loss)) {
    if (packing == EG_PACKING_AUTO) return EG_OK;
    return egi_fail(machine->ctx, EG_ERROR_UNSUPPORTED,
                    "documents cannot be packed: the loss is of whole documents, each needs a row");
  }
  EG_TRY(egi_passes_run(machine->graph, names, 1, &options, &report));
  if (report.nearest_miss == NULL) return EG_OK;
  if (packing != EG_PACKING_AUTO)
    return egi_fail(machine->ctx, EG_ERROR_UNSUPPORTED, "documents cannot be packed: %s", report.nearest_miss);
  egi_log(machine->ctx, EG_LOG_INFO, "documents are not packed, batches are padded: %s", report.nearest_miss);
  return EG_OK;
}

eg_status egi_machine_allocate(egi_machine *machine) {
  EG_TRY(egi_store_create(machine->ctx, machine->module, machine->backend, &machine->store));
  egi_store_share(machine->store, machine->shared);
  EG_TRY(egi_store_make_pools(machine->store));
  return egi_scratch_create(machine->ctx, machine->store, &machine->scratch);
}

void egi_machine_close(egi_machine *machine) {
  egi_scratch_destroy(machine->scratch);
  egi_store_destroy(machine->store);
  egi_module_destroy(machine->module);
  memset(machine, 0, sizeof *machine);
}

/* ---- tables ---- */

/* Follows casts, reshapes and the like back to the input a value comes from; 0 when it is computed. */
static egi_value_id source_of(const egi_graph *graph, egi_value_id value) {
  for (uint32_t hop = 0; value != 0 && hop < graph->n_nodes; hop++) {
    const egi_value *v = &graph->values[value];
    if (v->kind != EGI_VALUE_NODE) return value;
    const egi_node *node = &graph->nodes[v->producer];
    if (node->op == EGI_OP_PackedMetadata) return value;
    bool is_passed_on = node->op == EGI_OP_Cast || (egi_op_get(node->op)->flags & EGI_OP_VIEW) != 0;
    value = is_passed_on && node->n_inputs > 0 ? node->inputs[0] : 0;
  }
  return 0;
}

static int64_t constant_dim(const egi_graph *graph, egi_value_id value, int axis) {
  egi_dims *dims = graph->module->dims;
  int64_t size;
  const egi_value *v = &graph->values[value];
  if (v->rank <= axis || axis < 0) return 0;
  return egi_dim_value(dims, egi_dim_resolve(dims, v->dims[axis]), &size) ? size : 0;
}

/* Rows of the smallest table that the input indexes; 0: none, or of unknown size. */
static int64_t count_rows(const egi_graph *graph, egi_value_id input) {
  int64_t smallest = 0;
  for (egi_node_id n = 1; n < graph->n_nodes; n++) {
    const egi_node *node = &graph->nodes[n];
    unsigned table = 0, index = node->op == EGI_OP_RotaryEmbedding ? 3 : 1;
    bool is_lookup = node->op == EGI_OP_Gather && egi_node_int(node, "axis", 0) == 0;
    if (node->op == EGI_OP_RotaryEmbedding) table = 1, is_lookup = node->n_inputs > 3 && node->inputs[3] != 0;
    if (!is_lookup || source_of(graph, node->inputs[index]) != input) continue;
    int64_t rows = constant_dim(graph, node->inputs[table], 0);
    if (rows > 0 && (smallest == 0 || rows < smallest)) smallest = rows;
  }
  return smallest;
}

int64_t egi_positions_count(const egi_graph *graph, const egi_inputs *inputs) {
  int64_t smallest = 0;
  for (egi_node_id id = 1; id < graph->n_nodes && inputs->is_packed; id++)
    if (graph->nodes[id].op == EGI_OP_PackedMetadata) smallest = count_rows(graph, graph->nodes[id].outputs[2]);
  for (uint32_t i = 0; i < graph->n_inputs; i++) {
    int64_t rows = inputs->roles[i] == EGI_FEED_POSITION_IDS ? count_rows(graph, graph->inputs[i]) : 0;
    if (rows > 0 && (smallest == 0 || rows < smallest)) smallest = rows;
  }
  return smallest;
}

int64_t egi_types_count(const egi_graph *graph, const egi_inputs *inputs) {
  for (uint32_t i = 0; i < graph->n_inputs; i++)
    if (inputs->roles[i] == EGI_FEED_TOKEN_TYPES) return count_rows(graph, graph->inputs[i]);
  return 0;
}

int64_t egi_embedding_count(const egi_graph *graph, const egi_inputs *inputs) {
  return count_rows(graph, graph->inputs[inputs->ids]);
}
