from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from syringa.service.auth.keys import digest
from tests.store.helpers import read, write


def test_a_key_is_printed_once_and_alone(syringa: Any, stored: Any) -> None:
    before = int(time.time())
    options = ["--name", "laptop", "--admin", "--model", "b", "--model", "a", "--expires", "30d", "--concurrent", "3"]
    made = syringa("keys", "create", "acme", *options)
    assert made.status == 0
    key = made.out.removesuffix("\n")
    assert re.fullmatch(r"sk-syr-\w{43}", key)
    assert "shown this once" in made.err
    assert key not in made.err
    [kept] = stored(lambda store: read(store).keys.all())
    assert (kept.organization, kept.name, kept.admin, kept.models) == ("acme", "laptop", True, ("a", "b"))
    assert (kept.requests_per_minute, kept.tokens_per_minute, kept.concurrent) == (None, None, 3)
    assert kept.digest == digest(key)
    assert before <= kept.created_at <= time.time()
    assert kept.expires_at - kept.created_at == 30 * 86400
    assert kept.id in made.err


def test_a_key_may_do_everything_by_default(syringa: Any, stored: Any) -> None:
    assert syringa("keys", "create", "acme").status == 0
    [kept] = stored(lambda store: read(store).keys.all())
    assert (kept.name, kept.admin, kept.models, kept.expires_at, kept.concurrent) == ("", False, None, None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a b",), "1 to 64 characters"),
        (("",), "1 to 64 characters"),
        (("x" * 65,), "1 to 64 characters"),
        (("x", "--expires", "soon"), "--expires 'soon': expected a span"),
        (("x", "--expires", "2020-01-31"), "over already"),
        (("x", "--expires", "0d"), "over already"),
        (("x", "--expires", "999999999w"), "too far"),
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
def test_keys_that_cannot_be_made(refusal: Any, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "taken").touch()
    error = refusal("keys", "create", *arguments)
    assert said in error
    assert "secret" not in error


def test_lists(syringa: Any, stored: Any) -> None:
    key = syringa("keys", "create", "acme", "--name", "the [bold]laptop").out.strip()
    syringa("keys", "create", "other", "--model", "m", "--tokens-per-minute", "5000")
    mine, theirs = stored(lambda store: read(store).keys.all())
    stored(lambda store: write(store).keys.touch({mine.id: 1_700_000_000}))
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


def test_a_list_as_json(syringa: Any, stored: Any) -> None:
    made = syringa("keys", "create", "acme", "--model", "m").out.strip()
    [key] = json.loads(syringa("keys", "list", "--json").out)
    assert (key["organization"], key["models"], key["hint"], key["revoked_at"]) == ("acme", ["m"], made[:11], None)
    assert "digest" not in key


def test_revoking(syringa: Any, stored: Any) -> None:
    syringa("keys", "create", "acme")
    [key] = stored(lambda store: read(store).keys.all())
    first = syringa("keys", "revoke", key.id)
    assert first.status == 0
    assert "is revoked" in first.err
    [revoked] = stored(lambda store: read(store).keys.all())
    assert revoked.revoked_at is not None
    again = syringa("keys", "revoke", key.id)
    assert again.status == 0
    assert "revoked already" in again.err
    assert stored(lambda store: read(store).keys.all()) == [revoked]
    assert key.id not in syringa("keys", "list").out
    assert key.id in syringa("keys", "list", "--all").out


def test_a_key_that_cannot_be_revoked(refusal: Any, syringa: Any, stored: Any) -> None:
    key = syringa("keys", "create", "acme").out.strip()
    assert "there is no key 'key_0'" in refusal("keys", "revoke", "key_0")
    assert key not in refusal("keys", "revoke", key)
    [kept] = stored(lambda store: read(store).keys.all())
    assert kept.revoked_at is None


@pytest.mark.parametrize("command", [("keys", "list"), ("keys", "revoke", "x"), ("organizations", "list"), ("usage",)])
def test_a_mistyped_path_makes_no_database(refusal: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "wrong.db: there is no database yet" in refusal(*command, "--database", "wrong.db")
    assert not list(tmp_path.iterdir())


def test_the_database_of_the_settings_file(syringa: Any, tmp_path: Path) -> None:
    (tmp_path / "syringa.toml").write_text('database = "here.db"\n')
    assert syringa("keys", "create", "acme").status == 0
    assert (tmp_path / "here.db").exists()
    (tmp_path / "other.toml").write_text('database = "there.db"\n')
    assert syringa("keys", "create", "acme", "--config", "other.toml").status == 0
    assert (tmp_path / "there.db").exists()


def test_the_first_key_of_a_server_that_listens_to_others(syringa: Any, tmp_path: Path) -> None:
    """`serve` would refuse these settings as long as there is no key; making one must not."""
    (tmp_path / "syringa.toml").write_text('host = "0.0.0.0"\ndatabase = "here.db"\n')
    assert syringa("keys", "create", "acme").status == 0


COMMANDS = ("keys", "keys create", "keys list", "keys revoke", "organizations", "organizations set", "usage")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(syringa: Any, command: str) -> None:
    said = syringa(*command.split(), "--help")
    assert said.status == 0
    assert f"{command} [OPTIONS]" in said.out
