"""Law: the first adapters of a federation are averaged by what facilities moved, not by what all of them began with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.aggregate import main
from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from facility.exchange.checkpoints.begun_adapters import begun_factor
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_lora import LAYER, NAME, RANK, adapter_update

SEED = 7
SHAPES = {NAME.format("lora_A"): (RANK, LAYER[1]), NAME.format("lora_B"): (LAYER[0], RANK)}
BODY = {"layer.weight": torch.ones(LAYER, dtype=torch.bfloat16)}
BEGUN = {name: torch.from_numpy(begun_factor(SEED, name, shape)) for name, shape in SHAPES.items()}
RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "bulyan", "geometric_median", "ties", "dare")


def averaged(root: Path, held: make.Tensors, settings: AggregationSettings) -> tuple[make.Tensors, RoundRecord]:
    """Seven facilities' factors from `BEGUN`, of which the last goes a hundred times as far, the other way."""
    base = make.model(root / "m0", BODY | held)
    updates = []
    for i in range(7):
        step = {name: 0.01 + one for name, one in make.random_tensors(i, SHAPES, torch.float32, 0.002).items()}
        scale = -1.0 if i == 6 else 0.01
        moved = {name: BEGUN[name] + scale * one for name, one in step.items()}
        updates.append(adapter_update(root / f"u{i}", moved, base, f"f{i}"))
    record = aggregate(base=base, updates=updates, out=root / "m1", settings=settings, seed=SEED)
    return {name: one for name, one in make.read_all(root / "m1").items() if name in SHAPES}, record


@pytest.mark.parametrize(("rule", "lora"), [*((rule, "factors") for rule in RULES), ("mean", "product")])
def test_whether_the_model_holds_them_or_none_the_first_adapters_are_averaged_alike(
    tmp_path: Path, rule: str, lora: str
):
    settings = AggregationSettings(rule=rule, lora=lora, weights="equal")  # type: ignore[arg-type]
    drawn, record = averaged(tmp_path / "drawn", {}, settings)
    held, expected = averaged(tmp_path / "held", BEGUN, settings)
    for name in SHAPES:
        torch.testing.assert_close(drawn[name], held[name], rtol=0, atol=1e-7)
    found, outliers = ({*one.suspects, *one.quarantined} for one in (record, expected))
    assert found == outliers == {"f6"}, "it is unlike the others in its step"


def test_a_facility_that_goes_a_hundred_times_as_far_counts_as_one_in_the_first_round_too(tmp_path: Path):
    """Beside a factor A that all begin with, as long as ten thousand such steps, it was as long as the others."""
    settings = AggregationSettings(rule="mean", clip_ratio=1.0, screen=ScreenSettings(action="off"))
    _, record = averaged(tmp_path, {}, settings)
    assert record.details["clip_factors"]["f6"] == pytest.approx(0.01, rel=0.05)


def test_an_aggregation_by_hand_is_told_the_seed(tmp_path: Path):
    settings = AggregationSettings(rule="ties", weights="equal")
    expected, _ = averaged(tmp_path, {}, settings)
    updates = [part for i in range(7) for part in ("--update", str(tmp_path / f"u{i}"))]
    given = ["--base", str(tmp_path / "m0"), "--rule", "ties", "--weights", "equal", "--seed", str(SEED)]
    assert main([*given, *updates, "--out", str(tmp_path / "by-hand")]) == 0
    found = make.read_all(tmp_path / "by-hand")
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
