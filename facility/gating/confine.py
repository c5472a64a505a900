"""Paths held below the working directory: every link on the way is followed before a path is compared."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from facility.exchange.messages.progress import FILE as PROGRESS
from facility.gating.refusal import Refused

UPDATE = "update"
"""Of a job's directory, what may leave; and so may its `PROGRESS`."""
MOST_LEVELS = 32
"""Of directories below one another: what removes them calls itself once a level, and keeps each open."""


def confine_path(path: str, workdir: Path, *, follow: bool = False) -> Path:
    """The path with every link resolved but, unless `follow`, a last one. Raises `Refused` outside of the workdir, and
    for more than `MOST_LEVELS` below it.

    `workdir` itself is inside; it is the resolved one.
    """
    if follow or path == str(workdir):
        found = Path(os.path.realpath(path))
    else:
        found = Path(os.path.realpath(posixpath.dirname(path))) / posixpath.basename(path)
    if found != workdir and not found.is_relative_to(workdir):
        raise Refused(f"{path} lies outside of {workdir}, the only directory that this gate gives access to")
    if (levels := len(found.relative_to(workdir).parts)) > MOST_LEVELS:
        raise Refused(f"{path:.80} lies {levels} levels below {workdir}, expected at most {MOST_LEVELS}")
    return found


def confine_below(path: str, workdir: Path) -> Path:
    """A path below the workdir that is to be written or removed; raises `Refused` for the workdir itself."""
    found = confine_path(path, workdir)
    if found == workdir:
        raise Refused(f"{path} is the working directory itself, which stays as it is")
    return found


def refuse_outgoing(path: Path, workdir: Path) -> Path:
    """A confined path, of which nothing leaves. Raises `Refused` for one that is, or lies in, an update or progress.

    By name alone: a job of which it is the update may be submitted later.
    """
    if found := {UPDATE, PROGRESS} & {*path.relative_to(workdir).parts}:
        raise Refused(f"{path} lies in a job's {found.pop()}, which leaves through this gate: no job writes there")
    return path


def plain_name(name: str) -> str:
    """A relative name inside a directory that travels. Raises `Refused` unless it stays inside."""
    parts = name.split("/")
    if not name or len(name) > 1000 or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"{name!r:.80} is not a plain name of a file")
    return name
