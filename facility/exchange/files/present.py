"""Whether a file or folder is there, where one that is missing is made anew: what cannot be known is an error.

From Python 3.14 on `Path.exists`, `is_file` and `is_dir` are False for any error of a file system, such as a folder
that may not be searched, or a network file system that does not answer; before, they raised it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def exists(path: Path) -> bool:
    """True for a file, a folder or another entry. Raises `OSError` where that cannot be known."""
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """True for a regular file. Raises `OSError` where that cannot be known."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_dir(path: Path) -> bool:
    """True for a folder. Raises `OSError` where that cannot be known."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in ABSENT:
            raise
    except ValueError:  # a name with a zero byte
        pass
    return None
