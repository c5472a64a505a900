"""Faults that can be made and undone: a damaged file, a file system that is read-only or full, a directory refused.

Each is a context manager over a federation's root. It yields what is to be done at the cause's moment, which is nothing
where the fault is there from the start. File systems are real: a bind mount that is read-only, a small tmpfs that is
filled; both need root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

Act = Callable[[], None]
Harm = Callable[[Path], AbstractContextManager[Act]]
MEGABYTES = 24
"""Of the small file systems."""
FILLER = ".filler"


def flipped(data: bytes) -> bytes:
    """The last bit is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


def cut(data: bytes) -> bytes:
    """Half of it, as after a crash."""
    return data[: len(data) // 2]


def altered(pattern: str, change: Callable[[bytes], bytes]) -> Harm:
    """The last file that matches `pattern` is changed; at the end it is as it was."""

    @contextmanager
    def harm(root: Path) -> Iterator[Act]:
        found = sorted(root.glob(pattern))
        assert found, f"no {pattern} in {root}"
        file, original = found[-1], found[-1].read_bytes()
        yield lambda: _overwrite(file, change(original))
        _overwrite(file, original)

    return harm


def occupied(place: str, *, by_directory: bool = False) -> Harm:
    """A file is where a directory belongs, or a directory where a file belongs."""

    @contextmanager
    def harm(root: Path) -> Iterator[Act]:
        target = root / place
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        yield lambda: target.mkdir() if by_directory else _overwrite(target, b"a file")
        target.rmdir() if by_directory else target.unlink(missing_ok=True)

    return harm


def read_only(place: str) -> Harm:
    """`place` is mounted read-only."""

    @contextmanager
    def harm(root: Path) -> Iterator[Act]:
        target = root / place
        target.mkdir(parents=True, exist_ok=True)
        _call("mount", "--bind", target, target)
        try:
            yield lambda: _remount(target)
        finally:
            _call("umount", "-l", target)

    return harm


def full(place: str) -> Harm:
    """`place` is on a small file system of its own, which is filled."""

    @contextmanager
    def harm(root: Path) -> Iterator[Act]:
        target, aside = root / place, root / "aside"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copytree(target, aside, symlinks=True)
        _call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", target)
        try:
            shutil.copytree(aside, target, symlinks=True, dirs_exist_ok=True)
            yield lambda: _fill(target)
        finally:
            (target / FILLER).unlink(missing_ok=True)
            _put_back(target, aside)

    return harm


@contextmanager
def killed_engine(root: Path) -> Iterator[Act]:
    """StreamFlow is killed by SIGKILL, and whatever it started stays behind."""

    def kill() -> None:
        assert (found := engines(root)), "no engine is at work"
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    yield kill


def engines(root: Path) -> list[int]:
    """Processes of `streamflow run` that work in the federation's folder."""
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        try:
            words = (task / "cmdline").read_bytes().split(b"\0")
            if (
                any(word.endswith(b"/streamflow") for word in words[:2])
                and (task / "cwd").resolve() == root / "workflow"
            ):
                found.append(int(task.name))
        except OSError:  # it has ended
            continue
    return found


def _overwrite(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _fill(target: Path) -> None:
    left = os.statvfs(target)
    with open(target / FILLER, "wb", buffering=0) as filler:
        try:
            for _ in range(left.f_bavail + 1):
                filler.write(bytes(left.f_frsize))
        except OSError:
            return


def _remount(target: Path) -> None:
    """Read-only from now on; a file that is open for writing delays it."""
    for _ in range(6000):
        found = subprocess.run(["mount", "-o", "remount,ro,bind", str(target)], capture_output=True, text=True)
        if found.returncode == 0:
            return
        time.sleep(0.01)
    raise AssertionError(found.stderr)


def _put_back(target: Path, aside: Path) -> None:
    """What the small file system holds takes the place of what was there before it."""
    shutil.rmtree(aside)
    shutil.copytree(target, aside, symlinks=True)
    _call("umount", "-l", target)
    shutil.rmtree(target)
    aside.rename(target)


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
