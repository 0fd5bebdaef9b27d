from types import SimpleNamespace

import pytest
import torch

from xlcli import bench, machine
from xlcli.bench import timing
from xlcli.config import BenchConfig, Config, RuntimeConfig
from xlcli.config import make as make_config
from xlcli.errors import ResourceError
from xlcli.events import Notice
from xlcli.inference import InferenceSession
from xlcli.model.build import build_model
from xlcli.model.decoder import make_decoder
from xlcli.presets import read_preset
from xlcli.runtime import make_runtime


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
    watch = timing.Stopwatch(make_runtime(Config().runtime), seconds, lambda: False)
    return tuple(_drain(watch.repeat(call, "calls", **options)))


@pytest.mark.parametrize("warmup", [1, 3])
def test_the_first_call_is_never_timed(warmup, monkeypatch):
    assert _timed(monkeypatch, (64, 4), 2.0, warmup=warmup) == (4,)


def test_a_slow_first_call_does_not_end_the_measurement(monkeypatch):
    assert _timed(monkeypatch, (64, 1, 2, 1, 2), 4.0, warmup=1) == (1, 1, 2)


def test_slow_calls_that_fill_the_memory_are_not_timed(monkeypatch):
    assert _timed(monkeypatch, (9, 9, 9, 64, 4), 2.0, fill=3) == (4,)


def _operations_of_a_product(x_has_gradient):
    x, w = torch.ones(2, 3, requires_grad=x_has_gradient), torch.ones(3, 5, requires_grad=True)
    return timing.count_operations(lambda: (x @ w).sum().backward())


def test_operations_of_a_step_are_those_that_are_computed():
    assert _operations_of_a_product(True) == 3 * 2 * 2 * 3 * 5
    assert _operations_of_a_product(False) == 2 * 2 * 2 * 3 * 5  # no gradient of an input, such as remembered ones
    out = torch.ones(1, 2, 2)
    assert timing.count_operations(lambda: out.baddbmm_(torch.ones(1, 2, 7), torch.ones(1, 7, 2))) == 2 * 2 * 7 * 2


def _network(*, position=None, **model):
    tree = {"dim": 16, "n_layers": 2, "vocab_size": 50, "attention": {"n_heads": 2}}
    return build_model(make_config({"model": tree | ({"position": position} if position else {}) | model}).model).eval()


def test_a_loss_of_frequent_words_computes_no_cluster_of_rare_ones():
    network = _network(embedding={"cutoffs": [20, 35], "div_val": 2})
    state, tokens = network.init_state(1, mem_len=4, segment_len=4), torch.zeros(1, 6, dtype=torch.int64)

    def operations(word):
        return timing.count_operations(lambda: network.score(tokens, torch.full_like(tokens, word), state)[:2])

    assert operations(5) < operations(25)
    assert operations(25) - operations(5) > operations(40) - operations(5) > 0  # later clusters are narrower


def _after_reading(network, n, **options):
    state = network.init_state(1, mem_len=n, segment_len=4, **options)
    with torch.inference_mode():
        return network.logits(torch.zeros(1, 3 * n, dtype=torch.int64), state)[1]


@pytest.mark.parametrize("model", [
    {"position": {"kind": "xl", "n_features": 6}},
    {"position": {"kind": "rope"}},
    {"position": {"kind": "none"}, "feedforward": {"kind": "relu"}},
    {"position": {"kind": "xl"}, "attention": {"n_heads": 2, "kind": "local", "window": 5}},
])  # fmt: skip
def test_operations_of_kernels_are_those_of_modules(model):
    network = _network(**model)
    state = _after_reading(network, 9)
    with torch.inference_mode():
        modules = timing.count_operations(lambda: network.logits(torch.zeros(1, 1, dtype=torch.int64), state))
    projected = 0
    if model["position"] == {"kind": "xl"}:  # 16 features, a head of width 8: keys are projected once
        projected = 2 * 2 * 2 * (16 * 8 + 6 * (16 - 8))
    assert make_decoder(network, "float32").operations(state) == modules - projected


def test_kernels_read_weights_in_their_encoding_and_memory_in_its_type():
    network = _network(position={"kind": "xl", "n_features": 6}, embedding={"per_layer": True})
    state, rounded = _after_reading(network, 9), _after_reading(network, 9, memory_dtype="bfloat16")
    read = {dtype: make_decoder(network, dtype).read_bytes(state) for dtype in ("float32", "bfloat16", "int8")}
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * network.config.ffn_dim) + 50 * 16
    assert read["float32"] == network.read_bytes + state.bytes
    assert read["float32"] - read["bfloat16"] == 2 * matrices  # W_R, biases and norms stay in float32
    assert 0 < 3 * matrices - (read["float32"] - read["int8"]) < matrices / 2  # scales of rows
    assert make_decoder(network, "float32").read_bytes(rounded) == read["float32"] - state.bytes // 2


def _bench(task, model, **options):
    runtime = make_runtime(RuntimeConfig(dtype=options.pop("dtype", "auto")))
    *_, speed = _events(task, model, runtime, lambda: False, mem_len=9, **options)
    return speed


def _events(task, model, runtime, stop, **options):
    config = model.config.model_copy(update={"bench": BenchConfig(seconds=0.01, **options)})
    return bench.bench(task, model.name, model, config, runtime, stop=stop)


@pytest.fixture(autouse=True)
def _small_peaks(monkeypatch):
    monkeypatch.setattr(timing, "READ_BYTES", 2**16)
    monkeypatch.setattr(timing, "WIDTHS", dict.fromkeys(timing.WIDTHS, (16, 32)))


def _untrained(weight_dtype):
    changes = {"model": {"dim": 16, "n_layers": 1}, "bench": {"weight_dtype": weight_dtype}}
    config = make_config(read_preset("tiny"), changes)
    return bench.untrained("tiny", config, make_runtime(config.runtime))


def test_modules_read_rounded_weights_in_float32():
    plain, rounded = _untrained("float32"), _untrained("int8")
    read = _bench("eval", plain).read_bytes_per_token
    assert _bench("eval", rounded).read_bytes_per_token == read
    assert (
        _bench("decode", rounded, dtype="bfloat16").read_bytes_per_token > 4 * rounded.network.config.n_matrix_weights
    )


def test_rates_above_a_peak_are_no_shares(monkeypatch):
    def measure_peaks(watch):
        watch.bytes_per_second, watch.flops_per_second = peaks
        yield from ()

    monkeypatch.setattr(timing.Stopwatch, "measure_peaks", measure_peaks)
    for peaks in ((1.0, 1e30), (1e30, 1.0)):
        speed = _bench("eval", _untrained("float32"))
        assert [speed.read_share is None, speed.flops_share is None] == [peak == 1.0 for peak in peaks]


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
