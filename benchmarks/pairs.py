"""Minimal pairs and choices: BLiMP (Warstadt et al. 2020) and the zero-shot sets of BabyLM (Charpentier et al. 2025).

    git clone https://github.com/alexwarstadt/blimp
    python benchmarks/pairs.py blimp [--babylm FOLDER] [-m books] [-m models/other] [--sets blimp supplement ...]
    python benchmarks/pairs.py --table benchmarks/results/pairs.json     # prints the tables

FOLDER is `evaluation_data/full_eval` of github.com/babylm/evaluation-pipeline-2025, with the folders that `SETS`
names; sets without a folder are left out. An item is right if the model gives its first option more probability than
each other:

    blimp, blimp_filtered, supplement   two sentences, each as if it were alone (`xlcli eval --pairs`)
    ewok                                two targets after the first context (`xlcli eval --score-field`)
    comps                               one property after two subjects
    entity_tracking                     five contents of a box after what was done with all boxes

as `evaluation_pipeline/sentence_zero_shot` scores them: the sum of the log probabilities of the tokens of the
sentence or continuation, with its blank, in the tokens of the whole text. Two things differ. A sentence of a pair is
scored with the end of its line. Options that are equally good share their item, while the pipeline takes the first
one, which is right.

The share of a set is the mean of its subtasks: paradigms, files, domains; of entity tracking the mean of three
files, each the mean of its numbers of operations. `--items N` takes the first N items of each subtask. BLiMP stands
beside the published shares of an n-gram model, an LSTM, a Transformer-XL and GPT-2, read from the summary in its
folder, which also has the phenomena; `blimp_filtered` are the pairs of it whose words BabyLM's text has. Chance is
0.5, in entity tracking 0.2. What the results have already stays there, unless its model and set are named again.
"""

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from runs import machine, processor_seconds_of_commands, save, write_rows, xlcli

SUMMARY = "raw_results/summary/models_summary.jsonl"
PUBLISHED = {"ngram": "n-gram", "lstm": "LSTM", "txl": "Transformer-XL", "gpt2": "GPT-2"}
"""Column of the summary to the name of a model."""
BASELINES = {
    "GPT-2, 10 M words": {"blimp_filtered": 0.651, "supplement": 0.573, "ewok": 0.498},
    "GPT-2, 100 M words": {"blimp_filtered": 0.745, "supplement": 0.650},
}
"""Published shares of BabyLM's GPT-2 of 98 M parameters."""
N_PARADIGMS, N_PAIRS = 67, 1000
OVERALL = "overall"


@dataclass(frozen=True)
class Item:
    """Options of which the first one is right; each is a context, empty for a sentence, and what is scored."""

    subtask: str
    options: list[tuple[str, str]]


def sentences(row: Mapping, stem: str) -> Item:
    return Item(row.get("UID", stem), [("", row["sentence_good"]), ("", row["sentence_bad"])])


def ewok(row: Mapping, stem: str) -> Item:
    return Item(row["Domain"], [(row["Context1"], row[target]) for target in ("Target1", "Target2")])


def comps(row: Mapping, stem: str) -> Item:
    prefixes = row["prefix_acceptable"], row["prefix_unacceptable"]
    return Item(stem, [(prefix, row["property_phrase"]) for prefix in prefixes])


def entity_tracking(row: Mapping, stem: str) -> Item:
    options = [(row["input_prefix"], option) for option in row["options"]]
    return Item(f"{stem}/{row['numops']}", options)


SETS: dict[str, tuple[str, Callable[[Mapping, str], Item]]] = {
    "blimp": ("data", sentences),
    "blimp_filtered": ("blimp_filtered", sentences),
    "supplement": ("supplement_filtered", sentences),
    "ewok": ("ewok_filtered", ewok),
    "comps": ("comps", comps),
    "entity_tracking": ("entity_tracking", entity_tracking),
}
"""Name of a set to its folder and to what makes an item of a row and the name of its file without `.jsonl`."""


def summary(folder: Path) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """Paradigm to phenomenon, and name of a published model to its shares by paradigm."""
    path = folder / SUMMARY
    if not path.is_file():
        raise SystemExit(f"{path} is missing; clone https://github.com/alexwarstadt/blimp")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    paradigms = [row for row in rows if row["UID"] != OVERALL]
    terms = {row["UID"]: row["linguistics_term"] for row in paradigms}
    found = {name: {row["UID"]: row[column] for row in paradigms} for column, name in PUBLISHED.items()}
    for row in rows:
        if row["UID"] == OVERALL:
            for column, name in PUBLISHED.items():
                if abs(by_term(found[name], terms)[row["linguistics_term"]] - row[column]) > 1e-6:
                    raise SystemExit(
                        f"{path}: the mean of {name} for {row['linguistics_term']} is not the published one"
                    )
    return terms, found


def by_term(shares: Mapping[str, float], terms: Mapping[str, str]) -> dict[str, float]:
    """Mean share of the paradigms of each phenomenon, and of all."""
    groups = defaultdict(list)
    for paradigm, share in shares.items():
        groups[terms[paradigm]].append(share)
    return {OVERALL: mean(shares.values())} | {term: mean(group) for term, group in groups.items()}


def overall(shares: Mapping[str, float]) -> float:
    """Share of a set: the mean of its subtasks, where they are named `file/part` the mean of the means of files."""
    groups = defaultdict(list)
    for subtask, share in shares.items():
        groups[subtask.partition("/")[0]].append(share)
    return mean(mean(group) for group in groups.values())


def read(name: str, home: Path, n_items: int | None = None) -> list[Item]:
    """Items of a set, the first `n_items` of each subtask, none if its folder is not in `home`."""
    folder, decode = SETS[name]
    found: dict[str, list[Item]] = defaultdict(list)
    for path in sorted((home / folder).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            item = decode(json.loads(line), path.stem)
            found[item.subtask].append(item)
    if name == "blimp" and (len(found) != N_PARADIGMS or any(len(items) != N_PAIRS for items in found.values())):
        raise SystemExit(f"{home / folder} does not have {N_PAIRS} pairs of each of the {N_PARADIGMS} paradigms")
    return [item for items in found.values() for item in items[:n_items]]


def score(model: str, items: list[Item]) -> dict[str, object]:
    """Shares of a model by subtask, and the time."""
    start, before = time.perf_counter(), processor_seconds_of_commands()
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    with tempfile.TemporaryDirectory() as folder:
        found = (of_choices if items[0].options[0][0] else of_pairs)(model, items, Path(folder))
    return found | {
        "items": len(items),
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(processor_seconds_of_commands() - before, 1),
    }


def of_pairs(model: str, items: list[Item], home: Path) -> dict[str, object]:
    write_rows(
        home / "items.jsonl",
        ({"subtask": item.subtask, "good": item.options[0][1], "bad": item.options[1][1]} for item in items),
    )
    pairs = ["--pairs", "good,bad", "--by", "subtask", "--json", "-q", "--threads", "1"]
    found = json.loads(xlcli("eval", "items.jsonl", "-m", model, *pairs, cwd=home))
    groups = {row["group"]: row for row in found["pairs"] if row["group"] is not None}
    shares = {key: {subtask: row[key] for subtask, row in groups.items()} for key in ("share", "share_per_token")}
    return {
        "parameters": found["parameters"],
        "shares": shares["share"],
        "shares_per_token": shares["share_per_token"],
    }


def of_choices(model: str, items: list[Item], home: Path) -> dict[str, object]:
    write_rows(
        home / "items.jsonl",
        (
            {"item": number, "context": context, "continuation": continuation, "correct": int(i == 0)}
            for number, item in enumerate(items)
            for i, (context, continuation) in enumerate(item.options)
        ),
    )
    choices = ["--text-field", "context", "--score-field", "continuation", "--by", "item", "--words", "rows.jsonl"]
    found = json.loads(xlcli("eval", "items.jsonl", "-m", model, *choices, "--json", "-q", "--threads", "1", cwd=home))
    best: dict[int, list[int]] = defaultdict(list)
    for line in (home / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["best"]:
            best[int(row["item"])].append(int(row["correct"]))
    by_subtask: dict[str, list[float]] = defaultdict(list)
    for number, item in enumerate(items):
        by_subtask[item.subtask].append(mean(best[number]))
    assert abs(mean(mean(right) for right in best.values()) - found["correct"]) < 1e-6
    return {
        "parameters": found["parameters"],
        "ties": sum(len(right) > 1 for right in best.values()),
        "shares": {subtask: mean(shares) for subtask, shares in by_subtask.items()},
    }


def phenomena_table(result: dict) -> str:
    """Markdown table of BLiMP: a row for each phenomenon, a column for each model."""
    models = {name: sets["blimp"]["shares"] for name, sets in result["models"].items() if "blimp" in sets}
    columns = {name: by_term(shares, result["phenomena"]) for name, shares in (models | result["published"]).items()}
    lines = [f"| phenomenon | paradigms | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    counts = Counter({OVERALL: N_PARADIGMS}) + Counter(result["phenomena"].values())
    for term, count in counts.items():
        shares = " | ".join(f"{column[term]:.3f}" for column in columns.values())
        lines.append(f"| {term.replace('_', ' ')} | {count} | {shares} |")
    return "\n".join(lines)


def sets_table(result: dict) -> str:
    """Markdown table: a row for each set, a column for each model."""
    models = result["models"]
    columns = {
        name: {each: overall(sets[each]["shares"]) for each in sets} for name, sets in models.items()
    } | BASELINES
    lines = [f"| set | items | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for name in SETS:
        counts = {sets[name]["items"] for sets in models.values() if name in sets}
        if counts:
            shares = (f"{column[name]:.3f}" if name in column else "–" for column in columns.values())
            items = " or ".join(f"{count:,}" for count in sorted(counts))
            lines.append(f"| {name.replace('_', ' ')} | {items} | {' | '.join(shares)} |")
    return "\n".join(lines)


def table(result: dict) -> str:
    lines = [sets_table(result)]
    if any("blimp" in sets for sets in result["models"].values()):
        lines.insert(0, phenomena_table(result))
    for name, sets in result["models"].items():
        for each, found in sets.items():
            times = f"{found['seconds']:.0f} s, {found['processor_seconds']:.0f} s of one thread"
            lines.append(f"{name}, {found['parameters'] / 1e6:.1f} M parameters, {each}: {times}")
    return "\n\n".join(lines)


def evaluate(models: Iterable[str], homes: Mapping[str, Path], out: Path, n_items: int | None = None) -> dict:
    """Scores models on sets, each set in its folder, saves each result at once and returns all that `out` has."""
    result = json.loads(out.read_text()) if out.exists() else {"models": {}}
    if "blimp" in homes:
        result["phenomena"], result["published"] = summary(homes["blimp"])
    for model in models:
        for name, home in homes.items():
            items = read(name, home, n_items)
            if not items:
                continue
            about = {"machine": machine(), "command": f"benchmarks/pairs.py -m {model} --sets {name}"}
            if n_items is not None:
                about["command"] += f" --items {n_items}"
            found = about | score(model, items)
            result["models"].setdefault(Path(model).name, {})[name] = found
            save(out, result)
            print(f"{model}, {name}: {overall(found['shares']):.3f}, {found['seconds']} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blimp", type=Path, nargs="?")
    parser.add_argument("--babylm", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--items", type=int)
    parser.add_argument("-m", "--model", action="append")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pairs.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    homes = {name: options.blimp if name == "blimp" else options.babylm for name in options.sets}
    homes = {name: home for name, home in homes.items() if home is not None}
    if not homes:
        parser.error("name the folder of BLiMP, or with --babylm that of BabyLM's sets")
    print(table(evaluate(options.model or ["books"], homes, options.out, options.items)))


if __name__ == "__main__":
    main()
