"""`xlcli eval`: scores a text, every token once."""

from __future__ import annotations

import filecmp
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from xlcli.cli import eval_outputs, loading, options
from xlcli.cli.command import App, Call
from xlcli.cli.eval_outputs import OUTPUTS, ResultFile, Run
from xlcli.cli.loading import check_texts, find_models, named_models, note_unread_pipe, print_plan
from xlcli.cli.objects import score_object
from xlcli.cli.options import option
from xlcli.cli.outputs import Kept
from xlcli.cli.render import Screen
from xlcli.cli.score_report import documents_text, pairs_text, score_table, seeds_text, spread_text, sweep_text
from xlcli.cli.signals import Stop
from xlcli.config import Config, EvalConfig
from xlcli.errors import DataError
from xlcli.events import Event, Notice, Score
from xlcli.files import is_pipe
from xlcli.store.layout import HELD_OUT, read_config, read_record

TOKENS_AT_A_TIME = 2048  # number of tokens in memories or windows that a plan assumes; text and machine decide it
app = App()

Models = Annotated[
    list[str] | None,
    option(
        "Model",
        "-m, --model NAME|FOLDER",
        "Use this model; repeat to compare models. Default: newest, else bundled.",
        autocompletion=options.complete_models,
    ),
]


@app.command("eval", "xlcli eval --mem-len 512", "xlcli eval book.txt --sweep-mem-len 0,128,512 --json")
def evaluate(
    call: Call,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE|-...]")] = None,
    model: Models = None,
    dry_run: options.DryRun = False,
    per_token: eval_outputs.PerToken = None,
    words: eval_outputs.Words = None,
    regions: eval_outputs.Regions = None,
    documents: eval_outputs.Documents = None,
    html: options.Html = None,
    csv: eval_outputs.Csv = None,
    plot: eval_outputs.Plot = None,
) -> int:
    # The other options are the fields of `EvalConfig` (see `cli/command.py`).
    config, screen = call.config(), call.screen
    settings, texts = config.eval, files or []
    outputs = outputs_of(call, settings)

    # What needs the models: their number, and what they have in common.
    check_texts(texts, "xlcli eval -m {}")
    folders = find_models(call, model, settings)
    if any(map(is_pipe, texts)):
        eval_outputs.check_single("standard input or a pipe", folders)
    if not texts:
        note_unread_pipe(screen, "FILE")
        check_held_out(named_models(call, model), folders, settings.split)
    for output in outputs:
        output.check_models(folders)
    call.check_files([*folders, *texts], {output.name: (output.path, output.kind) for output in outputs})

    if dry_run:
        for folder in folders:
            show_plan(folder, texts, settings, screen)
        return 0
    if not texts:
        screen.say(f"the text is {HELD_OUT[settings.split]} of {folders[0].name}; for yours, type xlcli eval FILE")
    with screen.stop() as stop:
        screen.expect_pipes(texts)
        run = run_of(folders, settings, screen, stop)

        def show(scores: list[Score]) -> None:
            # A sweep that was stopped has one score of a part, which is shown only if there is no other one.
            whole = [score for score in scores if not score.partial]
            is_listed = any(output.path == "-" for output in outputs)
            show_scores(whole or scores[:1], run, to_stderr=is_listed)

        sinks = [output.sink(run) for output in outputs]
        screen.drive(score_all(folders, texts, config, run, outputs), *sinks, Kept(Score, show))
        return stop.exit_code


def outputs_of(call: Call, settings: EvalConfig) -> list[ResultFile]:
    """The files to write; `ConfigError` if an option lacks another one, or excludes it."""
    paths = {kind: call.params[kind.name] for kind in OUTPUTS}
    outputs: list[ResultFile] = [kind(path) for kind, path in paths.items() if path is not None]
    names = {output.name for output in outputs}
    lists_words = not names.isdisjoint({"words", "regions"})
    lists_columns = not names.isdisjoint({"words", "regions", "per_token"})
    call.require("by", "--pairs A,B", is_given=settings.by_row)
    call.require("columns", "--per-token FILE.jsonl", is_given=lists_columns)
    if settings.split_punctuation:
        call.require("split_punctuation", "--words FILE.tsv", is_given=lists_words)
    call.require("regions", "--region-mark MARKS", is_given=settings.region_mark is not None)
    call.require("region_mark", "--regions FILE.tsv", is_given=lists_words)
    for output in outputs:
        output.check_settings(call, settings)
    return outputs


def run_of(folders: Sequence[Path], settings: EvalConfig, screen: Screen, stop: Stop) -> Run:
    names = columns = names_of(folders)
    if settings.sweep_mem_len:
        columns = [f"{name}_{mem_len}" for name in names for mem_len in settings.sweep_mem_len]
    n_rows = len(columns) if len(folders) > 1 or settings.sweep_mem_len else 0
    shape = settings.shape(read_config(folders[0]).model)
    return Run(names, columns, seeds_of(folders), shape, n_rows, screen, stop)


def score_all(
    folders: Sequence[Path], texts: Sequence[str], config: Config, run: Run, outputs: Sequence[ResultFile]
) -> Iterator[Event]:
    """Events of the evaluation of each model, which leaves the RAM before the next one is loaded; each notice once."""
    notices: set[Notice] = set()
    lists: dict[str, bool] = {}
    for output in outputs:
        lists |= dict.fromkeys(output.lists, True)
    for folder, name in zip(folders, run.names, strict=True):
        loaded, runtime = loading.load_model(folder, config.eval, config.runtime, run.screen)
        from xlcli import evaluation

        events = evaluation.evaluate(loaded, texts or None, config.eval, runtime, stop=run.stop, **lists)
        del loaded  # the events keep it only until the last one
        for event in events:
            if isinstance(event, Score) and len(folders) > 1:
                event = replace(event, model=name)
            if isinstance(event, Notice):
                if event in notices:
                    continue
                notices.add(event)
            yield event
        if run.stop():
            break


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names of models, with their folders if two have the same."""
    names = [folder.name for folder in folders]
    return [str(folder) if names.count(folder.name) > 1 else folder.name for folder in folders]


def check_held_out(names: Sequence[str], folders: Sequence[Path], split: str) -> None:
    """`DataError` if a model, such as an imported one, keeps no held-out text of this split, or these texts differ."""
    command = " ".join(["xlcli eval FILE", *(f"-m {shlex.quote(name)}" for name in names)])
    texts = [folder / HELD_OUT[split] for folder in folders]
    for folder, text in zip(folders, texts, strict=True):
        if not text.is_file():
            raise DataError(f"model {folder.name} keeps no held-out text ({text.name}).", f"Give a file: {command}")
    for text in texts[1:]:
        if not filecmp.cmp(texts[0], text, shallow=False):
            problem = f"the models do not have the same held-out text ({HELD_OUT[split]})."
            raise DataError(problem, f"Give a text that is new to all of them: {command}")


def show_plan(folder: Path, texts: Sequence[str], settings: EvalConfig, screen: Screen) -> None:
    """Prints what the evaluation of this model would do, with the longest memory of a sweep."""
    longest = max(settings.sweep, key=lambda settings_at_length: settings_at_length.mem_len or 0)
    text = ", ".join(texts) or f"the text {HELD_OUT[settings.split]} of the model"
    config = read_config(folder)
    reading = longest.reading(config.model, config.train.reading)
    remembers_all = config.model.effective_mem_len(1) is None
    if remembers_all or settings.online_option:
        batch_size = 1  # such a text is read by itself
    else:
        batch_size = settings.batch_size or max(1, TOKENS_AT_A_TIME // reading.longest)
    print_plan(folder, longest, screen, batch_size=batch_size, action=f"scores {text}")


def seeds_of(folders: Sequence[Path]) -> list[list[str]]:
    """Names of models that were trained with the same settings on the same text, but with different seeds."""
    groups = defaultdict[str, dict[int, str]](dict)
    for folder, name in zip(folders, names_of(folders), strict=True):
        record = read_record(folder)
        match record:
            case {"runtime": {"seed": int(seed)}}:
                training = (record.get("corpus_sha256"), record.get("train"), record.get("init"))
                groups[repr((read_config(folder), *training))].setdefault(seed, name)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def show_scores(scores: list[Score], run: Run, *, to_stderr: bool) -> None:
    """Prints at least one score as text or JSON, or as text `to_stderr`, and what their comparison says."""
    from xlcli.evaluation.spread import compare

    screen = run.screen
    comparisons = [compare(score, scores[0]) for score in scores[1:]]
    seeds = eval_outputs.seed_statistics(scores, run)
    if screen.json and not to_stderr:
        objects = list(map(score_object, scores))
        is_partial = scores[0].partial or len(scores) != run.n_rows
        sweep = {"sweep": objects, "partial": is_partial, "comparisons": comparisons, "seeds": seeds}
        screen.object(sweep if run.n_rows else objects[0])
        return
    if any(score.pairs for score in scores):
        text = pairs_text(scores, run.shape, screen.columns, comparisons, seeds)
    elif run.n_rows and not scores[0].partial:
        text = sweep_text(scores, run.n_rows, screen.columns, seeds)
    else:
        text = score_table(scores[0], run.shape)
    text += documents_text(scores, screen.columns)
    text += spread_text(scores, comparisons, screen.columns)
    text += seeds_text(scores, seeds, screen.columns)
    if to_stderr:
        screen.say(text)
    else:
        screen.report(text)
