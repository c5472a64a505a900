"""A file system without locks, as Lustre mounted without `flock`: what goes on there, and what refuses to."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.closing import MOST_LATE
from coordinator.config.federation import read_federation
from coordinator.engine.one_run import only_one
from facility.exchange.files import audit_log, durable, locks
from facility.exchange.files.compiled_code import VARIABLE
from facility.exchange.files.durable import new_directory
from facility.exchange.files.locks import take_lock, temporary_place
from facility.exchange.files.storage import file_error_sentence, is_storage
from facility.exchange.messages.progress import FILE, read_progress
from facility.gating import ledger as gate_ledger
from facility.launching.compiled import place_of_compiled
from facility.launching.notes import Notes
from facility.launching.place import read_tasks
from facility.launching.rendezvous import DIRECTORY, private_directory
from facility.masking.ledger import AnswerLedger, Entry
from facility.preparing.resuming import part_of
from facility.rounds.finished import LOCKS, Finished
from facility.rounds.privacy_ledger import ReleaseLedger
from facility.training.processes.torchrun import agents_directory
from tests.federations import write_federation


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refused)


def test_a_lock_is_held_by_one_process(tmp_path: Path):
    path = tmp_path / "lock"
    script = "import sys; from pathlib import Path; from facility.exchange.files.locks import take_lock as take\n"
    script += "path = Path(sys.argv[1]); print(take(open(path, 'a'), path, wait=False))"

    def other() -> str:
        return subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True).stdout

    with open(path, "a") as file:
        assert take_lock(file, path, wait=False)
        assert other() == "False\n"
    assert other() == "True\n"


def test_a_job_that_waits_for_another_of_its_round_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After a run that was killed, the next one said for as long as its job trained that another does."""
    monkeypatch.chdir(tmp_path)

    def second() -> None:
        with Finished(tmp_path / "state").alone(0) as held:
            assert held

    with ThreadPoolExecutor() as pool, Finished(tmp_path / "state").alone(0):
        assert not Path(FILE).exists()
        waits = pool.submit(second)
        deadline = time.monotonic() + 60
        while not Path(FILE).exists():
            assert time.monotonic() < deadline and not waits.done()
            time.sleep(0.01)
        assert read_progress(Path(FILE).read_text()).stage == "waiting"
    waits.result()


def test_locks_of_rounds_do_not_add_up(tmp_path: Path):
    """Each round left an empty file at its facility for ever; rounds that are at work together have a lock each."""
    finished = Finished(tmp_path)
    with finished.alone(40):
        for round in range(41, 41 + MOST_LATE):
            with finished.alone(round) as held:
                assert held
    for round in range(100):
        with finished.alone(round) as held:
            assert held
    assert len(list(finished.directory.iterdir())) == LOCKS


ENTRY = Entry(generation="a", run="b", round=0, base_sha256="c", request="d", survivors=["a"])
REFUSE: dict[str, Callable[[Path], object]] = {
    "answers of secure aggregation": lambda path: AnswerLedger(state=path).record(ENTRY),
    "releases of differential privacy": lambda path: ReleaseLedger(state=path).open(),
    "a gate's ledger": lambda path: gate_ledger.ledger_locked(path / "ledger.json").__enter__(),
    "an audit log": lambda path: audit_log.append(path / "audit.jsonl", "request"),
}


@pytest.mark.parametrize("what", REFUSE)
@pytest.mark.usefixtures("no_locks")
def test_what_must_be_counted_once_is_refused_with_the_reason(tmp_path: Path, what: str):
    with pytest.raises(OSError, match="has no locks") as caught:
        REFUSE[what](tmp_path)
    assert is_storage(caught.value) and f"{tmp_path}/" in file_error_sentence(caught.value)
    assert "cannot be locked, because its file system has no locks" in file_error_sentence(caught.value)


@pytest.mark.usefixtures("no_locks")
def test_what_would_only_be_done_twice_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A dataset was taken for one that another process writes, for ever; `crossfed run` ended in a traceback."""
    with part_of(tmp_path / "dataset", {}, known=True) as part:
        assert part.directory.is_dir()
    with Finished(tmp_path / "finished").alone(0) as held:
        assert not held
    with only_one(read_federation(write_federation(tmp_path, ["a"], rounds=1))):
        assert "let no second `crossfed run` work on this federation" in caplog.text


@pytest.mark.parametrize("hours, stays", [(0, True), (23, True), (25, False)])
def test_what_a_killed_process_left_on_nfs_goes_after_a_day_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float, stays: bool
):
    """NFS locks what is open for writing, which no directory can be (flock(2)): it stayed for ever."""

    def refused(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(durable.fcntl, "flock", refused)
    left = tmp_path / ".update.abc.tmp"
    (left / "moments").mkdir(parents=True)
    (left / "moments" / "model.safetensors").write_bytes(b"begun")
    long_ago = time.time() - 48 * 3600
    os.utime(left, (long_ago, long_ago))
    os.utime(left / "moments", (long_ago, long_ago))
    newest = time.time() - hours * 3600
    os.utime(left / "moments" / "model.safetensors", (newest, newest))
    with new_directory(tmp_path / "update") as update:
        (update / "model.safetensors").write_bytes(b"whole")
    assert left.exists() == stays and (tmp_path / "update" / "model.safetensors").read_bytes() == b"whole"


@pytest.fixture
def no_locks_in_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    real, place = locks.fcntl.flock, tmp_path / "tmpdir"

    def refused(file: Any, how: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if Path(os.readlink(f"/proc/self/fd/{number}")).is_relative_to(place):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        real(file, how)

    monkeypatch.setattr(locks.fcntl, "flock", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    place.mkdir()
    return place


def test_ranks_meet_where_files_can_be_locked(no_locks_in_tmpdir: Path, tmp_path: Path):
    """An engine's TMPDIR is on the file system of the work directory: no two ranks of a node met there, and each round
    went on without the facility (`Function not implemented`)."""
    tasks = read_tasks({}, None)
    with private_directory(tasks, Notes(tmp_path, "1"), 1.0) as meeting:
        place = Path(meeting[DIRECTORY])
        assert place.parent == Path(locks.IN_MEMORY) and place.stat().st_mode & 0o777 == 0o700
    assert not place.exists() and agents_directory().parent == Path(locks.IN_MEMORY)
    shutil.rmtree(agents_directory())


def test_torch_compiles_where_files_can_be_locked(no_locks_in_tmpdir: Path, monkeypatch: pytest.MonkeyPatch):
    """It failed below TMPDIR, unless the job's template named a folder."""
    with place_of_compiled({}) as compiled:
        place = Path(compiled[VARIABLE])
        assert place.parent == Path(locks.IN_MEMORY) and place.stat().st_mode & 0o777 == 0o700
    assert not place.exists()
    with place_of_compiled({VARIABLE: "/named"}) as compiled:
        assert compiled == {}
    monkeypatch.setattr(tempfile, "tempdir", str(no_locks_in_tmpdir.parent))
    with place_of_compiled({}) as compiled:
        assert compiled == {}


def test_files_that_are_locked_stay_in_tmpdir_where_it_has_locks_and_where_nothing_has(
    no_locks_in_tmpdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(locks, "IN_MEMORY", str(tmp_path / "absent"))
    assert temporary_place() == str(no_locks_in_tmpdir)
    monkeypatch.setattr(locks, "IN_MEMORY", str(tmp_path))
    assert temporary_place() == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmpdir-with-locks"))
    (tmp_path / "tmpdir-with-locks").mkdir()
    assert temporary_place() == str(tmp_path / "tmpdir-with-locks")
