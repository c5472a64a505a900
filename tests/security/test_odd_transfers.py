"""What a facility answers to a pull: every oddity is a failed transfer, before anything is allocated or written."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import subprocess
import tarfile
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.streamflow_plugin import tree
from coordinator.streamflow_plugin.dialect import BEGINS, ShellDialect
from coordinator.streamflow_plugin.lanes import TransferFailed
from coordinator.streamflow_plugin.pieces import SMALL_BYTES, TAR_BYTES, Entry
from coordinator.streamflow_plugin.tree import MOST_FILES, _unpack, read_listing


@pytest.mark.parametrize(
    "listing",
    [
        b"9223372036854775807 644 model.safetensors\0",
        b"4398046511104 644 model.safetensors\0",
        b"-5 644 x\0",
        b"5 x y\0",
        b"5\0",
        b"\0",
        b"5 644 cut short",
        b"5 999 x\0",
        b"1e9 644 x\0",
        b"5 644 x\x005 644 x\0",
        b"d 755 x\x005 644 x\0",
        b"5 644 " + b"a/" * 9 + b"x\0",
        b"0 644 x\0" * (MOST_FILES + 1),
    ],
    ids=range(13),
)
def test_a_listing_that_makes_no_sense_is_refused(listing: bytes):
    with pytest.raises(TransferFailed):
        read_listing(listing, 1 << 40)


def test_a_name_without_an_end_is_refused_in_no_time():
    """Marks above and below one letter, which `unicodedata.normalize` sorts in a time that grows with their square: of
    the megabytes that a listing may have, for days, in the process that serves all facilities."""
    name, begun = "a" + "\u0301\u0316" * 1_000_000, time.process_time()
    with pytest.raises(TransferFailed, match="not a plain file name"):
        read_listing(f"5 644 {name}\0".encode(), 1 << 40)
    assert time.process_time() - begun < 20


def test_a_listing_of_nothing_but_ends_of_names_takes_no_memory():
    listing = bytes(16 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TransferFailed, match="lists 16777216 files"):
            read_listing(listing, 1 << 40)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for info, content in members:
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def link(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize(
    "data",
    [
        b"not a tar at all" * 100,
        archive((tarfile.TarInfo("../x"), b"12345")),
        archive((tarfile.TarInfo("y"), b"12345")),
        archive((tarfile.TarInfo("x"), b"123456")),
        archive((tarfile.TarInfo("x"), b"12345"), (tarfile.TarInfo("x"), b"54321")),
        archive(link("x", "/etc/passwd", tarfile.SYMTYPE)),
        archive(link("x", "x", tarfile.LNKTYPE)),
        archive((tarfile.TarInfo("x"), b"12345"))[:600],
        b"",
    ],
    ids=range(9),
)
def test_an_archive_that_is_not_what_was_listed_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "update").mkdir()
    with pytest.raises((TransferFailed, tarfile.TarError, KeyError, RecursionError)):
        _unpack(data, tmp_path / "update", [Entry(path="x", size=5)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update"]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE])
def test_pax_headers_are_refused_before_their_text_is_searched(tmp_path: Path, kind: bytes):
    """A megabyte of digits in one took `tarfile` half an hour, in the process that serves all facilities."""
    pax = tarfile.TarInfo("x")
    pax.type, digits = kind, b"1" * 20_000
    (tmp_path / "update").mkdir()
    with pytest.raises(tarfile.ReadError, match="pax headers, expected those of `tar --format=gnu`"):
        _unpack(
            archive((pax, digits), (tarfile.TarInfo("x"), b"12345")), tmp_path / "update", [Entry(path="x", size=5)]
        )
    assert not list((tmp_path / "update").iterdir())


def test_links_to_links_are_followed_no_longer_than_files_are_read(tmp_path: Path):
    """tarfile looked for each among all members, and then for what that was a link to: the most that may be listed took
    an hour, in the process that serves all facilities."""
    names = [f"{number:05}" for number in range(5000)]
    first = tarfile.TarInfo(names[0])
    links = [link(name, names[min(number, 800)], tarfile.LNKTYPE) for number, name in enumerate(names[1:])]
    data, begun = archive((first, b"12345"), *links), time.process_time()
    (tmp_path / "update").mkdir()
    _unpack(data, tmp_path / "update", [Entry(path=name, size=5) for name in names])
    assert time.process_time() - begun < 20
    assert (tmp_path / "update" / names[-1]).read_bytes() == b"12345"


def test_what_a_facility_is_asked_for_is_an_archive_that_is_taken(tmp_path: Path):
    """Long names and times within a second, for which a tar may write pax headers by itself."""
    place, name = tmp_path / "place", "n" * 200
    (place / "d").mkdir(parents=True)
    (place / "d" / name).write_bytes(b"12345")
    os.link(place / "d" / name, place / "linked")  # tar sends it as a link to the first
    made = subprocess.run(
        ["bash", "-c", ShellDialect().get_tree(str(place))],
        input=f"d/{name}\0linked\0".encode(),
        env=os.environ | {"TAR_OPTIONS": "--format=posix"},
        capture_output=True,
        check=True,
    )
    (tmp_path / "update").mkdir()
    paths = [f"d/{name}", "linked"]
    _unpack(made.stdout.removeprefix(BEGINS), tmp_path / "update", [Entry(path=path, size=5) for path in paths])
    assert [(tmp_path / "update" / path).read_bytes() for path in paths] == [b"12345"] * 2


def test_many_small_files_are_not_in_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A facility may list twenty thousand of a megabyte: one archive of them all would fill the memory."""
    place, asked = tmp_path / "place", []
    place.mkdir()
    for number in range(70):
        (place / f"{number:02}").touch()
        os.truncate(place / f"{number:02}", SMALL_BYTES)

    async def output(lane: object, command: str, text: bytes = b"", *, most: int = 0) -> bytes:
        asked.append(most)
        made = subprocess.run(["bash", "-c", command], input=text, stdout=subprocess.PIPE, check=True)
        return made.stdout.removeprefix(BEGINS)

    monkeypatch.setattr(tree, "read_output", output)
    small = [Entry(path=path.name, size=SMALL_BYTES) for path in sorted(place.iterdir())]
    (tmp_path / "update").mkdir()
    asyncio.run(tree._pull_small(None, str(place), tmp_path / "update", small, False, ShellDialect()))  # type: ignore[arg-type]
    assert sorted(one.name for one in (tmp_path / "update").iterdir()) == [entry.path for entry in small]
    assert len(asked) == 3 and max(asked) < TAR_BYTES + (2 << 20)


def test_more_large_files_than_may_be_open_come_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All of a listing's were opened before the first came: a fault of this machine's, which ends the run for all."""
    count, soft_and_hard = 100, resource.getrlimit(resource.RLIMIT_NOFILE)
    listed = b"".join(b"%d 644 %d.safetensors\0" % (SMALL_BYTES + 1, number) for number in range(count))

    async def output(lane: object, command: str, text: bytes = b"", *, most: int = 0) -> bytes:
        return listed

    async def get(lane: object, command: str, file: int, offset: int, length: int) -> None:
        assert length == SMALL_BYTES + 1 and os.pwrite(file, b"x", offset + length - 1)

    @asynccontextmanager
    async def without(wanted: int) -> AsyncIterator[list[Any]]:
        yield []

    monkeypatch.setattr(tree, "read_output", output)
    monkeypatch.setattr(tree.Lane, "get", get)
    moved: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, soft_and_hard[1]))
        size = asyncio.run(tree.pull_tree([None], without, "update", tmp_path / "update", moved.append))  # type: ignore[list-item]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_and_hard)
    assert size == sum(moved) == count * (SMALL_BYTES + 1)
    for path in (tmp_path / "update").iterdir():
        with path.open("rb") as file:
            file.seek(SMALL_BYTES)
            assert file.read() == b"x"
