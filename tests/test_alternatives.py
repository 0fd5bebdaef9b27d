"""The most probable next words: sums, brute force over a toy vocabulary, and the bits of the words of a text."""

import math
from collections import defaultdict

import pytest
import torch
from toys import PROSE, RUNTIME, toy

from xlcli.config import EvalConfig
from xlcli.evaluation import alternatives, evaluate
from xlcli.events import WordScore


def words_of(model, path, n=5, columns="", **options):
    chosen = EvalConfig(columns=columns or f"alternatives={n}", **options)
    return [event for event in evaluate(model, [path], chosen, RUNTIME, words=True) if isinstance(event, WordScore)]


@pytest.fixture
def prose(tmp_path):
    (tmp_path / "prose.txt").write_text(PROSE)
    return tmp_path / "prose.txt"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
@pytest.mark.parametrize("punctuation", [False, True])
def test_alternatives_and_the_rest_sum_to_one(kind, punctuation, prose):
    words = words_of(toy(kind), prose, limit=200, split_punctuation=punctuation)
    for word in words:
        found = word.columns["alternatives"]
        assert math.fsum(found.values()) + word.columns["rest"] == pytest.approx(1, abs=1e-6)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert 0 < len(found) <= 5
    assert len(words) > 20


def probabilities(model, ids):
    """Probabilities (v) after these tokens, by one call over all of them."""
    state = model.network.init_state(1, mem_len=len(ids) + 1, segment_len=len(ids) + 1)
    with torch.inference_mode():
        return model.network.logits(torch.tensor([[model.tokenizer.start_id, *ids]]), state)[0][0].softmax(-1)


def brute_force(model, ids, least, *, after_line_end):
    """Probability of each next word whose every beginning has at least this probability, by a depth-first search."""
    texts, found = [text.decode("utf-8", "replace") for text in model.tokenizer.texts], defaultdict(float)
    blank = torch.tensor([text[:1].isspace() or "\u4e00" <= text[:1] <= "\u9fff" for text in texts])

    def search(word, text, probability):
        p = probabilities(model, [*ids, *word])
        if text.strip():
            found[text.strip()] += probability * p[blank].sum().item()
        for i in range(len(texts)):
            own = probability * p[i].item()
            if own < least or (text.strip() and blank[i]):
                continue
            if texts[i].endswith("\n") or (text + texts[i]).strip()[-1:] > "\u4e00":
                found[(text + texts[i]).strip() or "\n"] += own
            else:
                search([*word, i], text + texts[i], own)

    p = probabilities(model, ids)
    for i in range(len(texts)):
        own = p[i].item() if after_line_end else p[i].item() / p[blank].sum().item()
        if own >= least and (after_line_end or blank[i]):
            if texts[i].endswith("\n") or texts[i].strip()[-1:] > "\u4e00":
                found[texts[i].strip() or "\n"] += own
            else:
                search([i], texts[i], own)
    return found


def plain(found):
    """Words of ASCII letters; the toy also predicts parts of characters."""
    return {word: p for word, p in found.items() if word.isascii() and word.isalpha()}


def test_alternatives_by_brute_force(tmp_path, monkeypatch):
    monkeypatch.setattr(alternatives, "LEAST", 0.002)
    model, text = toy("sentencepiece", mem_len=99), b"The quick brown fox said"
    (tmp_path / "t").write_bytes(text)
    at, ids = 0, model.tokenizer.encode(text).tolist()
    for word in words_of(model, tmp_path / "t", n=900):  # all that are found
        expected = brute_force(model, ids[:at], 0.002, after_line_end=at == 0)
        found = word.columns["alternatives"]
        assert plain(found) == pytest.approx(plain(expected), abs=1e-6)
        assert len(plain(found)) > 20
        at += word.tokens


def test_documents_and_fewer_alternatives(prose, tmp_path):
    model = toy("sentencepiece")
    alone = words_of(model, prose, limit=45)
    for word, more in zip(alone, words_of(model, prose, n=20, limit=45), strict=True):
        first = dict(list(more.columns["alternatives"].items())[:5])
        assert word.columns["alternatives"] == pytest.approx(first, abs=word.columns["rest"])
        assert word.bits == more.bits
    (tmp_path / "two.txt").write_text(PROSE.splitlines()[0] + "\n" + PROSE.splitlines()[0] + "\n")
    words = words_of(model, tmp_path / "two.txt", each_line=True)
    half = len(words) // 2
    for first, second in zip(words[:half], words[half:], strict=True):
        assert first.columns["alternatives"] == pytest.approx(second.columns["alternatives"], abs=1e-9)


def test_a_document_without_words_changes_no_alternatives(tmp_path):
    line = PROSE.splitlines()[0] + "\n"
    (tmp_path / "one.txt").write_text(line)
    (tmp_path / "two.txt").write_text("\n\n" + line)
    model = toy("sentencepiece")
    alone, after = (words_of(model, tmp_path / name, each_line=True) for name in ("one.txt", "two.txt"))
    for first, second in zip(alone, after[-len(alone) :], strict=True):
        assert first.columns["alternatives"] == pytest.approx(second.columns["alternatives"], abs=1e-9)


def entropy_of(probabilities):
    return -math.fsum(p * math.log2(p) for p in probabilities if p > 0)


def entropies(word):
    return [word.columns[name] for name in ("word_entropy_low", "word_entropy", "word_entropy_high")]


@pytest.mark.parametrize("n", [1, 5, 100])
def test_bounds_hold_the_entropy_of_the_next_word(n, prose):
    """With a vocabulary of words each token is a word, so its entropy is known: that of what may come there."""
    model = toy("words", mem_len=99)
    at, ids = 0, model.tokenizer.encode(prose.read_bytes()).tolist()
    words = words_of(model, prose, columns=f"word_entropy={n}", limit=200)
    for word in words:
        while model.tokenizer.texts[ids[at]].strip() != word.word.encode():  # a line end
            at += 1
        entropy = entropy_of(probabilities(model, ids[:at]).tolist())
        low, middle, high = entropies(word)
        assert low <= entropy + 1e-6
        assert middle == pytest.approx(entropy, abs=1e-6)
        assert high >= entropy - 1e-6
        at += 1
    assert len(words) > 20


def leaves(model, ids, least):
    """Words that are found and beginnings that are not continued, with their probabilities, depth first."""
    texts = model.tokenizer.texts
    firsts = [text.decode("utf-8", "replace")[:1] for text in texts]
    blank = [first.isspace() or "\u4e00" <= first <= "\u9fff" for first in firsts]
    found, left = defaultdict(float), []

    def word_of(data):
        return data.decode("utf-8", "replace").strip()

    def search(word, data, probability, p):
        for i in range(len(p)):
            own = probability * p[i]
            if word_of(data) and blank[i]:
                found[word_of(data)] += own
                continue
            if own < least:
                left.append(own)
                continue
            longer = data + texts[i]
            ends_text = longer in (b"", b"\n")
            if ends_text or longer.endswith(b"\n") or "\u4e00" <= word_of(longer)[-1:] <= "\u9fff":
                found[word_of(longer)] += own
            else:
                search([*word, i], longer, own, probabilities(model, [*ids, *word, i]).tolist())

    p = probabilities(model, ids).tolist()
    ended = 1.0
    if ids:  # a word has ended here
        p = [each * is_blank for each, is_blank in zip(p, blank, strict=True)]
        ended = math.fsum(p)
    search([], b"", 1.0, [each / ended for each in p])
    return found, left


def test_the_entropy_of_words_by_brute_force(tmp_path, monkeypatch):
    monkeypatch.setattr(alternatives, "LEAST", 0.004)
    model, text = toy("sentencepiece", mem_len=99), b"The quick brown fox said"
    (tmp_path / "t").write_bytes(text)
    at, ids = 0, model.tokenizer.encode(text).tolist()
    for word in words_of(model, tmp_path / "t", columns="word_entropy=900"):  # all that are found
        found, left = leaves(model, ids[:at], 0.004)
        low, middle, high = entropies(word)
        assert middle == pytest.approx(entropy_of([*found.values(), *left]), abs=1e-4)
        assert high - middle == pytest.approx(math.fsum(left) * math.log2(model.tokenizer.vocab_size), abs=1e-4)
        # The least entropy over ways to give the rest to one of the words, or to a new one.
        rest, values = math.fsum(left), [*found.values(), 0.0]
        least = min(entropy_of([*values[:i], values[i] + rest, *values[i + 1 :]]) for i in range(len(values)))
        assert low == pytest.approx(least, abs=1e-4)
        at += word.tokens


def test_alternatives_and_entropies_come_of_one_search(prose):
    model = toy("sentencepiece")
    both = words_of(model, prose, columns="alternatives=3,word_entropy=50", limit=45)
    alone = words_of(model, prose, columns="word_entropy=50", limit=45)
    assert [entropies(word) for word in both] == [entropies(word) for word in alone]
    for word in both:
        assert len(word.columns["alternatives"]) == 3
        assert math.fsum(word.columns["alternatives"].values()) + word.columns["rest"] == pytest.approx(1, abs=1e-6)
    assert "rest" not in alone[0].columns
