from __future__ import annotations

from typing import Any

import pytest

from syringa.engine.processes.eviction import (
    GPU_OVERHEAD,
    MARGIN,
    LoadDecision,
    PendingModel,
    ResidentModel,
    decide_load,
    estimate_gpu_memory,
    gpu_memory_share,
    models_to_unload,
    strictest,
)

GB = 1 << 30


def resident(key: str, used_at: float = 0.0, **kwargs: Any) -> ResidentModel:
    return ResidentModel(**({"key": key, "used_at": used_at, "memory": GB, "held": GB} | kwargs))


def decide(
    *models: ResidentModel, need: int = GB, free: int = 8 * GB, max_loaded: int = 0, **kwargs: Any
) -> LoadDecision:
    known = {
        name: kwargs.pop(name) for name in ("insufficient_free", "insufficient_when_empty", "device") if name in kwargs
    }
    new = PendingModel(estimate=need, **known)
    return decide_load(new, models, free=free, max_loaded=max_loaded, **kwargs)


def test_decide_load_starts_when_there_is_room() -> None:
    assert decide().action == "start"
    assert decide(resident("a"), resident("b")).action == "start"
    assert decide(resident("a"), max_loaded=2).action == "start"


def test_decide_load_evicts_least_recently_used() -> None:
    models = [resident("a", 30), resident("b", 10), resident("c", 20)]
    assert decide(*models, max_loaded=3) == LoadDecision("evict", "b", "3 models are loaded, the most allowed")
    assert decide(*models, free=GB // 2) == LoadDecision("evict", "b", "memory is short")


def test_decide_load_does_not_evict_busy_models() -> None:
    models = [resident("a", 30), resident("b", 10, busy=True), resident("c", 20)]
    assert decide(*models, max_loaded=3).key == "c"
    busy = [resident(key, busy=True) for key in "ab"]
    decision = decide(*busy, max_loaded=2)
    assert (decision.action, decision.reason) == (
        "wait",
        "2 models are loaded, the most allowed, and all of them are in use",
    )


def test_decide_load_with_evict_busy_prefers_idle_models() -> None:
    busy = [resident("a", 20, busy=True), resident("b", 10, busy=True)]
    assert decide(*busy, max_loaded=2, evict_busy=True).key == "b"
    assert decide(*busy, resident("c", 30), max_loaded=3, evict_busy=True).key == "c"  # idle, so no request has to wait


@pytest.mark.parametrize("state", ["loading", "unloading"])
def test_decide_load_does_not_evict_loading_or_unloading_models(state: str) -> None:
    assert decide(resident("a", state=state), max_loaded=1, evict_busy=True).action == "wait"


def test_decide_load_evicts_one_model_at_a_time() -> None:
    assert decide(resident("a", state="unloading"), resident("b"), max_loaded=1).action == "wait"


def test_decide_load_reserves_memory_of_loading_models() -> None:
    loading = resident("a", state="loading", memory=4 * GB, held=GB)
    assert decide(loading, need=5 * GB, free=8 * GB).action == "start"
    assert decide(loading, need=6 * GB, free=8 * GB).action == "wait"


def test_decide_load_reserves_the_cache_that_loaded_models_have_not_filled() -> None:
    loaded = resident("a", memory=4 * GB, held=GB)
    assert decide(loaded, need=5 * GB, free=8 * GB) == LoadDecision("start", spare=5 * GB)
    assert decide(loaded, need=6 * GB, free=8 * GB) == LoadDecision("evict", "a", "memory is short")


def test_decide_load_evicts_nothing_for_a_model_that_would_not_fit_then() -> None:
    never = LoadDecision("never", reason="there is too little memory for it")
    models = [resident("a"), resident("b")]
    # The first attempt tells what would fit, and evicts nothing.
    assert decide(*models, need=11 * GB, free=8 * GB).action == "start"
    assert decide(*models, need=11 * GB, free=8 * GB, insufficient_free=8 * GB) == never
    assert decide(*models, need=10 * GB, free=8 * GB, insufficient_free=8 * GB).action == "evict"
    # Here it could not be attempted without an eviction.
    assert decide(*models, need=11 * GB, free=8 * GB, max_loaded=2) == never
    # The need on a GPU is an estimate, but it was more than what there was at an attempt.
    cuda = [resident("a", device="cuda"), resident("b", device="cuda")]
    assert decide(*cuda, need=90 * GB, free=8 * GB, insufficient_free=8 * GB, device="cuda").action == "evict"
    assert decide(*cuda, need=GB, free=8 * GB, insufficient_free=10 * GB, device="cuda").action == "never"


def test_decide_load_starts_first_model_whatever_the_estimate() -> None:
    assert decide(need=100 * GB, free=GB).action == "start"


def test_decide_load_does_not_evict_when_estimate_exceeds_all_memory() -> None:
    """By the estimate it would not fit even alone, so evicting is no use. The worker's own check is exact."""
    assert decide(resident("a"), resident("b"), need=100 * GB, free=GB).action == "start"


def test_decide_load_retries_only_with_more_free_memory() -> None:
    models = [resident("a", 2), resident("b", 1)]
    for free in (3 * GB, 4 * GB, 4 * GB + MARGIN - 1):
        assert decide(*models, need=0, free=free, insufficient_free=4 * GB) == LoadDecision(
            "evict", "b", "memory is short"
        )
    assert decide(*models, need=0, free=4 * GB + MARGIN, insufficient_free=4 * GB).action == "start"
    assert (
        decide(need=0, free=4 * GB, insufficient_free=4 * GB).action == "start"
    )  # no other model is loaded: it may try again


def test_decide_load_never_retries_what_did_not_fit_alone() -> None:
    models = [resident("a", 2), resident("b", 1)]
    assert decide(*models, need=0, free=2 * GB, insufficient_when_empty=4 * GB).action == "never"
    assert (
        decide(*models, need=0, free=2 * GB + MARGIN, insufficient_when_empty=4 * GB, insufficient_free=4 * GB).action
        == "evict"
    )
    assert decide(need=0, free=4 * GB, insufficient_when_empty=4 * GB).action == "never"
    assert decide(need=0, free=5 * GB, insufficient_when_empty=4 * GB).action == "start"


def test_decide_load_evicts_on_same_device_only() -> None:
    models = [resident("host", 1), resident("old", 2, device="cuda"), resident("new", 3, device="cuda")]
    assert decide(*models, need=2 * GB, free=GB, device="cuda") == LoadDecision("evict", "old", "GPU memory is short")
    assert decide(*models, need=2 * GB, free=GB) == LoadDecision("evict", "host", "memory is short")
    assert decide(*models, need=2 * GB, free=3 * GB, device="cuda").action == "start"
    # At the limit of loaded models, the device does not matter.
    assert decide(*models, need=GB, device="cuda", max_loaded=3).key == "host"
    # No model on the device that could be evicted: it may try.
    assert decide(resident("host"), need=2 * GB, free=GB, device="cuda").action == "start"
    assert decide(resident("host", state="unloading"), models[1], need=2 * GB, free=GB, device="cuda").action == "evict"


def test_decide_load_reports_too_small_gpu() -> None:
    models = [resident("host", 1, memory=90 * GB, held=90 * GB), resident("a", 2, device="cuda")]
    decision = decide(*models, need=0, free=2 * GB, insufficient_when_empty=4 * GB, device="cuda")
    assert decision == LoadDecision("never", reason="there is too little GPU memory for it")


def test_decide_load_waits_for_loading_model_that_can_be_evicted_later() -> None:
    loading = resident("a", state="loading", memory=60 * GB, held=0, device="cuda")
    assert decide(loading, need=30 * GB, free=80 * GB, device="cuda").action == "wait"
    assert decide(loading, need=20 * GB, free=80 * GB, device="cuda").action == "start"


def test_gpu_memory_share_splits_rest_equally() -> None:
    def parts(*needs: int, total: int = 100) -> list[float]:
        return [gpu_memory_share(own, [*needs[:i], *needs[i + 1 :]], total=total) for i, own in enumerate(needs)]

    assert parts(10) == [1.0]
    assert parts(10, 10) == [0.5, 0.5]
    assert parts(50, 10) == [0.7, 0.3]
    assert sum(parts(50, 10, 3)) == pytest.approx(1)
    assert parts(60, 50) == [1.0, 1.0]  # not both at a time, so each gets all
    assert parts(60, 30, 20) == [1.0, 1.0, 1.0]


def test_estimate_gpu_memory() -> None:
    assert estimate_gpu_memory(0) == GPU_OVERHEAD
    assert 10 * GB < estimate_gpu_memory(10 * GB) - GPU_OVERHEAD < 11 * GB


def test_models_to_unload_returns_idle_and_released_models() -> None:
    models = [
        resident("never", 0),
        resident("due", 90, idle_timeout=10),
        resident("not yet", 91, idle_timeout=10),
        resident("busy", 0, idle_timeout=10, busy=True),
        resident("unloading", 0, idle_timeout=10, state="unloading"),
        resident("loading", 0, idle_timeout=10, state="loading"),
        resident("released", 99, released=True),
        resident("released and busy", 99, released=True, busy=True),
    ]
    assert models_to_unload(models, now=100) == ["due", "released"]


def test_model_on_several_gpus_starts_when_all_of_them_have_room() -> None:
    start, more = LoadDecision("start", spare=2 * GB), LoadDecision("start", spare=3 * GB)
    evict, wait, never = LoadDecision("evict", "a"), LoadDecision("wait"), LoadDecision("never")
    assert strictest([more, start]) == start
    assert strictest([start, evict]).key == "a"
    assert strictest([evict, wait, start]).action == "wait"
    assert strictest([wait, never, evict]).action == "never"
