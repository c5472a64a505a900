"""Whole federations in simulated time."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config.closing import ClosingSettings
from coordinator.planning.budget import FacilityPace
from coordinator.simulate import main
from coordinator.simulation.described import Queue, Scenario, Site, read_scenario
from coordinator.simulation.facilities import simulate_federation
from coordinator.simulation.pipelines.transfers import finish_times, level
from coordinator.steps.elastic import Elastic, common_end
from facility.exchange.errors import ConfigurationError
from tests.streamflow_plugin.course import course_of

DELAYED = Queue(kind="chance", seconds=3600, probability=0.15, draws=2)


def federation(**changes: Any) -> Scenario:
    return Scenario(
        **{"rounds": 10, "facilities": [Site(name="a", count=3, train_seconds=100)], "model_megabytes": 100, **changes}
    )


def test_a_round_by_hand():
    sites = [
        Site(name="near", train_seconds=60, download_megabytes_per_second=50, upload_megabytes_per_second=25),
        Site(name="far", train_seconds=30, queue=Queue(kind="fixed", seconds=20), upload_megabytes_per_second=1),
    ]
    result = simulate_federation(federation(facilities=sites, rounds=4, aggregate_seconds=5))
    # near: 2 + 60 + 4; far: 0 + 20 + 30 + 100.
    assert result.rounds_seconds == pytest.approx((155.0,) * 4)
    assert result.updates == 8
    assert result.training_share == pytest.approx(90 / 310)
    assert result.queue_share == pytest.approx(20 / 310)
    total = result.training_share + result.queue_share + result.transfer_share + result.waiting_share
    assert total == pytest.approx(1.0)


def test_transfers_share_the_coordinators_link():
    # Three models of 100 MB at 30 MB/s: 10 s; three updates together: 10 s more.
    result = simulate_federation(federation(coordinator_megabytes_per_second=30))
    assert result.round_seconds == pytest.approx(120.0)


def test_fair_shares():
    caps = np.array([1.0, 4.0, 10.0])
    assert level(caps, 9.0) == pytest.approx(4.0)
    assert level(caps, 99.0) == float("inf")
    # 1 MB/s for the first; 4 each for the others until the second's 8 bytes are through, then all that is left.
    ends = finish_times(np.zeros(3), np.array([9.0, 8.0, 24.0]), caps, 9.0)
    assert ends == pytest.approx([9.0, 2.0, 2.0 + 16 / 8])
    late = finish_times(np.array([0.0, 1.0]), np.array([10.0, 10.0]), np.array([10.0, 10.0]), 10.0)
    assert late == pytest.approx([1.0, 2.0])
    both = finish_times(np.array([0.0, 0.5]), np.array([10.0, 10.0]), np.array([10.0, 10.0]), 10.0)
    assert both == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_link_is_never_faster_than_its_capacity_or_a_transfer_alone(seed):
    random = np.random.default_rng(seed)
    begin, sizes, caps = random.uniform(0, 10, 40), random.uniform(1, 20, 40), random.uniform(1, 5, 40)
    ends = finish_times(begin, sizes, caps, 12.0)
    assert (ends >= begin + sizes / caps - 1e-9).all()
    assert ends.max() - begin.min() >= sizes.sum() / 12.0 - 1e-9


def test_policies_trade_waiting_for_completeness():
    def rate(policy: str, **knobs: Any) -> float:
        sites = [Site(count=4, train_seconds=1800, train_spread=0.1, queue=DELAYED)]
        run = federation(rounds=1500, facilities=sites, model_megabytes=0, policy=policy, **knobs)
        return simulate_federation(run).updates_per_hour

    everybody = rate("synchronous")
    # 4 / E[max of four] by simulation elsewhere: 3.01 site-rounds an hour; 1.28, 1.44 and 1.69 times that.
    assert everybody == pytest.approx(3.01, rel=0.03)
    assert rate("quorum", quorum=3) / everybody == pytest.approx(1.28, rel=0.05)
    assert rate("quorum", quorum=2) / everybody == pytest.approx(1.44, rel=0.05)
    assert rate("asynchronous") / everybody == pytest.approx(1.69, rel=0.05)


def test_what_is_late_is_dropped_and_its_facility_begins_when_its_job_has_ended():
    """By hand: two take 10 s, `slow` 25, a new model 1 s, and rounds close with two of three: at 10, 21 and 32.

    `slow` begins at 0, at 25 from round 2's model, and at 50 from that of the last round, which waits for it till 75.
    """
    sites = [Site(name="quick", count=2, train_seconds=10), Site(name="slow", train_seconds=25)]
    run = federation(rounds=4, facilities=sites, model_megabytes=0, policy="quorum", quorum=2, aggregate_seconds=1)
    dropped = simulate_federation(dataclasses.replace(run, late="drop"))
    assert dropped.rounds_seconds == pytest.approx((11, 11, 11, 75 - 33 + 1))
    assert dropped.participation == {"quick": 1.0, "slow": 0.25}
    assert dropped.training_share == pytest.approx((2 * 4 * 10 + 3 * 25) / (3 * 76))
    in_time = simulate_federation(dataclasses.replace(run, late="drop", quorum=3))
    assert in_time == simulate_federation(dataclasses.replace(run, policy="synchronous", quorum=0))


@pytest.mark.parametrize(("late", "slowest", "keep"), [("drop", 31, 3), ("carry", 31, 9), ("carry", 90, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_rounds_close_as_the_coordinators_do(seed: int, late: Any, slowest: float, keep: int):
    """The same jobs through its own closing: the same moments, the last one's included, and the same facilities.

    Where the slowest takes seven rounds, every third waits for it.
    """
    names = ["a", "b", "c", "d"]
    sites = [
        Site(name=name, train_seconds=seconds, train_spread=0.5)
        for name, seconds in zip(names, (10, 17, 24, slowest), strict=True)
    ]
    run = Scenario(
        rounds=12,
        facilities=sites,
        policy="quorum",
        quorum=2,
        late=late,
        keep_rounds=keep,
        aggregate_seconds=3,
        seed=seed,
    )
    spans: dict[tuple[str, int], float] = {}
    result = simulate_federation(run, timeline_rounds=12)
    for span in result.timeline:
        if span.name.startswith("F"):
            spans[names[span.replica], span.chunk] = span.end - span.start
    closing = ClosingSettings(quorum=2, grace=0.0, late=late)
    course = course_of(closing, names, lambda *job: spans[job], 12, between=3, most_late=keep - 1)
    assert course.closed[-1] + 3 == pytest.approx(result.seconds)
    assert np.diff([-3.0, *course.closed]) == pytest.approx(result.rounds_seconds)
    for name in names:
        assert sum(name in by for by in course.delivered) == pytest.approx(12 * result.participation[name])


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_a_round_short_of_its_quorum_closes_when_the_last_job_has_failed(late: Any):
    """That it will fail is known when it has, not before."""
    sites = [
        Site(name="quick", train_seconds=10),
        Site(name="fails", train_seconds=1000, failure_probability=0.999, attempts=3),
    ]
    run = federation(rounds=20, facilities=sites, model_megabytes=0, policy="quorum", quorum=2, late=late)
    result = simulate_federation(run)
    assert result.participation == {"quick": 1.0, "fails": 0.0}
    everybody = simulate_federation(dataclasses.replace(run, policy="synchronous", quorum=0, late="carry"))
    assert result.rounds_seconds == everybody.rounds_seconds


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["synchronous", "quorum", "deadline", "asynchronous"])
def test_the_shares_of_a_facilitys_time_are_all_of_it(policy: str, seed: int):
    """Whatever is under way when the federation ends counts until then."""
    draw = random.Random(seed)
    sites = [
        Site(
            train_seconds=draw.choice([10, 30, 1000]),
            queue=Queue(kind="exponential", seconds=20),
            download_megabytes_per_second=1.0,
            upload_megabytes_per_second=2.0,
            failure_probability=0.2,
            attempts=2,
        )
        for _ in range(4)
    ]
    limits = {"quorum": {"quorum": draw.randint(1, 3)}, "deadline": {"deadline_seconds": 60.0}}.get(policy, {})
    result = simulate_federation(
        federation(
            facilities=sites,
            rounds=draw.randint(1, 5),
            model_megabytes=20,
            policy=policy,
            seed=seed,
            aggregate_seconds=3,
            **limits,
        )
    )
    shares = (result.training_share, result.queue_share, result.transfer_share, result.waiting_share)
    assert min(shares) >= -1e-9 and sum(shares) == pytest.approx(1)


def test_without_waiting_by_hand():
    """Each of two makes 16 updates of 10 s, with 1 s for each model: as the last comes, nothing is under way."""
    run = federation(facilities=[Site(count=2, train_seconds=10)], rounds=16, model_megabytes=0, policy="asynchronous")
    found = simulate_federation(dataclasses.replace(run, aggregate_seconds=1))
    assert (found.seconds, found.updates) == (pytest.approx(16 * 11), 32)
    assert (found.training_share, found.waiting_share) == (pytest.approx(10 / 11), pytest.approx(1 / 11))


def test_without_waiting_the_rate_is_that_of_a_facility_alone():
    sites = [Site(count=5, train_seconds=50, queue=Queue(kind="exponential", seconds=50))]
    result = simulate_federation(federation(rounds=500, facilities=sites, model_megabytes=0, policy="asynchronous"))
    assert result.updates_per_hour == pytest.approx(5 * 36, rel=0.03)
    assert result.training_share == pytest.approx(0.5, rel=0.05)


def test_failures_cost_time_and_then_the_round():
    sites = [Site(count=50, train_seconds=100, failure_probability=0.3, attempts=2)]
    result = simulate_federation(federation(rounds=40, facilities=sites, model_megabytes=0))
    assert result.sat_out / (50 * 40) == pytest.approx(0.09, rel=0.3)
    assert result.updates + result.sat_out == 50 * 40
    assert result.jobs_failed / (50 * 40) == pytest.approx(0.3 + 0.09, rel=0.15)


def test_a_deadline_closes_the_round_with_what_is_there():
    sites = [Site(name="quick", train_seconds=10), Site(name="slow", train_seconds=95)]
    run = federation(rounds=10, facilities=sites, model_megabytes=0, policy="deadline", deadline_seconds=30)
    result = simulate_federation(run)
    assert result.participation["quick"] == pytest.approx(1.0)
    assert result.participation["slow"] < 0.5
    assert max(result.rounds_seconds) <= 30


def test_the_same_seed_repeats():
    sites = [Site(count=4, train_seconds=100, train_spread=0.5)]
    first, again = (simulate_federation(federation(facilities=sites, seed=5)) for _ in range(2))
    assert first == again != simulate_federation(federation(facilities=sites, seed=6))


def test_the_command_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw = {
        "rounds": 5,
        "model_megabytes": 10,
        "facilities": [{"name": "a", "count": 2, "train_seconds": 60, "queue": {"kind": "exponential", "seconds": 30}}],
    }
    (tmp_path / "f.json").write_text(json.dumps(raw))
    arguments = ["--federation", str(tmp_path / "f.json"), "--rounds", "7", "--trace", str(tmp_path / "trace.json")]
    assert main([*arguments, "--html", str(tmp_path / "page.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 7
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sorted(e["name"] for e in events if e.get("cat") == "forward") == ["F0", "F0", "F1", "F1", "F2", "F2"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rounds": 0, "facilities": [{"train_seconds": 1}]}, "rounds is 0, expected 1 or more"),
        ({"rounds": 1, "facilities": []}, "facilities is .*expected one facility or more"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "samples": 0}]}, "samples is 0.*expected more than 0"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "train_spread": 1}]}, "train_spread is 1.*below 1"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "queue": {"draws": 0}}]}, "draws is 0, expected 1 or more"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "most_steps": 0.5}, "most_steps is 0.5, expected 1 or"),
        ({"rounds": 1, "facilities": [{"train_seconds": 0}]}, "train_seconds"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "speed": 2}]}, "speed"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "policy": "quorum", "quorum": 2}, "quorum is 2"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "policy": "deadline"}, "deadline_seconds"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "late": "drop"}, "expected 'quorum'"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "queue": {"kind": "lottery"}}]}, "lottery"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1e308}]}, "train_seconds is 1e"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "coordinator_megabytes_per_second": 1e-308}, "is 1e-308"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "aggregate_seconds_per_update": -1}, "is -1"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "update_megabytes": -2}, "update_megabytes is -2"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, raw: dict[str, Any], message: str):
    (tmp_path / "f.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match=message):
        read_scenario(tmp_path / "f.json")


def test_a_tree_of_coordinators_by_hand():
    # 4 facilities, 2 coordinators below one; 100 MB at 10 MB/s, two at a time: 20 s down to the lower ones, 20 s on to
    # the facilities, 100 s of training, 20 s back, 1 + 2 x 0.5 s, two sums of 50 MB in 10 s, and 2 s at the top.
    tree = federation(
        facilities=[Site(name="a", count=4, train_seconds=100)],
        coordinator_megabytes_per_second=10,
        aggregate_seconds=1,
        aggregate_seconds_per_update=0.5,
        fan_in=2,
        partial_megabytes=50,
    )
    assert simulate_federation(tree).round_seconds == pytest.approx(20 + 20 + 100 + 20 + 2 + 10 + 2)


def test_a_tree_that_one_coordinator_is_all_of_is_no_other_federation():
    alone = federation(coordinator_megabytes_per_second=30, aggregate_seconds=5, aggregate_seconds_per_update=1)
    tree = federation(
        coordinator_megabytes_per_second=30, aggregate_seconds=5, aggregate_seconds_per_update=1, fan_in=3
    )
    assert simulate_federation(tree).rounds_seconds == pytest.approx(simulate_federation(alone).rounds_seconds)


@pytest.mark.slow
def test_ten_thousand_facilities_in_a_tree_take_less_than_over_one_link():
    sites = [Site(name="a", count=10_000, train_seconds=600, train_spread=0.2, failure_probability=0.01)]
    shared = {"facilities": sites, "coordinator_megabytes_per_second": 1000, "rounds": 2, "model_megabytes": 1000}
    alone = simulate_federation(federation(**shared))
    times = {fan_in: simulate_federation(federation(**shared, fan_in=fan_in)).round_seconds for fan_in in (8, 100)}
    assert alone.round_seconds > 2 * 10_000  # every model and every update over one link
    assert times[8] < 1500 < alone.round_seconds / 10
    assert times[8] < times[100]


@pytest.mark.parametrize("changes", [{"fan_in": 1}, {"fan_in": 8, "policy": "asynchronous"}])
def test_a_tree_needs_two_branches_and_rounds(changes: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="fan_in"):
        federation(**changes)


def test_elastic_rounds_by_hand():
    """The first round's jobs do a round's work; then four rounds' samples are done until T: T / 100 + 3 T / 400 = 4."""
    sites = [Site(name="fast", train_seconds=100), Site(name="slow", train_seconds=400, samples=3)]
    found = simulate_federation(federation(facilities=sites, rounds=3, model_megabytes=0, steps="elastic"))
    until = 4 / (1 / 100 + 3 / 400)
    assert found.rounds_seconds == pytest.approx((400.0, until, until))
    assert found.samples_per_hour == pytest.approx(3600 * 12 / (400 + 2 * until))
    whole = [dataclasses.replace(site, round_steps=10) for site in sites]
    found = simulate_federation(federation(facilities=whole, rounds=2, model_megabytes=0, steps="elastic"))
    assert found.rounds_seconds[1] == pytest.approx(240.0), (
        "half a step more each: 24 at the fast one, 6 at the slow one"
    )
    assert found.samples_per_hour == pytest.approx(3600 * (4 + 2.4 + 3 * 0.6) / 640)


@pytest.mark.parametrize("seed", [1, 2])
def test_elastic_rounds_are_those_of_the_coordinators_rule(seed: int):
    """A plain loop with the coordinator's own objects, which draws the same numbers."""
    waits = {"a": [5.0, 80.0, 300.0], "b": [0.0, 20.0], "c": [120.0]}
    sites = [
        Site(name=name, train_seconds=100.0 + 10 * len(seen), queue=Queue(kind="seen", waits=seen), round_steps=20)
        for name, seen in waits.items()
    ]
    rounds = 12
    found = simulate_federation(
        federation(facilities=sites, rounds=rounds, model_megabytes=0, steps="elastic", seed=seed)
    )
    random, seen_by, lengths, steps_done = np.random.default_rng(seed), {name: [] for name in waits}, [], 0
    for number in range(rounds):
        facilities = [
            Elastic(
                pace=FacilityPace(name=site.name, seconds_per_step=site.train_seconds / 20, samples_per_step=0.05),
                waits=seen_by[site.name][-8:],
                least=5,
                most=80,
            )
            for site in sites
        ]
        until, ends = common_end(facilities, 3.0) if number else 0.0, []
        for site, one in zip(sites, facilities, strict=True):
            wait, _ = float(site.queue.draw(random, 1)[0]), random.random(2)  # a failure, and when
            fits = math.floor(max(until - wait, 0.0) / one.pace.seconds_per_step + 1e-9)
            steps = min(max(fits, one.least), one.most) if number else 20
            ends.append(wait + steps * one.pace.seconds_per_step)
            steps_done += steps
            seen_by[site.name].append(wait)
        lengths.append(max(ends))
    assert found.rounds_seconds == pytest.approx(tuple(lengths))
    assert found.samples_per_hour == pytest.approx(3600 * steps_done / 20 / sum(lengths))


@pytest.mark.slow
def test_elastic_rounds_bring_more_where_queues_vary_and_nothing_where_they_do_not():
    varied = [Site(name="a", count=4, train_seconds=100, queue=Queue(kind="lognormal", seconds=100))]
    steady = [Site(name="a", count=4, train_seconds=100, queue=Queue(kind="fixed", seconds=100))]
    for sites, least, most in ((varied, 1.1, 1.4), (steady, 0.999, 1.001)):
        for quorum in ({}, {"policy": "quorum", "quorum": 3}, {"policy": "quorum", "quorum": 3, "late": "drop"}):
            settings = {"facilities": sites, "rounds": 200, "model_megabytes": 0} | quorum
            fixed = simulate_federation(federation(**settings))
            elastic = simulate_federation(federation(**settings, steps="elastic"))
            assert fixed.samples_per_hour == pytest.approx(fixed.updates_per_hour)
            gain = elastic.samples_per_hour / fixed.samples_per_hour
            assert least < gain < (most if not quorum or least < 1 else 1.7), (gain, quorum)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": "elastic", "policy": "asynchronous"},
        {"least_steps": 1.5},
        {"most_steps": 0.5},
        {"facilities": [Site(train_seconds=1, queue=Queue(kind="none"))], "least_steps": 0.0},
    ],
)
def test_elastic_steps_that_cannot_be_are_refused(changes: dict[str, Any]):
    with pytest.raises(ConfigurationError):
        federation(**changes)


def test_a_queue_of_waits_that_were_seen_needs_them():
    for wrong in ({"kind": "seen"}, {"kind": "fixed", "waits": [1.0]}, {"kind": "seen", "waits": [-1.0]}):
        with pytest.raises(ConfigurationError, match="waits is .*expected"):
            Queue(**wrong)


def test_a_seed_that_no_generator_takes_is_an_error_and_zero_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`--seed 0` was the federation's own seed, and -1 ended in a traceback."""
    path = tmp_path / "federation.json"
    sites = [{"name": "a", "count": 3, "train_seconds": 100, "queue": {"kind": "exponential", "seconds": 50}}]
    path.write_text(json.dumps({"rounds": 10, "facilities": sites, "model_megabytes": 100, "seed": 5}))
    for seed in (-1, 2**64):
        with pytest.raises(ConfigurationError, match=f"--seed is {seed}, expected 0 or more"):
            main(["--federation", str(path), "--seed", str(seed)])
    with pytest.raises(ConfigurationError, match="seed is -1, expected 0 or more"):
        federation(seed=-1)
    seconds = {}
    for words in ([], ["--seed", "5"], ["--seed", "0"]):
        assert main(["--federation", str(path), "--json", *words]) == 0
        seconds[" ".join(words)] = json.loads(capsys.readouterr().out)["seconds"]
    assert seconds[""] == seconds["--seed 5"] != seconds["--seed 0"]
