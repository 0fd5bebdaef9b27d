"""How branches are joined to the stream: each way against its formula, and what memory then holds."""

import pytest
import torch

from xlcli import config
from xlcli.model.build import build_model
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span

VOCAB = 23
PLACEMENTS = ("pre", "post", "sandwich", "rezero", "parallel")
every = pytest.mark.parametrize("placement", PLACEMENTS)
norms = pytest.mark.parametrize("kind", ["layer", "rms"])


def build(placement, *, kind="rms", n_layers=3, dim=12, **more):
    norm = {"kind": kind, "placement": placement}
    tree = {"vocab_size": VOCAB, "dim": dim, "n_layers": n_layers, "attention": {"n_heads": 2}, "norm": norm} | more
    return build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(0))


def large(model):
    """The model with weights so large that mistakes show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model.eval()


def normal(x, norm, kind, epsilon=1e-5):
    """Each vector by its own numbers: Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4."""
    center = x.mean(-1, keepdim=True) if kind == "layer" else 0.0
    size = ((x - center) ** 2).mean(-1, keepdim=True) + epsilon
    shift = 0.0 if getattr(norm, "bias", None) is None else norm.bias
    return (x - center) / size**0.5 * norm.weight + shift


def joined(x, branch, residual, placement, kind):
    """x after a branch: equations of Vaswani 2017, Xiong 2020 (table 1), Ding 2021 (section 2.3), Bachlechner 2021."""
    match placement:
        case "pre":
            return x + branch(normal(x, residual.norm, kind))
        case "post":
            return normal(x + branch(x), residual.norm, kind)
        case "sandwich":
            return x + normal(branch(normal(x, residual.norm, kind)), residual.last_norm, kind)
        case "rezero":
            return x + residual.alpha * branch(x)


@norms
def test_the_epsilon_of_every_norm_is_a_setting(kind):
    settings = {"norm": {"kind": kind, "placement": "sandwich", "epsilon": 0.1}}
    model = large(build("sandwich", attention={"n_heads": 2, "qk_norm": True}, **settings))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)]
    assert len(norms) == 3 * 6 + 1
    for norm in norms:
        x = torch.randn(5, len(norm.weight), dtype=torch.float64)
        expected = normal(x, norm, "layer" if isinstance(norm, torch.nn.LayerNorm) else "rms", 0.1)
        assert torch.allclose(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", ["pre", "sandwich", "parallel"])
def test_the_last_norm_may_be_left_out(placement):
    with_norm, without = (large(build(placement, norm={"placement": placement, "final": has})) for has in (True, False))
    with_norm.load_state_dict(without.state_dict() | {"stack.final.weight": torch.ones(12)})
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.inference_mode():
        x, y = (model(tokens, model.init_state(2, mem_len=20, segment_len=9))[0] for model in (without, with_norm))
        assert torch.allclose(normal(x, with_norm.stack.final, "rms"), y, rtol=0, atol=1e-12)


@every
@norms
@pytest.mark.parametrize("bias", [True, False])
def test_equals_its_formula(placement, kind, bias):
    model = large(build(placement, kind=kind, bias=bias))
    tokens = torch.randint(0, VOCAB, (2, 9))
    state = model.init_state(2, mem_len=20, segment_len=9)
    context = AttentionContext(state.span, n_memory=0, n_new=9, keep=9, device=tokens.device)
    with torch.inference_mode():
        x = model.embedding(tokens)
        for block, memory in zip(model.stack.blocks, state.layers, strict=True):
            attention = lambda y, b=block, m=memory: b.attention(y, m, context)[0]  # noqa: E731
            if placement == "parallel":  # Black et al. 2022, equation 1
                first, second = block.attention_residual.norm, block.feedforward_residual.norm
                x = x + attention(normal(x, first, kind)) + block.feedforward(normal(x, second, kind))
                continue
            x = joined(x, attention, block.attention_residual, placement, kind)
            x = joined(x, block.feedforward, block.feedforward_residual, placement, kind)
        if placement in ("pre", "sandwich", "parallel"):
            x = normal(x, model.stack.final, kind)
        assert torch.allclose(model(tokens, state)[0], x, rtol=0, atol=1e-12)


@norms
def test_rezero_starts_as_the_identity(kind):
    model = build("rezero", kind=kind, n_layers=12)
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        x, _ = model(tokens, model.init_state(2, mem_len=9, segment_len=9))
        assert torch.equal(x, model.embedding(tokens))
    alphas = [parameter for name, parameter in model.named_parameters() if name.endswith("alpha")]
    assert len(alphas) == 24
    assert not any("norm" in name for name, _ in model.named_parameters())


@every
@norms
def test_norms_start_without_effect(placement, kind):
    """Gain one and bias zero, the norm behind the last block included."""
    model = build(placement, kind=kind, bias=True)
    found = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)]
    assert len(found) == {"pre": 7, "post": 6, "sandwich": 13, "rezero": 0, "parallel": 7}[placement]
    for norm in found:
        assert (norm.weight == 1).all()
        assert getattr(norm, "bias", None) is None or (norm.bias == 0).all()


@every
@pytest.mark.parametrize("memory", ["hidden", "keyvalue"])
def test_memory_is_what_the_branch_is_given(placement, memory):
    """Segments give the branches what one long call gives them, and memory holds just that, norms applied."""
    model = large(build(placement))
    tokens = torch.randint(0, VOCAB, (2, 41), generator=torch.Generator().manual_seed(1))
    given = [[] for _ in model.stack.blocks]
    for inputs, block in zip(given, model.stack.blocks, strict=True):
        block.attention.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
    whole = None
    with torch.inference_mode():
        for n in (41, 10, 1):
            for inputs in given:
                inputs.clear()
            state = model.init_state(2, mem_len=7, segment_len=10, memory=memory)
            out = []
            for piece in tokens.split(n, dim=1):
                x, state = model(piece, state)
                out.append(x)
            result = [torch.cat(parts, 1) for parts in (out, *given)]
            whole = result if whole is None else whole
            assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(result, whole, strict=True))
            for block, kept, inputs in zip(model.stack.blocks, state.layers, result[1:], strict=True):
                if memory == "hidden":
                    assert torch.equal(kept.h, inputs[:, -7:])
                else:
                    span = Span("uniform", mem_len=7, segment_len=10)
                    context = AttentionContext(span, n_memory=0, n_new=7, keep=7, device=tokens.device)
                    expected = block.attention.project(inputs[:, -7:], context)
                    for made, k in zip(expected, kept.tensors().values(), strict=True):
                        assert torch.allclose(made, k, rtol=0, atol=1e-12)


@every
def test_dropout_is_on_the_branch_alone(placement):
    residual = build(placement, dropout={"residual": 0.5}, dim=64).stack.blocks[0].attention_residual
    if placement == "rezero":
        torch.nn.init.ones_(residual.alpha)
    x, y = torch.zeros(50, 64), torch.ones(50, 64)
    residual.eval()
    kept = residual.merge(x, y)
    assert torch.allclose(kept, y, atol=1e-4)
    residual.train()
    torch.manual_seed(0)
    dropped = residual.merge(x, y) == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert torch.equal(residual.merge(y, x), residual.eval().merge(y, x))
    assert torch.equal(residual.pre(y), residual.train().pre(y))


@every
def test_twelve_layers_learn(placement):
    """Thirty steps fit a little text a good way, and the gradient neither dies nor explodes on its way down."""
    model = build(placement, n_layers=12, dim=24, feedforward={"ffn_dim": 32}, embedding={"scaled": True})
    tokens = torch.randint(0, VOCAB, (2, 25), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(30):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, (step + 1) / 10)
        nll, _ = model.score(tokens[:, :-1], tokens[:, 1:], model.init_state(2, mem_len=24, segment_len=24))[:2]
        losses.append(nll.mean().item())
        optimizer.zero_grad()
        nll.mean().backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    sizes = [torch.stack([p.grad.norm() for p in block.parameters()]).norm() for block in model.stack.blocks]
    assert min(sizes) > 0.03 * max(sizes)
