/* Builds ONNX models message by message, right or wrong, and loads them. */
#ifndef ENGRAFT_TESTS_GRAPH_SUPPORT_ONNX_H
#define ENGRAFT_TESTS_GRAPH_SUPPORT_ONNX_H

#include "graph/graph.h"
#include "proto/proto.h"

/* A model under construction; everything lies in its arena. */
typedef struct model_builder {
  egi_arena arena;
  Onnx__ModelProto *model;
  Onnx__GraphProto *graph;
  uint8_t *bytes; /* of the last build_bytes() */
  size_t size;
} model_builder;

void build_begin(model_builder *builder, eg_context *ctx, int64_t opset);
void build_end(model_builder *builder);

void build_opset(model_builder *builder, const char *domain, int64_t version);
/* A dim below 0 is left unknown; `params`, when given, has a dim_param for each dim that is 0. */
Onnx__ValueInfoProto *build_info(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims,
                                 const char *const *params);
void build_input(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims);
void build_output(model_builder *builder, const char *name);
/* Lists of names are separated by commas: "a,,b". */
Onnx__NodeProto *build_node(model_builder *builder, const char *op, const char *inputs, const char *outputs);
/* As build_node(), but added to `graph`. */
Onnx__NodeProto *build_node_in(model_builder *builder, Onnx__GraphProto *graph, const char *op, const char *inputs,
                               const char *outputs);
Onnx__GraphProto *build_body(model_builder *builder, const char *name);
Onnx__FunctionProto *build_function(model_builder *builder, const char *name, const char *inputs, const char *outputs);
void build_function_node(model_builder *builder, Onnx__FunctionProto *function, Onnx__NodeProto *node);
/* A node that belongs nowhere yet. */
Onnx__NodeProto *build_loose_node(model_builder *builder, const char *op, const char *inputs, const char *outputs);
Onnx__AttributeProto *build_attribute(model_builder *builder, Onnx__NodeProto *node, const char *name, int type);
void build_int(model_builder *builder, Onnx__NodeProto *node, const char *name, int64_t value);
void build_float(model_builder *builder, Onnx__NodeProto *node, const char *name, float value);
void build_ints(model_builder *builder, Onnx__NodeProto *node, const char *name, size_t n, const int64_t *values);
void build_property(model_builder *builder, Onnx__NodeProto *node, const char *key, const char *value);
/* `bytes` NULL: no raw_data. */
Onnx__TensorProto *build_tensor(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims,
                                const void *bytes, size_t size);
Onnx__TensorProto *build_initializer(model_builder *builder, const char *name, int dtype, int rank, const int64_t *dims,
                                     const void *bytes, size_t size);
void build_external(model_builder *builder, Onnx__TensorProto *tensor, const char *key, const char *value);

/* The model's bytes, valid until build_end(). */
void build_bytes(model_builder *builder);
/* Packs, opens and imports; `directory` as in egi_onnx_open_memory(). */
eg_status build_load(model_builder *builder, const char *directory, egi_module **out_module);

/* Opens and imports a file. */
eg_status support_load(eg_context *ctx, const char *path, egi_module **out_module);
/* Text of the module's first graph with all values; freed by egi_text_free(). */
void support_print(const egi_module *module, egi_text *out);
void support_make_directory(char *out_path, size_t capacity);
void support_remove_directory(const char *path);

#endif
