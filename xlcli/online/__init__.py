"""Models that learn while they read, behind the interface of everything that predicts a text: `Reader`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from xlcli.config import InferenceConfig, MemoryDtype, OnlineConfig, validate
from xlcli.errors import CheckpointError, ConfigError, DivergedError, StateError, XLError
from xlcli.model.decoder import Decoder
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.online.adaptation import AdaptiveModel, Optimizer, adapted_weights, is_compatible
from xlcli.online.cache import CachedModel
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


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adaptation": {"adapt_block": 64, "adapt_lr": 6e-4, "adapt_decay": 0.003, "adapt_weights": "blocks"},
    "cache": {"context_cache": None},
}
"""Default settings of the values of `State.online`."""
_ANEW = "start without --state-in"


def make_reader(
    network: LanguageModel, options: InferenceConfig, decoder: Decoder | LanguageModel | None = None
) -> Reader:
    """Reader of a text with these options.

    Args:
        network: The model.
        options: Wrappers and their settings.
        decoder: Faster `logits` of one token, if any.
    """
    reader: Reader = FixedModel(network, decoder)
    if not isinstance(options, OnlineConfig):
        return reader
    if options.adapt:
        settings = _settings(options, "adaptation")
        optimizer, decodes = _optimizer(network, settings), isinstance(decoder, Decoder)
        reader = AdaptiveModel(network, optimizer, block=settings["adapt_block"], settings=settings, decodes=decodes)
    return reader if options.context_cache is None else CachedModel(reader, _settings(options, "cache"))


def check_precision(options: InferenceConfig, dtype: torch.dtype) -> None:
    """`ConfigError` if the model cannot learn in this number type of matrix products."""
    if isinstance(options, OnlineConfig) and options.adapt and dtype == torch.float16:
        raise ConfigError("--adapt has no gradients in float16.", "Set runtime.dtype to float32 or bfloat16.")


def not_finite(model: str, options: InferenceConfig) -> XLError:
    """Error of a prediction that is not finite, by the model of this name."""
    if isinstance(options, OnlineConfig) and options.adapt:
        return DivergedError(
            f"adaptation diverged: the adapted weights of model {model} give no finite score.",
            "Use a smaller adapt_lr.",
        )
    return CheckpointError(f"model {model} gives no finite score.", "Its weights are damaged.")


def continued(network: LanguageModel, options: InferenceConfig, state: State) -> InferenceConfig:
    """Options with the settings of a saved state where they are open.

    Raises:
        StateError: The state was saved with others, or learned values do not fit the model.
    """
    if not isinstance(options, OnlineConfig):
        options = validate(OnlineConfig, options.model_dump())
    changes: dict[str, Any] = {}
    flags = {"adaptation": ("--adapt", options.adapt), "cache": ("--context-cache", options.context_cache is not None)}
    for field, (flag, is_on) in flags.items():
        value = state.online.get(field)
        if value is None and is_on:
            raise StateError(f"the state was saved without {flag}.", f"Leave out {flag}, or {_ANEW}.")
        if value is None:
            continue
        if value.settings.keys() != DEFAULTS[field].keys():
            raise StateError(f"the state is damaged: it lacks settings of {flag}.", f"{_ANEW.capitalize()}.")
        if field == "cache":
            flag = f"{flag} {value.settings['context_cache']}"
        if not is_on:
            raise StateError(f"the state was saved with {flag}.", f"Add {flag}, or {_ANEW}.")
        for name, saved in value.settings.items():
            given = getattr(options, name)
            if given not in (None, saved):
                remedy = f"Give {flag}" if field == "cache" else f"Leave out {name}"
                raise StateError(
                    f"the state was saved with {name} {saved}, but {name} is {given}.", f"{remedy}, or {_ANEW}."
                )
            changes[name] = saved
    try:
        options = validate(type(options), options.model_dump() | changes)
    except ConfigError as error:
        raise StateError(f"the state is damaged: {error.message}", "Start without --state-in.") from None
    if state.adaptation is not None:
        settings = _settings(options, "adaptation")
        if not is_compatible(network, _optimizer(network, settings), settings["adapt_block"], state):
            raise StateError("the adapted weights of the state do not fit the model.", "Start without --state-in.")
    if state.cache is not None and not state.cache.fits(network.config.vocab_size):
        raise StateError("the context cache of the state does not fit the model.", "Start without --state-in.")
    return options


def _optimizer(network: LanguageModel, settings: Mapping[str, Any]) -> Optimizer:
    names = adapted_weights(network, settings["adapt_weights"])
    return Optimizer(names, settings["adapt_lr"], settings["adapt_decay"])


def _settings(options: OnlineConfig, field: str) -> dict[str, Any]:
    """Settings of the value in this field, with defaults where they are open."""
    given = {name: getattr(options, name) for name in DEFAULTS[field]}
    return {name: DEFAULTS[field][name] if value is None else value for name, value in given.items()}
