import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from programs import Terminal, command

from tests.variants import thinned
from xlcli import presets

pytestmark = pytest.mark.usefixtures("without_torch")


def test_own_models_come_first_and_presets_have_a_list_of_their_own(run, model):
    text = run("models").out.decode()
    assert text.index("tiny") < text.index("books") < text.index("xlcli models presets")
    assert re.search(r"^books +xl +full .* - +rows/books.jsonl, ", text, re.MULTILINE)  # no age
    assert not re.search(r"^age", run("models", "show", "books").out.decode(), re.MULTILINE)
    names = {preset.name for preset in presets.list_presets()}
    assert not re.search(r"^small\b", text, re.MULTILINE)
    shown = run("models", "presets").out.decode()
    assert names <= set(shown.split())
    tree = json.loads(run("models", "--json").out)
    assert [entry["name"] for entry in tree["local"]] == ["tiny"]
    assert list(tree) == ["local", "bundled", "presets"]
    assert {entry["name"] for entry in tree["presets"]} == names
    assert json.loads(run("models", "presets", "--json").out) == {"presets": tree["presets"]}


@pytest.mark.parametrize("columns", thinned([60, 80, 160], [60]))
def test_rows_fit_the_terminal_and_nothing_is_shortened_in_a_pipe(columns, run, model):
    name, corpus = "a-model-with-a-name-of-many-words-and-letters", "a/folder/with/many/parts/" * 5 + "end.txt"
    model.rename(model.with_name(name))
    (model.with_name(name) / "record.json").write_text(json.dumps({"corpus": corpus, "bits_per_byte": 1.5}))
    for arguments in (["models"], ["models", "presets"], ["models", "show", name]):
        terminal = Terminal(command(*arguments), columns=columns)
        assert terminal.finish() == 0
        lines = re.split(r"\r\n", terminal.received.decode().partition("[record]")[0])
        assert max(map(len, lines)) <= columns
    for arguments in (["models"], ["models", "show", name]):
        shown = run(*arguments).out.decode()
        assert name in shown
        assert corpus in shown


def test_validators_are_built_once_for_all_models(run, model):
    """Pydantic builds a validator in its module `_generate_schema`."""

    def n_calls():
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.endswith("_generate_schema.py")

        sys.setprofile(count)
        try:
            assert run("models").code == 0
        finally:
            sys.setprofile(None)
        return calls

    n_calls()
    for i in range(5):
        shutil.copytree(model, model.with_name(f"tiny-{i}"))
    assert n_calls() == 0


def test_an_empty_folder_says_how_to_begin(run):
    assert "xlcli train FILE" in run("models").out.decode()


def test_a_damaged_model_is_listed_with_its_problem(run, model):
    (model / "model.safetensors").write_bytes(b"junk")
    done = run("models")
    assert done.code == 0
    assert "tiny" in done.out.decode()


def test_show_a_model_and_a_preset(run, model):
    shown = run("models", "show", "tiny")
    assert "n_layers = 2" in shown.out.decode()
    assert json.loads(run("models", "show", str(model), "--json").out)["config"]["model"]["dim"] == 16
    preset = run("models", "show", "small")
    assert preset.out == (presets.models_folder() / "small.toml").read_bytes()
    assert "train" in json.loads(run("models", "show", "small", "--json").out)["config"]


CARD = """# Card\x1b[2J

Of *many* `words` &#x1b;[31m &#x202e;back [red]plain[/red] <b>text</b> [link](http://example.com).

    \x1b]0;title\x07 code
"""


def test_the_card_of_a_model_is_harmless_on_a_terminal_and_exact_in_a_pipe(run, model):
    (model / "README.md").write_text(CARD)
    assert CARD.encode() in run("models", "show", "tiny").out
    shown = run("models", "show", "tiny", "--color", "always").out.decode()
    assert shown.replace("\n", "").isprintable()
    assert {"Card\\x1b[2J", "[red]plain[/red]"} <= set(shown.split())


def test_show_what_does_not_exist(run, model):
    done = run("models", "show", "smal")
    assert done.code == 3
    assert "small" in done.err


def test_the_training_curve_of_a_model(run, model):
    pytest.importorskip("matplotlib")
    done = run("models", "show", "tiny", "--plot", "curve.png")
    assert (done.code, "metrics.jsonl" in done.err) == (3, True)
    rows = [{"step": n, "tokens": 100 * n, "bits_per_byte": 8 / n} for n in range(1, 200)]
    rows.insert(50, {"step": 50, "tokens": 5000, "validation_bits_per_byte": 1.5, "best": True})
    (model / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, head in (("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")):
        done = run("models", "show", "tiny", "--plot", name)
        assert (done.code, name in done.err) == (0, True)
        assert Path(name).read_bytes().startswith(head)
    done = run("models", "--plot", "curve.png")
    assert (done.code, "--plot" in done.err) == (2, True)


def test_options_may_stand_before_the_action(run, model):
    shown = run("models", "show", "tiny", "--json")
    assert run("models", "--json", "show", "tiny").out == shown.out
    assert run("models", "--color", "never", "show", "tiny").out == run("models", "show", "tiny").out
    assert run("models", "--color", "never").out == run("models", "list").out


def test_numbers_too_large_to_draw_are_left_out_of_a_training_curve(run, model):
    pytest.importorskip("matplotlib")
    rows = [{"step": n, "tokens": n, "bits_per_byte": 10.0**n} for n in range(1, 17)]
    rows += [{"step": 20, "tokens": 10**400, "bits_per_byte": 2.0}, {"step": 21, "tokens": 9, "bits_per_byte": -1e308}]
    rows += [{"step": 22, "tokens": 22, "validation_bits_per_byte": 1e308}]
    (model / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run("models", "show", "tiny", "--plot", "curve.png")
    assert (done.code, "curve.png" in done.err) == (0, True), done.err


def test_kind_encoding_and_size_are_listed(run, model):
    assert re.search(r"^tiny +xl +full +\d+\.\dk ", run("models").out.decode(), re.MULTILINE)
    text = run("models", "show", "tiny").out.decode()
    assert re.search(r"^weights .*\b\d+\.\dk .*\d+\.\d KiB .*float32$", text, re.MULTILINE)
    [listed] = json.loads(run("models", "--json").out)["local"]
    shown = json.loads(run("models", "show", "tiny", "--json").out)
    size = (model / "model.safetensors").stat().st_size
    assert (listed["position"], listed["attention"]) == ("xl", "full")
    assert (listed["encoding"], listed["bytes"]) == (shown["encoding"], shown["bytes"]) == ("float32", size)


def test_weights_are_an_option_of_copy_only(run, model, monkeypatch):
    for arguments in ([], ["show", "tiny"]):
        done = run("models", *arguments, "--weights", "int8")
        assert (done.code, "--weights" in done.err) == (2, True)
    done = run("models", "copy", "small", "mine.toml", "--weights", "int8")
    assert (done.code, "--weights" in done.err) == (2, True)
    assert not Path("mine.toml").exists()
    monkeypatch.setenv("XLCLI_WEIGHTS", "int8")  # for train
    assert run("models").code == 0


def test_a_preset_is_copied_to_a_file(run):
    done = run("models", "copy", "small", "models/mine")
    assert (done.code, "xlcli models copy small FILE.toml" in done.err) == (3, True)
    assert run("models", "copy", "small").code == 2


def test_copy(run):
    assert run("models", "copy", "small", "mine.toml").code == 0
    assert Path("mine.toml").read_bytes() == (presets.models_folder() / "small.toml").read_bytes()
    assert run("train", "--print-config", "--config", "mine.toml").code == 0
    again = run("models", "copy", "small", "mine.toml")
    assert (again.code, "exists" in again.err) == (2, True)
    assert tomllib.loads(run("models", "copy", "small", "-").out.decode())
    assert run("models", "copy", "smal", "x.toml").code == 2


def test_what_a_model_began_from_is_one_line(run, model):
    init = {}
    for name in ("small", "books", "tuned"):
        init = {"model": name, "weights": "0" * 64, "init": init}
    (model / "record.json").write_text(json.dumps({"corpus": "last.txt", "init": init}))
    text = run("models", "show", "tiny").out.decode()
    assert re.search(r"^corpus +last.txt \(of the last run\)$", text, re.MULTILINE)
    assert re.search(r"^from +tuned; before that: books, small$", text, re.MULTILINE)
    assert "weights = " not in text
    assert json.loads(run("models", "show", "tiny", "--json").out)["record"]["init"] == init


def test_a_score_of_a_beginning_is_in_parentheses(run, model):
    for n_bytes, shown in ((100, "(1.500)"), (900, "1.500")):
        scored = {"bytes": n_bytes, "of_bytes": 900, "mem_len": 8}
        (model / "record.json").write_text(json.dumps({"bits_per_byte": 1.5, "scored": scored}))
        text = run("models").out.decode()
        assert re.search(rf"^tiny .* {re.escape(shown)} ", text, re.MULTILINE)
        assert ("parentheses" in text) == (n_bytes < 900)


def test_a_card_is_broken_between_words(model):
    (model / "README.md").write_text("considerable " * 30)
    terminal = Terminal(command("models", "show", "tiny"), columns=50)
    assert terminal.finish() == 0
    assert terminal.received.decode().split().count("considerable") == 30
    assert max(map(len, terminal.received.decode().partition("[model]")[0].split("\r\n"))) <= 50
