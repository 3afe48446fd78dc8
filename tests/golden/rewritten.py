#!/usr/bin/env python3
"""Rewritten models hold in other people's hands: onnx's checker accepts each file that `engraft rewrite` writes,
onnxruntime computes what it computes for the original, and the file, rewritten again, is the same graph of the same
structure. Rewritten for packed documents, it computes for each what the original computes for it alone. The whole training
graph leaves, too: onnxruntime gives the loss and the gradients that `engraft train` and `engraft run` give, and the file
is the same training graph when it is read again.

usage: rewritten.py ENGRAFT SCRATCH MODEL...     exit 77 = skipped
"""
import json, os, subprocess, sys

from runtimes import check_each, dtype_of, load_file, make_scratch, np, onnx, onnxruntime, save_file, session_of, shape_of
from runtimes import structure_of, write_documents

SIZES = [(2, 7), (1, 1)]


def inputs_of(model, batch, sequence, head_dim):
    """Caches are empty, the last row is padded; a cache of an unnamed width is as wide as a head."""
    generator = np.random.default_rng(batch * 100 + sequence)
    feeds = {}
    for value in model.graph.input:
        dims, kind = shape_of(value), dtype_of(value)
        shape = [d if isinstance(d, int) else 0 if "past" in d and "total" not in d else batch if "batch" in d else sequence
                 for d in dims]
        if len(shape) == 4 and not isinstance(dims[3], int):
            shape[3] = head_dim
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


DOCUMENTS = [9, 1, 10, 4]


def training_feeds(model, head_dim):
    """A packed row of documents with room for more, or padded rows of them; parameters with names as in PEFT's files."""
    generator = np.random.default_rng(7)
    documents = [generator.integers(0, 48, n) for n in DOCUMENTS]
    is_packed = any(value.name == "engraft.cu_seqlens" for value in model.graph.input)
    tokens = [np.concatenate(documents)] if is_packed else documents
    longest, ends = max(map(len, tokens)), np.cumsum([0] + DOCUMENTS)
    ids, labels, mask = (np.full((len(tokens), longest), fill) for fill in (0, -100, 0))
    for row, document in enumerate(tokens):
        ids[row, :len(document)], mask[row, :len(document)] = document, 1
        labels[row, :len(document) - 1] = document[1:]
    if is_packed:
        labels[0, ends[1:] - 1] = -100
    known = {"input_ids": ids, "engraft.labels": labels, "attention_mask": mask,
             "position_ids": np.broadcast_to(np.arange(longest), ids.shape),
             "engraft.cu_seqlens": np.concatenate([ends, ends[-1:]])}
    feeds = {}
    for value in model.graph.input:
        dims, kind = shape_of(value), dtype_of(value)
        if value.name in known:
            numbers = known[value.name]
        elif value.name == "engraft.step":
            numbers = np.zeros(dims)
        elif all(isinstance(d, int) for d in dims):
            numbers = generator.standard_normal(dims) * 0.1
        else:
            raise ValueError(f"training graph: what is the input {value.name} {dims}?")
        feeds[value.name] = np.ascontiguousarray(numbers.astype(kind))
    return feeds, documents


def trained(engraft, path, feeds, documents, scratch):
    """Gradients of the mean loss that `engraft train` gives for the same parameters and documents."""
    adapter, data = os.path.join(scratch, "adapter"), os.path.join(scratch, "documents.jsonl")
    os.makedirs(adapter, exist_ok=True)
    parameters = {name: value for name, value in feeds.items() if name.startswith("base_model.")}
    save_file(parameters, os.path.join(adapter, "adapter_model.safetensors"))
    modules = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in parameters})
    with open(os.path.join(adapter, "adapter_config.json"), "w") as file:
        json.dump({"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": modules}, file)
    write_documents(data, documents)
    gradients, log = os.path.join(scratch, "gradients.safetensors"), os.path.join(scratch, "log.jsonl")
    subprocess.run([engraft, "train", path, "--data", data, "--out", os.path.join(scratch, "run"), "--init-adapter", adapter,
                    "--steps", "1", "--tokens", "64", "--dump-gradients", gradients, "--log", log, "--external-root", "/"],
                   check=True, capture_output=True)
    return load_file(gradients), json.loads(open(log).readline())["loss"]


def products_left(model, scratch):
    """Products and softmaxes that are left when onnxruntime has joined equal nodes."""
    options, path = onnxruntime.SessionOptions(), os.path.join(scratch, "optimized.onnx")
    options.log_severity_level, options.optimized_model_filepath = 4, path
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return sum("MatMul" in node.op_type or node.op_type == "Softmax" for node in onnx.load(path).graph.node)


def compare_training(engraft, path, head_dim, scratch, checkpoint, left):
    whole, again, texts = os.path.join(scratch, "training.onnx"), os.path.join(scratch, "training_again.onnx"), []
    subprocess.run([engraft, "rewrite", path, "--passes", "training", "--rank", "4", "--tokens", "64",
                    "--checkpoint", checkpoint, "-o", whole, "--external-root", "/"], check=True)
    for source, target in ((whole, again), (again, None)):
        text = os.path.join(scratch, "text")
        subprocess.run([engraft, "rewrite", source, "--passes", "eliminate_dead", "--text", "-o", text, "--external-root", "/"], check=True)
        texts.append(open(text).read())
        if target:
            subprocess.run([engraft, "rewrite", source, "--passes", "eliminate_dead", "-o", target, "--external-root", "/"], check=True)
    if texts[0] != texts[1]:
        return "is another training graph when it is read again"
    model = onnx.load(whole)
    own = {node.op_type for node in model.graph.node if node.domain == "engraft"}
    missing = own - {function.name for function in model.functions}
    if ("Barrier" in own) != (checkpoint == "recompute"):
        return "recomputes where it was not asked to, or does not"
    if missing:
        return f"has no bodies for {sorted(missing)} of its training graph"
    inlined = [line for line in texts[0].splitlines() if " = engraft." in line]
    if len(inlined) != sum(node.domain == "engraft" for node in model.graph.node):
        return "is not read again as the operators that were written"
    onnx.checker.check_model(whole, full_check=True)
    left.append(products_left(model, scratch))
    feeds, documents = training_feeds(model, head_dim)
    wanted, loss = trained(engraft, path, feeds, documents, scratch)
    files = [os.path.join(scratch, "in.safetensors"), os.path.join(scratch, "out.safetensors")]
    save_file({k: v for k, v in feeds.items() if v.size > 0}, files[0])
    subprocess.run([engraft, "run", whole, "--inputs", files[0], "--outputs", files[1], "--external-root", "/"], check=True)
    ran, session = load_file(files[1]), session_of(model)
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(names, feeds)))
    targets = sum(n - 1 for n in DOCUMENTS)
    for name, got in results.items():
        base = name.removeprefix("engraft.gradient.")
        want = {"engraft.loss": np.float64(loss) * targets, "engraft.logp": ran["engraft.logp"]}.get(name)
        if want is None:
            want = wanted[base].astype(np.float64) * targets
        limit = 3e-5 * max(np.abs(want).max(), 1e-3)
        for other in (want, ran[name]):
            error = np.abs(got.astype(np.float64) - other).max()
            if not error <= limit:
                return f"trains differently: {name} by {error:.2e}, more than {limit:.2e}"
    if len(results) != len(wanted) + 2:
        return f"gives {len(results) - 2} gradients, training {len(wanted)}"
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
    structures = [structure_of(engraft, file) for file in (path, new)]
    if structures[0] != structures[1]:
        return f"is another model: {structures}"
    onnx.checker.check_model(new, full_check=True)
    problem = compare(engraft, (path, new), structures[0]["head_dim"], scratch)
    problem = problem or compare_packed(engraft, path, new, structures[0]["head_dim"], scratch)
    left = []
    for checkpoint in ("off", "recompute"):
        problem = problem or compare_training(engraft, path, structures[0]["head_dim"], scratch, checkpoint, left)
    if not problem and left[1] <= left[0]:
        return f"recomputes nothing in onnxruntime: {left} products are left"
    return problem


def main():
    engraft, scratch = sys.argv[1], make_scratch(sys.argv[2])

    def report(path):
        problem = check(engraft, path, scratch)
        if problem is not None:
            raise RuntimeError(problem)
        return "same"

    check_each(sys.argv[3:], report)


main()
