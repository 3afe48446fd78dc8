#!/usr/bin/env python3
"""engraft on the CPU beside onnxruntime and PyTorch, on the same file, machine and threads, in one run.

usage: cpu.py ENGRAFT MODEL.onnx NAME [--tokens 512] [--threads 2] [--rounds 3] [--out results/NAME.json]

Forward: engraft bench and onnxruntime take turns, --rounds times each; the figure is the median of the rounds' medians.
Step: engraft's LoRA step (r = 16 on every linear but the head, AdamW) against its own forward. With torch, transformers
and peft installed, and --config CONFIG.json (a Hugging Face config of the same shape), the same step in PyTorch too.
"""
import argparse, json, os, platform, statistics, subprocess, sys, time


def engraft(arguments):
    command = [arguments.engraft, "bench", arguments.model, "--tokens", str(arguments.tokens), "--steps",
               str(arguments.runs), "--threads", str(arguments.threads), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def vocabulary_size(path):
    import onnx
    dims = onnx.load(path, load_external_data=False).graph.output[0].type.tensor_type.shape.dim
    return dims[-1].dim_value


def timed(call, runs, warm=3):
    for _ in range(warm):
        call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def onnxruntime_session(arguments):
    import numpy, onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(arguments.model, options, providers=["CPUExecutionProvider"])
    row = (1, arguments.tokens)
    feed = dict(input_ids=numpy.random.default_rng(0).integers(0, vocabulary_size(arguments.model), row),
                attention_mask=numpy.ones(row, numpy.int64), position_ids=numpy.arange(arguments.tokens)[None])
    return onnxruntime.__version__, lambda: session.run(None, feed)


def torch_steps(arguments):
    import torch, transformers, peft
    torch.set_num_threads(arguments.threads)
    config = transformers.AutoConfig.for_model(**json.load(open(arguments.config)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(0, config.vocab_size, (1, arguments.tokens))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        forward = timed(lambda: model(input_ids=ids, attention_mask=mask, use_cache=False), arguments.runs)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-4)

    def step():
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return dict(version=torch.__version__, forward_s=forward, step_s=timed(step, arguments.runs))


def processor():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit():
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engraft"), parser.add_argument("model"), parser.add_argument("name")
    parser.add_argument("--tokens", type=int, default=512), parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3), parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--config"), parser.add_argument("--out")
    arguments = parser.parse_args()
    version, forward = onnxruntime_session(arguments)
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        ours.append(engraft(arguments))
        theirs.append(timed(forward, arguments.runs))
    median = lambda key: statistics.median(round[key] for round in ours)
    result = dict(case=arguments.name, commit=commit(), processor=processor(), threads=arguments.threads,
                  tokens=arguments.tokens, command="bench/cpu.py " + " ".join(os.path.basename(a) for a in sys.argv[1:]),
                  engraft=dict(forward_s=median("forward_s"), step_s=median("step_s"), peak_bytes=median("peak_bytes")),
                  onnxruntime=dict(version=version, forward_s=statistics.median(theirs)))
    result["forward_speed_over_onnxruntime"] = round(result["onnxruntime"]["forward_s"] / median("forward_s"), 3)
    result["step_over_forward"] = round(median("step_s") / median("forward_s"), 3)
    if arguments.config:
        result["pytorch"] = torch_steps(arguments)
        result["step_speed_over_pytorch"] = round(result["pytorch"]["step_s"] / median("step_s"), 3)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        open(arguments.out, "w").write(text + "\n")


main()
