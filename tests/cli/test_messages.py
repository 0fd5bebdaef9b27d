"""What every refusal, notice and warning says: commands, their standard error and exit code in `messages.txt`.

`UPDATE_MESSAGES=1 pytest tests/cli/test_messages.py` writes the file anew; its difference is the review. A new
message is a new line `$ ...` there: words of a shell, with variables before `xlcli` and with `< FILE`, but no more.
The commands run one after the other in one folder. Other tests assert only the class of an error, its code and a name.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import TEXT
from safetensors.torch import load_file, save_file

from xlcli.cli import launch, render
from xlcli.store.lock import lock

FILE = Path(__file__).with_name("messages.txt")
GPT2 = Path(__file__).parents[1] / "interchange" / "fixtures" / "gpt2-text" / "source"
SMALL = """[train]
max_steps = 3
eval_every = 3
batch_size = 2
segment_len = 16
mem_len = 16
[model]
dim = 16
n_layers = 1
attention = {n_heads = 2}
[text]
tokenizer = "bytes"
[runtime]
threads = 1
dtype = "float32"
"""
VARYING = {
    r"(?<=process )\d+ on \S+\.(?=\n)": "PID on HOST.",
    r"[\d,.]+ GiB(?= of RAM| is available| available)": "N GiB",
    r"(?<=Use batch_size )\d+": "N",
    r"\b[0-9a-f]{12}\b": "HASH",
    r"[\d.]+k? tokens/s": "N tokens/s",
    r"[\d.]+k? records/s": "N records/s",
    r"[\d.]+k? lines/s": "N lines/s",
    r"busy [\d.]+ s": "busy N s",
    r"\d+\.\d{3,4}(?= bits| by the model)": "N",
    r"[\d.]+ s, [\d.]+ \w+/s(?=\n)": "N s, N/s",
    r"(?<=[ ,;])[\d.]+ s(?=\n)": "N s",
    r"(?m)^step .*\n": "",
}
"""What differs between two runs and machines: pattern to placeholder."""


def _published(folder: Path, **settings: object) -> None:
    """A model of another program, whose vocabulary lacks the byte 0x04 and has a token that strips blanks."""
    shutil.copytree(GPT2, folder)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | settings))
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"]["vocab"] = {text: i for text, i in tree["model"]["vocab"].items() if text != "\u0104"}
    tree["added_tokens"].append(
        tree["added_tokens"][0] | {"id": 315, "content": "<nl>", "lstrip": True, "special": False}
    )
    tree["model"]["vocab"] = {text: i for text, i in tree["model"]["vocab"].items() if i != 315}
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tree))


@pytest.fixture
def _folder(model: Path, untrained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    untrained("other", dim=8)
    untrained("linear", attention={"kind": "linear"}, position={"kind": "none"})
    untrained("local", attention={"kind": "local", "window": 6})
    for name in ("damaged", "newer", "busy"):
        untrained(name)
    with Path("models/damaged/tokenizer.json").open("a") as file:
        file.write("\n")
    Path("models/newer/config.json").write_text('{"schema": 3}')
    for age, name in enumerate(("tiny", "other", "linear", "local", "damaged", "newer", "busy")):
        os.utime(Path("models", name, "model.safetensors"), (2e9 - age, 2e9 - age))
    Path("models/half").mkdir()
    for name, data in {
        "corpus.txt": TEXT * 40,
        "changed.txt": TEXT.upper() * 40,
        "settings.toml": SMALL.encode(),
        "wrong.toml": b"[train]\nmem_len = 'much'\n",
        "broken.toml": b"[train\n",
        "empty.txt": b"",
        "cut.txt": TEXT * 40 + "é".encode()[:1],
        "latin.txt": TEXT * 40 + b"\xff",
        "office.txt": b"PK\x03\x04 a zip archive",
        "nul.txt": b"a\0b",
        "control.txt": b"the dog \4 barks\n",
        "cut.gz": gzip.compress(TEXT * 99)[:-9],
        "lines.jsonl": b'{"body": "a longer text"}\n' * 99,
        "items.csv": b'id,body\n1,"a longer\ntext"\n2,too,many\n',
        "array.json": b'[\n  {"text": "a"},\n  {"text": "\\ud800"}\n]\n',
        "cut.json": b'[{"text": "a"},\n{"text": "b"},\n',
        "strings.json": b'["The dog.", "The cat."]\n',
        "marked.csv": b"at,body\n1-2,The *quick fox*\n,A dog\n9,One *dog\n",
        "quotation.tsv": b'id\ttext\n1\t"Come in, he said.\n2\tThe door was open."\n',
        "keys.jsonl": b'{"text": "a"}\n{"text": "b", %s}\n' % b", ".join(b'"k%d": 1' % i for i in range(99)),
        "table.parquet": b"PAR1",
        "french.txt": b"le renard brun saute par-dessus le chien paresseux\n" * 99,
        "prompts.jsonl": b'{"prompt": "a"}\n{"prompt": 5}\n',
        "unknown.jsonl": b'{"prompt": "a", "seed": 1}\n',
        "blank.jsonl": b"\n\n",
        "thesis.png": b"my thesis",
        "state": b"no state",
        "windows.txt": TEXT.replace(b"\n", b"\r\n") * 40,
        "model.gguf": b"GGUF",
        "model.pt": b"PK\x03\x04",
        "config.json": b'{"model_type": "gpt2"}',
    }.items():
        Path(name).write_bytes(data)
    Path("reformer").mkdir()
    Path("reformer/config.json").write_text('{"model_type": "reformer"}')
    _published(Path("published"), bos_token_id=65, eos_token_id=65)
    _published(Path("unknown"), a_new_setting=1)
    Path("wrapped").mkdir()
    Path("wrapped/config.json").write_bytes(Path("published/config.json").read_bytes())
    weights = load_file("published/model.safetensors")
    save_file({f"network.{name}": tensor for name, tensor in weights.items()}, "wrapped/model.safetensors")
    Path("texts").mkdir()
    Path("mixed").mkdir()
    for name in ("corpus.txt", "office.txt", "empty.txt"):
        Path("mixed", name).write_bytes(Path(name).read_bytes())
    monkeypatch.setattr(launch, "cpu_limit", lambda: 4)
    monkeypatch.setattr(render, "PLAIN_SECONDS", 1e6)  # no lines that tell how far a slow machine is
    before = os.dup(0)
    with lock(Path("models/busy")):
        yield
    os.dup2(before, 0)
    os.close(before)


def message(line: str, run: Callable, monkeypatch: pytest.MonkeyPatch) -> str:
    """The line of a command with what it prints on standard error and its exit code."""
    words = shlex.split(line.removeprefix("$ "))
    words, (source,) = (words[:-2], words[-1:]) if words[-2] == "<" else (words, [os.devnull])
    descriptor = os.open(source, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    at = words.index("xlcli")
    with monkeypatch.context() as patch:
        for variable in words[:at]:
            patch.setenv(*variable.split("=", 1))
        done = run(*words[at + 1 :])
    said = done.err.replace(str(Path.cwd()), "HERE")
    for pattern, name in VARYING.items():
        said = re.sub(pattern, name, said)
    return f"{line}\n{said}exit {done.code}\n"


@pytest.mark.usefixtures("_folder")
def test_every_message_is_the_recorded_one(run, monkeypatch):
    recorded = FILE.read_text()
    kept = [line for line in recorded.splitlines() if line.startswith(("#", "$"))]
    found = "\n".join(message(line, run, monkeypatch) if line.startswith("$") else f"{line}\n" for line in kept)
    if os.environ.get("UPDATE_MESSAGES"):
        FILE.write_text(found)
    else:
        difference = difflib.unified_diff(recorded.splitlines(), found.splitlines(), "recorded", "found", lineterm="")
        assert found == recorded, "\n".join(difference)
