"""Rules through the whole step: files in, files out, against the same computed in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.aggregation import read_size
from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from facility.exchange.errors import InputError
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.reproductions.server_in_memory import Server

SHAPES = {"a.weight": (40, 50), "b.weight": (70_000,), "c.bias": (5,)}
FACILITIES = [f"f{i}" for i in range(7)]
COMBINED = [
    *(name for name in RULES.names() if name != "heloco"),
    *SERVER_OPTIMIZERS.names(),
    "median+nesterov",
    "heloco+nesterov",
]


def settings_of(rule: str, **more) -> AggregationSettings:
    return AggregationSettings(
        rule=rule, byzantine=1, weights="equal", server_learning_rate=0.7, heloco_staleness=0, **more
    )


@pytest.mark.parametrize("rule", COMBINED)
def test_two_rounds_over_files_are_two_rounds_in_memory(rule: str, tmp_path: Path):
    settings = settings_of(rule)
    server = Server(settings)
    tensors = make.random_tensors(0, SHAPES, torch.bfloat16)
    base, state = make.model(tmp_path / "m0", tensors), None
    for number in range(2):
        updates = {who: make.moved(tensors, 10 * number + i) for i, who in enumerate(FACILITIES)}
        paths = [
            make.update(tmp_path / f"{who}-{number}", update, base=base, facility=who)
            for who, update in updates.items()
        ]
        out, after = tmp_path / f"m{number + 1}", tmp_path / f"s{number + 1}"
        record = aggregate(base=base, updates=paths, out=out, settings=settings, state_in=state, state_out=after)
        tensors = server.step(tensors, updates, dict.fromkeys(FACILITIES, 1.0))
        got = make.read_all(out)
        for name in tensors:
            assert torch.equal(got[name], tensors[name]), name
        assert record.step_norm and record.step_norm > 0
        base, state = out, after


@pytest.mark.parametrize(("before", "now", "anew"), [("fedadagrad", "fedadam", 1), ("fedadam", "fedyogi", 0)])
def test_a_sum_of_squares_is_not_taken_over_as_a_mean(before: str, now: str, anew: int, tmp_path: Path):
    """Adagrad's second moment grows with the rounds: Adam and Yogi would divide by its root for a hundred more."""
    tensors = {"a.weight": torch.zeros(8)}
    moved = {"a.weight": torch.ones(8)}
    base, state = make.model(tmp_path / "m0", tensors), None
    for number, rule in enumerate((before, before, now)):
        update = make.update(tmp_path / f"u{number}", moved, base=base, facility="a")
        told = make.read_all(base)["a.weight"].double()
        out, after = tmp_path / f"m{number + 1}", tmp_path / f"s{number + 1}"
        kept, state = state, after
        settings = AggregationSettings(rule=rule, weights="equal", tau=0.1, beta2=0.5)
        aggregate(base=base, updates=[update], out=out, settings=settings, state_in=kept, state_out=after)
        base = out
    square = (1 - told) ** 2
    second = torch.full((8,), 0.01).double() if anew else make.read_all(kept / "second_moment")["a.weight"].double()
    if now == "fedadam":
        wanted = 0.5 * second + 0.5 * square
    else:
        wanted = second - 0.5 * square * torch.sign(second - square)
    assert torch.allclose(make.read_all(state / "second_moment")["a.weight"].double(), wanted, rtol=1e-3)


@pytest.mark.parametrize("rule", [rule for rule in COMBINED if "+" in rule or rule in RULES.names()])
def test_a_model_does_not_depend_on_how_much_is_read_at_once(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of many or wide sources half a piece is read at a time: as of sixteen updates in bfloat16 with momentum."""
    tensors = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(tmp_path / "m0", tensors)
    paths = [
        make.update(tmp_path / who, make.moved(tensors, i), base=base, facility=who) for i, who in enumerate(FACILITIES)
    ]
    found = []
    for most in (read_size.MOST_BYTES, 0):
        monkeypatch.setattr(read_size, "MOST_BYTES", most)
        out = tmp_path / f"of-{most}"
        aggregate(base=base, updates=paths, out=out, settings=settings_of(rule))
        found.append(make.read_all(out))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_heloco_turns_only_the_update_that_is_late(tmp_path: Path):
    """Two rounds over files; in the second, one update is of the round before. A plain loop in torch is the oracle."""
    settings = AggregationSettings(
        rule="heloco+nesterov",
        weights="equal",
        maximum_staleness=1,
        momentum_warmup=False,
        **make.UNBOUNDED,
    )
    start = make.random_tensors(0, SHAPES, torch.float32)
    m0 = make.model(tmp_path / "m0", start)
    first = {who: make.moved(start, i) for i, who in enumerate(("a", "b"))}
    paths = {who: make.update(tmp_path / f"{who}0", one, base=m0, facility=who) for who, one in first.items()}
    aggregate(base=m0, updates=paths, out=tmp_path / "m1", settings=settings, state_out=tmp_path / "s1")
    one = make.read_all(tmp_path / "m1")
    second = {"a": make.moved(one, 7), "late": make.moved(one, 8)}
    paths = {
        "a": make.update(tmp_path / "a1", second["a"], base=tmp_path / "m1", facility="a"),
        "late": make.update(tmp_path / "late", second["late"], base=tmp_path / "m1", facility="late", round=0),
    }
    record = aggregate(
        base=tmp_path / "m1",
        updates=paths,
        out=tmp_path / "m2",
        settings=settings,
        state_in=tmp_path / "s1",
        state_out=tmp_path / "s2",
    )
    assert record.details["turned"] == ["late"]
    got, turned = make.read_all(tmp_path / "m2"), 0
    shares = [1 / (1 + 2**-0.5), 2**-0.5 / (1 + 2**-0.5)]
    for name in SHAPES:
        velocity = sum((update[name] - start[name]).double() for update in first.values()) / 2
        step, late = (second["a"][name] - one[name]).double(), (second["late"][name] - one[name]).double()
        cosine = float((late * velocity).sum() / late.norm() / velocity.norm())
        confidence = float(late.norm() / (late.norm() + 3 * velocity.norm() + 1e-8))
        if cosine < 0:
            late = late - min(-0.5 * cosine * confidence, 0.5) * cosine * late.norm() * velocity / velocity.norm()
        elif cosine < 0.2:
            turn = min((1 - cosine) * confidence, 1)
            mixed = (1 - turn) * late / late.norm() + turn * velocity / velocity.norm()
            late = late.norm() * mixed / mixed.norm()
        turned += cosine < 0.2
        mean = shares[0] * step + shares[1] * late
        after = 0.8 * velocity + mean
        expected = one[name].double() + mean + 0.8 * after
        torch.testing.assert_close(got[name].double(), expected, rtol=0, atol=3e-7)
    assert turned


def attacked(kind: str) -> tuple[dict[str, dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Five facilities moving alike, one of them hostile; the base and the honest mean."""
    base = make.random_tensors(0, {"w": (3000,)}, torch.float32)["w"]
    direction = make.random_tensors(1, {"w": (3000,)}, torch.float32, 1e-2)["w"]
    steps = {
        f"f{i}": direction + make.random_tensors(2 + i, {"w": (3000,)}, torch.float32, 3e-3)["w"] for i in range(5)
    }
    honest = torch.stack([step for who, step in steps.items() if who != "f2"]).mean(0)
    steps["f2"] = {"scaled": 100 * steps["f2"], "flipped": -10 * steps["f2"]}[kind]
    return {who: {"w": base + step} for who, step in steps.items()}, base, honest


@pytest.mark.parametrize("kind", ["scaled", "flipped"])
def test_one_hostile_facility_of_five(kind: str):
    updates, base, honest = attacked(kind)
    distance = {}
    for rule in ("mean", "median", "trimmed_mean", "geometric_median", "krum", "multi_krum"):
        server = Server(
            AggregationSettings(rule=rule, byzantine=1, screen=ScreenSettings(action="report"), **make.UNBOUNDED)
        )
        step = server.step({"w": base}, updates, dict.fromkeys(updates, 1.0))["w"] - base
        distance[rule] = float((step - honest).norm() / honest.norm())
    assert distance.pop("mean") > 2
    assert max(distance.values()) < 0.5, distance


@pytest.mark.parametrize("kind", ["scaled", "flipped"])
def test_the_screen_names_the_hostile_one_and_quarantines_it(kind: str, tmp_path: Path):
    updates, base, honest = attacked(kind)
    model = make.model(tmp_path / "base", {"w": base})
    paths = [make.update(tmp_path / who, tensors, base=model, facility=who) for who, tensors in updates.items()]
    report = AggregationSettings(rule="mean", screen=ScreenSettings(action="report"))
    reported = aggregate(base=model, updates=paths, out=tmp_path / "reported", settings=report)
    assert list(reported.suspects) == ["f2"] and "times the median" in reported.suspects["f2"]
    settings = AggregationSettings(rule="mean", screen=ScreenSettings(action="quarantine"), **make.UNBOUNDED)
    record = aggregate(base=model, updates=paths, out=tmp_path / "screened", settings=settings)
    assert list(record.quarantined) == ["f2"] and len(record.participants) == 4
    step = make.read_all(tmp_path / "screened")["w"] - base
    assert float((step - honest).norm() / honest.norm()) < 1e-3


def test_a_screen_without_a_majority_stops(tmp_path: Path):
    base = make.random_tensors(0, {"w": (1000,)}, torch.float32)
    model = make.model(tmp_path / "base", base)
    one = make.moved(base, 1)["w"] - base["w"]
    paths = [
        make.update(tmp_path / f"f{i}", {"w": base["w"] + factor * one}, base=model, facility=f"f{i}")
        for i, factor in enumerate((1, 100, -1, -100))
    ]
    settings = AggregationSettings(rule="mean", screen=ScreenSettings(action="quarantine", norm_ratio=1.5))
    with pytest.raises(InputError, match="quarantine 4 of 4"):
        aggregate(base=model, updates=paths, out=tmp_path / "out", settings=settings)


def test_norms_and_cosines_in_the_record(tmp_path: Path):
    model = make.model(tmp_path / "base", {"w": torch.zeros(4)})
    steps = {"alpha": [3.0, 0, 0, 0], "beta": [0.0, 4, 0, 0]}
    paths = [
        make.update(tmp_path / who, {"w": torch.tensor(step)}, base=model, facility=who) for who, step in steps.items()
    ]
    record = aggregate(base=model, updates=paths, out=tmp_path / "out")
    alpha, beta = record.participants
    assert (alpha.norm, beta.norm, alpha.cosines, beta.cosines) == (3, 4, {"beta": 0}, {"alpha": 0})
    # mean (1.5, 2): length 2.5; cosines 1.5 / 2.5 and 2 / 2.5
    assert (record.mean_norm, record.step_norm) == (2.5, 2.5)
    assert (alpha.cosine_to_mean, beta.cosine_to_mean) == (0.6, 0.8)
    assert record.dtypes == {"F32 -> F32": "as in the base model; summed in float32, rounded once"}
    written = make.read_json(tmp_path / "out.round.json")
    assert written["participants"][0]["facility"] == "alpha" and written["seconds"]["stream"] > 0


@pytest.mark.parametrize("rule", [*(name for name in RULES.names() if name != "heloco"), "median+nesterov"])
def test_the_record_states_the_norm_of_the_masters_change(rule: str, tmp_path: Path):
    """Also where the step is added as it is and the rule works value by value, or tensor by tensor."""
    tensors = make.random_tensors(0, {**SHAPES, "norm.running_mean": (400,)}, torch.float32)
    base = make.model(tmp_path / "base", tensors)
    updates = {who: make.moved(tensors, i, scale=0.1) for i, who in enumerate(FACILITIES)}
    paths = [make.update(tmp_path / who, update, base=base, facility=who) for who, update in updates.items()]
    settings = AggregationSettings(rule=rule, byzantine=1)
    record = aggregate(base=base, updates=paths, out=tmp_path / "out", settings=settings, state_out=tmp_path / "state")
    master = make.read_all(tmp_path / "state" / "master")
    change = sum(float((master[name].double() - tensors[name].double()).square().sum()) for name in tensors) ** 0.5
    assert record.step_norm == pytest.approx(change, rel=1e-5)


def test_clipping_bounds_the_step(tmp_path: Path):
    model = make.model(tmp_path / "base", {"w": torch.zeros(4)})
    paths = [
        make.update(tmp_path / who, {"w": torch.tensor([size, 0, 0, 0])}, base=model, facility=who)
        for who, size in (("alpha", 1.0), ("beta", 10.0))
    ]
    record = aggregate(
        base=model, updates=paths, out=tmp_path / "out", settings=AggregationSettings(rule="mean", clip_norm=2.0)
    )
    assert make.read_all(tmp_path / "out")["w"].tolist() == [1.5, 0, 0, 0]
    assert record.details["clip_factors"] == {"alpha": 1.0, "beta": 0.2}


def test_clipping_comes_before_weighted_sums_that_differ_by_tensor(tmp_path: Path):
    model = make.model(tmp_path / "base", {"w": torch.zeros(4)})
    paths = [
        make.update(tmp_path / who, {"w": torch.tensor(step)}, base=model, facility=who)
        for who, step in (("alpha", [3.0, 4.0, 0.0, 0.0]), ("beta", [0.0, 0.0, 2.0, 0.0]))
    ]
    chosen = AggregationSettings(rule="radial_directional", clip_norm=2.5)
    record = aggregate(base=model, updates=paths, out=tmp_path / "out", settings=chosen)
    assert record.details["clip_factors"] == {"alpha": 0.5, "beta": 1.0}
    # lengths 2.5 and 2 after clipping: their mean, along the mean of two orthogonal directions
    expected = 2.25 * torch.tensor([0.6, 0.8, 1.0, 0.0]) / 2**0.5
    torch.testing.assert_close(make.read_all(tmp_path / "out")["w"], expected)
