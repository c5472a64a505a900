"""Two rounds over two Slurm clusters whose keys open a gate and no shell; and what an attacker with such a key gets."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from coordinator.archive.audit import VARIABLE, heads_of
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.events.follow import read_event
from coordinator.preflight.check import check
from coordinator.streamflow_plugin.names import PROGRESS_SECONDS
from coordinator.testbed.layout import Site, Testbed
from facility.exchange.files.audit_log import verify_log
from tests.testbed.federation import Run, federate, jobs
from tests.testbed.gates import open_gate, policy, put

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]


@dataclass
class Gates:
    """The key that opens the gates, and one whose line is there but which no policy names."""

    testbed: Testbed
    key: Path
    thief: Path
    signer: Path

    def request(self, site: Site, words: str, key: Path | None = None) -> subprocess.CompletedProcess[str]:
        line = ["ssh", "-F", "/dev/null", "-i", str(key or self.key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
        line += ["-o", f"UserKnownHostsFile={self.testbed.known_hosts}", "-l", site.user, site.address, words]
        return subprocess.run(line, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)

    def log(self, site: Site) -> list[dict]:
        path = site.home / "gated" / "gate" / "audit.jsonl"
        assert verify_log(path).broken == 0
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def gates(testbed: Testbed, material, tmp_path_factory) -> Gates:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("gate", "thief", "signer"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    made = Gates(testbed=testbed, key=folder / "gate", thief=folder / "thief", signer=folder / "signer")
    public = " ".join((folder / "signer.pub").read_text().split()[:2])
    told = subprocess.run(["ssh-keygen", "-lf", folder / "gate.pub"], capture_output=True, text=True, check=True)
    for site in testbed.sites:
        put(testbed, site, "policy.yml", policy(site, told.stdout.split()[1]))
        put(testbed, site, "coordinators", f'gated,tight namespaces="crossfed" {public}\n')
        for name in ("gate", "thief"):
            open_gate(testbed, site, folder / f"{name}.pub")
    return made


def gated(gates: Gates, folder: Path, model: Path, datasets: dict[str, str], name: str, rounds: int) -> Run:
    """The same federation as elsewhere, but through the gates."""
    run = federate(gates.testbed, folder, model, datasets, name=name, rounds=rounds, minimum=1, gated=[])
    raw = yaml.safe_load(run.file.read_text())
    raw["sending"] = {"signing_key": str(gates.signer)}
    for facility in raw["facilities"]:
        deployment = facility["deployment"]
        site = gates.testbed.site(facility["name"])
        for key in ("template", "fill"):
            del deployment[key]
        deployment |= {"gate": True, "key": str(gates.key), "workdir": f"{site.home}/gated-work"}
    run.file.write_text(yaml.safe_dump(raw, sort_keys=False))
    write_rendered(read_federation(run.file))
    return run


@pytest.fixture(scope="module")
def finished(gates: Gates, material, tmp_path_factory) -> Run:
    model, datasets = material
    run = gated(gates, tmp_path_factory.mktemp("gated"), model, datasets, "gated", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(gates.testbed.coordinator_home))
        rows = check(run.file)
        assert not [row for row in rows if row.verdict == "fail"], rows
        patch.setenv(VARIABLE, str(run.archive.path / "audit.jsonl"))
        patch.setenv(PROGRESS_SECONDS, "2")
        code = run.run()
    assert code == 0, run.text()
    return run


def test_both_rounds_have_both_facilities(finished: Run, gates: Gates):
    history = finished.archive.history()
    assert [[row.status for row in entry.facilities] for entry in history] == [["ok", "ok"]] * 2, finished.text()
    for site in gates.testbed.sites:
        assert [record["JobState"] for record in jobs(finished, site)] == ["COMPLETED"] * 2


def test_the_facilities_know_what_was_asked_and_the_coordinator_what_they_logged(finished: Run, gates: Gates):
    """A gate's log that is cut short is uncovered by heads in the coordinator's own log, and the other way round."""
    for site in gates.testbed.sites:
        entries = gates.log(site)
        assert [entry["round"] for entry in entries if entry["what"] == "approved"] == [0, 1]
        assert not [entry for entry in entries if entry["what"] in ("refused", "failed")]
        heads = heads_of(finished.archive.path, site.name)
        path = site.home / "gated" / "gate" / "audit.jsonl"
        assert len(set(heads)) == 2 and verify_log(path, heads).broken == 0
        theirs = [entry["coordinators_head"] for entry in entries if entry["what"] == "approved"]
        assert verify_log(finished.archive.path / "audit.jsonl", [head for head in theirs if head]).broken == 0


def test_progress_is_seen_through_the_gate(finished: Run, gates: Gates):
    """Within the rights of the key: the test above finds no request that was refused or failed, these with them."""
    lines = (finished.file.parent.parent / "events.jsonl").read_bytes().splitlines()
    told = [event for line in lines if (event := read_event(line)) is not None and event.kind == "progress"]
    for site in gates.testbed.sites:
        stages = [event["stage"] for event in told if str(event["step"]).endswith(f"train_{site.name}")]
        assert stages and set(stages) <= {"loading", "evaluating", "training", "saving"}, told


ATTACKS = [
    "",
    "id",
    "bash -i",
    "crossfed-gate jobs $(id)",
    "crossfed-gate get-file {home}/dataset/train.npy",
    "crossfed-gate get-file {home}/gated/policy.yml",
    "crossfed-gate put-file {home}/gated/policy.yml 600",
    "crossfed-gate put-file {home}/.bashrc 600",
    "crossfed-gate link {home} {home}/gated-work/home",
    "crossfed-gate remove {home}/gated-work/../gated",
    "crossfed-gate cancel-ids 1",
    "crossfed-gate submit --directory {home}/gated-work --temporary {home}/gated-work/t --model {home}/m "
    "--settings {home}/s --dataset {home}/dataset --round 0",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_key_of_the_gate_gets_nothing_else(gates: Gates, finished: Run, attack: str):
    site = gates.testbed.sites[0]
    before = len(gates.log(site))
    answer = gates.request(site, attack.replace("{home}", str(site.home)))
    assert answer.returncode == 77 and answer.stdout == "" and "refused by the gate" in answer.stderr, answer
    added = gates.log(site)[before:]
    assert added[-1]["what"] == "refused" and added[-1]["reason"] in answer.stderr


def test_a_key_that_no_policy_names_and_other_doors_are_closed(gates: Gates, finished: Run, tmp_path: Path):
    site = gates.testbed.sites[0]
    answer = gates.request(site, "crossfed-gate hello", key=gates.thief)
    assert answer.returncode == 77 and "not one of the policy's" in answer.stderr
    options = f"-i {gates.key} -o IdentitiesOnly=yes -o BatchMode=yes -o UserKnownHostsFile={gates.testbed.known_hosts}"
    target = f"{site.user}@{site.address}"
    sftp = subprocess.run(
        ["sftp", "-F", "/dev/null", *shlex.split(options), "-b", "-", target], input=b"ls\n", capture_output=True
    )
    assert sftp.returncode != 0
    forward = ["ssh", "-F", "/dev/null", *shlex.split(options), "-W", "127.0.0.1:6817", target]
    assert subprocess.run(forward, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0


def test_over_quota_is_that_facilitys_absence_with_the_reason_in_the_table(gates: Gates, material, tmp_path: Path):
    model, datasets = material
    tight = gates.testbed.sites[1]
    fingerprint = json.loads((tight.home / "gated" / "policy.yml").read_text())["keys"][0]
    put(gates.testbed, tight, "policy.yml", policy(tight, fingerprint, node_hours_per_day=0.1))
    run = gated(gates, tmp_path, model, datasets, "tight", 1)
    assert run.run() == 0, run.text()
    rows = {row.facility: row for row in run.archive.history()[0].facilities}
    assert rows[gates.testbed.sites[0].name].status == "ok"
    assert "node_hours_per_day is 0.1" in rows[tight.name].reason, rows
    assert jobs(run, tight) == []
