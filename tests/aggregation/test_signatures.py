"""Signed manifests, with real keys."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.steps.expectation import Expected
from coordinator.steps.receive import receive
from facility.exchange.errors import ConfigurationError, ManifestError
from facility.exchange.messages.manifest import (
    SIGNATURE,
    read_manifest,
    store_manifest,
    verify_manifest,
    with_run,
    write_manifest,
)
from facility.exchange.messages.report import Failure
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.signatures import NAMESPACE, sign_manifest, verify_signature
from facility.rounds import signing
from facility.rounds.failing import leave_failure
from facility.rounds.signing import sign_update
from tests.aggregation import make

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is absent")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Keys `alpha` and `beta`, and an allowed-signers file of both."""
    lines = []
    for name in ("alpha", "beta"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
        lines.append(f'{name} namespaces="{NAMESPACE}" {(tmp_path / f"{name}.pub").read_text()}')
    (tmp_path / "allowed").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def update(tmp_path: Path) -> Path:
    base = make.model(tmp_path / "base", {"w": torch.zeros(3)})
    return make.update(tmp_path / "update", {"w": torch.ones(3)}, base=base, facility="alpha")


def test_a_signed_update_is_verified(keys: Path, update: Path):
    sign_manifest(update, keys / "alpha", kind="update")
    verify_signature(update, "alpha", keys / "allowed")
    verify_manifest(update)  # the signature is not a surplus file


def test_what_is_not_verified(keys: Path, update: Path):
    with pytest.raises(ManifestError, match=f"no {SIGNATURE}.*'alpha' has to sign"):
        verify_signature(update, "alpha", keys / "allowed")
    sign_manifest(update, keys / "beta", kind="update")
    with pytest.raises(ManifestError, match="not signed by 'alpha'"):
        verify_signature(update, "alpha", keys / "allowed")
    with pytest.raises(ManifestError, match="not signed by 'gamma'"):
        verify_signature(update, "gamma", keys / "allowed")
    sign_manifest(update, keys / "alpha", kind="update")
    verify_signature(update, "alpha", keys / "allowed")
    manifest = read_manifest(update)
    (update / "config.json").write_text("{}")
    write_manifest(update, manifest)
    with pytest.raises(ManifestError, match="not signed by 'alpha'"):
        verify_signature(update, "alpha", keys / "allowed")
    for name in ("-rf", "a b", "", "a,b"):
        with pytest.raises(ManifestError, match="cannot be a signer"):
            verify_signature(update, name, keys / "allowed")
    (update / SIGNATURE).write_bytes(b"x" * 100_000)
    with pytest.raises(ManifestError, match="not a signature"):
        verify_signature(update, "alpha", keys / "allowed")


@pytest.mark.parametrize("wrong", ["dangling", "garbage"])
def test_a_file_of_revoked_keys_that_cannot_be_read_revokes_all_and_is_named(keys: Path, update: Path, wrong: str):
    sign_manifest(update, keys / "alpha", kind="update")
    revoked = keys / "allowed.revoked"
    if wrong == "dangling":
        revoked.symlink_to("/nowhere/revoked")
    else:
        revoked.write_text("alpha left\n")
    with pytest.raises(ManifestError, match="allowed.revoked"):
        verify_signature(update, "alpha", keys / "allowed")


def test_a_private_key_that_others_may_read_is_told_as_such(keys: Path, update: Path):
    (keys / "alpha").chmod(0o644)
    with pytest.raises(ConfigurationError, match="Permissions 0644 .* are too open"):
        sign_manifest(update, keys / "alpha", kind="update")


def test_a_signature_for_another_purpose_is_none(keys: Path, update: Path):
    path = str(update / "manifest.json")
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-f", str(keys / "alpha"), "-n", "git", path],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ManifestError, match="not signed"):
        verify_signature(update, "alpha", keys / "allowed")


def test_a_manifest_that_lies_in_place_of_the_one_that_was_written_is_not_signed(keys: Path, update: Path):
    """Where a job leaves its update its coordinator can write: keys of its own making would bear a facility's name."""
    write_manifest(update, dataclasses.replace(read_manifest(update), kind="keys"))
    with pytest.raises(ManifestError, match="of kind 'keys', expected 'update'"):
        sign_manifest(update, keys / "alpha", kind="update")
    assert not (update / SIGNATURE).exists()


@pytest.mark.parametrize("other", [{"federation": "ibis"}, {"round": 1}], ids=str)
@pytest.mark.parametrize("by", ["update", "failing"])
def test_no_manifest_of_another_federation_or_round_is_signed_in_its_place(
    keys: Path, update: Path, monkeypatch: pytest.MonkeyPatch, other: dict, by: str
):
    """By its coordinator, for a federation of another one in which the facility signs with the same key."""
    training = TrainingSettings(signing_key=str(keys / "alpha"))
    settings = FacilitySettings(federation="test", facility="alpha", rounds=3, seed=1, training=training)
    refused: list[Path] = []

    def exchanged(directory: Path, key: Path, **how) -> None:
        store_manifest(directory, dataclasses.replace(read_manifest(directory), **other))
        with pytest.raises(ManifestError, match="expected round 0 of 'test': it was exchanged"):
            sign_manifest(directory, key, **how)
        assert not (directory / SIGNATURE).exists()
        refused.append(directory)

    def sign(out: Path) -> None:
        if by == "failing":
            leave_failure(out, Failure(facility="alpha", round=0, reason="no disk"), settings)
        else:
            sign_update(out, settings, 0)

    shutil.copytree(update, again := keys / "again")
    sign(update)
    verify_signature(update, "alpha", keys / "allowed")
    monkeypatch.setattr(signing, "sign_manifest", exchanged)
    sign(again)
    assert len(refused) == 1


def test_a_link_beside_a_manifest_leads_its_signature_nowhere(keys: Path, update: Path):
    """A coordinator can write there: a file of the facility's account would be lost."""
    for place in (update / SIGNATURE, update / f".{SIGNATURE}.tmp"):
        place.symlink_to(keys / "alpha")
    before = (keys / "alpha").read_bytes()
    sign_manifest(update, keys / "alpha", kind="update")
    assert (keys / "alpha").read_bytes() == before and not (update / SIGNATURE).is_symlink()
    verify_signature(update, "alpha", keys / "allowed")


def test_keys_and_signers_that_are_absent(keys: Path, update: Path):
    with pytest.raises(ConfigurationError, match="cannot be signed with .*nowhere"):
        sign_manifest(update, keys / "nowhere", kind="update")
    sign_manifest(update, keys / "alpha", kind="update")
    with pytest.raises(ConfigurationError, match="allowed-signers file .* does not exist"):
        verify_signature(update, "alpha", keys / "nobody")


def test_a_key_with_a_passphrase_does_not_wait_for_it(keys: Path, update: Path):
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(keys / "alpha")], check=True, capture_output=True
    )
    with pytest.raises(ConfigurationError, match="cannot be signed"):
        sign_manifest(update, keys / "alpha", kind="update")


def test_the_coordinator_asks_for_signatures_where_it_has_keys(keys: Path, update: Path):
    settings = AggregationSettings(allowed_signers=str(keys / "allowed"))
    told = receive(
        update, Expected(facility="alpha", round=0, model=keys / "base", evaluation=False, settings=settings)
    )
    assert told is not None and told.kind == "refused" and "has to sign" in told.reason
    sign_manifest(update, keys / "alpha", kind="update")
    assert (
        receive(update, Expected(facility="alpha", round=0, model=keys / "base", evaluation=False, settings=settings))
        is None
    )


@pytest.mark.parametrize(
    ("federation", "received", "run", "told"),
    [
        ("test", "base", "a", ""),
        ("test", "base", "b", "it belongs to run"),
        ("test", "nowhere", "a", "it belongs to run '(none)'"),
        ("ibis", "base", "a", "it is of federation 'ibis'"),
    ],
)
def test_a_signed_failure_is_of_its_run_and_federation_alone(
    keys: Path, update: Path, federation: str, received: str, run: str, told: str
):
    """Signed once, it was taken in the same round of every later run, and of other federations with this facility."""
    with_run(keys / "base", "a")
    training = TrainingSettings(signing_key=str(keys / "alpha"))
    settings = FacilitySettings(federation=federation, facility="alpha", rounds=3, seed=1, training=training)
    leave_failure(keys / "out", Failure(facility="alpha", round=0, reason="no disk"), settings, keys / received)
    with_run(keys / "base", run)
    aggregation = AggregationSettings(allowed_signers=str(keys / "allowed"))
    expected = Expected(facility="alpha", round=0, model=keys / "base", evaluation=False, settings=aggregation)
    found = receive(keys / "out", expected)
    assert found is not None and found.kind == ("refused" if told else "failed")
    assert told in found.reason and found.reason.endswith("no disk")
