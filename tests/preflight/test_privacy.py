"""`crossfed check` says before the run what a privacy budget buys, or why it cannot be kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.privacy import check_differential_privacy, check_secure_aggregation
from coordinator.preflight.row import Row
from facility.dataset import LOSS, START, open_dataset
from facility.exchange.errors import InputError
from facility.exchange.messages.privacy import DifferentialSettings, sampling_rate
from facility.exchange.privacy.accounting import Releases, epsilon_of
from facility.probe import dataset as probe_dataset
from facility.probe import refused_units
from facility.training.privacy.units import check_unit
from tests.config.test_privacy import described, read
from tests.preflight.answers import dataset_answer
from tests.training.federation import write_dataset
from tests.training.privacy.test_units import marked as stream_of

TOLD = {
    "block_tokens": 32,
    "vocabulary_size": 32_000,
    "blocks": {"train": 4000, "validation": 2000},
    "documents": {},
    "classes": 0,
}
APART = TOLD | {"documents": {"train": 2000, "validation": 5000}}


def rows(tmp_path: Path, answer: dict[str, Any], **changes: Any) -> list[Row]:
    budget = ", ".join(f"{k}: {v}" for k, v in ({"epsilon": 4.0, "delta": 1e-5} | changes).items())
    path = tmp_path / "federation.yml"
    path.write_text(
        "name: f\nmodel: m\nrounds: 2\ntraining: {steps: 50, batch_sequences: 40}\n"
        f"privacy: {{differential: {{{budget}}}}}\nfacilities:\n  - {{name: a, dataset: d}}\n"
    )
    federation = read_federation(path)
    return check_differential_privacy(federation, federation.facilities[0], dataset_answer(answer))


def test_the_noise_that_is_told_keeps_the_budget(tmp_path: Path):
    (row,) = rows(tmp_path, APART)
    assert row.verdict == "ok" and "about 40 of 2,000 documents a step" in row.found
    noise = float(row.found.split("noise multiplier ")[1].split(",")[0])
    spent = epsilon_of([Releases(count=100, noise_multiplier=noise, sampling_rate=0.02)], 1e-5)
    assert spent == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    ("answer", "changes", "verdict", "words"),
    [
        (TOLD, {}, "fail", "joins documents"),
        (TOLD, {"unit": "block"}, "ok", "of 4,000 blocks"),
        (APART | {"hides_rests": True}, {}, "fail", "did not mark where a document goes on"),
        (APART | {"refused_units": {"document": "it holds preferences"}}, {}, "fail", "it holds preferences"),
        (TOLD | {"refused_units": {"document": "it joins"}}, {"unit": "block"}, "ok", "of 4,000 blocks"),
        (APART, {"delta": 0.01}, "fail", "more than one over the 2000 units of the dataset"),
        (APART | {"documents": {"train": 39, "validation": 20}}, {}, "fail", "the dataset has 39 units (documents)"),
        pytest.param(APART, {"epsilon": 12.0}, "warning", "epsilon 12", marks=pytest.mark.slow),
        (APART | {"documents": {"train": 2000, "validation": 20}}, {}, "warning", "losses get noise of"),
    ],
)
def test_what_is_wrong_or_weak_is_told(
    tmp_path: Path, answer: dict[str, Any], changes: dict[str, Any], verdict: str, words: str
):
    (row,) = rows(tmp_path, answer, **changes)
    assert row.verdict == verdict and words in row.found, row


@pytest.mark.parametrize("units", [150, 2100])
def test_the_delta_that_is_advised_is_taken(tmp_path: Path, units: int):
    """Rounded to the nearest digit it was refused again: 0.007 for 150 documents, and 0.0067 by the job."""
    answer = APART | {"documents": {"train": units, "validation": 20}}
    (refused,) = rows(tmp_path, answer, delta=0.01)
    delta = float(refused.found.rpartition(" ")[2])
    assert refused.verdict == "fail" and 0.9 / units < delta <= 1 / units
    settings = DifferentialSettings(epsilon=4.0, delta=0.01)
    with pytest.raises(InputError, match=f"expected at most {delta:g}$"):
        sampling_rate(40, units, settings)
    assert sampling_rate(40, units, dataclasses.replace(settings, delta=delta)) == 40 / units


def test_what_masks_will_show_is_told_beside_the_noise(tmp_path: Path):
    content = described()
    (row,) = check_secure_aggregation(read(tmp_path, content))
    assert row.verdict == "ok" and "learns sums of 3 or more of 3 updates, unmasked by 2 answers" in row.found
    assert "second moments are shared, of which it learns the same sums" in row.found
    content["privacy"] |= {"differential": {"epsilon": 4.0, "delta": 1e-6}}
    (row,) = check_secure_aggregation(read(tmp_path, content))
    assert "noised at their facility before they are masked" in row.found
    del content["privacy"]
    assert check_secure_aggregation(read(tmp_path, content)) == []


@pytest.mark.parametrize("marked", [True, False])
def test_the_probe_tells_of_a_dataset_whose_documents_are_not_known(tmp_path: Path, marked: bool):
    dataset = stream_of(tmp_path, [[START | LOSS, LOSS]], rests_marked=marked)
    (dataset.directory / "dataset.json").write_text(json.dumps(dataclasses.asdict(dataset.manifest)))
    assert probe_dataset(dataset.directory).get("hides_rests", False) is not marked


def test_the_probe_tells_what_the_check_needs(tmp_path: Path):
    told = probe_dataset(write_dataset(tmp_path / "d"))
    assert (told["blocks"], told["documents"], told["classes"]) == ({"train": 40, "validation": 10}, {}, 0)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, {"document": "joins documents"}),
        ({"task": "preference"}, {"document": "holds preferences", "block": "holds preferences"}),
        ({"documents": "separate"}, {"block": "keeps documents apart", "document": "did not mark whether a block"}),
        ({"task": "classification"}, {}),
    ],
)
def test_the_probe_tells_what_a_job_would_refuse_of_units(
    tmp_path: Path, changes: dict[str, Any], refused: dict[str, str]
):
    prepared = open_dataset(write_dataset(tmp_path / "d"))
    assert probe_dataset(prepared.directory)["refused_units"] == refused_units(prepared)
    prepared = dataclasses.replace(prepared, manifest=dataclasses.replace(prepared.manifest, **changes))
    told = refused_units(prepared)
    assert told.keys() == refused.keys()
    for unit, words in refused.items():
        assert words in told[unit]
        with pytest.raises(InputError, match=words):
            check_unit(prepared, unit)  # type: ignore[arg-type]
    answer = dataset_answer(TOLD | {"refused_units": told, "separate": True})
    assert answer.refused_units == told and answer.separate
