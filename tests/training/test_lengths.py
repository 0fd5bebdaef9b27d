"""Random segment and memory lengths: the text in order, the same run when resumed, the arithmetic of short lengths."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import PROSE, After, corpus, curve, go, of_kind, remains, small
from toys import RUNTIME, VARIANTS, toy

from xlcli import config
from xlcli.errors import ConfigError
from xlcli.events import Step, Trained
from xlcli.ops.span import Span
from xlcli.text.loaders import TrainLoader
from xlcli.text.tokens import TokenFile
from xlcli.training.run import TrainingRun
from xlcli.training.schedule import drawn_span, with_span
from xlcli.training.validation import check_finite


@pytest.mark.parametrize("train", [{"memory": "keyvalue"}, {"mem_len": 0}])
def test_a_resumed_run_equals_the_uninterrupted_one(train):
    tree = small(train={"random_lengths": True, **train})
    go(tree, corpus(), "whole")
    After(3).run(tree, corpus(), "m")
    go({}, corpus(), "m", resume=True)
    assert remains("m") == remains("whole")


def test_every_token_is_read_in_order_and_counted(monkeypatch):
    batches, following = [], TrainLoader.next

    def recorded(loader, segment_len):
        batches.append((loader.n_read, batch := following(loader, segment_len)))
        return batch

    monkeypatch.setattr(TrainLoader, "next", recorded)
    events = go(small(train={"random_lengths": True, "max_steps": None, "max_tokens": 700}), corpus(), "m")
    read = {n_read: batch.targets for n_read, batch in batches}  # the check before a save reads the next batch again
    assert sorted(read) == [sum(t.shape[1] for at, t in read.items() if at < n_read) for n_read in sorted(read)]
    text = np.frombuffer(Path(corpus()).read_bytes(), np.uint8)
    joined = np.concatenate([read[n_read] for n_read in sorted(read)], axis=1)
    assert (joined[0] == text[: joined.shape[1]]).all()
    sizes = [read[n_read].shape[1] for n_read in sorted(read)]
    assert len(set(sizes)) > 2
    assert min(sizes) >= 8
    assert max(sizes) <= 16
    steps = of_kind(events, Step)
    assert [step.tokens for step in steps] == [4 * sum(sizes[: i + 1]) for i in range(len(steps))]
    assert steps[-2].tokens < 700 <= steps[-1].tokens == of_kind(events, Trained)[0].tokens
    assert [row["tokens"] for row in curve("m") if "nats" in row] == [step.tokens for step in steps]


def test_lengths_depend_on_seed_and_step_and_stay_below_the_configured_ones():
    span = Span("growing", mem_len=7, segment_len=5)
    drawn = [drawn_span(span, seed, step) for seed in range(3) for step in range(100)]
    assert drawn == [drawn_span(span, seed, step) for seed in range(3) for step in range(100)]
    assert drawn[:100] != drawn[100:200]
    assert {length.segment_len for length in drawn} == {3, 4, 5}
    assert {length.mem_len for length in drawn} == set(range(1, 8))
    assert {length.kept_len for length in drawn} == {7}
    single = Span("segment", mem_len=0, segment_len=1)
    assert drawn_span(single, 0, 3) == single


@pytest.mark.parametrize("memory", ["hidden", "keyvalue"])
@pytest.mark.parametrize("span", ["growing", "uniform"])
@pytest.mark.parametrize("variant", [None, "local", "reversible"])
def test_a_short_memory_is_read_as_if_there_were_no_more(variant, span, memory):
    network = toy(variant=variant).network
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    state = network.init_state(2, mem_len=12, segment_len=10, span=span, memory=memory)
    state = network(ids[:, :20], state)[1]
    drawn = replace(state.span, mem_len=4, kept_len=12)
    found = network.score(ids[:, 20:30], ids[:, 21:31], with_span(state, drawn))
    short = replace(state.map(_last(4)), span=replace(state.span, mem_len=4))
    expected, _ = network.score(ids[:, 20:30], ids[:, 21:31], short)[:2]
    assert torch.equal(found.nll, expected)
    after = with_span(found.state, state.span)
    assert network.is_compatible(after)
    assert [layer.length for layer in after.layers] == [layer.length for layer in state.layers]
    whole = network(ids[:, 20:30], state)[1].layers[0]
    assert all(torch.equal(t, whole.tensors()[name]) for name, t in after.layers[0].tensors().items())


def _last(n):
    """The latest n tokens of the tensors of a memory, hidden (b m d) or keys and values (b h m e)."""
    return lambda t: t if t.ndim < 3 else t[:, -n:] if t.ndim == 3 else t[:, :, -n:]


def test_without_memory_every_step_begins_an_independent_segment():
    network = toy(mem_len=0).network
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    state, expected = network.init_state(1, mem_len=0, segment_len=8), []
    for start, size in ((0, 5), (5, 8), (13, 6)):
        new = network.init_state(1, mem_len=0, segment_len=8)
        expected.append(network.score(ids[:, start : start + size], ids[:, start + 1 : start + size + 1], new)[0])
        drawn = with_span(state, replace(state.span, segment_len=size))
        output = network.score(ids[:, start : start + size], ids[:, start + 1 : start + size + 1], drawn)
        state = with_span(output.state, state.span)
        assert torch.equal(output.nll, expected[-1])
        assert network.is_compatible(state)


def test_random_lengths_cannot_be_compiled():
    with pytest.raises(ConfigError, match=r"train\.random_lengths"):
        config.make({"train": {"random_lengths": True}, "runtime": {"compile": True}})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mem_len", [16, 0])
def test_every_variant_is_trained_with_random_lengths(variant, mem_len):
    model = config.merge(VARIANTS[variant], {"dropout": {"attention": 0.0}})
    tree = small(model=model, train={"random_lengths": True, "mem_len": mem_len})
    settings = config.make({"train": {"lr": 6e-3}}, tree)
    run = TrainingRun(settings, RUNTIME, TokenFile(np.frombuffer(PROSE.encode(), np.uint8), len(PROSE)), 10)
    for _ in range(4):
        run.train_step(0.0)
        assert all(run.model.is_compatible(state) for state in run.states)
    check_finite(run)
