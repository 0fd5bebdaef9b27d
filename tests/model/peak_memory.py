"""How much memory one forward and backward pass takes beyond what was there, in a process of its own.

    python peak_memory.py head|feedforward CHUNK|none

prints JSON: `allocated`, the peak of what PyTorch asked for, and `resident`, by how much the peak of the process grew
(null where the system does not tell), both in bytes.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from xlcli.model.head import SoftmaxHead
from xlcli.model.stack import FeedForward


def head(chunk):
    """4 x 1024 tokens of width 256 over 32,000 words."""
    module = SoftmaxHead(weight=nn.Parameter(torch.randn(32_000, 256) * 0.02), bias=False, loss_chunk=chunk)
    x, targets = torch.randn(4, 1024, 256, requires_grad=True), torch.randint(0, 32_000, (4, 1024))
    return lambda: module.nll(x, targets).mean().backward()


def feedforward(chunk):
    """2 x 4096 tokens of width 256, gated."""
    module = FeedForward(kind="swiglu", dim=256, ffn_dim=1024, bias=False, dropout=0.1, chunk_len=chunk)
    x = torch.randn(2, 4096, 256, requires_grad=True)
    return lambda: module(x).mean().backward()


def warm_up():
    """Loads what is loaded at first use."""
    weight = nn.Parameter(torch.randn(9, 256))
    x, targets = torch.randn(1, 4, 256, requires_grad=True), torch.zeros(1, 4, dtype=torch.int64)
    SoftmaxHead(weight=weight, bias=False, loss_chunk=1).nll(x, targets).mean().backward()


def resident():
    """The largest this process has been; unlike `ru_maxrss` this forgets who started it."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def measure(step):
    """Peaks of a step, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        before = resident()
        step()
        grown = None if before is None else resident() - before
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return {"allocated": peak, "resident": grown}


if __name__ == "__main__":
    which, chunk = sys.argv[1:]
    warm_up()
    step = {"head": head, "feedforward": feedforward}[which](None if chunk == "none" else int(chunk))
    print(json.dumps(measure(step)))
