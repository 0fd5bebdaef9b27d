"""Models that learn while they read, behind the interface of everything that predicts a text: `Scorer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from xlcli.config import InferenceConfig, OnlineConfig, validate
from xlcli.config.base import Option
from xlcli.config.inference import LearningConfig
from xlcli.errors import CheckpointError, ConfigError, DivergedError, StateError, XLError
from xlcli.model.decoder import Decoder
from xlcli.model.head import Readout
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.online.adaptation import AdaptiveModel, Optimizer, adapted_weights, head_tables, is_compatible
from xlcli.online.mixture import CachedModel
from xlcli.state import State
from xlcli.text.base import Tokenizer


class Scorer(Protocol):
    """A function (tokens, state) -> (prediction, state'), as `LanguageModel`. Wrappers keep their values in `State`.

    A prediction depends on earlier tokens only, not on the division of the text into calls.
    """

    def init_state(self, batch: int, *args: Any, **settings: Any) -> State:
        """State before the first token; arguments as for `LanguageModel.init_state`."""

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        """Surprisal in nats of each target (b n) after its token, the last n of tokens (b t), and the new state.

        Every target is scored before anything is learned from it. `readout`: what to keep of its prediction.
        """

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits or log-probabilities (b v) of the next token after tokens (b t), and the new state.

        Nothing is learned about the next tokens of `tokens`: that is what `score` is for.
        """

    def reset(self, state: State) -> State:
        """State with empty memory at the beginning of a text. What was learned remains."""


SETTINGS: Mapping[str, set[str]] = {  # settings of the values of `State.online`
    "adaptation": {"adapt_block", "adapt_lr", "adapt_decay", "adapt_weights"},
    "cache": {"context_cache"},
}
_REMEDY = "Start without this state."


def make_scorer(
    network: LanguageModel, tokenizer: Tokenizer, learning: LearningConfig, decoder: Decoder | None = None
) -> Scorer:
    """Wraps a network so that it learns from the text it reads, by adapted weights or a cache, as `learning` says.

    The rates in `learning` must be set. If nothing is learned it returns the network itself. A `decoder` computes the
    `logits` of one token faster, and then nothing but such `logits` may be called.
    """
    scorer: Any = network if decoder is None else decoder
    step = 1  # number of tokens between two changes of what the cache corrects
    if learning.adapt:
        step, settings = learning.adapt_block, learning.model_dump(include=SETTINGS["adaptation"])
        scorer = AdaptiveModel(network, _optimizer(network, learning), settings, decodes=decoder is not None)
    if learning.context_cache is not None:
        # The cache is outside: it corrects the predictions of the adapted weights.
        settings = learning.model_dump(include=SETTINGS["cache"])
        scorer = CachedModel(scorer, settings, tokenizer.line_ends, step)
    return scorer  # type: ignore[no-any-return]


def not_finite(model: str, options: InferenceConfig) -> XLError:
    """Error of a prediction that is not finite, by the model of this name."""
    if options.learning.adapt:
        problem = f"adaptation diverged: the adapted weights of model {model} give no finite score."
        return DivergedError(problem, "Use a smaller adapt_lr.")
    return CheckpointError(f"model {model} gives no finite score.", "Its weights are damaged.")


def continued(network: LanguageModel, options: InferenceConfig, state: State, dtype: torch.dtype) -> InferenceConfig:
    """Completes the options for reading on from a saved state: what the user left open becomes as it was saved.

    `dtype` is the type of matrix products. `StateError` if the user has set something that contradicts the state, if
    it holds several texts, or if what it has learned does not fit the model.
    """
    if state.batch_size != 1:
        raise StateError(f"the state holds {state.batch_size} texts, not one.", _REMEDY)
    learned: dict[str, Any] = {}
    for field, value in state.online.items():
        is_complete = value.settings.keys() == SETTINGS[field] and None not in value.settings.values()
        if not is_complete:
            raise StateError(f"the state is damaged: it lacks settings of its {field}.", _REMEDY)
        learned |= value.settings
    switches = {"adapt": state.adaptation is not None, "context_cache": learned.get("context_cache")}

    # What the user has set must be as saved; what is open becomes as saved.
    chosen = options.model_dump(include=options.model_fields_set & OnlineConfig.model_fields.keys())
    computed_in_16_bits = state.memory_dtype == "bfloat16" and dtype != torch.float32
    if chosen.get("memory_dtype") == "float32" and computed_in_16_bits:
        chosen["memory_dtype"] = "auto"  # keys and values were not rounded
    for name, saved in (network.inference_settings(state) | learned | switches).items():
        setting = chosen.get(name)
        is_open = setting is None or setting is False or setting == "auto"
        if is_open or setting == saved:
            continue
        flag = _spelling(name)
        was_switched_off = not saved and name in switches
        if was_switched_off:
            raise StateError(f"the state was saved without {flag}.", f"Leave out {flag}, or start without this state.")
        raise StateError(f"the state was saved with {flag} {saved}, but {flag} is {setting}.", f"Leave out {flag}.")
    try:
        options = validate(OnlineConfig, chosen | learned | {"adapt": switches["adapt"]})
    except ConfigError as error:
        raise StateError(f"the state is damaged: {error.message}", _REMEDY) from None

    # What was learned must fit the model.
    if state.adaptation is not None:
        learning = options.learning
        if not is_compatible(network, _optimizer(network, learning), learning.adapt_block, state):
            raise StateError("the adapted weights of the state do not fit the model.", _REMEDY)
    if state.cache is not None and not state.cache.fits(network.config.vocab_size):
        raise StateError("the context cache of the state does not fit the model.", _REMEDY)
    return options


def _spelling(name: str) -> str:
    """A setting as the user writes it: its option, else its name."""
    for part in OnlineConfig.model_fields[name].metadata:
        if isinstance(part, Option):
            return f"--{name.replace('_', '-')}"
    return name


def _optimizer(network: LanguageModel, learning: LearningConfig) -> Optimizer:
    assert learning.adapt_lr is not None
    names = adapted_weights(network, learning.adapt_weights)
    return Optimizer(names, learning.adapt_lr, learning.adapt_decay, head_tables(network))
