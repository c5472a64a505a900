"""How a checkpoint is cut for several streams, and what a facility may not send."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.streamflow_plugin.lanes import TransferFailed, blocks_of
from coordinator.streamflow_plugin.pieces import (
    LEAST_BYTES,
    MOST_BYTES,
    SMALL_BYTES,
    TAR_BYTES,
    Entry,
    piece_size,
    split_files,
    tar_batches,
)
from coordinator.streamflow_plugin.tree import _tar, local_entries, read_listing

sizes = st.lists(st.integers(0, 40 * SMALL_BYTES), max_size=8)


@given(sizes, st.integers(SMALL_BYTES, 8 * SMALL_BYTES))
def test_every_byte_is_in_exactly_one_place(numbers: list[int], piece_bytes: int):
    entries = [Entry(path=f"f{number}", size=size) for number, size in enumerate(numbers)]
    small, large, pieces = split_files(entries, piece_bytes)
    assert sorted((*small, *large), key=lambda e: e.path) == entries
    assert all(entry.size <= SMALL_BYTES for entry in small)
    for entry in large:
        own = sorted((piece for piece in pieces if piece.path == entry.path), key=lambda piece: piece.offset)
        position = 0
        for piece in own:
            assert piece.offset == position and 0 < piece.length <= piece_bytes
            position += piece.length
        assert position == entry.size
        assert max(p.length for p in own) - min(p.length for p in own) <= 1
    assert sum(piece.length for piece in pieces) == sum(entry.size for entry in large)


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("megabytes", [3, 40, 1000, 14_000])
def test_every_stream_has_work_unless_the_model_is_small(streams: int, megabytes: int):
    entries = [Entry(path="a", size=megabytes * 500_000), Entry(path="b", size=megabytes * 500_000)]
    size = piece_size(entries, streams)
    assert LEAST_BYTES <= size <= MOST_BYTES
    assert megabytes < 40 or len(split_files(entries, size)[2]) >= streams


def test_a_directory_with_odd_names_and_links_is_listed_and_packed(tmp_path: Path):
    source = tmp_path / "model"
    (source / "a b" / "empty").mkdir(parents=True)
    (source / "a b" / "it's; $(rm -rf x).txt").write_text("text")
    (source / ("n" * 120 + ".json")).write_text("{}")
    (source / "zero").touch()
    (tmp_path / "elsewhere").write_text("linked")
    (source / "link").symlink_to(tmp_path / "elsewhere")
    directories, files = local_entries(source)
    assert directories == ["a b", "a b/empty"]
    assert {entry.path: entry.size for entry in files} == {
        "a b/it's; $(rm -rf x).txt": 4,
        "n" * 120 + ".json": 2,
        "zero": 0,
        "link": 6,
    }
    large = [Entry(path="big", size=10**9, mode=0o640)]
    with tarfile.open(fileobj=io.BytesIO(b"".join(_tar(source, directories, files, large)))) as archive:
        members = {member.name: member for member in archive}
        assert set(members) == {*directories, *(entry.path for entry in files), "big"}
        assert members["big"].size == 0 and members["big"].mode == 0o640
        assert archive.extractfile("link").read() == b"linked"  # type: ignore[union-attr]


def test_a_file_that_shrinks_is_noticed(tmp_path: Path):
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    with open(path, "rb") as file:
        assert sum(map(len, blocks_of(file.fileno(), 10, 90))) == 90
        with pytest.raises(TransferFailed, match="became shorter"):
            list(blocks_of(file.fileno(), 10, 91))


def test_a_listing_is_read_and_paths_that_leave_the_directory_are_refused():
    directories, files = read_listing(b"d 755 \0d 700 sub\x00005 644 sub/x y\x007 600 a.b\0")
    assert directories == ["sub"]
    assert [(entry.path, entry.size, entry.mode) for entry in files] == [("a.b", 7, 0o600), ("sub/x y", 5, 0o644)]
    for path in (b"../x", b"/etc/passwd", b"a/../../x", b"./x", b"a//b", b"a/"):
        with pytest.raises(TransferFailed, match="outside"):
            read_listing(b"5 644 " + path + b"\0")
    for path in (b"a\nb", b"\x1b[31mx", b"caf\xc3", "cafe\u0301".encode(), "x\u202ey".encode(), b"a\\b", b"n" * 256):
        with pytest.raises(TransferFailed, match="plain"):
            read_listing(b"5 644 " + path + b"\0")


@given(st.lists(st.integers(SMALL_BYTES // 4, SMALL_BYTES), min_size=130, max_size=200))
def test_small_files_come_in_tars_of_limited_size(numbers: list[int]):
    entries = [Entry(path=f"f{number}", size=size) for number, size in enumerate(numbers)]
    found = tar_batches(entries)
    assert len(found) > 1, "there is more than one holds"
    assert [entry for batch in found for entry in batch] == entries and all(found)
    assert all(sum(entry.size for entry in batch) <= TAR_BYTES for batch in found)
    assert all(sum(one.size for one in (*a, b[0])) > TAR_BYTES for a, b in zip(found, found[1:], strict=False))
