/* A backend for testing the planner: a few kernels with all kinds of flags, and streams that run as late and as
 * interleaved as their events allow, so that a missing wait or a buffer reused too early gives wrong numbers. */
#ifndef ENGRAFT_TESTS_BACKEND_SUPPORT_FAKE_H
#define ENGRAFT_TESTS_BACKEND_SUPPORT_FAKE_H

#include "backend/backend.h"

/* Host memory is device memory, or not: then kernels must only see what the device allocated. */
const egi_backend *fake_backend(bool is_host);
/* In which order streams are drained when several could go on; 0: in order of the list. */
void fake_device_seed(egi_device *device, uint64_t seed);
/* Device bytes allocated and not released, over all devices of the process. */
size_t fake_bytes_in_use(void);
/* Captured courses that were launched since the start of the process, and those that are kept now. */
unsigned fake_launches(void);
unsigned fake_captured(void);

/* What a fake elementwise operator computes: exact in f32 for integers of small size, so that results can be compared
 * bit by bit. `b` is ignored by operators of one input. */
float fake_scalar(egi_op op, float a, float b);

/* ---- naive execution ------------------------------------------------------------------------------------------ */

/* Runs a graph of fake operators value by value, each in its own memory, and compares the outputs of the session.
 * `inputs[i]` are contiguous tensors. Fails the test on a difference. */
void check_against_naive(const egi_graph *graph, egi_session *session, const egi_tensor *inputs);

/* ---- graphs --------------------------------------------------------------------------------------------------- */

egi_module *parse_graph(eg_context *ctx, const char *text);
/* The plan as text, to be searched; freed with free(). */
char *plan_text(eg_context *ctx, const egi_plan *plan);
/* A graph drawn from a seed; nodes on all streams, or on one. Its name is "seed N". */
egi_module *make_random_graph(eg_context *ctx, uint64_t seed, bool has_streams);
uint32_t count_text(const char *text, const char *part);

/* Plans a graph with numbers for dims, runs it on the fake backend in `n_seeds` orders of its streams, both as host
 * memory and as memory of its own, and compares each run with the naive execution. Inputs are small integers. */
void check_graph(eg_context *ctx, egi_module *module, uint64_t n_seeds);

int make_context(void **state);
int free_context(void **state);

#endif
