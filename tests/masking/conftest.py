"""Signing keys, made once; signatures, checked once each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from facility.exchange.messages import signatures
from facility.exchange.messages.manifest import NAME, SIGNATURE
from tests.masking.federation import ssh_keys

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "outsider")


@pytest.fixture(scope="session")
def signers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ssh_keys(tmp_path_factory.mktemp("signers") / "keys", NAMES)


@pytest.fixture(autouse=True, scope="module")
def each_signature_is_checked_once():
    """ssh-keygen is asked once for the same manifest, signature, signer and file; what it refuses is asked again."""
    patch, real = pytest.MonkeyPatch(), signatures.verify_signature
    place: dict[str, Path] = {}

    @cache
    def once(manifest: bytes, signature: bytes, signer: str, allowed: bytes) -> None:
        real(place["directory"], signer, place["signers"])

    def verify(directory: Path, signer: str, allowed_signers: Path) -> None:
        place.update(directory=directory, signers=allowed_signers)
        once(
            (directory / NAME).read_bytes(),
            (directory / SIGNATURE).read_bytes(),
            signer,
            allowed_signers.read_bytes(),
        )

    for module in ("roster", "unmasking"):
        patch.setattr(f"facility.exchange.masking.{module}.verify_signature", verify)
    yield
    patch.undo()
