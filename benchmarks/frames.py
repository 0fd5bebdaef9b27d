"""Frames of the package from a command to the innermost function that computes attention, and names in many files.

    PYTHONPATH=CHECKOUT python -P benchmarks/frames.py [train eval stream generate] [--json] [--through PATTERN]

Runs each command in a process of its own with the bundled model (train: with the defaults and two steps). Prints the
longest chain of calls that ends where a file of attention (`--at`) calls a product or a softmax of PyTorch, and the
longest one that ends in the function around a compiled kernel (`--kernel`), which reads single tokens. Frames of
PyTorch and of other packages are not counted; a chain begins with the function of the command. `--through` keeps the
chains with a function that matches, for instance `train_step` for the steps of training without validations. Then the
number of files of the package that name `mem_len` and `n_hashes`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

TEXT = Path(__file__).resolve().parent.parent / "demo" / "shakespeare.txt"
COMMANDS = {
    "train": "train TEXT -o made --max-steps 2 --seed 0 --threads 1 -q",
    "eval": "eval READ -m books --threads 1 -q",
    "stream": "stream READ -m books --threads 1 -q",
    "generate": "generate Before -m books -n 3 -t 0 --threads 1 -q",
}
"""Command lines."""
AT = r"attend|attention"
"""Files that compute attention."""
KERNEL = r"/decode\.py:decode$"
"""Function around a call of the compiled kernel."""
OPERATIONS = {"baddbmm", "bmm", "matmul", "mm", "einsum", "softmax", "exp", "exp_", "scaled_dot_product_attention"}
"""Functions of PyTorch of which attention consists."""
NAMES = ("mem_len", "n_hashes")


def package() -> Path:
    """Folder of the package."""
    spec = importlib.util.find_spec("xlcli")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def chain(frame: FrameType | None, root: str) -> list[str]:
    """Frames of the package below the command line's parser, outermost first, as `file:function`."""
    found: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(root):
            found.append(f"{name[len(root) + 1 :]}:{frame.f_code.co_qualname}")
        elif "/typer/" in name:
            break
        frame = frame.f_back
    return found[::-1]


def longest(command: str, at: str, kernel: str, through: str) -> dict[str, list[str]]:
    """Longest chains of a command, which runs in this process."""
    root, patterns = str(package()), {"c_call": re.compile(at), "call": re.compile(kernel)}
    best: dict[str, list[str]] = {"c_call": [], "call": []}
    relevant: dict[tuple[str, str], bool] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event not in patterns or (event == "c_call" and argument.__name__ not in OPERATIONS):
            return
        code = frame.f_code
        key = event, f"{code.co_filename}:{code.co_name}" if event == "call" else code.co_filename
        if key not in relevant:
            relevant[key] = key[1].startswith(root) and bool(patterns[event].search(key[1][len(root) :]))
        if relevant[key]:
            found = chain(frame, root)
            is_import = any(entry.endswith(":<module>") for entry in found)
            if len(found) > len(best[event]) and not is_import and any(re.search(through, entry) for entry in found):
                best[event] = found

    from xlcli.__main__ import main

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            code = main(command.split())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if code:
        raise SystemExit(code)
    return {"attention": best["c_call"], "kernel": best["call"]}


def run(command: str, at: str, kernel: str, through: str) -> dict[str, list[str]]:
    """Longest chains of a command, which runs in another process and in a folder of its own."""
    data = TEXT.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_bytes(data[:6000])
        (Path(folder) / "read.txt").write_bytes(data[-300:])
        line = command.replace("TEXT", "text.txt").replace("READ", "read.txt")
        words = [
            sys.executable,
            "-P",
            str(Path(__file__).resolve()),
            "--at",
            at,
            "--kernel",
            kernel,
            "--through",
            through,
        ]
        done = subprocess.run(
            [*words, "--here", line],
            cwd=folder,
            env=os.environ | {"HOME": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def naming(name: str) -> int:
    """Number of modules of the package that contain a name."""
    word = re.compile(rf"\b{name}\b")
    return sum(bool(word.search(path.read_text())) for path in package().rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", default=list(COMMANDS))
    parser.add_argument("--at", default=AT)
    parser.add_argument("--kernel", default=KERNEL)
    parser.add_argument("--through", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(longest(options.here, options.at, options.kernel, options.through)))
        return
    patterns = options.at, options.kernel, options.through
    chains = {name: run(COMMANDS[name], *patterns) for name in options.commands}
    files = {name: naming(name) for name in NAMES}
    if options.json:
        print(json.dumps({"frames": chains, "files": files}, indent=1))
        return
    for name, part, found in ((name, part, found) for name, parts in chains.items() for part, found in parts.items()):
        print(f"{name}, {part}: {len(found)} frames")
        print("".join(f"    {i:2} {entry}\n" for i, entry in enumerate(found, 1)), end="")
    print("".join(f"{name}: {n} files\n" for name, n in files.items()), end="")


if __name__ == "__main__":
    main()
