"""Adaptive computation time beside fixed numbers of steps: bits per byte, mean steps and processor time per token.

    python benchmarks/halting.py TEXT [--tokens 300000] [--seeds 3] [--out benchmarks/results/halting.json]
    python benchmarks/halting.py --table benchmarks/results/halting.json

Every run is one `xlcli train` of the preset small-universal or small-universal-act on TEXT and three evaluations of its
validation text, of which the fastest counts. Runs differ only in steps, weight of the ponder cost and seed. A restarted
benchmark continues with the missing runs. One thread. Times are those of the processor, so other programs disturb them
little; the time of training is that of the whole command, validation included, less the time of a run of one step.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from runs import save, saved, train

import xlcli
from xlcli.events import Score

VARIANTS = {
    **{f"{n} steps": ("small-universal", {"model.stack.n_steps": n}) for n in (1, 2, 3, 4)},
    **{
        f"halting, ponder weight {weight}": ("small-universal-act", {"model.stack.ponder_weight": weight})
        for weight in (0.003, 0.01, 0.03, 0.1)
    },
}
"""Name to preset and settings."""
SHAPE = {"train.batch_size": 4}
N_TIMED = 3


def one(home: Path, text: Path, name: str, seed: int, tokens: int) -> dict[str, object]:
    """Trains and scores one variant."""
    preset, settings = VARIANTS[name]
    run = train(home, str(text), "--preset", preset, settings=SHAPE | settings, tokens=tokens, seed=seed)
    model = xlcli.load(home / "model", threads=1, device="cpu")
    seconds = []
    for _ in range(N_TIMED):
        before = time.process_time()
        score = next(event for event in xlcli.evaluate(model) if isinstance(event, Score))
        seconds.append(time.process_time() - before)
    return run | {
        "bits_per_byte": score.bits_per_byte,
        "mean_steps": score.mean_steps,
        "eval_ms_per_token": 1000 * min(seconds) / score.tokens,
    }


def table(result: dict[str, dict]) -> str:
    """One row for each variant: means over the seeds, half the range of the bits in brackets."""
    lines = [
        "| stack | mean steps | bits per byte | ms per token, evaluation | ms per token, training | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in result["runs"].items():
        bits = [run["bits_per_byte"] for run in runs]
        steps = statistics.mean(run["mean_steps"] or float(name.split()[0]) for run in runs)
        evaluation = statistics.median(run["eval_ms_per_token"] for run in runs)
        training = statistics.median(run["train_processor_seconds"] for run in runs) - result["start"]
        mean_bits = f"{statistics.mean(bits):.4f} (± {(max(bits) - min(bits)) / 2:.4f})"
        times = f"{evaluation:.3f} | {1000 * training / result['tokens']:.3f}"
        lines.append(f"| {name} | {steps:.2f} | {mean_bits} | {times} | {len(runs)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="names, separated by semicolons")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "halting.json")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    if arguments.text is None:
        parser.error("name the text")
    text, found = arguments.text.resolve(), saved(arguments.out, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if "start" not in found:
            first = train(home, str(text), "--preset", "small-universal", settings=SHAPE, tokens=1)
            found["start"] = first["train_processor_seconds"]
        for seed in range(arguments.seeds):
            for name in arguments.only.split(";") if arguments.only else VARIANTS:
                runs = found["runs"].setdefault(name, [])
                if seed not in [run["seed"] for run in runs]:
                    runs.append(one(home, text, name, seed, arguments.tokens))
                    save(arguments.out, found)
                    print(name, runs[-1], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
