"""Law: a unit of document is all of a document and never part of another's; no more than the most pieces are used."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from facility.dataset import LOSS, REST, START, DatasetManifest, PreparedDataset, SplitEntry, open_dataset
from facility.exchange.errors import InputError
from facility.preparing.build import Request, prepare_dataset
from facility.training.data.tasks import IGNORED, CausalLM
from facility.training.privacy.rows import RowReader
from facility.training.privacy.units import Units, evaluated_units, marked_pieces, stream_pieces, units_of
from tests.preparing.corpora import save_tokenizer, sentences, write_json_lines
from tests.training.federation import write_dataset

L, S, R = LOSS, START, START | REST


def marked(tmp_path: Path, marks: list[list[int]], *, rests_marked: bool = True, **changes: object) -> PreparedDataset:
    """A dataset with these marks in both splits."""
    array = np.array(marks, dtype=np.uint8)
    (tmp_path / "d").mkdir()
    entry = SplitEntry(
        blocks=len(array),
        documents=1,
        empty_documents=0,
        tokens=array.size,
        tail_tokens=0,
        rests_marked=rests_marked,
        sha256="0" * 64,
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
    """The second document goes over three blocks and is cut from its own beginning; the fourth begins with a block."""
    marks = [[S | L, L, L, S | L], [R | L, L, L, L], [R | L, L, S | L, L], [S | L, L, S | L, L]]
    dataset = marked(tmp_path, marks)
    units = units_of(dataset, "train", "document", most=9)
    assert pieces(units) == [
        [[0, 0, 3]],
        [[0, 3, 7], [1, 3, 6]],
        [[2, 2, 4]],
        [[3, 0, 2]],
        [[3, 2, 4]],
    ]
    assert units.left_out == 0
    units = units_of(dataset, "train", "document", most=1)
    assert [one[0] for one in pieces(units)] == [[0, 0, 3], [0, 3, 7], [2, 2, 4], [3, 0, 2], [3, 2, 4]]
    assert units.left_out == 1


def test_a_document_is_read_on_in_the_next_block_and_its_first_token_there_is_predicted(tmp_path: Path):
    """Token i has the id i; the document is tokens 3 to 9 of blocks of 4."""
    dataset = marked(tmp_path, [[S | L, L, L, S | L], [R | L, L, L, L], [R | L, L, S | L, L]])
    units = units_of(dataset, "train", "document", most=9)
    (rows,) = RowReader(dataset, "train", units, CausalLM(), nn.Module(), most_rows=9).read([1])
    assert rows.records == 1 and rows.record.tolist() == [0, 0]
    assert rows.inputs["input_ids"].tolist() == [[3, 4, 5, 6], [7, 8, 9, 0]]
    assert rows.targets.tolist() == [[4, 5, 6, IGNORED], [8, 9, IGNORED, IGNORED]]


def prepared_units(place: Path, texts: list[str], tokenizer: Path, **changes: Any) -> list[Counter[Any]]:
    """What each unit of training and of validation is made of: tokens of its pieces."""
    place.mkdir()
    request = Request(
        inputs=[str(write_json_lines(place / "texts.jsonl", [{"text": one} for one in texts]))],
        tokenizer=tokenizer,
        out=place / "out",
        block_tokens=32,
        documents="separate",
    )
    dataset = prepare_dataset(dataclasses.replace(request, **changes)).dataset
    found = []
    for split in ("train", "validation"):
        units, tokens = units_of(dataset, split, "document", most=4), dataset.split(split).reshape(-1)
        cut = [[tokens[32 * b + f : 32 * b + e].tolist() for b, f, e in units.of(i)] for i in range(len(units))]
        found.append(Counter(map(str, cut)))
    return found


def test_a_document_less_leaves_every_other_unit_as_it_was(tmp_path: Path):
    """The definition of neighbours, on what preparation makes of texts: no other document is cut otherwise, held out
    or left out at the end, so that noise for one unit is enough."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    texts = sentences(120)
    whole = prepared_units(tmp_path / "whole", texts, tokenizer, validation_share=0.2)
    assert min(sum(split.values()) for split in whole) > 10
    for gone in (0, 57, 119):
        fewer = prepared_units(tmp_path / str(gone), texts[:gone] + texts[gone + 1 :], tokenizer, validation_share=0.2)
        assert sum(sum((a - b).values()) for a, b in zip(whole, fewer, strict=True)) == 1
        assert not any(b - a for a, b in zip(whole, fewer, strict=True))


def test_an_older_dataset_serves_as_before_and_is_made_again_where_that_is_asked_for(tmp_path: Path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    prepared_units(tmp_path / "a", sentences(60), tokenizer, validation_share=0.2)
    file = tmp_path / "a" / "out" / "dataset.json"
    made = json.loads(file.read_text())
    for split in made["splits"].values():
        del split["rests_marked"]
    file.write_text(json.dumps(made))
    request = Request(
        inputs=[str(tmp_path / "a" / "texts.jsonl")],
        tokenizer=tokenizer,
        out=tmp_path / "a" / "out",
        block_tokens=32,
        documents="separate",
        validation_share=0.2,
    )
    assert prepare_dataset(request).reused
    assert not prepare_dataset(dataclasses.replace(request, replace=True)).reused
    assert prepare_dataset(dataclasses.replace(request, replace=True)).reused


def test_a_stream_that_does_not_tell_rests_from_beginnings_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="did not mark whether a block begins with a document"):
        units_of(marked(tmp_path, [[S | L, L, L]], rests_marked=False), "train", "document", most=1)


def test_a_split_without_anything_to_predict_is_refused(tmp_path: Path):
    dataset = marked(tmp_path, [[S, 0, S, 0], [S | L, S | L, 0, 0]], task="chat")
    with pytest.raises(InputError, match="no document of the validation split has a token that bears loss"):
        units_of(dataset, "validation", "document", most=4)


def test_whole_documents_stay_apart_and_filling_is_no_unit(tmp_path: Path):
    dataset = marked(tmp_path, [[S | L, L, S | L, L], [S, L, S, 0], [S, 0, 0, S]], task="chat")
    assert pieces(units_of(dataset, "train", "document", most=4)) == [[[0, 0, 2]], [[0, 2, 4]], [[1, 0, 2]]]


def test_units_hold_every_token_of_every_document_exactly_once(tmp_path: Path):
    """Against the definition, on drawn streams; some tokens bear no loss."""
    draw = np.random.default_rng(0)
    for number in range(30):
        begins = draw.random(48) < 0.1
        begins[0] = True
        loss = draw.random(48) < 0.8
        marks = (begins * S | loss * L).reshape(6, 8)
        marks[:, 0] |= np.where(marks[:, 0] & S, 0, R)
        (tmp_path / str(number)).mkdir()
        units = units_of(marked(tmp_path / str(number), marks.tolist()), "train", "document", most=99)
        starts = [*np.flatnonzero(begins).tolist(), 48]
        expected = []
        for a, b in itertools.pairwise(starts):
            cut = [(one, min(one + 8, b)) for one in range(a, b, 8)]
            if told := [(one, end) for one, end in cut if loss[one + 1 : end].any()]:
                expected.append(told)
        assert [[(8 * row + a, 8 * row + b) for row, a, b in units.of(i)] for i in range(len(units))] == expected


def test_marks_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(1)
    marks = ((draw.random((11, 6)) < 0.1) * S | (draw.random((11, 6)) < 0.3) * L).tolist()
    dataset = marked(tmp_path, marks)
    whole, (stream, documents) = marked_pieces(dataset, "train"), stream_pieces(dataset, "train")
    assert 0 < stream[:, 3].sum() < len(stream)
    monkeypatch.setattr("facility.training.privacy.units.ROWS", 1)
    assert np.array_equal(marked_pieces(dataset, "train"), whole)
    again, numbers = stream_pieces(dataset, "train")
    assert np.array_equal(again, stream) and np.array_equal(numbers, documents)


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
