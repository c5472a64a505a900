"""Our own jobs at the facilities, known by name: which are there, and cancelling them.

Facilities and job names come from the rendered streamflow.yml, and the login is StreamFlow's own ssh connector, so that
the login is the workflow's own (key, agent, jump host, passphrase file).
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from coordinator.archive.many import names_of
from coordinator.config.deployments import GATE, SYSTEM, federation_of
from coordinator.config.firecrest import API
from coordinator.console import reported_meanwhile
from coordinator.events.event import quote_for_display
from coordinator.rounds.ahead import facilities_ahead
from coordinator.schedulers.gated import Gated
from coordinator.schedulers.registry import scheduler_named, schedulers
from coordinator.schedulers.scheduler import ANSWER_BYTES, Job, Scheduler
from coordinator.streamflow_plugin.this_run import settings_of_run
from coordinator.streamflow_plugin.within import with_timeout
from facility.exchange.errors import InputError, TransientError
from facility.exchange.job_names import job_name, waiting_name

log = logging.getLogger("coordinator.engine")

TICK_SECONDS = 0.5
"""How often a run ticks: looks for events, also while queues are asked."""
ANSWER_SECONDS = 60
"""How long one login and one question may take."""
TRAINS = re.compile(r"/rounds/train_([^/]+)")
"""A facility's training step."""


class NoAnswer(TransientError):
    """A facility's login node did not answer, or refused the login: its scheduler was not asked."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue of one facility, seen from the coordinator."""

    facility: str
    kind: str
    job_name: str
    ssh: dict[str, Any]
    """`config` of the ssh deployment that the queue is wrapped around; empty: the queue is this machine's."""
    directory: Path
    """Relative paths in `ssh` count from here."""
    api: bool = False
    """Through FirecREST; `ssh` then holds that connector's settings."""
    system: bool = False
    """Through the system's ssh (`ssh: system`)."""
    gated: bool = False
    """The facility has a gate, which is asked by requests."""
    patience_seconds: float = 0.0
    """How long a job may wait for a reason that no time clears before its round is given up; 0: for ever."""
    ahead: bool = False
    """Jobs may be there ahead of their models, under a name of their own."""
    federation: str = ""
    """Its name, as rendered."""

    @property
    def scheduler(self) -> Scheduler:
        found = scheduler_named(self.kind)
        return cast(Scheduler, Gated(found)) if self.gated else found

    def jobs(self) -> list[Job]:
        """Our jobs that have not ended. Raises `TransientError` when the facility does not answer."""
        return [job for name in self._names() for job in self._named(name)]

    def cancel(self, *, waiting_only: bool = False, ahead: bool = True) -> list[Job]:
        """Cancel our jobs, those ahead of their models too unless `ahead` is false; returns those that were there.

        Raises `TransientError`.
        """
        gone = []
        for name in self._names(ahead=ahead):
            there = [job for job in self._named(name) if not (waiting_only and job.began)]
            if there:
                self._ask((self.scheduler.cancel_waiting if waiting_only else self.scheduler.cancel)(name))
            gone += there
        return gone

    def _named(self, name: str) -> list[Job]:
        text = self._ask(self.scheduler.listing(name))
        try:
            return self.scheduler.read_listing(text)
        except Exception as error:  # whatever one facility answers is no matter of the others
            raise TransientError(
                f"{self.facility}: {self.scheduler.title}'s list of jobs cannot be read: "
                f"{quote_for_display(str(error))}; ask the site, or try the command by hand there"
            ) from None

    def _names(self, *, ahead: bool = True) -> list[str]:
        """Names of our jobs, quoted."""
        names = [self.job_name, waiting_name(self.job_name)] if ahead and self.ahead else [self.job_name]
        return [shlex.quote(name) for name in names]

    def _ask(self, command: str) -> str:
        """What a shell line prints at the facility. Raises `TransientError` when that is not an answer."""
        line = self.scheduler.line(command)
        try:
            if self.ssh:
                text, code = asyncio.run(with_timeout(ANSWER_SECONDS, _login(self, line)))
            else:
                text, code = _here(line)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise NoAnswer(
                f"{self.facility} does not answer: `{command}` did not end within {ANSWER_SECONDS} s; try it by hand "
                "there, where the login node or its scheduler may hang, then give the same command again"
            ) from None
        except Exception as error:
            raise NoAnswer(
                f"{self.facility} does not answer: {quote_for_display(str(error)) or type(error).__name__}"
            ) from None
        if len(text) > ANSWER_BYTES:
            raise TransientError(f"{self.facility}: `{command}` printed more than {ANSWER_BYTES} bytes")
        if not self.scheduler.is_answer(text, code):
            raise TransientError(
                f"{self.facility}: `{command}` ended with code {code}: {quote_for_display(text.strip()[-300:])}"
            )
        return text


def _here(line: str) -> tuple[str, int]:
    """Run one shell line on this machine, as StreamFlow's local connector does."""
    result = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS)
    return result.stdout.decode(errors="replace"), result.returncode


async def _login(queue: Queue, command: str) -> tuple[str, int]:
    """Run one command at a facility's login node."""
    from streamflow.core.deployment import ExecutionLocation

    from coordinator.streamflow_plugin.gate import GatedSSHConnector
    from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
    from coordinator.streamflow_plugin.system_ssh import SystemSSHConnector

    settings = {**queue.ssh, "retries": 2, "retryDelay": 2, "connectTimeout": 20, "waits_for_login": False}
    if queue.api:
        return await _request(queue, command)
    kind = GatedSSHConnector if queue.gated else SystemSSHConnector if queue.system else ParallelSSHConnector
    connector = kind(queue.facility, str(queue.directory), **settings)
    host = next(iter(connector.nodes))
    location = ExecutionLocation(name=host, deployment=queue.facility, hostname=host, local=False)
    try:
        answer = await connector.run(location=location, command=[command], capture_output=True)
    finally:
        await connector.undeploy(False)
    return answer or ("", 1)


async def _request(queue: Queue, command: str) -> tuple[str, int]:
    """Have FirecREST answer one request."""
    from streamflow.core.deployment import ExecutionLocation

    from coordinator.streamflow_plugin.firecrest import FirecrestConnector

    settings = {**queue.ssh, "retries": 2, "retryDelay": 2, "waits_for_login": False}
    connector = FirecrestConnector(queue.facility, str(queue.directory), **settings)
    host = next(iter(connector.nodes))
    try:
        answer = await connector.run(
            ExecutionLocation(name=host, deployment=queue.facility, hostname=host), [command], capture_output=True
        )
    finally:
        await connector.undeploy(False)
    return answer or ("", 1)


def read_queues(
    streamflow: Path, patience: dict[str, float] | None = None, *, folder: Path | None = None
) -> list[Queue]:
    """The queues named in a rendered streamflow.yml, and the hosts without one; a deployment without a job name is left
    out: their jobs cannot be distinguished from other people's. `patience`: seconds by facility, see `Queue`; `folder`:
    where it was rendered, if the file is a copy.

    Raises `InputError` where nothing was rendered yet.
    """
    if not streamflow.exists():
        raise InputError(
            f"there is no {streamflow}, which names the jobs: `crossfed run` writes it and begins, `crossfed render` "
            "only writes it"
        )
    data = yaml.safe_load(streamflow.read_text(encoding="utf-8"))
    place = streamflow.parent if folder is None else folder
    return rendered_queues(data, place, patience, ahead=_ahead(place / "streamflow.yml", data))


def rendered_queues(
    data: dict[str, Any], folder: Path, patience: dict[str, float] | None = None, *, ahead: Collection[str] = ()
) -> list[Queue]:
    """The queues, and the hosts without one, of the content of a streamflow.yml in `folder`.

    `ahead`: facilities whose jobs may be there ahead of their model. `patience`: see `read_queues`.
    """
    deployments = data.get("deployments", {})
    federation = federation_of(next(iter(data.get("workflows", {})), ""))
    found = []
    for binding in _bindings(data):
        target = deployments.get(binding["deployment"], {})
        kind = "ssh" if target.get("type") in (GATE, SYSTEM) else target.get("type")
        if kind not in schedulers():
            continue
        facility = facility_of(binding["step"])
        if kind == "ssh":
            inner, name = target, job_name(federation, facility) if binding.get("service") else ""
        else:
            service = (target["config"].get("services") or {}).get(binding.get("service"), {})
            name = service.get("jobName")
            wrapped = target.get("wraps")
            inner = deployments.get(wrapped["deployment"] if isinstance(wrapped, dict) else wrapped, {})
        if name and inner.get("type", "local") in ("ssh", "local", GATE, SYSTEM, API):
            found.append(
                Queue(
                    facility=facility,
                    kind=kind,
                    gated=inner.get("type") == GATE,
                    system=inner.get("type") == SYSTEM,
                    api=inner.get("type") == API,
                    job_name=name,
                    ssh=inner.get("config") or {},
                    directory=folder.resolve(),
                    federation=federation,
                    patience_seconds=(patience or {}).get(facility, 0.0),
                    ahead=facility in ahead,
                )
            )
    return found


def _ahead(streamflow: Path, data: dict[str, Any]) -> set[str]:
    """Facilities whose jobs are submitted ahead of their models, or were in an earlier run."""
    settings = settings_of_run([str(streamflow)])
    workdir = data.get("deployments", {}).get("coordinator", {}).get("workdir", "")
    left = facilities_ahead(streamflow.parent / workdir) if workdir else set()
    return {*(settings.ahead if settings is not None else ()), *left}


def facility_of(step: str) -> str:
    """Whose training step this is, or ''."""
    match = TRAINS.fullmatch(step)
    return match[1] if match else ""


def _bindings(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Step and target of every binding of a training step."""
    return [
        {"step": binding["step"], **target}
        for workflow in data.get("workflows", {}).values()
        for binding in workflow.get("bindings", [])
        if facility_of(binding.get("step", ""))
        for target in (binding["target"] if isinstance(binding["target"], list) else [binding["target"]])
    ]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the queues of all facilities answered."""

    jobs: dict[str, list[Job]]
    """By facility, of those that answered."""
    silent: list[str]
    """Why others did not."""
    away: dict[str, str] = field(default_factory=dict)
    """By facility: why its login node did not; these are of `silent` too."""

    def log_silent(self, what_follows: str = "", *, but: Collection[str] = ()) -> None:
        """Log the facilities that did not answer, `but` for these sentences."""
        for sentence in self.silent:
            if sentence not in but:
                log.warning("%s%s", sentence, what_follows)

    def report_away(
        self, asked: Iterable[Queue], away: Callable[[str, str], object], back: Callable[[str], object]
    ) -> None:
        """Of those `asked`, give `away` each facility whose login node did not answer, and `back` each other one."""
        for name in {queue.facility: None for queue in asked}:
            if name in self.away:
                away(name, self.away[name])
            else:
                back(name)


def at_all(queues: list[Queue], act: Callable[[Queue], list[Job]]) -> Answers:
    """Ask every queue at the same time."""

    def one(queue: Queue) -> list[Job] | TransientError:
        try:
            return act(queue)
        except TransientError as error:
            return error

    if not queues:
        return Answers(jobs={}, silent=[])
    with ThreadPoolExecutor(max_workers=min(16, len(queues))) as pool:
        answers = list(pool.map(one, queues))
    answered = [(queue.facility, answer) for queue, answer in zip(queues, answers, strict=True)]
    return Answers(
        jobs={name: answer for name, answer in answered if not isinstance(answer, TransientError)},
        silent=[str(answer) for answer in answers if isinstance(answer, TransientError)],
        away={name: str(answer) for name, answer in answered if isinstance(answer, NoAnswer)},
    )


def asked_meanwhile(
    queues: list[Queue], act: Callable[[Queue], list[Job]], doing: str, on_tick: Callable[[], object]
) -> Answers:
    """`at_all`; `on_tick` is called about twice a second, and each that has not answered is logged now and then,
    after what is `doing`: a login node that is away may take minutes."""
    missing = [queue.facility for queue in queues]

    def one(queue: Queue) -> list[Job]:
        try:
            return act(queue)
        finally:
            missing.remove(queue.facility)

    def sentence() -> str:
        return f"{doing}, waiting for {names_of(names)}" if (names := list(missing)) else ""

    with ThreadPoolExecutor(1) as pool, reported_meanwhile(sentence, log.info):
        asking = pool.submit(at_all, queues, one)
        while not wait([asking], timeout=TICK_SECONDS).done:
            on_tick()
    return asking.result()
