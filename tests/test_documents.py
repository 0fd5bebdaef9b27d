"""Documents: a document after others has the numbers of the document alone, in training, evaluation and streams."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator

import numpy as np
import pytest
import torch
from toys import PROSE, RUNTIME, VARIANTS, toy
from variants import COMBINATIONS, IN_TURN, attentions, has_sinks, make, thinned, tokens

from xlcli import config
from xlcli.config import EvalConfig, GenerateConfig, StreamConfig
from xlcli.errors import ConfigError, StateError
from xlcli.evaluation import evaluate
from xlcli.events import Generated, LineScore, Notice, Score, TokenScore, WordScore
from xlcli.generation import generate
from xlcli.store.state_files import load_state, save_state
from xlcli.streaming import stream
from xlcli.text.documents import Document

TEXTS = [f"{line}\n" for line in PROSE.splitlines()[:5] if line] + ["x\n", PROSE[:200].replace("\n", " ") + "\n", "\n"]


def json_lines(texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def scored(model, paths, **options):
    """Score and bits of each token."""
    events = list(evaluate(model, paths, EvalConfig(**options), RUNTIME, per_token=True))
    [score] = [event for event in events if isinstance(event, Score)]
    return score, [event for event in events if isinstance(event, TokenScore)]


@pytest.fixture
def texts(tmp_path):
    """A file of JSON lines, and a file of each text."""
    (tmp_path / "all.jsonl").write_bytes(json_lines(TEXTS))
    alone = []
    for i, text in enumerate(TEXTS):
        alone.append(tmp_path / f"{i:02}.txt")
        alone[-1].write_text(text)
    return tmp_path / "all.jsonl", alone


EVALUATED = [*itertools.product([None, *VARIANTS], (9, 0))]


@pytest.mark.parametrize("case", thinned(EVALUATED, EVALUATED[::3]), ids=str)
def test_evaluation_is_that_of_each_document_alone(case, texts):
    variant, mem_len = case
    path, alone = texts
    model = toy(variant=variant)
    each = [scored(model, [one], mem_len=mem_len, batch_size=1)[0] for one in alone]
    nats = math.fsum(score.nats for score in each)
    for paths, settings in (([path], {}), (alone, {"batch_size": 1}), ([path], {"batch_size": 3})):
        score, _ = scored(model, paths, mem_len=mem_len, reset_on_document=True, **settings)
        assert score.nats == pytest.approx(nats, abs=1e-9)
        assert (score.documents, score.tokens) == (len(TEXTS), sum(one.tokens for one in each))
        assert score.batch_size <= settings.get("batch_size", 10**6)
    if mem_len:
        for segment_len in (5, 400):
            score, _ = scored(model, [path], mem_len=mem_len, reset_on_document=True, segment_len=segment_len)
            assert score.nats == pytest.approx(nats, abs=1e-9)
    assert scored(model, [path], mem_len=mem_len)[0].nats != pytest.approx(nats, abs=1e-3)


READ_ROUNDED = [*itertools.product([None, "local", "adaptive"], ("bfloat16", "int8"), (9, 0))]


@pytest.mark.parametrize("case", thinned(READ_ROUNDED, READ_ROUNDED[::5]), ids=str)
def test_documents_with_rounded_memory_are_those_of_each_alone(case, texts):
    variant, dtype, mem_len = case
    path, alone = texts
    model, options = toy(variant=variant), {"mem_len": mem_len, "memory_dtype": dtype}
    expected = []
    for text in alone:
        expected += bits(stream(model, [text.read_bytes()], StreamConfig(emit="tokens", **options), RUNTIME))
    plain, _ = scored(model, [path], mem_len=mem_len, reset_on_document=True)
    assert plain.nats / math.log(2) != pytest.approx(sum(expected), abs=1e-4)
    for settings in ({"batch_size": 1}, {"batch_size": 3}, {"segment_len": 5} if mem_len else {}):
        score, found = scored(model, [path], reset_on_document=True, **options, **settings)
        assert score.memory_dtype == dtype
        assert score.nats / math.log(2) == pytest.approx(sum(expected), abs=1e-8)
        assert [token.bits for token in found] == pytest.approx(expected, abs=1e-5)
    portions = [portion for t in TEXTS for portion in (Document(t[:9].encode()), t[9:].encode())]
    settings = StreamConfig(emit="tokens", reset_on_document=True, **options)
    assert bits(stream(model, portions, settings, RUNTIME)) == pytest.approx(expected, abs=1e-9)


def test_no_word_is_in_two_documents(tmp_path):
    for name, text in (("1", "The quick"), ("2", "brown fox")):
        (tmp_path / name).write_text(text)
    score, _ = scored(toy("words"), [tmp_path / "1", tmp_path / "2"], reset_on_document=True)
    assert score.words == score.tokens == 4
    assert score.word_perplexity == pytest.approx(score.perplexity)
    assert scored(toy("words"), [tmp_path / "1", tmp_path / "2"])[0].words == 3


def test_a_stopped_evaluation_is_not_that_of_the_shortest_documents(tmp_path):
    """After half of 40 documents of 1 to 40 words, one per call, about half of the text is scored, not a quarter."""
    texts = [" ".join(["word"] * n) + "\n" for n in range(1, 41)]
    (tmp_path / "all.jsonl").write_bytes(json_lines(texts))
    asked = itertools.count()
    options = EvalConfig(reset_on_document=True, batch_size=1, segment_len=512)
    events = list(evaluate(toy(), [tmp_path / "all.jsonl"], options, RUNTIME, stop=lambda: next(asked) > 40))
    score = next(event for event in events if isinstance(event, Score))
    assert score.partial
    assert 15 <= score.documents <= 25
    mean = score.bytes / score.documents
    assert mean > 0.8 * sum(map(len, texts)) / len(texts)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_tokens_come_in_order_with_the_bits_of_their_document(kind, texts):
    path, alone = texts
    model = toy(kind)
    _, together = scored(model, [path], reset_on_document=True)
    apart = [token for one in alone for token in scored(model, [one])[1]]
    assert b"".join(token.text for token in together) == "".join(TEXTS).encode()
    assert [token.text for token in together] == [token.text for token in apart]
    assert [token.bits for token in together] == pytest.approx([token.bits for token in apart], abs=1e-5)
    assert [t.byte for t in together] == [0, *itertools.accumulate(len(t.text) for t in together)][:-1]


def test_files_without_a_line_end_are_tokenized_apart(tmp_path):
    halves = [tmp_path / "a", tmp_path / "b"]
    halves[0].write_text("The quick bro")
    halves[1].write_text("wn fox jumps over the dog.")
    model = toy("sentencepiece")
    apart = [scored(model, [half])[0] for half in halves]
    together, _ = scored(model, halves, reset_on_document=True)
    assert together.nats == pytest.approx(sum(score.nats for score in apart), abs=1e-9)
    assert together.tokens == sum(score.tokens for score in apart)
    assert together.tokens > scored(model, halves)[0].tokens


def test_loss_by_context_counts_from_the_beginning_of_each_document(texts):
    path, _ = texts
    score, found = scored(toy(), [path], mem_len=9, reset_on_document=True)
    within = np.concatenate([np.arange(len(text.encode())) for text in TEXTS])
    bits = np.array([token.bits for token in found])
    assert sum(each.tokens for each in score.by_context) == (within < 18).sum()
    for each in score.by_context:
        inside = (within + 1 >= each.start) & (within + 1 < each.stop)
        assert each.bits_per_byte == pytest.approx(bits[inside].mean(), abs=1e-5)


def test_one_document_is_one_text(tmp_path):
    (tmp_path / "a").write_text(PROSE)
    one, other = (scored(toy(), [tmp_path / "a"], reset_on_document=reset)[0] for reset in (True, False))
    assert (one.nats, one.by_context, one.documents) == (other.nats, other.by_context, 1)


def lines_alone(folder, text):
    """A file of each line."""
    paths = []
    for i, line in enumerate(text.splitlines(keepends=True)):
        paths.append(folder / f"line{i}")
        paths[-1].write_bytes(line)
    return paths


BY_LINE = [*itertools.product([None, "lsh", "linear", "learned", "adaptive"], (9, 0))]


@pytest.mark.parametrize("case", thinned(BY_LINE, BY_LINE[::3]), ids=str)
def test_each_line_has_the_score_of_the_line_alone(case, tmp_path):
    variant, mem_len = case
    text = PROSE.encode() + b"\n\nno line end"
    (tmp_path / "all").write_bytes(text)
    model = toy(variant=variant)
    paths = lines_alone(tmp_path, text)
    each = [scored(model, [path], mem_len=mem_len)[0] for path in paths]
    nats = math.fsum(score.nats for score in each)
    for settings in ({}, {"batch_size": 3}, {"reset_on_document": False}):
        score, found = scored(model, [tmp_path / "all"], mem_len=mem_len, each_line=True, **settings)
        assert score.nats == pytest.approx(nats, abs=1e-9)
        assert (score.documents, score.each_line) == (len(paths), True)
        read = text.replace(b"\r\n", b"\n")
        assert b"".join(token.text for token in found) == read
        assert [token.line for token in found] == [1 + read[: token.byte].count(b"\n") for token in found]
    assert scored(model, [tmp_path / "all"], mem_len=mem_len)[0].nats != pytest.approx(nats, abs=1e-3)
    expected = [score.nats / math.log(2) for score in each]
    for portions in ([text], [text[i : i + 7] for i in range(0, len(text), 7)]):
        options = StreamConfig(mem_len=mem_len, each_line=True)
        lines = [event for event in stream(model, portions, options, RUNTIME) if isinstance(event, LineScore)]
        assert [line.bits for line in lines] == pytest.approx(expected, abs=1e-9)
        tokens = StreamConfig(mem_len=mem_len, each_line=True, emit="tokens")
        assert sum(bits(stream(model, portions, tokens, RUNTIME))) == pytest.approx(sum(expected), abs=1e-9)


def test_each_line_of_documents_and_of_held_out_text(tmp_path):
    texts = ["The fox\nThe dog\n", "The fox"]
    (tmp_path / "all.jsonl").write_bytes(json_lines(texts))
    (tmp_path / "valid.txt").write_text("The fox\nThe dog\nThe fox\n")
    model = toy(folder=tmp_path)
    object.__setattr__(model, "held_out", lambda split: tmp_path / "valid.txt")
    object.__setattr__(model, "held_out_documents", lambda split: [0, 8])
    expected, _ = scored(model, [tmp_path / "valid.txt"], each_line=True)
    for paths in ([tmp_path / "all.jsonl"], None):
        score, _ = scored(model, paths, each_line=True)
        assert (score.documents, score.nats) == (3, pytest.approx(expected.nats, abs=1e-9))


def test_a_resumed_stream_of_lines_goes_on_within_a_line(tmp_path):
    model, text, options = toy("sentencepiece"), PROSE.encode(), StreamConfig(each_line=True)
    expected = [event for event in stream(model, [text], options, RUNTIME) if isinstance(event, LineScore)]
    for at in (1, 44, 45, 46, 60):
        saved = []
        list(stream(model, [text[:at]], options, RUNTIME, save=saved.append))
        save_state(tmp_path / "state", saved[-1], model=model)
        session = load_state(tmp_path / "state", model=model, device="cpu")
        events = stream(model, [text[at:]], options, RUNTIME, resume=session)
        rest = [event for event in events if isinstance(event, LineScore)]
        assert [line.bits for line in rest] == pytest.approx([line.bits for line in expected[-len(rest) :]], abs=1e-9)


SENTENCES = 'The quick fox jumps.\n\nShe said: "Is it so?"\nÉmile sleeps!\n«Non.»\nA dog, e.g. this one, barks.\n'


@pytest.mark.parametrize(
    ("text", "is_list"),
    [
        (SENTENCES, True),
        (SENTENCES.replace("\n", "\r\n"), True),
        (SENTENCES[:70], False),
        (SENTENCES.replace("\n", " "), False),
        (SENTENCES + "And this line is wrapped at\nsome width, as books are.\n", False),
        (SENTENCES + "One sentence. And another one.\n" * 2, False),
        ("Jul  1 09:00:55 host kernel: a full disk.\n" * 9, False),
        ("def main():\n    return 'A sentence.'\n" * 9, False),
        ("When forty winters shall besiege thy brow,\n" * 9, False),
    ],
)
def test_a_list_of_sentences_is_told_of(text, is_list, tmp_path):
    (tmp_path / "text").write_text(text)
    for settings in ({}, {"each_line": True}, {"adapt": True}):
        notices = [e.text for e in evaluate(toy(), [tmp_path / "text"], EvalConfig(**settings), RUNTIME)
                   if isinstance(e, Notice)]  # fmt: skip
        assert any("--each-line" in notice for notice in notices) == (is_list and not settings)


def test_the_value_of_training_is_the_default_and_is_reported(texts):
    path, _ = texts
    model = toy()
    trained = config.change(model.config, {"train": {"reset_on_document": True}})
    apart = toy()
    object.__setattr__(apart, "config", trained)
    expected, _ = scored(model, [path], reset_on_document=True)
    assert scored(apart, [path])[0].nats == expected.nats
    notices = [event.text for event in evaluate(apart, [path], EvalConfig(), RUNTIME) if isinstance(event, Notice)]
    assert "training" in notices[0]
    assert scored(apart, [path], reset_on_document=False)[0].nats == scored(model, [path])[0].nats
    [*_, stats] = stream(apart, map(Document, (t.encode() for t in TEXTS)), StreamConfig(emit="stats"), RUNTIME)
    assert stats.bits == pytest.approx(expected.nats / math.log(2), abs=1e-8)


def bits(events):
    return [event.bits for event in events if isinstance(event, TokenScore)]


@pytest.mark.parametrize("emit", ["tokens", "lines", "stats", "none"])
@pytest.mark.parametrize("variant", [None, "lsh", "linear", "learned"])
def test_a_stream_has_the_score_of_the_evaluation(variant, emit, texts):
    model = toy(variant=variant)
    score, _ = scored(model, [texts[0]], reset_on_document=True)
    options = StreamConfig(emit=emit, reset_on_document=True)
    [*_, stats] = stream(model, [Document(text.encode()) for text in TEXTS], options, RUNTIME)
    assert stats.bits == pytest.approx(score.nats / math.log(2), abs=1e-8)
    assert stats.lines == sum(text.count("\n") for text in TEXTS)
    [*_, joined] = stream(model, [Document(t.encode()) for t in TEXTS], StreamConfig(emit=emit), RUNTIME)
    assert joined.bits != pytest.approx(stats.bits, abs=1e-3)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_stream_cut_anywhere_and_resumed_clears_its_memory_in_the_same_places(kind, tmp_path):
    model = toy(kind)
    # Portions without a line end, of which some begin a document and others continue it.
    texts = [b"The quick bro", b"wn fox", b" jumps over the dog", b"", b"s.\nShe said", b"\n", b" that"]
    portions = [Document(text) if i in (1, 2, 5) else text for i, text in enumerate(texts)]
    options = StreamConfig(emit="tokens", reset_on_document=True)
    documents = [texts[0], texts[1], b"".join(texts[2:5]), b"".join(texts[5:])]
    expected = [bit for one in documents for bit in bits(stream(model, [one], StreamConfig(emit="tokens"), RUNTIME))]
    assert bits(stream(model, portions, options, RUNTIME)) == pytest.approx(expected, abs=1e-9)
    for at, is_stopped in itertools.product(range(len(portions) + 1), (False, True)):
        saved, stopped = [], []

        def arriving(at=at, is_stopped=is_stopped, stopped=stopped):
            for i, portion in enumerate(portions[:at]):
                if is_stopped and i == at - 1:
                    stopped.append(True)  # this portion is saved unscored
                yield portion

        early = list(stream(model, arriving(), options, RUNTIME, save=saved.append, stop=lambda s=stopped: bool(s)))
        save_state(tmp_path / "state", saved[-1], model=model)
        session = load_state(tmp_path / "state", model=model, device="cpu")
        second = bits(stream(model, portions[at:], options, RUNTIME, resume=session))
        assert [*bits(early)[: session.stream.n_tokens], *second] == pytest.approx(expected, abs=1e-9)


def test_an_empty_document_ends_the_one_before_it(tmp_path):
    model, saved = toy(), []
    options = StreamConfig(emit="tokens", reset_on_document=True)
    expected = [
        bit for one in (b"ab", b"cd") for bit in bits(stream(model, [one], StreamConfig(emit="tokens"), RUNTIME))
    ]
    empty = Document(b"")
    for portions in ([b"ab", empty, b"cd"], [empty, b"ab", empty, empty, b"c", b"d"], [b"ab", empty, Document(b"cd")]):
        assert bits(stream(model, portions, options, RUNTIME)) == pytest.approx(expected, abs=1e-9)
    portions = iter([b"ab", empty])  # stopped after both
    list(stream(model, portions, options, RUNTIME, save=saved.append, stop=lambda: not operator.length_hint(portions)))
    save_state(tmp_path / "state", saved[-1], model=model)
    session = load_state(tmp_path / "state", model=model, device="cpu")
    assert bits(stream(model, [b"cd"], options, RUNTIME, resume=session)) == pytest.approx(expected, abs=1e-9)


def test_a_damaged_list_of_documents_in_a_state_is_refused(tmp_path):
    model, saved = toy(), []
    portions = [b"ab", Document(b"cd"), Document(b"ef")]
    options = StreamConfig(emit="tokens", reset_on_document=True)
    list(stream(model, portions, options, RUNTIME, save=saved.append, stop=lambda: len(portions) == 3))
    pending = saved[-1].pending
    for starts in ((3, 2), (-1,), (len(pending.data) + 1,)):
        broken = dataclasses.replace(saved[-1], pending=dataclasses.replace(pending, documents=starts))
        save_state(tmp_path / "state", broken, model=model)
        with pytest.raises(StateError, match="documents"):
            load_state(tmp_path / "state", model=model, device="cpu")


def test_generation_continues_the_last_document_of_a_stopped_stream():
    model, saved = toy("sentencepiece"), []
    stopped = []

    def portions():
        yield b"The quick brown fox jumps over the lazy dog.\n"
        stopped.append(True)
        yield Document(b"She said that\n")

    options = StreamConfig(reset_on_document=True)
    list(stream(model, portions(), options, RUNTIME, save=saved.append, stop=lambda: bool(stopped)))
    assert saved[-1].pending.documents
    made, alone = (
        [
            event.text
            for event in generate(model, *arguments, RUNTIME, seed=3, resume=resume)
            if isinstance(event, Generated)
        ]
        for arguments, resume in (
            ((b"the fox", GenerateConfig(max_new_tokens=20)), saved[-1].fork()),
            ((b"She said that\nthe fox", GenerateConfig(max_new_tokens=20)), None),
        )
    )
    assert made == alone


SOFTMAX = [
    name
    for name in IN_TURN
    if all(layer.kind in ("full", "local") for layer in attentions(name)) and not name.startswith("zeros-")
]
SIZES = [[5, 1, 1, 30, 3, 24], [2, 40, 22], [64]]
"""Sizes of the documents of each row."""
WITHIN = torch.tensor([[i for size in row for i in range(size)] for row in SIZES])


def packed(model, x, y, *, mem_len, span, memory, segment_len=13, starts=(0, 0, 0)):
    """Surprisal (b t) of rows of documents, in segments, with the memory of training."""
    state = model.init_state(
        len(x), mem_len=mem_len, segment_len=segment_len, span=span, memory=memory, offsets=list(starts)
    )
    out = []
    for at in range(0, x.shape[1], segment_len):
        part = slice(at, at + segment_len)
        nll, state = model.score(x[:, part], y[:, part], state, WITHIN[:, part])[:2]
        out.append(nll)
    return torch.cat(out, 1)


def alone(model, x, y, *, mem_len, span, memory, segment_len=13):
    """The same, each document by itself, cut in the same places."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for i, row in enumerate(SIZES):
        first = 0
        for size in row:
            settings = {"mem_len": mem_len, "segment_len": segment_len, "span": span, "memory": memory}
            state = model.init_state(1, **settings)
            at = first
            while at < first + size:
                stop = min(at - at % segment_len + segment_len, first + size)
                if not mem_len:
                    state = model.init_state(1, **settings)
                out[i : i + 1, at:stop], state = model.score(x[i : i + 1, at:stop], y[i : i + 1, at:stop], state)[:2]
                at = stop
            first += size
    return out


MODES = [
    {"mem_len": 9, "span": "uniform", "memory": "keyvalue"},
    {"mem_len": 9, "span": "growing", "memory": "hidden"},
    {"mem_len": 30, "span": "growing", "memory": "keyvalue"},
    {"mem_len": 0, "span": "growing", "memory": "hidden"},
]


@pytest.mark.parametrize("name", thinned(SOFTMAX, SOFTMAX[::6]))
def test_a_document_in_a_training_segment_is_as_alone(name):
    model, x, y = make(name), tokens(3, 64), tokens(3, 64, seed=2)
    x = x.masked_fill(WITHIN == 0, 5)
    for mode in MODES[has_sinks(name) :]:
        with torch.no_grad():
            assert torch.allclose(packed(model, x, y, **mode), alone(model, x, y, **mode), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", thinned(SOFTMAX, SOFTMAX[3::6]))
def test_earlier_documents_change_neither_predictions_nor_gradients(name):
    model, x, y = make(name, dtype=torch.float32), tokens(3, 64), tokens(3, 64, seed=2)
    first = torch.tensor([40, 42, 0])
    later = torch.arange(64) >= first[:, None]
    other = torch.where(later, x, tokens(3, 64, seed=3))

    def both(x):
        model.zero_grad()
        nll = packed(model, x, y, **MODES[1])
        nll[later].sum().backward()
        return nll[later].detach(), [p.grad for p in model.parameters() if p.grad is not None]

    (nll, gradients), (changed, others) = both(x), both(other)
    assert torch.equal(nll, changed)
    # Products with rows of other tokens are zero; their sums over the batch may be in another order.
    for one, two in zip(gradients, others, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        plain = packed(model, x, y, **MODES[1]), packed(model, other, y, **MODES[1])
    assert torch.equal(plain[0][later], plain[1][later])


def test_segments_without_a_boundary_take_the_usual_path(monkeypatch):
    model = make(next(name for name in SOFTMAX if name.startswith("full-xl")))
    x, y = tokens(3, 26), tokens(3, 26, seed=2)
    masks = []
    visible = type(model).score.__globals__["AttentionContext"]
    monkeypatch.setattr(
        "xlcli.model.lm.AttentionContext",
        lambda *a, **k: masks.append((context := visible(*a, **k)).mask.reach) or context,
    )
    state = model.init_state(3, mem_len=9, segment_len=13, span="growing", memory="hidden")
    for at, positions in ((0, torch.arange(13)), (13, torch.arange(13, 26)), (0, torch.arange(26, 39))):
        _, state = model.score(x[:, at : at + 13], y[:, at : at + 13], state, positions.expand(3, 13))[:2]
    _, state = model.score(x[:, :13], y[:, :13], state, torch.arange(8, 21).expand(3, 13))[:2]
    assert [mask is None for mask in masks] == [True, True, True, False]


@pytest.mark.parametrize(
    "name", [name for name in COMBINATIONS if name.startswith(("linear-rope-0-pre-0", "lsh-none-0-pre-0"))]
)
def test_attention_without_a_mask_is_refused_in_training(name):
    with pytest.raises(ConfigError, match="reset_on_document"):
        config.make({"model": COMBINATIONS[name], "train": {"reset_on_document": True}})
    config.make({"model": COMBINATIONS[name], "eval": {"reset_on_document": True}})


def test_words_of_a_stream_end_with_their_document():
    portions = [Document(b"The dog ran"), Document(b"barked"), Document(b"twice.\n")]
    options = StreamConfig(emit="words", reset_on_document=True)
    found = [event for event in stream(toy(), portions, options, RUNTIME) if isinstance(event, WordScore)]
    assert [word.word for word in found] == ["The", "dog", "ran", "barked", "twice."]
    [alone] = [e for e in stream(toy(), [b"barked"], StreamConfig(emit="words"), RUNTIME) if isinstance(e, WordScore)]
    assert found[3].bits == pytest.approx(alone.bits, abs=1e-9)


def test_a_document_has_its_score_beside_longer_ones(tmp_path):
    first, second = "The dog ran.", " ".join(TEXTS) * 3
    for name, texts in (("one", [first, "a"]), ("two", [first, second])):
        (tmp_path / name).write_bytes(json_lines(texts))
    model = toy(mem_len=2, segment_len=3)
    model.network.limit_distances(None, 4)
    wanted = {"mem_len": 0, "segment_len": 64, "reset_on_document": True}
    one, two = (bits(scored(model, [tmp_path / name], **wanted)[1]) for name in ("one", "two"))
    assert two[: len(first)] == pytest.approx(one[: len(first)], abs=1e-9)
