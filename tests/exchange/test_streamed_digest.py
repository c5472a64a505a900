"""A digest of what goes by is that of the file, in whatever order, from whatever thread, and however much goes by."""

from __future__ import annotations

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from facility.exchange.checkpoints.writer import Planned, TensorWriter
from facility.exchange.files import streamed_digest
from facility.exchange.files.streamed_digest import StreamedDigest

CONTENT = random.Random(7).randbytes(100_003)


def pieces(draw: random.Random) -> list[tuple[int, bytes]]:
    cuts = sorted({0, len(CONTENT), *(draw.randrange(len(CONTENT)) for _ in range(40))})
    return [(start, CONTENT[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("waiting", [0, 5_000, 1 << 20], ids=["none-waits", "some-wait", "all-wait"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["nothing", "half", "everything"])
@pytest.mark.parametrize("seed", range(4))
def test_digest_is_that_of_the_file(tmp_path: Path, monkeypatch, waiting: int, share: float, seed: int):
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", waiting)
    draw = random.Random(seed)
    (tmp_path / "file").write_bytes(CONTENT)
    digest = StreamedDigest(tmp_path / "file", len(CONTENT))
    fed = [piece for piece in pieces(draw) if draw.random() < share]
    draw.shuffle(fed)
    with ThreadPoolExecutor(1 + seed % 3) as pool:
        list(pool.map(lambda piece: digest.feed(*piece), fed))
    assert digest.finish() == hashlib.sha256(CONTENT).hexdigest()


def test_what_went_by_in_order_is_not_read_again(tmp_path: Path):
    """There is no file at all: everything went by."""
    draw = random.Random(1)
    digest, fed = StreamedDigest(tmp_path / "absent", len(CONTENT)), pieces(draw)
    draw.shuffle(fed)
    for piece in fed:
        digest.feed(*piece)
    assert digest.finish() == hashlib.sha256(CONTENT).hexdigest()


def test_what_is_written_twice_counts_as_it_lies_there_at_last(tmp_path: Path):
    with TensorWriter(tmp_path, {"a": [Planned(name="w", dtype="U8", shape=(6,))]}, hashed=True) as writer:
        writer.write("w", 0, memoryview(b"abcdef"))
        writer.write("w", 2, memoryview(b"XY"))
        found = writer.digests()
    assert found == {"a": hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()}


def test_what_is_never_written_counts_as_it_lies_there(tmp_path: Path):
    layout = {"a": [Planned(name="w", dtype="U8", shape=(600,))], "b": [Planned(name="v", dtype="F32", shape=(2,))]}
    with TensorWriter(tmp_path, layout, hashed=True) as writer:
        writer.write("w", 300, memoryview(bytes(range(100))))
        found = writer.digests()
    assert found == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in "ab"}


@pytest.mark.parametrize("order", ["as they lie", "backwards"])
def test_what_no_reader_feeds_is_read_in_its_turn_and_nothing_else(tmp_path: Path, monkeypatch, order: str):
    """A header, a gap between tensors and a tail: without `expect` all that follows them would be read again."""
    (tmp_path / "file").write_bytes(CONTENT)
    ranges = [(17, 50_000), (50_000, 60_000), (60_100, 99_000)]
    read: list[tuple[int, int]] = []
    original = StreamedDigest._read

    def noted(self: StreamedDigest, start: int, end: int) -> int:
        read.append((start, end))
        return original(self, start, end)

    monkeypatch.setattr(StreamedDigest, "_read", noted)
    if order == "as they lie":
        monkeypatch.setattr(streamed_digest, "MOST_WAITING", 0)
    digest = StreamedDigest(tmp_path / "file", len(CONTENT))
    digest.expect(ranges)
    for start, end in ranges if order == "as they lie" else reversed(ranges):
        digest.feed(start, CONTENT[start:end])
    assert digest.finish() == hashlib.sha256(CONTENT).hexdigest()
    assert sorted(read) == [(0, 17), (60_000, 60_100), (99_000, len(CONTENT))]


def test_expecting_once_more_changes_nothing(tmp_path: Path):
    (tmp_path / "file").write_bytes(CONTENT)
    digest = StreamedDigest(tmp_path / "file", len(CONTENT))
    digest.expect([(10, 500)])
    digest.feed(10, CONTENT[10:500])
    digest.expect([(10, 500)])
    assert digest.finish() == hashlib.sha256(CONTENT).hexdigest()
