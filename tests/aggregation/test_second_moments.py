"""Shared second moments at the coordinator: the weighted mean is sent with the next model; a misfit is rejected."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from coordinator.aggregation.moment_limits import LARGEST, SLOWEST, agree, believed, fresh, least_share, most_of
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.delta import decode_update, encode_update
from facility.exchange.checkpoints.second_moments import (
    Factors,
    has_factors,
    kept_share,
    read_factors,
    write_factors,
)
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from tests.aggregation.make import aggregate
from tests.aggregation.updates import write_update
from tests.pico import save_pico


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_pico(tmp_path / "model", dtype="bfloat16")
    write_manifest(path, Manifest(kind="model", federation="f", round=0))
    return path


def with_factors(update: Path, value: float, *, steps: float = 5.0, names: int = 0, kept: float = 0.0) -> Path:
    """Give every parameter of an update (the first `names`) second moments of one value; sign the manifest again."""
    factors = {}
    for name, entry in list(open_checkpoint(update).tensors.items())[: names or None]:
        width = entry.elements // entry.shape[0]
        columns = np.full(width, value, np.float32) if len(entry.shape) > 1 else None
        factors[name] = Factors(np.full(entry.shape[0], value, np.float32), columns)
    shutil.rmtree(update / "second_moments", ignore_errors=True)
    write_factors(update, factors, steps=steps, kept=kept)
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
    encode_update(full=update, reference=model, out=tmp_path / "message", encoding="delta-int8")
    decode_update(tmp_path / "message", reference=model, out=tmp_path / "decoded")
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


KEPT = st.sampled_from([0.0, 0.5, 0.74, 0.97, 0.995])
"""Shares of the received moments that rounds of many and of few steps leave; 0: the first round."""


@settings_of_hypothesis(deadline=None, max_examples=100)
@given(
    kept=KEPT,
    received=st.floats(1e-8, 1e8),
    ratios=st.lists(st.floats(1 / 7, 7), min_size=2, max_size=5),
    level=st.floats(1e-3, 1e3),
)
def test_honest_second_moments_are_left_as_they_are(kept: float, received: float, ratios: list[float], level: float):
    """Whatever the gradients became since: 1e-3 to 1e3 times those before, and up to seven times the median's."""
    gradients = [received * level * one / median(ratios) for one in ratios]
    gradients = [one for one in gradients if received * level / 7 <= one <= 7 * received * level]
    means = [kept * received + (1 - kept) * one for one in gradients]
    before = received if kept else 0.0
    if len(means) >= 3:
        most = most_of(means, before, [kept] * len(means))
        assert most is not None and all(one <= most * (1 + 1e-9) for one in means)
    assert all(one >= least_share(kept) * before for one in means)
    if len(means) == 2 and max(gradients) < 9 * min(gradients):
        assert agree(means, before, [kept, kept])


@settings_of_hypothesis(deadline=None, max_examples=100)
@given(
    kept=st.floats(0.05, 0.995),
    received=st.floats(1e-8, 1e8),
    ratios=st.lists(st.floats(1 / 7, 7), min_size=2, max_size=5),
    level=st.floats(1e-3, 1e3),
    times=st.lists(st.floats(1, SLOWEST), min_size=5, max_size=5),
)
def test_honest_second_moments_after_unlike_steps_are_left_as_they_are(
    kept: float, received: float, ratios: list[float], level: float, times: list[float]
):
    """One takes `SLOWEST` times the steps of another, as where `rounds.steps` evens out unlike speeds."""
    gradients = [received * level * one / median(ratios) for one in ratios]
    shares = [kept**more for more in [1.0, *times]][: len(gradients)]
    means = [share * received + (1 - share) * one for share, one in zip(shares, gradients, strict=True)]
    if len(means) == 2:
        assert believed(shares) == shares
        assert agree(means, received, shares) or max(gradients) > 9 * min(gradients)
        return
    most = most_of(means, received, believed(shares))
    near = [mean for mean, one in zip(means, gradients, strict=True) if one <= 7 * median(gradients)]
    assert most is not None and all(one <= most * (1 + 1e-9) for one in near)


@pytest.mark.parametrize("facilities", [2, 3])
@pytest.mark.parametrize("kept", [0.74, 0.97])
@pytest.mark.parametrize("aim", ["freeze", "carry off"])
def test_round_upon_round_one_facility_moves_shared_second_moments_no_further_than_in_one(
    facilities: int, kept: float, aim: str
):
    """In every round it claims the most, or the least, that is accepted, and to have kept none of what it received. The
    others' gradients have a square of 1."""
    shared = 1.0
    for _ in range(200):
        honest, shares = [kept * shared + (1 - kept)] * (facilities - 1), believed([kept] * (facilities - 1) + [0.0])
        if facilities == 2:
            added = 0.999 * LARGEST if aim == "freeze" else 1.001 / LARGEST
            claimed, further = (shares[1] * shared + (1 - shares[1]) * one for one in (added, added**2))
            assert agree([honest[0], claimed], shared, shares)
            assert not agree([honest[0], further], shared, shares)
        else:
            high, low = most_of([*honest, 1e30], shared, shares), least_share(kept) * shared
            assert high is not None
            claimed = high if aim == "freeze" else low
        shared = (sum(honest) + claimed) / facilities
    assert (0.4 if facilities > 2 else 0.32) < shared <= LARGEST, f"steps are scaled by {shared**-0.5:.2f}"


@pytest.mark.parametrize(("before", "made"), [(5, 5), (30, 10), (2000, 300)])
def test_what_is_left_of_received_moments_is_what_adamw_leaves(before: int, made: int):
    """AdamW's own recurrence, corrected for its bias on the way in and out as `facility.training.state` does it."""
    beta2, received, gradient = 0.98, 3.0, 0.5
    moment = received * (1 - beta2**before)
    for _ in range(made):
        moment = beta2 * moment + (1 - beta2) * gradient
    sent, kept = moment / (1 - beta2 ** (before + made)), kept_share(beta2, before=before, steps=before + made)
    assert sent == pytest.approx(kept * received + (1 - kept) * gradient, rel=1e-9)
    assert fresh(sent, received, kept) == pytest.approx(gradient, rel=1e-6)
    assert kept_share(beta2, before=0, steps=made) == 0


def test_what_a_share_near_one_hides_is_not_believed():
    assert fresh(5.0, 1.0, 1.0) == 0 and not agree([1.0, 1e30], 1.0, [0.9, 1.0])
    assert agree([0.0, 0.0], 0.0, [0.0, 0.0]) and not agree([0.0, 1e30], 0.0, [0.0, 0.0])
    assert fresh(5.0, 0.0, 0.995) == 5 and most_of([1.0, 1.0, 1e30], 0.0, [0.995] * 3) == LARGEST, "none was received"
    assert agree([1.0, 9.0], 0.0, [1.0, 1.0]) and not agree([1.0, 11.0], 0.0, [0.995, 0.995])


@pytest.mark.parametrize("value", [1e30, 25.0, 0.0])
def test_two_facilities_too_far_apart_share_none_and_close_ones_do(model: Path, tmp_path: Path, value: float):
    a = with_factors(write_update(tmp_path / "a", model, "a"), 2.0)
    b = with_factors(write_update(tmp_path / "b", model, "b"), value)
    record = aggregate(base=model, updates=[a, b], out=tmp_path / "next", settings=settings())
    assert not has_factors(tmp_path / "next"), "each goes on with its own"
    assert record.details["second_moments_apart"] == len(open_checkpoint(model).tensors)


@pytest.mark.parametrize(("value", "expected"), [(1e30, (2 * 1.97 + 10) / 3), (0.0, (2 * 1.97 + 2 * 0.97**3) / 3)])
def test_a_later_round_is_judged_by_what_its_gradients_added(
    model: Path, tmp_path: Path, value: float, expected: float
):
    """Two facilities whose gradients' squares are 1 received 2 and kept 97 % of it."""
    with_factors(model, 2.0, steps=30)
    updates = [with_factors(write_update(tmp_path / name, model, name), 1.97, kept=0.97) for name in "ab"]
    updates.append(with_factors(write_update(tmp_path / "c", model, "c"), value, kept=0.1))
    record = aggregate(base=model, updates=updates, out=tmp_path / "next", settings=settings())
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    found, _ = read_factors(tmp_path / "next", shapes)
    assert record.details["second_moments_scaled"] == {"c": len(shapes)}
    assert all(np.allclose(one.rows, expected, rtol=1e-5) for one in found.values())


def test_two_that_take_unlike_steps_are_judged_by_what_each_has_kept(model: Path, tmp_path: Path):
    """One takes three times the other's steps; squares of both gradients are half of what they received."""
    with_factors(model, 2.0, steps=30)
    sent = {name: (2.0 * kept + 1.0 * (1 - kept), kept) for name, kept in (("a", 0.8), ("b", 0.8**3))}
    updates = [
        with_factors(write_update(tmp_path / name, model, name), value, kept=kept)
        for name, (value, kept) in sent.items()
    ]
    record = aggregate(base=model, updates=updates, out=tmp_path / "next", settings=settings())
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    found, _ = read_factors(tmp_path / "next", shapes)
    assert "second_moments_apart" not in record.details and found.keys() == shapes.keys()
    expected = sum(value for value, _ in sent.values()) / 2
    assert all(np.allclose(one.rows, expected, rtol=1e-5) for one in found.values())
