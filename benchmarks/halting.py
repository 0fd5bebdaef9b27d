"""Adaptive computation time beside fixed numbers of steps: bits per byte, mean steps and tokens per second.

    python benchmarks/halting.py TEXT [--tokens 300000] [--seeds 3] [--out benchmarks/results/halting.json]
    python benchmarks/halting.py --table benchmarks/results/halting.json

Every run is one `xlcli train` of the preset small-universal or small-universal-act on TEXT and three timed `xlcli eval`
of its validation text, of which the fastest counts. Runs differ only in steps, weight of the ponder cost and seed. A
restarted benchmark continues with the missing runs. Use one thread on an otherwise idle core.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from equal_time import machine
from positions import xlcli

VARIANTS = {
    **{f"{n} steps": {"preset": "small-universal", "model.stack.n_steps": n} for n in (1, 2, 3, 4)},
    **{
        f"halting, ponder weight {weight}": {"preset": "small-universal-act", "model.stack.ponder_weight": weight}
        for weight in (0.003, 0.01, 0.03, 0.1)
    },
}
N_TIMED = 3


def one(home: Path, text: Path, settings: dict[str, object], seed: int, tokens: int) -> dict[str, object]:
    """Trains and scores one variant."""
    sets = [word for key, value in settings.items() if key != "preset" for word in ("--set", f"{key}={value}")]
    fixed = ["--threads", "1", "-q", "--overwrite", "-o", "model"]
    budget = ["--max-tokens", str(tokens), "--seed", str(seed)]
    command = ["train", str(text), "--preset", str(settings["preset"]), *sets, *budget, *fixed]
    xlcli(*command, cwd=home)
    record = json.loads((home / "model" / "record.json").read_text())
    scored = [json.loads(xlcli("eval", "-m", "model", "--json", "--threads", "1", cwd=home)) for _ in range(N_TIMED)]
    return {
        "seed": seed,
        "bits_per_byte": scored[0]["bits_per_byte"],
        "mean_steps": scored[0].get("mean_steps"),
        "eval_tokens_per_second": max(score["tokens_per_second"] for score in scored),
        "train_tokens_per_second": record["tokens"] / record["seconds"],
        "command": "xlcli " + " ".join(command),
    }


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """One row for each variant: means over the seeds, half the range of the bits in brackets."""
    lines = [
        "| stack | mean steps | bits per byte | tokens/s, evaluation | tokens/s, training | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, seeds in runs.items():
        bits = [run["bits_per_byte"] for run in seeds]
        steps = statistics.mean(run["mean_steps"] or float(name.split()[0]) for run in seeds)
        speeds = (
            f"{statistics.median(run[f'{part}_tokens_per_second'] for run in seeds):,.0f}" for part in ("eval", "train")
        )
        mean_bits = f"{statistics.mean(bits):.4f} (± {(max(bits) - min(bits)) / 2:.4f})"
        lines.append(f"| {name} | {steps:.2f} | {mean_bits} | {' | '.join(speeds)} | {len(bits)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "halting.json")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())["runs"]))
        return
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"machine": machine(), "runs": {}}
    found["tokens"] = arguments.tokens
    for seed in range(arguments.seeds):
        for name, settings in VARIANTS.items():
            runs = found["runs"].setdefault(name, [])
            if seed in [run["seed"] for run in runs]:
                continue
            with tempfile.TemporaryDirectory() as home:
                runs.append(one(Path(home), arguments.text.resolve(), settings, seed, arguments.tokens))
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(name, runs[-1], flush=True)
    print(table(found["runs"]))


if __name__ == "__main__":
    main()
