/* Writes PEFT adapter folders: the keys that peft 0.20 writes, sorted, with the defaults spelled out, so that readers
 * other than PEFT find what they look for. */
#include "io/io.h"

#include <math.h>
#include <string.h>

static void add_string(egi_text *text, const char *key, const char *value) {
  egi_text_format(text, "  \"%s\": ", key);
  if (value != NULL)
    egi_text_json(text, value);
  else
    egi_text_add(text, "null");
  egi_text_add(text, ",\n");
}

/* Whole numbers without a fraction: PEFT declares r and lora_alpha as integers. */
static void add_number(egi_text *text, double value) {
  if (floor(value) >= value && fabs(value) < 1e15)
    egi_text_format(text, "%.0f", value);
  else
    egi_text_format(text, "%.17g", value);
}

static void add_patterns(egi_text *text, const char *key, const egi_peft_pattern *patterns, size_t count) {
  egi_text_format(text, "  \"%s\": {", key);
  for (size_t i = 0; i < count; i++) {
    egi_text_add(text, i > 0 ? ",\n    " : "\n    ");
    egi_text_json(text, patterns[i].key);
    egi_text_add(text, ": ");
    add_number(text, patterns[i].value);
  }
  egi_text_add(text, count > 0 ? "\n  },\n" : "},\n");
}

static void add_names(egi_text *text, egi_arena *arena, const char *key, const char *targets) {
  egi_text_format(text, "  \"%s\": ", key);
  if (targets != NULL && targets[0] == '\0') {
    egi_text_add(text, "[]");
  } else if (targets == NULL || strcmp(targets, "all-linear") == 0) {
    egi_text_json(text, "all-linear");
  } else {
    egi_text_add(text, "[");
    for (const char *name = targets; name != NULL;) {
      const char *comma = strchr(name, ',');
      size_t length = comma != NULL ? (size_t)(comma - name) : strlen(name);
      const char *copy = egi_arena_copy_text(arena, name, length);
      egi_text_add(text, name > targets ? ",\n    " : "\n    ");
      egi_text_json(text, copy != NULL ? copy : "");
      text->is_failed = text->is_failed || copy == NULL;
      name = comma != NULL ? comma + 1 : NULL;
    }
    egi_text_add(text, "\n  ]");
  }
  egi_text_add(text, ",\n");
}

static void write_config(egi_text *text, egi_arena *arena, const egi_peft_config *config) {
  egi_text_add(text, "{\n");
  add_patterns(text, "alpha_pattern", config->alphas, config->n_alphas);
  add_string(text, "auto_mapping", NULL);
  add_string(text, "base_model_name_or_path", config->base_model != NULL ? config->base_model : "");
  add_string(text, "bias", "none");
  egi_text_add(text, "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"init_lora_weights\": true,\n");
  egi_text_add(text, "  \"lora_alpha\": ");
  add_number(text, config->alpha);
  egi_text_format(text, ",\n  \"lora_dropout\": %.17g,\n", config->dropout);
  if (config->modules != NULL)
    add_names(text, arena, "modules_to_save", config->modules);
  else
    add_string(text, "modules_to_save", NULL);
  add_string(text, "peft_type", "LORA");
  egi_text_format(text, "  \"r\": %u,\n", (unsigned)config->rank);
  add_patterns(text, "rank_pattern", config->ranks, config->n_ranks);
  add_names(text, arena, "target_modules", config->targets);
  if (config->parameters != NULL) add_names(text, arena, "target_parameters", config->parameters);
  add_string(text, "task_type", config->task);
  egi_text_format(text, "  \"use_dora\": false,\n  \"use_rslora\": %s\n}\n", config->use_rslora ? "true" : "false");
}

static eg_status write_text(eg_context *ctx, const char *path, const egi_text *text) {
  egi_file *file;
  EG_TRY(egi_file_create(ctx, path, &file));
  eg_status status = egi_file_write(file, text->data, text->length);
  if (status == EG_OK) return egi_file_commit(file);
  egi_file_abandon(file);
  return status;
}

eg_status egi_peft_write(eg_context *ctx, const char *directory, const egi_peft_config *config,
                         const egi_safetensor *tensors, size_t count) {
  egi_arena arena;
  egi_text text;
  EG_TRY(egi_make_directory(ctx, directory));
  egi_arena_init(&arena, ctx, EGI_PURPOSE_DATA);
  egi_text_init(&text, ctx);
  const char *tensors_path = egi_path_join(&arena, directory, "adapter_model.safetensors");
  const char *config_path = egi_path_join(&arena, directory, "adapter_config.json");
  write_config(&text, &arena, config);
  eg_status status = tensors_path != NULL && config_path != NULL ? egi_text_status(&text) : EG_ERROR_MEMORY;
  if (status == EG_OK) status = egi_safetensors_write(ctx, tensors_path, tensors, count);
  if (status == EG_OK) status = write_text(ctx, config_path, &text);
  if (status == EG_OK) status = egi_qat_record_write(&arena, directory, &config->qat);
  egi_text_free(&text);
  egi_arena_clear(&arena);
  return status;
}
