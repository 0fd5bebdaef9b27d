"""Illegal models are refused in one sentence with the legal choices, before torch or numpy is loaded.

`messages.txt` has a refusal of each kind in full; here are other values and keys.
"""

import re
import sys

import pytest

from xlcli.config import ATTENTIONS, POSITIONS

LINEAR = "attention.kind=linear"
FOR_LINEAR = "none, sinusoidal, learned, axial or rope"
REFUSED = [
    *(
        ([LINEAR, f"position.kind={kind}"], f"'{kind}'", FOR_LINEAR)
        for kind in ("xl", "t5", "alibi", "shaw", "contextual-1", "contextual-2")
    ),
    (["position.kind=rope", "position.placement=embedding", "dim=9", "attention.n_heads=1"], "model.dim", "even"),
    (["position.kind=sinusoidal", "dim=9", "attention.n_heads=1"], "model.dim", "even"),
    *(
        (
            [f"position.kind={kind}", "position.max_distance=63"],
            "model.position.max_distance",
            "buckets",
        )
        for kind in ("contextual-1", "contextual-2")
    ),
    (["position.kind=axial", "position.dims=[3, 4]"], "[3, 4]", "equal"),
    (["position.kind=axial", "position.dims=[64]"], "[64, 64]", "one"),
    (["embedding.div_val=4"], "model.embedding.div_val", "model.embedding.cutoffs"),
    (["embedding.cutoffs=20"], "model.embedding.cutoffs", "--set model.embedding.cutoffs=[20]"),
    (["position.kind=roep"], "'roep'", "'rope'?"),
    (["stack.kind=univ"], "'univ'", "'universal'?"),
    (["norm.placement=sandwhich"], "'rezero'", "'sandwich'?"),
    (["position.kind=???"], "'???'", ""),
    (["position.kind=t5", "position.n_bucket=8"], "position.n_bucket", "'model.position.n_buckets'?"),
    (["stack.kind=universal", "stack.n_step=2"], "model.stack.n_step", "'model.stack.n_steps'?"),
    (["position.knd=rope"], "model.position.knd", "'model.position.kind'?"),
    (["position.kind=none", "position.n_buckets=8"], "model.position.n_buckets", "contextual-2"),
    (["attention.kind=lsh", "position.kind=none", "attention.n_buckets=x"], "attention.n_buckets", ""),
    (["attention.kind=lsh", "position.kind=rope", "zero_memory=true"], "model.zero_memory", "full or local"),
]  # fmt: skip


def typed(overrides):
    sets = [part for override in overrides for part in ("--set", f"model.{override}")]
    return ["train", "corpus.txt", "--preset", "tiny", *sets]


@pytest.fixture
def without_numpy(monkeypatch):
    """Makes every import of numpy fail."""
    monkeypatch.setitem(sys.modules, "numpy", None)


@pytest.mark.usefixtures("without_torch", "without_numpy")
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
    assert "model.dropout.attention" in refused.err
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
        assert done.code == 0 or set(legal) == set(POSITIONS) & set(re.findall(r"[\w-]+", done.err.split("\n")[1]))
