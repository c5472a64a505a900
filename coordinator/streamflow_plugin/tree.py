"""Copy a directory or file to a facility and back over lanes. The facility needs a shell, GNU tar, dd and find."""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import re
import shutil
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamflow.deployment.connector.ssh import SSHContextFactory

from coordinator.streamflow_plugin.dialect import SHELL, ShellDialect
from coordinator.streamflow_plugin.lanes import (
    BLOCK_BYTES,
    BROKEN,
    TransferFailed,
    blocks_of,
    feed_input,
    read_output,
    retry_broken,
    spread_work,
    take_output,
)
from coordinator.streamflow_plugin.pieces import Entry, Piece, piece_size, split_files, tar_batches
from coordinator.streamflow_plugin.swift import SwiftLane
from coordinator.streamflow_plugin.targets import check_name, check_new, shown_name
from facility.exchange.files.plain_tar import PlainHeader

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""Opens what did not exist before."""


@dataclass
class Lane:
    """One stream for large pieces."""

    patient: SSHContextFactory
    """StreamFlow's connection: waits for a host that is away."""
    swift: SwiftLane | None = None
    """The system's ssh beside it, used until it breaks for the first time."""

    async def put(self, command: str, file: int, offset: int, length: int) -> None:
        """Feed a range of an open file to a remote command."""
        if (swift := self.swift) is None:
            return await feed_input(self.patient, command, blocks_of(file, offset, length))
        try:
            await swift.put(command, file, offset, length)
        except BROKEN:
            self.swift = None
            raise

    async def get(self, command: str, file: int, offset: int, length: int) -> None:
        """Write a remote command's output, `length` bytes, to a range of an open file."""
        if (swift := self.swift) is not None:
            try:
                return await swift.get(command, file, offset, length)
            except BROKEN:
                self.swift = None
                raise
        position = offset

        def take(block: bytes) -> None:
            nonlocal position
            if position + len(block) > offset + length:
                raise TransferFailed(f"`{command:.120}` gave more than the {length} bytes that were listed")
            position += os.pwrite(file, block, position)

        await take_output(self.patient, command, take, length)


Swift = Callable[[int], AbstractAsyncContextManager[list[SwiftLane]]]
"""Opens as many connections of the system's ssh, or fewer."""
SWIFT_BYTES = 32 << 20
"""Large files together, from which on logging in anew pays."""


@asynccontextmanager
async def _lanes(
    patient: Sequence[SSHContextFactory], swift: Swift, pieces: Sequence[Piece]
) -> AsyncIterator[asyncio.Future[list[Lane]]]:
    """The lanes for all pieces, which log in while the body runs: the system's ssh where that can be had."""

    async def open() -> list[Lane]:
        wanted = len(patient) if sum(piece.length for piece in pieces) >= SWIFT_BYTES else 0
        fast = await stack.enter_async_context(swift(wanted))
        return [Lane(*pair) for pair in zip(patient, fast, strict=False)] or [Lane(lane) for lane in patient]

    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(open())
        try:
            yield opening
        finally:
            await asyncio.wait([opening])


def local_entries(source: Path) -> tuple[list[str], list[Entry]]:
    """Directories and files below `source`, links followed, in a fixed order."""
    if source.is_file():
        found = source.stat()
        return [], [Entry(path="", size=found.st_size, mode=found.st_mode & 0o777)]
    directories, files = [], []
    for folder, names, members in os.walk(source, followlinks=True):
        names.sort()
        relative = os.path.relpath(folder, source)
        if relative != ".":
            directories.append(relative)
        for name in sorted(members):
            path = Path(folder, name)
            found = path.stat()
            files.append(Entry(path=os.path.relpath(path, source), size=found.st_size, mode=found.st_mode & 0o777))
    return directories, files


async def push_tree(
    lanes: list[SSHContextFactory],
    swift: Swift,
    source: Path,
    target: str,
    moved: Callable[[int], None],
    *,
    dialect: ShellDialect = SHELL,
) -> int:
    """Copy `source` on this machine to `target` at the facility; returns bytes; `moved` hears of every piece's.

    What stood at `target` is replaced. Raises `TransferFailed` with the facility's words, for one `No space left on
    device`.
    """
    directories, files = local_entries(source)
    small, large, pieces = split_files(files, piece_size(files, len(lanes)))
    single = source.is_file()
    first = dialect.put_file(target, files[0].mode, empty=not small) if single else dialect.put_tree(target)

    def first_blocks() -> Iterable[bytes]:
        if single:
            return [source.read_bytes()] if small else []
        # A large file comes as an empty one first: it then has its mode, and every piece finds it.
        return _tar(source, directories, small, large)

    handles = {entry.path: os.open(source / entry.path if not single else source, os.O_RDONLY) for entry in large}
    try:

        async def move(lane: Lane, piece: Piece) -> None:
            file = posixpath.join(target, piece.path) if piece.path else target
            command = dialect.put_piece(file, piece.offset, piece.length)
            await lane.put(command, handles[piece.path], piece.offset, piece.length)
            moved(piece.length)

        async with _lanes(lanes, swift, pieces) as opening:
            await retry_broken(lambda: feed_input(lanes[0], first, first_blocks()))
            await spread_work(await opening, pieces, move)
    finally:
        for handle in handles.values():
            os.close(handle)
    await _check_sizes(lanes[0], target, large, dialect)
    return sum(entry.size for entry in files)


async def _check_sizes(lane: SSHContextFactory, target: str, large: list[Entry], dialect: ShellDialect) -> None:
    """A disk that fills may lose data after dd has ended well (delayed allocation, quotas): compare the sizes."""
    if not large:
        return
    paths = [posixpath.join(target, entry.path) if entry.path else target for entry in large]
    names = b"".join(os.fsencode(path) + b"\0" for path in paths)
    answer = await retry_broken(lambda: read_output(lane, dialect.sizes, names))
    sizes = answer.split()
    if len(sizes) != len(large) or not all(re.fullmatch(rb"[0-9]{1,15}", size) for size in sizes):
        raise TransferFailed(
            f"the facility gives {shown_name(os.fsdecode(answer[:100]))} for the sizes of {len(large)} files"
        )
    for entry, size in zip(large, sizes, strict=True):
        if int(size) != entry.size:
            raise TransferFailed(f"{entry.path or target} arrived with {int(size)} bytes of {entry.size}")


def _tar(source: Path, directories: list[str], small: list[Entry], large: list[Entry]) -> Iterator[bytes]:
    """A tar stream of directories, small files whole and large files empty."""
    for path in directories:
        yield _header(path, tarfile.DIRTYPE, 0, source.joinpath(path).stat().st_mode & 0o777)
    for entry in small:
        content = (source / entry.path).read_bytes()
        yield _header(entry.path, tarfile.REGTYPE, len(content), entry.mode)
        yield content + bytes(-len(content) % tarfile.BLOCKSIZE)
    for entry in large:
        yield _header(entry.path, tarfile.REGTYPE, 0, entry.mode)
    yield bytes(tarfile.RECORDSIZE)


def _header(path: str, kind: bytes, size: int, mode: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.type, info.size, info.mode, info.mtime = kind, size, mode, int(time.time())
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


async def pull_tree(
    lanes: list[SSHContextFactory],
    swift: Swift,
    source: str,
    target: Path,
    moved: Callable[[int], None],
    *,
    dialect: ShellDialect = SHELL,
    most_bytes: int | None = None,
) -> int:
    """Copy `source` at the facility to `target` here, which must not exist; returns bytes; `moved` gets each piece's.

    `most_bytes`: what the facility can have to send at most; it is never more than half of the free space.

    Raises `TransferFailed`, and writes nothing, where `target` exists or the facility lists names that are not plain.
    """
    check_new(target)
    listing = await retry_broken(lambda: read_output(lanes[0], dialect.listing(source)))
    directories, files = read_listing(
        listing, min(room_for_update(target), room_for_update(target) if most_bytes is None else most_bytes)
    )
    small, large, pieces = split_files(files, piece_size(files, len(lanes)))
    single = len(files) == 1 and not directories and files[0].path == ""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not single:
        target.mkdir(mode=0o700)
        for directory in directories:
            _inside(target, directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in large:
        with _opened(_inside(target, entry.path), NEW_FILE) as handle:
            os.truncate(handle, entry.size)

    async def move(lane: Lane, piece: Piece) -> None:
        file = posixpath.join(source, piece.path) if piece.path else source
        command = dialect.get_piece(file, piece.offset, piece.length)
        # Open for its pieces alone: a facility may list more files than this process may have open.
        with _opened(_inside(target, piece.path), os.O_WRONLY | os.O_NOFOLLOW) as handle:
            await lane.get(command, handle, piece.offset, piece.length)
        moved(piece.length)

    async with _lanes(lanes, swift, pieces) as opening:
        if small:
            await _pull_small(lanes[0], source, target, small, single, dialect)
        await spread_work(await opening, pieces, move)
    return sum(entry.size for entry in files)


MOST_FILES = 20_000
MOST_DEPTH = 8
LISTED = re.compile(rb"(\d{1,15}|d) ([0-7]{1,4}) ([^\0]*)")


def read_listing(listing: bytes, most_bytes: int | None = None) -> tuple[list[str], list[Entry]]:
    """Directories and files of find's answer, before anything is made for them.

    Raises `TransferFailed` for a malformed answer, for paths that are not plain names below the directory, for one
    path listed twice, and for more than `MOST_FILES`, `MOST_DEPTH` or `most_bytes` in all.
    """
    directories, files = [], []
    count = listing.count(b"\0")  # a list of all would take eight times the listing's bytes
    if count > MOST_FILES or not listing.endswith(b"\0") and listing:
        raise TransferFailed(f"the facility lists {count} files, or stops within a name; expected at most {MOST_FILES}")
    for line in listing.split(b"\0")[:-1]:
        if (found := LISTED.fullmatch(line)) is None:
            raise TransferFailed(
                f"the facility lists {shown_name(os.fsdecode(line))}, which is not size, mode and path"
            )
        path = os.fsdecode(found[3])
        if path:
            check_name(path)
        if path.count("/") >= MOST_DEPTH:
            raise TransferFailed(
                f"the facility lists {shown_name(path)}, which is more than {MOST_DEPTH} directories deep"
            )
        if found[1] != b"d":
            files.append(Entry(path=path, size=int(found[1]), mode=int(found[2], 8) & 0o777))
        elif path:
            directories.append(path)
    names = [*directories, *(entry.path for entry in files)]
    if len(set(names)) != len(names):
        raise TransferFailed("the facility lists one path twice")
    total = sum(entry.size for entry in files)
    if most_bytes is not None and total > most_bytes:
        raise TransferFailed(f"the facility lists {total} bytes, at most {most_bytes} are taken")
    return sorted(directories), sorted(files, key=lambda entry: entry.path)


def room_for_update(target: Path) -> int:
    """Maximum bytes of one update here: half of the free space, so that one facility cannot fill the disk."""
    place = next(parent for parent in target.absolute().parents if parent.exists())
    return shutil.disk_usage(place).free // 2


async def _pull_small(
    lane: SSHContextFactory, source: str, target: Path, small: list[Entry], single: bool, dialect: ShellDialect
) -> None:
    """Small files through tars that are read in memory, file by file; only what was listed is written."""
    if single:
        content = await retry_broken(lambda: read_output(lane, dialect.get_file(source), most=small[0].size))
        _write(target, content, small[0])
        return
    for batch in tar_batches(small):
        names = b"".join(os.fsencode(entry.path) + b"\0" for entry in batch)
        # Each file: header, contents, padding, and a longer name's own header and block.
        most = sum(entry.size + 4 * tarfile.BLOCKSIZE + len(entry.path) for entry in batch) + (1 << 20)
        data = await retry_broken(partial(read_output, lane, dialect.get_tree(source), names, most=most))
        try:
            _unpack(data, target, batch)
        except (tarfile.TarError, ValueError, EOFError, OverflowError, RecursionError) as error:
            raise TransferFailed(f"the facility sent a malformed archive: {type(error).__name__}") from None


def _unpack(data: bytes, target: Path, small: list[Entry]) -> None:
    """Write the files of a tar stream that were listed, and nothing else.

    A hard link is to a file before it. tarfile would look for that among all members, and for what it links to itself:
    of twenty thousand links to links for hours, while the engine stands still.
    """
    wanted, files = {entry.path: entry for entry in small}, dict[str, tarfile.TarInfo]()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", bufsize=BLOCK_BYTES, tarinfo=PlainHeader) as archive:
        for member in archive:
            entry, linked = wanted.pop(member.name, None), posixpath.normpath(member.linkname)
            source = member if member.isreg() else files.get(linked) if member.islnk() else None
            file = None if source is None else archive.extractfile(source)
            if entry is None or source is None or file is None:
                raise TransferFailed(
                    f"the facility sent {shown_name(member.name)}, which is not among the files it listed"
                )
            files[member.name] = source
            _write(_inside(target, entry.path), file.read(entry.size + 1), entry)  # a sparse member may claim terabytes
    if wanted:
        raise TransferFailed(
            f"the facility did not send {sorted(wanted)[0]!r} and {len(wanted) - 1} more files it listed"
        )


def _write(path: Path, content: bytes, entry: Entry) -> None:
    if len(content) != entry.size:
        raise TransferFailed(f"{entry.path or path.name} has {len(content)} bytes, the facility listed {entry.size}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, NEW_FILE, 0o600), "wb") as file:
        file.write(content)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _inside(target: Path, path: str) -> Path:
    return target / path if path else target
