"""Builds: a wheel contains presets and models, an editable install reads those of the checkout."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
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
MANUAL = {f"{name}.1" for name in runpy.run_path(str(SOURCE / "hatch_build.py"))["pages"]()}


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


def manual_pages(wheel: Path) -> set[str]:
    """Names of the files where `man` finds them in an environment."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.rpartition("/")[2] for name in archive.namelist() if ".data/data/share/man/man1/" in name}


def test_wheel_holds_the_manual_pages(wheel):
    assert manual_pages(wheel) == MANUAL


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
    assert manual_pages(wheel) == MANUAL
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


def test_metadata_names_authors_and_no_address_and_the_citation_agrees(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Author"] == "The xlcli authors"
    assert metadata.get_all("Project-URL") is None
    citation = (SOURCE / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([a-z-]+): (.+)$", citation, re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == metadata["Version"]
    assert fields["license"] == metadata["License-Expression"]
    assert "repository-code" not in fields
    named = [SOURCE / "pyproject.toml", SOURCE / "CITATION.cff", *SOURCE.glob("*.md"), *(SOURCE / "docs").rglob("*.md")]
    assert [path.name for path in named if re.search(r"example\.(org|com)", path.read_text())] == []
    assert f"authors:\n  - name: {metadata['Author']}\n" in citation
    assert set(re.findall(r"^  - ([a-z -]+)$", citation, re.MULTILINE)) == set(PROJECT["keywords"])


CI = [".ci/run", "make demo", "make test", "make demo", "make docs CPU=1"]  # twice a demo: once on macOS


@pytest.mark.parametrize(("name", "commands"), [("ci", CI), ("nightly", ["make campaigns"])])
def test_a_workflow_runs_its_commands_and_nothing_else(name, commands):
    workflow = (SOURCE / ".github" / "workflows" / f"{name}.yml").read_text()
    assert re.findall(r"^ *- run: (.*)$", workflow, re.MULTILINE) == commands
    assert workflow.count("run:") == len(commands)
    assert "exec make test" in (SOURCE / ".ci" / "run").read_text()
    assert {"test", "demo", "docs", "campaigns"} <= set(
        re.findall(r"^([a-z]+):", (SOURCE / "Makefile").read_text(), re.MULTILINE)
    )


def steps(*arguments: str) -> list[str]:
    """Commands of `make` that would create an environment."""
    ready = "env/ready"
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", f"VENV={ready.partition('/')[0]}", *arguments, ready],
        cwd=SOURCE, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if "pip install" in line]


def fake_torch(folder: Path, version: str, *required: str) -> None:
    """Writes a wheel that is called PyTorch, in this version, and requires packages."""
    info = f"torch-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {name}\n" for name in required)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_a_gpu_pytorch_comes_from_one_place_alone_and_brings_nothing_of_cuda(tmp_path):
    index = tmp_path / "wheels"
    fake_torch(index, "2.13.0", "nvidia-cublas", "triton")
    fake_torch(index, "2.13.0+cpu")
    first, second = steps("CPU=1", f"TORCH_INDEX={index}")
    assert [second] == steps() == steps("CPU=0")
    words = first.split("-m pip ")[1].split()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--dry-run", "--ignore-installed", "--report", "-"],
        cwd=SOURCE, capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    installed = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    assert [(each["name"], each["version"]) for each in installed] == [("torch", "2.13.0+cpu")]
    assert " --index-url https://download.pytorch.org/whl/cpu torch" in steps("CPU=1")[0]


def checkout(folder: Path) -> Callable[..., str]:
    """A git checkout at a version with a date; the function runs git in it."""
    folder.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "--quiet")
    (folder / "before.bin").write_bytes(bytes(3_000_000))
    (folder / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (folder / "CHANGELOG.md").write_text("## 0.1.0 (unreleased)\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "before")
    (folder / "before.bin").unlink()
    (folder / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.1.0 (2026-11-28)\n")
    git("commit", "--quiet", "-a", "-m", "version")
    return git


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_large_file_that_is_new_since_the_version_is_refused_even_if_it_is_gone_again(tmp_path):
    git, folder = checkout(tmp_path / "here"), tmp_path / "here"

    def found(place: Path = folder) -> tuple[int, str]:
        words = [sys.executable, SOURCE / "tests" / "weight.py", place]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    assert found() == (0, "")
    (folder / "models/books").mkdir(parents=True)
    (folder / "models/books/model.safetensors").write_bytes(bytes(3_000_000))
    assert found() == (0, "")
    (folder / "new.bin").write_bytes(bytes(2_000_001))
    assert found()[0] == 1
    git("add", ".")
    git("commit", "--quiet", "-m", "new")
    git("rm", "--quiet", "new.bin")
    git("commit", "--quiet", "-m", "gone")
    code, text = found()
    assert (code, text.count("\n")) == (1, 1)
    assert text.startswith("new.bin: 2.0 MB")
    git("clone", "--quiet", "--depth", "1", f"file://{folder}", str(tmp_path / "shallow"))
    assert found(tmp_path / "shallow") == (0, "")
    shutil.rmtree(folder / ".git")
    assert found()[0] == 0


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
        "hatch_build.py",
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
