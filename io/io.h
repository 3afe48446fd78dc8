/* Files other than ONNX: safetensors, PEFT adapters, datasets, JSON helpers. */
#ifndef ENGRAFT_IO_IO_H
#define ENGRAFT_IO_IO_H

#include "base/base.h"
#include "graph/graph.h"

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

struct json_t; /* jansson's */

/* A JSON object from text or a file; duplicate keys are refused, errors name `what` (the file), line and column. The
 * caller releases it with json_decref(). */
eg_status egi_json_parse(eg_context *ctx, const char *what, const char *text, size_t length, struct json_t **out_root);
eg_status egi_json_read(eg_context *ctx, const char *path, struct json_t **out_root);

/* Members of an object of file `what`; absent and null leave *out as it is. A wrong type or a number outside
 * [minimum, maximum] is EG_ERROR_FORMAT naming file and key. Strings live as long as the object. */
typedef struct egi_json {
  eg_context *ctx;
  const char *what;
  struct json_t *object;
} egi_json;
eg_status egi_json_integer(const egi_json *json, const char *key, int64_t minimum, int64_t maximum, int64_t *out);
eg_status egi_json_number(const egi_json *json, const char *key, double *out); /* finite */
eg_status egi_json_boolean(const egi_json *json, const char *key, bool *out);
eg_status egi_json_string(const egi_json *json, const char *key, const char **out);

/* ---- safetensors ---------------------------------------------------------------------------------------------- */

/* An opened file: names and views of the mapped bytes, checked (sizes, overlaps, order, known dtypes). */
typedef struct egi_safetensors egi_safetensors;
typedef struct egi_safetensor {
  const char *name;
  eg_dtype dtype;
  int rank;
  int64_t dims[EGI_MAX_RANK];
  const uint8_t *data; /* may be unaligned */
  uint64_t size_bytes;
} egi_safetensor;
eg_status egi_safetensors_open(eg_context *ctx, const char *path, egi_safetensors **out_file);
void egi_safetensors_close(egi_safetensors *file);
size_t egi_safetensors_count(const egi_safetensors *file);
const egi_safetensor *egi_safetensors_at(const egi_safetensors *file, size_t index); /* sorted by name */
const egi_safetensor *egi_safetensors_find(const egi_safetensors *file, const char *name);
/* Where a tensor of the file begins in it. */
uint64_t egi_safetensors_offset(const egi_safetensors *file, const egi_safetensor *tensor);
/* Written sorted by name, through a temporary file; header padded to 8 bytes; metadata {"format":"pt"}. */
eg_status egi_safetensors_write(eg_context *ctx, const char *path, const egi_safetensor *tensors, size_t count);

/* ---- PEFT ----------------------------------------------------------------------------------------------------- */

/* One entry of rank_pattern or alpha_pattern: modules whose path, or its end after a dot, the regular expression `key`
 * matches. */
typedef struct egi_peft_pattern {
  const char *key;
  double value;
  egi_pattern *expression;
} egi_peft_pattern;
/* Makes `expression` of `key`. */
eg_status egi_peft_pattern_compile(egi_arena *arena, egi_peft_pattern *pattern);

/* qat_record.c: what an adapter was trained for the codes of. */
typedef struct egi_qat_record {
  const char *weights; /* "int4", "int8", "nf4"; NULL: nothing was rounded */
  int64_t block;       /* 0: whole rows */
  bool is_symmetric;
} egi_qat_record;
/* `weights` NULL where there is no such file; text in the arena. */
eg_status egi_qat_record_read(egi_arena *arena, const char *directory, egi_qat_record *out_record);
eg_status egi_qat_record_write(egi_arena *arena, const char *directory, const egi_qat_record *record);

/* What adapter_config.json says, as far as engraft can honour it; anything it cannot (DoRA, bias …) is an error that
 * names the key. */
typedef struct egi_peft_config {
  uint32_t rank;
  double alpha;
  double dropout;
  bool use_rslora;
  const char *targets; /* target_modules joined by commas, or "all-linear"; NULL: those that the tensors name (a regular
                          expression, or narrowed by layers_to_transform or exclude_modules) */
  const char *parameters; /* target_parameters joined by commas; NULL: none */
  const char *modules;    /* modules_to_save joined by commas; NULL: none */
  const char *task;       /* task_type; NULL: none */
  const char *base_model;
  const egi_peft_pattern *ranks, *alphas;
  size_t n_ranks, n_alphas;
  egi_qat_record qat; /* in a file beside it */
} egi_peft_config;
/* Moves strings and patterns into another arena, which must stay where it is. */
eg_status egi_peft_config_copy(egi_arena *arena, egi_peft_config *config);
/* Rank and scale (alpha / rank, or alpha / sqrt(rank) with rsLoRA) of one module. */
uint32_t egi_peft_rank(const egi_peft_config *config, const char *path);
double egi_peft_scale(const egi_peft_config *config, const char *path);

typedef struct egi_peft {
  egi_arena arena;
  egi_peft_config config;
  egi_safetensors *tensors;
} egi_peft;
eg_status egi_peft_open(eg_context *ctx, const char *directory, egi_peft **out_peft);
void egi_peft_close(egi_peft *peft);
eg_status egi_peft_write(eg_context *ctx, const char *directory, const egi_peft_config *config,
                         const egi_safetensor *tensors, size_t count);

/* ---- onnxruntime's adapters ----------------------------------------------------------------------------------- */

/* Parameters of a graph's inputs by name, for onnxruntime's LoraAdapter; at most 2 GiB. */
eg_status egi_onnx_adapter_write(eg_context *ctx, const char *path, const egi_safetensor *tensors, size_t count);

/* ---- GGUF ----------------------------------------------------------------------------------------------------- */

/* A LoRA adapter for llama.cpp. */
typedef struct egi_gguf_adapter {
  const char *architecture; /* general.architecture of the base */
  double alpha;
  egi_safetensor *tensors; /* f32, f16 or bf16 */
  size_t count;
} egi_gguf_adapter;
eg_status egi_gguf_write_adapter(eg_context *ctx, const char *path, const egi_gguf_adapter *adapter);

/* ---- datasets ------------------------------------------------------------------------------------------------- */

/* What documents are trained on. */
typedef enum egi_documents_kind {
  EGI_DOCUMENTS_TOKENS,  /* labels of their tokens */
  EGI_DOCUMENTS_CLASS,   /* a whole number for each document */
  EGI_DOCUMENTS_NUMBERS, /* one or more numbers for each document */
  EGI_DOCUMENTS_MATCHES, /* examples of an anchor, a document like it, and any number of documents that are not */
  EGI_DOCUMENTS_SCORES   /* examples of two documents and a number that says how alike they are */
} egi_documents_kind;

/* Documents back to back. labels[i] is the label of token i (not shifted), -100 = none. Derived labels leave out the
 * first token of each document, which nothing predicts. */
typedef struct egi_documents {
  egi_arena arena;
  const char *path; /* for messages */
  egi_documents_kind kind;
  int32_t *tokens, *labels;
  int32_t *token_types; /* NULL: all 0 */
  uint64_t *offsets;    /* [n_documents + 1] */
  float *numbers;       /* [n_documents, n_numbers]; an example's stand at its first document */
  uint32_t n_numbers;
  bool *is_first;                 /* [n_documents]: begins an example; NULL: each does */
  size_t n_documents, n_labelled; /* n_labelled: with labels of their own, not derived from tokens */
  uint64_t n_tokens, n_targets;   /* n_targets: labels but those of first tokens */
  size_t n_cut;                   /* documents shortened to `cut_length` tokens while they were read */
  uint32_t cut_length;
} egi_documents;
eg_status egi_documents_read_jsonl(eg_context *ctx, const char *path, uint32_t sequence, egi_documents **out_documents);
/* tokens i32 [N], document_offsets i64 [D + 1], loss_mask u8 [N] (optional; 1 = this token is a target). */
eg_status egi_documents_read_safetensors(eg_context *ctx, const char *path, uint32_t sequence,
                                         egi_documents **out_documents);
/* Bytes are tokens; documents of `sequence` tokens, 0: 256. */
eg_status egi_documents_read_text(eg_context *ctx, const char *path, uint32_t sequence, egi_documents **out_documents);
eg_status egi_documents_copy(eg_context *ctx, const eg_document *documents, size_t count,
                             egi_documents **out_documents);
eg_status egi_documents_copy_examples(eg_context *ctx, const eg_example *examples, size_t count,
                                      egi_documents **out_documents);
void egi_documents_free(egi_documents *documents);
/* For readers: room for what is counted, to be filled in order; after the tokens and labels of each document (written
 * at offsets[n_documents]) egi_documents_end_document() counts it. */
typedef struct egi_documents_room {
  size_t n_documents;
  uint64_t n_tokens;
  egi_documents_kind kind;
  uint32_t n_numbers;
  bool has_types;
} egi_documents_room;
eg_status egi_documents_begin(eg_context *ctx, const char *path, const egi_documents_room *room,
                              egi_documents **out_documents);
void egi_documents_end_document(egi_documents *documents, uint64_t n_tokens);
/* Labels that are the tokens themselves, from token `first` on, and at least the second. */
void egi_documents_derive_labels(egi_documents *documents, uint64_t n_tokens, uint64_t first);

/* ---- 4-bit layers of bitsandbytes ------------------------------------------------------------------------------- */

/* The tensors of a Linear4bit as its state dict names them, "<module>.weight" and what follows a dot behind it. */
typedef enum egi_bnb_tensor {
  EGI_BNB_CODES,      /* u8: "" */
  EGI_BNB_ABSMAX,     /* f32 [blocks], u8 where nested: "absmax" */
  EGI_BNB_MAP,        /* f32 [16]: "quant_map" */
  EGI_BNB_NESTED,     /* f32: "nested_absmax"; absent where scales are floats */
  EGI_BNB_NESTED_MAP, /* f32 [256]: "nested_quant_map" */
  EGI_BNB_STATE,      /* u8, JSON: "quant_state.bitsandbytes__nf4" or __fp4 */
  EGI_BNB_TENSORS
} egi_bnb_tensor;

/* What the JSON says. */
typedef struct egi_bnb_state {
  unsigned type; /* egi_four_bit of base/blockwise.h */
  int64_t block, out_features, in_features;
  const char *dtype; /* of the matrix that was quantised: "bfloat16" */
  bool is_nested;
  double offset; /* of nested scales */
} egi_bnb_state;

/* Finds a tensor, or leaves *out_tensor NULL. */
typedef eg_status (*egi_bnb_find)(void *userdata, const char *name, const egi_safetensor **out_tensor);
typedef struct egi_bnb_source {
  egi_bnb_find find;
  void *userdata;
  const char *what; /* the file, for messages */
} egi_bnb_source;

/* The tensors of a module's weight, named "<module>.weight", checked against each other. *out_is_there false: it is no
 * quantised one. EG_ERROR_FORMAT names the tensor that is missing or does not fit; EG_ERROR_UNSUPPORTED another map. */
eg_status egi_bnb_read(egi_arena *arena, const egi_bnb_source *source, const char *name, egi_bnb_state *out_state,
                       egi_safetensor out_tensors[EGI_BNB_TENSORS], bool *out_is_there);
/* Offset, map and scales of nested scales as egi_nested_decode() takes them, [egi_nested_count(blocks)]. */
eg_status egi_bnb_nested(egi_arena *arena, const egi_bnb_state *state, const egi_safetensor *tensors,
                         float **out_nested);
/* Sets names of the tensors, and the state's with its JSON; the others' dtype, dims and data are the caller's. Returns
 * how many there are in *out_count: those of nested scales are left out where there are none. */
eg_status egi_bnb_write(egi_arena *arena, const char *name, const egi_bnb_state *state,
                        egi_safetensor tensors[EGI_BNB_TENSORS], size_t *out_count);

/* ---- Hugging Face models -------------------------------------------------------------------------------------- */

/* The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names. */
typedef struct egi_weight_files egi_weight_files;
typedef struct egi_weight_location {
  const egi_safetensor *tensor;
  const char *path; /* of the file: DIRECTORY/NAME */
  uint64_t offset;  /* of the tensor's bytes in it */
} egi_weight_location;
eg_status egi_weight_files_open(eg_context *ctx, const char *directory, egi_weight_files **out_files);
void egi_weight_files_close(egi_weight_files *files);
const char *egi_weight_files_directory(const egi_weight_files *files);
/* By its name in the model for language modelling; a file of the base model alone, or of a model with a vision part
 * around it, has other prefixes. `tensor` is NULL when it is not there; one that is found counts as used. */
eg_status egi_weight_files_find(egi_weight_files *files, const char *name, egi_weight_location *out_location);
/* A warning when the files hold parameters that nobody asked for. */
void egi_weight_files_report_unused(const egi_weight_files *files, bool is_tied);

typedef struct egi_new_options {
  eg_dtype dtype;            /* F32, F16, BF16: of weights and activations; UNDEFINED: that of the files */
  uint64_t seed;             /* of the random weights */
  egi_weight_files *weights; /* NULL: random; must outlive the module */
} egi_new_options;

/* The graph of the model that a config.json describes, opset 23 and later, with random weights or those of the files.
 * An architecture or setting that is not modelled is EG_ERROR_UNSUPPORTED naming it. */
eg_status egi_huggingface_new(eg_context *ctx, const char *config_path, const egi_new_options *options,
                              egi_module **out_module);

#endif
