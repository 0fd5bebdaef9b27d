"""Counting, reporting and isolation that all campaigns share.

A campaign tries numbered cases. With `--write` it adds its counts to `benchmarks/results/NAME.json`, and the next run
continues with the next number, so that counts add up over runs. A case that fails is kept in `campaign-failures/`, and
`--case N` tries it alone.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from xlcli import __version__

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "store"), str(TESTS / "training")]

RESULTS = TESTS.parent / "benchmarks" / "results"
FAILURES = Path("campaign-failures").absolute()
SECONDS = 20
"""Maximum CPU time of a case; ten times as much wall time, because other processes take theirs."""
MEMORY = 2 * 2**30
"""Maximum memory of a case in bytes, beyond that of the process before it."""
HANGS = dict.fromkeys((-signal.SIGPROF, -signal.SIGALRM), f"took longer than {SECONDS} s")
"""Reasons of the signals of `limit_time`."""

FORBIDDEN = {
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect",
    "socket.getaddrinfo", "ctypes.dlopen",
}  # fmt: skip
"""Audit events of Python that no file may cause."""


class Tally:
    """Counts of one part of a campaign."""

    def __init__(self, campaign: str, part: str, *, write: bool = False, keep: bool = True) -> None:
        self.workers = 1
        self.path, self.part, self.write, self.keep = RESULTS / f"{campaign}.json", part, write, keep
        self.first = sum(row["tried"] for row in self._rows() if row["part"] == part) if write else 0
        self.tried, self.failures, self.notes = 0, {}, {}
        self.started = time.monotonic()

    def survived(self, n: int = 1) -> None:
        self.tried += n

    def failed(self, case: int, reason: str, files: Path | None = None) -> None:
        """Counts and prints a failure, and keeps a copy of its files."""
        self.tried += 1
        self.failures[case] = reason
        print(f"{self.path.stem} {self.part}: case {case} failed: {reason}", flush=True)
        if files is not None and self.keep:
            shutil.copytree(files, FAILURES / f"{self.path.stem}-{self.part}-{case}", symlinks=True, dirs_exist_ok=True)

    def finish(self) -> int:
        """Prints the counts and writes them if asked; returns the exit code."""
        lost = len(self.failures)
        print(f"{self.path.stem} {self.part}: {self.tried:,} tried, {self.tried - lost:,} survived", flush=True)
        if self.write and self.tried:
            versions = {"part": self.part, "xlcli": __version__, "torch": torch.__version__}
            seconds = round(time.monotonic() - self.started)
            row = {
                **versions, "first_case": self.first, "tried": self.tried, "survived": self.tried - lost,
                "seconds": seconds, **self.notes, "failures": {str(case): why for case, why in self.failures.items()},
            }  # fmt: skip
            rows = self._rows()
            last = next((old for old in reversed(rows) if old["part"] == self.part), None)
            if last and versions.items() <= last.items() and not lost and not last["failures"]:
                last |= {name: last[name] + row[name] for name in ("tried", "survived", "seconds")} | self.notes
            else:
                rows.append(row)
            self.path.write_text(json.dumps(rows, indent=1) + "\n")
        return bool(lost)

    def _rows(self) -> list[dict]:
        return json.loads(self.path.read_bytes()) if self.path.exists() else []


def run(
    document: str,
    parts: dict[str, Callable[[Tally, Iterator[int], Path], None]],
    cases: int,
    *,
    has_workers: bool = False,
) -> int:
    """The command line of a campaign: runs parts, each a function of tally, case numbers and an empty folder."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"{', '.join(parts)}; default: all")
    parser.add_argument("--cases", type=int, default=cases, help=f"number of cases of each part; default: {cases}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--case", type=int, help="try this case alone")
    parser.add_argument("--write", action="store_true", help=f"add the counts to {RESULTS.name}/")
    if has_workers:
        parser.add_argument(
            "--workers", type=int, default=1, help="number of processes that share the cases; default: 1"
        )
    options = parser.parse_args()
    code = 0
    for part in options.part or parts:
        tally = Tally(Path(sys.argv[0]).stem, part, write=options.write)
        tally.workers = options.workers if has_workers else 1
        end = time.monotonic() + options.seconds
        numbers = iter([options.case]) if options.case is not None else until(tally.first, options.cases, end)
        with workplace() as place:
            try:
                parts[part](tally, numbers, place)
            finally:
                code |= tally.finish()
    return code


def until(first: int, cases: int, end: float) -> Iterator[int]:
    """Case numbers, until a time."""
    for case in range(first, first + cases):
        if time.monotonic() > end:
            return
        yield case


@contextmanager
def workplace() -> Iterator[Path]:
    """An empty working folder, in memory where that exists, with a token cache of its own; one CPU thread."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    torch.set_num_threads(1)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=memory, prefix="campaign-") as name:
        os.environ["XLCLI_CACHE"] = f"{name}/cache"
        yield Path(name)
        os.chdir(before)


def quick_runs() -> None:
    """Makes short runs quicker: a sample of three tokens."""
    from xlcli.training import validation

    validation.SAMPLE_TOKENS = 3


def fork(work: Callable[[], int], log: Path | None = None) -> int:
    """Starts a child that ends with the exit code of `work`; its output goes to `log`. Returns its process id."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 70
    try:
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        code = work()
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Exit code of a child, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*arguments: str) -> Callable[[], int]:
    """The command line of xlcli, for `fork`."""
    from xlcli.cli.entry import main

    return lambda: main(arguments)


def limit_time() -> None:
    """Ends this process if the case that begins now takes too long."""
    for timer, number, seconds in (
        (signal.ITIMER_PROF, signal.SIGPROF, SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, 10 * SECONDS),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, seconds)


def watch(place: Path) -> list[str]:
    """A list to which every start of a program, connection, unpickling and write outside `place` is added from now on.

    So is every read outside `place` and the folders of Python and xlcli. The hook lasts until the process ends.
    """
    readable = tuple(map(str, (place, TESTS.parent, sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev/null", "/usr")))
    found: list[str] = []

    def hook(event: str, values: tuple) -> None:
        if event in FORBIDDEN:
            found.append(f"{event} {values}")
        elif event == "open" and isinstance(values[0], str | bytes):
            name, flags = os.fsdecode(values[0]), values[2] or 0
            path, writes = str(Path(name).absolute()), flags & (os.O_WRONLY | os.O_RDWR)
            allowed = (str(place),) if writes else readable
            # shutil.rmtree opens folders by their bare names, relative to a descriptor.
            if not path.startswith(allowed) and (writes or "/" in name):
                found.append(f"opened {path}")

    sys.addaudithook(hook)
    return found


def limit_memory() -> None:
    """Limits the memory of this process to `MEMORY` bytes more than now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
