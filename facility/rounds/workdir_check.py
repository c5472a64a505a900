"""Is the directory that a job works in this account's alone? Else its model, settings and update may be another's."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files.owners import first_not_ours
from facility.exchange.files.sweep import is_uuid


def check_workdir(job_directory: Path) -> None:
    """Raise `InputError` unless a job's directory that an engine made, and the `workdir` that it lies in, are this
    account's. Does nothing for other directories, which a person chose."""
    if not is_uuid(job_directory.name):
        return
    if reason := first_not_ours([job_directory.parent, job_directory]):
        raise InputError(
            f"this facility's workdir is not its account's alone, so that others may exchange the model and settings "
            f"of its jobs: {reason}; name another by `workdir:` in federation.yml"
        )
