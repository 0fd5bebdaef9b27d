"""Checkpoints in pickles: what comes back, and files that try to run code, or to take all RAM or time."""

import collections
import os
import pickle  # noqa: TID251
import struct
import time
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from xlcli.errors import CheckpointError
from xlcli.interchange import pickles
from xlcli.interchange.pickles import Record, StoredTensor, read_checkpoint
from xlcli.interchange.source import open_folder

both = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


def save(value, path, *, is_zip=True):
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


def raw(path, *parts):
    """A file of these parts, which are a pickle of protocol 4 without frames."""
    path.write_bytes(b"\x80\x04" + b"".join(parts))
    return path


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module, function):
    return text(module) + text(function) + b"\x93"


@both
def test_tensors_come_back_as_they_were(tmp_path, is_zip):
    tensors = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "part": torch.arange(10)[2:8:2],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(2, 2)),
    }
    read = read_checkpoint(save(collections.OrderedDict(tensors), tmp_path / "a.pt", is_zip=is_zip))
    assert list(read) == list(tensors)
    for key, tensor in tensors.items():
        assert read[key].info.shape == tuple(tensor.shape)
        assert torch.equal(read[key].read(), tensor)
        assert read[key].read().dtype == tensor.dtype
        assert read[key].read().is_contiguous()


@both
def test_shared_storages_are_read_once_and_stay_equal(tmp_path, is_zip):
    table = torch.randn(4, 3)
    read = read_checkpoint(save([table, table[1], table], tmp_path / "a.pt", is_zip=is_zip))
    assert read[0] is read[2]
    assert read[0].storage is read[1].storage
    assert torch.equal(read[1].read(), table[1])


@both
def test_tensors_that_share_storages_are_not_much_more_than_the_file(tmp_path, is_zip):
    (tmp_path / "config.json").write_text("{}")
    table = torch.randn(400, 30)
    tensors = {"embedding": table, "head": table}
    save(tensors, tmp_path / "pytorch_model.bin", is_zip=is_zip)
    assert torch.equal(open_folder(tmp_path).take("head"), table)
    for more in (dict.fromkeys("abc", table), {f"{i}": table[i:] for i in range(9)}):
        save(tensors | more, tmp_path / "pytorch_model.bin", is_zip=is_zip)
        with pytest.raises(CheckpointError, match="storage"):
            open_folder(tmp_path)


@both
def test_modules_are_records_with_their_state(tmp_path, is_zip):
    """A whole module; its classes are named, and their source text is ignored."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.25))
    read = read_checkpoint(save(module, tmp_path / "model.pt", is_zip=is_zip))
    assert isinstance(read, Record)
    assert read.name == "torch.nn.modules.container.Sequential"
    linear, dropout = read.state["_modules"].values()
    assert torch.equal(linear.state["_parameters"]["weight"].read(), module[0].weight)
    assert dropout.state["p"] == 0.25
    assert isinstance(read.state["_non_persistent_buffers_set"], Record)


def test_a_state_dict_with_attributes_is_a_plain_table(tmp_path):
    state = nn.Linear(3, 4).state_dict()
    assert state._metadata
    assert list(read_checkpoint(save(state, tmp_path / "a.pt"))) == ["weight", "bias"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_vocabulary(tmp_path, protocol):
    words = ["the", "of", "naïve", "\U0001f600"]
    value = {
        "counter": collections.Counter(words),
        "sym2idx": collections.OrderedDict((word, i) for i, word in enumerate(words)),
        "idx2sym": words,
        "limit": [None, True, False, 3, -70_000, 2**40, 1.5, (1, 2), b"bytes" if protocol > 2 else None],
        "special": {"<eos>"},
    }
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    read = read_checkpoint(path)
    special = read.pop("special")
    assert isinstance(special, Record) if protocol < 4 else special == ["<eos>"]
    del value["special"]
    assert read == value


def test_the_file_must_not_become_shorter(tmp_path):
    path = save({"a": torch.ones(3)}, tmp_path / "a.pt")
    tensor = read_checkpoint(path)["a"]
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(CheckpointError, match="changed"):
        tensor.read()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_replaced_while_they_are_read_are_refused(tmp_path, name):
    write = save_file if name == "model.safetensors" else torch.save
    (tmp_path / "config.json").write_text("{}")
    write({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / name)
    source = open_folder(tmp_path)
    assert source.take("a").tolist() == [1, 1, 1]
    write({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / name)
    with pytest.raises(CheckpointError, match="changed"):
        source.take("b")


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.result = function, arguments

    def __reduce__(self):
        return self.result


HOSTILE_CALLS = {
    "system": Call(os.system, "touch HERE"),
    "nested": Call(getattr, Call(__import__, "os"), "getcwd"),
    "eval": Call(eval, "open('HERE', 'w')"),
    "in a record": Call(collections.OrderedDict, Call(exec, "open('HERE', 'w')")),
    "torch": Call(torch.hub.load, "HERE"),
}


@pytest.mark.parametrize("case", HOSTILE_CALLS)
@pytest.mark.parametrize("form", ["zip", "legacy", 0, 2, 4])
def test_no_function_is_called(tmp_path, monkeypatch, case, form):
    monkeypatch.chdir(tmp_path)
    path, value = tmp_path / "a.pt", {"weights": [HOSTILE_CALLS[case]]}
    if isinstance(form, int):
        path.write_bytes(pickle.dumps(value, protocol=form))
    else:
        save(value, path, is_zip=form == "zip")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "HERE").exists()


def test_a_class_of_the_list_is_not_made(tmp_path):
    """The arguments ask for 4 TiB."""
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(Call(nn.Linear, 2**20, 2**20)))
    assert read_checkpoint(path).name == "torch.nn.modules.linear.Linear"


SYSTEM = text("touch HERE") + b"\x85R."
HOSTILE_OPCODES = {
    "system": name("os", "system") + SYSTEM,
    "dotted": name("torch", "serialization.os.system") + SYSTEM,
    "posix": name("posix", "system") + SYSTEM,
    "INST": b"(" + text("touch HERE") + b"ios\nsystem\n.",
    "OBJ": b"(" + name("os", "system") + text("touch HERE") + b"o.",
    "NEWOBJ of a type": name("builtins", "type") + b"))R\x81.",
    "NEWOBJ_EX": name("subprocess", "Popen") + b")}\x92.",
    "EXT1": b"\x82\x01.",
    "EXT4": b"\x84\x01\0\0\0.",
    "state of a class": name("collections", "OrderedDict") + b"}" + text("__reduce__") + b"K\1sb.",
    "state of a list": b"]}b.",
    "result called": name("collections", "OrderedDict") + b")R)R.",
    "a text called": text("os.system") + b")R.",
    "a storage called": name("torch", "FloatStorage") + b")R.",
    "buffer": b"\x97.",
    "persistent name": b"Pos.system\n.",
    "persistent text": text("storage") + b"Q.",
    "persistent class": text("module") + name("os", "system") + text("f.py") + text("import os") + b"(tQ.",
    "method": name("re", "_compile") + b")R}" + text("__reduce__") + b"K\1sbb.",
    "tuple key": b"})K\1s.",
    "list as key": b"}]K\1s.",
    "long key": b"}X" + struct.pack("<I", 2000) + b"a" * 2000 + b"K\1s.",
    "number as key": b"}\x8a\x20" + b"\xff" * 31 + b"\x7f" + b"K\1s.",
    "large number": b"\x8b\xff\xff\xff\x7f.",
    "large text": b"\x8d" + struct.pack("<Q", 2**40) + b"a.",
    "negative text": b"T\xff\xff\xff\xffa.",
    "large bytes": b"\x8e" + struct.pack("<Q", 2**62) + b"a.",
    "large array": b"\x96" + struct.pack("<Q", 2**40) + b"a.",
    "large frame": b"\x95" + struct.pack("<Q", 2**50) + b".",
    "memo": b"Nr\xff\xff\xff\xff" + b"j\xfe\xff\xff\xff.",
    "long name": b"c" + b"a" * 10_000 + b"\nb\n.",
    "no stop": b"N",
    "nothing": b".",
    "text of digits": b"L" + b"9" * 100_000 + b"L\n.",
}


@pytest.mark.parametrize("case", HOSTILE_OPCODES)
@pytest.mark.parametrize("is_zip", [False, True], ids=["alone", "zip"])
def test_hostile_opcodes_are_refused(tmp_path, monkeypatch, case, is_zip):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    if is_zip:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02" + HOSTILE_OPCODES[case])
    else:
        raw(path, HOSTILE_OPCODES[case])
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    assert not (tmp_path / "HERE").exists()


def test_time_and_ram_are_bounded(tmp_path, monkeypatch):
    """Each of these takes hours, or all RAM, if objects are hashed, copied or counted without care."""
    nested = b"})" + b"2\x86" * 60 + b"K\1s."
    big = b"(" + b"N" * 200_000 + b"t\x94"
    calls = b"0" + name("re", "_compile") + b"h\0R"
    table = b"0}\x94(" + b"".join(struct.pack("<cicB", b"J", i, b"K", 1) for i in range(50_000)) + b"u"
    bombs = {
        "nested tuples as key": nested,
        "many arguments": big + calls + b".",
        "many dimensions": big + b"0" + name("torch._utils", "_rebuild_tensor_v2") + b"(NK\0h\0h\0tR.",
        "copies of a table": big + table + (name("collections", "Counter") + b"h\1\x85R0") * 20_000 + b"N.",
        "memo": b"Nr\xff\xff\xff\xff0N.",
    }
    monkeypatch.setattr(pickles, "MOST_OPCODES", 600_000)
    for case, content in bombs.items():
        start = time.process_time()
        path = raw(tmp_path / "bomb", content)
        if case in ("copies of a table", "memo"):  # harmless
            assert read_checkpoint(path) is None
        else:
            with pytest.raises(CheckpointError):
                read_checkpoint(path)
        assert time.process_time() - start < 5, case
    with pytest.raises(CheckpointError, match="too many"):
        read_checkpoint(raw(tmp_path / "bomb", b"N0" * 300_001, b"N."))
    monkeypatch.setattr(pickles, "LARGEST_PICKLE", 1000)
    with pytest.raises(CheckpointError):
        read_checkpoint(raw(tmp_path / "bomb", b"B", struct.pack("<I", 5000), b"a" * 5000, b"."))


def archive(path, change=None, **files):
    """A checkpoint as `torch.save` writes it, of one tensor (2, 3), whose files are replaced."""
    save({"a": torch.arange(6.0).view(2, 3)}, path)
    with zipfile.ZipFile(path) as old:
        content = {info.filename: old.read(info) for info in old.infolist()}
    prefix = next(iter(content)).partition("/")[0]
    content |= {f"{prefix}/{key}": value for key, value in files.items()}
    with zipfile.ZipFile(path, "w", change or zipfile.ZIP_STORED) as new:
        for each, data in content.items():
            if data is not None:
                new.writestr(each, data)
    return path


def test_archives_that_lie(tmp_path):
    path = tmp_path / "a.pt"
    read = read_checkpoint(archive(path))
    assert torch.equal(read["a"].read(), torch.arange(6.0).view(2, 3))
    for wrong in (
        {"change": zipfile.ZIP_DEFLATED},
        {"data/0": b"short"},
        {"data/0": bytes(1000)},
        {"data/0": None},
        {"byteorder": b"big"},
        {"data.pkl": None},
        {"more/data.pkl": b"N."},
    ):
        with pytest.raises(CheckpointError):
            read_checkpoint(archive(path, **wrong))


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("a/data.pkl", b"N" * 2**26)
    assert path.stat().st_size < 2**17
    with pytest.raises(CheckpointError, match="compressed"):
        read_checkpoint(path)


def test_the_directory_of_an_archive_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "LARGEST_DIRECTORY", 100)
    with pytest.raises(CheckpointError):
        read_checkpoint(save({"a": torch.ones(3)}, tmp_path / "a.pt"))


def test_names_in_an_archive_lead_nowhere(tmp_path):
    """Files are found by their names in the archive; nothing is written, and no other file is read."""
    (tmp_path / "secret").write_bytes(bytes(24))
    path = archive(tmp_path / "a.pt")
    with zipfile.ZipFile(path, "a") as more:
        more.writestr("../../outside", b"x")
    assert read_checkpoint(path)["a"].info.shape == (2, 3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.pt", "secret"]
    outside = torch.save({"a": torch.ones(6)}, path) or path.read_bytes()
    path.write_bytes(outside.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00/"))
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def rebuilt(path, *, n=6, offset=0, shape=(2, 3), strides=(3, 1), kind="FloatStorage", size=24):
    """A legacy file with one storage of `n` numbers and these tensors in it."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            storage = getattr(torch, kind)
            return ("storage", storage, "0", "cpu", n, None) if value == "STORAGE" else None

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, ("STORAGE", offset, shape, strides, False, {})

    with path.open("wb") as file:
        for value in (pickles._MAGIC, 1001, {"little_endian": True}):
            pickle.dump(value, file, protocol=2)
        Pickler(file, protocol=2).dump([Tensor()])
        pickle.dump(["0"], file, protocol=2)
        file.write(struct.pack("<q", int(n)) + bytes(size))
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 7},
        {"n": 2**40},
        {"n": -1},
        {"n": 6.0},
        {"offset": 1},
        {"offset": -1},
        {"offset": 2**70},
        {"shape": (2**40, 2**40)},
        {"shape": (2, -3)},
        {"shape": (2, 3, 1)},
        {"shape": 6},
        {"strides": (0, 0)},
        {"strides": (1, 1)},
        {"shape": (2, 1), "strides": (5, 1)},
        {"strides": (-3, 1)},
        {"strides": (2**61, 1)},
        {"shape": (1,) * 17, "strides": (1,) * 17},
        {"kind": "DoubleStorage"},
        {"size": 23},
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_their_storage(tmp_path, wrong):
    assert rebuilt(tmp_path / "good.pt").stat().st_size < 1000
    [good] = read_checkpoint(tmp_path / "good.pt")
    assert isinstance(good, StoredTensor)
    assert torch.equal(good.read(), torch.zeros(2, 3))
    with pytest.raises(CheckpointError):
        read_checkpoint(rebuilt(tmp_path / "bad.pt", **wrong))


@both
def test_every_truncated_file_is_refused(tmp_path, is_zip):
    whole = save({"a": torch.arange(6.0), "b": [nn.Dropout(0.5)]}, tmp_path / "a.pt", is_zip=is_zip).read_bytes()
    path = tmp_path / "short.pt"
    for n in range(0, len(whole), 7):
        path.write_bytes(whole[:n])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_no_file_and_a_folder(tmp_path):
    for path in (tmp_path / "missing.pt", tmp_path):
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
