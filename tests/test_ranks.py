"""Ranks: environment variables, and operations of processes that are joined by gloo."""

import json
import os
import socket

import pytest
from launching import outputs, start

from xlcli.errors import ConfigError, LostRankError, RankError
from xlcli.ranks import (
    SLURM_PORTS,
    Ranks,
    environment,
    first_host,
    is_lost,
    is_timeout,
    join,
    of_slurm,
    tasks_per_node,
)

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
    + [{"WORLD_SIZE": "2", "RANK": "1"} | ADDRESS | {"MASTER_PORT": port} for port in ("abc", "0", "65536", "-1")],
)
def test_contradicting_variables_are_refused(variables):
    named = "MASTER_PORT" if variables.get("MASTER_PORT") not in (None, "29500") else "WORLD_SIZE|torchrun"
    with pytest.raises(ConfigError, match=named):
        environment(variables)


def test_a_rank_without_the_first_one_says_so_and_gives_up():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (_, _, _), (code, out, error) = outputs(
        start(2, "import test_ranks; test_ranks.alone()", variables={"MASTER_PORT": str(port)})
    )
    assert (code, error) == (0, "")
    assert out.splitlines() == [
        f"waiting for rank 0 at 127.0.0.1:{port}, at most 0.6 seconds",
        f"cannot reach rank 0 at 127.0.0.1:{port}.",
    ]


def alone():
    """Rank 1 of two; rank 0 ends at once."""
    if os.environ["RANK"] == "0":
        return
    try:
        with join(timeout=0.6, notify=lambda text: print(text, flush=True)):
            pass
    except RankError as error:
        print(error.message)


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
    assert "another process of this run was lost" in message


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


def test_the_variables_of_srun():
    assert environment(SLURM) == Ranks(rank=5, size=7, local_rank=1, local_size=2)
    found = of_slurm(SLURM)
    assert found["MASTER_ADDR"] == "gpu07"
    assert int(found["MASTER_PORT"]) == int(of_slurm(SLURM | {"SLURM_PROCID": "0"})["MASTER_PORT"]) in SLURM_PORTS
    assert of_slurm(SLURM | {"MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("changes", [{"SLURM_STEP_ID": ""}, {"SLURM_NTASKS": "1"}, {"SLURM_PROCID": ""}])
def test_the_script_of_a_slurm_job_is_a_single_process(changes):
    assert environment(SLURM | changes) == Ranks()


def test_torchrun_in_a_slurm_job_has_precedence():
    assert environment(SLURM | ADDRESS | {"RANK": "0", "WORLD_SIZE": "2"}).size == 2
    assert environment(SLURM | ADDRESS | {"RANK": "0", "WORLD_SIZE": "1"}) == Ranks()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[3,5]", "n3"),
        ("rack[1-2]-gpu[04-07]", "rack1-gpu04"),
        ("n[01-99]x,b", "n01x"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_tasks_of_each_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("") == []


def stuck():
    """Rank 0 of two, for whose connection gloo waits without a limit."""
    import threading

    import torch.distributed as dist  # noqa: TID251

    if os.environ["RANK"] == "1":
        meet_only()
        return
    dist.init_process_group = lambda *args, **options: threading.Event().wait()
    try:
        with join(timeout=0.5):
            pass
    except LostRankError as error:
        print(error.message)


def meet_only():
    """Comes to the meeting, and ends before it is connected."""
    from xlcli.meeting import Wait, meet

    meet(1, 2, 0, Wait(60.0, print))


def test_a_rank_that_is_lost_while_the_ranks_connect_ends_the_others():
    (code, out, error), (second, _, _) = outputs(start(2, "import test_ranks; test_ranks.stuck()"))
    assert (code, second) == (0, 0), error
    assert out == "another process of this run was lost while they joined (noticed by rank 0).\n"
