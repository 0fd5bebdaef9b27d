"""Further columns of tokens and words, each beside a computation of its own from the logits of the network."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from toys import PROSE, RUNTIME, toy

from xlcli import api
from xlcli.config import EvalConfig, StreamConfig
from xlcli.errors import ConfigError, DataError
from xlcli.evaluation import evaluate
from xlcli.events import Row, TokenScore, WordScore
from xlcli.model.head import SoftmaxHead
from xlcli.streaming import stream
from xlcli.words import Predictions

ALL = "rank,entropy,logprobs=3,layers=1,2,temperature=0.5,2,renyi=2"


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def tokens_of(model, paths, **options):
    return only(evaluate(model, paths, EvalConfig(**options), RUNTIME, per_token=True), TokenScore)


def words_of(model, paths, **options):
    return only(evaluate(model, paths, EvalConfig(**options), RUNTIME, words=True), WordScore)


@pytest.fixture
def prose(tmp_path):
    (tmp_path / "prose.txt").write_text(PROSE)
    return tmp_path / "prose.txt"


def log_p(model, ids, layer=None):
    """Log-probabilities (t+1 v) in the place of each token and after the last one, of the first block or the last."""
    network, n = model.network, len(ids) + 1
    state, tokens = network.init_state(1, mem_len=n, segment_len=n), torch.tensor([[model.tokenizer.start_id, *ids]])
    with torch.inference_mode():
        if layer is None:
            x, _ = network(tokens, state)
        else:
            x, context = network.embed(tokens, state)
            for block, memory in zip(network.stack.blocks[:layer], state.layers, strict=False):
                x, _ = block(x, memory, context)
            x = network.stack.final(x)
        return network.head.logits(x[0]).log_softmax(-1)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_rank_entropy_and_best_tokens_from_logits(kind, prose):
    model = toy(kind)
    ids = model.tokenizer.encode(prose.read_bytes()).tolist()
    found = tokens_of(model, [prose], columns=ALL, mem_len=len(ids))
    for token, each, p in zip(found, ids, log_p(model, ids), strict=False):
        columns = token.prediction.columns
        assert columns["rank"] == sorted(p.tolist(), reverse=True).index(p[each].item()) + 1
        assert columns["entropy"] == pytest.approx(-(p.exp() * p).sum().item() / math.log(2), abs=1e-4)
        assert [best.logprob for best in columns["logprobs"]] == pytest.approx(p.topk(3).values.tolist(), abs=1e-4)
        assert [best.token for best in columns["logprobs"]] == p.topk(3).indices.tolist()
        assert columns["layer_2"] == pytest.approx(token.bits, abs=1e-4)  # the last block


def test_equally_probable_tokens_have_the_same_rank():
    predictions = Predictions(toy().tokenizer, StreamConfig(emit="tokens", columns="rank"), torch.device("cpu"))
    p = torch.full((1, 256, 256), 0.5 / 253).log()
    p[..., [5, 6]], p[..., 9] = math.log(0.2), math.log(0.1)
    features = predictions(p, torch.arange(256)[None])[0].tolist()
    ranks = [predictions.value(each).columns["rank"] for each in features]
    assert [ranks[i] for i in (5, 6, 9)] == [1, 1, 3]
    assert set(ranks[10:]) == {4}


def word_bits(model, ids, words, p):
    """Bits of words by log-probabilities (t+1 v) of each token and after the last one, in nats: tokens and ends."""
    firsts = [piece.decode("utf-8", "replace")[:1] for piece in model.tokenizer.texts]
    begins = [i for i, first in enumerate(firsts) if first.isspace() or "\u4e00" <= first <= "\u9fff"]
    ends = torch.logsumexp(p[:, begins], -1)
    at, before, found = 0, 0.0, []
    for word in words:
        last = at + word.tokens
        tokens = sum(p[i, ids[i]].item() for i in range(at, last))
        found.append(-(tokens + ends[last].item() - before) / math.log(2))
        at, before = last, ends[last].item()
    return found


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_layers_of_tokens_and_words_from_the_blocks(kind, tmp_path):
    model, text = toy(kind), b"The quick brown fox said: the dog, being lazy"
    (tmp_path / "t").write_bytes(text)
    ids = model.tokenizer.encode(text).tolist()
    options = {"columns": "layers=1", "mem_len": len(ids)}
    p = log_p(model, ids, layer=1)
    tokens = [token.prediction.columns["layer_1"] for token in tokens_of(model, [tmp_path / "t"], **options)]
    assert tokens == pytest.approx([-p[i, each].item() / math.log(2) for i, each in enumerate(ids)], abs=1e-4)
    words = words_of(model, [tmp_path / "t"], **options)
    assert [word.columns["layer_1"] for word in words] == pytest.approx(word_bits(model, ids, words, p), abs=1e-4)
    assert len(words) == len(text.split())


def test_length_is_the_number_of_characters_and_that_of_the_word_before_is_beside_it(tmp_path):
    (tmp_path / "t").write_text("Größe, the dog's 界界 end\n")
    words = words_of(toy("sentencepiece"), [tmp_path / "t"], columns="length,previous=1")
    lengths = [word.columns["length"] for word in words]
    assert lengths == [len(word.word) for word in words]
    assert lengths[:3] == [6, 3, 5]
    assert [word.columns["previous_1_length"] for word in words] == [None, *lengths[:-1]]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("temperature", [0.25, 2, 7.5])
def test_bits_at_a_temperature_from_logits(kind, temperature, tmp_path):
    model, text = toy(kind), b"The quick brown fox said: the dog, being lazy"
    (tmp_path / "t").write_bytes(text)
    ids = model.tokenizer.encode(text).tolist()
    name = f"temperature_{temperature}"
    options = {"columns": f"temperature={temperature},1", "mem_len": len(ids)}
    powers = log_p(model, ids).exp() ** (1 / temperature)
    p = (powers / powers.sum(-1, keepdim=True)).log()
    tokens = tokens_of(model, [tmp_path / "t"], **options)
    expected = [-p[i, each].item() / math.log(2) for i, each in enumerate(ids)]
    assert [token.prediction.columns[name] for token in tokens] == pytest.approx(expected, abs=1e-4)
    words = words_of(model, [tmp_path / "t"], **options)
    assert [word.columns[name] for word in words] == pytest.approx(word_bits(model, ids, words, p), rel=1e-5)
    assert [word.columns["temperature_1"] for word in words] == pytest.approx([word.bits for word in words], abs=1e-4)
    # In a stream nothing is rounded to 32 bits.
    settings = StreamConfig(emit="tokens", columns=f"temperature={temperature}", mem_len=len(ids))
    streamed = only(stream(model, [text], settings, RUNTIME), TokenScore)
    assert [token.prediction.columns[name] for token in streamed] == pytest.approx(expected, abs=1e-9)


def test_renyi_entropies_from_logits(prose):
    model = toy("sentencepiece")
    ids = model.tokenizer.encode(prose.read_bytes()).tolist()
    settings = StreamConfig(emit="tokens", columns="renyi=0.5,1,2,99", mem_len=len(ids))
    tokens = only(stream(model, [prose.read_bytes()], settings, RUNTIME), TokenScore)
    for token, p in zip(tokens, log_p(model, ids).exp(), strict=False):
        columns = token.prediction.columns
        assert columns["token_renyi_0.5"] == pytest.approx(2 * math.log2(p.sqrt().sum().item()), abs=1e-9)
        assert columns["token_renyi_1"] == pytest.approx(token.prediction.entropy, abs=1e-9)
        assert columns["token_renyi_2"] == pytest.approx(-math.log2((p * p).sum().item()), abs=1e-9)
        least = -math.log2(p.max().item())  # the limit of large orders
        assert least <= columns["token_renyi_99"] <= least * 99 / 98 + 1e-9
    words = words_of(model, [prose], columns="renyi=2", mem_len=len(ids))
    of_words = [token for token in tokens if token.text != b"\n"]
    at = 0
    for word in words:
        expected = of_words[at].prediction.columns["token_renyi_2"]  # of its first token
        assert word.columns["token_renyi_2"] == pytest.approx(expected, abs=1e-4)
        at += word.tokens
    assert at == len(of_words)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("punctuation", [False, True])
def test_the_last_layer_has_the_bits_of_the_word(kind, punctuation, prose):
    for word in words_of(toy(kind), [prose], columns="layers=2", split_punctuation=punctuation):
        assert word.columns["layer_2"] == pytest.approx(word.bits, abs=1e-3)


@pytest.mark.parametrize(
    ("variant", "last"), [("universal", 3), ("local", 2), ("linear", 2), ("lsh", 2), ("sliding", 2), ("zeros", 2)]
)
def test_layers_of_other_models(variant, last, prose):
    model, options = toy(variant=variant), {"mem_len": 0} if variant == "sliding" else {}
    for token in tokens_of(model, [prose], columns=f"layers=1,{last}", **options):
        assert token.prediction.columns[f"layer_{last}"] == pytest.approx(token.bits, abs=1e-4)
    names = [*tokens_of(model, [prose], columns="layers", limit=9, **options)[0].prediction.columns]
    assert names == [f"layer_{number}" for number in range(1, last)]


@pytest.mark.parametrize(("variant", "options"), [("reversible", {}), ("adaptive", {}), (None, {"context_cache": 9})])
def test_models_without_layers_refuse_them(variant, options, prose):
    with pytest.raises(ConfigError, match="layers"):
        tokens_of(toy(variant=variant), [prose], columns="layers=1", **options)
    with pytest.raises(ConfigError, match="1 to 2"):
        tokens_of(toy(), [prose], columns="layers=3")


@pytest.mark.parametrize(
    "columns",
    [
        "ranks",
        "rank=1",
        "logprobs",
        "logprobs=0",
        "logprobs=5,7",
        "layers=",
        "layers=1,rank,x",
        "frequency=",
        "temperature",
        "temperature=0",
        "temperature=0.00,1",
        "temperature=1e3",
        "renyi=0.123",
        "last=1",
        "previous=0",
    ],
)
def test_unknown_columns_are_refused(columns):
    with pytest.raises(ConfigError, match="columns"):
        list(api.evaluate(api.Model(toy(), RUNTIME), [], columns=columns))


def values(scores):
    """Columns of tokens or words as one list of numbers."""
    found = []
    for score in scores:
        columns = dict((score.prediction if isinstance(score, TokenScore) else score).columns)
        best = columns.pop("logprobs")
        found += [score.bits, *columns.values(), *(p for each in best for p in (each.token, each.logprob))]
    return found


def test_batches_segments_and_streams_have_the_same_columns(prose):
    model = toy("sentencepiece")
    tokens, words = (values(of(model, [prose], columns=ALL)) for of in (tokens_of, words_of))
    for options in ({"batch_size": 3, "segment_len": 7}, {"segment_len": 5, "batch_size": 1}):
        assert values(tokens_of(model, [prose], columns=ALL, **options)) == pytest.approx(tokens, abs=1e-3)
        assert values(words_of(model, [prose], columns=ALL, **options)) == pytest.approx(words, abs=1e-3)
    parts = [PROSE.encode()[i : i + 11] for i in range(0, len(PROSE.encode()), 11)]
    settings = StreamConfig(emit="tokens", columns=ALL)
    assert values(only(stream(model, parts, settings, RUNTIME), TokenScore)) == pytest.approx(tokens, abs=1e-3)
    same = only(api.evaluate(api.Model(model, RUNTIME), prose, words=True, columns=ALL), WordScore)
    assert values(same) == words


def test_a_line_scored_alone_has_the_columns_of_its_own_text(tmp_path):
    model, lines = toy("sentencepiece"), PROSE.splitlines()[:2]
    (tmp_path / "both").write_text("\n".join(lines) + "\n")
    found = words_of(model, [tmp_path / "both"], columns=ALL, each_line=True)
    alone = []
    for i, line in enumerate(lines):
        (tmp_path / f"{i}.txt").write_text(line + "\n")
        alone += words_of(model, [tmp_path / f"{i}.txt"], columns=ALL)
    assert values(found) == pytest.approx(values(alone), abs=1e-3)
    apart = words_of(model, sorted(tmp_path.glob("*.txt")), columns=ALL, reset_on_document=True)
    assert values(apart) == pytest.approx(values(alone), abs=1e-3)


@pytest.mark.parametrize("options", [{"adapt": True, "adapt_block": 5}, {"context_cache": 30}])
def test_columns_of_models_that_learn_are_those_by_which_tokens_are_scored(options):
    settings = StreamConfig(emit="tokens", columns="rank,entropy,logprobs=400", **options)
    for token in only(stream(toy("sentencepiece"), [PROSE.encode()[:200]], settings, RUNTIME), TokenScore):
        best = [each.logprob for each in token.prediction.columns["logprobs"]]
        own = best[token.prediction.columns["rank"] - 1]
        assert own == pytest.approx(-token.bits * math.log(2), abs=1e-9)


def test_hooks_leave_the_network(prose):
    model = toy()
    tokens_of(model, [prose], columns="layers")
    assert not any(block._forward_hooks for block in model.network.stack.blocks)
    assert isinstance(model.network.head, SoftmaxHead)


def test_frequencies_are_those_of_the_words_of_the_file(tmp_path, prose):
    (tmp_path / "corpus").write_text("The dog and the fox.\nthe «Dog», I said; 'the' end 世界\n" * 3000)
    counts = Counter(["the", "dog", "and", "the", "fox", "the", "dog", "i", "said", "the", "end", "世", "界"] * 3000)
    total = counts.total() + len(counts) + 1
    found = words_of(toy("sentencepiece"), [prose], columns=f"frequency={tmp_path / 'corpus'}")
    assert {word.word for word in found} >= {"The", "dog.", "lazy"}
    for word in found:
        count = counts[word.word.strip(".,:").lower()]
        assert word.columns["frequency"] == pytest.approx(-math.log2((count + 1) / total), abs=1e-9)
    with pytest.raises(ConfigError, match="words"):
        tokens_of(toy(), [prose], columns="frequency=x")


@pytest.mark.parametrize("header", ["", "Word{0}FREQcount\n"])
@pytest.mark.parametrize(("name", "mark"), [("counts.tsv", "\t"), ("counts.csv", ","), ("excel.csv", ";")])
def test_frequencies_of_a_table_of_counts(tmp_path, prose, name, mark, header):
    """By hand: 97 + 2 + 1 words of 3 kinds, and all new words as one more; `The` and `the` are one."""
    path = tmp_path / name
    path.write_text((header + 'the{0}90\n"The"{0}"7"\ndog{0}2\nzebra{0}1\n').format(mark))
    found = words_of(toy("sentencepiece"), [prose], columns=f"frequency={path}")
    wanted = {"The": 98 / 104, "the": 98 / 104, "dog.": 3 / 104, "lazy": 1 / 104}
    values = {word.word: word.columns["frequency"] for word in found}
    assert {word: values[word] for word in wanted} == pytest.approx({w: -math.log2(p) for w, p in wanted.items()})


LISTS = ("Word\tCount\tCD\nthe\t5\t4\n", "the\t5.5\n", "the\t5\ndog\tmany\n", "5\tthe\n", f"the\t1{'0' * 400}\n")


@pytest.mark.parametrize("rows", LISTS)
def test_other_lists_of_words_are_refused(tmp_path, prose, rows):
    (tmp_path / "counts.tsv").write_text(rows)
    with pytest.raises(DataError, match="list of words"):
        words_of(toy("sentencepiece"), [prose], columns=f"frequency={tmp_path / 'counts.tsv'}")


def test_sentences_in_a_table_are_counted_as_a_text(tmp_path, prose):
    path = tmp_path / "items.tsv"
    path.write_text("item\ttext\n1\tThe dog and the fox.\n")
    found = words_of(toy("sentencepiece"), [prose], columns=f"frequency={path}")
    assert found[0].word == "The"
    n_words, n_kinds = 8, 7  # of the file, with its header and numbers
    assert found[0].columns["frequency"] == pytest.approx(-math.log2(3 / (n_words + n_kinds + 1)))


def test_frequencies_of_marks_and_of_scripts_with_combining_marks(tmp_path):
    (tmp_path / "corpus").write_text("a, b, का की. «_c_» d\u0301 3,000\n")
    (tmp_path / "text").write_text("a, का कु d\u0301 d c\n")
    columns = f"frequency={tmp_path / 'corpus'}"

    def counts(n_words, **options):
        found = words_of(toy(), [tmp_path / "text"], columns=columns, **options)
        return [(word.word, round(2 ** -word.columns["frequency"] * n_words) - 1) for word in found]

    words = [("का", 1), ("कु", 0), ("d\u0301", 1), ("d", 0), ("c", 1)]
    assert counts(7 + 7 + 1) == [("a,", 1), *words]
    assert counts(15 + 12 + 1, split_punctuation=True) == [("a", 1), (",", 3), *words]


def test_tokens_come_after_the_row_they_are_in(tmp_path):
    path = tmp_path / "items.tsv"
    path.write_text("item\ttext\n1\tThe dog.\n2\tthe fox\n")
    for reset in (False, True):
        options = EvalConfig(text_field="text", reset_on_document=reset)
        rows, item = {}, None
        for event in evaluate(toy("sentencepiece"), [path], options, RUNTIME, per_token=True):
            if isinstance(event, Row):
                item = event.fields["item"]
            elif isinstance(event, TokenScore):
                rows[item] = rows.get(item, b"") + event.text
        assert rows == {"1": b"The dog.\n", "2": b"the fox\n"}


def test_no_column_changes_a_score(prose):
    model = toy("sentencepiece")
    plain = words_of(model, [prose])
    assert [replace(word, columns={}) for word in words_of(model, [prose], columns=ALL)] == plain
