/* ONNX models made in memory for the tests of import and export. */
#define _XOPEN_SOURCE 700

#include "support_onnx.h"

#include <assert.h>
#include <dirent.h>
#include <unistd.h>

/* ---- small things --------------------------------------------------------------------------------------------- */

static void *get(model_builder *builder, size_t size) {
  void *memory = egi_arena_get(&builder->arena, 1, size ? size : 1);
  assert(memory);
  return memory;
}

static char *text(model_builder *builder, const char *string) {
  char *copy = egi_arena_copy_text(&builder->arena, string, strlen(string));
  assert(copy);
  return copy;
}

/* A list of pointers with one more. */
static void *append(model_builder *builder, void *list, size_t *count, void *row) {
  void **longer = get(builder, (*count + 1) * sizeof(void *));
  if (*count) memcpy(longer, list, *count * sizeof(void *));
  longer[(*count)++] = row;
  return longer;
}

static char **split(model_builder *builder, const char *names, size_t *out_count) {
  char **list = NULL;
  *out_count = 0;
  while (*names) {
    size_t length = strcspn(names, ",");
    char *name = egi_arena_copy_text(&builder->arena, names, length);
    assert(name);
    list = append(builder, list, out_count, name);
    names += length;
    if (*names == ',') names++;
  }
  return list;
}

/* ---- models --------------------------------------------------------------------------------------------------- */

void build_begin(model_builder *builder, eg_context *ctx, int64_t opset) {
  memset(builder, 0, sizeof(*builder));
  egi_arena_init(&builder->arena, ctx, EGI_PURPOSE_DATA);
  builder->model = get(builder, sizeof(*builder->model));
  builder->graph = get(builder, sizeof(*builder->graph));
  onnx__model_proto__init(builder->model);
  onnx__graph_proto__init(builder->graph);
  builder->model->has_ir_version = true;
  builder->model->ir_version = 10;
  builder->model->graph = builder->graph;
  builder->graph->name = text(builder, "g");
  if (opset) build_opset(builder, "", opset);
}

void build_end(model_builder *builder) {
  egi_arena_clear(&builder->arena);
}

void build_opset(model_builder *builder, const char *domain, int64_t version) {
  Onnx__OperatorSetIdProto *row = get(builder, sizeof(*row));
  onnx__operator_set_id_proto__init(row);
  row->domain = text(builder, domain);
  row->has_version = true;
  row->version = version;
  builder->model->opset_import = append(builder, builder->model->opset_import, &builder->model->n_opset_import, row);
}

static Onnx__TensorShapeProto__Dimension *build_dim(model_builder *builder, int64_t value, const char *param) {
  Onnx__TensorShapeProto__Dimension *dim = get(builder, sizeof(*dim));
  onnx__tensor_shape_proto__dimension__init(dim);
  if (param) {
    dim->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM;
    dim->dim_param = text(builder, param);
  } else if (value != -1) {
    dim->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
    dim->dim_value = value;
  }
  return dim;
}

Onnx__ValueInfoProto *build_info(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims,
                                 const char *const *params) {
  Onnx__ValueInfoProto *info = get(builder, sizeof(*info));
  Onnx__TypeProto *type = get(builder, sizeof(*type));
  Onnx__TypeProto__Tensor *tensor = get(builder, sizeof(*tensor));
  onnx__value_info_proto__init(info);
  onnx__type_proto__init(type);
  onnx__type_proto__tensor__init(tensor);
  info->name = text(builder, name);
  info->type = type;
  type->value_case = ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE;
  type->tensor_type = tensor;
  tensor->has_elem_type = true;
  tensor->elem_type = dtype;
  if (rank < 0) return info;
  tensor->shape = get(builder, sizeof(*tensor->shape));
  onnx__tensor_shape_proto__init(tensor->shape);
  for (int i = 0; i < rank; i++) {
    const char *param = params && !dims[i] ? params[i] : NULL;
    tensor->shape->dim = append(builder, tensor->shape->dim, &tensor->shape->n_dim, build_dim(builder, dims[i], param));
  }
  return info;
}

void build_input(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims) {
  Onnx__ValueInfoProto *info = build_info(builder, name, dtype, rank, dims, NULL);
  builder->graph->input = append(builder, builder->graph->input, &builder->graph->n_input, info);
}

void build_output(model_builder *builder, const char *name) {
  Onnx__ValueInfoProto *info = get(builder, sizeof(*info));
  onnx__value_info_proto__init(info);
  info->name = text(builder, name);
  builder->graph->output = append(builder, builder->graph->output, &builder->graph->n_output, info);
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

Onnx__NodeProto *build_loose_node(model_builder *builder, const char *op, const char *inputs, const char *outputs) {
  Onnx__NodeProto *node = get(builder, sizeof(*node));
  onnx__node_proto__init(node);
  node->op_type = text(builder, op);
  node->input = split(builder, inputs, &node->n_input);
  node->output = split(builder, outputs, &node->n_output);
  return node;
}

Onnx__NodeProto *build_node_in(model_builder *builder, Onnx__GraphProto *graph, const char *op, const char *inputs,
                               const char *outputs) {
  Onnx__NodeProto *node = build_loose_node(builder, op, inputs, outputs);
  graph->node = append(builder, graph->node, &graph->n_node, node);
  return node;
}

Onnx__NodeProto *build_node(model_builder *builder, const char *op, const char *inputs, const char *outputs) {
  return build_node_in(builder, builder->graph, op, inputs, outputs);
}

Onnx__GraphProto *build_body(model_builder *builder, const char *name) {
  Onnx__GraphProto *graph = get(builder, sizeof(*graph));
  onnx__graph_proto__init(graph);
  graph->name = text(builder, name);
  return graph;
}

Onnx__FunctionProto *build_function(model_builder *builder, const char *name, const char *inputs, const char *outputs) {
  Onnx__FunctionProto *function = get(builder, sizeof(*function));
  onnx__function_proto__init(function);
  function->name = text(builder, name);
  function->domain = text(builder, "local");
  function->input = split(builder, inputs, &function->n_input);
  function->output = split(builder, outputs, &function->n_output);
  builder->model->functions = append(builder, builder->model->functions, &builder->model->n_functions, function);
  return function;
}

void build_function_node(model_builder *builder, Onnx__FunctionProto *function, Onnx__NodeProto *node) {
  function->node = append(builder, function->node, &function->n_node, node);
}

Onnx__AttributeProto *build_attribute(model_builder *builder, Onnx__NodeProto *node, const char *name, int type) {
  Onnx__AttributeProto *attribute = get(builder, sizeof(*attribute));
  onnx__attribute_proto__init(attribute);
  attribute->name = text(builder, name);
  attribute->has_type = true;
  attribute->type = (Onnx__AttributeProto__AttributeType)type;
  node->attribute = append(builder, node->attribute, &node->n_attribute, attribute);
  return attribute;
}

void build_int(model_builder *builder, Onnx__NodeProto *node, const char *name, int64_t value) {
  Onnx__AttributeProto *attribute = build_attribute(builder, node, name, EGI_ATTRIBUTE_INT);
  attribute->has_i = true;
  attribute->i = value;
}

void build_float(model_builder *builder, Onnx__NodeProto *node, const char *name, float value) {
  Onnx__AttributeProto *attribute = build_attribute(builder, node, name, EGI_ATTRIBUTE_FLOAT);
  attribute->has_f = true;
  attribute->f = value;
}

void build_ints(model_builder *builder, Onnx__NodeProto *node, const char *name, size_t n, const int64_t *values) {
  Onnx__AttributeProto *attribute = build_attribute(builder, node, name, EGI_ATTRIBUTE_INTS);
  attribute->n_ints = n;
  attribute->ints = get(builder, n * sizeof(int64_t));
  if (n) memcpy(attribute->ints, values, n * sizeof(int64_t));
}

static Onnx__StringStringEntryProto *build_entry(model_builder *builder, const char *key, const char *value) {
  Onnx__StringStringEntryProto *entry = get(builder, sizeof(*entry));
  onnx__string_string_entry_proto__init(entry);
  entry->key = text(builder, key);
  entry->value = text(builder, value);
  return entry;
}

void build_property(model_builder *builder, Onnx__NodeProto *node, const char *key, const char *value) {
  node->metadata_props =
      append(builder, node->metadata_props, &node->n_metadata_props, build_entry(builder, key, value));
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

Onnx__TensorProto *build_tensor(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims,
                                const void *bytes, size_t size) {
  Onnx__TensorProto *tensor = get(builder, sizeof(*tensor));
  onnx__tensor_proto__init(tensor);
  tensor->name = text(builder, name);
  tensor->has_data_type = true;
  tensor->data_type = dtype;
  tensor->n_dims = (size_t)rank;
  tensor->dims = get(builder, (size_t)rank * sizeof(int64_t));
  if (rank) memcpy(tensor->dims, dims, (size_t)rank * sizeof(int64_t));
  tensor->has_raw_data = bytes != NULL;
  tensor->raw_data.len = size;
  tensor->raw_data.data = get(builder, size);
  if (bytes && size) memcpy(tensor->raw_data.data, bytes, size);
  return tensor;
}

Onnx__TensorProto *build_initializer(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims,
                                     const void *bytes, size_t size) {
  Onnx__TensorProto *tensor = build_tensor(builder, name, dtype, rank, dims, bytes, size);
  builder->graph->initializer = append(builder, builder->graph->initializer, &builder->graph->n_initializer, tensor);
  return tensor;
}

void build_external(model_builder *builder, Onnx__TensorProto *tensor, const char *key, const char *value) {
  tensor->has_data_location = true;
  tensor->data_location = ONNX__TENSOR_PROTO__DATA_LOCATION__EXTERNAL;
  tensor->external_data =
      append(builder, tensor->external_data, &tensor->n_external_data, build_entry(builder, key, value));
}

/* ---- loading -------------------------------------------------------------------------------------------------- */

void build_bytes(model_builder *builder) {
  builder->size = onnx__model_proto__get_packed_size(builder->model);
  builder->bytes = get(builder, builder->size);
  onnx__model_proto__pack(builder->model, builder->bytes);
}

eg_status build_load(model_builder *builder, const char *directory, egi_module **out_module) {
  egi_onnx *file = NULL;
  eg_context *ctx = builder->arena.ctx;
  build_bytes(builder);
  EG_TRY(egi_onnx_open_memory(ctx, builder->bytes, builder->size, directory, NULL, &file));
  return egi_module_import(ctx, file, out_module);
}

eg_status support_load(eg_context *ctx, const char *path, egi_module **out_module) {
  egi_onnx *file = NULL;
  EG_TRY(egi_onnx_open(ctx, path, NULL, &file));
  return egi_module_import(ctx, file, out_module);
}

void support_print(const egi_module *module, egi_text *out) {
  egi_text_init(out, module->ctx);
  eg_status status = egi_module_print(module, module->graphs[0], 0, out);
  assert(status == EG_OK);
  (void)status;
}

void support_make_directory(char *out_path, size_t capacity) {
  static const char pattern[] = "engraft-test-XXXXXX";
  assert(capacity >= sizeof(pattern));
  memcpy(out_path, pattern, sizeof(pattern));
  char *made = mkdtemp(out_path);
  assert(made);
  (void)made;
}

void support_remove_directory(const char *path) {
  char child[1024];
  DIR *directory = opendir(path);
  if (!directory) return;
  for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
    if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
    snprintf(child, sizeof(child), "%s/%s", path, entry->d_name);
    if (unlink(child)) support_remove_directory(child);
  }
  closedir(directory);
  rmdir(path);
}
