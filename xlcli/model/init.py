"""Initial values of parameters.

matrices, embedding, head     normal(0, init_std)
last matrix of each branch    normal(0, init_std / sqrt(2 depth)) with norm `pre` (Radford et al. 2019); 0 (`zero_init`)
XL biases u, v                normal(0, init_std), as in the original code
norm gains                    1
biases                        0
`initial_constants`           constants that a module declares, such as ReZero's alpha and the vectors of bigrams
"""

from __future__ import annotations

import torch
from torch import nn

from xlcli.config import ModelConfig
from xlcli.model.attention import Attention
from xlcli.model.embedding import BigramEmbedding
from xlcli.model.lm import LanguageModel
from xlcli.model.position import Position
from xlcli.model.residual import Residual
from xlcli.model.stack import Block, Stack


def init_weights(model: LanguageModel, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Fills all parameters in the order of `named_parameters`, then draws all random features."""
    last_scale = (2 * config.depth) ** -0.5 if config.norm.placement == "pre" else 1.0
    if config.zero_init:
        last_scale = 0.0
    last_matrices = {id(matrix) for block in model.stack.layers() for matrix in block.last_matrices}
    constants = _constants(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in constants:
                parameter.fill_(constants[id(parameter)])
            elif name.rpartition(".")[2] == "bias":
                parameter.zero_()
            else:
                std = config.init_std * (last_scale if id(parameter) in last_matrices else 1.0)
                parameter.normal_(0.0, std, generator=generator)
    model.stack.redraw(range(config.n_layers), generator)


def _constants(model: LanguageModel) -> dict[int, float]:
    """Initial value of each parameter that is not drawn, by its id."""
    constants = {}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            constants[id(module.weight)] = 1.0
        elif isinstance(module, Attention | BigramEmbedding | Block | Position | Residual | Stack):
            constants |= {id(module.get_parameter(name)): value for name, value in module.initial_constants.items()}
    return constants
