"""Fixtures: the program run in this process, and untrained models."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import TEXT

from xlcli.cli.entry import main


@dataclass(frozen=True)
class Result:
    """Exit code, stdout and stderr of a run."""

    code: int
    out: bytes
    err: str


@pytest.fixture
def run(capsysbinary) -> Callable[..., Result]:
    """Runs the program in this process."""

    def run(*arguments: str | os.PathLike[str]) -> Result:
        capsysbinary.readouterr()
        code = main([os.fspath(argument) for argument in arguments])
        captured = capsysbinary.readouterr()
        return Result(code, captured.out, captured.err.decode())

    return run


@pytest.fixture
def without_torch(monkeypatch) -> None:
    """Makes every import of torch fail."""
    monkeypatch.setitem(sys.modules, "torch", None)


def save_untrained(folder: Path, **shape: object) -> Path:
    """Saves an untrained model with these keys of the section `model`."""
    import torch

    from xlcli import config
    from xlcli.model.build import build_model
    from xlcli.store.folder import save_model
    from xlcli.text.tokenizers import TOKENIZERS

    tree = {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}}
    made = config.make({"model": tree, "train": {"mem_len": 16, "segment_len": 16}}, {"model": shape})
    torch.manual_seed(0)
    save_model(folder, made, build_model(made.model).state_dict(), TOKENIZERS["bytes"].train([TEXT], 256), {})
    (folder / "valid.txt").write_bytes(TEXT * 8)
    return folder


@pytest.fixture
def untrained() -> Callable[..., Path]:
    """Saves an untrained model under a name in `./models`."""
    return lambda name, **shape: save_untrained(Path("models") / name, **shape)


@pytest.fixture(scope="session")
def _model(tmp_path_factory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(_model) -> Path:
    """An untrained model `tiny` in `./models`; its path."""
    here = Path("models") / "tiny"
    shutil.copytree(_model, here)
    return here.absolute()
