"""Work per round: optimal in whole steps, all end together."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from coordinator.planning.budget import FacilityPace, budget_from_json, plan_budget
from coordinator.planning.chain import Infeasible
from facility.exchange.errors import ConfigurationError
from facility.exchange.plan import Plan, write_plan


@pytest.mark.parametrize("seed", range(60))
def test_least_round_time_is_brute_force(seed):
    rng = np.random.default_rng(seed)
    facilities = [
        FacilityPace(
            name=str(n),
            seconds_per_step=float(rng.integers(1, 6)),
            samples_per_step=float(rng.integers(1, 4)),
            queue_seconds=float(rng.integers(0, 20)),
            fixed_seconds=float(rng.integers(0, 4)),
            minimum_steps=int(rng.integers(0, 3)),
            maximum_steps=8,
        )
        for n in range(3)
    ]
    wanted = float(rng.integers(1, 12))

    def allowed(f: FacilityPace) -> list[int]:
        return [n for n in range(9) if n == 0 or n >= f.minimum_steps]

    best = min(
        (
            max(f.end(n) for f, n in zip(facilities, steps, strict=True))
            for steps in itertools.product(*map(allowed, facilities))
            if sum(n * f.samples_per_step for f, n in zip(facilities, steps, strict=True)) >= wanted
        ),
        default=None,
    )
    if best is None:
        with pytest.raises(Infeasible):
            plan_budget(facilities, wanted)
        return
    found = plan_budget(facilities, wanted)
    assert found.round_seconds == pytest.approx(best)
    assert found.samples >= wanted


def test_facilities_end_together():
    """Twice as fast does twice the steps; an hour in the queue costs an hour of steps."""
    found = plan_budget(
        [
            FacilityPace(name="fast", seconds_per_step=1, samples_per_step=8),
            FacilityPace(name="slow", seconds_per_step=2, samples_per_step=8),
            FacilityPace(name="late", seconds_per_step=1, samples_per_step=8, queue_seconds=3600),
        ],
        samples=8 * 10_000,
    )
    assert found.steps["fast"] - found.steps["late"] == pytest.approx(3600, abs=1)
    assert found.steps["fast"] == pytest.approx(2 * found.steps["slow"], abs=2)
    assert max(found.end_seconds.values()) - min(found.end_seconds.values()) <= 2
    assert found.equal_steps_seconds > found.round_seconds


def test_a_facility_that_would_be_late_is_left_out_and_named():
    found = plan_budget(
        [
            FacilityPace(name="here", seconds_per_step=1, samples_per_step=1),
            FacilityPace(name="queued", seconds_per_step=1, samples_per_step=1, queue_seconds=1e6),
        ],
        samples=100,
    )
    assert found.steps == {"here": 100, "queued": 0}
    assert any(reason.startswith("queued is left out") for reason in found.reasons)


def test_bad_budgets(tmp_path):
    with pytest.raises(Infeasible, match="short by 5"):
        plan_budget([FacilityPace(name="a", seconds_per_step=1, samples_per_step=1, maximum_steps=5)], 10)
    with pytest.raises(ConfigurationError, match="seconds_per_step of facility 'a' is 0"):
        FacilityPace(name="a", seconds_per_step=0, samples_per_step=1)
    with pytest.raises(ConfigurationError, match="two facilities are called 'a'"):
        plan_budget([FacilityPace(name="a", seconds_per_step=1, samples_per_step=1)] * 2, 10)
    with pytest.raises(ConfigurationError, match="no facilities"):
        budget_from_json({"facilities": [], "round_samples": 1})
    with pytest.raises(ConfigurationError, match="round_samples is None"):
        budget_from_json({"facilities": []})


def test_a_plan_gives_the_pace(tmp_path):
    plan = Plan(
        stages=1, replicas=2, grid=((0, 1),), stage_units=((0, 3),), micro_batches=(3, 5), micro_batch_samples=2,
        predicted_seconds=4.0,
    )  # fmt: skip
    write_plan(tmp_path / "plan.json", plan)
    file = tmp_path / "round.json"
    file.write_text(json.dumps({"facilities": [{"name": "a", "plan": "plan.json"}], "round_samples": 160}))
    found = budget_from_json(json.loads(file.read_text()), file=file)
    assert found.steps == {"a": 10} and found.round_seconds == pytest.approx(40)
