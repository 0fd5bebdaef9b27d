"""CPUs and RAM of this machine, and the check, before anything is allocated, that something fits in it.

Only this module reads `/proc` and `/sys`, which macOS does not have. Each function says what it does without them.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from xlcli.errors import ResourceError

ROOT = Path("/")  # folder of `proc`, `sys` and `usr`
VM_STAT_SECONDS = 10  # it takes milliseconds


def cpu_limit() -> int:
    """Number of CPUs that the process may use: its affinity, and the CPU quotas of its cgroup and those around it."""
    n_cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        n_cpus = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min([n_cpus, *_cgroup_quotas()])))


def is_contended() -> bool:
    """True if so many other processes run at this moment that they share CPUs with this one; False if unknown."""
    try:
        n_running = int((ROOT / "proc" / "loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return False
    n_others = n_running - 1
    return n_others + cpu_limit() > (os.cpu_count() or 1)


def available_bytes(device: str = "cpu") -> int:
    """Bytes of RAM, or of the memory of a GPU, that the process can still allocate on `device`.

    On a CPU the least of the free RAM of the machine and of its cgroup and those around it. Without `/proc` it is what
    macOS says is free; where that is unknown, too, all RAM of the machine.
    """
    if device.startswith("cuda"):
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by PyTorch
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        table = (ROOT / "proc" / "meminfo").read_text()
    except OSError:
        return _free_on_macos() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    entries = dict(line.split(":", 1) for line in table.splitlines() if ":" in line)
    free = 1024 * int(entries.get("MemAvailable", entries["MemTotal"]).split()[0])
    return max(0, min([free, *_free_in_cgroups()]))


def peak_rss_bytes() -> int:
    """Peak resident memory of the process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_rss() -> None:
    """Makes `peak_rss_bytes` begin anew; does nothing where the system cannot (Linux can)."""
    with suppress(OSError):
        (ROOT / "proc" / "self" / "clear_refs").write_text("5")


def require_memory(purpose: str, n_bytes: int, remedy: str, device: str = "cpu") -> None:
    """`ResourceError` if `purpose` (a noun phrase) needs more RAM, or memory of the GPU, than is available."""
    available = available_bytes(device)
    if n_bytes > available:
        resource = "RAM" if device == "cpu" else "GPU memory"
        problem = f"{purpose} needs at least {_gib(n_bytes)} of {resource}, and {_gib(available)} is available."
        raise ResourceError(problem, remedy)


def return_memory() -> None:
    """Returns what this process has freed to the system: glibc keeps the memory of tensors below 32 MiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def fitting(settings: Mapping[str, int], need: Callable[[Mapping[str, int]], int], available: int, smaller: str) -> str:
    """Remedy that names settings with which `need` is at most `available` bytes: `batch_size 8, segment_len 64`.

    One setting, the first that suffices, is lowered to a power of two; if none suffices alone, all are. If those do
    not suffice either, the remedy is `smaller`.
    """
    one_at_a_time = [[name] for name in settings]
    for names in (*one_at_a_time, list(settings)):
        lowered = dict(settings)
        for name in names:
            while lowered[name] > 1 and need(lowered) > available:
                exponent = (lowered[name] - 1).bit_length() - 1
                lowered[name] = 2**exponent  # the next lower power of two: 9 -> 8 -> 4
        if need(lowered) <= available:
            changes = [f"{name} {lowered[name]}" for name in names if lowered[name] != settings[name]]
            return f"Use {', '.join(changes)}, or a smaller model."
    return smaller


def cgroup_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """Folder of the cgroup of this process and of each one around it, with the version of cgroups, 1 or 2."""
    try:
        lines = (ROOT / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top, version = ROOT / "sys" / "fs" / "cgroup", 2
        if controllers:
            if controller not in controllers.split(","):
                continue
            top, version = top / controller, 1
        innermost = top / path.lstrip("/")
        for place in (innermost, *innermost.parents):
            if place.is_relative_to(top):
                yield place, version


def _free_on_macos() -> int | None:
    """Bytes of the pages that macOS hands out without swapping, as its `vm_stat` counts them; None on other systems."""
    import subprocess  # takes milliseconds at the start of every command, and Linux never needs it

    try:
        done = subprocess.run(  # noqa: S603
            [ROOT / "usr" / "bin" / "vm_stat"], capture_output=True, text=True, check=True, timeout=VM_STAT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    page_size = re.search(r"page size of (\d+) bytes", done.stdout)
    n_pages = [int(number) for number in re.findall(r"Pages (?:free|inactive|speculative): +(\d+)", done.stdout)]
    return int(page_size[1]) * sum(n_pages) if page_size else None


def _free_in_cgroups() -> Iterator[int]:
    """Limit of each cgroup minus its use; pages of files that it can drop count as free."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for folder, version in cgroup_folders("memory"):
        limit, used, dropped = names[version]
        try:
            text = (folder / limit).read_text().strip()
            if text != "max":
                rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield int(text) - int((folder / used).read_text()) + int(rows.get(dropped, 0))
        except OSError:
            continue


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:,.1f} GiB"


def _cgroup_quotas() -> Iterator[float]:
    """CPU quotas in CPUs, from version 1 (`cpu.cfs_quota_us`) and version 2 (`cpu.max`) of cgroups."""
    names = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}
    for folder, version in cgroup_folders("cpu"):
        files = [folder / name for name in names[version]]
        if all(file.exists() for file in files):
            quota, period = " ".join(file.read_text() for file in files).split()
            if quota not in ("max", "-1"):
                yield float(quota) / float(period)
