"""StreamFlow's ssh connector: transfers over several connections; refused logins are retried, host keys are not."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh
from streamflow.core.deployment import ExecutionLocation, Shell
from streamflow.core.exception import WorkflowExecutionException
from streamflow.core.scheduling import AvailableLocation
from streamflow.core.utils import get_local_to_remote_destination, run_in_shell
from streamflow.deployment.connector.ssh import SSHConfig, SSHConnector, SSHContextFactory, SSHContextManager
from streamflow.log_handler import logger

from coordinator.config.deployment_names import CONNECTION, facility_of_deployment
from coordinator.config.deployments import SERVICE
from coordinator.events.event import emit
from coordinator.schedulers.scheduler import OUTPUT_BYTES, step_code
from coordinator.streamflow_plugin.bounded_reader import BoundedReader, not_begun, timeout_error
from coordinator.streamflow_plugin.connection import CarefulContext
from coordinator.streamflow_plugin.copied import largest_update, report_copy
from coordinator.streamflow_plugin.dialect import ANNOUNCE, SHELL, ShellDialect, after_noise
from coordinator.streamflow_plugin.job_progress import JobWatch, command_runner, run_watch
from coordinator.streamflow_plugin.lanes import CHANNELS, TransferFailed, end_kept, lane_count
from coordinator.streamflow_plugin.last_words import error_in
from coordinator.streamflow_plugin.login_shell import in_any_shell, in_login_shell
from coordinator.streamflow_plugin.overdue import note_failed
from coordinator.streamflow_plugin.patient import ConnectionBroke, may_be_repeated, step_of
from coordinator.streamflow_plugin.patient_login import PatientLogin
from coordinator.streamflow_plugin.problems import report_problem
from coordinator.streamflow_plugin.sessions import LEAST, Given, Sessions
from coordinator.streamflow_plugin.ssh_settings import certificates_of
from coordinator.streamflow_plugin.swift import SwiftLane, swift_lanes
from coordinator.streamflow_plugin.tree import pull_tree, push_tree
from coordinator.streamflow_plugin.waiting import Waiting

COMMAND_BYTES = 1 << 20
"""What is kept of a command's answer: its end."""
COMMAND_SECONDS = 3600
STREAMS = 8
"""Connections of one transfer unless `maxConnections` asks for more."""
ATTEMPTS = 3
"""Of a command whose connection breaks before it has answered."""
JOBS = 1 << 16
"""More than ever run at once: the login node's own cores say nothing about a facility's jobs."""


class ParallelSSHConnector(SSHConnector):
    """`type: ssh`, the same settings. `maxConnections` is also the number of streams of one transfer (at least 8).

    `waits_for_login`: a refused login is waited for; otherwise it is an error at once.
    """

    dialect: ShellDialect = SHELL
    """What transfers ask for."""

    def __init__(self, *args, waits_for_login: bool = True, **settings) -> None:
        super().__init__(*args, **settings)
        is_bound = SERVICE in (settings.get("services") or {})  # else a queue, which the facility's steps are bound to
        self.facility = facility_of_deployment(self.deployment_name, "" if is_bound else CONNECTION)
        self._waiting = Waiting()
        login = PatientLogin(facility=self.facility, files=self._renewed(), waiting=self._waiting)
        self._login = login if waits_for_login else None
        self._cls_context = partial(CarefulContext, login=self._login)
        self._most_bytes: int | None = None
        self._given = Given(self.maxConcurrentSessions)
        self._lanes: dict[str, list[SSHContextFactory]] = {}
        self._worth: dict[str, asyncio.Future[int]] = {}
        self._closing: set[asyncio.Future[None]] = set()

    def _renewed(self) -> Sequence[str]:
        """Files that change as the login is renewed: the key, or else the certificates that ~/.ssh/config names."""
        if self.sshKey:
            return [self.sshKey]
        return [one for node in self.nodes.values() for one in certificates_of(node.hostname, node.username or "")]

    async def get_available_locations(self, service: str | None = None) -> MutableMapping[str, AvailableLocation]:
        """The nodes, without asking them for cores and disks as the original does: the engine holds the lock of all
        scheduling meanwhile, so that one login that is away would hold up every facility."""
        return {
            host: AvailableLocation(
                name=host, deployment=self.deployment_name, service=service, hostname=host, slots=JOBS
            )
            for host in (node.hostname for node in self.nodes.values())
        }

    def try_again(self) -> None:
        """Count failed attempts to connect from 0 again, as for a host that was away for longer than `retries`."""
        factories = [*self.ssh_context_factories.values(), *(lane for lanes in self._lanes.values() for lane in lanes)]
        for context in (one for factory in factories for one in factory._contexts):
            context.connection_attempts = 0

    def lanes(self, location: ExecutionLocation) -> list[SSHContextFactory]:
        """Connections of their own for transfers, to the data-transfer host where there is one."""
        if location.name not in self._lanes:
            host = self.dataTransferConfig or self.nodes[location.name]
            self._lanes[location.name] = [self._factory(host, 1, 1) for _ in range(max(STREAMS, self.maxConnections))]
        return self._lanes[location.name]

    async def awake(self, location: ExecutionLocation) -> list[SSHContextFactory]:
        """As many of `lanes` as the distance is worth, the first of them logged in."""
        lanes, known = self.lanes(location), self._worth.get(location.name)
        if known is None or known.done() and (known.cancelled() or known.exception() is not None):
            self._worth[location.name] = asyncio.ensure_future(lane_count(lanes[0], len(lanes), self.dialect.nothing))
        return lanes[: await asyncio.shield(self._worth[location.name])]

    def swift(self, location: ExecutionLocation, count: int) -> AbstractAsyncContextManager[list[SwiftLane]]:
        """Connections of the system's ssh to where `lanes` go; none where one has no sessions for its pieces, each of
        which would log in anew."""
        host = self.dataTransferConfig or self.nodes[location.name]
        room = self._given.each(host.hostname) > CHANNELS
        return swift_lanes(host, count if room else 0, CHANNELS, self.dialect)

    async def run(
        self,
        location: ExecutionLocation,
        command: MutableSequence[str],
        environment: MutableMapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: int | str | None = None,
        stdout: int | str = asyncio.subprocess.STDOUT,
        stderr: int | str = asyncio.subprocess.STDOUT,
        capture_output: bool = False,
        timeout: int | None = None,
        job_name: str | None = None,
    ) -> tuple[str, int] | None:
        """As the original, but a job ends with its connection, and its exit code is one that the workflow knows."""
        if job_name is None:
            return await self._command(location, private(command), environment, workdir, stdin, capture_output, timeout)
        emit("executing", step=(step := step_of(job_name)))
        text = self._get_command(location, command, environment, workdir, stdin, stdout, stderr, job_name)
        text = self.template_map.get_command(text, location.service, environment, workdir)
        emit("began", step=step, job="")
        async with run_watch(JobWatch(step=step, directory=workdir or ".", ask=command_runner(self, location))):
            said, code = await self.end_of(location, self.job_line(text), OUTPUT_BYTES, timeout)
        if code is None:
            raise WorkflowExecutionException(f"the connection to {self.deployment_name} broke during job {job_name}")
        emit("ended", step=step, job="", code=step_code(code), problem="")
        if step_code(code) != code:
            sentence = f"job {job_name} of {self.deployment_name} did not end well: exit code {code} {error_in(said)}"
            report_problem(note_failed(sentence.rstrip()), logging.ERROR)
        return (said, step_code(code)) if capture_output else None

    async def _command(
        self,
        location: ExecutionLocation,
        command: MutableSequence[str],
        environment: MutableMapping[str, str] | None,
        workdir: str | None,
        stdin: int | str | None,
        capture_output: bool,
        timeout: int | None,
    ) -> tuple[str, int] | None:
        """A command in the open shell; with `stdin`, or where the shell cannot be had, in a session of its own.

        Raises `ConnectionBroke` where its answer was lost, and it may not be given again or that was of no help.
        """
        shown, limit = " ".join(command), timeout or COMMAND_SECONDS
        broke = ConnectionBroke(f"the connection to {self.deployment_name} broke during `{shown:.100}`")
        stays = self._login is not None  # else one question is asked, and a shell would be a second login to be refused
        for _ in range(ATTEMPTS if stdin is None and stays else 0):
            try:
                shell = await self.get_shell(command=["sh"], location=location)
            except WorkflowExecutionException:
                break
            try:
                return await run_in_shell(
                    shell=shell,
                    location=location,
                    command=command,
                    environment=environment,
                    workdir=workdir,
                    capture_output=capture_output,
                    timeout=limit,
                )
            except WorkflowExecutionException as error:
                self._drop(location, shell)
                if not_begun(error):
                    continue
                if not may_be_repeated.get():
                    raise broke from error
                if isinstance(error.__cause__, TimeoutError):
                    raise timeout_error(self.deployment_name, shown, limit) from error
                if not isinstance(error.__cause__, ConnectionError):
                    raise
        line = in_any_shell(f"exec 2>&1; {ANNOUNCE}{self._get_command(location, command, environment, workdir, stdin)}")
        line = line if stdin is not None else in_login_shell(line)
        for _ in range(ATTEMPTS if stdin is None and may_be_repeated.get() else 1):
            said, code = await self.end_of(location, line, COMMAND_BYTES, limit, apart=True, shown=shown)
            if code is not None:
                return (after_noise(said), code) if capture_output else None
        raise broke

    def _drop(self, location: ExecutionLocation, shell: Shell) -> None:
        """Give no further command to a shell that failed: what it still prints would be taken for its answer."""
        there = self._shells[location.name]
        self._shells[location.name] = {key: one for key, one in there.items() if one is not shell}

        async def close() -> None:
            with suppress(Exception):  # of a connection that is lost as well
                await shell.close()

        self._closing.add(task := asyncio.ensure_future(close()))
        task.add_done_callback(self._closing.discard)

    async def end_of(
        self,
        location: ExecutionLocation,
        text: str,
        most: int,
        timeout: int | None,
        *,
        apart: bool = False,
        shown: str = "",
    ) -> tuple[str, int | None]:
        """The last `most` bytes of what a command prints, and its code; None where the connection broke.

        `apart`: its standard error counts only where it printed nothing else. `shown`: `text` as a person knows it.
        """
        errors = asyncio.subprocess.PIPE if apart else asyncio.subprocess.STDOUT
        said, words = bytearray(), bytearray()
        async with self._get_ssh_client_process(
            location=location.name, command=text, stderr=errors, encoding=None
        ) as process:
            try:
                async with asyncio.timeout(timeout):  # the wait for a login is not counted
                    await asyncio.gather(end_kept(process.stdout, most, said), end_kept(process.stderr, most, words))
                    result = await process.wait()
            except TimeoutError:
                raise timeout_error(self.deployment_name, shown or text, timeout) from None
            except asyncssh.Error:
                return said.decode(errors="replace").strip(), None
        answer = bytes(said or words) or (result.stderr or b"")[-most:]
        return answer.decode(errors="replace").strip(), result.returncode

    def job_line(self, command: str) -> str:
        """What is sent for a job's shell command."""
        return in_any_shell(tethered(command))

    async def _create_shell(self, command: MutableSequence[str], location: ExecutionLocation) -> Shell:
        """A login shell, as in `crossfed check`."""
        shell = await super()._create_shell([in_login_shell("sh")] if list(command) == ["sh"] else command, location)
        shell._reader = BoundedReader(shell._reader)
        shell._writer = BoundedReader.reset_by(shell._writer, shell._reader)
        try:
            for _ in range(2):  # once it has answered twice, all is here that start-up files printed, to both streams
                await shell.execute([":"], capture_output=True, timeout=COMMAND_SECONDS)
        except BaseException:
            with suppress(Exception):
                await shell.close()
            raise
        return shell

    def _get_ssh_client_process(self, location: str, command: str, **rest: Any) -> SSHContextManager:
        place = ExecutionLocation(name=location, deployment=self.deployment_name, hostname=location)
        rest.setdefault("environment", None)
        return self._get_ssh_context_factory(place).get(command=command, **rest)

    def _get_ssh_context_factory(self, location: ExecutionLocation) -> SSHContextFactory:
        """Commands go to the login node, which has the scheduler (the original sends them to a data-transfer host where
        there is one); only `lanes` go there."""
        if location.name not in self.ssh_context_factories:
            host = self.nodes[location.name]
            self.ssh_context_factories[location.name] = self._factory(host, self.maxConnections, LEAST)
        return self.ssh_context_factories[location.name]

    def _factory(self, config: SSHConfig, connections: int, least: int) -> SSHContextFactory:
        """`least`: sessions that there must be at once."""
        return Sessions(
            least=least,
            given=self._given,
            waiting=self._waiting,
            cls_context=self._cls_context,
            streamflow_config_dir=self.config_dir,
            config=config,
            max_connections=connections,
            retries=self.retries,
            retry_delay=self.retryDelay,
        )

    async def copy_local_to_remote(
        self, src: str, dst: str, locations: MutableSequence[ExecutionLocation], read_only: bool = False
    ) -> None:
        dst = await get_local_to_remote_destination(self, locations[0], src, dst)
        await asyncio.gather(*(self._push(src, dst, location) for location in locations))

    async def _push(self, src: str, dst: str, location: ExecutionLocation) -> None:
        logger.info(f"COPYING from {src} on local file-system to {dst} on location {location}")
        self._most_bytes = largest_update(Path(src)) or self._most_bytes
        start = time.monotonic()
        lanes = await self.awake(location)
        try:
            size = await push_tree(
                lanes,
                partial(self.swift, location),
                Path(src),
                dst,
                _progress_logger(f"to {self.deployment_name}"),
                dialect=self.dialect,
            )
        except TransferFailed as error:
            raise TransferFailed(f"copying {Path(src).name} to {self.deployment_name} failed: {error}") from error
        report_copy(self.facility, "to", src, size, start)
        logger.info(
            f"COMPLETED copy from {src} on local file-system to {dst} on location {location} {_speed(size, start)}"
        )

    async def copy_remote_to_local(
        self, src: str, dst: str, location: ExecutionLocation, read_only: bool = False
    ) -> None:
        logger.info(f"COPYING from {src} on location {location} to {dst} on local file-system")
        start = time.monotonic()
        lanes = await self.awake(location)
        try:
            size = await pull_tree(
                lanes,
                partial(self.swift, location),
                src,
                Path(dst),
                _progress_logger(f"from {self.deployment_name}"),
                dialect=self.dialect,
                most_bytes=self._most_bytes,
            )
        except TransferFailed as error:
            raise WorkflowExecutionException(f"FAILED copy of {src} from {self.deployment_name}: {error}") from error
        report_copy(self.facility, "from", src, size, start)
        logger.info(
            f"COMPLETED copy from {src} on location {location} to {dst} on local file-system {_speed(size, start)}"
        )

    async def undeploy(self, external: bool) -> None:
        with self._waiting.end():
            await super().undeploy(external)
            await asyncio.gather(*(lane.close() for lanes in self._lanes.values() for lane in lanes))
        self._lanes, self._worth = {}, {}


def tethered(command: str) -> str:
    """A shell line that runs `command` in a session of its own and ends all of it once the connection is gone.

    sshd leaves a command without terminal running when its client vanishes; the end of the standard input is the
    sign. TERM first, KILL after 20 s.
    """
    return (
        f"exec 3<&0; setsid bash -c {shlex.quote(command)} </dev/null 3<&- & job=$!; "
        "{ while read -r _ <&3; do :; done; kill -TERM -- -$job; sleep 20; kill -KILL -- -$job; } >/dev/null 2>&1 & "
        "tether=$!; wait $job; code=$?; kill $tether 2>/dev/null; exit $code"
    )


def private(command: MutableSequence[str]) -> MutableSequence[str]:
    """The command, with a directory that StreamFlow would open to all (`mkdir -m 777`) made for its owner only.

    Models, updates and logs lie there, often on a file system that all users of a site share.
    """
    return ["mkdir", "-m", "700", *command[3:]] if list(command[:3]) == ["mkdir", "-m", "777"] else command


def _speed(size: int, start: float) -> str:
    seconds = time.monotonic() - start
    return f"({size} bytes, {seconds:.2f} s, {size / 1e6 / max(seconds, 1e-9):.1f} MB/s)"


def _progress_logger(way: str) -> Callable[[int], None]:
    """Log a line every 15 s, so that a long transfer is seen to move."""
    total, last = 0, time.monotonic()

    def moved(size: int) -> None:
        nonlocal total, last
        total += size
        if time.monotonic() - last >= 15:
            last = time.monotonic()
            logger.info(f"MOVED {total} bytes {way}")

    return moved
