"""Events of training, and progress, as text. Model text must be escaped for a terminal."""

from __future__ import annotations

import shlex

from xlcli import events
from xlcli.cli.quantities import approximate_count, compact_number, format_bytes, format_duration
from xlcli.errors import counted, named
from xlcli.store.commit import place_of_run

LITTLE_GAIN = 0.005  # share of the bits; a smaller gain over the model that a run started from is told as little
FEW_STEPS = 300  # of a run by time, after fewer than which a longer time is proposed
LONGER = 4  # times the seconds of such a run, as its new time


def progress_line(progress: events.Progress) -> str:
    """Fraction done, rate and time left: `reading f.txt  50 %  1 of 2 lines  1 lines/s  1.0 s left`."""

    def quantity(number: float) -> str:
        if progress.unit == "B":
            return format_bytes(number)
        return f"{compact_number(number)} {progress.unit}"

    if progress.total:
        done = quantity(progress.done).removesuffix(f" {progress.unit}")
        fraction = f"{100 * progress.done / progress.total:.0f} %"
        line = f"{progress.stage}  {fraction}  {done} of {quantity(progress.total)}"
    else:
        line = f"{progress.stage}  {quantity(progress.done)}"
    if progress.rate:
        line += f"  {quantity(progress.rate)}/s"
        if progress.total and progress.total > progress.done:
            left = (progress.total - progress.done) / progress.rate
            line += f"  {format_duration(left)} left"
    return line


def step_line(step: events.Step) -> str:
    """A training step in one line, the most important first."""
    done = f"{step.step}/{step.last_step}"
    line = f"step {done}  {100 * step.fraction:.0f} %  {format_duration(step.eta_seconds)} left"
    line += f"  {step.bits_per_byte:.3f} bits/byte  {compact_number(step.tokens_per_second)} tokens/s"
    if step.mean_steps is not None:
        line += f"  {step.mean_steps:.2f} steps/token"
    return line


def plan_text(plan: events.Plan) -> str:
    source = f"preset {plan.preset}"
    if plan.init is not None:
        source = f"from {plan.init}"
    checkpoints = f"up to {counted(plan.checkpoints, 'checkpoint')} of {format_bytes(plan.checkpoint_bytes)}"
    rows = [
        ("model", f"{plan.folder} ({source}, {compact_number(plan.parameters)} parameters)"),
        ("weights", f"{format_bytes(plan.weights_bytes)} on disk in {plan.weights}; {checkpoints} beside them"),
        ("corpus", plan.corpus),
    ]
    if plan.left_out:
        rows.append(("left out", f"{named(plan.left_out, most=3)} (named by --valid or --test)"))

    if plan.held_out_files:
        rows.append(("held out", f"{named(plan.held_out_files, most=3)} (drawn by the seed)"))

    # Sizes of training, validation and test text.
    sizes = f"train {format_bytes(plan.train_bytes)}"
    if plan.train_tokens:
        sizes += f" = {approximate_count(plan.train_tokens, 'token')}"
    sizes += "; "
    if plan.valid_from_end:
        sizes += "from its end: "
    sizes += f"valid {format_bytes(plan.valid_bytes)}, test {format_bytes(plan.test_bytes)}"
    if plan.estimated:
        sizes += " (estimated from a sample)"
    rows += [("text", sizes), ("tokens", f"{plan.tokenizer}, vocabulary of {plan.vocab_size}")]

    memory = "RAM" if plan.device == "cpu" else "GPU memory"
    machine = f"{plan.device} {plan.dtype}, {approximate_count(plan.threads, 'thread')}; "
    machine += f"needs about {format_bytes(plan.needed_bytes)} of {memory}"
    if plan.available_bytes is not None:
        machine += f"; {format_bytes(plan.available_bytes)} available"
    budget = plan.budget
    if plan.resumed_at > 0:
        budget += f", resuming at step {plan.resumed_at}"
    rows += [("machine", machine), ("budget", budget)]
    if plan.n_ranks > 1:
        sequences = approximate_count(plan.rows or 0, "sequence")
        rows.append(("ranks", f"{plan.n_ranks:,} processes, {sequences} each"))
    return "".join(f"{name:8} {text}\n" for name, text in rows)


def describe_scored_text(text: events.ScoredText) -> str:
    """Text and memory length of a score in words."""
    whole = f"{approximate_count(text.of_bytes, 'byte')} of validation text, memory {text.mem_len}"
    if text.is_partial:
        return f"first {compact_number(text.bytes)} of {whole}"
    return whole


def trained_text(event: events.Trained) -> str:
    """The end of a run: score, sample, and the two commands to run next."""
    text = f"model     {event.folder}\n"
    if event.bits_per_byte is not None:
        text += f"valid     {event.bits_per_byte:.4f} bits per byte"
        if event.scored is not None and event.scored.is_partial:
            text += f" of the first {approximate_count(event.scored.bytes, 'byte')}"
        if event.best_step == 0:
            text += " (the weights that the run started from: no step was better)"
        elif event.best_step is not None:
            text += f" (step {event.best_step})"
        text += "\n"
        if event.scored is not None:
            text += f"          of the {describe_scored_text(event.scored)}\n"
            text += _validations_text(event)
    steps, tokens = approximate_count(event.step, "step"), approximate_count(event.tokens, "token")
    text += f"training  {steps}, {tokens}, {format_duration(event.seconds)}\n"
    if event.sample.strip():
        sample = event.sample.strip("\n").replace("\n", "\n  ")
        text += f"sample\n  {sample}\n"
    return text + "\n" + _next_commands(event)


def _validations_text(event: events.Trained) -> str:
    """How the validations of a run relate to its score; what they say of its gain if it started from a model."""
    before, best = event.start_validation, event.best_validation
    if before is None or best is None or event.best_step == 0:
        return "          (not comparable with the values during training, which are estimates)\n"
    text = f"          (estimates, comparable only with each other: {before:.4f} before training, {best:.4f} after)\n"
    gain = before - best
    if gain < LITTLE_GAIN * before:
        text += f"          Training changed little: {gain / before:.1%} fewer bits by these estimates.\n"
    return text


def _more_time_text(event: events.Trained) -> str:
    """How to train for longer, if the time was over after few steps while the model still improved."""
    if not event.improves or event.step >= FEW_STEPS:
        return ""
    minutes = max(1, round(LONGER * event.seconds / 60))
    steps = approximate_count(event.step, "step")
    reason = f"The time was over after {steps}, while the model still improved.\n"
    return f"{reason}To train on, run the same command with --resume --max-time {minutes}m.\n"


def _next_commands(event: events.Trained) -> str:
    folder = shlex.quote(str(event.folder))
    generate = f"xlcli generate -m {folder}\n"
    if not event.stopped:
        # Without a score the model has no validation text that `eval` could read.
        text = "FILE " if event.bits_per_byte is None else ""
        return f"Next:\n  xlcli eval {text}-m {folder}\n  {generate}{_more_time_text(event)}"
    stopped = "Stopped and saved. To continue, run the same command with --resume.\n"
    if place_of_run(event.folder) != event.folder:
        earlier = f"The earlier model stays in {folder} until the first validation.\n"
        return f"{stopped}Give it in place of --overwrite. {earlier}"
    if event.best_step is None:
        return stopped
    return f"{stopped}To try it as it is: {generate}"
