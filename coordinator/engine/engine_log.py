"""What StreamFlow's log says of its own end."""

from __future__ import annotations

import re

RECORD = re.compile(r"\d{4}-\d\d-\d\d [\d:.,]+ +(?P<level>[A-Z]+) +(?P<words>.*)")
"""What stands between two records, such as a traceback, belongs to the first."""
MOST_LETTERS = 300


def last_error(line: str, before: str) -> str:
    """The error that the log ends with, once a further line has come; '' where another record follows it.

    `before`: the error that it ended with until then.
    """
    if (record := RECORD.match(line)) is None:
        return before
    return record["words"].strip()[:MOST_LETTERS] if record["level"] in ("ERROR", "CRITICAL") else ""


def ended(code: int, error: str) -> str:
    """How StreamFlow ended, with the error that its log ends with."""
    return f"StreamFlow ended with code {code}" + (f": {error}" if error else "")
