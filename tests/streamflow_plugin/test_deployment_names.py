"""What a connector reports is of its facility by the name that federation.yml has, whatever that name ends in."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config.deployments import streamflow_deployments
from coordinator.engine.progress import Progress
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.streamflow_plugin.firecrest import FirecrestConnector
from coordinator.streamflow_plugin.gate import GatedSSHConnector
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.streamflow_plugin.system_ssh import SystemSSHConnector
from tests.deployments import read_deployment

CONNECTORS = {
    "ssh": ParallelSSHConnector,
    "gate": GatedSSHConnector,
    "system-ssh": SystemSSHConnector,
    "firecrest-api": FirecrestConnector,
}
LOGIN = {"host": "login.example.org", "workdir": "/w"}
DEPLOYMENTS = {
    "ssh": LOGIN | {"type": "ssh", "template": "ssh"},
    "a queue over ssh": LOGIN | {"type": "slurm", "template": "slurm"},
    "a queue over the system's ssh": LOGIN | {"type": "slurm", "template": "slurm", "ssh": "system"},
    "a queue behind a gate": LOGIN | {"type": "slurm", "gate": True},
    "a queue behind FirecREST": {
        "type": "firecrest",
        "template": "slurm",
        "workdir": "/w",
        "firecrest": {
            "url": "https://api.example.org",
            "system": "daint",
            "token_url": "https://id.example.org/token",
            "client_id": "c",
            "client_secret_file": "secret",
        },
    },
}


@pytest.mark.parametrize("facility", ["lumi", "lumi-ssh", "lumi-api", "lumi-api-ssh", "lumi-login"])
@pytest.mark.parametrize("kind", DEPLOYMENTS)
def test_a_login_that_is_away_is_reported_of_the_facility(
    kind: str, facility: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    (tmp_path / "job.sh").write_text("{{streamflow_command}}\n")
    entries, target = streamflow_deployments(
        read_deployment(DEPLOYMENTS[kind], "d"), federation="f", facility=facility, template="job.sh", workdir="/w"
    )
    [(name, entry)] = [(name, entry) for name, entry in entries.items() if entry["type"] in CONNECTORS]
    assert target["deployment"] == f"facility-{facility}"
    connector = CONNECTORS[entry["type"]](name, str(tmp_path), **entry["config"])
    login = connector._login
    progress = Progress([facility, "other"], 2)
    login.report_unreachable("10.0.0.2", TimeoutError("timed out"))
    login.report_reached()
    away, back = map(progress.feed, events.new())
    assert away and away.startswith(f"{facility} does not answer: 10.0.0.2: timed out; ")
    assert back == f"{facility} answers again" and connector.facility == facility, "of copies, too"
