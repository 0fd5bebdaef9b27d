"""Resumption after `kill -9` at random moments, which must be exact to the bit.

A small run with dropout is killed repeatedly: while it starts, steps, validates, saves and ends, and resumed each time.
The finished run is compared with an uninterrupted one: weights, optimizer state, memory, random-number generator state,
training curve, best model.

    python benchmarks/kill.py [--kills 20] [--seed 0] [--write]
"""

import argparse
import hashlib
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "kill.json"
CLOCKS = {"seconds", "tokens_per_second"}
STEPS = 60


def command(text: Path, folder: Path, *more: str) -> list[str]:
    settings = {
        "preset": "tiny", "tokenizer": "bytes", "dropout": "0.1", "segment-len": "32", "mem-len": "32",
        "batch-size": "4", "max-steps": str(STEPS), "eval-every": "7", "save-every": "1",
        "threads": "1", "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "xlcli", "train", str(text), "-o", str(folder), *flags, "-q", *more]


def write_text(folder: Path) -> Path:
    text = folder / "text.txt"
    lines = (
        f"{i} men went to mow, {i * i % 97} sheep and a dog named {'Rex' if i % 5 else 'Tim'}\n" for i in range(800)
    )
    text.write_text("".join(lines))
    return text


def rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_begun(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / ".installing").exists()


def kill_once(arguments: list[str], folder: Path, rng: random.Random, share: float) -> str | None:
    """Starts the run and kills it at a random moment; returns the moment, or None if the run ended before it."""
    goal = rows(folder) + rng.randrange(1, max(2, int(share * STEPS))) if rng.random() < 0.85 else 0
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as child:
        while goal and child.poll() is None and rows(folder) < goal:
            time.sleep(0.002)
        time.sleep(rng.random() * (0.06 if goal else 2.5))
        child.send_signal(signal.SIGKILL)
        if child.wait() == 0:
            return None
        if child.returncode != -signal.SIGKILL:
            raise SystemExit(f"the run failed with status {child.returncode}")
    saving = any((folder / "checkpoints").glob(".tmp-*")) or any(folder.glob(".tmp-*"))
    return f"{'in a save at' if saving else 'at'} row {rows(folder)}" if goal else f"starting, at row {rows(folder)}"


def remains(folder: Path) -> dict[str, str]:
    """Digests of all files that must be equal."""
    newest = max((folder / "checkpoints").glob("step-????????"))
    facts = json.loads((newest / "state.json").read_bytes())
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    things = {path.name: path.read_bytes() for path in (*newest.glob("*.safetensors"), folder / "model.safetensors")}
    things["state"] = json.dumps({key: value for key, value in facts.items() if key not in CLOCKS}).encode()
    curve = [{key: value for key, value in row.items() if key not in CLOCKS} for row in curve]
    things["curve"] = json.dumps(curve).encode()
    return {"checkpoint": newest.name} | {name: hashlib.sha256(data).hexdigest() for name, data in things.items()}


def trial(place: Path, kills: int, seed: int) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Moments of the kills, and digests of the interrupted and the uninterrupted run."""
    text, whole, killed = write_text(place), place / "whole", place / "killed"
    subprocess.run(command(text, whole), check=True, stdout=subprocess.DEVNULL)
    rng, moments = random.Random(seed), []
    while len(moments) < kills:
        more = ("--resume",) if has_begun(killed) else ()
        moment = kill_once([*command(text, killed, *more)], killed, rng, share=2 / kills)
        if moment is None:  # the run has ended: another one takes the remaining kills
            if remains(killed) != remains(whole):
                break
            killed = place / f"killed{len(moments)}"
        else:
            moments.append(moment)
            print(f"kill {len(moments)}: {moment}", flush=True)
    more = ("--resume",) if has_begun(killed) else ()
    subprocess.run(command(text, killed, *more), check=True, stdout=subprocess.DEVNULL)
    return moments, remains(killed), remains(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        moments, found, expected = trial(Path(place), options.kills, options.seed)
    differing = sorted(name for name in expected if found.get(name) != expected[name])
    result = {
        "kills": len(moments),
        "in_a_save": sum(moment.startswith("in a save") for moment in moments),
        "starting": sum(moment.startswith("starting") for moment in moments),
        "steps": STEPS,
        "seed": options.seed,
        "differing": differing,
        "same": sorted(set(expected) - set(differing)),
        "seconds": round(time.monotonic() - began, 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if differing or len(moments) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
