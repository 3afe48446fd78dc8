/* The inside of a context, for base/ alone. */
#ifndef ENGRAFT_BASE_CONTEXT_H
#define ENGRAFT_BASE_CONTEXT_H

#include "base/base.h"

struct eg_context {
  eg_allocator allocator;
  eg_log_function log;
  void *log_userdata;
  egi_pool *pool;
  unsigned references;
  uint64_t n_allocations;
  size_t bytes_in_use[EGI_PURPOSE_COUNT];
  size_t spare_bytes[EGI_PURPOSE_COUNT]; /* of these, in arenas and not handed out */
  size_t touched_bytes, peak_bytes;      /* of all purposes, without what is spare */
  char error[1024];
};

#endif
