"""Help, version and usage errors: complete, quick, and without torch."""

import json
import re
import resource
import subprocess
import sys
import tomllib

import pytest
from programs import COMMANDS, EVERY, SOURCE, environment, options, variable

import xlcli
from xlcli.config import Config, ModelConfig, table
from xlcli.config.tree import UNIONS

QUICK = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["models", "-h"],
    ["models", "copy", "-h"],
    ["train", "--mem-lne", "5"],
    ["train", "--mem-len", "1e12", "x"],
    ["evl"],
    ["eval", "--set", "eval.mem_ln=3"],
]


@pytest.mark.parametrize(("name", "command"), EVERY.items(), ids=EVERY)
def test_help_names_every_option_and_ends_with_two_examples(name, command, run):
    shown = run(*name.split(), "--help")
    assert shown.code == 0
    text = shown.out.decode()
    for option in options(command):
        assert option.help[0].isupper() or option.help[0].isdigit(), option.opts
        assert option.help.endswith("."), option.opts
        assert option.rich_help_panel, option.opts
        assert re.search(rf"^{option.rich_help_panel}:$", text, re.MULTILINE)
        assert all(re.search(rf"(^|\s){re.escape(name)}\b", text) for name in option.opts), option.opts
        assert option.help.split()[0] in text
    *_, examples = text.rstrip().rpartition("Examples:")
    lines = examples.strip().split("\n")
    assert len(lines) == 2
    assert all(f"xlcli {name}" in line for line in lines)
    assert max(map(len, text.split("\n"))) <= 100


@pytest.mark.parametrize("columns", [50, 80, 100, 200])
def test_help_is_as_wide_as_the_terminal_up_to_a_limit(columns, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text, _, _ = run("train", "--help").out.decode().partition("Examples:")
    assert min(columns, 100) - 20 < max(map(len, text.split("\n"))) <= max(50, min(columns, 100))


def test_help_is_the_same_without_docstrings(run):
    lines = [[*name.split(), "--help"] for name in ("", "models", *EVERY)]
    code = "import json, sys; from xlcli.cli.entry import main; [main(line) for line in json.loads(sys.argv[1])]"
    shown = subprocess.run(
        [sys.executable, "-OO", "-c", code, json.dumps(lines)], env=environment(), capture_output=True, check=True
    )
    assert shown.stdout == b"".join(run(*line).out for line in lines)


def test_program_help(run):
    text = run("--help").out.decode()
    assert run().out.decode() == text == run("-h").out.decode()
    assert all(f"  {name} " in text for name in COMMANDS)


def test_help_of_an_action_shows_its_own_options_only(run):
    text = run("models", "copy", "--help").out.decode()
    assert "Usage: xlcli models copy PRESET|MODEL FILE.toml|FOLDER [OPTIONS]" in text
    assert "--weights" in text
    assert "--plot" not in text
    listed = run("models", "--help").out.decode()
    assert all(f"  {action} " in listed for action in COMMANDS["models"].commands)


def test_a_command_has_few_options_beside_the_common_ones():
    common = {"model", "device", "threads", "seed", "config_file", "overrides", "print_config", "dry_run", "json"}
    common |= {"quiet", "verbose", "color", "debug"}
    for name, command in EVERY.items():
        assert len({option.name for option in options(command)} - common) <= 25, name


def test_every_setting_has_a_description():
    for kind in (*(table(field) for field in Config.model_fields.values()), *tables_of_the_model()):
        for name, field in kind.model_fields.items():
            is_table = table(field) is not None or name in ("attention", "position", "stack")
            assert is_table or name == "kind" or field.description, f"{kind.__name__}.{name}"


def tables_of_the_model():
    """Classes of the tables of `model`, and of their kinds."""
    for name, field in ModelConfig.model_fields.items():
        yield from UNIONS[name].values() if name in UNIONS else filter(None, [table(field)])


def test_each_variable_means_one_option():
    for command in EVERY.values():
        names = [variable(option) for option in options(command)]
        assert len(names) == len(set(names))


@pytest.fixture(scope="session")
def with_bytecode(tmp_path_factory):
    """Environment of processes that use compiled modules, as installed ones do."""
    folder = tmp_path_factory.mktemp("bytecode")
    return environment(PYTHONPYCACHEPREFIX=str(folder), PYTHONDONTWRITEBYTECODE="")


def processor_seconds(code, env):
    """Processor time and output of a process that executes this Python code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_answers_at_once_without_torch(arguments, with_bytecode):
    """Processor time, relative to importing typer and pydantic at that moment: busy neighbors on a core slow both."""
    heavy = "{'torch', 'numpy', 'sentencepiece', 'safetensors'}"
    code = (
        f"import sys; from xlcli.cli.entry import main; main({arguments!r}); print(sorted({heavy} & set(sys.modules)))"
    )
    ratios = []
    while len(ratios) < 6 and min(ratios, default=9.0) >= 3.5:
        spent, out = processor_seconds(code, with_bytecode)
        assert out.endswith(b"[]\n")
        ratios.append(spent / processor_seconds("import pydantic.types, typer", with_bytecode)[0])
    assert min(ratios) < 3.5


def test_version_is_the_package_s(run):
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert xlcli.__version__ == project["version"]
    for asked in ("--version", "-V", "version"):
        assert run(asked).out == f"xlcli {xlcli.__version__}\n".encode()


@pytest.mark.parametrize("words", [(), ("train",), ("models",), ("models", "show")], ids=" ".join)
def test_help_of_a_command_is_its_help_page(words, run):
    assert run("help", *words).out == run(*words, "--help").out != b""
    assert run("help", *words[:-1], "trian").code == 2


def test_import_is_light_and_public_names_exist():
    code = (
        "import sys, xlcli; print({'torch', 'pydantic'} & set(sys.modules)); [getattr(xlcli, n) for n in xlcli.__all__]"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60, check=True)
    assert done.stdout == b"set()\n"
    with pytest.raises(AttributeError, match="trian"):
        _ = xlcli.trian


@pytest.mark.parametrize(("library", "users"), [("typer", "cli/"), ("rich", "cli/terminal.py")])
def test_a_library_of_the_terminal_is_used_in_one_place(library, users):
    package = SOURCE / "xlcli"
    pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if pattern.search(path.read_text())}
    assert found
    assert all(path.startswith(users) for path in found)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_seed_is_an_option_where_numbers_are_drawn(command, run):
    has_seed = b"--seed" in run(command, "--help").out
    assert has_seed == (command in ("train", "generate", "stream"))


def test_headings_of_help_are_those_of_several_options(run):
    text = run("generate", "--help").out.decode()
    assert "Text:" not in text
    assert text.index("Memory:") < text.index("--interactive") < text.index("Machine:")
