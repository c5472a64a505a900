"""A keyed checksum is the tag of AES-GCM over no text, however its bytes come, and tells every change of a file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from facility.exchange.files.keyed_checksum import NONCE, KeyedChecksum, is_checksum, matches
from facility.exchange.files.streamed_digest import StreamedDigest

CONTENT = random.Random(3).randbytes(70_001)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, len(CONTENT)])
@pytest.mark.parametrize("piece", [1 << 20, 4096, 33])
def test_it_is_the_tag_of_gcm_over_the_whole_however_it_comes(count: int, piece: int):
    key = bytes(range(32))
    made = KeyedChecksum(key)
    for start in range(0, count, piece):
        made.update(memoryview(CONTENT)[start : min(start + piece, count)])
    tag = AESGCM(key).encrypt(NONCE, b"", CONTENT[:count])
    assert made.hexdigest() == made.hexdigest() == f"aes-256-gmac:{key.hex()}:{tag.hex()}"


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
    digest = StreamedDigest(file, len(CONTENT), KeyedChecksum)
    digest.feed(5, CONTENT[5:])
    digest.feed(0, CONTENT[:5])
    stated = digest.finish()
    assert is_checksum(stated) and matches(file, stated)
    file.write_bytes(harms()[harm])
    assert not matches(file, stated)


def test_no_key_is_used_twice_and_a_digest_is_no_checksum():
    assert KeyedChecksum().hexdigest() != KeyedChecksum().hexdigest()
    assert not is_checksum("0" * 64)


@pytest.mark.parametrize(
    "stated", ["aes-256-gmac:", "aes-256-gmac:00:11", f"aes-256-gmac:{'0' * 64}:", "aes-256-gmac:z:1"]
)
def test_what_is_no_checksum_is_an_error(stated: str, tmp_path: Path):
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(ValueError):
        matches(tmp_path / "file", stated)
