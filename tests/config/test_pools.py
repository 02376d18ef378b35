"""The tables `[[pools]]` of the settings file, and the pools that models name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from syringa.config import Config, load, read_model
from syringa.engine.processes.control import acquire_request
from syringa.errors import ConfigError
from syringa.fleet.pools import IdleThresholds, PoolCache, PoolCapacity, PoolPreemption, PoolSpec
from syringa.fleet.schedule import DAYS, PoolSchedule, PoolWindow

FILE = """
[[pools]]
name = "always"

[[pools]]
name = "night"
selector = {site = "office", gpu = "h100"}
capacity = {max_gpus = 6, max_utilization_pct = 75}
schedule = {mode = "idle", timezone = "Europe/Berlin", windows = [
  {days = ["mon", "fri"], start = "22:00", end = "06:00"},
  {days = ["sat"]},
]}
idle = {gpu_utilization_pct = 2, after = 60}
preemption = {grace-period = 10, priority = -1}
cache = {capacity = 200}

[[models]]
id = "chat"
path = "smollm2"
pools = ["night", "always"]
"""


def read(folder: Path, text: str) -> Config:
    (folder / "syringa.toml").write_text(text)
    return load(environ={}, folder=folder)


def pool(more: str) -> str:
    return f'[[pools]]\nname = "night"\n{more}'


def windows(text: str) -> str:
    return pool(f'schedule = {{mode = "scheduled", windows = [{text}]}}')


def test_pool_tables_are_read_with_their_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    always, night = config.pools
    assert always == PoolSpec(name="always")
    assert always.schedule.mode == "always"
    assert always.preemption.grace_period == 30
    assert night == PoolSpec(
        name="night",
        selector={"site": "office", "gpu": "h100"},
        capacity=PoolCapacity(max_gpus=6, max_utilization_pct=75),
        schedule=PoolSchedule(
            mode="idle",
            timezone="Europe/Berlin",
            windows=(PoolWindow(days=("mon", "fri"), start="22:00", end="06:00"), PoolWindow(days=("sat",))),
        ),
        idle=IdleThresholds(gpu_utilization_pct=2, after=60),
        preemption=PoolPreemption(grace_period=10, priority=-1),
        cache=PoolCache(capacity=200),
    )
    assert PoolWindow().days == DAYS


def test_config_with_pools_survives_the_way_to_an_api_server(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


def test_model_names_its_pools_in_order(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    assert config.models[0].pools == ("night", "always")
    assert acquire_request(config.models[0], config).pools == ["night", "always"]
    added = read_model({"id": "x", "path": "smollm2", "pools": ["default"]}, config)
    assert added.pools == ("default",)
    with pytest.raises(ConfigError, match="there is no such pool; expected one of always, night, default") as error:
        read_model({"id": "x", "path": "smollm2", "pools": ["day"]}, config)
    assert error.value.param == "pools[0]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('pools = "night"', "pools: expected tables, each under a heading [[pools]]"),
        ("[[pools]]\nselector = {}", "pools[0].name is missing"),
        ('[[pools]]\nname = ""', 'pools[0].name "": expected 1 to 63 letters, digits, hyphens, underscores'),
        ('[[pools]]\nname = "a b"', 'pools[0].name "a b": expected 1 to 63 letters'),
        ("[[pools]]\nname = 5", "pools[0].name 5: expected text"),
        (pool("") + '[[pools]]\nname = "night"', 'pools[1].name "night": another pool has this name already'),
        (pool("max_gpus = 2"), "pools[0]: unknown key 'max_gpus'; expected one of name, selector"),
        (pool("capacities = {}"), "pools[0]: unknown key 'capacities'; did you mean 'capacity'?"),
        (pool("capacity = 5"), "pools[0].capacity 5: expected a table with max_gpus, max_utilization_pct"),
        (pool("capacity = {max_gpus = -1}"), "pools[0].capacity.max_gpus -1: expected a whole number, at least 0"),
        (
            pool("capacity = {max_utilization_pct = 101}"),
            "pools[0].capacity.max_utilization_pct 101: expected a number, at most 100",
        ),
        (pool("capacity = {max_gpu = 1}"), "pools[0].capacity: unknown key 'max_gpu'; did you mean 'max_gpus'?"),
        (pool('selector = "h100"'), 'pools[0].selector "h100": expected a table of labels'),
        (pool("selector = {gpu = 1}"), "expected a table of labels, whose values are texts"),
        (pool('selector = {gpu = ""}'), "a label and its value cannot be empty"),
        (pool('schedule = {mode = "night"}'), 'schedule.mode "night": expected one of always, scheduled, idle'),
        (pool('schedule = {mode = "scheduled"}'), "schedule.windows: mode scheduled needs at least one window"),
        (pool("schedule = {windows = [{}]}"), "schedule.windows: mode always has no windows"),
        (
            pool('schedule = {timezone = "Europe/Berlim"}'),
            'schedule.timezone "Europe/Berlim": unknown time zone; expected one such as Europe/Berlin',
        ),
        (windows("5"), "schedule.windows[0] 5: expected a table with days, start, end"),
        (pool('schedule = {windows = "22:00"}'), 'schedule.windows "22:00": expected a list of tables'),
        (windows('{start = "24:30"}'), 'windows[0].start "24:30": expected a time such as "06:30", from "00:00" to'),
        (windows('{start = "24:00"}'), 'windows[0].start "24:00": expected a time'),
        (windows('{end = "6:00"}'), 'windows[0].end "6:00": expected a time such as "06:30", from "00:00" to "24:00"'),
        (windows('{end = "12:60"}'), 'windows[0].end "12:60": expected a time'),
        (windows("{end = 12:30:00}"), "windows[0].end 12:30:00: expected a time"),
        (windows("{end = 6}"), "windows[0].end 6: expected a time"),
        (windows('{start = "06:00", end = "06:00"}'), "windows[0]: start and end are the same"),
        (windows('{days = ["monday"]}'), 'windows[0].days ["monday"]: expected a list of days: mon, tue'),
        (windows("{days = []}"), "windows[0].days []: expected a list of days"),
        (windows('{days = "mon"}'), 'windows[0].days "mon": expected a list of days'),
        (windows("{hours = 3}"), "windows[0]: unknown key 'hours'"),
        (pool("idle = {after = -5}"), "pools[0].idle.after -5: expected a number, at least 0"),
        (pool("idle = {cpu_pct = nan}"), "pools[0].idle.cpu_pct"),
        (pool('preemption = {grace_period = "30s"}'), 'preemption.grace_period "30s": expected a number'),
        (pool("preemption = {priority = 1.5}"), "preemption.priority 1.5: expected a whole number"),
        (pool("cache = {capacity = -1}"), "pools[0].cache.capacity -1: expected a number, at least 0"),
        (
            pool("") + '[[models]]\nid = "m"\npath = "smollm2"\npools = ["night", "day"]',
            'models[0].pools[1] "day": there is no such pool; expected one of night, default',
        ),
        (
            pool("") + '[[models]]\nid = "m"\npath = "smollm2"\npools = ["night", "night"]',
            'models[0].pools ["night", "night"]: a pool is named twice',
        ),
        (
            '[[models]]\nid = "m"\npath = "smollm2"\npools = "night"',
            'models[0].pools "night": expected a list of texts',
        ),
    ],
)
def test_invalid_pools_are_refused_with_the_path_of_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert message in error.value.message
    assert error.value.message.startswith("syringa.toml: ")
