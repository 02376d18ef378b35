from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join_tokens import KEPT_SECONDS, TOKENS, JoinTokens, parse_token
from syringa.errors import ConfigError, Unauthorized


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ClusterFolder(tmp_path / "cluster").create("head", ["head"])
    return tmp_path / "cluster"


def redeem(tokens: JoinTokens, token: str, node: str = "node") -> None:
    with tokens.redeem(parse_token(token).secret, node):
        pass


def test_token_names_the_authority_and_is_stored_as_a_hash_only(folder: Path, clock: Clock) -> None:
    token = JoinTokens(folder, clock).create()
    parsed = parse_token(f" {token}\n")
    assert parsed.fingerprint.hex(":").upper() == ClusterFolder(folder).authority().fingerprint
    stored = (folder / TOKENS).read_text()
    assert parsed.secret not in stored
    assert token not in stored
    assert stat.S_IMODE((folder / TOKENS).stat().st_mode) == 0o600


def test_token_is_valid_once(folder: Path, clock: Clock) -> None:
    tokens = JoinTokens(folder, clock)
    token, other = tokens.create(), tokens.create()
    redeem(tokens, token, "first")
    with pytest.raises(Unauthorized, match="was used before, by first"):
        redeem(tokens, token, "second")
    redeem(tokens, other)
    assert [each.used_by for each in tokens.records()] == ["first", "node"]


def test_token_expires(folder: Path, clock: Clock) -> None:
    tokens = JoinTokens(folder, clock)
    token = tokens.create(ttl=60)
    clock.now += 59.9
    assert [each.state(clock.now) for each in tokens.records()] == ["valid"]
    clock.now += 0.1
    with pytest.raises(Unauthorized, match="has expired"):
        redeem(tokens, token)
    assert [each.state(clock.now) for each in tokens.records()] == ["expired"]
    clock.now += KEPT_SECONDS
    assert tokens.records() == []


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 31 * 86400])
def test_token_has_a_finite_validity(folder: Path, ttl: float) -> None:
    with pytest.raises(ConfigError, match="at most 30 days"):
        JoinTokens(folder).create(ttl)


def test_token_of_another_cluster_is_not_known(folder: Path, tmp_path: Path) -> None:
    ClusterFolder(tmp_path / "other").create("head", ["head"])
    with pytest.raises(Unauthorized, match="not one of this cluster"):
        redeem(JoinTokens(folder), JoinTokens(tmp_path / "other").create())


def test_token_stays_valid_when_the_node_is_not_admitted(folder: Path) -> None:
    tokens = JoinTokens(folder)
    token = tokens.create()
    with pytest.raises(LookupError), tokens.redeem(parse_token(token).secret, "node"):
        raise LookupError
    redeem(tokens, token)


def test_token_is_used_once_by_concurrent_nodes(folder: Path) -> None:
    token = JoinTokens(folder).create()
    start, admitted, refused = threading.Barrier(8), [], []

    def attempt(name: str) -> None:
        start.wait()
        try:
            redeem(JoinTokens(folder), token, name)
            admitted.append(name)
        except Unauthorized:
            refused.append(name)

    threads = [threading.Thread(target=attempt, args=(f"node{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 1
    assert len(refused) == 7


@pytest.mark.parametrize(
    "damage",
    [
        lambda token: token[:-1],
        lambda token: token + "A",
        lambda token: token.removeprefix("syringa-"),
        lambda token: token[:-1] + "!",
        lambda token: "",
        lambda token: token[:-1] + "ä",
    ],
)
def test_mistyped_token_is_refused_without_repeating_it(folder: Path, damage: Callable[[str], str]) -> None:
    token = damage(JoinTokens(folder).create())
    with pytest.raises(ConfigError, match="incomplete or mistyped") as raised:
        parse_token(token)
    assert not token or token not in raised.value.message


def test_tokens_need_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster init"):
        JoinTokens(tmp_path / "missing").create()
    with pytest.raises(ConfigError, match="cluster init"):
        JoinTokens(tmp_path / "missing").records()


def test_unreadable_tokens_are_reported(folder: Path) -> None:
    (folder / TOKENS).write_text("no JSON")
    with pytest.raises(ConfigError, match="delete it"):
        JoinTokens(folder).records()
