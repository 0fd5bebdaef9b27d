"""Plan of runs on several processes, by hand arithmetic, and its operations and sizes against those of a run."""

import pytest
import torch

from xlcli import config
from xlcli.bench.cost import count_operations
from xlcli.config import ClusterConfig
from xlcli.errors import ConfigError
from xlcli.model.build import build_on_meta
from xlcli.runtime import Runtime, has_bfloat16_units
from xlcli.training import scaling
from xlcli.training.scaling import Exchange, Sizes

CPU = Runtime(torch.device("cpu"), torch.float32, 1)
SIZE = Sizes(parameters=1_000, blocks=(300, 300), matrices=(100, 100, 50), state=2_000, operations=0, narrow=400)


def settings(train=None, model=None, runtime=None, **cluster):
    shape = {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}, "feedforward": {"ffn_dim": 24}, "vocab_size": 32}
    sizes = {"batch_size": 8, "segment_len": 8, "mem_len": 8, "max_steps": 99}
    tree = {"model": {**shape, **(model or {})}, "train": sizes | (train or {}), "cluster": cluster}
    return config.make(tree, {"runtime": runtime or {}})


@pytest.mark.parametrize(("n", "share"), [(1, 0), (2, 0.5), (4, 0.75), (1024, 1023 / 1024)])
def test_a_ring_sends_this_share_of_the_bytes(n, share):
    assert scaling.replicated(n, 4_000).n_bytes == 2 * share * 4_000
    exchange = scaling.sharded(
        n, SIZE._replace(matrices=()), bfloat16=False, grad_accum=1, direction_bytes=4, gloo=False
    )
    # Parameters of blocks forward and backward, others once; gradients.
    assert exchange.n_bytes == share * 4 * (2 * 600 + 400 + 1_000)
    only_blocks = SIZE._replace(blocks=(500, 500), matrices=())
    exchange = scaling.sharded(n, only_blocks, bfloat16=False, grad_accum=1, direction_bytes=4, gloo=False)
    assert exchange.n_bytes == 3 * share * 4_000


def test_a_sharded_model_gathers_for_each_microbatch_in_its_number_type_and_reduces_once():
    exchange = scaling.sharded(2, SIZE, bfloat16=True, grad_accum=3, direction_bytes=2, gloo=False)
    assert exchange.n_bytes == (3 * (2 * (2 * 400 + 4 * 200) + 4 * 400) + 4 * 1_000 + (4 + 2) * 250) / 2
    assert exchange.last_bytes == (4 + 2) * 250 / 2
    assert exchange.n_messages == 3 * (2 * 2 + 1) + len(SIZE.matrices) + SIZE.n_batches(2) + (2 + 1) + 2


def test_gloo_reduces_to_parts_by_an_all_reduce_and_beside_no_computation():
    nccl, gloo = (
        scaling.sharded(4, SIZE, bfloat16=False, grad_accum=1, direction_bytes=4, gloo=gloo) for gloo in (False, True)
    )
    assert gloo.n_bytes - nccl.n_bytes == 0.75 * 4_000
    assert gloo.n_messages - nccl.n_messages == 3 * (2 + 1)
    made = settings(runtime={"shard": True}, peak_flops=1e9, bandwidth=1e6, latency=0.0)
    plan = scaling.plan(made, CPU, 4)
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.exchange_seconds)


def test_a_model_that_is_divided_as_a_whole_gathers_its_parameters_once():
    made = [settings(runtime={"shard": True}, model={"stack": {"kind": kind}}) for kind in ("standard", "reversible")]
    standard, reversible = (scaling.sizes(build_on_meta(each.model), each) for each in made)
    assert standard.narrow == sum(standard.blocks) > 0
    assert (reversible.narrow, reversible.blocks) == (0, ())


def test_messages_follow_one_another_in_each_bucket():
    assert scaling.replicated(1, 10**9).n_messages == 0
    n_bytes = 3 * scaling.BUCKET_BYTES
    assert scaling.replicated(4, n_bytes) == Exchange(1.5 * n_bytes, 6 * (3 + 1), 1.5 * scaling.BUCKET_BYTES)


def test_a_step_hides_what_fits_beside_the_computation():
    cluster = ClusterConfig(bandwidth=100.0, latency=0.5)
    exchange = Exchange(n_bytes=800.0, n_messages=4, last_bytes=100.0)
    assert scaling.exchange_seconds(exchange, cluster) == 8 + 4 * 0.5
    assert scaling.exposed_seconds(exchange, cluster, beside=0.0) == 10
    assert scaling.exposed_seconds(exchange, cluster, beside=3.0) == 7
    assert scaling.exposed_seconds(exchange, cluster, beside=50.0) == 1  # the last bytes


def test_muon_takes_three_products_in_five_iterations():
    square, wide = 2 * 4 * 4 * 4, 2 * 4 * 4 * 6
    assert scaling.orthogonalization(4, 4) == 5 * 3 * square
    assert scaling.orthogonalization(4, 6) == 5 * (wide + square + wide)


def test_the_plan_divides_rows_and_with_shards_the_model():
    made = settings(peak_flops=1e9, utilization=0.5, bandwidth=1e6, latency=0.0)
    n_parameters = build_on_meta(made.model).n_parameters
    one, four = (scaling.plan(made, CPU, n) for n in (1, 4))
    assert (four.n_ranks, four.rows, four.sharded) == (4, 2, False)
    assert four.parameter_bytes == four.gradient_bytes == one.parameter_bytes == 4 * n_parameters
    assert four.optimizer_bytes == one.optimizer_bytes
    assert 4 * four.recurrent_bytes == one.recurrent_bytes == 4 * 8 * 2 * 8 * 16
    matrices = scaling.sizes(build_on_meta(made.model), made).matrices
    directions = (2 if has_bfloat16_units(CPU.device) else 4) * sum(matrices)
    assert four.sent_bytes == 1.5 * 4 * n_parameters + 0.75 * directions
    assert four.compute_seconds == four.operations / 0.5e9
    assert four.tokens_per_second == 8 * 8 / four.step_seconds
    assert four.efficiency == four.compute_seconds / four.step_seconds < one.efficiency == 1
    divided = settings(runtime={"shard": True}, peak_flops=1e9)
    shards = scaling.plan(divided, CPU, 4)
    blocks = scaling.sizes(build_on_meta(divided.model), divided).blocks
    outside = n_parameters - sum(blocks)
    # A quarter of all, two gathered blocks, the gradients of one, and the parameters outside of blocks.
    assert shards.parameter_bytes == pytest.approx(n_parameters + 4 * (2 * max(blocks) + outside), abs=4)
    assert shards.gradient_bytes == pytest.approx(n_parameters + 4 * (max(blocks) + outside), abs=4)
    assert shards.optimizer_bytes == pytest.approx(one.optimizer_bytes / 4, abs=4)
    assert shards.recurrent_bytes == four.recurrent_bytes


@pytest.mark.parametrize("changes", [{"train": {"grad_accum": 2}}, {"model": {"stack": {"kind": "reversible"}}}])
def test_gradients_are_whole_until_the_last_microbatch_or_the_whole_model_is_reduced(changes):
    made = settings(runtime={"shard": True}, peak_flops=1e9, **changes)
    n_parameters = build_on_meta(made.model).n_parameters
    assert scaling.plan(made, CPU, 4).gradient_bytes == pytest.approx((1 + 4) * n_parameters, abs=4)


def test_longer_memories_send_nothing_more():
    for shard in (False, True):
        made = [settings({"mem_len": m}, runtime={"shard": shard}, peak_flops=1e9) for m in (0, 8, 64)]
        plans = [scaling.plan(each, CPU, 4) for each in made]
        assert len({(plan.sent_bytes, plan.messages) for plan in plans}) == 1
        assert plans[2].recurrent_bytes > plans[1].recurrent_bytes


@pytest.mark.parametrize("train", [{}, {"grad_accum": 2}, {"recompute_activations": True}, {"mem_len": 0}])
@pytest.mark.parametrize("n_layers", [1, 4])
def test_operations_are_those_of_a_step(train, n_layers):
    import numpy as np

    from xlcli.text.tokens import TokenFile
    from xlcli.training.run import make_training_run

    made = settings({"lr": 1e-3, "memory": "hidden", **train}, {"n_layers": n_layers}, peak_flops=1e9)
    run = make_training_run(made, CPU, TokenFile(np.arange(300) % 32, 300), 0)
    for _ in range(3):  # until memory is full
        run.train_step(0.0)
    counted = count_operations(lambda: run.train_step(0.0))
    assert scaling.plan(made, CPU, 1).operations == pytest.approx(counted, rel=0.02)


def test_the_peak_is_measured():
    assert scaling.measure_flops(CPU) > 1e8


def test_a_batch_that_the_processes_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"--batch-size 6 or 9"):
        scaling.plan(settings(peak_flops=1e9), CPU, 3)
