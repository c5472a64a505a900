"""Steps that let all facilities end together: laws over random speeds, queues and noise, and the way to the trainer."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.archive.journal import Entry
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.config.closing import EvenSettings
from coordinator.config.federation import read_federation
from coordinator.config.settings import CoordinatorSettings
from coordinator.engine.render import coordinator_settings, render
from coordinator.planning.pace import moving_times, queue_waits
from coordinator.steps.even import steps_ahead
from coordinator.steps.start import start
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.manifest import read_manifest
from facility.exchange.messages.steps import MOST, steps_asked
from facility.training.schedule import scheduled_step
from tests.aggregation.updates import write_update
from tests.federations import write_federation
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close

EVEN = EvenSettings(steps="auto")
BATCH, LENGTH = 8, 100
"""Sequences a step, tokens a sequence."""


@dataclasses.dataclass
class Speed:
    """What a facility needs: seconds a step, and for everything else in its job."""

    step: float
    fixed: float = 10.0

    def seconds(self, steps: int) -> float:
        return self.fixed + steps * self.step


def entry(number: int, speeds: dict[str, Speed], steps: dict[str, int], noise: float = 0.0) -> RoundFile:
    """A round in which every facility took so many steps at its speed, within a share `noise`."""
    drawn = random.Random(number)
    rows = []
    for name, count in steps.items():
        train = count * speeds[name].step * (1 + drawn.uniform(-noise, noise))
        tokens = count * BATCH * LENGTH
        rows.append(
            FacilityRow(
                round=number,
                facility=name,
                status="ok",
                steps=count,
                samples=count * BATCH,
                tokens=tokens,
                tokens_per_second=tokens / train,
                seconds=speeds[name].fixed + train,
            )
        )
    return RoundFile(round=number, facilities=rows, global_loss=None, decision="go on")


def lived(speeds: dict[str, Speed], nominal: dict[str, int], rounds: int, noise: float = 0.0) -> list[dict[str, int]]:
    """Steps of every round of a federation that evens them out."""
    history: list[RoundFile] = []
    asked = [nominal]
    for number in range(rounds):
        one = entry(number, speeds, asked[-1], noise)
        ahead = steps_ahead(EVEN, nominal, [*history, one], [])
        history.append(dataclasses.replace(one, next_steps=ahead.steps))
        asked.append(ahead.steps)
    return asked


NAMES = ("a", "b", "c", "d")
SPEEDS = st.fixed_dictionaries({name: st.builds(Speed, st.floats(0.1, 10), st.floats(0, 60)) for name in NAMES})


@given(speeds=SPEEDS, steps=st.integers(20, 200))
def test_rounds_get_no_longer_and_the_work_stays_within_bounds(speeds: dict[str, Speed], steps: int):
    nominal = dict.fromkeys(NAMES, steps)
    asked = lived(speeds, nominal, 2)[-1]
    for name in NAMES:
        least, most = EVEN.bounds(steps)
        assert least <= asked[name] <= most
    before = max(speed.seconds(steps) for speed in speeds.values())
    after = max(speeds[name].seconds(asked[name]) for name in NAMES)
    assert after <= before + max(speed.step for speed in speeds.values()), "no longer, but for one step's rounding"
    assert sum(asked.values()) >= sum(nominal.values()) or after >= before * 0.95, "as many samples in all"


@given(speeds=st.fixed_dictionaries({name: st.builds(Speed, st.floats(1, 3), st.just(10.0)) for name in NAMES}))
def test_where_no_bound_holds_all_end_together(speeds: dict[str, Speed]):
    nominal = dict.fromkeys(NAMES, 100)
    asked = lived(speeds, nominal, 1)[-1]
    ends = [speeds[name].seconds(asked[name]) for name in NAMES]
    if asked != nominal:  # it paid
        assert max(ends) - min(ends) <= 2 * max(speed.step for speed in speeds.values()) + 1e-6


@given(
    speeds=SPEEDS, plans=st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(20, 200), min_size=2), min_size=2)
)
def test_whatever_the_settings_become_a_round_has_the_samples_that_they_ask_for(
    speeds: dict[str, Speed], plans: list[dict[str, int]]
):
    """Once training.steps was doubled, or the fastest facility had left, rounds went on with half of it."""
    history: list[RoundFile] = []
    asked = plans[0]
    for number, nominal in enumerate(plans):
        one = entry(number, speeds, nominal | {name: steps for name, steps in asked.items() if name in nominal})
        asked = steps_ahead(EVEN, nominal, [*history, one], []).steps
        history.append(dataclasses.replace(one, next_steps=asked))
        assert sum(asked.values()) >= sum(nominal.values())
        for name, steps in nominal.items():
            assert EVEN.bounds(steps)[0] <= asked[name] <= EVEN.bounds(steps)[1]


def test_noise_moves_nothing_once_steps_are_even():
    speeds = {"a": Speed(1.0), "b": Speed(1.0), "c": Speed(1.0), "d": Speed(4.0)}
    asked = lived(speeds, dict.fromkeys(NAMES, 100), 30, noise=0.02)
    assert asked[1] != asked[0] and all(one == asked[1] for one in asked[2:])


def test_one_of_four_is_four_times_slower_and_the_round_takes_less_than_half():
    speeds = {"a": Speed(1.0), "b": Speed(1.0), "c": Speed(1.0), "d": Speed(4.0)}
    asked = lived(speeds, dict.fromkeys(NAMES, 100), 1)[-1]
    before = speeds["d"].seconds(100)
    after = max(speeds[name].seconds(asked[name]) for name in NAMES)
    assert sum(asked.values()) >= 400, "the same samples"
    assert after < 0.5 * before


def test_one_that_is_held_at_its_least_leaves_the_others_less_to_do():
    """d takes a quarter, though it would take fewer; the others did what it had left, and its quarter as well."""
    speeds = {"a": Speed(1.0), "b": Speed(1.0), "c": Speed(1.0), "d": Speed(40.0)}
    assert lived(speeds, dict.fromkeys(NAMES, 100), 1)[-1] == {"a": 125, "b": 125, "c": 125, "d": 25}


def test_who_is_new_does_what_the_settings_say():
    speeds = {"a": Speed(1.0), "b": Speed(4.0)}
    ahead = steps_ahead(EVEN, {"a": 100, "b": 100, "new": 70}, [entry(0, speeds, {"a": 100, "b": 100})], [])
    assert ahead.steps["new"] == 70 and ahead.steps["a"] > 100 > ahead.steps["b"]
    assert steps_ahead(EVEN, {"a": 100}, [entry(0, speeds, {"a": 100})], []).steps == {"a": 100}


def test_a_queue_is_time_too():
    """The same speed, but b waits 60 s in its queue and 20 s for its transfers."""
    entries = [
        Entry(time=0.0, kind="queued", facility="a"),
        Entry(time=0.0, kind="queued", facility="b"),
        Entry(time=1.0, kind="started", facility="a"),
        Entry(time=60.0, kind="started", facility="b"),
        Entry(time=61.0, kind="sent", facility="b", detail={"seconds": 15.0}),
        Entry(time=99.0, kind="transferred", facility="b", detail={"seconds": 5.0}),
    ]
    assert queue_waits(entries) == {"a": 1.0, "b": 60.0} and moving_times(entries) == {"b": 20.0}
    speeds = {"a": Speed(1.0), "b": Speed(1.0)}
    ahead = steps_ahead(EVEN, {"a": 100, "b": 100}, [entry(0, speeds, {"a": 100, "b": 100})], entries)
    assert ahead.steps["a"] - ahead.steps["b"] == pytest.approx(79, abs=1)


@given(round=st.integers(0, 50), steps=st.integers(1, 400), planned=st.integers(1, 400))
def test_a_round_passes_over_its_own_part_of_the_schedule(round: int, steps: int, planned: int):
    seen = [scheduled_step(round, done, steps=steps, planned=planned) for done in range(steps)]
    assert seen == sorted(seen) and seen[0] == round * planned and seen[-1] < (round + 1) * planned
    if steps == planned:
        assert seen == list(range(round * planned, (round + 1) * planned))


@pytest.mark.parametrize(
    "asked", [None, 5, [], {"a": 0}, {"a": True}, {"a": "7"}, {"a": MOST + 1}, {"b": 5}, {"a": 2.0}]
)
def test_a_facility_takes_no_number_that_cannot_be(tmp_path: Path, asked: Any):
    model = save_pico(tmp_path / "model")
    archive = Archive(tmp_path / "archive")
    start(archive, model, CoordinatorSettings(federation="f", rounds=1, facilities=["a"]))
    manifest = read_manifest(archive.model_for(0))
    extra = manifest.extra | ({} if asked is None else {"steps": asked})
    assert steps_asked(dataclasses.replace(manifest, extra=extra), "a") is None
    assert steps_asked(dataclasses.replace(manifest, extra={"steps": {"a": 7}}), "a") == 7


def test_the_model_of_the_next_round_carries_them(tmp_path: Path):
    archive = Archive(tmp_path / "archive")
    nominal = {"a": 4, "b": 4}
    settings = CoordinatorSettings(federation="f", rounds=3, facilities=["a", "b"], even=EVEN, steps=nominal)
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    assert steps_asked(read_manifest(model), "a") is None, "of the first round nothing is known"
    following, _, _ = close(archive, model, [write_update(tmp_path / name, model, name) for name in "ab"], settings)
    asked = archive.read_round(0).next_steps
    assert set(asked) == {"a", "b"}
    assert {name: steps_asked(read_manifest(following), name) for name in asked} == asked


def test_the_setting_is_rendered_with_its_bounds(tmp_path: Path):
    rounds = {"count": 3, "steps": "auto", "most_steps": 2}
    federation = read_federation(write_federation(tmp_path, ["a", "b"], rounds=rounds))
    rendered = coordinator_settings(federation)
    assert rendered["steps"] == {"a": 4, "b": 4} and rendered["even"]["most_steps"] == 2
    assert rendered["sequences"] == {"a": 4 * 4 * 2, "b": 4 * 4 * 2}, "the largest claim follows"
    text = render(federation)["workflow/facilities/a.json"]
    assert json.loads(text)["most_steps"] == 8, "what the facility agrees to"
    plain = coordinator_settings(read_federation(write_federation(tmp_path / "p", ["a", "b"])))
    assert "even" not in plain and "steps" not in plain
    with pytest.raises(ConfigurationError, match="least_steps"):
        read_federation(write_federation(tmp_path / "q", ["a"], rounds={"count": 3, "least_steps": 2}))
