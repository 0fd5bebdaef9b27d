"""The Python interface: scores, states and continuations equal those of the workflows; nothing is imported early."""

import ast
import contextlib
import html
import inspect
import io
import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import xlcli
from xlcli import api, config, evaluation, generation, markup
from xlcli.events import Generated, LineScore, Score, Step, StreamStats, TokenScore, Trained, Validation

SOURCE = Path(__file__).parents[1]
TEXT = "It was a dark night, and the sea was calm.\nNobody spoke: naïve, they thought – or wise.\n\nAt last"


@pytest.fixture(scope="module")
def books():
    return xlcli.load("books", device="cpu", threads=1)


def bits(score):
    return [token.bits for token in score.tokens]


def test_import_is_lazy_and_workflows_stay_functions():
    code = """
import sys, xlcli
assert not {"torch", "numpy", "pydantic", "sentencepiece", "safetensors"} & sys.modules.keys()
import xlcli.training, xlcli.evaluation, xlcli.generation, xlcli.streaming
for name in ("train", "resume", "evaluate", "generate", "stream", "load"):
    assert callable(getattr(xlcli, name)), name
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("function", "section"),
    [
        (api.evaluate, config.EvalConfig),
        (api.generate, config.GenerateConfig),
        (api.stream, config.StreamConfig),
        (api.Model.score, config.OnlineConfig),
    ],
)
def test_settings_are_listed_as_keywords(function, section):
    """Steps, hash rounds, sinks, the largest distance and the number type of weights are those of `load`."""
    of_load = {"n_steps", "n_hashes", "n_sinks", "clamp_len", "weight_dtype"}
    listed = inspect.signature(function).parameters
    assert set(section.model_fields) - of_load <= set(listed)
    assert not of_load & set(listed)
    assert of_load <= set(inspect.signature(api.load).parameters)


def test_settings_of_another_call_are_refused(books):
    with pytest.raises(xlcli.ConfigError, match="mem_len"):
        api.load(mem_len=8)
    with pytest.raises(xlcli.ConfigError, match="emit"):
        books.score("text", emit="lines")


@pytest.mark.parametrize("options", [{"context_cache": 50}, {"adapt": True, "adapt_block": 64, "context_cache": 50}])
def test_a_model_that_learns_while_it_reads_is_the_same_in_all_calls(books, options):
    text = TEXT * 3
    whole = books.score(text, **options)
    state = books.read(text[:100], **options)
    assert bits(whole)[-20:] == pytest.approx(bits(books.score(text[100:], state=state, **options))[-20:], abs=1e-4)
    assert whole.bits < books.score(text).bits


def test_score_equals_evaluation(books, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 20)
    for mem_len in (0, 16, None):
        options = config.EvalConfig(mem_len=mem_len)
        events = list(evaluation.evaluate(books.loaded, [str(path)], options, books.runtime, per_token=True))
        expected = events[-1]
        found = books.score(TEXT * 20, mem_len=mem_len)
        assert (found.bytes, len(found.tokens)) == (expected.bytes, expected.tokens)
        assert found.nats == pytest.approx(expected.nats, rel=1e-6)
        assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)
        assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
        tokens = [event for event in events if isinstance(event, TokenScore)]
        assert [(t.byte, t.text) for t in found.tokens] == [(t.byte, t.text) for t in tokens]
        np.testing.assert_allclose(bits(found), [t.bits for t in tokens], atol=2e-4)


def test_sums_are_those_of_the_tokens(books):
    score = books.score(TEXT)
    assert b"".join(token.text for token in score.tokens).decode() == TEXT
    assert score.bits == math.fsum(bits(score))
    assert score.bytes == len(TEXT.encode())
    assert score.bits_per_byte == pytest.approx(score.bits / score.bytes)
    assert score.perplexity == pytest.approx(2 ** (score.bits / len(score.tokens)))
    empty = books.score("")
    assert (empty.tokens, empty.bits, empty.bits_per_byte, empty.perplexity) == ((), 0.0, 0.0, 1.0)


@pytest.mark.filterwarnings("ignore:texts that need a look")
def test_text_and_its_bytes_are_the_same(books):
    assert books.score(TEXT) == books.score(TEXT.encode())
    text = books.generate(TEXT, max_new_tokens=6, seed=3)
    assert text.encode() == books.generate(TEXT.encode(), max_new_tokens=6, seed=3)
    assert books.score(b"\xff\xfe\x00").bytes == 3


@pytest.mark.parametrize("cut", [0, 1, 2, 20, 25, 41, 43, 55, 57, len(TEXT) - 1, len(TEXT)])
def test_state_and_text_score_as_the_whole_does(books, cut):
    whole = books.score(TEXT)
    size = len(TEXT[:cut].encode())
    expected = [t for t in whole.tokens if t.byte + len(t.text) > size]
    found = books.score(TEXT[cut:], state=books.read(TEXT[:cut]))
    assert [(t.byte + size, t.text) for t in found.tokens] == [(t.byte, t.text) for t in expected]
    np.testing.assert_allclose(bits(found), [t.bits for t in expected], atol=2e-4)


def test_reading_on_equals_reading_at_once(books):
    state = None
    for at in range(0, len(TEXT), 7):
        state = books.read(TEXT[at : at + 7], state=state)
    whole = books.read(TEXT)
    assert (state.n_bytes, state.mem_len) == (whole.n_bytes, whole.mem_len) == (len(TEXT.encode()), 256)
    found, expected = (bits(books.score(" it came.", state=s)) for s in (state, whole))
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_names_in_a_notebook_are_short(books):
    assert repr(books) == "Model('books', cpu, float32)"
    assert repr(books.read("It was", mem_len=64)) == "TextState(6 bytes, mem_len=64)"


@pytest.mark.filterwarnings("ignore:texts that need a look")
def test_a_score_is_one_line_and_html_in_a_notebook(books):
    text = "It was <b>dark</b>, ภาษาไทย & naïve \x1b[2J\n\n  كان الليل. "
    score = books.score(text)
    figures = f"{score.bits:.1f} bits, {score.bits_per_byte:.3f} bits/byte"
    assert repr(score) == f"TextScore({score.bytes} bytes, 9 words, {len(score.tokens)} tokens, {figures})"
    assert repr(books.score("a")).startswith("TextScore(1 byte, 1 word, 1 token, ")
    assert "\n" not in repr(books.score(["a", "b"]))
    page = score._repr_html_()
    _, _, shown = page.partition("<pre")
    assert html.unescape(re.sub("<[^>]*>", "", "<pre" + shown)) == text.replace("\x1b", "\\x1b")
    parts = re.findall(r'<span title="([\d.]+) bits"[^>]*>([^<]*)</span>', shown)
    by_word = {word.word: f"{word.bits:.2f}" for word in score.words}
    shown_words = {html.unescape(part): bits for bits, part in parts}
    assert by_word.keys() - shown_words.keys() == {"ภาษาไทย", "\x1b[2J"}
    assert all(shown_words[word] == by_word[word] for word in by_word.keys() & shown_words.keys())
    thai = [(part, float(bits)) for bits, part in parts if "\u0e00" <= part[0] <= "\u0e7f"]
    assert "".join(part for part, _ in thai) == "ภาษาไทย"
    start, end = score.words[3].byte, score.words[3].byte + len("ภาษาไทย".encode())
    of_tokens = [token.bits for token in score.tokens if token.byte + len(token.text) > start and token.byte < end]
    assert sum(bits for _, bits in thai) == pytest.approx(sum(of_tokens), abs=0.005 * len(thai))
    assert "<span" not in books.score("")._repr_html_().partition("<pre")[2]


def test_a_notebook_shows_the_beginning_of_a_long_text(books, monkeypatch):
    monkeypatch.setattr(api.values, "SHOWN_BYTES", 20)
    page = books.score(TEXT)._repr_html_()
    shown = html.unescape(re.sub("<[^>]*>", "", "<pre" + page.partition("<pre")[2]))
    assert TEXT.startswith(shown)
    assert 20 <= len(shown) <= 25
    assert f"the first {len(shown)} bytes" in page


def words_by_color(page):
    """Bits of the words of a notebook by the number of their color, 0 for none; those of the legend are left out."""
    found = {}
    for bits, color in re.findall(r'title="([\d.]+) bits" style="(?:background:(#\w+))?', page[page.index("<pre") :]):
        number = markup.BACKGROUNDS.index(color) + 1 if color else 0
        found.setdefault(number, []).append(float(bits))
    return found


def test_colors_of_a_notebook_are_those_of_the_page_and_the_same_for_all_texts(books):
    style = (SOURCE / "xlcli" / "cli" / "page.css").read_text()
    assert tuple(re.findall(r"--c\d: (#\w{6})", style)[:5]) == markup.BACKGROUNDS
    for text in (TEXT * 3, "the of and the of"):
        for number, bits in words_by_color(books.score(text)._repr_html_()).items():
            assert {min(5, int(value / 4)) for value in bits} == {number}
    legend = books.score("It was")._repr_html_().partition("<pre")[0]
    assert re.findall(r">(\d+)</span>", legend) == ["0", "4", "8", "12", "16", "20"]


def test_many_scores_are_a_list_that_a_notebook_shows_in_color(books, monkeypatch):
    texts = ["The dog barked.", "The < cat & slept.", "It rained."]
    scores = books.score(texts)
    assert isinstance(scores, list)
    assert scores == [*scores]
    page = scores._repr_html_()
    shown = [html.unescape(re.sub("<[^>]*>", "", part)) for part in re.findall("<pre.*?</pre>", page)]
    assert shown == texts
    assert page.count("bits of a word") == 1
    one = scores[1]._repr_html_()
    assert one[one.index("<pre") :] in page
    assert scores[1:]._repr_html_().count("<pre") == 2
    with_state = books.score(texts, state=books.read("Then. "))
    assert with_state._repr_html_().count("<pre") == 3
    monkeypatch.setattr(api.values, "SHOWN_BYTES", 20)
    page = scores._repr_html_()
    assert (page.count("<pre"), "and 1 more text<" in page) == (2, True)


def test_what_is_hardly_meant_as_a_text_is_warned_of(books, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("note.txt").write_text("The dog.")
    for text, said in (
        ("note.txt", "file"),
        ("The cafe\u0301 was", "decomposed"),
        (["One.", "The\u00a0dog"], "text 2"),
        (["One dog.", "The dog  barked."], "blanks"),
    ):
        with pytest.warns(UserWarning, match=said):
            books.score(text)
    with pytest.warns(UserWarning, match="a blank at the end"):
        books.generate("The dog ", max_new_tokens=1)
    with pytest.raises(xlcli.ConfigError, match=r"open\('note.txt', 'rb'\)"):
        xlcli.stream(books, "note.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        books.score([" barked.", " sat."], state=books.read("The dog"))
        books.score("The dog  barked. ")
    for text in ({"text": "The dog."}, [["The", "dog"]], [float("nan")], None):
        with pytest.raises(xlcli.ConfigError):
            books.score(text)


def test_an_open_file_or_a_path_is_no_text(books, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    for call in (books.score, books.read, books.generate):
        with path.open() as text, path.open("rb") as binary:
            for file in (text, binary):
                with pytest.raises(xlcli.ConfigError, match=r"file\.read\(\)"):
                    call(file)
        with pytest.raises(xlcli.ConfigError, match="read_text"):
            call(path)
    with path.open() as file:
        assert len(books.score(file.readlines())) == len(TEXT.splitlines())


@pytest.mark.parametrize("text", [TEXT * 3, [TEXT] * 3])
def test_progress_is_shown_in_a_terminal_and_erased(books, text, monkeypatch):
    monkeypatch.setattr(api.progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(xlcli.events, "PROGRESS_INTERVAL", 0.0)
    calls = [books.score] if isinstance(text, list) else [books.score, books.read]
    for call in calls:
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        call(text, mem_len=8)
        drawn = stream.getvalue().split("\r")
        assert re.fullmatch(r"\d+ % read, \d+ s left *", drawn[1])
        assert re.match(r"(9\d|100) % read, 0 s left", drawn[-3])  # `read` leaves the last word unread
        assert (drawn[-2].strip(), drawn[-1]) == ("", "")
        assert len(drawn[-2]) >= len(drawn[-3].rstrip())
        for stream, options in ((Terminal(), {"progress": False}), (io.StringIO(), {})):
            monkeypatch.setattr(sys, "stderr", stream)
            call(text, mem_len=8, **options)
            assert stream.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_state_is_a_value(books):
    state = books.read(TEXT)
    first = books.score(" the ship", state=state)
    books.generate(" the", state=state, max_new_tokens=9, seed=1)
    books.read(TEXT * 9, state=state)
    assert books.score(" the ship", state=state) == first
    other = books.score(" the moon", state=state)
    assert other.tokens[0] == first.tokens[0]
    assert other != first


def test_the_largest_distance_is_that_of_training_or_of_the_state(books):
    train = books.loaded.config.train
    assert books.loaded.network.clamp_len == train.mem_len + train.segment_len - 1
    near = xlcli.load("books", device="cpu", threads=1, clamp_len=3)
    state = near.read(TEXT)
    expected = near.score(" the ship", state=state)
    assert books.score(" the ship", state=state) == expected
    assert books.score(" the ship", state=books.read(TEXT)) != expected
    with pytest.raises(xlcli.StateError, match=r"clamp_len\D+3\D+511\b"):
        list(xlcli.generate(books, "", state=state, clamp_len=511))
    assert xlcli.load("books", clamp_len="none").read(TEXT).session.model_state.span.clamp_len is None
    with pytest.raises(xlcli.ConfigError, match="clamp_len"):
        list(xlcli.generate(books, "", clamp_len=9))


def test_a_state_replaces_states_only(books, tmp_path):
    state = books.read("It was")
    text, place = tmp_path / "my.txt", tmp_path / "text.state"
    text.write_text("my text")
    place.touch()
    for _ in range(2):
        books.save_state(state, place)
    with pytest.raises(xlcli.ConfigError, match=r"my\.txt"):
        books.save_state(state, text)
    assert text.read_text() == "my text"
    assert books.load_state(place).n_bytes == 6


def test_saved_state_continues_to_the_bit(books, tmp_path):
    state = books.read(TEXT)
    books.save_state(state, tmp_path / "text.state")
    loaded = books.load_state(str(tmp_path / "text.state"))
    assert loaded.n_bytes == state.n_bytes
    assert books.score(" the ship", state=loaded) == books.score(" the ship", state=state)
    assert books.generate(" the", state=loaded, max_new_tokens=9, seed=1) == books.generate(
        " the", state=state, max_new_tokens=9, seed=1
    )


def test_generation_is_that_of_the_workflow(books):
    options = config.GenerateConfig(max_new_tokens=12, temperature=0.5, top_k=9, stop=("zzz",))
    events = list(generation.generate(books.loaded, TEXT.encode(), options, books.runtime, seed=5))
    wanted = {"max_new_tokens": 12, "temperature": 0.5, "top_k": 9, "stop": ["zzz"], "seed": 5}
    assert isinstance(events[-1], Generated)
    assert books.generate(TEXT, **wanted) == events[-1].text
    pieces = list(books.stream_generate(TEXT, **wanted))
    assert len(pieces) > 1
    assert "".join(pieces) == events[-1].text
    assert books.generate(TEXT, **wanted) == books.generate("", state=books.read(TEXT), **wanted)


def test_several_samples_and_the_state_after_one(books):
    both = [
        e.text for e in xlcli.generate(books, "It", num_samples=2, max_new_tokens=5, seed=4) if type(e) is Generated
    ]
    assert both == [books.generate("It", max_new_tokens=5, seed=seed) for seed in (4, 5)]
    for asked in ({"num_samples": 2}, {"logprobs": 3}):
        with pytest.raises(xlcli.ConfigError):
            books.generate("It", max_new_tokens=5, **asked)
    kept = []
    for _ in xlcli.generate(books, "It", max_new_tokens=5, seed=4, save=kept.append):
        pass
    found, expected = books.score(" now", state=kept[0]), books.score(" now", state=books.read("It" + both[0]))
    assert found.bytes == len(" now")
    assert found.bits == pytest.approx(expected.bits, abs=2e-4)


def test_stream_takes_any_iterable(books, tmp_path):
    lines = [e for e in xlcli.stream(books, TEXT) if isinstance(e, LineScore)]
    assert [line.text for line in lines] == TEXT.encode().splitlines(keepends=True)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    with path.open("rb") as binary, path.open() as text:
        for portions in (binary, text, list(TEXT)):
            found = [e for e in xlcli.stream(books, portions) if isinstance(e, LineScore)]
            assert [line.text for line in found] == [line.text for line in lines]
            np.testing.assert_allclose([e.bits for e in found], [e.bits for e in lines], atol=1e-3)


@pytest.mark.filterwarnings("ignore:texts that need a look")
def test_line_ends_of_windows_are_lf_in_a_stream_and_kept_in_a_score(books):
    windows = b"A line\r\nand another\r\n"
    lines = [e.text for e in xlcli.stream(books, windows) if isinstance(e, LineScore)]
    assert lines == [b"A line\n", b"and another\n"]
    assert list(xlcli.stream(books, windows, binary=True))[-1].bytes == books.score(windows).bytes == len(windows)
    assert books.read(windows).n_bytes == len(windows)


def test_stream_gives_its_state(books):
    kept = []
    stats = [e for e in xlcli.stream(books, TEXT, emit="none", save=kept.append) if isinstance(e, StreamStats)]
    assert stats[-1].bytes == kept[-1].n_bytes == len(TEXT.encode())
    found, expected = (books.score(" it came.", state=s).bits for s in (kept[-1], books.read(TEXT)))
    assert found == pytest.approx(expected, abs=2e-4)


def test_train_evaluate_and_load_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT * 100)
    settings = {"train": {"max_steps": 3}, "text": {"tokenizer": "bytes"}, "runtime": {"threads": 1}}
    events = list(xlcli.train_events("corpus.txt", "models/mine", preset="tiny", settings=settings))
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3]
    assert isinstance(events[-1], Trained)
    mine = xlcli.load("mine")
    assert mine.loaded.folder == xlcli.load("models/mine").loaded.folder == xlcli.load().loaded.folder
    (score,) = (e for e in xlcli.evaluate(mine, mem_len=8) if isinstance(e, Score))
    assert score.mem_len == 8
    paths = [tmp_path / "corpus.txt", "corpus.txt"]
    (both,) = (e for e in xlcli.evaluate(mine, paths, limit=300) if isinstance(e, Score))
    assert both.bytes == 300
    with pytest.raises(xlcli.ConfigError, match="holds"):
        list(xlcli.train_events(["corpus.txt"], tmp_path / "models" / "mine"))
    held_out = {"text": {"valid": "./corpus.txt"}}
    with pytest.raises(xlcli.DataError, match=r"corpus.txt can .* leave out valid and test:"):
        list(xlcli.train_events("corpus.txt", "m", preset="tiny", settings=settings | held_out))
    events = list(xlcli.resume_events("corpus.txt", "models/mine", settings={"train": {"max_steps": 5}}))
    assert [event.step for event in events if isinstance(event, Step)] == [4, 5]
    with pytest.raises(xlcli.StateError, match="model"):
        mine.score("x", state=xlcli.load("books").read("x"))


def test_training_starts_from_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT * 100)
    settings = {"train": {"max_steps": 2}, "runtime": {"threads": 1}}
    by_byte = settings | {"text": {"tokenizer": "bytes"}}
    one = xlcli.train("corpus.txt", "models/one", preset="tiny", settings=by_byte)
    assert (one.loaded.name, one.loaded.record["steps"], one.loaded.record["finished"]) == ("one", 2, True)
    assert xlcli.resume("corpus.txt", "models/one", settings={"train": {"max_steps": 3}}).loaded.record["steps"] == 3
    for init in ("one", tmp_path / "models" / "one"):
        events = list(xlcli.train_events("corpus.txt", "models/two", init=init, settings=settings, overwrite=True))
        assert next(event.step for event in events if isinstance(event, Validation)) == 0
        assert xlcli.load("two").loaded.record["init"]["model"] == "one"
    with pytest.raises(xlcli.ConfigError, match=r"model\.dim\b.*\b64\b"):
        xlcli.train_events("corpus.txt", "models/three", init="one", settings={"model": {"dim": 32}})
    with pytest.raises(xlcli.CheckpointError, match="these"):
        xlcli.train_events("corpus.txt", "models/three", init="none of these")


def test_arguments_of_other_types_are_errors_of_the_project(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    with text.open() as opened:
        for wrong in (3, b"x", {"a": 1}.items(), [None], opened):
            for call in (
                lambda wrong=wrong: xlcli.load(wrong),
                lambda wrong=wrong: xlcli.train(wrong, tmp_path / "m", preset="tiny"),
                lambda wrong=wrong: xlcli.train(text, wrong, preset="tiny"),
                lambda wrong=wrong: xlcli.train(text, tmp_path / "m", init=wrong),
                lambda wrong=wrong: xlcli.train(text, tmp_path / "m", preset=wrong),
                lambda wrong=wrong: xlcli.train(text, tmp_path / "m", init="books", settings=wrong),
                lambda wrong=wrong: xlcli.train(text, tmp_path / "m", init="books", settings={"train": wrong}),
                lambda wrong=wrong: xlcli.resume(text, tmp_path / "m", settings={"runtime": wrong}),
            ):
                with pytest.raises(xlcli.ConfigError) as caught:
                    call()
                assert caught.value.remedy
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("kind", ["pandas", "dict", "set"])
def test_a_table_is_no_path(books, tmp_path, kind):
    tables = {"dict": {"item": [1], "text": [TEXT]}, "set": {"a.txt"}}
    if kind == "pandas":
        table = pytest.importorskip("pandas").DataFrame(tables["dict"])
    else:
        table = tables[kind]
    for call in (
        lambda: xlcli.evaluate(books, table),
        lambda: xlcli.train(table, tmp_path / "m", preset="tiny"),
        lambda: xlcli.resume(table, tmp_path / "m"),
        lambda: books.score(table),
    ):
        with pytest.raises(xlcli.ConfigError, match="order" if kind == "set" else "table") as caught:
            call()
        assert caught.value.remedy
        assert kind == "set" or "table['text']" in caught.value.remedy


@pytest.mark.parametrize(
    ("columns", "named"),
    [(["id", "Sentence"], "Sentence"), (["item", "words in it"], "item"), (["message", "text"], "text"), ([1], "text")],
)
def test_the_remedy_for_a_table_names_a_column_that_it_has(books, columns, named):
    with pytest.raises(xlcli.ConfigError) as caught:
        books.score({name: ["a"] for name in columns})
    assert f"table[{named!r}]" in caught.value.remedy


@pytest.mark.parametrize("mem_len", [-1, 1.5, "x"])
def test_illegal_options_are_errors_of_the_project(books, mem_len):
    for call in (books.score, books.read, books.generate):
        with pytest.raises(xlcli.ConfigError, match="mem_len"):
            call(TEXT, mem_len=mem_len)
    for options in ({"mem_len": mem_len}, {"mem_ln": 1}, {"n_steps": 2}):
        with pytest.raises(xlcli.ConfigError):
            list(xlcli.evaluate(books, **options))
        with pytest.raises(xlcli.ConfigError):
            list(xlcli.stream(books, TEXT, **options))
        with pytest.raises(xlcli.ConfigError):
            books.generate(TEXT, **options)


def test_errors_name_settings_as_keywords(books, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"a\xffb")
    for call in (
        lambda: list(xlcli.evaluate(books, tmp_path / "latin.txt")),
        lambda: list(xlcli.evaluate(books, mem_len=5, stride=4)),
        lambda: books.load_state(Path(tmp_path / "latin.txt")),
        lambda: list(xlcli.train_events(tmp_path / "latin.txt", tmp_path / "m", preset="tiny", init="books")),
    ):
        with pytest.raises(xlcli.XLError) as caught:
            call()
        assert "--" not in str(caught.value)
    for option, keyword in {
        "Use --mem-len 0.": "Use mem_len=0.",
        "Give that model (-m books).": "Give that model (model books).",
        "Choose another one with -o NAME.": "Choose another one with folder=NAME.",
        "Add --set eval.reset_on_document=false, or use xlcli stream --adapt.": "Add reset_on_document=False, or use "
        "xlcli stream --adapt.",
        "Type for example --set model.dim=256.": "Type for example model.dim=256.",
        "there is no file a--b.txt or x -p.": "there is no file a--b.txt or x -p.",
    }.items():
        assert str(xlcli.ConfigError(option)) == keyword


def test_other_mistakes_are_errors_of_the_project(books, tmp_path):
    with pytest.raises(xlcli.CheckpointError, match="books"):
        xlcli.load("boks")
    for options in ({"device": "tpu"}, {"dtype": "int8"}, {"threads": 0}, {"n_steps": 2}, {"n_hashes": 2}):
        with pytest.raises(xlcli.ConfigError):
            xlcli.load("books", **options)
    with pytest.raises(xlcli.StateError, match="mem_len=256"):
        books.score("x", state=books.read("x"), mem_len=3)
    with pytest.raises(xlcli.StateError):
        books.load_state(tmp_path / "none.state")
    for call in (
        books.score,
        books.read,
        books.generate,
        lambda text: list(books.stream_generate(text)),
    ):
        for other in ([["a", "b"]] if call == books.score else ["a", "b"], None, 5):
            with pytest.raises(xlcli.ConfigError, match=type(other).__name__):
                call(other)
    with pytest.raises(xlcli.ConfigError, match="list"):
        list(xlcli.stream(books, [["a"]]))
    with pytest.raises(xlcli.DataError):
        list(xlcli.evaluate(books, tmp_path / "none.txt"))


def test_examples_of_the_page_print_what_it_says(tmp_path, monkeypatch):
    """A comment behind a `print` that is a statement of its own is its output."""
    monkeypatch.chdir(tmp_path)
    Path("shakespeare.txt").write_bytes((SOURCE / "demo" / "shakespeare.txt").read_bytes()[:20_000])
    page = (SOURCE / "docs" / "python.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    names, checked = {}, 0
    for statement in ast.parse(code).body:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module([statement], []), "docs/python.md", "exec"), names)
        line = code.splitlines()[statement.end_lineno - 1]
        if line.startswith("print(") and "  # " in line:
            assert printed.getvalue().strip() == line.partition("  # ")[2], line
            checked += 1
    assert checked >= 4


def test_settings_of_a_resumed_run_are_read_from_text(tmp_path):
    """Text is read before it is compared: an unchanged budget keeps the others."""
    text, folder = tmp_path / "t.txt", tmp_path / "m"
    text.write_text(TEXT * 20)
    small = {"model": {"dim": 16, "n_layers": 1}, "text": {"tokenizer": "bytes"}}
    budget = {"max_steps": 2, "max_time": 100.0, "segment_len": 16, "mem_len": 16, "batch_size": 2}
    list(xlcli.train_events(text, folder, settings={**small, "train": budget}, preset="tiny"))
    list(xlcli.resume_events(text, folder, settings={"train": {"max_steps": "2"}}))
    assert json.loads((folder / "config.json").read_text())["train"]["max_time"] == 100.0
    text.write_text("other " + TEXT * 20)
    with pytest.raises(xlcli.CheckpointError):
        list(xlcli.resume_events(text, folder))
    with pytest.raises(xlcli.ConfigError, match="nproc"):
        list(xlcli.resume_events(text, folder, settings={"runtime": {"nproc": 2}}))


def test_colored_words_of_a_text_that_continues_a_state_are_its_words(books):
    for read, text, words in (
        ("The ship went down, and the ", "captain was drowned.", ["captain", "was", "drowned."]),
        ("The ship and the capt", "ain was drowned.", ["aptain", "was", "drowned."]),  # its token began in the state
    ):
        page = books.score(text, state=books.read(read))._repr_html_()
        assert re.findall(r"<span title[^>]*>([^<]*)<", page[page.index("<pre") :]) == words


WRONG = (3, 2.5, b"x", "a\ud800", "a\0b", [], [None], {"a": 1}, object(), np.int64(3), io.StringIO("x"), print, True)
"""Values of which each parameter of the interface takes few."""


@pytest.mark.filterwarnings("ignore")
def test_every_argument_of_a_wrong_type_is_an_error_of_the_project(books, tmp_path, monkeypatch):
    """What is not refused works."""
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("The dog barked.\n" * 5)
    state = books.read("It was")
    books.save_state(state, "s.state")
    calls = (
        (xlcli.load, {"model": "none"}),
        (xlcli.copy_model, {"model": "none", "folder": "copy"}),
        (xlcli.read_toml, {"path": "x.toml"}),
        (xlcli.train, {"text": "t.txt", "folder": "m", "preset": "none"}),
        (xlcli.train_events, {"text": "t.txt", "folder": "m", "preset": "none"}),
        (xlcli.resume, {"text": "t.txt", "folder": "m"}),
        (xlcli.resume_events, {"text": "t.txt", "folder": "m"}),
        (xlcli.evaluate, {"model": books, "text": "t.txt", "mem_len": 8}),
        (xlcli.generate, {"model": books, "prompt": "It", "max_new_tokens": 1}),
        (xlcli.generate_prompts, {"model": books, "prompts": ["It"], "max_new_tokens": 1}),
        (xlcli.stream, {"model": books, "text": "It"}),
        (xlcli.Document, {"text": b"It"}),
        (books.score, {"text": "It"}),
        (books.read, {"text": "It"}),
        (books.generate, {"prompt": "It", "max_new_tokens": 1}),
        (books.stream_generate, {"prompt": "It", "max_new_tokens": 1}),
        (books.save_state, {"state": state, "path": "new.state"}),
        (books.load_state, {"path": "s.state"}),
    )
    n_refused = 0
    for function, arguments in calls:
        for name in inspect.signature(getattr(function, "__wrapped__", function)).parameters:
            if name in ("self", "settings") or (function == xlcli.Document and name != "text"):
                continue
            for wrong in WRONG:
                try:
                    result = function(**arguments | {name: wrong})
                    if inspect.isgenerator(result):
                        list(result)
                except xlcli.XLError:
                    n_refused += 1
    assert n_refused > 500


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.score("a", state="x.state"), "model.load_state"),
        (lambda model: model.read("a", state=3), "model.load_state"),
        (lambda model: model.save_state("a", "b"), "model.read"),
        (lambda model: list(xlcli.stream(model, 5)), r"str\(\)"),
        (lambda model: list(xlcli.stream("books", "a")), "xlcli.load"),
        (lambda model: xlcli.evaluate("books"), "xlcli.load"),
        (lambda model: xlcli.generate("books", "a"), "xlcli.load"),
        (lambda model: list(xlcli.stream(model, "a", state=5)), "model.load_state"),
        (lambda model: list(xlcli.generate_prompts(model, "abc")), r"\[prompt\]"),
        (lambda model: list(xlcli.evaluate(model, 5)), "path"),
        (lambda model: model.load_state(3), "path"),
        (lambda model: xlcli.read_toml(3), "path"),
        (lambda model: model.score("a\ud800"), r"character 2 .*ud800.* text\.encode\('utf-8', 'replace'\)"),
        (lambda model: model.score(["a", None]), "text 2: .* leave out"),
        (lambda model: model.generate(["It was", "He"]), r"xlcli\.generate_prompts\(model, prompts\)"),
        (lambda model: xlcli.generate(model, ["It was", "He"]), r"xlcli\.generate_prompts\(model, prompts\)"),
        (lambda model: model.score(bytearray(b"a")), r"bytes\(text\)"),
        (lambda model: model.score({"a", "b"}), "sorted"),
        (lambda model: model.score(np.array(3)), r"str\(\)"),
        (lambda model: xlcli.generate(model, "a", save=3), "without parentheses"),
        (lambda model: model.generate("a", seed="x"), r"int\(seed\)"),
        (lambda model: model.score("a", progress="no"), "progress=False"),
        (lambda model: xlcli.copy_model("books", "b", weights=8), "int8"),
        (lambda model: xlcli.Document("a"), r"text\.encode"),
    ],
)
def test_values_of_a_wrong_type_are_refused_with_the_right_call(books, call, said):
    with pytest.raises(xlcli.ConfigError, match=said):
        call(books)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.score("a", context=20), r"mem_len.*xlcli\.evaluate\(model, path, context="),
        (lambda model: model.score("a", limit=20), r"xlcli\.evaluate\(.*limit="),
        (lambda model: model.score("a", temperature=0.5), r"model\.generate\(.*temperature="),
        (lambda model: model.generate("a", num_samples=2), r"xlcli\.generate\(.*num_samples="),
        (lambda model: model.read("a", min_bits=2), r"xlcli\.stream\(.*min_bits="),
        (lambda model: xlcli.load("books", mem_len=8), r"model\.score\(.*mem_len="),
        (lambda model: model.score("a", mem_ln=8), "Did you mean 'mem_len'"),
        (lambda model: model.score("a", memory=3), "Did you mean 'mem_len'"),
        (lambda model: model.generate("a", max_length=5), "Did you mean 'max_new_tokens'"),
        (lambda model: model.generate("a", n=5), "Did you mean 'max_new_tokens'"),
        (lambda model: model.generate("a", temp=1), "Did you mean 'temperature'"),
        (lambda model: model.generate("a", html="a.html"), "Settings of generate are .*max_new_tokens"),
        (lambda model: model.generate("a", 20), "max_new_tokens=20"),
        (lambda model: xlcli.load("books", thread=1), "Did you mean 'threads'"),
        (lambda model: xlcli.load("books", "cpu"), "device='cpu'"),
    ],
)
def test_a_setting_of_another_call_is_refused_with_that_call(books, call, said):
    with pytest.raises(xlcli.ConfigError, match=said):
        call(books)


def test_settings_may_be_numbers_of_numpy_and_paths(books):
    assert books.score(TEXT, mem_len=np.int64(8)) == books.score(TEXT, mem_len=8)
    assert books.generate("It", max_new_tokens=np.array(2), seed=1) == books.generate("It", max_new_tokens=2, seed=1)
    with pytest.raises(xlcli.ConfigError, match=r"mem_len is .*0, 1"):
        books.score(TEXT, mem_len=np.arange(2))


def test_lengths_may_be_a_range_or_an_array(books, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    for lengths in (range(1, 3), np.arange(1, 3), (1, 2)):
        scores = [event for event in xlcli.evaluate(books, path, sweep_mem_len=lengths) if isinstance(event, Score)]
        assert [score.mem_len for score in scores] == [1, 2]


def test_texts_of_numpy_pandas_and_generators_are_scored_one_by_one(books):
    texts = ["The dog barked.", "It rained."]
    expected = books.score(texts)
    assert books.score(np.array(texts)) == books.score(text for text in texts) == expected
    assert books.score(np.array(texts)[0]) == books.score(texts[0])
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": texts}, index=[7, 3])
    assert books.score(table["text"]) == expected
    with pytest.raises(xlcli.ConfigError, match=r"table\['text'\]"):
        books.score(table)


def test_a_workflow_that_is_no_method_is_named(books):
    with pytest.raises(AttributeError, match=r"xlcli\.stream\("):
        books.stream("a")
    assert not hasattr(books, "other")
