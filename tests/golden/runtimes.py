"""What the golden scripts share: the engraft command, onnxruntime's sessions, documents and adapters. Importing it ends a
script with exit 77 where onnx, onnxruntime or safetensors are missing.
"""
import json, os, subprocess, sys

try:
    import numpy as np, onnx, onnxruntime
    from safetensors.numpy import load_file, save_file
except ImportError as problem:
    print("skipped:", problem)
    sys.exit(77)

EXPERTS = "mlp.experts.gate_up_proj,mlp.experts.down_proj"


def run(engraft, *arguments):
    done = subprocess.run([engraft, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"engraft {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


def structure_of(engraft, path):
    return json.loads(run(engraft, "inspect", path, "--json", "--external-root", "/"))["structure"]


def session_of(model):
    """Products with activations rounded to int8 are computed with float32 ones: files are held to the same numbers."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def shape_of(value):
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim]


def dtype_of(value):
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def write_documents(path, documents):
    with open(path, "w") as file:
        for document in documents:
            print(json.dumps({"input_ids": [int(token) for token in document]}), file=file)


def train_adapter(engraft, path, scratch, *more):
    """An adapter in SCRATCH/adapter whose every B has moved a lot."""
    generator = np.random.default_rng(0)
    write_documents(f"{scratch}/data.jsonl", [generator.integers(0, 48, 12) for _ in range(4)])
    run(engraft, "train", path, "--data", f"{scratch}/data.jsonl", "--out", f"{scratch}/adapter", "--steps", 4, "--lr",
        0.03, "--rank", 3, "--alpha", 7, "--tokens", 64, "--external-root", "/", *more)


def engraft_logits(engraft, path, ids, scratch, *more):
    save_file({"input_ids": ids}, f"{scratch}/in.safetensors")
    run(engraft, "run", path, "--inputs", f"{scratch}/in.safetensors", "--outputs", f"{scratch}/out.safetensors",
        "--external-root", "/", *more)
    return load_file(f"{scratch}/out.safetensors")["logits"]


def check_each(paths, check):
    """Prints what `check` says of each path, and leaves with 1 when it raised for one of them."""
    failures = 0
    for path in paths:
        name = "/".join(path.rstrip("/").split("/")[-2:])
        try:
            print(f"ok     {name}: {check(path)}", flush=True)
        except Exception as problem:
            failures += 1
            print(f"FAILED {name}: {str(problem)[:600] or repr(problem)}", flush=True)
    sys.exit(failures > 0)


def make_scratch(path):
    os.makedirs(path, exist_ok=True)
    return path
