"""What cannot be looked at is not taken for missing, under any Python, where a missing one is made or begun anew."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.archive.rounds import Archive
from coordinator.engine.one_run import only_renderer_where_runs_are
from coordinator.masking.pending import Pending
from facility.exchange.files import present
from facility.preparing.output import publish_directory, recognise_dataset
from facility.rounds.kept import by_round, latest_before
from facility.rounds.models import Models
from facility.rounds.smaller import keep_pending
from facility.training.state.state import read_checkpoint, read_state_of

KINDS = ["file", "folder", "nothing", "below a file", "link", "dangling link", "loop", "pipe", "zero byte"]


def made(kind: str, folder: Path) -> Path:
    path = folder / "entry"
    if kind == "file":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "below a file":
        (folder / "file").touch()
        return folder / "file" / "entry"
    elif kind in ("link", "dangling link"):
        path.symlink_to(folder if kind == "link" else folder / "gone")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero byte":
        return folder / "a\0b"
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_told_is_as_pathlib_has_it(kind: str, tmp_path: Path):
    path = made(kind, tmp_path)
    found = (present.exists(path), present.is_file(path), present.is_dir(path))
    assert found == (path.exists(), path.is_file(), path.is_dir())


def hold_locks(place: Path) -> None:
    with only_renderer_where_runs_are(SimpleNamespace(file=place / "federation.yml", archive_path=place)):  # type: ignore[arg-type]
        pass


def publish(place: Path) -> None:
    with publish_directory(place):
        pytest.fail("it is not known what would be replaced")


LOOKS: dict[str, Callable[[Path], object]] = {
    "exists": present.exists,
    "is_file": present.is_file,
    "is_dir": present.is_dir,
    "the rounds of an archive": lambda place: Archive(place).rounds(),
    "a masked request": lambda place: Pending(archive=Archive(place), round=1).find(place),
    "the lock of a run": hold_locks,
    "rounds that a facility kept": by_round,
    "the last of them": lambda place: latest_before(place, 3),
    "a model that a facility keeps": lambda place: Models(place).holds("0" * 64),
    "what an update left unsent": lambda place: keep_pending(place, 1),
    "the state of an optimizer": lambda place: read_state_of(place, None),  # type: ignore[arg-type]
    "a round that was interrupted": lambda place: read_checkpoint(place, None, 1, ""),  # type: ignore[arg-type]
    "a prepared dataset": lambda place: recognise_dataset(SimpleNamespace(out=place), {}),  # type: ignore[arg-type]
    "a folder to publish": publish,
}


@pytest.mark.parametrize("what", LOOKS)
def test_what_a_file_system_does_not_tell_is_not_missing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, told in {"exists": os.path.exists, "is_file": os.path.isfile, "is_dir": os.path.isdir}.items():
        monkeypatch.setattr(Path, name, lambda path, told=told: told(path))  # as from Python 3.14 on
    with pytest.raises(OSError) as caught:
        LOOKS[what](tmp_path / ("x" * 300))
    assert caught.value.errno == errno.ENAMETOOLONG
