"""Running system commands: one line of what failed, and processes known by id and start time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from coordinator.testbed.packages import SEARCH
from facility.exchange.errors import TransientError
from facility.exchange.process_start import started_at

ENVIRONMENT = {"PATH": SEARCH, "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"}


def call(*command: str | Path, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
    """Run and wait. Raises `TransientError` with the command and what it said when it fails."""
    environment = ENVIRONMENT | options.pop("env", {})
    result = subprocess.run(
        [str(word) for word in command],
        text=True,
        errors="replace",
        capture_output=True,
        env=environment,
        stdin=options.pop("stdin", subprocess.DEVNULL),
        **options,
    )
    if check and result.returncode:
        said = (result.stderr or result.stdout).strip()[-600:]
        raise TransientError(f"`{' '.join(map(str, command))}` ended with code {result.returncode}: {said}")
    return result


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll ten times a second. Raises `TransientError` saying `what` did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TransientError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.1)


def remember(pid: int, file: Path) -> None:
    """Write `pid starttime`, so that a pid used again by another process is never mistaken for ours."""
    file.write_text(f"{pid} {started_at(pid) or 0}\n", encoding="utf-8")


def recall(file: Path) -> int | None:
    """The pid in a file by `remember`, if that very process still lives."""
    try:
        pid, start = map(int, file.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return None
    return pid if started_at(pid) == start else None


def end(pids: Iterable[int], *, seconds: float = 5) -> None:
    """SIGTERM, then SIGKILL for those alive after `seconds`."""
    alive = {pid: start for pid in pids if (start := started_at(pid)) is not None}
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience
        while alive and time.monotonic() < deadline:
            time.sleep(0.05)
            alive = {pid: start for pid, start in alive.items() if not _reaped(pid) and started_at(pid) == start}
        if not alive:
            return
    raise TransientError(f"processes {sorted(alive)} do not end; look at them with `ps -p {','.join(map(str, alive))}`")


def _reaped(pid: int) -> bool:
    """Collect the exit status if the process is a child of this one."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def detach(command: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this command."""
    with open(log, "ab") as sink:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=ENVIRONMENT,
            cwd="/",
        )
