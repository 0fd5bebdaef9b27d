"""Columns of a word from the words beside it, computed from the texts of the words and from logits."""

import pytest
import torch
from toys import PROSE, RUNTIME, toy

from xlcli.config import EvalConfig
from xlcli.evaluation import evaluate
from xlcli.events import Row, TokenScore, WordScore

LINES = ["The quick brown fox said: the dog", "the end", "x", "Being lazy, the fox"]


def words_of(model, path, columns, **options):
    chosen = EvalConfig(columns=columns, **options)
    return [event for event in evaluate(model, [path], chosen, RUNTIME, words=True) if isinstance(event, WordScore)]


def written(tmp_path, form):
    """The lines as rows of a table or as lines of a text, and the options with which each is read on its own."""
    if form == "rows":
        (tmp_path / "t.tsv").write_text(
            "\n".join(["item\tsentence", *(f"{i}\t{line}" for i, line in enumerate(LINES))])
        )
        return tmp_path / "t.tsv", {"text_field": "sentence", "reset_on_document": True}
    if form == "files":
        (tmp_path / "f").mkdir()
        for i, line in enumerate(LINES):
            (tmp_path / "f" / f"{i}.txt").write_text(line + "\n")
        return tmp_path / "f", {"reset_on_document": True}
    (tmp_path / "t.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path / "t.txt", {"each_line": True}


@pytest.mark.parametrize("form", ["rows", "files", "lines"])
def test_previous_words_and_the_last_one_as_by_hand(form, tmp_path):
    path, options = written(tmp_path, form)
    found = words_of(toy("sentencepiece"), path, f"last,previous=2,frequency={__file__}", **options)
    assert [word.word for word in found] == [word for line in LINES for word in line.split()]
    at = 0
    for line in LINES:
        words = found[at : at + len(line.split())]
        at += len(words)
        for i, (word, text) in enumerate(zip(words, line.split(), strict=True)):
            assert word.word == text
            assert word.columns["last"] is (i == len(words) - 1)
            for distance in (1, 2):
                values = [
                    word.columns[f"previous_{distance}_{name}"] for name in ("bits", "length", "tokens", "frequency")
                ]
                if i < distance:
                    assert values == [None] * 4
                else:
                    before = words[i - distance]
                    length = len(line.split()[i - distance])
                    assert values == [before.bits, length, before.tokens, before.columns["frequency"]]


def test_a_text_without_rows_is_one_document(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(LINES) + "\n")
    found = words_of(toy("sentencepiece"), tmp_path / "t.txt", "last,previous=1")
    assert [word.columns["last"] for word in found] == [False] * (len(found) - 1) + [True]
    lengths = [word.columns["previous_1_length"] for word in found]
    assert lengths == [None, *(len(word.word) for word in found[:-1])]
    assert not any("frequency" in name for name in found[0].columns)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_entropies_after_words_from_logits(kind, tmp_path):
    model, lines = toy(kind, mem_len=99), ["The quick brown fox said: the dog", "the 世界 end"]
    (tmp_path / "t.txt").write_text("\n".join(lines) + "\n")
    found = words_of(model, tmp_path / "t.txt", "next_entropy,entropy_reduction", each_line=True)
    for number, line in enumerate(lines, 1):
        ids = model.tokenizer.encode(line.encode() + b"\n").tolist()
        state = model.network.init_state(1, mem_len=99, segment_len=99)
        with torch.inference_mode():
            logits = model.network(torch.tensor([[model.tokenizer.start_id, *ids]]), state)[0]
            p = model.network.head.logits(logits[0]).softmax(-1)
        entropy = (-(p * p.log2()).sum(-1)).tolist()
        at = 0
        for word in (word for word in found if word.document == number):
            assert word.token_entropy == pytest.approx(entropy[at], abs=1e-5)
            at += word.tokens
            assert word.columns["next_entropy"] == pytest.approx(entropy[at], abs=1e-5)
            assert word.columns["entropy_reduction"] == word.token_entropy - word.columns["next_entropy"]
        assert at == len(ids) - 1  # all but the line end


def test_what_lies_between_words_stays_there(tmp_path):
    path, options = written(tmp_path, "rows")
    model = toy("sentencepiece")

    def order(columns):
        settings = EvalConfig(columns=columns, **options)
        events = evaluate(model, [path], settings, RUNTIME, words=True, per_token=True)
        return [type(event) for event in events if isinstance(event, Row | WordScore | TokenScore)]

    plain, held = order("rank"), order("last")
    assert held == plain
    assert plain.count(Row) == len(LINES)


def test_neighbors_change_no_score(tmp_path):
    (tmp_path / "t.txt").write_text(PROSE)
    model = toy("sentencepiece")
    plain, more = (words_of(model, tmp_path / "t.txt", columns) for columns in ("", "last,previous=3,next_entropy"))
    assert [(word.byte, word.word, word.bits) for word in more] == [(word.byte, word.word, word.bits) for word in plain]
