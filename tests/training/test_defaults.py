"""Defaults that follow from text and device."""

import pytest
import torch

from xlcli import config, presets
from xlcli.errors import ConfigError
from xlcli.model.build import build_model
from xlcli.training import defaults, memory
from xlcli.training.loop import IntervalTrigger

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("size", "device", "preset"),
    [
        (99_999, CPU, "tiny"), (100_000, CPU, "small"), (10**10, CPU, "small"), (99_999, CUDA, "tiny"),
        (7_999_999, CUDA, "small"), (8_000_000, CUDA, "base"),
    ],
)  # fmt: skip
def test_the_preset_follows_text_and_device(size, device, preset):
    assert defaults.choose_preset(size, device) == preset


def fill_in(tree, preset="tiny", device=CPU):
    settings = presets.configurations(tree, preset)[preset]
    return defaults.fill_in(settings, tokenizer="bytes", vocab_size=256, device=device)


@pytest.mark.parametrize(
    ("tree", "device", "budget"),
    [
        ({}, CPU, (None, None, 600.0)), ({}, CUDA, (None, None, 1800.0)), ({"max_steps": 7}, CPU, (7, None, None)),
        ({"max_tokens": 7}, CPU, (None, 7, None)), ({"max_time": 7.0}, CPU, (None, None, 7.0)),
        ({"max_steps": 7, "max_time": 7.0}, CPU, (7, None, 7.0)),
    ],
)  # fmt: skip
def test_there_is_always_a_budget(tree, device, budget):
    train = fill_in({"train": tree}, device=device).train
    assert (train.max_steps, train.max_tokens, train.max_time) == budget


def test_rates_are_decided_and_kept():
    assert fill_in({}).train.lr == 6e-3
    assert fill_in({"train": {"optimizer": "adamw"}}).train.lr == 2e-3
    assert fill_in({"train": {"lr": 0.5}}).train.lr == 0.5
    assert fill_in({}, preset="txl-enwik8-12l").train.lr == 2.5e-4


def test_the_user_stands_above_the_preset_and_the_machine():
    settings = fill_in({"model": {"dim": 32, "vocab_size": 99}, "train": {"batch_size": 3}})
    assert (settings.model.dim, settings.train.batch_size, settings.model.n_layers) == (32, 3, 2)
    assert settings.model.vocab_size == 256
    assert settings.text.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"max_time": 600.0}, "10 minutes"), ({"max_time": 90.0}, "90 seconds"), ({"max_steps": 2000}, "2,000 steps"),
        ({"max_steps": 1}, "1 step"),
        ({"max_tokens": 10**7, "max_time": 120.0}, "10,000,000 tokens or 2 minutes"),
    ],
)  # fmt: skip
def test_a_budget_in_words(train, words):
    assert defaults.budget_in_words(config.make({"train": train})) == words


@pytest.mark.parametrize("preset", [preset.name for preset in presets.list_presets()])
def test_parameters_are_counted_without_making_them(preset):
    model = config.make(presets.read_preset(preset)).model
    with torch.device("meta"):
        assert memory.n_parameters(model) == sum(p.numel() for p in build_model(model).parameters())


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ({"a": 1}, {"a": 1}, []), ({"a": {"b": 1, "c": 2}}, {"a": {"b": 2, "c": 2}}, ["a.b"]),
        ({"a": {"kind": "x"}}, {"a": None}, ["a"]), ({}, {"a": 1}, ["a"]),
    ],
)  # fmt: skip
def test_differences_are_named(old, new, keys):
    assert config.differences(old, new) == keys


def test_what_a_resumed_run_cannot_change_is_named_by_its_kind():
    saved = fill_in({"model": {"position": {"kind": "learned"}}})
    assert defaults.resumed(saved, {"train": {"max_steps": 5}}).train.max_steps == 5
    with pytest.raises(ConfigError, match=r"^model\.dim cannot change"):
        defaults.resumed(saved, {"model": {"dim": 32}})
    with pytest.raises(ConfigError, match=r"^model\.position\.kind cannot change"):
        defaults.resumed(saved, {"model": {"position": {"kind": "rope"}}})


def test_what_is_free_exists():
    known = {f"{name}.{key}" for name, section in config.Config().model_dump().items() for key in section}
    assert known >= defaults.CHANGEABLE


def test_no_more_microbatches_than_sequences():
    with pytest.raises(ConfigError, match=r"train\.grad_accum 9 is more than train\.batch_size 8"):
        fill_in({"train": {"grad_accum": 9}})


@pytest.mark.parametrize(
    ("every", "parts", "due"),
    [(3, 1, [3, 6, 9, 12]), (2.5, 1, [3, 5, 8, 10]), (None, 4, [3, 6, 9, 12]), (None, 5, [3, 5, 8, 10, 12])],
)
def test_a_trigger_depends_only_on_where_the_run_is(every, parts, due):
    trigger = IntervalTrigger(every, parts=parts)
    assert [step for step in range(1, 13) if trigger.due(step, float(step), step / 12)] == due
    for begin in range(12):
        trigger = IntervalTrigger(every, parts=parts)
        trigger.reset(begin, float(begin), begin / 12)
        later = [step for step in range(begin + 1, 13) if trigger.due(step, float(step), step / 12)]
        assert later == [step for step in due if step > begin]


def test_long_work_triggers_once():
    trigger = IntervalTrigger(1.0)
    assert trigger.due(1, 5.0, 0.0)
    assert not trigger.due(2, 5.9, 0.0)


def test_a_seed_is_filled_in_and_kept():
    assert config.make().runtime.seed is None
    assert fill_in({}).runtime.seed == 0
    assert fill_in({"runtime": {"seed": 5}}).runtime.seed == 5
