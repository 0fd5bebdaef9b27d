"""Models that learn while they read, behind one interface: `Reader`."""

from __future__ import annotations

from xlcli.config import InferenceConfig
from xlcli.model.decoder import Decoder
from xlcli.model.lm import LanguageModel
from xlcli.online.base import FixedModel as FixedModel
from xlcli.online.base import Reader as Reader


def make_reader(
    network: LanguageModel, options: InferenceConfig, decoder: Decoder | LanguageModel | None = None
) -> Reader:
    """Reader of a text with these options.

    Args:
        network: The model.
        options: Wrappers and their settings.
        decoder: Faster `logits` of one token, if any.
    """
    return FixedModel(network, decoder)
