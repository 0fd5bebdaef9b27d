"""A state file continues a text exactly, with the model that wrote it and with no other."""

import json
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from toys import PROSE, RUNTIME, VARIANTS, toy

from xlcli.errors import StateError
from xlcli.files.tensors import read_tensors, write_tensors
from xlcli.ops.span import Span
from xlcli.store.state_files import (
    PendingText,
    SamplerState,
    SessionState,
    StreamPosition,
    load_state,
    save_state,
)


def read_some(model, mem_len=9):
    state = model.network.init_state(1, mem_len=mem_len, segment_len=8)
    with torch.inference_mode():
        return model.network.logits(torch.arange(12)[None], state)[1]


def session(model, mem_len=9):
    """Everything that a session can hold."""
    text = PROSE.encode()[:20]
    ids, sizes = (each[:4] for each in model.tokenizer.tokens(text))
    generator = torch.Generator().manual_seed(5)
    return SessionState(
        read_some(model, mem_len),
        last_token=7,
        pending=PendingText(text, ids, sizes),
        sampler=SamplerState(5, generator.get_state().numpy().tobytes(), (1, 2, 3)),
        stream=StreamPosition(
            2, 30, 12, 0.1 + 0.2, 27, ((b"a\xff", 1 / 3), (b" b", 0.0)), {"lines": (1 / 3, 2.5), "tokens": (0.0,)}
        ),
    )


def rewritten(path, *, tensors=None, values=None, without=(), **metadata):
    """Changes entries of the file (None removes one) and makes its checksums right again."""
    old, facts = read_tensors(path, expected=None)
    if values:
        tree = json.loads(old["session.values"].numpy().tobytes())
        for key, value in values.items():
            *above, name = key.split(".")
            (tree[above[0]] if above else tree)[name] = value
        tensors = {"session.values": torch.tensor(list(json.dumps(tree).encode()), dtype=torch.uint8)}
    facts = {key: value for key, value in (facts | metadata).items() if value is not None and key != "sha256"}
    kept = {name: tensor for name, tensor in old.items() if name not in without}
    write_tensors(path, kept | (tensors or {}), facts)


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def path(tmp_path, model):
    save_state(tmp_path / "s", session(model), model=model)
    return tmp_path / "s"


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("mem_len", [0, 9])
def test_the_memory_is_the_same(variant, mem_len, tmp_path):
    model = toy(variant=variant)
    saved = session(model, mem_len).model_state
    save_state(tmp_path / "s", session(model, mem_len), model=model)
    loaded = load_state(tmp_path / "s", model=model, device=str(RUNTIME.device)).model_state
    assert loaded.describe() == saved.describe()
    assert loaded.tensors().keys() == saved.tensors().keys()
    assert all(torch.equal(t, saved.tensors()[name]) for name, t in loaded.tensors().items())


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_everything_else_is_the_same(kind, tmp_path):
    model = toy(kind)
    saved = session(model)
    save_state(tmp_path / "s", saved, model=model)
    loaded = load_state(tmp_path / "s", model=model, device="cpu")
    assert loaded.last_token == 7
    assert (loaded.pending.data, loaded.pending.n_tokenized) == (saved.pending.data, saved.pending.n_tokenized)
    assert loaded.pending.ids.dtype == np.int32
    assert loaded.pending.ids.tolist() == saved.pending.ids.tolist()
    assert loaded.sampler == saved.sampler
    assert loaded.stream == saved.stream


def test_most_of_it_may_be_missing(tmp_path, model):
    saved = SessionState(read_some(model), 0, PendingText(b"", np.empty(0, np.int32), np.empty(0, np.int32)))
    save_state(tmp_path / "s", saved, model=model)
    loaded = load_state(tmp_path / "s", model=model, device="cpu")
    assert (loaded.pending.data, len(loaded.pending.ids), loaded.sampler) == (b"", 0, None)
    assert loaded.stream == StreamPosition()


def test_everything_is_stored_as_tensors(path):
    """No text, token or random number is packed into the metadata, which must stay below the limit of a header."""
    tensors, metadata = read_tensors(path, expected=None)
    assert {name: str(t.dtype) for name, t in tensors.items() if name.startswith("session.")} == {
        "session.text": "torch.uint8",
        "session.ids": "torch.int32",
        "session.sizes": "torch.int32",
        "session.values": "torch.uint8",
    }
    assert metadata["schema"] == "2"
    assert max(map(len, metadata.values())) == 64  # a fingerprint


def test_megabytes_of_unread_text(tmp_path, model):
    text = bytes(range(256)) * 2**15
    saved = replace(session(model), pending=PendingText(text, *model.tokenizer.tokens(text)))
    save_state(tmp_path / "s", saved, model=model)
    assert load_state(tmp_path / "s", model=model, device="cpu").pending.data == text


def test_a_fork_is_not_touched(model):
    one = session(model)
    two = one.fork()
    before = {name: t.clone() for name, t in two.model_state.tensors().items()}
    with torch.inference_mode():
        model.network.logits(torch.arange(30)[None], one.model_state)
    assert all(torch.equal(t, before[name]) for name, t in two.model_state.tensors().items())
    assert all(getattr(one, f.name) is getattr(two, f.name) for f in fields(one) if f.name != "model_state")


@pytest.mark.parametrize("other", [{"n_layers": 3}, {"variant": "local"}, {"variant": "linear"}])
def test_a_model_of_another_shape_refuses_it(other, path):
    """Even one that claims the same fingerprints, as these do."""
    with pytest.raises(StateError, match="toy"):
        load_state(path, model=toy(**other), device="cpu")


@pytest.mark.parametrize("name", ["config", "weights", "tokenizer"])
def test_a_model_of_another_fingerprint_is_named(name, path, model):
    other = replace(model, name="other", fingerprints=model.fingerprints | {name: "123"})
    with pytest.raises(StateError, match=rf"{name}\b.*\b123\b"):
        load_state(path, model=other, device="cpu")


@pytest.mark.parametrize("metadata", [{"schema": "1"}, {"schema": "3"}, {"schema": None}, {"state.memory": None}])
def test_another_format_is_refused(metadata, path, model):
    rewritten(path, **metadata)
    with pytest.raises(StateError, match=r"\b2\."):
        load_state(path, model=model, device="cpu")


@pytest.mark.parametrize("metadata", [
    {"state.memory": "keyvalue"}, {"state.memory": "sums sums"}, {"state.seen": "x"}, {"state.span": "uniform 9"},
    {"state.span": None},
])  # fmt: skip
def test_a_description_that_makes_no_sense_is_refused(metadata, path, model):
    rewritten(path, **metadata)
    with pytest.raises(StateError, match="damaged"):
        load_state(path, model=model, device="cpu")


@pytest.mark.parametrize(
    "metadata",
    [{"state.seen": "3"}, {"state.span": Span("uniform", 5, 8).text}, {"state.span": Span("segment", 0, 8).text}],
)
def test_a_description_of_another_length_is_refused(metadata, path, model):
    rewritten(path, **metadata)
    with pytest.raises(StateError, match="shape"):
        load_state(path, model=model, device="cpu")


def test_memory_of_another_type_is_refused(path, model):
    rewritten(path, tensors={"state.0.k": torch.zeros(1, 2, 9, 8, dtype=torch.int64)})
    with pytest.raises(StateError, match=r"'k'.*'keyvalue'"):
        load_state(path, model=model, device="cpu")


WRONG = {
    "no last token": {"values": {"last_token": None}},
    "last token is text": {"values": {"last_token": "x"}},
    "last token beyond the vocabulary": {"values": {"last_token": 256}},
    "last token negative": {"values": {"last_token": -1}},
    "more bytes tokenized than there are": {"tensors": {"session.sizes": torch.full((4,), 6, dtype=torch.int32)}},
    "bytes of a token negative": {"tensors": {"session.sizes": torch.tensor([1, 1, 3, -1], dtype=torch.int32)}},
    "fewer sizes than tokens": {"tensors": {"session.sizes": torch.ones(3, dtype=torch.int32)}},
    "no sizes": {"without": ["session.sizes"]},
    "documents not in order": {"values": {"documents": [3, 2]}},
    "documents beyond the text": {"values": {"documents": [21]}},
    "seed is text": {"values": {"sampler.seed": "x"}},
    "seed negative": {"values": {"sampler.seed": -1}},
    "seed too large": {"values": {"sampler.seed": 2**63}},
    "bits are text": {"values": {"stream.bits": "x"}},
    "bits not finite": {"values": {"stream.bits": float("nan")}},
    "lines not whole": {"values": {"stream.n_lines": 1.5}},
    "no lines": {"values": {"stream.n_lines": None}},
    "no values": {"without": ["session.values"]},
    "no JSON": {"tensors": {"session.values": torch.zeros(9, dtype=torch.uint8)}},
    "no text": {"without": ["session.text"]},
    "no tokens": {"without": ["session.ids"]},
    "no generator": {"values": {"sampler.generator": None}},
    "tokens as int64": {"tensors": {"session.ids": torch.arange(4)}},
    "tokens in two dimensions": {"tensors": {"session.ids": torch.ones(2, 2, dtype=torch.int32)}},
    "tokens beyond the vocabulary": {"tensors": {"session.ids": torch.full((4,), 256, dtype=torch.int32)}},
    "tokens negative": {"tensors": {"session.ids": torch.full((4,), -1, dtype=torch.int32)}},
    "recent tokens beyond the vocabulary": {"values": {"sampler.recent": [256]}},
    "text as float": {"tensors": {"session.text": torch.zeros(20)}},
    "generator too short": {"values": {"sampler.generator": "AAAA"}},
    "generator that is not base64": {"values": {"sampler.generator": "a"}},
    "tokens of another text": {"tensors": {"session.ids": torch.zeros(4, dtype=torch.int32)}},
    "latest scores not finite": {"values": {"stream.recent": {"lines": [0.0, float("nan")]}}},
    "line of the input negative": {"values": {"stream.input_line": -1}},
    "scored token of no bytes": {"values": {"stream.scored": [["", 1.0]]}},
    "scored token that is not base64": {"values": {"stream.scored": [["a", 1.0]]}},
    "scored token without bits": {"values": {"stream.scored": [["YQ=="]]}},
    "scored bits not finite": {"values": {"stream.scored": [["YQ==", float("inf")]]}},
    **{
        f"record of {row[:9]}": {"values": {"stream.records": [{"start": 0, "line": 1, "row": row, "key": "a"}]}}
        for row in ("[]", "junk", "[" * 500 + "]" * 500, "[" * 10_000)
    },
    "more bytes before the place than there are": {
        "values": {"source": {"device": 1, "inode": 2, "offset": 2, "modified": 4, "tail": "YWJj"}}
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_a_session_that_makes_no_sense_is_refused(name, path, model):
    rewritten(path, **WRONG[name])
    with pytest.raises(StateError, match=str(path)) as caught:
        load_state(path, model=model, device="cpu")
    assert caught.value.remedy


def test_every_change_of_an_entry_is_refused_or_harmless(path, model):
    """Entries exchanged, resized and retyped at random, with right checksums: `StateError` or a usable session."""
    draw = random.Random(0)
    whole = path.read_bytes()
    tensors, metadata = read_tensors(path, expected=None)
    names, keys = sorted(tensors), sorted(metadata.keys() - {"sha256", "schema"})
    refused = 0
    for _ in range(300):
        name, key = draw.choice(names), draw.choice(keys)
        change = draw.randrange(4)
        if change == 0:
            rewritten(
                path, **{key: draw.choice(["", "-1", "0", "1e9", "nan", str(2**64), metadata[draw.choice(keys)]])}
            )
        elif change == 1:
            rewritten(path, tensors={name: tensors[draw.choice(names)]})
        elif change == 2:
            rewritten(path, tensors={name: tensors[name][: draw.randrange(3)]})
        else:
            rewritten(path, tensors={name: tensors[name].to(draw.choice([torch.uint8, torch.int32, torch.float64]))})
        try:
            loaded = load_state(path, model=model, device="cpu")
        except StateError:
            refused += 1
        else:
            save_state(path, loaded, model=model)
        path.write_bytes(whole)
    assert refused > 200


def test_a_damaged_file_is_refused(path, model):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="damaged"):
        load_state(path, model=model, device="cpu")


def test_a_missing_file_is_refused(path, model):
    with pytest.raises(StateError, match="exist"):
        load_state(path.with_name("missing"), model=model, device="cpu")


def test_another_kind_of_file_is_refused(path, model):
    write_tensors(path, model.network.state_dict(), {"schema": "2"})
    with pytest.raises(StateError, match=r"\b2\."):
        load_state(path, model=model, device="cpu")
