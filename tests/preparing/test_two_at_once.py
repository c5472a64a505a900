"""Law: of two runs of one request at once one is refused by name, and the data set is whole, with locks and without."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from facility.dataset import DatasetError
from facility.preparing import reading, resuming, writing
from facility.preparing.build import prepare_dataset
from facility.preparing.images import build
from tests.preparing.test_images import asked, folders
from tests.preparing.test_prepare import tree
from tests.preparing.test_resuming import TASKS, request_of
from tests.training.images import PROCESSOR

FLOCK, ENCODE_ALL = fcntl.flock, writing.encode_all


def of_nfs(file: Any, how: int) -> None:
    """flock(2): NFS locks what is open for writing, which no directory can be."""
    number = file if isinstance(file, int) else file.fileno()
    if stat.S_ISDIR(os.fstat(number).st_mode):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(number, how)


def of_lustre(*_: object) -> None:
    """Mounted without `flock`."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("first_to_end", ["first", pytest.param("second", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "flock, kind",
    [
        pytest.param(FLOCK, "joined", id="local"),
        pytest.param(of_nfs, "joined", id="nfs"),
        *(pytest.param(of_lustre, kind, id=f"lustre-{kind}") for kind in TASKS),
    ],
)
def test_two_at_once_end_with_the_data_set_that_one_alone_makes(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, flock: Any, kind: str, first_to_end: str
):
    """The lock was of a folder. On NFS, and without locks, the one that ended first delivered an array without rows,
    which the other had begun; the other ended in a traceback."""
    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(resuming, "SAVE_SECONDS", 0.0)
    whole = prepare_dataset(request_of(tmp_path / "whole", tokenizer, kind))
    request = request_of(tmp_path / "both", tokenizer, kind)
    monkeypatch.setattr(fcntl, "flock", flock)
    at_work, others, goes_on = threading.local(), list[Future[Any]](), threading.Event()
    reached = threading.Event()

    def encode_all(*arguments: Any, **settings: Any) -> Iterator[Any]:
        for number, one in enumerate(ENCODE_ALL(*arguments, **settings)):
            if getattr(at_work, "second", False) and number == 3 and first_to_end == "first":
                reached.set()
                assert goes_on.wait(60)
            if not getattr(at_work, "second", False) and number == 5 and not others:
                others.append(pool.submit(second))
                others[0].add_done_callback(lambda _: reached.set())
                assert reached.wait(60)
            yield one

    def second() -> Any:
        at_work.second = True
        return outcome(lambda: prepare_dataset(request))

    monkeypatch.setattr(writing, "encode_all", encode_all)
    with ThreadPoolExecutor(1) as pool:
        found = [outcome(lambda: prepare_dataset(request))]
        goes_on.set()
        found.append(others[0].result())
    made = [one for one in found if not isinstance(one, str)]
    assert len(made) == 1 and "another process" in next(one for one in found if isinstance(one, str)), found
    assert made[0].dataset.manifest == whole.dataset.manifest
    assert tree(request.out) == tree(tmp_path / "whole" / "out")
    assert sorted(one.name for one in request.out.parent.iterdir()) == ["out", "text.jsonl"]


def test_without_locks_the_first_of_two_runs_over_images_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    request = asked(folders(tmp_path / "images"), tmp_path, tmp_path / "out")
    monkeypatch.setattr(fcntl, "flock", of_lustre)
    write, made = build.Writing.write, list[Any]()

    def while_another_does(self: Any, *arguments: Any) -> None:
        if not made:
            made.append(None)
            made.append(build.prepare_images(request))
        write(self, *arguments)

    monkeypatch.setattr(build.Writing, "write", while_another_does)
    assert "another process began" in outcome(lambda: build.prepare_images(request))
    made[1].dataset.verify()
    assert build.prepare_images(request).reused
    assert {one.name for one in tmp_path.iterdir()} == {"preprocessor_config.json", "images", "out"}


def outcome(make: Any) -> Any:
    """What is returned, or the sentence of a refusal."""
    try:
        return make()
    except DatasetError as error:
        return str(error)
