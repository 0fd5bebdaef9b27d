"""Pages agree with the code: help, examples, changelog, public names, tables, layers, paths and links, results."""

import csv
import dataclasses
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import xlcli
from xlcli import config, presets
from xlcli.cli import options
from xlcli.cli.app import load
from xlcli.cli.options import SECTIONS, settings_of
from xlcli.cli.usage import variable
from xlcli.config.columns import Columns
from xlcli.events import WordScore

SOURCE = Path(__file__).parents[1]
README = (SOURCE / "README.md").read_text()
COMMANDS_PAGE = (SOURCE / "docs" / "commands.md").read_text()
SPEED = (SOURCE / "docs" / "speed.md").read_text()
CARD = (SOURCE / "models" / "README.md").read_text()
COMMANDS = {name: load(name) for name in options.COMMANDS}
EVERY = [each for command in COMMANDS.values() for each in (command, *getattr(command, "commands", {}).values())]


def pages() -> list[Path]:
    """All pages, without the log."""
    return [*SOURCE.glob("*.md"), *(SOURCE / "docs").rglob("*.md"), *(SOURCE / "models").rglob("README.md")]


LOG = sorted((SOURCE / "benchmarks" / "log").glob("*.md"))
"""Experiments, with commands, options and names of files as they were."""


def table_rows(text: str) -> list[list[str]]:
    """Cells of all rows of all Markdown tables, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_with_its_output(command):
    assert re.search(rf"^\$ .*xlcli {command}\b", README + COMMANDS_PAGE + SPEED, re.MULTILINE)


def test_every_option_that_a_page_names_exists():
    known = {name for command in EVERY for param in command.params for name in param.opts}
    known |= {"--help", "-h", "--version"}
    for path in pages():
        for line in re.findall(rf"xlcli (?:{'|'.join(COMMANDS)})\b[^`|\n]*", path.read_text()):
            for option in re.findall(r"(?<!\S)-{1,2}[a-z][a-z-]*", line):
                assert option in known, f"{path.name}: {line}"


def test_every_option_in_a_sentence_exists():
    """It is of xlcli, of a script of this repository, or of a program that the page names with it."""
    known = {name for command in EVERY for param in command.params for name in param.opts} | {"--help", "--version"}
    known |= {"--install-completion", "--show-completion"}
    scripts = [*(SOURCE / "benchmarks").glob("*.*"), *(SOURCE / "tests").rglob("*.py"), SOURCE / "xlcli/lm_eval.py"]
    known |= {name for path in scripts for name in re.findall(r"(?<![\w-])--[a-z-]+", path.read_text())}
    known |= {"--durations", "--since", "--signal", "--log-dir", "--redirects"}  # pytest, journalctl, sbatch, torchrun
    known |= {"--extra-index-url", "--torch-backend", "--platform", "--depth"}  # pip, uv, mypy, git
    others = ("hf ", "gguf-new-metadata ", "systemctl ", "torchrun ", ".py ")
    for path in pages():
        if path.name != "CHANGELOG.md":  # options as they were
            for code in re.findall(r"`([^`\n]+)`", path.read_text()):
                if not any(name in code for name in others):
                    options = re.findall(r"(?<!\S)--[a-z][a-z-]*", code)
                    assert [each for each in options if each not in known] == [], f"{path.name}: {code}"


def test_every_variable_that_a_page_names_exists():
    known = {"XLCLI_CACHE", *(param.envvar for command in EVERY for param in command.params if param.envvar)}
    known |= {f"XLCLI_{param.name.upper()}" for command in EVERY for param in command.params}
    known |= {variable(name, each.option) for command in SECTIONS for name, each in settings_of(command).items()}
    for path in pages():
        assert set(re.findall(r"\bXLCLI_[A-Z_]+\b", path.read_text())) <= known, path.name


def test_the_page_of_settings_is_up_to_date():
    written = runpy.run_path(str(SOURCE / "docs" / "settings.py"))
    assert written["PAGE"].read_text() == written["page"]()


def test_version_is_the_same_everywhere():
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    changes = re.findall(r"^## (.+)", (SOURCE / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = dict(re.findall(r"^([a-z-]+): (\S+)$", (SOURCE / "CITATION.cff").read_text(), re.MULTILINE))
    assert changes[0] == "Unreleased"
    assert changes[1] == f"{cited['version']} ({cited['date-released']})"
    assert cited["version"] == project["version"] == xlcli.__version__


def test_public_names_resolve_and_nothing_else_does():
    for name in xlcli.__all__:
        assert getattr(xlcli, name) is not None
    assert set(xlcli.__all__) <= set(dir(xlcli))
    assert xlcli.__all__ == sorted(xlcli.__all__)
    types = (SOURCE / "xlcli" / "__init__.pyi").read_text()
    typed = re.findall(r"^from (\S+) import (\w+) as \2$", types, re.MULTILINE)
    assert {name: module for module, name in typed} == xlcli._MODULES
    with pytest.raises(AttributeError):
        _ = xlcli.no_such_name


@pytest.mark.parametrize("preset", presets.list_presets(), ids=lambda preset: preset.name)
def test_every_preset_is_legal_and_has_a_row(preset):
    assert preset.about.endswith(".")
    config.make(presets.read_preset(preset.name))
    row = next((row for row in table_rows(CARD) if row[0] == f"`{preset.name}`"), None)
    assert row is not None, f"{preset.name} has no row in models/README.md"
    assert all(row)


def test_table_of_presets_counts_parameters_as_the_model_does():
    import torch

    from xlcli.model.build import build_model

    heading = next(row for row in table_rows(CARD) if row[0] == "preset")
    size, vocabulary = heading.index("parameters"), heading.index("vocabulary")
    rows = {row[0].strip("`"): row for row in table_rows(CARD)}
    for preset in presets.list_presets():
        row = rows[preset.name]
        n_tokens = int(row[vocabulary].replace(",", ""))
        made = config.make(presets.read_preset(preset.name), {"model": {"vocab_size": n_tokens}})
        with torch.device("meta"):
            n_parameters = build_model(made.model).n_parameters
        assert row[size] == f"{n_parameters / 1e6:.2f} M", preset.name


def test_every_file_of_the_file_map_exists():
    page = (SOURCE / "docs" / "developers" / "development.md").read_text()
    section = page.partition("## Files")[2].partition("\n## ")[0]
    named = re.findall(r"^(\S+)  +\S", section.partition("```text\n")[2].partition("```")[0], re.MULTILINE)
    assert len(named) > 10
    assert [name for name in named if not (SOURCE / name).exists()] == []


def test_links_between_pages_lead_somewhere():
    for path in (*pages(), *LOG):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readme_names_every_page():
    targets = {(SOURCE / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", README) if "://" not in target}
    assert [path.name for path in (SOURCE / "docs").rglob("*.md") if path not in targets] == []


def test_the_site_shows_every_page_once_and_ends_at_a_broken_link():
    settings = (SOURCE / "mkdocs.yml").read_text()
    shown = re.findall(r"^ +- (\S+\.md)$", settings, re.MULTILINE)
    assert sorted(shown) == sorted(path.relative_to(SOURCE).as_posix() for path in (*pages(), *LOG))
    assert shown[0] == "README.md"
    assert "\nstrict: true\n" in settings
    assert {"omitted_files: warn", "anchors: warn"} <= {line.strip() for line in settings.splitlines()}


def test_layers_of_the_architecture_are_those_of_the_linter_and_of_the_package():
    page = (SOURCE / "docs" / "developers" / "architecture.md").read_text()
    rows = table_rows(page.partition("## Layers")[2].partition("\n## ")[0])[1:]
    layers = [set(re.findall(r"`([a-z_]+)`", row[0])) for row in rows]
    (contract,) = tomllib.loads((SOURCE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [layer.split(" | ") for layer in contract["layers"] if not layer.startswith("(")]
    assert layers == [set(names) for names in checked]
    package = (SOURCE / "xlcli").iterdir()
    here = {path.stem for path in package if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set().union(*layers) == here - {"__init__", "__main__"}


@pytest.mark.parametrize("path", [*pages(), *LOG], ids=lambda path: path.name)
def test_every_path_that_a_page_names_exists(path):
    """Paths from the top of the checkout; NAME is for the reader to make."""
    named = re.findall(r"`((?:xlcli|tests|benchmarks|demo|docs|models)/[\w./-]*)`", path.read_text())
    made_later = ("xlcli/_models", "models/mine")
    here = [name for name in named if "NAME" not in name and not name.startswith(made_later)]
    assert [name for name in here if not (SOURCE / name).exists()] == []


def test_every_test_that_a_page_names_exists():
    named = {pair for path in pages() for pair in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text())}
    assert len(named) > 4
    assert [pair for pair in named if f"\ndef {pair[1]}(" not in (SOURCE / pair[0]).read_text()] == []


def test_every_name_of_the_code_in_the_architecture_exists():
    page = (SOURCE / "docs" / "developers" / "architecture.md").read_text()
    named = re.findall(r"`(?:\w+\.)*([A-Za-z_]\w*)(?:\(\))?`", page)
    code = "".join(path.read_text() for folder in ("xlcli", "tests") for path in (SOURCE / folder).rglob("*.py"))
    assert len(named) > 100
    assert sorted(set(named) - set(re.findall(r"\w+", code))) == []


@pytest.mark.parametrize(("name", "n_tables"), [("positions", 1), ("recomputation", 1)])
def test_tables_of_the_page_are_those_of_the_results(name, n_tables):
    script, results = f"benchmarks/{name}.py", f"benchmarks/results/{name}.json"
    done = subprocess.run([sys.executable, script, "--table", results], cwd=SOURCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = [part for part in done.stdout.strip().split("\n\n") if part.startswith("|")]
    tables = printed[:n_tables]
    page = (SOURCE / "docs" / "results.md").read_text()
    assert [table for table in tables if f"\n\n{table}\n\n" not in page] == []
    assert len(tables) == n_tables


def test_exit_codes_of_the_page_are_those_of_the_errors():
    from xlcli import errors

    rows = {row[0]: row[1] for row in table_rows(COMMANDS_PAGE.partition("## Exit codes")[2].partition("\n## ")[0])}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.XLError):
            assert str(error.exit_code) in rows
    assert {"0", "1", "2", "3", "4", "5", "6", "130, 143", "141"} <= set(rows)


def test_module_runs_as_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "xlcli", "models", "--json"], capture_output=True, timeout=60, check=True
    )
    assert {preset["name"] for preset in json.loads(done.stdout)["presets"]} == {p.name for p in presets.list_presets()}


def test_words_page_has_every_column():
    page = (SOURCE / "docs" / "words.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    known = set(re.findall(r"`(\w+)", " ".join(row.split("|")[1] for row in rows)))
    own = {field.name for field in dataclasses.fields(WordScore)} - {"columns"}
    assert own | set(Columns._fields) <= known


def run_script(page, heading, folder, *, check=True):
    """Runs the Python script below a heading of a page in a folder, and returns what it printed."""
    text = (SOURCE / "docs" / page).read_text().partition(f"# {heading}\n")[2]
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    command = [sys.executable, "-X", "utf8", "-c", script]
    return subprocess.run(command, cwd=folder, check=check, capture_output=True, text=True, encoding="utf-8")


def results_of_pcibex():
    """The lines are as PCIbex Farm writes them: names of columns in comments, in which a part of them changes."""
    trial = "1764000130,ab12,PennController,1,0,trial,NULL"
    word = (
        f"{trial},Controller-DashedSentence,DashedSentence,{{}},{{}},1764000130616,{{}},false,Well%2C it ran.,3,{{}},x"
    )
    lines = ["#", "# Results on Tuesday November 24 2026 14:02:10 UTC", "# Columns below this comment are as follows:"]
    names = "Results reception time,MD5 hash of participant's IP address,Controller name,Order number of item"
    names += ",Inner element number,Label,Latin Square Group,PennElementType,PennElementName,Parameter,Value,EventTime"
    lines += [f"# {number}. {name}." for number, name in enumerate(f"{names},item,condition,Comments".split(","), 1)]
    lines.append(f"{trial},PennController,1,_Trial_,Start,1764000130490,3,old,NULL")
    more = ["Reading time", "Newline?", "Sentence (or sentence MD5)", "item", "condition", "Comments"]
    lines += [f"# {number}. {name}." for number, name in enumerate(more, 13)]
    lines += [
        word.format(1, "Well%2C", 301, "old"),
        word.format(2, "it", 302, "old"),
        word.format(3, "ran.", 303, "old"),
    ]
    return lines


def test_results_of_pcibex_become_items_and_times(tmp_path):
    (tmp_path / "results.csv").write_text("\n".join(results_of_pcibex()) + "\n")
    assert "3 reading times; 0 " in run_script("words.md", "From a results file of PCIbex", tmp_path).stdout
    assert (tmp_path / "items.tsv").read_text() == "item\tcondition\tsentence\n3\told\tWell, it ran.\n"
    times = [line.split("\t") for line in (tmp_path / "times.tsv").read_text().splitlines()]
    assert times[0] == ["item", "condition", "number", "shown", "subject", "rt"]
    shown = [(str(n), word) for n, word in enumerate(("Well,", "it", "ran."), 1)]
    assert times[1:] == [["3", "old", n, word, "1764000130ab12", f"30{n}"] for n, word in shown]


def test_results_of_pcibex_with_quotes_practice_and_equal_items(tmp_path):
    lines = [line.replace("Well%2C", '"Well%2C"') for line in results_of_pcibex()]
    practice = [line.replace(",3,old,x", ",x") for line in lines if "DashedSentence" in line]
    names = ["# 16. Comments."]
    (tmp_path / "results.csv").write_text("\n".join([*lines, *names, *practice]) + "\n")
    assert "3 reading times; 3 " in run_script("words.md", "From a results file of PCIbex", tmp_path).stdout
    with (tmp_path / "items.tsv").open(newline="") as file:
        assert [row["sentence"] for row in csv.DictReader(file, dialect="excel-tab")] == ['"Well," it ran.']
    (tmp_path / "results.csv").write_text("\n".join([*lines, lines[-1].replace("it ran", "it sat")]) + "\n")
    done = run_script("words.md", "From a results file of PCIbex", tmp_path, check=False)
    assert done.returncode == 1
    assert all(part in done.stderr for part in ("('3', 'old')", "it ran", "it sat"))


def test_rows_have_the_twenty_words_before_each_word(tmp_path):
    words = [f"w{n}" for n in range(23)]
    words[1] = '"Stay,'
    (tmp_path / "text.txt").write_text("  ".join(words) + "\n")
    run_script("words.md", "Strict contexts", tmp_path)
    with (tmp_path / "items.tsv").open(newline="") as file:
        rows = [(row["before"], row["word"]) for row in csv.DictReader(file, dialect="excel-tab")]
    assert rows[:3] == [("", "w0"), ("w0", '"Stay,'), ('w0 "Stay,', "w2")]
    assert rows[22] == (" ".join(words[2:22]), "w22")
    assert len(rows) == len(words)


def test_the_text_that_the_others_help_least_comes_first(tmp_path):
    (tmp_path / "texts").mkdir()
    story = "The old keeper of the lighthouse counted seventeen herons on the northern breakwater that evening.\n"
    for name, text in (
        ("1", story * 2),
        ("2", story * 2),
        ("3", "Sell ten shares of the bank; buy none.\n" * 5),
        ("4", story * 2),
    ):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    printed = run_script("adapting.md", "Which text is least like the rest?", tmp_path).stdout.splitlines()
    assert printed[0].endswith("3.txt")
    assert len(printed) == 4


def test_contrasts_of_regions(tmp_path):
    rows = ["region\titem\tcondition\tbits"]
    for item, contrast in (("a", 1.0), ("b", 2.0), ("c", 4.5)):
        rows += [f"{region}\t{item}\tmatch\t{region}" for region in (1, 2)]
        rows += [f"{region}\t{item}\tmismatch\t{region + region * contrast}" for region in (1, 2)]
    (tmp_path / "regions.tsv").write_text("\n".join(rows) + "\n")
    done = run_script("words.md", "Regions", tmp_path)
    assert done.stdout.splitlines() == ["region 1: 2.50 ± 2.14 bits, 3 items", "region 2: 5.00 ± 4.29 bits, 3 items"]


NAMESPACES = ["", ' xmlns="http://www.tei-c.org/ns/1.0"']


def text_of_tei(folder, document):
    """What the script for TEI printed, the text of each file that it wrote, by name, and its standard error."""
    (folder / "novel.xml").write_text(document)
    done = run_script("start.md", "A text in XML or TEI", folder)
    return done.stdout, {path.name: path.read_text() for path in sorted((folder / "novel").iterdir())}, done.stderr


def paragraph_of_tei(folder, content):
    """What the script for TEI makes of a novel of one paragraph."""
    _, texts, _ = text_of_tei(folder, f"<TEI><text><body><p>{content}</p></body></text></TEI>")
    [text] = texts.values()
    return text.rstrip("\n")


def test_what_stands_apart_in_tei_has_no_blank_before_a_mark(tmp_path):
    body = "<p><bibl>Hume</bibl>, and (<bibl>Gibbon</bibl>).<stage>Exit.</stage>Silence</p>"
    _, texts, _ = text_of_tei(tmp_path, f"<TEI><text><body><div>{body}</div></body></text></TEI>")
    assert list(texts.values()) == ["Hume, and (Gibbon). Exit. Silence\n"]


def test_text_of_tei_is_without_header_and_notes(tmp_path):
    header = "<teiHeader><fileDesc><titleStmt><title>T</title></titleStmt></fileDesc></teiHeader>"
    body = "<head>I. <hi>Down</hi></head><p>The\n   dog<note><p>A note.</p></note> ran.<pb/></p>"
    body += "<lg><l>A rose</l> <l>A lily</l></lg>"
    text = f"<text><front><p>Front</p></front><body><div>{body}</div></body></text>"
    printed, texts, _ = text_of_tei(tmp_path, f'<TEI xmlns="http://www.tei-c.org/ns/1.0">{header}{text}</TEI>')
    assert texts == {"01-i-down.txt": "I. Down\n\nThe dog ran.\n\nA rose\nA lily\n"}
    assert printed.startswith("1 chapters; 0 words ")


def test_chapters_of_tei_become_files(tmp_path):
    first = '<div2 type="chapter"><head>Chapter I</head><p>It rained.</p></div2>'
    second = '<div2 type="Chapter"><head>Chapter II. At Sea</head><div><p>It blew.</p></div></div2>'
    front = '<front><div type="chapter"><p>To the reader</p></div></front>'
    part = f'<div1 type="part"><head>Part the First</head>{first}{second}<div2 type="chapter"/></div1>'
    printed, texts, _ = text_of_tei(tmp_path, f"<TEI><text>{front}<body>{part}</body></text></TEI>")
    assert texts == {
        "01-chapter-i.txt": "Chapter I\n\nIt rained.\n",
        "02-chapter-ii-at-sea.txt": "Chapter II. At Sea\n\nIt blew.\n",
    }
    assert "; 3 words " in printed


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("<head>Chapter I<lb/>The Storm</head>", ["Chapter I The Storm"]),
        ("<p>the morn<lb break='no'/>ing <pb n='2'/>came</p>", ["the morning came"]),
        ("<p>a list:\n<list><item>butter</item><item>a little salt</item></list> here</p>", [
            "a list:", "butter a little salt", "here"]),
        ("<list><item>First item.</item></list><ab>A block.</ab>", ["First item.", "A block."]),
        ("<p>He said <q><p>a nested one</p></q> and stopped.</p>", ["He said", "“a nested one”", "and stopped."]),
        ("<p>M<hi>r</hi>. Carew is <del>very</del> <add>quite</add> well.</p>", ["Mr. Carew is quite well."]),
        ("<p>a <choice>\n<sic>freind</sic>\n<corr>friend</corr>\n</choice>!</p>", ["a friend!"]),
        ("<p>a <sic>freind</sic> <choice><orig>shew</orig><reg>show</reg></choice></p>", ["a freind show"]),
        ("<sp><speaker>JOHN.</speaker><p>No.</p><stage>He goes.</stage></sp>", ["JOHN.", "No.", "He goes."]),
        ("<closer>Your servant,<signed>J. C.</signed></closer><trailer>The End</trailer>", [
            "Your servant, J. C.", "The End"]),
        ("<table><row><cell>one</cell><cell>two</cell></row><row><cell>3</cell></row></table>", ["one two", "3"]),
        ("<epigraph><cit><quote><l>Full fathom</l><l>five</l></quote></cit></epigraph>", ["Full fathom", "five"]),
        ("<floatingText><body><p>A letter.</p></body></floatingText>", ["A letter."]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_text_of_tei_is_neither_doubled_nor_joined(tmp_path, namespace, body, lines):
    text = f"<text><front><p>Front</p></front><body>{body}</body><back><p>Back</p></back></text>"
    _, texts, _ = text_of_tei(tmp_path, f"<TEI{namespace}>{text}</TEI>")
    assert [line for text in texts.values() for line in text.splitlines() if line] == lines


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("<q>Well,</q> he said, <said>'Tis <soCalled>late</soCalled>.</said>", "“Well,” he said, “'Tis ‘late’.”"),
        ("<said><q>No</q> is no word</said>", "“‘No’ is no word”"),
        ("“<q>Well</q>” and <q>‘own’</q> and <q>'own'</q>", "“Well” and ‘own’ and 'own'"),
        ("It is <quote>vanity</quote> that <said direct='false'>he came</said>", "It is “vanity” that he came"),
        ("— <said>Oui</said>, dit-il. <said>Non.</said>", "— Oui, dit-il. Non."),
        ("« <said>Oui</said> », dit-il.", "« Oui », dit-il."),
        ("<said>—no, never</said>, he cried", "—no, never, he cried"),
    ],
)
def test_quotation_marks_of_tei_are_added_where_only_tags_stand_for_them(tmp_path, part, line):
    assert paragraph_of_tei(tmp_path, part) == line


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("the morn\n<lb break='no'/>ing", "the morning"),
        ("the morn-\n<pb break='no'/>\n  <lb/>ing", "the morning"),
        ("ne¬<fw>3</fw><cb break='no'/> <lb break='no'/>ver", "never"),
        ("Anglo-<lb break='no'/>Saxon", "Anglo-Saxon"),
        ("nou-<lb/>uelle", "nou- uelle"),
        ("nou¬\n<lb/>uelle et a\u00ad<pb/>mie", "nouuelle et amie"),
        ("one<milestone unit='page'/>two", "one two"),
    ],
)
def test_words_of_tei_are_whole_at_breaks_within_them(tmp_path, part, line):
    assert paragraph_of_tei(tmp_path, part) == line


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("<app><rdg wit='#A'>olde</rdg><rdg wit='#B'>old</rdg></app>", "olde"),
        ("<app><rdg>olde</rdg><lem>old</lem><note>N</note></app>", "old"),
        ("<app><rdgGrp><rdg>one</rdg><rdg>on</rdg></rdgGrp></app>", "one"),
        ("<choice><sic>alone</sic></choice>", "alone"),
        ("<choice><unclear>cat</unclear><unclear>cut</unclear></choice>", "cat"),
        ("<choice><am>&amp;</am><ex>and</ex></choice>", "and"),
    ],
)
def test_one_reading_of_tei_is_taken(tmp_path, part, line):
    assert paragraph_of_tei(tmp_path, part) == line


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_what_was_done_with_elements_of_tei_is_counted(tmp_path, namespace):
    words = (
        "A <supplied>lost</supplied> word<note>N</note><ref>1</ref> <gap><desc>hole</desc></gap> <gap/> nou-<lb/>uelle"
    )
    others = "<q>own</q> “<q>marks</q>” ne-<lb break='no'/>ver <choice><sic>a</sic><corr>b</corr></choice>"
    _, texts, counted = text_of_tei(
        tmp_path, f"<TEI{namespace}><text><body><p>{words} {others}</p></body></text></TEI>"
    )
    assert list(texts.values()) == ["A lost word nou- uelle “own” “marks” never b\n"]
    counts = dict(line.split(": ") for line in counted.splitlines())
    assert sorted(counts.pop("left out").split(", ")) == [
        "gap 2",
        "hyphens at breaks 1",
        "note 1",
        "ref 1",
        "sic 1",
    ]
    assert sorted(counts.values()) == ["lb 1", "q 1", "q 1", "supplied 1"]


def run_awk(page, folder):
    """Runs the first command with awk on a page in a folder."""
    command = re.search(r"^ *(awk '[^']+' .+)$", (SOURCE / "docs" / page).read_text(), re.MULTILINE)[1]
    subprocess.run(["bash", "-c", command], cwd=folder, check=True)


def test_a_wrapped_text_gets_a_line_for_each_paragraph(tmp_path):
    wrapped = "\n\n   It rained\n   and  blew.\n \n\n[1] A note\n    with an indent.\n"
    for text in (wrapped, wrapped.replace("\n", "\r\n")):
        (tmp_path / "wrapped.txt").write_bytes(text.encode())
        run_awk("commands.md", tmp_path)
        assert (tmp_path / "text.txt").read_text() == "It rained and blew.\n\n[1] A note with an indent.\n"


def test_a_novel_becomes_a_file_for_each_chapter(tmp_path):
    headings = ["CHAP. I.", "  Chapter 2: The Sea", "chapter iii", "CHAPTER IV.--IN WHICH", "CHAP V"]
    others = "chapter of accidents\nchapter ii was a line of a paragraph"
    parts = [f"{heading}\n\nIt rained in the\n{others}\n" for heading in headings]
    (tmp_path / "novel.txt").write_text("\n".join(["A Title\n\nChapters\n", *parts]))
    (tmp_path / "chapters").mkdir()
    run_awk("training.md", tmp_path)
    texts = [path.read_text() for path in sorted((tmp_path / "chapters").iterdir())]
    assert [text.splitlines()[0] for text in texts] == headings
    assert [text.rstrip("\n") for text in texts] == [part.rstrip("\n") for part in parts]
