"""Steps of the workflow as forks of one process that has imported their modules: `python -m MODULE` without its start.

    python -m coordinator.streamflow_plugin.step_server FD

An interpreter that imports a step's modules takes longer than most steps. This process imports a module when it is
asked for it first, and forks for every request: the child runs the module as `python -m` would (`runpy`), in its own
directory, with its own environment and output. FD is a socket of the engine's (SOCK_SEQPACKET), on which a request
comes as JSON with the descriptor for its output, and on which its exit code goes back. When the engine is gone, this
process ends, and steps at work go on, as processes of their own would.

Only modules of CrossFed are run, and only the process that made the socket can ask for them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.streamflow_plugin.names import STEP_SERVER

MOST_BYTES = 1 << 17
"""Most bytes of a request."""


class StepServer:
    """Forks for requests, and answers with exit codes."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.running: dict[int, int] = {}
        """Process -> number of its request."""
        self.ended = readable_at_ends()

    def serve(self) -> None:
        """Until the engine closes its end of the socket."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            selector.register(self.ended, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self.channel:
                        self._reap()
                    elif not self._take():
                        return

    def _take(self) -> bool:
        """Start what one request asks for; False where there will be no more."""
        text, handles, _, _ = socket.recv_fds(self.channel, MOST_BYTES, 1)
        if not text:
            return False
        request, out = json.loads(text), handles[0]
        with suppress(Exception, SystemExit):  # the child meets the same error, and reports it
            importlib.import_module(request["module"])
        gc.freeze()
        child = os.fork()
        if child == 0:
            nothing = os.open(os.devnull, os.O_RDONLY)
            become(request, (nothing, out, out))
        os.close(out)
        self.running[child] = request["number"]
        return True

    def _reap(self) -> None:
        for child, code in ended_children(self.ended):
            answer = {"number": self.running.pop(child), "code": code if code >= 0 else 128 - code}
            with suppress(OSError):  # the engine is gone
                self.channel.send(json.dumps(answer).encode())


def readable_at_ends() -> int:
    """A descriptor that can be read from once a child of this process has ended; for `ended_children`."""
    ended, ends = os.pipe()
    for end in (ended, ends):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ended


def ended_children(ended: int) -> Iterator[tuple[int, int]]:
    """Each child that has ended since, and its exit code, negative for a signal."""
    with suppress(BlockingIOError):
        os.read(ended, 4096)
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        yield child, os.waitstatus_to_exitcode(status)


def become(request: dict[str, Any], standard: Sequence[int]) -> None:
    """Be the process that the request asks for, to its end; `standard`: descriptors of its input, output and errors."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handle in enumerate(standard):
            os.dup2(handle, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        name(request["module"].rpartition(".")[2])
        code = run_module(request["module"], request["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_module(module: str, arguments: list[str]) -> int:
    """The exit code of `python -m MODULE ARGUMENTS...`."""
    sys.argv = [module, *arguments]
    sys.path[0] = os.getcwd()
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def name(word: str) -> None:
    """What `ps` and `top` show of this process."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(word, encoding="utf-8")


def main() -> int:
    name(STEP_SERVER)
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(KeyboardInterrupt):
        StepServer(channel).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
