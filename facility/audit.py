"""Follow an audit log's chain, and compare the log with what others were shown of it.

    python -m facility.audit verify FILE              the first broken line by its number; exits with 1 for a broken log
    python -m facility.audit head FILE                LINES:SHA256, which binds all lines so far
    python -m facility.audit compare FILE OTHER...    heads, copies of the log, or a gate's log, against FILE; exits
                                                      with 1 where one is not shown to be of the same log

`--head` (repeatable) of `verify` names heads or digests seen elsewhere, so that a log that was cut short is noticed: of
the coordinator's log they stand in models' manifests, of a gate's in updates'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import exit_on_error
from facility.exchange.logs import add_log_options
from facility.exchange.messages.audit_compare import compare_logs, head_of, verify_heads


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m facility.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["verify", "head", "compare"], help="what to do")
    parser.add_argument("file", type=Path, metavar="FILE", help="the log")
    parser.add_argument("--head", action="append", default=[], metavar="SHA256", help="digest seen before (repeat)")
    parser.add_argument("others", nargs="*", metavar="OTHER", help="compare: a head, a copy of the log or a gate's log")
    add_log_options(parser)
    arguments = parse_arguments(parser, argv)
    if arguments.command != "compare" and arguments.others:
        parser.error(f"{arguments.command} takes one log")
    if arguments.command != "verify" and arguments.head:
        parser.error(f"--head has no effect on {arguments.command}: give it to verify")
    if arguments.command == "head":
        print(head_of(arguments.file))
        return 0
    if arguments.command == "compare":
        text, code = compare_logs(arguments.file, arguments.others)
    else:
        text, code = verify_heads(arguments.file, arguments.head)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
