"""Plan of a run on several processes: memory of each, bytes that it sends in a step, and expected speed.

The model is that of a ring. An all-gather or a reduce-scatter of n bytes among N processes sends (N-1)/N · n bytes from
each in N - 1 successive messages; an all-reduce is a reduce-scatter and an all-gather. A step takes the time of its
matrix products at a given share of the peak rate, and the part of the exchange that does not fit beside them. A
replicated model averages its gradients during the backward pass of the last microbatch, except those of the last
bucket; a sharded one gathers and reduces beside all of its computation with NCCL and beside none with gloo, for which
PyTorch makes no streams. A step never sends memory of sequences. Draws of dropout, whose time is proportional to N, are
not counted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from xlcli.config import ClusterConfig, Config
from xlcli.events import Scaling
from xlcli.model.build import build_on_meta
from xlcli.model.lm import LanguageModel
from xlcli.optim import MUON_BATCH, hidden_matrices, n_state_floats
from xlcli.runtime import Runtime, has_bfloat16_units
from xlcli.training import memory

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that a replicated model averages at once: the default of `DistributedDataParallel`."""
BACKWARD_SHARE = 2 / 3
"""Share of the operations of a step that belong to its backward pass."""
ORTHOGONALIZATION_STEPS = 5
"""Newton-Schulz iterations of Muon."""
WIDTH = 1024
"""Width of the square matrices whose product is timed."""
PRODUCTS = 5
"""Number of timed products; the fastest counts."""


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
    narrow: int = 0

    def n_batches(self, n: int) -> int:
        """Number of batches in which `n` processes orthogonalize the matrices, with matrices of one size alike."""
        sizes = Counter(self.matrices)
        return sum(-(-count // (n * max(1, MUON_BATCH // numel))) for numel, count in sizes.items())


class Exchange(NamedTuple):
    """Bytes that a process sends in a step, the successive messages, and how much cannot overlap with computation.

    Attributes:
        n_bytes: Bytes sent.
        n_messages: Number of successive messages.
        last_bytes: Bytes of `n_bytes` that are sent when all computation has ended.
    """

    n_bytes: float
    n_messages: int
    last_bytes: float = 0.0


def sizes(model: LanguageModel, config: Config) -> Sizes:
    """Sizes of a model, which may be on the meta device."""
    chosen = hidden_matrices(model) if config.train.optimizer == "muon" else set()
    shapes = [parameter.shape for parameter in model.parameters() if id(parameter) in chosen]
    by_block, narrow = True, 0
    if config.runtime.shard:
        from xlcli.training.shard import is_divided_by_block, n_narrow  # loads FSDP2

        by_block = is_divided_by_block(model)
        narrow = n_narrow(model) if by_block else 0
    return Sizes(
        parameters=model.n_parameters,
        blocks=tuple(_count(block) for block in model.stack.layers()) if by_block else (),
        matrices=tuple(shape.numel() for shape in shapes),
        state=n_state_floats(model, config.train),
        operations=sum(orthogonalization(*sorted(shape)) for shape in shapes),
        narrow=narrow,
    )


def orthogonalization(shorter: int, longer: int) -> int:
    """Operations of Muon for one matrix: three products in each of five Newton-Schulz iterations."""
    return ORTHOGONALIZATION_STEPS * (4 * shorter**2 * longer + 2 * shorter**3)


def replicated(n: int, n_gradient_bytes: int, n_direction_bytes: int = 0, n_batches: int = 0) -> Exchange:
    """All-reduce of the gradients among `n` processes: 2(n-1)/n of their bytes; and of a few sums of the step.

    Each process orthogonalizes a part of the matrices of Muon, in `n_batches` batches, and sends these directions.
    """
    n_buckets = -(-n_gradient_bytes // BUCKET_BYTES)
    last = min(n_gradient_bytes, BUCKET_BYTES)
    directions = _ring(n, n_direction_bytes)
    return Exchange(
        2 * _ring(n, n_gradient_bytes) + directions,
        (n - 1) * (2 * n_buckets + 2 + n_batches),
        2 * _ring(n, last) + directions,
    )


def sharded(n: int, size: Sizes, *, bfloat16: bool, grad_accum: int, direction_bytes: int, gloo: bool) -> Exchange:
    """Exchange of a model that is divided among `n` processes.

    Parameters of blocks are gathered in the forward and again in the backward pass of each microbatch, others once;
    gradients, 4 bytes each, are reduced once in a step, which gloo does by an all-reduce. Muon gathers the momentum of
    its matrices, 4 bytes each, and what each process has orthogonalized.

    Args:
        n: Number of processes.
        size: Sizes of the model.
        bfloat16: Whether `size.narrow` parameters are gathered in 2 bytes each instead of 4.
        grad_accum: Number of microbatches.
        direction_bytes: Bytes of a number of an orthogonalized matrix.
        gloo: Whether gloo carries the exchange.
    """
    passes = 2 if gloo else 1
    in_blocks, n_blocks = sum(size.blocks), len(size.blocks)
    others = size.parameters - in_blocks
    gathered = grad_accum * (4 * (2 * in_blocks + others) - (2 * 2 * size.narrow if bfloat16 else 0))
    muon = (4 + direction_bytes) * sum(size.matrices)
    n_gathers = grad_accum * (2 * n_blocks + 1) + len(size.matrices) + size.n_batches(n)
    n_reductions = passes * (n_blocks + 1)
    return Exchange(
        _ring(n, gathered + passes * 4 * size.parameters + muon),
        (n - 1) * (n_gathers + n_reductions + 2),  # and the all-reduce of a few sums of the step
        _ring(n, muon),
    )


def plan(config: Config, runtime: Runtime, n: int) -> Scaling:
    """Plan of a run on `n` processes, each on a device like that of `runtime`.

    Args:
        config: Settings of the run; its batch is divided among the processes equally.
        runtime: Device and number type.
        n: Number of processes.

    Raises:
        ConfigError: The run cannot be divided among so many processes.
    """
    config.check_division(n)
    gloo = runtime.device.type == "cpu"
    shard = config.runtime.shard
    train, cluster = config.train, config.cluster
    size = sizes(build_on_meta(config.model), config)
    own = config.model_copy(update={"train": train.model_copy(update={"batch_size": train.batch_size // n})})
    usage = memory.trace(own, runtime)
    share = n if shard else 1
    largest, others = max(size.blocks, default=0), size.parameters - sum(size.blocks)
    direction_bytes = 2 if has_bfloat16_units(runtime.device) else 4
    gathered = 4 * (others + 2 * largest) if shard else 0
    # Gradients are whole until they are reduced, with those of all microbatches.
    unreduced = 4 * (size.parameters if train.grad_accum > 1 else others + largest) if shard else 0
    if shard:
        exchange = sharded(
            n,
            size,
            bfloat16=runtime.dtype == torch.bfloat16,
            grad_accum=train.grad_accum,
            direction_bytes=direction_bytes,
            gloo=gloo,
        )
    else:
        exchange = replicated(n, 4 * size.parameters, direction_bytes * sum(size.matrices), size.n_batches(n))
    operations = usage.operations * train.grad_accum + size.operations // n
    flops = cluster.peak_flops or measure_flops(runtime)
    compute = operations / (flops * cluster.utilization)
    beside = compute * BACKWARD_SHARE / train.grad_accum
    if shard:
        beside = 0.0 if gloo else compute
    step = compute + exposed_seconds(exchange, cluster, beside)
    tokens = train.batch_size * train.segment_len
    return Scaling(
        n_ranks=n,
        rows=train.batch_size // n,
        sharded=shard,
        parameter_bytes=4 * -(-size.parameters // share) + gathered,
        gradient_bytes=4 * -(-size.parameters // share) + unreduced,
        optimizer_bytes=4 * -(-size.state // share),
        recurrent_bytes=usage.state * train.grad_accum,
        activation_bytes=int(memory.FRAGMENTATION * usage.activations),
        sent_bytes=round(exchange.n_bytes),
        messages=exchange.n_messages,
        operations=operations,
        flops=flops,
        utilization=cluster.utilization,
        bandwidth=cluster.bandwidth,
        latency=cluster.latency,
        compute_seconds=compute,
        exchange_seconds=exchange_seconds(exchange, cluster),
        step_seconds=step,
        efficiency=compute / step,
        tokens_per_second=tokens / step,
    )


def exchange_seconds(exchange: Exchange, cluster: ClusterConfig) -> float:
    """Duration of an exchange alone."""
    return exchange.n_bytes / cluster.bandwidth + exchange.n_messages * cluster.latency


def exposed_seconds(exchange: Exchange, cluster: ClusterConfig, beside: float) -> float:
    """Seconds by which an exchange prolongs a step, if `beside` seconds of computation run at the same time."""
    last = exchange.last_bytes / cluster.bandwidth
    return last + max(0.0, exchange_seconds(exchange, cluster) - last - beside)


def measure_flops(runtime: Runtime) -> float:
    """Operations per second of a product of two square matrices on this device, in its number type."""
    a, b = torch.ones(2, WIDTH, WIDTH, device=runtime.device, dtype=runtime.dtype)
    fastest = math.inf
    for i in range(PRODUCTS + 1):
        started = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        if i:  # the first product starts the library
            fastest = min(fastest, time.perf_counter() - started)
    return 2 * WIDTH**3 / fastest


def _ring(n: int, n_bytes: float) -> float:
    return (n - 1) / n * n_bytes


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
