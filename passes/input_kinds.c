/* What an input holds, by its name. */
#include <string.h>

#include "passes/passes.h"

egi_input_kind egi_input_kind_of(const char *name) {
  static const struct {
    const char *name;
    egi_input_kind kind;
  } rows[] = {
#define INPUT_NAME(name, kind) {name, EGI_INPUT_##kind},
#include "passes/inputs.def"
#undef INPUT_NAME
  };
  for (size_t i = 0; i < EGI_COUNT(rows); i++)
    if (strcmp(rows[i].name, name) == 0) return rows[i].kind;
  return EGI_INPUT_OTHER;
}
