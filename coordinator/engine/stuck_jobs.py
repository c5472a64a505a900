"""Jobs that will not begin by waiting: what a scheduler's reason means, what to do, and when a round is given up."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.engine.queues import Job, Queue, at_all

MEANINGS: dict[str, list[tuple[str, str]]] = {
    # https://slurm.schedmd.com/job_reason_codes.html
    "slurm": [
        (r"JobHeldUser", "your account holds it: `scontrol release {id}` there"),
        (r"JobHeldAdmin", "the site's staff hold it: ask them why"),
        (
            r"job_requeued_in_held_state|launch_failed_requeued_held|JobLaunchFailure",
            "it could not be started and was held: look at its output, then `scontrol release {id}`",
        ),
        (
            r"DependencyNeverSatisfied",
            "it waits for a job that failed: remove --dependency from the template or `options:`",
        ),
        (
            r"Partition(Down|Inactive)",
            "the partition takes no jobs to its nodes: wait for the site, or name another in `fill: {partition: ...}`",
        ),
        (
            r"Partition(NodeLimit|TimeLimit)|MaxMemPerLimit",
            "it asks for more than the partition allows: lower nodes, time or memory; "
            "`sinfo -o '%P %l %D %m'` shows the limits",
        ),
        (
            r"(Assoc|QOS)(Grp|Max)\w*(Minutes|Billing)\w*",
            "the budget of the account is spent: ask for more, or name another account",
        ),
        (
            r"(Assoc|QOS)\w*(PerJob|PerNode|WallDuration)\w*",
            "it asks for more than account or QOS allow one job: `sacctmgr show assoc user=$USER` and `sacctmgr show qos` show the limits; "
            "lower what the template asks for",
        ),
        (
            r"Invalid(Account|QOS)|AccountNotAllowed|QOSNotAllowed",
            "account or QOS may not use this partition: correct `fill:` or `options:`",
        ),
        (
            r"BadConstraints|ReqNodeNotAvail.*|NodeDown",
            "nodes it asks for are down, reserved or do not exist: `sinfo -R` tells why; "
            "ask for others, or wait for the site's maintenance to end",
        ),
        (r"ReservationDeleted|InvalidReservation", "its reservation is gone: remove --reservation"),
    ],
    # PBS Professional Reference Guide, job attributes `comment` and `Hold_Types`
    "pbs": [
        (r"held=\w*u.*", "your account holds it: `qrls {id}` there"),
        (r"held=.*", "the site's staff or a dependency hold it: `qstat -f {id}` shows Hold_Types and depend"),
        (
            r"(?i).*can never run.*",
            "no node of the queue has what it asks for: lower `select` in the template; `pbsnodes -a` shows what there is",
        ),
        (
            r"(?i).*queue not (started|enabled).*",
            "the queue is closed: wait for the site, or name another in `fill: {queue: ...}`",
        ),
    ],
    # flux-jobs(1): urgency 0 is held
    "flux": [
        (r"urgency=0\b.*", "it is held: `flux job urgency {id} default` there"),
        (r"urgency=\d+ .*after.*", "it waits for another job: remove the dependency from the template or `options:`"),
    ],
}
"""For each scheduler: a reason that does not clear by itself, and what to do. Whatever is not listed is ordinary waiting, limits that end with other jobs among it."""


def what_to_do(kind: str, job: Job) -> str:
    """A sentence for a job whose reason does not clear by itself, else ''."""
    for pattern, sentence in MEANINGS.get(kind, []):
        if not job.began and re.fullmatch(pattern, job.reason):
            return sentence.replace("{id}", job.id)
    return ""


def present(queues: list[Queue]) -> list[dict[str, str]]:
    """Our jobs everywhere now, facility by facility, with what to do; a facility that does not answer is one entry too."""
    silent: list[str] = []
    found: list[dict[str, str]] = []

    def ask(queue: Queue) -> list[Job]:
        jobs = queue.jobs()
        for job in jobs:
            advice = what_to_do(queue.kind, job)
            found.append(
                {
                    "facility": queue.facility,
                    "job": job.id,
                    "state": job.state,
                    "reason": job.reason,
                    "do": advice and f"-> {advice}",
                }
            )
        return jobs

    at_all(queues, ask, silent.append)
    found.sort(key=lambda entry: (entry["facility"], entry["job"]))
    return [*found, *({"facility": "", "job": "", "state": "", "reason": sentence, "do": ""} for sentence in silent)]


@dataclass(kw_only=True)
class Watch:
    """Looks at the queues now and then; tells of a stuck job once for each reason, and gives it up after the queue's patience."""

    queues: list[Queue]
    say: Callable[[str], None]
    every_seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _told: set[tuple[str, str, str]] = field(default_factory=set)

    def look(self) -> None:
        """Ask every queue once. A facility that does not answer is not our matter: others tell of it."""
        with_queue = [queue for queue in self.queues if queue.kind in MEANINGS]
        at_all(with_queue, self._one, lambda _: None)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Look every so often until the block ends."""
        end = threading.Event()

        def work() -> None:
            while not end.wait(self.every_seconds):
                self.look()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()

    def _one(self, queue: Queue) -> list[Job]:
        jobs = queue.jobs()
        for job in jobs:
            key = (queue.facility, job.id)
            if not (advice := what_to_do(queue.kind, job)):
                self._since.pop(key, None)
                continue
            since = self._since.setdefault(key, self.clock())
            limit = queue.patience_seconds
            if (*key, job.reason) not in self._told:
                self._told.add((*key, job.reason))
                end = f"; without that its round is given up {_span(limit)} after this" if limit else ""
                self.say(f"{queue.facility}: job {job.id} will not begin by itself ({job.reason}): {advice}{end}")
            if limit and self.clock() - since >= limit:
                queue.cancel(waiting_only=True)
                self._since.pop(key, None)
                self.say(
                    f"{queue.facility}: job {job.id} waited {_span(limit)} with {job.reason}: cancelled, the round goes on without it"
                )
        return jobs


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
