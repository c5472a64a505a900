"""The coordinator's signed order: which model, with which settings, for which round and run, and until when.

An order is a model's manifest under the coordinator's ssh signature (`facility.exchange.messages.signatures`). Its
`extra` holds the run, the sha256 of every facility's settings file, and the second from which it is void. The principal
in the facility's allowed-signers file is the federation's name, so that one federation's coordinator cannot order for
another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from facility.exchange.errors import ManifestError
from facility.exchange.files.audit_log import HEAD
from facility.exchange.messages.comparison import SENT
from facility.exchange.messages.manifest import SIGNATURE, Manifest, read_manifest, run_of, sha256_of, store_manifest
from facility.exchange.messages.signatures import sign_manifest, verify_signature

SETTINGS, EXPIRES = "settings_sha256", "expires"
"""In a model's `extra`: digests of the settings by facility; seconds since 1970."""
SIGNERS = "CROSSFED_COORDINATORS"
"""Environment variable: the facility's allowed-signers file. Where it is set, an unsigned model is not trained."""


def sign_order(directory: Path, key: Path, *, settings: Mapping[str, str], expires: float, head: str = "") -> None:
    """Write the order into the manifest of the model in `directory`, and sign it."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    extra = manifest.extra | {SETTINGS: dict(settings), EXPIRES: int(expires)} | ({HEAD: head} if head else {})
    (directory / SIGNATURE).unlink(missing_ok=True)
    store_manifest(directory, dataclasses.replace(manifest, extra=extra))
    sign_manifest(directory, key, kind=manifest.kind)


def verify_order(
    model: Path, settings: Path, *, federation: str, facility: str, round: int, rounds: int, allowed_signers: Path
) -> Manifest:
    """The model's manifest, once signature, expiry, settings and round are found right. Raises `ManifestError`.

    Checks the manifest alone: its digests bind the files, which `verify_manifest` compares.
    """
    verify_signature(model, federation, allowed_signers)
    manifest = read_manifest(model)
    if manifest.kind not in SENT or manifest.federation != federation:
        raise ManifestError(
            f"what was signed is a {manifest.kind} of {manifest.federation!r}, expected a model of ours"
        )
    if manifest.facility not in (None, facility):
        raise ManifestError(f"the order is for facility {manifest.facility!r}, this is {facility!r}")
    if not run_of(manifest):
        raise ManifestError("the order names no run of the federation")
    expires = manifest.extra.get(EXPIRES)
    if type(expires) is not int or expires < time.time():
        raise ManifestError(
            f"the order is void: it expired at {_moment(expires)}, and this machine's clock says "
            f"{_moment(int(time.time()))}; the coordinator signs anew when it is started again"
        )
    if round not in (manifest.round, rounds):  # the final evaluation is of the newest model, whatever its number
        raise ManifestError(f"the order is for round {manifest.round}, this job is of round {round}")
    digests = manifest.extra.get(SETTINGS)
    wanted = digests.get(facility) if isinstance(digests, dict) else None
    if wanted != sha256_of(settings):
        raise ManifestError(
            f"the settings are not those that the coordinator signed for {facility!r}: altered on the "
            "way, or rendered again after the model was signed"
        )
    return manifest


def _moment(expires: object) -> str:
    if type(expires) is not int or not 0 <= expires < 2**40:
        return "no time that can be read"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(expires))
