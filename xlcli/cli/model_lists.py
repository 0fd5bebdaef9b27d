"""Lists and descriptions of models and presets, for `xlcli models`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.cli import json_objects, quantities, report
from xlcli.cli.terminal import table
from xlcli.cli.usage import nearest
from xlcli.errors import CheckpointError
from xlcli.presets import list_presets, read_preset

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.presets import Preset
    from xlcli.store.discover import ModelSummary

_HEADING = ("name", "params", "on disk", "weights", "bits/byte", "age", "corpus")
_TEXTS = (_HEADING.index("name"), _HEADING.index("corpus"))


def list_models(screen: Screen) -> None:
    """Lists models in `./models` and bundled ones."""
    from xlcli.store.discover import bundled_models, local_models

    local, bundled = local_models(), bundled_models()
    if screen.json:
        screen.object(
            {
                "local": [json_objects.fields(model) for model in local],
                "bundled": [json_objects.fields(model) for model in bundled],
                "presets": [_preset_object(preset) for preset in list_presets()],
            }
        )
        return
    if not local:
        screen.print("No models in ./models yet; make one: xlcli train FILE\n\n")
    for title, models in (("Models in ./models", local), ("Bundled models", bundled)):
        if models:
            screen.print(f"{title}:\n{_table(models, screen)}\n")
    _explain_scores([*local, *bundled], screen)
    screen.print("Presets for training: xlcli models presets\n")


def list_all_presets(screen: Screen) -> None:
    """Lists presets."""
    presets = list_presets()
    if screen.json:
        screen.object({"presets": [_preset_object(preset) for preset in presets]})
        return
    lists = [
        f"{title}:\n" + table([(preset.name, preset.about) for preset in group], screen.columns, left=(0, 1))
        for title, group in _groups(presets)
    ]
    screen.print("\n".join(lists))


def _preset_object(preset: Preset) -> dict[str, Any]:
    return {"name": preset.name, "about": preset.about, "path": preset.path}


def _groups(presets: Sequence[Preset]) -> list[tuple[str, list[Preset]]]:
    """Presets by heading. Only presets of published architectures set `train.max_steps`."""
    published = [preset for preset in presets if "max_steps" in read_preset(preset.name).get("train", {})]
    variants = [preset for preset in presets if preset.name.startswith("small-")]
    return [
        ("Presets, for xlcli train --preset NAME", [p for p in presets if p not in published and p not in variants]),
        ("Variants of small, to be compared with it", variants),
        ("Published architectures", published),
    ]


def _table(models: Sequence[ModelSummary], screen: Screen) -> str:
    return table([_HEADING, *map(_row, models)], screen.columns, left=_TEXTS, clip=True)


def _is_partial(model: ModelSummary) -> bool:
    """Whether the score is that of a part of the validation text."""
    return model.scored is not None and model.scored.bytes < model.scored.of_bytes


def _explain_scores(models: Sequence[ModelSummary], screen: Screen) -> None:
    """Prints which text the scores are of."""
    if any(model.scored for model in models):
        screen.print("bits/byte of the validation text, memory as in training\n")
    if any(map(_is_partial, models)):
        screen.print("* of its beginning: xlcli models show NAME\n")


def _row(model: ModelSummary) -> tuple[str, ...]:
    return (
        model.name,
        quantities.amount(model.parameters) if model.parameters is not None else "?",
        quantities.size(model.bytes),
        model.encoding or "?",
        f"{model.bits_per_byte:.3f}{'*' if _is_partial(model) else ''}" if model.bits_per_byte is not None else "-",
        "-" if model.bundled else quantities.age(time.time() - model.modified),
        model.problem or model.corpus or "-",
    )


def show(name: str, screen: Screen) -> None:
    """Shows a model, or the preset of that name."""
    from xlcli.cli.settings import to_toml
    from xlcli.store.discover import CARD, find, is_bundled, summarize
    from xlcli.store.layout import read_config, read_record

    preset = next((preset for preset in list_presets() if preset.name == name), None)
    try:
        folder = find(name)
    except CheckpointError as error:
        if preset is None:
            names = [preset.name for preset in list_presets()]
            near = nearest(name, names)
            raise CheckpointError(error.message, f"Did you mean the preset {near}?" if near else error.remedy) from None
        _show_preset(preset, read_preset(name), screen)
        return
    summary, record = summarize(folder, bundled=is_bundled(folder, Path.cwd())), read_record(folder)
    config = read_config(folder)
    if screen.json:
        config_tree = config.model_dump(mode="json")
        screen.object({**json_objects.fields(summary), "record": record, "config": config_tree})
        return
    screen.print(f"{folder}\n" + _table([summary], screen))
    if summary.bits_per_byte is not None and summary.scored:
        screen.report(f"{summary.bits_per_byte:.4f} bits/byte: {report.scored(summary.scored)}\n")
    card = folder / CARD
    if card.is_file() and card.stat().st_size < 2**20:
        screen.print("\n" + card.read_text("utf-8", "replace"))
    elif record:
        screen.print("\n" + to_toml({"record": record}))
    screen.print("\n" + to_toml({"model": config.model.model_dump(mode="json")}).lstrip("\n"))


def _show_preset(preset: Preset, tree: dict[str, Any], screen: Screen) -> None:
    if screen.json:
        screen.object({"name": preset.name, "about": preset.about, "path": preset.path, "config": tree})
    else:
        screen.print(preset.path.read_text("utf-8"))
