"""Files and directories that appear atomically: temporary name, fsync, rename."""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from facility.exchange.files.storage import name_in_errors

CUT_OFF_SECONDS = 86_400.0
"""Seconds without a change after which nobody writes to a temporary file any more: its writer was killed."""


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_umask_allows(mode: int) -> int:
    """What a file made with this mode gets: `mkstemp` and safetensors make files of mode 0600 whatever the umask."""
    with suppress(OSError, StopIteration, ValueError), open("/proc/self/status", encoding="utf-8") as status:
        return mode & ~int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    os.umask(found := os.umask(0o077))
    return mode & ~found


def write_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part."""
    with new_file(path, mode=mode) as file:
        file.write(content)


@contextmanager
def new_file(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the block ends, whole and durable, or not at all.

    /dev/stdout, /dev/null and their like are written to as they stand: no file takes their place. Nor does one that of
    a named pipe or a socket elsewhere: raises `FileExistsError`.
    """
    path = Path(path)
    if (stream := stream_of(path)) is not None:
        with name_in_errors(path), os.fdopen(stream, "wb") as file:
            yield file
        return
    check_no_special(path)
    _remove_cut_off(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with name_in_errors(path), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, as_umask_allows(mode))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def check_no_special(path: Path) -> None:
    """Raise `FileExistsError` for a named pipe, a socket or a device, which others hold and may wait for."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # it is absent, or whoever makes a file there says why not
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        raise FileExistsError(errno.EEXIST, "it is a named pipe, a socket or a device, expected a file", str(path))


@functools.lru_cache(maxsize=1024)
def _remove_cut_off(path: Path) -> None:
    """Remove what killed writers of `path` left beside it, a day ago or longer; a process looks once for each path."""
    oldest = time.time() - CUT_OFF_SECONDS
    with suppress(OSError):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            found = leftover.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_mtime < oldest:
                leftover.unlink()


def stream_of(path: Path) -> int | None:
    """A descriptor of the device, or of this process's open file, that `path` names in /dev; None for any other."""
    if (place := _stream_place(path)) is None:
        return None
    return os.dup(int(ours[1])) if (ours := _own_file(place)) else os.open(place, os.O_WRONLY)


def is_stream(path: Path) -> bool:
    """Whether `new_file` writes to what `path` names as it stands."""
    return _stream_place(path) is not None


def _stream_place(path: Path) -> str | None:
    """The device, or this process's open file, that `path` names in /dev, where there are named pipes as well."""
    place = os.path.join(os.path.realpath(path.parent), path.name)
    if place.startswith("/dev/") and os.path.islink(place):
        place = os.path.join(os.path.dirname(place), os.readlink(place))
    if _own_file(place):
        return place
    with suppress(OSError):
        mode = os.stat(place).st_mode
        return place if place.startswith("/dev/") and (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) else None
    return None


def _own_file(place: str) -> re.Match[str] | None:
    """Its descriptor is the match's first group."""
    return re.fullmatch(rf"/proc/(?:self|{os.getpid()})/fd/(\d+)", place)


def complete_lines(path: Path) -> list[bytes]:
    """Lines of a file that is appended to, with their ends; not one that a crash or a full disk cut off. [] where there
    is no file."""
    try:
        return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are refused (they are not JSON)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def make_parents(path: Path) -> None:
    """Make the folders above `path`. Raises `NotADirectoryError` where a file is in the place of one, of which mkdir
    says that it exists: nobody is to be asked to remove it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


@contextmanager
def new_directory(path: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success sync every file in it and rename it to `path`.

    `path` must not exist yet. On any exception the temporary directory is removed and `path` stays absent. What killed
    processes left for the same `path` is removed first: a living one holds a lock on its temporary directory.
    `mode`: of the directory, less what the umask takes away.
    """
    path = Path(path)
    if os.path.lexists(path):  # a link that leads nowhere, too: no directory takes its place
        raise FileExistsError(f"{path} exists already; remove it or choose another name")
    make_parents(path)
    remove_abandoned(path)
    temporary, lock = locked_sibling(path)
    os.chmod(temporary, as_umask_allows(mode))
    try:
        with name_in_errors(path):
            yield temporary
            _fsync_files(temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    fsync_directory(path.parent)


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that is gone at the end; what killed processes left of one goes first."""
    remove_abandoned(path)
    temporary, lock = locked_sibling(path)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _fsync_files(directory: Path) -> None:
    """Sync everything below."""
    for folder, _, names in os.walk(directory):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(folder))


def locked_sibling(path: Path) -> tuple[Path, int]:
    """A new temporary directory beside `path`, and the descriptor whose lock says that its maker lives."""
    while True:
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        try:
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # taken for abandoned before it was opened
        taken = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True  # by a process that takes it for abandoned, and removes it
        except OSError:
            pass  # a file system without locks of directories: its age says so (`maker_is_gone`)
        if not taken and temporary.exists():
            return temporary, descriptor
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove what processes that were killed in `new_directory(path)` or `scratch_directory(path)` left behind."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), open_directory(leftover) as descriptor:
            if maker_is_gone(descriptor, leftover):
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """A descriptor of the directory itself. Raises `OSError`, for a link too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def maker_is_gone(descriptor: int, directory: Path) -> bool:
    """Whether nobody holds the lock of an open temporary directory; this process holds it from then on.

    NFS locks what is open for writing, which no directory can be (flock(2)), and other file systems may have no locks:
    there a maker counts as gone once nothing in its directory has changed for a day.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return seconds_unchanged(directory) > CUT_OFF_SECONDS
    return True


def seconds_unchanged(directory: Path) -> float:
    """Since something in it was made, written to or removed last. Raises `OSError` where something goes meanwhile."""
    return time.time() - max(entry.lstat().st_mtime for entry in (directory, *directory.rglob("*")))


def append_lines(path: Path, lines: str) -> None:
    """Add lines to a file, which is made where it is absent, with one write: what others add comes before or after."""
    append_to(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), lines)


def write_all(handle: int, content: bytes) -> None:
    """Write to an open file until all is there. Raises `OSError` on a full disk, which took the beginning."""
    while content:
        content = content[os.write(handle, content) :]


def append_to(handle: int, lines: str) -> None:
    """Add lines to an open file, all or none, and close it. What a crash left of a line before stays a line alone."""
    try:
        size, done = os.fstat(handle).st_size, 0
        torn = size and os.pread(handle, 1, size - 1) != b"\n"
        whole = (b"\n" if torn else b"") + lines.encode()
        try:
            while done < len(whole):  # a disk that fills up takes the beginning, and refuses the rest
                done += os.write(handle, whole[done:])
        except OSError:
            if done and os.fstat(handle).st_size == size + done:  # nobody else has added anything
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)
