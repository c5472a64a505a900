"""StreamFlow's database holds the same rows where statements are carried out at once as where a thread does it."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiosqlite
import pytest

pytest.importorskip("streamflow")

from streamflow.core.persistence import DependencyType
from streamflow.core.workflow import Port, Status, Step, Token, Workflow
from streamflow.persistence import sqlite

from coordinator.streamflow_plugin import database
from coordinator.streamflow_plugin.database import PrivateDatabase
from coordinator.streamflow_plugin.names import DATABASE


async def fill(path: Path) -> tuple[list[Any], set[threading.Thread]]:
    """A few rows of every kind that a run writes; what reading gives of them, and the threads seen meanwhile."""
    opened = PrivateDatabase(SimpleNamespace(config={"path": str(path.parent)}), connection=str(path), timeout=1)
    try:
        return await written_and_read(opened)
    finally:
        await opened.close()


async def written_and_read(opened: PrivateDatabase) -> tuple[list[Any], set[threading.Thread]]:
    workflow = await opened.add_workflow("w", {"a": 1}, Status.RUNNING.value, Workflow)
    ports = [await opened.add_port(f"p{n}", workflow, Port, {"n": n}) for n in range(3)]
    steps = [await opened.add_step(f"/s{n}", workflow, Status.WAITING.value, Step, {}) for n in range(2)]
    await asyncio.gather(
        *(opened.add_dependency(step, port, DependencyType.INPUT, f"i{port}") for step in steps for port in ports)
    )
    tokens = [await opened.add_token("0", Token, {"v": n}, ports[0], n % 2 == 0) for n in range(4)]
    await opened.add_provenance(tokens[:3], tokens[3])
    await opened.update_step(steps[0], {"status": Status.COMPLETED.value})
    seen = set(threading.enumerate())
    found = [
        await opened.get_workflow(workflow),
        await opened.get_port(ports[1]),
        await opened.get_step(steps[0]),
        [dict(row) for row in await opened.get_input_ports(steps[1])],
        [dict(row) for row in await opened.get_dependees(tokens[3])],
        await opened.get_token(tokens[2]),
    ]
    return found, seen


def rows(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return list(connection.iterdump())


def test_the_rows_are_those_that_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite, "aiosqlite", aiosqlite)
    at_first = set(threading.enumerate())
    by_thread, with_thread = asyncio.run(fill(tmp_path / "thread.db"))
    database.install()
    before = set(threading.enumerate())
    at_once, during = asyncio.run(fill(tmp_path / "direct.db"))
    assert at_once == by_thread and len(at_once[3]) == 3 and len(at_once[4]) == 3
    assert rows(tmp_path / "direct.db") == rows(tmp_path / "thread.db")
    assert with_thread - at_first
    assert not during - before


HELD = """
import fcntl, sys
file = open(sys.argv[1], "a+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("own", [True, False])
def test_the_runs_own_database_asks_for_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool):
    """On a file system without locks each start of a run ended with `disk I/O error`."""
    path = tmp_path / "sqlite.db"
    monkeypatch.setattr(sqlite, "aiosqlite", aiosqlite)
    database.install()
    expected = asyncio.run(fill(tmp_path / "plain.db"))[0]
    if own:
        monkeypatch.setenv(DATABASE, str(path))
    command = [sys.executable, "-c", HELD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        if own:
            assert asyncio.run(fill(path))[0] == expected
        else:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                asyncio.run(fill(path))
        other.communicate()
    assert not own or rows(path) == rows(tmp_path / "plain.db")


def test_what_sqlite_refuses_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite, "aiosqlite", aiosqlite)
    database.install()

    async def ask() -> None:
        opened = await database.connect(str(tmp_path / "a.db"), timeout=1.0)
        try:
            async with opened.execute("SELECT * FROM absent"):
                pass
        finally:
            await opened.close()

    with pytest.raises(sqlite3.OperationalError, match="absent"):
        asyncio.run(ask())


def test_streamflow_is_as_known():
    """Else a thread would carry out each statement of a run, and hundreds of facilities would take long."""
    assert not database.lacking(inspect.getsource(sqlite))


@pytest.mark.parametrize(
    ("asked", "absent"),
    [("connection.create_function(1)", "create_function"), ("aiosqlite.register_adapter(int)", "register_adapter")],
)
def test_a_database_that_asks_for_more_keeps_aiosqlite(asked: str, absent: str, monkeypatch: pytest.MonkeyPatch):
    source = inspect.getsource(sqlite) + f"\n\ndef more(connection):\n    {asked}\n"
    assert database.lacking(source) == {absent}
    monkeypatch.setattr(sqlite, "aiosqlite", aiosqlite)
    monkeypatch.setattr(inspect, "getsource", lambda module: source)
    database.install()
    assert sqlite.aiosqlite is aiosqlite
