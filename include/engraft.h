/* engraft: fine-tune ONNX language models inside the host's own process.
 *
 * This header is the whole public interface and its specification. Objects are opaque handles. What can fail
 * returns eg_status; the text of the last failure of a context is eg_context_error(). Out-parameters come last and
 * are written only on EG_OK. Every destroy function accepts NULL. Strings are UTF-8 and NUL-terminated.
 *
 * Threads: a context and everything made from it belong to one thread at a time; contexts are independent of each
 * other. The only call allowed from any thread at any time is eg_trainer_request_stop().
 *
 * Ownership: an object keeps alive what it depends on, so handles may be destroyed in any order.
 *
 * Option structs: initialise with the _INIT macro, which carries the real defaults and the size of the struct as the
 * caller was compiled; a library newer or older than the caller reads only what both know. */
#ifndef ENGRAFT_H
#define ENGRAFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(ENGRAFT_SHARED) && defined(__GNUC__)
#define EG_API __attribute__((visibility("default")))
#else
#define EG_API
#endif

#define EG_VERSION_MAJOR 0
#define EG_VERSION_MINOR 1
#define EG_VERSION_PATCH 0

typedef enum eg_status {
  EG_OK = 0,
  EG_ERROR_ARGUMENT,    /* the caller's mistake: NULL, out of range, conflicting options */
  EG_ERROR_MEMORY,      /* the allocator said no */
  EG_ERROR_IO,          /* a file cannot be opened, read, mapped or written */
  EG_ERROR_FORMAT,      /* a file's bytes are not what its format says */
  EG_ERROR_UNSUPPORTED, /* well-formed, but no kernel, type, or feature for it */
  EG_ERROR_SHAPE,       /* shapes or types in a graph contradict each other */
  EG_ERROR_DATA,        /* training data or an adapter does not fit the model */
  EG_ERROR_BUDGET,      /* a memory budget or limit is too small */
  EG_ERROR_DEVICE,      /* the device or its driver failed */
  EG_ERROR_STOPPED,     /* eg_trainer_request_stop() was called */
  EG_ERROR_INTERNAL     /* a bug in engraft */
} eg_status;

/* Element types; the values are those of ONNX TensorProto.DataType. */
typedef enum eg_dtype {
  EG_DTYPE_UNDEFINED = 0,
  EG_DTYPE_F32 = 1,
  EG_DTYPE_U8 = 2,
  EG_DTYPE_I8 = 3,
  EG_DTYPE_U16 = 4,
  EG_DTYPE_I16 = 5,
  EG_DTYPE_I32 = 6,
  EG_DTYPE_I64 = 7,
  EG_DTYPE_STRING = 8,
  EG_DTYPE_BOOL = 9,
  EG_DTYPE_F16 = 10,
  EG_DTYPE_F64 = 11,
  EG_DTYPE_U32 = 12,
  EG_DTYPE_U64 = 13,
  EG_DTYPE_C64 = 14,
  EG_DTYPE_C128 = 15,
  EG_DTYPE_BF16 = 16,
  EG_DTYPE_F8E4M3FN = 17,
  EG_DTYPE_F8E4M3FNUZ = 18,
  EG_DTYPE_F8E5M2 = 19,
  EG_DTYPE_F8E5M2FNUZ = 20,
  EG_DTYPE_U4 = 21,
  EG_DTYPE_I4 = 22,
  EG_DTYPE_F4E2M1 = 23,
  EG_DTYPE_F8E8M0 = 24,
  EG_DTYPE_U2 = 25,
  EG_DTYPE_I2 = 26
} eg_dtype;

typedef struct eg_context eg_context;
typedef struct eg_model eg_model;
typedef struct eg_dataset eg_dataset;
typedef struct eg_trainer eg_trainer;
typedef struct eg_runner eg_runner;

/* "0.1.0" */
EG_API const char *eg_version(void);
/* A status in words, for example "out of memory"; never NULL. */
EG_API const char *eg_status_text(eg_status status);

/* ---- context ----------------------------------------------------------------------------------------------- */

/* Host memory. `allocate` returns NULL on failure; `release` gets the size that was asked for. Called from the
 * context's thread only. */
typedef struct eg_allocator {
  void *(*allocate)(void *userdata, size_t size_bytes, size_t alignment);
  void (*release)(void *userdata, void *memory, size_t size_bytes);
  void *userdata;
} eg_allocator;

typedef enum eg_log_level { EG_LOG_ERROR, EG_LOG_WARNING, EG_LOG_INFO, EG_LOG_DEBUG } eg_log_level;
typedef void (*eg_log_function)(void *userdata, eg_log_level level, const char *message);

typedef struct eg_context_options {
  size_t struct_size;
  const eg_allocator *allocator; /* NULL: the C library's; copied */
  eg_log_function log;           /* NULL: silent */
  void *log_userdata;
  int n_threads; /* CPU kernels; 0: one for each core. Results do not depend on it */
} eg_context_options;
#define EG_CONTEXT_OPTIONS_INIT \
  { sizeof(eg_context_options), NULL, NULL, NULL, 0 }

/* `options` may be NULL. Fails with EG_ERROR_MEMORY or EG_ERROR_ARGUMENT; *out_context is then untouched. */
EG_API eg_status eg_context_create(const eg_context_options *options, eg_context **out_context);
/* The context itself is released when the last object made from it is. */
EG_API void eg_context_destroy(eg_context *context);
/* One line that names the file, node or tensor of the last failure; "" before the first. Valid until the next call
 * on this context. */
EG_API const char *eg_context_error(const eg_context *context);

/* Receives pieces of a text or file in order; returning anything but 0 stops the call with EG_ERROR_IO. */
typedef int (*eg_write_function)(void *userdata, const void *bytes, size_t size_bytes);

/* ---- model -------------------------------------------------------------------------------------------------- */

typedef struct eg_model_options {
  size_t struct_size;
  const char *external_root; /* NULL: external data lies beside the model and no file of it is a link; else links are
                                followed as long as they end inside this directory */
  uint64_t max_nodes;        /* 0: 4,000,000 */
  uint64_t max_bytes;        /* of the protobuf message, weights outside it not counted; 0: 8 GiB */
  uint32_t max_depth;        /* of nested messages and functions; 0: 100 */
} eg_model_options;
#define EG_MODEL_OPTIONS_INIT \
  { sizeof(eg_model_options), NULL, 0, 0, 0 }

/* Loads an ONNX file: reads, checks, sorts, upgrades old operator versions, infers shapes. Weights stay where they
 * are: the file and its external data are mapped until the model is destroyed and must not be truncated meanwhile.
 * Every unsupported operator is named in one error. EG_ERROR_IO, _FORMAT, _UNSUPPORTED, _SHAPE, _BUDGET, _MEMORY. */
EG_API eg_status eg_model_load(eg_context *context, const char *path, const eg_model_options *options,
                               eg_model **out_model);
/* As eg_model_load() from memory, which must stay valid and unchanged until the model is destroyed. `directory` is
 * where external data lies; NULL: external data is refused. */
EG_API eg_status eg_model_load_memory(eg_context *context, const void *bytes, size_t size_bytes, const char *directory,
                                      const eg_model_options *options, eg_model **out_model);
EG_API void eg_model_destroy(eg_model *model);

/* Runs passes over the model's graph, in the order given: names separated by commas, the host's own among them; NULL:
 * the canonicalise and recognise stages. With `verify` != 0 the graph is run before and after each pass on random input
 * and compared. After an error the model is unchanged. */
EG_API eg_status eg_model_rewrite(eg_model *model, const char *passes, int verify);
typedef struct eg_trainer_options eg_trainer_options;
/* The same for passes that need to know how the model is to be trained: rank, targets, tokens and whatever else of
 * `options` (NULL: the defaults) decides what the training graph is. Beside the passes, the name "training" stands for
 * all of a trainer's graph work: what the model becomes is the very graph that eg_trainer_create() with these options
 * would make, from input_ids, labels and the parameters to the loss and the gradients. What outlives a step is an input
 * of it, and an output where a step changes it: a parameter NAME is the input NAME, "engraft.gradient.NAME" is its
 * gradient, summed over tokens, added to the input "engraft.gradient_before.NAME" unless the bytes of the input
 * "engraft.step" are 0. Errors are those of eg_trainer_create(), EG_ERROR_ARGUMENT for an unknown pass, and with
 * `verify` EG_ERROR_INTERNAL where a pass changes a result. */
EG_API eg_status eg_model_rewrite_training(eg_model *model, const char *passes, const eg_trainer_options *options,
                                           int verify);
/* JSON: what each pass, and each rule of it, tried, matched and nearly matched in the last eg_model_rewrite(). */
EG_API eg_status eg_model_report(const eg_model *model, eg_write_function write, void *userdata);
/* Writes an ONNX file, through a temporary file that is renamed. Weights that came from external files are referred
 * to when they lie under the new file's directory, and embedded otherwise (above 1 GiB: written to PATH.data).
 * Fused operators of the rewritten graph are written as calls of functions with bodies of standard operators, so that
 * any runtime runs the file; eg_model_load() recognises them. */
EG_API eg_status eg_model_save(const eg_model *model, const char *path);
/* The graph in the ONNX text syntax. */
EG_API eg_status eg_model_print(const eg_model *model, eg_write_function write, void *userdata);
/* JSON: inputs, outputs, operators, parameters and bytes; the structure of the recognised model, the same for every
 * file of one model; targets: module names an adapter can be grafted to. */
EG_API eg_status eg_model_inspect(const eg_model *model, eg_write_function write, void *userdata);

/* ---- own rewrites ------------------------------------------------------------------------------------------- */

/* A tensor of a graph. Texts are valid during the callback. */
typedef struct eg_value_info {
  const char *name;
  eg_dtype dtype;
  int rank;          /* -1: not known */
  int64_t dims[8];   /* -1: not a number */
  const char *op;    /* operator whose result it is, "" for an input or a weight */
  const char *scope; /* module path of that node, "" where there is none */
} eg_value_info;

/* What a rule's pattern stands for at one place of the graph. Names are those of the pattern's text. */
typedef struct eg_match eg_match;
/* 1 when the pattern has a value of that name. */
EG_API int eg_match_value(const eg_match *match, const char *name, eg_value_info *out_info);
/* 1 when the value is a known number however it is stored, or `name` an attribute captured as @name. */
EG_API int eg_match_number(const eg_match *match, const char *name, double *out_number);
/* Sets the attribute @name of the replacement. */
EG_API void eg_match_set_float(eg_match *match, const char *name, float number);
EG_API void eg_match_set_integer(eg_match *match, const char *name, int64_t number);
/* Returns 0 and keeps the reason for the report. */
EG_API int eg_match_refuse(eg_match *match, const char *reason);

/* A rewrite as data. Texts are functions in the ONNX text syntax without a name, "(x, w) => (y) { a = Sqrt (x)
 * y = Mul (a, w) }". A pattern's inputs stand for any value, the same one wherever the name stands. It is compared by
 * data flow: operands of commutative operators in any order; casts that lose nothing the result could show, Identity,
 * and the storage of constant numbers do not count; x / c and x · (1/c), 1 / sqrt(x) and x ^ -0.5 and the like are
 * equal. An attribute in a pattern must have that value, "<keepdims: int = @k>" captures it. Values inside a match that
 * others use, and are no outputs of the pattern, keep it from being rewritten. */
typedef struct eg_rule {
  size_t struct_size;
  const char *name; /* for eg_model_rewrite(); no pass may have it */
  const char *const *patterns;
  size_t n_patterns;       /* alternatives, tried in order */
  const char *replacement; /* inputs by name: inputs and values of the pattern; as many outputs as the pattern */
  int (*check)(eg_match *match, void *userdata); /* 0: no rewrite; NULL: always */
  void *userdata;
} eg_rule;
#define EG_RULE_INIT \
  { sizeof(eg_rule), NULL, NULL, 0, NULL, NULL, NULL }

/* Makes the rule a pass of its own for this model; copied. EG_ERROR_ARGUMENT, _FORMAT, _UNSUPPORTED: a text says
 * what no graph could hold. */
EG_API eg_status eg_model_add_rule(eg_model *model, const eg_rule *rule);

/* A graph while a host's pass runs over it: nodes are numbered from 0 in execution order and stay as they are until the
 * pass returns. */
typedef struct eg_graph eg_graph;
typedef struct eg_node_info {
  const char *name, *op, *domain, *scope; /* "" where there is none */
  uint32_t n_inputs, n_outputs;
} eg_node_info;
EG_API size_t eg_graph_node_count(const eg_graph *graph);
/* 1 when there is such a node, input or output; an input may be left out. */
EG_API int eg_graph_node(const eg_graph *graph, size_t node, eg_node_info *out_info);
EG_API int eg_graph_input(const eg_graph *graph, size_t node, uint32_t input, eg_value_info *out_info);
EG_API int eg_graph_output(const eg_graph *graph, size_t node, uint32_t output, eg_value_info *out_info);
/* 1 when the input is a known number, or the node has a number as attribute of that name. */
EG_API int eg_graph_input_number(const eg_graph *graph, size_t node, uint32_t input, double *out_number);
EG_API int eg_graph_attribute(const eg_graph *graph, size_t node, const char *name, double *out_number);
/* The node becomes the nodes of `replacement`, a text as a rule's whose inputs and outputs are the node's in order. It
 * takes effect when the pass returns EG_OK; a text that does not fit makes eg_model_rewrite() fail then. */
EG_API eg_status eg_graph_replace(eg_graph *graph, size_t node, const char *replacement);

/* Anything but EG_OK ends eg_model_rewrite() with it. Calls on the model and its context are not allowed inside. */
typedef eg_status (*eg_pass_function)(eg_graph *graph, void *userdata);
/* A pass of the host's for this model, under a name that no other pass has. */
EG_API eg_status eg_model_add_pass(eg_model *model, const char *name, eg_pass_function run, void *userdata);

/* ---- data --------------------------------------------------------------------------------------------------- */

/* One document. The caller owns the arrays. */
typedef struct eg_document {
  const int32_t *input_ids; /* [n_tokens] */
  const int32_t *labels;    /* [n_tokens], -100 = not trained; NULL: every token is a label. Not shifted: the label of
                               a token is the token itself, and the first token of a document is never a target */
  uint32_t n_tokens;
} eg_document;

/* What losses of whole documents learn from, all of a dataset alike: one document with n_numbers numbers (its class,
 * the labels 0 or 1 of each class, or what a regression gives); two documents with one number, their similarity; or an
 * anchor, a document like it, and any number of documents unlike it, without a number. The caller owns the arrays. */
typedef struct eg_example {
  const eg_document *documents; /* [n_documents]; their labels are for losses of tokens */
  uint32_t n_documents;
  const int32_t *const *token_types; /* [n_documents] of [n_tokens]; NULL, or NULL for a document: 0 */
  const float *numbers;              /* [n_numbers] */
  uint32_t n_numbers;
  int is_class; /* the number is the index of a class */
} eg_example;

typedef struct eg_dataset_options {
  size_t struct_size;
  int is_text; /* 0: JSON lines with input_ids and optionally labels, prompt_length or label, or examples of several
                  documents (docs/encoders.md); 1: bytes of a text file are tokens 0..255, cut into documents of
                  `sequence` tokens */
  uint32_t sequence; /* longest document, longer ones are cut at the end (is_text = 0); 0: unlimited, or 256 for text */
} eg_dataset_options;
#define EG_DATASET_OPTIONS_INIT \
  { sizeof(eg_dataset_options), 0, 0 }

/* Reads a data file whole and checks every line; the first bad one is named by its number. EG_ERROR_IO, _DATA. */
EG_API eg_status eg_dataset_load(eg_context *context, const char *path, const eg_dataset_options *options,
                                 eg_dataset **out_dataset);
/* Copies documents made by the caller. */
EG_API eg_status eg_dataset_create(eg_context *context, const eg_document *documents, size_t n_documents,
                                   eg_dataset **out_dataset);
/* Copies examples made by the caller. */
EG_API eg_status eg_dataset_create_examples(eg_context *context, const eg_example *examples, size_t n_examples,
                                            eg_dataset **out_dataset);
EG_API void eg_dataset_destroy(eg_dataset *dataset);
EG_API size_t eg_dataset_document_count(const eg_dataset *dataset);

/* ---- trainer ------------------------------------------------------------------------------------------------ */

typedef enum eg_schedule { EG_SCHEDULE_CONSTANT, EG_SCHEDULE_LINEAR, EG_SCHEDULE_COSINE, EG_SCHEDULE_WSD } eg_schedule;
/* First values of adapters. */
typedef enum eg_lora_init {
  EG_LORA_INIT_DEFAULT,  /* A uniform in ±1/sqrt(in), B zero */
  EG_LORA_INIT_GAUSSIAN, /* A normal with deviation 1/rank, B zero */
  EG_LORA_INIT_PISSA,    /* the largest singular triples of the frozen matrix, which the base loses */
  EG_LORA_INIT_OLORA     /* the first columns and rows of its QR factors, which the base loses */
} eg_lora_init;

/* Documents one after the other in rows of at most `tokens`, without seeing each other: as if each were alone. */
typedef enum eg_packing {
  EG_PACKING_AUTO,       /* as BFD where the graph allows it, else OFF; the log says why */
  EG_PACKING_BFD,        /* best fit decreasing: each document goes to the row that it fills best */
  EG_PACKING_SEQUENTIAL, /* in file order, a new row where the next document does not fit */
  EG_PACKING_OFF         /* padded batches */
} eg_packing;

/* What the model learns to give. Means are over a step's trained tokens, documents or examples. */
typedef enum eg_loss {
  EG_LOSS_AUTO,           /* by the data and the model: see docs/encoders.md; the log says which */
  EG_LOSS_NEXT_TOKEN,     /* each token's label from the tokens before it */
  EG_LOSS_TOKEN,          /* each token's own label: masked language models, classes of tokens */
  EG_LOSS_CLASSIFICATION, /* one class of a document: cross-entropy */
  EG_LOSS_MULTI_LABEL,    /* 0 or 1 for each class of a document: binary cross-entropy */
  EG_LOSS_REGRESSION,     /* numbers of a document: mean squares */
  EG_LOSS_RANKING,        /* an anchor's match among all the documents of a batch that are no anchors */
  EG_LOSS_COSINE          /* the cosine of two documents: squares of the difference to their score */
} eg_loss;

/* How the hidden states of a document's tokens become its embedding. */
typedef enum eg_pooling {
  EG_POOLING_AUTO,  /* the model's own output [batch, size] where it is named as an embedding, else the mean */
  EG_POOLING_MEAN,  /* over the tokens */
  EG_POOLING_CLS,   /* the first token's */
  EG_POOLING_LAST,  /* the last token's */
  EG_POOLING_OUTPUT /* the model's own output [batch, size] */
} eg_pooling;

/* How the experts of a mixture are run; results are equal. */
typedef enum eg_moe_dispatch {
  EG_MOE_FUSED, /* all of them by one product over rows sorted by expert */
  EG_MOE_LOOP   /* one after the other: for comparison */
} eg_moe_dispatch;

/* Where the bounds and positions of packed documents are made; results are equal. */
typedef enum eg_packing_cache {
  EG_PACKING_CACHE_ON,      /* once a micro-batch */
  EG_PACKING_CACHE_REBUILD, /* in each layer, forward and backward: for comparison */
  EG_PACKING_CACHE_READBACK /* so, and copied to the host: for comparison */
} eg_packing_cache;

/* Memory for time. Losses and gradients are the same to the bit, unless the budget is so small that wide layers run in
 * tiles of rows, which rounds sums in another order (docs/memory.md). */
typedef enum eg_checkpoint {
  EG_CHECKPOINT_AUTO,      /* as little as the memory budget asks for */
  EG_CHECKPOINT_OFF,       /* everything that the backward pass reads is kept */
  EG_CHECKPOINT_RECOMPUTE, /* each block of layers is made again from its input, and more where the budget asks for it
                            */
  EG_CHECKPOINT_OFFLOAD    /* and those inputs wait in host memory, but for the last block's */
} eg_checkpoint;

/* How the frozen matrices of linear layers and experts are held in memory, as bitsandbytes holds them: codes of 4 bits,
 * made while they are loaded. Routers, embeddings and norms stay as they are, the output head unless quant_head asks
 * for it, and what the file stores quantised. */
typedef enum eg_quant { EG_QUANT_NONE, EG_QUANT_NF4, EG_QUANT_FP4 } eg_quant;

/* Training for a model that is to be stored in few bits: the matrices of the layers that are trained are rounded to
 * codes before each product, and gradients pass the rounding as if it were none (docs/quantisation.md). With adapters
 * the matrix that is rounded is W + scale · B · A, which is what a merged model holds. */
typedef enum eg_qat {
  EG_QAT_NONE,
  EG_QAT_INT4, /* integers in blocks of a row, as com.microsoft's MatMulNBits */
  EG_QAT_INT8, /* the same with one scale a row; what goes into these layers is rounded too, token by token */
  EG_QAT_NF4   /* blocks of the flattened matrix, as com.microsoft's MatMulBnb4 */
} eg_qat;

/* In 8 bits the moments of parameters of 4096 elements and more are codes with a scale for each 256 of them. */
typedef enum eg_optimizer { EG_OPTIMIZER_ADAMW, EG_OPTIMIZER_ADAMW_8BIT } eg_optimizer;

struct eg_trainer_options {
  size_t struct_size;
  const char *device;       /* "cpu"; "cuda": the first CUDA device, EG_ERROR_DEVICE where there is none */
  eg_dtype dtype;           /* of activations; EG_DTYPE_F32 */
  int full;                 /* 1: train all weights instead of adapters */
  uint32_t rank;            /* of new adapters */
  double alpha;             /* scale = alpha / rank, or alpha / sqrt(rank) with rslora */
  const char *targets;      /* "all-linear" (each linear layer but the output head), or names separated by commas, each
                               matched as PEFT does: the whole module path or its end after a dot; or a regular expression
                               (a text with one of \\ ^ $ * + ? ( ) [ ] { } |) that a whole path matches; or "none" */
  const char *init_adapter; /* PEFT folder to go on from: gives rank, alpha, targets and dropout; NULL: new adapters */
  eg_lora_init init; /* of new adapters. PISSA and OLORA are saved as adapters of twice the rank, which load beside the
                        unchanged base: what was learned, and minus what it began with */
  double learning_rate;
  eg_schedule schedule;
  double warmup;       /* steps; below 1 a ratio of n_steps */
  double weight_decay; /* decoupled; with `full` only on weights of two or more dimensions */
  double beta1, beta2, epsilon;
  double clip;            /* largest global norm of the gradient; 0: no clipping */
  uint32_t tokens;        /* of a micro-batch: of a packed row, or rows × padded length */
  uint32_t accumulate;    /* micro-batches a step */
  uint64_t n_steps;       /* 0: n_epochs decides */
  double n_epochs;        /* passes over the data when n_steps is 0 */
  uint64_t seed;          /* of new adapters, and of what dropout drops */
  uint64_t memory_budget; /* bytes of memory a trainer may plan; 0: what the machine has available, UINT64_MAX: any */
  int no_fuse;            /* 1: fused operators run and are differentiated as their bodies of plain operators */
  eg_packing packing;
  eg_packing_cache packing_cache;
  eg_checkpoint checkpoint;
  uint64_t host_budget; /* bytes of host memory for what leaves the device, beside memory_budget; UINT64_MAX: any; 0:
                           what the machine has available, for a device with memory of its own or OFFLOAD, else none */
  int single_buffer;    /* 1: what is offloaded is copied while its own block runs, not the next: for comparison */
  eg_loss loss;
  eg_pooling pooling;      /* of RANKING and COSINE */
  double similarity_scale; /* of RANKING: cosines are multiplied by it */
  int rslora;
  const char *exclude;      /* modules without an adapter, as targets; NULL: none */
  const char *rank_pattern; /* "NAME=NUMBER,…": ranks of modules whose path, or its end after a dot, NAME matches as a
                               regular expression; the first that matches counts; NULL: none */
  const char *alpha_pattern; /* the same for alpha */
  double lora_plus;          /* LoRA+: the learning rate of B is that many times A's */
  eg_quant quant;
  uint32_t quant_block; /* numbers with one scale: a power of two from 32 to 4096 */
  int double_quant;     /* 1: scales are codes of 8 bits themselves */
  const char *plan;     /* a file that eg_trainer_plan() wrote: shapes and what is kept, recomputed or offloaded are
                           those of the file; NULL: decided anew */
  const char *device_description; /* JSON file: how fast the device is (docs/plan.md); NULL: what its driver says; the
                                     CPU: a processor of no particular kind */
  const char *target_parameters;  /* experts to put adapters on, "mlp.experts.gate_up_proj,mlp.experts.down_proj", each
                                     matched as PEFT does: the whole name or its end after a dot; NULL, "none": none */
  eg_moe_dispatch moe_dispatch;
  eg_optimizer optimizer;
  int no_moment_floor; /* ADAMW_8BIT: 1: a second moment may round to 0, as in bitsandbytes, where the step is then
                          first moment / epsilon; 0: what is above 0 stays so */
  double dropout;      /* of what goes into adapters, while training: as seed, step and place decide */
  const char *modules_to_save; /* modules trained whole and saved beside the adapters, names separated by commas, as in
                                  PEFT: each module whose path ends with one of them, and what is inside it, without
                                  adapters; tied weights are untied; NULL: none */
  int quant_head;              /* with quant: 1: the output head becomes codes too */
  eg_qat qat;
  uint32_t qat_block; /* numbers with one scale, a power of two: INT4 and INT8 from 16, NF4 from 32, to 4096; 0: 32 for
                         INT4, 64 for NF4, a whole row for INT8 */
  int qat_asymmetric; /* INT4 and INT8: 1: each block has a zero point, its codes reach from its smallest number to its
                         largest */
  int offload_optimizer; /* 1: the optimizer's moments lie in host memory, and pass the device part by part */
};
#define EG_TRAINER_OPTIONS_INIT                                                                                       \
  {                                                                                                                   \
    sizeof(eg_trainer_options), "cpu", EG_DTYPE_F32, 0, 16, 16.0, "all-linear", NULL, EG_LORA_INIT_DEFAULT, 2e-4,     \
        EG_SCHEDULE_CONSTANT, 0.0, 0.0, 0.9, 0.999, 1e-8, 1.0, 2048, 1, 0, 1.0, 0, 0, 0, EG_PACKING_AUTO,             \
        EG_PACKING_CACHE_ON, EG_CHECKPOINT_AUTO, 0, 0, EG_LOSS_AUTO, EG_POOLING_AUTO, 20.0, 0, NULL, NULL, NULL, 1.0, \
        EG_QUANT_NONE, 64, 1, NULL, NULL, NULL, EG_MOE_FUSED, EG_OPTIMIZER_ADAMW, 0, 0.0, NULL, 0, EG_QAT_NONE, 0, 0, \
        0                                                                                                             \
  }

/* What a step did. */
typedef struct eg_step_report {
  uint64_t step;         /* counted from 1 */
  double loss;           /* mean over the step's trained tokens, documents or examples, before the update */
  double learning_rate;  /* used for this update */
  double gradient_norm;  /* before clipping */
  uint64_t n_tokens;     /* real tokens, without padding */
  uint64_t n_targets;    /* trained tokens, documents or examples */
  double seconds;        /* wall time of the step */
  double auxiliary_loss; /* transformers' load-balancing loss of all mixtures of experts, reported only: the number of
                            experts a token has where all are used alike; 0: no mixture, or no_fuse */
} eg_step_report;

/* Makes the training graph of `model` for the documents of `dataset`, plans it and allocates everything a step needs;
 * no step allocates. The model is not changed and may serve other trainers. EG_ERROR_DATA: a token or label outside
 * the vocabulary, an adapter that does not fit. EG_ERROR_UNSUPPORTED, _SHAPE, _BUDGET, _MEMORY. */
EG_API eg_status eg_trainer_create(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                                   eg_trainer **out_trainer);
/* Writes what eg_trainer_create() would plan, and allocates none of it: JSON (docs/plan.md) with bytes by purpose,
 * work, predicted seconds, and the decisions, which eg_trainer_options.plan takes. `dataset` may be NULL: one row of
 * `tokens` tokens. Errors are those of eg_trainer_create(); EG_ERROR_IO when the writer stops. */
EG_API eg_status eg_trainer_plan(eg_model *model, eg_dataset *dataset, const eg_trainer_options *options,
                                 eg_write_function write, void *userdata);
EG_API void eg_trainer_destroy(eg_trainer *trainer);
/* Number of steps the options ask for over this dataset. */
EG_API uint64_t eg_trainer_step_count(const eg_trainer *trainer);
/* One optimizer step over the next `accumulate` micro-batches; goes round when the data ends. EG_ERROR_STOPPED leaves
 * the trainer as it was before the step. A loss or gradient that is not finite is EG_ERROR_DATA and leaves the
 * parameters as they were. With `out_report` NULL a device is not waited for: what it finds (such a loss or gradient,
 * bad data, its own failure) is the error of the next step, and only a gradient that is not finite leaves the
 * parameters as they were. */
EG_API eg_status eg_trainer_step(eg_trainer *trainer, eg_step_report *out_report);
/* Mean loss per trained token, document or example over `dataset`, without an update. */
EG_API eg_status eg_trainer_evaluate(eg_trainer *trainer, eg_dataset *dataset, double *out_loss);
/* Experts of each mixture in the model, and how many mixtures there are: those whose tokens are counted (not with
 * no_fuse). 0: none. */
EG_API size_t eg_trainer_expert_count(const eg_trainer *trainer, size_t *out_mixtures);
/* Tokens of the last step that went to each expert of a mixture, in the order of layers; padding does not count.
 * EG_ERROR_ARGUMENT: there is no such mixture, or it has another number of experts. */
EG_API eg_status eg_trainer_read_expert_tokens(const eg_trainer *trainer, size_t mixture, uint64_t *tokens,
                                               size_t n_experts);
/* Makes the running or next eg_trainer_step() return EG_ERROR_STOPPED. From any thread or signal handler. */
EG_API void eg_trainer_request_stop(eg_trainer *trainer);
/* Writes adapter_model.safetensors and adapter_config.json as PEFT does; `directory` is made when missing. With
 * `full`, EG_ERROR_ARGUMENT: see eg_trainer_save_model(). */
EG_API eg_status eg_trainer_save_adapter(const eg_trainer *trainer, const char *directory);
/* With `full`: the model with the trained weights as one ONNX file, in the weights' own dtypes. */
EG_API eg_status eg_trainer_save_model(const eg_trainer *trainer, const char *path);
/* Everything that the next steps depend on, in one safetensors file: parameters, both moments of the optimizer,
 * counters and the place in the data. A trainer made for the same model, data and options that loads it goes on bit by
 * bit as the first one would have; n_steps and n_epochs may differ. EG_ERROR_DATA names the setting or tensor that does
 * not fit, and leaves the trainer as it was; EG_ERROR_IO, _FORMAT, _MEMORY too. */
EG_API eg_status eg_trainer_save_state(const eg_trainer *trainer, const char *path);
EG_API eg_status eg_trainer_load_state(eg_trainer *trainer, const char *path);
/* Steps that the trainer, or the one whose state it loaded, has done. */
EG_API uint64_t eg_trainer_steps_done(const eg_trainer *trainer);

/* Trainable parameters, numbered from 0 in a fixed order; names and shapes as in the files that PEFT (adapters) or
 * Hugging Face (full) write. */
typedef struct eg_parameter_info {
  const char *name; /* valid as long as the trainer */
  uint32_t rank;    /* number of dimensions, at most 8 */
  int64_t dims[8];
} eg_parameter_info;
EG_API size_t eg_trainer_parameter_count(const eg_trainer *trainer);
EG_API eg_status eg_trainer_parameter_info(const eg_trainer *trainer, size_t index, eg_parameter_info *out_info);
/* Row-major float32, `n_values` must equal the product of the dims. Gradients are those of the last step: of the mean
 * loss, before clipping. */
EG_API eg_status eg_trainer_read_parameter(const eg_trainer *trainer, size_t index, float *values, size_t n_values);
EG_API eg_status eg_trainer_write_parameter(eg_trainer *trainer, size_t index, const float *values, size_t n_values);
EG_API eg_status eg_trainer_read_gradient(const eg_trainer *trainer, size_t index, float *values, size_t n_values);

/* ---- export ------------------------------------------------------------------------------------------------- */

typedef enum eg_export_format {
  EG_EXPORT_PEFT,         /* a folder that PEFT and what reads its files load */
  EG_EXPORT_MERGED,       /* the model with the adapter added to its weights, one ONNX file */
  EG_EXPORT_ONNX_ADAPTER, /* an .onnx_adapter file for onnxruntime, and the model with inputs that take it: each
                             module's PATH.lora_A.weight [in, r] and PATH.lora_B.weight [r, out], which have defaults */
  EG_EXPORT_GGUF,         /* an adapter for llama.cpp */
  EG_EXPORT_BNB           /* a folder that transformers reads with bitsandbytes: the matrices of linear layers, with the
                             adapter added, as Linear4bit holds them */
} eg_export_format;

typedef struct eg_export_options {
  size_t struct_size;
  eg_export_format format;
  eg_dtype dtype;  /* of the tensors: EG_DTYPE_F32, _F16, _BF16. EG_DTYPE_UNDEFINED: as in the adapter's file; of a
                      merged model F32. Merged in 16 bits, matrices are stored so and computed with in float32 */
  int is_portable; /* PEFT: plain LoRA of one rank with alpha = rank, for readers that know no more: the scale is folded
                      into B, smaller ranks are filled up with zeros, experts are modules of their own */
  const char *architecture; /* GGUF: llama.cpp's name of the base's architecture, or "model_type" of its config.json;
                               NULL: what the graph looks like. PEFT, portable: "mixtral" names experts its own way */
  eg_quant stored; /* MERGED: matrices are stored in 4 bits, blocks of 64, for com.microsoft's MatMulBnb4; but for
                      embeddings, norms and, unless quant_head asks for it, the head. BNB: the codes, NONE: NF4 */
  eg_quant base;   /* MERGED: the adapter is added to what the base was in training with this quant, quant_block and
                      double_quant, not to the file's own numbers; NONE: to these */
  uint32_t quant_block; /* of `base`, and of BNB */
  int double_quant;
  int quant_head;     /* of `stored` and `base`: 1: the output head too */
  const char *config; /* BNB: the model's config.json, to be written beside the weights with what was quantised; NULL:
                         none */
} eg_export_options;
#define EG_EXPORT_OPTIONS_INIT                                                                                      \
  {                                                                                                                 \
    sizeof(eg_export_options), EG_EXPORT_PEFT, EG_DTYPE_UNDEFINED, 0, NULL, EG_QUANT_NONE, EG_QUANT_NONE, 64, 1, 0, \
        NULL                                                                                                        \
  }

/* Checks the PEFT folder `adapter` (EG_EXPORT_BNB: NULL for the model alone) against the model and writes it in another
 * form. `path` is a folder for EG_EXPORT_PEFT and EG_EXPORT_BNB; for the others the file, or a folder when it has not
 * the format's ending (.onnx, .gguf, .onnx_adapter; the base of NAME.onnx_adapter is NAME.onnx, in a folder they are
 * adapter.onnx_adapter and model.onnx). EG_ERROR_DATA names missing, extra and misshapen tensors; EG_ERROR_UNSUPPORTED,
 * _IO, _MEMORY. */
EG_API eg_status eg_model_export_adapter(const eg_model *model, const char *adapter, const eg_export_options *options,
                                         const char *path);

/* ---- runner ------------------------------------------------------------------------------------------------- */

/* A tensor in the caller's memory: row-major, no gaps. */
typedef struct eg_tensor {
  const char *name; /* of the graph input or output */
  eg_dtype dtype;
  uint32_t rank;
  int64_t dims[8];
  const void *data;
} eg_tensor;

typedef struct eg_runner_options {
  size_t struct_size;
  const char *device;  /* "cpu", "cuda": as in eg_trainer_options */
  eg_dtype dtype;      /* of activations; EG_DTYPE_F32; EG_DTYPE_UNDEFINED: each type as in the file */
  const char *adapter; /* PEFT folder, NULL: none */
  int no_fuse;         /* 1: fused operators run as their bodies of plain operators */
  eg_quant quant;      /* as in eg_trainer_options; needs EG_DTYPE_F32 */
  uint32_t quant_block;
  int double_quant;
  int quant_head;
} eg_runner_options;
#define EG_RUNNER_OPTIONS_INIT \
  { sizeof(eg_runner_options), "cpu", EG_DTYPE_F32, NULL, 0, EG_QUANT_NONE, 64, 1, 0 }

EG_API eg_status eg_runner_create(eg_model *model, const eg_runner_options *options, eg_runner **out_runner);
EG_API void eg_runner_destroy(eg_runner *runner);
/* Runs the graph once. Inputs are matched by name; extra ones are ignored with a warning; a missing attention mask,
 * positions or cache input is made; any other missing input is EG_ERROR_ARGUMENT. Positions of one row that begin
 * again, without a mask, are those of documents that do not see each other. *out_outputs: array of *out_count tensors
 * in graph order, owned by the runner and valid until its next call. */
EG_API eg_status eg_runner_run(eg_runner *runner, const eg_tensor *inputs, size_t n_inputs,
                               const eg_tensor **out_outputs, size_t *out_count);

typedef struct eg_generate_options {
  size_t struct_size;
  uint32_t max_tokens;
  double temperature; /* 0: the most likely token */
  uint32_t top_k;     /* 0: off */
  double top_p;       /* 1: off */
  const int32_t *stop_ids;
  size_t n_stop_ids;
  uint64_t seed;
} eg_generate_options;
#define EG_GENERATE_OPTIONS_INIT \
  { sizeof(eg_generate_options), 128, 0.0, 0, 1.0, NULL, 0, 0 }

/* Called for each new token; returning anything but 0 ends the generation with EG_OK. */
typedef int (*eg_token_function)(void *userdata, int32_t token);
/* Continues `prompt_ids` [n_prompt], n_prompt >= 1, token by token. */
EG_API eg_status eg_runner_generate(eg_runner *runner, const int32_t *prompt_ids, size_t n_prompt,
                                    const eg_generate_options *options, eg_token_function on_token, void *userdata);

#ifdef __cplusplus
}
#endif
#endif
