"""`xlcli bench`: speed of decoding, evaluation and training on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from xlcli import config as settings
from xlcli.cli import options
from xlcli.cli.command import App, Call
from xlcli.cli.loading import check_settings, find_model, load_model
from xlcli.cli.options import option
from xlcli.cli.outputs import Kept
from xlcli.cli.quantities import approximate_count, compact_number, format_bytes, number_or_blank
from xlcli.cli.score_report import rounding
from xlcli.cli.terminal import table, wrapped
from xlcli.config import Config, Tree
from xlcli.errors import ConfigError
from xlcli.events import Speed
from xlcli.presets import read_preset
from xlcli.store.layout import read_config

VOCAB_SIZE = 2048  # vocabulary of a preset whose vocabulary depends on the text: as for a text of 13 MB
COLUMN = 12  # maximum width of a column of figures with the gap before it
app = App()


@app.command("bench", "xlcli bench decode --mem-len 512,3800", "xlcli bench train --preset small")
def bench(
    call: Call,
    task: Annotated[Literal["decode", "eval", "train"], typer.Argument(metavar="[decode|eval|train]")] = "decode",
    model: options.Model = None,
    preset: Annotated[
        str | None,
        option(
            "Model",
            "--preset NAME",
            "Measure this preset, with random weights, instead of a model.",
            autocompletion=options.complete_presets,
        ),
    ] = None,
) -> int:
    if preset is not None and call.is_typed("model"):
        raise ConfigError("--preset and --model cannot be combined.", "Give one of them.")
    if task == "decode" and call.is_typed("segment_len"):
        raise ConfigError("--segment-len does not apply to xlcli bench decode.", "Leave it out.")
    screen = call.screen
    folder = None
    with call.naming_settings():
        user_settings = call.settings.tree
        config = configure(task, preset, user_settings)
        if preset is None:
            folder = find_model(call, model, config.bench)
            config = settings.make(read_config(folder).model_dump(mode="json"), user_settings)
        call.show_config(config)
        if folder is None:
            check_settings("bench", config.bench, config, f"preset {preset}")

    def show(speeds: list[Speed]) -> None:
        if speeds and screen.json:
            screen.object({"sweep": speeds} if len(config.bench.mem_lens) > 1 else speeds[0])
        elif speeds:
            screen.print(speed_text(speeds, screen.columns or 80))

    with screen.stop() as stop:
        screen.wait("loading the model")
        from xlcli import bench as benchmark
        from xlcli.runtime import make_runtime

        name = str(preset)
        if folder is not None:
            name = folder.resolve().name
        loaded = None
        if task == "train":
            runtime = make_runtime(config.runtime, training=True)
        elif folder is not None:
            loaded, runtime = load_model(folder, config.bench, config.runtime, screen)
        else:
            runtime = make_runtime(config.runtime)
            loaded = benchmark.untrained(name, config, runtime)
        screen.drive(benchmark.bench(task, name, loaded, config, runtime, stop=stop), Kept(Speed, show))
        return stop.exit_code


def configure(task: str, preset: str | None, user_settings: Tree) -> Config:
    """The user's settings over a preset; `ConfigError` if one is illegal, or of the shape of a trained model."""
    if preset is None:
        for section in ("model", "train"):
            is_of_task = section == task == "train"
            if section in user_settings and not is_of_task:
                key = f"{section}.{next(iter(user_settings[section]))}"
                raise ConfigError(f"{key} cannot be changed in a trained model.", "Use --preset NAME.")
        return settings.make(user_settings)
    config = settings.make(read_preset(preset), user_settings)
    has_vocab_size = config.model.vocab_size != settings.ModelConfig().vocab_size or config.text.tokenizer == "bytes"
    if has_vocab_size:
        return config
    return settings.change(config, {"model": {"vocab_size": config.text.vocab_size or VOCAB_SIZE}})


def speed_text(speeds: Sequence[Speed], width: int) -> str:
    """Figures as tables of at most `width` cells with a column for each memory length."""
    first = speeds[0]
    kernels = {None: "", True: ", compiled kernels", False: ", no compiled kernels"}[first.kernels]
    types = f"{first.device} {first.dtype}{rounding(first.weight_dtype, first.memory_dtype)}"
    size = f"{compact_number(first.parameters)} parameters"
    threads = approximate_count(first.threads, "thread")
    text = wrapped(f"{first.task} of {first.model}, {size}, {types}, {threads}{kernels}\n", width)

    # So many memory lengths in a table as fit beside the names, in rows that say something.
    columns = [_figures(speed) for speed in speeds]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    n_in_table = max(1, (width - max(map(len, names))) // COLUMN)
    for start in range(0, len(columns), n_in_table):
        shown = columns[start : start + n_in_table]
        rows = [[name, *(column[name] for column in shown)] for name in names]
        text += "\n" + table(rows)
    return text


def _figures(speed: Speed) -> dict[str, str]:
    """Name and text of each figure; empty where it does not apply."""

    def ms(value: float | None) -> str:
        return number_or_blank(value, ".3g" if value is None or value < 1000 else ",.0f")

    segment = batch = first_token = ""
    if speed.task != "decode":
        segment = f"{speed.segment_len:,}"
    if speed.task != "decode" or speed.batch_size != 1:
        batch = f"{speed.batch_size:,}"
    if speed.first_token_seconds is not None:
        first_token = f"{1e3 * speed.first_token_seconds:,.0f} ms"
    return {
        "memory": f"{speed.mem_len:,}",
        "segment": segment,
        "batch": batch,
        "tokens/s, mean": compact_number(speed.tokens_per_second),
        "timed calls": f"{speed.calls:,}",
        "ms per token, median": ms(speed.ms_per_token),
        "  90th percentile": ms(speed.ms_per_token_p90),
        "  99th percentile": ms(speed.ms_per_token_p99),
        "first token": first_token,
        "recomputed, ms per token": ms(speed.recompute_ms_per_token),
        "  times slower": number_or_blank(speed.recompute_ratio, ",.1f"),
        "peak RAM": format_bytes(speed.peak_rss_bytes),
    }
