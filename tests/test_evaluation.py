import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from toys import PROSE, RUNTIME, VARIANTS, prose_bits, slow_bits, toy
from variants import thinned

from xlcli.config import EvalConfig
from xlcli.errors import CheckpointError, ConfigError, DataError, ResourceError
from xlcli.evaluation import evaluate
from xlcli.evaluation.text import is_list_of_sentences
from xlcli.events import Notice, Score, TokenScore
from xlcli.metrics import half_width
from xlcli.presets import models_folder
from xlcli.store.folder import load


def scores(model, path, *, per_token=False, **options):
    return [
        event
        for event in evaluate(model, path and [path], EvalConfig(**options), RUNTIME, per_token=per_token)
        if isinstance(event, Score | TokenScore)
    ]


TEXTS = [*itertools.product(("bytes", "sentencepiece", "words"), (9, 0))]
"""Tokenizer and memory length."""


@pytest.mark.parametrize("case", thinned(TEXTS, [*TEXTS[::3], ("words", 9)]), ids=str)
def test_every_token_once_as_the_slow_way(case, prose):
    kind, mem_len = case
    model = toy(kind)
    slow = prose_bits(kind, mem_len)
    *tokens, score = scores(model, prose, mem_len=mem_len, per_token=True)
    assert score.tokens == len(slow) == len(tokens)
    assert [t.bits for t in tokens] == pytest.approx(slow, abs=1e-5)
    assert b"".join(t.text for t in tokens) == PROSE.encode()
    assert [t.byte for t in tokens] == [0, *itertools.accumulate(len(t.text) for t in tokens)][:-1]
    assert score.nats == pytest.approx(sum(slow) * math.log(2), abs=1e-6)
    assert score.bits_per_byte == pytest.approx(sum(slow) / len(PROSE.encode()))
    assert score.bits_per_char == pytest.approx(sum(slow) / len(PROSE))
    assert score.perplexity == pytest.approx(2 ** (sum(slow) / len(slow)))
    n_words = len(PROSE.encode().split()) + PROSE.count("\n")
    assert (score.bytes, score.chars, score.words) == (len(PROSE.encode()), len(PROSE), n_words)
    assert score.word_perplexity == pytest.approx(math.exp(score.nats / n_words))
    assert score.tokens_per_second * score.seconds == pytest.approx(len(slow))
    if kind == "words":
        assert score.word_perplexity == score.perplexity


@pytest.mark.parametrize("mem_len", thinned([1, 9, 40], [9]))
def test_segments_and_batches_change_the_speed_only(mem_len, prose):
    model = toy()
    found = set()
    reference, *_ = scores(model, prose, mem_len=mem_len, segment_len=700, batch_size=1)
    for segment_len, batch_size in itertools.product((1, 7, 32, 10**9), (1, 2, 3, 8)):
        *tokens, score = scores(
            model, prose, mem_len=mem_len, segment_len=segment_len, batch_size=batch_size, per_token=True
        )
        assert score.nats == pytest.approx(reference.nats, abs=1e-8)
        assert sum(t.bits for t in tokens) == pytest.approx(score.nats / math.log(2), abs=1e-3)
        found.add(score.batch_size)
    assert {1, 2, 3} <= found


def bits_by_start(model, text, window):
    """Surprisal in bits by the first token of a window and the token, each window read anew, token by token."""
    ids = model.tokenizer.encode(text).tolist()
    found = {}
    with torch.inference_mode():
        for start in range(len(ids)):
            state = model.network.init_state(1, mem_len=0, segment_len=window)
            for i in range(start, min(start + window, len(ids))):
                before = ids[i - 1] if i else model.tokenizer.start_id
                logits, state = model.network.logits(torch.tensor([[before]]), state)
                found[start, i] = -logits[0].log_softmax(-1)[ids[i]].item() / math.log(2)
    return found


@pytest.mark.parametrize("variant", thinned([None, *VARIANTS], [None, *VARIANTS][::3]))
def test_windows_without_memory_whatever_the_model(variant, tmp_path):
    """Independent segments, and overlapping windows, which are read anew for their last tokens."""
    model, text = toy(variant=variant), PROSE.encode()[:45]
    (tmp_path / "short.txt").write_bytes(text)
    slow = bits_by_start(model, text, 8)
    for stride, batch_size in ((None, 1), (None, 4), (8, 2), (1, 1), (1, 100), (3, 1), (3, 5)):
        options = {"stride": stride, "batch_size": batch_size}
        *tokens, score = scores(model, tmp_path / "short.txt", mem_len=0, per_token=True, **options)
        step = stride or 8
        starts = [i // 8 * 8 if step == 8 else max(0, -(-(i - 7) // step) * step) for i in range(45)]
        bits = [slow[start, i] for i, start in enumerate(starts)]
        assert score.nats == pytest.approx(sum(bits) * math.log(2), abs=1e-9)
        assert [t.bits for t in tokens] == pytest.approx(bits, abs=1e-5)
        assert (score.stride, score.segment_len) == (stride, 8)
        assert (score.batch_size > 1) == (batch_size > 1)
        assert (score.tokens, bool(score.by_context)) == (45, stride is None)
        assert score.mean_steps is None or 1 < score.mean_steps < 3


def test_windows_begin_with_each_document(tmp_path):
    model, texts = toy(), [PROSE[:20], "x", PROSE[40:63], "short"]
    options = {"mem_len": 0, "stride": 3}
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    nats = 0.0
    for text in texts:
        (tmp_path / "one.txt").write_text(f"{text}\n")
        nats += scores(model, tmp_path / "one.txt", **options)[0].nats
    for batch_size in (1, 3, 100):
        score, *_ = scores(model, tmp_path / "all.jsonl", reset_on_document=True, batch_size=batch_size, **options)
        assert (score.nats, score.documents) == (pytest.approx(nats, abs=1e-9), 4)


def test_a_stride_is_at_most_the_window(prose):
    assert scores(toy(), prose, mem_len=0, stride=8)[0].nats == scores(toy(), prose, mem_len=0)[0].nats
    with pytest.raises(ConfigError, match=r"stride\D+9\D+8\b"):
        scores(toy(), prose, mem_len=0, stride=9)


@pytest.mark.parametrize("variant", ["universal", "adaptive"])
@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_depth_is_chosen_when_scoring(variant, n_steps, tmp_path):
    model, text = toy(variant=variant, n_steps=n_steps), PROSE.encode()[:60]
    (tmp_path / "short.txt").write_bytes(text)
    slow = slow_bits(model, text)
    (score,) = scores(model, tmp_path / "short.txt", n_steps=n_steps, batch_size=2, segment_len=8)
    assert score.nats == pytest.approx(sum(slow) * math.log(2), abs=1e-6)
    assert (score.mean_steps is None) == (variant == "universal")
    assert score.mean_steps is None or 1 <= score.mean_steps <= n_steps


def test_steps_are_counted_once_a_token(prose):
    """The steps of warmup tokens do not count."""
    model = toy(variant="adaptive")
    single, batched = (scores(model, prose, batch_size=n, segment_len=32)[0].mean_steps for n in (1, 4))
    assert 1 < single < 3
    assert batched == pytest.approx(single, abs=1e-12)


def test_without_memory_only_the_segment_length_matters(prose):
    model = toy()
    for segment_len in (1, 5, 64):
        nats = [
            scores(model, prose, mem_len=0, segment_len=segment_len, batch_size=batch_size)[0].nats
            for batch_size in (1, 2, 5, 16)
        ]
        assert nats == pytest.approx([nats[0]] * 4, abs=1e-9)
    assert scores(model, prose, mem_len=0, segment_len=5)[0].nats != pytest.approx(nats[0], abs=1e-3)


def test_the_growing_span_does_not_depend_on_the_batch_either(prose):
    model = toy()
    nats = [
        scores(model, prose, mem_len=6, segment_len=8, span="growing", batch_size=batch_size)[0].nats
        for batch_size in (1, 2, 4)
    ]
    assert nats == pytest.approx([nats[0]] * 3, abs=1e-9)
    ids = torch.tensor([[10, *PROSE.encode()]])
    state, total = model.network.init_state(1, mem_len=6, segment_len=8, span="growing"), 0.0
    with torch.inference_mode():
        for x, y in zip(ids[:, :-1].split(8, 1), ids[:, 1:].split(8, 1), strict=True):
            cost, state = model.network.score(x, y, state)[:2]
            total += cost.sum().item()
    assert nats[0] == pytest.approx(total, abs=1e-9)


def test_sizes_chosen_for_speed_give_the_same(prose):
    model = toy()
    chosen, *_ = scores(model, prose)
    assert chosen.mem_len == 9
    assert chosen.nats == pytest.approx(scores(model, prose, segment_len=1, batch_size=1)[0].nats, abs=1e-8)
    assert scores(model, prose, mem_len=0)[0].segment_len == 8


def test_a_sweep_gives_one_score_for_each_length(prose):
    model = toy()
    swept = scores(model, prose, sweep_mem_len=(0, 3, 9))
    assert [s.mem_len for s in swept] == [0, 3, 9]
    for score in swept:
        assert score.nats == pytest.approx(scores(model, prose, mem_len=score.mem_len)[0].nats, abs=1e-8)


def test_loss_by_context_without_memory_is_that_of_the_pass(prose):
    model = toy()
    *tokens, score = scores(model, prose, mem_len=0, segment_len=8, batch_size=3, per_token=True)
    assert [(b.start, b.stop) for b in score.by_context] == [(1, 2), (2, 4), (4, 9)]
    assert sum(b.tokens for b in score.by_context) == score.tokens
    for bucket in score.by_context:
        part = [t for i, t in enumerate(tokens) if bucket.start <= i % 8 + 1 < bucket.stop]
        assert bucket.tokens == len(part)
        assert bucket.bits_per_byte == pytest.approx(
            sum(t.bits for t in part) / sum(len(t.text) for t in part), abs=1e-4
        )


def test_loss_by_context_with_memory_comes_from_cold_windows(prose):
    model = toy("sentencepiece")
    score, *_ = scores(model, prose, mem_len=9, segment_len=4, batch_size=2)
    assert [(b.start, b.stop) for b in score.by_context] == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 19)]
    n_windows = score.by_context[0].tokens
    assert 1 < n_windows * 18 <= score.tokens / 4
    ids, sizes = model.tokenizer.tokens(PROSE.encode())
    nats, n_bytes = 0.0, 0
    for at in range(n_windows):
        start = int(at * (len(ids) - 18) / max(n_windows - 1, 1))
        text = [model.tokenizer.start_id if start == 0 else int(ids[start - 1]), *ids[start : start + 18].tolist()]
        with torch.inference_mode():
            cost, _ = model.network.score(
                torch.tensor([text[:-1]]),
                torch.tensor([text[1:]]),
                model.network.init_state(1, mem_len=9, segment_len=8),
            )[:2]
        nats += cost[0, 7:15].sum().item()
        n_bytes += int(sizes[start + 7 : start + 15].sum())
    assert score.by_context[3].bits_per_byte == pytest.approx(nats / math.log(2) / n_bytes, abs=1e-9)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_margins_come_from_sequences(tmp_path, batch_size):
    """The standard error is that of a ratio of sums over segments, which start with empty memory."""
    (tmp_path / "t").write_text(PROSE * 8)
    model = toy("sentencepiece")
    options = {"mem_len": 0, "segment_len": 64, "batch_size": batch_size}
    *tokens, score = scores(model, tmp_path / "t", per_token=True, **options)
    for bucket in score.by_context:
        segments = {}
        for i, token in enumerate(tokens):
            if bucket.start <= i % 64 + 1 < bucket.stop:
                bits, n_bytes = segments.get(i // 64, (0.0, 0))
                segments[i // 64] = bits + token.bits, n_bytes + len(token.text)
        pairs, freedom = list(segments.values()), len(segments) - 1
        total = sum(n for _, n in pairs)
        ratio = sum(bits for bits, _ in pairs) / total
        variance = len(pairs) / freedom * sum((bits - ratio * n) ** 2 for bits, n in pairs) / total**2
        assert bucket.margin == pytest.approx(half_width(variance**0.5, freedom), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"reset_on_document": True}])
def test_margins_do_not_depend_on_sizes_chosen_for_speed(tmp_path, options):
    (tmp_path / "all.jsonl").write_text(
        "".join(json.dumps({"text": PROSE[i : i + 150]}) + "\n" for i in range(0, 400, 20))
    )
    model = toy()
    found = [
        [b.margin for b in scores(model, tmp_path / "all.jsonl", mem_len=20, **sizes, **options)[0].by_context]
        for sizes in ({}, {"segment_len": 7}, {"batch_size": 2, "segment_len": 33})
    ]
    assert any(found[0])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)


def test_few_sequences_have_no_margin(tmp_path):
    (tmp_path / "t").write_text("only one segment")
    score, *_ = scores(toy(), tmp_path / "t", mem_len=100)
    assert {b.margin for b in score.by_context} == {None}


def test_no_window_is_counted_twice(tmp_path):
    """A text of one long window, which begins at 0, and one short window, which then begins elsewhere."""
    text = "".join(chr(97 + i * i % 23) for i in range(105))
    (tmp_path / "t").write_text(text)
    *tokens, score = scores(toy(), tmp_path / "t", mem_len=100, per_token=True, context_share=0.7)
    [first] = [b for b in score.by_context if b.start == 1]
    assert first.tokens == 2
    assert first.bits_per_byte != pytest.approx(tokens[0].bits, abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1.0])
def test_windows_for_the_loss_by_context_cost_their_share_of_the_text(tmp_path, monkeypatch, share):
    (tmp_path / "t").write_text(PROSE * 8)
    model, n_read = toy(), []
    network = type(model.network)
    whole = network.score_by_layer

    def counted(self, calls, *args, **named):
        n_read.extend(tokens.numel() for tokens, _ in calls)
        return whole(self, calls, *args, **named)

    monkeypatch.setattr(network, "score_by_layer", counted)
    settings = {} if share == 0.1 else {"context_share": share}
    score, *_ = scores(model, tmp_path / "t", mem_len=100, segment_len=50, batch_size=1, **settings)
    budget = int(score.tokens * share)
    assert budget - 64 < sum(n_read) - score.tokens <= budget
    short, long = score.by_context[0].tokens, score.by_context[-1].tokens // (201 - 128)
    assert long == 1 + budget // 400  # the first one is the beginning of the pass over the text
    assert short == long + (budget - (long - 1) * 200) // 64
    assert [b.start for b in score.by_context] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_the_loss_by_context_does_not_depend_on_the_batch_size(tmp_path):
    (tmp_path / "t").write_text(PROSE * 8)
    found = [scores(toy(), tmp_path / "t", mem_len=100, segment_len=50, batch_size=n)[0] for n in (1, 2, 40)]
    assert [each.batch_size for each in found] == [1, 2, 15]
    for each in found[1:]:
        for one, other in zip(found[0].by_context, each.by_context, strict=True):
            assert (one.tokens, one.bits_per_byte) == (other.tokens, pytest.approx(other.bits_per_byte, rel=1e-12))
            assert (one.margin is None) == (other.margin is None)


@pytest.mark.parametrize("text", [b"x", b"\n", b"\xff\xfe\x00", "\u4e16".encode(), b"a" * 5000, b"one\r\ntwo\r\n"])
def test_odd_texts(text, tmp_path):
    (tmp_path / "odd").write_bytes(text)
    for kind in ("bytes", "sentencepiece"):
        model = toy(kind)
        *tokens, score = scores(model, tmp_path / "odd", mem_len=3, per_token=True, binary=True)
        assert b"".join(t.text for t in tokens) == text
        assert score.bytes == len(text)
        assert math.isfinite(score.bits_per_byte)
        assert (score.chars is None) == (text == b"\xff\xfe\x00") == (score.word_perplexity is None)


def test_limit_counts_bytes_and_keeps_characters_whole(tmp_path):
    text = "ab\u4e16\u754c".encode()
    (tmp_path / "t").write_bytes(text)
    sizes = {limit: scores(toy(), tmp_path / "t", limit=limit)[0].bytes for limit in (1, 2, 3, 4, 5, 7, 8, 99)}
    assert sizes == {1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 7: 5, 8: 8, 99: 8}
    model = toy()
    assert scores(model, tmp_path / "t", limit=5)[0].nats == pytest.approx(
        sum(slow_bits(model, text[:5])) * math.log(2), abs=1e-6
    )


def test_the_models_own_held_out_text(tmp_path):
    (tmp_path / "valid.txt").write_text("held out\n")
    model = toy(folder=tmp_path)
    assert scores(model, None)[0].bytes == 9
    with pytest.raises(DataError, match=r"\btest\b"):
        scores(model, None, split="test")


def test_unknown_words_are_a_warning(tmp_path):
    (tmp_path / "t").write_text("the zebra is lazy\n")
    notices = [e for e in evaluate(toy("words"), [tmp_path / "t"], EvalConfig(), RUNTIME) if isinstance(e, Notice)]
    assert any("vocabulary" in n.text and n.level == "warning" for n in notices)


def test_unknown_words_are_counted(tmp_path):
    text = "the zebra is lazy\nthe quagga too\n"
    (tmp_path / "t").write_text(text)
    score, *_ = scores(toy("words"), tmp_path / "t")
    assert score.unknown_words == sum(word not in PROSE.split() for word in text.split()) >= 2
    assert scores(toy(), tmp_path / "t")[0].unknown_words is None


def stopped(prose, after, **options):
    """Events of an evaluation that is stopped at the call of `stop` with this number."""
    asked = itertools.count()
    return list(
        evaluate(toy(), [prose], EvalConfig(**options), RUNTIME, per_token=True, stop=lambda: next(asked) > after)
    )


@pytest.mark.parametrize("mem_len", [0, 9])
def test_stopped_gives_the_score_of_what_was_read(mem_len, prose):
    events = stopped(prose, 20, mem_len=mem_len, segment_len=8, batch_size=1)
    (score,) = [event for event in events if isinstance(event, Score)]
    assert score.partial
    assert 0 < score.tokens < len(PROSE)
    slow = prose_bits("bytes", mem_len)[: score.tokens]
    assert score.bytes == score.tokens
    assert score.nats == pytest.approx(sum(slow) * math.log(2), abs=1e-5)
    assert score.bits_per_byte == pytest.approx(sum(slow) / len(slow), abs=1e-5)
    assert (score.chars, score.words, score.bits_per_char, score.word_perplexity) == (None,) * 4
    assert sum(b.tokens for b in score.by_context) == (0 if mem_len else score.tokens)
    assert not any(isinstance(event, TokenScore) for event in events)
    [warning] = [e.text for e in events if isinstance(e, Notice) and e.text.startswith("stopped")]
    assert re.findall(r"[\d,]+", warning) == [f"{score.bytes:,}", f"{len(PROSE.encode()):,}"]


def test_a_stopped_sweep_keeps_whole_scores(prose):
    found = []
    work = evaluate(toy(), [prose], EvalConfig(sweep_mem_len=(0, 9)), RUNTIME, stop=lambda: bool(found))
    found.extend(event for event in work if isinstance(event, Score))
    assert [(score.mem_len, score.partial) for score in found] == [(0, False)]


def test_stopped_before_the_first_call_gives_no_score(prose):
    events = stopped(prose, -1)
    assert not any(isinstance(event, Score) for event in events)
    assert (events[-1].level, "stopped" in events[-1].text) == ("warning", True)


def test_damaged_weights_are_not_a_score(prose):
    model = toy()
    with torch.no_grad():
        next(model.network.parameters())[0] = math.nan
    with pytest.raises(CheckpointError, match="finite"):
        scores(model, prose)


def test_only_the_token_file_is_left(prose):
    scores(toy(), prose, per_token=True)
    assert [path.suffix for path in Path(os.environ["XLCLI_CACHE"]).iterdir()] == [".tokens"]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_a_text_is_tokenized_once(kind, prose, monkeypatch):
    def first(options):
        return scores(toy(kind), prose, per_token=True, **options)

    def refuse(self, data):
        raise AssertionError("tokenized again")

    whole, part = first({}), first({"limit": 50})
    monkeypatch.setattr(type(toy(kind).tokenizer), "encode", refuse)
    for before, options in ((whole, {}), (part, {"limit": 50})):
        *tokens, score = first(options)
        assert tokens == before[:-1]
        assert score.by_context == before[-1].by_context
        assert (score.nats, score.bytes, score.words) == (before[-1].nats, before[-1].bytes, before[-1].words)


@pytest.mark.parametrize("failing", ["fsync", "posix_fallocate"])
def test_a_full_disk_is_a_resource_error(failing, prose, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(ResourceError, match="space") as caught:
        scores(toy(), prose, per_token=True)
    assert "XLCLI_CACHE" in caught.value.remedy


def test_skipped_files_of_a_folder_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.txt").write_text(PROSE[:50])
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG\0")
    notice, *_ = evaluate(toy(), [tmp_path / "folder"], EvalConfig(), RUNTIME)
    assert (notice.level, "picture.png" in notice.text) == ("warning", True)


def test_a_score_above_eight_bits_is_explained(tmp_path):
    (tmp_path / "chinese").write_text("天地玄黄，宇宙洪荒。" * 20)
    (tmp_path / "english").write_text("The sun came up over the hills, and the old man went down to the sea. " * 9)
    books = load(models_folder() / "books")
    texts = {
        name: [
            e.text
            for e in evaluate(books, [tmp_path / name], EvalConfig(), RUNTIME)
            if isinstance(e, Notice) and e.level == "warning"  # with --quiet, too
        ]
        for name in ("chinese", "english")
    }
    assert texts["english"] == []
    assert sum("kind of text" in text for text in texts["chinese"]) == 1
    assert any("parts of characters" in text for text in texts["chinese"])


def test_a_story_in_paragraphs_is_no_list_of_sentences():
    sentence = "كان الليل مظلما، ولم يتكلم أحد.\n"
    assert is_list_of_sentences((sentence * 12).encode())
    assert is_list_of_sentences(f"{sentence}\n".encode() * 12)  # each apart
    assert is_list_of_sentences(f"{sentence}{sentence}\n".encode() * 6)  # pairs
    assert not is_list_of_sentences(f"{sentence * 5}\n{sentence * 4}\n{sentence * 3}".encode())
    assert not is_list_of_sentences(("هل تعرف؟ سألته. " + sentence).encode() * 12)  # two in a line


@pytest.mark.parametrize("resets", [False, True])
def test_one_row_of_a_script_without_blanks_leaves_no_perplexity_per_word(tmp_path, resets):
    path = tmp_path / "rows.tsv"
    rows = ["كان الليل مظلما"] * 30
    for more, is_said in (([], False), (["ภาษาไทยไม่มีช่องว่าง"], True)):
        path.write_text("\n".join(["sentence", *rows, *more, *rows]) + "\n")
        *_, score = evaluate(toy(), [path], EvalConfig(text_field="sentence", reset_on_document=resets), RUNTIME)
        assert (score.word_perplexity is None) == (score.words is None) == is_said


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ("ภาษาไทยไม่มีช่องว่าง ระหว่างคำ\n", True),
        ("The old dog said ภาษาไทยไม่มีช่องว่าง to the cat.\n", True),
        ("كان الليل ภาษาไทยไม่มีช่องว่าง مظلما\n", True),
        ("The old dog ran.\n", False),
    ],
)
def test_words_of_a_script_without_blanks_are_said_to_be_phrases(tmp_path, text, is_said, words):
    path = tmp_path / "th.txt"
    path.write_text(text * 3)
    events = [*evaluate(toy(), [path], EvalConfig(), RUNTIME, words=words)]
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("no perplexity per word" in notice for notice in notices) == is_said
    assert (events[-1].word_perplexity is None) == (events[-1].words is None) == is_said
