"""Every legal combination of the parts of a model, at toy size. A kind is tested as soon as it is in a registry."""

import functools
import itertools

import pytest
import torch

from xlcli import config
from xlcli.config import ATTENTIONS, POSITIONS
from xlcli.errors import ConfigError
from xlcli.model.build import build_model

VOCAB = 31

SETTINGS = {
    "sinusoidal": [{}, {"placement": "qk"}],
    "learned": [{"max_len": 23}, {"max_len": 23, "placement": "qk", "shared": True}],
    "axial": [{"shape": [3, 7]}, {"shape": [7, 2, 2], "placement": "layers", "dims": [5, 4, 3]}],
    "rope": [
        {},
        {
            "layout": "interleaved",
            "clamp_len": 9,
            "scaling": {"kind": "llama3", "factor": 3.0, "original_len": 40, "high_freq_factor": 5.0},
        },
        {"placement": "embedding", "scaling": {"kind": "linear", "factor": 2.0}},
        {"rotary_dim": 2, "clamp_len": 9},
        {"local_base": 40.0, "clamp_len": 9, "scaling": {"kind": "linear", "factor": 2.0}},
    ],
    "t5": [{"n_buckets": 6, "max_distance": 20}, {"n_buckets": 6, "max_distance": 20, "shared": False}],
    "shaw": [{"max_distance": 9}],
    "xl": [{"n_features": 8}, {"n_features": 6, "tied": True}, {"n_features": 8, "clamp_len": 9}],
    "contextual-1": [{"n_buckets": 6, "max_distance": 20, "shared": True}],
    "contextual-2": [{"n_buckets": 6, "max_distance": 20}],
    "local": [{"window": 5, "qk_norm": True, "n_kv_heads": 1, "bias": "qkv"}],
    "linear": [{"n_features": 16}],
    "lsh": [
        {"n_heads": 3, "n_buckets": 1, "bucket_size": 64, "n_hashes": 1},
        {"n_buckets": [2, 4], "bucket_size": 4, "n_hashes": 4, "query_scale": 2.0},
    ],
    "mixed": [
        {"layers": [{"kind": "local", "window": 5}, {"kind": "lsh", "n_buckets": 4, "bucket_size": 4, "n_hashes": 2}]},
        {"n_kv_heads": 1, "layers": [{"kind": "full", "bias": "all"}, {"kind": "local", "window": 5}]},
        {"layers": ["full", {"kind": "linear", "n_features": 16}]},
    ],
}
"""Settings to test for each kind, one combination each; other kinds are tested with their defaults."""

AROUND = [
    {
        "norm": {"kind": "rms", "placement": "pre"},
        "feedforward": {"kind": "swiglu"},
        "embedding": {"n_bigrams": 57, "per_layer": True},
        "stack": {"kind": "standard", "input_residual": True},
        "logit_softcap": 8.0,
        "zero_init": True,
    },
    {
        "norm": {"kind": "layer", "placement": "post"},
        "feedforward": {"kind": "relu", "chunk_len": 4},
        "bias": True,
        "embedding": {"scaled": True, "cutoffs": [9, 20], "div_val": 2, "inner_dim": 8, "tied_projections": "rest"},
    },
    {
        "norm": {"kind": "layer", "placement": "sandwich"},
        "feedforward": {"kind": "relu2"},
        "embedding": {"tied": False, "inner_dim": 6},
        "stack": {"kind": "universal", "n_steps": 2},
    },
    {
        "norm": {"kind": "rms", "placement": "rezero"},
        "feedforward": {"kind": "gelu"},
        "loss_chunk": 3,
        "n_layers": 1,
        "stack": {"kind": "universal", "n_steps": 3, "act": True, "halt_bias": 0.0, "epsilon": 0.1},
    },
    {
        "norm": {"kind": "layer", "placement": "pre"},
        "feedforward": {"kind": "geglu"},
        "embedding": {"per_layer": True},
        "stack": {"kind": "reversible"},
    },
    {
        "norm": {"kind": "layer", "placement": "pre", "epsilon": 0.01, "final": False},
        "feedforward": {"kind": "gelu-tanh"},
        "embedding": {"norm": True},
        "bias": True,
    },
    {
        "norm": {"kind": "layer", "placement": "parallel"},
        "feedforward": {"kind": "gelu"},
        "embedding": {"tied": False, "per_layer": True},
        "bias": True,
    },
    {
        "norm": {"kind": "rms", "placement": "sandwich"},
        "feedforward": {"kind": "geglu-tanh"},
        "embedding": {"norm": True, "scaled": True, "n_bigrams": 57},
    },
]
"""Settings of the other parts; each entry is combined with every attention and position."""


def _combinations():
    for attention, position in itertools.product(ATTENTIONS, POSITIONS):
        choices = [SETTINGS.get(attention, [{}]), SETTINGS.get(position, [{}]), AROUND]
        for (n, of_attention), (i, of_position), (k, around) in itertools.product(*map(enumerate, choices)):
            parts = {"attention": {"kind": attention, "n_heads": 2, **of_attention}}
            parts["position"] = {"kind": position, **of_position}
            tree = {"vocab_size": VOCAB, "dim": 12, **parts, **around}
            try:
                config.make({"model": tree})
            except ConfigError:
                continue
            yield f"{attention}{n or ''}-{position}-{i}-{around['norm']['placement']}-{k}", tree


COMBINATIONS = dict(_combinations())
"""Name of a combination to its table `model`."""
ZEROS = ["full-xl-1-post-1", "full-xl-2-pre-4", "full-rope-1-sandwich-2", "full-sinusoidal-1-pre-4", "local-xl-0-pre-4"]
COMBINATIONS |= {f"zeros-{name}": COMBINATIONS[name] | {"zero_memory": True} for name in ZEROS}
PARALLEL = ["full-rope-3-sandwich-2", "full-xl-0-rezero-3", "mixed1-rope-3-pre-0"]
COMBINATIONS |= {
    "both-{}-parallel-{}".format(*name.rsplit("-", 2)[::2]): COMBINATIONS[name]
    | {"norm": {"kind": "rms", "placement": "parallel"}}
    for name in PARALLEL
}
"""Both branches read the same input, also in stacks of several and of adaptive steps."""
SINKS = {"full-rope-1-pre-0": 5, "full-rope-1-sandwich-2": 9, "full-rope-1-rezero-3": 3, "mixed1-rope-1-pre-0": 6}
"""Combinations to add with sinks, and their largest distances, below and above the lengths of memories."""
SINK = {"layout": "interleaved", "n_sinks": 3}
COMBINATIONS |= {
    f"sinks{clamp_len}-{name}": COMBINATIONS[name] | {"position": {"kind": "rope", "clamp_len": clamp_len, **SINK}}
    for name, clamp_len in SINKS.items()
}
_PART = {"kind": "rope", "clamp_len": 4, "rotary_dim": 4, **SINK}
COMBINATIONS["sinks4-full-rope-3-parallel-6"] = COMBINATIONS["full-rope-3-parallel-6"] | {"position": _PART}
LOCAL_BASE = {"kind": "rope", "local_base": 40.0, "clamp_len": 9, "scaling": {"kind": "linear", "factor": 2.0}}
COMBINATIONS["sinks9-mixed1-rope-local-0"] = COMBINATIONS["mixed1-rope-1-pre-0"] | {"position": LOCAL_BASE | SINK}
"""As in Gemma 3."""


def _in_turn():
    choices = {}
    for name in COMBINATIONS:
        choices.setdefault(name.rsplit("-", 2)[0], []).append(name)
    return [names[i % len(names)] for i, names in enumerate(choices.values())]


IN_TURN = _in_turn()
"""Every attention, position and setting once, with the entries of `AROUND` in turn.

The other combinations are tested by `pytest -m exhaustive`."""


def thinned(names, kept):
    """Parameters of a test: the names in `kept`, and the others for `pytest -m exhaustive`."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def _rounded():
    names = [
        name for name in IN_TURN if config.make({"model": COMBINATIONS[name] | {"n_layers": 2}}).model.rounds_memory
    ]
    return [f"{name}+{('bfloat16', 'int8')[i % 2]}" for i, name in enumerate(names[::3])]


ROUNDED = _rounded()
"""A third of the combinations whose memory can be rounded, in each number type in turn: `NAME+DTYPE`."""


def table(name):
    """The table `model` of a combination, rounded or not."""
    return COMBINATIONS[name.partition("+")[0]]


def has_sinks(name):
    """Whether the first tokens of a text are kept, which a memory of layer inputs does not do."""
    return "n_sinks" in table(name)["position"]


def is_rounded(name):
    """Whether the memory of a combination is rounded."""
    return name in ROUNDED


ALPHA = 0.3
"""Factor of ReZero; larger ones let activations grow."""


def attentions(name, n_layers=2):
    """Attention of each of `n_layers` layers of this combination."""
    return config.make({"model": table(name) | {"n_layers": n_layers}}).model.attentions


def unbounded(name, n_layers=2):
    """Whether some layer has an unbounded memory, on which the memory length has no effect."""
    return any(layer.effective_mem_len(1) is None for layer in attentions(name, n_layers))


def window(name, mem_len):
    """Number of earlier tokens that the first layer of this combination can attend to; `mem_len` if unbounded."""
    effective = attentions(name, 1)[0].effective_mem_len(mem_len)
    return mem_len if effective is None else effective


def pairs(name):
    """1 if the vector of a token depends on the token before it, which extends all windows by one token, else 0."""
    return int("n_bigrams" in table(name).get("embedding", {}))


def has_gaps(name, n_layers=2):
    """Whether a given token may be invisible within the reach of a layer, as one of another hash bucket is."""
    return any(getattr(layer, "n_buckets", 1) != 1 for layer in attentions(name, n_layers))


def adaptive(name):
    """Whether the combination uses adaptive computation time."""
    return table(name).get("stack", {}).get("act", False)


def order_matters(name):
    """Whether the combination has a position encoding, vectors of pairs of successive tokens, or gaps by distance."""
    return table(name)["position"]["kind"] != "none" or pairs(name) > 0


def make(name, *, dtype=torch.float64, seed=0, dropout=0.0, n_layers=None, n_steps=None, head_dim=None):
    """Toy model of this combination, with weights large enough that errors are visible."""
    tree = {"n_layers": 2} | table(name)
    if n_layers is not None:
        tree["n_layers"] = n_layers
    if n_steps is not None and tree.get("stack", {}).get("kind") == "universal":
        tree["stack"] = tree["stack"] | {"n_steps": n_steps}
    if head_dim is not None:
        tree["attention"] = tree["attention"] | {"head_dim": head_dim}
    rates = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), dropout)
    if unbounded(name):
        rates["attention"] = 0.0
    model = build_model(config.make({"model": tree | {"dropout": rates}}).model, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
            if not parameter.ndim:
                parameter.fill_(ALPHA)
    if is_rounded(name):
        model.init_state = functools.partial(model.init_state, memory_dtype=name.partition("+")[2])
    return model.to(dtype).eval()


def tokens(rows, length, seed=1):
    """Random tokens (rows, length)."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model, text, cuts, *, mem_len=None, span="uniform", memory="keyvalue", segment_len=13, state=None):
    """Surprisal of text[:, 1:] in nats, read in calls of the lengths `cuts` (cycled), and the last state."""
    if state is None:
        state = model.init_state(len(text), mem_len=mem_len, segment_len=segment_len, span=span, memory=memory)
    out, at, sizes = [], 0, itertools.cycle(cuts)
    while at < text.shape[1] - 1:
        stop = min(at + next(sizes), text.shape[1] - 1)
        nll, state = model.score(text[:, at:stop], text[:, at + 1 : stop + 1], state)[:2]
        out.append(nll)
        at = stop
    return torch.cat(out, 1), state
