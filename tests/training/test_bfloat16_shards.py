"""Divided models in bfloat16: blocks are gathered so, gradients are reduced and weights kept in float32."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist  # noqa: TID251
from launching import outputs, start
from ranked import ATTENTION, DROPOUT, RESIDUAL
from short_runs import PROSE, small
from torch.distributed.fsdp import FSDPModule  # noqa: TID251

from xlcli import config
from xlcli.ranks import SINGLE, join
from xlcli.runtime import Runtime
from xlcli.store.weights import weights as weights_of
from xlcli.text.tokens import TokenFile
from xlcli.training.checkpoint import gathered
from xlcli.training.run import TrainingRun

CALL = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import test_bfloat16_shards as t; t.compare()"
CASES = {
    "table of vectors": {
        "norm": {"kind": "layer"},
        "bias": True,
        "attention": {"n_heads": 2, "qk_norm": True},
        "embedding": {"per_layer": True},
        **DROPOUT,
    },
    "adaptive softmax": {"embedding": {"cutoffs": [60, 110], "div_val": 2}, **DROPOUT},
    "hashed": ATTENTION["lsh"] | RESIDUAL,
}
"""Changes of the section `model`."""


def run_of(model, ranks, *, shard):
    """A run in bfloat16 with two microbatches."""
    tree = small(
        model=model, train={"batch_size": 8, "max_steps": 50, "lr": 6e-3, "grad_accum": 2, "optimizer": "adamw"}
    )
    settings = config.make(tree, {"runtime": {"shard": shard, "seed": 1}})
    text = PROSE.encode()
    ids = TokenFile(np.frombuffer(text, np.uint8), len(text))
    return TrainingRun(settings, Runtime(torch.device("cpu"), torch.bfloat16, 1, ranks=ranks), ids, 10)


class Gather:
    """The gather of FSDP2, which counts bytes by number type."""

    def __init__(self):
        self.sizes = Counter()

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sizes[str(output_tensor.dtype)] += output_tensor.nbytes
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def n_narrow(model):
    """Number of parameters of the blocks without their tables of token vectors."""
    tables = [block.vectors for block in model.stack.blocks if block.vectors is not None]
    in_blocks = sum(p.numel() for block in model.stack.blocks for p in block.parameters())
    return in_blocks - sum(p.numel() for table in tables for p in table.parameters())


def compare():
    """Three steps of one process, and of two with a divided model; and the types of what they gather and keep."""
    torch.set_num_threads(1)
    with join(timeout=120) as ranks:
        for name, model in CASES.items():
            one = run_of(model, SINGLE, shard=False)
            steps = [[one.train_step(i / 50) for i in range(3)]]
            two = run_of(model, ranks, shard=True)  # begins with the same random numbers
            steps.append([two.train_step(i / 50) for i in range(3)])
            gather = Gather()
            for module in two.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(gather)
            two.train_step(3 / 50)
            kept = gathered(weights_of(two.model), ranks)
            line = {
                "name": name,
                "nats": [[step.nats for step in found] for found in steps],
                "norms": [[step.grad_norm for step in found] for found in steps],
                "gathered": dict(gather.sizes),
                "narrow": n_narrow(one.model) if name != "hashed" else 0,
                "types": sorted({str(tensor.dtype) for tensor in kept.values()}),
                "rounded": [key for key, t in kept.items() if t.ndim > 1 and torch.equal(t, t.bfloat16().float())],
            }
            if ranks.is_first:
                print(json.dumps(line), flush=True)


@pytest.mark.exhaustive
def test_losses_are_those_of_a_single_process_and_weights_stay_in_float32():
    (code, out, error), (second, _, _) = outputs(start(2, CALL))
    assert (code, second) == (0, 0), error[-3000:]
    lines = {line["name"]: line for line in map(json.loads, out.splitlines())}
    assert lines.keys() == CASES.keys()
    for name, line in lines.items():
        (one, two), (norms, norms_of_two) = line["nats"], line["norms"]
        # Gradients of half a batch are rounded to bfloat16 before they are averaged, as with whole models.
        assert two == pytest.approx(one, rel=0, abs=2e-4), name
        assert norms_of_two == pytest.approx(norms, rel=1e-2), name
        assert line["types"] == ["torch.float32"]
        assert line["rounded"] == []
        # Two bytes each, in the forward and the backward pass of two microbatches.
        assert line["gathered"].get("torch.bfloat16", 0) == 2 * 2 * 2 * line["narrow"]
        assert (line["narrow"] == 0) == (name == "hashed")
        assert line["gathered"]["torch.float32"] > 0
