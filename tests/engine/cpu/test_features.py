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
    """Whatever the guard sets is undone again."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")


def pretend(monkeypatch: pytest.MonkeyPatch, flags: set[str], probe: int | None = None) -> list[Any]:
    """A processor with `flags`, on which the probe ends with the status `probe`; None: it may not be run."""
    probes: list[Any] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert probe is not None, "the probe takes two seconds and was not needed"
        probes.append(options)
        return subprocess.CompletedProcess(command, probe)

    monkeypatch.setattr(features, "cpu_flags", lambda: flags)
    monkeypatch.setattr(features.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(features.subprocess, "run", run)
    return probes


def test_amx_that_kills_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = pretend(monkeypatch, AMX, probe=-4)  # SIGILL
    features.disable_broken_amx("bf16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == features.SAFE_ISA
    assert len(probes) == 1


def test_amx_that_works_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = pretend(monkeypatch, AMX, probe=0)
    features.disable_broken_amx("bf16")
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert len(probes) == 1


@pytest.mark.parametrize("dtype", ["int8", "fp32", "auto"])
def test_other_precisions_cap_without_asking(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    pretend(monkeypatch, AMX)
    features.disable_broken_amx(dtype)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == features.SAFE_ISA


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_processor_without_amx_needs_no_guard(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    pretend(monkeypatch, {"avx512f", "avx512_bf16"})
    features.disable_broken_amx(dtype)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert not features.amx_is_usable()


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMX)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    features.disable_broken_amx("bf16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_the_probe_is_not_capped_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = pretend(monkeypatch, AMX, probe=0)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert features.amx_is_usable()
    assert "ONEDNN_MAX_CPU_ISA" not in probes[0]["env"]


def test_a_probe_that_hangs_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMX)

    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(features.subprocess, "run", run)
    features.disable_broken_amx("bf16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == features.SAFE_ISA


def test_cores() -> None:
    assert 1 <= features.available_cores() <= (os.cpu_count() or 1)


def test_a_container_may_have_less(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": str(i % 8) for i in range(16)}
    texts = {
        **threads,
        "/sys/fs/cgroup/cpu.max": "150000 100000",
        "/sys/fs/cgroup/memory.max": str(3 << 30),
        "/sys/fs/cgroup/memory.current": str(1 << 30),
        "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 16777216 kB\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda self, *args: texts[str(self)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert features.available_cores() == 1
    assert features.available_memory() == 2 << 30
    texts |= {"/sys/fs/cgroup/cpu.max": "max 100000", "/sys/fs/cgroup/memory.max": "max"}
    assert features.available_cores() == 8  # two threads of a core count once
    assert features.available_memory() == 16 << 30


def test_memory() -> None:
    assert 64 << 20 < features.available_memory() < 1 << 50


def test_flags() -> None:
    assert all(flag == flag.strip() for flag in features.cpu_flags())
    if Path("/proc/cpuinfo").exists() and features.platform.machine() == "x86_64":
        assert "sse2" in features.cpu_flags()
