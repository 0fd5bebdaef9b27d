"""Evaluation on several ranks: the score, the loss by context and the bits of each token are those of one process."""

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from launching import has_threads_of_gloo, outputs, refuse_unpickling, start
from toys import PROSE, RUNTIME, VARIANTS, toy

from xlcli.config import EvalConfig
from xlcli.errors import XLError
from xlcli.evaluation import evaluate
from xlcli.evaluation.division import Division
from xlcli.events import Notice, Score, TokenScore
from xlcli.ranks import SINGLE, Ranks, join

LINES = "".join(json.dumps({"text": line}) + "\n" for line in PROSE.splitlines() if line)
TEXTS = {"prose.txt": PROSE * 3, "lines.jsonl": LINES}
CASES = {
    "sequences": ("prose.txt", None, {"mem_len": 9, "batch_size": 5, "segment_len": 8}),
    "by default": ("prose.txt", None, {}),
    "memories": ("prose.txt", None, {"sweep_mem_len": (0, 3, 9), "batch_size": 4, "segment_len": 8}),
    "windows": ("prose.txt", None, {"mem_len": 0, "stride": 3, "segment_len": 20, "batch_size": 6}),
    "documents": ("lines.jsonl", None, {"reset_on_document": True, "batch_size": 3}),
    "rounded": ("prose.txt", None, {"memory_dtype": "int8", "batch_size": 4, "segment_len": 8}),
    "steps": ("prose.txt", "adaptive", {"batch_size": 4, "segment_len": 8}),
    "hashed": ("prose.txt", "lsh", {"batch_size": 2, "segment_len": 8}),
    "columns": ("prose.txt", None, {"columns": "rank,entropy,layers=1", "batch_size": 4, "segment_len": 8}),
    "one sequence": ("prose.txt", "linear", {}),
    "learning": ("prose.txt", None, {"context_cache": 50}),
    "refused": ("prose.txt", None, {"n_hashes": 2}),
}
"""Text, variant of the toy model, and options of an evaluation."""
ASIDE = ("tokens_per_second", "peak_rss_bytes", "seconds", "batch_size")
assert set(VARIANTS) >= {"adaptive", "lsh", "linear"}


def results(folder, ranks):
    """Scores, bits and warnings of each case, on the first rank; nothing on others."""
    found = {}
    for name, (text, variant, options) in CASES.items():
        model = toy(variant=variant)
        per_token = "sweep_mem_len" not in options
        try:
            events = list(
                evaluate(
                    model, [folder / text], EvalConfig(**options), replace(RUNTIME, ranks=ranks), per_token=per_token
                )
            )
        except XLError as error:
            found[name] = str(error)
            continue
        scores = [dataclasses.asdict(event) for event in events if isinstance(event, Score)]
        found[name] = {
            "scores": [{key: value for key, value in score.items() if key not in ASIDE} for score in scores],
            "batch_sizes": [score["batch_size"] for score in scores],
            "bits": [event.bits for event in events if isinstance(event, TokenScore)],
            "columns": [dict(event.prediction.columns) for event in events if getattr(event, "prediction", None)],
            "warnings": [event.text for event in events if isinstance(event, Notice) and event.level == "warning"],
        }
        assert ranks.is_first or not events
    return found


def ranked(folder):
    """One rank."""
    torch.set_num_threads(1)
    # Reads the compiled kernels, which are pickles of this user.
    list(evaluate(toy(), [Path(folder) / "prose.txt"], EvalConfig(**CASES["learning"][2]), RUNTIME))
    refuse_unpickling()
    with join(timeout=60) as ranks:
        print(json.dumps(results(Path(folder), ranks)))
        assert has_threads_of_gloo() == (sys.platform == "linux")
    assert not has_threads_of_gloo()


def close(found, expected):
    """Whether two results agree up to the rounding of float64."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == (pytest.approx(expected, rel=1e-9, abs=1e-12) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("size", [2])
def test_results_of_several_ranks_are_those_of_one(size, tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    (code, first, error), *others = outputs(
        start(size, f"import test_division; test_division.ranked({str(tmp_path)!r})")
    )
    assert code == 0, error
    first = json.loads(first)
    alone = json.loads(json.dumps(results(tmp_path, SINGLE)))
    for name, expected in alone.items():
        found = first[name]
        if isinstance(expected, str):
            assert found == expected
            continue
        assert close(found["scores"], expected["scores"]), name
        assert close(found["bits"], expected["bits"]), name
        assert close(found["columns"], expected["columns"]), name
        single = [size for size in found["batch_sizes"] if size == 1]
        assert bool(single) == any("sequence" in text for text in found["warnings"]), name
    assert alone["refused"] == first["refused"]
    assert first["one sequence"]["warnings"] == first["learning"]["warnings"] != []
    assert first["sequences"]["batch_sizes"] == alone["sequences"]["batch_sizes"] == [5]
    for code, out, error in others:
        assert code == 0, error
        assert all(not result["scores"] for result in json.loads(out).values() if isinstance(result, dict))


def test_other_ranks_wait_without_a_limit_while_one_sequence_is_read():
    class First(Ranks):
        said: ClassVar[list[object]] = []

        def broadcast(self, value):
            self.said.append(value)
            return value

    divided = Division(First(size=2))
    reader = divided.reader(0, toy().network)
    reader.init_state(4, offsets=[0, 1, 2, 3], mem_len=3, segment_len=8)
    assert divided.is_open
    reader.init_state(1, offsets=[0], mem_len=3, segment_len=8)
    assert not divided.is_open
    assert First.said[-1] == {"end": True}
