"""The files below a folder that is given as an input, of texts and of images alike: all of them, or an error."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from facility.dataset import DatasetError
from facility.exchange.files.bounded import real_path

log = logging.getLogger(__name__)


def files_below(root: Path, suffixes: tuple[str, ...], *, beside: tuple[str, ...] = ()) -> list[Path]:
    """Files whose names end in one of the suffixes, whatever the case, sorted by path; hidden ones are left out.

    How many files have other names is logged (`.csv` among `.jsonl`), but for those named in `beside`; and how many are
    links to files elsewhere, as who published the folder can have made them to files of this account's.
    Raises `DatasetError` for what would otherwise be left out in silence (a link to a folder, a link to nothing, a
    socket or device), and `OSError` for a folder that may not be listed.
    """
    found, others, other = [], 0, ""
    for folder, folders, names in os.walk(root, onerror=refused):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                raise DatasetError(
                    f"{Path(folder) / name} is a link to a folder, which is not followed: remove it, and give the "
                    "folder that it leads to beside this one"
                )
        for name in names:
            if name.startswith("."):
                continue
            if not name.lower().endswith(suffixes):
                if name not in beside:
                    others, other = others + 1, other or os.path.join(folder, name)
                continue
            path = Path(folder, name)
            if not path.is_file():
                raise DatasetError(f"{path} is not a regular file, or leads to none: remove it")
            found.append(path)
    if found and others:
        expected = ", ".join(suffixes)
        log.warning("%s: %d files are left out, such as %s; expected %s", root, others, other, expected)
    if outside := [path for path in found if path.is_symlink() and _leads_out(root, path)]:
        log.warning(
            "%s: %d files are links that lead out of the folder, such as %s to %s: they are read, so look at them if "
            "somebody else made the folder",
            root,
            len(outside),
            min(outside),
            real_path(min(outside)),
        )
    return sorted(found)


def _leads_out(root: Path, path: Path) -> bool:
    """Whether a link leads to neither the folder nor the download that it is a part of: in Hugging Face's cache files
    are links into `blobs`, beside the folders of versions."""
    place, target = real_path(root), real_path(path)
    blobs = target.parent
    downloaded = blobs.name == "blobs" and place.is_relative_to(blobs.parent)
    return not (target.is_relative_to(place) or downloaded)


def path_of(argument: str) -> Path:
    """The path that an argument names, a home directory before it written out; `~name` of no account is a file."""
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        return Path(argument)


def refused(error: OSError) -> None:
    """For `os.walk`, which would leave out a folder that may not be read."""
    raise error
