"""Damaged and forged files of every kind: each is used as if it were intact, or refused in a sentence.

    blind     mutated bytes. What loads all the same must give the results of the intact file.
    resealed  mutated bytes or values, with all checksums recomputed, as a forger would. What loads must be usable.

    python tests/campaigns/mutations.py [blind|resealed] [--cases N] [--seconds S] [--case N] [--write]

A case fails with a crash, a hang of more than 20 s, an exception that is not an error of xlcli, or a need for more than
2 GB, and also if a program is started, a connection made, anything unpickled, or a file opened elsewhere. Cases run in
a forked child; a number determines its case.
"""

import json
import mmap
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import campaign
import forgery
import torch
from campaign import HANGS, Tally, command, fork, wait
from short_runs import After, corpus, remains, small

from xlcli import api, config, presets, training
from xlcli.cli.settings import to_toml
from xlcli.config import EvalConfig
from xlcli.errors import XLError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Score
from xlcli.runtime import Runtime
from xlcli.store.discover import summarize
from xlcli.store.folder import load
from xlcli.store.layout import read_config_file, read_metrics, read_record

BATCH = 500
"""Cases of one child."""
PROBE = "The 7th fox, caf\u00e9 and dog.\n".encode()
RUNTIME = Runtime(torch.device("cpu"), torch.float32, 1)
MODELS = {
    "full": {},
    "lsh": {
        "model": {
            "attention": {"kind": "lsh", "n_heads": 2, "n_buckets": 4, "bucket_size": 3, "n_hashes": 2},
            "position": {"kind": "sinusoidal"},
        },
        "text": {"tokenizer": "sentencepiece", "vocab_size": 320},
    },
    "linear": {
        "model": {
            "attention": {"kind": "linear", "n_heads": 2, "n_features": 16},
            "position": {"kind": "learned", "max_len": 50},
            "dropout": {"attention": 0.0},
        },
        "text": {"tokenizer": "words"},
        "train": {"weights": "int8"},
    },
    "universal": {
        "model": {
            "position": {"kind": "t5"}, "n_layers": 1, "embedding": {"n_bigrams": 57},
            "stack": {"kind": "universal", "n_steps": 3, "act": True},
        },
        "text": {"tokenizer": "sentencepiece", "vocab_size": 320},
    },
}  # fmt: skip
"""Settings of the models, which differ in memory, tokenizer and encoding of the weights."""


class Subject:
    """A model folder with a run that is not finished, state files of the model, and a configuration file."""

    def __init__(self, place: Path, name: str) -> None:
        self.folder, self.scratch = place / name, place / "scratch"
        sections = MODELS[name]
        tree = small(train={"max_steps": 4, "eval_every": 1, "save_every": 1} | sections.get("train", {}))
        tree = config.merge(config.merge(tree, {"text": {"test": 0.05}}), sections)
        self.text = corpus(place)
        After(3).run(tree, self.text, self.folder)
        for subcommand in (("stream", self.text), ("generate", "The", "-n", "3")):
            state = ("-m", str(self.folder), "--state-out", str(self.folder / f"{subcommand[0]}.state"), "-q")
            if code := wait(fork(command(*subcommand, *state), place / "log")):
                raise AssertionError(f"exit code {code}: {(place / 'log').read_text()[:500]}")
        full = next(iter(presets.configurations(tree, "tiny").values()))
        (self.folder / "settings.toml").write_text(to_toml(full.model_dump(mode="json")))
        self.files = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.name not in (".lock", "LATEST")
        }
        newest = max(file for file in self.files if file.startswith("checkpoints/")).rpartition("/")[0]
        self.names = [file for file in self.files if file.startswith(newest) or "checkpoints/" not in file]
        self.model = api.Model(load(self.folder), RUNTIME)
        self.expected = {file: self.use(file, self.folder) for file in self.names}

    def use(self, name: str, folder: Path) -> object:
        """Results that depend on this file."""
        if name == "settings.toml":
            return _plans(folder / name)
        if name.endswith(".state"):
            state = self.model.load_state(folder / name)
            return self.model.score(PROBE, state=state), self.model.generate(b"", max_new_tokens=2, state=state)
        if name.startswith("checkpoints/"):
            return self._resume(folder)
        if name in ("record.json", "metrics.jsonl"):  # no checksum, and no number depends on them
            summarize(folder)
            read_metrics(folder)
            read_record(folder)
            return None
        if name.endswith(".txt"):
            loaded = replace(self.model.loaded, files=read_config_file(folder).files)
            options = EvalConfig(limit=64, split=name.removesuffix(".txt"))
            return [event.nats for event in evaluate(loaded, None, options, RUNTIME) if isinstance(event, Score)]
        model = api.Model(load(folder), RUNTIME)
        return model.score(PROBE), model.generate(b"The", max_new_tokens=2, seed=1)

    def _resume(self, folder: Path) -> object:
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.copytree(folder, self.scratch)
        events = training.resume([self.text], self.scratch, {})
        warnings = [event.text for event in events if isinstance(event, Notice) and event.level == "warning"]
        declared = any("damaged" not in warning for warning in warnings)  # a difference that the user is told
        return "declared" if declared else remains(self.scratch)

    def attempt(self, draw: random.Random, *, resealed: bool) -> None:
        """Uses a mutant of a random file; an exception or an `AssertionError` is a defect."""
        name = draw.choice(self.names)
        if name.startswith("checkpoints/") and draw.random() < 0.97:
            name = draw.choice([other for other in self.names if "checkpoints/" not in other])  # slow: fewer of them
        others = draw.choice(list(self.files.values()))
        mutated = (forgery.forge if resealed else forgery.mutate)(self.files[name], draw, others, name)
        changed = {name: mutated}
        if resealed:
            changed |= forgery.reseal(self.files | changed, name)
        for file, data in changed.items():
            (self.folder / file).write_bytes(data)
        try:
            result = self.use(name, self.folder)
            if not resealed and name != "settings.toml" and result != "declared":
                assert result == self.expected[name], f"a change of {name} was not noticed"
        except XLError:
            pass
        finally:
            for file in changed:
                (self.folder / file).write_bytes(self.files[file])


def _plans(path: Path) -> object:
    tree = config.read_toml(path)
    return [to_toml(made.model_dump(mode="json")) for made in presets.configurations(tree, "tiny").values()]


def attempts(*, resealed: bool) -> Callable[[Tally, Iterator[int], Path], None]:
    """A part of the campaign."""

    def part(tally: Tally, cases: Iterator[int], place: Path) -> None:
        campaign.quick_runs()
        subjects = [Subject(place, name) for name in MODELS]
        present = mmap.mmap(-1, 8)  # the case that the child is at
        report = place / "report"
        for first in cases:
            batch = [first, *islice(cases, BATCH - 1)]
            while batch:
                report.write_bytes(b"")
                code = wait(fork(partial(_work, subjects, batch, present, report, resealed), place / "log"))
                failures = dict(json.loads(line) for line in report.read_bytes().splitlines())
                at = int.from_bytes(present[:], "little") if code else batch[-1]
                done = batch[: batch.index(at) + 1]
                if code:
                    log = (place / "log").read_text()[-300:]
                    failures[at] = HANGS.get(code, f"ended with exit code {code}: {log}")
                tally.survived(len(done) - len(failures))
                for case, reason in failures.items():
                    tally.failed(case, reason)
                batch = batch[len(done) :]

    return part


def _work(subjects: list[Subject], batch: list[int], present: mmap.mmap, report: Path, resealed: bool) -> int:
    campaign.limit_memory()
    escapes = campaign.watch(report.parent)
    for case in batch:
        present[:] = case.to_bytes(8, "little")
        campaign.limit_time()
        draw = random.Random(f"{case} {resealed}")
        try:
            subjects[case % len(subjects)].attempt(draw, resealed=resealed)
            assert not escapes, escapes.pop()
        except Exception as error:
            where = error.__traceback__
            while where.tb_next:
                where = where.tb_next
            place = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
            with report.open("a") as file:
                file.write(json.dumps([case, f"{type(error).__name__} at {place}: {str(error)[:300]}"]) + "\n")
    return 0


PARTS = {"blind": attempts(resealed=False), "resealed": attempts(resealed=True)}

if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, PARTS, cases=2000))
