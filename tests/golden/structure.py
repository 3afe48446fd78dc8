#!/usr/bin/env python3
"""Every file of a model is one model: `engraft inspect` gives the same structure for each of them and for the file that
`engraft new` makes of the Hugging Face folder, with nothing left in the layers and the modules that PEFT would list; and
ten training steps with fused operators and with their bodies give the same curve and first gradients. Standard library.

usage: structure.py ENGRAFT WORK MODEL_FOLDER...     exit 77 = skipped
A folder holds model.*.onnx, and may hold meta.json (lora_targets) and hf/. Rows of tokens are made here.
"""
import array, glob, json, math, os, random, shutil, struct, subprocess, sys

LIMIT = 1e-5  # relative, of fused and unfused


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1][:300])
    return done.stdout


def files_of(engraft, work, folder):
    files = sorted(glob.glob(os.path.join(folder, "model.*.onnx")))
    if os.path.exists(os.path.join(folder, "hf", "config.json")):
        own = os.path.join(work, os.path.basename(folder.rstrip("/")))  # a model lies beside the weights it refers to
        shutil.copytree(os.path.join(folder, "hf"), own, dirs_exist_ok=True)
        made = os.path.join(own, "model.new.onnx")
        run([engraft, "new", "--weights", own, "-o", made])
        files.append(made)
    return files


def differing(a, b):
    if not isinstance(a, dict) or not isinstance(b, dict):
        return f"{a} and {b}" if a != b else ""
    return ", ".join(f"{k}: {differing(a.get(k), b.get(k))}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k))


def check_structure(engraft, path, wanted_targets, first):
    told = json.loads(run([engraft, "inspect", path, "--json"]))
    structure, problems = told["structure"], []
    if structure["counts"]["other"] != 0:
        problems.append(f"{structure['counts']['other']} nodes in the layers are not recognised")
    if first is not None and structure != first:
        problems.append("structure differs: " + differing(first, structure))
    leaves = sorted({target.rsplit(".", 1)[-1] for target in told["targets"]})
    if wanted_targets is not None and leaves != sorted(wanted_targets):
        problems.append(f"targets {leaves}, not {sorted(wanted_targets)}")
    return structure, problems


def write_rows(path, vocab):
    chooser = random.Random(4)
    with open(path, "w") as out:
        for length in (13, 9, 11, 5):
            out.write(json.dumps({"input_ids": [chooser.randrange(3, vocab) for _ in range(length)]}) + "\n")


def read_tensors(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for key, row in json.loads(data[8:8 + size]).items():
        if key != "__metadata__":
            values = array.array("f")
            values.frombytes(data[8 + size + row["data_offsets"][0]:8 + size + row["data_offsets"][1]])
            tensors[key] = values
    return tensors


def train(engraft, work, path, rows, extra):
    out = os.path.join(work, "run" + "".join(extra))
    run([engraft, "train", path, "--data", rows, "--out", out, "--steps", "10", "--lr", "5e-3", "--rank", "4",
         "--init", "gaussian", "--tokens", "52", "--log", out + ".jsonl", "--dump-gradients", out + ".safetensors", *extra])
    curve = [json.loads(line)["loss"] for line in open(out + ".jsonl") if '"step"' in line]
    return curve, read_tensors(out + ".safetensors")


def check_training(engraft, work, path, vocab):
    rows = os.path.join(work, "rows.jsonl")
    write_rows(rows, vocab)
    fused, plain = (train(engraft, work, path, rows, extra) for extra in ([], ["--no-fuse"]))
    problems = []
    worst = max((abs(a - b) / abs(b) for a, b in zip(fused[0], plain[0])), default=math.inf)
    if len(fused[0]) != 10 or len(plain[0]) != 10 or not worst <= LIMIT:
        problems.append(f"curves with and without fusion differ by {worst:.1e}")
    largest = max((abs(x) for values in plain[1].values() for x in values), default=0.0)
    if fused[1].keys() != plain[1].keys() or not largest > 0.0:
        problems.append("gradients with and without fusion are not of the same modules")
        return problems
    worst = max(abs(a - b) for key in plain[1] for a, b in zip(fused[1][key], plain[1][key])) / largest
    if not worst <= LIMIT:
        problems.append(f"gradients with and without fusion differ by {worst:.1e}")
    return problems


def check_folder(engraft, work, folder):
    wanted, first, failures = None, None, 0
    meta = os.path.join(folder, "meta.json")
    if os.path.exists(meta):
        wanted = json.load(open(meta))["lora_targets"]
    try:
        files = files_of(engraft, work, folder)
    except Exception as problem:
        print("FAILED", folder, problem)
        return 1
    for path in files:
        problems = []
        try:
            structure, problems = check_structure(engraft, path, wanted, first)
            first = first or structure
            problems += check_training(engraft, work, path, structure["vocab"])
        except Exception as problem:
            problems.append(str(problem) or repr(problem))
        print("FAILED" if problems else "ok    ", path, "; ".join(problems), flush=True)
        failures += bool(problems)
    return failures


def main():
    engraft, work, folders = sys.argv[1], sys.argv[2], sys.argv[3:]
    folders = [folder for folder in folders if glob.glob(os.path.join(folder, "model.*.onnx"))]
    if not folders:
        print("skipped: no models")
        sys.exit(77)
    os.makedirs(work, exist_ok=True)
    sys.exit(1 if sum(check_folder(engraft, work, folder) for folder in folders) else 0)


main()
