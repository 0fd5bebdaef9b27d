"""`xlcli generate`: continues a text."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from xlcli.cli import options, units
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.options import Unit, option
from xlcli.cli.prompts import read_prompt, read_prompts, show, show_results
from xlcli.errors import ConfigError

SECTIONS = ("generate", "runtime")
"""Sections of the configuration that the command uses."""
app = typer.Typer()


@app.command(
    cls=Command,
    context_settings=CONTEXT,
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
            'Continue many prompts in batches: lines {"prompt": TEXT}, with a string or number as "id" if '
            "wanted. All lines are read first, also those of standard input (-). Prints a line of JSON for "
            "each, in their order; with --seed each as the prompt alone.",
        ),
    ] = None,
    model: options.Model = None,
    n_steps: options.NSteps = None,
    n_hashes: options.NHashes = None,
    max_new_tokens: Annotated[
        int | None,
        option(
            "Sampling",
            "-n, --max-new-tokens N",
            "Maximum number of new tokens. Default: 256.",
            Unit(units.count, "256"),
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        option(
            "Sampling",
            "-t, --temperature T",
            "0 is greedy decoding, 1 samples the model's own distribution. Default: 0.8, without any option "
            "of sampling with --top-p 0.95 and --repetition-penalty 1.1 if the vocabulary is of subwords.",
            Unit(units.number, "0.8"),
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        option("Sampling", "-k, --top-k K", "Sample from the K most probable tokens.", Unit(units.count, "40")),
    ] = None,
    top_p: Annotated[
        float | None,
        option(
            "Sampling",
            "--top-p P",
            "Nucleus sampling: the fewest most probable tokens whose probabilities sum to P.",
            Unit(units.number, "0.95"),
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        option(
            "Sampling",
            "--min-p P",
            "Drop tokens with less than P times the highest probability.",
            Unit(units.number, "0.05"),
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        option(
            "Sampling",
            "--repetition-penalty X",
            "Above 1: make recent tokens less probable.",
            Unit(units.number, "1.1"),
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        option("Sampling", "--stop TEXT", "Stop before this text. May be repeated.", allow_from_autoenv=False),
    ] = None,
    num_samples: Annotated[
        int | None, option("Sampling", "--num-samples N", "Number of continuations.", Unit(units.count, "3"))
    ] = None,
    logprobs: Annotated[
        int | None,
        option(
            "Output",
            "--logprobs N",
            "With --json: log probability in nats of each new token and of the N best ones (0: none of "
            "these), by the model itself, before temperature, penalty and filters.",
            Unit(units.count, "5"),
        ),
    ] = None,
    mem_len: options.MemLen = None,
    clamp_len: options.ClampLen = None,
    adapt: options.Adapt = False,
    context_cache: options.ContextCache = None,
    interactive: Annotated[
        bool,
        option(
            "Memory",
            "-i, --interactive",
            "Continue line after line of standard input and keep the memory. Ctrl-C stops an answer, Ctrl-D ends.",
            allow_from_autoenv=False,
        ),
    ] = False,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weight_dtype: options.WeightDtype = None,
    memory_dtype: options.MemoryDtype = None,
    threads: options.Threads = None,
    seed: options.Seed = None,
    config_file: options.ConfigFile = None,
    overrides: options.Overrides = None,
    print_config: options.PrintConfig = False,
    dry_run: options.DryRun = False,
    no_prompt: Annotated[bool, option("Output", "--no-prompt", "Print the continuation without the prompt.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    color: options.Color = None,
    force: options.Force = False,
    debug: options.Debug = False,
) -> int:
    """Continue a text; print the prompt and its continuation as it is generated."""
    from xlcli.cli import prologue

    config, screen = prologue.begin(context, SECTIONS)
    settings = config.generate
    n_samples = settings.num_samples
    if words and len(words) > 1:
        raise ConfigError("the prompt is one argument.", 'Put it in quotes: xlcli generate "Once upon a".')
    if state_out and n_samples > 1:
        raise ConfigError("--state-out saves one state, but --num-samples asks for several.", "Drop one of the two.")
    if prompts is not None:
        conflicts = {"PROMPT": words, "--interactive": interactive, "--state-out": state_out}
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
    prologue.check_files(context, folder, texts, ["state_out"], state_in)
    if dry_run:
        action = f"generates {n_samples} x {settings.max_new_tokens} tokens" + (
            f" for each prompt of {prompts}" if prompts else ""
        )
        prologue.print_plan(folder, settings, screen, batch_size=n_samples, action=action)
        return 0
    if interactive:
        from xlcli.cli.interactive import converse

        loaded, runtime, resume, save = prologue.open_model(
            folder, settings, config.runtime, screen, state_in=state_in, state_out=state_out
        )
        first, seed = os.fsencode(words[0]) if words else None, config.runtime.seed
        return converse(loaded, settings, runtime, screen, first=first, seed=seed, resume=resume, save=save)
    with screen.stop() as stopping, screen.until(stopping):
        if "-" in (prompts, *(words or ())):
            screen.expect_keyboard()
        prompt = read_prompt(words, stopping)
        named = None if prompts is None else read_prompts(prompts, stopping)
        screen.keyboard_ended()
        if named == []:
            screen.say(f"{'standard input' if prompts == '-' else prompts} has no prompts", "warning")
            return 0
        loaded, runtime, resume, save = prologue.open_model(
            folder, settings, config.runtime, screen, state_in=state_in, state_out=state_out
        )
        from xlcli import generation, inference

        seed = config.runtime.seed
        if named is not None:
            results = generation.generate_prompts(
                loaded, (each.text for each in named), settings, runtime, seed=seed, resume=resume, stop=stopping
            )
            show_results(named, results, screen, n_samples=n_samples, without_prompt=no_prompt)
            return stopping.exit_code
        events = generation.generate(
            loaded, prompt, settings, runtime, seed=seed, resume=resume, save=save, stop=stopping
        )
        show(events, screen, prompt=b"" if no_prompt else prompt, several=n_samples > 1)
        if screen.verbose:
            screen.notice(inference.describe_decoding(loaded, runtime))
        return stopping.exit_code
