"""What a bundle holds, stated so that it can be verified: a lock file with hashes, digests, a CycloneDX document.

The lock file is pip's (https://pip.pypa.io/en/stable/topics/secure-installs/#hash-checking-mode), the digests are those
of sha256sum(1), the document is CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json/).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_text
from facility.exchange.messages.manifest import sha256_of

PARTS = ("wheelhouse", "crossfed", "evaluation")
"""Folders of a bundle whose files have digests."""
LOCK, SUMS, SBOM = "requirements.txt", "SHA256SUMS", "sbom.json"
WHEEL = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.!+]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One package of the wheelhouse."""

    name: str
    """Normalised as PEP 503 says."""
    version: str
    sha256: str


def wheels(wheelhouse: Path) -> list[Wheel]:
    """Every wheel, by name. Raises `InputError` for two versions of one package: pip could not be held to either."""
    found: dict[str, Wheel] = {}
    for path in sorted(wheelhouse.glob("*.whl")):
        match = WHEEL.fullmatch(path.name)
        if match is None:
            raise InputError(f"{path} is not named as a wheel is; remove it and bundle again")
        wheel = Wheel(
            name=re.sub(r"[-_.]+", "-", match["name"]).lower(), version=match["version"], sha256=sha256_of(path)
        )
        if wheel.name in found:
            versions = f"{found[wheel.name].version} and {wheel.version}"
            raise InputError(f"{wheelhouse} holds {wheel.name} {versions}; remove the one that is not wanted")
        found[wheel.name] = wheel
    return list(found.values())


def write_digests(out: Path) -> None:
    """Write the lock file into `out/wheelhouse`, then the digest of every file of the bundle, its SBOM included."""
    lock = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in wheels(out / "wheelhouse")]
    write_text(out / "wheelhouse" / LOCK, "\n".join(lock) + "\n")
    files = sorted(path for part in PARTS for path in (out / part).rglob("*") if path.is_file())
    files += [path for path in (out / SBOM,) if path.is_file()]
    write_text(out / SUMS, "".join(f"{sha256_of(path)}  {path.relative_to(out)}\n" for path in files))


def cyclonedx_document(wheelhouse: Path) -> dict[str, Any]:
    """The wheelhouse as a CycloneDX document."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [
            {
                "type": "library",
                "name": wheel.name,
                "version": wheel.version,
                "purl": f"pkg:pypi/{wheel.name}@{wheel.version.replace('+', '%2B')}",
                "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
            }
            for wheel in wheels(wheelhouse)
        ],
    }
