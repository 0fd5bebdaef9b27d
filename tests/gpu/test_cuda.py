"""Training, evaluation and generation of toy models on a CUDA device: as on the CPU, rounded, compiled, repeated."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from device import DEVICE, cross_section, marks, no_cross_section, only_cuda
from toys import PROSE, RUNTIME, VARIANTS, toy

from xlcli import config
from xlcli.config import EvalConfig, GenerateConfig
from xlcli.evaluation import evaluate
from xlcli.events import Generated, Score
from xlcli.generation import generate
from xlcli.runtime import Runtime, make_runtime
from xlcli.text.tokens import TokenFile
from xlcli.training import memory
from xlcli.training.run import TrainingRun
from xlcli.training.validation import check_finite

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from short_runs import After, corpus, curve, go, remains, small

pytestmark = marks
CUDA = Runtime(DEVICE, torch.float32, 1)
KINDS = {"plain": {}, **VARIANTS}
every = pytest.mark.parametrize("kind", cross_section(KINDS, [*KINDS]))


def new_run(model, device, dtype="float32", runtime=None, **train):
    tree = {
        "model": {"vocab_size": 256, "dim": 32, "n_layers": 2, "attention": {"n_heads": 2}},
        "train": {"segment_len": 32, "mem_len": 32, "batch_size": 4, "lr": 1e-3, "max_steps": 9, **train},
        "runtime": {"device": str(device), "dtype": dtype, **(runtime or {})},
    }
    settings = config.make(tree, {"model": model})
    ids = np.frombuffer(PROSE.encode() * 9, np.uint8)
    return TrainingRun(settings, make_runtime(settings.runtime, training=True), TokenFile(ids, len(ids)), 10)


@every
def test_training_has_the_losses_of_the_cpu(kind):
    here, there = (new_run(KINDS[kind], device) for device in ("cpu", DEVICE))
    for step in range(4):
        on_cpu, on_cuda = here.train_step(step / 9), there.train_step(step / 9)
        assert on_cuda.nats == pytest.approx(on_cpu.nats, rel=2e-3)
        assert on_cuda.grad_norm == pytest.approx(on_cpu.grad_norm, rel=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every
def test_training_in_16_bits_is_close_to_float32(kind, dtype):
    exact, rounded = (new_run(KINDS[kind], DEVICE, each) for each in ("float32", dtype))
    for step in range(4):
        assert rounded.train_step(step / 9).nats == pytest.approx(exact.train_step(step / 9).nats, rel=3e-2)
    assert all(parameter.dtype == torch.float32 for parameter in rounded.model.parameters())
    check_finite(rounded)


@every
@pytest.mark.parametrize("mem_len", [0, 9])
def test_evaluation_has_the_score_of_the_cpu(kind, mem_len, tmp_path):
    (tmp_path / "text").write_bytes(PROSE.encode())
    model = toy(variant=None if kind == "plain" else kind, dtype=torch.float32)
    nats = []
    for runtime in (RUNTIME, CUDA):
        model.network.to(runtime.device)
        events = evaluate(model, [tmp_path / "text"], EvalConfig(mem_len=mem_len, batch_size=3), runtime)
        nats += [event.nats for event in events if isinstance(event, Score)]
    on_cpu, on_cuda = nats
    assert on_cuda == pytest.approx(on_cpu, rel=1e-4)


@every
def test_greedy_decoding_gives_the_text_of_the_cpu(kind):
    model = toy(variant=None if kind == "plain" else kind, dtype=torch.float32)
    options = GenerateConfig(max_new_tokens=20, temperature=0.0)
    texts = []
    for runtime in (RUNTIME, CUDA):
        model.network.to(runtime.device)
        made = generate(model, b"The fox", options, runtime, seed=1)
        texts += [event.text for event in made if isinstance(event, Generated)]
    assert texts[0] == texts[1]


@only_cuda
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every
def test_a_compiled_run_has_the_same_losses(kind, dtype):
    plain, compiled = (new_run(KINDS[kind], DEVICE, dtype, {"compile": on}) for on in (False, True))
    for step in range(4):
        exact = plain.train_step(step / 9).nats
        assert compiled.train_step(step / 9).nats == pytest.approx(exact, rel=1e-3 if dtype == "float32" else 3e-2)


@pytest.fixture
def deterministic():
    yield {"deterministic": True}
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every
def test_deterministic_runs_are_equal_to_the_bit(kind, dtype, deterministic):
    dropout = dict.fromkeys(("embedding", "residual", "feedforward"), 0.1)
    one, other = (new_run(KINDS[kind] | {"dropout": dropout}, DEVICE, dtype, deterministic) for _ in range(2))
    for run in (one, other):
        torch.manual_seed(0)
        for step in range(3):
            run.train_step(step / 9)
    for parameter, again in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(parameter, again)


@no_cross_section
def test_a_deterministic_run_is_resumed_to_the_bit(deterministic):
    text, runtime = corpus(), {"device": str(DEVICE), "dtype": "float32", **deterministic}
    go(small(runtime=runtime), text, "whole")
    After(3).run(small(runtime=runtime), text, "halves")
    go({}, text, "halves", resume=True)
    assert remains("halves") == remains("whole")


@no_cross_section
def test_a_resumed_run_continues_on_the_device():
    text, runtime = corpus(), {"device": str(DEVICE), "dtype": "float32"}
    go(small(runtime=runtime), text, "whole")
    After(3).run(small(runtime=runtime), text, "halves")
    go({}, text, "halves", resume=True)
    whole, halves = curve("whole"), curve("halves")
    assert [row["step"] for row in halves] == [row["step"] for row in whole]
    for one, other in zip(whole, halves, strict=True):
        # Some CUDA kernels add in varying order.
        assert other.get("nats", math.nan) == pytest.approx(one.get("nats", math.nan), rel=1e-3, nan_ok=True)


@only_cuda
@every
def test_the_memory_estimate_is_what_the_device_allocates(kind, monkeypatch):
    monkeypatch.setattr(memory, "FRAGMENTATION", 1.0)
    sizes = {"dim": 128, "n_layers": 3} if kind != "adaptive" else {"dim": 128}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = new_run(KINDS[kind] | sizes, "cuda", segment_len=128, mem_len=64, batch_size=16)
    for _ in range(3):
        run.train_step(0.5)
    taken = torch.cuda.max_memory_allocated() - before
    estimate = memory.needed_bytes(run.config, run.runtime, run.model.n_parameters)
    assert taken / memory.ACCURACY < estimate < memory.ACCURACY * taken
