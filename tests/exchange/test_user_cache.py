"""What processes of one account remember lies in one place, whatever HOME a step of a workflow has."""

from __future__ import annotations

from pathlib import Path

import pytest

from facility.exchange.files import user_cache as module
from facility.exchange.files.user_cache import user_cache


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An account's home, and the HOME of a step."""
    for name in ("account", "step"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "step"))
    monkeypatch.setattr(module, "account_home", lambda: tmp_path / "account")


def test_it_is_in_the_accounts_home_whatever_home_says(tmp_path: Path):
    assert user_cache() == tmp_path / "account" / ".cache" / "crossfed"
    assert (tmp_path / "account" / ".cache" / "crossfed").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "step").iterdir()) == []


def test_what_the_environment_names_comes_first_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "stated"))
    assert user_cache() == tmp_path / "stated" / "crossfed"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert user_cache() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == tmp_path / "account" / ".cache" / "crossfed"


@pytest.mark.parametrize("obstacle", ["no folder can be made", "no such account", "others may write"])
def test_home_serves_where_the_accounts_home_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str):
    if obstacle == "no folder can be made":
        (tmp_path / "account" / ".cache").write_text("a file")
    elif obstacle == "others may write":
        (tmp_path / "account" / ".cache" / "crossfed").mkdir(parents=True)
        (tmp_path / "account" / ".cache" / "crossfed").chmod(0o777)
    else:
        monkeypatch.setattr(module, "account_home", lambda: {}["nobody"])
    assert user_cache() == tmp_path / "step" / ".cache" / "crossfed"
