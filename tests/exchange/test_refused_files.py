"""What a file system refuses is named by the file or directory that was to appear, also where the error names none."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from facility.exchange.files.durable import new_directory, write_bytes
from facility.exchange.files.storage import lasting, sentence

LIMIT = 4096


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond `LIMIT` bytes: a real refusal, of a write to an open file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_named(small_files: None, tmp_path: Path):
    with pytest.raises(OSError) as caught:
        write_bytes(tmp_path / "round.json", bytes(LIMIT + 1))
    assert sentence(caught.value).startswith(f"{tmp_path}/round.json may not grow so large")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_within_a_directory_is_named(small_files: None, tmp_path: Path):
    with pytest.raises(OSError) as caught, new_directory(tmp_path / "round-0001") as outer:
        with new_directory(outer / "model") as inner, open(inner / "model.safetensors", "wb", buffering=0) as file:
            assert file.write(bytes(LIMIT)) == LIMIT
            os.pwrite(file.fileno(), b"x", LIMIT)
    assert sentence(caught.value).startswith(f"{tmp_path}/round-0001/model may not grow so large")
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_names_a_file_or_is_none_of_the_file_system_s_stays(tmp_path: Path):
    with pytest.raises(PermissionError) as caught, new_directory(tmp_path / "a"):
        raise PermissionError(13, "denied", "/elsewhere")
    assert caught.value.filename == "/elsewhere"
    with pytest.raises(BrokenPipeError) as other, new_directory(tmp_path / "a"):
        raise BrokenPipeError(32, "broken")
    assert other.value.filename is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/.stopped.json.x_1y.tmp", "/a/stopped.json"),
        ("/a/.round-0001.k.tmp/.model.z.tmp/w.safetensors", "/a/round-0001/model/w.safetensors"),
        ("/a/.hidden/b.tmp", "/a/.hidden/b.tmp"),
    ],
)
def test_temporary_names_are_told_as_what_they_become(path: str, expected: str):
    assert lasting(path) == expected
