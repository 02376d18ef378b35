"""Fetches the model of a replica to the node that it is placed on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa.cluster.fetch_files import NodeFiles
from syringa.cluster.model_cache import CachedModel, ModelCache
from syringa.engine.worker.options import WorkerOptions
from syringa.modelfiles.locate import models_dir


def cache_folder() -> Path:
    """Return the folder of fetched models: beside that of pulled ones."""
    return models_dir().parent / "cluster"


class ModelFetcher:
    """The files of one replica. They stay in the cache of the node until `close`, or until this process exits."""

    def __init__(self, cluster_dir: Path, cache_bytes: int = 0, *, cache: ModelCache | None = None) -> None:
        """`cluster_dir`: the folder of the node's certificates. `cache_bytes`: those of all models; 0: no limit."""
        self._files = NodeFiles(cluster_dir, cache or ModelCache(cache_folder(), cache_bytes))
        self._cached: CachedModel | None = None

    def fetch(self, options: WorkerOptions, progress: Callable[[str], None]) -> WorkerOptions:
        """Return the options with the path of the model on this node, once its files are there.

        `progress` gets a description, and may raise to give up. Raises `ModelError` and `ConfigError`.
        """
        self.close()

        def report(done: int, total: int) -> None:
            progress(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB")

        path, self._cached = self._files.fetch(options.model, report)
        return msgspec.structs.replace(options, model=path)

    def close(self) -> None:
        """Let the files be evicted. The worker must have ended."""
        if self._cached is not None:
            self._cached.release()
            self._cached = None
