/* Checkpoints of `engraft train`: OUT/checkpoint-N appears whole or not at all, old ones go, --resume goes on from the
 * newest. Beside what training_save() writes it holds the trainer's state and the command's own. */
#include "tools/train.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#define STATE_NAME "trainer.safetensors"
#define RUN_NAME "run.json"
#define PREFIX "checkpoint-"
#define PARTIAL ".partial"

static const char *const saved_names[] = {
    "adapter_config.json", "adapter_model.safetensors", "model.onnx", "model.onnx.data", STATE_NAME, RUN_NAME};

static const char *checkpoint_path(training *run, uint64_t step, const char *suffix) {
  return egi_arena_format(&run->t->arena, "%s/" PREFIX "%" PRIu64 "%s", tool_text(run->t, OPTION_OUT), step, suffix);
}

/* Whether a file is what a killed run left of one that it was writing: "NAME.tmp-1234" (egi_file_create). */
static bool is_leftover(const char *entry) {
  for (size_t i = 0; i < EGI_COUNT(saved_names); i++) {
    size_t length = strlen(saved_names[i]);
    if (strncmp(entry, saved_names[i], length) == 0 && egi_has_prefix(entry + length, ".tmp-")) return true;
  }
  return false;
}

static void remove_leftovers(training *run, const char *directory) {
  const struct dirent *entry;
  DIR *folder = opendir(directory);
  while (folder != NULL && (entry = readdir(folder)) != NULL) {
    const char *path = is_leftover(entry->d_name) ? egi_path_join(&run->t->arena, directory, entry->d_name) : NULL;
    if (path != NULL) (void)unlink(path);
  }
  if (folder != NULL) closedir(folder);
}

/* Removes what a checkpoint consists of; a folder with anything else in it stays. */
static void remove_checkpoint(training *run, const char *directory) {
  remove_leftovers(run, directory);
  for (size_t i = 0; i < EGI_COUNT(saved_names); i++) {
    const char *path = egi_path_join(&run->t->arena, directory, saved_names[i]);
    if (path != NULL) (void)unlink(path);
  }
  (void)rmdir(directory);
}

/* ---- which there are ---- */

static bool parse_name(const char *name, uint64_t *out_step) {
  if (!egi_has_prefix(name, PREFIX)) return false;
  const char *digits = name + sizeof PREFIX - 1;
  if (*digits == '\0' || digits[strspn(digits, "0123456789")] != '\0') return false;
  return tool_parse_count(digits, out_step);
}

static int compare_steps(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

/* What killed runs left: files half written, and checkpoints that never were whole. */
static void remove_partial(training *run) {
  const char *out = tool_text(run->t, OPTION_OUT);
  const struct dirent *entry;
  DIR *folder = opendir(out);
  remove_leftovers(run, out);
  while (folder != NULL && (entry = readdir(folder)) != NULL) {
    bool is_partial = egi_has_prefix(entry->d_name, PREFIX) && egi_has_suffix(entry->d_name, PARTIAL);
    const char *path = is_partial ? egi_path_join(&run->t->arena, out, entry->d_name) : NULL;
    if (path != NULL) remove_checkpoint(run, path);
  }
  if (folder != NULL) closedir(folder);
}

/* Steps of the checkpoints that can be gone on from, rising. */
static eg_status list_checkpoints(training *run, uint64_t **out_steps, uint32_t *out_count) {
  uint64_t *steps = NULL, step;
  uint32_t count = 0, capacity = 0;
  struct stat info;
  const struct dirent *entry;
  DIR *folder = opendir(tool_text(run->t, OPTION_OUT));
  eg_status status = EG_OK;
  while (folder != NULL && status == EG_OK && (entry = readdir(folder)) != NULL) {
    if (!parse_name(entry->d_name, &step)) continue;
    const char *path = checkpoint_path(run, step, "/" STATE_NAME);
    if (path == NULL) status = EG_ERROR_MEMORY;
    if (path == NULL || stat(path, &info) != 0) continue;
    status = EGI_GROW(&run->t->arena, &steps, count, &capacity);
    if (status == EG_OK) steps[count++] = step;
  }
  if (folder != NULL) closedir(folder);
  if (count > 0) qsort(steps, count, sizeof *steps, compare_steps);
  *out_steps = steps;
  *out_count = count;
  return status;
}

static eg_status remove_old(training *run) {
  uint64_t *steps, keep = run->t->values[OPTION_KEEP].count;
  uint32_t count;
  if (keep == 0) return EG_OK;
  EG_TRY(list_checkpoints(run, &steps, &count));
  for (uint32_t i = 0; i + keep < count; i++) {
    const char *path = checkpoint_path(run, steps[i], "");
    if (path == NULL) return EG_ERROR_MEMORY;
    remove_checkpoint(run, path);
  }
  return EG_OK;
}

/* ---- saving ---- */

static eg_status write_run(training *run, const char *path) {
  egi_file *file;
  char text[96];
  bool has_best = run->has_best && isfinite(run->best_loss);
  int length = has_best ? snprintf(text, sizeof text, "{\"best_loss\":%.17g,\"worse\":%" PRIu64 "}\n", run->best_loss,
                                   run->n_worse)
                        : snprintf(text, sizeof text, "{}\n");
  EG_TRY(egi_file_create(run->t->ctx, path, &file));
  eg_status status = egi_file_write(file, text, (size_t)length);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}

static eg_status fill_checkpoint(training *run, const char *directory) {
  const char *state = egi_path_join(&run->t->arena, directory, STATE_NAME),
             *own = egi_path_join(&run->t->arena, directory, RUN_NAME);
  if (state == NULL || own == NULL) return EG_ERROR_MEMORY;
  EG_TRY(training_save(run, directory));
  EG_TRY(eg_trainer_save_state(run->trainer, state));
  return write_run(run, own);
}

eg_status training_save_checkpoint(training *run, uint64_t step) {
  const char *directory = checkpoint_path(run, step, ""), *partial = checkpoint_path(run, step, PARTIAL);
  if (directory == NULL || partial == NULL) return EG_ERROR_MEMORY;
  remove_checkpoint(run, partial);
  eg_status status = fill_checkpoint(run, partial);
  if (status == EG_OK) {
    remove_checkpoint(run, directory); /* of an earlier run */
    if (rename(partial, directory) != 0)
      status = egi_fail(run->t->ctx, EG_ERROR_IO, "%s: cannot be written: %s", directory, strerror(errno));
  }
  if (status != EG_OK) {
    remove_checkpoint(run, partial);
    return status;
  }
  run->saved_step = step;
  return remove_old(run);
}

/* ---- going on ---- */

static eg_status read_run(training *run, const char *path) {
  egi_json json = {run->t->ctx, path, NULL};
  int64_t n_worse = 0;
  EG_TRY(egi_json_read(run->t->ctx, path, &json.object));
  run->has_best = json_object_get(json.object, "best_loss") != NULL;
  eg_status status = egi_json_number(&json, "best_loss", &run->best_loss);
  if (status == EG_OK) status = egi_json_integer(&json, "worse", 0, INT64_MAX, &n_worse);
  json_decref(json.object);
  uint64_t patience = run->t->values[OPTION_PATIENCE].count;
  run->n_worse = (uint64_t)n_worse;
  run->is_finished = patience > 0 && run->n_worse >= patience;
  return status;
}

eg_status training_resume(training *run) {
  uint64_t *steps;
  uint32_t count;
  remove_partial(run);
  EG_TRY(list_checkpoints(run, &steps, &count));
  if (count == 0)
    return egi_fail(run->t->ctx, EG_ERROR_IO, "%s: there is no checkpoint to resume from",
                    tool_text(run->t, OPTION_OUT));
  const char *state = checkpoint_path(run, steps[count - 1], "/" STATE_NAME),
             *own = checkpoint_path(run, steps[count - 1], "/" RUN_NAME);
  if (state == NULL || own == NULL) return EG_ERROR_MEMORY;
  EG_TRY(eg_trainer_load_state(run->trainer, state));
  run->n_done = run->saved_step = eg_trainer_steps_done(run->trainer);
  return read_run(run, own);
}

/* The log keeps the lines up to the step that is gone on from. */
eg_status training_cut_log(training *run, const char *path) {
  char piece[512]; /* of a line: mixtures have long ones */
  uint64_t step;
  long end = 0;
  bool is_start = true;
  FILE *file = fopen(path, "r");
  if (file == NULL) return EG_OK; /* none yet */
  while (fgets(piece, sizeof piece, file) != NULL) {
    if (is_start && sscanf(piece, "{\"step\":%" SCNu64, &step) == 1 && step > run->n_done) break;
    is_start = strchr(piece, '\n') != NULL;
    if (is_start) end = ftell(file);
  }
  (void)fclose(file);
  if (end >= 0 && truncate(path, end) == 0) return EG_OK;
  return egi_fail(run->t->ctx, EG_ERROR_IO, "%s: cannot be cut: %s", path, strerror(errno));
}
