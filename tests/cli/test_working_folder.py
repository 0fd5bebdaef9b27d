"""Files in the working folder that are named as modules are not executed, whatever command runs there."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from programs import environment

from tests.variants import thinned

PROGRAM = """
import os, sys
here, own = os.getcwd() + os.sep, ("text.", "copied", "trained", "models", "loss.png", "page.html", ".tmp-xlcli-")
def watch(event, arguments):
    path = os.path.abspath(arguments[0]) if event == "open" and type(arguments[0]) is str else ""
    if path.startswith(here) and not path.removeprefix(here).startswith(own):
        sys.stderr.write(f"opened {path}")
        os._exit(9)
sys.addaudithook(watch)
from xlcli.__main__ import main
sys.exit(main())
"""
"""The program, which ends if it opens a file of the working folder that is none of its own."""
COMPILER = """
from types import SimpleNamespace
import torch
from xlcli import config
from xlcli.runtime import compile_stack, make_runtime
make_runtime(config.make({"runtime": {"compile": True, "device": "cpu"}}).runtime, training=True)
stack = SimpleNamespace(training=True, prepare_compiling=list, forward=lambda x, memories, context: x.sin() + 1)
compile_stack(stack)
stack.forward(torch.ones(99), (), SimpleNamespace(n_memory=0, keep=0, mask=SimpleNamespace(visible=None)))
import os, pathlib
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], len([*pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")]))
"""
"""Compiles a function as training compiles its model; prints the folder and the number of files of its code."""
OPTIONAL = ("colorama", "hostile", "IPython", "latex", "tbb", "tensorflow", "triton", "usercustomize", "yaml")
"""Modules that are imported where they are installed, and `hostile`, which settings name."""
INSTALLED = {name.partition("/")[0] for name in packages_distributions()}
NAMES = sorted({*sys.stdlib_module_names, *INSTALLED, *OPTIONAL, "sentencepiece", "sitecustomize", "xlcli"})
TRAIN = ("train", "text.txt", "--preset", "tiny", "--max-steps", "2", "-o", "trained", "--set", "model.dim=16")
SMALL = ("-m", "tiny", "--mem-len", "16")


@pytest.fixture
def executed(model, prose, tmp_path):
    """Function that runs the program as its script does, and returns its result and the modules that were executed."""
    marker = tmp_path / "executed"
    for name in NAMES:
        Path(f"{name}.py").write_text(f"with open({str(marker)!r}, 'a') as marker:\n    marker.write(__name__ + ' ')\n")
    Path(".numba_config.yaml").write_text("cache_locator_classes: [hostile.Locator")  # reading it fails
    Path("matplotlibrc").write_bytes(b"backend: module://hostile\ntext.usetex: True\n\xff")  # this one, too
    Path("hostile.pth").write_text("import hostile\n")
    Path("text.txt").write_bytes(prose.read_bytes() * 4)

    def executed(*arguments, program=PROGRAM, flags=("-P",), **changes):
        done = subprocess.run(
            [sys.executable, *flags, "-c", program, *arguments],
            env=environment(**changes), stdin=subprocess.DEVNULL, capture_output=True, timeout=280, check=False,
        )  # fmt: skip
        return done, marker.read_text() if marker.exists() else ""

    return executed


def test_a_module_of_the_working_folder_is_found_out(executed):
    """Where Python searches the working folder, a module is opened, so the tests below can fail."""
    assert b"opened" in executed("--version", flags=())[0].stderr


INVOCATIONS = [
    (*TRAIN, "--tokenizer", "sentencepiece", "--vocab-size", "300", "--plot", "loss.png"),
    ("models",),
    ("eval", *SMALL, "--plot", "loss.png", "--html", "page.html"),
    ("generate", *SMALL, "-n", "4", "The"),
    ("--help",),
    ("--version",),
    ("train", "--help"),
    ("models", "presets"),
    ("models", "show", "tiny"),
    ("models", "copy", "tiny", "copied", "--weights", "int8"),
    (*TRAIN, "--dry-run"),
    ("eval", *SMALL, "--adapt"),
    ("stream", *SMALL, "text.txt"),
    ("bench", "decode", *SMALL, "--seconds", "0.1"),
]


@pytest.mark.parametrize("arguments", thinned(INVOCATIONS, INVOCATIONS[:2]), ids=" ".join)
def test_no_module_of_the_working_folder_is_executed(executed, arguments):
    done, modules = executed(*arguments)
    assert (modules, done.returncode) == ("", 0), done.stderr


def test_completion_executes_no_module(executed):
    changes = {"_XLCLI_COMPLETE": "complete_bash", "COMP_WORDS": "xlcli stream --emit ", "COMP_CWORD": "3"}
    done, modules = executed(**changes)
    assert (modules, done.returncode) == ("", 0), done.stderr
    assert b"tokens" in done.stdout


@pytest.mark.exhaustive
def test_the_process_that_compiles_kernels_executes_no_module(executed, tmp_path):
    done, modules = executed("generate", *SMALL, "-n", "2", "The", NUMBA_CACHE_DIR=str(tmp_path / "kernels"))
    assert (modules, done.returncode) == ("", 0), done.stderr
    assert len(list((tmp_path / "kernels").glob("decode_token.*"))) == 1


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder for temporary files; the compiler of PyTorch has no folder of its own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "temporary"


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")


@pytest.mark.exhaustive
@needs_compiler
def test_the_compiler_of_training_executes_no_module_and_uses_no_folder_of_all_users(executed, temporary):
    folders = set()
    for _ in range(2):
        done, modules = executed(program=COMPILER)
        assert (modules, done.returncode) == ("", 0), done.stderr
        folder, n_files = done.stdout.decode().split()
        assert Path(folder).parent == Path(os.environ["XLCLI_CACHE"])
        assert int(n_files) > 0
        folders.add(folder)
    assert len(folders) == 2, "no process executes what another one left"
    assert list(temporary.iterdir()) == list(Path(os.environ["XLCLI_CACHE"]).iterdir()) == []


@needs_compiler
@pytest.mark.exhaustive
def test_the_folder_of_the_compiler_is_chosen_before_pytorch_chooses_one(executed, temporary):
    done, modules = executed(*TRAIN, "--tokenizer", "bytes", "--set=runtime.compile=true", "--dry-run")
    assert (modules, done.returncode) == ("", 0), done.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.exhaustive
def test_several_processes_execute_no_module(executed):
    done, modules = executed(*TRAIN, "--tokenizer", "bytes", "--nproc", "2")
    assert (modules, done.returncode) == ("", 0), done.stderr
