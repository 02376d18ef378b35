from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from syringa.config import Config
from syringa.errors import ConfigError, StartupError
from syringa.store import Store, url
from syringa.store.url import hide_password, locate


def test_locate_default_is_in_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(url.sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert locate(Config().database).target == "/home/ada/.local/share/syringa/syringa.db"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert locate("").target == "/home/ada/.local/share/syringa/syringa.db"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert locate("").target == str(tmp_path / "syringa" / "syringa.db")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(url.sys, "platform", "darwin")
    assert locate("").target == "/home/ada/Library/Application Support/syringa/syringa.db"


def test_locate_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    assert locate("a.db").target == locate("sqlite:///a.db").target == str(tmp_path / "a.db")
    assert locate("/x/a.db").target == locate("sqlite:////x/a.db").target == "/x/a.db"
    assert locate("~/a.db").target == "/home/ada/a.db"


def test_locate_postgresql_hides_password() -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        found = locate(f"{scheme}://ada:se:cret@db/syringa?sslmode=require")
        assert found.target == "postgresql+psycopg://ada:se:cret@db/syringa?sslmode=require"
        assert found.display == f"{scheme}://ada:***@db/syringa?sslmode=require"
    assert hide_password("postgresql:///x?user=a&password=b&host=/c") == "postgresql:///x?user=a&password=***&host=/c"


@pytest.mark.parametrize(
    "text", ["mysql://u:secret@h/d", "sqlite://", "sqlite:///", ":memory:", "sqlite:///:memory:", "/"]
)
def test_locate_refuses_invalid_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="database") as refused:
        Store(text)
    assert "secret" not in refused.value.message


def test_locate_names_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'syringa\[postgres\]'"):
        Store("postgresql://h/d")


async def test_invalid_postgresql_url_raises_config_error() -> None:
    async with Store("postgresql://h:port/d") as store:
        with pytest.raises(ConfigError, match="database"):
            await store.open()


def test_unused_store_imports_no_database_library(tmp_path: Path) -> None:
    code = f"""
import sys
from syringa.store import Store
Store({str(tmp_path / "a.db")!r})
sys.exit("sqlalchemy" in sys.modules or "sqlite3" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not (tmp_path / "a.db").exists()
