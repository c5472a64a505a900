"""Problems are read as they are, and bad ones get one clear error each."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from coordinator.problem.chain import ChainProblem, chain_of
from coordinator.problem.placement import PlacementProblem, placement_of
from coordinator.problem.read import problem_from_json, read_problem
from facility.exchange.errors import ConfigurationError
from tests.planning.cases import BEST_KNOWN, problem, published, whole


def test_units_of_quantities_are_converted():
    one = problem()
    assert one.devices[0].memory_bytes == 8e9
    assert one.latency[0, 3] == pytest.approx(10e-3, rel=0.3)
    assert one.bandwidth[0, 3] == pytest.approx(1e9 / 8, rel=0.3)
    assert len(one.units) == 8 and one.units[1].backward_seconds == 0.02
    assert np.isinf(one.bandwidth.diagonal()).all() and (one.latency.diagonal() == 0).all()
    assert one.forward_seconds(2).shape == (4, 8)


@pytest.mark.parametrize("name", BEST_KNOWN)
def test_published_placement_cases_are_read_as_they_are(name):
    case = read_problem(published(name))
    assert isinstance(case, PlacementProblem)
    assert (case.stages, case.replicas, len(case.latency_seconds)) == (8, 8, 64)
    assert case.best_known_cost == BEST_KNOWN[name]


def test_published_chain_case_is_read_as_it_is():
    case = read_problem(published("sky-bert160"), devices="config-64")
    assert isinstance(case, ChainProblem)
    assert len(case.unit_bytes) == 483 and len(case.memory_bytes) == 64
    with pytest.raises(ConfigurationError, match="config-16, config-32"):
        read_problem(published("sky-bert160"), devices="config-65")
    with pytest.raises(ConfigurationError, match="choose one set of devices"):
        read_problem(published("sky-bert160"))


def placement() -> dict:
    square = [[0.0, 1.0], [1.0, 0.0]]
    return {
        "delay_ms": square,
        "bandwidth_gbit_per_s": [[1.0, 2.0], [2.0, 1.0]],
        "stages": 2,
        "replicas": 1,
        "parameters_gigabytes_per_stage": 0.5,
        "activations_gibibytes_per_boundary": 0.5,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delay_ms": [[0.0, 1.0]]}, "delay is 1 x 2, expected a square"),
        ({"delay_ms": [[0.0, 1.0], [1.0]]}, "rows of unequal length"),
        ({"delay_ms": [[0.0, float("nan")], [1.0, 0.0]]}, r"delay_ms\[0\]\[1\] is not a number"),
        ({"bandwidth_gbit_per_s": [[1.0, 0.0], [2.0, 1.0]]}, "bandwidth from '0' to '1' is 0"),
        ({"bandwidth_gbit_per_s": [[1.0]]}, "expected equal sizes"),
        ({"bandwidth_furlongs": [[1.0]]}, "unknown unit 'furlongs' of bandwidth"),
        ({"delay_ms": [[0.0, float("inf")], [1.0, 0.0]]}, "no route from '0' to '1'"),
        ({"delay_ms": [[0.0, -1.0], [1.0, 0.0]]}, "latency from '0' to '1' is negative"),
        ({"stages": 3}, "3 stages x 1 replicas need 3 devices, found 2"),
        ({"stages": "two"}, "stages is 'two'"),
    ],
)
def test_bad_placement_case(change, message, tmp_path):
    raw = placement() | change
    if "bandwidth_furlongs" in raw:
        del raw["bandwidth_gbit_per_s"]
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match=message):
        read_problem(tmp_path / "p.json")


def put(raw, path, value):
    raw = copy.deepcopy(raw)
    place = raw
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return raw


UPLINK = {"name": "uplink", "bandwidth_gbit_per_s": 1, "sources": [0], "destinations": [1]}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("devices",), [], "links"),
        (("devices", 0, "memory_gigabytes"), 0, "memory of device 'd0' is 0.0 bytes"),
        (("devices", 0, "memory_gigabytes"), "much", "not a number"),
        (("devices", 0, "memory_stones"), 3, "unknown unit 'stones' of memory"),
        (("devices", 0, "memory_bytes"), 3, "give one of them"),
        (("devices", 0, "slowdown"), 0.0, "slowdown .* of device 'd0' is 0"),
        (("devices", 0, "slowdown"), float("nan"), "slowdown is not a number"),
        (("devices", 0, "slowdown_by_kind"), {"block": 0.0}, "slowdown .block. of device 'd0' is 0"),
        (("devices", 0, "price"), 0, "price of device 'd0' is 0"),
        (("devices", 1, "id"), "d0", "two devices are called 'd0'"),
        (("links", "latency_ms", 0), [0, 1], "unequal length"),
        (("links", "bandwidth_gbit_per_s", 1, 0), 0.0, "bandwidth from 'd1' to 'd0' is 0"),
        (("links", "bandwidth_gbit_per_s", 1, 0), None, "not a number"),
        (("links", "latency_ms", 1, 0), float("inf"), "no route from 'd1' to 'd0'"),
        (("links", "latency_ms"), KeyError, "links lacks latency_seconds"),
        (("links", "shared"), [UPLINK | {"bandwidth_gbit_per_s": 0}], "shared link 'uplink' has bandwidth 0"),
        (("links", "shared"), [UPLINK | {"destinations": [4]}], "'uplink' names device 4; there are 0..3"),
        (("links", "speed"), 1, "unknown key links.speed"),
        (("units",), KeyError, "lacks units"),
        (("units", 1, "forward_ms"), -1, "forward_seconds is -0.001"),
        (("units", 1, "forward_days"), 1, "unknown unit 'days'"),
        (("units", 1, "count"), 0, "count is 0"),
        (("units", 1, "count"), 10**12, "count is 1000000000000, expected 1 to 100,000"),
        (("units", 1, "forward_ms"), 10**400, "not a number"),
        (("batch_samples",), KeyError, "lacks batch_samples"),
        (("batch_samples",), 0, "batch_samples is 0"),
        (("schedules",), ["2f2b"], "schedules holds '2f2b'"),
        (("format",), 99, "newer"),
        (("colour",), 1, "unknown key problem.colour"),
    ],
)
def test_bad_problem(path, value, message):
    with pytest.raises(ConfigurationError, match=message):
        problem_from_json(put(whole(), path, value), file="p.json")


def test_null_on_the_diagonal_is_no_measurement():
    raw = whole()
    for n in range(4):
        raw["links"]["bandwidth_gbit_per_s"][n][n] = None
    assert problem_from_json(raw).bandwidth[0, 1] > 0


def test_parts_of_a_whole_problem():
    one = problem()
    chain = chain_of(one)
    assert len(chain.seconds) == 4 and len(chain.unit_bytes) == 8
    grid = placement_of(one, 2, 2)
    assert grid.gradient_bytes == pytest.approx(340e6 / 2)
    assert grid.activation_bytes == pytest.approx(16 / 2 * 2e6)
