"""Wait in a job for the command of its round; what a job that is submitted ahead of its model runs first.

    python -m facility.ahead --directory DIR --wait SECONDS && . DIR/command

Ends with 0 once `DIR/command` exists (`facility.exchange.messages.ahead`): the round's command, written by the
coordinator, or `exit 0`, written here after `--wait` seconds or at a signal that the job is about to end. Every task of
a job runs this. `DIR` belongs to this account alone, and so does what it holds.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from facility.exchange.errors import ConfigurationError, CrossFedError, exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.logs import add_log_options
from facility.exchange.messages.ahead import COMMAND, GIVEN_UP, WAITED, Waited
from facility.exchange.messages.outcome import ENDING
from facility.launch import tasks_here

OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Ended:
    """Whether a signal has asked the job to end. Its handler takes no lock: the loop it interrupts may hold it."""

    requested = False

    def heed(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def wait_for_command(directory: Path, seconds: float, ended: Ended, look: float) -> float:
    """Wait until `directory` holds `command`; returns the seconds waited. After `seconds`, or once the job is asked
    to end, the file is made here."""
    began = time.monotonic()
    while COMMAND not in os.listdir(directory):  # listing the directory asks a network file system anew
        left = seconds - (time.monotonic() - began)
        if left <= 0 or ended.requested:
            give_up(directory)
            break
        time.sleep(min(look, left))  # taken up again after a signal: that is heeded at the next look
    return time.monotonic() - began


def give_up(directory: Path) -> None:
    """Decide that this job gets no round, unless that is decided already.

    Raises `ConfigurationError` where the file system has no hard links: then no round can be handed over either.
    """
    own = directory / f"end.{os.uname().nodename}.{os.getpid()}"
    own.write_text(GIVEN_UP, encoding="utf-8")
    try:
        os.link(own, directory / COMMAND)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigurationError(f"{directory} takes no hard link ({error}): remove submit_ahead") from None
    finally:
        own.unlink(missing_ok=True)


def check_private(path: Path) -> None:
    """Raise `ConfigurationError` unless the directory or file is this account's, and writable by no other."""
    found = path.lstat()
    plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    if not plain or found.st_uid != os.getuid() or found.st_mode & OTHERS:
        raise ConfigurationError(
            f"{path} is of user {found.st_uid} with mode {stat.filemode(found.st_mode)}, expected a file or directory "
            "that only this account writes"
        )


def _here() -> tuple[bool, int]:
    """Whether this task speaks for the job, and how many nodes that has."""
    try:
        tasks = tasks_here()
    except CrossFedError:
        return True, 1
    return tasks.first, max(1, tasks.nodes)


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    p = argparse.ArgumentParser(prog="python -m facility.ahead", description=__doc__.splitlines()[0])
    p.add_argument("--directory", type=Path, required=True, metavar="DIR", help="made for this job alone")
    p.add_argument("--wait", type=float, required=True, metavar="SECONDS", help="at most; 0: not at all")
    p.add_argument("--look", type=float, default=1.0, metavar="SECONDS", help="between two looks (default 1)")
    add_log_options(p)
    a = p.parse_args(argv)
    ended = Ended()
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, ended.heed)
    os.umask(0o077)
    check_private(a.directory)
    seconds = wait_for_command(a.directory, a.wait, ended, a.look)
    check_private(a.directory / COMMAND)
    first, nodes = _here()
    if first:
        handed = (a.directory / COMMAND).read_text(encoding="utf-8") != GIVEN_UP
        write_json(a.directory / WAITED, asdict(Waited(seconds=round(seconds, 3), nodes=nodes, handed=handed)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
