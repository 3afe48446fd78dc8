/* engraft generate: continues a prompt. Tokens of byte-level models are bytes; of others, numbers. */
#include "tools/tool.h"

#include <string.h>

/* Vocabularies of byte-level models: the bytes alone, since nothing beside the model says more. */
enum { BYTE_VOCABULARY = 256 };

typedef struct printer {
  bool is_text, is_first;
} printer;

static int print_token(void *userdata, int32_t token) {
  printer *p = userdata;
  if (p->is_text)
    putchar(token);
  else
    printf("%s%d", p->is_first ? "" : ",", token);
  p->is_first = false;
  return fflush(stdout) == 0 ? 0 : 1;
}

static eg_status read_prompt(tool *t, const eg_runner *runner, int32_t **out_ids, size_t *out_count) {
  const char *text = tool_text(t, OPTION_PROMPT);
  if (text == NULL) return tool_parse_ids(t, "--prompt-ids", tool_text(t, OPTION_PROMPT_IDS), out_ids, out_count);
  int64_t vocabulary = egi_logits_count(runner->machine.graph);
  if (vocabulary != BYTE_VOCABULARY)
    return egi_fail(
        t->ctx, EG_ERROR_UNSUPPORTED,
        "--prompt needs a byte-level model (256 tokens) in this version, this one has %lld; use --prompt-ids",
        (long long)vocabulary);
  *out_count = strlen(text);
  *out_ids = EGI_NEW(&t->arena, int32_t, *out_count);
  if (*out_ids == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < *out_count; i++) (*out_ids)[i] = (unsigned char)text[i];
  return EG_OK;
}

static eg_status set_options(tool *t, eg_generate_options *options) {
  int32_t *stop_ids = NULL;
  if (t->values[OPTION_MAX_TOKENS].count > INT32_MAX || t->values[OPTION_TOP_K].count > INT32_MAX)
    return egi_fail(t->ctx, EG_ERROR_ARGUMENT, "--max-tokens or --top-k is out of range");
  options->max_tokens = (uint32_t)t->values[OPTION_MAX_TOKENS].count;
  options->temperature = t->values[OPTION_TEMPERATURE].number;
  options->top_k = (uint32_t)t->values[OPTION_TOP_K].count;
  options->top_p = t->values[OPTION_TOP_P].number;
  options->seed = t->values[OPTION_SEED].count;
  if (tool_text(t, OPTION_STOP) == NULL) return EG_OK;
  EG_TRY(tool_parse_ids(t, "--stop", tool_text(t, OPTION_STOP), &stop_ids, &options->n_stop_ids));
  options->stop_ids = stop_ids;
  return EG_OK;
}

static eg_status generate(tool *t, eg_runner *runner) {
  eg_generate_options options = EG_GENERATE_OPTIONS_INIT;
  printer p = {tool_text(t, OPTION_PROMPT) != NULL, true};
  int32_t *ids;
  size_t n;
  EG_TRY(set_options(t, &options));
  EG_TRY(read_prompt(t, runner, &ids, &n));
  if (p.is_text) fputs(tool_text(t, OPTION_PROMPT), stdout);
  eg_status status = eg_runner_generate(runner, ids, n, &options, print_token, &p);
  if (status == EG_OK || !p.is_first) putchar('\n');
  return status;
}

int tool_generate(tool *t) {
  eg_model *model = NULL;
  eg_runner *runner = NULL;
  eg_runner_options options = EG_RUNNER_OPTIONS_INIT;
  if ((tool_text(t, OPTION_PROMPT) == NULL) == (tool_text(t, OPTION_PROMPT_IDS) == NULL))
    return tool_fail_usage(t, "one of --prompt and --prompt-ids is needed");
  options.device = tool_text(t, OPTION_DEVICE);
  options.dtype = tool_dtype(t, OPTION_DTYPE);
  options.no_fuse = tool_is_given(t, OPTION_NO_FUSE);
  options.adapter = tool_text(t, OPTION_ADAPTER);
  tool_quant quant = tool_quantisation(t);
  options.quant = quant.type;
  options.quant_block = quant.block;
  options.double_quant = quant.is_nested;
  options.quant_head = quant.has_head;
  eg_status status = tool_load_model(t, &model);
  if (status == EG_OK) status = eg_runner_create(model, &options, &runner);
  if (status == EG_OK) status = generate(t, runner);
  eg_runner_destroy(runner);
  eg_model_destroy(model);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
