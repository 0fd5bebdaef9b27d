"""Preparation of a run: reading and splitting the text, a new tokenizer or the fit of a given one, tokenizing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from torch import Tensor

from xlcli import config as settings
from xlcli.config import Config, TextConfig, Tree
from xlcli.errors import CheckpointError, ConfigError, DataError, InvalidSettingError, plural_noun
from xlcli.events import PROGRESS_INTERVAL, Event, Notice, Progress, StoppedEarlyError
from xlcli.machine import available_bytes
from xlcli.ranks import SINGLE, Ranks
from xlcli.runtime import Runtime, make_runtime
from xlcli.store.discover import ModelSummary, bundled_models, find
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import read_config_file, read_record
from xlcli.store.origin import NEW, imported, origin_of, text_size
from xlcli.store.weights import weights
from xlcli.text.base import Tokenizer
from xlcli.text.corpus import Split, gather, split, warn_of_copies
from xlcli.text.formats import not_utf8
from xlcli.text.misreadings import conversion
from xlcli.text.oddities import Oddities
from xlcli.text.pretokenize import whole_characters
from xlcli.text.sources import InputFormat
from xlcli.text.tokenizers import SAMPLE_BYTES, TOKENIZERS, choose_tokenizer, load_tokenizer, n_unknown
from xlcli.text.tokens import TokenFile, sample_tokens, token_file
from xlcli.training import defaults, memory

SHORT_TEXT = 10_000  # bytes of training text below which a run with new weights warns
ODD_BYTES, ODD_SHARE = 2**20, 0.01  # maximum bytes of text searched for odd lines, and their least share to be named
DRY_RUN_BYTES = 2**19  # maximum bytes from which a dry run learns a vocabulary and estimates the number of tokens


@dataclass(frozen=True)
class Prepared:
    """Inputs of a training run."""

    config: Config
    runtime: Runtime
    preset: str  # name of its preset; empty if unknown
    origin: Tree  # description of the model that it starts from (`store.origin.INIT`); empty for new weights
    parts: Split
    tokenizer: Tokenizer
    train_ids: TokenFile
    valid_ids: TokenFile
    weights: Mapping[str, Tensor] | None = None  # weights of that model, if the run is new

    @property
    def n_train_tokens(self) -> int:
        """Number of training tokens; an estimate if `train_ids` are a sample, as in a dry run."""
        return len(self.train_ids) * self.parts.train.n_bytes // max(1, self.train_ids.n_bytes)

    @property
    def identity(self) -> dict[str, str]:
        """Hashes of texts, their documents and tokenizer, which must be equal when the run is resumed."""
        by_document = self.config.train.reset_on_document
        return {
            "sha256": self.parts.train.fingerprint(by_document=by_document),
            "valid": self.parts.valid.fingerprint(by_document=by_document),
            "test": self.parts.test.fingerprint(by_document=by_document),
            "tokenizer": self.tokenizer.fingerprint,
        }


def prepare_new(
    paths: Sequence[str],
    configs: Mapping[str, Config],
    model: LoadedModel | None,
    load: Callable[[Path], LoadedModel],
    *,
    dry_run: bool = False,
    ranks: Ranks = SINGLE,
) -> Generator[Event, None, Prepared]:
    """Reads the text of a new run, chooses its configuration, and returns both with the tokens of the text.

    The run starts from the weights of `model`, if there is one, or maybe from those of the bundled one, which `load`
    loads; see `workflow.train`. `ConfigError` if `configs` lacks the preset that fits, `ResourceError` if none fits.
    """
    text = next(iter(configs.values())).text  # equal in all
    if text.binary and text.text_field is not None:
        raise InvalidSettingError("text.text_field", "reads rows, and --binary does not", "Leave one of them out.")
    if model is not None and model.encoding == "int8":
        yield _notice_of_rounding(model)
    runtime, parts = yield from _read_text(paths, list(configs.values()), ranks, dry_run=dry_run)
    n_bytes = parts.train.n_bytes
    similar = _similar_model(configs, runtime, parts)
    if similar is not None:
        summary, likeness = similar
        model = load(summary.folder)
        # Only this configuration is left to choose, under the preset that the model itself was trained with.
        configs = {str(model.record.get("preset", "")): configs[summary.name]}
        yield Notice(
            f"training starts from {summary.name}, whose text is similar: its tokens have {likeness:.2f} times as many "
            f"bytes here as in that text, and {LEAST_LIKENESS} is enough (--init none: from scratch)"
        )
    if model is None and n_bytes < SHORT_TEXT:
        yield Notice(
            f"{n_bytes:,} {plural_noun(n_bytes, 'byte')} of training text: the model will memorize it and "
            "learn nothing general; use at least 100 kB, or less with --init"
        )
    preset, config = _choose_config(configs, n_bytes, runtime)
    config.check_division(ranks.size)
    if model is not None:  # whose vocabulary is part of it
        tokenizer, origin = model.tokenizer, _origin(model)
    else:
        tokenizer = yield from _train_tokenizer(config.text, parts, dry_run=dry_run)
        origin = {}
    ids = yield from _tokenize(parts, tokenizer, origin, by_document=config.train.reset_on_document, dry_run=dry_run)
    data = Prepared(config, runtime, preset, origin, parts, tokenizer, *ids)
    if model is not None:
        problem = _vocabulary_problem(model, data.train_ids)
        if problem:
            yield Notice(f"{problem}; with --init none, the run learns a new vocabulary", "warning")
        data = replace(data, weights=weights(model.network))
    # Defaults of rates and budgets depend on the number of tokens, which is known now.
    config = defaults.fill_in(
        config,
        tokenizer="auto" if tokenizer.described else tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        device=runtime.device,
        n_tokens=data.n_train_tokens,
        model=model,
    )
    return replace(data, config=config)


def _notice_of_rounding(model: LoadedModel) -> Notice:
    remark = f"training starts from rounded weights: those of {model.name} are stored in int8"
    if "imported" in model.record:
        remark += "; import it with --weights float32 to start from the exact ones"
    return Notice(remark)


def _similar_model(configs: Mapping[str, Config], runtime: Runtime, parts: Split) -> tuple[ModelSummary, float] | None:
    """The bundled model whose text is similar, with which a run without `--init` starts, and its likeness; or None.

    `configs` has its name, beside those of presets, if the user left preset, shape and vocabulary open.
    """
    if runtime.device.type != "cpu":
        return None
    for model in bundled_models():
        if model.name not in configs:
            continue
        config = configs[model.name]
        is_divisible = config.train.batch_size % runtime.ranks.size == 0
        fits_memory = memory.needed_bytes(config, runtime) <= available_bytes()
        likeness = likeness_to(model.folder, parts)
        if is_divisible and fits_memory and likeness >= LEAST_LIKENESS:
            return model, likeness
    return None


def _choose_config(configs: Mapping[str, Config], n_bytes: int, runtime: Runtime) -> tuple[str, Config]:
    """Name and configuration of the preset that fits a training text of `n_bytes` and the device.

    `configs` has one configuration, which is taken, if the user named a preset or a model. Otherwise it has those of
    the presets with which the user's settings are legal, and maybe that of a bundled model, by the name of the model:
    `_similar_model` has decided against this one. `ConfigError` if the settings are illegal with the preset that fits.
    """
    bundled = {model.name for model in bundled_models()}
    presets = {name: config for name, config in configs.items() if name not in bundled}
    if len(presets) == 1:
        [(preset, config)] = presets.items()
        return preset, config
    preset = defaults.choose_preset(n_bytes, runtime.device)
    if preset not in presets:
        problem = f"the settings are illegal with preset '{preset}', which fits text size and device."
        others = " or ".join(presets)
        raise ConfigError(problem, f"Choose another: --preset {others}. --preset {preset} names the settings.")
    return preset, presets[preset]


def prepare_resumed(
    paths: Sequence[str],
    folder: Path,
    changes: Tree,
    preset: str | None,
    init: str | None,
    *,
    dry_run: bool = False,
    ranks: Ranks = SINGLE,
) -> Generator[Event, None, Prepared]:
    """Reads the text of the run in `folder`, to go on with it; arguments and errors are those of `workflow.resume`."""
    record = read_record(folder)
    saved = read_config_file(folder, strict=True).config
    runtime_settings = {"seed": 0} | record.get("runtime", {})  # the defaults if the record is lost
    saved_config = settings.make(saved.model_dump(mode="json"), {"runtime": runtime_settings})
    config = defaults.resumed(saved_config, changes)
    saved_preset = str(record.get("preset") or preset or "")
    if preset not in (None, saved_preset):
        problem = f"this run uses the preset {saved_preset}, which cannot change when it is resumed."
        raise ConfigError(problem, "Leave --preset out, or train a new model with -o NAME.")
    origin = origin_of(record)
    if init is not None and origin.get("model", NEW) not in _names_of(init):
        problem = f"this run started from {origin.get('model', 'scratch')}, not from {init}."
        raise ConfigError(problem, "Leave --init out, or train a new model with -o NAME.")
    config.check_division(ranks.size)
    runtime, parts = yield from _read_text(paths, [config], ranks)
    tokenizer = load_tokenizer(folder)
    ids = yield from _tokenize(parts, tokenizer, origin, by_document=config.train.reset_on_document, dry_run=dry_run)
    return Prepared(config, runtime, saved_preset, origin, parts, tokenizer, *ids)


def _names_of(init: str) -> set[str]:
    """What the record of a run that started from `init` may call it."""
    names = {init, Path(init).resolve().name}
    with suppress(CheckpointError):
        names.add(find(init).resolve().name)
    return names


def _origin(model: LoadedModel) -> Tree:
    """Entry `INIT` of the record of a run that starts from this model: its name, weights, text and import."""
    origin: Tree = {"model": model.name, "weights": model.fingerprints["weights"]}
    for key in ("corpus", "tokens"):
        if key in model.record:
            origin[key] = model.record[key]
    about = imported(model.record)
    if about:
        origin["imported"] = about
    return origin


def _read_text(
    paths: Sequence[str], configs: Sequence[Config], ranks: Ranks, *, dry_run: bool = False
) -> Generator[Event, None, tuple[Runtime, Split]]:
    """Prepares the runtime of a run, reads its text, and divides it into parts to train on, validate and test.

    The run will have one of `configs`, which differ in model and training settings only; `ResourceError`, before the
    text is read, if none fits the machine. `DataError` if there is nothing to train on.
    """
    config = configs[0]  # text and runtime settings are equal in all
    ends_by_clock = config.train.max_time is not None or defaults.is_open(config.train)
    runtime = make_runtime(config.runtime, training=True, by_clock=ends_by_clock, ranks=ranks)
    if runtime.dtype_name == "float16":
        raise ConfigError("training in float16 is not supported.", "Set runtime.dtype to bfloat16, or to float32.")
    memory.require(configs, runtime, on_any_machine=dry_run)
    text, by_document = config.text, config.train.reset_on_document
    held_out_files = [path for path in (text.valid, text.test) if isinstance(path, str)]  # else fractions of the text
    ranks.require_files([*paths, *held_out_files])
    fields = () if text.text_field is None else (text.text_field,)
    input_format = InputFormat(binary=text.binary, text_fields=fields, any_bytes=text.tokenizer == "bytes")
    corpus = yield from gather(paths, input_format=input_format)
    seed = config.runtime.seed or 0  # of a draw of whole files as held-out text, if there are many files
    parts = yield from split(corpus, text.valid, text.test, by_document=by_document, seed=seed)
    yield from _text_notices(parts, binary=text.binary)
    if parts.train.n_bytes == 0:
        raise DataError("the held-out parts leave nothing to train on.", "Give a longer text or a smaller --valid.")
    is_blank = all(block.isspace() for block in parts.train.read())
    if is_blank:
        name = parts.train.corpus.name
        raise DataError(f"the training text of {name} is nothing but white space.", "Give a file that contains text.")
    if parts.valid.n_bytes == 0 and config.train.patience is not None:
        raise InvalidSettingError("train.patience", "needs a validation text", "Leave it out, or give --valid.")
    if by_document and len(parts.train.documents) == 1:
        yield Notice(
            "the text is one document, so train.reset_on_document has no effect: JSON lines, tables, Parquet files and "
            "several files are documents.",
            "warning",
        )
    return runtime, parts


def _text_notices(parts: Split, *, binary: bool) -> Iterator[Progress | Notice]:
    """Tells the user what is odd about the text, each thing once, and if held-out text repeats text to train on."""
    # The parts are of one corpus unless held-out texts are files of their own.
    corpora = dict.fromkeys((parts.train.corpus, parts.valid.corpus, parts.test.corpus))
    notices: list[Notice] = []
    for corpus in corpora:
        notices += corpus.notices()
    yield from dict.fromkeys(notices)
    train = parts.train
    is_utf8 = train.corpus.facts.n_chars is not None
    if is_utf8 and not binary:  # such as invisible characters in many of the first lines
        beginning = b"".join(train.corpus.read(train.start, min(train.stop, train.start + ODD_BYTES)))
        oddities = Oddities("line", "line", least_share=ODD_SHARE)
        oddities.feed(beginning[: whole_characters(beginning)])
        yield from oddities.notices()
    for earlier, held_out in combinations(corpora, 2):
        yield from warn_of_copies(held_out, earlier)


def _train_tokenizer(text: TextConfig, parts: Split, *, dry_run: bool) -> Generator[Progress | Notice, None, Tokenizer]:
    """Learns the vocabulary in a thread, since sentencepiece reports no progress; yields the time that it takes.

    Says if the text yields fewer tokens than requested, except in a dry run, which reads only a sample.
    """
    kind, size = choose_tokenizer(text.tokenizer, text.vocab_size, parts.train.corpus.facts, parts.train.n_bytes)
    if kind != "bytes":
        _require_utf8(parts, {})
    limit = SAMPLE_BYTES
    if dry_run:
        limit = DRY_RUN_BYTES
    elif kind == "words":  # which are counted in the whole text
        limit = parts.train.n_bytes
    is_abandoned = False

    def sample() -> Iterator[bytes]:
        """The text for the thread, which ends with an error when nobody waits for the vocabulary any more."""
        for portion in parts.train.sample(limit):
            if is_abandoned:
                raise StoppedEarlyError
            yield portion

    source = f"{min(parts.train.n_bytes, limit) / 1e3:,.0f} kB"
    started = time.monotonic()
    # The pool waits at its end, because sentencepiece cannot be interrupted; without a text it ends early.
    with ThreadPoolExecutor(1, "vocabulary") as pool:
        learned = pool.submit(TOKENIZERS[kind].train, sample(), size)
        try:
            while not learned.done():
                yield Progress(f"learning a vocabulary from {source}", int(time.monotonic() - started), None, "s")
                wait([learned], PROGRESS_INTERVAL)
        finally:
            is_abandoned = True
    tokenizer = learned.result()
    is_small = text.vocab_size is not None and tokenizer.vocab_size < text.vocab_size
    if is_small and not dry_run:
        yield Notice(
            f"the vocabulary has only {tokenizer.vocab_size:,} tokens instead of {text.vocab_size:,}, because the text "
            "yields no more"
        )
    return tokenizer


def _tokenize(
    parts: Split, tokenizer: Tokenizer, origin: Tree, *, by_document: bool, dry_run: bool
) -> Generator[Event, None, tuple[TokenFile, TokenFile]]:
    """Tokens of the training and the validation text; of a dry run a sample."""
    if tokenizer.kind != "bytes":
        _require_utf8(parts, origin)
    if dry_run:
        sample = sample_tokens(parts.train, tokenizer, DRY_RUN_BYTES)
        return sample, sample
    train_ids = yield from token_file(parts.train, tokenizer, by_document=by_document)
    valid_ids = yield from token_file(parts.valid, tokenizer, by_document=by_document)
    return train_ids, valid_ids


def _require_utf8(parts: Split, origin: Tree) -> None:
    """Refuses text that is not UTF-8; a run that starts from a model cannot change the tokenizer."""
    for part in (parts.train, parts.valid, parts.test):
        facts = part.corpus.facts
        if facts.bad_byte is not None:
            error = not_utf8(*facts.bad_byte, facts.from_bad_byte)
            if not origin:
                raise error
            remedy = f"{conversion(facts.from_bad_byte)}, or train with --init none --tokenizer bytes."
            raise DataError(error.message, remedy)


MISFIT = 0.4  # bytes per token of a text, relative to the model's own text, below which the vocabulary fits badly
MANY_UNKNOWN = 0.1  # share of unknown words from which a vocabulary of words fits badly
LEAST_LIKENESS = 0.75  # the same ratio from which a text counts as one of the same language and style
BEGINS_ANEW = 20_000_000  # bytes of training text from which a run on a CPU starts with new weights by default
SHORTEST = 1000  # bytes of text below which their tokens say little of its likeness
_SAMPLE_BYTES = 2**18


def _vocabulary_problem(model: LoadedModel, tokens: TokenFile) -> str:
    """Says why the vocabulary of `model` fits a text badly (unknown words, or tokens of few bytes); "" if it fits."""
    unknown_id = model.tokenizer.unknown_id
    if unknown_id is not None:
        unknown_share = n_unknown(tokens.ids, unknown_id) / len(tokens)
        if unknown_share < MANY_UNKNOWN:
            return ""
        return f"{100 * unknown_share:.0f} % of the words are not in the vocabulary of {model.name} and become <unk>"
    size = text_size(model.record)
    if size is None or tokens.n_bytes < SHORTEST:
        return ""
    n_bytes, n_tokens = size
    token_bytes = tokens.n_bytes / len(tokens)
    token_bytes_of_model = n_bytes / n_tokens
    if token_bytes >= MISFIT * token_bytes_of_model:
        return ""
    comparison = f"{token_bytes:.1f} bytes per token, {token_bytes_of_model:.1f} in its own training text"
    return f"the vocabulary of {model.name} fits this text badly: {comparison}"


def likeness_to(model: Path, parts: Split) -> float:
    """Says how well the vocabulary of the bundled model in this folder fits a training text: 1 as its own text.

    It is the mean bytes per token in the training text divided by those in the model's. 0 if the text is too short to
    tell, long enough to train from scratch or not UTF-8, or the length of the model's text is unknown.
    """
    sample = b"".join(parts.train.sample(_SAMPLE_BYTES)).strip()
    is_too_short = len(sample) < SHORTEST
    is_long_enough_alone = parts.train.n_bytes >= BEGINS_ANEW
    has_bad_byte = any(part.corpus.facts.bad_byte for part in (parts.train, parts.valid, parts.test))
    if is_too_short or is_long_enough_alone or has_bad_byte:
        return 0.0
    try:
        size = text_size(read_record(model))
        ids = load_tokenizer(model).encode(sample)
    except CheckpointError:
        return 0.0
    if size is None:
        return 0.0
    n_bytes, n_tokens = size
    return (len(sample) / len(ids)) / (n_bytes / n_tokens)
