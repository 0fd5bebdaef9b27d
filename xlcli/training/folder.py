"""What a run keeps in its folder: held-out texts, the best weights, checkpoints; and a run continued from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from xlcli.config import validate
from xlcli.errors import CheckpointError
from xlcli.events import Notice, Saved
from xlcli.files import sha256, sync_file, write_atomic
from xlcli.files.tensors import read_header
from xlcli.store import folder as store
from xlcli.store import layout
from xlcli.store.commit import finish_replacement, manifest, place_of_run, step_name
from xlcli.store.layout import BEST, CHECKPOINTS, DOCUMENTS, ENCODINGS, HELD_OUT, METRICS, WEIGHTS
from xlcli.store.weights import read_weights
from xlcli.store.weights import weights as weights_of
from xlcli.training import checkpoint
from xlcli.training.checkpoint import Checkpoint, gathered
from xlcli.training.prepare import Prepared
from xlcli.training.run import TrainingRun
from xlcli.training.schedule import Counters
from xlcli.training.validation import check_finite, describe_run


def write_held_out(place: Path, data: Prepared) -> None:
    """Writes the held-out texts, and the offsets of their documents if these are separate; removes other such files."""
    for name, part in (("valid", data.parts.valid), ("test", data.parts.test)):
        text = place / HELD_OUT[name]
        documents = place / DOCUMENTS[name]
        if part.n_bytes:
            write_atomic(text, part.read())
        else:
            text.unlink(missing_ok=True)
        if part.n_bytes and part.documents and data.config.train.reset_on_document:
            write_atomic(documents, (b"%d\n" % start for start in part.documents))
        else:
            documents.unlink(missing_ok=True)


def keep_weights(run: TrainingRun, data: Prepared, folder: Path, bits: float | None) -> None:
    """Writes the present weights, which are finite, as the model in `folder`, in which a staged run is put in place.

    All ranks must call it. `bits` is their score in bits per byte, if there is one.
    """
    weights = gathered(weights_of(run.model), run.runtime.ranks)
    if run.runtime.ranks.is_first:
        score = "" if bits is None else f"{bits:.6f}"
        _write_model(run, data, place_of_run(folder), weights, score)
        is_trained = run.counters.step > 0  # else they are those of the model that the run starts from
        if is_trained:
            finish_replacement(folder)


def _write_model(
    run: TrainingRun, data: Prepared, folder: Path, weights: Mapping[str, Tensor], score: str = ""
) -> None:
    """Writes weights of the present step, with their score in bits per byte, if there is one."""
    metadata = {"step": str(run.counters.step), "validation_bits_per_byte": score}
    store.save_model(folder, run.config, weights, data.tokenizer, metadata, encoding=run.config.train.weights)


def keep_points(run: TrainingRun, data: Prepared, folder: Path, tokens_before: int) -> Iterator[Saved]:
    """Writes a model folder for each number of tokens in `train.keep_at` that the last step has reached.

    `tokens_before` are the tokens that the run was trained on before the step. The caller does this before it writes
    the checkpoint of the step, so no point is lost. All ranks must take all events. The run does not change.
    `DivergedError` if it cannot continue from the present weights.
    """
    counters, is_first = run.counters, run.runtime.ranks.is_first
    points = [point for point in run.config.train.keep_at if tokens_before < point <= counters.tokens]
    if not points:
        return
    check_finite(run)
    targets = [layout.kept_model(place_of_run(folder), point) for point in points]
    with run.optimizers.averaged():
        weights = gathered(weights_of(run.model), run.runtime.ranks)
        for target in targets if is_first else []:
            _write_model(run, data, target, weights)
            write_held_out(target, data)
            layout.write_config(target, run.config, encoding=run.config.train.weights)
            record = describe_run(run, data) | {"steps": counters.step, "tokens": counters.tokens}
            layout.write_record(target, record)
    for target in targets:
        yield Saved(counters.step, target)


def save(run: TrainingRun, data: Prepared, place: Path) -> Path:
    """Writes a checkpoint of the present state, which is finite; all ranks must call it. Returns its folder."""
    tensors = run.tensors()
    if not run.runtime.ranks.is_first:
        return place / CHECKPOINTS / step_name(run.counters.step)
    sync_file(place / METRICS)
    facts = checkpoint.facts_of(run.config, run.runtime, data.identity) | run.describe()
    return checkpoint.save(place, tensors, facts, run.config.train.keep_checkpoints)


def restore(run: TrainingRun, data: Prepared, path: Path) -> list[Notice]:
    """Puts `run` into the state of the verified checkpoint at `path`, and the best weights up to it into its folder.

    `run` was just built from the same configuration, or goes back. All ranks must call it. Returns warnings about what
    is lost or makes results differ from an uninterrupted run. `CheckpointError` if the checkpoint is of another run,
    text or format.
    """
    ranks = run.runtime.ranks
    warnings: list[str] = []
    here = checkpoint.facts_of(run.config, run.runtime, data.identity)
    with checkpoint.restoring(path) as saved:
        facts = saved.facts
        # A run with another seed or text is another run.
        if facts["seed"] != here["seed"]:
            problem = f"{path} is of a run with the seed {facts['seed']}."
            raise CheckpointError(problem, "Train again with --overwrite.")
        checkpoint.check_texts(facts["corpus"], here["corpus"], path.parents[1])
        run.restore(saved)
        if facts["lr"] != here["lr"]:  # it applies as given, although the run has diverged before
            run.count(rollbacks=0)
        if facts["limits"] != here["limits"]:  # another budget or patience is a new chance
            run.count(stale=0, plateau=None)
        if ranks.is_first:
            warnings += _restore_best(run, data, saved)
        for name, now in checkpoint.environment(run.runtime).items():
            # The first rank alone writes step 0, with which all begin.
            is_first_start = run.counters.step == 0 and name == "processes"
            if facts[name] != now and not is_first_start:
                change = f"{name} was {facts[name]} and is now {now}"
                warnings.append(f"{change}: results will differ in the last bits from an uninterrupted run")
        checkpoint.restore_generators(saved)
    # The first rank alone reads and restores the best weights.
    run.count(**dict(validate(Counters, ranks.broadcast(run.counters.model_dump()))))
    return [Notice(warning, "warning") for warning in warnings]


def _restore_best(run: TrainingRun, data: Prepared, saved: Checkpoint) -> list[str]:
    """Makes the model folder hold the best weights up to a checkpoint, in the encoding of the run.

    The model file may hold later weights, of steps that are undone now. The checkpoint has a copy of the best ones. If
    neither has them, `run` counts no best step, a warning is returned, and a validation is due, which saves the present
    weights. If nothing was validated so far, any weights in the folder stay.
    """
    folder = saved.path.parents[1]
    best_step, encoding = run.counters.best_step, run.config.train.weights
    model_file = folder / WEIGHTS
    checksums = manifest(saved.path)
    _, digest_of_best = checksums.get(BEST, (0, ""))
    with suppress(CheckpointError):
        has_best = best_step is None or sha256(model_file) == digest_of_best
        if has_best and read_header(model_file)[1].get("encoding") == encoding:
            return []  # there is nothing to write
    copies = [model_file]
    if best_step is not None and BEST in checksums:
        copies = [saved.path / BEST, model_file]
    for path in copies:
        with suppress(CheckpointError):  # a damaged copy: the next one may be whole
            metadata = read_header(path)[1]
            is_best = best_step is None or metadata.get("step") == str(best_step)
            if is_best and metadata.get("encoding") in ENCODINGS:
                best, metadata = read_weights(path, run.model, metadata["encoding"])
                store.save_model(folder, run.config, best, data.tokenizer, metadata, encoding=encoding)
                return []
    run.count(best_bits=None, best_step=None)
    if best_step is None and not model_file.exists():  # no weights have been kept yet
        return []
    run.count(validated_step=None, validation_due=True)
    lost = "the stored weights are"
    if best_step is not None:
        lost = f"the best weights, of step {best_step}, are"
    return [f"{lost} missing or damaged in every copy; those of step {run.counters.step} replace them"]
