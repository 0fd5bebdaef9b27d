"""Vocabularies in GGUF files: byte BPE (`gpt2`) and pieces of sentencepiece with scores (`llama`).

Names of pre-tokenizers (`tokenizer.ggml.pre`) stand for patterns that llama.cpp has in its code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xlcli.errors import CheckpointError, ConfigError
from xlcli.interchange.format import OWN
from xlcli.interchange.source import CAN
from xlcli.interchange.vocabulary import split_step
from xlcli.text import foreign
from xlcli.text.base import Tokenizer
from xlcli.text.foreign import CONTROL, NORMAL, UNUSED, USER_DEFINED
from xlcli.text.tokenizers import PICTURES, TOKENIZERS

_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PLAIN_BYTES = _BYTES | {"use_regex": False}
_DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}


PATTERNS = {  # the steps that divide a text, as in `tokenizer.json`, and whether a part that is a token stays one
    "gpt-2": ([_BYTES], False),
    "olmo": ([_BYTES], False),
    "smollm": ([_DIGITS, _BYTES], False),
    "starcoder": ([_DIGITS, _BYTES], False),
    "llama-bpe": ([split_step(foreign.LLAMA3), _PLAIN_BYTES], True),
    "qwen2": ([split_step(foreign.QWEN2), _PLAIN_BYTES], False),
    "deepseek-r1-qwen": ([split_step(foreign.QWEN2), _PLAIN_BYTES], False),
    "default": ([*map(split_step, foreign.DEFAULT), _PLAIN_BYTES], False),
}
_NO_MERGE = "none none"  # a merge that never applies, since parts are characters at first: llama.cpp wants at least one


def read_vocabulary(name: str, metadata: Mapping[str, Any], vocab_size: int, start_id: int) -> Tokenizer:
    """The tokenizer of a file, or one of token ids; `CheckpointError` if it is damaged, or xlcli lacks its kind."""
    # What `write_vocabulary` has left counts first: a kind of xlcli with its data.
    kind_of_xlcli = metadata.get(f"{OWN}.tokenizer")
    data = metadata.get(f"{OWN}.vocabulary", b"")
    if kind_of_xlcli in ("bytes", "sentencepiece") and isinstance(data, bytes):
        return TOKENIZERS[kind_of_xlcli](data, name)
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return foreign.IdsTokenizer(vocab_size, start_id)
    content = metadata.get("tokenizer.huggingface.json")
    if not isinstance(content, str):
        remedy = "Download the file again, or import the model from its folder of Hugging Face."
        content = foreign.tokenizer_json(name, lambda: _tree(name, kind, metadata), remedy).decode()
    return foreign.TokenizersTokenizer(content.encode(), name, vocab_size=vocab_size, start_id=start_id)


def _tree(name: str, kind: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.json` of a vocabulary, in part."""
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens = values["tokens"]
    kinds = values.get("token_type", [NORMAL] * len(tokens))
    added_tokens = foreign.added(tokens, kinds)
    if len(kinds) != len(tokens):
        raise ValueError("it has not one type for each token")
    if not all(isinstance(merge, str) for merge in values.get("merges", ())):
        raise ValueError("its merges are no strings")
    if kind == "llama":
        changes = bool(values.get("remove_extra_whitespaces") or values.get("precompiled_charsmap"))
        return foreign.of_pieces(tokens, values["scores"], kinds, is_unigram=False, changes=changes)
    patterns = values.get("pre", "default")
    if kind != "gpt2" or patterns not in PATTERNS:
        problem = f"has a tokenizer of the kind {ascii(kind)[:80]} with the patterns {ascii(patterns)[:80]}"
        raise CheckpointError(f"{name} {problem}, which xlcli lacks.", CAN)
    steps, ignores_merges = PATTERNS[patterns]
    *dividing, into_bytes = steps
    steps = [*dividing, into_bytes | {"trim_offsets": True}]
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": values["merges"], "ignore_merges": ignores_merges},
        "added_tokens": added_tokens,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }


def unused_id(tokenizer: Tokenizer) -> int:
    """A token to end texts with, where a model names none: one that begins them, is never used, or is no UTF-8."""
    texts, start_id = tokenizer.texts, tokenizer.start_id
    for text in (b"", b"\xff"):
        if texts[start_id] == text:
            return start_id
        if text in texts:
            return texts.index(text)
    return start_id


def write_vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """Metadata with which llama.cpp gives the same tokens, and xlcli this tokenizer; `ConfigError` if none does."""
    if tokenizer.kind == "bytes":
        tokens = [*foreign.BYTE_CHARACTERS]
        values: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [_NO_MERGE]}
        values["token_type"] = [NORMAL] * len(tokens)
    elif tokenizer.kind == "sentencepiece":
        names, scores, kinds = foreign.pieces(tokenizer.data)
        controls = str.maketrans({picture: char for char, picture in PICTURES.items()})
        values = {"model": "llama", "pre": "default", "scores": scores, "token_type": kinds, "unknown_token_id": 0}
        values |= {"tokens": [name.translate(controls) for name in names], "add_space_prefix": False}
    elif tokenizer.kind == "tokenizers":
        values = _of_merges(json.loads(tokenizer.data), tokenizer.vocab_size)
    else:
        raise ConfigError(f"the format gguf cannot hold a vocabulary of {tokenizer.kind}.", CAN)
    values |= {"bos_token_id": tokenizer.start_id, "add_bos_token": True}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()} | {f"{OWN}.tokenizer": tokenizer.kind}
    if tokenizer.kind == "tokenizers":
        metadata["tokenizer.huggingface.json"] = tokenizer.data.decode()
    elif tokenizer.data:
        metadata[f"{OWN}.vocabulary"] = tokenizer.data
    return metadata


def _of_merges(content: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Metadata of a BPE of bytes."""
    model = content["model"]
    steps = foreign.plain_steps(content["pre_tokenizer"])
    plain = [{key: step[key] for key in step if key != "trim_offsets"} for step in steps]
    wanted = plain, bool(model.get("ignore_merges"))
    names = [name for name, pattern in PATTERNS.items() if pattern == wanted]
    if not names or model.get("type", "BPE") != "BPE":
        problem = f"a tokenizer {model.get('type', 'BPE')} that divides a text by {ascii(steps)[:80]}"
        raise ConfigError(f"the format gguf cannot hold {problem}.", CAN)
    rows = {i: (token, NORMAL) for token, i in model["vocab"].items()}
    for token in content["added_tokens"]:
        rows[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    # An id without a token needs a name, too.
    all_rows = [rows.get(i, (f"[PAD{i}]", UNUSED)) for i in range(vocab_size)]
    tokens = [token for token, _ in all_rows]
    kinds = [kind for _, kind in all_rows]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    values = {"model": "gpt2", "pre": names[0], "tokens": tokens, "token_type": kinds}
    return values | {"merges": merges or [_NO_MERGE]}
