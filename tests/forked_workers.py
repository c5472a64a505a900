"""Processes of pytest-xdist as forks of the one that hands out the tests, which has imported what they collect.

Half of the seconds that each takes until its first test are imports of torch, transformers, the trainer and StreamFlow.
They are forked before that process has a thread or a handler of logs, and found by execnet where it would start a new
Python; one that is started later, in place of one that died, is a new Python.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import signal
import sys
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import execnet.gateway_io
import pytest
import torch
from xdist.scheduler import LoadGroupScheduling

from tests.distributed import IMPORTED, in_a_fork

READY: list[Forked] = []
"""Those that no gateway has taken yet."""


class Forked:
    """A worker that waits on its input for execnet's first line, as `python -c` does; used as a `subprocess.Popen`."""

    def __init__(self) -> None:
        reads, self.to = os.pipe()
        self.out, writes = os.pipe()
        self.pid = in_a_fork(lambda: work(reads, writes), (reads, writes))
        os.close(reads)
        os.close(writes)
        self.stdin, self.stdout = open(self.to, "wb"), open(self.out, "rb")

    def wait(self) -> int:
        with suppress(ChildProcessError):  # waited for already
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Gateway(execnet.gateway_io.Popen2IOMaster):
    """execnet's end of a worker: of a fork while there are some."""

    def __init__(self, arguments: list[str], execmodel: Any) -> None:
        if not READY:
            super().__init__(arguments, execmodel)
            return
        self.popen = READY.pop(0)
        execnet.gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


class Groups(LoadGroupScheduling):
    """Hands out one group after the other, and counts the tests of those that are not over: of all that a worker has
    ever had they would be counted as often as one ends."""

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        for scope in [scope for scope, unit in workload.items() if all(unit.values())]:
            del workload[scope]
        return super()._pending_of(workload)


def work(reads: int, writes: int) -> None:
    """Be a worker, to its end."""
    sys.stdin.close()  # Python 3.13 complains where a file is finalized whose descriptor is closed
    os.dup2(reads, 0)
    os.dup2(writes, 1)
    os.closerange(3, max(reads, writes) + 1)
    gc.disable()  # until it has collected its tests, as in `tests.conftest`
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.modules["__main__"] = main = types.ModuleType("__main__")  # not pytest's, which a new process would import
    exec(execnet.gateway_io.popen_bootstrapline, main.__dict__)
    atexit._run_exitfuncs()


def fork_workers(number: int, collected: Sequence[str], root: Path) -> None:
    """Import the tests of the arguments `collected`, and fork as many workers as execnet is about to start.

    A module that cannot be imported is left to the workers, which say why. Where one of them began a thread, none is
    forked, and workers are new Pythons: a fork would wait for ever for a thread that it lacks (OpenMP's, say).
    """
    torch.set_num_threads(1)
    logging.disable()  # what packages complain of as they are imported: pytest would show it to nobody either
    for name in (*IMPORTED, *_modules(collected, root)):
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    _read_constants()
    if threads() != 1:
        return
    gc.freeze()
    READY.extend(Forked() for _ in range(number))
    execnet.gateway_io.Popen2IOMaster = Gateway  # type: ignore[misc]


def _read_constants() -> None:
    """Have hypothesis read the constants of all these modules, as each worker would; it complains of the time."""
    with suppress(ImportError), warnings.catch_warnings():  # older ones do not
        from hypothesis.internal.conjecture.providers import _get_local_constants

        warnings.simplefilter("ignore")
        _get_local_constants()


def threads() -> int:
    """Threads of this process, but for that of pyarrow's allocator, which is begun anew in a fork; 0: not known."""
    try:
        return sum("jemalloc" not in one.read_text() for one in Path("/proc/self/task").glob("*/comm"))
    except OSError:
        return 0


def _modules(collected: Sequence[str], root: Path) -> list[str]:
    """The names of the modules of tests below or at these paths, or `path::test`."""
    paths = [Path(one.partition("::")[0]).resolve() for one in collected]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [".".join(file.relative_to(root).with_suffix("").parts) for file in files if file.is_relative_to(root)]
