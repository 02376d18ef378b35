from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from syringa.service.auth.keys import digest
from tests.store.helpers import read, write


def test_keys_create_prints_key_alone(syringa: Any, on_store: Any) -> None:
    before = int(time.time())
    options = ["--name", "laptop", "--admin", "--model", "b", "--model", "a", "--expires", "30d", "--concurrent", "3"]
    created = syringa("keys", "create", "acme", *options)
    assert created.status == 0
    key = created.out.removesuffix("\n")
    assert re.fullmatch(r"sk-syr-\w{43}", key)
    assert "shown only now" in created.err
    assert key not in created.err
    [stored] = on_store(lambda store: read(store).keys.all())
    assert (stored.organization, stored.name, stored.admin, stored.models) == ("acme", "laptop", True, ("a", "b"))
    assert (stored.requests_per_minute, stored.tokens_per_minute, stored.concurrent) == (None, None, 3)
    assert stored.digest == digest(key)
    assert before <= stored.created_at <= time.time()
    assert stored.expires_at - stored.created_at == 30 * 86400
    assert stored.id in created.err


def test_keys_create_defaults(syringa: Any, on_store: Any) -> None:
    assert syringa("keys", "create", "acme").status == 0
    [stored] = on_store(lambda store: read(store).keys.all())
    assert (stored.name, stored.admin, stored.models, stored.expires_at, stored.concurrent) == (
        "",
        False,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a b",), "1 to 64 characters"),
        (("",), "1 to 64 characters"),
        (("x" * 65,), "1 to 64 characters"),
        (("x", "--expires", "soon"), "--expires 'soon': expected a span"),
        (("x", "--expires", "2020-01-31"), "expected a time in the future"),
        (("x", "--expires", "0d"), "expected a time in the future"),
        (("x", "--expires", "999999999w"), "1970 to 9999"),
        (("x", "--concurrent", "-1"), "--concurrent '-1': expected a whole number"),
        (("x", "--tokens-per-minute", "1.5"), "--tokens-per-minute '1.5'"),
        (("x", "--requests-per-minute", "9" * 5000), "from 0 (no limit) to"),
        (("x", "--model", ""), "a model's id"),
        (("x", "--name", "a\x1b"), "printable"),
        (("x", "--database", "mysql://x"), "expected a file's path"),
        (("x", "--database", "postgresql://u:secret@127.0.0.1:9/x"), "127.0.0.1:9/x: connection"),
        (("x", "--database", "taken/syringa.db"), "taken/syringa.db: "),
        (("x", "--config", "missing.toml"), "no such file"),
    ],
)
def test_keys_create_refuses_invalid_values(
    error_of: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "taken").touch()
    error = error_of("keys", "create", *arguments)
    assert message in error
    assert "secret" not in error


def test_keys_list(syringa: Any, on_store: Any) -> None:
    key = syringa("keys", "create", "acme", "--name", "the [bold]laptop").out.strip()
    syringa("keys", "create", "other", "--model", "m", "--tokens-per-minute", "5000")
    mine, theirs = on_store(lambda store: read(store).keys.all())
    on_store(lambda store: write(store).keys.touch({mine.id: 1_700_000_000}))
    both = syringa("keys", "list")
    assert both.status == 0
    assert [line.split()[0] for line in both.out.splitlines()] == ["id", mine.id, theirs.id]
    assert "the [bold]laptop" in both.out
    assert f"{key[:11]}…" in both.out
    assert "2023-11-14 22:13" in both.out
    assert "tokens per minute 5,000" in both.out
    assert key not in both.out
    assert mine.digest not in both.out
    assert theirs.id not in syringa("keys", "list", "acme").out


def test_keys_list_json(syringa: Any, on_store: Any) -> None:
    created = syringa("keys", "create", "acme", "--model", "m").out.strip()
    [key] = json.loads(syringa("keys", "list", "--json").out)
    assert (key["organization"], key["models"], key["hint"], key["revoked_at"]) == ("acme", ["m"], created[:11], None)
    assert "digest" not in key


def test_keys_revoke(syringa: Any, on_store: Any) -> None:
    syringa("keys", "create", "acme")
    [key] = on_store(lambda store: read(store).keys.all())
    first = syringa("keys", "revoke", key.id)
    assert first.status == 0
    assert "Revoked" in first.err
    [revoked] = on_store(lambda store: read(store).keys.all())
    assert revoked.revoked_at is not None
    again = syringa("keys", "revoke", key.id)
    assert again.status == 0
    assert "already revoked" in again.err
    assert on_store(lambda store: read(store).keys.all()) == [revoked]
    assert key.id not in syringa("keys", "list").out
    assert key.id in syringa("keys", "list", "--all").out


def test_keys_revoke_unknown_id(error_of: Any, syringa: Any, on_store: Any) -> None:
    key = syringa("keys", "create", "acme").out.strip()
    assert "there is no key 'key_0'" in error_of("keys", "revoke", "key_0")
    assert key not in error_of("keys", "revoke", key)
    [stored] = on_store(lambda store: read(store).keys.all())
    assert stored.revoked_at is None


@pytest.mark.parametrize("command", [("keys", "list"), ("keys", "revoke", "x"), ("organizations", "list"), ("usage",)])
def test_commands_do_not_create_mistyped_database(error_of: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "wrong.db: there is no database yet" in error_of(*command, "--database", "wrong.db")
    assert not list(tmp_path.iterdir())


def test_database_of_settings_file(syringa: Any, tmp_path: Path) -> None:
    (tmp_path / "syringa.toml").write_text('database = "here.db"\n')
    assert syringa("keys", "create", "acme").status == 0
    assert (tmp_path / "here.db").exists()
    (tmp_path / "other.toml").write_text('database = "there.db"\n')
    assert syringa("keys", "create", "acme", "--config", "other.toml").status == 0
    assert (tmp_path / "there.db").exists()


def test_keys_create_for_public_server(syringa: Any, tmp_path: Path) -> None:
    """`serve` refuses these settings without a key; creating one must work."""
    (tmp_path / "syringa.toml").write_text('host = "0.0.0.0"\ndatabase = "here.db"\n')
    assert syringa("keys", "create", "acme").status == 0


COMMANDS = ("keys", "keys create", "keys list", "keys revoke", "organizations", "organizations set", "usage")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(syringa: Any, command: str) -> None:
    message = syringa(*command.split(), "--help")
    assert message.status == 0
    assert f"{command} [OPTIONS]" in message.out


def cells(text: str) -> list[list[str]]:
    return [line.split()[:4] for line in text.splitlines()[1:]]


def test_organizations_set_and_list(syringa: Any, on_store: Any) -> None:
    syringa("keys", "create", "acme")
    first = syringa("organizations", "set", "acme", "--requests-per-minute", "5000", "--concurrent", "0")
    assert first.status == 0
    assert cells(first.out) == [["acme", "5,000", "default", "none"]]
    second = syringa("organizations", "set", "acme", "--requests-per-minute", "default", "--tokens-per-minute", "7")
    assert cells(second.out) == [["acme", "default", "7", "none"]]
    syringa("organizations", "set", "new", "--concurrent", "1")
    assert cells(syringa("organizations", "list").out) == [
        ["acme", "default", "7", "none"],
        ["new", "default", "default", "1"],
    ]
    acme, new = on_store(lambda store: read(store).organizations.all())
    assert (acme.requests_per_minute, acme.tokens_per_minute, acme.concurrent) == (None, 7, 0)
    assert new.concurrent == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("acme",), "nothing to set"),
        (("a/b", "--concurrent", "1"), "1 to 64 characters"),
        (("acme", "--concurrent", "lots"), "--concurrent 'lots': expected a whole number"),
        (("acme", "--concurrent", "²"), "expected a whole number"),
        (("acme", "--concurrent", ""), "expected a whole number"),
    ],
)
def test_organizations_set_refuses_invalid_values(error_of: Any, arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of("organizations", "set", *arguments)
