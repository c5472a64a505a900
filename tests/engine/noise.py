"""What must never be on a person's console: the engine's own lines, tracebacks, a stop that is told twice."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOISE = (
    re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d{3}\b"),
    re.compile(r"Traceback \(most recent call last\)"),
    re.compile(r'^\s*File "[^"]+", line \d+'),
    re.compile(r"\b(EXECUTING|COMPLETED|SKIPPED|CANCELLED|FAILED) (Step|step|Job|job|Workflow|workflow)\b"),
    re.compile(r"\b(DEPLOYING|UNDEPLOYING|COPYING) "),
    re.compile(r"\bWorkflowExecutionException\b|\bFailureHandlingException\b|\bTask exception was never retrieved\b"),
)
"""StreamFlow's format (the date, milliseconds, its level and its own words), and what Python prints of an exception."""
STOP = re.compile(r"^the run ended with code -?\d+: ")


def noise(lines: Sequence[str]) -> list[str]:
    """Lines of a console that are the engine's or Python's, a second line for a stop, and one said twice at once.

    A table's rows may repeat, and what happens again is told again; a sentence with the same time of day may not follow
    itself.
    """
    plain = [ANSI.sub("", line).rstrip() for line in lines]
    found = [line for line in plain if any(one.search(line) for one in NOISE)]
    found += [line for line in plain if STOP.match(line)][1:]
    timed = [line for line in plain if re.match(r"\d\d:\d\d:\d\d ", line)]
    return found + [b for a, b in zip(timed, timed[1:], strict=False) if a == b]
