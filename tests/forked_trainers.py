"""Trainers of a federation as forks of one process that has imported torch, transformers and the trainer.

Of the five seconds that a pico round takes, a trainer imports four and a half. `variables()` are for the environment of
an engine whose trainers are to do without: `startup/sitecustomize.py` sends each `python -m facility.train` here. It
stays a process of its own, with its own directory, environment and output; what signals or kills it, signals or kills
the fork. Not for what measures a trainer's processes or pauses them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.streamflow_plugin.step_server import MOST_BYTES, become, ended_children, readable_at_ends
from tests.distributed import in_a_fork

STARTUP = Path(__file__).with_name("startup")
SOCKET = "CROSSFED_TEST_TRAINERS"
PLACES: list[Path] = []
"""Where the server of this process listens, once it has one."""


def variables() -> dict[str, str]:
    """For the environment of whatever starts trainers; a bench may run without the path that tests have."""
    own = os.environ.get("PYTHONPATH") or str(Path(__file__).parents[1])
    path = os.pathsep.join([own, str(STARTUP)])  # Python imports one sitecustomize, the first
    return {"PYTHONPATH": path, SOCKET: str(_socket())}


def _socket() -> Path:
    """Where the server of this test process listens, which starts now if none does; it ends with this process."""
    if not PLACES:
        PLACES.append(_started(_as_a_process))
    return PLACES[0]


def _as_a_process(listener: int, alive: int) -> None:
    command = [sys.executable, "-m", __name__, str(listener), str(alive)]
    subprocess.Popen(command, pass_fds=(listener, alive), start_new_session=True)


def fork_server_from_here() -> None:
    """Make the server a fork of this process, which has imported `tests.imported` and has no thread that matters."""
    PLACES.append(_started(lambda listener, alive: in_a_fork(lambda: serve(listener, alive), (listener, alive))))


def _started(start: Callable[[int, int], object]) -> Path:
    """Start a server with the descriptors of its listener and of a pipe that ends with this process."""
    place = Path(tempfile.mkdtemp(prefix="trainers-")) / "socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    listener.listen(64)
    reads, writes = os.pipe()  # `writes` stays open as long as this process is there
    start(listener.fileno(), reads)
    listener.close()
    os.close(reads)
    return place


class Server:
    """Forks for those that connect; one selector over them, the listener, ended forks and the end of the tests."""

    def __init__(self, listener: socket.socket, alive: int) -> None:
        self.listener = listener
        self.forks: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        ended = readable_at_ends()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(ended, selectors.EVENT_READ, functools.partial(self._reap, ended))
        self.selector.register(alive, selectors.EVENT_READ, self._end)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def _accept(self) -> None:
        client = self.listener.accept()[0]
        text, handles, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
        if not text:  # it was killed at once
            client.close()
            return
        fork = os.fork()
        if fork == 0:
            train(json.loads(text), handles)
        for handle in handles:
            os.close(handle)
        with suppress(OSError):  # gone meanwhile: its end is noticed below
            client.send(str(fork).encode())
        self.forks[fork] = client
        self.selector.register(client, selectors.EVENT_READ, functools.partial(self._kill, fork, client))

    def _kill(self, fork: int, client: socket.socket) -> None:
        """Its process was killed: so is the fork, unless it ended at the same time."""
        if fork in self.forks:
            self.selector.unregister(client)
            os.kill(fork, signal.SIGKILL)

    def _reap(self, ended: int) -> None:
        for fork, code in ended_children(ended):
            client = self.forks.pop(fork)
            with suppress(KeyError):  # of one that was killed
                self.selector.unregister(client)
            with suppress(OSError):
                client.send(str(code).encode())
            client.close()

    def _end(self) -> None:
        for fork in self.forks:
            os.kill(fork, signal.SIGKILL)
        shutil.rmtree(Path(self.listener.getsockname()).parent, ignore_errors=True)
        os._exit(0)


def train(asked: dict[str, Any], standard: Sequence[int]) -> None:
    """Be the trainer that is asked for, in a session of its own and with its signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    path = asked["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path[1:1] = [one for one in path if one not in sys.path]
    become(asked, standard)


def serve(listener: int, alive: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the tests, not before them
    if os.getsid(0) != os.getpid():
        os.setsid()
        sys.path.insert(0, os.getcwd())  # as for `python -m`: a trainer's own directory takes its place
    Server(socket.socket(fileno=listener), alive).serve()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import tests.imported  # noqa: F401

    gc.collect()
    gc.freeze()
    serve(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
