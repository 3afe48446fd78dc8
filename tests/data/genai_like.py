"""Writes a small model as onnxruntime-genai's model builder does: com.microsoft operators, packed qkv, caches as inputs and
outputs, weights as [in, out] under the builder's names, optionally 4-bit products. Called by make_fixtures.py."""
import numpy as np, onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


def quantise(weight, block):
    """[N, K] float -> codes u8 [N, blocks, block / 2], scales [N, blocks], and the values that they stand for."""
    n, k = weight.shape
    blocks = -(-k // block)
    padded = np.zeros((n, blocks * block), np.float32)
    padded[:, :k] = weight
    cut = padded.reshape(n, blocks, block)
    top = np.take_along_axis(cut, np.abs(cut).argmax(-1)[..., None], -1)[..., 0]
    scales = (top / -8).astype(np.float32)
    codes = np.clip(np.rint(cut / np.where(scales == 0, 1, scales)[..., None]) + 8, 0, 15).astype(np.uint8)
    values = ((codes.astype(np.float32) - 8) * scales[..., None]).reshape(n, -1)[:, :k]
    return (codes[..., 0::2] | codes[..., 1::2] << 4), scales, values


class Writer:
    def __init__(self, model, block):
        self.config, self.block = model.config, block
        self.state = {k: v.detach().float().numpy() for k, v in model.state_dict().items()}
        self.nodes, self.weights, self.known = [], [], set()

    def weight(self, name, values):
        if name not in self.known:
            self.known.add(name)
            self.weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def integers(self, values):
        name = f"/model/constants/INT64/{values}"
        if name not in self.known:
            self.known.add(name)
            tensor = numpy_helper.from_array(np.array(values, np.int64), name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def node(self, op, inputs, path, outputs=("output_0",), domain="", **attributes):
        names = [o and (o if "/" not in path else f"{path}/{o}") for o in outputs]
        self.nodes.append(helper.make_node(op, inputs, names, name=path, domain=domain, **attributes))
        return names[0] if len(names) == 1 else names

    def linear(self, x, path, weight, bias=None):
        """`path` "model.layers.0.attn.o_proj", weight [N, K]."""
        place = "/" + path.replace(".", "/").replace("layers/", "layers.")
        if self.block:
            codes, scales, _ = quantise(weight, self.block)
            y = self.node("MatMulNBits", [x, self.weight(path + ".MatMul.weight_Q4", codes),
                                          self.weight(path + ".MatMul.weight_scales", scales)], place + "/MatMul_Q4",
                          domain="com.microsoft", K=weight.shape[1], N=weight.shape[0], bits=4, block_size=self.block,
                          accuracy_level=4)
        else:
            y = self.node("MatMul", [x, self.weight(path + ".MatMul.weight", weight.T)], place + "/MatMul")
        return y if bias is None else self.node("Add", [y, self.weight(path + ".Add.bias", bias)], place + "/Add")

    def head_norm(self, x, path, weight, width):
        """q_norm and k_norm: over the last dim of each head."""
        place, size = "/" + path.replace(".", "/").replace("layers/", "layers."), weight.shape[0]
        rows = self.node("Reshape", [x, self.integers([0, -1, size])], place + "/Reshape_1")
        rows = self.node("SimplifiedLayerNormalization", [rows, self.weight(path + ".layernorm.weight", weight)],
                         place + "/SimplifiedLayerNormalization", axis=-1, epsilon=self.config.rms_norm_eps, stash_type=1)
        return self.node("Reshape", [rows, self.integers([0, -1, width])], place + "/Reshape_2")

    def attention(self, x, layer):
        c, p = self.config, f"model.layers.{layer}.self_attn."
        s, size = self.state, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        widths = [c.num_attention_heads * size, c.num_key_value_heads * size, c.num_key_value_heads * size]
        path, place = f"model.layers.{layer}.attn", f"/model/layers.{layer}/attn"
        bias = np.concatenate([s[p + f"{n}_proj.bias"] for n in "qkv"]) if p + "q_proj.bias" in s else None
        packed = self.linear(x, path + ".qkv_proj", np.concatenate([s[p + f"{n}_proj.weight"] for n in "qkv"]), bias)
        q, k, v = packed, "", ""
        if p + "q_norm.weight" in s:
            q, k, v = self.node("Split", [packed, self.integers(widths)], place + "/qkv_proj/Split",
                                ("output_0", "output_1", "output_2"), axis=-1)
            q = self.head_norm(q, path + ".q_norm", s[p + "q_norm.weight"], widths[0])
            k = self.head_norm(k, path + ".k_norm", s[p + "k_norm.weight"], widths[1])
        sinks = [self.weight(path + ".sinks", s[p + "sinks"])] if p + "sinks" in s else []
        windows = getattr(c, "layer_types", None) or []
        window = c.sliding_window if layer < len(windows) and windows[layer] == "sliding_attention" else -1
        inputs = [q, k, v, f"past_key_values.{layer}.key", f"past_key_values.{layer}.value",
                  "/model/attn_mask_reformat/Sub/Cast", "/model/attn_mask_reformat/Gather/Cast", "cos_cache", "sin_cache"]
        self.nodes.append(helper.make_node(
            "GroupQueryAttention", inputs + ["", "", *sinks] if sinks else inputs,
            [place + "/output_0", f"present.{layer}.key", f"present.{layer}.value"],
            name=place + "/GroupQueryAttention", domain="com.microsoft", num_heads=c.num_attention_heads,
            kv_num_heads=c.num_key_value_heads, scale=size ** -0.5, softcap=0.0, do_rotary=1, rotary_interleaved=0,
            local_window_size=window))
        bias = s.get(p + "o_proj.bias")
        return self.linear(place + "/output_0", path + ".o_proj", s[p + "o_proj.weight"], bias)

    def mlp(self, x, layer):
        p, path, place = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.mlp", f"/model/layers.{layer}/mlp"
        gate = self.linear(x, path + ".gate_proj", self.state[p + "gate_proj.weight"])
        up = self.linear(x, path + ".up_proj", self.state[p + "up_proj.weight"])
        sigmoid = self.node("Sigmoid", [gate], place + "/act_fn/Sigmoid")
        act = self.node("Mul", [gate, sigmoid], place + "/act_fn/Mul")
        return self.linear(self.node("Mul", [act, up], place + "/Mul"), path + ".down_proj",
                           self.state[p + "down_proj.weight"])

    def moe(self, x, layer):
        c, s, p = self.config, self.state, f"model.layers.{layer}.mlp."
        path, place = f"model.layers.{layer}.moe", f"/model/layers.{layer}/moe"
        logits = self.linear(x, path + ".router", s[p + "router.weight"], s[p + "router.bias"])
        logits = self.node("Reshape", [logits, self.integers([-1, c.num_local_experts])], place + "/router/Reshape")
        w = [self.weight(f"{path}.experts.{n}_proj.{kind}", s[p + f"experts.{n}_proj{suffix}"].swapaxes(-1, -2)
                         if kind == "weight" else s[p + f"experts.{n}_proj{suffix}"])
             for n in ("gate_up", "down") for kind, suffix in (("weight", ""), ("bias", "_bias"))]
        return self.node("MoE", [x, logits, *w], place + "/MoE", domain="com.microsoft", k=c.num_experts_per_tok,
                         activation_type="swiglu", normalize_routing_weights=1, swiglu_fusion=1, activation_alpha=1.702,
                         activation_beta=1.0, swiglu_limit=7.0)

    def norm(self, x, path, weight, skip=None):
        """The norm of x, or of x + skip; also the sum, which goes on as the residual stream."""
        place = "/" + path.replace(".", "/").replace("layers/", "layers.")
        name, epsilon = self.weight(path + ".weight", weight), self.config.rms_norm_eps
        if skip is None:
            return x, self.node("SimplifiedLayerNormalization", [x, name], place + "/LayerNorm", axis=-1, epsilon=epsilon,
                                stash_type=1)
        y, _, _, total = self.node("SkipSimplifiedLayerNormalization", [x, skip, name], place + "/SkipLayerNorm",
                                   ("output_0", "", "", "output_3"), domain="com.microsoft", epsilon=epsilon)
        return total, y

    def mask(self):
        place = "/model/attn_mask_reformat"
        one = self.integers([1])
        total = self.node("ReduceSum", ["attention_mask", one], place + "/ReduceSum", keepdims=0)
        less = self.node("Sub", [total, one], place + "/Sub")
        self.nodes.append(helper.make_node("Cast", [less], [place + "/Sub/Cast"], to=INT32))
        shape = self.node("Shape", ["attention_mask"], place + "/Shape")
        longest = self.node("Gather", [shape, self.integers(1)], place + "/Gather", axis=0)
        self.nodes.append(helper.make_node("Cast", [longest], [place + "/Gather/Cast"], to=INT32))

    def caches(self, model):
        import torch
        positions = torch.arange(self.config.max_position_embeddings)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
        half = (getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads) // 2
        self.weight("cos_cache", cos[0, :, :half].numpy())
        self.weight("sin_cache", sin[0, :, :half].numpy())

    def build(self, model, path):
        c, s = self.config, self.state
        self.mask()
        self.caches(model)
        table = self.weight("model.embed_tokens.weight", s["model.embed_tokens.weight"])
        x, branch = self.node("Gather", [table, "input_ids"], "/model/embed_tokens/Gather"), None
        for layer in range(c.num_hidden_layers):
            p = f"model.layers.{layer}."
            x, y = self.norm(x, p + "input_layernorm", s[p + "input_layernorm.weight"], branch)
            x, y = self.norm(x, p + "post_attention_layernorm", s[p + "post_attention_layernorm.weight"],
                             self.attention(y, layer))
            branch = self.moe(y, layer) if p + "mlp.router.weight" in s else self.mlp(y, layer)
        _, y = self.norm(x, f"model.layers.{c.num_hidden_layers}.final_norm_layernorm", s["model.norm.weight"], branch)
        y = self.linear(y, "lm_head", s["lm_head.weight"])
        next(n for n in self.nodes if y in n.output).output[0] = "logits"
        self.save(path)

    def save(self, path):
        c, dims = self.config, ["batch_size", "sequence_length"]
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        cache = lambda name, length: helper.make_tensor_value_info(
            name, FLOAT, ["batch_size", c.num_key_value_heads, length, size])
        layers = [(layer, kind) for layer in range(c.num_hidden_layers) for kind in ("key", "value")]
        inputs = [helper.make_tensor_value_info("input_ids", INT64, dims),
                  helper.make_tensor_value_info("attention_mask", INT64, ["batch_size", "total_sequence_length"])]
        inputs += [cache(f"past_key_values.{layer}.{kind}", "past_sequence_length") for layer, kind in layers]
        outputs = [helper.make_tensor_value_info("logits", FLOAT, dims + [c.vocab_size])]
        outputs += [cache(f"present.{layer}.{kind}", "total_sequence_length") for layer, kind in layers]
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="fixtures"), path)


def write(model, path, block=0):
    """`block`: 0, or the block size of 4-bit products."""
    Writer(model, block).build(model, path)
