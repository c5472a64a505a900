"""The folder where this user's processes remember what can be worked out again: `$XDG_CACHE_HOME/crossfed`, else
`~/.cache/crossfed`."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def user_cache() -> Path | None:
    """A folder that only this user can write; None if it neither exists nor can be made."""
    stated = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(stated) if os.path.isabs(stated) else Path.home() / ".cache") / "crossfed"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if ours_alone(folder) and os.access(folder, os.W_OK) else None


def ours_alone(path: Path) -> bool:
    """Whether it is there, belongs to this user, is no link, and no other may write it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    linked = stat.S_ISLNK(status.st_mode)
    return not linked and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
