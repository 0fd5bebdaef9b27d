"""Bits per byte after equal budgets: runs that start from the bundled model (`--init books`), and runs from scratch.

    python benchmarks/adaptation.py DATA --minutes 2 10 [--tokens 600000] [--texts shakespeare log python]

DATA holds `tinyshakespeare.txt`, `logs/Linux_2k.log` and `code/python-stdlib-*`. Of the first two the last 10 % are
held out; of the third, the validation modules. Each run validates on the last 5 % of its training text, and its best
weights are scored once on the held-out text, which training never reads. Without --preset, runs from scratch take the
default of `xlcli train`. Results are written after each run, and runs that are in the file are not repeated. Run it on
an idle machine if budgets are in minutes.
"""

import argparse
import gzip
import json
import os
import tempfile
from pathlib import Path

from runs import machine, xlcli

KEPT = ("steps", "tokens", "seconds", "parameters", "tokenizer", "best_step")


def texts(data: Path) -> dict[str, tuple[bytes, bytes]]:
    """Training text and held-out text by name."""
    shakespeare, log = (data / "tinyshakespeare.txt").read_bytes(), (data / "logs/Linux_2k.log").read_bytes()
    cut = log.rindex(b"\n", 0, len(log) * 9 // 10) + 1
    code = gzip.decompress((data / "code/python-stdlib-train.txt.gz").read_bytes())
    return {
        "shakespeare": (shakespeare[:1_003_854], shakespeare[1_003_854:]),
        "log": (log[:cut], log[cut:]),
        "python": (code, (data / "code/python-stdlib-valid.txt").read_bytes()),
    }


def trial(options: list[str], parts: tuple[bytes, bytes]) -> dict[str, object]:
    """Record, validation curve and held-out score of one run of `xlcli train` with these options."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, part in zip(("train", "held"), parts, strict=True):
            (home / f"{name}.txt").write_bytes(part)
        xlcli("train", "train.txt", "--valid", "0.05", "--test", "0", "-o", "models/m", *options, cwd=home)
        record = json.loads((home / "models/m/record.json").read_text())
        rows = [json.loads(line) for line in (home / "models/m/metrics.jsonl").read_text().splitlines()]
        curve = [(row["tokens"], row["validation_bits_per_byte"]) for row in rows if "validation_bits_per_byte" in row]
        score = json.loads(xlcli("eval", "held.txt", "-m", "m", "--json", *options[-2:], cwd=home))
    return {"bits_per_byte": score["bits_per_byte"], **{name: record[name] for name in KEPT}, "validation": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, nargs="*", default=[])
    parser.add_argument("--tokens", type=int, nargs="*", default=[])
    parser.add_argument("--texts", nargs="*", default=["shakespeare", "log", "python"])
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--preset")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "adaptation.json")
    given = parser.parse_args()
    budgets = [("--max-time", f"{minutes * 60:.0f}s") for minutes in given.minutes]
    budgets += [("--max-tokens", str(tokens)) for tokens in given.tokens]
    if not budgets:
        parser.error("give --minutes or --tokens")
    scratch = ["--preset", given.preset] if given.preset else ["--init", "none"]
    found = json.loads(given.out.read_text()) if given.out.exists() else {"machine": machine(), "runs": []}
    known = {run["command"] for run in found["runs"]}
    available = texts(given.data)
    for name in given.texts:
        for budget in budgets:
            for start in (["--init", "books"], scratch):
                options = [*start, *budget, "--threads", given.threads]
                command = f"{name}: {' '.join(options)}"
                if command in known:
                    continue
                result = {"text": name, "command": command} | trial(options, available[name])
                found["runs"].append(result)
                print(f"{result['bits_per_byte']:.4f}  {command}", flush=True)
                given.out.parent.mkdir(exist_ok=True)
                given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
