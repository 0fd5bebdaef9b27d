"""Make the fixtures of models that other programs wrote, with the numbers that those programs compute.

    PYTHON tests/interchange/make_fixtures.py [--original FOLDER] [--check FOLDER] [NAME ...]

Each folder `fixtures/NAME` has `source/`, a tiny random model as the program saves it, and `expected.safetensors`:

    tokens                 int64 (2, T + 1)
    segments               int64 (n,), lengths of the calls that read the T tokens, each with the memory of those before
    log_probs.float32      float32 (2, T), log p(tokens[:, t + 1] | tokens[:, : t + 1])
    log_probs.float64      float64 (2, T), the same weights in double precision
    prompt, greedy         int64 (P,), (50,), the likeliest tokens after the prompt, read in one call, then one by one
    long.tokens            int64 (1, U + 1), with long.log_probs.float32 and .float64 (1, U): a text longer than the
                           learned positions in windows that begin every half window
    text, text.ids         uint8 (n,), int64 (m,): UTF-8 text and its tokens (fixtures with a tokenizer)
    text.log_probs.float64 float64 (m,): log p of these tokens, the first after bos_token_id or else eos_token_id
                           (all but Transformer-XL)

No environment can run all three sources; each makes its own part, on one CPU:

    transformers==4.35.2   Transformer-XL, and Llama, GPT-2, GPT-Neo, GPT-J, GPT-NeoX, OPT and BLOOM as older releases
                           save them (with "tokenizers<0.19" "huggingface_hub<1" sacremoses)
    transformers>=5.23     GPT-2, GPT-Neo, GPT-J, GPT-NeoX, Llama, Mistral, Qwen2, Qwen3, OLMo, Gemma 3, OPT, BLOOM
    --original FOLDER      a clone of github.com/kimiyoung/transformer-xl, model.pt of its PyTorch code

With `--check FOLDER` nothing is made: the folder, which has `config.json` and weights, is loaded by transformers and
its log probabilities are compared with the expected ones of fixture NAME (for a model that was imported and exported).

Float64 references are real ones. Both libraries round to float32 inside a double model (angles of rotary positions,
RMSNorm, masked scores, softmax); `double_precision` turns every such conversion into one to float64 and fails where a
float32 tensor is computed all the same.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB = 48
POSITIONS = 64
GREEDY = 50
MARGIN = 2e-3
"""Least difference of log probability between a greedy token and the next: far above rounding."""

VARIETY = 6
"""Number of different tokens in a greedy continuation that is sought: tiny random models like to repeat themselves."""

LESS_PRECISE = (torch.float32, torch.bfloat16, torch.float16)

Read = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""(tokens (batch, n), memory or None) -> (log probabilities (batch, n, vocab), memory)."""


class _NoFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor) and value.dtype in LESS_PRECISE:
                raise AssertionError(f"{func} computes {value.dtype} in a reference of double precision")
        return out


@contextlib.contextmanager
def double_precision(*, strict: bool) -> Iterator[None]:
    """Make torch compute in float64 where a model asks for float32.

    Args:
        strict: Fail where a tensor of less precision is computed.
    """
    to, softmax, arange = Tensor.to, nn.functional.softmax, torch.arange

    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def wide_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *map(widened, args), **{key: widened(value) for key, value in kwargs.items()})

    def wide_softmax(*args: Any, **kwargs: Any) -> Tensor:
        return softmax(*args, **{key: widened(value) for key, value in kwargs.items()})

    def wide_arange(*args: Any, **kwargs: Any) -> Tensor:
        return arange(*args, **{key: widened(value) for key, value in kwargs.items()})

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        stack.enter_context(mock.patch.object(Tensor, "to", wide_to))
        stack.enter_context(mock.patch.object(nn.functional, "softmax", wide_softmax))
        stack.enter_context(mock.patch.object(torch, "arange", wide_arange))
        stack.enter_context(mock.patch.object(torch, "float32", torch.float64))
        stack.enter_context(mock.patch.object(torch, "float", torch.float64))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        if strict:
            stack.enter_context(_NoFloat32())
        yield


def randomize(model: nn.Module, *, scale: float = 1.0, gain: float = 1.0) -> None:
    """Give all parameters values that show in the result: norms are constant in a new model, biases too."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.ndim == 1 and ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                parameter.copy_(gain + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(0.3 * scale * noise)


def score(read: Read, tokens: Tensor, segments: Sequence[int]) -> Tensor:
    """Return log probabilities (batch, T) of the tokens after the first, read in segments."""
    memory, start, rows = None, 0, []
    for length in segments:
        log_probs, memory = read(tokens[:, start : start + length], memory)
        rows.append(log_probs.gather(2, tokens[:, start + 1 : start + length + 1, None])[:, :, 0])
        start += length
    return torch.cat(rows, dim=1)


def continue_greedily(read: Read, prompt: Tensor) -> Tensor:
    """Return the `GREEDY` likeliest tokens after a prompt (n,)."""
    log_probs, memory = read(prompt[None], None)
    chosen = []
    while True:
        best = log_probs[0, -1].topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            raise AssertionError(f"two tokens are about as likely: {best}")
        chosen.append(int(best.indices[0]))
        if len(chosen) == GREEDY:
            return torch.tensor(chosen)
        log_probs, memory = read(torch.tensor([[chosen[-1]]]), memory)


def expected(
    single: Read, double: Read, segments: Sequence[int], *, vocab: int = VOCAB, greedy: bool = True, strict: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of `expected.safetensors` from readers in float32 and in float64."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab, (2, sum(segments) + 1), generator=generator)
    out = {"tokens": tokens, "segments": torch.tensor(segments)}
    with torch.no_grad():
        out["log_probs.float32"] = score(single, tokens, segments)
        with double_precision(strict=strict):
            out["log_probs.float64"] = score(double, tokens, segments)
        difference = (out["log_probs.float32"].double() - out["log_probs.float64"]).abs().max()
        print(f"  float32 against float64: {difference:.1e}", end="")
        if not difference < 4e-6:
            raise AssertionError("the references differ")
        if greedy:
            most = 0
            for _ in range(30):
                prompt = torch.randint(vocab, (6,), generator=generator)
                with contextlib.suppress(AssertionError):
                    greedy_tokens = continue_greedily(single, prompt)
                    if (n_different := len(greedy_tokens.unique())) > most:
                        out["greedy"], out["prompt"], most = greedy_tokens, prompt, n_different
                if most >= VARIETY:
                    break
            print(f", {most} different greedy tokens", end="")
            assert "greedy" in out, "no prompt has a clear continuation"
    print()
    return out


def save_expected(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write `expected.safetensors` of a fixture."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "expected.safetensors")


# Hugging Face


def reader(model: Any) -> Read:
    """Return how a model of transformers is read, with its memory or its cache of keys and values."""

    def read(tokens: Tensor, memory: Any) -> tuple[Tensor, Any]:
        if model.config.model_type == "transfo-xl":
            out = model(tokens, mems=memory, return_dict=True)
            return out.prediction_scores, out.mems
        out = model(tokens, past_key_values=memory, use_cache=True)
        return out.logits.log_softmax(-1), out.past_key_values

    return read


def load_models(source: Path) -> tuple[Any, Any]:
    """Load a folder in float32 and, with the same weights, in float64."""
    import transformers

    model_class = getattr(transformers, json.loads((source / "config.json").read_text())["architectures"][0])
    single = model_class.from_pretrained(source, torch_dtype=torch.float32).eval()
    config = type(single.config).from_pretrained(source)
    with double_precision(strict=False):
        config.torch_dtype = torch.float64
        double = model_class(config).double().eval()
    weights = {key: value.double() for key, value in single.state_dict().items() if "inv_freq" not in key}
    for module in double.modules():
        if type(module).__name__ == "BloomGelu":  # it has the eight digits of float32 of sqrt(2/pi)
            module.forward = functools.partial(nn.functional.gelu, approximate="tanh")
    missing, unexpected = double.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all("inv_freq" in name for name in missing), missing
    return single, double


def in_windows(model: Any, tokens: Tensor) -> Tensor:
    """Return log probabilities (1, U) of a long text, in windows that begin every half of the positions."""
    window = model.config.max_position_embeddings
    rows: list[Tensor] = []
    n_inputs, done = tokens.shape[1] - 1, 0
    for start in range(0, n_inputs, window // 2):
        end = min(start + window, n_inputs)
        if end > done:
            log_probs = model(tokens[:, start:end]).logits.log_softmax(-1)
            picked = log_probs.gather(2, tokens[:, start + 1 : end + 1, None])[:, :, 0]
            rows.append(picked[:, done - start :])
            done = end
    return torch.cat(rows, dim=1)


def write_hugging_face(name: str, model: Any, case: dict[str, Any]) -> None:
    """Write a fixture of a new model of transformers."""
    from transformers import __version__

    folder = FIXTURES / name
    source = folder / "source"
    shutil.rmtree(folder, ignore_errors=True)
    randomize(model, scale=case.get("scale", 1.0), gain=0.0 if name.startswith("gemma3") else 1.0)
    model.eval()
    if case.get("dtype"):
        model = model.to(case["dtype"])
    if case.get("bin"):
        source.mkdir(parents=True)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(source)
        legacy = case["bin"] == "legacy"
        torch.save(model.state_dict(), source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    else:
        model.save_pretrained(source, max_shard_size=case.get("shard", "1GB"))
    (source / "generation_config.json").unlink(missing_ok=True)
    if "config" in case:
        config = json.loads((source / "config.json").read_text())
        case["config"](config)
        (source / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if "tokenizer" in case:
        case["tokenizer"](source)
    print(f"{name} (transformers {__version__})")
    single, double = load_models(source)
    tensors = expected(reader(single), reader(double), case.get("segments", [8] * 5), vocab=case.get("vocab", VOCAB))
    if case.get("long"):
        tokens = torch.randint(
            VOCAB, (1, 3 * model.config.max_position_embeddings + 8), generator=torch.Generator().manual_seed(5)
        )
        tensors["long.tokens"] = tokens
        with torch.no_grad():
            tensors["long.log_probs.float32"] = in_windows(single, tokens)
            with double_precision(strict=True):
                tensors["long.log_probs.float64"] = in_windows(double, tokens)
    if "text" in case:
        tensors.update(case["text"](source))
    save_expected(folder, tensors)


def transfo_xl_cases() -> dict[str, dict[str, Any]]:
    """Return the cases of Transformer-XL."""
    cut = {"cutoffs": [12, 30]}
    soft: dict[str, Any] = {"cutoffs": [], "div_val": 1, "adaptive": False}
    return {
        "transfo-xl-softmax": {"settings": {**soft, "clamp_len": 5}},
        "transfo-xl-growing": {"settings": {**soft, "same_length": False}},
        "transfo-xl-growing-clamped": {"settings": {**soft, "same_length": False, "clamp_len": 10}, "bin": "zip"},
        "transfo-xl-narrow": {"settings": {**soft, "d_embed": 12}},
        "transfo-xl-narrow-tied": {"settings": {**soft, "d_embed": 12, "tie_projs": [True]}},
        "transfo-xl-div1": {"settings": {**cut, "div_val": 1}},
        "transfo-xl-div1-narrow": {"settings": {**cut, "div_val": 1, "d_embed": 12}},
        "transfo-xl-div1-narrow-all": {"settings": {**cut, "div_val": 1, "d_embed": 12, "tie_projs": [True] * 3}},
        "transfo-xl-div4": {
            "settings": {**cut, "div_val": 4, "clamp_len": 6, "n_layer": 3},
            "tokenizer": write_vocabulary,
            "text": read_vocabulary,
        },
        "transfo-xl-div4-all": {"settings": {**cut, "div_val": 4, "d_embed": 32, "tie_projs": [True] * 3}},
        "transfo-xl-div2-none": {"settings": {**cut, "div_val": 2, "proj_share_all_but_first": False}},
        "transfo-xl-untied": {"settings": {**soft, "tie_word_embeddings": False}},
        "transfo-xl-div4-untied": {
            "settings": {**cut, "div_val": 4, "tie_word_embeddings": False, "proj_share_all_but_first": False}
        },
        "transfo-xl-shared-biases": {"settings": {**cut, "div_val": 4, "untie_r": False}, "bin": "legacy"},
        "transfo-xl-pre-norm": {"settings": {**cut, "div_val": 4, "pre_lnorm": True}, "scale": 0.5},
        "transfo-xl-pre-norm-growing": {
            "settings": {**soft, "pre_lnorm": True, "same_length": False, "clamp_len": 7},
            "scale": 0.5,
        },
        "transfo-xl-long-segments": {
            "settings": {**cut, "div_val": 4, "layer_norm_epsilon": 1e-3},
            "segments": [10, 11, 12, 3, 9],
        },
    }


WORDS = [f"w{i}" for i in range(VOCAB)]
WORDS[3:16] = ["the", "old", "ship", "fell", "on", "a", "rock", ".", "<unk>", "=", "it", "rose", "again"]
WORDS[16:21] = ["<eos>", "Sea", "THE", "naïve", "@-@"]
"""Vocabulary of Transformer-XL: <unk> and <eos> may be anywhere in it."""


def write_vocabulary(source: Path) -> None:
    """Write the pickled vocabulary of `TransfoXLTokenizer`."""
    from transformers import TransfoXLTokenizer

    assert len(WORDS) == VOCAB, len(WORDS)
    words = source / "words.txt"
    words.write_text("\n".join(WORDS) + "\n")
    tokenizer = TransfoXLTokenizer(vocab_file=str(words), additional_special_tokens=[])
    tokenizer.vocab_file = None
    tokenizer.save_pretrained(source)
    words.unlink()


def read_vocabulary(source: Path) -> dict[str, Tensor]:
    """Return a text and its tokens, split at white space, every line with <eos>, as the original code reads it."""
    text = "the old ship fell on a rock .\n\n= naïve Sea @-@ THE unheard word w7 =\nit rose again\n"
    index = {word: i for i, word in enumerate(WORDS)}
    ids = [index.get(word, index["<unk>"]) for line in text.splitlines() for word in [*line.split(), "<eos>"]]
    return {"text": torch.tensor(list(text.encode()), dtype=torch.uint8), "text.ids": torch.tensor(ids)}


TEXT = "The old ship. \nShe'll sail at 1234 o'clock.\n\nNaïve 🚀?\r\n"


def copy_tokenizer(name: str) -> Callable[[Path], None]:
    """Return what copies a tokenizer that `make_tokenizers.py` made into a source."""

    def copy(source: Path) -> None:
        shutil.copy(FIXTURES.parent / "tokenizers" / name / "tokenizer.json", source)

    return copy


def score_text(source: Path) -> dict[str, Tensor]:
    """Return a text, its tokens as the library gives them, and their log probabilities after the token of a beginning.

    It is bos_token_id, or else eos_token_id.
    """
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    _, double = load_models(source)
    first = double.config.eos_token_id if double.config.bos_token_id is None else double.config.bos_token_id
    tokens = torch.tensor([[first, *ids]])
    with torch.no_grad(), double_precision(strict=True):
        log_probs = score(reader(double), tokens, [len(ids)])[0]
    text = torch.tensor(list(TEXT.encode()), dtype=torch.uint8)
    return {"text": text, "text.ids": tokens[0, 1:], "text.log_probs.float64": log_probs}


def older_cases() -> dict[str, dict[str, Any]]:
    """Return the cases of models that an older release of transformers saves with other names of settings."""
    return {
        "llama-older": {
            "settings": {"rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": 4},
            "bin": "zip",
            "scale": 0.8,
        },
        "gpt2-older": {"settings": {}, "bin": "legacy"},
        "gpt-neo-older": {"settings": {"attention_types": [[["global", "local"], 1]]}, "bin": "zip"},
        "gptj-older": {"settings": {"rotary_dim": 2}, "bin": "legacy"},
        "gpt-neox-older": {"settings": {"rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}},
        "opt-older": {"settings": {"do_layer_norm_before": False, "word_embed_proj_dim": 10}, "bin": "legacy"},
        "bloom-older": {"settings": {"n_head": 6}, "bin": "zip"},
    }


def current_cases() -> dict[str, dict[str, Any]]:
    """Return the cases of a current release of transformers."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    }

    def hub_keys(config: dict[str, Any]) -> None:
        """Name settings as the files of 2023 to 2025 on the hub do."""
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        parameters.pop("partial_rotary_factor", None)
        config["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
        config["torch_dtype"] = config.pop("dtype")
        config.pop("layer_types", None)
        config["transformers_version"] = "4.40.1"

    part = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

    def neox_keys(config: dict[str, Any]) -> None:
        """Name settings as the files of Pythia do."""
        hub_keys(config)
        config["rotary_emb_base"] = config.pop("rope_theta")
        config["rotary_pct"] = 0.5 if config["hidden_act"] == "gelu_fast" else 0.25

    def smollm_keys(config: dict[str, Any]) -> None:
        hub_keys(config)
        config.update(is_llama_config=True, rope_interleaved=False)

    def gemma_keys(config: dict[str, Any]) -> None:
        """Name settings as the published files of 2025 do."""
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        config["rope_scaling"] = None
        config["torch_dtype"] = config.pop("dtype")
        config.pop("layer_types", None)
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern", 6)
        config["cache_implementation"] = "hybrid"

    return {
        "gpt2": {"settings": {}, "long": True},
        "gpt2-gelu": {
            "settings": {
                "activation_function": "gelu",
                "tie_word_embeddings": False,
                "n_inner": 24,
                "layer_norm_epsilon": 1e-3,
            },
            "shard": "20KB",
        },
        "llama": {"settings": {"num_key_value_heads": 2}},
        "llama-biases": {
            "settings": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 6}
        },
        "llama-linear": {"settings": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}},
        "llama-llama3": {"settings": {"rope_parameters": llama3, "head_dim": 16, "tie_word_embeddings": True}},
        "llama-llama3-hub": {
            "settings": {"rope_parameters": llama3, "head_dim": 16},
            "config": hub_keys,
            "dtype": torch.bfloat16,
            "shard": "12KB",
        },
        "llama-smollm": {
            "settings": {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
            "config": smollm_keys,
            "dtype": torch.bfloat16,
        },
        "llama-text": {
            "settings": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1},
            "vocab": 320,
            "config": hub_keys,
            "dtype": torch.bfloat16,
            "tokenizer": copy_tokenizer("llama3"),
            "text": score_text,
        },
        "mistral-text": {
            "settings": {"tie_word_embeddings": True, "sliding_window": None},
            "vocab": 370,
            "dtype": torch.bfloat16,
            "tokenizer": copy_tokenizer("llama2"),
            "text": score_text,
        },
        "gpt2-text": {
            "settings": {"bos_token_id": 0, "eos_token_id": 0},
            "vocab": 316,
            "dtype": torch.float16,
            "tokenizer": copy_tokenizer("gpt2"),
            "text": score_text,
        },
        "gpt2-cerebras": {"settings": {"activation_function": "gelu", "n_inner": 64, "n_embd": 24}, "long": True},
        "gpt2-mgpt": {"settings": {"n_layer": 3, "n_head": 1, "n_ctx": 64}, "dtype": torch.bfloat16},
        "gpt-neo": {"settings": {"attention_types": [[["global", "local"], 1]]}, "long": True},
        "gpt-neo-local": {
            "settings": {
                "num_layers": 3,
                "attention_types": [[["local"], 1], [["global"], 2]],
                "window_size": 2,
                "intermediate_size": 24,
            },
            "dtype": torch.float16,
        },
        "gpt-neo-text": {
            "settings": {"attention_types": [[["global", "local"], 1]], "bos_token_id": 0, "eos_token_id": 0},
            "vocab": 316,
            "dtype": torch.float16,
            "tokenizer": copy_tokenizer("gpt2"),
            "text": score_text,
        },
        "gptj": {"settings": {"rotary_dim": 4}},
        "gptj-tied": {
            "settings": {"rotary_dim": 8, "tie_word_embeddings": True, "n_inner": 24},
            "dtype": torch.float16,
        },
        "gptj-text": {
            "settings": {"bos_token_id": 0, "eos_token_id": 0, "rotary_dim": 2},
            "vocab": 316,
            "dtype": torch.float16,
            "tokenizer": copy_tokenizer("gpt2"),
            "text": score_text,
        },
        "gpt-neox": {"settings": {"rope_parameters": {**part, "partial_rotary_factor": 0.25}}},
        "gpt-neox-sequential": {
            "settings": {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": {**part}},
            "shard": "12KB",
        },
        "gpt-neox-pythia": {
            "settings": {"hidden_act": "gelu_fast", "rope_parameters": {**part, "rope_theta": 100.0}},
            "config": neox_keys,
            "dtype": torch.float16,
        },
        "gpt-neox-text": {
            "settings": {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True},
            "vocab": 330,
            "config": neox_keys,
            "dtype": torch.float16,
            "tokenizer": copy_tokenizer("gpt_neox"),
            "text": score_text,
        },
        "olmo": {"settings": {"num_key_value_heads": 4}},
        "olmo-biases": {"settings": {"attention_bias": True, "num_key_value_heads": 2, "tie_word_embeddings": True}},
        "olmo-text": {
            "settings": {"tie_word_embeddings": True, "eos_token_id": 0, "bos_token_id": None},
            "vocab": 330,
            "config": hub_keys,
            "tokenizer": copy_tokenizer("gpt_neox"),
            "text": score_text,
        },
        "mistral-sliding": {"settings": {"sliding_window": 9, "num_hidden_layers": 3}},
        "mistral": {"settings": {"sliding_window": None, "head_dim": 6}, "config": hub_keys},
        "qwen2": {"settings": {"tie_word_embeddings": True, "num_key_value_heads": 2}},
        "qwen2-sliding": {
            "settings": {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 1,
                "num_hidden_layers": 3,
                "rms_norm_eps": 1e-3,
            }
        },
        "qwen3": {"settings": {"head_dim": 6, "tie_word_embeddings": True}, "config": hub_keys},
        "qwen3-biases": {"settings": {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}},
        "opt": {"settings": {}, "long": True, "dtype": torch.float16},
        "opt-350m": {"settings": {"do_layer_norm_before": False, "word_embed_proj_dim": 10}, "shard": "20KB"},
        "opt-narrow": {
            "settings": {"word_embed_proj_dim": 24, "_remove_final_layer_norm": True, "tie_word_embeddings": False},
            "scale": 0.6,
        },
        "opt-galactica": {
            "settings": {
                "enable_bias": False,
                "layer_norm_elementwise_affine": False,
                "activation_function": "gelu",
                "bos_token_id": 0,
            },
        },
        "gemma3": {"settings": {}, "dtype": torch.bfloat16},
        "gemma3-linear": {
            "settings": {
                "layer_types": ["full_attention", "sliding_attention"],
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "query_pre_attn_scalar": 32,
                "attention_bias": True,
                "final_logit_softcapping": 8.0,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
                "rms_norm_eps": 1e-5,
            },
            "dtype": torch.bfloat16,
            "shard": "12KB",
        },
        "gemma3-hub": {
            "settings": {"num_hidden_layers": 7, "sliding_window_pattern": 6},
            "config": gemma_keys,
            "dtype": torch.bfloat16,
        },
        "gemma3-text": {
            "settings": {"bos_token_id": 2, "eos_token_id": 1},
            "vocab": 376,
            "dtype": torch.bfloat16,
            "tokenizer": copy_tokenizer("gemma"),
            "text": score_text,
        },
        "bloom": {"settings": {"tie_word_embeddings": False}},
        "bloom-heads": {"settings": {"hidden_size": 24, "n_head": 6}, "dtype": torch.bfloat16},
        "bloom-text": {
            "settings": {"bos_token_id": 2},
            "vocab": 320,
            "dtype": torch.bfloat16,
            "tokenizer": copy_tokenizer("bloom"),
            "text": score_text,
        },
    }


FAMILIES = {
    **{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo": "Olmo"},
    **{"gpt2": "GPT2", "gptj": "GPTJ", "gpt-neox": "GPTNeoX", "gpt-neo": "GPTNeo"},
    **{"opt": "OPT", "gemma3": "Gemma3", "bloom": "Bloom"},
}
"""Beginning of the name of a fixture to the names of classes of transformers."""
_GPT2 = {"n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": 2}
_ENDS = {"bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1}
_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {**_GPT2, **_ENDS},
    "GPTJ": {**_GPT2, **_ENDS},
    "GPTNeo": {
        "max_position_embeddings": POSITIONS,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "window_size": 5,
        **_ENDS,
    },
    "GPTNeoX": {**_NEOX, "num_attention_heads": 2, "hidden_act": "gelu"},
    "Llama": _LLAMA,
    "OPT": {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
    },
    "Gemma3": {
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "max_position_embeddings": POSITIONS,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "Bloom": {"hidden_size": 18, "n_layer": 2, "n_head": 3},
}
"""Settings of small models of a family; those of Llama for the others."""


def make_hugging_face(names: Sequence[str]) -> None:
    """Make what the installed transformers can make."""
    import transformers

    older = transformers.__version__ == "4.35.2"
    cases = {**transfo_xl_cases(), **older_cases()} if older else current_cases()
    for name in names or cases:
        if name not in cases:
            continue
        case = cases[name]
        torch.manual_seed(0)
        if name.startswith("transfo-xl"):
            sizes = {"d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 6, "d_inner": 24, "n_layer": 2, "mem_len": 8}
            defaults = {"same_length": True, "clamp_len": -1, "untie_r": True, "eos_token_id": 0}
            settings = {"vocab_size": VOCAB, **sizes, **defaults, **case["settings"]}
            model: Any = transformers.TransfoXLLMHeadModel(transformers.TransfoXLConfig(**settings))
        else:
            family = next(family for start, family in FAMILIES.items() if name.startswith(start))
            settings = {"vocab_size": case.get("vocab", VOCAB), **SIZES.get(family, SIZES["Llama"]), **case["settings"]}
            kind = "Gemma3Text" if family == "Gemma3" else family
            config = getattr(transformers, f"{kind}Config")(**settings)
            model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
        write_hugging_face(name, model, case)


def check(folder: Path, name: str) -> None:
    """Compare the log probabilities that transformers gives for a folder with those of a fixture."""
    want = load_file(FIXTURES / name / "expected.safetensors")
    single, double = load_models(folder)
    with torch.no_grad():
        errors = [score(reader(single), want["tokens"], want["segments"].tolist()) - want["log_probs.float32"]]
        with double_precision(strict=True):
            errors.append(score(reader(double), want["tokens"], want["segments"].tolist()) - want["log_probs.float64"])
    print(f"{name}: {errors[0].abs().max():.1e} in float32, {errors[1].abs().max():.1e} in float64")


# The original repository


def load_original(folder: Path) -> types.ModuleType:
    """Load the PyTorch code of a clone, changed to run: masks are bool, and no version of CUDA is read."""
    for name, path in [
        ("log_uniform_sampler", "utils/log_uniform_sampler.py"),
        ("proj_adaptive_softmax", "utils/proj_adaptive_softmax.py"),
        ("mem_transformer", "mem_transformer.py"),
    ]:
        text = (folder / "pytorch" / path).read_text().replace(".byte()", ".bool()")
        text = text.replace("torch.version.cuda", "'0.0'")
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
        sys.modules[name] = module
        exec(compile(text, path, "exec"), module.__dict__)
    return sys.modules["mem_transformer"]


def original_reader(model: Any) -> Read:
    """Return how a model of the original code is read; each log probability is the loss of a word."""

    def read(tokens: Tensor, memory: Any) -> tuple[Tensor, Any]:
        memory = model.init_mems() if memory is None else [state.clone() for state in memory]
        hidden, memory = model._forward(tokens.t().contiguous(), mems=memory)
        n, batch, dim = hidden.shape
        words = torch.arange(model.n_token).repeat(n * batch)
        losses = model.crit(hidden.reshape(-1, 1, dim).expand(-1, model.n_token, -1).reshape(-1, dim), words, True)
        return -losses.view(n, batch, model.n_token).transpose(0, 1), memory

    return read


def without_source(model: nn.Module, *, old: bool) -> None:
    """Give the modules of the original code classes of the same names without a line of it.

    Args:
        model: Changed in place.
        old: Give all modules the attributes of PyTorch 1.0 too, which files of the time hold.
    """
    modules = list(model.modules())
    stubs: dict[str, types.ModuleType] = {}
    for module in modules:
        kind = type(module)
        if kind.__module__ in ("mem_transformer", "proj_adaptive_softmax"):
            stub = stubs.setdefault(kind.__module__, types.ModuleType(kind.__module__))
            if not hasattr(stub, kind.__name__):
                setattr(stub, kind.__name__, type(kind.__name__, (nn.Module,), {"__module__": kind.__module__}))
            module.__class__ = getattr(stub, kind.__name__)
        if old:
            attributes = module.__dict__
            if isinstance(module, nn.ParameterList):
                size = attributes.pop("_size")
                entries = [(str(i), getattr(module, str(i))) for i in range(size)]
                for name, _ in entries:
                    attributes.pop(name, None)
                attributes["_parameters"] = OrderedDict(entries)
            kept = {"training", "_parameters", "_buffers", "_modules"}
            hooks = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
            for name in [name for name in attributes if name.startswith("_") and name not in kept]:
                del attributes[name]
            attributes["_backend"] = _Backend()
            attributes.update({name: OrderedDict() for name in hooks})
            for name in ("_parameters", "_buffers", "_modules"):
                attributes[name] = OrderedDict(attributes[name])
    sys.modules.update(stubs)


class _Backend:
    def __reduce__(self) -> Any:
        return _get_thnn_function_backend, ()


def _get_thnn_function_backend() -> _Backend:
    return _Backend()


_get_thnn_function_backend.__module__ = "torch.nn.backends.thnn"
_get_thnn_function_backend.__qualname__ = "_get_thnn_function_backend"


def original_cases() -> dict[str, dict[str, Any]]:
    """Return the cases of the original code."""
    cut: dict[str, Any] = {"cutoffs": [12, 30], "tie_projs": [False, True, True]}
    return {
        "original-div4": {"settings": {**cut, "div_val": 4, "same_length": True, "clamp_len": 5}},
        "original-div1-narrow": {"settings": {**cut, "div_val": 1, "d_embed": 12}, "legacy": True, "scale": 0.7},
        "original-softmax": {"settings": {"same_length": True}, "legacy": True},
        "original-untied": {"settings": {"tie_weight": False, "cutoffs": [12, 30], "div_val": 2, "tie_projs": []}},
        "original-pre-norm": {"settings": {**cut, "div_val": 4, "pre_lnorm": True}, "legacy": True, "scale": 0.5},
        "original-long-segments": {"settings": {**cut, "div_val": 4, "tgt_len": 12}, "segments": [10, 11, 12, 3, 9]},
    }


def make_original(clone: Path, names: Sequence[str]) -> None:
    """Make the fixtures of the original code."""
    for name, case in original_cases().items():
        if names and name not in names:
            continue
        code = load_original(clone)
        sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_head": 6, "d_inner": 24, "dropout": 0.1, "dropatt": 0.0}
        lengths = {"tgt_len": 8, "ext_len": 0, "mem_len": 8}
        settings = {"n_token": VOCAB, **sizes, **lengths, **case["settings"]}
        single = code.MemTransformerLM(**settings).eval()
        randomize(single, scale=case.get("scale", 1.0))
        with double_precision(strict=False):
            double = code.MemTransformerLM(**settings).double().eval()
            inv_freq = double.pos_emb.inv_freq.clone() if hasattr(double, "pos_emb") else None
        double.load_state_dict(single.state_dict())
        if inv_freq is not None:
            double.pos_emb.inv_freq = inv_freq
        print(f"{name} (original code)")
        readers = original_reader(single), original_reader(double)
        tensors = expected(*readers, case.get("segments", [8] * 5), greedy=case.get("greedy", True))
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "source").mkdir(parents=True)
        legacy = case.get("legacy", False)
        without_source(single, old=legacy)
        backends = types.ModuleType("torch.nn.backends.thnn")
        backends._get_thnn_function_backend = _get_thnn_function_backend  # type: ignore[attr-defined]
        with (
            mock.patch.dict(sys.modules, {"torch.nn.backends.thnn": backends}),
            mock.patch("torch.serialization.get_source_lines_and_file", lambda kind: (["\n"], 0, kind.__module__)),
        ):
            torch.save(single, folder / "source" / "model.pt", _use_new_zipfile_serialization=not legacy)
        save_expected(folder, tensors)


def main() -> None:
    """Make the fixtures that the arguments and the environment say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make (default: all that can be made)")
    parser.add_argument("--original", type=Path, metavar="FOLDER", help="clone of the original repository")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="compare this folder with fixture NAME")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    if arguments.check:
        check(arguments.check, arguments.names[0])
    elif arguments.original:
        make_original(arguments.original, arguments.names)
    else:
        make_hugging_face(arguments.names)


if __name__ == "__main__":
    main()
