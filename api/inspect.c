/* The JSON of eg_model_inspect(): what a host or a person wants to know of a model before training it. */
#include "api/api.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/proto.h"

static void add_values(egi_text *text, const char *key, const egi_graph *graph, const egi_value_id *values,
                       uint32_t n) {
  egi_text_format(text, "\"%s\":[", key);
  for (uint32_t i = 0; i < n; i++) {
    const egi_value *value = &graph->values[values[i]];
    egi_text_add(text, i > 0 ? ",\n  {\"name\":" : "\n  {\"name\":");
    egi_text_json(text, value->name);
    egi_text_format(text, ",\"dtype\":\"%s\",\"shape\":[", egi_dtype_name(value->dtype));
    for (int axis = 0; axis < value->rank; axis++) {
      int64_t size;
      if (axis > 0) egi_text_add(text, ",");
      if (egi_dim_value(graph->module->dims, value->dims[axis], &size)) {
        egi_text_format(text, "%" PRId64, size);
        continue;
      }
      egi_text name;
      egi_text_init(&name, text->ctx);
      if (value->dims[axis] != EGI_DIM_NONE) egi_dim_print(graph->module->dims, value->dims[axis], &name);
      egi_text_json(text, name.length > 0 ? egi_text_string(&name) : "?");
      egi_text_free(&name);
    }
    egi_text_add(text, "]}");
  }
  egi_text_add(text, "]");
}

static void add_opsets(egi_text *text, const egi_module *module) {
  egi_text_add(text, "\"opset\":{");
  if (module->file != NULL) {
    const Onnx__ModelProto *file = egi_onnx_model(module->file);
    for (size_t i = 0; i < file->n_opset_import; i++) {
      const Onnx__OperatorSetIdProto *opset = file->opset_import[i];
      egi_text_add(text, i > 0 ? "," : "");
      egi_text_json(text, opset->domain != NULL ? opset->domain : "");
      egi_text_format(text, ":%" PRId64, opset->version);
    }
  }
  egi_text_add(text, "}");
}

static void add_operators(egi_text *text, const egi_graph *graph) {
  bool is_first = true;
  egi_text_add(text, "\"ops\":{");
  for (int op = EGI_OP_UNKNOWN + 1; op < EGI_OP_COUNT; op++) {
    unsigned count = 0;
    for (egi_node_id n = 1; n < graph->n_nodes; n++) count += graph->nodes[n].op == (egi_op)op;
    if (count == 0) continue;
    const egi_op_info *info = egi_op_get((egi_op)op);
    egi_text_format(text, "%s\"%s%s%s\":%u", is_first ? "" : ",", info->domain, info->domain[0] != '\0' ? "." : "",
                    info->name, count);
    is_first = false;
  }
  egi_text_add(text, "}");
}

/* Weights of floating-point types that the graph uses, in elements and bytes. */
static void add_parameters(egi_text *text, const egi_graph *graph) {
  uint64_t n_tensors = 0, n_elements = 0, n_bytes = 0;
  for (egi_value_id v = 1; v < graph->n_values; v++) {
    if (graph->values[v].kind != EGI_VALUE_WEIGHT) continue;
    const egi_weight *weight = &graph->module->weights[graph->values[v].index];
    uint64_t count = 1, bytes = 0;
    for (int i = 0; i < weight->rank; i++) count *= (uint64_t)weight->dims[i];
    if (!egi_dtype_is_float(weight->dtype) || !egi_dtype_bytes(weight->dtype, count, &bytes)) continue;
    n_tensors++;
    n_elements += count;
    n_bytes += bytes;
  }
  egi_text_format(text, "\"parameters\":{\"tensors\":%" PRIu64 ",\"elements\":%" PRIu64 ",\"bytes\":%" PRIu64 "}",
                  n_tensors, n_elements, n_bytes);
}

/* ---- structure ------------------------------------------------------------------------------------------------- */

/* Numbers in paths count as numbers: layers.2 stands before layers.10. */
static int compare_paths(const void *a, const void *b) {
  const char *x = *(const char *const *)a, *y = *(const char *const *)b;
  while (*x != '\0' && *y != '\0') {
    size_t n = strspn(x, "0123456789"), m = strspn(y, "0123456789");
    if (n > 0 && m > 0 && n != m) return n < m ? -1 : 1;
    if (*x != *y) break;
    x++, y++;
  }
  return (unsigned char)*x - (unsigned char)*y;
}

/* Module paths of the linear layers that "all-linear" selects. */
static eg_status find_targets(const egi_graph *graph, egi_arena *arena, const char ***out_paths, size_t *out_count) {
  egi_linear *linears;
  size_t n = 0, count = 0;
  EG_TRY(egi_find_linears(graph, arena, &linears, &n));
  const char **paths = EGI_NEW(arena, const char *, n);
  if (paths == NULL) return EG_ERROR_MEMORY;
  for (size_t i = 0; i < n; i++)
    if (linears[i].path != NULL && egi_target_matches(&linears[i], "all-linear")) paths[count++] = linears[i].path;
  qsort(paths, count, sizeof *paths, compare_paths);
  *out_paths = paths;
  *out_count = count;
  return EG_OK;
}

static void add_paths(egi_text *text, const char *const *paths, size_t count) {
  egi_text_add(text, "\"targets\":[");
  for (size_t i = 0; i < count; i++) {
    egi_text_add(text, i == 0 ? "\n  " : ",\n  ");
    egi_text_json(text, paths[i]);
  }
  egi_text_add(text, "]");
}

static const char *boolean(bool value) {
  return value ? "true" : "false";
}

static void add_structure(egi_text *text, const egi_structure *s) {
  const egi_structure_counts *n = &s->counts;
  egi_text_format(text,
                  "\"structure\":{\"layers\":%" PRId64 ",\"hidden\":%" PRId64 ",\"heads\":%" PRId64
                  ",\"kv_heads\":%" PRId64 ",\"head_dim\":%" PRId64 ",\"vocab\":%" PRId64 ",\"windows\":[",
                  s->layers, s->hidden, s->heads, s->kv_heads, s->head_dim, s->vocab);
  for (uint32_t i = 0; i < s->n_windows; i++) egi_text_format(text, "%s%" PRId64, i > 0 ? "," : "", s->windows[i]);
  egi_text_format(text, "],\"softcap\":%.6g,\"sinks\":%s,\"rope\":", s->softcap, boolean(s->has_sinks));
  if (n->rope > 0)
    egi_text_format(text, "{\"dim\":%" PRId64 ",\"interleaved\":%s,\"tables\":%u}", s->rope_dim,
                    boolean(s->is_rope_interleaved), s->n_rope_tables);
  else
    egi_text_add(text, "null");
  egi_text_format(text,
                  ",\"qk_norm\":%s,\"experts\":%" PRId64 ",\"top_k\":%" PRId64 ",\"tied_head\":%s,\n \"counts\":{",
                  boolean(s->has_qk_norm), s->experts, s->top_k, boolean(s->is_tied));
  egi_text_format(text,
                  "\"norm\":%u,\"attention\":%u,\"linear\":%u,\"rope\":%u,\"glu\":%u,\"moe\":%u,\"other\":%u},\n ",
                  n->norm, n->attention, n->linear, n->rope, n->glu, n->moe, n->other);
}

/* What nothing recognised: where to look when a model is slow, or its structure is not that of another file's. */
static void add_left(egi_text *text, const egi_graph *graph, const egi_structure *s) {
  egi_text_add(text, "\"unrecognised\":[");
  for (uint32_t i = 0; i < s->counts.other; i++) {
    const egi_node *node = &graph->nodes[s->left[i]];
    egi_text_add(text, i == 0 ? "\n  {\"node\":" : ",\n  {\"node\":");
    egi_text_json(text, node->name[0] != '\0' ? node->name : graph->values[node->outputs[0]].name);
    egi_text_format(text, ",\"op\":\"%s\"}", egi_op_get(node->op)->name);
  }
  egi_text_add(text, "],\n");
}

/* From a recognised clone. */
static eg_status describe_structure(egi_text *text, const eg_model *model, egi_arena *arena) {
  egi_machine machine;
  egi_structure structure;
  const char **paths = NULL;
  size_t count = 0;
  eg_status status = egi_machine_prepare(&machine, model, "cpu", EG_DTYPE_F32);
  if (status == EG_OK) status = egi_structure_find(machine.graph, arena, &structure);
  if (status == EG_OK) status = find_targets(machine.graph, arena, &paths, &count);
  if (status == EG_OK) {
    add_structure(text, &structure);
    add_paths(text, paths, count);
    egi_text_add(text, "},\n");
    add_left(text, machine.graph, &structure);
    add_paths(text, paths, count);
  }
  egi_machine_close(&machine);
  return status;
}

eg_status egi_model_describe(const eg_model *model, egi_text *text) {
  const egi_graph *graph = model->module->graphs[0];
  egi_text_add(text, "{\n");
  add_values(text, "inputs", graph, graph->inputs, graph->n_inputs);
  egi_text_add(text, ",\n");
  add_values(text, "outputs", graph, graph->outputs, graph->n_outputs);
  egi_text_add(text, ",\n");
  add_opsets(text, model->module);
  egi_text_add(text, ",\n");
  add_operators(text, graph);
  egi_text_add(text, ",\n");
  add_parameters(text, graph);
  egi_text_add(text, ",\n");
  egi_arena arena;
  egi_arena_init(&arena, model->ctx, EGI_PURPOSE_DATA);
  eg_status status = describe_structure(text, model, &arena);
  egi_arena_clear(&arena);
  egi_text_add(text, "\n}\n");
  return status;
}
