"""Whole federations in simulated time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.simulate import main
from coordinator.simulation.facilities import Federation, Queue, Site, read_federation, simulate_federation
from coordinator.simulation.pipelines.transfers import finish_times, level
from facility.exchange.errors import ConfigurationError

DELAYED = Queue(kind="chance", seconds=3600, probability=0.15, draws=2)


def federation(**changes: Any) -> Federation:
    return Federation(
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
        ({"rounds": 0, "facilities": [{"train_seconds": 1}]}, "rounds"),
        ({"rounds": 1, "facilities": []}, "facilities"),
        ({"rounds": 1, "facilities": [{"train_seconds": 0}]}, "train_seconds"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "speed": 2}]}, "speed"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "policy": "quorum", "quorum": 2}, "quorum is 2"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1}], "policy": "deadline"}, "deadline_seconds"),
        ({"rounds": 1, "facilities": [{"train_seconds": 1, "queue": {"kind": "lottery"}}]}, "lottery"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, raw: dict[str, Any], message: str):
    (tmp_path / "f.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match=message):
        read_federation(tmp_path / "f.json")
