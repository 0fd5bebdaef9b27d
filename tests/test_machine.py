"""Available memory, settings that fit in it, and refusals before anything is allocated."""

import os
import re
from pathlib import Path

import pytest

from xlcli import machine
from xlcli.errors import ResourceError
from xlcli.machine import (
    available_bytes,
    cpu_limit,
    fitting,
    forget_peak_rss,
    is_contended,
    peak_rss_bytes,
    require_memory,
)

ALL_RAM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
VM_STAT = """#!/bin/sh
cat <<END
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               13404.
Pages active:                            352061.
Pages inactive:                          348839.
Pages speculative:                         2218.
Pages throttled:                              0.
Pages wired down:                        131513.
Pages purgeable:                          16022.
"Translation faults":                1234567890.
Pages stored in compressor:              612345.
END
"""  # as macOS 15 prints it on a machine with 16 GiB


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    return tmp_path


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def describe(root, lines):
    """Files of a machine with 8 GiB, of which 6 are free, and of a process in these cgroups."""
    meminfo = "MemTotal:       8388608 kB\nMemFree:        1 kB\nMemAvailable:   6291456 kB\n"
    write(root, proc__meminfo=meminfo, proc__self__cgroup=lines)


def test_free_memory_without_a_limit(root):
    describe(root, "0::/\n")
    assert available_bytes() == 6 * 2**30


def test_the_smallest_limit_of_the_cgroups_around_the_process(root):
    describe(root, "0::/user/job\n")
    top = root / "sys/fs/cgroup"
    for folder, limit, used in ((top, "max", 2**32), (top / "user", 2**31, 2**30), (top / "user/job", 2**33, 2**30)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 1048576\n")
    assert available_bytes() == 2**30 + 2**20


def test_limits_of_cgroups_of_version_1(root):
    describe(root, "4:memory:/job\n0::/\n")
    folder = root / "sys/fs/cgroup/memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2**28}")
    (folder / "memory.usage_in_bytes").write_text(f"{2**27}")
    (folder / "memory.stat").write_text("total_inactive_file 4096\n")
    assert available_bytes() == 2**27 + 4096


def test_this_machine_has_memory():
    assert 2**20 < available_bytes() < 2**50
    assert 2**24 < peak_rss_bytes() < 2**36


def test_without_proc_free_memory_is_what_macos_counts(root):
    write(root, usr__bin__vm_stat=VM_STAT)
    (root / "usr/bin/vm_stat").chmod(0o755)
    assert available_bytes() == 16384 * (13404 + 348839 + 2218)


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nothing\n"])
def test_where_nothing_tells_what_is_free_it_is_all_of_the_machine(root, script):
    if script is not None:
        write(root, usr__bin__vm_stat=script)
        (root / "usr/bin/vm_stat").chmod(0o755)
    assert available_bytes() == ALL_RAM


def test_without_proc_all_cpus_count_and_nothing_is_forgotten(root):
    assert cpu_limit() == len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert not is_contended()
    before = peak_rss_bytes()
    forget_peak_rss()
    assert peak_rss_bytes() >= before


def test_only_one_module_reads_proc():
    package = Path(machine.__file__).parent
    readers = [path for path in package.rglob("*.py") if re.search(r'"/?(proc|sys)["/]', path.read_text())]
    assert readers == [Path(machine.__file__)]


def test_a_need_is_compared_with_the_machine():
    require_memory("nothing", 0, "")
    with pytest.raises(ResourceError, match=r"\b1,073,741,824\.0\b"):
        require_memory("a run", 2**60, "Use less.")


def test_the_first_setting_that_suffices_is_lowered_to_a_power_of_two():
    def need(sizes):
        return sizes["batch_size"] * sizes["mem_len"]

    assert fitting({"batch_size": 100, "mem_len": 7}, need, 200, "") == "Use batch_size 16, or a smaller model."
    assert fitting({"batch_size": 3, "mem_len": 1000}, need, 200, "") == "Use mem_len 64, or a smaller model."
    both = fitting({"batch_size": 1000, "mem_len": 1000}, need, 10, "")
    assert both == "Use batch_size 1, mem_len 8, or a smaller model."
    assert fitting({"batch_size": 8}, lambda sizes: 5, 4, "Use another model.") == "Use another model."


def test_other_running_processes_share_its_cpus(root):
    assert not is_contended()
    others = os.cpu_count() - cpu_limit()
    for running, contended in ((1, False), (others + 1, False), (others + 2, True), ("x", False)):
        write(root, proc__loadavg=f"0.00 0.50 0.90 {running}/345 12345\n")
        assert is_contended() == contended, running
