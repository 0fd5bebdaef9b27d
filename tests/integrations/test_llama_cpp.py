"""Files that `xlcli export --format gguf` writes, in llama.cpp: `.venv/bin/pip install llama-cpp-python`."""

import numpy as np
import pytest
import torch

from xlcli import config
from xlcli.interchange import export_model
from xlcli.model.build import build_model
from xlcli.store.folder import load, save_model
from xlcli.text.tokenizers import TOKENIZERS

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = b"the cat sat on the mat\nthe dog sat\ton the log\nand the fox, 12 of them, ran\n" * 40
SHAPES = {
    "llama": {},
    "biases": {"attention": {"bias": "all"}, "bias": True},
    "untied": {"embedding": {"tied": False}},
    "qwen2": {"attention": {"bias": "qkv"}},
    "qwen3": {"attention": {"qk_norm": True}},
    "linear": {"position": {"base": 500.0, "scaling": {"kind": "linear", "factor": 2.0}}},
    "llama3": {"position": {"scaling": {"kind": "llama3", "factor": 8.0, "original_len": 16}}},
}
LLAMA = {
    "dim": 64,
    "n_layers": 2,
    "attention": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16},
    "position": {"kind": "rope"},
    "feedforward": {"ffn_dim": 96},
}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_tokens_logits_and_greedy_tokens_are_those_of_xlcli(kind, name, tmp_path):
    tokenizer = TOKENIZERS[kind].train([TEXT], None if kind == "bytes" else 330)
    tree = {"model": LLAMA | {"vocab_size": tokenizer.vocab_size}, "train": {"mem_len": 256, "segment_len": 64}}
    made = config.make(tree, {"model": SHAPES[name]})
    torch.manual_seed(0)
    weights = build_model(made.model).state_dict()
    weights = {key: value.normal_(0, 0.2) if key != "head.bias" else value for key, value in weights.items()}
    save_model(tmp_path / "m", made, weights, tokenizer, {})
    export_model(tmp_path / "m", tmp_path / "m.gguf", name="gguf")
    other = llama_cpp.Llama(model_path=str(tmp_path / "m.gguf"), n_ctx=256, logits_all=True, verbose=False)

    for sample in (TEXT[:90], "cät\n\n  the 漢字\t.".encode(), b"x"):
        assert other.tokenize(sample, add_bos=False, special=False) == tokenizer.encode(sample).tolist()
        assert other.detokenize(tokenizer.encode(sample).tolist()) == sample
    ids = other.tokenize(TEXT[:40], add_bos=True, special=False)
    assert ids == [tokenizer.start_id, *tokenizer.encode(TEXT[:40]).tolist()]

    model = load(tmp_path / "m").network
    for _ in range(24):
        logits, _ = model.logits(torch.tensor([ids]), model.init_state(1, mem_len=256, segment_len=64))
        other.reset()
        other.eval(ids)
        theirs = other.scores[len(ids) - 1]
        np.testing.assert_allclose(theirs, logits[0].numpy(), rtol=0, atol=2e-3)  # keys are in 16 bits there
        assert theirs.argmax() == logits.argmax()
        ids.append(int(logits.argmax()))
