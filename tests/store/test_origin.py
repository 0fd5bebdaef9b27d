"""Settings of a run that starts from a model: those of the model, unless they belong to its training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xlcli import config, presets
from xlcli.errors import CheckpointError, ConfigError
from xlcli.model.build import build_model
from xlcli.store.folder import save_model
from xlcli.store.layout import write_record
from xlcli.store.origin import configurations, origin_of, text_size
from xlcli.text.tokenizers import TOKENIZERS

TRAIN = {
    "segment_len": 24, "mem_len": 40, "batch_size": 6, "grad_accum": 3, "lr": 0.02, "adam_lr": 0.05, "momentum": 0.9,
    "weight_decay": 0.5, "warmup_steps": 700, "lr_schedule": "constant", "min_lr_ratio": 0.3, "max_steps": 9,
    "max_tokens": 900, "max_time": 5.0, "eval_every": 3, "save_every": 9.0, "keep_checkpoints": 7,
    "keep_at": [500],
}  # fmt: skip
MODEL = {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}, "dropout": {"residual": 0.25}}
DATA = b"The quick brown fox jumps over the lazy dog.\n" * 20


def model(folder, kind="bytes", *, vocab_size=None, record=None, train=TRAIN):
    """An untrained model with these training settings."""
    tokenizer = TOKENIZERS[kind].train([DATA], vocab_size)
    text = {"tokenizer": kind, "vocab_size": vocab_size, "valid": "mine.txt", "test": 0.1}
    tree = {"model": MODEL | {"vocab_size": tokenizer.vocab_size}, "text": text, "train": train}
    made = config.make(tree)
    torch.manual_seed(0)
    save_model(Path(folder), made, build_model(made.model).state_dict(), tokenizer, {})
    write_record(Path(folder), record or {})
    return Path(folder)


def only(tree, folder):
    """The only configuration."""
    [(_, made)] = configurations(tree, None, folder).items()
    return made


def test_without_a_model_presets_decide():
    tree = {"train": {"max_steps": 3}}
    assert configurations(tree) == presets.configurations(tree)
    assert configurations(tree, "medium") == presets.configurations(tree, "medium")


def test_shape_and_habits_are_those_of_the_model():
    made = only({}, model("m"))
    assert made.model.model_dump(exclude={"vocab_size"}) == config.make({"model": MODEL}).model.model_copy(
        update={
            "attention": made.model.attention, "feedforward": made.model.feedforward, "position": made.model.position,
        }
    ).model_dump(exclude={"vocab_size"})  # fmt: skip
    assert (made.model.head_dim, made.model.ffn_dim) == (8, 64)
    kept = ("segment_len", "mem_len", "batch_size", "grad_accum", "momentum", "weight_decay")
    assert {key: getattr(made.train, key) for key in kept} == {key: TRAIN[key] for key in kept}


def test_budget_schedule_and_held_out_text_are_those_of_the_run():
    made, fresh = only({}, model("m")), config.Config()
    for key in TRAIN.keys() - {"segment_len", "mem_len", "batch_size", "grad_accum", "momentum", "weight_decay"}:
        assert getattr(made.train, key) == getattr(fresh.train, key), key
    assert (made.text.valid, made.text.test, made.text.tokenizer) == (None, None, "bytes")
    assert made.runtime == fresh.runtime


def test_rates_stay_open_unless_given():
    made = only({}, model("m"))
    assert (made.train.lr, made.train.adam_lr) == (None, None)
    made = only({"train": {"lr": 0.5, "adam_lr": 0.7}}, Path("m"))
    assert (made.train.lr, made.train.adam_lr) == (0.5, 0.7)


@pytest.mark.parametrize("entry", [None, 3, {}, {"bytes": 0, "tokens": 0}, {"bytes": "9", "tokens": 1}])
def test_a_record_may_lack_the_size_of_the_text(entry):
    assert text_size({"train": entry}) is None
    assert text_size({}) is None
    assert text_size({"train": {"bytes": 30, "tokens": 10, "start": 0}}) == (30, 10)


@pytest.mark.parametrize("entry", [None, "books", {}, {"model": 3, "weights": ""}, {"model": "books"}])
def test_a_record_may_lack_an_origin(entry):
    assert origin_of({"init": entry}) == {}
    assert origin_of({}) == {}
    whole = {"model": "books", "weights": "0" * 64}
    assert origin_of({"init": whole}) == whole


def test_microbatches_never_exceed_sequences():
    assert only({"train": {"batch_size": 2}}, model("m")).train.grad_accum == 2
    with pytest.raises(ConfigError, match=r"grad_accum\b.*\b4\b"):
        only({"train": {"batch_size": 2, "grad_accum": 4}}, Path("m"))
    with pytest.raises(ConfigError, match="'many'"):
        only({"train": {"batch_size": "many"}}, Path("m"))


def test_the_name_is_that_of_the_preset():
    assert list(configurations({}, None, model("m", record={"preset": "medium"}))) == ["medium"]
    assert list(configurations({}, None, model("n"))) == [""]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"dim": 32}}, r"^model\.dim\b.*\b16\b"),
        ({"model": {"attention": {"n_heads": 4}}}, r"^model\.attention\.n_heads\b.*\b2\b"),
        ({"model": {"attention": {"kind": "local"}}}, r"^model\.attention\.kind\b.*\bfull\b"),
        ({"model": {"position": {"kind": "rope"}}}, r"^model\.position\.kind\b.*\bxl\b"),
        ({"model": {"embedding": {"tied": False}}}, r"^model\.embedding\.tied\b.*\bTrue\b"),
        ({"text": {"tokenizer": "words"}}, r"^text\.tokenizer\b.*\bsentencepiece\b"),
        ({"text": {"tokenizer": "bytes"}}, r"^text\.tokenizer\b.*\bsentencepiece\b"),
        ({"text": {"vocab_size": 2000}}, r"^text\.vocab_size\b"),
        ({"model": {"dmi": 3}}, "model.dmi"),
    ],
)
def test_settings_that_contradict_the_model_are_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        only(tree, model("m", "sentencepiece", vocab_size=400))


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_settings_that_agree_with_the_model_are_accepted(kind):
    folder = model("m", kind, vocab_size={"sentencepiece": 400}.get(kind))
    size = json.loads(Path("m/config.json").read_bytes())["model"]["vocab_size"]
    for tokenizer in (kind, "auto"):
        for vocab_size in (None, size, *([400] if kind == "sentencepiece" else [])):
            text = {"tokenizer": tokenizer, "vocab_size": vocab_size}
            assert only({"model": {"dim": 16}, "text": text}, folder).text.tokenizer == kind


def test_dropout_and_chunks_may_change():
    change = {"dropout": {"residual": 0.5}, "loss_chunk": 7, "feedforward": {"chunk_len": 8}}
    made = only({"model": change}, model("m")).model
    assert (made.dropout.residual, made.loss_chunk, made.feedforward.chunk_len) == (0.5, 7, 8)


def test_a_preset_and_a_model_exclude_each_other():
    with pytest.raises(ConfigError, match="preset and init"):
        configurations({}, "small", model("m"))


def test_a_folder_that_is_no_model_is_refused():
    Path("empty").mkdir()
    with pytest.raises(CheckpointError):
        configurations({}, None, Path("empty"))
    (model("m") / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        configurations({}, None, Path("m"))


def test_torch_is_not_imported():
    code = "import sys, xlcli.store.origin; assert not {'torch', 'numpy', 'sentencepiece'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_large_batches_are_not_taken_from_the_model():
    folder = model("m", train=TRAIN | {"batch_size": 32, "grad_accum": 16})
    made = only({}, folder).train
    assert (made.batch_size, made.grad_accum) == (8, 8)
    assert only({"train": {"batch_size": 32}}, folder).train.batch_size == 32
