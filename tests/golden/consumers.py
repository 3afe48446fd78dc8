#!/usr/bin/env python3
"""Adapters trained here give engraft's logits in PEFT and in llama.cpp. For each file of a model whose Hugging Face folder
is there: PEFT loads what `engraft train` saved and what `engraft export --portable` makes of it; llama.cpp loads the GGUF
adapter beside the folder's weights as a GGUF base. Mixtures are tried with adapters on their experts, too. What is not
installed (torch, transformers and peft; gguf and xllamacpp) is not tried and said so; exit 77 where that is both.

usage: consumers.py ENGRAFT SCRATCH MODEL_FOLDER...     a folder holds hf/ and may hold model.*.onnx
"""
import glob, os, shutil, sys, warnings

from runtimes import EXPERTS, check_each, engraft_logits, make_scratch, np, onnx, run, structure_of, train_adapter

warnings.filterwarnings("ignore")
missing = []
try:
    import torch, transformers
    from peft import PeftModel
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
except ImportError as problem:
    PeftModel = None
    missing.append(str(problem))
try:
    import llama_cpp
except ImportError as problem:
    llama_cpp = None
    missing.append(str(problem))
if len(missing) == 2:
    print("skipped:", "; ".join(missing))
    sys.exit(77)

TOLERANCE = 1e-4
NARROW = 5e-2  # weights of 16 bits here, of 32 there


def tolerance_of(path):
    """None: the file's weights are other numbers than the folder's."""
    model = onnx.load(path, load_external_data=False)
    if any(node.op_type in ("MatMulNBits", "MatMulBnb4", "QMoE") for node in model.graph.node):
        return None
    narrow = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    return NARROW if any(tensor.data_type in narrow for tensor in model.graph.initializer) else TOLERANCE


def peft_logits(folder, adapter, ids):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return PeftModel.from_pretrained(base, adapter)(input_ids=torch.tensor(ids)).logits.numpy()


def hold(what, got, want, tolerance, told):
    distance = float(np.abs(got - want).max())
    told.append(f"{what} {distance:.1e}")
    if not distance <= tolerance:
        raise RuntimeError(f"{what}: {distance:.1e} from engraft's logits")


def check_file(engraft, path, folder, scratch, base, tolerance, more):
    ids, told, adapter = np.random.default_rng(1).integers(0, 48, (2, 7)), [], f"{scratch}/adapter"
    train_adapter(engraft, path, scratch, *more)
    want = engraft_logits(engraft, path, ids, scratch, "--adapter", adapter)
    if PeftModel is not None:
        hold("PEFT", peft_logits(folder, adapter, ids), want, tolerance, told)
        shutil.rmtree(f"{scratch}/portable", ignore_errors=True)
        run(engraft, "export", path, "--adapter", adapter, "--format", "peft", "--portable", "-o", f"{scratch}/portable",
            "--external-root", "/")
        hold("portable", peft_logits(folder, f"{scratch}/portable", ids), want, tolerance, told)
    if base is not None:
        run(engraft, "export", path, "--adapter", adapter, "--format", "gguf", "-o", f"{scratch}/a.gguf",
            "--external-root", "/")
        # what llama.cpp computes otherwise without an adapter (it rounds where YaRN's ramp begins), it may with one
        own = float(np.abs(llama_cpp.logits(base, ids) - engraft_logits(engraft, path, ids, scratch)).max())
        if not own <= 1e-2 + tolerance:
            raise RuntimeError(f"llama.cpp: the base is {own:.1e} from engraft's logits")
        hold("llama.cpp", llama_cpp.logits(base, ids, f"{scratch}/a.gguf"), want, max(tolerance, 3 * own), told)
    return f"{os.path.basename(path)}{' experts' if more else ''}: {', '.join(told) or 'nothing to compare with'}"


def check(engraft, model, scratch):
    folder, base, told = f"{scratch}/hf", None, []
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(f"{model}/hf", folder)
    run(engraft, "new", "--weights", folder, "-o", f"{folder}/model.new.onnx")
    if llama_cpp is not None:
        base = f"{scratch}/base.gguf" if llama_cpp.convert(folder, f"{scratch}/base.gguf") else None
    for path in sorted(glob.glob(f"{model}/model.*.onnx")) + [f"{folder}/model.new.onnx"]:
        tolerance = tolerance_of(path)
        if tolerance is None:
            continue
        told.append(check_file(engraft, path, folder, scratch, base, tolerance, []))
        if structure_of(engraft, path)["experts"]:
            for names in (EXPERTS, *EXPERTS.split(",")):
                ranks = "q_proj=2,gate_up_proj=4" if "gate_up_proj" in names else "q_proj=2"
                more = ["--targets", "q_proj", "--target-parameters", names, "--rank-pattern", ranks]
                told.append(check_file(engraft, path, folder, scratch, base, tolerance, more))
    return "\n  ".join([f"{len(told)} adapters", *told])


def main():
    engraft, scratch = os.path.abspath(sys.argv[1]), make_scratch(sys.argv[2])
    for problem in missing:
        print("not tried:", problem)
    check_each(sys.argv[3:], lambda model: check(engraft, model, scratch))


main()
