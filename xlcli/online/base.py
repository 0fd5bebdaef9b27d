"""Interface of everything that predicts a text: `FixedModel`, and wrappers that learn while they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from xlcli.config import MemoryDtype
from xlcli.model.decoder import Decoder
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.state import State


class Reader(Protocol):
    """A function (tokens, state) -> (prediction, state'), as `LanguageModel`. Wrappers keep their values in `State`.

    A prediction depends on earlier tokens only, not on the division of the text into calls.
    """

    def init_state(
        self,
        batch: int,
        *,
        mem_len: int,
        segment_len: int,
        span: Literal["uniform", "growing"] = "uniform",
        offsets: Sequence[int] | None = None,
        memory_dtype: MemoryDtype = "float32",
    ) -> State:
        """State before the first token; arguments as for `LanguageModel.init_state`."""

    def score(self, tokens: Tensor, targets: Tensor, state: State) -> ScoreOutput:
        """Surprisal in nats of each target (b n) after its token, the last n of tokens (b t), and the new state.

        Every target is scored before anything is learned from it.
        """

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits or log-probabilities (b v) of the next token after tokens (b t), and the new state.

        Nothing is learned about the next tokens of `tokens`: that is what `score` and `observe` are for.
        """

    def observe(self, targets: Tensor, state: State) -> State:
        """State after the targets (b) of the prediction that `logits` returned with this state are known.

        `logits` of one token, then `observe`, leave the state of `score`. Without it nothing is learned from a target,
        such as a sampled token.
        """

    def reset(self, state: State) -> State:
        """State with empty memory at the beginning of a text. What was learned remains."""


class FixedModel:
    """Reader with the trained weights.

    Args:
        network: The model.
        decoder: Faster `logits` of one token, if any.
    """

    def __init__(self, network: LanguageModel, decoder: Decoder | LanguageModel | None = None) -> None:
        self.init_state = network.init_state
        self.score = network.score
        self.reset = network.reset
        self.network = network
        self.decoder = decoder or network

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of the next token after tokens (b t), and the new state."""
        return (self.decoder if tokens.shape[1] == 1 else self.network).logits(tokens, state)

    def observe(self, targets: Tensor, state: State) -> State:
        """The state, unchanged."""
        return state
