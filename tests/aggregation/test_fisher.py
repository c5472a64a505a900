"""Weights by row: against plain loops, over files as in memory, and how far one facility's second moments carry it."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.rules import fisher, mean
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.squared_gradients import RowsOfUpdates
from coordinator.aggregation.updates import Update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import Factors, write_factors
from facility.exchange.messages.manifest import read_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.examples import examples
from tests.reproductions.server_in_memory import Server

SHAPES = {"embed": (60, 1500), "norm": (50,), "cube": (4, 3, 5)}
ALL = "*"
KEPT = 0.75


def by_hand(steps: np.ndarray, squares: np.ndarray, weights: list[float], power: float, largest: float) -> np.ndarray:
    """One value at a time. `steps`: (updates, rows, width)."""
    total = np.zeros(steps.shape[1:])
    means = [float(one.mean()) for one in squares.astype(float)]
    for row in range(steps.shape[1]):
        raised = [(float(v) / m if m else 1.0) ** power for v, m in zip(squares[:, row], means, strict=True)]
        middle = sum(w * r for w, r in zip(weights, raised, strict=True)) / sum(weights)
        factors = [min(max(r / middle, 1 / largest), largest) if middle else 1.0 for r in raised]
        shares = [w * f for w, f in zip(weights, factors, strict=True)]
        for column in range(steps.shape[2]):
            values = [s * float(d) for s, d in zip(shares, steps[:, row, column], strict=True)]
            total[row, column] = sum(values) / sum(shares)
    return total


numbers = st.floats(0, 1e6, width=32) | st.just(0.0)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_weights_are_those_of_a_plain_loop(data: st.DataObject):
    updates, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    squares = np.array(
        data.draw(st.lists(st.lists(numbers, min_size=rows, max_size=rows), min_size=updates, max_size=updates))
    )
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=updates, max_size=updates))
    power, largest = data.draw(st.sampled_from([0.0, 0.5, 1.0])), data.draw(st.sampled_from([1.0, 2.0, math.inf]))
    found = fisher.row_weights(squares, np.array(weights), power=power, largest=largest)
    steps = np.eye(updates)[:, None, :].repeat(rows, 1)  # of each update alone: the sum is its share
    assert np.allclose(found.T, by_hand(steps, squares, weights, power, largest), rtol=1e-5, atol=1e-7)
    assert np.allclose(found.sum(0), 1, rtol=1e-6)
    if power == 0 or largest == 1 or not squares.any():
        assert np.allclose(found, (np.array(weights) / sum(weights))[:, None], rtol=1e-6)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.data())
def test_however_a_tensor_is_cut_each_value_has_its_rows_weight(rows: int, width: int, data: st.DataObject):
    rng = np.random.default_rng(rows * 10 + width)
    steps, weights = rng.normal(size=(3, rows * width)).astype("f4"), rng.random((3, rows)).astype("f4")
    whole = np.zeros(rows * width, "f4")
    for step, one in zip(steps, weights, strict=True):
        whole += step * one.repeat(width)
    begin = data.draw(st.integers(0, rows * width - 1))
    end = data.draw(st.integers(begin + 1, rows * width))
    assert np.array_equal(fisher.weighted(steps[:, begin:end], weights, width, begin), whole[begin:end])


def factors_of(seed: int) -> dict[str, Factors]:
    """Some matrix's row and column means for every tensor."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in SHAPES.items():
        value = rng.lognormal(sigma=1.5, size=(shape[0], math.prod(shape[1:])))
        rows = value.mean(1).astype("f4")
        found[name] = Factors(rows, value.mean(0).astype("f4") if len(shape) > 1 else None)
    return found


def with_factors(directory: Path, factors: dict[str, Factors], kept: float = 0.0) -> Path:
    write_factors(directory, factors, steps=10, kept=kept)
    write_manifest(directory, read_manifest(directory))
    return directory


def federation_of(place: Path, facilities: str):
    """A model, its updates in tensors and files, and the rows of each one's own squared gradients."""
    tensors = make.random_tensors(0, SHAPES, torch.float32)
    received = factors_of(99)
    base = with_factors(make.model(place / "m0", tensors), received)
    updates, paths, squares = {}, [], {}
    for number, who in enumerate(facilities):
        own = factors_of(number)
        sent = {
            name: Factors(
                KEPT * received[name].rows + (1 - KEPT) * one.rows,
                None if one.columns is None else KEPT * received[name].columns + (1 - KEPT) * one.columns,
            )
            for name, one in own.items()
        }
        updates[who] = make.moved(tensors, 10 + number)
        path = make.update(place / who, updates[who], base=base, facility=who, tokens=100 * (number + 1))
        paths.append(with_factors(path, sent, KEPT))
        squares[who] = {name: one.rows for name, one in own.items()}
    return tensors, base, updates, paths, squares


@pytest.mark.parametrize("facilities", ["ab", "abcd"])
def test_a_round_over_files_is_that_of_a_plain_loop_and_of_the_server_in_memory(tmp_path: Path, facilities: str):
    """The share of the second moments that a facility received is none of its own."""
    tensors, base, updates, paths, squares = federation_of(tmp_path, facilities)
    chosen = AggregationSettings(
        rule="fisher+nesterov", fisher_tensors=ALL, server_learning_rate=0.7, momentum=0.5, **make.UNBOUNDED
    )
    record = aggregate(base=base, updates=paths, out=tmp_path / "m1", settings=chosen, state_out=tmp_path / "s1")
    got, weights = make.read_all(tmp_path / "m1"), [100.0 * (number + 1) for number in range(len(facilities))]
    assert record.combiner == "fisher" and "fisher" not in record.details
    for name, before in tensors.items():
        rows = len(before)
        steps = np.stack([(one[name] - before).numpy().reshape(rows, -1) for one in updates.values()])
        own = np.stack([one[name] for one in squares.values()])
        expected = by_hand(steps, own, weights, 0.5, math.inf if len(facilities) < 3 else 2.0)
        moved = (got[name] - before).numpy().reshape(rows, -1)
        assert np.allclose(moved, 0.7 * expected, rtol=2e-3, atol=2e-6)
        assert not np.allclose(moved, 0.7 * np.average(steps, axis=0, weights=weights), rtol=2e-2, atol=2e-5)
    server = Server(chosen)
    memory = server.step(tensors, updates, dict(zip(facilities, weights, strict=True)), squares=squares)
    for name in tensors:
        assert torch.allclose(memory[name], got[name], rtol=0, atol=1e-6)


def test_without_second_moments_of_all_it_is_the_mean_bit_for_bit(tmp_path: Path):
    _, base, _, paths, _ = federation_of(tmp_path, "abc")
    bare = make.update(tmp_path / "d", make.moved(make.read_all(base), 7), base=base, facility="d")
    for rule in ("fisher", "mean"):
        chosen = AggregationSettings(rule=rule)
        record = aggregate(base=base, updates=[*paths, bare], out=tmp_path / rule, settings=chosen)
        if rule == "fisher":
            assert "not every update brings second moments" in record.details["fisher"]
    a, b = make.read_all(tmp_path / "fisher"), make.read_all(tmp_path / "mean")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_by_default_the_rows_of_embeddings_alone_are_weighed(tmp_path: Path):
    tensors, _, updates, _, squares = federation_of(tmp_path, "ab")
    shares = dict.fromkeys("ab", 1.0)
    weighted, everywhere, plain = (
        Server(chosen).step(tensors, updates, shares, squares=squares)
        for chosen in (
            AggregationSettings(rule="fisher"),
            AggregationSettings(rule="fisher", fisher_tensors=ALL),
            AggregationSettings(rule="mean"),
        )
    )
    assert torch.equal(weighted["embed"], everywhere["embed"]) and not torch.equal(weighted["embed"], plain["embed"])
    for name in ("norm", "cube"):
        assert torch.equal(weighted[name], plain[name]) and not torch.equal(weighted[name], everywhere[name])


def test_a_tensor_that_one_brings_none_of_is_averaged_plainly(tmp_path: Path):
    tensors, base, updates, paths, squares = federation_of(tmp_path, "ab")
    without = {who: dict(one) for who, one in squares.items()}
    del without["a"]["norm"]
    chosen = AggregationSettings(rule="fisher", fisher_tensors=ALL)
    weighted, partly = (
        Server(chosen).step(tensors, updates, {"a": 1.0, "b": 3.0}, squares=one) for one in (squares, without)
    )
    assert torch.equal(weighted["embed"], partly["embed"]) and not torch.equal(weighted["norm"], partly["norm"])
    steps = np.stack([(updates[who]["norm"] - tensors["norm"]).numpy() for who in "ab"])
    expected = tensors["norm"].numpy() + mean.combine(steps, [0.25, 0.75])
    assert np.array_equal(partly["norm"].numpy(), expected)


def test_the_scale_of_a_facilitys_gradients_does_not_count():
    """Another batch size or clipping norm, or a lie about all rows at once."""
    rng = np.random.default_rng(0)
    squares, weights = rng.lognormal(sigma=2, size=(4, 30)), np.array([0.1, 0.2, 0.3, 0.4])
    found = fisher.row_weights(squares, weights, power=0.5, largest=2.0)
    scaled = squares * np.array([[1e-6], [1.0], [1e3], [1e9]])
    assert np.allclose(fisher.row_weights(scaled, weights, power=0.5, largest=2.0), found, rtol=1e-6)
    without = squares.copy()
    without[2] = 0  # one that knows nothing of its gradients is averaged in as a facility of the mean
    even = fisher.row_weights(np.ones_like(squares), weights, power=0.5, largest=2.0)
    part = fisher.row_weights(without, weights, power=0.5, largest=2.0)
    assert np.allclose(even, weights[:, None]) and np.all((part[2] > 0.3 / 2.5) & (part[2] < 0.3 * 2.5))


def test_second_moments_that_gradients_never_had_gain_one_of_four_no_more_than_stated(tmp_path: Path):
    """All of its gradients in one row: its weight is at most doubled there, at least halved elsewhere."""
    _, base, _, paths, _ = federation_of(tmp_path, "abcd")
    lie = {name: Factors(np.full(len(one.rows), 1e-12, "f4"), one.columns) for name, one in factors_of(3).items()}
    for one in lie.values():
        one.rows[0] = 1e6
    shutil.rmtree(paths[3] / "second_moments")
    with_factors(paths[3], lie)
    seen = squared_gradients_of(paths, base)
    for name in SHAPES:
        found = seen.of(name)
        assert found is not None
        shares = fisher.row_weights(found.values, np.full(4, 0.25), power=0.5, largest=2.0)
        assert 0.25 < shares[3, 0] <= 2 / 3.5 + 1e-6 and (shares[3, 1:] >= 0.5 / 6.5 - 1e-6).all()
        assert (
            (shares[3, 1:] < 0.25).all()
            and (shares[:3] > 0.5 / 6.5 - 1e-6).all()
            and (shares[:3] <= 2 / 3.5 + 1e-6).all()
        )


def squared_gradients_of(paths: list[Path], sent: Path) -> RowsOfUpdates:
    updates = [
        Update(facility=path.name, directory=path, checkpoint=open_checkpoint(path), report=None, staleness=0)
        for path in paths
    ]
    return RowsOfUpdates(updates, open_checkpoint(sent), SHAPES)


def test_what_no_second_moments_are_is_its_facilitys_absence(tmp_path: Path):
    """Too few rows, or a negative one: found while the tensors stream by, the round is made without it."""
    _, base, updates, paths, _ = federation_of(tmp_path, "abc")
    for number, broken in enumerate(({"embed": np.ones(59, "f4")}, {"embed": np.full(60, -1.0, "f4")})):
        wrong = factors_of(0) | {name: Factors(rows, factors_of(0)[name].columns) for name, rows in broken.items()}
        shutil.rmtree(paths[0] / "second_moments")
        with_factors(paths[0], wrong)
        out = tmp_path / f"next{number}"
        record = aggregate(
            base=base, updates=paths, out=out, settings=AggregationSettings(rule="fisher"), drop_refused=True
        )
        assert list(record.dropped) == ["a"] and "second moments" in record.dropped["a"]
        assert [one.facility for one in record.participants] == ["b", "c"] and record.combiner == "fisher"


def test_of_a_late_update_that_was_not_moved_to_the_present_round_nothing_is_known(tmp_path: Path):
    """It began with other second moments than went out with the present model."""
    _, base, _, paths, squares = federation_of(tmp_path, "ab")
    late = Update(facility="a", directory=paths[0], checkpoint=open_checkpoint(paths[0]), report=None, staleness=1)
    there = dataclasses.replace(late, facility="b", directory=paths[1], staleness=0)
    seen = RowsOfUpdates([late, there], open_checkpoint(base), SHAPES).of("embed")
    assert seen is not None and not seen.values[0].any()
    assert np.allclose(seen.values[1], squares["b"]["embed"], rtol=1e-3)
