import itertools
import re
from dataclasses import replace

import pytest
import torch
from toys import PROSE, RUNTIME, VARIANTS, slow_bits, toy

from xlcli.config import GenerateConfig, StreamConfig
from xlcli.errors import ConfigError, ResourceError, StateError
from xlcli.events import Generated, GeneratedText, Notice
from xlcli.generation import generate, generate_prompts
from xlcli.inference import MAX_ROWS, find_decoder
from xlcli.kernels import decode
from xlcli.model.decoder import table_bytes
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store.state_files import load_state, save_state
from xlcli.store.weights import round_weights
from xlcli.streaming import stream


def run(
    model, prompt=b"The ", *, seed=1, resume=None, save=None, interrupted=lambda: False, runtime=RUNTIME, **options
):
    """Texts by sample, and results."""
    options.setdefault("max_new_tokens", 30)
    texts, results = {}, []
    for event in generate(
        model, prompt, GenerateConfig(**options), runtime, seed=seed, resume=resume, save=save, stop=interrupted
    ):
        if isinstance(event, GeneratedText):
            assert event.sample == len(results)
            texts[event.sample] = texts.get(event.sample, b"") + event.text
        elif isinstance(event, Generated):
            results.append(event)
    return texts, results


def slow_sample(model, prompt, options, seed, n, mem_len=9):
    """One token at a time, everything before it read afresh for each."""
    ids = [model.tokenizer.start_id, *model.tokenizer.encode(prompt).tolist()]
    rng = SampleRNG(seed, ids[1:])
    start = len(ids)
    with torch.inference_mode():
        for _ in range(n):
            state = model.network.init_state(1, mem_len=mem_len, segment_len=model.config.train.segment_len)
            ids += sample_tokens(
                model.network.logits(torch.tensor([ids]), state)[0], [rng], options.sampling(model.tokenizer.kind)
            )
    return ids[start:]


def written(tokenizer, prompt, ids):
    """Text of new tokens. White space divides words, and none is written twice or at the end."""
    if tokenizer.kind != "words":
        return tokenizer.decode(ids)
    lines = [line.split() for line in tokenizer.decode(ids).split(b"\n")]
    text = b"\n".join(b" ".join(line) for line in lines)
    return b" " * (bool(lines[0]) and prompt[-1:] not in (b"", b"\n")) + text


def test_words_and_numbers_are_divided_from_those_before_them():
    for kind, prompt, pattern in (("words", b"the dog", r"\S+"), ("ids", b"1 2", r"\d+")):
        model, saved = toy(kind), []
        texts, [result] = run(model, prompt, seed=3, max_new_tokens=9, logprobs=1, save=saved.append)
        whole = prompt.decode() + result.text
        assert re.fullmatch(rf"(?:{pattern}(?: |\n+|$))*", whole)
        assert model.tokenizer.encode(whole.encode()).tolist()[2:] == [each.token for each in result.logprobs]
        assert texts[0] == b"".join(each.text for each in result.logprobs) == result.text.encode()
        more, _ = run(model, b"", seed=None, max_new_tokens=1, resume=saved[0])
        assert more[0][:1].isspace() or whole.endswith("\n")
    assert not run(toy("words"), b"the\n", seed=3, max_new_tokens=2)[0][0].startswith(b" ")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
@pytest.mark.parametrize(
    ("prompt", "mem_len"), [(b"", 9), (b"The ", 9), (b"The quick", 0), (PROSE.encode() * 2, 9), (PROSE.encode(), 0)]
)
def test_equals_the_slow_way(kind, prompt, mem_len):
    model = toy(kind)
    options = GenerateConfig(temperature=1.0, repetition_penalty=1.2, top_p=0.9, max_new_tokens=25)
    ids = slow_sample(model, prompt, options, 5, 25, mem_len)
    _, [result] = run(model, prompt, seed=5, mem_len=mem_len, **options.model_dump(exclude={"mem_len"}))
    assert result.text == written(model.tokenizer, prompt, ids).decode("utf-8", "replace")
    assert (result.tokens, result.seed, result.stop_reason) == (25, 5, "length")
    assert result.prompt == prompt.decode()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mem_len", [0, 9])
def test_every_model_writes_as_the_slow_way_several_texts_at_a_time(variant, mem_len):
    model = toy(variant=variant)
    options = GenerateConfig(temperature=1.0, max_new_tokens=20, num_samples=3)
    _, results = run(model, b"The fox", seed=5, mem_len=mem_len, **options.model_dump(exclude={"mem_len"}))
    for result in results:
        ids = slow_sample(model, b"The fox", options, result.seed, 20, mem_len)
        assert result.text == model.tokenizer.decode(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("variant", ["universal", "adaptive"])
def test_depth_is_chosen_when_writing(variant):
    model = toy(variant=variant, n_steps=5)
    options = GenerateConfig(temperature=1.0, max_new_tokens=15, n_steps=5)
    _, [result] = run(model, b"The fox", seed=5, **options.model_dump())
    ids = slow_sample(model, b"The fox", options, 5, 15)
    assert result.text == model.tokenizer.decode(ids).decode("utf-8", "replace")


def test_seeds_are_recoverable_and_each_samples_own():
    model = toy()
    options = {"temperature": 1.2, "max_new_tokens": 20}
    _, three = run(model, seed=40, num_samples=3, **options)
    assert [r.seed for r in three] == [40, 41, 42]
    assert len({r.text for r in three}) == 3
    for result in three:
        assert run(model, seed=result.seed, **options)[1][0].text == result.text
    _, [unknown] = run(model, seed=None, **options)
    assert run(model, seed=unknown.seed, **options)[1][0].text == unknown.text
    assert run(model, seed=None, **options)[1][0].seed != unknown.seed


def test_more_samples_than_go_side_by_side_come_in_order():
    texts, results = run(toy(), num_samples=19, max_new_tokens=3, temperature=1.0)
    assert [r.sample for r in results] == list(range(19))
    assert all(texts.get(r.sample, b"").decode(errors="replace") == r.text for r in results)


class Scripted:
    """Stands for a network: after a prompt of one byte it gives the bytes of a text, whatever was read."""

    def __init__(self, network, text):
        self.inner, self.text = network, text

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def logits(self, tokens, state):
        _, state = self.inner.logits(tokens, state)
        best = torch.tensor([self.text[min(max(state.seen - 2, 0), len(self.text) - 1)]] * len(tokens))
        return torch.nn.functional.one_hot(best, 256).double() * 100, state


def scripted(text):
    model = toy()
    object.__setattr__(model, "network", Scripted(model.network, text.encode()))
    return model


def test_stop_texts_span_tokens_and_never_show():
    model = scripted("abcEN END more")
    events = list(generate(model, b"x", GenerateConfig(temperature=0.0, stop=("END",)), RUNTIME, seed=1))
    assert events[-1].stop_reason == "stop"
    assert events[-1].text == "abcEN "
    assert events[-1].tokens == 9
    assert b"".join(e.text for e in events[:-1]) == b"abcEN "


def test_characters_are_shown_whole():
    model = scripted("caf\u00e9 \u4e16\U0001f98a")
    pieces = [
        e.text.decode()
        for e in generate(model, b"x", GenerateConfig(temperature=0.0, max_new_tokens=13), RUNTIME, seed=1)
        if isinstance(e, GeneratedText)
    ]
    assert pieces == list("caf\u00e9 \u4e16\U0001f98a")
    cut = list(generate(scripted("\u4e16"), b"x", GenerateConfig(temperature=0.0, max_new_tokens=2), RUNTIME, seed=1))
    assert cut[0].text == "\u4e16".encode()[:2]
    assert cut[1].text == "\ufffd"


def test_samples_may_end_at_different_times():
    model = toy()
    for seed in range(3):
        _, together = run(model, seed=seed, num_samples=4, temperature=1.0, max_new_tokens=40)
        stops = (next(c for c in together[1].text[5:] if c.isascii()),)
        events = list(
            generate(
                model, b"The ", GenerateConfig(num_samples=4, temperature=1.0, max_new_tokens=40, stop=stops), RUNTIME,
                seed=seed,
            )
        )  # fmt: skip
        ended = [e for e in events if isinstance(e, Generated)]
        for before, after in zip(together, ended, strict=True):
            assert after.text == before.text.split(stops[0])[0]
            assert after.stop_reason == ("stop" if stops[0] in before.text else "length")


def test_continuing_from_a_state_is_never_having_stopped():
    model, saved = toy("sentencepiece"), []
    options = {"temperature": 1.0, "repetition_penalty": 1.3}
    whole, _ = run(model, seed=3, max_new_tokens=24, **options)
    first, _ = run(model, seed=3, max_new_tokens=11, save=saved.append, **options)
    [kept] = saved
    assert kept.model_state.seen == len(model.tokenizer.encode(b"The ")) + 11
    second, [result] = run(model, b"", seed=None, max_new_tokens=13, resume=kept, **options)
    assert first[0] + second[0] == whole[0]
    assert result.seed == 3


def test_a_prompt_may_be_given_in_two_parts():
    model, saved = toy(), []
    whole, _ = run(model, b"The fox and", seed=3, temperature=0.0)
    run(model, b"The fox", max_new_tokens=0, save=saved.append)
    assert run(model, b" and", seed=3, temperature=0.0, resume=saved[0])[0] == whole


def test_an_interrupted_prompt_is_read_to_its_end_later():
    model, saved, asked = toy("sentencepiece"), [], itertools.count()
    prompt = PROSE.encode() * 30
    whole, _ = run(model, prompt, seed=3, temperature=0.0)
    first, _ = run(model, prompt, interrupted=lambda: next(asked) > 1, save=saved.append)
    assert first == {}
    assert saved[0].model_state.seen == 1024
    assert run(model, b"", seed=3, temperature=0.0, resume=saved[0])[0] == whole


def test_a_streams_state_is_continued_and_the_other_way_round():
    model, saved = toy("sentencepiece"), []
    keep = lambda session: saved.append(session.fork())  # noqa: E731
    whole, _ = run(model, b"The fox and the dog", temperature=0.0)
    list(stream(model, [b"The fo", b"x and the"], StreamConfig(), RUNTIME, save=keep))
    assert run(model, b" dog", temperature=0.0, resume=saved[0])[0] == whole

    run(model, b"The fox", temperature=0.0, max_new_tokens=0, save=keep)
    *_, line, stats = stream(model, [b" and\n"], StreamConfig(), RUNTIME, resume=saved[1])
    assert (line.byte, line.text, stats.bytes) == (0, b" and\n", 5)
    assert line.bits == pytest.approx(sum(slow_bits(model, b"The fox and\n")[-line.tokens :]))


def test_no_tokens_and_no_prompt():
    texts, [result] = run(toy(), b"", max_new_tokens=0)
    assert (texts, result.text, result.tokens, result.stop_reason) == ({}, "", 0, "length")


def test_no_sample_begins_after_an_interruption():
    _, results = run(toy(), num_samples=4 * MAX_ROWS, max_new_tokens=1000, interrupted=lambda: True)
    assert 0 < len(results) <= MAX_ROWS
    assert {result.stop_reason for result in results} == {"interrupted"}


def test_interrupted():
    asked = itertools.count()
    _, [result] = run(toy(), max_new_tokens=1000, interrupted=lambda: next(asked) > 10)
    assert result.stop_reason == "interrupted"
    assert 0 < result.tokens < 20
    _, [result] = run(toy(), PROSE.encode() * 20, interrupted=lambda: True)
    assert (result.stop_reason, result.tokens) == ("interrupted", 0)


def test_misuse():
    model, saved = toy(), []
    with pytest.raises(ConfigError, match="num_samples=1"):
        run(model, num_samples=2, save=saved.append)
    run(model, save=saved.append)
    with pytest.raises(StateError, match="mem_len=9"):
        run(model, mem_len=4, resume=saved[0])
    two = replace(saved[0], model_state=saved[0].model_state.select([0, 0]))
    with pytest.raises(StateError, match=r"\b2\b"):
        run(model, resume=two)


def test_hash_rounds_are_those_of_the_state():
    model, saved = toy(variant="lsh"), []
    whole, _ = run(model, b"The fox", temperature=0.0, n_hashes=2)
    run(model, b"The fox", max_new_tokens=0, save=lambda session: saved.append(session.fork()))
    for n_hashes in (None, 2):
        assert run(model, b"", temperature=0.0, n_hashes=n_hashes, resume=saved[0].fork())[0] == whole
    with pytest.raises(ConfigError, match="hash rounds"):
        run(model, n_hashes=3, resume=saved[0])


def test_a_state_is_sampled_anew_with_another_seed():
    """The tokens that the repetition penalty looks at stay."""
    model, saved = toy(), []
    options = {"temperature": 1.0, "repetition_penalty": 1.5, "max_new_tokens": 20}
    first, _ = run(model, seed=3, save=lambda session: saved.append(session.fork()), **options)
    prompt = b"The " + first[0]
    other, [result] = run(model, b"", seed=9, resume=saved[0].fork(), **options)
    assert result.seed == 9
    assert other == run(model, prompt, seed=9, **options)[0]
    assert other != run(model, b"", seed=None, resume=saved[0].fork(), **options)[0]


def test_samples_of_a_later_batch_can_be_repeated_alone():
    """What earlier samples wrote is no token of theirs, which a repetition penalty would show."""
    model, options = toy(), {"temperature": 1.0, "repetition_penalty": 1.5, "max_new_tokens": 12}
    _, results = run(model, num_samples=18, **options)
    for result in results[15:]:
        assert run(model, seed=result.seed, **options)[1][0].text == result.text


ROUNDED = [("float32", "float32"), ("bfloat16", "int8")]
"""Number types of weights and memory."""


def rounded_toy(encoding, kind="bytes"):
    """Model in float32, for which there are kernels."""
    model = toy(kind, dtype=torch.float32)
    round_weights(model.network, encoding)
    return replace(model, encoding=encoding, weight_dtype=encoding)


def logprobs(model, **options):
    _, results = run(model, temperature=1.0, logprobs=0, **options)
    return [[token.logprob for token in each.logprobs] for each in results if isinstance(each, Generated)]


@pytest.mark.parametrize(("encoding", "memory_dtype"), ROUNDED)
def test_continuing_from_a_saved_state_is_never_having_stopped_to_the_bit(encoding, memory_dtype, tmp_path):
    model, path = rounded_toy(encoding), tmp_path / "state"
    [whole] = logprobs(model, memory_dtype=memory_dtype, max_new_tokens=20)

    def save(session):
        save_state(path, session, model=model)

    [first] = logprobs(model, memory_dtype=memory_dtype, max_new_tokens=8, save=save)
    resume = load_state(path, model=model, device="cpu")
    [second] = logprobs(model, prompt=b"", seed=None, max_new_tokens=12, resume=resume)
    assert first + second == whole


@pytest.mark.parametrize(("encoding", "memory_dtype"), ROUNDED)
def test_a_sample_of_a_batch_can_be_repeated_alone_to_the_bit(encoding, memory_dtype):
    model = rounded_toy(encoding)
    options = {"memory_dtype": memory_dtype, "max_new_tokens": 12}
    whole = logprobs(model, num_samples=4, **options)
    assert [logprobs(model, seed=seed, **options)[0] for seed in range(1, 5)] == whole


def test_a_memory_that_is_exact_in_16_bits_is_continued():
    """Under autocast keys and values have 16 bits, whichever type was asked for."""
    model, saved = toy(dtype=torch.float32), []
    options = {"runtime": replace(RUNTIME, dtype=torch.bfloat16), "memory_dtype": "float32", "max_new_tokens": 3}
    run(model, save=saved.append, **options)
    run(model, resume=saved[0].fork(), **options)
    with pytest.raises(StateError, match=r"memory_dtype.*bfloat16"):
        run(model, resume=saved[0], **options | {"runtime": RUNTIME})


def test_tables_and_weights_of_kernels_are_checked_before_the_prompt_is_read(monkeypatch):
    model = toy(dtype=torch.float32)
    free = model.config.model.inference_bytes(1, 512, 9) + table_bytes(model.network, 9)
    for module in ("xlcli.inference", "xlcli.machine"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda device="cpu": free)
    list(stream(model, [b"The fox"], StreamConfig(), RUNTIME))
    with pytest.raises(ResourceError):
        run(model)
    assert "decoder" not in vars(model)
    model.decoder  # noqa: B018
    run(model, max_new_tokens=1)


def test_kernels_are_compiled_before_the_first_word_unless_stopped(monkeypatch):
    model, asked = toy(dtype=torch.float32), []
    monkeypatch.setattr(decode, "is_compiled", lambda *types: False)
    monkeypatch.setattr(decode, "compile_kernel", lambda *types, stop=None: asked.append(types))
    events = list(generate(model, b"The", GenerateConfig(max_new_tokens=3), RUNTIME, seed=1))
    assert [isinstance(event, Notice) for event in events] == [True] + [False] * (len(events) - 1)
    assert not any(
        isinstance(event, Notice) for event in generate(model, b"", GenerateConfig(max_new_tokens=1), RUNTIME)
    )
    assert len(asked) == 1
    *_, end = generate(model, b"The", GenerateConfig(max_new_tokens=3), RUNTIME, stop=lambda: len(asked) > 1)
    assert (end.tokens, end.stop_reason) == (0, "interrupted")


def test_kernels_are_not_used_once_the_network_has_moved():
    """They read the weights where they were."""
    model = toy(dtype=torch.float32)
    assert find_decoder(model, RUNTIME) is not None
    model.network.double()
    assert find_decoder(model, RUNTIME) is None


def test_a_prompt_that_ends_in_a_blank_gets_a_notice_where_tokens_begin_with_one():
    options = GenerateConfig(max_new_tokens=1)
    for kind, n_expected in (("sentencepiece", 1), ("bytes", 0)):
        for prompt, n_odd in ((b"The dog ", 1), (b"The dog", 0), (b"The dog \n", 0), (b"", 0), (b"The dog\xc2\xa0", 1)):
            events = generate(toy(kind), prompt, options, RUNTIME)
            odd = [each.text for each in events if isinstance(each, Notice) and "a blank at the end" in each.text]
            assert len(odd) == n_odd * n_expected
    events = [*generate_prompts(toy("sentencepiece"), [b"The dog", b"The ", b"the fox "], options, RUNTIME)]
    [notice] = [each.text for each in events if isinstance(each, Notice)]
    assert "2 with a blank at the end (prompt 2: 'The<U+0020>'" in notice


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "ids"])
def test_a_text_ends_at_each_token_that_the_source_of_a_model_names(kind):
    """As in transformers, but for the text of the token."""
    model, prompt = toy(kind), b"1 2" if kind == "ids" else b"The "
    _, [whole] = run(model, prompt, seed=3, logprobs=0)
    ids = [each.token for each in whole.logprobs]
    firsts = sorted({ids.index(token) for token in ids} - {0})
    for at in firsts[::4]:
        for ends in (ids[at], [ids[at]], [ids[firsts[-1]], ids[at]]):
            ending = replace(model, record={"imported": {"eos_token_id": ends}})
            texts, [result] = run(ending, prompt, seed=3, logprobs=0)
            assert (result.tokens, result.stop_reason) == (at + 1, "stop")
            assert [each.token for each in result.logprobs] == ids[: at + 1]
            assert texts.get(0, b"") == b"".join(each.text for each in whole.logprobs[:at])


def test_a_line_end_of_a_model_of_words_ends_no_text():
    model = toy("words")
    record = {"imported": {"eos_token_id": model.tokenizer.start_id}}
    for prompt in (b"the", b"dog"):
        texts, [result] = run(replace(model, record=record), prompt, seed=3)
        assert texts == run(model, prompt, seed=3)[0]
        assert result.stop_reason == "length"
