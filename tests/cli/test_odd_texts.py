"""Notices on what nobody sees in a text: `eval` of all kinds of text, `stream` of all outputs, `generate`."""

import json
import shutil

import pytest
from programs import standard_input

NEEDS = " that need a look: "
ODD = {
    "decomposed": ("cafe\u0301", "cafe<U+0301>"),
    "zero-width": ("caf\u00e9\u200b", "caf\u00e9<U+200B>"),
    "byte-order": ("\ufeffcaf\u00e9", "<U+FEFF>caf\u00e9"),
    "soft hyphens": ("ca\u00adf\u00e9", "ca<U+00AD>f\u00e9"),
    "direction": ("\u200ecaf\u00e9", "<U+200E>caf\u00e9"),
    "wrong encoding": ("caf\u00c3\u00a9", "caf\u00c3\u00a9"),
    "entities": ("R&amp;D", "R&amp;D"),
    "asterisks": ("*caf\u00e9*", "*caf\u00e9*"),
}


def notices(error):
    return [line for line in error.splitlines() if NEEDS in line]


@pytest.mark.parametrize("kind", ODD)
def test_rows_of_a_table_are_counted_by_kind_and_the_first_is_shown(run, model, tmp_path, kind):
    odd, shown = ODD[kind]
    rows = ["The old caf\u00e9 was closed.", f"The old {odd} was closed today.", f"So the {odd} is."]
    path = tmp_path / "items.csv"
    path.write_text(
        "".join(f"{item},{text}\n" for item, text in zip(["item", *"123"], ["sentence", *rows], strict=True))
    )
    options = ["--text-field", "sentence", "--reset-on-document", "--words", tmp_path / "words.jsonl", "--json"]
    done = run("eval", path, *options)
    assert done.code == 0, done.err
    [notice] = notices(done.err)
    assert notice.startswith("warning: rows that")
    assert kind in notice
    assert " 2 with " in notice
    assert f"(row 2: 'The old {shown} was" in notice
    [notice] = notices(run("stream", path, "--text-field", "sentence", "--emit", "words").err)
    assert f"(line 3: 'The old {shown} was" in notice
    words = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    unchanged = rows[1].replace("\u200b", "")  # which divides words, and is in none
    assert " ".join(word["word"] for word in words if word["document"] == 2) == unchanged


def test_both_texts_of_a_pair_are_one_row(run, model, tmp_path):
    rows = [("a b", "a c"), ("d e", "d\u200b f"), ("g\u200b h", "g\u200b i")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"good": a, "bad": b}) + "\n" for a, b in rows))
    [notice] = notices(run("eval", tmp_path / "pairs.jsonl", "--pairs", "good,bad").err)
    assert "2 with zero-width characters (row 2: 'd<U+200B> f'" in notice


def test_texts_without_rows_have_lines(run, model, tmp_path):
    text = "It was.\nThe  caf\u00e9\u200b was.\n".encode()
    for name in ("first.txt", "second.txt"):
        (tmp_path / name).write_bytes(text)
    [notice] = notices(run("eval", tmp_path / "first.txt", tmp_path / "second.txt").err)
    assert "lines that" in notice
    assert f"2 with zero-width characters ({tmp_path / 'first.txt'}, line 2: 'The  caf\u00e9<U+200B> was.'" in notice
    assert "blanks" not in notice
    assert "two together" in notices(run("eval", tmp_path / "first.txt", "--each-line").err)[0]
    with standard_input(text):
        assert "line 2" in notices(run("eval", "-").err)[0]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in text.decode().splitlines())
    (tmp_path / "rows.jsonl").write_text(rows)
    assert "row 2" in notices(run("eval", tmp_path / "rows.jsonl").err)[0]


def test_a_notice_comes_once_for_several_models_and_not_for_raw_bytes(run, model, tmp_path):
    shutil.copytree(model, model.parent / "other")
    (tmp_path / "odd.txt").write_bytes("caf\u00e9\u200b\r\n".encode())
    error = run("eval", tmp_path / "odd.txt", "-m", "tiny", "-m", "other").err
    assert len(notices(error)) == error.count("CR LF") == 1
    assert not notices(run("eval", tmp_path / "odd.txt", "--binary").err)
    assert not notices(run("stream", tmp_path / "odd.txt", "--binary").err)


@pytest.mark.parametrize("emit", ["lines", "words", "tokens", "stats", "none"])
def test_streams_of_any_output_end_with_a_notice(run, model, tmp_path, emit):
    (tmp_path / "odd.txt").write_bytes("plain\ncaf\u00e9\u200b\nx\u200by\n".encode())
    state = tmp_path / "state"
    for first in (2, 5):
        [notice] = notices(run("stream", tmp_path / "odd.txt", "--emit", emit, "--state", state).err)
        assert f"2 with zero-width characters (line {first}: 'caf\u00e9<U+200B>'" in notice
    (tmp_path / "plain.txt").write_bytes("plain\n  caf\u00e9\n".encode())
    assert not notices(run("stream", tmp_path / "plain.txt", "--emit", emit).err)


def test_files_that_begin_in_xml_or_html_are_named_once(run, model, tmp_path):
    (tmp_path / "a.xml").write_text("<?xml version='1.0'?>\n<TEI xmlns='x'>\n<p>One.</p>\n</TEI>\n")
    for command in ("eval", "stream"):
        [notice] = notices(run(command, tmp_path / "a.xml").err)
        assert " 1 with a beginning in XML or HTML" in notice


def test_warnings_of_several_files_name_them_and_count_in_each(run, model, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("One.\nTwo.")
    (folder / "b.xml").write_text("<?xml version='1.0'?>\n<p>The caf\u00e9\u200b.</p>\n")
    (folder / "c.txt").write_bytes(b"A line.\r\nAnother line.\r\n")
    error = run("eval", folder).err
    [notice] = notices(error)
    assert f"({folder / 'b.xml'}, line 1: '<?xml" in notice
    assert f"({folder / 'b.xml'}, line 2: " in notice
    [notice] = [line for line in error.splitlines() if "CR LF" in line]
    assert str(folder / "c.txt") in notice
    assert str(folder / "a.txt") not in notice
    for name in ("d.csv", "e.csv"):
        (tmp_path / name).write_text("item,text\n1,A caf\u00e9.\n,A dog.\n3,A\u200b cat.\n")
    tables = (tmp_path / "d.csv", tmp_path / "e.csv")
    error = run("eval", *tables, "--text-field", "text", "--reset-on-change", "item").err
    assert f"({tables[0]}, row 3: 'A<U+200B> cat" in error
    assert f"(row 2 of all, in {tables[0]}, is the first)" in error
    done = run("eval", *tables, "--text-field", "text", "--reset-on-change", "nothing")
    assert f"row 1 of all, in {tables[0]}, has no 'nothing'" in done.err


def test_prompts_are_looked_at_too(run, model, tmp_path):
    few = ["-n", "2", "--seed", "1"]
    assert "cafe<U+0301>" in notices(run("generate", "cafe\u0301", *few).err)[0]
    with standard_input("caf\u00e9\u200b".encode()):
        assert "zero-width" in notices(run("generate", "-", *few).err)[0]
    prompts = ["The ", "a\u200bb", "cafe\u0301\n"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    [notice] = notices(run("generate", "--prompts", tmp_path / "p.jsonl", *few).err)
    assert "prompt 2: 'a<U+200B>b'" in notice
    assert "prompt 3" in notice
    assert "blank" not in notice  # a model of bytes has no token with a blank before its word


@pytest.mark.parametrize("options", [["--text-field", "m"], ["--text-regex", "(?P<text>.*)"], ["--event-start", "x"]])
def test_logs_get_no_advice_on_how_to_write_a_text(run, model, tmp_path, options):
    text = " two  blanks\t(*so*) it\u2019s &amp; caf\u00e9\u200b \u2010\n"
    lines = [text.strip("\n"), "x a \x1b[1mcolor"]
    if options[0] == "--text-field":
        lines = [json.dumps({"m": line}) for line in lines]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    [notice] = notices(run("stream", tmp_path / "log", *options).err)
    assert "1 with control characters (line 2: " in notice
    assert ";" not in notice.partition("remove them")[2]


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        ("\ufeb3\u0644\u0627\u0645", "Arabic presentation forms"),
        ("\u0641\u06cc \u0627\u0644\u0645\u062f\u0631\u0633\u0629", "Persian letters in Arabic"),
        ("\u0633\u0640\u0640\u0644\u0627\u0645", "letters drawn out"),
        ("\u0633\u0644\u0627\u0645\u200f", "direction marks"),
        ("\uff76\uff85", "half-width letters"),
        ("\u0e01\u200b\u0e32\u0e23", "zero-width characters"),
        ("caf\u251c\u2310", "probably UTF-8 read as cp437"),
    ],
)
def test_all_commands_name_the_same_oddities(run, model, tmp_path, odd, kind):
    path = tmp_path / "odd.txt"
    path.write_text(f"{odd}\n" * 40)
    few = ["-n", "2", "--seed", "1"]
    train = ["train", path, "-o", tmp_path / "new", "--init", "none", "--dry-run"]
    for command in (["eval", path], ["stream", path], ["generate", odd, *few], train):
        [notice] = notices(run(*command).err)
        assert kind in notice


def test_training_names_only_what_is_in_many_lines(run, model, tmp_path):
    path = tmp_path / "odd.txt"
    train = ["train", path, "-o", tmp_path / "new", "--init", "none", "--dry-run"]
    path.write_text("cafe\u0301\n" + "plain\n" * 50)
    assert "1 with decomposed letters (line 1: " in notices(run(*train).err)[0]
    path.write_text("cafe\u0301\n" + "plain\n" * 150)
    assert not notices(run(*train).err)
    path.write_text("cafe\u0301\n" * 50)
    assert not notices(run(*train, "--binary").err)
