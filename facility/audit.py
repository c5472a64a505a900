"""`python -m facility.audit verify FILE`: follow an audit log's chain; report the first broken line by its number.

Exits with 0 for a sound log and 1 for a broken one. `--head` (repeatable) names digests seen elsewhere, so that a log
that was cut short is noticed: of the coordinator's log they stand in models' manifests, of a gate's in updates'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.errors import InputError, exit_on_error
from facility.exchange.files.audit_log import verify
from facility.exchange.logs import add_log_options


def report(file: Path, heads: list[str]) -> tuple[str, int]:
    """A sentence on the log and the exit code. Raises `InputError` when it cannot be read."""
    try:
        found = verify(file, heads)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; expected an audit log") from None
    return found.sentence(file), int(found.broken > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m facility.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["verify"], help="what to do")
    parser.add_argument("file", type=Path, metavar="FILE", help="the log")
    parser.add_argument("--head", action="append", default=[], metavar="SHA256", help="digest seen before (repeat)")
    add_log_options(parser)
    arguments = parser.parse_args()
    text, code = report(arguments.file, arguments.head)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
