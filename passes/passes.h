/* Graph passes: the table, how they are run and what they are told. Passes never include backend/. */
#ifndef ENGRAFT_PASSES_PASSES_H
#define ENGRAFT_PASSES_PASSES_H

#include "graph/fake_quantize.h"
#include "graph/graph.h"

typedef enum egi_stage {
  EGI_STAGE_CANONICALISE,
  EGI_STAGE_RECOGNISE,
  EGI_STAGE_ADAPT,
  EGI_STAGE_SPECIALISE,
  EGI_STAGE_DIFFERENTIATE,
  EGI_STAGE_SCHEDULE
} egi_stage;

/* One adapter to graft, decided by the caller (new or read from a PEFT folder). */
typedef struct egi_adapter_target {
  const char *path; /* module path, "model.layers.0.self_attn.q_proj"; parameter of experts, "….experts.down_proj" */
  uint32_t rank;
  double scale; /* alpha / rank */
  /* Weights of the module with first values other than zero, whose product is subtracted, so that nothing changes at
   * first; 0: none. */
  uint32_t first_a, first_b;
} egi_adapter_target;

/* How quantize_base stores frozen matrices: codes of 4 bits (base/blockwise.h). */
typedef struct egi_quantise_options {
  bool is_wanted;
  unsigned type; /* egi_four_bit */
  int64_t block; /* a power of two from 32 to 4096 */
  bool is_nested;
  bool has_head; /* the output head too */
} egi_quantise_options;

/* What fake_quantize rounds to. */
typedef struct egi_fake_options {
  bool is_wanted, has_activations;
  egi_fake_quantize weights, activations;
} egi_fake_options;

/* What the adapt stage is told; unused fields are zero. */
typedef struct egi_adapt_options {
  const egi_adapter_target *adapters;
  size_t n_adapters;
  const char *modules; /* trained whole beside adapters: as in PEFT's modules_to_save, joined by commas; NULL: none */
  bool is_full;        /* every parameter becomes a trainable state */
  bool has_gradient;   /* false: append_loss for evaluation only */
  bool is_frozen;      /* graft adapters whose values never change: no gradient states are made */
  eg_loss loss;        /* EG_LOSS_AUTO: of the next token */
  eg_pooling pooling;
  double similarity_scale; /* 0: 20 */
  double dropout;          /* of the inputs of adapters, where there are gradients */
  uint64_t seed;           /* of what is dropped */
  bool is_loop;            /* dispatch_moe: experts one after the other */
  egi_quantise_options quantise;
  egi_fake_options fake;
  eg_dtype dtype; /* lower_precision: of activations; EG_DTYPE_BF16, _F16, else float32 */
} egi_adapt_options;

/* What buffer_checkpoints and tile_rows are told. */
typedef struct egi_checkpoint_options {
  uint32_t tiles; /* of the rows of wide layers; below 2: none */
  uint32_t rung;  /* how far memory is traded for time: from 0, which keeps everything, to the end of the last stage */
  const egi_binding *bindings; /* sizes: what is small is not worth moving; none: nothing is small */
  size_t n_bindings;
  bool is_single_buffered; /* copies of a block hide behind that block alone: for comparison */
} egi_checkpoint_options;

/* What a rule of a pass did: `n_tried` nodes could have been its pattern's root. */
typedef struct egi_rule_report {
  const char *rule;
  uint32_t n_tried, n_matched;
  const char *nearest_miss; /* node "x" (Op): why not; or NULL */
} egi_rule_report;

/* What a pass did: for `engraft rewrite --report`. */
typedef struct egi_pass_report {
  const char *pass;
  uint32_t n_tried, n_matched;
  const char *nearest_miss; /* node "x" (Op): why not; or NULL */
  double seconds;
  const egi_rule_report *rules; /* of passes made of rules */
  uint32_t n_rules;
} egi_pass_report;

typedef struct egi_pass_run {
  eg_context *ctx;
  const egi_adapt_options *adapt;
  const egi_checkpoint_options *checkpoints;
  egi_pass_report *report;
  bool is_general;  /* what is given at run time may be any: as in egi_pipeline_options */
  void *userdata;   /* of the pass */
  int64_t tokens;   /* as in egi_pipeline_options */
  int64_t block;    /* as in egi_pipeline_options */
  bool is_decoding; /* as in egi_pipeline_options */
  bool has_changed; /* the pass sets it */
} egi_pass_run;

typedef eg_status (*egi_pass_function)(egi_pass_run *run, egi_graph *graph);

typedef struct egi_pass_info {
  const char *name;
  egi_stage stage;
  const char *summary;
  egi_pass_function run;
  void *userdata;
} egi_pass_info;

#define EGI_PASS(name, stage, summary) eg_status egi_pass_##name(egi_pass_run *run, egi_graph *graph);
#include "passes/passes.def"
#undef EGI_PASS

size_t egi_pass_count(void);
const egi_pass_info *egi_pass_at(size_t index);
const egi_pass_info *egi_pass_find(const char *name); /* NULL when there is none */

typedef struct egi_pipeline_options {
  const egi_adapt_options *adapt;
  const egi_checkpoint_options *checkpoints; /* NULL: 4 tiles; each block is made again from its input */
  bool verify;                               /* run the graph before and after each pass on random input and compare */
  /* Nothing is taken for granted that training and an ordinary run hold to: caches stay inputs and outputs, and masks
   * that follow positions stay as they are. */
  bool is_general;
  const egi_pass_info *own_passes; /* of the host, known beside those of the table */
  size_t n_own_passes;
  int64_t tokens; /* of a row that documents share, for cache_metadata; 0: 2048 */
  int64_t block;  /* rows of a tile of the attention kernel, whose bounds cache_metadata has made; 0: none */
  /* cache_metadata: a row is a piece of one document of at most `tokens`, at the positions that an input gives; keys
   * and values of the pieces before it lie in caches, which cache_keys makes. */
  bool is_decoding;
} egi_pipeline_options;

/* Runs a list of passes over one graph, egi_graph_tidy() and (debug builds) egi_graph_verify() after each.
 * `reports` has room for n_passes entries or is NULL. EG_ERROR_ARGUMENT names an unknown pass. */
eg_status egi_passes_run(egi_graph *graph, const char *const *names, size_t n_names,
                         const egi_pipeline_options *options, egi_pass_report *reports);
/* All passes of a stage, canonicalise to a fixed point. */
eg_status egi_passes_run_stage(egi_graph *graph, egi_stage stage, const egi_pipeline_options *options);
/* The canonicalise and recognise stages, and what recognition left over is cleared away. `reports` has a row for each
 * pass of the table, filled over all rounds. */
eg_status egi_passes_recognise(egi_graph *graph, const egi_pipeline_options *options, egi_pass_report *reports);

/* Stages of buffer_checkpoints' ladder for a differentiated graph, each with its last rung: that of the stage before it
 * where nothing can be made again so. */
typedef enum egi_checkpoint_stage {
  EGI_CHECKPOINT_NOTHING, /* all is kept */
  EGI_CHECKPOINT_CHEAP,   /* norms, activations, rotations and moves are made again, block after block */
  EGI_CHECKPOINT_MOVED,   /* and what is dear waits in host memory, but for the last block's */
  EGI_CHECKPOINT_WHOLE,   /* instead whole blocks are made again from their inputs */
  EGI_CHECKPOINT_JOINED,  /* two blocks from the input of the first */
  EGI_CHECKPOINT_OFFLOAD, /* and those inputs move to host memory, but for the last */
  EGI_CHECKPOINT_STAGES
} egi_checkpoint_stage;
typedef struct egi_checkpoint_stages {
  uint32_t end[EGI_CHECKPOINT_STAGES];
} egi_checkpoint_stages;
eg_status egi_checkpoint_stages_find(const egi_graph *graph, egi_checkpoint_stages *out_stages);
/* The value that EGI_OUTPUT_LOSS names. */
eg_status egi_find_loss(const egi_graph *graph, egi_value_id *out_loss);
/* What cache_metadata makes once is made again for each node that takes it, and on request copied to the host, as
 * frameworks do that keep nothing: for comparison. After the last eliminate_common. */
eg_status egi_rebuild_metadata(egi_graph *graph, bool is_read_back);

/* ---- what name_modules finds ---------------------------------------------------------------------------------- */

/* A linear layer: y = x·W (+ bias) with a frozen 2-D weight. */
typedef struct egi_linear {
  const char *path;
  egi_node_id node;    /* MatMul, Gemm or Linear; the same for the parts of a fused one */
  egi_value_id weight; /* the weight value itself, below any Transpose; of a quantised one its codes */
  egi_value_id result; /* what an adapter's output is added to */
  int64_t in_features, out_features;
  bool is_transposed; /* the weight's bytes are [out, in] */
  bool is_quantised;
  bool is_head;   /* gives the logits */
  bool is_router; /* gives the logits of a mixture of experts: no module of its own in the Hugging Face model */
} egi_linear;

/* Attribute of a Linear that computes several modules of the Hugging Face model at once: their names, "q_proj k_proj
 * v_proj", in the order of their rows. The Split behind it says how many rows each has. */
#define EGI_PARTS "parts"
/* The linear layers of a graph after name_modules, in execution order. Those without a path are left out. */
eg_status egi_find_linears(const egi_graph *graph, egi_arena *arena, egi_linear **out_linears, size_t *out_count);
/* The modules that a Linear with EGI_PARTS computes: full paths and rows, and the Split that gives them; none where the
 * graph does not show them. `uses` is made when its lists are NULL. */
eg_status egi_find_parts(const egi_graph *graph, egi_arena *arena, egi_uses *uses, egi_node_id linear,
                         egi_rows_part **out_parts, egi_node_id *out_split);
/* The matrices of a mixture's experts as the Hugging Face model holds them: one stack for gate and up, one for down. */
typedef struct egi_expert_parameter {
  const char *module; /* "model.layers.0.mlp.experts" */
  const char *name;   /* "model.layers.0.mlp.experts.gate_up_proj" */
  egi_node_id node;   /* MoE */
  bool is_down, is_gated;
  bool is_interleaved; /* its rows are one of gate, one of up, …; else all of gate, then all of up */
  int64_t n_experts, in_features, out_features;
} egi_expert_parameter;
/* Those of a graph after name_modules, in execution order, gate and up before down. */
eg_status egi_find_experts(const egi_graph *graph, egi_arena *arena, egi_expert_parameter **out_parameters,
                           size_t *out_count);
/* The FakeQuantize whose result the Linear multiplies with, or 0. */
egi_node_id egi_fake_quantize_below(const egi_graph *graph, egi_node_id linear);
/* Puts an adapter on one: A [E·r, in], B [out, r·E] as PEFT lays them out. */
eg_status egi_graft_experts(egi_graph *graph, const egi_expert_parameter *parameter, egi_value_id a, egi_value_id b,
                            double scale);
/* What stands before ".lora_A.weight" in the names of one's adapter: PEFT wraps a module once for each of its
 * parameters that have adapters, so that the first lies below the "base_layer" of the second. NULL: no memory. */
const char *egi_expert_tensors(egi_arena *arena, const egi_expert_parameter *parameter, bool has_down_adapter);
/* Relative positions that an exporter multiplied with a layer's weights already are not reached by what changes that
 * layer: EG_ERROR_UNSUPPORTED names a layer of the map (module path -> anything; NULL: any) for which that is so. */
eg_status egi_check_folded_positions(const egi_graph *graph, const egi_map *adapted, egi_arena *arena);
/* PEFT's rule: `target` equals the path or is its end after a dot; "all-linear": every linear but the head and routers.
 */
bool egi_target_matches(const egi_linear *linear, const char *targets);
/* Names separated by commas, each the path or its end after a dot. */
bool egi_path_is_named(const char *path, const char *names);

/* One operand of a node that takes a parameter, through casts, transposes and reshapes of the weight. */
typedef struct egi_parameter_use {
  egi_node_id node;
  uint32_t input;
  bool is_transposed; /* a tied weight whose file holds the 2-D transpose of the parameter's own bytes */
} egi_parameter_use;

/* Parameters of the model as Hugging Face names them, for full training. A weight that the exporter shared between
 * modules is one parameter for each module; tied weights (token Gather and head) are one parameter. */
typedef struct egi_parameter {
  const char *name;   /* "model.layers.0.self_attn.q_proj.weight" */
  uint32_t weight;    /* index in the module */
  bool is_transposed; /* Hugging Face holds the transpose of the file's bytes */
  bool is_vector;     /* Hugging Face holds one dim */
  const egi_parameter_use *uses;
  uint32_t n_uses;
  const egi_rows_part *parts; /* of a fused layer: its rows, in Hugging Face's layout, by module; NULL: one module */
  uint32_t n_parts;
} egi_parameter;
/* All parameters that can be trained, in execution order of their first use; the graph has been through name_modules.
 */
eg_status egi_find_parameters(const egi_graph *graph, egi_arena *arena, egi_parameter **out_parameters,
                              size_t *out_count);
/* The same, but a head that is tied to the token table is a parameter of its own. */
eg_status egi_find_untied_parameters(const egi_graph *graph, egi_arena *arena, egi_parameter **out_parameters,
                                     size_t *out_count);
/* The state that trains a parameter, of its name and first values. */
egi_state egi_parameter_state(const egi_graph *graph, const egi_parameter *parameter);
/* Whether PEFT's modules_to_save of these names (joined by commas; NULL: none) holds the module or one around it. */
bool egi_is_saved_module(const char *modules, const char *path);
/* A parameter of such a module, and its state: named, with its parts, as in PEFT's files. */
typedef struct egi_saved_parameter {
  egi_parameter parameter;
  egi_state state;
} egi_saved_parameter;
/* All of them, tied weights apart as in PEFT. EG_ERROR_UNSUPPORTED for what cannot be trained, EG_ERROR_ARGUMENT for a
 * name without such a module. */
eg_status egi_find_saved_parameters(const egi_graph *graph, const char *modules, egi_arena *arena,
                                    egi_saved_parameter **out_parameters, size_t *out_count);
/* Before parameters are looked for: the experts of MoE nodes become stacks as Hugging Face holds and names them. Types
 * of the nodes' operands stay. */
eg_status egi_stack_experts(egi_graph *graph);
/* Every use of the parameter takes `value`, a weight or state of the shape of the parameter's weight, instead: how full
 * training puts states in, and how a trained model is saved with new weights. */
eg_status egi_replace_parameter(egi_graph *graph, const egi_parameter *parameter, egi_value_id value);
/* The logits: the output of that name, or the only float output of rank 3. EG_ERROR_DATA when there is none. */
eg_status egi_find_logits(const egi_graph *graph, egi_value_id *out_logits);
/* A row of numbers for each document: float [batch, n] or [batch]; 0: none. */
egi_value_id egi_find_document_logits(const egi_graph *graph);
bool egi_is_embedding_name(const char *name);
/* Embeddings [batch, size], or hidden states [batch, sequence, size] to be pooled. EG_ERROR_DATA when there are none.
 */
eg_status egi_find_embedding(const egi_graph *graph, eg_pooling pooling, egi_value_id *out_value);
/* Whether a loss has a row for each document, not for each token. */
bool egi_loss_is_of_documents(eg_loss loss);
/* For append_loss: the inputs and nodes of such a loss. */
eg_status egi_append_document_loss(egi_graph *graph, const egi_adapt_options *adapt, egi_value_id *out_loss);
/* Whether the logits are those of the last position alone; the message says so (in `arena`). */
bool egi_has_pruned_head(const egi_graph *graph, egi_arena *arena, const char **out_message);
/* What an input holds by its name (passes/inputs.def); of what type and rank it is stands to be checked. */
typedef enum egi_input_kind {
  EGI_INPUT_OTHER,
  EGI_INPUT_TOKENS,
  EGI_INPUT_MASK,      /* 1 where a token is none of the padding */
  EGI_INPUT_POSITIONS, /* of tokens, from 0 */
  EGI_INPUT_TOKEN_TYPES
} egi_input_kind;
egi_input_kind egi_input_kind_of(const char *name);
/* The token ids: the input "input_ids", or the only integer input of rank 2 that a Gather takes. */
eg_status egi_find_token_input(const egi_graph *graph, egi_value_id *out_input);

/* ---- the structure of a recognised graph ------------------------------------------------------------------------ */

typedef struct egi_structure_counts {
  uint32_t norm, attention, linear, rope, glu, moe, other;
} egi_structure_counts;

/* The same for every file of one model; 0 where a model has no such thing. */
typedef struct egi_structure {
  int64_t layers, hidden, heads, kv_heads, head_dim, vocab;
  int64_t *windows; /* of each attention, in order: keys that a query sees, its own included; 0: all */
  uint32_t n_windows;
  double softcap;   /* of attention scores */
  int64_t rope_dim; /* elements of a head that are turned */
  bool is_rope_interleaved;
  uint32_t n_rope_tables; /* different tables of angles */
  bool has_sinks, has_qk_norm, is_tied;
  int64_t experts, top_k;
  const egi_node_id *left;     /* the nodes that counts.other counts */
  egi_structure_counts counts; /* of the whole graph; `other` of the layers: what is neither one of these, nor a move, a
                                  residual add, nor a plain activation */
} egi_structure;
/* Of a graph that has been through the recognise stage; lists live in the arena. */
eg_status egi_structure_find(const egi_graph *graph, egi_arena *arena, egi_structure *out_structure);

/* ---- help for passes ------------------------------------------------------------------------------------------ */

/* Replacements that a pass decides on while it walks the nodes in order; applied in one sweep at the end. */
typedef struct egi_redirect {
  egi_graph *graph;
  egi_value_id *to; /* [capacity], 0: stays; all-zero with `graph` set is a valid empty one */
  bool *is_output;  /* [capacity] */
  uint32_t capacity, n_redirected;
  egi_arena arena;
} egi_redirect;
eg_status egi_redirect_init(egi_redirect *redirect, egi_graph *graph);
void egi_redirect_free(egi_redirect *redirect);
/* What a value stands for by now. */
egi_value_id egi_redirect_get(const egi_redirect *redirect, egi_value_id value);
/* Rewrites the node's inputs to what they stand for. */
void egi_redirect_node(const egi_redirect *redirect, egi_node_id node);
/* `value` becomes `target` everywhere; a graph output keeps its name. Nothing happens (*out_done false) when a graph
 * output would lose its name: its target is itself an output, or no result of a node. */
eg_status egi_redirect_put(egi_redirect *redirect, egi_value_id value, egi_value_id target, bool *out_done);
/* Rewrites all nodes and outputs. */
void egi_redirect_apply(egi_redirect *redirect);

/* Equal rank and equal dims, assumptions applied. */
bool egi_same_shape(const egi_graph *graph, egi_value_id a, egi_value_id b);
/* A new weight with these bytes (kept by the caller as long as the module) as a value of the graph. */
eg_status egi_add_constant(egi_graph *graph, const char *name, const egi_tensor *tensor, egi_value_id *out_value);
/* The weight value that `value` is a Cast, Identity, Transpose, Reshape, Squeeze, Unsqueeze or FakeQuantize of, or 0. A
 * 2-D transpose toggles *is_transposed; any other reordering of elements gives 0. */
egi_value_id egi_weight_below(const egi_graph *graph, egi_value_id value, bool *is_transposed);
/* The DequantizeLinear of a quantised 2-D weight that `value` is, through casts and transposes as above, or 0. */
egi_node_id egi_dequantised_below(const egi_graph *graph, egi_value_id value, bool *is_transposed);
/* How the scale of a norm that has none is called, in files too: no parameter of the model. */
#define EGI_WEIGHT_ONES "engraft.ones"

/* Where a node takes a parameter of the model: float weights that meet values computed from the embedded tokens, so
 * that tables of positions and frequencies are none. */
typedef enum egi_operand_role {
  EGI_ROLE_MATRIX,    /* of a MatMul, Gemm, Linear or LinearLogProbability: effectively [in, out] */
  EGI_ROLE_QUANTISED, /* the codes of a Linear, or of a DequantizeLinear below a MatMul or Gemm; never trained */
  EGI_ROLE_TABLE,     /* of a Gather: effectively [rows, features] */
  EGI_ROLE_SCALE,
  EGI_ROLE_SINKS, /* of a MaskedAttention: a number for each head */
  EGI_ROLE_BIAS,
  EGI_ROLE_EXPERTS /* of a MoE: a stack over the experts, or one expert's, matrix or bias */
} egi_operand_role;
typedef struct egi_operand {
  egi_node_id node;
  uint32_t input;
  egi_value_id weight; /* below casts, transposes and reshapes */
  egi_operand_role role;
  bool is_transposed; /* the weight's bytes are the transpose of the effective matrix */
} egi_operand;
/* All of them in execution order. */
eg_status egi_find_operands(const egi_graph *graph, egi_arena *arena, egi_operand **out_operands, size_t *out_count);
/* Whether two weights hold the same numbers in the same layout: exporters write a module's weight anew for each call.
 */
bool egi_same_weight(const egi_graph *graph, egi_value_id a, egi_value_id b);
/* "m.dense" of "m.dense_1", as torch's tracer numbers the calls of a module after the first, whose weights it may write
 * anew; NULL without a number. */
const char *egi_called_before(const char *path, egi_arena *arena);
/* The node whose linear layer gives the logits, of tokens or of documents, or 0. */
egi_node_id egi_find_head(const egi_graph *graph);
/* A name made of dotted identifiers, as PyTorch names parameters. */
bool egi_is_parameter_name(const char *name);

/* Sizes and padding of made-up inputs. The last row of a batch is padded, the others are whole. */
typedef struct egi_sample_sizes {
  int64_t batch, sequence, n_padded;
  bool is_left_padded;
  uint64_t seed;
} egi_sample_sizes;
/* A tensor for each input of the graph, caches empty; NULL where that cannot be. */
egi_tensor *egi_sample_inputs(const egi_graph *graph, const egi_sample_sizes *sample, egi_arena *arena);
bool egi_sample_is_padding(const egi_sample_sizes *sample, int64_t row, int64_t position);

/* --verify-rewrites: the graph's outputs on random input before a pass, compared with those after it. A graph that the
 * evaluator cannot run (none set, states, calls left, unknown sizes) is not checked. */
typedef struct egi_rewrite_check egi_rewrite_check;
eg_status egi_rewrite_check_begin(const egi_graph *graph, egi_rewrite_check **out_check);
/* EG_ERROR_INTERNAL names pass and output where they differ. NULL `check`: EG_OK. */
eg_status egi_rewrite_check_end(egi_rewrite_check *check, const egi_graph *graph, const char *pass);
void egi_rewrite_check_free(egi_rewrite_check *check);

/* Sites of engraft.Dropout: adapters count from 0, dropout of the graph itself from this. */
#define EGI_FIRST_DROPOUT_SITE 0x40000000u
void egi_dropout_attributes(const egi_adapt_options *adapt, double ratio, uint32_t site, egi_attribute attributes[3]);
/* The step state as a value of the graph. */
eg_status egi_step_value(egi_graph *graph, egi_value_id *out_value);
/* For a graph that evaluates: nothing is dropped. */
eg_status egi_disable_dropout(egi_graph *graph);

/* ---- gradient rules ------------------------------------------------------------------------------------------- */

/* A rule appends to the graph the gradients of a node's inputs, given those of its outputs. */
typedef struct egi_gradient {
  egi_emitter *emit;
  egi_graph *graph;
  egi_node_id node;
  const egi_value_id *out_gradients; /* [n_outputs], 0 where none flows */
  const bool *is_wanted;             /* [n_inputs] */
  egi_value_id *in_gradients;        /* [n_inputs], to be set where wanted; 0 = no gradient */
} egi_gradient;
typedef eg_status (*egi_gradient_rule)(egi_gradient *gradient);
/* NULL for rows whose gradient column says none_…. */
egi_gradient_rule egi_gradient_rule_of(egi_op op);

#define EGI_OP(symbol, domain, name, version, in_min, in_max, out_min, out_max, flags, shape, gradient_name) \
  eg_status egi_gradient_##gradient_name(egi_gradient *gradient);
#include "graph/ops.def"
#undef EGI_OP

/* For rules; none of them keeps a pointer to the node's row, which moves while nodes are added. Errors stick to the
 * emitter. Input and output are 0 where absent. */
egi_value_id egi_gradient_input(const egi_gradient *gradient, unsigned index);
egi_value_id egi_gradient_output(const egi_gradient *gradient, unsigned index);
bool egi_gradient_wants(const egi_gradient *gradient, unsigned input);
/* Sets the gradient of an input that is wanted, summed to its shape where it was broadcast. */
void egi_gradient_set(egi_gradient *gradient, unsigned input, egi_value_id value);
/* A number of the type of `like`, []. */
egi_value_id egi_gradient_number(egi_gradient *gradient, double number, egi_value_id like);
/* a · number, or a itself when the number is 1. */
egi_value_id egi_gradient_scaled(egi_gradient *gradient, egi_value_id a, double number);
/* A node with the forward node's attributes. */
void egi_gradient_emit(egi_gradient *gradient, egi_op op, const egi_value_id *inputs, unsigned n_inputs,
                       egi_value_id *out_values, unsigned n_outputs);
/* An optional output of the forward node that the rule needs, added when it was left out. */
egi_value_id egi_gradient_demand(egi_gradient *gradient, unsigned output);
/* `a` in the shape of `like`: reshaped, or broadcast. */
egi_value_id egi_gradient_reshaped(egi_gradient *gradient, egi_value_id a, egi_value_id like);
egi_value_id egi_gradient_expanded(egi_gradient *gradient, egi_value_id a, egi_value_id like);
/* `a` with its last two axes swapped: a Transpose, or what `a` is such a Transpose of. */
egi_value_id egi_gradient_swapped(egi_gradient *gradient, egi_value_id a);
/* EG_ERROR_UNSUPPORTED naming the node when `is_met` is false. */
eg_status egi_gradient_require(const egi_gradient *gradient, bool is_met, const char *reason);

/* graft_adapters makes a state in EGI_POOL_PARAMETERS for each trainable parameter and, unless is_frozen, one of the
 * same name, shape and offset in EGI_POOL_GRADIENTS, which differentiate accumulates into: the gradient of the sum of
 * token losses. */

/* Names that the adapt stage gives to the values it adds to a graph. */
#define EGI_INPUT_OFFSETS "engraft.cu_seqlens"      /* input i32: where the documents of a row begin, and its length */
#define EGI_INPUT_ROW_POSITIONS "engraft.positions" /* input i32 [sequence]: of the tokens, one after the other */
#define EGI_INPUT_ROW "engraft.row"                 /* input i64 [1]: whose logits are wanted */
#define EGI_INPUT_LABELS "engraft.labels"           /* input i64 [batch, sequence], shifted: the target of each row */
#define EGI_INPUT_TOKEN_LABELS                                                                                      \
  "engraft.token_labels"                            /* input i64 [batch, sequence]: the target of each token itself \
                                                     */
#define EGI_INPUT_CLASSES "engraft.classes"         /* input i64 [batch] */
#define EGI_INPUT_NUMBERS "engraft.numbers"         /* input f32 [batch, n]: what each document should give */
#define EGI_INPUT_ROW_WEIGHTS "engraft.row_weights" /* input f32 [batch]: 1 for rows that are trained on, else 0 */
#define EGI_INPUT_POOLING "engraft.pooling"         /* input f32 [batch, sequence]: weights of the tokens */
#define EGI_INPUT_MATCHES "engraft.matches"         /* input i64 [batch]: the row that an anchor should choose */
#define EGI_INPUT_CANDIDATES "engraft.candidates"   /* input f32 [batch]: 1 for rows that may be chosen, else 0 */
#define EGI_INPUT_PARTNERS "engraft.partners"       /* input i64 [batch]: the row that a row is compared with */
#define EGI_INPUT_REAL "engraft.real" /* input f32 [batch, sequence]: 1 for tokens of documents, 0 for the rest */
#define EGI_OUTPUT_LOAD \
  "engraft.expert_load"                /* output f32 [mixtures, 2, experts]: real tokens, sums of probabilities */
#define EGI_OUTPUT_LOGP "engraft.logp" /* output f32 [batch, sequence]: log-probability of the target */
#define EGI_OUTPUT_LOSS "engraft.loss" /* output f32 []: minus the sum of logp over trained tokens */

#endif
