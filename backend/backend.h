/* Backends, kernels, plans and sessions. A plan fixes everything about running one graph at fixed shapes: kernels,
 * buffers, streams, order; a session executes it and allocates nothing. */
#ifndef ENGRAFT_BACKEND_BACKEND_H
#define ENGRAFT_BACKEND_BACKEND_H

#include "graph/costs.h"
#include "graph/graph.h"

/* ---- kernels -------------------------------------------------------------------------------------------------- */

/* What a kernel is told when a plan is made: types, shapes and strides of all operands. `data` is set only for inputs
 * whose content is known then (constants, shape arithmetic). Absent optional operands have dtype UNDEFINED. */
typedef struct egi_kernel_plan {
  eg_context *ctx;
  const egi_graph *graph;
  egi_node_id node;
  const egi_tensor *inputs;
  const egi_tensor *outputs;
  unsigned n_inputs, n_outputs;
  egi_arena *arena;
  /* set by prepare: */
  const void *params;     /* from the arena; handed to run */
  size_t workspace_bytes; /* scratch for one call, 64-byte aligned */
  int64_t chunk_rows;     /* rows that are worked on at a time where that bounds the workspace; 0: all */
} egi_kernel_plan;

typedef struct egi_kernel_call {
  const egi_tensor *inputs;
  const egi_tensor *outputs; /* dims are those of the plan */
  unsigned n_inputs, n_outputs;
  const void *params;
  void *workspace;
  egi_pool *pool; /* CPU */
  void *stream;   /* CUDA */
} egi_kernel_call;

enum {
  EGI_KERNEL_STRIDED_INPUTS = 1,  /* takes any strides; else the planner makes inputs contiguous */
  EGI_KERNEL_STRIDED_OUTPUTS = 2, /* writes any strides: may write into a piece of a concatenation */
  EGI_KERNEL_IN_PLACE_0 = 4,      /* output 0 may be the memory of input 0 when that dies here (same shape, dtype) */
  EGI_KERNEL_IN_PLACE_1 = 8,
  EGI_KERNEL_UPDATES_0 = 16,      /* output 0 *is* input 0, updated (states) */
  EGI_KERNEL_NARROW_WEIGHTS = 32, /* where the graph has Cast(f16 or bf16 weight -> f32), the kernel takes the weight as
                                    it is: the planner skips the Cast */
  EGI_KERNEL_TILE_SHIFT = 8 /* the flags from here on: rows of a tile of attention, for whose bounds it asks; 0: none */
};

typedef struct egi_kernel {
  const char *name;
  uint32_t flags;
  /* EG_ERROR_UNSUPPORTED (egi_fail_node) when types or shapes are not covered; may be NULL. */
  eg_status (*prepare)(egi_kernel_plan *plan);
  /* Cannot fail for reasons known at plan time; EG_ERROR_DATA for indices out of range. */
  eg_status (*run)(eg_context *ctx, const egi_kernel_call *call);
  /* Where sizes of results depend on data: sets the dims of outputs (type and rank are set) that inputs, all of them
   * with data, lead to. NULL: shape inference knows them. */
  eg_status (*measure)(const egi_kernel_plan *plan, egi_tensor *outputs);
} egi_kernel;

/* ---- backends ------------------------------------------------------------------------------------------------- */

typedef struct egi_device egi_device; /* a backend's own; the CPU's is the context's pool */

/* One device as its driver describes it. */
typedef struct egi_device_facts {
  char name[256];
  uint32_t n_devices;     /* of the backend, this one among them */
  int compute_capability; /* 10 * major + minor; 0: not of that kind */
  int n_multiprocessors;
  int driver_version, toolkit_version;     /* 1000 * major + 10 * minor */
  bool is_unified;                         /* its memory is the host's */
  uint64_t memory_bytes, free_bytes;       /* 0: not known */
  double flops_f32, flops_bf16, flops_f16; /* a second at the highest clock, products summed in f32; 0: not known */
  double memory_bytes_per_s;
} egi_device_facts;

/* Numbers that are made: value, or value times a normal number of a stream under a seed, from element `first` on. */
typedef struct egi_generated {
  eg_dtype dtype;
  bool is_normal;
  double value;
  uint64_t seed, stream, first, count;
} egi_generated;

/* Four-bit codes and a scale for each `block` of `count` floats, a whole number of blocks but for the last. */
typedef struct egi_four_bit_run {
  eg_dtype dtype;
  unsigned type; /* egi_four_bit */
  int64_t block, count;
  const void *values; /* the rest on the device like these */
  uint8_t *codes;
  float *scales;
} egi_four_bit_run;

/* The part that differs between CPU and CUDA. Streams and events are small numbers; stream 0 computes, stream 1 copies
 * towards the host, stream 2 towards the device. On the CPU all run in list order and events do nothing. */
typedef struct egi_backend {
  const char *name;
  bool is_host; /* device memory is host memory: weights are used where they are mapped */
  eg_status (*open)(eg_context *ctx, egi_device **out_device);
  void (*close)(egi_device *device);
  const egi_kernel *(*find_kernel)(egi_op op);
  eg_status (*allocate)(egi_device *device, egi_purpose purpose, size_t size_bytes, void **out_memory);
  void (*release)(egi_device *device, egi_purpose purpose, void *memory, size_t size_bytes);
  eg_status (*upload)(egi_device *device, void *dst, const void *src, size_t size_bytes);
  eg_status (*download)(egi_device *device, void *dst, const void *src, size_t size_bytes);
  eg_status (*record)(egi_device *device, unsigned stream, unsigned event);
  eg_status (*wait)(egi_device *device, unsigned stream, unsigned event);
  eg_status (*synchronize)(egi_device *device);
  void *(*stream)(egi_device *device, unsigned stream); /* what kernels get as `stream`; NULL: nothing */
  /* Memory of the device set to one byte, in the order of stream 0. NULL on a host. */
  eg_status (*fill)(egi_device *device, void *dst, int byte, size_t size_bytes);
  /* Copies at most 64 KiB to the host behind what stream 0 has been given, without waiting; collect(), before 32 more
   * have been fetched, waits for that copy alone and writes `dst`. Again is nothing. NULL on a host. */
  eg_status (*fetch)(egi_device *device, void *dst, const void *src, size_t size_bytes, uint64_t *out_ticket);
  eg_status (*collect)(egi_device *device, uint64_t ticket);
  /* Into device memory, bit for bit what egi_weight_write() and egi_four_bit_encode() make on the host. NULL on a host;
   * EG_ERROR_UNSUPPORTED for types that are left to it. */
  eg_status (*generate)(egi_device *device, const egi_generated *numbers, void *dst);
  eg_status (*encode)(egi_device *device, const egi_four_bit_run *run);
  /* What the streams are given between begin and end is kept, not done; launch does all of it in the order of stream
   * 0. NULL where nothing can be kept. After an end that fails there is nothing to discard. */
  eg_status (*begin_capture)(egi_device *device);
  eg_status (*end_capture)(egi_device *device, void **out_captured);
  eg_status (*launch)(egi_device *device, void *captured);
  void (*discard)(egi_device *device, void *captured);
  /* Notes the time at which stream 0 gets here; elapsed() waits for the second and gives the seconds from the first to
   * it. NULL on a host. */
  eg_status (*mark)(egi_device *device, unsigned mark);
  eg_status (*elapsed)(egi_device *device, unsigned first, unsigned second, double *out_seconds);
  /* Names what the host gives the streams from here on for profilers, until NULL ends it. NULL: no profiler looks. */
  void (*range)(const char *name);
  /* The device `index` of the machine; EG_ERROR_ARGUMENT when there are fewer. */
  eg_status (*describe)(eg_context *ctx, uint32_t index, egi_device_facts *out_facts);
} egi_backend;

const egi_backend *egi_backend_cpu(void);
/* The CUDA backend, a library of its own that is loaded at the first call and stays (cuda.c). EG_ERROR_UNSUPPORTED or
 * _DEVICE says what is missing: the library, cuBLASLt, a driver that is new enough, a device. */
eg_status egi_backend_cuda(eg_context *ctx, const egi_backend **out_backend);
/* Of the headers that a program or a backend library was built from: they must be the same (operands.c). */
uint32_t egi_backend_abi(void);
/* By the name that --device takes: "cpu", "cuda". */
eg_status egi_backend_find(eg_context *ctx, const char *name, const egi_backend **out_backend);
/* The evaluator for passes: the CPU backend run node by node or as a plan. */
const egi_evaluator *egi_evaluator_cpu(void);

/* ---- store: persistent values on a device --------------------------------------------------------------------- */

/* Weights and state pools of one module on one device, shared by every session over it. On a host backend weights are
 * used in place when aligned for their type, else copied once. */
typedef struct egi_store egi_store;
eg_status egi_store_create(eg_context *ctx, const egi_module *module, const egi_backend *backend,
                           egi_store **out_store);
void egi_store_destroy(egi_store *store);
/* Weights that are made or copied when they are loaded, shared by stores over clones of a module (shared_weights.c). It
 * outlives these stores; all of it is used by one thread at a time. */
typedef struct egi_shared_weights egi_shared_weights;
eg_status egi_shared_weights_create(eg_context *ctx, const egi_module *module, egi_shared_weights **out_shared);
void egi_shared_weights_destroy(egi_shared_weights *shared);
/* Before the first weight is loaded; the store's module is a clone of that one. */
void egi_store_share(egi_store *store, egi_shared_weights *shared);
/* Makes one weight resident (EG_ERROR_MEMORY, _IO). Called by the planner for the weights that a plan uses. */
eg_status egi_store_load(egi_store *store, uint32_t weight, void **out_data);
/* Allocates the pools, zeroed, and fills PARAMETERS of states that come from a weight. */
eg_status egi_store_make_pools(egi_store *store);
void *egi_store_pool(const egi_store *store, egi_state_pool pool);
/* Bytes of a pool at `place`, on the device or in host memory, wherever the pool is. */
eg_status egi_store_read_pool(const egi_store *store, egi_state_pool pool, const void *place, void *bytes,
                              size_t size_bytes);
eg_status egi_store_write_pool(const egi_store *store, egi_state_pool pool, void *place, const void *bytes,
                               size_t size_bytes);
egi_device *egi_store_device(const egi_store *store);

/* Runs an entry point once, node by node, whatever its shapes depend on: for graphs that plans refuse as dynamic.
 * Tensors are contiguous host memory; outputs are allocated in `arena`. The store is of the graph's module, on the CPU.
 */
eg_status egi_eager_run(egi_store *store, const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                        egi_tensor *outputs);

/* ---- plan ----------------------------------------------------------------------------------------------------- */

typedef struct egi_plan egi_plan;

typedef struct egi_plan_options {
  const egi_binding *bindings; /* every symbol of the graph's inputs */
  size_t n_bindings;
  uint64_t memory_budget; /* bytes for transient buffers; 0: none */
  uint64_t host_budget;   /* bytes for what is offloaded; 0: none */
  bool *out_is_dynamic;   /* may be NULL; set when the plan fails since shapes or the course depend on data */
} egi_plan_options;

/* The numbers that the graph's symbols have when its inputs are these tensors (one for each input; data is not looked
 * at): EG_ERROR_SHAPE where types, ranks or sizes contradict. */
eg_status egi_bindings_solve(const egi_graph *graph, const egi_tensor *inputs, egi_arena *arena,
                             egi_binding **out_bindings, size_t *out_count);

/* Bytes a plan needs, by what they are for. */
typedef struct egi_plan_bytes {
  uint64_t weights;   /* used by this plan, resident; of these: */
  uint64_t quantised; /* codes, scales and what else operators with quantised weights read */
  uint64_t copied;    /* not used where the file is mapped: in memory of their own */
  uint64_t states;
  uint64_t saved;     /* high-water mark of values that live across the loss (activations kept for backward) */
  uint64_t transient; /* size of the buffer all values and workspace share */
  uint64_t workspace; /* largest of one node */
  uint64_t fixed;     /* values computed once, when the session is made */
  uint64_t inputs;    /* staging of the graph's inputs */
  uint64_t known;     /* contents that the planner worked out, kept on a device that has memory of its own */
  uint64_t pinned;    /* host memory for what is offloaded */
  uint64_t tables;    /* host memory of a session for addresses */
} egi_plan_bytes;

/* What moves between device and host in one run. */
typedef struct egi_plan_transfers {
  uint32_t n_offloads, n_reloads;
  uint32_t n_slots; /* most of the reloaded tensors that are on the device at a time */
  uint64_t offloaded_bytes, reloaded_bytes;
} egi_plan_transfers;

/* Resolves shapes with the bindings, checks recorded assumptions, chooses kernels and views, orders streams, places
 * buffers. All nodes without a kernel or with unsupported types are named in one error, before anything is allocated
 * on the device. The graph and module must outlive the plan. */
eg_status egi_plan_create(eg_context *ctx, const egi_graph *graph, const egi_backend *backend,
                          const egi_plan_options *options, egi_plan **out_plan);
void egi_plan_destroy(egi_plan *plan);
void egi_plan_get_bytes(const egi_plan *plan, egi_plan_bytes *out_bytes);
void egi_plan_get_transfers(const egi_plan *plan, egi_plan_transfers *out_transfers);
/* Costs of one run by operator, the dearest first. */
typedef struct egi_plan_cost_row {
  const char *op; /* "copy": made by the planner */
  uint32_t count;
  egi_cost cost;
  double seconds;
  uint64_t workspace_bytes; /* largest of one node */
  int64_t chunk_rows;       /* as in egi_kernel_plan, the fewest; 0: all rows at a time */
} egi_plan_cost_row;
typedef struct egi_plan_costs {
  egi_plan_cost_row *rows;
  uint32_t n_rows;
  egi_cost total;
  double compute_seconds; /* without copies between device and host */
  double seconds;         /* of the slowest of computing and copies each way */
} egi_plan_costs;
eg_status egi_plan_get_costs(const egi_plan *plan, const egi_device_description *device, egi_arena *arena,
                             egi_plan_costs *out_costs);
/* One line a step, for tests and `engraft plan`. */
void egi_plan_print(const egi_plan *plan, egi_text *out);

/* ---- session -------------------------------------------------------------------------------------------------- */

/* A plan with memory: inputs are written to, the plan is run, outputs are read. Sessions over one store that are given
 * the same `scratch` share their transient buffer and must not run at the same time. */
typedef struct egi_session egi_session;

/* Device memory shared by sessions; grows only while sessions are created. */
typedef struct egi_scratch egi_scratch;
eg_status egi_scratch_create(eg_context *ctx, egi_store *store, egi_scratch **out_scratch);
void egi_scratch_destroy(egi_scratch *scratch);

eg_status egi_session_create(egi_store *store, const egi_plan *plan, egi_scratch *scratch, egi_session **out_session);
void egi_session_destroy(egi_session *session);
/* Host bytes of an input, contiguous, of the planned shape and type; copied. `input` is the position in graph->inputs.
 * Inputs are staged outside the transient buffer and keep their content between runs. */
eg_status egi_session_set_input(egi_session *session, uint32_t input, const void *bytes, size_t size_bytes);
/* Runs everything; allocates nothing, but for what the device keeps of the course of the second run: from then on it is
 * replayed as a whole. */
eg_status egi_session_run(egi_session *session);
/* Starts to copy an output, contiguous and of at most 64 KiB, and does not wait. `bytes` are there when
 * egi_session_collect() has been given the ticket, before EGI_MAX_TICKETS more have been drawn on the device. */
#define EGI_MAX_TICKETS 32u
eg_status egi_session_fetch_output(egi_session *session, uint32_t output, void *bytes, size_t size_bytes,
                                   uint64_t *out_ticket);
eg_status egi_session_collect(egi_session *session, uint64_t ticket);
/* What the operators of a plan took in one run, in which each kernel stands alone: nothing is captured. By operator as
 * egi_plan_get_costs() lists them; kernels that are shorter than their launch are overrated. */
typedef struct egi_profile {
  double seconds[EGI_OP_COUNT + 1]; /* by egi_op; the last: copies that the planner made */
  uint32_t counts[EGI_OP_COUNT + 1];
} egi_profile;
eg_status egi_session_profile(egi_session *session, egi_profile *out_profile);
/* Shape and type of an output; data is device memory, valid until another session of the scratch runs. */
eg_status egi_session_output(const egi_session *session, uint32_t output, egi_tensor *out_tensor);
/* Copies an output to host memory, contiguous. */
eg_status egi_session_read_output(egi_session *session, uint32_t output, void *bytes, size_t size_bytes);

#endif
