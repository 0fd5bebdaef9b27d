"""Illegal models are refused in one sentence with the legal choices, before torch is loaded."""

import json
import subprocess
import sys

import pytest
from programs import environment

from xlcli.config import ATTENTIONS, POSITIONS

LINEAR = "attention.kind=linear"
FOR_LINEAR = "Set model.position.kind to none, sinusoidal, learned, axial or rope, or model.attention.kind to full"
REFUSED = [
    *(
        ([LINEAR, f"position.kind={kind}"], f"'{kind}' needs {hook}, which attention 'linear' does not ", FOR_LINEAR)
        for kind, hook in {
            "xl": "a second score term",
            "t5": "scores to add a bias to",
            "alibi": "scores to add a bias to",
            "shaw": "scores to add a bias to and attention weights to compute a value bias from",
            "contextual-1": "scores to add a bias to",
            "contextual-2": "scores to add a bias to",
        }.items()
    ),
    (
        [LINEAR],
        "model.position.kind 'xl' needs a second score term, which attention 'linear' does not have.",
        FOR_LINEAR,
    ),
    (
        [LINEAR, "position.kind=rope", "dropout.attention=0.1"],
        "model.dropout.attention is 0.1, but attention 'linear' has no weights to drop.",
        "Set model.dropout.residual and model.dropout.feedforward instead",
    ),
    (["position.kind=rope", "attention.head_dim=5"], "model.attention.head_dim 5 is odd, but position 'rope'", "even"),
    (
        ["position.kind=rope", "position.placement=embedding", "dim=9", "attention.n_heads=1"],
        "model.dim 9 is odd, but position 'rope' rotates pairs of features.",
        "Make it even.",
    ),
    (["position.kind=sinusoidal", "dim=9", "attention.n_heads=1"], "model.dim 9 is odd, but", "Make it even."),
    *(
        (
            [f"position.kind={kind}", "position.max_distance=63"],
            "model.position.max_distance 63 is less than twice model.position.n_buckets 32",
            "Raise it or use fewer buckets.",
        )
        for kind in ("t5", "contextual-1", "contextual-2")
    ),
    (["position.kind=axial", "position.dims=[3, 4]"], "model.position.dims [3, 4] do not add up", "equal parts"),
    (["position.kind=axial", "position.dims=[64]"], "dims [64] is not as long as model.position.shape [64, 64]", "one"),
    (["embedding.div_val=4"], "but there are none.", "Set model.embedding.cutoffs as well."),
    (["embedding.cutoffs=[20, 10]"], "model.embedding.cutoffs [20, 10] do not increase.", "Give them in order."),
    (["embedding.cutoffs=[20]", "embedding.inner_dim=4"], "exclude each other.", "Leave one of them out."),
    (["embedding.cutoffs=20"], "model.embedding.cutoffs is 20, not a list.", "--set model.embedding.cutoffs=[20]"),
    (["position.kind=roep"], "model.position.kind is 'roep': it should be 'none', 'sinu", "Did you mean 'rope'?"),
    (["attention.kind=locl"], "model.attention.kind is 'locl': it should be 'full', 'local'", "you mean 'local'?"),
    (["stack.kind=univ"], "model.stack.kind is 'univ': it should be 'standard'", "Did you mean 'universal'?"),
    (["norm.placement=sandwhich"], "it should be 'pre', 'post', 'sandwich' or 'rezero'.", "Did you mean 'sandwich'?"),
    (["position.kind=???"], "model.position.kind is '???': it should be", "Use one of these."),
    (["position=rope"], "model.position is 'rope', but should be", "example --set model.position.kind=rope."),
    (["position.kind=t5", "position.n_bucket=8"], "position.n_bucket is an unknown key", "'model.position.n_buckets'?"),
    (["attention.windw=8"], "model.attention.windw is an unknown key.", "Did you mean 'model.attention.window'?"),
    (["stack.kind=universal", "stack.n_step=2"], "model.stack.n_step is an unknown key.", "'model.stack.n_steps'?"),
    (["position.knd=rope"], "model.position.knd is an unknown key.", "Did you mean 'model.position.kind'?"),
    (
        ["attention.window=8"],
        "model.attention.window belongs to local, but model.attention.kind is 'full'.",
        "Set model.attention.kind to local, or leave model.attention.window out.",
    ),
    (
        ["position.kind=none", "position.n_buckets=8"],
        "model.position.n_buckets belongs to t5 and contextual-1 and contextual-2, but",
        "Set model.position.kind to t5 or contextual-1 or contextual-2, or leave",
    ),
    (["attention.kind=lsh", "position.kind=none", "attention.n_buckets=x"], "attention.n_buckets is 'x'", "Change"),
    (["stack.act=true"], "model.stack.act belongs to universal", "Set model.stack.kind to universal, or leave"),
]  # fmt: skip


def typed(overrides):
    sets = [part for override in overrides for part in ("--set", f"model.{override}")]
    return ["train", "corpus.txt", "--preset", "tiny", *sets]


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("overrides", "message", "remedy"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_refusal_gives_the_reason_and_the_legal_choices(overrides, message, remedy, run):
    done = run(*typed(overrides))
    assert (done.code, done.out) == (2, b"")
    first, second = done.err.rstrip("\n").split("\n")
    assert first.startswith("xlcli: ")
    assert message in first
    assert remedy in second


def test_dropout_of_linear_attention_can_be_put_right(run):
    chosen = typed([LINEAR, "position.kind=rope"])
    refused = run(*chosen, "--print-config", "--set=model.dropout=0.1")
    assert refused.code == 2
    assert "model.dropout.attention is 0.1" in refused.err
    rates = [f"--set=model.dropout.{name}=0.1" for name in ("residual", "feedforward")]
    assert run(*chosen, "--print-config", *rates).code == 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_refusal_names_exactly_the_positions_that_are_legal(attention, run):
    tried = {
        position: run(*typed([f"attention.kind={attention}", f"position.kind={position}"]), "--print-config")
        for position in POSITIONS
    }
    legal = [position for position, done in tried.items() if done.code == 0]
    for done in tried.values():
        assert done.code == 0 or f"kind to {', '.join(legal[:-1])} or {legal[-1]}, or model.attention" in done.err


def test_nothing_heavy_is_loaded_to_refuse():
    lines = [typed(overrides) for overrides, _, _ in REFUSED]
    code = (
        "import json, sys; from xlcli.cli.entry import main; "
        "print([main(line) for line in json.loads(sys.argv[1])], {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)], env=environment(), capture_output=True, timeout=60, check=True
    )
    assert done.stdout.decode() == f"{[2] * len(lines)} set()\n"
