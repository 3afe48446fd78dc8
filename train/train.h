/* The trainer and the runner behind engraft.h.
 *
 * The way of a trainer: machine (clone of the model's module, recognised and widened) -> adapters chosen -> loss
 * appended, adapters grafted, graph differentiated -> batches and buckets -> lanes (plan + session for each bucket) ->
 * steps. */
#ifndef ENGRAFT_TRAIN_TRAIN_H
#define ENGRAFT_TRAIN_TRAIN_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "io/io.h"
#include "passes/passes.h"

/* ---- handles -------------------------------------------------------------------------------------------------- */

struct eg_model {
  eg_context *ctx;
  unsigned references;
  egi_module *module;         /* canonical graph in graphs[0] */
  egi_shared_weights *shared; /* of all that runs the module; NULL: nothing is shared */
  char *report;               /* JSON of the last rewrite */
  egi_arena arena;            /* of the host's passes and rules */
  egi_pass_info *own_passes;
  uint32_t n_own_passes, own_passes_capacity;
};
void egi_model_retain(eg_model *model);
void egi_model_release(eg_model *model);

struct eg_dataset {
  eg_context *ctx;
  unsigned references;
  egi_documents *documents;
};
void egi_dataset_retain(eg_dataset *dataset);
void egi_dataset_release(eg_dataset *dataset);

/* ---- batches -------------------------------------------------------------------------------------------------- */

/* Padded micro-batches in file order: as many documents as fit in `tokens` when padded to the longest of them. Or a row
 * that documents share. */
typedef struct egi_batch_range {
  size_t first_document, n_documents;
  uint32_t longest;      /* what is longer is cut */
  const uint32_t *order; /* documents are order[first_document ..], one after the other in a row; NULL: padded */
} egi_batch_range;
/* A planned shape; every batch is padded to the smallest bucket that holds it. */
typedef struct egi_bucket {
  uint32_t batch, sequence;
} egi_bucket;
typedef struct egi_batch_limits {
  uint32_t tokens;   /* rows × longest */
  uint32_t longest;  /* longer documents are cut to this */
  uint32_t rows;     /* UINT32_MAX: any number */
  uint32_t sequence; /* a model with a fixed length: every batch is that long; 0: none */
} egi_batch_limits;
eg_status egi_batches_make(const egi_documents *documents, const egi_batch_limits *limits, egi_arena *arena,
                           egi_batch_range **out_batches, size_t *out_count);
/* Rows of at most `tokens`, in file order or each document where it fits best. */
eg_status egi_rows_pack(const egi_documents *documents, uint32_t tokens, bool is_in_order, egi_arena *arena,
                        egi_batch_range **out_rows, size_t *out_count);
/* The shape of them all: one row, as long as the fullest. */
egi_bucket egi_rows_bucket(const egi_documents *documents, const egi_batch_range *rows, size_t count);
/* At most `max_buckets` shapes that cover all batches with little padding; one batch shape gives exactly that bucket.
 */
eg_status egi_buckets_choose(const egi_batch_range *batches, size_t n_batches, size_t max_buckets, egi_arena *arena,
                             egi_bucket **out_buckets, size_t *out_count);

/* ---- inputs of a graph by role -------------------------------------------------------------------------------- */

typedef enum egi_feed {
  EGI_FEED_OTHER,
  EGI_FEED_INPUT_IDS,      /* [batch, sequence] */
  EGI_FEED_ATTENTION_MASK, /* [batch, sequence], 1 for real tokens */
  EGI_FEED_POSITION_IDS,   /* [batch, sequence] or [1, sequence] or [sequence]: 0, 1, 2 … in each row */
  EGI_FEED_CACHE,          /* keys and values of earlier tokens: none, a dimension of size 0 */
  EGI_FEED_LABELS,         /* EGI_INPUT_LABELS */
  EGI_FEED_OFFSETS,        /* EGI_INPUT_OFFSETS */
  EGI_FEED_REAL,           /* EGI_INPUT_REAL */
  EGI_FEED_TOKEN_TYPES,    /* [batch, sequence] of the data, or 0 */
  EGI_FEED_TOKEN_LABELS,   /* EGI_INPUT_TOKEN_LABELS and so on; from here to the last, of documents */
  EGI_FEED_CLASSES,
  EGI_FEED_NUMBERS,
  EGI_FEED_ROW_WEIGHTS,
  EGI_FEED_POOLING,
  EGI_FEED_MATCHES,
  EGI_FEED_CANDIDATES,
  EGI_FEED_PARTNERS
} egi_feed;

/* What a loss is a mean over. */
typedef enum egi_unit {
  EGI_UNIT_NEXT_TOKEN, /* tokens with a label, but the first of each document */
  EGI_UNIT_TOKEN,      /* tokens with a label */
  EGI_UNIT_EXAMPLE     /* documents, or examples of several */
} egi_unit;

typedef struct egi_inputs {
  const egi_graph *graph;
  const egi_feed *roles;                /* [graph->n_inputs] */
  uint32_t ids;                         /* position of input_ids */
  uint32_t fixed_batch, fixed_sequence; /* sizes that the graph prescribes; 0: free */
  bool is_packed;                       /* documents share a row: there are offsets */
  egi_unit unit;                        /* of the graph's loss */
  int32_t padding;                      /* token that the graph tells padding by, where its loss is of documents; -1 */
} egi_inputs;
/* EG_ERROR_UNSUPPORTED when there is no input_ids or it has an unusual type; roles of the rest may be OTHER. */
eg_status egi_inputs_find(const egi_graph *graph, egi_arena *arena, egi_inputs *out_inputs);
/* EG_ERROR_UNSUPPORTED naming the inputs without a role: what they should hold is not known. */
eg_status egi_inputs_check(const egi_inputs *inputs);

/* Values of the symbols in the inputs' dims. */
typedef struct egi_binder {
  const egi_graph *graph;
  int64_t past; /* tokens in the caches: a mask is that much longer than the tokens */
  egi_binding *bindings;
  bool *is_bound;
  size_t n;
} egi_binder;
eg_status egi_binder_begin(egi_binder *binder, const egi_graph *graph, egi_arena *arena);
/* One dimension of one input has this size; EG_ERROR_SHAPE when it cannot. */
eg_status egi_binder_assign(egi_binder *binder, uint32_t input, int axis, int64_t size);
/* Binds what is left of the inputs from their roles; then every symbol of every input must be bound. Leaves the bound
 * symbols in bindings[0, n). */
eg_status egi_binder_finish(egi_binder *binder, const egi_inputs *inputs, const egi_bucket *bucket);

/* One planned shape: plan, session, and the bucket they are for. */
typedef struct egi_lane {
  egi_bucket bucket;
  const egi_binding *bindings; /* sizes of the graph's symbols */
  size_t n_bindings;
  egi_plan *plan;
  egi_session *session;
} egi_lane;
typedef struct egi_lanes {
  egi_inputs inputs;
  egi_lane *lanes;
  size_t count;
  int64_t *numbers; /* staging for the largest bucket */
  void *bytes;
  eg_pooling pooling; /* for EGI_FEED_POOLING; the lanes' maker sets it */
} egi_lanes;
/* A document may not be longer than the tables that positions index. */
eg_status egi_rows_check(const egi_inputs *inputs, const egi_documents *documents, uint32_t longest);
/* Plans only; sizes are known afterwards. Everything but plans and sessions is in the arena. */
eg_status egi_lanes_plan(egi_lanes *lanes, const egi_graph *graph, const egi_backend *backend,
                         const egi_bucket *buckets, size_t n_buckets, egi_arena *arena);
eg_status egi_lanes_open(egi_lanes *lanes, egi_store *store, egi_scratch *scratch);
void egi_lanes_close(egi_lanes *lanes);
/* Writes documents to the inputs of the smallest lane that holds them. Rows beyond the documents are unmasked and carry
 * no label: nothing of them reaches the loss. */
eg_status egi_lanes_fill(const egi_lanes *lanes, const egi_documents *documents, const egi_batch_range *range,
                         egi_lane **out_lane);
/* Rows of an input: a batch of them, or one row of positions for all. */
uint32_t egi_input_rows(const egi_graph *graph, const egi_value *value, uint32_t batch);
/* Converts to the type of an input; returns the number of bytes. */
size_t egi_numbers_convert(const int64_t *numbers, size_t n, eg_dtype dtype, void *bytes);
/* One input of a lane; without documents (NULL) all rows are beyond them: masks of ones, positions. */
eg_status egi_lane_fill_input(const egi_lanes *lanes, const egi_lane *lane, uint32_t input,
                              const egi_documents *documents, const egi_batch_range *range);
/* feeds.c: inputs of losses of documents, written to the lanes' bytes; returns their number. */
bool egi_feed_is_of_documents(egi_feed role);
size_t egi_feed_fill(const egi_lanes *lanes, const egi_bucket *bucket, egi_feed role, const egi_documents *documents,
                     const egi_batch_range *range);
/* What is trained on and real tokens of a batch, as far as a lane holds them. */
void egi_batch_count(egi_unit unit, const egi_documents *documents, const egi_batch_range *range, uint64_t *out_targets,
                     uint64_t *out_tokens);

/* ---- machines ------------------------------------------------------------------------------------------------- */

/* What a trainer, a runner and an evaluation have in common: their own clone of the model's module, ready for the adapt
 * stage, and its memory on a device. */
typedef struct egi_machine {
  eg_context *ctx;
  egi_module *module;
  egi_graph *graph; /* graphs[0] */
  const egi_backend *backend;
  eg_dtype dtype; /* of activations; EG_DTYPE_UNDEFINED: as in the file */
  egi_store *store;
  egi_scratch *scratch;
  egi_shared_weights *shared; /* the model's */
} egi_machine;
/* Clones, canonicalises, recognises, widens (not for EG_DTYPE_UNDEFINED: types stay as in the file).
 * EG_ERROR_UNSUPPORTED for a device or type this build has not. */
eg_status egi_machine_prepare(egi_machine *machine, const eg_model *model, const char *device, eg_dtype dtype);
/* The same for inputs of any kind: caches stay, and masks that follow positions. */
eg_status egi_machine_prepare_general(egi_machine *machine, const eg_model *model, const char *device, eg_dtype dtype);
/* Rows of a tile of the backend's attention, as its table of kernels states; 0: none. */
int64_t egi_machine_block(const egi_machine *machine);
/* Before the loss is appended: documents share rows of `tokens` where the graph allows it. Where it does not, batches
 * are padded and the log says why, or who asked for rows is told why. */
eg_status egi_machine_pack(egi_machine *machine, eg_packing packing, eg_loss loss, uint32_t tokens);
/* Mixtures of experts become what is executed; or, with --no-fuse, all fused operators become their bodies. Then
 * activations get the machine's type. After the adapt stage, before differentiation and allocation. */
eg_status egi_machine_specialise(egi_machine *machine, const egi_adapt_options *adapt, bool is_expanded);
eg_status egi_machine_allocate(egi_machine *machine);
void egi_machine_close(egi_machine *machine);
/* EG_ERROR_ARGUMENT for a block that is no power of two from 32 to 4096. `has_head` is the caller's to set. */
eg_status egi_quantise_options_make(eg_context *ctx, eg_quant quant, uint32_t block, int is_nested,
                                    egi_quantise_options *out_options);
/* qat.c: what the options ask for, and what fake_quantize is told of it. */
eg_status egi_qat_record_make(eg_context *ctx, const eg_trainer_options *options, egi_qat_record *out_record);
eg_status egi_fake_options_make(eg_context *ctx, const egi_qat_record *record, egi_fake_options *out_options);
bool egi_qat_is_same(const egi_qat_record *a, const egi_qat_record *b);
eg_status egi_run_passes(egi_graph *graph, const char *const *names, size_t n_names, const egi_adapt_options *adapt);

/* What is learned; `loss` is never EG_LOSS_AUTO once it has been chosen. */
typedef struct egi_objective {
  eg_loss loss;
  eg_pooling pooling;
  double similarity_scale;
} egi_objective;
/* Replaces EG_LOSS_AUTO by what the data and the graph (before the loss is appended) are made for. EG_ERROR_DATA,
 * EG_ERROR_UNSUPPORTED. */
eg_status egi_objective_choose(const egi_graph *graph, const egi_inputs *inputs, const egi_documents *documents,
                               egi_objective *objective);

/* Sizes that tokens and labels must stay below; 0: not known. Read before the loss is appended. */
typedef struct egi_vocabulary {
  eg_loss loss;
  int64_t n_embeddings, n_types, n_logits;
} egi_vocabulary;
eg_status egi_vocabulary_find(const egi_graph *graph, const egi_inputs *inputs, eg_loss loss,
                              egi_vocabulary *out_vocabulary);
/* Whether all of the data fits the loss and stays inside the tables. EG_ERROR_DATA names the document. */
eg_status egi_vocabulary_check(eg_context *ctx, const egi_vocabulary *vocabulary, const egi_documents *documents);
/* Rows of the table that the token ids index; 0: not known. */
int64_t egi_embedding_count(const egi_graph *graph, const egi_inputs *inputs);
/* The same of the types of tokens. */
int64_t egi_types_count(const egi_graph *graph, const egi_inputs *inputs);
/* Positions that the tables indexed by position inputs have; 0: not known. */
/* Those of the tables that packed positions index count too. */
int64_t egi_positions_count(const egi_graph *graph, const egi_inputs *inputs);

/* ---- adapters and parameters ---------------------------------------------------------------------------------- */

/* selection.c: names separated by commas, each a path or its end after a dot, or one regular expression for a whole
 * path: a text that has one of its signs. */
typedef struct egi_modules {
  const char *names; /* NULL: no module */
  egi_pattern *expression;
} egi_modules;
bool egi_is_expression(const char *text);
eg_status egi_modules_read(egi_arena *arena, const char *text, egi_modules *out_modules);
bool egi_modules_match(const egi_modules *modules, const char *path);
/* "NAME=NUMBER,…" of an option, NAME as in PEFT's rank_pattern. */
eg_status egi_patterns_read(egi_arena *arena, const char *option, const char *text,
                            const egi_peft_pattern **out_patterns, size_t *out_count);

/* Adapters to graft, and the PEFT settings that describe them. */
typedef struct egi_adapters {
  egi_adapter_target *targets;
  size_t count;
  egi_peft_config config;
} egi_adapters;
/* New ones on the linear layers of `graph` that the options name; a name that matches nothing is an error. */
eg_status egi_adapters_choose(const egi_graph *graph, const eg_trainer_options *options, egi_arena *arena,
                              egi_adapters *out_adapters);
/* qat.c: config.qat, of the options or of the adapter that is continued (NULL: none). */
eg_status egi_qat_settle(eg_context *ctx, const eg_trainer_options *options, const egi_peft *peft,
                         egi_adapters *adapters);
/* Adds adapters on the experts that `parameters` names ("mlp.experts.gate_up_proj,…"; NULL or "none": none). */
eg_status egi_adapters_choose_experts(const egi_graph *graph, const char *parameters, egi_arena *arena,
                                      egi_adapters *adapters);
/* expert_adapters.c: the experts' parameters that the config's target_parameters select; room for n. */
void egi_experts_select(const egi_expert_parameter *experts, size_t n, const egi_peft_config *config,
                        egi_adapter_target *targets, const egi_expert_parameter **out_of, size_t *out_count);
/* Those of a PEFT folder. Missing, extra and misshapen tensors are named together in one EG_ERROR_DATA. */
eg_status egi_adapters_from_peft(const egi_graph *graph, const egi_peft *peft, egi_arena *arena,
                                 egi_adapters *out_adapters);
/* Fills the parameter pool. */
eg_status egi_adapters_initialise(egi_machine *machine, eg_lora_init init, uint64_t seed);
eg_status egi_adapters_load(egi_machine *machine, const egi_peft *peft);
/* A tensor of an adapter in float32; EG_ERROR_DATA for what is not finite. */
eg_status egi_adapter_read(eg_context *ctx, const egi_safetensor *tensor, float *values, uint64_t count);

/* decompose.c: factors B [rows, rank] · A [rank, columns] of a matrix; rank is at most rows and columns. The same
 * numbers with any number of threads. */
typedef struct egi_factors {
  const float *matrix; /* [rows, columns] */
  int64_t rows, columns;
  uint32_t rank;
  double scale; /* principal: scale · B · A is the best approximation of that rank, shared evenly */
  float *a, *b;
} egi_factors;
eg_status egi_principal_factors(eg_context *ctx, const egi_factors *factors, uint64_t seed);
/* B the first columns of Q, A the first rows of R, of matrix = Q · R. */
eg_status egi_orthogonal_factors(eg_context *ctx, const egi_factors *factors);
/* adapter_factors.c: PiSSA and OLoRA: the targets get first values out of the matrices that they stand beside, and the
 * module weights that hold them. After quantize_base, before graft_adapters. */
eg_status egi_adapters_decompose(egi_machine *machine, const eg_trainer_options *options, bool is_planned_only,
                                 egi_adapters *adapters);

/* One trainable tensor in a pool, in the layout of the file it is saved to; n_values floats. */
uint64_t egi_state_count(const egi_state *state);
/* Dims as files have them; returns the rank. */
int egi_state_file_dims(const egi_state *state, int64_t dims[EGI_MAX_RANK]);
eg_status egi_state_read(const egi_machine *machine, const egi_state *state, egi_state_pool pool, float *values);
eg_status egi_state_write(egi_machine *machine, const egi_state *state, egi_state_pool pool, const float *values);

/* ---- schedule ------------------------------------------------------------------------------------------------- */

/* Learning rate of step `step` (from 0) of `n_steps`; Hugging Face's formulas (transformers/optimization.py). */
double egi_schedule_rate(eg_schedule schedule, double rate, uint64_t step, uint64_t n_steps, double warmup);

/* ---- trainer -------------------------------------------------------------------------------------------------- */

/* A trainable state as files have it, or one of its parts. */
typedef struct egi_file_tensor {
  uint32_t state;
  const char *name;
  int64_t first_row, rows; /* of its first dim; rows 0: all of it */
} egi_file_tensor;

/* What the training graph counts of its mixtures of experts (count_experts), summed over a step. */
typedef struct egi_expert_load {
  size_t n_layers, n_experts;
  float *batches; /* [accumulate, n_layers, 2, n_experts]: tokens, probabilities */
  uint64_t *tickets;
  uint32_t n_batches; /* of the last step so far */
  double *sums;
  uint64_t n_tokens;
} egi_expert_load;

/* What a step leaves on the device for the host to read: its losses, then its norm. */
typedef struct egi_late_step {
  float *losses; /* by micro-batch; 0 where nothing is trained */
  uint64_t *tickets;
  float norm;
  uint64_t norm_ticket;
  uint64_t number; /* of the step, from 1; 0: all has been read */
} egi_late_step;

struct eg_trainer {
  eg_context *ctx;
  eg_model *model;
  eg_dataset *dataset;
  egi_arena arena;
  eg_trainer_options options; /* strings in the arena */
  egi_machine machine;        /* its graph is the training graph */
  egi_graph *evaluation, *optimizer;
  egi_objective objective;
  egi_vocabulary vocabulary;
  egi_adapters adapters;
  uint32_t *parameters; /* states of the module, in order */
  size_t n_parameters;
  egi_file_tensor *tensors; /* what they are in files */
  size_t n_tensors;
  egi_batch_range *batches;
  size_t n_batches, next_batch;
  egi_batch_limits limits;
  egi_lanes lanes;
  uint32_t tiles, rung; /* tiles of wide layers' rows, or 1; rung of buffer_checkpoints' ladder */
  bool is_decided;      /* tiles and rung are those of a plan file */
  bool is_planned_only; /* nothing is allocated: for eg_trainer_plan() */
  bool has_stand_in;    /* the dataset stands for any of `tokens` tokens a row */
  egi_device_description device;
  uint64_t model_hash, graph_hash; /* texts of the imported graph and of the one before buffer_checkpoints */
  egi_plan *optimizer_plan;
  egi_session *optimizer_session;
  uint64_t n_steps, step; /* asked for, done */
  uint64_t n_updates;     /* steps that moved the parameters */
  uint64_t *moments;      /* by parameter: where its states begin in their pools, in floats */
  egi_step_state state;   /* what the device has */
  bool has_gradients;
  bool has_dropout; /* each micro-batch draws anew */
  egi_expert_load load;
  egi_late_step late[2]; /* the step that is being made, and the one before it */
  unsigned newest;       /* which of them */
  atomic_int is_stop_requested;
};
/* profile.c: what one micro-batch and the optimizer's update take, operator by operator, beside what they cost. */
enum { EGI_PROFILED = 2 }; /* the micro-batch, the update */
typedef struct egi_step_profile {
  egi_profile measured[EGI_PROFILED];
  egi_plan_costs costs[EGI_PROFILED];
  double seconds; /* of all */
} egi_step_profile;
/* Gradients are added to those that are there, and parameters move: nothing that is measured is to be kept. */
eg_status egi_trainer_profile(eg_trainer *trainer, egi_arena *arena, egi_step_profile *out_profile);
/* What the device reaches: a bf16 product of 8192 x 8192 matrices, a pass over 1 GiB that reads and writes it. */
typedef struct egi_ceilings {
  double flops_per_s, bytes_per_s;
} egi_ceilings;
eg_status egi_measure_ceilings(eg_context *ctx, const egi_backend *backend, egi_ceilings *out_ceilings);

/* Bytes of a trainer by what they are for. */
typedef struct egi_trainer_memory {
  uint64_t weights, states;
  uint64_t transient; /* activations and workspace; of these live across the loss: */
  uint64_t saved;
  uint64_t fixed;
  uint64_t inputs;
  uint64_t total;             /* of all above */
  uint64_t quantised, copied; /* of the weights: as in egi_plan_bytes */
  uint64_t pinned;            /* host memory for what is offloaded, outside the total; of these states: */
  uint64_t pinned_states;
  uint64_t tables; /* host memory for addresses, outside the total */
} egi_trainer_memory;
/* Of the trainer with these lanes in place of its own. */
void egi_trainer_bytes(const eg_trainer *trainer, const egi_lanes *lanes, egi_trainer_memory *out_memory);
/* trainer_graph.c: the training, evaluation and optimizer graphs. `peft` is NULL for new adapters and full training. */
eg_status egi_trainer_build(eg_trainer *trainer, const egi_peft *peft);
/* Without data, memory and plans: the module whose first graph is the training graph that a trainer with these options
 * would run. */
eg_status egi_training_module(eg_model *model, const eg_trainer_options *options, egi_module **out_module);
/* Loss of one filled lane: minus the sum of its log-probabilities. egi_lane_start() does not wait for it: it is in
 * `loss` when the lane's session has collected the ticket. */
eg_status egi_lane_start(const egi_lanes *lanes, egi_lane *lane, float *loss, uint64_t *out_ticket);
eg_status egi_lane_run(const egi_lanes *lanes, egi_lane *lane, double *out_loss);
/* Mean loss over documents, by a graph that gives EGI_OUTPUT_LOSS. */
eg_status egi_evaluate_graph(egi_machine *machine, const egi_graph *graph, const egi_documents *documents,
                             uint32_t tokens, eg_pooling pooling, double *out_loss);
/* Micro-batches and the shapes to plan: rows that documents share where the graph has offsets, else padded ones. */
typedef struct egi_batches {
  egi_batch_range *ranges;
  size_t count;
  egi_bucket *buckets;
  size_t n_buckets;
} egi_batches;
#define EGI_GRAPH_EVALUATE "evaluate"
/* A graph with loss and adapters becomes a training graph; its wide layers in tiles of rows (below 2: whole). */
eg_status egi_differentiate(egi_graph *graph, uint32_t tiles);
/* checkpoints.c: the training graph as far up buffer_checkpoints' ladder as the budget asks for, or to where it needs
 * least. Before lanes are planned. */
eg_status egi_trainer_checkpoint(eg_trainer *trainer, const egi_batches *batches);
eg_status egi_batches_plan(const egi_inputs *inputs, const egi_documents *documents, const egi_batch_limits *limits,
                           bool is_in_order, egi_arena *arena, egi_batches *out_batches);
/* Tokens of a micro-batch and what the model prescribes. */
eg_status egi_batch_limits_make(const egi_inputs *inputs, uint32_t tokens, egi_batch_limits *out_limits);

/* device_description.c: {"name", "flops_per_s": {"f32", "bf16", "f16"}, "memory_bytes_per_s", "to_host_bytes_per_s",
 * "to_device_bytes_per_s", "memory_bytes", "launch_s"}; what is left out is as in egi_device_describe_cpu(). */
/* Of the device with the name that --device takes: what the file says, else what the driver does. */
eg_status egi_device_description_find(eg_context *ctx, const char *device, const char *path,
                                      egi_device_description *out_device);
/* Bytes that may be planned there; UINT64_MAX where nobody says. */
uint64_t egi_device_available(eg_context *ctx, const egi_backend *backend, const egi_device_description *device);
/* Whether its memory is not the host's: a device that shares it never gains by moving tensors there. */
bool egi_device_is_apart(eg_context *ctx, const egi_backend *backend);
eg_status egi_device_description_read(eg_context *ctx, const char *path, egi_device_description *out_device);
/* plan_file.c: shapes and rung of options.plan; EG_ERROR_DATA says why the file does not fit. */
eg_status egi_trainer_take_plan(eg_trainer *trainer, egi_batches *batches);
/* plan_options.c: hashes of the graphs, before buffer_checkpoints. */
eg_status egi_trainer_hash_graphs(eg_trainer *trainer);
/* What a plan was made for, as a JSON object: one text for writing and comparing. */
void egi_trainer_plan_options(const eg_trainer *trainer, egi_text *out);
/* The hash that stands in the file: of what it was made for, its shapes and its decisions. `shapes` NULL: those of the
 * lanes. */
eg_status egi_trainer_plan_hash(const eg_trainer *trainer, const egi_batches *shapes, uint64_t *out_hash);
/* plan_document.c: the whole file. */
eg_status egi_trainer_write_plan(const eg_trainer *trainer, egi_text *out);
/* A trainer that is planned only, written and destroyed. */
eg_status egi_trainer_plan(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options, egi_text *out);

eg_status egi_trainer_create(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                             eg_trainer **out_trainer);
void egi_trainer_destroy(eg_trainer *trainer);
eg_context *egi_trainer_context(const eg_trainer *trainer);
uint64_t egi_trainer_step_count(const eg_trainer *trainer);
/* experts.c: the counts become an output of the graph; nothing where it has no mixtures. */
eg_status egi_expert_load_prepare(eg_trainer *trainer);
void egi_expert_load_begin(eg_trainer *trainer);
eg_status egi_expert_load_add(eg_trainer *trainer, egi_lane *lane, uint64_t n_tokens);
eg_status egi_expert_load_settle(const eg_trainer *trainer); /* waits for the counts of the last step */
double egi_expert_load_balance(const eg_trainer *trainer);
size_t egi_trainer_expert_count(const eg_trainer *trainer, size_t *out_layers);
eg_status egi_trainer_expert_tokens(const eg_trainer *trainer, size_t layer, uint64_t *tokens, size_t n_experts);
eg_status egi_trainer_step(eg_trainer *trainer, eg_step_report *out_report);
/* step.c: room for what steps leave behind. */
eg_status egi_late_steps_make(eg_trainer *trainer);
eg_status egi_trainer_evaluate(eg_trainer *trainer, const egi_documents *documents, double *out_loss);
void egi_trainer_request_stop(eg_trainer *trainer);
eg_status egi_trainer_save_adapter(const eg_trainer *trainer, const char *directory);
eg_status egi_trainer_save_model(const eg_trainer *trainer, const char *path);
/* moments.c: sets trainer->moments and the sizes of the pools; adds the optimizer's node. */
eg_status egi_moments_place(eg_trainer *trainer);
eg_status egi_moments_emit(const eg_trainer *trainer, egi_emitter *emitter, const egi_value_id inputs[6]);
/* For moments in host memory: they pass the device part by part, two at a time. */
eg_status egi_moments_emit_parts(const eg_trainer *trainer, egi_emitter *emitter, egi_value_id step_and_norm[2]);
/* Whether a parameter's states are codes, one a byte, with a scale for each 256 behind them. */
bool egi_moments_are_codes(const eg_trainer *trainer, size_t parameter);
uint64_t egi_moments_blocks(const eg_trainer *trainer, size_t parameter);
/* resume.c */
eg_status egi_trainer_save_state(const eg_trainer *trainer, const char *path);
eg_status egi_trainer_load_state(eg_trainer *trainer, const char *path);
uint64_t egi_trainer_steps_done(const eg_trainer *trainer);
size_t egi_trainer_parameter_count(const eg_trainer *trainer);
eg_status egi_trainer_parameter_info(const eg_trainer *trainer, size_t index, eg_parameter_info *out_info);
eg_status egi_trainer_read(const eg_trainer *trainer, size_t index, egi_state_pool pool, float *values,
                           size_t n_values);
eg_status egi_trainer_write(eg_trainer *trainer, size_t index, const float *values, size_t n_values);

typedef struct egi_evaluate_options {
  const char *adapter; /* PEFT folder, NULL: none */
  uint32_t tokens;     /* of a batch */
  bool is_expanded;    /* fused operators as their bodies */
  egi_objective objective;
  egi_quantise_options quantise;
  eg_packing packing;
} egi_evaluate_options;
/* Mean loss over `documents` of the model without a trainer. */
eg_status egi_evaluate_model(const eg_model *model, const egi_evaluate_options *options, const egi_documents *documents,
                             double *out_loss);

/* ---- exports -------------------------------------------------------------------------------------------------- */

/* An adapter that fits a model. */
typedef struct egi_export {
  const eg_model *model;
  eg_context *ctx;
  const eg_export_options *options;
  egi_arena arena;
  egi_peft *peft;
  egi_adapters adapters;
  const egi_expert_parameter **expert_of; /* by target; NULL: a linear layer */
} egi_export;
/* One of its modules: y + scale · (x · Aᵀ) · Bᵀ. */
typedef struct egi_lora {
  const char *path;
  uint32_t rank;
  int64_t in_features, out_features;
  float *a, *b; /* [rank, in], [out, rank] */
} egi_lora;
/* B times `factor`; the module's own scale leaves none to multiply with. */
eg_status egi_lora_read(const egi_export *export_, size_t index, double factor, egi_arena *arena, egi_lora *out_lora);
/* With its own scale in B. */
eg_status egi_lora_read_scaled(const egi_export *export_, size_t index, egi_arena *arena, egi_lora *out_lora);
/* Numbers in another floating type of 16 or 32 bits, in new memory of the arena. */
eg_status egi_convert_floats(egi_arena *arena, const float *values, uint64_t count, eg_dtype dtype,
                             const uint8_t **out_bytes, uint64_t *out_size);
/* PATH itself where it ends in `suffix`, else PATH/NAME, and that folder is made. */
eg_status egi_export_path(egi_export *export_, const char *path, const char *suffix, const char *name,
                          const char **out_path);
/* EG_ERROR_ARGUMENT where the path is that of the model's own file. */
eg_status egi_export_check(const egi_export *export_, const char *path);
/* Checks the adapter (NULL: none) against the model and writes it in the form that the options say. */
eg_status egi_export_adapter(const eg_model *model, const char *adapter, const eg_export_options *options,
                             const char *path);
/* A tensor of the adapter's file in the type that the options say. */
eg_status egi_export_convert(egi_export *export_, egi_safetensor *tensor);
eg_status egi_export_portable(egi_export *export_, const char *directory);
eg_status egi_export_merged(egi_export *export_, const char *path);
eg_status egi_export_onnx_adapter(egi_export *export_, const char *path);
eg_status egi_export_gguf(egi_export *export_, const char *path);
eg_status egi_export_bnb(egi_export *export_, const char *directory);
/* Quantises the layers of a recognised graph as training would, and makes MatMulBnb4 of them. */
eg_status egi_export_four_bit(egi_graph *graph, const egi_quantise_options *options);

/* export_experts.c: sets export_->expert_of, from the graph that the adapters were matched with. */
eg_status egi_export_find_experts(egi_export *export_, const egi_graph *graph);
/* What stands before ".lora_A.weight" in the target's tensors; NULL: no memory. */
const char *egi_export_expert_name(const egi_export *export_, size_t index, egi_arena *arena);
/* Its A [E·r, in] or B [out, r·E] as in the file. */
eg_status egi_export_expert_stack(const egi_export *export_, size_t index, char which, egi_arena *arena,
                                  float **out_values);
typedef enum egi_expert_part { EGI_EXPERT_GATE, EGI_EXPERT_UP, EGI_EXPERT_DOWN } egi_expert_part;
typedef struct egi_expert_lora {
  uint32_t rank;
  int64_t in_features, out_features;
  float *a, *b; /* [E, rank, in], [E, out, rank] */
} egi_expert_lora;
/* Whether the parameter holds the part. */
bool egi_expert_has_part(const egi_expert_parameter *expert, egi_expert_part part);
/* The part of a target that has it, its B times `factor`. */
eg_status egi_expert_lora_read(const egi_export *export_, size_t index, egi_expert_part part, double factor,
                               egi_arena *arena, egi_expert_lora *out_lora);
/* The Linear becomes `product`, of com.microsoft, of whose row only inputs, attributes and op_name count; its bias is
 * added behind. Its result keeps name and type. */
eg_status egi_export_product(egi_graph *graph, egi_node_id linear, const egi_node *product);
/* export_codes.c: each Linear of a graph of the store's module whose weight a FakeQuantize rounds becomes MatMulNBits
 * or MatMulBnb4 of those codes. */
eg_status egi_export_codes(egi_graph *graph, egi_store *store);

/* export_target.c: the graph that is changed and written. */
typedef struct egi_export_target {
  egi_module *module; /* the file read again, not lowered; NULL: there is none, or a host has rewritten the model */
  egi_graph *graph;
  uint32_t *weights; /* by weight of the model: its index here, 0: it is not here */
  uint32_t n_weights;
} egi_export_target;
/* `module` is a clone of the model's. */
eg_status egi_export_reopen(const egi_export *export_, const egi_module *module, egi_arena *arena,
                            egi_export_target *out_target);

/* merge_weights.c: what a merged model is made of. */
typedef struct egi_merge {
  egi_export *export_;
  egi_module *module;
  egi_graph *own, *graph; /* as in the file; recognised, and where 16-bit types have to go, widened */
  egi_arena arena;
  egi_store *store;
  egi_linear *linears;
  egi_operand *operands;
  size_t n_linears, n_operands;
  int64_t *first_rows;  /* by linear: of its rows in a fused weight */
  uint32_t *adapter_of; /* by linear: index in the adapters, or UINT32_MAX */
  uint32_t *operand_of; /* by node: 1 + the operand that is its matrix; 0: none */
  bool *is_router;      /* by weight of the module when it was recognised */
  uint32_t n_weights;
  egi_export_target raw;
  eg_dtype dtype; /* of matrices in the file to be written */
  bool is_widened;
} egi_merge;
typedef struct egi_merged {
  float *values;
  int64_t rows, columns;
  bool is_out_first; /* [out, in] */
} egi_merged;
/* The model recognised, for every input it takes, and matched with the adapters of `export_`; `may_widen`: its graph is
 * computed in float32 where another type than `dtype` would be. Closed whether it succeeds or not. */
eg_status egi_merge_open(egi_merge *merge, bool may_widen);
void egi_merge_close(egi_merge *merge);
/* Type of what a linear is given. */
eg_dtype egi_merge_input_dtype(const egi_merge *merge, size_t index);
/* The matrix of a node, in the layout in which the graph has it, with the adapters of all its parts; `first` is the
 * first of its linears. Lives in `arena`. */
eg_status egi_merge_weight(const egi_merge *merge, size_t first, egi_arena *arena, egi_merged *out_merged);
/* merge_codes.c: what the codes of a quantised linear stand for, [out, in] or [in, out]. */
eg_status egi_merge_decode(const egi_merge *merge, const egi_linear *linear, egi_arena *arena, float **out_values,
                           bool *out_is_out_first);
/* The mixture of the two parameters at `experts` computes with stacks of floats from now on. */
eg_status egi_merge_decode_experts(egi_merge *merge, const egi_expert_parameter *experts);
/* export_codes.c: the graph of an adapter that was trained for codes. */
eg_status egi_merge_codes(egi_merge *merge);
/* Adapters on experts: the stacks of Hugging Face's model take the place of what the graph has. */
eg_status egi_merge_experts(egi_merge *merge);
/* Modules that were trained whole: their tensors take the place of the graph's weights. */
eg_status egi_merge_modules(egi_merge *merge);
/* A weight of the module in float32. */
eg_status egi_merge_read(const egi_merge *merge, uint32_t weight, egi_arena *arena, float **out_values);

/* ---- runner --------------------------------------------------------------------------------------------------- */

struct eg_runner {
  eg_context *ctx;
  eg_model *model;
  egi_arena arena;
  eg_runner_options options; /* texts are copies in `arena` */
  egi_machine machine;
  egi_machine packed;        /* for rows of several documents; no module until it is needed */
  int64_t packed_tokens;     /* of the longest row that it is proved for */
  egi_machine general;       /* for caches that are given and positions of any kind; no module until it is needed */
  egi_machine decoder;       /* for pieces of a row, with caches; no module until it is needed */
  int64_t decoder_positions; /* that its caches hold */
  egi_graph *generation;     /* without caches: the graph with the logits as its only output; NULL until asked for */
  egi_arena run_arena;       /* of the last run: plan options, outputs */
  egi_plan *plan;            /* of the last run */
  egi_session *session;
};

eg_status egi_runner_create(eg_model *model, const eg_runner_options *options, eg_runner **out_runner);
void egi_runner_destroy(eg_runner *runner);
eg_context *egi_runner_context(const eg_runner *runner);
eg_status egi_runner_run(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs, const eg_tensor **out_outputs,
                         size_t *out_count);
eg_status egi_runner_generate(eg_runner *runner, const int32_t *prompt_ids, size_t n_prompt,
                              const eg_generate_options *options, eg_token_function on_token, void *userdata);
/* runner_machines.c: graph, adapters and memory; and the machine that takes these inputs. */
eg_status egi_runner_prepare(eg_runner *runner, const eg_runner_options *options);
/* The machine with caches for that many positions, or for all that the model has; NULL where more than attention looks
 * back. */
eg_status egi_runner_choose_decoder(eg_runner *runner, int64_t n_positions, egi_machine **out_machine);
/* Positions of one row that restart, without a mask: the documents of a packed row. NULL where there are none. */
const eg_tensor *egi_runner_packed_row(const eg_runner *runner, const eg_tensor *inputs, size_t n_inputs);
eg_status egi_runner_choose(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs, egi_machine **out_machine);
/* Number of logits; 0: the graph does not say. */
int64_t egi_logits_count(const egi_graph *graph);

/* runner_inputs.c: int64, int32 and bool stand for each other as long as the numbers fit. */
bool egi_is_whole_type(eg_dtype dtype);
eg_status egi_convert_whole(eg_context *ctx, const eg_tensor *tensor, uint64_t count, eg_dtype dtype, void *out);
/* Tokens in a cache that is given: its first free dimension behind the batch. */
int64_t egi_cache_length(const egi_graph *graph, uint32_t input, const eg_tensor *tensor);
/* Whether positions [1, sequence] begin with 0, go on by 1 or begin again, and do so behind a larger one. */
bool egi_is_packed_row(const eg_tensor *tensor);
/* Where its documents begin, sequence + 1 numbers: what is left repeats the length of the row. */
void egi_packed_offsets(const eg_tensor *tensor, int64_t *out_offsets);
/* Positions [rows, sequence] that do not rise are several documents in a row, which a made mask would mix. */
eg_status egi_check_positions(eg_context *ctx, const eg_tensor *tensor);
typedef struct egi_making {
  uint64_t batch, sequence, past; /* past: tokens in the caches */
  const eg_tensor *mask;          /* the caller's, or NULL */
} egi_making;
/* Positions of n_rows rows of tokens. */
void egi_make_positions(const egi_making *making, uint64_t n_rows, int64_t *out_positions);

/* Chooses the next token from logits [n]; `scratch` has room for n pairs. */
typedef struct egi_candidate {
  float score;
  int32_t token;
} egi_candidate;
int32_t egi_sample(const float *logits, size_t n, const eg_generate_options *options, uint64_t position,
                   egi_candidate *scratch);

#endif
