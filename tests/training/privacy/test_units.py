"""Law: a unit of document is all of a document and never part of another's; no more than the most pieces are used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from facility.dataset import LOSS, START, DatasetManifest, PreparedDataset, SplitEntry, open_dataset
from facility.exchange.errors import InputError
from facility.training.privacy.units import Units, evaluated_units, grouped, marked_pieces, units_of
from tests.training.federation import write_dataset

L, S = LOSS, START


def marked(tmp_path: Path, marks: list[list[int]], **changes: object) -> PreparedDataset:
    """A dataset with these marks in both splits."""
    array = np.array(marks, dtype=np.uint8)
    (tmp_path / "d").mkdir()
    entry = SplitEntry(
        blocks=len(array), documents=1, empty_documents=0, tokens=array.size, tail_tokens=0, sha256="0" * 64
    )
    for split in ("train", "validation"):
        np.save(tmp_path / "d" / f"{split}.npy", np.arange(array.size, dtype=np.int32).reshape(array.shape))
        np.save(tmp_path / "d" / f"{split}.marks.npy", array)
    manifest = DatasetManifest(
        **{
            "task": "causal-lm",
            "block_tokens": array.shape[1],
            "vocabulary_size": 1000,
            "tokenizer_sha256": "0" * 64,
            "template": "{text}",
            "documents": "separate",
            "splits": {"train": entry, "validation": entry},
            "sources": [],
        }
        | changes  # type: ignore[arg-type]
    )
    return PreparedDataset(directory=tmp_path / "d", manifest=manifest)


def pieces(units: Units) -> list[list[list[int]]]:
    return [units.of(i).tolist() for i in range(len(units))]


def test_documents_of_a_stream_are_put_together_across_blocks(tmp_path: Path):
    """The second document goes over three blocks; the last begins where a block does, which nobody can tell."""
    dataset = marked(tmp_path, [[S | L, L, L, S | L], [S | L, L, L, L], [S | L, L, S | L, L], [S | L, L, S | L, L]])
    units = units_of(dataset, "train", "document", most=9)
    assert pieces(units) == [
        [[0, 0, 3]],
        [[1, 0, 4], [2, 0, 2]],  # its first token alone, at the end of block 0, predicts nothing
        [[2, 2, 4], [3, 0, 2]],
        [[3, 2, 4]],
    ]
    assert units.left_out == 0
    units = units_of(dataset, "train", "document", most=1)
    assert [one[0] for one in pieces(units)] == [[0, 0, 3], [1, 0, 4], [2, 2, 4], [3, 2, 4]]
    assert units.left_out == 2


def test_a_split_without_anything_to_predict_is_refused(tmp_path: Path):
    dataset = marked(tmp_path, [[S, 0, S, 0], [S | L, S | L, 0, 0]], task="chat")
    with pytest.raises(InputError, match="no document of the validation split has a token that bears loss"):
        units_of(dataset, "validation", "document", most=4)


def test_whole_documents_stay_apart_and_filling_is_no_unit(tmp_path: Path):
    dataset = marked(tmp_path, [[S | L, L, S | L, L], [S, L, S, 0], [S, 0, 0, S]], task="chat")
    assert pieces(units_of(dataset, "train", "document", most=4)) == [[[0, 0, 2]], [[0, 2, 4]], [[1, 0, 2]]]


def test_units_hold_every_token_that_bears_loss_exactly_once():
    """Against the definition, on drawn pieces."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        marks = (draw.random((6, 8)) < 0.3) * S | L
        marks[:, 0] |= S
        found = []
        for row, line in enumerate(marks):
            starts = [*np.flatnonzero(line & S), 8]
            found += [[row, a, b, int(b - a > 1)] for a, b in zip(starts, starts[1:], strict=False)]
        units = grouped(np.array(found), continues=True, most=99)
        held = sorted(map(tuple, units.pieces.tolist()))
        assert held == sorted(tuple(one[:3]) for one in found if one[3])
        assert units.offsets[-1] == len(held) and np.all(np.diff(units.offsets) > 0)
        for i in range(len(units)):
            first, *later = units.of(i).tolist()
            assert all(first_token == 0 for _, first_token, _ in later)


def test_marks_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(1)
    marks = ((draw.random((11, 6)) < 0.4) * S | L).tolist()
    dataset = marked(tmp_path, marks)
    whole = marked_pieces(dataset, "train")
    monkeypatch.setattr("facility.training.privacy.units.ROWS", 3)
    assert np.array_equal(marked_pieces(dataset, "train"), whole)


@pytest.mark.parametrize(
    ("changes", "unit", "words"),
    [
        ({"documents": "joined"}, "document", "--documents separate, or set"),
        ({"documents": "joined", "task": "chat"}, "document", "separate, or padded"),
        ({"task": "masked-lm", "documents": "joined"}, "document", "protects one block and not a whole document"),
        ({"task": "preference"}, "document", "reference figures"),
        ({}, "block", "protects more"),
    ],
)
def test_what_cannot_be_a_unit_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], unit: str, words: str
):
    with pytest.raises(InputError, match=words):
        units_of(marked(tmp_path, [[S | L, L]], **changes), "train", unit, most=1)  # type: ignore[arg-type]


def test_documents_in_both_splits_are_refused(tmp_path: Path):
    dataset = open_dataset(write_dataset(tmp_path / "d"))
    entry = dataclasses.replace(dataset.manifest.splits["validation"], overlapping_documents=2)
    manifest = dataclasses.replace(dataset.manifest, splits=dataset.manifest.splits | {"validation": entry})
    with pytest.raises(InputError, match="2 documents in training and in validation"):
        units_of(dataclasses.replace(dataset, manifest=manifest), "train", "block", most=1)


@pytest.mark.parametrize("most", [0, 1, 3, 7, 20])
def test_a_unit_less_changes_at_most_one_of_those_evaluated(most: int):
    """Neighbouring datasets differ in one unit, and the noise of the validation loss is that of one."""
    for count in range(2, 12):
        units = list(range(count))
        evaluated = {units[i] for i in evaluated_units(count, most)}
        assert len(evaluated) == min(count, most or count)
        for gone in units:
            fewer = [unit for unit in units if unit != gone]
            others = {fewer[i] for i in evaluated_units(count - 1, most)}
            assert evaluated - others <= {gone} and len(others - evaluated) <= 1
