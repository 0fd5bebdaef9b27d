"""`xlcli generate`: continues a text."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

import typer

from xlcli.cli import options
from xlcli.cli.command import App, Call
from xlcli.cli.interactive import Conversation
from xlcli.cli.loading import check_texts, find_model, note_unread_pipe, open_model, state_files
from xlcli.cli.options import option
from xlcli.cli.outputs import STATE
from xlcli.cli.pipe import label
from xlcli.cli.prompts import Results, Samples, note_file_as_prompt, read_prompt, read_prompts
from xlcli.config import GenerateConfig
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


@app.command("generate", 'xlcli generate "Once upon a"', 'xlcli generate "ROMEO:" -n 500 -t 0.7 --top-p 0.95 --seed 1')
def generate(
    call: Call,
    words: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT|-]")] = None,
    prompts: Prompts = None,
    model: options.Model = None,
    interactive: Interactive = False,
    state: options.State = None,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    no_prompt: Annotated[bool, option("Output", "--no-prompt", "Print the continuation without the prompt.")] = False,
) -> int:
    config, screen = call.config(), call.screen
    settings = config.generate
    saved = state_files(call, state, state_in, state_out)
    check_combination(call, settings, words or [], prompts, interactive=interactive, saves=saved.after is not None)
    folder = find_model(call, model, settings, saved)
    texts = check_texts([prompts or "-"], "xlcli generate -m {}")
    call.check_files([folder, *texts], {"state": (state, STATE), "state_out": (state_out, STATE)})
    note_file_as_prompt(words or (), screen)
    open_for = partial(open_model, call, folder, settings, config.runtime, saved)
    if interactive:
        loaded, runtime, resume, save = open_for()
        first = os.fsencode(words[0]) if words else None
        return Conversation(loaded, settings, runtime, screen, config.runtime.seed, resume).run(first, save)
    if not words and prompts is None:
        note_unread_pipe(screen, "PROMPT")
    with screen.stop() as stop:
        screen.expect_pipes([*(words or ()), prompts or ""])
        run: dict[str, Any] = {"seed": config.runtime.seed, "stop": stop}
        if prompts:
            given = read_prompts(prompts, stop, screen)
            if not given:
                screen.say(f"{label(prompts)} has no prompts", "warning")
                return 0
            loaded, runtime, resume, _ = open_for(n_sequences=len(given) * settings.num_samples)
            from xlcli.generation import generate_prompts

            prompt_texts = [text for text, _ in given]
            results = generate_prompts(loaded, prompt_texts, settings, runtime, resume=resume, **run)
            screen.drive(results, Results(given, screen, n_samples=settings.num_samples, without_prompt=no_prompt))
            return stop.exit_code
        prompt = read_prompt(words, stop, screen)
        loaded, runtime, resume, save = open_for(n_sequences=settings.num_samples)
        from xlcli import generation, inference

        events = generation.generate(loaded, prompt, settings, runtime, resume=resume, save=save, **run)
        screen.drive(events, Samples(screen, None if no_prompt else prompt, several=settings.num_samples > 1))
        if screen.verbose:
            screen.shows(inference.describe_decoding(loaded, runtime))
        return stop.exit_code


def check_combination(
    call: Call, settings: GenerateConfig, words: list[str], prompts: str | None, *, interactive: bool, saves: bool
) -> None:
    """`ConfigError` for options that need or exclude others; `saves`: a state is saved."""
    call.require("logprobs", "--json", is_given=call.screen.json or prompts is not None)
    state = "state" if call.params["state"] is not None else "state_out"
    if prompts is not None and words:
        raise call.conflict("prompts", "words")
    if prompts is not None and interactive:
        raise call.conflict("prompts", "interactive")
    if prompts is not None and saves:
        raise call.conflict("prompts", state)
    if settings.num_samples > 1 and saves:
        raise call.conflict("num_samples", state)
    if settings.num_samples > 1 and interactive:
        raise call.conflict("num_samples", "interactive")
    if len(words) > 1:
        raise ConfigError("the prompt is one argument.", 'Put it in quotes: xlcli generate "Once upon a".')
    if interactive and words == ["-"]:
        raise ConfigError("--interactive reads standard input itself.", "Leave out -.")
