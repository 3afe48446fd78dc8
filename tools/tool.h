/* The engraft command: options, messages, and one function for each subcommand. Subcommands return the exit code:
 * 0 ok, 1 failed (one line on stderr), 2 wrong usage (one line on stderr). */
#ifndef ENGRAFT_TOOLS_TOOL_H
#define ENGRAFT_TOOLS_TOOL_H

#include "train/train.h"

typedef enum tool_option_id {
#define OPTION(symbol, name, kind, commands, known, supported, default_text) OPTION_##symbol,
#include "tools/options.def"
#undef OPTION
  OPTION_COUNT
} tool_option_id;

typedef struct tool_value {
  const char *text; /* as given or the default; "" = none */
  double number;    /* REAL */
  uint64_t count;   /* COUNT */
  bool is_given;    /* on the command line or in the --config file */
} tool_value;

typedef struct tool {
  const char *command, *usage;
  char letter;
  const char *model; /* the first argument that is no option, or NULL */
  tool_value values[OPTION_COUNT];
  eg_context *ctx;
  egi_arena arena; /* texts of the --config file */
} tool;

/* options.c. Both return an exit code. */
int tool_parse(tool *t, int n_arguments, char **arguments);
int tool_check_supported(const tool *t);
void tool_print_help(const tool *t); /* usage, and each option of the command with its default, to stdout */
const char *tool_text(const tool *t, tool_option_id id); /* NULL when "" */
/* Of f32, bf16 and f16; EG_DTYPE_UNDEFINED for any other word. */
eg_dtype tool_dtype(const tool *t, tool_option_id id);
bool tool_is_given(const tool *t, tool_option_id id);

/* messages.c */
int tool_fail(const char *format, ...) EGI_PRINTF(1, 2);                      /* 1 */
int tool_fail_status(const tool *t, eg_status status);                        /* 1, with the context's message */
int tool_fail_usage(const tool *t, const char *format, ...) EGI_PRINTF(2, 3); /* 2, with the usage */
void tool_log(void *userdata, eg_log_level level, const char *message);
/* Parses "1,2,3" into the arena. EG_ERROR_ARGUMENT naming `what`. */
eg_status tool_parse_ids(tool *t, const char *what, const char *text, int32_t **out_ids, size_t *out_count);
/* K, M and G are 1024^n; false when it is no whole number below 2^64. */
bool tool_parse_count(const char *text, uint64_t *out);
bool tool_parse_real(const char *text, double *out);

/* files.c */
eg_status tool_load_model(tool *t, eg_model **out_model);
eg_status tool_load_dataset(tool *t, const char *path, bool is_text, eg_dataset **out_dataset);
/* A whole file from a writer; removed when something fails. */
eg_status tool_write_file(tool *t, const char *path,
                          eg_status (*produce)(const void *object, eg_write_function write, void *userdata),
                          const void *object);
int tool_write_stream(void *userdata, const void *bytes, size_t size_bytes); /* to a FILE */

/* train_options.c: --loss, --pooling and --similarity-scale; --pack. */
egi_objective tool_objective(const tool *t);
eg_packing tool_packing(const tool *t);
/* --quant, --quant-block, --double-quant and --quant-head. */
typedef struct tool_quant {
  eg_quant type;
  uint32_t block; /* 0: none that is possible */
  int is_nested, has_head;
} tool_quant;
tool_quant tool_quantisation(const tool *t);

/* train_signals.c: before any thread is made, so that none of them takes SIGINT or SIGTERM. */
void tool_block_signals(void);

int tool_inspect(tool *t);
int tool_rewrite(tool *t);
int tool_run(tool *t);
int tool_plan(tool *t);
int tool_train(tool *t);
int tool_eval(tool *t);
int tool_generate(tool *t);
int tool_export(tool *t);
int tool_new(tool *t);
int tool_bench(tool *t);
int tool_devices(tool *t);

#endif
