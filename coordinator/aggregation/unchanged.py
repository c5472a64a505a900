"""Files of a model in which a round changes nothing: linked into the next model, and read once in a federation.

Where adapters are trained, or tensors are left out of the federation, whole files of the model stay as they are. The
next model holds them by hard links, so that nothing is copied. The pass that verified such a file notes in the state
which file that was (`unchanged.json`: device, inode, size and time of modification), and later rounds take its sha256
from there while all of these are the same. A file that was written to, restored or moved is read and verified again.
The time of its last change of status would say no more: every link that is made or removed sets it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.writer import Layout
from facility.exchange.errors import ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import MOST_BYTES, MOST_FILES, Manifest
from facility.exchange.messages.strict_json import Fields, read_json

NAME = "unchanged.json"
FORMAT = 1
SETTLED_NS = 2_000_000_000
"""A file must have been left alone for so long: a clock may give two writes one after the other the same time."""


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """Which file it is, and when it was last written to."""

    device: int
    inode: int
    size: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Linked:
    """A file of the last model that the next model has, too."""

    source: str
    """Its name in the last model."""
    identity: FileIdentity
    """Identity of the file before it was first read."""


def identity_of(file: Path) -> FileIdentity:
    found = os.stat(file)
    return FileIdentity(device=found.st_dev, inode=found.st_ino, size=found.st_size, modified_ns=found.st_mtime_ns)


def link_unchanged(
    base: Checkpoint, sent: Manifest, layout: Layout, federated: Collection[str], out: Path
) -> dict[str, Linked]:
    """Link the files of `layout` that are files of `base` with other tensors than the `federated` alone into `out`.

    By name in `out`; those that could not be linked (another file system, or one without links) are left out.
    """
    held: dict[str, set[str]] = {}
    for entry in base.tensors.values():
        held.setdefault(entry.file.name, set()).add(entry.name)
    linked: dict[str, Linked] = {}
    for file, tensors in layout.items():
        entries = [base.tensors.get(tensor.name) for tensor in tensors]
        same = all(e is not None and e.dtype == t.dtype for e, t in zip(entries, tensors, strict=True))
        sources = {entry.file for entry in entries if entry is not None}
        names = {tensor.name for tensor in tensors}
        if not same or len(sources) != 1 or not names.isdisjoint(federated):
            continue
        (source,) = sources
        if held[source.name] != names or source.name not in sent.files:
            continue
        with suppress(OSError):
            identity = identity_of(source)
            os.link(os.path.realpath(source), out / file)
            linked[file] = Linked(source=source.name, identity=identity)
    return linked


def read_unchanged(state: Path | None) -> dict[FileIdentity, str]:
    """sha256 of each file that an earlier round verified; empty where nothing is noted, or nothing that can be read."""
    if state is None or not (Path(state) / NAME).is_file():
        return {}
    try:
        stored = Fields(raw=read_json(Path(state) / NAME, most_bytes=MOST_BYTES), where=str(Path(state) / NAME))
        if stored.whole("format") != FORMAT:
            return {}
        return dict(stored.items("files", MOST_FILES, lambda fields, key: _entry(fields.inside(key))))
    except ManifestError:
        return {}


def known_files(linked: Mapping[str, Linked], sent: Manifest, noted: Mapping[FileIdentity, str]) -> set[str]:
    """Names in the last model of the linked files that were verified in an earlier round, and not written to since."""
    return {one.source for one in linked.values() if noted.get(one.identity) == sent.files[one.source].sha256}


def _entry(fields: Fields) -> tuple[FileIdentity, str]:
    identity = FileIdentity(**{name: fields.whole(name) for name in FileIdentity.__dataclass_fields__})
    return identity, fields.digest("sha256")


def write_unchanged(state: Path, model: Path, linked: Mapping[str, Linked], sent: Manifest) -> None:
    """Note the linked files, which were verified since their identities were taken, for the round that follows."""
    now = time.time_ns()
    files = [
        asdict(one.identity) | {"sha256": sent.files[one.source].sha256}
        for name, one in sorted(linked.items())
        if identity_of(model / name) == one.identity and one.identity.modified_ns < now - SETTLED_NS
    ]
    if files:
        write_json(state / NAME, {"format": FORMAT, "files": files})
