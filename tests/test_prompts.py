"""Many prompts in batches: the samples of each are those of the prompt alone."""

import itertools

import pytest
from test_generation import ROUNDED, rounded_toy, run
from toys import PROSE, RUNTIME, VARIANTS, toy
from variants import thinned

from xlcli.config import GenerateConfig
from xlcli.events import Generated
from xlcli.generation import generate_prompts
from xlcli.store.state_files import load_state, save_state

PROMPTS = [b"The ", b"", b"She said that", PROSE.encode()[:50], b"\xff\n", b"The "]
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.9}


def results(model, prompts, *, seed=3, resume=None, interrupted=lambda: False, runtime=RUNTIME, **options):
    options = GenerateConfig(**SAMPLING | options)
    events = generate_prompts(model, prompts, options, runtime, seed=seed, resume=resume, stop=interrupted)
    return [event for event in events if isinstance(event, tuple)]


def facts(result):
    return result.sample, result.prompt, result.text, result.tokens, result.seed, result.stop_reason


def values(result):
    """Log-probabilities of all tokens, and of the best ones in their places."""
    return [each.logprob for token in result.logprobs for each in (token, *token.best)]


@pytest.mark.parametrize(("variant", "mem_len"), [(None, 0), ("lsh", 0), (None, 9), *((name, 9) for name in VARIANTS)])
def test_each_prompt_has_the_samples_of_the_prompt_alone(variant, mem_len):
    model = toy(variant=variant)
    found = results(model, PROMPTS, mem_len=mem_len, stop=("e f",))
    for prompt, of_prompt in zip(PROMPTS, found, strict=True):
        _, alone = run(model, prompt, seed=3, **SAMPLING | {"mem_len": mem_len, "stop": ("e f",)})
        assert list(map(facts, of_prompt)) == list(map(facts, alone))


CASES = [*itertools.product([None, "local", "adaptive", "reversible"], ("bfloat16", "int8"), (9, 0, 40))]


@pytest.mark.parametrize("case", thinned(CASES, CASES[::5]), ids=str)
def test_prompts_with_rounded_memory_have_the_samples_of_each_alone(case):
    """The log-probabilities, too, which show what changes no sampled token."""
    variant, dtype, mem_len = case
    model, options = toy(variant=variant), {"mem_len": mem_len, "memory_dtype": dtype, "logprobs": 3}
    plain = results(model, PROMPTS, **options | {"memory_dtype": "float32"})
    n_rounded = 0
    for prompt, [result], [exact] in zip(PROMPTS, results(model, PROMPTS, **options), plain, strict=True):
        _, [alone] = run(model, prompt, seed=3, **SAMPLING | options)
        assert facts(result) == facts(alone)
        assert values(result) == pytest.approx(values(alone), abs=1e-9)
        n_rounded += facts(result) != facts(exact) or values(result) != pytest.approx(values(exact), abs=1e-5)
    assert n_rounded == len(PROMPTS)


@pytest.mark.parametrize("kind", ["sentencepiece", "words"])
def test_several_samples_and_more_prompts_than_rows(kind, monkeypatch):
    monkeypatch.setattr("xlcli.inference.MAX_ROWS", 4)
    model = toy(kind)
    for prompt, of_prompt in zip(PROMPTS, results(model, PROMPTS, num_samples=3), strict=True):
        _, alone = run(model, prompt, seed=3, **SAMPLING | {"num_samples": 3})
        assert list(map(facts, of_prompt)) == list(map(facts, alone))


@pytest.mark.parametrize(("encoding", "memory_dtype"), ROUNDED)
def test_kernels_compute_each_prompt_to_the_bit_as_alone(encoding, memory_dtype):
    model = rounded_toy(encoding, "sentencepiece")
    options = {"logprobs": 2, "mem_len": 30, "memory_dtype": memory_dtype}
    for prompt, [result] in zip(PROMPTS, results(model, PROMPTS, **options), strict=True):
        _, [alone] = run(model, prompt, seed=3, **SAMPLING | options)
        assert facts(result) == facts(alone)
        assert result.logprobs == alone.logprobs


def test_all_prompts_follow_a_saved_state(tmp_path):
    model = toy()
    run(model, b"The dog", save=lambda session: save_state(tmp_path / "s", session, model=model))
    resume = lambda: load_state(tmp_path / "s", model=model, device="cpu")  # noqa: E731
    for prompt, [result] in zip(PROMPTS, results(model, PROMPTS, resume=resume()), strict=True):
        _, [alone] = run(model, prompt, seed=3, resume=resume(), **SAMPLING)
        assert facts(result) == facts(alone)


@pytest.mark.parametrize("options", [{"context_cache": 50}, {"adapt": True}])
def test_learned_values_belong_to_each_prompt(options):
    model = toy()
    for prompt, [result] in zip(PROMPTS[:4], results(model, PROMPTS[:4], **options), strict=True):
        _, [alone] = run(model, prompt, seed=3, **SAMPLING | options)
        assert facts(result) == facts(alone)


def test_without_a_seed_each_prompt_has_its_own():
    found = results(toy(), [b"The "] * 4, seed=None)
    assert len({result.seed for [result] in found}) == 4
    for [result] in found:
        _, [alone] = run(toy(), b"The ", seed=result.seed, **SAMPLING)
        assert facts(result) == facts(alone)


def test_no_prompts_no_tokens_and_interruption():
    model, n_calls = toy(), itertools.count()
    assert results(model, []) == []
    assert [result.text for [result] in results(model, PROMPTS, max_new_tokens=0)] == [""] * len(PROMPTS)
    found = results(model, PROMPTS, interrupted=lambda: next(n_calls) > 30)
    assert {result.stop_reason for [result] in found} <= {"interrupted", "length"}
    assert all(isinstance(result, Generated) for [result] in found)
