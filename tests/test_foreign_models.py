"""Models with tokenizers of others in every workflow: tokens that hold line ends, ids without a vocabulary."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import RUNTIME, slow_bits, toy

from xlcli import generation
from xlcli.config import EvalConfig, GenerateConfig, StreamConfig
from xlcli.errors import DataError
from xlcli.evaluation import evaluate
from xlcli.events import Generated, LineScore, Notice, Score, StreamStats, TokenScore, WordScore
from xlcli.generation import generate, generate_prompts
from xlcli.store.state_files import load_state, save_state
from xlcli.streaming import stream
from xlcli.text.foreign import LONGEST_PART

TEXT = (
    "The dog and the fox.\nThe fox's den: 12345 steps.\n\n\n  the dog ...\n/usr/the\nthe\n"
    "漢字の漢字 naïve café\n\tthe\n\n \nthe lazy dog.\n"
).encode()  # fmt: skip
IDS = b"  1 22 89\n3\n\n4 5  6\n 77 \n8"
BLOCK = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
kinds = pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "unigram", "ids"])


def text_for(kind):
    return IDS if kind == "ids" else TEXT


def run(model, portions, *, resume=None, save=None, on_token=None, **options):
    return list(stream(model, portions, StreamConfig(**options), RUNTIME, resume=resume, save=save, on_token=on_token))


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def cut(data, sizes):
    ends = itertools.takewhile(lambda end: end < len(data), itertools.accumulate(itertools.cycle(sizes)))
    return [data[a:b] for a, b in itertools.pairwise([0, *ends, len(data)])]


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path / "cache"))

    def events(model, text, **options):
        (tmp_path / "t").write_bytes(text)
        shown = {name: options.pop(name, False) for name in ("per_token", "words")}
        return list(evaluate(model, [tmp_path / "t"], EvalConfig(**options), RUNTIME, **shown))

    return events


@kinds
def test_streams_however_cut_evaluations_and_the_slow_way_agree(kind, evaluated):
    model, text = toy(kind), text_for(kind)
    expected, lines = slow_bits(model, text), text.splitlines(keepends=True)
    events = evaluated(model, text, per_token=True)
    tokens = only(events, TokenScore)
    assert [t.bits for t in tokens] == pytest.approx(expected, abs=1e-4)  # kept in float32
    assert b"".join(t.text for t in tokens) == text
    assert [t.line for t in tokens] == [1 + text[: t.byte].count(b"\n") for t in tokens]
    [score] = only(events, Score)

    @BLOCK
    @given(sizes)
    def check(sizes):
        heard = []
        found = run(model, cut(text, sizes), on_token=heard.append)
        assert [(t.byte, t.text, t.line) for t in heard] == [(t.byte, t.text, t.line) for t in tokens]
        assert [t.bits for t in heard] == pytest.approx(expected, abs=1e-9)
        scored = only(found, LineScore)
        assert [line.text for line in scored] == lines
        assert [line.line for line in scored] == list(range(1, len(lines) + 1))
        for line in scored:
            own = [t.bits for t in heard if t.line == line.line]
            assert (line.tokens, line.bits) == (len(own), pytest.approx(sum(own), abs=1e-9))
            assert b"".join(piece for piece, _ in line.spans) == line.text
        stats = only(found, StreamStats)[-1]
        assert (stats.lines, stats.bytes, stats.tokens) == (len(lines), len(text), len(tokens))
        assert stats.bits_per_byte == pytest.approx(score.bits_per_byte, abs=1e-9)

    check()
    if kind in ("gpt2", "llama3"):
        assert any(b"\n" in t.text[:-1] for t in tokens)  # the text has tokens of two lines


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "unigram"])
def test_the_row_of_a_line_comes_when_the_next_line_has_arrived(kind):
    lines = [b"the dog:\n", b"  the fox\n", b"\tthe\n", b"    dog.\n", b"the\n"]
    rows = []

    def portions():
        for i, line in enumerate(lines):
            assert len(rows) >= i - 1
            yield line

    for event in stream(toy(kind), portions(), StreamConfig(), RUNTIME):
        rows += [event] * isinstance(event, LineScore)
    assert [row.text for row in rows] == lines


@BLOCK
@given(sizes, st.integers(0, len(TEXT)), st.sampled_from(["gpt2", "llama3", "unigram", "ids"]), st.booleans())
def test_two_streams_with_a_state_between_them_are_one(tmp_path, sizes, at, kind, by_line):
    model, text, saved = toy(kind), text_for(kind), []
    text = text.replace(b"\n\n", b"\n") if kind == "ids" else text
    emit = "lines" if by_line else "tokens"
    whole = run(model, [text], emit=emit)
    first = run(model, cut(text[:at], sizes), emit=emit, save=lambda session: saved.append(session.fork()))
    save_state(tmp_path / "s", saved[-1], model=model)
    resume = load_state(tmp_path / "s", model=model, device="cpu")
    second = run(model, cut(text[at:], sizes), emit=emit, resume=resume)
    known = resume.stream.line_start if by_line else resume.stream.n_bytes
    kept = [e for e in only(first, LineScore | TokenScore) if e.byte + len(e.text) <= known and e.byte < known]
    both = kept + only(second, LineScore | TokenScore)
    expected = only(whole, LineScore | TokenScore)
    if text[:at].endswith(b"\n"):  # the state is that of a text that ends there
        assert kept == only(first, LineScore | TokenScore)
        assert b"".join(e.text for e in both) == text
        return
    assert [(e.byte, e.text) for e in both] == [(e.byte, e.text) for e in expected]
    assert [e.bits for e in both] == pytest.approx([e.bits for e in expected], abs=1e-9)
    if by_line:
        assert [e.tokens for e in both] == [e.tokens for e in expected]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "ids"])
def test_lines_alone_are_the_same_in_a_stream_and_an_evaluation(kind, evaluated):
    model, text = toy(kind), text_for(kind).replace(b"\n\n", b"\n")
    lines = text.splitlines(keepends=True)
    bits = [sum(slow_bits(model, line)) for line in lines]
    for options in ({"each_line": True}, {"reset_on": ""}):
        found = only(run(model, cut(text, [7, 1, 30]), **options), LineScore)
        assert [(e.text, pytest.approx(e.bits, abs=1e-9)) for e in found] == list(zip(lines, bits, strict=True))
    [score] = only(evaluated(model, text, each_line=True, reset_on_document=True), Score)
    assert score.documents == len(lines)
    assert score.nats == pytest.approx(sum(bits) * math.log(2), abs=1e-3)


def words_as_by_hand(model, text):
    """Words of one line, character by character: product of tokens, times the end after, by the end before."""
    ids, vocabulary = model.tokenizer.encode(text).tolist(), model.tokenizer.texts
    firsts = [piece.decode("utf-8", "replace")[:1] for piece in vocabulary]
    blank = [not first or first.isspace() or "\u3041" <= first <= "\u9fff" for first in firsts]
    blank = torch.tensor([b and i < len(vocabulary) - 7 for i, b in enumerate(blank)])  # the last 7 ids have no token
    before = [model.tokenizer.start_id, *ids]
    state = model.network.init_state(1, mem_len=len(ids) + 1, segment_len=len(ids) + 1)
    with torch.inference_mode():
        hidden, _ = model.network(torch.tensor([before]), state)
        p = model.network.head.logits(hidden[0]).softmax(-1)
    ends = [p[i, blank].sum().item() for i in range(len(ids) + 1)]
    place, starts, found = 0, [], []
    for i, token in enumerate(ids):
        seen = text[:place]
        if i == 0 or (vocabulary[token][:1].isspace() and seen.strip() and not seen[-1:].isspace()):
            starts.append((i, place, 1.0 if i == 0 else ends[i]))
        place += len(vocabulary[token])
    for (i, a, before_p), (j, b, after_p) in itertools.pairwise([*starts, (len(ids), place, ends[len(ids)])]):
        product = math.prod(p[k, ids[k]].item() for k in range(i, j))
        after_p = 1.0 if text[a:b].endswith(b"\n") else after_p
        found.append((text[a:b].strip().decode(), -math.log2(product * after_p / before_p)))
    return [(word, bits) for word, bits in found if word]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2"])
@pytest.mark.parametrize("text", [b"The dog and the lazy fox.", b"The dogs jumped  far...\n", b"the\ttherefore the"])
def test_words_as_by_hand(kind, text):
    model = toy(kind, mem_len=200)
    expected = words_as_by_hand(model, text)
    found = [
        (word.word.strip(), pytest.approx(word.bits, abs=1e-9))
        for word in only(run(model, [text], emit="words"), WordScore)
    ]
    if not text.endswith(b"\n") or model.tokenizer.texts[model.tokenizer.encode(text)[-1]] != b"\n":
        assert found == expected
    if b"\t" not in text:
        assert [word for word, _ in expected] == text.decode().split()


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_words_of_many_lines(kind, evaluated):
    model, tokens = toy(kind), []
    words = only(run(model, cut(TEXT, [5, 11]), emit="words", on_token=tokens.append), WordScore)
    evaluations = only(evaluated(model, TEXT, words=True), WordScore)
    assert [(w.line, w.number, w.byte, w.word) for w in words] == [
        (w.line, w.number, w.byte, w.word) for w in evaluations
    ]
    assert [w.bits for w in words] == pytest.approx([w.bits for w in evaluations], abs=1e-4)
    for word in words:
        assert TEXT[word.byte :].startswith(word.word.strip().encode())
        assert word.line == 1 + TEXT[: word.byte].count(b"\n")
    for line in {word.line for word in words}:
        assert [w.number for w in words if w.line == line] == list(range(1, sum(w.line == line for w in words) + 1))
    alone = [token for token in tokens if not token.text.strip()]
    assert sum(word.tokens for word in words) + len(alone) >= len(tokens)


def test_scores_of_token_ids_come_with_a_notice(evaluated):
    assert only(evaluated(toy("ids"), b"1 2 3"), Notice)


def test_a_run_without_blanks_is_cut_in_the_same_places_by_a_stream(evaluated):
    model, text = toy("gpt2", n_layers=1, dtype=torch.float32), "漢字の漢字".encode() * (LONGEST_PART // 15 + 99)
    events = run(model, cut(text, [999]), mem_len=1, emit="none")
    assert events[-1].bytes == len(text)
    tokens = model.tokenizer.encode(text)
    assert events[-1].tokens == len(tokens)
    [score] = only(evaluated(model, text, mem_len=1), Score)
    assert (score.tokens, score.bytes) == (len(tokens), len(text))
    assert not only(run(toy("gpt2", mem_len=2), [TEXT]), Notice)


@kinds
def test_generation(kind, tmp_path):
    model, saved = toy(kind), []
    options = GenerateConfig(max_new_tokens=40, temperature=1.0)
    events = list(generate(model, text_for(kind), options, RUNTIME, seed=3, save=saved.append))
    [result] = only(events, Generated)
    pieces = [event.text for event in events if not isinstance(event, Generated | Notice)]
    assert b"".join(pieces).decode("utf-8", "replace") == result.text
    if kind == "ids":
        assert all(0 <= int(number) < 90 for number in result.text.split())
    save_state(tmp_path / "s", saved[-1], model=model)
    again = load_state(tmp_path / "s", model=model, device="cpu")
    assert len(list(generate(model, b"", options, RUNTIME, seed=3, resume=again))) > 0


def test_a_special_token_ends_a_text(monkeypatch):
    model = toy("gpt2")
    [special, *_] = model.tokenizer.separate_ids
    sampled = iter([[99], [98], [special], [97]])
    monkeypatch.setattr(generation, "sample_tokens", lambda *_: next(sampled))
    [result] = only(generate(model, b"the dog", GenerateConfig(max_new_tokens=9), RUNTIME, seed=0), Generated)
    assert (result.tokens, result.stop_reason) == (3, "stop")
    assert result.text == model.tokenizer.decode([99, 98]).decode("utf-8", "replace")


@pytest.mark.parametrize("templates", [{}, {"default": "{{ 7 }}"}])
def test_the_name_of_a_special_token_in_a_prompt_is_said_to_be_text(templates):
    model = replace(toy("gpt2"), record={"imported": {"chat_templates": templates}})
    [name, *_] = model.tokenizer.special_names
    assert not {*model.tokenizer.encode(name.encode())} & {*model.tokenizer.separate_ids}

    def said(*prompts):
        events = generate_prompts(model, prompts, GenerateConfig(max_new_tokens=1), RUNTIME, seed=0)
        return [event.text for event in events if isinstance(event, Notice) and "special token" in event.text]

    assert said(b"the dog") == []
    [remark] = said(f"{name}the dog".encode(), f"the {name} fox".encode())
    assert name in remark
    assert ("xlcli export" in remark) == bool(templates)


@pytest.mark.parametrize(
    ("text", "place"),
    [(b"1 2\n 90 4", "5"), (b"1 x", "2"), (b"-1", "0"), (b"1.0", "0"), (b"9" * 500, "0"), (b" \n", "")],
)
def test_what_is_no_id_is_refused_with_its_place(text, place, evaluated):
    for portions in ([text], cut(text, [1])):
        if place:
            with pytest.raises(DataError, match=f"byte {place}"):
                run(toy("ids"), portions)
    with pytest.raises(DataError, match=place or "empty"):
        evaluated(toy("ids"), text)
    with pytest.raises(DataError, match="empty"):
        evaluated(toy("ids"), b"1 2\n\n3\n", each_line=True, reset_on_document=True)
    with pytest.raises(DataError, match="byte 4"):
        run(toy("ids"), [b"1 2\n\n3\n"], each_line=True)
