"""Runs of the command line in a folder, and results that are saved run by run, so that a benchmark can be restarted."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, object]:
    """Hardware and versions."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in names if line.startswith("model name"))
    cpu = next(models, platform.processor())
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "xlcli": version("xlcli"),
    }


def saved(out: Path, tokens: int) -> dict[str, dict]:
    """Results of earlier starts, or an empty table of runs; creates the folder."""
    out.parent.mkdir(exist_ok=True)
    result = json.loads(out.read_text()) if out.exists() else {"machine": machine(), "runs": {}}
    return result | {"tokens": tokens}


def save(out: Path, result: dict[str, dict], *, indent: int | None = 1) -> None:
    """Replaces the results; a benchmark that is killed leaves the old ones or the new ones."""
    written = out.with_suffix(".part")
    written.write_text(json.dumps(result, indent=indent) + "\n")
    written.replace(out)


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replaces a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def beginning(path: Path, n: int) -> bytes:
    """The first lines of a file, at most n bytes."""
    data = path.read_bytes()[:n]
    return data[: data.rfind(b"\n") + 1]


def xlcli(*arguments: str, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of one command, with these environment variables in addition."""
    command = [sys.executable, "-m", "xlcli", *arguments]
    env = os.environ | (environment or {})
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def train(
    home: Path, *text: str, settings: Mapping[str, object], tokens: int, seed: int = 0
) -> dict[str, str | int | float]:
    """Trains the model `model` in `home` on one thread: its size, speed and command (files without folders).

    Args:
        home: Folder of the text.
        text: Arguments that name text, tokenizer and preset.
        settings: Keys of the configuration.
        tokens: Training budget.
        seed: Seed of the run.
    """
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    budget = ["--max-tokens", str(tokens), "--seed", str(seed)]
    command = ["train", *text, *sets, *budget, "-o", "model", "--overwrite", "-q", "--threads", "1"]
    before = processor_seconds_of_commands()
    xlcli(*command, cwd=home)
    record = json.loads((home / "model" / "record.json").read_text())
    return {
        "seed": seed,
        "parameters": record["parameters"],
        "train_tokens_per_second": record["tokens"] / record["seconds"],
        "train_processor_seconds": round(processor_seconds_of_commands() - before, 2),
        "command": " ".join(["xlcli", *(Path(word).name if Path(word).is_absolute() else word for word in command)]),
    }


def processor_seconds_of_commands() -> float:
    """Processor time of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
