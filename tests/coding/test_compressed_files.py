"""The container of compressed text: what was written is read, and everything else is refused."""

import itertools
import json
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlcli.coding import FRAME_TOKENS, HEADER_DICTIONARY, MAGIC, WORD_TOKENS, End, FileReader, Frame, Header
from xlcli.config import OnlineConfig
from xlcli.errors import DataError

HEADER = Header(
    model="m",
    fingerprint="0" * 16,
    settings=OnlineConfig(mem_len=9),
    threads=1,
    device="cpu",
    dtype="float32",
    software="software",
    check="1" * 16,
)
FRAMES = [Frame(3, b"abcdefgh"), Frame(WORD_TOKENS + 1, b"12345678"), End(17, bytes(32))]
TREE = HEADER.model_dump(mode="json", exclude_defaults=True)
WHOLE = HEADER.encode() + b"".join(frame.encode() for frame in FRAMES)


def read(data):
    reader = FileReader([data], "x")
    return reader.header(), list(reader.frames())


@given(st.lists(st.integers(0, len(WHOLE))))
def test_what_is_written_is_read_however_it_arrives(cuts):
    places = sorted({0, *cuts, len(WHOLE)})
    reader = FileReader([None, *(WHOLE[a:b] for a, b in itertools.pairwise(places))], "x")
    assert reader.header() == HEADER
    assert list(reader.frames()) == FRAMES
    assert reader.n_read == len(WHOLE)


def test_every_shorter_file_and_every_changed_byte_before_the_end_is_refused():
    for length in range(len(WHOLE)):
        with pytest.raises(DataError, match=r"^x\b"):
            read(WHOLE[:length])
    for place in range(len(WHOLE) - 40):
        changed = bytearray(WHOLE)
        changed[place] ^= 1
        with pytest.raises(DataError):
            read(bytes(changed))
    with pytest.raises(DataError, match="continues"):
        read(WHOLE + b"\0")


FORGED = [
    ("threads", "2"),
    ("threads", True),
    ("dtype", "int4"),
    ("device", ""),
    ("model", "../m"),
    ("model", 256 * "m"),
    ("settings", 1),
    ("settings", {"mem_len": -1}),
    ("settings", {"nothing": 1}),
    ("model", ""),
    ("model", ".."),
]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b"[" * 50_000]
    + [json.dumps({**TREE, name: value}).encode() for name, value in FORGED],
)
def test_a_forged_header_is_refused(body):
    deflate = zlib.compressobj(zdict=HEADER_DICTIONARY)
    whole = deflate.compress(body) + deflate.flush()
    for data in (body, whole, whole + b" ", whole[:-1]):
        with pytest.raises(DataError, match="header"):
            read(MAGIC + struct.pack("<I", len(data)) + data)


def test_sizes_are_limited_before_anything_is_read():
    with pytest.raises(DataError, match="long"):
        read(MAGIC + struct.pack("<I", 2**31))
    for n_tokens, n_words in ((FRAME_TOKENS + 1, FRAME_TOKENS), (1, 2**31)):
        with pytest.raises(DataError, match="size"):
            read(HEADER.encode() + struct.pack("<III", n_tokens, n_words, zlib.crc32(b"")))


@pytest.mark.parametrize(("n_tokens", "n_words"), [(1, 0), (FRAME_TOKENS, 0), (WORD_TOKENS + 1, 1), (FRAME_TOKENS, 63)])
def test_a_frame_of_few_words_for_its_tokens_is_refused(n_tokens, n_words):
    sizes, words = struct.pack("<II", n_tokens, n_words), bytes(4 * n_words)
    with pytest.raises(DataError, match="size"):
        read(HEADER.encode() + sizes + struct.pack("<I", zlib.crc32(sizes + words)) + words)


@given(st.integers(1, FRAME_TOKENS))
def test_the_size_of_a_frame_limits_its_tokens(n_tokens):
    data = Frame(n_tokens, b"wordword").encode()
    assert n_tokens <= 64 * len(data)
    reader = FileReader([HEADER.encode(), data, End(0, bytes(32)).encode()], "x")
    reader.header()
    frame, _ = reader.frames()
    assert (frame.n_tokens, frame.words.rstrip(b"\0")) == (n_tokens, b"wordword")
