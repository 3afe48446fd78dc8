#!/usr/bin/env python3
"""Exported adapters in other people's hands: onnxruntime computes with the merged model, and with the base that takes
the .onnx_adapter file, what engraft computes with the adapter; onnx's checker accepts both files; without the adapter
the base computes what the model does. Where gguf is installed, its reader finds the tensors that llama.cpp's converter
writes: ggml's names, and the products of the adapter in the layout that the converter gives the base.

usage: exports.py ENGRAFT SCRATCH MODEL...     exit 77 = skipped
"""
import json, os, subprocess, sys

try:
    import numpy as np, onnx, onnxruntime
    from safetensors.numpy import load_file, save_file
    onnxruntime.LoraAdapter
except (ImportError, AttributeError) as problem:
    print("skipped:", problem)
    sys.exit(77)

try:
    import gguf
except ImportError:
    gguf = None

TOLERANCE = 1e-4
OWN_OPERATORS = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}  # onnxruntime's, in ONNX's domain


def run(engraft, *arguments):
    done = subprocess.run([engraft, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"engraft {' '.join(map(str, arguments))}: {done.stderr.strip()}")


def train(engraft, path, scratch):
    """An adapter whose every B has moved a lot."""
    generator = np.random.default_rng(0)
    with open(f"{scratch}/data.jsonl", "w") as file:
        for _ in range(4):
            file.write(json.dumps({"input_ids": generator.integers(0, 48, 12).tolist()}) + "\n")
    run(engraft, "train", path, "--data", f"{scratch}/data.jsonl", "--out", f"{scratch}/adapter", "--steps", 4, "--lr",
        0.03, "--rank", 3, "--alpha", 7, "--tokens", 64)


def own_logits(engraft, path, ids, scratch, *more):
    save_file({"input_ids": ids}, f"{scratch}/in.safetensors")
    run(engraft, "run", path, "--inputs", f"{scratch}/in.safetensors", "--outputs", f"{scratch}/out.safetensors", *more)
    return load_file(f"{scratch}/out.safetensors")["logits"]


def session_of(model):
    """Products with activations rounded to int8 are computed with float32 ones."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds_of(model, ids, head_dim):
    feeds, defaults = {}, {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in defaults:
            continue
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name == "input_ids":
            numbers = ids
        elif value.name == "attention_mask":
            numbers = np.ones(ids.shape)
        elif value.name == "position_ids":
            numbers = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        else:
            numbers = np.zeros([d if isinstance(d, int) else ids.shape[0] if i == 0 else head_dim if i == 3 else 0
                                for i, d in enumerate(dims)])
        feeds[value.name] = numbers.astype(kind)
    return feeds


def check_file(path):
    model = onnx.load(path)
    if not any(node.op_type in OWN_OPERATORS for node in model.graph.node):
        onnx.checker.check_model(model)
    return model


def converted(delta, architecture, module, structure):
    """As convert_hf_to_gguf.py lays out the matrix of that module."""
    heads = {"q_proj": structure["heads"], "k_proj": structure["kv_heads"]}.get(module.rsplit(".", 1)[-1])
    if architecture == "llama" and heads:
        delta = delta.reshape(heads, 2, -1, delta.shape[1]).swapaxes(1, 2).reshape(delta.shape)
    return delta


def check_gguf(engraft, path, scratch, structure):
    if gguf is None:
        return "gguf not installed"
    run(engraft, "export", path, "--adapter", f"{scratch}/adapter", "--format", "gguf", "-o", f"{scratch}/a.gguf")
    reader, tensors = gguf.GGUFReader(f"{scratch}/a.gguf"), load_file(f"{scratch}/adapter/adapter_model.safetensors")
    config = json.load(open(f"{scratch}/adapter/adapter_config.json"))
    field = lambda name: reader.fields[name].contents()
    architecture, alpha = field("general.architecture"), field("adapter.lora.alpha")
    if (field("general.type"), field("adapter.type")) != ("adapter", "lora"):
        raise RuntimeError("gguf: not a LoRA adapter")
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], 64)
    found, seen = {tensor.name: tensor.data for tensor in reader.tensors}, set()
    for key in tensors:
        if not key.endswith(".lora_A.weight"):
            continue
        module = key[len("base_model.model."):-len(".lora_A.weight")]
        name = names.get_name(module + ".weight", try_suffixes=(".weight",))
        a, b = found[name + ".lora_a"], found[name + ".lora_b"]
        delta = config["lora_alpha"] / config["r"] * (tensors[key.replace("lora_A", "lora_B")] @ tensors[key])
        error = np.abs(alpha / a.shape[0] * (b @ a) - converted(delta, architecture, module, structure)).max()
        if not error <= 1e-6:
            raise RuntimeError(f"gguf: {name} differs by {error:.1e}")
        seen |= {name + ".lora_a", name + ".lora_b"}
    if seen != set(found):
        raise RuntimeError(f"gguf: {sorted(seen ^ set(found))}")
    return f"gguf {architecture}"


def check(engraft, path, scratch):
    train(engraft, path, scratch)
    ids = np.random.default_rng(1).integers(0, 48, (2, 7))
    plain = own_logits(engraft, path, ids, scratch)
    adapted = own_logits(engraft, path, ids, scratch, "--adapter", f"{scratch}/adapter")
    report = subprocess.run([engraft, "inspect", path, "--json"], capture_output=True, text=True, check=True)
    structure = json.loads(report.stdout)["structure"]
    head_dim, distances = structure["head_dim"], [check_gguf(engraft, path, scratch, structure)]
    try:
        original = onnx.load(path)
        session_of(original).run(["logits"], feeds_of(original, ids, head_dim))
        runs = True
    except Exception:
        runs = False

    def compare(what, model, want, tolerance, options=None):
        try:
            session = session_of(model)
            got = session.run(["logits"], feeds_of(model, ids, head_dim), options)[0].astype(np.float32)
        except Exception as problem:  # what onnxruntime's CPU kernels do not have is in the file as it came, too
            if runs:
                raise
            distances.append(f"{what} not run ({str(problem)[:60]!r})")
            return
        distance = float(np.abs(got - want).max())
        distances.append(f"{what} {distance:.1e}")
        if not distance <= tolerance:
            raise RuntimeError(f"{what}: {distance:.1e} from engraft's logits")

    is_half = "float16" in path
    for dtype, tolerance in (("f32", TOLERANCE), ("f16", 2e-2), ("bf16", 1e-1)):
        run(engraft, "export", path, "--adapter", f"{scratch}/adapter", "--format", "merged", "--dtype", dtype, "-o",
            f"{scratch}/merged.onnx")
        compare(f"merged {dtype}", check_file(f"{scratch}/merged.onnx"), adapted, tolerance)
    run(engraft, "export", path, "--adapter", f"{scratch}/adapter", "--format", "merged", "--dtype", "nf4", "-o",
        f"{scratch}/merged.onnx")
    rounded = own_logits(engraft, f"{scratch}/merged.onnx", ids, scratch)
    compare("merged nf4", check_file(f"{scratch}/merged.onnx"), rounded, TOLERANCE)
    run(engraft, "export", path, "--adapter", f"{scratch}/adapter", "--format", "onnx_adapter", "-o",
        f"{scratch}/a.onnx_adapter")
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(f"{scratch}/a.onnx_adapter")
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    model = check_file(f"{scratch}/a.onnx")
    compare("base", model, plain, 2e-2 if is_half else TOLERANCE)
    compare("onnx_adapter", model, adapted, 2e-2 if is_half else TOLERANCE, options)
    return ", ".join(distances)


def main():
    engraft, scratch, failures = os.path.abspath(sys.argv[1]), sys.argv[2], 0
    os.makedirs(scratch, exist_ok=True)
    for path in sys.argv[3:]:
        try:
            print(f"{os.path.basename(os.path.dirname(path))}/{os.path.basename(path)}: {check(engraft, path, scratch)}")
        except Exception as problem:
            failures += 1
            print(f"FAILED {path}: {problem}")
    sys.exit(failures > 0)


main()
