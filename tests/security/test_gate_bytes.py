"""Bytes through a gate: what comes in and what leaves within a day, by several requests at once and after a kill."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from facility.gating import log_share, slots, transfers
from facility.gating.ledger import DAY, Ledger, ledger_locked, read_ledger
from facility.gating.policy import read_policy
from facility.gating.refusal import Refused
from facility.gating.session import ENTRY, STEP, Incoming, Session
from facility.gating.slots import one_of_many
from facility.probe import disk
from tests.conftest import ROOT
from tests.security import test_gate
from tests.security.test_gate import KEY, Gate, packed

site = test_gate.site


def book(site: Gate) -> Ledger:
    return read_ledger(site.home / "gate" / "ledger.json")


def session_of(home: Path) -> Session:
    state = home / "gate"
    state.mkdir(exist_ok=True)
    return Session(policy=read_policy(home / "policy.yml"), key=KEY, state=state)


def test_no_more_comes_in_within_a_day_than_the_policy_says(site: Gate):
    w, most = site.workdir, ENTRY + 10_000
    site.policy(bytes_in_per_day=most)
    assert site.ask(f"crossfed-gate put-file {w}/a 600", b"x" * 6_000)[0] == 0
    assert sum(book(site).into.values()) == ENTRY + 6_000, "what was taken in vain is given back"
    for request, data in (
        (f"put-file {w}/b 600", b"x" * 5_000),
        (f"put-piece {w}/a 6000 5000", b"x" * 5_000),
        (f"put-tree {w}/tree", packed(b=b"x" * 5_000)),
    ):
        code, _, error = site.ask(f"crossfed-gate {request}", data)
        assert code == 77 and f"bytes_in_per_day is {most}" in error, request
    assert sum(path.stat().st_size for path in w.rglob("*") if path.is_file()) <= 10_000
    with ledger_locked(site.home / "gate" / "ledger.json") as (ledger, _):
        ledger.into = {str(int(hour) - 25): count for hour, count in ledger.into.items()}
    assert site.ask(f"crossfed-gate put-file {w}/b 600", b"x" * 5_000)[0] == 0


@pytest.mark.parametrize("request_", ["make {w}/a {w}/b/c", "link {w} {w}/new", "put-tree {w}/new"])
def test_files_and_directories_without_content_count_as_well(site: Gate, request_: str):
    """A file system has room for so many of them, and no more, for everybody."""
    site.policy(bytes_in_per_day=2 * ENTRY)
    data = packed(**{f"{number}": b"" for number in range(9)})
    for _ in range(3):  # a link counts again each time
        answer = site.ask("crossfed-gate " + request_.format(w=site.workdir), data)
        assert sum(book(site).into.values()) <= 2 * ENTRY
    assert answer[0] == 77 and "bytes_in_per_day" in answer[2] and sum(1 for _ in site.workdir.rglob("*")) <= 2


def test_what_a_broken_connection_brought_counts_and_no_more(site: Gate):
    w = site.workdir
    assert site.ask(f"crossfed-gate put-file {w}/a 600")[0] == 0
    assert site.ask(f"crossfed-gate put-piece {w}/a 0 5000000", b"x" * 3_000_000)[0] == 2
    assert sum(book(site).into.values()) == ENTRY + 3_000_000


def taking(home: Path, much: int) -> bool:
    try:
        with Incoming(session_of(home)) as incoming:
            incoming.take(much)
            session_of(home).take_out(much)
        return True
    except Refused:
        return False


def test_many_requests_at_once_take_no_more_than_is_left(site: Gate):
    """Processes, as sshd starts them."""
    site.policy(bytes_in_per_day=450, bytes_out_per_day=10_000)
    children = []
    for _ in range(16):
        if not (child := os.fork()):
            code = 2
            with suppress(BaseException):
                code = 0 if taking(site.home, 100) else 1
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert set(codes) <= {0, 1}
    taken, ledger = codes.count(0), book(site)
    assert taken == sum(ledger.out.values()) // 100 and sum(ledger.into.values()) == 100 * taken <= 450
    assert taken >= 1


def test_a_gate_that_is_killed_has_taken_a_step_at_most_and_for_a_day(site: Gate):
    session = session_of(site.home)
    child = os.fork()
    if not child:
        incoming = Incoming(session)
        incoming.__enter__()
        incoming.take(10)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    ledger = book(site)
    (hour,) = ledger.into
    assert ledger.into[hour] == STEP
    assert ledger.bytes_in(int(hour) * 3600 + DAY + 3600) == 0


def test_a_file_that_grows_while_a_tree_is_read_takes_no_uncounted_byte_out(
    site: Gate, monkeypatch: pytest.MonkeyPatch
):
    assert site.ask(site.round())[0] == 0
    update, real = site.workdir / "job" / "update", transfers._open
    update.mkdir(exist_ok=True)
    (update / "x").write_bytes(b"1234")

    def growing(path: Path) -> int:
        path.write_bytes(b"secret" * 1000)
        return real(path)

    monkeypatch.setattr(transfers, "_open", growing)
    code, out, error = site.ask(f"crossfed-gate get-tree {update}", b"x\0")
    assert code == 77 and "grew while it was read" in error and b"secret" not in out


def test_a_tree_leaves_as_it_was_counted(site: Gate):
    assert site.ask(site.round())[0] == 0
    update = site.workdir / "job" / "update"
    update.mkdir(exist_ok=True)
    (update / "x").write_bytes(b"1234")
    code, out, _ = site.ask(f"crossfed-gate get-tree {update}", b"x\0")
    found = tarfile.open(fileobj=io.BytesIO(out)).extractfile("x")
    assert code == 0 and found is not None and found.read() == b"1234" and sum(book(site).out.values()) == 4


def test_a_probe_reserves_no_more_than_may_come_in(site: Gate, monkeypatch: pytest.MonkeyPatch):
    site.policy(bytes_in_per_day=12_345)
    ran: list[list[str]] = []
    real = subprocess.run

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess:
        if "facility.probe" not in command:
            return real(command, **more)
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert site.ask(f"crossfed-gate probe --dataset {site.home}/data --reserve {10**12}")[0] == 0
    assert ran[0][0] == sys.executable and ran[0][-2:] == ["--reserve", "12345"]


def test_no_more_requests_are_worked_on_at_once_than_a_login_node_bears(site: Gate, monkeypatch: pytest.MonkeyPatch):
    """Each is a process, and `hold` keeps it for as long as the coordinator likes."""
    monkeypatch.setattr(slots, "MOST", 3)
    assert site.ask("crossfed-gate hello")[0] == 0
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(one_of_many(site.home / "gate"))
        code, _, said = site.ask("crossfed-gate hold")
        assert code == 77 and "3 requests are being worked on, which is the most at once" in said
    assert site.ask("crossfed-gate hold")[0] == 0


def test_a_probe_that_is_killed_leaves_no_room_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = shutil.which("fallocate")
    (tmp_path / "fallocate").write_text(f'#!/bin/bash\n{real} "$@" && kill -KILL $PPID\n')
    (tmp_path / "fallocate").chmod(0o700)
    (work := tmp_path / "work").mkdir()
    script = f"from pathlib import Path; from facility.probe import disk; disk(Path({str(work)!r}), 1 << 20)"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PATH": path}, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and not list(work.iterdir())
    assert "refused" not in disk(work, 1 << 20), "what is reserved is still asked of the file system"


def test_requests_let_the_log_grow_by_a_days_share_and_its_chain_stays_whole(site: Gate):
    """Refused ones too, and those of a key that is none of the policy's; what is refused for that costs no line."""
    site.policy(log_bytes_per_day=6000)
    log, codes = site.home / "gate" / "audit.jsonl", []
    for number in range(60):
        request, key = ("crossfed-gate hello", KEY) if number % 3 else ("x" * 9000, "SHA256:" + "B" * 43)
        code, _, error = site.ask(request, key=key)
        codes.append(code)
    assert 0 in codes and codes[-20:] == [77] * 20
    assert "log_bytes_per_day is 6000: nothing more is done before " in error
    assert log.stat().st_size < 6000 + 2 * 3000, "the line that passes the share, and the one that says so"
    last = site.log()[-1]
    assert last["what"] == "refused" and "log_bytes_per_day" in last["reason"]
    day = int(time.time() // DAY)
    log_share.check_log_share(log, 6000, now=(day + 1) * DAY)  # another day, another share
    assert site.ask("crossfed-gate hello")[0] == 0


def test_a_list_of_nothing_but_ends_of_names_takes_no_memory(monkeypatch: pytest.MonkeyPatch):
    """A list of them took eight times its bytes, and a hundred requests may be worked on at once."""
    monkeypatch.setattr(transfers, "_input", lambda: io.BytesIO(bytes(transfers.MOST_NAMES)))
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="too long"):
            transfers._names()
        assert tracemalloc.get_traced_memory()[1] < 4 * transfers.MOST_NAMES
    finally:
        tracemalloc.stop()
