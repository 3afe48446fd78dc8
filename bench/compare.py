#!/usr/bin/env python3
"""A QLoRA step of engraft beside transformers + PEFT + bitsandbytes, with and without Liger's kernels, on one GPU.

usage: compare.py CONFIG.json NAME [--engraft build/engraft] [--batch 2] [--sequence 4096] [--rank 16] [--steps 10]
                  [--checkpoint] [--peers plain,liger] [--out results/NAME.json]

CONFIG.json is a Hugging Face config; weights are random. Base in NF4 with double quantisation, adapters of rank --rank
on every linear layer but the head, bfloat16, AdamW, rows of --sequence tokens that are all trained on. The figures are
medians of --steps steps after 3; memory is the most that the driver reports for the process. A peer that is not
installed, or does not fit, is named with its reason.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, threading, time

WARM = 3


class Memory:
    """Most device memory in use, as the driver reports it, sampled beside the work; GiB above what was in use before."""

    def __enter__(self):
        import pynvml
        pynvml.nvmlInit()
        self.read = lambda: pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
        self.before = self.peak = self.read()
        self.is_done = False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.is_done:
            self.peak = max(self.peak, self.read())
            time.sleep(0.02)

    def __exit__(self, *_):
        self.is_done = True
        self.thread.join()
        self.gib = round((self.peak - self.before) / 2**30, 2)


def quantise(model):
    """Every linear layer but the head as NF4 codes, quantised on the device."""
    import bitsandbytes, torch
    for name, module in list(model.named_modules()):
        for child, linear in list(module.named_children()):
            if not isinstance(linear, torch.nn.Linear) or child == "lm_head":
                continue
            new = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                                             compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4",
                                             device="meta")
            new.weight = bitsandbytes.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4",
                                                    compress_statistics=True).to("cuda")
            if linear.bias is not None:
                new.bias = torch.nn.Parameter(linear.bias.data, requires_grad=False)
            setattr(module, child, new)
    model.is_loaded_in_4bit = True


def build(arguments, is_liger):
    import peft, torch, transformers
    config = transformers.AutoConfig.for_model(**json.load(open(arguments.config)))
    if is_liger:
        from liger_kernel.transformers import _apply_liger_kernel
        _apply_liger_kernel(config.model_type)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16,
                                                              attn_implementation="sdpa")
    quantise(model)
    model.requires_grad_(False)
    if arguments.checkpoint:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=arguments.rank, lora_alpha=arguments.rank,
                                                       target_modules="all-linear"))
    model.train()
    return config, model


def peer(arguments, is_liger):
    import torch
    with Memory() as memory:
        config, model = build(arguments, is_liger)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=2e-4, fused=True)
        ids = torch.randint(0, config.vocab_size, (arguments.batch, arguments.sequence), device="cuda")
        seconds = []
        for _ in range(WARM + arguments.steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return dict(step_s=statistics.median(seconds[WARM:]), memory_gib=memory.gib)


def peer_in_own_process(arguments, name):
    """Its memory is gone with it, and a peer that runs out of memory takes nothing along."""
    command = [sys.executable, os.path.abspath(__file__), arguments.config, name, "--as-peer", name, "--batch",
               str(arguments.batch), "--sequence", str(arguments.sequence), "--rank", str(arguments.rank), "--steps",
               str(arguments.steps)] + (["--checkpoint"] if arguments.checkpoint else [])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    return dict(failed=(done.stderr.strip().splitlines() or ["no reason given"])[-1][:300])


def engraft(arguments):
    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        model = os.path.join(folder, "model.onnx")
        subprocess.run([arguments.engraft, "new", "--config", arguments.config, "--random-weights", "1", "-o", model],
                       check=True, capture_output=True)
        command = [arguments.engraft, "bench", model, "--device", "cuda", "--dtype", "bf16", "--quant", "nf4", "--rank",
                   str(arguments.rank), "--alpha", str(arguments.rank), "--tokens",
                   str(arguments.batch * arguments.sequence), "--sequence", str(arguments.sequence), "--steps",
                   str(arguments.steps), "--checkpoint", "recompute" if arguments.checkpoint else "off", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return dict(failed=done.stderr.strip()[:300])
    return dict(json.loads(done.stdout), memory_gib=memory.gib)


def describe():
    import importlib.metadata as metadata
    names = ("torch", "transformers", "peft", "bitsandbytes", "liger_kernel")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    here = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return dict(device=device, versions=versions, commit=commit.stdout.strip() or os.environ.get("ENGRAFT_COMMIT", ""),
                date=time.strftime("%Y-%m-%d"))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("config"), parser.add_argument("name"), parser.add_argument("--engraft", default="build/engraft")
    parser.add_argument("--batch", type=int, default=2), parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16), parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", action="store_true"), parser.add_argument("--peers", default="plain,liger")
    parser.add_argument("--out"), parser.add_argument("--as-peer", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.as_peer:
        print(json.dumps(peer(arguments, arguments.as_peer == "liger")))
        return
    tokens = arguments.batch * arguments.sequence
    runs = {"engraft": engraft(arguments)}
    for name in filter(None, arguments.peers.split(",")):
        runs[name] = peer_in_own_process(arguments, name)
    for run in runs.values():
        if "step_s" in run:
            run["tokens_per_s"] = round(tokens / run["step_s"], 1)
    best = max((runs[name].get("tokens_per_s", 0) for name in runs if name != "engraft"), default=0)
    result = dict(case=arguments.name, **describe(), command="bench/compare.py " + " ".join(sys.argv[1:]), tokens=tokens,
                  runs=runs)
    if best and "tokens_per_s" in runs["engraft"]:
        result["speed_over_best_peer"] = round(runs["engraft"]["tokens_per_s"] / best, 3)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        open(arguments.out, "w").write(text + "\n")


main()
