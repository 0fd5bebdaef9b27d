"""Full and failing disks: every call that touches a file fails in turn, with ENOSPC, EDQUOT or EIO, once or for good.

    train   xlcli train, which replaces a model     eval    xlcli eval --per-token
    stream  xlcli stream --state-out                copy    xlcli models copy

    python tests/campaigns/full_disks.py [PART...] [--cases N] [--seconds S] [--case N] [--write]

In every fifth case a limit of file sizes (EFBIG) takes the place of the failing call. The command must succeed with its
usual result, or end with exit code 3 or 4 (2 if the configuration file cannot be read) and a sentence. Repeated on a
working disk, it must have its usual result.
"""

import errno
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import campaign
from campaign import Tally, command, fork, wait
from faults import Faults
from short_runs import corpus, remains, small

from xlcli.cli.settings import to_toml
from xlcli.files.tensors import read_tensors
from xlcli.store.commit import latest
from xlcli.store.folder import load

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
Outcome = Callable[[Path], object]
"""Result of a command in a folder; an exception if it is damaged."""


def part(arguments: tuple[str, ...], outcome: Outcome, survivors: Outcome) -> Callable:
    """A part of the campaign.

    Args:
        arguments: Command line to run in a folder that holds two copies of a trained model, `old` and `model`.
        outcome: Its result.
        survivors: Checks what must be intact after a failure.
    """

    def tries(tally: Tally, cases: Iterator[int], place: Path) -> None:
        campaign.quick_runs()
        base, log, count = place / "base", place / "log", place / "count"
        base.mkdir()
        corpus(base)
        (base / "settings.toml").write_text(
            to_toml(small(train={"max_steps": 4, "eval_every": 2, "save_every": 1, "batch_size": 2}))
        )
        os.chdir(base)
        _run(command(*_train("old", "--seed", "9")), log)
        shutil.copytree("old", "model")

        def attempt(folder: Path, prepare: Callable[[], Faults]) -> int:
            def work() -> int:
                os.chdir(folder)
                faults = prepare()
                code = command(*arguments)()
                if faults.at == 0:
                    count.write_text(str(faults.count))
                return code

            return wait(fork(work, log))

        def fresh(name: str) -> Path:
            shutil.rmtree(place / name, ignore_errors=True)
            return shutil.copytree(base, place / name)

        whole = fresh("whole")
        if attempt(whole, lambda: _faults(0, 0, lasting=False)):
            raise AssertionError(log.read_text()[:500])
        expected, n_calls = outcome(whole), int(count.read_text())
        tally.notes["calls"] = n_calls
        for case in cases:
            draw = random.Random(case)
            folder = fresh("tried")
            number = draw.choice(ERRORS)
            at = 1 + case * 7919 % n_calls  # a prime number: all calls in a scattered order
            if case % 5 == 4:
                limit = int(2 ** draw.uniform(3, 17))
                code = attempt(folder, lambda limit=limit: _small_files(limit))
                what = f"files of at most {limit} bytes"
            else:
                lasting = draw.random() < 0.5
                code = attempt(folder, lambda at=at, n=number, lasting=lasting: _faults(at, n, lasting=lasting))
                what = f"call {at} of {n_calls} fails with {errno.errorcode[number]}{' for good' if lasting else ''}"
            said = log.read_text()
            try:
                unread = code == 2 and "cannot read settings.toml" in said
                assert code in (0, 3, 4) or unread, f"exit code {code}: {said[-300:]}"
                assert "Traceback" not in said, said[-300:]
                assert code == 0 or said.count("xlcli: ") == 1, f"no sentence: {said[-300:]}"
                survivors(folder)
                if code:
                    _run(lambda folder=folder: _again(folder, arguments), log)
                assert outcome(folder) == expected, "another result"
                tally.survived()
            except Exception as error:
                tally.failed(case, f"{what}: {type(error).__name__}: {error}", folder)

    return tries


def _faults(at: int, number: int, *, lasting: bool) -> Faults:
    def strike() -> None:
        raise OSError(number, os.strerror(number))

    faults = Faults(at, strike, lasting)
    faults.install(setattr)
    return faults


def _small_files(limit: int) -> Faults:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return Faults(-1, lambda: None)


def _run(work: Callable[[], int], log: Path) -> None:
    if code := wait(fork(work, log)):
        raise AssertionError(f"exit code {code} on a working disk: {log.read_text()[-400:]}")


def _again(folder: Path, given: tuple[str, ...]) -> int:
    """Repeats the command, as its messages say: a training run that has begun is resumed."""
    os.chdir(folder)
    if given[0] == "models" and (folder / "copy").exists():
        return 0  # it failed after the copy was complete
    model = folder / "model"
    if given[0] == "train" and ((model / ".replacement" / "config.json").exists() or not _is_old(folder)):
        given = (*(word for word in given if word != "--overwrite"), "--resume")
    return command(*given)()


def _is_old(folder: Path) -> bool:
    ours, old = folder / "model" / "model.safetensors", folder / "old" / "model.safetensors"
    return ours.exists() and ours.read_bytes() == old.read_bytes()


def _train(name: str, *more: str) -> tuple[str, ...]:
    return ("train", "corpus.txt", "-o", name, "--config", "settings.toml", "-q", *more)


def _one_run_is_whole(folder: Path) -> None:
    """The old model or a checkpoint of the new run is there."""
    model = folder / "model"
    places = (model, model / ".replacement")
    assert _is_old(folder) or any(latest(run / "checkpoints").path for run in places), "both runs are lost"


def _old_is_whole(folder: Path) -> None:
    load(folder / "old")


def _lines(folder: Path) -> list[str]:
    return (folder / "tokens.jsonl").read_text().splitlines()


def _state(folder: Path) -> object:
    tensors, metadata = read_tensors(folder / "text.state", expected=None)
    del metadata["model.folder"]
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, metadata


def _copy(folder: Path) -> object:
    return load(folder / "copy").fingerprints, (folder / "copy" / "valid.txt").read_bytes()


PARTS = {
    "train": part(_train("model", "--overwrite"), lambda folder: remains(folder / "model"), _one_run_is_whole),
    "eval": part(("eval", "-m", "old", "--per-token", "tokens.jsonl", "-q"), _lines, _old_is_whole),
    "stream": part(
        ("stream", "corpus.txt", "-m", "old", "--state-out", "text.state", "--emit", "none", "-q"),
        _state,
        _old_is_whole,
    ),
    "copy": part(("models", "copy", "old", "copy"), _copy, _old_is_whole),
}

if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, PARTS, cases=100))
