/* What the planner's files share: layouts, storages, steps, the plan itself, and the planner's working state.
 *
 * The way of a plan: shapes (plan_shapes.c) -> steps and views (plan_steps.c, views.c) -> pieces of concatenations
 * (plan_concat.c) -> kernels prepared (plan_prepare.c) -> streams, record/wait (plan_streams.c) -> in place and offsets
 * (placement.c). Nothing here depends on addresses or the number of threads. */
#ifndef ENGRAFT_BACKEND_PLAN_H
#define ENGRAFT_BACKEND_PLAN_H

#include "backend/backend.h"
#include "backend/quantise.h"

#define EGI_N_STREAMS 3u
#define EGI_ALIGNMENT 64u

/* ---- where values are ----------------------------------------------------------------------------------------- */

typedef enum egi_storage_kind {
  EGI_STORAGE_NONE,
  EGI_STORAGE_WEIGHT,    /* index: weight of the module */
  EGI_STORAGE_STATE,     /* index: pool; the offset is in that pool */
  EGI_STORAGE_INPUT,     /* index: position of the graph input */
  EGI_STORAGE_KNOWN,     /* bytes known when the plan is made */
  EGI_STORAGE_FIXED,     /* computed when a session is made, kept */
  EGI_STORAGE_TRANSIENT, /* in the buffer that is used again and again; is_fixed: during set-up */
  EGI_STORAGE_HOST       /* as TRANSIENT, in a buffer in host memory: what Offload writes */
} egi_storage_kind;

/* A piece of memory. Accesses are counted for each stream of the list it is used in, in sequence numbers from 1;
 * 0: none. A storage that took over another's memory (in place) names it in `root`. */
typedef struct egi_storage {
  egi_storage_kind kind;
  uint32_t index;
  uint64_t size_bytes;
  uint64_t offset_bytes; /* in its buffer */
  const void *bytes;     /* KNOWN */
  uint32_t root;
  uint64_t root_offset;
  bool is_fixed;    /* written by the set-up list */
  bool is_output;   /* read after the run */
  bool is_placed;   /* KNOWN: something refers to it, it has an offset */
  uint32_t version; /* STATE: updates so far while steps are made */
  uint32_t n_reads, n_writes, writer;
  uint32_t first[EGI_N_STREAMS], last[EGI_N_STREAMS];
} egi_storage;

/* Where and how a value lies: `tensor.data` stays NULL. */
typedef struct egi_layout {
  uint32_t storage; /* 0: not placed */
  uint32_t after;   /* 1 + index of the ORDER step that reads must follow; 0: none */
  uint64_t offset_bytes;
  egi_tensor tensor;
} egi_layout;

/* ---- steps ---------------------------------------------------------------------------------------------------- */

typedef enum egi_step_kind {
  EGI_STEP_RUN,
  EGI_STEP_ORDER, /* runs nothing: what is behind it comes after its inputs (Barrier) */
  EGI_STEP_RECORD,
  EGI_STEP_WAIT
} egi_step_kind;

typedef struct egi_step {
  egi_step_kind kind;
  unsigned stream;
  bool is_fixed, is_dead;
  bool is_copy;     /* made by the planner for `node`, not a node of its own */
  uint32_t event;   /* RECORD, WAIT */
  egi_node_id node; /* 0: none */
  const egi_kernel *kernel;
  const void *params;
  uint32_t first_operand; /* inputs, then outputs */
  uint32_t n_inputs, n_outputs;
  uint32_t workspace; /* storage; 0: none */
  int64_t chunk_rows; /* as in egi_kernel_plan */
} egi_step;

/* How a run of steps is executed. */
typedef enum egi_segment_kind { EGI_SEGMENT_EAGER, EGI_SEGMENT_CAPTURED } egi_segment_kind;
typedef struct egi_segment {
  egi_segment_kind kind;
  uint32_t first_step, n_steps;
} egi_segment;

typedef struct egi_step_list {
  egi_step *steps;
  uint32_t n_steps, n_events, n_segments;
  egi_segment *segments;
} egi_step_list;

struct egi_plan {
  eg_context *ctx;
  egi_arena arena;
  const egi_graph *graph;
  const egi_backend *backend;
  egi_step_list setup, main; /* run once when a session is made; run each time */
  egi_layout *operands;
  uint32_t n_operands, operands_capacity;
  egi_storage *storages; /* [0] unused */
  uint32_t n_storages, storages_capacity;
  egi_layout *inputs, *outputs; /* of the graph */
  uint32_t *weights;            /* the weights that are used, ascending */
  uint32_t n_weights;
  bool uses_states;
  egi_plan_bytes bytes;
  egi_plan_transfers transfers;
};

/* ---- the planner ---------------------------------------------------------------------------------------------- */

typedef struct egi_planner {
  eg_context *ctx;
  const egi_graph *graph;
  const egi_backend *backend;
  const egi_plan_options *options;
  egi_plan *plan;
  egi_arena arena; /* dies with the planner */
  /* by value */
  egi_layout *values;
  bool *is_live, *is_known, *is_fixed;
  uint32_t *narrow; /* index in `extra`: the value before a Cast from f16 or bf16; 0: none */
  uint32_t *copies; /* index in `extra`: a contiguous copy of the value */
  /* by node */
  bool *is_needed;
  egi_layout *extra; /* [0] unused */
  uint32_t *extra_versions;
  uint32_t n_extra, extra_capacity, extra_versions_capacity;
  /* both lists in one, in execution order */
  egi_step *steps;
  uint32_t n_steps, steps_capacity;
  const egi_kernel *copy_kernel;
  uint32_t *state_storages; /* by state of the module */
} egi_planner;

/* plan_shapes.c: concrete types of all values that matter, known contents, what is live, what is fixed. */
eg_status egi_plan_shapes(egi_planner *planner);
/* Integers of a value that is known at these bindings; false when it is not or there are more than `capacity`. */
bool egi_plan_integers(const egi_planner *planner, egi_value_id value, int64_t *out, uint32_t capacity,
                       uint32_t *out_count);

/* plan_steps.c */
eg_status egi_plan_steps(egi_planner *planner);
eg_status egi_plan_add_storage(egi_planner *planner, egi_storage_kind kind, uint64_t size_bytes, uint32_t *out_storage);
/* Appends a step with room for its operands, which are zero. */
eg_status egi_plan_add_step(egi_planner *planner, const egi_step *step, egi_step **out_step);
/* Marks the steps nobody needs and counts reads and writes of storages by the others. */
eg_status egi_plan_drop_dead(egi_planner *planner);

/* plan_leaves.c: layouts of inputs, weights, states and known values. */
eg_status egi_plan_place_states(egi_planner *planner);
eg_status egi_plan_leaf(egi_planner *planner, egi_value_id value);
/* Memory for a weight with numbers to be made (FILL, NORMAL) or to be copied, written to `dst`. */
eg_status egi_weight_write(eg_context *ctx, const egi_weight *weight, void *dst);
eg_status egi_weight_bytes(eg_context *ctx, const egi_weight *weight, uint64_t *out_bytes);

/* views.c: false when no strides express the result. `out->tensor` has type, rank and dims set. */
bool egi_view_reshape(const egi_layout *in, egi_layout *out);
bool egi_view_permute(const egi_layout *in, const int *order, egi_layout *out);
bool egi_view_piece(const egi_layout *in, int axis, int64_t start, egi_layout *out);
/* Output `index` of a view operator from the layout of its input 0. */
bool egi_view_node(const egi_planner *planner, egi_node_id node, unsigned index, const egi_layout *in, egi_layout *out);

/* plan_concat.c: producers write straight into their piece of a Concat's output. */
eg_status egi_plan_concats(egi_planner *planner);

/* plan_prepare.c: prepares every kernel, names all nodes that cannot run. */
eg_status egi_plan_prepare(egi_planner *planner);
/* Prepares one step in `arena`. */
eg_status egi_plan_prepare_step(egi_planner *planner, const egi_step *step, egi_arena *arena, egi_kernel_plan *out);

/* plan_streams.c: what has happened before each step, by vector clocks (Mattern, Virtual Time and Global States of
 * Distributed Systems, 1989): clock[p] = number of steps of stream p known to be finished. */
typedef struct egi_vector_clock {
  uint32_t at[EGI_N_STREAMS];
} egi_vector_clock;
typedef struct egi_order {
  bool is_fixed;   /* which list */
  uint32_t *steps; /* indices of the list's steps in planner->steps */
  uint32_t n_steps;
  egi_vector_clock *clocks;    /* after each of them */
  uint32_t *sequences;         /* of each on its stream, from 1 */
  egi_vector_clock *waits;     /* what each has to wait for; 0: nothing */
  uint32_t *at[EGI_N_STREAMS]; /* position in `steps` of sequence s of a stream */
  uint32_t n_on[EGI_N_STREAMS];
} egi_order;
eg_status egi_plan_order(egi_planner *planner, bool is_fixed, egi_order *out_order);
eg_status egi_plan_emit(egi_planner *planner, const egi_order *order, egi_step_list *out_list);

/* placement.c */
void egi_plan_lifetimes(egi_planner *planner, const egi_order *order);
void egi_plan_in_place(egi_planner *planner, const egi_order *order);
/* Of one kind, TRANSIENT or HOST. */
eg_status egi_plan_offsets(egi_planner *planner, const egi_order *order, egi_storage_kind kind, uint64_t *out_size);
/* transfers.c: what Offload and Reload move, and how many of the reloaded tensors are on the device at a time. */
eg_status egi_plan_count_transfers(egi_planner *planner, const egi_order *order);

/* One thing to place: may use the bytes of others whose last uses (for each stream) are within `start`. */
typedef struct egi_item {
  uint32_t storage;
  uint64_t size_bytes, offset_bytes;
  uint32_t start[EGI_N_STREAMS], last[EGI_N_STREAMS];
} egi_item;
/* pack.c: gives every item an offset; the items come back in another order. */
eg_status egi_pack(egi_arena *arena, egi_item *items, uint32_t n_items, uint64_t *out_size);

/* bindings.c: adds the symbols among a value's dims with the sizes that the tensor has. */
typedef struct egi_binding_list {
  egi_binding *bindings;
  uint32_t n, capacity;
} egi_binding_list;
eg_status egi_bind_value(const egi_graph *graph, egi_value_id value, const egi_tensor *tensor, egi_arena *arena,
                         egi_binding_list *list);

/* session.c, for profile.c: addresses; one step of the kind RUN. */
struct egi_session;
eg_status egi_session_bind(struct egi_session *session);
eg_status egi_session_run_step(struct egi_session *session, const egi_step *step);
const egi_plan *egi_session_plan(const struct egi_session *session);
egi_device *egi_session_device(const struct egi_session *session);

/* ranges.c: one walk over a list of steps. */
typedef struct egi_range {
  const egi_plan *plan;
  void (*mark)(const char *name);
  char name[160];
  bool is_open, is_backward;
} egi_range;
void egi_range_begin(egi_range *range, const egi_plan *plan);
void egi_range_step(egi_range *range, const egi_step *step);
void egi_range_end(egi_range *range);

/* load.c: weights to a device of its own, from where they lie, in pieces: host memory is bounded by a part that is
 * transposed, or decoded from MXFP4. */
eg_status egi_load_weight(eg_context *ctx, const egi_backend *backend, egi_device *device, const egi_weight *weight,
                          void *dst);
/* To the parts that are not NULL, memory of the device. */
eg_status egi_load_quantised(eg_context *ctx, const egi_backend *backend, egi_device *device, const egi_quantisation *q,
                             const egi_quantised_memory *memory);

/* store.c */
/* Whether the weight's bytes serve as they lie in the module. */
bool egi_weight_is_in_place(const egi_backend *backend, const egi_weight *weight);
eg_context *egi_store_context(const egi_store *store);
const egi_module *egi_store_module(const egi_store *store);
const egi_backend *egi_store_backend(const egi_store *store);

uint64_t egi_align(uint64_t size_bytes);  /* up to EGI_ALIGNMENT */
uint32_t egi_whole_bytes(eg_dtype dtype); /* of one element; 0: packed or text */
/* Sets row-major strides, and leaves a contiguous tensor with exactly those. */
void egi_tensor_normalise(egi_tensor *tensor);

#endif
