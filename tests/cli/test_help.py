"""Help, version and usage errors: complete, quick, and without torch."""

import re
import resource
import subprocess
import sys
import tomllib

import pytest
from programs import SOURCE, environment

import xlcli
from xlcli.cli.app import COMMANDS
from xlcli.config import Config

QUICK = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["models", "-h"],
    ["train", "--mem-lne", "5"],
    ["train", "--mem-len", "1e12", "x"],
    ["evl"],
    ["eval", "--set", "eval.mem_ln=3"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_names_every_option_and_ends_with_two_examples(command, run):
    shown = run(command.name, "--help")
    assert shown.code == 0
    text = shown.out.decode()
    for flag in command.flags:
        assert re.search(rf"(^|\s){re.escape(flag.long)}\b", text), flag.long
    *_, examples = text.rstrip().rpartition("Examples:")
    lines = examples.strip().split("\n")
    assert len(lines) == 2
    assert all(f"xlcli {command.name}" in line for line in lines)
    assert max(map(len, text.split("\n"))) <= 100


def test_program_help(run):
    text = run("--help").out.decode()
    assert run().out.decode() == text == run("-h").out.decode()
    assert all(f"  {command.name} " in text for command in COMMANDS)


def test_choices_are_those_of_the_configuration():
    schema = Config.model_json_schema()["$defs"]
    sections = {name: schema[Config.model_fields[name].annotation.__name__] for name in Config.model_fields}
    compared = 0
    for command in COMMANDS:
        for flag in command.flags:
            for key in flag.keys if flag.choices else ():
                section, name = key.split(".")
                assert list(flag.choices) == sections[section]["properties"][name]["enum"], key
                compared += 1
    assert compared >= 7


def test_each_variable_means_one_option():
    for command in COMMANDS:
        names = [flag.variable for flag in command.flags]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_answers_at_once_without_torch(arguments):
    heavy = "{'torch', 'numpy', 'sentencepiece', 'safetensors'}"
    code = (
        f"import sys; from xlcli.__main__ import main; main({arguments!r}); print(sorted({heavy} & set(sys.modules)))"
    )
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time, since the wall is shared with whatever else the machine does.
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.endswith(b"[]\n")
    assert min(spent) < 0.3


def test_version_is_the_package_s(run):
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert xlcli.__version__ == project["version"]
    assert run("--version").out == f"xlcli {xlcli.__version__}\n".encode()


def test_import_is_light_and_public_names_exist():
    code = (
        "import sys, xlcli; print({'torch', 'pydantic'} & set(sys.modules)); [getattr(xlcli, n) for n in xlcli.__all__]"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60, check=True)
    assert done.stdout == b"set()\n"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = xlcli.trian


@pytest.mark.parametrize(("library", "users"), [("typer", {"cli/app.py"}), ("rich", {"cli/render.py"})])
def test_a_library_of_the_terminal_is_used_in_one_place(library, users):
    package = SOURCE / "xlcli"
    pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if pattern.search(path.read_text())}
    assert found == users
