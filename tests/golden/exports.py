#!/usr/bin/env python3
"""Exported adapters in other people's hands: onnxruntime computes with the merged model, and with the base that takes
the .onnx_adapter file, what engraft computes with the adapter; onnx's checker accepts both files; without the adapter
the base computes what the model does. Where gguf is installed, its reader finds the tensors that llama.cpp's converter
writes: ggml's names, and the products of the adapter in the layout that the converter gives the base. Mixtures are tried
with adapters on their experts, too. consumers.py has PEFT's and llama.cpp's own logits.

usage: exports.py ENGRAFT SCRATCH MODEL...     exit 77 = skipped
"""
import json, os, sys

from runtimes import EXPERTS, check_each, dtype_of, engraft_logits, load_file, make_scratch, np, onnx, onnxruntime, run
from runtimes import session_of, shape_of, structure_of, train_adapter

try:
    onnxruntime.LoraAdapter
except AttributeError as problem:
    print("skipped:", problem)
    sys.exit(77)

try:
    import gguf
except ImportError:
    gguf = None

TOLERANCE = 1e-4
OWN_OPERATORS = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}  # onnxruntime's, in ONNX's domain


def feeds_of(model, ids, head_dim):
    feeds, defaults = {}, {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in defaults:
            continue
        if value.name == "input_ids":
            numbers = ids
        elif value.name == "attention_mask":
            numbers = np.ones(ids.shape)
        elif value.name == "position_ids":
            numbers = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        else:
            numbers = np.zeros([d if isinstance(d, int) else ids.shape[0] if i == 0 else head_dim if i == 3 else 0
                                for i, d in enumerate(shape_of(value))])
        feeds[value.name] = numbers.astype(dtype_of(value))
    return feeds


def check_file(path):
    model = onnx.load(path)
    if not any(node.op_type in OWN_OPERATORS for node in model.graph.node):
        onnx.checker.check_model(model)
    return model


# ---- GGUF ----

def converted(delta, architecture, module, structure):
    """As convert_hf_to_gguf.py lays out the matrix of that module."""
    heads = {"q_proj": structure["heads"], "k_proj": structure["kv_heads"]}.get(module.rsplit(".", 1)[-1])
    if architecture == "gptneox" and module.endswith(".query_key_value"):
        delta = delta.reshape(structure["heads"], 3, -1, delta.shape[1]).swapaxes(0, 1).reshape(delta.shape)
    if architecture == "llama" and heads:
        delta = delta.reshape(heads, 2, -1, delta.shape[1]).swapaxes(1, 2).reshape(delta.shape)
    return delta


def expert_deltas(key, a, b, scale, structure, architecture):
    """The stacks that llama.cpp has in the place of one of PEFT's, by name in Hugging Face's model of today."""
    experts = structure["experts"]
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)
    delta, module = scale * (b @ a), key[len("base_model.model."):-len(".lora_A.weight")]
    if not module.endswith(".base_layer"):
        return {f"{module}.down_proj": delta}
    module, half = module[:-len(".base_layer")], delta.shape[1] // 2
    halves = (delta[:, 0::2], delta[:, 1::2]) if architecture == "gpt-oss" else (delta[:, :half], delta[:, half:])
    return {f"{module}.gate_proj": halves[0], f"{module}.up_proj": halves[1]}


def wanted_deltas(scratch, architecture, structure):
    tensors = load_file(f"{scratch}/adapter/adapter_model.safetensors")
    config = json.load(open(f"{scratch}/adapter/adapter_config.json"))
    scale, wanted = config["lora_alpha"] / config["r"], {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        b = tensors[key.replace("lora_A", "lora_B")]
        if ".experts." in key:
            wanted |= expert_deltas(key, a, b, scale, structure, architecture)
        else:
            module = key[len("base_model.model."):-len(".lora_A.weight")]
            wanted[module] = converted(scale * (b @ a), architecture, module, structure)
    return wanted


def check_gguf(engraft, path, scratch, structure):
    if gguf is None:
        return "gguf not installed"
    try:
        run(engraft, "export", path, "--adapter", f"{scratch}/adapter", "--format", "gguf", "-o", f"{scratch}/a.gguf")
    except RuntimeError as problem:
        if "llama.cpp has no tensor" not in str(problem):
            raise
        return "no gguf for its modules"
    reader = gguf.GGUFReader(f"{scratch}/a.gguf")
    field = lambda name: reader.fields[name].contents()
    architecture, alpha = field("general.architecture"), field("adapter.lora.alpha")
    if (field("general.type"), field("adapter.type")) != ("adapter", "lora"):
        raise RuntimeError("gguf: not a LoRA adapter")
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], 64)
    found, seen = {tensor.name: tensor.data for tensor in reader.tensors}, set()
    for module, delta in wanted_deltas(scratch, architecture, structure).items():
        name = names.get_name(module + ".weight", try_suffixes=(".weight",))
        a, b = found[name + ".lora_a"], found[name + ".lora_b"]
        error = np.abs(alpha / a.shape[-2] * (b @ a) - delta).max()
        if not error <= 1e-6:
            raise RuntimeError(f"gguf: {name} differs by {error:.1e}")
        seen |= {name + ".lora_a", name + ".lora_b"}
    if seen != set(found):
        raise RuntimeError(f"gguf: {sorted(seen ^ set(found))}")
    return f"gguf {architecture}"


# ---- onnxruntime ----

class Comparison:
    def __init__(self, engraft, path, scratch, structure):
        self.engraft, self.path, self.scratch, self.head_dim = engraft, path, scratch, structure["head_dim"]
        self.ids, self.told = np.random.default_rng(1).integers(0, 48, (2, 7)), []
        original = onnx.load(path)
        try:  # what onnxruntime's CPU kernels do not have is in the file as it came, too
            session_of(original).run(["logits"], feeds_of(original, self.ids, self.head_dim))
            self.runs = True
        except Exception:
            self.runs = False
        self.is_narrow = dtype_of(original.graph.output[0]) != np.float32 or "float16" in path

    def logits(self, path, *more):
        return engraft_logits(self.engraft, path, self.ids, self.scratch, *more)

    def hold(self, what, file, want, tolerance, options=None):
        model = check_file(file)
        try:
            got = session_of(model).run(["logits"], feeds_of(model, self.ids, self.head_dim), options)[0]
        except Exception as problem:
            if self.runs:
                raise
            self.told.append(f"{what} not run ({str(problem)[-90:]!r})")
            return
        distance = float(np.abs(got.astype(np.float32) - want).max())
        self.told.append(f"{what} {distance:.1e}")
        if not distance <= tolerance:
            raise RuntimeError(f"{what}: {distance:.1e} from engraft's logits")

    def export(self, kind, out, *more):
        run(self.engraft, "export", self.path, "--adapter", f"{self.scratch}/adapter", "--format", kind, "-o", out, *more)

    def check_formats(self):
        adapted, merged = self.logits(self.path, "--adapter", f"{self.scratch}/adapter"), f"{self.scratch}/merged.onnx"
        for dtype, tolerance in (("f32", TOLERANCE), ("f16", 2e-2), ("bf16", 1e-1)):
            self.export("merged", merged, "--dtype", dtype)
            self.hold(f"merged {dtype}", merged, adapted, tolerance)
        self.export("merged", merged, "--dtype", "nf4")
        self.hold("merged nf4", merged, self.logits(merged), TOLERANCE)
        self.export("onnx_adapter", f"{self.scratch}/a.onnx_adapter")
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(f"{self.scratch}/a.onnx_adapter")
        options.add_active_adapter(adapter)
        tolerance = 2e-2 if self.is_narrow else TOLERANCE
        self.hold("base", f"{self.scratch}/a.onnx", self.logits(self.path), tolerance)
        self.hold("onnx_adapter", f"{self.scratch}/a.onnx", adapted, tolerance, options)


    def check_codes(self):
        """Adapters trained for codes: the merged model holds those, and computes what training computed."""
        merged = f"{self.scratch}/merged.onnx"
        for kind, product in (("int4", "MatMulNBits"), ("int8", "MatMulNBits"), ("nf4", "MatMulBnb4")):
            train_adapter(self.engraft, self.path, self.scratch, "--qat", kind)
            self.export("merged", merged)
            if not any(node.op_type == product for node in onnx.load(merged).graph.node):
                raise RuntimeError(f"trained for {kind}, the merged model has no {product}")
            adapted = self.logits(self.path, "--adapter", f"{self.scratch}/adapter")
            self.hold(f"trained for {kind}", merged, adapted, TOLERANCE)


def check(engraft, path, scratch):
    structure, told = structure_of(engraft, path), []
    kinds = [[]] + ([["--targets", "q_proj", "--target-parameters", EXPERTS]] if structure["experts"] else [])
    for more in kinds:
        train_adapter(engraft, path, scratch, *more)
        comparison = Comparison(engraft, path, scratch, structure)
        comparison.told.append(("experts: " if more else "") + check_gguf(engraft, path, scratch, structure))
        comparison.check_formats()
        if not more and "int4" not in path:
            comparison.check_codes()
        told += comparison.told
    return ", ".join(told)


def main():
    engraft, scratch = os.path.abspath(sys.argv[1]), make_scratch(sys.argv[2])
    check_each(sys.argv[3:], lambda path: check(engraft, path, scratch))


main()
