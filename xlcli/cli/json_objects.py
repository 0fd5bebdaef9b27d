"""Events as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.events import Event, Generated, Score, ScoredText, TokenLogprob, TokenScore
from xlcli.files import as_utf8

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_json(value: Any) -> str:
    """One line of JSON. NaN and infinity become null, bytes of file names that are not UTF-8 U+FFFD."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return _plain(str(value))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value


def fields(event: DataclassInstance) -> dict[str, Any]:
    """Name and value of each attribute of a dataclass."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {name: fields(value) if isinstance(value, ScoredText) else value for name, value in values.items()}


def event_object(event: Event) -> dict[str, Any]:
    """An event of training as a JSON object; its key `event` names the class."""
    return {"event": type(event).__name__.lower(), **fields(event)}


def score_object(score: Score) -> dict[str, Any]:
    """The JSON object of an evaluation."""
    bins = [
        {
            "from": each.start,
            "to": each.stop,
            "tokens": each.tokens,
            "bits_per_byte": each.bits_per_byte,
            "margin": each.margin,
        }
        for each in score.by_context
    ]
    return {**fields(score), "by_context": bins}


def token_object(token: TokenScore) -> dict[str, Any]:
    """The JSON object of one token."""
    return {"byte": token.byte, "text": token.text, "bits": token.bits}


def generated_object(event: Generated) -> dict[str, Any]:
    """The JSON object of a finished sample; `logprobs` only if they were asked for."""
    tree = {name: value for name, value in fields(event).items() if name not in ("sample", "logprobs")}
    return tree if event.logprobs is None else {**tree, "logprobs": [_logprob(token) for token in event.logprobs]}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    tree: dict[str, Any] = {"token": token.token, "text": token.text, "logprob": token.logprob}
    return {**tree, "best": [_logprob(other) for other in token.best]} if token.best else tree
