import importlib.util
import json
import os
from pathlib import Path

import pytest
from conftest import TEXT

KEYS = {
    "model", "file", "bytes", "chars", "words", "tokens", "nats", "bits_per_byte", "bits_per_char", "perplexity",
    "word_perplexity", "mem_len", "segment_len", "batch_size", "span", "tokens_per_second", "peak_rss_bytes",
    "seconds", "device", "dtype", "by_context",
}  # fmt: skip


def test_the_newest_model_and_its_own_text_by_default(run, model):
    done = run("eval", "--mem-len", "8")
    assert done.code == 0, done.err
    text = done.out.decode()
    assert text.startswith("tiny on ")
    assert "bits per byte" in text
    assert "memory of 8 tokens" in text
    assert "context seen" in text
    assert "segments of" in run("eval", "--mem-len", "0").out.decode()


def test_json_has_the_promised_keys(run, model):
    done = run("eval", "--json")
    score = json.loads(done.out)
    assert done.out.count(b"\n") == 1
    assert set(score) == KEYS
    assert set(score["by_context"][0]) == {"from", "to", "tokens", "bits_per_byte"}
    assert score["bytes"] == len(TEXT) * 8
    assert score["nats"] / score["bytes"] / 0.6931471805599453 == pytest.approx(score["bits_per_byte"])


def test_sweep(run, model):
    scores = json.loads(run("eval", "--json", "--sweep-mem-len", "0,4,8").out)["sweep"]
    assert [score["mem_len"] for score in scores] == [0, 4, 8]
    assert all(set(score) == KEYS for score in scores)
    assert run("eval", "--sweep-mem-len", "0,4").out.decode().count("\n0 ") == 1


def test_standard_input_and_files(run, model, monkeypatch, tmp_path):
    (tmp_path / "a").write_bytes(TEXT)
    (tmp_path / "b").write_bytes(TEXT)
    both = json.loads(run("eval", tmp_path / "a", tmp_path / "b", "--json").out)
    assert both["bytes"] == 2 * len(TEXT)
    with (tmp_path / "a").open("rb") as file:
        saved = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            done = run("eval", "-", "--json")
        finally:
            os.dup2(saved, 0)
            os.close(saved)
    assert json.loads(done.out)["bytes"] == len(TEXT)


def test_per_token_lines_spell_the_text_and_add_up(run, model, tmp_path):
    done = run("eval", "--json", "--per-token", tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert all(set(row) == {"byte", "text", "bits"} for row in rows)
    assert [row["byte"] for row in rows] == sorted(row["byte"] for row in rows)
    assert "".join(row["text"] for row in rows).encode() == TEXT * 8
    score = json.loads(done.out)
    assert sum(row["bits"] for row in rows) / score["bytes"] == pytest.approx(score["bits_per_byte"], abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_per_token_to_standard_output(run, model):
    done = run("eval", "--per-token", "-")
    assert len([json.loads(line) for line in done.out.splitlines()]) == len(TEXT) * 8
    assert "bits per byte" in done.err


def test_per_token_needs_a_folder_and_one_memory_length(run, model):
    assert run("eval", "--per-token", "nowhere/t.jsonl").code == 2
    assert run("eval", "--per-token", "t.jsonl", "--sweep-mem-len", "0,1").code == 2
    assert not Path("t.jsonl").exists()


def test_a_plot_without_its_library_says_how_to_install_it(run, model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run("eval", "--plot", "x.png")
    assert done.code == 2
    assert 'pip install "xlcli[plot]"' in done.err


def test_plot(run, model):
    pytest.importorskip("matplotlib")
    assert run("eval", "--plot", "x.png").code == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("without_torch")
def test_dry_run_needs_no_torch(run, model):
    plan = json.loads(run("eval", "--dry-run", "--json", "--mem-len", "100").out)
    assert plan["mem_len"] == 100
    assert plan["parameters"] > 1000
    assert plan["state_bytes"] == 2 * 4 * plan["batch_size"] * 2 * 100 * 16
    assert "parameters" in run("eval", "--dry-run").out.decode()


def test_no_model_at_all(run, monkeypatch):
    monkeypatch.setattr("xlcli.store.discover.models_folder", lambda: Path("nowhere"))
    done = run("eval")
    assert (done.code, done.err) == (3, "xlcli: there is no model yet.\n       Train one: xlcli train FILE.\n")


@pytest.mark.usefixtures("without_torch")
def test_a_misspelt_model(run, model):
    done = run("eval", "-m", "tinny")
    assert done.code == 3
    assert "Did you mean tiny?" in done.err
