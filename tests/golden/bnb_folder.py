#!/usr/bin/env python3
"""Folders that `engraft export --format bnb` writes, in transformers with bitsandbytes: every linear layer is a
Linear4bit, and the model with the matrices that bitsandbytes decodes of them computes what `engraft new` makes of the
folder.

usage: bnb_folder.py ENGRAFT SCRATCH MODEL-FOLDER...     a folder holds hf/ and model.*.onnx; exit 77 = skipped
"""
import glob, os, sys

try:
    import bitsandbytes, torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D
    import numpy as np
    from runtimes import engraft_logits, make_scratch, run
except ImportError as problem:
    print("skipped:", problem)
    sys.exit(77)

TOLERANCE = 1e-4


def decoded_logits(coded, source, ids):
    quantised = AutoModelForCausalLM.from_pretrained(coded, dtype=torch.float32, device_map="cpu")
    plain, count = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), 0
    for name, module in quantised.named_modules():
        if not isinstance(module, bitsandbytes.nn.Linear4bit):
            continue
        matrix = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        target = plain.get_submodule(name)
        target.weight.data = matrix.T.contiguous() if isinstance(target, Conv1D) else matrix
        count += 1
    with torch.no_grad():
        return plain(torch.from_numpy(ids)).logits.numpy(), count


def check(engraft, folder, scratch):
    models = glob.glob(f"{folder}/model.*float32*.onnx") + glob.glob(f"{folder}/model.dynamo*.onnx")
    model, coded = sorted(models)[0], f"{scratch}/bnb"
    ids, told = np.random.default_rng(1).integers(0, 48, (2, 7)), []
    for more in ([], ["--quant", "fp4", "--double-quant", "off"]):
        run(engraft, "export", model, "--format", "bnb", "--config", f"{folder}/hf/config.json", "-o", coded,
            "--quant-block", 32, *more)
        run(engraft, "new", "--weights", coded, "-o", f"{coded}/new.onnx")
        want, count = decoded_logits(coded, f"{folder}/hf", ids)
        distance = float(np.abs(engraft_logits(engraft, f"{coded}/new.onnx", ids, scratch) - want).max())
        told.append(f"{count} layers {distance:.1e}")
        if count < 4 or not distance <= TOLERANCE:
            raise RuntimeError(told[-1])
    return ", ".join(told)


def main():
    engraft, scratch = os.path.abspath(sys.argv[1]), make_scratch(sys.argv[2])
    for folder in sys.argv[3:]:
        print(os.path.basename(folder), check(engraft, folder, scratch), flush=True)


main()
