"""Where a transfer from a facility may write on this machine: below one directory, under a plain name, over nothing."""

from __future__ import annotations

import os
import posixpath
import unicodedata
from pathlib import Path

from coordinator.streamflow_plugin.lanes import TransferFailed
from facility.exchange.messages.strict_json import UNPRINTABLE

LONGEST_NAME = 255
"""Bytes of one file name (NAME_MAX)."""


def check_name(path: str) -> str:
    """A relative path from a facility, as it is. Raises `TransferFailed` unless every part is a plain name.

    Refused: absolute paths, `.` and `..`, empty parts, control characters, names that are not normalised Unicode (NFC),
    and names longer than a file system takes.
    """
    parts = path.split("/")
    if not path or posixpath.isabs(path) or any(part in ("", ".", "..") for part in parts):
        raise TransferFailed(f"the facility names {shown_name(path)}, which lies outside the directory asked for")
    for part in parts:
        if (
            len(part) > LONGEST_NAME  # first: marks without end take `normalize` days
            or any(unicodedata.category(letter) in UNPRINTABLE for letter in part)
            or "\\" in part
            or unicodedata.normalize("NFC", part) != part
            or len(os.fsencode(part)) > LONGEST_NAME
        ):
            raise TransferFailed(f"the facility names {shown_name(part)}, which is not a plain file name")
    return path


def check_target(target: Path, inside: Path) -> None:
    """Raise `TransferFailed` unless `target` is a new name below `inside`, with no symbolic link on the way."""
    text = os.fspath(target)
    if not posixpath.isabs(text) or posixpath.normpath(text) != text:
        raise TransferFailed(f"{shown_name(text)} is not an absolute, normalised path: nothing is written there")
    root = inside.resolve()
    # The engine knows the directory by either name; below it no link is followed.
    base = next((base for base in (root, Path(os.path.abspath(inside))) if target.is_relative_to(base)), None)
    if base is None or target == base:
        raise TransferFailed(
            f"{shown_name(text)} lies outside {inside}, where updates are kept: nothing is written there"
        )
    relative = target.relative_to(base)
    check_name(relative.as_posix())
    place = base
    for part in relative.parts:
        place /= part
        if place.is_symlink():
            raise TransferFailed(f"{shown_name(str(place))} is a symbolic link: nothing is written through it")
    check_new(target)


def check_new(target: Path) -> None:
    """Raise `TransferFailed` when something, be it a dangling link, stands at `target`."""
    if os.path.lexists(target):
        raise TransferFailed(f"{shown_name(str(target))} exists already: nothing is written over it")


def shown_name(text: str) -> str:
    """A name from another machine for a message: quoted, without control characters, at most 100 characters."""
    return ascii(text if len(text) <= 100 else f"{text[:97]}...")
