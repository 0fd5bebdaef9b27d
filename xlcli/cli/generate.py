"""`xlcli generate`: continues a text."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from xlcli.cli import options, prologue
from xlcli.cli.options import option
from xlcli.cli.prompts import read_prompt, read_prompts, show, show_results
from xlcli.errors import ConfigError

app = typer.Typer()


@app.command(
    epilog='xlcli generate "Once upon a"\nxlcli generate "ROMEO:" -n 500 -t 0.7 --top-p 0.95 --seed 1',
)
def generate(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT|-]")] = None,
    prompts: Annotated[
        str | None,
        option(
            "Sampling",
            "--prompts FILE.jsonl|-",
            'Continue many prompts in batches: lines {"prompt": TEXT}, with an "id" if wanted, which are all read '
            "first. Prints a line of JSON for each, in their order; with --seed each as the prompt alone.",
        ),
    ] = None,
    model: options.Model = None,
    interactive: Annotated[
        bool,
        option(
            "Memory",
            "-i, --interactive",
            "Continue line after line of standard input and keep the memory. Ctrl-C stops an answer, Ctrl-D ends.",
            allow_from_autoenv=False,
        ),
    ] = False,
    state: options.State = None,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    dry_run: options.DryRun = False,
    no_prompt: Annotated[bool, option("Output", "--no-prompt", "Print the continuation without the prompt.")] = False,
    **_: Any,
) -> int:
    """Continue a text; print the prompt and its continuation as it is generated."""
    config, screen = prologue.begin(context)
    settings = config.generate
    n_samples = settings.num_samples
    if words and len(words) > 1:
        raise ConfigError("the prompt is one argument.", 'Put it in quotes: xlcli generate "Once upon a".')
    if (state or state_out) and n_samples > 1:
        raise ConfigError("a file holds one state, but --num-samples asks for several.", "Drop one of the two.")
    if prompts is not None:
        conflicts = {"PROMPT": words, "--interactive": interactive, "--state": state, "--state-out": state_out}
        if conflict := next((name for name, value in conflicts.items() if value), None):
            raise ConfigError(f"--prompts does not go together with {conflict}.", f"Leave out {conflict}.")
    if settings.logprobs is not None and not (screen.json or prompts):
        raise ConfigError("--logprobs needs JSON to go into.", "Add --json.")
    if interactive and (words == ["-"] or n_samples > 1):
        reason = "reads standard input itself" if words == ["-"] else "takes one sample per line"
        raise ConfigError(f"--interactive {reason}.", "Leave out - and --num-samples.")
    folder = prologue.find_model(context, settings, screen)
    texts = [prompts] if prompts not in (None, "-") else []
    prologue.check_texts(texts, "xlcli generate -m {}")
    prologue.check_files(context, [folder, *texts], ["state", "state_out"])
    if dry_run:
        action = f"generates {n_samples} x {settings.max_new_tokens} tokens"
        action += f" for each prompt of {prompts}" if prompts else ""
        prologue.print_plan(folder, settings, screen, batch_size=n_samples, action=action)
        return 0
    if interactive:
        from xlcli.cli.interactive import converse

        loaded, runtime, resume, save = prologue.open_model(context, folder, settings, config.runtime, screen)
        first, seed = os.fsencode(words[0]) if words else None, config.runtime.seed
        return converse(loaded, settings, runtime, screen, first=first, seed=seed, resume=resume, save=save)
    if not words and prompts is None:
        prologue.note_unread_pipe(screen, "PROMPT")
    with screen.stop() as stopping:
        screen.expect_pipes(["-" if words == ["-"] else prompts or ""])
        prompt = read_prompt(words, stopping)
        named = None if prompts is None else read_prompts(prompts, stopping)
        from xlcli.text.formats import CRLF_NOTICE, LineEnds

        line_ends = LineEnds()
        prompt = line_ends.feed(prompt, final=True)
        named = named and [(line_ends.feed(text, final=True), name) for text, name in named]
        if line_ends.replaced:
            screen.say(CRLF_NOTICE)
        if named == []:
            screen.say(f"{'standard input' if prompts == '-' else prompts} has no prompts", "warning")
            return 0
        loaded, runtime, resume, save = prologue.open_model(context, folder, settings, config.runtime, screen)
        from xlcli import generation, inference

        seed = config.runtime.seed
        if named is not None:
            results = generation.generate_prompts(
                loaded, (text for text, _ in named), settings, runtime, seed=seed, resume=resume, stop=stopping
            )
            show_results(named, results, screen, n_samples=n_samples, without_prompt=no_prompt)
            return stopping.exit_code
        events = generation.generate(
            loaded, prompt, settings, runtime, seed=seed, resume=resume, save=save, stop=stopping
        )
        show(events, screen, prompt=b"" if no_prompt else prompt, several=n_samples > 1)
        if screen.verbose:
            screen.shows(inference.describe_decoding(loaded, runtime))
        return stopping.exit_code
