"""Laws of near duplicates found on disk: the choice of documents is that of memory, and memory stays bounded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest

from facility.dataset import DatasetError
from facility.preparing import duplicates_on_disk, reading
from facility.preparing.duplicates_on_disk import NearDuplicatesOnDisk, keys_of
from facility.preparing.near_duplicates import NearDuplicates, minhash_signature
from tests.preparing.corpora import save_tokenizer
from tests.preparing.test_data_care import article, edited, made


def corpus(seed: int, documents: int = 400) -> list[str]:
    """Few originals, each edited a little, much or not at all: chains, clusters and exact repetitions."""
    draw, texts = random.Random(seed), [article(seed * 1000 + number, 60) for number in range(12)]
    while len(texts) < documents:
        texts.append(edited(draw.choice(texts), draw.choice([0, 1, 2, 5, 30]), draw.random()))
    draw.shuffle(texts)
    return texts + [article(-seed, 3), "a", "a ", "A", article(-seed, 3)]


def in_memory(similarity: float, texts: list[str], elsewhere: list[str]) -> list[str | None]:
    found = NearDuplicates(similarity, elsewhere=[minhash_signature(text) for text in elsewhere])
    return [found.earlier(text) for text in texts]


def on_disk(similarity: float, texts: list[str], elsewhere: list[str], scratch: Path | None = None) -> list[str | None]:
    found = NearDuplicatesOnDisk(similarity, scratch, elsewhere=[minhash_signature(text) for text in elsewhere])
    for text in texts:
        found.add(text)
    found.decide()
    return [found.earlier() for _ in texts]


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_choice_is_that_of_memory(similarity: float, seed: int):
    texts = corpus(seed)
    expected = in_memory(similarity, texts, [])
    assert on_disk(similarity, texts, []) == expected
    assert 0 < expected.count("here") < len(texts)


def test_what_others_have_counts_first(monkeypatch: pytest.MonkeyPatch):
    """Signatures in small pieces, runs looked at in small chunks: nothing depends on either."""
    monkeypatch.setattr(duplicates_on_disk, "HELD", 7)
    monkeypatch.setattr(duplicates_on_disk, "CHUNK", 2)
    texts = corpus(3)
    elsewhere = [edited(text, 1) for text in texts[::40]] + texts[5:8]
    expected = in_memory(0.8, texts, elsewhere)
    assert on_disk(0.8, texts, elsewhere) == expected
    assert {None, "here", "elsewhere"} == set(expected)


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_document(count: int):
    assert on_disk(0.8, ["a"] * count, []) == [None] * count
    assert on_disk(0.8, ["a"] * count, ["a"]) == ["elsewhere"] * count


def test_equal_keys_of_other_bands_are_no_match(monkeypatch: pytest.MonkeyPatch):
    """Every key the same: every document is a candidate for every other, and the choice is the same."""
    monkeypatch.setattr(duplicates_on_disk, "keys_of", lambda found, bands, rows: keys_of(found, bands, rows) * 0)
    texts = corpus(4, 60)
    assert on_disk(0.3, texts, []) == in_memory(0.3, texts, [])


def test_keys_tell_bands_and_numbers_apart():
    one = numpy.zeros((1, 128), dtype="<u4")
    keys = keys_of(one, 18, 7)
    assert len(numpy.unique(keys)) == 18
    for place in (0, 6, 7, 125):
        other = one.copy()
        other[0, place] = 1
        assert (keys_of(other, 18, 7) != keys).sum() == 1


def test_prepare_takes_the_same_blocks_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = save_tokenizer(tmp_path / "bpe")
    train, validation = [corpus(5, 80), ["", *corpus(6, 80)]], [corpus(5, 30)[3], *corpus(7, 20)]
    choices = {"near_duplicates": 0.8, "weights": [2.0, 1.0]}
    memory = made(tmp_path / "memory", tokenizer, train, validation, **choices).dataset.manifest
    monkeypatch.setattr(reading, "LARGE_BYTES", 1)
    decided: list[NearDuplicatesOnDisk] = []
    decide = NearDuplicatesOnDisk.decide
    monkeypatch.setattr(NearDuplicatesOnDisk, "decide", lambda self: (decided.append(self), decide(self)))
    disk = made(tmp_path / "disk", tokenizer, train, validation, **choices).dataset.manifest
    assert len(decided) == 1 and disk.splits == memory.splits
    assert memory.splits["train"].duplicate_documents and memory.splits["validation"].duplicate_documents
    assert not list((tmp_path / "disk").glob(".*"))
    made(tmp_path / "few", tokenizer, train, validation, near_duplicates=0.8, train_samples=10)
    assert len(decided) == 1, "a cap needs the documents one after the other"


def test_sources_that_grow_are_refused():
    found = NearDuplicatesOnDisk(0.8, None)
    found.add("a")
    found.decide()
    found.earlier()
    with pytest.raises(DatasetError, match="grew while they were read"):
        found.earlier()
