/* Values → ValueInfoProto: what the file said about a value stays, its type is the graph's. */
#include "graph/export.h"

char *egi_export_text(const char *text) {
  return (char *)(uintptr_t)text;
}

static eg_status export_dim(egi_exporter *exporter, egi_dim dim, Onnx__TensorShapeProto__Dimension **out_dim) {
  egi_dims *dims = exporter->module->dims;
  Onnx__TensorShapeProto__Dimension *row = EGI_NEW(&exporter->arena, Onnx__TensorShapeProto__Dimension, 1);
  int64_t value = 0;
  if (!row) return EG_ERROR_MEMORY;
  onnx__tensor_shape_proto__dimension__init(row);
  *out_dim = row;
  dim = egi_dim_resolve(dims, dim);
  if (dim == EGI_DIM_NONE) return EG_OK;
  if (egi_dim_value(dims, dim, &value)) {
    row->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
    row->dim_value = value;
    return EG_OK;
  }
  egi_text text;
  egi_text_init(&text, exporter->ctx);
  egi_dim_print(dims, dim, &text);
  eg_status status = egi_text_status(&text);
  row->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM;
  row->dim_param = status == EG_OK ? egi_arena_copy_text(&exporter->arena, egi_text_string(&text), text.length) : NULL;
  egi_text_free(&text);
  return row->dim_param ? EG_OK : EG_ERROR_MEMORY;
}

static eg_status export_shape(egi_exporter *exporter, const egi_value *value, Onnx__TensorShapeProto **out_shape) {
  Onnx__TensorShapeProto *shape = EGI_NEW(&exporter->arena, Onnx__TensorShapeProto, 1);
  if (!shape) return EG_ERROR_MEMORY;
  onnx__tensor_shape_proto__init(shape);
  shape->dim = EGI_NEW(&exporter->arena, Onnx__TensorShapeProto__Dimension *, (size_t)value->rank);
  if (!shape->dim) return EG_ERROR_MEMORY;
  shape->n_dim = (size_t)value->rank;
  for (int i = 0; i < value->rank; i++) EG_TRY(export_dim(exporter, value->dims[i], &shape->dim[i]));
  *out_shape = shape;
  return EG_OK;
}

static eg_status export_type(egi_exporter *exporter, const egi_value *value, Onnx__TypeProto **out_type) {
  Onnx__TypeProto *type = EGI_NEW(&exporter->arena, Onnx__TypeProto, 1);
  Onnx__TypeProto__Tensor *tensor = EGI_NEW(&exporter->arena, Onnx__TypeProto__Tensor, 1);
  if (!type || !tensor) return EG_ERROR_MEMORY;
  onnx__type_proto__init(type);
  onnx__type_proto__tensor__init(tensor);
  tensor->has_elem_type = true;
  tensor->elem_type = (int32_t)value->dtype;
  if (value->rank >= 0) EG_TRY(export_shape(exporter, value, &tensor->shape));
  type->value_case = ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE;
  type->tensor_type = tensor;
  *out_type = type;
  return EG_OK;
}

eg_status egi_export_info(egi_exporter *exporter, const egi_graph *graph, egi_value_id id,
                          Onnx__ValueInfoProto **out_info) {
  const egi_value *value = &graph->values[id];
  Onnx__ValueInfoProto *info = EGI_NEW(&exporter->arena, Onnx__ValueInfoProto, 1);
  uint32_t index = 0;
  if (!info) return EG_ERROR_MEMORY;
  onnx__value_info_proto__init(info);
  if (egi_map_get(&exporter->infos, value->name, &index)) *info = *exporter->info_rows[index];
  info->name = egi_export_text(value->name);
  if (value->dtype != EG_DTYPE_UNDEFINED) EG_TRY(export_type(exporter, value, &info->type));
  *out_info = info;
  return EG_OK;
}
