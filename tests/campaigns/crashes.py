"""Loss of power: what `xlcli` said it had saved is there after a crash at any moment, and nothing is a mixture.

    train      a new run               overwrite  a run that replaces a model
    resume     a run that is resumed   copy       xlcli models copy         state  xlcli stream --state-out, twice

    python tests/campaigns/crashes.py [PART...] [--cases N] [--seconds S] [--case N] [--write]

The operations on files are recorded once. A case is a folder as `disk.crash` leaves it: first with the synced
operations only, at each moment at which the user was told something; then every prefix of the log with all its
operations, every prefix with the synced ones only, and random subsets. In these first cases and in every twentieth
other the run is also resumed to its end, which must equal the uninterrupted one.
"""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import campaign
import pytest
from campaign import Tally
from disk import Recorder, crash
from short_runs import After, corpus, remains, small, train

from xlcli import api
from xlcli.events import Saved, Trained, Validation
from xlcli.files.tensors import read_header
from xlcli.store import commit
from xlcli.store.commit import latest, step_of
from xlcli.store.folder import copy_model, load
from xlcli.store.layout import is_model, read_metrics
from xlcli.store.lock import lock

SETTINGS = small(train={"max_steps": 4, "eval_every": 2, "save_every": 1})
OLD_SEED = 5
"""Seed of a run that is replaced."""
RESUMED = 20
"""One case in so many is resumed to its end."""


def recorded(root: Path, work: Callable[[Recorder], None]) -> Recorder:
    """The log of `work` in this folder, which it changes through `os` only."""
    recorder = Recorder(root)
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch.setattr)
        work(recorder)
    actual = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert actual == {name: data for name, data in recorder.now.paths().items() if data is not None}
    return recorder


def tries(tally: Tally, cases: Iterator[int], place: Path, recorder: Recorder, check: Callable) -> None:
    """Runs `check(folder, said, resumed=...)` for the folder that each case leaves, and what the user was told."""
    told = [at for at, op in enumerate(recorder.log, 1) if op.kind == "said"]
    n = len(recorder.log) + 1
    tally.notes["operations"] = n - 1
    folder = place / "crashed"
    for case in cases:
        draw = random.Random(case)
        at = told[case] if case < len(told) else (case - len(told)) % n
        if case >= len(told) + 2 * n:
            at = draw.randrange(n)
            tree = crash(recorder, at, draw)
        else:
            tree = crash(recorder, at, None, drop=not len(told) <= case < len(told) + n)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        tree.write(folder)
        said = [op.data.decode() for op in recorder.log[:at] if op.kind == "said"]
        try:
            check(folder, said, resumed=case < len(told) or case % RESUMED == 0)
            tally.survived()
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            tree.write(folder)
            tally.failed(case, f"{type(error).__name__} at operation {at}: {str(error)[:300]}", folder)


def training(kind: str) -> Callable[[Tally, Iterator[int], Path], None]:
    def part(tally: Tally, cases: Iterator[int], place: Path) -> None:
        campaign.quick_runs()
        text = corpus(place)
        for _ in train(SETTINGS, [text], place / "whole"):
            pass
        expected = remains(place / "whole")
        root = place / "recorded"
        root.mkdir()
        models = {None}
        if kind == "overwrite":
            for _ in train(SETTINGS | {"runtime": SETTINGS["runtime"] | {"seed": OLD_SEED}}, [text], root / "m"):
                pass
            models.add(read_header(root / "m" / "model.safetensors")[1]["sha256"])
        if kind == "resume":
            After(2).run(SETTINGS, text, root / "m")
            models.add(read_header(root / "m" / "model.safetensors")[1]["sha256"])

        def work(recorder: Recorder) -> None:
            options = {"train": {}, "overwrite": {"overwrite": True}, "resume": {"resume": True}}[kind]
            for event in train(SETTINGS if kind != "resume" else {}, [text], root / "m", **options, preset="tiny"):
                match event:
                    case Saved():
                        recorder.say(f"saved {event.step}")
                    case Validation() if event.best:
                        models.add(read_header(root / "m" / "model.safetensors")[1]["sha256"])
                        recorder.say(f"kept {event.step}")
                    case Trained():
                        recorder.say("ended")

        def check(folder: Path, said: list[str], *, resumed: bool) -> None:
            model = folder / "m"
            saved = [int(line.split()[1]) for line in said if line.startswith("saved")]
            kept = [int(line.split()[1]) for line in said if line.startswith("kept")]
            exchanged = (model / ".replacement").exists()
            if exchanged:
                pass  # two models change places: a reader may find neither
            elif is_model(model):
                _check_model(model, models, kept)
            else:
                assert not kept, "the model is gone"
                assert kind == "train", "the old model is gone"
            with lock(model):
                commit.finish_replacement(model)
                place_of_run = commit.place_of_run(model)
            found = latest(place_of_run / "checkpoints")
            assert not found.rejected, found.rejected
            step = -1
            if found.path and json.loads((found.path / "state.json").read_bytes())["seed"] != OLD_SEED:
                step = step_of(found.path)
            assert step >= max(saved, default=-1), f"step {saved[-1]} was saved, step {step} is there"
            read_metrics(place_of_run)
            if kept:
                _check_model(model, models, kept)
            if resumed:
                resumable = commit.holds_run(model) or place_of_run != model
                is_old = kind == "overwrite" and place_of_run == model and not kept
                options = {"resume": True} if resumable and not is_old else {"overwrite": is_old}
                for _ in train(SETTINGS if "resume" not in options else {}, [text], model, preset="tiny", **options):
                    pass
                ended = remains(model)
                differing = [name for name in expected if ended[name] != expected[name]]
                assert not differing, f"the resumed run differs in {differing}"

        tries(tally, cases, place, recorded(root, work), check)

    return part


def _check_model(folder: Path, models: set[str], kept: list[int]) -> None:
    model = load(folder)
    assert model.fingerprints["weights"] in models, "the weights are none that were kept"
    step = int(read_header(folder / "model.safetensors")[1]["step"])
    assert not kept or step >= kept[-1], f"the weights of step {kept[-1]} were kept, those of step {step} are there"


def copy(tally: Tally, cases: Iterator[int], place: Path) -> None:
    campaign.quick_runs()
    for _ in train(SETTINGS, [corpus(place)], place / "source"):
        pass
    root = place / "recorded"
    root.mkdir()

    def work(recorder: Recorder) -> None:
        copy_model(place / "source", root / "models" / "copy")
        recorder.say("copied")

    def check(folder: Path, said: list[str], *, resumed: bool) -> None:
        target = folder / "models" / "copy"
        assert target.exists() or not said, "the copy is gone"
        if target.exists():
            assert load(target).fingerprints == load(place / "source").fingerprints
            for name in ("valid.txt", "record.json"):
                assert (target / name).read_bytes() == (place / "source" / name).read_bytes()

    tries(tally, cases, place, recorded(root, work), check)


def state(tally: Tally, cases: Iterator[int], place: Path) -> None:
    campaign.quick_runs()
    for _ in train(SETTINGS, [corpus(place)], place / "model"):
        pass
    model = api.load(place / "model", device="cpu", threads=1)
    root = place / "recorded"
    root.mkdir()
    first = model.read("The first text.\n")
    model.save_state(first, root / "s")
    second = model.read("And more.\n", state=first)
    scores = [model.score("The end.\n", state=one) for one in (first, second)]

    def work(recorder: Recorder) -> None:
        model.save_state(second, root / "s")
        recorder.say("saved")

    def check(folder: Path, said: list[str], *, resumed: bool) -> None:
        score = model.score("The end.\n", state=model.load_state(folder / "s"))
        assert score in (scores[1:] if said else scores), "neither the old nor the new state"

    tries(tally, cases, place, recorded(root, work), check)


PARTS = {kind: training(kind) for kind in ("train", "overwrite", "resume")} | {"copy": copy, "state": state}

if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, PARTS, cases=500))
