"""Laws of files by which the nodes of a job communicate."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.files.listing import names_in
from facility.launching.notes import Notes
from facility.training.processes.torchrun import announce_store, find_store

OPENED: list[Callable[[str], None]] = []
"""Who is told of each file that this process opens."""


@pytest.fixture(scope="module", autouse=True)
def told_of_opened_files() -> Iterator[None]:
    """Hooks cannot be taken away again: this one asks whom to tell."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and OPENED and isinstance(arguments[0], str | Path):
            for one in OPENED:
                one(str(arguments[0]))

    sys.addaudithook(hook)
    yield


@contextmanager
def asked_for_while_absent(name: str) -> Iterator[list[str]]:
    """Paths of this name that this thread opens, or whose status it asks for, where there is no such file."""
    found: list[str] = []
    real = os.stat

    def look(path: str) -> None:
        here = threading.current_thread() is threading.main_thread()
        if here and Path(path).name == name and not os.path.lexists(path):
            found.append(path)

    def status(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | Path):
            look(str(path))
        return real(path, **options)

    OPENED.append(look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", status)
        yield found
    OPENED.remove(look)


def later(action: Callable[[], Any]) -> threading.Thread:
    """The action, of another node, a while after."""
    thread = threading.Timer(0.7, action)
    thread.start()
    return thread


def test_a_note_is_opened_only_once_it_is_there(tmp_path: Path) -> None:
    """A client of NFS remembers, for half a minute and longer, that a name was absent: no note is asked for by its name
    before the list of its directory has it."""
    here, there = Notes(tmp_path, "1"), Notes(tmp_path, "1")
    with asked_for_while_absent("first.json") as early:
        other = later(lambda: there.write("first", {"decided": True}))
        assert here.wait_for("first", 20, "the first task") == {"decided": True}
        other.join()
    assert early == []
    with asked_for_while_absent("task-1.json") as early:
        other = later(lambda: there.write("task-1", 5))
        assert here.gather(2, 0, 3, 20) == [3, 5]
        other.join()
    assert early == []


def test_where_ranks_meet_under_torchrun_is_opened_only_once_it_is_there(tmp_path: Path) -> None:
    with asked_for_while_absent("meeting-0.json") as early:
        other = later(lambda: announce_store(tmp_path, "node-1", 29500, {}))
        assert find_store(tmp_path, 20, {}) == ("node-1", 29500)
        other.join()
    assert early == []


def test_the_directory_of_notes_is_asked_for_only_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = os.listdir, []

    def listdir(path: Path) -> list[str]:
        asked.append(Path(path))
        return real(path)

    notes = Notes(tmp_path, "1")
    monkeypatch.setattr(os, "listdir", listdir)
    assert notes.read("first") is None and asked == [tmp_path]
    Notes(tmp_path, "1").write("first", "train")
    asked.clear()
    assert notes.read("first") == "train" and asked == [tmp_path, notes.directory]
    asked.clear()
    assert notes.failures() == [] and asked == [notes.directory]


def test_a_folder_that_is_absent_or_none_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (
        names_in(tmp_path / "absent") == names_in(tmp_path / "absent" / "below") == names_in(tmp_path / "file") == set()
    )
