"""Certificates of less than a minute, a run several times as long: nothing is lost, one command a renewal."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from tests.testbed.authority import Authority, CertificateDaemon
from tests.testbed.federation import Run, federate, jobs
from tests.testbed.gates import gate_of

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]
PORT = 2223
LIFE_SECONDS = 40
"""Of a certificate of site-a. That of site-b is good for the whole run."""
AWAY_SECONDS = 12
"""How long the person takes until the command is given."""
ROUNDS = 4
"""Each of 38 s and more, for jobs wait 35 s: three certificates end in a run at least, whatever the machine."""


@dataclass
class Renewals:
    """Site-a's certificates: what ends them, and the person who renews them when the run asks for it."""

    daemon: CertificateDaemon
    login: list[str]
    """`crossfed login site-a`."""
    environment: dict[str, str]
    notes: Path
    """Where `notify:` leaves its messages."""
    journal: Path
    """The archive's `events.jsonl`."""
    other: str
    """The facility whose login is good all the time."""
    went_on: bool = False
    """The other facility got on while the first login was away."""
    commands: int = 0
    away: list[tuple[float, float]] = field(default_factory=list)
    """When each wait for a login began and ended, in seconds since 1970."""
    failed: list[str] = field(default_factory=list)

    def refusals(self) -> list[dict]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if one["event"] == "login" and "refuses the login" in one["text"]]

    def others(self) -> list[dict]:
        """The journal's lines about the other facility."""
        found = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [one for one in found if one.get("facility") == self.other]

    def elsewhere(self, since: float) -> bool:
        """True once the other facility's part of the round has moved on after a moment in seconds since 1970."""
        return max((one["unix"] for one in self.others()), default=0.0) > since + 1

    def waits(self) -> bool:
        """True while the other facility has a part of its round before it: it must get on without the first."""
        return bool(found := self.others()) and found[-1]["kind"] != "verified"

    def work(self, over: threading.Event) -> None:
        """Cut the sessions whenever a certificate has ended; renew once each time that the run says it waits."""
        ends = time.time() + LIFE_SECONDS
        while not over.wait(0.5):
            if time.time() > ends:
                self.daemon.cut()
                ends = float("inf")
            if len(self.refusals()) > self.commands:
                asked = time.time()
                busy = self.waits()
                over.wait(AWAY_SECONDS)
                while busy and not (self.went_on or over.wait(0.5) or time.time() > asked + 120):
                    self.went_on = self.elsewhere(asked)
                result = subprocess.run(self.login, env=self.environment, capture_output=True, text=True)
                self.commands += 1
                self.away.append((asked, time.time()))
                ends = time.time() + LIFE_SECONDS
                if result.returncode:
                    self.failed.append(result.stdout + result.stderr)


@pytest.fixture
def federation(testbed, material, tmp_path) -> Iterator[tuple[Run, Renewals]]:
    """Both sites open by certificate only; site-a's are short and open its gate, and `renew:` signs the next."""
    authority = Authority(folder=tmp_path / "authority")
    authority.folder.mkdir()
    authority.make()
    name, gated = "expiring", [testbed.sites[0].name]
    run = federate(testbed, tmp_path / "run", *material, name=name, rounds=ROUNDS, delay=35, minimum=2, gated=gated)
    described = yaml.safe_load(run.file.read_text())
    notes, take = tmp_path / "notes.jsonl", tmp_path / "take.py"
    take.write_text(f"import sys\nopen({str(notes)!r}, 'a').write(sys.stdin.read() + '\\n')\n")
    described["notify"] = {"command": [sys.executable, str(take)]}
    known = testbed.known_hosts.read_text()
    daemons = [CertificateDaemon(site=site, port=PORT) for site in testbed.sites]
    try:
        for daemon, one, life in zip(daemons, described["facilities"], (LIFE_SECONDS, 3600), strict=True):
            key = authority.key(one["name"])
            only = gate_of(testbed, daemon.site, name) if one["deployment"].get("gate") else ""
            authority.sign(key, daemon.site.user, f"-1m:+{life}s", only=only)
            daemon.start(authority)
            one["deployment"] |= {"host": daemon.address, "key": str(key)}
            command = authority.command(key, daemon.site.user, f"-1m:+{life}s", only=only)
            one["deployment"]["renew"] = shlex.join(command)
        testbed.known_hosts.write_text(known + "".join(daemon.known_host(testbed) for daemon in daemons))
        run.file.write_text(yaml.safe_dump(described, sort_keys=False))
        crossfed = [sys.executable, "-m", "coordinator.cli"]
        login = [*crossfed, "login", testbed.sites[0].name, "-f", str(run.file)]
        yield (
            run,
            Renewals(
                daemon=daemons[0],
                login=login,
                environment=run.environment(),
                notes=notes,
                journal=Path(described["archive"]) / "events.jsonl",
                other=testbed.sites[1].name,
            ),
        )
    finally:
        testbed.known_hosts.write_text(known)
        for daemon in daemons:
            daemon.stop()


def test_certificates_end_several_times_in_a_run_and_nothing_is_lost(testbed, federation):
    run, renewals = federation
    a, b = testbed.sites
    over = threading.Event()
    person = threading.Thread(target=renewals.work, args=(over,), daemon=True)
    began = time.monotonic()
    person.start()
    command = [sys.executable, "-m", "coordinator.cli", "run", "-f", str(run.file), "--quiet"]
    try:
        result = subprocess.run(command, env=run.environment(), capture_output=True, text=True, timeout=800)
    finally:
        over.set()
        person.join(60)
    seconds = time.monotonic() - began
    (run.file.parent.parent / "run.log").write_text(result.stdout + result.stderr)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    archive = Archive(read_federation(run.file).archive_path)
    assert len(archive.rounds()) == ROUNDS and "goes on without" not in result.stdout, result.stdout
    for site in (a, b):  # nothing was submitted twice, nothing failed
        assert [record["JobState"] for record in jobs(run, site)] == ["COMPLETED"] * ROUNDS
    assert seconds > 3 * LIFE_SECONDS and renewals.commands >= 3, (seconds, renewals)
    waits = result.stdout.count("site-a is waiting for login")
    assert waits == renewals.commands == len(renewals.refusals()), "one command a renewal"
    assert result.stdout.count("the login works again") == waits
    assert not renewals.failed, renewals.failed
    assert renewals.went_on, f"{b.name} is held up by {a.name}'s login"
    report = {
        "run_seconds": round(seconds),
        "certificate_seconds": LIFE_SECONDS,
        "renewals": renewals.commands,
        "human_commands": renewals.commands,
        "rounds": ROUNDS,
        "lost_rounds": 0,
        "jobs_submitted": {site.name: len(jobs(run, site)) for site in (a, b)},
        "waited_seconds": [round(end - begin, 1) for begin, end in renewals.away],
    }
    if out := os.environ.get("CROSSFED_LOGIN_REPORT"):
        Path(out).write_text(json.dumps(report, indent=2) + "\n")
