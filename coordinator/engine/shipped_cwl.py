"""The CWL that ships with CrossFed, copied beside a federation.yml in a folder of its own: always this version's."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from coordinator.engine.masked_workflow import MASKED
from facility.exchange.files.durable import write_bytes
from facility.exchange.files.paths import shipped_path

log = logging.getLogger(__name__)

HAND_WRITTEN = (
    "main.cwl",
    "tools/start.cwl",
    "tools/send.cwl",
    "tools/train.cwl",
    "tools/receive.cwl",
    "tools/aggregate.cwl",
    "tools/evaluate.cwl",
    "tools/report.cwl",
)
OLD = ".old"
"""What the name of a replaced file has more."""


def differing_cwl(folder: Path, *, masked: bool) -> list[str]:
    """Names of the CWL files in `folder` that are absent or not those that ship with this CrossFed.

    `masked`: with those of secure aggregation.
    """
    names = (*HAND_WRITTEN, *(MASKED if masked else ()))
    return [name for name in names if _content(folder / name) != (shipped_path("cwl") / name).read_bytes()]


def update_shipped(folder: Path, *, masked: bool) -> list[Path]:
    """Copy what differs from the CWL that ships with this CrossFed into `folder`; returns the files that changed.

    An earlier version's tools have other inputs than this one's rendered workflow gives them. What is replaced stays
    beside it, named `.old`, and a warning says so.
    """
    changed = []
    for name in differing_cwl(folder, masked=masked):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            os.replace(target, old := target.with_name(target.name + OLD))
            log.warning(
                "%s was not the one that ships with this CrossFed (another version's, or edited): replaced; it is now "
                "%s",
                target,
                old,
            )
        write_bytes(target, (shipped_path("cwl") / name).read_bytes())
        changed.append(target)
    return changed


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
