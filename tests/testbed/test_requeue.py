"""Jobs that Slurm puts back into the queue: by hand or preempted, and because a node failed."""

from __future__ import annotations

import subprocess

import pytest

from coordinator.testbed import namespaces
from tests.testbed.conftest import ssh
from tests.testbed.federation import federate, jobs
from tests.testbed.test_failures import wait_for_job

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_job_that_is_requeued_and_one_whose_node_fails_are_waited_for(testbed, material, tmp_path):
    """Slurm begins such a job again once its first credential is void, which takes two minutes."""
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="requeued", rounds=1, delay=8, minimum=2)
    thread = run.start()
    first, second = wait_for_job(testbed, a), wait_for_job(testbed, b)
    node = ssh(testbed, b, f"squeue -h -j {second} -o %N").stdout.strip()
    assert ssh(testbed, a, f"scontrol requeue {first}").returncode == 0
    down = namespaces.enter(b, "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    subprocess.run(down, check=True)
    wait_for_job(testbed, a, "PENDING"), wait_for_job(testbed, b, "PENDING")
    subprocess.run(
        namespaces.enter(b, "scontrol", "update", f"NodeName={node}", "State=RESUME")
    )  # it may be back already
    thread.join(400)
    assert run.result is not None and run.result[0] == 0, run.text()
    assert [row.status for row in run.archive.history()[0].facilities] == ["ok", "ok"], run.text()
    for site, job in ((a, first), (b, second)):
        ids = [record["JobId"] for record in jobs(run, site)]
        assert ids and set(ids) == {job}, f"no other was submitted: {ids}"
