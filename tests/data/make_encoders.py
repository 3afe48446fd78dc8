#!/usr/bin/env python3
"""Exports small encoder models with their data and PyTorch references into encoders/. Needs torch, transformers, peft,
onnx, safetensors; run it only to make the fixtures anew: the tests read the files.

usage: make_encoders.py OUT [NAME...]

One folder a task: model.onnx, data.jsonl and ref.safetensors with full-training gradients (loss, grad.*), and for LoRA
r = 2, alpha = 4 on all linears but the head: lora.init.*, lora.grad.* (before clipping), the losses of five AdamW steps on
the whole of the data (lora.curve; lr 5e-3, clip 0.3) and lora.final.*. Losses are those of torch and, written out, of
sentence-transformers.
"""
import json, os, sys, warnings
import onnx, torch, transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

warnings.filterwarnings("ignore")
functional = torch.nn.functional
VOCAB, LENGTHS, STEPS = 40, [9, 12, 5, 7], 5
BERT = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
MODERN = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
              max_position_embeddings=16, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1,
              sep_token_id=2, bos_token_id=1, eos_token_id=2)
DISTIL = dict(vocab_size=VOCAB, dim=16, hidden_dim=24, n_layers=1, n_heads=2, max_position_embeddings=16, dropout=0.0,
              attention_dropout=0.0, seq_classif_dropout=0.0)
LLAMA = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=16, use_cache=False, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
DEBERTA = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
               max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
               relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4, type_vocab_size=0,
               pooler_dropout=0.0, cls_dropout=0.0, share_att_key=True, norm_rel_ebd="layer_norm")
TASKS = {  # folder: model, configuration, settings, exporter and opset
    "classification": ("BertForSequenceClassification", "BertConfig", dict(BERT, num_labels=3), "dynamo", 20),
    "multi-label": ("DistilBertForSequenceClassification", "DistilBertConfig", dict(DISTIL, num_labels=4),
                    "torchscript", 17),
    "regression": ("BertForSequenceClassification", "BertConfig", dict(BERT, num_labels=1), "torchscript", 17),
    "decoder": ("LlamaForSequenceClassification", "LlamaConfig", dict(LLAMA, num_labels=3), "dynamo", 20),
    "token": ("BertForTokenClassification", "BertConfig", dict(BERT, num_labels=5), "torchscript", 17),
    "masked": ("ModernBertForMaskedLM", "ModernBertConfig", MODERN, "dynamo", 20),
    "ranking": ("ModernBertModel", "ModernBertConfig", MODERN, "torchscript", 17),
    "relative": ("DebertaV2ForSequenceClassification", "DebertaV2Config", dict(DEBERTA, num_labels=3), "dynamo", 20),
    "cosine": ("BertModel", "BertConfig", BERT, "dynamo", 20),
}
HEADS = ("classifier", "score", "decoder")


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.m = model

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return forward(self.m, input_ids, attention_mask, token_type_ids)


def forward(model, ids, mask, types):
    more = {} if types is None else dict(token_type_ids=types)
    out = model(input_ids=ids, attention_mask=mask, **more)
    return out.logits if "logits" in out else out.last_hidden_state


def has_types(task):
    return TASKS[task][1] == "BertConfig"


def make(task):
    name, config, settings, _, _ = TASKS[task]
    torch.manual_seed(7)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in model.parameters():
            scale, shift = (0.25, 0.0) if p.dim() > 1 else (0.1, p.clone())
            p.copy_(shift + scale * torch.randn(p.shape, generator=generator))
    return model


def documents(task):
    generator = torch.Generator().manual_seed(3)
    draw = lambda n, low=3, high=VOCAB: torch.randint(low, high, (n,), generator=generator).tolist()
    rows = []
    for i, n in enumerate(LENGTHS):
        row = {}
        if task == "ranking":
            row = dict(anchor=draw(n), positive=draw(LENGTHS[-1 - i]), negative=[draw(6), draw(4)] if i == 1 else draw(6))
        elif task == "cosine":
            row = dict(sentence1=draw(n), sentence2=draw(LENGTHS[-1 - i]), score=[0.9, -0.1, 0.5, 2.5e-1][i])
        else:
            row["input_ids"] = draw(n)
            if has_types(task):
                row["token_type_ids"] = [0] * (n // 2) + [1] * (n - n // 2)
        if task in ("classification", "decoder", "relative"):
            row["label"] = [2, 0, 1, 2][i]
        if task == "regression":
            row["label"] = [0.5, -1.25, 2, 1e-1][i]
        if task == "multi-label":
            row["label"] = [[1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]][i]
        if task == "token":
            row["labels"] = draw(n - 1, 0, 5) + [-100]
        if task == "masked":
            row["labels"] = [t if k % 3 != 1 else -100 for k, t in enumerate(draw(n))]
        rows.append(row)
    return rows


def padded(rows, filler=0):
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def encode(model, rows, types=None):
    mask = padded([[1] * len(row) for row in rows])
    return forward(model, padded(rows), mask, None if types is None else padded(types)), mask


def embed(task, model, rows):
    hidden, mask = encode(model, rows, [[0] * len(row) for row in rows] if has_types(task) else None)
    mask = mask.float()[..., None]
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def loss_of(task, model, rows):
    if task == "ranking":
        anchors = embed(task, model, [r["anchor"] for r in rows])
        others = [r["positive"] for r in rows]
        for r in rows:
            others += r["negative"] if isinstance(r["negative"][0], list) else [r["negative"]]
        return functional.cross_entropy(20.0 * anchors @ embed(task, model, others).T, torch.arange(len(rows)))
    if task == "cosine":
        first, second = (embed(task, model, [r[f"sentence{i}"] for r in rows]) for i in (1, 2))
        return functional.mse_loss((first * second).sum(-1), torch.tensor([r["score"] for r in rows]))
    types = [r["token_type_ids"] for r in rows] if has_types(task) else None
    logits, _ = encode(model, [r["input_ids"] for r in rows], types)
    if task in ("token", "masked"):
        labels = padded([r["labels"] for r in rows], -100)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    labels = torch.tensor([r["label"] for r in rows])
    if task == "regression":
        return functional.mse_loss(logits.squeeze(-1), labels)
    if task == "multi-label":
        return functional.binary_cross_entropy_with_logits(logits, labels.float())
    return functional.cross_entropy(logits, labels)


def references(task):
    rows, out = documents(task), {}
    model = make(task)
    loss = loss_of(task, model, rows)
    loss.backward()
    out["loss"] = loss.detach().reshape(1)
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    out.update({f"grad.{k}": g.clone() for k, g in grads.items()})
    model = make(task)
    targets = [k for k, m in model.named_modules() if isinstance(m, torch.nn.Linear) and k.split(".")[-1] not in HEADS]
    targets = [k for k in targets if f"{k}.weight" in grads]
    peft = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    generator = torch.Generator().manual_seed(5)
    trainable = [(k.replace(".default.", "."), p) for k, p in peft.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for _, p in trainable:
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    out.update({f"lora.init.{k}": p.detach().clone() for k, p in trainable})
    optimizer = torch.optim.AdamW([p for _, p in trainable], lr=5e-3, weight_decay=0.0)
    curve = []
    for step in range(STEPS):
        loss = loss_of(task, peft, rows)
        curve.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            out.update({f"lora.grad.{k}": p.grad.clone() for k, p in trainable})
        torch.nn.utils.clip_grad_norm_([p for _, p in trainable], 0.3)
        optimizer.step()
    out["lora.curve"] = torch.tensor(curve)
    out.update({f"lora.final.{k}": p.detach().clone() for k, p in trainable})
    return rows, {k: v.contiguous() for k, v in out.items()}


def strip(path):
    """Leaves of the exporter's metadata only what names modules: the rest is most of a small file."""
    model = onnx.load(path)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.ClearField("doc_string")
    del model.graph.value_info[:]
    for value in list(model.graph.input) + list(model.graph.output) + list(model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.save(model, path)


def export(task, path):
    _, _, _, exporter, opset = TASKS[task]
    ids = torch.randint(3, VOCAB, (2, 11))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    ids[1, 8:] = 0
    arguments = (ids, mask) + ((torch.zeros_like(ids),) if has_types(task) else ())
    names = ["input_ids", "attention_mask", "token_type_ids"][:len(arguments)]
    output = "last_hidden_state" if task in ("ranking", "cosine") else "logits"
    wrapper = Wrapper(make(task)).eval()
    common = dict(input_names=names, output_names=[output], opset_version=opset)
    if exporter == "dynamo":
        dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        torch.onnx.export(wrapper, arguments, path, dynamo=True, external_data=False,
                          dynamic_shapes={n: dims for n in names}, **common)
    else:
        axes = {n: {0: "batch", 1: "sequence"} for n in names}
        axes[output] = {0: "batch", 1: "sequence"} if wrapper(*arguments).dim() == 3 else {0: "batch"}
        torch.onnx.export(wrapper, arguments, path, dynamo=False, dynamic_axes=axes, **common)
    strip(path)


def main():
    for task in sys.argv[2:] or TASKS:
        folder = os.path.join(sys.argv[1], "encoders", task)
        os.makedirs(folder, exist_ok=True)
        rows, tensors = references(task)
        with open(os.path.join(folder, "data.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        save_file(tensors, os.path.join(folder, "ref.safetensors"))
        export(task, os.path.join(folder, "model.onnx"))
        print("made", task)


main()
