"""Work per round: optimal in whole steps, all end together."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest

from coordinator import plan as command
from coordinator.planning.budget import FacilityPace, budget_from_json, plan_budget, plan_within
from coordinator.planning.chain import Infeasible
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import Plan, write_plan


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
    wanted = float(rng.integers(1, 60))  # 24 to 72 can be had

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
        with pytest.raises(Infeasible, match="short by"):
            plan_budget(facilities, wanted)
        return
    found = plan_budget(facilities, wanted)
    assert found.round_seconds == pytest.approx(best)
    assert found.samples >= wanted


@pytest.mark.parametrize("seed", range(40))
def test_within_bounds_the_round_is_no_longer_than_brute_force_and_does_no_more_than_is_asked(seed):
    """One that was raised to its least left the others with as much to do as before: more than was asked for."""
    rng = np.random.default_rng(seed)
    facilities = [
        FacilityPace(
            name=str(n),
            seconds_per_step=float(rng.choice([1, 2, 9])),
            samples_per_step=float(rng.integers(1, 4)),
            queue_seconds=float(rng.integers(0, 30)),
        )
        for n in range(3)
    ]
    bounds = {f.name: (int(rng.integers(1, 5)), int(rng.integers(5, 9))) for f in facilities}
    paces = {f.name: f.samples_per_step for f in facilities}
    wanted = float(rng.integers(3, 1 + sum(bounds[name][1] * pace for name, pace in paces.items())))
    every = itertools.product(*(range(bounds[f.name][0], bounds[f.name][1] + 1) for f in facilities))
    best = min(
        max(f.end(n) for f, n in zip(facilities, steps, strict=True))
        for steps in every
        if sum(n * f.samples_per_step for f, n in zip(facilities, steps, strict=True)) >= wanted
    )
    found = plan_within(facilities, bounds, wanted)
    assert found.round_seconds == pytest.approx(best) and found.samples >= wanted
    assert all(bounds[name][0] <= steps <= bounds[name][1] for name, steps in found.steps.items())
    above = [paces[name] for name, steps in found.steps.items() if steps > bounds[name][0]]
    assert found.samples - wanted < min(above, default=np.inf), "none of these steps can be left out"


def test_more_than_bounds_allow_is_refused_and_all_that_they_allow_is_not():
    paces = [FacilityPace(name=name, seconds_per_step=1.0, samples_per_step=0.1) for name in "abc"]
    bounds = dict.fromkeys("abc", (1, 7))
    assert plan_within(paces, bounds, sum(7 * pace.samples_per_step for pace in paces)).steps == dict.fromkeys("abc", 7)
    with pytest.raises(Infeasible, match="short by"):
        plan_within(paces, bounds, 2.2)


def test_what_bounds_allow_is_told_of_all_facilities_and_where_none_has_any_choice():
    """It was told of what they may do beyond their least, and without a choice that there are no facilities."""
    paces = [FacilityPace(name=name, seconds_per_step=1, samples_per_step=2) for name in "ab"]
    for bounds in ({"a": (3, 5), "b": (4, 7)}, {"a": (5, 5), "b": (7, 7)}):
        with pytest.raises(
            Infeasible, match=r"at most 24 samples in a round \(rounds.most_steps\), 30 are asked for: sh"
        ):
            plan_within(paces, bounds, 30)


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
        stages=1,
        replicas=2,
        grid=((0, 1),),
        stage_units=((0, 3),),
        micro_batches=(3, 5),
        micro_batch_samples=2,
        predicted_seconds=4.0,
    )
    write_plan(tmp_path / "plan.json", plan)
    file = tmp_path / "round.json"
    file.write_text(json.dumps({"facilities": [{"name": "a", "plan": "plan.json"}], "round_samples": 160}))
    found = budget_from_json(json.loads(file.read_text()), file=file)
    assert found.steps == {"a": 10} and found.round_seconds == pytest.approx(40)


def ran_federation(folder, steps=(20, 20)):
    """A federation.yml and an archive of three rounds: `a` is four times as fast as `b`; the first is slow at both."""
    from coordinator.archive.rounds import FacilityRow, RoundFile
    from facility.exchange.files.durable import write_json

    file = folder / "federation.yml"
    rows = "".join(
        f"  - {{name: {n}, dataset: /d, training: {{steps: {s}}}}}\n" for n, s in zip("ab", steps, strict=True)
    )
    file.write_text(f"name: f\nmodel: m\nrounds: 9\narchive: archive\nfacilities:\n{rows}")
    for number in range(3):
        found = [
            FacilityRow(
                round=number,
                facility=name,
                status="ok",
                tokens=20 * 8 * 16,
                samples=160,
                steps=20,
                seconds=10 + 20 * pace * (3 if number == 0 else 1),
                tokens_per_second=20 * 8 * 16 / (20 * pace * (3 if number == 0 else 1)),
            )
            for name, pace in (("a", 1.0), ("b", 4.0))
        ]
        place = folder / "archive" / f"round-{number:04d}"
        place.mkdir(parents=True)
        write_json(
            place / "round.json", asdict(RoundFile(round=number, facilities=found, global_loss=1.0, decision="go on"))
        )
    return file


def test_the_work_of_a_federation_from_its_own_rounds(tmp_path):
    from coordinator.config.federation import read_federation
    from coordinator.planning.work import plan_work

    federation = read_federation(ran_federation(tmp_path))
    found = plan_work(federation)
    assert found.steps == {"a": 32, "b": 8} and found.round_seconds == pytest.approx(42)
    assert found.reasons[0].startswith("moved") and "a: 32, b: 8" in found.reasons[-1]
    waiting = plan_work(federation, queues={"a": 30.0})
    assert waiting.end_seconds["a"] - waiting.end_seconds["b"] < 4 and waiting.steps["a"] < 32
    with pytest.raises(ConfigurationError, match="facilities are a, b"):
        plan_work(federation, queues={"c": 1.0})


def test_the_start_of_a_job_is_part_of_its_round():
    """Of a job of 42 s on two nodes the trainer counts 30, of which 20 are steps."""
    from coordinator.archive.rounds import FacilityRow
    from coordinator.planning.pace import pace_of

    row = FacilityRow(
        round=0, facility="a", status="ok", tokens=100, samples=10, steps=10, seconds=30.0, tokens_per_second=5.0
    )
    assert pace_of("a", [row]).end(10) == 30.0, "of the job nothing is known"
    assert pace_of("a", [dataclasses.replace(row, usage={"node_seconds": 84.0, "nodes": 2})]).end(10) == 42.0


def test_by_hand_the_bounds_hold_that_rounds_have(tmp_path):
    """`b`, four times slower, takes a half of its 20 steps at the least, and the others what that leaves of 40."""
    from coordinator.config.federation import read_federation
    from coordinator.planning.work import plan_work

    file = ran_federation(tmp_path)
    file.write_text(file.read_text().replace("rounds: 9", "rounds: {count: 9, steps: auto, least_steps: 0.5}"))
    found = plan_work(read_federation(file))
    assert found.steps == {"a": 30, "b": 10} and found.reasons[0].startswith("moved")
    assert "b takes its least, 10 steps" in found.reasons


def test_steps_in_use_stay_unless_the_round_gets_shorter_by_the_stated_share(tmp_path):
    from coordinator.config.federation import read_federation
    from coordinator.planning.work import plan_work

    federation = read_federation(ran_federation(tmp_path, steps=(33, 8)))
    kept = plan_work(federation, gain=0.05)
    assert kept.steps == {"a": 33, "b": 8} and kept.reasons == (kept.reasons[0],) and kept.reasons[0].startswith("kept")
    assert plan_work(federation, gain=0.0).reasons[0].startswith("moved")


def test_crossfed_plan_takes_a_federation(tmp_path):
    from typer.testing import CliRunner

    from coordinator.cli import app

    file, out = ran_federation(tmp_path), tmp_path / "work.json"
    ran = CliRunner().invoke(app, ["plan", str(file), "--out", str(out), "--queue", "b=5"])
    assert ran.exit_code == 0, ran.output
    assert "ends after s" in ran.output and json.loads(out.read_text())["steps"]["b"] < 8
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(ConfigurationError, match="run a round first"):
        command.main(["--problem", str(file), "--out", str(out)])


def test_samples_beyond_whole_numbers_of_a_float_end():
    """A step less leaves a sum of 1e300 as it is: taking steps back one by one would never end."""
    pace = FacilityPace(name="a", seconds_per_step=1.0, samples_per_step=4.0)
    assert plan_budget([pace], 1e300).samples == pytest.approx(1e300)
