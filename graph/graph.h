/* The intermediate representation: modules, graphs, values, nodes, symbolic dims; import, export, text, checking.
 *
 * A module has named entry points (graphs) over shared persistent values: weights (bytes of a file, never copied) and
 * states (adapters, gradients, optimizer). Values and nodes are rows in arrays named by 32-bit ids; id 0 is "none".
 * All of it lives in the module's arena: a module is freed whole. */
#ifndef ENGRAFT_GRAPH_GRAPH_H
#define ENGRAFT_GRAPH_GRAPH_H

#include "base/base.h"

#define EGI_MAX_RANK 8

/* ---- element types -------------------------------------------------------------------------------------------- */

typedef enum egi_dtype_class {
  EGI_CLASS_NONE,
  EGI_CLASS_FLOAT,
  EGI_CLASS_INTEGER,
  EGI_CLASS_UNSIGNED,
  EGI_CLASS_BOOLEAN,
  EGI_CLASS_COMPLEX,
  EGI_CLASS_STRING
} egi_dtype_class;

/* false for numbers outside dtypes.def. */
bool egi_dtype_is_known(int64_t number);
unsigned egi_dtype_bits(eg_dtype dtype);
egi_dtype_class egi_dtype_kind(eg_dtype dtype);
bool egi_dtype_is_float(eg_dtype dtype);
const char *egi_dtype_name(eg_dtype dtype); /* ONNX text syntax; "undefined" */
eg_dtype egi_dtype_from_name(const char *name);
/* ceil(count * bits / 8); false on overflow. */
bool egi_dtype_bytes(eg_dtype dtype, uint64_t count, uint64_t *out_bytes);

/* ---- tensors in memory ---------------------------------------------------------------------------------------- */

/* A strided view; strides in elements, may be 0 (broadcast). Types below 8 bits are packed, contiguous only. */
typedef struct egi_tensor {
  void *data;
  eg_dtype dtype;
  int rank;
  int64_t dims[EGI_MAX_RANK];
  int64_t strides[EGI_MAX_RANK];
} egi_tensor;

int64_t egi_tensor_count(const egi_tensor *tensor);
bool egi_tensor_is_contiguous(const egi_tensor *tensor);
/* Sets row-major strides from dims. */
void egi_tensor_set_contiguous(egi_tensor *tensor);
/* Element i of a contiguous tensor of floats from 16 bits on, i32, i64 or booleans: NaN, or false, for other types.
 * For the few numbers that passes look at, not for kernels. */
double egi_tensor_number(const egi_tensor *tensor, int64_t i);
bool egi_tensor_set(egi_tensor *tensor, int64_t i, double value);

/* ---- symbolic dims -------------------------------------------------------------------------------------------- */

/* A dim is a handle to a hash-consed polynomial over named symbols and opaque atoms (floor quotients, min, max, unknown
 * sizes) in normal form: equal handles are equal expressions. EGI_DIM_NONE is "not known / out of memory"; every
 * function accepts it and gives it back. */
typedef uint32_t egi_dim;
#define EGI_DIM_NONE 0u

typedef struct egi_dims egi_dims;
typedef struct egi_binding {
  egi_dim symbol;
  int64_t value;
} egi_binding;

eg_status egi_dims_create(egi_arena *arena, egi_dims **out_dims);
egi_dim egi_dim_constant(egi_dims *dims, int64_t value);
egi_dim egi_dim_symbol(egi_dims *dims, const char *name); /* same name, same handle */
egi_dim egi_dim_fresh(egi_dims *dims, const char *hint);  /* an unknown size, different from every other */
egi_dim egi_dim_add(egi_dims *dims, egi_dim a, egi_dim b);
egi_dim egi_dim_subtract(egi_dims *dims, egi_dim a, egi_dim b);
egi_dim egi_dim_multiply(egi_dims *dims, egi_dim a, egi_dim b);
/* Exact polynomial division where it exists, else an opaque floor quotient (towards minus infinity). */
egi_dim egi_dim_divide(egi_dims *dims, egi_dim a, egi_dim b);
egi_dim egi_dim_minimum(egi_dims *dims, egi_dim a, egi_dim b);
egi_dim egi_dim_maximum(egi_dims *dims, egi_dim a, egi_dim b);
/* True when the dim is a known number. */
bool egi_dim_value(const egi_dims *dims, egi_dim dim, int64_t *out_value);
/* True when dim >= 1 is proven for every choice of symbols >= 1. */
bool egi_dim_is_positive(const egi_dims *dims, egi_dim dim);
/* Records that a and b must be equal; from then on egi_dim_resolve maps one to the other when one of them is a bare
 * symbol or atom. EG_ERROR_SHAPE when both are different numbers. */
eg_status egi_dim_assume(egi_dims *dims, egi_dim a, egi_dim b);
/* The symbol is that number from now on, also one that sizes do not have: the length of an empty cache. */
eg_status egi_dim_fix(egi_dims *dims, egi_dim symbol, int64_t value);
/* The dim with all assumptions applied. */
egi_dim egi_dim_resolve(egi_dims *dims, egi_dim dim);
/* Number with the bindings applied; false when something stays unknown or an assumption is violated. */
bool egi_dim_evaluate(egi_dims *dims, egi_dim dim, const egi_binding *bindings, size_t n, int64_t *out_value);
/* First recorded assumption that the bindings violate, as text, or NULL. */
const char *egi_dims_check(egi_dims *dims, const egi_binding *bindings, size_t n);
/* "batch*sequence + 1" */
void egi_dim_print(const egi_dims *dims, egi_dim dim, egi_text *out);
/* Symbols named so far (not atoms). */
size_t egi_dims_symbol_count(const egi_dims *dims);
egi_dim egi_dims_symbol_at(const egi_dims *dims, size_t index, const char **out_name);

/* ---- operators ------------------------------------------------------------------------------------------------ */

typedef enum egi_op {
  EGI_OP_NONE = 0, /* a deleted node */
  EGI_OP_UNKNOWN,  /* not in ops.def: named by the node's op_name and domain */
#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient) EGI_OP_##symbol,
#include "graph/ops.def"
#undef EGI_OP
  EGI_OP_COUNT
} egi_op;

enum {
  EGI_OP_VIEW = 1,
  EGI_OP_ROW_LOCAL = 2,
  EGI_OP_ELEMENTWISE = 4,
  EGI_OP_COMMUTATIVE = 8,
  EGI_OP_PACKING_AWARE = 16,
  EGI_OP_EFFECT = 32,
  EGI_OP_INTEGER = 64
};

typedef struct egi_op_info {
  const char *domain, *name;
  int version;
  uint8_t in_min, in_max, out_min, out_max; /* 255: any number */
  uint32_t flags;
} egi_op_info;
const egi_op_info *egi_op_get(egi_op op);
/* Rows of a block whose bounds PackedMetadata gives, where its attribute `block` is absent. */
#define EGI_BLOCK_ROWS 64
/* Whether the operand may be left out while later ones are there. */
bool egi_op_may_lack(egi_op op, unsigned input);
/* EGI_OP_UNKNOWN when there is none. "ai.onnx" is "". */
egi_op egi_op_find(const char *domain, const char *name);

/* ---- weights and states --------------------------------------------------------------------------------------- */

/* Where the bytes of a weight are. */
typedef enum egi_bytes_kind {
  EGI_BYTES_MEMORY, /* `data`: a mapped file, or memory of the arena */
  EGI_BYTES_NORMAL, /* normal(mean 0, std) numbers made at load from (seed, weight name) */
  EGI_BYTES_FILL,   /* every element is `value` */
  EGI_BYTES_PARTS,  /* `parts` one after the other */
  EGI_BYTES_MXFP4,  /* floats in the last dim's blocks of 32: parts[0] float4e2m1, the first in the low half of a byte,
                       times parts[1] float8e8m0, one a block */
  EGI_BYTES_QUANTISED /* one of the tensors that `quantisation` makes at load */
} egi_bytes_kind;

/* A matrix somewhere in memory, written as it is or transposed. */
typedef struct egi_bytes_part {
  const uint8_t *data;
  int64_t rows, columns; /* as they lie there */
  bool is_transposed;
} egi_bytes_part;

typedef struct egi_bytes {
  egi_bytes_kind kind;
  const uint8_t *data; /* little-endian, row-major, as TensorProto.raw_data; may be unaligned */
  uint64_t size_bytes;
  const char *file; /* external file it lies in, relative to the model's directory; NULL: none */
  uint64_t offset;  /* in that file */
  double value;     /* NORMAL: standard deviation; FILL: the value */
  uint64_t seed;    /* NORMAL */
  const egi_bytes_part *parts;
  uint32_t n_parts;
  const struct egi_quantisation *quantisation;
  uint32_t quantised_tensor; /* QUANTISED: which, as in egi_quantised_tensor */
} egi_bytes;

/* A constant tensor: initializer or constant. Shapes of weights are numbers. */
typedef struct egi_weight {
  const char *name;
  eg_dtype dtype;
  int rank;
  int64_t dims[EGI_MAX_RANK];
  egi_bytes bytes;
  bool is_input; /* in a file an input too, of which it is the default; its value may have symbolic dims */
} egi_weight;

/* Matrices of a float weight as codes of 4 bits (storage bnb4 of graph/linear.h), made when the first of the tensors is
 * loaded: the whole flattened [matrices, rows, columns] in blocks. */
typedef enum egi_quantised_tensor {
  EGI_QUANTISED_CODES,  /* u8 [ceil(n / 2)] */
  EGI_QUANTISED_SCALES, /* f32 [blocks]; u8 where they are nested */
  EGI_QUANTISED_NESTED, /* f32 */
  EGI_QUANTISED_PARTS
} egi_quantised_tensor;
typedef struct egi_quantisation {
  egi_weight matrix;  /* [matrices, rows, columns], or [matrices, columns, rows] where it is transposed */
  bool is_transposed; /* what is quantised is [rows, columns] all the same */
  int64_t n_matrices, rows, columns;
  unsigned type; /* egi_four_bit of base/blockwise.h */
  int64_t block; /* a power of two from 32 to 4096 */
  bool is_nested;
  uint32_t weights[EGI_QUANTISED_PARTS]; /* the tensors, in the module; 0: none */
} egi_quantisation;

/* Buffers that a trainer keeps between steps. */
typedef enum egi_state_pool {
  EGI_POOL_PARAMETERS, /* f32, all trainable parameters one after the other */
  EGI_POOL_GRADIENTS,  /* f32, same layout */
  EGI_POOL_MOMENT1,    /* f32, same layout */
  EGI_POOL_MOMENT2,    /* f32, same layout */
  EGI_POOL_STEP,       /* egi_step_state */
  EGI_POOL_CACHE,      /* keys and values of generation, of one type */
  EGI_POOL_COUNT
} egi_state_pool;

/* Step state, in device memory (host memory on the CPU); in graphs a state of type U8 [sizeof(egi_step_state)]. */
typedef struct egi_step_state {
  int64_t step; /* 1 in the first optimizer step */
  float learning_rate;
  float weight_decay;
  float beta1, beta2, epsilon;
  float correction1;     /* 1 - beta1^step */
  float correction2;     /* 1 - beta2^step */
  float clip;            /* 0: none */
  float inverse_targets; /* 1 / trained tokens of the step: the gradients in the pool are multiplied by it */
  float loss_scale;      /* 1 */
  int32_t micro_batch;   /* of the step, from 0 */
  int32_t has_gradients; /* 0 before the first micro-batch of a step: Accumulate overwrites */
  float rest1, rest2;    /* 1 - beta1, 1 - beta2, rounded once */
} egi_step_state;

/* Rows of a tensor that is several tensors of the Hugging Face model, one below the other. */
typedef struct egi_rows_part {
  const char *name;
  int64_t rows;
} egi_rows_part;

/* A piece of a pool: a tensor that outlives a step. */
typedef struct egi_state {
  const char *name; /* as in the file it is saved to: PEFT or Hugging Face name */
  egi_state_pool pool;
  eg_dtype dtype;
  int rank;
  int64_t dims[EGI_MAX_RANK]; /* as in the graph */
  uint64_t offset;            /* in elements of dtype, from the pool's start */
  uint32_t weight;            /* initialised from this weight (full training), or 0 */
  bool is_transposed;         /* the file holds the 2-D transpose of what the graph holds */
  bool is_vector;             /* the file holds one dim, whatever dims of 1 the graph has beside it */
  bool has_decay;             /* weight decay applies */
  uint32_t n_stacked;         /* an adapter of that many experts in one, or 0 */
  const egi_rows_part *parts; /* in the file: tensors of these names and rows (its first dim); NULL: the whole */
  uint32_t n_parts;
} egi_state;

/* ---- values and nodes ----------------------------------------------------------------------------------------- */

typedef uint32_t egi_value_id;
typedef uint32_t egi_node_id;
/* In the list of outputs given to egi_graph_add_node(): not wanted, stored as 0. */
#define EGI_VALUE_UNWANTED UINT32_MAX

typedef enum egi_value_kind {
  EGI_VALUE_NONE = 0, /* deleted */
  EGI_VALUE_INPUT,
  EGI_VALUE_WEIGHT,
  EGI_VALUE_STATE,
  EGI_VALUE_NODE
} egi_value_kind;

typedef struct egi_value {
  const char *name; /* unique in the graph */
  egi_value_kind kind;
  eg_dtype dtype;
  int rank; /* -1: unknown */
  egi_dim dims[EGI_MAX_RANK];
  egi_node_id producer; /* NODE */
  uint32_t index;       /* NODE: which output; WEIGHT, STATE: index in the module; INPUT: position */
  /* Known content of an integer or boolean tensor of rank 0 or 1 (shape arithmetic), else NULL; single elements may be
   * EGI_DIM_NONE: unknown. */
  const egi_dim *elements;
  uint32_t n_elements;
} egi_value;

/* Attribute of If, Loop and Scan: how many of the node's last inputs are values that its bodies see of the graph around
 * them; they are the last inputs of each body as well. Not in files: import and export convert. */
#define EGI_CAPTURES "engraft.captures"

typedef enum egi_attribute_kind {
  EGI_ATTRIBUTE_FLOAT = 1,
  EGI_ATTRIBUTE_INT = 2,
  EGI_ATTRIBUTE_STRING = 3,
  EGI_ATTRIBUTE_TENSOR = 4,
  EGI_ATTRIBUTE_GRAPH = 5,
  EGI_ATTRIBUTE_FLOATS = 6,
  EGI_ATTRIBUTE_INTS = 7,
  EGI_ATTRIBUTE_STRINGS = 8,
  EGI_ATTRIBUTE_REFERENCE = 100 /* in a function body: the caller's attribute named u.s; absent there, absent here */
} egi_attribute_kind;

typedef struct egi_attribute {
  const char *name;
  egi_attribute_kind kind;
  uint32_t count; /* of ints, floats, strings; bytes of a string; REFERENCE: ONNX number of the type, or 0 */
  union {
    int64_t i;
    float f;
    const char *s; /* NUL-terminated, `count` bytes before it */
    const int64_t *ints;
    const float *floats;
    const char *const *strings;
    uint32_t weight;         /* TENSOR: index in the module */
    struct egi_graph *graph; /* GRAPH: body; sees the values of the graph around it by name */
  } u;
} egi_attribute;

typedef struct egi_node {
  egi_op op;
  const char *op_name, *domain; /* as in the file; NULL for nodes made from ops.def */
  const char *overload;         /* of a function call, or NULL */
  const char *name;             /* of the node in the file, "" when it had none */
  const char *scope;            /* module path, "model.layers.0.self_attn.q_proj", or NULL */
  egi_value_id *inputs;         /* 0: optional input left out */
  egi_value_id *outputs;        /* 0: output not wanted */
  egi_attribute *attributes;
  uint16_t n_inputs, n_outputs, n_attributes;
  const void *origin; /* Onnx__NodeProto it came from, for what the graph does not model; or NULL */
} egi_node;

typedef struct egi_graph {
  struct egi_module *module;
  const char *name;
  egi_value *values; /* [0] unused */
  egi_node *nodes;   /* [0] unused; in execution order after egi_graph_tidy() */
  egi_value_id *inputs, *outputs;
  uint32_t n_values, n_nodes, n_inputs, n_outputs; /* n_values, n_nodes count row 0 */
  uint32_t values_capacity, nodes_capacity, inputs_capacity, outputs_capacity;
  egi_map names; /* value name -> id */
  uint32_t next_name;
  egi_value_id *weight_values, *state_values; /* the value of each weight or state of the module, 0: none yet */
  uint32_t weight_values_capacity, state_values_capacity;
} egi_graph;

/* A model-local function. Its graph's inputs and outputs are the formal ones; types are unknown until it is inlined. */
typedef struct egi_function {
  const char *domain, *name, *overload;
  egi_graph *graph;
  const egi_attribute *defaults; /* attributes with a default */
  uint32_t n_defaults;
} egi_function;

/* Runs nodes or whole graphs on the CPU for passes; implemented by backend/, wired in api/. Tensors in and out are
 * contiguous; outputs are allocated in `arena`. */
typedef struct egi_evaluator {
  eg_status (*node)(eg_context *ctx, const egi_graph *graph, egi_node_id node, const egi_tensor *inputs,
                    egi_arena *arena, egi_tensor *outputs);
  eg_status (*graph)(eg_context *ctx, const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                     egi_tensor *outputs);
} egi_evaluator;

typedef struct egi_module {
  eg_context *ctx;
  egi_arena arena;
  egi_dims *dims;
  egi_weight *weights; /* [0] unused */
  egi_state *states;   /* [0] unused */
  uint32_t n_weights, n_states, weights_capacity, states_capacity;
  uint64_t pool_elements[EGI_POOL_COUNT]; /* size of each pool, in elements of its dtype */
  bool is_pool_on_host[EGI_POOL_COUNT];   /* in host memory, whatever the device: only Reload and StoreState take it */
  egi_graph **graphs;                     /* entry points; [0] is the imported one */
  uint32_t n_graphs, graphs_capacity;
  egi_function *functions; /* model-local functions, until inline_functions */
  uint32_t n_functions, functions_capacity;
  const egi_evaluator *evaluator; /* NULL: passes that need one do nothing */
  const struct egi_costs *costs;  /* graph/costs.h; NULL: passes that need them do nothing */
  struct egi_onnx *file;          /* what it was imported from; shared by clones, counted; NULL: made in memory */
  struct egi_module *base;        /* what it was cloned from: kept alive, since texts and weight bytes are shared */
  uint32_t references;            /* itself and its clones */
  bool assumes_positions;         /* passes took positions for 0, 1, 2, .. in each row */
} egi_module;

/* ---- building and editing ------------------------------------------------------------------------------------- */

eg_status egi_module_create(eg_context *ctx, egi_module **out_module);
/* Shares weight bytes and the file, copies everything else. */
eg_status egi_module_clone(const egi_module *module, egi_module **out_module);
void egi_module_destroy(egi_module *module);
eg_status egi_module_add_graph(egi_module *module, const char *name, egi_graph **out_graph);
/* Another entry point with the same nodes over the same weights and states; value ids are those of `graph`. */
eg_status egi_module_copy_graph(egi_module *module, const egi_graph *graph, const char *name, egi_graph **out_graph);
/* A graph that is no entry point: a function's or an attribute's body. */
eg_status egi_graph_create(egi_module *module, const char *name, egi_graph **out_graph);
/* A graph that is no entry point: the body of a function or of an attribute. */
eg_status egi_graph_create(egi_module *module, const char *name, egi_graph **out_graph);
egi_graph *egi_module_find_graph(const egi_module *module, const char *name);
/* Nodes that a graph may grow to when calls are inlined: the limit that the file was opened with, or 4,000,000. */
uint64_t egi_module_max_nodes(const egi_module *module);
eg_status egi_module_add_weight(egi_module *module, const egi_weight *weight, uint32_t *out_index);
/* Places the state at the end of its pool (64-byte aligned) and sets its offset. */
eg_status egi_module_add_state(egi_module *module, const egi_state *state, uint32_t *out_index);
uint64_t egi_module_pool_bytes(const egi_module *module, egi_state_pool pool);
/* A state that is a whole pool as it stands now: f32 [elements], or U8 [sizeof(egi_step_state)] for EGI_POOL_STEP. */
eg_status egi_module_add_pool_state(egi_module *module, egi_state_pool pool, uint32_t *out_index);
/* Elements [first, first + n) of a pool of float32. */
eg_status egi_module_add_pool_piece(egi_module *module, egi_state_pool pool, uint64_t first, uint64_t n,
                                    uint32_t *out_index);

/* Names are copied; NULL or a taken name gives a fresh one. Dims are EGI_DIM_NONE where unknown. */
eg_status egi_graph_add_input(egi_graph *graph, const char *name, eg_dtype dtype, int rank, const egi_dim *dims,
                              egi_value_id *out_value);
/* The value for a weight or state; one per index and graph. */
eg_status egi_graph_add_weight(egi_graph *graph, uint32_t weight, egi_value_id *out_value);
eg_status egi_graph_add_state(egi_graph *graph, uint32_t state, egi_value_id *out_value);
eg_status egi_graph_add_output(egi_graph *graph, egi_value_id value);
/* Copies the node row, its texts, lists and attributes. An entry 0 of `node->outputs` (or no list at all) makes a fresh
 * value, EGI_VALUE_UNWANTED none; any other must be a value without a producer: from egi_graph_add_value(), or the
 * output of a removed node, which comes back under its old name. Does not infer shapes. Pointers into graph->nodes and
 * graph->values are void afterwards. EG_ERROR_FORMAT: the value has a producer. */
eg_status egi_graph_add_node(egi_graph *graph, const egi_node *node, egi_node_id *out_node);
eg_status egi_graph_add_value(egi_graph *graph, const char *name, egi_value_id *out_value);
eg_status egi_graph_rename_value(egi_graph *graph, egi_value_id value, const char *name);
/* Its name is free again; uses that are left are the caller's mistake. */
void egi_graph_delete_value(egi_graph *graph, egi_value_id value);
/* Every use of `old_value` (node inputs, graph outputs) becomes one of `new_value`. */
void egi_graph_replace_uses(egi_graph *graph, egi_value_id old_value, egi_value_id new_value);
/* Many at once, in one sweep: every use of v becomes one of map[v] where that is not 0, and so on along chains.
 * map has n_values entries; chains in it are shortened. */
void egi_graph_replace_many(egi_graph *graph, egi_value_id *map);
/* The node and those of its outputs that nobody else made go. */
void egi_graph_remove_node(egi_graph *graph, egi_node_id node);
/* Sorts nodes topologically (stable), drops deleted rows and values without a use; EG_ERROR_FORMAT names a node on a
 * cycle. Node ids change, value ids do not. */
eg_status egi_graph_tidy(egi_graph *graph);
egi_value_id egi_graph_find_value(const egi_graph *graph, const char *name);

/* Consumers of each value, as ranges of one list: node ids of value v are list[start[v] .. start[v+1]). A node that
 * uses a value twice stands there twice. */
typedef struct egi_uses {
  uint32_t *start;
  egi_node_id *list;
} egi_uses;
eg_status egi_graph_uses(const egi_graph *graph, egi_arena *arena, egi_uses *out_uses);
bool egi_graph_is_output(const egi_graph *graph, egi_value_id value);

/* Attributes by name; the default when absent. */
const egi_attribute *egi_node_attribute(const egi_node *node, const char *name);
int64_t egi_node_int(const egi_node *node, const char *name, int64_t default_value);
float egi_node_float(const egi_node *node, const char *name, float default_value);
const char *egi_node_string(const egi_node *node, const char *name, const char *default_value);
const int64_t *egi_node_ints(const egi_node *node, const char *name, uint32_t *out_count); /* NULL when absent */
/* Makers for literal attribute lists. */
egi_attribute egi_attribute_int(const char *name, int64_t value);
egi_attribute egi_attribute_float(const char *name, float value);
egi_attribute egi_attribute_string(const char *name, const char *value);
egi_attribute egi_attribute_ints(const char *name, const int64_t *values, uint32_t count);
/* Copies name and payload into the arena; bodies and tensors are shared. */
eg_status egi_attribute_copy(egi_arena *arena, const egi_attribute *attribute, egi_attribute *out_copy);
/* Sets or replaces one attribute (copied). */
eg_status egi_node_set_attribute(egi_graph *graph, egi_node_id node, const egi_attribute *attribute);

/* A weight value's tensor, when its bytes are in memory and its type is at least 8 bits wide: data may be unaligned. */
bool egi_value_constant(const egi_graph *graph, egi_value_id value, egi_tensor *out_tensor);
/* Known integers of a value: from elements that are all numbers, or an i64/i32 weight. At most `capacity`. */
bool egi_value_integers(const egi_graph *graph, egi_value_id value, int64_t *out, uint32_t capacity,
                        uint32_t *out_count);
/* Elements of an integer or boolean weight; false when they are not in memory or more than `capacity`. */
bool egi_weight_integers(const egi_weight *weight, int64_t *out, uint32_t capacity, uint32_t *out_count);
/* A float or integer constant with one element, as a double. */
bool egi_weight_scalar(const egi_weight *weight, double *out);
bool egi_value_scalar(const egi_graph *graph, egi_value_id value, double *out);

/* Emits nodes for passes; errors are sticky: after one, every call returns 0, and `status` is checked once. Shapes are
 * inferred as nodes are added. New nodes carry `scope` and take their names from it. */
typedef struct egi_emitter {
  egi_graph *graph;
  const char *scope;
  eg_status status;
} egi_emitter;
/* One output. */
egi_value_id egi_emit(egi_emitter *emitter, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                      const egi_attribute *attributes, unsigned n_attributes);
/* Several outputs, written to out_values[n_outputs]; a 0 there on entry means "not wanted" is not possible: all are
 * made. */
void egi_emit_many(egi_emitter *emitter, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                   const egi_attribute *attributes, unsigned n_attributes, egi_value_id *out_values,
                   unsigned n_outputs);
egi_value_id egi_emit_unary(egi_emitter *emitter, egi_op op, egi_value_id a);
egi_value_id egi_emit_binary(egi_emitter *emitter, egi_op op, egi_value_id a, egi_value_id b);
egi_value_id egi_emit_cast(egi_emitter *emitter, egi_value_id a, eg_dtype dtype);
egi_value_id egi_emit_integers(egi_emitter *emitter, const int64_t *values, uint32_t count); /* i64 [count] */
egi_value_id egi_emit_scalar(egi_emitter *emitter, double value, eg_dtype dtype);            /* [] */

/* ---- checking and inference ----------------------------------------------------------------------------------- */

/* Structure, op signatures, dominance, types; used after every pass in debug builds. EG_ERROR_SHAPE or _INTERNAL. */
eg_status egi_graph_verify(const egi_graph *graph);
/* Types, shapes and known contents of a node's outputs from its inputs. */
eg_status egi_infer_node(egi_graph *graph, egi_node_id node);
eg_status egi_infer_graph(egi_graph *graph);
/* A type that stands on a value counts as declared: inference may refine it, and fails where it contradicts it. A pass
 * that changes types forgets those of the node outputs first. */
void egi_graph_forget_types(egi_graph *graph);
/* A failure with the prefix: node "name" (OpType): */
eg_status egi_fail_node(const egi_graph *graph, egi_node_id node, eg_status status, const char *format, ...)
    EGI_PRINTF(4, 5);
/* Appends "float[batch,sequence,64]"; "float" is a scalar, "float[]" has no known rank (the text syntax). */
void egi_value_print_type(const egi_graph *graph, egi_value_id value, egi_text *out);

/* Several things that are wrong with a file, in one error. */
typedef struct egi_findings {
  eg_context *ctx;
  egi_text text;
  unsigned count;
  eg_status status; /* of the first */
} egi_findings;
void egi_findings_begin(egi_findings *findings, eg_context *ctx);
/* Notes the context's last failure when it is the file's fault; false: any other status, which ends the search. */
bool egi_findings_note(egi_findings *findings, eg_status status);
void egi_findings_add(egi_findings *findings, eg_status status, const char *message);
/* EG_OK when nothing was found. */
eg_status egi_findings_end(egi_findings *findings);

/* ---- import, export, text ------------------------------------------------------------------------------------- */

/* Takes over `file` (also on failure). Sorts nodes, upgrades old operator versions (each function by its own imports),
 * turns Constant nodes into weights, sets `scope` from name_scopes metadata or the node's path. Neither inlines nor
 * infers: then come inline_functions, egi_graph_check_operators() and egi_infer_graph(). */
eg_status egi_module_import(eg_context *ctx, struct egi_onnx *file, egi_module **out_module);
/* Path of the file that it was imported from; NULL: there is none. */
const char *egi_module_path(const egi_module *module);
/* The file that the module was imported from, imported again, as egi_module_import() leaves it. */
eg_status egi_module_import_again(const egi_module *module, egi_module **out_module);
/* Module path in a node name such as "/model/layers.0/self_attn/q_proj/MatMul" ("model.layers.0.self_attn.q_proj"), or
 * NULL when the name is no path. */
const char *egi_scope_from_node_name(egi_arena *arena, const char *node_name);
/* Adds to scopes from node names the modules that those leave out, as the names of the weights tell. */
eg_status egi_graph_complete_scopes(egi_graph *graph, egi_arena *scratch);
/* Operators outside ops.def: all of them in one error, EG_ERROR_UNSUPPORTED. */
eg_status egi_graph_check_operators(const egi_graph *graph);
/* Each state that nodes take becomes an input, what an effect leaves in one an output: a parameter "NAME" is the input
 * NAME, a sum of gradients the input "engraft.gradient_before.NAME" and the output "engraft.gradient.NAME", the step
 * state "engraft.step". */
eg_status egi_graph_expose_states(egi_graph *graph);
/* Writes a graph as an ONNX file; see eg_model_save(). Calls of functions that are left take the functions along. */
eg_status egi_module_export(const egi_module *module, const egi_graph *graph, const char *path);
/* ONNX text syntax of the whole model (header, functions, graph); weights of more than `max_elements` values are
 * printed as their type alone (0: all values). */
eg_status egi_module_print(const egi_module *module, const egi_graph *graph, uint32_t max_elements, egi_text *out);
/* Adds a function in the text syntax, header and all. */
eg_status egi_module_parse_function(egi_module *module, const char *text, size_t length);
/* Adds the functions of graph/functions.def that nodes of the graph and of functions call. */
eg_status egi_module_add_standard_functions(egi_module *module, egi_graph *graph);
/* Whether the operator has a row in graph/bodies.def: a body of plain operators. */
bool egi_op_has_body(egi_op op);
/* Whether --no-fuse puts the body in the operator's place. */
bool egi_op_is_fused(egi_op op);
typedef enum egi_bodies {
  EGI_BODIES_FUSED, /* of fused operators */
  EGI_BODIES_OWN,   /* of all operators of domain engraft */
  EGI_BODIES_ALL
} egi_bodies;
/* Every node of these operators becomes a call of a function that holds its body, added to the module; one that has
 * none in its form stays. */
eg_status egi_graph_call_bodies(egi_graph *graph, egi_bodies which, uint32_t *out_count);
/* The other way, for an imported file: calls of functions of domain engraft that hold an operator's body, node for
 * node, become nodes of the operator. */
eg_status egi_graph_recall_bodies(egi_graph *graph);
/* Parses the text syntax; errors name line and column. */
eg_status egi_module_parse(eg_context *ctx, const char *text, size_t length, egi_module **out_module);

#endif
