/* Fuzz targets: what is done with spoiled bytes. The same functions run under libFuzzer (entry.c), over the corpus in
 * the ordinary tests (replay.c) and over damaged files (test_damage). They abort when an invariant is broken. */
#ifndef ENGRAFT_TESTS_FUZZ_H
#define ENGRAFT_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Host memory that one input may take; beyond it the allocator says no. */
#define FUZZ_MAX_BYTES ((size_t)512 << 20)

typedef struct fuzz_result {
  bool is_accepted;
  size_t peak_bytes;
  char error[512]; /* one line, when not accepted */
} fuzz_result;

typedef struct fuzz_target {
  const char *name;
  /* `directory`: where external data of an ONNX file lies, or NULL. */
  void (*run)(const uint8_t *bytes, size_t size, const char *directory, fuzz_result *out_result);
} fuzz_target;

/* onnx: file bytes → wire guard → protobuf → import → canonicalise → names → text; text: the ONNX text syntax and back;
 * safetensors; jsonl: documents; json: config.json and the graph that it describes. NULL: no such target. */
const fuzz_target *fuzz_find_target(const char *name);

#endif
