"""What tokens become: plain, factorized and adaptive."""

import pytest
import torch
from oracles import adaptive_softmax as oracle

from xlcli import config
from xlcli.errors import ConfigError
from xlcli.model.build import build_model
from xlcli.model.embedding import AdaptiveEmbedding, BigramEmbedding, TokenEmbedding, bigram_rows
from xlcli.model.head import SoftmaxHead

CUTOFFS = (5, 6, 14)


def model(vocab_size=31, **embedding):
    tree = {"vocab_size": vocab_size, "dim": 16, "n_layers": 1, "attention": {"n_heads": 2}, "embedding": embedding}
    return build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(0))


def adaptive(div_val, **more):
    made = AdaptiveEmbedding(
        vocab_size=31, dim=16, cutoffs=CUTOFFS, div_val=div_val, **{"scaled": False, "dropout": 0.0} | more
    ).double()
    matrices = [[t.table.weight for t in made.clusters], [None if t.up is None else t.up.weight for t in made.clusters]]
    return made, matrices


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_of_token_vectors_comes_before_positions(kind):
    tree = {"vocab_size": 31, "dim": 16, "n_layers": 1, "bias": True, "norm": {"kind": kind, "epsilon": 0.01}}
    tree |= {"position": {"kind": "learned", "max_len": 8}, "embedding": {"norm": True, "scaled": True}}
    made = build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(0)).double()
    weight, tokens = made.embedding_norm.weight.detach().uniform_(0.5, 2.0), torch.arange(8)
    bias = made.embedding_norm.bias.detach().uniform_(-1.0, 1.0) if kind == "layer" else 0.0
    x = 4 * made.embedding.table.weight[tokens]
    x = x - x.mean(1, keepdim=True) if kind == "layer" else x
    expected = x / (x.square().mean(1, keepdim=True) + 0.01).sqrt() * weight + bias + made.position.axes[0].weight
    got, _ = made.embed(tokens[None], made.init_state(1, mem_len=4, segment_len=8))
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("div_val", "widths"), [(1, (16, 16, 16, 16)), (2, (16, 8, 4, 2)), (3, None)])
def test_adaptive_shapes(div_val, widths):
    """Later clusters are narrower; with div_val > 1 every cluster is projected, without it none."""
    if widths is None:
        with pytest.raises(ConfigError, match=r"\b16\b.*\b4\b"):
            model(cutoffs=CUTOFFS, div_val=3)
        return
    tables, projections = adaptive(div_val)[1]
    narrow, ups = adaptive(div_val, inner_dim=9)[1]
    assert [tuple(t.shape) for t in narrow] == [(n, 9 // div_val**i) for i, n in enumerate((5, 1, 8, 17))]
    assert [tuple(p.shape) for p in ups] == [(16, 9 // div_val**i) for i in range(4)]
    assert [tuple(t.shape) for t in tables] == list(zip((5, 1, 8, 17), widths, strict=True))
    expected = [None] * 4 if div_val == 1 else [(16, w) for w in widths]
    assert [None if p is None else tuple(p.shape) for p in projections] == expected


@pytest.mark.parametrize("div_val", [1, 2])
@pytest.mark.parametrize("inner_dim", [None, 9])
def test_adaptive_equals_the_paper_word_by_word(div_val, inner_dim):
    scaled = inner_dim is None
    made, (tables, projections) = adaptive(div_val, scaled=scaled, inner_dim=inner_dim)
    tokens = torch.randint(0, 31, (3, 20))
    tokens[0, :7] = torch.tensor([0, 4, 5, 6, 13, 14, 30])
    words = [oracle.embed(int(t), tables, projections, CUTOFFS) for t in tokens.flatten()]
    expected = torch.stack(words).view(3, 20, 16) * (4.0 if scaled else 1.0)
    out = made(tokens)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    parameters = list(made.parameters())
    weights = torch.randn(3, 20, 16, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters, weights) for x in (out, expected)), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_vector_does_not_depend_on_its_neighbors():
    """Not in the last bit, so that predictions cannot depend on later tokens."""
    made, _ = adaptive(2)
    tokens = torch.tensor([[29, 3, 17, 5, 11, 30, 2]])
    whole = made(tokens)
    for other in (0, 5, 9, 30):
        changed = tokens.clone()
        changed[:, 3:] = other
        assert torch.equal(made(changed)[:, :3], whole[:, :3])


@pytest.mark.parametrize("token", [-1, 31])
def test_words_that_do_not_exist_are_refused(token):
    with pytest.raises(IndexError):
        adaptive(2)[0](torch.tensor([[token]]))


def test_factorized_is_a_narrow_row_times_a_matrix():
    made = TokenEmbedding(vocab_size=31, dim=16, inner_dim=3, scaled=True).double()
    tokens = torch.randint(0, 31, (2, 5))
    for b in range(2):
        for t in range(5):
            expected = 4 * sum(made.table.weight[tokens[b, t], i] * made.up.weight[:, i] for i in range(3))
            assert torch.allclose(made(tokens)[b, t], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "factorized", "adaptive"])
def test_dropout_comes_last(kind):
    """Features are dropped one by one, which dropout before a projection cannot do."""
    torch.manual_seed(0)
    made = {
        "plain": lambda: TokenEmbedding(vocab_size=31, dim=16, dropout=0.5),
        "factorized": lambda: TokenEmbedding(vocab_size=31, dim=16, inner_dim=2, dropout=0.5),
        "adaptive": lambda: adaptive(2, dropout=0.5)[0],
    }[kind]()
    tokens = torch.randint(0, 31, (4, 50))
    dropped, whole = made(tokens), made.eval()(tokens)
    zero = dropped == 0
    assert 0.4 < zero.double().mean() < 0.6
    assert torch.equal(dropped[~zero], 2 * whole[~zero])


@pytest.mark.parametrize("div_val", [1, 4])
def test_without_cutoffs_left_the_vocabulary_is_plain(div_val):
    small = model(vocab_size=5, cutoffs=CUTOFFS, div_val=div_val)
    assert isinstance(small.embedding, TokenEmbedding)
    assert isinstance(small.head, SoftmaxHead)
    assert small.embedding.up is None
    assert small.n_parameters == model(vocab_size=5).n_parameters


def test_cutoffs_beyond_the_vocabulary_are_left_out():
    assert [t.table.weight.shape[0] for t in model(vocab_size=14, cutoffs=CUTOFFS).embedding.clusters] == [5, 1, 8]


def test_names_in_saved_models_and_initial_values():
    made = model(tied=False)
    names = dict(made.named_parameters())
    assert {"embedding.table.weight", "head.weight", "stack.blocks.0.feedforward.gate.weight"} <= names.keys()
    assert not [
        name for name in model().state_dict() if name.startswith(("embedding.up", "head.projection", "head.bias"))
    ]
    factorized = dict(model(inner_dim=8).named_parameters())
    assert not [name for name in factorized if name.startswith("head")]
    clusters = dict(model(vocab_size=3000, cutoffs=(1000, 2000), div_val=2, tied=False).named_parameters())
    for name in [*names, *clusters]:
        if name.startswith(("embedding", "head")):
            assert (names | clusters)[name].std().item() == pytest.approx(0.02, rel=0.25), name


def test_bigram_rows_are_a_hash_of_both_tokens():
    """The formula in Python's integers; every row is in the table, and pairs spread evenly."""
    previous = torch.arange(-1, 199).repeat_interleave(200)
    tokens = torch.arange(200).repeat(200)
    for n_rows in (1, 57, 4096, 32768):
        rows = bigram_rows(previous, tokens, n_rows)
        for i in (0, 1, 777, 39_999):
            mixed = ((int(previous[i]) + 1) * 2_654_435_761 + int(tokens[i])) * 668_265_263
            mixed = (mixed + 2**63) % 2**64 - 2**63
            assert rows[i] == (mixed ^ (mixed >> 15)) % n_rows
        counts = torch.bincount(rows, minlength=n_rows)
        assert len(counts) == n_rows
        expected = len(tokens) / n_rows
        assert ((counts - expected) ** 2).mean() < 1.2 * max(expected, 0.01)


def test_bigram_vectors_follow_the_previous_token():
    """Vectors of a text do not depend on where it is cut; before the first token there is none."""
    table = BigramEmbedding(64, 6)
    text = torch.randint(0, 31, (3, 20))
    none = torch.full((3,), -1)
    whole = table(text, none)
    parts = torch.cat((table(text[:, :7], none), table(text[:, 7:], text[:, 6])), dim=1)
    assert torch.equal(whole, parts)
    assert torch.equal(whole[:, 1], table.table.weight[bigram_rows(text[:, 0], text[:, 1], 64)])


@pytest.mark.parametrize("embedding", [{"n_bigrams": 40}, {"per_layer": True}])
def test_new_tables_start_at_zero(embedding):
    """At the start of training a model with further tables equals the model without them."""
    plain, extended = model(tied=False), model(tied=False, **embedding)
    extended.load_state_dict(plain.state_dict(), strict=False)
    text = torch.randint(0, 31, (2, 9))
    outputs = [m(text, m.init_state(2, mem_len=4, segment_len=4))[0] for m in (plain, extended)]
    assert torch.equal(*outputs)
    assert extended.n_parameters == plain.n_parameters + (40 if "n_bigrams" in embedding else 31) * 16


@pytest.mark.parametrize("stack", ["standard", "reversible"])
def test_vectors_of_a_layer_are_added_to_its_input(stack):
    """By hand: the first block, given its input plus the vectors, without a table of its own."""
    tree = {"vocab_size": 31, "dim": 16, "n_layers": 1, "attention": {"n_heads": 2}, "stack": {"kind": stack}}
    built = build_model(config.make({"model": tree | {"embedding": {"per_layer": True}}}).model)
    torch.nn.init.normal_(built.stack.blocks[0].vectors.weight)
    text = torch.randint(0, 31, (2, 9))
    state = built.init_state(2, mem_len=4, segment_len=4)
    expected, seen = [], {}
    hook = built.stack.blocks[0].attention.register_forward_hook(lambda _, inputs, __: seen.update(x=inputs[0]))
    built(text, state)
    hook.remove()
    x = built.embedding(text) + built.stack.blocks[0].vectors.weight[text]
    expected = built.stack.blocks[0].attention_residual.norm(x)
    assert torch.allclose(seen["x"], expected, atol=1e-6)
