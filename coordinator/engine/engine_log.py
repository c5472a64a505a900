"""What StreamFlow's log says of its own errors; what facilities say stands behind other words."""

from __future__ import annotations

import re

RECORD = re.compile(r"\d{4}-\d\d-\d\d [\d:.,]+ +(?P<level>[A-Z]+) +(?P<words>.*)")
"""What stands between two records, such as a traceback, belongs to the first."""
MOST_LETTERS = 300


def error_in(line: str) -> str | None:
    """The words of an error that a line of the log reports; '' of another record, None for a line that begins none."""
    record = RECORD.match(line)
    return None if record is None else record["words"].strip() if record["level"] == "ERROR" else ""


def last_error(line: str, before: str) -> str:
    """The error that the log ends with, once a further line has come; '' where another record follows it.

    `before`: the error that it ended with until then.
    """
    return before if (error := error_in(line)) is None else error[:MOST_LETTERS]


def how_engine_ended(code: int, error: str) -> str:
    """How StreamFlow ended, with the error that its log ends with."""
    return f"StreamFlow ended with code {code}" + (f": {error}" if error else "")
