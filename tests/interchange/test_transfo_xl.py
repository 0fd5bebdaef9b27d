"""Transformer-XL of Hugging Face and of its authors: what is refused, and vocabularies."""

from __future__ import annotations

import collections
import pickle  # noqa: TID251
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from xlcli import config
from xlcli.config import validate
from xlcli.errors import CheckpointError
from xlcli.interchange import FORMATS, find_format, import_model, transfo_xl
from xlcli.interchange.source import Source
from xlcli.store.layout import SavedConfig

FIXTURES = Path(__file__).parent / "fixtures"
V = 48
SHAPE = {
    "vocab_size": V,
    "dim": 16,
    "n_layers": 2,
    "attention": {"n_heads": 2, "head_dim": 6},
    "norm": {"kind": "layer", "placement": "post"},
    "feedforward": {"kind": "relu", "ffn_dim": 24},
    "embedding": {"scaled": True},
    "bias": True,
    "zero_memory": True,
}


def made_config(shape, **train):
    return config.make({"model": SHAPE, "train": {"mem_len": 12, "segment_len": 8, **train}}, {"model": shape})


def sections(**settings):
    tree = {"model_type": "transfo-xl", "vocab_size": V, "cutoffs": [12, 30], "d_model": 16, "d_embed": 16, "d_head": 6}
    sections = FORMATS["transfo-xl"].sections(Source(Path("source"), tree | {"n_head": 2, "d_inner": 8} | settings, {}))
    return validate(SavedConfig, {"text": {}, **sections})


def test_settings_of_the_published_model():
    """`config.json` of transfo-xl-wt103, with the keys of the time."""
    published = {
        "adaptive": True, "attn_type": 0, "clamp_len": 1000, "cutoffs": [20000, 40000, 200000], "d_embed": 1024,
        "d_head": 64, "d_inner": 4096, "d_model": 1024, "div_val": 4, "dropatt": 0.0, "dropout": 0.1, "ext_len": 0,
        "init": "normal", "init_range": 0.01, "init_std": 0.02, "mem_len": 1600, "n_head": 16, "n_layer": 18,
        "n_token": 267735, "pre_lnorm": False, "proj_init_std": 0.01, "same_length": True, "sample_softmax": -1,
        "tgt_len": 128, "tie_projs": [False, True, True, True], "tie_weight": True, "untie_r": True,
        "vocab_size": 267735, "eos_token_id": 0, "task_specific_params": {"text-generation": {"do_sample": True}},
    }  # fmt: skip
    made = sections(**published)
    assert (made.model.embedding.tied_projections, made.model.cutoffs) == ("rest", (20000, 40000, 200000))
    assert (made.train.mem_len, made.train.span, made.train.segment_len) == (1599, "uniform", 128)
    assert (made.model.clamp_len, made.model.zero_memory, made.model.norm.placement) == (1000, True, "post")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"tie_projs": [True, True, True]}, "all"),
        ({"proj_share_all_but_first": False}, "none"),
        ({"proj_share_all_but_first": True}, "rest"),
        ({"tie_projs": [False]}, "none"),
        ({"d_embed": 8, "cutoffs": [], "div_val": 1, "tie_projs": [True]}, "all"),
        ({"d_embed": 8, "cutoffs": [], "div_val": 1}, "none"),
        ({"div_val": 1}, "all"),
    ],
    ids=str,
)
def test_shared_projections(settings, found):
    assert sections(**settings).model.embedding.tied_projections == found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_type", 2),
        ("sample_softmax", 100),
        ("ext_len", 8),
        ("cutoffs", [12, V]),
        ("cutoffs", [12, 12.5]),
        ("cutoffs", list(range(100_000))),
        ("cutoffs", 12),
        ("tie_projs", [True, False, True]),
        ("mem_len", 1),
        ("mem_len", "8"),
        ("n_layer", None),
        ("layer_norm_epsilon", "small"),
        ("same_length", 1),
        ("a_new_setting", 3),
    ],
)
def test_a_setting_that_changes_numbers_is_refused_by_name(key, value):
    if value is None:
        assert sections().model.n_layers == 18  # the default of the library
        return
    with pytest.raises(CheckpointError, match=key):
        sections(**{key: value})


def words(n=V):
    return [*(f"w{i}" for i in range(n - 2)), "<unk>", "<eos>"]


class Vocab:
    """Stands for the class of the original code."""


class Corpus:
    """Likewise."""


def vocabulary(kind, names):
    table = {"idx2sym": names, "sym2idx": collections.OrderedDict((name, i) for i, name in enumerate(names))}
    vocab = Vocab()
    vocab.__dict__ = {"counter": collections.Counter(names), "lower_case": False, **table}
    corpus = Corpus()
    corpus.__dict__ = {"dataset": "wt103", "vocab": vocab, "train": torch.arange(5)}
    return {"vocab.pkl": table, "vocab.bin": table, "cache.pt": corpus, "vocab.txt": table}[kind]


@pytest.mark.parametrize("kind", ["vocab.pkl", "vocab.bin", "cache.pt", "vocab.txt"])
def test_vocabularies(tmp_path, monkeypatch, kind):
    model = made_config({}).model
    monkeypatch.setitem(sys.modules, "utils", types.ModuleType("utils"))
    for each, module in ((Vocab, "utils.vocabulary"), (Corpus, "data_utils")):
        monkeypatch.setattr(each, "__module__", module)
        stub = types.ModuleType(module)
        setattr(stub, each.__name__, each)
        monkeypatch.setitem(sys.modules, module, stub)
    path, names = tmp_path / kind, ["<unk>", "<eos>", *words()[:-2]]
    if kind == "vocab.txt":
        path.write_text("\n".join(names))
    elif kind == "vocab.pkl":
        path.write_bytes(pickle.dumps(vocabulary(kind, names)))
    else:
        torch.save(vocabulary(kind, names), path)
    source = Source(tmp_path, {}, {})
    tokenizer = FORMATS["transfo-xl"].tokenizer(source, model)
    assert tokenizer.decode(range(V)).split() == [b"<unk>", *(name.encode() for name in names[2:])]
    short = config.make({"model": SHAPE}, {"model": {"vocab_size": V + 1}}).model
    with pytest.raises(CheckpointError, match=str(V)):
        FORMATS["transfo-xl"].tokenizer(source, short)


def original(name, path, change):
    """The model of a fixture, in which `change` may change the state of modules."""
    stubs = {
        "mem_transformer": "MemTransformerLM AdaptiveEmbedding PositionalEmbedding PositionwiseFF DecoderLayer "
        "MultiHeadAttn RelPartialLearnableMultiHeadAttn RelPartialLearnableDecoderLayer",
        "proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax",
    }
    modules = {}
    for module, names in stubs.items():
        modules[module] = types.ModuleType(module)
        for each in names.split():
            setattr(modules[module], each, type(each, (nn.Module,), {"__module__": module}))
    with pytest.MonkeyPatch.context() as patch:
        for module, stub in modules.items():
            patch.setitem(sys.modules, module, stub)
        source = FIXTURES / name / "source" / "model.pt"
        model = torch.load(source, weights_only=False)  # noqa: TID251 (a file of this repository)
        change(model)
        torch.save(model, path)
    return path


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("original-div4", {"attn_type": 2}, "attn_type"),
        ("original-div4", {"attn_type": [1]}, "original"),
        ("original-div4", {"sample_softmax": 5}, "sample_softmax"),
        ("original-div4", {"ext_len": 4}, "ext_len"),
        ("original-div4", {"same_length": True, "mem_len": 0}, "mem_len"),
        ("original-div4", {"n_head": "2"}, "original"),
        ("original-div4", {"n_token": 2**62}, "vocab_size"),
        ("original-div4", {"d_model": 18}, "shape"),
        ("original-div4", {"n_layer": 3}, r"layers\.2"),
    ],
    ids=str,
)
def test_models_of_the_original_code_that_are_refused(tmp_path, name, change, word):
    path = original(name, tmp_path / "model.pt", lambda model: model.__dict__.update(change))
    with pytest.raises(CheckpointError, match=word):
        import_model(path, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_first_memory_is_empty_and_tails_are_counted_from_the_end():
    """The vector of the last cluster's logit comes first in the original code."""
    path = FIXTURES / "original-div4" / "source"
    format_ = FORMATS[find_format(path)]
    source = format_.open(path)
    model = validate(SavedConfig, {"text": {}, **format_.sections(source)}).model
    weights = dict(format_.weights(source, model))
    assert not model.zero_memory
    assert weights["head.tails.weight"].equal(source.take("crit.cluster_weight").flip(0))
    assert format_.open(path / "model.pt").config == source.config


@pytest.mark.parametrize("content", [[], {"a": 1}, {"model": torch.ones(3)}, nn.Linear(2, 3), None])
def test_other_content_of_model_pt_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        import_model(tmp_path, tmp_path / "m")


def test_modules_without_end_are_refused(tmp_path):
    """Modules with a place in several others, or in themselves, and a chain with names of any length."""
    shared = nn.Sequential(*[nn.ReLU()] * 9)
    own = nn.Sequential(nn.ReLU())
    own._modules["own"] = own
    chain = nn.ReLU()
    for _ in range(99):
        outer = nn.Sequential()
        outer.add_module("x" * 99, chain)
        chain = outer
    for module in (shared, own, chain):
        torch.save(module, tmp_path / "model.pt")
        with pytest.raises(CheckpointError, match="original"):
            import_model(tmp_path, tmp_path / "m")


def test_a_word_that_is_repeated_without_end_takes_no_ram(tmp_path, monkeypatch):
    monkeypatch.setattr(transfo_xl, "VOCABULARY_LIMIT", 10**6)
    word = "x" * 10**5
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": [word] * 20}))
    with pytest.raises(CheckpointError, match="vocabulary"):
        FORMATS["transfo-xl"].tokenizer(Source(tmp_path, {}, {}), made_config({}).model)
