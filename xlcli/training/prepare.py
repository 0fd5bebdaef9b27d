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
from xlcli.errors import CheckpointError, ConfigError, DataError, InvalidSettingError
from xlcli.events import PROGRESS_INTERVAL, Event, Notice, Progress, StoppedEarlyError
from xlcli.machine import available_bytes
from xlcli.ranks import SINGLE, Ranks
from xlcli.runtime import Runtime, make_runtime
from xlcli.store.discover import bundled_models, find
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import RECORD, read_config_file, read_record
from xlcli.store.origin import INIT, NEW, origin_of, text_size
from xlcli.store.weights import weights
from xlcli.text.base import Tokenizer
from xlcli.text.corpus import Split, gather, split, warn_of_copies
from xlcli.text.formats import not_utf8
from xlcli.text.sources import InputFormat
from xlcli.text.tokenizers import SAMPLE_BYTES, TOKENIZERS, choose_tokenizer, load_tokenizer, n_unknown
from xlcli.text.tokens import TokenFile, sample_tokens, token_file
from xlcli.training import checkpoint, defaults, memory

ANCESTORS = 10
"""Number of models before the one that a run started from which its record names, at most."""
SHORT_TEXT = 10_000
"""Bytes of training text below which a run with new weights warns."""

DRY_RUN_BYTES = 2**19
"""Maximum bytes of text from which a dry run learns a vocabulary and estimates the number of tokens."""


@dataclass(frozen=True)
class Prepared:
    """Inputs of a training run.

    Attributes:
        preset: Name of its preset; empty if unknown.
        origin: Description of the model that it starts from (`store.origin.INIT`); empty for new weights.
        weights: Weights of that model, if the run is new.
    """

    config: Config
    runtime: Runtime
    preset: str
    origin: Tree
    parts: Split
    tokenizer: Tokenizer
    train_ids: TokenFile
    valid_ids: TokenFile
    weights: Mapping[str, Tensor] | None = None

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
    """Inputs of a new run, which starts from the weights of `model`; see `workflow.train` for the other arguments.

    Without `model` it may start from the bundled one, which `load` loads.

    Raises:
        ConfigError: `configs` lacks the preset that fits text and device.
        ResourceError: No configuration fits the machine.
    """
    text = next(iter(configs.values())).text
    if text.binary and text.text_field is not None:
        raise InvalidSettingError("text.text_field", "reads rows, and binary does not", "Leave one of them out.")
    runtime, parts = yield from _read(paths, list(configs.values()), ranks, dry_run=dry_run)
    for each in bundled_models():
        chosen = configs.get(each.name)
        configs = {name: config for name, config in configs.items() if name != each.name}
        if chosen is None or runtime.device.type != "cpu":
            continue
        fits = memory.needed_bytes(chosen, runtime) <= available_bytes() and chosen.train.batch_size % ranks.size == 0
        if fits and resembles(each.folder, parts):
            model = load(each.folder)
            configs = {str(model.record.get("preset", "")): chosen}
            yield Notice(f"training starts from {each.name}, whose text is similar (--init none: from scratch)")
    preset, config = next(iter(configs.items()))
    if model is None and (n_bytes := parts.train.n_bytes) < SHORT_TEXT:
        yield Notice(
            f"{n_bytes:,} byte{'s' * (n_bytes != 1)} of training text: the model will memorize it and "
            "learn nothing general; use at least 100 kB, or less with --init"
        )
    if len(configs) > 1:
        preset = defaults.choose_preset(parts.train.n_bytes, runtime.device)
        if preset not in configs:
            raise ConfigError(
                f"the settings are illegal with preset '{preset}', which fits text size and device.",
                f"Choose another: --preset {' or '.join(configs)}. --preset {preset} names the settings.",
            )
        config = configs[preset]
    config.check_division(ranks.size)
    if model is not None:
        tokenizer, origin, begun = model.tokenizer, _origin(model), weights(model.network)
    else:
        tokenizer, origin, begun = (yield from _train_tokenizer(config.text, parts, dry_run=dry_run)), {}, None
    ids = yield from _tokenize(parts, tokenizer, origin, by_document=config.train.reset_on_document, dry_run=dry_run)
    data = Prepared(config, runtime, preset, origin, parts, tokenizer, *ids)
    if model is not None:
        yield from warn_of_misfit(model, data.train_ids)
    config = defaults.fill_in(
        config,
        tokenizer="auto" if tokenizer.described else tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        device=runtime.device,
        n_tokens=data.n_train_tokens,
        model=model,
    )
    return replace(data, config=config, weights=begun)


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
    """Inputs of the run in `folder` when it is resumed; see `workflow.resume` for the arguments.

    Raises:
        ConfigError: A change that a resumed run cannot have.
    """
    record = yield from _read_record(folder)
    saved = read_config_file(folder, strict=True).config
    saved_config = settings.make(saved.model_dump(mode="json"), {"runtime": record.get("runtime", {})})
    config = defaults.resumed(saved_config, changes)
    saved_preset = str(record.get("preset") or preset or "")
    if preset not in (None, saved_preset):
        raise ConfigError(
            f"this run uses the preset {saved_preset}, which cannot change when it is resumed.",
            "Leave --preset out, or train a new model with -o NAME.",
        )
    origin, names = origin_of(record), {init}
    if init not in (None, NEW):  # the record may have another name of this model
        names.add(Path(init).resolve().name)
        with suppress(CheckpointError):
            names.add(find(init).resolve().name)
    if init is not None and origin.get("model", NEW) not in names:
        raise ConfigError(
            f"this run started from {origin.get('model', 'scratch')}, not from {init}.",
            "Leave --init out, or train a new model with -o NAME.",
        )
    config.check_division(ranks.size)
    runtime, parts = yield from _read(paths, [config], ranks)
    tokenizer, by_document = load_tokenizer(folder), config.train.reset_on_document
    ids = yield from _tokenize(parts, tokenizer, origin, by_document=by_document, dry_run=dry_run)
    return Prepared(config, runtime, saved_preset, origin, parts, tokenizer, *ids)


def _origin(model: LoadedModel) -> Tree:
    """Entry `INIT` of the record of a run that starts from this model: its name, weights, training, and own origin."""
    entry = {"model": model.name, "weights": model.fingerprints["weights"]}
    known = {key: model.record[key] for key in ("corpus", "tokens", "imported", INIT) if key in model.record}
    return _pruned(entry | known, ANCESTORS)


def _pruned(origin: Tree, n: int) -> Tree:
    """A description of a model with those of at most `n` models before it."""
    own, before = {key: value for key, value in origin.items() if key != INIT}, origin_of(origin)
    return own | {INIT: _pruned(before, n - 1)} if before and n else own


def _read_record(folder: Path) -> Generator[Notice, None, Tree]:
    """`record.json`; if it is missing or damaged, the runtime settings in the newest checkpoint."""
    problem = f"{folder / RECORD} is missing"
    try:
        if record := read_record(folder):
            return record
    except CheckpointError as error:
        problem = error.message.rstrip(".")
    settings = checkpoint.runtime_settings(folder)
    if not settings:
        raise CheckpointError(f"{problem}, and there is no undamaged checkpoint.", "Train again with --overwrite.")
    yield Notice(f"{problem}; seed, number type and threads are those of the checkpoint", "warning")
    return {"runtime": settings}


def _read(
    paths: Sequence[str], configs: Sequence[Config], ranks: Ranks, *, dry_run: bool = False
) -> Generator[Event, None, tuple[Runtime, Split]]:
    """Runtime and texts of a run; its configurations differ in model and training settings only."""
    config = configs[0]  # text and runtime settings are equal in all
    by_clock = config.train.max_time is not None or defaults.is_open(config.train)
    runtime = make_runtime(config.runtime, training=True, by_clock=by_clock, ranks=ranks)
    if runtime.dtype_name == "float16":
        raise ConfigError("training in float16 is not supported.", "Set runtime.dtype to bfloat16, or to float32.")
    memory.require(configs, runtime, on_any_machine=dry_run)
    text, by_document = config.text, config.train.reset_on_document
    ranks.require_files([*paths, *(given for given in (text.valid, text.test) if isinstance(given, str))])
    fields = () if text.text_field is None else (text.text_field,)
    reading = InputFormat(binary=text.binary, text_fields=fields, any_bytes=text.tokenizer == "bytes")
    corpus = yield from gather(paths, reading=reading)
    parts = yield from split(corpus, text.valid, text.test, by_document=by_document)
    corpora = dict.fromkeys((parts.train.corpus, parts.valid.corpus, parts.test.corpus))
    yield from dict.fromkeys(notice for each in corpora for notice in each.notices())
    for one, held_out in combinations(corpora, 2):
        yield from warn_of_copies(held_out, one)
    if parts.train.n_bytes == 0:
        raise DataError("the held-out parts leave nothing to train on.", "Give a longer text or a smaller --valid.")
    if parts.valid.n_bytes == 0 and config.train.patience is not None:
        raise InvalidSettingError("train.patience", "needs a validation text", "Leave it out, or give --valid.")
    if by_document and len(parts.train.documents) == 1:
        yield Notice(
            "the text is one document, so train.reset_on_document has no effect: JSON lines, tables, Parquet files and "
            "several files are documents.",
            "warning",
        )
    return runtime, parts


def _train_tokenizer(text: TextConfig, parts: Split, *, dry_run: bool) -> Generator[Progress | Notice, None, Tokenizer]:
    """Learns the vocabulary in a thread, since sentencepiece reports no progress; yields the time that it takes.

    Says if the text yields fewer tokens than requested, except in a dry run, which reads only a sample.
    """
    kind, size = choose_tokenizer(text.tokenizer, text.vocab_size, parts.train.corpus.facts, parts.train.n_bytes)
    if kind != "bytes":
        _require_utf8(parts, {})
    limit = DRY_RUN_BYTES if dry_run else parts.train.n_bytes if kind == "words" else SAMPLE_BYTES
    n_bytes = min(parts.train.n_bytes, limit)
    abandoned = False

    def read() -> Iterator[bytes]:
        for portion in parts.train.sample(limit):
            if abandoned:
                raise StoppedEarlyError
            yield portion

    source = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
    started = time.monotonic()
    with ThreadPoolExecutor(1, "vocabulary") as pool:  # waits at its end: sentencepiece cannot be interrupted
        learned = pool.submit(TOKENIZERS[kind].train, read(), size)
        try:
            while not learned.done():
                yield Progress(f"learning a vocabulary from {source}", int(time.monotonic() - started), None, "s")
                wait([learned], PROGRESS_INTERVAL)
        finally:
            abandoned = True
    tokenizer = learned.result()
    if text.vocab_size is not None and tokenizer.vocab_size < text.vocab_size and not dry_run:
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
    return train_ids, (yield from token_file(parts.valid, tokenizer, by_document=by_document))


def _require_utf8(parts: Split, origin: Tree) -> None:
    """Refuses text that is not UTF-8; a run that starts from a model cannot change the tokenizer."""
    for part in (parts.train, parts.valid, parts.test):
        if part.corpus.facts.bad_byte is not None:
            error = not_utf8(*part.corpus.facts.bad_byte)
            if not origin:
                raise error
            remedy = "Convert the file with iconv, or train with --init none --tokenizer bytes."
            raise DataError(error.message, remedy)


MISFIT = 0.4
"""Bytes per token of a text, relative to the model's own text, below which the vocabulary fits badly."""
MANY_UNKNOWN = 0.1
"""Share of unknown words from which a vocabulary of words fits badly."""
LEAST_LIKENESS = 0.75
"""The same ratio from which a text counts as one of the same language and style."""
BEGINS_ANEW = 20_000_000
"""Bytes of training text from which a run on a CPU starts with new weights by default."""
SHORTEST = 1000
"""Bytes of text below which their tokens say little of its likeness."""
_SAMPLE_BYTES = 2**18


def warn_of_misfit(model: LoadedModel, tokens: TokenFile) -> Iterator[Notice]:
    """Warning if the vocabulary of `model` fits these tokens of the training text badly."""
    reason = ""
    if (unknown := model.tokenizer.unknown_id) is not None:
        if (share := n_unknown(tokens.ids, unknown) / len(tokens)) >= MANY_UNKNOWN:
            reason = f"{100 * share:.0f} % of the words are not in the vocabulary of {model.name} and become <unk>"
    elif tokens.n_bytes >= SHORTEST and (size := text_size(model.record)):
        here, own = tokens.n_bytes / len(tokens), size[0] / size[1]
        if here < MISFIT * own:
            bytes_per_token = f"{here:.1f} bytes per token, {own:.1f} in its own training text"
            reason = f"the vocabulary of {model.name} fits this text badly: {bytes_per_token}"
    if reason:
        yield Notice(f"{reason}; with --init none, the run learns a new vocabulary", "warning")


def resembles(model: Path, parts: Split) -> bool:
    """True if a short training text is of the language and style of the model in this folder.

    A vocabulary fits such a text almost as well as the model's own.
    """
    sample = b"".join(parts.train.sample(_SAMPLE_BYTES)).strip()
    corpora = (part.corpus for part in (parts.train, parts.valid, parts.test))
    if not SHORTEST <= len(sample) <= parts.train.n_bytes < BEGINS_ANEW or any(each.facts.bad_byte for each in corpora):
        return False
    try:
        size = text_size(read_record(model))
        ids = load_tokenizer(model).encode(sample)
    except CheckpointError:
        return False
    return size is not None and len(sample) >= LEAST_LIKENESS * size[0] / size[1] * len(ids)
