"""`aggregation.allowed_signers` in federation.yml without a key to sign with: found out by the jobs, in every round."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.config.federation import read_federation
from facility.exchange.errors import ConfigurationError


def write(directory: Path, allowed: str, *keys: str) -> Path:
    facilities = [
        {"name": name, "dataset": "/data", "training": {"signing_key": key}}
        for name, key in zip("abc", keys, strict=True)
    ]
    aggregation = {"allowed_signers": allowed}
    file = directory / "federation.yml"
    file.write_text(
        yaml.safe_dump(
            {"name": "f", "model": "model", "rounds": 3, "aggregation": aggregation, "facilities": facilities}
        )
    )
    return file


def test_whose_updates_would_all_be_refused_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"training\.signing_key of 'b' is empty: none of its updates"):
        read_federation(write(tmp_path, "signers", "key", "", "key"))


@pytest.mark.parametrize(("allowed", "key"), [("signers", "key"), ("", "key"), ("", "")])
def test_all_sign_or_nobody_asks(allowed: str, key: str, tmp_path: Path):
    read_federation(write(tmp_path, allowed, key, key, key))
