"""Every kind of model from the text to the numbers: trained, evaluated, continued and streamed by the commands."""

import json
import math
import shutil
from pathlib import Path

import pytest

from xlcli.config import ATTENTIONS, POSITIONS
from xlcli.config.model import STACKS

LINE = "the cat sat on a mat; it saw two dogs and ran up that tall tree.\n"
WORDS = LINE.split(" ")
TEXT = " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(600)).encode()
READ = TEXT[200:900]
"""What is scored: as long as several memories."""
SMALL = (
    "--preset", "tiny", "--tokenizer", "bytes", "--threads", "1", "--segment-len", "16", "--mem-len", "24",
    "--batch-size", "2", "--eval-every", "9", "--set", "model.dim=16", "--set", "model.feedforward.ffn_dim=24",
)  # fmt: skip
MADE_SMALL = {
    "learned": {"position.max_len": 100},
    "axial": {"position.shape": [5, 20]},
    "t5": {"position.n_buckets": 6, "position.max_distance": 20},
    "shaw": {"position.max_distance": 9},
    "xl": {"position.n_features": 8},
    "contextual-1": {"position.n_buckets": 6, "position.max_distance": 20},
    "contextual-2": {"position.n_buckets": 6, "position.max_distance": 20},
    "local": {"attention.window": 7},
    "linear": {"attention.n_features": 12},
    "mixed": {"attention.layers": [{"kind": "local", "window": 7}, {"kind": "lsh", "n_buckets": 4, "bucket_size": 6}]},
    "universal": {"stack.n_steps": 3},
}
"""Settings with which memories fill, windows are left and tables wrap around within the text."""


def _position_for(attention):
    return next(kind for kind in ("xl", "rope", "none") if POSITIONS[kind]().needs <= ATTENTIONS[attention]().offers)


def _of(**kinds):
    chosen = {f"{table}.kind": kind for table, kind in kinds.items()}
    return chosen | {key: value for kind in kinds.values() for key, value in MADE_SMALL.get(kind, {}).items()}


VARIANTS = {
    **{f"position {kind}": _of(position=kind) for kind in POSITIONS},
    **{f"attention {kind}": _of(attention=kind, position=_position_for(kind)) for kind in ATTENTIONS},
    **{f"stack {kind}": _of(stack=kind) for kind in STACKS},
    "linear, redrawn": _of(attention="linear", position="rope") | {"attention.redraw_every": 2},
    "lsh, redrawn": _of(attention="lsh", position="rope") | {"attention.redraw_every": 2},
    "act": _of(stack="universal") | {"stack.act": True, "stack.halt_bias": 0.0},
    "act, linear": _of(stack="universal", attention="linear", position="learned")
    | {"stack.act": True, "stack.halt_bias": 0.0},
    "sandwich": {"norm.placement": "sandwich", "norm.kind": "layer", "feedforward.chunk_len": 5},
    "rezero": {"norm.placement": "rezero"},
    "adaptive": {"embedding.cutoffs": [40, 110], "embedding.div_val": 2, "loss_chunk": 5},
    "factorised": {"embedding.inner_dim": 6, "embedding.tied": False},
}
RESUMED = [*(f"attention {kind}" for kind in ATTENTIONS), "linear, redrawn", "lsh, redrawn", "act", "position learned"]
"""Each kind of memory that training keeps, and what is drawn, halted or counted besides."""


@pytest.fixture
def train(run):
    """Trains a variant on `TEXT` into the folder named."""
    Path("text").write_bytes(TEXT)
    Path("read").write_bytes(READ)

    def train(name, folder, *flags):
        sets = [f"--set=model.{key}={json.dumps(value)}" for key, value in VARIANTS[name].items()]
        done = run("train", "text", "-o", folder, *SMALL, *sets, *flags)
        assert done.code == 0, done.err
        return Path(folder)

    return train


@pytest.mark.parametrize("name", VARIANTS)
def test_every_command_gives_the_same_numbers(name, train, run):
    train(name, "models/it", "--max-steps", "3")

    def score(*flags):
        done = run("eval", "read", "--json", *flags)
        assert done.code == 0, done.err
        return json.loads(done.out)

    def streamed(data, *flags):
        Path("in").write_bytes(data)
        done = run("stream", "in", "--emit", "stats", "--json", *flags)
        assert done.code == 0, done.err
        return json.loads(done.out.splitlines()[-1])

    whole, few = score("--segment-len", "512"), score("--segment-len", "1", "--limit", "90")
    close = {"rel": 1e-6, "abs": 0}
    assert score("--segment-len", "64")["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], **close)
    assert score("--segment-len", "64", "--limit", "90")["nats"] == pytest.approx(few["nats"], **close)
    assert (whole["mean_steps"] is not None) == name.startswith("act")
    assert whole["bits_per_byte"] > 1

    uncut = streamed(READ)
    assert uncut["bits"] * math.log(2) == pytest.approx(whole["nats"], **close)
    middle = READ.index(b"tree", len(READ) // 2) + 2
    streamed(READ[:middle], "--state-out", "state")
    rest = streamed(READ[middle:], "--state-in", "state")
    assert (rest["bytes"], rest["tokens"]) == (uncut["bytes"], uncut["tokens"])
    assert rest["bits"] == pytest.approx(uncut["bits"], **close)

    written = run("generate", "the cat", "-n", "9", "-t", "0", "--state-out", "state")
    assert (written.code, written.out[:7]) == (0, b"the cat"), written.err
    more = run("generate", "-n", "5", "-t", "0", "--state-in", "state").out
    assert written.out + more == run("generate", "the cat", "-n", "14", "-t", "0").out


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(name, train):
    whole = train(name, "models/whole", "--max-steps", "5", "--save-every", "3", "--keep", "3")
    shutil.copytree(whole, "models/again")
    again = Path("models/again")
    (again / "model.safetensors").unlink()
    last = Path("checkpoints", "step-00000005")
    shutil.rmtree(again / last)
    train(name, again, "--max-steps", "5", "--save-every", "3", "--keep", "3", "--resume")
    for file in ("model.safetensors", *(last / f"{part}.safetensors" for part in ("weights", "optimizer", "memory"))):
        assert (again / file).read_bytes() == (whole / file).read_bytes(), file
