"""Sizes that do not fit any machine are refused before anything of that size is allocated."""

import re

import pytest

HUGE = str(2**31)


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        (["--batch-size", HUGE, "--max-steps", "2"], r"\bbatch_size \d+"),
        (["--segment-len", HUGE, "--max-steps", "2"], r"\bsegment_len \d+"),
        (["--mem-len", HUGE, "--max-time", "9s"], r"\bmem_len \d+"),
        (["--set", "model.dim=131072", "--set", "model.n_layers=1000"], r"^\D+$"),
        (["--set", f"model.feedforward.ffn_dim={HUGE}"], r"^\D+$"),
        (["--set", f"model.dim={HUGE}", "--dry-run"], r"^\D+$"),
        (["--set", "model.position.kind=learned", "--set", f"model.position.max_len={HUGE}"], r"^\D+$"),
    ],
)
def test_a_run_larger_than_any_machine_is_refused(run, flags, fits, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A line of text.\n" * 40)
    done = run("train", tmp_path / "text.txt", "-o", "out", "--preset", "tiny", "--device", "cpu", *flags)
    assert done.code == 4
    assert re.search(fits, re.search(r"[\d,.]+ GiB\b.*[\d,.]+ GiB\b.*\n(.*)\n$", done.err)[1])


def test_a_plan_that_does_not_fit_is_shown_and_refused(run, model, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A line of text.\n" * 40)
    wide = ["--set", "model.dim=16384", "--set", "model.n_layers=200"]
    done = run("train", tmp_path / "text.txt", "--preset", "tiny", "--device", "cpu", "--dry-run", *wide)
    assert done.code == 4
    assert re.search(r"[\d,.]+ GiB\b.*[\d.]+ GiB\b", done.out.decode())
    assert re.search(r"\nxlcli: .*[\d,.]+ GiB\b.*[\d,.]+ GiB\b.*\n +.*\n$", done.err)
    endless = run("stream", "--dry-run", "--mem-len", HUGE)
    assert endless.code == 4
    assert "GiB" in endless.out.decode()
    assert "GiB" in endless.err
    assert run("eval", "--dry-run", "--mem-len", HUGE).code == 0  # the text is short


def test_settings_that_fit_are_those_of_a_run_that_starts(run, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A line of text.\n" * 40)
    start = ["train", tmp_path / "text.txt", "-o", "out", "--preset", "tiny", "--max-steps", "2", "--device", "cpu"]
    found = re.search(r"(batch_size) (\d+)", run(*start, "--batch-size", HUGE).err)
    assert run(*start, f"--set=train.{found[1]}={found[2]}", "--dry-run").code == 0


def hashed(untrained, name="hashed", **changes):
    table = {"kind": "lsh", "n_heads": 4, "head_dim": 4, "n_buckets": [256, 256], "bucket_size": 16, "n_hashes": 8}
    return untrained(name, n_layers=1, attention=table, position={"kind": "none"}, **changes)


@pytest.mark.parametrize("arguments", [["eval"], ["generate", "-n", "3", "a"], ["stream", "models/hashed/valid.txt"]])
def test_tables_that_do_not_fit_are_refused(run, untrained, arguments):
    hashed(untrained, stack={"kind": "universal", "n_steps": 1024})
    done = run(*arguments, "-m", "hashed")
    assert (done.code, done.out) == (4, b"")
    assert re.search(r"\bhashed\b.*[\d,]+\.\d GiB\b", done.err)


def test_a_stream_has_room_for_its_whole_memory(run, model):
    done = run("stream", model / "valid.txt", "--mem-len", HUGE)
    assert done.code == 4
    length = int(re.search(r"\bmem_len (\d+)", done.err)[1])
    assert run("stream", model / "valid.txt", "--mem-len", str(length)).code == 0


def test_sizes_beyond_the_text_cost_nothing(run, model):
    # The weight of distant tokens depends on the memory length, unless their distances are not limited.
    usual = run("eval", "--mem-len", "400", "--set=eval.clamp_len=none", "--json").out
    sizes = ["--mem-len", HUGE, "--segment-len", HUGE, f"--set=eval.batch_size={HUGE}", "--set=eval.clamp_len=none"]
    assert run("eval", *sizes, "--json").out.split(b'"mem_len"')[0] == usual.split(b'"mem_len"')[0]
    assert run("generate", "-n", "3", "--mem-len", HUGE, "a").code == 0
