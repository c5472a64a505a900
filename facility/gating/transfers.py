"""Files in and out, by the system calls that tar, dd, cat and find would make, without those programs.

In: anywhere below the workdir. Out: only what a job of ours left in its `update` directory, and its `progress.json`.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from facility.exchange.files.durable import write_all
from facility.exchange.files.plain_tar import PlainHeader
from facility.exchange.gate_requests import ARRIVED
from facility.exchange.messages.progress import FILE as PROGRESS
from facility.gating.confine import UPDATE, confine_path, plain_name, refuse_outgoing
from facility.gating.grammar import Request
from facility.gating.held import Target, check_no_job, check_sent, confined_source, confined_target, paths_alone
from facility.gating.ledger import read_ledger
from facility.gating.refusal import Refused
from facility.gating.session import ENTRY, Incoming, Session

BLOCK = 1 << 20
MOST_SMALL = 64 << 20
"""Bytes of a file that comes or goes as a whole; larger ones go in pieces."""
MOST_FILES = 20_000
MOST_NAMES = 16 << 20
MOST_HEADERS = 4 << 20
"""Bytes of a tar stream before its next file is known: a header with a long name states its length itself."""
NOT_YET = 1
"""Exit code of a request for the progress of a job that has reported none so far: nothing failed."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _input() -> IO[bytes]:
    return sys.stdin.buffer


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def test(session: Session, request: Request) -> int:
    """Exit code 0 where a path is what the flag asks for (as `test` has them), else 1."""
    path = confine_path(request["path"], session.workdir, follow=request["flag"] != "-L")
    found = {
        "-e": os.path.exists,
        "-d": os.path.isdir,
        "-f": os.path.isfile,
        "-L": os.path.islink,
        "-x": lambda one: os.access(one, os.X_OK),
    }[request["flag"]](path)
    return 0 if found else 1


def resolve(session: Session, request: Request) -> int:
    """Print a path without links; exit code 1 where there is nothing."""
    path = confine_path(request["path"], session.workdir, follow=True)
    if not path.exists():
        return 1
    _say(f"{path}\n")
    return 0


def sha1(session: Session, request: Request) -> int:
    """The engine's checksum of a file that it sent.

    Raises `Refused` for what a job printed or keeps, its update included. Whoever overwrites such a file byte by byte
    from its end, and asks for the checksum after each, can read it, and no byte of it would have been counted.
    """
    path = confined_source(request["path"], session)
    if not path.is_file():
        return 1
    with os.fdopen(_open(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > MOST_SMALL:  # hours for one byte at a far offset, connection or not
            raise Refused(f"{path} is too large for a checksum: the engine asks for those of settings alone")
        _say(hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest() + "\n")
    return 0


def walk(session: Session, request: Request) -> int:
    """Directories or files in a directory, one path a line."""
    place = confine_path(request["path"], session.workdir, follow=True)
    for name in sorted(os.listdir(place)):
        found = place / name
        if name.isprintable() and (found.is_dir() if request["kind"] == "d" else found.is_file()):
            _say(f"{request['path']}/{name}\n")
    return 0


def make(session: Session, request: Request) -> int:
    """Make directories that are not there yet, for this account alone."""
    with Incoming(session) as incoming:
        for word in request.more:
            with paths_alone(session):
                if confine_path(word, session.workdir).is_dir():
                    continue
                path = confined_target(word, session)
                incoming.take(_new_entries(path))
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return 0


def _new_entries(path: Path) -> int:
    """What a path counts with that is about to be made, its directories included."""
    return ENTRY * sum(not os.path.lexists(one) for one in (path, *path.parents))


def remove(session: Session, request: Request) -> int:
    """Remove files and directories that no job under way reads."""
    for word in request.more:
        with paths_alone(session):
            _clear(confined_target(word, session))
    return 0


def _clear(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def link(session: Session, request: Request) -> int:
    """Neither to what may leave, or is a job's, nor from a job's directory.

    A job would write there, its output for one, through it, or read there what another printed.
    """
    with paths_alone(session), Incoming(session) as incoming:
        source = refuse_outgoing(confine_path(request["source"], session.workdir, follow=True), session.workdir)
        check_sent([str(source)], session)
        target = confined_target(request["target"], session)
        check_no_job(target, session)
        incoming.take(ENTRY)
        _clear(target)
        os.symlink(source, target)
    return 0


def put_tree(session: Session, request: Request) -> int:
    """A tar stream of directories and regular files becomes the directory; what stood there is replaced."""
    with Incoming(session) as incoming:
        with paths_alone(session):
            target = Target(request["path"], session)
            incoming.take(_new_entries(target.path))
            _clear(target.path)
            target.path.mkdir(mode=0o700, parents=True)
        stream = _Bounded()
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK, tarinfo=PlainHeader) as archive:
                for count, member in enumerate(archive):
                    if count >= MOST_FILES:
                        raise Refused(f"more than {MOST_FILES} files come at once")
                    stream.left = min(member.size, MOST_SMALL) + MOST_HEADERS
                    _unpack(archive, member, target, incoming)
        except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
            raise Refused(f"what came is no tar stream: {error}") from None
    return 0


class _Bounded(io.RawIOBase):
    """The input, of which no more than `left` bytes are read."""

    left = MOST_HEADERS

    def read(self, size: int = -1) -> bytes:
        if self.left <= 0:
            raise Refused(f"more than {MOST_HEADERS} bytes of headers come before a file")
        block = _input().read(min(size, self.left))
        self.left -= len(block)
        return block


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Target, incoming: Incoming) -> None:
    name = plain_name(member.name)
    incoming.take(ENTRY * (name.count("/") + 1))
    if member.size > MOST_SMALL:
        raise Refused(f"{name} is too large to come whole")
    if member.isdir():
        with paths_alone(place.session):
            place.check()
            confine_path(f"{place.path}/{name}", place.path).mkdir(mode=0o700, parents=True, exist_ok=True)
    elif member.isreg() and not member.issparse() and (source := archive.extractfile(member)) is not None:
        with paths_alone(place.session):
            place.check()
            file = _new(confine_path(f"{place.path}/{name}", place.path))
        if (written := _copy(source, file, place, incoming)) != member.size:
            raise Refused(f"{name} came with {written} bytes, expected {member.size}")
    else:
        raise Refused(f"{name} is neither a directory nor a regular file, written out")


def _new(path: Path) -> int:
    """A descriptor of a new file, for this account alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, NEW, 0o600)


def _copy(source: IO[bytes], file: int, target: Target, incoming: Incoming) -> int:
    """Write a stream of at most `MOST_SMALL` bytes into the descriptor, and close it; returns the bytes written.

    Raises `Refused` once the file is a job's, or kept: a stream may wait until then with its rest.
    """
    with os.fdopen(file, "wb", buffering=0) as out:
        done = 0
        while block := source.read(BLOCK):
            done += len(block)
            if done > MOST_SMALL:
                raise Refused(f"{target.path} is larger than {MOST_SMALL} bytes, and has to come in pieces")
            incoming.take(len(block))
            target.check()
            _check_single(out.fileno(), target.path)
            write_all(out.fileno(), block)
        return done


def put_file(session: Session, request: Request) -> int:
    """The input becomes a file of at most `MOST_SMALL` bytes; what stood there is replaced."""
    with Incoming(session) as incoming:
        with paths_alone(session):
            target = Target(request["path"], session)
            incoming.take(_new_entries(target.path))
            _clear(target.path)
            file = _new(target.path)
        _copy(_input(), file, target, incoming)
    return 0


def put_piece(session: Session, request: Request) -> int:
    """A range of a file that put-tree or put-file made, and that no job has kept since."""
    offset, left = int(request["offset"]), int(request["length"])
    with Incoming(session) as incoming:
        with paths_alone(session):
            target = Target(request["path"], session)
            file = os.open(target.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while left:
                block = _input().read(min(BLOCK, left))
                if not block:
                    raise OSError(f"{target.path}: the connection ended {left} bytes too early")
                incoming.take(len(block))
                target.check()
                _check_single(file, target.path)
                done = 0
                while done < len(block):
                    done += os.pwrite(file, block[done:], offset + done)
                offset, left = offset + len(block), left - len(block)
        finally:
            os.close(file)
    _say(f"{ARRIVED}\n")
    return 0


def _check_single(file: int, path: Path) -> None:
    """Raise `Refused` for a file of several names: jobs keep models and updates by hard links, outside of the workdir,
    where no request writes."""
    if os.fstat(file).st_nlink > 1:
        raise Refused(f"{path} has another name, under which it is kept here: it is not written to; send a new file")


def sizes(session: Session, request: Request) -> int:
    """Bytes of each file that the input names, one a line."""
    for name in _names():
        _say(f"{confine_path(name, session.workdir, follow=True).stat().st_size}\n")
    return 0


def _names() -> list[str]:
    data = _input().read(MOST_NAMES + 1)
    if len(data) > MOST_NAMES or data.count(b"\0") > MOST_FILES or not data.endswith(b"\0") and data:
        raise Refused("the list of names is too long, or stops within a name")
    return [os.fsdecode(name) for name in data.split(b"\0")[:-1]]


def readable(path: str, session: Session) -> Path:
    """A path that may be read. Raises `Refused` unless it is a job's update or progress."""
    found = confine_path(path, session.workdir, follow=True)
    for job in read_ledger(session.ledger).jobs:
        directory = Path(job.directory)
        if found.is_relative_to(directory / UPDATE) or found == directory / PROGRESS:
            return found
    raise Refused(f"{path} is neither a job's update nor its progress.json: nothing else leaves through this gate")


def listing(session: Session, request: Request) -> int:
    """Sizes, modes and names below a directory, as `find -L -printf '%s %m %P\\0'` prints them."""
    place = readable(request["path"], session)
    for path in _walk(place, session):
        found = path.stat()
        name = "" if path == place else path.relative_to(place).as_posix()
        kind = "d" if stat.S_ISDIR(found.st_mode) else str(found.st_size)
        sys.stdout.buffer.write(f"{kind} {found.st_mode & 0o777:o} ".encode() + os.fsencode(name) + b"\0")
    sys.stdout.flush()
    return 0


def _walk(place: Path, session: Session) -> Iterator[Path]:
    """The place and all below it; links only where they lead to what may be read."""
    yield place
    if place.is_dir():
        for folder, directories, files in os.walk(place):
            for name in sorted([*directories, *files]):
                path = Path(folder, name)
                if path.is_symlink():
                    readable(str(path), session)
                if path.is_dir() or path.is_file():
                    yield path


def get_file(session: Session, request: Request) -> int:
    """Print a file of a job's update, or its progress; exit code `NOT_YET` before there is any."""
    path = readable(request["path"], session)
    if path.name == PROGRESS and not path.exists():
        return NOT_YET
    _give(session, path, 0, path.stat().st_size)
    return 0


def get_piece(session: Session, request: Request) -> int:
    """Print a range of a file of a job's update."""
    _give(session, readable(request["path"], session), int(request["offset"]), int(request["length"]))
    return 0


def _open(path: Path) -> int:
    """A descriptor of a file at a path without links. Raises `Refused` where another file has come to lie there.

    The coordinator may replace a directory on the way by a link after the path was checked.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{file}") != str(path) or not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Refused(f"{path} was exchanged while it was read, or is not a regular file")
    return file


def _give(session: Session, path: Path, offset: int, length: int) -> None:
    file = _open(path)
    try:
        length = min(length, max(0, os.fstat(file).st_size - offset))
        session.take_out(length)
        out = sys.stdout.buffer
        while length and (block := os.pread(file, min(BLOCK, length), offset)):
            out.write(block)
            offset, length = offset + len(block), length - len(block)
        out.flush()
    finally:
        os.close(file)


def get_tree(session: Session, request: Request) -> int:
    """The files that the input names, below a directory, as a tar stream."""
    place = readable(request["path"], session)
    paths = [(plain_name(name), readable(f"{place}/{name}", session)) for name in _names()]
    files = [(name, path, path.stat().st_size) for name, path in paths]
    session.take_out(sum(size for _, _, size in files))
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT, dereference=True) as archive:
        for name, path, size in files:
            with os.fdopen(_open(path), "rb") as file:
                entry = archive.gettarinfo(arcname=name, fileobj=file)
                if entry.size > size:
                    raise Refused(f"{path} grew while it was read: {size} bytes of it were counted")
                archive.addfile(entry, file)
    sys.stdout.flush()
    return 0
