"""Every variant of the registries on a CUDA device agrees with the CPU: float64, float32, 16 bits, saved states."""

import pytest
import torch
from device import DEVICE, cross_section, marks
from variants import COMBINATIONS, IN_TURN, ROUNDED, has_gaps, make, read, tokens

from xlcli.files.tensors import read_tensors, write_tensors
from xlcli.runtime import Runtime
from xlcli.state import State

pytestmark = marks
every = pytest.mark.parametrize("name", cross_section([*COMBINATIONS, *ROUNDED], [*IN_TURN, *ROUNDED]))
in_turn = pytest.mark.parametrize("name", cross_section(IN_TURN, IN_TURN))
MEM_LEN = 12


def on_device(model):
    """The model on the device; its functions on the CPU are not used any longer."""
    return model.to(DEVICE)


@every
@pytest.mark.parametrize("mem_len", [0, MEM_LEN])
def test_scores_are_those_of_the_cpu(name, mem_len, record_property):
    text, cuts = tokens(2, 60), [1, 29, 7]
    with torch.inference_mode():
        here, _ = read(make(name), text, cuts, mem_len=mem_len)
        there, _ = read(on_device(make(name)), text.to(DEVICE), cuts, mem_len=mem_len)
    record_property("difference", float((there.cpu() - here).abs().max()))
    assert torch.allclose(there.cpu(), here, rtol=0, atol=1e-9)


@in_turn
def test_scores_in_float32_are_those_of_the_cpu(name):
    if has_gaps(name):
        pytest.skip("a rounded projection may fall into another bucket")
    text = tokens(2, 60)
    with torch.inference_mode():
        here, _ = read(make(name, dtype=torch.float32), text, [29], mem_len=MEM_LEN)
        there, _ = read(on_device(make(name, dtype=torch.float32)), text.to(DEVICE), [29], mem_len=MEM_LEN)
    assert (there.cpu() - here).abs().max() < 1e-3
    assert (there.cpu() - here).abs().mean() < 1e-4


@in_turn
def test_gradients_are_those_of_the_cpu(name, record_property):
    """Gradients of the second segment, with the memory of training, growing span."""
    text, gradients = tokens(2, 40), []
    for device in (torch.device("cpu"), DEVICE):
        model = make(name).to(device).train()
        x = text.to(device)
        state = model.init_state(2, mem_len=MEM_LEN, segment_len=13, span="growing", memory="hidden")
        with torch.no_grad():
            _, state = model.score(x[:, :13], x[:, 1:14], state)[:2]
        nll, _, ponder, _ = model.score(x[:, 13:26], x[:, 14:27], state)
        loss = nll.mean()
        (loss if ponder is None else loss + 0.01 * ponder.cost.mean()).backward()
        gradients.append({n: parameter.grad.cpu() for n, parameter in model.named_parameters()})
    here, there = gradients
    record_property("difference", max(float((there[n] - gradient).abs().max()) for n, gradient in here.items()))
    for n, gradient in here.items():
        assert torch.allclose(there[n], gradient, rtol=1e-7, atol=1e-9), n


@in_turn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_16_bits_are_close_to_float32(name, dtype):
    """The mean loss: single scores of a model with large random weights differ by more."""
    if has_gaps(name):
        pytest.skip("a rounded projection falls into another bucket")
    model, text = on_device(make(name, dtype=torch.float32)), tokens(2, 60).to(DEVICE)
    with torch.inference_mode():
        exact, _ = read(model, text, [29], mem_len=MEM_LEN)
        with Runtime(DEVICE, dtype, 1).autocast():
            rounded, _ = read(model, text, [29], mem_len=MEM_LEN)
    assert rounded.isfinite().all()
    assert rounded.double().mean().item() == pytest.approx(exact.double().mean().item(), rel=5e-2)


@in_turn
def test_a_state_of_the_device_continues_on_the_cpu(name, tmp_path):
    text, model = tokens(2, 50), make(name)
    with torch.inference_mode():
        whole, _ = read(model, text, [29], mem_len=MEM_LEN)
        _, state = read(on_device(make(name)), text[:, :31].to(DEVICE), [1, 29], mem_len=MEM_LEN)
        write_tensors(tmp_path / "s.safetensors", state.tensors(), state.describe())
        loaded = State.restore(*read_tensors(tmp_path / "s.safetensors", expected=None))
        on, _ = read(model, text[:, 30:], [5], state=loaded)
    assert torch.allclose(on, whole[:, 30:], rtol=0, atol=1e-9)
