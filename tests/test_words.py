import csv
import functools
import io
import itertools
import json
import math
from dataclasses import asdict
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import PROSE, RUNTIME, toy

from xlcli import api
from xlcli.cli.tables import Table, form_of
from xlcli.config import EvalConfig, StreamConfig
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Prediction, Row, Score, TokenScore, WordScore
from xlcli.store.state_files import WordPosition, load_state, save_state
from xlcli.streaming import stream
from xlcli.text.documents import Document
from xlcli.words import Boundaries, Predictions, Words

TEXT = PROSE.encode()


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def streamed(model, portions, **options):
    return only(stream(model, portions, StreamConfig(emit="words", **options), RUNTIME), WordScore)


def evaluated(model, path, **options):
    return only(evaluate(model, [path], EvalConfig(**options), RUNTIME, words=True), WordScore)


def log_p(model, ids):
    """Log-probabilities (t+1 v) before each token and after the last one, by logits of the whole text in one call."""
    network = model.network
    state = network.init_state(1, mem_len=len(ids) + 1, segment_len=len(ids) + 1)
    with torch.inference_mode():
        x, _ = network(torch.tensor([[model.tokenizer.start_id, *ids]]), state)
        return network.head.logits(x[0]).log_softmax(-1)


def entropy_of(p):
    """Entropy in bits of probabilities (v)."""
    return -(p * p.log2()).sum().item()


def words_of(model, text):
    """Words of a text of one line with all their columns, computed without the package's words: string by string."""
    ids = model.tokenizer.encode(text).tolist()
    vocabulary = [model.tokenizer.decode([i]) for i in range(model.tokenizer.vocab_size)]
    firsts = [piece.decode("utf-8", "replace")[:1] for piece in vocabulary]
    begins = [i for i, first in enumerate(firsts) if first.isspace() or "\u4e00" <= first <= "\u9fff"]
    p = log_p(model, ids).exp()
    found, before, start = [], 1.0, 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and not (vocabulary[ids[end]][:1].isspace() and not vocabulary[ids[end - 1]].isspace()):
            continue
        after = p[end, begins].sum().item()
        product = math.prod(p[i, ids[i]].item() for i in range(start, end))
        word = b"".join(vocabulary[i] for i in ids[start:end])
        if word.strip():
            byte = sum(len(vocabulary[i]) for i in ids[:start])
            first = p[start].double()
            found.append(
                {
                    "document": 1,
                    "line": 1,
                    "number": len(found) + 1,
                    "byte": byte + len(word) - len(word.lstrip()),
                    "word": word.strip().decode(),
                    "bits": pytest.approx(-math.log2(product * after / before), abs=1e-9),
                    "naive_bits": pytest.approx(-math.log2(product), abs=1e-9),
                    "token_entropy": pytest.approx(entropy_of(first), abs=1e-6),
                    "tokens": end - start,
                    "columns": {},
                    "next_entropy": pytest.approx(entropy_of(p[end].double()), abs=1e-6),
                }
            )
        before, start = after, end
    return found


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_words_as_by_hand(kind):
    model = toy(kind, mem_len=200)
    text = b"The quick brown fox said: the dog,  being lazy"
    assert [asdict(word) for word in streamed(model, [text])] == words_of(model, text)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("punctuation", [False, True])
def test_bits_of_words_and_line_ends_sum_to_those_of_the_text(kind, punctuation):
    model = toy(kind)
    tokens = []
    options = StreamConfig(emit="words", split_punctuation=punctuation)
    words = only(stream(model, [TEXT], options, RUNTIME, on_token=tokens.append), WordScore)
    total = math.fsum(token.bits for token in tokens)
    inside = math.fsum(word.bits for word in words)
    line_ends, before = 0.0, b"\n"
    for token in tokens:
        if token.text == b"\n":
            line_ends += token.bits + (0.0 if before == b"\n" else token.prediction.word_ends[int(punctuation)])
        before = token.text[-1:]
    assert inside + line_ends == pytest.approx(total, abs=1e-9)
    assert math.fsum(word.naive_bits for word in words) < total


class Toy:
    """A vocabulary of a few tokens with a random prediction after each text."""

    id_sizes = np.array([1, 1, 2, 1, 2, 1, 2])
    tokens = (b"a", b"b", b"ab", b" ", b" a", b"\n", b"b,")
    texts, vocab_size, separate_ids = tokens, len(tokens), ()

    def decode(self, ids):
        return b"".join(self.tokens[i] for i in ids)

    def log_p(self, ids):
        generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**40)
        return torch.randn(self.vocab_size, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


@pytest.mark.parametrize("punctuation", [False, True])
@pytest.mark.parametrize("context", [(0,), (4, 2), (4, 6), (2, 5)])
def test_probabilities_of_all_words_sum_to_one(context, punctuation):
    tokenizer, longest = Toy(), 4
    predictions = Predictions(tokenizer, StreamConfig(split_punctuation=punctuation), torch.device("cpu"))

    def kept(ids):
        return predictions.value(
            predictions(tokenizer.log_p(ids)[None, None], torch.zeros(1, 1, dtype=torch.int64))[0, 0].tolist()
        )

    def joined(ids):
        words = Words(predictions.boundaries, WordPosition())
        for i, token in enumerate(ids):
            bits = -tokenizer.log_p(ids[:i])[token].item() / math.log(2)
            ended = list(words.feed(TokenScore(1, i, tokenizer.tokens[token], bits, kept(ids[:i]))))
        return words, ended

    def total(ids):
        """Probability of the next word, if it begins with the tokens after the context and has at most `longest`."""
        words = joined(ids)[0]
        if not words.at.text:  # nothing, or a line end: it ends here, whatever follows
            before = 0.0 if context[-1] == 5 else kept(context).word_ends[punctuation and context[-1] == 6]
            p = math.prod(tokenizer.log_p(ids[:i])[ids[i]].exp().item() for i in range(len(context), len(ids)))
            return p / 2**before
        open_bits = words.at.bits + words.at.before
        whole = list(words.end(len(ids), kept(ids)))
        complete = 2 ** -whole[-1].bits if whole else 0.0
        if len(ids) == len(context) + longest:
            return complete + (2**-open_bits - complete)
        longer = [total((*ids, token)) for token in range(tokenizer.vocab_size) if not joined((*ids, token))[1]]
        return complete + math.fsum(longer)

    begins = [token for token in range(tokenizer.vocab_size) if context[-1] == 5 or joined((*context, token))[1]]
    assert math.fsum(total((*context, token)) for token in begins) == pytest.approx(1.0, abs=1e-9)


sizes = st.lists(st.integers(1, 90), min_size=1, max_size=6)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.sampled_from(["bytes", "sentencepiece", "words"]), st.booleans())
def test_stream_eval_and_score_agree_however_the_pipe_is_cut(tmp_path, sizes, kind, punctuation):
    model = toy(kind)
    (tmp_path / "text").write_bytes(TEXT[:-1])  # the last word is not ended by a line end
    expected = evaluated(model, tmp_path / "text", split_punctuation=punctuation)
    cuts = [0, *itertools.accumulate(itertools.islice(itertools.cycle(sizes), len(TEXT)))]
    portions = [TEXT[:-1][a:b] for a, b in itertools.pairwise(cuts) if a < len(TEXT) - 1]
    found = streamed(model, portions, split_punctuation=punctuation)
    assert [(w.document, w.line, w.number, w.byte, w.word, w.tokens) for w in found] == [
        (w.document, w.line, w.number, w.byte, w.word, w.tokens) for w in expected
    ]
    for name in ("bits", "naive_bits", "token_entropy"):
        assert [getattr(w, name) for w in found] == pytest.approx([getattr(w, name) for w in expected], abs=1e-4)
    if not punctuation:
        scored = api.Model(model, RUNTIME).score(TEXT[:-1]).words
        assert [(w.byte, w.word, pytest.approx(w.bits)) for w in scored] == [(w.byte, w.word, w.bits) for w in found]


@pytest.mark.parametrize("cut", [20, 47, 60, 101, 148, 151, 152])
def test_words_of_a_stream_that_is_continued(cut, tmp_path):
    model = toy("sentencepiece")
    expected = streamed(model, [TEXT])
    saved, found = [], []
    for text, calls in ((TEXT[:cut], [False, False]), (TEXT[cut:], [False] * 999)):
        resume = None
        if saved:
            save_state(tmp_path / "s", saved[-1], model=model)
            resume = load_state(tmp_path / "s", model=model, device="cpu")
        options = StreamConfig(emit="words")
        ended = functools.partial(next, iter(calls), True)
        found += only(stream(model, [text], options, RUNTIME, resume=resume, save=saved.append, stop=ended), WordScore)
    assert [(w.byte, w.word, w.number) for w in found] == [(w.byte, w.word, w.number) for w in expected]
    assert [w.bits for w in found] == pytest.approx([w.bits for w in expected], abs=1e-9)


def test_a_state_between_words_is_not_changed_by_its_readers():
    model, saved = api.Model(toy("sentencepiece"), RUNTIME), []
    list(api.stream(model, "The dog and the fo", emit="words", save=saved.append))
    found = [only(api.stream(model, "x, the end", state=saved[-1], emit="words"), WordScore) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][-1].number == 7


def test_the_three_errors_of_published_studies():
    model = toy("sentencepiece", mem_len=99)
    text = b"Indescribable foxes jumped, said she."
    first, *_, jumped, _, last = words = streamed(model, [text])
    ids = model.tokenizer.encode(text).tolist()
    p = log_p(model, ids)
    bits = [-p[i, token].item() / math.log(2) for i, token in enumerate(ids)]
    assert [word.word for word in words] == ["Indescribable", "foxes", "jumped,", "said", "she."]
    assert first.tokens > 1  # a word of several tokens is one word
    assert first.naive_bits == pytest.approx(sum(bits[: first.tokens]), abs=1e-9)  # and the first one has a score
    assert jumped.word == "jumped,"  # as readers see it
    assert last.tokens > 1
    split = streamed(model, [text], split_punctuation=True)
    assert [word.word for word in split] == ["Indescribable", "foxes", "jumped", ",", "said", "she", "."]
    assert sum(word.naive_bits for word in split) == pytest.approx(sum(bits), abs=1e-9)
    for word in (jumped, last):  # the comma is no surprise of the word, and costs bits of its own
        alone = next(each for each in split if each.byte == word.byte)
        assert alone.naive_bits < word.naive_bits


def fed(*tokens, punctuation=False):
    """Words of tokens of one bit each, with a certain end after every word."""
    words = Words(Boundaries(punctuation=punctuation), WordPosition())
    found, byte, line = [], 0, 1
    for token in tokens:
        found += words.feed(TokenScore(line, byte, token, 1.0, Prediction((-1.0, -1.0), 0.0)))
        byte, line = byte + len(token), line + token.endswith(b"\n")
    return [(w.line, w.byte, w.word, w.tokens, w.bits) for w in only([*found, *words.end(byte, None)], WordScore)]


def test_words_end_between_tokens_only():
    assert fed(b"a", b" b", b"\n", b"c") == [(1, 0, "a", 1, 2.0), (1, 2, "b", 1, 1.0), (2, 4, "c", 1, 1.0)]
    assert [w[2] for w in fed(b"a b", b"c", b" d.\n", b"\n", b" ", b" e")] == ["a bc", "d.", "e"]
    assert [w[2] for w in fed("我".encode(), "爱".encode(), b"a", "。".encode())] == ["我", "爱", "a", "。"]
    assert [w[2] for w in fed(*(bytes([byte]) for byte in "我爱 été".encode()))] == ["我", "爱", "été"]
    assert [w[2] for w in fed(b"don", b"'", b"t", b",", b'"', b" x", b"?", punctuation=True)] == [
        "don't",
        ',"',
        "x",
        "?",
    ]
    thai = ("ฉัน\u200bกิน", "\u200b", "ข้าว", "\u200bที่", "\u200b\n", "\u200bบ้าน")
    assert [w[:3] for w in fed(*(token.encode() for token in thai))] == [
        (1, 0, "ฉัน\u200bกิน"),
        (1, 24, "ข้าว"),
        (1, 39, "ที่"),
        (2, 55, "บ้าน"),
    ]
    assert [w[2] for w in fed(*(bytes([byte]) for byte in "ฉัน\u200bกิน\u200b".encode()))] == ["ฉัน", "กิน"]
    for blank in "\N{NO-BREAK SPACE}\N{THIN SPACE}\N{IDEOGRAPHIC SPACE}\N{ZERO WIDTH SPACE}":
        assert [w[2] for w in fed(f"sat{blank}".encode(), b"there", blank.encode(), b"\n", b"x")] == [
            "sat",
            "there",
            "x",
        ]
    assert [w[2] for w in fed(b"x" * 2**14, b"y", b" z")] == ["x" * 2**14, "y", "z"]


@pytest.mark.parametrize(
    ("text", "punctuation", "n_rows"),
    [
        ("アメリカの 猫、アメリカの", False, 2),  # characters of several tokens do not end the letters before them
        ("猫,the,dog. 世界", True, 0),
        ("كتاب، قلم؟ two", True, 2),
        (PROSE, False, 0),
    ],
)
def test_rows_of_several_words_are_counted_in_a_warning(text, punctuation, n_rows, tmp_path):
    path, model = tmp_path / "text", toy("bytes")
    path.write_text(text)
    options = {"split_punctuation": punctuation}
    runs = [
        [*evaluate(model, [path], EvalConfig(**options), RUNTIME, words=True)],
        [*stream(model, [text.encode()], StreamConfig(emit="words", **options), RUNTIME)],
    ]
    for events in runs:
        told = [each.text for each in only(events, Notice) if "several words" in each.text]
        assert len(told) == (n_rows > 0)
        assert all(remark.startswith(f"{n_rows} rows") and "`number`" in remark for remark in told)


def test_the_rest_of_a_word_that_was_cut_is_not_corrected_for_an_end_before_it():
    # Only the end of y, of one bit, is known to the model; z begins with it. Nothing ended between x and y.
    assert [w[4] for w in fed(b"x" * 2**14, b"y", b" z")] == [1.0, 2.0, 0.0]
    assert [w[4] for w in fed(b"a", b" " + b"x" * 2**14, b"y", b"y")] == [2.0, 0.0, 2.0]


def test_words_are_counted_anew_after_a_token_that_begins_in_the_line_before():
    words = Words(Boundaries(punctuation=False), WordPosition())
    found, byte, line = [], 0, 1
    for token in (b"a", b" c", b"\n\nd", b" e"):
        found += words.feed(TokenScore(line, byte, token, 1.0, Prediction((-1.0,), 0.0)))
        byte, line = byte + len(token), line + token.count(b"\n")
    found = only([*found, *words.end(byte, None)], WordScore)
    assert [(w.word, w.line, w.number) for w in found] == [("a", 1, 1), ("c", 1, 2), ("d", 3, 1), ("e", 3, 2)]


def test_places_of_words_are_offsets_in_bytes(tmp_path):
    text = "Zürich, é 漢字 \U0001f98a naïve\n\n  日本 fin de siècle – ça va?\n".encode()
    path = tmp_path / "text"
    path.write_bytes(text)
    for kind in ("bytes", "sentencepiece"):
        model = toy(kind, dtype=torch.float32)
        scored = api.Model(model, RUNTIME).score(text).words
        for words in (streamed(model, [text[:3], text[3:]]), evaluated(model, path), scored):
            assert len(words) > 10
            for word in words:
                assert text[word.byte : word.byte + len(word.word.encode())] == word.word.encode()


@pytest.mark.parametrize("variant", [None, "adaptive", "linear"])
@pytest.mark.parametrize("options", [{}, {"adapt": True, "adapt_block": 5}, {"context_cache": 30}])
def test_predictions_are_those_that_tokens_are_scored_by(variant, options):
    model = toy("sentencepiece", variant=variant)
    size = model.tokenizer.vocab_size
    settings = StreamConfig(emit="tokens", columns="logprobs=999", **options)
    tokens = only(stream(model, [TEXT[:200]], settings, RUNTIME), TokenScore)
    for token in tokens:
        logprobs = {best.token: best.logprob for best in token.prediction.columns["logprobs"]}
        assert len(logprobs) == size
        assert sorted(logprobs.values(), reverse=True) == list(logprobs.values())
        assert math.fsum(map(math.exp, logprobs.values())) == pytest.approx(1, abs=1e-9)
        own = [best.logprob for best in token.prediction.columns["logprobs"] if best.text == token.text]
        assert min(abs(p + token.bits * math.log(2)) for p in own) < 1e-9
        entropy = -math.fsum(p * math.exp(p) for p in logprobs.values()) / math.log(2)
        assert token.prediction.entropy == pytest.approx(entropy, abs=1e-9)


def test_documents_are_words_of_their_own(tmp_path):
    model = toy("sentencepiece")
    texts = ["The dog and the fox", "The fox, being lazy", "x"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    options = EvalConfig(reset_on_document=True)
    found = only(evaluate(model, sorted(tmp_path.glob("*.txt")), options, RUNTIME, words=True), WordScore)
    for i, text in enumerate(texts):
        alone = streamed(model, [text.encode()])
        own = [word for word in found if word.document == i + 1]
        assert [w.word for w in own] == text.split()
        assert [w.bits for w in own] == pytest.approx([w.bits for w in alone], abs=1e-4)


def test_columns_of_the_input_travel(tmp_path):
    model = toy("sentencepiece")
    rows = [("1", "good", "The dog."), ("1", "bad", 'The "fox"\tand'), ("2", "good", ""), ("2", "bad", "the end")]
    table = io.StringIO()
    csv.writer(table, "excel-tab").writerows([("item", "condition", "text"), *rows])
    path = tmp_path / "items.tsv"
    path.write_text(table.getvalue())
    options = {"text_field": "text", "reset_on_document": True}
    events = list(evaluate(model, [path], EvalConfig(**options), RUNTIME, words=True))
    kept = [tuple(event.fields.values()) for event in only(events, Row)]
    assert kept == [("1", "good"), ("1", "bad"), ("2", "bad")]
    words = only(events, WordScore)
    assert [(w.document, w.word) for w in words] == [
        (1, "The"), (1, "dog."), (2, "The"), (2, '"fox"'), (2, "and"), (4, "the"), (4, "end"),
    ]  # fmt: skip
    assert only(events, Score)[0].documents == 3


@pytest.mark.parametrize(
    ("odd", "remark"),
    [("The  dog.", "blanks"), ("The dog. ", "blanks"), (" The dog.", "blanks"), ("The\N{NO-BREAK SPACE}dog.", "blanks"),
     ("NA", "NA"), ("", "without text")],
)  # fmt: skip
def test_odd_rows_are_remarked_on(tmp_path, odd, remark):
    path = tmp_path / "items.csv"
    path.write_text(f"item,text\n1,The dog.\n2,{odd}\n3,NAs here.\n")
    events = evaluate(toy("sentencepiece"), [path], EvalConfig(text_field="text"), RUNTIME, words=True)
    [notice] = [each.text for each in only(events, Notice) if "rows" in each.text and "read as one" not in each.text]
    assert remark in notice
    path.write_text("item,text\n1,The dog.\n2,A dog\n")
    events = evaluate(toy("sentencepiece"), [path], EvalConfig(text_field="text"), RUNTIME, words=True)
    assert not any(remark in each.text for each in only(events, Notice))


def test_odd_continuations_are_remarked_on(tmp_path):
    path, options = tmp_path / "rows.csv", EvalConfig(text_field="text", score_field="end")
    for context, end, is_odd in (
        ("He saw", "a dog.", False),
        ("He saw ", " a dog.", True),
        ("He saw", "a dog. ", True),
    ):
        path.write_text(f"text,end\n{context},{end}\nShe,too\n")
        notices = only(evaluate(toy("sentencepiece"), [path], options, RUNTIME), Notice)
        assert any("blanks" in notice.text for notice in notices) == is_odd


def test_numbers_of_words_begin_again_in_each_file(tmp_path):
    for name, text in (("a", "The dog ran"), ("b", "the fox\nand the dog\n")):
        (tmp_path / name).write_text(text)
    options = EvalConfig(reset_on_document=True)
    words = only(evaluate(toy(), [tmp_path / "a", tmp_path / "b"], options, RUNTIME, words=True), WordScore)
    assert [(word.document, word.number) for word in words] == [
        (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 1), (2, 2), (2, 3)
    ]  # fmt: skip


def test_blank_lines_are_no_documents(tmp_path):
    lines = ["The dog.\n", "The fox and the dog.\n", "She said so.\n"]
    for name, between in (("plain", ""), ("blank", "\n")):
        (tmp_path / name).write_text(between.join(lines))
    plain, blank = (
        only(evaluate(toy("sentencepiece"), [tmp_path / name], EvalConfig(each_line=True), RUNTIME), Score)[0]
        for name in ("plain", "blank")
    )
    assert blank.spread.documents == plain.spread.documents == 3
    assert blank.spread.document_mean == pytest.approx(plain.spread.document_mean, abs=1e-9)


def test_pairs_as_scores_of_each_text(tmp_path):
    model = api.Model(toy("sentencepiece", dtype=torch.float32), RUNTIME)
    rows = [("The dog.", "The fox and the dog."), ("friends", "dog friends"), ("same", "same"), ("a b", "the lazy dog")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"g": a, "b": b, "kind": i % 2}) + "\n" for i, (a, b) in enumerate(rows)))
    events = list(api.evaluate(model, path, words=True, pairs=("g", "b"), by="kind"))
    bits = [tuple(model.score(text + "\n") for text in row) for row in rows]
    found = only(events, type(events[-3]))
    assert [(f.first_bits, f.second_bits) for f in found] == [
        (pytest.approx(a.bits, abs=1e-4), pytest.approx(b.bits, abs=1e-4)) for a, b in bits
    ]
    assert [(f.first_tokens, f.second_tokens) for f in found] == [(len(a.tokens), len(b.tokens)) for a, b in bits]
    won = [1.0 if a.bits < b.bits else 0.0 for a, b in bits]
    won[2] = 0.5
    per_token = [float(a.bits / len(a.tokens) < b.bits / len(b.tokens)) for a, b in bits]
    per_token[2] = 0.5
    score = only(events, Score)[0]
    assert [(p.group, p.pairs, p.share, p.share_per_token) for p in score.pairs] == [
        (None, 4, sum(won) / 4, sum(per_token) / 4),
        ("0", 2, (won[0] + won[2]) / 2, (per_token[0] + per_token[2]) / 2),
        ("1", 2, (won[1] + won[3]) / 2, (per_token[1] + per_token[3]) / 2),
    ]
    z = NormalDist().inv_cdf(0.975)
    for pair in score.pairs:
        assert pair.low <= pair.share <= pair.high
        for bound in {pair.low, pair.high} - {pair.share}:
            assert (bound - pair.share) ** 2 == pytest.approx(z * z * bound * (1 - bound) / pair.pairs, rel=1e-5)


def test_a_row_without_fields_has_none_of_the_row_before(tmp_path):
    model = toy("sentencepiece")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "The", "n": 1}\n{"text": "dog"}\n{"text": "fox", "n": 3}\n')
    rows = only(evaluate(model, [path], EvalConfig(), RUNTIME, words=True), Row)
    assert [row.fields for row in rows] == [{"n": 1}, {}, {"n": 3}]
    portions = [Document(f"{text}\n".encode()) for text in ("The", "dog")]
    portions[0].fields = {"n": 1}
    assert [row.fields for row in only(stream(model, portions, StreamConfig(emit="words"), RUNTIME), Row)] == [
        {"n": 1},
        {},
    ]


def test_documents_without_words_do_not_pile_up():
    model, saved = toy("sentencepiece"), []
    portions = [Document(b"\n")] * 50
    list(
        stream(model, portions, StreamConfig(emit="words"), RUNTIME, save=lambda session: saved.append(session.stream))
    )
    assert len(saved[-1].words.starts) <= 1
    assert saved[-1].words.document >= 49


@pytest.mark.parametrize("path", ["o.tsv", "o.csv", "o.jsonl"])
def test_lists_are_read_as_they_were_written(path):
    warned = []
    table = Table(warned.append, form_of(path, json=False))
    rows = [{"word": 'a "b"\tc', "input_word": "x", "n": 1e-9}, {"n": "1\r2", "z": None}]
    score = WordScore(
        document=1, line=2, number=3, byte=4, word="NA,\n", bits=1.5, naive_bits=1.25, token_entropy=0.0, tokens=1
    )
    text = "".join(table.line(event) for row in rows for event in (Row(1, row), score))
    if path == "o.jsonl":
        found = [json.loads(line) for line in text.splitlines()]
        assert found[1]["n"] == "1\r2"
    else:
        found = list(csv.DictReader(io.StringIO(text, newline=""), dialect="excel" if path == "o.csv" else "excel-tab"))
        assert len(warned) == 1
        assert (found[1]["n"], found[1]["input_word"]) == ("1\r2", "")
    assert (found[0]["input_word"], found[0]["input_input_word"]) == ('a "b"\tc', "x")
    word = "NA,\n" if path == "o.jsonl" else '"NA,\\n"'  # in a table a text with a line end is a JSON string
    assert [(float(row["bits"]), row["word"], float(found[0]["n"])) for row in found] == [(1.5, word, 1e-9)] * 2
