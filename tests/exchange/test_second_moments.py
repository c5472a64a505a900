"""Second moments as they travel: factors, their mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import (
    FOLDER,
    Factors,
    factors_of,
    mean_of,
    read_factors,
    write_factors,
)
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.settings import TrainingSettings
from facility.training.optimizers.protocol import optimizer_of
from facility.training.shards import LocalShard
from facility.training.state.second_moments import take_over
from tests.examples import examples

SHAPES = {"a.weight": (6, 4), "b.bias": (5,), "conv.weight": (3, 2, 2)}


def stored(directory: Path, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}
    directory.mkdir(exist_ok=True, parents=True)
    save_file(values, directory / "model.safetensors")
    return values


def test_factors_are_the_means_that_adafactor_keeps(tmp_path: Path):
    values = stored(tmp_path)
    entries = open_checkpoint(tmp_path).tensors
    for name, value in values.items():
        found = factors_of(entries[name], scale=2.0)
        flat = value.reshape(len(value), -1)
        if value.ndim == 1:
            assert found.columns is None and np.allclose(found.rows, 2 * value)
        else:
            assert np.allclose(found.rows, 2 * flat.mean(1)) and np.allclose(found.columns, 2 * flat.mean(0))


@settings(max_examples=examples(30), deadline=None)
@given(n=st.integers(1, 7), m=st.integers(1, 7), first=st.integers(0, 6), seed=st.integers(0, 99))
def test_a_matrix_of_rank_one_is_rebuilt_exactly_row_by_row(n: int, m: int, first: int, seed: int):
    rng = np.random.default_rng(seed)
    matrix = np.outer(rng.random(n) + 0.1, rng.random(m) + 0.1).astype(np.float32)
    factors = Factors(matrix.mean(1), matrix.mean(0))
    first = min(first, n - 1)
    assert np.allclose(factors.rebuilt(first, n - first), matrix[first:], rtol=1e-5)


def test_nothing_seen_is_rebuilt_as_nothing():
    assert not Factors(np.zeros(3, np.float32), np.zeros(2, np.float32)).rebuilt(0, 3).any()


def test_what_is_written_is_what_is_read(tmp_path: Path):
    stored(tmp_path / "state")
    entries = open_checkpoint(tmp_path / "state").tensors
    factors = {name: factors_of(entry) for name, entry in entries.items()}
    (tmp_path / "update").mkdir()
    write_factors(tmp_path / "update", factors, steps=12.5)
    found, steps = read_factors(tmp_path / "update", SHAPES)
    assert steps == 12.5 and found.keys() == factors.keys()
    for name, one in found.items():
        assert np.array_equal(one.rows, factors[name].rows)
        assert one.columns is None or np.array_equal(one.columns, factors[name].columns)


def test_the_mean_is_weighted_and_over_those_that_hold_a_parameter():
    one = {"x": Factors(np.array([1.0, 2.0], np.float32)), "y": Factors(np.array([8.0], np.float32))}
    two = {"x": Factors(np.array([3.0, 6.0], np.float32))}
    mean = mean_of([(one, 0.25), (two, 0.75)])
    assert np.allclose(mean["x"].rows, [2.5, 5.0]) and np.allclose(mean["y"].rows, [8.0])
    same = mean_of([(one, 0.2), (one, 0.5), (one, 0.3)])
    assert np.allclose(same["x"].rows, one["x"].rows), "copies of one average to itself"


@pytest.mark.parametrize(
    ("tensors", "steps"),
    [
        ({"a.weight::rows": np.ones(6), "a.weight::columns": np.ones(5)}, "1"),
        ({"a.weight::rows": np.ones(6)}, "1"),
        ({"a.weight::values": np.ones(6)}, "1"),
        ({"b.bias::values": np.ones(4)}, "1"),
        ({"b.bias::values": -np.ones(5)}, "1"),
        ({"b.bias::values": np.full(5, np.nan)}, "1"),
        ({"c::values": np.ones(5)}, "1"),
        ({"b.bias": np.ones(5)}, "1"),
        ({"b.bias::values": np.ones((5, 1))}, "1"),
        ({"b.bias::values": np.ones(5)}, "nan"),
        ({"b.bias::values": np.ones(5)}, "-3"),
        ({"b.bias::values": np.ones(5)}, "many"),
    ],
)
def test_factors_that_fit_no_parameter_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray], steps: str):
    (tmp_path / FOLDER).mkdir()
    values = {name: value.astype(np.float32) for name, value in tensors.items()}
    save_file(values, tmp_path / FOLDER / "model.safetensors", metadata={"steps": steps})
    with pytest.raises(CheckpointError):
        read_factors(tmp_path, SHAPES)


def optimizer_over(values: dict[str, torch.Tensor], first: dict[str, int]) -> tuple[Any, list[LocalShard]]:
    parts = []
    for name, value in values.items():
        parameter = torch.nn.Parameter(value)
        shape = (SHAPES[name][0], *value.shape[1:])
        parts.append(LocalShard(name=name, shape=shape, first=first[name], tensor=parameter, parameter=parameter))
    return optimizer_of(parts, TrainingSettings(beta1=0.9, beta2=0.95)), parts


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_takes_over_the_rows_that_it_holds(tmp_path: Path, rank: int):
    """Two ranks hold halves of the rows; the step that follows is AdamW's with the shared second moments."""
    stored(tmp_path / "state")
    entries = open_checkpoint(tmp_path / "state").tensors
    model = tmp_path / "model"
    model.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, model / "model.safetensors")
    factors = {name: factors_of(entry, 1 / (1 - 0.95**7)) for name, entry in entries.items()}
    write_factors(model, factors, steps=7)
    first = {name: rank * (shape[0] // 2) for name, shape in SHAPES.items()}
    halves = {name: torch.zeros(shape[0] // 2, *shape[1:]) for name, shape in SHAPES.items()}
    optimizer, parts = optimizer_over(halves, first)
    steps, brought = take_over(model, optimizer, parts, beta2=0.95, steps=4)
    assert steps == 4 and brought == SHAPES.keys()
    for part in parts:
        state = optimizer.state[part.tensor]
        expected = factors[part.name].rebuilt(part.first, len(part.tensor)) * (1 - 0.95**4)
        assert torch.allclose(state["exp_avg_sq"].flatten(), torch.from_numpy(expected).flatten())
        assert float(state["step"]) == 4
    fresh, parts = optimizer_over({name: value.clone() for name, value in halves.items()}, first)
    assert take_over(model, fresh, parts, beta2=0.95, steps=0)[0] == 7, "no state of its own: the others' step count"
