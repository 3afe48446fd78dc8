/* The table of decoder families and of their module names. */
#include "io/huggingface.h"

#include <string.h>

static const egi_module_names names_llama = {
    .base = "model",
    .layers = "layers",
    .embedding = "embed_tokens",
    .final_norm = "norm",
    .input_norm = "input_layernorm",
    .mlp_norm = "post_attention_layernorm",
    .attention = "self_attn",
    .q = "q_proj",
    .k = "k_proj",
    .v = "v_proj",
    .output = "o_proj",
    .mlp = "mlp",
    .gate = "gate_proj",
    .up = "up_proj",
    .down = "down_proj",
    .activation = "act_fn",
};

static const egi_module_names names_gemma = {
    .base = "model",
    .layers = "layers",
    .embedding = "embed_tokens",
    .final_norm = "norm",
    .input_norm = "input_layernorm",
    .after_attention_norm = "post_attention_layernorm",
    .mlp_norm = "pre_feedforward_layernorm",
    .after_mlp_norm = "post_feedforward_layernorm",
    .attention = "self_attn",
    .q = "q_proj",
    .k = "k_proj",
    .v = "v_proj",
    .output = "o_proj",
    .mlp = "mlp",
    .gate = "gate_proj",
    .up = "up_proj",
    .down = "down_proj",
    .activation = "act_fn",
};

static const egi_module_names names_phi3 = {
    .base = "model",
    .layers = "layers",
    .embedding = "embed_tokens",
    .final_norm = "norm",
    .input_norm = "input_layernorm",
    .mlp_norm = "post_attention_layernorm",
    .attention = "self_attn",
    .qkv = "qkv_proj",
    .output = "o_proj",
    .mlp = "mlp",
    .gate_up = "gate_up_proj",
    .down = "down_proj",
    .activation = "activation_fn",
};

static const egi_module_names names_gpt2 = {
    .base = "transformer",
    .layers = "h",
    .embedding = "wte",
    .positions = "wpe",
    .final_norm = "ln_f",
    .input_norm = "ln_1",
    .mlp_norm = "ln_2",
    .attention = "attn",
    .qkv = "c_attn",
    .output = "c_proj",
    .mlp = "mlp",
    .up = "c_fc",
    .down = "c_proj",
    .activation = "act",
};

static const egi_module_names names_gpt_neox = {
    .base = "gpt_neox",
    .layers = "layers",
    .embedding = "embed_in",
    .final_norm = "final_layer_norm",
    .input_norm = "input_layernorm",
    .mlp_norm = "post_attention_layernorm",
    .attention = "attention",
    .qkv = "query_key_value",
    .output = "dense",
    .mlp = "mlp",
    .up = "dense_h_to_4h",
    .down = "dense_4h_to_h",
    .activation = "act",
};

/* Short names of the flags, as the table writes them. */
enum {
  QK_NORM = EGI_FAMILY_QK_NORM,
  QKV_BIAS = EGI_FAMILY_QKV_BIAS,
  ATTENTION_BIAS = EGI_FAMILY_ATTENTION_BIAS,
  TIED = EGI_FAMILY_TIED,
  SCALED = EGI_FAMILY_SCALED,
  IN_OUT = EGI_FAMILY_IN_OUT,
  LEARNED = EGI_FAMILY_LEARNED,
  PARALLEL = EGI_FAMILY_PARALLEL,
  SWITCHED = EGI_FAMILY_SWITCHED,
  LOCAL_ROPE = EGI_FAMILY_LOCAL_ROPE,
  SINKS = EGI_FAMILY_SINKS,
  SKIPS_ROPE = EGI_FAMILY_SKIPS_ROPE,
  YARN = EGI_FAMILY_YARN,
  PARTIAL = EGI_FAMILY_PARTIAL
};

static const egi_family families[] = {
#define EGI_FAMILY(type, names, norm, qkv, mlp, experts, windows, period, flags, activation, head_dim, window, \
                   epsilon, theta, share)                                                                      \
  {#type,                                                                                                      \
   &names_##names,                                                                                             \
   EGI_NORM_##norm,                                                                                            \
   EGI_QKV_##qkv,                                                                                              \
   EGI_MLP_##mlp,                                                                                              \
   EGI_EXPERTS_##experts,                                                                                      \
   EGI_WINDOW_##windows,                                                                                       \
   period,                                                                                                     \
   flags,                                                                                                      \
   EGI_ACT_##activation,                                                                                       \
   head_dim,                                                                                                   \
   window,                                                                                                     \
   epsilon,                                                                                                    \
   theta,                                                                                                      \
   share},
#include "io/huggingface_families.def"
#undef EGI_FAMILY
};

const egi_family *egi_family_find(const char *model_type) {
  for (size_t i = 0; i < EGI_COUNT(families); i++)
    if (strcmp(families[i].model_type, model_type) == 0) return &families[i];
  return NULL;
}
