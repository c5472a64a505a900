"""`training.encoding: sparseloco` in federation.yml: what goes with it, what is kept, and how many rounds it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import Federation, read_federation
from coordinator.config.sparse_updates import RATE
from coordinator.preflight.sparse_updates import check_sparse_updates
from facility.exchange.errors import ConfigurationError

SPARSE = {"encoding": "sparseloco", "export_dtype": "float32"}
TWO = [{"name": name, "dataset": "/data"} for name in ("a", "b")]


def read(directory: Path, **changes: Any) -> Federation:
    described = {"name": "f", "model": "model", "rounds": 100, "training": SPARSE, "facilities": TWO}
    file = directory / "federation.yml"
    file.write_text(yaml.safe_dump(described | changes))
    return read_federation(file)


def test_models_are_sent_by_what_has_changed_and_move_by_the_mean(tmp_path: Path):
    federation = read(tmp_path)
    assert federation.sending.encoding == "changed"
    found = federation.aggregation
    assert (found.rule, found.server_optimizer, found.server_learning_rate) == ("mean", "plain", RATE)
    assert "updates are sparse" in federation.chosen
    assert {one.training.optimizer_state for one in federation.facilities} == {"shared"}
    assert {one.training.unsent_share for one in federation.facilities} == {0.0}
    other = read(tmp_path, training=SPARSE | {"unsent_share": 0.25})
    assert {one.training.unsent_share for one in other.facilities} == {0.25}


def test_what_is_written_is_kept(tmp_path: Path):
    federation = read(tmp_path, sending={"encoding": "full"}, aggregation={"rule": "nesterov", "momentum": 0.5})
    assert federation.sending.encoding == "full" and federation.aggregation.server_optimizer == "nesterov"
    slower = read(tmp_path, aggregation={"server_learning_rate": 1.5}).aggregation
    assert (slower.server_optimizer, slower.server_learning_rate) == ("plain", 1.5)
    assert read(tmp_path, aggregation={"momentum": 0.5}).aggregation.server_optimizer == "nesterov"
    signed = read(tmp_path, sending={"valid_hours": 3.0})
    assert (signed.sending.encoding, signed.sending.valid_hours) == ("changed", 3.0)


def test_where_one_facility_sends_all_the_choice_is_that_of_other_federations(tmp_path: Path):
    other = [TWO[0], TWO[1] | {"training": {"encoding": "full"}}]
    federation = read(tmp_path, facilities=other)
    plain = read(tmp_path, training={"export_dtype": "float32"})
    assert federation.sending == plain.sending and federation.aggregation == plain.aggregation


def test_adapters_travel_whole_so_their_choice_is_that_of_other_federations(tmp_path: Path):
    lora = {"export_dtype": "float32", "lora": {"rank": 4}}
    federation, plain = read(tmp_path, training=SPARSE | lora), read(tmp_path, training=lora)
    assert federation.sending == plain.sending and federation.aggregation == plain.aggregation
    assert not check_sparse_updates(federation)


@pytest.mark.parametrize("rounds", [1, 99])
def test_fewer_rounds_than_it_needs_are_refused(tmp_path: Path, rounds: int):
    with pytest.raises(ConfigurationError, match=f"sparseloco' with {rounds} rounds, expected 100 or more"):
        read(tmp_path, rounds=rounds)
    one = [TWO[0] | {"training": {"encoding": "full"}}, TWO[1]]
    with pytest.raises(ConfigurationError, match="of 'b' is 'sparseloco'"):
        read(tmp_path, rounds=rounds, facilities=one)
    read(tmp_path, rounds=rounds, training=SPARSE | {"encoding": "sparse"})


@pytest.mark.parametrize(("rounds", "verdict", "percent"), [(100, "warning", 22), (999, "warning", 8), (5000, "ok", 1)])
def test_check_says_what_so_many_rounds_cost(tmp_path: Path, rounds: int, verdict: str, percent: int):
    (row,) = check_sparse_updates(read(tmp_path, rounds=rounds))
    assert row.verdict == verdict and f"{percent} % above" in row.found
    assert check_sparse_updates(read(tmp_path, training={"export_dtype": "float32"})) == []
