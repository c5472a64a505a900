"""`crossfed report`: the report of a federation.yml."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation, read_federation
from coordinator.report.data import gather
from coordinator.report.redaction import redacted
from coordinator.report.write import FORMATS, write_report
from facility.exchange.errors import InputError


def data_of(federation: Federation) -> dict[str, Any]:
    """The report's data of a federation as its file describes it."""
    settings = dataclasses.asdict(federation)
    for name in ("file", "archive", "workdir", "deprecated"):
        settings.pop(name)
    return gather(
        Archive(federation.archive_path),
        federation=federation.name,
        settings=redacted(settings),
        carbon=federation.carbon_g_per_kwh,
    )


def make_report(file: Path, out: Path | None = None, format: str = "") -> Path:
    """Write the report; returns where. Raises `InputError` for a format that there is not, or an archive not begun.

    Without a format it is the one that the name of `out` ends in, else HTML.
    """
    ending = out.suffix.lower().removeprefix(".") if out is not None else ""
    format = format or (ending if ending in FORMATS else "html")
    if format not in FORMATS:
        raise InputError(f"--format is {format!r}, expected one of {', '.join(FORMATS)}")
    federation = read_federation(file)
    if not federation.archive_path.is_dir():
        raise InputError(f"there is no archive {federation.archive_path} yet: `crossfed run` begins it")
    return write_report(data_of(federation), out or federation.archive_path / f"report.{format}", format)
