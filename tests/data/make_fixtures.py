#!/usr/bin/env python3
"""Exports the small models in this folder and their PyTorch references. Needs torch, transformers, peft, onnx, safetensors;
run it only to make the fixtures anew: the tests read the files.

usage: make_fixtures.py OUT [MODEL...]

One folder a model: model.<exporter>-op<version>-<attention>[-<dtype>].onnx, model.genai-<float32|int4>.onnx (written by
genai_like.py), and ref.safetensors (ref.<dtype>.safetensors: computed in float32 with the weights rounded to that type) with input_ids, attention_mask,
labels [batch, sequence] (i64), logits, full-training gradients (grad.*), and for LoRA r = 4, alpha = 8 on all linears but
the head: lora.init.*, lora.logits, lora.grad.* (of the mean loss, before clipping), the losses of ten AdamW steps
(lora.curve; lr 5e-3, weight decay 0.1, clip 0.3) and lora.final.*. For some hf/: config.json and model.safetensors.
"""
import os, sys, warnings
import genai_like, onnx, torch, transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

warnings.filterwarnings("ignore")
VOCAB, BATCH, SEQUENCE = 56, 2, 13
DECODER = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.15, use_cache=False,
               bos_token_id=1, eos_token_id=2)
MODELS = {
    "llama": (transformers.LlamaConfig, dict(DECODER, head_dim=6, rms_norm_eps=1e-5, tie_word_embeddings=False)),
    "qwen3": (transformers.Qwen3Config, dict(DECODER, head_dim=8, tie_word_embeddings=True)),
    "qwen2": (transformers.Qwen2Config, dict(DECODER, tie_word_embeddings=False)),
    "gpt2": (transformers.GPT2Config, dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=64,
                                           initializer_range=0.15, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
                                           attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)),
    "gpt_oss": (transformers.GptOssConfig, dict(DECODER, head_dim=16, intermediate_size=16, num_local_experts=4,
                                                num_experts_per_tok=2, sliding_window=5, tie_word_embeddings=False,
                                                layer_types=["sliding_attention", "full_attention"])),
    "qwen3_moe": (transformers.Qwen3MoeConfig, dict(DECODER, head_dim=8, moe_intermediate_size=16, num_experts=4,
                                                    num_experts_per_tok=2, norm_topk_prob=True,
                                                    tie_word_embeddings=False)),
}
EXPERTS = {"gpt_oss": ["batched_mm", "all"], "qwen3_moe": ["batched_mm", "all"]}  # how experts are exported
GENAI = {"qwen3": ["float32"], "llama": ["int4"], "gpt_oss": ["float32"]}
INT4_BLOCK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]  # experts are no linear layers
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "gpt_oss": ATTENTION, "qwen3_moe": ATTENTION}
VARIANTS = [("dynamo", 20, "eager"), ("dynamo", 23, "sdpa"), ("torchscript", 17, "eager")]
FOLDERS = ["gpt2", "qwen3"]  # saved as Hugging Face folders too
NARROW = {"llama": [torch.float16, torch.bfloat16]}  # further exports at opset 23 with weights of these types
KEEP = "pkg.torch.onnx.name_scopes"


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.m = model

    def forward(self, input_ids, attention_mask, position_ids):
        return self.m(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids).logits


def round_to(key, parameter, rounded):
    """As the type holds it; int4: as 4-bit products do, the token table as it is."""
    if rounded != "int4":
        return parameter.to(rounded).float()
    if parameter.dim() != 2 or "embed_tokens" in key:
        return parameter
    return torch.from_numpy(genai_like.quantise(parameter.detach().numpy(), INT4_BLOCK)[2])


def every_expert(self, hidden, indices, weights):
    """All experts on all tokens, each times its weight, most of which are 0."""
    total = torch.zeros_like(hidden)
    for e in range(self.num_experts):
        turn = (lambda w: w) if isinstance(self, GptOssExperts) else (lambda w: w.T)
        gate_up = hidden @ turn(self.gate_up_proj[e])
        if isinstance(self, GptOssExperts):
            inner = self._apply_gate(gate_up + self.gate_up_proj_bias[e])
            out = inner @ self.down_proj[e] + self.down_proj_bias[e]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            out = (self.act_fn(gate) * up) @ turn(self.down_proj[e])
        total = total + out * (weights * (indices == e)).sum(-1, keepdim=True)
    return total


def choose_experts(model, form):
    if form == "batched_mm":
        model.set_experts_implementation(form)
    for module in model.modules():
        if form == "all" and isinstance(module, (GptOssExperts, Qwen3MoeExperts)):
            module.forward = every_expert.__get__(module)


def make(name, attention, rounded=None):
    config_class, settings = MODELS[name]
    torch.manual_seed(7)
    config = config_class(**settings)
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            if rounded is not None:
                parameter.copy_(round_to(key, parameter, rounded))
    return model


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (BATCH, SEQUENCE), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, SEQUENCE - 4:] = 0
    labels = ids.clone()
    labels[0, :3] = -100
    labels[mask == 0] = -100
    return ids, mask, torch.arange(SEQUENCE).repeat(BATCH, 1), labels


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), labels[:, 1:].reshape(-1),
                                             ignore_index=-100)


def forward(model, data):
    ids, mask, positions, _ = data
    return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits


def references(name, data, rounded=None):
    out = dict(input_ids=data[0], attention_mask=data[1], labels=data[3])
    model = make(name, "eager", rounded)
    logits = forward(model, data)
    out["logits"] = logits.detach()
    loss = loss_of(logits, data[3])
    loss.backward()
    out["loss"] = loss.detach().reshape(1)
    out.update({f"grad.{k}": p.grad.clone() for k, p in model.named_parameters()})
    model = make(name, "eager", rounded)
    targets = TARGETS.get(name, "all-linear")
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets,
                                            task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2"))
    generator = torch.Generator().manual_seed(5)
    trainable = [(k.replace(".default.", "."), p) for k, p in peft.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for _, p in trainable:
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    out.update({f"lora.init.{k}": p.detach().clone() for k, p in trainable})
    optimizer = torch.optim.AdamW([p for _, p in trainable], lr=5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    curve = []
    for step in range(10):
        logits = forward(peft, data)
        loss = loss_of(logits, data[3])
        curve.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            out["lora.logits"] = logits.detach()
            out.update({f"lora.grad.{k}": p.grad.clone() for k, p in trainable})
        torch.nn.utils.clip_grad_norm_([p for _, p in trainable], 0.3)
        optimizer.step()
    out["lora.curve"] = torch.tensor(curve)
    out.update({f"lora.final.{k}": p.detach().clone() for k, p in trainable})
    return {k: v.contiguous() for k, v in out.items()}


def strip(path):
    """Leaves of the exporter's metadata only what names modules: the rest is most of a small file."""
    model = onnx.load(path)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key == KEEP]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.ClearField("doc_string")
    for value in list(model.graph.value_info) + list(model.graph.input) + list(model.graph.output):
        del value.metadata_props[:]
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.save(model, path)


def export(name, exporter, opset, attention, data, folder, dtype=None, experts=None):
    suffix = "" if dtype is None else "-" + str(dtype).removeprefix("torch.")
    suffix += "" if experts is None else "-" + experts
    path = os.path.join(folder, f"model.{exporter}-op{opset}-{attention}{suffix}.onnx")
    wrapper = Wrapper(make(name, attention, dtype)).eval()
    choose_experts(wrapper.m, experts)
    if dtype is not None:
        for parameter in wrapper.parameters():
            parameter.data = parameter.data.to(dtype)
    names = ["input_ids", "attention_mask", "position_ids"]
    common = dict(input_names=names, output_names=["logits"], opset_version=opset)
    if exporter == "dynamo":
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
        torch.onnx.export(wrapper, data[:3], path, dynamo=True, external_data=False,
                          dynamic_shapes={n: dims for n in names}, **common)
    else:
        axes = {n: {0: "batch", 1: "sequence"} for n in names + ["logits"]}
        torch.onnx.export(wrapper, data[:3], path, dynamo=False, dynamic_axes=axes, **common)
    strip(path)


def write_genai(name, kind, data, folder):
    """The same numbers under the builder's operators; the reference of 4-bit products has their weights."""
    if kind == "int4":
        save_file(references(name, data, kind), os.path.join(folder, f"ref.{kind}.safetensors"))
    path = os.path.join(folder, f"model.genai-{kind}.onnx")
    genai_like.write(make(name, "eager"), path, INT4_BLOCK if kind == "int4" else 0)
    print("made", path)


def main():
    data = batch()
    for name in sys.argv[2:] or MODELS:
        folder = os.path.join(sys.argv[1], name)
        os.makedirs(folder, exist_ok=True)
        save_file(references(name, data), os.path.join(folder, "ref.safetensors"))
        if name in FOLDERS:
            make(name, "eager").save_pretrained(os.path.join(folder, "hf"))
            os.remove(os.path.join(folder, "hf", "generation_config.json"))
        for kind in GENAI.get(name, []):
            write_genai(name, kind, data, folder)
        for exporter, opset, attention in VARIANTS[1 if name in EXPERTS else 0:]:
            for experts in EXPERTS.get(name, [None]):
                attention = "eager" if name == "gpt_oss" else attention  # its sinks need it
                try:
                    export(name, exporter, opset, attention, data, folder, experts=experts)
                    print("made", name, exporter, opset, experts or "")
                except Exception as problem:
                    print("FAILED", name, exporter, opset, repr(problem)[:300])
        for dtype in NARROW.get(name, []):
            suffix = str(dtype).removeprefix("torch.")
            save_file(references(name, data, dtype), os.path.join(folder, f"ref.{suffix}.safetensors"))
            export(name, "dynamo", 23, "sdpa", data, folder, dtype)
            print("made", name, suffix)


main()
