"""How many requests a gate works on at once: each is a process of the login node, and `hold` keeps one without end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.files.locks import take_lock
from facility.gating.refusal import Refused

MOST = 100
"""A federation with four connections of ten sessions each has forty."""


@contextmanager
def one_of_many(state: Path) -> Iterator[None]:
    """Take one of `MOST` places in the gate's own directory, until the process ends however. Raises `Refused`.

    Without a bound where the file system has no locks.
    """
    (place := state / "slots").mkdir(mode=0o700, exist_ok=True)
    first = os.getpid()
    for number in range(MOST):
        path = place / str((first + number) % MOST)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            taken = take_lock(file, path, wait=False)
        except OSError:
            taken = True
        if taken:
            try:
                yield
            finally:
                os.close(file)
            return
        os.close(file)
    raise Refused(f"{MOST} requests are being worked on, which is the most at once: end some of them")
