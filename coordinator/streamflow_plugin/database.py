"""StreamFlow's database, where the run wants it: each run has its own, so that two federations of one account can run.

The original's lies in the account's home and is locked while a run lives. It hands every statement to a thread and
back, twice: a run writes some hundred rows for each facility and round, each of which takes SQLite microseconds. Here
statements are carried out where they are asked for. Nothing waits for a disk meanwhile: the run is one transaction,
which is committed as it ends.

Nor does anything lock it, for nobody else opens it: a work directory may lie on a file system without locks, such as
Lustre mounted without `flock`, where SQLite fails otherwise.
"""

from __future__ import annotations

import ast
import inspect
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiosqlite
from streamflow.core.context import StreamFlowContext
from streamflow.persistence import sqlite
from streamflow.persistence.sqlite import SqliteDatabase

from coordinator.streamflow_plugin.names import DATABASE


class PrivateDatabase(SqliteDatabase):
    """`database: {type: sqlite}`, the same settings."""

    def __init__(self, context: StreamFlowContext, **settings: Any) -> None:
        path = os.environ.get(DATABASE)
        if path and settings.setdefault("connection", path) == path:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        super().__init__(context, **settings)
        if path == self.connection.connection:
            self.connection.init_db = True


class Cursor:
    """A cursor of `sqlite3` in the form of aiosqlite's."""

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor

    @property
    def lastrowid(self) -> int | None:
        return self._cursor.lastrowid

    async def execute(self, sql: str, parameters: Any = ()) -> Self:
        self._cursor.execute(sql, parameters)
        return self

    async def executescript(self, sql: str) -> Self:
        self._cursor.executescript(sql)
        return self

    async def fetchone(self) -> Any:
        return self._cursor.fetchone()

    async def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for row in self._cursor:
            yield row

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cursor.close()


class Statement(Awaitable[Cursor]):
    """A statement to await, or to enter for its cursor; carried out then."""

    def __init__(self, execute: Callable[[], sqlite3.Cursor]) -> None:
        self._execute = execute
        self._cursor: Cursor | None = None

    def __await__(self) -> Generator[Any, None, Cursor]:
        return Cursor(self._execute())
        yield

    async def __aenter__(self) -> Cursor:
        self._cursor = await self
        return self._cursor

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cursor is not None:
            await self._cursor.__aexit__(kind, error, trace)


class Connection:
    """A connection of `sqlite3` in the form of aiosqlite's, as far as StreamFlow uses that."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def row_factory(self) -> Any:
        return self._connection.row_factory

    @row_factory.setter
    def row_factory(self, factory: Any) -> None:
        self._connection.row_factory = factory

    def cursor(self) -> Statement:
        return Statement(self._connection.cursor)

    def execute(self, sql: str, parameters: Any = ()) -> Statement:
        return Statement(lambda: self._connection.execute(sql, parameters))

    def executemany(self, sql: str, parameters: Any) -> Statement:
        return Statement(lambda: self._connection.executemany(sql, parameters))

    async def commit(self) -> None:
        self._connection.commit()

    async def close(self) -> None:
        self._connection.close()


async def connect(database: str, timeout: float) -> Connection:
    """`aiosqlite.connect`; the run's own database without locks (https://sqlite.org/uri.html, `nolock`)."""
    if database != os.environ.get(DATABASE):
        return Connection(sqlite3.connect(database, timeout=timeout))
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?nolock=1", uri=True, timeout=timeout)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # else no write-ahead log (https://sqlite.org/wal.html)
    return Connection(connection)


def lacking(source: str) -> set[str]:
    """What this source of StreamFlow's database asks of aiosqlite that is not here."""
    asked: dict[str, set[str]] = {}
    """Attributes, by the name of what they are asked of; other expressions have none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            asked.setdefault(node.value.id if isinstance(node.value, ast.Name) else "", set()).add(node.attr)
    of_module = asked.pop("aiosqlite", set())
    of_objects = {attribute for name, found in asked.items() if name != "self" for attribute in found}
    of_objects &= {*dir(aiosqlite.Connection), *dir(aiosqlite.Cursor)}
    return (of_module - vars(MODULE).keys()) | (of_objects - {*dir(Connection), *dir(Cursor)})


MODULE = SimpleNamespace(connect=connect, Row=sqlite3.Row, Connection=Connection)
"""In the place of aiosqlite."""


def install() -> None:
    """Let StreamFlow's database open such connections, where it asks no more of them than they have."""
    if not lacking(inspect.getsource(sqlite)):
        sqlite.aiosqlite = MODULE  # type: ignore[assignment]
