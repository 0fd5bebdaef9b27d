"""Overlapping windows of a fixed length, which a text that arrives is read in: `stride` without memory."""

import itertools

import numpy as np
import pytest
import torch
from test_streaming import cut, only, run, through_disk
from toys import PROSE, RUNTIME, VARIANTS, toy

from xlcli.config import EvalConfig, GenerateConfig, StreamConfig, validate
from xlcli.errors import ConfigError, StateError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Score, TokenScore
from xlcli.generation import generate
from xlcli.inference import InferenceSession
from xlcli.model.decoder import Decoder, make_decoder
from xlcli.online import make_scorer

WINDOW, STRIDE = 8, 3
TEXT = PROSE.encode()[:61]


def read_anew(network, text):
    """Surprisal (t - 1) of text (1 t), each from a new state that reads the window of the token up to it."""
    nats = []
    for i in range(text.shape[1] - 1):
        start = max(0, -(-(i - WINDOW + 1) // STRIDE) * STRIDE)
        state = network.init_state(1, mem_len=0, segment_len=WINDOW)
        logits, _ = network.logits(text[:, start : i + 1], state)
        nats.append(-logits[0].log_softmax(-1)[text[0, i + 1]])
    return torch.stack(nats)


def read(reader, text, sizes, state):
    """Surprisal (t - 1) of text (1 t) in calls of these sizes, and the last state."""
    nats, at, n, turns = [], 0, text.shape[1] - 1, itertools.cycle(sizes)
    while at < n:
        stop = min(at + next(turns), n)
        out = reader.score(text[:, at:stop], text[:, at + 1 : stop + 1], state)
        nats, state, at = [*nats, out.nll[0]], out.state, stop
    return torch.cat(nats), state


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@torch.inference_mode()
def test_every_token_is_predicted_in_its_window_however_the_text_is_cut(variant):
    network, text = toy(variant=variant).network, torch.tensor([[10, *TEXT]])
    expected = read_anew(network, text)
    for sizes in ((61,), (1,), (7, 1, 2), (8,), (11,)):
        state = network.init_state(1, mem_len=0, segment_len=WINDOW, stride=STRIDE)
        torch.testing.assert_close(read(network, text, sizes, state)[0], expected, rtol=0, atol=1e-9)


@torch.inference_mode()
def test_compiled_kernels_read_the_same_windows():
    network, text = toy(variant="sliding", dtype=torch.float32).network, torch.tensor([[10, *TEXT]])
    decoder = make_decoder(network, "float32")
    assert isinstance(decoder, Decoder)
    expected = read_anew(network, text)
    state = network.init_state(1, mem_len=0, segment_len=WINDOW, stride=STRIDE)
    for i, nats in enumerate(expected):
        logits, state = decoder.logits(text[:, i : i + 1], state)
        assert -logits[0].log_softmax(-1)[text[0, i + 1]].item() == pytest.approx(nats.item(), abs=1e-4)


@pytest.mark.parametrize("variant", [None, "sliding"])
def test_a_saved_stream_continues_in_its_window(variant, tmp_path):
    model, options = toy(variant=variant, mem_len=0), {"emit": "tokens", "stride": STRIDE, "mem_len": 0}
    whole = [t.bits for t in only(run(model, [TEXT], **options), TokenScore)]
    for at in (1, WINDOW, 20, 60):
        saved = []
        first = run(model, [TEXT[:at]], save=saved.append, **options)
        resume = through_disk(tmp_path / "state", saved[-1], model)
        second = run(model, cut(TEXT[at:], (5, 9)), resume=resume, emit="tokens")
        tokens = only(first, TokenScore)[: saved[-1].stream.n_tokens] + only(second, TokenScore)
        assert [t.bits for t in tokens] == pytest.approx(whole, abs=1e-9)


def test_evaluation_streams_and_learning_agree(tmp_path):
    """`eval` reads the windows of a model whose positions end as several sequences, or in order if the model learns."""
    model = toy(variant="sliding", mem_len=0)
    (tmp_path / "text").write_bytes(TEXT)

    def nats(**options):
        events = evaluate(model, [tmp_path / "text"], validate(EvalConfig, options), RUNTIME)
        [score] = [event for event in events if isinstance(event, Score)]
        assert (score.mem_len, score.segment_len, score.stride) == (0, WINDOW, options.get("stride", 4))
        return score.nats

    for stride in ({}, {"stride": 5}):
        streamed = run(model, [TEXT], **stride)[-1].bits
        assert nats(**stride) / 0.6931471805599453 == pytest.approx(streamed, abs=1e-9)
        assert nats(**stride, context_cache=1, batch_size=1) == pytest.approx(nats(**stride), rel=0.2)
    options = validate(EvalConfig, {"adapt": True, "adapt_block": 7, "adapt_lr": 1e-30, "adapt_decay": 0.0})
    reader, text = make_scorer(model.network, model.tokenizer, options), torch.tensor([[10, *TEXT]])
    for sizes in ((61,), (5,), (1,)):
        with torch.inference_mode():
            state = reader.init_state(1, mem_len=0, segment_len=WINDOW, stride=4)
            adapted, _ = read(reader, text, sizes, state)
        assert adapted.sum().item() == pytest.approx(nats(), abs=1e-6)


@pytest.mark.parametrize("variant", [None, "sliding", "linear"])
def test_a_strict_context_is_exactly_the_tokens_before(variant, tmp_path):
    """Each token from a new state that reads the five tokens before it, and no others, for any batch."""
    model = toy(variant=variant)
    (tmp_path / "text").write_bytes(TEXT)
    ids, expected = torch.tensor([[10, *TEXT]]), 0.0
    with torch.inference_mode():
        for i in range(1, ids.shape[1]):
            state = model.network.init_state(1, mem_len=0, segment_len=8)
            logits, _ = model.network.logits(ids[:, max(0, i - 5) : i], state)
            expected -= logits[0].log_softmax(-1)[ids[0, i]].item()
    for batch in (1, 7, None):
        options = validate(EvalConfig, {"context": 5, "batch_size": batch})
        events = list(evaluate(model, [tmp_path / "text"], options, RUNTIME))
        [score] = only(events, Score)
        assert score.nats == pytest.approx(expected, abs=1e-9)
        assert not [event for event in events if isinstance(event, Notice) and "window" in event.text]


@pytest.mark.parametrize("other", [{"mem_len": 0}, {"segment_len": 5}, {"stride": 1}, {"sweep_mem_len": (1, 2)},
                                   {"span": "growing"}, {"adapt": True}, {"context_cache": 9}])  # fmt: skip
def test_a_strict_context_is_refused_beside_another_one(other):
    with pytest.raises(ConfigError, match="context"):
        validate(EvalConfig, {"context": 5} | other)


def test_one_notice_says_that_a_long_text_is_read_in_windows(tmp_path):
    model = toy(variant="sliding", mem_len=0)
    for text, n in ((TEXT[:WINDOW], 0), (TEXT, 1)):
        (tmp_path / "text").write_bytes(text)
        prompted = generate(model, text[:WINDOW], GenerateConfig(max_new_tokens=n), RUNTIME)
        for events in (run(model, [text]), evaluate(model, [tmp_path / "text"], EvalConfig(), RUNTIME), prompted):
            assert len([event for event in events if isinstance(event, Notice) and "window" in event.text]) == n
    assert not only(run(model, [TEXT], stride=3), Notice)


def test_greedy_generation_predicts_in_windows():
    model, ids = toy(variant="sliding", mem_len=0), [10, *b"The "]
    session = InferenceSession.open(model, RUNTIME, GenerateConfig(), None)
    session.read(np.array(ids[1:]), lambda: False)
    for _ in range(30):
        start = max(0, -(-(len(ids) - WINDOW) // 4) * 4)
        with torch.inference_mode():
            anew = model.network.init_state(1, mem_len=0, segment_len=WINDOW)
            expected, _ = model.network.logits(torch.tensor([ids[start:]]), anew)
        logits = session.predict()
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
        session.last_tokens = [int(logits.argmax())]
        ids += session.last_tokens


def test_a_stream_without_windows_does_not_go_on_in_windows():
    model, saved = toy(mem_len=0), []
    run(model, [TEXT], save=saved.append)
    with pytest.raises(StateError, match="stride"):
        run(model, [TEXT], resume=saved[-1], stride=STRIDE)


def test_windows_that_cannot_be_are_refused():
    model = toy(variant="sliding", mem_len=0)
    for options, said in (
        ({"stride": 9}, "stride"),
        ({"mem_len": 4, "stride": 2}, "mem_len"),
        ({"mem_len": 4}, "mem_len"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(model, [TEXT], **options)
    with pytest.raises(ConfigError, match="stride"):
        run(toy(mem_len=0), [TEXT], mem_len=4, stride=2)
    with pytest.raises(ConfigError, match="segment_len"):
        EvalConfig(segment_len=999).reading(model.config.model, model.config.train.reading)
    assert StreamConfig().reading(model.config.model, model.config.train.reading).stride == 4
