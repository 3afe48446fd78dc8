/* What a run trains, counted by class of module: the last part of a path, "q_proj". */
#include "tools/train.h"

#include <inttypes.h>
#include <string.h>

typedef enum kind { KIND_ADAPTER, KIND_WHOLE, KINDS } kind;

typedef struct counter {
  egi_map classes[KINDS]; /* class -> place */
  const char **names[KINDS];
  uint32_t *counts[KINDS];
  uint32_t n[KINDS];
  uint64_t n_modules[KINDS], n_numbers;
} counter;

static bool cut_suffix(const char *name, const char *suffix, size_t *length) {
  size_t n = strlen(suffix);
  if (*length < n || strncmp(name + *length - n, suffix, n) != 0) return false;
  *length -= n;
  return true;
}

static eg_status count_module(training *run, counter *c, kind which, const char *path, size_t length) {
  egi_arena *arena = &run->t->arena;
  uint32_t place = c->n[which];
  while (cut_suffix(path, ".base_layer", &length)) continue; /* PEFT's second wrapper of experts */
  size_t start = length;
  while (start > 0 && path[start - 1] != '.') start--;
  const char *name = egi_arena_copy_text(arena, path + start, length - start);
  if (name == NULL) return EG_ERROR_MEMORY;
  if (!egi_map_get(&c->classes[which], name, &place)) {
    EG_TRY(egi_map_put(&c->classes[which], name, place));
    c->names[which][c->n[which]++] = name;
  }
  c->counts[which][place]++;
  c->n_modules[which]++;
  return EG_OK;
}

/* An adapter has two tensors and counts once, and so does a module with a bias. */
static eg_status count_tensor(training *run, counter *c, const eg_parameter_info *info) {
  size_t length = strlen(info->name);
  uint64_t n = 1;
  for (uint32_t axis = 0; axis < info->rank; axis++) n *= (uint64_t)info->dims[axis];
  c->n_numbers += n;
  if (cut_suffix(info->name, ".lora_A.weight", &length)) return count_module(run, c, KIND_ADAPTER, info->name, length);
  if (cut_suffix(info->name, ".lora_B.weight", &length) || cut_suffix(info->name, ".bias", &length)) return EG_OK;
  (void)cut_suffix(info->name, ".weight", &length);
  return count_module(run, c, KIND_WHOLE, info->name, length);
}

static void add_kind(const counter *c, kind which, const char *noun, egi_text *line) {
  if (c->n_modules[which] == 0) return;
  egi_text_format(line, "%s%" PRIu64 " %s:", line->length > 0 ? "; " : "", c->n_modules[which], noun);
  for (uint32_t i = 0; i < c->n[which]; i++)
    egi_text_format(line, "%s %u %s", i > 0 ? "," : "", c->counts[which][i], c->names[which][i]);
}

static eg_status count_all(training *run, counter *c) {
  egi_arena *arena = &run->t->arena;
  size_t n = eg_trainer_parameter_count(run->trainer);
  for (int i = 0; i < KINDS; i++) {
    egi_map_init(&c->classes[i], arena);
    c->names[i] = EGI_NEW(arena, const char *, n + 1);
    c->counts[i] = EGI_NEW(arena, uint32_t, n + 1);
    if (c->names[i] == NULL || c->counts[i] == NULL) return EG_ERROR_MEMORY;
  }
  for (size_t i = 0; i < n; i++) {
    eg_parameter_info info;
    EG_TRY(eg_trainer_parameter_info(run->trainer, i, &info));
    EG_TRY(count_tensor(run, c, &info));
  }
  return EG_OK;
}

eg_status training_print_counts(training *run) {
  counter c = {.n_numbers = 0};
  egi_text line;
  EG_TRY(count_all(run, &c));
  egi_text_init(&line, run->t->ctx);
  add_kind(&c, KIND_ADAPTER, "adapters", &line);
  add_kind(&c, KIND_WHOLE, "modules whole", &line);
  eg_status status = egi_text_status(&line);
  if (status == EG_OK) printf("trains %s; %" PRIu64 " numbers\n", egi_text_string(&line), c.n_numbers);
  egi_text_free(&line);
  return status;
}
