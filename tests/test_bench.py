from types import SimpleNamespace

import pytest
from corpora import drain

from xlcli import bench, machine
from xlcli.config import BenchConfig, Config, RuntimeConfig
from xlcli.config import make as make_config
from xlcli.errors import ResourceError
from xlcli.events import Notice
from xlcli.inference import InferenceSession
from xlcli.presets import read_preset
from xlcli.runtime import make_runtime


def _timed(monkeypatch, durations, seconds, **options):
    """Durations that `repeat` returns for calls of these durations on a clock of their own."""
    clock, calls = [0.0], iter(durations)

    def call():
        clock[0] += next(calls)

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    watch = bench.Stopwatch(make_runtime(Config().runtime), seconds, lambda: False)
    return tuple(drain(watch.repeat(call, "calls", **options)))


@pytest.mark.parametrize("warmup", [1, 3])
def test_the_first_call_is_never_timed(warmup, monkeypatch):
    assert _timed(monkeypatch, (64, 4), 2.0, warmup=warmup) == (4,)


def test_a_slow_first_call_does_not_end_the_measurement(monkeypatch):
    assert _timed(monkeypatch, (64, 1, 2, 1, 2), 4.0, warmup=1) == (1, 1, 2)


def test_slow_calls_that_fill_the_memory_are_not_timed(monkeypatch):
    assert _timed(monkeypatch, (9, 9, 9, 64, 4), 2.0, fill=3) == (4,)


def _events(task, model, runtime, stop, **options):
    config = model.config.model_copy(update={"bench": BenchConfig(seconds=0.01, **options)})
    return bench.bench(task, model.name, model, config, runtime, stop=stop)


def _untrained(weight_dtype):
    changes = {"model": {"dim": 16, "n_layers": 1}, "bench": {"weight_dtype": weight_dtype}}
    config = make_config(read_preset("tiny"), changes)
    return bench.untrained("tiny", config, make_runtime(config.runtime))


def test_settings_of_inference_apply_to_a_preset():
    config = make_config(read_preset("small-universal"), {"bench": {"n_steps": 6}})
    assert bench.untrained("small-universal", config, make_runtime(config.runtime)).network.stack.n_steps == 6


def test_decoding_says_whether_kernels_are_used():
    runtime = make_runtime(RuntimeConfig(dtype="bfloat16"))
    *events, speed = _events("decode", _untrained("float32"), runtime, lambda: False)
    assert speed.kernels is False
    assert any("PyTorch" in event.text for event in events if isinstance(event, Notice))


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda *_: 1000)
    monkeypatch.setattr(bench, "build_model", None)
    with pytest.raises(ResourceError, match="tiny"):
        _untrained("float32")


def test_a_stop_while_the_prompt_is_read_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(InferenceSession, "read", lambda self, ids, stop: 0 if stop() else len(ids))
    monkeypatch.setattr(InferenceSession, "reset", lambda self: stopping.append(True))
    stopping = []
    runtime = make_runtime(RuntimeConfig(dtype="bfloat16"))
    events = _events("decode", _untrained("float32"), runtime, lambda: bool(stopping), mem_len=9)
    assert "stopped" in [event.text for event in events if isinstance(event, Notice)][-1]
    assert len(stopping) == 1
