"""The exception tree shared by both sides.

    CrossFedError                 every error a user can see; the message says what was found, expected, and what to do
    ├── InputError (ValueError)   fix the input: trying again will not help
    │   ├── ConfigurationError    a settings file; carries file and line
    │   │   ├── NewerFormat       a file of a newer version of CrossFed
    │   │   └── UnknownKey        a key that is not declared
    │   ├── CheckpointError       a checkpoint or one of its files
    │   │   └── ManifestError     a directory that is not what its manifest says
    │   ├── NotWritten            a file system that takes no more; raised on every rank where one of them met it
    │   └── UpdateRefused         an update that may not take part in a round; carries the facility's name
    └── TransientError            the same command may succeed later

An `assert` marks our own mistakes, never the user's.
"""

from __future__ import annotations

import gc
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import clear_frames

from facility.exchange.addresses import hidden_login
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.storage import file_error_sentence, is_path, is_storage
from facility.exchange.interrupts import WORD, traceback_again
from facility.exchange.logs import configure_logging, escape_controls
from facility.exchange.standard_output import open_what_is_closed, run_and_flush

ERROR = "error: "
"""Begins the line by which a command ends for an error that is meant for its user."""
ENDS = re.compile(rf"({ERROR}|[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b)")
"""Begins that line, or the last one of Python's traceback."""


KEPT = 120
"""Characters of a long value that a message shows, beside its end."""
LONG = (
    re.compile(r"(?<!\w)'(?:\\.|[^'\\\n]){400,}'"),
    re.compile(r'(?<!\w)"(?:\\.|[^"\\\n]){400,}"'),
    re.compile(r"(?<= is )[\[{(][^\n]{400,}[\]})](?=, expected)"),
    re.compile(r"[^\s/]{400,}|\S{4100,}"),
)
"""Values that a message quotes, lists and mappings that it says of a key, and words that are no path of any system."""


class CrossFedError(Exception):
    """Base of every error meant for the user."""


class InputError(CrossFedError, ValueError):
    """The input must be changed; trying again will not help."""


class ConfigurationError(InputError):
    """A settings file holds something wrong: at a given line, or under a given key such as `training.steps`."""

    def __init__(
        self, message: str, *, file: Path | str | None = None, line: int | None = None, key: str | None = None
    ) -> None:
        self.message, self.file, self.line, self.key = message, file, line, key
        place = "" if file is None else f"{file}: " if line is None else f"{file}:{line}: "
        super().__init__(place + message)


class NewerFormat(ConfigurationError):
    """A file's `format`, or a key of it, is newer than this version of CrossFed reads."""


class UnknownKey(ConfigurationError):
    """A key that is not declared: misspelt, or of a newer version."""


class CheckpointError(InputError):
    """A checkpoint directory or one of its files is not usable."""


class ManifestError(CheckpointError):
    """A directory does not hold what its manifest says."""

    def __init__(self, found: str, advice: str = "") -> None:
        """`advice`: what to do about a directory that was sent; of one that is kept, whoever keeps it says what."""
        self.found = found
        super().__init__(f"{found}{advice}")


class NotWritten(InputError):
    """A file system takes no more: full, over a quota, read-only."""


class UpdateRefused(InputError):
    """An update may not take part in its round."""

    def __init__(self, facility: str, reason: str) -> None:
        self.facility, self.reason = facility, reason
        super().__init__(f"update of facility {facility!r} refused: {reason}")


class TransientError(CrossFedError):
    """A transient error: the same command may succeed later."""


def first_line(error: BaseException) -> str:
    """First line of what an exception says; its type's name where it says nothing."""
    return str(error).partition("\n")[0] or type(error).__name__


def named_line(error: BaseException) -> str:
    """Type and first line of what a library raised, whose words alone may be no more than a key."""
    said = first_line(error)
    return said if said == type(error).__name__ else f"{type(error).__name__}: {said}"


def error_line(lines: Sequence[str]) -> str:
    """The last of the lines of a command's output that names an error; '' where none does."""
    return next((line for line in reversed(lines) if ENDS.match(line)), "")


def for_terminal(text: str) -> str:
    """A message for a terminal: names of files and words of libraries move no cursor, no address shows a login, and no
    value fills the screen."""
    return escape_controls(bounded(hidden_login(text)))


def bounded(text: str) -> str:
    """The message with the middle left out of each quoted value, list and word that is very long."""
    for pattern in LONG:
        text = pattern.sub(_shortened, text)
    return text


def _shortened(found: re.Match[str]) -> str:
    value = found[0]
    return f"{value[:KEPT]}[... {len(value) - KEPT - 20:,} characters ...]{value[-20:]}"


def let_go(error: BaseException) -> None:
    """Close what the calls that failed hold open: the room of a file that was removed is free only then, and how much
    is free is said."""
    failed: BaseException | None = error
    while failed is not None:
        clear_frames(failed.__traceback__)
        failed = failed.__cause__ or failed.__context__
    gc.collect()


def exit_on_error(main: Callable[[], int | None], *, level: str = "warning", in_job: bool = False) -> int:
    """Run `main` and turn a `CrossFedError`, or a file system that refuses, into one line on stderr and its exit code.

    `level`: what is logged unless the user asks otherwise. `in_job`: a job or step of the workflow, whose output is a
    log file: it logs `info`. Of other commands, which a person types, a path that does not fit is such a line, too,
    Ctrl-C ends them with a word, and a reader of their output that is gone (`| head -1`) without one. Whatever the
    umask, nothing that `main` makes, or what it starts, may be written by every account.
    """
    os.umask(os.umask(0o077) | stat.S_IWOTH)
    open_what_is_closed()
    configure_logging(default="info" if in_job else level)
    if in_job:
        traceback_again()
    try:
        return main() or ExitCode.OK if in_job else run_and_flush(main)
    except CrossFedError as error:
        print(f"{ERROR}{for_terminal(str(error))}", file=sys.stderr)
        return ExitCode.TRANSIENT if isinstance(error, TransientError) else ExitCode.INPUT
    except OSError as error:
        if not (is_storage(error) or (not in_job and is_path(error))):
            raise
        let_go(error)
        print(f"{ERROR}{for_terminal(file_error_sentence(error, again=not in_job))}", file=sys.stderr)
        return ExitCode.INPUT
    except KeyboardInterrupt:
        if in_job:
            raise
        print(WORD, file=sys.stderr)
        return ExitCode.INTERRUPTED
