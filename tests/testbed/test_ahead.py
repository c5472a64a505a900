"""Jobs ahead of their models in real Slurm queues: what a wait of every job costs with and without, and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest
import yaml

from coordinator.archive.journal import Journal
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.testbed.layout import Site
from facility.exchange.job_names import job_name, waiting_name
from tests.testbed.conftest import ssh
from tests.testbed.federation import ROOT, Run, federate, jobs, records

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1200)]
WAIT_SECONDS = int(os.environ.get("CROSSFED_TESTBED_WAIT", "25"))
"""Of every job in its queue: no job is eligible before (sbatch --begin)."""
ROUNDS = int(os.environ.get("CROSSFED_TESTBED_ROUNDS", "7"))
STEPS = int(os.environ.get("CROSSFED_TESTBED_STEPS", "400"))
SHORTER, IDLE = 0.3, 0.05
"""Makespan at least that much shorter, node-hours of jobs that wait for a model at most that share."""


def queued(run: Run, *, wait: int, ahead: Any) -> Run:
    """The same federation with a queue in which every job waits, and with this `submit_ahead`."""
    content = yaml.safe_load(run.file.read_text())
    for facility in content["facilities"]:
        if facility["deployment"].get("gate"):  # the template is the site's own
            path = next(site.home for site in run.testbed.sites if site.name == facility["name"])
            path = path / f"gate-{content['name']}" / "job.sh"
            path.write_text(path.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n#SBATCH --begin=now+{wait}\n", 1))
        else:
            facility["deployment"]["options"] = {"begin": f"now+{wait}"}
    content["submit_ahead"] = ahead
    run.file.write_text(yaml.safe_dump(content))
    write_rendered(read_federation(run.file))
    return run


def at_work(testbed, site: Site, federation: str) -> list[dict[str, Any]]:
    """Slurm's record of every job of the federation at a site that ran, with its seconds and whether it was ahead."""
    name, found = job_name(federation, site.name), []
    for one in records(testbed, site):
        if one["Name"] in (name, waiting_name(name)) and one.get("StartTime", "Unknown") != "Unknown":
            begin, end = (datetime.fromisoformat(one[key]) for key in ("StartTime", "EndTime"))
            found.append({"ahead": one["Name"] != name, "seconds": (end - begin).total_seconds(), **one})
    return found


def in_queue(testbed, site: Site) -> list[tuple[str, str, str]]:
    """Id, name and state of the user's jobs."""
    said = ssh(testbed, site, "squeue -h -o '%i %j %T'").stdout
    return [tuple(line.split()) for line in said.splitlines()]  # type: ignore[misc]


def trained(testbed, site: Site, federation: str) -> list[int]:
    """Round of every update that a job of the site trained, and not found finished."""
    found = []
    for path in sorted((site.home / "work").glob("*/update/report.json")):
        told = json.loads(path.read_text())
        if told["federation"] == federation:
            found.append(int(told["round"]))
    return sorted(found)


@pytest.mark.slow
def test_a_hidden_queue_makes_rounds_shorter_and_costs_few_node_hours(testbed, material, tmp_path):
    training = {"steps": STEPS, "batch_sequences": 4, "learning_rate": 1e-3, "device": "cpu"}
    seconds, told = {}, {}
    for name, ahead in (("waits", False), ("hides", True)):
        folder = tmp_path / name
        folder.mkdir()
        run = federate(testbed, folder, *material, name=name, rounds=ROUNDS, minimum=2, training=training, gated=[])
        queued(run, wait=WAIT_SECONDS, ahead=ahead)
        began = time.monotonic()
        assert run.run() == 0, run.text()
        seconds[name] = time.monotonic() - began
        assert len(run.archive.rounds()) == ROUNDS
        told[name] = [one for site in testbed.sites for one in at_work(testbed, site, name)]
        waited = [one.detail["seconds"] for one in Journal(run.archive.path).read() if one.kind == "waited"]
        lost = sum(waited)
        used = sum(one["seconds"] for one in told[name])
        print(name, round(seconds[name], 1), "s; node-seconds", used, "of these waiting", lost, "waits", waited)
        if ahead:
            assert waited, "no job that was submitted ahead said how long it had waited"
            assert sum(one["ahead"] for one in told[name]) >= 2 * (ROUNDS - 1)
            assert lost <= IDLE * used, (lost, used)
        for site in testbed.sites:
            assert not in_queue(testbed, site), "a job is left without a round"
    assert seconds["hides"] <= (1 - SHORTER) * seconds["waits"], seconds


@pytest.mark.parametrize("state", ["queued", pytest.param("waiting", marks=pytest.mark.slow), "handed over"])
def test_a_killed_coordinator_finds_the_job_that_is_ahead_and_trains_no_round_twice(
    testbed, material, tmp_path, state: str
):
    """`handed over`: behind a gate."""
    name = f"ahead-{state.split()[0]}"
    site = testbed.sites[0]
    gated = [site.name] if state == "handed over" else []
    run = federate(testbed, tmp_path, *material, name=name, rounds=3, minimum=2, gated=gated)
    wait = {"queued": 20, "waiting": 1, "handed over": 12}[state]
    queued(run, wait=wait, ahead={"wait": 120, "idle": 1.0})
    command = [sys.executable, "-m", "tests.testbed.federation", str(testbed.root), str(run.file)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=run.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    before = ""
    try:
        before = _until(testbed, site, name, state)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run.log.clear()
    assert run.run() == 0, run.text()
    assert len(run.archive.rounds()) == 3
    for one in testbed.sites:
        assert not in_queue(testbed, one)
        assert sorted(set(trained(testbed, one, name))) == trained(testbed, one, name) or state == "handed over"
    used = [one["JobId"] for one in records(testbed, site) if one["Name"].endswith("-ahead")]
    assert before in used, (before, used)
    assert jobs(run, site)


def _until(testbed, site: Site, name: str, state: str) -> str:
    """The id of the job ahead once it is in this state."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for id, called, slurm in in_queue(testbed, site):
            if called != waiting_name(job_name(name, site.name)):
                continue
            if state == "queued" and slurm == "PENDING":
                return id
            places = [*(site.home / "work").glob("ahead-*"), *site.home.glob(f"gate-{name}/gate/ahead/*")]
            handed = [place for place in places if (place / "command").exists()]
            if state == "waiting" and slurm == "RUNNING" and len(places) > len(handed):
                return id
            if state == "handed over" and handed and slurm == "RUNNING":
                return id
        time.sleep(0.2)
    raise AssertionError(f"no job ahead is {state}: {in_queue(testbed, site)}")
