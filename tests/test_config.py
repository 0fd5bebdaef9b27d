"""The configuration: legal values, error messages, merging of tables."""

import subprocess
import sys
import tomllib

import pytest

from xlcli.config import (
    ATTENTIONS,
    POSITIONS,
    Config,
    GenerateConfig,
    RuntimeConfig,
    make,
    merge,
    parse_override,
    read_toml,
    validate,
)
from xlcli.errors import ConfigError


def test_the_default_is_legal_and_survives_json():
    assert make() == Config()
    assert validate(Config, make().model_dump(mode="json")) == make()


@pytest.mark.parametrize(
    "tree",
    [
        {"train": {"eval_every": 60.0, "save_every": 60}}, {"train": {"betas": [0.5, 0.6]}},
        {"eval": {"sweep_mem_len": [0, 128]}}, {"text": {"valid": 0.1, "test": "held.txt"}},
        {"model": {"position": {"kind": "none"}}}, {"generate": {"stop": ["a", "b"]}},
    ],
)  # fmt: skip
def test_every_kind_of_value_survives_json(tree):
    once = make(tree)
    again = validate(Config, once.model_dump(mode="json"))
    assert again == once
    assert type(again.train.eval_every) is type(once.train.eval_every)
    assert type(again.train.save_every) is type(once.train.save_every)


def test_a_decimal_point_makes_seconds_of_steps():
    assert isinstance(make({"train": {"eval_every": 60}}).train.eval_every, int)
    assert isinstance(make({"train": {"eval_every": 60.0}}).train.eval_every, float)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"train": {"batchsize": 3}}, r"train\.batchsize\b.*'train\.batch_size'"),
        ({"model": {"mem_len": 3}}, r"model\.mem_len\b.*'\w+\.mem_len'"),
        ({"nonsense": 1}, r"nonsense"),
        ({"train": {"foo": 1}}, r"train\.foo\b.*--print-config"),
        ({"modle": {"dim": 8}}, r"modle\b.*'model'"),
        ({"trian": {"lr": 1}}, r"trian\b.*'train'"),
        ({"model": {"dim": 0}}, r"model\.dim\D+0\D+1\b"),
        ({"model": {"dim": "wide"}}, r"model\.dim\b.*'wide'"),
        ({"model": {"dim": 2.5}}, r"model\.dim\D+2\.5"),
        ({"model": {"dim": 100, "attention": {"n_heads": 3}}}, r"model\.dim\D+100\b"),
        ({"model": {"attention": {"kind": "lsh9"}}}, r"attention"),
        ({"train": {"mem_len": 10**12}}, r"train\.mem_len"),
        ({"train": {"mem_len": -1}}, r"train\.mem_len\b.*-1\b"),
        ({"train": {"lr": float("inf")}}, r"train\.lr"),
        ({"train": {"lr": float("nan")}}, r"train\.lr"),
        ({"train": {"lr": 0.0}}, r"train\.lr\D+0\b"),
        ({"train": {"lr": 1e308}}, r"train\.lr"),
        ({"train": {"eval_every": 1e-320}}, r"train\.eval_every"),
        ({"train": {"save_every": 5e-324}}, r"train\.save_every"),
        ({"train": {"max_time": -0.0}}, r"train\.max_time"),
        ({"model": {"init_std": 1e308}}, r"model\.init_std"),
        ({"runtime": {"timeout": 1e18}}, r"runtime\.timeout"),
        ({"train": {"recompute_activations": True}, "model": {"stack": {"kind": "reversible"}}},
         r"train\.recompute_activations\b.*'reversible'"),
        ({"train": {"recompute_activations": True}, "runtime": {"compile": True}},
         r"train\.recompute_activations\b.*\bruntime\.compile"),
        ({"train": {"grad_accum": 17}}, r"train\.grad_accum\D+17\D+16\b"),
        ({"train": {"max_steps": True}}, r"train\.max_steps\b.*True"),
        ({"train": {"optimizer": "sgd"}}, r"train\.optimizer\b.*'muon'.*'adamw'"),
        ({"text": {"valid": 0.5}}, r"text\.valid\b.*0\.5"),
        ({"model": {"dropout": {"attention": 1.0}}}, r"model\.dropout\.attention"),
        ({"stream": {"reset_on": "("}}, r"stream\.reset_on"),
        ({"runtime": {"device": "tpu"}}, r"runtime\.device\b.*'tpu'"),
        ({"train": 3}, r"train\b.*\b3\b"),
        ({"train": {"lr": object()}}, r"type"),
    ],
)  # fmt: skip
def test_an_illegal_value_is_named(tree, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(tree)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_later_layers_win():
    assert make({"train": {"lr": 0.1, "grad_clip": 2.0}}, {"train": {"lr": 0.2}}).train.lr == 0.2
    assert make({"train": {"lr": 0.1, "grad_clip": 2.0}}, {"train": {"lr": 0.2}}).train.grad_clip == 2.0


def test_another_kind_is_another_table():
    below = {"position": {"kind": "xl", "n_features": 8}, "dim": 4}
    assert merge(below, {"position": {"kind": "none"}}) == {"position": {"kind": "none"}, "dim": 4}
    assert merge(below, {"position": {"tied": True}})["position"] == {"kind": "xl", "n_features": 8, "tied": True}
    assert make({"model": {"position": {"kind": "xl", "n_features": 8}}}, {"model": {"position": {"kind": "none"}}})


def test_another_kind_keeps_the_heads():
    below = {"attention": {"kind": "local", "n_heads": 2, "head_dim": 6, "window": 9}, "stack": {"kind": "standard"}}
    assert merge(below, {"attention": {"kind": "linear"}})["attention"] == {
        "kind": "linear", "n_heads": 2, "head_dim": 6,
    }  # fmt: skip
    assert merge(below, {"attention": {"window": 4}})["attention"]["window"] == 4
    assert merge(below, {"stack": {"kind": "universal", "n_steps": 2}})["stack"] == {"kind": "universal", "n_steps": 2}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_position_is_legal_where_its_hooks_are_offered(attention, position):
    """An illegal combination is refused with the legal choices."""
    tree = {"model": {"attention": {"kind": attention}, "position": {"kind": position}}}
    if POSITIONS[position]().needs <= ATTENTIONS[attention]().offers:
        assert make(tree).model.position.kind == position
        return
    with pytest.raises(ConfigError) as caught:
        make(tree)
    said = str(caught.value)
    assert f"'{position}'" in said
    assert f"'{attention}'" in said
    for kind, table in POSITIONS.items():
        if table().needs <= ATTENTIONS[attention]().offers:
            assert kind in said
    for kind, table in ATTENTIONS.items():
        if POSITIONS[position]().needs <= table().offers:
            assert kind in said


def test_needed_hooks_depend_on_the_settings():
    """Rotation at the embedding needs no hook; a clamped distance needs a bias."""
    assert make({"model": {"attention": {"kind": "linear"}, "position": {"kind": "rope"}}})
    assert POSITIONS["rope"](placement="embedding").needs == frozenset()
    assert POSITIONS["xl"]().needs == {"term"}
    assert POSITIONS["xl"](clamp_len=3).needs == {"term", "bias"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"attention": {"kind": "locl"}}, r"model\.attention\.kind\b.*'locl'.*mean\b.*'local'"),
        ({"position": {"kind": "rop"}}, r"model\.position\.kind\b.*'rop'.*mean\b.*'rope'"),
        ({"stack": {"kind": "universe"}}, r"model\.stack\.kind\b.*'universe'.*mean\b.*'universal'"),
        ({"attention": {"window": 3}}, r"model\.attention\.window"),
        ({"position": {"kind": "rope", "tied": True}}, r"model\.position\.tied"),
        ({"stack": {"n_steps": 3}}, r"model\.stack\.n_steps"),
        ({"attention": {"kind": "local", "window": 0}}, r"model\.attention\.window\D+0\b"),
        ({"stack": {"kind": "universal", "n_steps": 0}}, r"model\.stack\.n_steps\D+0\b"),
        ({"stack": {"kind": "universal", "epsilon": 1.0}}, r"model\.stack\.epsilon\D+1\b"),
        ({"dim": 6, "attention": {"n_heads": 2}, "position": {"kind": "rope"}}, r"head_dim\D+3\b.*'rope'"),
        (
            {"dim": 7, "attention": {"n_heads": 1}, "position": {"kind": "rope", "placement": "embedding"}},
            r"dim\D+7\b.*'rope'",
        ),
        ({"dim": 7, "attention": {"n_heads": 1}, "position": {"kind": "sinusoidal"}}, r"dim\D+7\b.*'sinusoidal'"),
        ({"position": {"kind": "axial", "dims": [100, 20]}}, r"\[100, 20\].*model\.dim\D+128\b"),
        ({"position": {"kind": "axial", "dims": [128]}}, r"model\.position\.dims\b.*model\.position\.shape"),
        ({"dim": 4, "position": {"kind": "axial", "shape": [2] * 5}}, r"\[1, 1, 1, 1, 0\]"),
        ({"position": {"kind": "axial", "shape": []}}, r"model\.position\.shape\b.*\[\]"),
        ({"position": {"kind": "t5", "n_buckets": 32, "max_distance": 63}}, r"max_distance\D+63\D+32\b"),
        ({"position": {"kind": "xl", "n_features": 7}}, r"model\.position\.n_features\D+7\b"),
        ({"position": {"kind": "learned", "overflow": "stop"}}, r"'wrap'.*'error'"),
        (
            {"attention": {"kind": "linear"}, "position": {"kind": "none"}, "dropout": {"attention": 0.1}},
            r"model\.dropout\.attention\b.*0\.1.*'linear'.*model\.dropout\.residual",
        ),
        ({"embedding": {"inner_dim": 4, "div_val": 3, "cutoffs": [5, 9]}}, r"div_val\b.*model\.embedding\.inner_dim"),
        ({"embedding": {"cutoffs": [5, 3]}}, r"cutoffs.*\[5, 3\]"),
        ({"embedding": {"cutoffs": [5, 5]}}, r"cutoffs.*\[5, 5\]"),
        ({"embedding": {"div_val": 2}}, r"model\.embedding\.cutoffs"),
        ({"norm": {"placement": "mid"}}, r"model\.norm\.placement\b.*'mid'.*'rezero'"),
        ({"norm": {"placement": "parallel"}, "stack": {"kind": "reversible"}}, r"placement 'parallel'.*'reversible'"),
        ({"position": {"kind": "rope", "rotary_dim": 3}}, r"model\.position\.rotary_dim\D+3\b"),
        ({"position": {"kind": "rope", "rotary_dim": 34}}, r"model\.position\.rotary_dim\D+34\b.*\b32\b"),
    ],
)
def test_an_illegal_combination_is_named(model, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make({"model": model})
    assert "\n" not in str(caught.value)


def test_two_buckets_that_just_reach():
    assert make({"model": {"position": {"kind": "t5", "n_buckets": 32, "max_distance": 64}}})


def test_parts_of_an_axial_position():
    def dims(**position):
        return make(
            {"model": {"dim": 11, "attention": {"n_heads": 1}, "position": {"kind": "axial", **position}}}
        ).model

    assert dims(shape=[2, 3, 4]).position.widths(11) == (4, 4, 3)
    assert dims(shape=[2, 3], dims=[1, 10]).position.widths(11) == (1, 10)


def test_clusters_beyond_the_vocabulary_are_left_out():
    model = make({"model": {"vocab_size": 100, "embedding": {"cutoffs": [10, 100, 200]}}}).model
    assert model.cutoffs == (10,)


def test_depth_counts_steps():
    assert make({"model": {"n_layers": 3}}).model.depth == 3
    assert make({"model": {"n_layers": 3, "stack": {"kind": "universal", "n_steps": 5}}}).model.depth == 15


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a.b=3", {"a": {"b": 3}}), ("a=0.1", {"a": 0.1}), ("a=true", {"a": True}), ("a=[1, 2]", {"a": [1, 2]}),
        ("a=xl", {"a": "xl"}), ('a="3"', {"a": "3"}), ("a=", {"a": ""}), (" a . b = c ", None),
        ("a=b=c", {"a": "b=c"}),
    ],
)  # fmt: skip
def test_an_override_is_a_path_and_a_value(text, tree):
    if tree is None:
        with pytest.raises(ConfigError):
            parse_override(text)
    else:
        assert parse_override(text) == tree


@pytest.mark.parametrize("text", ["", "a", "=3", "a..b=3", "3a=1", "a b=1"])
def test_an_invalid_override_is_refused(text):
    with pytest.raises(ConfigError, match="form"):
        parse_override(text)


def test_toml_files(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[train]\nlr = 0.1\n")
    assert read_toml(path) == tomllib.loads(path.read_text())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_toml(path) == {"train": {"lr": 0.1}}
    path.write_text("[train\n")
    with pytest.raises(ConfigError, match=r"a\.toml\b.*line\D+1\b"):
        read_toml(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="TOML"):
        read_toml(path)
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="MiB"):
        read_toml(path)
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("model", "width"),
    [
        ({"dim": 256}, 704), ({"dim": 8}, 64), ({"dim": 256, "feedforward": {"kind": "relu"}}, 1024),
        ({"dim": 256, "feedforward": {"ffn_dim": 10}}, 10),
    ],
)  # fmt: skip
def test_the_inner_width(model, width):
    assert make({"model": model}).model.ffn_dim == width


def test_the_width_of_a_head():
    assert make({"model": {"dim": 64, "attention": {"n_heads": 4}}}).model.head_dim == 16
    assert make({"model": {"dim": 64, "attention": {"n_heads": 3, "head_dim": 5}}}).model.head_dim == 5


def test_sections_can_be_made_alone_and_are_frozen():
    assert validate(GenerateConfig, {"top_k": 3}).top_k == 3
    with pytest.raises(ValueError, match="frozen"):
        RuntimeConfig().seed = 3


def test_it_needs_no_torch():
    code = "import sys, xlcli.config, xlcli.presets; xlcli.presets.list_presets(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"False"


def test_more_samples_than_memory_can_hold_are_refused():
    with pytest.raises(ConfigError) as error:
        make({"generate": {"num_samples": 2**31}})
    assert error.value.key == "generate.num_samples"


def test_a_value_that_is_not_utf8_is_refused():
    with pytest.raises(ConfigError, match="UTF-8"):
        make({"generate": {"stop": [b"\xff".decode(errors="surrogateescape")]}})
