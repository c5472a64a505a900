"""Law: of validation documents those are counted whose content is in training, and in little memory."""

from __future__ import annotations

import tracemalloc

import numpy
import pytest

from facility.preparing import overlap
from facility.preparing.overlap import ContentDigests, digest_of
from facility.preparing.sources import Document


def filled(train: numpy.ndarray, validation: numpy.ndarray) -> ContentDigests:
    digests = ContentDigests()
    digests._validation.frombytes(validation.tobytes())
    digests._train.write(train.tobytes())
    return digests


@pytest.mark.parametrize("piece", [8, 64, 8_000_000])
def test_counts_are_those_of_sets(monkeypatch: pytest.MonkeyPatch, piece: int):
    monkeypatch.setattr(overlap, "PIECE_BYTES", piece)
    draw = numpy.random.default_rng(0)
    for sizes in ((0, 5), (5, 0), (50, 30), (300, 200)):
        train, validation = (draw.integers(0, 100, size, dtype=numpy.uint64) for size in sizes)
        expected = sum(one in set(train.tolist()) for one in validation.tolist())
        assert filled(train, validation).overlapping() == expected


def test_memory_does_not_grow_with_the_training_documents():
    draw = numpy.random.default_rng(0)
    train = draw.integers(0, 2**63, 8_000_000, dtype=numpy.uint64)
    digests = filled(train, train[:100])
    del train
    tracemalloc.start()
    assert digests.overlapping() == 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 45_000_000  # 64 MB of training digests are read in pieces


def test_the_content_is_both_texts_each_by_itself_without_white_space_around_them():
    one = digest_of(Document(text="un gatto", pair="dorme", label="a", done=0.0))
    assert digest_of(Document(text=" un gatto\n", pair="dorme ", label="b", done=1.0)) == one
    assert digest_of(Document(text="un ", pair="gattodorme", done=0.0)) != one
    assert digest_of(Document(text="un gattodorme", done=0.0)) != one
