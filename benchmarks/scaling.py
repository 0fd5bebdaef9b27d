"""Plan of a run on many processes in one ring: bytes that each sends in a step, their duration, and its memory.

    python benchmarks/scaling.py --preset base --batch-size 32768 --processes 1024 --flops 4e14 --bandwidth 25e9

An all-gather or a reduce-scatter of n bytes among N processes sends (N-1)/N of n bytes from each, in N - 1 successive
messages; an all-reduce is a reduce-scatter and an all-gather. A step takes the time of its matrix products at a given
share of the peak rate, and the part of the exchange that does not fit beside them. A replicated model averages its
gradients during the backward pass of the last microbatch, except those of the last bucket; a sharded one gathers and
reduces beside all of its computation with NCCL and beside none with gloo, for which PyTorch makes no streams. A step
never sends memory of sequences. Draws of dropout, whose time is proportional to N, are not counted. Operations are
those of a step with one sequence, which is taken on this machine. The bytes of `networks.py` and its durations are
compared with measured ones. The result is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from xlcli import config, presets
from xlcli.config import Config
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.build import build_on_meta
from xlcli.model.lm import LanguageModel
from xlcli.ops.layers import has_bfloat16_units
from xlcli.optim import MUON_BATCH, POLYNOMIALS, hidden_matrices
from xlcli.runtime import Runtime, make_runtime
from xlcli.text.tokens import TokenFile
from xlcli.training.run import TrainingRun

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that a replicated model averages at once: the default of `DistributedDataParallel`."""
BACKWARD_SHARE = 2 / 3
"""Share of the operations of a step that belong to its backward pass."""


class Network(NamedTuple):
    """Operations per second of a process, bytes per second that it sends, and seconds that a message takes besides."""

    flops: float
    bandwidth: float
    latency: float


class Sizes(NamedTuple):
    """Numbers of parameters of a model, and what its optimizer needs.

    Attributes:
        parameters: All parameters.
        blocks: Parameters of each block; none if a divided model gathers all of its parameters at once.
        matrices: Elements of each matrix that Muon updates.
        state: Numbers in the optimizer state.
        operations: Operations of the optimizer in a step.
        narrow: Parameters of `blocks` that a divided model gathers in bfloat16 if products are.
    """

    parameters: int
    blocks: tuple[int, ...]
    matrices: tuple[int, ...]
    state: int
    operations: int
    narrow: int

    def n_batches(self, n: int) -> int:
        """Number of batches in which `n` processes orthogonalize the matrices, with matrices of one size alike."""
        sizes = Counter(self.matrices)
        return sum(-(-count // (n * max(1, MUON_BATCH["cuda"] // numel))) for numel, count in sizes.items())


class Exchange(NamedTuple):
    """Bytes that a process sends in a step, successive messages, and bytes that are sent after all computation."""

    n_bytes: float
    n_messages: int
    last_bytes: float


def sizes(model: LanguageModel, made: Config) -> Sizes:
    """Sizes of a model, which may be on the meta device."""
    chosen = hidden_matrices(model) if made.train.optimizer == "muon" else set()
    shapes = [parameter.shape for parameter in model.parameters() if id(parameter) in chosen]
    blocks, narrow = model.stack.blocks, 0
    if made.runtime.shard:
        from xlcli.training.parallel import is_divided_by_block  # loads FSDP2

        blocks = blocks if is_divided_by_block(model) else []
        narrow = sum(map(n_narrow, blocks))
    state = 2 * model.n_parameters - sum(shape.numel() for shape in shapes)  # Muon keeps one moment, AdamW two
    state += model.n_parameters if made.train.average_share else 0
    return Sizes(
        parameters=model.n_parameters,
        blocks=tuple(map(n_parameters, blocks)),
        matrices=tuple(shape.numel() for shape in shapes),
        state=state,
        operations=sum(orthogonalization(*sorted(shape)) for shape in shapes),
        narrow=narrow,
    )


def n_parameters(module: torch.nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def n_narrow(block: torch.nn.Module) -> int:
    """Number of parameters of a block that are gathered in bfloat16 if products are: no tables, no LSH attention."""
    if isinstance(block.attention, LSHAttention):
        return 0
    return n_parameters(block) - (n_parameters(block.vectors) if block.vectors is not None else 0)


def orthogonalization(shorter: int, longer: int) -> int:
    """Operations of Muon for one matrix: three products in each iteration of `orthogonalize`."""
    return len(POLYNOMIALS) * (4 * shorter**2 * longer + 2 * shorter**3)


def replicated(n: int, size: Sizes, direction_bytes: int) -> Exchange:
    """All-reduce of the gradients among `n` processes, 2(n-1)/n of their bytes, and of a few sums of the step.

    Each process orthogonalizes a part of the matrices of Muon and sends these directions.
    """
    gradients, share = 4 * size.parameters, (n - 1) / n
    n_buckets = -(-gradients // BUCKET_BYTES)
    directions = share * direction_bytes * sum(size.matrices)
    return Exchange(
        2 * share * gradients + directions,
        (n - 1) * (2 * n_buckets + 2 + size.n_batches(n)),
        2 * share * min(gradients, BUCKET_BYTES) + directions,
    )


def sharded(n: int, size: Sizes, direction_bytes: int, *, bfloat16: bool, grad_accum: int, gloo: bool) -> Exchange:
    """Exchange of a model that is divided among `n` processes.

    Parameters of blocks are gathered in the forward and again in the backward pass of each microbatch, others once;
    gradients, 4 bytes each, are reduced once in a step, which gloo does by an all-reduce. Muon gathers the momentum of
    its matrices, 4 bytes each, and what each process has orthogonalized.
    """
    passes, share = 2 if gloo else 1, (n - 1) / n
    in_blocks, n_blocks = sum(size.blocks), len(size.blocks)
    others = size.parameters - in_blocks
    gathered = grad_accum * (4 * (2 * in_blocks + others) - (2 * 2 * size.narrow if bfloat16 else 0))
    muon = (4 + direction_bytes) * sum(size.matrices)
    n_gathers = grad_accum * (2 * n_blocks + 1) + len(size.matrices) + size.n_batches(n)
    n_reductions = passes * (n_blocks + 1)
    return Exchange(
        share * (gathered + passes * 4 * size.parameters + muon),
        (n - 1) * (n_gathers + n_reductions + 2),  # and the all-reduce of a few sums of the step
        share * muon,
    )


def plan(made: Config, runtime: Runtime, n: int, row_operations: float, network: Network) -> dict[str, float]:
    """Plan of a run on `n` processes.

    Args:
        made: Settings of the run; its batch is divided among the processes equally.
        runtime: Device and number type of each.
        n: Number of processes.
        row_operations: Operations of a step for one sequence, without those of Muon.
        network: Rates.

    Returns:
        Bytes, messages, seconds and tokens per second of a step, and the bytes of memory of a process.
    """
    made.check_division(n)
    train, shard = made.train, made.runtime.shard
    gloo = runtime.device.type == "cpu"
    size = sizes(build_on_meta(made.model), made)
    share = n if shard else 1
    largest, others = max(size.blocks, default=0), size.parameters - sum(size.blocks)
    direction_bytes = 2 if has_bfloat16_units(runtime.device) else 4
    if shard:
        bfloat16 = runtime.dtype == torch.bfloat16
        exchange = sharded(n, size, direction_bytes, bfloat16=bfloat16, grad_accum=train.grad_accum, gloo=gloo)
    else:
        exchange = replicated(n, size, direction_bytes)
    compute = (row_operations * (train.batch_size // n) + size.operations // n) / network.flops
    beside = compute * BACKWARD_SHARE / train.grad_accum
    if shard:
        beside = 0.0 if gloo else compute
    alone = exchange.n_bytes / network.bandwidth + exchange.n_messages * network.latency
    last = exchange.last_bytes / network.bandwidth
    step = compute + last + max(0.0, alone - last - beside)
    # Gradients are whole until they are reduced, with those of all microbatches.
    unreduced = 4 * (size.parameters if train.grad_accum > 1 else others + largest) if shard else 0
    return {
        "sent_bytes": round(exchange.n_bytes),
        "messages": exchange.n_messages,
        "compute": compute,
        "exchange": alone,
        "planned": step,
        "efficiency": compute / step,
        "tokens_per_second": train.batch_size * train.segment_len / step,
        "parameter_bytes": 4 * -(-size.parameters // share) + (4 * (others + 2 * largest) if shard else 0),
        "gradient_bytes": 4 * -(-size.parameters // share) + unreduced,
        "optimizer_bytes": 4 * -(-size.state // share),
    }


def count_operations(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call, forward and backward; an addition is one more."""
    aten = torch.ops.aten
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    more = {
        aten.baddbmm_: flop_registry[aten.baddbmm],
        fused: flop_registry[aten._scaled_dot_product_flash_attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks of modules whose activations are computed again
        counter = FlopCounterMode(display=False)
        counter.flop_registry.update(more)
        with counter:
            call()
    return int(counter.get_total_flops())


def row_operations(made: Config, runtime: Runtime) -> float:
    """Operations of a step for one sequence with full memory, without those of Muon."""
    train = {"batch_size": 1, "grad_accum": 1, "lr": 1e-3}
    made = config.change(made, {"train": train, "runtime": {"shard": False}})
    text = np.zeros(train["batch_size"] * (made.train.mem_len + 4 * made.train.segment_len), np.uint8)
    run = TrainingRun(made, runtime, TokenFile(text, len(text)), 0)
    for _ in range(-(-made.train.mem_len // made.train.segment_len)):
        run.train_step(0.0)
    return count_operations(lambda: run.train_step(0.0)) - sizes(run.model, made).operations


def main() -> None:
    """Prints the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--flops", type=float, required=True, help="peak rate of a process in operations per second")
    parser.add_argument("--utilization", type=float, default=0.4, help="share of it that training reaches")
    parser.add_argument("--bandwidth", type=float, default=12.5e9, help="bytes per second of the slowest link")
    parser.add_argument("--latency", type=float, default=5e-6, help="seconds of a message besides its bytes")
    arguments = parser.parse_args()
    changes = {"batch_size": arguments.batch_size, "grad_accum": arguments.grad_accum}
    preset = presets.configurations({}, arguments.preset)[arguments.preset]
    tree = {"train": changes, "runtime": {"shard": arguments.shard}, "model": {"vocab_size": arguments.vocab_size}}
    made = config.change(preset, tree)
    runtime = make_runtime(made.runtime, training=True)
    network = Network(arguments.flops * arguments.utilization, arguments.bandwidth, arguments.latency)
    planned = plan(made, runtime, arguments.processes, row_operations(made, runtime), network)
    print(json.dumps({key: float(f"{value:.4g}") for key, value in planned.items()}))


if __name__ == "__main__":
    main()
