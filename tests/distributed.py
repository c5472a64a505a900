"""Start a function on several real gloo processes.

The processes are forks of one server a test process has, which imported torch, transformers and the trainer once and
started no thread: 50 ms a rank, not the seconds that an import takes, and yet each rank is a new process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty
from typing import Any
from unittest import mock

from facility.exchange.registry import Registry
from tests.ports import free_port

IMPORTED = ["tests.imported"]


def processes_that_stay_imported() -> Any:
    """The multiprocessing context whose processes are forks of the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def fork_server_from_here() -> None:
    """Import what the server preloads, and make the server a fork of this process, which need not import it again.

    For a process of pytest-xdist before it collects, which imports nearly all of it then: no thread but execnet's runs.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    processes_that_stay_imported()
    resource_tracker.ensure_running()
    with mock.patch("multiprocessing.util.spawnv_passfds", _serve_in_a_fork):
        multiprocessing.forkserver.ensure_running()


def _serve_in_a_fork(_: bytes, arguments: list[str], kept: Sequence[int]) -> int:
    """Start `python -c code WORD...` with the descriptors `kept` and the standard ones, as a fork; returns its process.

    The words are this process's own: Python 3.14 gives them to the server so, those before it within the code.
    """
    at = arguments.index("-c") + 1

    def serve() -> None:
        sys.argv = ["-c", *arguments[at + 1 :]]
        exec(arguments[at], {})

    return in_a_fork(serve, kept)


def in_a_fork(serve: Callable[[], object], kept: Sequence[int]) -> int:
    """Start a fork that serves, with the descriptors `kept` and the standard ones; returns its process."""
    child = os.fork()
    if child:
        return child
    try:
        faulthandler.disable()  # pytest's descriptor is closed here, and its number is soon that of another file
        for before, after in itertools.pairwise(sorted({2, *kept, os.sysconf("SC_OPEN_MAX")})):
            os.closerange(before + 1, after)
        sys.stdin, sys.stdout = open(os.devnull), open(1, "w", closefd=False)  # in place of pytest's
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.meta_path = [one for one in sys.meta_path if type(one).__name__ != "AssertionRewritingHook"]
        gc.collect()
        gc.freeze()
        gc.enable()
        serve()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _join(rank: int, world: int, port: int, environment: dict[str, str]) -> None:
    """Become a rank of a gloo group."""
    os.environ.clear()  # the server's is that of the first test
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def _entry(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    environment: dict[str, str],
    arguments: tuple[Any, ...],
    queue: Any,
) -> None:
    _join(rank, world, port, environment)
    try:
        queue.put((rank, True, function(rank, world, *arguments)))
        code = 0
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        code = 1
    queue.close()
    queue.join_thread()
    sys.stdout.flush()
    os._exit(code)  # torch 2.13 sometimes aborts at interpreter exit after FSDP on a CPU


class Started:
    """`python -m module arguments` in a fork of the server: a process of its own, but for the imports."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        outputs: Path,
        environment: dict[str, str],
        *,
        directory: Path | None = None,
    ) -> None:
        """`outputs`: where what it prints goes; `directory`: its working directory, if not the server's."""
        outputs.mkdir(parents=True, exist_ok=True)
        self.module, self.arguments = module, arguments
        self.out, self.err = outputs / "stdout", outputs / "stderr"
        target = processes_that_stay_imported().Process
        self.process = target(target=_module, args=(module, arguments, self.out, self.err, environment, directory))
        self.process.start()

    def says(self, words: str, *, seconds: float = 200) -> bool:
        """Wait until stderr holds `words`; False where the process ends without."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            alive = self.process.is_alive()
            if self.err.exists() and words in self.err.read_text():
                return True
            if not alive:
                return False
            time.sleep(0.02)
        raise AssertionError(f"{self.module} has not said {words!r} in {seconds:g} s:\n{self.err.read_text()}")

    def printed(self) -> str:
        """What it has printed so far, on both streams."""
        return "".join(place.read_text() for place in (self.out, self.err) if place.exists())

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self, *, seconds: float = 200) -> subprocess.CompletedProcess[str]:
        """Wait for the end; after `seconds` the process is killed and the test fails."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"{self.module} still runs after {seconds:g} s:\n{self.err.read_text()}")
        words = [self.module, *self.arguments]
        return subprocess.CompletedProcess(words, self.process.exitcode, self.out.read_text(), self.err.read_text())

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def help_of(module: str, outputs: Path, *words: str) -> str:
    """What `python -m module words --help` prints, on a wide terminal; it must end with 0."""
    done = Started(module, [*words, "--help"], outputs, os.environ | {"COLUMNS": "200"}).ended()
    assert done.returncode == 0, f"{module} {' '.join(words)}: {done.stderr}"
    return done.stdout


def forget_installed() -> None:
    """Have registries look for entries of other packages anew: the path is another one."""
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if issubclass(type(value), Registry):
                vars(value).pop("installed", None)


def _module(
    module: str, arguments: list[str], out: Path, err: Path, environment: dict[str, str], directory: Path | None
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if more := [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", *sys.path)]:
        sys.path[1:1] = more
        forget_installed()
    tempfile.tempdir = None  # the server may have looked TMPDIR up, as it was there
    if directory is not None:
        os.chdir(directory)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = [module, *arguments]
    warnings.simplefilter("ignore", RuntimeWarning)  # that the server has imported the module already
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_distributed(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 250) -> list[Any]:
    """Call `function(rank, world, *arguments)` on `world` processes; results by rank, picklable and small.

    `function` must be importable (top level of a test module). A failing rank's traceback becomes an AssertionError.
    """
    context = processes_that_stay_imported()
    queue = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_entry, args=(function, rank, world, port, dict(os.environ), arguments, queue))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < world:
            rank, good, value = queue.get(timeout=max(0.1, deadline - time.monotonic()))
            assert good, f"rank {rank} failed:\n{value}"
            results[rank] = value
    finally:
        for process in processes:
            process.join(timeout=5 if len(results) == world else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    return [results[rank] for rank in range(world)]


class StayingRanks:
    """Ranks that stay for one call of a function after another: models are imported and the group is made once.

    Where a rank dies or is silent, all are replaced before the next call, and so are those that served `most_calls`:
    each group that a call makes leaves a thread of gloo's in the process. One alone joins no group.
    """

    def __init__(self, function: Callable[..., Any], world: int = 1, *, most_calls: int = 8) -> None:
        """`function(rank, world, *arguments)` must be importable, and return what fails as what succeeds."""
        self.function, self.world, self.most_calls = function, world, most_calls
        self.calls = 0
        self.processes: list[Any] = []

    def __call__(self, *arguments: Any, timeout: float = 200, grace: float = 60) -> dict[int, Any]:
        """What each rank returns, by rank; none of a rank that dies or is silent.

        `timeout`: seconds until the first answer; `grace`: seconds from one answer to the next.
        """
        if self.calls >= self.most_calls:
            self.end()
        self._start()
        self.calls += 1
        answers: dict[int, Any] = {}
        for requests in self.requests:
            requests.put(arguments)
        deadline = time.monotonic() + timeout
        while len(answers) < self.world and time.monotonic() < deadline:
            try:
                rank, value = self.answers.get(timeout=0.2)
            except Empty:
                if not all(process.is_alive() for process in self.processes):
                    deadline = min(deadline, time.monotonic() + 0.5)
                continue
            answers[rank] = value
            deadline = time.monotonic() + grace
        if len(answers) < self.world:
            self.end()
        return answers

    def _start(self) -> None:
        if self.processes and all(process.is_alive() for process in self.processes):
            return
        self.end()
        context = processes_that_stay_imported()
        self.answers = context.Queue()
        self.requests = [context.Queue() for _ in range(self.world)]
        port = free_port()
        self.processes = [
            context.Process(
                target=_stay,
                args=(self.function, rank, self.world, port, dict(os.environ), requests, self.answers),
            )
            for rank, requests in enumerate(self.requests)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> StayingRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.calls = [], 0


def _stay(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    environment: dict[str, str],
    requests: Any,
    answers: Any,
) -> None:
    """Answer each call until the process that asks is no more."""
    if world > 1:
        _join(rank, world, port, environment)
    asking = multiprocessing.parent_process()
    while asking is None or asking.is_alive():
        with contextlib.suppress(Empty):
            arguments = requests.get(timeout=5)
            answers.put((rank, function(rank, world, *arguments)))
    os._exit(0)
