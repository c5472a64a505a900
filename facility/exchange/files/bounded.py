"""Files that a person or another program names, read without waiting for ever or filling the memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

IN_PROC = "/proc/"
"""Where what a process has open is, such as a pipe of a shell's `<(...)`; a named pipe is elsewhere."""


def open_file(path: Path | str) -> BinaryIO:
    """A regular file, or a pipe that this process has open, to be read.

    Raises `OSError` for any other: a named pipe may never have a writer, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            if not stat.S_ISFIFO(mode) or not os.path.realpath(path).startswith(IN_PROC):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path | str, most_bytes: int) -> bytes:
    """The content of a file of at most `most_bytes` bytes. Raises `OSError` for a larger one, and as `open_file`."""
    with open_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EINVAL, f"it is larger than {most_bytes} bytes, expected at most so many", str(path))
    return content


def real_path(path: Path | str) -> Path:
    """The path without symbolic links. A link that leads back to itself stays as it is: opening it says so.

    `Path.resolve` raises a `RuntimeError` there, before Python 3.13.
    """
    return Path(os.path.realpath(path))
