/* Memory that the process could still take: what the kernel calls available, within the limit of its control group.
 * Pages of files are not counted as taken: they can be read again. */
#include "base/base.h"

#include <inttypes.h>
#include <string.h>

/* The number behind `key` in a file of "key number" lines; an empty key: the file's first number. */
static bool read_number(const char *path, const char *key, uint64_t *out) {
  char line[160];
  bool is_found = false;
  FILE *file = fopen(path, "r");
  if (file == NULL) return false;
  while (!is_found && fgets(line, sizeof line, file) != NULL) {
    size_t length = strlen(key);
    is_found = strncmp(line, key, length) == 0 && sscanf(line + length, " %" SCNu64, out) == 1;
  }
  (void)fclose(file);
  return is_found;
}

uint64_t egi_memory_available(void) {
  uint64_t available = UINT64_MAX, kibibytes, limit, taken, cached;
  if (read_number("/proc/meminfo", "MemAvailable:", &kibibytes)) available = kibibytes * 1024;
  if (!read_number("/sys/fs/cgroup/memory.max", "", &limit)) return available;
  if (!read_number("/sys/fs/cgroup/memory.current", "", &taken)) return available;
  if (!read_number("/sys/fs/cgroup/memory.stat", "file ", &cached)) cached = 0;
  taken = taken > cached ? taken - cached : 0;
  uint64_t left = limit > taken ? limit - taken : 0;
  return left < available ? left : available;
}
