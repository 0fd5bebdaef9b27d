"""`xlcli generate`: continues a text."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from xlcli.cli import options, prologue
from xlcli.cli.help import App
from xlcli.cli.interactive import Conversation
from xlcli.cli.options import option
from xlcli.cli.pipe import label
from xlcli.cli.prompts import Results, Samples, read_prompt, read_prompts
from xlcli.errors import ConfigError

app = App()


Prompts = Annotated[
    str | None,
    option(
        "Sampling",
        "--prompts FILE.jsonl|-",
        'Continue many prompts, one {"prompt": TEXT} per line. Prints one JSON line for each.',
    ),
]
Interactive = Annotated[
    bool,
    option(
        "Memory",
        "-i, --interactive",
        "Continue each line that you type, and keep the memory. Ctrl-C stops an answer, Ctrl-D ends.",
        allow_from_autoenv=False,
    ),
]
EXCLUDES = {
    "prompts": ["words", "interactive", "state", "state_out"],
    "num_samples": ["state", "state_out", "interactive"],
    "state": ["state_in", "state_out"],
}


@app.command("generate", 'xlcli generate "Once upon a"', 'xlcli generate "ROMEO:" -n 500 -t 0.7 --top-p 0.95 --seed 1')
def generate(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT|-]")] = None,
    prompts: Prompts = None,
    model: options.Model = None,
    interactive: Interactive = False,
    state: options.State = None,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    dry_run: options.DryRun = False,
    no_prompt: Annotated[bool, option("Output", "--no-prompt", "Print the continuation without the prompt.")] = False,
    **_: Any,
) -> int:
    """Continues a text."""
    config, screen = prologue.begin(context, needs={"logprobs": ["json|prompts"]}, excludes=EXCLUDES)
    settings, seed = config.generate, config.runtime.seed
    if words and len(words) > 1:
        raise ConfigError("the prompt is one argument.", 'Put it in quotes: xlcli generate "Once upon a".')
    if interactive and words == ["-"]:
        raise ConfigError("--interactive reads standard input itself.", "Leave out -.")
    folder = prologue.find_model(context, settings, screen)
    texts = prologue.check_texts([prompts or "-"], "xlcli generate -m {}")
    prologue.check_files(context, [folder, *texts])
    if dry_run:
        action = f"generates {settings.num_samples} x {settings.max_new_tokens} tokens"
        action += f" for each prompt of {prompts}" * (prompts is not None)
        prologue.print_plan(folder, settings, screen, batch_size=settings.num_samples, action=action)
        return 0
    if interactive:
        loaded, runtime, resume, save = prologue.open_model(context, folder, settings, config.runtime, screen)
        first = os.fsencode(words[0]) if words else None
        return Conversation(loaded, settings, runtime, screen, seed, resume).run(first, save)
    if not words and prompts is None:
        prologue.note_unread_pipe(screen, "PROMPT")
    with screen.stop() as stop:
        screen.expect_pipes([*(words or ()), prompts or ""])
        given = read_prompts(prompts, stop, screen) if prompts else [(read_prompt(words, stop, screen), {})]
        if not given:
            screen.say(f"{label(str(prompts))} has no prompts", "warning")
            return 0
        loaded, runtime, resume, save = prologue.open_model(context, folder, settings, config.runtime, screen)
        from xlcli import generation, inference

        how: dict[str, Any] = {"seed": seed, "resume": resume, "stop": stop}
        if prompts:
            all_texts = (text for text, _ in given)
            results = generation.generate_prompts(loaded, all_texts, settings, runtime, **how)
            screen.drive(results, Results(given, screen, n_samples=settings.num_samples, without_prompt=no_prompt))
            return stop.exit_code
        [(prompt, _)] = given
        events = generation.generate(loaded, prompt, settings, runtime, save=save, **how)
        screen.drive(events, Samples(screen, None if no_prompt else prompt, several=settings.num_samples > 1))
        if screen.verbose:
            screen.shows(inference.describe_decoding(loaded, runtime))
        return stop.exit_code
