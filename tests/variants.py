"""Every legal combination of what a model may be made of, at toy size. A variant is tested by being in a registry."""

import itertools

import torch

from xlcli import config
from xlcli.config import ATTENTION_OFFERS, POSITION_NEEDS
from xlcli.model.build import build_model

EXTRAS = {"xl": [{"n_features": 8}, {"n_features": 6, "tied": True}, {"n_features": 8, "clamp_len": 9}]}
"""Settings of a kind worth a combination of their own."""

AROUND = [
    {"norm": {"kind": "rms", "placement": "pre"}, "feedforward": {"kind": "swiglu"}},
    {
        "norm": {"kind": "layer", "placement": "post"},
        "feedforward": {"kind": "relu"},
        "bias": True,
        "embedding": {"scaled": True},
    },
    {"norm": {"kind": "layer", "placement": "pre"}, "feedforward": {"kind": "geglu"}, "embedding": {"tied": False}},
    {"norm": {"kind": "rms", "placement": "post"}, "feedforward": {"kind": "gelu"}},
]
"""What stands around attention; each entry is crossed with every attention and position."""


def _combinations():
    for attention, offers in ATTENTION_OFFERS.items():
        for position, needs in POSITION_NEEDS.items():
            if needs <= offers:
                for extra, around in itertools.product(EXTRAS.get(position, [{}]), AROUND):
                    name = "-".join([
                        attention, position, *(f"{k}{v}" for k, v in extra.items()),
                        around["norm"]["kind"] + around["norm"]["placement"], around["feedforward"]["kind"],
                    ])  # fmt: skip
                    yield name, {"attention": {"kind": attention}, "position": {"kind": position, **extra}, **around}


COMBINATIONS = dict(_combinations())
"""Name to the tables under `model`."""

VOCAB = 31


def make(name, *, dtype=torch.float64, seed=0, dropout=0.0, n_layers=2):
    """A toy model of this combination whose weights are large enough that mistakes show."""
    tree = {"vocab_size": VOCAB, "dim": 12, "n_layers": n_layers} | COMBINATIONS[name]
    tree["attention"] = {**tree["attention"], "n_heads": 2}
    tree["dropout"] = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), dropout)
    model = build_model(config.make({"model": tree}).model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model.to(dtype).eval()


def tokens(rows, length, seed=1):
    """Random tokens (rows, length)."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model, text, cuts, *, mem_len, span="uniform", memory="keyvalue", segment_len=13, state=None):
    """Nats of text[:, 1:] read in calls of the lengths in `cuts` (cycled), and the state at the end."""
    if state is None:
        state = model.start(len(text), mem_len=mem_len, segment_len=segment_len, span=span, memory=memory)
    out, at, sizes = [], 0, itertools.cycle(cuts)
    while at < text.shape[1] - 1:
        stop = min(at + next(sizes), text.shape[1] - 1)
        nll, state = model.nll(text[:, at:stop], text[:, at + 1 : stop + 1], state)
        out.append(nll)
        at = stop
    return torch.cat(out, 1), state
