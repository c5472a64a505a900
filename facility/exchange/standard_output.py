"""The standard output of a command that a person types: its letters, what is written last, a reader that is gone.

And the standard streams of any command, where whoever started it closed them.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress

from facility.exchange.exit_codes import ExitCode


def open_what_is_closed() -> None:
    """Read from and write to nowhere where a standard stream was closed, as by a shell's `>&-`.

    Python's is then None, and the next file that is opened takes its number: what libraries print would go into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")
            setattr(sys, name, stream)
            if stream.fileno() == number:  # processes that this one starts have it, too
                os.set_inheritable(number, True)


def run_and_flush(main: Callable[[], int | None]) -> int:
    """Run `main` and write out what it printed; returns its exit code, or `ExitCode.UNREAD` where nobody reads it.

    A letter that the locale lacks is written as an escape. Raises what `main` raises, and OSError where standard
    output takes no more (a full disk); whatever is then left of it goes nowhere.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # of a stream that was replaced below it
            sys.stdout.reconfigure(errors="backslashreplace")
    nowhere = _leads_nowhere()
    try:
        try:
            code = main() or ExitCode.OK
        except SystemExit:  # `--help` among others
            _flush()
            raise
        _flush()
        return code
    except (BrokenPipeError, SystemExit) as error:
        broken = error if isinstance(error, BrokenPipeError) else error.__context__  # rich and typer make an exit of it
        if not isinstance(broken, BrokenPipeError):
            raise
        if is_unread() or (_leads_nowhere() and not nowhere):  # rich has silenced it
            silence()
            return ExitCode.UNREAD
        raise broken from None
    except OSError:
        silence(only_if_held=True)
        raise


def is_unread() -> bool:
    """True where standard output is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no file; a system without poll
        return False


def silence(*, only_if_held: bool = False) -> None:
    """Let what standard output still holds go nowhere, so that the interpreter does not fail over it as it ends.

    `only_if_held`: where it can still be written, it is.
    """
    with suppress(OSError, ValueError, AttributeError):
        if only_if_held:
            try:
                _flush()
                return
            except OSError:
                pass
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _leads_nowhere() -> bool:
    try:
        return os.fstat(sys.stdout.fileno()).st_rdev == os.stat(os.devnull).st_rdev
    except (OSError, ValueError, AttributeError):
        return False


def _flush() -> None:
    with suppress(ValueError, AttributeError):  # it was closed, or is none
        sys.stdout.flush()
