"""Stack kinds. A configuration class has the settings of its kind and the properties derived from them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from xlcli.config.base import BaseConfig, InvalidSettingError


class StackConfig(BaseConfig):
    """Base of every stack kind."""

    inference_settings: ClassVar[frozenset[str]] = frozenset()
    """Settings that may be changed at inference."""

    @property
    def n_repeats(self) -> int:
        """Number of times the blocks are applied."""
        return 1

    @property
    def halts_early(self) -> bool:
        """Whether a token may skip steps (adaptive computation time)."""
        return False

    @property
    def recomputes_activations(self) -> bool:
        """Whether the backward pass computes activations from the output of the stack."""
        return False

    def check(self, *, dim: int, norm_placement: str) -> None:
        """`InvalidSettingError` unless the stack is possible with this model width and placement of the norm."""


class StandardStackConfig(StackConfig):
    """`n_layers` blocks in sequence."""

    kind: Literal["standard"] = "standard"
    input_residual: bool = Field(
        default=False,
        description="Make the input of each block a x + b x0 with two learned scalars for each block, initially 1 and "
        "0, where x is the stream and x0 the embedding.",
    )


class UniversalStackConfig(StackConfig):
    """Universal Transformer (Dehghani et al. 2019): the `n_layers` blocks are applied `n_steps` times."""

    inference_settings: ClassVar[frozenset[str]] = frozenset({"n_steps"})

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

    @property
    def n_repeats(self) -> int:
        """`n_steps`."""
        return self.n_steps

    @property
    def halts_early(self) -> bool:
        """`act`."""
        return self.act

    def check(self, *, dim: int, norm_placement: str) -> None:
        """With a time signal the model width must be even."""
        if self.time_signal and dim % 2:
            raise InvalidSettingError(
                "model.dim",
                f"{dim} is odd, but the time signal consists of pairs",
                "Make it even or set model.stack.time_signal to false.",
            )


class ReversibleStackConfig(StackConfig):
    """Two streams, from which the backward pass recomputes activations (Kitaev et al. 2020, section 3)."""

    kind: Literal["reversible"] = "reversible"

    @property
    def recomputes_activations(self) -> bool:
        """True."""
        return True

    def check(self, *, dim: int, norm_placement: str) -> None:
        """The norm must not be `post`."""
        if norm_placement == "post":
            raise InvalidSettingError(
                "model.norm.placement",
                "'post' does not allow stack 'reversible' to reconstruct its inputs by subtraction",
                "Set model.norm.placement to pre, sandwich or rezero, or model.stack.kind to standard or universal.",
            )


AnyStackConfig = Annotated[
    StandardStackConfig | UniversalStackConfig | ReversibleStackConfig, Field(discriminator="kind")
]
STACKS = {table.model_fields["kind"].default: table for table in get_args(get_args(AnyStackConfig)[0])}
"""Stack kind to configuration class."""
