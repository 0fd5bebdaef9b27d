"""Stack kinds. A configuration class has the settings of its kind and the properties derived from them."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from xlcli.config.base import BaseConfig


class StandardStackConfig(BaseConfig):
    """`n_layers` blocks in sequence."""

    kind: Literal["standard"] = "standard"
    input_residual: bool = Field(
        default=False,
        description="Make the input of each block a x + b x0 with two learned scalars for each block, initially 1 and "
        "0, where x is the stream and x0 the embedding.",
    )


class UniversalStackConfig(BaseConfig):
    """Universal Transformer (Dehghani et al. 2019): the `n_layers` blocks are applied `n_steps` times."""

    kind: Literal["universal"] = "universal"
    n_steps: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=4, description="Number of times the blocks are applied."
    )
    time_signal: bool = Field(
        default=True,
        description="Add a sinusoid of the step, with the initial amplitude of the stream, to the input of every step.",
    )
    act: bool = Field(
        default=False,
        description="Adaptive computation time: a position halts when its halting probabilities sum to 1 - epsilon, or "
        "at the last step.",
    )
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.01, description="Rest of the halting probability."
    )
    ponder_weight: Annotated[float, Field(ge=0.0, le=1e3)] = Field(
        default=0.01, description="Weight of the ponder cost in the loss."
    )
    halt_bias: Annotated[float, Field(ge=-20.0, le=20.0)] = Field(
        default=-3.0,
        description="Initial bias of the halting logit; a negative value makes training start with many steps.",
    )


class ReversibleStackConfig(BaseConfig):
    """Two streams, from which the backward pass recomputes activations (Kitaev et al. 2020, section 3)."""

    kind: Literal["reversible"] = "reversible"


AnyStackConfig = Annotated[
    StandardStackConfig | UniversalStackConfig | ReversibleStackConfig, Field(discriminator="kind")
]
STACKS = {table.model_fields["kind"].default: table for table in get_args(get_args(AnyStackConfig)[0])}
"""Stack kind to configuration class."""
