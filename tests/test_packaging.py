"""Builds: a wheel contains presets and models, an editable install reads those of the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

SOURCE = Path(__file__).parents[1]
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
BUILD = "import sys, hatchling.build as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"

pytest.importorskip("hatchling")


def build(kind: str, into: Path, source: Path = SOURCE) -> Path:
    """A distribution of the tree in `source`, built as by pip without isolation."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, into], cwd=source, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("dist"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not re.match(r"xlcli-[^/]*\.(dist-info|data)/", name)}


def test_wheel_holds_the_package_the_presets_and_nothing_else(wheel):
    found = names(wheel)
    modules = {path.relative_to(SOURCE).as_posix() for path in (SOURCE / "xlcli").rglob("*.py")}
    modules |= {f"xlcli/cli/page.{kind}" for kind in ("html", "css")}
    presets = {f"xlcli/_models/{path.name}" for path in (SOURCE / "models").glob("*.toml")}
    assert len(modules) > 50
    assert len(presets) >= 4
    assert modules | presets | {"xlcli/py.typed", "xlcli/__init__.pyi", "xlcli/_models/README.md"} <= found
    assert found - modules - presets <= {"xlcli/py.typed", "xlcli/__init__.pyi", "xlcli/_models/README.md"} | bundled()


def bundled() -> set[str]:
    """Files of the bundled models; checkpoints and locks are not packaged."""
    return {
        f"xlcli/{'_models' / path.relative_to(SOURCE / 'models')}"
        for path in (SOURCE / "models" / "books").rglob("*")
        if path.is_file() and "checkpoints" not in path.parts and not path.name.startswith(".")
    }


def test_bundled_models_are_in_the_wheel(wheel):
    if not bundled():
        pytest.skip("this checkout holds no bundled model")
    assert bundled() <= names(wheel)


@pytest.mark.exhaustive
def test_wheel_of_the_source_distribution_is_the_same(wheel, tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    for name in ("tests/test_invariants.py", "Makefile", "constraints.txt", "CHANGELOG.md", "LICENSE", "demo/demo.sh"):
        assert (source / name).is_file(), name
    assert names(build("wheel", tmp_path, source)) == names(wheel)


def test_an_installed_wheel_finds_its_presets(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import xlcli, xlcli.presets as p; print(xlcli.__file__, p.models_folder(), p.list_presets())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"{tmp_path}/xlcli/__init__.py {tmp_path}/xlcli/_models ")
    assert "tiny" in done.stdout


def test_editable_install_copies_nothing(tmp_path):
    pytest.importorskip("editables")
    wheel = build("editable", tmp_path)
    assert names(wheel) == {"_editable_impl_xlcli.pth"}
    with zipfile.ZipFile(wheel) as archive:
        assert Path(archive.read("_editable_impl_xlcli.pth").decode().strip()) == SOURCE


def test_constraints_pin_what_is_required():
    lines = [line for line in (SOURCE / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    pins = {name.lower().replace("_", "-"): Version(version) for name, _, version in (s.partition("==") for s in lines)}
    required = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])]
    for requirement in required:
        assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert pins["torch"] == Version("2.13.0")


def test_metadata_names_authors_and_addresses_and_the_citation_agrees(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Author"] == "The xlcli authors"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} == urls.keys()
    citation = (SOURCE / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([a-z-]+): (.+)$", citation, re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == metadata["Version"]
    assert fields["license"] == metadata["License-Expression"]
    assert fields["repository-code"] == urls["Repository"]
    assert f"authors:\n  - name: {metadata['Author']}\n" in citation
    assert set(re.findall(r"^  - ([a-z -]+)$", citation, re.MULTILINE)) == set(PROJECT["keywords"])


@pytest.mark.parametrize(("name", "commands"), [("ci", [".ci/run", "make demo"]), ("nightly", ["make campaigns"])])
def test_a_workflow_runs_its_commands_and_nothing_else(name, commands):
    workflow = (SOURCE / ".github" / "workflows" / f"{name}.yml").read_text()
    assert re.findall(r"^ *- run: (.*)$", workflow, re.MULTILINE) == commands
    assert workflow.count("run:") == len(commands)
    assert "exec make test" in (SOURCE / ".ci" / "run").read_text()
    assert {"test", "demo", "campaigns"} <= set(
        re.findall(r"^([a-z]+):", (SOURCE / "Makefile").read_text(), re.MULTILINE)
    )


def test_the_container_installs_the_package_with_its_constraints_and_names_no_index():
    lines = (SOURCE / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("RUN ")] == [
        "RUN python -m venv /opt/xlcli && /opt/xlcli/bin/pip install ."
    ]
    assert any("PIP_CONSTRAINT=/source/constraints.txt" in line for line in lines)
    assert 'ENTRYPOINT ["xlcli"]' in lines
    assert not any("://" in line for line in lines)
    ignored = (SOURCE / ".dockerignore").read_text().splitlines()
    needed = (
        "xlcli",
        "models",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        ".gitignore",
    )
    assert all((SOURCE / name).exists() for name in needed)
    assert not [pattern for pattern in ignored for name in needed if fnmatch(name, pattern)]
    assert {".git", ".venv"} <= set(ignored)


@pytest.mark.exhaustive
def test_the_tree_of_the_container_builds_the_same_wheel(wheel, tmp_path):
    ignored = (SOURCE / ".dockerignore").read_text().splitlines()
    tree = tmp_path / "source"
    shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns(*(line.removeprefix("**/") for line in ignored)))
    assert not (tree / "tests").exists()
    assert names(build("wheel", tmp_path, tree)) == names(wheel)
