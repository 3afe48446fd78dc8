/* Writing a plan: what it is for, its shapes and decisions, bytes by purpose, work and predicted time, and what the
 * passes did. Everything is known before a weight is read or a buffer is allocated. */
#include "train/train.h"

#include <inttypes.h>

/* ---- bytes ---- */

typedef struct term {
  const char *name;
  uint64_t bytes;
} term;
enum { MAX_TERMS = 12 };

static uint64_t pool_bytes(const eg_trainer *trainer, egi_state_pool pool) {
  return egi_module_pool_bytes(trainer->machine.module, pool);
}

/* What the device holds; their sum is the total that a budget is compared with. */
static size_t list_terms(const eg_trainer *trainer, const egi_trainer_memory *memory, term terms[MAX_TERMS]) {
  const term all[] = {
      {"weights", memory->weights - memory->quantised},
      {"quantised_weights", memory->quantised},
      {trainer->options.full ? "parameters" : "adapters", pool_bytes(trainer, EGI_POOL_PARAMETERS)},
      {"gradients", pool_bytes(trainer, EGI_POOL_GRADIENTS)},
      {"optimizer", pool_bytes(trainer, EGI_POOL_MOMENT1) + pool_bytes(trainer, EGI_POOL_MOMENT2) +
                        pool_bytes(trainer, EGI_POOL_STEP) - memory->pinned_states},
      {"saved_activations", memory->saved < memory->transient ? memory->saved : memory->transient},
      {"workspace", memory->transient - (memory->saved < memory->transient ? memory->saved : memory->transient)},
      {"constants", memory->fixed},
      {"staging", memory->inputs}};
  for (size_t i = 0; i < EGI_COUNT(all); i++) terms[i] = all[i];
  return EGI_COUNT(all);
}

/* Host memory that belongs to no file, at its most: what the context's allocator hands out while steps run and while
 * the parameters are saved. On the CPU all of it, on another device what stays on the host. */
static uint64_t anonymous_bytes(const eg_trainer *trainer, const egi_trainer_memory *memory, uint64_t held) {
  uint64_t host = held + memory->tables + memory->pinned + pool_bytes(trainer, EGI_POOL_PARAMETERS);
  if (!trainer->machine.backend->is_host) return host;
  return host + memory->total - memory->weights + memory->copied;
}

static void add_bytes(const eg_trainer *trainer, egi_text *out) {
  term terms[MAX_TERMS];
  egi_trainer_memory memory;
  egi_trainer_bytes(trainer, &trainer->lanes, &memory);
  size_t n = list_terms(trainer, &memory, terms), largest = 0;
  uint64_t graph = egi_bytes_touched(trainer->ctx, EGI_PURPOSE_GRAPH);
  uint64_t data = egi_bytes_touched(trainer->ctx, EGI_PURPOSE_DATA);
  egi_text_add(out, " \"bytes\": {");
  for (size_t i = 0; i < n; i++) {
    egi_text_format(out, "\"%s\": %" PRIu64 ", ", terms[i].name, terms[i].bytes);
    if (terms[i].bytes > terms[largest].bytes) largest = i;
  }
  egi_text_format(
      out, "\"pinned_host\": %" PRIu64 ", \"graph\": %" PRIu64 ", \"data\": %" PRIu64 ", \"saving\": %" PRIu64 "},\n",
      memory.pinned, graph + memory.tables, data, pool_bytes(trainer, EGI_POOL_PARAMETERS));
  egi_text_format(out,
                  " \"total_bytes\": %" PRIu64 ", \"largest_term\": \"%s\", \"mapped_bytes\": %" PRIu64
                  ", \"anonymous_bytes\": %" PRIu64 ",\n",
                  memory.total, terms[largest].name, memory.weights - memory.copied,
                  anonymous_bytes(trainer, &memory, graph + data));
}

/* ---- passes ---- */

typedef struct summary {
  uint32_t metadata, readers; /* PackedMetadata nodes, and nodes that take them */
  uint32_t experts, loops;    /* mixtures of experts */
  uint32_t again;             /* nodes that are run again */
  uint64_t again_bytes;       /* of their results */
  egi_plan_transfers transfers;
} summary;

static bool reads_metadata(const egi_graph *graph, const egi_node *node) {
  for (unsigned i = 0; i < node->n_inputs; i++) {
    const egi_value *value = &graph->values[node->inputs[i]];
    if (value->kind == EGI_VALUE_NODE && graph->nodes[value->producer].op == EGI_OP_PackedMetadata) return true;
  }
  return false;
}

/* As buffer_checkpoints names what it runs once more. */
static bool is_again(const egi_node *node) {
  return node->name != NULL && egi_has_suffix(node->name, "/again");
}

static void add_again(const egi_graph *graph, const egi_node *node, const egi_lane *lane, summary *sum) {
  if (!is_again(node) || (egi_op_get(node->op)->flags & EGI_OP_VIEW)) return;
  sum->again++;
  for (unsigned i = 0; i < node->n_outputs; i++) {
    uint64_t bytes = 0;
    if (node->outputs[i] == 0) continue;
    eg_status status = egi_value_bytes(graph, node->outputs[i], lane->bindings, lane->n_bindings, &bytes);
    if (status == EG_OK) sum->again_bytes += bytes;
  }
}

static void summarise(const egi_graph *graph, const egi_lane *lane, summary *sum) {
  for (egi_node_id id = 1; id < graph->n_nodes; id++) {
    const egi_node *node = &graph->nodes[id];
    if (node->op == EGI_OP_NONE || node->op == EGI_OP_UNKNOWN) continue;
    sum->metadata += node->op == EGI_OP_PackedMetadata;
    sum->experts += node->op == EGI_OP_Route && !is_again(node);
    sum->readers += reads_metadata(graph, node);
    add_again(graph, node, lane, sum);
  }
  egi_plan_get_transfers(lane->plan, &sum->transfers);
}

static void add_passes(const eg_trainer *trainer, const egi_lane *lane, egi_text *out) {
  summary sum = {0};
  egi_trainer_memory memory;
  summarise(trainer->machine.graph, lane, &sum);
  egi_trainer_bytes(trainer, &trainer->lanes, &memory);
  egi_text_format(out,
                  " \"passes\": {\"graft_adapters\": {\"adapters\": %zu, \"parameters\": %" PRIu64
                  "}, \"cache_metadata\": {\"made\": %" PRIu32 ", \"shared_by\": %" PRIu32 "},\n",
                  trainer->adapters.count, trainer->machine.module->pool_elements[EGI_POOL_PARAMETERS], sum.metadata,
                  sum.readers);
  egi_text_format(out, "  \"dispatch_moe\": {\"form\": \"%s\", \"layers\": %" PRIu32 "},\n",
                  sum.experts == 0                               ? "none"
                  : trainer->options.moe_dispatch == EG_MOE_LOOP ? "loop"
                                                                 : "fused",
                  sum.experts);
  egi_text_format(out,
                  "  \"buffer_checkpoints\": {\"kept_bytes\": %" PRIu64 ", \"recomputed_nodes\": %" PRIu32
                  ", \"recomputed_bytes\": %" PRIu64 ", \"offloads\": %" PRIu32 ", \"offloaded_bytes\": %" PRIu64
                  ", \"reloads\": %" PRIu32 ", \"slots\": %" PRIu32 "}},\n",
                  memory.saved, sum.again, sum.again_bytes, sum.transfers.n_offloads, sum.transfers.offloaded_bytes,
                  sum.transfers.n_reloads, sum.transfers.n_slots);
}

/* ---- work ---- */

static void add_device(const egi_device_description *device, egi_text *out) {
  egi_text_add(out, " \"device\": {\"name\": ");
  egi_text_json(out, device->name);
  egi_text_format(out, ", \"flops_per_s\": {\"f32\": %.9g, \"bf16\": %.9g, \"f16\": %.9g}", device->flops_f32,
                  device->flops_bf16, device->flops_f16);
  egi_text_format(out,
                  ", \"memory_bytes_per_s\": %.9g, \"to_host_bytes_per_s\": %.9g, \"to_device_bytes_per_s\": %.9g"
                  ", \"memory_bytes\": %" PRIu64 ", \"launch_s\": %.9g},\n",
                  device->memory_bytes_per_s, device->to_host_bytes_per_s, device->to_device_bytes_per_s,
                  device->memory_bytes, device->launch_s);
}

static void add_row(const egi_plan_cost_row *row, bool is_first, egi_text *out) {
  egi_text_format(out,
                  "%s\n  {\"operator\": \"%s\", \"count\": %" PRIu32 ", \"flops\": %.17g, \"read_bytes\": %.17g"
                  ", \"written_bytes\": %.17g, \"seconds\": %.9g, \"workspace_bytes\": %" PRIu64,
                  is_first ? "" : ",", row->op, row->count, row->cost.flops, row->cost.read_bytes,
                  row->cost.written_bytes, row->seconds, row->workspace_bytes);
  if (row->chunk_rows > 0) egi_text_format(out, ", \"chunk_rows\": %" PRId64, row->chunk_rows);
  egi_text_add(out, "}");
}

static eg_status add_work(const eg_trainer *trainer, const egi_lane *lane, egi_arena *arena, egi_text *out) {
  egi_plan_costs batch, update;
  EG_TRY(egi_plan_get_costs(lane->plan, &trainer->device, arena, &batch));
  EG_TRY(egi_plan_get_costs(trainer->optimizer_plan, &trainer->device, arena, &update));
  double tokens = (double)lane->bucket.batch * (double)lane->bucket.sequence;
  double seconds = batch.seconds + update.seconds / trainer->options.accumulate;
  egi_text_format(out,
                  " \"micro_batch\": {\"rows\": %" PRIu32 ", \"tokens\": %" PRIu32
                  ", \"flops\": %.17g, \"read_bytes\": %.17g, \"written_bytes\": %.17g, \"seconds\": %.9g},\n",
                  lane->bucket.batch, lane->bucket.sequence, batch.total.flops, batch.total.read_bytes,
                  batch.total.written_bytes, batch.seconds);
  egi_text_format(out, " \"update_seconds\": %.9g, \"tokens_per_s\": %.9g,\n \"operators\": [", update.seconds,
                  seconds > 0.0 ? tokens / seconds : 0.0);
  for (uint32_t i = 0; i < batch.n_rows; i++) add_row(&batch.rows[i], i == 0, out);
  egi_text_add(out, "]}\n");
  return EG_OK;
}

/* ---- all of it ---- */

static const egi_lane *largest_lane(const egi_lanes *lanes) {
  const egi_lane *best = &lanes->lanes[0];
  for (size_t i = 1; i < lanes->count; i++) {
    const egi_bucket *a = &lanes->lanes[i].bucket, *b = &best->bucket;
    if ((uint64_t)a->batch * a->sequence > (uint64_t)b->batch * b->sequence) best = &lanes->lanes[i];
  }
  return best;
}

static eg_status add_all(const eg_trainer *trainer, egi_arena *arena, egi_text *out) {
  const egi_lane *lane = largest_lane(&trainer->lanes);
  uint64_t hash = 0;
  if (egi_trainer_plan_hash(trainer, NULL, &hash) != EG_OK) out->is_failed = true; /* out of memory */
  egi_text_format(out,
                  "{\"engraft_plan\": 1, \"hash\": \"%016" PRIx64 "\", \"model\": \"%016" PRIx64
                  "\", \"graph\": \"%016" PRIx64 "\", \"threads\": %zu,\n \"options\": ",
                  hash, trainer->model_hash, trainer->graph_hash, egi_pool_size(egi_context_pool(trainer->ctx)));
  egi_trainer_plan_options(trainer, out);
  egi_text_add(out, ",\n \"shapes\": [");
  for (size_t i = 0; i < trainer->lanes.count; i++) {
    const egi_bucket *bucket = &trainer->lanes.lanes[i].bucket;
    egi_text_format(out, "%s{\"rows\": %" PRIu32 ", \"tokens\": %" PRIu32 "}", i > 0 ? ", " : "", bucket->batch,
                    bucket->sequence);
  }
  egi_text_format(out, "], \"decisions\": {\"rung\": %" PRIu32 ", \"tiles\": %" PRIu32 "},\n", trainer->rung,
                  trainer->tiles);
  add_bytes(trainer, out);
  add_passes(trainer, lane, out);
  add_device(&trainer->device, out);
  return add_work(trainer, lane, arena, out);
}

eg_status egi_trainer_write_plan(const eg_trainer *trainer, egi_text *out) {
  egi_arena arena;
  egi_arena_init(&arena, trainer->ctx, EGI_PURPOSE_DATA);
  eg_status status = add_all(trainer, &arena, out);
  egi_arena_clear(&arena);
  return status == EG_OK ? egi_text_status(out) : status;
}
