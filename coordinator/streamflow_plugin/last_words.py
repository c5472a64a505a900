"""What a command that failed said last, as one sentence for a person."""

from __future__ import annotations

import re

from coordinator.events.event import quoted
from facility.exchange.errors import ERROR, error_line
from facility.exchange.messages.outcome import Outcome

OF_A_COMMAND = re.compile(r"-?\d+ Command '.*?' on location \S+: (?=\S)", re.DOTALL)
"""Begins StreamFlow's error of a command at a facility; what the command itself said follows."""
LAST_LINES = 3
REPORTED = (Outcome.DONE, Outcome.SKIPPED, Outcome.CHECKPOINTED)
"""Codes of a facility's job that has left an update, or failure.json with the reason."""


def error_in(output: str) -> str:
    """The last line of `output` that names an error, or ''."""
    return quoted(error_line(output.strip().splitlines()).removeprefix(ERROR))


def last_words(output: str) -> str:
    """The line that names the error in a job's output, else its last lines."""
    return error_in(output) or quoted(" ".join(output.strip().splitlines()[-LAST_LINES:]))


def words_of_error(error: BaseException) -> str:
    """What went wrong at a facility, as the facility has said it."""
    return OF_A_COMMAND.sub("", str(error), count=1) or type(error).__name__


def words_of_job(facility: str, code: int, output: str) -> str:
    """A sentence on a facility's job that could not even leave its failure, or ''."""
    if code in REPORTED:
        return ""
    said = last_words(output)
    return f"{facility}: its job ended with code {code}" + (f": {said}" if said else "")
