"""Every preset is legal, and its description is true."""

import re

import pytest

from xlcli import config, presets, training
from xlcli.cli.entry import main
from xlcli.errors import ConfigError
from xlcli.model.build import build_on_meta

PRESETS = {preset.name: preset for preset in presets.list_presets()}
TREES = {name: presets.read_preset(name) for name in PRESETS}
PUBLISHED = [name for name, tree in TREES.items() if "max_steps" in tree["train"]]
"""Presets with a budget of their own; for others it depends on the device."""
OF_TEXTS = (256, 8192)
"""Smallest and largest vocabulary that a text gets, for presets without one."""


def test_the_promised_ones_are_there():
    assert list(PRESETS) == sorted(PRESETS)
    assert {"tiny", "small", "medium", "base"} <= set(PRESETS)
    assert {
        "txl-enwik8-12l", "txl-enwik8-18l", "txl-enwik8-24l", "txl-text8-24l", "txl-wt103-standard", "txl-wt103-large",
        "universal-base", "universal-act-base", "performer-enwik8", "t5-small-decoder", "gpt2-small", "llama-15m",
        "alibi-wt103", "shaw-base", "al-rfou-12l", "reformer-enwik8", "reformer-crime",
    } <= set(PUBLISHED)  # fmt: skip
    assert {"reformer-tiny", "reformer-small"} <= set(PRESETS)
    assert {f"small-{kind}" for kind in ("universal", "performer", "local", "rope", "t5")} <= set(PRESETS)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_legal_and_as_large_as_it_says(name):
    size = r"([\d.]+)(?: to ([\d.]+) M parameters by vocabulary| M parameters): \w.*\.$"
    least, most = re.match(size, PRESETS[name].about).groups()
    text = TREES[name].get("text", {})
    is_open = text.get("tokenizer", "auto") == "auto" and "vocab_size" not in text
    sizes = OF_TEXTS if is_open else (text.get("vocab_size") or 256,)
    assert len(sizes) == (1 if most is None else 2)
    for vocab_size, said in zip(sizes, (least, most), strict=False):
        settings = config.make(TREES[name], {"model": {"vocab_size": vocab_size}})
        n_parameters = build_on_meta(settings.model).n_parameters
        assert n_parameters == pytest.approx(1e6 * float(said), rel=0.1 if float(said) < 10 else 0.015)
    assert "about" not in TREES[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_one_leaves_nothing_of_its_recipe_open(name):
    """Their source and all deviations from it are named."""
    settings = config.make(TREES[name])
    assert settings.text.tokenizer != "auto"
    assert (settings.text.tokenizer == "bytes") == (settings.text.vocab_size is None)
    assert settings.train.optimizer == "adamw"
    assert settings.train.lr is not None
    assert re.search(r"[A-Z]\S+ (et al\. )?20\d\d\b", PRESETS[name].about)
    assert re.search(r"^# \w", PRESETS[name].path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "shape", "recipe"),
    [
        ("txl-enwik8-12l", (512, 12, 8, 64, 2048), (512, 512, 22, 400_000)),
        ("txl-enwik8-24l", (1024, 24, 8, 128, 3072), (768, 768, 64, 400_000)),
        ("txl-text8-24l", (1024, 24, 8, 128, 3072), (768, 768, 64, 400_000)),
        ("txl-wt103-standard", (410, 16, 10, 41, 2100), (150, 150, 60, 200_000)),
        ("txl-wt103-large", (1024, 18, 16, 64, 4096), (384, 384, 128, 4_000_000)),
        ("txl-lm1b-large", (1280, 24, 16, 80, 8192), (32, 32, 512, 1_200_000)),
    ],
)
def test_the_scripts_of_transformer_xl_are_followed(name, shape, recipe):
    settings = config.make(TREES[name])
    model, train = settings.model, settings.train
    assert (model.dim, model.n_layers, model.attention.n_heads, model.head_dim, model.ffn_dim) == shape
    assert (train.segment_len, train.mem_len, train.batch_size, train.max_steps) == recipe
    assert (model.norm.kind, model.norm.placement, model.feedforward.kind) == ("layer", "post", "relu")
    assert (model.position.kind, model.position.n_features, model.position.clamp_len) == ("xl", None, None)
    assert model.embedding.tied
    assert model.embedding.scaled
    assert (train.span, train.grad_clip, train.weight_decay, train.lr_schedule) == ("growing", 0.25, 0.0, "cosine")


@pytest.mark.parametrize("name", ["none", "../models/tiny", "tiny.toml", "", "*"])
def test_another_name_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match="presets"):
        presets.read_preset(name)


def test_the_list_keeps_what_is_to_be_used_apart_from_what_was_published(capsysbinary):
    assert main(["models", "presets"]) == 0
    text = capsysbinary.readouterr().out.decode()
    _, use, variants, published = re.split(r"^(?:Presets|Variants|Published)\b.*:$", text, flags=re.MULTILINE)
    listed = [
        re.findall(r"^([a-z0-9-]+)  +\S+ (?:to \S+ )?M ", table, re.MULTILINE) for table in (use, variants, published)
    ]
    reformers = ["reformer-small", "reformer-tiny"]
    assert listed[0] == ["base", "medium", "peer-12x512", *reformers, "short", "small", "tiny", "words"]
    assert listed[1] == [name for name in PRESETS if name.startswith("small-")]
    assert listed[2] == [name for name in PRESETS if name in PUBLISHED]
    assert sum(map(len, listed)) == len(PRESETS)


def test_settings_are_combined_with_the_named_or_every_automatic_preset():
    assert list(presets.configurations({}, "medium")) == ["medium"]
    assert set(presets.configurations({})) == set(presets.AUTOMATIC)
    assert list(presets.configurations({"model": {"attention": {"n_heads": 3}}})) == ["small", "short"]
    assert all(made.train.batch_size == 3 for made in presets.configurations({"train": {"batch_size": 3}}).values())
    with pytest.raises(ConfigError, match="n_heads"):
        presets.configurations({"model": {"attention": {"n_heads": 7}}})
    with pytest.raises(ConfigError, match="'smal'"):
        presets.configurations({}, "smal")


def test_a_choice_without_the_preset_that_fits_the_text_is_refused(tmp_path):
    (tmp_path / "text").write_text("a line\n" * 99)
    configs = presets.configurations({})
    del configs["tiny"]
    with pytest.raises(ConfigError, match=r"'tiny'.*\bsmall\b.*\bbase\b") as caught:
        list(training.train([str(tmp_path / "text")], tmp_path / "m", configs, dry_run=True))
    assert caught.value.exit_code == 2
