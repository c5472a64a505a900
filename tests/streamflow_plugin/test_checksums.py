"""A file is hashed once, whatever its names; another file, or the same one written to, is hashed anew."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from coordinator.streamflow_plugin.checksums import LEAST_BYTES, KnownChecksums


class Counted:
    """StreamFlow's own function, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: str) -> str:
        self.calls += 1
        return hashlib.sha1(Path(path).read_bytes(), usedforsecurity=False).hexdigest()


def sha1(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").write_bytes(os.urandom(LEAST_BYTES))
    return tmp_path / "model"


def test_links_of_one_file_are_hashed_once(tmp_path: Path, model: Path):
    counted = Counted()
    known = KnownChecksums(counted)
    for number in range(3):
        os.link(model, tmp_path / f"link{number}")
        assert known(str(tmp_path / f"link{number}")) == sha1(model)
    (tmp_path / "engine").symlink_to(model)
    assert known(str(tmp_path / "engine")) == sha1(model) and counted.calls == 1


def test_what_was_written_to_or_replaced_is_hashed_anew(tmp_path: Path, model: Path):
    known = KnownChecksums(Counted())
    first, times = known(str(model)), model.stat()
    content = os.urandom(LEAST_BYTES)
    model.write_bytes(content)
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert known(str(model)) == sha1(model) != first
    (tmp_path / "other").write_bytes(os.urandom(LEAST_BYTES))
    os.replace(tmp_path / "other", model)
    assert known(str(model)) == sha1(model)


def test_small_files_are_always_hashed(tmp_path: Path):
    counted = Counted()
    known = KnownChecksums(counted)
    (tmp_path / "small").write_bytes(b"{}")
    assert {known(str(tmp_path / "small")) for _ in range(3)} == {sha1(tmp_path / "small")} and counted.calls == 3
