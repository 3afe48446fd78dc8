#!/usr/bin/env python3
"""Rewritten models hold in other people's hands: onnx's checker accepts each file that `engraft rewrite` writes,
onnxruntime computes what it computes for the original, and the file, rewritten again, is the same graph of the same
structure. Rewritten for packed documents, it computes for each what the original computes for it alone.

usage: rewritten.py ENGRAFT SCRATCH MODEL...     exit 77 = skipped
"""
import json, os, subprocess, sys

try:
    import numpy as np, onnx, onnxruntime
    from safetensors.numpy import load_file, save_file
except ImportError as problem:
    print("skipped:", problem)
    sys.exit(77)

SIZES = [(2, 7), (1, 1)]


def inputs_of(model, batch, sequence, head_dim):
    """Caches are empty, the last row is padded; a cache of an unnamed width is as wide as a head."""
    generator = np.random.default_rng(batch * 100 + sequence)
    feeds = {}
    for value in model.graph.input:
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim]
        shape = [d if isinstance(d, int) else 0 if "past" in d and "total" not in d else batch if "batch" in d else sequence
                 for d in dims]
        if len(shape) == 4 and not isinstance(dims[3], int):
            shape[3] = head_dim
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name == "attention_mask":
            numbers = np.ones(shape)
            numbers[-1, (sequence + 1) // 2:] = 0
        elif value.name == "position_ids":
            numbers = np.broadcast_to(np.arange(sequence), shape)
        elif np.issubdtype(kind, np.integer):
            numbers = generator.integers(0, 48, shape)
        else:
            numbers = generator.standard_normal(shape)
        feeds[value.name] = numbers.astype(kind)
    return feeds


def session_of(model):
    """Products with activations rounded to int8 are computed with float32 ones: the files are held to the same numbers."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def logits_of(engraft, path, model, feeds, scratch):
    """By onnxruntime; by engraft where that has no kernel for a type or an operator's attributes."""
    names = {value.name for value in model.graph.input}
    try:
        return session_of(model).run(["logits"], {k: v for k, v in feeds.items() if k in names})[0], "onnxruntime"
    except Exception:
        files = [os.path.join(scratch, "in.safetensors"), os.path.join(scratch, "out.safetensors")]
        save_file({k: np.ascontiguousarray(v) for k, v in feeds.items() if v.size > 0}, files[0])
        subprocess.run([engraft, "run", path, "--inputs", files[0], "--outputs", files[1], "--external-root", "/"],
                       check=True, capture_output=True)
        return load_file(files[1])["logits"], "engraft"


def compare(engraft, paths, head_dim, scratch):
    models, runners = [onnx.load(path) for path in paths], set()
    narrow = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    is_narrow = any(tensor.data_type in narrow for tensor in models[0].graph.initializer)
    for batch, sequence in SIZES:
        feeds = inputs_of(models[0], batch, sequence, head_dim)
        results = [logits_of(engraft, path, model, feeds, scratch) for path, model in zip(paths, models)]
        keep = feeds["attention_mask"][:, -sequence:] != 0 if "attention_mask" in feeds else np.ones((batch, sequence), bool)
        want, got = (logits[keep].astype(np.float64) for logits, _ in results)
        runners.add(" and ".join(runner for _, runner in results))
        limit, error = (3e-2 if is_narrow else 1e-4) * np.abs(want).max(), np.abs(want - got).max()
        if not error <= limit:
            return f"differs by {error:.2e}, more than {limit:.2e}, at batch {batch}, sequence {sequence} ({runners})"
    if runners != {"onnxruntime and onnxruntime"}:
        print("  original and rewritten file by", ", ".join(sorted(runners)))
    return None


def compare_packed(engraft, path, new, head_dim, scratch):
    """A row of three documents, one of them a single token, with room for more."""
    packed, lengths = os.path.join(scratch, "packed.onnx"), [4, 1, 6]
    subprocess.run([engraft, "rewrite", new, "--passes", "cache_metadata", "-o", packed, "--external-root", "/"], check=True)
    model, original = onnx.load(packed), onnx.load(path)
    if [value.name for value in model.graph.input] != ["input_ids", "engraft.cu_seqlens"]:
        return "is not packed"
    onnx.checker.check_model(packed, full_check=True)
    is_narrow = any(tensor.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
                    for tensor in original.graph.initializer)
    alone = [inputs_of(original, 1, length, head_dim) for length in lengths]
    for feeds in alone:
        if "attention_mask" in feeds:
            feeds["attention_mask"][:] = 1
    wanted = [logits_of(engraft, path, original, feeds, scratch)[0] for feeds in alone]
    feeds = {"input_ids": np.concatenate([feeds["input_ids"] for feeds in alone], 1),
             "engraft.cu_seqlens": np.array([0, 4, 5, 11, 11], np.int32)}
    try:
        got = session_of(model).run(["logits"], feeds)[0].astype(np.float64)
    except Exception:
        return None  # a type that onnxruntime has no kernel for; engraft packs in training
    want = np.concatenate(wanted, 1).astype(np.float64)
    limit, error = (3e-2 if is_narrow else 1e-4) * np.abs(want).max(), np.abs(want - got).max()
    return None if error <= limit else f"differs by {error:.2e}, more than {limit:.2e}, when it is packed"


def check(engraft, path, scratch):
    new, again, texts = os.path.join(scratch, "new.onnx"), os.path.join(scratch, "again.onnx"), []
    for source, target in ((path, new), (new, again)):
        subprocess.run([engraft, "rewrite", source, "-o", target, "--external-root", "/"], check=True)
        text = os.path.join(scratch, "text")
        subprocess.run([engraft, "rewrite", target, "--text", "-o", text, "--external-root", "/"], check=True)
        texts.append(open(text).read())
    if texts[0] != texts[1]:
        return "is another graph when it is rewritten again"
    structures = [json.loads(subprocess.run([engraft, "inspect", file, "--json", "--external-root", "/"], check=True,
                                            capture_output=True).stdout)["structure"] for file in (path, new)]
    if structures[0] != structures[1]:
        return f"is another model: {structures}"
    onnx.checker.check_model(new, full_check=True)
    problem = compare(engraft, (path, new), structures[0]["head_dim"], scratch)
    return problem or compare_packed(engraft, path, new, structures[0]["head_dim"], scratch)


def main():
    engraft, scratch, failures = sys.argv[1], sys.argv[2], 0
    os.makedirs(scratch, exist_ok=True)
    for path in sys.argv[3:]:
        try:
            problem = check(engraft, path, scratch)
        except Exception as error:
            problem = repr(error)[:600]
        print("ok    " if problem is None else "FAILED", path, problem or "", flush=True)
        failures += problem is not None
    sys.exit(1 if failures else 0)


main()
