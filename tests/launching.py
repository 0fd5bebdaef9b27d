"""Several processes that run one function of a test module as ranks of one run."""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from xlcli.ranks import STORE

ROOT = Path(__file__).parent.parent


def start(size, call, *, variables=None, **options):
    """`size` processes that execute the Python code `call`, each as one rank; the tests are importable."""
    common = os.environ | {STORE: str(Path(tempfile.mkdtemp(), "store")), "WORLD_SIZE": str(size)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    return [
        subprocess.Popen(
            [sys.executable, "-c", call],
            env=common | {"RANK": str(rank)} | (variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        for rank in range(size)
    ]


def has_threads_of_gloo():
    """Whether a thread of gloo runs: one that releases a tensor while the interpreter ends aborts the process."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            names.append(path.read_text())
    return any("gloo" in name for name in names)


def refuse_unpickling():
    """From here on, this process ends with exit code 9 when it unpickles what another one has sent."""
    from torch.distributed import distributed_c10d  # noqa: TID251

    sys.addaudithook(lambda event, _: os._exit(9) if event == "pickle.find_class" else None)
    distributed_c10d._tensor_to_object = lambda *_: os._exit(9)


def outputs(processes, timeout=120):
    """Exit code, stdout and stderr of each process, once all have ended."""
    results = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=timeout)
            results.append((process.returncode, out, error))
    finally:
        for process in processes:
            process.kill()
    return results
