"""Two rounds over two Slurm clusters: the data stays, nothing stays running, nothing travels twice."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path

import pytest

from coordinator.streamflow_plugin.names import PROGRESS_SECONDS
from coordinator.testbed import daemons, namespaces
from coordinator.testbed.layout import Site
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from tests.testbed.federation import Run, federate, jobs
from tests.testbed.life import Life
from tests.testbed.pace import Pace
from tests.testbed.quiet import wait_for_quiet

pytestmark = pytest.mark.testbed
DAEMONS = {"22", "6817", "6818", "6819"}
LOGINS = 2
"""At most, of a facility in two rounds of small models (docs/how-to/watch.md)."""
STEPS = 150
"""Enough for a job that is slowed to be at work as long as it is."""
SLOW_SECONDS = 16.0
"""How long the first job of each facility is slowed: longer than the coordinator may take to notice."""


def at_rest(site: Site) -> tuple[list[str], set[str]]:
    """Command lines of the user's processes that are not part of an ssh session, and listening ports, by ps and ss.

    A session's processes are sshd's and what descends from it: a gate, and what that runs for one request. A process
    that has ended and that Slurm has yet to reap (state Z) is at rest.
    """
    ps = subprocess.run(["ps", "-u", site.user, "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True).stdout
    lines = [line.split(maxsplit=3) for line in ps.splitlines()]
    parents = {pid: parent for pid, parent, *_ in lines}
    sessions = {pid for pid, _, _, command in lines if command.startswith(daemons.SESSIONS)}

    def in_session(pid: str) -> bool:
        return pid in sessions or pid in parents and in_session(parents[pid])

    living = [command for pid, _, state, command in lines if not state.startswith("Z") and not in_session(pid)]
    busy = [command for command in living if not command.startswith(("sh", "bash -c", "-bash"))]
    ss = subprocess.run(namespaces.enter(site, "ss", "-Hltn"), capture_output=True, text=True, check=True).stdout
    return busy, {line.split()[3].rpartition(":")[2] for line in ss.splitlines()}


def logins(site: Site) -> int:
    """Logins that the site's sshd has let in so far."""
    return (site.log / "sshd.log").read_text().count("Accepted publickey")


@pytest.fixture(scope="module")
def finished(testbed, material, tmp_path_factory) -> tuple[Run, list, Life, dict[str, int]]:
    """A finished federation of two rounds, two ranks under srun at site-a, and each facility's files between them."""
    model, datasets = material
    run = federate(
        testbed,
        tmp_path_factory.mktemp("rounds"),
        model,
        datasets,
        name="rounds",
        tasks={"site-a": 2},
        minimum=2,
        training={"steps": STEPS, "batch_sequences": 4, "learning_rate": 1e-3, "device": "cpu"},
    )
    seen = []

    class Watching(list):
        def append(self, line: str) -> None:
            if re.search(r"round \d+ is complete", line):
                seen.append({site.name: at_rest(site) for site in testbed.sites})
            super().append(line)

    run.log = Watching()
    life, stop = Life(testbed), threading.Event()
    work = (life.watch, Pace(testbed, SLOW_SECONDS).hold)
    threads = [threading.Thread(target=one, args=(stop,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    before = {site.name: logins(site) for site in testbed.sites}
    supervisor = run.supervisor()
    supervisor.on_event = life.on_event
    supervisor.environment[PROGRESS_SECONDS] = "5"
    try:
        code = supervisor.run()[0]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert code == 0, run.text()
    return run, seen, life, {site.name: logins(site) - before[site.name] for site in testbed.sites}


def test_both_rounds_have_both_facilities_and_learn(finished, testbed):
    run, *_ = finished
    history = run.archive.history()
    assert len(history) == 2
    for entry in history:
        assert {site.name for site in testbed.sites} == {one.facility for one in entry.facilities}, entry
    assert history[1].global_loss < history[0].global_loss
    for site in testbed.sites:
        records = jobs(run, site)
        assert [record["JobState"] for record in records] == ["COMPLETED"] * 2


def test_energy_that_nobody_measures_is_absent_and_node_hours_are_slurms(finished, testbed):
    """The testbed's Slurm accounts for no energy, and its nodes have no counter."""
    run, *_ = finished
    rows = [row for entry in run.archive.history() for row in entry.facilities]
    assert all(row.usage["node_seconds"] > 0 and row.usage.get("energy_joules") is None for row in rows), rows


def test_sharded_training_ran_on_two_ranks_under_srun(finished, testbed):
    run, *_ = finished
    updates = sorted((testbed.site("site-a").home / "work").glob("*/update/report.json"))
    ranks = {
        json.loads(path.read_text())["ranks"]
        for path in updates
        if json.loads(path.read_text())["federation"] == "rounds"
    }
    assert ranks == {2}


def test_progress_is_known_within_ten_seconds_of_the_truth(finished):
    """What the run's events tell, beside the files that the trainers wrote on the facilities' own disks."""
    *_, life, _ = finished
    lags = life.lags(10.0)
    print("lags", sorted(lags))
    assert lags and max(lags) <= 10.0, (sorted(lags), life.truth, life.heard)


def test_a_run_logs_in_once_for_commands_and_once_for_jobs_whatever_it_looks_at(finished):
    """Looking at progress opens no connection: the logins of two rounds are those of the connectors."""
    *_, told = finished
    print("logins", told)
    assert all(1 <= count <= LOGINS for count in told.values()), told


def test_between_rounds_no_process_and_no_socket_is_left(finished, testbed):
    run, seen, *_ = finished
    assert len(seen) == 2
    for moment in seen:
        for busy, ports in moment.values():
            assert busy == [] and ports <= DAEMONS, moment
    for site in testbed.sites:
        wait_for_quiet(site)


def test_the_data_stayed_at_its_facility(finished, testbed):
    run, *_ = finished
    for site in testbed.sites:
        text = (site.home / "text" / "train.jsonl").read_bytes()[2000:2060]
        for other in [one.home for one in testbed.sites if one != site] + [
            run.file.parent.parent,
            testbed.coordinator_home,
        ]:
            # material/text below the coordinator's folder is where this rehearsal made the text: not part of the
            # federation
            found = subprocess.run(
                ["grep", "-rlF", "--", text.decode(errors="ignore"), str(other)], capture_output=True, text=True
            )
            assert found.returncode == 1, found.stdout
        assert (site.home.stat().st_mode & 0o777, site.home.owner()) == (0o700, site.user)


def test_each_model_travelled_once(finished, testbed):
    run, *_ = finished
    for site in testbed.sites:
        sent = [
            line
            for line in run.log
            if "COPYING" in line
            and line.endswith(f"{site.address}/slurmctld")
            and "/model" in line
            or "COPYING" in line
            and "on local file-system to" in line
            and f"facility-{site.name}" in line
            and "/model " in line
        ]
        fetched = [
            line
            for line in run.log
            if "COPYING" in line
            and f"on location facility-{site.name}" in line
            and "/update " in line
            and "on local file-system" in line
        ]
        assert len(sent) == 2 and len(fetched) == 2, (sent, fetched)


def test_what_arrived_is_what_was_sent(finished, testbed):
    run, *_ = finished
    for site in testbed.sites:
        there = [path.parent for path in sorted((site.home / "work").rglob("manifest.json"))]
        of_ours = [one for one in there if read_manifest(one).federation == "rounds"]
        assert "model" in {read_manifest(one).kind for one in of_ours}
        for one in of_ours:
            verify_manifest(one)


def test_models_and_updates_of_rounds_that_are_over_are_gone(finished, testbed):
    """A facility keeps the model that it received last, the coordinator no update that it has averaged."""
    run, *_ = finished

    def left(folder: Path, kind: str) -> list[int]:
        found = [read_manifest(path.parent) for path in folder.rglob("manifest.json") if not path.parent.is_symlink()]
        return sorted(one.round for one in found if one.federation == "rounds" and one.kind == kind)

    for site in testbed.sites:
        assert left(site.home / "work", "model") == [1], "that of the last round"
    works = [path for path in run.file.parent.parent.rglob("coordinator") if path.parent.name == "work"]
    assert len(works) == 1 and [number for number in left(works[0], "update") if number < 2] == []


def test_no_key_is_in_a_job_script_or_log(finished, testbed):
    run, *_ = finished
    secret = testbed.key.read_text().splitlines()[1]
    for folder in [
        run.file.parent.parent,
        *(site.home for site in testbed.sites),
        *(site.log for site in testbed.sites),
    ]:
        assert subprocess.run(["grep", "-rqF", "--", secret, str(folder)]).returncode == 1
    assert not any(secret in line for line in run.log)
    assert Path(testbed.key).stat().st_mode & 0o077 == 0
