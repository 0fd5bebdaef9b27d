"""Toy models that are ready for use, and a slow reference for the score of a text."""

import functools
import math
from pathlib import Path

import foreign
import torch

from xlcli import config
from xlcli.model.build import build_model
from xlcli.runtime import Runtime
from xlcli.store.folder import LoadedModel
from xlcli.text.foreign import IdsTokenizer
from xlcli.text.tokenizers import TOKENIZERS

RUNTIME = Runtime(torch.device("cpu"), torch.float32, 1)
PROSE = (
    "The quick brown fox jumps over the lazy dog.\nThe dog, being lazy, does not mind.\n\n"
    "  Indented: a line with  two blanks, a tab\there, and na\u00efve caf\u00e9 \u4e16\u754c \U0001f98a.\n"
    "She said that the fox and the dog were the best of friends in the end.\n"
) * 2


@functools.cache
def _tokenizer(kind):
    if kind == "ids":
        return IdsTokenizer(90, 3)
    if kind == "incomplete":
        return foreign.lacking(foreign.MISSING)[0]
    if kind in foreign.LOSSLESS:
        return foreign.ours(foreign.trained(kind))
    return TOKENIZERS[kind].train([PROSE.encode()], {"bytes": None, "sentencepiece": 400, "words": None}[kind])


VARIANTS = {
    "local": {"attention": {"kind": "local", "n_heads": 2, "window": 5}, "position": {"kind": "rope"}},
    "linear": {"attention": {"kind": "linear", "n_heads": 2, "n_features": 16}, "position": {"kind": "rope"}},
    "lsh": {
        "attention": {"kind": "lsh", "n_heads": 2, "n_buckets": 4, "bucket_size": 3, "n_hashes": 2},
        "position": {"kind": "sinusoidal"},
    },
    "learned": {"position": {"kind": "learned", "max_len": 50}},
    "axial": {"position": {"kind": "axial", "shape": [7, 9], "placement": "layers"}},
    "universal": {"stack": {"kind": "universal", "n_steps": 3}, "position": {"kind": "t5"}, "n_layers": 1},
    "adaptive": {"stack": {"kind": "universal", "n_steps": 3, "act": True, "halt_bias": 0.0}, "n_layers": 1},
    "reversible": {"stack": {"kind": "reversible"}, "position": {"kind": "shaw"}},
    "sinks": {"position": {"kind": "rope", "clamp_len": 9, "n_sinks": 3}},
    "zeros": {"zero_memory": True, "norm": {"kind": "layer"}, "bias": True},
}
"""Changes of the table `model`, one for each different way of reading text."""
SLIDING = {"position": {"kind": "learned", "max_len": 8, "overflow": "slide"}}
"""Such changes for a model that reads long text in overlapping windows by default."""


def toy(
    kind="bytes",
    *,
    mem_len=9,
    segment_len=8,
    n_layers=2,
    dtype=torch.float64,
    folder=Path("toy"),
    seed=0,
    variant=None,
    n_steps=None,
):
    """Random model with the tokenizer `kind` and weights large enough that errors are visible."""
    tokenizer = _tokenizer(kind)
    tree = {
        "model": {
            "vocab_size": tokenizer.vocab_size, "dim": 16, "n_layers": n_layers,
            "attention": {"kind": "full", "n_heads": 2}, "position": {"kind": "xl", "n_features": 8},
        },
        "train": {"mem_len": mem_len, "segment_len": segment_len},
    }  # fmt: skip
    settings = config.make(tree, {"model": SLIDING if variant == "sliding" else VARIANTS[variant]} if variant else {})
    settings = settings.model_copy(update={"model": settings.model.for_inference(n_steps)})
    generator = torch.Generator().manual_seed(seed)
    network = build_model(settings.model, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    network = network.to(dtype).eval()
    prints = {"config": "c", "weights": "w", "tokenizer": tokenizer.fingerprint}
    return LoadedModel(folder, "toy", settings, tokenizer, network, {}, prints)


def slow_bits(model, text, *, mem_len=None, segment_len=None, memory_dtype="float32"):
    """Surprisal of every token of `text` in bits, each from a new state that reads all earlier tokens in one call."""
    train = model.config.train
    mem_len = train.mem_len if mem_len is None else mem_len
    segment_len = segment_len or train.segment_len
    ids = model.tokenizer.encode(text).tolist()
    before = [model.tokenizer.start_id, *ids]
    out = []
    with torch.inference_mode():
        for i, target in enumerate(ids):
            state = model.network.init_state(1, mem_len=mem_len, segment_len=segment_len, memory_dtype=memory_dtype)
            logits, _ = model.network.logits(torch.tensor([before[: i + 1]]), state)
            out.append(-logits[0].log_softmax(-1)[target].item() / math.log(2))
    return out


@functools.cache
def prose_bits(kind, mem_len):
    """`slow_bits` of the prose."""
    return slow_bits(toy(kind), PROSE.encode(), mem_len=mem_len)
