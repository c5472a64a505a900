"""What a file system refused, as a sentence: full, over quota, read-only, not permitted."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeGuard

from facility.exchange.sizes import format_bytes

PROBE_BYTES = 1 << 16
TEMPORARY = re.compile(r"\.(.+)\.[^.]+\.tmp")
"""Name under which a file or directory is written before it appears (`facility.exchange.files.durable`)."""
SAME_COMMAND = ", then give the same command again"

WORDS = {
    errno.ENOSPC: "is full: free some room",
    errno.EDQUOT: "is over its quota: free some room",
    errno.EFBIG: "may not grow so large: raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "is mounted read-only: choose another directory, or have it mounted for writing",
    errno.EACCES: "cannot be written to or read: correct its permissions, or choose another directory",
    errno.EPERM: "cannot be written to: correct its permissions, or choose another directory",
    errno.ENOLCK: "cannot be locked, because its file system has no locks (Lustre mounted without flock): choose "
    "a directory on another",
}
PATHS = {
    errno.ENOENT: "does not exist, or its folder does not: correct the path",
    errno.ENOTDIR: "is not a folder, or its parent is not: correct the path",
    errno.EISDIR: "is a folder, expected a file: correct the path",
    errno.EBUSY: "is in use, or a folder where a file was expected: correct the path",
    errno.EEXIST: "exists already: remove it, or choose another name",
    errno.ENOTEMPTY: "exists already: remove it, or choose another name",
    errno.ENAMETOOLONG: "has too long a name: choose a shorter one",
    errno.ELOOP: "is a link that leads back to itself: correct the path",
}
"""Of a path that does not fit what a command does with it."""


def is_storage(error: BaseException) -> TypeGuard[OSError]:
    """True for an error that trying again at once does not cure."""
    return isinstance(error, OSError) and error.errno in WORDS


def refuses_writes(error: BaseException) -> TypeGuard[OSError]:
    """True where a file system takes no more: a fault of this machine, whatever was read from elsewhere."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_path(error: BaseException) -> TypeGuard[OSError]:
    """True for a named file or folder that is missing, in the way or of the wrong kind."""
    return isinstance(error, OSError) and error.errno in PATHS and isinstance(error.filename, str | bytes | os.PathLike)


def file_error_sentence(error: OSError, place: str | Path = "", *, again: bool = True) -> str:
    """`DISK is full: PATH could not be written (1.2 MB free now, 3.4 MB for this file alone); free some, then ...`.

    `place`: where the error names no file. `again`: False in a job, whose command no person gives.
    """
    named = error.filename2 or error.filename or place
    whole = os.path.abspath if error.errno not in PATHS else str  # as it was given: it may name a program
    where = lasting(whole(os.fsdecode(named))) if named and not isinstance(named, int) else "a file system"
    words = _words(error)
    if error.errno == errno.ENOSPC and (disk := disk_of(where)):
        room = ", ".join([free_on(disk), *getattr(error, "__notes__", ())])
        where, words = disk, f"is full: {where} could not be written ({room}); free some room"
    return f"{where} {words}{SAME_COMMAND if again else ''}"


def _words(error: OSError) -> str:
    if error.errno == errno.ENOTEMPTY and not error.filename2:  # it was to be removed
        return "is written to, or holds files that are still open, while it is removed: let what uses it end"
    return (WORDS | PATHS).get(error.errno or 0, f"cannot be used: {error.strerror or error}")


def disk_of(path: str) -> str:
    """Where the file system of a path is mounted, by its nearest folder that is there; '' where that cannot be read."""
    if not os.path.isabs(path):
        return ""
    try:
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        path = os.path.realpath(path)
        while not os.path.ismount(path):
            path = os.path.dirname(path)
        os.statvfs(path)
    except OSError:
        return ""
    return path


def free_on(disk: str) -> str:
    """What this account may still write there, in words."""
    found = os.statvfs(disk)
    if found.f_files and not found.f_favail:
        return "no inodes free now"
    return f"{format_bytes(found.f_bavail * found.f_frsize)} free now"


def lasting(path: str) -> str:
    """The path with names of temporary files replaced by those under which they were to appear."""
    return "/".join(TEMPORARY.sub(r"\1", part) if TEMPORARY.fullmatch(part) else part for part in path.split("/"))


OF_A_LIBRARY = re.compile(r"\(os error (\d+)\)\s*$")
"""How what is written in Rust (safetensors, tokenizers) ends its own errors of a file system."""


@contextmanager
def name_in_errors(place: Path, *, needed: int = 0) -> Iterator[None]:
    """What a file system refuses within names `place`, where the error names no file, as those of open files do, and
    is an `OSError`, also where a library raises one of its own. `needed`: bytes of the whole file, reported beside.

    What is free is reported once what was written is removed, its folder's other files too: it may be more."""
    try:
        yield
    except OSError as error:
        if is_storage(error) and not (error.filename or error.filename2):
            error.filename = str(place)
            if needed:
                error.add_note(f"{format_bytes(needed)} for this file alone")
        raise
    except Exception as error:
        number = int(found[1]) if (found := OF_A_LIBRARY.search(str(error))) else 0
        if number not in WORDS:
            raise
        raise OSError(number, os.strerror(number), str(place)) from error


def why_unwritable(folders: Sequence[Path]) -> str:
    """A sentence on the first folder that takes no file of 64 KiB, or ''. Folders that do not exist are made."""
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return f"{os.path.abspath(folder)} {_words(error)}{SAME_COMMAND}"  # without a figure that changes
    return ""


def make_private_folder(folder: Path) -> Path:
    """The folder, made for its owner alone where it is missing; one that is there keeps its mode, by which a person
    opens it to a group. Where it cannot be made, whatever writes there says why."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def with_place(error: OSError, folders: Sequence[Path]) -> OSError:
    """The error with a place: where it names none, the first of `folders` that takes no file now, else the first."""
    if error.filename or error.filename2:
        return error
    place = next((folder for folder in folders if why_unwritable([folder])), folders[0])
    return OSError(error.errno, error.strerror, str(place))
