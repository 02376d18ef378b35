"""Limits of control groups, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from syringa.engine.cpu import cgroups

GB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize("folder", ["", "unified/"])
def test_free_memory_of_version_2_counts_cached_files_as_free(tmp_path: Path, folder: str) -> None:
    group = f"sys/fs/cgroup/{folder}"
    stat = f"anon {GB}\nfile {3 * GB}\nshmem 0\nactive_file {GB}\ninactive_file {2 * GB}"
    write(
        tmp_path,
        {
            f"{group}memory.max": str(8 * GB),
            f"{group}memory.current": str(4 * GB),
            f"{group}memory.stat": stat,
            "proc/self/cgroup": "0::/",
        },
    )
    assert cgroups.free_memory(tmp_path) == 7 * GB


def test_free_memory_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc/"
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file 0"
    write(
        tmp_path,
        {
            f"{group}memory.limit_in_bytes": str(4 * GB),
            f"{group}memory.usage_in_bytes": str(3 * GB),
            f"{group}memory.stat": stat,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(20 * GB),
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/\n0::/",
        },
    )
    assert cgroups.free_memory(tmp_path) == 2 * GB


def test_free_memory_is_the_least_of_a_group_and_its_ancestors(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/user.slice/unit.scope"}
    for group, limit, used in (("", "max", 20), ("user.slice/", str(6 * GB), 5), ("user.slice/unit.scope/", "max", 1)):
        files |= {
            f"sys/fs/cgroup/{group}memory.max": limit,
            f"sys/fs/cgroup/{group}memory.current": str(used * GB),
        }
    write(tmp_path, files)
    assert cgroups.free_memory(tmp_path) == GB


@pytest.mark.parametrize("path", ["/docker/of-the-host", "/../../elsewhere"])
def test_free_memory_reads_the_mounted_group_where_the_path_is_the_hosts(tmp_path: Path, path: str) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "sys/fs/cgroup/memory.max": str(GB),
            "sys/fs/cgroup/memory.current": str(3 * GB),
        },
    )
    assert cgroups.free_memory(tmp_path) == 0


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "junk"}, {"sys/fs/cgroup/memory.max": "max"}])
def test_limits_are_none_without_groups(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    assert cgroups.free_memory(tmp_path) is None
    assert cgroups.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, files)
    assert cgroups.cpu_quota(tmp_path) == quota
