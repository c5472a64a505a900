"""One facility's fault or malice is its absence, told by name; what it claims does not outweigh the others."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import run as run_module
from coordinator.aggregation.adapters import settings_of
from coordinator.aggregation.outliers import screened
from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import InputError, UpdateRefused
from facility.exchange.files.durable import write_json
from facility.exchange.masking.weights import cap_weights
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import read_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate

SHAPES = {"layers.0.weight": (40, 30), "b.bias": (7,)}
MEAN = AggregationSettings(rule="mean")
LAYER = "base_model.model.layers.0.lora_{}.weight"


@pytest.fixture
def round0(tmp_path: Path) -> tuple[Path, dict[str, Path], make.Tensors]:
    """A model, the updates of x, y and z, and the model's tensors."""
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    moved = enumerate("xyz", start=1)
    return base, {f: make.update(tmp_path / f, make.moved(start, i), base=base, facility=f) for i, f in moved}, start


def adapters(directory: Path, base: Path, facility: str, rank: int = 2, seed: int = 0, alpha: float = 16.0) -> Path:
    shapes = {LAYER.format("A"): (rank, 30), LAYER.format("B"): (40, rank)}
    make.update(directory, make.random_tensors(seed, shapes, torch.float32), base=base, facility=facility)
    write_json(directory / "adapter_config.json", {"r": rank, "lora_alpha": alpha, "of": facility})
    write_manifest(directory, dataclasses.replace(read_manifest(directory), encoding="lora"))
    return directory


FAULTS = {
    "NaN": lambda t: t["b.bias"].fill_(float("nan")),
    "values of 3e38": lambda t: t["layers.0.weight"].fill_(3e38),
    "values of 1e30": lambda t: t["layers.0.weight"].fill_(1e30),
    "surplus tensors": lambda t: t.update({f"more.{i}": torch.zeros(16) for i in range(1000)}),
    "another shape": lambda t: t.update({"b.bias": torch.zeros(8, dtype=torch.bfloat16)}),
}


@pytest.mark.parametrize("rule", ["median", "nesterov"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_refused_is_dropped_by_name_and_the_others_make_the_mean(round0, tmp_path: Path, fault: str, rule: str):
    base, updates, start = round0
    tensors = {name: tensor.clone() for name, tensor in make.moved(start, 9).items()}
    FAULTS[fault](tensors)
    bad = make.update(tmp_path / "bad", tensors, base=base, facility="bad")
    settings = AggregationSettings(rule=rule)
    record = aggregate(
        base=base,
        updates=updates | {"bad": bad},
        out=tmp_path / "out",
        settings=settings,
        drop_refused=True,
        state_out=tmp_path / "state",
    )
    gone = record.dropped | record.quarantined  # 1e30 is a number: an outlier
    assert list(gone) == ["bad"] and [p.facility for p in record.participants] == ["x", "y", "z"]
    aggregate(base=base, updates=updates, out=tmp_path / "without", settings=settings)
    assert read_manifest(tmp_path / "out").content_sha256 == read_manifest(tmp_path / "without").content_sha256
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("change", ["cut short", "taken away"])
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_what_is_altered_as_it_is_read_is_dropped_by_name(
    round0, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, change: str
):
    """On storage that its facility shares: it ended the round for all."""
    base, updates, start = round0
    bad = make.update(tmp_path / "bad", make.moved(start, 9), base=base, facility="bad")
    (file,) = bad.glob("*.safetensors")
    plan = run_module.plan_round

    def altered(aggregation) -> None:
        plan(aggregation)
        if change == "cut short" and file.exists():
            os.truncate(file, file.stat().st_size - 100)
        if change == "taken away":
            file.unlink(missing_ok=True)

    monkeypatch.setattr(run_module, "plan_round", altered)
    settings = AggregationSettings(rule=rule)
    record = aggregate(
        base=base, updates=updates | {"bad": bad}, out=tmp_path / "out", settings=settings, drop_refused=True
    )
    assert list(record.dropped) == ["bad"] and "was altered as it was read" in record.dropped["bad"]
    assert [one.facility for one in record.participants] == ["x", "y", "z"] and not list(tmp_path.glob(".*"))


def test_too_few_that_are_left_is_an_error_with_the_reasons(round0, tmp_path: Path):
    base, updates, start = round0
    tensors = make.moved(start, 9)
    tensors["b.bias"].fill_(float("nan"))
    bad = make.update(tmp_path / "bad", tensors, base=base, facility="bad")
    for least in (1, 2):
        with pytest.raises(InputError, match="updates? (is|are) left, expected .*bad: tensor 'b.bias' holds NaN"):
            some = {"bad": bad} | ({"x": updates["x"]} if least == 2 else {})
            aggregate(base=base, updates=some, out=tmp_path / "out", drop_refused=True, minimum_updates=least)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_an_update_in_anothers_name_blames_whose_directory_it_is(round0, tmp_path: Path):
    base, updates, start = round0
    forged = make.update(tmp_path / "forged", make.moved(start, 9), base=base, facility="x")
    record = aggregate(base=base, updates=updates | {"mallory": forged}, out=tmp_path / "out", drop_refused=True)
    assert list(record.dropped) == ["mallory"] and [p.facility for p in record.participants] == ["x", "y", "z"]


@pytest.mark.parametrize(
    "told", [LoraSettings(rank=2, alpha=32.0), LoraSettings(rank=2, alpha=32.0, targets=["0"]), None]
)
def test_adapters_that_were_not_agreed_blame_who_sent_them(round0, tmp_path: Path, told: LoraSettings | None):
    base, updates, start = round0
    sent = {f: adapters(tmp_path / f"l{f}", base, f, seed=i, alpha=32.0) for i, f in enumerate("xyz")}
    # the first by name is hostile: it must not decide what the others are
    odd = {
        "a": adapters(tmp_path / "la", base, "a", rank=3),
        "b": make.update(tmp_path / "lb", make.moved(start, 1), base=base, facility="b"),
    }
    record = aggregate(
        base=base, updates=odd | sent, out=tmp_path / "out", settings=MEAN, adapters=told, drop_refused=True
    )
    assert sorted(record.dropped) == ["a", "b"] and [p.facility for p in record.participants] == ["x", "y", "z"]
    written = make.read_json(tmp_path / "out" / "adapter_config.json")
    assert (written["r"], written["lora_alpha"], "of" in written) == (2, 32.0, False)
    assert make.read_all(tmp_path / "out")[LAYER.format("A")].shape == (2, 30)


@pytest.mark.parametrize("kind", ["endless", "a pipe"])
def test_an_adapter_config_says_nothing_where_it_is_none_and_is_not_read_whole(tmp_path: Path, kind: str):
    if kind == "a pipe":
        os.mkfifo(tmp_path / "adapter_config.json")
    else:
        with open(tmp_path / "adapter_config.json", "wb") as file:
            file.truncate(1 << 40)
    checkpoint = SimpleNamespace(tensors={LAYER.format("A"): SimpleNamespace(shape=(2, 30))})
    found = settings_of([SimpleNamespace(directory=tmp_path, checkpoint=checkpoint)], None)
    assert (found.rank, found.alpha) == (2, 2.0)


def test_two_that_disagree_without_settings_blame_nobody(round0, tmp_path: Path):
    base, _, start = round0
    two = {
        "a": adapters(tmp_path / "la", base, "a"),
        "b": make.update(tmp_path / "lb", make.moved(start, 1), base=base, facility="b"),
    }
    with pytest.raises(InputError, match="no majority"):
        aggregate(base=base, updates=two, out=tmp_path / "out", drop_refused=True)
    record = aggregate(base=base, updates=two, out=tmp_path / "out", adapters=LoraSettings(), drop_refused=True)
    assert list(record.dropped) == ["a"]


def test_a_thousand_surplus_tensors_are_refused_at_once(round0, tmp_path: Path):
    """In CPU time that grows as their number does: comparing all with all took a hundred times that of a hundred."""
    base, _, start = round0

    def seconds(count: int) -> float:
        place, name = tmp_path / str(count), f"odd{count}"
        copies = {f"more.{i}": start["b.bias"].clone() for i in range(count)}  # each a twin of a tensor of the base
        many = make.update(place / "many", start | copies, base=base, facility="many")
        unlike = make.random_tensors(3, {f"more.{i}": (16,) for i in range(count)}, torch.float32)
        odd = make.update(place / name, start | unlike, base=base, facility=name)
        begun = time.process_time()
        check_update(many, open_checkpoint(base), read_manifest(base), "many", 0)
        with pytest.raises(UpdateRefused, match=f"'{name}'.*{count} unknown"):
            check_update(odd, open_checkpoint(base), read_manifest(base), name, 0)
        return time.process_time() - begun

    seconds(99)  # whatever is done once
    few, many = seconds(100), seconds(1000)
    assert many < 40 * few, (few, many)


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=12), st.floats(0.05, 1))
def test_no_share_exceeds_the_cap_and_all_shares_are_handed_out(raw: list[float], most: float):
    total = sum(raw)
    weights = [value / total for value in raw]
    shares = cap_weights(weights, most)
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= max(most, 1 / len(raw)) * (1 + 1e-9)
    if most * len(raw) > 1:
        free = [i for i, share in enumerate(shares) if share < most * (1 - 1e-9)]
        for i in free:  # in their old proportions
            assert shares[i] / shares[free[0]] == pytest.approx(weights[i] / weights[free[0]], rel=1e-6)
    if max(weights) <= most:
        assert shares == pytest.approx(weights)


def test_sixty_four_fold_tokens_do_not_outweigh_the_others(tmp_path: Path):
    base = make.model(tmp_path / "base", {"w": torch.zeros(4)})

    def of(count: int) -> list[Path]:
        steps = {"liar": (6400, torch.eye(4)[0])} | {f"f{i}": (100, torch.eye(4)[i]) for i in range(1, count)}
        folder = tmp_path / str(count)
        return [
            make.update(folder / who, {"w": step}, base=base, facility=who, tokens=tokens)
            for who, (tokens, step) in steps.items()
        ]

    three = aggregate(base=base, updates=of(3), out=tmp_path / "three", settings=MEAN)
    assert {p.facility: p.weight for p in three.participants} == {"f1": 0.25, "f2": 0.25, "liar": 0.5}
    assert three.details["capped_shares"] == {"liar": pytest.approx(6400 / 6600)}
    assert make.read_all(tmp_path / "three")["w"].tolist() == [0.5, 0.25, 0.25, 0]
    two = aggregate(base=base, updates=of(2), out=tmp_path / "two", settings=MEAN)  # no majority
    assert max(p.weight for p in two.participants) == 6400 / 6500 and "capped_shares" not in two.details


def test_by_default_steps_are_clipped_to_the_median_norm_and_far_outliers_left_out(tmp_path: Path):
    base = make.model(tmp_path / "base", {"w": torch.zeros(4)})
    sizes = {"a": 1.0, "b": 1.0, "c": 4.0, "far": 1000.0}
    updates = {
        who: make.update(tmp_path / who, {"w": size * torch.eye(4)[i]}, base=base, facility=who)
        for i, (who, size) in enumerate(sizes.items())
    }
    record = aggregate(base=base, updates=updates, out=tmp_path / "out", settings=MEAN)
    assert list(record.quarantined) == ["far"]
    assert record.details["clip_factors"] == {"a": 1.0, "b": 1.0, "c": 0.25}
    torch.testing.assert_close(make.read_all(tmp_path / "out")["w"], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]))
    two = {who: updates[who] for who in ("a", "far")}
    record = aggregate(base=base, updates=two, out=tmp_path / "two", settings=MEAN)
    assert list(record.suspects) == ["far"] and not record.quarantined and "clip_factors" not in record.details


@given(st.integers(3, 9), st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_honest_facilities_with_unlike_data_stay(count: int, seed: int, common: float):
    # nearly orthogonal steps, norms within a factor of three of each other, with or without a common direction
    draw = np.random.default_rng(seed)
    steps = draw.standard_normal((count, 2000)) + common * draw.standard_normal(2000)
    steps *= draw.uniform(0.6, 1.8, (count, 1))
    found = screened([str(i) for i in range(count)], steps @ steps.T, ScreenSettings())
    assert not found.quarantined and not found.suspects


@given(
    work=st.lists(st.floats(0.25, 4.0), min_size=2, max_size=9),
    grows=st.floats(0.5, 1.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_who_takes_more_steps_than_others_is_no_outlier(work: list[float], grows: float, seed: int):
    """A norm grows with the steps between their root and their number."""
    draw = np.random.default_rng(seed)
    steps = draw.standard_normal((len(work), 2000)) * draw.uniform(0.8, 1.25, (len(work), 1))
    steps *= np.array(work)[:, None] ** grows
    found = screened([str(i) for i in range(len(work))], steps @ steps.T, ScreenSettings(), work)
    assert not found.quarantined and not found.suspects


def test_who_moves_far_for_its_steps_is_an_outlier_still():
    draw = np.random.default_rng(0)
    steps, work = draw.standard_normal((4, 2000)), [0.25, 1.0, 4.0, 4.0]
    names = list("abcd")
    assert not screened(names, steps @ steps.T, ScreenSettings(), work).suspects
    steps[3] *= 200.0
    assert list(screened(names, steps @ steps.T, ScreenSettings(), work).quarantined) == ["d"]
    short = np.array([[1.0, 0], [1, 0], [16, 0]])  # two were held in their queues, one was not
    assert screened(["a", "b", "c"], short @ short.T, ScreenSettings()).quarantined
    assert not screened(["a", "b", "c"], short @ short.T, ScreenSettings(), [0.25, 0.25, 4.0]).suspects


@pytest.mark.parametrize("factor", [-1.0, -1.5, 30.0])
def test_a_turned_or_far_longer_one_is_left_out_of_three(factor: float):
    draw = np.random.default_rng(0)
    common = draw.standard_normal(2000)
    steps = common + 0.3 * draw.standard_normal((3, 2000))
    steps[2] = factor * common
    found = screened(["a", "b", "hostile"], steps @ steps.T, ScreenSettings())
    assert list(found.quarantined) == ["hostile"]


@pytest.mark.parametrize(("length", "suspect", "left_out"), [(4.9, [], []), (9.9, ["d"], []), (10.1, ["d"], ["d"])])
def test_by_default_what_is_longer_is_told_and_what_is_twice_as_long_as_that_is_left_out(
    length: float, suspect: list[str], left_out: list[str]
):
    steps = np.diag([1.0, 1.0, 1.0, length])
    found = screened(list("abcd"), steps @ steps.T, ScreenSettings())
    assert (list(found.suspects), list(found.quarantined)) == (suspect, left_out)


def test_half_of_all_are_not_left_out_by_default():
    steps = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 20.0]])
    found = screened(list("abcd"), steps @ steps.T, ScreenSettings())
    assert sorted(found.suspects) == ["c", "d"] and not found.quarantined
    five = np.vstack([steps, steps[:1]])
    assert sorted(screened(list("abcde"), five @ five.T, ScreenSettings()).quarantined) == ["c", "d"]


def test_half_of_all_are_refused_where_quarantine_was_asked_for():
    steps = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 20.0]])
    settings = ScreenSettings(action="quarantine")
    with pytest.raises(InputError, match=r"would quarantine 2 of 4 updates \(c: .*; d: "):
        screened(list("abcd"), steps @ steps.T, settings)
    five = np.vstack([steps, steps[:1]])
    assert sorted(screened(list("abcde"), five @ five.T, settings).quarantined) == ["c", "d"]


def test_of_two_updates_the_one_of_more_work_may_be_longer_by_as_much():
    settings = ScreenSettings()
    steps = np.diag([1.0, 2 * settings.norm_ratio])
    found = [[*screened(list("ab"), steps @ steps.T, settings, work).suspects] for work in (None, (1, 1), (1, 3))]
    assert found == [["b"], ["b"], []]


def test_what_is_too_short_is_reported_and_never_left_out_by_default():
    steps = np.diag([1.0, 1.0, 0.01])
    found = screened(list("abc"), steps @ steps.T, ScreenSettings(cosine_minimum=-1.0))
    assert [*found.suspects] == ["c"] and not found.quarantined


def test_without_a_limit_of_norms_directions_alone_leave_out():
    steps = np.array([[1.0, 0.0], [100.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert [*screened(list("abcd"), steps @ steps.T, ScreenSettings(norm_ratio=0.0)).quarantined] == ["d"]


def test_without_a_majority_nobody_is_left_out_by_default():
    steps = np.array([[1.0, 0], [1, 0], [-1, 0], [-1, 0]])
    found = screened(list("abcd"), steps @ steps.T, ScreenSettings())
    assert not found.quarantined
