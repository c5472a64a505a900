"""One line of the check's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fail", "skipped"]
ME = "coordinator"
"""Subject of rows on the coordinator's own machine and model."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Subject, finding and fix of one check."""

    subject: str
    """`federation`, `coordinator`, or a facility's name."""
    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    """What to do when the verdict is not ok."""


def ok(subject: str, check: str, found: str) -> Row:
    """A row that needs no action."""
    return Row(subject=subject, check=check, verdict="ok", found=found)


def fail(subject: str, check: str, found: str, fix: str) -> Row:
    """A row for what the run would fail at; `fix`: what to do."""
    return Row(subject=subject, check=check, verdict="fail", found=found, fix=fix)


def warning(subject: str, check: str, found: str, fix: str) -> Row:
    """A row for what the run survives, but a person should look at; `fix`: what to do."""
    return Row(subject=subject, check=check, verdict="warning", found=found, fix=fix)


def skipped(subject: str, check: str, why: str) -> Row:
    """A row for what could not be checked, and why."""
    return Row(subject=subject, check=check, verdict="skipped", found=why)
