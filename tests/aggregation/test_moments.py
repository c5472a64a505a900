"""Moments averaged value by value at the coordinator: the mean by a plain loop, its limits, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.moment_limits import LARGEST
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.delta import decode_update, encode_update
from facility.exchange.checkpoints.moments import (
    BLOCKS,
    FIRST,
    FOLDER,
    FULL,
    INT8,
    decoded,
    encoded,
    has_moments,
)
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from tests.aggregation.make import aggregate
from tests.aggregation.updates import write_update
from tests.moments import stored, with_moments
from tests.pico import save_pico

MEAN = AggregationSettings(rule="mean")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_pico(tmp_path / "model", dtype="bfloat16")
    write_manifest(path, Manifest(kind="model", federation="f", round=0))
    return path


@pytest.mark.parametrize("form", [FIRST, FULL, INT8, BLOCKS])
def test_the_mean_is_weighted_and_goes_out_with_the_model_in_the_same_form(
    form: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("facility.exchange.checkpoints.moments.PIECE_VALUES", 500)  # several pieces of a tensor
    a, b = (write_update(tmp_path / n, model, n, tokens=t) for n, t in (("a", 300), ("b", 100)))
    one, two = with_moments(a, form, seed=1), with_moments(b, form, seed=2, scale=1.5)
    for update in (a, b):
        check_update(update, open_checkpoint(model), read_manifest(model), update.name, 0)
    aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=MEAN)
    found = stored(tmp_path / "next")
    assert {*found.moments.values()} == {*one} and found.steps == 5
    for moment in one:
        mean = (0.75 * one[moment].astype(np.float64) + 0.25 * two[moment]).astype(np.float32)
        expected = decoded(form, encoded(form, mean)).reshape(mean.shape)
        assert np.allclose(found.read(moment, 0, moment.rows), expected, rtol=1e-6, atol=0), moment
    verify_manifest(tmp_path / "next")


def test_they_travel_with_encoded_updates(model: Path, tmp_path: Path):
    update = write_update(tmp_path / "a", model, "a")
    with_moments(update, INT8)
    encode_update(full=update, reference=model, out=tmp_path / "message", encoding="delta-int8")
    decode_update(tmp_path / "message", reference=model, out=tmp_path / "decoded")
    file = Path(FOLDER) / "model.safetensors"
    assert (tmp_path / "decoded" / file).read_bytes() == (update / file).read_bytes()
    check_update(tmp_path / "decoded", open_checkpoint(model), read_manifest(model), "a", 0)


def test_who_brings_none_takes_no_part_and_without_any_the_next_model_has_none(model: Path, tmp_path: Path):
    a, b = (write_update(tmp_path / n, model, n) for n in "ab")
    one = with_moments(a, FULL)
    aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=MEAN)
    found = stored(tmp_path / "next")
    assert all(np.array_equal(found.read(moment, 0, moment.rows), value) for moment, value in one.items())
    shutil.rmtree(a / FOLDER)
    write_manifest(a, read_manifest(a))
    aggregate(base=model, updates=[a, b], out=tmp_path / "later", settings=MEAN)
    assert not has_moments(tmp_path / "later")


@pytest.mark.parametrize("form", [FIRST, FULL])
def test_one_of_three_moves_the_mean_no_further_than_the_limit(form: str, model: Path, tmp_path: Path):
    updates = [write_update(tmp_path / n, model, n) for n in "abc"]
    honest = [with_moments(update, form, seed=seed) for seed, update in enumerate(updates[:2])]
    with_moments(updates[2], form, seed=2, scale=1e12)
    record = aggregate(base=model, updates=updates, out=tmp_path / "next", settings=MEAN)
    assert record.details["moments_scaled"] == {"c": len(honest[0])}
    found = stored(tmp_path / "next")
    for moment in honest[0]:
        sizes = [np.linalg.norm(one[moment]) if form == FIRST else one[moment].mean() for one in honest]
        assert found.size_of(moment) <= (LARGEST + 2) / 3 * max(sizes) * 1.01


def test_two_that_are_too_far_apart_are_not_shared(model: Path, tmp_path: Path):
    a, b = (write_update(tmp_path / n, model, n) for n in "ab")
    count = len(with_moments(a, FIRST))
    with_moments(b, FIRST, seed=1, scale=100.0)
    record = aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=MEAN)
    assert record.details["moments_apart"] == count and not has_moments(tmp_path / "next")


def test_two_that_take_unlike_steps_are_judged_by_what_each_has_kept(model: Path, tmp_path: Path):
    """One takes three times the other's steps; squares of both gradients are half of what they received."""
    received = with_moments(model, FULL)
    updates = [write_update(tmp_path / n, model, n) for n in "ab"]
    for update, kept in zip(updates, (0.8, 0.8**3), strict=True):
        with_moments(update, FULL, scale=kept + (1 - kept) / 2, kept=kept)
    record = aggregate(base=model, updates=updates, out=tmp_path / "next", settings=MEAN)
    assert "moments_apart" not in record.details and {*stored(tmp_path / "next").moments.values()} == {*received}


def test_what_is_left_of_received_second_moments_is_not_taken_away(model: Path, tmp_path: Path):
    """One of three that sends nothing in their place would let everybody's steps grow."""
    received = with_moments(model, FULL)
    updates = [write_update(tmp_path / n, model, n) for n in "abc"]
    for update, scale in zip(updates, (1.0, 1.0, 1e-6), strict=True):
        with_moments(update, FULL, scale=scale, kept=0.9)
    aggregate(base=model, updates=updates, out=tmp_path / "next", settings=MEAN)
    found = stored(tmp_path / "next")
    for moment, before in received.items():
        least = (2 + 0.9**3) / 3 * before
        assert (found.read(moment, 0, moment.rows) >= least * 0.999).all()


def test_the_form_that_most_have_counts(model: Path, tmp_path: Path):
    updates = [write_update(tmp_path / n, model, n) for n in "abc"]
    for seed, (update, form) in enumerate(zip(updates, (INT8, FULL, INT8), strict=True)):
        with_moments(update, form, seed=seed)
    aggregate(base=model, updates=updates, out=tmp_path / "next", settings=MEAN)
    assert {moment.form for moment in stored(tmp_path / "next").moments.values()} == {INT8}


def test_an_update_whose_moments_cannot_be_is_refused_by_name(model: Path, tmp_path: Path):
    b = write_update(tmp_path / "b", model, "b")
    with_moments(b, FIRST, scale=float("nan"))
    with pytest.raises(UpdateRefused, match="'b'.*moments"):
        check_update(b, open_checkpoint(model), read_manifest(model), "b", 0)
    a = write_update(tmp_path / "a", model, "a", move=0.01)
    record = aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=MEAN, drop_refused=True)
    assert [one.facility for one in record.participants] == ["a"]
