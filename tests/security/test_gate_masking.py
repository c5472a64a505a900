"""Secure aggregation behind a gate: its two commands run within the policy, and nothing else comes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from facility import keys
from facility.exchange.masking import roster as rosters
from facility.exchange.masking.roster import AGREEMENT, read_keys
from facility.exchange.masking.unmasking import REQUEST, ROSTER
from facility.exchange.messages.report import read_failure
from facility.exchange.messages.settings import read_facility_settings
from facility.gating import queue
from facility.gating.ledger import read_ledger
from facility.masking.private_keys import PrivateKeys
from tests.federations import write_dataset
from tests.masking.federation import ssh_keys
from tests.security.test_gate import Gate

NAMES = ("alpha", "beta", "gamma")
ROOT = Path(__file__).resolve().parents[2]


class MaskingGate(Gate):
    """A gate whose policy names peers' keys, a dataset, and settings that ask for masks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary) -> None:
        super().__init__(folder, monkeypatch, capfdbinary)
        self.peers = ssh_keys(self.home / "peers", NAMES)
        (self.home / "data").rmdir()
        write_dataset(self.home / "data")
        (self.home / "env.sh").write_text(f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}\n")
        monkeypatch.setenv("CROSSFED_STATE", str(self.home / "state"))
        self.policy(peer_signers=str(self.peers))
        self.masking = {
            "bits": 16,
            "threshold": 2,
            "minimum_sum": 3,
            "facilities": list(NAMES),
            "peer_signers": str(self.peers),
        }

    def policy(self, **changes) -> None:
        """Its own signing key is one of the policy's files."""
        super().policy(**{"files": [str(self.home / "peers" / "alpha")]} | changes)

    def settings(self, **changes) -> None:
        """What `round` wrote, with masks; signed again."""
        path = self.workdir / "in" / "alpha.json"
        raw = json.loads(path.read_text()) | {"masking": self.masking} | changes
        path.write_text(json.dumps(raw))
        self.sign()

    def round(self, number: int = 0, run: str = "a" * 32, **training) -> str:
        training = {"export_dtype": "float32", "signing_key": str(self.peers.parent / "alpha")} | training
        request = super().round(number, run, **training)
        self.settings()
        return request

    def step(self, verb: str, name: str, more: str = "") -> str:
        """A request for a command of secure aggregation, in a new directory."""
        (self.workdir / name).mkdir()
        w = self.workdir
        return (
            f"crossfed-gate {verb} --directory {w}/{name} --temporary {w}/tmp --settings {w}/in/alpha.json "
            f"--dataset {self.home}/data --round 0{more}"
        )

    def ask_open(self, request: str) -> tuple[int, str]:
        """Exit code and complaint of a request whose connection stays open, as that of a command does."""
        from facility import gate
        from facility.gating.policy import read_policy
        from facility.gating.session import Session

        read, write = os.pipe()
        self.monkeypatch.setattr(sys, "stdin", os.fdopen(read))
        session = Session(
            policy=read_policy(self.home / "policy.yml"), key="SHA256:" + "A" * 43, state=self.home / "gate"
        )
        session.state.mkdir(exist_ok=True)
        try:
            code = gate.serve(session, request)
        finally:
            os.close(write)
        sys.stdout.flush()
        out, error = self.capture.readouterr()
        return code, (out + error).decode()


@pytest.fixture
def site(tmp_path, monkeypatch, capfdbinary) -> MaskingGate:
    return MaskingGate(tmp_path.resolve(), monkeypatch, capfdbinary)


def test_keys_are_signed_where_no_request_leads(site: MaskingGate, monkeypatch: pytest.MonkeyPatch):
    """A coordinator that writes beside `--out` could have keys of its own signed in this facility's name."""
    site.round()
    places, real = [], rosters.sign_manifest
    monkeypatch.setattr(
        rosters, "sign_manifest", lambda place, key, **kind: (places.append(place), real(place, key, **kind))
    )
    out, settings = site.workdir / "update", read_facility_settings(site.workdir / "in" / "alpha.json")
    keys.draw_keys(settings, site.home / "data", site.home / "state", 0, out)
    assert places and not places[0].resolve().is_relative_to(site.workdir)
    assert read_keys(out, site.peers)[0].facility == "alpha"


def test_keys_are_drawn_here_without_a_job_and_only_their_public_half_leaves(site: MaskingGate):
    site.round()
    code, told = site.ask_open(site.step("keys", "k"))
    assert code == 0, told
    update = site.workdir / "k" / "update"
    found, _ = read_keys(update, site.peers)
    assert (found.facility, found.round, found.samples > 0) == ("alpha", 0, True)
    assert site.ask(f"crossfed-gate get-file {update}/keys.json")[1] == (update / "keys.json").read_bytes()
    private = PrivateKeys(state=site.home / "state" / "heron" / "alpha").directory
    assert [path.stem for path in private.iterdir()] == [found.generation]
    assert site.ask(f"crossfed-gate get-file {private}/{found.generation}.json")[0] == 77
    ledger = read_ledger(site.home / "gate" / "ledger.json")
    assert ledger.node_hours(ledger.jobs[-1].submitted) == 0 and site.calls == []
    assert [entry["what"] for entry in site.log()][:2] == ["request", "login command"]
    assert not list((site.home / "gate").glob("settings-*")), "the copy of the settings is gone"


def test_a_training_job_gets_the_roster_and_the_policys_demands(site: MaskingGate):
    site.policy(peer_signers=str(site.peers), minimum_sum=3, encodings=["masked"])
    (site.workdir / "roster").mkdir()
    request = f"{site.round()} --roster {site.workdir}/roster"
    assert site.ask(request)[0] == 0
    script = site.calls[-1][1]
    assert script is not None and f"--roster {site.workdir}/roster" in script
    assert f"export CROSSFED_PEER_SIGNERS={site.peers}" in script and "export CROSSFED_MINIMUM_SUM=3" in script
    assert site.ask(request.replace(f"{site.workdir}/roster", str(site.home)))[0] == 77


def unordered(site: MaskingGate) -> str:
    site.round()
    (site.workdir / "asked").mkdir()
    return site.step("unmask", "u", f" --request {site.workdir}/asked")


def changed_since(site: MaskingGate) -> str:
    site.ask(site.round())
    site.settings(seed=7)
    (site.workdir / "asked").mkdir()
    return site.step("unmask", "u", f" --request {site.workdir}/asked")


def keys_with(**changes) -> Callable[[MaskingGate], str]:
    def make(site: MaskingGate) -> str:
        site.round()
        site.settings(**changes)
        return site.step("keys", "u")

    return make


def masks_with(**changes) -> Callable[[MaskingGate], str]:
    def make(site: MaskingGate) -> str:
        site.masking |= changes
        return keys_with()(site)

    return make


REFUSALS: dict[str, tuple[Callable[[MaskingGate], str], dict[str, object], str]] = {
    "no peers in the policy": (keys_with(), {"peer_signers": None}, "names no peer_signers"),
    "a file of the coordinator's": (masks_with(peer_signers="/tmp/peers"), {}, "put its own keys in between"),
    "small sums": (keys_with(), {"minimum_sum": 4}, "sums over 4 updates or more"),
    "unmasked settings": (keys_with(masking=None), {}, "ask for no secure aggregation"),
    "another facility": (keys_with(facility="beta"), {}, "the policy allows 'alpha'"),
    "another dataset": (lambda s: keys_with()(s).replace("home/data", "home/other"), {}, "not one of the policy's"),
    "too many": (keys_with(), {"login_commands_per_day": 0}, "login_commands_per_day is 0"),
    "settings of no order": (unordered, {}, "no signed order"),
    "settings that changed": (changed_since, {}, "no signed order"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_policy_excludes_is_refused_and_its_reason_can_be_fetched(site: MaskingGate, name: str, monkeypatch):
    make, changes, words = REFUSALS[name]
    values = {"peer_signers": str(site.peers)} | changes
    site.policy(**{key: value for key, value in values.items() if value is not None})
    monkeypatch.setattr(queue, "on_this_host", lambda *_, **__: pytest.fail("it ran"))
    code, _, error = site.ask(make(site))
    assert code == 77 and words in error
    failure = read_failure(site.workdir / "u" / "update")
    assert failure is not None and words in failure.reason
    assert (
        b"refused by the facility's gate" in site.ask(f"crossfed-gate get-file {site.workdir}/u/update/failure.json")[1]
    )


def test_an_answer_needs_settings_that_a_signed_order_named(site: MaskingGate, monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(queue, "on_this_host", lambda _, script, *__, **___: ran.append(script) or 0)
    site.ask(site.round())
    for file in (REQUEST, f"{ROSTER}/{AGREEMENT}"):
        (site.workdir / "asked" / file).parent.mkdir(parents=True, exist_ok=True)
        (site.workdir / "asked" / file).write_text("{}")
    assert site.ask(site.step("unmask", "u", f" --request {site.workdir}/asked"))[0] == 0
    assert "-m facility.unmask --request " in ran[0] and f"{site.workdir}/asked" not in ran[0], "a copy as well"
    assert f"--settings {site.home}/gate/settings-" in ran[0], "a copy, which the coordinator cannot exchange"
    assert ran[0].startswith(f"#!/bin/bash\nunset SSH_CLIENT SSH2_CLIENT\n. '{site.home}/env.sh'\n"), (
        "not the job template"
    )


@pytest.mark.parametrize("what", ["directory", "file", "link"])
def test_a_directory_with_an_update_in_it_is_not_taken_over(site: MaskingGate, what: str):
    """What a request's directory holds may be read afterwards; so it must be new."""
    site.round()
    request, update = site.step("keys", "u"), site.workdir / "u" / "update"
    {"directory": update.mkdir, "file": update.touch, "link": lambda: update.symlink_to("/nowhere")}[what]()
    code, _, error = site.ask(request)
    assert code == 77 and "is not a new directory" in error
    assert site.ask(f"crossfed-gate list {update}")[0] == 77


@pytest.mark.parametrize("encodings", [["masked"], ["full"]])
def test_only_masked_updates_leave_where_the_policy_says_so(site: MaskingGate, encodings: list[str]):
    site.policy(peer_signers=str(site.peers), encodings=encodings)
    code, _, error = site.ask(site.round())
    assert (code == 0) == (encodings == ["masked"]), error
    site.settings(masking=None)
    code, _, error = site.ask(submission(site))
    assert (code == 0) == (encodings == ["full"]), error


def submission(site: MaskingGate) -> str:
    w = site.workdir
    return (
        f"crossfed-gate submit --directory {w}/job --temporary {w}/tmp --model {w}/in/model "
        f"--settings {w}/in/alpha.json --dataset {site.home}/data --round 0"
    )


def test_a_policy_whose_peers_a_coordinator_could_write_is_refused(site: MaskingGate):
    site.policy(peer_signers=f"{site.workdir}/peers")
    told = subprocess.run(
        [sys.executable, "-m", "facility.gate", "--policy", str(site.home / "policy.yml"), "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert told.returncode == 2 and "peer_signers" in told.stderr and "lies in the workdir" in told.stderr
