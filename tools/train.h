/* What the files of `engraft train` share. */
#ifndef ENGRAFT_TOOLS_TRAIN_H
#define ENGRAFT_TOOLS_TRAIN_H

#include <pthread.h>
#include <stdatomic.h>

#include "tools/tool.h"

typedef struct training {
  tool *t;
  eg_model *model;
  eg_dataset *dataset, *evaluation;
  eg_trainer *trainer;
  FILE *log;
  bool is_terminal, is_finished;
  uint64_t n_steps, n_done;
  uint64_t *expert_tokens; /* room for two lists; NULL until a line needs it */
  uint64_t saved_step;     /* of the newest checkpoint of this run; 0: none */
  bool has_best;
  double best_loss;
  uint64_t n_worse; /* evaluations since the best */
  pthread_t watcher;
  bool is_watched;
  atomic_bool is_watch_over;
  _Atomic(eg_trainer *) watched; /* NULL while there is nothing to stop gently */
} training;

/* train_options.c */
eg_status training_options(tool *t, eg_trainer_options *options);
/* train_counts.c: one line before the first step. */
eg_status training_print_counts(training *run);
/* train_save.c */
eg_status training_save(training *run, const char *directory);
eg_status training_dump_gradients(training *run);
/* train_resume.c */
eg_status training_save_checkpoint(training *run, uint64_t step);
/* The newest checkpoint of --out: the trainer and `run` are as they were when it was written. */
eg_status training_resume(training *run);
eg_status training_cut_log(training *run, const char *path);
/* train_signals.c: SIGINT and SIGTERM ask the trainer to stop, from a thread that waits for them; before there is one,
 * and the second time, they end the process. */
eg_status training_watch_signals(training *run);
void training_unwatch_signals(training *run);

#endif
