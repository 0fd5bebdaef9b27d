"""Every preset is legal, says what it is for, and is what it says."""

import re

import pytest

from xlcli import config, presets
from xlcli.errors import ConfigError
from xlcli.train.plan import parameter_count

NAMES = [preset.name for preset in presets.list_presets()]


def test_the_promised_ones_are_there():
    assert sorted(NAMES) == NAMES
    assert {"tiny", "small", "medium", "base", "txl-enwik8-12l"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_legal_and_as_large_as_it_says(name):
    preset = next(preset for preset in presets.list_presets() if preset.name == name)
    settings = config.make(presets.read_preset(name))
    said = float(re.match(r"([\d.]+) M parameters", preset.about)[1]) * 1e6
    vocab_size = {"small": 1024, "base": 8192}.get(name, 256)
    model = settings.model.model_copy(update={"vocab_size": vocab_size})
    assert parameter_count(model) == pytest.approx(said, rel=0.2)
    assert "about" not in presets.read_preset(name)


def test_the_published_one_is_as_published():
    model = config.make(presets.read_preset("txl-enwik8-12l")).model
    assert (model.dim, model.n_layers, model.attention.n_heads, model.head_dim, model.ffn_dim) == (512, 12, 8, 64, 2048)
    assert (model.norm.kind, model.norm.placement, model.feedforward.kind) == ("layer", "post", "relu")
    assert model.position.tied
    assert model.position.n_features is None
    assert parameter_count(model) == pytest.approx(41e6, rel=0.02)


@pytest.mark.parametrize("name", ["none", "../models/tiny", "tiny.toml", "", "*"])
def test_another_name_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"there is no preset .*Choose one of: .*small.*tiny"):
        presets.read_preset(name)
