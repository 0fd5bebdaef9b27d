"""Times of the ranks of a run: own work, waiting, and the warning about a slow rank."""

import json
import platform
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
from launching import outputs, start
from runs import corpus, small, train

from xlcli.events import Notice, Step
from xlcli.ranks import join
from xlcli.store.records import read_metrics
from xlcli.training import balance, final, memory, workflow
from xlcli.training.balance import REPEAT, WINDOW, LagWatch, WorkTimer
from xlcli.training.run import TrainingRun

CALL = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import test_balance; test_balance.uneven()"
OWN = (1.0, 3.0)
"""Seconds of own work of each rank in a step, on a clock that only work and gathers advance."""
GATHER = 10.0
"""Seconds of a gather of parameters on that clock."""


def uneven():
    """Two ranks, of which the second takes longer: times and warnings of a whole and of a divided model, as JSON.

    With a whole model the second one works until the first one has ended its own work, which must not wait for the
    gradients of the second.
    """
    from xlcli.training import shard as divided

    clock, ended = SimpleNamespace(now=0.0), count()
    balance.time = SimpleNamespace(perf_counter=lambda: clock.now)
    balance.WINDOW = 4
    final.SAMPLE_TOKENS = 3
    workflow.memory = SimpleNamespace(
        n_parameters=memory.n_parameters, memory_bytes=lambda config, runtime: 2**28, require=memory.require
    )
    score, end, gather = TrainingRun.score, WorkTimer._end, divided._gather
    with join(timeout=120) as ranks:

        def slow(run, *args):
            output = score(run, *args)
            if not torch.is_grad_enabled():  # of validation
                return output
            clock.now += OWN[ranks.rank]
            if ranks.rank == 1 and not run.config.runtime.shard:
                ranks.published(f"ended {run.step}")
            return output

        def publish(timer):
            end(timer)
            if ranks.is_first:
                ranks.publish(f"ended {next(ended)}", None)

        def slow_gather(*args, **options):
            clock.now += GATHER
            return gather(*args, **options)

        TrainingRun.score, WorkTimer._end, divided._gather = slow, publish, slow_gather
        for name in ("whole", "divided"):
            tree = small(train={"max_steps": 6, "eval_every": 6}, runtime={"shard": name == "divided"})
            events = list(train(tree, ["corpus.txt"], Path(name), ranks=ranks))
            steps = [(e.rank_tokens_per_second, e.waiting_seconds) for e in events if isinstance(e, Step)]
            warnings = [e.text for e in events if isinstance(e, Notice) and e.text.startswith("rank ")]
            print(json.dumps({"name": name, "steps": steps, "warnings": warnings}), flush=True)


def test_own_work_and_waiting_of_two_ranks_and_the_name_of_the_slow_one():
    corpus()
    (code, out, error), (second, other, _) = outputs(start(2, CALL))
    assert (code, second) == (0, 0), error[-3000:]
    found, of_second = ([json.loads(line) for line in text.splitlines()] for text in (out, other))
    for each, same in zip(found, of_second, strict=True):
        assert (same["name"], same["steps"], same["warnings"]) == (each["name"], each["steps"], [])
        rates = [2 * 16 / own for own in OWN]  # two sequences of 16 tokens on each rank
        assert [step[0] for step in each["steps"]] == [rates] * 6
        expected = f"rank 1 ({platform.node()}) takes 3 s for its part of a step, 3.0 times the median of 1 s"
        assert [text[: len(expected)] for text in each["warnings"]] == [expected]
        rows = [row for row in read_metrics(Path(each["name"])) if "nats" in row]
        assert [row["rank_tokens_per_second"] for row in rows] == [[32.0, 10.7]] * 6
        assert [row["waiting_seconds"] for row in rows] == [step[1] for step in each["steps"]]
    whole, divided = ([step[1] for step in each["steps"]] for each in found)
    assert whole == [0.0] * 6
    # Two blocks are gathered in the forward and again in the backward pass, the other parameters once.
    assert divided == [5 * GATHER] * 6


def warned(watch, steps, *seconds):
    return [notice.text.split(" (")[0] for step in steps for notice in watch.observe(step, seconds)]


def test_a_slow_rank_is_reported_again_only_after_many_steps():
    watch = LagWatch(["a", "b", "c"])
    assert warned(watch, range(WINDOW), 1.0, 1.4, 1.0) == []
    assert warned(watch, range(WINDOW, WINDOW + REPEAT), 1.0, 1.0, 1.6) == ["rank 2"]
    assert warned(watch, range(WINDOW + REPEAT, 4 * WINDOW + REPEAT), 1.0, 1.0, 1.6) == ["rank 2"]


def test_single_slow_steps_are_not_reported():
    watch = LagWatch(["a", "b"])
    assert warned(watch, range(1), 1.0, 100.0) + warned(watch, range(1, WINDOW), 1.0, 1.0) == []
