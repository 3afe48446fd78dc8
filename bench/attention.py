"""Speed and error of the CUDA packed attention beside PyTorch's kernels, in one process with the ceilings of the card.

    python bench/attention.py LIBRARY.so [-o bench/results/attention-h200.json] [--commit ID]

LIBRARY.so holds the launchers of backend/cuda/attention.h (target egi_cuda_attention_shared). FLOP are counted as
4 * head size * query heads * sum of length^2 / 2 forward and 2.5 times that backward (five products), whatever a kernel
really multiplies. Times are medians of CUDA events around single calls; the plan, made once a micro-batch and shared by
all layers, is timed by itself. What packed rows cost beyond their share is their time over that of 4 x 4096 in the same
run, each divided by its FLOP; packed rows are also timed as one of ten calls in a replayed graph, without what events and
launches add. Errors are against float64.
"""
import argparse
import ctypes
import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Attention(ctypes.Structure):
    _fields_ = [
        ("n_queries", ctypes.c_int64), ("n_keys", ctypes.c_int64),
        ("n_heads", ctypes.c_int32), ("n_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32), ("value_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int), ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
        ("query_offset", ctypes.c_int32), ("query_offset_device", ctypes.c_void_p),
        ("first_key", ctypes.c_void_p), ("last_query", ctypes.c_void_p), ("sinks", ctypes.c_void_p),
        ("q", Rows), ("k", Rows), ("v", Rows), ("out", Rows), ("lse", ctypes.c_void_p),
        ("d_out", Rows), ("d_q", Rows), ("d_k", Rows), ("d_v", Rows), ("d_sinks", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t), ("plan", ctypes.c_void_p)]


AUTO, MMA, SM90 = 0, 1, 2
NAMES = {AUTO: "auto", MMA: "mma", SM90: "sm90"}
PEERS = (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION))


def open_library(path):
    library = ctypes.CDLL(path)
    library.egi_cuda_attention_workspace.restype = ctypes.c_size_t
    library.egi_cuda_attention_plan_bytes.restype = ctypes.c_size_t
    library.egi_cuda_attention_plan.argtypes = [ctypes.POINTER(Attention), ctypes.c_void_p, ctypes.c_void_p]
    for name in ("forward", "backward"):
        function = getattr(library, "egi_cuda_attention_" + name)
        function.argtypes = [ctypes.POINTER(Attention), ctypes.c_int, ctypes.c_void_p]
        function.restype = ctypes.c_int
    return library


def median_ms(function, busy_ms=40):
    """Median of events around single calls; enough calls before and in between that the clocks are those of steady work."""
    def run(n):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
        for begin, end in events:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) for begin, end in events)[n // 2]

    run(3)
    n = min(max(int(busy_ms / max(run(3), 1e-3)), 11), 200)
    run(n)
    return run(n)


def replayed_ms(function, n=20):
    """For calls shorter than their launch: a captured graph of n of them."""
    graph = torch.cuda.CUDAGraph()
    function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(n):
            function()
    return median_ms(graph.replay, 4) / n


def copy_ceiling():
    src = torch.randn(1 << 29, device="cuda").view(torch.uint8)
    dst = torch.empty_like(src)
    return 2 * src.numel() / median_ms(lambda: dst.copy_(src)) / 1e9


def gemm_ceiling(n=8192):
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_ms(lambda: a @ b) / 1e9


class Problem:
    """Rows of documents, our kernels' view of them, and the same as dense tensors for PyTorch."""

    def __init__(self, library, lengths, n_heads, n_kv_heads, dim, dtype=torch.bfloat16, seed=1):
        self.library, self.lengths = library, lengths
        self.n_heads, self.n_kv_heads, self.dim = n_heads, n_kv_heads, dim
        rows = self.rows = sum(lengths)
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def draw(heads):
            return torch.randn(rows, heads, dim, device="cuda", generator=generator).to(dtype)

        self.q, self.k, self.v, self.d_out = draw(n_heads), draw(n_kv_heads), draw(n_kv_heads), draw(n_heads)
        self.out, self.d_q = torch.empty_like(self.q), torch.empty_like(self.q)
        self.d_k, self.d_v = torch.empty_like(self.k), torch.empty_like(self.v)
        self.lse = torch.empty(n_heads, rows, device="cuda")
        starts, ends, at = [], [], 0
        for length in lengths:
            starts += [at] * length
            ends += [at + length - 1] * length
            at += length
        self.first_key = torch.tensor(starts, device="cuda", dtype=torch.int32)
        self.last_query = torch.tensor(ends, device="cuda", dtype=torch.int32)
        self.flop = 4 * dim * n_heads * sum(n * n for n in lengths) / 2
        a = self.a = Attention()
        a.n_queries = a.n_keys = rows
        a.n_heads, a.n_kv_heads, a.head_dim, a.value_dim = n_heads, n_kv_heads, dim, dim
        a.dtype = 0 if dtype == torch.bfloat16 else 1
        a.scale = dim**-0.5
        a.first_key, a.last_query = self.first_key.data_ptr(), self.last_query.data_ptr()
        for name in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"):
            tensor = getattr(self, name)
            setattr(a, name, Rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1)))
        a.lse = self.lse.data_ptr()
        a.workspace_bytes = library.egi_cuda_attention_workspace(ctypes.byref(a), MMA, 1)
        self.workspace = torch.empty(a.workspace_bytes, device="cuda", dtype=torch.uint8)
        a.workspace = self.workspace.data_ptr()
        self.plan = torch.empty(library.egi_cuda_attention_plan_bytes(ctypes.byref(a)), device="cuda", dtype=torch.uint8)
        self.make_plan()
        a.plan = self.plan.data_ptr()

    def make_plan(self):
        stream = torch.cuda.current_stream().cuda_stream
        if self.library.egi_cuda_attention_plan(ctypes.byref(self.a), self.plan.data_ptr(), stream) != 0:
            raise RuntimeError("plan")

    def call(self, name, family):
        stream = torch.cuda.current_stream().cuda_stream
        status = getattr(self.library, "egi_cuda_attention_" + name)(ctypes.byref(self.a), family, stream)
        if status != 0:
            raise RuntimeError(f"{name} {NAMES[family]}: status {status}")

    def batched(self):
        """[batch, heads, length, dim] leaves for PyTorch; documents must be of one length."""
        batch = len(self.lengths)

        def shape(x):
            return x.view(batch, self.lengths[0], -1, self.dim).transpose(1, 2)

        leaves = [shape(x).detach().requires_grad_() for x in (self.q, self.k, self.v)]
        return leaves, shape(self.d_out)


def peer_times(problem, backend):
    (q, k, v), d_out = problem.batched()
    with sdpa_kernel(backend):
        def forward():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=problem.n_heads != problem.n_kv_heads)
        forward_ms = median_ms(forward)
        out = forward()
        backward_ms = median_ms(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    return forward_ms, backward_ms


def reference(problem):
    """out, d_q, d_k, d_v in float64, document by document."""
    parts = [[], [], [], []]
    at, group = 0, problem.n_heads // problem.n_kv_heads
    for length in problem.lengths:
        rows = slice(at, at + length)
        q, k, v = (x[rows].double().transpose(0, 1).detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * problem.dim**-0.5
        mask = torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1)
        out = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v.repeat_interleave(group, 0)
        grads = torch.autograd.grad(out, (q, k, v), problem.d_out[rows].double().transpose(0, 1))
        for part, x in zip(parts, (out, *grads)):
            part.append(x.detach().transpose(0, 1))
        at += length
    return [torch.cat(part) for part in parts]


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def compare_errors(library, families, dim, dtype):
    problem = Problem(library, [1024] * 2, 8, 2, dim, dtype, seed=3)
    want = reference(problem)
    table = {}
    for family in families:
        problem.call("forward", family)
        problem.call("backward", family)
        got = (problem.out, problem.d_q, problem.d_k, problem.d_v)
        table[NAMES[family]] = [error(x, y) for x, y in zip(got, want)]
    for name, backend in PEERS:
        try:
            (q, k, v), d_out = problem.batched()
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                grads = torch.autograd.grad(out, (q, k, v), d_out)
            flat = [x.detach().transpose(1, 2).reshape(y.shape) for x, y in zip((out, *grads), want)]
            table[name] = [error(x, y) for x, y in zip(flat, want)]
        except RuntimeError as reason:
            print(f"  {name}: {str(reason).splitlines()[0]}")
    return table


def rate(flop, ms):
    return flop / ms / 1e9


class Bench:
    def __init__(self, library, families, gemm):
        self.library, self.families, self.gemm, self.results = library, families, gemm, []

    def measure(self, title, lengths, heads, dim, with_peers):
        problem = Problem(self.library, lengths, *heads, dim)
        families = self.families if 64 <= dim <= 128 else [MMA]
        plan_ms = replayed_ms(problem.make_plan)
        rows = []
        in_graph = {}
        for family in families:
            calls = [(what, lambda what=what: problem.call(what, family)) for what in ("forward", "backward")]
            rows.append((NAMES[family], *(median_ms(call) for _, call in calls)))
            if len(set(lengths)) > 1:
                in_graph.update({(NAMES[family], what): replayed_ms(call, 10) for what, call in calls})
        for name, backend in PEERS if with_peers else ():
            try:
                rows.append((name, *peer_times(problem, backend)))
            except RuntimeError as reason:
                print(f"  {name}: {str(reason).splitlines()[0]}")
        title = f"d{dim} {heads[0]}/{heads[1]} {title}"
        whole = {(row["case"], row.get("kernels"), row.get("pass")): row["tflops"] for row in self.results if "pass" in row}
        for name, forward_ms, backward_ms in rows:
            for what, ms, flop in (("forward", forward_ms, problem.flop), ("backward", backward_ms, 2.5 * problem.flop)):
                row = self.report(title, name, ms, rate(flop, ms), what)
                of_whole = whole.get((f"d{dim} {heads[0]}/{heads[1]} 4 x 4096", name, what))
                if (name, what) in in_graph:
                    row["ms_in_graph"] = in_graph[name, what]
                if "packed" in title and of_whole:
                    row["cost_over_share"] = of_whole / row["tflops"]
        self.results.append({"case": title, "kernels": "plan", "ms": plan_ms})
        print(f"{title:28s} plan   {1000 * plan_ms:.1f} us")

    def report(self, title, name, ms, tflops, what):
        share = tflops / self.gemm
        print(f"{title:28s} {name:6s} {what:8s} {ms:7.3f} ms {tflops:4.0f} TFLOP/s {100 * share:3.0f} % of GEMM")
        row = {"case": title, "kernels": name, "pass": what, "ms": ms, "tflops": tflops, "share_of_gemm": share}
        self.results.append(row)
        return row


def packed_lengths(total, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(int(torch.randint(200, 1001, (1,), generator=generator)), total - sum(lengths)))
    return lengths


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("-o", "--output")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    library = open_library(arguments.library)
    families = [MMA, SM90] if torch.cuda.get_device_capability()[0] == 9 else [MMA]
    gemm, copy = gemm_ceiling(), copy_ceiling()
    print(f"{torch.cuda.get_device_name()}: bf16 GEMM 8192^3 {gemm:.0f} TFLOP/s, copy {copy:.2f} TB/s")
    errors = {}
    for dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            table = errors[f"d{dim} {str(dtype).split('.')[1]}"] = compare_errors(library, families, dim, dtype)
            for name, values in table.items():
                print(f"error d{dim} {str(dtype):15s} {name:6s} " + " ".join(
                    f"{part} {value:.2e}" for part, value in zip(("out", "dq", "dk", "dv"), values)))
    bench = Bench(library, families, gemm)
    for dim in (128, 64):
        for heads in ((32, 8), (32, 32)):
            bench.measure("4 x 4096", [4096] * 4, heads, dim, True)
        bench.measure("1 x 16384", [16384], (32, 8), dim, False)
        bench.measure("8 x 1024", [1024] * 8, (32, 8), dim, True)
        for seed in (1, 2):
            bench.measure(f"8192 packed {seed}", packed_lengths(8192, seed), (32, 8), dim, False)
    for dim in (80, 96, 256):
        bench.measure("4 x 4096", [4096] * 4, (32, 8), dim, True)
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump({"commit": arguments.commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                       "cuda": torch.version.cuda,
                       "command": "python bench/attention.py LIBRARY.so -o bench/results/attention-h200.json",
                       "gemm_tflops": gemm, "copy_tbs": copy, "errors": errors,
                       "times": bench.results}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
