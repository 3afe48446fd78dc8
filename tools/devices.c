/* engraft devices: the devices that --device takes, each with what its driver says, or why it cannot be used. */
#include "tools/tool.h"

enum { MAX_DEVICES = 64 };

static void print_text(const char *backend, uint32_t index, const egi_device_facts *facts) {
  printf("%s", backend);
  if (facts->compute_capability == 0) {
    printf("  %d threads", facts->n_multiprocessors);
  } else {
    printf(" %u  %s, compute capability %d.%d, %d multiprocessors", index, facts->name, facts->compute_capability / 10,
           facts->compute_capability % 10, facts->n_multiprocessors);
  }
  if (facts->memory_bytes > 0) printf(", %.1f GiB", (double)facts->memory_bytes / 1073741824.0);
  if (facts->free_bytes > 0) printf(", %.1f GiB free", (double)facts->free_bytes / 1073741824.0);
  if (facts->driver_version > 0)
    printf(", driver for CUDA %d.%d, built with %d.%d", facts->driver_version / 1000, facts->driver_version % 1000 / 10,
           facts->toolkit_version / 1000, facts->toolkit_version % 1000 / 10);
  printf("\n");
}

static void add_json(egi_text *out, const char *backend, uint32_t index, const egi_device_facts *facts) {
  egi_text_format(out, "%s{\"device\": \"%s\", \"index\": %u, \"name\": ", out->length > 1 ? ", " : "", backend, index);
  egi_text_json(out, facts->name);
  egi_text_format(out,
                  ", \"multiprocessors\": %d, \"compute_capability\": \"%d.%d\", \"memory_bytes\": %llu, "
                  "\"free_bytes\": %llu, \"unified\": %s, \"driver\": \"%d.%d\", \"toolkit\": \"%d.%d\"}",
                  facts->n_multiprocessors, facts->compute_capability / 10, facts->compute_capability % 10,
                  (unsigned long long)facts->memory_bytes, (unsigned long long)facts->free_bytes,
                  facts->is_unified ? "true" : "false", facts->driver_version / 1000, facts->driver_version % 1000 / 10,
                  facts->toolkit_version / 1000, facts->toolkit_version % 1000 / 10);
}

static eg_status add_backend(const tool *t, const char *name, egi_text *json) {
  const egi_backend *backend = NULL;
  egi_device_facts facts = {.n_devices = 1};
  EG_TRY(egi_backend_find(t->ctx, name, &backend));
  for (uint32_t i = 0; i < facts.n_devices && i < MAX_DEVICES; i++) {
    EG_TRY(backend->describe(t->ctx, i, &facts));
    if (t->values[OPTION_JSON].is_given)
      add_json(json, name, i, &facts);
    else
      print_text(name, i, &facts);
  }
  return EG_OK;
}

int tool_devices(tool *t) {
  static const char *const names[] = {"cpu", "cuda"};
  egi_text json, missing;
  egi_text_init(&json, t->ctx);
  egi_text_init(&missing, t->ctx);
  egi_text_add(&json, "[");
  for (size_t i = 0; i < EGI_COUNT(names); i++) {
    if (add_backend(t, names[i], &json) == EG_OK) continue;
    egi_text_format(&missing, "%s{\"device\": \"%s\", \"reason\": ", missing.length > 0 ? ", " : "", names[i]);
    egi_text_json(&missing, eg_context_error(t->ctx));
    egi_text_add(&missing, "}");
    if (!t->values[OPTION_JSON].is_given) printf("%s  not usable: %s\n", names[i], eg_context_error(t->ctx));
  }
  eg_status status = egi_text_status(&json) == EG_OK ? egi_text_status(&missing) : EG_ERROR_MEMORY;
  if (status == EG_OK && t->values[OPTION_JSON].is_given)
    printf("{\"devices\": %s], \"missing\": [%s]}\n", egi_text_string(&json), egi_text_string(&missing));
  egi_text_free(&json);
  egi_text_free(&missing);
  return status == EG_OK ? 0 : tool_fail_status(t, status);
}
