"""Our own jobs at the facilities, known by name: which are there, and cancelling them.

Facilities and job names come from the rendered streamflow.yml, and the login is StreamFlow's own ssh connector, so that
whatever lets the workflow in (key, agent, jump host, passphrase file) lets this in too.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coordinator.config.deployments import MARK, job_name
from facility.exchange.errors import TryAgain

ANSWER_SECONDS = 60
"""How long one login and one question may take."""
TRAINS = re.compile(r"/rounds/train_([^/]+)|/facility_([^/]+)/train")
"""A facility's training step: of a round, or of its own chain where the federation runs by groups."""
JOB_ID = re.compile(r"\d[\w.\[\]@-]*|[fƒ]\w+")
"""What a line of a listing begins with; banners and complaints do not."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The commands of one batch system; NAME stands for the quoted job name."""

    listing: str
    """Prints a line `id state why-it-waits` for each of our jobs of that name that has not ended."""
    cancel: str
    """Cancels all our jobs of that name, waiting or running."""
    cancel_waiting: str
    """Cancels only those that have not begun."""
    waiting: tuple[str, ...]
    """States of a job that has not begun."""


_PBS_FIELDS = (
    """awk -v j="$j" '/^ *job_state = /{s=$3} /^ *Hold_Types = /{h=$3} /^ *comment = /{sub(/^ *comment = /,""); c=$0} """
    """END{if(s!="") print j,s,(s=="H" ? "held=" h " " : "") c}'"""
)
_PROCESSES = f"grep -lszxF {MARK}=NAME /proc/[0-9]*/environ | sed -e 's|^/proc/||' -e 's|/environ$||'"
SCHEDULERS = {
    # https://slurm.schedmd.com/squeue.html, https://slurm.schedmd.com/scancel.html
    "slurm": Scheduler(
        listing="squeue -h -u \"$(id -un)\" -n NAME -o '%i %T %r'",
        cancel='scancel -u "$(id -un)" -n NAME',
        cancel_waiting='scancel -u "$(id -un)" -n NAME -t PENDING',
        waiting=("PENDING", "SUSPENDED", "REQUEUED", "SPECIAL_EXIT"),
    ),
    # https://2021.help.altair.com/2021.1/PBSProfessional/PBSReferenceGuide2021.1.pdf (qselect, qdel)
    "pbs": Scheduler(
        listing='for j in $(qselect -u "$(id -un)" -N NAME); do qstat -f "$j" | ' + _PBS_FIELDS + "; done",
        cancel='qselect -u "$(id -un)" -N NAME | xargs -r qdel',
        cancel_waiting='qselect -u "$(id -un)" -N NAME -s QHW | xargs -r qdel',
        waiting=("Q", "H", "W"),
    ),
    # https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-jobs.html
    "flux": Scheduler(
        listing="flux jobs -n -f pending,running --name=NAME -o '{id} {state} urgency={urgency} {dependencies}'",
        cancel="flux jobs -n -f pending,running --name=NAME -o '{id}' | xargs -r flux cancel",
        cancel_waiting="flux jobs -n -f pending --name=NAME -o '{id}' | xargs -r flux cancel",
        waiting=("DEPEND", "PRIORITY", "SCHED"),
    ),
    # No queue: the job's processes carry its name in their environment (proc(5)); none of them ever waits.
    "ssh": Scheduler(
        listing=f"{_PROCESSES} -e 's/$/ R/'",
        cancel=f"{_PROCESSES} | xargs -r kill",
        cancel_waiting="true",
        waiting=(),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job in a queue."""

    id: str
    state: str
    """As the scheduler calls it."""
    began: bool
    reason: str = ""
    """Why it waits, in the scheduler's words."""


def read_jobs(kind: str, listing: str) -> list[Job]:
    """Jobs of the scheduler's `listing`; lines that are none (banners, complaints) are passed over."""
    found = []
    for line in listing.splitlines():
        words = line.split(maxsplit=2)
        if len(words) >= 2 and JOB_ID.fullmatch(words[0]) and words[1].isupper():
            began = words[1] not in SCHEDULERS[kind].waiting
            reason = "" if began else "".join(words[2:]).strip()
            found.append(Job(id=words[0], state=words[1], began=began, reason=reason))
    return found


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue of one facility, seen from the coordinator."""

    facility: str
    kind: str
    job_name: str
    ssh: dict[str, Any]
    """`config` of the ssh deployment that the queue is wrapped around."""
    directory: Path
    """Relative paths in `ssh` count from here."""
    patience_seconds: float = 0.0
    """How long a job may wait for a reason that no time clears before its round is given up; 0: for ever."""

    @property
    def scheduler(self) -> Scheduler:
        return SCHEDULERS[self.kind]

    def jobs(self) -> list[Job]:
        """Our jobs that have not ended. Raises `TryAgain` when the facility does not answer."""
        return read_jobs(self.kind, self._ask(self.scheduler.listing))

    def cancel(self, *, waiting_only: bool = False) -> list[Job]:
        """Cancel our jobs; returns those that were there. Raises `TryAgain`."""
        there = [job for job in self.jobs() if not (waiting_only and job.began)]
        if there:
            self._ask(self.scheduler.cancel_waiting if waiting_only else self.scheduler.cancel)
        return there

    def _ask(self, command: str) -> str:
        command = command.replace("NAME", shlex.quote(self.job_name))
        try:
            text, code = asyncio.run(asyncio.wait_for(_login(self, command), ANSWER_SECONDS))
        except Exception as error:
            raise TryAgain(f"{self.facility} does not answer: {error or type(error).__name__}") from None
        if code:
            raise TryAgain(f"{self.facility}: `{command}` ended with code {code}: {text.strip()[-300:]}")
        return text


async def _login(queue: Queue, command: str) -> tuple[str, int]:
    """Run one command at a facility's login node."""
    from streamflow.core.deployment import ExecutionLocation

    from coordinator.streamflow_plugin.ssh import ParallelSSHConnector

    settings = {**queue.ssh, "retries": 2, "retryDelay": 2, "connectTimeout": 20}
    connector = ParallelSSHConnector(queue.facility, str(queue.directory), **settings)
    host = next(iter(connector.nodes))
    location = ExecutionLocation(name=host, deployment=queue.facility, hostname=host, local=False)
    try:
        answer = await connector.run(location=location, command=[command], capture_output=True)
    finally:
        await connector.undeploy(False)
    return answer or ("", 1)


def read_queues(streamflow: Path, patience: dict[str, float] | None = None) -> list[Queue]:
    """The queues named in a rendered streamflow.yml, and the hosts without one; a deployment without a job name is left
    out: nothing could be told from other people's jobs. `patience`: seconds by facility, see `Queue`."""
    data = yaml.safe_load(streamflow.read_text())
    deployments = data.get("deployments", {})
    federation = next(iter(data.get("workflows", {})), "")
    found = []
    for binding in _bindings(data):
        target = deployments.get(binding["deployment"], {})
        if target.get("type") not in SCHEDULERS:
            continue
        facility = facility_of(binding["step"])
        if target["type"] == "ssh":
            inner, name = target, job_name(federation, facility) if binding.get("service") else ""
        else:
            service = (target["config"].get("services") or {}).get(binding.get("service"), {})
            name = service.get("jobName")
            wrapped = target.get("wraps")
            inner = deployments.get(wrapped["deployment"] if isinstance(wrapped, dict) else wrapped, {})
        if name and inner.get("type") == "ssh":
            found.append(
                Queue(
                    facility=facility,
                    kind=target["type"],
                    job_name=name,
                    ssh=inner["config"],
                    directory=streamflow.parent.resolve(),
                    patience_seconds=(patience or {}).get(facility, 0.0),
                )
            )
    return found


def facility_of(step: str) -> str:
    """Whose training step this is, or ''."""
    match = TRAINS.fullmatch(step)
    return (match[1] or match[2]) if match else ""


def _bindings(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Step and target of every binding of a training step."""
    return [
        {"step": binding["step"], **target}
        for workflow in data.get("workflows", {}).values()
        for binding in workflow.get("bindings", [])
        if facility_of(binding.get("step", ""))
        for target in (binding["target"] if isinstance(binding["target"], list) else [binding["target"]])
    ]


def at_all(
    queues: list[Queue], act: Callable[[Queue], list[Job]], say: Callable[[str], None]
) -> dict[str, list[Job]] | None:
    """Ask every queue; a facility that does not answer is told and leaves None as the whole answer."""

    def one(queue: Queue) -> list[Job] | TryAgain:
        try:
            return act(queue)
        except TryAgain as error:
            return error

    if not queues:
        return {}
    with ThreadPoolExecutor(max_workers=min(16, len(queues))) as pool:
        answers = list(pool.map(one, queues))
    result: dict[str, list[Job]] = {}
    for queue, answer in zip(queues, answers, strict=True):
        if isinstance(answer, TryAgain):
            say(str(answer))
        else:
            result[queue.facility] = answer
    return result if len(result) == len(queues) else None
