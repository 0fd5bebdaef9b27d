"""The tokenizers of xlcli as `tokenizer.json` of Hugging Face, which gives the same ids. Imports no package of others.

A piece is in the vocabulary as the text that it stands for: a blank, not "▁". So no text has to be changed before it is
tokenized, and a character without a piece becomes the tokens of its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from xlcli.text.base import Tokenizer
from xlcli.text.foreign import BYTE_CHARACTERS, LONGEST_PART, converted
from xlcli.text.pretokenize import LONGEST
from xlcli.text.tokenizers import FROM_PICTURES

DEFAULT = "default"  # name of the chat template of a model that has only one
_BLANKS = r"[ \t\n\r\x0b\x0c]+"
_WITHOUT_WORD = r"(?:(?<! )(?> +[\t\r\x0b\x0c]*)|(?<=\A|\n)[\t\r\x0b\x0c]+)(?= |\z)"
"""White space that is a word of xlcli (`Splitter`) without a line end."""
_WHITE = {"\t": "tab", "\n": "line end", "\r": "carriage return", " ": "blank"}


def tokenizer_json(tokenizer: Tokenizer) -> bytes | None:
    """A `tokenizer.json` with the ids of `tokenizer`, but for texts that `differences` lists; None for token ids."""
    match tokenizer.kind:
        case "tokenizers":
            return tokenizer.data
        case "bytes":
            step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
            vocab = {char: byte for byte, char in enumerate(BYTE_CHARACTERS)}
            tree = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "pre_tokenizer": step, "decoder": step}
        case "sentencepiece":
            tree = _of_pieces(tokenizer.data)
        case "words":
            tree = _of_words(tokenizer.data)
        case _:
            return None
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, **tree}).encode()


def tokenizer_config(tokenizer_json: bytes, config: Mapping[str, Any], templates: Mapping[str, str]) -> bytes:
    """The `tokenizer_config.json` beside it, with chat templates; `config` has the ids of the tokens that it names."""
    tree: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    added = json.loads(tokenizer_json)["added_tokens"]
    special_names = {token["id"]: token["content"] for token in added if token["special"]}
    for key, ids in (("bos_token", [config["bos_token_id"]]), ("eos_token", config["eos_token_id"])):
        if ids and ids[0] in special_names:
            tree[key] = special_names[ids[0]]
    if templates.keys() == {DEFAULT}:
        tree["chat_template"] = templates[DEFAULT]
    elif templates:
        tree["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return json.dumps(tree, indent=2).encode() + b"\n"


def differences(tokenizer: Tokenizer) -> list[str]:
    """Kinds of text to which the exported `tokenizer.json` gives other ids than xlcli, as parts of a sentence."""
    data = tokenizer_json(tokenizer)
    if data is None:
        return []
    content = json.loads(data)
    kinds = ["text that is not UTF-8"]
    if tokenizer.kind != "bytes":
        longest = LONGEST_PART if tokenizer.kind == "tokenizers" else LONGEST
        kinds.append(f"more than {longest:,} bytes without a blank or line end")
    if tokenizer.kind == "tokenizers":
        kinds += _differences(content)
    if tokenizer.kind == "sentencepiece":
        lacking = sorted(name for char, name in _WHITE.items() if char not in content["model"]["vocab"])
        if lacking:
            kinds.append(f"words with a {' or '.join(lacking)}, which the vocabulary lacks")
    return kinds


def _differences(content: Mapping[str, Any]) -> Iterator[str]:
    """Kinds of text that a `tokenizer.json` of others reads in another way."""
    steps = [*_dicts([content["normalizer"], content["pre_tokenizer"]])]  # which change or divide a text
    types = {step["type"] for step in steps}
    # A step Metaspace writes ▁ for a blank, and puts one before a text unless its scheme is `never`.
    schemes = {step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace"}
    prepends = bool(schemes - {"never"}) or "Prepend" in types
    if prepends or any(step.get("add_prefix_space") for step in steps):
        yield "the first word, before which transformers puts a blank"
    if "NFC" in types:
        yield "text that is not in the form NFC"
    added = content["added_tokens"]
    special = [token["content"] for token in added if token.get("special")]
    if special:
        yield f"the name of a special token, such as {special[0]}"
    stripping = [token["content"] for token in added if token.get("lstrip") or token.get("rstrip")]
    if stripping:
        yield f"blanks beside a token, such as {stripping[0]}"
    if "▁" in json.dumps(steps, ensure_ascii=False) or schemes:
        yield "the character ▁"


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    """All tables with a type in a tree of JSON."""
    if isinstance(tree, dict) and "type" in tree:
        yield tree
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _dicts(part)


def split_step(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    """A step of a `tokenizer.json` that divides a text at a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _of_pieces(data: bytes) -> dict[str, Any]:
    """BPE of the pieces of a model of sentencepiece, within words."""
    model = json.loads(converted("the model", data))["model"]
    vocab = {piece.translate(FROM_PICTURES): i for piece, i in model["vocab"].items()}
    merges = [[part.translate(FROM_PICTURES) for part in pair] for pair in model["merges"]]
    return {
        "model": model | {"vocab": vocab, "merges": merges, "unk_token": None},
        "pre_tokenizer": split_step(r" +[^ \n]*\n?|[^ \n]+\n?|\n"),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    }


def _of_words(data: bytes) -> dict[str, Any]:
    """Words between white space; one that is not UTF-8 has a name with a blank, which no word of a text has."""
    words = data.removesuffix(b"\n").split(b"\n")
    vocab = {}
    for i, word in enumerate(words):
        is_utf8 = word.decode(errors="ignore").encode() == word
        vocab[word.decode() if is_utf8 else f"{word!r} "] = i
    changes = [_replace(_WITHOUT_WORD, " <unk>"), _replace(r"\n", " <eos>\n")]
    # Back to text: ["a", "b", "<eos>", "c"] becomes "a b\nc".
    blanks = {"type": "WordPiece", "prefix": "\n", "cleanup": False}  # before every word that begins with no line end
    texts = [blanks, _replace("^ ?<eos>$", "\n"), {"type": "Fuse"}, _replace("\n ", "\n")]
    return {
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        "normalizer": {"type": "Sequence", "normalizers": changes},
        "pre_tokenizer": split_step(_BLANKS, "Removed"),
        "decoder": {"type": "Sequence", "decoders": texts},
    }
