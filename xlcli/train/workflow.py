"""`train`: text in, a model folder out, events on the way. Stops when asked, after saving; resumes to the bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from xlcli import config as settings
from xlcli import presets
from xlcli.config import Config, Tree
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.events import Event, Notice, Plan, Saved, Step, Trained, Validation
from xlcli.files import write_atomic
from xlcli.parallel import Runtime, setup
from xlcli.store import folder as store
from xlcli.store.commit import latest, step_of
from xlcli.store.layout import CHECKPOINTS, HELD_OUT, write_config
from xlcli.text.corpus import Corpus, open_corpus
from xlcli.text.heldout import Split, split
from xlcli.text.tokenizer import SAMPLE_BYTES, Tokenizer, choose_tokenizer, load_tokenizer, train_tokenizer
from xlcli.text.tokens import TokenFile, token_file
from xlcli.train import checkpoint, plan
from xlcli.train.ending import about_run, judge
from xlcli.train.run import Run, make_run


def train(
    tree: Tree,
    paths: Sequence[str],
    folder: Path,
    *,
    preset: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    allow_data_change: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Trains a model and leaves it in `folder`, the best weights in front, checkpoints beside them.

    Args:
        tree: What the user set, above any preset.
        paths: Files, folders or `-`.
        folder: The model folder; refused when it holds a model, unless resumed or overwritten.
        preset: A preset by name; None chooses by text and device.
        resume: Continue from the newest good checkpoint. Shape and text must be the same; budgets may differ.
        overwrite: Remove what `folder` holds.
        dry_run: End with the plan; nothing is written but the token cache.
        allow_data_change: Resume on another text.
        stop: Asked between steps; true saves and ends.

    Raises:
        ConfigError, DataError, CheckpointError, ResourceError, BusyError, DivergedError: See `xlcli.errors`.
    """
    began = time.monotonic()
    runtime = setup(settings.make(tree).runtime, training=True)
    with ExitStack() as stack:
        if not dry_run:
            _check_folder(folder, resume=resume, overwrite=overwrite)
            if warning := stack.enter_context(store.lock(folder)):
                yield Notice(warning, "warning")
            if overwrite and not resume:
                store.clear(folder)
        saved = store.read_config(folder) if resume else None
        corpus = open_corpus(paths)
        yield from corpus.scan()
        if saved is None:
            parts = _split(corpus, settings.make(tree))
            preset = preset or plan.choose_preset(parts.train.n_bytes, runtime.device)
            text = settings.make(presets.read_preset(preset), tree).text
            tokenizer = _learn_vocabulary(text.tokenizer, text.vocab_size, parts)
            config = plan.decide(tree, preset, vocab_size=tokenizer.vocab_size, device=runtime.device)
        else:
            config = settings.make(saved.model_dump(mode="json"), tree)
            _check_same_shape(saved, config)
            parts = _split(corpus, config)
            tokenizer = load_tokenizer(folder)
        if tokenizer.kind != "bytes":
            for part in (parts.train, parts.valid, parts.test):
                part.corpus.require_utf8()
        train_ids = yield from token_file(parts.train, tokenizer)
        valid_ids = yield from token_file(parts.valid, tokenizer)

        point = None
        if resume:
            point, notices = _newest_checkpoint(folder)
            yield from notices
        yield _plan(
            folder, parts, len(train_ids), tokenizer, preset or "", config, runtime, step_of(point) if point else 0
        )
        if dry_run:
            return
        run = make_run(config, runtime, train_ids, tokenizer.start_id)
        identity = {"sha256": parts.train.key, "tokenizer": tokenizer.fingerprint}
        if point is not None:
            for warning in checkpoint.load(run, point, corpus=None if allow_data_change else identity):
                yield Notice(warning, "warning")
        else:
            _write_beginnings(folder, config, tokenizer, parts)
        store.trim_metrics(folder, run.step)
        about = about_run(parts, preset or "", run, tokenizer, len(train_ids))
        course = _Course(run, folder, tokenizer, identity, about, began, valid_ids)
        yield from course.train(stop)
        yield from course.finish(stop)


class _Course:
    """The loop of one run and what it does between steps: validate, save, write the curve."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        tokenizer: Tokenizer,
        identity: dict[str, str],
        about: dict[str, Any],
        began: float,
        valid_ids: TokenFile,
    ) -> None:
        self.run = run
        self.folder = folder
        self.tokenizer = tokenizer
        self.identity = identity
        self.about = about
        self.began = began
        self.valid_ids = valid_ids
        self.saved_step = run.step

    @property
    def seconds(self) -> float:
        """Time spent on this run, in this process and before."""
        return self.run.seconds + time.monotonic() - self.began

    def train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Steps until the budget is spent or `stop` says so."""
        run, train = self.run, self.run.config.train
        per_byte = 1 / math.log(2) / run.bytes_per_token
        validate = _Timer(plan.eval_every(run.config), run.step, self.seconds)
        save = _Timer(train.save_every or plan.SAVE_SECONDS, run.step, self.seconds)
        run_start, tokens_start = time.monotonic(), run.tokens
        while (fraction := run.fraction(self.seconds)) < 1.0 and not stop():
            nats, norm, factor = run.take_step(fraction)
            seconds = self.seconds
            spent = run.fraction(seconds)
            rate = (run.tokens - tokens_start) / max(time.monotonic() - run_start, 1e-9)
            step = Step(
                step=run.step,
                tokens=run.tokens,
                seconds=seconds,
                nats=nats,
                bits_per_byte=nats * per_byte,
                lr=(train.lr or 0.0) * factor,
                grad_norm=norm,
                tokens_per_second=rate,
                fraction=spent,
                eta_seconds=seconds * (1 - spent) / spent if spent else math.inf,
            )
            store.append_metrics(
                self.folder,
                {
                    "step": step.step,
                    "tokens": step.tokens,
                    "seconds": round(seconds, 3),
                    "nats": nats,
                    "bits_per_byte": step.bits_per_byte,
                    "lr": step.lr,
                    "grad_norm": norm,
                    "tokens_per_second": round(rate, 1),
                },
            )
            yield step
            if spent < 1.0 and validate.due(run.step, self.seconds):
                yield from self._validate()
            if spent < 1.0 and save.due(run.step, self.seconds):
                yield self._save()

    def finish(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Last validation, checkpoint, the exact score of the kept weights and a sample; only saves when stopped."""
        run = self.run
        stopped = run.fraction(self.seconds) < 1.0
        if not stopped or run.best_step is None:
            yield from self._validate()
        if run.step > self.saved_step or not stopped:
            yield self._save()
        bits, sample = None, ""
        if not stopped and not stop():
            bits, sample = yield from judge(self.folder, run.runtime, run.config.runtime.seed, stop)
        self.about |= {"steps": run.step, "tokens": run.tokens, "seconds": round(self.seconds, 1)}
        self.about |= {"bits_per_byte": bits, "best_step": run.best_step, "finished": not stopped}
        store.write_record(self.folder, self.about)
        yield Trained(
            folder=self.folder,
            step=run.step,
            tokens=run.tokens,
            seconds=self.seconds,
            bits_per_byte=bits,
            best_step=run.best_step,
            stopped=stopped,
            sample=sample,
        )

    def _validate(self) -> Iterator[Event]:
        """Scores held-out text and keeps the weights when they are the best so far; without any, the latest are."""
        run = self.run
        bits = run.held_out_bits(self.valid_ids)
        best = bits is None or bits < run.best_bits
        if best:
            run.best_bits, run.best_step = math.inf if bits is None else bits, run.step
            facts = {"step": str(run.step), "validation_bits_per_byte": "" if bits is None else f"{bits:.6f}"}
            store.save_model(self.folder, run.config, store.weights(run.model), self.tokenizer, facts)
        if bits is not None:
            store.append_metrics(
                self.folder, {"step": run.step, "tokens": run.tokens, "validation_bits_per_byte": bits, "best": best}
            )
            yield Validation(run.step, run.tokens, self.seconds, bits, best)

    def _save(self) -> Saved:
        path = checkpoint.save(self.run, self.folder, seconds=self.seconds, corpus=self.identity)
        self.saved_step = self.run.step
        return Saved(self.run.step, path)


class _Timer:
    """Says when something is due that happens every so many steps (a whole number) or seconds."""

    def __init__(self, every: float, step: int, seconds: float) -> None:
        self.every = every
        self.last = seconds if isinstance(every, float) else 0.0

    def due(self, step: int, seconds: float) -> bool:
        """Whether it is due after this step; a step count depends on nothing but the step."""
        if isinstance(self.every, int):
            return step % self.every == 0
        if seconds - self.last < self.every:
            return False
        self.last = seconds
        return True


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    begun = (folder / "config.json").exists()
    if resume and not begun:
        raise CheckpointError(f"there is no run to resume in {folder}.", "Drop --resume, or give its folder with -o.")
    if begun and not resume and not overwrite:
        raise ConfigError(
            f"{folder} already holds a model.", "Add --resume to continue it, --overwrite to replace it, or -o NAME."
        )


def _split(corpus: Corpus, config: Config) -> Split:
    parts = split(corpus, config.text.valid, config.text.test)
    if parts.train.n_bytes == 0:
        raise DataError("the held-out parts leave nothing to train on.", "Give a longer text or a smaller --valid.")
    return parts


def _learn_vocabulary(kind: str, vocab_size: int | None, parts: Split) -> Tokenizer:
    kind, size = choose_tokenizer(kind, vocab_size, parts.train.corpus.facts, parts.train.n_bytes)
    if kind != "bytes":
        parts.train.corpus.require_utf8()
    text = parts.train.read() if kind == "words" else parts.train.sample(SAMPLE_BYTES)
    return train_tokenizer(kind, text, size)


def _check_same_shape(saved: Config, config: Config) -> None:
    free = {
        "train.max_steps",
        "train.max_tokens",
        "train.max_time",
        "train.eval_every",
        "train.save_every",
        "train.keep",
    }
    free |= {"train.lr", "train.adam_lr", "train.clip", "text.valid", "text.test"}
    changed = plan.differences(
        {name: saved.model_dump()[name] for name in ("model", "text", "train")},
        {name: config.model_dump()[name] for name in ("model", "text", "train")},
    )
    if wrong := [key for key in changed if key not in free]:
        raise ConfigError(
            f"{wrong[0]} cannot change when a run is resumed.", "Leave it out, or train a new model with -o NAME."
        )


def _newest_checkpoint(folder: Path) -> tuple[Path | None, list[Notice]]:
    found = latest(folder / CHECKPOINTS)
    notices = [Notice(f"{bad.path} is damaged and was passed over: {bad.reason}", "warning") for bad in found.rejected]
    if found.path is None:
        if found.rejected:
            raise CheckpointError(f"every checkpoint in {folder} is damaged.", "Train anew with --overwrite.")
        notices.append(Notice("the run had saved no checkpoint yet; it begins anew"))
    return found.path, notices


def _write_beginnings(folder: Path, config: Config, tokenizer: Tokenizer, parts: Split) -> None:
    tokenizer.save(folder)
    for name, part in (("valid", parts.valid), ("test", parts.test)):
        if part.n_bytes:
            write_atomic(folder / HELD_OUT[name], part.read())
    write_config(folder, config)


def _plan(
    folder: Path,
    parts: Split,
    train_tokens: int,
    tokenizer: Tokenizer,
    preset: str,
    config: Config,
    runtime: Runtime,
    resumed_at: int,
) -> Plan:
    parameters = plan.parameter_count(config.model)
    return Plan(
        folder=folder,
        corpus=parts.train.corpus.name,
        train_bytes=parts.train.n_bytes,
        valid_bytes=parts.valid.n_bytes,
        test_bytes=parts.test.n_bytes,
        train_tokens=train_tokens,
        tokenizer=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        preset=preset,
        parameters=parameters,
        memory_bytes=plan.memory_bytes(config, parameters, itemsize=runtime.dtype.itemsize),
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        threads=runtime.threads,
        budget=plan.budget_in_words(config),
        resumed_at=resumed_at,
    )
