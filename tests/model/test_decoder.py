"""Fast decoding: the logits and memories of the modules, for every kind of block, weight and memory."""

import pytest
import torch

from tests.variants import COMBINATIONS, table
from xlcli import config
from xlcli.model.build import build_model
from xlcli.model.decoder import make_decoder
from xlcli.store.folder import round_weights

pytest.importorskip("numba")

WEIGHTS, MEMORY = ("float32", "bfloat16", "int8"), ("float32", "int8", "bfloat16")


def network_of(tree, encoding, n_layers=3, seed=0):
    """Random model with weights large enough that errors are visible."""
    model = config.make({"model": {"n_layers": n_layers, **tree}}).model
    network = build_model(model, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    round_weights(network, encoding)
    return network.eval()


def decodes(tree):
    """Whether there is a decoder for such a model."""
    return make_decoder(network_of(tree, "float32"), "float32") is not None


DECODED = [name for name in COMBINATIONS if decodes(table(name))]


def check(network, encoding, memory_dtype, *, batch=2, mem_len=9, segment_len=8, n_read=14, n_new=8):
    """Reads a text in one call, then compares predictions after one token at a time, from the same states."""
    decoder = make_decoder(network, encoding)
    tokens = torch.randint(network.config.vocab_size, (batch, n_read + n_new), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        state = network.init_state(batch, mem_len=mem_len, segment_len=segment_len, memory_dtype=memory_dtype)
        _, state = network.logits(tokens[:, :n_read], state)
        for token in tokens[:, n_read:].split(1, dim=1):
            expected, slow = network.logits(token, state.fork())
            logits, state = decoder.logits(token, state)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
            assert state.describe() == slow.describe()
            for one, other in zip(state.layers, slow.layers, strict=True):
                assert one.kind == other.kind
                assert one.shape == other.shape
            torch.testing.assert_close(state.offsets, slow.offsets)


@pytest.mark.parametrize("name", DECODED)
def test_logits_equal_those_of_the_modules(name):
    i = DECODED.index(name) % len(WEIGHTS)
    memory_dtype = MEMORY[i] if config.make({"model": table(name)}).model.rounds_memory else "float32"
    check(network_of(table(name), WEIGHTS[i]), WEIGHTS[i], memory_dtype)
