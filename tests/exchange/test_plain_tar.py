"""Pax records are refused whichever way this Python's tarfile makes a header: 3.14.10 passes over `frombuf`."""

from __future__ import annotations

import io
import tarfile

import pytest

from facility.exchange.files.plain_tar import PlainHeader


def archive(format: int) -> io.BytesIO:
    """One small file, of an archive with a pax record or without."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, pax_headers={"comment": "x"}) as made:
        header = tarfile.TarInfo("a")
        header.size = 1
        made.addfile(header, io.BytesIO(b"x"))
    buffer.seek(0)
    return buffer


def names(buffer: io.BytesIO, mode: str) -> list[str]:
    with tarfile.open(fileobj=buffer, mode=mode, tarinfo=PlainHeader) as read:
        return read.getnames()


@pytest.mark.parametrize("mode", ["r:", "r|"])
@pytest.mark.parametrize("passed_over", [False, True])
def test_pax_records_are_refused(mode: str, passed_over: bool, monkeypatch: pytest.MonkeyPatch):
    if passed_over:
        monkeypatch.setattr(
            PlainHeader, "frombuf", tarfile.TarInfo.frombuf.__func__.__get__(PlainHeader), raising=False
        )
    with pytest.raises(tarfile.ReadError, match="it has pax headers"):
        names(archive(tarfile.PAX_FORMAT), mode)


@pytest.mark.parametrize("mode", ["r:", "r|"])
def test_gnu_archives_are_read(mode: str):
    assert names(archive(tarfile.GNU_FORMAT), mode) == ["a"]
