"""Fit between a text and the vocabulary of a model: a warning if a run starts from the model, a hint if not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from xlcli.config import TextConfig
from xlcli.errors import CheckpointError
from xlcli.events import Notice
from xlcli.store.discover import bundled_models
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import read_record
from xlcli.store.origin import text_size
from xlcli.text.corpus import Part
from xlcli.text.tokenizers import load_tokenizer, n_unknown
from xlcli.text.tokens import TokenFile

MISFIT = 0.4
"""Bytes per token of a text, divided by those of the model's own text, below which the vocabulary fits badly."""
MANY_UNKNOWN = 0.1
"""Share of unknown words from which a vocabulary of words fits badly."""
ALIKE = 0.75
"""The same ratio from which a text counts as one of the same language and style."""
HINT_BELOW = 20_000_000
"""Bytes of training text below which a run on a CPU is told of the bundled model."""
SHORTEST = 1000
"""Bytes of text below which nothing is said, because their tokens say little."""
_SAMPLE_BYTES = 2**18
_REMEDY = "without --init, the run learns a vocabulary of its own"


def warnings(model: LoadedModel, tokens: TokenFile) -> Iterator[Notice]:
    """Warning if the vocabulary of `model` fits these tokens of the training text badly."""
    if model.tokenizer.kind == "words":
        if (share := n_unknown(tokens.ids) / len(tokens)) >= MANY_UNKNOWN:
            yield Notice(
                f"{100 * share:.0f} % of the words are not in the vocabulary of {model.name} and become <unk>; "
                f"{_REMEDY}",
                "warning",
            )
    elif tokens.n_bytes >= SHORTEST and (own := _bytes_per_token(model.record)):
        here = tokens.n_bytes / len(tokens)
        if here < MISFIT * own:
            yield Notice(
                f"the vocabulary of {model.name} fits this text badly: {here:.1f} bytes per token, {own:.1f} in its "
                f"own training text; {_REMEDY}",
                "warning",
            )


def hint(text: TextConfig, part: Part) -> Iterator[Notice]:
    """Hint that a run would learn faster from the bundled model, if its text is short and like that of the model."""
    if text.tokenizer != "auto" or text.vocab_size is not None or part.n_bytes >= HINT_BELOW:
        return
    sample = b"".join(part.sample(_SAMPLE_BYTES)).strip()
    if len(sample) < SHORTEST:
        return
    for model in bundled_models()[:1]:
        with suppress(CheckpointError):
            own = _bytes_per_token(read_record(model.folder))
            ids = load_tokenizer(model.folder).encode(sample)
            if own and len(sample) >= ALIKE * own * len(ids):
                yield Notice(
                    f"this text resembles that of the bundled model {model.name}: --init {model.name} would start "
                    "from its weights",
                    "hint",
                )


def _bytes_per_token(record: Mapping[str, Any]) -> float | None:
    """Mean size of a token in a model's training text, by its record."""
    size = text_size(record)
    return size[0] / size[1] if size else None
