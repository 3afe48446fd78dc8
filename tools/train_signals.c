/* Signals without a handler and without globals: SIGINT and SIGTERM are blocked before the first thread is made and
 * taken by one thread that waits for them. */
#include "tools/train.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

/* How long the watcher may take to notice that the run is over. */
static const struct timespec patience = {0, 50000000};

static void fill_set(sigset_t *set) {
  sigemptyset(set);
  sigaddset(set, SIGINT);
  sigaddset(set, SIGTERM);
}

void tool_block_signals(void) {
  sigset_t set;
  fill_set(&set);
  (void)pthread_sigmask(SIG_BLOCK, &set, NULL);
}

static void *watch(void *argument) {
  training *run = argument;
  sigset_t set;
  fill_set(&set);
  for (unsigned n = 0; !atomic_load(&run->is_watch_over);) {
    if (sigtimedwait(&set, NULL, &patience) <= 0) continue;
    eg_trainer *trainer = atomic_load(&run->watched);
    if (n++ > 0 || trainer == NULL) _exit(1);
    eg_trainer_request_stop(trainer);
  }
  return NULL;
}

eg_status training_watch_signals(training *run) {
  if (pthread_create(&run->watcher, NULL, watch, run) != 0)
    return egi_fail(run->t->ctx, EG_ERROR_MEMORY, "a thread cannot be made");
  run->is_watched = true;
  return EG_OK;
}

void training_unwatch_signals(training *run) {
  if (!run->is_watched) return;
  atomic_store(&run->is_watch_over, true);
  (void)pthread_join(run->watcher, NULL);
  run->is_watched = false;
}
