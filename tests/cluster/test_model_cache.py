from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from syringa.cluster import model_cache
from syringa.cluster.manifest import Manifest, ManifestFile
from syringa.cluster.model_cache import Download, ModelCache
from syringa.errors import ModelError

HANG_SECONDS = 120.0
LARGE = 1 << 40


def manifest(name: str, size: int) -> Manifest:
    return Manifest("", (ManifestFile(f"{name}.json", size, f"{len(name):064x}", 0),))


def writer(content: Manifest) -> Download:
    def download(folder: Path) -> None:
        for file in content.files:
            (folder / file.name).write_bytes(bytes(file.size))

    return download


def ignore(done: int, total: int) -> None:
    pass


def cache_of(folder: Path, capacity: int = 0, free: Callable[[Path], int] = lambda folder: LARGE) -> ModelCache:
    return ModelCache(folder / "cache", capacity, free_space=free, sleep=lambda seconds: time.sleep(0.001))


def add(cache: ModelCache, name: str, size: int, used_at: float) -> None:
    """Put a model into the cache that is not in use."""
    content = manifest(name, size)
    cache.acquire(name, content, writer(content), ignore).release()
    os.utime(cache.folder / f"{content.digest}.json", (used_at, used_at))


def names(cache: ModelCache) -> list[str]:
    return [entry.model for entry in cache.entries()]


def refuse_download(folder: Path) -> None:
    raise AssertionError("it is here already")


def test_model_is_downloaded_once(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path), manifest("a", 10)
    first = cache.acquire("a", content, writer(content), ignore)
    second = cache.acquire("a", content, refuse_download, ignore)
    assert first.path == second.path
    assert (first.path / "a.json").stat().st_size == 10
    assert [(entry.size, entry.present) for entry in cache.entries()] == [(10, 10)]


def test_least_recently_used_models_make_room(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, capacity=100)
    for name, used_at in [("a", 2.0), ("bb", 1.0), ("ccc", 3.0)]:
        add(cache, name, 30, used_at)
    add(cache, "dddd", 40, 4.0)
    assert names(cache) == ["a", "ccc", "dddd"]
    assert sorted(each.suffix for each in cache.folder.iterdir() if each.name != "cache.lock") == sorted(
        ["", ".json", ".lock", ".fetch"] * 3
    )
    add(cache, "eeeee", 100, 5.0)
    assert names(cache) == ["eeeee"]


def test_use_counts_from_its_end(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, capacity=60)
    used, content = manifest("a", 30), manifest("ccc", 30)
    model = cache.acquire("a", used, writer(used), ignore)
    os.utime(cache.folder / f"{used.digest}.json", (1.0, 1.0))
    add(cache, "bb", 30, 2.0)
    model.release()
    model.release()  # once more does no harm
    cache.acquire("ccc", content, writer(content), ignore)
    assert names(cache) == ["a", "ccc"]


def test_model_in_use_is_never_evicted(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, capacity=100)
    used = manifest("a", 60)
    model = cache.acquire("a", used, writer(used), ignore)
    os.utime(cache.folder / f"{used.digest}.json", (1.0, 1.0))
    add(cache, "bb", 40, 2.0)
    with pytest.raises(ModelError, match="other models there are in use"):
        add(cache, "ccc", 50, 3.0)
    assert names(cache) == ["a"]
    assert (model.path / "a.json").exists()
    model.release()
    add(cache, "ccc", 50, 3.0)
    assert names(cache) == ["ccc"]


def test_model_in_use_by_another_process_is_never_evicted(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, capacity=100)
    add(cache, "a", 60, 1.0)
    lock = cache.folder / f"{manifest('a', 60).digest}.lock"
    code = f"import fcntl; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        with pytest.raises(ModelError, match="in use"):
            add(cache, "ccc", 50, 3.0)
        process.kill()
    add(cache, "ccc", 50, 3.0)  # its lock ended with it
    assert names(cache) == ["ccc"]


def test_model_larger_than_the_cache_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, capacity=100)
    add(cache, "a", 60, 1.0)
    with pytest.raises(ModelError, match=r"raise cache\.capacity of the pool"):
        add(cache, "bb", 101, 2.0)
    assert names(cache) == ["a"]


def test_disk_space_is_checked_first_and_models_make_room(tmp_path: Path) -> None:
    free = model_cache.RESERVE + 25

    def free_space(folder: Path) -> int:
        return free + sum(30 for name in ("a", "bb") if not (folder / manifest(name, 30).digest).exists())

    cache = cache_of(tmp_path, free=free_space)
    add(cache, "a", 30, 1.0)
    add(cache, "bb", 30, 2.0)
    add(cache, "ccc", 40, 3.0)
    assert names(cache) == ["bb", "ccc"]
    with pytest.raises(ModelError, match=r"needs 0\.00 GB, and 0\.07 GB are free in"):
        add(cache, "dddd", 200, 4.0)


def test_full_disk_is_reported_and_what_came_is_kept(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path), manifest("a", 10)

    def fill(folder: Path) -> None:
        (folder / "a.json.part").write_bytes(b"abc")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match=r"the disk of .* is full"):
        cache.acquire("a", content, fill, ignore)
    assert [entry.present for entry in cache.entries()] == [3]
    seen: list[str] = []

    def go_on(folder: Path) -> None:
        seen.extend(each.name for each in folder.iterdir())
        writer(content)(folder)

    cache.acquire("a", content, go_on, ignore)
    assert seen == ["a.json.part"]


def test_interrupted_download_counts_with_its_whole_size_and_may_be_evicted(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path, capacity=100), manifest("a", 80)

    def interrupt(folder: Path) -> None:
        raise ModelError("cut")

    with pytest.raises(ModelError, match="cut"):
        cache.acquire("a", content, interrupt, ignore)
    add(cache, "bb", 50, time.time() + 10)
    assert names(cache) == ["bb"]


def test_parallel_replicas_share_one_download(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path), manifest("a", 10)
    downloads: list[str] = []
    started, go_on, waited = threading.Event(), threading.Event(), threading.Event()

    def download(folder: Path) -> None:
        downloads.append(threading.current_thread().name)
        (folder / "a.json").write_bytes(b"abc")
        started.set()
        assert go_on.wait(HANG_SECONDS)
        writer(content)(folder)

    paths = []
    first = threading.Thread(target=lambda: paths.append(cache.acquire("a", content, download, ignore).path))
    first.start()
    assert started.wait(HANG_SECONDS)
    progress: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        progress.append((done, total))
        waited.set()

    others = [
        threading.Thread(target=lambda: paths.append(cache.acquire("a", content, download, note).path))
        for _ in range(3)
    ]
    for thread in others:
        thread.start()
    assert waited.wait(HANG_SECONDS)
    go_on.set()
    for thread in (first, *others):
        thread.join(HANG_SECONDS)
    assert len(downloads) == 1
    assert set(paths) == {cache.folder / content.digest}
    assert len(paths) == 4
    assert progress[0] == (3, 10)


def test_waiting_replica_takes_over_when_the_download_fails(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path), manifest("a", 10)
    waited = threading.Event()
    failures = []

    def fail(folder: Path) -> None:
        assert waited.wait(HANG_SECONDS)
        raise ModelError("cut")

    def first() -> None:
        try:
            cache.acquire("a", content, fail, ignore)
        except ModelError as error:
            failures.append(error.message)

    thread = threading.Thread(target=first)
    thread.start()
    while not (cache.folder / f"{content.digest}.part").exists():
        time.sleep(0.001)
    model = cache.acquire("a", content, writer(content), lambda done, total: waited.set())
    thread.join(HANG_SECONDS)
    assert failures == ["cut"]
    assert model.path.exists()


def test_waiting_replica_gives_up_when_its_progress_raises(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path, capacity=10), manifest("a", 10)
    gave_up = threading.Event()

    def download(folder: Path) -> None:
        assert gave_up.wait(HANG_SECONDS)
        writer(content)(folder)

    thread = threading.Thread(target=lambda: cache.acquire("a", content, download, ignore).release())
    thread.start()
    while not (cache.folder / f"{content.digest}.part").exists():
        time.sleep(0.001)

    def cancel(done: int, total: int) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        cache.acquire("a", content, refuse_download, cancel)
    gave_up.set()
    thread.join(HANG_SECONDS)
    add(cache, "bb", 10, 1.0)  # neither of them holds a lock any more
    assert names(cache) == ["bb"]


def test_truncated_model_is_downloaded_again(tmp_path: Path) -> None:
    cache, content = cache_of(tmp_path), manifest("a", 10)
    path = cache.acquire("a", content, writer(content), ignore).path
    os.truncate(path / "a.json", 5)
    cache.acquire("a", content, writer(content), ignore)
    assert (path / "a.json").stat().st_size == 10


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    content = manifest("a", 10)
    with pytest.raises(ModelError, match=r"cannot be stored in .*: File exists"):
        cache_of(tmp_path).acquire("a", content, writer(content), ignore)


@pytest.mark.slow
def test_cache_under_load_gives_whole_models_and_keeps_its_bound(tmp_path: Path) -> None:
    """Threads use, download, interrupt and evict models at random. A model in use stays whole."""
    contents = [manifest("x" * (index + 1), 1000 + index) for index in range(6)]
    failures: list[str] = []
    finished: list[int] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        cache = cache_of(tmp_path, capacity=3100)
        for _ in range(150):
            content = generator.choice(contents)

            def download(folder: Path, content: Manifest = content) -> None:
                if generator.random() < 0.2:
                    raise ModelError("cut")
                writer(content)(folder)

            try:
                model = cache.acquire("m", content, download, ignore)
            except ModelError as error:
                if error.message != "cut" and "in use" not in error.message:
                    failures.append(error.message)
                continue
            time.sleep(generator.random() / 1000)
            if (model.path / content.files[0].name).stat().st_size != content.size:
                failures.append("a model in use is not whole")
            total = sum(entry.size for entry in cache.entries())
            if total > 3100:
                failures.append(f"{total} bytes are in the cache")
            model.release()
        finished.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    assert failures == []
    assert len(finished) == 6
