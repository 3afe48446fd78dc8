#!/usr/bin/env python3
"""Rewritten models hold in other people's hands: onnx's checker accepts each file that `engraft rewrite` writes,
onnxruntime computes what it computes for the original, and the file, rewritten again, is the same graph of the same
structure.

usage: rewritten.py ENGRAFT SCRATCH MODEL...     exit 77 = skipped
"""
import json, os, subprocess, sys

try:
    import numpy as np, onnx, onnxruntime
except ImportError as problem:
    print("skipped:", problem)
    sys.exit(77)

SIZES = [(2, 7), (1, 1)]


def inputs_of(session, batch, sequence, head_dim):
    """Caches are empty, the last row is padded; a cache of an unnamed width is as wide as a head."""
    generator = np.random.default_rng(batch * 100 + sequence)
    feeds = {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else 0 if "past" in d and "total" not in d else batch if "batch" in d else sequence
                 for d in value.shape]
        if len(shape) == 4 and not isinstance(value.shape[3], int):
            shape[3] = head_dim
        if value.name == "attention_mask":
            mask = np.ones(shape)
            mask[-1, (sequence + 1) // 2:] = 0
            feeds[value.name] = mask
        elif value.name == "position_ids":
            feeds[value.name] = np.broadcast_to(np.arange(sequence), shape)
        elif "int" in value.type:
            feeds[value.name] = generator.integers(0, 48, shape)
        else:
            feeds[value.name] = generator.standard_normal(shape)
        kind = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32,
                "tensor(bool)": bool, "tensor(float16)": np.float16}[value.type]
        feeds[value.name] = feeds[value.name].astype(kind)
    return feeds


def session_of(path):
    """Products with activations rounded to int8 are computed with float32 ones: the files are held to the same numbers."""
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compare(old, new, head_dim):
    names = {value.name for value in new.get_inputs()}
    for batch, sequence in SIZES:
        feeds = inputs_of(old, batch, sequence, head_dim)
        try:
            want = old.run(["logits"], feeds)[0]
        except Exception as problem:
            print("  the original does not run:", str(problem)[:300])
            return None
        got = new.run(["logits"], {k: v for k, v in feeds.items() if k in names})[0]
        keep = feeds["attention_mask"][:, -sequence:] != 0 if "attention_mask" in feeds else np.ones((batch, sequence), bool)
        limit = (3e-2 if want.dtype == np.float16 else 1e-4) * np.abs(want).max()
        error = np.abs(want[keep].astype(np.float64) - got[keep].astype(np.float64)).max()
        if not error <= limit:
            return f"differs by {error:.2e}, more than {limit:.2e}, at batch {batch}, sequence {sequence}"
    return None


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
    try:
        old = session_of(path)
    except Exception as problem:
        print("  the original does not load:", str(problem)[:200])
        return None
    return compare(old, session_of(new), structures[0]["head_dim"])


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
