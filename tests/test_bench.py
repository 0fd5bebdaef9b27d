from types import SimpleNamespace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from xlcli.bench import measure, timing
from xlcli.config import Config
from xlcli.config import make as make_config
from xlcli.runtime import make_runtime
from xlcli.text.tokens import TokenFile


def _drain(events):
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


def _timed(monkeypatch, durations, seconds, **options):
    """Durations that `repeat` returns for calls of these durations on a clock of their own."""
    clock, calls = [0.0], iter(durations)

    def call():
        clock[0] += next(calls)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    runtime = make_runtime(Config().runtime)
    return _drain(timing.repeat(call, "calls", seconds, runtime, lambda: False, **options)).seconds


@pytest.mark.parametrize("warmup", [-2, 1, 3])
def test_the_first_call_is_never_timed(warmup, monkeypatch):
    assert _timed(monkeypatch, (64, 4), 2.0, warmup=warmup) == (4,)


def test_a_slow_first_call_does_not_end_the_measurement(monkeypatch):
    assert _timed(monkeypatch, (64, 1, 2, 1, 2), 4.0, warmup=1) == (1, 1, 2)


@pytest.mark.parametrize("layers", [["full", "full"], ["full", "local"]])
def test_operations_of_training_include_projections_of_remembered_inputs(layers):
    def operations(memory):
        config = make_config({
            "model": {
                "dim": 8, "n_layers": 2, "vocab_size": 32,
                "attention": {
                    "kind": "mixed", "n_heads": 2,
                    "layers": [{"kind": kind} | ({"window": 4} if kind == "local" else {}) for kind in layers],
                },
            },
            "train": {"memory": memory, "segment_len": 6, "mem_len": 6, "batch_size": 3, "lr": 0.001},
            "runtime": {"device": "cpu", "dtype": "float32"},
        })  # fmt: skip
        runtime = make_runtime(config.runtime, training=True)
        config = measure.check_training(config, 6, runtime)
        ids = measure.random_tokens(32, 500)
        run = measure.make_training_run(config, runtime, TokenFile(ids, len(ids)), 0)
        run.train_step(0.5)
        with FlopCounterMode(display=False) as counter:
            run.train_step(0.5)
        return measure.training_flops(config), counter.get_total_flops() / 18

    (hidden, counted_hidden), (keyvalue, counted_keyvalue) = operations("hidden"), operations("keyvalue")
    assert hidden - keyvalue == counted_hidden - counted_keyvalue > 0
