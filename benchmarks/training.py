"""Training speed: tokens per second of xlcli, of Transformer-XL in transformers 4.35.2, and of an earlier commit.

    python benchmarks/training.py --peers PYTHON [--text TEXT --before CHECKOUT] [--out FILE]

The shape of the comparison has 6 layers, width 256, 4 heads, a feed-forward layer of 1,024 (ReLU), 256 symbols, segment
and memory of 128 tokens and batches of 16 sequences; forward and backward pass, gradient clipping and optimizer. PYTHON
is the interpreter of an environment with torch and transformers 4.35.2, whose Transformer-XL trains in float32 with
AdamW and passes its memories on; both programs train with its default dropout of 0.1 and without dropout.

With --text the preset `small` trains on that text, and with --before that of another checkout of xlcli, in turn. Every
measurement is a process of its own. Times are medians over steps with full memory. The share of peak arithmetic is that
of the products of the model, forward and backward, with visible keys only, without the optimizer; the peak is a product
of two square matrices of 2,048 rows. Run it on an idle machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

LAYERS, DIM, HEADS, FFN, VOCAB = 6, 256, 4, 1024, 256
SEGMENT, MEMORY, BATCH = 128, 128, 16
WARMUP = 3
RESULT = Path(__file__).parent / "results" / "training.json"
DROPOUT = (0.1, 0.0)
OURS = [
    {"dtype": dtype, "optimizer": optimizer, "n_features": 32, "dropout": dropout}
    for dtype in ("bfloat16", "float32")
    for optimizer, dropout in (("adamw", 0.1), ("adamw", 0.0), ("muon", 0.0))
]


def median_seconds(step, steps):
    """Median duration of a training step."""
    for _ in range(WARMUP):
        step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def transformer_xl(steps, *, dropout):
    """Tokens per second of Transformer-XL in transformers, in float32: its loss fails under autocast."""
    import torch
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    config = TransfoXLConfig(
        vocab_size=VOCAB,
        cutoffs=[],
        d_model=DIM,
        d_embed=DIM,
        n_head=HEADS,
        d_head=DIM // HEADS,
        d_inner=FFN,
        n_layer=LAYERS,
        mem_len=MEMORY,
        clamp_len=-1,
        same_length=False,
        adaptive=False,
        div_val=1,
        dropout=dropout,
        dropatt=0.0,
    )
    model = TransfoXLLMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    memories = None

    def step():
        nonlocal memories
        # It predicts all tokens but the first.
        tokens = torch.randint(0, VOCAB, (BATCH, SEGMENT + 1))
        out = model(tokens, mems=memories, labels=tokens)
        memories = out.mems
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    return BATCH * SEGMENT / median_seconds(step, steps)


def make_run(tree, ids, dtype):
    """A training run of xlcli in memory."""
    import torch

    from xlcli import config
    from xlcli.runtime import DTYPES, Runtime
    from xlcli.text.tokens import TokenFile
    from xlcli.training.run import TrainingRun

    runtime = Runtime(torch.device("cpu"), DTYPES[dtype], torch.get_num_threads())
    return TrainingRun(config.make({"train": {"lr": 1e-3}}, tree), runtime, TokenFile(ids, len(ids)), 0)


def xlcli(steps, *, dtype, optimizer, n_features, dropout):
    """Tokens per second of xlcli, and arithmetic of the products of the model."""
    import numpy as np

    tree = {
        "model": {
            "dim": DIM,
            "n_layers": LAYERS,
            "vocab_size": VOCAB,
            "attention": {"n_heads": HEADS},
            "position": {"kind": "xl", "n_features": n_features},
            "feedforward": {"kind": "relu", "ffn_dim": FFN},
            "dropout": dict.fromkeys(("embedding", "residual", "feedforward"), dropout),
        },
        "train": {
            "segment_len": SEGMENT,
            "mem_len": MEMORY,
            "memory": "keyvalue",
            "batch_size": BATCH,
            "optimizer": optimizer,
        },
    }
    run = make_run(tree, np.random.default_rng(0).integers(0, VOCAB, 2**20).astype(np.uint8), dtype)
    seconds = median_seconds(lambda: run.train_step(0.5), steps)
    return BATCH * SEGMENT / seconds, products(run.config)


def products(config):
    """Multiplications and additions per token of the matrix products of a training step, visible keys only."""
    model, train = config.model, config.train
    width = model.attention.n_heads * model.head_dim
    features = model.position.n_features or model.dim
    gated = model.feedforward.kind in ("swiglu", "geglu")
    weights = 4 * model.dim * width + (3 if gated else 2) * model.dim * model.ffn_dim + width * features
    keys = train.mem_len + (train.segment_len + 1) / 2
    scores = keys * model.attention.n_heads * (2 * model.head_dim + features)
    return 3 * 2 * (model.n_layers * (weights + scores) + model.dim * model.vocab_size)


def peak(dtype):
    """Arithmetic of the machine per second: the best of 20 products of square matrices."""
    import torch

    a = torch.randn(2048, 2048, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    return 2 * 2048**3 / min(seconds)


def preset(name, text, steps):
    """Tokens per second of `xlcli train --preset NAME` in the imported checkout, from the metrics that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", text, "--preset", name, "--max-steps", str(steps), "-q"]
        fixed = ["--threads", str(len(os.sched_getaffinity(0))), "--set=train.eval_every=1000000"]
        parts = ["--valid", "0.002", "--test", "0.0", "-o", f"{folder}/m"]
        subprocess.run([sys.executable, "-m", "xlcli", *command, *fixed, *parts], check=True)
        rows = [json.loads(line) for line in Path(folder, "m", "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "nats" in row]
    late = rows[len(rows) // 3 :]
    gaps = [b["seconds"] - a["seconds"] for a, b in pairwise(late)]
    return (late[1]["tokens"] - late[0]["tokens"]) / statistics.median(gaps)


def apart(python, environment=None, **settings):
    """Result of `worker` in a process of its own."""
    command = [python, __file__, "--worker", json.dumps(settings)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **(environment or {})})
    return json.loads(done.stdout.splitlines()[-1])


def worker(kind, steps, **settings):
    """One measurement."""
    if kind == "transformer-xl":
        return {"tokens_per_second": transformer_xl(steps, **settings)}
    if kind == "preset":
        return {"tokens_per_second": preset(steps=steps, **settings)}
    if kind == "peak":
        return {dtype: peak(dtype) for dtype in ("float32", "bfloat16")}
    speed, arithmetic = xlcli(steps, **settings)
    return {"tokens_per_second": speed, "arithmetic_per_token": arithmetic}


def machine():
    """Hardware and versions."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in names if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": date.today().isoformat(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--before", metavar="CHECKOUT", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(**options.worker)))
        return
    steps, here = options.steps, sys.executable
    peaks = apart(here, kind="peak", steps=0)
    rows = []

    def add(name, found, **settings):
        row = {"program": name, **settings, **{key: round(value, 1) for key, value in found.items()}}
        if "arithmetic_per_token" in found:
            used = found["arithmetic_per_token"] * found["tokens_per_second"]
            row["share_of_peak"] = round(used / peaks[settings["dtype"]], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)

    if options.peers:
        for dropout in DROPOUT:
            found = apart(options.peers, kind="transformer-xl", steps=steps, dropout=dropout)
            add("transformers 4.35.2, Transformer-XL", found, dtype="float32", optimizer="adamw", dropout=dropout)
    for settings in OURS:
        add("xlcli", apart(here, kind="xlcli", steps=steps, **settings), **settings)
    if options.text:
        checkouts = [("xlcli", None)]
        if options.before:
            commit = ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"]
            name = subprocess.run(commit, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
            checkouts.append((f"xlcli of commit {name}", {"PYTHONPATH": str(options.before.resolve())}))
        for name, environment in checkouts:
            text = str(options.text.resolve())
            add(name, apart(here, environment, kind="preset", steps=6 * steps, name="small", text=text), preset="small")
    result = {
        "machine": machine(),
        "command": "python benchmarks/training.py --peers PYTHON --text TEXT --before CHECKOUT",
        "steps": steps,
        "peak_arithmetic_per_second": peaks,
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
