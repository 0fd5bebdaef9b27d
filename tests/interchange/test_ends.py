"""Tokens that end a text and chat templates: through folders and GGUF files and back, and lost ones by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
from converter import to_gguf
from test_agreement import FIXTURES, source_of
from test_import import make

from xlcli.errors import CheckpointError
from xlcli.interchange import export_model, import_model
from xlcli.interchange.gguf import ARCHITECTURES
from xlcli.store.folder import copy_model, load
from xlcli.store.layout import write_record
from xlcli.text.base import Tokenizer
from xlcli.text.tokenizers import TOKENIZERS

KEYS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
TEMPLATES = {"default": "{% for m in messages %}{{ m.content }}\n{% endfor %}", "tool_use": "{{ tools }} é"}
NAMED = [{"name": name, "template": text} for name, text in TEMPLATES.items()]


def source(folder: Path, config: object = None, generation: object = None) -> Path:
    """A Llama with a vocabulary, and these tokens that end a text in its two files; `None`: without them."""
    shutil.copytree(source_of("llama-text"), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tree = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps(tree))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "temperature": 0.6}))
    return folder


def ids_of(file: Path) -> list[int]:
    """The ids of a GGUF file at which llama.cpp ends a text, as the package gguf reads them."""
    fields = gguf.GGUFReader(file).fields
    return [int(fields[key].contents()) for key in KEYS if key in fields]


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [(2, None, [2]), ([2, 0], None, [2, 0]), (None, [3, 1, 2], [3, 1, 2]), (1, [2, 1], [2, 1]), ([5, 5], None, [5])],
)
def test_tokens_that_end_a_text_survive_in_every_format(tmp_path, config, generation, wanted):
    import_model(source(tmp_path / "source", config, generation), tmp_path / "m")
    as_written = wanted[0] if len(wanted) == 1 else wanted
    export_model(tmp_path / "m", tmp_path / "hf")
    _, notices = export_model(tmp_path / "m", tmp_path / "m.gguf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == as_written
    assert ids_of(tmp_path / "m.gguf") == wanted
    assert not notices
    for name in ("hf", "m.gguf"):
        import_model(tmp_path / name, tmp_path / f"from {name}")
        assert load(tmp_path / f"from {name}").end_ids == wanted


def test_a_start_that_is_in_the_other_file_alone_is_found(tmp_path):
    folder = source(tmp_path / "source")
    tree = json.loads((folder / "config.json").read_text()) | {"bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "generation_config.json").write_text('{"bos_token_id": 1}')
    import_model(folder, tmp_path / "m")
    assert load(tmp_path / "m").tokenizer.start_id == 1


def test_tokens_that_a_file_cannot_name_are_said(tmp_path):
    import_model(source(tmp_path / "source", [2, 0, 7, 9, 11]), tmp_path / "m")
    _, notices = export_model(tmp_path / "m", tmp_path / "m.gguf")
    assert ids_of(tmp_path / "m.gguf") == [2, 0, 7]
    assert "[9, 11]" in notices[0]


def unused(tokenizer: Tokenizer, token: int) -> bool:
    """True if no text has a token."""
    text = tokenizer.decode([token])
    return not text or text.decode(errors="replace") == "\ufffd"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "tokenizers"])
def test_a_file_always_names_a_token_and_one_that_no_text_has(tmp_path, kind):
    if kind == "tokenizers":
        import_model(source(tmp_path / "source"), tmp_path / "m")
    else:
        tokenizer = TOKENIZERS[kind].train([b"the cat sat on the mat\nthe dog sat\ton the log\n" * 40], None)
        make(tmp_path / "m", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    _, notices = export_model(tmp_path / "m", tmp_path / "m.gguf")
    [token] = ids_of(tmp_path / "m.gguf")
    assert unused(load(tmp_path / "m").tokenizer, token)
    assert f" {token} " in notices[0]


@pytest.mark.parametrize("value", [999, [2, 999], -1, "2", [2, None], 2.0, True, {"id": 2}])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_ids_that_no_token_has_are_refused(tmp_path, key, value):
    folder = source(tmp_path / "source")
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=key):
        import_model(folder, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("key", KEYS)
def test_ids_of_a_file_that_no_token_has_are_refused(tmp_path, key):
    file = to_gguf(FIXTURES / "llama" / "source", tmp_path / "m.gguf", **{key.replace(".", "__"): 4_294_967_295})
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.eos_token_id is \["):
        import_model(file, tmp_path / "m")


def test_copies_and_runs_keep_what_ends_a_text(tmp_path):
    import_model(source(tmp_path / "source", [2, 0]), tmp_path / "m")
    copy_model(tmp_path / "m", tmp_path / "copy")
    record = json.loads((tmp_path / "copy" / "record.json").read_text())
    assert load(tmp_path / "copy").end_ids == [2, 0]
    origin = {"model": "m", "weights": "w"}
    write_record(tmp_path / "copy", {"init": origin | {"init": origin | {"imported": record["imported"]}}})
    assert load(tmp_path / "copy").end_ids == [2, 0]
    for damaged in ({"imported": 5}, {"imported": {"eos_token_id": [-1, "x", 10**9], "chat_templates": [1]}}):
        write_record(tmp_path / "copy", damaged)
        assert load(tmp_path / "copy").end_ids == []
        assert load(tmp_path / "copy").chat_templates == {}


def template_of(folder: Path) -> object:
    return json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")


@pytest.mark.parametrize("form", ["text", "list", "file", "files"])
def test_chat_templates_survive_in_every_format(tmp_path, form):
    folder, wanted = source(tmp_path / "source", 2), TEMPLATES
    if form in ("text", "file"):
        wanted = {"default": TEMPLATES["default"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": {"text": wanted["default"], "list": NAMED}.get(form, "not this one")})
    )
    if form in ("file", "files"):
        (folder / "chat_template.jinja").write_text(wanted["default"])
    if form == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["tool_use"])
    assert not import_model(folder, tmp_path / "m")["notices"]
    export_model(tmp_path / "m", tmp_path / "hf")
    export_model(tmp_path / "m", tmp_path / "m.gguf")
    value = template_of(tmp_path / "hf")
    found = value if isinstance(value, str) else {each["name"]: each["template"] for each in value}
    assert found == (wanted if len(wanted) > 1 else wanted["default"])
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == wanted["default"]
    assert ("tokenizer.chat_template.tool_use" in fields) == (len(wanted) > 1)
    for name in ("hf", "m.gguf"):
        import_model(tmp_path / name, tmp_path / f"from {name}")
        assert load(tmp_path / f"from {name}").chat_templates == wanted


UNKEPT = [b"{", b"[]", b'{"chat_template": 5}', b'{"chat_template": ["x"]}', b'{"chat_template": {"a": 1}}', b"\xff"]


@pytest.mark.parametrize("content", [*UNKEPT, json.dumps({"chat_template": "x" * 2**19}).encode()], ids=range(7))
def test_a_chat_template_that_cannot_be_kept_is_lost_aloud(tmp_path, content):
    folder = source(tmp_path / "source", 2)
    (folder / "tokenizer_config.json").write_bytes(content)
    about = import_model(folder, tmp_path / "m")
    assert "chat template is lost" in about["notices"][0]
    assert about["chat_templates"] == {}


def test_a_chat_template_without_a_place_is_lost_aloud(tmp_path):
    folder = source(tmp_path / "source", 2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    (folder / "tokenizer.json").unlink()
    import_model(folder, tmp_path / "m")
    _, notices = export_model(tmp_path / "m", tmp_path / "hf")
    assert "chat template is lost" in notices[0]


def test_an_activation_that_files_do_not_name_is_said(tmp_path):
    for name, word in {"gpt2": "gelu_new", "gpt-neox": "exact GELU", "llama": None, "gemma3": None}.items():
        file = to_gguf(FIXTURES / name / "source", tmp_path / f"{name}.gguf")
        notices = import_model(file, tmp_path / name)["notices"]
        assert [word in each for each in notices] == [True] * (word is not None)


@pytest.mark.parametrize("name", ["llama-linear", "llama-llama3", "qwen3", "gemma3", "gpt2", "gpt-neox"])
def test_an_error_names_keys_that_a_file_has(tmp_path, name):
    folder = FIXTURES / name / "source"
    fields = gguf.GGUFReader(to_gguf(folder, tmp_path / "whole.gguf")).fields
    arch = fields["general.architecture"].contents()
    names = {*ARCHITECTURES[arch].keys.values()} - ARCHITECTURES[arch].keys.keys()
    names |= {"rope_type", "original_max_position_embeddings", "config.json", "query_pre_attn_scalar", "folder"}
    for key in fields:
        if not key.startswith(f"{arch}."):
            continue
        for value in ("x", 2**40):
            file = to_gguf(folder, tmp_path / "m.gguf", **{key.replace(".", "__"): value})
            with pytest.raises(CheckpointError) as caught:
                import_model(file, tmp_path / "m")
            words = str(caught.value).replace(str(tmp_path), "").replace(f"{arch}.", " ").replace(",", " ").split()
            assert not names & {word.strip(":.") for word in words}, caught.value
