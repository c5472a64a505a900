"""A replica that is killed or stopped: the others go on, and one that wakes up is brought up to date."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from facility.exchange.errors import TransientError
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime import client, replica, wire
from facility.sync.runtime.scheduler_process import SchedulerPlan, SchedulerThread
from tests.sync.fleet import Fleet, settings_of
from tests.sync.quadratic import make_parameters, solve, target


def signal_self(rank: int, *, victim: int, kind: int, once: Path | None = None) -> None:
    if rank == victim and not (once is not None and once.exists()):
        if once is not None:
            once.touch()
        os.kill(os.getpid(), kind)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=pytest.mark.slow)
        for policy in ("partial_reduce", "allreduce", "sharded_ps", "adpsgd", "wave", "local")
    ],
)
def test_a_killed_replica_leaves_and_the_others_go_on(policy: str, tmp_path):
    settings = settings_of(policy=policy, every=2)
    work = partial(solve, pause=0.01, log=tmp_path, started=partial(signal_self, victim=2, kind=signal.SIGKILL))
    with Fleet(work, 3, settings, 15) as fleet:
        results = fleet.results(2)
    assert results[0]["vector"] == results[1]["vector"]
    report = results[0]["report"]
    assert [(e["event"], e["replica"]) for e in report["membership"]] == [("left", 2)]
    assert any(json.loads(line)["kind"] == "left" for line in (tmp_path / "groups.jsonl").read_text().splitlines())


def test_a_death_changes_nothing_for_the_others_but_the_mean():
    """All-reduce, replica 2 dies before its fourth step: three steps about the mean of three, then of two."""
    work = partial(solve, pause=0.01, started=partial(signal_self, victim=2, kind=signal.SIGKILL))
    with Fleet(work, 3, settings_of(policy="allreduce"), 15) as fleet:
        results = fleet.results(2)
    x = torch.cat([p.detach().reshape(-1) for p in make_parameters()])
    for step in range(15):
        centre = sum(target(r) for r in range(3)) / 3 if step < 3 else (target(0) + target(1)) / 2
        x = x - 0.1 * (x - centre)
    for rank in range(2):
        torch.testing.assert_close(torch.tensor(results[rank]["vector"]), x, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["partial_reduce", "allreduce", "local"])
def test_a_stopped_replica_leaves_comes_back_and_is_brought_up_to_date(policy: str):
    settings = settings_of(policy=policy, every=2, missing_seconds=3.0)
    work = partial(solve, pause=0.05, started=partial(signal_self, victim=1, kind=signal.SIGSTOP))
    with Fleet(work, 3, settings, 200) as fleet:
        victim = fleet.processes[1].pid
        deadline = time.monotonic() + 200
        while True:  # until it stands still
            if not fleet.processes[1].is_alive():
                fleet.results(3, timeout=30)
            state = open(f"/proc/{victim}/stat").read().rsplit(") ", 1)[1][0]
            if state == "T":
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(4.5)  # longer than missing_seconds: it has left
        os.kill(victim, signal.SIGCONT)
        results = fleet.results(3)
    events = [(e["event"], e["replica"]) for e in results[0]["report"]["membership"]]
    assert events == [("left", 1), ("came back", 1)]
    assert results[0]["vector"] == results[1]["vector"] == results[2]["vector"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["partial_reduce", *(pytest.param(p, marks=pytest.mark.slow) for p in ("adpsgd", "central_ps", "local", "diloco"))],
)
def test_a_killed_replica_comes_back_in_a_new_process(policy: str, tmp_path: Path):
    """Its weights and its optimizer's state are gone; it is brought up to date and ends with all others."""
    settings = settings_of(policy=policy, every=2, optimizer_state="average" if policy == "partial_reduce" else "keep")
    die = partial(signal_self, victim=2, kind=signal.SIGKILL, once=tmp_path / "died")
    work = partial(solve, pause=0.05, optimizer_name="adamw", started=die)
    with Fleet(work, 3, settings, 100) as fleet:
        fleet.restart(2)
        results = fleet.results(3)
    events = [(e["event"], e["replica"]) for e in results[0]["report"]["membership"]]
    assert events == [("left", 2), ("came back", 2)]
    assert results[0]["vector"] == results[1]["vector"] == results[2]["vector"]
    assert 0 < results[2]["steps"] < 100


@pytest.mark.parametrize("policy", ["local", pytest.param("diloco", marks=pytest.mark.slow)])
def test_a_replica_that_comes_back_after_a_pause_counts_as_many_steps_as_the_others(policy: str, tmp_path: Path):
    die = partial(signal_self, victim=2, kind=signal.SIGKILL, once=tmp_path / "died")
    work = partial(solve, pause=0.05, done=40, started=die)
    with Fleet(work, 3, settings_of(policy=policy, every=10), 100) as fleet:
        fleet.restart(2)
        results = fleet.results(3)
    assert [results[rank]["done"] for rank in range(3)] == [100] * 3
    assert 10 < results[2]["steps"] <= 60, "it makes those that are left once it is back"
    assert set(results[0]["report"]["updates"].values()) == {100}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["allreduce", "partial_reduce"])
def test_losing_one_rank_of_a_replica_drops_the_replica(policy: str):
    """Three replicas of two ranks (stages or shards): the others go on, and the rank left behind ends by itself."""
    settings = settings_of(policy=policy, every=2, timeout_seconds=8.0)
    work = partial(solve, pause=0.02, positions=2, started=partial(signal_self, victim=5, kind=signal.SIGKILL))
    with Fleet(work, 6, settings, 15) as fleet:
        found = {}
        while len(found) < 5:
            rank, good, value = fleet.queue.get(timeout=200)
            found[rank] = (good, value)
    assert [good for _, (good, _) in sorted(found.items())] == [True] * 4 + [False]
    assert "has been without one of its ranks for 8.0 s" in found[4][1]
    assert found[0][1]["vector"] == found[2][1]["vector"] and found[1][1]["vector"] == found[3][1]["vector"]
    assert [(e["event"], e["replica"]) for e in found[0][1]["report"]["membership"]] == [("left", 2)]


def test_without_a_scheduler_all_others_end_and_say_so():
    """Here it is a thread of the first rank; the trainer's is a process that outlives it."""
    work = partial(solve, pause=0.02, started=partial(signal_self, victim=0, kind=signal.SIGKILL))
    with Fleet(work, 3, settings_of(policy="partial_reduce"), 50) as fleet:
        ends = fleet.ends(2)
    assert all(not good and "the scheduler of the replicas is gone" in said for _, good, said in ends)


class OutlivingClient(client.SchedulerClient):
    """Of a rank that is held up once it has met the others, until the first of them is no more."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        while not self._lost:
            time.sleep(0.01)


def solve_late(rank: int, world: int, store: Any, *arguments: Any, late: int, **named: Any) -> dict[str, Any]:
    store.set_timeout(timedelta(seconds=3))
    if rank == late:
        replica.SchedulerClient = OutlivingClient  # type: ignore[misc]
    return solve(rank, world, store, *arguments, **named)


def test_a_rank_that_has_met_the_others_needs_no_store():
    """The first rank serves it, and dies while another that it met has not got as far: on a busy machine, say."""
    work = partial(solve_late, late=1, pause=0.01, started=partial(signal_self, victim=0, kind=signal.SIGKILL))
    with Fleet(work, 2, settings_of(policy="local"), 50) as fleet:
        ((rank, good, said),) = fleet.ends(1)
    assert rank == 1 and not good and "the scheduler of the replicas is gone" in said, said


def test_a_replica_that_never_starts_is_named():
    settings = settings_of(policy="partial_reduce", timeout_seconds=2.0)
    with Fleet(partial(solve, missing=1), 2, settings, 3) as fleet:
        ((rank, good, trace),) = fleet.ends(1)
    assert not good and "all 2 replicas to start within 2.0 s" in trace


def test_time_in_which_this_process_was_suspended_is_no_silence_of_the_scheduler(monkeypatch: pytest.MonkeyPatch):
    """Whichever thread wakes first: here the one that waits for a group, and the heartbeat's not yet."""
    settings = settings_of(policy="local", heartbeat_seconds=60, missing_seconds=200)
    plan = SchedulerPlan(settings=settings, replicas=1, positions=1, steps=3, address="127.0.0.1", log=None)
    scheduler, store = SchedulerThread(plan), torch.distributed.HashStore()
    store.set("scheduler", scheduler.contact)
    link = client.SchedulerClient(store, settings, ReplicaRank(replica=0, replicas=1))
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000))
    looks = iter([False, False, True])  # what it waits for comes while it looks for the third time
    link._until(lambda: next(looks), what="a group")
    assert link.ask("ready").members == (0,)
    link.close()
    scheduler.stop()


def test_a_scheduler_that_falls_silent_is_noticed():
    """Its process is stopped, or its node is gone: no connection is closed."""
    settings = settings_of(policy="local", heartbeat_seconds=0.05, missing_seconds=0.2)
    welcome = {"t": "welcome", "turn": 0, "done": 0, "updates": 0, "stop": False}
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = torch.distributed.HashStore()
        store.set("scheduler", f"127.0.0.1 {server.getsockname()[1]} token")
        answering = ThreadPoolExecutor(1).submit(server.accept)
        answering.add_done_callback(lambda accepted: accepted.result()[0].sendall(wire.encode_line(welcome)))
        link = client.SchedulerClient(store, settings, ReplicaRank(replica=0, replicas=1))
        with pytest.raises(TransientError, match="not heard for 0.4 s"):
            link.ask("ready")
        link.close()
        answering.result()[0].close()


def test_a_stranger_is_refused():
    from facility.exchange.scheduling.groups import GroupScheduler
    from facility.sync.runtime.journal import Journal
    from facility.sync.runtime.service import SchedulerService

    service = SchedulerService(GroupScheduler(), settings_of(), replicas=2, positions=1, journal=Journal())
    service.start("127.0.0.1")
    try:
        guesses = ({"t": "hello", "token": "guess", "replica": 1, "position": 0}, {"no": 1}, {"t": "ready"})
        odd = (b"[" * 500_000 + b"\n", b'{"token": "\\ud800"}\n', b"\xff\n", b"x" * 2 * wire.LINE_BYTES, b"\n")
        for line in (*map(wire.encode_line, guesses), *odd):
            with socket.create_connection((service.host, service.port), timeout=60) as stranger:
                with suppress(ConnectionError):  # of what comes behind the longest line nothing is read
                    stranger.sendall(line)
                    assert stranger.recv(100) == b""
        good = {"t": "hello", "token": service.token, "replica": 7, "position": 0}
        with socket.create_connection((service.host, service.port), timeout=60) as stranger:
            stranger.sendall(wire.encode_line(good))
            assert stranger.recv(100) == b"", "there is no replica 7"
    finally:
        service.stop()
    assert not service._thread.is_alive()
    with pytest.raises(OSError):
        socket.create_connection((service.host, service.port), timeout=1)


def test_membership_by_hand():
    from facility.sync.runtime.membership import Membership

    members = Membership(positions=2, missing_seconds=1.0)
    assert not members.heard(0, 0, 0.0) and members.heard(0, 1, 0.1), "a replica is here when all its ranks are"
    assert members.silent(1.0) == [] and members.silent(1.05) == [0]
    assert not members.heard(0, 0, 2.0) and members.heard(0, 1, 2.1), "and comes back when all are heard again"
    members.overslept(12.0, 2.2)
    assert members.silent(12.5) == []
    assert members.gone(0, 1) and not members.present
