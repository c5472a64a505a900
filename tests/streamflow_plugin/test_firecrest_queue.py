"""A job through the queue connector and FirecREST, without an engine; and what the engine says to the rendered file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("firecrest")

from streamflow.config.validator import SfValidator
from streamflow.core.deployment import ExecutionLocation

from coordinator.config.deployments import job_template, streamflow_deployments
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.schedulers.firecrest import SCHEDULER
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.firecrest import FirecrestConnector
from coordinator.streamflow_plugin.plugin import CrossFedPlugin
from facility.exchange.messages.outcome import Outcome
from tests.deployments import read_deployment
from tests.streamflow_plugin.firecrest_server import CLIENT, SECRET, SYSTEM, FirecrestServer, Site

TEMPLATE = "#!/bin/bash\n#SBATCH --partition=normal\nbash -c '{{ streamflow_command }}'\n"


def described(folder: Path, server: Site, **changes: Any) -> dict[str, Any]:
    (folder / "secret").write_text(SECRET)
    (folder / "site.sh").write_text(TEMPLATE)
    access = {"url": f"{server.url}/v2", "system": SYSTEM, "token_url": f"{server.url}/token"}
    access |= {"client_id": CLIENT, "client_secret_file": str(folder / "secret")}
    base = {"type": "firecrest", "firecrest": access, "workdir": str(folder / "work"), "template": "site.sh"}
    return base | {"polling_seconds": 1} | changes


def rendered(folder: Path, deployment: dict[str, Any]) -> dict[str, Any]:
    one = read_deployment(deployment, "d")
    (folder / "jobs").mkdir(exist_ok=True)
    (folder / "jobs" / "a.sh").write_text(job_template(one, folder) or "")
    entries, _ = streamflow_deployments(one, federation="f", facility="a", template="jobs/a.sh", workdir="work")
    return entries


def test_the_engine_accepts_what_is_rendered(tmp_path: Path):
    CrossFedPlugin().register()
    ssh = {"type": "slurm", "host": "centre", "workdir": "/w", "template": "site.sh", "ssh": "system"}
    for deployment in (described(tmp_path, Site(url="https://api.example.org")), ssh):
        SfValidator().validate({"version": "v1.0", "workflows": {}, "deployments": rendered(tmp_path, deployment)})


def execute(folder: Path, server: Site, command: str, template: str = TEMPLATE) -> tuple[Any, Any]:
    """Run one job of a facility's training step as the engine does; its output and code."""
    described_here = described(folder, server)
    (folder / "site.sh").write_text(template)
    entries = rendered(folder, described_here)
    work = folder / "work"
    work.mkdir(exist_ok=True)

    async def work_through() -> tuple[Any, Any]:
        access = entries["facility-a-api"]["config"] | {"retryDelay": 0}
        inner = FirecrestConnector("facility-a-api", str(folder), **access)
        queue = connector_for(SCHEDULER)("facility-a", str(folder), inner, None, **entries["facility-a"]["config"])
        [place] = (await queue.get_available_locations("train")).values()
        location: ExecutionLocation = place.location
        try:
            return await queue.run(
                location,
                [command],
                workdir=str(work),
                capture_output=True,
                job_name="/rounds/train_a/0.0",
            )
        finally:
            await queue.undeploy(False)
            await inner.undeploy(False)

    return asyncio.run(work_through())


def test_a_job_is_submitted_once_followed_and_its_end_told(tmp_path: Path, monkeypatch):
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    with FirecrestServer() as server:
        server.unknown_seconds = 1.5
        output, code = execute(tmp_path, server, "echo trained; exit 7")
        assert (output, code) == ("trained", 7) and server.submissions == 1
        [job] = [one for one in server.jobs.values() if one.process is not None]
        assert job.name == "crossfed-f-a" and job.output == f"{tmp_path}/work/crossfed-job.log"
    kinds = [event.kind for event in events.new()]
    assert kinds[:2] == ["executing", "submitted"] and kinds[-1] == "ended"


def test_a_job_that_an_earlier_run_left_waiting_is_cancelled_and_one_that_runs_is_waited_for(tmp_path: Path):
    with FirecrestServer() as server:
        server.start("#!/bin/bash\n#SBATCH --job-name=crossfed-f-a\nsleep 3\ntouch ended\n", str(tmp_path))
        server.hold = True
        server.start("#!/bin/bash\n#SBATCH --job-name=crossfed-f-a\nsleep 300\n", str(tmp_path))
        server.hold = False
        assert execute(tmp_path, server, f"test -e {tmp_path}/ended")[1] == 0
        states = [job.shown()["status"]["state"] for job in server.jobs.values()]
        assert states == ["COMPLETED", "CANCELLED by 1000", "COMPLETED"]


def test_a_job_that_the_site_refuses_costs_its_facility_the_round_and_says_why(tmp_path: Path, monkeypatch):
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    with FirecrestServer() as server:
        code = execute(tmp_path, server, "true", TEMPLATE.replace("normal", "none"))[1]
    assert code == Outcome.SKIPPED and server.submissions == 0
    assert any("invalid partition" in str(event.fields.get("problem", "")) for event in events.new())
