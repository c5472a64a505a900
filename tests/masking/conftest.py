"""Signing keys, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.masking.federation import ssh_keys

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "outsider")


@pytest.fixture(scope="session")
def signers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ssh_keys(tmp_path_factory.mktemp("signers") / "keys", NAMES)
