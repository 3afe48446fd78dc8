/* The machines of a runner: one for rows that begin at position 0 without a past, and two that are made when they are
 * needed: for rows of several documents, and for caches that the caller gives and positions of any kind. */
#include "train/train.h"

#include <string.h>

/* Pieces of a row: keys and values go to caches, one row of logits comes out. */
static eg_status cache_keys(const eg_runner *runner, egi_machine *machine) {
  static const char *const names[] = {"cache_keys", "eliminate_dead"};
  const egi_pipeline_options options = {.tokens = runner->decoder_positions};
  return egi_passes_run(machine->graph, names, EGI_COUNT(names), &options, NULL);
}

static eg_status adapt(eg_runner *runner, egi_machine *machine, const egi_peft *peft) {
  static const char *const names[] = {"quantize_base", "fake_quantize", "graft_adapters", "eliminate_common",
                                      "eliminate_dead"};
  egi_adapters adapters = {.count = 0};
  if (peft != NULL) EG_TRY(egi_adapters_from_peft(machine->graph, peft, &runner->arena, &adapters));
  egi_adapt_options options = {.adapters = adapters.targets,
                               .n_adapters = adapters.count,
                               .modules = adapters.config.modules,
                               .is_frozen = true};
  EG_TRY(egi_quantise_options_make(runner->ctx, runner->options.quant, runner->options.quant_block,
                                   runner->options.double_quant, &options.quantise));
  options.quantise.has_head = runner->options.quant_head != 0;
  EG_TRY(egi_fake_options_make(runner->ctx, &adapters.config.qat, &options.fake));
  if (options.quantise.is_wanted && runner->options.dtype != EG_DTYPE_F32)
    return egi_fail(runner->ctx, EG_ERROR_UNSUPPORTED, "quantised matrices need activations in float32");
  if (peft != NULL || options.quantise.is_wanted)
    EG_TRY(egi_run_passes(machine->graph, names, EGI_COUNT(names), &options));
  EG_TRY(egi_machine_specialise(machine, &options, runner->options.no_fuse != 0));
  if (machine == &runner->decoder) EG_TRY(cache_keys(runner, machine));
  EG_TRY(egi_machine_allocate(machine));
  return peft != NULL ? egi_adapters_load(machine, peft) : EG_OK;
}

/* Documents that share a row do not see each other, or the pieces of one follow each other; a graph that cannot promise
 * it says why. */
static eg_status pack(const eg_runner *runner, egi_machine *machine) {
  static const char *const names[] = {"cache_metadata"};
  const bool is_decoding = machine == &runner->decoder;
  const egi_pipeline_options options = {.tokens = is_decoding ? runner->decoder_positions : runner->packed_tokens,
                                        .block = is_decoding ? 0 : egi_machine_block(machine),
                                        .is_decoding = is_decoding};
  egi_pass_report report = {0};
  EG_TRY(egi_passes_run(machine->graph, names, 1, &options, &report));
  if (report.nearest_miss == NULL) return EG_OK;
  if (is_decoding)
    return egi_fail(runner->ctx, EG_ERROR_UNSUPPORTED, "keys and values cannot be cached: %s", report.nearest_miss);
  return egi_fail(runner->ctx, EG_ERROR_UNSUPPORTED,
                  "positions restart within a row, but documents cannot be packed: %s", report.nearest_miss);
}

static eg_status prepare(eg_runner *runner, egi_machine *machine, bool is_general) {
  const eg_runner_options *options = &runner->options;
  egi_peft *peft = NULL;
  if (options->adapter != NULL) EG_TRY(egi_peft_open(runner->ctx, options->adapter, &peft));
  eg_status status = is_general ? egi_machine_prepare_general(machine, runner->model, options->device, options->dtype)
                                : egi_machine_prepare(machine, runner->model, options->device, options->dtype);
  bool is_packed = machine == &runner->packed || machine == &runner->decoder;
  if (status == EG_OK && is_packed) status = pack(runner, machine);
  if (status == EG_OK) status = adapt(runner, machine, peft);
  egi_peft_close(peft);
  return status;
}

static eg_status keep_text(eg_runner *runner, const char **text) {
  if (*text == NULL) return EG_OK;
  *text = egi_arena_copy_text(&runner->arena, *text, strlen(*text));
  return *text != NULL ? EG_OK : EG_ERROR_MEMORY;
}

eg_status egi_runner_prepare(eg_runner *runner, const eg_runner_options *options) {
  runner->options = *options;
  EG_TRY(keep_text(runner, &runner->options.adapter));
  EG_TRY(keep_text(runner, &runner->options.device));
  return prepare(runner, &runner->machine, false);
}

/* ---- what the inputs ask for ---- */

static const eg_tensor *find_tensor(const eg_tensor *inputs, size_t n_inputs, const char *name) {
  for (size_t i = 0; i < n_inputs; i++)
    if (inputs[i].name != NULL && strcmp(inputs[i].name, name) == 0) return &inputs[i];
  return NULL;
}

/* An input of the model that was bound is given. */
static bool gives_cache(const eg_runner *runner, const eg_tensor *inputs, size_t n_inputs) {
  const egi_graph *model = runner->model->module->graphs[0], *own = runner->machine.graph;
  for (uint32_t i = 0; i < model->n_inputs; i++) {
    const char *name = model->values[model->inputs[i]].name;
    egi_value_id value = egi_graph_find_value(own, name);
    bool is_kept = value != 0 && own->values[value].kind == EGI_VALUE_INPUT;
    if (!is_kept && find_tensor(inputs, n_inputs, name) != NULL) return true;
  }
  return false;
}

/* Rows of 0, 1, 2, .., or of ones. */
static bool is_ordinary(const eg_tensor *tensor, bool is_mask) {
  uint64_t count = 1, length = tensor->rank > 0 ? (uint64_t)tensor->dims[tensor->rank - 1] : 1;
  if (!egi_is_whole_type(tensor->dtype) || tensor->data == NULL) return false;
  for (uint32_t i = 0; i < tensor->rank; i++) count *= (uint64_t)tensor->dims[i];
  for (uint64_t i = 0; i < count; i++) {
    int64_t number = tensor->dtype == EG_DTYPE_I64   ? ((const int64_t *)tensor->data)[i]
                     : tensor->dtype == EG_DTYPE_I32 ? ((const int32_t *)tensor->data)[i]
                                                     : ((const uint8_t *)tensor->data)[i];
    if (number != (is_mask ? 1 : (int64_t)(i % length))) return false;
  }
  return true;
}

/* Positions that are given, or made to fit a mask, may be others than those that masks were taken for. */
static eg_status has_other_positions(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs, bool *out_has) {
  const egi_graph *graph = runner->machine.graph;
  egi_inputs roles;
  *out_has = false;
  if (!runner->machine.module->assumes_positions) return EG_OK;
  *out_has = egi_inputs_find(graph, &runner->run_arena, &roles) != EG_OK;
  for (uint32_t i = 0; i < graph->n_inputs && !*out_has; i++) {
    bool is_mask = roles.roles[i] == EGI_FEED_ATTENTION_MASK;
    const eg_tensor *tensor = find_tensor(inputs, n_inputs, graph->values[graph->inputs[i]].name);
    if (tensor == NULL || (!is_mask && roles.roles[i] != EGI_FEED_POSITION_IDS)) continue;
    *out_has = !is_ordinary(tensor, is_mask);
  }
  return EG_OK;
}

const eg_tensor *egi_runner_packed_row(const eg_runner *runner, const eg_tensor *inputs, size_t n_inputs) {
  const egi_graph *graph = runner->machine.graph;
  const eg_tensor *positions = NULL;
  egi_arena arena;
  egi_inputs roles;
  egi_arena_init(&arena, runner->ctx, EGI_PURPOSE_DATA);
  bool has_roles = egi_inputs_find(graph, &arena, &roles) == EG_OK, has_mask = false;
  for (uint32_t i = 0; i < graph->n_inputs && has_roles; i++) {
    const eg_tensor *tensor = find_tensor(inputs, n_inputs, graph->values[graph->inputs[i]].name);
    has_mask = has_mask || (tensor != NULL && roles.roles[i] == EGI_FEED_ATTENTION_MASK);
    if (tensor != NULL && roles.roles[i] == EGI_FEED_POSITION_IDS) positions = tensor;
  }
  egi_arena_clear(&arena);
  return positions != NULL && !has_mask && egi_is_packed_row(positions) ? positions : NULL;
}

static eg_status choose_packed(eg_runner *runner, int64_t n_tokens, egi_machine **out_machine) {
  enum { LEAST_TOKENS = 2048 };
  *out_machine = &runner->packed;
  if (runner->packed.store != NULL && n_tokens <= runner->packed_tokens) return EG_OK;
  egi_machine_close(&runner->packed);
  runner->packed_tokens = n_tokens > LEAST_TOKENS ? n_tokens : LEAST_TOKENS;
  return prepare(runner, &runner->packed, false);
}

/* No more than a table of positions has. */
static eg_status count_positions(eg_runner *runner, int64_t n_positions, int64_t *out_count) {
  enum { STEP = 256 };
  egi_inputs inputs;
  egi_arena arena;
  egi_arena_init(&arena, runner->ctx, EGI_PURPOSE_DATA);
  *out_count = (n_positions + STEP - 1) / STEP * STEP;
  eg_status status = egi_inputs_find(runner->machine.graph, &arena, &inputs);
  int64_t most = status == EG_OK ? egi_positions_count(runner->machine.graph, &inputs) : 0;
  if (most > 0 && *out_count > most) *out_count = most;
  egi_arena_clear(&arena);
  return status;
}

eg_status egi_runner_choose_decoder(eg_runner *runner, int64_t n_positions, egi_machine **out_machine) {
  int64_t count = 0;
  *out_machine = &runner->decoder;
  if (runner->decoder.store != NULL && n_positions <= runner->decoder_positions) return EG_OK;
  EG_TRY(count_positions(runner, n_positions, &count));
  if (runner->decoder.store != NULL && count <= runner->decoder_positions) return EG_OK;
  egi_machine_close(&runner->decoder);
  runner->decoder_positions = count;
  eg_status status = prepare(runner, &runner->decoder, false);
  if (status != EG_ERROR_UNSUPPORTED) return status;
  egi_log(runner->ctx, EG_LOG_INFO, "each token computes the whole row: %s", eg_context_error(runner->ctx));
  egi_machine_close(&runner->decoder);
  *out_machine = NULL;
  return EG_OK;
}

eg_status egi_runner_choose(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs, egi_machine **out_machine) {
  bool has_other = false;
  const eg_tensor *row = egi_runner_packed_row(runner, inputs, n_inputs);
  if (row != NULL && !gives_cache(runner, inputs, n_inputs)) return choose_packed(runner, row->dims[1], out_machine);
  *out_machine = &runner->machine;
  EG_TRY(has_other_positions(runner, inputs, n_inputs, &has_other));
  if (!has_other && !gives_cache(runner, inputs, n_inputs)) return EG_OK;
  if (runner->general.store == NULL) {
    egi_machine_close(&runner->general);
    EG_TRY(prepare(runner, &runner->general, true));
  }
  *out_machine = &runner->general;
  return EG_OK;
}
