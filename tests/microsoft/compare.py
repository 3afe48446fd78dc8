#!/usr/bin/env python3
"""Hold the operators of com.microsoft against onnxruntime.

usage: compare.py ENGRAFT [--write STEM]
Each case is a model of one node with random operands; engraft must give what onnxruntime gives. --write puts all cases into
one model, STEM.onnx, and their inputs and onnxruntime's outputs into STEM.safetensors: what tests/api/test_microsoft.c
compares without Python. Exit 77 without onnx, onnxruntime, numpy and safetensors.
"""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import load_file, save_file
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

rng = np.random.default_rng(7)
CASES = []


def numbers(*shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def add(name, op, inputs, outputs, constants=(), domain="com.microsoft", types=None, **attributes):
    """inputs: pairs of a name and an array, None where left out; constants: names of those that are weights."""
    CASES.append((name, op, inputs, outputs, constants, domain, types or {}, attributes))


def packed(codes, bits):
    """Codes along the last axis in bytes, low bits first."""
    per_byte = 8 // bits
    rows = codes.reshape(*codes.shape[:-1], -1, per_byte).astype(np.uint8)
    return sum((rows[..., i] << (bits * i)) for i in range(per_byte)).astype(np.uint8)


def norms():
    x, skip, gamma = numbers(2, 3, 8), numbers(2, 3, 8), numbers(8)
    add("simplified", "SimplifiedLayerNormalization", [("x", x), ("g", gamma)], ["y"], ["g"], "", epsilon=1e-3, axis=-1)
    add("skip_simplified", "SkipSimplifiedLayerNormalization", [("x", x), ("s", skip), ("g", gamma), ("b", numbers(8))],
        ["y", "", "", "sum"], ["g", "b"], epsilon=1e-3)
    add("skip_simplified_default", "SkipSimplifiedLayerNormalization", [("x", x), ("s", skip), ("g", gamma)], ["y"], ["g"])
    add("skip_layer", "SkipLayerNormalization", [("x", x), ("s", skip), ("g", gamma), ("b", numbers(8)), ("c", numbers(8))],
        ["y", "", "", "sum"], ["g", "b", "c"], epsilon=1e-3)
    add("skip_layer_rows", "SkipLayerNormalization", [("x", x), ("s", skip[:1]), ("g", gamma)], ["y"], ["g"])


def activations():
    x, bias = numbers(2, 3, 8), numbers(8)
    add("gelu", "Gelu", [("x", x)], ["y"])
    add("fast_gelu", "FastGelu", [("x", x)], ["y"])
    add("fast_gelu_bias", "FastGelu", [("x", x), ("b", bias)], ["y"], ["b"])
    add("bias_gelu", "BiasGelu", [("x", x), ("b", bias)], ["y"], ["b"])
    add("quick_gelu", "QuickGelu", [("x", x)], ["y"])
    add("quick_gelu_alpha", "QuickGelu", [("x", x)], ["y"], alpha=1.0)
    add("fused_matmul", "FusedMatMul", [("a", numbers(2, 4, 3)), ("b", numbers(2, 5, 4))], ["y"], transA=1, transB=1, alpha=0.5)


def nbits(name, n, k, block, bits, zeros=None, groups=False, bias=False, flat=False):
    blocks = -(-k // block)
    codes = rng.integers(0, 2**bits, (n, blocks, block))
    inputs = [("x", numbers(2, 3, k)), ("w", packed(codes, bits)), ("s", numbers(n, blocks, scale=0.2))]
    if zeros == "packed":
        per_byte = 8 // bits
        padded = -(-blocks // per_byte) * per_byte
        inputs.append(("z", packed(rng.integers(0, 2**bits, (n, padded)), bits)))
    elif zeros == "float":
        inputs.append(("z", rng.uniform(0, 2**bits - 1, (n, blocks)).astype(np.float32)))
    elif groups or bias:
        inputs.append(None)
    if groups:
        inputs.append(("g", rng.permutation(np.arange(k) // block).astype(np.int32)))
    elif bias:
        inputs.append(None)
    if bias:
        inputs.append(("b", numbers(n)))
    if flat:
        inputs = [i if i is None or i[0] not in "sz" else (i[0], i[1].reshape(-1)) for i in inputs]
    add(name, "MatMulNBits", inputs, ["y"], "wszgb", K=k, N=n, bits=bits, block_size=block)


def quantised():
    nbits("nbits4", 5, 32, 16, 4)
    nbits("nbits4_padded", 5, 40, 32, 4, "packed")
    nbits("nbits4_float_zeros", 5, 48, 16, 4, "float")
    nbits("nbits4_groups", 5, 32, 16, 4, groups=True)  # with zero points onnxruntime 1.32 leaves those out
    nbits("nbits4_bias", 5, 32, 16, 4, bias=True)
    nbits("nbits4_flat", 5, 48, 16, 4, "packed", flat=True)
    nbits("nbits8", 5, 32, 16, 8)
    nbits("nbits8_zeros", 5, 40, 16, 8, "packed")
    nbits("nbits2", 5, 64, 32, 2)
    nbits("nbits2_zeros", 5, 64, 32, 2, "packed")
    for type_, name in ((0, "fp4"), (1, "nf4")):
        codes = rng.integers(0, 256, 5 * 32 // 2).astype(np.uint8)
        add(f"bnb4_{name}", "MatMulBnb4", [("x", numbers(3, 32)), ("w", codes), ("s", rng.uniform(0.1, 1, 10).astype(np.float32))],
            ["y"], "ws", K=32, N=5, block_size=16, quant_type=type_)
    codes = rng.integers(0, 256, (4, 6)).astype(np.uint8)
    add("dequantize", "DequantizeLinear", [("x", codes), ("s", numbers(6)), ("z", rng.integers(0, 256, 6).astype(np.uint8))], ["y"], axis=1)
    ids = np.array([[3, 0], [6, 3]], np.int64)
    for bits in (4, 8):
        codes = packed(rng.integers(0, 2**bits, (7, 32)), bits)
        scales = numbers(7, 2, scale=0.2)
        zeros = packed(rng.integers(0, 2**bits, (7, 2)), bits)
        attributes = dict(bits=bits, block_size=16, gather_axis=0, quantize_axis=1)
        add(f"gather{bits}", "GatherBlockQuantized", [("w", codes), ("i", ids), ("s", scales)], ["y"], "ws", **attributes)
        add(f"gather{bits}_zeros", "GatherBlockQuantized", [("w", codes), ("i", ids), ("s", scales), ("z", zeros)], ["y"], "wsz", **attributes)
    typed = {"w": TensorProto.INT4, "z": TensorProto.INT4}
    values = (rng.integers(-8, 8, (7, 32)).astype(np.int8), numbers(7, 2, scale=0.2), rng.integers(-8, 8, (7, 2)).astype(np.int8))
    add("gather_int4", "GatherBlockQuantized", [("w", values[0]), ("i", ids), ("s", values[1]), ("z", values[2])], ["y"], "wsz", types=typed,
        block_size=16, gather_axis=0, quantize_axis=1)


def caches(size, length=32):
    angles = np.outer(np.arange(length), 100.0 ** (-np.arange(size // 2) / (size // 2)))
    return [("cos", np.cos(angles).astype(np.float32)), ("sin", np.sin(angles).astype(np.float32))]


def rotary():
    positions = np.array([[0, 1, 2], [5, 6, 7]], np.int64)
    x = numbers(2, 3, 32)
    add("rotary", "RotaryEmbedding", [("x", x), ("p", positions), *caches(16)], ["y"], ["cos", "sin"])
    add("rotary_offset", "RotaryEmbedding", [("x", x), ("p", np.array([4], np.int64)), *caches(16)], ["y"], ["cos", "sin"])
    add("rotary_interleaved", "RotaryEmbedding", [("x", x), ("p", positions), *caches(16)], ["y"], ["cos", "sin"], interleaved=1)
    add("rotary_partial", "RotaryEmbedding", [("x", x), ("p", positions), *caches(8)], ["y"], ["cos", "sin"], num_heads=2, rotary_embedding_dim=8)
    add("rotary_heads", "RotaryEmbedding", [("x", numbers(2, 2, 3, 16)), ("p", positions), *caches(16)], ["y"], ["cos", "sin"])


def group_query(name, batch=2, sequence=5, heads=4, kv_heads=2, size=16, lengths=None, past=None, packed_qkv=True, rope=None, positions=None,
                bias=False, sinks=False, norms=False, **attributes):
    q, kv = heads * size, kv_heads * size
    inputs = [("q", numbers(batch, sequence, q + 2 * kv)), None, None] if packed_qkv else [
        ("q", numbers(batch, sequence, q)), ("k", numbers(batch, sequence, kv)), ("v", numbers(batch, sequence, kv))]
    total = max(lengths) if lengths else sequence
    if past is not None:
        inputs += [("pk", numbers(batch, kv_heads, past, size)), ("pv", numbers(batch, kv_heads, past, size))]
    else:
        inputs += [None, None]
    lengths = lengths or [sequence] * batch
    inputs += [("lengths", np.array(lengths, np.int32) - 1), ("total", np.array([total], np.int32))]
    inputs += caches(rope) if rope else [None, None]
    inputs.append(("positions", np.array(positions, np.int64)) if positions else None)
    inputs.append(("bias", numbers(batch, heads, sequence, total)) if bias else None)
    inputs.append(("sinks", numbers(heads)) if sinks else None)
    if norms:
        inputs += [None, None, ("qn", numbers(size)), ("kn", numbers(size))]
    while inputs[-1] is None:
        inputs.pop()
    outputs = ["y", "present_k", "present_v"] if past is not None else ["y"]
    add(name, "GroupQueryAttention", inputs, outputs, ["cos", "sin", "sinks", "qn", "kn"], num_heads=heads, kv_num_heads=kv_heads,
        do_rotary=int(rope is not None), **attributes)


def attention():
    group_query("gqa")
    group_query("gqa_separate", packed_qkv=False, rope=16)
    group_query("gqa_rotary", rope=16, scale=0.3)
    group_query("gqa_interleaved", rope=16, rotary_interleaved=1)
    group_query("gqa_partial", rope=8)
    group_query("gqa_padded", lengths=[5, 3], rope=16)
    group_query("gqa_window", local_window_size=2, rope=16)
    group_query("gqa_softcap", softcap=1.5)
    group_query("gqa_smooth", smooth_softmax=1)
    group_query("gqa_sinks", sinks=True, local_window_size=3)
    group_query("gqa_positions", rope=16, positions=[[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])
    group_query("gqa_bias", bias=True)
    group_query("gqa_bias_sinks", bias=True, sinks=True, softcap=2.0)
    group_query("gqa_norms", norms=True, rope=16, qk_norm_epsilon=1e-3)
    group_query("gqa_empty_past", past=0, rope=16, lengths=[5, 4])
    group_query("gqa_decode", sequence=1, past=6, lengths=[7, 7], rope=16)
    group_query("gqa_decode_ragged", sequence=1, past=6, lengths=[7, 4], rope=16, local_window_size=4)
    group_query("gqa_continued", batch=1, sequence=3, past=4, lengths=[7], rope=16)
    group_query("gqa_continued_window", batch=1, sequence=3, past=4, lengths=[7], rope=16, local_window_size=3, sinks=True)

    def heads(name, inputs, outputs=("y",), constants=(), **attributes):
        add(name, "MultiHeadAttention", inputs, list(outputs), constants, num_heads=2, **attributes)

    q, k, v = ("q", numbers(2, 4, 16)), ("k", numbers(2, 4, 16)), ("v", numbers(2, 4, 16))
    heads("mha", [q, k, v], scale=0.3)
    heads("mha_bias", [q, k, v, ("b", numbers(48))], constants=["b"])
    heads("mha_padding", [q, k, v, None, ("m", np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32))])
    heads("mha_lengths", [q, k, v, None, ("m", np.array([4, 2], np.int32))])
    heads("mha_scores", [q, k, v, None, None, ("a", numbers(1, 2, 4, 4))])
    heads("mha_causal", [q, k, v], unidirectional=1)
    heads("mha_cross", [q, ("k", numbers(2, 2, 6, 8)), ("v", numbers(2, 2, 6, 8))])
    heads("mha_past", [q, k, v, None, None, None, ("pk", numbers(2, 2, 3, 8)), ("pv", numbers(2, 2, 3, 8))], ("y", "pk2", "pv2"))
    heads("mha_past_causal", [q, k, v, None, None, ("a", numbers(1, 2, 4, 7)), ("pk", numbers(2, 2, 3, 8)), ("pv", numbers(2, 2, 3, 8))],
          ("y", "pk2", "pv2"), unidirectional=1)

    def merged(name, inputs, outputs=("y",), **attributes):
        add(name, "Attention", inputs, list(outputs), "wb", num_heads=2, **attributes)

    x, w, b = ("x", numbers(2, 4, 10)), ("w", numbers(10, 48, scale=0.3)), ("b", numbers(48))
    merged("attention", [x, w, b])
    merged("attention_causal", [x, w, b], unidirectional=1)
    merged("attention_mask", [x, w, b, ("m", np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32))])
    merged("attention_lengths", [x, w, b, ("m", np.array([4, 2], np.int32))])
    merged("attention_past", [x, w, b, None, ("p", numbers(2, 2, 2, 3, 8))], ("y", "present"), unidirectional=1)
    merged("attention_sizes", [x, ("w", numbers(10, 40, scale=0.3)), ("b", numbers(40))], qkv_hidden_sizes=[16, 16, 8])


def make_parts(case, prefix=""):
    """The node, and what stands around it: inputs, outputs, weights."""
    name, op, inputs, outputs, constants, domain, types, attributes = case
    given, weights = [], []
    for item in inputs:
        if item is None:
            continue
        key, array = item
        dtype = types.get(key, helper.np_dtype_to_tensor_dtype(array.dtype))
        if key not in constants:
            given.append(helper.make_tensor_value_info(prefix + key, dtype, array.shape))
        elif key in types:
            weights.append(helper.make_tensor(prefix + key, dtype, array.shape, array.flatten()))
        else:
            weights.append(numpy_helper.from_array(array, prefix + key))
    node = helper.make_node(op, ["" if i is None else prefix + i[0] for i in inputs], [o and prefix + o for o in outputs], name,
                            domain=domain, **attributes)
    return node, given, [helper.make_tensor_value_info(prefix + o, TensorProto.FLOAT, None) for o in outputs if o], weights


def make_model(parts):
    node, given, results, weights = zip(*parts)
    graph = helper.make_graph(node, "g", sum(given, []), sum(results, []), sum(weights, []))
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])


def counted(case, key, want):
    """Where a result means something: not behind the end of a padded row."""
    mask = np.ones(want.shape, bool)
    given = {i[0]: i[1] for i in case[2] if i is not None}
    for b, last in enumerate(given.get("lengths", [])):
        fresh = given["total"][0] == given["q"].shape[1]
        if key == "y" and fresh:
            mask[b, last + 1:] = False
        if key.startswith("present"):
            mask[b, :, last + 1:] = False
    return mask


def compare(engraft, case, folder, kept):
    """"" when equal, else how it differs; None when onnxruntime cannot run the case."""
    model = make_model([make_parts(case)])
    path = os.path.join(folder, case[0] + ".onnx")
    with open(path, "wb") as out:
        out.write(model.SerializeToString())
    given = {i[0]: i[1] for i in case[2] if i is not None and i[0] not in case[4]}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, given)))
    except Exception as error:
        print(f"  {case[0]}: onnxruntime cannot run it: {str(error).splitlines()[0][:150]}")
        return None
    inputs, outputs = path[:-5] + ".in", path[:-5] + ".out"
    save_file({k: np.ascontiguousarray(v) for k, v in given.items()}, inputs)
    done = subprocess.run([engraft, "run", path, "--inputs", inputs, "--outputs", outputs], capture_output=True, text=True)
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1]
    got = load_file(outputs)
    for key, want in wanted.items():
        if got[key].shape != want.shape:
            return f"{key} is {got[key].shape}, not {want.shape}"
        kept[case[0] + "." + key] = np.where(counted(case, key, want), want, np.nan).astype(np.float32)
        got[key][~counted(case, key, want)] = want[~counted(case, key, want)] = 0
        error = np.abs(got[key] - want).max() if want.size else 0.0
        if not error <= 2e-5 * max(1.0, np.abs(want).max() if want.size else 1.0):
            return f"{key} differs by {error:.2g}"
    kept.update({case[0] + "." + k: np.ascontiguousarray(v) for k, v in given.items()})
    return ""


def main():
    kept, parts = {}, []
    for make in (norms, activations, quantised, rotary, attention):
        make()
    counts = {"": 0}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            fault = compare(sys.argv[1], case, folder, kept)
            if fault:
                print(f"  {case[0]}: {fault}")
            if fault == "":
                parts.append(make_parts(case, case[0] + "."))
            counts[fault and "bad"] = counts.get(fault and "bad", 0) + 1
    if len(sys.argv) > 3 and sys.argv[2] == "--write":
        with open(sys.argv[3] + ".onnx", "wb") as out:
            out.write(make_model(parts).SerializeToString())
        save_file(kept, sys.argv[3] + ".safetensors")
    print(f"{counts['']} equal, {counts.get('bad', 0)} not, {counts.get(None, 0)} that onnxruntime does not run")
    sys.exit(1 if counts.get("bad", 0) or not counts[""] else 0)


if __name__ == "__main__":
    main()
