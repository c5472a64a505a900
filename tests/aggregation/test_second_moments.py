"""Shared second moments at the coordinator: the weighted mean is sent with the next model; a misfit is rejected."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate import aggregate
from coordinator.aggregation.second_moments import LARGEST
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.delta import decode, encode
from facility.exchange.checkpoints.second_moments import Factors, has_factors, read_factors, write_factors
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from tests.aggregation.updates import write_update
from tests.pico import save_pico


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_pico(tmp_path / "model", dtype="bfloat16")
    write_manifest(path, Manifest(kind="model", federation="f", round=0))
    return path


def with_factors(update: Path, value: float, *, steps: float = 5.0, names: int = 0) -> Path:
    """Give every parameter of an update (the first `names`) second moments of one value; sign the manifest again."""
    factors = {}
    for name, entry in list(open_checkpoint(update).tensors.items())[: names or None]:
        width = entry.elements // entry.shape[0]
        columns = np.full(width, value, np.float32) if len(entry.shape) > 1 else None
        factors[name] = Factors(np.full(entry.shape[0], value, np.float32), columns)
    shutil.rmtree(update / "second_moments", ignore_errors=True)
    write_factors(update, factors, steps=steps)
    write_manifest(update, read_manifest(update))
    return update


def settings() -> AggregationSettings:
    return AggregationSettings(rule="mean")


def check(update: Path, model: Path, facility: str) -> None:
    check_update(update, open_checkpoint(model), read_manifest(model), facility, 0)


def test_the_mean_is_weighted_by_tokens_and_goes_out_with_the_model(model: Path, tmp_path: Path):
    a = with_factors(write_update(tmp_path / "a", model, "a", tokens=300), 1.0, steps=4)
    b = with_factors(write_update(tmp_path / "b", model, "b", tokens=100), 3.0, steps=8)
    for update in (a, b):
        check(update, model, update.name)
    aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=settings())
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    found, steps = read_factors(tmp_path / "next", shapes)
    assert found.keys() == shapes.keys() and steps == 6
    for one in found.values():
        assert np.allclose(one.rows, 1.5) and (one.columns is None or np.allclose(one.columns, 1.5))
    verify_manifest(tmp_path / "next")


def test_without_any_the_model_has_none_even_if_the_one_before_had(model: Path, tmp_path: Path):
    with_factors(model, 1.0)
    update = write_update(tmp_path / "a", model, "a")
    assert not has_factors(update)
    aggregate(base=model, updates=[update], out=tmp_path / "next", settings=settings())
    assert not has_factors(tmp_path / "next")


def test_who_brings_none_does_not_dilute_the_others(model: Path, tmp_path: Path):
    a = with_factors(write_update(tmp_path / "a", model, "a"), 2.0)
    b = write_update(tmp_path / "b", model, "b", tokens=900)
    aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=settings())
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    assert all(np.allclose(one.rows, 2.0) for one in read_factors(tmp_path / "next", shapes)[0].values())


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_no_optimizer_has_is_refused_by_name_and_the_others_go_on(model: Path, tmp_path: Path, value: float):
    a = write_update(tmp_path / "a", model, "a", move=0.01)
    b = with_factors(write_update(tmp_path / "b", model, "b", move=0.5), value)
    with pytest.raises(UpdateRefused, match="'b'.*second moments"):
        check(b, model, "b")
    record = aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=settings(), drop_refused=True)
    assert [one.facility for one in record.participants] == ["a"] and not has_factors(tmp_path / "next")


def test_they_travel_with_encoded_updates(model: Path, tmp_path: Path):
    update = with_factors(write_update(tmp_path / "a", model, "a"), 2.0)
    encode(full=update, reference=model, out=tmp_path / "message", encoding="delta-int8")
    decode(tmp_path / "message", reference=model, out=tmp_path / "decoded")
    stored = (update / "second_moments" / "model.safetensors").read_bytes()
    assert (tmp_path / "decoded" / "second_moments" / "model.safetensors").read_bytes() == stored


ATTACKS = {
    "freezes": (1e30, 1e30),
    "rows alone": (1e30, 0.0),
    "columns alone": (0.0, 1e30),
    "forty times": (80.0, 80.0),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_facilitys_second_moments_do_not_stop_or_carry_off_the_others(model: Path, tmp_path: Path, attack: str):
    """All facilities divide their steps by the root of the mean: 1e30 in it, and no weight moves any more."""
    updates = [with_factors(write_update(tmp_path / name, model, name), 2.0) for name in "ab"]
    bad = with_factors(write_update(tmp_path / "c", model, "c"), 1.0, steps=1e11)
    row, column = ATTACKS[attack]
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    factors = {
        name: Factors(one.rows * np.float32(row), None if one.columns is None else one.columns * np.float32(column))
        for name, one in read_factors(bad, shapes)[0].items()
    }
    shutil.rmtree(bad / "second_moments")
    write_factors(bad, factors, steps=1e11)
    write_manifest(bad, read_manifest(bad))
    record = aggregate(
        base=model, updates=[*updates, bad], out=tmp_path / "next", settings=settings(), drop_refused=True
    )
    found, steps = read_factors(tmp_path / "next", shapes)
    refused = attack.endswith("alone")
    assert list(record.dropped) == (["c"] if refused else []) and steps == 5
    expected = 2.0 if refused else (2 + 2 + LARGEST * 2) / 3
    for one in found.values():
        assert np.allclose(one.rows, expected) and (one.columns is None or np.allclose(one.columns, expected))
    assert record.details.get("second_moments_scaled", {}) == ({} if refused else {"c": len(shapes)})


def test_a_parameter_that_most_facilities_do_not_move_limits_nothing(model: Path, tmp_path: Path):
    moments = {"a": 0.0, "b": 0.0, "c": 3.0}
    updates = [with_factors(write_update(tmp_path / name, model, name), value) for name, value in moments.items()]
    aggregate(base=model, updates=updates, out=tmp_path / "next", settings=settings())
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    assert all(np.allclose(one.rows, 1.0) for one in read_factors(tmp_path / "next", shapes)[0].values())
