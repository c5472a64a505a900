"""`crossfed check --submit`: what a real grid engine said, word for word, ends in the right row."""

from __future__ import annotations

from coordinator.preflight.remote import Answer
from coordinator.preflight.row import Row
from coordinator.preflight.submission import submits_a_job, try_job
from coordinator.schedulers.registry import scheduler
from coordinator.schedulers.scheduler import BatchScheduler
from tests.deployments import read_deployment
from tests.schedulers.recordings import recorded

JOB = "#!/bin/bash\n#$ -q all.q\nsleep 1\n"
DEPLOYMENT = read_deployment({"type": "gridengine", "host": "login", "workdir": "/w", "template": "gridengine"}, "d")


class Site:
    """Answers a shell line by the question that it holds, and notes it."""

    def __init__(self, *answers: tuple[str, str, int]) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, line: str) -> Answer:
        self.asked.append(line)
        found = next((one for one in self.answers if one[0] in line), ("", "", 127))
        return Answer(code=found[2], out=found[1], error="")


def tried(site: Site) -> Row:
    queue = scheduler("gridengine")
    assert isinstance(queue, BatchScheduler)
    return try_job("a", DEPLOYMENT, queue, JOB, site, seconds=0.0)


def said(*names: str) -> str:
    found = [recorded(f"gridengine-{name}") for name in names]
    return "".join(one.out + one.err for one in found)


def test_a_job_that_is_taken_and_runs_is_cancelled_after_its_time():
    site = Site(("qsub -terse", said("qsub"), 0), ("qdel", "", 0), ("qstat", said("qstat-running"), 0))
    row = tried(site)
    assert row.verdict == "ok" and "job 1" in row.found and any("qdel 1" in line for line in site.asked)
    assert JOB in site.asked[0] and "crossfed-check-a" in site.asked[0]


def test_a_job_that_fails_is_told_with_its_code():
    gone = said("qstat-ended", "qstat-j-ended")
    site = Site(("qsub -terse", said("qsub"), 0), ("qacct", gone + said("qacct-j-code7"), 0), ("qstat", gone, 0))
    row = tried(site)
    assert row.verdict == "fail" and "7" in row.found, row
    assert not any("qdel" in line for line in site.asked)


def test_a_queue_that_does_not_exist_is_told_in_the_sites_words():
    refused = recorded("gridengine-qsub-unknown-queue")
    row = tried(Site(("qsub -terse", refused.out + refused.err, refused.code)))
    assert row.verdict == "fail" and "queue" in row.found, row


def test_slurm_tests_a_job_without_taking_it():
    slurm = read_deployment({"type": "slurm", "host": "login", "workdir": "/w", "template": "slurm"}, "d")
    assert submits_a_job(DEPLOYMENT) and not submits_a_job(slurm)
