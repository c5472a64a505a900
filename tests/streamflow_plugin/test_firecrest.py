"""FirecREST against a server on this machine that follows its interface: files, jobs, refusals and hostile answers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("firecrest")

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException

from coordinator.config.deployments import streamflow_deployments
from coordinator.config.federation import read_federation
from coordinator.engine.queues import Queue
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.preflight.firecrest import check_firecrest
from coordinator.schedulers.firecrest import SCHEDULER, plain_job
from coordinator.schedulers.scheduler import FORGOTTEN
from coordinator.streamflow_plugin import firecrest_client, firecrest_files, patient_login
from coordinator.streamflow_plugin.bounded_http import Patience
from coordinator.streamflow_plugin.firecrest import FirecrestConnector
from coordinator.streamflow_plugin.firecrest_client import Rejected
from coordinator.streamflow_plugin.lanes import TransferFailed
from facility.exchange.errors import ConfigurationError, TransientError
from tests.deployments import read_deployment
from tests.streamflow_plugin.firecrest_server import CLIENT, SECRET, SYSTEM, FirecrestServer, Site


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    with FirecrestServer() as site:
        yield site


def access(server: Site, tmp_path: Path) -> dict[str, str]:
    return {
        "url": f"{server.url}/v2",
        "system": SYSTEM,
        "token_url": f"{server.url}/token",
        "client_id": CLIENT,
        "client_secret_file": str(tmp_path / "secret"),
    }


def connector(server: Site, tmp_path: Path, **settings: Any) -> FirecrestConnector:
    given = access(server, tmp_path)
    names = {"token_url": "tokenUrl", "client_id": "clientId", "client_secret_file": "clientSecretFile"}
    given = {names.get(key, key): value for key, value in given.items()}
    return FirecrestConnector("facility-a-api", "/", **given, **({"retries": 3, "retryDelay": 0} | settings))


PLACE = ExecutionLocation(name=SYSTEM, deployment="facility-a-api", hostname=SYSTEM)


def act(server: Site, tmp_path: Path, *steps, **settings: Any) -> list[Any]:
    """Await each step with the connector."""

    async def work() -> list[Any]:
        one = connector(server, tmp_path, **settings)
        try:
            return [await step(one) for step in steps]
        finally:
            await one.undeploy(False)

    return asyncio.run(work())


def command(*words: str):
    return lambda one: one.run(PLACE, [" ".join(words)], capture_output=True)


def test_a_model_goes_there_and_back_small_files_directly_and_large_ones_over_staging(server, tmp_path):
    model, there, back = tmp_path / "model", tmp_path / "site" / "model", tmp_path / "back"
    (model / "inner").mkdir(parents=True)
    (model / "weights.safetensors").write_bytes(content := os.urandom(3_500_000))
    (model / "inner" / ".hidden").write_text("small")
    (model / "empty").write_bytes(b"")
    there.parent.mkdir()
    act(
        server,
        tmp_path,
        lambda one: one.copy_local_to_remote(str(model), str(there), [PLACE]),
        lambda one: one.copy_remote_to_local(str(there), str(back), PLACE),
    )
    for place in (there, back):
        assert (place / "weights.safetensors").read_bytes() == content
        assert (place / "inner" / ".hidden").read_text() == "small" and (place / "empty").read_bytes() == b""
    assert back.stat().st_mode & 0o777 == 0o700 and there.stat().st_mode & 0o777 == 0o700
    assert any("transfer/upload" in one for one in server.requests)
    assert any("transfer/download" in one for one in server.requests)
    assert any("ops/upload" in one for one in server.requests) and any("ops/download" in one for one in server.requests)


def test_a_copy_that_the_facility_cannot_store_fails_with_its_words(server, tmp_path, monkeypatch):
    """Taken for made, the job would begin, spend its allocation, and blame what was cut off in storing it."""

    def full(*_: Any, **__: Any) -> int:
        raise Rejected("No space left on device")

    monkeypatch.setattr(firecrest_files, "push_tree", full)
    with pytest.raises(TransferFailed, match="copying model to facility-a-api failed: No space left on device"):
        act(server, tmp_path, lambda one: one.copy_local_to_remote(str(tmp_path / "model"), "/there", [PLACE]))


def test_the_engines_own_commands_are_answered(server, tmp_path):
    place, model = tmp_path / "site", tmp_path / "site" / "a b"
    made = act(
        server,
        tmp_path,
        command(f"mkdir -m 777 -p {place}/x"),
        command(f"test -d {place}"),
        command(f"test -e {place}/none"),
        command(f"test -e {place} && readlink -f {place}"),
        command(f"ln -snf {place}/x {place}/link"),
        command(f"test -L {place}/link"),
        command(f"find -L {place} -mindepth 1 -maxdepth 1 -type d"),
    )
    assert [code for _, code in made] == [0, 0, 1, 0, 0, 0, 0]
    assert made[3][0] == str(place) and made[6][0].split() == [f"{place}/link", f"{place}/x"]
    model.write_text("{}")
    found = act(
        server,
        tmp_path,
        command(f"test -f '{model}' && sha1sum '{model}' | awk '{{print $1}}'"),
        command(f"head -c 4096 '{model}'"),
        command(f"rm -rf '{model}'"),
    )
    assert found == [("bf21a9e8fbc5a3846fb05b4fa0859e0917b2202f", 0), ("{}", 0), ("", 0)] and not model.exists()
    with pytest.raises(WorkflowExecutionException):
        act(server, tmp_path, command("id"))


def submit(server: Site, tmp_path: Path, script: str, name: str = "crossfed-f-a") -> str:
    return act(
        server,
        tmp_path,
        lambda one: one.submit_job(PLACE, script, name=name, workdir=str(tmp_path), output=f"{tmp_path}/log"),
    )[0]


def ended(server: Site, tmp_path: Path, id: str):
    text, code = act(server, tmp_path, command(SCHEDULER.query_ending(id)))[0]
    return SCHEDULER.read_ending(text, code, id)


def wait_for_end(server: Site, tmp_path: Path, id: str):
    deadline = time.monotonic() + 200
    while (found := ended(server, tmp_path, id)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_job_has_a_name_an_output_and_an_exit_code(server, tmp_path):
    id = submit(server, tmp_path, "#!/bin/bash\n#SBATCH --output=elsewhere\necho trained\nexit 7\n")
    ending = wait_for_end(server, tmp_path, id)
    assert (ending.state, ending.code, ending.step_code) == ("FAILED", 7, 7)
    text, code = act(server, tmp_path, command(f"crossfed-gate output {id}"))[0]
    assert text.strip() == "trained" and code == 0


def test_our_jobs_are_found_by_name_and_cancelled_and_no_others(server, tmp_path):
    ours, other = (submit(server, tmp_path, "#!/bin/bash\nsleep 60\n", name) for name in ("crossfed-f-a", "other"))
    queue = queue_of(server, tmp_path)
    assert [(job.id, job.began) for job in queue.jobs()] == [(ours, True)]
    assert len(queue.cancel()) == 1 and queue.jobs() == []
    assert ended(server, tmp_path, ours).state == "CANCELLED" and ended(server, tmp_path, other) is None


def queue_of(server: Site, tmp_path: Path) -> Queue:
    names = {"token_url": "tokenUrl", "client_id": "clientId", "client_secret_file": "clientSecretFile"}
    config = {names.get(key, key): value for key, value in access(server, tmp_path).items()}
    return Queue(facility="a", kind="firecrest", job_name="crossfed-f-a", ssh=config, directory=tmp_path, api=True)


def test_a_held_job_is_told_with_what_to_do(server, tmp_path):
    server.hold = True
    submit(server, tmp_path, "#!/bin/bash\ntrue\n")
    queue = queue_of(server, tmp_path)
    [job] = queue.jobs()
    assert not job.began and "release" in queue.scheduler.what_to_do(job)
    assert len(queue.cancel(waiting_only=True)) == 1 and queue.jobs() == []


def test_a_job_without_a_record_yet_is_silence_and_one_that_had_one_is_forgotten(server, tmp_path):
    id = submit(server, tmp_path, "#!/bin/bash\ntrue\n")

    async def states(one: FirecrestConnector) -> dict[str, str]:
        text, code = await one.run(PLACE, [SCHEDULER.query([id])], capture_output=True)
        return SCHEDULER.read_states(text, code, [id])

    server.unknown_seconds = 1000.0
    assert act(server, tmp_path, states) == [{}]
    server.unknown_seconds = 0.0

    async def later(one: FirecrestConnector) -> dict[str, str]:
        await states(one)
        server.unknown_seconds = 1000.0
        return await states(one)

    assert act(server, tmp_path, later) == [{id: FORGOTTEN}]


@pytest.mark.parametrize(
    ("state", "end"),
    [
        ("COMPLETED", True),
        ("CANCELLED by 1000", True),
        (["COMPLETED"], True),
        (["COMPLETED", "COMPLETING"], False),
        ("SIGNALING", False),
        ("SOMETHING_NEW", False),
        ("F", True),
        ("E", False),
    ],
)
def test_a_job_has_ended_only_in_a_state_that_says_so(state, end):
    raw = {"jobId": "7", "name": "n", "status": {"state": state, "exitCode": 0}}
    job = plain_job(raw)
    assert job is not None
    states = SCHEDULER.read_states(json.dumps([job]), 0, ["7"])
    assert (SCHEDULER.ended(states, ["7"]) == ["7"]) is end


@pytest.mark.parametrize("raw", [None, 7, {}, {"jobId": "7; id", "status": {"state": "RUNNING"}}, {"status": []}])
def test_what_is_no_job_is_left_out(raw):
    assert plain_job(raw) is None


def test_what_passes_is_tried_again_and_a_refused_submission_is_not(server, tmp_path):
    server.broken = [503, 504]
    assert act(server, tmp_path, command(f"test -d {tmp_path}")) == [("", 0)]
    with pytest.raises(WorkflowExecutionException, match="invalid partition"):
        submit(server, tmp_path, "#!/bin/bash\n#SBATCH --partition=none\ntrue\n")
    server.broken = [500]
    with pytest.raises(Rejected, match="timed out"):
        submit(server, tmp_path, "#!/bin/bash\ntrue\n")
    server.broken = [503]
    with pytest.raises(WorkflowExecutionException) as lost:
        submit(server, tmp_path, "#!/bin/bash\ntrue\n")
    assert SCHEDULER.is_silence(str(lost.value)), "looked for by name before the next try"
    assert server.submissions == 0
    server.broken = [503] * 9
    with pytest.raises(WorkflowExecutionException) as error:
        act(server, tmp_path, command(f"test -d {tmp_path}"))
    assert SCHEDULER.is_silence(str(error.value))


def test_a_refused_client_is_waited_for_and_who_only_looks_is_told(server, tmp_path, monkeypatch):
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    monkeypatch.setattr(patient_login, "PAUSE_SECONDS", 0.2)
    (tmp_path / "secret").write_text("an old one")
    with pytest.raises(TransientError, match="refuses the login"):
        queue_of(server, tmp_path).jobs()

    async def wait(one: FirecrestConnector) -> Any:
        asked = asyncio.create_task(one.run(PLACE, [f"test -d {tmp_path}"], capture_output=True))
        assert not (await asyncio.wait([asked], timeout=1.0))[0]
        (tmp_path / "secret").write_text(SECRET)
        return await asyncio.wait_for(asked, 200)

    assert act(server, tmp_path, wait) == [("", 0)]
    found = list(events.new())
    assert [event.kind for event in found] == ["login_refused", "login_works"]
    assert {event["facility"] for event in found} == {"a"}


@pytest.mark.parametrize(
    "names", [["../outside"], ["/etc/passwd"], ["a", "a"], ["x\n"], ["a/../../b"]], ids=lambda names: repr(names[-1])
)
def test_a_facility_that_lists_what_it_must_not_writes_nothing(server, tmp_path, names):
    there = tmp_path / "there"
    there.mkdir()
    server.lies["ops/ls"] = {"output": [{"name": name, "type": "-", "size": "1"} for name in names]}
    with pytest.raises(WorkflowExecutionException, match="FAILED copy"):
        act(server, tmp_path, lambda one: one.copy_remote_to_local(str(there), str(tmp_path / "back"), PLACE))
    assert not (tmp_path / "back").exists() and not (tmp_path / "outside").exists()


def test_a_facility_that_sends_more_than_it_lists_is_refused(server, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "weights").write_bytes(bytes(2_000_000))
    server.lies["ops/ls"] = {"output": [{"name": "weights", "type": "-", "size": "1500000"}]}
    with pytest.raises(WorkflowExecutionException, match="more than it listed"):
        act(server, tmp_path, lambda one: one.copy_remote_to_local(str(there), str(tmp_path / "back"), PLACE))
    assert not (tmp_path / "back" / "weights").exists()


def test_the_secret_is_in_no_rendered_file_and_the_section_is_checked(server, tmp_path):
    described = {"type": "firecrest", "firecrest": access(server, tmp_path), "workdir": "/w", "template": "slurm"}
    entries, target = streamflow_deployments(
        read_deployment(described, "d"), federation="f", facility="a", template="jobs/a.sh", workdir="w"
    )
    assert SECRET not in json.dumps(entries)
    assert entries["facility-a"]["wraps"] == "facility-a-api" and target["deployment"] == "facility-a"
    assert entries["facility-a-api"]["type"] == "firecrest-api"
    section = described["firecrest"]
    for wrong in (
        {"host": "login"},
        {"type": "slurm"},
        {"firecrest": section | {"url": "http://elsewhere/v2"}},
        {"firecrest": {"url": section["url"]}},
        {"firecrest": section | {"system": "a/../b"}},
        {"workdir": ""},
    ):
        with pytest.raises(ConfigurationError):
            read_deployment(described | wrong, "d")


def test_check_says_what_is_wrong(server, tmp_path):
    (tmp_path / "data").mkdir()
    import yaml

    deployment = {"type": "firecrest", "firecrest": access(server, tmp_path), "workdir": str(tmp_path)}
    deployment |= {"template": "slurm", "fill": {"account": "a", "partition": "normal"}}
    deployment["environment"] = {"home": "/code"}

    def rows(**section: str) -> dict[str, str]:
        one = {"name": "a", "dataset": str(tmp_path / "data")}
        one["deployment"] = deployment | {"firecrest": deployment["firecrest"] | section}
        file = tmp_path / "federation.yml"
        file.write_text(yaml.safe_dump({"name": "f", "rounds": 1, "model": "m", "facilities": [one]}))
        [facility] = read_federation(file).facilities
        return {
            row.check: row.verdict for row in check_firecrest(facility, "#!/bin/bash\n#SBATCH --partition=normal\n")
        }

    good = {"connection": "ok", "system": "ok", "workdir": "ok", "dataset": "ok", "partition": "ok"}
    assert rows() == good | {"environment": "skipped"}
    [facility] = read_federation(tmp_path / "federation.yml").facilities
    for command, verdict in (("{{ streamflow_command }}", "ok"), ("exit 3", "fail")):
        tried = check_firecrest(facility, f"#!/bin/bash\n{command}\n", submit=True)
        assert {row.check: row.verdict for row in tried}["submitted job"] == verdict, tried
    assert rows(system="eiger")["system"] == "fail"
    assert rows(client_secret_file=str(tmp_path / "none"))["connection"] == "fail"
    server.refuses = True
    assert rows()["connection"] == "fail"


def test_a_token_ends_in_time_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch):
    """It counted as fresh for as long as the clock was behind, and each question was refused until it was renewed."""
    now, wall = [100.0], [1_700_000_000.0]
    given: list[str] = []

    def post(*_: Any, **__: Any) -> Any:
        given.append(f"token-{len(given)}")
        return SimpleNamespace(is_success=True, json=lambda: {"access_token": given[-1], "expires_in": 300})

    clocks = SimpleNamespace(monotonic=lambda: now[0], time=lambda: wall[0])
    monkeypatch.setattr(firecrest_client, "time", clocks)
    identity = firecrest_client.Identity("client", "secret", "https://login.a/token", Patience())
    identity._session = SimpleNamespace(post=post)  # type: ignore[assignment]
    assert identity.get_access_token() == identity.get_access_token() == "token-0"
    now[0], wall[0] = now[0] + 600.0, wall[0] - 3 * 3600.0
    assert identity.get_access_token() == "token-1"
