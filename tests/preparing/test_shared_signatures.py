"""Laws of signatures that facilities exchange: what one has the other leaves out, by one salt only."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from facility.dataset import DatasetError
from facility.prepare import main
from facility.preparing import reading, shared_signatures
from facility.preparing.near_duplicates import NearDuplicates, minhash_signature
from facility.preparing.shared_signatures import read_salt, read_signatures, write_signatures
from tests.preparing.corpora import write_json_lines
from tests.preparing.test_data_care import article, edited, made


@pytest.fixture
def salt(tmp_path: Path) -> Path:
    path = tmp_path / "salt"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


def test_what_one_facility_shares_the_other_leaves_out(tmp_path: Path, tokenizer: Path, salt: Path):
    texts = [article(seed) for seed in range(20)]
    shared = tmp_path / "north.signatures"
    care = {"near_duplicates": 0.8, "salt": salt}
    held = [article(seed) for seed in range(70, 80)]
    made(tmp_path / "north", tokenizer, [texts[:12]], held, share_signatures=shared, **care)
    assert load_file(shared)["signatures"].shape == (22, 128)
    own = [edited(texts[3], 1), edited(texts[4], 60), *texts[10:], texts[15]]
    other = [article(seed) for seed in range(80, 90)]
    south = made(tmp_path / "south", tokenizer, [own], other, drop_signatures=[shared], **care).dataset.manifest
    found = south.splits["train"]
    assert (found.elsewhere_documents, found.duplicate_documents, found.documents) == (3, 1, 9)
    assert len(south.settings["dropped_signatures"]) == 1


def test_signatures_of_two_salts_have_nothing_in_common(tmp_path: Path, salt: Path):
    key, text = read_salt(salt), article(1)
    assert not (minhash_signature(text, key) == minhash_signature(text)).any()
    near = NearDuplicates(0.8, key=key, elsewhere=[minhash_signature(text, key)])
    assert near.earlier(edited(text, 1)) == "elsewhere" and near.earlier(article(2)) is None
    assert near.earlier(article(2)) == "here" and [len(block) for block in near.own()] == [1]
    write_signatures(tmp_path / "file", [minhash_signature(text, key)], key)
    other = tmp_path / "other"
    other.write_text("another salt of many bytes")
    with pytest.raises(DatasetError, match="made with another salt"):
        read_signatures(tmp_path / "file", read_salt(other))
    other.write_text("short")
    with pytest.raises(DatasetError, match="holds 5 bytes, expected 16 to"):
        read_salt(other)


def test_the_order_of_the_documents_is_not_shared(tmp_path: Path, salt: Path):
    key = read_salt(salt)
    found = [minhash_signature(article(seed), key) for seed in range(5)]
    write_signatures(tmp_path / "one", found, key)
    write_signatures(tmp_path / "two", found[::-1], key)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert {tuple(row) for row in read_signatures(tmp_path / "one", key)} == {tuple(row) for row in found}
    write_signatures(tmp_path / "none", [], key)
    assert len(read_signatures(tmp_path / "none", key)) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 5) + b"[[[[[",
        struct.pack("<Q", 107)
        + b'{"__metadata__":{"format":"crossfed signatures 1"},"signatures":{"shape":[3,128]}}'.ljust(107),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, salt: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DatasetError, match="is not a file of `prepare --share-signatures`"):
        read_signatures(tmp_path / "file", read_salt(salt))


def test_a_salt_belongs_to_an_exchange_and_an_exchange_to_a_similarity(tmp_path: Path, tokenizer: Path, salt: Path):
    source = write_json_lines(tmp_path / "text.jsonl", [{"text": article(1)}])
    words = [
        "--input",
        str(source),
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(tmp_path / "out"),
        "--block-tokens",
        "8",
    ]
    share = ["--share-signatures", str(tmp_path / "shared")]
    for options, message in (
        (share, "exchanged with a salt"),
        (["--signature-salt", str(salt)], "exchanged with a salt"),
        ([*share, "--signature-salt", str(salt)], "expected the similarity"),
        (["--language", "Italian language"], "expected BCP 47 tags"),
    ):
        with pytest.raises(DatasetError, match=message):
            main([*words, *options])


def test_a_declared_language_is_recorded(tmp_path: Path, tokenizer: Path):
    found = made(tmp_path, tokenizer, [[article(seed) for seed in range(9)]], language="it, en").dataset.manifest
    assert found.language == "it, en" and numpy.array(found.splits["train"].document_tokens).min() > 0


def test_what_is_shared_of_large_files_is_what_is_shared_of_small_ones(
    tmp_path: Path, tokenizer: Path, salt: Path, monkeypatch: pytest.MonkeyPatch
):
    """Byte for byte: signatures on disk, or in memory; beside those of another facility."""
    texts = [article(seed) for seed in range(30)]
    texts += texts[:10]
    theirs, key = tmp_path / "theirs", read_salt(salt)
    write_signatures(theirs, [minhash_signature(text, key) for text in texts[5:9]], key)
    care = {"salt": salt, "near_duplicates": 0.8, "drop_signatures": [theirs]}
    for name, large in (("memory", 10**9), ("disk", 1)):
        monkeypatch.setattr(reading, "LARGE_BYTES", large)
        made(tmp_path / name, tokenizer, [texts], [article(99)], share_signatures=tmp_path / f"{name}.sig", **care)
    found = [(tmp_path / f"{name}.sig").read_bytes() for name in ("memory", "disk")]
    assert found[0] == found[1] and len(read_signatures(tmp_path / "disk.sig", key)) == 30 - 4 + 1


def test_a_file_sorted_in_parts_is_that_sorted_at_once(tmp_path: Path, salt: Path, monkeypatch: pytest.MonkeyPatch):
    key, draw = read_salt(salt), numpy.random.Generator(numpy.random.PCG64(0))
    rows = draw.integers(0, 50, (3000, 128), dtype=numpy.uint32)
    rows[::3, 0] = 7  # many begin alike
    write_signatures(tmp_path / "once", [rows], key)
    for size in (100, 1000, 2999):
        monkeypatch.setattr(shared_signatures, "PART_ROWS", size)
        monkeypatch.setattr(shared_signatures, "READ_ROWS", 64)
        write_signatures(tmp_path / "parts", numpy.array_split(rows, 7), key)
        assert (tmp_path / "parts").read_bytes() == (tmp_path / "once").read_bytes()
        assert (tmp_path / "parts").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
