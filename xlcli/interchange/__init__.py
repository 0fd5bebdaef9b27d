"""Import and export of models of other programs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlcli.config import InferenceConfig, ModelConfig, Tree, WeightEncoding, differences, validate
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.events import Progress, ProgressMeter
from xlcli.files import JSON_LIMIT
from xlcli.files.tensors import TensorInfo
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
from xlcli.ops.stored import is_finite
from xlcli.presets import models_folder
from xlcli.store.folder import LoadedModel, load, new_folder, require_free, save_in_order, save_model
from xlcli.store.layout import ENCODINGS, SavedConfig, is_model, n_weights, read_config_file, write_record
from xlcli.store.origin import first_cause
from xlcli.store.weights import encode, encode_in_order, stored_infos, weights, weights_bytes
from xlcli.text.base import Tokenizer
from xlcli.text.tokenizers import load_tokenizer

_ALL: tuple[Format, ...] = (  # a new format is added here, and to the choices of `--format` in `xlcli/cli/options.py`
    *(GGUF(), Llama(), Gemma3(), GPT2(), GPTNeo(), GPTJ(), GPTNeoX(), OPT(), Bloom()),
    *(TransfoXL(), Original()),
)
FORMATS = {format_.name: format_ for format_ in _ALL}
_REFORMER = "its attention at a token depends on later tokens, so no memory can continue it"
_HARMLESS = ("dropout.", "init_std", "zero_init", "loss_chunk", "feedforward.chunk_len")  # change no prediction
_WITHOUT_NUMBERS = (*_HARMLESS, "position.clamp_len", "position.n_sinks")  # nor these within the trained window
_WINDOW = "max_position_embeddings"  # key of `config.json`, which other programs change to extend a model
_TEXT = b"The quick brown fox jumps over the lazy dog , and the dog sleeps on .\n"
"""What a new model is checked with; divided as the words of Transformer-XL are."""
_MOST_TOKENS = 2**20  # maximum size of a vocabulary; that of the largest published Transformer-XL has 793,471 words
_LARGEST_TEMPLATES = JSON_LIMIT // 4  # length of chat templates as JSON, since the record of a model has a limit, too
_LONG = 16_000  # bytes of text with which the encoding of quantized weights is chosen
_MOST_CHANGE = 0.001  # of the bits of that text, relative to those of the whole weights
_MOST_CALLS, _MOST_MEMORY = 64, 2**28  # calls, and bytes of memory, after which a score leaves out the rest of a text


def find_format(path: Path) -> str | None:
    """The format of a folder or file; None if none is known. `CheckpointError` if its `config.json` is damaged."""
    for format_ in _ALL:
        if format_.recognizes(path):
            return format_.name
    return None


def import_model(
    path: Path,
    target: Path,
    *,
    name: str | None = None,
    encoding: WeightEncoding | None = None,
    show: Callable[[Progress], None] = lambda _: None,
) -> Tree:
    """Makes the new model folder `target` from the folder or file of another program at `path`; all or nothing.

    `name` is its format, a key of `FORMATS`; None: as the files say. `encoding` is that of the weights; None: that of
    the source, and float32 if it has several, or other values. A quantized source gets the smallest of int8, bfloat16
    and float32 with nearly the same predictions. `show` is called with the progress of this work.

    Returns `imported` of its record: `format`; `source`, the name of `path`; `tokenizer`; `eos_token_id` of the source,
    a list; its `chat_templates` by name; `check_bits`, the mean surprisal in bits of the tokens of a short text, None
    if the vocabulary cannot spell it; `notices`, what one should know.

    Raises:
        CheckpointError: The source is damaged or hostile, or has a setting that changes numbers and that xlcli lacks.
        ConfigError: `target` exists, or the files say another format than `name`.
        ResourceError: The disk is full, or the weights do not fit the machine.
    """
    if name is None:
        name = _required_format(path)
    elif find_format(path) not in (None, name):
        raise ConfigError(f"{path} is of the format {find_format(path)}, not {name}.", "Leave out --format.")
    format_ = FORMATS[name]
    source = format_.open(path)
    infos = {key: tensor.info for key, tensor in source.stored.items() if not key.endswith(format_.buffers)}
    stored_as = encoding or _encoding_of_source(path, infos, format_)
    encoding_first = stored_as or "float32"
    config = _sections(format_, source)
    model = config.model
    _check_sizes(path, model, infos)
    size = weights_bytes(model, encoding_first)
    require_memory(f"importing {path}", size, "Import a smaller model.")  # which is read again to check it
    is_our_export = isinstance(source.config.get(OWN), dict) and (source.path / OWN).is_dir()
    tokenizer = load_tokenizer(source.path / OWN) if is_our_export else format_.tokenizer(source, model)
    with new_folder(target) as folder:
        stored = encode_in_order(format_.weights(source, model), model, encoding_first)
        save_in_order(folder, config, _counted(stored, size, show), tokenizer, {}, encoding=encoding_first)
        # A tensor that nothing has read may be a part of the network that xlcli lacks.
        for unread in sorted(source.unread & infos.keys()):
            if not re.fullmatch(format_.copies, unread):
                raise CheckpointError(f"{path} has the tensor '{unread}', which xlcli cannot import.", DOWNLOAD)
        rounded_to = None if stored_as else _make_small(folder, show)
        imported = _record_of_import(folder, format_, source, tokenizer, show)
        if rounded_to:
            remark = f"the weights are rounded to {rounded_to}: --weights float32 keeps those of the file"
            imported["notices"].append(remark)
        corpus = f"imported from {imported['source']} ({imported['format']})"
        write_record(folder, {"corpus": corpus, "imported": imported, "finished": True})
    return imported


def _record_of_import(
    folder: Path, format_: Format, source: Source, tokenizer: Tokenizer, show: Callable[[Progress], None]
) -> Tree:
    """Makes the entry `imported` of the record of the complete model in `folder`, as `import_model` returns it."""
    imported: Tree = {"format": format_.name, "source": source.path.resolve().name, "tokenizer": tokenizer.kind}
    imported |= {END: source.ids(END, tokenizer.vocab_size), "chat_templates": {}, "check_bits": _check(folder, show)}
    imported["notices"] = format_.notices(source, tokenizer)
    try:
        imported["chat_templates"] = _chat_templates(format_, source)
    except (CheckpointError, ValueError, LookupError, TypeError, AttributeError) as error:
        imported["notices"].append(f"the chat template is lost: {error}")
    return imported


def _check_sizes(path: Path, model: ModelConfig, infos: Mapping[str, TensorInfo]) -> None:
    """`CheckpointError` if a source has fewer weights than its settings describe, or a vocabulary that is too large."""
    if model.n_matrix_weights > n_weights(infos):
        raise CheckpointError(f"{path} has fewer weights than its settings describe.", DOWNLOAD)
    if (model.vocab_size or 0) > _MOST_TOKENS:
        raise CheckpointError(f"{path} has a vocabulary of more than {_MOST_TOKENS:,} tokens.", CAN)


def _encoding_of_source(path: Path, infos: Mapping[str, TensorInfo], format_: Format) -> str | None:
    """The encoding that keeps the weights of a source as they are; None if some are quantized."""
    encoding_of_type = {dtype: encoding for encoding, dtype in ENCODINGS.items() if encoding != "int8"}
    for name, info in infos.items():
        if info.dtype not in encoding_of_type and info.dtype not in QUANTIZED:
            problem = f"tensor '{name}' has numbers of type {info.dtype}"
            raise CheckpointError(f"{path}: {problem}, which xlcli cannot import.", "Import a version without them.")
    types = {info.dtype for info in infos.values()}
    if not types.isdisjoint(QUANTIZED):
        return None
    if len(types) == 1 and format_.keeps_types:
        return encoding_of_type[types.pop()]
    return "float32"


def _chat_templates(format_: Format, source: Source) -> Tree:
    """The chat templates of a source by name; `ValueError` if one is no text, and any error of damaged files."""
    templates = format_.chat_templates(source)
    texts = [*templates, *templates.values()]
    if not all(isinstance(text, str) for text in texts) or len(json.dumps(templates)) > _LARGEST_TEMPLATES:
        raise ValueError("it is no text, or too long")
    return templates


def export_model(folder: Path, target: Path, *, name: str | None = None) -> tuple[str, list[str]]:
    """Writes the model in `folder` to the new folder or file `target`; all or nothing.

    `name` is the format, a key of `FORMATS`; None: `gguf` if the name of the file says so, else `llama`. Importing
    it again gives the same configuration, tokenizer and weights to the bit; weights in int8 become float32.

    Returns the name of the format, and what is lost or read in another way by the other program.

    Raises:
        CheckpointError: The model is damaged.
        ConfigError: `target` exists, or the format cannot hold the model; the error names the setting.
        ResourceError: The disk is full.
    """
    header = read_config_file(folder)
    if name is None:
        name = "gguf" if target.suffix == ".gguf" else "llama"
    format_ = FORMATS[name]
    tree = _export_config(header.config, format_)
    require_free(target)
    model = load(folder)
    encoding = "float32" if header.encoding == "int8" else header.encoding
    values = weights(model.network)
    tensors = format_.export_weights(encode(values, stored_infos(values, encoding)), header.config.model)
    tree |= {START: model.tokenizer.start_id, END: model.end_ids, "torch_dtype": encoding}
    tree[OWN] = header.config.model_dump(mode="json")
    return format_.name, format_.write(target, tree, tensors, model.tokenizer, model.chat_templates)


def _required_format(path: Path) -> str:
    """The format of a source; `CheckpointError` if it has none, or one that is declined."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no folder or file {path}.", "Download the model into a folder first.")
    name = find_format(path)
    if name is not None:
        return name
    kind = model_type(path)
    if kind is not None:
        reason = _REFORMER if kind == "reformer" else "xlcli has no such model"
        raise CheckpointError(f"{path} has model type {ascii(kind)[:80]}: {reason}.", CAN)
    if is_model(path):
        raise CheckpointError(f"{path} is already an xlcli model.", "Use it as it is, with -m.")
    problem = f"{path} does not say what model it is: it has no {CONFIG} with a model_type."
    raise CheckpointError(problem, _what_to_give(path))


def _what_to_give(path: Path) -> str:
    """The remedy for what is no model."""
    if (path / ADAPTER).exists():
        return MERGE
    if path.suffix in (".zip", ".whl", ".tar", ".gz", ".tgz"):
        return "Unpack it first."
    if path.suffix == ".gguf" and path.is_file():
        return "Download it again: a GGUF file begins with GGUF."
    files = sorted(path.glob("*.gguf"))
    if files:
        return f"Give the GGUF file: {files[0]}."
    return f"Give the folder that has {CONFIG} and the weights, or a GGUF file."


def _sections(format_: Format, source: Source) -> SavedConfig:
    """Reads the configuration of a source: its own, if xlcli has exported it and no other setting was changed since."""
    own_config = source.config.get(OWN)
    try:
        config = validate(SavedConfig, {"text": {}, **format_.sections(source)})
        if not isinstance(own_config, dict):
            return config
        exported_from = validate(SavedConfig, own_config)
        settings_then = format_.export_config(exported_from)
    except ConfigError as error:
        raise CheckpointError(f"{source.path} cannot be imported: {error.message}", CAN) from None
    has_window = _WINDOW in source.config and _WINDOW in settings_then
    if has_window and source.config[_WINDOW] != settings_then[_WINDOW]:
        return config
    return config if _difference(exported_from.model, config.model) else exported_from


def _export_config(config: SavedConfig, format_: Format) -> Tree:
    """`config.json` in this format; `ConfigError` names a setting that importing it again would change."""
    tree = format_.export_config(config)
    try:
        back = validate(SavedConfig, {"text": {}, **format_.sections(Source(Path(CONFIG), tree, {}))})
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"the format {format_.name} cannot hold the model: {error.message}", CAN) from None
    key = _difference(config.model, back.model)
    if key is not None:
        value: Any = _resolved(config.model)
        for part in key.split("."):
            value = value[part]
        raise ConfigError(f"the format {format_.name} cannot hold model.{key} {ascii(value)[:80]}.", CAN)
    return tree


def _difference(model: ModelConfig, other: ModelConfig) -> str | None:
    """The first setting in which the predictions of two models differ, however far they see."""
    keys = [key for key in differences(_resolved(model), _resolved(other)) if not key.startswith(_WITHOUT_NUMBERS)]
    return first_cause(keys) if keys else None


def _resolved(model: ModelConfig) -> Tree:
    """The settings of a model with their defaults filled in, to be compared.

    Section `attention` is that of the first layer, with tables "1", "2" and so on of layers that differ from it.
    """
    tree = model.model_dump(mode="json")
    first, *others = [layer.model_dump(mode="json") for layer in model.attentions]
    for layer in (first, *others):
        layer["head_dim"] = model.head_dim
        layer["n_kv_heads"] = layer.get("n_kv_heads") or layer["n_heads"]
    tree["attention"] = first | {str(i): layer for i, layer in enumerate(others, 1) if layer != first}
    tree["feedforward"]["ffn_dim"] = model.ffn_dim
    if tree["position"].get("n_features", 0) is None:
        tree["position"]["n_features"] = model.dim
    return tree


def _counted(
    stored: Iterable[tuple[str, Tensor]], size: int, show: Callable[[Progress], None]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are; `show` gets how many of their `size` bytes were taken before the next one."""
    meter = ProgressMeter("importing", size, "B")
    n_bytes = 0
    for name, tensor in stored:
        yield name, tensor
        n_bytes += tensor.nbytes
        for progress in meter.report(n_bytes):
            show(progress)


def _make_small(folder: Path, show: Callable[[Progress], None]) -> str | None:
    """Encodes stored weights in int8 or bfloat16 if an English text keeps nearly its bits; the encoding, or None."""
    with (models_folder() / "books" / "valid.txt").open("rb") as file:
        text = file.read(_LONG)
    whole, can_spell = _score(load(folder), text, show)
    if not can_spell:
        return None
    for encoding in ("int8", "bfloat16"):
        rounded, _ = _score(load(folder, InferenceConfig(weight_dtype=encoding)), text, show)
        if abs(rounded / whole - 1) < _MOST_CHANGE:
            model = load(folder)
            save_model(folder, model.config, weights(model.network), model.tokenizer, {}, encoding=encoding)
            return encoding
    return None


def _check(folder: Path, show: Callable[[Progress], None]) -> float | None:
    """Mean surprisal of `_TEXT` in bits per token; None if it cannot be spelled. `CheckpointError` for NaN."""
    model = load(folder)
    bits, can_spell = _score(model, _TEXT, show)
    are_finite = all(is_finite(weight) for weight in weights(model.network).values())
    if not math.isfinite(bits) or not are_finite:
        raise CheckpointError("the weights hold NaN or infinity: the model predicts nothing.", DOWNLOAD)
    return bits if can_spell else None


def _score(model: LoadedModel, text: bytes, show: Callable[[Progress], None]) -> tuple[float, bool]:
    """Scores the first tokens of a text: their mean surprisal in bits, and whether the vocabulary can spell the text.

    If it cannot, the surprisal is that of token 0. `show` is called with the progress of this work.
    """
    can_spell = True
    try:
        ids = model.tokenizer.encode(text).tolist()
    except DataError:
        ids = [0]
        can_spell = False
    train = model.config.train
    ids = ids[: _MOST_CALLS * train.segment_len]
    inputs = torch.tensor([[model.tokenizer.start_id, *ids[:-1]]])
    targets = torch.tensor([ids])
    meter = ProgressMeter(f"checking {model.encoding}", len(ids), "tokens")
    nats, n_read = 0.0, 0
    with torch.inference_mode():
        mem_len = min(train.mem_len, len(ids))  # zeros may fill all of it
        state = model.network.init_state(1, mem_len=mem_len, segment_len=train.segment_len)
        for start in range(0, len(ids), train.segment_len):
            segment = slice(start, start + train.segment_len)
            out = model.network.score(inputs[:, segment], targets[:, segment], state)
            nats += out.nll.sum().item()
            n_read += out.nll.numel()
            for progress in meter.report(n_read):
                show(progress)
            state = out.state
            if state.bytes > _MOST_MEMORY:
                break
    return nats / math.log(2) / n_read, can_spell
