"""Transformer-XL of Hugging Face and of its authors: what is refused, vocabularies, and the way back."""

from __future__ import annotations

import collections
import json
import pickle  # noqa: TID251
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from xlcli import config
from xlcli.config import validate
from xlcli.errors import CheckpointError, ConfigError
from xlcli.interchange import FORMATS, export_model, find_format, import_model, transfo_xl
from xlcli.interchange.source import Source
from xlcli.model.build import build_model
from xlcli.store.folder import save_model
from xlcli.store.layout import SavedConfig
from xlcli.text.tokenizers import TOKENIZERS, WordsTokenizer

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
CUT = {"cutoffs": [12, 30]}
VARIANTS = {
    "plain": {},
    "clamped": {"position": {"clamp_len": 5}, "norm": {"epsilon": 1e-3}, "dropout": 0.25},
    "tied biases": {"position": {"tied": True}},
    "pre-norm": {"norm": {"placement": "pre", "final": False}},
    "factorized": {"embedding": {"inner_dim": 12}},
    "factorized, own": {"embedding": {"inner_dim": 12, "tied_projections": "none"}},
    "square": {"embedding": {"inner_dim": 16}},
    "clusters": {"embedding": CUT},
    "narrowing": {"embedding": CUT | {"div_val": 4}},
    "narrowing, rest": {"embedding": CUT | {"div_val": 2, "inner_dim": 12, "tied_projections": "rest"}},
    "narrowing, none": {"embedding": CUT | {"div_val": 2, "tied_projections": "none"}},
    "untied": {"embedding": CUT | {"div_val": 2, "tied": False}},
    "untied clusters": {"embedding": CUT | {"tied": False}},
}
WORDS = b"".join(b"w%d\n" % i for i in range(V - 2))


def made_config(shape, **train):
    return config.make({"model": SHAPE, "train": {"mem_len": 12, "segment_len": 8, **train}}, {"model": shape})


def make(folder, *, train=None, weights=None, **shape):
    """A model with random weights and a vocabulary of words."""
    made = made_config(shape, **(train or {}))
    torch.manual_seed(0)
    state = {name: tensor.normal_(0.1, 0.3) for name, tensor in build_model(made.model).state_dict().items()}
    tokenizer = WordsTokenizer(b"<unk>\n<eos>\n" + WORDS)
    save_model(folder, made, state | (weights or {}), tokenizer, {})
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_export_and_import_is_the_identity(tmp_path, name):
    made = make(tmp_path / "made", **VARIANTS[name])
    assert export_model(made, tmp_path / "out")[0] == "transfo-xl"
    assert find_format(tmp_path / "out") == "transfo-xl"
    back = import_model(tmp_path / "out", tmp_path / "back")
    assert back["format"] == "transfo-xl"
    for file in ("config.json", "tokenizer.json", "tokenizer.words"):
        assert (made / file).read_bytes() == (tmp_path / "back" / file).read_bytes()
    before, after = (load_file(each / "model.safetensors") for each in (made, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[key]) for key, tensor in before.items())


@pytest.mark.parametrize("span", ["uniform", "growing"])
def test_the_span_is_kept(tmp_path, span):
    """With `same_length` the number of keys includes the token's own."""
    export_model(make(tmp_path / "made", train={"span": span}), tmp_path / "out")
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tree["same_length"], tree["mem_len"]) == {"uniform": (True, 13), "growing": (False, 12)}[span]
    train = FORMATS["transfo-xl"].sections(Source(tmp_path, tree | {"xlcli": {}}, {}))["train"]
    assert (train["span"], train["mem_len"], train["segment_len"]) == (span, 12, 8)


def test_a_model_without_memory(tmp_path):
    made = make(tmp_path / "made", train={"mem_len": 0}, zero_memory=False)
    export_model(made, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    assert (made / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tree["same_length"], tree["mem_len"]) == (False, 0)


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ({"zero_memory": False}, "zero_memory"),
        ({"bias": False}, "bias"),
        ({"norm": {"placement": "pre"}}, "norm.final"),
        ({"norm": {"kind": "rms"}}, "norm.kind"),
        ({"norm": {"placement": "sandwich"}}, "norm.placement"),
        ({"position": {"n_features": 8}}, "position.n_features"),
        ({"embedding": {"scaled": False}}, "embedding.scaled"),
        ({"embedding": CUT | {"inner_dim": 16}}, "embedding.inner_dim"),
        ({"embedding": {"n_bigrams": 9}}, "embedding.n_bigrams"),
        ({"embedding": {"per_layer": True}}, "embedding.per_layer"),
        ({"feedforward": {"kind": "gelu"}}, "feedforward.kind"),
        ({"attention": {"qk_norm": True}}, "qk_norm"),
        ({"attention": {"bias": "qkv"}}, "attention.bias"),
        ({"attention": {"n_kv_heads": 1}}, "n_kv_heads"),
        ({"stack": {"input_residual": True}}, "stack.input_residual"),
        ({"logit_softcap": 30.0}, "logit_softcap"),
    ],
    ids=str,
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, shape, key):
    folder = make(tmp_path / "made", **shape)
    with pytest.raises(ConfigError, match=key):
        export_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_projection_for_all_clusters(tmp_path):
    """With div_val 1 the format has one for all: clusters that differ are refused, equal ones come back."""
    shape = {"embedding": CUT | {"inner_dim": 12, "tied_projections": "rest"}}
    with pytest.raises(ConfigError, match="projection"):
        export_model(make(tmp_path / "made", **shape), tmp_path / "out")
    names = [f"embedding.clusters.{i}.up.weight" for i in range(3)]
    equal = make(tmp_path / "equal", weights=dict.fromkeys(names, torch.full((16, 12), 0.5)), **shape)
    export_model(equal, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    before, after = (load_file(each / "model.safetensors") for each in (equal, tmp_path / "back"))
    assert all(tensor.equal(after[key]) for key, tensor in before.items())


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
    assert FORMATS["transfo-xl"].export_tokenizer(tokenizer)["vocab.txt"].split()[:2] == [b"<unk>", b"<eos>"]
    assert FORMATS["transfo-xl"].export_tokenizer(TOKENIZERS["bytes"].train([b""])) == {}


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
