"""With `drift_correction` all facilities follow the mean walk: one that lies of its own must not steer the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.mean_walk import FOLDER
from facility.exchange.messages import report
from facility.exchange.messages.drift import KEY, DriftReport
from facility.exchange.messages.manifest import read_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate

SHAPES = {"layers.0.weight": (40, 30), "b.bias": (7,)}


def walked(directory: Path, rates: float) -> Path:
    """An update whose report tells of these learning rates."""
    told = report.read_report(directory)
    drift = DriftReport(rates=rates, corrected=False, share=0.0, reason="")
    report.write(directory, dataclasses.replace(told, details={KEY: drift.to_json()}))
    write_manifest(directory, read_manifest(directory))
    return directory


def mean_of(tmp_path: Path, name: str, updates: dict[str, Path], base: Path) -> tuple[make.Tensors, dict[str, int]]:
    """The exact mean walk that an aggregation with the defaults makes, and whose it holds."""
    record = aggregate(
        base=base,
        updates=updates,
        out=tmp_path / f"{name}-model",
        settings=AggregationSettings(rule="mean"),
        state_out=tmp_path / name,
    )
    checkpoint = open_checkpoint(tmp_path / name / FOLDER)
    return {one: checkpoint.read(one) for one in checkpoint.tensors}, record.details["mean_walk"]["facilities"]


@pytest.mark.parametrize(
    ("times", "rates"), [(1.0, 0.006), (6.0, 0.1), (6.0, 0.006)], ids=["few rates", "a long step", "both"]
)
def test_a_walk_that_one_facility_made_long_is_not_in_the_mean(tmp_path: Path, times: float, rates: float):
    """Neither is refused for its step: that is clipped to the median norm, which the mean walk was not."""
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    updates = {}
    for number, facility in enumerate("xyz", start=1):
        moved = make.moved(start, number)
        if facility == "z":
            moved = {
                name: (start[name] + times * (value - start[name])).to(value.dtype) for name, value in moved.items()
            }
        made = make.update(tmp_path / facility, moved, base=base, facility=facility)
        updates[facility] = walked(made, rates if facility == "z" else 0.1)
    mean, whose = mean_of(tmp_path, "all", updates, base)
    assert whose == {"x": 0, "y": 0}
    honest, _ = mean_of(tmp_path, "honest", {name: updates[name] for name in "xy"}, base)
    assert all(torch.allclose(mean[name], honest[name], rtol=1e-5, atol=1e-7) for name in honest)
