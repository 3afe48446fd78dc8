/* The engraft command: finds the subcommand, parses its options, makes the context. */
#include "tools/tool.h"

#include <string.h>

typedef struct command {
  const char *name;
  char letter;
  bool takes_model;
  int (*run)(tool *t);
  const char *usage;
} command;

/* Names of DESIGN that this version does not have yet have no function. */
static const command commands[] = {
    {"inspect", 'i', true, tool_inspect, "engraft inspect MODEL [--json]"},
    {"rewrite", 'r', true, tool_rewrite,
     "engraft rewrite MODEL -o OUT [--passes a,b | training] [--text] [--report FILE.json] [--verify-rewrites] [train "
     "options]"},
    {"run", 'R', true, tool_run,
     "engraft run MODEL --inputs IN.safetensors --outputs OUT.safetensors [--adapter DIR] [--device D] [--dtype "
     "f32|file]"},
    {"train", 't', true, tool_train,
     "engraft train MODEL (--data FILE | --text FILE) --out DIR [--config FILE.json] [options]"},
    {"eval", 'e', true, tool_eval, "engraft eval MODEL (--data FILE | --text FILE) [--adapter DIR] [--json]"},
    {"generate", 'g', true, tool_generate,
     "engraft generate MODEL [--adapter DIR] (--prompt TEXT | --prompt-ids 1,2,3) [--max-tokens N] [--seed N]"},
    {"export", 'x', true, tool_export,
     "engraft export MODEL [--adapter DIR] --format peft|onnx_adapter|gguf|merged|bnb -o OUT [--dtype "
     "f32|f16|bf16|nf4] "
     "[--portable] [--base original|dequantised] [--data FILE]"},
    {"new", 'n', false, tool_new,
     "engraft new --config config.json (--weights DIR | --random-weights SEED) [--dtype f32|bf16|f16] -o MODEL"},
    {"bench", 'b', true, tool_bench, "engraft bench MODEL --steps N [--tokens N] [--json] [train options]"},
    {"plan", 'p', true, tool_plan,
     "engraft plan MODEL [--data FILE | --text FILE] [train options] [--device-description FILE.json] [-o FILE] "
     "[--json]"},
    {"report", '?', true, NULL, ""},
    {"devices", 'd', false, tool_devices, "engraft devices [--json]"}};

static const char *const summary =
    "usage: engraft inspect|rewrite|run|plan|train|eval|generate|export|new|bench|devices …";

static int run_command(tool *t, const command *found) {
  if (found->takes_model && t->model == NULL) return tool_fail_usage(t, "MODEL is missing");
  if (!found->takes_model && t->model != NULL) return tool_fail_usage(t, "unexpected argument \"%s\"", t->model);
  int code = tool_check_supported(t);
  return code == 0 ? found->run(t) : code;
}

/* The context is made before the options are read, because their texts lie in one of its arenas; threads come with the
 * second one. */
static int run(const command *found, int n_arguments, char **arguments) {
  tool t = {.command = found->name, .usage = found->usage, .letter = found->letter};
  if (n_arguments == 1 && strcmp(arguments[0], "--help") == 0) {
    tool_print_help(&t);
    return 0;
  }
  if (found->run == tool_train) tool_block_signals();
  eg_context_options options = EG_CONTEXT_OPTIONS_INIT;
  eg_context *parse_context;
  options.log = tool_log;
  options.n_threads = 1;
  if (eg_context_create(&options, &parse_context) != EG_OK) return tool_fail("out of memory");
  egi_arena_init(&t.arena, parse_context, EGI_PURPOSE_DATA);
  t.ctx = parse_context;
  int code = tool_parse(&t, n_arguments, arguments);
  options.n_threads = (int)t.values[OPTION_THREADS].count;
  if (code == 0 && t.values[OPTION_THREADS].count > 1024) code = tool_fail_usage(&t, "--threads is out of range");
  if (code == 0 && eg_context_create(&options, &t.ctx) != EG_OK) code = tool_fail("out of memory");
  if (code == 0) code = run_command(&t, found);
  if (t.ctx != parse_context) eg_context_destroy(t.ctx);
  egi_arena_clear(&t.arena);
  eg_context_destroy(parse_context);
  return code;
}

int main(int n_arguments, char **arguments) {
  const char *name = n_arguments > 1 ? arguments[1] : "";
  if (strcmp(name, "--version") == 0 || strcmp(name, "--help") == 0) {
    printf("engraft %s\n%s\n", eg_version(), summary);
    for (size_t i = 0; i < EGI_COUNT(commands) && strcmp(name, "--help") == 0; i++)
      if (commands[i].run != NULL) printf("  %s\n", commands[i].usage);
    return 0;
  }
  for (size_t i = 0; i < EGI_COUNT(commands); i++) {
    if (strcmp(commands[i].name, name) != 0) continue;
    if (commands[i].run == NULL) return tool_fail("the command \"%s\" is not in this version", name);
    return run(&commands[i], n_arguments - 2, arguments + 2);
  }
  if (name[0] == '\0')
    fprintf(stderr, "engraft: %s\n", summary);
  else
    fprintf(stderr, "engraft: there is no command \"%s\"; %s\n", name, summary);
  return 2;
}
