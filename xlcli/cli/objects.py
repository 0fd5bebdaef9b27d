"""Events as JSON."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlcli import events
from xlcli.files import as_utf8


def to_json(value: Any) -> str:
    """One line of JSON. NaN and infinity become null, bytes of file names that are not UTF-8 U+FFFD."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, events.TokenLogprob):
        return _plain(fields(value) if value.best else fields(value, "best"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(fields(value))
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if isinstance(value, str | Path):
        return as_utf8(str(value))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value


def fields(event: Any, *without: str) -> dict[str, Any]:
    """Name and value of each attribute of a dataclass, but for some, and for those with `repr=False`, too."""
    values = {}
    for field in dataclasses.fields(event):
        if field.repr and field.name not in without:
            values[field.name] = getattr(event, field.name)
    return values


def text_object(event: events.LineScore | events.TokenScore) -> dict[str, Any]:
    """The JSON object of a token with its prediction, or of a line; bytes that are not UTF-8 are in `base64`."""
    text = event.text
    if isinstance(event, events.LineScore):
        text = text.removesuffix(b"\r\n").removesuffix(b"\n")
    tree = fields(event, "spans", "prediction") | {"text": text}
    try:
        text.decode()
    except UnicodeDecodeError:
        tree["base64"] = base64.b64encode(text).decode()
    if isinstance(event, events.TokenScore) and event.prediction is not None:
        tree |= event.prediction.columns
    return tree


def score_object(score: events.Score) -> dict[str, Any]:
    by_context = []
    for part in score.by_context:
        by_context.append({"from": part.start, "to": part.stop, **fields(part, "start", "stop")})
    return {**fields(score), "by_context": by_context}


def generated_object(event: events.Generated, *, without_prompt: bool) -> dict[str, Any]:
    """The JSON object of a finished sample; `logprobs` only if they were asked for."""
    left_out = ["sample"]
    if event.logprobs is None:
        left_out.append("logprobs")
    if without_prompt:
        left_out.append("prompt")
    return fields(event, *left_out)
