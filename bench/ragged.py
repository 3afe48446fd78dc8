"""Speed and error of the CUDA ragged products and routing kernels beside PyTorch's, with the ceilings of the card.

    python bench/ragged.py LIBRARY.so [-o bench/results/ragged-h200.json]

LIBRARY.so holds the launchers of backend/cuda/ragged.h and routing.h (target egi_cuda_ragged_shared). FLOP are counted
as 2 * rows * n_in * n_out of the rows there are. Times are medians of CUDA events, of single calls for products and of
replayed graphs for routing, after a check of the results.
"""
import argparse
import ctypes
import json
import sys

import torch

I32, I64, PTR, F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
AUTO, MMA, SM90 = 0, 1, 2
FORWARD, BACKWARD = 0, 1
UNPAIRED, CONCATENATED, INTERLEAVED = 0, 1, 2
PLAIN, SWIGLU, GEGLU, GEGLU_TANH, CLAMPED = range(5)


class Matrix(ctypes.Structure):
    _fields_ = [("data", PTR), ("row_stride", I64)]


class Nf4(ctypes.Structure):
    _fields_ = [(name, PTR) for name in
                ("codes", "absmax", "absmax_codes", "nested_absmax", "nested_map", "nested_offset")]


class Product(ctypes.Structure):
    _fields_ = [("n_groups", I32), ("n_in", I32), ("n_out", I32), ("n_rows", I64), ("offsets", PTR), ("dtype", I32),
                ("direction", I32), ("pairing", I32), ("activation", I32), ("alpha", F32), ("limit", F32),
                ("x", Matrix), ("y", Matrix), ("gate_up", Matrix), ("weight", PTR), ("nf4", Nf4), ("adapter_x", Matrix),
                ("adapter_weight", PTR), ("rank", I32), ("bias", PTR), ("row_weight", PTR), ("scratch", PTR),
                ("scratch_bytes", ctypes.c_size_t)]


class Reduction(ctypes.Structure):
    _fields_ = [("n_groups", I32), ("n_left", I32), ("n_right", I32), ("n_rows", I64), ("offsets", PTR), ("dtype", I32),
                ("left", Matrix), ("right", Matrix), ("out", PTR), ("group_stride", I64), ("left_stride", I64),
                ("right_stride", I64), ("is_added", I32)]


class Decoding(ctypes.Structure):
    _fields_ = [("nf4", Nf4), ("group", I32), ("n_groups", I32), ("group_elements", I64), ("dtype", I32), ("dst", PTR)]


class Routing(ctypes.Structure):
    _fields_ = [("n_tokens", I64), ("k", I32), ("n_experts", I32), ("chosen", PTR), ("weight", PTR), ("offsets", PTR),
                ("expert", PTR), ("source_row", PTR), ("inverse", PTR), ("sorted_weight", PTR), ("workspace", PTR),
                ("workspace_bytes", ctypes.c_size_t)]


class Rows(ctypes.Structure):
    _fields_ = [("n_tokens", I64), ("k", I32), ("n_columns", I32), ("dtype", I32), ("inverse", PTR),
                ("weight", PTR), ("src", PTR), ("dst", PTR), ("src_stride", I64),
                ("dst_stride", I64)]


def stream():
    return torch.cuda.current_stream().cuda_stream


class Library:
    def __init__(self, path):
        self.handle = ctypes.CDLL(path)
        self.handle.egi_cuda_routing_workspace.restype = ctypes.c_size_t
        self.handle.egi_cuda_routing_workspace.argtypes = [I64, I32, I32]

    def product(self, call, family=AUTO):
        self.check(self.handle.egi_cuda_ragged_product(ctypes.byref(call), family, PTR(stream())), "product")

    def reduction(self, call, family=AUTO):
        self.check(self.handle.egi_cuda_ragged_reduction(ctypes.byref(call), family, PTR(stream())), "reduction")

    def call(self, name, call):
        self.check(getattr(self.handle, "egi_cuda_" + name)(ctypes.byref(call), PTR(stream())), name)

    @staticmethod
    def check(status, name):
        if status != 0:
            raise RuntimeError(f"{name}: status {status}")


def median_ms(function, n=15, warm=3):
    for _ in range(warm):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[n // 2]


def graph_ms(function, repeats=10):
    """Time of one call inside a replayed graph of several: launch gaps are those of a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    return median_ms(graph.replay) / repeats


def copy_ceiling():
    src = torch.randn(1 << 29, device="cuda").view(torch.uint8)
    dst = torch.empty_like(src)
    return 2 * src.numel() / median_ms(lambda: dst.copy_(src)) / 1e9


def gemm_ceiling(n=8192):
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_ms(lambda: a @ b) / 1e9


def matrix(tensor):
    return Matrix(tensor.data_ptr(), tensor.stride(0))


def make_offsets(sizes):
    return torch.tensor([0] + sizes, dtype=torch.int32).cumsum(0).to(torch.int32).cuda()


class Problem:
    """Rows, weights and results of one shape; `call` fills the structure for a direction."""

    def __init__(self, sizes, n_in, n_out, rank=16, seed=1):
        self.sizes, self.n_in, self.n_out, self.rank = sizes, n_in, n_out, rank
        rows = self.rows = sum(sizes)
        torch.manual_seed(seed)
        self.offsets = make_offsets(sizes)
        self.x = torch.randn(rows, n_in, device="cuda", dtype=torch.bfloat16)
        self.d_y = torch.randn(rows, n_out, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.randn(len(sizes), n_out, n_in, device="cuda", dtype=torch.bfloat16) * n_in**-0.5
        self.y, self.d_x = torch.empty_like(self.d_y), torch.empty_like(self.x)
        self.h = torch.empty(rows, n_out // 2, device="cuda", dtype=torch.bfloat16)
        self.z = torch.randn(rows, rank, device="cuda", dtype=torch.bfloat16)
        self.a = torch.randn(len(sizes), rank, n_in, device="cuda", dtype=torch.bfloat16) * 0.1
        self.b = torch.randn(len(sizes), n_out, rank, device="cuda", dtype=torch.bfloat16) * 0.1
        self.row_weight = torch.rand(rows, device="cuda")
        n = len(sizes) * n_out * n_in
        self.codes = torch.randint(0, 256, (n // 2,), device="cuda", dtype=torch.uint8)
        self.absmax = torch.rand(n // 64, device="cuda") * 0.05 + 0.01
        self.absmax_codes = torch.randint(0, 256, (n // 64,), device="cuda", dtype=torch.uint8)
        self.nested_absmax = torch.rand((n // 64 + 255) // 256, device="cuda") * 0.02
        self.nested_map = torch.linspace(-1, 1, 256, device="cuda")
        self.nested_offset = torch.full((len(sizes),), 0.03, device="cuda")
        self.flop = 2 * rows * n_in * n_out

    def nf4(self, is_nested=False):
        if is_nested:
            return Nf4(self.codes.data_ptr(), None, self.absmax_codes.data_ptr(), self.nested_absmax.data_ptr(),
                       self.nested_map.data_ptr(), self.nested_offset.data_ptr())
        return Nf4(self.codes.data_ptr(), self.absmax.data_ptr(), None, None, None, None)

    def forward(self, **changes):
        call = Product(direction=FORWARD, n_in=self.n_in, n_out=self.n_out, x=matrix(self.x), y=matrix(self.y))
        return self.fill(call, changes)

    def gated(self, **changes):
        gate = dict(pairing=CONCATENATED, activation=SWIGLU, y=matrix(self.h), gate_up=matrix(self.y))
        return self.forward(**gate, **changes)

    def backward(self, **changes):
        call = Product(direction=BACKWARD, n_in=self.n_out, n_out=self.n_in, x=matrix(self.d_y), y=matrix(self.d_x))
        return self.fill(call, changes)

    def fill(self, call, changes):
        call.n_groups, call.n_rows, call.offsets = len(self.sizes), self.rows, self.offsets.data_ptr()
        call.weight = self.weight.data_ptr()
        for name, value in changes.items():
            setattr(call, name, value)
        return call

    def adapters(self, is_backward):
        weight = self.a if is_backward else self.b
        return dict(rank=self.rank, adapter_x=matrix(self.z), adapter_weight=weight.data_ptr())


class Table:
    def __init__(self, gemm, copy):
        self.gemm, self.copy, self.rows = gemm, copy, []

    def add(self, case, kernels, ms, flop=None, bytes_floor=None):
        row = {"case": case, "kernels": kernels, "ms": ms}
        text = f"{case:34s} {kernels:22s} {ms * 1e3:9.1f} us"
        if flop:
            row.update(tflops=flop / ms / 1e9, share_of_gemm=flop / ms / 1e9 / self.gemm)
            text += f" {row['tflops']:5.0f} TFLOP/s {100 * row['share_of_gemm']:4.0f} %"
        if bytes_floor:
            row.update(times_byte_floor=ms / (bytes_floor / self.copy / 1e9))
            text += f"  {row['times_byte_floor']:.2f} x byte floor"
        self.rows.append(row)
        print(text, flush=True)


def peer_forward(p):
    w = p.weight.transpose(1, 2)
    return lambda: torch._grouped_mm(p.x, w, offs=p.offsets[1:])


def peer_backward(p):
    return lambda: torch._grouped_mm(p.d_y, p.weight, offs=p.offsets[1:])


def measure_products(library, table, title, p, families):
    for name, call, peer in (("forward", p.forward(), peer_forward(p)), ("backward", p.backward(), peer_backward(p))):
        for family in families:
            table.add(f"{title} {name}", {MMA: "mma", SM90: "sm90"}[family],
                      median_ms(lambda: library.product(call, family)), p.flop)
        table.add(f"{title} {name}", "torch._grouped_mm", median_ms(peer), p.flop)


def measure_variants(library, table, title, p):
    full = torch.empty(p.weight.numel(), device="cuda", dtype=torch.bfloat16)
    part = p.weight[0].numel() * 2 * 16
    scratch = dict(scratch=full.data_ptr(), scratch_bytes=full.numel() * 2)
    calls = [
        ("forward adapter r16", p.forward(**p.adapters(False))),
        ("backward adapter r16", p.backward(**p.adapters(True))),
        ("swiglu saving gate, up", p.gated()),
        ("row weight", p.forward(row_weight=p.row_weight.data_ptr())),
        ("nf4 in kernel forward", p.forward(nf4=p.nf4())),
        ("nf4 nested in kernel forward", p.forward(nf4=p.nf4(True))),
        ("nf4 in kernel swiglu", p.gated(nf4=p.nf4())),
        ("nf4 in kernel backward", p.backward(nf4=p.nf4())),
        ("nf4 scratch forward", p.forward(nf4=p.nf4(), **scratch)),
        ("nf4 scratch of 16 forward", p.forward(nf4=p.nf4(), **dict(scratch, scratch_bytes=part))),
        ("nf4 scratch backward", p.backward(nf4=p.nf4(), **scratch)),
    ]
    for name, call in calls:
        table.add(f"{title} {name}", "auto", median_ms(lambda: library.product(call)), p.flop)
    n = p.weight.numel()
    for is_nested in (False, True):
        call = Decoding(p.nf4(is_nested), 0, len(p.sizes), n // len(p.sizes), 0, full.data_ptr())
        n_bytes = n / 2 + (n / 64 if is_nested else n / 16) + 2 * n
        table.add(f"{title} nf4 decoding" + (" nested" if is_nested else ""), "auto",
                  median_ms(lambda: library.call("ragged_decode", call)), bytes_floor=n_bytes)


def measure_adapters(library, table, title, p):
    """Z = X A^T (narrow product) and dA = dZ^T X (reduction)."""
    rows_bytes = p.x.numel() * 2
    z = torch.empty_like(p.z)
    call = p.forward(weight=p.a.data_ptr(), n_out=p.rank, y=matrix(z))
    for family, name in ((MMA, "mma"), (SM90, "sm90")):
        table.add(f"{title} Z = X A^T r{p.rank}", name, median_ms(lambda: library.product(call, family)),
                  bytes_floor=rows_bytes)
    w = p.a.transpose(1, 2)
    table.add(f"{title} Z = X A^T r{p.rank}", "torch._grouped_mm",
              median_ms(lambda: torch._grouped_mm(p.x, w, offs=p.offsets[1:])), bytes_floor=rows_bytes)
    out = torch.empty(len(p.sizes), p.rank, p.n_in, device="cuda")
    reduce = Reduction(len(p.sizes), p.rank, p.n_in, p.rows, p.offsets.data_ptr(), 0, matrix(p.z), matrix(p.x),
                       out.data_ptr(), p.rank * p.n_in, p.n_in, 1, 0)
    n_bytes = rows_bytes + out.numel() * 4 + p.z.numel() * 2
    for family, name in ((MMA, "mma"), (SM90, "sm90")):
        table.add(f"{title} dA = dZ^T X r{p.rank}", name, median_ms(lambda: library.reduction(reduce, family)),
                  bytes_floor=n_bytes)
    table.add(f"{title} dA = dZ^T X r{p.rank}", "torch._grouped_mm",
              median_ms(lambda: torch._grouped_mm(p.z.t(), p.x, offs=p.offsets[1:])), bytes_floor=n_bytes)


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def compare_errors(library, p):
    """Errors against float64 of ours and of torch._grouped_mm, over all rows."""
    table = {}
    o = p.offsets.tolist()
    forward = torch.cat([p.x[o[e]:o[e + 1]].double() @ p.weight[e].double().t() for e in range(len(p.sizes))])
    backward = torch.cat([p.d_y[o[e]:o[e + 1]].double() @ p.weight[e].double() for e in range(len(p.sizes))])
    for family, name in ((MMA, "mma"), (SM90, "sm90")):
        p.y.fill_(float("nan"))
        p.d_x.fill_(float("nan"))
        library.product(p.forward(), family)
        library.product(p.backward(), family)
        table[name] = [relative_error(p.y, forward), relative_error(p.d_x, backward)]
        first = p.y.clone()
        library.product(p.forward(), family)
        table[name + " reruns equal"] = bool(torch.equal(first, p.y))
    table["torch._grouped_mm"] = [relative_error(peer_forward(p)(), forward),
                                  relative_error(peer_backward(p)(), backward)]
    rows = [slice(o[e], o[e + 1]) for e in range(len(p.sizes))]
    reduce_want = torch.stack([p.z[r].double().t() @ p.x[r].double() for r in rows])
    out = torch.zeros(len(p.sizes), p.rank, p.n_in, device="cuda")
    reduce = Reduction(len(p.sizes), p.rank, p.n_in, p.rows, p.offsets.data_ptr(), 0, matrix(p.z), matrix(p.x),
                       out.data_ptr(), p.rank * p.n_in, p.n_in, 1, 0)
    for family, name in ((MMA, "mma"), (SM90, "sm90")):
        library.reduction(reduce, family)
        table[name].append(relative_error(out, reduce_want))
    peer = torch._grouped_mm(p.z.t(), p.x, offs=p.offsets[1:])
    table["torch._grouped_mm"].append(relative_error(peer, reduce_want))
    return table


def compare_decoding(library, p):
    """Decoding in the kernel and through a scratch of any size must give the same bits, again and again."""
    full = torch.empty(p.weight.numel(), device="cuda", dtype=torch.bfloat16)
    table = {}
    for name, make, out in (("forward", p.forward, p.y), ("backward", p.backward, p.d_x)):
        for is_nested in (False, True):
            code = dict(p.adapters(name == "backward"), nf4=p.nf4(is_nested))
            library.product(make(scratch=full.data_ptr(), scratch_bytes=full.numel() * 2, **code))
            want, equal = out.clone(), 0
            for _ in range(10):
                out.fill_(float("nan"))
                library.product(make(**code))
                equal += bool(torch.equal(out, want))
            table[f"{name}{' nested' if is_nested else ''}"] = f"{equal} of 10 equal"
    return table


def measure_routing(library, table, n_tokens, k, n_experts, n_columns):
    chosen = torch.randint(0, n_experts, (n_tokens, k), device="cuda", dtype=torch.int32)
    n = n_tokens * k
    weight = torch.rand(n_tokens, k, device="cuda")
    offsets = torch.empty(n_experts + 1, device="cuda", dtype=torch.int32)
    expert, source_row, inverse = (torch.empty(n, device="cuda", dtype=torch.int32) for _ in range(3))
    sorted_weight = torch.empty(n, device="cuda")
    size = library.handle.egi_cuda_routing_workspace(n_tokens, k, n_experts)
    workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
    call = Routing(n_tokens, k, n_experts, chosen.data_ptr(), weight.data_ptr(), offsets.data_ptr(), expert.data_ptr(),
                   source_row.data_ptr(), inverse.data_ptr(), sorted_weight.data_ptr(), workspace.data_ptr(), size)
    library.call("routing_sort", call)
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    assert torch.equal(source_row.long(), order // k) and torch.equal(expert.long(), flat[order])
    title = f"routing {n_tokens} x {k} of {n_experts}"
    table.add(f"{title} sort", "two empty launches", graph_ms(lambda: (torch.cuda._sleep(0), torch.cuda._sleep(0))))
    table.add(f"{title} sort", "ours", graph_ms(lambda: library.call("routing_sort", call)), bytes_floor=24 * n)

    def peer():
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(n_experts, device="cuda", dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        return order, counts.cumsum(0), torch.empty_like(order).scatter_(0, order, torch.arange(n, device="cuda"))
    table.add(f"{title} sort", "torch argsort, scatter", median_ms(peer))
    if n * n_columns > 1 << 31:
        return
    x = torch.randn(n_tokens, n_columns, device="cuda", dtype=torch.bfloat16)
    back = torch.empty_like(x)
    sorted_x = torch.empty(n, n_columns, device="cuda", dtype=torch.bfloat16)
    rows = Rows(n_tokens, k, n_columns, 0, inverse.data_ptr(), None, x.data_ptr(), sorted_x.data_ptr(), n_columns,
                n_columns)
    n_bytes = (n + n_tokens) * n_columns * 2
    table.add(f"{title} gather {n_columns}", "ours", graph_ms(lambda: library.call("routing_gather", rows)),
              bytes_floor=n_bytes)
    assert torch.equal(sorted_x, x[source_row.long()])
    rows.src, rows.dst, rows.weight = sorted_x.data_ptr(), back.data_ptr(), weight.data_ptr()
    table.add(f"{title} combine {n_columns}", "ours", graph_ms(lambda: library.call("routing_combine", rows)),
              bytes_floor=n_bytes)


def random_sizes(n_groups, total, seed):
    """Uneven sizes that sum to `total`."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(n_groups, generator=generator) ** 2
    sizes = (share / share.sum() * total).long().tolist()
    sizes[0] += total - sum(sizes)
    return sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("-o", "--output")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    library = Library(arguments.library)
    gemm, copy = gemm_ceiling(), copy_ceiling()
    device = torch.cuda.get_device_name()
    print(f"{device}: bf16 GEMM 8192^3 {gemm:.0f} TFLOP/s, copy {copy:.2f} TB/s")
    table = Table(gemm, copy)
    errors = compare_errors(library, Problem(random_sizes(16, 3000, 3), 1024, 768))
    for name, values in errors.items():
        print("error", name, values)
    main_shape = Problem([256] * 128, 2048, 1536)
    decoding = compare_decoding(library, main_shape)
    print("nf4 in the kernel and through a scratch:", decoding)
    measure_products(library, table, "128 x 256, 2048 x 1536", main_shape, (MMA, SM90))
    measure_variants(library, table, "128 x 256, 2048 x 1536", main_shape)
    measure_adapters(library, table, "128 x 256, 2048 x 1536", main_shape)
    del main_shape
    for title, sizes, n_in, n_out in (("128 uneven of 32768, 2048 x 1536", random_sizes(128, 32768, 5), 2048, 1536),
                                      ("128 x 64, 2048 x 1536", [64] * 128, 2048, 1536),
                                      ("128 x 1024, 2048 x 1536", [1024] * 128, 2048, 1536),
                                      ("32 x 512, 2880 x 5760", [512] * 32, 2880, 5760),
                                      ("one of 8 takes 16384, 4096 x 4096", [0, 0, 16384, 0, 0, 0, 0, 0], 4096, 4096)):
        p = Problem(sizes, n_in, n_out)
        measure_products(library, table, title, p, (SM90,))
        table.add(f"{title} forward", "nf4 in kernel", median_ms(lambda: library.product(p.forward(nf4=p.nf4()))),
                  p.flop)
        del p
    measure_routing(library, table, 4096, 8, 128, 2048)
    measure_routing(library, table, 16384, 8, 128, 2048)
    measure_routing(library, table, 1 << 20, 8, 128, 2048)
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump({"commit": arguments.commit, "device": device, "torch": torch.__version__,
                       "cuda": torch.version.cuda,
                       "command": "python bench/ragged.py LIBRARY.so -o bench/results/ragged-h200.json", "gemm_tflops": gemm,
                       "copy_tbs": copy, "errors": errors, "nf4_in_kernel_equals_scratch": decoding,
                       "times": table.rows}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
