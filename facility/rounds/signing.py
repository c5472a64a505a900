"""The facility's signature under what it sends of a round."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.signatures import sign_manifest


def sign_update(directory: Path, settings: FacilitySettings, round: int) -> None:
    """Sign what lies where the coordinator reads, and may write, if it is an update of this federation and round.

    Raises as `sign_manifest`.
    """
    key, of = resolve_path(settings.training.signing_key), (settings.federation, round)
    sign_manifest(directory, key, kind="update", of=of)
