"""Ranks: environment variables, and operations of processes that are joined by gloo."""

import json
import os
import re
import socket

import pytest
from launching import outputs, start

from xlcli.errors import ConfigError, LostRankError, RankError
from xlcli.ranks import STORE, Ranks, environment, is_lost, is_timeout, join

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_without_variables_there_is_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with join() as ranks:
        assert ranks == Ranks() == environment({})
    assert ranks.is_first
    assert ranks.gather({"a": [1]}) == [{"a": [1]}]
    assert ranks.broadcast("x") == "x"
    assert ranks.rows(7) == slice(0, 7)


def test_the_variables_of_torchrun():
    own = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    ranks = environment(own | ADDRESS)
    assert ranks == Ranks(rank=5, size=8, local_rank=1, local_size=4, restarts=2)
    assert ranks.rows(16) == slice(10, 12)
    assert environment({"RANK": "1", "WORLD_SIZE": "2"} | ADDRESS) == Ranks(1, 2, 1, 2)


@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}, {"WORLD_SIZE": "2", "RANK": "2"} | ADDRESS]
    + [
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for port in ("abc", "0", "65536", "-1", "1" * 5000)
    ],
)
def test_contradicting_variables_are_refused(variables):
    named = "MASTER_PORT" if variables.get("MASTER_PORT") not in (None, "29500") else "WORLD_SIZE|torchrun"
    with pytest.raises(ConfigError, match=named):
        environment(variables)


def alone():
    """A rank of two; the other one does not come."""
    try:
        with join(timeout=0.6):
            pass
    except LostRankError as error:
        print(error.message)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("place", ["file", pytest.param("address", marks=pytest.mark.exhaustive)])
def test_a_rank_gives_up_waiting_for_the_other(rank, place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {STORE: "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if place == "address" else {}
    (code, out, error), *_ = outputs(
        start(1, "import test_ranks; test_ranks.alone()", variables={"RANK": rank, "WORLD_SIZE": "2"} | address)
    )
    assert (code, error) == (0, "")
    assert re.findall(r"\d(?:\.\d)?", out) == [str(rank), "2", "0.6"]


@pytest.mark.parametrize(
    ("text", "is_slow"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", False),
        (
            "[gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[::1]:1$0",
            False,
        ),
        ("[gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 1000ms for recv operation to complete", True),
    ],
)
def test_a_lost_rank_and_one_that_does_not_answer_are_different(text, is_slow):
    assert is_lost(RuntimeError(text))
    assert is_timeout(RuntimeError(text)) == is_slow


def operations():
    """One rank of two: its results of every operation; then the second one ends."""
    import torch

    try:
        with join(timeout=600) as ranks:  # the test takes less
            own = torch.full((2,), float(ranks.rank + 1))
            found = {
                "gather": ranks.gather({"rank": ranks.rank, "text": "x" * 10 * ranks.rank}),
                "broadcast": ranks.broadcast([ranks.rank]),
                "sum": ranks.sum(own.clone()).tolist(),
                "rows": ranks.gather_rows(own[:, None]).tolist(),
            }
            if ranks.is_first:
                ranks.publish("begun", "yes")
            found["published"] = ranks.published("begun")
            ranks.barrier()
            print(json.dumps(found), flush=True)
            if ranks.rank == 1:
                os._exit(9)
            while True:
                ranks.barrier()
    except RankError as error:
        print(error.message)


def test_operations_of_two_processes_and_the_loss_of_one():
    (code, first, error), (lost, second, _) = outputs(start(2, "import test_ranks; test_ranks.operations()"))
    assert (code, lost) == (0, 9), error
    first, message = first.splitlines()
    first, second = json.loads(first), json.loads(second)
    for found in (first, second):
        assert found["gather"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 10}]
        assert found["broadcast"] == [0]
        assert found["sum"] == [3.0, 3.0]
        assert found["published"] == "yes"
    assert first["rows"] == [[1.0], [1.0], [2.0], [2.0]]
    assert "lost" in message


def stuck():
    """Rank 0 of two, for whose connection gloo waits without a limit; rank 1 ends before they are connected."""
    import threading

    import torch.distributed as dist  # noqa: TID251

    if os.environ["RANK"] == "1":
        return
    dist.init_process_group = lambda *args, **options: threading.Event().wait()
    try:
        with join(timeout=0.5):
            pass
    except LostRankError as error:
        print(error.message)


@pytest.mark.exhaustive
def test_a_rank_that_is_lost_while_the_ranks_connect_ends_the_others():
    (code, out, error), (second, _, _) = outputs(start(2, "import test_ranks; test_ranks.stuck()"))
    assert (code, second) == (0, 0), error
    assert re.findall(r"\d(?:\.\d)?", out) == ["0", "2", "0.5"]


def twice():
    """A rank that joins another one for two runs, one after the other."""
    for run in (1, 2):
        with join(timeout=60) as ranks:
            print(ranks.gather([ranks.rank, run]), flush=True)


@pytest.mark.parametrize("place", [pytest.param("file", marks=pytest.mark.exhaustive), "address"])
def test_ranks_join_again_for_the_next_run(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {STORE: "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if place == "address" else {}
    for code, out, error in outputs(start(2, "import test_ranks; test_ranks.twice()", variables=address)):
        assert (code, error) == (0, "")
        assert out.splitlines() == ["[[0, 1], [1, 1]]", "[[0, 2], [1, 2]]"]


def fault():
    """A rank for which the process group fails for another reason than a lost rank."""
    import torch.distributed as dist  # noqa: TID251

    def fail(*args, **options):
        raise RuntimeError("no such backend")

    dist.init_process_group = fail
    try:
        with join(timeout=60):
            pass
    except RuntimeError as error:
        print(type(error).__name__, error)


def test_another_fault_is_not_reported_as_a_lost_rank():
    (code, out, error), *_ = outputs(
        start(1, "import test_ranks; test_ranks.fault()", variables={"RANK": "0", "WORLD_SIZE": "2"})
    )
    assert (code, error) == (0, "")
    assert out == "RuntimeError no such backend\n"
