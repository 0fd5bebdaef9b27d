"""The Universal Transformer and its adaptive computation time: against the papers, and what must hold at any depth."""

import itertools

import pytest
import torch
from oracles import universal
from variants import thinned

from xlcli import config
from xlcli.model import stack as stacks
from xlcli.model.build import build_model

VOCAB = 23
BOTH = pytest.mark.parametrize("n_layers", [1, 2])
PAPER = {
    "norm": {"kind": "layer", "placement": "post"},
    "feedforward": {"kind": "relu"},
    "bias": True,
    "embedding": {"scaled": True},
}
"""What stands around attention in the paper."""


def build(n_steps, *, n_layers=1, act=False, time_signal=True, seed=5, epsilon=0.01, alpha=None, **more):
    """A toy model whose weights are large enough that mistakes show, the same for every number of steps."""
    tree = {
        "vocab_size": VOCAB, "dim": 12, "n_layers": n_layers, "attention": {"n_heads": 2},
        "position": {"kind": "xl", "n_features": 8},
        "stack": {
            "kind": "universal", "n_steps": n_steps, "time_signal": time_signal, "act": act, "epsilon": epsilon,
        } if n_steps else {"kind": "standard"},
    } | more  # fmt: skip
    model = build_model(config.make({"model": tree}).model).double().eval()
    model.stack.time_signal = float(time_signal)  # as large as in the paper
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
            if alpha is not None and name.endswith("alpha"):
                parameter.fill_(alpha)
    return model


def halting(n_steps, *, mean=-1.0, spread=2.0, **more):
    """A model whose halting logits have this mean and spread on some text, so that positions halt at various steps."""
    model = build(n_steps, act=True, **more)
    halt, logits = model.stack.halt, []
    hook = halt.register_forward_hook(lambda module, args, out: logits.append(out))
    with torch.no_grad():
        halt.bias.fill_(-100.0)
        read(model, text(4, 40), [40])
        hook.remove()
        seen = torch.stack(logits) + 100
        halt.weight.mul_(spread / seen.std())
        halt.bias.fill_(mean - spread * seen.mean() / seen.std())
    return model


def forced(n_steps, bias, **more):
    """A model that never halts (bias far below zero) or at once (far above)."""
    model = build(n_steps, act=True, **more)
    with torch.no_grad():
        model.stack.halt.bias.fill_(bias)
    return model


def text(rows, length, seed=1):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model, tokens, cuts, *, mem_len=9, memory="keyvalue", segment_len=13):
    """Hidden states, what they cost and the steps taken, if known, in calls of the lengths in `cuts` (cycled)."""
    state = model.init_state(len(tokens), mem_len=mem_len, segment_len=segment_len, memory=memory)
    x, ponders, at, sizes = [], [], 0, itertools.cycle(cuts)
    hook = model.stack.register_forward_hook(lambda stack, inputs, output: ponders.append(output.ponder or ()))
    while at < tokens.shape[1]:
        piece = tokens[:, at : at + next(sizes)]
        hidden, state = model(piece, state)
        x.append(hidden)
        at += piece.shape[1]
    hook.remove()
    return torch.cat(x, 1), [torch.cat(parts, 1) for parts in zip(*ponders, strict=True)], state


def close(a, b, within):
    return torch.allclose(a, b, rtol=0, atol=within)


def paper_names(model):
    blocks = []
    for block in model.stack.blocks:
        attention, feedforward = block.attention, block.feedforward
        names = {"W_q": attention.query, "W_kE": attention.key, "W_v": attention.value, "W_o": attention.output}
        blocks.append({name: part.weight.detach() for name, part in names.items()})
        for i, layer in enumerate((feedforward.up, feedforward.down), start=1):
            blocks[-1] |= {f"W_{i}": layer.weight.detach(), f"b_{i}": layer.bias.detach()}
        for i, residual in enumerate((block.attention_residual, block.feedforward_residual), start=1):
            blocks[-1][f"norm_{i}"] = residual.norm.weight.detach(), residual.norm.bias.detach()
    return blocks


# Fixed depth.


@BOTH
@pytest.mark.parametrize("position", [{"kind": "xl", "n_features": 8}, {"kind": "rope"}, {"kind": "t5"}])
def test_steps_equal_layers_that_share_weights(n_layers, position):
    model = build(3, n_layers=n_layers, time_signal=False, position=position)
    deep = build(0, n_layers=3 * n_layers, position=position)
    deep.load_state_dict(model.state_dict(), strict=False)
    for i, block in enumerate(deep.stack.blocks):
        block.load_state_dict(model.stack.blocks[i % n_layers].state_dict())
    tokens = text(2, 30)
    with torch.inference_mode():
        for cuts in ([30], [1, 6]):
            shared, _, state = read(model, tokens, cuts)
            apart, _, its = read(deep, tokens, cuts)
            assert torch.equal(shared, apart)
            assert all(torch.equal(t, its.tensors()[name]) for name, t in state.tensors().items())
    assert model.n_parameters < deep.n_parameters


@pytest.mark.parametrize("act", [False, True])
def test_parameters_do_not_grow_with_steps(act):
    one, many = (build(n, act=act, n_layers=2).n_parameters for n in (1, 60))
    assert one == many == build(0, n_layers=2).n_parameters + 13 * act


@BOTH
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("marked", [(True, True), (True, False), (False, True), (False, False)])
def test_equals_the_paper(n_layers, n_steps, marked):
    steps, positions = marked
    position = {"kind": "sinusoidal", "placement": "layers", "amplitude": 1.0} if positions else {"kind": "none"}
    model = build(n_steps, n_layers=n_layers, time_signal=steps, position=position, **PAPER)
    tokens = text(1, 11)
    expected = universal.read(
        model.embedding(tokens)[0].detach(), paper_names(model), n_steps=n_steps, n_heads=2, window=6,
        steps_marked=steps, positions_marked=positions,
    )  # fmt: skip
    with torch.inference_mode():
        for cuts in ([11], [1]):
            x, _, _ = read(model, tokens, cuts, mem_len=6)
            assert close(x[0], expected.out, 1e-11)


CUT = [*itertools.product((1, 3, 6), (0, 9, 200), (False, True))]
"""Number of steps, memory length, and whether the number of steps adapts."""


@pytest.mark.parametrize("case", thinned(CUT, CUT[::5]), ids=str)
def test_cutting(case):
    """How the text is cut and which memory carries it change neither outputs nor step counts; one memory a step."""
    n_steps, mem_len, act = case
    model = halting(n_steps) if act else build(n_steps)
    tokens = text(2, 70)
    with torch.inference_mode():
        whole, costs, _ = read(model, tokens, [70], mem_len=mem_len)
        for cuts, memory in itertools.product(([1], [7], [64]), ("keyvalue", "hidden")):
            cut, its, state = read(model, tokens, cuts, mem_len=mem_len, memory=memory)
            assert close(cut, whole, 1e-9), (cuts, memory)
            assert len(state.layers) == n_steps
            if act:
                assert close(its[0], costs[0], 1e-9)
                assert torch.equal(its[1], costs[1])
    assert len(costs) == 2 * act
    assert not act or n_steps == 1 or len(costs[1].unique()) > 1


@BOTH
@pytest.mark.parametrize("act", [False, True])
def test_depth_may_be_chosen_at_evaluation(n_layers, act):
    deeper = halting(5, n_layers=n_layers) if act else build(5, n_layers=n_layers)
    trained = build(2, n_layers=n_layers, act=act)
    chosen = build_model(trained.config.for_inference(n_steps=5)).double().eval()
    chosen.stack.time_signal = trained.stack.time_signal
    for model in (trained, chosen):
        model.load_state_dict(deeper.state_dict())
    tokens = text(2, 20)
    with torch.inference_mode():
        x, costs, state = read(chosen, tokens, [8])
        expected, its, _ = read(deeper, tokens, [8])
        shallow, _, _ = read(trained, tokens, [8])
    assert torch.equal(x, expected)
    assert all(map(torch.equal, costs, its))
    assert not close(x, shallow, 1e-3)
    assert len(state.layers) == 5 * n_layers
    assert trained.is_compatible(state)
    assert trained.receptive_field(9) == 2 * n_layers * 9
    assert trained.inference_settings(state)["n_steps"] == 5
    assert chosen.receptive_field(9) == deeper.receptive_field(9) == 5 * n_layers * 9


# Adaptive computation time.


@BOTH
@pytest.mark.parametrize(("epsilon", "mean"), [(0.01, -1.0), (0.01, 0.0), (0.3, -1.0)])
@pytest.mark.parametrize("marked", [True, False])
def test_halting_equals_the_papers(n_layers, epsilon, mean, marked):
    position = {"kind": "sinusoidal", "placement": "layers", "amplitude": 1.0} if marked else {"kind": "none"}
    model = halting(6, n_layers=n_layers, time_signal=marked, position=position, epsilon=epsilon, mean=mean, **PAPER)
    tokens = text(1, 14)
    halt = model.stack.halt.weight[0].detach(), model.stack.halt.bias[0].detach()
    expected = universal.read(
        model.embedding(tokens)[0].detach(), paper_names(model), n_steps=6, n_heads=2, window=6,
        steps_marked=marked, positions_marked=marked, halt=halt, epsilon=epsilon,
    )  # fmt: skip
    assert close(expected.weights.sum(1), torch.ones(14).double(), 1e-14)
    assert len(set(expected.steps)) > 2
    with torch.inference_mode():
        for cuts in ([14], [1]):
            x, (cost, steps), _ = read(model, tokens, cuts, mem_len=6)
            assert steps[0].tolist() == expected.steps
            assert close(cost[0], torch.stack(expected.ponder), 1e-11)
            assert close(x[0], expected.out, 1e-11)


def still(n_steps):
    """A model whose states never change: all it does is to weigh them, and halting has a closed form."""
    return halting(n_steps, time_signal=False, position={"kind": "none"}, norm={"placement": "rezero"}, alpha=0.0)


def test_weights_of_a_position_sum_to_one():
    """The weighted sum of equal states is that state, however many there are; N and R follow from p alone."""
    model = still(9)
    tokens = text(4, 25)
    with torch.inference_mode():
        x, (cost, steps), _ = read(model, tokens, [25])
        embedded = model.embedding(tokens)
        p = model.stack.halt(embedded)[..., 0].sigmoid()
    assert close(x, embedded, 1e-14)
    n = ((1 - 0.01) / p).floor().add(1).clamp(max=9)
    assert torch.equal(steps, n)
    assert close(cost, n + 1 - (n - 1) * p, 1e-14)
    assert len(n.unique()) > 3


def test_gradient_of_the_cost():
    """d(N + R)/db = -(N - 1) p (1 - p): N has none, and R = 1 - (N - 1) p."""
    model = still(9)
    tokens = text(4, 25)
    _, (cost, steps), _ = read(model, tokens, [25])
    slopes = torch.autograd.grad(cost.sum(), (model.stack.halt.bias, model.stack.halt.weight))
    embedded = model.embedding(tokens)
    p = model.stack.halt(embedded)[..., 0].sigmoid()
    expected = -(steps - 1) * p * (1 - p)
    assert close(slopes[0], expected.sum(), 1e-12)
    assert close(slopes[1], torch.einsum("bt,btd->d", expected, embedded)[None], 1e-12)
    assert slopes[0] < 0


@BOTH
def test_never_halting_is_a_fixed_depth(n_layers, monkeypatch):
    model, fixed = forced(5, -1e4, n_layers=n_layers), build(5, n_layers=n_layers)
    fixed.load_state_dict(model.state_dict(), strict=False)
    monkeypatch.setattr(stacks, "_rows", lambda running: None)
    tokens = text(2, 30)
    with torch.inference_mode():
        x, (cost, steps), _ = read(model, tokens, [7])
        assert torch.equal(x, read(fixed, tokens, [7])[0])
    assert (steps == 5).all()
    assert (cost == 6).all()


@BOTH
def test_halting_at_once_is_one_step(n_layers):
    model, fixed = forced(5, 1e4, n_layers=n_layers), build(1, n_layers=n_layers)
    fixed.load_state_dict(model.state_dict(), strict=False)
    tokens = text(2, 30)
    with torch.inference_mode():
        x, (cost, steps), _ = read(model, tokens, [7])
        assert torch.equal(x, read(fixed, tokens, [7])[0])
    assert (steps == 1).all()
    assert (cost == 2).all()


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "rezero"])
def test_halting_reads_the_state_as_the_head_does(placement):
    model = forced(3, -1e4, norm={"kind": "rms", "placement": placement})
    given = []
    model.stack.halt.register_forward_hook(lambda module, args, out: given.append(args[0]))
    with torch.inference_mode():
        x, _, _ = read(model, text(2, 10), [10])
    assert torch.equal(given[-1], x)


def test_halting_depends_on_the_past_alone():
    model = halting(6)
    tokens = text(1, 40)
    with torch.inference_mode():
        for mem_len in (0, 9):
            before, costs, _ = read(model, tokens, [40], mem_len=mem_len)
            for i in (0, 12, 13, 25, 38):
                changed = tokens.clone()
                changed[:, i + 1 :] = (changed[:, i + 1 :] + 1 + text(1, 39 - i, seed=i) % (VOCAB - 1)) % VOCAB
                after, its, _ = read(model, changed, [40], mem_len=mem_len)
                for one, other in zip((before, *costs), (after, *its), strict=True):
                    assert torch.equal(one[:, : i + 1], other[:, : i + 1])
                assert not torch.equal(before[:, i + 1 :], after[:, i + 1 :])
    assert len(costs[1].unique()) > 2


def test_rows_do_not_wait_for_each_other():
    """A row of a batch takes the steps it takes alone, though the others may take more."""
    model = halting(6)
    tokens = text(8, 30)
    with torch.inference_mode():
        together, (cost, steps), _ = read(model, tokens, [7])
        for row in range(8):
            alone, its, _ = read(model, tokens[row : row + 1], [7])
            assert torch.equal(its[1][0], steps[row])
            assert close(its[0][0], cost[row], 1e-11)
            assert close(alone[0], together[row], 1e-11)
    assert len({tuple(row) for row in steps.tolist()}) == 8


@BOTH
@pytest.mark.parametrize("kind", ["full", "local"])
def test_leaving_early_changes_no_number(n_layers, kind, monkeypatch):
    """Once all positions of a call have halted only memory is written, as if they had gone on."""
    attention = {"n_heads": 2, "kind": kind} | ({"window": 4} if kind == "local" else {})
    model = halting(6, n_layers=n_layers, attention=attention)
    calls = []
    for n, block in enumerate(model.stack.blocks):
        block.attention.output.register_forward_hook(lambda *_, n=n: calls.append(n))
    tokens, right = text(1, 15), stacks._rows
    for memory, cuts in itertools.product(("hidden", "keyvalue"), ([1], [2, 3])):
        made = []
        for skips in (False, True):
            calls.clear()
            monkeypatch.setattr(stacks, "_rows", right if skips else lambda running: None)
            x, costs, state = read(model, tokens, cuts, memory=memory)
            made.append([x, *costs, *state.tensors().values()])
            pieces = costs[1].split((cuts * 15)[: 15 * len(cuts) // sum(cuts)], dim=1)
            needed = sum(int(piece.max()) for piece in pieces)
            assert needed < 6 * len(pieces)
            assert calls.count(n_layers - 1) == (needed if skips else 6 * len(pieces))
        assert all(map(close, *made, itertools.repeat(1e-12)))


@BOTH
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_skipping_halted_positions_changes_no_gradient(n_layers, placement, monkeypatch):
    model = halting(6, n_layers=n_layers, norm={"kind": "rms", "placement": placement})
    tokens = text(3, 60)
    made, right = [], stacks._rows
    for skips in (False, True):
        monkeypatch.setattr(stacks, "_rows", right if skips else lambda running: None)
        model.zero_grad()
        x, costs, _ = read(model, tokens, [20], memory="hidden")
        (x.sin().sum() + costs[0].sum()).backward()
        made.append([x, *costs, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    assert 1 < costs[1].mean() < 5
    assert all(map(close, *made, itertools.repeat(1e-10)))


@pytest.mark.parametrize("cuts", [[1], [2, 3]])
def test_leaving_early_with_linear_attention(cuts, monkeypatch):
    model = halting(6, attention={"n_heads": 2, "kind": "linear"}, position={"kind": "rope"})
    tokens = text(1, 24)
    made, right = [], stacks._rows
    for skips in (False, True):
        monkeypatch.setattr(stacks, "_rows", right if skips else lambda running: None)
        x, costs, state = read(model, tokens, cuts)
        made.append([x, *costs, *state.tensors().values()])
    assert costs[1].sum() < 6 * 24
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_reach_every_parameter(dropout):
    rates = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), dropout)
    model = halting(4, n_layers=2, dropout=rates).train()
    tokens = text(2, 40)
    torch.manual_seed(0)
    state = model.init_state(2, mem_len=12, segment_len=13, span="growing", memory="hidden")
    state = model.score(tokens[:, :13], tokens[:, 1:14], state).state
    scored = model.score(tokens[:, 13:26], tokens[:, 14:27], state)
    (scored.nll + 0.1 * scored.ponder.cost).mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert scored.ponder.cost.shape == scored.ponder.steps.shape == (2, 13)
    assert not scored.ponder.steps.requires_grad


def test_a_price_on_steps_is_saved():
    """The same little text learned twice: who pays for steps takes fewer, and both learn it."""
    tokens = text(2, 33, seed=5)
    ends = []
    for price in (0.0, 0.5):
        tree = {"vocab_size": VOCAB, "dim": 16, "n_layers": 1, "attention": {"n_heads": 2}}
        tree["stack"] = {"kind": "universal", "n_steps": 4, "act": True, "time_signal": False, "halt_bias": -1.0}
        model = build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(0))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(40):
            scored = model.score(tokens[:, :-1], tokens[:, 1:], model.init_state(2, mem_len=32, segment_len=32))
            loss = scored.nll.mean() + price * scored.ponder.cost.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append((scored.nll.mean().item(), scored.ponder.steps.mean().item()))
    (free, many), (paid, few) = ends
    assert few < many - 1
    assert max(free, paid) < 1
