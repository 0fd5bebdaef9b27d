"""Minimal pairs of English grammar: BLiMP (Warstadt et al. 2020), 67 paradigms of 1,000 pairs each.

    git clone https://github.com/alexwarstadt/blimp
    python benchmarks/pairs.py blimp [-m books] [-m models/other] [--out benchmarks/results/pairs.json]
    python benchmarks/pairs.py --table benchmarks/results/pairs.json     # prints the table

Each model is one `xlcli eval --pairs`: the share of pairs whose good sentence is more probable than the bad one, each
sentence as if it were alone. Beside them stand the published shares of an n-gram model, an LSTM, a Transformer-XL and
GPT-2, read from the summary in the folder of BLiMP. Phenomena are those of the summary, and the share of a phenomenon,
or of all, is the mean of its paradigms, as published. A share of 0.5 is chance. Models that the results have already
stay there, unless they are named again.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from runs import machine, processor_seconds_of_commands, save, xlcli

SUMMARY = "raw_results/summary/models_summary.jsonl"
PUBLISHED = {"ngram": "n-gram", "lstm": "LSTM", "txl": "Transformer-XL", "gpt2": "GPT-2"}
"""Column of the summary to the name of a model."""
N_PARADIGMS, N_PAIRS = 67, 1000
OVERALL = "overall"


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


def evaluate(model: str, folder: Path, terms: Mapping[str, str]) -> dict[str, object]:
    """Shares of a model by paradigm, and the time."""
    files = sorted(str(path) for path in (folder / "data").glob("*.jsonl"))
    pairs = ["--pairs", "sentence_good,sentence_bad", "--by", "UID", "--json", "-q", "--threads", "1"]
    start, before = time.perf_counter(), processor_seconds_of_commands()
    score = json.loads(xlcli("eval", *files, "-m", model, *pairs, cwd=Path()))
    seconds = time.perf_counter() - start
    groups = {row["group"]: row for row in score["pairs"] if row["group"] is not None}
    if groups.keys() != terms.keys() or any(row["pairs"] != N_PAIRS for row in groups.values()):
        raise SystemExit(f"{folder / 'data'} does not have {N_PAIRS} pairs of each of the {N_PARADIGMS} paradigms")
    return {
        "parameters": score["parameters"],
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds_of_commands() - before, 1),
        "shares": {paradigm: row["share"] for paradigm, row in groups.items()},
        "shares_per_token": {paradigm: row["share_per_token"] for paradigm, row in groups.items()},
    }


def table(result: dict) -> str:
    """Markdown table: a row for each phenomenon, a column for each model."""
    columns = {name: by_term(model["shares"], result["phenomena"]) for name, model in result["models"].items()}
    columns |= {name: by_term(shares, result["phenomena"]) for name, shares in result["published"].items()}
    lines = [f"| phenomenon | paradigms | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    counts = Counter({OVERALL: N_PARADIGMS}) + Counter(result["phenomena"].values())
    for term, count in counts.items():
        shares = " | ".join(f"{column[term]:.3f}" for column in columns.values())
        lines.append(f"| {term.replace('_', ' ')} | {count} | {shares} |")
    for name, model in result["models"].items():
        times = f"{model['seconds']:.0f} s, {model['processor_seconds']:.0f} s of one thread"
        lines += ["", f"{name}, {model['parameters'] / 1e6:.1f} M parameters: {times} of {model['machine']['cpu']}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blimp", type=Path, nargs="?")
    parser.add_argument("-m", "--model", action="append")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pairs.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.blimp is None:
        parser.error("name the folder of BLiMP")
    terms, published = summary(options.blimp)
    models = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    result = {"phenomena": terms, "published": published, "models": models}
    for model in options.model or ["books"]:
        command = f"benchmarks/pairs.py blimp -m {model}"
        found = {"machine": machine(), "command": command} | evaluate(model, options.blimp, terms)
        models[Path(model).name] = found
        save(options.out, result)
        print(model, found["seconds"], "s", flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
