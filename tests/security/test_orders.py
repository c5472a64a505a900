"""Models and settings signed by the coordinator: what a facility refuses before it spends a node-hour."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from facility.exchange.errors import ManifestError
from facility.exchange.messages.manifest import NAME, Manifest, sha256_of, with_run, write_manifest
from facility.exchange.messages.order import sign_order, verify_order
from facility.exchange.messages.report import read_failure
from facility.exchange.messages.settings import FacilitySettings
from facility.round import main

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is absent")


class Place:
    """A signed model, settings, and the facility's allowed signers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.settings = folder / "model", folder / "alpha.json"
        self.signers = folder / "coordinators"
        self.model.mkdir()
        (self.model / "model.safetensors").write_bytes(b"weights")
        settings = {"federation": "heron", "facility": "alpha", "rounds": 5, "seed": 1}
        self.settings.write_text(json.dumps(settings))
        write_manifest(self.model, Manifest(kind="model", federation="heron", round=2))
        with_run(self.model, "a" * 32)
        self.allow("key")

    def key(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        return path

    def public(self, name: str) -> str:
        return " ".join(self.key(name).with_suffix(".pub").read_text().split()[:2])

    def allow(self, name: str, principal: str = "heron", options: str = "") -> None:
        with open(self.signers, "a") as file:
            file.write(f'{principal} namespaces="crossfed"{options} {self.public(name)}\n')

    def sign(self, name: str = "key", *, seconds: float = 3600, digests: dict[str, str] | None = None) -> None:
        told = {"alpha": sha256_of(self.settings)} if digests is None else digests
        sign_order(self.model, self.key(name), settings=told, expires=time.time() + seconds)

    def verify(self, round: int = 2, federation: str = "heron", facility: str = "alpha") -> Manifest:
        return verify_order(
            self.model,
            self.settings,
            federation=federation,
            facility=facility,
            round=round,
            rounds=5,
            allowed_signers=self.signers,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_signed_order_is_taken_for_its_round_and_for_the_final_evaluation(place: Place):
    place.sign()
    assert place.verify().extra["run"] == "a" * 32
    assert place.verify(round=5).round == 2, "an early end is followed by an evaluation of the last model"


def test_the_final_evaluation_is_of_a_later_model_where_rounds_was_lowered_below_what_is_done(place: Place):
    write_manifest(place.model, Manifest(kind="model", federation="heron", round=7))
    with_run(place.model, "a" * 32)
    place.sign()
    assert place.verify(round=5).round == 7
    with pytest.raises(ManifestError, match="job is of round 4"):
        place.verify(round=4)


ATTACKS = {
    "unsigned": (lambda p: None, "holds no manifest.json.sig"),
    "another key": (lambda p: p.sign("thief"), "not signed by 'heron'"),
    "void": (lambda p: p.sign(seconds=-1), "expired at .*this machine.s clock says"),
    "other settings": (lambda p: (p.sign(), p.settings.write_text("{}")), "not those that the coordinator signed"),
    "settings of nobody": (lambda p: p.sign(digests={}), "not those that the coordinator signed"),
    "an altered manifest": (
        lambda p: (p.sign(), (p.model / NAME).write_text((p.model / NAME).read_text().replace("aaaa", "bbbb"))),
        "not signed by 'heron'",
    ),
    "an update of a facility": (
        lambda p: (write_manifest(p.model, Manifest(kind="update", federation="heron", round=2)), p.sign()),
        "expected a model",
    ),
    "an order for another": (
        lambda p: (
            write_manifest(p.model, Manifest(kind="model", federation="heron", round=2, facility="beta")),
            p.sign(),
        ),
        "for facility 'beta'",
    ),
    "no run": (
        lambda p: (write_manifest(p.model, Manifest(kind="model", federation="heron", round=2)), p.sign()),
        "names no run",
    ),
    "another federation's model, of one coordinator": (
        lambda p: (
            write_manifest(p.model, Manifest(kind="model", federation="egret", round=2)),
            with_run(p.model, "a" * 32),
            p.sign(),
        ),
        "a model of 'egret', expected a model of ours",
    ),
    "void since a time that no calendar has": (lambda p: p.sign(seconds=-1e18), "expired at no time that can be read"),
    "another federation's coordinator": (
        lambda p: (p.allow("other", principal="egret"), p.sign("other")),
        "not signed by 'heron'",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_other_order_is_refused(place: Place, attack: str):
    act, reason = ATTACKS[attack]
    act(place)
    with pytest.raises(ManifestError, match=reason):
        place.verify()


@pytest.mark.parametrize("round", [0, 1, 3, 4])
def test_an_order_is_for_its_round_alone(place: Place, round: int):
    place.sign()
    with pytest.raises(ManifestError, match=f"job is of round {round}"):
        place.verify(round=round)


def test_keys_rotate_and_are_revoked_by_the_usual_ssh_files(place: Place):
    place.signers.unlink()
    place.allow("old", options=',valid-before="20200101"')
    place.allow("new")
    place.sign("old")
    with pytest.raises(ManifestError, match="no longer valid"):
        place.verify()
    place.sign("new")
    place.verify()
    revoked = place.signers.with_name("coordinators.revoked")
    revoked.write_text(place.public("new") + "\n")
    with pytest.raises(ManifestError, match="revoked"):
        place.verify()
    revoked.unlink()
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, place.key("new").with_suffix(".pub")], check=True)
    with pytest.raises(ManifestError, match="revoked"):
        place.verify()
    place.allow("third")
    place.sign("third")
    place.verify()


@pytest.mark.parametrize("attack", ["unsigned", "exchanged"])
def test_a_job_refuses_before_it_looks_at_any_data(place: Place, attack: str, monkeypatch: pytest.MonkeyPatch):
    """The dataset does not even exist, which would be the next complaint."""
    settings = FacilitySettings(federation="heron", facility="alpha", rounds=5, seed=1)
    place.settings.write_text(
        json.dumps({"federation": settings.federation, "facility": "alpha", "rounds": 5, "seed": 1})
    )
    monkeypatch.chdir(place.folder)
    words = [
        "--model",
        "model",
        "--dataset",
        str(place.folder / "nowhere" / "data"),
        "--settings",
        "alpha.json",
        "--round",
        "2",
        "--out",
        "update",
    ]
    if attack == "unsigned":
        monkeypatch.setenv("CROSSFED_COORDINATORS", str(place.signers))
    else:
        words += ["--approved", "0" * 64, sha256_of(place.settings)]
    assert main(words) == 7
    failure = read_failure(place.folder / "update")
    assert failure is not None and ("manifest.json.sig" if attack == "unsigned" else "exchanged") in failure.reason
