"""Every kind of model is trained, evaluated, continued and streamed by the commands."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.variants import thinned
from xlcli.cli.settings import to_toml
from xlcli.config import ATTENTIONS, POSITIONS
from xlcli.config.model import STACKS

LINE = "the cat sat on a mat; it saw two dogs and ran up that tall tree.\n"
WORDS = LINE.split(" ")
TEXT = " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(600)).encode()
READ = TEXT[200:900]
"""Text to score, longer than several memories."""
SMALL = (
    "--preset", "tiny", "--tokenizer", "bytes", "--threads", "1", "--segment-len", "16", "--mem-len", "24",
    "--batch-size", "2", "--set=train.eval_every=9", "--set", "model.dim=16", "--set", "model.feedforward.ffn_dim=24",
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
    "lsh": {"attention.n_buckets": 8, "attention.bucket_size": 4},
    "universal": {"stack.n_steps": 3},
}
"""Settings with which memories fill up, windows end and tables wrap around within the text."""


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
    "act, hashed": _of(stack="universal", attention="lsh", position="rope") | {"stack.act": True},
    "act, linear": _of(stack="universal", attention="linear", position="learned")
    | {"stack.act": True, "stack.halt_bias": 0.0},
    "sandwich": {"norm.placement": "sandwich", "norm.kind": "layer", "feedforward.chunk_len": 5},
    "rezero": {"norm.placement": "rezero"},
    "adaptive": {"embedding.cutoffs": [40, 110], "embedding.div_val": 2, "loss_chunk": 5},
    "factorized": {"embedding.inner_dim": 6, "embedding.tied": False},
}
RESUMED = [*(f"attention {kind}" for kind in ATTENTIONS), "linear, redrawn", "lsh, redrawn", "act", "position learned"]
"""Variants that cover each kind of training memory, redrawn features, halting and position counters."""


@pytest.fixture
def train(run):
    """Trains a variant on `TEXT` into the folder named."""
    Path("text").write_bytes(TEXT)
    Path("read").write_bytes(READ)

    def train(name, folder, *flags):
        sets = [f"--set=model.{to_toml({key: value}).strip()}" for key, value in VARIANTS[name].items()]
        done = run("train", "text", "-o", folder, *SMALL, *sets, *flags)
        assert done.code == 0, done.err
        return Path(folder)

    return train


@pytest.mark.parametrize("name", thinned(VARIANTS, [*VARIANTS][::8]))
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

    def tokens(data, *flags):
        """Bits by the first byte of each token."""
        Path("in").write_bytes(data)
        done = run("stream", "in", "--emit", "tokens", "--json", *flags)
        return {row["byte"]: row["bits"] for row in map(json.loads, done.out.splitlines())}

    whole, few = score("--segment-len", "512"), score("--segment-len", "1", "--limit", "90")
    close = {"rel": 1e-6, "abs": 0}
    assert score("--segment-len", "64")["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], **close)
    assert score("--segment-len", "64", "--limit", "90")["nats"] == pytest.approx(few["nats"], **close)
    assert (whole["mean_steps"] is not None) == name.startswith("act")
    assert whole["bits_per_byte"] > 1

    uncut = streamed(READ)
    assert uncut["bits"] * math.log(2) == pytest.approx(whole["nats"], **close)
    middle = READ.index(b"tree", len(READ) // 2) + 2
    before, after = tokens(READ[:middle], "--state-out", "state"), tokens(READ[middle:], "--state-in", "state")
    continued = {byte: bits for byte, bits in before.items() if byte < min(after)} | after  # from the line that was cut
    assert continued == pytest.approx(tokens(READ), **close)
    assert sum(continued.values()) == pytest.approx(uncut["bits"], **close)

    written = run("generate", "the cat", "-n", "9", "-t", "0", "--state-out", "state")
    assert (written.code, written.out[:7]) == (0, b"the cat"), written.err
    more = run("generate", "-n", "5", "-t", "0", "--state-in", "state").out
    assert written.out + more == run("generate", "the cat", "-n", "14", "-t", "0").out


@pytest.mark.parametrize("name", thinned(RESUMED, RESUMED[::4]))
def test_a_resumed_run_equals_an_uninterrupted_one(name, train):
    whole = train(
        name, "models/whole", "--max-steps", "5", "--set=train.save_every=3", "--set=train.keep_checkpoints=3"
    )
    shutil.copytree(whole, "models/again")
    again = Path("models/again")
    (again / "model.safetensors").unlink()
    last = Path("checkpoints", "step-00000005")
    shutil.rmtree(again / last)
    train(name, again, "--max-steps", "5", "--set=train.save_every=3", "--set=train.keep_checkpoints=3", "--resume")
    for file in ("model.safetensors", *(last / f"{part}.safetensors" for part in ("weights", "optimizer", "memory"))):
        assert (again / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.parametrize("name", ["attention lsh", "attention mixed"])
def test_hash_rounds_are_an_inference_setting(name, train, run):
    """The number of hash rounds is the same in every command and saved in the state."""
    train(name, "models/it", "--max-steps", "3")
    scores = [json.loads(run("eval", "read", "--json", f"--set=eval.n_hashes={n}").out) for n in (1, 2, 8)]

    def streamed(data, *flags):
        Path("in").write_bytes(data)
        done = run("stream", "in", "--emit", "stats", "--json", *flags)
        return json.loads(done.out.splitlines()[-1]) if done.code == 0 else done

    for n, score in zip((1, 8), (scores[0], scores[-1]), strict=True):
        assert streamed(READ, f"--set=stream.n_hashes={n}")["bits"] * math.log(2) == pytest.approx(
            score["nats"], rel=1e-6
        )
    assert scores[0]["nats"] != scores[-1]["nats"]
    end_of_line = READ.index(b"\n", 300) + 1
    first = streamed(READ[:end_of_line], "--set=stream.n_hashes=8", "--state-out", "state")
    rest = streamed(READ[end_of_line:], "--state-in", "state")
    assert (first["bits"] + rest["bits"]) * math.log(2) == pytest.approx(scores[-1]["nats"], rel=1e-6)
    refused = streamed(READ[300:], "--state-in", "state", "--set=stream.n_hashes=2")
    assert refused.code == 3
    assert re.search(r"n_hashes\D+8\D+2\b", refused.err)


@pytest.mark.parametrize(
    ("name", "command", "flags", "said"),
    [
        (
            "attention full",
            "eval",
            ["--set=eval.n_hashes=2"],
            "LSH",
        ),
        (
            "attention local",
            "generate",
            ["--set=generate.n_hashes=2"],
            "generate.n_hashes",
        ),
    ],
)
def test_an_option_that_does_not_apply_to_a_model_is_refused(name, command, flags, said, train, run):
    train(name, "models/it", "--max-steps", "1")
    done = run(command, *flags)
    assert (done.code, done.out) == (2, b"")
    assert said in done.err


def test_a_plan_counts_the_memory_that_layers_keep(train, run):
    """Neither local nor LSH attention keeps a million tokens, 32 numbers each."""
    train("attention mixed", "models/it", "--max-steps", "1")
    said = run("eval", "read", "--dry-run", "--mem-len", "1000000", "--set=eval.n_hashes=2").out.decode()
    memory = re.search(r"(?m)^memory +1 text at a time: ([\d.]+) KiB$", said)
    assert 0 < float(memory[1]) < 20
