"""Laws of which documents are taken: nearly equal ones once, inputs in the proportions that were asked for."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from facility.dataset import DatasetError
from facility.prepare import main
from facility.preparing.build import Prepared, Request, prepare_dataset
from facility.preparing.mixing import input_shares, is_chosen
from facility.preparing.near_duplicates import NUMBERS, NearDuplicates, bands_of, minhash_signature, shingles
from facility.preparing.writing import quantiles
from tests.preparing.corpora import sentences, write_json_lines


def article(seed: int, words: int = 200) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=4)) for _ in range(words))


def edited(text: str, changes: int, seed: int = 0) -> str:
    """The text with so many of its words replaced."""
    draw, words = random.Random(seed), text.split()
    for place in draw.sample(range(len(words)), changes):
        words[place] = "xxxx"
    return " ".join(words)


def jaccard(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def test_a_signature_estimates_the_jaccard_index():
    texts = [article(1)] + [edited(article(1), changes, changes) for changes in (1, 3, 8, 20)]
    for one, other in itertools.combinations(texts, 2):
        found = float((minhash_signature(one) == minhash_signature(other)).mean())
        assert abs(found - jaccard(one, other)) < 4 * 0.5 / NUMBERS**0.5, (found, jaccard(one, other))
    assert (minhash_signature("A  b\nc d e F") == minhash_signature("a b c d e f")).all()
    assert not (minhash_signature(article(2)) == minhash_signature(article(3))).any()


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_near_duplicates_are_found_and_no_others(similarity: float):
    kept = NearDuplicates(similarity)
    originals = [article(seed) for seed in range(60)]
    assert not any(kept.repeats(text) for text in originals)
    wrong = 0
    for seed, text in enumerate(originals):
        other = edited(text, changes=seed % 6, seed=seed)
        true = jaccard(text, other)
        found = NearDuplicates(similarity)
        found.repeats(text)
        if abs(true - similarity) > 0.12:  # within three standard errors either answer is right
            wrong += found.repeats(other) != (true >= similarity)
    assert wrong <= 2  # a pair at the threshold is a candidate with probability 0.98
    bands, rows = bands_of(similarity)
    assert bands * rows <= NUMBERS and 1 - (1 - similarity**rows) ** bands >= 0.98


def test_similarity_one_leaves_out_exact_repetitions_alone():
    kept = NearDuplicates(1.0)
    text = article(1)
    assert not kept.repeats(text) and kept.repeats(" " + text.replace(" ", "  ")) and not kept.repeats(edited(text, 1))


def made(tmp_path: Path, tokenizer: Path, train: list[list[str]], validation: list[str] = (), **changes) -> Prepared:  # type: ignore[assignment]
    tmp_path.mkdir(exist_ok=True)
    inputs = [write_json_lines(tmp_path / f"{i}.jsonl", [{"text": t} for t in texts]) for i, texts in enumerate(train)]
    held = write_json_lines(tmp_path / "held.jsonl", [{"text": t} for t in validation or sentences(20, 4000)])
    request = Request(
        inputs=[str(one) for one in inputs],
        validation=[str(held)],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        block_tokens=32,
    )
    return prepare_dataset(dataclasses.replace(request, **changes))


def test_prepare_leaves_them_out_counts_them_and_cleans_the_validation_text(tmp_path: Path, tokenizer: Path):
    texts = [article(seed) for seed in range(10)]
    train = [*texts, edited(texts[3], 1), texts[4] + " "]
    validation = [edited(texts[5], 1), *(article(seed) for seed in range(50, 55))]
    plain = made(tmp_path / "a", tokenizer, [train], validation).dataset.manifest
    assert [plain.splits[name].duplicate_documents for name in plain.splits] == [0, 0]
    assert "near_duplicates" not in plain.settings
    found = made(tmp_path / "b", tokenizer, [train], validation, near_duplicates=0.8).dataset.manifest
    assert [found.splits[name].duplicate_documents for name in ("train", "validation")] == [2, 1]
    assert [found.splits[name].documents for name in ("train", "validation")] == [10, 5]
    assert found.settings["near_duplicates"] == 0.8
    clean = made(tmp_path / "c", tokenizer, [texts], validation[1:]).dataset.manifest
    assert clean.splits["train"].sha256 == found.splits["train"].sha256, "what is left is what a clean source gives"
    with pytest.raises(DatasetError, match="prepared otherwise.*settings"):
        made(tmp_path / "b", tokenizer, [train], validation, near_duplicates=0.9)


def test_shares_keep_the_proportions_and_repeat_nothing():
    assert input_shares([100, 300]) == [1, 1]
    for weights in ([1, 1], [3, 1], [0.2, 5.0]):
        sizes = [1000, 300]
        found = input_shares(sizes, weights=weights)
        read = [size * float(share) for size, share in zip(sizes, found, strict=True)]
        assert max(found) == 1 and read[0] / read[1] == pytest.approx(weights[0] / weights[1], rel=1e-5)
    tempered = input_shares([10_000, 100], temperature=2.0)
    assert float(tempered[0]) * 10_000 / 100 == pytest.approx((10_000 / 100) ** 0.5, rel=1e-5)
    for share in input_shares([7, 3, 11], weights=[1, 1, 1]):
        taken = [i for i in range(770) if is_chosen(i, share)]
        assert len(taken) == -(-770 * share.numerator // share.denominator) and taken[0] == 0
        assert max(b - a for a, b in itertools.pairwise(taken)) <= 1 / share + 1


def test_inputs_are_mixed_by_weight_and_the_order_stays(tmp_path: Path, tokenizer: Path):
    large, small = [article(seed, 30) for seed in range(80)], [article(seed, 30) for seed in range(100, 120)]
    mixed = made(tmp_path / "a", tokenizer, [large, small], weights=[1.0, 1.0]).dataset.manifest.splits["train"]
    assert mixed.documents == 20 + 20
    by_hand = made(tmp_path / "b", tokenizer, [large[::4], small]).dataset.manifest.splits["train"]
    assert mixed.sha256 == by_hand.sha256
    tempered = made(tmp_path / "c", tokenizer, [large, small], temperature=2.0).dataset.manifest.splits["train"]
    assert tempered.documents == 40 + 20
    whole = made(tmp_path / "d", tokenizer, [large, small]).dataset.manifest.splits["train"]
    assert whole.documents == 100


@pytest.mark.parametrize(
    "options, message",
    [
        (["--weights", "1"], "1 weights for 2 inputs"),
        (["--weights", "1", "0"], "numbers above 0"),
        (["--weights", "1", "nan"], "numbers above 0"),
        (["--temperature", "0.5"], "expected 1 or more"),
        (["--weights", "1", "2", "--temperature", "2"], "give one"),
        (["--near-duplicates", "1.5"], "at most 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_read(tmp_path: Path, options: list[str], message: str):
    words = ["--input", "a.jsonl", "b.jsonl", "--tokenizer", "t", "--out", str(tmp_path / "o"), "--block-tokens", "8"]
    with pytest.raises(DatasetError, match=message):
        main([*words, *options])


def test_lengths_are_told(tmp_path: Path, tokenizer: Path):
    assert quantiles({5: 1, 1: 1, 3: 1}) == [1, 3, 5, 5] and quantiles({}) == []
    split = made(tmp_path, tokenizer, [[article(seed, 10 + seed) for seed in range(21)]]).dataset.manifest.splits[
        "train"
    ]
    least, median, long, most = split.document_tokens
    assert 0 < least < median < long < most and split.tokens >= 21 * least
