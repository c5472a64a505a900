"""The mean of the last models: what it is, when it becomes the final model, and what a reader is told of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.archive.averaged import MEAN_OF, read_averaged
from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.comparison.account import Account
from coordinator.comparison.averaging import average
from coordinator.comparison.candidates import gains_of, is_better, last_models_sentence
from coordinator.comparison.matrix import matrix
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.federation import read_federation
from coordinator.steps.start import start
from facility.exchange.checkpoints.checkpoint import INDEX, SINGLE, open_checkpoint, save_tensors
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from tests.comparison.test_phases import NAMES, SETTINGS, World
from tests.federations import write_federation

LAST = dataclasses.replace(
    SETTINGS, rounds=3, comparison=ComparisonSettings(matrix=False, updates=False, last_models=2)
)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_tensors(folder, list(tensors.items()))
    (folder / "config.json").write_text("{}")
    write_manifest(folder, Manifest(kind="model", federation="f", round=3))
    return folder


def test_the_mean_is_that_of_float32_rounded_once_and_the_rest_is_the_last_models(tmp_path: Path):
    torch.manual_seed(0)
    every = [
        {
            "half": torch.randn(70_000).to(torch.bfloat16).reshape(700, 100),
            "whole": torch.randn(5),
            "count": torch.tensor([number]),
            "one": torch.tensor(float(number)),
            "double": torch.randn(5, dtype=torch.float64),
        }
        for number in range(3)
    ]
    models = [saved(tmp_path / str(number), tensors) for number, tensors in enumerate(every)]
    average(models, tmp_path / "mean", [7, 8, 9])
    found = open_checkpoint(tmp_path / "mean")
    for name in ("half", "whole", "one"):
        wanted = torch.stack([one[name].float() for one in every]).mean(0).to(every[0][name].dtype)
        assert torch.equal(found.read(name), wanted), name
    wanted = torch.stack([one["double"] for one in every]).mean(0)
    torch.testing.assert_close(found.read("double"), wanted, rtol=1e-15, atol=1e-15)
    assert found.read("count").tolist() == [2]
    assert (tmp_path / "mean" / "config.json").exists()
    assert verify_manifest(tmp_path / "mean").extra[MEAN_OF] == [7, 8, 9]


def test_the_mean_of_models_whose_index_names_a_single_shard_is_a_checkpoint(tmp_path: Path):
    models = [saved(tmp_path / str(number), {"x": torch.full((3,), float(number))}) for number in range(2)]
    for model in models:
        shard = "model-00001-of-00001.safetensors"
        (model / SINGLE).rename(model / shard)
        (model / INDEX).write_text(json.dumps({"weight_map": {"x": shard}}))
        write_manifest(model, Manifest(kind="model", federation="f", round=3))
    average(models, tmp_path / "mean", [0, 1])
    assert open_checkpoint(tmp_path / "mean").read("x").tolist() == [0.5] * 3


def test_models_that_hold_other_tensors_have_no_mean(tmp_path: Path):
    models = [saved(tmp_path / "a", {"x": torch.ones(3)}), saved(tmp_path / "b", {"x": torch.ones(4)})]
    with pytest.raises(InputError, match="differ in tensors"):
        average(models, tmp_path / "mean", [0, 1])


@pytest.mark.parametrize(("loss", "chosen"), [(1.9, True), (2.1, False), (2.0, False)])
def test_the_mean_is_the_final_model_where_the_facilities_find_it_better(tmp_path: Path, loss: float, chosen: bool):
    world = World(tmp_path, LAST)
    world.losses = {"last.2": loss}
    while world.proceed:
        world.go_on()
        assert world.passes < 6
    assert world.seen == [(name, ["global", "last.2"]) for name in NAMES]
    assert not (world.archive.path / "comparison").exists()
    mean, told = read_averaged(world.archive), summary(world.archive)
    lines = matrix(world.archive, {}, NAMES)["summary"]
    assert len(lines) == 1 and f"{loss - 2:+.4f} nats" in lines[0]
    if not chosen:
        assert mean is None and told["model"].endswith("round-0002/model") and "the global one" in lines[0]
        return
    assert mean is not None and mean.rounds == [1, 2] and told["averaged"] == [1, 2]
    assert told["model"] == str(mean.model) and "it is the final model" in lines[0]
    parts = [open_checkpoint(world.archive.model_for(number)) for number in (2, 3)]
    final = open_checkpoint(mean.model)
    for name in final.tensors:
        wanted = torch.stack([part.read(name).float() for part in parts]).mean(0).to(final.read(name).dtype)
        assert torch.equal(final.read(name), wanted)
    assert read_manifest(mean.model).content_sha256 == mean.sha256


def test_another_round_makes_the_choice_void(tmp_path: Path):
    world = World(tmp_path, LAST)
    world.losses = {"last.2": 1.0}
    while world.proceed:
        world.go_on()
    assert read_averaged(world.archive) is not None
    world.settings = dataclasses.replace(LAST, rounds=4)
    world.model, world.number, world.proceed = start(world.archive, tmp_path / "model", world.settings)
    world.go_on()
    assert read_averaged(world.archive) is None
    while world.proceed:
        world.go_on()
    mean = read_averaged(world.archive)
    assert mean is not None and mean.rounds == [2, 3]


def test_a_candidate_of_a_comparison_that_was_stopped_is_made_anew_after_another_round(tmp_path: Path):
    """It lay there, as the mean of the rounds before: the facilities were asked about it, and it became the model."""
    world = World(tmp_path, LAST)
    world.losses = {"last.2": 1.0}
    stopped = world.archive.path / "comparison" / "last.2"
    while not stopped.is_dir():
        world.go_on()
    world.settings = dataclasses.replace(LAST, rounds=4)
    world.model, world.number, world.proceed = start(world.archive, tmp_path / "model", world.settings)
    while world.proceed:
        world.go_on()
    mean = read_averaged(world.archive)
    assert mean is not None and mean.rounds == [2, 3]
    newest = open_checkpoint(world.archive.model_for(4)), open_checkpoint(world.archive.model_for(3))
    name = next(iter(newest[0].tensors))
    wanted = torch.stack([one.read(name).float() for one in newest]).mean(0).to(newest[0].read(name).dtype)
    assert torch.equal(open_checkpoint(mean.model).read(name), wanted)


def test_models_that_were_removed_are_no_candidate_and_the_federation_ends(tmp_path: Path):
    world = World(tmp_path, dataclasses.replace(LAST, keep_rounds=1))
    while world.proceed:
        world.go_on()
        assert world.passes < 6
    assert not world.seen and read_averaged(world.archive) is None


def test_every_facility_counts_the_same_and_only_where_it_evaluated_both():
    def one(model: str, value: float, held_out: bool = False) -> dict[str, Any]:
        return {"model": model, "held_out": held_out, "loss": {"value": value}}

    figures = {
        "a": [one("global", 2.0), one("last.2", 1.5), one("last.2", 9.0, held_out=True)],
        "b": [one("global", 2.0), one("last.2", 2.1)],
        "c": [one("global", 2.0)],
    }
    assert gains_of("last.2", figures) == pytest.approx([0.5, -0.1])
    assert gains_of("last.2", {"c": figures["c"]}) == []


@pytest.mark.parametrize(
    ("gains", "better"),
    [([], False), ([0.1], True), ([0.1, 0.2], True), ([1e6, -0.1], False), ([1e6, -0.1, -0.1], False)]
    + [([0.1, 0.1, -0.05], True), ([0.1, 0.0, 0.0], False), ([-1e6, 0.1, 0.1], False)],
)
def test_no_single_facility_makes_the_mean_the_final_model(gains: list[float], better: bool):
    assert is_better(gains) == better


def test_where_one_facility_alone_finds_the_mean_better_the_reader_is_told():
    account = Account(after_round=2, gain=0.3)
    said = last_models_sentence(account, 2)
    assert "lower than" in said and "hangs on one facility's figures" in said


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"evaluation": {"last_models": 1}}, "expected 2 or more"),
        ({"evaluation": {"last_models": 9}, "rounds": 3}, "expected at most rounds, 3"),
        ({"evaluation": {"last_models": 4}, "rounds": 9}, "keeps the models of 3 rounds"),
        ({"evaluation": {"last_models": 2}, "rounds": 9, "aggregation": {"exclude": ["lm_head*"]}}, "last_models"),
    ],
)
def test_what_cannot_be_averaged_is_refused(changes: dict[str, Any], what: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=what):
        read_federation(write_federation(tmp_path, NAMES, **changes))


def test_an_empty_archive_has_no_averaged_model(tmp_path: Path):
    assert read_averaged(Archive(tmp_path / "none")) is None
