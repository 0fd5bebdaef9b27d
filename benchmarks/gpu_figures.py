#!/usr/bin/env python3
"""Figures of a GPU, all in one process, because a process takes ten seconds to start.

    benchmarks/gpu_figures.py FOLDER [--device cuda] [--minutes N] [--small]

Each figure is a line of JSON in FOLDER/figures.jsonl as soon as it is measured, in the order of what is least known.
A figure that fails is a line with its error. What is in the file already is not measured again. When the time is over,
the figure that is being measured is left out, and so are later ones. Compiled training is last, as it may take minutes.

    quantize   whether rounding to int8 gives the bits of the CPU
    profile    operators and kernels of a training step, and of a generated token: FOLDER/profile-NAME.txt
    train      speed of steps, and the memory that they take beside the estimate
    decode     speed of generation
    eval       speed of evaluation

`--small` takes tiny models, and proves this script on any device.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import profile, supported_activities

from xlcli import bench, config
from xlcli.cli.bench import configure
from xlcli.config import GenerateConfig, InferenceConfig, RuntimeConfig, Sampling
from xlcli.events import Speed
from xlcli.inference import InferenceSession
from xlcli.ops.layers import quantize
from xlcli.presets import models_folder
from xlcli.runtime import Runtime, make_runtime
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store import folder as store
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults, memory
from xlcli.training.run import TrainingRun

PRESETS = {"medium": {"model": {"vocab_size": 4096}}, "peer-12x512": {"model": {"position": {"n_features": 64}}}}
"""Shapes to train, with their settings: that of the bundled model, and a larger one."""
SMALL = {"tiny": {"model": {"vocab_size": 256}}}
PROFILED_ROWS = 30  # operators in the table of a profile, by their time


class Plan(NamedTuple):
    """What is measured: presets, batches of the first one, memory lengths, number types, seconds of a figure.

    `segment_len` is that of evaluation; None: as many tokens as keep the device busy.
    """

    presets: Mapping[str, Mapping[str, Any]]
    batches: tuple[int, ...]
    mem_lens: tuple[int, ...]
    dtypes: tuple[str, ...]
    seconds: float
    compiles: bool
    segment_len: int | None = None


Measure = Callable[[], dict[str, Any]]


def figures(plan: Plan, device: str, out: Path, stop: Callable[[], bool]) -> Iterator[tuple[str, Measure]]:
    """Names and functions of all figures, in the order in which they are measured."""
    main = next(iter(plan.presets))
    yield "quantize", partial(compare_quantize, device)
    yield "profile-step", partial(profile_step, main, plan, device, out)
    yield "profile-token", partial(profile_token, device, plan.mem_lens[0], out)
    trained = [(main, size) for size in plan.batches]
    trained += [(preset, plan.batches[0]) for preset in plan.presets if preset != main]
    for compiled in (False, True) if plan.compiles else (False,):
        for dtype in plan.dtypes[: 1 if compiled else None]:
            for preset, size in trained:
                name = f"train-{preset}-{size}-{dtype}" + ("-compiled" if compiled else "")
                yield name, partial(speed_of_steps, preset, size, dtype, compiled, plan, device, stop)
        if not compiled:
            for dtype in plan.dtypes:
                yield f"decode-books-{dtype}", partial(speed_of_books, "decode", dtype, plan, device, stop)
                yield f"eval-books-{dtype}", partial(speed_of_books, "eval", dtype, plan, device, stop)


def compare_quantize(device: str) -> dict[str, Any]:
    """Numbers of values and scales that differ from those of the CPU, of rows of several number types."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
        for scale_type in (torch.bfloat16, torch.float32):
            here = quantize(rows, scale_type)
            there = quantize(rows.to(device), scale_type)
            name = f"{dtype} {scale_type}".replace("torch.", "")
            found[name] = [int((a != b.cpu()).sum()) for a, b in zip(here, there, strict=True)]
    return found


def training_config(preset: str, size: int, dtype: str, compiled: bool, plan: Plan, device: str) -> config.Config:
    tree = {
        "runtime": {"device": device, "dtype": dtype, "compile": compiled},
        "bench": {"seconds": plan.seconds, "batch_size": size},
    }
    return configure("train", preset, {**tree, **plan.presets[preset]})


def speed_of_steps(
    preset: str, size: int, dtype: str, compiled: bool, plan: Plan, device: str, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Speed of training steps, and the memory that the device gave, beside the estimate."""
    chosen = training_config(preset, size, dtype, compiled, plan, device)
    runtime = make_runtime(chosen.runtime, training=True)
    measures_memory = hasattr(torch._C, "_cuda_resetPeakMemoryStats")
    if measures_memory:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    [speed] = measured("train", preset, None, chosen, runtime, stop)
    if measures_memory:
        speed["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    chosen = config.change(chosen, {"train": {"batch_size": size}})
    filled = defaults.fill_in(
        chosen, tokenizer=chosen.text.tokenizer, vocab_size=chosen.model.vocab_size, device=runtime.device
    )
    speed["estimated_bytes"] = memory.needed_bytes(filled, runtime, speed["parameters"])
    return speed


def speed_of_books(task: str, dtype: str, plan: Plan, device: str, stop: Callable[[], bool]) -> dict[str, Any]:
    """Speeds of the bundled model for each memory length."""
    options = {"seconds": plan.seconds, "mem_lens": list(plan.mem_lens), "memory_dtype": dtype}
    if task == "eval":
        options["segment_len"] = plan.segment_len
    chosen = config.make({"bench": options, "runtime": {"device": device, "dtype": dtype}})
    runtime = make_runtime(chosen.runtime)
    model = store.load(models_folder() / "books", InferenceConfig(memory_dtype=dtype), device=runtime.device)
    return {"sweep": measured(task, "books", model, chosen, runtime, stop)}


def measured(
    task: str, name: str, model: Any, chosen: config.Config, runtime: Runtime, stop: Callable[[], bool]
) -> list[dict[str, Any]]:
    """The figures of `xlcli bench`; `TimeoutError` if the time was over before they were all measured."""
    events = list(bench.bench(task, name, model, chosen, runtime, stop=stop))
    if stop():
        raise TimeoutError
    return [asdict(event) for event in events if isinstance(event, Speed)]


def profile_step(preset: str, plan: Plan, device: str, out: Path) -> dict[str, Any]:
    """Profile of one training step with full memory."""
    chosen = training_config(preset, plan.batches[0], plan.dtypes[0], False, plan, device)
    chosen = config.change(chosen, {"train": {"batch_size": plan.batches[0]}})
    runtime = make_runtime(chosen.runtime, training=True)
    vocab_size = chosen.model.vocab_size
    chosen = defaults.fill_in(chosen, tokenizer="bytes", vocab_size=vocab_size, device=runtime.device)
    train = chosen.train
    n_ids = train.batch_size * (train.mem_len + 64 * train.segment_len)
    ids = np.random.default_rng(0).integers(0, vocab_size, n_ids).astype(np.uint16)
    run = TrainingRun(chosen, runtime, TokenFile(ids, len(ids)), 0)
    for _ in range(-(-train.mem_len // train.segment_len) + 2):
        run.train_step(0.5)
    return profiled(lambda: run.train_step(0.5), out / "profile-step.txt")


def profile_token(device: str, mem_len: int, out: Path) -> dict[str, Any]:
    """Profile of one token of the bundled model: prediction and choice."""
    runtime = make_runtime(RuntimeConfig(device=device))
    model = store.load(models_folder() / "books", device=runtime.device)
    session = InferenceSession.open(model, runtime, GenerateConfig(mem_len=mem_len), None)
    session.read(np.arange(mem_len + 8) % 200, lambda: False)
    rng = [SampleRNG(0)]

    def token() -> None:
        session.append(sample_tokens(session.predict(), rng, Sampling()))

    for _ in range(3):
        token()
    return profiled(token, out / "profile-token.txt")


def profiled(call: Callable[[], object], path: Path) -> dict[str, Any]:
    """Writes the operators of a call by their time to a file; returns how many there were, and the time of the call."""
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    with profile(activities=supported_activities()) as found:
        call()
    rows = found.key_averages()
    path.write_text(rows.table(sort_by="self_cpu_time_total", row_limit=PROFILED_ROWS))
    return {"seconds": seconds, "operators": sum(row.count for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    measure_all(given.out, given.device, given.minutes, small=given.small)


def measure_all(out: Path, device: str, minutes: float, *, small: bool) -> None:
    """Measures what is not in `out`/figures.jsonl yet, until the time is over."""
    plan = Plan(PRESETS, (32, 128, 256), (512, 3800), ("bfloat16", "float32"), 1.0, compiles=True)
    if small:
        plan = Plan(SMALL, (2,), (16,), ("float32",), 0.01, compiles=False, segment_len=32)
    deadline = time.monotonic() + 60 * minutes
    path = out / "figures.jsonl"
    known = set()
    if path.exists():
        known = {json.loads(line)["name"] for line in path.read_text().splitlines()}

    def stop() -> bool:
        return time.monotonic() > deadline

    for name, measure in figures(plan, device, out, stop):
        if name in known:
            continue
        if stop():
            return
        started = time.monotonic()
        try:
            figure = measure()
        except TimeoutError:
            return
        except Exception:  # the others are measured all the same
            figure = {"error": traceback.format_exc()}
        with path.open("a") as file:
            file.write(json.dumps({"name": name, "took": round(time.monotonic() - started, 1), **figure}) + "\n")


if __name__ == "__main__":
    main()
