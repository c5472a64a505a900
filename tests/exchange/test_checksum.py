"""A checksum is XXH3 of 128 bits, however the bytes come, and tells every change of a file."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import xxhash

from facility.exchange.errors import ManifestError
from facility.exchange.files.checksum import Checksum, checksum_of, is_checksum
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.manifest import (
    NAME,
    FileEntry,
    Manifest,
    read_manifest,
    store_manifest,
    verify_manifest,
    write_manifest,
)

CONTENT = random.Random(3).randbytes(70_001)


@pytest.mark.parametrize("count", [0, 1, 240, 241, len(CONTENT)])
@pytest.mark.parametrize("piece", [1 << 20, 4096, 33])
def test_it_is_xxh3_of_the_whole_however_it_comes(count: int, piece: int):
    made = Checksum()
    for start in range(0, count, piece):
        made.update(memoryview(CONTENT)[start : min(start + piece, count)])
    assert made.hexdigest() == made.hexdigest() == f"xxh3-128:{xxhash.xxh3_128_hexdigest(CONTENT[:count])}"
    assert is_checksum(made.hexdigest()) and not is_checksum("0" * 64)


def harms() -> dict[str, bytes]:
    flipped = {f"bit {bit}": bytearray(CONTENT) for bit in (0, 100_003, 8 * len(CONTENT) - 1)}
    for name, content in flipped.items():
        bit = int(name.split()[1])
        content[bit // 8] ^= 1 << bit % 8
    blocks = CONTENT[16:32] + CONTENT[:16] + CONTENT[32:]
    others = {"cut": CONTENT[:-1], "longer": CONTENT + b"\0", "empty": b"", "blocks changed places": blocks}
    return {name: bytes(content) for name, content in flipped.items()} | others


@pytest.mark.parametrize("harm", harms())
def test_a_file_that_is_not_as_it_was_is_told(harm: str, tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    stated = checksum_of(file)
    assert is_checksum(stated) and stated == StreamedDigest(file, len(CONTENT), Checksum).finish()
    file.write_bytes(harms()[harm])
    assert checksum_of(file) != stated


def sealed(directory: Path, kind: str = "state") -> Manifest:
    """A directory of one file of tensors, which was hashed as it was written, and one that was not."""
    (directory / "master").mkdir(parents=True)
    file = directory / "master" / "model.safetensors"
    file.write_bytes(CONTENT)
    (directory / "round.json").write_text("{}")
    digest = StreamedDigest(file, len(CONTENT), Checksum)
    digest.feed(5, CONTENT[5:])
    digest.feed(0, CONTENT[:5])
    known = {"master/model.safetensors": digest.finish()}
    return write_manifest(directory, Manifest(kind=kind, federation="test", round=1), known)


def test_a_state_is_verified_by_its_checksums(tmp_path: Path):
    written = sealed(tmp_path)
    assert read_manifest(tmp_path) == verify_manifest(tmp_path) == written
    entry = written.files["master/model.safetensors"]
    assert is_checksum(entry.checksum) and not entry.sha256 and entry.digest == entry.checksum
    assert len(written.files["round.json"].sha256) == 64


@pytest.mark.parametrize("harm", harms())
def test_a_file_of_a_state_that_is_not_as_it_was_is_told(harm: str, tmp_path: Path):
    sealed(tmp_path)
    (tmp_path / "master" / "model.safetensors").write_bytes(harms()[harm])
    with pytest.raises(ManifestError, match="model.safetensors has"):
        verify_manifest(tmp_path)


@pytest.mark.parametrize("kind", ["update", "model"])
def test_a_checksum_stands_for_no_content_between_parties(kind: str, tmp_path: Path):
    """Whoever sends it could find other content with the same one."""
    sealed(tmp_path, kind)
    with pytest.raises(ManifestError, match="checksum"):
        verify_manifest(tmp_path)


@pytest.mark.parametrize("stated", ["", "xxh3-128:", "xxh3-128:" + "g" * 32, "0" * 64, "xxh3-128:" + "0" * 33])
def test_what_is_no_checksum_is_an_error(stated: str, tmp_path: Path):
    written = sealed(tmp_path)
    entry = dataclasses.replace(written.files["master/model.safetensors"], checksum=stated or "-")
    store_manifest(tmp_path, dataclasses.replace(written, files=written.files | {"master/model.safetensors": entry}))
    with pytest.raises(ManifestError, match="checksum of 'master/model.safetensors' is"):
        read_manifest(tmp_path)


def test_a_state_of_an_earlier_version_is_verified_by_sha256(tmp_path: Path):
    sealed(tmp_path)
    (tmp_path / NAME).unlink()
    written = write_manifest(tmp_path, Manifest(kind="state", federation="test", round=1))
    assert all(len(entry.sha256) == 64 for entry in written.files.values()) and verify_manifest(tmp_path) == written
    assert FileEntry(sha256="a", size=1).digest == "a"
