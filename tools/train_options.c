/* Command-line options -> eg_trainer_options. */
#include "tools/train.h"

#include <string.h>

static eg_status narrow(tool *t, const char *name, uint64_t value, uint32_t *out) {
  if (value > UINT32_MAX) return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "%s is out of range", name);
  *out = (uint32_t)value;
  return EG_OK;
}

static eg_status parse_betas(tool *t, eg_trainer_options *options) {
  const char *text = tool_text(t, OPTION_BETAS), *comma = strchr(text, ',');
  char *first = comma != NULL ? egi_arena_copy_text(&t->arena, text, (size_t)(comma - text)) : NULL;
  if (first == NULL || !tool_parse_real(first, &options->beta1) || !tool_parse_real(comma + 1, &options->beta2))
    return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "--betas \"%s\" are not two numbers with a comma between", text);
  return EG_OK;
}

static eg_schedule parse_schedule(const char *text) {
  static const char *const names[] = {"constant", "linear", "cosine", "wsd"};
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (strcmp(names[i], text) == 0) return (eg_schedule)i;
  return EG_SCHEDULE_CONSTANT;
}

/* Without the option documents are packed where the graph allows it. */
eg_packing tool_packing(const tool *t) {
  const char *text = tool_text(t, OPTION_PACK);
  if (!tool_is_given(t, OPTION_PACK)) return EG_PACKING_AUTO;
  return strcmp(text, "off") == 0 ? EG_PACKING_OFF : strcmp(text, "bfd") == 0 ? EG_PACKING_BFD : EG_PACKING_SEQUENTIAL;
}

static eg_packing_cache parse_packing_cache(tool *t) {
  const char *text = tool_text(t, OPTION_PACKING_CACHE);
  if (strcmp(text, "on") == 0) return EG_PACKING_CACHE_ON;
  return strcmp(text, "rebuild") == 0 ? EG_PACKING_CACHE_REBUILD : EG_PACKING_CACHE_READBACK;
}

static eg_checkpoint parse_checkpoint(tool *t) {
  static const char *const names[] = {"auto", "off", "recompute", "offload"};
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (strcmp(names[i], tool_text(t, OPTION_CHECKPOINT)) == 0) return (eg_checkpoint)i;
  return EG_CHECKPOINT_AUTO;
}

/* Without the option data and model decide. */
static eg_loss parse_loss(const tool *t) {
  static const char *const names[] = {"sft", "token", "classification", "multi-label", "regression", "ranking"};
  const char *text = tool_text(t, OPTION_LOSS);
  if (!tool_is_given(t, OPTION_LOSS)) return EG_LOSS_AUTO;
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (strcmp(names[i], text) == 0) return (eg_loss)(EG_LOSS_NEXT_TOKEN + (int)i);
  return EG_LOSS_COSINE;
}

static eg_lora_init parse_init(const char *text) {
  static const char *const names[] = {"default", "gaussian", "pissa"};
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (strcmp(names[i], text) == 0) return (eg_lora_init)i;
  return EG_LORA_INIT_OLORA;
}

static eg_pooling parse_pooling(const char *text) {
  static const char *const names[] = {"auto", "mean", "cls", "last"};
  for (size_t i = 0; i < EGI_COUNT(names); i++)
    if (strcmp(names[i], text) == 0) return (eg_pooling)i;
  return EG_POOLING_OUTPUT;
}

static eg_qat parse_qat(const char *text) {
  if (strcmp(text, "int4") == 0) return EG_QAT_INT4;
  if (strcmp(text, "int8") == 0) return EG_QAT_INT8;
  return strcmp(text, "nf4") == 0 ? EG_QAT_NF4 : EG_QAT_NONE;
}

tool_quant tool_quantisation(const tool *t) {
  const char *type = tool_text(t, OPTION_QUANT);
  uint64_t block = t->values[OPTION_QUANT_BLOCK].count;
  tool_quant quant = {.type = EG_QUANT_NONE, .block = block <= UINT32_MAX ? (uint32_t)block : 0};
  if (strcmp(type, "nf4") == 0) quant.type = EG_QUANT_NF4;
  if (strcmp(type, "fp4") == 0) quant.type = EG_QUANT_FP4;
  quant.is_nested = strcmp(tool_text(t, OPTION_DOUBLE_QUANT), "on") == 0;
  quant.has_head = strcmp(tool_text(t, OPTION_QUANT_HEAD), "on") == 0;
  return quant;
}

egi_objective tool_objective(const tool *t) {
  return (egi_objective){parse_loss(t), parse_pooling(tool_text(t, OPTION_POOLING)),
                         t->values[OPTION_SIMILARITY_SCALE].number};
}

static eg_status parse_budget(tool *t, tool_option_id option, const char *name, uint64_t *out_bytes) {
  const char *text = tool_text(t, option);
  if (strcmp(text, "auto") == 0) return EG_OK;
  if (tool_parse_count(text, out_bytes) && *out_bytes > 0) return EG_OK;
  return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "%s \"%s\" is neither a number of bytes nor auto", name, text);
}

eg_status training_options(tool *t, eg_trainer_options *options) {
  options->device = tool_text(t, OPTION_DEVICE);
  options->dtype = tool_dtype(t, OPTION_DTYPE);
  options->no_fuse = tool_is_given(t, OPTION_NO_FUSE);
  options->full = tool_is_given(t, OPTION_FULL);
  options->alpha = t->values[OPTION_ALPHA].number;
  options->targets = tool_text(t, OPTION_TARGETS);
  options->exclude = tool_text(t, OPTION_EXCLUDE);
  options->rslora = tool_is_given(t, OPTION_RSLORA);
  options->rank_pattern = tool_text(t, OPTION_RANK_PATTERN);
  options->alpha_pattern = tool_text(t, OPTION_ALPHA_PATTERN);
  options->dropout = t->values[OPTION_LORA_DROPOUT].number;
  options->lora_plus = t->values[OPTION_LORA_PLUS].number;
  options->target_parameters = tool_text(t, OPTION_TARGET_PARAMETERS);
  options->modules_to_save = tool_text(t, OPTION_MODULES_TO_SAVE);
  options->moe_dispatch = strcmp(tool_text(t, OPTION_MOE_DISPATCH), "loop") == 0 ? EG_MOE_LOOP : EG_MOE_FUSED;
  options->init_adapter = tool_text(t, OPTION_INIT_ADAPTER);
  options->plan = tool_text(t, OPTION_PLAN);
  options->device_description = tool_text(t, OPTION_DEVICE_DESCRIPTION);
  options->init = parse_init(tool_text(t, OPTION_INIT));
  options->learning_rate = t->values[OPTION_LR].number;
  options->schedule = parse_schedule(tool_text(t, OPTION_SCHEDULE));
  options->warmup = t->values[OPTION_WARMUP].number;
  options->weight_decay = t->values[OPTION_WEIGHT_DECAY].number;
  options->epsilon = t->values[OPTION_EPS].number;
  options->clip = t->values[OPTION_CLIP].number;
  options->optimizer =
      strcmp(tool_text(t, OPTION_OPTIMIZER), "adamw8bit") == 0 ? EG_OPTIMIZER_ADAMW_8BIT : EG_OPTIMIZER_ADAMW;
  options->offload_optimizer = strcmp(tool_text(t, OPTION_OFFLOAD_OPTIMIZER), "on") == 0;
  options->n_steps = t->values[OPTION_STEPS].count;
  options->n_epochs = t->values[OPTION_EPOCHS].number;
  options->seed = t->values[OPTION_SEED].count;
  const tool_quant quant = tool_quantisation(t);
  options->quant = quant.type;
  options->quant_block = quant.block;
  options->double_quant = quant.is_nested;
  options->quant_head = quant.has_head;
  options->qat = parse_qat(tool_text(t, OPTION_QAT));
  options->qat_asymmetric = strcmp(tool_text(t, OPTION_QAT_SYMMETRIC), "off") == 0;
  EG_TRY(narrow(t, "--qat-block", t->values[OPTION_QAT_BLOCK].count, &options->qat_block));
  const egi_objective objective = tool_objective(t);
  options->loss = objective.loss;
  options->pooling = objective.pooling;
  options->similarity_scale = objective.similarity_scale;
  options->packing = tool_packing(t);
  options->packing_cache = parse_packing_cache(t);
  options->checkpoint = parse_checkpoint(t);
  options->single_buffer = strcmp(tool_text(t, OPTION_DOUBLE_BUFFER), "off") == 0;
  if (tool_is_given(t, OPTION_STEPS) && options->n_steps == 0)
    return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "--steps 0 trains nothing");
  EG_TRY(narrow(t, "--rank", t->values[OPTION_RANK].count, &options->rank));
  EG_TRY(narrow(t, "--tokens", t->values[OPTION_TOKENS].count, &options->tokens));
  EG_TRY(narrow(t, "--accumulate", t->values[OPTION_ACCUMULATE].count, &options->accumulate));
  EG_TRY(parse_budget(t, OPTION_MEMORY_BUDGET, "--memory-budget", &options->memory_budget));
  EG_TRY(parse_budget(t, OPTION_HOST_BUDGET, "--host-budget", &options->host_budget));
  return parse_betas(t, options);
}
