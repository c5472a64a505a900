"""A writer that is killed leaves the old file whole and a temporary one beside it, which a later writer removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from facility.exchange.files.durable import CUT_OFF_SECONDS, scratch_directory, write_text
from tests.conftest import ROOT

KILLED = """
import os, signal, sys
from pathlib import Path
from facility.exchange.files import durable
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
durable.write_text(Path(sys.argv[1]), "new")
"""


def leave(path: Path, *, seconds_ago: float) -> Path:
    """What a writer of `path` leaves that is killed before its file takes its place."""
    before = set(path.parent.iterdir())
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    (left,) = set(path.parent.iterdir()) - before
    os.utime(left, (time.time() - seconds_ago,) * 2)
    return left


def test_a_killed_writers_temporary_file_goes_with_a_later_write_and_no_other_does(tmp_path: Path):
    """They stayed for ever: beside federation.yml, in a facility's state, wherever a report was written."""
    path = tmp_path / "a.json"
    path.write_text("old")
    old, fresh = (leave(path, seconds_ago=age) for age in (2 * CUT_OFF_SECONDS, CUT_OFF_SECONDS / 2))
    other = leave(tmp_path / "b.json", seconds_ago=2 * CUT_OFF_SECONDS)
    link, target = tmp_path / ".a.json.link.tmp", tmp_path / "mine"
    target.write_text("mine")
    link.symlink_to(target)
    assert path.read_text() == "old"
    write_text(path, "newer")
    assert path.read_text() == "newer"
    assert set(tmp_path.iterdir()) == {path, fresh, other, link, target} and not old.exists()


KILLED_AT_WORK = """
import os, signal, sys
from pathlib import Path
from facility.exchange.files.durable import scratch_directory
with scratch_directory(Path(sys.argv[1])) as scratch:
    (scratch / "model").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_had_in_a_scratch_directory_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path):
    """In an archive each kill left an update or a model for ever."""
    done = subprocess.run([sys.executable, "-c", KILLED_AT_WORK, str(tmp_path / "moved")], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and [path.name for path in tmp_path.glob(".moved.*/*")] == ["model"]
    with scratch_directory(tmp_path / "moved") as first, scratch_directory(tmp_path / "moved") as second:
        assert set(tmp_path.iterdir()) == {first, second} and not list(first.iterdir())
    assert not list(tmp_path.iterdir())


AT_ONCE = """
import sys
from pathlib import Path
from facility.exchange.files.durable import scratch_directory
for number in range(400):
    with scratch_directory(Path(sys.argv[1])) as scratch:
        (scratch / "model").write_bytes(b"x")
        assert [path.name for path in scratch.iterdir()] == ["model"]
"""


def test_processes_that_use_a_scratch_directory_of_one_name_at_once_do_not_take_one_anothers(tmp_path: Path):
    """Between its making and its lock one looks as if its maker were gone: two aggregations of one account, of which
    one ended with `No such file or directory: '/tmp/.crossfed-adapters.….tmp'`."""
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "one name")]
    every = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [(one.communicate()[1], one.returncode) for one in every] == [("", 0)] * 4
    assert not list(tmp_path.iterdir())
