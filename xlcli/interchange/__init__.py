"""Import and export of models of other programs."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from xlcli.config import InferenceConfig, ModelConfig, Tree, WeightEncoding, differences, validate
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.files import JSON_LIMIT
from xlcli.interchange.format import OWN, model_type
from xlcli.interchange.format import Format as Format
from xlcli.interchange.gguf import GGUF
from xlcli.interchange.gguf_file import QUANTIZED
from xlcli.interchange.gpt2 import GPT2, GPTJ, OPT, Bloom, GPTNeo, GPTNeoX
from xlcli.interchange.llama import Gemma3, Llama
from xlcli.interchange.source import ADAPTER, CAN, CONFIG, DOWNLOAD, END, MERGE, START
from xlcli.interchange.source import Source as Source
from xlcli.interchange.transfo_xl import Original, TransfoXL
from xlcli.machine import require_memory
from xlcli.presets import models_folder
from xlcli.store.folder import LoadedModel, load, new_folder, require_free, save_model
from xlcli.store.layout import ENCODINGS, SavedConfig, is_model, n_weights, read_config_file, write_record
from xlcli.store.weights import encode, stored_infos, weights
from xlcli.text.tokenizers import load_tokenizer

_ALL: tuple[Format, ...] = (
    *(GGUF(), Llama(), Gemma3(), GPT2(), GPTNeo(), GPTJ(), GPTNeoX(), OPT(), Bloom()),
    *(TransfoXL(), Original()),
)
"""All formats. A new one is added here."""
FORMATS = {each.name: each for each in _ALL}
_REFORMER = "its attention at a token depends on later tokens, so no memory can continue it"
_HARMLESS = ("dropout.", "init_std", "zero_init", "loss_chunk", "feedforward.chunk_len")
_WITHOUT_NUMBERS = (*_HARMLESS, "position.clamp_len", "position.n_sinks")
"""Keys of `model` that change no prediction within the trained window."""
_WINDOW = ("max_position_embeddings", "mem_len", "clamp_len", "same_length")
"""Keys of `config.json` that change the window; other programs change them to extend a model."""
_TEXT = b"The quick brown fox jumps over the lazy dog , and the dog sleeps on .\n"
"""What a new model is checked with; divided as the words of Transformer-XL are."""
_MOST_TOKENS = 2**20
"""Maximum size of a vocabulary; that of the largest published Transformer-XL has 793,471 words."""
_LARGEST_TEMPLATES = JSON_LIMIT // 4
"""Maximum length of chat templates as JSON, since the record of a model has a limit, too."""
_LONG, _MOST_CHANGE = 16_000, 0.001
"""Bytes of text with which the encoding of quantized weights is chosen, and the change of its bits that is allowed."""
_MOST_CALLS, _MOST_MEMORY = 64, 2**28
"""Limits of a score: calls, and bytes of memory after which the rest of the text is left out."""


def find_format(path: Path) -> str | None:
    """The format of the model at `path`, a folder or file; None if it is of none that is known.

    Raises:
        CheckpointError: Its `config.json` is damaged.
    """
    return next((each.name for each in _ALL if each.recognizes(path)), None)


def import_model(path: Path, target: Path, *, name: str | None = None, encoding: WeightEncoding | None = None) -> Tree:
    """Makes the model folder `target` from the model of another program at `path`; all or nothing.

    Returns `imported` of its record: `format`; `source`, the name of `path`; `tokenizer`; `eos_token_id` of the source,
    a list; its `chat_templates` by name; `check_bits`, the mean surprisal in bits of the tokens of a short text, None
    if the vocabulary cannot spell it; `notices`, what one should know.

    Args:
        path: Folder or file of the model.
        target: The folder, which must not exist.
        name: Its format, a key of `FORMATS`; None: as the files say.
        encoding: Encoding of the weights; None: that of the source, and float32 if it has several, or other values. A
            quantized source gets the smallest of int8, bfloat16 and float32 with nearly the same predictions.

    Raises:
        CheckpointError: The source is missing, damaged or hostile, or has a setting that changes numbers and that
            xlcli lacks.
        ConfigError: `target` exists, or the files say another format than `name`.
        ResourceError: The disk is full, or the weights do not fit the machine.
    """
    format_ = FORMATS[name or _required_format(path)]
    if name and name != (found := find_format(path) or name):
        raise ConfigError(f"{path} is of the format {found}, not {name}.", "Leave out --format.")
    source = format_.open(path)
    kept = {each: info for each, info in source.tensors.items() if not each.endswith(format_.buffers)}
    names = {stored: each for each, stored in ENCODINGS.items() if each != "int8"} | dict.fromkeys(QUANTIZED)
    if other := next((each for each, info in kept.items() if info.dtype not in names), None):
        problem = f"tensor '{other}' has numbers of type {kept[other].dtype}"
        raise CheckpointError(f"{path}: {problem}, which xlcli cannot import.", "Import a version without them.")
    types = {names[info.dtype] for info in kept.values()}
    is_one_type = len(types) == 1 and format_.keeps_types
    stored_as = encoding or (None if None in types else types.pop() if is_one_type else "float32")
    require_memory(f"importing {path}", 4 * n_weights(kept), "Import a smaller model.")
    config = _sections(format_, source)
    model = config.model
    if model.n_matrix_weights > n_weights(kept):
        raise CheckpointError(f"{path} has fewer weights than its settings describe.", DOWNLOAD)
    if (model.vocab_size or 0) > _MOST_TOKENS:
        raise CheckpointError(f"{path} has a vocabulary of more than {_MOST_TOKENS:,} tokens.", CAN)
    has_own = isinstance(source.config.get(OWN), dict) and (source.path / OWN).is_dir()
    tokenizer = load_tokenizer(source.path / OWN) if has_own else format_.tokenizer(source, model)
    with new_folder(target) as folder:
        save_model(folder, config, dict(format_.weights(source, model)), tokenizer, {}, encoding=stored_as or "float32")
        left = (each for each in sorted(source.unread & kept.keys()) if not re.fullmatch(format_.copies, each))
        if other := next(left, None):
            raise CheckpointError(f"{path} has the tensor '{other}', which xlcli cannot import.", DOWNLOAD)
        small = _make_small(folder) if stored_as is None else None
        about: Tree = {"format": format_.name, "source": path.resolve().name, "tokenizer": tokenizer.kind}
        about |= {END: source.ids(END, model.vocab_size or 0), "chat_templates": {}, "check_bits": _check(folder)}
        about["notices"] = format_.notices(source, tokenizer)
        try:
            templates = format_.chat_templates(source)
            is_text = all(isinstance(text, str) for item in templates.items() for text in item)
            if not is_text or len(json.dumps(templates)) > _LARGEST_TEMPLATES:
                raise ValueError("it is no text, or too long")
            about["chat_templates"] = templates
        except (CheckpointError, ValueError, LookupError, TypeError, AttributeError) as error:
            about["notices"].append(f"the chat template is lost: {error}")
        if small:
            about["notices"].append(f"the weights are rounded to {small}: --weights float32 keeps those of the file")
        record = {"corpus": f"imported from {about['source']} ({about['format']})", "imported": about}
        write_record(folder, {**record, "finished": True})
    return about


def export_model(folder: Path, target: Path, *, name: str | None = None) -> tuple[str, list[str]]:
    """Writes the model in `folder` to `target` in another format; all or nothing.

    Returns the name of the format, and what is lost or read in another way by the other program.

    Importing it again gives the same configuration, tokenizer and weights to the bit; weights in int8 become float32.

    Args:
        folder: The model.
        target: The folder, or the file if the format has one, which must not exist.
        name: The format, a key of `FORMATS`; None: `gguf` if the name of the file says so, else by the model.

    Raises:
        CheckpointError: The model is damaged.
        ConfigError: `target` exists, or the format cannot hold the model; the error names the setting.
        ResourceError: The disk is full.
    """
    header = read_config_file(folder)
    by_model = "transfo-xl" if header.config.model.position.kind == "xl" else "llama"
    format_ = FORMATS[name or ("gguf" if target.suffix == ".gguf" else by_model)]
    tree = _export_config(header.config, format_)
    require_free(target)
    model = load(folder)
    encoding = "float32" if header.encoding == "int8" else header.encoding
    own = weights(model.network)
    tensors = format_.export_weights(encode(own, stored_infos(own, encoding)), header.config.model)
    tree |= {START: model.tokenizer.start_id, END: model.end_ids, "torch_dtype": encoding}
    tree[OWN] = header.config.model_dump(mode="json")
    return format_.name, format_.write(target, tree, tensors, model.tokenizer, model.chat_templates)


def _required_format(path: Path) -> str:
    """The format of a source; `CheckpointError` if it has none, or one that is declined."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no folder or file {path}.", "Download the model into a folder first.")
    if name := find_format(path):
        return name
    if (kind := model_type(path)) is None:
        if is_model(path):
            raise CheckpointError(f"{path} is already an xlcli model.", "Use it as it is, with -m.")
        problem = f"{path} does not say what model it is: it has no {CONFIG} with a model_type."
        raise CheckpointError(problem, _what_to_give(path))
    reason = _REFORMER if kind == "reformer" else "xlcli has no such model"
    raise CheckpointError(f"{path} has model type {ascii(kind)[:80]}: {reason}.", CAN)


def _what_to_give(path: Path) -> str:
    """The remedy for what is no model."""
    if (path / ADAPTER).exists():
        return MERGE
    if path.suffix in (".zip", ".whl", ".tar", ".gz", ".tgz"):
        return "Unpack it first."
    if path.suffix == ".gguf" and path.is_file():
        return "Download it again: a GGUF file begins with GGUF."
    if files := sorted(path.glob("*.gguf")):
        return f"Give the GGUF file: {files[0]}."
    return f"Give the folder that has {CONFIG} and the weights, or a GGUF file."


def _sections(format_: Format, source: Source) -> SavedConfig:
    """The configuration of a source. An exported model has its own, which holds while the other settings agree."""
    try:
        config = validate(SavedConfig, {"text": {}, **format_.sections(source)})
        own = validate(SavedConfig, tree) if isinstance(tree := source.config.get(OWN), dict) else config
        exported = format_.export_config(own) if own is not config else {}
    except ConfigError as error:
        raise CheckpointError(f"{source.path} cannot be imported: {error.message}", CAN) from None
    is_changed = any(source.config[key] != exported[key] for key in _WINDOW if key in source.config and key in exported)
    return config if is_changed or _difference(own.model, config.model) else own


def _export_config(config: SavedConfig, format_: Format) -> Tree:
    """`config.json` in this format; `ConfigError` names a setting that importing it again would change."""
    tree = format_.export_config(config)
    try:
        back = validate(SavedConfig, {"text": {}, **format_.sections(Source(Path(CONFIG), tree, {}))})
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"the format {format_.name} cannot hold the model: {error.message}", CAN) from None
    if key := _difference(config.model, back.model):
        value: Any = _resolved(config.model)
        for part in key.split("."):
            value = value[part]
        raise ConfigError(f"the format {format_.name} cannot hold model.{key} {ascii(value)[:80]}.", CAN)
    return tree


def _difference(model: ModelConfig, other: ModelConfig) -> str | None:
    """The first setting in which the predictions of two models differ, however far they see."""
    found = differences(_resolved(model), _resolved(other))
    found = [key for key in found if not key.startswith(_WITHOUT_NUMBERS)]
    return next(iter([*(key for key in found if key.endswith("kind")), *found]), None)


def _resolved(model: ModelConfig) -> Tree:
    """The settings of a model with their defaults filled in; of its attention those of each layer, if they differ."""
    tree = model.model_dump(mode="json")
    layers = [layer.model_dump(mode="json") for layer in model.attentions]
    for layer in layers:
        layer |= {"head_dim": model.head_dim, "n_kv_heads": layer.get("n_kv_heads") or layer["n_heads"]}
    tree["attention"] = layers[0] | {str(i): layer for i, layer in enumerate(layers) if layer != layers[0]}
    tree["feedforward"]["ffn_dim"] = model.ffn_dim
    if tree["position"].get("n_features", 0) is None:
        tree["position"]["n_features"] = model.dim
    return tree


def _make_small(folder: Path) -> str | None:
    """Stores the weights of a model in int8 or bfloat16, if its surprisal of an English text stays nearly the same.

    Returns the encoding; None if it was not changed.
    """
    with (models_folder() / "books" / "valid.txt").open("rb") as file:
        text = file.read(_LONG)
    whole, is_known = _score(load(folder), text)
    for encoding in ("int8", "bfloat16") * is_known:
        rounded, _ = _score(load(folder, InferenceConfig(weight_dtype=encoding)), text)
        if abs(rounded / whole - 1) < _MOST_CHANGE:
            model = load(folder)
            save_model(folder, model.config, weights(model.network), model.tokenizer, {}, encoding=encoding)
            return encoding
    return None


def _check(folder: Path) -> float | None:
    """Mean surprisal in bits of the tokens of a short text; None if the vocabulary cannot spell it.

    Raises:
        CheckpointError: It is no number, or a weight is none.
    """
    model = load(folder)
    bits, is_known = _score(model, _TEXT)
    if not math.isfinite(bits) or not all(bool(each.isfinite().all()) for each in weights(model.network).values()):
        raise CheckpointError("the weights hold NaN or infinity: the model predicts nothing.", DOWNLOAD)
    return bits if is_known else None


def _score(model: LoadedModel, text: bytes) -> tuple[float, bool]:
    """Mean surprisal in bits of the tokens of the beginning of a text; of token 0, and False, if it has no tokens."""
    try:
        ids, is_known = model.tokenizer.encode(text).tolist(), True
    except DataError:
        ids, is_known = [0], False
    train, nats, n_read = model.config.train, 0.0, 0
    ids = ids[: _MOST_CALLS * train.segment_len]
    inputs, targets = torch.tensor([[model.tokenizer.start_id, *ids[:-1]]]), torch.tensor([ids])
    with torch.inference_mode():
        mem_len = min(train.mem_len, len(ids))  # zeros may fill all of it
        state = model.network.init_state(1, mem_len=mem_len, segment_len=train.segment_len)
        for at in range(0, len(ids), train.segment_len):
            part = slice(at, at + train.segment_len)
            out = model.network.score(inputs[:, part], targets[:, part], state)
            nats, n_read, state = nats + out.nll.sum().item(), n_read + out.nll.numel(), out.state
            if state.bytes > _MOST_MEMORY:
                break
    return nats / math.log(2) / n_read, is_known
