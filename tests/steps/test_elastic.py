"""Steps that follow each job's own queue: laws over random queues and paces, and the way to the trainer."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.journal import Entry
from coordinator.archive.rounds import Archive
from coordinator.config.closing import EvenSettings
from coordinator.config.federation import read_federation
from coordinator.config.settings import ClaimSettings, CoordinatorSettings
from coordinator.planning.budget import FacilityPace
from coordinator.steps.aggregate import arguments_of, close_round, run_step
from coordinator.steps.elastic import Elastic, common_end, ends_ahead
from coordinator.steps.start import start
from facility.exchange.errors import ConfigurationError
from facility.exchange.files.links import link_tree
from facility.exchange.messages.manifest import read_manifest
from facility.exchange.messages.privacy import DifferentialSettings
from facility.exchange.messages.report import Seconds, read_report, write
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.steps import MOST, End, end_asked
from facility.rounds.steps import NAME, decide_steps, remember_beside, steps_of
from tests.aggregation.updates import write_update
from tests.federations import write_federation
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close, failure
from tests.steps.test_even import Speed, entry

ELASTIC = EvenSettings(steps="elastic")
WAITS = st.lists(st.floats(0, 500), min_size=1, max_size=8)


def facilities(paces: list[tuple[float, float, list[float]]], steps: int) -> list[Elastic]:
    least, most = ELASTIC.bounds(steps)
    return [
        Elastic(
            pace=FacilityPace(
                name=str(number), seconds_per_step=seconds, samples_per_step=8, fixed_seconds=fixed, minimum_steps=0
            ),
            waits=waits,
            least=least,
            most=most,
        )
        for number, (seconds, fixed, waits) in enumerate(paces)
    ]


def samples_until(one: Elastic, seconds: float) -> float:
    """Expected samples of a facility in a round that ends `seconds` after its model was made, wait by wait.

    Of a time for x steps whole ones are taken, x - 1/2 of them in the mean.
    """
    room = seconds - one.pace.fixed_seconds
    steps = (min(max((room - wait) / one.pace.seconds_per_step - 0.5, one.least), one.most) for wait in one.waits)
    return fmean(steps) * one.pace.samples_per_step


@given(
    paces=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 60), WAITS), min_size=2, max_size=5),
    steps=st.integers(4, 200),
)
def test_the_end_is_the_earliest_at_which_as_many_samples_are_expected(paces: Any, steps: int):
    found = facilities(paces, steps)
    wanted = 8 * steps * len(found)
    end = common_end(found, wanted)
    assert sum(samples_until(one, end) for one in found) == pytest.approx(wanted, rel=1e-6)
    assert sum(samples_until(one, end * 0.99) for one in found) < wanted, "an earlier end is not enough"


@given(seconds=st.floats(0.1, 10), wait=st.floats(0, 500), steps=st.integers(4, 200))
def test_where_no_queue_varies_everybody_takes_the_steps_of_the_settings(seconds: float, wait: float, steps: int):
    alike = facilities([(seconds, 10.0, [wait])] * 3, steps)
    end = common_end(alike, 8 * steps * 3)
    assert end == pytest.approx(10.0 + wait + (steps + 0.5) * seconds)
    told = End(time=end, seconds_per_step=seconds, beside=10.0, least=1, most=1000)
    for early in (-0.4, 0.0, 0.4):
        assert told.steps_from(wait - early * seconds) == steps, "a step is not lost by a second"


@pytest.mark.parametrize("nominal", [4, 10, 40])
def test_jobs_of_whole_steps_make_as_many_samples_as_are_asked_for(nominal: int):
    """Half a step of each was counted that no job took: a tenth of the work was missing in rounds of four steps."""
    draw, done, rounds = random.Random(nominal), 0.0, 100
    for _ in range(rounds):
        paces = [draw.uniform(0.5, 3.0) for _ in range(4)]
        queues = [[draw.lognormvariate(0, 1) * nominal for _ in range(8)] for _ in paces]
        found = facilities([(pace, 5.0, waits) for pace, waits in zip(paces, queues, strict=True)], nominal)
        end = common_end(found, 8 * nominal * len(found))
        for one in found:
            told = End(time=end, seconds_per_step=one.pace.seconds_per_step, beside=5.0, least=one.least, most=one.most)
            done += fmean(told.steps_from(wait) for wait in one.waits)
    assert done / (rounds * 4 * nominal) == pytest.approx(1.0, abs=0.01)


@given(
    time=st.floats(1, 1e11),
    pace=st.floats(1e-3, 1e4),
    bounds=st.tuples(st.integers(1, 500), st.integers(1, 500)).map(sorted),
    begins=st.floats(0, 1e11),
)
def test_a_job_takes_what_fits_until_the_end_within_its_bounds(time: float, pace: float, bounds: Any, begins: float):
    end = End(time=time, seconds_per_step=pace, beside=0.0, least=bounds[0], most=bounds[1])
    steps = end.steps_from(begins)
    assert bounds[0] <= steps <= bounds[1]
    if bounds[0] < steps:
        assert begins + steps * pace <= time * (1 + 1e-12), "it ends in time"
    if steps < bounds[1]:
        assert begins + (steps + 1) * pace > time * (1 - 1e-12), "and no step more would fit"


def test_times_of_the_past_say_when_the_next_round_ends():
    """Both train 100 s in 100 steps. Beside it a needed 10 and 90 s, b 50, and 2 s for the way back: as many samples
    are expected in rounds of 152 s, and half a step more since a job takes whole ones."""
    entries, history = [], []
    speeds = {"a": Speed(1.0), "b": Speed(1.0)}
    nominal = {"a": 100, "b": 100}
    for number, waits in enumerate([(0.0, 40.0), (80.0, 40.0)]):
        history.append(entry(number, speeds, nominal))
        for name, wait in zip("ab", waits, strict=True):
            began = 1000.0 * number
            came = Entry(
                time=began + wait + 112.0, kind="transferred", facility=name, round=number, detail={"seconds": 2.0}
            )
            entries += [Entry(time=began, kind="queued", facility=name, round=number), came]
    ends = ends_ahead(ELASTIC, nominal, history, entries)
    assert ends is not None and ends.seconds == pytest.approx(40 + 10 + 100 + 2 + 0.5)
    told = ends.by_facility(5000.0)
    assert told["a"] == {"time": 5150.5, "seconds_per_step": 1.0, "beside": 10.0, "least": 25, "most": 400}
    assert End(**told["a"]).steps_from(5000.0) == 140 and End(**told["a"]).steps_from(5080.0) == 60
    assert End(**told["a"]).steps_from(5000.0, beside=50.0) == 100, "the job knows better"
    assert ends_ahead(EvenSettings(steps="auto"), nominal, history, entries) is None
    assert ends_ahead(ELASTIC, nominal | {"new": 70}, history, entries).facilities.keys() == {"a", "b"}  # type: ignore[union-attr]
    assert ends_ahead(ELASTIC, {"a": 100}, history, entries) is None


def test_without_a_journal_of_jobs_the_rounds_say_what_goes_beside_training():
    """Rounds of 150 and 190 s, in which all train 100 s: 50 and 90 s go beside it, of which 2 s are the update's way.

    Of a round that was interrupted, and of an update that came late, the round's time says nothing.
    """
    speeds, nominal = {"a": Speed(1.0), "b": Speed(1.0)}, {"a": 100, "b": 100}
    rounds = [
        dataclasses.replace(entry(n, speeds, nominal), seconds=s) for n, s in enumerate((150.0, 0.0, 190.0, 500.0))
    ]
    rounds[3] = dataclasses.replace(
        rounds[3], facilities=[dataclasses.replace(row, staleness=1) for row in rounds[3].facilities]
    )
    moved = [Entry(time=5.0, kind="transferred", facility=name, round=0, detail={"seconds": 2.0}) for name in "ab"]
    for entries in ([], moved):
        ends = ends_ahead(ELASTIC, nominal, rounds, entries)
        assert ends is not None and ends.seconds == pytest.approx(70 + 100 + 0.5)


GOOD = {"time": 5000.0, "seconds_per_step": 2.0, "beside": 0.0, "least": 1, "most": 8}


@pytest.mark.parametrize(
    "told",
    [
        None,
        5,
        {},
        GOOD | {"time": float("nan")},
        GOOD | {"time": True},
        GOOD | {"seconds_per_step": 0},
        GOOD | {"beside": -1.0},
        GOOD | {"seconds_per_step": -1.0},
        GOOD | {"time": 10**400},
        GOOD | {"least": 0},
        GOOD | {"least": 9},
        GOOD | {"most": MOST + 1},
        GOOD | {"most": 11},
        GOOD | {"most": 7.0},
        GOOD | {"more": 1},
    ],
)
def test_a_facility_takes_no_end_that_cannot_be(tmp_path: Path, told: Any):
    model = save_pico(tmp_path / "model")
    archive = Archive(tmp_path / "archive")
    start(archive, model, CoordinatorSettings(federation="f", rounds=1, facilities=["a"]))
    manifest = read_manifest(archive.model_for(0))
    assert end_asked(dataclasses.replace(manifest, extra={"ends": {"a": told}}), "a", most=10) is None
    assert end_asked(dataclasses.replace(manifest, extra={"ends": {"a": GOOD}}), "a", most=10) == End(**GOOD)  # type: ignore[arg-type]
    assert end_asked(dataclasses.replace(manifest, extra={"ends": [GOOD]}), "a", most=10) is None


def test_a_round_that_goes_on_keeps_the_steps_with_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = Archive(tmp_path / "archive")
    start(archive, save_pico(tmp_path / "model"), CoordinatorSettings(federation="f", rounds=9, facilities=["a"]))
    plain = read_manifest(archive.model_for(0))
    received = dataclasses.replace(plain, extra=plain.extra | {"ends": {"a": GOOD}, "steps": {"a": 3}})
    settings = FacilitySettings(federation="f", facility="a", rounds=9, seed=1, most_steps=8)
    state, now = tmp_path / "state", [4990.0]
    monkeypatch.setattr("facility.rounds.steps.time.time", lambda: now[0])
    assert decide_steps(state, settings, received, 4) == 4990.0
    assert steps_of(state, settings, received, 4) == 5
    now[0] = 9999.0
    assert decide_steps(state, settings, received, 4) is None
    assert steps_of(state, settings, received, 4) == 5, "a requeue later, and every other task"
    other = dataclasses.replace(received, files={})
    assert other.content_sha256 != received.content_sha256
    for manifest, round in ((received, 5), (other, 4)):
        decide_steps(state, settings, manifest, round)
        assert steps_of(state, settings, manifest, round) == 1, "another round, another model"
    now[0] = 4990.0
    for seconds in (4.0, 2.0, 900.0):
        remember_beside(state, seconds)
    assert steps_of(state, settings, other, 4) == 1, "of the round at work nothing changes"
    assert decide_steps(state, settings, received, 6) == 4990.0
    assert steps_of(state, settings, received, 6) == 3, "10 s, of which 4 usually go beside training"
    (state / NAME).write_text("{")
    assert steps_of(state, settings, received, 4) is None, "then the settings' own"
    careful = dataclasses.replace(settings, most_steps=7)
    assert steps_of(state, careful, received, 4) == 3, "an end beyond what it agreed to is no end"


@pytest.mark.parametrize(("limit", "steps"), [(0.0, 5), (100.0, 5), (10.0, 5), (9.0, 4), (6.5, 3), (1.0, 2)])
def test_steps_fit_into_what_is_left_of_the_jobs_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, steps: int
):
    """5 steps of 2 s fit until the round's end, and 2 are the least."""
    archive = Archive(tmp_path / "archive")
    start(archive, save_pico(tmp_path / "model"), CoordinatorSettings(federation="f", rounds=9, facilities=["a"]))
    plain = read_manifest(archive.model_for(0))
    received = dataclasses.replace(plain, extra=plain.extra | {"ends": {"a": GOOD | {"least": 2}}})
    settings = FacilitySettings(federation="f", facility="a", rounds=9, seed=1, most_steps=8)
    monkeypatch.setattr("facility.rounds.steps.time.time", lambda: 4990.0)
    decide_steps(tmp_path / "state", settings, received, 4, limit=limit)
    assert steps_of(tmp_path / "state", settings, received, 4) == steps


def timed_update(directory: Path, model: Path, name: str) -> Path:
    """An update whose report says how fast the facility was."""
    update = write_update(directory, model, name)
    told = read_report(update)
    write(update, dataclasses.replace(told, tokens_per_second=50.0, seconds=Seconds(load=2.0, train=8.0)))
    return update


def test_the_model_of_the_next_round_carries_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = Archive(tmp_path / "archive")
    settings = CoordinatorSettings(
        federation="f", rounds=3, facilities=["a", "b"], even=ELASTIC, steps={"a": 4, "b": 4}
    )
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    assert end_asked(read_manifest(model), "a") is None, "of the first round nothing is known"
    following, _, _ = close(archive, model, [timed_update(tmp_path / name, model, name) for name in "ab"], settings)
    found = archive.read_round(0)
    end = end_asked(read_manifest(following), "a")
    assert end is not None and (end.least, end.most) == (1, 16)
    assert found.next_end > 0 and set(found.next_steps) == {"a", "b"}, "the plan for a facility of an earlier version"

    monkeypatch.setattr("coordinator.steps.following.time.time", lambda: end.time + 86400)
    again, number, proceed = start(archive, tmp_path / "model", settings)
    moved = end_asked(read_manifest(again), "a")
    assert (number, proceed) == (1, True) and moved is not None
    assert moved.time == pytest.approx(end.time + 86400 + found.next_end), "a run that goes on counts from its start"
    start(archive, tmp_path / "model", dataclasses.replace(settings, even=None, steps={}))
    assert end_asked(read_manifest(again), "a") is None, "no longer elastic"


@pytest.mark.parametrize("kind", ["elastic", "auto"])
@pytest.mark.parametrize(
    "lie", [{"samples": 0}, {"tokens_per_second": 1e-300}, {"tokens": 1, "tokens_per_second": 1e15, "steps": 10**15}]
)
def test_times_that_cannot_be_end_no_round(tmp_path: Path, kind: str, lie: dict[str, Any]):
    """They ended it for everybody. Who tells them is not timed, and takes the steps of its settings."""
    archive, steps = Archive(tmp_path / "archive"), dict.fromkeys("abc", 4)
    even = dataclasses.replace(ELASTIC, steps=kind)
    settings = CoordinatorSettings(federation="f", rounds=3, facilities=list("abc"), even=even, steps=steps)
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    updates = [timed_update(tmp_path / name, model, name) for name in "abc"]
    write(updates[2], dataclasses.replace(read_report(updates[2]), **lie))
    following, _, proceed = close(archive, model, updates, settings)
    assert proceed and [row.status for row in archive.read_round(0).facilities] == ["ok"] * 3
    told = read_manifest(following).extra
    assert all(1 <= told["steps"][name] <= 16 for name in "abc") and told["steps"]["c"] in (1, 4, 16)
    if kind == "elastic":
        assert all(end_asked(read_manifest(following), name) is not None for name in "ab")


def test_a_round_that_is_asked_for_again_ends_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = Archive(tmp_path / "archive")
    settings = CoordinatorSettings(
        federation="f", rounds=3, facilities=["a", "b"], even=ELASTIC, steps={"a": 4, "b": 4}, retries=1
    )
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    following, _, _ = close(archive, model, [timed_update(tmp_path / name, model, name) for name in "ab"], settings)
    first = end_asked(read_manifest(following), "a")
    assert first is not None
    described = tmp_path / "coordinator.json"
    described.write_text(json.dumps(dataclasses.asdict(settings)))
    (tmp_path / "step").mkdir()
    monkeypatch.chdir(tmp_path / "step")
    monkeypatch.setattr("coordinator.steps.following.time.time", lambda: first.time + 600)
    link_tree(following, tmp_path / "given")  # as the step before handed it on
    given = ["--federation", described, "--archive", archive.path, "--model", tmp_path / "given", "--round", 1]
    failed = failure(tmp_path / "failed", "b", number=1)
    arguments = arguments_of("aggregate", None).parse_args([*map(str, given), "--updates", str(failed)])
    assert run_step(arguments, close_round) == 0
    assert archive.read_note("attempts")["count"] == 1, "it is asked for again"
    for handed_on in (tmp_path / "step" / "model", archive.model_for(1)):
        again = end_asked(read_manifest(handed_on), "a")
        assert again is not None
        assert again.time - first.time == pytest.approx(600 + archive.read_round(0).next_end, abs=0.01)


def test_a_facility_that_is_private_takes_the_steps_of_its_settings_whatever_is_asked(tmp_path: Path):
    """Its noise is chosen for them, and its settings cannot allow more."""
    archive = Archive(tmp_path / "archive")
    start(archive, save_pico(tmp_path / "model"), CoordinatorSettings(federation="f", rounds=1, facilities=["a"]))
    plain = read_manifest(archive.model_for(0))
    asked = dataclasses.replace(plain, extra={"ends": {"a": GOOD}, "steps": {"a": 3}})
    fields = {"federation": "f", "facility": "a", "rounds": 1, "seed": 1}
    private = DifferentialSettings(epsilon=3.0, delta=1e-5, unit="block")
    settings = FacilitySettings(**fields, training=TrainingSettings(export_dtype="float32"), differential=private)
    assert decide_steps(tmp_path / "state", settings, asked, 0) is None
    assert steps_of(tmp_path / "state", settings, asked, 0) is None
    with pytest.raises(ConfigurationError, match="beside differential"):
        dataclasses.replace(settings, most_steps=8)


def test_it_is_refused_where_steps_are_agreed_before(tmp_path: Path):
    rounds = {"count": 3, "steps": "elastic"}
    assert read_federation(write_federation(tmp_path, ["a", "b"], rounds=rounds)).even == ELASTIC
    with pytest.raises(ConfigurationError, match="'elastic' with privacy"):
        privacy = {"secure_aggregation": True}
        read_federation(write_federation(tmp_path / "p", ["a", "b", "c"], rounds=rounds, privacy=privacy))


LIES = 0
"""Says that it took 2 steps, and claims the tokens of 32."""


def weights_after(
    folder: Path, taken: list[dict[str, int]], *, asked: list[dict[str, int]] | None = None, **changes: Any
) -> list[dict[str, float]]:
    """Weights of each round in which facilities took so many steps of one sequence of ten tokens each.

    `asked`: what `training.steps` was in each round; None: 8 for all.
    """
    archive, fields = Archive(folder / "archive"), {"claims": ClaimSettings(sequence_tokens=10)} | changes

    def under(nominal: dict[str, int]) -> CoordinatorSettings:
        own = {"steps": nominal, "sequences": {name: 4 * steps for name, steps in nominal.items()}}
        return CoordinatorSettings(federation="f", rounds=9, facilities=list(nominal), even=ELASTIC, **own, **fields)

    asks = asked or [dict.fromkeys(taken[0], 8)] * len(taken)
    model, number, _ = start(archive, save_pico(folder / "model", dtype="bfloat16"), under(asks[0]))
    for steps, settings in zip(taken, map(under, asks), strict=True):
        updates = []
        for name, count in steps.items():
            update = write_update(folder / f"{number}-{name}", model, name, round=number)
            made, said = (2, 32) if count == LIES else (count, count)
            write(update, dataclasses.replace(read_report(update), steps=made, samples=said, tokens=10 * said))
            updates.append(update)
        model, number, _ = close(archive, model, updates, settings, number)
    return [{row.facility: row.weight for row in entry.facilities} for entry in archive.history()]


def test_where_one_always_takes_fewer_steps_every_facility_weighs_as_its_settings_ask(tmp_path: Path):
    for found in weights_after(tmp_path, [{"a": 12, "b": 3}] * 3):
        assert found == pytest.approx({"a": 0.5, "b": 0.5}), "its update is shorter, but counts no less beside that"
    folder = tmp_path / "limit"
    assert weights_after(folder, [{"a": 32, "b": 1}])[0]["b"] == pytest.approx(1 * 4 / (1 * 4 + 32 * 16.5 / 32)), (
        "nothing counts more than four times"
    )


def test_where_steps_vary_from_round_to_round_updates_weigh_by_what_was_done(tmp_path: Path):
    found = weights_after(tmp_path, [{"a": 12, "b": 4}, {"a": 4, "b": 12}])
    assert found[1] == pytest.approx({"a": 0.25, "b": 0.75}), "over both rounds they did as much"


def test_steps_that_a_facility_was_asked_for_before_say_nothing_of_what_it_does_now(tmp_path: Path):
    """Its earlier updates seemed to be a quarter of a round's work, and each new one weighed twice what it should."""
    asked = [{"a": 8, "b": 8}] * 3 + [{"a": 32, "b": 8}] * 2
    for steps, found in zip(asked, weights_after(tmp_path, asked, asked=asked), strict=True):
        assert found == pytest.approx({name: count / sum(steps.values()) for name, count in steps.items()})


def test_weights_that_do_not_follow_what_was_done_stay_as_they_are(tmp_path: Path):
    for place, kind in enumerate(("equal", {"a": 1.0, "b": 3.0})):
        found = weights_after(tmp_path / str(place), [{"a": 12, "b": 3}], aggregation=AggregationSettings(weights=kind))
        assert found[0]["a"] == pytest.approx(0.5 if kind == "equal" else 0.25)


def test_nobody_gains_by_claiming_many_tokens_in_few_steps(tmp_path: Path):
    honest = weights_after(tmp_path / "honest", [{"a": 8, "b": 32}])
    claimed = weights_after(tmp_path / "claimed", [{"a": 8, "b": LIES}])
    assert claimed == honest


@pytest.mark.parametrize("even", [ELASTIC, None])
def test_an_update_that_is_longer_for_its_steps_stays_in_the_round(tmp_path: Path, even: EvenSettings | None):
    """Two were held in their queues, one was not; where all are to take the same steps, it is far out of line."""
    archive, moves = Archive(tmp_path / "archive"), {"a": (2, 0.02), "b": (2, 0.02), "c": (32, 0.32)}
    steps = dict.fromkeys(moves, 8) if even is not None else {}
    settings = CoordinatorSettings(federation="f", rounds=9, facilities=list(moves), even=even, steps=steps)
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="float32"), settings)
    updates = []
    for name, (taken, move) in moves.items():
        update = write_update(tmp_path / name, model, name, move=move)
        write(update, dataclasses.replace(read_report(update), steps=taken, samples=taken, tokens=10 * taken))
        updates.append(update)
    close(archive, model, updates, settings)
    entry = archive.read_round(0)
    left_out = {row.facility for row in entry.facilities if row.status != "ok" or not row.weight}
    assert left_out == (set() if even is not None else {"c"})
