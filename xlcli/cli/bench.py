"""`xlcli bench`: speed of decoding, evaluation and training on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from xlcli import config as settings
from xlcli.cli import options, prologue, report
from xlcli.cli.options import option, plot_option
from xlcli.cli.plot import draw_speed
from xlcli.cli.settings import name_option_in_errors, print_config, user_settings
from xlcli.cli.terminal import table, wrapped
from xlcli.cli.usage import source
from xlcli.config import Config, Tree
from xlcli.errors import ConfigError
from xlcli.events import Speed
from xlcli.presets import read_preset
from xlcli.store.layout import read_config

VOCAB_SIZE = 2048
"""Vocabulary of a preset whose vocabulary depends on the text: as for a text of 13 MB."""
COLUMN = 12
"""Maximum width of a column of figures with the gap before it."""
MEANING = (
    ("first token", "after a prompt as long as the memory"),
    ("bandwidth", "share of the bandwidth of the machine, for weights and memory; - if a cache has them"),
    ("arithmetic", "share of the arithmetic of the machine, for the matrix products of the call or step"),
    (
        "recomputed, ms per token",
        "the same model without memory: for each token a call over it and as many tokens before it as the memory "
        "holds, one sequence at a time. Dai et al. 2019 (table 9, on a GPU) evaluate 363, 773, 1,409 and 1,874 times "
        "faster than a model that recomputes windows of 800, 1,800, 2,800 and 3,800 tokens.",
    ),
)
"""Names of figures and their meaning."""
app = typer.Typer()


@app.command(epilog="xlcli bench decode --mem-len 512,3800\nxlcli bench train --preset small")
def bench(
    context: typer.Context,
    task: Annotated[Literal["decode", "eval", "train"], typer.Argument(metavar="[decode|eval|train]")] = "decode",
    model: options.Model = None,
    preset: Annotated[
        str | None, option("Model", "--preset NAME", "Measure this preset with random weights instead of a model.")
    ] = None,
    plot: Annotated[str | None, plot_option("Results", "Plot time per token by memory length")] = None,
    **_: Any,
) -> int:
    """Measure the speed of decoding (default), evaluation or training, beside the peaks of this machine."""
    if preset is not None and source(context, "model") == "COMMANDLINE":
        raise ConfigError("--preset and --model exclude each other.", "Give one of them.")
    if task == "decode" and source(context, "segment_len") == "COMMANDLINE":
        raise ConfigError("--segment-len does not apply to xlcli bench decode.", "Leave it out.")
    screen = prologue.open_screen(context)
    with name_option_in_errors(context):
        given = user_settings(context)
        config = configure(task, preset, given)
        folder = prologue.find_model(context, config.bench, screen) if preset is None else None
        if folder is not None:
            config = settings.make(read_config(folder).model_dump(mode="json"), given)
        if context.params["print_config"]:
            screen.print(print_config(config, context, as_json=screen.json))
            return 0
        if folder is None:
            prologue.check_settings("bench", config.bench, config, f"preset {preset}")
    prologue.check_files(context, [] if folder is None else [folder], ["plot"])
    with screen.stop() as stop:
        screen.wait("loading the model")
        from xlcli import bench as benchmark
        from xlcli.runtime import make_runtime

        name = preset or str(folder and folder.resolve().name)
        if folder is None or task == "train":
            runtime = make_runtime(config.runtime, training=task == "train")
            loaded = None if task == "train" else benchmark.untrained(name, config, runtime)
        else:
            loaded, runtime = prologue.load_model(folder, config.bench, config.runtime, screen)
        events = benchmark.bench(task, name, loaded, config, runtime, stop=stop)
        speeds = [event for event in events if not screen.shows(event)]
        if not speeds:
            return stop.exit_code
        if plot is not None:
            draw_speed(plot, speeds)
            screen.say(f"plot written to {plot}")
        if screen.json:
            screen.object({"sweep": speeds} if len(config.bench.mem_lens) > 1 else speeds[0])
        else:
            screen.print(speed_text(speeds, screen.columns or 80, with_meaning=screen.verbose))
        return stop.exit_code


def configure(task: str, preset: str | None, given: Tree) -> Config:
    """The given settings over a preset, or without one.

    Raises:
        ConfigError: A setting is illegal, or is one of the shape of a model, which is given without a preset.
    """
    if preset is not None:
        made = settings.make(read_preset(preset), given)
        if made.model.vocab_size != settings.ModelConfig().vocab_size or made.text.tokenizer == "bytes":
            return made
        return settings.change(made, {"model": {"vocab_size": made.text.vocab_size or VOCAB_SIZE}})
    fixed = [name for name in ("model", "train") if name in given and (name, task) != ("train", "train")]
    if fixed:
        key = f"{fixed[0]}.{next(iter(given[fixed[0]]))}"
        raise ConfigError(f"{key} cannot be changed in a trained model.", "Use --preset NAME.")
    return settings.make(given)


def speed_text(speeds: Sequence[Speed], width: int, *, with_meaning: bool) -> str:
    """Figures as tables of at most `width` cells with a column for each memory length, and perhaps their meaning."""
    first = speeds[0]
    kernels = {None: "", True: ", compiled kernels", False: ", no compiled kernels"}[first.kernels]
    threads = report.counted(first.threads, "thread")
    about = (
        f"{first.task} of {first.model}, {report.amount(first.parameters)} parameters, {first.device} {first.dtype}"
        f"{report.rounding(first.weight_dtype, first.memory_dtype)}, {threads}{kernels}\n"
        f"machine, measured: reads {first.machine_read_bytes_per_second / 1e9:.1f} GB/s, "
        f"{first.machine_flops_per_second / 1e9:.0f} GFLOP/s\n"
    )
    columns = [_figures(speed) for speed in speeds]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    n = max(1, (width - max(map(len, names))) // COLUMN)
    parts = [columns[at : at + n] for at in range(0, len(columns), n)]
    texts = [table([[name, *(column[name] for column in part)] for name in names]) for part in parts]
    if with_meaning:
        texts.append(table([row for row in MEANING if row[0] in names], width, left=(0, 1)))
    return "\n".join([wrapped(about, width), *texts])


def _figures(speed: Speed) -> dict[str, str]:
    """Name and text of each figure; empty where it does not apply."""

    def percent(rate: float | None, share: float | None) -> str:
        return "" if rate is None else "-" if share is None else f"{100 * share:.0f} %"

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

    def amount(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:,.4g}"

    decodes, seconds = speed.task == "decode", speed.first_token_seconds
    return {
        "memory": f"{speed.mem_len:,}",
        "segment": "" if decodes else f"{speed.segment_len:,}",
        "batch": "" if decodes and speed.batch_size == 1 else f"{speed.batch_size:,}",
        "tokens/s, mean": report.amount(speed.tokens_per_second),
        "timed calls": f"{speed.calls:,}",
        "ms per token, median": ms(speed.ms_per_token),
        "  90th percentile": ms(speed.ms_per_token_p90),
        "  99th percentile": ms(speed.ms_per_token_p99),
        "first token": "" if seconds is None else f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s",
        "bandwidth": percent(speed.read_bytes_per_token, speed.read_share),
        "  MB per token": amount(speed.read_bytes_per_token),
        "arithmetic": percent(speed.flops_per_token, speed.flops_share),
        "  million operations": amount(speed.flops_per_token),
        "recomputed, ms per token": ms(speed.recompute_ms_per_token),
        "  times slower": "" if speed.recompute_ratio is None else f"{speed.recompute_ratio:,.1f}",
        "peak RAM": report.size(speed.peak_rss_bytes),
    }
