"""Compressed texts are restored to the byte, have the size that evaluation reports, and nothing else is restored."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import PROSE, RUNTIME, VARIANTS, slow_bits, toy

from xlcli.coding import End, FileReader, Frame, workflow
from xlcli.config import OnlineConfig
from xlcli.errors import ConfigError, DataError
from xlcli.events import Coded, StoppedEarlyError
from xlcli.inference import InferenceSession

MODELS = {kind: toy(kind, dtype=torch.float32) for kind in ("bytes", "sentencepiece")}


def compress(model, *portions, **options):
    *results, coded = workflow.compress(model, portions, OnlineConfig(**options), RUNTIME)
    data = b"".join(result for result in results if isinstance(result, bytes))
    assert isinstance(coded, Coded)
    assert coded.compressed_bytes == len(data)
    return data, coded


def decompress(model, data):
    reader = FileReader([data], "x")
    header = reader.header()
    *results, coded = workflow.decompress(model, header, reader, RUNTIME)
    text = b"".join(result for result in results if isinstance(result, bytes))
    assert isinstance(coded, Coded)
    assert coded.bytes == len(text)
    return text


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(MODELS)), st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes_are_restored_however_they_arrive(kind, portions):
    data, _ = compress(MODELS[kind], *portions)
    assert decompress(MODELS[kind], data) == b"".join(portions)
    assert data == compress(MODELS[kind], b"".join(portions))[0]


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("options", [{}, {"context_cache": 20}], ids=str)
def test_ten_thousand_texts_are_restored(options):
    draw = random.Random(0)
    for i in range(10_000):
        kind = draw.choice(list(MODELS))
        text = draw.choice(
            [
                b"",
                draw.randbytes(draw.randrange(40)),
                PROSE.encode()[draw.randrange(200) :][: draw.randrange(60)],
                bytes([draw.randrange(256)]) * draw.randrange(80),
                "\u4e16\U0001f98a\u0000\u200b".encode() * draw.randrange(4) + b"\xe4\xb8",
            ]
        )
        assert decompress(MODELS[kind], compress(MODELS[kind], text, **options)[0]) == text, i


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model(variant):
    model, text = toy(variant=variant, dtype=torch.float32), PROSE.encode()[:40]
    assert decompress(model, compress(model, text, mem_len=5)[0]) == text


def test_adapted_weights():
    model, text = MODELS["bytes"], PROSE.encode()[:150]
    data, coded = compress(model, text, adapt=True, adapt_block=16, adapt_lr=0.01)
    assert decompress(model, data) == text
    assert coded.bits < compress(model, text)[1].bits


@pytest.mark.parametrize(
    "options", [{"memory_dtype": "int8"}, {"context_cache": 20, "adapt": True, "adapt_block": 8}], ids=str
)
def test_options_are_those_of_the_file(options):
    text = PROSE.encode()[:40]
    assert decompress(MODELS["bytes"], compress(MODELS["bytes"], text, **options)[0]) == text


def test_a_forged_frame_is_refused():
    model = MODELS["bytes"]
    reader = FileReader([compress(model, b"text")[0]], "x")
    header = reader.header()
    for words in (b"\xff" * 16, b"", b"\0" * 40):
        data = header.encode() + Frame(99, words).encode() + End(99, bytes(32)).encode()
        with pytest.raises(DataError, match="restored"):
            decompress(model, data)


def test_other_threads_and_number_types_are_refused():
    model = MODELS["bytes"]
    data, _ = compress(model, b"text")
    for change in ({"threads": 2}, {"dtype": torch.bfloat16}):
        reader = FileReader([data], "x")
        with pytest.raises(DataError, match=r"cpu.*float32.*\b1\b"):
            list(workflow.decompress(model, reader.header(), reader, dataclasses.replace(RUNTIME, **change)))


@pytest.mark.parametrize("kind", MODELS)
def test_the_size_is_the_surprisal_of_the_text(kind):
    model, text = MODELS[kind], PROSE.encode()
    data, coded = compress(model, text, mem_len=9)
    assert coded.bits == pytest.approx(sum(slow_bits(toy(kind), text, mem_len=9)), rel=1e-5)
    payload = len(data) - len(compress(model, mem_len=9)[0])
    assert coded.bits / 8 <= payload <= coded.bits / 8 * 1.001 + 12 + 8  # a frame, the end of the range coder


def test_several_frames(monkeypatch):
    monkeypatch.setattr(workflow, "FRAME_TOKENS", 10)
    model, text = MODELS["bytes"], PROSE.encode()[:45]
    data, _ = compress(model, text)
    reader = FileReader([data], "x")
    reader.header()
    assert [getattr(frame, "n_tokens", 0) for frame in reader.frames()] == [10, 10, 10, 10, 5, 0]
    assert decompress(model, data) == text


def test_a_text_of_certain_tokens_is_restored(monkeypatch):
    model, text = toy(dtype=torch.float32), b"a" * 2000
    certain = torch.zeros(1, 256)
    certain[0, ord("a")] = 99.0
    monkeypatch.setattr(InferenceSession, "predict", lambda session: certain)
    data, coded = compress(model, text)
    assert coded.bits < 1
    assert len(text) <= 64 * (len(data) - len(compress(model)[0]))
    assert decompress(model, data) == text


def test_another_model_is_refused():
    data, _ = compress(MODELS["bytes"], b"text")
    other = dataclasses.replace(MODELS["bytes"], fingerprints={"weights": "other"})
    with pytest.raises(DataError, match="fingerprint"):
        decompress(other, data)


def test_other_numbers_are_refused():
    data, _ = compress(MODELS["bytes"], b"text")
    changed = toy(dtype=torch.float32)
    with torch.no_grad():
        next(changed.network.parameters()).mul_(1 + 1e-5)
    with pytest.raises(DataError, match="numbers"):
        decompress(changed, data)


def test_a_text_with_another_hash_is_not_confirmed():
    data, _ = compress(MODELS["bytes"], b"some text")
    with pytest.raises(DataError, match="restored"):
        decompress(MODELS["bytes"], data[:-1] + bytes([data[-1] ^ 1]))


def test_words_cannot_be_restored():
    with pytest.raises(ConfigError, match="word"):
        compress(toy("words", dtype=torch.float32), b"text")


def test_a_stop_ends_both():
    model = MODELS["bytes"]
    data, _ = compress(model, b"some text")
    with pytest.raises(StoppedEarlyError):
        list(workflow.compress(model, [b"some text"], OnlineConfig(), RUNTIME, stop=lambda: True))
    reader = FileReader([data], "x")
    with pytest.raises(StoppedEarlyError):
        list(workflow.decompress(model, reader.header(), reader, RUNTIME, stop=lambda: True))
