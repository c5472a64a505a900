"""A federation of two unlike facilities on real images: accuracy in table and report, personal statistics at home."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.model import convert_model
from coordinator.preflight.check import check, check_alike
from coordinator.report.make import data_of, make_report
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.preparing.images.build import ImageRequest, prepare_images
from facility.probe import dataset as probed
from tests.conftest import ROOT
from tests.engine.engines import streamflow
from tests.preflight.answers import dataset_answer
from tests.training.images import save_image_model, write_images

NAMES = ["north", "south"]
pytest.importorskip("sklearn")


def described(root: Path, model: str, **changes: Any) -> Path:
    told = {
        "name": "digits",
        "model": f"../{model}",
        "rounds": 2,
        "seed": 3,
        "archive": "../archive",
        "workdir": "../work",
        "training": {"steps": 4, "batch_sequences": 4, "learning_rate": 5e-3, "threads": 1},
        "facilities": [{"name": name, "dataset": f"../{name}"} for name in NAMES],
    } | changes
    path = root / "workflow" / "federation.yml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    write_rendered(read_federation(path))
    return path


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("family", "rounds", "steps", "rate"), [("vit", 12, 30, 5e-4), ("resnet", 4, 60, 3e-3)])
def test_federated_digits_are_told_apart_better_than_by_either_facility_alone(
    tmp_path: Path, family: str, rounds: int, steps: int, rate: float
):
    done = subprocess.run([sys.executable, str(ROOT / "examples/digits.py"), "--out", str(tmp_path / "drawn")])
    assert done.returncode == 0
    told = convert_model(str(tmp_path / "drawn" / family), tmp_path / "model", dtype="float32", revision="main")
    assert "loaded and evaluated" in told and "tensor has its place" in told
    for name in (*NAMES, "held-out"):
        folder = tmp_path / "drawn" / name
        inputs = [str(folder / "train" if name in NAMES else folder)]
        validation = [str(folder / "validation")] if name in NAMES else []
        out, classes = tmp_path / name, [str(n) for n in range(10)]
        prepare_images(
            ImageRequest(
                inputs=inputs,
                validation=validation,
                validation_share=0.95,
                processor=tmp_path / "model",
                out=out,
                classes=classes,
                allow_overlap=True,
            )
        )
    path = described(
        tmp_path,
        "model",
        rounds=rounds,
        training={"steps": steps, "batch_sequences": 32, "learning_rate": rate, "threads": 1},
        evaluation={
            "matrix": True,
            "alone": True,
            "held_out": {"facility": "north", "dataset": "../held-out", "name": "both"},
        },
    )
    assert [row for row in check(path) if row.verdict == "fail"] == []
    result = streamflow(path, tmp_path / "engine", timeout=1200)
    assert result.returncode == 0, result.stdout[-4000:]
    data = data_of(read_federation(path))
    found = {
        one["model"]: one["value"]
        for one in data["matrix"]["tasks"]
        if one["metric"] == "accuracy" and one["task"] == "held-out data"
    }
    print(family, {name: round(value, 4) for name, value in found.items()})
    assert found["global"] > max(found["north alone"], found["south alone"]) > found["initial"], found
    assert "accuracy" in make_report(path).read_text()
    assert {one["metric"] for one in data["tasks"]} == {"accuracy"}


@pytest.mark.slow
def test_personal_statistics_leave_no_facility_and_are_there_in_the_next_round(tmp_path: Path):
    save_image_model(tmp_path / "model", "resnet")
    for number, name in enumerate(NAMES):
        write_images(tmp_path / name, seed=number)
    path = described(tmp_path, "model", aggregation={"batch_norm": "personal"})
    result = streamflow(path, tmp_path / "engine", timeout=400)
    assert result.returncode == 0, result.stdout[-4000:]
    archive = Archive(read_federation(path).archive_path)
    first, last = (open_checkpoint(archive.model_for(number)) for number in (0, 2))
    for name in first.tensors:
        same = first.read(name).equal(last.read(name))
        assert same == name.endswith(("running_mean", "running_var", "num_batches_tracked")), name
    kept = [open_checkpoint(found.parent) for found in tmp_path.rglob("personal/round-1/model.safetensors")]
    assert len(kept) == 2
    name = next(one for one in kept[0].tensors if one.endswith("running_mean"))
    assert not kept[0].read(name).equal(kept[1].read(name))
    assert all(row["accuracy_returned"] is not None for row in summary(archive)["rounds"][1]["facilities"])


def test_facilities_whose_images_or_classes_differ_are_named(tmp_path: Path):
    for name, changes in (("a", {}), ("b", {}), ("c", {"classes": ["right", "middle", "left"]})):
        write_images(tmp_path / name, **changes)
    answers = {name: dataset_answer(probed(tmp_path / name)) for name in "abc"}
    (row,) = check_alike(answers)
    assert row.subject == "c" and "classes" in row.found and "--classes" in (row.fix or "")
    answers["c"] = replace(answers["a"], image_size="3 x 8 x 8", image_processor_sha256="x")
    assert [row.subject for row in check_alike(answers)] == ["c", "c"]
    assert answers["a"].documents == {"train": 40, "validation": 10}
