"""What a command that failed said last, as one sentence for a person."""

from __future__ import annotations

import re

from streamflow.log_handler import logger

from coordinator.events.event import quote_for_display
from facility.exchange.errors import ERROR, error_line
from facility.exchange.messages.outcome import Outcome

OF_A_COMMAND = re.compile(r"-?\d+ Command '.*?' on location \S+: (?=\S)", re.DOTALL)
"""Begins StreamFlow's error of a command at a facility; what the command itself said follows. Matched at the beginning
alone: looked for in a megabyte of digits, as a facility may print, it would take hours."""
LAST_LINES = 3
REPORTED = (Outcome.DONE, Outcome.SKIPPED, Outcome.CHECKPOINTED)
"""Codes of a facility's job that has left an update, or failure.json with the reason."""

UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""What a facility's command cannot raise here."""


def error_in(output: str) -> str:
    """The last line of `output` that names an error, or ''."""
    return quote_for_display(error_line(output.strip().splitlines()).removeprefix(ERROR))


def last_words(output: str) -> str:
    """The line that names the error in a job's output, else its last lines."""
    return error_in(output) or quote_for_display(" ".join(output.strip().splitlines()[-LAST_LINES:]))


def words_of_error(error: BaseException) -> str:
    """What went wrong at a facility, as the facility has said it; an error that no facility says, by its kind as well.

    The traceback of the latter goes to the engine's log: it is for whoever mends CrossFed.
    """
    text, kind = str(error), type(error).__name__
    said = text[begin.end() :] if (begin := OF_A_COMMAND.match(text)) else text
    if isinstance(error, UNEXPECTED):
        logger.error(f"an error that CrossFed did not expect: {kind}", exc_info=error)
        return f"{kind}: {said} (not expected by CrossFed: the traceback is in streamflow.log)"
    return said or kind


def words_of_job(facility: str, code: int, output: str) -> str:
    """A sentence on a facility's job that could not even leave its failure, or ''."""
    if code in REPORTED:
        return ""
    said = last_words(output)
    return f"{facility}: its job ended with code {code}" + (f": {said}" if said else "")
