"""The number of threads follows the duration of steps, at a small cost, and every change is on record."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from runs import After, corpus, go, of_kind, small

from xlcli.cli import report
from xlcli.events import Notice, Plan, Step
from xlcli.store.commit import latest
from xlcli.store.records import read_metrics, read_record
from xlcli.training import clock as clocks
from xlcli.training import loop, workflow
from xlcli.training.threads import (
    LOOP_CHECKS,
    RETRY_SECONDS,
    TRIAL_SHARE,
    WINDOW,
    ThreadTuner,
    thread_changes,
    thread_counts,
)

MEASURED = {"threads": None}


class Machine:
    """Steps of one second on one core, nine tenths of it parallel; longer if threads wait for busy cores."""

    def __init__(self, cores=2, busy=0, delay=3.0):
        self.cores, self.busy, self.delay = cores, busy, delay
        self.loops = 0

    def step(self, threads):
        return (0.1 + 0.9 / threads) * (self.delay if threads > self.cores - self.busy else 1.0)

    def loop(self, threads):
        self.loops += 1
        return self.step(threads) / 1000

    def tuner(self, **options):
        return ThreadTuner(self.cores, self.loop, **options)

    def run(self, tuner, steps):
        """Number of threads of each step, and the trials that ended."""
        used, trials = [], []
        for _ in range(steps):
            used.append(tuner.threads)
            if trial := tuner.observe(self.step(tuner.threads)):
                trials.append(trial)
        return used, trials


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(1, (1,)), (2, (2, 1)), (3, (3, 2, 1)), (6, (6, 5, 3, 1)), (64, (64, 63, 32, 16, 8, 4, 2, 1))],
)
def test_candidates(limit, counts):
    assert thread_counts(limit) == counts


def test_all_threads_are_kept_on_an_idle_machine_after_one_trial():
    machine = Machine()
    tuner = machine.tuner(warmup_steps=3)
    used, trials = machine.run(tuner, 2000)
    assert used[: 3 + WINDOW] == [2] * (3 + WINDOW)
    assert used[3 + WINDOW : 5 + WINDOW] == [1, 1], "one step that is not measured, one that is clear"
    assert set(used[5 + WINDOW :]) == {2}
    assert [(trial.tried, trial.adopted) for trial in trials] == [(1, False)]
    assert (trials[0].before_seconds, trials[0].tried_seconds) == (machine.step(2), machine.step(1))
    assert machine.loops == 3 * 2


@pytest.mark.parametrize("delay", [3.0, 50.0])
def test_fewer_threads_from_the_start_beside_another_process_and_more_when_it_has_ended(delay):
    machine = Machine(busy=1, delay=delay)
    tuner = machine.tuner()
    used, trials = machine.run(tuner, 1000)
    assert (set(used), trials) == ({1}, []), "the loop says that two threads are slower"
    machine.busy = 0
    used, trials = machine.run(tuner, 30)
    assert [(trial.tried, trial.adopted) for trial in trials] == [(2, True)]
    assert used[-1] == 2


@pytest.mark.parametrize(("delay", "slow_steps"), [(2.0, WINDOW // 2 + 1), (50.0, 1)])
def test_fewer_threads_when_steps_become_slower(delay, slow_steps):
    machine = Machine(delay=delay)
    tuner = machine.tuner()
    machine.run(tuner, 200)
    assert tuner.chosen == 2
    machine.busy = 1
    used, _ = machine.run(tuner, 50)
    assert used.index(1) == slow_steps
    assert tuner.chosen == 1


@pytest.mark.parametrize("delay", [3.0, 50.0])
def test_trials_that_the_loop_recommends_wrongly_lose_a_small_share(delay):
    machine = Machine(busy=1, delay=delay)
    tuner = ThreadTuner(2, lambda threads: 1.0 / threads)
    used, trials = machine.run(tuner, 50)
    assert trials[0].adopted
    assert tuner.chosen == 1
    used, trials = machine.run(tuner, 20_000)
    assert len(trials) > 3
    lost = sum(machine.step(threads) - machine.step(1) for threads in used)
    assert 0 < lost < 1.2 * TRIAL_SHARE * 20_000


def test_more_threads_are_tried_only_if_the_loop_is_fast_after_consecutive_steps():
    start = [True, False, True]  # the slowest of three decides the number at the start
    checks = LOOP_CHECKS - 1
    fast = iter([*start, *[True] * checks, False, *[True] * checks, False, *[True] * (checks + 1)])
    tuner = ThreadTuner(2, lambda threads: 1.0 if threads == 1 else 0.5 if next(fast) else 2.0)
    used = []
    while tuner.threads == 1:
        used.append(tuner.threads)
        tuner.observe(0.5)
    wait = int(RETRY_SECONDS / 0.5)
    assert len(used) == WINDOW + checks + 2 * (wait + checks)
    assert list(fast) == []


def test_single_slow_steps_change_nothing():
    machine = Machine()
    tuner = machine.tuner()
    machine.run(tuner, 100)
    for step in range(200):
        tuner.observe(5.0 if step % 3 == 0 else machine.step(2))
        assert tuner.threads == 2


def test_steps_that_have_become_slower_with_any_number_of_threads_cost_one_trial():
    machine = Machine()
    tuner = machine.tuner()
    machine.run(tuner, 100)
    trials = [tuner.observe(2 * machine.step(tuner.threads)) for _ in range(500)]
    assert [trial.adopted for trial in trials if trial] == [False]
    assert tuner.chosen == 2


@pytest.mark.parametrize(("busy", "best"), [(0, 8), (1, 7), (3, 4), (4, 4), (6, 2), (7, 8)])
@pytest.mark.parametrize("loop_is_right", [True, False])
def test_the_search_ends_at_the_fastest_candidate(busy, best, loop_is_right):
    machine = Machine(cores=8, busy=busy)
    tuner = machine.tuner() if loop_is_right else ThreadTuner(8, lambda threads: 1.0 / threads)
    machine.run(tuner, 60)
    assert tuner.chosen == best == min(thread_counts(8), key=machine.step)


def test_a_search_on_a_large_idle_machine_does_not_go_down_to_one_thread():
    tuner = ThreadTuner(64, lambda threads: 1.0 / threads)
    tried = [trial.tried for _ in range(5000) if (trial := tuner.observe(1.0 / tuner.threads))]
    assert (tried, tuner.chosen) == ([63, 32, 16, 8], 64)


def test_the_number_is_changed_as_long_as_it_helps():
    tuner = ThreadTuner(8, lambda threads: 1.0 / threads)
    tried = [trial.tried for _ in range(50) if (trial := tuner.observe(tuner.threads / 10))]
    assert (tried, tuner.chosen) == ([7, 4, 2, 1], 1)
    tried = [trial.tried for _ in range(500) if (trial := tuner.observe(1.0 / tuner.threads))]
    assert (tried, tuner.chosen) == ([2, 4, 7, 8], 8)


def test_trials_of_equal_speed_keep_their_distance():
    tuner = ThreadTuner(2, lambda threads: float(threads))
    assert tuner.chosen == 1
    tuner = ThreadTuner(2, lambda threads: 1.0)
    machine = Machine(busy=1)
    machine.run(tuner, WINDOW + 8)
    assert tuner.chosen == 1
    ends = [step for step in range(1000) if tuner.observe(0.1)]
    assert ends
    assert all(0.1 * (after - before) > RETRY_SECONDS for before, after in itertools.pairwise(ends))


def test_changes_leave_trials_out():
    rows = [(1, 2, False), (2, 1, True), (3, 1, False), (4, 1, False), (5, 2, True), (6, 1, False), (7, 2, False)]
    metrics = [{"step": step, "threads": threads, "trial": trial} for step, threads, trial in rows]
    assert thread_changes([{"step": 0, "best": True}, *metrics]) == [
        {"step": 1, "threads": 2}, {"step": 3, "threads": 1}, {"step": 7, "threads": 2},
    ]  # fmt: skip


# In a run


@pytest.fixture
def two_cores(monkeypatch):
    """Two threads, not given by the user, where a step with both takes longer; in truth one, for the speed of tests."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("xlcli.runtime.cpu_limit", lambda: 2)
    clock = Clock()
    monkeypatch.setattr(torch, "set_num_threads", clock.set_threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: clock.threads)
    monkeypatch.setattr(loop, "parallel_loop_seconds", lambda threads, n_parts: 1.0 / threads)
    for module in (clocks, loop, workflow):
        monkeypatch.setattr(module, "time", clock)


class Clock:
    """Stands in for `time`: advances with every look, faster with two threads."""

    now, threads = 0.0, 2

    def monotonic(self):
        self.now += 0.01 * self.threads
        return self.now

    def set_threads(self, threads):
        self.threads = threads


@pytest.mark.usefixtures("two_cores")
def test_a_run_measures_and_records_its_threads():
    events = go(small(runtime=MEASURED, train={"max_steps": 30}), corpus(), "m")
    assert torch.get_num_threads() == 2, "the number of the process is restored"
    plan = of_kind(events, Plan)[0]
    assert (plan.threads, plan.threads_measured) == (2, True)
    assert "up to 2 threads" in report.plan_text(plan)
    rows = [row for row in read_metrics(Path("m")) if "nats" in row]
    used = [(row["threads"], row["trial"]) for row in rows]
    begin = 2 + WINDOW  # one step fills memory, one more prepares kernels
    assert used == [(2, False)] * begin + [(1, True)] * 4 + [(1, False)] * (30 - begin - 4)
    notices = [event for event in of_kind(events, Notice) if "threads" in event.text]
    assert [notice.level for notice in notices] == ["info"]
    assert notices[0].text.startswith(f"step {begin + 4}  2 -> 1 threads: ")
    record = read_record(Path("m"))
    assert record["threads"] == [{"step": 1, "threads": 2}, {"step": begin + 5, "threads": 1}]
    assert record["runtime"]["threads"] is None


@pytest.mark.usefixtures("two_cores")
def test_a_resumed_run_measures_again():
    text, tree = corpus(), small(runtime=MEASURED, train={"max_steps": 30})
    After(15).run(tree, text, "m")
    facts = json.loads((latest(Path("m/checkpoints")).path / "state.json").read_bytes())
    assert facts["threads"] == "measured"
    events = go({}, text, "m", resume=True)
    assert not [notice for notice in of_kind(events, Notice) if notice.level == "warning"]
    changes = read_record(Path("m"))["threads"]
    assert [change["threads"] for change in changes] == [2, 1, 2, 1]
    assert changes[2]["step"] == 16
    fixed = go({"train": {"max_steps": 31}, "runtime": {"threads": 1}}, text, "m", resume=True)
    assert any("threads was measured and is 1" in notice.text for notice in of_kind(fixed, Notice))


@pytest.mark.usefixtures("two_cores")
def test_the_final_evaluation_uses_the_chosen_number(monkeypatch):
    used = []

    def watched(folder, runtime, *arguments):
        used.append((runtime.threads, torch.get_num_threads()))
        return (yield from final_evaluation(folder, runtime, *arguments))

    final_evaluation = loop.final_evaluation
    monkeypatch.setattr(loop, "final_evaluation", watched)
    steps = 2 + WINDOW + 1  # the run ends within a trial of one thread
    go(small(runtime=MEASURED, train={"max_steps": steps}), corpus(), "m")
    assert [row["threads"] for row in read_metrics(Path("m")) if "nats" in row][-1] == 1
    assert used == [(2, 2)]


@pytest.mark.parametrize("fixed", [{"threads": 2}, {"threads": None, "deterministic": True}])
@pytest.mark.usefixtures("two_cores")
def test_a_fixed_number_is_not_measured(fixed):
    try:
        events = go(small(runtime=fixed, train={"max_steps": 12}), corpus(), "m")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(of_kind(events, Step)) == 12
    assert not any("threads" in row for row in read_metrics(Path("m")))
    assert "threads" not in read_record(Path("m"))
