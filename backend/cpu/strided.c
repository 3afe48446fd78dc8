/* Loops over several tensors of any strides; see strided.h. */
#include "backend/cpu/strided.h"

void egi_strided_init(egi_strided *loop, const egi_tensor *output) {
  *loop = (egi_strided){.n_operands = 1, .rank = output->rank, .count = egi_tensor_count(output)};
  int64_t element_bytes = (int64_t)egi_element_bytes(output->dtype);
  for (int i = 0; i < output->rank; i++) {
    loop->dims[i] = output->dims[i];
    loop->strides[0][i] = output->strides[i] * element_bytes;
  }
  loop->data[0] = output->data;
}

void egi_strided_add(egi_strided *loop, const egi_tensor *input) {
  int64_t element_bytes = (int64_t)egi_element_bytes(input->dtype);
  unsigned k = loop->n_operands++;
  int missing = loop->rank - input->rank;
  for (int i = 0; i < loop->rank; i++) {
    bool is_broadcast = i < missing || input->dims[i - missing] == 1;
    loop->strides[k][i] = is_broadcast ? 0 : input->strides[i - missing] * element_bytes;
  }
  loop->data[k] = input->data;
}

static int64_t magnitude(int64_t value) {
  return value < 0 ? -value : value;
}

static void swap_dims(egi_strided *loop, int a, int b) {
  int64_t dim = loop->dims[a];
  loop->dims[a] = loop->dims[b];
  loop->dims[b] = dim;
  for (unsigned k = 0; k < loop->n_operands; k++) {
    int64_t stride = loop->strides[k][a];
    loop->strides[k][a] = loop->strides[k][b];
    loop->strides[k][b] = stride;
  }
}

static bool can_merge(const egi_strided *loop, int outer, int inner) {
  for (unsigned k = 0; k < loop->n_operands; k++) {
    if (loop->strides[k][outer] != loop->strides[k][inner] * loop->dims[inner]) return false;
  }
  return true;
}

static void move_dim(egi_strided *loop, int to, int from) {
  loop->dims[to] = loop->dims[from];
  for (unsigned k = 0; k < loop->n_operands; k++) loop->strides[k][to] = loop->strides[k][from];
}

void egi_strided_collapse(egi_strided *loop) {
  int rank = 0;
  for (int i = 0; i < loop->rank; i++) {
    if (loop->dims[i] != 1) move_dim(loop, rank++, i);
  }
  /* Stable insertion sort: the output's largest stride first. */
  for (int i = 1; i < rank; i++) {
    for (int j = i; j > 0 && magnitude(loop->strides[0][j - 1]) < magnitude(loop->strides[0][j]); j--) {
      swap_dims(loop, j - 1, j);
    }
  }
  int merged = 0;
  for (int i = 1; i < rank; i++) {
    if (can_merge(loop, merged, i)) {
      int64_t dim = loop->dims[merged];
      move_dim(loop, merged, i);
      loop->dims[merged] *= dim;
    } else {
      move_dim(loop, ++merged, i);
    }
  }
  loop->rank = rank == 0 ? 1 : merged + 1;
  if (rank == 0) {
    loop->dims[0] = loop->count;
    for (unsigned k = 0; k < loop->n_operands; k++) loop->strides[k][0] = 0;
  }
}

void egi_strided_range(const egi_strided *loop, int64_t start, int64_t end, egi_inner inner, const void *params) {
  int64_t index[EGI_MAX_RANK];
  char *data[EGI_STRIDED_OPERANDS];
  int64_t strides[EGI_STRIDED_OPERANDS];
  int last = loop->rank - 1;
  int64_t rest = start;
  for (unsigned k = 0; k < loop->n_operands; k++) data[k] = loop->data[k], strides[k] = loop->strides[k][last];
  for (int i = last; i >= 0 && start < end; i--) {
    index[i] = rest % loop->dims[i];
    rest /= loop->dims[i];
    for (unsigned k = 0; k < loop->n_operands; k++) data[k] += index[i] * loop->strides[k][i];
  }
  while (start < end) {
    int64_t n = loop->dims[last] - index[last];
    if (n > end - start) n = end - start;
    inner(params, data, strides, n);
    start += n;
    if (start == end) break;
    /* The inner run ended at the end of its dim: back to its start, and one further in the dims around it. */
    for (unsigned k = 0; k < loop->n_operands; k++) data[k] -= index[last] * strides[k];
    index[last] = 0;
    for (int i = last - 1; i >= 0; i--) {
      for (unsigned k = 0; k < loop->n_operands; k++) data[k] += loop->strides[k][i];
      if (++index[i] < loop->dims[i]) break;
      for (unsigned k = 0; k < loop->n_operands; k++) data[k] -= index[i] * loop->strides[k][i];
      index[i] = 0;
    }
  }
}

typedef struct range_task {
  const egi_strided *loop;
  int64_t task_elements;
  egi_inner inner;
  const void *params;
} range_task;

static void run_range(void *argument, size_t index, size_t worker) {
  (void)worker;
  const range_task *task = argument;
  int64_t start = (int64_t)index * task->task_elements;
  int64_t end = start + task->task_elements;
  if (end > task->loop->count) end = task->loop->count;
  egi_strided_range(task->loop, start, end, task->inner, task->params);
}

void egi_strided_run(egi_pool *pool, const egi_strided *loop, int64_t task_elements, egi_inner inner,
                     const void *params) {
  if (loop->count <= 0) return;
  range_task task = {loop, task_elements, inner, params};
  int64_t n_tasks = (loop->count + task_elements - 1) / task_elements;
  if (pool == NULL || n_tasks == 1) {
    egi_strided_range(loop, 0, loop->count, inner, params);
  } else {
    egi_pool_run(pool, (size_t)n_tasks, run_range, &task);
  }
}
