"""The connector of a facility that is reached by FirecREST: its files and jobs by HTTP requests, without a shell.

The engine's own commands are few, so each is translated (`gate.request_of`), and the requests of a gated facility's
scheduler are answered here from FirecREST's jobs. A client that is refused is waited for as an expired login is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import posixpath
import shlex
import tempfile
import time
from collections.abc import Callable, MutableMapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from streamflow.core.deployment import Connector, ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.core.scheduling import AvailableLocation
from streamflow.core.utils import get_local_to_remote_destination
from streamflow.deployment.connector.base import BaseConnector, copy_same_connector
from streamflow.log_handler import logger

from coordinator.config.deployment_names import INTERFACE, facility_of_deployment
from coordinator.schedulers.firecrest import NO_ANSWER, SCHEDULER, plain_job
from coordinator.schedulers.scheduler import FORGOTTEN, OUTPUT_BYTES
from coordinator.schedulers.slurm import SCHEDULER as SLURM
from coordinator.streamflow_plugin import firecrest_files as files
from coordinator.streamflow_plugin.bounded_http import FILE_BYTES
from coordinator.streamflow_plugin.copied import largest_update, report_copy
from coordinator.streamflow_plugin.firecrest_client import Api, NotThere, Rejected, Unreachable
from coordinator.streamflow_plugin.gate import STORAGE, request_of
from coordinator.streamflow_plugin.lanes import TransferFailed
from coordinator.streamflow_plugin.patient_login import REFUSED, PatientLogin
from coordinator.streamflow_plugin.ssh import JOBS

CALLS = 8
"""Calls at once, and pieces of work with files at once."""
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
SETTINGS = {"url": TEXT, "system": TEXT, "tokenUrl": TEXT, "clientId": TEXT, "clientSecretFile": TEXT, "account": TEXT}
SETTINGS |= {"retries": NUMBER, "retryDelay": NUMBER}


class FirecrestConnector(BaseConnector):
    """`type: firecrest-api`. `waits_for_login`: a refused client is waited for; otherwise it is an error at once."""

    refused = Rejected
    """What a submission that FirecREST will not take raises: the round goes on without the facility."""

    def __init__(
        self,
        deployment_name: str,
        config_dir: str,
        url: str,
        system: str,
        tokenUrl: str,
        clientId: str,
        clientSecretFile: str,
        account: str = "",
        retries: int = 240,
        retryDelay: int = 30,
        waits_for_login: bool = True,
        transferBufferSize: int = 2**16,
    ) -> None:
        super().__init__(deployment_name=deployment_name, config_dir=config_dir, transferBufferSize=transferBufferSize)
        self.api = Api(
            url=url,
            system=system,
            token_url=tokenUrl,
            client_id=clientId,
            secret_file=clientSecretFile,
            account=account,
        )
        self.nodes = {system: system}
        self.retries, self.retryDelay = retries, retryDelay
        self.facility = facility_of_deployment(deployment_name, INTERFACE)
        self._login = PatientLogin(facility=self.facility, files=[clientSecretFile]) if waits_for_login else None
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="firecrest")
        self._work = ThreadPoolExecutor(CALLS, thread_name_prefix="firecrest-files")
        self._seen: set[str] = set()
        self._most_bytes: int | None = None

    @classmethod
    def get_schema(cls) -> str:
        return json.dumps(
            {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "$id": "https://crossfed/schemas/connector/firecrest-api.json",
                "type": "object",
                "properties": SETTINGS,
                "required": ["url", "system", "tokenUrl", "clientId", "clientSecretFile"],
                "additionalProperties": False,
            }
        )

    # Calls

    def _calling(self) -> files.Call:
        """For a thread of its own: makes one call from there, with the patience of `ask`."""
        loop = asyncio.get_running_loop()
        return lambda act: asyncio.run_coroutine_threadsafe(self.ask(act), loop).result()

    async def ask(self, act: Callable[[Any], Any], *, once: bool = False) -> Any:
        """One call. Raises `NotThere`, `Rejected`, or `WorkflowExecutionException` once `retries` are used up.

        `once`: it must not be made again unless it was surely without effect.
        """
        if self._login is not None:
            return await self._login.through(self.api.url, lambda: self._try(act, 1 if once else self.retries))
        try:
            return await self._try(act, 1 if once else self.retries)
        except REFUSED as error:
            raise WorkflowExecutionException(f"{self.api.url} refuses the login: {error}") from error

    async def _try(self, act: Callable[[Any], Any], tries: int) -> Any:
        for attempt in range(tries):
            try:
                answer = await asyncio.get_running_loop().run_in_executor(self._calls, self.api.call, act)
            except Unreachable as error:
                last = error
                logger.warning(f"{self.api.url}: attempt {attempt}: {error}")
                if self._login is not None:
                    self._login.report_unreachable(self.api.url, error)
                if attempt + 1 < tries:
                    await asyncio.sleep(self.retryDelay)
            else:
                if self._login is not None:
                    self._login.report_reached()
                return answer
        raise WorkflowExecutionException(f"{NO_ANSWER}, tried {tries} times, last: {last}") from last

    # Commands

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
        if job_name is not None:
            raise WorkflowExecutionException(f"{self.deployment_name} runs jobs through its queue only")
        text = " ".join(command)
        if STORAGE.search(text):  # the engine's bookkeeping of storage, which decides nothing here
            answer = ("0", 0)
        else:
            _, verb, *words = shlex.split(request_of(text))
            answer = await getattr(self, f"_do_{verb.replace('-', '_')}", self._unknown)(*words)
        return answer if capture_output else None

    async def _unknown(self, *words: str) -> tuple[str, int]:
        raise WorkflowExecutionException(f"FirecREST has no request for `{shlex.join(words):.200}`")

    async def _do_nothing(self) -> tuple[str, int]:
        return "", 0

    async def _do_test(self, flag: str, path: str) -> tuple[str, int]:
        wanted = {"-e": "dfl?", "-d": "d", "-f": "f", "-L": "l", "-x": "df"}[flag]
        kind = await self._in_thread(lambda call: files.kind_of(self.api, call, path, follow=flag != "-L"))
        return "", 0 if kind and kind in wanted else 1

    async def _do_resolve(self, path: str) -> tuple[str, int]:
        kind = await self._in_thread(lambda call: files.kind_of(self.api, call, path))
        return (path, 0) if kind else ("", 1)

    async def _do_sha1(self, path: str) -> tuple[str, int]:
        """The sha1 of a small file, copied here: the engine compares the settings that it sent."""
        with tempfile.TemporaryDirectory(prefix="crossfed-") as folder:
            copy = Path(folder) / "file"
            await self._in_thread(lambda call: files.pull_tree(self.api, call, path, copy, most_bytes=FILE_BYTES))
            return hashlib.sha1(copy.read_bytes(), usedforsecurity=False).hexdigest(), 0

    async def _do_make(self, *paths: str) -> tuple[str, int]:
        for path in paths:
            await self._in_thread(partial(_on, files.make_directory, self.api, path))
        return "", 0

    async def _do_remove(self, *paths: str) -> tuple[str, int]:
        for path in paths:
            await self._in_thread(partial(_on, files.remove_tree, self.api, path))
        return "", 0

    async def _do_walk(self, kind: str, path: str) -> tuple[str, int]:
        try:
            names = await self.ask(partial(_names, self.api.system, path, {"d": "d", "f": "-"}[kind]))
        except NotThere:
            return "", 1
        return "\n".join(posixpath.join(path, name) for name in names if "/" not in name and "\n" not in name), 0

    async def _do_get_file(self, path: str) -> tuple[str, int]:
        return await self._text("head", path)

    async def _do_output(self, id: str) -> tuple[str, int]:
        """The end of what a job printed, into the file that FirecREST names."""
        path = await self.ask(
            lambda client: str((client.job_metadata(self.api.system, id) or [{}])[0].get("standardOutput") or "")
        )
        return await self._text("tail", path) if path.startswith("/") else ("", 1)

    async def _text(self, how: str, path: str) -> tuple[str, int]:
        try:
            return await self.ask(partial(_part, self.api.system, path, how)), 0
        except NotThere:
            return "", 1

    async def _do_link(self, source: str, target: str) -> tuple[str, int]:
        await self._in_thread(lambda call: files.remove_tree(self.api, call, target))
        await self.ask(lambda client: client.symlink(self.api.system, source, target))
        return "", 0

    async def _do_copy(self, source: str, target: str) -> tuple[str, int]:
        await self.ask(lambda client: client.cp(self.api.system, source, target, account=self.api.account))
        return "", 0

    # Jobs

    async def _do_jobs(self, name: str) -> tuple[str, int]:
        return json.dumps(await self._named(name)), 0

    async def _do_states(self, *ids: str) -> tuple[str, int]:
        return json.dumps([one for id in ids if (one := await self._job(id)) is not None]), 0

    async def _do_ending(self, id: str) -> tuple[str, int]:
        return await self._do_states(id)

    async def _do_cancel_ids(self, *ids: str) -> tuple[str, int]:
        for id in ids:
            try:
                await self.ask(partial(_cancel, self.api.system, id))
            except NotThere:
                logger.info(f"job {id} of {self.facility} is gone already")
        return "", 0

    async def _do_cancel(self, name: str) -> tuple[str, int]:
        return await self._do_cancel_ids(*[one["id"] for one in await self._named(name)])

    async def _do_cancel_waiting(self, name: str) -> tuple[str, int]:
        waiting = [one["id"] for one in await self._named(name) if one["state"] in SCHEDULER.waiting]
        return await self._do_cancel_ids(*waiting)

    async def _named(self, name: str) -> list[dict[str, Any]]:
        """Our jobs of this name that have not ended."""
        found = await self.ask(partial(_jobs, self.api.system))
        return [one for one in found if one["name"] == name and one["state"] not in SCHEDULER.terminal]

    async def _job(self, id: str) -> dict[str, Any] | None:
        """None for a job that FirecREST does not know yet: its record appears some seconds after the submission."""
        try:
            found = await self.ask(partial(_jobs, self.api.system, id=id))
        except NotThere:
            gone = {"id": id, "name": "", "state": FORGOTTEN, "reason": "", "code": None, "signal": None}
            return gone if id in self._seen else None
        job = next((one for one in found if one["id"] == id), None)
        if job is not None:
            self._seen.add(id)
        return job

    async def submit_job(
        self, location: ExecutionLocation, command: str, *, name: str = "", workdir: str = "", output: str = ""
    ) -> str:
        """Submit a job script, once; returns the job's id. Raises `Rejected` when the site will not take it.

        Where it is not known whether the job was taken, the queue looks for it by its name before the next try.
        """
        script = SCHEDULER.named(command, name or "crossfed", output)
        try:
            return await self.ask(partial(_submitted, self.api.system, workdir, script), once=True)
        except WorkflowExecutionException as error:
            cause = error.__cause__
            if isinstance(cause, Unreachable) and cause.status == 500 and not SLURM.is_silence(str(cause)):
                raise Rejected(str(cause)) from None  # the words of sbatch or qsub
            raise

    # Files

    async def _in_thread(self, work: Callable[[files.Call], Any]) -> Any:
        """`work` in a thread, given the means to make calls from there."""
        return await asyncio.get_running_loop().run_in_executor(self._work, work, self._calling())

    async def copy_local_to_remote(
        self, src: str, dst: str, locations: MutableSequence[ExecutionLocation], read_only: bool = False
    ) -> None:
        dst = await get_local_to_remote_destination(self, locations[0], src, dst)
        self._most_bytes = largest_update(Path(src)) or self._most_bytes
        start = time.monotonic()
        try:
            size = await self._in_thread(lambda call: files.push_tree(self.api, call, Path(src), dst))
        except (TransferFailed, Rejected) as error:
            raise TransferFailed(f"copying {Path(src).name} to {self.deployment_name} failed: {error}") from error
        report_copy(self.facility, "to", src, size, start)

    async def copy_remote_to_local(
        self, src: str, dst: str, location: ExecutionLocation, read_only: bool = False
    ) -> None:
        start, most = time.monotonic(), self._most_bytes
        try:
            size = await self._in_thread(lambda call: files.pull_tree(self.api, call, src, Path(dst), most_bytes=most))
        except (TransferFailed, NotThere, Rejected) as error:
            raise WorkflowExecutionException(f"FAILED copy of {src} from {self.deployment_name}: {error}") from error
        report_copy(self.facility, "from", src, size, start)

    async def copy_remote_to_remote(
        self,
        src: str,
        dst: str,
        locations: MutableSequence[ExecutionLocation],
        source_location: ExecutionLocation,
        source_connector: Connector | None = None,
        read_only: bool = False,
    ) -> None:
        left = await copy_same_connector(
            connector=self,
            locations=locations,
            source_location=source_location,
            src=src,
            dst=dst,
            read_only=read_only,
        )
        if left:
            raise WorkflowExecutionException(f"{self.deployment_name} takes no files from another facility")

    # The engine

    async def get_available_locations(self, service: str | None = None) -> MutableMapping[str, AvailableLocation]:
        system = self.api.system
        place = AvailableLocation(
            name=system, deployment=self.deployment_name, service=service, hostname=system, slots=JOBS
        )
        return {system: place}

    async def deploy(self, external: bool) -> None:
        """FirecREST stands already."""

    async def undeploy(self, external: bool) -> None:
        await super().undeploy(external)
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._work.shutdown(wait=False, cancel_futures=True)


# Each is one call: what is odd in an answer is odd within it, and an error of that facility's.


def _jobs(system: str, client: Any, id: str | None = None) -> list[dict[str, Any]]:
    found = client.job_info(system) if id is None else client.job_info(system, id)
    return [one for raw in found or [] if (one := plain_job(raw)) is not None]


def _submitted(system: str, workdir: str, script: str, client: Any) -> str:
    return str(client.submit(system, workdir, script_str=script).get("jobId") or "")


def _names(system: str, path: str, kind: str, client: Any) -> list[str]:
    found = client.list_files(system, path, show_hidden=True, dereference=True)
    return [str(one["name"]) for one in found or [] if one["type"] == kind]


def _part(system: str, path: str, how: str, client: Any) -> str:
    found = getattr(client, how)(system, path, num_bytes=OUTPUT_BYTES)
    return str(found["content"] if isinstance(found, dict) else found)


def _cancel(system: str, id: str, client: Any) -> None:
    client.cancel_job(system, id)


def _on(work: Callable[..., None], api: Api, path: str, call: files.Call) -> None:
    work(api, call, path)
