"""Import and export of models of other programs. Imports no torch, but in the functions that read or write weights."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

from xlcli.config import ModelConfig, Tree, WeightEncoding, differences, validate
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.files import write_atomic
from xlcli.interchange.eleuther import GPTJ, GPTNeo, GPTNeoX
from xlcli.interchange.format import TOKENIZER, TOKENIZER_CONFIG, model_type
from xlcli.interchange.format import Format as Format
from xlcli.interchange.gpt2 import GPT2
from xlcli.interchange.llama import Llama
from xlcli.interchange.original import Original
from xlcli.interchange.settings import CAN
from xlcli.interchange.source import CONFIG, DOWNLOAD
from xlcli.interchange.source import Source as Source
from xlcli.interchange.transfo_xl import TransfoXL
from xlcli.interchange.vocabulary import tokenizer_config
from xlcli.machine import require_memory
from xlcli.store.layout import ENCODINGS, WEIGHTS, SavedConfig, is_model, read_config_file, write_record

_ALL: tuple[Format, ...] = (Llama(), GPT2(), GPTNeo(), GPTJ(), GPTNeoX(), TransfoXL(), Original())
"""All formats. A new one is added here."""
FORMATS = {each.name: each for each in _ALL}
OWN = "xlcli"
"""Key of an exported `config.json` with the sections of the model, and folder of its tokenizer."""
_REFORMER = "its attention at a token depends on the tokens that follow, so that no memory can continue it"
_HARMLESS = ("dropout.", "init_std", "zero_init", "loss_chunk", "feedforward.chunk_len")
_WITHOUT_NUMBERS = (*_HARMLESS, "position.clamp_len", "position.n_sinks")
"""Keys of `model` that change no prediction within the trained window."""
_TEXT = b"The quick brown fox jumps over the lazy dog , and the dog sleeps on .\n"
"""What a new model is checked with; divided as the words of Transformer-XL are."""


def find_format(path: Path) -> str | None:
    """The format of the model at `path`, a folder or file; None if it is of none that is known.

    Raises:
        CheckpointError: Its `config.json` is damaged.
    """
    return next((each.name for each in _ALL if each.recognizes(path)), None)


def import_model(path: Path, target: Path, *, name: str | None = None, encoding: WeightEncoding | None = None) -> Tree:
    """Makes the model folder `target` from the model of another program at `path`; all or nothing.

    Returns `imported` of its record: `format`; `source`, the name of `path`; `tokenizer`; `eos_token_id` of the source;
    `check_bits`, the mean surprisal in bits of the tokens of a short text, None if the vocabulary cannot spell it;
    `notices`, what one should know of the tokens.

    Args:
        path: Folder or file of the model.
        target: The folder, which must not exist.
        name: Its format, a key of `FORMATS`; None: as the files say.
        encoding: Encoding of the weights; None: that of the source, and float32 if it has several.

    Raises:
        CheckpointError: The source is missing, damaged or hostile, or has a setting that changes numbers and that
            xlcli lacks.
        ConfigError: `target` exists, or the files say another format than `name`.
        ResourceError: The disk is full, or the weights do not fit the machine.
    """
    from xlcli.store.folder import new_folder, save_model
    from xlcli.store.layout import n_weights
    from xlcli.text.tokenizers import load_tokenizer

    format_ = FORMATS[name or _required_format(path)]
    if name and name != (found := find_format(path) or name):
        raise ConfigError(f"{path} is of the format {found}, not {name}.", "Leave out --format.")
    source = format_.open(path)
    kept = {each: info for each, info in source.tensors.items() if not each.endswith(format_.buffers)}
    names = {stored: each for each, stored in ENCODINGS.items() if each != "int8"}
    if other := next((each for each, info in kept.items() if info.dtype not in names), None):
        problem = f"tensor '{other}' has numbers of type {kept[other].dtype}"
        raise CheckpointError(f"{path}: {problem}, which xlcli cannot import.", "Import a version without them.")
    types = {names[info.dtype] for info in kept.values()}
    stored_as = encoding or (types.pop() if len(types) == 1 else "float32")
    require_memory(f"importing {path}", 4 * n_weights(kept), "Import a smaller model.")
    config = _sections(format_, source)
    model = config.model
    if model.n_matrix_weights > n_weights(kept):
        raise CheckpointError(f"{path} has fewer weights than its {CONFIG} describes.", DOWNLOAD)
    has_own = isinstance(source.config.get(OWN), dict) and (source.path / OWN).is_dir()
    tokenizer = load_tokenizer(source.path / OWN) if has_own else format_.tokenizer(source, model)
    with new_folder(target) as folder:
        save_model(folder, config, dict(format_.weights(source, model)), tokenizer, {}, encoding=stored_as)
        left = (each for each in sorted(source.unread & kept.keys()) if not re.fullmatch(format_.copies, each))
        if other := next(left, None):
            raise CheckpointError(f"{path} has the tensor '{other}', which xlcli cannot import.", DOWNLOAD)
        about: Tree = {"format": format_.name, "source": path.resolve().name, "tokenizer": tokenizer.kind}
        end_id = source.config.get("eos_token_id")
        about |= {"eos_token_id": end_id if type(end_id) is int else None, "check_bits": _check(folder)}
        about["notices"] = format_.notices(source, tokenizer)
        record = {"corpus": f"imported from {about['source']} ({about['format']})", "imported": about}
        write_record(folder, {**record, "finished": True})
    return about


def export_model(folder: Path, target: Path, *, name: str | None = None) -> str:
    """Writes the model in `folder` to the folder `target` in another format, whose name is returned; all or nothing.

    Importing it again gives the same configuration, tokenizer and weights to the bit; weights in int8 become float32.

    Args:
        folder: The model.
        target: The folder, which must not exist.
        name: The format, a key of `FORMATS`; None: the first one that can hold the model.

    Raises:
        CheckpointError: The model is damaged.
        ConfigError: `target` exists, or the format cannot hold the model; the error names the setting.
        ResourceError: The disk is full.
    """
    from xlcli.files.tensors import write_tensors
    from xlcli.store.folder import load, new_folder
    from xlcli.store.weights import encode, stored_infos, weights

    header = read_config_file(folder)
    format_ = FORMATS[name or ("transfo-xl" if header.config.model.position.kind == "xl" else "llama")]
    tree = _export_config(header.config, format_)
    with new_folder(target) as temporary:
        model = load(folder)
        encoding = "float32" if header.encoding == "int8" else header.encoding
        own = weights(model.network)
        tensors = format_.export_weights(encode(own, stored_infos(own, encoding)), header.config.model)
        files = format_.export_tokenizer(model.tokenizer)
        if model.tokenizer.data not in files.values():
            (temporary / OWN).mkdir()
            model.tokenizer.save(temporary / OWN)
        about = model.record.get("imported")
        end_id = about.get("eos_token_id") if isinstance(about, dict) else None
        tree |= {"bos_token_id": model.tokenizer.start_id, "eos_token_id": end_id, "torch_dtype": encoding}
        if TOKENIZER in files:
            files[TOKENIZER_CONFIG] = tokenizer_config(files[TOKENIZER], tree)
        for each, data in files.items():
            write_atomic(temporary / each, data)
        tree[OWN] = header.config.model_dump(mode="json")
        write_atomic(temporary / CONFIG, json.dumps(tree, indent=2).encode() + b"\n")
        write_tensors(temporary / WEIGHTS, tensors, {"format": "pt"})
    return format_.name


def _required_format(path: Path) -> str:
    """The format of a source; `CheckpointError` if it has none, or one that is declined."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no folder or file {path}.", "Download the model into a folder first.")
    if name := find_format(path):
        return name
    if is_model(path):
        raise CheckpointError(f"{path} is a model of xlcli already.", "Use it as it is, with -m.")
    if (kind := model_type(path)) is None:
        remedy = f"Give the folder that has {CONFIG} and the weights; files in GGUF are not read."
        raise CheckpointError(f"{path} does not say what model it is: it has no {CONFIG} with a model_type.", remedy)
    reason = _REFORMER if kind == "reformer" else "xlcli has no such model"
    raise CheckpointError(f"{path} is of the type {ascii(kind)[:80]}: {reason}.", CAN)


def _sections(format_: Format, source: Source) -> SavedConfig:
    """The configuration of a source. An exported model has its own, which holds while the other settings agree."""
    try:
        config = validate(SavedConfig, {"text": {}, **format_.sections(source)})
        own = validate(SavedConfig, tree) if isinstance(tree := source.config.get(OWN), dict) else config
    except ConfigError as error:
        raise CheckpointError(f"{source.path} cannot be imported: {error.message}", CAN) from None
    return config if _difference(own.model, config.model) else own


def _export_config(config: SavedConfig, format_: Format) -> Tree:
    """`config.json` in this format; `ConfigError` names a setting that importing it again would change."""
    tree = format_.export_config(config)
    try:
        back = validate(SavedConfig, {"text": {}, **format_.sections(Source(Path(CONFIG), tree, {}))})
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"the format {format_.name} cannot hold the model: {error.message}", CAN) from None
    if key := _difference(config.model, back.model):
        raise ConfigError(f"the format {format_.name} cannot hold the value of model.{key}.", CAN)
    return tree


def _difference(model: ModelConfig, other: ModelConfig) -> str | None:
    """The first setting in which the predictions of two models differ, however far they see."""
    found = differences(_resolved(model), _resolved(other))
    found = [key for key in found if not key.startswith(_WITHOUT_NUMBERS)]
    return next((key for key in found if key.endswith("kind")), found[0] if found else None)


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


def _check(folder: Path) -> float | None:
    """Mean surprisal in bits of the tokens of a short text; None if the vocabulary cannot spell it.

    Raises:
        CheckpointError: It is no number.
    """
    import torch

    from xlcli.store.folder import load

    model = load(folder)
    tokenizer, train = model.tokenizer, model.config.train
    try:
        ids, is_known = tokenizer.encode(_TEXT).tolist(), True
    except DataError:
        ids, is_known = [0], False
    ids = [tokenizer.start_id, *ids][: train.segment_len + 1]
    with torch.inference_mode():
        mem_len = min(train.mem_len, len(ids))  # zeros may fill all of it
        state = model.network.init_state(1, mem_len=mem_len, segment_len=train.segment_len)
        nats = model.network.score(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]), state).nll.mean().item()
    if not math.isfinite(nats):
        raise CheckpointError("the weights hold NaN or infinity: the model predicts nothing.", DOWNLOAD)
    return nats / math.log(2) if is_known else None
