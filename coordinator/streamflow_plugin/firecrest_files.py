"""Directories to a facility and back through FirecREST: small files directly, large ones over its staging area.

What the facility lists is held to the rules of `tree.read_listing`, and every file to the size that was listed.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from coordinator.streamflow_plugin.firecrest_client import Api, NotThere
from coordinator.streamflow_plugin.lanes import TransferFailed
from coordinator.streamflow_plugin.pieces import Entry
from coordinator.streamflow_plugin.targets import check_new
from coordinator.streamflow_plugin.tree import NEW_FILE, local_entries, read_listing, room_for_update
from facility.exchange.files.links import link_file

TRANSFER_SECONDS = 24 * 3600.0
"""What a job of FirecREST that moves one file may take, its wait in the queue included."""
CHUNK_BYTES = 4 << 20
"""Of a staged file that is kept in memory."""
FOLDER_MODE = "700"


class Exactly:
    """A file that takes exactly `size` bytes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.left = file, size

    def write(self, block: bytes) -> None:
        self.left -= len(block)
        if self.left < 0:
            raise TransferFailed("the facility sends more than it listed")
        self._file.write(block)


Call = Callable[[Callable[[Any], Any]], Any]
"""Makes one call, again and again while the site is away."""


def push_tree(api: Api, call: Call, source: Path, target: str) -> int:
    """Copy `source` on this machine to `target` there, in place of what stood there; returns bytes."""
    directories, files = local_entries(source)
    system, single = api.system, source.is_file()
    remove_tree(api, call, target)
    if not single:
        for directory in ["", *directories]:
            make_directory(api, call, posixpath.join(target, directory) if directory else target)
    else:
        make_directory(api, call, posixpath.dirname(target))
    for entry in files:
        path = posixpath.join(target, entry.path) if entry.path else target
        file = source / entry.path if entry.path else source
        folder, name = posixpath.split(path)

        def send(client: Any, file: Path = file, folder: str = folder, name: str = name) -> None:
            with api.patience.for_bytes(file.stat().st_size):
                staged = client.upload(system, str(file), folder, name, account=api.account, blocking=False)
                if staged is not None:  # in parts over the staging area, whichever way the answer asks for
                    staged.upload_file_to_stage()
                    staged.wait_for_transfer_job(timeout=TRANSFER_SECONDS)

        call(send)
        arrived = size_of(api, call, path)
        if arrived != entry.size:
            raise TransferFailed(f"{entry.path or target} arrived with {arrived} bytes of {entry.size}")
    return sum(entry.size for entry in files)


def pull_tree(api: Api, call: Call, source: str, target: Path, *, most_bytes: int | None = None) -> int:
    """Copy `source` there to `target` here, which must not exist; returns bytes. Raises `TransferFailed`."""
    check_new(target)
    directories, files = listing(
        api, call, source, min(room_for_update(target), room_for_update(target) if most_bytes is None else most_bytes)
    )
    single = len(files) == 1 and not directories and files[0].path == ""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not single:
        target.mkdir(mode=0o700)
        for directory in directories:
            (target / directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in files:
        path = target / entry.path if entry.path else target
        path.parent.mkdir(parents=True, exist_ok=True)
        _receive(api, call, posixpath.join(source, entry.path) if entry.path else source, path, entry)
    return sum(entry.size for entry in files)


def _receive(api: Api, call: Call, source: str, path: Path, entry: Entry) -> None:
    """One file, of exactly the size that was listed."""
    partial = path.with_name(f"{path.name}.part")

    def fetch(client: Any) -> None:
        partial.unlink(missing_ok=True)
        staged = client.download(api.system, source, str(partial), account=api.account, blocking=False)
        if staged is None:
            return
        staged.wait_for_transfer_job(timeout=TRANSFER_SECONDS)
        staged.chunk_size = CHUNK_BYTES
        with os.fdopen(os.open(partial, NEW_FILE, 0o600), "wb") as file, api.patience.for_bytes(entry.size):
            staged.download_file_from_stage(Exactly(file, entry.size))

    try:
        call(fetch)
        if (size := partial.stat().st_size) != entry.size:
            raise TransferFailed(f"{entry.path or path.name} has {size} bytes, the facility listed {entry.size}")
        os.chmod(partial, 0o600)
        link_file(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def listing(api: Api, call: Call, source: str, most_bytes: int) -> tuple[list[str], list[Entry]]:
    """Directories and files below `source`, checked before anything is made for them."""
    system = api.system
    kind = kind_of(api, call, source)
    if kind == "f":
        return read_listing(b"%d 600 \0" % size_of(api, call, source), most_bytes)

    def listed(client: Any) -> list[bytes]:
        """Lines as `find` prints them, of the listing; what is odd in it is odd within the call."""
        found = client.list_files(system, source, show_hidden=True, recursive=True, dereference=True)
        lines = [b"d 700 \0"]
        for one in found or []:
            name, is_folder = os.fsencode(str(one["name"])), one["type"] == "d"
            if one["type"] not in ("d", "-"):
                raise TransferFailed("the facility lists something that is neither a file nor a directory")
            lines.append(b"d 700 " + name + b"\0" if is_folder else f"{int(one['size'])} 600 ".encode() + name + b"\0")
        return lines

    return read_listing(b"".join(call(listed)), most_bytes)


def kind_of(api: Api, call: Call, path: str, *, follow: bool = True) -> str:
    """`d`, `f`, `l`, or '' where nothing is there."""
    try:
        mode = call(lambda client: int(client.stat(api.system, path, dereference=follow)["mode"]))
    except NotThere:
        return ""
    return {0o040000: "d", 0o100000: "f", 0o120000: "l"}.get(mode & 0o170000, "?")


def size_of(api: Api, call: Call, path: str) -> int:
    return int(call(lambda client: int(client.stat(api.system, path, dereference=True)["size"])))


def make_directory(api: Api, call: Call, path: str) -> None:
    """A directory with its parents, for its owner only."""
    call(lambda client: client.mkdir(api.system, path, create_parents=True))
    call(lambda client: client.chmod(api.system, path, FOLDER_MODE))


def remove_tree(api: Api, call: Call, path: str) -> None:
    """Remove what is there, if anything is."""
    if kind_of(api, call, path, follow=False):
        call(lambda client: client.rm(api.system, path, account=api.account))
