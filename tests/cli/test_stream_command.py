import base64
import csv
import io
import json
import re
import shutil
import signal
import subprocess
import time

import pytest
from programs import TEXT, Terminal, command, environment

from xlcli.memory.context_cache import new_index


@pytest.fixture
def piped(run, monkeypatch, tmp_path):
    """`stream` in this process, reading a file."""

    def piped(data, *arguments):
        path = tmp_path / "in"
        path.write_bytes(data)
        return run("stream", path, *arguments)

    return piped


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_lines_are_exact_and_scored(piped, model):
    data = b"first\n\nsecond \x1b[31m\xff\nlast without end"
    done = piped(data, "--binary")
    assert done.code == 0, done.err
    rows = re.findall(rb"(?m)^(\d+\.\d{3})\t(.*)$", done.out)
    assert b"\n".join(text for _, text in rows) == data
    assert "4 lines" in done.err


def test_json_lines(piped, model):
    rows = objects(piped(TEXT * 3, "--json").out)
    assert [[*row] for row in rows] == [["line", "byte", "bytes", "text", "tokens", "bits", "bits_per_byte"]] * 3
    assert [row["text"] for row in rows] == [TEXT.decode().removesuffix("\n")] * 3
    assert [row["byte"] for row in rows] == [0, len(TEXT), 2 * len(TEXT)]
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["bits"] / rows[0]["bytes"])


def test_json_tokens_spell_the_text(piped, model):
    rows = objects(piped(TEXT, "--json", "--emit", "tokens").out)
    assert [*rows[0]] == ["line", "byte", "text", "bits"]
    assert "".join(row["text"] for row in rows).encode() == TEXT


def test_tokens_are_a_table_as_eval_writes_it(piped, run, model, tmp_path):
    streamed = piped(TEXT + b' a "word"', "--emit", "tokens").out.decode()
    run("eval", tmp_path / "in", "--per-token", tmp_path / "tokens.tsv")
    tables = streamed, (tmp_path / "tokens.tsv").read_text()
    rows, evaluated = (list(csv.reader(io.StringIO(text), "excel-tab")) for text in tables)
    assert rows[0] == ["line", "byte", "text", "bits"]
    assert [row[:3] for row in rows] == [row[:3] for row in evaluated]
    assert [float(row[3]) for row in rows[1:]] == pytest.approx([float(row[3]) for row in evaluated[1:]], abs=2e-4)


def test_json_has_the_exact_bytes_of_a_text_that_is_not_utf8(piped, run, model, tmp_path):
    data = b"first\r\n\xff \xe4\xb8\x96\nlast"
    first, second, last = objects(piped(data, "--binary", "--json").out)
    assert (first["text"], first["bytes"], last["text"]) == ("first", 7, "last")
    assert [["base64" in row, row["line"]] for row in (first, second, last)] == [[False, 1], [True, 2], [False, 3]]
    assert second["text"] == "\ufffd \u4e16"
    assert base64.b64decode(second["base64"]) == b"\xff \xe4\xb8\x96"
    streamed = objects(piped(data, "--binary", "--json", "--emit", "tokens").out)
    run("eval", tmp_path / "in", "--binary", "--per-token", tmp_path / "tokens.jsonl")
    evaluated = objects((tmp_path / "tokens.jsonl").read_bytes())
    for rows in (streamed, evaluated):
        tokens = [base64.b64decode(row["base64"]) if "base64" in row else row["text"].encode() for row in rows]
        assert b"".join(tokens) == data
        assert [row["line"] for row in rows] == [1 + data[: row["byte"]].count(b"\n") for row in rows]
        assert all(("base64" in row) == ("\ufffd" in row["text"]) for row in rows)
    assert [[*row] for row in streamed] == [[*row] for row in evaluated]


def test_only_surprising_lines_are_shown_and_the_page_has_all(piped, model, tmp_path):
    text = b"".join(b"line %d of a text\n" % i if i % 10 else b"~%d QZX\n" % i for i in range(60))
    rows = objects(piped(text, "--json").out)
    least = sorted(row["bits_per_byte"] for row in rows)[-6]
    done = piped(text, "--json", "--min-bits", str(least), "--html", tmp_path / "page.html")
    assert objects(done.out) == [row for row in rows if row["bits_per_byte"] >= least]
    assert "6 of 60 lines" in done.err
    assert b"line 11 of a text" in re.sub(rb"<[^>]*>", b"", (tmp_path / "page.html").read_bytes())
    done = piped(text, "--min-bits", "8.1", "--top", "10%", "--emit", "tokens")
    shown = done.out.count(b"\n") - 1  # without the header
    assert f"{shown} of {len(text):,} tokens" in done.err
    assert 0 < shown < len(text) / 5
    assert not re.search(" of [0-9,]+ (lines|tokens)", piped(text).err)


def test_blank_lines_are_none_of_the_oddest(piped, model):
    text = b"".join(b"\n \nline %d of a text\n" % i for i in range(40))
    rows = objects(piped(text, "--json", "--top", "20%").out)
    assert 1 < len(rows) < 40
    assert all(row["text"].strip() for row in rows)


def test_each_line_by_itself_is_as_eval_scores_it(piped, run, model, tmp_path):
    text = b"One fox runs.\nOne fox runs.\n\nA dog sleeps."
    rows = objects(piped(text, "--json", "--each-line").out)
    assert rows[0]["bits"] == pytest.approx(rows[1]["bits"], abs=1e-6)
    score = json.loads(run("eval", tmp_path / "in", "--each-line", "--json").out)
    assert (score["documents"], score["each_line"]) == (4, True)
    assert sum(row["bits"] for row in rows) / len(text) == pytest.approx(score["bits_per_byte"], abs=1e-6)
    assert json.loads(run("eval", tmp_path / "in", "--json").out)["each_line"] is False


def test_json_has_the_object_that_came_beside_its_scores(piped, model):
    came = [{"msg": "one\ntwo", "bits": [1, {"a": None}], "line": 4}, {"msg": "three", "when": "now"}]
    data = "".join(json.dumps(row) + "\n" for row in [came[0], {"n": 1}, came[1]]).encode()
    first, second = objects(piped(data, "--text-field", "msg", "--json").out)
    assert [first["msg"], first["input_bits"], first["input_line"]] == ["one\ntwo", [1, {"a": None}], 4]
    assert [row["line"] for row in (first, second)] == [1, 3]
    assert {*second} == {"msg", "when", "line", "tokens", "bits", "bits_per_byte"}
    assert second["tokens"] == 6
    shown = piped(data, "--text-field", "msg").out.decode()
    assert re.fullmatch(r"\d+\.\d{3}\tone\ntwo\n\d+\.\d{3}\tthree\n", shown)


def test_groups_and_events_of_plain_lines(piped, model):
    data = b"10:00 W boom\n  at f\n10:01 I fine\nnone\n"
    regex = ("--text-regex", r"^(?P<time>\S+) (?P<level>\w) (?P<text>.*)")
    done = piped(data, *regex, "--json")
    assert [[row["time"], row["text"]] for row in objects(done.out)] == [["10:00", "boom"], ["10:01", "fine"]]
    assert "rows skipped so far: 2" in done.err
    done = piped(data, *regex, "--event-start", r"^\d", "--json")
    assert [row["text"] for row in objects(done.out)] == ["boom\n  at f", "fine\nnone"]
    done = piped(data, "--event-start", r"^\d", "--emit", "words")
    assert done.code == 0, done.err


def test_frozen_lines_do_not_learn_from_each_other(piped, model, tmp_path):
    assert piped(TEXT * 2, "--frozen").code == 2
    assert piped(TEXT * 2, "--frozen", "--state", tmp_path / "s").code == 2
    assert not (tmp_path / "s").exists()
    assert piped(TEXT * 3, "--state", tmp_path / "s", "--context-cache", "50").code == 0
    rows = objects(piped(TEXT * 3, "--state-in", tmp_path / "s", "--frozen", "--json").out)
    assert len({row["bits"] for row in rows}) == 1
    moving = objects(piped(TEXT * 3, "--state-in", tmp_path / "s", "--json").out)
    # Lines that wait are multiplied together, which rounds float32 otherwise; in float64 tests/test_frozen.py compares.
    assert rows[0]["bits"] == pytest.approx(moving[0]["bits"], rel=1e-6)
    assert rows[2]["bits"] != moving[2]["bits"]


def test_a_service_scores_against_a_copy_of_a_baseline_and_ends_with_totals_of_its_run(piped, model, tmp_path):
    assert piped(TEXT * 3, "--state", tmp_path / "normal", "--context-cache", "50").code == 0
    together = piped(TEXT, "--state", tmp_path / "service", "--state-in", tmp_path / "normal", "--frozen")
    assert together.code == 2
    assert f"cp {tmp_path / 'normal'} {tmp_path / 'service'}" in together.err
    shutil.copy(tmp_path / "normal", tmp_path / "service")
    for first in (4, 6):
        done = piped(TEXT * 2, "--state", tmp_path / "service", "--frozen", "--json")
        assert [row["line"] for row in objects(done.out)] == [first, first + 1]
        assert f"2 lines, {2 * len(TEXT)} bytes" in done.err


def test_emit_none_and_stats(piped, model):
    assert piped(TEXT, "--emit", "none").out == b""
    assert set(objects(piped(TEXT, "--emit", "stats", "--json").out)[-1]) >= {
        "lines",
        "bytes",
        "bits_per_byte",
        "final",
    }


def test_a_score_above_eight_bits_is_explained(piped):
    assert "kind" in piped("天地玄黄，宇宙洪荒。".encode() * 20, "-m", "books").err
    assert "kind" not in piped(b"The old man went down to the sea.\n" * 9, "-m", "books").err


def test_scores_equal_those_of_eval(piped, run, model, tmp_path):
    rows = objects(piped(TEXT * 4, "--json").out)
    (tmp_path / "same").write_bytes(TEXT * 4)
    score = json.loads(run("eval", tmp_path / "same", "--json").out)
    assert sum(row["bits"] for row in rows) / len(TEXT * 4) == pytest.approx(score["bits_per_byte"], abs=1e-4)


def test_a_saved_memory_goes_on_exactly(piped, model, tmp_path):
    whole = objects(piped(TEXT * 2, "--json").out)
    assert piped(TEXT, "--state-out", tmp_path / "s").code == 0
    rest = objects(piped(TEXT, "--json", "--state-in", tmp_path / "s").out)
    assert rest[0]["bits"] == pytest.approx(whole[1]["bits"], abs=1e-6)


def test_a_state_is_made_and_continued_with_its_model_and_its_cache(piped, model, untrained, tmp_path):
    whole = objects(piped(TEXT * 3, "--json", "--context-cache", "50").out)
    first = objects(piped(TEXT, "--json", "--context-cache", "50", "--state", tmp_path / "s").out)
    untrained("newer")
    rest = [objects(piped(TEXT, "--json", "--state", tmp_path / "s").out)[0] for _ in range(2)]
    assert [row["line"] for row in first + rest] == [1, 2, 3]
    assert [row["bits"] for row in first + rest] == pytest.approx([row["bits"] for row in whole], abs=1e-4)
    assert piped(TEXT, "--state", tmp_path / "s", "--state-in", tmp_path / "s").code == 2


def test_a_state_is_continued_by_generation(piped, run, model, tmp_path):
    assert piped(TEXT, "--state", tmp_path / "s").code == 0
    done = [run("generate", "x", "-n", "5", "--seed", "1", "--state", tmp_path / "s") for _ in range(2)]
    assert [each.code for each in done] == [0, 0]
    n_read = [int(re.search(r"(\d+) tokens read", each.err)[1]) for each in done]
    assert n_read == [len(TEXT), len(TEXT) + len(b"x") + 5]


def test_a_followed_file_is_scored_once(model, tmp_path):
    log, found = tmp_path / "app.log", []
    follow = command("stream", log, "--follow", "--state", tmp_path / "s", "--json", "-q")
    log.write_bytes(b'one\ntwo\n{"text"')
    for rest in (b': "th"}\n', b"six\n"):
        with subprocess.Popen(follow, env=environment(), stdout=subprocess.PIPE) as child:
            found += [json.loads(child.stdout.readline()) for _ in range(2)]
            child.send_signal(signal.SIGTERM)
            assert child.wait(20) == 143
        with log.open("ab") as file:
            file.write(rest)
        if rest != b"six\n":
            log.rename(tmp_path / "app.log.1")
            log.write_bytes(b"five\n")
    assert [(row["line"], row["byte"], row["bytes"]) for row in found] == [(1, 0, 4), (2, 4, 4), (3, 8, 15), (4, 23, 5)]


def test_a_state_belongs_to_one_process_and_one_log(run, model, tmp_path):
    log, other, state = tmp_path / "app.log", tmp_path / "other.log", tmp_path / "s"
    log.write_bytes(b"one\n")
    other.write_bytes(b"two\n")
    follow = command("stream", log, "--follow", "--state", state, "-q")
    with subprocess.Popen(follow, env=environment(), stdout=subprocess.PIPE) as child:
        assert child.stdout.readline()
        second = run("stream", other, "--follow", "--state", state)
        child.send_signal(signal.SIGTERM)
    assert second.code == 5
    before = state.read_bytes()
    for arguments in (["stream", other, "--follow"], ["stream", other], ["generate", "x", "-n", "1"]):
        done = run(*arguments, "--state", state)
        assert (done.code, str(log) in done.err) == (3, True), done.err
    assert state.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [["new"], [], ["--frozen"]])
def test_a_stream_knows_where_it_began_before_it_scores(more, model, piped, tmp_path):
    log, state = tmp_path / "app.log", tmp_path / "s"
    log.write_bytes(b"old\n")
    options = [option for option in more if option != "new"]
    before = b""
    if "new" not in more:
        assert piped(b"normal\n", "--state-out", state).code == 0
        before = state.read_bytes()
    follow = command("stream", log, "--follow", "--from-end", "--state", state, "--json", "-q", *options)
    with subprocess.Popen(follow, env=environment(), stdout=subprocess.PIPE) as child:
        while not state.exists() or state.read_bytes() == before:
            assert child.poll() is None
            time.sleep(0.05)
        child.kill()
    with log.open("ab") as file:
        file.write(b"one\n")
    log.rename(tmp_path / "app.log.1")
    log.write_bytes(b"two\n")
    with subprocess.Popen(follow, env=environment(), stdout=subprocess.PIPE) as child:
        found = [json.loads(child.stdout.readline())["text"] for _ in range(2)]
        child.send_signal(signal.SIGTERM)
    assert found == ["one", "two"]


def test_a_stream_goes_on_after_a_line_that_is_not_utf8(piped, tmp_path):
    lines = [b"one", b"two", "كتاب".encode("cp1256"), b"last"]
    done = piped(b"\n".join(lines), "-m", "books", "--emit", "lines")
    assert done.code == 0, done.err
    assert [line.split(b"\t")[1] for line in done.out.splitlines()] == lines
    assert len(re.findall(r"line 3 of \S+ is not UTF-8", done.err)) == 1


def test_a_stream_goes_on_after_nul(piped):
    done = piped(b"one\na\0b\nlast", "-m", "books", "--json")
    assert [line["text"] for line in objects(done.out)] == ["one", "a\0b", "last"]
    assert len(re.findall(r"line 2 of \S+ has NUL", done.err)) == 1


@pytest.mark.parametrize("options", [["--follow", "--from-end"], ["--follow"], []])
def test_an_empty_state_is_refused(options, run, model, tmp_path):
    log, state = tmp_path / "app.log", tmp_path / "s"
    log.write_bytes(b"one\n")
    state.touch()
    done = run("stream", log, "--state", state, *options)
    assert (done.code, "empty" in done.err) == (3, True)
    assert state.stat().st_size == 0


def test_a_state_without_a_place_says_that_a_file_is_read_from_its_beginning(piped, model, tmp_path):
    first, second = (piped(TEXT, "--state", tmp_path / "s") for _ in range(2))
    assert ["from its beginning" in done.err for done in (first, second)] == [False, True]


def test_a_dry_run_counts_the_state_file(piped, model, tmp_path):
    state = tmp_path / "s"
    for more in ([], ["--context-cache", "40"], ["--adapt"]):
        plan = objects(piped(TEXT, "--dry-run", "--json", "--state", state, *more).out)[0]
        assert piped(TEXT * 9, "--state", state, *more).code == 0
        least = 50_000 if "--context-cache" in more else 9_000  # what any state has: names, and weights of a cache
        assert 0 <= state.stat().st_size - plan["saved_bytes"] < least
        state.unlink()


def test_a_dry_run_counts_the_index_of_a_cache(piped, model):
    sizes = (40, 5000, 2**17)
    plans = [objects(piped(TEXT, "--dry-run", "--json", "--context-cache", str(size)).out)[0] for size in sizes]
    indexes = [sum(array.nbytes for array in new_index(size)) for size in sizes]
    for size, plan, index in zip(sizes, plans, indexes, strict=True):
        grown = plan["needed_bytes"] - plans[0]["needed_bytes"]
        assert 0.75 * (index - indexes[0]) <= grown <= 1.4 * (index - indexes[0]), size


REFUSED = {
    "binary": (b"PK\x03\x04 a\n", ["-m", "books"]),
    "UTF-16": ("cafe\ncafe\n".encode("utf-16-le"), ["-m", "books"]),
    "no such column": (b"a,b\n1,2\n", ["--text-field", "text"]),
    "the second row without the key": (b'{"text": "a", "x": 1}\n{"text": "b"}\n', ["--reset-on-change", "x"]),
    "no such model": (b"a\n", ["-m", "none"]),
    "damaged model": (b"a\n", ["-m", "damaged"]),
    "illegal option": (b"a\n", ["--reset-on", "("]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_stream_leaves_no_state(kind, piped, untrained, tmp_path):
    weights = untrained("damaged") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    untrained("whole")
    data, arguments = REFUSED[kind]
    done = piped(data, *arguments, "--state", tmp_path / "new")
    assert done.code in (2, 3), done.err
    assert not (tmp_path / "new").exists()


def test_a_state_of_another_model_is_refused(piped, model, tmp_path):
    assert piped(TEXT, "--state-out", tmp_path / "s").code == 0
    damaged = bytearray((tmp_path / "s").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "bad").write_bytes(damaged)
    for name, said in (("bad", "damaged"), ("absent", "absent")):
        done = piped(TEXT, "--state-in", tmp_path / name)
        assert done.code == 3, done.err
        assert said in done.err
    import torch

    from xlcli.store.folder import load, save_model

    old = load(model)
    weights = {name: torch.zeros_like(value) for name, value in old.network.state_dict().items()}
    save_model(model.parent / "other", old.config, weights, old.tokenizer, {})
    done = piped(TEXT, "-m", "other", "--state-in", tmp_path / "s")
    assert done.code == 3
    assert re.search(r"\btiny\b.*\bother\b.*\bweights \w{12}\b.*\b\w{12}\b", done.err)
    assert "-m tiny" in done.err
    shutil.rmtree(model)
    (model.parent / "other").rename(model)
    done = piped(TEXT, "-m", "tiny", "--state-in", tmp_path / "s")
    assert "version" in done.err


@pytest.mark.parametrize(("name", "said"), [("absent", "absent"), (".", "folder")])
def test_an_unreadable_file_is_refused(run, model, name, said):
    done = run("stream", name)
    assert (done.code, said in done.err) == (3, True)


def test_a_terminal_gets_harmless_text_colored_by_surprise(model):
    hostile = b"a\x1b]0;owned\x07b\x9bc\xc2\x9b2J \xe2\x80\xae\rd [bold]x[/no]\n"
    terminal = Terminal(command("stream", "-m", model), stdin=hostile + TEXT, NO_COLOR="")
    assert terminal.finish() == 0
    assert terminal.screen.title == ""
    assert r"a\x1b]0;owned\x07b\x9bc\x9b2J \u202e\rd [bold]x[/no]" in terminal.text
    assert TEXT.decode().strip() in terminal.text
    assert b"\x1b[1;31m" in terminal.received
    assert b"\x1b]" not in terminal.received


def test_an_empty_stream_has_no_score(piped, model):
    done = piped(b"")
    assert (done.code, done.out) == (0, b"")
    assert "nothing to score: 0 lines" in done.err
    assert "bits per byte" not in done.err
    [stats] = objects(piped(b"", "--emit", "stats", "--json").out)
    assert stats["bits_per_byte"] is None
