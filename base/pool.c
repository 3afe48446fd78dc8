/* The thread pool: tasks of one call are handed out by an atomic counter, the caller works along. A worker sleeps on a
 * condition only after it has spun for longer than a step's calls lie apart, so that they do not pay a wake-up each. */
#include "base/context.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { SPIN_ROUNDS = 100000, MAX_THREADS = 256 };

typedef struct pool_thread {
  struct egi_pool *pool;
  pthread_t handle;
  size_t worker;
} pool_thread;

struct egi_pool {
  size_t n_workers; /* the caller is worker 0 */
  size_t n_started;
  pool_thread *threads;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  egi_task task;
  void *argument;
  size_t n_tasks;
  atomic_size_t next_task;
  atomic_size_t n_busy; /* started threads that have not finished the present round */
  atomic_ulong round;   /* counts calls; a change starts the workers */
  atomic_bool is_stopping;
};

static void take_tasks(egi_pool *pool, size_t worker) {
  for (;;) {
    size_t index = atomic_fetch_add_explicit(&pool->next_task, 1, memory_order_relaxed);
    if (index >= pool->n_tasks) return;
    pool->task(pool->argument, index, worker);
  }
}

/* Returns when `round` has moved on from `seen` or the pool stops. */
static void wait_for_round(egi_pool *pool, unsigned long seen) {
  for (int i = 0; i < SPIN_ROUNDS; i++) {
    if (atomic_load(&pool->round) != seen || atomic_load(&pool->is_stopping)) return;
    if (i % 64 == 63) sched_yield();
  }
  pthread_mutex_lock(&pool->mutex);
  while (atomic_load(&pool->round) == seen && !atomic_load(&pool->is_stopping))
    pthread_cond_wait(&pool->wake, &pool->mutex);
  pthread_mutex_unlock(&pool->mutex);
}

static void *run_thread(void *argument) {
  pool_thread *thread = argument;
  egi_pool *pool = thread->pool;
  unsigned long seen = 0;
  for (;;) {
    wait_for_round(pool, seen);
    if (atomic_load(&pool->is_stopping)) return NULL;
    seen++;
    take_tasks(pool, thread->worker);
    atomic_fetch_sub(&pool->n_busy, 1);
  }
}

void egi_pool_run(egi_pool *pool, size_t n_tasks, egi_task task, void *argument) {
  if (n_tasks <= 1 || pool->n_started == 0) {
    for (size_t i = 0; i < n_tasks; i++) task(argument, i, 0);
    return;
  }
  pool->task = task;
  pool->argument = argument;
  pool->n_tasks = n_tasks;
  atomic_store(&pool->next_task, 0);
  atomic_store(&pool->n_busy, pool->n_started);
  pthread_mutex_lock(&pool->mutex);
  atomic_fetch_add(&pool->round, 1);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
  take_tasks(pool, 0);
  for (unsigned i = 0; atomic_load(&pool->n_busy) != 0; i++)
    if (i % 64 == 63) sched_yield();
}

size_t egi_pool_size(const egi_pool *pool) {
  return pool->n_workers;
}

static size_t count_cores(void) {
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores < 1 ? 1 : cores > MAX_THREADS ? MAX_THREADS : (size_t)cores;
}

eg_status egi_pool_create(eg_context *ctx, int n_threads, egi_pool **out_pool) {
  size_t n_workers = n_threads > MAX_THREADS ? MAX_THREADS : n_threads > 0 ? (size_t)n_threads : count_cores();
  egi_pool *pool = egi_allocate(ctx, EGI_PURPOSE_GRAPH, sizeof *pool);
  if (pool == NULL) return EG_ERROR_MEMORY;
  memset(pool, 0, sizeof *pool);
  pool->n_workers = n_workers;
  pool->threads = egi_allocate(ctx, EGI_PURPOSE_GRAPH, n_workers * sizeof *pool->threads);
  if (pool->threads == NULL) {
    egi_release(ctx, EGI_PURPOSE_GRAPH, pool, sizeof *pool);
    return EG_ERROR_MEMORY;
  }
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  for (size_t i = 1; i < n_workers; i++) {
    pool_thread *thread = &pool->threads[pool->n_started];
    *thread = (pool_thread){.pool = pool, .worker = i};
    if (pthread_create(&thread->handle, NULL, run_thread, thread) != 0) break; /* fewer threads, same results */
    pool->n_started++;
  }
  *out_pool = pool;
  return EG_OK;
}

void egi_pool_destroy(eg_context *ctx, egi_pool *pool) {
  if (pool == NULL) return;
  pthread_mutex_lock(&pool->mutex);
  atomic_store(&pool->is_stopping, true);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
  for (size_t i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i].handle, NULL);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
  egi_release(ctx, EGI_PURPOSE_GRAPH, pool->threads, pool->n_workers * sizeof *pool->threads);
  egi_release(ctx, EGI_PURPOSE_GRAPH, pool, sizeof *pool);
}
