/* Hugging Face decoders → ONNX graph: what huggingface_*.c share. A family is a row of huggingface_families.def; its
 * config.json becomes an egi_decoder_config, from which egi_decoder_build() makes the graph. */
#ifndef ENGRAFT_IO_HUGGINGFACE_H
#define ENGRAFT_IO_HUGGINGFACE_H

#include "io/io.h"

/* ---- families ------------------------------------------------------------------------------------------------- */

typedef enum egi_norm_kind {
  EGI_NORM_RMS,
  EGI_NORM_OFFSET, /* RMS with 1 + weight, computed in float32 */
  EGI_NORM_LAYER   /* with a bias */
} egi_norm_kind;

typedef enum egi_qkv_kind {
  EGI_QKV_SEPARATE,
  EGI_QKV_ROWS, /* one matrix, rows q | k | v */
  EGI_QKV_HEADS /* one matrix, rows of each head: q | k | v */
} egi_qkv_kind;

typedef enum egi_mlp_kind {
  EGI_MLP_GATED,
  EGI_MLP_ROWS, /* gated, one matrix with rows gate | up */
  EGI_MLP_PLAIN /* up, activation, down, with biases */
} egi_mlp_kind;

typedef enum egi_experts_kind {
  EGI_EXPERTS_NONE,
  EGI_EXPERTS_GATED,  /* softmax, then the best; a gated MLP each */
  EGI_EXPERTS_CLAMPED /* the best, then softmax; columns gate, up in turn, both clamped; biases (gpt-oss) */
} egi_experts_kind;

/* Which layers have the sliding window where config.json has no list of layer types. */
typedef enum egi_window_rule {
  EGI_WINDOW_NONE,     /* never, whatever the list says */
  EGI_WINDOW_ALL,      /* always, whatever the list says */
  EGI_WINDOW_PERIODIC, /* all but each n-th */
  EGI_WINDOW_LATE,     /* from "max_window_layers" on */
  EGI_WINDOW_UNROTATED /* those without rotary positions */
} egi_window_rule;

typedef enum egi_activation { EGI_ACT_SILU, EGI_ACT_GELU, EGI_ACT_GELU_TANH, EGI_ACT_RELU } egi_activation;

enum {
  EGI_FAMILY_QK_NORM = 1,
  EGI_FAMILY_QKV_BIAS = 2,       /* q, k and v have biases, the output has none */
  EGI_FAMILY_ATTENTION_BIAS = 4, /* default of "attention_bias" */
  EGI_FAMILY_TIED = 8,           /* default of "tie_word_embeddings" */
  EGI_FAMILY_SCALED = 16,        /* embeddings times sqrt(hidden) */
  EGI_FAMILY_IN_OUT = 32,        /* matrices are [in, out] in the file (Conv1D) */
  EGI_FAMILY_LEARNED = 64,       /* learned positions instead of rotary ones */
  EGI_FAMILY_PARALLEL = 128,     /* default of "use_parallel_residual" */
  EGI_FAMILY_SWITCHED = 256,     /* windows only with "use_sliding_window" */
  EGI_FAMILY_LOCAL_ROPE = 512,   /* layers with a window have rotary settings of their own */
  EGI_FAMILY_SINKS = 1024,       /* a learned score in each head's softmax that attends to nothing */
  EGI_FAMILY_SKIPS_ROPE = 2048,  /* some layers have no positions: "no_rope_layers" */
  EGI_FAMILY_YARN = 4096,        /* rotary settings default to YaRN */
  EGI_FAMILY_PARTIAL = 8192      /* a share of each head may be rotated */
};

/* Module names below the base model; NULL: there is no such module. */
typedef struct egi_module_names {
  const char *base, *layers, *embedding, *positions, *final_norm;
  const char *input_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;
  const char *attention, *q, *k, *v, *qkv, *output;
  const char *mlp, *gate, *up, *gate_up, *down, *activation;
} egi_module_names;

typedef struct egi_family {
  const char *model_type;
  const egi_module_names *names;
  egi_norm_kind norm;
  egi_qkv_kind qkv;
  egi_mlp_kind mlp;
  egi_experts_kind experts;
  egi_window_rule windows;
  int64_t period; /* of EGI_WINDOW_PERIODIC */
  unsigned flags;
  egi_activation activation;
  /* defaults; 0: hidden / heads, no window */
  int64_t head_dim, window;
  double epsilon, theta, rotary_share;
} egi_family;

/* huggingface_families.c: NULL when there is none. */
const egi_family *egi_family_find(const char *model_type);

/* ---- config.json ---------------------------------------------------------------------------------------------- */

typedef enum egi_rope_kind {
  EGI_ROPE_DEFAULT,
  EGI_ROPE_LINEAR,
  EGI_ROPE_DYNAMIC,
  EGI_ROPE_LLAMA3,
  EGI_ROPE_YARN,
  EGI_ROPE_LONG
} egi_rope_kind;

typedef struct egi_rope_config {
  egi_rope_kind kind;
  double theta, rotary_share;
  double factor; /* 0: not given */
  double low_frequency_factor, high_frequency_factor;
  double positions, original_positions;
  double beta_fast, beta_slow, scale_numerator, scale_denominator; /* YaRN; mscale and mscale_all_dim, 0: not given */
  bool is_truncated;
  double attention_factor; /* of cosines and sines; 0 until known */
  int64_t rotary_dim;
  const double *short_factors, *long_factors; /* LONG: [rotary_dim / 2] */
} egi_rope_config;

typedef struct egi_decoder_layer {
  int64_t window; /* keys that a query sees, its own included; 0: all */
  int rope;       /* index in ropes; -1: no rotary positions */
  bool has_experts;
} egi_decoder_layer;

typedef struct egi_decoder_config {
  const egi_family *family;
  int64_t hidden, intermediate, n_layers, n_heads, n_kv_heads, head_dim, vocabulary, n_positions;
  int64_t n_experts, n_active, expert_intermediate;
  double epsilon, initializer_range;
  double attention_scale, attention_softcap, logit_softcap; /* softcap 0: none */
  double expert_alpha, expert_limit;
  egi_activation activation;
  bool is_tied, has_qkv_bias, has_output_bias, has_mlp_bias, is_parallel, divides_scale_by_layer, normalizes_routing;
  egi_rope_config ropes[2]; /* [1]: of layers with a window, where they have their own */
  egi_decoder_layer *layers;
} egi_decoder_config;

/* huggingface_config.c. Lists lie in the arena. */
eg_status egi_decoder_read_config(const egi_json *json, egi_arena *arena, egi_decoder_config *out_config);
/* huggingface_layers.c: window, positions and experts of each layer. */
eg_status egi_decoder_read_layers(const egi_json *json, egi_arena *arena, egi_decoder_config *config);
/* The first of the keys (NULL at the end) that is there and not null, or NULL. */
const char *egi_json_present(const egi_json *json, const char *const *keys);

/* huggingface_rope.c: rope_parameters (Transformers 5) or rope_theta and rope_scaling (4). */
eg_status egi_rope_read(const egi_json *json, egi_arena *arena, egi_decoder_config *config);
/* Angles per position, [rotary_dim / 2]; is_long: for sequences beyond original_positions. */
void egi_rope_frequencies(const egi_rope_config *rope, bool is_long, float *out_frequencies);

/* ---- the graph ------------------------------------------------------------------------------------------------ */

typedef struct egi_decoder_builder {
  egi_graph *graph;
  const egi_decoder_config *config;
  const egi_new_options *options;
  eg_dtype dtype; /* of activations */
  egi_emitter emit;
  const char *path; /* of the module whose children are entered: "", "model", "model.layers.0" */
  int64_t layer;
  egi_value_id mask;       /* bool [batch, 1, sequence, sequence], true: a token, not padding */
  egi_value_id visible[2]; /* with the causal limit, and with the window too: bool [batch, 1, sequence, sequence] */
  egi_value_id cosine[2], sine[2]; /* of each rope, [batch, sequence, rotary_dim / 2] */
  egi_value_id embedding;
} egi_decoder_builder;

/* huggingface_parameters.c. The module of the nodes that follow: <path>.<module>.<child>, NULL: left out. */
void egi_decoder_enter(egi_decoder_builder *b, const char *module, const char *child);
bool egi_decoder_has_tensor(egi_decoder_builder *b, const char *part);
/* The bytes of a tensor, where they lie in its file. */
eg_status egi_decoder_refer(egi_decoder_builder *b, const egi_weight_location *found, egi_bytes *out_bytes);
/* "<module>.<part>" from the files, or random; the value has the type of the activations. */
egi_value_id egi_decoder_matrix(egi_decoder_builder *b, const char *part, int rank, const int64_t *dims);
egi_value_id egi_decoder_vector(egi_decoder_builder *b, const char *part, int64_t length, double fill);
/* A module <module>.<name>: x·Wᵀ + bias, with the bias where there is one. */
typedef struct egi_linear_shape {
  int64_t in, out;
  bool has_bias;
} egi_linear_shape;
/* huggingface_coded.c: the same where the files hold the entered module's weight as codes of bitsandbytes; 0: they do
 * not. */
egi_value_id egi_decoder_coded_linear(egi_decoder_builder *b, egi_value_id x, egi_linear_shape shape);
/* A stack [E, in, out] from MXFP4 codes [E, out, in] (dims); 0: the files have none. */
egi_value_id egi_decoder_coded_stack(egi_decoder_builder *b, const char *part, const int64_t dims[3]);
egi_value_id egi_decoder_linear(egi_decoder_builder *b, const char *module, const char *name, egi_value_id x,
                                egi_linear_shape shape);
egi_value_id egi_decoder_norm(egi_decoder_builder *b, const char *module, const char *name, egi_value_id x,
                              int64_t length);
egi_value_id egi_decoder_activate(egi_decoder_builder *b, egi_activation activation, egi_value_id x);
/* Common shapes of nodes. */
egi_value_id egi_decoder_unsqueeze(egi_decoder_builder *b, egi_value_id x, int64_t axis);
egi_value_id egi_decoder_transpose(egi_decoder_builder *b, egi_value_id x, const int64_t *order, uint32_t rank);
egi_value_id egi_decoder_reshape(egi_decoder_builder *b, egi_value_id x, const int64_t *shape, uint32_t rank);
egi_value_id egi_decoder_slice(egi_decoder_builder *b, egi_value_id x,
                               const int64_t bounds[3]); /* last axis: start, end, step */
void egi_decoder_split(egi_decoder_builder *b, egi_value_id x, const int64_t *sizes, unsigned count,
                       egi_value_id *out_pieces); /* along the last axis */

/* huggingface_positions.c: mask and tables that all layers share. */
void egi_decoder_add_mask(egi_decoder_builder *b, egi_value_id attention_mask);
void egi_decoder_add_rotations(egi_decoder_builder *b, egi_value_id positions);
/* huggingface_attention.c, huggingface_mlp.c, huggingface_experts.c: x [batch, sequence, hidden] → the same. */
egi_value_id egi_decoder_attention(egi_decoder_builder *b, egi_value_id x);
egi_value_id egi_decoder_mlp(egi_decoder_builder *b, egi_value_id x);
egi_value_id egi_decoder_experts(egi_decoder_builder *b, egi_value_id x);
/* huggingface_decoder.c: fills an empty module. */
eg_status egi_decoder_build(egi_module *module, const egi_decoder_config *config, const egi_new_options *options);

#endif
