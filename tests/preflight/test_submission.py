"""`crossfed check --submit`: what a real grid engine said, word for word, ends in the right row."""

from __future__ import annotations

import jinja2
import pytest

from coordinator.preflight import scheduler as preflight
from coordinator.preflight import submission
from coordinator.preflight.remote import Answer
from coordinator.preflight.row import Row
from coordinator.preflight.submission import try_job
from coordinator.schedulers.registry import scheduler_named
from coordinator.schedulers.scheduler import BatchScheduler
from tests.deployments import read_deployment
from tests.schedulers.recordings import recorded

FLUX = "".join(recorded(name).out for name in ("flux-queue-list", "flux-queue-stop", "flux-resource-list"))
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
    queue = scheduler_named("gridengine")
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


def test_what_is_submitted_is_what_the_engine_would_render(monkeypatch: pytest.MonkeyPatch):
    """A template that extends another came with jinja2's marks around `${#`: it failed in the check alone."""
    template = '{# a site -#}\n#!/bin/bash\necho "${% raw %}{#{% endraw %}hosts[@]}"\n{{ streamflow_command }}\n'
    site = Site(("command -v", "/usr/bin/flux\n", 0), ("flux queue list", FLUX, 0), ("flux batch", "", 1))
    monkeypatch.setattr(preflight, "run_there", lambda deployment, line, seconds=0.0: site(line))
    monkeypatch.setattr(submission, "run_there", lambda deployment, line, seconds=0.0: site(line))
    flux = read_deployment({"type": "flux", "host": "login", "workdir": "/w", "template": "flux"}, "d")
    preflight.check_scheduler("a", flux, template, submit=True)
    rendered = jinja2.Template(template, keep_trailing_newline=True).render(streamflow_command="sleep 1")
    assert f"<<'CROSSFED_JOB' 2>&1\n{rendered}\nCROSSFED_JOB" in site.asked[-1] and "raw" not in rendered


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        ("ok", "ok", "verification: found suitable queue(s)"),
        ("gpu", "fail", 'cannot run in PE "smp" because it only offers 0 slots'),
        ("long", "fail", "(-l h_rt=172800) cannot run in queue"),
        ("complex", "fail", 'unknown resource "gpus"'),
        ("down", "fail", "does not answer"),
    ],
)
def test_grid_engine_is_asked_whether_the_job_could_run(
    monkeypatch: pytest.MonkeyPatch, answer: str, verdict: str, words: str
):
    """`qsub -w v` takes no job. Recorded on a host with 4 slots, a complex gpu=4 (consumable YES) and 24 hours."""
    tried = recorded("gridengine-down-qsub" if answer == "down" else f"gridengine-qsub-w-v-{answer}")
    lists = said("qconf-sql", "qconf-spl", "qhost", "qstat-g-c", "qconf-sq", "qconf-sp")
    site = Site(("command -v", "/usr/bin/qsub\n", 0), ("qconf", lists, 0), ("qsub -w v", tried.texts[0], tried.code))
    monkeypatch.setattr(preflight, "run_there", lambda deployment, line, seconds=0.0: site(line))
    *_, row = preflight.check_scheduler("a", DEPLOYMENT, JOB, submit=True)
    assert (row.check, row.verdict) == ("job accepted", verdict) and words in row.found, row
    assert ("consumable YES" in row.fix) == (answer in ("gpu", "long", "complex"))
    assert JOB in site.asked[-1] and not any("-terse" in line for line in site.asked), "a dry run takes no job"


@pytest.mark.parametrize(
    ("line", "one"),
    [
        ("#SBATCH --array=0-3", False),
        ("#SBATCH -p gpu -a 1-2", False),
        ("#SBATCH -M other", False),
        ("#SBATCH -a1-2", False),
        ("#SBATCH --clusters other", False),
        ("#PBS -J 1-4", False),
        ("#$ -t 1-4", False),
        ("#SBATCH --account=p-a", True),
        ("#SBATCH --mem=0 -t 5", True),
        ("#SBATCH --cluster-constraint=a", True),
        ("#$ -terse", True),
        ("#PBS -l select=1 -A J-J", True),
    ],
)
def test_a_template_makes_one_job(line: str, one: bool):
    """Jobs of an array have ids of their own, and another cluster's are unknown here: both counted as ended at once."""
    assert (preflight.SEVERAL.search(f"#!/bin/bash\n{line}\n") is None) == one


@pytest.mark.parametrize("name", ["slurm", "pbs", "flux", "gridengine"])
def test_only_a_scheduler_without_a_dry_run_is_given_a_job(name: str):
    queue = scheduler_named(name)
    assert isinstance(queue, BatchScheduler) and bool(queue.trial) == (name in ("slurm", "gridengine"))
    if name != "slurm":
        words = queue.submission("a b", "o p")
        assert words.split()[0] == queue.program and "'a b'" in words and "'o p'" in words
