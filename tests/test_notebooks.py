"""The notebooks run from top to bottom, and show what they say."""

import json
import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = ("log", "memory", "reading")


def cells(name, kind):
    """Sources of the cells of this kind of a notebook."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the code of a notebook in an empty folder; returns its names at the end, with the last value as `_`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mpl, "rcParams", mpl.rcParams.copy())
    plt.switch_backend("agg")

    def executed(name, **changed):
        names = {}
        for source in cells(name, "code"):
            for key, value in changed.items():
                source = re.sub(rf"^{key} = [^#\n]*", f"{key} = {value!r}  ", source, flags=re.MULTILINE)
            *_, last = source.splitlines()
            exec(compile(source, name, "exec"), names)
            if re.fullmatch(r"[\w.]+\(.*\)", last) and not last.startswith(("print", "figure")):
                names["_"] = eval(last, names)
        plt.close("all")
        return names

    return executed


def test_each_notebook_is_tested():
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_pages_and_no_output_is_kept(name):
    for text in cells(name, "markdown"):
        for page, anchor in re.findall(r"\]\(([\w./]+\.md)(?:#([\w-]+))?\)", text):
            titles = re.findall("^#+ (.*)$", (FOLDER / page).read_text("utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not anchor or anchor in anchors
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    assert notebook["nbformat"] == 4


def test_reading_stumbles_where_the_comma_is_missing(run, capsys):
    names = run("reading")
    means = names["means"]
    assert means["none", 0] > means["comma", 0] + 0.5
    assert {(item, place) for item, _, place, _, _ in names["words"]} >= {(item, 0) for item in "1234"}
    critical = [word for _, _, place, word, _ in names["words"] if place == 0]
    assert critical == ["removed", "removed", "ran", "ran", "prescribed", "prescribed", "boiled", "boiled"]
    assert Path("reading.png").stat().st_size > 5000
    assert names["_"]._repr_html_().count("<pre") == 2


def test_memory_helps_and_finds_the_needle(run, capsys):
    names = run("memory", LENGTHS=(16, 256), BYTES=3000, distances=(0, 6))
    assert names["sweep"][256] < names["sweep"][16]
    without, with_memory = re.findall(r"memory \d+: ([\d.]+) bits", capsys.readouterr().out)
    assert float(with_memory) < float(without) - 5
    (_, lost), (_, kept) = names["found"][64], names["found"][512]
    assert kept < lost - 5
    assert all(Path(f"{name}.png").stat().st_size > 5000 for name in ("memory", "needle"))
    labels = [line.get_label() for line in names["axes"].get_lines()]  # of the second picture alone
    assert labels == ["memory of 64 tokens", "memory of 512 tokens"]


def test_the_odd_line_is_the_first_one(run, capsys):
    names = run("log")
    assert names["odd"][0].line == 46
    assert names["odd"][0].bits_per_byte > 2 * names["odd"][1].bits_per_byte
    assert names["_"].bits == pytest.approx(names["odd"][0].bits, abs=1.0)
