"""What a training step and a generated token ask of a GPU, counted on the simulated device; and that device itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from device import DEVICE, IS_SIMULATED
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from variants import thinned

from xlcli import config
from xlcli.cli.loading import load_model
from xlcli.cli.render import Screen
from xlcli.config import GenerateConfig, RuntimeConfig, Sampling
from xlcli.config.tree import merge
from xlcli.inference import InferenceSession
from xlcli.presets import read_preset
from xlcli.runtime import Runtime, make_runtime
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store import folder as store
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults
from xlcli.training.run import TrainingRun

if not IS_SIMULATED:
    pytest.skip("counts on the simulated device", allow_module_level=True)

from tests.gpu.simulated import Place, counted

BOOKS = Path(__file__).parents[2] / "models" / "books"

# The device


def test_operators_of_two_devices_are_refused():
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="one device"):
        here + there
    with pytest.raises(RuntimeError, match="one device"):
        torch.stack((there, here))
    assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a single number may be on the CPU


def test_values_and_gradients_are_those_of_the_cpu():
    torch.manual_seed(0)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    gradients = []
    for device in ("cpu", DEVICE):
        weight = w.clone().to(device).requires_grad_()
        assert weight.device.type == torch.device(device).type
        F.rms_norm((x.to(device) @ weight).relu(), (4,), eps=1e-5).square().sum().backward()
        gradients.append(weight.grad.cpu())
    assert torch.equal(*gradients)


def test_work_is_counted():
    x = torch.ones(3, 4, device=DEVICE)
    with counted() as work:
        y = (x[0] + 1).view(2, 2)  # a view starts no kernel
        y.sum().item()
        y[y > 1].cpu()
        torch.ones(2).to(DEVICE, non_blocking=True)
        torch.ones(2).pin_memory().to(DEVICE, non_blocking=True)
    names = [name for name, _ in work.operators]
    assert names == ["add", "sum", "gt", "index", "copy to the host", "copy from the host", "copy of pinned memory"]
    assert [name for name, _ in work.waits] == ["_local_scalar_dense", "index", "copy to the host"]
    assert work.copies == [Place("elsewhere", 0, "")]  # not from pinned memory


def test_memory_that_was_pinned_is_not_when_another_tensor_has_it():
    for _ in range(99):
        torch.ones(2).pin_memory()  # whose memory is free now
        assert not torch.ones(2).is_pinned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_names_its_kernel(dtype):
    q = torch.ones(1, 2, 3, 8, device=DEVICE, dtype=dtype)
    k = torch.ones(1, 2, 5, 8, device=DEVICE, dtype=dtype)
    with counted() as work:
        plain = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(3, 5))
        mask = torch.ones(3, 5, dtype=torch.bool, device=DEVICE).tril(2)
        masked = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    assert torch.equal(plain.cpu(), masked.cpu())
    assert work.attention == ({"efficient": 2} if dtype == torch.float32 else {"flash": 1, "efficient": 1})


# Training

STEPS = {"small": 466, "medium": 785, "peer-12x512": 923}
"""Largest number of operators of a training step in bfloat16, with full memory."""
WAITS_OF_STEP = [("training/run.py", "train_step")]
"""Where a step waits for the device: for its loss and the norm of its gradient."""


def a_run(preset, **changes):
    tree = {"train": {"batch_size": 2, "segment_len": 8, "mem_len": 8, "max_steps": 9}, "model": {"vocab_size": 300}}
    tree["runtime"] = {"device": str(DEVICE), "dtype": "bfloat16"}
    settings = config.make(read_preset(preset), merge(tree, changes))
    settings = defaults.fill_in(settings, tokenizer="bytes", vocab_size=300, device=DEVICE)
    ids = (np.random.default_rng(0).random(4000) * 256).astype(np.uint16)
    return TrainingRun(settings, make_runtime(settings.runtime, training=True), TokenFile(ids, len(ids)), 10)


def work_of_step(run):
    """The work of the first step with full memory that is like those after it."""
    lengths = run.config.train
    for _ in range(1 + lengths.mem_len // lengths.segment_len):
        run.train_step(0.5)
    with counted() as work:
        run.train_step(0.5)
    return work


def places(found):
    """Files and functions of places."""
    return [(at.file, at.function) for at in found]


@pytest.mark.parametrize("preset", thinned(STEPS, ["medium"]))
def test_a_training_step_starts_few_operators(preset):
    train = read_preset(preset)["train"]
    work = work_of_step(a_run(preset, train={"mem_len": 8 * train["mem_len"] // train["segment_len"]}))
    assert len(work.operators) <= STEPS[preset]
    assert places(at for _, at in work.waits) == WAITS_OF_STEP
    assert not work.copies
    # A key of `peer-12x512` and its features of distance are too wide together for the flash kernel.
    assert work.attention.keys() == {"efficient" if preset == "peer-12x512" else "flash"}


LLAMA = {
    "attention": {"kind": "full", "n_heads": 4, "n_kv_heads": 2},
    "position": {"kind": "rope"},
    "feedforward": {"kind": "swiglu"},
}


@pytest.mark.parametrize(
    ("preset", "model", "mem_len"), [("tiny", LLAMA, 0), ("tiny", LLAMA, 8), ("small", {}, 8), ("base", {}, 8)]
)
def test_training_takes_the_flash_kernel(preset, model, mem_len):
    work = work_of_step(a_run(preset, model={"vocab_size": 300, "n_layers": 1, **model}, train={"mem_len": mem_len}))
    assert work.attention == {"flash": 1}


# Generation and evaluation

TOKEN, SAMPLING = 299, 15
"""Largest numbers of operators of a token of the bundled model, and of its choice."""
SEGMENTS = {torch.float32: 387, torch.bfloat16: 468}
"""Largest number of operators of a segment in evaluation, by number type."""
MEM_LEN = 64


@pytest.fixture(scope="module")
def books():
    return store.load(BOOKS, device=DEVICE)


def test_a_generated_token_starts_few_operators(books):
    runtime = Runtime(DEVICE, torch.float32, 1)
    session = InferenceSession.open(books, runtime, GenerateConfig(mem_len=MEM_LEN, max_new_tokens=9), None)
    session.read(np.arange(MEM_LEN + 8) % 200, lambda: False)
    rng = [SampleRNG(0)]
    session.append(sample_tokens(session.predict(), rng, Sampling()))
    with counted() as of_token:
        logits = session.predict()
    with counted() as of_sampling:
        session.append(sample_tokens(logits, rng, Sampling()))
    assert len(of_token.operators) <= TOKEN
    assert not of_token.waits
    assert places(of_token.copies) == [("inference.py", "predict")]  # the last token
    assert len(of_sampling.operators) <= SAMPLING
    assert places(at for _, at in of_sampling.waits) == [("sampling.py", "sample_tokens")] * 2
    assert places(of_sampling.copies) == [("sampling.py", "sample_tokens")]  # random numbers


@pytest.mark.parametrize("dtype", SEGMENTS)
def test_a_segment_in_evaluation_starts_few_operators(books, dtype):
    network, tokens = books.network, torch.arange(2 * MEM_LEN, device=DEVICE).view(2, MEM_LEN) % 200
    state = network.init_state(2, mem_len=MEM_LEN, segment_len=MEM_LEN)
    with torch.inference_mode(), Runtime(DEVICE, dtype, 1).autocast():
        with counted() as without_memory:
            state = network.score(tokens, tokens, state).state
        state = network.score(tokens, tokens, state).state
        with counted() as work:
            network.score(tokens, tokens, state)
    assert len(work.operators) <= SEGMENTS[dtype]
    assert not work.waits
    assert not work.copies
    # Of 16 bits, and while each query sees all earlier keys. The band of a full memory is a mask.
    assert without_memory.attention.keys() == {"flash" if dtype == torch.bfloat16 else "efficient"}
    assert work.attention.keys() == {"efficient"}


# The device that a command takes if it is not told


def taken_device(folder, config, capsys, **work):
    """Type of the device that a model is loaded on, and what is said."""
    _, runtime = load_model(folder, GenerateConfig(), RuntimeConfig(**config), Screen(), **work)
    return runtime.device.type, capsys.readouterr().err


def test_few_sequences_are_continued_on_the_cpu(capsys):
    device, said = taken_device(BOOKS, {}, capsys, n_sequences=1)
    assert device == "cpu"
    assert "--device cuda uses the GPU" in said


@pytest.mark.parametrize(
    ("config", "work"),
    [
        ({}, {}),
        ({}, {"n_sequences": 64}),
        ({"device": "cuda"}, {"n_sequences": 1}),
        ({"dtype": "bfloat16"}, {"n_sequences": 1}),
    ],
)
def test_other_work_is_done_on_the_gpu(config, work, capsys):
    assert taken_device(BOOKS, config, capsys, **work) == ("cuda", "")


# The script for a GPU


@pytest.mark.exhaustive
def test_every_figure_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from gpu_figures import measure_all

    measure_all(tmp_path, str(DEVICE), 5, small=True)
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    kinds = [figure["name"].partition("-")[0] for figure in figures]
    assert kinds == ["quantize", "profile", "profile", "train", "decode", "eval"]
    assert not [figure["error"] for figure in figures if "error" in figure]
    measure_all(tmp_path, str(DEVICE), 5, small=True)  # nothing again
    assert len((tmp_path / "figures.jsonl").read_text().splitlines()) == len(figures)
