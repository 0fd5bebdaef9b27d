"""Very small runs and what they leave behind."""

import json
from pathlib import Path

from xlcli import config, presets, training
from xlcli.events import Plan, Step
from xlcli.files.tensors import digest, read_tensors
from xlcli.store.commit import latest
from xlcli.store.layout import read_metrics

PROSE = "".join(f"The {i}th of {i * i} foxes, {'lazy' if i % 3 else 'quick'}, saw dog {i % 7}.\n" for i in range(90))
CLOCKS = ("seconds", "tokens_per_second", "rank_tokens_per_second", "waiting_seconds")
"""What may differ between runs that are the same."""

SMALL = {
    "model": {
        "dim": 16, "n_layers": 2,
        "attention": {"kind": "full", "n_heads": 2},
        "position": {"kind": "xl", "n_features": 8},
        "feedforward": {"ffn_dim": 24},
        "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1, "feedforward": 0.1},
    },
    "text": {"tokenizer": "bytes"},
    "train": {"segment_len": 16, "mem_len": 16, "batch_size": 4, "max_steps": 6, "eval_every": 3, "save_every": 2},
    "runtime": {"dtype": "float32", "threads": 1},
}  # fmt: skip


def small(**sections):
    """The settings of a run of a fraction of a second, changed by `train={...}` and so on."""
    return config.merge(SMALL, sections)


def corpus(folder=None, text=PROSE, name="corpus.txt"):
    """A file of text."""
    path = Path(folder or Path.cwd()) / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def train(tree, paths, folder, *, preset="tiny", resume=False, overwrite=False, **options):
    """The events of a new or resumed run with these settings."""
    if resume:
        assert not overwrite
        return training.resume(paths, folder, tree, preset=preset, **options)
    return training.train(paths, folder, presets.configurations(tree, preset), overwrite=overwrite, **options)


def go(tree, paths, folder, **options):
    """All events of a run."""
    return list(train(tree, [paths] if isinstance(paths, str) else paths, Path(folder), **options))


class After:
    """A `stop` that says so once a run has taken `step` steps; feed it the events by iterating through `run`."""

    def __init__(self, step):
        self.step, self.seen = step, -1

    def __call__(self):
        return self.seen >= self.step

    def run(self, tree, paths, folder, **options):
        events = []
        for event in train(tree, [paths], Path(folder), stop=self, **options):
            events.append(event)
            if isinstance(event, Step | Plan):
                self.seen = event.step if isinstance(event, Step) else event.resumed_at
        return events


def of_kind(events, kind):
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def curve(folder):
    """The rows of metrics.jsonl without what a clock says."""
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in read_metrics(Path(folder))]


def checkpoint_tensors(path):
    """Digest of each tensor file of a checkpoint."""
    return {file.name: digest(read_tensors(file, expected=None)[0]) for file in sorted(path.glob("*.safetensors"))}


def remains(folder):
    """Everything that a run leaves and that must not depend on how often it was stopped."""
    folder = Path(folder)
    newest = latest(folder / "checkpoints").path
    facts = json.loads((newest / "state.json").read_bytes())
    facts.pop("seconds")
    return {
        "checkpoint": newest.name,
        "tensors": checkpoint_tensors(newest),
        "facts": facts,
        "model": (folder / "model.safetensors").read_bytes(),
        "curve": curve(folder),
        "files": sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")),
    }
