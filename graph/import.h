/* The inside of the ONNX importer: what its files share. */
#ifndef ENGRAFT_GRAPH_IMPORT_H
#define ENGRAFT_GRAPH_IMPORT_H

#include "graph/graph.h"
#include "proto/proto.h"

/* Operator-set versions by domain ("" for ai.onnx), of a model or a function. */
typedef struct egi_opsets {
  const Onnx__OperatorSetIdProto *const *rows;
  size_t count;
} egi_opsets;

typedef struct egi_importer {
  eg_context *ctx;
  egi_module *module;
  egi_onnx *file;
  egi_arena scratch; /* of the import alone */
  const char *path;
  egi_map symbols; /* dim_params that are the whole size of a dim of a graph input */
  bool has_scopes; /* some node says its module path in its metadata */
} egi_importer;

/* A graph being filled, inside the ones whose values it sees. */
typedef struct egi_import_scope {
  egi_importer *importer;
  const struct egi_import_scope *outer; /* NULL for a graph or function of its own */
  egi_graph *graph;
  egi_opsets opsets;
  const char *function; /* name of the function whose body this is, or NULL */
  egi_map refused;      /* tensors that cannot be represented, to why_not[] */
  const char **reasons;
  uint32_t n_reasons, reasons_capacity;
  const bool *is_weight; /* by node of the message: a Constant that became a weight */
} egi_import_scope;

/* "" for NULL. */
const char *egi_import_text(const char *text);
/* "model.onnx: node "x" (Add): …"; an unnamed node is known by its first output. */
eg_status egi_import_fail_node(const egi_import_scope *scope, const Onnx__NodeProto *node, eg_status status,
                               const char *format, ...) EGI_PRINTF(4, 5);
/* "model.onnx: tensor "x": …" */
eg_status egi_import_fail_tensor(const egi_importer *importer, const char *name, eg_status status, const char *format,
                                 ...) EGI_PRINTF(4, 5);

/* ---- scope_messages.c */

/* Metadata of a node: the paths of the modules it stands in, from the outermost to the node itself. */
#define EGI_NAME_SCOPES "pkg.torch.onnx.name_scopes"
/* The module path that a node's metadata or name says, or NULL; `*out_is_listed`: the metadata. */
eg_status egi_scope_of_message(egi_arena *arena, const Onnx__NodeProto *message, const char **out_scope,
                               bool *out_is_listed);
/* Puts the path into the message's metadata where an importer would not find it otherwise; *out_is_put. */
eg_status egi_scope_put(egi_arena *arena, const char *scope, Onnx__NodeProto *message, bool *out_is_put);

/* ---- import_types.c */

/* Collects the bare dim_params of a graph's inputs. */
eg_status egi_import_symbols(egi_importer *importer, const Onnx__GraphProto *graph);
/* Adds a graph input. `is_main`: of the model's own graph, where a type is required. */
eg_status egi_import_input(egi_import_scope *scope, const Onnx__ValueInfoProto *info, bool is_main);
/* Declares the type of a node's output; dims of symbols that no input has are left unknown. */
eg_status egi_import_hint(egi_import_scope *scope, const Onnx__ValueInfoProto *info);

/* ---- import_tensors.c */

/* A weight row from a tensor. *out_reason says why it cannot be represented (the tensor may be unused); else NULL. */
eg_status egi_import_tensor(egi_importer *importer, const Onnx__TensorProto *tensor, const char *name,
                            egi_weight *out_weight, const char **out_reason);
/* The weight of a Constant node, or *out_is_weight = false where it has none (a text, a reference). */
eg_status egi_import_constant(egi_importer *importer, const Onnx__NodeProto *node, egi_weight *out_weight,
                              bool *out_is_weight, const char **out_reason);

/* ---- import_nodes.c */

/* First the names that nodes make, then the nodes: types of the names can be declared between. */
eg_status egi_import_declare(egi_import_scope *scope, size_t n_nodes, Onnx__NodeProto *const *nodes);
eg_status egi_import_nodes(egi_import_scope *scope, size_t n_nodes, Onnx__NodeProto *const *nodes);
/* One attribute; *out_is_kept is false for kinds that the graph does not model: the exporter takes them from the node's
 * origin. */
eg_status egi_import_attribute(egi_import_scope *scope, const Onnx__AttributeProto *attribute,
                               egi_attribute *out_attribute, bool *out_is_kept);
/* Resolves a name that a node or an output of the graph uses; fails when nothing makes it. `node` may be NULL. */
eg_status egi_import_use(egi_import_scope *scope, const Onnx__NodeProto *node, const char *name,
                         egi_value_id *out_value);
/* Fails when the name is taken here or visible from outside. */
eg_status egi_import_claim(const egi_import_scope *scope, const Onnx__NodeProto *node, const char *name);
/* Remembers a tensor that must not be used. */
eg_status egi_import_refuse(egi_import_scope *scope, const char *name, const char *reason);

/* ---- import.c */

/* Fills scope->graph: initializers, inputs, nodes, outputs. */
eg_status egi_import_graph(egi_import_scope *scope, const Onnx__GraphProto *graph, bool is_main);
/* Version of a domain; 0 when it is not imported. */
int64_t egi_opset_version(const egi_opsets *opsets, const char *domain);
/* Versions are sensible, each domain stands there once. */
eg_status egi_import_opsets(const egi_importer *importer, const egi_opsets *opsets);

/* ---- import_bodies.c */

/* Values that the bodies of a control-flow node see become inputs of the node and of the bodies. */
eg_status egi_import_captures(egi_import_scope *scope, const Onnx__NodeProto *proto, egi_node *node);

/* ---- import_attributes.c */

/* A standard operator's attributes, brought to its newest form, are such as it has. */
eg_status egi_import_check_attributes(egi_import_scope *scope, const Onnx__NodeProto *proto, const egi_node *node);

/* ---- import_functions.c */

eg_status egi_import_functions(egi_importer *importer, const Onnx__ModelProto *model);

/* ---- upgrade.c */

/* Brings a node (its lists in the scratch arena) from `version` of the standard operators to the newest form, adding
 * the weights and nodes that this takes to the graph. */
typedef struct egi_upgrade {
  egi_graph *graph;
  egi_arena *scratch;
  int64_t version;
} egi_upgrade;
eg_status egi_upgrade_node(egi_upgrade *upgrade, egi_node *node);
/* Oldest version that it knows; older files are read as far as their operators have not changed since. */
#define EGI_OLDEST_OPSET 7

#endif
