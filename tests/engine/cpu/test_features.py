from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.cpu import features

AMX = {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable, and restore it after the test."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")


def pretend(monkeypatch: pytest.MonkeyPatch, flags: set[str], probe: int | None = None) -> list[Any]:
    """Fake a CPU with `flags` on which the probe exits with status `probe` (None: must not be run)."""
    probes: list[Any] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert probe is not None, "the probe takes two seconds and was not needed"
        probes.append(options)
        return subprocess.CompletedProcess(command, probe)

    monkeypatch.setattr(features, "cpu_flags", lambda: flags)
    monkeypatch.setattr(features.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(features.subprocess, "run", run)
    return probes


def test_disable_broken_amx_caps_isa_when_probe_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = pretend(monkeypatch, AMX, probe=-4)  # SIGILL
    features.disable_broken_amx("bf16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == features.SAFE_ISA
    assert len(probes) == 1


def test_disable_broken_amx_keeps_working_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = pretend(monkeypatch, AMX, probe=0)
    features.disable_broken_amx("bf16")
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert len(probes) == 1


@pytest.mark.parametrize("dtype", ["int8", "fp32", "auto"])
def test_disable_broken_amx_skips_probe_for_other_dtypes(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    pretend(monkeypatch, AMX)
    features.disable_broken_amx(dtype)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == features.SAFE_ISA


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_disable_broken_amx_does_nothing_without_amx(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    pretend(monkeypatch, {"avx512f", "avx512_bf16"})
    features.disable_broken_amx(dtype)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert not features.amx_is_usable()


def test_disable_broken_amx_keeps_user_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMX)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    features.disable_broken_amx("bf16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_amx_probe_runs_without_isa_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = pretend(monkeypatch, AMX, probe=0)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert features.amx_is_usable()
    assert "ONEDNN_MAX_CPU_ISA" not in probes[0]["env"]


def test_amx_probe_timeout_counts_as_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMX)

    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(features.subprocess, "run", run)
    features.disable_broken_amx("bf16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == features.SAFE_ISA


def test_available_cores_is_plausible() -> None:
    assert 1 <= features.available_cores() <= (os.cpu_count() or 1)


def test_available_cores_and_memory_respect_container_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for i in range(16):
        write(f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list", f"{i % 8}\n")
    write("sys/fs/cgroup/cpu.max", "150000 100000\n")
    write("sys/fs/cgroup/memory.max", f"{3 << 30}\n")
    write("sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    write("proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable: 16777216 kB\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert features.available_cores(tmp_path) == 1
    assert features.available_memory(tmp_path) == 2 << 30
    write("sys/fs/cgroup/cpu.max", "max 100000\n")
    write("sys/fs/cgroup/memory.max", "max\n")
    assert features.available_cores(tmp_path) == 8  # two threads of a core count once
    assert features.available_memory(tmp_path) == 16 << 30


def test_available_memory_is_plausible() -> None:
    assert 64 << 20 < features.available_memory() < 1 << 50


def test_cpu_flags_are_parsed() -> None:
    assert all(flag == flag.strip() for flag in features.cpu_flags())
    if Path("/proc/cpuinfo").exists() and features.platform.machine() == "x86_64":
        assert "sse2" in features.cpu_flags()
