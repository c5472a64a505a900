"""Ports for what tests start: what looks for one later, meanwhile, is not given the same."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence

PORTS = range(12000, 20000)
"""Linux gives none of these to a socket that asks for any port, nor to a connection, and a job's launcher takes higher
ones (`facility.launching.place`)."""
KEPT = 100
"""So many of the last ports are this process's own: what was started at the others has long been listening."""


class Ports:
    """Ports that no other process of tests is given: each is held under a name that one process of a machine can have.

    A port that is bound to be found, and closed, may be any process's before the one it is for listens there: seconds
    later on a busy machine.
    """

    def __init__(self, ports: Sequence[int], kept: int) -> None:
        self._ports, self._kept = ports, kept
        self._held: deque[socket.socket] = deque()

    def take(self) -> int:
        for port in self._in_turn():
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0crossfed-tests-{port}")  # in no file system: it is gone with the process
            except OSError:
                name.close()
                continue
            self._held.append(name)
            if len(self._held) > self._kept:
                self._held.popleft().close()
            if _is_free(port):
                return port
        raise RuntimeError(f"ports {self._ports[0]} to {self._ports[-1]} are all taken")

    def _in_turn(self) -> Iterator[int]:
        first = secrets.randbelow(len(self._ports))
        yield from (*self._ports[first:], *self._ports[:first])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


free_port = Ports(PORTS, KEPT).take
