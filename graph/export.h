/* The inside of the ONNX exporter: what its files share. */
#ifndef ENGRAFT_GRAPH_EXPORT_H
#define ENGRAFT_GRAPH_EXPORT_H

#include "graph/graph.h"
#include "proto/proto.h"

/* Bytes to be written to PATH.data. */
typedef struct egi_export_piece {
  egi_range range;
  uint64_t offset;
} egi_export_piece;

typedef struct egi_exporter {
  eg_context *ctx;
  const egi_module *module;
  const char *path;
  uint64_t embed_limit;         /* bytes of weights that a message may hold */
  egi_arena arena;              /* of the message being built */
  const Onnx__ModelProto *file; /* what the module came from, or NULL */
  egi_map infos;                /* name of a value -> index in info_rows */
  egi_map tensors;              /* name -> index of file->graph->initializer */
  Onnx__ValueInfoProto **info_rows;
  egi_map node_names;
  egi_map domains; /* other operators' domains -> index in domain_rows */
  const char **domain_rows;
  uint32_t n_domains, domains_capacity;
  int64_t version;          /* of the standard operators */
  bool has_scopes;          /* module paths were put into metadata */
  bool *is_function_called; /* by function */
  /* where weights go */
  const char *directory; /* resolved, of the new file */
  egi_map locations;     /* external file as the weights name it -> index in location_rows */
  const char **location_rows;
  uint32_t n_locations, locations_capacity;
  const char *data_location; /* "model.onnx.data" */
  bool has_data_file;
  egi_export_piece *pieces;
  uint32_t n_pieces, pieces_capacity;
  uint64_t data_bytes;
} egi_exporter;

/* As egi_module_export(); `embed_limit`: see there. */
eg_status egi_export_with_limit(const egi_module *module, const egi_graph *graph, const char *path,
                                uint64_t embed_limit);

/* Texts of a message are not written to. */
char *egi_export_text(const char *text);

/* ---- export_values.c */
eg_status egi_export_info(egi_exporter *exporter, const egi_graph *graph, egi_value_id value,
                          Onnx__ValueInfoProto **out_info);

/* ---- export_tensors.c */
/* Decides which weights of the graph stay in external files, are embedded, or go to PATH.data. */
eg_status egi_export_plan_weights(egi_exporter *exporter, const egi_graph *graph);
eg_status egi_export_tensor(egi_exporter *exporter, const egi_weight *weight, const char *name,
                            Onnx__TensorProto **out_tensor);
eg_status egi_export_write_data(egi_exporter *exporter);

/* ---- export_nodes.c */
/* Nodes of a graph; with `has_constants` its weights stand before them as Constant nodes. */
eg_status egi_export_nodes(egi_exporter *exporter, const egi_graph *graph, bool has_constants,
                           Onnx__NodeProto ***out_nodes, size_t *out_count);
eg_status egi_export_attribute(egi_exporter *exporter, const egi_attribute *attribute,
                               const Onnx__AttributeProto *origin, Onnx__AttributeProto **out_attribute);
eg_status egi_export_graph(egi_exporter *exporter, const egi_graph *graph, Onnx__GraphProto **out_graph);

/* ---- export_opsets.c */
/* Finds the operator-set version that the nodes of a graph need, other domains and the functions they call. */
eg_status egi_export_survey(egi_exporter *exporter, const egi_graph *graph);

#endif
