"""Directories of a facility's state that say themselves whether they are whole: `seal.json` with sizes and digests.

What a round keeps for the next (optimizer state, mid-round checkpoint, local parameters, residual) is sealed where it
is written, and verified before a round uses it. A damaged directory is put aside and the round begins without it, as on
the first day; one from before seals existed is used as it is.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import sha256_of

SEAL = "seal.json"
ASIDE = "damaged"
SELF_CHECKED = ("finished", "models", ASIDE)
"""Parts of the state that have manifests of their own, and what was put aside before."""


def seal(directory: Path) -> None:
    """Write the digests of the files of a complete directory."""
    files = {path.name: sha256_of(path) for path in sorted(directory.iterdir()) if path.is_file() and path.name != SEAL}
    write_json(directory / SEAL, files)


def flaw(directory: Path) -> str:
    """What differs from the seal, '' for nothing."""
    try:
        promised = json.loads((directory / SEAL).read_text())
        for name, digest in promised.items():
            path = directory / name
            if not path.is_file():
                return f"{path} is missing"
            if sha256_of(path) != digest:
                return f"{path} was altered"
    except (OSError, ValueError, AttributeError) as error:
        return f"{directory / SEAL} cannot be read: {error}"
    return ""


def put_aside_damaged(state: Path) -> list[str]:
    """Move damaged directories of a facility's state to `damaged/`; returns a sentence for each."""
    told = []
    for found in sorted(state.rglob(SEAL)):
        directory = found.parent
        inner = directory.relative_to(state)
        if inner.parts[:1] and inner.parts[0] in SELF_CHECKED or not (reason := flaw(directory)):
            continue
        aside = state / ASIDE / f"{'-'.join(inner.parts)}-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.parent.mkdir(exist_ok=True)
        directory.rename(aside)
        told.append(f"{reason}: put aside in {aside}; this round begins without it, from the received model")
    return told
