/* libFuzzer's entry: FUZZ_TARGET names the target. Built with -DENGRAFT_FUZZ=ON by clang. Half of the changes to an
 * ONNX file are those of the damaged-file generator, since changed bytes rarely get past the wire guard. */
#include "damage.h"
#include "fuzz.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t size, size_t capacity);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t capacity, unsigned seed);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  static const fuzz_target *target;
  fuzz_result result;
  if (target == NULL) target = fuzz_find_target(FUZZ_TARGET);
  target->run(bytes, size, NULL, &result);
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t capacity, unsigned seed) {
  static eg_context *ctx; /* for the generator's memory; lives as long as the program */
  egi_arena arena;
  size_t damaged_size = 0;
  if (strcmp(FUZZ_TARGET, "onnx") != 0 || seed % 2 == 0) return LLVMFuzzerMutate(bytes, size, capacity);
  if (ctx == NULL && eg_context_create(NULL, &ctx) != EG_OK) return 0;
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  unsigned kind = (seed >> 1) % damage_kind_count();
  const uint8_t *damaged = damage_file(&arena, bytes, size, kind, seed, &damaged_size);
  bool is_usable = damaged != NULL && damaged_size <= capacity;
  if (is_usable) memcpy(bytes, damaged, damaged_size);
  egi_arena_clear(&arena);
  return is_usable ? damaged_size : LLVMFuzzerMutate(bytes, size, capacity);
}
