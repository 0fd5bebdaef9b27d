"""Scores of one text with different segment lengths, batch sizes and pipe portions, which must agree.

    python benchmarks/invariance.py TEXT [--model NAME] [--mem-len 256] [--bytes 100000] [--out ...]

Segment lengths 1, 32, 128, 512; batch sizes 1 and 8; a pipe fed all at once and one byte at a time. Exit code 0 if
all scores agree to 1e-4 bits per byte.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import machine


def run(*arguments: str, pieces: list[bytes] | None = None) -> float:
    """Bits per byte printed by one command."""
    command = [sys.executable, "-m", "xlcli", *arguments, "--json", "--quiet"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for piece in pieces or []:
            process.stdin.write(piece)
            process.stdin.flush()
        process.stdin.close()
        output = process.stdout.read().decode()
    return float(json.loads(output.splitlines()[-1])["bits_per_byte"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="books")
    parser.add_argument("--mem-len", default="256")
    parser.add_argument("--bytes", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "invariance.json")
    options = parser.parse_args()
    data = options.text.read_bytes()[: options.bytes]
    common = ["-m", options.model, "--mem-len", options.mem_len]
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(data)
        for segment_len in (1, 32, 128, 512):
            scores[f"eval, segment {segment_len}, batch 1"] = run(
                "eval", str(path), *common, "--segment-len", str(segment_len), "--set", "eval.batch_size=1"
            )
        scores["eval, segment 128, batch 8"] = run(
            "eval", str(path), *common, "--segment-len", "128", "--set", "eval.batch_size=8"
        )
        scores["eval, defaults"] = run("eval", str(path), *common)
    scores["stream, all at once"] = run("stream", *common, "--emit", "stats", pieces=[data])
    scores["stream, byte by byte"] = run(
        "stream", *common, "--emit", "stats", pieces=[data[i : i + 1] for i in range(len(data))]
    )
    spread = max(scores.values()) - min(scores.values())
    result = {"bytes": len(data), "model": options.model, "mem_len": int(options.mem_len), "bits_per_byte": scores}
    result |= {"spread": spread, "machine": machine()}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if spread <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
