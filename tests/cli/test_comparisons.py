"""`eval` of several documents and models: intervals, differences, means over seeds, and the table as CSV."""

import csv
import json
import math
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pytest
from programs import TEXT

from xlcli.store.layout import write_record

SMALL = (
    "--set", "model.dim=16", "--set", "model.n_layers=1", "--set", "model.attention.n_heads=2", "--segment-len", "16",
    "--mem-len", "16", "--batch-size", "2", "--tokenizer", "bytes", "--threads", "1", "--preset", "tiny",
    "--max-steps", "2", "-q",
)  # fmt: skip
ROWS = ("rows.tsv", "--text-field", "text", "--reset-on-document")


@pytest.fixture
def models(model, untrained):
    untrained("linear", attention={"kind": "linear", "n_heads": 2}, position={"kind": "none"})
    Path("rows.tsv").write_text("text\tother\nThe dog sat.\tA dog\nA fox, lazy\tThe fox and\nIt went in.\tI\n")
    return ("-m", "tiny", "-m", "linear")


def lines(done):
    assert done.code == 0, done.err
    return [line.split() for line in done.out.decode().splitlines()]


def test_intervals_of_one_model_stand_below_its_score(run, models):
    Path("rows.tsv").write_text(Path("rows.tsv").read_text() + "Go\tI\nThe fox is out\tA\n")
    spread = json.loads(run("eval", *ROWS, "-m", "tiny", "--json").out)["spread"]
    assert spread["documents"] == 5
    *_, heading, row = lines(run("eval", *ROWS, "-m", "tiny"))
    assert heading == ["bits/byte", "from", "to", "mean", "from", "to"]
    assert row == ["tiny", *(f"{spread[name]:.4f}" for name in spread if name != "documents")]
    assert "intervals" not in run("eval", "-m", "tiny").out.decode()
    assert "over 5 documents" in run("eval", *ROWS, "-m", "tiny").out.decode()
    assert "over 6 lines" in run("eval", "rows.tsv", "--each-line", "-m", "tiny").out.decode()


def test_few_documents_have_no_interval(run, models):
    done = run("eval", *ROWS, *models, "--csv", "table.csv")
    assert "3 documents are too few" in done.out.decode()
    rows = [row.split() for row in done.out.decode().splitlines()[-3:]]
    assert [[cell == "-" for cell in row[-6:]] for row in rows] == [[False, True, True, False, True, True]] * 3
    tables = csv.DictReader(Path("table.csv").read_text().splitlines())
    assert {(row["bits_per_byte_low"], row["document_mean"] == "") for row in tables} == {("", False)}
    found = json.loads(run("eval", *ROWS, *models, "--json").out)
    for spread in (found["sweep"][0]["spread"], found["comparisons"][0]["spread"]):
        assert (spread["documents"], spread["bits_per_byte_low"], spread["document_mean_high"]) == (3, None, None)


def test_two_models_have_an_interval_of_their_difference(run, models):
    found = json.loads(run("eval", *ROWS, *models, "--json").out)
    [compared] = found["comparisons"]
    assert compared["pairs"] == []
    first, second = (score["bits_per_byte"] for score in found["sweep"])
    assert compared["spread"]["bits_per_byte"] == pytest.approx(second - first)
    *_, row = lines(run("eval", *ROWS, *models))
    assert row[:4] == ["linear", "-", "tiny", f"{second - first:+.4f}"]
    *_, row = lines(run("eval", *ROWS, *models, "--sweep-mem-len", "0,8"))
    assert row[:5] == ["linear", "8", "-", "tiny", "0"]
    assert json.loads(run("eval", *models, "--json").out)["comparisons"] == [None]


def test_two_models_have_counts_of_discordant_pairs(run, models):
    pairs = ("rows.tsv", "--pairs", "text,other")
    [compared] = json.loads(run("eval", *pairs, *models, "--json").out)["comparisons"]
    [counts] = compared["pairs"]
    assert run("eval", *pairs, *models, "--words", "w.tsv").code == 0
    rows = list(csv.DictReader(Path("w.tsv").read_text().splitlines(), dialect="excel-tab"))
    won = [[row[f"first_bits_{name}"] < row[f"second_bits_{name}"] for row in rows] for name in ("tiny", "linear")]
    wanted = [sum(a > b for a, b in zip(*order, strict=True)) for order in (won, won[::-1])]
    assert [counts["only_other"], counts["only_model"]] == wanted
    *_, heading, row, _, about_seeds = lines(run("eval", *pairs, *models))
    assert heading == ["group", "pairs", "tiny", "95", "%", "linear", "95", "%", "only", "tiny", "only", "linear", "p"]
    assert row[10:] == [*map(str, wanted), f"{counts['p']:.2g}"]
    assert "seed" in about_seeds


def test_pairs_of_equal_texts_are_named_and_counted_as_ties(run, models):
    Path("rows.tsv").write_text("text\tother\nThe dog\tThe dog\nA fox\tThe fox and it\nIt\tIt\nWe go\tGo\n")
    command = ("eval", "rows.tsv", "--pairs", "text,other")
    done = run(*command, *models)
    assert [line for line in done.err.splitlines() if "2 of 4 pairs" in line and "(1, 3)" in line]
    *_, heading, _, _, _ = lines(done)
    assert heading.count("ties") == 2
    pairs = json.loads(run(*command, "-m", "tiny", "--json").out)["pairs"]
    assert [pair["ties"] for pair in pairs] == [2]
    *_, heading, row = lines(run(*command, "-m", "tiny"))
    assert (heading[5], row[6]) == ("ties", "2")
    Path("rows.tsv").write_text("text\tother\nThe dog\tA dog\n")
    done = run(*command, "-m", "tiny")
    assert ("pairs count" in done.err, b"ties" in done.out) == (False, False)


def test_models_that_differ_in_their_seeds_have_a_mean(run):
    Path("corpus.txt").write_bytes(TEXT * 40)
    for name, options in {
        "a": (),
        "b": ("--seed", "2"),
        "c": ("--seed", "3"),
        "d": ("--seed", "4", "--lr", "0.1"),
    }.items():
        assert run("train", "corpus.txt", "-o", f"models/{name}", *SMALL, *options).code == 0
    models = [part for name in "abcd" for part in ("-m", name)]
    found = json.loads(run("eval", "corpus.txt", *models, "--json").out)
    [seeds] = found["seeds"]
    bits = [score["bits_per_byte"] for score in found["sweep"][:3]]
    assert seeds["models"] == ["a", "b", "c"]
    assert seeds["mean"]["bits_per_byte"] == pytest.approx(fmean(bits))
    assert seeds["sd"]["bits_per_byte"] == pytest.approx(math.sqrt(sum((b - fmean(bits)) ** 2 for b in bits) / 2))
    *_, first, _, _, _, mean, sd = lines(run("eval", "corpus.txt", *models))
    assert mean[:7] == ["mean", "of", "a,", "b", "and", "1", "more"]
    assert sd[:8] == ["standard", "deviation", "of", "a,", "b", "and", "1", "more"]
    assert (mean[7:11], sd[8:12]) == (first[1:5], first[1:5])  # what the models have in common
    assert (mean[11], sd[12]) == (f"{fmean(bits):.4f}", f"{stdev(bits):.4f}")
    assert run("eval", "corpus.txt", *models, "--csv", "seeds.csv").code == 0
    *_, mean, sd = read(Path("seeds.csv").read_text())
    assert (mean["model"], float(mean["bits_per_byte"])) == ("mean of a, b and 1 more", seeds["mean"]["bits_per_byte"])
    assert (sd["mem_len"], float(sd["bits_per_byte"])) == (mean["mem_len"], seeds["sd"]["bits_per_byte"])
    Path("rows.tsv").write_text("text\tother\nThe dog sat.\tA dog\nA fox, lazy\tThe fox and\nIt went in.\tI\n")
    pairs = ("eval", "rows.tsv", "--pairs", "text,other", *models)
    shares = [score["pairs"][0]["share"] for score in json.loads(run(*pairs, "--json").out)["sweep"]]
    *_, heading, row, _, _ = lines(run(*pairs))
    assert heading[-8:] == ["mean", "of", "a,", "b", "and", "1", "more", "SD"]
    assert row[2:-2:4] == [f"{value:.3f}" for value in shares]
    assert row[-2:] == [f"{value:.3f}" for value in (fmean(shares[:3]), stdev(shares[:3]))]
    assert seeds["difference"] is None
    Path("rows.tsv").write_text("text\tsame\n" + "".join(f"{text}\t{text}\n" for text in ("Go", "I", "A", "it", "So")))
    done = run("eval", *ROWS, "-m", "a", "-m", "d")
    assert "Two or more seeds" in done.out.decode()
    shutil.copytree("models/d", "models/e")
    record = json.loads(Path("models/e/record.json").read_text())
    record["runtime"]["seed"] = 5
    write_record(Path("models/e"), record)
    groups = [part for name in "abde" for part in ("-m", name)]
    found = json.loads(run("eval", *ROWS, *groups, "--json").out)
    difference = found["seeds"][1]["difference"]
    means = [group["mean"]["bits_per_byte"] for group in found["seeds"]]
    assert difference["bits_per_byte"] == pytest.approx(means[1] - means[0])
    *_, heading, row = lines(run("eval", *ROWS, *groups))
    assert heading == ["bits/byte", "from", "to"]
    to, *figures = difference.values()
    assert to == ["a", "b"]
    assert row == ["d,", "e", "-", "a,", "b,", "memory", "16", *(f"{value:+.4f}" for value in figures)]
    *_, heading, row = lines(run("eval", "rows.tsv", "--pairs", "text,same", *groups))
    assert (heading[0], row[7:]) == ("share", ["+0.0000"] * 3)
    record = json.loads(Path("models/b/record.json").read_text())
    record["runtime"]["seed"] = 3  # of a copy of c
    write_record(Path("models/b"), record)
    assert json.loads(run("eval", "corpus.txt", "-m", "b", "-m", "c", "--json").out)["seeds"] == []


def read(text):
    return list(csv.DictReader(text.splitlines()))


def test_the_table_as_csv_has_the_figures_of_json(run, models):
    command = ("eval", *ROWS, *models, "--sweep-mem-len", "0,8")
    done = run(*command, "--csv", "t.csv", "--json")
    assert done.code == 0, done.err
    scores = json.loads(done.out)["sweep"]
    rows = read(Path("t.csv").read_text())
    assert [(row["model"], row["mem_len"]) for row in rows] == [
        ("tiny", "0"), ("tiny", "8"), ("linear", "0"), ("linear", "8")
    ]  # fmt: skip
    for row, score in zip(rows, scores, strict=True):
        wanted = {key: value for key, value in score.items() if key not in ("by_context", "pairs", "spread")}
        wanted |= {key: value for key, value in score["spread"].items() if key in row}
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            shown = value if isinstance(value, str) else json.dumps(value).replace("null", "")
            assert row[key] == shown
    done = run("eval", *ROWS, "-m", "tiny", "--csv", "-")
    assert (len(read(done.out.decode())), "bits per byte" in done.err) == (1, True)


def test_pairs_as_csv_have_a_row_for_each_group(run, models):
    pairs = ("eval", "rows.tsv", "--pairs", "text,other", "--by", "text")
    shares = [score["pairs"] for score in json.loads(run(*pairs, *models, "--csv", "p.csv", "--json").out)["sweep"]]
    rows = read(Path("p.csv").read_text())
    assert [float(row["share"]) for row in rows] == [pair["share"] for pairs in shares for pair in pairs]
    assert [row["model"] for row in rows] == ["tiny"] * 4 + ["linear"] * 4


def test_one_standard_output_for_one_list(run, models):
    done = run("eval", *ROWS, "-m", "tiny", "--csv", "-", "--words", "-")
    assert (done.code, "--words" in done.err) == (2, True)
