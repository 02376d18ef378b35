"""Limits of this process's control groups, versions 1 and 2: memory and CPU time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes about 2^63 where there is no limit


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups still allow; None if they set no limit.

    Cached files do not count as used: the system gives their memory back when it is needed. `root`: of the file system.
    """
    free = None
    for folder, version in _folders(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        left = max(0, limit - max(0, used - _cached_files(folder, version)))
        free = left if free is None else min(free, left)
    return free


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs whose time the control groups allow; None if they set no limit."""
    quotas = []
    for folder, version in _folders(root, "cpu"):
        if version == 2:
            words = _read(folder / "cpu.max").split()
        else:
            words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's groups with their version, each from the innermost group to the root's.

    In a container, the path in /proc may be the host's, which does not exist there; its own group is then the root.
    """
    mount = root / "sys/fs/cgroup"
    unified = mount / "unified" if (mount / "unified").is_dir() else mount
    paths = {controller: "/", "": "/"}
    for line in _read(root / "proc/self/cgroup").splitlines():
        words = line.split(":", 2)  # number, controllers, path
        if len(words) == 3:
            paths |= dict.fromkeys(words[1].split(","), words[2])
    for name, base, version in ((controller, mount / controller, 1), ("", unified, 2)):
        parts = [part for part in paths[name].split("/") if part]
        if ".." in parts:  # outside of the namespace
            parts = []
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), version


def _cached_files(folder: Path, version: int) -> int:
    """Return the bytes of files in memory that a group is charged for."""
    names = ("active_file", "inactive_file") if version == 2 else ("total_active_file", "total_inactive_file")
    total = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in names and value.strip().isdecimal():
            total += int(value)
    return total


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
