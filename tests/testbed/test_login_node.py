"""A coordinator on the login node of a facility: its queue is this machine's, and no ssh is between them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.bundle import FILES
from coordinator.testbed import namespaces
from coordinator.testbed.command import call, wait_until
from coordinator.testbed.layout import Site
from coordinator.testbed.rehearsal import job_template, records
from tests.testbed.federation import ROOT, metadata
from tests.testbed.kill import kill_coordinator
from tests.testbed.quiet import wait_for_quiet

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]
NAME = "crossfed-desk-cluster"
PRELUDE = """\
n=$(( $(cat ~/jobs-begun 2>/dev/null || echo 0) + 1 )); echo $n > ~/jobs-begun
case $n in 1) while [ -e ~/hold ]; do sleep 0.2; done ;; 3 | 5) sleep 300 ;; 4) exit 9 ;; esac
"""
"""Job 1 waits for a file to go, 3 and 5 are at work for long, 4 fails; 2 finds job 1's update."""


@dataclass
class LoginNode:
    """The whole of CrossFed in the home of a facility's user, and a federation there."""

    site: Site
    python: Path

    @property
    def folder(self) -> Path:
        return self.site.home / "coordinator"

    @property
    def file(self) -> Path:
        return self.folder / "workflow" / "federation.yml"

    @property
    def log(self) -> str:
        """What `crossfed run` has printed so far, of all starts, lines unwrapped."""
        return " ".join((self.folder / "console.log").read_text().split())

    def command(self, *words: str) -> list[str]:
        code = self.folder / "code"
        variables = [f"PYTHONPATH={code}", f"PATH={self.python.parent}:/usr/bin:/bin", "PYTHONUNBUFFERED=1"]
        inside = ["env", *variables, "OMP_NUM_THREADS=1", str(self.python), "-m", "coordinator.cli", *words]
        return namespaces.enter(self.site, *inside, "-f", str(self.file), user=True)

    def crossfed(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words), capture_output=True, text=True, timeout=200)

    def run(self) -> subprocess.Popen[bytes]:
        with open(self.folder / "console.log", "ab") as sink:
            return subprocess.Popen(self.command("run", "--quiet"), stdout=sink, stderr=subprocess.STDOUT)

    def slurm(self, *words: str) -> str:
        return call(*namespaces.enter(self.site, *words)).stdout

    def states(self) -> list[str]:
        return self.slurm("squeue", "-h", "-n", NAME, "-o", "%T").split()

    def wait_for_state(self, state: str, begun: int = 0) -> None:
        """Wait until the one job is in this state, and so many have begun."""
        counter = self.site.home / "jobs-begun"

        def there() -> bool:
            count = int(counter.read_text() or 0) if counter.exists() else 0
            return self.states() == [state] and count == begun

        wait_until(there, 120, f"job {begun} {state}")


@pytest.fixture
def login_node(testbed, material) -> Iterator[LoginNode]:
    model, datasets = material
    site = testbed.site("site-a")
    node = LoginNode(site=site, python=testbed.python)
    code = node.folder / "code"
    for name in ("coordinator", "facility", "cwl", "templates"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(ROOT / name, code / name)
    metadata(code)
    shutil.copytree(model, node.folder / "model")
    node.file.parent.mkdir()
    (node.file.parent / "cluster.sh").write_text(job_template(1, PRELUDE))
    cluster = {
        "type": "slurm",
        "workdir": f"{site.home}/work",
        "template": "cluster.sh",
        "fill": {"partition": "main"},
        "environment": {"home": str(site.code)},
        "polling_seconds": 1,
    }
    described = {
        "name": "desk",
        "model": "../model",
        "rounds": 4,
        "seed": 1,
        "archive": "../archive",
        "workdir": "../work",
        "minimum_facilities": 1,
        "final_evaluation": False,
        "training": {"steps": 5, "batch_sequences": 4, "learning_rate": 1e-3, "device": "cpu"},
        "facilities": [
            {"name": "cluster", "dataset": datasets[site.name], "deployment": cluster},
            {"name": "desk", "dataset": datasets[site.name]},
        ],
    }
    node.file.write_text(yaml.safe_dump(described, sort_keys=False))
    (site.home / "hold").touch()
    for path in (node.folder, *node.folder.rglob("*"), site.home / "hold"):
        os.chown(path, site.home.stat().st_uid, site.home.stat().st_gid)
    try:
        yield node
    finally:
        node.slurm("scontrol", "update", "PartitionName=main", "State=UP")
        node.slurm("scancel", "-n", NAME)
        wait_for_quiet(site)
        shutil.rmtree(node.folder)
        for name in ("hold", "jobs-begun"):
            (site.home / name).unlink(missing_ok=True)


def test_its_jobs_are_watched_found_again_told_and_cancelled(testbed, login_node: LoginNode):
    node = login_node
    assert (checked := node.crossfed("check", "--no-link")).returncode == 0, checked.stdout + checked.stderr
    node.slurm("scontrol", "update", "PartitionName=main", "State=DOWN")
    process = node.run()
    node.wait_for_state("PENDING")
    wait_until(lambda: "PartitionDown" in node.slurm("squeue", "-h", "-n", NAME, "-o", "%r"), 30, "a reason")
    told = node.crossfed("status", "--queues")
    words = " ".join(told.stdout.split())
    assert "PartitionDown" in words and "partition takes no jobs" in words, words + told.stderr
    node.slurm("scontrol", "update", "PartitionName=main", "State=UP")
    node.wait_for_state("RUNNING", begun=1)

    kill_coordinator(process)
    assert node.states() == ["RUNNING"], "a job outlives the coordinator"
    process = node.run()
    log = node.folder / "work" / "streamflow.log"
    wait_until(
        lambda: "of an earlier run has begun (RUNNING): waiting for its end" in log.read_text(), 60, "finding the job"
    )
    wait_until(lambda: "of an earlier run is at work: its end is waited for" in node.log, 30, "a word of it")
    (node.site.home / "hold").unlink()

    node.wait_for_state("RUNNING", begun=3)
    node.slurm("scancel", "-n", NAME)
    node.wait_for_state("RUNNING", begun=5)  # the fourth ends by itself, with code 9
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 128 + signal.SIGINT, node.log
    assert node.states() == []
    time.sleep(1)
    ours = [record for record in records(testbed, node.site) if record["Name"] == NAME]
    assert [one["JobState"] for one in ours] == ["COMPLETED", "COMPLETED", "CANCELLED", "FAILED", "CANCELLED"], ours
    assert ours[0]["EndTime"] <= ours[1]["StartTime"]
    assert "was finished before from the same model" in log.read_text()
    ended = re.findall(r"job (\d+) of facility-cluster did not end well: ", node.log)
    assert len(set(ended)) >= 2 and "CANCELLED" in node.log, node.log
    for number in (1, 2):
        assert f"round {number}: goes on without cluster" in node.log, node.log
    rounds = Archive(node.folder / "archive").history()
    taking = [{row.facility for row in entry.facilities if row.status == "ok"} for entry in rounds]
    assert taking == [{"cluster", "desk"}, {"desk"}, {"desk"}]
