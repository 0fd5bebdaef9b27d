import csv
import errno
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
import weakref
from pathlib import Path

import pyarrow.parquet
import pytest
from programs import TEXT, Terminal
from programs import command as command_line

from xlcli.cli import loading
from xlcli.cli.tables import legal_names
from xlcli.model.lm import LanguageModel
from xlcli.store.layout import write_record

KEYS = {
    "each_line", "crlf", "finished", "train_steps",
    "model", "position", "attention", "parameters",
    "file", "bytes", "chars", "words", "tokens", "nats", "bits_per_byte", "bits_per_char", "perplexity",
    "word_perplexity", "mem_len", "segment_len", "batch_size", "span", "tokens_per_second", "peak_rss_bytes",
    "seconds", "device", "dtype", "weight_dtype", "memory_dtype", "unknown_words", "documents",
    "stride", "adapt", "context_cache", "mean_steps", "partial", "by_context", "pairs",
    "correct", "correct_low", "correct_high", "correct_by_chance", "correct_per_byte", "spread",
}  # fmt: skip


def test_the_newest_model_and_its_own_text_by_default(run, model):
    done = run("eval", "--mem-len", "8")
    assert done.code == 0, done.err
    text = done.out.decode()
    assert text.startswith("tiny on ")
    assert "bits per byte" in text
    assert "memory of 8 tokens" in text
    assert "context seen" in text
    assert "segments of" in run("eval", "--mem-len", "0").out.decode()


def test_json_has_the_promised_keys(run, model):
    done = run("eval", "--json")
    score = json.loads(done.out)
    assert done.out.count(b"\n") == 1
    assert set(score) == KEYS
    assert set(score["by_context"][0]) == {"from", "to", "tokens", "bits_per_byte", "margin"}
    assert score["bytes"] == len(TEXT) * 8
    assert score["nats"] / score["bytes"] / 0.6931471805599453 == pytest.approx(score["bits_per_byte"])


def test_sweep(run, model):
    scores = json.loads(run("eval", "--json", "--sweep-mem-len", "0,4,8").out)["sweep"]
    assert [score["mem_len"] for score in scores] == [0, 4, 8]
    assert all(set(score) == KEYS for score in scores)
    assert run("eval", "--sweep-mem-len", "0,4").out.decode().count("\n0 ") == 1


@pytest.fixture
def models(model, untrained):
    """`-m` for the untrained model `tiny` and one of linear attention, of the same held-out text."""
    untrained("linear", attention={"kind": "linear", "n_heads": 2}, position={"kind": "none"})
    return ("-m", "tiny", "-m", "linear")


def test_several_models_make_one_table_of_the_scores_of_each(run, models):
    found = json.loads(run("eval", *models, "--json").out)
    alone = [json.loads(run("eval", "-m", name, "--json").out) for name in ("tiny", "linear")]
    times = ("seconds", "tokens_per_second", "peak_rss_bytes", "file")
    kept = [[{key: value for key, value in score.items() if key not in times} for score in scores]
            for scores in (found["sweep"], alone)]  # fmt: skip
    assert kept[0] == kept[1]
    assert found["partial"] is False
    assert [score["attention"] for score in alone] == ["full", "linear"]
    rows = run("eval", *models, "--sweep-mem-len", "0,8", "--limit", "200").out.decode().splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["model", "tiny", "tiny", "linear", "linear"]
    assert [row.split()[4] for row in rows[1:]] == ["0", "8", "0", "8"]


def test_a_model_whose_training_was_stopped_is_marked(run, models):
    write_record(Path("models/tiny"), {"finished": False})
    done = run("eval", *models)
    rows = [line for line in done.out.decode().splitlines() if line.startswith(("tiny", "linear"))]
    assert ["unfinished" in row for row in rows] == [True, False]
    scores = json.loads(run("eval", *models, "--json").out)["sweep"]
    assert [score["finished"] for score in scores] == [False, True]
    rows = [line for line in run("models").out.decode().splitlines() if line.startswith(("tiny", "linear"))]
    assert {row.split()[0]: "unfinished" in row for row in rows} == {"tiny": True, "linear": False}


def test_models_of_one_name_have_the_names_of_their_folders(run, model):
    shutil.copytree(model, "other/tiny")
    found = json.loads(run("eval", "-m", "models/tiny", "-m", "other/tiny", "--limit", "99", "--json").out)
    assert [score["model"] for score in found["sweep"]] == [
        str(Path(name).resolve()) for name in ("models/tiny", "other/tiny")
    ]
    rows = run("eval", "-m", "models/tiny", "-m", "other/tiny", "--limit", "99").out.decode().splitlines()[2:]
    assert [row.split()[0].endswith("tiny") for row in rows[1:]] == [True, True]


def test_models_have_the_names_of_links(run, model):
    for name in ("first", "second"):
        Path("models", name).symlink_to(Path(model).resolve())
    found = json.loads(run("eval", "-m", "first", "-m", "second", "--limit", "99", "--json").out)
    assert [score["model"] for score in found["sweep"]] == ["first", "second"]


def test_a_model_leaves_the_ram_before_the_next_one_is_loaded(run, models, monkeypatch):
    real, networks = loading.load_model, []

    def load(*arguments):
        assert [network() for network in networks] == [None] * len(networks)
        loaded = real(*arguments)
        networks.append(weakref.ref(loaded[0].network))
        return loaded

    monkeypatch.setattr(loading, "load_model", load)
    assert run("eval", *models).code == 0
    assert len(networks) == 2


def test_an_interrupt_keeps_the_models_that_were_scored(run, models, interrupted):
    options = ("--segment-len", "16", "--set=eval.batch_size=1", "--mem-len", "0")
    interrupted(len(TEXT) * 8 // 16 + 5)
    done = run("eval", *models, *options, "--json")
    found = json.loads(done.out)
    assert (done.code, found["partial"]) == (130, True)
    assert [(score["model"], score["partial"]) for score in found["sweep"]] == [("tiny", False)]


def read_table(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file, dialect="excel-tab"))


@pytest.fixture
def items():
    """A table of sentences."""
    Path("items.tsv").write_text("item\tbits\ttext\n1\tx\tThe dog sat.\n2\ty\tA fox, lazy\n")
    return ("items.tsv", "--text-field", "text", "--reset-on-document")


def test_words_of_several_models_stand_beside_each_other(run, models, items):
    columns = ("--columns", "rank,layers=1")
    assert run("eval", *items, *models, "--words", "both.tsv", *columns).code == 0
    alone = {}
    for name in ("tiny", "linear"):
        assert run("eval", *items, "-m", name, "--words", f"{name}.tsv", *columns).code == 0
        alone[name] = read_table(f"{name}.tsv")
    own = {"bits", "naive_bits", "token_entropy", "tokens", "rank", "layer_1"}
    for row, *rows in zip(read_table("both.tsv"), *alone.values(), strict=True):
        expected = {key: value for key, value in rows[0].items() if key not in own}
        expected["bits"] = expected.pop("input_bits")  # no longer a name of a score
        for name, each in zip(alone, rows, strict=True):
            expected |= {f"{key}_{name}": each[key] for key in own}
        assert row == expected
    assert run("eval", *items, *models, "--words", "both.tsv").code == 0  # a table that --words has written
    rows = [json.loads(line) for line in run("eval", *items, *models, "--words", "-", "--json").out.splitlines()]
    assert f"{rows[1]['bits_linear']:.4f}" == alone["linear"][1]["bits"]


def test_words_of_vocabularies_are_the_same(run, model, items):
    done = run("eval", *items, "-m", "tiny", "-m", "books", "--words", "words.csv")
    assert done.code == 0, done.err
    rows = list(csv.DictReader(Path("words.csv").read_text().splitlines()))
    assert [row["word"] for row in rows] == ["The", "dog", "sat.", "A", "fox,", "lazy"]
    assert rows[0]["tokens_tiny"] == "3"
    assert rows[0]["tokens_books"] == "1"


def test_table_of_regions_of_two_models(run, models):
    rows = [["item", "condition", "sentence"], [1, "a", "The *quick fox* ran"], [1, "b", "The *lazy dog* ran"]]
    with Path("items.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    ended = run(
        "eval", "items.csv", "--text-field", "sentence", "--reset-on-document", "--region-mark", "*",
        "--words", "w.tsv", "--regions", "r.tsv", *models,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    with Path("r.tsv").open() as file:
        found = [*csv.DictReader(file, delimiter="\t")]
    assert [(row["item"], row["condition"], row["region"], row["number"], row["text"]) for row in found] == [
        ("1", "a", "1", "2", "quick fox"),
        ("1", "b", "1", "2", "lazy dog"),
    ]
    with Path("w.tsv").open() as file:
        words = [*csv.DictReader(file, delimiter="\t")]
    assert [word["region"] for word in words] == ["0", "1", "1", "0"] * 2
    for name in ("tiny", "linear"):
        for row in found:
            inside = [w for w in words if (w["document"], w["region"]) == (row["document"], "1")]
            assert float(row[f"bits_{name}"]) == pytest.approx(sum(float(w[f"bits_{name}"]) for w in inside), abs=2e-4)


def test_regions_and_tokens_are_listed_together_as_alone(run, models):
    Path("items.csv").write_text("item,sentence\n1,The *quick fox* ran\n2,The *lazy dog* ran\n")
    options = ["items.csv", "--text-field", "sentence", "--reset-on-document", "--region-mark", "*", *models]
    assert run("eval", *options, "--regions", "r.tsv", "--per-token", "t.tsv", "--columns", "rank").code == 0
    assert run("eval", *options, "--regions", "r1.tsv", "--columns", "rank").code == 0
    assert run("eval", *options, "--words", "w1.tsv", "--per-token", "t1.tsv", "--columns", "rank").code == 0
    assert Path("r.tsv").read_text() == Path("r1.tsv").read_text()
    assert Path("t.tsv").read_text() == Path("t1.tsv").read_text()


def test_columns_of_the_text_stand_once_beside_those_of_each_model(run, models, items):
    Path("counts.tsv").write_text("the\t5\ndog\t2\n")
    columns = ("--columns", "length,frequency=counts.tsv,previous=1")
    assert run("eval", *items, *models, "--words", "both.tsv", *columns).code == 0
    of_text = ["length", "frequency", "previous_1_length", "previous_1_frequency"]
    of_model = ["bits", "naive_bits", "token_entropy", "tokens", "previous_1_bits", "previous_1_tokens"]
    rows = read_table("both.tsv")
    assert list(rows[0]) == ["item", "bits", "document", "line", "number", "byte", "word", *of_text, *(
        f"{key}_{name}" for name in ("tiny", "linear") for key in of_model)]  # fmt: skip
    assert [rows[1][key] for key in of_text] == ["3", f"{-math.log2(3 / 10):.4f}", "3", f"{-math.log2(6 / 10):.4f}"]


def test_documents_of_several_models_stand_beside_each_other(run, models):
    for name, n in (("b.txt", 3), ("a.txt", 1), ("c.txt", 2)):
        Path(name).write_bytes(TEXT * n)
    done = run("eval", "b.txt", "a.txt", "c.txt", *models, "--documents", "d.tsv", "--words", "w.jsonl")
    assert done.code == 0, done.err
    with Path("d.tsv").open() as file:
        found = [*csv.DictReader(file, delimiter="\t")]
    assert [(row["file"], row["document"], row["bytes"], row["words"]) for row in found] == [
        ("b.txt", "1", str(3 * len(TEXT)), "30"),
        ("a.txt", "2", str(len(TEXT)), "10"),
        ("c.txt", "3", str(2 * len(TEXT)), "20"),
    ]
    scores = json.loads(run("eval", "b.txt", "a.txt", "c.txt", *models, "--json").out)["sweep"]
    for score in scores:
        total = sum(float(row[f"bits_{score['model']}"]) for row in found)
        assert total == pytest.approx(score["nats"] / math.log(2), abs=2e-4)  # a table has four decimals
    words = [json.loads(line) for line in Path("w.jsonl").read_text().splitlines()]
    assert [word["file"] for word in words] == ["b.txt"] * 27 + ["a.txt"] * 9 + ["c.txt"] * 18
    shown = done.out.decode().split("document ")[1].splitlines()
    assert sorted(line.split()[0] for line in shown[1:4]) == ["a.txt", "b.txt", "c.txt"]
    first = {row["file"]: float(row["bits_per_byte_tiny"]) for row in found}
    assert [line.split()[0] for line in shown[1:4]] == sorted(first, key=first.__getitem__, reverse=True)


def test_pairs_of_several_models_stand_beside_each_other(run, models):
    Path("pairs.tsv").write_text("a\tb\nx y\ty x\nxx\tx\n")
    options = ("pairs.tsv", "--pairs", "a,b", "--words")
    assert run("eval", *options, "both.tsv", *models).code == 0
    assert run("eval", *options, "one.tsv", "-m", "linear").code == 0
    for both, one in zip(read_table("both.tsv"), read_table("one.tsv"), strict=True):
        assert both["first_bits_linear"] == one["first_bits"]


def test_tokens_of_several_models_need_one_vocabulary(run, models, items):
    assert run("eval", *items, *models, "--per-token", "t.jsonl", "--columns", "logprobs=2").code == 0
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    assert "".join(row["text"] for row in rows) == "The dog sat.\nA fox, lazy\n"
    assert list(rows[0]) == ["item", "bits", "line", "byte", "text", *(
        f"{key}_{name}" for name in ("tiny", "linear") for key in ("bits", "logprobs"))]  # fmt: skip
    done = run("eval", *items, "-m", "tiny", "-m", "books", "--per-token", "t.jsonl")
    assert (done.code, "same vocabulary" in done.err) == (2, True)


def test_tokens_have_the_columns_of_their_row(run, model, items):
    assert run("eval", *items, "--per-token", "t.jsonl", "--columns", "rank,entropy").code == 0
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    assert {(row["item"], row["input_bits"]) for row in rows} == {("1", "x"), ("2", "y")}
    assert "".join(row["text"] for row in rows if row["item"] == "2") == "A fox, lazy\n"
    assert list(rows[0]) == ["item", "input_bits", "line", "byte", "text", "bits", "rank", "entropy"]
    assert run("eval", *items, "--per-token", "t.jsonl").code == 0  # which it has written


def test_an_interrupt_of_the_second_model_writes_no_words(run, models, interrupted):
    options = ("--segment-len", "16", "--set=eval.batch_size=1", "--mem-len", "0", "--words", "w.tsv")
    interrupted(len(TEXT) * 8 // 16 + 5)
    done = run("eval", *models, *options)
    assert (done.code, "w.tsv" in done.err) == (130, True)
    assert not Path("w.tsv").exists()


@pytest.mark.parametrize(("options", "said"), [
    (["--html", "page.html"], "--html"), (["-"], "standard input")
])  # fmt: skip
def test_what_needs_one_model_refuses_several(run, models, without_torch, options, said):
    done = run("eval", *models, *options)
    assert (done.code, said in done.err) == (2, True), done.err


def test_models_with_different_held_out_texts_need_a_text(run, models):
    Path("models/linear/valid.txt").write_bytes(TEXT * 7)
    done = run("eval", *models)
    assert (done.code, "xlcli eval FILE -m tiny -m linear" in done.err) == (3, True), done.err
    Path("text").write_bytes(TEXT)
    assert len(json.loads(run("eval", "text", *models, "--json").out)["sweep"]) == 2
    assert run("eval", *models, "--split", "test").code == 3


@pytest.mark.parametrize("command", [["generate"], ["stream", "text"], ["bench"]])
def test_other_commands_refuse_a_second_model(run, models, without_torch, command):
    Path("text").write_bytes(TEXT)
    done = run(*command, *models)
    assert (done.code, "-m" in done.err) == (2, True), done.err


def test_a_stride_without_memory(run, model):
    done = run("eval", "--mem-len", "0", "--segment-len", "16", "--set=eval.stride=4", "--limit", "99")
    assert "no memory: windows of 16 tokens with a stride of 4\n" in done.out.decode()
    assert "context seen" not in done.out.decode()
    score = json.loads(run("eval", "--mem-len", "0", "--set=eval.stride=1", "--limit", "99", "--json").out)
    assert (set(score), score["stride"], score["by_context"]) == (KEYS, 1, [])


@pytest.mark.parametrize(("options", "said"), [
    (["--set=eval.stride=1"], "eval.stride"),
    (["--set=eval.stride=1", "--mem-len", "8"], "--mem-len"),
    (["--set=eval.stride=1", "--mem-len", "0", "--sweep-mem-len", "0,8"], "--mem-len 0"),
    (["--set=eval.stride=0", "--mem-len", "0"], "eval.stride"),
    (["--set=eval.stride=17", "--mem-len", "0", "--segment-len", "16"], "--segment-len"),
    (["--set=eval.stride=99", "--mem-len", "0"], "99"),
    (["--set=eval.stride=1", "--mem-len", "0", "--plot", "x.png"], "--plot"),
])  # fmt: skip
@pytest.mark.usefixtures("without_torch")
def test_a_stride_that_cannot_be_is_refused(run, model, options, said):
    done = run("eval", *options, "--dry-run")
    assert (done.code, said in done.err) == (2, True), done.err


def test_standard_input_and_files(run, model, monkeypatch, tmp_path):
    (tmp_path / "a").write_bytes(TEXT)
    (tmp_path / "b").write_bytes(TEXT)
    both = json.loads(run("eval", tmp_path / "a", tmp_path / "b", "--json").out)
    assert both["bytes"] == 2 * len(TEXT)
    with (tmp_path / "a").open("rb") as file:
        saved = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            done = run("eval", "-", "--json")
        finally:
            os.dup2(saved, 0)
            os.close(saved)
    assert json.loads(done.out)["bytes"] == len(TEXT)


def test_tokens_have_the_columns_of_their_row_also_beside_a_page(run, model, tmp_path):
    (tmp_path / "t.csv").write_text("text,kind\nthe cat sat,a\nno,b\na tree,c\n")
    for page in ([], ["--html", tmp_path / "page.html"]):
        done = run("eval", tmp_path / "t.csv", "--text-field", "text", "--per-token", tmp_path / "t.jsonl", *page)
        assert done.code == 0, done.err
        tokens = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
        texts = {kind: "".join(t["text"] for t in tokens if t["kind"] == kind).strip() for kind in "abc"}
        assert texts == {"a": "the cat sat", "b": "no", "c": "a tree"}


def test_per_token_lines_spell_the_text_and_add_up(run, model, tmp_path):
    done = run("eval", "--json", "--per-token", tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert all(set(row) == {"line", "byte", "text", "bits"} for row in rows)
    assert [row["byte"] for row in rows] == sorted(row["byte"] for row in rows)
    assert "".join(row["text"] for row in rows).encode() == TEXT * 8
    score = json.loads(done.out)
    assert sum(row["bits"] for row in rows) / score["bytes"] == pytest.approx(score["bits_per_byte"], abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_lists_as_their_file_names_say(run, model, tmp_path):
    for name in ("t.csv", "w.csv"):
        option = "--per-token" if name == "t.csv" else "--words"
        assert run("eval", option, tmp_path / name).code == 0
        rows = list(csv.DictReader((tmp_path / name).open(newline="")))
        assert all(float(row["bits"]) > 0 for row in rows)
    texts = [row["text"] for row in csv.DictReader((tmp_path / "t.csv").open())]
    assert "".join(texts).replace('"\\n"', "\n").encode() == TEXT * 8
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert len(lines) == len(texts) + 1  # a line end is spelled


def test_texts_of_lists_are_plain_unless_they_break_cells(run, model, tmp_path):
    (tmp_path / "odd").write_bytes(b'a "b",\tc\r\n\xe9\0')
    assert run("eval", tmp_path / "odd", "--binary", "--per-token", "one.tsv").code == 0
    assert run("eval", tmp_path / "odd", "--binary", "--per-token", "two.tsv", "-m", "tiny", "-m", "tiny").code == 0
    expected = ["a", " ", '"', "b", '"', ",", '"\\t"', "c", '"\\r"', '"\\n"', "\ufffd", '"\\u0000"']
    for name in ("one.tsv", "two.tsv"):
        with Path(name).open(newline="") as file:
            assert [row["text"] for row in csv.DictReader(file, dialect="excel-tab")] == expected
        assert len(Path(name).read_bytes().split(b"\n")) == len(expected) + 2


def test_per_token_to_standard_output(run, model):
    done = run("eval", "--per-token", "-")
    assert len([json.loads(line) for line in done.out.splitlines()]) == len(TEXT) * 8
    assert "bits per byte" in done.err


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_disk_is_no_mistake_of_the_path(run, model, monkeypatch, number):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    run("eval")  # which keeps the tokens of the text
    monkeypatch.setattr(os, "fsync", fail)
    done = run("eval", "--per-token", "t.jsonl")
    assert done.code == 4
    assert "t.jsonl" in done.err


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts the next evaluation after this number of calls of the model."""

    def after(n_calls):
        real, calls = LanguageModel.score, itertools.count(1)

        def score(*arguments, **named):
            if next(calls) == n_calls:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)  # the thread that watches for signals runs
            return real(*arguments, **named)

        monkeypatch.setattr(LanguageModel, "score", score)
        monkeypatch.setattr(LanguageModel, "reads_by_layer", lambda *_: False)

    return after


def test_an_interrupt_prints_the_score_of_what_was_read(run, model, interrupted, tmp_path):
    options = ("--segment-len", "16", "--set=eval.batch_size=1", "--mem-len", "0")
    interrupted(5)
    done = run("eval", "--json", *options, "--per-token", tmp_path / "t.jsonl")
    score = json.loads(done.out)
    assert (done.code, score["partial"], score["bytes"], score["chars"]) == (130, True, 80, None)
    assert re.search(rf"\b80\b.*\b{len(TEXT) * 8}\b", done.err)
    assert not list(tmp_path.iterdir())
    assert str(tmp_path / "t.jsonl") in done.err
    interrupted(5)
    done = run("eval", *options, "--html", "page.html")
    assert done.code == 130
    assert "page.html" in done.err
    assert not Path("page.html").exists()
    assert re.match(r"tiny on .*, PARTIAL: stopped before the end\n80 bytes, ", done.out.decode())


@pytest.mark.parametrize(
    ("option", "suffix"), [("--per-token", ".jsonl"), ("--words", ".tsv"), ("--html", ".html")], ids=str
)
def test_an_interrupt_after_the_text_was_scored_keeps_the_output(run, model, interrupted, option, suffix):
    whole, kept = Path(f"whole{suffix}"), Path(f"kept{suffix}")
    command = ("eval", "--segment-len", "16", "--set=eval.batch_size=1", "--mem-len", "8", option)
    assert run(*command, whole).code == 0
    interrupted(-(-len(TEXT) * 8 // 16) + 2)
    done = run(*command, kept, "--plot", "p.png")
    assert done.code == 130
    assert "p.png" in done.err
    assert f"{kept} was not written" not in done.err
    assert not Path("p.png").exists()
    if option != "--html":  # the page has the loss by context, of fewer windows
        assert kept.read_bytes() == whole.read_bytes()
    assert kept.stat().st_size > 0.8 * whole.stat().st_size


def test_an_interrupt_of_a_sweep_prints_its_finished_rows(run, model, interrupted):
    options = ("--segment-len", "16", "--set=eval.batch_size=1", "--sweep-mem-len", "0,8,16")
    n_calls = -(-len(TEXT) * 8 // 16)
    interrupted(n_calls + 3)
    done = run("eval", "--json", *options)
    found = json.loads(done.out)
    assert (done.code, found["partial"]) == (130, True)
    assert [(score["mem_len"], score["partial"]) for score in found["sweep"]] == [(0, False)]
    interrupted(n_calls + 3)
    shown = run("eval", *options).out.decode()
    assert "PARTIAL: 1 of 3" in shown
    assert shown.count("\n") == 4


def test_per_token_needs_a_folder(run, model):
    assert run("eval", "--per-token", "nowhere/t.jsonl").code == 2


def test_lists_of_one_run_are_those_of_a_run_each(run, model):
    Path("text").write_bytes(TEXT * 3)
    options = ("eval", "text", "-m", "tiny", "--columns", "rank", "--limit", "100")
    assert run(*options, "--words", "both.tsv", "--per-token", "both.csv").code == 0
    assert run(*options, "--words", "words.tsv").code == 0
    assert run(*options, "--per-token", "tokens.csv").code == 0
    assert Path("both.tsv").read_bytes() == Path("words.tsv").read_bytes()
    assert Path("both.csv").read_bytes() == Path("tokens.csv").read_bytes()


def test_lists_have_a_column_for_each_memory_length(run, models):
    for name in ("a.txt", "b.txt"):
        Path(name).write_bytes(TEXT * 2 + name.encode())
    command = ("eval", "a.txt", "b.txt")
    lists = {"--documents": "d.jsonl", "--words": "w.jsonl", "--per-token": "t.jsonl"}
    outputs = [*itertools.chain.from_iterable(lists.items())]
    done = run(*command, *models, "--sweep-mem-len", "0,8", *outputs)
    assert done.code == 0, done.err
    swept = {name: [json.loads(line) for line in Path(name).read_text().splitlines()] for name in lists.values()}
    for model in models[1::2]:
        for mem_len in ("0", "8"):
            assert run(*command, "-m", model, "--mem-len", mem_len, *outputs).code == 0
            for name, rows in swept.items():
                alone = [json.loads(line) for line in Path(name).read_text().splitlines()]
                key = f"bits_{model}_{mem_len}"
                assert [row[key] for row in rows] == pytest.approx([row["bits"] for row in alone], rel=1e-6)
                assert [row["file"] for row in rows] == [row["file"] for row in alone]


def test_a_sweep_that_is_stopped_writes_no_list(run, model, interrupted):
    interrupted(-(-len(TEXT) * 8 // 16) + 3)
    options = ("--segment-len", "16", "--set=eval.batch_size=1", "--sweep-mem-len", "0,8,16")
    done = run("eval", *options, "--documents", "d.tsv")
    assert (done.code, "d.tsv" in done.err, Path("d.tsv").exists()) == (130, True, False)


def test_a_plot_without_its_library_says_how_to_install_it(run, model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run("eval", "--plot", "x.png")
    assert done.code == 2
    assert "xlcli[plot]" in done.err


def test_plot(run, model):
    pytest.importorskip("matplotlib")
    done = run("eval", "--plot", "x.png")
    assert (done.code, "x.png" in done.err) == (0, True)
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_a_curve_for_each_model(run, models, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    pictures, real = [], figure.Figure.savefig

    def save(self, *arguments, **options):
        pictures.append(self)
        return real(self, *arguments, **options)

    def labels(picture):
        [legend] = picture.legends
        return [text.get_text().split(":")[0] for text in legend.get_texts()]

    monkeypatch.setattr(figure.Figure, "savefig", save)
    Path("models/linear").rename("models/$lin{$")
    assert run("eval", "-m", "tiny", "-m", "$lin{$", "--plot", "x.png").code == 0
    assert labels(pictures[0]) == ["tiny, memory 16", "$lin{$, memory 16"]
    command = ("eval", "-m", "tiny", "-m", "$lin{$", "--sweep-mem-len", "8,0,16", "--plot", "x.png")
    found = json.loads(run(*command, "--json").out)["sweep"]
    assert labels(pictures[1]) == ["tiny", "$lin{$"]
    bits = {(score["model"], score["mem_len"]): score["bits_per_byte"] for score in found}
    for line, model in zip(pictures[1].axes[0].lines, ("tiny", "$lin{$"), strict=True):
        assert list(line.get_ydata()) == [bits[model, length] for length in (0, 8, 16)]
    assert [tick.get_text() for tick in pictures[1].axes[0].get_xticklabels()] == ["0", "8", "16"]


def test_windows_that_overlap_by_themselves_have_no_plot(run, untrained):
    untrained("gpt", position={"kind": "learned", "max_len": 16, "overflow": "slide"})
    Path("x.png").write_bytes(b"an older picture")
    done = run("eval", "--mem-len", "0", "--plot", "x.png")
    assert (done.code, "x.png" in done.err) == (0, True)
    assert Path("x.png").read_bytes() == b"an older picture"


@pytest.mark.usefixtures("without_torch")
def test_dry_run_needs_no_torch(run, model):
    plan = json.loads(run("eval", "--dry-run", "--json", "--mem-len", "100").out)
    assert plan["mem_len"] == 100
    assert plan["parameters"] > 1000
    assert plan["state_bytes"] == 2 * 4 * plan["batch_size"] * 2 * 100 * 16
    swept = json.loads(run("eval", "--dry-run", "--json", "--sweep-mem-len", "8,100,16").out)
    assert {**swept, "available_bytes": plan["available_bytes"]} == plan
    assert "parameters" in run("eval", "--dry-run").out.decode()


LINEAR = {"attention": {"kind": "linear", "n_features": 8}, "position": {"kind": "rope"}}
HASHED = {
    "attention": {"kind": "lsh", "n_buckets": [2, 2], "bucket_size": 5, "n_hashes": 3},
    "position": {"kind": "none"},
}
UNIVERSAL = {"stack": {"kind": "universal", "n_steps": 3, "act": True}}
PLANS = {
    "local": ({"attention": {"kind": "local", "window": 6}}, 2 * 2 * 6 * 16, "memory of 6 tokens"),
    "linear": (LINEAR, 2 * 2 * 2 * 8 * (8 + 1), "memory of all tokens read"),
    "hashed": (HASHED, 2 * 2 * 3 * 4 * (5 * (2 * 8 + 2 * 4) + 2), "memory of 16 tokens"),
    "universal": (UNIVERSAL, 3 * 2 * 2 * 16 * 16, "memory of 16 tokens"),
    "one layer": ({"n_layers": 1}, 2 * 16 * 16, "128 texts at a time"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_dry_run_computes_the_size_of_the_memory(run, name, untrained, request):
    """Rows of keys and values in float32, 2,048 tokens in all; linear attention has one row of sums in float64."""
    shape, numbers, said = PLANS[name]
    untrained(name, **shape)
    request.getfixturevalue("without_torch")
    assert said in run("eval", "--dry-run").out.decode()
    plan = json.loads(run("eval", "--dry-run", "--json").out)
    assert plan["batch_size"] == (1 if name == "linear" else 2048 // 16)
    assert plan["state_bytes"] == plan["batch_size"] * 4 * numbers


@pytest.mark.parametrize(("encoding", "bytes_per_weight"), [("float32", 8), ("int8", 16)])
def test_a_dry_run_counts_what_adaptation_needs(run, model, encoding, bytes_per_weight, monkeypatch):
    from xlcli.cli import loading
    from xlcli.store.folder import load, save_model

    monkeypatch.setattr(loading, "SMALLEST_STORED", 0)
    old = load(model)
    weights = dict(old.network.state_dict())
    save_model(model.parent / "stored", old.config, weights, old.tokenizer, {}, encoding=encoding)
    options = ("eval", "text", "-m", "stored", "--dry-run", "--json")
    Path("text").write_bytes(b"a\n")
    plain, adapted = (json.loads(run(*options, *more).out) for more in ((), ("--adapt",)))
    states = 2 * (plain["state_bytes"] - adapted["state_bytes"])  # which reads one text at a time
    assert adapted["needed_bytes"] - plain["needed_bytes"] + states == bytes_per_weight * plain["parameters"]


def test_a_dry_run_without_memory_says_what_a_token_sees(run, model):
    for flags, said in (
        (("--context", "20"), "no memory: each token from the 20 tokens before it\nmemory   102 windows at a time"),
        (("--mem-len", "0", "--segment-len", "64"), "no memory: independent segments of 64 tokens"),
    ):
        assert said in run("eval", "--dry-run", *flags).out.decode()
    plans = [json.loads(run("eval", "--dry-run", "--json", "--context", n).out) for n in ("20", "200")]
    assert [plan["batch_size"] for plan in plans] == [102, 10]
    assert plans[0]["state_bytes"] == pytest.approx(plans[1]["state_bytes"], rel=0.05)


def test_a_dry_run_uses_the_number_of_steps(run, untrained, request):
    untrained("universal", **UNIVERSAL)
    request.getfixturevalue("without_torch")
    for command in ("eval", "stream"):
        three, five = (
            json.loads(run(command, "--dry-run", "--json", *flags).out)["state_bytes"]
            for flags in ([], [f"--set={command}.n_steps=5"])
        )
        assert five == three * 5 / 3


@pytest.mark.parametrize(("command", "dry"), [
    ("eval", []), ("generate", []), ("stream", []), ("eval", ["--dry-run"]), ("stream", ["--dry-run"]),
])  # fmt: skip
@pytest.mark.usefixtures("without_torch")
def test_a_number_of_steps_is_for_universal_models(run, model, monkeypatch, command, dry):
    Path("present.txt").write_text("text")
    done = run(command, f"--set={command}.n_steps=2", *dry, *(["present.txt"] if command == "eval" else []))
    assert (done.code, done.out) == (2, b"")
    assert f"{command}.n_steps" in done.err
    monkeypatch.setenv("XLCLI_N_STEPS", "2")
    assert "XLCLI_N_STEPS" in run(command, *dry).err


def test_a_universal_model_is_applied_as_often_as_asked(run, untrained):
    untrained("universal", **UNIVERSAL)
    scores = {n: json.loads(run("eval", "--json", f"--set=eval.n_steps={n}").out) for n in (1, 3, 5)}
    assert scores[1]["mean_steps"] == 1.0
    assert len({score["bits_per_byte"] for score in scores.values()}) == 3
    assert json.loads(run("eval", "--json").out)["bits_per_byte"] == scores[3]["bits_per_byte"]
    assert re.search(r"mean steps +\d\.\d\d\n", run("eval").out.decode())
    texts = {run("generate", "The", "-n", "24", "-t", "0", f"--set=generate.n_steps={n}").out for n in (1, 5)}
    assert len(texts) == 2


def test_steps_are_null_for_a_model_without_a_choice(run, model):
    assert json.loads(run("eval", "--json").out)["mean_steps"] is None


@pytest.mark.parametrize("command", ["eval", "generate", "stream"])
def test_a_rounded_memory_is_for_softmax_attention(run, untrained, command):
    untrained("summed", attention={"kind": "linear"}, position={"kind": "none"})
    Path("present.txt").write_text("text")
    done = run(
        command, "-m", "summed", f"--set={command}.memory_dtype=int8", *(["present.txt"] if command == "eval" else [])
    )
    assert (done.code, done.out) == (2, b"")
    assert f"{command}.memory_dtype" in done.err


def test_rounding_is_printed(run, model):
    rounded = ("--set=eval.weight_dtype=int8", "--set=eval.memory_dtype=bfloat16")
    score = json.loads(run("eval", "--json", "--mem-len", "8", *rounded).out)
    assert (score["weight_dtype"], score["memory_dtype"]) == ("int8", "bfloat16")
    text = run("eval", "--mem-len", "8", *rounded).out.decode()
    assert re.search(r"cpu float32, int8 weights, bfloat16 memory\n", text)
    sweep = run("eval", "--sweep-mem-len", "8,16", *rounded).out.decode()
    assert sweep.startswith("tiny on ")
    assert sweep.splitlines()[0].endswith(", span uniform, int8 weights, bfloat16 memory")


def test_a_memory_length_without_effect_causes_a_warning(run, untrained):
    untrained("local", attention={"kind": "local", "window": 6})
    assert re.search(r"\b6\b", run("eval", "--mem-len", "8").err)
    assert re.search(r"\b6\b", run("eval", "--sweep-mem-len", "0,8").err)
    without = run("eval", "-q").err
    assert run("eval", "--mem-len", "6", "-q").err == without
    assert not re.search(r"\b6\b", without)
    untrained("linear", **LINEAR)
    assert "remembers" in run("generate", "a", "-n", "1", "--mem-len", "8", "-m", "linear").err
    assert run("eval", "--mem-len", "0", "-m", "linear", "-q").err == run("eval", "-m", "linear", "-q").err
    assert "memory of all tokens read, batch 1" in run("eval", "-m", "linear").out.decode()


def test_no_model_at_all(run, monkeypatch):
    monkeypatch.setattr("xlcli.store.discover.models_folder", lambda: Path("nowhere"))
    done = run("eval")
    assert (done.code, "xlcli train FILE" in done.err) == (3, True)


@pytest.mark.usefixtures("without_torch")
def test_a_misspelled_model(run, model):
    done = run("eval", "-m", "tinny")
    assert done.code == 3
    assert "tiny?" in done.err


def test_json_on_a_terminal_is_escaped_and_exact(model, tmp_path):
    text = "a\u009b31m\u007f\u202eb\n"
    (tmp_path / "hostile").write_text(text)
    terminal = Terminal(command_line("eval", "-m", model, tmp_path / "hostile", "--per-token", "-", "-q"), columns=200)
    assert terminal.finish() == 0
    shown = terminal.received.decode()
    assert not {"\x9b", "\x7f", "\u202e"} & set(shown)
    pieces = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert "\\u007f" in shown
    assert sum(piece["byte"] >= 0 for piece in pieces) == len(text.encode())


def test_a_name_that_is_not_utf8(run, model):
    name = os.fsdecode(b"a\xff.txt")
    Path(name).write_bytes(TEXT)
    done = run("eval", name, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["file"] == "a\ufffd.txt"


def test_words_in_parquet_are_those_of_json_lines(run, models, items):
    Path("mixed.jsonl").write_text('{"a": 1, "b": {"c": 2}, "text": "The dog"}\n{"a": "x", "d": 0.5, "text": "sat"}\n')
    columns = ("--columns", "last,previous=1,logprobs=2", "--reset-on-document")
    for texts in (items, ("mixed.jsonl",)):
        for names in (models, models[:2]):
            for name in ("w.parquet", "w.jsonl"):
                assert run("eval", *texts, *names, "--words", name, *columns).code == 0
            table = pyarrow.parquet.read_table("w.parquet")
            rows = [json.loads(line) for line in Path("w.jsonl").read_text().splitlines()]
            assert table.num_rows == len(rows) > 2
            for found, expected in zip(table.to_pylist(), rows, strict=True):
                for key, value in expected.items():
                    if isinstance(value, list):  # nested
                        assert json.loads(found[key]) == value
                    else:
                        assert found[key] == (str(value) if key == "a" else value)  # of mixed kinds
            types = {field.name.split("_")[0]: str(field.type) for field in table.schema}
            assert (types["bits"], types["last"], types["number"], types["logprobs"]) == (
                "double",
                "bool",
                "int64",
                "string",
            )
    assert run("eval", *items, "-m", "tiny", "--per-token", "t.parquet").code == 0
    assert "".join(pyarrow.parquet.read_table("t.parquet")["text"].to_pylist()) == "The dog sat.\nA fox, lazy\n"


def test_an_empty_list_in_parquet(run, model):
    Path("blank.txt").write_text("\n")
    assert run("eval", "blank.txt", "--words", "w.parquet").code == 0
    assert pyarrow.parquet.read_table("w.parquet").num_rows == 0


def test_parquet_without_its_package_is_refused_before_the_work(run, model, items, without_torch, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pyarrow" else find_spec(name))
    done = run("eval", *items, "--words", "w.parquet")
    assert (done.code, "xlcli[parquet]" in done.err, Path("w.parquet").exists()) == (2, True, False)


def test_an_interrupt_leaves_a_parquet_file_as_it_was(run, model, interrupted):
    Path("w.parquet").write_text("before")
    interrupted(2)
    done = run("eval", "--segment-len", "16", "--set=eval.batch_size=1", "--mem-len", "0", "--words", "w.parquet")
    assert (done.code, Path("w.parquet").read_text()) == (130, "before")


def test_columns_of_models_have_names_that_are_legal_in_r():
    assert legal_names(["my-model", "books", "models/a"]) == ["my_model", "books", "models_a"]
    assert legal_names(["a-b", "a_b", "a b", "a_b_2"]) == ["a_b_3", "a_b", "a_b_4", "a_b_2"]
    assert legal_names(["v1.5", "Bücher", "世界"]) == ["v1.5", "Bücher", "世界"]


def test_words_of_models_in_folders_have_columns_that_are_legal_in_r(run, models, items):
    shutil.copytree("models/tiny", "other/tiny")
    assert run("eval", *items, "-m", "tiny", "-m", "other/tiny", "--words", "w.tsv").code == 0
    row = read_table("w.tsv")[0]
    names = [name for name in row if name.startswith("bits_")]
    assert len(names) == 2
    assert names[1].endswith("other_tiny")
    assert all(re.fullmatch(r"[\w.]+", name) for name in row)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_model_that_keeps_no_text_needs_a_file(run, models, split, monkeypatch):
    """As every imported model. It is said before anything is loaded, and no text is named that does not exist."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(loading, "load_model", fail)
    Path("models/linear/valid.txt").unlink()
    for named in (("-m", "linear"), models):
        for more in ((), ("--dry-run",)):
            done = run("eval", *named, "--split", split, *more)
            assert done.code == 3
            assert "the text is" not in done.err
            assert " ".join(("xlcli eval FILE", *named)) in done.err
