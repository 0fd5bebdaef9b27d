"""Defaults that follow from text and device."""

from types import SimpleNamespace

import pytest
import torch

from xlcli import config, presets
from xlcli.errors import ConfigError, InvalidSettingError
from xlcli.model.build import build_model, build_on_meta
from xlcli.training import defaults
from xlcli.training.schedule import IntervalTrigger

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("size", "device", "preset"),
    [
        (99_999, CPU, "tiny"), (100_000, CPU, "short"), (1_999_999, CPU, "short"), (2_000_000, CPU, "small"),
        (10**10, CPU, "small"), (99_999, CUDA, "tiny"), (7_999_999, CUDA, "small"), (8_000_000, CUDA, "base"),
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


def fill_in_text(given, n_tokens, model):
    made = defaults.fill_in(given, tokenizer="bytes", vocab_size=256, device=CPU, n_tokens=n_tokens, model=model)
    return made.train


def adapt(train, n_tokens, *, source=None, record=None):
    """Section `train` of a run on a text of `n_tokens` that starts from a model."""
    given = config.make({"train": train})
    trained = config.make({"train": {"lr": 0.01, "adam_lr": 0.02} if source is None else source})
    model = SimpleNamespace(config=trained, record=record or {})
    return fill_in_text(given, n_tokens, model)


def test_rates_grow_with_the_text_up_to_those_of_the_model():
    n = defaults.FULL_RATE_TOKENS
    factors = [adapt({}, length).lr / 0.01 for length in (1, n // 10, n // 2, n, 10 * n)]
    assert factors == pytest.approx([0.3, 0.3, 0.5, 1.0, 1.0])
    assert adapt({}, n // 2).adam_lr == pytest.approx(0.01)
    given = adapt({"lr": 0.5, "adam_lr": 0.7}, 1)
    assert (given.lr, given.adam_lr) == (0.5, 0.7)


def test_rates_that_the_model_does_not_have_are_those_of_a_new_one():
    assert adapt({}, 10**9, source={}).lr == 6e-3
    assert adapt({}, 10**9, source={}).adam_lr == 1e-2
    assert adapt({"optimizer": "adamw"}, 10**9).lr == 2e-3
    assert adapt({"optimizer": "adamw"}, 1).lr == pytest.approx(0.3 * 2e-3)


def test_an_imported_model_keeps_what_it_knows():
    """Rates are low and do not follow the text, also in a run from a model that began with an imported one."""
    about = {"imported": {"format": "gguf"}}
    for record in (about, {"init": {"model": "m", "weights": "0" * 64} | about}):
        for n_tokens in (1, 10**9):
            made = adapt({"optimizer": "muon"}, n_tokens, record=record)
            assert (made.lr, made.adam_lr, made.warmup_steps) == (1e-4, 1e-4, None)
    assert adapt({"lr": 0.5, "warmup_steps": 0}, 1, record=about).lr == 0.5
    assert adapt({"warmup_steps": 0}, 1, record=about).warmup_steps == 0


def test_rates_in_a_chain_are_those_of_its_first_model():
    origin = {"init": {"model": "books", "weights": "0" * 64}}
    for n_tokens in (1, 10**9):
        source = {"lr": 0.01 * defaults.rate_factor(n_tokens), "adam_lr": 0.02 * defaults.rate_factor(n_tokens)}
        record = origin | {"train": {"bytes": n_tokens, "tokens": n_tokens}}
        for length in (1, 300_000, 10**9):
            made, expected = adapt({}, length, source=source, record=record), adapt({}, length)
            assert (made.lr, made.adam_lr) == pytest.approx((expected.lr, expected.adam_lr))
    assert adapt({}, 10**9, record=origin).lr == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("train", "n_tokens", "budget"),
    [
        ({}, 100_000, (None, 200_000, 600.0)), ({"max_time": 9.0}, 100_000, (None, None, 9.0)),
        ({}, 1, (None, 20 * 16 * 128, 600.0)), ({"batch_size": 2}, 1, (None, 20 * 2 * 128, 600.0)),
        ({}, 2 * 10**9, (None, None, 600.0)), ({"max_steps": 7}, 100_000, (7, None, None)),
        ({"max_tokens": 7}, 100_000, (None, 7, None)),
    ],
)  # fmt: skip
def test_a_run_from_a_model_ends_after_some_passes(train, n_tokens, budget):
    made = adapt(train, n_tokens)
    assert (made.max_steps, made.max_tokens, made.max_time) == budget


@pytest.mark.parametrize(
    ("train", "n_tokens", "budget"),
    [
        ({}, 500_000, (None, 2_000_000, 600.0)), ({}, 10**9, (None, None, 600.0)),
        ({}, 1, (None, 300 * 16 * 128, 600.0)), ({"batch_size": 8}, 1, (None, 600_000, 600.0)),
        ({"batch_size": 256}, 1, (None, 300 * 256 * 128, 600.0)), ({"max_time": 9.0}, 100, (None, None, 9.0)),
        ({"max_steps": 7}, 100, (7, None, None)), ({"max_tokens": 7}, 100, (None, 7, None)),
    ],
)  # fmt: skip
def test_without_a_budget_a_run_ends_after_some_passes(train, n_tokens, budget):
    given = config.make({"train": train})
    limited = fill_in_text(given, n_tokens, None)
    assert (limited.max_steps, limited.max_tokens, limited.max_time) == budget


def test_a_run_with_dropout_takes_more_passes():
    for rates, n_passes in (({}, 4), (0.0, 4), (0.1, 8), ({"feedforward": 0.01}, 8)):
        given = config.make({"model": {"dropout": rates}})
        assert fill_in_text(given, 500_000, None).max_tokens == n_passes * 500_000


def test_the_same_budget_is_no_new_one():
    saved = fill_in({"train": {"max_tokens": 90, "max_time": 60.0}})
    for given, expected in (({}, 90), ({"max_time": 60.0}, 90), ({"max_time": 61.0}, None), ({"max_time": None}, 90)):
        assert defaults.resumed(saved, {"train": given}).train.max_tokens == expected
    with pytest.raises(InvalidSettingError, match="last budget"):
        defaults.resumed(saved, {"train": {"max_time": None, "max_tokens": None}})


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
        ({"max_tokens": 10**7, "max_time": 120.0}, "10,000,000 tokens (4.0 passes) or 2 minutes"),
        ({"max_tokens": 10**6}, "1,000,000 tokens"), ({"max_tokens": 2 * 10**9}, "2,000,000,000 tokens (800 passes)"),
    ],
)  # fmt: skip
def test_a_budget_in_words(train, words):
    assert defaults.budget_in_words(config.make({"train": train}), 2_500_000) == words


@pytest.mark.parametrize("preset", [preset.name for preset in presets.list_presets()])
def test_parameters_are_counted_without_making_them(preset):
    model = config.make(presets.read_preset(preset)).model
    with torch.device("meta"):
        assert build_on_meta(model).n_parameters == sum(p.numel() for p in build_model(model).parameters())


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
    with pytest.raises(ConfigError, match=r"^model\.dim\b"):
        defaults.resumed(saved, {"model": {"dim": 32}})
    with pytest.raises(ConfigError, match=r"^model\.position\.kind\b"):
        defaults.resumed(saved, {"model": {"position": {"kind": "rope"}}})


def test_what_is_free_exists():
    known = {f"{name}.{key}" for name, section in config.Config().model_dump().items() for key in section}
    assert known >= defaults.CHANGEABLE


def test_no_more_microbatches_than_sequences():
    with pytest.raises(ConfigError, match=r"train\.grad_accum\D+9\D+8\b"):
        fill_in({"train": {"grad_accum": 9}})


@pytest.mark.parametrize(
    ("every", "parts", "due"),
    [(3, 1, [3, 6, 9, 12]), (2.5, 1, [3, 5, 8, 10]), (None, 4, [3, 6, 9, 12]), (None, 5, [3, 5, 8, 10, 12])],
)
def test_a_trigger_depends_only_on_where_the_run_is(every, parts, due):
    trigger = IntervalTrigger(every, parts=parts)
    assert [step for step in range(1, 13) if trigger.move_on(step, float(step), step / 12)] == due
    for begin in range(12):
        trigger = IntervalTrigger(every, parts=parts)
        trigger.move_on(begin, float(begin), begin / 12)
        later = [step for step in range(begin + 1, 13) if trigger.move_on(step, float(step), step / 12)]
        assert later == [step for step in due if step > begin]


def test_long_work_triggers_once():
    trigger = IntervalTrigger(1.0)
    assert trigger.move_on(1, 5.0, 0.0)
    assert not trigger.move_on(2, 5.9, 0.0)


def test_a_seed_is_filled_in_and_kept():
    assert config.make().runtime.seed is None
    assert fill_in({}).runtime.seed == 0
    assert fill_in({"runtime": {"seed": 5}}).runtime.seed == 5
