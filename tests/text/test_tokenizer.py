"""Vocabularies: lossless, indifferent to cutting, deterministic, silent, and refused when damaged."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import xlcli
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text.corpus import Facts
from xlcli.text.pretokenize import PreTokenizer
from xlcli.text.tokenizers import (
    TOKENIZERS,
    SentencePieceTokenizer,
    Tokenizer,
    WordsTokenizer,
    choose_tokenizer,
    load_tokenizer,
)

CODE = b"".join(path.read_bytes() for path in sorted(Path(xlcli.__file__).parent.glob("*.py")))
MIXED = CODE + "Ünïcode, 漢字と仮名。\r\n\tTab\ntwo words of text\n".encode() * 50

ALPHABET = [b" ", b"  ", b"\n", b"\r\n", b"\t", b"def ", b"self", b"the", "é".encode(), "漢字".encode(), b"\xff"]
ODD = [b"\xe2\x96", "\u2581".encode(), "\u2585".encode(), "\u240a\u2409".encode(), b"\0", b"<0x41>", b"<unk>", b"<s>"]
texts = st.one_of(
    st.binary(max_size=100),
    st.text(max_size=60).map(str.encode),
    st.lists(st.sampled_from(ALPHABET + ODD), max_size=40).map(b"".join),
    st.builds(lambda start, size: MIXED[start % len(MIXED) :][:size], st.integers(0, 10**6), st.integers(0, 3000)),
)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {
        "bytes": TOKENIZERS["bytes"].train([]),
        "sentencepiece": TOKENIZERS["sentencepiece"].train([MIXED], 700),
        "words": TOKENIZERS["words"].train([MIXED], 500),
    }


@settings(max_examples=500)
@given(data=texts)
@example(b"".join(ALPHABET + ODD))
@example(b"\xed\xa0\x80 surrogate")
@example("ab".encode("utf-16"))
def test_decode_gives_back_any_bytes(tokenizers: dict[str, Tokenizer], data: bytes) -> None:
    for kind in ("bytes", "sentencepiece"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode(data)
        assert tokenizer.decode(ids) == data
        assert b"".join(tokenizer.decode([i]) for i in ids) == data


@settings(max_examples=300)
@given(data=texts)
def test_sizes_add_up_and_ids_are_in_range(tokenizers: dict[str, Tokenizer], data: bytes) -> None:
    for tokenizer in tokenizers.values():
        ids, sizes = tokenizer.tokens(data)
        assert ids.tolist() == tokenizer.encode(data).tolist()
        assert ids.dtype == sizes.dtype == np.int32
        assert len(sizes) == len(ids)
        assert sizes.sum() == len(data)
        assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()


@settings(max_examples=300)
@given(data=texts, cuts=st.lists(st.integers(1, 50), min_size=1, max_size=100))
def test_any_portions_give_the_same_ids(tokenizers: dict[str, Tokenizer], data: bytes, cuts: list[int]) -> None:
    for tokenizer in tokenizers.values():
        pretokenizer = PreTokenizer()
        found = []
        rest = data
        for cut in cuts:
            found.append(tokenizer.encode(pretokenizer.feed(rest[:cut])))
            rest = rest[cut:]
        found += [tokenizer.encode(pretokenizer.feed(rest)), tokenizer.encode(pretokenizer.finish())]
        assert np.concatenate(found).tolist() == tokenizer.encode(data).tolist()


def test_pieces_are_worth_having(tokenizers: dict[str, Tokenizer]) -> None:
    assert len(tokenizers["sentencepiece"].encode(CODE)) < len(CODE) / 2


def test_a_line_end_is_a_token_of_its_own(tokenizers: dict[str, Tokenizer]) -> None:
    pieces = tokenizers["sentencepiece"]
    assert pieces.decode([pieces.start_id]) == b"\n"
    assert pieces.encode(b"return:\n").tolist() == [*pieces.encode(b"return:"), pieces.start_id]
    assert tokenizers["bytes"].start_id == ord("\n")
    assert tokenizers["words"].encode(b"\n").tolist() == [tokenizers["words"].start_id]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_the_ends_of_lines_are_known_by_their_ids(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = np.array(tokenizer.encode(b"two words\n\nof text\n"))
    assert tokenizer.decode(ids[tokenizer.line_ends[ids]].tolist()) == b"\n\n\n"
    assert tokenizer.decode(ids[~tokenizer.line_ends[ids]].tolist()).replace(b" ", b"") == b"twowordsoftext"


def test_ids_do_not_depend_on_the_word_cache(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlcli.text.base.CACHED_WORDS", 3)
    fresh = TOKENIZERS["sentencepiece"].train([MIXED], 700)
    assert fresh.encode(MIXED).tolist() == tokenizers["sentencepiece"].encode(MIXED).tolist()


def random_text(kind: str) -> bytes:
    rng = random.Random(kind)
    if kind == "log":
        return b"".join(
            b"%06d INFO dfs.DataNode: block blk_%d of size %d\n" % (i, i * 7919, i * 64) for i in range(200)
        )
    if kind == "xml":
        return b"".join(
            b"  <page>\n    <title>Page %d</title>\n    <id>%d</id>\n  </page>\n" % (i, i) for i in range(200)
        )
    if kind == "cjk":
        return "".join(chr(0x4E00 + int(rng.expovariate(1 / 500))) for _ in range(4000)).encode()
    if kind == "one line":
        return b" ".join(rng.choice([b"some", b"words", b"again"]) for _ in range(25_000))
    return rng.randbytes(10_000)


@pytest.mark.parametrize("kind", ["log", "xml", "cjk", "one line", "noise"])
@pytest.mark.parametrize("vocab_size", [300, 1000])
def test_any_kind_of_text_can_be_learned(kind: str, vocab_size: int) -> None:
    data = random_text(kind)
    tokenizer = TOKENIZERS["sentencepiece"].train([data], vocab_size)
    assert tokenizer.vocab_size <= vocab_size
    assert tokenizer.decode(tokenizer.encode(data)) == data


@pytest.mark.parametrize("data", [b"a", b"\n", b" ", b"\xff", b"\0", b"\n" * 1000, b"\t", "\u2581".encode()])
def test_the_smallest_texts_can_be_learned(data: bytes) -> None:
    tokenizer = TOKENIZERS["sentencepiece"].train([data], 1000)
    assert tokenizer.decode(tokenizer.encode(data)) == data


@pytest.mark.parametrize("kind", ["sentencepiece", "words"])
@pytest.mark.parametrize("chunks", [[], [b""]])
def test_an_empty_text_is_refused(kind: str, chunks: list[bytes]) -> None:
    with pytest.raises(DataError):
        TOKENIZERS[kind].train(chunks, 400)


def test_sizes_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="small"):
        TOKENIZERS["sentencepiece"].train([b"text"], 256)
    with pytest.raises(ConfigError, match="small"):
        TOKENIZERS["words"].train([b"text"], 2)


def test_learning_is_deterministic_and_silent(
    tokenizers: dict[str, Tokenizer], capfd: pytest.CaptureFixture[str]
) -> None:
    portions = [MIXED[i : i + 777] for i in range(0, len(MIXED), 777)]
    again = TOKENIZERS["sentencepiece"].train(portions, 700)
    assert again.fingerprint == tokenizers["sentencepiece"].fingerprint
    with pytest.raises(CheckpointError):
        SentencePieceTokenizer(b"nonsense")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_save_and_load(tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path) -> None:
    tokenizers[kind].save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.kind == kind
    assert loaded.fingerprint == tokenizers[kind].fingerprint
    assert loaded.encode(MIXED).tolist() == tokenizers[kind].encode(MIXED).tolist()


def test_fingerprints_differ(tokenizers: dict[str, Tokenizer]) -> None:
    other = TOKENIZERS["sentencepiece"].train([MIXED], 701)
    assert len({t.fingerprint for t in [*tokenizers.values(), other]}) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "format"),
        ({"kind": "os.system"}, "unknown"),
        ({"kind": None}, "unknown"),
        ({"kind": ["bytes"]}, "unknown"),
        ({"vocab_size": 3}, "vocab_size"),
        ({"fingerprint": "0"}, "fingerprint"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    tokenizers["sentencepiece"].save(tmp_path)
    about = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(about | change))
    with pytest.raises(CheckpointError, match=reason):
        load_tokenizer(tmp_path)


def test_missing_and_damaged_files_are_refused(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path)
    tokenizers["sentencepiece"].save(tmp_path)
    model = tmp_path / "tokenizer.model"
    whole = model.read_bytes()
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], b"\0" * 1000, whole[:50] + b"\xff" + whole[51:]):
        model.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_tokenizer(tmp_path)
    model.unlink()
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path)
    tokenizers["words"].save(tmp_path)
    for damaged in (b"", b"<unk>\n<eos>\ntwo words\n", b"<unk>\n<eos>\na\na\n", b"a\nb\n"):
        (tmp_path / "tokenizer.words").write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_tokenizer(tmp_path)


def test_mutated_models_load_losslessly_or_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    whole = tokenizers["sentencepiece"].data
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        try:
            tokenizer = SentencePieceTokenizer(bytes(mutant))
            assert tokenizer.decode(tokenizer.encode(MIXED[-300:])) == MIXED[-300:]
        except CheckpointError:
            refused += 1
    assert 0 < refused < 200


def test_a_foreign_model_stays_lossless() -> None:
    import io

    from sentencepiece import SentencePieceTrainer

    proto = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "hello there"]),
        model_writer=proto,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=4,
    )
    tokenizer = SentencePieceTokenizer(proto.getvalue())
    data = "  hello   world ﬁne\t\n\xff".encode()
    assert tokenizer.decode(tokenizer.encode(data)) == data
    proto = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"]),
        model_writer=proto,
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=4,
    )
    with pytest.raises(CheckpointError, match="byte"):
        SentencePieceTokenizer(proto.getvalue())


def test_words_are_counted_as_published() -> None:
    data = b" the cat sat \n on <unk> mat\r\n\nthe end"
    tokenizer = WordsTokenizer.train([data])
    lines = data.decode().split("\n")
    expected = [word for line in lines[:-1] for word in [*line.split(), "<eos>"]] + lines[-1].split()
    ids = tokenizer.encode(data)
    assert [tokenizer.decode([i]).decode() for i in ids] == [word.replace("<eos>", "\n") for word in expected]
    assert tokenizer.decode(ids).decode() == "\n".join(" ".join(line.split()) for line in lines)
    assert tokenizer.vocab_size == len(set(expected) | {"<unk>", "<eos>"})


def test_rare_words_become_unknown() -> None:
    tokenizer = WordsTokenizer.train([b"a a a b b c\n"], 4)
    assert tokenizer.encode(b"a b c d\n").tolist() == [2, 3, 0, 0, 1]
    assert tokenizer.tokens(b"a  bb \t\n")[1].tolist() == [1, 4, 3]


def facts(n_bytes: int, n_chars: int | None = -1, *, has_nul: bool = False) -> Facts:
    return Facts(n_bytes, n_bytes if n_chars == -1 else n_chars, has_nul, "", (n_bytes,), None)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(99_000), ("bytes", 256)),
        (facts(10**6, None), ("bytes", 256)),
        (facts(10**6, has_nul=True), ("bytes", 256)),
        (facts(100_000), ("sentencepiece", 512)),
        (facts(1_875_000), ("sentencepiece", 512)),
        (facts(3_750_000), ("sentencepiece", 1024)),
        (facts(10_000_000), ("sentencepiece", 2048)),
        (facts(38_000_000), ("sentencepiece", 4096)),
        (facts(100_000_000), ("sentencepiece", 8192)),
        (facts(10**11), ("sentencepiece", 8192)),
        (facts(4_000_000, 1_000_000), ("sentencepiece", 4096)),
    ],
)
def test_the_vocabulary_suits_the_text(known: Facts, expected: tuple[str, int]) -> None:
    assert choose_tokenizer("auto", None, known, known.n_bytes) == expected


def test_what_was_asked_for_is_kept() -> None:
    assert choose_tokenizer("sentencepiece", 5000, facts(10), 10) == ("sentencepiece", 5000)
    assert choose_tokenizer("words", None, facts(10), 10) == ("words", None)
    assert choose_tokenizer("bytes", None, facts(10**9), 10**9) == ("bytes", 256)
    assert choose_tokenizer("auto", 512, facts(10), 10) == ("sentencepiece", 512)
    assert choose_tokenizer("auto", 256, facts(10), 10) == ("bytes", 256)
    with pytest.raises(ConfigError, match="256"):
        choose_tokenizer("bytes", 300, facts(10), 10)


def test_text_imports_neither_torch_nor_sentencepiece() -> None:
    names = ("tokenizers", "corpus", "tokens", "loaders")
    modules = ", ".join(f"xlcli.text.{name}" for name in names)
    program = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in ('torch', 'sentencepiece')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
