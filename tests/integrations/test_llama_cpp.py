"""Files that are imported and exported, in llama.cpp: `.venv/bin/pip install llama-cpp-python`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from converter import to_gguf
from torch import Tensor

from xlcli import config
from xlcli.interchange import export_model, import_model
from xlcli.model import stack
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


FIXTURES = Path(__file__).parents[1] / "interchange" / "fixtures"
PIECES = [chr(256 + i) for i in range(48)]
VOCABULARY = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "olmo",
    "tokenizer__ggml__tokens": [*PIECES[:-1], PIECES[0] + PIECES[1]],
    "tokenizer__ggml__merges": [f"{PIECES[0]} {PIECES[1]}"],
}
NO_PATTERN = ("attention.sliding_window_pattern", "rope.freq_base_swa")
IMPORTED = {
    "llama": ("llama", (), {}),
    "gpt2": ("gpt2", (), {}),
    "gpt-neox": ("gpt-neox", (), {}),
    "gpt-neox-linear": ("gpt-neox", (), {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
    "gpt-neox-whole": ("gpt-neox", ("rope.dimension_count",), {"rope__freq_base": 500.0}),
    "gpt-neox-sequential": ("gpt-neox", (), {"use_parallel_residual": False}),
    "gemma3": ("gemma3", (), {}),
    "gemma3-defaults": ("gemma3-hub", NO_PATTERN, {}),
    "gemma3-base": ("gemma3-hub", ("rope.freq_base",), {}),
    "gemma3-soft-cap": ("gemma3-hub", (), {"final_logit_softcapping": 3.0}),
    "gemma3-linear": ("gemma3-hub", (), {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}),
}


def gelu(x: Tensor) -> Tensor:
    """As llama.cpp computes it on a CPU: a table of all numbers in 16 bits."""
    in_table = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, in_table))


@pytest.mark.parametrize("case", IMPORTED)
@torch.inference_mode()
def test_log_probabilities_of_an_imported_file_are_those_of_llama_cpp(case, tmp_path, monkeypatch):
    for kind in ("gelu", "gelu-tanh", "geglu", "geglu-tanh"):
        monkeypatch.setitem(stack.ACTIVATIONS, kind, gelu)
    name, without, changed = IMPORTED[case]
    prefix = {"gpt-neox": "gptneox"}.get(name, name.removesuffix("-hub"))
    changed = {f"{prefix}__{key}": value for key, value in changed.items()}
    file = to_gguf(FIXTURES / name / "source", tmp_path / "m.gguf", without=without, **changed, **VOCABULARY)
    import_model(file, tmp_path / "m")
    model, ids = load(tmp_path / "m"), torch.randint(48, (60,), generator=torch.Generator().manual_seed(0))
    state = model.network.init_state(1, mem_len=model.config.train.mem_len, segment_len=64)
    ours = -model.network.score(ids[None, :-1], ids[None, 1:], state).nll[0]
    exact = {"type_k": 0, "type_v": 0, "flash_attn": False}  # keys and values in float32
    other = llama_cpp.Llama(model_path=str(file), n_ctx=64, logits_all=True, verbose=False, **exact)
    other.eval(ids.tolist())
    theirs = torch.from_numpy(other.scores[: len(ids) - 1]).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)  # where the table takes the next number
    assert (ours - theirs).abs().mean() < 5e-5


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
