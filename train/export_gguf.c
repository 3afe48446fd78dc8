/* An adapter as llama.cpp reads it: tensors BLOCK.lora_a [r, in] and .lora_b [out, r] under ggml's names, in the layout
 * that convert_hf_to_gguf.py gives the base (rows of q and k of the llama architecture are interleaved; fused heads of
 * GPT-NeoX are taken apart). llama.cpp scales by adapter.lora.alpha / r. */
#include "train/train.h"

#include <math.h>
#include <string.h>

typedef struct name_row {
  const char *module, *tensor;
} name_row;

/* Behind the number of the layer. */
static const name_row layer_names[] = {{"self_attn.q_proj", "attn_q"},
                                       {"self_attn.k_proj", "attn_k"},
                                       {"self_attn.v_proj", "attn_v"},
                                       {"self_attn.o_proj", "attn_output"},
                                       {"self_attn.qkv_proj", "attn_qkv"},
                                       {"self_attn.dense", "attn_output"},
                                       {"self_attn.out_proj", "attn_output"},
                                       {"attn.c_attn", "attn_qkv"},
                                       {"attn.c_proj", "attn_output"},
                                       {"attention.query_key_value", "attn_qkv"},
                                       {"attention.dense", "attn_output"},
                                       {"mlp.gate_proj", "ffn_gate"},
                                       {"mlp.up_proj", "ffn_up"},
                                       {"mlp.down_proj", "ffn_down"},
                                       {"mlp.gate_up_proj", "ffn_up"},
                                       {"mlp.c_fc", "ffn_up"},
                                       {"mlp.c_proj", "ffn_down"},
                                       {"mlp.fc1", "ffn_up"},
                                       {"mlp.fc2", "ffn_down"},
                                       {"mlp.dense_h_to_4h", "ffn_up"},
                                       {"mlp.dense_4h_to_h", "ffn_down"},
                                       {"mlp.gate", "ffn_gate_inp"},
                                       {"mlp.router", "ffn_gate_inp"},
                                       {"block_sparse_moe.gate", "ffn_gate_inp"}};

/* Behind the number of the layer, for all experts in one tensor. */
static const char *const expert_tensors[] = {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"};

typedef struct model_row {
  const char *model_type, *architecture;
} model_row;

/* Names of config.json that differ from llama.cpp's. */
static const model_row model_rows[] = {{"mistral", "llama"},      {"mixtral", "llama"},   {"qwen3_moe", "qwen3moe"},
                                       {"qwen2_moe", "qwen2moe"}, {"gpt_oss", "gpt-oss"}, {"gpt_neox", "gptneox"},
                                       {"gemma3_text", "gemma3"}, {"phi", "phi2"}};

/* The model as training sees it: its structure shows whole there. */
typedef struct recognised {
  egi_machine machine;
  egi_arena arena;
  egi_linear *linears;
  size_t n_linears;
} recognised;

/* ---- architecture ---- */

static bool has_module(const egi_linear *linears, size_t n, const char *text) {
  for (size_t i = 0; i < n; i++)
    if (linears[i].path != NULL && strstr(linears[i].path, text) != NULL) return true;
  return false;
}

/* Whether the layer of that name has a bias of its own. */
static bool has_bias(const egi_graph *graph, const egi_linear *linears, size_t n, const char *suffix) {
  for (size_t i = 0; i < n; i++) {
    const egi_node *node = &graph->nodes[linears[i].node];
    if (linears[i].path == NULL || !egi_has_suffix(linears[i].path, suffix)) continue;
    return (node->op == EGI_OP_Linear || node->op == EGI_OP_Gemm) && node->n_inputs > 2 && node->inputs[2] != 0;
  }
  return false;
}

/* What tells the families apart that share module names; a model that only its config.json could tell from one of them
 * needs that. */
static const char *guess(const recognised *model, const egi_structure *s) {
  const egi_linear *linears = model->linears;
  size_t n = model->n_linears;
  int64_t n_norms = s->layers > 0 ? (s->counts.norm - 1) / s->layers : 0;
  if (has_module(linears, n, ".attn.c_attn")) return "gpt2";
  if (has_module(linears, n, ".attention.query_key_value")) return "gptneox";
  if (has_module(linears, n, ".self_attn.qkv_proj")) return "phi3";
  if (s->experts > 0) return s->has_sinks ? "gpt-oss" : s->has_qk_norm ? "qwen3moe" : "llama";
  if (n_norms >= 4 && s->softcap > 0.0) return "gemma2";
  if (n_norms >= 6) return "gemma3";
  if (s->has_qk_norm) return "qwen3";
  bool is_qwen2 =
      has_bias(model->machine.graph, linears, n, "q_proj") && !has_bias(model->machine.graph, linears, n, "o_proj");
  return is_qwen2 ? "qwen2" : "llama";
}

static const char *find_architecture(const egi_export *export_, const recognised *model,
                                     const egi_structure *structure) {
  const char *wanted = export_->options->architecture;
  if (wanted == NULL) return guess(model, structure);
  for (size_t i = 0; i < EGI_COUNT(model_rows); i++)
    if (strcmp(model_rows[i].model_type, wanted) == 0) return model_rows[i].architecture;
  return wanted;
}

/* ---- names ---- */

/* "model.layers.3.mlp.up_proj" -> 3 and "mlp.up_proj"; false when no part of the path is a number. */
static bool split_path(const char *path, const char **out_number, const char **out_module) {
  for (const char *dot = strchr(path, '.'); dot != NULL; dot = strchr(dot + 1, '.')) {
    size_t n_digits = strspn(dot + 1, "0123456789");
    if (n_digits == 0 || dot[1 + n_digits] != '.') continue;
    *out_number = dot + 1;
    *out_module = dot + 2 + n_digits;
    return true;
  }
  return false;
}

static eg_status name_tensor(egi_export *export_, const char *path, bool is_tied, const char **out_name) {
  const char *number, *module;
  *out_name = NULL;
  if (strcmp(path, "lm_head") == 0 || strcmp(path, "embed_out") == 0) {
    if (is_tied)
      return egi_fail(export_->ctx, EG_ERROR_UNSUPPORTED,
                      "%s shares the embedding's matrix: llama.cpp has no tensor for its adapter", path);
    *out_name = "output.weight";
    return EG_OK;
  }
  if (split_path(path, &number, &module)) {
    for (size_t i = 0; i < EGI_COUNT(layer_names) && *out_name == NULL; i++)
      if (strcmp(layer_names[i].module, module) == 0)
        *out_name = egi_arena_format(&export_->arena, "blk.%.*s.%s.weight", (int)(module - number - 1), number,
                                     layer_names[i].tensor);
    if (*out_name != NULL) return EG_OK;
  }
  return egi_fail(export_->ctx, EG_ERROR_UNSUPPORTED, "llama.cpp has no tensor that an adapter of %s belongs to", path);
}

/* ---- layout ---- */

/* Rows of B [n, r] grouped as [groups, a, b] become [groups, b, a]. */
static eg_status swap_rows(egi_arena *arena, egi_lora *lora, int64_t groups, int64_t a) {
  int64_t b = groups > 0 && a > 0 ? lora->out_features / groups / a : 0, r = lora->rank;
  if (b < 1 || groups * a * b != lora->out_features)
    return egi_fail(arena->ctx, EG_ERROR_SHAPE, "%s: %lld rows are not %lld heads", lora->path,
                    (long long)lora->out_features, (long long)groups);
  float *rows = EGI_NEW(arena, float, (size_t)(lora->out_features * r));
  if (rows == NULL) return EG_ERROR_MEMORY;
  for (int64_t g = 0; g < groups; g++)
    for (int64_t i = 0; i < a; i++)
      for (int64_t k = 0; k < b; k++)
        memcpy(rows + ((g * b + k) * a + i) * r, lora->b + ((g * a + i) * b + k) * r, (size_t)r * sizeof *rows);
  lora->b = rows;
  return EG_OK;
}

/* [heads, 3, head_dim] -> [3, heads, head_dim] */
static eg_status part_heads(egi_arena *arena, egi_lora *lora, int64_t heads) {
  int64_t size = heads > 0 ? lora->out_features / heads / 3 : 0, r = lora->rank;
  if (size < 1 || heads * size * 3 != lora->out_features)
    return egi_fail(arena->ctx, EG_ERROR_SHAPE, "%s: %lld rows are not those of %lld heads", lora->path,
                    (long long)lora->out_features, (long long)heads);
  float *rows = EGI_NEW(arena, float, (size_t)(lora->out_features * r));
  if (rows == NULL) return EG_ERROR_MEMORY;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t p = 0; p < 3; p++)
      memcpy(rows + (p * heads + h) * size * r, lora->b + (h * 3 + p) * size * r, (size_t)(size * r) * sizeof *rows);
  lora->b = rows;
  return EG_OK;
}

static eg_status arrange(egi_arena *arena, const char *architecture, const egi_structure *s, egi_lora *lora) {
  bool is_llama = strcmp(architecture, "llama") == 0 || strcmp(architecture, "smollm3") == 0;
  if (is_llama && egi_has_suffix(lora->path, ".q_proj")) return swap_rows(arena, lora, s->heads, 2);
  if (is_llama && egi_has_suffix(lora->path, ".k_proj")) return swap_rows(arena, lora, s->kv_heads, 2);
  if (strcmp(architecture, "gptneox") == 0 && egi_has_suffix(lora->path, ".query_key_value"))
    return part_heads(arena, lora, s->heads);
  return EG_OK;
}

/* ---- scale ---- */

/* alpha / r is all the scale there is in llama.cpp. Where PEFT's scales are other ones, what is left goes into B. */
static double choose_alpha(const egi_adapters *adapters) {
  double largest = 1.0;
  bool is_plain = true;
  for (size_t i = 0; i < adapters->count; i++) {
    double rank = adapters->targets[i].rank, scale = adapters->config.alpha / rank;
    is_plain = is_plain && fabs(adapters->targets[i].scale - scale) <= 1e-12 * fabs(scale);
    largest = rank > largest ? rank : largest;
  }
  return is_plain ? adapters->config.alpha : largest;
}

/* A tensor of A and one of B, the slowest of their dims the experts' where there are any. */
static eg_status add_tensors(egi_export *export_, const egi_gguf_adapter *adapter, const char *name, int64_t n_experts,
                             const egi_lora *lora, size_t *count) {
  eg_dtype dtype = export_->options->dtype != EG_DTYPE_UNDEFINED ? export_->options->dtype : EG_DTYPE_F32;
  const int64_t dims[2][2] = {{lora->rank, lora->in_features}, {lora->out_features, lora->rank}};
  for (int i = 0; i < 2; i++) {
    egi_safetensor *tensor = &adapter->tensors[(*count)++];
    uint64_t n = (uint64_t)(dims[i][0] * dims[i][1]) * (uint64_t)(n_experts > 0 ? n_experts : 1);
    *tensor = (egi_safetensor){.dtype = dtype, .rank = 2, .dims = {dims[i][0], dims[i][1]}};
    if (n_experts > 0) {
      tensor->rank = 3;
      memcpy(tensor->dims, (const int64_t[3]){n_experts, dims[i][0], dims[i][1]}, 3 * sizeof *tensor->dims);
    }
    tensor->name = egi_arena_format(&export_->arena, "%s.lora_%c", name, i == 0 ? 'a' : 'b');
    if (tensor->name == NULL) return EG_ERROR_MEMORY;
    EG_TRY(
        egi_convert_floats(&export_->arena, i == 0 ? lora->a : lora->b, n, dtype, &tensor->data, &tensor->size_bytes));
  }
  return EG_OK;
}

/* Gate and up, which llama.cpp holds apart, or down. */
static eg_status add_experts(egi_export *export_, const egi_gguf_adapter *adapter, size_t index, double factor,
                             size_t *count) {
  const egi_expert_parameter *expert = export_->expert_of[index];
  const char *number, *module;
  if (!split_path(expert->name, &number, &module))
    return egi_fail(export_->ctx, EG_ERROR_UNSUPPORTED, "llama.cpp has no tensor that an adapter of %s belongs to",
                    expert->name);
  for (egi_expert_part part = EGI_EXPERT_GATE; part <= EGI_EXPERT_DOWN; part++) {
    egi_expert_lora all;
    if (!egi_expert_has_part(expert, part)) continue;
    EG_TRY(egi_expert_lora_read(export_, index, part, factor, &export_->arena, &all));
    const egi_lora lora = {expert->name, all.rank, all.in_features, all.out_features, all.a, all.b};
    const char *name = egi_arena_format(&export_->arena, "blk.%.*s.%s.weight", (int)(module - number - 1), number,
                                        expert_tensors[part]);
    if (name == NULL) return EG_ERROR_MEMORY;
    EG_TRY(add_tensors(export_, adapter, name, expert->n_experts, &lora, count));
  }
  return EG_OK;
}

static eg_status add_module(egi_export *export_, const egi_gguf_adapter *adapter, const egi_structure *structure,
                            size_t index, size_t *count) {
  egi_arena *arena = &export_->arena;
  egi_lora lora;
  const char *name;
  const egi_adapter_target *target = &export_->adapters.targets[index];
  double rest = target->scale * target->rank / adapter->alpha; /* 1 where alpha / r is the scale */
  if (export_->expert_of[index] != NULL) return add_experts(export_, adapter, index, rest, count);
  EG_TRY(egi_lora_read(export_, index, rest, arena, &lora));
  EG_TRY(name_tensor(export_, lora.path, structure->is_tied, &name));
  EG_TRY(arrange(arena, adapter->architecture, structure, &lora));
  return add_tensors(export_, adapter, name, 0, &lora, count);
}

static eg_status write_adapter(egi_export *export_, recognised *model, const char *path) {
  size_t count = export_->adapters.count;
  egi_structure structure;
  EG_TRY(egi_machine_prepare(&model->machine, export_->model, "cpu", EG_DTYPE_F32));
  EG_TRY(egi_find_linears(model->machine.graph, &model->arena, &model->linears, &model->n_linears));
  EG_TRY(egi_structure_find(model->machine.graph, &model->arena, &structure));
  egi_safetensor *tensors = EGI_NEW(&export_->arena, egi_safetensor, 4 * count); /* gate and up from one target */
  if (tensors == NULL) return EG_ERROR_MEMORY;
  egi_gguf_adapter adapter = {.architecture = find_architecture(export_, model, &structure),
                              .alpha = choose_alpha(&export_->adapters),
                              .tensors = tensors};
  for (size_t i = 0; i < count; i++) EG_TRY(add_module(export_, &adapter, &structure, i, &adapter.count));
  egi_log(export_->ctx, EG_LOG_INFO, "%s: an adapter for models of the architecture %s", path, adapter.architecture);
  return egi_gguf_write_adapter(export_->ctx, path, &adapter);
}

eg_status egi_export_gguf(egi_export *export_, const char *path) {
  recognised model = {.n_linears = 0};
  EG_TRY(egi_export_path(export_, path, ".gguf", "adapter.gguf", &path));
  egi_arena_init(&model.arena, export_->ctx, EGI_PURPOSE_DATA);
  eg_status status = write_adapter(export_, &model, path);
  egi_machine_close(&model.machine);
  egi_arena_clear(&model.arena);
  return status;
}
