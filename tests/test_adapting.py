"""The option `adapt` of the workflows: figures of eval and stream agree, and a stream goes on where it stopped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import PROSE, RUNTIME, toy

from xlcli.config import EvalConfig, GenerateConfig, StreamConfig, validate
from xlcli.errors import ConfigError, DivergedError, StateError
from xlcli.evaluation import evaluate
from xlcli.events import Generated, Score, TokenScore
from xlcli.generation import generate, generate_prompts
from xlcli.inference import InferenceSession
from xlcli.runtime import Runtime
from xlcli.store.folder import ADAPTATION_RATE, IMPORTED_ADAPTATION_RATE
from xlcli.store.state_files import load_state, save_state
from xlcli.streaming import stream

TEXT = PROSE.encode()
ADAPT = {"adapt": True, "adapt_block": 16, "adapt_lr": 0.01}


def bits(model, portions, *, resume=None, save=None, stop=lambda: False, **options):
    events = stream(
        model, portions, StreamConfig(emit="tokens", **ADAPT | options), RUNTIME, resume=resume, save=save, stop=stop
    )
    return [event.bits for event in events if isinstance(event, TokenScore)]


def evaluated(model, path, **options):
    *_, score = (e for e in evaluate(model, [path], EvalConfig(**ADAPT | options), RUNTIME) if isinstance(e, Score))
    return score


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.mark.parametrize("variant", [None, "lsh", "adaptive"])
def test_eval_and_stream_agree(variant, text):
    model = toy(variant=variant)
    score = evaluated(model, text)
    assert score.nats == pytest.approx(sum(bits(model, [TEXT])) * 0.6931471805599453, rel=1e-9)
    assert (score.adapt, score.batch_size, score.by_context) == (True, 1, ())
    assert score.bits_per_byte < evaluated(model, text, adapt=False).bits_per_byte - 0.1


@pytest.mark.parametrize("adapt_weights", ["all", "blocks"])
def test_a_stopped_stream_goes_on_from_its_file(adapt_weights, tmp_path):
    model, path = toy("sentencepiece"), tmp_path / "s"
    expected = bits(model, [TEXT], adapt_weights=adapt_weights)
    known, seen = [], []

    def stopped():
        seen.append(1)
        return len(seen) > 40

    save = lambda session: save_state(path, session, model=model)  # noqa: E731
    portions = [TEXT[i : i + 5] for i in range(0, len(TEXT), 5)]
    known = bits(model, portions, save=save, stop=stopped, adapt_weights=adapt_weights)
    resume = load_state(path, model=model, device="cpu")
    rest = TEXT[resume.stream.n_bytes + len(resume.pending.data) :]
    known += bits(model, [rest], resume=resume)
    assert known == pytest.approx(expected, abs=1e-8)


def test_generation_learns_from_its_prompt_only(tmp_path):
    model, saved = toy(), []
    options = GenerateConfig(max_new_tokens=40, temperature=1.0, **ADAPT)
    events = generate(model, TEXT[:100], options, RUNTIME, seed=1, save=saved.append)
    (one,) = (event for event in events if isinstance(event, Generated))
    state = saved[0].model_state
    assert state.adaptation.n_steps == 100 // 16
    three = [
        event
        for event in generate(model, TEXT[:100], options.model_copy(update={"num_samples": 3}), RUNTIME, seed=1)
        if isinstance(event, Generated)
    ]
    assert three[0].text == one.text
    (plain,) = (
        event
        for event in generate(model, TEXT[:100], GenerateConfig(max_new_tokens=40, temperature=1.0), RUNTIME, seed=1)
        if isinstance(event, Generated)
    )
    assert plain.text != one.text


def test_a_saved_cache_continues_no_samples():
    model, saved = toy(), []
    options = GenerateConfig(max_new_tokens=4, context_cache=50)
    list(generate(model, TEXT[:60], options, RUNTIME, seed=1, save=saved.append))
    several = GenerateConfig(max_new_tokens=4, num_samples=3)
    for run in (
        lambda: generate(model, b"The", several, RUNTIME, resume=saved[0].fork()),
        lambda: generate_prompts(model, [b"The"], several, RUNTIME, resume=saved[0].fork()),
    ):
        with pytest.raises(ConfigError, match="cache"):
            list(run())


def test_predictions_are_the_scores():
    model = toy()
    ids = model.tokenizer.encode(TEXT[:90])
    whole, session = (InferenceSession.open(model, RUNTIME, GenerateConfig(**ADAPT), None) for _ in range(2))
    for i, nats in enumerate(whole.score(ids)[0].tolist()):
        branch = replace(session, state=session.state.fork())
        assert -branch.predict().log_softmax(-1)[0, ids[i]].item() == pytest.approx(nats, abs=1e-9)
        session.score(ids[i : i + 1])


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({}, ADAPT, "adapt"),
        (ADAPT, ADAPT | {"adapt_block": 32}, r"adapt_block\D+16\D+32\b"),
    ],
)
def test_a_state_is_not_continued_with_other_settings(first, then, said):
    model, saved = toy(), []
    list(stream(model, [TEXT[:50]], StreamConfig(**first), RUNTIME, save=saved.append))
    with pytest.raises(StateError, match=said):
        list(stream(model, [TEXT[50:]], StreamConfig(**then), RUNTIME, resume=saved[-1]))


def test_a_state_that_learns_goes_on_without_being_asked():
    model, saved, settings = toy(), [], ADAPT | {"context_cache": 30}
    list(stream(model, [TEXT[:50]], StreamConfig(**settings), RUNTIME, save=lambda made: saved.append(made.fork())))
    asked, silent = (
        [event.bits for event in stream(model, [TEXT[50:]], StreamConfig(**then), RUNTIME, resume=saved[-1].fork())]
        for then in (settings, {})
    )
    assert silent[:-1] == asked[:-1]


def test_a_saved_state_gives_the_settings(tmp_path):
    model, saved = toy(), []
    list(stream(model, [TEXT[:50]], StreamConfig(**ADAPT), RUNTIME, save=saved.append))
    list(stream(model, [TEXT[50:]], StreamConfig(adapt=True), RUNTIME, resume=saved[-1], save=saved.append))
    assert saved[-1].model_state.adaptation.settings["adapt_block"] == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [({"batch_size": 2}, "batch_size"), ({"span": "growing"}, "span"), ({"reset_on_document": True}, "document")],
)
def test_what_needs_another_reading_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EvalConfig(**ADAPT, **options)


def test_float16_is_refused(text):
    with pytest.raises(ConfigError, match="float16"):
        list(evaluate(toy(), [text], EvalConfig(**ADAPT), Runtime(torch.device("cpu"), torch.float16, 1)))


@pytest.mark.parametrize("options", [{"memory_dtype": "bfloat16"}, {"memory_dtype": "int8"}])
def test_rounded_memory_adapts(options, text):
    model = toy(dtype=torch.float32)
    assert (
        evaluated(model, text, **options).bits_per_byte < evaluated(model, text, adapt=False, **options).bits_per_byte
    )


@pytest.mark.parametrize("variant", [None, "zeros", "local"])
def test_bfloat16_products_adapt(text, variant):
    runtime = Runtime(torch.device("cpu"), torch.bfloat16, 1)
    model = toy(dtype=torch.float32, variant=variant)
    scores = [
        next(e for e in evaluate(model, [text], EvalConfig(**o), runtime) if isinstance(e, Score)) for o in (ADAPT, {})
    ]
    assert scores[0].bits_per_byte < scores[1].bits_per_byte


@pytest.mark.parametrize("options", [{}, {"context_cache": 9}], ids=str)
def test_weights_that_are_not_finite_have_diverged(options):
    ids = toy().tokenizer.encode(b"text")
    for predict in (
        lambda session: session.score(ids),
        lambda session: session.predict(),
        lambda session: session.read(ids, lambda: False),
    ):
        session = InferenceSession.open(toy(), RUNTIME, GenerateConfig(**ADAPT | options), None)
        for weight in session.state.adaptation.weights.values():
            weight.fill_(torch.nan)
        with pytest.raises(DivergedError, match="adapt"):
            predict(session)
    with pytest.raises(ConfigError, match="adapt_lr"):
        validate(GenerateConfig, {"adapt_lr": 1.5})


def test_the_division_into_calls_leaves_no_trace_in_the_weights():
    """Else differences in rounding grow with every step."""
    model, ids, found = toy(), np.frombuffer(TEXT[:96], np.uint8).astype(np.int32), []
    for sizes in ([96], [7, 30, 1, 58], [1] * 96):
        session = InferenceSession.open(model, RUNTIME, GenerateConfig(**ADAPT), None)
        for part in np.split(ids, np.cumsum(sizes)[:-1]):
            session.score(part)
        found.append(session.state.adaptation)
    assert found[0].n_steps == 96 // ADAPT["adapt_block"]
    for other in found[1:]:
        assert all(torch.equal(weight, other.weights[name]) for name, weight in found[0].weights.items())


@pytest.mark.parametrize(
    ("record", "is_lower"),
    [
        ({}, False),
        ({"imported": {"format": "llama"}}, True),
        ({"init": {"model": "m", "weights": "w", "imported": {"format": "llama"}}}, True),  # trained from one
        ({"init": {"model": "books", "weights": "w"}}, False),
    ],
)
def test_the_default_rate_is_lower_for_an_imported_model(record, is_lower):
    model = replace(toy(), record=record)

    def rate(**options):
        saved = []
        settings = StreamConfig(adapt=True, adapt_block=16, **options)
        list(stream(model, [TEXT[:40]], settings, RUNTIME, save=saved.append))
        return saved[-1].model_state.adaptation.settings["adapt_lr"]

    assert rate(adapt_lr=0.01) == 0.01
    assert rate() == (IMPORTED_ADAPTATION_RATE if is_lower else ADAPTATION_RATE)
    assert IMPORTED_ADAPTATION_RATE < ADAPTATION_RATE


def test_a_state_without_a_rate_is_damaged():
    """The rate of a state is never chosen anew, which would change its scores."""
    model, saved = toy(), []
    list(stream(model, [TEXT[:40]], StreamConfig(adapt=True), RUNTIME, save=saved.append))
    state = saved[-1].model_state
    settings = {**state.adaptation.settings, "adapt_lr": None}
    damaged = replace(saved[-1], model_state=replace(state, adaptation=replace(state.adaptation, settings=settings)))
    with pytest.raises(StateError, match="damaged"):
        bits(model, [TEXT[:40]], resume=damaged)
