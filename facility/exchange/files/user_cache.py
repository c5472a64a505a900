"""The folder where this user's processes remember what can be worked out again: `$XDG_CACHE_HOME/crossfed`, else
`.cache/crossfed` in the account's home directory.

Not in `$HOME`, which is a directory of its own for every step and job of a workflow: there each would compile the
kernel and hash a base model anew. Where the account's home cannot be written (compute nodes without it), `$HOME`
serves.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from facility.exchange.files.paths import account_home


def user_cache() -> Path | None:
    """A folder that only this user can write; None if it neither exists nor can be made."""
    for parent in _parents():
        folder = parent / "crossfed"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if ours_alone(folder) and os.access(folder, os.W_OK):
            return folder
    return None


def _parents() -> Iterator[Path]:
    """Where it may lie, the best first."""
    if os.path.isabs(stated := os.environ.get("XDG_CACHE_HOME", "")):
        yield Path(stated)
        return
    for home in (account_home, Path.home):
        try:
            yield home() / ".cache"
        except (KeyError, RuntimeError):  # no such account in the user database
            continue


def ours_alone(path: Path) -> bool:
    """Whether it is there, belongs to this user, is not a link, and no other may write it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    linked = stat.S_ISLNK(status.st_mode)
    return not linked and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
