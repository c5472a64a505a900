"""Hands on a directory tree: by hard links where the file system allows them, which copies no bytes, else by copies."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path


def can_link(folder: Path) -> bool:
    """Whether files in this existing directory can have two names; False where nothing can be written, either."""
    try:
        with tempfile.TemporaryDirectory(prefix=".crossfed-", dir=folder) as place:
            (Path(place) / "one").touch()
            os.link(Path(place) / "one", Path(place) / "two")
    except OSError:
        return False
    return True


def link_tree(source: Path, target: Path) -> None:
    """Make `target` hold the same regular files as `source` by hard links, or by copies, as `link_file` does.

    Symbolic links in `source` are followed (engines stage inputs by them). `target` must not exist.
    """
    target = Path(target)
    target.mkdir()
    link_files(source, target)


def link_files(source: Path, target: Path, *, leave: Collection[str] = ()) -> None:
    """Put what the directory `source` holds into the existing `target`, as `link` does, but for the names `leave`."""
    for entry in sorted(os.scandir(source), key=lambda e: e.name):
        if entry.name not in leave:
            link(Path(entry.path), target / entry.name)


def replace_by_links(source: Path, target: Path) -> None:
    """Make `target`, in place of what lies there, hold the same regular files as `source`; it appears whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    for path in (fresh, target):
        shutil.rmtree(path, ignore_errors=True)
    link_tree(source, fresh)
    fresh.rename(target)


def copy_tree(source: Path, target: Path, *, leave: Collection[str] = (), symlinks: bool = False) -> None:
    """Copy a tree with modes and times, but files and folders of the names `leave`. `target` must not exist.

    `symlinks`: copy links themselves, not what they lead to. Raises the first `OSError` of a file as it is: that of
    `shutil.copytree` has no `errno` by which a full disk is known.
    """
    target.mkdir(parents=True)
    for entry in sorted(os.scandir(source), key=lambda e: e.name):
        place = target / entry.name
        if entry.name in leave:
            continue
        if entry.is_dir(follow_symlinks=not symlinks):
            copy_tree(Path(entry.path), place, leave=leave, symlinks=symlinks)
        else:
            shutil.copy2(entry.path, place, follow_symlinks=not symlinks)
    shutil.copystat(source, target)


def link(source: Path, target: Path) -> None:
    """`link_tree` of a directory, `link_file` of a file."""
    link_tree(source, target) if source.is_dir() else link_file(source, target)


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it: across file systems, and where one has no hard links (BeeGFS across
    directories, AFS, SMB). A copy is synced, as what it is of has been. Raises `FileExistsError` where `target` exists.
    """
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy(real, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
