"""llama.cpp as the consumer of adapters in GGUF: a Hugging Face folder as a GGUF base, as convert_hf_to_gguf.py lays it
out, and its logits with and without an adapter. llama.cpp's C functions are called in the library of the Python package
xllamacpp; its option structs, whose sizes vary, are passed as larger ones with the defaults it gives.
"""
import ctypes, json, struct

import gguf, numpy as np, xllamacpp
from safetensors.numpy import load_file

library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
FLOAT32 = 0
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
                 "gpt_oss": "gpt-oss", "gpt2": "gpt2", "gemma3_text": "gemma3", "mixtral": "llama", "phi3": "phi3",
                 "smollm3": "smollm3", "gpt_neox": "gptneox"}


class Options(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("logits", ctypes.POINTER(ctypes.c_int8))]


def function(name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


def context_options():
    """Caches in float32, no flash attention: its defaults round keys and values to 16 bits."""
    options = function("llama_context_default_params", Options)()
    words = list(options.words)[:32]
    types = next(i for i in range(16, 31) if words[i] == words[i + 1] == 1)
    options.words[types] = options.words[types + 1] = FLOAT32
    flash = words.index(0xFFFFFFFF)  # rope scaling, pooling, attention, flash attention: all "not said"
    assert words[flash:flash + 4] == [0xFFFFFFFF] * 4
    options.words[flash + 3] = 0
    return options


Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
messages = []
keep_messages = Log(lambda level, text, _: messages.append(text.decode(errors="replace")) if level in (3, 4) else None)


def logits(base, ids, adapter=None):
    """[rows, sequence, vocab] of the GGUF file, each row alone."""
    function("llama_log_set", None, Log, ctypes.c_void_p)(keep_messages, None)
    messages.clear()
    model = function("llama_model_load_from_file", ctypes.c_void_p, ctypes.c_char_p, Options)(
        base.encode(), function("llama_model_default_params", Options)())
    if not model:
        raise RuntimeError("llama.cpp does not load the base: " + "".join(messages)[-300:])
    vocabulary = function("llama_model_get_vocab", ctypes.c_void_p, ctypes.c_void_p)(model)
    n_vocabulary = function("llama_vocab_n_tokens", ctypes.c_int32, ctypes.c_void_p)(vocabulary)
    rows = [row_logits(model, list(map(int, row)), adapter, n_vocabulary) for row in ids]
    function("llama_model_free", None, ctypes.c_void_p)(model)
    return np.stack(rows)


def row_logits(model, tokens, adapter, n_vocabulary):
    context = function("llama_init_from_model", ctypes.c_void_p, ctypes.c_void_p, Options)(model, context_options())
    if not context:
        raise RuntimeError("llama.cpp makes no context: " + "".join(messages)[-300:])
    if adapter is not None:
        lora = function("llama_adapter_lora_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(model, adapter.encode())
        if not lora:
            raise RuntimeError("llama.cpp does not load the adapter: " + "".join(messages)[-300:])
        set_adapters = function("llama_set_adapters_lora", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
                                ctypes.c_void_p)
        if set_adapters(context, (ctypes.c_void_p * 1)(lora), 1, (ctypes.c_float * 1)(1.0)) != 0:
            raise RuntimeError("llama.cpp does not take the adapter")
    batch = function("llama_batch_init", Batch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if function("llama_decode", ctypes.c_int32, ctypes.c_void_p, Batch)(context, batch) != 0:
        raise RuntimeError("llama.cpp does not decode: " + "".join(messages)[-300:])
    found = function("llama_get_logits", ctypes.POINTER(ctypes.c_float), ctypes.c_void_p)(context)
    numbers = np.ctypeslib.as_array(found, (len(tokens), n_vocabulary)).copy()
    function("llama_batch_free", None, Batch)(batch)
    function("llama_free", None, ctypes.c_void_p)(context)
    return numbers


# ---- the base ----

def pairs(matrix, heads):
    """Rows [heads, 2, half] -> [heads, half, 2]."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def stack_experts(tensors, layers, experts):
    """Experts that the files keep apart, under the names of stacks."""
    for layer in range(layers):
        for module in ("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj", "mlp.experts.#.down_proj",
                       "block_sparse_moe.experts.#.w1", "block_sparse_moe.experts.#.w3", "block_sparse_moe.experts.#.w2"):
            stem = f"model.layers.{layer}.{module}.weight"
            names = [stem.replace("#", str(e)) for e in range(experts)]
            if names and names[0] in tensors:
                tensors[stem.replace(".#", "")] = np.stack([tensors.pop(n) for n in names])


def part_experts(tensors):
    """gpt-oss: [E, in, out] with interleaved gate and up."""
    for name in [n for n in tensors if ".experts.gate_up_proj" in n or ".experts.down_proj" in n]:
        value, is_bias = tensors.pop(name), name.endswith("_bias")
        suffix, stem = (".bias", name[:-len("_bias")]) if is_bias else (".weight", name)
        value = value if is_bias else value.swapaxes(1, 2)
        if "gate_up_proj" in stem:
            tensors[stem.replace("gate_up_proj", "gate_proj") + suffix] = value[:, 0::2]
            tensors[stem.replace("gate_up_proj", "up_proj") + suffix] = value[:, 1::2]
        else:
            tensors[stem + suffix] = value


def rope_factors(rope, head_dim):
    """Llama 3's scaling as factors on the wave lengths."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    limits = [rope["original_max_position_embeddings"] / f for f in (high, low)]
    return np.where(lengths < limits[0], 1, np.where(lengths > limits[1], rope["factor"], blended)).astype(np.float32)


def write_settings(writer, config, head_dim):
    rope = config.get("rope_parameters") or {"rope_type": "default"}
    rope = rope.get("full_attention", rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_context_length(config.get("max_position_embeddings", config.get("n_positions")))
    writer.add_embedding_length(config.get("hidden_size", config.get("n_embd")))
    writer.add_block_count(config.get("num_hidden_layers", config.get("n_layer")))
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * config["n_embd"])
    writer.add_head_count(config.get("num_attention_heads", config.get("n_head")))
    if "n_embd" in config:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    if config["model_type"] == "gpt_neox":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_parallel_residual(config["use_parallel_residual"])
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 0.25) * head_dim))
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if config["model_type"] in ("gpt_oss", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def convert(folder, path):
    """Writes the folder's model to `path`; the architecture, or None for one that is not known here."""
    config, tensors = json.load(open(f"{folder}/config.json")), load_file(f"{folder}/model.safetensors")
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        return None
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    writer = gguf.GGUFWriter(path, architecture)
    write_settings(writer, config, head_dim)
    stack_experts(tensors, layers, config.get("num_experts", config.get("num_local_experts", 0)))
    if architecture == "gpt-oss":
        part_experts(tensors)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], layers)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config["rope_parameters"], head_dim))
    for name, value in tensors.items():
        if name.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq")):
            continue
        if architecture in ("llama", "smollm3") and ".q_proj." in name:
            value = pairs(value, config["num_attention_heads"])
        if architecture in ("llama", "smollm3") and ".k_proj." in name:
            value = pairs(value, config["num_key_value_heads"])
        if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            value = value.T
        if architecture == "gptneox" and ".query_key_value." in name:
            value = value.reshape(config["num_attention_heads"], 3, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith(".sinks"):
            found += ".weight"
        writer.add_tensor(found, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return architecture
