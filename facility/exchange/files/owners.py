"""Whose a folder is: an account that makes it first, or may write it, exchanges what others put there later."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = 0
"""Whoever is root needs no folder to change what an account does."""


def of_another(folder: Path) -> str:
    """`PATH belongs to account bob`, where the folder, or a link in its place, is neither ours nor root's; else ''."""
    folder = Path(os.path.abspath(folder))
    try:
        itself, found = os.lstat(folder), os.stat(folder)
    except OSError:
        return ""
    if stat.S_ISLNK(itself.st_mode) and _another(itself.st_uid):
        return f"{folder} is a link that {account_name(itself.st_uid)} made"
    if _another(found.st_uid) and not _shows_ours_as(found.st_uid, folder):
        return f"{folder} belongs to {account_name(found.st_uid)}"
    return ""


def not_ours(folder: Path) -> str:
    """What speaks against keeping in `folder` what nobody else may change: `of_another`, or that every account may
    write it, and reach it; '' where nothing does, or nothing is there. That a group may write it is a decision of its
    owner."""
    if reason := of_another(folder):
        return reason
    mode = os.stat(folder).st_mode if os.path.exists(folder) else 0
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and _reached_by_all(folder):
        return f"{os.path.abspath(folder)} may be written by every account (`chmod o-w` it)"
    return ""


def first_not_ours(folders: Iterable[Path]) -> str:
    """The first sentence of `not_ours` on these folders, or ''."""
    return next(filter(None, map(not_ours, folders)), "")


def written_by_all(path: Path) -> Path | None:
    """What every account may write of `path`, its folder, and the folders above that others reach, links resolved:
    there `path` can be exchanged. None where nobody else may."""
    real = Path(os.path.realpath(path))
    for number, place in enumerate((real, *real.parents)):
        mode = os.stat(place).st_mode if os.path.exists(place) else 0
        if mode & stat.S_IWOTH and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            if number < 2 or _reached_by_all(place):
                return place
    return None


def account_name(user: int) -> str:
    """`account bob`, or by its number where the system has no name for it."""
    try:
        return f"account {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"an account without a name (user {user})"


def _another(user: int) -> bool:
    return user not in (os.geteuid(), ROOT)


def _reached_by_all(path: Path) -> bool:
    """Whether no folder above keeps other accounts out, as the work directory does from what an engine makes in it."""
    return all(os.stat(above).st_mode & stat.S_IXOTH for above in Path(os.path.realpath(path)).parents)


def _shows_ours_as(user: int, folder: Path) -> bool:
    """Whether the file system shows a file of ours as that user's, as one that is mounted for another account does."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid == user
    except OSError:
        return False
