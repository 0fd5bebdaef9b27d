"""Initial values, all in one place.

embedding, head               normal(0, init_std)
matrices                      normal(0, init_std)
last matrix of each branch    normal(0, init_std / sqrt(2 depth)) when pre-norm (Radford et al. 2019)
XL biases u, v                normal(0, init_std)  (the original code's choice)
T5's biases                   zero
ReZero's alpha                zero
halting bias                  halt_bias
norm gains                    one
biases                        zero
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from xlcli.config import ModelConfig, UniversalStackConfig
from xlcli.model.attention.linear import LinearAttention
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel
from xlcli.model.stack import Block, Stack


def redraw(stack: Stack, layers: Collection[int], generator: torch.Generator | None = None) -> None:
    """Draws what linear and hashed attention leave to chance in these layers, whose memories then mean nothing."""
    for i, block in enumerate(stack.blocks):
        assert isinstance(block, Block)
        if i in layers and isinstance(block.attention, LinearAttention | LSHAttention):
            block.attention.redraw(generator)


def init_weights(model: LanguageModel, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Fills every parameter, in the order of their names, from one generator."""
    last_scale = (2 * config.depth) ** -0.5 if config.norm.placement == "pre" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner, _, kind = name.rpartition(".")
            if "norm" in owner or owner == "stack.final":
                parameter.fill_(1.0 if kind == "weight" else 0.0)
            elif owner == "stack.halt" and kind == "bias":
                assert isinstance(config.stack, UniversalStackConfig)
                parameter.fill_(config.stack.halt_bias)
            elif kind in ("bias", "alpha") or (config.position.kind == "t5" and owner.endswith("position.table")):
                parameter.zero_()
            elif owner.endswith(("attention.output", "feedforward.down")):
                parameter.normal_(0.0, config.init_std * last_scale, generator=generator)
            else:
                parameter.normal_(0.0, config.init_std, generator=generator)
    redraw(model.stack, range(config.n_layers), generator)
