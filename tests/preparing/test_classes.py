"""Laws of the classes of texts: one order at every facility and in the model's head, or a refusal before a job."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from coordinator.memory.figures import model_figures
from coordinator.preflight.check import check_alike
from coordinator.preflight.facility import _classes
from coordinator.preflight.probe_answer import DatasetAnswer
from facility.dataset import DatasetError, PreparedDataset
from facility.exchange.errors import InputError
from facility.prepare import main
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.sources import Fields
from facility.probe import dataset as probed
from facility.training.data.tasks import task_for
from tests.pico import pico_config
from tests.preflight.answers import dataset_answer
from tests.preparing.corpora import save_tokenizer, sentences, write_json_lines

ALL = ["north", "south", "east"]


def prepared(place: Path, labels: list[str], **changes: Any) -> PreparedDataset:
    """Forty labelled texts, with these labels in turn."""
    place.mkdir(parents=True)
    records = [{"text": text, "label": labels[n % len(labels)]} for n, text in enumerate(sentences(40))]
    values: dict[str, Any] = {
        "inputs": [str(write_json_lines(place / "train.jsonl", records))],
        "tokenizer": save_tokenizer(place / "tokenizer"),
        "out": place / "out",
        "block_tokens": 32,
        "task": "classification",
        "fields": Fields(label="label"),
        "validation_share": 0.2,
    }
    return prepare_dataset(Request(**(values | changes))).dataset


def test_named_classes_keep_their_order_and_may_lack_documents(tmp_path: Path):
    found = prepared(tmp_path / "two", ["south", "north"], classes=ALL)
    assert found.manifest.classes == ALL and {int(row[0]) for row in found.rows("train")} == {0, 1}
    labels = [json.loads(line)["label"] for line in (tmp_path / "two/train.jsonl").read_text().splitlines()]
    kept = [ALL.index(label) for label in labels]
    numbers = [int(row[0]) for split in ("train", "validation") for row in found.rows(split)]
    assert sorted(numbers) == sorted(kept)
    assert prepared(tmp_path / "by name", ["south", "north"]).manifest.classes == ["north", "south"]


def test_numbers_are_classes_in_the_order_of_their_values_and_what_only_looks_like_one_is_a_name(tmp_path: Path):
    assert prepared(tmp_path / "a", ["10", "9", "-1"]).manifest.classes == ["-1", "9", "10"]
    assert prepared(tmp_path / "b", ["10", "9", "--1"]).manifest.classes == ["--1", "10", "9"]


def declared(place: Path, labels: list[int], names: list[str]) -> Any:
    """Texts of `datasets` whose labels are numbers of named classes, saved in each form; one for each of the forms."""
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    texts = sentences(40)
    made = datasets.Dataset.from_dict(
        {"text": texts, "label": [labels[n % len(labels)] for n in range(len(texts))]}, features=features
    )
    made.save_to_disk(str(place / "saved"))
    made.to_parquet(str(place / "table.parquet"))
    return [place / "saved", place / "table.parquet", next((place / "saved").glob("*.arrow"))]


def test_numbers_of_declared_classes_become_their_names_in_the_declared_order(tmp_path: Path):
    """A facility with the same texts and the names in JSON lines has the same classes; one class may lack documents."""
    forms = declared(tmp_path, [1, 0], ["south", "north", "east"])
    for number, form in enumerate(forms):
        found = prepared(tmp_path / str(number), ["x"], inputs=[str(form)])
        assert found.manifest.classes == ["south", "north", "east"]
        twin = prepared(tmp_path / f"{number} lines", ["north", "south"], classes=["south", "north", "east"])
        for split in ("train", "validation"):
            assert (found.rows(split) == twin.rows(split)).all()
    beside = write_json_lines(
        tmp_path / "beside.jsonl", [{"text": f"{t} at last", "label": "east"} for t in sentences(9)]
    )
    mixed = prepared(tmp_path / "mixed", ["x"], inputs=[str(forms[0]), str(beside)])
    assert mixed.manifest.classes == ["east", "north", "south"]
    names = Fields(label="label", numbered=True)
    assert prepared(tmp_path / "n", ["x"], inputs=[str(forms[1])], fields=names).manifest.classes == ["0", "1"]


def test_a_row_without_one_of_the_declared_classes_is_refused(tmp_path: Path):
    for form in declared(tmp_path, [1, 0, -1], ["south", "north"]):
        with pytest.raises(
            DatasetError, match=r"row 3: the label is -1, expected 0 to 1.*\(south, north\).*leave such"
        ):
            prepared(tmp_path / f"of {form.name}", ["x"], inputs=[str(form)])


def test_documents_of_other_classes_and_doubled_names_are_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"labels 'west', which --classes does not name"):
        prepared(tmp_path / "one", [*ALL, "west"], classes=ALL)
    assert not (tmp_path / "one/out").exists()
    for classes in (["one"], ["one", "one"]):
        with pytest.raises(DatasetError, match="two classes or more, each once"):
            prepared(tmp_path / str(len(classes)), ALL, classes=classes)
    with pytest.raises(DatasetError, match="for classification only"):
        prepared(tmp_path / "text", ALL, classes=ALL, task="causal-lm", fields=Fields())
    with pytest.raises(SystemExit):
        main(["--task", "chat", "--classes", "a", "b", "--input", "x", "--out", "y", "--tokenizer", "t"])


def test_facilities_with_other_classes_of_texts_are_named(tmp_path: Path):
    """As many classes, under other names: each facility would train the other's outputs for its own."""
    for name, labels in (("a", ALL), ("b", ALL), ("c", ["up", "down", "left"])):
        prepared(tmp_path / name, labels)
    rows = check_alike({name: dataset_answer(probed(tmp_path / name / "out")) for name in "abc"})
    assert [row.subject for row in rows] == ["c"] and "classes" in rows[0].found


@pytest.mark.parametrize(
    ("head", "fits"),
    [(None, True), (["east", "north", "south"], True), (ALL, False), (["a", "b", "c"], False), (["a", "b"], False)],
)
def test_the_head_has_the_datasets_classes_or_check_and_trainer_say_that_it_has_not(
    tmp_path: Path, head: list[str] | None, fits: bool
):
    from transformers import AutoModelForSequenceClassification

    dataset = prepared(tmp_path / "data", ALL)  # by name: east, north, south
    names = {"num_labels": 3} if head is None else {"id2label": dict(enumerate(head)), "num_labels": len(head)}
    pad = {"pad_token_id": dataset.manifest.pad_token_id}
    AutoModelForSequenceClassification.from_config(pico_config(**names, **pad)).save_pretrained(tmp_path / "model")
    rows = _classes("far", dataset_answer(probed(dataset.directory)), model_figures(tmp_path / "model"))
    assert (rows == []) == fits
    config = AutoConfig.from_pretrained(tmp_path / "model")
    if fits:
        task_for(dataset, config)
        return
    assert rows[0].verdict == "fail" and "classes" in rows[0].found
    with pytest.raises(InputError, match="id2label" if len(head or []) == 3 else "the model's head has 2"):
        task_for(dataset, config)


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_a_head_of_another_problem_is_refused_by_check_and_trainer(tmp_path: Path, problem: str | None):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    dataset = prepared(tmp_path / "data", ALL)
    config = pico_config(num_labels=3, pad_token_id=dataset.manifest.pad_token_id, problem_type=problem)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    rows = _classes("far", dataset_answer(probed(dataset.directory)), model_figures(tmp_path / "model"))
    if problem in (None, "single_label_classification"):
        assert rows == []
        task_for(dataset, AutoConfig.from_pretrained(tmp_path / "model"))
        return
    assert rows[0].verdict == "fail" and problem in rows[0].found
    with pytest.raises(InputError, match=f"problem_type '{problem}'.*one class for each example"):
        task_for(dataset, AutoConfig.from_pretrained(tmp_path / "model"))


def test_a_facility_that_tells_no_digest_is_compared_by_the_number_of_its_classes(tmp_path: Path):
    """Its CrossFed is older."""
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_config(pico_config(num_labels=3)).save_pretrained(tmp_path / "model")
    figures = model_figures(tmp_path / "model")
    told = DatasetAnswer(classes=3, vocabulary_size=128)
    assert _classes("far", told, dataclasses.replace(figures, labels=ALL)) == []
    assert len(_classes("far", dataclasses.replace(told, classes=2), figures)) == 1
    assert _classes("far", dataclasses.replace(told, classes=0), figures) == []
