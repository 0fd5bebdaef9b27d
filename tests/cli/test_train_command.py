import csv
import gzip
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
import types
from pathlib import Path

import pytest
from programs import TEXT, Terminal, command, environment

from xlcli import presets
from xlcli.events import Progress

SMALL = (
    "--set", "model.dim=16", "--set", "model.n_layers=1", "--set", "model.attention.n_heads=2", "--segment-len", "16",
    "--mem-len", "16", "--batch-size", "2", "--tokenizer", "bytes", "--threads", "1", "--preset", "tiny",
)  # fmt: skip


@pytest.fixture
def text():
    path = Path("corpus.txt")
    path.write_bytes(TEXT * 40)
    return path


def test_from_a_text_to_the_next_commands(run, text):
    done = run("train", text, "--max-steps", "4", "--set=train.eval_every=2", *SMALL)
    assert done.code == 0, done.err
    said = done.out.decode("utf-8", "replace")
    assert re.search(r"valid     \d+\.\d{4} bits per byte", said)
    for line in re.findall(r"^  xlcli (.*)$", said, re.MULTILINE):
        name, *_ = line.split()
        assert name in ("eval", "generate")
        assert run(*shlex.split(line)).code == 0
    assert "budget   4 steps" in done.err
    assert "; from its end: valid" in done.err
    assert "estimates" in said
    assert "validation" in done.err
    assert run("eval").code == 0
    assert run("generate", "The", "-n", "3").out.startswith(b"The")
    again = run("train", text, "--max-steps", "4", *SMALL)
    assert again.code == 2
    assert "--resume" in again.err
    assert run("train", text, "--max-steps", "6", "--resume", *SMALL).code == 0
    text.write_bytes(TEXT * 41)
    changed = run("train", text, "--max-steps", "8", "--resume", *SMALL)
    assert changed.code == 3
    assert "--init" in changed.err
    assert run("train", text, "--max-steps", "2", "--overwrite", *SMALL, "-q").err == ""


def test_of_ten_files_the_seed_draws_those_that_are_held_out(run):
    Path("novels").mkdir()
    texts = {f"novels/{number:02}.txt": TEXT * 4 + b"%d\n" % number for number in range(12)}
    for name, text in texts.items():
        Path(name).write_bytes(text)
    done = run("train", "novels", "--max-steps", "2", "--seed", "3", *SMALL)
    assert done.code == 0, done.err
    record = json.loads(Path("models/novels/record.json").read_text())
    valid, test = record["held_out_files"]
    assert Path("models/novels/valid.txt").read_bytes() == texts[valid]
    assert Path("models/novels/test.txt").read_bytes() == texts[test]
    assert f"held out {valid}, {test} (drawn by the seed)" in done.err
    assert "from its end" not in done.err
    assert run("train", "novels", "--max-steps", "3", "--resume", *SMALL).code == 0
    again = run("train", "novels", "-o", "again", "--max-steps", "2", "--seed", "3", "--json", *SMALL)
    assert json.loads(again.out.splitlines()[0])["held_out_files"] == [valid, test]
    other = run("train", "novels", "-o", "other", "--seed", "4", "--dry-run", "--json", *SMALL)
    assert json.loads(other.out.splitlines()[0])["held_out_files"] != [valid, test]


def test_scores_of_text_that_was_trained_on_are_said_to_be(run):
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_bytes(
            TEXT * (9, 9, 9, 2)[number] + b"%d" % number
        )  # the last one is held out
    Path("new.txt").write_bytes(TEXT * 9 + b"4")
    assert run("train", "texts", "-o", "trained", "--max-steps", "2", "--valid", "0.05", *SMALL).code == 0
    shutil.copytree("trained", "older")
    record = json.loads(Path("older/record.json").read_text())
    assert len(record.pop("train_files")) == 3
    Path("older/record.json").write_text(json.dumps(record))

    def told(*arguments):
        lines = run("eval", *arguments).err.splitlines()
        return [line.split(" in the training text of")[0] for line in lines if "training text of trained" in line]

    done = run("eval", "texts", "-m", "older", "-m", "trained", "--documents", "d.csv")
    *_, heading, fourth, third, second, first = [line.split() for line in done.out.decode().splitlines()]
    assert " ".join(heading) == "document bytes words older trained training text of"
    marked = {cells[0]: cells[5:] for cells in (first, second, third, fourth)}
    assert marked == {f"texts/{number}.txt": ["trained"] * (number < 3) for number in range(4)}
    rows = [*csv.DictReader(Path("d.csv").read_text().splitlines())]
    assert [row["trained_on_trained"] for row in rows] == ["true", "true", "true", "false"]
    assert "trained_on_older" not in rows[0]  # its record has no list of files
    shutil.copytree("trained", "started")
    record = json.loads(Path("started/record.json").read_text()) | {"init": {"model": "older"}}
    Path("started/record.json").write_text(json.dumps(record))
    assert run("eval", "texts", "-m", "started", "--documents", "d.csv").code == 0
    rows = [*csv.DictReader(Path("d.csv").read_text().splitlines())]
    assert [row["trained_on"] for row in rows] == ["true", "true", "true", ""]  # of its origin no file is known

    files = "texts/0.txt, texts/1.txt, texts/2.txt"
    assert told("texts", "-m", "trained") == [f"warning: 3 of the 4 files ({files}) are"]
    assert told("texts", "-m", "older", "-m", "trained") == [f"warning: 3 of the 4 files ({files}) are"]
    assert told("new.txt", "texts/1.txt", "-m", "trained") == ["warning: 1 of the 2 files (texts/1.txt) are"]
    Path("copy.txt.gz").write_bytes(gzip.compress(Path("texts/2.txt").read_bytes()))
    assert told("copy.txt.gz", "-m", "trained", "--limit", "50") == ["warning: copy.txt.gz is"]
    for text in ("new.txt", "texts/3.txt", "trained/valid.txt"):
        assert told(text, "-m", "trained") == []
    assert told("-m", "trained") == told("texts", "-m", "older") == []
    assert b"train_files" not in run("models", "show", "trained").out
    assert run("train", "texts", "-o", "trained", "--resume", "--max-steps", "3", *SMALL).code == 0
    assert told("texts/0.txt", "-m", "trained") == ["warning: texts/0.txt is"]


def test_the_plan_names_the_files_that_are_held_out(run):
    Path("data").mkdir()
    for i, name in enumerate(("train", "valid", "test")):
        Path("data", f"{name}.txt").write_text("".join(f"{name} {i} {n * n}\n" for n in range(2000)))
    held_out = ["--valid", "data/valid.txt", "--test", "data/test.txt"]
    plan = run("train", "data", *held_out, "--dry-run", *SMALL).out.decode()
    rows = dict(line.split(maxsplit=1) for line in plan.replace("left out", "left-out").splitlines())
    assert rows["corpus"] == "data/train.txt"
    assert rows["left-out"].startswith("data/test.txt, data/valid.txt ")
    done = run("train", "data", *held_out, "--dry-run", "--json", *SMALL)
    assert json.loads(done.out)["left_out"] == ["data/test.txt", "data/valid.txt"]
    assert "left out" not in run("train", "data/train.txt", *held_out, "--dry-run", *SMALL).out.decode()
    assert "warning" not in done.err
    again = run("train", "data/train.txt", "--valid", "data/train.txt", *SMALL)
    assert again.code == 3
    assert "--valid" in again.err


def test_the_plan_says_where_the_validation_text_comes_from(run, text):
    Path("other.txt").write_bytes(TEXT)
    for given, is_end in (((), True), (("--valid", "0.1"), True), (("--valid", "other.txt"), False)):
        assert (b"from its end" in run("train", text, "--dry-run", *given, *SMALL).out) == is_end


def test_the_curve_is_drawn_at_the_end(run, text):
    pytest.importorskip("matplotlib")
    done = run("train", text, "--max-steps", "4", "--set=train.eval_every=2", "--plot", "curve.png", *SMALL)
    assert (done.code, "curve.png" in done.err) == (0, True), done.err
    first = Path("curve.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    Path("curve.png").unlink()
    assert run("train", text, "--max-steps", "6", "--resume", "--plot", "curve.png", "--dry-run", *SMALL).code == 0
    assert not Path("curve.png").exists()
    assert run("train", text, "--max-steps", "6", "--resume", "--plot", "curve.png", *SMALL).code == 0
    assert Path("curve.png").read_bytes() not in (b"", first)


def test_an_interrupt_before_the_plan_draws_no_earlier_model(run, text, monkeypatch):
    pytest.importorskip("matplotlib")
    Path("models/corpus").mkdir(parents=True)
    Path("models/corpus/metrics.jsonl").write_text('{"step": 1, "tokens": 9, "bits_per_byte": 5.0}\n')

    def interrupted(*arguments, stop, **options):
        os.kill(os.getpid(), signal.SIGINT)
        select.select([stop.fd], [], [])
        yield Progress("reading", 1, 2, "B", 1.0)

    monkeypatch.setattr("xlcli.training.train", interrupted)
    done = run("train", text, "--overwrite", "--plot", "curve.png", *SMALL)
    assert (done.code, "curve.png" in done.err, Path("curve.png").exists()) == (130, False, False)


def test_json_lines(run, text):
    done = run("train", text, "--max-steps", "3", "--json", *SMALL)
    events = [json.loads(line) for line in done.out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "plan"
    assert kinds[-1] == "trained"
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    assert events[-1]["folder"] == "models/corpus"


def test_dry_run_leaves_nothing(run, text):
    done = run("train", text, "--dry-run", "--max-steps", "3", *SMALL)
    assert done.code == 0, done.err
    assert "budget   3 steps" in done.out.decode()
    assert not Path("models").exists()
    assert json.loads(run("train", text, "--dry-run", "--json", *SMALL).out)["event"] == "plan"


def test_the_plan_shows_the_size_of_the_stored_weights(run, text):
    plans = {}
    for weights in ("float32", "int8"):
        done = run("train", text, "--dry-run", "--json", f"--set=train.weights={weights}", *SMALL)
        plans[weights] = json.loads(done.out)
        assert plans[weights]["weights"] == weights
    assert plans["int8"]["weights_bytes"] < plans["float32"]["weights_bytes"] / 2.5
    shown = run("train", text, "--dry-run", "--set=train.weights=int8", *SMALL).out.decode()
    row = r"^weights  [\d.]+ KiB on disk in int8; up to 2 checkpoints of [\d.]+ KiB beside them$"
    assert re.search(row, shown, re.MULTILINE)
    assert run("train", text, "--set=train.weights=int4", *SMALL).code == 2


@pytest.mark.parametrize("data", [b"", b"\n" * 2000, b"a", b"abc\n"])
def test_next_to_no_text_is_refused_or_works(run, data):
    Path("corpus.txt").write_bytes(data)
    done = run("train", "corpus.txt", "--max-steps", "1", *SMALL, "-q")
    assert done.code == (0 if data.strip() else 3), done.err
    assert "Traceback" not in done.err
    assert len(done.err.split("\n")) <= 3


GOOD = {
    "one line": b"word " * 400,
    "crlf": b"line\r\n" * 300,
    "bom": b"\xef\xbb\xbf" + TEXT * 40,
    "utf-16": (TEXT * 30).decode().encode("utf-16"),
    "cjk": "天地玄黄宇宙洪荒".encode() * 100,
}


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD.keys())
def test_texts_of_every_kind_need_no_flag_for_a_plan(run, data):
    Path("corpus.txt").write_bytes(data)
    done = run("train", "corpus.txt", "--dry-run")
    assert done.code == 0, done.err


def test_line_ends_of_windows_are_said_once(run):
    for name in ("corpus.txt", "valid.txt"):
        Path(name).write_bytes(b"line\r\n" * 300)
    done = run("train", "corpus.txt", "--valid", "valid.txt", "--dry-run", "--json")
    assert done.err.count("CR LF") == 1
    plan = json.loads(done.out)
    assert (plan["train_bytes"], plan["valid_bytes"]) == (1500, 1500)
    assert json.loads(run("train", "corpus.txt", "--binary", "--dry-run", "--json").out)["train_bytes"] > 1500


def test_folders_gzip_and_several_files(run, text):
    Path("many").mkdir()
    Path("many/a.txt").write_bytes(TEXT * 30)
    with gzip.open("b.txt.gz", "wb") as file:
        file.write(TEXT * 30)
    assert run("train", "b.txt.gz", "--dry-run", "--json").out.count(b'"models/b"') == 1
    done = run("train", "many", "b.txt.gz", text, "--dry-run", "--json")
    plan = json.loads(done.out)
    assert plan["train_bytes"] + plan["valid_bytes"] + plan["test_bytes"] == len(TEXT) * 100
    assert plan["folder"] == "models/many"


@pytest.mark.parametrize("kind", ["absent", "loop", "device", "unreadable", "empty folder", "blank"])
def test_unreadable_text_is_refused(run, kind, tmp_path):
    path = tmp_path / "it"
    match kind:
        case "loop":
            path.symlink_to(path)
        case "device":
            path = Path("/dev/zero")
        case "unreadable":
            path.write_bytes(TEXT)
            path.chmod(0)
            if os.access(path, os.R_OK):
                pytest.skip("root may read everything")
        case "empty folder":
            path.mkdir()
        case "blank":
            path.write_bytes(b"\n \t\r\n" * 1000)
    began = time.monotonic()
    done = run("train", path, "--max-steps", "1", *SMALL)
    assert done.code == 3, done.err
    assert path.name in done.err
    assert time.monotonic() - began < 20
    assert not Path("models/it/config.json").exists()


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("options", [["--max-steps", "1", "--batch-size", "4g"], ["--set", "text.valid=missing"]])
def test_what_is_refused_leaves_no_folder(run, text, options):
    before = sorted(Path().iterdir())
    for data, more in ((b"", []), (TEXT * 50, options)):
        Path(text).write_bytes(data)
        assert run("train", text, *more).code in (2, 3, 4)
        assert sorted(Path().iterdir()) == before


def test_a_misspelled_file(run, text):
    done = run("train", "corpsu.txt")
    assert (done.code, "corpus.txt?" in done.err) == (3, True)
    assert run("train", text, "--valid", "absent.txt").code == 3


def test_text_that_is_not_utf8_names_the_byte_for_sentencepiece(run):
    Path("corpus.txt").write_bytes(TEXT * 40 + b"\xff" + TEXT * 40)
    done = run("train", "corpus.txt", "--tokenizer", "sentencepiece", "--dry-run")
    assert done.code == 3
    assert str(len(TEXT * 40)) in done.err.replace(",", "")
    assert "--binary" in done.err


def test_a_stop_before_the_first_validation_leaves_the_old_model(run, text, monkeypatch):
    from xlcli.training.run import TrainingRun

    budget = ("-o", "m", "--max-steps", "3")
    assert run("train", text, *SMALL, *budget).code == 0
    before, step = Path("m/model.safetensors").read_bytes(), TrainingRun.train_step

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments)

    monkeypatch.setattr(TrainingRun, "train_step", interrupted)
    done = run("train", text, *SMALL, *budget, "--overwrite", "--seed", "7")
    assert done.code == 130
    assert b"earlier model stays in m" in done.out
    assert Path("m/model.safetensors").read_bytes() == before


def test_a_stop_before_the_first_step_says_so_and_leaves_no_folder(run, text, monkeypatch):
    from xlcli.training import prepare

    real = prepare.choose_tokenizer

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(prepare, "choose_tokenizer", interrupted)
    done = run("train", text, *SMALL)
    assert done.code == 130
    interrupted, stopped = (line for line in done.err.splitlines() if "top" in line)
    assert (interrupted[:8], stopped[:9]) == ("Ctrl-C: ", "warning: ")
    assert not Path("models").exists()


def test_a_signal_saves_and_a_terminal_shows_progress(run, text):
    """Terminal, live line, SIGINT, saved checkpoint, resume: one process, since each costs seconds."""
    terminal = Terminal(command("train", text, "--max-time", "60s", "--plot", "curve.svg", *SMALL), NO_COLOR="")
    terminal.read_until(rb"step \d\d", 60)
    assert re.search(rb"[0-9.]+ bits/byte.*tokens/s.*% .* left", terminal.received)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 130
    assert "Ctrl-C" in terminal.text
    assert "curve.svg" in terminal.text
    assert Path("curve.svg").exists()
    assert "--resume" in terminal.text
    assert not terminal.screen.cursor.hidden
    step = max(int(path.name[5:]) for path in Path("models/corpus/checkpoints").glob("step-*"))
    done = run("train", text, "--max-steps", str(step + 2), "--resume", "--json", *SMALL)
    assert done.code == 0, done.err
    steps = [event["step"] for event in map(json.loads, done.out.splitlines()) if event["event"] == "step"]
    assert steps == [step + 1, step + 2]


@pytest.mark.exhaustive
def test_training_goes_on_without_a_reader(text):
    line = " ".join(f"'{part}'" for part in command("train", text, "--max-steps", "3", "--json", *SMALL))
    done = subprocess.run(
        ["bash", "-c", f"{line} 2>err | head -1; exit ${{PIPESTATUS[0]}}"], env=environment(), capture_output=True
    )
    assert done.returncode == 0
    assert Path("models/corpus/model.safetensors").exists()
    assert b"Broken" not in Path("err").read_bytes()


@pytest.mark.usefixtures("without_torch")
def test_settings_legal_with_some_automatic_preset_are_accepted(run):
    heads = [presets.read_preset(name)["model"]["dim"] for name in presets.AUTOMATIC]
    for dim in heads:
        assert run("train", "--print-config", "--set", f"model.attention.n_heads={dim}").code == 0
    assert run("train", "--print-config", "--set", "model.attention.n_heads=7").code == 2


def test_every_preset_that_may_be_chosen_is_listed():
    from xlcli.training.defaults import choose_preset

    chosen = {
        choose_preset(size, types.SimpleNamespace(type=kind)) for size in (10, 10**6, 10**9) for kind in ("cpu", "cuda")
    }
    assert chosen == set(presets.AUTOMATIC)


def test_a_run_starts_from_a_model(run, text, model):
    """`model` is an untrained model `tiny` in ./models."""
    budget = ("--max-steps", "3", "--set=train.eval_every=1", "--threads", "1")
    done = run("train", text, "--init", "tiny", *budget, "--json")
    assert done.code == 0, done.err
    plan, first, *_ = (json.loads(line) for line in done.out.splitlines())
    assert (plan["init"], plan["tokenizer"], plan["resumed_at"]) == ("tiny", "bytes", 0)
    assert (first["event"], first["step"]) == ("validation", 0)
    assert json.loads(Path("models/corpus/record.json").read_bytes())["init"]["model"] == "tiny"
    more = ("--max-steps", "4", "--threads", "1", "--resume")
    for init in ((), ("--init", "tiny"), ("--init", model)):
        assert run("train", text, *init, *more).code == 0
    other = run("train", text, "--init", "corpus", *more)
    assert (other.code, "--init" in other.err) == (2, True)
    dry = run("train", text, "--init", "models/tiny", "-o", "models/other", "--dry-run")
    assert "models/other (from tiny, " in dry.out.decode()
    same = run("train", text, "--init", "tiny", "-o", "models/tiny", "--overwrite")
    assert (same.code, "-o NAME" in same.err) == (2, True)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--preset", "small"), 2, "--preset"),
        (("--tokenizer", "words"), 2, "sentencepiece"),
        (("--vocab-size", "77"), 2, "4096"),
        (("--set", "model.dim=8"), 2, "256"),
        (("--set", "model.position.kind=rope"), 2, "model.position.kind"),
        (("--init", "boks"), 3, "books?"),
        (("--set=train.grad_accum=99",), 2, "train.grad_accum"),
        (("--print-config", "--set=model.dropout=0.25", "--tokenizer", "auto", "--lr", "0.125"), 0, ""),
    ],
)
def test_settings_that_contradict_a_model_are_refused_at_once(run, text, options, code, message):
    init = () if "--init" in options else ("--init", "books")
    done = run("train", text, *init, *options)
    assert (done.code, message in " ".join(done.err.split())) == (code, True), done.err
    if code == 0:
        assert all(
            line in done.out.decode() for line in ("lr = 0.125", "# adam_lr is decided", "dim = 256", "residual = 0.25")
        )


def test_the_start_from_the_bundled_model_is_said_and_can_be_declined(run):
    Path("story.txt").write_text("It was a dark night, and the wind was in the trees. He had not spoken.\n" * 99)
    said = {option: run("train", "story.txt", "--dry-run", *option).err for option in ((), ("-q",), ("--init", "none"))}
    assert ["books" in err for err in said.values()] == [True, False, False]
