/* The description of a device, read from a JSON file. What it leaves out is as in egi_device_describe_cpu(). */
#include "train/train.h"

#include <string.h>

#include <jansson.h>

/* Numbers above 0. */
static eg_status read_speed(const egi_json *json, const char *key, double *out) {
  EG_TRY(egi_json_number(json, key, out));
  if (*out > 0.0) return EG_OK;
  return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is not above 0", json->what, key);
}

static eg_status read_products(const egi_json *json, egi_device_description *device) {
  json_t *object = json_object_get(json->object, "flops_per_s");
  if (object == NULL) return EG_OK;
  if (!json_is_object(object))
    return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"flops_per_s\" is not an object", json->what);
  const egi_json inner = {json->ctx, json->what, object};
  EG_TRY(read_speed(&inner, "f32", &device->flops_f32));
  EG_TRY(read_speed(&inner, "bf16", &device->flops_bf16));
  return read_speed(&inner, "f16", &device->flops_f16);
}

/* A misspelt key must not pass for a default. */
static eg_status check_keys(const egi_json *json) {
  static const char *const known[] = {
      "name",         "flops_per_s", "memory_bytes_per_s", "to_host_bytes_per_s", "to_device_bytes_per_s",
      "memory_bytes", "launch_s"};
  const char *key;
  json_t *value;
  json_object_foreach(json->object, key, value) {
    bool is_known = false;
    for (size_t i = 0; i < EGI_COUNT(known); i++) is_known = is_known || strcmp(known[i], key) == 0;
    if (!is_known) return egi_fail(json->ctx, EG_ERROR_FORMAT, "%s: \"%s\" is not known", json->what, key);
  }
  return EG_OK;
}

static eg_status read(const egi_json *json, egi_device_description *device) {
  const char *name = device->name;
  int64_t memory_bytes = 0;
  EG_TRY(check_keys(json));
  EG_TRY(egi_json_string(json, "name", &name));
  if (name != device->name) snprintf(device->name, sizeof device->name, "%s", name);
  EG_TRY(read_products(json, device));
  EG_TRY(read_speed(json, "memory_bytes_per_s", &device->memory_bytes_per_s));
  EG_TRY(read_speed(json, "to_host_bytes_per_s", &device->to_host_bytes_per_s));
  EG_TRY(read_speed(json, "to_device_bytes_per_s", &device->to_device_bytes_per_s));
  EG_TRY(egi_json_integer(json, "memory_bytes", 0, INT64_MAX, &memory_bytes));
  device->memory_bytes = (uint64_t)memory_bytes;
  return read_speed(json, "launch_s", &device->launch_s);
}

eg_status egi_device_description_read(eg_context *ctx, const char *path, egi_device_description *out_device) {
  egi_device_description device;
  json_t *root;
  egi_device_describe_cpu(&device);
  EG_TRY(egi_json_read(ctx, path, &root));
  const egi_json json = {ctx, path, root};
  eg_status status = read(&json, &device);
  json_decref(root);
  if (status == EG_OK) *out_device = device;
  return status;
}

/* What the driver says; the link and launches, of which it says nothing, are taken for those of PCIe 5 and a captured
 * graph. */
static void describe_facts(const egi_device_facts *facts, egi_device_description *out) {
  (void)snprintf(out->name, sizeof out->name, "%.63s", facts->name);
  if (facts->flops_f32 > 0.0) out->flops_f32 = facts->flops_f32;
  if (facts->flops_bf16 > 0.0) out->flops_bf16 = facts->flops_bf16;
  if (facts->flops_f16 > 0.0) out->flops_f16 = facts->flops_f16;
  if (facts->memory_bytes_per_s > 0.0) out->memory_bytes_per_s = facts->memory_bytes_per_s;
  out->to_host_bytes_per_s = out->to_device_bytes_per_s = 5e10;
  out->memory_bytes = facts->memory_bytes;
  out->launch_s = 2e-6;
}

eg_status egi_device_description_find(eg_context *ctx, const char *device, const char *path,
                                      egi_device_description *out_device) {
  const egi_backend *backend = NULL;
  egi_device_facts facts;
  EG_TRY(egi_backend_find(ctx, device, &backend));
  egi_device_describe_cpu(out_device);
  if (path != NULL) return egi_device_description_read(ctx, path, out_device);
  if (backend->is_host) return EG_OK;
  EG_TRY(backend->describe(ctx, 0, &facts));
  describe_facts(&facts, out_device);
  return EG_OK;
}

/* Beside what is planned a device holds staging, workspaces of libraries and captured courses. */
uint64_t egi_device_available(eg_context *ctx, const egi_backend *backend, const egi_device_description *device) {
  const uint64_t aside = UINT64_C(256) << 20;
  egi_device_facts facts;
  if (backend->is_host) return egi_memory_available();
  uint64_t free_bytes = device->memory_bytes > 0 ? device->memory_bytes : UINT64_MAX;
  if (backend->describe(ctx, 0, &facts) == EG_OK && facts.free_bytes < free_bytes) free_bytes = facts.free_bytes;
  return free_bytes > aside ? free_bytes - aside : free_bytes;
}

bool egi_device_is_apart(eg_context *ctx, const egi_backend *backend) {
  egi_device_facts facts;
  return !backend->is_host && (backend->describe(ctx, 0, &facts) != EG_OK || !facts.is_unified);
}
