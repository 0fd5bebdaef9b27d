"""Mutations of bytes, JSON and safetensors files, and checksums recomputed as a forger would."""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping

from xlcli.files import json_digest

NUMBERS = (0, 1, -1, 2, 7, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**18, 10**400)
VALUES = (
    *NUMBERS, 0.5, -0.0, 1e-320, 1e30, 1e308, float("nan"), float("inf"), None, True, False, "", "a" * 5000, "\x1b[2J",
    "\ud800", "nan", "1e400", "-1", "../x", [], [1], [0], [[]], {}, {"": 0}, {"kind": "full"}, [2**31] * 4, ["x"] * 300,
)  # fmt: skip
"""JSON values that a reader may not expect."""
LITERALS = (
    b"0",
    b"-1",
    b"1e9",
    b"2147483648",
    b"9223372036854775807",
    b"1" * 400,
    b"nan",
    b"inf",
    b"true",
    b'""',
    b"[]",
)
TYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""Type in safetensors to name in torch and bytes."""


def mutate(data: bytes, draw: random.Random, other: bytes, name: str) -> bytes:
    """Bytes that differ from `data`: flips, cuts, insertions, splices with another file, other numbers."""
    result = bytearray(data)
    while bytes(result) == data:
        at = draw.randrange(len(result) + 1)
        size = min(2 ** draw.randrange(10), len(result) - at)
        match draw.randrange(8):
            case 0 | 1 if result:
                for _ in range(2 ** draw.randrange(4)):
                    result[draw.randrange(len(result))] ^= 1 << draw.randrange(8)
            case 2:
                del result[at:]
            case 3:
                del result[at : at + size]
            case 4:
                result[at:at] = draw.randbytes(2 ** draw.randrange(8))
            case 5:
                start = draw.randrange(len(other) + 1)
                result[at : at + size] = other[start : start + 2 ** draw.randrange(12)]
            case 6:
                result[at : at + size] = bytes([draw.choice((0, 0x7F, 0x80, 0xFF))]) * size
            case 7:
                numbers = list(re.finditer(rb"-?\d+(\.\d+)?", bytes(result[:65536])))
                if numbers and (one := draw.choice(numbers)):
                    result[one.start() : one.end()] = draw.choice(LITERALS)
    return bytes(result)


def forge(data: bytes, draw: random.Random, other: bytes, name: str) -> bytes:
    """A mutant that respects the structure of the file in most cases."""
    if draw.random() < 0.2:
        return mutate(data, draw, other, name)
    if name.endswith(".json"):
        return json.dumps(edit(json.loads(data), draw), indent=2).encode()
    if name.endswith(".jsonl"):
        rows = data.splitlines()
        at = draw.randrange(len(rows))
        rows[at] = json.dumps(edit(json.loads(rows[at]), draw)).encode()
        return b"\n".join(rows)
    if name.endswith((".safetensors", ".state")):
        header, body = split(data)
        match draw.randrange(4):
            case 0:
                header = edit(header, draw)
            case 1:
                header["__metadata__"] = edit(header["__metadata__"], draw)
                header["__metadata__"] = {key: str(value) for key, value in header["__metadata__"].items()}
            case 2:
                header = _reshape(header, draw)
            case 3:
                body = mutate(body, draw, other, name)[: len(body)].ljust(len(body), b"\0")
        return join(header, body)
    if name == "tokenizer.model":
        return b"".join(_edit_pieces([*fields(data)], draw, other))
    return mutate(data, draw, other, name)


def _edit_pieces(found: list[bytes], draw: random.Random, other: bytes) -> list[bytes]:
    """Fields of a sentencepiece model with one of them changed."""
    at = draw.randrange(len(found)) if draw.random() < 0.8 else draw.randrange(len(found) - 3, len(found))
    body = found[at][len(found[at]) - size_of(found[at]) :]
    text = draw.choice((b"", b"a", b"\xff", b"\xe2\x96\x81", b"\n", b"\0", b"<0x41>", b"x" * 70000, other[:300]))
    score = draw.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", draw.randbytes(4)))
    match draw.randrange(5):
        case 0:
            body = b"\x0a" + number(len(text)) + text + b"\x15" + score
        case 1:
            body += b"\x15" + score
        case 2:
            body += b"\x18" + number(draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**63)))
        case 3:
            body = mutate(body, draw, other, "")
        case 4:
            return found[:at] + draw.choice(([], [found[at]] * 2)) + found[at + 1 :]
    return [*found[:at], found[at][:1] + number(len(body)) + body, *found[at + 1 :]]


def fields(data: bytes) -> Iterator[bytes]:
    """Fields of a protocol buffer whose fields all have a length, as those of a sentencepiece model."""
    while data:
        stop = len(data) if data[0] & 7 != 2 else 1 + len(number(size_of(data))) + size_of(data)
        yield data[:stop]
        data = data[stop:]


def size_of(field: bytes) -> int:
    """Length that a field gives for its content."""
    size = shift = 0
    for byte in field[1:]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return size


def number(value: int) -> bytes:
    """A number in a protocol buffer."""
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def edit(tree: object, draw: random.Random) -> object:
    """A copy of a JSON value with one value, key or element changed."""
    tree = json.loads(json.dumps(tree))
    while isinstance(tree, dict | list) and tree:
        holder, key, depth = tree, None, 0
        while True:
            key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
            below = holder[key]
            if not isinstance(below, dict | list) or not below or draw.random() < 0.15 or depth > 20:
                break
            holder, depth = below, depth + 1
        match draw.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("x", "kind", "sha256", "schema", "", "0.h", "state.memory"))] = draw.choice(VALUES)
            case 1:
                holder.append(draw.choice(VALUES))
            case 2 if type(holder[key]) in (int, float):
                holder[key] = draw.choice((holder[key] + 1, holder[key] * 2, holder[key] * 1000, -holder[key]))
            case 3:
                for _ in range(draw.choice((3, 19, 25, 300))):
                    holder[key] = [holder[key]]
                return tree
            case _:
                holder[key] = draw.choice(VALUES)
        return tree
    return draw.choice(VALUES)


def _reshape(header: dict, draw: random.Random) -> dict:
    """The header with another type and shape of one tensor, which has the same number of bytes."""
    name = draw.choice([key for key in header if key != "__metadata__"] or [""])
    if not name:
        return header
    entry = header[name]
    begin, end = entry["data_offsets"]
    entry["dtype"] = draw.choice((*TYPES, entry["dtype"], entry["dtype"]))
    n = (end - begin) // TYPES[entry["dtype"]][1]
    factors = [f for f in (1, 2, 3, 4, 8, 16, 57) if n % f == 0]
    first = draw.choice(factors)
    entry["shape"] = draw.choice(
        ([n], [first, n // first], [n // first, first], [1, n], [n, 1, 1], [1, 1, first, n // first])
    )
    if draw.random() < 0.2:
        header[draw.choice(("x", name + ":scale", "state.9.h"))] = {
            **entry,
            "shape": [0, 2**40],
            "data_offsets": [end, end],
        }
    return header


def split(data: bytes) -> tuple[dict, bytes]:
    """Header and body of a safetensors file."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def join(header: object, body: bytes) -> bytes:
    """The inverse of `split`."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def reseal(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """Files in which the checksums follow a change of the file `name`; as they are where that is impossible."""
    changed: dict[str, bytes] = {}
    try:
        if name.endswith((".safetensors", ".state")):
            changed[name] = seal_tensors(files[name])
        if name.startswith("checkpoints/") and not name.endswith("manifest.json"):
            place = name.rpartition("/")[0]
            manifest = json.loads(files[f"{place}/manifest.json"])
            data = changed.get(name, files[name])
            entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest["files"][name.rpartition("/")[2]] = entry
            changed[f"{place}/manifest.json"] = json.dumps(manifest).encode()
        elif "/" not in name and name.startswith(("config", "tokenizer", "valid", "test")):
            changed |= _seal_model(files, name)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError):
        pass
    return changed


def _seal_model(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """Tokenizer description, configuration and weights that fit together again."""
    changed: dict[str, bytes] = {}
    tokenizer = json.loads(files["tokenizer.json"])
    if name in ("tokenizer.model", "tokenizer.words"):
        tokenizer["fingerprint"], tokenizer["vocab_size"] = _vocabulary(name, files[name], tokenizer["vocab_size"])
        changed["tokenizer.json"] = json.dumps(tokenizer).encode()
    tree = json.loads(files["config.json"])
    for file in tree["files"]:
        tree["files"][file] = hashlib.sha256(changed.get(file, files[file])).hexdigest()
    tree["sha256"] = json_digest({key: value for key, value in tree.items() if key != "sha256"})
    changed["config.json"] = json.dumps(tree).encode()
    header, body = split(files["model.safetensors"])
    header["__metadata__"] |= {
        "config": json_digest({"schema": tree["schema"], "model": tree["model"]}),
        "tokenizer": tokenizer["fingerprint"],
    }
    changed["model.safetensors"] = seal_tensors(join(header, body))
    return changed


def _vocabulary(name: str, data: bytes, size: int) -> tuple[str, int]:
    """Fingerprint and number of tokens of a vocabulary."""
    if name == "tokenizer.words":
        words = data.removesuffix(b"\n").split(b"\n")
        return hashlib.sha256(b"words" + b"\n".join(words)).hexdigest(), len(words)
    pieces = sum(field.startswith(b"\x0a") for field in fields(data))
    return hashlib.sha256(b"sentencepiece" + data).hexdigest(), pieces if data.startswith(b"\x0a") else size


def seal_tensors(data: bytes) -> bytes:
    """A safetensors file whose checksums are those of its content."""
    header, body = split(data)
    metadata = {key: value for key, value in header["__metadata__"].items() if key != "metadata_sha256"}
    digest = hashlib.sha256()
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            shape = tuple(entry["shape"])
            digest.update(f"{name} torch.{TYPES[entry['dtype']][0]} {shape}\n".encode())
            digest.update(body[slice(*entry["data_offsets"])])
    metadata["sha256"] = digest.hexdigest()
    metadata["metadata_sha256"] = json_digest(metadata)
    return join(
        {"__metadata__": metadata} | {key: value for key, value in header.items() if key != "__metadata__"}, body
    )
