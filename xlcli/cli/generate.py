"""`xlcli generate`: continues a text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from xlcli.cli import units
from xlcli.cli.options import DEVICE, MODEL, SEED, SETTINGS, TALK, Command, Flag, Values, reading
from xlcli.cli.pipe import portions
from xlcli.cli.signals import Stop, Stopped
from xlcli.cli.stream import STATE
from xlcli.errors import ConfigError, DataError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.events import Generated, GeneratedText

MAX_PROMPT = 64 * 2**20
"""Bytes of the longest prompt."""


def run(values: Values) -> int:
    """Renders the events of the workflow `generate`."""
    from xlcli.cli.model_options import check_state_files, dry_run, explain_memory, locate, open_model, state_files
    from xlcli.cli.render import Screen
    from xlcli.cli.settings import above_preset, is_set, print_config, resolve

    config = resolve(values)
    screen = Screen(values)
    if values.on("print-config"):
        screen.print(print_config(config, values))
        return 0
    if len(values.words) > 1:
        raise ConfigError("the prompt is one argument.", 'Put it in quotes: xlcli generate "Once upon a".')
    options = config.generate
    state_in, state_out = values.get("state-in"), values.get("state-out")
    if state_out and options.num_samples > 1:
        raise ConfigError("--state-out saves one memory, but --num-samples asks for several.", "Drop one of the two.")
    folder = locate(values, options)
    if values.on("dry-run"):
        does = f"writes {options.num_samples} x {options.max_new_tokens} tokens"
        screen.print(dry_run(folder, options, batch_size=options.num_samples, what=does, values=values))
        return 0
    check_state_files(state_in, state_out)
    seed = config.runtime.seed if is_set(above_preset(values), "runtime.seed") else None
    with Stop(screen.say) as stop, screen:
        prompt = read_prompt(values.words, stop)
        screen.wait("loading the model")
        from xlcli.generation import generate

        model, runtime = open_model(folder, config.runtime, options, screen)
        explain_memory(model.config.model, [options.mem_len], screen)
        resume, save = state_files(state_in, state_out, model, runtime)
        events = generate(model, prompt, options, runtime, seed=seed, resume=resume, save=save, stop=stop)
        show(events, screen, prompt=b"" if values.on("no-prompt") else prompt, several=options.num_samples > 1)
        return stop.exit_code


def show(events: Iterable[GeneratedText | Generated], screen: Screen, *, prompt: bytes, several: bool) -> None:
    """Text as it is made, a line `---` between samples; or one JSON object at the end."""
    from xlcli.cli import report
    from xlcli.events import Generated

    done: list[dict[str, object]] = []
    current = -1
    for event in events:
        if event.sample != current and not screen.json:
            screen.model_text((b"\n---\n" if current >= 0 else b"") + prompt)
        current = event.sample
        if isinstance(event, Generated):
            done.append({name: value for name, value in report.fields(event).items() if name != "sample"})
            rate = report.amount(event.tokens_per_second)
            screen.say(f"sample {event.sample}: seed {event.seed}, {event.tokens} tokens, {rate} tokens/s", "detail")
        elif not screen.json:
            screen.model_text(event.text)
    if screen.json:
        screen.object({"samples": done} if several else done[0] if done else {})
    else:
        screen.model_text(b"", final=True)


def read_prompt(words: tuple[str, ...], stop: Stop) -> bytes:
    """The prompt as bytes: the argument, or standard input for `-`, or nothing."""
    if not words:
        return b""
    if words[0] != "-":
        return os.fsencode(words[0])
    data = bytearray()
    for portion in portions(0, stop, None):
        data += portion or b""
        if len(data) > MAX_PROMPT:
            raise DataError("the prompt is longer than 64 MiB.", "Use xlcli stream --continue N for long texts.")
    if stop():
        raise Stopped(stop.exit_code)
    return bytes(data)


COMMAND = Command(
    name="generate",
    about="Continue a text; prints the prompt and its continuation as they are made.",
    examples=('xlcli generate "Once upon a"', 'xlcli generate "ROMEO:" -n 500 -t 0.7 --top-p 0.95 --seed 1'),
    words="[PROMPT|-]",
    groups={
        "Generate": (
            MODEL,
            Flag("-n/--max-new-tokens", "N", "most tokens to write (256)", units.count, ("generate.max_new_tokens",)),
            Flag(
                "-t/--temperature", "T", "0 is greedy, 1 is as learned (0.8)", units.number, ("generate.temperature",)
            ),
            Flag(
                "-k/--top-k", "K", "choose among the K likeliest tokens", units.count, ("generate.top_k",), example="40"
            ),
            Flag(
                "--top-p",
                "P",
                "choose among the likeliest that make up P",
                units.number,
                ("generate.top_p",),
                example="0.95",
            ),
            Flag(
                "--min-p", "P", "drop tokens less than P times as likely as the best", units.number, ("generate.min_p",)
            ),
            Flag(
                "--repetition-penalty",
                "X",
                "make repeated tokens less likely (above 1)",
                units.number,
                ("generate.repetition_penalty",),
                example="1.1",
            ),
            Flag("--stop", "TEXT", "stop before this text; may be repeated", keys=("generate.stop",), many=True),
            SEED,
            Flag("--num-samples", "N", "how many continuations", units.count, ("generate.num_samples",), example="3"),
            *reading("generate"),
            Flag("--no-prompt", "", "print the continuation only"),
            *STATE,
        ),
        "Machine": DEVICE,
        "Settings": SETTINGS,
        "Talk": TALK,
    },
    sections=("generate", "runtime"),
    run=run,
)
