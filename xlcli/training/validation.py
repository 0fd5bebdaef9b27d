"""Scores of a run: validation, the check that it can continue from its present state, and the final evaluation."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from xlcli import __version__
from xlcli.config import EvalConfig, GenerateConfig, RuntimeConfig
from xlcli.config.inference import ContextSettings
from xlcli.errors import DivergedError
from xlcli.evaluation import evaluate
from xlcli.events import VALIDATION_TOKENS, Generated, Notice, Progress, Score, ScoredText, Trained
from xlcli.files.tensors import prefixed
from xlcli.generation import generate
from xlcli.ranks import local
from xlcli.runtime import make_runtime
from xlcli.state import State
from xlcli.store import folder as store
from xlcli.store import layout
from xlcli.store.commit import place_of_run
from xlcli.store.origin import INIT, MOST_TRAIN_FILES, TRAIN_FILES
from xlcli.text.loaders import EvalBatch, EvalLoader, document_loaders, text_loader
from xlcli.text.tokens import TokenFile
from xlcli.training.prepare import Prepared
from xlcli.training.run import TrainingRun
from xlcli.training.schedule import Clock

ABSURD_NATS = 100.0  # loss in nats per token above which a run counts as diverged
ABSURD_WEIGHT = 2.0**32  # size of a weight above which a run has diverged: products of four such weights overflow
MAX_SEQUENCES = 8  # maximum number of sequences in a batch of a validation
SCORED_BYTES = 2**18  # maximum bytes of validation text scored at the end of a run; `xlcli eval` scores all of it
SCORING_COST = 2.0  # time per token of the final, exact score in relation to that of a validation; 1.9 to 2.3 on a CPU
MOST_RESERVED = 0.5  # maximum share of a time budget that is left to the end of the run
OVERTIME = 0.1  # share of a time budget that the final score and the sample may take beyond it
MIN_CONTEXTS = 4
"""A model with memory gets several sequences only if each has about this many times the tokens of a memory and a
segment, because each starts with empty memory."""


def validation_bits(run: TrainingRun, valid: TokenFile, stop: Callable[[], bool]) -> float | None:
    """Bits per byte of the first `VALIDATION_TOKENS` of the validation text; `DivergedError` if they are not finite.

    An estimate: in the number type of training, and with the mean bytes per token of the whole text, which must not be
    empty. None if `stop` became true meanwhile. Several ranks divide the sequences, and are not stopped.
    """
    reading = EvalConfig().reading(run.config.model, run.config.train.reading)
    ranks = run.runtime.ranks
    nats_of_rank = 0.0
    run.model.eval()
    with torch.inference_mode(), run.runtime.autocast():
        for loader in _validation_loaders(run, valid, reading):
            rows = ranks.rows(loader.batch_size)  # the sequences of this rank
            is_idle = rows.start == rows.stop
            if is_idle:  # all ranks must make the same calls, so it reads a sequence that counts elsewhere
                rows = slice(0, 1)
            offsets = loader.offsets[rows].tolist()
            state = run.model.init_state(len(offsets), offsets=offsets, **reading.init_arguments)
            for batch in loader:
                if ranks.size == 1 and stop():
                    return None
                nats, state = _nats_of_rows(run, batch, rows, state)
                if not is_idle:
                    nats_of_rank += nats
    total_nats = ranks.sum(torch.tensor(nats_of_rank, dtype=torch.float64)).item()
    if not math.isfinite(total_nats):
        raise DivergedError(f"the validation loss is not finite after step {run.counters.step}.")
    n_scored = min(VALIDATION_TOKENS, len(valid))
    bits_per_token = total_nats / n_scored / math.log(2)
    return bits_per_token * len(valid) / valid.n_bytes  # tokens per byte of all of the text


def _nats_of_rows(run: TrainingRun, batch: EvalBatch, rows: slice, state: State) -> tuple[float, State]:
    """Sum of the surprisal of the tokens to be scored in these rows of a batch, and the state after them."""
    device = run.runtime.device
    inputs = torch.from_numpy(batch.inputs[rows]).to(device)
    targets = torch.from_numpy(batch.targets[rows]).to(device)
    out = run.model.score(inputs, targets, state)
    is_scored = torch.from_numpy(batch.scored[rows])  # not the filling behind a text that is shorter than others
    return out.nll.double().cpu().masked_select(is_scored).sum().item(), out.state


def _validation_loaders(run: TrainingRun, valid: TokenFile, reading: ContextSettings) -> Iterable[EvalLoader]:
    """The text that is validated: one batch of long sequences, or batches of documents if these are apart."""
    ids = valid.ids[:VALIDATION_TOKENS]
    settings = {"segment_len": reading.segment_len, "start_id": run.loader.start_id}
    if valid.documents is not None:
        documents = valid.documents[valid.documents < len(ids)]
        return document_loaders(ids, documents, batch_size=MAX_SEQUENCES, **settings)
    n_sequences = MAX_SEQUENCES
    if reading.has_memory:
        least_tokens = MIN_CONTEXTS * (reading.longest + reading.segment_len)
        n_sequences = min(n_sequences, max(1, len(ids) // least_tokens))
    return [text_loader(ids, n_sequences, warmup_len=0, **settings)]


def seconds_at_end(run: TrainingRun, valid: TokenFile, validation: float) -> float:
    """Estimate of the seconds of a time budget that the last validation and the final score will take.

    It comes from the seconds of a `validation`, and is at most half of the budget; 0 without a time budget.
    """
    max_time = run.config.train.max_time
    if max_time is None or not len(valid):
        return 0.0
    n_validated = min(VALIDATION_TOKENS, len(valid))
    n_scored = len(valid) * min(1.0, SCORED_BYTES / valid.n_bytes)
    validations_per_score = SCORING_COST * n_scored / n_validated
    return min(validation * (1.0 + validations_per_score), MOST_RESERVED * max_time)


def check_finite(run: TrainingRun) -> None:
    """Checks, before a save, that training can continue from this state, which does not change.

    `DivergedError` if a weight, optimizer state or memory is not finite, a weight exceeds `ABSURD_WEIGHT`, or the loss
    of the next batch without dropout exceeds `ABSURD_NATS`: weights can diverge one step before the loss shows it.
    """
    for problem in run.runtime.ranks.gather(_problem(run)):
        if problem is not None:
            raise DivergedError(f"{problem} after step {run.counters.step}.")
    if not run.counters.step:
        return
    train = run.config.train
    run.model.eval()
    nats = torch.zeros((), device=run.runtime.device)
    # Without inference mode the kernels are those of training: others may overflow later.
    with torch.no_grad(), run.runtime.autocast():
        for (x, y, documents), state in zip(run.next_batch(), run.states, strict=True):
            nats += run.model.score(x, y, state, documents).nll.sum()
    mean = run.runtime.ranks.sum(nats).item() / (train.batch_size * train.segment_len)
    if not mean < ABSURD_NATS:
        raise DivergedError(f"the loss has risen to {mean:.3g} nats per token after step {run.counters.step}.")


def _problem(run: TrainingRun) -> str | None:
    """What is wrong with the first tensor of this rank that is not finite, or too large; None if all are sound."""
    memory: dict[str, torch.Tensor] = {}
    for i, state in enumerate(run.states):
        memory |= prefixed(f"{i}.", state.tensors())
    weights = dict(run.model.named_parameters())
    for kind, tensors in (("weights", weights), ("optimizer state", run.optimizers.tensors()), ("memory", memory)):
        for name, tensor in tensors.items():
            part = local(tensor.detach())
            if not bool(part.isfinite().all()):
                return f"the {kind} of '{name}' is not finite"
            if kind == "weights" and part.numel() and float(part.abs().max()) > ABSURD_WEIGHT:
                return f"a weight of '{name}' has grown to {float(part.abs().max()):.3g}"
    return None


SAMPLE_TOKENS = 60  # tokens of the sample
PROMPT_BYTES = 2**10  # bytes of validation text whose whole lines the sample continues


def finish(
    run: TrainingRun, data: Prepared, folder: Path, score: Score | None = None, *, stopped: bool = False
) -> Trained:
    """Completes the record of a run in `folder` that is saved, was `stopped` or not, and may have a score."""
    counters = run.counters
    bits = None
    scored = None
    if score is not None:
        bits = score.bits_per_byte
        scored = ScoredText(score.bytes, data.parts.valid.n_bytes, score.mem_len)
    record = describe_run(run, data) | {
        "steps": counters.step,
        "tokens": counters.tokens,
        "seconds": round(counters.seconds, 1),
        "bits_per_byte": bits,
        "scored": None if scored is None else asdict(scored),
        "best_step": counters.best_step,
        "finished": not stopped,
    }
    if counters.rollbacks:
        record["rollbacks"] = counters.rollbacks
    if run.patience.end < 1.0:
        record["stopped_early"] = True
    place = place_of_run(folder)
    layout.write_record(place, record)
    start_validation = None
    if data.origin:
        for row in layout.read_metrics(place):
            if row["step"] == 0:  # before which nothing is trained, so it is the only row of this step
                start_validation = layout.numbers(row).get("validation_bits_per_byte")
    return Trained(
        folder=folder,
        step=counters.step,
        tokens=counters.tokens,
        seconds=counters.seconds,
        bits_per_byte=bits,
        best_step=counters.best_step,
        stopped=stopped,
        sample="",
        scored=scored,
        start_validation=start_validation,
        best_validation=counters.best_bits,
        improves=_improves(run),
    )


def _improves(run: TrainingRun) -> bool:
    """True if the last step of a run was the best, and nothing but its time can have ended it."""
    budgets = run.budgets(run.counters.seconds)
    if budgets.pop("max_time", None) is None:
        return False
    has_budget_left = all(budget.used < budget.limit for budget in budgets.values())
    is_last_best = run.counters.best_step == run.counters.step > 0
    return has_budget_left and is_last_best and run.patience.end == 1.0


def final_evaluation(
    run: TrainingRun, data: Prepared, folder: Path, clock: Clock
) -> Generator[Progress | Notice, None, Trained]:
    """End of a run whose budget is spent, with a score, if there is validation text, and a sample of its model.

    The score is recorded before the sample is drawn. Both are cut where the time runs out (`OVERTIME`).
    """
    max_time = run.config.train.max_time
    latest = math.inf
    if max_time is not None:
        latest = max(max_time, clock.now()) + OVERTIME * max_time

    def is_late() -> bool:
        return clock.stop() or clock.now() > latest

    device, seed = run.runtime.device, run.config.runtime.seed or 0
    model = store.load(folder, device=device)
    inference = make_runtime(RuntimeConfig(device=str(device), threads=run.runtime.threads))
    score, prompt = None, b""
    path = model.held_out("valid")
    if path is not None:
        with path.open("rb") as text:
            lines, _, _ = text.read(PROMPT_BYTES).rpartition(b"\n")
        prompt = lines + b"\n"
        for event in evaluate(model, None, EvalConfig(limit=SCORED_BYTES), inference, stop=is_late):
            if isinstance(event, Progress | Notice):
                yield event
            elif isinstance(event, Score) and not clock.stop():
                score = event
    end = finish(run, data, folder, score)
    options = GenerateConfig(max_new_tokens=SAMPLE_TOKENS)
    for made in generate(model, prompt, options, inference, seed=seed, stop=is_late):
        if isinstance(made, Notice):
            yield made
        elif isinstance(made, Generated):
            end = replace(end, sample=made.text)
    return end


def describe_run(run: TrainingRun, data: Prepared) -> dict[str, Any]:
    """Data, size, machine and versions of a run, for `record.json`."""
    parts, runtime = data.parts, data.runtime
    corpus = parts.train.corpus
    is_cuda = runtime.device.type == "cuda"
    return {
        "corpus": corpus.name,
        "corpus_sha256": corpus.facts.sha256,
        "crlf": sum(corpus.facts.crlf),
        TRAIN_FILES: [digest for digest, _ in parts.train.files()][:MOST_TRAIN_FILES],
        "train": {"bytes": parts.train.n_bytes, "tokens": len(data.train_ids), "start": parts.train.start},
        "valid": {"bytes": parts.valid.n_bytes, "corpus": parts.valid.corpus.name, "start": parts.valid.start},
        "test": {"bytes": parts.test.n_bytes, "corpus": parts.test.corpus.name, "start": parts.test.start},
        "held_out_files": parts.drawn,
        "tokenizer": {"kind": data.tokenizer.kind, "vocab_size": data.tokenizer.vocab_size},
        "preset": data.preset,
        **({INIT: data.origin} if data.origin else {}),
        "runtime": run.config.runtime.model_dump(mode="json"),
        "parameters": run.model.n_parameters,
        "hardware": {
            "device": str(runtime.device),
            "name": torch.cuda.get_device_name() if is_cuda else platform.machine(),
            "threads": runtime.threads,
            "processes": runtime.ranks.size,
            "dtype": runtime.dtype_name,
        },
        "versions": {"xlcli": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
