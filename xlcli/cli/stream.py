"""`xlcli stream`: scores text as it arrives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from xlcli.cli import units
from xlcli.cli.options import DEVICE, MODEL, SEED, SETTINGS, TALK, Command, Flag, Values, reading
from xlcli.cli.pipe import open_source, portions
from xlcli.cli.signals import Stop
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.events import Event


def run(values: Values) -> int:
    """Renders the events of the workflow `stream`."""
    from xlcli.cli.model_options import check_state_files, dry_run, explain_memory, locate, open_model, state_files
    from xlcli.cli.render import Screen
    from xlcli.cli.settings import above_preset, is_set, print_config, resolve

    config = resolve(values)
    screen = Screen(values)
    if values.on("print-config"):
        screen.print(print_config(config, values))
        return 0
    if len(values.words) > 1:
        raise ConfigError(
            "stream reads one file, or what is piped in.", "Join files first: cat FILE... | xlcli stream."
        )
    options = config.stream
    name = values.words[0] if values.words else "-"
    state_in, state_out = values.get("state-in"), values.get("state-out")
    if options.save_every is not None and not state_out:
        raise ConfigError("--save-every needs a file to save in.", "Add --state-out memory.state.")
    folder = locate(values, options)
    check_state_files(state_in, state_out)
    if values.on("dry-run"):
        screen.print(dry_run(folder, options, batch_size=1, what=f"scores {name}", values=values))
        return 0
    source = open_source(name)
    if name == "-" and sys.stdin is not None and sys.stdin.isatty():
        screen.say("reading from the keyboard; end with Ctrl-D")
    with Stop(screen.say) as stop, screen:
        screen.wait("loading the model")
        from xlcli.streaming import stream

        model, runtime = open_model(folder, config.runtime, options, screen)
        explain_memory(model.config.model, [options.mem_len], screen)
        resume, save = state_files(state_in, state_out, model, runtime)
        for event in stream(
            model,
            portions(source, stop, options.flush_ms),
            options,
            runtime,
            resume=resume,
            save=save,
            stop=stop,
            sampling=config.generate,
            seed=config.runtime.seed if is_set(above_preset(values), "runtime.seed") else None,
        ):
            show(event, screen, emit=options.emit)
        screen.model_text(b"", final=True)
        return stop.exit_code


def show(event: Event, screen: Screen, *, emit: str) -> None:
    """One event of the workflow to the screen."""
    from xlcli.cli import report
    from xlcli.events import GeneratedText, LineScore, Notice, Progress, StreamStats, TokenScore

    match event:
        case LineScore():
            if screen.json:
                screen.object(
                    {name: value for name, value in report.fields(event).items() if name not in ("text", "spans")}
                )
            else:
                screen.write(f"{event.bits_per_byte:.3f}\t".encode())
                screen.scored_text(event.spans)
        case TokenScore():
            if screen.json:
                screen.object(report.token_object(event))
            else:
                quoted = report.to_json(event.text)
                screen.print(f"{event.byte}\t{event.bits:.3f}\t{quoted}\n")
        case StreamStats():
            if emit == "stats" and screen.json:
                screen.object(report.fields(event))
            elif emit == "stats":
                screen.print(report.stats_line(event) + "\n")
            if event.final and not (emit == "stats" and not screen.json):
                screen.say(report.stats_line(event))
        case GeneratedText():
            if screen.json:
                screen.object({"continuation": event.text})
            else:
                screen.model_text(event.text)
        case Notice():
            screen.notice(event)
        case Progress():
            screen.progress(event)


STATE = (
    Flag("--state-in", "FILE", "go on from a saved memory"),
    Flag("--state-out", "FILE", "save the memory at the end, or when stopped"),
)

COMMAND = Command(
    name="stream",
    about="Score text as it arrives, line by line, for ever, in constant memory.",
    examples=(
        "cat book.txt | xlcli stream",
        "tail -f app.log | xlcli stream --json --state-out log.state --save-every 10m",
    ),
    words="[FILE]",
    groups={
        "Stream": (
            MODEL,
            *reading("stream"),
            Flag("--emit", "lines|tokens|stats|none", "what to print", keys=("stream.emit",)),
            Flag(
                "--continue",
                "N",
                "when the input ends, continue it by N tokens",
                units.count,
                ("stream.continue_tokens",),
            ),
            Flag(
                "--flush-ms", "N", "score an unfinished line after so long a silence", units.count, ("stream.flush_ms",)
            ),
            Flag("--reset-on", "REGEX", "forget everything before a line that matches", keys=("stream.reset_on",)),
            *STATE,
            Flag("--save-every", "TIME", "save the memory every so often", units.duration, ("stream.save_every",)),
            SEED,
        ),
        "Machine": DEVICE,
        "Settings": SETTINGS,
        "Talk": TALK,
    },
    sections=("stream", "generate", "runtime"),
    run=run,
)
