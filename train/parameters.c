/* Trainable tensors in and out of a pool, in the layout of the files they are saved to. */
#include "train/train.h"

#include <string.h>

uint64_t egi_state_count(const egi_state *state) {
  uint64_t count = 1;
  for (int i = 0; i < state->rank; i++) count *= (uint64_t)state->dims[i];
  return count;
}

int egi_state_file_dims(const egi_state *state, int64_t dims[EGI_MAX_RANK]) {
  memcpy(dims, state->dims, EGI_MAX_RANK * sizeof *dims);
  if (state->is_vector) {
    dims[0] = (int64_t)egi_state_count(state);
    return 1;
  }
  if (state->is_transposed) {
    dims[0] = state->dims[1];
    dims[1] = state->dims[0];
  }
  return state->rank;
}

/* [rows, columns] -> [columns, rows] */
static void transpose(const float *source, size_t rows, size_t columns, float *target) {
  for (size_t r = 0; r < rows; r++)
    for (size_t c = 0; c < columns; c++) target[c * rows + r] = source[r * columns + c];
}

static void *place_of(const egi_machine *machine, const egi_state *state, egi_state_pool pool) {
  return (float *)egi_store_pool(machine->store, pool) + state->offset;
}

eg_status egi_state_read(const egi_machine *machine, const egi_state *state, egi_state_pool pool, float *values) {
  size_t size_bytes = (size_t)egi_state_count(state) * sizeof(float);
  const void *place = place_of(machine, state, pool);
  if (!state->is_transposed) return egi_store_read_pool(machine->store, pool, place, values, size_bytes);
  float *copy = egi_allocate(machine->ctx, EGI_PURPOSE_DATA, size_bytes);
  if (copy == NULL) return EG_ERROR_MEMORY;
  eg_status status = egi_store_read_pool(machine->store, pool, place, copy, size_bytes);
  if (status == EG_OK) transpose(copy, (size_t)state->dims[0], (size_t)state->dims[1], values);
  egi_release(machine->ctx, EGI_PURPOSE_DATA, copy, size_bytes);
  return status;
}

eg_status egi_state_write(egi_machine *machine, const egi_state *state, egi_state_pool pool, const float *values) {
  size_t size_bytes = (size_t)egi_state_count(state) * sizeof(float);
  void *place = place_of(machine, state, pool);
  if (!state->is_transposed) return egi_store_write_pool(machine->store, pool, place, values, size_bytes);
  float *copy = egi_allocate(machine->ctx, EGI_PURPOSE_DATA, size_bytes);
  if (copy == NULL) return EG_ERROR_MEMORY;
  transpose(values, (size_t)state->dims[1], (size_t)state->dims[0], copy);
  eg_status status = egi_store_write_pool(machine->store, pool, place, copy, size_bytes);
  egi_release(machine->ctx, EGI_PURPOSE_DATA, copy, size_bytes);
  return status;
}
