import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from programs import Terminal

from xlcli import config
from xlcli.cli import render
from xlcli.cli.objects import score_object, to_json
from xlcli.cli.quantities import approximate_count, compact_number, format_age, format_bytes, format_duration
from xlcli.cli.render import Screen
from xlcli.cli.run_report import plan_text, step_line, trained_text
from xlcli.cli.score_report import describe_context, pairs_text, score_table, stats_line, sweep_text
from xlcli.events import ContextBin, Notice, PairShare, Plan, Progress, Score, ScoredText, Step, StreamStats, Trained

STEP = Step(
    step=7, tokens=100, seconds=1.0, nats=1.5, bits_per_byte=2.164, lr=0.01, grad_norm=1.0, tokens_per_second=12345.0,
    fraction=0.25, eta_seconds=201.0, last_step=28,
)  # fmt: skip
SCORE = Score(
    model="m", position="xl", attention="full", parameters=20_000, file="f", bytes=10, chars=None, words=None,
    tokens=10, nats=14.0, bits_per_byte=2.02, bits_per_char=None,
    perplexity=4.05, word_perplexity=None, mem_len=4, segment_len=8, batch_size=1, span="uniform",
    tokens_per_second=99.5, peak_rss_bytes=2**28, seconds=0.1, device="cpu", dtype="float32",
    by_context=(ContextBin(0, 4, 4, 2.5, 0.25), ContextBin(4, 8, 6, float("nan"))),
)  # fmt: skip


def test_amounts_sizes_and_times():
    assert [compact_number(v) for v in (0.5, 7, 999, 1234, 123456, 5e6)] == [
        "0.5",
        "7",
        "999",
        "1.23k",
        "123k",
        "5M",
    ]
    assert compact_number(6.61e9) == "6.61B"
    assert [format_bytes(v) for v in (1, 10, 2048, 3.5 * 2**20)] == ["1 byte", "10 bytes", "2.0 KiB", "3.5 MiB"]
    assert [approximate_count(n, "token") for n in (0, 1, 2, 1500)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1.5k tokens",
    ]
    assert [format_duration(v) for v in (4.21, 42, 201, 3723, float("inf"), -1)] == [
        "4.2 s", "42 s", "3:21", "1:02:03", "-", "-",
    ]  # fmt: skip
    assert [format_age(v) for v in (5, 60, 7200, 3 * 86400)] == ["just now", "1 minute", "2 hours", "3 days"]


def test_json_is_legal_whatever_the_numbers():
    made = json.loads(to_json(score_object(SCORE)), parse_constant=pytest.fail)
    assert made["by_context"][0] == {"from": 0, "to": 4, "tokens": 4, "bits_per_byte": 2.5, "margin": 0.25}
    assert made["by_context"][1]["bits_per_byte"] is None
    assert made["chars"] is None


def test_a_plan_and_a_result_as_text():
    plan = Plan(
        folder=Path("models/x"), corpus="x.txt", train_bytes=2**20, valid_bytes=1024, test_bytes=1024,
        train_tokens=300_000, tokenizer="bytes", vocab_size=256, preset="small", parameters=5_000_000,
        needed_bytes=2**28, weights="int8", weights_bytes=5 * 2**20, checkpoint_bytes=2**26, checkpoints=2,
        device="cpu", dtype="float32", threads=2, budget="10 minutes", resumed_at=40,
    )  # fmt: skip
    text = plan_text(plan)
    assert "5M parameters" in text
    assert "weights  5.0 MiB on disk in int8; up to 2 checkpoints of 64.0 MiB beside them\n" in text
    assert "256.0 MiB of RAM" in text
    assert "10 minutes, resuming at step 40" in text
    assert "ranks" not in text
    plan = dataclasses.replace(plan, n_ranks=4, rows=2)
    assert "ranks    4 processes, 2 sequences each\n" in plan_text(plan)
    end = Trained(
        folder=Path("models/a b"), step=9, tokens=900, seconds=61.0, bits_per_byte=1.9, best_step=8, stopped=False,
        sample="one\ntwo\n",
    )  # fmt: skip
    text = trained_text(end)
    assert "1.9000 bits per byte (step 8)" in text
    assert "  one\n  two\n" in text
    assert "xlcli eval -m 'models/a b'" in text
    assert "--resume" not in text
    short = dataclasses.replace(end, improves=True, seconds=30.0, scored=ScoredText(5_500, 55_800, 64))
    text = trained_text(short)
    assert "1.9000 bits per byte of the first 5.5k bytes (step 8)" in text
    assert "run the same command with --resume --max-time 2m" in text
    assert "--resume" not in trained_text(dataclasses.replace(short, step=5000))
    stopped = dataclasses.replace(end, stopped=True)
    assert "--resume" in trained_text(stopped)
    assert "-m 'models/a b'" in trained_text(stopped)
    assert "-m" not in trained_text(dataclasses.replace(stopped, best_step=None)), "it has no weights yet"
    assert "xlcli eval FILE -m 'models/a b'" in trained_text(dataclasses.replace(end, bits_per_byte=None))


def test_the_first_line_of_a_stage_is_shown_at_once():
    program = """
import sys
from xlcli.cli.render import Screen
from xlcli.events import Progress
screen = Screen()
screen.wait("starting")
screen.progress(Progress("learning", 0, None, "s"))
screen.progress(Progress("learning", 1, None, "s"))
"""
    terminal = Terminal([sys.executable, "-c", program], NO_COLOR="1")
    assert terminal.finish() == 0
    assert b"starting ..." in terminal.received
    assert b"learning  0 s" in terminal.received
    assert b"learning  1 s" not in terminal.received


SEGMENTS = "no memory: independent segments of 8 tokens, and the result depends on that length"


@pytest.mark.parametrize(
    ("model", "score", "said"),
    [
        ({}, {}, "memory of 4 tokens, span uniform, batch 1"),
        ({}, {"mem_len": 0}, SEGMENTS),
        ({}, {"mem_len": 0, "stride": 2}, "no memory: windows of 8 tokens with a stride of 2"),
        ({"attention": {"kind": "local", "window": 3}}, {}, "memory of 3 tokens, span uniform, batch 1"),
        ({"attention": {"kind": "linear"}, "position": {"kind": "none"}}, {}, "memory of all tokens read, batch 1"),
        (
            {"attention": {"kind": "linear"}, "position": {"kind": "none"}},
            {"mem_len": 0},
            SEGMENTS,
        ),
    ],
)
def test_a_score_names_the_memory(model, score, said):
    shape = config.make({"model": model}).model
    score = dataclasses.replace(SCORE, **score)
    assert said in score_table(score, shape)
    kept = describe_context(shape, score.mem_len, score.segment_len, score.stride)
    assert kept == said.split(", span")[0].split(", batch")[0]


def test_a_table_of_models_fits_eighty_columns_and_keeps_their_names():
    name = "shakespeare-with-contextual-positions-and-a-long-name"
    other = dataclasses.replace(SCORE, model=name, position="contextual-2", attention="mixed")
    text = sweep_text([SCORE, other], 4, 80)
    rows = [line for line in text.splitlines() if line]
    assert max(map(len, rows)) <= 80
    assert rows[0].startswith("2 models on f")
    assert "PARTIAL: 2 of 4" in rows[0]
    assert rows[2].split() == ["m", "xl", "full", "20k", "4", "2.0200", "99.5"]
    assert "".join(row[: rows[1].index("position")].strip() for row in rows[3:]) == name
    assert {"contextual-2", "mixed"} <= set(rows[3].split())


def test_training_steps_are_shown_if_they_differ():
    short, long = (dataclasses.replace(SCORE, model=str(steps), train_steps=steps) for steps in (40, 1200))
    unknown = dataclasses.replace(SCORE, model="imported")
    *_, heading, first, second, third = sweep_text([short, long, unknown], 3).splitlines()
    place = heading.index("steps")
    assert [row[place : place + 5].strip() for row in (first, second, third)] == ["40", "1,200", ""]
    assert "steps" not in sweep_text([short, short], 2)


def test_mean_steps_are_shown_for_adaptive_computation_time():
    shape = config.ModelConfig()
    adaptive = dataclasses.replace(SCORE, mean_steps=2.345)
    assert "mean steps" not in score_table(SCORE, shape) + sweep_text([SCORE], 1)
    assert re.search(r"^  mean steps +2\.35$", score_table(adaptive, shape), re.MULTILINE)
    assert re.search(r"mean steps\n4 .* 2\.35\n$", sweep_text([adaptive], 1))
    assert "  2.35 steps/token" in step_line(dataclasses.replace(STEP, mean_steps=2.345))
    assert "steps/token" not in step_line(STEP)


def test_a_line_of_progress_begins_with_what_matters_most():
    assert step_line(STEP) == "step 7/28  25 %  3:21 left  2.164 bits/byte  12.3k tokens/s"
    assert len(step_line(dataclasses.replace(STEP, step=123456))) < 80


def test_messages_go_to_stderr_by_level(capsys):
    for made in (Screen(), Screen(quiet=True), Screen(verbose=True)):
        for level in ("detail", "info", "warning"):
            made.shows(Notice(f"[{level}]", level))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split("\n") == [
        "[info]", "warning: [warning]", "warning: [warning]", "[detail]", "[info]", "warning: [warning]", "",
    ]  # fmt: skip


def test_plain_progress_comes_now_and_then(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(render.time, "monotonic", lambda: now)
    made = Screen()
    for _ in range(300):
        made.step(STEP)
        now += 0.1
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 4
    assert lines[0] == "step 7/28  25 %  3:21 left  2.164 bits/byte  12.3k tokens/s"
    now += 100
    made.progress(Progress("reading", 5, 10, "B", 2.0))
    assert capsys.readouterr().err == "reading  50 %  5 bytes of 10 bytes  2 bytes/s  2.5 s left\n"
    now += 100
    made.progress(Progress("memory 256", 407, 1628, "tokens"))
    assert capsys.readouterr().err == "memory 256  25 %  407 of 1.63k tokens\n"
    silent = Screen(quiet=True)
    now += 100
    silent.step(STEP)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "variable", "colored"),
    [
        ({}, "", False),
        ({"color": "always"}, "", True),
        ({"color": "always"}, "1", True),
        ({"color": "never"}, "", False),
    ],
)
def test_color(typed, variable, colored, monkeypatch, capsysbinary):
    monkeypatch.setenv("NO_COLOR", variable)
    made = Screen(**typed)
    made.scored_line("3.0\t", [(b"ab\x1b", 12.0), (b"\n", 0.1)])
    out = capsysbinary.readouterr().out
    assert out == b"3.0\t" + (b"\x1b[35mab\\x1b\x1b[m\n" if colored else b"ab\x1b\n")


def test_color_follows_bits(monkeypatch, capsysbinary):
    monkeypatch.setenv("NO_COLOR", "")
    spans = [
        (b"a", -1.0),
        (b" b", 3.99),
        (b" c", 2.0),
        (b"", 1.0),
        (b"d", 1.0),
        (b" ", 0.0),
        (b"e", 19.9),
        (b" f", 99.0),
    ]
    Screen(color="always").scored_line("", spans)
    codes = re.findall(rb"\x1b\[([0-9;]+)m([ \w]+)", capsysbinary.readouterr().out)
    assert codes == [(b"39", b"a"), (b"39", b" b"), (b"32", b" cd"), (b"31", b" e"), (b"1;31", b" f")]


def test_every_figure_of_a_score_stands_in_its_place():
    score = dataclasses.replace(
        SCORE, bytes=1200, chars=1100, words=150, tokens=360, bits_per_byte=2.0212, bits_per_char=2.2345,
        perplexity=34.567, word_perplexity=789.12, mean_steps=1.25,
        by_context=(ContextBin(1, 2, 40, 3.5), ContextBin(2, 4, 80, 2.5, 0.25)),
    )  # fmt: skip
    lines = score_table(score, config.ModelConfig()).splitlines()
    assert lines[1].startswith("1.2k bytes, 360 tokens; memory of 4 tokens")
    assert [tuple(re.split("  +", line.strip())) for line in lines[3:8]] == [
        ("bits per byte", "2.0212"),
        ("bits per character", "2.2345"),
        ("perplexity per token", "34.567"),
        ("perplexity per word", "789.12"),
        ("mean steps", "1.25"),
    ]
    assert [line.split() for line in lines[-2:]] == [
        ["1", "40", "3.5000", "-"],
        ["2", "to", "3", "80", "2.5000", "0.2500"],
    ]


def test_every_figure_of_pairs_stands_in_its_place():
    pairs = (PairShare(None, 40, 0.75, 0.598, 0.858, 0.625), PairShare("a", 30, 0.5, 0.331, 0.669, 0.4))
    score, other = (dataclasses.replace(SCORE, model=name, pairs=pairs) for name in ("one", "two"))
    other = dataclasses.replace(other, pairs=tuple(dataclasses.replace(pair, share=pair.share / 2) for pair in pairs))
    lines = pairs_text([score], config.ModelConfig()).splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["all", "40", "0.750", "0.598", "to", "0.858", "0.625"],
        ["a", "30", "0.500", "0.331", "to", "0.669", "0.400"],
    ]
    lines = pairs_text([score, other], config.ModelConfig()).splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["group", "pairs", "one", "95", "%", "two", "95", "%"],
        ["all", "40", "0.750", "0.598", "to", "0.858", "0.375", "0.598", "to", "0.858"],
        ["a", "30", "0.500", "0.331", "to", "0.669", "0.250", "0.331", "to", "0.669"],
    ]


def test_totals():
    stats = StreamStats(
        lines=2, bytes=20, tokens=9, bits=40.0, bits_per_byte=2.0, seconds=9.0, busy_seconds=3.0, lines_per_second=0.5,
        tokens_per_second=3.0, mem_len=4, state_bytes=10, final=True,
    )  # fmt: skip
    line = "2 lines, 20 bytes, 9 tokens, 2.0000 bits per byte, 0.5 lines/s, 3 tokens/s, busy 3.0 s of 9.0 s"
    assert stats_line(stats) == line
    of_records = stats_line(dataclasses.replace(stats, records=6))
    assert (of_records.split(", ")[0], "2 records/s" in of_records) == ("6 records", True)
