"""Arguments of the Python interface: checked in one place, by the types in the signatures of its functions."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from xlcli.config import BaseConfig, EvalConfig, GenerateConfig, OnlineConfig, StreamConfig
from xlcli.errors import ConfigError
from xlcli.text.documents import rank_of_key

Text = str | bytes
Place = str | os.PathLike[str]  # path of a file or folder, or the name of a model
Source = Place | Sequence[Place]  # path of a file or folder, or several paths, read as one text
F = TypeVar("F", bound=Callable[..., Any])

LOAD_SETTINGS = frozenset({"n_steps", "n_hashes", "n_sinks", "clamp_len", "weight_dtype"})
"""Settings of `InferenceConfig` that are fixed when a model is loaded."""
OF_EVENTS = frozenset({"num_samples", "logprobs"})  # settings whose results are events rather than a text
CALLS: Mapping[str, Collection[str]] = {  # of each call; a setting of several is suggested with the first of them
    "xlcli.load(name, {}=...)": LOAD_SETTINGS,
    "model.score(text, {}=...)": OnlineConfig.model_fields,
    "model.generate(prompt, {}=...)": GenerateConfig.model_fields.keys() - OF_EVENTS,
    "xlcli.generate(model, prompt, {}=...)": OF_EVENTS,
    "xlcli.evaluate(model, path, {}=...)": EvalConfig.model_fields,
    "xlcli.stream(model, text, {}=...)": StreamConfig.model_fields,
}
NAMES_ELSEWHERE = {  # settings by the names that other programs, or people, have for them
    **dict.fromkeys(("max_length", "max_tokens", "length", "n"), "max_new_tokens"),
    "memory": "mem_len",
    "top": "top_p",
}
REMEDIES = {  # the right call, by the type of a parameter. Texts, paths and settings are checked where they are read
    "Model": "Load it: xlcli.load(name).",
    "TextState": "Pass what model.read(text) or model.load_state(path) gives.",
    "Callable": "Pass the name of a function, without parentheses.",
    "bool": "Pass {0}=True or {0}=False.",
    "int": "Pass a whole number: int({0}).",
}
_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # the other halves stand for bytes of a name


def public(section: type[BaseConfig] | None = None, hidden: Collection[str] = LOAD_SETTINGS) -> Callable[[F], F]:
    """Decorator of a function of the interface, whose `**settings` are those of `section`, if it has any.

    It raises `ConfigError` with the right call for an argument of another type, for one that needs its name, and for a
    setting that the function lacks. `help` lists the settings as keywords, but for those `hidden`.
    """
    settings = {} if section is None else section.model_fields

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function, eval_str=True)
        named = signature.parameters
        parameters = [parameter for parameter in named.values() if parameter.kind != parameter.VAR_KEYWORD]
        for name, field in settings.items():
            if name not in hidden:
                parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default))
        shown = signature.replace(parameters=parameters)
        keywords_only = [parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
        n_positional = len(parameters) - len(keywords_only)

        @wraps(function)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            if len(arguments) > n_positional and keywords_only:
                likely = "max_new_tokens" if "max_new_tokens" in keywords_only else keywords_only[0]
                remedy = f"Pass it by name, such as {likely}={arguments[n_positional]!r:.40}."
                raise ConfigError(f"{function.__name__} takes no such argument without its name.", remedy)
            given = dict(zip(named, arguments, strict=False)) | keywords
            for name, value in given.items():
                if name in named:
                    _check(value, name, named[name].annotation)
                elif settings and name not in shown.parameters and name not in LOAD_SETTINGS:
                    raise _unknown_setting(name, function.__name__, keywords_only)
            return function(*arguments, **keywords)

        checked.__signature__ = shown  # type: ignore[attr-defined]
        return checked

    return decorate


def _check(value: object, name: str, annotation: Any) -> None:
    """`ConfigError` if a value is not what `annotation` says, such as `X | None`; checks first types in `REMEDIES`."""
    allowed = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = tuple(get_origin(one) or one for one in allowed)  # `Callable` of `Callable[[], bool]`
    expected = getattr(types[0], "__name__", "")
    if expected not in REMEDIES:
        return
    is_bool_for_int = isinstance(value, bool) and bool not in types  # for Python a `bool` is an `int`
    if is_bool_for_int or not isinstance(value, types):
        raise ConfigError(f"{name} is not a {expected}, but {type(value).__name__}.", REMEDIES[expected].format(name))


def _unknown_setting(name: str, function: str, known: Sequence[str]) -> ConfigError:
    """The error for a setting that this function lacks: names the call that has it, or a similar one of the `known`."""
    problem = f"{function} has no setting {name}."
    for call, settings in CALLS.items():
        if name == "context" and name in settings:
            remedy = f"For a memory of so many tokens use mem_len; for a strict limit {call.format(name)}."
            return ConfigError(problem, remedy)
        if name in settings:
            return ConfigError(problem, f"Use {call.format(name)}.")
    similar = [key for key in known if key == NAMES_ELSEWHERE.get(name)]
    similar += [key for key in known if len(name) > 2 and (key.startswith(name) or name.startswith(key))]
    similar += difflib.get_close_matches(name, known, n=1)
    if similar:
        return ConfigError(problem, f"Did you mean '{similar[0]}'?")
    return ConfigError(problem, f"Settings of {function} are {', '.join(known)}.")


def paths(value: Any) -> list[str]:
    """The path, or the several paths, that were given as the argument `text`; `ConfigError` if one is no path."""
    if not is_several(value):
        return [path_of(value, "text")]
    return [path_of(path, "text") for path in value]


def path_of(value: object, name: str) -> str:
    """The path, or name of a model, that was given as this argument; `ConfigError` if it is of another type."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a str or pathlib.Path, not {type(value).__name__}.", "Pass a path or a name.")
    if _NO_PATH.search(value):
        raise ConfigError(f"{name} is {value!a}, which no path can be.", "Pass a path or a name.")
    return value


def _text_column(table: Any) -> str:
    """The column of a table that has the texts by its name, else the first one, as Python writes it."""
    names = [name for name in getattr(table, "columns", table) if isinstance(name, str)]
    return repr(min(names or ["text"], key=rank_of_key))


def is_several(text: object) -> bool:
    """True for a list of texts or another iterable; `ConfigError` for what has texts, but in no order or not alone."""
    if isinstance(text, Mapping) or hasattr(text, "columns"):  # of pandas, for example
        name = _text_column(text)
        remedy = f"Score one column, model.score(table[{name}]), or pass the path of its file, with text_field={name}."
        raise ConfigError("a table or dictionary is neither a text nor a path.", remedy)
    if isinstance(text, set | frozenset):
        raise ConfigError("a set has no order.", "Pass a list: sorted(texts).")
    is_one_text = isinstance(text, str | bytes | bytearray | memoryview)
    is_file = hasattr(text, "readline")
    is_number_of_numpy = getattr(text, "ndim", 1) == 0  # an array without axes calls itself iterable
    if is_one_text or is_file or is_number_of_numpy:
        return False
    return isinstance(text, Iterable)


def encoded_texts(texts: Iterable[object]) -> Iterator[bytes]:
    """The bytes of each text; `ConfigError` says which one is none."""
    for number, text in enumerate(texts, 1):
        try:
            yield encoded(text)
        except ConfigError as error:
            raise ConfigError(f"text {number}: {error.message}", error.remedy) from None


def encoded(text: object) -> bytes:
    """The bytes of a text; `ConfigError` for what is none, as an open file."""
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            reason = f"character {error.start + 1} of the text, {half}, is half a character."
            raise ConfigError(reason, "Pass text.encode('utf-8', 'replace').") from None
    if hasattr(text, "readline"):
        remedy = "Pass file.read(); for scores of its lines file.readlines() to score, or the file to xlcli.stream."
        raise ConfigError("an open file is no text.", remedy)
    if isinstance(text, os.PathLike):
        raise ConfigError("a path is no text.", "Pass path.read_text(), or score the file with xlcli.evaluate.")
    if isinstance(text, list | tuple):
        remedy = "Join words: ' '.join(words). For several prompts use xlcli.generate_prompts(model, prompts)."
        raise ConfigError(f"a {type(text).__name__} is no text.", remedy)
    remedy = "Convert numbers with str(); leave out rows without text, such as NaN or None."
    if isinstance(text, bytearray | memoryview):
        remedy = "Pass bytes(text)."
    raise ConfigError(f"a text is str or bytes, not {type(text).__name__}.", remedy)
