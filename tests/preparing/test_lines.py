"""A packed file gives all lines that it holds, or an error: what is lost in silence is training data."""

from __future__ import annotations

import lzma
import zlib
from pathlib import Path

import pytest

from facility.dataset import DatasetError
from facility.preparing import lines
from facility.preparing.lines import PACKED, lines_of
from tests.preparing.test_prepare_sources import compressed

TEXT = b"".join(b"line %d of some text\n" % number for number in range(9_000))
FIRST, SECOND = TEXT[:100_000], TEXT[100_000:]
REFUSED = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read(path: Path, content: bytes) -> bytes:
    path.write_bytes(content)
    return b"".join(line for line, _ in lines_of(path))


@pytest.mark.parametrize("kind", PACKED)
def test_all_streams_of_a_packed_file_are_read(tmp_path: Path, kind: str):
    one, other = compressed(FIRST, kind), compressed(SECOND, kind)
    assert read(tmp_path / f"a{kind}", one + other) == TEXT
    if kind != ".zst":  # zeros are no padding there, and an error
        assert read(tmp_path / f"a{kind}", one + bytes(512) + other + bytes(70_000)) == TEXT


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("rest", [b"x", b"more text\n", b"\0\0 text after zeros\n", SECOND])
def test_what_follows_a_stream_and_is_none_is_an_error(tmp_path: Path, kind: str, rest: bytes):
    """As after `cat packed plain > packed`, or an upload that was begun twice."""
    for content in (rest, rest + compressed(SECOND, kind)):
        with pytest.raises(REFUSED):
            read(tmp_path / f"a{kind}", compressed(FIRST, kind) + content)


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_file_that_was_cut_anywhere_is_an_error(tmp_path: Path, kind: str):
    one, other = compressed(b"a\nb\n", kind), compressed(b"c\n", kind)
    for length in [*range(len(one)), *range(len(one) + 1, len(one + other))]:
        with pytest.raises(REFUSED):
            read(tmp_path / f"a{kind}", (one + other)[:length])
    assert read(tmp_path / f"a{kind}", one) == b"a\nb\n"
    assert read(tmp_path / f"a{kind}", compressed(b"", kind)) == b""


@pytest.mark.parametrize("kind", ["", *PACKED])
def test_a_line_without_end_is_an_error_before_all_of_it_is_in_memory(tmp_path: Path, monkeypatch, kind: str):
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    content = b"short\n" + b"x" * 999 + b"\n" + b"y" * 50_000
    path = tmp_path / f"a{kind}"
    path.write_bytes(compressed(content, kind) if kind else content)
    found = []
    with pytest.raises(DatasetError, match=r":3: found a line of more than 1,000 bytes"):
        for line, share in lines_of(path):
            assert 0 < share <= 1
            found.append(line)
    assert found == [b"short\n", b"x" * 999 + b"\n"]
